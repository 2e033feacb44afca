"""The context exchange in simulated time: both sides of every transfer, layer by layer, as `attention.helper` has it.

A unit's linear work is spread evenly over its attention layers. Per layer an owner sends its request, attends to what
it did not give away, and waits for the replies; a helper attends to its own slice, serves, and attends to its own past.
K,V rows travel a layer ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from slimpipe.planner.costs import OpCosts
from slimpipe.planner.machine import Process, Signal, Wire
from slimpipe.program.cost import AttentionShape
from slimpipe.program.ir import Instruction, Op, Transfer
from slimpipe.program.program import Program, ProgramError
from slimpipe.program.runs import num_rows

Moment = tuple[int, Op]
"""A tick and one of its two phases."""


class _Mail(Enum):
    KV = "K,V"
    REQUEST = "request"
    REPLY = "reply"


class SharedPhase:
    """One phase of one tick in which a rank gives away part of its attention, or takes over parts of others'.

    Args:
        program: The program.
        rank: Pipeline rank.
        costs: What everything takes.
        wire: Where messages travel.
        instruction: The rank's own unit, or help.
        transfers: Those that the rank is part of.

    Raises:
        ProgramError: The rank gives away attention of a unit that it does not run here.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        *,
        costs: OpCosts,
        wire: Wire,
        instruction: Instruction,
        transfers: Sequence[Transfer],
    ) -> None:
        self._costs, self._wire = costs, wire
        self._rank, self._rank_of = rank, program.rank_of
        self._unit = instruction.unit
        self._is_forward = instruction.op.phase is Op.FORWARD
        self._num_own = costs.num_layers(self._unit.stage) if instruction.op is instruction.op.phase else 0
        self._vocab_parallel = program.vocab_parallel
        self._given = [transfer for transfer in transfers if self._owner(transfer) == rank]
        self._taken = [transfer for transfer in transfers if transfer.helper == rank]
        self._arrivals: dict[tuple[_Mail, Transfer], Signal] = {}
        for transfer in self._given:
            if not self._num_own or transfer.unit != self._unit:
                raise ProgramError(f"rank {rank}: {transfer}: stands beside {instruction}")

    def run(self) -> Process:
        """All layers."""
        self._move_kv(0)
        linear, own, past = self._own_seconds() if self._num_own else (0.0, 0.0, 0.0)
        for number in range(max([self._num_own, *map(self._num_layers, self._taken)])):
            is_own = number < self._num_own
            if is_own:
                yield linear
            self._begin(number)
            if is_own:
                yield own
            yield from self._serve(number)
            if is_own:
                yield past
                for transfer in self._given:
                    yield self._arrivals.pop((_Mail.REPLY, transfer))

    def _own_seconds(self) -> tuple[float, float, float]:
        """Of the own unit in one layer: linear work, attention to the own slice, and to that part of the past which
        is not given away."""
        unit, costs = self._unit, self._costs
        seconds = costs.forward_seconds if self._is_forward else costs.backward_seconds
        whole = seconds(unit, vocab_parallel=self._vocab_parallel)
        per_row = self._seconds_per_row(unit.stage)
        half, past = costs.slice_len / 2, costs.slice_len * unit.slice
        given = sum(num_rows(transfer.rows) for transfer in self._given)
        return whole / self._num_own - per_row * (half + past), per_row * half, per_row * (past - given)

    def _seconds_per_row(self, stage: int) -> float:
        """Attention of a slice to one past token in one layer."""
        per_pair = self._costs.attention_forward if self._is_forward else self._costs.attention_backward
        return per_pair[stage] * self._costs.slice_len / self._costs.num_layers(stage)

    # Messages --------------------------------------------------------------------------------------------------------

    def _begin(self, number: int) -> None:
        """Every message of a layer, and the K,V of the next."""
        self._move_kv(number + 1)
        for transfer in self._given:
            self._send(_Mail.REQUEST, transfer)
            self._post(_Mail.REPLY, transfer)
        for transfer in self._taken:
            if number < self._num_layers(transfer):
                self._post(_Mail.REQUEST, transfer)

    def _move_kv(self, number: int) -> None:
        for transfer in self._given + self._taken:
            if transfer.sent and number < self._num_layers(transfer):
                if transfer.helper == self._rank:
                    self._post(_Mail.KV, transfer)
                else:
                    self._send(_Mail.KV, transfer)

    def _serve(self, number: int) -> Process:
        for transfer in self._taken:
            if number >= self._num_layers(transfer):
                continue
            for kind in (_Mail.REQUEST, _Mail.KV):
                if (arrival := self._arrivals.pop((kind, transfer), None)) is not None:
                    yield arrival
            yield self._seconds_per_row(transfer.unit.stage) * num_rows(transfer.rows)
            self._send(_Mail.REPLY, transfer)

    def _send(self, kind: _Mail, transfer: Transfer) -> None:
        source, destination = self._ends(kind, transfer)
        shape = self._costs.attention_shape
        num_bytes = 0 if shape is None else _num_bytes(kind, transfer, shape)
        self._wire.send((kind, source, destination), source, destination, num_bytes, transfer.unit, transfer.tick)

    def _post(self, kind: _Mail, transfer: Transfer) -> None:
        source, destination = self._ends(kind, transfer)
        self._arrivals[kind, transfer] = self._wire.receive(
            (kind, source, destination), source, destination, transfer.unit, transfer.tick
        )

    def _ends(self, kind: _Mail, transfer: Transfer) -> tuple[int, int]:
        ends = self._owner(transfer), transfer.helper
        return ends[::-1] if kind is _Mail.REPLY else ends

    def _owner(self, transfer: Transfer) -> int:
        return self._rank_of(transfer.unit.stage)

    def _num_layers(self, transfer: Transfer) -> int:
        return self._costs.num_layers(transfer.unit.stage)


def _num_bytes(kind: _Mail, transfer: Transfer, shape: AttentionShape) -> int:
    """Of a message of one layer."""
    if kind is _Mail.KV:
        return num_rows(transfer.sent) * shape.kv_row
    if kind is _Mail.REQUEST:
        return shape.request(transfer.phase)
    returned = num_rows(transfer.dropped) if transfer.phase is Op.BACKWARD else 0
    return shape.reply(transfer.phase) + returned * shape.gradient_row
