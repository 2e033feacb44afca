"""Before a step: which vocabulary the ranks of a pipeline share, and whether all of them mean the same one."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from slimpipe.runtime.refusals import refuse_data_parallel_wrappers
from slimpipe.vocabulary import VocabularyEmbedding, VocabularyHead


def vocab_parallel(loss_fn: Callable | None, embedding: VocabularyEmbedding | None) -> str:
    """Which work on the vocabulary the ranks share, as the program calls it.

    Raises:
        TypeError: ``embedding`` is no `VocabularyEmbedding`, or ``loss_fn`` is something around a `VocabularyHead`.
        ValueError: An embedding without a head, or a head or embedding that sends what the schedule would send.
    """
    if not isinstance(embedding, VocabularyEmbedding | None):
        raise TypeError(f"embedding is a {type(embedding).__name__}; it must be a slimpipe VocabularyEmbedding or None")
    if not isinstance(loss_fn, VocabularyHead):
        _refuse_head_inside(loss_fn)
        if embedding is not None:
            raise ValueError(
                "embedding is a VocabularyEmbedding but loss_fn no VocabularyHead: a schedule shares the output layer "
                "alone, or both; nearest legal value: embedding=None"
            )
        return "none"
    for name, module in (("loss_fn", loss_fn), ("embedding", embedding)):
        if module is not None and module.reduce_to is not None:
            raise ValueError(
                f"{name} has reduce_to = {module.reduce_to!r}: a pipeline schedule adds up what the ranks computed; "
                "nearest legal value: reduce_to=None"
            )
    return "output" if embedding is None else "both"


def _refuse_head_inside(loss_fn: Callable | None) -> None:
    """Refuse what would call a head on the last rank alone, which would wait there for the others."""
    inner = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn
    if isinstance(inner, nn.Module) and any(isinstance(part, VocabularyHead) for part in inner.modules()):
        raise TypeError(
            f"loss_fn is a {type(loss_fn).__name__} around a VocabularyHead; it must be the VocabularyHead itself, "
            "with fully_shard (FSDP2) for data parallelism, and loss_kwargs for further arguments"
        )


def vocabulary_hash(loss_fn: Callable | None, embedding: VocabularyEmbedding | None) -> int:
    """A number that differs where ranks mean different shared vocabularies, by all likelihood; 0 for none."""
    if not isinstance(loss_fn, VocabularyHead):
        return 0
    settings: list[object] = [loss_fn.block_size, loss_fn.ignore_index]
    for module in (loss_fn, embedding):
        if module is not None:
            weight = module.weight
            settings.append((module.vocab_size, weight.shape[1], str(weight.dtype), module.ranks.members))
    return 1 + zlib.crc32(repr(settings).encode())


def loss_kwargs_hash(loss_fn: Callable | None, loss_kwargs: dict[str, Any] | None) -> int:
    """A number that differs where ranks would compute different losses with a shared head, by all likelihood: hashes
    names, and numbers, those in 0-dim tensors too. 0 without a shared head."""
    if not isinstance(loss_fn, VocabularyHead):
        return 0
    numbers = {
        name: value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
        for name, value in (loss_kwargs or {}).items()
    }
    seen = [(name, value if isinstance(value, (int, float)) else None) for name, value in sorted(numbers.items())]
    return 1 + zlib.crc32(repr(seen).encode())


def check_vocabulary(
    head: VocabularyHead | None, embedding: VocabularyEmbedding | None, *, group: dist.ProcessGroup | None
) -> None:
    """Refuse modules that the ranks of a pipeline cannot share.

    Args:
        head: Output layer, if shared.
        embedding: Input embedding, if shared.
        group: The pipeline's process group; None for one rank.

    Raises:
        ValueError: The ranks of the pipeline are not all among those of a module, or DistributedDataParallel.
    """
    pipeline = {0} if group is None else set(dist.get_process_group_ranks(group))
    for name, module in (("loss_fn", head), ("embedding", embedding)):
        if module is None:
            continue
        members = pipeline if group is None else set(module.ranks.members)
        if not pipeline <= members:
            raise ValueError(
                f"{name} shares the vocabulary among ranks {sorted(members)}, but the pipeline has ranks "
                f"{sorted(pipeline)}: all of them must take part; nearest legal value: group = the stages' group"
            )
        refuse_data_parallel_wrappers(module, f"the {type(module).__name__} given as {name}")
