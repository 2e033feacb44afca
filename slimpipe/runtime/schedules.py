"""The public schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from slimpipe.options import SlimPipeOptions
from slimpipe.runtime.base_schedule import SlimPipeSchedule
from slimpipe.runtime.refusals import check_loss_fn
from slimpipe.vocabulary import VocabularyEmbedding


class ScheduleSlimPipe(SlimPipeSchedule, PipelineScheduleSingle):
    """SlimPipe with one stage per rank: 1F1B over slices of sequences (design 1.2).

    Loss and gradients equal those of the unsliced model; rank r keeps the activations of at most
    ``num_slices + 2 (p - 1 - r)`` slices instead of ``p - r`` whole microbatches.

    Args:
        stage: This rank's stage; its module takes ``positions`` and ``attention_masks`` and uses `SliceAttention`.
        n_microbatches: Microbatches per step, any number from 1.
        loss_fn: ``loss_fn(output, target, **loss_kwargs)`` -> scalar, called per slice: a sum over tokens, or that sum
            divided by the step's token count. None for forward only. A `VocabularyHead` on every rank (with
            ``reduce_to=None``): all ranks share the output layer, and the last stage returns what enters it.
        num_slices: Slices per microbatch, at least the number of pipeline ranks; the sequence length must divide by it.
        options: See `SlimPipeOptions`.
        embedding: With a `VocabularyHead`, a `VocabularyEmbedding` on every rank (with ``reduce_to=None``): all ranks
            share the input embedding as well, and the first stage takes embeddings instead of tokens.
        args_chunk_spec: As torch's schedules.
        kwargs_chunk_spec: As torch's schedules.
        output_merge_spec: As torch's schedules.
        scale_grads: Must be False: gradients are never rescaled.

    Raises:
        TypeError: A value of the wrong type.
        ValueError: A value outside its rule; names the value, the rule and the nearest legal value.
    """

    def __init__(
        self,
        stage: PipelineStage,
        n_microbatches: int,
        loss_fn: Callable | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = False,
        *,
        num_slices: int,
        options: SlimPipeOptions | None = None,
        embedding: VocabularyEmbedding | None = None,
    ) -> None:
        check_loss_fn(loss_fn, scale_grads=scale_grads)
        self._set_up([stage], n_microbatches, num_slices, options, loss_fn, embedding)
        PipelineScheduleSingle.__init__(
            self, stage, n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads
        )

    def _get_pipeline_order(self) -> dict:
        return self.program.to_pipeline_order()

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("a slimpipe schedule runs its program; call step()")


class ScheduleInterleavedSlimPipe(SlimPipeSchedule, PipelineScheduleMulti):
    """SlimPipe with several stages per rank: fewer idle ticks and fewer live bytes per rank (design 1.2).

    Args:
        stages: This rank's stages, global indices r, r + p, r + 2p, ...
        n_microbatches: As `ScheduleSlimPipe`, and so are all other arguments.
        loss_fn: See there.
        args_chunk_spec: See there.
        kwargs_chunk_spec: See there.
        output_merge_spec: See there.
        use_full_backward: Accepted for torch's sake; must be None or True.
        scale_grads: See there.
        backward_requires_autograd: Accepted for torch's sake; must be True.
        num_slices: See there.
        options: See there.
        embedding: See there.

    Raises:
        TypeError: A value of the wrong type.
        ValueError: A value outside its rule.
    """

    def __init__(
        self,
        stages: list[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        use_full_backward: bool | None = None,
        scale_grads: bool = False,
        backward_requires_autograd: bool = True,
        *,
        num_slices: int,
        options: SlimPipeOptions | None = None,
        embedding: VocabularyEmbedding | None = None,
    ) -> None:
        if not isinstance(stages, list) or not stages:
            raise TypeError(f"stages is {stages!r}; it must be a list of this rank's stages")
        if use_full_backward is False or not backward_requires_autograd:
            raise ValueError("use_full_backward and backward_requires_autograd must be True: backward is not split")
        check_loss_fn(loss_fn, scale_grads=scale_grads)
        self._set_up(stages, n_microbatches, num_slices, options, loss_fn, embedding)
        PipelineScheduleMulti.__init__(
            self,
            [*stages],
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads=scale_grads,
        )
        self.pipeline_order = self.program.to_pipeline_order()

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("a slimpipe schedule runs its program; call step()")
