"""Attention as it is written on paper: slow, for every device and dtype, the yardstick of the other kernels.

Shapes: B batch, L queries, K keys, G K,V heads, R query heads per K,V head (N = G R), H head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimpipe.attention.kernels.base import AttentionKernel
from slimpipe.attention.mask import band_LK
from slimpipe.dtypes import wide_dtype


class ReferenceKernel(AttentionKernel):
    """Computes in float32 or wider and returns that; holds all B x N x L x K scores at once."""

    name = "reference"

    def refusal(self, q_BLNH: Tensor, k_BKGH: Tensor, v_BKGH: Tensor) -> str | None:
        return None if q_BLNH.is_floating_point() else f"needs floating point tensors; these are {q_BLNH.dtype}"

    def _forward(self, q_BLNH, k_BKGH, v_BKGH, causal, left, scale):
        hidden_LK = _hidden_LK(q_BLNH, k_BKGH, causal, left)
        return self._attend(q_BLNH, k_BKGH, v_BKGH, hidden_LK, scale)

    def _backward(self, dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL, causal, left, scale):
        hidden_LK = _hidden_LK(q_BLNH, k_BKGH, causal, left)
        return self._attend_backward(dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL, hidden_LK, scale)

    def _masked_forward(self, q_BLNH, k_BKGH, v_BKGH, causal, scale, mask):
        hidden_BLK = ~mask.dense_BLK(q_BLNH.device) | _hidden_LK(q_BLNH, k_BKGH, causal, None)
        return self._attend(q_BLNH, k_BKGH, v_BKGH, hidden_BLK[:, None, None], scale)

    def _masked_backward(self, dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL, causal, scale, mask):
        hidden_BLK = ~mask.dense_BLK(q_BLNH.device) | _hidden_LK(q_BLNH, k_BKGH, causal, None)
        tensors = dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL
        return self._attend_backward(*tensors, hidden_BLK[:, None, None], scale)

    def _attend(self, q_BLNH, k_BKGH, v_BKGH, hidden, scale):
        q_BLGRH, k_BKGH, v_BKGH = _by_kv_head(q_BLNH, k_BKGH), _wide(k_BKGH), _wide(v_BKGH)
        scores_BGRLK = _scores(q_BLGRH, k_BKGH, hidden, scale)
        lse_BGRL = scores_BGRLK.logsumexp(-1)
        p_BGRLK = (scores_BGRLK - _finite_or_inf(lse_BGRL).unsqueeze(-1)).exp()
        out_BLGRH = torch.einsum("bgrlk,bkgh->blgrh", p_BGRLK, v_BKGH)
        return out_BLGRH.flatten(2, 3), lse_BGRL.flatten(1, 2)

    def _attend_backward(self, dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL, hidden, scale):
        G = k_BKGH.shape[2]
        dout_BLGRH, out_BLGRH = _by_kv_head(dout_BLNH, k_BKGH), _by_kv_head(out_BLNH, k_BKGH)
        q_BLGRH, k_BKGH, v_BKGH = _by_kv_head(q_BLNH, k_BKGH), _wide(k_BKGH), _wide(v_BKGH)
        lse_BGRL = _finite_or_inf(lse_BNL).unflatten(1, (G, -1))
        p_BGRLK = (_scores(q_BLGRH, k_BKGH, hidden, scale) - lse_BGRL.unsqueeze(-1)).exp()
        dv_BKGH = torch.einsum("bgrlk,blgrh->bkgh", p_BGRLK, dout_BLGRH)
        dp_BGRLK = torch.einsum("blgrh,bkgh->bgrlk", dout_BLGRH, v_BKGH)
        delta_BGRL = (dout_BLGRH * out_BLGRH).sum(-1).permute(0, 2, 3, 1)
        ds_BGRLK = p_BGRLK * (dp_BGRLK - delta_BGRL.unsqueeze(-1)) * scale
        dq_BLGRH = torch.einsum("bgrlk,bkgh->blgrh", ds_BGRLK, k_BKGH)
        dk_BKGH = torch.einsum("bgrlk,blgrh->bkgh", ds_BGRLK, q_BLGRH)
        return dq_BLGRH.flatten(2, 3), dk_BKGH, dv_BKGH


def _hidden_LK(q_BLNH: Tensor, k_BKGH: Tensor, causal: bool, left: int | None) -> Tensor:
    """True where the key is not visible."""
    return ~band_LK(q_BLNH.shape[1], k_BKGH.shape[1], left=left, device=q_BLNH.device, causal=causal)


def _scores(q_BLGRH: Tensor, k_BKGH: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """Scaled scores, -inf where the key is hidden; ``hidden`` broadcasts to them."""
    scores_BGRLK = torch.einsum("blgrh,bkgh->bgrlk", q_BLGRH, k_BKGH) * scale
    return scores_BGRLK.masked_fill_(hidden, -float("inf"))


def _finite_or_inf(lse: Tensor) -> Tensor:
    """LSE with +inf for rows that see nothing, so that exp(score - LSE) is 0 there, not NaN."""
    return lse.masked_fill(lse == -float("inf"), float("inf"))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(wide_dtype(tensor.dtype))


def _by_kv_head(x_BLNH: Tensor, k_BKGH: Tensor) -> Tensor:
    """Query heads grouped by the K,V head they share, in float32 or wider."""
    return _wide(x_BLNH).unflatten(2, (k_BKGH.shape[2], -1))
