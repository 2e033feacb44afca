"""What a model must be like for its sequences to be cut into slices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from torchtitan.config import Configurable
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common.attention import (
    FlexAttention,
    GQAttention,
    ScaledDotProductAttention,
    VarlenAttention,
)
from torchtitan.models.common.moe import MoE, TokenChoiceTopKRouter
from torchtitan.models.deepseek_v3.model import Attention as LatentAttention
from torchtitan.trainer import Trainer

from slimpipe.nearest import nearest_divisor

# Exact classes: a subclass may mean another attention than causal within documents, or sinks, or linear attention.
_ATTENTION = (GQAttention.Config, LatentAttention.Config)
_CAUSAL = (FlexAttention.Config, VarlenAttention.Config, ScaledDotProductAttention.Config)
_NO_WINDOW = (-1, 0)

# Parts that put images between the tokens.
_VISION = ("vision_encoder", "vision_adapter", "vision_projection")


def model_rules(config: Trainer.Config) -> Iterator[str]:
    """Rules for a model whose inner attention becomes ours, under any schedule and without a pipeline."""
    if config.model_spec is None:
        yield 'model: no model was chosen; for example [model] name = "llama3" and flavor = "debugmodel"'
        return
    spec, model = config.model_spec, config.model_spec.model
    is_pipeline = config.parallelism.pipeline_parallel_degree > 1
    if not layers_of(model):
        yield f"model.name = {spec.name!r}: it has no layers of a decoder; choose a model like 'llama3'"
    if is_pipeline and getattr(model, "enable_weight_tying", False):
        yield (
            f"model.flavor = {spec.flavor!r}: input embedding and output layer share one weight, which "
            "pipeline parallelism cannot run; choose a flavor with separate weights"
        )
    if is_pipeline and getattr(model, "mtp_layers", None):
        yield (
            f"model.flavor = {spec.flavor!r}: it predicts several tokens with {len(model.mtp_layers)} layers more, "
            "which torchtitan cannot run in a pipeline; choose a model without mtp_layers"
        )
    for part in _VISION:
        if getattr(model, part, None) is not None:
            yield f"model.flavor = {spec.flavor!r}: it has a {part}; SlimPipe trains on text only so far"
            break
    for index, layer in enumerate(layers_of(model)):
        if not _is_causal(getattr(layer, "attention", None)):
            yield (
                f"model.name = {spec.name!r}: the attention of layer {index} is not causal grouped-query or latent "
                "attention, in a sliding window or not, the only ones SlimPipe can slice so far; choose a model like "
                "'llama3', 'qwen3' or 'deepseek_v3'"
            )
            break
    degree = max(1, config.parallelism.expert_parallel_degree)
    for index, layer in enumerate(layers_of(model)):
        num_experts = getattr(getattr(layer, "moe", None), "num_experts", degree)
        if num_experts % degree:
            yield (
                f"parallelism.expert_parallel_degree = {degree}: it must divide the {num_experts} experts of layer "
                f"{index}; nearest legal value: {nearest_divisor(num_experts, degree)}"
            )
            break
    for name, part, _, _ in model.traverse(Configurable.Config, recurse=True):
        for item in fields(part):
            value = getattr(part, item.name)
            if "dropout" in item.name and isinstance(value, float | int) and value:
                yield (
                    f"model: {f'{name}.{item.name}'.lstrip('.')} = {value!r}: dropout is not supported; "
                    "nearest legal value: 0"
                )


def split_rules(config: Trainer.Config) -> Iterator[str]:
    """Rules for a model that is split into our stages."""
    assert config.model_spec is not None
    split = config.model_spec.pipelining_fn
    if split is not pipeline_llm:
        yield (
            f"model.name = {config.model_spec.name!r}: {getattr(split, '__name__', split)} makes its stages, and "
            "SlimPipe makes them as torchtitan's pipeline_llm does; choose a model like 'llama3'"
        )


def expert_rules(config: Trainer.Config, *, slice_len: int) -> Iterator[str]:
    """Rules for layers of experts that are given ``slice_len`` tokens of each sequence at a time, not all of them."""
    assert config.model_spec is not None
    model, parallelism = config.model_spec.model, config.parallelism
    for index, layer in enumerate(layers_of(model)):
        moe = getattr(layer, "moe", None)
        if moe is None:
            continue
        # Exact classes here too: a loss that balances experts per sequence is no sum over slices.
        if type(moe) is not MoE.Config or type(moe.router) is not TokenChoiceTopKRouter.Config:
            yield (
                f"model.name = {config.model_spec.name!r}: the experts of layer {index} are {type(moe).__qualname__} "
                f"with {type(moe.router).__qualname__}, not plain MoE.Config with TokenChoiceTopKRouter.Config, where "
                "nothing depends on other tokens; choose a model like 'qwen3'"
            )
            return
        factor = getattr(moe.routed_experts.token_dispatcher, "non_blocking_capacity_factor", None)
        if factor is not None and factor < 1:
            yield (
                f"model: layers.{index}.moe.routed_experts.token_dispatcher.non_blocking_capacity_factor = {factor}: "
                "which tokens are dropped would depend on the slices; nearest legal value: 1.0"
            )
            return
        shards = parallelism.tensor_parallel_degree if parallelism.expert_parallel_degree > 1 else 1
        if config.debug.moe_force_load_balance and slice_len // shards * moe.router.top_k % moe.num_experts:
            yield (
                f"debug.moe_force_load_balance = true: it deals out {moe.num_experts} experts in turn, and slices of "
                f"{slice_len} tokens x {moe.router.top_k} experts end inside a turn; nearest legal value: false, or "
                "other slimpipe.num_slices"
            )
            return


def rotary_warning(config: Trainer.Config) -> str | None:
    """Of sequences longer than the model's rotary embedding is configured for; None for others."""
    layers = layers_of(config.model_spec and config.model_spec.model)
    attentions = [layer.attention for layer in layers if _is_causal(getattr(layer, "attention", None))]
    configured = min((attention.rope.max_seq_len for attention in attentions), default=None)
    if configured is None or config.training.seq_len <= configured:
        return None
    return (
        f"training.seq_len = {config.training.seq_len}: the model's rotary embedding is configured for {configured} "
        "tokens; its table is made longer, its scaling stays as it is"
    )


def layers_of(model: object) -> list:
    """The configurations of a model's layers; none for what is not a decoder."""
    return list(getattr(model, "layers", None) or [])


def window_of(inner_attention: Any) -> int | None:
    """The sliding window of a causal inner attention, in tokens seen, the query's own included; None if it has none."""
    before, _ = getattr(inner_attention, "window_size", _NO_WINDOW)
    return None if before < 0 else before + 1


def _is_causal(attention: Any) -> bool:
    """Whether our attention may take the place of the inner attention, all else staying the same."""
    if type(attention) not in _ATTENTION or type(attention.inner_attention) not in _CAUSAL:
        return False
    before, after = getattr(attention.inner_attention, "window_size", _NO_WINDOW)
    return before >= -1 and after == 0
