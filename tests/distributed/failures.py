"""Ranks that fail on purpose, and what became of the others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.distributed.parity import Case, make_schedule
from tests.harness import RankResult, run_ranks_outcomes
from tests.model import Decoder

TIMEOUT = 5
"""Seconds that a rank waits for a message."""


Runs = dict[tuple, Future[list[RankResult]]]
"""What became of the ranks of each call: `runs[fn, num_ranks, *args].result()`."""


def run_together(calls: Sequence[tuple]) -> Iterator[Runs]:
    """Body of a fixture: `run_ranks_outcomes(*call)` of every call, four at a time, as they mostly wait."""
    with ThreadPoolExecutor(4) as pool:
        yield {call: pool.submit(run_ranks_outcomes, *call) for call in calls}


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
    """`make_schedule` on a group with a short timeout."""
    return make_schedule(case, group=dist.new_group(timeout=timedelta(seconds=TIMEOUT)))


def spring(part: Decoder, phase: str, call_number: int, act: Callable[[], object]) -> None:
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


def exit_at_once() -> None:
    os._exit(3)


def hang() -> None:
    """For so long that nobody may still be waiting; then end, so that the test need not wait any longer, either."""
    time.sleep(3 * TIMEOUT + 1)
    exit_at_once()


ACTS = {
    "raises": raise_error,
    "exits": exit_at_once,
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": hang,
}


def ended(run: Callable[[], object]) -> dict:
    """Runs on every rank: how the call ended, and after how long."""
    start, kind, text, notes = time.monotonic(), "nothing", "", ""
    try:
        run()
    except Exception as error:
        kind, text, notes = type(error).__name__, str(error), "\n".join(getattr(error, "__notes__", []))
    return {"kind": kind, "text": text, "notes": notes, "seconds": time.monotonic() - start}
