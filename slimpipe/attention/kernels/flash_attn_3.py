"""FlashAttention-3, the `hopper` package of flash-attn, in its releases since January 2025.

Shapes: B batch, L queries, K keys, T tokens laid end to end, N query heads, G K,V heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from slimpipe.attention.kernels.cuda import MLA, refuse_capability, refuse_head_dims
from slimpipe.attention.kernels.cuda_flash import Segments
from slimpipe.attention.kernels.packages import PackageKernel, deterministic, load
from slimpipe.torch_private import parameters_of

_FORWARD = ("q", "k", "v")
_BACKWARD = ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "deterministic")
# What older releases want to be given although it is not used.
_UNUSED = (
    "k_new", "v_new", "qv", "out", "cu_seqlens_k_new", "seqused_q", "seqused_k", "sequed_q", "sequed_k", "page_table",
    "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale",
)  # fmt: skip
_HEAD_DIMS = (64, 96, 128, 192, 256)


class FlashAttn3Kernel(PackageKernel):
    """FlashAttention-3, for Hopper."""

    name = "flash_attn_3"
    module = "flash_attn_interface"
    needs = "FlashAttention-3 of 2025 or newer (built from the hopper folder of the flash-attention repository)"

    def _refuse_hardware(self, capability: tuple[int, int], head_dim: int, head_dim_v: int) -> str | None:
        return refuse_hardware(capability, head_dim, head_dim_v) or _refuse_build(max(head_dim, head_dim_v))

    def _calls(self, functions: Any) -> dict[str, Iterable[str]]:
        given = {"_flash_attn_forward": _FORWARD, "_flash_attn_backward": _BACKWARD}
        return {
            name: (*names, *_both(getattr(functions, name, None), None, False, None, 1.0))
            for name, names in given.items()
        }

    def _attend(self, q, k, v, segments, causal, left, scale):
        function = self._interface()._flash_attn_forward
        out, lse, *_ = function(q=q, k=k, v=v, **_both(function, segments, causal, left, scale))
        return out, lse

    def _attend_backward(self, dout, q, k, v, out, lse, segments, causal, left, scale):
        function = self._interface()._flash_attn_backward
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        tensors = dict(dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse, dq=dq, dk=dk, dv=dv)
        both = _both(function, segments, causal, left, scale)
        function(**(both | tensors), deterministic=deterministic())
        return dq, dk, dv


def refuse_hardware(capability: tuple[int, int], head_dim: int, head_dim_v: int) -> str | None:
    """Why FlashAttention-3 cannot serve a GPU or head dims, whoever calls it."""
    reason = refuse_capability(capability, majors=(9,))
    reason = reason or refuse_head_dims(head_dim, head_dim_v, up_to=256, and_also=(MLA,))
    if reason is None and head_dim > 192 and deterministic():
        return f"has no deterministic backward for a head dim of {head_dim}; nearest legal value: 192"
    return reason


def _refuse_build(head_dim: int) -> str | None:
    """Newer releases say what was left out when they were built."""
    left_out = getattr(load("flash_attn_config"), "CONFIG", {}).get("build_flags", {})
    for feature in ("BACKWARD", "VARLEN", "LOCAL"):
        if left_out.get(f"FLASHATTENTION_DISABLE_{feature}"):
            return f"was built with FLASHATTENTION_DISABLE_{feature}; build it without"
    if all(left_out.get(f"FLASHATTENTION_DISABLE_HDIM{size}") for size in _HEAD_DIMS if size >= head_dim):
        return f"was built without head dims of {head_dim} or more"
    return None


@cache
def _names(function: Callable | None) -> tuple[bool, str, tuple[str, ...]]:
    """Whether the window is one argument, the name of the causal flag, and what is to be given as None."""
    parameters = parameters_of(function) if function is not None else {}
    causal = "is_causal" if "is_causal" in parameters else "causal"
    return "window_size" in parameters, causal, tuple(name for name in _UNUSED if parameters.get(name))


def _both(
    function: Callable | None, segments: Segments, causal: bool, left: int | None, scale: float
) -> dict[str, Any]:
    """The arguments that forward and backward share, by the names that this release has for them."""
    window_is_one, causal_name, unused = _names(function)
    window = -1 if left is None else left, -1
    cu_seqlens, longest = segments or (None, None)
    return {
        **dict.fromkeys(unused),
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "softmax_scale": scale,
        causal_name: causal,
        **(
            {"window_size": window}
            if window_is_one
            else {"window_size_left": window[0], "window_size_right": window[1]}
        ),
    }
