"""Messages of the context exchange: packed tensors between any two pipeline ranks.

Three kinds of message have a process group each: past K,V and requests go from the owner of a unit to its helper,
replies come back. All ranks start the messages of a kind in one order, which the program fixes, so a communicator that
ignores tags and works in order cannot mix them up or lock.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import timedelta
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor

from slimpipe.torch_private import destroy_group, set_group_timeout
from slimpipe.transport import TensorMeta, lost_rank, new_pipeline_group

_ALIGNMENT = 16
"""Bytes: every tensor of a message starts where any dtype may."""


class Mail(Enum):
    """Kinds of message."""

    KV = "K,V"
    REQUEST = "request"
    REPLY = "reply"


class Letter:
    """A posted receive."""

    def __init__(self, work: dist.Work, buffer: Tensor, metas: Sequence[TensorMeta]) -> None:
        self._work, self._buffer, self._metas = work, buffer, metas

    def wait(self) -> list[Tensor]:
        """Wait for the message; returns its tensors, views of one buffer."""
        self._work.wait()
        return _views(self._buffer, self._metas)


class Mailbox:
    """Sends and receives of one pipeline rank.

    Creating it is collective over ``group``: it creates process groups. Sends never wait; what they hold is let go of
    at `settle`, the rest at `finish`.

    Args:
        group: The pipeline's process group.
        device: Device of the messages.
        timeout: Timeout of the process groups.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        device: torch.device,
        timeout: timedelta | None = None,
    ) -> None:
        self._device = device
        self._ranks = dist.get_process_group_ranks(group)
        self._groups = {kind: new_pipeline_group(self._ranks, timeout) for kind in Mail}
        self._sends: dict[int, list[tuple[dist.Work, Tensor]]] = defaultdict(list)
        """By peer: what may still be under way."""
        self.sent_bytes = 0
        """Bytes sent since it was last set to 0."""
        self._rank = dist.get_rank(group)
        self._connected: set[tuple[int, int]] = set()

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Connect owners and helpers; collective, with the same pairs on every rank.

        NCCL connects two ranks at their first message and blocks both hosts meanwhile: not in the middle of a program.
        """
        new = sorted(set(pairs) - self._connected)
        probe = torch.zeros(1, device=self._device)
        for kind, group in self._groups.items():
            for owner, helper in new:
                source, destination = (helper, owner) if kind is Mail.REPLY else (owner, helper)
                if self._rank == source:
                    work = dist.isend(probe, self._ranks[destination], group=group)
                elif self._rank == destination:
                    work = dist.irecv(probe, self._ranks[source], group=group)
                else:
                    continue
                assert work is not None
                work.wait()
        self._connected.update(new)

    def send(self, kind: Mail, peer: int, tensors: Sequence[Tensor]) -> None:
        """Start sending copies of the tensors to a pipeline rank."""
        metas = [TensorMeta(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        buffer = torch.empty(_num_bytes(metas), dtype=torch.uint8, device=self._device)
        for view, tensor in zip(_views(buffer, metas), tensors, strict=True):
            view.copy_(tensor)
        work = dist.isend(buffer, self._ranks[peer], group=self._groups[kind])
        assert work is not None
        self._sends[peer].append((work, buffer))
        self.sent_bytes += buffer.nbytes

    def post(self, kind: Mail, peer: int, metas: Sequence[TensorMeta]) -> Letter:
        """Post a receive of tensors of these shapes from a pipeline rank."""
        buffer = torch.empty(_num_bytes(metas), dtype=torch.uint8, device=self._device)
        work = dist.irecv(buffer, self._ranks[peer], group=self._groups[kind])
        assert work is not None
        return Letter(work, buffer, metas)

    def settle(self, peer: int) -> None:
        """Wait for every send to a pipeline rank that has surely posted the receives, and let go of what they hold.

        gloo counts a send as under way until somebody waits for it.
        """
        for work, _ in self._sends.pop(peer, ()):
            work.wait()

    def finish(self) -> None:
        """Wait for every send; to be called at the end of a step.

        Raises:
            PipelineError: A send failed; names the ranks.
        """
        for peer in list(self._sends):
            try:
                self.settle(peer)
            except RuntimeError as error:
                raise lost_rank(self._rank, peer, error) from error

    def drop(self) -> None:
        """Let go of everything without waiting; after a failure."""
        self._sends.clear()

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the timeout of the process groups."""
        for group in self._groups.values():
            set_group_timeout(group, timeout)

    def close(self) -> None:
        """Destroy the process groups."""
        self.drop()
        for group in self._groups.values():
            destroy_group(group)
        self._groups.clear()


def _num_bytes(metas: Sequence[TensorMeta]) -> int:
    return sum(_padded_bytes(meta) for meta in metas)


def _padded_bytes(meta: TensorMeta) -> int:
    num_bytes = math.prod(meta.shape) * meta.dtype.itemsize
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _views(buffer: Tensor, metas: Sequence[TensorMeta]) -> list[Tensor]:
    """Where each tensor lies in a message."""
    views, start = [], 0
    for meta in metas:
        num_bytes = math.prod(meta.shape) * meta.dtype.itemsize
        views.append(buffer[start : start + num_bytes].view(meta.dtype).view(meta.shape))
        start += _padded_bytes(meta)
    return views
