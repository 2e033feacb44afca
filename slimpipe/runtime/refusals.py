"""Modules and loss functions that would give silently wrong results slice by slice, refused."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from slimpipe.torch_private import is_replicated

logger = logging.getLogger(__name__)


def check_backend(device: torch.device) -> None:
    """Refuse, or warn of, what would stop messages between devices.

    Raises:
        ValueError: The backend of this device, which the groups of a pipeline inherit, is gloo, which passes no device
            tensors from one rank to another.
    """
    if device.type == "cpu":
        return
    backends = dict(entry.split(":") for entry in dist.get_backend_config().split(","))
    if backends.get(device.type) == "gloo":
        raise ValueError(
            f"torch.distributed was initialised with gloo for {device.type} tensors, and gloo passes none from rank to "
            "rank; nearest legal value: init_process_group() without a backend, or with the device's own, like 'nccl'"
        )
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        logger.warning(
            "CUDA_DEVICE_MAX_CONNECTIONS = 1: with one hardware queue, a receive that is posted ahead can hold up the "
            "kernels that its sender waits for; unset it, or set it to 8 or more"
        )


def check_module(submod: nn.Module, *, index: int, has_attention: bool) -> set[str]:
    """Refuse modules that would give silently wrong results slice by slice.

    Returns:
        Which of ``positions`` and ``attention_masks`` the module's forward takes.

    Raises:
        ValueError: Active dropout, attention that knows nothing of slices, DistributedDataParallel, or a forward that
            takes no ``positions`` or ``attention_masks`` although the stage holds `SliceAttention`.
    """
    where = f"stage {index}"
    refuse_data_parallel_wrappers(submod, where)
    for name, module in submod.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise ValueError(
                f"{where}: {name} is {type(module).__name__}(p={module.p}); dropout is not supported, because slices "
                "would draw other numbers than the whole sequence; nearest legal value: p=0"
            )
        if isinstance(module, nn.MultiheadAttention):
            raise ValueError(
                f"{where}: {name} is a torch.nn.MultiheadAttention, which would see one slice only; use "
                "slimpipe.SliceAttention as the inner attention"
            )
    parameters = inspect.signature(submod.forward).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    takes = {name for name in ("positions", "attention_masks") if anything or name in parameters}
    if has_attention and len(takes) < 2:
        missing = sorted({"positions", "attention_masks"} - takes)
        raise ValueError(
            f"{where}: {type(submod).__name__}.forward takes no {' and no '.join(missing)}; a stage with "
            "SliceAttention must take both as keyword arguments and pass attention_masks untouched to its "
            "SliceAttention layers (positions: where each token of the slice stands in its document)"
        )
    return takes if has_attention or not anything else set()


def refuse_data_parallel_wrappers(module: nn.Module, where: str) -> None:
    """Refuse data parallelism that reduces gradients in every backward.

    Raises:
        ValueError: DistributedDataParallel, or composable replicate.
    """
    if any(isinstance(part, DistributedDataParallel) or is_replicated(part) for part in module.modules()):
        raise ValueError(
            f"{where} uses DistributedDataParallel (or composable replicate, which is the same), which cannot wait "
            "with its reduction for the last slice; use fully_shard (FSDP2) over the data-parallel axis"
        )


class RefuseWholeAttention(TorchFunctionMode):
    """Context for a stage's first forward: attention that knows nothing of slices raises.

    Raises:
        ValueError: The stage calls PyTorch's own attention functions.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.scaled_dot_product_attention, flex_attention):
            raise ValueError(
                f"stage {self._index} calls {func.__name__}, which would see one slice only; use "
                "slimpipe.SliceAttention as the inner attention"
            )
        return func(*args, **(kwargs or {}))


def check_loss_adds_up(loss_fn: Callable, output: Tensor, target: Tensor, loss: Tensor, *, seq_dim: int) -> bool:
    """Whether it could be seen on this slice that ``loss_fn`` is a sum over tokens: two halves add up to the whole.

    Raises:
        ValueError: They do not, so the loss of a sequence is not the sum over its slices.
    """
    half = output.shape[seq_dim] // 2
    if not half or not loss.isfinite() or not loss:
        return False
    rest = output.shape[seq_dim] - half
    with torch.no_grad():
        parts = zip(output.split([half, rest], seq_dim), target.split([half, rest], seq_dim), strict=True)
        both = sum(loss_fn(*part) for part in parts)
    if not torch.isclose(both, loss.detach(), rtol=0.1):
        raise ValueError(
            f"loss_fn gives {loss.item():.6g} for a slice and {both.item():.6g} in sum for its two halves: it "
            "averages, and a schedule that adds up slices needs a sum over tokens; use reduction='sum' and divide by "
            "the step's number of tokens"
        )
    return True


def check_loss_fn(loss_fn: Callable | None, *, scale_grads: bool) -> None:
    """Refuse loss functions that average: a mean of slice means is not the mean, and NaN where a slice is all ignored.

    Raises:
        ValueError: ``loss_fn`` averages, or ``scale_grads`` is on.
    """
    if scale_grads:
        raise ValueError(
            "scale_grads = True: a slimpipe schedule never rescales gradients, since that would also rescale what "
            "earlier steps accumulated; nearest legal value: False, with a loss_fn that divides by the step's number "
            "of tokens or samples"
        )
    if loss_fn is F.cross_entropy or getattr(loss_fn, "reduction", None) == "mean":
        raise ValueError(
            f"loss_fn = {loss_fn!r} averages over the tokens it sees, but is called once per slice; use "
            "reduction='sum' and divide by the step's number of tokens"
        )


def refuse_tied_weights(submods: dict[int, nn.Module]) -> None:
    """Refuse parameters shared by two stages of a rank.

    Raises:
        ValueError: Two stages hold the same parameter; names both.
    """
    seen: dict[int, str] = {}
    for index, submod in submods.items():
        for name, parameter in submod.named_parameters():
            where = f"{name} of stage {index}"
            if seen.setdefault(id(parameter), where) != where:
                raise ValueError(
                    f"{where} is tied to {seen[id(parameter)]}: weights tied across stages are not supported"
                )
