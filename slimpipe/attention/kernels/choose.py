"""Which kernel serves a call."""

from __future__ import annotations

import torch
from torch import Tensor

from slimpipe.attention.kernels.base import AttentionKernel, check_shapes
from slimpipe.attention.kernels.flash_attn import FlashAttnKernel
from slimpipe.attention.kernels.flash_attn_3 import FlashAttn3Kernel
from slimpipe.attention.kernels.flash_attn_4 import FlashAttn4Kernel
from slimpipe.attention.kernels.padded import padded_where_needed
from slimpipe.attention.kernels.reference import ReferenceKernel
from slimpipe.attention.kernels.torch_cpu_flash import TorchCpuFlashKernel
from slimpipe.attention.kernels.torch_cuda_flash import TorchCudaFlashKernel
from slimpipe.attention.kernels.torch_cudnn import TorchCudnnKernel
from slimpipe.options import check_kernel_name

# Fastest first: each FlashAttention on the GPUs it was written for. PyTorch's own FlashAttention-2 needs no package of
# matching version, so it comes before the same from a package.
_FASTEST_FIRST: tuple[type[AttentionKernel], ...] = (
    TorchCpuFlashKernel,
    FlashAttn3Kernel,
    FlashAttn4Kernel,
    TorchCudaFlashKernel,
    FlashAttnKernel,
    ReferenceKernel,
)
_BY_NAME_ONLY: tuple[type[AttentionKernel], ...] = (TorchCudnnKernel,)
_WITHOUT_WINDOWS = (TorchCudnnKernel.name,)


def choose_kernel(
    name: str, q_BLNH: Tensor, k_BKGH: Tensor, v_BKGH: Tensor, *, window: bool = False
) -> AttentionKernel:
    """The kernel called `name` or, for "auto", the fastest one that serves tensors like these.

    Depends on nothing but the arguments' name, device, dtype and head sizes, and on whether PyTorch is to be
    deterministic: the caller may keep the answer for as long as those last. The kernel serves every mask, those of
    sliding windows where ``window`` is set.

    Raises:
        ValueError: the name is unknown, the shapes do not fit together, or the kernel refuses; the message gives the
            reason and the kernels that would serve.
    """
    check_kernel_name(name)
    check_shapes(q_BLNH, k_BKGH, v_BKGH)
    if name == "auto":
        reasons: dict[str, str] = {}
        for kind in _FASTEST_FIRST:
            kernel = padded_where_needed(kind(), q_BLNH, k_BKGH, v_BKGH)
            reason = _refusal(kernel, q_BLNH, k_BKGH, v_BKGH, window)
            if reason is None:
                return kernel
            reasons[kind.name] = reason
        raise ValueError(
            "kernel = 'auto': no kernel serves these tensors: " + "; ".join(map(" ".join, reasons.items()))
        )
    (kind,) = (kind for kind in (*_FASTEST_FIRST, *_BY_NAME_ONLY) if kind.name == name)
    kernel = padded_where_needed(kind(), q_BLNH, k_BKGH, v_BKGH)
    reason = _refusal(kernel, q_BLNH, k_BKGH, v_BKGH, window)
    if reason is None:
        return kernel
    all_reasons = refusals(q_BLNH, k_BKGH, v_BKGH, window=window)
    others = [repr(other) for other, refused in all_reasons.items() if refused is None]
    raise ValueError(
        f"kernel = {name!r}: {name} {reason}; these tensors can be served by {', '.join(['auto', *others])}"
    )


def refusals(q_BLNH: Tensor, k_BKGH: Tensor, v_BKGH: Tensor, *, window: bool = False) -> dict[str, str | None]:
    """For every kernel, fastest first, why it cannot serve tensors like these; None where it can."""
    tensors = q_BLNH, k_BKGH, v_BKGH
    kernels = (padded_where_needed(kind(), *tensors) for kind in (*_FASTEST_FIRST, *_BY_NAME_ONLY))
    return {kernel.name: _refusal(kernel, *tensors, window) for kernel in kernels}


def _refusal(kernel: AttentionKernel, q_BLNH: Tensor, k_BKGH: Tensor, v_BKGH: Tensor, window: bool) -> str | None:
    if window and kernel.name in _WITHOUT_WINDOWS:
        return "has no sliding windows"
    return kernel.refusal(q_BLNH, k_BKGH, v_BKGH)


def check_kernel_runs(name: str, *, device: torch.device, window: bool = False) -> None:
    """Refuse a kernel that ``device`` or the installed packages cannot run, before there is a tensor to run it on.

    Raises:
        ValueError: as `choose_kernel`, for bfloat16 and a head dim of 64.
    """
    probe_BLNH = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16, device=device)
    choose_kernel(name, probe_BLNH, probe_BLNH, probe_BLNH, window=window)
