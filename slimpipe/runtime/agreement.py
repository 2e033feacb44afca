"""Before a step's first message, all pipeline ranks agree that they mean the same step, or all of them raise."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from slimpipe.gather import gather_objects, gather_tensors
from slimpipe.transport import PipelineError

_UNKNOWN = -1


class StepShape(NamedTuple):
    """What must be equal on all ranks of a pipeline; -1 where a rank cannot know."""

    failed: int
    """1 if this rank has an error of its own to report."""
    seq_len: int
    num_tokens: int
    """Tokens of one microbatch."""
    has_positions: int
    documents: int
    """Hash of where documents start."""
    has_backward: int
    num_slices: int
    num_stages_per_rank: int
    num_microbatches: int
    seq_dim: int
    exchange: int
    """Hash of the options of the context exchange."""
    record_times: int
    vocabulary: int
    """Hash of which work on the vocabulary is shared, and how; 0 for none."""
    loss_kwargs: int
    """Hash of ``loss_kwargs`` where the output layer is shared; 0 where it is not."""
    num_failures: int
    """Steps that failed so far."""


_NAMES = {
    "seq_len": "the sequence length",
    "num_tokens": "the number of tokens per microbatch",
    "has_positions": "whether positions are given (1) or not (0); every pipeline rank must get them, or none",
    "documents": "the positions (a hash of the document starts is shown)",
    "has_backward": "whether to train (1) or evaluate (0)",
    "num_slices": "num_slices",
    "num_stages_per_rank": "the number of stages per rank",
    "num_microbatches": "n_microbatches",
    "seq_dim": "SlimPipeOptions.seq_dim",
    "exchange": "context_exchange, exchange_granularity or exchange_max_slices (a hash of the three is shown)",
    "record_times": "SlimPipeOptions.record_times",
    "vocabulary": "the shared vocabulary: a VocabularyHead (as loss_fn) or VocabularyEmbedding on some ranks only, or "
    "of another size, dtype, group, block_size or ignore_index (a hash is shown; 0 for none)",
    "loss_kwargs": "loss_kwargs, which every rank that shares the output layer must get alike (a hash is shown)",
    "num_failures": "the number of steps that failed: a schedule can go on only after a step that failed on all ranks",
}


def agree(
    mine: StepShape, error: Exception | None, *, group: dist.ProcessGroup | None, device: torch.device
) -> StepShape:
    """Exchange step shapes over the pipeline's group.

    One all-gather of a few integers on ``group``; a second one, of texts, only where a rank has an error.

    Args:
        mine: This rank's view.
        error: This rank's error, or None.
        group: The pipeline's process group; None for a pipeline of one rank.
        device: Device of the exchanged integers.

    Returns:
        The shape with every value known.

    Raises:
        ValueError: A rank has an error (its own error on that rank), or the ranks differ; raised on every rank.
        PipelineError: A rank did not come.
    """
    shapes, errors = [mine], [None if error is None else str(error)]
    if group is not None:
        shapes = _gather(mine, group, device)
        if any(shape.failed for shape in shapes):
            text = None if error is None else f"{type(error).__name__}: {error}"
            errors = gather_objects(text, group=group, device=device)
    if error is not None:
        raise error
    for rank, text in enumerate(errors):
        if text is not None:
            raise ValueError(f"pipeline rank {rank} cannot run this step: {text}")
    return StepShape(*(_common(name, [getattr(shape, name) for shape in shapes]) for name in StepShape._fields))


def _gather(mine: StepShape, group: dist.ProcessGroup, device: torch.device) -> list[StepShape]:
    flat = torch.tensor(mine, dtype=torch.int64, device=device)
    try:
        everyone = gather_tensors(flat, group)
    except RuntimeError as error:
        raise PipelineError(
            f"pipeline rank {dist.get_rank(group)} waited at the start of a step: another rank failed, died or is "
            f"stuck ({type(error).__name__}: {error})"
        ) from error
    return [StepShape(*shape.tolist()) for shape in everyone]


def _common(name: str, values: list[int]) -> int:
    known = {value for value in values if value != _UNKNOWN}
    if len(known) > 1:
        raise ValueError(f"the pipeline's ranks differ in {_NAMES[name]}: rank by rank {values}")
    if not known:
        raise ValueError(f"no pipeline rank knows {_NAMES[name]}: rank 0 must get the tokens")
    return known.pop()
