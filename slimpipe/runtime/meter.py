"""Bytes that a rank holds for backward, measured on tensors.

Counts the storages that autograd saves (through `torch.autograd.graph.saved_tensors_hooks`, which sees every one of
them, and under checkpointing only those that are really kept), each once however often it is saved, without parameters
and buffers of the model and without the caller's batch. What other parts hold (K,V) is added by whoever knows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn


class _Saved:
    """A tensor saved by autograd; its storage counts as long as this object lives."""

    __slots__ = ("_meter", "key", "tensor")

    def __init__(self, meter: MemoryMeter, tensor: torch.Tensor, key: int) -> None:
        self._meter, self.tensor, self.key = meter, tensor, key

    def __del__(self) -> None:
        self._meter.release(self.key)


@dataclass(slots=True)
class _Entry:
    """A storage that is held."""

    storage: torch.UntypedStorage
    num_bytes: int
    """What it counts for; 0 once it is known to be a weight."""
    num_holders: int = 0


class MemoryMeter:
    """Live bytes of saved activations now and at their peak.

    Args:
        modules: Modules whose parameters and buffers do not count, however often autograd saves them.
        others: Gives the bytes held elsewhere; added to every reading.
    """

    def __init__(self, modules: list[nn.Module], others: Callable[[], int] = lambda: 0) -> None:
        self._modules = modules
        self._others = others
        self._storages: dict[int, _Entry] = {}
        self._excluded: set[int] = set()
        self.live_bytes = 0
        self.peak_bytes = 0
        """Highest reading of `read` since `reset_peak`."""

    def saving(self) -> AbstractContextManager[None]:
        """Context for a forward: what autograd saves in it is counted until it lets go."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def hold(self, tensor: torch.Tensor) -> _Saved:
        """Count a tensor that somebody keeps beside autograd; it counts until the returned object is dropped."""
        return self._pack(tensor)

    def exclude(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count these, until the next call: the caller holds them anyhow."""
        self._excluded = set(map(_key, tensors))

    def read(self) -> int:
        """Bytes held now; also moves the peak. To be called outside forwards, when weights are where they stay."""
        self._discount_weights()
        total = self.live_bytes + self._others()
        self.peak_bytes = max(self.peak_bytes, total)
        return total

    def reset_peak(self) -> None:
        """Start a new peak from here."""
        self.peak_bytes = 0

    def release(self, key: int) -> None:
        """One holder of a storage is gone."""
        entry = self._storages[key]
        entry.num_holders -= 1
        if not entry.num_holders:
            self.live_bytes -= entry.num_bytes
            del self._storages[key]

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        key = _key(tensor)
        entry = self._storages.get(key)
        if entry is None:
            storage = tensor.untyped_storage()
            entry = self._storages[key] = _Entry(storage, 0 if key in self._excluded else storage.nbytes())
            self.live_bytes += entry.num_bytes
        entry.num_holders += 1
        # Detached: an output that holds itself through its own node would never be freed.
        return _Saved(self, tensor.detach(), key)

    def _discount_weights(self) -> None:
        # Only now: FSDP2 gathers weights in the middle of a forward, and may have freed them again since.
        for module in self._modules:
            for group in (module.parameters(), module.buffers()):
                for tensor in group:
                    self._discount(self._storages.get(_key(tensor)))
        for entry in self._storages.values():
            if entry.num_bytes and not entry.storage.nbytes():
                self._discount(entry)

    def _discount(self, entry: _Entry | None) -> None:
        if entry is not None:
            self.live_bytes -= entry.num_bytes
            entry.num_bytes = 0


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
