"""What head and embedding have in common: this rank's rows of a vocabulary matrix, and ids that point into it.

Shapes: V vocabulary, R rows of this rank, D model width.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slimpipe.vocabulary.ranks import Group, Ranks
from slimpipe.vocabulary.shards import shard_rows

_ID_DTYPES = (torch.int64, torch.int32)


class LocalIds(NamedTuple):
    """Ids seen from one rank."""

    row: Tensor
    """int64: the row in this rank's shard, 0 where another rank holds it. An id outside the vocabulary stays out of
    range, so that torch's kernels fail on it as they do in nn.Embedding."""
    mine: Tensor
    """bool: whether this rank holds the row."""


class VocabularyRows(nn.Module):
    """The rows ``shard_rows(vocab_size, num_ranks=group size, rank=rank in the group)`` of a [V, D] matrix.

    Attributes:
        weight: The rows [R, D], a plain parameter; R may be 0. Modules may share one parameter (tied weights): its
            gradient is the sum; FSDP2 must not shard it, as it would make it two. Under the name of the whole matrix in
            a state dict it is still only this rank's rows: who saves it must say so.
        rows: Which rows they are.
        vocab_size: V.
    """

    weight: nn.Parameter

    def __init__(self, weight: nn.Parameter, *, vocab_size: int, group: Group) -> None:
        super().__init__()
        self.ranks = Ranks(group)
        self.vocab_size = vocab_size
        self.rows = shard_rows(vocab_size, num_ranks=self.ranks.size, rank=self.ranks.rank)
        if weight.ndim != 2 or len(weight) != len(self.rows):
            raise ValueError(
                f"weight has shape {tuple(weight.shape)}: rank {self.ranks.rank} of {self.ranks.size} holds "
                f"{self.rows} of {vocab_size}; nearest legal shape: "
                f"({len(self.rows)}, {weight.shape[-1]})"
            )
        self.weight = weight

    @classmethod
    def _from_whole(cls, whole: nn.Parameter | Tensor, *, group: Group, **settings) -> Self:
        """A copy of this rank's rows of a whole [V, D] parameter; no communication."""
        if isinstance(whole, DTensor):
            raise TypeError("the weight is a DTensor: share the vocabulary first, then apply fully_shard to the result")
        ranks = Ranks(group)
        rows = shard_rows(len(whole), num_ranks=ranks.size, rank=ranks.rank)
        weight = nn.Parameter(whole.detach()[rows.start : rows.stop].clone(), requires_grad=whole.requires_grad)
        return cls(weight, vocab_size=len(whole), group=group, **settings)

    def local_ids(self, ids: Tensor) -> LocalIds:
        """Where in this rank's rows the ids are; costs no device sync."""
        local = ids.long() - self.rows.start
        mine = (local >= 0) & (local < len(self.rows))
        elsewhere = (ids >= 0) & (ids < self.vocab_size) & ~mine
        return LocalIds(local.masked_fill(elsewhere, 0), mine)

    def check_ids(self, name: str, ids: Tensor, *, or_else: str = "") -> None:
        """Raise unless the ids are int64 or int32 and, on a CPU, inside the vocabulary.

        On other devices the values are left to the asserts in torch's own kernels: looking would stall the host.
        """
        if ids.dtype not in _ID_DTYPES:
            raise TypeError(f"{name} has dtype {ids.dtype}: it must be torch.int64 or torch.int32")
        if ids.device.type != "cpu":
            return
        wrong = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(wrong):
            value = int(wrong[0])
            raise ValueError(
                f"{name} holds {value}: it must be 0 .. {self.vocab_size - 1}{or_else}; "
                f"nearest legal value: {min(max(value, 0), self.vocab_size - 1)}"
            )

    def extra_repr(self) -> str:
        return f"{self.rows} of {self.vocab_size}, rank {self.ranks.rank} of {self.ranks.size}"
