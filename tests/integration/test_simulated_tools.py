"""Op times are measured, and simulated steps compared with real ones, on tiny sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slimpipe.planner.costs import OpCosts
from slimpipe.planner.simulate import simulate
from slimpipe.program import build_program

TINY = ["--num-layers=4", "--dim=32", "--num-heads=4", "--num-kv-heads=2", "--vocab=64", "--seq-len=128", "--rounds=1"]


def test_op_times_make_a_table_that_the_simulator_reads(bench: Callable[..., dict], tmp_path: Path) -> None:
    tables = bench("measure_ops", *TINY, "--num-stages-per-rank=2", "--num-slices", "2", f"--out={tmp_path}")
    assert list(tables) == ["2"]
    costs = OpCosts.from_json((tmp_path / "n2_v2.json").read_text())
    assert (costs.slice_len, costs.num_stages, costs.layers) == (64, 4, (1, 1, 1, 1))
    assert costs.activation_bytes == 64 * 32 * 4
    assert costs.link.latency > 0 and 0 < costs.link.bandwidth < 1e12 and costs.host_seconds > 0
    timeline = simulate(build_program(2, 2, 2, 1, slice_len=64), costs)
    assert timeline.seconds > sum(costs.linear_forward[::2])


def test_steps_are_simulated_and_measured(bench: Callable[..., dict]) -> None:
    cases = ["1F1B m=2", "SlimPipe n=4 v=1 m=2", "SlimPipe n=4 v=2 m=1"]
    report = bench("bench_simulated", *TINY, "--cases", *cases)
    assert list(report["cases"]) == cases
    for row in report["cases"].values():
        assert row["error"] == pytest.approx(row["simulated_seconds"] / row["measured_seconds"] - 1)
        assert 0 < row["simulated_bubble"] < 1 <= row["slowest_over_fastest"]
    errors = [abs(row["error"]) for row in report["cases"].values()]
    assert report["median_error"] == sorted(errors)[1] and report["largest_error"] == max(errors)
