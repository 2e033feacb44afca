"""A shared vocabulary that cannot work: one clear error on every rank and no hang, and the next good step is exact."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from slimpipe import ScheduleSlimPipe, SlimPipeOptions
from slimpipe.vocabulary import VocabularyEmbedding, VocabularyHead
from tests.distributed.failures import ended
from tests.distributed.parity import TOLERANCE, Case, expected_gradient, make_batch, make_schedule, unsliced
from tests.distributed.test_memory import lonely_stage
from tests.harness import run_ranks
from tests.model import Decoder, relative_error, sum_loss

VOCAB = 9
CASE = Case(p=2, n=4, m=2, vocab=VOCAB, vocab_parallel="both")
S = CASE.seq_len


def is_first() -> bool:
    return dist.get_rank() == 0


def is_last() -> bool:
    return dist.get_rank() == CASE.p - 1


# Steps ---------------------------------------------------------------------------------------------------------------


def step(schedule, *, tokens=None, labels=None, **kwargs) -> None:
    """A step with tokens and labels as usual, or what the test gives."""
    usual_tokens, usual_labels, _ = make_batch(CASE, 1)
    args = (usual_tokens if tokens is None else tokens,)
    target = usual_labels if labels is None else labels
    kwargs = {"loss_kwargs": {"denominator": usual_tokens.numel()}, "return_outputs": False} | kwargs
    schedule.step(*(args if is_first() else ()), target=target if is_last() else None, **kwargs)


def integers(*shape: int, highest: int = 0) -> torch.Tensor:
    """Zeros, but for one."""
    x = torch.zeros(shape, dtype=torch.int64)
    x.view(-1)[-1] = highest
    return x


def target_mbs(*labels: torch.Tensor) -> dict[str, Any]:
    tokens, _, _ = make_batch(CASE, 1)
    return {
        "arg_mbs": [(row[None],) for row in tokens] if is_first() else None,
        "target_mbs": list(labels) if is_last() else None,
    }


def step_in_lists(schedule, *labels: torch.Tensor) -> None:
    schedule.step(**target_mbs(*labels), return_outputs=False)


STEPS: dict[str, tuple[Callable, str]] = {
    "float tokens": (
        lambda s: step(s, tokens=torch.zeros(2, S)),
        r"the first stage was given .*float32.*: with a VocabularyEmbedding it must be given token ids only",
    ),
    "embedded tokens": (
        lambda s: step(s, tokens=torch.zeros(2, S, 16, dtype=torch.float64)),
        r"the first stage was given .*float64.* it must be given token ids only",
    ),
    "tokens out of range": (
        lambda s: step(s, tokens=integers(2, S, highest=VOCAB)),
        f"ids holds {VOCAB}: it must be 0 .. {VOCAB - 1}; nearest legal value: {VOCAB - 1}",
    ),
    "labels out of range": (
        lambda s: step(s, labels=integers(2, S, highest=VOCAB)),
        f"labels holds {VOCAB}: it must be 0 .. {VOCAB - 1}, or -100 to be ignored; nearest legal value: {VOCAB - 1}",
    ),
    "negative labels": (lambda s: step(s, labels=integers(2, S, highest=-1)), "labels holds -1: it must be 0 .. "),
    "labels of other length": (lambda s: step(s, labels=integers(2, S + 4)), "ranks differ in the sequence length"),
    "labels of another batch": (lambda s: step(s, labels=integers(4, S)), "ranks differ in the number of tokens"),
    "labels with one dim more": (
        lambda s: step(s, labels=integers(2, S, 1)),
        rf"labels have shape \(1, {CASE.slice_len}, 1\): there must be one for each of the hidden states",
    ),
    "labels of two shapes": (
        lambda s: step_in_lists(s, integers(1, S), integers(1, S, 1)),
        r"labels of the microbatches have shapes \[\(1, 16\), \(1, 16, 1\)\]",
    ),
    "float labels": (
        lambda s: step(s, labels=torch.zeros(2, S)),
        "labels of microbatch 0 have dtype torch.float32: .* torch.int64",
    ),
    "no labels": (lambda s: s.step(*((integers(2, S),) if is_first() else ())), "last stage got no labels"),
    "no tokens": (lambda s: s.step(target=integers(2, S) if is_last() else None), "first stage got no tokens"),
    "unknown loss_kwargs": (lambda s: step(s, loss_kwargs={"num_tokens": 3}), "unexpected keyword argument 'num_token"),
    "denominator of 0": (lambda s: step(s, loss_kwargs={"denominator": 0}), "denominator = 0: it must be positive"),
    "loss_kwargs on the last rank only": (
        lambda s: step(s, loss_kwargs={"denominator": 7} if is_last() else None),
        "ranks differ in loss_kwargs",
    ),
    "denominators that differ": (
        lambda s: step(s, loss_kwargs={"denominator": torch.tensor(5 + dist.get_rank())}),
        "ranks differ in loss_kwargs",
    ),
}


def refused_steps() -> list[dict]:
    """Runs on every rank: how each call ended; then a good step of the same schedule."""
    schedule, parts = make_schedule(CASE, group=dist.new_group(timeout=timedelta(seconds=10)))
    outcomes = []
    for call, _ in STEPS.values():
        outcomes.append(ended(lambda call=call: call(schedule)))
        for part in parts:
            part.zero_grad()
    batches = [make_batch(CASE, 1)]
    step(schedule)
    schedule.close()
    expected, _ = unsliced(CASE, batches)
    for part in parts:
        for name, parameter in part.named_parameters():
            assert relative_error(parameter.grad, expected_gradient(part, name, expected[name])) <= TOLERANCE, name
    return outcomes


def test_steps_are_refused_on_every_rank() -> None:
    for rank, outcomes in enumerate(run_ranks(refused_steps, 2, timeout=120)):
        for (name, (_, pattern)), said in zip(STEPS.items(), outcomes, strict=True):
            assert said["kind"] in ("ValueError", "TypeError"), f"{name} on rank {rank}: {said}"
            assert re.search(pattern, said["text"]), f"{name} on rank {rank}: {said}"
            assert said["seconds"] < 5, f"{name} on rank {rank}: {said}"


# Modules -------------------------------------------------------------------------------------------------------------


@dataclass
class Setting:
    """What makes a schedule. Modules as they should be, to be replaced by the test."""

    group: dist.ProcessGroup
    alone: dist.ProcessGroup
    """This rank's own."""
    stage: nn.Module
    head: Any
    embedding: Any
    whole: Decoder

    @classmethod
    def good(cls, group: dist.ProcessGroup, alone: dist.ProcessGroup) -> Setting:
        torch.manual_seed(0)
        rank, whole = dist.get_rank(), Decoder(layers=range(CASE.num_stages), vocab=VOCAB)
        settings = {"group": group, "reduce_to": None}
        head = VocabularyHead.from_linear(whole.head, **settings)
        embedding = VocabularyEmbedding.from_embedding(whole.embedding, **settings)
        return cls(group, alone, cls.decoder(rank, "both"), head, embedding, whole)

    @staticmethod
    def decoder(rank: int, vocab_parallel: str) -> Decoder:
        return Decoder(
            layers=range(rank, rank + 1), is_first=rank == 0, is_last=rank == 1, vocab=VOCAB,
            vocab_parallel=vocab_parallel,
        )  # fmt: skip

    def new_head(self, **settings) -> VocabularyHead:
        return VocabularyHead.from_linear(self.whole.head, **({"group": self.group, "reduce_to": None} | settings))

    def run(self) -> None:
        stage = PipelineStage(self.stage, dist.get_rank(), CASE.p, torch.device("cpu"), group=self.group)
        options = SlimPipeOptions(context_exchange="off")
        schedule = ScheduleSlimPipe(
            stage, CASE.m, loss_fn=self.head, embedding=self.embedding, num_slices=CASE.n, options=options
        )
        step(schedule)


def on_rank(rank: int, bad: Any, good: Any) -> Any:
    return bad if dist.get_rank() == rank else good


def replicated(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    replicate(module, process_group=group)
    return module


def ddp(module: nn.Module, group: dist.ProcessGroup) -> DistributedDataParallel:
    return DistributedDataParallel(module, process_group=group)


DDP_HEAD = "loss_fn is a DistributedDataParallel around a VocabularyHead; it must be .*, with fully_shard"
DIFFER = "ranks differ in the shared vocabulary: a VocabularyHead "
MODULES: dict[str, tuple[Callable[[Setting], dict[str, Any]], str]] = {
    "embedding without head": (lambda s: {"head": sum_loss}, "loss_fn no VocabularyHead: .*: embedding=None"),
    "no embedding at all": (lambda s: {"embedding": s.whole.embedding}, "embedding is a Embedding; it must"),
    "head to all": (lambda s: {"head": s.new_head(reduce_to="all")}, "loss_fn has reduce_to = 'all': .*reduce_to=None"),
    "embedding to the first": (
        lambda s: {"embedding": VocabularyEmbedding.from_embedding(s.whole.embedding, group=s.group)},
        "embedding has reduce_to = 0: a pipeline schedule adds up .*: reduce_to=None",
    ),
    "head on the last rank only": (
        lambda s: {"head": on_rank(0, sum_loss, s.head), "embedding": on_rank(0, None, s.embedding)}, DIFFER
    ),
    "head on the first rank only": (
        lambda s: {"head": on_rank(1, sum_loss, s.head), "embedding": on_rank(1, None, s.embedding)}, DIFFER
    ),
    "embedding on the first rank only": (lambda s: {"embedding": on_rank(1, None, s.embedding)}, DIFFER),
    "other block_size": (lambda s: {"head": on_rank(1, s.new_head(block_size=2), s.head)}, DIFFER),
    "other ignore_index": (lambda s: {"head": on_rank(1, s.new_head(ignore_index=-1), s.head)}, DIFFER),
    "other vocabulary": (
        lambda s: {"head": on_rank(1, VocabularyHead.from_linear(
            nn.Linear(16, 2 * VOCAB, bias=False, dtype=torch.float64), group=s.group, reduce_to=None), s.head)}, DIFFER
    ),
    "other dtype": (lambda s: {"head": on_rank(1, s.new_head().float(), s.head)}, DIFFER),
    "groups without the other ranks": (
        lambda s: {"head": s.new_head(group=s.alone)}, r"loss_fn shares the vocabulary among ranks \[\d\], but"
    ),
    "a group without the other rank": (
        lambda s: {"head": on_rank(1, s.new_head(group=s.alone), s.head)},
        r"loss_fn shares the vocabulary among ranks \[1\], but the pipeline has ranks \[0, 1\]",
    ),
    "DDP": (lambda s: {"head": ddp(s.head, s.alone), "embedding": None}, DDP_HEAD),
    "DDP and embedding": (lambda s: {"head": ddp(s.head, s.alone)}, DDP_HEAD),
    "replicate": (
        lambda s: {"head": replicated(s.head, s.alone)}, "given as loss_fn uses DistributedDataParallel .*fully_shard"
    ),
    "replicated embedding": (
        lambda s: {"embedding": replicated(s.embedding, s.alone)}, "given as embedding uses DistributedDataParallel"
    ),
    "partial": (
        lambda s: {"head": partial(s.head, denominator=3), "embedding": None},
        "loss_fn is a partial around a VocabularyHead; .* loss_kwargs for further arguments",
    ),
    "a last stage with a head": (
        lambda s: {"stage": on_rank(1, Setting.decoder(1, "none"), s.stage)},
        rf"hidden states have shape \(1, {CASE.slice_len}, {VOCAB}\): the last dimension must be that of weight; "
        "nearest legal value: 16",
    ),
}  # fmt: skip


def refused_modules() -> list[dict]:
    """Runs on every rank: how a step ended with each of the modules; then one with good modules."""
    group = dist.new_group(timeout=timedelta(seconds=10))
    alone = [dist.new_group([rank]) for rank in range(CASE.p)][dist.get_rank()]
    outcomes = []
    for change, _ in MODULES.values():
        setting = Setting.good(group, alone)
        outcomes.append(ended(lambda setting=setting, change=change: replace(setting, **change(setting)).run()))
    assert ended(Setting.good(group, alone).run)["kind"] == "nothing"
    return outcomes


def test_modules_are_refused_on_every_rank() -> None:
    for rank, outcomes in enumerate(run_ranks(refused_modules, 2, timeout=120)):
        for (name, (_, pattern)), said in zip(MODULES.items(), outcomes, strict=True):
            assert said["kind"] in ("ValueError", "TypeError"), f"{name} on rank {rank}: {said}"
            assert re.search(pattern, said["text"]), f"{name} on rank {rank}: {said}"
            assert said["seconds"] < 5, f"{name} on rank {rank}: {said}"


# One rank ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (integers(2, S, highest=VOCAB), f"labels holds {VOCAB}"),
        (integers(2, S, 1), "there must be one for each of the hidden states"),
        (torch.zeros(2, S), r"labels of microbatch 0 have dtype torch.float32"),
    ],
)
def test_one_rank_refuses_labels(labels: torch.Tensor, message: str) -> None:
    torch.manual_seed(0)
    whole = Decoder(layers=range(1), vocab=VOCAB)
    head = VocabularyHead.from_linear(whole.head, reduce_to=None)
    whole.head = None
    schedule = ScheduleSlimPipe(lonely_stage(whole, 0, 1), CASE.m, loss_fn=head, num_slices=CASE.n)
    with pytest.raises((ValueError, TypeError), match=message):
        schedule.step(integers(2, S), target=labels)
    schedule.step(integers(2, S), target=integers(2, S))
    assert all(parameter.grad.isfinite().all() for parameter in (*whole.parameters(), *head.parameters()))
