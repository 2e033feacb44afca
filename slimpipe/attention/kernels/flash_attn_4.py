"""FlashAttention-4, the flash-attn-4 package, written in CuTe DSL. It compiles a kernel when it first meets a shape.

Shapes: B batch, L queries, K keys, T tokens laid end to end, N query heads, G K,V heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slimpipe.attention.kernels.cuda import MLA, refuse_capability, refuse_head_dims
from slimpipe.attention.kernels.cuda_flash import Segments
from slimpipe.attention.kernels.packages import PackageKernel, deterministic, installed_version, parse_version

_FORWARD = ("q", "k", "v", "return_lse")
_BACKWARD = ("q", "k", "v", "out", "dout", "lse", "deterministic")
_BOTH = (
    "softmax_scale",
    "causal",
    "window_size_left",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
)


class FlashAttn4Kernel(PackageKernel):
    """FlashAttention-4, for Blackwell and Hopper."""

    name = "flash_attn_4"
    module = "flash_attn.cute.interface"
    needs = "flash-attn-4 4.0.0b16 or newer (pip install 'slimpipe[flash4]')"

    def _refuse_hardware(self, capability: tuple[int, int], head_dim: int, head_dim_v: int) -> str | None:
        return refuse_hardware(capability, head_dim, head_dim_v)

    def _calls(self, functions: Any) -> dict[str, Iterable[str]]:
        return {"_flash_attn_fwd": _FORWARD + _BOTH, "_flash_attn_bwd": _BACKWARD + _BOTH}

    def _refuse_release(self, functions: Any) -> str | None:
        installed = installed_version("flash-attn-4")  # flash_attn.cute.__version__ asks for another name
        if installed is None:
            return f"needs {self.needs}; {self.module} comes from another package"
        if parse_version(installed) >= (4, 0, 0, 16):
            return None
        return f"needs {self.needs}; {installed} is installed"

    def _attend(self, q, k, v, segments, causal, left, scale):
        both = _both(segments, causal, left, scale)
        out, lse, *_ = self._interface()._flash_attn_fwd(q=q, k=k, v=v, return_lse=True, **both)
        return out, lse

    def _attend_backward(self, dout, q, k, v, out, lse, segments, causal, left, scale):
        both = _both(segments, causal, left, scale)
        dq, dk, dv, *_ = self._interface()._flash_attn_bwd(
            q=q, k=k, v=v, out=out, dout=dout, lse=lse, deterministic=deterministic(), **both
        )
        return dq, dk, dv


def refuse_hardware(capability: tuple[int, int], head_dim: int, head_dim_v: int) -> str | None:
    """Why FlashAttention-4 cannot serve a GPU or head dims, whoever calls it."""
    reason = refuse_capability(capability, majors=(9, 10, 11))
    if reason is not None:
        return reason
    if capability[0] == 9:
        return refuse_head_dims(head_dim, head_dim_v, up_to=256, and_also=(MLA,))
    return refuse_head_dims(head_dim, head_dim_v, up_to=128, and_also=(MLA, (256, 256)))


def _both(segments: Segments, causal: bool, left: int | None, scale: float) -> dict[str, Any]:
    """The arguments that forward and backward share. A limit of the window is None where there is none."""
    cu_seqlens, longest = segments or (None, None)
    values = scale, causal, left, cu_seqlens, cu_seqlens, longest, longest
    return dict(zip(_BOTH, values, strict=True))
