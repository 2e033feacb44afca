"""Attention kernels behind one interface: a part of attention with its LSE, and its gradient from the merged row."""

from slimpipe.attention.kernels.base import AttentionKernel
from slimpipe.attention.kernels.choose import check_kernel_runs, choose_kernel
from slimpipe.attention.kernels.merge import merge

__all__ = ["AttentionKernel", "check_kernel_runs", "choose_kernel", "merge"]
