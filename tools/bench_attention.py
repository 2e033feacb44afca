"""`SliceAttention` over a sequence: in one piece, and in slices with all that a stage does for one layer.

Shapes: B batch, L slice, S sequence, N query heads, G K,V heads, H head dim.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from slimpipe import SliceAttention, build_program
from slimpipe.attention.context import Phase, SliceContext, StageStore
from slimpipe.attention.kv_store import SlotBuffers
from slimpipe.attention.mask import Documents
from slimpipe.program import SlotPlan, Unit, plan_slots

Inputs = list[tuple[Tensor, ...]]
"""q, k, v, dout of each slice."""


def random_qkv_and_dout(
    *,
    batch: int = 1,
    seq_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """Normal q_BSNH, k_BSGH, v_BSGH, dout_BSNH; ``value_head_dim`` is ``head_dim`` if it is None."""
    generator = torch.Generator(device).manual_seed(0)
    H, Hv = head_dim, value_head_dim or head_dim
    return [
        torch.randn(batch, seq_len, *heads, generator=generator, dtype=dtype, device=device)
        for heads in ((num_heads, H), (num_kv_heads, H), (num_kv_heads, Hv), (num_heads, Hv))
    ]


class AttentionCase:
    """The two ways to attend to the same inputs.

    Args:
        qkv_and_dout: See `random_qkv_and_dout`.
        kernel: See `SlimPipeOptions.kernel`.
        positions_BS: They restart at 0 where a document starts; None for one document.
    """

    def __init__(self, qkv_and_dout: list[Tensor], *, kernel: str, positions_BS: Tensor | None = None) -> None:
        self._qkv_and_dout = qkv_and_dout
        self._positions_BS = positions_BS
        self.attention = SliceAttention(kernel=kernel)

    def inputs(self, num_slices: int) -> Inputs:
        """Inputs of each slice, as its projections would give them: contiguous, without gradients yet."""
        by_slice = zip(*(x.chunk(num_slices, dim=1) for x in self._qkv_and_dout), strict=True)
        return [
            tuple(x.contiguous().detach().requires_grad_(i < 3) for i, x in enumerate(tensors)) for tensors in by_slice
        ]

    def whole(self, inputs: Inputs) -> list[Tensor]:
        """Attend in one piece, forward and backward; returns the output."""
        ((q, k, v, dout),) = inputs
        out = self.attention(q, k, v, positions=self._positions_BS, enable_gqa=True)
        out.backward(dout)
        return [out]

    def sliced(self, inputs: Inputs) -> list[Tensor]:
        """Attend slice by slice: all forwards, then all backwards in reverse order; returns the outputs."""
        plan = one_rank_plan(len(inputs))
        store = StageStore(plan, {self.attention: SlotBuffers(plan)})
        documents = Documents.from_positions(self._positions_BS, slice_len=inputs[0][0].shape[1])
        outs, contexts = [], []
        for index, (q, k, v, _) in enumerate(inputs):
            contexts.append(SliceContext(Unit(0, 0, index), store, documents, keep_output=False))
            outs.append(self.attention(q, k, v, attention_masks=contexts[-1], enable_gqa=True))
        for context, out, (*_, dout) in zip(contexts[::-1], outs[::-1], inputs[::-1], strict=True):
            context.enter(Phase.BACKWARD)
            out.backward(dout)
        return outs

    def results(self, num_slices: int) -> list[Tensor]:
        """Output, dq, dk, dv of the sequence; in one piece for one slice."""
        inputs = self.inputs(num_slices)
        outs = self.whole(inputs) if num_slices == 1 else self.sliced(inputs)
        by_name: list[list] = [outs, *([x[i].grad for x in inputs] for i in range(3))]
        return [torch.cat(slices, dim=1).detach() for slices in by_name]


@lru_cache
def one_rank_plan(num_slices: int) -> SlotPlan:
    """Where slices sit on the only rank; a schedule plans once, too, not in every step."""
    return plan_slots(build_program(1, num_slices, 1, 1), (0,))


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm, in float64, of what is not -inf; inf where -inf is out of place."""
    empty = want == -torch.inf
    if not torch.equal(got == -torch.inf, empty):
        return torch.inf
    got, want = got.double().masked_fill(empty, 0), want.double().masked_fill(empty, 0)
    return ((got - want).norm() / want.norm()).item()


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Time of ``run()``: on a GPU between events, else by the wall clock."""
    if device.type != "cuda":
        wall = time.perf_counter()
        run()
        return time.perf_counter() - wall
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
