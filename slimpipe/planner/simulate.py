"""Runs a program in simulated time: every rank its very list of instructions, as the executor runs it.

Messages are first-in first-out on their channels and travel when both ends are posted. A send waits while
`MAX_UNMATCHED_SENDS` of its channel are under way, a unit for its message, helpers and owners for one another layer by
layer, and all ranks where they share the vocabulary.
"""

from __future__ import annotations

from collections import defaultdict, deque

from slimpipe.planner.costs import OpCosts
from slimpipe.planner.machine import Machine, Process, Signal, Wire
from slimpipe.planner.simulate_exchange import Moment, SharedPhase
from slimpipe.planner.simulate_vocabulary import SharedVocabulary
from slimpipe.planner.timeline import KIND_OF, Span, Timeline
from slimpipe.program.ir import (
    COMPUTE_OF,
    MAX_UNMATCHED_SENDS,
    RECEIVE_OF,
    SEND_OF,
    Channel,
    Instruction,
    Op,
    Transfer,
    Unit,
)
from slimpipe.program.program import Program, ProgramError


def simulate(program: Program, costs: OpCosts, *, title: str = "SlimPipe") -> Timeline:
    """Simulates one step.

    Args:
        program: The program; need not be one that `check` accepts.
        costs: What everything takes, of slices as long as the program's.
        title: Name of the timeline.

    Raises:
        ProgramError: The ranks wait for one another in a circle, or a rank runs something without what it needs; the
            message names ranks and instructions.
        ValueError: The costs are of other slices or of another number of stages.
    """
    if costs.slice_len != program.slice_len:
        raise ValueError(
            f"the costs are of slices of {costs.slice_len} tokens, the program has slices of {program.slice_len}; "
            f"nearest legal value: slice_len = {program.slice_len}"
        )
    if costs.num_stages != program.num_stages:
        raise ValueError(
            f"the costs are of {costs.num_stages} stages, the program has {program.num_stages}; give one entry for each"
        )
    machine = Machine(costs.alone_speed)
    wire = Wire(machine, costs.link)
    vocabulary = SharedVocabulary(program, costs, machine)
    transfers: dict[tuple[int, Moment], list[Transfer]] = defaultdict(list)
    for transfer in program.transfers:
        for rank in (program.rank_of(transfer.unit.stage), transfer.helper):
            transfers[rank, (transfer.tick, transfer.phase)].append(transfer)
    ranks = [_Rank(program, rank, costs, machine, wire, vocabulary, transfers) for rank in range(program.num_ranks)]
    for running in ranks:
        machine.start(running.run())
    machine.run()
    stuck = [f"rank {one.rank} at {one.at or 'the end of its step'}" for one in ranks if not one.ended]
    if stuck:
        raise ProgramError(f"the ranks wait for one another: {'; '.join(stuck)}")
    return Timeline(
        title,
        program.num_ranks,
        program.num_slices,
        program.num_stages_per_rank,
        tuple(span for one in ranks for span in one.spans) + tuple(wire.spans),
    )


class _Rank:
    """One rank's executor."""

    def __init__(
        self,
        program: Program,
        rank: int,
        costs: OpCosts,
        machine: Machine,
        wire: Wire,
        vocabulary: SharedVocabulary,
        transfers: dict[tuple[int, Moment], list[Transfer]],
    ) -> None:
        self.program, self.rank, self.costs, self.machine, self.wire = program, rank, costs, machine, wire
        self.spans: list[Span] = []
        self.at: Instruction | None = None
        self.ended = False
        self._vocabulary, self._transfers = vocabulary, transfers
        self._received: dict[tuple[Op, Unit], Signal] = {}
        self._sends: dict[Channel, deque[Signal]] = defaultdict(deque)
        self._done: set[tuple[Op, Unit]] = set()

    def run(self) -> Process:
        """Every instruction, then the end of the step."""
        for instruction in self.program.instructions[self.rank]:
            self.at = instruction
            if self.costs.host_seconds:
                yield self.costs.host_seconds
            op = instruction.op
            if op.phase is not None:
                yield from self._compute(instruction, self._run_phase(instruction))
            elif op.is_shared:
                yield from self._compute(instruction, self._vocabulary.run(instruction, self.rank))
            elif op in SEND_OF.values():
                yield from self._send(instruction)
            else:
                self._receive(instruction)
        self.at = None
        for sends in self._sends.values():
            yield from sends
        for instruction, work in self._vocabulary.leftovers(self.rank):
            yield from self._compute(instruction, work)
        self.ended = True

    def _compute(self, instruction: Instruction, work: Process) -> Process:
        """Run ``work``, and tell its waits from what it computes."""
        start, waited = self.machine.now, 0.0
        for step in work:
            before = self.machine.now
            yield step
            if isinstance(step, Signal):
                waited += self.machine.now - before
        tick, op, unit, _ = instruction
        self._done.add((op, unit))
        self.spans.append(Span(self.rank, KIND_OF[op], start, self.machine.now, unit, tick, waited))

    def _run_phase(self, instruction: Instruction) -> Process:
        """A unit, or help with others'."""
        tick, op, unit, _ = instruction
        assert op.phase is not None
        if op in RECEIVE_OF:
            yield from self._take(instruction)
        transfers = self._transfers.get((self.rank, (tick, op.phase)))
        if transfers:
            yield from SharedPhase(
                self.program,
                self.rank,
                costs=self.costs,
                wire=self.wire,
                instruction=instruction,
                transfers=transfers,
            ).run()
        elif op in RECEIVE_OF:
            seconds = self.costs.forward_seconds if op is Op.FORWARD else self.costs.backward_seconds
            yield seconds(unit, vocab_parallel=self.program.vocab_parallel)

    def _take(self, instruction: Instruction) -> Process:
        """Wait for what enters a unit."""
        unit, op = instruction.unit, instruction.op
        if (op is Op.FORWARD and unit.stage == 0) or (op is Op.BACKWARD and unit.stage == self.program.num_stages - 1):
            yield from self._vocabulary.take(instruction)
            return
        neighbour = unit._replace(stage=unit.stage + (-1 if op is Op.FORWARD else 1))
        received = self._received.pop((op, unit), None)
        if received is not None:
            yield received
        elif (op, neighbour) not in self._done:
            raise ProgramError(f"rank {self.rank}: {instruction}: nothing was received for it")

    def _receive(self, instruction: Instruction) -> None:
        channel = instruction.channel(self.rank)
        self._received[COMPUTE_OF[instruction.op], instruction.unit] = self.wire.receive(
            channel, channel.source, self.rank, instruction.unit, instruction.tick
        )

    def _send(self, instruction: Instruction) -> Process:
        tick, op, unit, _ = instruction
        if (COMPUTE_OF[op], unit) not in self._done:
            raise ProgramError(f"rank {self.rank}: {instruction}: there is nothing to send yet")
        channel = instruction.channel(self.rank)
        sends = self._sends[channel]
        while sends and sends[0].time is not None and sends[0].time <= self.machine.now:
            sends.popleft()
        if len(sends) >= MAX_UNMATCHED_SENDS:
            yield sends.popleft()
        num_bytes = self.costs.activation_bytes
        sends.append(self.wire.send(channel, self.rank, channel.destination, num_bytes, unit, tick))
