"""The `slimpipe` command: arguments, exit codes, what is checked before a process starts, the closing summary."""

import importlib.util
import json
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli
import torch

from slimpipe import SlimPipeOptions, cli, launcher
from slimpipe.program.cost import AttentionShape, ExchangeCosts
from slimpipe.summary import rank_table, rates_text, summarise

CONFIG = """
[model]
name = "llama3"
flavor = "debugmodel"
[training]
seq_len = 64
disable_cuda_graphs = true
local_batch_size = 2
[parallelism]
pipeline_parallel_degree = 2
data_parallel_shard_degree = 2
pipeline_parallel_schedule = "SlimPipe"
[slimpipe]
num_slices = 4
"""


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    file = tmp_path / "config.toml"
    file.write_text(CONFIG)
    return str(file)


@pytest.fixture
def launches(monkeypatch):
    """Calls of `launcher.launch`, which starts nothing here."""
    calls = []

    def launch(command, **kwargs):
        calls.append(SimpleNamespace(command=command, **kwargs))

    monkeypatch.setattr(launcher, "launch", launch)
    monkeypatch.setattr("slimpipe.torchtitan.cpu.use_cpu", lambda: True)
    return calls


def test_help_lists_what_exists(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--help"])
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    assert "train" in printed and "measure-links" in printed
    with pytest.raises(SystemExit) as exit_:
        cli.main(["train", "--help"])
    assert exit_.value.code == 0
    assert "--nproc" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        *([], ["trian"], ["train"], ["train", "a.toml", "--nproc", "0"]),
        ["train", "a.toml", "--nproc", "9" * 400],
        *(["measure-links", "--rank", "3"], ["measure-links", "--heads", "0"], ["measure-links", "--kernel", "flash"]),
    ],
)
def test_wrong_usage_is_exit_code_2(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 2
    assert "usage: slimpipe" in capsys.readouterr().err


def test_without_torchtitan_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["train", "a.toml"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "slimpipe: training needs torchtitan; install it with: pip install 'slimpipe[torchtitan]'"
    ]


def test_one_rank_per_parallel_degree_on_cpu(config_file, launches, capsys):
    overrides = ["--training.steps", "5", "--parallelism.tensor_parallel_degree=2"]
    assert cli.main(["train", config_file, *overrides]) == 0
    (call,) = launches
    assert call.command[1:] == ["-m", "slimpipe", "train", config_file, *overrides]
    assert call.num_ranks == 2 * 2 * 2
    assert call.shown_rank == 4  # first rank of the last of 2 stages
    assert call.env["LOG_RANK"] == "4"
    assert "WANDB_MODE" not in call.env  # a real run uploads
    assert int(call.env["OMP_NUM_THREADS"]) >= 1
    assert "outputs:" in capsys.readouterr().out


def test_nproc_goes_before_or_after_the_file_and_must_fit_the_degrees(config_file, launches, capsys):
    shard = ["--parallelism.data_parallel_shard_degree", "-1"]
    assert cli.main(["train", "--nproc", "6", config_file, *shard]) == 0
    assert cli.main(["train", config_file, *shard, "--nproc=4"]) == 0
    assert [call.num_ranks for call in launches] == [6, 4]
    assert launches[1].command[-2:] == shard

    assert cli.main(["train", config_file, "--nproc", "3"]) == 2
    assert "3 ranks: their number must be 4" in capsys.readouterr().err
    assert cli.main(["train", config_file, "--nproc", "5", *shard]) == 2
    assert "must be a multiple of 2" in capsys.readouterr().err
    assert len(launches) == 2


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (["--training.steps", "many"], "training.steps"),
        (["--slimpipe.num_slice", "4"], "num_slices"),
        (["--training.seq_len", "66"], "training.seq_len = 66"),
    ],
)
def test_a_wrong_configuration_is_told_before_any_rank_starts(config_file, launches, capsys, override, said):
    assert cli.main(["train", config_file, *override]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert launches == []
    assert os.listdir() == ["config.toml"]


def test_a_missing_file_is_exit_code_2(launches, capsys):
    assert cli.main(["train", "no/such.toml"]) == 2
    assert "no/such.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (launcher.Stopped("stopped by SIGINT"), 130, "slimpipe: stopped by SIGINT\n"),
        (KeyboardInterrupt(), 130, "slimpipe: stopped by SIGINT\n"),
        (
            launcher.RanksFailed(launcher.Failure(rank=2, reason="ValueError: no", details="at line 3")),
            1,
            "at line 3\nslimpipe: rank 2 failed: ValueError: no; all ranks have ended\n",
        ),
    ],
)
def test_exit_codes_and_unfinished_checkpoints(
    config_file, launches, monkeypatch, capsys, tmp_path, raised, code, said
):
    def launch(command, **kwargs):
        for name, files in (("step-10", [".metadata", "a.distcp"]), ("step-20", ["a.distcp"])):
            folder = tmp_path / "outputs" / "checkpoint" / name
            folder.mkdir(parents=True)
            for file in files:
                (folder / file).touch()
        raise raised

    monkeypatch.setattr(launcher, "launch", launch)
    assert cli.main(["train", config_file]) == code
    error = capsys.readouterr().err
    assert error.endswith(said)
    assert "removed unfinished checkpoint outputs/checkpoint/step-20" in error
    assert os.listdir(tmp_path / "outputs" / "checkpoint") == ["step-10"]


def test_measured_rates_are_printed_and_can_be_pasted(monkeypatch, capfd, tmp_path):
    """By two real ranks."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(cli.__file__).parents[1]))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    small = ["--device=cpu", "--slice-len=32", "--heads=4", "--kv-heads=2", "--head-dim=16"]
    assert cli.main(["measure-links", *small]) == 0
    section = tomli.loads("[slimpipe]" + capfd.readouterr().out.partition("[slimpipe]")[2])["slimpipe"]
    assert tuple(section) == ("attention_flops", "link_bandwidth", "link_latency")
    SlimPipeOptions(**section)
    assert not list(tmp_path.glob("slimpipe-*"))


def test_rates_as_json_and_as_text():
    shape = AttentionShape(slice_len=8, num_heads=2, num_kv_heads=1, head_dim=4, value_head_dim=4)
    costs = ExchangeCosts(shape=shape, flops_per_second=1.234e12, bytes_per_second=5e9, latency=2e-5)
    assert json.loads(rates_text(costs, num_ranks=4, device="cuda", as_json=True)) == {
        "num_ranks": 4,
        "device": "cuda",
        "attention_flops": 1.234e12,
        "link_bandwidth": 5e9,
        "link_latency": 2e-5,
    }
    *_, head, flops, bandwidth, latency = rates_text(costs, num_ranks=4, device="cuda").splitlines()
    assert (head, flops) == ("[slimpipe]", "attention_flops = 1.23e+12")
    assert (bandwidth, latency) == ("link_bandwidth = 5e+09", "link_latency = 2e-05")


@pytest.mark.parametrize(
    ("flags", "num_gpus", "said"),
    [
        (["--ranks", "1"], 0, "--ranks 1: a link has two ends; nearest legal value: 2"),
        (["--heads", "6", "--kv-heads", "5"], 0, "--kv-heads 5: it must divide --heads 6; nearest legal value: 6"),
        (["--heads", "6", "--kv-heads", "4"], 0, "--kv-heads 4: it must divide --heads 6; nearest legal value: 3"),
        (["--kernel", "flash_attn"], 0, "served by auto, 'torch_cpu_flash', 'reference'"),
        (["--device", "cuda"], 1, "--device cuda: it needs 2 GPUs, this machine has 1; use --device cpu"),
        (["--ranks", "8"], 4, "--ranks 8: each needs a GPU; nearest legal value: 4, or --device cpu"),
    ],
)
def test_what_cannot_be_measured_is_told_before_any_rank_starts(launches, monkeypatch, capsys, flags, num_gpus, said):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert cli.main(["measure-links", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert launches == []


def test_a_launchers_ranks_are_taken_as_they_are(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    for num_ranks, said in (("4", "--ranks 2: 4 were started; nearest legal value: 4"), ("1", "a link has two ends")):
        monkeypatch.setenv("WORLD_SIZE", num_ranks)
        flags = ["--ranks", "2"] if num_ranks == "4" else []
        assert cli.main(["measure-links", *flags]) == 2
        assert said in capsys.readouterr().err


def test_summary_tells_figures_of_this_run_and_where_outputs_are(tmp_path):
    since = time.time() - 60
    runs = [tmp_path / "tb" / "wandb" / f"offline-run-{name}" for name in ("old", "new")]
    (tmp_path / "slimpipe").mkdir()
    for rank, run in enumerate(runs):
        run.mkdir(parents=True)
        record = {
            "rank": rank,
            "peak_live_bytes": (rank + 1) * 2**20,
            "one_f_one_b_bytes": 5 * 2**20,
            "losses": [8.25, 8.0],
        }
        (tmp_path / "slimpipe" / f"rank{rank}.json").write_text(json.dumps(record))
    for stale in (runs[0], tmp_path / "slimpipe" / "rank0.json"):
        os.utime(stale, (since - 60, since - 60))
    text = summarise(tmp_path, since=since)
    assert f"outputs:      {tmp_path}" in text
    assert str(runs[1]) in text
    assert str(runs[0]) not in text
    assert "2.00 MiB" in text
    assert "1.00 MiB" not in text


def test_rank_table_sorts_ranks_and_leaves_out_what_no_rank_has():
    lines = rank_table([{"rank": 1, "peak_live_units": 8}, {"rank": 0, "losses": [4.0, 3.5]}]).splitlines()
    assert [line.split() for line in lines[1:]] == [["0", "-", "4.0000", "3.5000"], ["1", "8", "-", "-"]]
    assert "1F1B" not in lines[0]
    assert len({len(line) for line in lines}) == 1
