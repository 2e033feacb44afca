"""torchtitan on machines without an accelerator: a CPU device module, and FSDP2 reductions that gloo can do."""

from __future__ import annotations

import functools
import os
import resource
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


class CpuDevice:
    """What torchtitan asks of `torch.cuda`, answered for one CPU device per process. Memory is resident set size."""

    def device_count(self) -> int:
        return 1

    def set_device(self, device: Any) -> None:
        pass

    def current_device(self) -> int:
        # An index, not a device: it goes into barrier(device_ids=[...]).
        return 0

    def synchronize(self, device: Any = None) -> None:
        pass

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {
            "active_bytes.all.peak": peak,
            "reserved_bytes.all.peak": peak,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass


def use_cpu() -> bool:
    """Makes torchtitan train on the CPU where no accelerator that it supports is present.

    May be called at any time before a trainer is built, any number of times. Where an accelerator is present, nothing
    changes.

    Returns:
        Whether torchtitan trains on the CPU.
    """
    from torchtitan.tools import utils

    if utils.device_type == "cpu":
        return True
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type != "mps":  # torch.distributed has no backend for mps
        return False

    stock_type, stock_module = utils.device_type, utils.device_module
    cpu = CpuDevice()
    # torchtitan has no setting for the device: it decides when tools.utils is imported, and other modules copy the two
    # names. Under the stock entry point they are imported already, so each copy is replaced.
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan."):
            if vars(module).get("device_module") is stock_module:
                module.device_module = cpu  # type: ignore[attr-defined]
            if vars(module).get("device_type") == stock_type:
                module.device_type = "cpu"  # type: ignore[attr-defined]
    return True


def with_gloo_reductions(parallelize_fn: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Wraps a `ModelSpec.parallelize_fn` so that FSDP2 reduces with plain sums: gloo has no pre-multiplied sum."""

    @functools.wraps(parallelize_fn)
    def parallelize(model: nn.Module, **kwargs: Any) -> nn.Module:
        model = parallelize_fn(model, **kwargs)
        reduce_with_sums(model)
        return model

    return parallelize


def reduce_with_sums(model: nn.Module) -> None:
    """Makes FSDP2 reduce the gradients of all modules of a model with plain sums."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
