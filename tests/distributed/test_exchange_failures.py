"""Context exchange where something goes wrong: every rank ends and says where, and nothing wrong is learned from."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from slimpipe.attention.helper import SharedPhase
from slimpipe.program import Op, Transfer
from slimpipe.runtime import PipelineError
from tests.distributed.failures import ACTS, TIMEOUT, Runs, build, ended, raise_error, run_together, spring
from tests.distributed.parity import TOLERANCE, Case, errors_of, make_batch, make_schedule, run_step
from tests.distributed.test_exchange_parity import exchange

CASE = Case(p=4, n=4, m=1, options=exchange(1))


def at_transfer(transfer: Transfer, act) -> None:
    """Make ``act`` happen in this process when it has got the request of a transfer."""
    compute = SharedPhase._compute

    def trapped(self, taken, number, request):
        if taken == transfer:
            act()
        return compute(self, taken, number, request)

    SharedPhase._compute = trapped


def helper_fails(how: str, phase: str) -> dict:
    """Runs on every rank: what it ended with, who failed, whose work that rank had, and with whom it was paired."""
    schedule, _ = build(CASE)
    batch = make_batch(CASE, 1)
    for _ in range(2):
        run_step(schedule, CASE, batch)
    program = schedule.program
    transfers = [transfer for transfer in program.transfers if transfer.phase is Op[phase]]
    transfer = transfers[len(transfers) // 2]
    helper, owner = transfer.helper, program.rank_of(transfer.unit.stage)
    pairs = {
        frozenset((program.rank_of(other.unit.stage), other.helper))
        for other in transfers
        if other.tick == transfer.tick
    }
    if dist.get_rank() == helper:
        at_transfer(transfer, ACTS[how])
    said = ended(lambda: run_step(schedule, CASE, batch))
    return said | {"helper": helper, "owner": owner, "transfer": str(transfer), "pairs": pairs}


CASES = [("hangs", "BACKWARD"), ("exits", "FORWARD"), ("is killed", "BACKWARD")]


@pytest.mark.parametrize(("how", "phase"), CASES)
def test_a_helper_fails_and_the_others_say_so(runs: Runs, how: str, phase: str) -> None:
    outcomes = runs[helper_fails, CASE.p, how, phase].result()
    others = [outcome for outcome in outcomes if outcome.ok]
    assert len(others) == CASE.p - 1, outcomes
    said = {outcome.rank: outcome.value for outcome in others}
    some = others[0].value
    assert not outcomes[some["helper"]].ok
    assert any(frozenset((rank, some["helper"])) not in some["pairs"] for rank in said), "all ranks are paired with it"
    for rank, what in said.items():
        assert what["kind"] == PipelineError.__name__, what
        assert re.match(
            rf"pipeline rank {rank} lost rank \d( at (forward|backward|help|receive|send)|, to which)", what["text"]
        ), what
        assert f"pipeline rank {rank} was at: " in what["notes"], what
        assert what["seconds"] < 3 * TIMEOUT, what
    owner = said[some["owner"]]["text"]
    assert f"lost rank {some['helper']} at {phase.lower()}" in owner, owner
    assert f"in the {some['transfer']}" in owner, owner


def fails_and_goes_on() -> dict[str, float]:
    """Runs on every rank: one raises in a step with exchange; errors of the steps after that."""
    case = Case(p=3, n=6, m=2, runs="TTE", options=exchange(1))
    schedule, parts = build(case)
    for seed in (5, 6):
        run_step(schedule, case, make_batch(case, seed))
    assert schedule.record.exchange_bytes
    if dist.get_rank() == 1:
        spring(parts[-1], "backward", 4, raise_error)
    said = ended(lambda: run_step(schedule, case, make_batch(case, 7)))
    assert said["kind"] == ("ArithmeticError" if dist.get_rank() == 1 else PipelineError.__name__), said
    assert f"pipeline rank {dist.get_rank()} was at: " in said["notes"], said
    dist.barrier()
    for part in parts:
        part.zero_grad()
    errors = errors_of(schedule, parts, case)
    assert schedule.program.transfers and schedule.record.exchange_bytes
    schedule.close()
    return errors


def test_a_rank_raises_and_the_next_steps_are_exact(runs: Runs) -> None:
    # Ranks of their own: a message that nobody receives any more keeps a thread of gloo busy for ever.
    for outcome in runs[fails_and_goes_on, 3].result():
        assert outcome.ok, outcome
        assert max(outcome.value.values()) <= TOLERANCE, outcome


def differing_options(options_by_rank: list[dict]) -> dict:
    schedule, _ = make_schedule(Case(p=2, n=2, options=options_by_rank[dist.get_rank()]))
    return ended(lambda: run_step(schedule, Case(p=2, n=2), make_batch(Case(p=2, n=2), 1)))


@pytest.mark.parametrize("other", [exchange(2), exchange(1, max_slices=3), {"context_exchange": "off"}])
def test_ranks_that_mean_another_exchange(rank_pool, other: dict) -> None:
    for said in rank_pool(2).run(differing_options, [exchange(1), other]):
        assert said["kind"] == "ValueError", said
        assert re.search("ranks differ in .*context_exchange, exchange_granularity", said["text"]), said


def recompute_changes(before: bool) -> dict:
    """Runs on every rank: layers are checkpointed from, or until, the second step."""
    case = Case(p=3, n=6, m=1, recompute=before, keep_output=False, options=exchange(1))
    schedule, parts = build(case)
    run_step(schedule, case, make_batch(case, 1))
    for part in parts:
        part.recompute = not before
    return ended(lambda: run_step(schedule, case, make_batch(case, 1)))


@pytest.mark.parametrize("before", [False, True])
def test_recompute_must_not_change(runs: Runs, before: bool) -> None:
    said = [outcome.value for outcome in runs[recompute_changes, 3, before].result()]
    refusals = [what["text"] for what in said if what["kind"] == "RuntimeError"]
    assert refusals
    for text in refusals:
        learned = "forward 0, backward 0" if before else "backward 0"
        assert re.match(r"backward \(microbatch 0, stage \d, slice \d; tick \d+\): ", text), text
        assert f"unlike in the step that the exchange learned from ({learned})" in text, text
        assert "context_exchange = 'off'" in text
    assert all(what["kind"] in ("RuntimeError", PipelineError.__name__) for what in said), said


def scale_changes() -> dict:
    case = Case(p=2, n=4, m=1, options=exchange(1))
    schedule, parts = build(case)
    for scale in (0.5, 0.25):
        for part in parts:
            for block in part.blocks.values():
                block.inner.register_forward_pre_hook(
                    lambda _module, args, kwargs, scale=scale: (args, kwargs | {"scale": scale}), with_kwargs=True
                )
        said = ended(lambda: run_step(schedule, case, make_batch(case, 1)))
    return said


def test_a_layer_must_not_change(runs: Runs) -> None:
    said = [outcome.value for outcome in runs[scale_changes, 2].result()]
    refusals = [what["text"] for what in said if what["kind"] == "RuntimeError"]
    assert refusals
    assert all(re.search(r"attention layer 0 is .*scale=0.25,.*, and was .*scale=0.5,", text) for text in refusals)
    assert all(what["kind"] in ("RuntimeError", PipelineError.__name__) for what in said), said


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    calls = [(helper_fails, CASE.p, *case) for case in CASES]
    calls += [(fails_and_goes_on, 3), (scale_changes, 2), *((recompute_changes, 3, before) for before in (False, True))]
    yield from run_together(calls)


def kernels_alternate(context_exchange: str) -> tuple[list[dict], dict[str, float], list[str]]:
    """Runs on every rank: one stage takes another kernel from slice to slice."""
    case = Case(p=2, n=4, m=1, runs="TT", options={"context_exchange": context_exchange})
    schedule, parts = make_schedule(case)
    calls = 0

    def alternate(*_):
        nonlocal calls
        for block in parts[0].blocks.values():
            block.inner.kernel = ("reference", "torch_cpu_flash")[calls % 2]
        calls += 1

    if dist.get_rank() == 1:
        parts[0].register_forward_pre_hook(alternate)
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logger = logging.getLogger("slimpipe")
    logger.addHandler(handler)
    said, errors = [], {}
    if context_exchange == "auto":
        errors = errors_of(schedule, parts, case)
        assert not schedule.record.exchange_bytes
    else:
        said = [ended(lambda: run_step(schedule, case, make_batch(case, 1))) for _ in range(3)]
    logger.removeHandler(handler)
    schedule.close()
    return said, errors, warnings


def test_on_where_a_stage_cannot_be_helped(rank_pool) -> None:
    for (first, *later), _, _ in rank_pool(2).run(kernels_alternate, "on"):
        assert first["kind"] == "nothing", first
        for said in later:
            assert said["kind"] == "ExchangeRefusedError", said
            assert (
                "context_exchange = 'on': ranks cannot help one another: stage 1: its attention layers differ in "
                "shape or kernel from slice to slice" in said["text"]
            )


def test_auto_where_a_stage_cannot_be_helped(rank_pool) -> None:
    for _, errors, warnings in rank_pool(2).run(kernels_alternate, "auto"):
        assert max(errors.values()) <= TOLERANCE
        assert warnings == [
            "no context exchange: stage 1: its attention layers differ in shape or kernel from slice to slice"
        ]
