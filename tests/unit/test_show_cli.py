"""`slimpipe show`: what it prints and writes, and one line where it cannot."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slimpipe import cli
from slimpipe.planner.costs import OpCosts
from slimpipe.planner.shown import Setting, timeline_of

ROOT = Path(cli.__file__).parents[1]
SMALL = ["show", "--ranks", "2", "--slices", "4"]


@pytest.fixture
def run_file(tmp_path):
    """A recorded step: one simulated with other costs."""
    setting = Setting(num_ranks=2, num_slices=4, num_stages_per_rank=1, num_microbatches=2, slice_len=1024)
    file = tmp_path / "timeline_rank0.json"
    file.write_text(timeline_of("SlimPipe", setting).to_json())
    return file


def test_a_schedule_as_text(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main([*SMALL, "--memory", "--exchange", "on", "--vocab-parallel", "output"]) == 0
    printed = capsys.readouterr().out
    assert "SlimPipe, 2 ranks, 2 microbatches x 4 slices, every rank helps, shared output layer" in printed
    assert "peak 6 = 0.750" in printed
    assert "\033" not in printed  # no terminal
    assert max(map(len, printed.splitlines())) <= 120


def test_figures_and_files(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    files = [tmp_path / name for name in ("a.svg", "a.png", "a.json")]
    argv = [
        *SMALL,
        "--microbatches",
        "2",
        "--schedule",
        "1F1B,SlimPipe,Interleaved1F1B",
        "--attention-share",
        "0",
        "--json",
    ]
    for flag, file in zip(("--svg", "--png", "--trace"), files):
        argv += [flag, str(file)]
    assert cli.main(argv) == 0
    one_f_one_b, ours, interleaved = json.loads(capsys.readouterr().out)["timelines"]
    assert one_f_one_b["idle_share"] == pytest.approx(1 / 3)
    assert ours["idle_share"] == pytest.approx(1 / 9)
    assert interleaved["idle_share"] == pytest.approx(1 / 5)
    assert [rank["peak_live_units"] for rank in ours["ranks"]] == [6, 4]
    assert one_f_one_b["ranks"][0]["peak_live_microbatches"] == 1
    assert all(file.stat().st_size for file in files)


def test_a_run_beside_its_plan(capsys, run_file):
    assert cli.main(["show", "--run", str(run_file), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [timeline["title"].partition(":")[0] for timeline in figures["timelines"]] == ["plan", "run"]
    comparison = figures["comparison"]
    assert comparison["plan_seconds"] == pytest.approx(comparison["run_seconds"])
    assert cli.main(["show", "--run", str(run_file)]) == 0
    assert "share of their time" in capsys.readouterr().out


def test_measured_costs_are_in_seconds(capsys, tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(OpCosts.units(2, num_slices=4, slice_len=512).to_json())
    assert cli.main([*SMALL, "--costs", str(file)]) == 0
    assert "seconds    idle" in capsys.readouterr().out
    assert cli.main([*SMALL, "--costs", str(file), "--stages-per-rank", "2"]) == 2
    assert "the costs are of 2 stages" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["show"], "--ranks is missing; for example: slimpipe show --ranks 4"),
        (["show", "--ranks", "4"], "--slices is missing"),
        (["show", "--ranks", "4", "--slices", "3"], "num_slices = 3: it must be at least num_ranks = 4"),
        ([*SMALL, "--schedule", "1F2B"], "nearest legal value: '1F1B'"),
        ([*SMALL, "--schedule", "1F1B", "--microbatches", "1"], "nearest legal value: 2"),
        ([*SMALL, "--schedule", "1F1B", "--exchange", "on"], "--exchange: schedules of torch have no such thing"),
        ([*SMALL, "--run", "no.json"], "no.json: cannot read the file"),
        ([*SMALL, "--svg", "a.xyz"], "a.xyz: Format 'xyz' is not supported"),
        ([*SMALL, "--trace", "no/a.json"], "no/a.json: there is no folder no"),
        ([*SMALL, "--svg", "."], ".: it is a folder"),
        ([*SMALL, "--gpu", "h100"], "--gpu: the model is not known; give a CONFIG.toml"),
        (["show", "a.toml", "--ranks", "2"], "--ranks: the file says so already"),
    ],
)
def test_what_cannot_be_shown_is_one_line(argv, said, capsys):
    assert cli.main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    "argv", [[*SMALL, "--ranks", "0"], [*SMALL, "--exchange", "maybe"], [*SMALL, "--unknown", "1"]]
)
def test_wrong_usage_is_exit_code_2(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 2
    assert "usage: slimpipe show" in capsys.readouterr().err


def test_a_run_that_does_not_fit_is_refused(capsys, run_file, tmp_path):
    assert cli.main(["show", "--run", str(run_file), "--schedule", "1F1B"]) == 2
    assert "--run: it is laid beside the plan of its own schedule" in capsys.readouterr().err
    assert cli.main(["show", "--run", str(run_file), "--vocab-parallel", "output"]) == 2
    assert "the plan has V of" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text("{}")
    assert cli.main(["show", "--run", str(tmp_path / "bad.json")]) == 2
    assert "not a timeline" in capsys.readouterr().err


def test_without_torchtitan_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["show", "a.toml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'slimpipe[torchtitan]'" in line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_output_that_nobody_takes():
    command = [sys.executable, "-m", "slimpipe", *SMALL]
    reader, closed = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full:
        for file, code, said in ((closed, 0, b""), (full, 2, b"slimpipe: output: No space left on device\n")):
            done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.PIPE)
            assert (done.returncode, done.stderr) == (code, said)
    os.close(closed)


def test_our_schedules_need_no_torch():
    """Loading it takes seconds."""
    code = "import sys; from slimpipe import cli; cli.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, *SMALL], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr


CONFIG = """
[model]
name = "llama3"
flavor = "debugmodel"
[training]
seq_len = 64
disable_cuda_graphs = true
local_batch_size = 3
[parallelism]
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "InterleavedSlimPipe"
[slimpipe]
num_slices = 4
"""


def test_a_configuration(capsys, tmp_path):
    pytest.importorskip("torchtitan")
    file = tmp_path / "run.toml"
    file.write_text(CONFIG)
    assert cli.main(["show", str(file), "--json"]) == 0
    (ours,) = json.loads(capsys.readouterr().out)["timelines"]
    assert ours["title"].startswith(
        "InterleavedSlimPipe, 2 ranks x 2 stages, 3 microbatches x 4 slices, no exchange (auto"
    )
    assert cli.main(["show", str(file), "--json", "--slimpipe.num_slices", "8", "--slimpipe.context_exchange=on"]) == 0
    (ours,) = json.loads(capsys.readouterr().out)["timelines"]
    assert "x 8 slices, every rank helps" in ours["title"]
    both = ["--gpu", "h100", "--schedule", "InterleavedSlimPipe,1F1B"]
    assert cli.main(["show", str(file), "--json", *both]) == 0
    ours, one_f_one_b = json.loads(capsys.readouterr().out)["timelines"]
    assert "exchange as its costs say" in ours["title"]
    assert 0 < one_f_one_b["seconds"] < 0.1
    assert cli.main(["show", str(file), "--json", *both, "--vocab-parallel", "output"]) == 0
    shared, same = json.loads(capsys.readouterr().out)["timelines"]
    assert same == one_f_one_b
    work, shared_work = (sum(rank["compute_seconds"] for rank in of["ranks"]) for of in (ours, shared))
    assert shared_work == pytest.approx(work)  # the output layer moves; it is not free
    assert cli.main(["show", str(file), "--gpu", "h300"]) == 2
    assert 'no GPU "h300"' in capsys.readouterr().err
    assert cli.main(["show", str(file), "--slimpipe.num_slices", "5"]) == 2
    assert "nearest legal value: 65" in capsys.readouterr().err
    assert cli.main(["show", str(file), "--parallelism.pipeline_parallel_degree", "1"]) == 2
    assert "there is no pipeline" in capsys.readouterr().err


def test_a_schedule_of_torch_has_the_stages_and_costs_of_the_run(capsys, tmp_path):
    pytest.importorskip("torchtitan")
    file = tmp_path / "run.toml"
    file.write_text(CONFIG)
    keys = ["--parallelism.pipeline_parallel_schedule", "Interleaved1F1B", "--training.local_batch_size", "4"]
    keys += ["--parallelism.pipeline_parallel_layers_per_stage", "1", "--activation_checkpoint.mode", "full"]
    found = []
    for num_slices in ("1", "4"):
        assert cli.main(["show", str(file), "--gpu=h100", "--json", *keys, "--slimpipe.num_slices", num_slices]) == 0
        found.append(json.loads(capsys.readouterr().out)["timelines"][0])
    assert found[0]["title"].startswith("Interleaved1F1B, 2 ranks x 4 stages")  # of 6 layers, and 2 weigh as much
    assert found[0] == found[1]  # it cuts no slices
