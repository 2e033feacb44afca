"""What every kernel for GPUs asks of its tensors.

Shapes: B batch, L queries, K keys, N query heads, G K,V heads, H head dim.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from slimpipe.attention.kernels.base import AttentionKernel

MLA = (192, 128)
"""Head dims of multi-head latent attention: of Q and K, of V."""


class CudaKernel(AttentionKernel):
    """Results in the dtype of q, LSE in float32. float16 and bfloat16 only."""

    runs_on_rocm: ClassVar[bool] = False

    def refusal(self, q_BLNH: Tensor, k_BKGH: Tensor, v_BKGH: Tensor) -> str | None:
        if q_BLNH.device.type != "cuda":
            return f"needs tensors on a GPU; these are on {q_BLNH.device}"
        if q_BLNH.dtype not in (torch.float16, torch.bfloat16):
            return f"needs torch.bfloat16 or torch.float16; these tensors are {q_BLNH.dtype}"
        if torch.version.hip is not None and not self.runs_on_rocm:
            return f"needs an NVIDIA GPU; {q_BLNH.device} is an AMD one"
        capability = torch.cuda.get_device_capability(q_BLNH.device)
        return self._refusal(capability, q_BLNH.shape[-1], v_BKGH.shape[-1])

    @abstractmethod
    def _refusal(self, capability: tuple[int, int], head_dim: int, head_dim_v: int) -> str | None:
        """`refusal` by the GPU's compute capability, the head dims of Q and V, and what is installed."""


def refuse_head_dims(
    head_dim: int, head_dim_v: int, *, up_to: int, and_also: tuple[tuple[int, int], ...] = ()
) -> str | None:
    """Why head dims are refused where the legal ones are 8, 16, .. ``up_to``, the same for Q and V, and some pairs."""
    if (head_dim, head_dim_v) in and_also:
        return None
    if head_dim != head_dim_v:
        pairs = "".join(f", or {of_q} with {of_v} for V" for of_q, of_v in and_also if of_q != of_v)
        return f"needs one head dim{pairs}; q and k have {head_dim}, v has {head_dim_v}"
    if head_dim % 8 == 0 and head_dim <= up_to:
        return None
    more = [of_q for of_q, of_v in and_also if of_q == of_v]
    rule = f"8, 16, .. {up_to}" + "".join(f" or {legal}" for legal in more)
    nearest = min([*range(8, up_to + 1, 8), *more], key=lambda legal: (abs(legal - head_dim), -legal))
    return f"needs a head dim of {rule}; it is {head_dim}, nearest legal value: {nearest}"


def refuse_capability(capability: tuple[int, int], *, majors: tuple[int, ...]) -> str | None:
    """Why a GPU is refused where only these major compute capabilities will do."""
    if capability[0] in majors:
        return None
    legal = " or ".join(f"{major}.x" for major in majors)
    return f"needs compute capability {legal}; this GPU has {'.'.join(map(str, capability))}"


def refuse_older_than_ampere(capability: tuple[int, int]) -> str | None:
    """Why a GPU is refused that has no instructions for bfloat16 matrices."""
    if capability >= (8, 0):
        return None
    return f"needs compute capability 8.0 (Ampere) or newer; this GPU has {'.'.join(map(str, capability))}"
