"""A schedule that shares the vocabulary, beside other parallelism, in bf16; what it returns, and what it holds.

Shapes: B batch, S sequence, L slice, D model dim, R rows of this rank.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slimpipe import ScheduleSlimPipe, SlimPipeOptions
from slimpipe.program import Op
from slimpipe.runtime import vocabulary
from slimpipe.runtime.vocabulary import SharedVocabulary
from slimpipe.vocabulary import VocabularyEmbedding, VocabularyHead
from slimpipe.vocabulary.ranks import Pending
from tests.distributed.parity import (
    TOLERANCE,
    Case,
    check_cases,
    expected_gradient,
    make_batch,
    make_schedule,
    run_step,
    unsliced,
)
from tests.distributed.test_memory import leftovers, no_garbage_collection
from tests.harness import run_ranks
from tests.model import Decoder, DenseAttention, relative_error, stage_layers, sum_loss

# FSDP2 ---------------------------------------------------------------------------------------------------------------

DP = PP = 2


def shard(module: nn.Module, mesh, *, reshard: bool) -> None:
    """FSDP2 with gradients that are summed: the loss is divided by the tokens of the global batch."""
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    module.set_force_sum_reduction_for_comms(True)
    module.set_gradient_divide_factor(1.0)


def fsdp(v: int, m: int, vocab: int, vocab_parallel: str, reshard: bool) -> list[tuple[str, float]]:
    """Runs on four ranks, dp = 2 x pp = 2: errors of this rank's gradients."""
    mesh = init_device_mesh("cpu", (DP, PP), mesh_dim_names=("dp", "pp"))
    dp_rank, pp_rank = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
    shape = {"p": PP, "v": v, "n": 4, "num_layers": 2 * PP * v, "vocab": vocab, "vocab_parallel": vocab_parallel}
    whole_case, case = Case(**shape, m=m * DP), Case(**shape, m=m)
    schedule, parts = make_schedule(case, group=mesh["pp"].get_group())
    *stages, shared = parts
    for part in stages:
        for block in part.blocks.values():
            shard(block, mesh["dp"], reshard=reshard)
        shard(part, mesh["dp"], reshard=reshard)
    for module in (shared.head, shared.embedding):
        if module is not None:
            shard(module, mesh["dp"], reshard=reshard)
    num_units = sum(isinstance(module, FSDPModule) for part in parts for module in part.modules())
    # A root whose own parameters are none (a middle stage) has nothing to reduce.
    num_units -= sum(part.embedding is None and part.norm is None for part in stages)
    batches = [make_batch(whole_case, seed) for seed in (1, 2)]

    def step(batch, evaluate: bool) -> Counter[str]:
        tokens, labels, _ = (None if x is None else x.chunk(DP)[dp_rank] for x in batch)
        run = schedule.eval if evaluate else schedule.step
        kwargs = {} if evaluate else {"loss_kwargs": {"denominator": batch[0].numel()}}
        args = (tokens,) if pp_rank == 0 else ()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            run(*args, target=labels if pp_rank == PP - 1 else None, return_outputs=False, **kwargs)
        return Counter(event.name() for event in profiler.profiler.kineto_results.events())

    # A step that fails late leaves nothing: neither gradients that are yet to be reduced, nor gathered weights.
    tokens, labels, _ = batches[0]
    wrong = labels.clone()
    for half in wrong.chunk(DP):
        half[-1, -1] = vocab
    with pytest.raises(ValueError, match="labels holds"):
        step((tokens, wrong, None), evaluate=False)
    for part in parts:
        part.zero_grad()
    for evaluate, batch in ((False, batches[0]), (True, batches[1]), (False, batches[1])):
        counts = step(batch, evaluate)
        assert all(isinstance(parameter, DTensor) for part in parts for parameter in part.parameters()), "gathered"
        assert counts["c10d::_reduce_scatter_base_"] == (0 if evaluate else num_units), (evaluate, counts)
    schedule.close()
    expected, _ = unsliced(whole_case, batches)
    return [
        (name, relative_error(parameter.grad.full_tensor(), expected_gradient(part, name, expected[name])))
        for part in parts
        for name, parameter in part.named_parameters()
    ]


@pytest.mark.parametrize(
    ("v", "m", "vocab", "vocab_parallel", "reshard"), [(1, 1, 9, "output", True), (2, 2, 33, "both", False)]
)
def test_fsdp_reduces_once_and_is_exact(v: int, m: int, vocab: int, vocab_parallel: str, reshard: bool) -> None:
    for rank, errors in enumerate(run_ranks(fsdp, DP * PP, v, m, vocab, vocab_parallel, reshard, timeout=120)):
        assert {"head.weight"} <= {name for name, _ in errors}
        for name, error in errors:
            assert error <= TOLERANCE, f"rank {rank}: {name} is off by {error:.1e}"


# Tensor parallelism --------------------------------------------------------------------------------------------------

TP = 2


class SumGradient(torch.autograd.Function):
    """Identity whose gradient is the sum over a group: what enters a layer that is spread over its ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        dist.all_reduce(dy := dy.clone(), group=ctx.group)
        return dy, None


class Sum(torch.autograd.Function):
    """The sum over a group, of which each rank has a part; every rank gets the whole gradient."""

    @staticmethod
    def forward(ctx, x, group):
        dist.all_reduce(x := x.clone(), group=group)
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class StageOverTP(nn.Module):
    """A stage that is the same on all TP ranks, between an embedding and a head whose rows are spread over them."""

    def __init__(self, stage: Decoder, group: dist.ProcessGroup, *, is_first: bool) -> None:
        super().__init__()
        self.stage, self.group, self.is_first = stage, group, is_first

    def forward(self, x: Tensor, positions: Tensor, attention_masks: object = None) -> Tensor:
        x = Sum.apply(x, self.group) if self.is_first else x
        h = self.stage(x, positions, attention_masks)
        return h if self.stage.norm is None else SumGradient.apply(h, self.group)


def over_tp(vocab: int) -> list[tuple[str, float]]:
    """Runs on four ranks, pp = 2 x tp = 2: errors of this rank's gradients and losses."""
    mesh = init_device_mesh("cpu", (PP, TP), mesh_dim_names=("pp", "tp"))
    pp_rank = mesh["pp"].get_local_rank()
    case = Case(p=PP, n=4, m=2, vocab=vocab, vocab_parallel="both", ignored="scattered")
    torch.manual_seed(0)
    whole = Decoder(layers=range(PP), vocab=vocab)
    is_first, is_last = pp_rank == 0, pp_rank == PP - 1
    stage = Decoder(
        layers=stage_layers(PP, PP)[pp_rank], is_first=is_first, is_last=is_last, vocab=vocab, vocab_parallel="both"
    )
    stage.load_state_dict({name: value for name, value in whole.state_dict().items() if name in stage.state_dict()})
    settings = {"group": dist.group.WORLD, "reduce_to": None}
    head = VocabularyHead.from_linear(whole.head, block_size=3, **settings)
    embedding = VocabularyEmbedding.from_embedding(whole.embedding, **settings)
    pipeline = mesh["pp"].get_group()
    module = StageOverTP(stage, mesh["tp"].get_group(), is_first=is_first)
    schedule = ScheduleSlimPipe(
        PipelineStage(module, pp_rank, PP, torch.device("cpu"), group=pipeline),
        case.m,
        loss_fn=head,
        embedding=embedding,
        num_slices=case.n,
        options=SlimPipeOptions(context_exchange="off"),
    )
    batches = [make_batch(case, seed) for seed in (1, 2)]
    losses: list[Tensor] = []
    for tokens, labels, _ in batches:
        schedule.eval(*((tokens,) if is_first else ()), target=labels if is_last else None)
        mine: list[Tensor] = []
        schedule.step(
            *((tokens,) if is_first else ()),
            target=labels if is_last else None,
            losses=mine,
            loss_kwargs={"denominator": tokens.numel()},
        )
        losses += mine
    schedule.close()
    expected, expected_losses = unsliced(case, batches)
    errors = [(name, relative_error(x.grad, expected[name])) for name, x in stage.named_parameters()]
    for name, shared in (("head", head), ("embedding", embedding)):
        rows = slice(shared.rows.start, shared.rows.stop)
        errors.append((name, relative_error(shared.weight.grad, expected[f"{name}.weight"][rows])))
    assert len(losses) == (len(expected_losses) if is_last else 0)
    return errors + [(f"loss {i}", relative_error(a, b)) for i, (a, b) in enumerate(zip(losses, expected_losses))]


@pytest.mark.parametrize("vocab", [10, 257])
def test_rows_over_pipeline_and_tensor_parallel_ranks(rank_pool, vocab: int) -> None:
    for rank, errors in enumerate(rank_pool(PP * TP).run(over_tp, vocab, timeout=120)):
        for name, error in errors:
            assert error <= TOLERANCE, f"rank {rank}: {name} is off by {error:.1e}"


# bf16 ----------------------------------------------------------------------------------------------------------------


def bf16_errors() -> list[tuple[str, float, float]]:
    """(what, error of the sliced bf16 model, error of the unsliced one), both against float64, of this rank's."""
    case = Case(p=2, n=8, m=2, slice_len=16, num_layers=4, vocab=101, vocab_parallel="both", block_size=8)
    schedule, parts = make_schedule(case)
    batch = tokens, labels, _ = make_batch(case, 1)
    gradients = []
    for settings in ({"inner": DenseAttention}, {"dtype": torch.bfloat16}):
        torch.manual_seed(0)
        rounded = Decoder(layers=range(4), vocab=case.vocab).bfloat16().state_dict()
        model = Decoder(layers=range(4), vocab=case.vocab, **settings)
        model.load_state_dict(rounded)
        for row in range(case.m):
            positions = torch.arange(case.seq_len)[None]
            loss = sum_loss(model(tokens[row : row + 1], positions), labels[row : row + 1])
            (loss / tokens.numel()).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for part in parts:
        part.bfloat16()
    run_step(schedule, case, batch)
    schedule.close()
    errors = []
    for part in parts:
        for name, parameter in part.named_parameters():
            exact, whole = (expected_gradient(part, name, found[name]) for found in gradients)
            errors.append((name, relative_error(parameter.grad, exact), relative_error(whole, exact)))
    return errors


def test_bf16_is_as_exact_as_unsliced(rank_pool) -> None:
    errors = [error for rank in rank_pool(2).run(bf16_errors) for error in rank]
    assert {"embedding.weight", "head.weight", "norm.weight"} <= {name for name, *_ in errors}
    sliced, whole = (sum(error[i] ** 2 for error in errors) ** 0.5 for i in (1, 2))
    assert sliced <= 1.5 * whole, errors


# What a step gives ---------------------------------------------------------------------------------------------------


def test_all_labels_ignored(rank_pool) -> None:
    cases = [
        Case(p=p, n=4, m=2, vocab=9, vocab_parallel=kind, ignored="all") for p in (1, 3) for kind in ("output", "both")
    ]
    check_cases(rank_pool, cases, check_schedule=all_zero)


def all_zero(schedule, case: Case) -> None:
    """Runs on every rank."""
    parameters = [*schedule._loss_fn.parameters(), *schedule._stage.submod.parameters()]
    assert all(x.grad is not None and not x.grad.any() for x in parameters)  # NaN is any


def given_back(vocab_parallel: str) -> dict:
    """Runs on every rank: what a step and an evaluation return."""
    case = Case(p=2, n=4, v=2, m=3, batch=2, vocab=9, vocab_parallel=vocab_parallel)
    schedule, _ = make_schedule(case)
    tokens, labels, _ = make_batch(case, 1)
    first, last = dist.get_rank() == 0, dist.get_rank() == 1
    results = {}
    for name in ("step", "eval"):
        losses: list[Tensor] = []
        # The loss is a sum over all ranks' rows; everyone may hold a list, the last rank's is filled.
        outputs = getattr(schedule, name)(*((tokens,) if first else ()), target=labels if last else None, losses=losses)
        results[name] = outputs, losses
    metrics = schedule.metrics()
    schedule.close()
    torch.manual_seed(0)
    whole = Decoder(layers=range(case.num_stages), vocab=case.vocab, inner=DenseAttention)
    head, whole.head = whole.head, None
    hidden_BSD = whole(tokens, torch.arange(case.seq_len).expand_as(tokens))
    expected = [sum_loss(head(h), y) for h, y in zip(hidden_BSD.split(case.batch), labels.split(case.batch))]
    for outputs, losses in results.values():
        if not last:
            assert outputs is None and losses == []
            continue
        assert not outputs.requires_grad and relative_error(outputs, hidden_BSD) <= TOLERANCE
        assert len(losses) == len(expected) and not any(loss.requires_grad for loss in losses)
        assert max(relative_error(a, b) for a, b in zip(losses, expected)) <= TOLERANCE
    return metrics


@pytest.mark.parametrize("vocab_parallel", ["output", "both"])
def test_outputs_are_hidden_states_and_losses_are_the_last_rank_s(rank_pool, vocab_parallel: str) -> None:
    for metrics in rank_pool(2).run(given_back, vocab_parallel):
        assert 0 < metrics["vocabulary_wait_seconds"] < 60


# What a step holds ---------------------------------------------------------------------------------------------------

RUNS = ("step", "eval", "step", "eval")
HIDDEN_DIM, BLOCK_SIZE = 16, 8


class Logits(TorchDispatchMode):
    """Bytes of storages of tensors of logit size: [*, >= R], but no weights and no gradients of weights ([*, D])."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self._num_rows = num_rows
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.inside = False
        """Whether an instruction on the vocabulary runs."""
        self.most = {True: 0, False: 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        for x in tree_leaves(outputs):
            if isinstance(x, Tensor) and max(x.shape, default=0) >= self._num_rows and HIDDEN_DIM not in x.shape:
                storage = x.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        now = sum(num_bytes for _, num_bytes in self._storages.values())
        self.most[self.inside] = max(self.most[self.inside], now)
        return outputs


def held(v: int, m: int, vocab_parallel: str) -> dict:
    """Runs on every rank: what it held, and what was left."""
    case = Case(
        p=2, n=4, v=v, m=m, slice_len=12, vocab=1001, vocab_parallel=vocab_parallel, block_size=BLOCK_SIZE,
        options={"context_exchange": "off", "measure_memory": True},
    )  # fmt: skip
    schedule, parts = make_schedule(case)
    num_rows = len(parts[-1].head.rows)
    tokens, labels, _ = make_batch(case, 1)
    is_first, is_last = dist.get_rank() == 0, dist.get_rank() == 1
    logits, gradients, left = Logits(num_rows), [0], {}
    loss = SharedVocabulary.loss

    def watched(self, unit):
        logits.inside = True
        result = loss(self, unit)
        logits.inside = False
        gradients.append(self.num_bytes)
        return result

    state = (vocabulary._Step, Pending)
    with no_garbage_collection(), mock.patch.object(SharedVocabulary, "loss", watched):
        before = {id(o) for o in gc.get_objects() if isinstance(o, Tensor)}
        for i, name in enumerate(RUNS):
            losses: list[Tensor] = []
            run, kwargs = getattr(schedule, name), {} if name == "eval" else {"loss_kwargs": {"denominator": 7}}
            args, target = (tokens,) if is_first else (), labels if is_last else None
            with logits if i < 2 else nullcontext():
                run(*args, target=target, losses=losses, return_outputs=False, **kwargs)
            del losses, run, args, target
            for _ in range(100):  # gloo's thread lets go of a collective's tensor a little after it is done
                found = leftovers(before) + [str(o) for o in gc.get_objects() if type(o) in state]
                if not found:
                    break
                time.sleep(0.05)
            left[f"{name} {i}"] = found
    row = schedule.program.instructions[-1]
    live = most_live = 0
    for _, op, unit, _ in row:
        live += (op is Op.VOCABULARY) - (op is Op.BACKWARD and unit.stage == case.num_stages - 1)
        most_live = max(most_live, live)
    schedule.close()
    return {
        "left": left,
        "logits": logits.most,
        "logits allowed": 2 * BLOCK_SIZE * num_rows * 8,  # float64
        "gradients": max(gradients),
        "gradients allowed": most_live * case.slice_len * HIDDEN_DIM * 8 if is_last else 0,
        "units": most_live,
    }


@pytest.mark.parametrize(("v", "m", "vocab_parallel"), [(1, 3, "output"), (2, 3, "both")])
def test_nothing_of_logit_size_outlives_an_instruction_and_nothing_a_step(
    rank_pool, v: int, m: int, vocab_parallel: str
) -> None:
    for rank, result in enumerate(rank_pool(2).run(held, v, m, vocab_parallel)):
        assert result["logits"][False] == 0, (rank, result)
        assert result["logits allowed"] / 2 <= result["logits"][True] <= result["logits allowed"], (rank, result)
        assert result["gradients"] <= result["gradients allowed"], (rank, result)
        assert result["units"] <= 4, result  # slices of a microbatch
        for when, found in result["left"].items():
            assert not found, f"rank {rank}, after {when}: {found}"
