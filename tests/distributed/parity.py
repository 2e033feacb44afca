"""A pipeline of any shape on ranks, and the unsliced model that it must equal in float64 (design 1.3, 4.1)."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from slimpipe import ScheduleInterleavedSlimPipe, ScheduleSlimPipe, SlimPipeOptions
from slimpipe.vocabulary import VocabularyEmbedding, VocabularyHead
from tests.model import (
    IGNORED,
    Decoder,
    DenseAttention,
    TorchAttention,
    packed_positions,
    relative_error,
    stage_layers,
    sum_loss,
)

TOLERANCE = 1e-10
FULL = os.environ.get("SLIMPIPE_FULL") == "1"
"""Whether to run whole grids, which take an hour, instead of a sample."""
NUM_HEADS, HEAD_DIM = 4, 4
"""Of `Decoder`."""


@dataclass(frozen=True)
class Case:
    p: int
    n: int
    v: int = 1
    m: int = 2
    slice_len: int = 4
    batch: int = 1
    num_kv_heads: int = 4
    documents: tuple[int, ...] | None = None
    ignored: str = "none"
    recompute: bool = False
    keep_output: bool = True
    num_layers: int | None = None
    runs: str = "TET"
    """T: a training step on a batch of its own; E: an evaluation of the last batch."""
    vocab: int = 32
    vocab_parallel: str = "none"
    tied: bool = False
    window: int | None = None
    """Of every attention layer but each third."""
    value_head_dim: int = HEAD_DIM
    block_size: int = 3
    """Of a shared head."""
    options: dict[str, Any] = field(default_factory=lambda: {"context_exchange": "off"})

    @property
    def seq_len(self) -> int:
        return self.n * self.slice_len

    @property
    def num_stages(self) -> int:
        return self.p * self.v


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def make_batch(case: Case, seed: int) -> Batch:
    """Tokens, labels and positions."""
    generator = torch.Generator().manual_seed(seed)
    shape = (case.m * case.batch, case.seq_len)
    tokens, labels = (torch.randint(0, case.vocab, shape, generator=generator) for _ in range(2))
    if case.ignored == "slices":  # one slice of the first microbatch, and all of the last one's second half
        labels[: case.batch, : case.slice_len] = IGNORED
        labels[-case.batch :, case.seq_len // 2 :] = IGNORED
    elif case.ignored == "scattered":
        labels[torch.rand(shape, generator=generator) < 0.4] = IGNORED
    elif case.ignored == "all":
        labels[:] = IGNORED
    positions = None if case.documents is None else packed_positions(list(case.documents), shape[0])
    return tokens, labels, positions


def unsliced(case: Case, batches: Sequence[Batch]) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Gradients added over the steps, and the losses by step and microbatch, of one model in one piece."""
    torch.manual_seed(0)
    model = Decoder(
        layers=range(case.num_layers or case.num_stages),
        num_kv_heads=case.num_kv_heads,
        vocab=case.vocab,
        tied=case.tied,
        window=case.window,
        value_head_dim=case.value_head_dim,
        inner=DenseAttention if case.seq_len <= 128 else TorchAttention,
    )
    losses = []
    for tokens, labels, positions in batches:
        positions = torch.arange(case.seq_len).expand_as(tokens) if positions is None else positions
        rows = [x.split(case.batch) for x in (tokens, labels, positions)]
        for tokens_mb, labels_mb, positions_mb in zip(*rows, strict=True):
            loss = sum_loss(model(tokens_mb, positions_mb), labels_mb, num_tokens=tokens.numel())
            loss.backward()
            losses.append(loss.detach())
    return {name: parameter.grad for name, parameter in model.named_parameters()}, losses


class Shared(nn.Module):
    """This rank's rows of a whole decoder's embedding and head; of parameters that are one, the first name counts."""

    def __init__(self, whole: Decoder, case: Case, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        settings = {"group": group or dist.group.WORLD, "reduce_to": None}
        self.embedding = None
        if case.vocab_parallel == "both":
            self.embedding = VocabularyEmbedding.from_embedding(whole.embedding, **settings)
        self.head = VocabularyHead.from_linear(whole.head, block_size=case.block_size, **settings)
        if case.tied:
            self.head.weight = self.embedding.weight


def make_schedule(case: Case, *, group: dist.ProcessGroup | None = None, **options):
    """The pipeline of this rank on a group (default: all), with the weights of `unsliced`, and its model parts."""
    rank = dist.get_rank(group)
    num_layers = case.num_layers or case.num_stages
    torch.manual_seed(0)
    whole = Decoder(
        layers=range(num_layers),
        num_kv_heads=case.num_kv_heads,
        vocab=case.vocab,
        tied=case.tied,
        value_head_dim=case.value_head_dim,
    )
    layers = stage_layers(num_layers, case.num_stages)
    stages = []
    for index in range(rank, case.num_stages, case.p):
        part = Decoder(
            layers=layers[index],
            is_first=index == 0,
            is_last=index == case.num_stages - 1,
            num_kv_heads=case.num_kv_heads,
            recompute=case.recompute,
            vocab=case.vocab,
            vocab_parallel=case.vocab_parallel,
            window=case.window,
            value_head_dim=case.value_head_dim,
        )
        part.load_state_dict({name: value for name, value in whole.state_dict().items() if name in part.state_dict()})
        stages.append(PipelineStage(part, index, case.num_stages, torch.device("cpu"), group=group))
    shared = None if case.vocab_parallel == "none" else Shared(whole, case, group)
    settings = {
        "loss_fn": sum_loss if shared is None else shared.head,
        "num_slices": case.n,
        "options": SlimPipeOptions(keep_attention_output=case.keep_output, **case.options | options),
        "embedding": None if shared is None else shared.embedding,
    }
    if case.v == 1:
        schedule = ScheduleSlimPipe(stages[0], case.m, **settings)
    else:
        schedule = ScheduleInterleavedSlimPipe(stages, case.m, **settings)
    return schedule, [stage.submod for stage in stages] + ([] if shared is None else [shared])


def run_step(schedule, case: Case, batch: Batch, *, evaluate: bool = False) -> list[torch.Tensor]:
    """One step as a user writes it; losses are empty off the last rank."""
    tokens, labels, positions = batch
    rank, losses = dist.get_rank(), []
    kwargs = {} if positions is None else {"positions": positions}
    args = (tokens,) if rank == 0 else ()
    target = labels if rank == case.p - 1 else None
    if evaluate:
        schedule.eval(*args, target=target, losses=losses, **kwargs)
    else:
        loss_kwargs = {"num_tokens" if case.vocab_parallel == "none" else "denominator": tokens.numel()}
        schedule.step(*args, target=target, losses=losses, loss_kwargs=loss_kwargs, return_outputs=False, **kwargs)
    return losses


def expected_gradient(part: nn.Module, name: str, whole: torch.Tensor) -> torch.Tensor:
    """Of a parameter of a part, out of the gradient of the parameter of this name of the whole model."""
    if not isinstance(part, Shared):
        return whole
    rows = part.get_submodule(name.removesuffix(".weight")).rows
    return whole[rows.start : rows.stop]


def errors_of(schedule, parts: list[nn.Module], case: Case) -> dict[str, float]:
    """Runs on every rank what the case says: relative errors of this rank's gradients and losses, by name."""
    batches = [make_batch(case, seed) for seed in range(1, 1 + case.runs.count("T"))]
    expected = [unsliced(case, batches) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(expected)
    gradients, losses = expected[0]
    trained, evaluated, left = [], [], iter(batches)
    for run in case.runs:
        if run == "T":
            trained += run_step(schedule, case, next(left))
        else:
            evaluated.append(run_step(schedule, case, batches[-1], evaluate=True))
    errors = {
        name: relative_error(parameter.grad, expected_gradient(part, name, gradients[name]))
        for part in parts
        for name, parameter in part.named_parameters()
    }
    if dist.get_rank() == case.p - 1:
        assert len(trained) == len(losses) == len(batches) * case.m
        assert not any(loss.requires_grad for loss in trained)
        errors |= {f"loss {i}": relative_error(a, b) for i, (a, b) in enumerate(zip(trained, losses, strict=True))}
        scale = batches[-1][0].numel()  # eval was given no token count: its losses are raw sums
        for mine in evaluated:
            errors |= {
                f"eval loss {i}": relative_error(a / scale, b)
                for i, (a, b) in enumerate(zip(mine, losses[-case.m :], strict=True))
            }
    return errors


def _worst_errors(cases: list[Case], check_schedule: Callable | None) -> list[tuple[float, str]]:
    """Runs on every rank: the worst relative error of each case over this rank's gradients and losses."""
    results = []
    for case in cases:
        schedule, parts = make_schedule(case)
        errors = errors_of(schedule, parts, case)
        if check_schedule is not None:
            check_schedule(schedule, case)
        schedule.close()
        results.append(max(((error, name) for name, error in errors.items()), default=(0.0, "nothing")))
    return results


def check_cases(
    rank_pool, cases: Sequence[Case], *, check_schedule: Callable | None = None, timeout: float = 240
) -> None:
    """Every error of every case is within `TOLERANCE` on every rank; there, `check_schedule(schedule, case)` is called
    after each case."""
    for p, chosen in by_ranks(cases):
        results_by_rank = rank_pool(p).run(_worst_errors, chosen, check_schedule, timeout=timeout)
        for rank, results in enumerate(results_by_rank):
            for case, (error, name) in zip(chosen, results, strict=True):
                assert error <= TOLERANCE, f"rank {rank}: {name} is off by {error:.1e} in {case}"


def by_ranks(cases: Sequence[Case]) -> Iterator[tuple[int, list[Case]]]:
    """The cases by number of ranks."""
    for p, group in itertools.groupby(sorted(cases, key=lambda case: case.p), key=lambda case: case.p):
        yield p, list(group)
