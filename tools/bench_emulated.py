"""The bubble of a large model's pipeline on one machine: real executor and messages, compute replaced by sleeps.

    python tools/bench_emulated.py [--num-slices 16 --num-stages-per-rank 5 --num-microbatches 4 --unit-ms 60] [--json]

Starts its own ranks (gloo on the loopback address). Every rank runs the public schedules on stages of a decoder whose
tensors are tiny: one head of a few values. A layer is a linear part that sleeps, and `SliceAttention` with the
attention kernel replaced by a sleep in proportion to the visible pairs of queries and keys, so also where one rank
helps another. Backward sleeps twice as long in the linear part and 2.5 times in attention. The lengths have the ratio
of the FLOP of the model and sequence length given (by default 13B at 256K tokens), and are scaled so that an average
unit takes ``--unit-ms`` forward. Output layer, loss and documents take no time.

- *Step*: from a barrier to the end of the slowest rank's step. One step with and one without exchange per round, in
  alternating order; the median.
- *Bubble*: 1 - (time slept as compute, all ranks) / (p x step). Everything else counts as bubble: waiting, messages,
  and the host time of p processes that share this machine's cores.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from bench_cli import aligned, check_layers, parse_setting, setting_parser
from bench_ranks import over_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from slimpipe import ScheduleInterleavedSlimPipe, ScheduleSlimPipe, SliceAttention, SlimPipeOptions
from slimpipe.attention.kernels.torch_cpu_flash import TorchCpuFlashKernel
from slimpipe.options import EXCHANGE_NAMES
from slimpipe.program.cost import BACKWARD_TO_FORWARD

LINEAR_BACKWARD_TO_FORWARD = 2.0
HEAD_DIM = 8


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is emulated."""

    num_ranks: int = 8
    num_slices: int = 16
    num_stages_per_rank: int = 1
    num_microbatches: int = 2
    unit_ms: float = 150.0
    exchange: tuple[str, ...] = ("off", "on")
    exchange_granularity: int = 1
    slice_len: int = 128
    num_layers: int = 40
    dim: int = 5120
    ffn_dim: int = 13824
    seq_len: int = 262144
    rounds: int = 3

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_stages_per_rank

    @property
    def layers_per_stage(self) -> int:
        return self.num_layers // self.num_stages


HELPS = {
    "unit_ms": "forward of an average unit, one slice on one stage, in milliseconds",
    "exchange": "values of SlimPipeOptions.context_exchange that are compared",
    "exchange_granularity": "in tokens of the tiny tensors",
    "slice_len": "tokens of the tiny tensors; each stands for several of the model's",
    "seq_len": "of the model whose costs are emulated, as are dim and ffn-dim",
    "rounds": "timed steps of each",
}


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of forward in one layer."""

    linear: float
    """Of one slice."""
    attention_pair: float
    """Of one query and one key of the tiny tensors."""

    @classmethod
    def of(cls, setting: Setting) -> Costs:
        """FLOP of the emulated model, scaled to the length of an average unit."""
        tokens = setting.seq_len / (
            setting.num_slices * setting.slice_len
        )  # that a token of the tiny tensors stands for
        linear = tokens * setting.slice_len * 2 * setting.dim * (4 * setting.dim + 3 * setting.ffn_dim)
        pair = tokens**2 * 4 * setting.dim
        average_pairs = setting.slice_len**2 * setting.num_slices / 2
        unit = setting.layers_per_stage * (linear + pair * average_pairs)
        seconds_per_flop = setting.unit_ms / 1000 / unit
        return cls(linear=linear * seconds_per_flop, attention_pair=pair * seconds_per_flop)


class SleepingClock:
    """Sleeps instead of computing. What one sleep takes too long, the next one is shorter."""

    def __init__(self) -> None:
        self.is_on = False
        self.reset()

    def reset(self) -> None:
        self.seconds = self._late = 0.0

    def compute(self, seconds: float) -> None:
        if not self.is_on:
            return
        self.seconds += seconds
        end = time.perf_counter() + seconds - self._late
        while (left := end - time.perf_counter()) > 0:
            time.sleep(left)
        self._late = time.perf_counter() - end


class _Linear(torch.autograd.Function):
    """The identity, after as much time as a layer's matrix products take."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: SleepingClock, seconds: float) -> Tensor:
        ctx.args = clock, seconds
        clock.compute(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        clock, seconds = ctx.args
        clock.compute(LINEAR_BACKWARD_TO_FORWARD * seconds)
        return dx, None, None


class EmulatedStage(nn.Module):
    """Layers that sleep. The first stage embeds tokens, all alike."""

    def __init__(self, setting: Setting, clock: SleepingClock, costs: Costs, *, is_first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1, HEAD_DIM) if is_first else None
        self.attention = nn.ModuleList(SliceAttention() for _ in range(setting.layers_per_stage))
        self._clock, self._linear = clock, costs.linear

    def forward(self, x: Tensor, positions: Tensor, attention_masks: object = None) -> Tensor:
        x_BLD = x if self.embedding is None else self.embedding(x)
        for attention in self.attention:
            x_BLD = _Linear.apply(x_BLD, self._clock, self._linear)
            x_BLNH = x_BLD.unsqueeze(2)
            x_BLD = attention(x_BLNH, x_BLNH, x_BLNH, attention_masks=attention_masks).squeeze(2)
        return x_BLD


def emulated_kernel(clock: SleepingClock, costs: Costs) -> AbstractContextManager:
    """While entered, attention sleeps, and returns tensors of the right shapes."""

    def sleep(q_BLNH: Tensor, k_BKGH: Tensor, causal: bool, factor: float) -> None:
        num_pairs = q_BLNH.shape[1] * k_BKGH.shape[1] / (2 if causal else 1)
        clock.compute(factor * costs.attention_pair * num_pairs)

    def forward(_self, q_BLNH, k_BKGH, _v_BKGH, causal, _left, _scale):
        sleep(q_BLNH, k_BKGH, causal, 1.0)
        B, L, N, _ = q_BLNH.shape
        return q_BLNH.clone(), q_BLNH.new_zeros(B, N, L)

    def backward(_self, dout_BLNH, q_BLNH, k_BKGH, v_BKGH, _out_BLNH, _lse_BNL, causal, _left, _scale):
        sleep(q_BLNH, k_BKGH, causal, BACKWARD_TO_FORWARD)
        return dout_BLNH.clone(), torch.zeros_like(k_BKGH), torch.zeros_like(v_BKGH)

    return mock.patch.multiple(TorchCpuFlashKernel, _forward=forward, _backward=backward)


def make_step(setting: Setting, exchange: str, clock: SleepingClock, costs: Costs) -> tuple[Any, partial]:
    """A schedule, and its step of this rank."""
    rank, count = dist.get_rank(), setting.num_microbatches
    stages = [
        PipelineStage(
            EmulatedStage(setting, clock, costs, is_first=index == 0), index, setting.num_stages, torch.device("cpu")
        )
        for index in range(rank, setting.num_stages, setting.num_ranks)
    ]
    options = SlimPipeOptions(
        kernel=TorchCpuFlashKernel.name,
        context_exchange=exchange,
        exchange_granularity=setting.exchange_granularity,
    )
    kwargs: dict[str, Any] = {"loss_fn": sum_of_output, "num_slices": setting.num_slices, "options": options}
    schedule: Any
    if len(stages) == 1:
        schedule = ScheduleSlimPipe(stages[0], count, **kwargs)
    else:
        schedule = ScheduleInterleavedSlimPipe(stages, count, **kwargs)
    tokens = torch.zeros(count, setting.num_slices * setting.slice_len, dtype=torch.int64)
    args = (tokens,) if rank == 0 else ()
    target = tokens if rank == setting.num_ranks - 1 else None
    return schedule, partial(schedule.step, *args, target=target, return_outputs=False)


def sum_of_output(output: Tensor, _target: Tensor) -> Tensor:
    return output.sum()


def measure(setting: Setting) -> dict[str, Any]:
    """Runs on every rank; all return the same figures."""
    clock, costs = SleepingClock(), Costs.of(setting)
    with emulated_kernel(clock, costs):
        runs = {exchange: make_step(setting, exchange, clock, costs) for exchange in setting.exchange}
        for _, step in runs.values():
            for _ in range(2):  # the first step learns the layers, the second is the first with exchange
                step()
        clock.is_on = True
        timed: dict[str, list[tuple[float, float]]] = {exchange: [] for exchange in runs}
        for round_ in range(setting.rounds):
            for exchange in list(runs)[:: -1 if round_ % 2 else 1]:
                timed[exchange].append(timed_step(runs[exchange][1], clock))
                if dist.get_rank() == 0:
                    step_seconds, compute_seconds = timed[exchange][-1]
                    share = bubble(setting, step_seconds, compute_seconds)
                    print(
                        f"round {round_ + 1} of {setting.rounds}, {exchange}: {share:.1%}", file=sys.stderr, flush=True
                    )
        for schedule, _ in runs.values():
            schedule.close()
    figures = {
        exchange: {
            "step_seconds": statistics.median(step for step, _ in steps),
            "compute_seconds": statistics.median(compute for _, compute in steps),
            "bubble": statistics.median(bubble(setting, *step) for step in steps),
        }
        for exchange, steps in timed.items()
    }
    return {"setting": asdict(setting), "exchange": figures}


def timed_step(step: partial, clock: SleepingClock) -> tuple[float, float]:
    """Seconds of the slowest rank, and of compute on all ranks."""
    clock.reset()
    dist.barrier()
    start = time.perf_counter()
    step()
    (slowest,) = over_ranks(dist.ReduceOp.MAX, time.perf_counter() - start)
    (compute,) = over_ranks(dist.ReduceOp.SUM, clock.seconds)
    return slowest, compute


def bubble(setting: Setting, step_seconds: float, compute_seconds: float) -> float:
    return 1 - compute_seconds / (setting.num_ranks * step_seconds)


def table(report: dict[str, Any]) -> str:
    """The figures to read."""
    rows: list[tuple[str, ...]] = [("exchange", "step s", "compute s", "bubble %")]
    for exchange, figure in report["exchange"].items():
        numbers = figure["step_seconds"], figure["compute_seconds"], 100 * figure["bubble"]
        rows.append((exchange, *map("{:.{}f}".format, numbers, (3, 3, 1))))
    return aligned(rows)


def parse(argv: list[str] | None) -> tuple[Setting, bool]:
    parser = setting_parser(
        Setting,
        description="Emulate a large model's pipeline with sleeps and print its bubble with and without exchange.",
        helps=HELPS,
        choices={"exchange": EXCHANGE_NAMES},
    )
    setting, as_json = parse_setting(parser, Setting, argv)
    check_layers(parser, setting.num_layers, setting.num_stages)
    return setting, as_json


def main(argv: list[str] | None = None) -> None:
    setting, as_json = parse(argv)
    report = run_ranks(measure, setting, num_ranks=setting.num_ranks)
    print(json.dumps(report, indent=2) if as_json else table(report))


if __name__ == "__main__":
    main()
