"""Starts the ranks of a benchmark on this machine and runs functions on each of them."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_POLL_SECONDS = 0.1
_END_SECONDS = 10.0
"""More than it takes to end ranks when one has failed."""


def run_ranks(measure: Callable[[Any], Any], setting: Any, *, num_ranks: int, num_threads: int = 1) -> Any:
    """Call ``measure(setting)`` on every rank of a gloo group on the loopback address.

    Args:
        measure: A function of a module, as the ranks are new processes.
        num_threads: Compute threads of each rank.

    Returns:
        What rank 0 returned.
    """
    (figures,) = stream_ranks([partial(measure, setting)], num_ranks=num_ranks, num_threads=num_threads)
    return figures


def stream_ranks(
    measures: Sequence[Callable[[], Any]],
    *,
    num_ranks: int,
    num_threads: int = 1,
    timeout: float | None = None,
    backend: str = "gloo",
    prepare: Callable[[], None] | None = None,
) -> Iterator[Any]:
    """Call functions on every rank of a group on the loopback address, one after another; each has a group of its own.

    No rank outlives the iterator. The functions need not close schedules: they end with their group. To torch before
    2.14 a function that makes several *must not*, for it names a new group after a destroyed one, whose addresses it
    then finds.

    Args:
        measures: Functions of a module, as the ranks are new processes.
        num_threads: Compute threads of each rank.
        timeout: Seconds that a function may take, and so may a message of the group. None: as long as it likes.
        backend: Of the group.
        prepare: Called on each rank before it forms the group.

    Yields:
        What each function returned on rank 0, as soon as it has.

    Raises:
        Exception: A rank raised or died; the others are ended. It is the first one's.
        TimeoutError: A function took too long.
    """
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["slimpipe", "torch.distributed.pipelining"])  # once for all ranks, not in each
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results, theirs = forks.Pipe(duplex=False)
    args = (measures, num_ranks, num_threads, timeout, backend, prepare, store.port, theirs)
    ranks = mp.start_processes(_run_rank, args, nprocs=num_ranks, join=False, start_method="forkserver")
    try:
        for _ in measures:
            yield _next_result(results, ranks, timeout)
        ranks.join()
    finally:
        for process in ranks.processes:
            process.kill()
        for process in ranks.processes:
            process.join()


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


def _next_result(results: Connection, ranks: mp.ProcessContext, timeout: float | None) -> Any:
    start = time.monotonic()
    while not results.poll(_POLL_SECONDS):
        ranks.join(timeout=0)  # raises where one has failed
        if timeout is not None and time.monotonic() - start > timeout:
            raise TimeoutError(f"the ranks gave no result within {timeout:g} s")
    return results.recv()


def _run_rank(
    rank: int,
    measures: Sequence[Callable[[], Any]],
    num_ranks: int,
    num_threads: int,
    timeout: float | None,
    backend: str,
    prepare: Callable[[], None] | None,
    port: int,
    results: Connection,
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(num_threads)
    if prepare is not None:
        prepare()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    for index, measure in enumerate(measures):
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(str(index), store),
            rank=rank,
            world_size=num_ranks,
            timeout=None if timeout is None else timedelta(seconds=timeout),
        )
        try:
            figures = measure()
        except Exception:
            if store.add("failed", 1) > 1:  # for lack of the rank that failed first, whose error is to be raised
                time.sleep(_END_SECONDS)
            raise
        if rank == 0:
            results.send(figures)
        dist.barrier()
        dist.destroy_process_group()
