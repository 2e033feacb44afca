"""Pipeline schedules side by side: step time, bubble, memory and host time, on one machine's CPU.

    python tools/bench_schedules.py [--num-slices 8 16] [--schedules 1F1B SlimPipe] [--vocab-parallel none output]
        [--rounds 7] [--json]

Starts its own ranks (gloo on the loopback address). Every schedule trains the same model, from the same weights, on the
same tokens, over the same process group. Figures are printed only if all agree on loss and gradient norm.

Under ``--vocab-parallel output`` or ``both`` all ranks share the output layer, or that and the embedding.

- *Step time*: from a barrier to the end of the slowest rank's step, which starts without gradients. One step of each
  schedule per round, in alternating order. The speed-up over the first is the median of the rounds' own ratios.
- *Bubble*: 1 - (compute time, all ranks) / (p x step time). Compute time is wall-clock time inside the forward of a
  stage's module, the loss function and `torch.autograd.backward`, which torch's schedules and ours both go through.
- *CPU time*: of the same calls, all ranks. Where it is much less than the compute time, others use the machine, and
  idle ranks make way for them: speed-ups are then too low.
- *Live bytes*: most bytes that a rank keeps for backward, read after each of these calls, in a step of its own that is
  not timed. The same meter counts what autograd saves under all schedules; ours adds K,V. Not counted: stage outputs
  and receive buffers that torch's schedules keep besides.
- *Host time*: CPU time of a rank's main thread outside these calls, per call of a forward or backward. A waiting thread
  takes none. Measured on a model of one tiny layer per stage, with units alike for all (torch's schedules get a
  microbatch for every slice of ours), so that copying messages counts next to nothing.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist
from bench_cli import aligned, check_layers, parse_setting, setting_parser
from bench_pipeline import DTYPES, SCHEDULES, Bench, Setting, StepTime, disagreement, title
from bench_ranks import run_ranks

from slimpipe import SlimPipeOptions
from slimpipe.options import VOCAB_PARALLEL_NAMES

HELP = {
    "num_stages_per_rank": "of the interleaved schedules",
    "num_slices": "of our schedules; several are compared",
    "vocab_parallel": "what all ranks share of the vocabulary under our schedules; several are compared",
    "num_threads": "per rank",
    "schedules": "the first is the baseline of speed-ups",
    "rounds": "timed steps of each schedule",
}


def make_benches(setting: Setting, **options: Any) -> list[Bench]:
    return [
        Bench(
            name,
            setting,
            num_slices=num_slices,
            vocab_parallel=vocab_parallel,
            options=SlimPipeOptions(context_exchange="off", **options),
        )
        for name in setting.schedules
        for num_slices in (setting.num_slices if name.endswith("SlimPipe") else (1,))
        for vocab_parallel in (setting.vocab_parallel if name.endswith("SlimPipe") else ("none",))
    ]


def measure(setting: Setting) -> dict[str, Any]:
    """Runs on every rank; all return the same figures, or {"error": what disagrees}."""
    benches = make_benches(setting)
    figures: dict[str, dict[str, Any]] = {}
    for bench in benches:
        loss, grad_norm = bench.loss_and_grad_norm()  # warms up, too
        figures[bench.title] = {"loss": loss, "grad_norm": grad_norm}
    error = disagreement(figures)
    if error is not None:
        return {"error": error}
    steps: dict[str, list[StepTime]] = {bench.title: [] for bench in benches}
    for round_ in range(setting.rounds):
        if dist.get_rank() == 0:
            print(f"round {round_ + 1} of {setting.rounds}", file=sys.stderr, flush=True)
        for bench in benches[:: -1 if round_ % 2 else 1]:
            steps[bench.title].append(bench.timed_step())
    baseline = steps[benches[0].title]
    for bench in benches:
        mine = steps[bench.title]
        figures[bench.title] |= {
            "step_seconds": statistics.median(t.step for t in mine),
            "speed_up": statistics.median(base.step / t.step for base, t in zip(baseline, mine)),
            "bubble": statistics.median(1 - t.compute / setting.num_ranks / t.step for t in mine),
            "compute_seconds": statistics.median(t.compute for t in mine),
            "compute_cpu_seconds": statistics.median(t.compute_cpu for t in mine),
        }
        bench.close()
    for bench in make_benches(setting, measure_memory=True):
        bench.step()
        figures[bench.title]["peak_live_bytes"] = bench.peak_live_bytes()
        bench.close()
    for name, seconds in host_seconds(setting).items():
        figures[name]["host_us_per_call"] = 1e6 * seconds
    return {"setting": asdict(setting), "baseline": benches[0].title, "schedules": figures}


def host_seconds(setting: Setting, *, slice_len: int = 8, steps: int = 15) -> dict[str, float]:
    """Host time per call of each schedule, median of interleaved steps, on a tiny model."""
    num_slices = max(setting.num_slices)
    benches: list[Bench] = []
    for name in setting.schedules:
        v = setting.num_stages_per_rank if name.startswith("Interleaved") else 1
        units = 1 if name.endswith("SlimPipe") else num_slices  # torch's schedules: one slice per microbatch
        tiny = replace(
            setting,
            schedules=(name,),
            num_slices=(num_slices,),
            num_layers=v * setting.num_ranks,
            dim=16,
            num_heads=2,
            num_kv_heads=2,
            vocab=16,
            seq_len=slice_len * num_slices // units,
            num_microbatches=setting.num_microbatches * units,
        )
        benches += make_benches(tiny)
    for bench in benches:
        bench.step()
    rounds = [[bench.host_seconds_per_call() for bench in benches] for _ in range(steps)]
    for bench in benches:
        bench.close()
    return {
        title(bench.name, num_slices=n, vocab_parallel=bench.vocab_parallel): statistics.median(column)
        for bench, column in zip(benches, zip(*rounds))
        for n in setting.num_slices
    }


def table(report: dict[str, Any]) -> str:
    """The figures to read."""
    rows = [("schedule", "step s", "speed-up", "bubble %", "CPU s", "host us/call", "peak live MiB by rank")]
    for name, figure in report["schedules"].items():
        live = " ".join(f"{num_bytes / 2**20:.1f}" for num_bytes in figure["peak_live_bytes"])
        numbers = [
            figure[name] for name in ("step_seconds", "speed_up", "bubble", "compute_cpu_seconds", "host_us_per_call")
        ]
        numbers[2] *= 100
        rows.append((name, *map("{:.{}f}".format, numbers, (3, 3, 1, 2, 0)), live))
    return aligned(rows)


def parse(argv: list[str] | None) -> tuple[Setting, bool]:
    parser = setting_parser(
        Setting,
        description="Compare pipeline schedules on the CPU: step time, bubble, memory and host time.",
        helps=HELP,
        choices={"schedules": SCHEDULES, "dtype": tuple(DTYPES), "vocab_parallel": VOCAB_PARALLEL_NAMES},
    )
    setting, as_json = parse_setting(parser, Setting, argv)
    check_layers(parser, setting.num_layers, setting.num_ranks * setting.num_stages_per_rank)
    return setting, as_json


def main(argv: list[str] | None = None) -> None:
    setting, as_json = parse(argv)
    report = run_ranks(measure, setting, num_ranks=setting.num_ranks, num_threads=setting.num_threads)
    if "error" in report:
        sys.exit(report["error"])
    print(json.dumps(report, indent=2) if as_json else table(report))


if __name__ == "__main__":
    main()
