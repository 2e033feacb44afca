"""A run beside its plan. The runs here are simulated ones with known differences."""

from dataclasses import replace

import pytest

from slimpipe.planner.compare import compare, fit_costs, shape_of
from slimpipe.planner.shown import Setting, timeline_of
from slimpipe.planner.timeline import Span, Timeline
from slimpipe.program import Unit
from tests.unit.planner.settings import setting

SETTINGS = {
    "plain": setting(p=2, n=4, m=2),
    "stages of unequal cost, because of the head": setting(p=2, n=4, v=2, m=2, head=0.3),
    "shared vocabulary": setting(p=3, n=3, m=1, vocab_parallel="output", head=0.3),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_costs_are_found_again(name):
    was = SETTINGS[name]
    schedule = "SlimPipe" if was.num_stages_per_rank is None else "InterleavedSlimPipe"
    run = timeline_of(schedule, was)
    found = fit_costs(run, was.program(schedule))
    comparison = compare(run, timeline_of(schedule, replace(was, costs=found)))
    assert comparison.plan_seconds == pytest.approx(comparison.run_seconds)
    assert all(wait.excess < 1e-9 for wait in comparison.waits)
    for row in comparison.rows:
        assert row.plan_seconds == pytest.approx(row.run_seconds)
    for name in ("attention_forward", "attention_backward"):
        assert getattr(found, name) == pytest.approx(getattr(was.costs_of(schedule), name))


def test_costs_are_found_where_ranks_help():
    """Work that moved is charged to the rank that did it."""
    was = setting(p=2, n=4, m=2, exchange="on")
    found = fit_costs(timeline_of("SlimPipe", was), was.program())
    assert found.attention_forward == pytest.approx(was.costs_of("SlimPipe").attention_forward)
    assert found.linear_backward == pytest.approx(was.costs_of("SlimPipe").linear_backward)


def test_the_longest_waits_beyond_the_plan_are_named():
    plan = timeline_of("SlimPipe", setting(p=2, n=4, m=1))
    held_up = next(span for span in plan.of_rank(1) if span.kind == "B" and span.unit.slice == 2)
    later = [
        replace(
            span, start=span.start + 5.0 * (span.start >= held_up.end), end=span.end + 5.0 * (span.end >= held_up.end)
        )
        for span in plan.spans
    ]
    later[plan.spans.index(held_up)] = replace(held_up, end=held_up.end + 5.0, waited=held_up.waited + 5.0)
    run = replace(plan, spans=tuple(later))
    comparison = compare(run, plan)
    assert comparison.run_seconds == comparison.plan_seconds + 5
    assert (comparison.waits[0].rank, comparison.waits[0].excess) == (1, pytest.approx(5))
    assert comparison.waits[0].name == "B of microbatch 0, stage 1, slice 2"
    text = "\n".join(comparison.lines())
    assert "B of microbatch 0, stage 1, slice 2: waited 5" in text
    figures = comparison.figures()
    assert figures["waits"][0]["excess"] == pytest.approx(5)
    assert {row["kind"] for row in figures["rows"]} == {"F", "B"}


def test_the_settings_of_a_run_are_read_from_it():
    run = timeline_of("InterleavedSlimPipe", setting(p=2, n=4, v=2, m=3, vocab_parallel="both", head=0.2))
    found = shape_of(Timeline.from_json(run.to_json()))
    assert (found.num_ranks, found.num_slices, found.num_stages_per_rank, found.num_microbatches) == (2, 4, 2, 3)
    assert found.vocab_parallel == "both"


def test_another_program_is_refused():
    one, two = (timeline_of("SlimPipe", setting(p=2, n=4, m=m)) for m in (1, 2))
    with pytest.raises(ValueError, match=r"the run has F of microbatch 1.*and the plan has not"):
        compare(two, one)
    with pytest.raises(ValueError, match=r"the plan has F of microbatch 1.*and the run has not"):
        compare(one, two)
    with pytest.raises(ValueError, match="ran another program"):
        fit_costs(two, setting(p=2, n=4, m=1).program())
    with pytest.raises(ValueError, match="record_times"):
        shape_of(Timeline("", 1, 1, 1, ()))


def test_one_point_has_no_slope():
    """A single slice: all of its time counts as linear."""
    one = Setting(num_ranks=1, num_slices=1, num_stages_per_rank=1, num_microbatches=1, slice_len=4)
    unit = Unit(0, 0, 0)
    run = Timeline("", 1, 1, 1, (Span(0, "F", 0.0, 2.0, unit, 0), Span(0, "B", 2.0, 5.0, unit, 0)))
    found = fit_costs(run, one.program())
    assert (found.linear_forward, found.linear_backward) == ((2.0,), (3.0,))
