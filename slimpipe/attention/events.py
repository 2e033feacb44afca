"""Attention events: when, in a phase of a unit, which attention layer runs; what a helper must know of them.

In the forward of a unit every attention layer runs once. In its backward every layer's backward runs, and before it,
where activation checkpointing recomputes the layer and its output was not kept, the layer's forward once more. Which
events a phase has depends on the model and on the user's checkpointing; it is learned from a step without exchange.
Layers with a sliding window have no events: their work does not grow with the context, so there is nothing to share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from slimpipe.attention.kernels import AttentionKernel
from slimpipe.attention.kv_store import LayerStore
from slimpipe.dtypes import wide_dtype
from slimpipe.program.runs import Runs
from slimpipe.transport import TensorMeta


class Phase(Enum):
    """What the schedule is doing with a unit, or an attention layer in an event."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """Of a unit: checkpointed layers run their forward again in it, where state is read, not written."""


class Event(NamedTuple):
    """One run of an attention layer's forward or backward."""

    kind: Phase
    layer: int
    """Index among the attention layers of the stage."""


class AttentionCall(NamedTuple):
    """How a layer attends."""

    kernel: AttentionKernel
    scale: float
    window: int | None
    """Of the last tokens, how many a query sees, itself included; None for all."""


@dataclass(frozen=True)
class AttentionLayer:
    """One slice in one attention layer: all that another rank needs to compute a part of it."""

    batch: int
    slice_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    dtype: torch.dtype
    kernel: str
    scale: float
    window: int | None = None

    # Shapes: B batch, L slice, N query heads, G K,V heads, H head dim.

    @classmethod
    def of(cls, q_BLNH: Tensor, layer: LayerStore, call: AttentionCall) -> AttentionLayer:
        """The layer as it runs now."""
        B, L, N, H = q_BLNH.shape
        G, value_head_dim = layer.value_shape[2:]
        return cls(B, L, N, G, H, value_head_dim, q_BLNH.dtype, call.kernel.name, call.scale, call.window)

    def rows(self, count: int, *, gradient: bool = False) -> list[TensorMeta]:
        """K and V of some rows, or dK and dV, which travel in float32 or wider."""
        dtype = wide_dtype(self.dtype) if gradient else self.dtype
        shape_BLG = self.batch, count, self.num_kv_heads
        return [TensorMeta((*shape_BLG, self.head_dim), dtype), TensorMeta((*shape_BLG, self.value_head_dim), dtype)]

    @property
    def q(self) -> TensorMeta:
        """Queries, and their gradient."""
        return TensorMeta((self.batch, self.slice_len, self.num_heads, self.head_dim), self.dtype)

    @property
    def out(self) -> TensorMeta:
        """Output, and its gradient."""
        return TensorMeta((self.batch, self.slice_len, self.num_heads, self.value_head_dim), self.dtype)

    @property
    def lse(self) -> TensorMeta:
        """LSE, in float32 or wider."""
        return TensorMeta((self.batch, self.num_heads, self.slice_len), wide_dtype(self.dtype))

    def request(self, kind: Phase) -> list[TensorMeta]:
        """What the owner of a unit sends in an event, K,V apart."""
        return [self.q] if kind is Phase.FORWARD else [self.q, self.out, self.out, self.lse]

    def reply(self, kind: Phase) -> list[TensorMeta]:
        """What a helper returns in an event, dK,dV apart."""
        return [self.out, self.lse] if kind is Phase.FORWARD else [self.q]


@dataclass(frozen=True)
class StageEvents:
    """The attention layers of one stage that share their work, and the events of each phase of any of its units."""

    layers: dict[int, AttentionLayer]
    """By index among the attention layers of the stage."""
    events: dict[Phase, tuple[Event, ...]]


class Sharing(Protocol):
    """What attention does with other ranks in one phase of one unit. Attention calls `begin`, `serve` and `replies`
    once in each event, in this order, and in layers with a sliding window, for which nothing is done."""

    moved: Runs
    """Past tokens that other ranks attend to."""

    def start(self, layers: Sequence[LayerStore]) -> None:
        """Before the first event; ``layers`` are the stores of the unit's stage, none without a unit of its own."""

    def begin(self, kind: Phase, layer: LayerStore, tensors: tuple[Tensor, ...], call: AttentionCall) -> None:
        """An event begins. ``tensors``: q_BLNH; for a backward also dout_BLNH, the whole row's out_BLNH and lse_BNL."""

    def serve(self) -> None:
        """Compute for others what they asked for in their event of the same number."""

    def replies(self) -> Iterable[list[Tensor]]:
        """Others' shares in this event: [out_BLNH, lse_BNL], or for a backward [dq_BLNH], in the order of helpers."""

    def finish(self) -> None:
        """After the last event of the unit."""


class Alone:
    """No other rank has a part in this phase."""

    moved: Runs = ()

    def start(self, layers: Sequence[LayerStore]) -> None: ...

    def begin(self, kind: Phase, layer: LayerStore, tensors: tuple[Tensor, ...], call: AttentionCall) -> None: ...

    def serve(self) -> None: ...

    def replies(self) -> Iterable[list[Tensor]]:
        return ()

    def finish(self) -> None: ...


class Learner:
    """Learns the `StageEvents` of one stage from a step without exchange."""

    def __init__(self) -> None:
        self._layers: dict[int, AttentionLayer] = {}
        self._events: dict[Phase, set[tuple[Event, ...]]] = {phase: set() for phase in Phase}
        self._changed = False

    def phase(self, phase: Phase) -> Sharing:
        """What one phase of one unit is watched by."""
        return _Watch(self, phase)

    def saw_layer(self, index: int, layer: AttentionLayer) -> None:
        """A layer ran."""
        self._changed |= self._layers.setdefault(index, layer) != layer

    def saw_events(self, phase: Phase, events: tuple[Event, ...]) -> None:
        """A phase of a unit ended."""
        self._events[phase].add(events)

    def learned(self) -> StageEvents | str:
        """What was learned, or why others cannot help this stage."""
        if self._changed:
            return "its attention layers differ in shape or kernel from slice to slice"
        if any(len(seen) > 1 for seen in self._events.values()):
            return "its attention layers run in another order from slice to slice"
        if sorted(self._layers) != list(range(len(self._layers))):
            return "not all of its attention layers ran"
        layers = {index: layer for index, layer in sorted(self._layers.items()) if layer.window is None}
        return StageEvents(layers, {phase: next(iter(seen), ()) for phase, seen in self._events.items()})


class _Watch(Alone):
    def __init__(self, learner: Learner, phase: Phase) -> None:
        self._learner, self._phase = learner, phase
        self._events: list[Event] = []

    def begin(self, kind: Phase, layer: LayerStore, tensors: tuple[Tensor, ...], call: AttentionCall) -> None:
        if call.window is None:
            self._events.append(Event(kind, layer.index))
        self._learner.saw_layer(layer.index, AttentionLayer.of(tensors[0], layer, call))

    def finish(self) -> None:
        self._learner.saw_events(self._phase, tuple(self._events))
