"""The `[slimpipe]` section, the trainer configuration that holds it, and what makes a configuration ready to run."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import derive
from torchtitan.models.common.attention import BaseAttention
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from slimpipe.options import SlimPipeOptions, check_vocab_parallel
from slimpipe.schedule_names import SLIMPIPE_SCHEDULES
from slimpipe.torchtitan.cpu import use_cpu, with_gloo_reductions
from slimpipe.torchtitan.degrees import broken_degree
from slimpipe.torchtitan.model_rules import rotary_warning, window_of
from slimpipe.torchtitan.rules import broken_batch_rule, broken_cpu_rule, broken_rules, runs_slimpipe


class ConfigError(ValueError):
    """A configuration that cannot run. Its text lists every error; `errors` holds them one by one."""

    def __init__(self, errors: Sequence[str], *, source: str = "configuration") -> None:
        self.errors = tuple(errors)
        head = f"{source}: {len(errors)} error{'s' if len(errors) > 1 else ''}"
        super().__init__("\n".join([head, *(f"  - {error}" for error in errors)]))


@dataclass(kw_only=True, slots=True)
class SlimPipeSection:
    num_slices: int = 8
    """Equal slices that each sequence is cut into. `training.seq_len` must be a multiple of it, and it must be at least
    `parallelism.pipeline_parallel_degree`."""

    stages_per_rank: int | None = None
    """Pipeline stages on each rank. By default 1 for schedule SlimPipe and 2 for InterleavedSlimPipe."""

    vocab_parallel: str = "none"
    """What all pipeline ranks share of the work on the vocabulary: none, output (output layer and loss; each rank holds
    its part of the rows), or both (the input embedding too). Where the last or first stage gives its matrix away,
    parallelism.pipeline_parallel_last_stage_less_layers or ..._first_stage_less_layers = 1, their default, counts as
    0, so that layers are even."""

    kernel: str = "auto"
    """Attention kernel: auto, reference, torch_cpu_flash, torch_cuda_flash, torch_cudnn, flash_attn, flash_attn_3 or
    flash_attn_4."""

    keep_attention_output: bool = True
    """Under activation checkpointing, keep each attention's output and LSE, so that recomputing a layer does not run
    its attention again."""

    context_exchange: str = "auto"
    """Whether ranks with long contexts hand part of their attention to others: on, off, or auto for wherever it saves
    more time than its messages cost. It begins with the second step."""

    exchange_granularity: int = 128
    """Tokens that move together in the exchange."""

    exchange_max_slices: int = 16
    """Most K,V that a rank holds for others from one tick to a later, in slices of as many layers as a rank has. 0:
    hold nothing, send every row anew at every tick."""

    attention_flops: float | None = None
    """FLOP per second of attention on one rank, for context_exchange = auto; `slimpipe measure-links` prints it.
    By default measured after the first step."""

    link_bandwidth: float | None = None
    """Bytes per second between two pipeline ranks, for context_exchange = auto; `slimpipe measure-links` prints it.
    By default measured after the first step."""

    link_latency: float | None = None
    """Seconds that the smallest message between two pipeline ranks takes, for context_exchange = auto; `slimpipe
    measure-links` prints it. By default measured after the first step."""

    measure_memory: bool = False
    """Count the bytes that are held for backward and report their peak per rank among the metrics."""

    record_times: bool = False
    """Record start and end of every instruction of the schedule, and write the last step that logged into the dump
    folder, as slimpipe/timeline_rankN.json, for `slimpipe show --run`."""

    def __post_init__(self) -> None:
        if type(self.num_slices) is not int:
            raise TypeError(f"slimpipe.num_slices = {self.num_slices!r}: it must be an int, for example 8")
        if self.num_slices < 1:
            raise ValueError(f"slimpipe.num_slices = {self.num_slices}: it must be at least 1; nearest legal value: 1")
        if self.stages_per_rank is not None and type(self.stages_per_rank) is not int:
            raise TypeError(f"slimpipe.stages_per_rank = {self.stages_per_rank!r}: it must be an int, for example 2")
        if self.stages_per_rank is not None and self.stages_per_rank < 1:
            raise ValueError(
                f"slimpipe.stages_per_rank = {self.stages_per_rank}: it must be at least 1; nearest legal value: 1"
            )
        if type(self.vocab_parallel) is not str:
            raise TypeError(
                f'slimpipe.vocab_parallel = {self.vocab_parallel!r}: it must be a str, for example "output"'
            )
        try:
            check_vocab_parallel(self.vocab_parallel)
            self.options()
        except (TypeError, ValueError) as error:
            # In the words of the file: its section, not our class.
            raise type(error)(f"slimpipe.{str(error).removeprefix('SlimPipeOptions.')}") from None

    def options(self) -> SlimPipeOptions:
        """The options of the schedule: the fields that they have in common with this section."""
        names = {option.name for option in dataclasses.fields(SlimPipeOptions)}
        return SlimPipeOptions(
            **{item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name in names}
        )

    def num_stages_per_rank(self, schedule: str) -> int:
        """Stages on each rank under `schedule`, one of `SLIMPIPE_SCHEDULES`."""
        if self.stages_per_rank is not None:
            return self.stages_per_rank
        return 1 if schedule == "SlimPipe" else 2


@dataclass(kw_only=True, slots=True)
class SlimPipeTrainerConfig(Trainer.Config):
    """torchtitan's trainer configuration with a `slimpipe` section. `build()` gives a `SlimPipeTrainer`."""

    slimpipe: SlimPipeSection = field(default_factory=SlimPipeSection)
    """Slice-level pipeline parallelism."""

    def __post_init__(self) -> None:
        # torchtitan checks the same, without naming a value that works.
        if error := broken_degree(self.parallelism) or broken_batch_rule(self):
            raise ValueError(error)
        # A class with slots is another object than the one that super() would look for.
        Trainer.Config.__post_init__(self)

    def build(self, **kwargs: Any) -> Trainer:
        # Both entry points come through here after the command line was applied and before anything is communicated.
        from slimpipe.torchtitan import trainer  # noqa: F401  (defines the class that is built)

        return Trainer.Config.build(prepare(self), **kwargs)


def with_slimpipe(config: Trainer.Config) -> SlimPipeTrainerConfig:
    """Gives a torchtitan trainer configuration a default `slimpipe` section; one that has it comes back as it is."""
    return config if isinstance(config, SlimPipeTrainerConfig) else derive(config, SlimPipeTrainerConfig)


def check(config: SlimPipeTrainerConfig) -> None:
    """Raises ConfigError with every rule that the final values of `config` break. Writes and communicates nothing."""
    if errors := broken_rules(config):
        raise ConfigError(errors)


def prepare(config: SlimPipeTrainerConfig) -> SlimPipeTrainerConfig:
    """Checks final values and puts SlimPipe's parts into the model and the loss.

    Every layer's inner attention becomes `TitanSliceAttention`, under torch's schedules too, where it is causal
    attention that keeps documents apart. Sequences may be longer than the model's rotary embedding is configured for.
    `config` is left as it is. Nothing is communicated or written.

    Returns:
        A configuration for torchtitan's `Trainer`. It cannot be prepared a second time.

    Raises:
        ConfigError: with every rule that `config` breaks, on a machine like this.
    """
    check(config)
    if use_cpu() and (error := broken_cpu_rule(config)):
        raise ConfigError([error])
    from slimpipe.torchtitan.attention import TitanSliceAttention, with_documents
    from slimpipe.torchtitan.metrics import SlimPipeMetrics
    from slimpipe.torchtitan.optimizer import SlimPipeOptimizers, with_shared_vocabulary
    from slimpipe.torchtitan.pipelining import pipeline_llm

    spec = config.model_spec
    assert spec is not None
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_schedule in SLIMPIPE_SCHEDULES and not runs_slimpipe(config):
        logger.warning(
            "parallelism.pipeline_parallel_degree = 1: there is no pipeline, and nothing is sliced or shared"
        )
    model = copy.deepcopy(spec.model)
    if warning := rotary_warning(config):
        logger.warning(warning)
    for _, attention, _, _ in model.traverse(BaseAttention.Config):
        attention.inner_attention = TitanSliceAttention.Config(
            kernel=config.slimpipe.kernel, window=window_of(attention.inner_attention)
        )
        # The size of a table: torchtitan sets it to seq_len, but only where that makes it smaller.
        longest = max(attention.rope.max_seq_len, config.training.seq_len)
        attention.rope = dataclasses.replace(attention.rope, max_seq_len=longest)
    spec = dataclasses.replace(
        spec,
        model=model,
        pipelining_fn=functools.partial(pipeline_llm, slimpipe=config.slimpipe, stock=spec.pipelining_fn),
        parallelize_fn=with_documents(with_gloo_reductions(spec.parallelize_fn) if use_cpu() else spec.parallelize_fn),
    )
    optimizer, loss = config.optimizer, config.loss
    if runs_slimpipe(config) and config.slimpipe.vocab_parallel != "none":
        spec.post_optimizer_build_fn = with_shared_vocabulary(spec.post_optimizer_build_fn)
        if type(optimizer) is OptimizersContainer.Config:
            optimizer = derive(optimizer, SlimPipeOptimizers.Config)
        if config.compile.enable and "loss" in config.compile.components:
            logger.info('compile.components holds "loss": the loss of a shared vocabulary is not compiled')
    if runs_slimpipe(config) and isinstance(loss, ChunkedLossWrapper.Config):
        logger.info("Slices bound the size of the logits already: using the loss inside ChunkedLossWrapper")
        loss = loss.loss_fn
    metrics = derive(config.metrics, SlimPipeMetrics.Config)
    return dataclasses.replace(  # type: ignore[call-arg]
        config, model_spec=spec, loss=loss, optimizer=optimizer, metrics=metrics
    )
