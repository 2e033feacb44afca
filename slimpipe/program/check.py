"""Proof that a program can be run and is the schedule it claims to be.

Each rule below reads the instructions and knows nothing of how `build_program` made them. Rules that come later rely on
those before: a program that is complete is looked at for order, one whose order is right is run, one that runs is held
against the schedule's formulas.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from slimpipe.program.check_exchange import Moment, check_exchange, meetings
from slimpipe.program.check_vocabulary import check_vocabulary
from slimpipe.program.ir import COMPUTE_OF, MAX_UNMATCHED_SENDS, RECEIVE_OF, SEND_OF, Channel, Instruction, Op, Unit
from slimpipe.program.order import backward_tick, forward_tick, live_units
from slimpipe.program.program import Program, ProgramError

_MAX_POSTED_RECEIVES = 2


def check(program: Program) -> None:
    """Proves a program.

    Guarantees that every unit runs exactly once on its rank; that what it needs was computed or received before; that
    slices of a microbatch run in order on each stage and backward in reverse; that the two ends of every channel agree
    on the order of messages, so that no tags are needed; that no more than two receives per pass are posted at a time;
    that ranks help one another as `check_exchange` asks, and share the vocabulary as `check_vocabulary` does; that the
    ranks never wait for one another in a circle; that
    each rank's peak of live units is the schedule's; that every tick is the schedule's; and that every rank works
    through the phases in ascending order.

    Raises:
        ProgramError: at the first rule that is broken.
    """
    _check_complete(program)
    for rank in range(program.num_ranks):
        _check_messages(program, rank)
        _check_causality(program, rank)
    _check_channels(program)
    check_exchange(program)
    check_vocabulary(program)
    _check_runs(program)
    for rank in range(program.num_ranks):
        _check_live_units(program, rank)
        _check_ticks(program, rank)


def _check_complete(program: Program) -> None:
    """Each unit runs forward once, and backward once unless the program is forward only, on the rank of its stage."""
    if len(program.instructions) != program.num_ranks:
        raise ProgramError(f"{len(program.instructions)} lists of instructions for {program.num_ranks} ranks")
    ops = (Op.FORWARD,) if program.forward_only else (Op.FORWARD, Op.BACKWARD)
    for rank, row in enumerate(program.instructions):
        wanted = {
            (op, Unit(microbatch, stage, slice_index))
            for op in ops
            for microbatch in range(program.num_microbatches)
            for stage in range(rank, program.num_stages, program.num_ranks)
            for slice_index in range(program.num_slices)
        }
        counts = Counter((i.op, i.unit) for i in row if i.op in (Op.FORWARD, Op.BACKWARD))
        for op, unit in sorted(wanted - counts.keys(), key=lambda compute: compute[1]):
            raise ProgramError(f"rank {rank} never runs {op.name.lower()} of {unit}")
        for (op, unit), count in counts.items():
            if (op, unit) not in wanted:
                raise ProgramError(f"rank {rank} runs {op.name.lower()} of {unit}, which is not its own to run")
            if count > 1:
                raise ProgramError(f"rank {rank} runs {op.name.lower()} of {unit} {count} times")


def _check_messages(program: Program, rank: int) -> None:
    """Each compute instruction has its messages before and after it, between the right ranks; there are no others."""
    position: dict[tuple[Op, Unit], int] = {}
    for index, instruction in enumerate(program.instructions[rank]):
        key = instruction.op, instruction.unit
        if key in position:
            raise ProgramError(f"rank {rank} has {instruction} twice")
        position[key] = index
        own = instruction.op.is_message or instruction.op in (Op.FORWARD, Op.BACKWARD)
        if own and program.rank_of(instruction.unit.stage) != rank:
            raise ProgramError(f"rank {rank} has {instruction}, of a stage that it does not hold")
        peer = _peer(program, rank, instruction.op, instruction.unit)
        if instruction.peer != peer:
            said = "no message" if peer is None else f"rank {peer}"
            raise ProgramError(f"rank {rank}: {instruction}: the other end should be {said}")
    posted = {Op.FORWARD: 0, Op.BACKWARD: 0}
    for index, (_, op, unit, _) in enumerate(program.instructions[rank]):
        if op in (Op.RECEIVE_FORWARD, Op.RECEIVE_BACKWARD):
            posted[COMPUTE_OF[op]] += 1
            if posted[COMPUTE_OF[op]] > _MAX_POSTED_RECEIVES:
                raise ProgramError(
                    f"rank {rank} has more than {_MAX_POSTED_RECEIVES} receives posted at {op.name.lower()} of {unit}"
                )
        elif op in (Op.FORWARD, Op.BACKWARD):
            if _peer(program, rank, RECEIVE_OF[op], unit) is not None:
                if position.get((RECEIVE_OF[op], unit), index) >= index:
                    raise ProgramError(
                        f"rank {rank} runs {op.name.lower()} of {unit} without a receive posted before it"
                    )
                posted[op] -= 1
            sends = _peer(program, rank, SEND_OF[op], unit) is not None
            if sends and position.get((SEND_OF[op], unit), -1) <= index:
                raise ProgramError(f"rank {rank} runs {op.name.lower()} of {unit} without a send after it")


def _peer(program: Program, rank: int, op: Op, unit: Unit) -> int | None:
    """Rank at the other end, or None where ``op`` of ``unit`` is no message."""
    if not op.is_message:
        return None
    towards_last = op in (Op.SEND_FORWARD, Op.RECEIVE_BACKWARD)
    stage = unit.stage + 1 if towards_last else unit.stage - 1
    if not 0 <= stage < program.num_stages or program.rank_of(stage) == rank:
        return None
    return program.rank_of(stage)


def _check_causality(program: Program, rank: int) -> None:
    """Slices in order, backward in reverse order and after forward, stages of one rank without messages in order."""
    forwarded: set[Unit] = set()
    backwarded: set[Unit] = set()
    for _, op, unit, _ in program.instructions[rank]:
        microbatch, stage, slice_index = unit
        if op is Op.FORWARD:
            done, needed = forwarded, []
            if slice_index > 0:
                needed.append((forwarded, Unit(microbatch, stage, slice_index - 1), "forward"))
            if stage > 0 and program.rank_of(stage - 1) == rank:
                needed.append((forwarded, Unit(microbatch, stage - 1, slice_index), "forward"))
        elif op is Op.BACKWARD:
            done, needed = backwarded, [(forwarded, unit, "forward")]
            if slice_index < program.num_slices - 1:
                needed.append((backwarded, Unit(microbatch, stage, slice_index + 1), "backward"))
            if stage < program.num_stages - 1 and program.rank_of(stage + 1) == rank:
                needed.append((backwarded, Unit(microbatch, stage + 1, slice_index), "backward"))
        else:
            continue
        for already, needed_unit, pass_name in needed:
            if needed_unit not in already:
                raise ProgramError(f"rank {rank} runs {op.name.lower()} of {unit} before {pass_name} of {needed_unit}")
        done.add(unit)


def _check_channels(program: Program) -> None:
    """Both ends of a channel name the same messages in the same order, a message by the unit that receives it."""
    sent: dict[Channel, list[Unit]] = defaultdict(list)
    received: dict[Channel, list[Unit]] = defaultdict(list)
    for rank, row in enumerate(program.instructions):
        for instruction in row:
            if instruction.peer is None:
                continue
            channel = instruction.channel(rank)
            if channel.source == rank:
                step = 1 if channel.direction == "forward" else -1
                sent[channel].append(instruction.unit._replace(stage=instruction.unit.stage + step))
            else:
                received[channel].append(instruction.unit)
    for channel in sorted(sent.keys() | received.keys(), key=str):
        for index, (there, here) in enumerate(zip(sent[channel], received[channel], strict=True)):
            if there != here:
                raise ProgramError(f"{channel}: message {index} is sent for {there} but received for {here}")


def _check_runs(program: Program) -> None:
    """Runs all ranks against one another, each until it has to wait, until all are done or none can go on.

    A compute instruction waits for its message to be sent, and then until all ranks that are joined to this one by
    transfers have come as far; work on the vocabulary joins all ranks. A send waits while two earlier sends of its
    channel are unmatched. The proof lets a receive match only when its compute instruction is reached, and joined ranks
    only go on together: in a run, where receives are posted earlier and ranks wait for less, they can only wait less.
    """
    state = _State()
    met = meetings(program)
    runs = [_run_rank(program, rank, state, met) for rank in range(program.num_ranks)]
    waiting: dict[int, Instruction] = {}
    progress = True
    while progress:
        before = state.progress()
        waiting = {rank: stop for rank, run in enumerate(runs) if (stop := next(run, None)) is not None}
        progress = before != state.progress()
    if waiting:
        stops = "; ".join(f"rank {rank} at {instruction}" for rank, instruction in waiting.items())
        raise ProgramError(f"the ranks wait for one another: {stops}")


@dataclass(frozen=True)
class _State:
    """How far the ranks have come in running against one another."""

    num_sent: Counter[Channel] = field(default_factory=Counter)
    num_matched: Counter[Channel] = field(default_factory=Counter)
    arrived: set[tuple[int, Moment]] = field(default_factory=set)
    """Ranks at the moments at which they meet others."""

    def progress(self) -> tuple[int, int, int]:
        return self.num_sent.total(), self.num_matched.total(), len(self.arrived)


def _run_rank(
    program: Program, rank: int, state: _State, met: dict[tuple[int, Moment], frozenset[int]]
) -> Iterator[Instruction]:
    """One rank's run; yields the instruction at which it has to wait."""
    posted: dict[tuple[Op, Unit], Channel] = {}
    for instruction in program.instructions[rank]:
        tick, op, unit, _ = instruction
        if not op.is_message:
            channel = posted.pop((op, unit), None)
            if channel is not None:
                state.num_matched[channel] += 1
                while state.num_sent[channel] < state.num_matched[channel]:
                    yield instruction
            moment = tick, op.phase or op
            others = range(program.num_ranks) if op.is_shared else met.get((rank, moment), ())
            joined = {(other, moment) for other in others}
            if joined:
                state.arrived.add((rank, moment))
                while not joined <= state.arrived:
                    yield instruction
        else:
            channel = instruction.channel(rank)
            if channel.destination == rank:
                posted[COMPUTE_OF[op], unit] = channel
                continue
            while state.num_sent[channel] - state.num_matched[channel] >= MAX_UNMATCHED_SENDS:
                yield instruction
            state.num_sent[channel] += 1


def _check_live_units(program: Program, rank: int) -> None:
    peak = program.peak_live_units(rank)
    planned = 1 if program.forward_only else live_units(rank, **_shape(program))
    if peak != planned:
        raise ProgramError(f"rank {rank} holds {peak} live units at its peak; the schedule allows it {planned}")


def _check_ticks(program: Program, rank: int) -> None:
    """Units at their lock-step tick, everything in its place in the tick; a list never goes back in time."""
    shape = _shape(program)
    del shape["num_microbatches"]
    counts = {Op.FORWARD: 0, Op.BACKWARD: 0}
    previous = (0, 0)
    for instruction in program.instructions[rank]:
        if instruction.op in counts:
            index = counts[instruction.op]
            counts[instruction.op] += 1
            if instruction.op is Op.FORWARD:
                tick = forward_tick(index, rank=rank)
            else:
                tick = backward_tick(index, rank=rank, **shape)
            if instruction.tick != tick:
                raise ProgramError(f"rank {rank}: {instruction}: the schedule runs it at tick {tick}")
        place = instruction.op.place
        if place is None:
            place = previous[1] if instruction.tick == previous[0] else 0
        now = instruction.tick, place
        if now < previous:
            raise ProgramError(f"rank {rank}: {instruction}: comes after an instruction of a later moment")
        if instruction.tick >= program.num_ticks:
            raise ProgramError(f"rank {rank}: {instruction}: the program says that it has {program.num_ticks} ticks")
        previous = now


def _shape(program: Program) -> dict[str, int]:
    names = ("num_ranks", "num_slices", "num_stages_per_rank", "num_microbatches")
    return {name: getattr(program, name) for name in names}
