"""From the arguments of a step to one tuple, dict and target per microbatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Microbatches(NamedTuple):
    """The arguments of a step by microbatch."""

    args: list[tuple]
    kwargs: list[dict[str, Any]]
    targets: list[torch.Tensor] | None


def split_batch(
    count: int, args: tuple, kwargs: dict[str, Any], target: Any, *, split: Callable[[tuple, dict], tuple]
) -> Microbatches:
    """Cut whole-batch arguments into ``count`` equal microbatches along dim 0.

    Args:
        count: Number of microbatches.
        args: Positional arguments.
        kwargs: Keyword arguments.
        target: Labels or None.
        split: torch's own splitting of args and kwargs, which honours chunk specs.

    Raises:
        TypeError: Labels that are no tensor.
        ValueError: A batch size that does not divide.
    """
    if target is not None and not isinstance(target, torch.Tensor):
        raise TypeError(f"target is a {type(target).__name__}; it must be a tensor of labels")
    named = [(f"argument {i}", x) for i, x in enumerate(args)] + [*kwargs.items(), ("target", target)]
    for name, value in named:
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] % count:
            nearest = max(1, round(value.shape[0] / count)) * count
            raise ValueError(
                f"{name} has batch size {value.shape[0]}, which does not divide into n_microbatches = {count} equal "
                f"microbatches; nearest batch size that does: {nearest}"
            )
    arg_mbs, kwarg_mbs = split(args, kwargs)
    targets = None if target is None else list(target.split(target.shape[0] // count))
    return Microbatches(list(arg_mbs), list(kwarg_mbs), targets)


def check_pre_split(
    count: int, whole: dict[str, Any], *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any
) -> Microbatches:
    """Check arguments that come as lists, one entry per microbatch.

    Args:
        count: Number of microbatches.
        whole: Whole-batch arguments by name; there may be none beside the lists.
        arg_mbs: List of tuples or None.
        kwarg_mbs: List of dicts or None.
        target_mbs: List of tensors or None.

    Raises:
        TypeError: A list or an entry of the wrong kind.
        ValueError: The wrong number of entries, or whole-batch arguments too.
    """
    given = [
        name
        for name, value in whole.items()
        if value is not None and not (isinstance(value, tuple | dict) and not value)
    ]
    if given:
        raise ValueError(
            f"{', '.join(given)} given together with arg_mbs, kwarg_mbs or target_mbs: pass one or the other"
        )
    for name, mbs, kind in [
        ("arg_mbs", arg_mbs, tuple),
        ("kwarg_mbs", kwarg_mbs, dict),
        ("target_mbs", target_mbs, torch.Tensor),
    ]:
        if mbs is None:
            continue
        if not isinstance(mbs, list) or not all(isinstance(mb, kind) for mb in mbs):
            raise TypeError(f"{name} must be a list of {kind.__name__}, one per microbatch")
        if len(mbs) != count:
            raise ValueError(f"{name} has {len(mbs)} entries; n_microbatches = {count} needs {count}")
    return Microbatches(arg_mbs or [()] * count, kwarg_mbs or [{}] * count, target_mbs)
