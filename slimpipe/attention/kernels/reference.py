"""Attention as it is written on paper: slow, for every device and dtype, the yardstick of the other kernels.

Shapes: B batch, L queries, K keys, G K,V heads, R query heads per K,V head (N = G R), H head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimpipe.attention.kernels.base import AttentionKernel
from slimpipe.attention.mask import Mask
from slimpipe.dtypes import wide_dtype


class ReferenceKernel(AttentionKernel):
    """Computes in float32 or wider and returns that; holds all B x N x L x K scores at once."""

    name = "reference"

    def refusal(self, q_BLNH: Tensor, k_BKGH: Tensor, v_BKGH: Tensor) -> str | None:
        return None if q_BLNH.is_floating_point() else f"needs floating point tensors; these are {q_BLNH.dtype}"

    def _forward(self, q_BLNH, k_BKGH, v_BKGH, causal, scale):
        return self._masked_forward(q_BLNH, k_BKGH, v_BKGH, causal, scale, None)

    def _backward(self, dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL, causal, scale):
        return self._masked_backward(dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL, causal, scale, None)

    def _masked_forward(self, q_BLNH, k_BKGH, v_BKGH, causal, scale, mask):
        q_BLGRH, k_BKGH, v_BKGH = _by_kv_head(q_BLNH, k_BKGH), _wide(k_BKGH), _wide(v_BKGH)
        scores_BGRLK = _scores(q_BLGRH, k_BKGH, causal, scale, mask)
        lse_BGRL = scores_BGRLK.logsumexp(-1)
        p_BGRLK = (scores_BGRLK - _finite_or_inf(lse_BGRL).unsqueeze(-1)).exp()
        out_BLGRH = torch.einsum("bgrlk,bkgh->blgrh", p_BGRLK, v_BKGH)
        return out_BLGRH.flatten(2, 3), lse_BGRL.flatten(1, 2)

    def _masked_backward(self, dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL, causal, scale, mask):
        G = k_BKGH.shape[2]
        dout_BLGRH, out_BLGRH = _by_kv_head(dout_BLNH, k_BKGH), _by_kv_head(out_BLNH, k_BKGH)
        q_BLGRH, k_BKGH, v_BKGH = _by_kv_head(q_BLNH, k_BKGH), _wide(k_BKGH), _wide(v_BKGH)
        lse_BGRL = _finite_or_inf(lse_BNL).unflatten(1, (G, -1))
        p_BGRLK = (_scores(q_BLGRH, k_BKGH, causal, scale, mask) - lse_BGRL.unsqueeze(-1)).exp()
        dv_BKGH = torch.einsum("bgrlk,blgrh->bkgh", p_BGRLK, dout_BLGRH)
        dp_BGRLK = torch.einsum("blgrh,bkgh->bgrlk", dout_BLGRH, v_BKGH)
        delta_BGRL = (dout_BLGRH * out_BLGRH).sum(-1).permute(0, 2, 3, 1)
        ds_BGRLK = p_BGRLK * (dp_BGRLK - delta_BGRL.unsqueeze(-1)) * scale
        dq_BLGRH = torch.einsum("bgrlk,bkgh->blgrh", ds_BGRLK, k_BKGH)
        dk_BKGH = torch.einsum("bgrlk,blgrh->bkgh", ds_BGRLK, q_BLGRH)
        return dq_BLGRH.flatten(2, 3), dk_BKGH, dv_BKGH


def _scores(q_BLGRH: Tensor, k_BKGH: Tensor, causal: bool, scale: float, mask: Mask | None) -> Tensor:
    """Scaled scores, -inf where the key is not visible."""
    scores_BGRLK = torch.einsum("blgrh,bkgh->bgrlk", q_BLGRH, k_BKGH) * scale
    if causal:
        later_LK = scores_BGRLK.new_ones(scores_BGRLK.shape[-2:], dtype=torch.bool).triu(1)
        scores_BGRLK.masked_fill_(later_LK, -float("inf"))
    if mask is not None:
        scores_BGRLK.masked_fill_(~mask.dense_BLK(q_BLGRH.device)[:, None, None], -float("inf"))
    return scores_BGRLK


def _finite_or_inf(lse: Tensor) -> Tensor:
    """LSE with +inf for rows that see nothing, so that exp(score - LSE) is 0 there, not NaN."""
    return lse.masked_fill(lse == -float("inf"), float("inf"))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(wide_dtype(tensor.dtype))


def _by_kv_head(x_BLNH: Tensor, k_BKGH: Tensor) -> Tensor:
    """Query heads grouped by the K,V head they share, in float32 or wider."""
    return _wide(x_BLNH).unflatten(2, (k_BKGH.shape[2], -1))
