"""`slimpipe check`: what it finds before a run starts."""

import importlib.util
import json
import os

import pytest

from slimpipe import cli
from slimpipe.options import KERNEL_NAMES
from slimpipe.program import ProgramError
from tests.unit.test_cli import CONFIG

pytest.importorskip("torchtitan")


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.toml").write_text(CONFIG)
    return "config.toml"


def test_a_configuration_that_can_run(config_file, capsys):
    assert cli.main(["check", config_file]) == 0
    printed = capsys.readouterr().out
    assert "SlimPipe on 2 pipeline ranks, 4 ranks in all" in printed
    assert "2 ranks x 1 stages, 2 microbatches x 4 slices of 16 tokens" in printed
    assert "instructions without exchange (auto: decided in the run), proven, and proven with exchange" in printed
    assert printed.endswith("config.toml: this run can start\n")
    assert os.listdir() == ["config.toml"]


def test_as_json(config_file, capsys):
    assert cli.main(["check", config_file, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and not found["errors"]
    assert found["versions"]["torchtitan"] == "0.3.0"
    assert {"auto", *found["kernels"]} == set(KERNEL_NAMES)
    assert found["kernels"][found["kernel"]] is None
    assert found["num_ranks"] == 4


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["--training.seq_len", "66", "--parallelism.context_parallel_degree", "2"],
            ["seq_len = 66", "context_parallel"],
        ),
        (["--slimpipe.num_slice", "4"], ['did you mean "num_slices"?']),
        (
            ["--parallelism.tensor_parallel_degree", "0"],
            ["parallelism.tensor_parallel_degree = 0: it must be at least"],
        ),
        (["--slimpipe.kernel", "flash_attn"], ["slimpipe.kernel = 'flash_attn'"]),
    ],
)
def test_every_broken_rule_is_told_at_once(config_file, capsys, overrides, said, monkeypatch):
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: None)
    assert cli.main(["check", config_file, *overrides, "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    for text in said:
        assert any(text in error for error in found["errors"]), found["errors"]
    assert cli.main(["check", config_file, *overrides]) == 2
    assert "this run cannot start" in capsys.readouterr().out


def test_a_program_that_is_not_sound_is_not_proven(config_file, capsys, monkeypatch):
    def refuse(program):
        if program.transfers:
            raise ProgramError("two wait for each other")

    monkeypatch.setattr("slimpipe.torchtitan.findings.prove", refuse)
    assert cli.main(["check", config_file, "--json", "--training.seq_len", "4096"]) == 2  # slices worth an exchange
    found = json.loads(capsys.readouterr().out)
    assert found["errors"] == ["the program is not sound: two wait for each other"]
    assert "proven" not in found["program"]


def test_what_lies_elsewhere_is_a_warning(config_file, capsys):
    assert cli.main(["check", config_file, "--hf_assets_path", "no/such", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == [
        "hf_assets_path = 'no/such': there is no such file or folder here"
    ]


def test_no_pipeline_and_no_file(config_file, capsys):
    assert cli.main(["check", config_file, "--parallelism.pipeline_parallel_degree", "1"]) == 0
    assert "no pipeline, 2 ranks" in capsys.readouterr().out
    assert cli.main(["check", "no.toml"]) == 2
    assert "cannot read the file" in capsys.readouterr().out


def test_without_torchtitan_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["check", "a.toml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'slimpipe[torchtitan]'" in line
