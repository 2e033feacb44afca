"""The ranks that share a vocabulary, and the collectives they need."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from slimpipe.torch_private import set_group_timeout
from slimpipe.transport import PipelineError

_T = TypeVar("_T")

Group = dist.ProcessGroup | DeviceMesh | None
"""Who shares a vocabulary: a process group, a one-dimensional DeviceMesh, or None for this rank alone."""


class Pending:
    """A collective under way: `wait` waits for it, and gives its tensor."""

    def __init__(self, tensor: Tensor, wait: Callable[[], object]) -> None:
        self._tensor, self._wait = tensor, wait

    def wait(self) -> Tensor:
        """The tensor, when the collective is done. May be called again."""
        self._wait()
        self._wait = lambda: None
        return self._tensor


class Ranks:
    """The members of a group, numbered 0 .. size - 1.

    Every collective works in place and raises PipelineError where a rank is lost. All wait, except those that give a
    `Pending`.

    Args:
        group: This rank must be a member.

    Attributes:
        members: Their global ranks.
        waited: Seconds that the host has spent in collectives so far; on GPUs, on starting them.

    Raises:
        ValueError: The mesh has more than one dimension, or this rank is no member of the group.
    """

    def __init__(self, group: Group) -> None:
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(
                    f"group is a DeviceMesh of shape {tuple(group.shape)}: it must have one axis; nearest legal value: "
                    "one axis of it, or a process group of all its ranks"
                )
            group = group.get_group()
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.waited = 0.0
        self.members = [0] if group is None else dist.get_process_group_ranks(group)
        if self.rank < 0:
            raise ValueError(
                f"group holds ranks {dist.get_process_group_ranks(group)}, but this is rank {dist.get_rank()}: "
                "only members may build the module"
            )

    def check_member(self, name: str, rank: int) -> None:
        """Raise ValueError unless ``rank``, given by the user as ``name``, is a rank of the group."""
        if not 0 <= rank < self.size:
            raise ValueError(
                f"{name} = {rank}: it must be a rank of the group, 0 .. {self.size - 1}; "
                f"nearest legal value: {min(max(rank, 0), self.size - 1)}"
            )

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the timeout of the group."""
        if self._group is not None:
            set_group_timeout(self._group, timeout)

    def all_max(self, tensor: Tensor) -> None:
        """Largest values, on every rank."""
        if self.size > 1:
            self._wait(lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group))

    def all_sum(self, tensor: Tensor) -> None:
        """Sums, on every rank."""
        if self.size > 1:
            self._wait(lambda: dist.all_reduce(tensor, group=self._group))

    def start_sum_to(self, rank: int, tensor: Tensor) -> Pending:
        """Sums, on one rank; elsewhere the tensor is undefined afterwards."""
        return self._start(tensor, lambda: dist.reduce(tensor, group=self._group, group_dst=rank, async_op=True))

    def start_broadcast(self, rank: int, tensor: Tensor) -> Pending:
        """The values of one rank, on every rank."""
        return self._start(tensor, lambda: dist.broadcast(tensor, group=self._group, group_src=rank, async_op=True))

    def _start(self, tensor: Tensor, start: Callable[[], dist.Work | None]) -> Pending:
        if self.size == 1:
            return Pending(tensor, lambda: None)
        work = self._wait(start)
        assert work is not None
        return Pending(tensor, lambda: self._wait(work.wait))

    def _wait(self, wait: Callable[[], _T]) -> _T:
        start = time.perf_counter()
        try:
            return wait()
        except torch.OutOfMemoryError:  # a RuntimeError, too, but nobody else's fault
            raise
        except RuntimeError as error:
            raise PipelineError(
                f"rank {self.rank} of the {self.size} that share the vocabulary lost another: it failed, died or is "
                f"stuck ({type(error).__name__}: {error})"
            ) from error
        finally:
            self.waited += time.perf_counter() - start
