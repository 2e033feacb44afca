"""What forward and backward of every unit take on this machine, as a table of costs that the planner reads.

    python tools/measure_ops.py [--num-slices 4 8] [--num-stages-per-rank 2] [--rounds 3] [--out DIR] [--json]

Starts as many processes as there would be ranks. Each runs its own rank's list of instructions, of two microbatches,
with the very executor of a step, but without messages: what it would receive is made up, what it would send is dropped.
So units meet the memory and caches that they meet in a step, and all cores are busy, as in a step. Then each process
runs once while the others wait: a rank that is alone has caches, clock and memory for itself, and where two cores are
threads of one, up to twice the speed. ``--num-slices 1`` runs whole microbatches in the order of torch's 1F1B.

Per stage and direction the table has the line that fits the medians of all slices best: seconds of a slice without
attention, and seconds per query-key pair; latency and bandwidth of the link between ranks; and host time.
``--out DIR`` writes a file per number of slices, which `OpCosts.from_json` reads.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_cli import aligned, check_layers, parse_setting, setting_parser
from bench_decoder import Decoder, DecoderSize
from bench_pipeline import DTYPES, cross_entropy_sum
from bench_ranks import run_ranks
from torch import Tensor

from slimpipe.options import SlimPipeOptions
from slimpipe.planner.costs import Link, OpCosts
from slimpipe.planner.simulate_torch import torch_order
from slimpipe.program import Op, Unit, build_program
from slimpipe.runtime.batch import Batch
from slimpipe.runtime.executor import Executor
from slimpipe.runtime.measure import measure_link
from slimpipe.runtime.microbatches import Microbatches
from slimpipe.runtime.stage import Stage

# Shapes: B batch, L slice or whole sequence, D model dim.

NUM_MICROBATCHES = 2
HELP = {
    "num_slices": "per microbatch; 1 for whole microbatches, which have one stage per rank; several are measured",
    "num_threads": "per rank",
    "rounds": "runs that count, after one that does not",
    "out": "folder to write the tables to",
}

Key = tuple[str, int, int]
"""\"F" or "B", stage, slice."""
Samples = dict[Key, list[float]]


@dataclass(frozen=True, kw_only=True)
class OpsSetting(DecoderSize):
    """What is measured."""

    num_ranks: int = 2
    seq_len: int = 4096
    num_slices: tuple[int, ...] = (4, 8)
    num_stages_per_rank: int = 1
    num_threads: int = 1
    dtype: str = "float32"
    rounds: int = 3
    out: str = ""


class NoMessages:
    """In place of a `Transport`: receives come at once, and sends go nowhere."""

    num_unfinished_sends = send_bytes = 0

    def __init__(self, message_BLD: Tensor) -> None:
        self._message_BLD = message_BLD

    def receive(self, *_: object) -> NoMessages:
        return self

    def wait(self, *_: object) -> Tensor:
        return self._message_BLD.clone()

    def send(self, *_: object, announce: bool) -> None: ...

    def reap(self) -> None: ...

    def finish(self) -> None: ...

    def drop(self) -> None: ...


def measure_costs(setting: OpsSetting, *, num_slices: int, num_stages_per_rank: int, link: Link) -> OpCosts:
    """A table; collective over all ranks, the same on each."""
    rank, count = dist.get_rank(), setting.num_ranks
    num_stages = count * num_stages_per_rank
    parts = {}
    for stage in range(rank, num_stages, count):
        torch.manual_seed(0)
        parts[stage] = Decoder(setting).keep(stage, num_stages).to(DTYPES[setting.dtype])
    run = _sliced(setting, num_slices, rank, parts) if num_slices > 1 else _whole(setting, rank, parts)
    samples: Samples = defaultdict(list)
    alone: Samples = defaultdict(list)
    host: list[float] = []

    def run_once(into: Samples) -> None:
        for part in parts.values():
            part.zero_grad()
        start = time.perf_counter()
        times, num_instructions = run()
        host.append((time.perf_counter() - start - sum(t for _, t in times)) / num_instructions)
        for key, t in times:
            into[key].append(t)

    run_once(defaultdict(list))
    dist.barrier()
    for _ in range(setting.rounds):  # at once, so that a rank that is early goes on to compute
        run_once(samples)
    for turn in range(count):
        dist.barrier()
        if turn == rank:
            run_once(alone)
    dist.barrier()
    mine = _medians(samples), _medians(alone), statistics.median(host)
    everyones: list[Any] = [None] * count
    dist.all_gather_object(everyones, mine)
    busy_seconds, alone_seconds = ({key: t for each in everyones for key, t in each[i].items()} for i in (0, 1))
    slice_len = setting.seq_len // num_slices
    return OpCosts(
        slice_len=slice_len,
        **_lines(busy_seconds, slice_len=slice_len, num_slices=num_slices, num_stages=num_stages),
        layers=(setting.num_layers // num_stages,) * num_stages,
        host_seconds=statistics.mean(seconds for *_, seconds in everyones),
        alone_speed=max(1.0, sum(busy_seconds.values()) / sum(alone_seconds.values())),
        link=link,
        activation_bytes=slice_len * setting.dim * DTYPES[setting.dtype].itemsize,
    )


def _lines(seconds: dict[Key, float], *, slice_len: int, num_slices: int, num_stages: int) -> dict[str, Any]:
    """Linear work and attention by stage, as fields of the table."""
    fields: dict[str, Any] = {}
    for kind, name in (("F", "forward"), ("B", "backward")):
        lines = [
            fit([((i + 0.5) * slice_len**2, seconds[kind, stage, i]) for i in range(num_slices)])
            for stage in range(num_stages)
        ]
        fields[f"linear_{name}"], fields[f"attention_{name}"] = zip(*lines, strict=True)
    return fields


def _medians(samples: Samples) -> dict[Key, float]:
    return {key: statistics.median(values) for key, values in samples.items()}


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The line y = a + b x, a and b at least 0, of least squared errors; b is 0 for one point."""
    mean_x, mean_y = (statistics.mean(values) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    slope = min(max(0.0, slope), mean_y / mean_x)
    return mean_y - slope * mean_x, slope


_Run = Callable[[], tuple[list[tuple[Key, float]], int]]
"""Runs a rank's list once: what each unit took, and how many instructions there were."""


def _sliced(setting: OpsSetting, num_slices: int, rank: int, parts: dict[int, Decoder]) -> _Run:
    """With the executor of a step."""
    program = build_program(setting.num_ranks, num_slices, len(parts), NUM_MICROBATCHES)
    options = SlimPipeOptions(record_times=True)
    tokens, labels = _tokens(setting)
    stages = {
        index: Stage(
            part,
            index,
            is_first=index == 0,
            is_last=index == program.num_stages - 1,
            loss_fn=cross_entropy_sum,
            kernel=options.kernel,
            device=torch.device("cpu"),
        )
        for index, part in parts.items()
    }
    positions = torch.arange(setting.seq_len).expand(1, -1)
    batch = Batch(
        Microbatches([(tokens,)] * NUM_MICROBATCHES, [{"positions": positions}] * NUM_MICROBATCHES, [labels] * 2),
        num_slices=num_slices,
        options=options,
    )
    transport: Any = NoMessages(_message(setting, setting.seq_len // num_slices))
    executor = Executor(
        program,
        rank=rank,
        stages=stages,
        device=torch.device("cpu"),
        transport=transport,
        options=options,
        meter=None,
    )

    def run() -> tuple[list[tuple[Key, float]], int]:
        executor.run(batch, loss_kwargs=None, keep_outputs=False)
        times = executor.record.times
        units = [t for t in times if t.instruction.op in (Op.FORWARD, Op.BACKWARD)]
        return [
            ((t.instruction.op.value, t.instruction.unit.stage, t.instruction.unit.slice), t.end - t.start - t.waited)
            for t in units
        ], len(times)

    return run


def _whole(setting: OpsSetting, rank: int, parts: dict[int, Decoder]) -> _Run:
    """Whole microbatches, in the order of 1F1B."""
    ((stage, part),) = parts.items()
    tokens, labels = _tokens(setting)
    message_BLD = _message(setting, setting.seq_len)
    positions = torch.arange(setting.seq_len).expand(1, -1)
    num_microbatches = max(NUM_MICROBATCHES, setting.num_ranks)
    order = torch_order("1F1B", num_ranks=setting.num_ranks, num_stages_per_rank=1, num_microbatches=num_microbatches)
    row = [action for action in order[rank] if action is not None and action.is_compute_op]

    def forward() -> Tensor:
        out = part(tokens if stage == 0 else message_BLD.clone().requires_grad_(), positions)
        return cross_entropy_sum(out, labels) if stage == setting.num_ranks - 1 else out

    def run() -> tuple[list[tuple[Key, float]], int]:
        live: dict[int | None, Tensor] = {}
        times: list[tuple[Key, float]] = []
        for action in row:
            kind = action.computation_type.value
            start = time.perf_counter()
            if kind == "F":
                live[action.microbatch_index] = forward()
            else:
                out = live.pop(action.microbatch_index)
                torch.autograd.backward(out, message_BLD if out.dim() else None)
                del out
            times.append(((kind, stage, 0), time.perf_counter() - start))
        return times, len(times)

    return run


def _tokens(setting: OpsSetting) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(setting.vocab, (1, setting.seq_len), generator=generator) for _ in range(2))
    return tokens, labels


def _message(setting: OpsSetting, slice_len: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, slice_len, setting.dim, dtype=DTYPES[setting.dtype], generator=generator)


def measure(setting: OpsSetting) -> dict[int, OpCosts]:
    """Runs on every rank; tables by number of slices."""
    link = rank_link()
    v = setting.num_stages_per_rank
    return {n: measure_costs(setting, num_slices=n, num_stages_per_rank=v, link=link) for n in setting.num_slices}


def rank_link() -> Link:
    """The slowest link between neighbours; collective."""
    assert dist.group.WORLD is not None
    rates = measure_link(dist.group.WORLD, device=torch.device("cpu"))
    return Link(latency=rates.latency, bandwidth=rates.bytes_per_second)


def table(tables: dict[int, OpCosts]) -> str:
    """The figures to read."""
    rows: list[tuple[str, ...]] = [
        ("slices, stage", "first F ms", "B ms", "last F ms", "B ms", "alone x", "host us", "link us", "MB/s")
    ]
    for num_slices, costs in tables.items():
        rows += _rows(num_slices, costs)
    return aligned(rows)


def _rows(num_slices: int, costs: OpCosts) -> Iterator[tuple[str, ...]]:
    for stage in range(costs.num_stages):
        first, last = Unit(0, stage, 0), Unit(0, stage, num_slices - 1)
        seconds = [of(unit) for unit in (first, last) for of in (costs.forward_seconds, costs.backward_seconds)]
        others = 1e6 * costs.host_seconds, 1e6 * costs.link.latency, costs.link.bandwidth / 1e6
        milliseconds = (f"{1e3 * x:.2f}" for x in seconds)
        yield f"{num_slices}, {stage}", *milliseconds, f"{costs.alone_speed:.2f}", *(f"{x:.0f}" for x in others)


def main(argv: list[str] | None = None) -> None:
    parser = setting_parser(
        OpsSetting,
        description="Measure what units of a decoder take on this machine, for the planner's simulator.",
        helps=HELP,
        choices={"dtype": tuple(DTYPES)},
    )
    setting, as_json = parse_setting(parser, OpsSetting, argv)
    check_layers(parser, setting.num_layers, setting.num_ranks * setting.num_stages_per_rank)
    if 1 in setting.num_slices and setting.num_stages_per_rank > 1:
        parser.error("--num-slices 1: whole microbatches are measured with --num-stages-per-rank 1")
    tables = run_ranks(measure, setting, num_ranks=setting.num_ranks, num_threads=setting.num_threads)
    if setting.out:
        folder = Path(setting.out)
        folder.mkdir(parents=True, exist_ok=True)
        for num_slices, costs in tables.items():
            (folder / f"n{num_slices}_v{setting.num_stages_per_rank}.json").write_text(costs.to_json() + "\n")
    print(json.dumps({n: asdict(costs) for n, costs in tables.items()}, indent=2) if as_json else table(tables))


if __name__ == "__main__":
    main()
