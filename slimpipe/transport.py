"""Point-to-point messages between pipeline ranks, first-in first-out on channels that carry one direction only.

A *channel* is a directed edge of the pipeline for one direction of the schedule: forward from rank r to r + 1, or
backward from r + 1 to r, and the wrap-around edges of interleaved schedules. NCCL ignores tags and runs the unbatched
messages of a communicator in order, so channels are spread over process groups such that in each group a rank only
sends to one peer or only receives from one peer: edges with an even source, edges with an odd source, and the
wrap-around edge, for each direction. The order on every communicator is then the order of one channel, which
`slimpipe.program.check` proves for a program.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from slimpipe.program.ir import MAX_UNMATCHED_SENDS, Channel
from slimpipe.torch_private import destroy_group, set_group_timeout

_HEADER_LEN = 10
_Send = list[tuple[dist.Work, torch.Tensor]]
"""One send under way: its message, after its header if it has one, each with the work to wait for."""
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


class PipelineError(RuntimeError):
    """A message of the pipeline did not arrive or could not be sent: another rank failed, died or hangs."""


def lost_rank(rank: int, peer: int, error: RuntimeError, *, where: str = ", to which it was sending") -> PipelineError:
    """What to raise from a message's error: names both pipeline ranks, and after them where it happened."""
    return PipelineError(
        f"pipeline rank {rank} lost rank {peer}{where}: rank {peer} failed, died or is stuck "
        f"({type(error).__name__}: {error})"
    )


class TensorMeta(NamedTuple):
    """What a receiver must know to allocate."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        """That of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def empty(self, device: torch.device) -> torch.Tensor:
        """A tensor to receive into."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def to_header(self, device: torch.device) -> torch.Tensor:
        """As a message of its own."""
        header = [_DTYPES.index(self.dtype), len(self.shape), *self.shape]
        return torch.tensor(header + [0] * (_HEADER_LEN - len(header)), dtype=torch.int64, device=device)

    @classmethod
    def empty_header(cls, device: torch.device) -> torch.Tensor:
        """A tensor to receive such a message into."""
        return torch.empty(_HEADER_LEN, dtype=torch.int64, device=device)

    @classmethod
    def from_header(cls, header: torch.Tensor) -> TensorMeta:
        """What `to_header` told."""
        dtype, num_dims, *shape = header.tolist()
        return cls(tuple(shape[:num_dims]), _DTYPES[dtype])


class Receive:
    """A posted receive; `Transport.wait` gives its tensor."""

    def __init__(self) -> None:
        self._tensor: torch.Tensor | None = None
        self._work: dist.Work | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer while it is posted, 0 before that."""
        return 0 if self._tensor is None else self._tensor.nbytes


class Transport:
    """The channels of one pipeline rank.

    Creating it is collective over the ranks of ``group`` (it creates process groups). Shapes are not configured: the
    first message of a stream is preceded by a header with shape and dtype; until it has arrived, receives of that
    stream wait in line and are posted when needed instead of ahead.

    Args:
        group: The pipeline's process group.
        wraps: Whether stages wrap around from the last rank to the first (more than one stage per rank).
        device: Device of the messages.
        timeout: Timeout of the channels' process groups.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, wraps: bool, device: torch.device, timeout: timedelta | None = None
    ) -> None:
        self._device = device
        self._process_groups: list[dist.ProcessGroup] = []
        self._groups: dict[Channel, dist.ProcessGroup] = {}
        self._sends: dict[Channel, deque[_Send]] = {}
        self._waiting: dict[Channel, deque[tuple[int, Receive]]] = {}
        self._metas: dict[tuple[Channel, int], TensorMeta] = {}
        self._announced: dict[tuple[Channel, int], TensorMeta] = {}
        self._ranks = dist.get_process_group_ranks(group)
        for edges in _edge_groups(len(self._ranks), wraps=wraps):
            for direction in ("forward", "backward"):
                made = new_pipeline_group(self._ranks, timeout)
                self._process_groups.append(made)
                for source, destination in edges:
                    ends = (source, destination) if direction == "forward" else (destination, source)
                    channel = Channel(*ends, direction)
                    self._groups[channel] = made
                    self._sends[channel], self._waiting[channel] = deque(), deque()
        self._connect(dist.get_rank(group))
        self.timeout = timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the timeout of every channel."""
        self.timeout = timeout
        for group in self._process_groups:
            set_group_timeout(group, timeout)

    def forget_shapes(self) -> None:
        """Announce shapes anew; to be called on every rank when the batch's shape changes."""
        self._metas.clear()
        self._announced.clear()

    def send(self, channel: Channel, stream: int, tensor: torch.Tensor, *, announce: bool) -> None:
        """Start sending; holds the tensor until the send is complete and no longer.

        Args:
            channel: A channel whose source is this rank.
            stream: Number of the stream (the global index of the receiving stage); one shape per stream.
            tensor: The message.
            announce: Whether the first message of the stream carries a header, because the receiver gives no ``meta``.
        """
        sends = self._sends[channel]
        while len(sends) >= MAX_UNMATCHED_SENDS:
            _finish(sends.popleft())
        tensor = tensor.contiguous()
        messages = [tensor]
        if announce:
            meta = TensorMeta.of(tensor)
            announced = self._announced.setdefault((channel, stream), meta)
            if announced is meta:
                messages.insert(0, self._header(tensor))
            elif announced != meta:
                raise ValueError(
                    f"the stage before stage {stream} returned {tuple(tensor.shape)}, {tensor.dtype}, after "
                    f"{announced} in the same or an equal step: the output of a stage must depend on nothing but the "
                    "shape of the batch"
                )
        sends.append([(self._isend(channel, message), message) for message in messages])

    def receive(self, channel: Channel, stream: int, meta: TensorMeta | None = None) -> Receive:
        """Post a receive. Without ``meta`` the stream's header gives shape and dtype."""
        if meta is not None and not self._known(channel, stream):
            self._metas[channel, stream] = meta
        receive = Receive()
        if self._waiting[channel] or not self._known(channel, stream):
            self._waiting[channel].append((stream, receive))
        else:
            self._post(channel, stream, receive)
        return receive

    def wait(self, channel: Channel, receive: Receive) -> torch.Tensor:
        """Wait for a receive and return its tensor, which is the caller's from then on."""
        while receive._work is None:
            # First use of a stream: its header is next on the channel. What stood in line behind it can be posted after
            # it.
            stream, waiting = self._waiting[channel].popleft()
            if not self._known(channel, stream):
                self._metas[channel, stream] = self._receive_header(channel)
            self._post(channel, stream, waiting)
        while self._waiting[channel] and self._known(channel, self._waiting[channel][0][0]):
            self._post(channel, *self._waiting[channel].popleft())
        receive._work.wait()
        tensor, receive._tensor = receive._tensor, None
        assert tensor is not None
        return tensor

    def reap(self) -> None:
        """Let go of the tensors of sends that are complete."""
        for sends in self._sends.values():
            while sends and all(work.is_completed() for work, _ in sends[0]):
                _finish(sends.popleft())

    def finish(self) -> None:
        """Wait for every send; to be called at the end of a step.

        Raises:
            PipelineError: A send failed; names the ranks.
        """
        for channel, sends in self._sends.items():
            try:
                while sends:
                    _finish(sends.popleft())
            except RuntimeError as error:
                raise lost_rank(channel.source, channel.destination, error) from error

    def drop(self) -> None:
        """Let go of everything without waiting; after a failure."""
        for sends in self._sends.values():
            sends.clear()
        for waiting in self._waiting.values():
            waiting.clear()

    def close(self) -> None:
        """Destroy the channels' process groups."""
        self.drop()
        for group in self._process_groups:
            destroy_group(group)
        # Its threads live as long as a group is referred to, and gloo's wake a hundred times a second.
        self._process_groups.clear()
        self._groups.clear()

    @property
    def num_unfinished_sends(self) -> int:
        """Most sends under way on any channel."""
        return max(map(len, self._sends.values()), default=0)

    @property
    def send_bytes(self) -> int:
        """Bytes held for sends under way."""
        return sum(tensor.nbytes for sends in self._sends.values() for send in sends for _, tensor in send)

    def _connect(self, rank: int) -> None:
        """Pass one message over each channel, in one order for all ranks.

        NCCL connects two ranks at their first message and blocks both hosts meanwhile; in the middle of a program,
        where receives are posted ahead, that could deadlock.
        """
        probe = torch.zeros(1, device=self._device)
        for channel in self._groups:
            if rank == channel.source:
                self._isend(channel, probe).wait()
            elif rank == channel.destination:
                self._irecv(channel, probe).wait()

    def _known(self, channel: Channel, stream: int) -> bool:
        return (channel, stream) in self._metas

    def _post(self, channel: Channel, stream: int, receive: Receive) -> None:
        meta = self._metas[channel, stream]
        receive._tensor = meta.empty(self._device)
        receive._work = self._irecv(channel, receive._tensor)

    def _isend(self, channel: Channel, tensor: torch.Tensor) -> dist.Work:
        work = dist.isend(tensor, self._ranks[channel.destination], group=self._groups[channel])
        assert work is not None
        return work

    def _irecv(self, channel: Channel, tensor: torch.Tensor) -> dist.Work:
        work = dist.irecv(tensor, self._ranks[channel.source], group=self._groups[channel])
        assert work is not None
        return work

    def _header(self, tensor: torch.Tensor) -> torch.Tensor:
        if not (tensor.is_floating_point() and tensor.dtype in _DTYPES) or tensor.dim() > _HEADER_LEN - 2:
            known = [str(dtype) for dtype in _DTYPES if dtype.is_floating_point]
            raise ValueError(
                f"a stage's output has dtype {tensor.dtype} and {tensor.dim()} dims; stages may exchange one "
                f"floating-point tensor of at most {_HEADER_LEN - 2} dims, dtype one of {', '.join(known)}"
            )
        return TensorMeta.of(tensor).to_header(self._device)

    def _receive_header(self, channel: Channel) -> TensorMeta:
        header = TensorMeta.empty_header(self._device)
        self._irecv(channel, header).wait()
        return TensorMeta.from_header(header)


def new_pipeline_group(ranks: list[int], timeout: timedelta | None) -> dist.ProcessGroup:
    """A process group of all ranks of a pipeline. Every one of them must take part in every group, in the same order:
    torch names groups by counting."""
    made = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def _edge_groups(num_ranks: int, *, wraps: bool) -> list[list[tuple[int, int]]]:
    """Edges of the pipeline, split so that no rank both sends and receives in one group."""
    steps = [(rank, rank + 1) for rank in range(num_ranks - 1)]
    groups = [steps[0::2], steps[1::2], [(num_ranks - 1, 0)] if wraps else []]
    return [edges for edges in groups if edges]


def _finish(send: _Send) -> None:
    for work, _ in send:
        work.wait()
