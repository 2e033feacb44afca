"""Checkpoints, HF export and validation where all ranks share the vocabulary, and it divides by no number of ranks."""

from __future__ import annotations

import re
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torchtitan.components.loss import CrossEntropyLoss

from slimpipe.torchtitan.config import SlimPipeTrainerConfig
from slimpipe.torchtitan.config_registry import llama3_debug
from tests.integration.test_torchtitan import (
    BOTH,
    CONFIG,
    FULL,
    NUM_AT_A_TIME,
    OUTPUT,
    Layout,
    assert_equal_runs,
    data,  # noqa: F401  (a fixture)
    run,
    train,
    train_all,
)

pytestmark = pytest.mark.timeout(900)  # whichever runs first makes the checkpoints


class Continued(NamedTuple):
    """A run that began with a checkpoint."""

    history: list[tuple[float, float]]
    validation: float
    export: Path


VOCAB_SIZE = 2049  # over 4 ranks: 513, 513, 513, 510; over 2, then 2 of FSDP: 513, 512, 512, 512


def odd_vocabulary() -> SlimPipeTrainerConfig:
    """The debug model with one token more."""
    config = llama3_debug()
    assert config.model_spec is not None
    model = config.model_spec.model
    model.vocab_size = model.lm_head.out_features = model.tok_embeddings.num_embeddings = VOCAB_SIZE
    config.loss = CrossEntropyLoss.Config(global_vocab_size=VOCAB_SIZE)
    return config


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The usual configuration, for the model of `odd_vocabulary`."""
    path = tmp_path_factory.mktemp("config") / "odd.toml"
    text = CONFIG.read_text().replace('flavor = "debugmodel"', f'config = "{__name__}:odd_vocabulary"')
    assert "odd_vocabulary" in text
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, data: dict, config: Path) -> dict[str, object]:  # noqa: F811
    """Settings of all runs, which start from one checkpoint and share a learning rate."""
    folder = tmp_path_factory.mktemp("seed")
    run(folder, 1, {**data, **Layout(pp=1).overrides(), "checkpoint.create_seed_checkpoint": True}, config=config)
    return {**data, "checkpoint.initial_load_path": folder / "checkpoint" / "step-0", "lr_scheduler.total_steps": 4}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, settings: dict, config: Path) -> dict[str, Path]:
    """Checkpoints of everything after two steps on two data ranks, by who wrote them: "stock" or "shared"."""
    folder = tmp_path_factory.mktemp("saved")
    layouts = [Layout("1F1B", dp=2), Layout("SlimPipe", dp=2, more=BOTH)]
    saving = {"checkpoint.interval": 2, "checkpoint.last_save_model_only": False, "training.steps": 2}
    stock, shared = train_all(folder, layouts, config=config, **settings, **saving).values()
    assert_equal_runs(shared, stock, layouts[1])
    return {name: folder / str(index) / "checkpoint" / "step-2" for index, name in enumerate(("stock", "shared"))}


def read_checkpoint(path: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """Its tensors: parameters, and what the optimizer keeps of each."""
    dcp_to_torch_save(path, scratch)
    whole = torch.load(scratch, weights_only=False)
    optimizer = {f"optimizer.{name}": value for name, value in whole.pop("optimizer", {}).items()}
    return {name: value for name, value in {**whole, **optimizer}.items() if isinstance(value, torch.Tensor)}


def assert_equal_tensors(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.shape == theirs[name].shape, name
        error = (tensor - theirs[name]).double().norm() / theirs[name].double().norm().clamp(min=1e-12)
        assert error <= 1e-5, f"{name}: {error}"


def test_a_checkpoint_is_what_the_stock_layout_saves(saved: dict[str, Path], tmp_path: Path) -> None:
    stock, shared = (read_checkpoint(saved[name], tmp_path / name) for name in ("stock", "shared"))
    for name in ("lm_head.weight", "tok_embeddings.weight"):
        assert shared[name].shape == (VOCAB_SIZE, 256)
        assert shared[f"optimizer.state.{name}.exp_avg_sq"].abs().max() > 0
    assert_equal_tensors(shared, stock)


def test_every_rank_begins_with_rows_of_its_own(settings: dict, config: Path, tmp_path: Path) -> None:
    """A fresh start: the distributions are the model's, and no rows are equal to another rank's."""
    layout = Layout("SlimPipe", tp=2, more=BOTH)
    train(tmp_path, layout, config=config, **{**settings, "checkpoint.initial_load_path": None, "training.steps": 1})
    model = read_checkpoint(tmp_path / "checkpoint" / "step-1", tmp_path / "whole")
    for name, deviation in (("lm_head.weight", 256**-0.5), ("tok_embeddings.weight", 1.0)):
        assert 0.95 < model[name].std() / deviation < 1.05
        first_rows = torch.stack([model[name][first : first + 8] for first in range(0, VOCAB_SIZE - 8, 513)])
        assert (first_rows[:, None] - first_rows).abs().mean((2, 3)).fill_diagonal_(1).min() > 0.5 * deviation


VALIDATE = {"validator.enable": True, "validator.steps": 2, "validator.freq": 4}


NOT_SHARED = ("stock", Layout(pp=1))
CONTINUED = [
    ("shared", Layout("SlimPipe", pp=4, more=BOTH)),
    ("shared", Layout(pp=1)),
    ("shared", Layout("1F1B")),
    ("stock", Layout("SlimPipe", tp=2, more=BOTH + FULL)),
    ("stock", Layout("InterleavedSlimPipe", more=OUTPUT)),
]


@pytest.fixture(scope="module")
def continued(
    tmp_path_factory: pytest.TempPathFactory,
    settings: dict,
    saved: dict[str, Path],
    config: Path,
) -> dict[tuple[str, Layout], Future[Continued]]:
    """Each checkpoint continued with steps 3 and 4 on one data rank, with validation and an HF export at the end."""

    def load(folder: Path, saved_by: str, layout: Layout) -> Continued:
        history = train(
            folder,
            layout,
            config=config,
            **{
                **settings,
                "checkpoint.initial_load_path": saved[saved_by],
                "checkpoint.initial_load_model_only": False,
                "checkpoint.exclude_from_loading": "dataloader",  # it was for two data ranks
                "checkpoint.last_save_in_hf": True,
                "training.steps": 4,
                "validator.dataloader.dataset": "c4_test",
                "validator.dataloader.dataset_path": settings["dataloader.dataset_path"],
                **VALIDATE,
            },
        )
        found = [re.search(r"validate step:\s+4 .*?loss:\s+([\d.]+)", log.read_text()) for log in folder.glob("*.log")]
        (validation,) = {float(match[1]) for match in found if match} - {-1.0}
        return Continued(history, validation, folder / "checkpoint" / "step-4")

    with ThreadPoolExecutor(NUM_AT_A_TIME) as pool:
        return {run: pool.submit(load, tmp_path_factory.mktemp("continued"), *run) for run in (NOT_SHARED, *CONTINUED)}


@pytest.fixture(scope="module")
def truth(continued: dict[tuple[str, Layout], Future[Continued]]) -> Continued:
    """Nothing is shared, and there is no pipeline."""
    return continued[NOT_SHARED].result()


@pytest.mark.parametrize(
    ("saved_by", "layout"),
    CONTINUED,
    ids=lambda value: value if isinstance(value, str) else f"{value.schedule}-pp{value.pp}-tp{value.tp}",
)
def test_a_checkpoint_continues_in_other_layouts(
    continued: dict[tuple[str, Layout], Future[Continued]], truth: Continued, saved_by: str, layout: Layout
) -> None:
    """Next losses, gradient norms, validation loss and HF export are those of the stock model."""
    mine = continued[saved_by, layout].result()
    assert_equal_runs(mine.history, truth.history, layout)
    assert abs(mine.validation - truth.validation) <= 1.01e-4  # as many digits are printed
    assert_equal_tensors(read_export(mine.export), read_export(truth.export))


def read_export(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert tensors["lm_head.weight"].shape == tensors["model.embed_tokens.weight"].shape == (VOCAB_SIZE, 256)
    return tensors


def test_an_export_is_loaded(truth: Continued, settings: dict, config: Path, tmp_path: Path) -> None:
    layouts = [Layout(pp=1), Layout("SlimPipe", more=BOTH)]
    loading = {
        "checkpoint.initial_load_path": truth.export,
        "checkpoint.initial_load_in_hf": True,
        "checkpoint.load_only": True,
        "training.steps": 1,
    }
    stock, shared = train_all(tmp_path, layouts, config=config, **{**settings, **loading}).values()
    assert_equal_runs(shared, stock, layouts[1])
    assert stock[0][0] < truth.history[-1][0] + 0.5, "the export was not loaded"
