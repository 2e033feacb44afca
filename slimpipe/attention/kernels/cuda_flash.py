"""What the FlashAttention bindings share: documents by segments, the layout of tensors and of the LSE, window edges.

A masked causal part (documents inside a slice) is one call over segments of the B * L tokens laid end to end. A masked
past is cropped to what is visible, one call per block (see base.py): for one batch row in slice order, a single call.

Shapes: B batch, L queries, K keys, T = B L tokens laid end to end, N query heads, G K,V heads, H head dim.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from slimpipe.attention.kernels.base import head_dim_contiguous
from slimpipe.attention.kernels.cuda import CudaKernel
from slimpipe.dtypes import wide_dtype

Segments = tuple[Tensor, int] | None
"""Bounds (int32) of segments and the longest one's length; None where tensors have a batch dimension instead."""


class CudaFlashKernel(CudaKernel):
    """A binding: `_attend` and `_attend_backward` are one call each."""

    right_edge_is_num_keys: ClassVar[bool] = False
    """True if a window without a limit to the right ends K keys after a query's own place, as FlashAttention-2 has it:
    the first of more than K + 1 queries would miss keys."""

    def _forward(self, q_BLNH, k_BKGH, v_BKGH, causal, left, scale):
        cut = self._cut(q_BLNH, k_BKGH, causal, left)
        if cut is None:
            return self._call(q_BLNH, k_BKGH, v_BKGH, None, causal, left, scale)
        out_a_BLNH, lse_a_BNL = self._call(q_BLNH[:, :cut], k_BKGH, v_BKGH, None, False, None, scale)
        out_b_BLNH, lse_b_BNL = self._call(q_BLNH[:, cut:], k_BKGH, v_BKGH, None, False, left, scale)
        return torch.cat([out_a_BLNH, out_b_BLNH], 1), torch.cat([lse_a_BNL, lse_b_BNL], 2)

    def _backward(self, dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL, causal, left, scale):
        tensors = dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL
        cut = self._cut(q_BLNH, k_BKGH, causal, left)
        if cut is None:
            return self._call_backward(*tensors, None, causal, left, scale)
        parts = []
        for rows, limit in ((slice(None, cut), None), (slice(cut, None), left)):
            dout, q, out, lse = dout_BLNH[:, rows], q_BLNH[:, rows], out_BLNH[:, rows], lse_BNL[:, :, rows]
            parts.append(self._call_backward(dout, q, k_BKGH, v_BKGH, out, lse, None, False, limit, scale))
        (dq_a, dk_a, dv_a), (dq_b, dk_b, dv_b) = parts
        wide = wide_dtype(q_BLNH.dtype)
        return torch.cat([dq_a, dq_b], 1), dk_a.to(wide).add_(dk_b), dv_a.to(wide).add_(dv_b)

    def _cut(self, q_BLNH: Tensor, k_BKGH: Tensor, causal: bool, left: int | None) -> int | None:
        """The first query that does not see all keys, where the queries before it must be attended apart."""
        L, K = q_BLNH.shape[1], k_BKGH.shape[1]
        if left is None or causal or L <= K + 1 or not self.right_edge_is_num_keys:
            return None
        assert left < K - 1, f"a window that every query sees whole: {left} of {K} keys"
        return L - (K - 1 - left)  # at most K - 1 queries remain

    def _masked_forward(self, q_BLNH, k_BKGH, v_BKGH, causal, scale, mask):
        if not causal or mask.is_one_band:
            return super()._masked_forward(q_BLNH, k_BKGH, v_BKGH, causal, scale, mask)
        B, L, N, _ = q_BLNH.shape
        q_TNH, k_TGH, v_TGH = (x.flatten(0, 1) for x in (q_BLNH, k_BKGH, v_BKGH))
        segments = mask.cu_seqlens(q_BLNH.device)
        out_TNH, lse_NT = self._call(q_TNH, k_TGH, v_TGH, segments, True, mask.left, scale)
        assert lse_NT.shape == (N, B * L), f"LSE of segments came as {tuple(lse_NT.shape)}"
        return out_TNH.unflatten(0, (B, L)), lse_NT.unflatten(1, (B, L)).transpose(0, 1)

    def _masked_backward(self, dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL, causal, scale, mask):
        if not causal or mask.is_one_band:
            return super()._masked_backward(dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL, causal, scale, mask)
        B, L = q_BLNH.shape[:2]
        dout_TNH, q_TNH, k_TGH, v_TGH, out_TNH = (
            x.flatten(0, 1) for x in (dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH)
        )
        lse_NT = lse_BNL.transpose(0, 1).flatten(1)
        segments = mask.cu_seqlens(q_BLNH.device)
        grads = self._call_backward(dout_TNH, q_TNH, k_TGH, v_TGH, out_TNH, lse_NT, segments, True, mask.left, scale)
        dq_BLNH, dk_BLGH, dv_BLGH = (grad.unflatten(0, (B, L)) for grad in grads)
        return dq_BLNH, dk_BLGH, dv_BLGH

    def _call(self, q, k, v, segments, causal, left, scale):
        q, k, v = map(head_dim_contiguous, (q, k, v))
        return self._attend(q, k, v, segments, causal, left, scale)

    def _call_backward(self, dout, q, k, v, out, lse, segments, causal, left, scale):
        dout, q, k, v, out = map(head_dim_contiguous, (dout, q, k, v, out))
        return self._attend_backward(dout, q, k, v, out, lse.contiguous(), segments, causal, left, scale)

    @abstractmethod
    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool, left: int | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention of (B, L, N, H), with LSE (B, N, L), or inside each segment of (T, N, H), with LSE (N, T).

        The head dim is contiguous, other strides are free. ``left`` as in `Block`.
        """

    @abstractmethod
    def _attend_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        segments: Segments,
        causal: bool,
        left: int | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient of that: dq, dk, dv. The LSE is contiguous."""
