"""Context exchange on, chosen by the cost model, and off: step time on one machine's CPU, over sequence lengths.

    python tools/bench_exchange.py [--seq-lens 512 4096 16384] [--num-slices 4 8] [--rounds 5] [--json]

Starts its own ranks (gloo on the loopback address), which train one decoder from the same weights on the same tokens.
Figures are printed only if all agree on loss and gradient norm, read in a step that exchanges.

- *Step time*: from a barrier to the end of the slowest rank's step. One step of each per round, in alternating order;
  short steps get more rounds, for ``--seconds`` in all. The speed-up over the first of ``--exchange`` is the median of
  the rounds' own ratios.
- *Sent*: bytes that all ranks send for the exchange in a step.
- *Waited*: seconds that a rank waited for messages of the exchange in a step, mean over ranks.
- *Load*: attention time of the step over that of perfectly level loads, in lock-step ticks (`load_max_over_mean`).
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch.distributed as dist
from bench_cli import aligned, check_layers, parse_setting, setting_parser
from bench_decoder import DecoderSize
from bench_pipeline import DTYPES, Bench, Setting, StepTime, disagreement
from bench_ranks import over_ranks, run_ranks

from slimpipe import SlimPipeOptions
from slimpipe.options import EXCHANGE_NAMES


@dataclass(frozen=True, kw_only=True)
class ExchangeSetting(DecoderSize):
    """What is benchmarked."""

    vocab: int = 1024
    num_ranks: int = 2
    seq_lens: tuple[int, ...] = (512, 2048, 4096, 16384)
    num_slices: tuple[int, ...] = (4, 8)
    num_microbatches: int = 1
    exchange: tuple[str, ...] = ("off", "on", "auto")
    exchange_granularity: int = 128
    dtype: str = "float32"
    rounds: int = 5
    seconds: float = 20.0

    def with_length(self, seq_len: int) -> Setting:
        shared = {field.name for field in fields(self)} & {field.name for field in fields(Setting)} - {"num_slices"}
        return Setting(**{name: getattr(self, name) for name in shared}, seq_len=seq_len)


HELPS = {
    "num_slices": "slices per microbatch; several are compared",
    "exchange": "values of SlimPipeOptions.context_exchange; the first is the baseline of speed-ups",
    "rounds": "least number of timed steps of each",
    "seconds": "time for the rounds of one sequence length and number of slices, if they take less",
}


def measure(setting: ExchangeSetting) -> dict[str, Any]:
    """Runs on every rank; all return the same figures, or {"error": what disagrees}."""
    rows = []
    for seq_len in setting.seq_lens:
        for num_slices in setting.num_slices:
            figures = measure_one(setting, seq_len, num_slices)
            if "error" in figures:
                return figures
            rows.append({"seq_len": seq_len, "num_slices": num_slices, "exchange": figures})
    return {"setting": asdict(setting), "baseline": setting.exchange[0], "rows": rows}


def measure_one(setting: ExchangeSetting, seq_len: int, num_slices: int) -> dict[str, Any]:
    """One sequence length and number of slices."""
    benches = {
        exchange: Bench(
            "SlimPipe",
            setting.with_length(seq_len),
            num_slices=num_slices,
            options=SlimPipeOptions(context_exchange=exchange, exchange_granularity=setting.exchange_granularity),
        )
        for exchange in setting.exchange
    }
    figures: dict[str, dict[str, Any]] = {}
    for exchange, bench in benches.items():
        bench.step()  # learns the attention layers; the exchange begins with the next step
        loss, grad_norm = bench.loss_and_grad_norm()
        figures[exchange] = {"loss": loss, "grad_norm": grad_norm} | exchange_metrics(bench)
    error = disagreement(figures)
    if error is not None:
        return {"error": f"seq_len {seq_len}, num_slices {num_slices}: {error}"}
    steps: dict[str, list[StepTime]] = {exchange: [] for exchange in benches}
    num_rounds, round_ = setting.rounds, 0
    while round_ < num_rounds:
        for exchange in setting.exchange[:: -1 if round_ % 2 else 1]:
            steps[exchange].append(benches[exchange].timed_step())
        if round_ == 0:
            num_rounds = max(num_rounds, math.ceil(setting.seconds / sum(times[0].step for times in steps.values())))
            if dist.get_rank() == 0:
                print(f"S={seq_len} n={num_slices}: {num_rounds} rounds", file=sys.stderr, flush=True)
        round_ += 1
    baseline = steps[setting.exchange[0]]
    for exchange, bench in benches.items():
        mine = steps[exchange]
        figures[exchange] |= {
            "step_seconds": statistics.median(time.step for time in mine),
            "speed_up": statistics.median(base.step / time.step for base, time in zip(baseline, mine)),
        }
        bench.close()
    return figures


def exchange_metrics(bench: Bench) -> dict[str, float]:
    """Of the last step, over all ranks."""
    metrics = bench.schedule.metrics()
    total_bytes, total_wait = over_ranks(dist.ReduceOp.SUM, metrics["exchange_bytes"], metrics["exchange_wait_seconds"])
    return {
        "sent_bytes": total_bytes,
        "waited_seconds": total_wait / dist.get_world_size(),
        "load_max_over_mean": metrics["attention_load_max_over_mean"],
    }


def table(report: dict[str, Any]) -> str:
    """The figures to read."""
    lines: list[tuple[str, ...]] = [("", "step s", "speed-up", "sent MiB", "waited s", "load max/mean")]
    for row in report["rows"]:
        for exchange, figure in row["exchange"].items():
            numbers = (
                *(figure["step_seconds"], figure["speed_up"], figure["sent_bytes"] / 2**20),
                *(figure["waited_seconds"], figure["load_max_over_mean"]),
            )
            title = f"S={row['seq_len']} n={row['num_slices']} {exchange}"
            lines.append((title, *map("{:.{}f}".format, numbers, (3, 3, 1, 3, 3))))
    return aligned(lines)


def parse(argv: list[str] | None) -> tuple[ExchangeSetting, bool]:
    parser = setting_parser(
        ExchangeSetting,
        description="Time steps with and without context exchange on the CPU.",
        helps=HELPS,
        choices={"exchange": EXCHANGE_NAMES, "dtype": tuple(DTYPES)},
    )
    setting, as_json = parse_setting(parser, ExchangeSetting, argv)
    check_layers(parser, setting.num_layers, setting.num_ranks)
    for seq_len in setting.seq_lens:
        for num_slices in setting.num_slices:
            if seq_len % num_slices:
                nearest = max(1, round(seq_len / num_slices)) * num_slices
                parser.error(f"--seq-lens {seq_len} does not divide into {num_slices} slices; nearest: {nearest}")
    return setting, as_json


def main(argv: list[str] | None = None) -> None:
    setting, as_json = parse(argv)
    report = run_ranks(measure, setting, num_ranks=setting.num_ranks)
    if "error" in report:
        sys.exit(report["error"])
    print(json.dumps(report, indent=2) if as_json else table(report))


if __name__ == "__main__":
    main()
