"""Which kernel serves a call."""

from __future__ import annotations

import torch
from torch import Tensor

from slimpipe.attention.kernels.base import AttentionKernel, check_shapes
from slimpipe.attention.kernels.flash_attn import FlashAttnKernel
from slimpipe.attention.kernels.reference import ReferenceKernel
from slimpipe.attention.kernels.torch_cpu_flash import TorchCpuFlashKernel
from slimpipe.attention.kernels.torch_cuda_flash import TorchCudaFlashKernel
from slimpipe.options import check_kernel_name

# Fastest first. Both CUDA kernels are FlashAttention-2; PyTorch's own needs no package of matching version.
_FASTEST_FIRST = (TorchCpuFlashKernel, TorchCudaFlashKernel, FlashAttnKernel, ReferenceKernel)


def choose_kernel(name: str, q_BLNH: Tensor, k_BKGH: Tensor, v_BKGH: Tensor) -> AttentionKernel:
    """The kernel called `name` or, for "auto", the fastest one that serves tensors like these.

    Depends on nothing but name, device, dtype and head sizes: the caller may keep the answer for as long as those last.
    Every kernel serves every mask.

    Raises:
        ValueError: the name is unknown, the shapes do not fit together, or the kernel refuses; the message gives the
            reason and the kernels that would serve.
    """
    check_kernel_name(name)
    check_shapes(q_BLNH, k_BKGH, v_BKGH)
    tensors = q_BLNH, k_BKGH, v_BKGH
    reasons: dict[str, str] = {}
    for kernel in (kind() for kind in _FASTEST_FIRST if name in ("auto", kind.name)):
        reason = kernel.refusal(*tensors)
        if reason is None:
            return kernel
        reasons[kernel.name] = reason
    if name == "auto":
        raise ValueError(
            "kernel = 'auto': no kernel serves these tensors: " + "; ".join(map(" ".join, reasons.items()))
        )
    others = [repr(kind.name) for kind in _FASTEST_FIRST if kind().refusal(*tensors) is None]
    raise ValueError(
        f"kernel = {name!r}: {name} {reasons[name]}; these tensors can be served by {', '.join(['auto', *others])}"
    )


def refusals(q_BLNH: Tensor, k_BKGH: Tensor, v_BKGH: Tensor) -> dict[str, str | None]:
    """For every kernel, fastest first, why it cannot serve tensors like these; None where it can."""
    return {kind.name: kind().refusal(q_BLNH, k_BKGH, v_BKGH) for kind in _FASTEST_FIRST}


def check_kernel_runs(name: str, *, device: torch.device) -> None:
    """Refuse a kernel that ``device`` or the installed packages cannot run, before there is a tensor to run it on.

    Raises:
        ValueError: as `choose_kernel`, for bfloat16 and a head dim of 64.
    """
    probe_BLNH = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16, device=device)
    choose_kernel(name, probe_BLNH, probe_BLNH, probe_BLNH)
