"""One rank's part of a pipeline schedule, torch's or ours, instrumented for `bench_schedules.py`."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_decoder import Decoder, DecoderSize
from bench_ranks import gathered, over_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from slimpipe import ScheduleInterleavedSlimPipe, ScheduleSlimPipe, SlimPipeOptions
from slimpipe.dtypes import wide_dtype
from slimpipe.runtime.meter import MemoryMeter
from slimpipe.vocabulary import VocabularyEmbedding, VocabularyHead

TORCH_SINGLE = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}
SCHEDULES = (*TORCH_SINGLE, "Interleaved1F1B", "SlimPipe", "InterleavedSlimPipe")
TOLERANCE = 1e-5
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Setting(DecoderSize):
    """What is benchmarked."""

    num_ranks: int = 2
    seq_len: int = 4096
    num_microbatches: int = 2
    num_stages_per_rank: int = 2
    num_slices: tuple[int, ...] = (8,)
    vocab_parallel: tuple[str, ...] = ("none",)
    num_threads: int = 1
    dtype: str = "float32"
    schedules: tuple[str, ...] = SCHEDULES
    rounds: int = 5


class ComputeClock:
    """Time this rank spends in stage modules, loss and backward."""

    def __init__(self) -> None:
        self.after_call: Callable[[], object] = lambda: None
        self.reset()

    def reset(self) -> None:
        self.wall_seconds = self.cpu_seconds = 0.0

    def timed(self, fn: Callable, waited: Callable[[], float] = lambda: 0.0) -> Callable:
        """``fn``, its calls counted, without the time that it waits for others; ``waited`` gives the total of that."""

        @wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter() - waited(), time.thread_time()
            try:
                return fn(*args, **kwargs)
            finally:
                self.cpu_seconds += time.thread_time() - cpu
                self.wall_seconds += time.perf_counter() - waited() - wall
                self.after_call()

        return call


class StepTime(NamedTuple):
    """Seconds of one step."""

    step: float
    """Of the slowest rank."""
    compute: float
    """Wall-clock time of compute, all ranks."""
    compute_cpu: float
    """CPU time of compute, all ranks."""


class Bench:
    """This rank's part of one schedule, ready to step.

    Args:
        name: One of `SCHEDULES`.
        setting: Model and shapes.
        num_slices: Slices per microbatch of our schedules.
        vocab_parallel: What all ranks share of the vocabulary under our schedules: "none", "output" or "both".
        options: Of our schedules.
        device: Where it runs.
    """

    def __init__(
        self,
        name: str,
        setting: Setting,
        *,
        num_slices: int,
        vocab_parallel: str = "none",
        options: SlimPipeOptions | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._device = torch.device("cpu") if device is None else device
        self.name, self.vocab_parallel, self.is_ours = name, vocab_parallel, name.endswith("SlimPipe")
        self.title = title(name, num_slices=num_slices, vocab_parallel=vocab_parallel)
        self.clock = ComputeClock()
        self._loss: dict[str, Any] = {}
        rank, count = dist.get_rank(), setting.num_microbatches
        v = setting.num_stages_per_rank if name.startswith("Interleaved") else 1
        num_stages = v * setting.num_ranks
        self.num_calls = 2 * v * count * (num_slices if self.is_ours else 1)
        self.parts: list[nn.Module] = []
        for index in range(rank, num_stages, setting.num_ranks):
            part = whole_decoder(setting, self._device).keep(index, num_stages, vocab_parallel=vocab_parallel)
            part.forward = self.clock.timed(part.forward)
            self.parts.append(part)
        stages: list[Any] = []
        for j, part in enumerate(self.parts):
            index = rank + j * setting.num_ranks
            metas: dict[str, Any] = {} if self.is_ours else _metas(setting, index, num_stages)
            stages.append(PipelineStage(part, index, num_stages, self._device, **metas))
        num_tokens = count * setting.seq_len
        loss_fn: Callable = self.clock.timed(lambda output, target: cross_entropy_sum(output, target) / num_tokens)
        self.schedule: Any
        if self.is_ours:
            ours: dict[str, Any] = {"num_slices": num_slices, "options": options}
            if vocab_parallel != "none":
                loss_fn, ours["embedding"] = self._share_vocabulary(setting, vocab_parallel)
                self._loss = {"loss_kwargs": {"denominator": num_tokens}}
            if name == "SlimPipe":
                self.schedule = ScheduleSlimPipe(stages[0], count, loss_fn, **ours)
            else:
                self.schedule = ScheduleInterleavedSlimPipe(stages, count, loss_fn, **ours)
        elif name in TORCH_SINGLE:
            self.schedule = TORCH_SINGLE[name](stages[0], count, loss_fn, scale_grads=False)
        else:
            self.schedule = ScheduleInterleaved1F1B(stages, count, loss_fn, scale_grads=False)
        tokens, labels = make_batch(setting, self._device)
        self._args = (tokens,) if rank == 0 else ()
        self._kwargs = {"positions": torch.arange(setting.seq_len, device=self._device).expand_as(tokens)}
        self._target = labels if rank == setting.num_ranks - 1 else None

    def _share_vocabulary(
        self, setting: Setting, vocab_parallel: str
    ) -> tuple[VocabularyHead, VocabularyEmbedding | None]:
        """This rank's rows of the whole model's output layer and embedding; they are parts of their own."""
        whole = whole_decoder(setting, self._device)
        assert whole.head is not None and whole.embedding is not None
        shared: dict[str, Any] = {"group": dist.group.WORLD, "reduce_to": None}
        head = VocabularyHead.from_linear(whole.head, **shared)
        embedding = VocabularyEmbedding.from_embedding(whole.embedding, **shared) if vocab_parallel == "both" else None
        modules = [head] if embedding is None else [head, embedding]
        for module in modules:
            module.forward = self.clock.timed(module.forward, waited=partial(getattr, module.ranks, "waited"))
        self.parts += modules
        return head, embedding

    def step(self) -> float:
        """Run one step from zero gradients; returns the sum of this rank's losses."""
        for part in self.parts:
            part.zero_grad()
        self.clock.reset()
        losses: list[Tensor] = []
        with backward_replaced(self.clock.timed(torch.autograd.backward)):
            self.schedule.step(
                *self._args, target=self._target, losses=losses, return_outputs=False, **self._loss, **self._kwargs
            )
        return sum(loss.item() for loss in losses)

    def loss_and_grad_norm(self) -> tuple[float, float]:
        """Of one step of the whole pipeline."""
        loss = self.step()
        grads = [parameter.grad for part in self.parts for parameter in part.parameters()]
        squares = sum(grad.double().square().sum().item() for grad in grads if grad is not None)
        loss, squares = over_ranks(dist.ReduceOp.SUM, loss, squares)
        return loss, squares**0.5

    def timed_step(self) -> StepTime:
        """Time one step."""
        gc.collect()
        dist.barrier()
        start = time.perf_counter()
        self.step()
        seconds = time.perf_counter() - start
        (slowest,) = over_ranks(dist.ReduceOp.MAX, seconds)
        return StepTime(slowest, *over_ranks(dist.ReduceOp.SUM, self.clock.wall_seconds, self.clock.cpu_seconds))

    def peak_live_bytes(self) -> list[int]:
        """Of each rank, in one step."""
        meter = MemoryMeter(list(self.parts))
        meter.exclude([*self._args, *self._kwargs.values()])
        self.clock.after_call = meter.read
        with nullcontext() if self.is_ours else meter.saving():
            self.step()
        mine = self.schedule.metrics()["peak_live_bytes"] if self.is_ours else meter.peak_bytes
        return gathered(mine)

    def host_seconds_per_call(self) -> float:
        """Host time per forward or backward call in one step, mean over ranks."""
        dist.barrier()
        start = time.thread_time()
        self.step()
        host_seconds = time.thread_time() - start - self.clock.cpu_seconds
        (total,) = over_ranks(dist.ReduceOp.SUM, host_seconds / self.num_calls)
        return total / dist.get_world_size()

    def close(self) -> None:
        """End the schedule's process groups."""
        if self.is_ours:
            self.schedule.close()


def title(name: str, *, num_slices: int, vocab_parallel: str) -> str:
    """What a report calls a schedule."""
    if not name.endswith("SlimPipe"):
        return name
    return f"{name} n={num_slices}" + ("" if vocab_parallel == "none" else f" {vocab_parallel}")


def whole_decoder(setting: Setting, device: torch.device) -> Decoder:
    """The model of all schedules, in one piece; always with the same weights."""
    torch.manual_seed(0)
    with device:
        return Decoder(setting).to(DTYPES[setting.dtype])


def _metas(setting: Setting, stage: int, num_stages: int) -> dict[str, Tensor]:
    """What goes in and out of a stage, for torch's schedules, which need NumPy to find it out."""
    dtype, tokens_BS = DTYPES[setting.dtype], torch.empty(1, setting.seq_len, dtype=torch.int64, device="meta")

    def meta(dim: int) -> Tensor:
        return torch.empty(*tokens_BS.shape, dim, dtype=dtype, device="meta", requires_grad=True)

    return {
        "input_args": meta(setting.dim) if stage else tokens_BS,
        "output_args": meta(setting.dim if stage < num_stages - 1 else setting.vocab),
    }


def make_batch(setting: Setting, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and labels of a step; always the same."""
    generator = torch.Generator().manual_seed(0)
    shape = (setting.num_microbatches, setting.seq_len)
    tokens, labels = (torch.randint(setting.vocab, shape, generator=generator).to(device) for _ in range(2))
    return tokens, labels


def cross_entropy_sum(output: Tensor, target: Tensor) -> Tensor:
    logits = output.flatten(0, 1).to(wide_dtype(output.dtype))
    return F.cross_entropy(logits, target.flatten(), reduction="sum")


def disagreement(figures: dict[str, dict[str, float]]) -> str | None:
    """What the schedules differ in, if anything."""
    for quantity in ("loss", "grad_norm"):
        values = {title: figure[quantity] for title, figure in figures.items()}
        first = next(iter(values.values()))
        if not all(abs(value - first) <= TOLERANCE * abs(first) for value in values.values()):
            return f"the schedules differ in {quantity} by more than {TOLERANCE} relative: {values}"
    return None


@contextmanager
def backward_replaced(fn: Callable) -> Iterator[None]:
    before, torch.autograd.backward = torch.autograd.backward, fn
    try:
        yield
    finally:
        torch.autograd.backward = before
