"""What an attention layer must know of the slice it works on.

The schedule hands one `SliceContext` per unit to its stage as the keyword argument ``attention_masks``; models pass
that argument untouched to every inner attention, in the forward and again when a checkpointed layer is recomputed. So
no state is global, and two pipelines in one process do not see each other.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from torch import Tensor, nn

from slimpipe.attention.kv_store import LayerStore, SlotBuffers
from slimpipe.attention.mask import Documents, Mask
from slimpipe.program import SlotPlan, Unit


class Phase(Enum):
    """What the schedule is doing with a unit."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """Backward, in which checkpointed layers run their forward again: state is read, not written."""


class StageStore:
    """The `LayerStore` of every attention layer of one stage, for one step.

    Args:
        plan: Where the slices of this stage sit.
        layers: The stage's attention modules, each with the K,V buffers it uses.
        hold: Called with what is kept beside autograd; its result lives as long as that is kept (it counts bytes).
    """

    def __init__(
        self,
        plan: SlotPlan,
        layers: dict[nn.Module, SlotBuffers],
        *,
        hold: Callable[[Tensor], object] | None = None,
    ) -> None:
        self.plan = plan
        self._layers = {layer: LayerStore(buffers, hold=hold) for layer, buffers in layers.items()}

    def layer(self, module: nn.Module) -> LayerStore:
        """Store of one attention module of the stage."""
        return self._layers[module]

    @property
    def carry_bytes(self) -> int:
        """Bytes of the dK,dV in waiting of all layers."""
        return sum(layer.carry_bytes for layer in self._layers.values())


class SliceContext:
    """One unit, as its attention layers see it. Its masks are made once, for all layers.

    Args:
        unit: The unit.
        store: The stage's store.
        documents: Where the microbatch's documents start.
        keep_output: Whether layers keep output and LSE for a recompute.
        kernel: Attention kernel of layers that do not choose one themselves.
    """

    def __init__(
        self, unit: Unit, store: StageStore, documents: Documents, *, keep_output: bool, kernel: str = "auto"
    ) -> None:
        self.unit = unit
        self.phase = Phase.FORWARD
        self.keep_output = keep_output
        self.kernel = kernel
        self.own_mask = documents.own_mask(unit.slice)
        self.past_mask: Mask | None = None
        if unit.slice and documents.starts:
            low, high = store.plan.past(unit)
            self.past_mask = documents.past_mask(unit.slice, store.plan.slices_in(unit, low, high))
        self.sees_past = unit.slice > 0 and not (self.past_mask is not None and self.past_mask.sees_nothing)
        """Whether any query of the unit sees any past key."""
        self._store = store
        self._called: set[nn.Module] = set()

    @property
    def num_called(self) -> int:
        """Attention modules that were called for this unit."""
        return len(self._called)

    def layer(self, module: nn.Module) -> LayerStore:
        """The store of one attention module, to be asked for once per forward.

        Raises:
            RuntimeError: The module is called twice in one forward, so its K,V would overwrite each other.
        """
        if self.phase is Phase.FORWARD:
            if module in self._called:
                raise RuntimeError(
                    "a SliceAttention module was called twice in one forward of a slice; every attention of the model "
                    "needs a module of its own (SliceAttention has no weights, so weights can still be shared)"
                )
            self._called.add(module)
        return self._store.layer(module)
