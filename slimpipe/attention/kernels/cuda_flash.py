"""What the two FlashAttention-2 bindings share: limits, documents by segments, and the layout of the LSE.

A masked causal part (documents inside a slice) is one call over segments of the B * L tokens laid end to end. A masked
past is cropped to what is visible, one call per block (see base.py): for one batch row in slice order, a single call.

Shapes: B batch, L queries, K keys, T = B L tokens laid end to end, N query heads, G K,V heads, H head dim.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from slimpipe.attention.kernels.base import AttentionKernel

_MAX_HEAD_DIM = 256


class CudaFlashKernel(AttentionKernel):
    """Results in the dtype of q, LSE in float32. float16 and bfloat16 only."""

    def refusal(self, q_BLNH: Tensor, k_BKGH: Tensor, v_BKGH: Tensor) -> str | None:
        head_dim = q_BLNH.shape[-1]
        if q_BLNH.device.type != "cuda":
            return f"needs tensors on a GPU; these are on {q_BLNH.device}"
        if q_BLNH.dtype not in (torch.float16, torch.bfloat16):
            return f"needs torch.bfloat16 or torch.float16; these tensors are {q_BLNH.dtype}"
        if v_BKGH.shape[-1] != head_dim:
            return f"needs one head dim; q and k have {head_dim}, v has {v_BKGH.shape[-1]}"
        if head_dim % 8 or head_dim > _MAX_HEAD_DIM:
            nearest = min(max(8, round(head_dim / 8) * 8), _MAX_HEAD_DIM)
            return f"needs a head dim of 8, 16, .. {_MAX_HEAD_DIM}; it is {head_dim}, nearest legal value: {nearest}"
        if torch.version.hip is None and torch.cuda.get_device_capability(q_BLNH.device) < (8, 0):
            return f"needs compute capability 8.0 (Ampere) or newer; {q_BLNH.device} is older"
        return None

    def _masked_forward(self, q_BLNH, k_BKGH, v_BKGH, causal, scale, mask):
        if not causal or mask.is_one_band:
            return super()._masked_forward(q_BLNH, k_BKGH, v_BKGH, causal, scale, mask)
        B, L, N, _ = q_BLNH.shape
        q_TNH, k_TGH, v_TGH = (x.flatten(0, 1) for x in (q_BLNH, k_BKGH, v_BKGH))
        cu_seqlens, longest = mask.cu_seqlens(q_BLNH.device)
        out_TNH, lse_NT = self._segments_forward(q_TNH, k_TGH, v_TGH, cu_seqlens, longest, mask.left, scale)
        assert lse_NT.shape == (N, B * L), f"LSE of segments came as {tuple(lse_NT.shape)}"
        return out_TNH.unflatten(0, (B, L)), lse_NT.unflatten(1, (B, L)).transpose(0, 1)

    def _masked_backward(self, dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL, causal, scale, mask):
        if not causal or mask.is_one_band:
            return super()._masked_backward(dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL, causal, scale, mask)
        B, L = q_BLNH.shape[:2]
        dout_TNH, q_TNH, k_TGH, v_TGH, out_TNH = (
            x.flatten(0, 1) for x in (dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH)
        )
        lse_NT = lse_BNL.transpose(0, 1).flatten(1).contiguous()
        cu_seqlens, longest = mask.cu_seqlens(q_BLNH.device)
        grads = self._segments_backward(
            dout_TNH, q_TNH, k_TGH, v_TGH, out_TNH, lse_NT, cu_seqlens, longest, mask.left, scale
        )
        dq_BLNH, dk_BLGH, dv_BLGH = (grad.unflatten(0, (B, L)) for grad in grads)
        return dq_BLNH, dk_BLGH, dv_BLGH

    @abstractmethod
    def _segments_forward(
        self,
        q_TNH: Tensor,
        k_TGH: Tensor,
        v_TGH: Tensor,
        cu_seqlens: Tensor,
        longest: int,
        left: int | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Causal attention inside each segment, with ``left`` as `Block`: out_TNH and lse_NT."""

    @abstractmethod
    def _segments_backward(
        self,
        dout_TNH: Tensor,
        q_TNH: Tensor,
        k_TGH: Tensor,
        v_TGH: Tensor,
        out_TNH: Tensor,
        lse_NT: Tensor,
        cu_seqlens: Tensor,
        longest: int,
        left: int | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient of that: dq_TNH, dk_TGH, dv_TGH."""
