"""The flash-attn package, 2.7 or newer of the 2.x line, by its low-level functions that give and take the LSE.

Shapes: B batch, L queries, K keys, T tokens laid end to end, N query heads, G K,V heads, H head dim.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from slimpipe.attention.kernels.cuda import refuse_head_dims, refuse_older_than_ampere
from slimpipe.attention.kernels.cuda_flash import Segments
from slimpipe.attention.kernels.packages import PackageKernel, deterministic, parse_version

_FORWARD = ("q", "k", "v", "return_softmax")
_BACKWARD = ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "deterministic")
_SEGMENTS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_BOTH = (
    "dropout_p",
    "softmax_scale",
    "causal",
    "window_size_left",
    "window_size_right",
    "softcap",
    "alibi_slopes",
)


class FlashAttnKernel(PackageKernel):
    """FlashAttention-2 as its authors release it."""

    name = "flash_attn"
    runs_on_rocm = True
    right_edge_is_num_keys = True
    module = "flash_attn.flash_attn_interface"
    needs = "flash-attn 2.7 or newer of the 2.x line (pip install 'slimpipe[flash]')"

    def _refuse_hardware(self, capability: tuple[int, int], head_dim: int, head_dim_v: int) -> str | None:
        return refuse_older_than_ampere(capability) or refuse_head_dims(head_dim, head_dim_v, up_to=256)

    def _calls(self, functions: Any) -> dict[str, Iterable[str]]:
        return {
            "_flash_attn_forward": _FORWARD + _BOTH,
            "_flash_attn_backward": _BACKWARD + _BOTH,
            "_flash_attn_varlen_forward": _FORWARD + _SEGMENTS + _BOTH,
            "_flash_attn_varlen_backward": _BACKWARD + _SEGMENTS + _BOTH,
        }

    def _refuse_release(self, functions: Any) -> str | None:
        version = importlib.import_module("flash_attn").__version__
        if (2, 7) <= parse_version(version) < (3,):
            return None
        return f"needs {self.needs}; {version} is installed"

    def _attend(self, q, k, v, segments, causal, left, scale):
        functions = self._interface()
        function = functions._flash_attn_forward if segments is None else functions._flash_attn_varlen_forward
        out, lse, *_ = function(q=q, k=k, v=v, return_softmax=False, **_both(segments, causal, left, scale))
        return out, lse

    def _attend_backward(self, dout, q, k, v, out, lse, segments, causal, left, scale):
        functions = self._interface()
        function = functions._flash_attn_backward if segments is None else functions._flash_attn_varlen_backward
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        function(
            dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse, dq=dq, dk=dk, dv=dv, deterministic=deterministic(),
            **_both(segments, causal, left, scale),
        )  # fmt: skip
        return dq, dk, dv


def _both(segments: Segments, causal: bool, left: int | None, scale: float) -> dict[str, Any]:
    """The arguments that forward and backward share: all but the window and the segments switch things off."""
    window_size_left = -1 if left is None else left
    values = (0.0, scale, causal, window_size_left, -1, 0.0, None)
    both: dict[str, Any] = dict(zip(_BOTH, values, strict=True))
    if segments is not None:
        cu_seqlens, longest = segments
        both |= dict(zip(_SEGMENTS, (cu_seqlens, cu_seqlens, longest, longest), strict=True))
    return both
