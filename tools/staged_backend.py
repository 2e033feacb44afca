"""A torch.distributed backend that carries tensors of any device over gloo, in host copies.

    register_staged_backend()
    torch.distributed.init_process_group("staged", ...)

Made for several ranks on one GPU: NCCL refuses to share one, and gloo sends and receives CPU tensors only. On a CPU the
same code runs, copies included. Groups from `torch.distributed.new_group`, their timeouts and their end are gloo's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "staged"
_ProcessGroup: Any = dist.ProcessGroup
"""Its stubs declare several forms of each method; torch calls one."""


def register_staged_backend() -> None:
    """Make the backend known to torch.distributed in this process; may be called again."""
    dist.Backend.register_backend(NAME, StagedGroup, devices=["cpu", "cuda"])


class StagedWork(dist.Work):
    """An operation under way on host copies.

    `wait` blocks the host until the operation is done, and then copies what was received to its tensors on the current
    stream: not before that do they hold it.
    """

    def __init__(self, work: Any, received: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        super().__init__()
        self._work: Any = work
        self._received = received

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait; raises RuntimeError where the operation failed or took too long. May be called again."""
        if self._work is not None:
            self._work.wait(timeout)
            with torch.no_grad():
                for tensor, host in self._received:
                    tensor.copy_(host, non_blocking=True)
            self._work, self._received = None, ()
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would not block: gloo says no to a message until somebody has waited for it."""
        return self._work is None or self._work.is_completed()


class StagedGroup(_ProcessGroup):
    """A process group. What is sent is what the tensor holds at this place in the current stream of its device."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._name = ""

    # torch calls these methods by name from Python, not through its C++ class, which lacks some of them.

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> StagedWork:
        return StagedWork(self._gloo.send(_to_host(tensors), rank, tag))

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> StagedWork:
        hosts = [_empty_host(tensor) for tensor in tensors]
        return StagedWork(self._gloo.recv(hosts, rank, tag), _pairs(tensors, hosts))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> StagedWork:
        if opts.rootRank == self.rank():
            return StagedWork(self._gloo.broadcast(_to_host(tensors), opts))
        hosts = [_empty_host(tensor) for tensor in tensors]
        return StagedWork(self._gloo.broadcast(hosts, opts), _pairs(tensors, hosts))

    def allreduce(self, tensors: list[Tensor], opts: Any) -> StagedWork:
        hosts = _to_host(tensors)
        return StagedWork(self._gloo.allreduce(hosts, opts), _pairs(tensors, hosts))

    def reduce(self, tensors: list[Tensor], opts: Any) -> StagedWork:
        hosts = _to_host(tensors)
        received = _pairs(tensors, hosts) if opts.rootRank == self.rank() else ()
        return StagedWork(self._gloo.reduce(hosts, opts), received)

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> StagedWork:
        hosts = [[_empty_host(tensor) for tensor in output] for output in outputs]
        received = [pair for output, copies in zip(outputs, hosts, strict=True) for pair in _pairs(output, copies)]
        return StagedWork(self._gloo.allgather(hosts, _to_host(tensors), opts), received)

    def barrier(self, opts: Any) -> StagedWork:
        return StagedWork(self._gloo.barrier(opts))

    # What torch asks a group, and would look up in C++ backends.

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]  # where torch puts pickled objects

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo

    def set_timeout(self, timeout: timedelta) -> None:
        self._gloo.set_timeout(timeout)

    def getBackendName(self) -> str:
        return NAME


def _to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies, complete on return."""
    hosts = [_empty_host(tensor).copy_(tensor.detach(), non_blocking=True) for tensor in tensors]
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        copied = torch.cuda.Event(blocking=True)  # the host sleeps: it has as many ranks as the device
        copied.record(torch.cuda.current_stream(device))
        copied.synchronize()
    return hosts


def _empty_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


def _pairs(tensors: Sequence[Tensor], hosts: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(tensors, hosts, strict=True))
