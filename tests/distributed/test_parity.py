"""Loss and every gradient of the sliced pipeline equal those of the unsliced model, float64 (design 1.3, 4.1)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from slimpipe import ScheduleInterleavedSlimPipe, ScheduleSlimPipe, SlimPipeOptions
from tests.model import IGNORED, Decoder, DenseAttention, packed_positions, relative_error, stage_layers, sum_loss

TOLERANCE = 1e-10


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
    once: bool = False
    """One step only, instead of a step, an evaluation and another step."""

    @property
    def seq_len(self) -> int:
        return self.n * self.slice_len

    @property
    def num_stages(self) -> int:
        return self.p * self.v


def make_batch(case: Case, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    shape = (case.m * case.batch, case.seq_len)
    tokens, labels = (torch.randint(0, 32, shape, generator=generator) for _ in range(2))
    if case.ignored == "slices":  # one slice of the first microbatch, and all of the last one's second half
        labels[: case.batch, : case.slice_len] = IGNORED
        labels[-case.batch :, case.seq_len // 2 :] = IGNORED
    elif case.ignored == "scattered":
        labels[torch.rand(shape, generator=generator) < 0.4] = IGNORED
    elif case.ignored == "all":
        labels[:] = IGNORED
    positions = None if case.documents is None else packed_positions(list(case.documents), shape[0])
    return tokens, labels, positions


def unsliced(case: Case, batches: list) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Gradients added over the steps, and the losses by step and microbatch, of one model in one piece."""
    torch.manual_seed(0)
    model = Decoder(
        layers=range(case.num_layers or case.num_stages), num_kv_heads=case.num_kv_heads, inner=DenseAttention
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


def make_schedule(case: Case, **options):
    """The pipeline of this rank, with the weights of `unsliced`."""
    rank = dist.get_rank()
    num_layers = case.num_layers or case.num_stages
    torch.manual_seed(0)
    whole = Decoder(layers=range(num_layers), num_kv_heads=case.num_kv_heads)
    layers = stage_layers(num_layers, case.num_stages)
    stages = []
    for index in range(rank, case.num_stages, case.p):
        part = Decoder(
            layers=layers[index],
            is_first=index == 0,
            is_last=index == case.num_stages - 1,
            num_kv_heads=case.num_kv_heads,
            recompute=case.recompute,
        )
        part.load_state_dict({name: value for name, value in whole.state_dict().items() if name in part.state_dict()})
        stages.append(PipelineStage(part, index, case.num_stages, torch.device("cpu")))
    settings = {
        "loss_fn": sum_loss,
        "num_slices": case.n,
        "options": SlimPipeOptions(keep_attention_output=case.keep_output, **options),
    }
    if case.v == 1:
        schedule = ScheduleSlimPipe(stages[0], case.m, **settings)
    else:
        schedule = ScheduleInterleavedSlimPipe(stages, case.m, **settings)
    return schedule, [stage.submod for stage in stages]


def run_step(schedule, case: Case, batch, *, evaluate: bool = False) -> list[torch.Tensor]:
    """One step as a user writes it; losses are empty off the last rank."""
    tokens, labels, positions = batch
    rank, losses = dist.get_rank(), []
    kwargs = {} if positions is None else {"positions": positions}
    args = (tokens,) if rank == 0 else ()
    target = labels if rank == case.p - 1 else None
    if evaluate:
        schedule.eval(*args, target=target, losses=losses, **kwargs)
    else:
        loss_kwargs = {"num_tokens": tokens.numel()}
        schedule.step(*args, target=target, losses=losses, loss_kwargs=loss_kwargs, return_outputs=False, **kwargs)
    return losses


def worst_errors(cases: list[Case]) -> list[tuple[float, str]]:
    """Runs on every rank: the worst relative error of each case over this rank's gradients and losses."""
    torch.set_num_threads(1)
    results = []
    for case in cases:
        batches = [make_batch(case, seed) for seed in ((1,) if case.once else (1, 2))]
        gradients, losses = unsliced(case, batches)
        schedule, parts = make_schedule(case)
        mine = run_step(schedule, case, batches[0])
        evaluated: list[torch.Tensor] = []
        if not case.once:
            evaluated = run_step(schedule, case, batches[1], evaluate=True)
            mine += run_step(schedule, case, batches[1])
        errors = {}
        for part in parts:
            for name, parameter in part.named_parameters():
                errors[name] = relative_error(parameter.grad, gradients[name])
        if dist.get_rank() == case.p - 1:
            assert len(mine) == len(losses) == len(batches) * case.m
            assert not any(loss.requires_grad for loss in mine)
            errors |= {f"loss {i}": relative_error(a, b) for i, (a, b) in enumerate(zip(mine, losses, strict=True))}
            scale = batches[-1][0].numel()  # eval was given no token count: its losses are raw sums
            errors |= {
                f"eval loss {i}": relative_error(a / scale, b)
                for i, (a, b) in enumerate(zip(evaluated, losses[case.m :], strict=True))
            }
        schedule.close()
        name = max(errors, key=errors.get)
        results.append((errors[name], name))
    return results


def check_cases(rank_pool, cases: list[Case]) -> None:
    by_ranks = sorted(cases, key=lambda case: case.p)
    for p, group in itertools.groupby(by_ranks, key=lambda case: case.p):
        chosen = list(group)
        for rank, results in enumerate(rank_pool(p).run(worst_errors, chosen, timeout=240)):
            for case, (error, name) in zip(chosen, results, strict=True):
                assert error <= TOLERANCE, f"rank {rank}: {name} is off by {error:.1e} in {case}"


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_every_shape(rank_pool, p: int) -> None:
    shapes = itertools.product(range(1 if p == 1 else p, 9), (1, 2, 3), (1, 2, 3, 4))
    check_cases(rank_pool, [Case(p=p, n=n, v=v, m=m, slice_len=2, once=m in (1, 3)) for n, v, m in shapes])


DOCUMENTS = {
    "inside slices": (5, 9, 18),
    "at slice edges": (8, 4, 20),
    "across slice edges": (1, 14, 1, 16),
    "of one token": (1,) * 32,
}


@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS.keys())
def test_documents(rank_pool, documents: tuple[int, ...]) -> None:
    shapes = [(1, 1, 8), (2, 1, 8), (3, 1, 4), (4, 1, 8), (2, 2, 4), (3, 2, 8)]
    check_cases(
        rank_pool,
        [
            Case(p=p, v=v, n=n, m=3, slice_len=32 // n, batch=b, documents=documents)
            for p, v, n in shapes
            for b in (1, 2)
        ],
    )


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_grouped_queries(rank_pool, num_kv_heads: int) -> None:
    check_cases(rank_pool, [Case(p=p, n=4, v=v, num_kv_heads=num_kv_heads, batch=2) for p in (1, 2, 4) for v in (1, 2)])


@pytest.mark.parametrize("ignored", ["slices", "scattered", "all"])
def test_ignored_labels(rank_pool, ignored: str) -> None:
    check_cases(rank_pool, [Case(p=p, n=4, v=v, m=2, ignored=ignored) for p in (1, 2, 3) for v in (1, 2)])


@pytest.mark.parametrize("keep_output", [True, False])
def test_recompute(rank_pool, keep_output: bool) -> None:
    common = {"recompute": True, "keep_output": keep_output, "documents": (5, 9, 18), "num_kv_heads": 2}
    check_cases(rank_pool, [Case(p=p, n=8, v=v, m=3, **common) for p in (1, 2, 4) for v in (1, 2)])


def test_unequal_layers(rank_pool) -> None:
    check_cases(rank_pool, [Case(p=2, n=4, num_layers=5), Case(p=3, n=6, v=2, num_layers=8)])
