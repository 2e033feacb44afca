"""A rank that raises, dies or hangs: the others end in time and say where; an interrupted step leaves nothing."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from slimpipe import ScheduleInterleavedSlimPipe, ScheduleSlimPipe
from slimpipe.runtime import PipelineError
from tests.distributed.test_memory import STATE
from tests.distributed.test_parity import TOLERANCE, Case, make_batch, run_step, unsliced
from tests.harness import run_ranks_outcomes
from tests.model import Decoder, relative_error, stage_layers, sum_loss

TIMEOUT = 5
CASE = Case(p=3, n=6, m=2)
MIDDLE = 1


class Trap(torch.autograd.Function):
    """Identity that calls back in backward."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        ctx.call()
        return dy, None


def build(case: Case):
    """The schedule on a group with a short timeout, with the weights of `unsliced`."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    rank, num_stages = dist.get_rank(), case.num_stages
    torch.manual_seed(0)
    whole = Decoder(layers=range(num_stages)).state_dict()
    parts = [
        Decoder(layers=stage_layers(num_stages, num_stages)[i], is_first=i == 0, is_last=i == num_stages - 1)
        for i in range(rank, num_stages, case.p)
    ]
    for part in parts:
        part.load_state_dict({name: whole[name] for name in part.state_dict()})
    stages = [
        PipelineStage(part, rank + j * case.p, num_stages, torch.device("cpu"), group=group)
        for j, part in enumerate(parts)
    ]
    settings = {"loss_fn": sum_loss, "num_slices": case.n}
    if case.v == 1:
        return ScheduleSlimPipe(stages[0], case.m, **settings), parts
    return ScheduleInterleavedSlimPipe(stages, case.m, **settings), parts


def spring(part: Decoder, phase: str, call_number: int, act) -> None:
    """Make ``act`` happen in a stage's forward or backward of the unit of this number."""
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls == call_number:
            act()

    if phase == "forward":
        part.register_forward_pre_hook(lambda *_: count())
    else:
        part.register_forward_hook(lambda _module, _args, output: Trap.apply(output, count))


def raise_error() -> None:
    raise ArithmeticError("as the test wants it")


ACTS = {
    "raises": raise_error,
    "exits": lambda: os._exit(3),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": lambda: time.sleep(1000),
}


def one_fails(how: str, phase: str, v: int) -> dict:
    """Runs on every rank: what it ended with, and after how long."""
    case = Case(p=3, n=6, v=v, m=2)
    schedule, parts = build(case)
    batch = make_batch(case, 1)
    run_step(schedule, case, batch)  # channels exist, shapes are known
    if dist.get_rank() == MIDDLE:
        spring(parts[-1], phase, 4, ACTS[how])
    start = time.monotonic()
    try:
        run_step(schedule, case, batch)
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", []))
        kind = type(error).__name__
        return {"kind": kind, "text": str(error), "notes": notes, "seconds": time.monotonic() - start}
    return {"kind": "nothing", "text": "", "notes": "", "seconds": time.monotonic() - start}


@pytest.mark.parametrize(
    ("how", "phase", "v"),
    [
        ("raises", "forward", 1),
        ("raises", "backward", 1),
        ("raises", "backward", 2),
        ("exits", "forward", 1),
        ("is killed", "backward", 1),
        ("hangs", "backward", 2),
    ],
)
def test_the_others_end_in_time_and_say_where(how: str, phase: str, v: int) -> None:
    outcomes = run_ranks_outcomes(one_fails, 3, how, phase, v, timeout=30 if how == "hangs" else 60)
    failed = outcomes[MIDDLE]
    if how == "raises":
        assert failed.value["kind"] == "ArithmeticError"
        stage = MIDDLE if v == 1 else MIDDLE + 3
        assert re.search(
            rf"pipeline rank {MIDDLE} was at: {phase} \(microbatch 0, stage {stage}, slice \d", failed.value["notes"]
        ), failed
    else:
        assert not failed.ok
    for outcome in outcomes[:MIDDLE] + outcomes[MIDDLE + 1 :]:
        assert outcome.ok, outcome
        said = outcome.value
        assert said["kind"] == PipelineError.__name__, said
        assert re.match(
            rf"pipeline rank {outcome.rank} lost rank \d at \w+( with rank \d)? \(microbatch \d, stage \d, slice \d; "
            r"tick \d+\): rank \d failed, died or is stuck \(",
            said["text"],
        ), said
        # The neighbours wait for the failed rank; one further away may wait for them to time out first.
        assert said["seconds"] < 2 * TIMEOUT + 3, said


def interrupted(p: int) -> None:
    """Runs on every rank: Ctrl-C reaches rank 0 in the middle of a step."""
    case = Case(p=p, n=4, m=2)
    schedule, parts = build(case)
    batch = make_batch(case, 1)

    def interrupt() -> None:
        raise KeyboardInterrupt

    if dist.get_rank() == 0:
        spring(parts[0], "forward", 4, interrupt)
    try:
        run_step(schedule, case, batch)
    except KeyboardInterrupt as error:
        assert dist.get_rank() == 0
        assert "was at: forward" in error.__notes__[0]
    except PipelineError:
        assert dist.get_rank() == 1  # it waited for rank 0
    dist.barrier()
    gc.collect()
    found = [type(o).__name__ for o in gc.get_objects() if isinstance(o, STATE)]
    assert not found, found
    # Nothing of the interrupted step gets into the next one, neither gradients nor messages.
    for part in parts:
        part.zero_grad()
    run_step(schedule, case, batch)
    expected, _ = unsliced(case, [batch])
    for part in parts:
        for name, parameter in part.named_parameters():
            assert relative_error(parameter.grad, expected[name]) <= TOLERANCE, name
    schedule.close()


@pytest.mark.parametrize("p", [1, 2])
def test_an_interrupted_step_leaves_nothing(rank_pool, p: int) -> None:
    assert rank_pool(p).run(interrupted, p) == [None] * p  # ranks assert
