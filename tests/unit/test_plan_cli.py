"""`slimpipe plan` at the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from slimpipe import cli

EIGHT_B = ["--model", "llama3-8b", "--seq-len", "131072", "--gpus", "64"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["plan", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = run(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def test_the_best_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "--model", "llama3-70b", "--seq-len", "524288", "--gpus", "256", "--gpu-memory", "80GiB")
    assert len(found["layouts"]) == 5
    for figures in found["layouts"]:
        layout = figures["layout"]
        assert layout["tensor"] * layout["pipeline"] * layout["data"] == 256
        assert sum(figures["bytes"].values()) == pytest.approx(figures["total_bytes"])
        assert figures["fits"] and figures["total_bytes"] <= found["limit"]
        assert 0 < figures["mfu_causal_attention"] < figures["mfu_full_attention"]
        assert 0 <= figures["bubble"] < 1 and figures["p2p_bytes"] > 0
    assert found["refused"] and all(refused["breaks"] for refused in found["refused"])
    assert found["unsupported"] == ["context parallelism (c > 1)"]


def test_figures_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *EIGHT_B, "--top", "2", "--gpu-memory", "40GiB", "--headroom", "2")
    assert code == 0
    for word in ("recompute", "K,V", "dK,dV", "MFU causal", "does not fit", "limit 38.0", "nearest that fits", "c > 1"):
        assert word in out
    assert max(map(len, out.splitlines())) < 260


def test_the_reference_s_row(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ["--tensor", "8", "--pipeline", "8", "--num-slices", "16", "--stages-per-rank", "5"]
    fixed += ["--recompute", "none", "--exchange", "off"]
    found = report(
        capsys, "--model", "llama-13b", "--seq-len", "262144", "--gpus", "128", "--constants", "reference", *fixed
    )
    (figures,) = found["layouts"]
    assert figures["total_bytes"] / 2**30 == pytest.approx(37.1, rel=0.05)
    assert 100 * figures["bubble_equal_units"] == pytest.approx(1.08, abs=0.1)
    assert figures["layout"]["num_microbatches"] == 8


def test_longest(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "llama-7b", "--gpus", "64", "--tensor", "8", "--pipeline", "8", "--recompute", "none"]
    arguments += ["--constants", "reference", "--sequences", "8", "--longest"]
    assert report(capsys, *arguments, "--schedule", "1F1B")["longest_seq_len"] == 124 * 1024
    fixed = ["--num-slices", "64", "--stages-per-rank", "4"]
    assert "614400 tokens (600K)" in run(capsys, *arguments, *fixed)[1]


def test_a_model_in_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--num-layers", "32", "--dim", "4096", "--ffn-dim", "14336", "--num-heads", "32", "--num-kv-heads", "8"]
    named, numbers = report(capsys, *EIGHT_B), report(capsys, *sizes, *EIGHT_B[2:])
    assert numbers["layouts"] == named["layouts"]
    assert numbers["model"]["parameters"] == named["model"]["parameters"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "lama3-70b", "--seq-len", "8192", "--gpus", "8"], ['"lama3-70b"', 'nearest: "llama3-70b"']),
        (["--model", "llama3-405b", "--seq-len", "4194304", "--gpus", "8"], ["no layout fits", "GiB are the most"]),
        (["--model", "llama3-8b", "--seq-len", "2097152", "--gpus", "8"], ["nearest that fits: 262144 tokens"]),
        (["--model", "llama3-8b", "--gpus", "8"], ["--seq-len"]),
        (["--seq-len", "8192", "--gpus", "8"], ["--model", "--toml"]),
        (["--num-layers", "4", "--seq-len", "8192", "--gpus", "8"], ["--dim"]),
        ([*EIGHT_B, "--headroom", "90"], ["--headroom", "80 GiB"]),
        ([*EIGHT_B, "--gpu", "h101"], ['nearest: "h100"']),
        ([*EIGHT_B, "--context", "2"], ["context parallelism", "nearest: 1"]),
        ([*EIGHT_B, "--tensor", "3"], ["no t times p", "nearest that fits: t"]),
        (
            [*EIGHT_B, "--recompute", "none", "--gpu-memory", "40GiB"],
            ["activations", "nearest that fits", "recompute full"],
        ),
        ([*EIGHT_B, "--pipeline", "8", "--num-slices", "5"], ["n = 5", "nearest: 8"]),
        (["--model", "llama-13b", *EIGHT_B[2:], "--write", "x.toml"], ["--write", "llama-13b"]),
        (["--model", "llama3-1b", *EIGHT_B[2:]], ["share one weight"]),
        ([*EIGHT_B, "--pipeline", "1"], ["p = 1", "nearest: 2"]),
        ([*EIGHT_B[:4], "--gpus", "1"], ["--gpus 1", "nearest legal value: 2"]),
        ([*EIGHT_B, "--write", ""], ["--write ''"]),
        ([*EIGHT_B, "--write", "tests"], ["--write 'tests'", "does not exist yet"]),
        ([*EIGHT_B, "--vocab", "7"], ["--model, --vocab"]),
        ([*EIGHT_B, "--schedule", "1F1B", "--num-slices", "8"], ["--num-slices 8", "1F1B", "value: 1"]),
        ([*EIGHT_B, "--schedule", "1F1B", "--exchange", "on"], ["--exchange on", "value: off"]),
        ([*EIGHT_B, "--schedule", "1F1B", "--vocab-parallel", "both"], ["--vocab-parallel both", "value: none"]),
        ([*EIGHT_B, "--longest"], ["--seq-len", "--longest"]),
        ([*EIGHT_B[:2], *EIGHT_B[4:], "--longest", "--top", "2"], ["--top", "--longest"]),
        ([*EIGHT_B[:2], "--gpus", "1024", "--seq-len", "1000000000000"], ["d = 4", "nearest: 4 sequences"]),
    ],
)
def test_wrong_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2 and not out
    assert err.count("\n") == 1
    assert all(word in err for word in words), err


def test_wrong_flags_say_how(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value, word in (
        ("--gpu-memory", "80Gi", "80GiB"),
        ("--gpu-memory", "9" * 400 + "TiB", "1024TiB"),
        ("--headroom", "-1", "at least 0"),
        ("--simulate", "-1", "at least 0"),
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["plan", *EIGHT_B, flag, value])
        assert stopped.value.code == 2
        assert word in capsys.readouterr().err


def test_rows_are_in_order_of_the_step_time_they_show(capsys: pytest.CaptureFixture[str]) -> None:
    """Of layouts without exchange a simulated step is shorter than the closed form's."""
    reordered = False
    for simulate in ("0", "1", "2", "3"):
        rows = report(capsys, *EIGHT_B, "--exchange", "off", "--simulate", simulate)["layouts"]
        times = [row["step_seconds"] for row in rows]
        assert times == sorted(times)
        closed = [row["lock_step_seconds"] for row in rows]
        reordered |= closed != sorted(closed)
    assert reordered


def test_steps_of_small_models_have_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--model", "llama3-debugmodel", "--seq-len", "4096", "--gpus", "4", "--sequences", "4")
    assert re.search(r"%  0\.00\d+~?  ", out)


def test_it_answers_without_torch() -> None:
    command = "import sys; from slimpipe import cli; code = cli.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", command, "plan", *EIGHT_B], check=True, stdout=subprocess.DEVNULL)
