"""What `slimpipe plan` says of memory against what CPU ranks hold: activations, K,V, dK,dV and messages of real steps.

    python tools/bench_memory.py [--seq-len 1024] [--json]

Starts its own ranks (gloo on the loopback address), which run one step of each setting in float32 with the executor's
meter on, on the decoder of `bench_schedules.py`. Planned are the same parts from the model's shape and the program
alone (`slimpipe.planner.memory`). Parameters, gradients and optimizer are what they are; the meter does not count them.

How many sends are under way at once depends on how fast the peer is: messages are planned for the most there can be,
so what is measured may be less. Under torch's schedules the meter counts what autograd saves, K,V included, and no
messages.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from bench_cli import aligned, check_layers, parse_setting, setting_parser
from bench_decoder import DecoderSize
from bench_pipeline import Bench, Setting
from bench_ranks import run_ranks

from slimpipe import SlimPipeOptions
from slimpipe.planner.layout import Layout
from slimpipe.planner.memory import Numerics, peak_bytes
from slimpipe.planner.models import ModelShape
from slimpipe.program import build_program

CPU = Numerics(value_bytes=4, wide_bytes=4, norm_in_parts=True, mixed=False)
SETTINGS = (
    *((2, 1, 1), (2, 2, 2), (4, 1, 2), (4, 2, 3), (8, 1, 1), (8, 1, 4), (8, 2, 2), (16, 1, 3), (16, 2, 1), (16, 2, 4)),
    *((0, 1, 2), (0, 1, 4), (0, 2, 4)),
)
"""Slices, stages per rank, microbatches: n 2..16, v 1..2, m 1..4; n = 0 for torch's 1F1B and Interleaved1F1B."""
PARTS = ("activations", "K,V", "dK,dV", "buffers")


@dataclass(frozen=True, kw_only=True)
class MemorySetting(DecoderSize):
    """Model and sequence of all settings."""

    num_kv_heads: int = 4
    vocab: int = 512
    seq_len: int = 1024
    num_ranks: int = 2


def measure(setting: MemorySetting) -> list[list[dict[str, int]]]:
    """Runs on every rank: bytes by part of every setting and rank."""
    results = []
    for n, v, m in SETTINGS:
        sizes = asdict(setting) | {"num_microbatches": m, "num_stages_per_rank": v}
        options = SlimPipeOptions(context_exchange="off", measure_memory=True)
        name = ("SlimPipe" if n else "1F1B") if v == 1 else ("InterleavedSlimPipe" if n else "Interleaved1F1B")
        bench = Bench(name, Setting(**sizes), num_slices=n, options=options)
        bench.step()
        if not n:
            results.append([{"activations": num_bytes} for num_bytes in bench.peak_live_bytes()])
            continue
        metrics = bench.schedule.metrics()
        bench.close()
        mine = {
            "activations": metrics["peak_live_bytes"] - metrics["kv_bytes"],
            "K,V": metrics["kv_bytes"],
            "dK,dV": metrics["carry_bytes"],
            "buffers": metrics["message_bytes"],
        }
        ranks: list[Any] = [None] * setting.num_ranks
        dist.all_gather_object(ranks, mine)
        results.append(ranks)
    return results


def shape_of(size: DecoderSize) -> ModelShape:
    """What the planner knows of the decoder."""
    return ModelShape(
        name="decoder",
        num_layers=size.num_layers,
        dim=size.dim,
        ffn_dim=64 * math.ceil(size.dim * 8 / 3 / 64),
        num_heads=size.num_heads,
        num_kv_heads=size.num_kv_heads,
        vocab_size=size.vocab,
    )


def planned_parts(
    setting: MemorySetting | Setting, shape: tuple[int, int, int], *, rank: int, numerics: Numerics
) -> dict[str, float]:
    """What a rank is planned to hold, by part; ``shape`` is n, v, m, with n = 0 for torch's schedules."""
    n, v, m = shape
    layout = Layout(
        tensor=1,
        pipeline=setting.num_ranks,
        data=1,
        num_slices=n or 1,
        stages_per_rank=v,
        num_microbatches=m,
        exchange=False,
        schedule="SlimPipe" if n else ("1F1B" if v == 1 else "Interleaved1F1B"),
    )
    program = build_program(setting.num_ranks, n, v, m) if n else None
    parts = peak_bytes(
        shape_of(setting), layout, seq_len=setting.seq_len, rank=rank, numerics=numerics, program=program
    )
    # To the meter, what output layer and loss keep is like any other; so is K,V under torch's schedules.
    parts["activations"] += parts["output"]
    return {part: parts[part] for part in PARTS} if n else {"activations": parts["activations"] + parts["K,V"]}


def planned(setting: MemorySetting) -> Iterator[list[dict[str, float]]]:
    """The same, planned."""
    for shape in SETTINGS:
        yield [planned_parts(setting, shape, rank=rank, numerics=CPU) for rank in range(setting.num_ranks)]


def compare(setting: MemorySetting, measured: list[list[dict[str, int]]]) -> list[dict[str, Any]]:
    """One row for each setting and rank; errors are planned over measured, less one."""
    rows = []
    for (n, v, m), real, plan in zip(SETTINGS, measured, planned(setting), strict=True):
        for rank in range(setting.num_ranks):
            here = {part: (plan[rank].get(part, 0.0), real[rank].get(part, 0)) for part in PARTS}
            here["total"] = tuple(map(sum, zip(*here.values())))  # type: ignore[assignment]
            errors = {part: _error(*pair) for part, pair in here.items()}
            rows.append({"n": n, "v": v, "m": m, "rank": rank, "bytes": here, "errors": errors})
    return rows


def _error(plan: float, real: float) -> float:
    if real:
        return plan / real - 1
    return 0.0 if not plan else math.inf


def table(rows: list[dict[str, Any]]) -> str:
    """The rows to read, and the worst of each part."""
    names = (*PARTS, "total")
    lines = [("n,v,m", "rank", *(f"{name}: MiB planned / measured" for name in names))]
    for row in rows:
        cells = (f"{plan / 2**20:.2f} / {real / 2**20:.2f}" for plan, real in row["bytes"].values())
        lines.append((f"{row['n']},{row['v']},{row['m']}", str(row["rank"]), *cells))
    worst = {name: max(abs(row["errors"][name]) for row in rows) for name in names}
    median = {name: statistics.median(abs(row["errors"][name]) for row in rows) for name in names}
    lines += [("worst", "", *(f"{100 * worst[name]:.2f} %" for name in names))]
    lines += [("median", "", *(f"{100 * median[name]:.2f} %" for name in names))]
    return aligned(lines)


def main(argv: list[str] | None = None) -> None:
    parser = setting_parser(
        MemorySetting, description="Compare planned memory with what CPU ranks hold.", helps={}, choices={}
    )
    setting, as_json = parse_setting(parser, MemorySetting, argv)
    check_layers(parser, setting.num_layers, 2 * setting.num_ranks)
    rows = compare(setting, run_ranks(measure, setting, num_ranks=setting.num_ranks))
    print(json.dumps(rows, indent=2) if as_json else table(rows))


if __name__ == "__main__":
    main()
