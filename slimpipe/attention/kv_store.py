"""Where the K,V of live slices stay between a slice's forward and its backward, and where dK,dV wait for their slice.

Shapes: B batch, L slice, K past tokens, N query heads, G K,V heads, H head dim. A *slot* holds the K,V of one slice;
where each slice sits is planned ahead of time from the program (`slimpipe.program.slots`), so that the past of any
slice is one contiguous view and nothing is ever concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from slimpipe.dtypes import wide_dtype

if TYPE_CHECKING:
    from slimpipe.program import SlotPlan, Unit
    from slimpipe.program.runs import Run, Runs


class SlotBuffers:
    """K,V of all slots of one plan, for one attention layer of each of its stages.

    Buffers appear at the first slice of a step and go with the object. Layers of one shape share a pair.
    """

    def __init__(self, plan: SlotPlan) -> None:
        self.plan = plan
        self._pairs: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(map(_num_bytes, self._pairs.values()))

    def like(self, k_BLGH: torch.Tensor, v_BLGH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers for slices of this shape, ``(k, v)``, slots along dim 1."""
        key = k_BLGH.shape, v_BLGH.shape, k_BLGH.dtype, k_BLGH.device
        if key not in self._pairs:
            self._pairs[key] = self._empty(k_BLGH), self._empty(v_BLGH)
        return self._pairs[key]

    def _empty(self, x_BLGH: torch.Tensor) -> torch.Tensor:
        B, L, *heads = x_BLGH.shape
        return x_BLGH.new_empty(B, self.plan.num_slots * L, *heads)


class LayerStore:
    """K,V, dK,dV and kept attention outputs of one attention layer.

    Slots are reused as the plan says: a backward frees its slice's slot by the mere passing of time, no call is needed.
    """

    def __init__(
        self, buffers: SlotBuffers, *, index: int = 0, hold: Callable[[torch.Tensor], object] | None = None
    ) -> None:
        self.index = index
        """Of the layer among the attention layers of its stage."""
        self._buffers = buffers
        self._plan = buffers.plan
        self._hold = hold
        self._kv: tuple[torch.Tensor, torch.Tensor] | None = None
        self._carry: tuple[torch.Tensor, torch.Tensor] | None = None
        self._carry_low = 0
        self._kept: dict[Unit, tuple[tuple[torch.Tensor, torch.Tensor], object]] = {}
        self._slice_len = 0

    @property
    def carry_bytes(self) -> int:
        """Bytes of the dK,dV that wait for earlier slices."""
        return _num_bytes(self._carry)

    @property
    def value_shape(self) -> torch.Size:
        """Shape of the buffer of V."""
        assert self._kv is not None, "no K,V was appended to this layer"
        return self._kv[1].shape

    def append(self, unit: Unit, k_BLGH: torch.Tensor, v_BLGH: torch.Tensor) -> None:
        """Copy the K,V of one slice into its slot."""
        if self._kv is None:
            self._slice_len = k_BLGH.shape[1]
            self._kv = self._buffers.like(k_BLGH, v_BLGH)
        slot = self._plan.slot(unit)
        for buffer, x in zip(self._slots(self._kv, slot, slot + 1), (k_BLGH, v_BLGH), strict=True):
            buffer.copy_(x)

    def own(self, unit: Unit) -> tuple[torch.Tensor, torch.Tensor]:
        """K,V of one slice, as views ``(k_BLGH, v_BLGH)``."""
        slot = self._plan.slot(unit)
        return self._slots(self._kv, slot, slot + 1)

    def slots(self, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K,V of the slices in a range of slots, as views ``(k_BKGH, v_BKGH)``, in the order of slots."""
        return self._slots(self._kv, low, high)

    def rows(self, unit: Unit, runs: Runs) -> tuple[torch.Tensor, torch.Tensor]:
        """K,V of some past tokens of the unit's microbatch, ``(k_BKGH, v_BKGH)``, in the order of tokens; copies."""
        assert self._kv is not None, "no K,V was appended to this layer"
        parts = [self._token_views(self._kv, unit, run, low=0) for run in self._by_slice(runs)]
        return torch.cat([k for k, _ in parts], dim=1), torch.cat([v for _, v in parts], dim=1)

    def keep(self, unit: Unit, out_BLNH: torch.Tensor, lse_BNL: torch.Tensor) -> None:
        """Keep a slice's attention output and LSE for its recompute."""
        # Detached: autograd makes the output its own, and what is kept must not keep a graph.
        pair = out_BLNH.detach(), lse_BNL.detach()
        self._kept[unit] = pair, None if self._hold is None else tuple(map(self._hold, pair))

    def kept(self, unit: Unit) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The kept output and LSE, or None."""
        pair, _ = self._kept.get(unit, (None, None))
        return pair

    def add_past_gradient(
        self, unit: Unit, slots: tuple[int, int], dk_BKGH: torch.Tensor, dv_BKGH: torch.Tensor
    ) -> None:
        """Add one slice's contribution to the dK,dV of the earlier slices in a range of slots, in fp32 or wider."""
        if self._carry is None and slots == self._plan.past(unit):
            self._carry_low = slots[0]
            wide = wide_dtype(dk_BKGH.dtype)
            self._carry = dk_BKGH.to(wide), dv_BKGH.to(wide)
            return
        carry = self._carry_for(unit)
        low, high = (slot - self._carry_low for slot in slots)
        for view, x in zip(self._slots(carry, low, high), (dk_BKGH, dv_BKGH), strict=True):
            view.add_(x)

    def add_rows_gradient(self, unit: Unit, runs: Runs, dk_BKGH: torch.Tensor, dv_BKGH: torch.Tensor) -> None:
        """Add what another rank has computed for the dK,dV of some past tokens, in the order of tokens."""
        carry = self._carry_for(unit)
        for run, *gradients in cut_by_run(self._by_slice(runs), dk_BKGH, dv_BKGH):
            for view, x in zip(self._token_views(carry, unit, run, low=self._carry_low), gradients, strict=True):
                view.add_(x)

    def take_gradient(
        self, unit: Unit, dk_BLGH: torch.Tensor, dv_BLGH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A slice's own dK,dV plus what later slices added, cast once to the dtype of the arguments.

        Ends the slice: its kept output goes, and after slice 0 the carry goes too.
        """
        self._kept.pop(unit, None)
        if self._carry is None:
            return dk_BLGH, dv_BLGH
        slot = self._plan.slot(unit)
        low, high = self._plan.past(unit)
        if self._carry_low <= slot < self._carry_low + self._carry[0].shape[1] // self._slice_len:
            carried = self._slots(self._carry, slot - self._carry_low, slot - self._carry_low + 1)
            dk_BLGH, dv_BLGH = ((carry + x).to(x.dtype) for carry, x in zip(carried, (dk_BLGH, dv_BLGH), strict=True))
        if low == high:
            self._carry = None
        return dk_BLGH, dv_BLGH

    def _carry_for(self, unit: Unit) -> tuple[torch.Tensor, torch.Tensor]:
        """The dK,dV in waiting, zeros at first. Backward runs from the last slice down: the first past is widest."""
        if self._carry is None:
            self._carry_low, high = self._plan.past(unit)
            k_BKGH, v_BKGH = self._slots(self._kv, self._carry_low, high)
            wide = wide_dtype(k_BKGH.dtype)
            self._carry = torch.zeros_like(k_BKGH, dtype=wide), torch.zeros_like(v_BKGH, dtype=wide)
        return self._carry

    def _by_slice(self, runs: Runs) -> Iterator[Run]:
        """Cuts runs where one slice ends and the next begins: their slots need not be neighbours."""
        for start, stop in runs:
            while start < stop:
                end = min(stop, start - start % self._slice_len + self._slice_len)
                yield start, end
                start = end

    def _token_views(
        self, pair: tuple[torch.Tensor, torch.Tensor], unit: Unit, run: Run, *, low: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of tokens of one slice in buffers that begin with slot ``low``."""
        slice_index, offset = divmod(run[0], self._slice_len)
        start = (self._plan.slot(unit._replace(slice=slice_index)) - low) * self._slice_len + offset
        return pair[0].narrow(1, start, run[1] - run[0]), pair[1].narrow(1, start, run[1] - run[0])

    def _slots(
        self, pair: tuple[torch.Tensor, torch.Tensor] | None, low: int, high: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert pair is not None, "no K,V was appended to this layer"
        start, length = low * self._slice_len, (high - low) * self._slice_len
        k_BKGH, v_BKGH = pair
        return k_BKGH.narrow(1, start, length), v_BKGH.narrow(1, start, length)


def cut_by_run(
    runs: Iterable[Run], k_BKGH: torch.Tensor, v_BKGH: torch.Tensor
) -> Iterator[tuple[Run, torch.Tensor, torch.Tensor]]:
    """Cuts K,V, or dK,dV, whose rows are these runs laid end to end; views."""
    place = 0
    for start, stop in runs:
        yield (start, stop), k_BKGH.narrow(1, place, stop - start), v_BKGH.narrow(1, place, stop - start)
        place += stop - start
    assert place == k_BKGH.shape[1], f"{k_BKGH.shape[1]} rows for runs of {place}"


def _num_bytes(pair: tuple[torch.Tensor, torch.Tensor] | None) -> int:
    return 0 if pair is None else sum(x.nbytes for x in pair)
