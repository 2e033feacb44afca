"""The schedules look like torch's: same arguments, same results, same place in the pipelining package."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _validate_schedule,
)

from slimpipe import ScheduleInterleavedSlimPipe, ScheduleSlimPipe, SlimPipeOptions
from tests.distributed.parity import TOLERANCE, Case, make_batch, make_schedule, run_step, unsliced
from tests.distributed.test_memory import lonely_stage
from tests.model import Decoder, DenseAttention, relative_error, stage_layers, sum_loss

CASE = Case(p=2, n=4, v=2, m=2)


class MockStage:
    """All that torch's own tests give a schedule."""

    def __init__(self, *, num_stages: int, group_size: int, group_rank: int = 0) -> None:
        self.num_stages, self.group_size, self.group_rank = num_stages, group_size, group_rank
        self.group, self.submod = None, None


@pytest.mark.parametrize(("p", "v", "n", "m"), [(2, 1, 2, 1), (4, 1, 8, 3), (4, 2, 8, 2), (3, 3, 7, 2)])
def test_pipeline_order_with_mock_stages(p: int, v: int, n: int, m: int) -> None:
    if v == 1:
        schedule = ScheduleSlimPipe(MockStage(num_stages=p, group_size=p), m, num_slices=n)
        assert isinstance(schedule, PipelineScheduleSingle)
        order = schedule._get_pipeline_order()
    else:
        stages = [MockStage(num_stages=p * v, group_size=p) for _ in range(v)]
        schedule = ScheduleInterleavedSlimPipe(stages, m, num_slices=n)
        assert isinstance(schedule, PipelineScheduleMulti)
        order = schedule.pipeline_order
    _validate_schedule(order, p, p * v, m * n)


# Arguments and results -----------------------------------------------------------------------------------------------


def reference(batch) -> tuple[dict[str, torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Gradients, losses and logits of the unsliced model."""
    gradients, losses = unsliced(CASE, [batch])
    torch.manual_seed(0)
    model = Decoder(layers=range(CASE.num_stages), inner=DenseAttention)
    tokens = batch[0]
    return gradients, losses, model(tokens, torch.arange(CASE.seq_len).expand_as(tokens)).detach()


def whole_batch(schedule, batch, losses) -> object:
    tokens, labels, _ = batch
    loss_kwargs = {"num_tokens": tokens.numel()}
    if dist.get_rank() == 0:
        return schedule.step(tokens, losses=losses, loss_kwargs=loss_kwargs)
    return schedule.step(target=labels, losses=losses, loss_kwargs=loss_kwargs)


def everything_on_every_rank(schedule, batch, losses) -> object:
    tokens, labels, _ = batch
    positions = torch.arange(CASE.seq_len).expand_as(tokens)
    args = (tokens,) if dist.get_rank() == 0 else ()
    return schedule.step(
        *args, target=labels, losses=losses, loss_kwargs={"num_tokens": tokens.numel()}, positions=positions
    )


def no_mask_is_given_by_name(schedule, batch, losses) -> object:
    tokens, labels, _ = batch
    args, kwargs = ((tokens,), {}) if dist.get_rank() == 0 else ((), {"target": labels})
    kwargs |= {"attention_masks": None, "positions": None, "loss_kwargs": {"num_tokens": tokens.numel()}}
    return schedule.step(*args, losses=losses, **kwargs)


def lists(schedule, batch, losses) -> object:
    tokens, labels, _ = batch
    positions = torch.arange(CASE.seq_len)[None]
    return schedule.step(
        arg_mbs=[(row[None],) for row in tokens] if dist.get_rank() == 0 else None,
        kwarg_mbs=[{"positions": positions, "attention_masks": None}] * CASE.m,
        target_mbs=[row[None] for row in labels] if dist.get_rank() == 1 else None,
        losses=losses,
        loss_kwargs={"num_tokens": tokens.numel()},
    )


def styles(calls: list[Callable]) -> None:
    """Runs on every rank."""
    batch = make_batch(CASE, 1)
    gradients, expected_losses, logits = reference(batch)
    for call in calls:
        schedule, parts = make_schedule(CASE)
        losses = ["of an earlier step"]
        merged = call(schedule, batch, losses)
        for part in parts:
            for name, parameter in part.named_parameters():
                assert relative_error(parameter.grad, gradients[name]) <= TOLERANCE, (call.__name__, name)
        if dist.get_rank() == 1:
            assert all(relative_error(a, b) <= TOLERANCE for a, b in zip(losses, expected_losses, strict=True))
            assert merged.shape == logits.shape
            assert relative_error(merged, logits) <= TOLERANCE
            assert not merged.requires_grad
        else:
            assert merged is None
            assert losses == ["of an earlier step"]
        schedule.close()


def test_arguments_as_torch_takes_them(rank_pool) -> None:
    assert (
        rank_pool(2).run(styles, [whole_batch, everything_on_every_rank, no_mask_is_given_by_name, lists]) == [None] * 2
    )  # ranks assert


def evaluate() -> None:
    batch = make_batch(CASE, 1)
    _, expected_losses, logits = reference(batch)
    schedule, parts = make_schedule(CASE)
    tokens, labels, _ = batch
    rank, losses = dist.get_rank(), []
    with torch.no_grad():
        outputs = schedule.eval(*((tokens,) if rank == 0 else ()), target=labels if rank == 1 else None, losses=losses)
    assert all(parameter.grad is None for part in parts for parameter in part.parameters())
    if rank == 1:
        assert relative_error(outputs, logits) <= TOLERANCE
        expected = [loss * tokens.numel() for loss in expected_losses]
        assert all(relative_error(a, b) <= TOLERANCE for a, b in zip(losses, expected, strict=True))
    schedule.close()
    # Without a loss function a schedule only goes forward and needs no labels.
    schedule = ScheduleInterleavedSlimPipe(schedule._torch_stages, CASE.m, num_slices=CASE.n)
    outputs = schedule.step(*((tokens,) if rank == 0 else ()))
    if rank == 1:
        assert relative_error(outputs, logits) <= TOLERANCE
    schedule.close()


def test_eval_and_forward_only(rank_pool) -> None:
    assert rank_pool(2).run(evaluate) == [None] * 2  # ranks assert


# One rank ------------------------------------------------------------------------------------------------------------


def test_one_rank_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    case = Case(p=1, n=4, m=2)
    batch = make_batch(case, 1)
    gradients, losses = unsliced(case, [batch])
    torch.manual_seed(0)
    model = Decoder(layers=range(1))
    schedule = ScheduleSlimPipe(lonely_stage(model, 0, 1), 2, loss_fn=sum_loss, num_slices=4)
    mine: list[torch.Tensor] = []
    tokens, labels, _ = batch
    schedule.step(tokens, target=labels, losses=mine, loss_kwargs={"num_tokens": tokens.numel()})
    assert all(relative_error(a, b) <= TOLERANCE for a, b in zip(mine, losses, strict=True))
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, gradients[name]) <= TOLERANCE


class SequenceFirst(nn.Module):
    """A decoder whose tokens, positions and hidden states are (S, B, ...)."""

    def __init__(self, part: Decoder) -> None:
        super().__init__()
        self.part = part

    def forward(self, x, positions, attention_masks=None):
        return self.part(x.transpose(0, 1), positions.transpose(0, 1), attention_masks).transpose(0, 1)


def sequence_first() -> None:
    case = Case(p=2, n=4, m=2, batch=2)
    batch = make_batch(case, 1)
    gradients, losses = unsliced(case, [batch])
    rank = dist.get_rank()
    torch.manual_seed(0)
    whole = Decoder(layers=range(2)).state_dict()
    part = Decoder(layers=range(rank, rank + 1), is_first=rank == 0, is_last=rank == 1)
    part.load_state_dict({name: whole[name] for name in part.state_dict()})
    stage = PipelineStage(SequenceFirst(part), rank, 2, torch.device("cpu"))
    options = SlimPipeOptions(seq_dim=0)
    schedule = ScheduleSlimPipe(stage, case.m, loss_fn=sum_loss, num_slices=case.n, options=options)
    tokens, labels, _ = (None if x is None else [row.T for row in x.split(case.batch)] for x in batch)
    positions = torch.arange(case.seq_len)[:, None].expand(-1, case.batch)
    mine: list[torch.Tensor] = []
    schedule.step(
        arg_mbs=[(mb,) for mb in tokens] if rank == 0 else None,
        kwarg_mbs=[{"positions": positions}] * case.m,
        target_mbs=labels if rank == 1 else None,
        losses=mine,
        loss_kwargs={"num_tokens": batch[0].numel()},
        return_outputs=False,
    )
    for name, parameter in part.named_parameters():
        assert relative_error(parameter.grad, gradients[name]) <= TOLERANCE, name
    assert all(relative_error(a, b) <= TOLERANCE for a, b in zip(mine, losses, strict=rank == 1))
    with pytest.raises(ValueError, match=r"seq_dim = 0 and n_microbatches = 2.*pass arg_mbs"):
        schedule.step(*((batch[0].T,) if rank == 0 else ()), target=batch[1].T if rank == 1 else None)
    schedule.close()


def test_sequence_in_dim_0(rank_pool) -> None:
    assert rank_pool(2).run(sequence_first) == [None] * 2  # ranks assert


# Several schedules, several shapes -----------------------------------------------------------------------------------


def two_pipelines() -> None:
    """Two models in one process take turns, with other shapes; then one of them gets other batches."""
    cases = [Case(p=2, n=4, m=2), Case(p=2, n=3, v=2, m=3, slice_len=5, num_kv_heads=2)]
    schedules = [make_schedule(case) for case in cases]
    batches = [[make_batch(case, seed) for seed in (1, 2)] for case in cases]
    for turn in range(2):
        for (schedule, _), case, mine in zip(schedules, cases, batches):
            run_step(schedule, case, mine[turn])
    for (_, parts), case, mine in zip(schedules, cases, batches):
        check_gradients(parts, unsliced(case, mine)[0])
    schedule, parts = schedules[0]
    for change in ({"slice_len": 7}, {"batch": 3}, {"slice_len": 2, "batch": 2}, {}):
        case = Case(**({"p": 2, "n": 4, "m": 2} | change))
        for part in parts:
            part.zero_grad()
        batch = make_batch(case, 3)
        run_step(schedule, case, batch, evaluate=True)
        run_step(schedule, case, batch)
        check_gradients(parts, unsliced(case, [batch])[0])
    for schedule, _ in schedules:
        schedule.close()


def check_gradients(parts: list[nn.Module], expected: dict[str, torch.Tensor]) -> None:
    for part in parts:
        for name, parameter in part.named_parameters():
            assert relative_error(parameter.grad, expected[name]) <= TOLERANCE, name


def test_two_pipelines_in_turn_and_changing_batches(rank_pool) -> None:
    assert rank_pool(2).run(two_pipelines) == [None] * 2  # ranks assert


def frozen() -> None:
    """Only the first, or only the last stage has anything to train."""
    case = Case(p=2, n=4, m=2)
    batch = make_batch(case, 1)
    expected, _ = unsliced(case, [batch])
    for trained_rank in (0, 1):
        schedule, parts = make_schedule(case)
        parts[0].requires_grad_(dist.get_rank() == trained_rank)
        run_step(schedule, case, batch)
        if dist.get_rank() == trained_rank:
            check_gradients(parts, expected)
        else:
            assert all(parameter.grad is None for parameter in parts[0].parameters())
        schedule.close()


def test_frozen_stages(rank_pool) -> None:
    assert rank_pool(2).run(frozen) == [None] * 2  # ranks assert


# bf16 ----------------------------------------------------------------------------------------------------------------


def bf16_errors(exchange: str, documents: tuple[int, ...] | None) -> list[tuple[str, float, float]]:
    """(what, error of the sliced bf16 model, error of the unsliced one), both against float64."""
    case = Case(p=2, n=8, m=2, slice_len=16, num_layers=4, documents=documents)
    rank = dist.get_rank()
    torch.manual_seed(0)
    rounded = {name: value.bfloat16() for name, value in Decoder(layers=range(4), dim=64).state_dict().items()}
    batch = tokens, labels, packed = make_batch(case, 1)
    positions = torch.arange(case.seq_len).expand_as(tokens) if packed is None else packed

    def grads_of(model: nn.Module) -> dict[str, torch.Tensor]:
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    models = {}
    for name, inner, dtype in (
        ("exact", DenseAttention, torch.float64),
        ("unsliced", None, torch.bfloat16),
    ):
        model = Decoder(layers=range(4), dim=64, dtype=dtype, **({} if inner is None else {"inner": inner}))
        model.load_state_dict(rounded)
        for row in range(case.m):
            loss = sum_loss(model(tokens[row : row + 1], positions[row : row + 1]), labels[row : row + 1])
            (loss / tokens.numel()).backward()
        models[name] = grads_of(model)
    part = Decoder(layers=stage_layers(4, 2)[rank], dim=64, is_first=rank == 0, is_last=rank == 1, dtype=torch.bfloat16)
    part.load_state_dict({name: rounded[name] for name in part.state_dict()})
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    options = SlimPipeOptions(context_exchange=exchange, exchange_granularity=1)
    schedule = ScheduleSlimPipe(stage, case.m, loss_fn=sum_loss, num_slices=case.n, options=options)
    if exchange == "on":
        run_step(schedule, case, batch)  # exchange begins with the second step
        part.zero_grad()
    run_step(schedule, case, batch)
    assert bool(schedule.program.transfers) == (exchange == "on")
    schedule.close()
    mine, exact, unsliced_bf16 = grads_of(part), models["exact"], models["unsliced"]
    return [
        (name, relative_error(mine[name], exact[name]), relative_error(unsliced_bf16[name], exact[name]))
        for name in mine
    ]


@pytest.mark.parametrize("documents", [None, (37, 50, 41)])
@pytest.mark.parametrize("exchange", ["off", "on"])
def test_bf16_is_as_exact_as_unsliced(rank_pool, exchange: str, documents: tuple[int, ...] | None) -> None:
    for errors in rank_pool(2).run(bf16_errors, exchange, documents, timeout=120):
        sliced, whole = (sum(error[i] ** 2 for error in errors) ** 0.5 for i in (1, 2))
        assert sliced <= 1.5 * whole, errors
        for name, ours, theirs in errors:
            assert ours <= 2 * theirs, (name, ours, theirs)
