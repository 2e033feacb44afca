"""What `slimpipe show` draws of a configuration."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from slimpipe.planner.costs import OpCosts
from slimpipe.planner.hardware import Hardware
from slimpipe.planner.layout import Layout
from slimpipe.planner.model_cost import op_costs
from slimpipe.planner.models import ModelShape
from slimpipe.planner.shown import Setting
from slimpipe.program.cost import AttentionShape, ExchangeCosts
from slimpipe.schedule_names import SLIMPIPE_SCHEDULES
from slimpipe.torchtitan.config import SlimPipeTrainerConfig, check
from slimpipe.torchtitan.cpu import use_cpu
from slimpipe.torchtitan.degrees import product_of_degrees
from slimpipe.torchtitan.shape import head_sizes, recompute_of, shape_of
from slimpipe.torchtitan.toml import load_toml
from slimpipe.torchtitan.torch_schedules import num_torch_stages


def setting_of(path: str, overrides: Sequence[str], *, hardware: Hardware | None) -> tuple[str, Setting]:
    """The schedule of a configuration file, and its setting: with costs in seconds on some hardware, or in units.

    Raises:
        ConfigError: The file or an override is wrong, or the configuration cannot run.
        ValueError: It has no pipeline, or the costs of its model are not known.
    """
    use_cpu()
    config = load_toml(path, overrides)
    check(config)
    if config.parallelism.pipeline_parallel_degree == 1:
        raise ValueError("parallelism.pipeline_parallel_degree = 1: there is no pipeline; nearest legal value: 2")
    setting = setting_of_config(config)
    if hardware is not None:
        setting = _on(hardware, setting, config)
    return config.parallelism.pipeline_parallel_schedule, setting


def setting_of_config(config: SlimPipeTrainerConfig) -> Setting:
    """The setting of a configuration that can run, with costs in units."""
    parallelism, section = config.parallelism, config.slimpipe
    schedule, seq_len = parallelism.pipeline_parallel_schedule, config.training.seq_len
    num_ranks, ours = parallelism.pipeline_parallel_degree, schedule in SLIMPIPE_SCHEDULES
    stages_per_rank = section.num_stages_per_rank(schedule) if ours else num_torch_stages(config) // num_ranks
    setting = Setting(
        num_ranks=num_ranks,
        num_slices=section.num_slices,
        num_stages_per_rank=stages_per_rank if ours or stages_per_rank > 1 else None,
        num_microbatches=config.training.local_batch_size // parallelism.pipeline_parallel_microbatch_size,
        slice_len=max(1, seq_len // section.num_slices),
        options=section.options(),
        exchange_costs=_exchange_costs(config),
        vocab_parallel=section.vocab_parallel,
    )
    model = _model(config)
    if model is None:
        return setting
    # Per token and layer, in multiplications: weights, and on average half the sequence's keys and values.
    weights, attended = model.active_layer_parameters, seq_len * model.query_dim
    head = model.matrix_parameters / (model.num_layers * (weights + attended))
    return replace(setting, attention_share=attended / (weights + attended), head=head)


def slice_shape(config: SlimPipeTrainerConfig) -> AttentionShape | None:
    """A slice in the first attention layer of one rank; None for attention of a kind that no slices can have."""
    sizes = head_sizes(config)
    if sizes is None:
        return None
    num_heads, num_kv_heads, head_dim, value_head_dim = sizes
    tensor = config.parallelism.tensor_parallel_degree
    return AttentionShape(
        batch=config.parallelism.pipeline_parallel_microbatch_size,
        slice_len=max(1, config.training.seq_len // config.slimpipe.num_slices),
        num_heads=num_heads // tensor,
        num_kv_heads=num_kv_heads // tensor,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        bytes_per_value=4 if config.training.mixed_precision_param == "float32" else 2,
    )


def _exchange_costs(config: SlimPipeTrainerConfig) -> ExchangeCosts | None:
    """What decides about the exchange where the file has all three rates; otherwise a run measures them."""
    section, shape = config.slimpipe, slice_shape(config)
    if shape is None or not (section.attention_flops and section.link_bandwidth and section.link_latency):
        return None
    return ExchangeCosts(
        shape=shape,
        flops_per_second=section.attention_flops,
        bytes_per_second=section.link_bandwidth,
        latency=section.link_latency,
    )


def _on(hardware: Hardware, setting: Setting, config: SlimPipeTrainerConfig) -> Setting:
    """The same in seconds."""
    model, parallelism = shape_of(config), config.parallelism
    if parallelism.pipeline_parallel_microbatch_size != 1:
        raise ValueError(
            f"parallelism.pipeline_parallel_microbatch_size = {parallelism.pipeline_parallel_microbatch_size}: --gpu "
            "knows the costs of microbatches of one sequence only; nearest legal value: 1"
        )
    tensor, num_gpus = parallelism.tensor_parallel_degree, product_of_degrees(parallelism)
    layout = Layout(
        tensor=tensor,
        pipeline=setting.num_ranks,
        data=num_gpus // (tensor * setting.num_ranks),
        num_slices=setting.num_slices,
        num_microbatches=setting.num_microbatches,
        recompute=recompute_of(config),
    )
    shape, link = slice_shape(config), hardware.link(num_gpus)
    assert shape is not None
    costs = ExchangeCosts(
        shape=shape,
        flops_per_second=hardware.peak_flops * hardware.attention_efficiency,
        bytes_per_second=link.bandwidth,
        latency=link.latency,
    )
    return replace(
        setting,
        exchange_costs=setting.exchange_costs or costs,
        estimate=functools.partial(
            _estimate, model=model, layout=layout, hardware=hardware, seq_len=config.training.seq_len
        ),
    )


def _estimate(
    schedule: str, setting: Setting, *, model: ModelShape, layout: Layout, hardware: Hardware, seq_len: int
) -> OpCosts:
    ours = schedule in SLIMPIPE_SCHEDULES
    cut = replace(
        layout,
        num_slices=setting.num_slices if ours else 1,
        stages_per_rank=setting.stages_per_rank(schedule),
        vocab_parallel=setting.vocab_parallel if ours else "none",
        schedule="SlimPipe" if ours else schedule,
    )
    return op_costs(model, cut, hardware, seq_len=seq_len)


def _model(config: SlimPipeTrainerConfig) -> ModelShape | None:
    try:
        return shape_of(config)
    except ValueError:
        return None
