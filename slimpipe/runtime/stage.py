"""One pipeline stage at run time: forward and backward of one unit, and what a live unit keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from slimpipe.attention.context import SliceContext, StageStore
from slimpipe.attention.events import Phase, Sharing
from slimpipe.attention.kernels import check_kernel_runs
from slimpipe.attention.kv_store import SlotBuffers
from slimpipe.attention.slice_attention import SliceAttention
from slimpipe.program import SlotPlan, Unit
from slimpipe.runtime.batch import Batch
from slimpipe.runtime.gradient_sync import GradientSync
from slimpipe.runtime.meter import MemoryMeter
from slimpipe.runtime.refusals import RefuseWholeAttention, check_loss_adds_up, check_module


@dataclass(slots=True)
class _Live:
    """What a unit keeps from its forward to its backward, beside what autograd saves."""

    edge: GradientEdge | None
    """Where backward starts: not the output, whose storage may die with its send."""
    source: torch.Tensor | None
    """The received activation, whose gradient goes back."""
    context: SliceContext
    held: Any
    """Meter entries."""


class Stage:
    """The model part of one global stage, run slice by slice.

    Args:
        submod: The stage's module, taking the activation (tokens on the first stage) and keyword arguments.
        index: Global stage index.
        is_first: Whether it is the first stage.
        is_last: Whether its output goes to ``loss_fn``, where there is one.
        loss_fn: ``loss_fn(output, target, **loss_kwargs)`` -> scalar sum, or None.
        kernel: See `SlimPipeOptions.kernel`.
        device: Where the stage runs.

    Raises:
        ValueError: The module cannot run slice by slice; see `check_module`. Or a kernel that this device cannot run.
    """

    def __init__(
        self,
        submod: nn.Module,
        index: int,
        *,
        is_first: bool,
        is_last: bool,
        loss_fn: Callable | None,
        kernel: str,
        device: torch.device,
    ) -> None:
        self.submod, self.index, self.is_first, self.is_last = submod, index, is_first, is_last
        self._loss_fn, self._kernel = loss_fn, kernel
        self.attention = [module for module in submod.modules() if isinstance(module, SliceAttention)]
        self._gradient_sync = GradientSync(submod)
        self._takes = check_module(submod, index=index, has_attention=bool(self.attention))
        calls = {(kernel if m.kernel == "auto" else m.kernel, m.window is not None) for m in self.attention}
        for name, window in calls or {(kernel, False)}:
            check_kernel_runs(name, device=device, window=window)
        self._live: dict[Unit, _Live] = {}
        self._store: StageStore | None = None
        self._attention_checked = False
        self._loss_checked = False

    # A step ----------------------------------------------------------------------------------------------------------

    def begin(
        self, plan: SlotPlan, buffers: list[SlotBuffers], *, keep_output: bool, meter: MemoryMeter | None
    ) -> None:
        """Start a step: an empty store, gradients kept local until `sync_gradients`.

        Args:
            plan: Where this stage's slices sit in ``buffers``.
            buffers: K,V buffers by attention layer.
            keep_output: See `SlimPipeOptions.keep_attention_output`.
            meter: Where saved bytes are counted, if they are.
        """
        layers: dict[nn.Module, SlotBuffers] = dict(zip(self.attention, buffers, strict=True))
        self._store = StageStore(plan, layers, hold=None if meter is None else meter.hold)
        self._meter = meter
        self._keep_output = keep_output
        self._gradient_sync.set(last=False)

    def sync_gradients(self) -> None:
        """The next backward is the step's last: data parallelism reduces gradients in it."""
        self._gradient_sync.set(last=True)

    def end(self) -> None:
        """End a step: nothing of it stays."""
        assert not self._live, f"{len(self._live)} units of stage {self.index} are still live after the step"
        self._store = None
        self._gradient_sync.rest()

    def drop(self) -> None:
        """Let go of everything, after a failure, and leave data parallelism as it is outside of steps."""
        self._live.clear()
        self._store = None
        self._gradient_sync.forget()

    # A unit ----------------------------------------------------------------------------------------------------------

    def forward(
        self,
        unit: Unit,
        batch: Batch,
        received: torch.Tensor | None,
        *,
        loss_kwargs: dict[str, Any] | None,
        with_backward: bool,
        sharing: Sharing | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run one unit forward; ``sharing`` is what other ranks have to do with it.

        Without a ``received`` activation the stage gets the tokens.

        Returns:
            The stage's output, detached, and on the last stage its detached loss (None without a loss function).
        """
        assert self._store is not None
        context = SliceContext(
            unit,
            self._store,
            batch.documents[unit.microbatch],
            keep_output=self._keep_output and with_backward,
            kernel=self._kernel,
            sharing=sharing,
        )
        args = batch.args(unit.microbatch, unit.slice) if received is None else (received,)
        if received is not None and with_backward:
            received.requires_grad_()
        meter = self._meter if with_backward else None
        with nullcontext() if meter is None else meter.saving():
            with nullcontext() if self._attention_checked else RefuseWholeAttention(self.index):
                output = self.submod(*args, **self._kwargs(unit, batch, context, args))
            self._check_output(output, context)
            loss = self._loss(output, unit, batch, loss_kwargs) if self.is_last and self._loss_fn is not None else None
        if with_backward:
            root = output if loss is None else loss
            edge = get_gradient_edge(root) if root.requires_grad else None
            held = None if meter is None or received is None else meter.hold(received)
            self._live[unit] = _Live(edge, received, context, held)
        return output.detach(), None if loss is None else loss.detach()

    def backward(
        self, unit: Unit, gradient: torch.Tensor | None, *, sharing: Sharing | None = None
    ) -> torch.Tensor | None:
        """Run one unit backward; ``gradient`` is that of its output, None if it ended in its loss.

        Returns:
            Gradient of the received activation; None if there was none.
        """
        live = self._live.pop(unit)
        live.context.enter(Phase.BACKWARD, sharing)
        if live.edge is not None:
            torch.autograd.backward((live.edge,), None if gradient is None else (gradient,))
        if live.source is None:
            return None
        return torch.zeros_like(live.source) if live.source.grad is None else live.source.grad

    @property
    def num_live(self) -> int:
        """Units between their forward and their backward."""
        return len(self._live)

    @property
    def carry_bytes(self) -> int:
        """Bytes of this stage's dK,dV in waiting."""
        return 0 if self._store is None else self._store.carry_bytes

    # Parts -----------------------------------------------------------------------------------------------------------

    def _kwargs(self, unit: Unit, batch: Batch, context: SliceContext, args: tuple) -> dict[str, Any]:
        kwargs = batch.kwargs(unit.microbatch, unit.slice)
        if "positions" not in self._takes:
            kwargs.pop("positions", None)
        elif "positions" not in kwargs:
            kwargs["positions"] = batch.default_positions(unit.slice, like=args[0])
        if "attention_masks" in self._takes:
            kwargs["attention_masks"] = context
        return kwargs

    def _loss(self, output: torch.Tensor, unit: Unit, batch: Batch, loss_kwargs: dict[str, Any] | None) -> torch.Tensor:
        assert self._loss_fn is not None
        target = batch.target(unit.microbatch, unit.slice)
        loss = self._loss_fn(output, target, **(loss_kwargs or {}))
        if not isinstance(loss, torch.Tensor) or loss.dim():
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(
                f"loss_fn returned {shape}; a slimpipe schedule calls it once per slice and adds the results, so it "
                "must return a scalar: the sum over tokens, or that sum divided by the step's number of tokens"
            )
        if not self._loss_checked:
            loss_fn = functools.partial(self._loss_fn, **(loss_kwargs or {}))
            self._loss_checked = check_loss_adds_up(loss_fn, output, target, loss, seq_dim=batch.seq_dim)
        # A slice without valid labels may come without a graph; its K,V still get gradients from later slices.
        return loss if loss.requires_grad or not torch.is_grad_enabled() else loss + output.flatten()[:0].sum()

    def _check_output(self, output: Any, context: SliceContext) -> None:
        if not isinstance(output, torch.Tensor):
            raise TypeError(
                f"stage {self.index} returned a {type(output).__name__}; stages of a slimpipe schedule return one "
                "tensor"
            )
        if context.num_called != len(self.attention):
            raise ValueError(
                f"stage {self.index}: {context.num_called} of its {len(self.attention)} SliceAttention layers were "
                "called with the attention_masks that the schedule handed to the stage; the others would see one slice "
                "only: pass attention_masks untouched to every one of them"
            )
        self._attention_checked = True
