"""The ranks that share a vocabulary, and the four collectives they need."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | DeviceMesh | None
"""Who shares a vocabulary: a process group, a one-dimensional DeviceMesh, or None for this rank alone."""


class Ranks:
    """The members of a group, numbered 0 .. size - 1. Every method is collective, works in place and waits.

    Args:
        group: This rank must be a member.

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

    def all_max(self, tensor: Tensor) -> None:
        """Largest values, on every rank."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)

    def all_sum(self, tensor: Tensor) -> None:
        """Sums, on every rank."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self._group)

    def sum_to(self, rank: int, tensor: Tensor) -> None:
        """Sums, on one rank; elsewhere ``tensor`` is undefined afterwards."""
        if self.size > 1:
            dist.reduce(tensor, group=self._group, group_dst=rank)

    def broadcast(self, rank: int, tensor: Tensor) -> None:
        """The values of one rank, on every rank."""
        if self.size > 1:
            dist.broadcast(tensor, group=self._group, group_src=rank)
