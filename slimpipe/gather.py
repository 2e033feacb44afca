"""Tensors and objects from every rank to every rank, without the NumPy that torch itself needs for objects."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist


def gather_objects(mine: Any, *, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """What each rank of a group gave, in the order of ranks.

    Two all-gathers on ``group``: of sizes, and of pickles padded to the longest. The host waits for both. Unpickles
    what other ranks send: for ranks that trust each other, as those of a job do.

    Args:
        mine: Anything that can be pickled.
        group: This rank must be a member.
        device: Of the tensors that the group's backend passes.
    """
    pickled = bytearray(pickle.dumps(mine))
    sizes = gather_tensors(torch.tensor([len(pickled)], dtype=torch.int64, device=device), group)
    num_bytes = [int(size.item()) for size in sizes]
    padded = torch.frombuffer(pickled.ljust(max(num_bytes), b"\0"), dtype=torch.uint8).to(device)
    everyone = gather_tensors(padded, group)
    return [pickle.loads(bytes(x[:size].tolist())) for x, size in zip(everyone, num_bytes, strict=True)]


def gather_tensors(mine: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The tensor of each rank of a group, equal in shape and dtype, in the order of ranks: one all-gather."""
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return everyone
