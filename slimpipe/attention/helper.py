"""The context exchange at run time: both sides of every transfer, layer by layer (design 1.4).

In an event of an owner's unit the owner sends its queries (for a backward also the output's gradient, the output and
the LSE); the helper attends with them to the K,V rows that it was sent and returns output and LSE (dQ). Both compute
their own part meanwhile: the helper its own block, then what it was asked for, then its own past, so that messages
travel while it has something to do. K,V rows travel one event ahead. dK,dV stay with the helper, added up in float32 or
wider, until its last use of a row.

A helper serves the k-th event of an owner's unit in the k-th event of its own unit, and what is left over after it; a
rank waits only for messages of events that come earlier in (tick, phase, k), or of the same event in the order request,
reply. So ranks cannot wait for one another in a circle.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from slimpipe.attention.events import Alone, AttentionCall, AttentionLayer, Event, Phase, Sharing, StageEvents
from slimpipe.attention.held_rows import HeldRows
from slimpipe.attention.kernels import choose_kernel
from slimpipe.attention.kv_store import LayerStore
from slimpipe.attention.mask import Documents, Mask
from slimpipe.mailbox import Letter, Mail, Mailbox
from slimpipe.program import Instruction, Op, Program, Transfer, Unit
from slimpipe.program.runs import Runs, num_rows, union
from slimpipe.transport import TensorMeta, lost_rank

_HeldKey = tuple[Unit, Phase, int]
"""Slice 0 of a microbatch and stage, phase and layer: whose rows they are."""


class Exchange:
    """One rank's part in the transfers of a program.

    Args:
        program: The program.
        rank: Pipeline rank.
        mailbox: The rank's messages.
        stages: What is known of each global stage, on every rank alike.
    """

    def __init__(self, program: Program, *, rank: int, mailbox: Mailbox, stages: Sequence[StageEvents]) -> None:
        self.rank, self.mailbox, self.stages = rank, mailbox, stages
        self.rank_of = program.rank_of
        self.documents: list[Documents] = []
        """Of each microbatch of the step."""
        self.held: dict[_HeldKey, HeldRows] = defaultdict(HeldRows)
        self.waited = 0.0
        """Seconds of the step spent with messages so far."""
        self._given: dict[tuple[int, Op], list[Transfer]] = defaultdict(list)
        self._taken: dict[tuple[int, Op], list[Transfer]] = defaultdict(list)
        for transfer in program.transfers:
            if self.rank_of(transfer.unit.stage) == rank:
                self._given[transfer.tick, transfer.phase].append(transfer)
            elif transfer.helper == rank:
                self._taken[transfer.tick, transfer.phase].append(transfer)

    def begin(self, documents: list[Documents]) -> None:
        """Begin a step with these microbatches."""
        self.documents, self.waited = documents, 0.0
        self.mailbox.sent_bytes = 0

    def phase(self, instruction: Instruction) -> Sharing:
        """What the rank does with others while it runs a compute instruction."""
        assert instruction.op.phase is not None
        key = instruction.tick, instruction.op.phase
        given, taken = self._given.get(key, []), self._taken.get(key, [])
        return SharedPhase(self, instruction, given, taken) if given or taken else Alone()

    @property
    def sent_bytes(self) -> int:
        """Bytes sent in the step so far."""
        return self.mailbox.sent_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of K,V and dK,dV held for others."""
        return sum(rows.num_bytes for rows in self.held.values())

    def finish(self) -> None:
        """End a step."""
        self.mailbox.finish()
        assert not self.held, f"rows of {list(self.held)} are still held after the step"

    def drop(self) -> None:
        """Let go of everything without waiting; after a failure."""
        self.mailbox.drop()
        self.held.clear()


class SharedPhase:
    """One phase of one tick in which this rank gives away part of its attention, or takes over parts of others'."""

    def __init__(
        self, exchange: Exchange, instruction: Instruction, given: list[Transfer], taken: list[Transfer]
    ) -> None:
        assert not (given and taken), f"rank {exchange.rank} both gives and takes at {instruction}"
        self.moved: Runs = union(*(transfer.rows for transfer in given))
        self._exchange, self._mailbox = exchange, exchange.mailbox
        self._instruction = instruction
        self._phase = Phase.FORWARD if instruction.op.phase is Op.FORWARD else Phase.BACKWARD
        self._given, self._taken = given, taken
        self._layers: Sequence[LayerStore] = ()
        self._num_begun = self._num_served = 0
        self._now: tuple[Event, LayerStore] | None = None
        """The event of the own unit, where parts of it are given away."""
        self._kv: dict[tuple[Transfer, int], Letter] = {}
        self._requests: dict[Transfer, Letter] = {}
        self._replies: list[tuple[Transfer, Letter]] = []
        self._masks: dict[Transfer, Mask | None] = {}

    # What attention calls --------------------------------------------------------------------------------------------

    def start(self, layers: Sequence[LayerStore]) -> None:
        self._layers = layers
        self._move_kv(0)

    def begin(self, kind: Phase, layer: LayerStore, tensors: tuple[Tensor, ...], call: AttentionCall) -> None:
        if call.window is not None:
            return
        event = Event(kind, layer.index)
        if self._given:
            self._check_event(event, AttentionLayer.of(tensors[0], layer, call))
            self._now = event, layer
        self._begin(tensors)

    def serve(self) -> None:
        if self._num_served < self._num_begun:
            self._serve()

    def replies(self) -> Iterable[list[Tensor]]:
        for transfer, letter in self._replies:
            assert self._now is not None
            event, layer = self._now
            with self._messaging(transfer.helper, transfer):
                reply = letter.wait()
                self._mailbox.settle(transfer.helper)  # an answer: it has got all that it was sent
            share = len(self._facts(transfer, event.layer).reply(event.kind))
            if reply[share:]:
                layer.add_rows_gradient(transfer.unit, transfer.dropped, *reply[share:])
            yield reply[:share]
        self._replies = []

    @torch.no_grad()
    def finish(self) -> None:
        """Serves what is left; for a rank without a unit of its own, everything."""
        for _ in range(self._num_begun, max((len(self._events(t)) for t in self._taken), default=0)):
            self._begin(())
            self._serve()
        if self._given and self._num_begun != len(self._events(self._given[0])):
            self._refuse(f"{self._num_begun} attention events")

    # Messages --------------------------------------------------------------------------------------------------------

    def _begin(self, tensors: tuple[Tensor, ...]) -> None:
        """Start every message of the next event, and the K,V of the one after."""
        number, self._num_begun = self._num_begun, self._num_begun + 1
        self._move_kv(number + 1)
        for transfer in self._given:
            with self._messaging(transfer.helper, transfer):
                self._mailbox.send(Mail.REQUEST, transfer.helper, tensors)
                reply = self._mailbox.post(Mail.REPLY, transfer.helper, self._reply(transfer, number))
                self._replies.append((transfer, reply))
        for transfer in self._taken:
            if number < len(self._events(transfer)):
                event, owner = self._events(transfer)[number], self._owner(transfer)
                with self._messaging(owner, transfer):
                    metas = self._facts(transfer, event.layer).request(event.kind)
                    self._requests[transfer] = self._mailbox.post(Mail.REQUEST, owner, metas)

    def _move_kv(self, number: int) -> None:
        """Start the messages of K,V rows for an event, if it is the first of its layer."""
        for transfer in self._given + self._taken:
            events = self._events(transfer)
            if number >= len(events) or not transfer.sent or not _is_first(events, number):
                continue
            layer = events[number].layer
            with self._messaging(self._peer(transfer), transfer):
                if self._given:
                    rows = self._layers[layer].rows(transfer.unit, transfer.sent)
                    self._mailbox.send(Mail.KV, transfer.helper, rows)
                else:
                    metas = self._facts(transfer, layer).rows(num_rows(transfer.sent))
                    self._kv[transfer, layer] = self._mailbox.post(Mail.KV, self._owner(transfer), metas)

    @contextmanager
    def _messaging(self, peer: int, transfer: Transfer) -> Iterator[None]:
        """Count the time as waiting, and say whose message failed."""
        start = time.perf_counter()
        try:
            yield
        except torch.OutOfMemoryError:  # a RuntimeError, too, but nobody else's fault
            raise
        except RuntimeError as error:
            raise lost_rank(
                self._exchange.rank, peer, error, where=f" at {self._instruction}, in the {transfer}"
            ) from error
        self._exchange.waited += time.perf_counter() - start

    # The helper's side -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        number, self._num_served = self._num_served, self._num_served + 1
        for transfer in self._taken:
            events = self._events(transfer)
            if number < len(events):
                with self._messaging(self._owner(transfer), transfer):
                    request = self._requests.pop(transfer).wait()
                parts = self._compute(transfer, number, request)
                # Kernels may answer in a wider dtype than the owner has a buffer for.
                reply = [part.to(meta.dtype) for part, meta in zip(parts, self._reply(transfer, number), strict=True)]
                with self._messaging(self._owner(transfer), transfer):
                    self._mailbox.settle(self._owner(transfer))  # a request: the last answer is being received
                    self._mailbox.send(Mail.REPLY, self._owner(transfer), reply)

    def _compute(self, transfer: Transfer, number: int, request: list[Tensor]) -> list[Tensor]:
        """The moved part of one event: what goes back to the owner."""
        events = self._events(transfer)
        event = events[number]
        facts = self._facts(transfer, event.layer)
        key = transfer.unit._replace(slice=0), self._phase, event.layer
        held = self._exchange.held[key]
        if (transfer, event.layer) in self._kv:
            with self._messaging(self._owner(transfer), transfer):
                held.add(transfer.sent, *self._kv.pop((transfer, event.layer)).wait())
        k_BKGH, v_BKGH = held.rows(transfer.rows)
        q_BLNH = request[0]
        kernel = choose_kernel(facts.kernel, q_BLNH, k_BKGH, v_BKGH)
        mask, scale = self._mask(transfer), facts.scale
        if event.kind is Phase.FORWARD:
            reply = [*kernel.forward(q_BLNH, k_BKGH, v_BKGH, causal=False, mask=mask, scale=scale)]
        else:
            dout_BLNH, out_BLNH, lse_BNL = request[1:]
            dq_BLNH, dk_BKGH, dv_BKGH = kernel.backward(
                dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL, causal=False, mask=mask, scale=scale
            )
            held.add_gradient(transfer.rows, dk_BKGH, dv_BKGH)
            reply = [dq_BLNH]
        if _is_last(events, number):
            returned = held.drop(transfer.dropped)
            if self._returned(transfer, number):
                assert returned is not None
                reply += returned
            if not held:
                del self._exchange.held[key]
        return reply

    def _mask(self, transfer: Transfer) -> Mask | None:
        """What the unit's queries see of the moved rows; one for all layers."""
        if transfer not in self._masks:
            documents = self._exchange.documents[transfer.unit.microbatch]
            self._masks[transfer] = documents.part_mask(transfer.unit.slice, transfer.rows)
        return self._masks[transfer]

    # Facts -----------------------------------------------------------------------------------------------------------

    def _events(self, transfer: Transfer) -> tuple[Event, ...]:
        return self._exchange.stages[transfer.unit.stage].events[self._phase]

    def _facts(self, transfer: Transfer, layer: int) -> AttentionLayer:
        return self._exchange.stages[transfer.unit.stage].layers[layer]

    def _reply(self, transfer: Transfer, number: int) -> list[TensorMeta]:
        """What the helper answers in an event."""
        event = self._events(transfer)[number]
        return self._facts(transfer, event.layer).reply(event.kind) + self._returned(transfer, number)

    def _returned(self, transfer: Transfer, number: int) -> list[TensorMeta]:
        """dK,dV that come back in an event: with the last event of each layer, if that is a backward."""
        events = self._events(transfer)
        if not transfer.dropped or events[number].kind is Phase.FORWARD or not _is_last(events, number):
            return []
        return self._facts(transfer, events[number].layer).rows(num_rows(transfer.dropped), gradient=True)

    def _owner(self, transfer: Transfer) -> int:
        return self._exchange.rank_of(transfer.unit.stage)

    def _peer(self, transfer: Transfer) -> int:
        return transfer.helper if self._given else self._owner(transfer)

    def _check_event(self, event: Event, layer: AttentionLayer) -> None:
        expected = self._events(self._given[0])
        if self._num_begun >= len(expected) or expected[self._num_begun] != event:
            self._refuse(f"{event.kind.value} of attention layer {event.layer} as event {self._num_begun}")
        if layer != (learned := self._facts(self._given[0], event.layer)):
            self._refuse(f"attention layer {event.layer} is {layer}, and was {learned}")

    def _refuse(self, what: str) -> None:
        events = ", ".join(f"{kind.value} {layer}" for kind, layer in self._events(self._given[0]))
        raise RuntimeError(
            f"{self._instruction}: {what}, unlike in the step that the exchange learned from ({events}): layers and "
            "activation checkpointing must run alike in every step; or set context_exchange = 'off'"
        )


def _is_first(events: tuple[Event, ...], number: int) -> bool:
    """Whether an event is the first of its layer."""
    return all(event.layer != events[number].layer for event in events[:number])


def _is_last(events: tuple[Event, ...], number: int) -> bool:
    """Whether an event is the last of its layer."""
    return all(event.layer != events[number].layer for event in events[number + 1 :])
