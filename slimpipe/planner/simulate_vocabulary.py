"""The vocabulary that all ranks share, in simulated time: what E, V and EB wait for, as `runtime.vocabulary` runs them.

A collective of p ranks takes log2 p latencies, and its message once the bandwidth of a link.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from slimpipe.planner.costs import OpCosts
from slimpipe.planner.machine import Machine, Process, Signal
from slimpipe.program.ir import Instruction, Op, Unit
from slimpipe.program.program import Program, ProgramError


@dataclass
class _Collective:
    """One instruction that all ranks share."""

    instruction: Instruction
    ready: Signal = field(default_factory=Signal)
    """The root's message is with all others."""
    met: Signal = field(default_factory=Signal)
    """All ranks have their part of the loss."""
    result: Signal = field(default_factory=Signal)
    """The root has the sum."""
    num_met: int = 0
    num_summed: int = 0


class SharedVocabulary:
    """What the ranks do together.

    Args:
        program: The program.
        costs: What everything takes.
        machine: Where time passes.
    """

    def __init__(self, program: Program, costs: OpCosts, machine: Machine) -> None:
        self._program, self._costs, self._machine = program, costs, machine
        self._size = program.num_ranks
        self._collectives: list[_Collective] = []
        """In the order in which the first rank to come to them has them, which is that of all ranks."""
        self._num_begun = [0] * self._size
        self._by_unit: dict[tuple[Op, Unit], _Collective] = {}
        self._pending: dict[int, _Collective] = {}
        """By rank: the backward of an embedding that has yet to end."""

    def run(self, instruction: Instruction, rank: int) -> Process:
        """A rank's part of an instruction.

        Raises:
            ProgramError: Another rank has another instruction at this place in its list.
        """
        collective = self._join(instruction, rank)
        if instruction.op is Op.VOCABULARY:
            yield from self._loss(collective, rank)
        elif instruction.op is Op.EMBED:
            yield self._costs.embed
            self._sum(collective)
        else:
            yield from self._finish_embed_backward(rank)
            if rank == 0:
                self._machine.set(collective.ready, self._machine.now + self._seconds(self._costs.activation_bytes))
            self._pending[rank] = collective

    def take(self, instruction: Instruction) -> Process:
        """Wait for what the shared work gives to a unit, if anything."""
        shared = Op.EMBED if instruction.op is Op.FORWARD else Op.VOCABULARY
        if self._program.vocab_parallel == "none" or (shared is Op.EMBED and self._program.vocab_parallel != "both"):
            return
        collective = self._by_unit.get((shared, instruction.unit))
        if collective is None:
            raise ProgramError(f"{instruction}: no rank has begun {shared.name.lower()} of it")
        yield collective.result

    def leftovers(self, rank: int) -> Iterator[tuple[Instruction, Process]]:
        """What ends with the step."""
        if rank in self._pending:
            yield self._pending[rank].instruction, self._finish_embed_backward(rank)

    def _join(self, instruction: Instruction, rank: int) -> _Collective:
        index = self._num_begun[rank]
        self._num_begun[rank] += 1
        if index == len(self._collectives):
            collective = _Collective(instruction)
            self._collectives.append(collective)
            self._by_unit[instruction.op, instruction.unit] = collective
        collective = self._collectives[index]
        if collective.instruction != instruction:
            raise ProgramError(f"rank {rank} is at {instruction} where another is at {collective.instruction}")
        return collective

    def _loss(self, collective: _Collective, rank: int) -> Process:
        costs, machine = self._costs, self._machine
        if rank == self._size - 1:
            machine.set(collective.ready, machine.now + self._seconds(costs.activation_bytes))
        yield collective.ready
        yield costs.vocabulary_forward
        collective.num_met += 1
        if collective.num_met == self._size:
            machine.set(collective.met, machine.now + 2 * self._seconds(0))  # the maximum, then the sum
        yield collective.met
        if not self._program.forward_only:
            yield max(0.0, costs.vocabulary - costs.vocabulary_forward)
            self._sum(collective)

    def _finish_embed_backward(self, rank: int) -> Process:
        collective = self._pending.pop(rank, None)
        if collective is not None:
            yield collective.ready
            yield self._costs.embed_backward

    def _sum(self, collective: _Collective) -> None:
        """Add a rank's part to the sum."""
        collective.num_summed += 1
        if collective.num_summed == self._size:
            self._machine.set(collective.result, self._machine.now + self._seconds(self._costs.activation_bytes))

    def _seconds(self, num_bytes: float) -> float:
        if self._size == 1:
            return 0.0
        link = self._costs.link
        return math.ceil(math.log2(self._size)) * link.latency + num_bytes / link.bandwidth
