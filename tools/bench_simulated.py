"""Is the planner right about time? Step times that it simulates against those of real ranks, on this machine's CPU.

    python tools/bench_simulated.py [--rounds 3] [--seq-len 2048] [--cases "1F1B m=2"] [--json]

First measures what units take (`measure_ops.py`), each rank by itself and without messages; simulates from these tables
alone; then runs every setting and compares. *Measured* is the median over the rounds of the time from a barrier to the
end of the slowest rank's step. Run it on an idle machine with a core per rank: figures of op times and of steps are of
different moments.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from bench_cli import aligned, check_layers, parse_setting, setting_parser
from bench_pipeline import Bench, Setting
from bench_ranks import run_ranks
from measure_ops import OpsSetting, measure_costs, rank_link

from slimpipe import SlimPipeOptions, build_program
from slimpipe.planner.costs import OpCosts
from slimpipe.planner.simulate import simulate
from slimpipe.planner.simulate_torch import simulate_torch, torch_order
from slimpipe.planner.timeline import Timeline


class Case(NamedTuple):
    """One setting."""

    schedule: str
    num_slices: int
    num_stages_per_rank: int
    num_microbatches: int

    def __str__(self) -> str:
        n, v, m = self[1:]
        return f"1F1B m={m}" if self.schedule == "1F1B" else f"SlimPipe n={n} v={v} m={m}"


CASES = (
    Case("1F1B", 1, 1, 2),
    Case("1F1B", 1, 1, 4),
    Case("SlimPipe", 2, 1, 1),
    Case("SlimPipe", 4, 1, 2),
    Case("SlimPipe", 8, 1, 1),
    Case("SlimPipe", 8, 1, 4),
    Case("SlimPipe", 16, 1, 2),
    Case("InterleavedSlimPipe", 4, 2, 1),
    Case("InterleavedSlimPipe", 8, 2, 3),
    Case("InterleavedSlimPipe", 16, 2, 2),
)


@dataclass(frozen=True, kw_only=True)
class SimulatedSetting(OpsSetting):
    """What is compared."""

    seq_len: int = 2048
    rounds: int = 3
    cases: tuple[str, ...] = tuple(map(str, CASES))

    def chosen(self) -> list[Case]:
        """The cases that ``cases`` names."""
        return [case for case in CASES if str(case) in self.cases]


def measure(setting: SimulatedSetting) -> dict[str, Any]:
    """Runs on every rank; the tables, then the seconds of every step."""
    link = rank_link()
    tables: dict[tuple[int, int], OpCosts] = {}
    for case in setting.chosen():
        key = case.num_slices, case.num_stages_per_rank
        if key not in tables:
            _say(f"op times, n = {key[0]}, v = {key[1]}")
            tables[key] = measure_costs(setting, num_slices=key[0], num_stages_per_rank=key[1], link=link)
    steps = []
    for case in setting.chosen():
        _say(str(case))
        steps.append(_steps(setting, case))
    return {"tables": tables, "steps": steps}


def _steps(setting: SimulatedSetting, case: Case) -> list[float]:
    """Seconds of some steps, after one that does not count."""
    shared = {name: getattr(setting, name) for name in _SHARED}
    bench = Bench(
        case.schedule,
        Setting(
            num_microbatches=case.num_microbatches,
            num_stages_per_rank=case.num_stages_per_rank,
            **shared,
        ),
        num_slices=case.num_slices,
        options=SlimPipeOptions(context_exchange="off"),
    )
    bench.step()
    steps = [bench.timed_step().step for _ in range(setting.rounds)]
    bench.close()
    return steps


_SHARED = (
    *("num_layers", "dim", "num_heads", "num_kv_heads", "vocab"),
    *("num_ranks", "seq_len", "num_threads", "dtype"),
)


def simulated(case: Case, costs: OpCosts, num_ranks: int) -> Timeline:
    """One step of a case."""
    if case.schedule == "1F1B":
        order = torch_order("1F1B", num_ranks=num_ranks, num_stages_per_rank=1, num_microbatches=case.num_microbatches)
        return simulate_torch(order, costs, title=str(case))
    program = build_program(num_ranks, *case[1:], slice_len=costs.slice_len)
    return simulate(program, costs, title=str(case))


def compare(setting: SimulatedSetting) -> dict[str, Any]:
    """Measure, simulate, compare."""
    measured = run_ranks(measure, setting, num_ranks=setting.num_ranks, num_threads=setting.num_threads)
    rows = {}
    for case, steps in zip(setting.chosen(), measured["steps"], strict=True):
        timeline = simulated(case, measured["tables"][case.num_slices, case.num_stages_per_rank], setting.num_ranks)
        seconds = statistics.median(steps)
        rows[str(case)] = {
            "measured_seconds": seconds,
            "slowest_over_fastest": max(steps) / min(steps),
            "simulated_seconds": timeline.seconds,
            "error": timeline.seconds / seconds - 1,
            "simulated_bubble": timeline.idle_share,
        }
    errors = [abs(row["error"]) for row in rows.values()]
    return {
        "setting": asdict(setting),
        "cases": rows,
        "median_error": statistics.median(errors),
        "largest_error": max(errors),
    }


def table(report: dict[str, Any]) -> str:
    """The figures to read."""
    rows = [("setting", "measured s", "max/min", "simulated s", "error %", "bubble %")]
    for name, row in report["cases"].items():
        numbers = [row["measured_seconds"], row["slowest_over_fastest"], row["simulated_seconds"]]
        numbers += [100 * row["error"], 100 * row["simulated_bubble"]]
        rows.append((name, *map("{:.{}f}".format, numbers, (3, 2, 3, 1, 1))))
    median, largest = 100 * report["median_error"], 100 * report["largest_error"]
    return f"{aligned(rows)}\nmedian error {median:.1f} %, largest {largest:.1f} %"


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = setting_parser(
        SimulatedSetting,
        description="Compare simulated step times with measured ones, on this machine's CPU.",
        helps={"rounds": "timed runs of everything"},
        choices={"dtype": ("float32", "float64"), "cases": tuple(map(str, CASES))},
    )
    setting, as_json = parse_setting(parser, SimulatedSetting, argv)
    check_layers(parser, setting.num_layers, setting.num_ranks * max(case.num_stages_per_rank for case in CASES))
    report = compare(setting)
    print(json.dumps(report, indent=2) if as_json else table(report))


if __name__ == "__main__":
    main()
