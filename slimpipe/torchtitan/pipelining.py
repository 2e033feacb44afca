"""torchtitan's `pipelining_fn` for our schedules: its own model split, our schedule on top."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import pipeline_llm as torchtitan_pipeline_llm
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model import BaseModel
from torchtitan.tools.logging import logger

from slimpipe.runtime import ScheduleInterleavedSlimPipe, ScheduleSlimPipe
from slimpipe.schedule_names import SLIMPIPE_SCHEDULES
from slimpipe.torchtitan.vocabulary import share_vocabulary

if TYPE_CHECKING:
    from slimpipe.torchtitan.config import SlimPipeSection


def pipeline_llm(
    model: Decoder,
    *,
    slimpipe: SlimPipeSection,
    stock: Callable[..., tuple],
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    model_config: BaseModel.Config,
    **kwargs: Any,
) -> tuple[Any, list[nn.Module], bool, bool]:
    """Split a model into stages and make the schedule that ``parallelism`` names.

    torchtitan's public `pipeline_llm` splits and parallelizes the model; it can only do so together with one of torch's
    schedules, whose stages and loss function are then given to ours.

    Args:
        model: The whole model, on the meta device.
        slimpipe: Our section of the configuration.
        stock: The model's own pipelining function, which runs torch's schedules.
        parallel_dims: torchtitan's.
        training: torchtitan's training section.
        parallelism: torchtitan's parallelism section.
        model_config: The model's configuration.
        **kwargs: What else torchtitan hands to a pipelining function.

    Returns:
        The schedule, this rank's model parts (after its stages, its share of the vocabulary where all ranks share it),
        and whether they hold the first and the last stage.
    """
    name = parallelism.pipeline_parallel_schedule
    kwargs |= {"parallel_dims": parallel_dims, "training": training, "model_config": model_config}
    if name not in SLIMPIPE_SCHEDULES:
        return stock(model, parallelism=parallelism, **kwargs)
    num_stages_per_rank = slimpipe.num_stages_per_rank(name)
    modules = parallelism.module_fqns_per_model_part or stage_modules(
        len(model_config.layers),
        num_stages=parallelism.pipeline_parallel_degree * num_stages_per_rank,
        first_less=parallelism.pipeline_parallel_first_stage_less_layers,
        last_less=parallelism.pipeline_parallel_last_stage_less_layers,
        vocab_parallel=slimpipe.vocab_parallel,
    )
    vocabulary = None
    if slimpipe.vocab_parallel != "none":
        vocabulary = share_vocabulary(
            model,
            vocab_parallel=slimpipe.vocab_parallel,
            parallel_dims=parallel_dims,
            training=training,
            parallelism=parallelism,
        )
        sizes = [sum(module.startswith("layers.") for module in stage) for stage in modules]
        logger.info(f"{name}: all ranks share the vocabulary; layers per stage: {sizes}")
    if slimpipe.vocab_parallel == "both":
        modules = [["tok_embeddings", *modules[0]], *modules[1:]]  # what stands in its place
    carrier = "GPipe" if num_stages_per_rank == 1 else "LoopedBFS"
    logger.info(f"{name} takes its stages from torchtitan's split for {carrier}, whose schedule is not used")
    torch_schedule, model_parts, has_first, has_last = torchtitan_pipeline_llm(
        model,
        parallelism=dataclasses.replace(
            parallelism, pipeline_parallel_schedule=carrier, module_fqns_per_model_part=modules
        ),
        **kwargs,
    )
    settings: dict[str, Any] = {
        "loss_fn": torch_schedule._loss_fn if vocabulary is None else vocabulary.lm_head,
        "embedding": None if vocabulary is None else vocabulary.tok_embeddings,
        "num_slices": slimpipe.num_slices,
        "options": slimpipe.options(),
    }
    schedule: ScheduleSlimPipe | ScheduleInterleavedSlimPipe
    if num_stages_per_rank == 1:
        schedule = ScheduleSlimPipe(torch_schedule._stage, torch_schedule._n_microbatches, **settings)
    else:
        schedule = ScheduleInterleavedSlimPipe(torch_schedule._stages, torch_schedule._n_microbatches, **settings)
    # torchtitan's validator drops the outputs, which are of logit size.
    schedule.eval = functools.partial(schedule.eval, return_outputs=False)  # type: ignore[method-assign]
    program = schedule.program
    logger.info(
        f"{name}: {program.num_ranks} ranks x {num_stages_per_rank} stages, {program.num_microbatches} microbatches x "
        f"{program.num_slices} slices"
    )
    if vocabulary is not None:
        model_parts = [*model_parts, vocabulary]  # last: torchtitan takes the first for a stage
    return schedule, model_parts, has_first, has_last


def stage_modules(
    num_layers: int, *, num_stages: int, first_less: int, last_less: int, vocab_parallel: str = "none"
) -> list[list[str]]:
    """Names of the modules of each stage: layers even, but for what embedding and output layer count for.

    Args:
        num_layers: Layers of the model.
        num_stages: Stages of the pipeline.
        first_less: How many layers fewer the first stage gets for holding the embedding.
        last_less: How many layers fewer the last stage gets for holding norm and output layer.
        vocab_parallel: What all ranks share. For a stage that it takes a matrix from, 1 layer fewer, torchtitan's
            default, counts as 0; other values stay.
    """
    first, last = ["tok_embeddings"], ["norm", "lm_head"]
    if vocab_parallel != "none":
        last, last_less = ["norm"], 0 if last_less == 1 else last_less
    if vocab_parallel == "both":
        first, first_less = [], 0 if first_less == 1 else first_less
    size, more = divmod(num_layers + first_less + last_less, num_stages)
    sizes = [size + (stage < more) for stage in range(num_stages)]
    sizes[0] -= first_less
    sizes[-1] -= last_less
    # A stage too small for what it should lack is made whole by its neighbours; without a matrix it needs a layer.
    least = 0 if first else 1
    sizes[0] -= least
    while min(sizes) < 0:
        sizes[sizes.index(min(sizes))] += 1
        sizes[sizes.index(max(sizes))] -= 1
    sizes[0] += least
    names, layer = [], 0
    for count in sizes:
        names.append([f"layers.{index}" for index in range(layer, layer + count)])
        layer += count
    return [[*first, *names[0]], *names[1:-1], [*names[-1], *last]]
