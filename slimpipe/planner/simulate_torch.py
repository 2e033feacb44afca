"""Torch's own schedules in simulated time, from the orders that torch itself makes: whole microbatches, to compare.

Single-stage schedules (1F1B, GPipe) tell only what they compute; they post a receive when they need it. The orders of
the others say where receives are posted and sends start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from slimpipe.nearest import nearest_name
from slimpipe.planner.costs import OpCosts
from slimpipe.planner.machine import Machine, Process, Signal, Wire
from slimpipe.planner.timeline import Span, Timeline
from slimpipe.program.ir import Unit
from slimpipe.program.program import ProgramError
from slimpipe.schedule_names import ONE_STAGE_PER_RANK, TORCH_SCHEDULES, TWO_STAGES_PER_RANK

if TYPE_CHECKING:
    from slimpipe.torch_private import Action

_Order = Mapping[int, Sequence["Action | None"]]
_Message = tuple[str, int, int]
"""Forward or backward, the stage that receives it, microbatch."""


def torch_order(
    schedule: str, *, num_ranks: int, num_stages_per_rank: int, num_microbatches: int
) -> dict[int, list[Action | None]]:
    """The order of one of torch's schedules, by rank; with messages where torch plans them ahead. Needs torch.

    Raises:
        ValueError: No such schedule, or a shape that it does not serve.
    """
    if schedule not in TORCH_SCHEDULES:
        nearest = nearest_name(schedule, TORCH_SCHEDULES)
        raise ValueError(f"schedule {schedule!r}: it must be one of {', '.join(TORCH_SCHEDULES)}; nearest: {nearest!r}")
    fixed = 1 if schedule in ONE_STAGE_PER_RANK else 2 if schedule in TWO_STAGES_PER_RANK else None
    least = 1 if fixed == 1 else 2
    if num_stages_per_rank < least or (fixed is not None and num_stages_per_rank != fixed):
        raise ValueError(
            f"num_stages_per_rank = {num_stages_per_rank}: {schedule} has {fixed or 'at least 2'} per rank; nearest "
            f"legal value: {fixed or least}"
        )
    if schedule == "1F1B" and num_microbatches < num_ranks:
        raise ValueError(
            f"num_microbatches = {num_microbatches}: torch's 1F1B needs at least one for each of the {num_ranks} "
            f"ranks; nearest legal value: {num_ranks}"
        )
    from slimpipe.torch_private import schedule_actions

    try:
        rows = schedule_actions(
            schedule,
            num_ranks=num_ranks,
            num_stages_per_rank=num_stages_per_rank,
            num_microbatches=num_microbatches,
            with_messages=fixed != 1,
        )
    except (AssertionError, ValueError) as error:
        raise ValueError(f"torch's {schedule} refuses {num_microbatches} microbatches: {error}") from error
    return dict(enumerate(rows))


def simulate_torch(order: _Order, costs: OpCosts, *, title: str = "torch") -> Timeline:
    """Simulates one step.

    Args:
        order: What `torch_order` returns: torch's actions by rank.
        costs: What everything takes; a unit is a whole microbatch (`OpCosts.whole`).
        title: Name of the timeline.

    Raises:
        ProgramError: The ranks wait for one another in a circle; names ranks and actions.
        ValueError: The costs are of another number of stages.
    """
    rows = {rank: list(_actions(row)) for rank, row in order.items()}
    rank_of = {stage: rank for rank, row in rows.items() for stage, *_ in row}
    if len(rank_of) != costs.num_stages:
        raise ValueError(
            f"the costs are of {costs.num_stages} stages, the order has {len(rank_of)}; give one entry for each"
        )
    machine = Machine(costs.alone_speed)
    wire = Wire(machine, costs.link)
    has_messages = any(kind.startswith("SEND") for row in rows.values() for _, kind, _ in row)
    ranks = [_Rank(rank, rows[rank], rank_of, costs, machine, wire, has_messages) for rank in sorted(rows)]
    for rank in ranks:
        machine.start(rank.run())
    machine.run()
    if stuck := [f"rank {rank.rank} at {rank.at}" for rank in ranks if not rank.ended]:
        raise ProgramError(f"the ranks wait for one another: {'; '.join(stuck)}")
    spans = tuple(span for rank in ranks for span in rank.spans) + tuple(wire.spans)
    return Timeline(title, len(ranks), 1, len(rank_of) // len(ranks), spans)


_Step = tuple[int, str, int]
"""Stage, one of `_KINDS`, microbatch."""
_KINDS = ("F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B")


def _actions(row: Sequence[Action | None]) -> Iterator[_Step]:
    """What takes part in a step, in order, without what belongs to data parallelism."""
    for action in row:
        for part in () if action is None else action.sub_actions or (action,):
            kind = part.computation_type.value
            if kind in _KINDS:
                assert part.microbatch_index is not None
                yield part.stage_index, kind, part.microbatch_index


class _Rank:
    """One rank's runtime."""

    def __init__(
        self,
        rank: int,
        row: list[_Step],
        rank_of: dict[int, int],
        costs: OpCosts,
        machine: Machine,
        wire: Wire,
        has_messages: bool,
    ) -> None:
        self.rank, self.at, self.ended = rank, "", False
        self.spans: list[Span] = []
        self._row, self._rank_of, self._costs, self._machine, self._wire = row, rank_of, costs, machine, wire
        self._has_messages = has_messages
        self._received: dict[_Message, Signal] = {}
        self._sends: list[Signal] = []

    def run(self) -> Process:
        """Every action, then the end of all sends."""
        for index, (stage, kind, microbatch) in enumerate(self._row):
            self.at = f"{stage}{kind}{microbatch}"
            if self._costs.host_seconds:
                yield self._costs.host_seconds
            if kind.startswith("RECV"):
                self._receive((kind[-1], stage, microbatch), index)
            elif kind.startswith("SEND"):
                self._send(kind[-1], stage, microbatch, index)
            else:
                yield from self._compute(stage, kind, microbatch, index)
        self.at = "the end of its step"
        yield from self._sends
        self.ended = True

    def _compute(self, stage: int, kind: str, microbatch: int, index: int) -> Process:
        start = self._machine.now
        direction = "F" if kind == "F" else "B"
        source = stage + (-1 if kind == "F" else 1)
        if kind != "W" and self._rank_of.get(source, self.rank) != self.rank:
            message = direction, stage, microbatch
            if not self._has_messages:
                self._receive(message, index)
            if message not in self._received:
                raise ProgramError(f"rank {self.rank}: {self.at}: nothing was received for it")
            yield self._received.pop(message)
        begin = self._machine.now
        unit = Unit(microbatch, stage, 0)
        yield self._seconds(kind, unit)
        self.spans.append(Span(self.rank, kind, start, self._machine.now, unit, index, begin - start))
        destination = stage + (1 if kind == "F" else -1)
        if kind != "W" and not self._has_messages and self._rank_of.get(destination, self.rank) != self.rank:
            self._send(direction, stage, microbatch, index)

    def _seconds(self, kind: str, unit: Unit) -> float:
        costs = self._costs
        if kind == "F":
            return costs.forward_seconds(unit)
        whole = costs.backward_seconds(unit)
        if kind == "B":
            return whole
        # Linear layers take as long for their weights' gradients as for their inputs'; attention has no weights.
        is_last = unit.stage == costs.num_stages - 1
        weights = (costs.linear_backward[unit.stage] + (costs.head_backward if is_last else 0.0)) / 2
        return weights if kind == "W" else whole - weights

    def _receive(self, message: _Message, index: int) -> None:
        direction, stage, microbatch = message
        source = self._rank_of[stage + (-1 if direction == "F" else 1)]
        self._received[message] = self._wire.receive(message, source, self.rank, Unit(microbatch, stage, 0), index)

    def _send(self, direction: str, stage: int, microbatch: int, index: int) -> None:
        to = stage + (1 if direction == "F" else -1)
        message, unit = (direction, to, microbatch), Unit(microbatch, stage, 0)
        num_bytes = self._costs.activation_bytes
        self._sends.append(self._wire.send(message, self.rank, self._rank_of[to], num_bytes, unit, index))
