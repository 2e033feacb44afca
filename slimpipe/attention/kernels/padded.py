"""Values of a smaller head dim than queries and keys, for kernels that know one head dim only.

Zeros behind V are exact: they give an output of zeros, which is cut off, and leave scores, LSE and dout · out alone.

Shapes: B batch, L queries, K keys, N query heads, G K,V heads, H head dim of Q and K, Hv that of V.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from slimpipe.attention.kernels.base import AttentionKernel


class PaddedValues(AttentionKernel):
    """Another kernel, given V, and in backward the output and its gradient, with zeros up to the head dim of Q.

    Goes by the other kernel's name. Costs a copy of what is padded, and H / Hv of the other's work on V.

    Args:
        kernel: The other one.
    """

    def __init__(self, kernel: AttentionKernel) -> None:
        self._kernel = kernel
        self.name = kernel.name  # type: ignore[misc]

    def refusal(self, q_BLNH: Tensor, k_BKGH: Tensor, v_BKGHv: Tensor) -> str | None:
        H, Hv = q_BLNH.shape[-1], v_BKGHv.shape[-1]
        if Hv > H:
            return f"pads the head dim of V, {Hv}, to that of Q, {H}, which must not be smaller"
        return self._kernel.refusal(q_BLNH, k_BKGH, k_BKGH)  # padded, V has the shape of K

    def _forward(self, q_BLNH, k_BKGH, v_BKGHv, *how):
        out_BLNH, lse_BNL = self._kernel._forward(q_BLNH, k_BKGH, _padded(v_BKGHv, q_BLNH), *how)
        return _cut(out_BLNH, v_BKGHv), lse_BNL

    def _masked_forward(self, q_BLNH, k_BKGH, v_BKGHv, *how):
        out_BLNH, lse_BNL = self._kernel._masked_forward(q_BLNH, k_BKGH, _padded(v_BKGHv, q_BLNH), *how)
        return _cut(out_BLNH, v_BKGHv), lse_BNL

    def _backward(self, dout_BLNHv, q_BLNH, k_BKGH, v_BKGHv, out_BLNHv, lse_BNL, *how):
        dout_BLNH, v_BKGH, out_BLNH = (_padded(x, q_BLNH) for x in (dout_BLNHv, v_BKGHv, out_BLNHv))
        dq, dk, dv_BKGH = self._kernel._backward(dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL, *how)
        return dq, dk, _cut(dv_BKGH, v_BKGHv)

    def _masked_backward(self, dout_BLNHv, q_BLNH, k_BKGH, v_BKGHv, out_BLNHv, lse_BNL, *how):
        dout_BLNH, v_BKGH, out_BLNH = (_padded(x, q_BLNH) for x in (dout_BLNHv, v_BKGHv, out_BLNHv))
        dq, dk, dv_BKGH = self._kernel._masked_backward(dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL, *how)
        return dq, dk, _cut(dv_BKGH, v_BKGHv)


def padded_where_needed(kernel: AttentionKernel, q_BLNH: Tensor, k_BKGH: Tensor, v_BKGHv: Tensor) -> AttentionKernel:
    """The kernel itself, or with padded values where it serves tensors like these only so."""
    if v_BKGHv.shape[-1] >= q_BLNH.shape[-1] or kernel.refusal(q_BLNH, k_BKGH, v_BKGHv) is None:
        return kernel
    padded = PaddedValues(kernel)
    return padded if padded.refusal(q_BLNH, k_BKGH, v_BKGHv) is None else kernel


def _padded(x_Hv: Tensor, q_BLNH: Tensor) -> Tensor:
    return F.pad(x_Hv, (0, q_BLNH.shape[-1] - x_Hv.shape[-1]))


def _cut(x_H: Tensor, v_BKGHv: Tensor) -> Tensor:
    """A copy: a view would keep the zeros alive for as long as the output is kept for backward."""
    return x_H[..., : v_BKGHv.shape[-1]].contiguous()
