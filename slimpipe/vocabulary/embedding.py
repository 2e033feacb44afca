"""The input embedding, with the vocabulary spread over ranks.

Shapes: B batch, L slice, T = B L tokens, V vocabulary, R rows of this rank, D model width.
"""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from slimpipe.dtypes import wide_dtype
from slimpipe.vocabulary.ranks import Group, Ranks
from slimpipe.vocabulary.rows import LocalIds, VocabularyRows


class VocabularyEmbedding(VocabularyRows):
    """Input embedding; each rank of ``group`` holds a shard of the vocabulary's rows, one rank gets the result.

    Every rank calls it with the same ids. Each looks up the rows it holds, with zeros for the others, and the sum goes
    to the rank ``reduce_to`` only. In backward that rank's gradient is broadcast, and each rank adds it to its rows.

    Collectives, on ``group``, both of the output's size: one reduce in forward, one broadcast in backward; every rank
    must call backward. Ranks without rows (see `shard_rows`) take part in both; their weight has shape [0, D].
    FSDP2 as for `VocabularyHead`.

    Args:
        weight: This rank's rows, [R, D]; another module may share it.
        vocab_size: V.
        group: Process group, DeviceMesh axis, or None for one rank.
        reduce_to: The rank of the group that gets the embedding. None: no collectives; each rank gets its part, zeros
            for ids of other ranks, and expects the gradient of the sum; the caller sends. A pipeline schedule asks for
            this.

    Raises:
        ValueError: ``weight`` is not of this rank's shape, ``reduce_to`` is no rank of the group, the mesh has several
            axes, or this rank is not in the group.
    """

    def __init__(
        self, weight: nn.Parameter, *, vocab_size: int, group: Group = None, reduce_to: int | None = 0
    ) -> None:
        super().__init__(weight, vocab_size=vocab_size, group=group)
        if reduce_to is not None:
            self.ranks.check_member("reduce_to", reduce_to)
        self.reduce_to = reduce_to

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, *, group: Group = None, reduce_to: int | None = 0) -> Self:
        """One with a copy of this rank's rows of ``embedding``, which every rank holds whole (or on the meta device).

        Raises:
            ValueError: It uses padding_idx, max_norm, scale_grad_by_freq or sparse; or see the class.
            TypeError: Its weight is a DTensor.
        """
        for name, plain in (
            ("padding_idx", None),
            ("max_norm", None),
            ("scale_grad_by_freq", False),
            ("sparse", False),
        ):
            if getattr(embedding, name) != plain:
                raise ValueError(
                    f"the embedding has {name} = {getattr(embedding, name)}, which a shared vocabulary does not serve; "
                    f"nearest legal value: {plain}"
                )
        return cls._from_whole(embedding.weight, group=group, reduce_to=reduce_to)

    def forward(self, ids_BL: Tensor) -> Tensor:
        """Embeddings of the ids.

        Args:
            ids_BL: int64 or int32, of any shape, equal on every rank.

        Returns:
            [B, L, D] in weight's dtype. On ranks other than ``reduce_to``: zeros that take no memory, to call backward
            on, with any gradient of that shape and dtype; its values are not read.

        Raises:
            ValueError: On a CPU, an id is outside the vocabulary; on other devices that ends in a device-side assert,
                as in nn.Embedding.
            TypeError: The ids are not integers.
        """
        self.check_ids("ids", ids_BL)
        return _Lookup.apply(self.weight, self.local_ids(ids_BL), self.ranks, self.reduce_to)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_RD: Tensor, ids_BL: LocalIds, ranks: Ranks, reduce_to: int | None) -> Tensor:
        ctx.save_for_backward(*ids_BL)
        ctx.ranks, ctx.reduce_to, ctx.num_rows = ranks, reduce_to, len(weight_RD)
        shape = (*ids_BL.mine.shape, weight_RD.shape[1])
        if len(weight_RD) > 0:
            part_BLD = F.embedding(ids_BL.row, weight_RD).masked_fill_(~ids_BL.mine[..., None], 0.0)
        else:
            part_BLD = weight_RD.new_zeros(shape)
        if reduce_to is None:
            return part_BLD
        ranks.start_sum_to(reduce_to, part_BLD).wait()  # exact in any dtype: all terms but one are zero
        if ranks.rank == reduce_to:
            return part_BLD
        # One zero seen everywhere; not by expand(), since FSDP2 warns of modules that return views.
        zero = weight_RD.new_zeros(())
        return weight_RD.new_empty(0).set_(zero.untyped_storage(), 0, shape, (0,) * len(shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BLD: Tensor) -> tuple[Tensor | None, ...]:
        row_BL, mine_BL = ctx.saved_tensors
        if ctx.reduce_to is not None:
            if ctx.ranks.rank == ctx.reduce_to:
                grad_BLD = grad_BLD.contiguous()
            else:
                grad_BLD = torch.empty(grad_BLD.shape, dtype=grad_BLD.dtype, device=grad_BLD.device)
            ctx.ranks.start_broadcast(ctx.reduce_to, grad_BLD).wait()
        # Gradients of ids that other ranks hold go to one row more, which is dropped. Wide, because a frequent id adds
        # up many of them.
        dim, wide = grad_BLD.shape[-1], wide_dtype(grad_BLD.dtype)
        row_T = row_BL.masked_fill(~mine_BL, ctx.num_rows).reshape(-1)
        sum_RD = grad_BLD.new_zeros(ctx.num_rows + 1, dim, dtype=wide)
        sum_RD.index_add_(0, row_T, grad_BLD.reshape(-1, dim).to(wide))
        return sum_RD[: ctx.num_rows].to(grad_BLD.dtype), None, None, None
