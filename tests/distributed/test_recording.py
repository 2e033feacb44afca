"""A recorded step: what all ranks did, whole, in order and in one time, ready to be laid beside its plan."""

from __future__ import annotations

from collections import Counter

import pytest
import torch.distributed as dist

from slimpipe.planner.compare import compare, fit_costs, shape_of
from slimpipe.planner.shown import timeline_of
from slimpipe.planner.simulate import simulate
from slimpipe.planner.timeline import Timeline
from slimpipe.program import Op, Program
from tests.distributed.parity import Case, make_batch, make_schedule, run_step

CASES = {
    "plain": Case(p=2, n=4, m=2, options={"context_exchange": "off"}),
    "interleaved, with exchange": Case(p=2, n=4, v=2, options={"context_exchange": "on", "exchange_granularity": 1}),
    "shared vocabulary": Case(p=2, n=2, m=1, vocab_parallel="both"),
}


def recorded(case: Case) -> tuple[Timeline, Program]:
    """Runs on every rank: two steps, the second of which may have exchange."""
    schedule, _ = make_schedule(case, record_times=True)
    for seed in range(2):
        run_step(schedule, case, make_batch(case, seed))
    timeline, program = schedule.timeline(), schedule.program
    schedule.close()
    return timeline, program


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_know_what_all_did(rank_pool, name: str) -> None:
    case = CASES[name]
    (run, program), (other, _) = rank_pool(2).run(recorded, case, timeout=60)
    assert run == other == Timeline.from_json(run.to_json())
    assert (run.num_ranks, run.num_slices, run.num_stages_per_rank) == (case.p, case.n, case.v)
    assert min(span.start for span in run.spans) == 0
    for rank, instructions in enumerate(program.instructions):
        spans = run.of_rank(rank)
        assert len(spans) == len(instructions)
        assert Counter(span.unit for span in spans if span.kind == "B") == Counter(
            instruction.unit for instruction in instructions if instruction.op is Op.BACKWARD
        )
        computes = [span for span in spans if not span.is_message]
        assert all(a.end <= b.start for a, b in zip(computes, computes[1:]))
        assert all(0 <= span.waited <= span.end - span.start for span in computes)
    messages = [span for span in run.spans if span.is_message]
    assert {span.num_bytes for span in messages} == {case.batch * case.slice_len * 16 * 8}  # float64, Decoder's width

    plan = simulate(program, fit_costs(run, program))
    comparison = compare(run, plan)
    assert {row.kind for row in comparison.rows} == {span.kind for span in run.spans if not span.is_message}
    forward, backward = (row for row in comparison.rows if row.kind in ("F", "B"))
    for row in (forward, backward):
        assert row.num == case.p * case.v * case.n * case.m
    if case.options["context_exchange"] == "off":  # the fit has one mean per stage, so that sums agree
        assert forward.plan_seconds == pytest.approx(forward.run_seconds)
        setting = shape_of(run)
        assert setting.num_microbatches == case.m and setting.vocab_parallel == case.vocab_parallel
        name = "SlimPipe" if case.v == 1 else "InterleavedSlimPipe"
        assert compare(run, timeline_of(name, setting)).rows[0].num == forward.num


def not_recorded() -> str:
    schedule, _ = make_schedule(Case(p=2, n=2, m=1))
    with pytest.raises(ValueError) as error:
        schedule.timeline()
    schedule.close()
    return str(error.value)


def test_without_a_record_the_option_is_named(rank_pool) -> None:
    for said in rank_pool(2).run(not_recorded, timeout=30):
        assert said.startswith("SlimPipeOptions.record_times = False")


def recorded_by_one() -> list[str]:
    said = []
    schedule, _ = make_schedule(Case(p=2, n=2, m=1), record_times=True)
    with pytest.raises(ValueError) as error:
        schedule.timeline()
    said.append(str(error.value))
    schedule.close()
    case = Case(p=2, n=2, m=1)
    schedule, _ = make_schedule(case, record_times=dist.get_rank() == 0)
    with pytest.raises(ValueError) as error:
        run_step(schedule, case, make_batch(case, 0))
    schedule.close()
    return [*said, str(error.value)]


def test_nothing_recorded_yet_and_ranks_that_differ(rank_pool) -> None:
    for nothing, differ in rank_pool(2).run(recorded_by_one, timeout=30):
        assert nothing.startswith("no training step was recorded yet")
        assert "the pipeline's ranks differ in SlimPipeOptions.record_times: rank by rank [1, 0]" in differ
