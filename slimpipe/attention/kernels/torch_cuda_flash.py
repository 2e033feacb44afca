"""PyTorch's own flash attention on CUDA.

Shapes: B batch, L queries, K keys, T tokens laid end to end, N query heads, G K,V heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slimpipe.attention.kernels.base import head_dim_contiguous
from slimpipe.attention.kernels.cuda_flash import CudaFlashKernel


class TorchCudaFlashKernel(CudaFlashKernel):
    """`aten::_flash_attention_forward` and `aten::_flash_attention_backward`.

    Args:
        forward_op, backward_op: Called instead of the two ops, with their arguments.
    """

    name = "torch_cuda_flash"

    def __init__(self, *, forward_op: Callable | None = None, backward_op: Callable | None = None) -> None:
        self._forward_op = forward_op or torch.ops.aten._flash_attention_forward.default
        self._backward_op = backward_op or torch.ops.aten._flash_attention_backward.default

    def refusal(self, q_BLNH: Tensor, k_BKGH: Tensor, v_BKGH: Tensor) -> str | None:
        reason = super().refusal(q_BLNH, k_BKGH, v_BKGH)
        if reason is None and not torch.backends.cuda.is_flash_attention_available():
            return "needs a PyTorch that was built with flash attention"
        return reason

    def _forward(self, q_BLNH, k_BKGH, v_BKGH, causal, left, scale):
        L, K = q_BLNH.shape[1], k_BKGH.shape[1]
        q_BLNH, k_BKGH, v_BKGH = map(head_dim_contiguous, (q_BLNH, k_BKGH, v_BKGH))
        out_BLNH, lse_BNL, *_ = self._forward_op(
            q_BLNH, k_BKGH, v_BKGH, None, None, L, K, 0.0, causal, False, scale=scale
        )
        return out_BLNH, lse_BNL

    def _backward(self, dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL, causal, left, scale):
        L, K = q_BLNH.shape[1], k_BKGH.shape[1]
        q_BLNH, k_BKGH, v_BKGH = map(head_dim_contiguous, (q_BLNH, k_BKGH, v_BKGH))
        tensors = dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL.contiguous()
        return self._backward_op(*tensors, None, None, L, K, 0.0, causal, *_no_dropout(q_BLNH), scale=scale)

    def _segments_forward(self, q_TNH, k_TGH, v_TGH, cu_seqlens, longest, left, scale):
        q_TNH, k_TGH, v_TGH = map(head_dim_contiguous, (q_TNH, k_TGH, v_TGH))
        out_TNH, lse_NT, *_ = self._forward_op(
            q_TNH, k_TGH, v_TGH, cu_seqlens, cu_seqlens, longest, longest, 0.0, True, False, scale=scale
        )
        return out_TNH, lse_NT

    def _segments_backward(self, dout_TNH, q_TNH, k_TGH, v_TGH, out_TNH, lse_NT, cu_seqlens, longest, left, scale):
        q_TNH, k_TGH, v_TGH = map(head_dim_contiguous, (q_TNH, k_TGH, v_TGH))
        tensors = dout_TNH, q_TNH, k_TGH, v_TGH, out_TNH, lse_NT
        segments = cu_seqlens, cu_seqlens, longest, longest
        return self._backward_op(*tensors, *segments, 0.0, True, *_no_dropout(q_TNH), scale=scale)


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor]:
    """The random state of the forward, which the op does not read when nothing is dropped."""
    return torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, dtype=torch.uint64, device=q.device)
