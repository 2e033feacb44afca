"""Pipeline schedules side by side: step time, bubble, memory and host time, on one machine's CPU.

    python tools/bench_schedules.py [--num-slices 8 16] [--schedules 1F1B SlimPipe] [--rounds 7] [--json]

Starts its own ranks (gloo on the loopback address). Every schedule trains the same model, from the same weights, on the same
tokens, over the same process group. Figures are printed only if all of them agree on loss and gradient norm.

- *Step time*: from a barrier to the end of the slowest rank's `schedule.step`; gradients are set to None before. One step of
  each schedule per round, in alternating order. The speed-up over the first schedule is the median of the rounds' own ratios.
- *Bubble*: 1 - (compute time, all ranks) / (p x step time). Compute time is wall-clock time inside the forward of a stage's
  module, the loss function and `torch.autograd.backward`, which torch's schedules and ours both go through.
- *Live bytes*: most bytes that a rank keeps for backward, read after each of these calls; in a step of its own that is not
  timed. The same meter counts what autograd saves under all schedules, ours adds K,V. Not counted: stage outputs and receive
  buffers that torch's schedules keep besides.
- *Host time*: CPU time of a rank's main thread outside these calls, per call of a forward or backward. A waiting thread takes
  no CPU time. Measured on a model of one tiny layer per stage, with as many and as small units for all (torch's schedules get a
  microbatch for every slice of ours), so that copying messages counts next to nothing.

Shapes: B batch, L slice or whole sequence, N query heads, G K,V heads, H head dim, D model dim.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from slimpipe import ScheduleInterleavedSlimPipe, ScheduleSlimPipe, SliceAttention, SlimPipeOptions
from slimpipe.runtime.meter import MemoryMeter

TORCH_SINGLE = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}
SCHEDULES = (*TORCH_SINGLE, "Interleaved1F1B", "SlimPipe", "InterleavedSlimPipe")
TOLERANCE = 1e-5
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Setting:
    """What is benchmarked."""

    num_ranks: int = 2
    num_layers: int = 8
    dim: int = 256
    num_heads: int = 8
    num_kv_heads: int = 8
    vocab: int = 2048
    seq_len: int = 4096
    num_microbatches: int = 2
    num_stages_per_rank: int = 2
    """Of the interleaved schedules."""
    num_threads: int = 1
    """Per rank."""
    dtype: str = "float32"
    num_slices: tuple[int, ...] = (8,)
    """Of our schedules, each of which runs once per entry."""
    schedules: tuple[str, ...] = SCHEDULES
    rounds: int = 5


# The model ---------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention with rotary positions, then SwiGLU, each behind an RMSNorm."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        dim, self.head_dim = setting.dim, setting.dim // setting.num_heads
        hidden = 8 * dim // 3
        self.wq, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wk, self.wv = (nn.Linear(dim, setting.num_kv_heads * self.head_dim, bias=False) for _ in range(2))
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.inner_attention = SliceAttention()

    def forward(self, x_BLD: Tensor, rotation: tuple[Tensor, Tensor], **kwargs: Any) -> Tensor:
        h_BLD = self.attention_norm(x_BLD)
        q_BLNH, k_BLGH, v_BLGH = (w(h_BLD).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q_BLNH, k_BLGH = rotate(q_BLNH, *rotation), rotate(k_BLGH, *rotation)
        out_BLNH = self.inner_attention(q_BLNH, k_BLGH, v_BLGH, enable_gqa=True, **kwargs)
        x_BLD = x_BLD + self.wo(out_BLNH.flatten(2))
        h_BLD = self.mlp_norm(x_BLD)
        return x_BLD + self.down(F.silu(self.gate(h_BLD)) * self.up(h_BLD))


def rotate(x_BLNH: Tensor, cos_BL1H: Tensor, sin_BL1H: Tensor) -> Tensor:
    """Rotary position embedding; cos and sin are of half the head dim."""
    a, b = x_BLNH.chunk(2, dim=-1)
    return torch.cat([a * cos_BL1H - b * sin_BL1H, a * sin_BL1H + b * cos_BL1H], dim=-1)


class Decoder(nn.Module):
    """A decoder, or after `keep` one stage of it."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.embedding: nn.Embedding | None = nn.Embedding(setting.vocab, setting.dim)
        self.blocks = nn.ModuleList(Block(setting) for _ in range(setting.num_layers))
        self.norm: nn.RMSNorm | None = nn.RMSNorm(setting.dim)
        self.head: nn.Linear | None = nn.Linear(setting.dim, setting.vocab, bias=False)
        self.half_head_dim = setting.dim // setting.num_heads // 2
        self.to(DTYPES[setting.dtype])

    def keep(self, stage: int, num_stages: int) -> Decoder:
        """Drop what other stages hold."""
        size = len(self.blocks) // num_stages
        self.blocks = self.blocks[stage * size : (stage + 1) * size]
        if stage > 0:
            self.embedding = None
        if stage < num_stages - 1:
            self.norm = self.head = None
        return self

    def forward(self, x: Tensor, positions: Tensor, attention_masks: object = None) -> Tensor:
        h_BLD = x if self.embedding is None else self.embedding(x)
        frequency_H = 10000.0 ** (-torch.arange(self.half_head_dim) / self.half_head_dim)
        angle_BL1H = (positions[..., None] * frequency_H)[:, :, None]
        rotation = angle_BL1H.cos().to(h_BLD.dtype), angle_BL1H.sin().to(h_BLD.dtype)
        for block in self.blocks:
            h_BLD = block(h_BLD, rotation, positions=positions, attention_masks=attention_masks)
        return h_BLD if self.head is None or self.norm is None else self.head(self.norm(h_BLD))


# One schedule ------------------------------------------------------------------------------------------------------------


class ComputeClock:
    """Time this rank spends in stage modules, loss and backward."""

    def __init__(self) -> None:
        self.after_call: Callable[[], object] = lambda: None
        self.reset()

    def reset(self) -> None:
        self.wall_seconds = self.cpu_seconds = 0.0

    def timed(self, fn: Callable) -> Callable:
        """``fn``, its calls counted."""

        @wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return fn(*args, **kwargs)
            finally:
                self.cpu_seconds += time.thread_time() - cpu
                self.wall_seconds += time.perf_counter() - wall
                self.after_call()

        return call


class Bench:
    """This rank's part of one schedule, ready to step.

    Args:
        name: One of `SCHEDULES`.
        setting: Model and shapes.
        num_slices: Slices per microbatch of our schedules.
        measure_memory: Whether `peak_live_bytes` is wanted.
    """

    def __init__(self, name: str, setting: Setting, *, num_slices: int, measure_memory: bool = False) -> None:
        self.name, self.is_ours = name, name.endswith("SlimPipe")
        self.title = f"{name} n={num_slices}" if self.is_ours else name
        self.clock = ComputeClock()
        rank, count = dist.get_rank(), setting.num_microbatches
        v = setting.num_stages_per_rank if name.startswith("Interleaved") else 1
        num_stages = v * setting.num_ranks
        self.num_calls = 2 * v * count * (num_slices if self.is_ours else 1)
        self.parts = []
        for index in range(rank, num_stages, setting.num_ranks):
            torch.manual_seed(0)
            part = Decoder(setting).keep(index, num_stages)
            part.forward = self.clock.timed(part.forward)  # type: ignore[method-assign]
            self.parts.append(part)
        stages = [
            PipelineStage(part, rank + j * setting.num_ranks, num_stages, torch.device("cpu"))
            for j, part in enumerate(self.parts)
        ]
        num_tokens = count * setting.seq_len
        loss_fn = self.clock.timed(lambda output, target: cross_entropy_sum(output, target) / num_tokens)
        self.schedule: Any
        if self.is_ours:
            ours = {"num_slices": num_slices, "options": SlimPipeOptions(measure_memory=measure_memory)}
            if name == "SlimPipe":
                self.schedule = ScheduleSlimPipe(stages[0], count, loss_fn, **ours)
            else:
                self.schedule = ScheduleInterleavedSlimPipe(stages, count, loss_fn, **ours)
        elif name in TORCH_SINGLE:
            self.schedule = TORCH_SINGLE[name](stages[0], count, loss_fn, scale_grads=False)
        else:
            self.schedule = ScheduleInterleaved1F1B(stages, count, loss_fn, scale_grads=False)
        generator = torch.Generator().manual_seed(0)
        shape = (count, setting.seq_len)
        tokens, labels = (torch.randint(setting.vocab, shape, generator=generator) for _ in range(2))
        self._args = (tokens,) if rank == 0 else ()
        self._kwargs = {"positions": torch.arange(setting.seq_len).expand(shape)}
        self._target = labels if rank == setting.num_ranks - 1 else None

    def step(self) -> float:
        """Run one step from zero gradients; returns the sum of this rank's losses."""
        for part in self.parts:
            part.zero_grad()
        self.clock.reset()
        losses: list[Tensor] = []
        with backward_replaced(self.clock.timed(torch.autograd.backward)):
            self.schedule.step(
                *self._args, target=self._target, losses=losses, return_outputs=False, **self._kwargs
            )
        return sum(loss.item() for loss in losses)

    def loss_and_grad_norm(self) -> tuple[float, float]:
        """Of one step of the whole pipeline."""
        loss = self.step()
        grads = [parameter.grad for part in self.parts for parameter in part.parameters()]
        squares = sum(grad.double().square().sum().item() for grad in grads if grad is not None)
        loss, squares = over_ranks(dist.ReduceOp.SUM, loss, squares)
        return loss, squares**0.5

    def timed_step(self) -> tuple[float, float]:
        """Step time of the slowest rank and compute time of all ranks, in seconds."""
        gc.collect()
        dist.barrier()
        start = time.perf_counter()
        self.step()
        seconds = time.perf_counter() - start
        return *over_ranks(dist.ReduceOp.MAX, seconds), *over_ranks(dist.ReduceOp.SUM, self.clock.wall_seconds)

    def peak_live_bytes(self) -> list[int]:
        """Peak live bytes of each rank in one step. Torch's schedules infer shapes in their first step: not this one."""
        meter = MemoryMeter(list(self.parts))
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


def cross_entropy_sum(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).to(torch.promote_types(output.dtype, torch.float32)), target.flatten(), reduction="sum")


@contextmanager
def backward_replaced(fn: Callable) -> Iterator[None]:
    before, torch.autograd.backward = torch.autograd.backward, fn
    try:
        yield
    finally:
        torch.autograd.backward = before


def over_ranks(op: Any, *values: float) -> list[float]:
    reduced = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(reduced, op)
    return reduced.tolist()


def gathered(value: int) -> list[int]:
    values = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(values, torch.tensor([value]))
    return [int(x) for x in values]


# The whole run -----------------------------------------------------------------------------------------------------------


def make_benches(setting: Setting, **kwargs: Any) -> list[Bench]:
    return [
        Bench(name, setting, num_slices=num_slices, **kwargs)
        for name in setting.schedules
        for num_slices in (setting.num_slices if name.endswith("SlimPipe") else (1,))
    ]


def measure(setting: Setting) -> dict[str, Any]:
    """Runs on every rank; all return the same figures, or {"error": what disagrees}."""
    benches = make_benches(setting)
    figures: dict[str, dict[str, Any]] = {}
    for bench in benches:
        loss, grad_norm = bench.loss_and_grad_norm()  # warms up, too
        figures[bench.title] = {"loss": loss, "grad_norm": grad_norm}
    for quantity in ("loss", "grad_norm"):
        values = {title: figure[quantity] for title, figure in figures.items()}
        low, high = min(values.values()), max(values.values())
        if not high - low <= TOLERANCE * abs(high):
            return {"error": f"the schedules differ in {quantity} by more than {TOLERANCE} relative: {values}"}
    rounds: dict[str, list[tuple[float, float]]] = {bench.title: [] for bench in benches}
    for round_ in range(setting.rounds):
        for bench in benches[:: -1 if round_ % 2 else 1]:
            rounds[bench.title].append(bench.timed_step())
    first = [seconds for seconds, _ in rounds[benches[0].title]]
    for bench in benches:
        figure, steps = figures[bench.title], rounds[bench.title]
        figure["step_seconds"] = statistics.median(seconds for seconds, _ in steps)
        figure["speed_up"] = statistics.median(a / seconds for a, (seconds, _) in zip(first, steps))
        figure["bubble"] = statistics.median(1 - compute / setting.num_ranks / seconds for seconds, compute in steps)
        bench.close()
    for bench in make_benches(setting, measure_memory=True):
        bench.step()
        figures[bench.title]["peak_live_bytes"] = bench.peak_live_bytes()
        bench.close()
    for title, seconds in host_seconds(setting).items():
        figures[title]["host_us_per_call"] = 1e6 * seconds
    return {"setting": asdict(setting), "baseline": benches[0].title, "schedules": figures}


def host_seconds(setting: Setting, *, slice_len: int = 8, steps: int = 15) -> dict[str, float]:
    """Host time per call of each schedule, median of interleaved steps, on a tiny model."""
    num_slices = max(setting.num_slices)
    benches = []
    for name in setting.schedules:
        v = setting.num_stages_per_rank if name.startswith("Interleaved") else 1
        units = 1 if name.endswith("SlimPipe") else num_slices  # torch's schedules: one slice per microbatch
        tiny = replace(
            setting,
            **{"num_layers": v * setting.num_ranks, "dim": 16, "num_heads": 2, "num_kv_heads": 2, "vocab": 16},
            seq_len=slice_len * num_slices // units,
            num_microbatches=setting.num_microbatches * units,
        )
        benches.append(Bench(name, tiny, num_slices=num_slices))
    for bench in benches:
        bench.step()
    rounds = [[bench.host_seconds_per_call() for bench in benches] for _ in range(steps)]
    medians = {bench.name: statistics.median(column) for bench, column in zip(benches, zip(*rounds))}
    for bench in benches:
        bench.close()
    return {
        (f"{name} n={n}" if name.endswith("SlimPipe") else name): seconds
        for name, seconds in medians.items()
        for n in setting.num_slices
    }


def run_rank(rank: int, setting: Setting, port: int, results: Any) -> None:
    torch.set_num_threads(setting.num_threads)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=setting.num_ranks)
    figures = measure(setting)
    if rank == 0:
        results.put(figures)
    dist.barrier()
    dist.destroy_process_group()


def run(setting: Setting) -> dict[str, Any]:
    """Start the ranks and return what they measured."""
    os.environ |= {"OMP_NUM_THREADS": str(setting.num_threads), "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run_rank, (setting, store.port, results), nprocs=setting.num_ranks)
    return results.get()


def print_table(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"p = {report['setting']['num_ranks']}, speed-up over {report['baseline']}")
    for column in ("schedule", "step s", "speed-up", "bubble %", "peak live MiB, by rank", "host us per call"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for title, figure in report["schedules"].items():
        live = " ".join(f"{num_bytes / 2**20:.1f}" for num_bytes in figure["peak_live_bytes"])
        table.add_row(
            title,
            f"{figure['step_seconds']:.3f}",
            f"{figure['speed_up']:.3f}",
            f"{100 * figure['bubble']:.1f}",
            live,
            f"{figure['host_us_per_call']:.0f}",
        )
    Console().print(table)


def parse(argv: list[str] | None) -> tuple[Setting, bool]:
    default = Setting()
    parser = argparse.ArgumentParser(
        description="Compare pipeline schedules on the CPU: step time, bubble, memory and host time.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name in ("num_ranks", "num_layers", "dim", "num_heads", "num_kv_heads", "vocab", "seq_len", "num_microbatches"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name), help=" ")
    parser.add_argument(
        "--num-slices", type=int, nargs="+", default=[*default.num_slices], help="of our schedules; several are compared"
    )
    parser.add_argument(
        "--num-stages-per-rank", type=int, default=default.num_stages_per_rank, help="of interleaved schedules"
    )
    parser.add_argument("--num-threads", type=int, default=default.num_threads, help="per rank")
    parser.add_argument("--dtype", choices=DTYPES, default=default.dtype, help=" ")
    parser.add_argument("--rounds", type=int, default=default.rounds, help="timed steps of each schedule")
    parser.add_argument(
        "--schedules", nargs="+", choices=SCHEDULES, default=[*SCHEDULES], help="the first is the baseline"
    )
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    values = vars(parser.parse_args(argv))
    as_json = values.pop("json")
    setting = Setting(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    stages = setting.num_ranks * setting.num_stages_per_rank
    if setting.num_layers % stages:
        parser.error(f"--num-layers {setting.num_layers} does not divide into {stages} stages")
    return setting, as_json


def main(argv: list[str] | None = None) -> None:
    setting, as_json = parse(argv)
    report = run(setting)
    if "error" in report:
        sys.exit(report["error"])
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print_table(report)


if __name__ == "__main__":
    main()
