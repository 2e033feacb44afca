"""What torch's own schedules ask of a configuration, and the stages that torchtitan makes for them."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.pipelining import schedules
from torchtitan.trainer import Trainer

_V_SHAPED = (schedules.ScheduleZBVZeroBubble, schedules.ScheduleDualPipeV)
_IN_ROUNDS = (schedules.ScheduleInterleaved1F1B, schedules.ScheduleInterleavedZeroBubble)


def num_torch_stages(config: Trainer.Config) -> int:
    """Stages, of all ranks together, that torchtitan cuts the model into for a schedule of torch."""
    parallelism = config.parallelism
    if parallelism.module_fqns_per_model_part is not None:
        return len(parallelism.module_fqns_per_model_part)
    layers_per_stage = parallelism.pipeline_parallel_layers_per_stage
    if layers_per_stage is not None:
        return -(-_num_layers(config) // layers_per_stage)
    schedule = schedules.get_schedule_class(parallelism.pipeline_parallel_schedule)
    is_single = issubclass(schedule, schedules.PipelineScheduleSingle)
    return parallelism.pipeline_parallel_degree * (1 if is_single else 2)


def torch_schedule_rules(config: Trainer.Config) -> Iterator[str]:
    """Rules that hold when one of torch's schedules runs; that torch knows its name is another one."""
    parallelism = config.parallelism
    name, num_ranks = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree
    try:
        schedule = schedules.get_schedule_class(name)
    except ValueError:
        return
    layers_per_stage = parallelism.pipeline_parallel_layers_per_stage
    if layers_per_stage is not None and layers_per_stage < 1:
        yield f"parallelism.pipeline_parallel_layers_per_stage = {layers_per_stage}: it must be at least 1; nearest: 1"
        return
    num_stages = num_torch_stages(config)
    if not _can_have(schedule, num_stages, num_ranks):
        is_single = issubclass(schedule, schedules.PipelineScheduleSingle)
        each = "1" if is_single else "2" if issubclass(schedule, _V_SHAPED) else "2 or more"
        rule = f"{num_stages} stages, and {name} needs {each} on each of {num_ranks} ranks"
        if parallelism.module_fqns_per_model_part is not None:
            yield f"parallelism.module_fqns_per_model_part makes {rule}"
        elif layers_per_stage is not None:
            total = _num_layers(config)
            legal = [size for size in range(1, total + 1) if _can_have(schedule, -(-total // size), num_ranks)]
            nearest = min(legal, key=lambda size: abs(size - layers_per_stage), default=None)
            yield (
                f"parallelism.pipeline_parallel_layers_per_stage = {layers_per_stage}: it makes {rule}; "
                + ("remove this setting" if nearest is None else f"nearest legal value: {nearest}")
            )
        return
    size = parallelism.pipeline_parallel_microbatch_size
    if size < 1 or config.training.local_batch_size % size:
        return
    count = config.training.local_batch_size // size
    least = {schedules.Schedule1F1B: num_ranks, schedules.ScheduleDualPipeV: num_stages}.get(schedule, 1)
    nearest = max(least, round(count / num_ranks) * num_ranks)
    if count < least:
        rule = f"their number must be at least {least}"
    elif issubclass(schedule, _IN_ROUNDS) and count % max(1, count // num_ranks):
        rule = f"their number must be a multiple of the {count // num_ranks} rounds that {num_ranks} ranks make of them"
    else:
        return
    yield (
        f"training.local_batch_size = {config.training.local_batch_size}: {name} gets {count} microbatches, "
        f"and {rule}; nearest legal value: {nearest * size}"
    )


def _can_have(schedule: type, num_stages: int, num_ranks: int) -> bool:
    each, rest = divmod(num_stages, num_ranks)
    if issubclass(schedule, schedules.PipelineScheduleSingle):
        return not rest and each == 1
    return not rest and (each == 2 if issubclass(schedule, _V_SHAPED) else each >= 2)


def _num_layers(config: Trainer.Config) -> int:
    """Layers, with those that embedding and output layer count for."""
    parallelism = config.parallelism
    layers = list(getattr(config.model_spec.model, "layers", None) or []) if config.model_spec else []
    less = parallelism.pipeline_parallel_first_stage_less_layers + parallelism.pipeline_parallel_last_stage_less_layers
    return len(layers) + less
