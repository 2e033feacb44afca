"""Proof that the exchange of a program can be run and changes nothing but who computes what.

A unit's attention is complete if every past token is computed once: the rows of its transfers, of which no two share a
token, by the helpers, all others by its owner. That all ranks work through their transfers in one order, tick by tick
and phase by phase, is the order of messages of each communicator.
"""

from __future__ import annotations

from collections import defaultdict

from slimpipe.program.ir import Op, Transfer, Unit
from slimpipe.program.program import Program, ProgramError
from slimpipe.program.runs import Runs, intersect, num_rows, subtract, union

Moment = tuple[int, Op]
"""A tick and one of its two phases."""


def check_exchange(program: Program) -> None:
    """Proves the transfers of a program and the instructions to help.

    Guarantees that transfers come by tick, phase, unit's rank and helper, one each; that no rank both hands over and
    takes over in one phase of one tick; that the owner runs the unit there, and the helper its own or an instruction to
    help, once; that helpers compute on past tokens of the unit, no token twice; that they hold the K,V of those, which
    they are sent no more than once before they let them go; and that they let go of all. In backward they return dK,dV
    when they let go: at an earlier tick than the owner needs them, because the slices of a stage run backward from the
    last to the first, and the rows of a transfer are of earlier slices than its unit.

    Raises:
        ProgramError: at the first rule that is broken.
    """
    _check_order(program)
    _check_instructions(program)
    _check_rows(program)
    _check_held(program)


def meetings(program: Program) -> dict[tuple[int, Moment], frozenset[int]]:
    """For each rank and moment with transfers: all ranks that wait for one another there, because they are joined by
    transfers, directly or through others."""
    met: dict[tuple[int, Moment], frozenset[int]] = {}
    for transfer in program.transfers:
        moment = transfer.tick, transfer.phase
        joined: frozenset[int] = frozenset()
        for rank in (program.rank_of(transfer.unit.stage), transfer.helper):
            joined |= met.get((rank, moment), frozenset({rank}))
        met.update(((rank, moment), joined) for rank in joined)
    return met


def _check_order(program: Program) -> None:
    """One total order; a rank is on one side only in a moment."""
    previous = None
    sides: dict[tuple[int, Moment], str] = {}
    for transfer in program.transfers:
        tick, phase, unit, helper, *_ = transfer
        owner = program.rank_of(unit.stage)
        if not 0 <= helper < program.num_ranks or helper == owner:
            raise ProgramError(f"rank {owner}: {transfer}: the helper must be another of {program.num_ranks} ranks")
        place = tick, phase is Op.BACKWARD, owner, helper
        if previous is not None and place <= previous:
            raise ProgramError(
                f"rank {owner}: {transfer}: comes after one of tick {previous[0]} from rank {previous[2]} to rank "
                f"{previous[3]}; transfers come by tick, phase, unit's rank and helper, one each"
            )
        previous = place
        for rank, side in ((owner, "hand over"), (helper, "take over")):
            if sides.setdefault((rank, (tick, phase)), side) != side:
                raise ProgramError(f"rank {rank}: {transfer}: in this phase it would both hand over and take over")


def _check_instructions(program: Program) -> None:
    """Owners run the unit at that moment. So do helpers with one of their own, or they are told once to help."""
    runs: dict[tuple[int, int, Op | None], Unit] = {
        (rank, tick, op): unit
        for rank, row in enumerate(program.instructions)
        for tick, op, unit, _ in row
        if op in (Op.FORWARD, Op.BACKWARD)
    }
    to_help: dict[tuple[int, int, Op | None], Transfer] = {}
    for transfer in program.transfers:
        owner = program.rank_of(transfer.unit.stage)
        if runs.get((owner, transfer.tick, transfer.phase)) != transfer.unit:
            raise ProgramError(f"rank {owner}: {transfer}: it does not run the unit there")
        at = transfer.helper, transfer.tick, transfer.phase
        if at not in runs:
            to_help.setdefault(at, transfer)
    for rank, row in enumerate(program.instructions):
        for instruction in row:
            if instruction.op not in (Op.HELP_FORWARD, Op.HELP_BACKWARD):
                continue
            at_ = rank, instruction.tick, instruction.op.phase
            if at_ in runs:
                raise ProgramError(f"rank {rank}: {instruction}: it has a unit of its own there, {runs[at_]}")
            first = to_help.pop(at_, None)
            if first is None:
                raise ProgramError(f"rank {rank}: {instruction}: there is no transfer to it, or it helps there already")
            if first.unit != instruction.unit:
                raise ProgramError(f"rank {rank}: {instruction}: the first that it helps there is {first.unit}")
    for (rank, _, _), transfer in to_help.items():
        raise ProgramError(f"rank {rank}: {transfer}: it has no instruction there, neither a unit nor to help")


def _check_rows(program: Program) -> None:
    """Rows are past tokens of the unit, no token goes to two helpers; what is sent and dropped is part of them."""
    taken: dict[tuple[int, Op, Unit], Runs] = defaultdict(tuple)
    for transfer in program.transfers:
        tick, phase, unit, _, rows, sent, dropped = transfer
        where = f"rank {program.rank_of(unit.stage)}: {transfer}"
        for name, runs in (("rows", rows), ("sent", sent), ("dropped", dropped)):
            edges = [edge for run in runs for edge in run]
            if any(start >= stop for start, stop in zip(edges, edges[1:])):
                raise ProgramError(f"{where}: {name} = {runs}: runs must be sorted, not empty, and not touch")
        past = unit.slice * program.slice_len
        if not rows or rows[0][0] < 0 or rows[-1][1] > past:
            raise ProgramError(f"{where}: rows = {rows}: they must be some of the unit's {past} past tokens")
        for name, runs in (("sent", sent), ("dropped", dropped)):
            if others := subtract(runs, rows):
                raise ProgramError(f"{where}: {name} rows {others} are not among its rows")
        if twice := intersect(rows, taken[tick, phase, unit]):
            raise ProgramError(f"{where}: rows {twice} are computed by another helper too")
        taken[tick, phase, unit] = union(rows, taken[tick, phase, unit])


def _check_held(program: Program) -> None:
    """Helpers hold what they compute on, are not sent what they hold, and hold nothing in the end."""
    held: dict[tuple[int, Op, int, int], Runs] = defaultdict(tuple)
    for transfer in program.transfers:
        _, phase, (microbatch, stage, _), helper, rows, sent, dropped = transfer
        of = helper, phase, microbatch, stage
        if again := intersect(sent, held[of]):
            raise ProgramError(f"rank {helper}: {transfer}: is sent rows {again}, which it holds")
        held[of] = union(held[of], sent)
        if missing := subtract(rows, held[of]):
            raise ProgramError(f"rank {helper}: {transfer}: computes on rows {missing}, which it does not hold")
        held[of] = subtract(held[of], dropped)
    for (helper, phase, microbatch, stage), runs in held.items():
        if runs:
            raise ProgramError(
                f"rank {helper}: holds {num_rows(runs)} rows of microbatch {microbatch}, stage {stage} "
                f"({phase.name.lower()}) at the end of the step"
            )
