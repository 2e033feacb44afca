"""Cross entropy of hidden states with an output matrix whose rows are spread over ranks, gradients in the same pass.

With z = h W^T, a token's loss is log(sum_v exp(z_v)) - z_target, and dL/dz = softmax(z) - onehot(target), both times
the loss's known scale. So one pass over blocks of tokens gives the loss and both gradients, and the logits of a block
die with it.

Shapes: T tokens, R rows of this rank, D model width; in `_block_*` T counts the tokens of one block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slimpipe.dtypes import wide_dtype
from slimpipe.vocabulary.ranks import Ranks
from slimpipe.vocabulary.rows import LocalIds


class LossAndGradients(NamedTuple):
    """What `cross_entropy` returns."""

    loss: Tensor
    """0-dim, in `wide_dtype`, bitwise equal on every rank."""
    grad_hidden_TD: Tensor | None
    """This rank's part, in hidden's dtype: the gradient is the sum of all ranks' parts."""
    grad_weight_RD: Tensor | None
    """Of this rank's rows, complete, in weight's dtype."""


def cross_entropy(
    hidden_TD: Tensor,
    *,
    weight_RD: Tensor,
    targets_T: LocalIds,
    scale_T: Tensor,
    ranks: Ranks,
    block_size: int,
    with_gradients: bool,
) -> LossAndGradients:
    """Sum over tokens of scale * cross entropy, and its gradients.

    Collective over ``ranks``: per block of tokens one all-reduce of one number per token (the largest logit) and one of
    two (sum of exponentials, target's logit); nothing else is sent. A rank without rows takes part with nothing to add.

    At most one block's logits exist at a time, in `wide_dtype`; their softmax and gradient are written in place of
    them, and a narrower copy is made where the products run in a narrower dtype: never more than 2 x block_size x R x
    itemsize of `wide_dtype`.

    Args:
        hidden_TD: Equal on every rank, of weight's dtype; products run in it.
        weight_RD: This rank's rows.
        targets_T: The labels seen from this rank.
        scale_T: What each token's loss is multiplied with, 0 for ignored tokens; in `wide_dtype`.
        ranks: Who holds the other rows.
        block_size: Tokens of a block.
        with_gradients: Whether gradients are wanted, otherwise both are None.
    """
    wide = wide_dtype(weight_RD.dtype)
    loss = hidden_TD.new_zeros((), dtype=wide)
    grad_hidden_TD = torch.empty_like(hidden_TD) if with_gradients else None
    grad_weight_RD = torch.zeros_like(weight_RD, dtype=wide) if with_gradients else None
    for first in range(0, len(hidden_TD), block_size):
        block = slice(first, first + block_size)
        targets, scale = LocalIds(*(ids_T[block] for ids_T in targets_T)), scale_T[block]
        exp_TR = (hidden_TD[block] @ weight_RD.T).to(wide)
        sum_T, target_T = _block_statistics_(exp_TR, targets, ranks)
        loss += torch.where(scale == 0, 0.0, (sum_T.log() - target_T) * scale).sum()
        if grad_hidden_TD is not None and grad_weight_RD is not None:
            grad_TR = _block_gradient_(exp_TR, sum_T, targets, scale).to(weight_RD.dtype)
            torch.mm(grad_TR, weight_RD, out=grad_hidden_TD[block])
            _add_product_(grad_weight_RD, grad_TR.T, hidden_TD[block])
            del grad_TR
        del exp_TR  # before the next block's logits are made
    if grad_weight_RD is not None:
        grad_weight_RD = grad_weight_RD.to(weight_RD.dtype)
    return LossAndGradients(loss, grad_hidden_TD, grad_weight_RD)


def _block_statistics_(logits_TR: Tensor, targets: LocalIds, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Turn logits into exp(logits - their largest); return the sum of these and the target's logit - largest."""
    has_rows = logits_TR.shape[1] > 0
    largest_T = logits_TR.amax(1) if has_rows else logits_TR.new_full((len(logits_TR),), -torch.inf)
    ranks.all_max(largest_T)
    logits_TR.sub_(largest_T[:, None])
    # Of a token, one rank knows the target's logit, and every rank a part of the sum: one message for both.
    both_2T = logits_TR.new_zeros(2, len(logits_TR))
    if has_rows:
        both_2T[1] = torch.where(targets.mine, logits_TR.gather(1, targets.row[:, None])[:, 0], 0.0)
        torch.sum(logits_TR.exp_(), 1, out=both_2T[0])
    ranks.all_sum(both_2T)
    return both_2T[0], both_2T[1]


def _block_gradient_(exp_TR: Tensor, sum_T: Tensor, targets: LocalIds, scale_T: Tensor) -> Tensor:
    """Turn exponentials into the gradient of the logits: scale * (softmax - onehot)."""
    exp_TR.mul_((scale_T / sum_T)[:, None])
    if exp_TR.shape[1] > 0:
        exp_TR.scatter_add_(1, targets.row[:, None], torch.where(targets.mine, -scale_T, 0.0)[:, None])
    return exp_TR


def _add_product_(sum_RD: Tensor, left_RT: Tensor, right_TD: Tensor) -> None:
    """sum += left @ right, where only ``sum`` may be in a wider dtype."""
    if sum_RD.dtype == left_RT.dtype:
        sum_RD.addmm_(left_RT, right_TD)
    else:
        sum_RD += left_RT @ right_TD
