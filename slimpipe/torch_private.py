"""Every torch-private name that the project uses, in one place, so that a new torch release is checked here first."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import _Action as Action
from torch.distributed.pipelining.schedules import _ComputationType
from torch.utils._python_dispatch import _disable_current_modes

_KINDS = {"F": _ComputationType.FORWARD, "B": _ComputationType.FULL_BACKWARD}


def make_action(stage: int, kind: str, microbatch: int) -> Action:
    """One entry of a torch pipeline order; ``kind`` is "F" or "B"."""
    return Action(stage, _KINDS[kind], microbatch)


def hidden_from_dispatch_modes() -> AbstractContextManager[None]:
    """Context in which no TorchDispatchMode sees an operator.

    Selective activation checkpointing counts operators in the forward and expects the very same ones in the recompute.
    A slice's attention reads its kept output instead of running again, so its operators must not be counted.
    """
    return _disable_current_modes()


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Timeout of a process group, so that groups made beside it fail as early as it does; None where it tells none."""
    backend = group._get_backend(device)
    return getattr(getattr(backend, "options", None), "_timeout", None)


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Change a process group's timeout."""
    _set_pg_timeout(timeout, group)


def is_replicated(module: nn.Module) -> bool:
    """Whether composable `replicate`, which is DistributedDataParallel, was applied to this very module."""
    return "replicate" in (_get_registry(module) or ()) and not isinstance(module, FSDPModule)
