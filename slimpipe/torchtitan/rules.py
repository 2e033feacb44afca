"""What a configuration must fulfil before it can run, each broken rule with the nearest value that works."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.pipelining.schedules import get_schedule_class
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.config import ParallelismConfig
from torchtitan.models.common import Embedding, Linear
from torchtitan.trainer import Trainer

from slimpipe.nearest import nearest_divisor, nearest_name
from slimpipe.schedule_names import SLIMPIPE_SCHEDULES, TORCH_SCHEDULES
from slimpipe.torchtitan.cpu import use_cpu
from slimpipe.torchtitan.model_rules import expert_rules, layers_of, model_rules, split_rules
from slimpipe.torchtitan.torch_schedules import torch_schedule_rules
from slimpipe.vocabulary import shard_rows

if TYPE_CHECKING:
    from slimpipe.torchtitan.config import SlimPipeTrainerConfig

# Exact classes: quantized and low-rank ones keep more than rows.
_PLAIN_MATRICES: dict[str, Any] = {"lm_head": Linear.Config, "tok_embeddings": Embedding.Config}

# Optimizers of torchtitan that look at one element of a matrix at a time.
_ROW_BY_ROW = ("Adam", "AdamW")


def runs_slimpipe(config: Trainer.Config) -> bool:
    """Whether the trainer will run one of our schedules."""
    parallelism = config.parallelism
    return parallelism.pipeline_parallel_degree > 1 and parallelism.pipeline_parallel_schedule in SLIMPIPE_SCHEDULES


def broken_batch_rule(config: Trainer.Config) -> str | None:
    """Why `training.local_batch_size` cannot be cut into microbatches; None where it can."""
    batch, size = config.training.local_batch_size, config.parallelism.pipeline_parallel_microbatch_size
    if config.parallelism.pipeline_parallel_degree <= 1 or size < 1 or (batch > 0 and batch % size == 0):
        return None
    return (
        f"training.local_batch_size = {batch}: it must be a positive multiple of "
        f"parallelism.pipeline_parallel_microbatch_size = {size}; nearest legal value: {_nearest_multiple(batch, size)}"
    )


def broken_cpu_rule(config: Trainer.Config) -> str | None:
    """What keeps a configuration that runs on GPUs from running on CPUs; None where nothing does."""
    if config.parallelism.expert_parallel_degree == 1:
        return None
    return (
        f"parallelism.expert_parallel_degree = {config.parallelism.expert_parallel_degree}: gloo cannot send unequal "
        "numbers of tokens between CPUs; nearest legal value: 1"
    )


def broken_rules(config: SlimPipeTrainerConfig) -> list[str]:
    """Every rule that final values break; nothing is communicated to find out."""
    errors = [*model_rules(config), *_parallelism_rules(config)]
    if runs_slimpipe(config):
        errors += _schedule_rules(config)
    elif config.parallelism.pipeline_parallel_degree > 1 and config.model_spec is not None:
        errors += torch_schedule_rules(config)
    if config.slimpipe.vocab_parallel != "none":
        errors += _vocabulary_rules(config)
    return errors


def _parallelism_rules(config: SlimPipeTrainerConfig) -> Iterator[str]:
    parallelism = config.parallelism
    if config.checkpoint.create_seed_checkpoint and not config.checkpoint.enable:
        yield "checkpoint.create_seed_checkpoint = true: it needs checkpoint.enable = true"
    if config.comm.mode == "local_tensor":
        yield "comm.mode = 'local_tensor': torchtitan cannot train in it; nearest legal value: 'default'"
    if config.training.enable_cpu_offload and use_cpu():
        yield "training.enable_cpu_offload = true: training runs on the CPU already; nearest legal value: false"
    if config.compile.enable and "model" in config.compile.components:
        yield (
            'compile.components holds "model": torch.compile cannot trace the slice attention; nearest legal value: '
            f"{[name for name in config.compile.components if name != 'model']}, or compile.enable = false"
        )
    if error := _broken_expert_rule(parallelism):
        yield error
    if parallelism.context_parallel_degree > 1:
        yield (
            f"parallelism.context_parallel_degree = {parallelism.context_parallel_degree}: context parallelism is not "
            "supported together with slices; nearest legal value: 1"
        )
    if parallelism.spmd_backend != "spmd_types":
        yield (
            f"parallelism.spmd_backend = {parallelism.spmd_backend!r}: the slice attention takes plain local tensors, "
            "not DTensor; nearest legal value: 'spmd_types'"
        )
    schedule = parallelism.pipeline_parallel_schedule
    if schedule not in SLIMPIPE_SCHEDULES and not _torch_knows(schedule):
        known = (*SLIMPIPE_SCHEDULES, *TORCH_SCHEDULES)
        near = nearest_name(schedule, known)
        yield (
            f"parallelism.pipeline_parallel_schedule = {schedule!r}: no such schedule; nearest legal value: {near!r}; "
            f"known: {', '.join(known)}"
        )
    if error := broken_batch_rule(config):
        yield error


def _broken_expert_rule(parallelism: ParallelismConfig) -> str | None:
    degree, shards = parallelism.expert_parallel_degree, parallelism.data_parallel_shard_degree
    ranks = shards * parallelism.context_parallel_degree * parallelism.tensor_parallel_degree
    if ranks < 0 or ranks % degree == 0:  # -1: what the launcher leaves
        return None
    return (
        f"parallelism.expert_parallel_degree = {degree}: it must divide data_parallel_shard_degree x "
        f"context_parallel_degree x tensor_parallel_degree = {ranks}; nearest legal value: "
        f"{nearest_divisor(ranks, degree)}"
    )


def _schedule_rules(config: SlimPipeTrainerConfig) -> Iterator[str]:
    """Rules that hold when one of our schedules runs."""
    parallelism, section = config.parallelism, config.slimpipe
    schedule, num_ranks = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree
    num_slices, seq_len = section.num_slices, config.training.seq_len
    if config.model_spec is not None:
        yield from split_rules(config)
    if num_slices < num_ranks:
        yield (
            f"slimpipe.num_slices = {num_slices}: it must be at least parallelism.pipeline_parallel_degree = "
            f"{num_ranks}; nearest legal value: {num_ranks}"
        )
    cuts_tokens = parallelism.enable_sequence_parallel or parallelism.expert_parallel_degree > 1
    tp = parallelism.tensor_parallel_degree if cuts_tokens else 1
    if seq_len < 1 or seq_len % (num_slices * tp):
        divisor = f"slimpipe.num_slices = {num_slices}"
        if tp > 1:
            divisor += f" times parallelism.tensor_parallel_degree = {tp}"
        yield (
            f"training.seq_len = {seq_len}: it must be a positive multiple of {divisor}, so that all slices are equal; "
            f"nearest legal value: {_nearest_multiple(seq_len, num_slices * tp)}"
        )
    elif config.model_spec is not None:
        yield from expert_rules(config, slice_len=seq_len // num_slices)
    if schedule == "SlimPipe" and section.stages_per_rank not in (None, 1):
        yield (
            f"slimpipe.stages_per_rank = {section.stages_per_rank}: schedule SlimPipe has one stage per rank; nearest "
            'legal value: 1, or parallelism.pipeline_parallel_schedule = "InterleavedSlimPipe"'
        )
        return
    yield from _stage_rules(config, num_ranks, section.num_stages_per_rank(schedule))
    if parallelism.pipeline_parallel_schedule_csv:
        yield (
            f"parallelism.pipeline_parallel_schedule_csv = {parallelism.pipeline_parallel_schedule_csv!r}: schedule "
            f"{schedule} is computed, not read from a file; nearest legal value: ''"
        )


def _stage_rules(config: SlimPipeTrainerConfig, num_ranks: int, stages_per_rank: int) -> Iterator[str]:
    parallelism = config.parallelism
    num_stages = num_ranks * stages_per_rank
    if parallelism.pipeline_parallel_layers_per_stage is not None:
        yield (
            f"parallelism.pipeline_parallel_layers_per_stage = {parallelism.pipeline_parallel_layers_per_stage}: the "
            "number of stages is set by slimpipe.stages_per_rank; remove this setting"
        )
    parts = parallelism.module_fqns_per_model_part
    if parts is not None:
        if len(parts) != num_stages:
            yield (
                f"parallelism.module_fqns_per_model_part has {len(parts)} entries: it must have one per stage, "
                f"{num_ranks} ranks x {stages_per_rank} stages per rank = {num_stages}"
            )
        return
    num_layers = len(layers_of(config.model_spec.model)) if config.model_spec else 0
    shared = shared_matrices(config.slimpipe.vocab_parallel)
    room, fillers = num_layers, [f"{num_layers} layers"]
    if "tok_embeddings" not in shared:
        room += parallelism.pipeline_parallel_first_stage_less_layers
        fillers.append("embedding")
    if "lm_head" not in shared:
        room += parallelism.pipeline_parallel_last_stage_less_layers
        fillers.append("output")
    if num_layers and num_stages > room:
        yield (
            f"slimpipe.stages_per_rank = {stages_per_rank}: {num_ranks} ranks x {stages_per_rank} = {num_stages} "
            f"stages are more than the model's {' + '.join(fillers)} can fill; nearest legal value: "
            f"{max(room // num_ranks, 1)}"
        )


def _vocabulary_rules(config: SlimPipeTrainerConfig) -> Iterator[str]:
    """Rules that hold when the ranks are to share the vocabulary."""
    parallelism, setting = config.parallelism, f"slimpipe.vocab_parallel = {config.slimpipe.vocab_parallel!r}"
    none = "nearest legal value: 'none'"
    if parallelism.pipeline_parallel_schedule not in SLIMPIPE_SCHEDULES:
        yield (
            f"{setting}: parallelism.pipeline_parallel_schedule = {parallelism.pipeline_parallel_schedule!r} cannot "
            f"share the vocabulary; {none}, or a schedule of {', '.join(SLIMPIPE_SCHEDULES)}"
        )
    if not runs_slimpipe(config) or config.model_spec is None:
        return
    loss = config.loss.loss_fn if isinstance(config.loss, ChunkedLossWrapper.Config) else config.loss
    if type(loss) is not CrossEntropyLoss.Config:
        yield f"{setting}: the loss is {type(loss).__qualname__}, not plain CrossEntropyLoss; {none}"
    if config.training.enable_cpu_offload:
        yield f"{setting}: it does not support training.enable_cpu_offload = true; {none}"
    num_ranks = parallelism.pipeline_parallel_degree * parallelism.tensor_parallel_degree
    for name in shared_matrices(config.slimpipe.vocab_parallel):
        part: Any = getattr(config.model_spec.model, name, None)
        plain = _PLAIN_MATRICES[name]
        if type(part) is not plain or getattr(part, "bias", False):
            yield f"{setting}: {name} of the model is not a plain {plain.__qualname__} without bias; {none}"
            continue
        vocab_size = part.out_features if isinstance(part, Linear.Config) else part.num_embeddings
        if not shard_rows(vocab_size, num_ranks=num_ranks, rank=num_ranks - 1):
            yield (
                f"{setting}: {name} has {vocab_size} rows, cut over parallelism.pipeline_parallel_degree times "
                f"parallelism.tensor_parallel_degree = {num_ranks} ranks none is left for the last; {none}"
            )
        if any(name in stage for stage in parallelism.module_fqns_per_model_part or []):
            yield (
                f"parallelism.module_fqns_per_model_part names {name!r}, which all ranks share under {setting}; remove "
                "it there"
            )
        group = optimizer_group_of(f"{name}.weight", config.optimizer.param_groups)
        if group is not None and group.optimizer_name not in _ROW_BY_ROW:
            yield (
                f"{setting}: optimizer {group.optimizer_name} needs {name}.weight as a whole, and each rank has some "
                f"rows; {none}, or an optimizer of {', '.join(_ROW_BY_ROW)}"
            )


def shared_matrices(vocab_parallel: str) -> tuple[str, ...]:
    """The modules whose weight all ranks share."""
    return {"none": (), "output": ("lm_head",), "both": ("lm_head", "tok_embeddings")}[vocab_parallel]


def optimizer_group_of(name: str, groups: Sequence[ParamGroupConfig]) -> ParamGroupConfig | None:
    """The group that sets the optimizer of the parameter: the first whose pattern its name matches."""
    return next((group for group in groups if re.search(group.pattern, name)), None)


def _torch_knows(schedule: str) -> bool:
    try:
        get_schedule_class(schedule)
    except ValueError:
        return False
    return True


def _nearest_multiple(value: int, of: int) -> int:
    return max(of, (value + of // 2) // of * of)
