"""The real trainer: every layout and schedule trains alike, from one checkpoint and the same data."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import fork

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "torchtitan_configs" / "llama3_debug_cpu.toml"
NUM_STEPS = 10
TOLERANCE = 1e-5
NUM_AT_A_TIME = 3
SMALL = {
    "training.local_batch_size": 2,
    "training.seq_len": 128,
    "slimpipe.num_slices": 4,
    "metrics.enable_wandb": False,
    "checkpoint.enable": True,
    "lr_scheduler.warmup_steps": 1,
    "optimizer.lr": 2e-3,
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

    @property
    def num_ranks(self) -> int:
        return self.pp * self.dp * self.replicate * self.tp

    def overrides(self) -> dict[str, object]:
        return {
            "parallelism.pipeline_parallel_schedule": self.schedule,
            "parallelism.pipeline_parallel_degree": self.pp,
            "parallelism.data_parallel_shard_degree": self.dp,
            "parallelism.data_parallel_replicate_degree": self.replicate,
            "parallelism.tensor_parallel_degree": self.tp,
            **dict(self.more),
        }


def to_arguments(settings: dict[str, object]) -> list[str]:
    lower = {True: "true", False: "false"}
    return [f"--{name}={lower[value] if isinstance(value, bool) else value}" for name, value in settings.items()]


def train_rank(rank: int, num_ranks: int, port: int, config: Path, arguments: list[str], log: Path) -> None:
    """One rank of one run; what it writes goes to a file. torchtitan keeps meshes for the life of a process."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WANDB_MODE="offline", HF_HUB_OFFLINE="1")
    torch.set_num_threads(1)
    # On CPUs torch adds up the squares of a shard in float32, one by one: for half a million numbers that is wrong by
    # 1e-4, and differently for shards of another size.
    total_norm = torch.nn.utils.get_total_norm
    torch.nn.utils.get_total_norm = lambda grads, *args: total_norm([grad.double() for grad in grads], *args)
    from slimpipe.torchtitan.train import train

    train([str(config), *arguments])


def run(
    folder: Path, num_ranks: int, settings: dict[str, object], *, config: Path = CONFIG, timeout: float = 240
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    arguments = to_arguments({**SMALL, "dump_folder": folder, **settings})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = [folder / f"rank{rank}.log" for rank in range(num_ranks)]
    processes = [
        fork(train_rank, rank, num_ranks, port, config, arguments, logs[rank], name=f"rank{rank}")
        for rank in range(num_ranks)
    ]
    end = time.monotonic() + timeout
    while any(process.is_alive() for process in processes) and time.monotonic() < end:
        time.sleep(0.1)
        if any(process.exitcode for process in processes):
            end = min(end, time.monotonic() + 10)  # the others will not get far
    for process in processes:
        process.kill()
        process.join()
    failed = [rank for rank, process in enumerate(processes) if process.exitcode]
    assert not failed, f"ranks {failed} failed\n" + "\n".join(logs[rank].read_text()[-3000:] for rank in failed)


def train(folder: Path, layout: Layout, *, config: Path = CONFIG, **settings: object) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step."""
    run(folder, layout.num_ranks, {**layout.overrides(), **settings}, config=config)
    return read_history(folder)


def train_all(folder: Path, layouts: list[Layout], **settings: object) -> dict[Layout, list[tuple[float, float]]]:
    """`train` for each, in a folder named by its index. Some at a time: a run waits for much, not least in the end."""
    with ThreadPoolExecutor(NUM_AT_A_TIME) as pool:
        runs = [pool.submit(train, folder / str(i), layout, **settings) for i, layout in enumerate(layouts)]
        return {layout: run.result() for layout, run in zip(layouts, runs, strict=True)}


def read_records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in (folder / "slimpipe").glob("rank*.json")]


def read_history(folder: Path) -> list[tuple[float, float]]:
    record = next(record for record in read_records(folder) if "losses" in record)
    return list(zip(record["losses"], record["grad_norms"], strict=True))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Settings that point to a corpus and a tokenizer made for this module."""
    folder = tmp_path_factory.mktemp("data")
    subprocess.run(
        [sys.executable, str(ROOT / "tools" / "make_demo_data.py"), "--out", str(folder)], check=True, timeout=120
    )
    return {"hf_assets_path": folder / "tokenizer", "dataloader.dataset_path": folder / "corpus"}


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory, data: dict[str, object]) -> Path:
    """A checkpoint that every run starts from."""
    folder = tmp_path_factory.mktemp("seed")
    run(folder, 1, {**data, **Layout(pp=1).overrides(), "checkpoint.create_seed_checkpoint": True})
    return folder / "checkpoint" / "step-0"


def assert_equal_runs(run: list[tuple[float, float]], other: list[tuple[float, float]], name: object) -> None:
    assert len(run) == len(other) > 0
    for step, (mine, theirs) in enumerate(zip(run, other, strict=True), 1):
        for what, a, b in zip(("loss", "gradient norm"), mine, theirs, strict=True):
            assert abs(a - b) <= TOLERANCE * abs(b), f"{what} of {name} at step {step}: {a} is not {b}"


FULL = (("activation_checkpoint.mode", "full"),)
SELECTIVE = (("activation_checkpoint.mode", "selective"),)
THREE_STAGES = (("slimpipe.stages_per_rank", 3),)
HELPED = (("slimpipe.context_exchange", "on"), ("slimpipe.exchange_granularity", 16))
AGAIN = (("slimpipe.keep_attention_output", False),)
OUTPUT = (("slimpipe.vocab_parallel", "output"),)
BOTH = (("slimpipe.vocab_parallel", "both"),)
# Of each group the first is the truth: no pipeline at all.
GROUPS = {
    "one data rank": [
        Layout(pp=1),
        Layout("1F1B"),
        Layout("SlimPipe"),
        Layout("InterleavedSlimPipe"),
        Layout("InterleavedSlimPipe", more=THREE_STAGES),
        Layout("SlimPipe", more=FULL),
        Layout("SlimPipe", more=SELECTIVE),
        Layout("SlimPipe", more=HELPED),
        Layout("InterleavedSlimPipe", more=HELPED + FULL + AGAIN),
        Layout("SlimPipe", more=OUTPUT + HELPED),
        Layout("InterleavedSlimPipe", more=BOTH + FULL),
    ],
    "fully sharded data": [
        Layout(pp=1, dp=2),
        Layout("1F1B", dp=2),
        Layout("SlimPipe", dp=2),
        Layout("InterleavedSlimPipe", dp=2, more=SELECTIVE),
        Layout("SlimPipe", dp=2, more=HELPED),
        Layout("SlimPipe", dp=2, more=OUTPUT),
        Layout("SlimPipe", dp=2, more=BOTH),
    ],
    "tensor parallel": [
        Layout(pp=1, tp=2),
        Layout("1F1B", tp=2),
        Layout("SlimPipe", tp=2),
        Layout("InterleavedSlimPipe", tp=2, more=FULL),
        Layout("SlimPipe", tp=2, more=HELPED + SELECTIVE),
        Layout("SlimPipe", tp=2, more=OUTPUT),
        Layout("InterleavedSlimPipe", tp=2, more=BOTH + HELPED),
    ],
    "hybrid sharded data": [Layout(pp=1, dp=2, replicate=2), Layout("SlimPipe", dp=2, replicate=2)],
    "sharded data and tensor parallel": [Layout(pp=1, dp=2, tp=2), Layout("SlimPipe", dp=2, tp=2, more=SELECTIVE)],
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layouts", GROUPS.values(), ids=GROUPS.keys())
def test_layouts_train_alike(tmp_path: Path, data: dict, seed: Path, layouts: list[Layout]) -> None:
    # Four and eight ranks on a small machine: fewer steps where the parts were compared over ten already.
    num_steps = NUM_STEPS if max(layout.num_ranks for layout in layouts) <= 4 and layouts[0].num_ranks <= 2 else 4
    settings = {
        **data,
        "training.steps": num_steps,
        "training.seq_len": 256 if layouts[0].num_ranks == 1 else 128,  # 256: some sequences hold two documents
        "checkpoint.initial_load_path": seed,
        "checkpoint.load_only": True,
    }
    runs = train_all(tmp_path, layouts, **settings)
    truth = runs[layouts[0]]
    assert len(truth) == num_steps
    assert truth[-1][0] < truth[0][0] - 0.02 * num_steps, "the loss does not fall"
    for index, (layout, history) in enumerate(runs.items()):
        assert_equal_runs(history, truth, layout)
        if set(HELPED) <= set(layout.more):
            sent = [record["exchange_bytes"] for record in read_records(tmp_path / str(index))]
            assert min(sent) > 0, f"{layout}: the ranks sent {sent} bytes to help one another"


def four_steps(data: dict, seed: Path) -> dict[str, object]:
    return {**data, "checkpoint.initial_load_path": seed, "lr_scheduler.total_steps": 4, "training.steps": 4}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, data: dict, seed: Path) -> list[tuple[float, float]]:
    """Four steps without a pipeline and without a checkpoint between them."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return train(folder, Layout(pp=1), **four_steps(data, seed), **{"checkpoint.load_only": True})


SAVED_BY = ("SlimPipe", "InterleavedSlimPipe", "1F1B")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, data: dict, seed: Path) -> dict[str, Path]:
    """Checkpoints of everything after two steps, by the schedule that wrote them."""
    folder = tmp_path_factory.mktemp("saved")
    saving = {"checkpoint.interval": 2, "checkpoint.last_save_model_only": False, "training.steps": 2}
    train_all(folder, [Layout(name) for name in SAVED_BY], **{**four_steps(data, seed), **saving})
    return {name: folder / str(index) / "checkpoint" for index, name in enumerate(SAVED_BY)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("saved_by", SAVED_BY)
def test_a_checkpoint_of_one_continues_in_the_others(
    tmp_path: Path, data: dict, seed: Path, uninterrupted: list, saved: dict[str, Path], saved_by: str
) -> None:
    """Model, optimizer and data position: steps 3 and 4 are the same whoever saved step 2 and whoever loads it."""
    layouts = [Layout("SlimPipe"), Layout("InterleavedSlimPipe"), Layout("1F1B"), Layout(pp=1)]
    for index in range(len(layouts)):
        shutil.copytree(saved[saved_by], tmp_path / str(index) / "checkpoint")
    settings = {**four_steps(data, seed), "checkpoint.load_only": True}
    for layout, history in train_all(tmp_path, layouts, **settings).items():
        assert_equal_runs(history, uninterrupted[2:], f"{layout}, saved by {saved_by}")
