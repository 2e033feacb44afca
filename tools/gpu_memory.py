"""Ranks that share one device: bytes that SlimPipe and torch's 1F1B take per rank, and what the formula says.

On a GPU the allocator's own count is read where a unit's forward or backward begins and where it ends. What was there
before the step does not count: weights, gradients, the batch, workspaces of libraries. Two figures come of it:

- *Held between units*: the highest reading where a unit begins. This is what the formula is about
  (`slimpipe.planner.memory`): live units times what one saves, K,V slots, dK,dV in waiting, log-probabilities and
  messages, all from the model's shape and the program.
- *Allocator's peak*: the highest of all, hence with what lives only inside of a unit. The formula leaves that to the
  kernels in use, so it is measured, too: the most that a backward took above what was held when it began.

A CPU has no such count; there the meter of `SlimPipeOptions.measure_memory` counts what is held.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial, wraps
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from bench_memory import CPU, planned_parts
from bench_pipeline import Bench, Setting, backward_replaced
from bench_ranks import gathered
from gpu_figures import Figure

from slimpipe import SlimPipeOptions
from slimpipe.planner.memory import Numerics

SLICES = (8, 16)
_GPU = Numerics(value_bytes=2, wide_bytes=4, mixed=False)
_GIB = 2**30
_ON_CPU, _ON_GPU = "held between units", "allocator's peak"
"""What is compared."""


class _Peaks(NamedTuple):
    """Of one step of each rank, in bytes."""

    held: list[int]
    peak: list[int] | None
    """None where there is no allocator to ask, and so is `working`."""
    working: list[int] | None
    """Most that one backward took for itself."""


class AllocatorWatch:
    """Bytes of a GPU's allocator in one step, above what was there when the watch began."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        torch.cuda.synchronize(device)
        self._device = device
        self._before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        self.held = self.peak = self.working = 0

    def watched(self, fn: Callable, *, is_backward: bool = False) -> Callable:
        """``fn``, read at its begin and end."""

        @wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.read_peak()
            torch.cuda.reset_peak_memory_stats(self._device)
            held = torch.cuda.memory_allocated(self._device) - self._before
            self.held = max(self.held, held)
            result = fn(*args, **kwargs)
            if is_backward:
                self.working = max(self.working, self.read_peak() - held)
            return result

        return call

    def read_peak(self) -> int:
        """Highest since the last begin of a unit."""
        peak = torch.cuda.max_memory_allocated(self._device) - self._before
        self.peak = max(self.peak, peak)
        return peak


def memory(device: torch.device, tiny: bool, *, num_slices: int) -> list[Figure]:
    """Runs on every rank; with 0 slices torch's 1F1B."""
    sizes = {"num_ranks": dist.get_world_size(), "num_microbatches": 4, "num_stages_per_rank": 1}
    if tiny:
        setting = Setting(**sizes, num_layers=4, dim=64, num_heads=4, num_kv_heads=2, vocab=64, seq_len=128)
    else:
        setting = Setting(
            **sizes, num_layers=12, dim=2048, num_heads=16, num_kv_heads=4, vocab=32000, seq_len=32768, dtype="bfloat16"
        )
    is_ours = num_slices > 0
    title, peaks, (loss, grad_norm) = _run("SlimPipe" if is_ours else "1F1B", num_slices, setting, device)
    return [
        *_figures(title, peaks, _formula(setting, num_slices, device), is_ours=is_ours),
        Figure("c", f"{title}, a step: loss", loss, ""),
        Figure("c", f"{title}, a step: norm of gradients", grad_norm, ""),
    ]


def over_1f1b(figures: list[Figure], *, num_ranks: int) -> list[Figure]:
    """SlimPipe over torch's 1F1B, where both have been measured."""
    values = {figure.name: figure.value for figure in figures}
    compared = []
    for n, what in product(SLICES, (_ON_CPU, _ON_GPU)):
        ours, theirs = f"SlimPipe n={n}", "1F1B"
        if not {f"{ours}: {what}, rank 0", f"{theirs}: {what}, rank 0"} <= values.keys():
            continue
        title, bound = f"{ours} over {theirs}", 1.05 * (1 + 2 * (num_ranks - 1) / n) / num_ranks
        rank_0, loss, grad_norm = (
            values[f"{ours}{name}"] / values[f"{theirs}{name}"]
            for name in (f": {what}, rank 0", ", a step: loss", ", a step: norm of gradients")
        )
        compared += [
            Figure("c", f"{title}: bytes of rank 0 (1.05 (1 + 2 (p-1) / n) / p)", rank_0, "ratio", bound),
            Figure("c", f"{title}: loss", abs(loss - 1), "relative", 1e-3),
            Figure("c", f"{title}: norm of gradients", abs(grad_norm - 1), "relative", 2e-2),
        ]
    return compared


def _run(name: str, num_slices: int, setting: Setting, device: torch.device) -> tuple[str, _Peaks, tuple[float, float]]:
    """Title of the schedule; what a step takes, on a GPU the second one; loss, and norm of the gradients."""
    on_cpu = device.type == "cpu"
    options = SlimPipeOptions(context_exchange="off", measure_memory=on_cpu)
    bench = Bench(name, setting, num_slices=num_slices, options=options, device=device)
    for part in bench.parts:
        part.zero_grad = partial(part.zero_grad, set_to_none=False)  # there before the step that counts
    if on_cpu:
        result = bench.loss_and_grad_norm()
        peaks = _Peaks(_metered(bench), None, None)
    else:
        bench.step()
        torch.cuda.empty_cache()
        watch = AllocatorWatch(device)
        for part in bench.parts:
            part.forward = watch.watched(part.forward)
        with backward_replaced(watch.watched(torch.autograd.backward, is_backward=True)):
            result = bench.loss_and_grad_norm()
        peaks = _Peaks(gathered(watch.held), gathered(watch.peak), gathered(watch.working))
    title = bench.title
    del bench
    gc.collect()
    if not on_cpu:
        torch.cuda.empty_cache()
    dist.barrier()
    return title, peaks, result


def _metered(bench: Bench) -> list[int]:
    """What each rank holds as the meter counts it, in a further step where the schedule is torch's."""
    if not bench.is_ours:
        return bench.peak_live_bytes()
    metrics = bench.schedule.metrics()
    return gathered(sum(metrics[part] for part in ("peak_live_bytes", "carry_bytes", "message_bytes")))


def _formula(setting: Setting, num_slices: int, device: torch.device) -> list[float]:
    """Bytes that each rank is planned to hold between units."""
    shape = num_slices, 1, setting.num_microbatches
    numerics = CPU if device.type == "cpu" else _GPU
    ranks = range(setting.num_ranks)
    return [sum(planned_parts(setting, shape, rank=rank, numerics=numerics).values()) for rank in ranks]


def _figures(title: str, peaks: _Peaks, formula: list[float], *, is_ours: bool) -> list[Figure]:
    limit = 0.05 if is_ours else None
    what = _ON_CPU if peaks.peak is None else _ON_GPU
    figures = [
        Figure("c", f"{title}: {what}, rank {rank}", num_bytes / _GIB, "GiB")
        for rank, num_bytes in enumerate(peaks.peak or peaks.held)
    ]
    name = f"{title}: peak held between units, off the formula at most"
    figures.append(Figure("c", name, _furthest(peaks.held, formula), "relative", limit))
    if peaks.peak is not None and peaks.working is not None:
        with_working = [planned + working for planned, working in zip(formula, peaks.working, strict=True)]
        name = f"{title}: allocator's peak, off the formula + measured working bytes of one backward at most"
        figures += [
            Figure("c", f"{title}: working bytes of one backward, most of a rank", max(peaks.working) / _GIB, "GiB"),
            Figure("c", name, _furthest(peaks.peak, with_working), "relative", limit),
        ]
    return figures


def _furthest(measured: list[int], planned: list[float]) -> float:
    return max(abs(real / plan - 1) for real, plan in zip(measured, planned, strict=True))
