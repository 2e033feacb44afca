"""Causal attention that a pipeline may run slice by slice: the maths of design 1.3.

Attention of slice i = causal attention on its own K,V, merged by log-sum-exp with full attention on the K,V of slices
0..i-1. Backward of slice i uses the merged output and LSE for every part and yields dK,dV for all slices <= i; what
belongs to earlier slices is added up in fp32 or wider until their own backward takes it. Of the past, other ranks may
compute parts meanwhile (`slimpipe.attention.helper`).

Shapes: B batch, L slice (the whole sequence outside a slimpipe schedule), K past tokens, N query heads, G K,V heads, H
head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slimpipe.attention.context import SliceContext
from slimpipe.attention.events import AttentionCall, Phase
from slimpipe.attention.kernels import AttentionKernel, choose_kernel, merge
from slimpipe.attention.kv_store import LayerStore
from slimpipe.attention.mask import Documents, Mask
from slimpipe.dtypes import wide_dtype
from slimpipe.options import check_kernel_name
from slimpipe.torch_private import hidden_from_dispatch_modes


class SliceAttention(nn.Module):
    """Causal inner attention, a drop-in for a scaled-dot-product one.

    Inside a slimpipe schedule it works on one slice and reads the past K,V of its sequence, with results equal to those
    of the unsliced model. Outside it is plain causal attention, exact for packed documents where it is told of them.

    Args:
        kernel: Attention kernel, see `SlimPipeOptions.kernel`; "auto" leaves the choice to the schedule's options.
        window: Sliding window: of the last tokens, how many a query sees, itself included; None for all.

    Raises:
        ValueError: No such kernel, or a window of less than one token.
        TypeError: A window that is no int.
    """

    def __init__(self, *, kernel: str = "auto", window: int | None = None) -> None:
        super().__init__()
        self.kernel = check_kernel_name(kernel)
        if window is not None and type(window) is not int:
            raise TypeError(
                f"SliceAttention(window={window!r}): it must be an int, how many tokens a query sees, or None for all"
            )
        if window is not None and window < 1:
            raise ValueError(
                f"SliceAttention(window={window}): a query sees at least its own token; nearest legal value: 1 (None: "
                "every token)"
            )
        self.window = window

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        positions: Tensor | None = None,
        attention_masks: SliceContext | Documents | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attend.

        Args:
            q_BLNH: Queries, positions already applied.
            k_BLNH: Keys, with their own number of heads, not repeated. (torchtitan goes by this name.)
            v_BLNH: Values.
            positions: Outside a schedule, (B, L) positions that restart at 0 at each document: documents do not see
                each other. Inside a schedule ignored, because the schedule was given them.
            attention_masks: What the schedule passed to the model, untouched. Outside a schedule None, or `Documents`.
            scale: Factor on the scores; None for 1 / sqrt(H).
            enable_gqa: Allow fewer K,V heads than query heads.

        Returns:
            out_BLNH, dtype of q.

        Raises:
            ValueError: Shapes that do not fit, heads that differ without ``enable_gqa``, or a kernel that cannot serve.
            TypeError: ``attention_masks`` is a mask object of another attention.
        """
        if q_BLNH.shape[2] != k_BLNH.shape[2] and not enable_gqa:
            raise ValueError(
                f"{q_BLNH.shape[2]} query heads and {k_BLNH.shape[2]} K,V heads: pass enable_gqa=True to share "
                "K,V heads"
            )
        scale = q_BLNH.shape[-1] ** -0.5 if scale is None else scale
        name = self.kernel
        if name == "auto" and isinstance(attention_masks, SliceContext):
            name = attention_masks.kernel
        kernel = choose_kernel(name, q_BLNH, k_BLNH, v_BLNH, window=self.window is not None)
        if isinstance(attention_masks, SliceContext):
            layer = attention_masks.layer(self)
            call = AttentionCall(kernel, scale, self.window)
            return _SliceAttention.apply(q_BLNH, k_BLNH, v_BLNH, attention_masks, layer, call)
        if attention_masks is None:
            if positions is not None and positions.dim() == 2 and positions.shape != q_BLNH.shape[:2]:
                raise ValueError(
                    f"positions have shape {tuple(positions.shape)}; nearest legal shape: {tuple(q_BLNH.shape[:2])}"
                )
            attention_masks = Documents.from_positions(positions, slice_len=q_BLNH.shape[1])
        if not isinstance(attention_masks, Documents):
            raise TypeError(
                f"attention_masks is a {type(attention_masks).__name__}: SliceAttention makes its own masks; pass "
                "positions that restart at 0 at each document, and attention_masks only as a slimpipe schedule hands "
                "it to the model"
            )
        mask = attention_masks.own_mask(0, window=self.window, num_rows=len(q_BLNH))
        return _PlainAttention.apply(q_BLNH, k_BLNH, v_BLNH, mask, kernel, scale)


class _PlainAttention(torch.autograd.Function):
    """Causal attention of a whole sequence."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, kernel: AttentionKernel, scale: float
    ) -> Tensor:
        out, lse = kernel.forward(q, k, v, causal=True, mask=mask, scale=scale)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mask, ctx.kernel, ctx.scale = mask, kernel, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = ctx.kernel.backward(dout, q, k, v, out, lse, causal=True, mask=ctx.mask, scale=ctx.scale)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


class _SliceAttention(torch.autograd.Function):
    """Attention of one slice: own causal part and past part.

    K,V are not saved for backward: they are in the store, and a slot handle outlives in-place writes that a saved view
    would not.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: SliceContext,
        layer: LayerStore,
        call: AttentionCall,
    ) -> Tensor:
        unit = context.unit
        with hidden_from_dispatch_modes():
            if context.phase is Phase.FORWARD:
                layer.append(unit, k, v)
                out, lse = _attend(q, context, layer, call)
                if context.keep_output and any(ctx.needs_input_grad):
                    layer.keep(unit, out, lse)
            else:
                out, lse = layer.kept(unit) or _attend(q, context, layer, call)
        ctx.save_for_backward(q, out, lse)
        ctx.args = context, layer, call
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, out, lse = ctx.saved_tensors
        context, layer, call = ctx.args
        kernel, scale, window = call
        unit, sharing = context.unit, context.sharing
        own_mask, past = context.seen(len(q), window=window)
        sharing.begin(Phase.BACKWARD, layer, (q, dout, out, lse), call)
        dq, dk, dv = kernel.backward(dout, q, *layer.own(unit), out, lse, causal=True, mask=own_mask, scale=scale)
        sharing.serve()
        dq = dq.to(wide_dtype(dq.dtype))
        if past is not None:
            dq_past, dk_past, dv_past = kernel.backward(
                dout, q, *layer.slots(*past.slots), out, lse, causal=False, mask=past.mask, scale=scale
            )
            dq.add_(dq_past)
            layer.add_past_gradient(unit, past.slots, dk_past, dv_past)
        for (dq_moved,) in sharing.replies():
            dq.add_(dq_moved)
        dk, dv = layer.take_gradient(unit, dk, dv)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None, None


def _attend(q: Tensor, context: SliceContext, layer: LayerStore, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output in the dtype of q, and LSE, of one slice."""
    kernel, scale, window = call
    unit, sharing = context.unit, context.sharing
    own_mask, past = context.seen(len(q), window=window)
    sharing.begin(Phase.FORWARD, layer, (q,), call)
    out, lse = kernel.forward(q, *layer.own(unit), causal=True, mask=own_mask, scale=scale)
    sharing.serve()
    if past is not None:
        part = kernel.forward(q, *layer.slots(*past.slots), causal=False, mask=past.mask, scale=scale)
        out, lse = merge(out, lse, *part)
    for moved in sharing.replies():
        out, lse = merge(out, lse, *moved)
    return out.to(q.dtype), lse
