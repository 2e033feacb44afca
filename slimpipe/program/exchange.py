"""Who helps whom: for every tick and phase, which past tokens of which unit another rank attends to (design 1.4).

Slices are equal in tokens, not in attention work. Work is counted in *rows*: a unit's load is its past tokens plus half
its own slice, because its own block is causal. The own block never moves; past rows may, to any number of ranks, those
without a unit in the phase included. Loads are levelled: ranks above the mean hand the excess to ranks below it.

K,V rows are sent to a helper once per stage, microbatch and phase as long as it may hold them, so rows that a helper
holds are what it is given first; new ones are the lowest, which slices have in common for longest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slimpipe.program.cost import ExchangeCosts
from slimpipe.program.ir import Instruction, Op, Transfer, Unit
from slimpipe.program.runs import Runs, first_rows, intersect, num_rows, subtract, union

_LEVELS = (0.0, 0.25, 0.5, 0.75)
"""Where costs are known: levels to choose from, as shares of the way from the mean to the highest load."""

_WORTH_A_TRANSFER = 1.5
"""Slices of K,V that weigh about as much as all else that a transfer sends: queries and output forward, twice that
backward. Fewer held rows are no reason for one."""


class Load(NamedTuple):
    """Attention work of one rank in one phase of one tick, in past tokens plus half the own slice."""

    phase: str
    """"F" or "B"."""
    tick: int
    rank: int
    own: float
    """Of the unit that the rank runs; 0 without one."""
    computed: float
    """What it computes: the own work less what others take, or more by what it takes from others."""


def plan_exchange(
    computes: Sequence[Sequence[Instruction]],
    *,
    slice_len: int,
    granularity: int,
    max_held_rows: int,
    costs: ExchangeCosts | None = None,
) -> tuple[Transfer, ...]:
    """Plans all transfers of a step.

    Args:
        computes: Compute instructions by rank.
        slice_len: Tokens per slice.
        granularity: Tokens that move together; what moves are multiples of it, except at the end of a past.
        max_held_rows: Most K,V rows that one rank may hold for others from one tick to a later one, over all units.
        costs: If given, transfers that would cost more than they save are left out.

    Returns:
        Transfers in the order in which every rank sends, serves and receives them: by tick, phase, unit's rank, helper.
        No rank both hands over and takes over in one phase of one tick.
    """
    units: dict[tuple[int, bool], dict[int, Unit]] = defaultdict(dict)
    for rank, row in enumerate(computes):
        for instruction in row:
            units[instruction.tick, instruction.op is Op.BACKWARD][rank] = instruction.unit
    num_slices = 1 + max(unit.slice for running in units.values() for unit in running.values())
    held = _Held(max_held_rows)
    sent_share = 1.0
    if costs is not None:
        # A row that is sent once serves at many ticks, and each of them is charged its part.
        unlimited = plan_exchange(
            computes, slice_len=slice_len, granularity=granularity, max_held_rows=max_held_rows, costs=None
        )
        moved = sum(num_rows(transfer.rows) for transfer in unlimited)
        sent_share = sum(num_rows(transfer.sent) for transfer in unlimited) / max(1, moved)
    transfers: list[Transfer] = []
    for (tick, backward), running in sorted(units.items(), key=lambda moment: moment[0]):
        phase = Op.BACKWARD if backward else Op.FORWARD
        moment = _Moment(phase, running, len(computes), slice_len, granularity)
        moves = _best_moves(moment, held, costs, sent_share)
        for (owner, helper), rows in sorted(moves.items()):
            sent = held.take(helper, running[owner], phase, rows)
            transfers.append(Transfer(tick, phase, running[owner], helper, rows, sent, ()))
        for unit in running.values():
            held.forget(unit, phase, slice_len=slice_len, num_slices=num_slices)
    return tuple(_with_drops(transfers))


def loads(computes: Sequence[Sequence[Instruction]], transfers: Sequence[Transfer], *, slice_len: int) -> list[Load]:
    """One row for every rank in each phase of each tick in which any rank has a unit."""
    own: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0] * len(computes))
    for rank, row in enumerate(computes):
        for tick, op, unit, _ in row:
            if op in (Op.FORWARD, Op.BACKWARD):
                own[tick, op.value][rank] = _load(unit, slice_len)
    computed = {moment: list(row) for moment, row in own.items()}
    for transfer in transfers:
        row_ = computed[transfer.tick, transfer.phase.value]
        row_[transfer.unit.stage % len(computes)] -= num_rows(transfer.rows)
        row_[transfer.helper] += num_rows(transfer.rows)
    return [
        Load(phase, tick, rank, *pair)
        for tick, phase in sorted(own, key=lambda moment: (moment[0], moment[1] == Op.BACKWARD.value))
        for rank, pair in enumerate(zip(own[tick, phase], computed[tick, phase], strict=True))
    ]


def _load(unit: Unit, slice_len: int) -> float:
    return unit.slice * slice_len + slice_len / 2


@dataclass(frozen=True)
class _Moment:
    """One phase of one tick."""

    phase: Op
    running: dict[int, Unit]
    """Each rank's unit; a rank without one is missing."""
    num_ranks: int
    slice_len: int
    granularity: int

    def loads(self) -> list[float]:
        units = [self.running.get(rank) for rank in range(self.num_ranks)]
        return [0.0 if unit is None else _load(unit, self.slice_len) for unit in units]

    def past(self, rank: int) -> Runs:
        stop = self.running[rank].slice * self.slice_len
        return ((0, stop),) if stop else ()


_Moves = dict[tuple[int, int], Runs]
"""Rows that move, by owner and helper."""


class _Held:
    """K,V rows that helpers hold, by phase, microbatch and stage, and then by helper."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._total: Counter[int] = Counter()
        self._rows: dict[tuple[Op, int, int], dict[int, Runs]] = defaultdict(dict)

    def rows(self, helper: int, unit: Unit, phase: Op) -> Runs:
        return self._rows[phase, unit.microbatch, unit.stage].get(helper, ())

    def take(self, helper: int, unit: Unit, phase: Op, rows: Runs) -> Runs:
        """Hold ``rows``, as many as may be; returns those that are new."""
        before = self.rows(helper, unit, phase)
        new = subtract(rows, before)
        kept = first_rows(new, self._max_rows - self._total[helper])
        self._total[helper] += num_rows(kept)
        self._rows[phase, unit.microbatch, unit.stage][helper] = union(before, kept)
        return new

    def forget(self, unit: Unit, phase: Op, *, slice_len: int, num_slices: int) -> None:
        """Rows that no unit of the same microbatch and stage after this one has in its past."""
        if phase is Op.FORWARD and unit.slice < num_slices - 1:
            return
        useful = ((0, (unit.slice - 1) * slice_len),) if phase is Op.BACKWARD and unit.slice > 1 else ()
        by_helper = self._rows[phase, unit.microbatch, unit.stage]
        for helper, runs in by_helper.items():
            by_helper[helper] = intersect(runs, useful)
            self._total[helper] -= num_rows(runs) - num_rows(by_helper[helper])
        if not useful:
            del self._rows[phase, unit.microbatch, unit.stage]


def _best_moves(moment: _Moment, held: _Held, costs: ExchangeCosts | None, sent_share: float) -> _Moves:
    """The moves that level the loads; where costs are known, those after which the phase is over first."""
    before = moment.loads()
    mean, highest = sum(before) / len(before), max(before)
    if costs is None:
        return _moves(moment, held, mean)
    best, least = {}, highest * costs.seconds_per_row(moment.phase)
    for share in _LEVELS:
        moves = _moves(moment, held, mean + share * (highest - mean))
        seconds = _seconds(moment, moves, costs, sent_share)
        if seconds < least:
            best, least = moves, seconds
    return best


def _seconds(moment: _Moment, moves: _Moves, costs: ExchangeCosts, sent_share: float) -> float:
    """Of the busiest rank, in one layer: its attention, then its messages."""
    computed = moment.loads()
    messages = [0.0] * len(computed)
    for (owner, helper), rows in moves.items():
        count = num_rows(rows)
        computed[owner] -= count
        computed[helper] += count
        for rank in (owner, helper):
            messages[rank] += costs.message_seconds(moment.phase, num_sent_rows=sent_share * count)
    return max(computed) * costs.seconds_per_row(moment.phase) + max(messages)


def _moves(moment: _Moment, held: _Held, level: float) -> _Moves:
    """Brings every rank to ``level`` as nearly as granularity and own blocks allow."""
    before, step = moment.loads(), moment.granularity
    level = max(level, moment.slice_len / 2)  # below that nothing is gained: an own block does not move
    excess = {
        rank: min(round((load - level) / step) * step, num_rows(moment.past(rank)))
        for rank, load in enumerate(before)
        if load > level
    }
    room = {rank: level - load for rank, load in enumerate(before) if load < level}
    moves: _Moves = {}
    taken: dict[int, Runs] = dict.fromkeys(excess, ())

    def move(owner: int, helper: int, candidates: Runs, count: int) -> None:
        rows = first_rows(candidates, count)
        moves[owner, helper] = union(moves.get((owner, helper), ()), rows)
        taken[owner] = union(taken[owner], rows)
        excess[owner] -= num_rows(rows)
        room[helper] -= num_rows(rows)

    # Rows that a helper holds, the largest share first; a small share is not worth its messages.
    offers = {}
    for owner in excess:
        for helper in room:
            rows = intersect(held.rows(helper, moment.running[owner], moment.phase), moment.past(owner))
            if rows:
                offers[owner, helper] = rows
    while offers:
        counts = {}
        for (owner, helper), rows in list(offers.items()):
            count = min(num_rows(rows), excess[owner], int(room[helper] // step) * step)
            if count >= min(_WORTH_A_TRANSFER * moment.slice_len, max(1, excess[owner])):
                counts[owner, helper] = count
            else:
                del offers[owner, helper]
        if not counts:
            break
        owner, helper = max(counts, key=lambda pair: (counts[pair], -pair[0], -pair[1]))
        move(owner, helper, offers.pop((owner, helper)), counts[owner, helper])
        for (other, its_helper), rows in offers.items():
            if other == owner:
                offers[other, its_helper] = subtract(rows, taken[owner])
    # Then new ones, from the highest load to the lowest, which takes few transfers.
    while excess and room:
        owner = max(excess, key=lambda rank: (excess[rank], -rank))
        helper = max(room, key=lambda rank: (room[rank], -rank))
        fits = round(room[helper] / step) * step
        over = before[owner] - num_rows(taken[owner]) - level
        if fits == 0 and step - room[helper] < over:
            fits = step  # or all that does not fit into many small rooms would stay with one owner
        count = min(excess[owner], fits)
        if count <= 0:
            break
        move(owner, helper, subtract(moment.past(owner), taken[owner]), count)
    return moves


def _with_drops(transfers: list[Transfer]) -> Iterator[Transfer]:
    """Lets every row go after its last use before it is sent again, if ever."""
    needed: dict[tuple[int, Op, int, int], Runs] = defaultdict(tuple)
    finished: list[Transfer] = []
    for transfer in reversed(transfers):
        key = transfer.helper, transfer.phase, transfer.unit.microbatch, transfer.unit.stage
        finished.append(transfer._replace(dropped=subtract(transfer.rows, needed[key])))
        needed[key] = subtract(union(needed[key], transfer.rows), transfer.sent)
    return reversed(finished)
