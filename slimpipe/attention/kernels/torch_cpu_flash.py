"""PyTorch's flash attention on the CPU.

The op takes K,V in strided views and with fewer heads than Q. Rows that see nothing would come back with LSE 0, but
none reaches it: masks are served by cropping. Windows, which it does not know, are drawn into its attn_mask.

Shapes: B batch, L queries, K keys, N query heads, G K,V heads, H head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimpipe.attention.kernels.base import AttentionKernel, head_dim_contiguous
from slimpipe.attention.mask import band_LK

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class TorchCpuFlashKernel(AttentionKernel):
    """`aten::_scaled_dot_product_flash_attention_for_cpu`; results in the dtype of q, LSE in float32 or float64."""

    name = "torch_cpu_flash"

    def refusal(self, q_BLNH: Tensor, k_BKGH: Tensor, v_BKGH: Tensor) -> str | None:
        if q_BLNH.device.type != "cpu":
            return f"needs tensors on the CPU; these are on {q_BLNH.device}"
        if q_BLNH.dtype not in _DTYPES:
            return f"needs one of {', '.join(map(str, _DTYPES))}; these tensors are {q_BLNH.dtype}"
        if v_BKGH.shape[-1] != q_BLNH.shape[-1]:
            return f"needs one head dim; q and k have {q_BLNH.shape[-1]}, v has {v_BKGH.shape[-1]}"
        return None

    def _forward(self, q_BLNH, k_BKGH, v_BKGH, causal, left, scale):
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        q_BNLH, k_BGKH, v_BGKH = map(_by_head, (q_BLNH, k_BKGH, v_BKGH))
        how = _how(q_BLNH, k_BKGH, causal, left)
        out_BNLH, lse_BNL = op(q_BNLH, k_BGKH, v_BGKH, 0.0, **how, scale=scale)
        return out_BNLH.transpose(1, 2), lse_BNL

    def _backward(self, dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL, causal, left, scale):
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        by_head = map(_by_head, (dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH))
        dq_BNLH, dk_BGKH, dv_BGKH = op(*by_head, lse_BNL, 0.0, **_how(q_BLNH, k_BKGH, causal, left), scale=scale)
        return dq_BNLH.transpose(1, 2), dk_BGKH.transpose(1, 2), dv_BGKH.transpose(1, 2)


def _how(q_BLNH: Tensor, k_BKGH: Tensor, causal: bool, left: int | None) -> dict[str, Any]:
    """The op's arguments for what is visible."""
    if left is None:
        return {"is_causal": causal}
    visible_LK = band_LK(q_BLNH.shape[1], k_BKGH.shape[1], left=left, device=q_BLNH.device, causal=causal)
    bias_LK = q_BLNH.new_zeros(visible_LK.shape).masked_fill_(~visible_LK, -float("inf"))
    return {"is_causal": False, "attn_mask": bias_LK}


def _by_head(x_BLNH: Tensor) -> Tensor:
    return head_dim_contiguous(x_BLNH).transpose(1, 2)
