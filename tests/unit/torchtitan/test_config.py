"""The slimpipe section, the rules between sections, and what prepare() makes of a configuration."""

import dataclasses
import functools
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss, MSELoss
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import ConfigManager
from torchtitan.models import llama3
from torchtitan.models.common import Linear
from torchtitan.models.common.attention import BaseAttention, VarlenAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from slimpipe.options import SlimPipeOptions
from slimpipe.torchtitan import rules
from slimpipe.torchtitan.attention import TitanSliceAttention
from slimpipe.torchtitan.config import ConfigError, SlimPipeSection, check, prepare, with_slimpipe
from slimpipe.torchtitan.config_registry import llama3_8b_128k, llama3_debug
from slimpipe.torchtitan.optimizer import SlimPipeOptimizers
from slimpipe.torchtitan.pipelining import pipeline_llm
from slimpipe.torchtitan.rules import broken_rules
from slimpipe.torchtitan.toml import load_toml
from slimpipe.torchtitan.trainer import SlimPipeTrainer

CONFIGS = Path(__file__).parents[3] / "torchtitan_configs"


def changed(config, **sections):
    """`config` with `section__field` values."""
    for path, value in sections.items():
        section, name = path.split("__")
        setattr(config, section, dataclasses.replace(getattr(config, section), **{name: value}))
    return config


def broken(**sections):
    with pytest.raises(ConfigError) as caught:
        check(changed(llama3_debug(), **sections))
    return list(caught.value.errors)


def test_section_becomes_options():
    values = {
        "kernel": "reference",
        "keep_attention_output": False,
        "context_exchange": "on",
        "exchange_granularity": 1,
        "exchange_max_slices": 0,
        "attention_flops": 1e14,
        "link_bandwidth": 5e10,
        "link_latency": 2e-5,
        "measure_memory": True,
        "record_times": True,
    }
    assert SlimPipeSection(**values).options() == SlimPipeOptions(**values)
    # torchtitan's models leave no choice in the other two.
    names = {field.name for field in dataclasses.fields(SlimPipeOptions)}
    assert names - values.keys() == {"seq_dim", "sliced_kwargs"}
    assert SlimPipeSection().options() == SlimPipeOptions()


def test_stages_per_rank():
    assert SlimPipeSection().num_stages_per_rank("SlimPipe") == 1
    assert SlimPipeSection().num_stages_per_rank("InterleavedSlimPipe") == 2
    assert SlimPipeSection(stages_per_rank=3).num_stages_per_rank("InterleavedSlimPipe") == 3


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"num_slices": 0}, ValueError, "slimpipe.num_slices = 0: it must be at least 1; nearest legal value: 1"),
        ({"num_slices": True}, TypeError, "slimpipe.num_slices = True: it must be an int"),
        (
            {"stages_per_rank": 0},
            ValueError,
            "slimpipe.stages_per_rank = 0: it must be at least 1; nearest legal value: 1",
        ),
        ({"stages_per_rank": "2"}, TypeError, "slimpipe.stages_per_rank = '2': it must be an int"),
        (
            {"kernel": "flash"},
            ValueError,
            "slimpipe.kernel = 'flash': it must be one of .* nearest legal value: 'flash_attn'",
        ),
        ({"measure_memory": 1}, TypeError, "slimpipe.measure_memory got 1"),
        (
            {"context_exchange": "yes"},
            ValueError,
            "slimpipe.context_exchange = 'yes': it must be one of auto, on, off; nearest legal value: ",
        ),
        (
            {"exchange_granularity": 0},
            ValueError,
            "slimpipe.exchange_granularity = 0: it must be at least one token; nearest legal value: 1",
        ),
        (
            {"vocab_parallel": "input"},
            ValueError,
            "slimpipe.vocab_parallel = 'input': it must be one of none, output, both; nearest legal value: 'output'",
        ),
        ({"vocab_parallel": True}, TypeError, "slimpipe.vocab_parallel = True: it must be a str"),
        ({"exchange_max_slices": "all"}, TypeError, "slimpipe.exchange_max_slices got 'all'"),
        ({"link_latency": 0.0}, ValueError, "slimpipe.link_latency = 0.0: it must be positive and finite, or None"),
    ],
)
def test_section_refuses(values, error, message):
    with pytest.raises(error, match=message):
        SlimPipeSection(**values)


@pytest.mark.parametrize("config", [llama3_debug, llama3_8b_128k])
def test_registry_passes_the_rules(config):
    assert broken_rules(config()) == []


def test_toml_and_registry_agree():
    for file, function in (("llama3_debug_cpu", llama3_debug), ("llama3_8b_128k", llama3_8b_128k)):
        ours, registry = load_toml(str(CONFIGS / f"{file}.toml")), function()
        assert (ours.model_spec.name, ours.model_spec.flavor) == (registry.model_spec.name, registry.model_spec.flavor)
        for config in (ours, registry):
            config.model_spec = None  # holds closures, which are never equal
        assert ours == registry


INTERLEAVED = "InterleavedSlimPipe"


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        (
            {"training__seq_len": 2047},
            "training.seq_len = 2047: it must be a positive multiple of slimpipe.num_slices = 8",
        ),
        ({"training__seq_len": 2043}, "nearest legal value: 2040"),
        ({"training__seq_len": 3}, "nearest legal value: 8"),
        (
            {"training__seq_len": 24, "parallelism__tensor_parallel_degree": 2},
            "slimpipe.num_slices = 8 times parallelism.tensor_parallel_degree = 2, so that all slices are equal; "
            "nearest legal value: 32",
        ),
        (
            {"slimpipe__num_slices": 1},
            "slimpipe.num_slices = 1: it must be at least .*pipeline_parallel_degree = 2; nearest legal value: 2",
        ),
        (
            {"training__local_batch_size": 3, "parallelism__pipeline_parallel_microbatch_size": 2},
            "training.local_batch_size = 3: it must be a positive multiple of",
        ),
        ({"slimpipe__stages_per_rank": 2}, "schedule SlimPipe has one stage per rank; nearest legal value: 1"),
        (
            {"slimpipe__stages_per_rank": 5, "parallelism__pipeline_parallel_schedule": INTERLEAVED},
            "slimpipe.stages_per_rank = 5: 2 ranks x 5 = 10 stages are more than .* nearest legal value: 4",
        ),
        (
            {
                "parallelism__module_fqns_per_model_part": [["norm"]] * 3,
                "parallelism__pipeline_parallel_schedule": INTERLEAVED,
            },
            "module_fqns_per_model_part has 3 entries: .* 2 ranks x 2 stages per rank = 4",
        ),
        (
            {"parallelism__pipeline_parallel_layers_per_stage": 4},
            "is set by slimpipe.stages_per_rank; remove this setting",
        ),
        (
            {"parallelism__pipeline_parallel_schedule_csv": "a.csv"},
            "is computed, not read from a file; nearest legal value: ''",
        ),
        (
            {"parallelism__pipeline_parallel_schedule": "slimpipe"},
            "no such schedule; nearest legal value: 'SlimPipe'; known: ",
        ),
        (
            {"parallelism__pipeline_parallel_schedule": "Interleaved"},
            "no such schedule; nearest legal value: 'Interleaved1F1B'",
        ),
        ({"parallelism__context_parallel_degree": 2}, "context parallelism is not supported .* nearest legal value: 1"),
        ({"parallelism__spmd_backend": "full_dtensor"}, "nearest legal value: 'spmd_types'"),
        ({"parallelism__spmd_backend": "partial_dtensor"}, "nearest legal value: 'spmd_types'"),
        ({"compile__enable": True}, r"torch.compile cannot trace the slice attention; nearest legal value: \['loss'\]"),
        ({"comm__mode": "local_tensor"}, "nearest legal value: 'default'"),
        ({"checkpoint__create_seed_checkpoint": True}, "it needs checkpoint.enable = true"),
        (
            {"slimpipe__vocab_parallel": "output", "parallelism__pipeline_parallel_schedule": "1F1B"},
            "slimpipe.vocab_parallel = 'output': parallelism.pipeline_parallel_schedule = '1F1B' cannot share the "
            "vocabulary; nearest legal value: 'none', or a schedule of SlimPipe, InterleavedSlimPipe",
        ),
        (
            {"slimpipe__vocab_parallel": "output", "parallelism__module_fqns_per_model_part": [["norm"], ["lm_head"]]},
            "module_fqns_per_model_part names 'lm_head', which all ranks share under .* remove it there",
        ),
        (
            {
                "slimpipe__vocab_parallel": "both",
                "slimpipe__stages_per_rank": 4,
                "parallelism__pipeline_parallel_schedule": INTERLEAVED,
            },
            "= 8 stages are more than the model's 6 layers can fill; nearest legal value: 3",
        ),
    ],
)
def test_rules_between_sections(sections, error):
    (found,) = broken(**sections)
    assert re.search(error, found)


def test_all_broken_rules_at_once():
    assert len(broken(training__seq_len=2047, slimpipe__num_slices=1, compile__enable=True)) == 2
    assert len(broken(training__seq_len=2047, compile__enable=True, parallelism__context_parallel_degree=2)) == 3


def test_torch_schedules_and_compiled_loss_pass():
    for name in ("1F1B", "Interleaved1F1B", "GPipe", "ZBVZeroBubble", "1f1b"):
        config = changed(llama3_debug(), parallelism__pipeline_parallel_schedule=name, training__seq_len=2047)
        assert broken_rules(config) == []
    config = changed(llama3_debug(), compile__enable=True)
    assert broken_rules(changed(config, compile__components=["loss"])) == []


def test_offload_needs_an_accelerator(monkeypatch):
    for on_cpu, errors in ((True, 1), (False, 0)):
        monkeypatch.setattr(rules, "use_cpu", lambda on_cpu=on_cpu: on_cpu)
        assert len(broken_rules(changed(llama3_debug(), training__enable_cpu_offload=True))) == errors


def test_slices_do_not_matter_without_pipeline():
    config = changed(llama3_debug(), parallelism__pipeline_parallel_degree=1, training__seq_len=2047)
    assert broken_rules(config) == []


def with_model(change):
    config = llama3_debug()
    change(config.model_spec.model)
    return config


def refusal(config):
    with pytest.raises(ConfigError) as caught:
        check(config)
    (error,) = caught.value.errors
    return error


def test_models_that_cannot_be_sliced():
    config = llama3_debug()
    config.model_spec = llama3.model_registry("1B")
    assert "model.flavor = '1B': input embedding and output layer share one weight" in refusal(config)

    def no_attention(model):
        model.layers[1].attention = None

    def other_attention(model):
        model.layers[2].attention.inner_attention = Linear.Config(in_features=1, out_features=1)

    def dropout(model):
        @dataclass(kw_only=True, slots=True)
        class Norm(type(model.norm)):
            dropout: float = 0.1

        model.norm = Norm(normalized_shape=256)

    assert "the attention of layer 1 is not causal" in refusal(with_model(no_attention))
    assert "the attention of layer 2 is not causal" in refusal(with_model(other_attention))
    assert refusal(with_model(dropout)) == "model: norm.dropout = 0.1: dropout is not supported; nearest legal value: 0"
    config.model_spec = None
    assert refusal(config).startswith("model: no model was chosen")


def test_windows_of_varlen_attention_are_kept():
    config = llama3_debug()
    config.model_spec = llama3.model_registry("debugmodel", attn_backend="varlen")
    layers = config.model_spec.model.layers
    layers[1].attention.inner_attention = VarlenAttention.Config(window_size=(127, 0))  # before the query's own token
    prepared = prepare(config).model_spec.model.layers
    assert [layer.attention.inner_attention.window for layer in prepared[:3]] == [None, 128, None]
    for size in ((-1, -1), (127, 1)):
        layers[0].attention.inner_attention = VarlenAttention.Config(window_size=size)
        assert "the attention of layer 0 is not causal" in refusal(config)


def test_sequences_may_be_longer_than_the_flavor_s(caplog):
    prepare(llama3_debug())
    assert "rotary" not in caplog.text
    config = prepare(changed(llama3_debug(), training__seq_len=262144))
    assert "training.seq_len = 262144: the model's rotary embedding is configured for 131072 tokens" in caplog.text
    config.model_spec.model.update_from_config(config=config)  # what torchtitan's trainer begins with
    assert config.model_spec.model.max_seq_len == 262144
    assert llama3_debug().model_spec.model.max_seq_len == 131072


def sharing(change=lambda model: None, **sections):
    return changed(with_model(change), slimpipe__vocab_parallel="both", **sections)


def test_vocabularies_that_cannot_be_shared():
    def small(model):
        model.tok_embeddings.num_embeddings = 5

    def other_matrix(model):
        @dataclass(kw_only=True, slots=True)
        class Quantized(Linear.Config):
            pass

        model.lm_head = Quantized(in_features=256, out_features=2048)

    def bias(model):
        model.lm_head.bias = True

    four_ranks = {"parallelism__pipeline_parallel_degree": 2, "parallelism__tensor_parallel_degree": 2}
    assert "tok_embeddings has 5 rows, cut over" in refusal(sharing(small, **four_ranks))
    assert broken_rules(sharing(small)) == []
    for change in (other_matrix, bias):
        assert "lm_head of the model is not a plain Linear.Config without bias" in refusal(sharing(change))


def test_a_shared_vocabulary_needs_cross_entropy_and_row_wise_optimizers():
    config = sharing()
    config.loss = ChunkedLossWrapper.Config(loss_fn=config.loss)
    assert broken_rules(config) == []
    config.loss = MSELoss.Config()
    assert "the loss is MSELoss.Config, not plain CrossEntropyLoss; nearest legal value: 'none'" in refusal(config)

    def groups(*patterns):
        return [ParamGroupConfig(pattern=pattern, optimizer_name=name) for pattern, name in patterns]

    config = sharing(optimizer__param_groups=groups(("lm_head|tok_emb", "AdamW"), (".*", "DistMuon")))
    assert broken_rules(config) == []
    config = sharing(optimizer__param_groups=groups(("lm_head", "AdamW"), (".*", "DistMuon")))
    assert "optimizer DistMuon needs tok_embeddings.weight as a whole" in refusal(config)


def test_a_shared_vocabulary_is_not_offloaded(monkeypatch):
    monkeypatch.setattr(rules, "use_cpu", lambda: False)
    assert "does not support training.enable_cpu_offload = true" in refusal(sharing(training__enable_cpu_offload=True))


def test_without_a_pipeline_nothing_is_shared():
    config = sharing(parallelism__pipeline_parallel_degree=1)
    config.loss = MSELoss.Config()
    assert broken_rules(config) == []
    assert type(prepare(config).optimizer) is OptimizersContainer.Config


def test_prepare_makes_the_optimizers_know_a_shared_vocabulary():
    prepared = prepare(sharing())
    assert type(prepared.optimizer) is SlimPipeOptimizers.Config
    assert prepared.optimizer.param_groups == llama3_debug().optimizer.param_groups
    assert prepared.model_spec.post_optimizer_build_fn is not None
    assert prepare(llama3_debug()).model_spec.post_optimizer_build_fn is None


def test_prepare_puts_our_parts_in_and_leaves_the_original():
    stock = llama3_debugmodel()
    config = changed(with_slimpipe(stock), slimpipe__kernel="reference", training__disable_cuda_graphs=True)
    config = changed(
        config, parallelism__pipeline_parallel_degree=2, parallelism__pipeline_parallel_schedule="SlimPipe"
    )
    prepared = prepare(config)

    found = [
        attention.inner_attention for _, attention, _, _ in prepared.model_spec.model.traverse(BaseAttention.Config)
    ]
    assert len(found) == 6
    assert len({id(inner) for inner in found}) == 6  # torchtitan writes a sharding into each
    assert all(inner == TitanSliceAttention.Config(kernel="reference") for inner in found)
    assert all(
        not isinstance(layer.attention.inner_attention, TitanSliceAttention.Config)
        for layer in stock.model_spec.model.layers
    )

    pipelining = prepared.model_spec.pipelining_fn
    assert isinstance(pipelining, functools.partial)
    assert pipelining.func is pipeline_llm
    assert pipelining.keywords == {"slimpipe": config.slimpipe, "stock": stock.model_spec.pipelining_fn}
    assert isinstance(config.loss, ChunkedLossWrapper.Config)
    assert prepared.loss == CrossEntropyLoss.Config(global_vocab_size=2048)


def test_prepare_keeps_the_chunked_loss_under_torch_schedules():
    config = changed(with_slimpipe(llama3_debugmodel()), training__disable_cuda_graphs=True)
    config = changed(config, parallelism__pipeline_parallel_degree=2)
    prepared = prepare(config)
    assert prepared.loss == config.loss
    assert all(
        isinstance(layer.attention.inner_attention, TitanSliceAttention.Config)
        for layer in prepared.model_spec.model.layers
    )


def test_build_sees_what_the_command_line_changed(monkeypatch):
    """The stock entry point: torchtitan's own manager applies overrides to what the registry function gave."""
    built = []
    monkeypatch.setattr(SlimPipeTrainer, "__init__", lambda self, config: built.append(config))
    args = "--module slimpipe.torchtitan --config llama3_debug --training.seq_len 4096 --slimpipe.num_slices 16"
    ConfigManager().parse_args(args.split()).build()
    (config,) = built
    assert (config.training.seq_len, config.slimpipe.num_slices) == (4096, 16)
    assert config.model_spec.pipelining_fn.keywords["slimpipe"].num_slices == 16
    config = ConfigManager().parse_args([*args.split(), "--training.seq_len", "4097"])
    with pytest.raises(ConfigError, match=r"training\.seq_len = 4097"):
        config.build()
    assert len(built) == 1
