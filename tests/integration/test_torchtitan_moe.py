"""Experts and latent attention in the real trainer: every schedule trains alike, down to how experts are balanced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import derive
from torchtitan.models import deepseek_v3, qwen3
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.model_spec import ModelSpec

from slimpipe.torchtitan.config import SlimPipeTrainerConfig
from slimpipe.torchtitan.config_registry import llama3_debug
from tests.integration.test_torchtitan import (
    BOTH,
    CONFIG,
    FULL,
    HELPED,
    Layout,
    assert_equal_runs,
    data,  # noqa: F401  (a fixture)
    read_records,
    run,
    train_all,
)

NUM_STEPS = 5


class WideExperts(GroupedExperts):
    """torchtitan's experts, in float32: by themselves they multiply in bfloat16, whatever they are given."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        with mock.patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor):
            return GroupedExperts.forward(self, *args)


def small(spec: ModelSpec) -> SlimPipeTrainerConfig:
    """The demo's configuration for the first four layers of a model, with eight small experts where it has experts."""
    model = spec.model
    del model.layers[4:]
    for layer in model.layers:
        if (moe := layer.moe) is None:
            continue
        experts, dispatcher = moe.routed_experts.inner_experts, moe.routed_experts.token_dispatcher
        moe.num_experts = moe.router.num_experts = moe.router.gate.out_features = dispatcher.num_experts = 8
        moe.router.top_k = dispatcher.top_k = 2
        experts.num_experts, experts.hidden_dim = 8, 64
        moe.routed_experts.inner_experts = derive(experts, WideExperts.Config)
    config = llama3_debug()
    config.model_spec = spec
    config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
    return config


def small_qwen3() -> SlimPipeTrainerConfig:
    """Grouped-query attention; experts in every layer."""
    return small(qwen3.model_registry("debugmodel_moe"))


def small_deepseek_v3() -> SlimPipeTrainerConfig:
    """Latent attention with heads of 192 and 128; experts in all layers but the first, and a shared one."""
    return small(deepseek_v3.model_registry("debugmodel"))


def expert_biases(folder: Path) -> dict[str, torch.Tensor]:
    """What balanced the experts of each layer in the last step, from the checkpoint of a run."""
    file = folder / "model.pt"
    dcp_to_torch_save(folder / "checkpoint" / f"step-{NUM_STEPS}", file)
    return {name: tensor for name, tensor in torch.load(file).items() if name.endswith("expert_bias_E")}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", [small_qwen3, small_deepseek_v3], ids=lambda model: model.__name__)
def test_experts_train_alike(
    tmp_path: Path,
    data: dict,  # noqa: F811
    model: Callable[[], SlimPipeTrainerConfig],
) -> None:
    config = tmp_path / "config.toml"
    choice = 'name = "llama3"\nflavor = "debugmodel"'
    assert choice in CONFIG.read_text()
    config.write_text(CONFIG.read_text().replace(choice, f'config = "{__name__}:{model.__name__}"'))
    seed = tmp_path / "seed"
    run(seed, 1, {**data, **Layout(pp=1).overrides(), "checkpoint.create_seed_checkpoint": True}, config=config)
    layouts = [
        Layout(pp=1),
        Layout("1F1B"),
        Layout("SlimPipe", more=HELPED),
        Layout("InterleavedSlimPipe", more=FULL + BOTH),
    ]
    settings = {
        **data,
        "training.steps": NUM_STEPS,
        "optimizer.lr": 2e-4,
        "checkpoint.initial_load_path": seed / "checkpoint" / "step-0",
    }
    runs = train_all(tmp_path, layouts, config=config, **settings)
    truth, biases = runs[layouts[0]], expert_biases(tmp_path / "0")
    assert len(truth) == NUM_STEPS
    assert len(biases) == sum(layer.moe is not None for layer in model().model_spec.model.layers)
    assert all(bias.abs().max() > 0 for bias in biases.values())
    for index, (layout, history) in enumerate(runs.items()):
        assert_equal_runs(history, truth, layout)
        balanced = expert_biases(tmp_path / str(index))
        assert balanced.keys() == biases.keys()
        for name, bias in biases.items():
            assert torch.equal(balanced[name], bias), f"{layout}: {name} is {balanced[name]}, not {bias}"
    assert min(record["exchange_bytes"] for record in read_records(tmp_path / "2")) > 0
