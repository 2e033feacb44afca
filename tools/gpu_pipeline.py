"""The checks on a GPU that need a pipeline: (c) ranks that share the device, (d) host time.

Ranks are processes of their own, all on one device, over `staged_backend`. A check that fails is a failed figure that
says so, and the checks after it run on fresh ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from bench_ranks import stream_ranks
from gpu_figures import Figure
from gpu_host_time import host_time, syncs
from gpu_memory import SLICES, memory, over_1f1b
from gpu_parity import parity
from gpu_report import Note
from staged_backend import NAME, register_staged_backend

SECONDS = 75.0
"""That one check may take, the start of the ranks included."""
_NUM_RANKS = 4
_Check = Callable[[torch.device, bool], list[Figure]]
_CHECKS: tuple[tuple[str, str, _Check], ...] = (
    ("c", "parity", parity),
    ("d", "host time", host_time),
    ("d", "host syncs", syncs),
    *(("c", f"memory of SlimPipe n={n}", partial(memory, num_slices=n)) for n in SLICES),
    ("c", "memory of 1F1B", partial(memory, num_slices=0)),
)


def run(device: torch.device, *, tiny: bool, deadline: float) -> Iterator[Figure | Note]:
    """Yield the figures of parts c and d, those of one check after the other.

    Args:
        device: For all ranks: one GPU, or a CPU.
        tiny: Small sizes.
        deadline: By `time.monotonic`. No check starts after it.
    """
    found: list[Figure] = []
    left = list(_CHECKS)
    while left and time.monotonic() < deadline:
        checks = [partial(_on_device, check, device, tiny) for *_, check in left]
        try:
            for figures in stream_ranks(
                checks, num_ranks=_NUM_RANKS, timeout=SECONDS, backend=NAME, prepare=register_staged_backend
            ):
                del left[0]
                found += figures
                yield from figures
                if left and time.monotonic() >= deadline:
                    break
        except Exception as error:  # whatever it is, the other checks shall run
            if not left:
                raise
            part, name, _ = left.pop(0)
            yield Figure(part, f"{name} failed: {_last_line(error)}", float("nan"), "", 0.0)
    for part, name, _ in left:
        yield Note(part, name, "skipped: the time is over", missed=True)
    yield from over_1f1b(found, num_ranks=_NUM_RANKS)


def _on_device(check: _Check, device: torch.device, tiny: bool) -> list[Figure]:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return check(device, tiny)


def _last_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[-1]
