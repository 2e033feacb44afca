"""A pipeline rank's part in the work on the vocabulary that all ranks share: what E, V and EB of the program do.

Hidden states of the last stage are broadcast, each rank computes loss and gradients for its rows, and the gradients of
the hidden states are added up on the last rank, where the unit's backward takes them. Embeddings are added up on the
first rank; their gradient is broadcast from there. Nothing of logit size outlives an instruction.

Shapes: B batch, L slice, D model dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from slimpipe.dtypes import wide_dtype
from slimpipe.program import Op, Program, Unit
from slimpipe.runtime.batch import Batch
from slimpipe.runtime.gradient_sync import GradientSync
from slimpipe.torch_private import destroy_group, group_timeout
from slimpipe.transport import TensorMeta, new_pipeline_group
from slimpipe.vocabulary import VocabularyEmbedding, VocabularyHead
from slimpipe.vocabulary.ranks import Pending, Ranks


@dataclass
class _Step:
    """What is under way in one step."""

    batch: Batch
    loss_kwargs: dict[str, Any]
    with_backward: bool
    last: dict[Op, Unit]
    """The last unit of each instruction that adds to gradients."""
    hidden_BLD: Tensor | None = None
    """On the last rank: what the next unit's loss is computed from."""
    gradient: tuple[Unit, Pending] | None = None
    """Of the newest hidden states, on its way to the last rank, in float32 or wider."""
    gradients: dict[Unit, Tensor] = field(default_factory=dict)
    """On the last rank: of hidden states whose unit has yet to run backward, in their dtype."""
    embedded: Pending | None = None
    """On its way to the first rank."""
    edges: dict[Unit, GradientEdge | None] = field(default_factory=dict)
    """Where the backward of an embedding starts; None where nothing needs one."""
    embed_backward: tuple[Unit, Pending] | None = None
    """A gradient on its way from the first rank."""


class SharedVocabulary:
    """Head and embedding of one rank, and what is under way between their instructions.

    Args:
        head: Output layer and loss.
        embedding: Input embedding; None where the first stage has its own.
        pipeline: The pipeline's process group, all ranks of which take part in making another one for this alone; None
            for one rank.
        device: Where the stages run.
    """

    def __init__(
        self,
        head: VocabularyHead,
        embedding: VocabularyEmbedding | None,
        *,
        pipeline: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._head, self._embedding, self._device = head, embedding, device
        self._modules = [head] if embedding is None else [head, embedding]
        self._group: dist.ProcessGroup | None = None
        timeout = None
        if pipeline is not None:
            timeout = group_timeout(pipeline, device)
            self._group = new_pipeline_group(dist.get_process_group_ranks(pipeline), timeout)
        self._ranks = Ranks(self._group)
        if timeout is not None:
            self.set_timeout(timeout)
        self._last_rank = self._ranks.size - 1
        self._labels_compared = False
        self._gradient_sync = {Op.VOCABULARY: GradientSync(head)}
        if embedding is not None:
            self._gradient_sync[Op.EMBED_BACKWARD] = GradientSync(embedding)
        self._metas: dict[str, TensorMeta] = {}
        """What each kind of message holds, told once per batch shape: reading it makes the host wait for the device."""
        self._now: _Step | None = None

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the timeout of its group, and of those of head and embedding."""
        for ranks in (self._ranks, *(module.ranks for module in self._modules)):
            ranks.set_timeout(timeout)

    def forget_shapes(self) -> None:
        """Tell shapes anew; to be called on every rank when the batch's shape changes."""
        self._metas.clear()

    def close(self) -> None:
        """Destroy its group."""
        if self._group is not None:
            destroy_group(self._group)
        self._group, self._ranks = None, Ranks(None)

    # A step ----------------------------------------------------------------------------------------------------------

    def begin(self, program: Program, batch: Batch, *, loss_kwargs: dict[str, Any] | None) -> None:
        """Start a step. Broadcasts labels from the last rank and, with an embedding, tokens from the first."""
        last = {i.op: i.unit for i in program.instructions[0] if i.op in self._gradient_sync}
        self._now = _Step(batch, loss_kwargs or {}, with_backward=not program.forward_only, last=last)
        for sync in self._gradient_sync.values():
            sync.set(last=False)
        batch.share(
            tokens=None if self._embedding is None else self._share("tokens", batch.tokens, source=0),
            targets=self._share("labels", batch.targets, source=self._last_rank),
        )
        if not self._labels_compared and self._head.ranks.size > self._ranks.size:
            self._compare_labels(batch.targets)
            self._labels_compared = True

    def end(self) -> None:
        """End a step: what is under way comes to its end, and nothing stays."""
        self._finish_embed_backward()
        self._settle_gradient()
        if self._step.embedded is not None:
            self._step.embedded.wait()
        assert not self._step.gradients and not self._step.edges, "gradients of the vocabulary were left over"
        self._now = None
        for sync in self._gradient_sync.values():
            sync.rest()

    def drop(self) -> None:
        """Let go of everything, after a failure, and leave data parallelism as it is outside of steps."""
        self._now = None
        for sync in self._gradient_sync.values():
            sync.forget()

    @property
    def num_bytes(self) -> int:
        """Bytes of gradients that wait for the backward of their unit."""
        return 0 if self._now is None else sum(gradient.nbytes for gradient in self._now.gradients.values())

    @property
    def waited(self) -> float:
        """Seconds that the host has spent in collectives so far: on GPUs, on starting them."""
        return self._ranks.waited + sum(module.ranks.waited for module in self._modules)

    @property
    def _step(self) -> _Step:
        assert self._now is not None
        return self._now

    # Output layer and loss -------------------------------------------------------------------------------------------

    def put_hidden(self, hidden_BLD: Tensor) -> None:
        """On the last rank: hand over what the last stage made of the unit that comes next."""
        self._step.hidden_BLD = hidden_BLD

    def loss(self, unit: Unit) -> Tensor:
        """Loss of a unit, detached, the same on every rank. Computes the gradients as well, if there is a backward."""
        step = self._step
        hidden_BLD = self._broadcast_hidden()
        labels_BL = step.batch.target(unit.microbatch, unit.slice)
        if not step.with_backward:
            return self._head(hidden_BLD, labels_BL, **step.loss_kwargs)
        self._settle_gradient()
        hidden_BLD = hidden_BLD.detach().requires_grad_()
        loss = self._head(hidden_BLD, labels_BL, **step.loss_kwargs)
        if unit == step.last[Op.VOCABULARY]:
            self._gradient_sync[Op.VOCABULARY].set(last=True)
        loss.backward()
        assert hidden_BLD.grad is not None
        part_BLD = hidden_BLD.grad.to(wide_dtype(hidden_BLD.dtype))
        step.gradient = unit, self._ranks.start_sum_to(self._last_rank, part_BLD)
        return loss.detach()

    def take_gradient(self, unit: Unit) -> Tensor:
        """On the last rank: gradient of a unit's hidden states."""
        if unit not in self._step.gradients:
            self._settle_gradient()  # only the newest is still on its way
        return self._step.gradients.pop(unit)

    def _broadcast_hidden(self) -> Tensor:
        step = self._step
        hidden_BLD, step.hidden_BLD = step.hidden_BLD, None
        return self._broadcast("hidden", hidden_BLD, source=self._last_rank).wait()

    def _settle_gradient(self) -> None:
        """Wait for the newest gradient, if it is still on its way."""
        step = self._step
        if step.gradient is None:
            return
        (unit, pending), step.gradient = step.gradient, None
        sum_BLD = pending.wait()
        if self._ranks.rank == self._last_rank:
            step.gradients[unit] = sum_BLD.to(self._metas["hidden"].dtype)

    # Embedding -------------------------------------------------------------------------------------------------------

    def embed(self, unit: Unit) -> None:
        """Look up this rank's rows of a unit's tokens and send them to the first rank."""
        assert self._embedding is not None
        step = self._step
        if step.embedded is not None:
            step.embedded.wait()
        (ids_BL,) = step.batch.args(unit.microbatch, unit.slice)
        part_BLD = self._embedding(ids_BL)
        if step.with_backward:
            step.edges[unit] = get_gradient_edge(part_BLD) if part_BLD.requires_grad else None
        self._metas["embedding"] = TensorMeta.of(part_BLD)  # equal on every rank, and its gradient's
        # Exact in any dtype: all terms but one are zero.
        step.embedded = self._ranks.start_sum_to(0, part_BLD.detach())

    def take_embedded(self) -> Tensor:
        """On the first rank: what was embedded last."""
        embedded, self._step.embedded = self._step.embedded, None
        assert embedded is not None
        return embedded.wait()

    def embed_backward(self, unit: Unit, gradient_BLD: Tensor | None) -> None:
        """Start the backward of a unit's embedding; it ends with the next one, so that its message overlaps what comes
        between. ``gradient_BLD`` is given on the first rank."""
        self._finish_embed_backward()
        self._step.embed_backward = unit, self._broadcast("embedding", gradient_BLD, source=0)

    def _finish_embed_backward(self) -> None:
        step = self._step
        if step.embed_backward is None:
            return
        (unit, pending), step.embed_backward = step.embed_backward, None
        gradient_BLD = pending.wait()
        if unit == step.last[Op.EMBED_BACKWARD]:
            self._gradient_sync[Op.EMBED_BACKWARD].set(last=True)
        if (edge := step.edges.pop(unit)) is not None:
            torch.autograd.backward((edge,), (gradient_BLD,))

    # Parts -----------------------------------------------------------------------------------------------------------

    def _compare_labels(self, labels: list[Tensor]) -> None:
        """Refuse a head whose group holds pipelines with other data: only tensor parallel ones may share one."""
        sums = torch.stack([microbatch.sum(dtype=torch.int64) for microbatch in labels])
        ends = torch.stack([sums, -sums])
        self._head.ranks.all_max(ends)
        if not torch.equal(ends[0], -ends[1]):
            raise ValueError(
                f"loss_fn shares the vocabulary among ranks {self._head.ranks.members}, which hold pipelines with "
                "other labels: only pipelines on the same data may share one; nearest legal value: group = the stages' "
                "group"
            )

    def _share(self, kind: str, mine: list[Tensor], *, source: int) -> list[Tensor]:
        """Integers that one rank was given, one tensor per microbatch, on every rank, as int64."""
        if self._ranks.size == 1:
            return mine
        stacked = torch.stack([tensor.long() for tensor in mine]) if self._ranks.rank == source else None
        return list(self._broadcast(kind, stacked, source=source).wait())

    def _broadcast(self, kind: str, tensor: Tensor | None, *, source: int) -> Pending:
        """A tensor that ``source`` has, on every rank."""
        if kind not in self._metas:
            self._metas[kind] = self._tell_meta(tensor, source=source)
        meta = self._metas[kind]
        if self._ranks.rank != source:
            return self._ranks.start_broadcast(source, meta.empty(self._device))
        assert tensor is not None
        if TensorMeta.of(tensor) != meta:
            raise ValueError(
                f"the {kind} that all ranks share are {tuple(tensor.shape)}, {tensor.dtype}, after {meta} in the same "
                "or an equal step: shape and dtype must depend on nothing but the shape of the batch"
            )
        return self._ranks.start_broadcast(source, tensor.contiguous())

    def _tell_meta(self, tensor: Tensor | None, *, source: int) -> TensorMeta:
        """Shape and dtype of a tensor that ``source`` has, on every rank."""
        if self._ranks.rank == source:
            assert tensor is not None
            header = TensorMeta.of(tensor).to_header(self._device)
        else:
            header = TensorMeta.empty_header(self._device)
        return TensorMeta.from_header(self._ranks.start_broadcast(source, header).wait())
