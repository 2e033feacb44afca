"""The output layer and its loss, with the vocabulary spread over ranks.

Shapes: B batch, L slice, T = B L tokens, V vocabulary, R rows of this rank, D model width.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from slimpipe.dtypes import wide_dtype
from slimpipe.vocabulary.cross_entropy import cross_entropy
from slimpipe.vocabulary.ranks import Group, Ranks
from slimpipe.vocabulary.rows import LocalIds, VocabularyRows

ReduceTo = int | Literal["all"] | None


class VocabularyHead(VocabularyRows):
    """Output matrix and summed cross entropy; each rank of ``group`` holds a shard of the vocabulary's rows.

    What `forward` returns equals ``cross_entropy(hidden @ whole_weight.T, labels, reduction="sum") / denominator``.
    Every rank calls it with the same hidden states and labels. Loss and gradients are computed together, block by block
    of tokens; nothing of logit size outlives a block. ``loss.backward()`` then only scales them; it can run once.

    Collectives, all on ``group``: in forward two all-reduces of token size per block (see `cross_entropy`), and, unless
    under ``torch.no_grad()``, one reduction of the hidden states' gradient, chosen by ``reduce_to``, whether or not
    this rank wants that gradient. None in backward. Ranks without rows (see `shard_rows`) take part in all of them;
    their weight has shape [0, D].

    With FSDP2, apply ``fully_shard`` to this module over an axis orthogonal to ``group``; the gradient of ``weight``
    comes through autograd, so hooks and switches work. ``reshard_after_forward=False`` saves an all-gather: backward
    does not read the weight. Leave out ranks without rows: FSDP2 cannot reduce an empty unit.

    Args:
        weight: This rank's rows, [R, D]; another module may share it.
        vocab_size: V.
        group: Process group, DeviceMesh axis, or None for one rank.
        block_size: Tokens whose logits exist at a time: [block_size, R], at most 2 x 4 bytes each (float64: 8).
        ignore_index: Labels that add neither loss nor gradient.
        reduce_to: Where the gradient of the hidden states, a sum over ranks, ends up: "all": on every rank. A rank of
            the group: on this one; hidden states get no gradient on the others (None, or zeros where a hook such as
            FSDP2's makes them). None: nowhere; each rank gets its part, and the caller sends and adds them (in float32:
            added in bfloat16, eight parts have twice the error). A pipeline schedule asks for this.

    Raises:
        ValueError: ``weight`` is not of this rank's shape, ``block_size`` < 1, ``reduce_to`` is no rank of the group,
            the mesh has several axes, or this rank is not in the group.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        *,
        vocab_size: int,
        group: Group = None,
        block_size: int = 1024,
        ignore_index: int = -100,
        reduce_to: ReduceTo = "all",
    ) -> None:
        super().__init__(weight, vocab_size=vocab_size, group=group)
        if block_size < 1:
            raise ValueError(f"block_size = {block_size}: it must be at least one token; nearest legal value: 1")
        if isinstance(reduce_to, int):
            self.ranks.check_member("reduce_to", reduce_to)
        elif reduce_to not in ("all", None):
            raise ValueError(f"reduce_to = {reduce_to!r}: it must be a rank, 'all' or None; nearest legal value: 'all'")
        self.block_size = block_size
        self.ignore_index = ignore_index
        self.reduce_to = reduce_to

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, group: Group = None, **settings: Any) -> Self:
        """A head with a copy of this rank's rows of ``linear``, which every rank holds whole (or on the meta device).

        Args:
            linear: The output layer, [V, D], without bias.
            group: See the class.
            **settings: ``block_size``, ``ignore_index``, ``reduce_to`` of the class.

        Raises:
            ValueError: It has a bias; or see the class.
            TypeError: Its weight is a DTensor.
        """
        if linear.bias is not None:
            raise ValueError("the output layer has a bias: it must have none; nearest legal value: bias=False")
        return cls._from_whole(linear.weight, group=group, **settings)

    def forward(self, hidden_BLD: Tensor, labels_BL: Tensor, *, denominator: float | Tensor | None = None) -> Tensor:
        """Summed loss of all tokens of all ranks' rows, divided by ``denominator``.

        Args:
            hidden_BLD: Equal on every rank, of weight's dtype (under autocast, of any); any leading dimensions.
            labels_BL: int64 or int32, of hidden's leading shape, equal on every rank.
            denominator: A number, or a 0-dim tensor on hidden's device, for example the valid tokens of the global
                batch. None for a raw sum, as in evaluation.

        Returns:
            A 0-dim tensor, float32 (float64 for float64), bitwise equal on every rank. All labels ignored: exactly 0,
            with zero gradients.

        Raises:
            ValueError: Shapes do not fit, the denominator is not positive (tensors are not looked at), or, on a CPU, a
                label is outside the vocabulary; on other devices the latter ends in a device-side assert, as in torch's
                own cross entropy.
            TypeError: A dtype does not fit.
        """
        self._check(hidden_BLD, labels_BL, denominator)
        weight_RD: Tensor = self.weight
        device_type = hidden_BLD.device.type
        if torch.is_autocast_enabled(device_type) and weight_RD.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device_type)
            hidden_BLD, weight_RD = hidden_BLD.to(dtype), weight_RD.to(dtype)
        if hidden_BLD.dtype != weight_RD.dtype:
            raise TypeError(f"hidden states have dtype {hidden_BLD.dtype}, but weight has {weight_RD.dtype}")

        labels_T = labels_BL.reshape(-1)
        valid_T = labels_T != self.ignore_index
        labels_T = labels_T.masked_fill(~valid_T, 0)
        self.check_ids("labels", labels_T, or_else=f", or {self.ignore_index} to be ignored")
        scale_T = valid_T.to(wide_dtype(weight_RD.dtype)) / (1 if denominator is None else denominator)
        scale_T.masked_fill_(~valid_T, 0.0)  # where nothing is valid at all, the denominator may be 0
        return _LossAndGradients.apply(
            hidden_BLD.reshape(-1, hidden_BLD.shape[-1]),
            weight_RD,
            self.local_ids(labels_T),
            scale_T,
            self.ranks,
            self.block_size,
            self.reduce_to,
            torch.is_grad_enabled(),
        )

    def _check(self, hidden_BLD: Tensor, labels_BL: Tensor, denominator: float | Tensor | None) -> None:
        if labels_BL.shape != hidden_BLD.shape[:-1]:
            raise ValueError(
                f"labels have shape {tuple(labels_BL.shape)}: there must be one for each of the hidden states "
                f"{tuple(hidden_BLD.shape)}; nearest legal shape: {tuple(hidden_BLD.shape[:-1])}"
            )
        if hidden_BLD.shape[-1] != self.weight.shape[-1]:
            raise ValueError(
                f"hidden states have shape {tuple(hidden_BLD.shape)}: the last dimension must be that of weight; "
                f"nearest legal value: {self.weight.shape[-1]}"
            )
        if isinstance(denominator, Tensor):
            if denominator.ndim > 0:
                raise ValueError(f"denominator has shape {tuple(denominator.shape)}; nearest legal shape: ()")
            if denominator.dtype in (torch.bfloat16, torch.float16):
                raise TypeError(
                    f"denominator has dtype {denominator.dtype}, which cannot count tokens (FSDP2's mixed precision "
                    "casts floating-point arguments to it); pass a number or an integer tensor"
                )
        elif denominator is not None and denominator <= 0:
            raise ValueError(f"denominator = {denominator}: it must be positive; nearest legal value: None, a raw sum")


class _LossAndGradients(torch.autograd.Function):
    """Computes loss and gradients in forward; backward multiplies with what comes from above."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_RD: Tensor,
        targets_T: LocalIds,
        scale_T: Tensor,
        ranks: Ranks,
        block_size: int,
        reduce_to: ReduceTo,
        with_gradients: bool,
    ) -> Tensor:
        loss, grad_hidden_TD, grad_weight_RD = cross_entropy(
            hidden_TD,
            weight_RD=weight_RD,
            targets_T=targets_T,
            scale_T=scale_T,
            ranks=ranks,
            block_size=block_size,
            with_gradients=with_gradients,
        )
        if grad_hidden_TD is not None:
            grad_hidden_TD = _reduce(grad_hidden_TD, ranks, reduce_to)
            ctx.save_for_backward(grad_hidden_TD, grad_weight_RD)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        # In place, so that no second copy is made; autograd itself refuses a second backward.
        grads = [None if grad is None else grad.mul_(grad_loss) for grad in ctx.saved_tensors]
        return *grads, *(None,) * 6


def _reduce(grad_TD: Tensor, ranks: Ranks, reduce_to: ReduceTo) -> Tensor | None:
    """The sum over ranks where ``reduce_to`` wants it; in wide dtype, since its terms are rounded already."""
    if reduce_to is None or ranks.size == 1:
        return grad_TD
    sum_TD = grad_TD.to(wide_dtype(grad_TD.dtype))
    if reduce_to == "all":
        ranks.all_sum(sum_TD)
    else:
        ranks.start_sum_to(reduce_to, sum_TD).wait()
    return sum_TD.to(grad_TD.dtype) if reduce_to in ("all", ranks.rank) else None
