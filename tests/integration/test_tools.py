"""The benchmarks run, agree with themselves, and print the figures that the README quotes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
TINY = ["--num-layers=4", "--dim=32", "--num-heads=4", "--num-kv-heads=2", "--vocab=64", "--seq-len=128", "--rounds=1"]
TINY_EXCHANGE = [
    *(*TINY[:5], "--seq-lens", "128", "--num-slices", "2", "4", "--exchange-granularity=8"),
    *("--rounds=2", "--seconds=0"),
]


def figures(name: str, *args: str) -> dict:
    """What a benchmark prints that is started as users start it."""
    result = subprocess.run(
        [sys.executable, f"tools/{name}", *args, "--json"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def bench_schedules(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool("bench_schedules")


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


def test_exchange(bench: Callable[..., dict]) -> None:
    report = bench("bench_exchange", *TINY_EXCHANGE)
    assert [(row["seq_len"], row["num_slices"]) for row in report["rows"]] == [(128, 2), (128, 4)]
    for row in report["rows"]:
        off = row["exchange"]["off"]
        assert off["speed_up"] == 1 and off["sent_bytes"] == 0
        for figure in row["exchange"].values():
            assert figure["loss"] == pytest.approx(off["loss"], rel=1e-5)
            assert figure["grad_norm"] == pytest.approx(off["grad_norm"], rel=1e-5)
            assert figure["step_seconds"] > 0 and figure["speed_up"] > 0
        on = row["exchange"]["on"]
        assert on["sent_bytes"] > 0 and on["waited_seconds"] > 0
        assert 1 <= on["load_max_over_mean"] < off["load_max_over_mean"]


def test_logits_of_a_shared_vocabulary_are_not_kept(bench: Callable[..., dict]) -> None:
    sizes = ["--num-ranks=2", "--num-layers=2", "--dim=32", "--num-heads=4", "--num-kv-heads=2", "--vocab=1000"]
    found = bench("bench_vocabulary", *sizes, "--seq-len=128", "--num-slices=2")["schedules"]
    alone, *shared = found.values()
    assert alone["peak_bytes_between_units"] >= 128 * 1000 * 4  # log-probabilities of every token
    assert len(shared) == 2
    for figure in shared:
        assert 64 * 500 * 4 <= figure["peak_bytes"] <= figure["bound"]
        assert figure["peak_bytes_between_units"] == 0


def test_what_the_exchange_plans(tool: Callable[[str], ModuleType], capsys: pytest.CaptureFixture) -> None:
    tool("print_exchange").main(["--shapes", "4,8,1,1", "8,32,1,2", "--json"])
    small, large = json.loads(capsys.readouterr().out)
    assert (small["shape"], large["shape"]) == ([4, 8, 1, 1], [8, 32, 1, 2])
    for figure in (small, large):
        assert figure["load_on"] <= 1.01 < figure["load_off"]
        assert 1 <= figure["time_on"] < figure["time_off"]
    assert 0 < large["kv_share"] <= 0.35
    assert 0 < large["held_slices"] <= 16


def test_emulated(bench: Callable[..., dict]) -> None:
    args = "--num-ranks=2 --num-slices=2 --num-layers=2 --num-microbatches=1 --unit-ms=10 --rounds=1 --slice-len=16"
    report = bench("bench_emulated", *args.split())
    off, on = report["exchange"]["off"], report["exchange"]["on"]
    # Four units of 10 ms forward; backward takes twice (linear) to 2.5 times (attention) as long.
    assert 3.0 * 0.04 < off["compute_seconds"] < 3.5 * 0.04
    assert on["compute_seconds"] == pytest.approx(off["compute_seconds"], rel=1e-6), "moved, not more"
    for figure in (off, on):
        assert figure["bubble"] == pytest.approx(1 - figure["compute_seconds"] / (2 * figure["step_seconds"]))
        assert 0 < figure["bubble"] < 1


def test_emulated_costs_follow_the_model(tool: Callable[[str], ModuleType]) -> None:
    bench = tool("bench_emulated")
    setting = bench.Setting(num_slices=8, unit_ms=60.0, num_stages_per_rank=5)
    costs = bench.Costs.of(setting)
    attention = costs.attention_pair * setting.slice_len**2 * 8 / 2
    assert costs.linear + attention == pytest.approx(0.06)
    # Per layer of 13B: 4 h S / 2 over 2 (4 h^2 + 3 h ffn) FLOP per token.
    assert attention / costs.linear == pytest.approx(262144 / (4 * 5120 + 3 * 13824))


def test_emulated_sleeps_do_not_add_up_their_lateness(
    tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, now = tool("bench_emulated"), 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds + 0.001

    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: now, sleep=sleep))
    clock = bench.SleepingClock()
    clock.is_on = True
    for _ in range(10):
        clock.compute(0.005)
    assert clock.seconds == pytest.approx(0.05)
    assert now == pytest.approx(0.051)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("bench_schedules", ["--num-layers", "6"], "--num-layers 6 does not divide into 4 stages; nearest: 8"),
        ("bench_emulated", ["--num-layers", "12"], "--num-layers 12 does not divide into 8 stages; nearest: 16"),
        ("bench_exchange", ["--seq-lens", "510"], "--seq-lens 510 does not divide into 4 slices; nearest: 512"),
        ("print_exchange", ["--shapes", "8,4,1,1"], "num_slices = 4: it must be at least num_ranks = 8"),
        ("print_exchange", ["--shapes", "8,4"], "'8,4': it must be p,n,v,m, for example 8,32,1,2"),
        ("bench_slicing", ["--seq-len", "100"], "--seq-len 100 does not divide into --num-slices 8"),
        ("bench_simulated", ["--num-layers=6"], "--num-layers 6 does not divide into 4 stages; nearest: 8"),
        ("bench_simulated", ["--cases", "1F1B m=1"], "invalid choice: '1F1B m=1'"),
        ("measure_ops", ["--num-slices", "1", "--num-stages-per-rank=2"], "--num-slices 1: whole microbatches are"),
    ],
)
def test_wrong_arguments(
    tool: Callable[[str], ModuleType], capsys: pytest.CaptureFixture, name: str, args: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        tool(name).main(args)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
