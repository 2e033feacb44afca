"""What cannot be run is refused on every rank before any activation is sent, and the schedule works on afterwards."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage

from slimpipe import ScheduleInterleavedSlimPipe, ScheduleSlimPipe, SlimPipeOptions
from slimpipe.transport import Transport
from tests.distributed.parity import TOLERANCE, Case, make_batch, make_schedule, run_step, unsliced
from tests.model import Decoder, relative_error, sum_loss

CASE = Case(p=2, n=4, m=2)
S = CASE.seq_len


# Steps ---------------------------------------------------------------------------------------------------------------


def step(schedule, *, tokens=None, labels=None, **kwargs) -> None:
    """A step in which ranks get tokens and labels as usual, or what the test gives."""
    usual_tokens, usual_labels, _ = make_batch(CASE, 1)
    args = ((usual_tokens if tokens is None else tokens),) if dist.get_rank() == 0 else ()
    target = (usual_labels if labels is None else labels) if dist.get_rank() == 1 else None
    kwargs = {"target": target, "loss_kwargs": {"num_tokens": usual_tokens.numel()}, "return_outputs": False} | kwargs
    schedule.step(*args, **kwargs)


def on_rank(rank: int, **kwargs):
    return kwargs if dist.get_rank() == rank else {}


def _positions(batch: int = CASE.m, length: int = S) -> torch.Tensor:
    return torch.arange(length).expand(batch, length)


def not_divisible(schedule):
    step(schedule, tokens=torch.zeros(2, S + 1, dtype=torch.int64), labels=torch.zeros(2, S + 1, dtype=torch.int64))


def batch_not_divisible(schedule):
    step(schedule, tokens=torch.zeros(3, S, dtype=torch.int64), labels=torch.zeros(3, S, dtype=torch.int64))


def bool_mask(schedule):
    step(schedule, attention_masks=torch.ones(2, S, S, dtype=torch.bool))


def _pre_split(count: int = 2) -> dict:
    tokens, labels, _ = make_batch(CASE, 1)
    rank = dist.get_rank()
    return {
        "arg_mbs": [(row[None],) for row in tokens][:count] if rank == 0 else None,
        "target_mbs": [row[None] for row in labels][:count] if rank == 1 else None,
        "target": None,
    }


def step_pre_split(schedule, **kwargs):
    """`step` passes tokens as arguments, which may not stand beside lists."""
    schedule.step(**(_pre_split() | {"loss_kwargs": {"num_tokens": 2 * S}, "return_outputs": False} | kwargs))


def uncut_kwarg(schedule):
    step(schedule, segment_ids=torch.zeros(2, S, dtype=torch.int64))


def positions_on_first_rank_only(schedule):
    step(schedule, **on_rank(0, positions=_positions()))


def positions_differ(schedule):
    positions = _positions() if dist.get_rank() == 0 else _positions(length=S // 2).repeat(1, 2)
    step(schedule, positions=positions)


def positions_of_other_length(schedule):
    step(schedule, positions=_positions(length=S - CASE.n))


def positions_jump(schedule):
    step(schedule, positions=2 * _positions())


def float_positions(schedule):
    step(schedule, positions=_positions().double())


def positions_are_a_list(schedule):
    step(schedule, positions=[0, 1])


def lengths_differ(schedule):
    step(schedule, labels=torch.zeros(2, 2 * S, dtype=torch.int64))


def batches_differ(schedule):
    step(schedule, labels=torch.zeros(4, S, dtype=torch.int64))


def no_tokens(schedule):
    schedule.step(target=make_batch(CASE, 1)[1] if dist.get_rank() == 1 else None)


def no_labels(schedule):
    schedule.step(*((make_batch(CASE, 1)[0],) if dist.get_rank() == 0 else ()))


def losses_is_no_list(schedule):
    step(schedule, losses=())


def tokens_are_a_list(schedule):
    step(schedule, tokens=[[1, 2], [3, 4]])


def labels_are_a_list(schedule):
    step(schedule, labels=[[1, 2], [3, 4]])


def too_few_microbatches(schedule):
    step_pre_split(schedule, **_pre_split(1))


def lists_beside_whole(schedule):
    step_pre_split(schedule, kwarg_mbs=[{}, {}], positions=_positions())


def block_mask_in_lists(schedule):
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, S, S, device="cpu")
    step_pre_split(schedule, kwarg_mbs=[{"attention_masks": mask}] * 2)


def without_gradients(schedule):
    with torch.no_grad():
        step(schedule)


def rank_one_cannot(schedule):
    step(schedule, **on_rank(1, attention_masks=torch.ones(2, 1)))


def one_rank_evaluates(schedule):
    if dist.get_rank() == 0:
        schedule.eval(make_batch(CASE, 1)[0])
    else:
        step(schedule)


STEPS: dict[Callable, str] = {
    not_divisible: rf"sequence length {S + 1} .* num_slices = 4 .* nearest sequence length that does: {S}",
    batch_not_divisible: "batch size 3, .* n_microbatches = 2 .* nearest batch size that does: 4",
    bool_mask: r"attention_masks = Tensor.* pass `positions`",
    block_mask_in_lists: r"attention_masks = BlockMask.* pass `positions`",
    uncut_kwarg: rf"segment_ids has shape \(1, {S}\).* SlimPipeOptions.sliced_kwargs",
    positions_on_first_rank_only: r"whether positions are given .*\[1, 0\]",
    positions_differ: "differ in the positions",
    positions_of_other_length: "must agree up to dim 1|differ in the sequence length",
    positions_jump: r"positions\[0, 1\] = 2 .* nearest legal value: 1",
    float_positions: "must be integers",
    positions_are_a_list: "positions of microbatch 0 is a list",
    lengths_differ: rf"differ in the sequence length.*\[{S}, {2 * S}\]",
    batches_differ: rf"differ in the number of tokens per microbatch.*\[{S}, {2 * S}\]",
    no_tokens: "first stage got no tokens",
    no_labels: "last stage got no labels",
    losses_is_no_list: "losses is a tuple; it must be a list",
    tokens_are_a_list: "argument 0 of microbatch 0 is a list",
    labels_are_a_list: "target is a list; it must be a tensor",
    too_few_microbatches: "has 1 entries; n_microbatches = 2 needs 2",
    lists_beside_whole: "kwargs given together with arg_mbs",
    without_gradients: r"step\(\) needs gradients",
    rank_one_cannot: "attention_masks = Tensor",
    one_rank_evaluates: r"whether to train \(1\) or evaluate \(0\).*\[0, 1\]",
}


def refused_steps(calls: list[Callable]) -> list[tuple[str, str, int]]:
    """Runs on every rank: (exception type, message, messages sent) of each call, then a correct step."""
    schedule, parts = make_schedule(CASE)
    sent = 0
    isend = Transport._isend

    def counted_isend(self, channel, tensor):
        nonlocal sent
        sent += 1
        return isend(self, channel, tensor)

    Transport._isend = counted_isend
    outcomes = []
    try:
        for call in calls:
            try:
                call(schedule)
                outcomes.append(("nothing", "", sent))
            except Exception as error:
                outcomes.append((type(error).__name__, str(error), sent))
            for part in parts:
                part.zero_grad()
    finally:
        Transport._isend = isend
    batches = [make_batch(CASE, 7)]
    run_step(schedule, CASE, batches[0])
    expected, _ = unsliced(CASE, batches)
    for part in parts:
        for name, parameter in part.named_parameters():
            assert relative_error(parameter.grad, expected[name]) <= TOLERANCE, name
    schedule.close()
    return outcomes


def test_steps_are_refused_on_every_rank(rank_pool) -> None:
    for rank, outcomes in enumerate(rank_pool(2).run(refused_steps, list(STEPS), timeout=120)):
        for (call, pattern), (kind, message, sent) in zip(STEPS.items(), outcomes, strict=True):
            where = f"{call.__name__} on rank {rank}: {kind}: {message}"
            assert kind in ("ValueError", "TypeError") or call is without_gradients, where
            assert matches(pattern, message), where
            assert sent == 0, where


def matches(pattern: str, message: str) -> bool:
    return re.search(pattern, message, re.DOTALL) is not None


# Schedules that differ from rank to rank -----------------------------------------------------------------------------


def ranks_that_differ(field: str) -> str:
    """Runs on every rank, which differ in one number."""
    rank = dist.get_rank()
    case = dataclasses.replace(CASE, **{field: 2 * getattr(CASE, field) if rank else getattr(CASE, field)})
    schedule, _ = make_schedule(case, seq_dim=1)
    try:
        run_step(schedule, case, make_batch(case, 1))
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("n", r"differ in (num_slices|the sequence length)"),
        ("m", "differ in n_microbatches"),
        ("slice_len", r"differ in the sequence length"),
    ],
)
def test_ranks_that_differ(rank_pool, field: str, message: str) -> None:
    for said in rank_pool(2).run(ranks_that_differ, field):
        assert matches(message, said), said


# Modules -------------------------------------------------------------------------------------------------------------


class WithDropout(Decoder):
    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.dropout = nn.Dropout(0.1)


class WithTorchAttention(Decoder):
    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.other = nn.MultiheadAttention(16, 4)


class WithoutPositions(Decoder):
    def forward(self, x, attention_masks=None):
        return super().forward(x, torch.arange(x.shape[1]), attention_masks)


class WithoutMasks(Decoder):
    def forward(self, x, positions):
        return super().forward(x, positions)


MODULES = {
    WithDropout: r"dropout is Dropout\(p=0.1\).*nearest legal value: p=0",
    WithTorchAttention: "other is a torch.nn.MultiheadAttention.*slimpipe.SliceAttention",
    WithoutPositions: "takes no positions",
    WithoutMasks: "takes no attention_masks",
}


def refused_module(kind: type[Decoder], bad_rank: int) -> str:
    """Runs on every rank; only one rank's stage is wrong."""
    rank = dist.get_rank()
    part = (kind if rank == bad_rank else Decoder)(layers=range(rank, rank + 1), is_first=rank == 0, is_last=rank == 1)
    schedule = ScheduleSlimPipe(
        PipelineStage(part, rank, 2, torch.device("cpu")), CASE.m, loss_fn=sum_loss, num_slices=CASE.n
    )
    try:
        run_step(schedule, CASE, make_batch(CASE, 1))
    except ValueError as error:
        assert schedule._executors is None
        return str(error)
    return "nothing"


@pytest.mark.parametrize("kind", MODULES)
def test_modules_are_refused_on_every_rank(rank_pool, kind: type[Decoder]) -> None:
    for bad_rank in (0, 1):
        for said in rank_pool(2).run(refused_module, kind, bad_rank):
            assert matches(MODULES[kind], said), said


def tied_weights() -> str:
    rank = dist.get_rank()
    parts = [Decoder(layers=range(i, i + 1), is_first=i == 0, is_last=i == 3) for i in (rank, rank + 2)]
    if rank == 1:
        parts[1].blocks["3"].wq.weight = parts[0].blocks["1"].wq.weight
    stages = [PipelineStage(part, rank + 2 * j, 4, torch.device("cpu")) for j, part in enumerate(parts)]
    schedule = ScheduleInterleavedSlimPipe(stages, CASE.m, loss_fn=sum_loss, num_slices=CASE.n)
    try:
        run_step(schedule, CASE, make_batch(CASE, 1))
    except ValueError as error:
        return str(error)
    return "nothing"


def test_tied_weights(rank_pool) -> None:
    for said in rank_pool(2).run(tied_weights):
        assert matches("blocks.3.wq.weight of stage 3 is tied to blocks.1.wq.weight of stage 1", said), said


# Constructors --------------------------------------------------------------------------------------------------------


def mock_stage(index: int = 0, num_stages: int = 4, group_size: int = 4):
    from tests.distributed.test_memory import lonely_stage

    stage = lonely_stage(nn.Identity(), index, num_stages)
    stage.group_size, stage.group_rank = group_size, index % group_size
    return stage


def schedule_with(**changes):
    return ScheduleSlimPipe(
        **({"stage": mock_stage(), "n_microbatches": 2, "loss_fn": sum_loss, "num_slices": 4} | changes)
    )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_slices": 3}, ValueError, "num_slices = 3: it must be at least num_ranks = 4; nearest legal value: 4"),
        ({"num_slices": 4.0}, TypeError, "num_slices = 4.0: it must be an int, not float"),
        ({"num_slices": True}, TypeError, "num_slices = True"),
        ({"n_microbatches": 0}, ValueError, "num_microbatches = 0.*nearest legal value: 1"),
        ({"options": {"seq_dim": 1}}, TypeError, "options = .* is a dict; it must be a SlimPipeOptions"),
        ({"loss_fn": F.cross_entropy}, ValueError, "averages over the tokens.*reduction='sum'"),
        ({"loss_fn": nn.CrossEntropyLoss()}, ValueError, "averages over the tokens.*reduction='sum'"),
        ({"scale_grads": True}, ValueError, "scale_grads = True.*nearest legal value: False"),
        ({"stage": mock_stage(num_stages=8)}, ValueError, "1 of 8 stages.*needs 2 stages on every rank"),
    ],
)
def test_constructor_refuses(changes: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        schedule_with(**changes)


@pytest.mark.parametrize(
    ("stages", "changes", "error", "message"),
    [
        ([], {}, TypeError, "must be a list of this rank's stages"),
        (mock_stage(), {}, TypeError, "must be a list of this rank's stages"),
        ([mock_stage(4, 8), mock_stage(0, 8)], {}, ValueError, r"given stages \[4, 0\]; it must hold stages \[0, 4\]"),
        ([mock_stage(0, 8), mock_stage(4, 8)], {"use_full_backward": False}, ValueError, "must be True"),
    ],
)
def test_interleaved_constructor_refuses(stages, changes: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ScheduleInterleavedSlimPipe(stages, 2, loss_fn=sum_loss, num_slices=4, **changes)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("seq_dim", -1, ValueError),
        ("seq_dim", "1", TypeError),
        ("kernel", "flash", ValueError),
        ("measure_memory", 1, TypeError),
    ],
)
def test_options_refuse(field: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=field):
        SlimPipeOptions(**{field: value})
