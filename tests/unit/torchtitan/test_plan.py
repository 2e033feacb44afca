"""What plan writes, torchtitan reads: the same model, the same layout, no broken rule."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from torchtitan.models.llama3 import llama3_configs

from slimpipe import cli
from slimpipe.planner.hardware import HARDWARE
from slimpipe.planner.layout import Layout, broken_rule
from slimpipe.planner.models import MODELS
from slimpipe.planner.search import GIB, Question, Wanted, search
from slimpipe.planner.write_toml import to_toml
from slimpipe.torchtitan.config import SlimPipeSection, SlimPipeTrainerConfig
from slimpipe.torchtitan.pipelining import stage_modules
from slimpipe.torchtitan.rules import broken_rules
from slimpipe.torchtitan.shape import layout_of, shape_of
from slimpipe.torchtitan.toml import load_toml

SHARES_VOCABULARY = "vocab_parallel" in {field.name for field in fields(SlimPipeSection)}
ASKED = (("llama3-8b", 131072, 24), ("llama3-70b", 262144, 64), ("llama3-debugmodel", 3072, 12))
FLAVORS = [name for name in llama3_configs if f"llama3-{name.lower()}" in MODELS]


def written(folder: Path, model: str, layout: Layout, seq_len: int) -> SlimPipeTrainerConfig:
    path = folder / "run.toml"
    path.write_text(to_toml(MODELS[model], layout, seq_len=seq_len, command="slimpipe plan"))
    return load_toml(str(path))


@pytest.mark.parametrize("flavor", FLAVORS)
def test_shapes_are_torchtitan_s(tmp_path: Path, flavor: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\nname = "llama3"\nflavor = "{flavor}"\n')
    assert shape_of(load_toml(str(path))) == replace(MODELS[f"llama3-{flavor.lower()}"], head_dim=None)


def test_what_plan_offers_no_rule_refuses(tmp_path: Path) -> None:
    wanted = Wanted(vocab_parallel=None if SHARES_VOCABULARY else "none")
    offered = 0
    for model, seq_len, num_gpus in ASKED:
        asked = Question(
            model=MODELS[model],
            seq_len=seq_len,
            num_gpus=num_gpus,
            hardware=HARDWARE["h200"],
            memory=HARDWARE["h200"].memory,
            sequences=24,
        )
        for split in search(asked, wanted):
            if split.best is None:
                continue
            config = written(tmp_path, model, split.best.layout, seq_len)
            assert broken_rules(config) == []
            assert layout_of(config, num_gpus=num_gpus) == split.best.layout
            offered += 1
    assert offered > 10


@pytest.mark.parametrize(("schedule", "v"), [("1F1B", 1), *(("Interleaved1F1B", v) for v in (2, 4, 8))])
def test_a_schedule_of_torch(tmp_path: Path, schedule: str, v: int) -> None:
    layout = Layout(
        tensor=2,
        pipeline=4,
        data=2,
        stages_per_rank=v,
        num_microbatches=8,
        recompute="full",
        exchange=False,
        schedule=schedule,
    )
    assert broken_rule(layout, MODELS["llama3-8b"], seq_len=8192) is None
    config = written(tmp_path, "llama3-8b", layout, 8192)
    assert broken_rules(config) == []
    assert layout_of(config, num_gpus=16) == layout


@pytest.mark.parametrize(("schedule", "v", "m"), [("1F1B", 1, 3), ("Interleaved1F1B", 3, 4), ("Interleaved1F1B", 2, 9)])
def test_what_torch_refuses_plan_and_rules_refuse(tmp_path: Path, schedule: str, v: int, m: int) -> None:
    layout = Layout(
        tensor=2, pipeline=4, data=2, stages_per_rank=v, num_microbatches=m, exchange=False, schedule=schedule
    )
    assert broken_rule(layout, MODELS["llama3-8b"], seq_len=8192)
    config = written(tmp_path, "llama3-8b", layout, 8192)
    (error,) = broken_rules(config)
    assert "nearest legal value" in error
    name, _, nearest = re.split(r" = |legal value: ", error)[0], *re.split(r"legal value: ", error)
    section, field = name.split(".")
    setattr(getattr(config, section), field, int(nearest))
    assert broken_rules(config) == []


@pytest.mark.parametrize("schedule", ["GPipe", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_rules_of_torch_s_schedules(tmp_path: Path, schedule: str) -> None:
    config = written(tmp_path, "llama3-8b", Layout(tensor=1, pipeline=4, data=1, num_microbatches=8), 8192)
    config.parallelism.pipeline_parallel_schedule = schedule
    assert broken_rules(config) == []
    config.parallelism.pipeline_parallel_layers_per_stage = 3
    (error,) = broken_rules(config)
    nearest = {"GPipe": 8, "ZBVZeroBubble": 4, "DualPipeV": 4}.get(schedule, 2)
    assert error.endswith(f"nearest legal value: {nearest}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pipeline_parallel_microbatch_size": 2}, "pipeline_parallel_microbatch_size = 2"),
        ({"context_parallel_degree": 2}, "c = 2"),
        ({"pipeline_parallel_degree": 1}, "p = 1"),
        ({"pipeline_parallel_degree": 3}, "t p c = "),
        ({"pipeline_parallel_schedule": "GPipe"}, "plan knows"),
    ],
)
def test_a_file_without_a_row_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object], words: str
) -> None:
    layout = Layout(tensor=2, pipeline=4, data=2, num_slices=8, num_microbatches=8)
    path = tmp_path / "run.toml"
    settings = {"context_parallel_degree": 1, "pipeline_parallel_microbatch_size": 1} | change
    lines = to_toml(MODELS["llama3-8b"], layout, seq_len=65536, command="slimpipe plan").splitlines()
    lines = [line for line in lines if line.split(" = ")[0] not in settings]
    lines.insert(
        lines.index("[parallelism]") + 1, "\n".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
    )
    path.write_text("\n".join(lines))
    arguments = ["plan", "--toml", str(path), "--gpus", "16", "--gpu", "h200", "--simulate", "0"]
    assert cli.main(arguments) == 0
    assert re.search(f"the file's own layout .*{re.escape(words)}", capsys.readouterr().out)
    assert cli.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert words in found["own_layout_breaks"] and "own_layout" not in found


@pytest.mark.parametrize(
    "change",
    [
        {"num_slices": 3},
        {"num_slices": 7},
        {"stages_per_rank": 2, "pipeline": 4, "data": 1, "tensor": 1, "num_slices": 4},
        {"tensor": 3},
        {"context": 2},
    ],
)
def test_what_plan_refuses_a_rule_refuses(tmp_path: Path, change: dict[str, int]) -> None:
    layout = replace(Layout(tensor=1, pipeline=4, data=1, num_slices=8), **change)
    model = MODELS["llama3-debugmodel"]
    assert broken_rule(layout, model, seq_len=4096) is not None
    config = written(tmp_path, model.name, layout, 4096)
    if layout.context > 1:
        config.parallelism.context_parallel_degree = layout.context
    if layout.tensor == 3:  # torchtitan's own, at the model's sharding
        assert model.num_kv_heads % layout.tensor
        return
    assert broken_rules(config)


def test_layers_of_stages_are_the_run_s() -> None:
    for num_layers in (6, 32, 40, 80, 126):
        for p in (2, 4, 8):
            layout = Layout(tensor=1, pipeline=p, data=1, num_slices=p)
            if num_layers < p:
                continue
            modules = stage_modules(num_layers, num_stages=p, first_less=0, last_less=0)
            sizes = tuple(sum(name.startswith("layers.") for name in stage) for stage in modules)
            assert layout.layers_per_stage(num_layers) == sizes


def test_toml_gives_model_length_and_own_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--toml", "torchtitan_configs/llama3_8b_128k.toml", "--gpus", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seq_len"] == 131072 and found["model"]["titan"] == ["llama3", "8B"]
    own = found["own_layout"]
    assert own["layout"]["num_slices"] == 64 and own["layout"]["recompute"] == "full"
    assert own["total_bytes"] > 0
    broken = tmp_path / "run.toml"
    broken.write_text('[model]\nflavor = "8B"\n[training]\nsteeps = 3\n')
    assert cli.main(["plan", "--toml", str(broken), "--gpus", "64"]) == 2
    err = capsys.readouterr().err
    assert "training.steeps" in err and "steps" in err and err.count("\n") == 1


def test_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "made" / "x.toml"
    arguments = ["--model", "llama3-8b", "--seq-len", "131072", "--gpus", "64", "--vocab-parallel", "none"]
    assert cli.main(["plan", *arguments, "--json", "--write", str(path)]) == 0
    best = json.loads(capsys.readouterr().out)["layouts"][0]["layout"]
    config = load_toml(str(path))
    assert broken_rules(config) == []
    assert layout_of(config, num_gpus=64) == Layout(**best)
    assert config.training.seq_len == 131072
    text = path.read_text()
    assert "slimpipe plan --model llama3-8b" in text
    assert cli.main(["plan", *arguments, "--write", str(path)]) == 2
    assert "does not exist yet" in capsys.readouterr().err and path.read_text() == text


def test_memory_of_a_layout_counts_what_a_gpu_has() -> None:
    """Weights, gradients and optimizer take 18 bytes a parameter where nothing is sharded."""
    asked = Question(
        model=MODELS["llama3-8b"],
        seq_len=8192,
        num_gpus=8,
        hardware=HARDWARE["h200"],
        memory=141e9,
        sequences=8,
    )
    for split in search(asked):
        judged = split.best or split.smallest
        if judged is not None and judged.layout.data == 1:
            weights = sum(judged.parts[part] for part in ("parameters", "gradients", "optimizer"))
            assert weights >= 18 * 8.0e9 / 8 * 0.99
            assert judged.bytes < 200 * GIB
