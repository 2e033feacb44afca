"""PyTorch's own flash attention on CUDA: FlashAttention-2, or the FA3 or FA4 that the user has activated in its place
(`torch.nn.attention.activate_flash_attention_impl`).

Shapes: B batch, L queries, K keys, T tokens laid end to end, N query heads, G K,V heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.attention
from torch import Tensor

from slimpipe.attention.kernels.cuda import refuse_capability, refuse_head_dims, refuse_older_than_ampere
from slimpipe.attention.kernels.cuda_flash import CudaFlashKernel, Segments
from slimpipe.attention.kernels.flash_attn_3 import refuse_hardware as refuse_hardware_of_3
from slimpipe.attention.kernels.flash_attn_4 import refuse_hardware as refuse_hardware_of_4
from slimpipe.attention.kernels.packages import parse_version


class TorchCudaFlashKernel(CudaFlashKernel):
    """`aten::_flash_attention_forward` and `aten::_flash_attention_backward`.

    Args:
        forward_op, backward_op: Called instead of the two ops, with their arguments.
    """

    name = "torch_cuda_flash"
    runs_on_rocm = True
    right_edge_is_num_keys = True

    def __init__(self, *, forward_op: Callable | None = None, backward_op: Callable | None = None) -> None:
        self._forward_op = forward_op or torch.ops.aten._flash_attention_forward.default
        self._backward_op = backward_op or torch.ops.aten._flash_attention_backward.default

    def _refusal(self, capability: tuple[int, int], head_dim: int, head_dim_v: int) -> str | None:
        if not torch.backends.cuda.is_flash_attention_available():
            return "needs a PyTorch that was built with flash attention"
        active = torch.nn.attention.current_flash_attention_impl()
        if active is None:
            reason = refuse_older_than_ampere(capability) or refuse_head_dims(head_dim, head_dim_v, up_to=256)
            has_little_memory = (8, 6) <= capability <= (8, 9) or capability[0] == 12
            if reason is None and 192 < head_dim <= 224 and has_little_memory:
                return f"has no backward for a head dim of {head_dim} on this GPU; nearest legal value: 192"
            return reason
        if active == "FA3":
            reason = refuse_hardware_of_3(capability, head_dim, head_dim_v)
        elif active != "FA4":
            reason = "is not known to work"
        elif parse_version(torch.__version__) < (2, 14):
            reason = "needs torch 2.14 or newer"  # 2.11 has no windows there and does not know what FA4 returns
        else:
            reason = refuse_capability(capability, majors=(9, 10))
            reason = reason or refuse_hardware_of_4(capability, head_dim, head_dim_v)
        if reason is None:
            return None
        return (
            f"has {active} activated, which {reason}; torch.nn.attention.restore_flash_attention_impl() goes back to "
            "FlashAttention-2"
        )

    def _attend(self, q, k, v, segments, causal, left, scale):
        where = _where(q, k, segments)
        out, lse, *_ = self._forward_op(q, k, v, *where, 0.0, causal, False, scale=scale, window_size_left=left)
        return out, lse

    def _attend_backward(self, dout, q, k, v, out, lse, segments, causal, left, scale):
        # The random state of the forward, which is not read when nothing is dropped.
        random = (
            torch.empty(2, dtype=torch.uint64, device=q.device),
            torch.empty(0, dtype=torch.uint64, device=q.device),
        )
        tensors = dout, q, k, v, out, lse, *_where(q, k, segments)
        return self._backward_op(*tensors, 0.0, causal, *random, scale=scale, window_size_left=left)


def _where(q: Tensor, k: Tensor, segments: Segments) -> tuple[Tensor | None, Tensor | None, int, int]:
    """The bounds of segments, and the longest of queries and of keys."""
    if segments is None:
        return None, None, q.shape[1], k.shape[1]
    cu_seqlens, longest = segments
    return cu_seqlens, cu_seqlens, longest, longest
