"""What the planner needs to know of a torchtitan configuration."""

from __future__ import annotations

from typing import Any

from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.deepseek_v3.model import Attention as LatentAttention

from slimpipe.planner.layout import SCHEDULES, Layout
from slimpipe.planner.models import ModelShape
from slimpipe.schedule_names import SLIMPIPE_SCHEDULES
from slimpipe.torchtitan.config import SlimPipeTrainerConfig
from slimpipe.torchtitan.model_rules import layers_of
from slimpipe.torchtitan.torch_schedules import num_torch_stages, torch_schedule_rules


def shape_of(config: SlimPipeTrainerConfig) -> ModelShape:
    """The shape of the configuration's model.

    Raises:
        ValueError: It is not a decoder of equal layers of grouped-query attention and SwiGLU.
    """
    spec = config.model_spec
    if spec is None:
        raise ValueError("model: no model was chosen")
    model: Any = spec.model
    layers = layers_of(model)
    kinds = {_layer_sizes(layer) for layer in layers}
    if len(kinds) != 1 or None in kinds:
        raise ValueError(
            f'model.name = "{spec.name}", flavor "{spec.flavor}": plan knows decoders of equal layers with '
            "grouped-query attention and SwiGLU only; give its numbers on the command line instead"
        )
    (sizes,) = kinds
    assert sizes is not None
    num_heads, num_kv_heads, head_dim, ffn_dim, num_experts, experts_per_token = sizes
    return ModelShape(
        name=f"{spec.name}-{spec.flavor}".lower(),
        num_layers=len(layers),
        dim=model.dim,
        ffn_dim=ffn_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=model.vocab_size,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        tied=bool(getattr(model, "enable_weight_tying", False)),
        titan=(spec.name, spec.flavor),
    )


def head_sizes(config: SlimPipeTrainerConfig) -> tuple[int, int, int, int] | None:
    """Query heads, K,V heads, head dim of Q and K, and of V, of the first layer; None for attention of other kinds."""
    layers = layers_of(config.model_spec and config.model_spec.model)
    attention: Any = getattr(layers[0], "attention", None) if layers else None
    if isinstance(attention, GQAttention.Config):
        head_dim = attention.head_dim or attention.dim // attention.n_heads
        return attention.n_heads, attention.n_kv_heads or attention.n_heads, head_dim, head_dim
    if isinstance(attention, LatentAttention.Config):
        head_dim = attention.qk_nope_head_dim + attention.qk_rope_head_dim
        return attention.n_heads, attention.n_heads, head_dim, attention.v_head_dim
    return None


def recompute_of(config: SlimPipeTrainerConfig) -> str:
    """Which of `planner.layout.RECOMPUTE` the configuration's activation checkpointing is."""
    mode = config.activation_checkpoint
    if mode is None:
        return "none"
    return "full" if isinstance(mode, FullAC.Config) else "selective"


def layout_of(config: SlimPipeTrainerConfig, *, num_gpus: int) -> Layout:
    """The layout that the configuration has itself.

    Raises:
        ValueError: It is none that plan can judge.
    """
    parallelism, section = config.parallelism, config.slimpipe
    name, t, p, c, size = (
        parallelism.pipeline_parallel_schedule,
        parallelism.tensor_parallel_degree,
        parallelism.pipeline_parallel_degree,
        parallelism.context_parallel_degree,
        parallelism.pipeline_parallel_microbatch_size,
    )
    is_ours = name in SLIMPIPE_SCHEDULES
    if not (is_ours or name in SCHEDULES):
        raise ValueError(f"parallelism.pipeline_parallel_schedule = {name!r}: plan knows {', '.join(SCHEDULES)}")
    if min(t, p, c) < 1 or num_gpus % (t * p * c):
        raise ValueError(f"t p c = {t} x {p} x {c} by its degrees: this does not divide {num_gpus} GPUs")
    if size != 1:
        raise ValueError(
            f"parallelism.pipeline_parallel_microbatch_size = {size}: plan knows only one sequence each; nearest: 1"
        )
    if is_ours:
        v = section.num_stages_per_rank(name)
    else:
        for rule in torch_schedule_rules(config):
            raise ValueError(rule)
        v = num_torch_stages(config) // p
    return Layout(
        tensor=t,
        pipeline=p,
        context=c,
        data=num_gpus // (t * p * c),
        num_slices=section.num_slices if is_ours else 1,
        stages_per_rank=v,
        num_microbatches=config.training.local_batch_size,
        recompute=recompute_of(config),
        exchange=is_ours and section.context_exchange != "off",
        vocab_parallel=section.vocab_parallel if is_ours else "none",
        schedule="SlimPipe" if is_ours else name,
    )


def _layer_sizes(layer: Any) -> tuple[int, int, int | None, int, int, int] | None:
    attention: Any = getattr(layer, "attention", None)
    feed_forward: Any = getattr(layer, "feed_forward", None)
    if not isinstance(attention, GQAttention.Config):
        return None
    heads = attention.n_heads, attention.n_kv_heads or attention.n_heads, attention.head_dim
    if feed_forward is not None:
        return *heads, feed_forward.w1.out_features, 1, 1
    moe: Any = getattr(layer, "moe")  # noqa: B009  (which mypy does not know)
    try:
        return *heads, moe.routed_experts.inner_experts.hidden_dim, moe.num_experts, moe.router.top_k
    except AttributeError:
        return None
