"""Every torch-private name that the project uses, in one place, so that a new torch release is checked here first."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed._composable.contract import _get_registry
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import _Action as Action
from torch.distributed.pipelining.schedules import _ComputationType
from torch.utils._python_dispatch import _disable_current_modes

_KINDS = {"F": _ComputationType.FORWARD, "B": _ComputationType.FULL_BACKWARD}


def make_action(stage: int, kind: str, microbatch: int) -> Action:
    """One entry of a torch pipeline order; ``kind`` is "F" or "B"."""
    return Action(stage, _KINDS[kind], microbatch)


def schedule_actions(
    schedule: str, *, num_ranks: int, num_stages_per_rank: int, num_microbatches: int, with_messages: bool
) -> list[list[Action | None]]:
    """The order of one of torch's schedules, by rank.

    The microbatches of a kind are renumbered where a rank has one stage: on the last one torch's order for 1F1B, which
    is drawn and never run, counts forwards from 1.
    """
    # Not for training, which must not depend on it.
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    rows = get_schedule_ops(
        schedule, num_ranks, num_microbatches, num_stages_per_rank=num_stages_per_rank, with_comms=with_messages
    )
    if num_stages_per_rank > 1:
        return rows
    renumbered: list[list[Action | None]] = []
    for row in rows:
        counts: Counter[_ComputationType] = Counter()
        renumbered.append([])
        for action in row:
            if action is not None and action.microbatch_index is not None:
                action = action._replace(microbatch_index=counts[action.computation_type])
                counts[action.computation_type] += 1
            renumbered[-1].append(action)
    return renumbered


def forget_failed_step(module: FSDPModule) -> None:
    """Make an FSDP2 module forget a forward or backward that an exception ended (from torch 2.14 on), and its unreduced
    gradients.

    ``FSDPModule.reset_iter_state`` keeps those gradients, out of reach of ``zero_grad``: the next reduction would add
    them.
    """
    state = module._get_fsdp_state()
    if state._is_root and hasattr(module, "reset_iter_state"):  # root: known from its first forward on
        module.reset_iter_state()
    for group in state._fsdp_param_groups:
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):  # after its first all-gather
                parameter._unsharded_param.grad = None


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
    if hasattr(dist, "set_timeout"):  # torch 2.14
        dist.set_timeout(timeout, group)
    else:
        distributed_c10d._set_pg_timeout(timeout, group)


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy a process group.

    Before 2.14 torch names a group after how many there are: the name would come again, and the new group would find
    the addresses of the old one in the store. There a group stays until all of torch.distributed is shut down.
    """
    if hasattr(dist, "set_timeout"):  # torch 2.14
        dist.destroy_process_group(group)


def is_replicated(module: nn.Module) -> bool:
    """Whether composable `replicate`, which is DistributedDataParallel, was applied to this very module."""
    return "replicate" in (_get_registry(module) or ()) and not isinstance(module, FSDPModule)


def parameters_of(function: Callable) -> dict[str, bool]:
    """The names of a function's parameters, and whether each must be given; a custom op hides them from `inspect`."""
    if isinstance(function, torch.library.CustomOpDef):
        arguments = function._opoverload._schema.arguments
        return {argument.name: not argument.has_default_value() for argument in arguments}
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.default is parameter.empty for parameter in parameters}
