"""A rank that raises, dies or hangs: the others end in time and say where; an interrupted step leaves nothing."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from slimpipe.runtime import PipelineError
from tests.distributed.failures import ACTS, TIMEOUT, Runs, build, ended, run_together, spring
from tests.distributed.parity import TOLERANCE, Case, make_batch, run_step, unsliced
from tests.distributed.test_memory import STATE
from tests.model import relative_error

MIDDLE = 1


def one_fails(how: str, phase: str, v: int) -> dict:
    """Runs on every rank: what it ended with, and after how long."""
    case = Case(p=3, n=6, v=v, m=2)
    schedule, parts = build(case)
    batch = make_batch(case, 1)
    run_step(schedule, case, batch)  # channels exist, shapes are known
    if dist.get_rank() == MIDDLE:
        spring(parts[-1], phase, 4, ACTS[how])
    return ended(lambda: run_step(schedule, case, batch))


CASES = [
    ("hangs", "backward", 2),
    ("raises", "forward", 1),
    ("raises", "backward", 1),
    ("raises", "backward", 2),
    ("exits", "forward", 1),
    ("is killed", "backward", 1),
]


@pytest.mark.parametrize(("how", "phase", "v"), CASES)
def test_the_others_end_in_time_and_say_where(runs: Runs, how: str, phase: str, v: int) -> None:
    outcomes = runs[one_fails, 3, how, phase, v].result()
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
def test_an_interrupted_step_leaves_nothing(runs: Runs, p: int) -> None:
    # Ranks of their own: a message that nobody receives any more keeps a thread of gloo busy for ever.
    for outcome in runs[interrupted, p, p].result():
        assert outcome.ok, outcome


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    yield from run_together([(one_fails, 3, *case) for case in CASES] + [(interrupted, p, p) for p in (1, 2)])
