"""PyTorch's flash attention on the CPU.

The op takes K,V in strided views and with fewer heads than Q. Rows that see nothing would come back with LSE 0, but
none reaches it: masks are served by cropping.

Shapes: B batch, L queries, K keys, N query heads, G K,V heads, H head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimpipe.attention.kernels.base import AttentionKernel, head_dim_contiguous

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

    def _forward(self, q_BLNH, k_BKGH, v_BKGH, causal, scale):
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        q_BNLH, k_BGKH, v_BGKH = map(_by_head, (q_BLNH, k_BKGH, v_BKGH))
        out_BNLH, lse_BNL = op(q_BNLH, k_BGKH, v_BGKH, 0.0, causal, scale=scale)
        return out_BNLH.transpose(1, 2), lse_BNL

    def _backward(self, dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL, causal, scale):
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        by_head = map(_by_head, (dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH))
        dq_BNLH, dk_BGKH, dv_BGKH = op(*by_head, lse_BNL, 0.0, causal, scale=scale)
        return dq_BNLH.transpose(1, 2), dk_BGKH.transpose(1, 2), dv_BGKH.transpose(1, 2)


def _by_head(x_BLNH: Tensor) -> Tensor:
    return head_dim_contiguous(x_BLNH).transpose(1, 2)
