"""cuDNN's attention, as PyTorch binds it. Chosen by name only until it has been proven on a GPU.

Documents are served by cropping, and PyTorch builds and keeps a plan for each new shape and layout of Q, K and V, which
takes far longer than running it: for slices of few lengths. Of windows the binding knows nothing.

Shapes: B batch, L queries, K keys, N query heads, G K,V heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slimpipe.attention.kernels.base import head_dim_contiguous
from slimpipe.attention.kernels.cuda import MLA, CudaKernel, refuse_head_dims, refuse_older_than_ampere
from slimpipe.attention.kernels.packages import deterministic
from slimpipe.attention.kernels.reference import ReferenceKernel


class TorchCudnnKernel(CudaKernel):
    """`aten::_scaled_dot_product_cudnn_attention` and its backward; causal is top-left there, and L equals K.

    Args:
        forward_op, backward_op: Called instead of the two ops, with their arguments.
    """

    name = "torch_cudnn"

    def __init__(self, *, forward_op: Callable | None = None, backward_op: Callable | None = None) -> None:
        aten = torch.ops.aten
        self._forward_op = forward_op or aten._scaled_dot_product_cudnn_attention.default
        self._backward_op = backward_op or aten._scaled_dot_product_cudnn_attention_backward.default

    def _refusal(self, capability: tuple[int, int], head_dim: int, head_dim_v: int) -> str | None:
        version = torch.backends.cudnn.version()
        if version is None or version < 91100:
            return f"needs cuDNN 9.11 or newer; this PyTorch has {version}"
        if deterministic():
            return "has no deterministic backward"
        # 256 depends on what PyTorch was compiled with, which it does not tell.
        pairs = (MLA,) if capability[0] in (9, 10) else ()
        reason = refuse_older_than_ampere(capability)
        return reason or refuse_head_dims(head_dim, head_dim_v, up_to=128, and_also=pairs)

    def _forward(self, q_BLNH, k_BKGH, v_BKGH, causal, left, scale):
        assert left is None, "choose_kernel was not told of a window"
        if k_BKGH.shape[1] == 1:  # cuDNN has no attention to a single key
            return ReferenceKernel()._forward(q_BLNH, k_BKGH, v_BKGH, causal, None, scale)
        by_head = map(_by_head, (q_BLNH, k_BKGH, v_BKGH))
        out_BNLH, lse_BNL1, *_ = self._forward_op(*by_head, None, True, 0.0, causal, False, scale=scale)
        return out_BNLH.transpose(1, 2), lse_BNL1.squeeze(-1)

    def _backward(self, dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL, causal, left, scale):
        assert left is None, "choose_kernel was not told of a window"
        L, K = q_BLNH.shape[1], k_BKGH.shape[1]
        if K == 1:
            tensors = dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL
            return ReferenceKernel()._backward(*tensors, causal, None, scale)
        # The key of PyTorch's plans holds the strides of q, k and v, not of these, which must not vary.
        dout_BNLH, out_BNLH = (x.contiguous().transpose(1, 2) for x in (dout_BLNH, out_BLNH))
        lse_BNL1 = lse_BNL.contiguous().unsqueeze(-1)
        by_head = dout_BNLH, *map(_by_head, (q_BLNH, k_BKGH, v_BKGH)), out_BNLH, lse_BNL1
        # The random state of the forward, which is not read when nothing is dropped.
        seed_and_offset = (torch.empty((), dtype=torch.int64, device=q_BLNH.device) for _ in range(2))
        grads = self._backward_op(*by_head, *seed_and_offset, None, None, None, L, K, 0.0, causal, scale=scale)
        dq_BLNH, dk_BKGH, dv_BKGH = (grad.transpose(1, 2) for grad in grads)
        return dq_BLNH, dk_BKGH, dv_BKGH


def _by_head(x_BLNH: Tensor) -> Tensor:
    return head_dim_contiguous(x_BLNH).transpose(1, 2)
