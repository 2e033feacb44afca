"""Which executor runs a step, and what it runs on: one for training and one for evaluation, made when first needed.

With context exchange a batch shape has an executor of its own. Its first step runs without exchange and learns the
attention events of this rank's stages; before the second one the ranks tell one another, and plan who helps whom.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from slimpipe.attention.events import Learner, StageEvents
from slimpipe.attention.helper import Exchange
from slimpipe.gather import gather_objects
from slimpipe.mailbox import Mailbox
from slimpipe.options import SlimPipeOptions
from slimpipe.program import Program
from slimpipe.runtime.agreement import StepShape
from slimpipe.runtime.executor import Executor
from slimpipe.runtime.measure import exchange_costs
from slimpipe.runtime.meter import MemoryMeter
from slimpipe.runtime.stage import Stage
from slimpipe.runtime.vocabulary import SharedVocabulary
from slimpipe.torch_private import group_timeout
from slimpipe.transport import Transport
from slimpipe.vocabulary import VocabularyEmbedding, VocabularyHead

logger = logging.getLogger(__name__)

BuildProgram = Callable[..., Program]
"""`build_program` with the numbers of ranks, slices, stages and microbatches given."""


class ExchangeRefusedError(ValueError):
    """Others cannot help a stage, and they should. Raised on every rank, with nothing under way."""


class Executors:
    """The executors of one schedule.

    Args:
        program: The program of a training step without exchange.
        build: Builds other programs.
        rank: Pipeline rank.
        stages: This rank's stages by global index.
        group: The pipeline's process group; None for one rank.
        device: Where the stages run.
        options: Options of the schedule.
        meter: Where saved bytes are counted; None to count nothing.
        head: This rank's part of a shared output layer; None where the last stage has its own.
        embedding: This rank's part of a shared embedding; None where the first stage has its own.
    """

    def __init__(
        self,
        program: Program,
        *,
        build: BuildProgram,
        rank: int,
        stages: dict[int, Stage],
        group: dist.ProcessGroup | None,
        device: torch.device,
        options: SlimPipeOptions,
        meter: MemoryMeter | None,
        head: VocabularyHead | None,
        embedding: VocabularyEmbedding | None,
    ) -> None:
        self._head, self._embedding = head, embedding
        self._vocabulary: SharedVocabulary | None = None
        self._program, self._build, self._rank, self._stages = program, build, rank, stages
        self._group, self._device, self._options, self._meter = group, device, options, meter
        self._transport: Transport | None = None
        self._mailbox: Mailbox | None = None
        self._last_shape: StepShape | None = None
        self._plain: dict[bool, Executor] = {}
        self._learned: dict[StepShape, dict[int, Learner]] = {}
        """What each batch shape's first step learned, until it is planned for."""
        self._planned: dict[StepShape, Executor] = {}

    def choose(self, shape: StepShape) -> Executor:
        """The executor of a step of this shape; collective over the group where anything is made.

        Raises:
            ExchangeRefusedError: Others cannot help a stage, and ``context_exchange = "on"``.
        """
        shape = shape._replace(documents=0)  # documents are read anew in every step
        self._reach_others(shape)
        if self._group is None or self._options.context_exchange == "off":
            return self._plain_executor(shape)
        if shape in self._learned:
            self._planned[shape] = self._plan(shape, self._learned[shape])
            del self._learned[shape]
        if shape in self._planned:
            return self._planned[shape]
        executor = self._plain_executor(shape)
        executor.learners = {index: Learner() for index in self._stages}
        return executor

    def done(self, shape: StepShape, executor: Executor) -> None:
        """A step of this shape has succeeded."""
        if executor.learners is not None:
            self._learned[shape._replace(documents=0)] = executor.learners
            executor.learners = None

    def close(self) -> None:
        """Destroy the process groups. Collective."""
        for part in (self._transport, self._mailbox, self._vocabulary):
            if part is not None:
                part.close()

    @property
    def num_bytes(self) -> int:
        """Bytes of K,V on this rank, those held for other ranks included, and of gradients of hidden states."""
        return sum(executor.kv_bytes + executor.held_bytes for executor in self._everyone()) + (
            0 if self._vocabulary is None else self._vocabulary.num_bytes
        )

    # Parts -----------------------------------------------------------------------------------------------------------

    def _everyone(self) -> set[Executor]:
        """Each once: where nothing moves, what is planned is the plain one."""
        return {*self._plain.values(), *self._planned.values()}

    def _reach_others(self, shape: StepShape) -> None:
        """Make, or bring up to date, the channels of the pipeline."""
        has_new_shape, self._last_shape = shape != self._last_shape, shape
        if self._vocabulary is None and self._head is not None:
            self._vocabulary = SharedVocabulary(self._head, self._embedding, pipeline=self._group, device=self._device)
        if self._vocabulary is not None and has_new_shape:
            self._vocabulary.forget_shapes()
        if self._group is None:
            return
        timeout = group_timeout(self._group, self._device)
        if self._transport is None:
            wraps = len(self._stages) > 1
            self._transport = Transport(self._group, wraps=wraps, device=self._device, timeout=timeout)
            if self._options.context_exchange != "off":
                # Now, though it may not be needed: with a device bound to NCCL all ranks of the job, not only those of
                # this pipeline, take part in making a group, and another pipeline may plan otherwise.
                self._mailbox = Mailbox(self._group, device=self._device, timeout=timeout)
        if timeout is not None and timeout != self._transport.timeout:
            self._set_timeout(timeout)  # torchtitan shortens its groups' timeouts after the first step
        if has_new_shape:
            self._transport.forget_shapes()

    def _set_timeout(self, timeout: timedelta) -> None:
        assert self._transport is not None
        self._transport.set_timeout(timeout)
        if self._mailbox is not None:
            self._mailbox.set_timeout(timeout)
        if self._vocabulary is not None:
            self._vocabulary.set_timeout(timeout)

    def _plain_executor(self, shape: StepShape) -> Executor:
        trains = bool(shape.has_backward)
        if trains not in self._plain:
            self._plain[trains] = self._executor(self._program if trains else self._build(forward_only=True))
        return self._plain[trains]

    def _executor(self, program: Program, exchange: Exchange | None = None) -> Executor:
        return Executor(
            program,
            rank=self._rank,
            stages=self._stages,
            device=self._device,
            transport=self._transport,
            options=self._options,
            meter=self._meter,
            exchange=exchange,
            vocabulary=self._vocabulary,
        )

    def _plan(self, shape: StepShape, learners: dict[int, Learner]) -> Executor:
        """Tell one another what was learned, and plan with it."""
        assert self._group is not None
        stages = self._tell(learners)
        layers = [layer for stage in stages for layer in stage.layers.values()]
        if not layers:
            return self._plain_executor(shape)
        costs = None
        if self._options.context_exchange == "auto":
            costs = exchange_costs(layers[0], options=self._options, group=self._group, device=self._device)
        program = self._build(
            slice_len=layers[0].slice_len,
            layers_per_stage=tuple(len(stage.layers) for stage in stages),
            forward_only=not shape.has_backward,
            options=self._options,
            exchange_costs=costs,
        )
        if not program.transfers:
            if self._options.context_exchange == "on":
                logger.warning(
                    "SlimPipeOptions.context_exchange = 'on' moves nothing: slices of %d tokens, of which "
                    "exchange_granularity = %d move together",
                    layers[0].slice_len,
                    self._options.exchange_granularity,
                )
            return self._plain_executor(shape)
        assert self._mailbox is not None
        self._mailbox.connect((program.rank_of(transfer.unit.stage), transfer.helper) for transfer in program.transfers)
        exchange = Exchange(program, rank=self._rank, mailbox=self._mailbox, stages=stages)
        return self._executor(program, exchange)

    def _tell(self, learners: dict[int, Learner]) -> list[StageEvents]:
        """What every stage's rank has learned, by stage; nothing if others cannot help some stage."""
        mine = {index: learner.learned() for index, learner in learners.items()}
        assert self._group is not None
        everyones = gather_objects(mine, group=self._group, device=self._device)
        stages = {index: learned for rank in everyones for index, learned in rank.items()}
        refusals = [f"stage {index}: {why}" for index, why in sorted(stages.items()) if isinstance(why, str)]
        if refusals and self._options.context_exchange == "on":
            raise ExchangeRefusedError(
                f"SlimPipeOptions.context_exchange = 'on': ranks cannot help one another: {'; '.join(refusals)}; "
                "nearest legal value: 'off'"
            )
        if refusals:
            logger.warning("no context exchange: %s", "; ".join(refusals))
            return []
        return [stage for _, stage in sorted(stages.items()) if isinstance(stage, StageEvents)]
