"""Which models can be sliced, and what their experts must not do."""

from dataclasses import dataclass

import pytest
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import derive
from torchtitan.models import deepseek_v3, gpt_oss, muse_glimmer, qwen3
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.common.moe import MoE, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import HybridEPTokenDispatcher

from slimpipe.torchtitan import config as config_module
from slimpipe.torchtitan.config import ConfigError, prepare
from slimpipe.torchtitan.config_registry import llama3_debug
from slimpipe.torchtitan.degrees import check_num_ranks, product_of_degrees
from slimpipe.torchtitan.findings import find
from slimpipe.torchtitan.rules import broken_rules
from slimpipe.torchtitan.shape import head_sizes
from tests.unit.torchtitan.test_config import changed, refusal

SPECS = {
    "qwen3": lambda: qwen3.model_registry("debugmodel_moe"),
    "deepseek_v3": lambda: deepseek_v3.model_registry("debugmodel"),
}


def with_spec(spec, **sections):
    """The demo's configuration with another model."""
    config = changed(llama3_debug(), **sections)
    config.model_spec, config.loss = spec, CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
    return config


def with_experts(change, **sections):
    config = with_spec(SPECS["qwen3"](), **sections)
    change(config.model_spec.model.layers[1])
    return config


@pytest.mark.parametrize(("name", "sizes"), [("qwen3", (16, 8, 128, 128)), ("deepseek_v3", (16, 16, 192, 128))])
@pytest.mark.parametrize("schedule", ["SlimPipe", "1F1B"])
def test_models_of_experts_and_latent_attention_pass(name, sizes, schedule):
    config = with_spec(SPECS[name](), parallelism__pipeline_parallel_schedule=schedule)
    assert broken_rules(config) == []
    assert head_sizes(config) == sizes
    prepared = prepare(config)
    prepared.model_spec.model.update_from_config(config=prepared)  # sharding finds all that it looks for
    assert prepared.model_spec.post_optimizer_build_fn is config.model_spec.post_optimizer_build_fn


def test_check_shows_kernels_of_latent_attention(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(
        '[model]\nname = "deepseek_v3"\nflavor = "debugmodel"\n[parallelism]\npipeline_parallel_degree = 2\n'
        'pipeline_parallel_schedule = "SlimPipe"\n[training]\ndisable_cuda_graphs = true\n'
        'mixed_precision_param = "float32"\n'
    )
    findings = find(str(path))
    assert not findings.errors and "proven" in findings.program
    sharded = ["--parallelism.expert_parallel_degree=2", "--parallelism.data_parallel_shard_degree=2"]
    if findings.device == "CPU":
        assert "on this machine: parallelism.expert_parallel_degree = 2: gloo" in find(str(path), sharded).errors[0]
    assert findings.kernel == ("torch_cpu_flash" if findings.device == "CPU" else findings.kernel) is not None


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            lambda: gpt_oss.model_registry("debugmodel"),
            "model.name = 'gpt_oss': the attention of layer 0 is not causal",
        ),
        (
            lambda: muse_glimmer.model_registry("debugmodel", attn_backend="flex"),
            "model.name = 'muse_glimmer': the attention of layer 0 is not causal",
        ),
        (
            lambda: deepseek_v3.model_registry("debugmodel", num_mtp_layers=1),
            "model.flavor = 'debugmodel': it predicts several tokens with 1 layers more",
        ),
    ],
)
def test_other_models_are_refused(spec, said):
    assert broken_rules(with_spec(spec()))[0].startswith(said)


def test_models_that_torchtitan_splits_otherwise_are_refused():
    spec = SPECS["qwen3"]()
    spec.pipelining_fn = muse_glimmer.model_registry("debugmodel").pipelining_fn
    assert "pipeline_muse_glimmer makes its stages, and SlimPipe makes them as" in refusal(with_spec(spec))
    assert broken_rules(with_spec(spec, parallelism__pipeline_parallel_schedule="1F1B")) == []


def test_what_is_no_text_decoder_is_refused():
    config = with_spec(SPECS["qwen3"]())

    @dataclass(kw_only=True, slots=True)
    class Seeing(type(config.model_spec.model)):
        vision_encoder: object = "a vision encoder"

    config.model_spec.model = derive(config.model_spec.model, Seeing)
    assert "it has a vision_encoder; SlimPipe trains on text only so far" in refusal(config)
    config.model_spec.model.vision_encoder = None
    assert broken_rules(config) == []
    config.model_spec.model.layers = []
    assert "it has no layers of a decoder" in broken_rules(config)[0]


def test_experts_that_see_more_than_a_token_are_refused():
    @dataclass(kw_only=True, slots=True)
    class Balanced(TokenChoiceTopKRouter.Config):
        pass

    @dataclass(kw_only=True, slots=True)
    class Other(MoE.Config):
        pass

    def other_router(layer):
        layer.moe.router = derive(layer.moe.router, Balanced)

    def other_experts(layer):
        layer.moe = derive(layer.moe, Other)

    for change, said in ((other_router, "Balanced, not plain"), (other_experts, "Other with TokenChoice")):
        error = refusal(with_experts(change))
        assert error.startswith("model.name = 'qwen3': the experts of layer 1 are") and said in error
        assert broken_rules(with_experts(change, parallelism__pipeline_parallel_schedule="1F1B")) == []


@pytest.mark.parametrize(("factor", "legal"), [(0.5, False), (1.0, True), (None, True)])
def test_tokens_over_a_capacity_must_not_be_dropped(factor, legal):
    def drop(layer):
        layer.moe.routed_experts.token_dispatcher = HybridEPTokenDispatcher.Config(
            num_experts=64, top_k=8, non_blocking_capacity_factor=factor
        )

    config = with_experts(drop)
    if legal:
        assert broken_rules(config) == []
    else:
        assert "layers.1.moe.routed_experts.token_dispatcher.non_blocking_capacity_factor = 0.5" in refusal(config)


def test_experts_dealt_out_in_turn_need_whole_turns():
    forced = {"debug__moe_force_load_balance": True}
    assert (
        broken_rules(with_experts(lambda layer: None, training__seq_len=256, **forced)) == []
    )  # 32 x 8: 4 turns of 64
    config = with_experts(lambda layer: None, training__seq_len=96, **forced)
    assert "slices of 12 tokens x 8 experts end inside a turn; nearest legal value: false" in refusal(config)
    assert broken_rules(changed(config, parallelism__pipeline_parallel_schedule="1F1B")) == []


def test_expert_parallelism(monkeypatch):
    two = {"parallelism__expert_parallel_degree": 2}
    config = with_experts(lambda layer: None, **two)
    assert broken_rules(config) == []
    monkeypatch.setattr(config_module, "use_cpu", lambda: False)
    prepare(config)
    monkeypatch.setattr(config_module, "use_cpu", lambda: True)
    with pytest.raises(ConfigError, match="gloo cannot send unequal numbers of tokens between CPUs"):
        prepare(config)
    config = with_experts(lambda layer: None, parallelism__expert_parallel_degree=4)
    assert "tensor_parallel_degree = 2; nearest legal value: 2" in refusal(config)
    left = changed(config, parallelism__data_parallel_shard_degree=-1)
    assert broken_rules(left) == []
    num_others = product_of_degrees(left.parallelism)
    check_num_ranks(left.parallelism, 4 * num_others)
    with pytest.raises(ValueError, match=r"expert_parallel_degree = 4: it must divide the 2 ranks .*legal value: 2"):
        check_num_ranks(left.parallelism, 2 * num_others)
    three = changed(left, parallelism__expert_parallel_degree=3)
    assert "it must divide the 64 experts of layer 0; nearest legal value: 2" in refusal(three)
    no_sequence_parallel = {"parallelism__enable_sequence_parallel": False, "parallelism__tensor_parallel_degree": 2}
    config = with_experts(lambda layer: None, training__seq_len=8 * 33, **no_sequence_parallel)
    assert broken_rules(config) == []
    assert "times parallelism.tensor_parallel_degree = 2" in refusal(changed(config, **two))
    with pytest.raises(ValueError, match=r"parallelism\.expert_parallel_degree = 0: it must be at least 1"):
        changed(with_experts(lambda layer: None), parallelism__expert_parallel_degree=0).__post_init__()
