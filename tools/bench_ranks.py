"""Starts the ranks of a benchmark on this machine and runs one function on each of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(measure: Callable[[Any], Any], setting: Any, *, num_ranks: int, num_threads: int = 1) -> Any:
    """Call ``measure(setting)`` on every rank of a gloo group on the loopback address.

    Args:
        measure: A function of a module, as the ranks are new processes.
        num_threads: Compute threads of each rank.

    Returns:
        What rank 0 returned.
    """
    os.environ |= {
        "OMP_NUM_THREADS": str(num_threads),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_run_rank, (measure, setting, num_ranks, num_threads, store.port, results), nprocs=num_ranks)
    return results.get()


def over_ranks(op: Any, *values: float) -> list[float]:
    """Reduce numbers over all ranks."""
    reduced = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(reduced, op)
    return reduced.tolist()


def gathered(value: int) -> list[int]:
    """One number of each rank."""
    values = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(values, torch.tensor([value]))
    return [int(x) for x in values]


def _run_rank(
    rank: int,
    measure: Callable[[Any], Any],
    setting: Any,
    num_ranks: int,
    num_threads: int,
    port: int,
    results: Any,
) -> None:
    torch.set_num_threads(num_threads)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    figures = measure(setting)
    if rank == 0:
        results.put(figures)
    dist.barrier()
    dist.destroy_process_group()
