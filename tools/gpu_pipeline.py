"""The checks on a GPU that need a pipeline: (c) ranks that share the device, (d) host time.

Ranks are processes of their own, all on one device, over `staged_backend`. A check that fails is a failed figure that
says so, and the checks after it run on fresh ranks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import torch
from bench_ranks import stream_ranks
from gpu_figures import Figure
from gpu_host_time import host_time, syncs
from gpu_memory import memory
from gpu_parity import parity
from staged_backend import NAME, register_staged_backend

_NUM_RANKS = 4
_SECONDS = 120.0
"""That one check may take, the start of the ranks included."""
_Check = Callable[[torch.device, bool], list[Figure]]
_CHECKS: tuple[tuple[str, _Check], ...] = (("c", parity), ("d", host_time), ("d", syncs), ("c", memory))


def run(device: torch.device, *, tiny: bool) -> list[Figure]:
    """All figures of parts c and d.

    Args:
        device: For all ranks: one GPU, or a CPU.
        tiny: Small sizes.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()  # the ranks need the memory
    figures: list[Figure] = []
    left = list(_CHECKS)
    while left:
        checks = [partial(_on_device, check, device, tiny) for _, check in left]
        try:
            for found in stream_ranks(
                checks, num_ranks=_NUM_RANKS, timeout=_SECONDS, backend=NAME, prepare=register_staged_backend
            ):
                figures += found
                del left[0]
        except Exception as error:  # whatever it is, the other checks shall run
            if not left:
                raise
            part, check = left.pop(0)
            figures.append(Figure(part, f"{check.__name__} failed: {_last_line(error)}", float("nan"), "", 0.0))
    return figures


def _on_device(check: _Check, device: torch.device, tiny: bool) -> list[Figure]:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return check(device, tiny)


def _last_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[-1]
