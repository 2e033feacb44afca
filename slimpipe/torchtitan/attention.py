"""`SliceAttention` as a torchtitan module, and what tells it of documents where no slimpipe schedule does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torchtitan.protocols.module import Module

from slimpipe.attention.mask import Documents
from slimpipe.attention.slice_attention import SliceAttention


class TitanSliceAttention(SliceAttention, Module):
    """`SliceAttention` with a torchtitan config: for any layer with causal attention, in a window or not."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        kernel: str = "auto"
        """Attention kernel, see `slimpipe.SlimPipeOptions.kernel`."""

        window: int | None = None
        """Sliding window: of the last tokens, how many a query sees, itself included; None for all."""

    def __init__(self, config: Config) -> None:
        super().__init__(kernel=config.kernel, window=config.window)


def with_documents(parallelize_fn: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Wrap a `ModelSpec.parallelize_fn` so that documents stay apart under torch's schedules and without a pipeline.

    Inner attentions are not given positions. A pre-hook on each model part turns the positions that the part is given
    into `Documents` and hands them down as ``attention_masks``. Under a slimpipe schedule that argument is taken
    already, and the hook does nothing.
    """

    @functools.wraps(parallelize_fn)
    def parallelize(model: nn.Module, **kwargs: Any) -> nn.Module:
        model = parallelize_fn(model, **kwargs)
        model.register_forward_pre_hook(_hand_down_documents, with_kwargs=True)
        return model

    return parallelize


def _hand_down_documents(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    positions: Tensor | None = kwargs.get("positions")
    if positions is not None and kwargs.get("attention_masks") is None:
        kwargs["attention_masks"] = Documents.from_positions(positions, slice_len=positions.shape[-1])
    return args, kwargs
