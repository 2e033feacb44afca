"""A rank that dies or hangs in the middle of shared work: all others end in time and say what they lost."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from slimpipe.runtime import PipelineError
from slimpipe.torch_private import set_group_timeout
from tests.distributed.failures import ACTS, TIMEOUT, Runs, ended, raise_error, run_together, spring
from tests.distributed.parity import FULL, Case, make_batch, make_schedule, run_step

CASE = Case(p=4, n=4, m=2, vocab=9, vocab_parallel="both")


def stop() -> None:
    """Stop without a word to anybody, as on a machine that hangs; much later, die."""
    subprocess.Popen(["sh", "-c", f"sleep {2 * TIMEOUT + 1}; kill -KILL {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


WAYS = {"exits": ACTS["exits"], "is killed": ACTS["is killed"], "stops": stop}
PLACES = {
    "embed": ("embedding", "forward"),
    "vocabulary": ("head", "forward"),
    "vocabulary, gradients": ("head", "backward"),
    "embed_backward": ("embedding", "backward"),
}
"""Which module, its forward or its backward."""


def build(case: Case):
    """A schedule that has run a step, and waits `TIMEOUT` seconds for a message from then on; its model parts."""
    group = dist.new_group(timeout=timedelta(seconds=60))  # a busy machine takes its time to connect
    schedule, parts = make_schedule(case, group=group)
    run_step(schedule, case, make_batch(case, 1))
    set_group_timeout(group, timedelta(seconds=TIMEOUT))
    return schedule, parts


def one_fails(how: str, where: str, victim: int) -> dict:
    """Runs on every rank: what it ended with, and after how long."""
    schedule, parts = build(CASE)
    if dist.get_rank() == victim:
        spring(getattr(parts[-1], PLACES[where][0]), PLACES[where][1], 3, WAYS[how])
    return ended(lambda: run_step(schedule, CASE, make_batch(CASE, 1)))


COMBINATIONS = [
    (how, where, victim) for (how, where), victim in zip(itertools.product(WAYS, PLACES), itertools.cycle(range(4)))
]
SOME = [("stops", "embed_backward", 3), ("exits", "embed", 0), ("is killed", "vocabulary", 1)]
CASES = COMBINATIONS if FULL else SOME


@pytest.mark.parametrize(("how", "where", "victim"), CASES)
def test_the_others_end_in_time_and_say_what_they_lost(runs: Runs, how: str, where: str, victim: int) -> None:
    outcomes = runs[one_fails, CASE.p, how, where, victim].result()
    assert not outcomes[victim].ok
    for outcome in outcomes[:victim] + outcomes[victim + 1 :]:
        assert outcome.ok, outcome
        said = outcome.value
        assert said["kind"] == PipelineError.__name__, said
        assert re.match(
            rf"(pipeline rank {outcome.rank} lost rank \d at |"
            rf"rank {outcome.rank} of the 4 that share the vocabulary lost another: it failed, died or is stuck)",
            said["text"],
        ), said
        assert f"pipeline rank {outcome.rank} was at: " in said["notes"], said
        assert said["seconds"] < 3 * TIMEOUT, said


VICTIM = 0


def raises_and_goes_on(victim: int) -> list[dict]:
    """Runs on every rank: one raises; how that step ended, and the next one."""
    case = replace(CASE, p=2)
    schedule, parts = build(case)
    if dist.get_rank() == victim:
        spring(parts[-1].head, "forward", 3, raise_error)
    said = [ended(lambda: run_step(schedule, case, make_batch(case, 1)))]
    dist.barrier()
    return said + [ended(lambda: run_step(schedule, case, make_batch(case, 1)))]


def test_a_rank_raises_where_others_wait_in_the_head_s_group(runs: Runs) -> None:
    """The group is the user's, and gloo closes one for good when it times out: the next step says so at once."""
    for outcome in runs[raises_and_goes_on, 2, VICTIM].result():
        assert outcome.ok, outcome
        failed, following = outcome.value
        assert failed["kind"] == ("ArithmeticError" if outcome.rank == VICTIM else PipelineError.__name__), failed
        assert f"pipeline rank {outcome.rank} was at: vocabulary" in failed["notes"], failed
        assert failed["seconds"] < 3 * TIMEOUT, failed
        assert following["kind"] == PipelineError.__name__, following
        assert "waited at the start of a step: another rank failed" in following["text"], following
        assert following["seconds"] < TIMEOUT, following


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    yield from run_together([(one_fails, CASE.p, *case) for case in CASES] + [(raises_and_goes_on, 2, VICTIM)])
