"""What an attention layer must know of the slice it works on.

The schedule hands one `SliceContext` per unit to its stage as the keyword argument ``attention_masks``; models pass
that argument untouched to every inner attention, in the forward and again when a checkpointed layer is recomputed. So
no state is global, and two pipelines in one process do not see each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from slimpipe.attention.events import Alone, Phase, Sharing
from slimpipe.attention.kv_store import LayerStore, SlotBuffers
from slimpipe.attention.mask import Documents, Mask
from slimpipe.program import SlotPlan, Unit
from slimpipe.program.runs import subtract


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
        self._layers = {
            layer: LayerStore(buffers, index=index, hold=hold) for index, (layer, buffers) in enumerate(layers.items())
        }

    @property
    def layers(self) -> list[LayerStore]:
        """All of them, in the stage's order."""
        return list(self._layers.values())

    def layer(self, module: nn.Module) -> LayerStore:
        """Store of one attention module of the stage."""
        return self._layers[module]

    @property
    def carry_bytes(self) -> int:
        """Bytes of the dK,dV in waiting of all layers."""
        return sum(layer.carry_bytes for layer in self._layers.values())


class Past(NamedTuple):
    """What queries see of earlier slices on this rank."""

    slots: tuple[int, int]
    """Range of the slots of K,V, outside of which nothing is seen."""
    mask: Mask | None
    """Of the view of these slots; None if every query sees all of it."""


class SliceContext:
    """One unit, as its attention layers see it. Its masks are made once per phase, for all layers.

    Args:
        unit: The unit.
        store: The stage's store.
        documents: Where the microbatch's documents start.
        keep_output: Whether layers keep output and LSE for a recompute.
        kernel: Attention kernel of layers that do not choose one themselves.
        sharing: What other ranks have to do with the unit's forward; None for nothing.
    """

    def __init__(
        self,
        unit: Unit,
        store: StageStore,
        documents: Documents,
        *,
        keep_output: bool,
        kernel: str = "auto",
        sharing: Sharing | None = None,
    ) -> None:
        self.unit = unit
        self.keep_output = keep_output
        self.kernel = kernel
        self._documents = documents
        self._store = store
        self._called: set[nn.Module] = set()
        self.enter(Phase.FORWARD, sharing)

    def enter(self, phase: Phase, sharing: Sharing | None = None) -> None:
        """Begin the unit's forward or backward.

        Args:
            phase: Which.
            sharing: What other ranks have to do with it; None for nothing.
        """
        self.phase = phase
        self.sharing: Sharing = Alone() if sharing is None else sharing
        self._seen: dict[tuple, tuple[Mask | None, Past | None]] = {}
        self.sharing.start(self._store.layers)

    def seen(self, num_rows: int, *, window: int | None) -> tuple[Mask | None, Past | None]:
        """What queries see: the mask of their own keys, beside causality, and their past on this rank, None for none.

        Less than the whole past where other ranks attend to some of it, or where documents or a window hide it.

        Args:
            num_rows: Batch rows.
            window: Of the last tokens, how many a query sees, itself included; None for all.
        """
        key = num_rows, window
        if key not in self._seen:
            own_mask = self._documents.own_mask(self.unit.slice, window=window, num_rows=num_rows)
            self._seen[key] = own_mask, self._past(*key) if self.unit.slice else None
        return self._seen[key]

    def _past(self, num_rows: int, window: int | None) -> Past | None:
        unit, L = self.unit, self._documents.slice_len
        low, high = self._store.plan.past(unit)
        moved = self.sharing.moved if window is None else ()  # layers with a window keep their work
        mask = None
        if self._documents.starts or moved or window:
            mask = self._documents.part_mask(
                unit.slice,
                [(held * L, (held + 1) * L) for held in self._store.plan.slices_in(unit, low, high)],
                rows=subtract(((0, unit.slice * L),), moved),
                num_rows=num_rows,
                window=window,
            )
        if mask is None:
            return Past((low, high), None)
        if mask.sees_nothing:
            return None
        # Of the slots that nobody sees, gradients would be zeros: a long past costs nothing where it is hidden.
        first, last = mask.keys_seen(step=L)
        return Past((low + first // L, low + last // L), mask.of_keys(first, last))

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
