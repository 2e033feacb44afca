"""The flash-attn package, 2.7 or newer of the 2.x line, by its low-level functions that give and take the LSE.

Shapes: B batch, L queries, K keys, T tokens laid end to end, N query heads, G K,V heads, H head dim.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from slimpipe.attention.kernels.cuda_flash import CudaFlashKernel

# Dropout, window, soft cap and ALiBi switched off, by the names that forward and backward share.
_PLAIN: dict[str, Any] = {
    "dropout_p": 0.0,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
}


class FlashAttnKernel(CudaFlashKernel):
    """The package is imported when this kernel is first asked, and only for tensors that it could serve.

    Args:
        functions: Looked up instead of `flash_attn.flash_attn_interface`.
    """

    name = "flash_attn"

    def __init__(self, *, functions: Any = None) -> None:
        self._functions = functions

    def refusal(self, q_BLNH: Tensor, k_BKGH: Tensor, v_BKGH: Tensor) -> str | None:
        reason = super().refusal(q_BLNH, k_BKGH, v_BKGH)
        if reason is not None:
            return reason
        try:
            self._interface()
        except ImportError as error:
            return f"needs the flash-attn package (pip install 'slimpipe[flash]'); importing it failed: {error}"
        version = importlib.import_module("flash_attn").__version__
        if not (2, 7) <= tuple(map(int, version.split(".")[:2])) < (3, 0):
            return f"needs flash-attn 2.7 or newer of the 2.x line; {version} is installed"
        return None

    def _interface(self) -> ModuleType | Any:
        return self._functions or importlib.import_module("flash_attn.flash_attn_interface")

    def _forward(self, q_BLNH, k_BKGH, v_BKGH, causal, left, scale):
        out_BLNH, lse_BNL, *_ = self._interface()._flash_attn_forward(
            q_BLNH, k_BKGH, v_BKGH, softmax_scale=scale, causal=causal, return_softmax=False, **_PLAIN
        )
        return out_BLNH, lse_BNL

    def _backward(self, dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL, causal, left, scale):
        grads = tuple(x.new_empty(x.shape) for x in (q_BLNH, k_BKGH, v_BKGH))
        tensors = dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL.contiguous()
        self._interface()._flash_attn_backward(
            *tensors, *grads, softmax_scale=scale, causal=causal, deterministic=_deterministic(), **_PLAIN
        )
        return grads

    def _segments_forward(self, q_TNH, k_TGH, v_TGH, cu_seqlens, longest, left, scale):
        segments = cu_seqlens, cu_seqlens, longest, longest
        out_TNH, lse_NT, *_ = self._interface()._flash_attn_varlen_forward(
            q_TNH, k_TGH, v_TGH, *segments, softmax_scale=scale, causal=True, return_softmax=False, **_PLAIN
        )
        return out_TNH, lse_NT

    def _segments_backward(self, dout_TNH, q_TNH, k_TGH, v_TGH, out_TNH, lse_NT, cu_seqlens, longest, left, scale):
        grads = tuple(x.new_empty(x.shape) for x in (q_TNH, k_TGH, v_TGH))
        tensors = dout_TNH, q_TNH, k_TGH, v_TGH, out_TNH, lse_NT
        segments = cu_seqlens, cu_seqlens, longest, longest
        self._interface()._flash_attn_varlen_backward(
            *tensors, *grads, *segments, softmax_scale=scale, causal=True, deterministic=_deterministic(), **_PLAIN
        )
        return grads


def _deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()
