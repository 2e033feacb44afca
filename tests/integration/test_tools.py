"""The benchmarks run, agree with themselves, and print the figures that the README quotes."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
TINY = ["--num-layers=4", "--dim=32", "--num-heads=4", "--num-kv-heads=2", "--vocab=64", "--seq-len=128", "--rounds=1"]


def run_tool(name: str, *args: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, f"tools/{name}", *args],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )


def figures(name: str, *args: str) -> dict:
    result = run_tool(name, *args, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def bench_schedules(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("bench_schedules")


@pytest.fixture(scope="module")
def schedules() -> dict:
    return figures("bench_schedules.py", *TINY, "--num-slices", "4", "8")


def test_all_schedules_agree_and_are_timed(schedules: dict) -> None:
    rows = schedules["schedules"]
    assert schedules["baseline"] == "1F1B"
    assert set(rows) == {
        *("1F1B", "GPipe", "Interleaved1F1B", "SlimPipe n=4", "SlimPipe n=8"),
        *("InterleavedSlimPipe n=4", "InterleavedSlimPipe n=8"),
    }
    for row in rows.values():
        assert row["loss"] == pytest.approx(rows["1F1B"]["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(rows["1F1B"]["grad_norm"], rel=1e-5)
        assert row["step_seconds"] > 0 and row["speed_up"] > 0 and 0 < row["bubble"] < 1
        assert 0 < row["compute_seconds"] < 2 * row["step_seconds"] and row["compute_cpu_seconds"] > 0
        assert row["host_us_per_call"] > 0
    assert rows["1F1B"]["speed_up"] == 1


@pytest.mark.parametrize("num_slices", [4, 8])
def test_live_bytes_follow_the_formula(schedules: dict, num_slices: int) -> None:
    """Of two ranks ours keeps n + 2 and n slices of a microbatch, 1F1B two microbatches and one, GPipe two on both."""
    live = {title: row["peak_live_bytes"] for title, row in schedules["schedules"].items()}
    ours, theirs = live[f"SlimPipe n={num_slices}"], live["1F1B"]
    assert ours[0] <= 1.03 * theirs[0] / 2 * (num_slices + 2) / num_slices
    assert ours[1] <= 1.03 * theirs[1]
    assert live["GPipe"][0] == theirs[0] and live["GPipe"][1] > 1.9 * theirs[1]


def test_table(schedules: dict, bench_schedules: ModuleType) -> None:
    head, _, *rows = bench_schedules.table(schedules).splitlines()
    assert head.startswith("schedule ")
    assert [row.split("  ")[0] for row in rows] == list(schedules["schedules"])
    assert len({len(line) for line in (head, *rows)}) == 1


def test_disagreement_is_an_error(bench_schedules: ModuleType) -> None:
    disagreement, good = bench_schedules.disagreement, {"loss": 2.0, "grad_norm": 3.0}
    assert disagreement({"a": good, "b": {"loss": 2.000001, "grad_norm": 3.0}}) is None
    assert "loss" in disagreement({"a": good, "b": {"loss": 2.001, "grad_norm": 3.0}})
    assert "grad_norm" in disagreement({"a": good, "b": {"loss": 2.0, "grad_norm": float("nan")}})
    assert "loss" in disagreement({"a": {"loss": float("nan"), "grad_norm": 3.0}, "b": good})


def test_slicing() -> None:
    report = figures("bench_slicing.py", "--seq-len=256", "--num-kv-heads=2", "--rounds=2", "--num-slices", "2", "8")
    assert report["unsliced_seconds"] > 0
    assert [slicing["num_slices"] for slicing in report["slicings"]] == [2, 8]
    for slicing in report["slicings"]:
        assert slicing["seconds"] > 0 and slicing["ratio"] > 0 and slicing["cpu_ratio"] > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["bench_schedules.py", "--num-layers", "6"], "--num-layers 6 does not divide into 4 stages; nearest: 8"),
        (["bench_slicing.py", "--seq-len", "100"], "--seq-len 100 does not divide into --num-slices 8"),
    ],
)
def test_wrong_arguments(args: list[str], message: str) -> None:
    result = run_tool(*args)
    assert result.returncode == 2
    assert message in result.stderr
