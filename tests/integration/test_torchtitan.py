"""The real trainer: every layout and schedule trains alike, from one checkpoint and the same data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "torchtitan_configs" / "llama3_debug_cpu.toml"
NUM_STEPS = 10
TOLERANCE = 1e-5
SMALL = {
    "training.seq_len": 256,
    "slimpipe.num_slices": 4,
    "metrics.enable_wandb": False,
    "checkpoint.enable": True,
    "lr_scheduler.warmup_steps": 1,
}


@dataclass(frozen=True)
class Layout:
    """A run: its schedule and parallel degrees, and what else it sets."""

    schedule: str = "SlimPipe"
    pp: int = 2
    dp: int = 1
    replicate: int = 1
    tp: int = 1
    more: tuple[tuple[str, object], ...] = field(default=())

    def overrides(self) -> dict[str, object]:
        return {
            "parallelism.pipeline_parallel_schedule": self.schedule,
            "parallelism.pipeline_parallel_degree": self.pp,
            "parallelism.data_parallel_shard_degree": self.dp,
            "parallelism.data_parallel_replicate_degree": self.replicate,
            "parallelism.tensor_parallel_degree": self.tp,
            **dict(self.more),
        }


def run_cli(settings: dict[str, object], *, timeout: float = 180) -> subprocess.CompletedProcess:
    arguments = [
        f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in settings.items()
    ]
    return subprocess.run(
        [sys.executable, "-m", "slimpipe", "train", str(CONFIG), *arguments],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def train(folder: Path, layout: Layout, data: dict[str, object], **settings: object) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step."""
    result = run_cli({**SMALL, **data, "dump_folder": folder, **layout.overrides(), **settings})
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    records = [json.loads(path.read_text()) for path in (folder / "slimpipe").glob("rank*.json")]
    record = next(record for record in records if "losses" in record)
    return list(zip(record["losses"], record["grad_norms"], strict=True))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Settings that point to a corpus and a tokenizer made for this module."""
    folder = tmp_path_factory.mktemp("data")
    subprocess.run([sys.executable, str(ROOT / "tools" / "make_demo_data.py"), "--out", str(folder)], check=True, timeout=120)
    return {"hf_assets_path": folder / "tokenizer", "dataloader.dataset_path": folder / "corpus"}


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory, data: dict[str, object]) -> Path:
    """A checkpoint that every run starts from."""
    folder = tmp_path_factory.mktemp("seed")
    result = run_cli(
        {**SMALL, **data, "dump_folder": folder, **Layout(pp=1).overrides(), "checkpoint.create_seed_checkpoint": True}
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return folder / "checkpoint" / "step-0"


def assert_equal_runs(run: list[tuple[float, float]], other: list[tuple[float, float]], name: object) -> None:
    assert len(run) == len(other) > 0
    for step, (mine, theirs) in enumerate(zip(run, other, strict=True), 1):
        for what, a, b in zip(("loss", "gradient norm"), mine, theirs, strict=True):
            assert abs(a - b) <= TOLERANCE * abs(b), f"{what} of {name} at step {step}: {a} is not {b}"


INTERLEAVED_3 = Layout("InterleavedSlimPipe", more=(("slimpipe.stages_per_rank", 3),))
FULL = (("activation_checkpoint.mode", "full"),)
SELECTIVE = (("activation_checkpoint.mode", "selective"),)
GROUPS = {
    "one data rank": [
        Layout(pp=1),
        Layout("1F1B"),
        Layout("SlimPipe"),
        Layout("InterleavedSlimPipe"),
        INTERLEAVED_3,
        Layout("SlimPipe", tp=2),
        Layout("SlimPipe", more=FULL),
        Layout("SlimPipe", more=SELECTIVE),
    ],
    "two data ranks": [
        Layout(pp=1, dp=2),
        Layout("1F1B", dp=2),
        Layout("SlimPipe", dp=2),
        Layout("InterleavedSlimPipe", dp=2),
        Layout("SlimPipe", replicate=2),
        Layout("SlimPipe", dp=2, tp=2, more=SELECTIVE),
    ],
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layouts", GROUPS.values(), ids=GROUPS.keys())
def test_layouts_train_alike(tmp_path: Path, data: dict, seed: Path, layouts: list[Layout]) -> None:
    runs = {}
    for index, layout in enumerate(layouts):
        settings = {"checkpoint.initial_load_path": seed, "checkpoint.interval": 1000, "checkpoint.load_only": True}
        runs[layout] = train(tmp_path / str(index), layout, data, **{"training.steps": NUM_STEPS, **settings})
    truth = runs[layouts[0]]
    assert len(truth) == NUM_STEPS
    assert truth[-1][0] < truth[0][0] - 0.5, "the loss does not fall"
    for layout, run in runs.items():
        assert_equal_runs(run, truth, layout)
