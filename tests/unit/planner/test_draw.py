"""What there is to draw: bars without waits, names, and the activations that live."""

import pytest

from slimpipe.planner.costs import OpCosts
from slimpipe.planner.draw import Live, bars, live_units, microbatches, names, peak_units
from slimpipe.planner.shown import Setting, timeline_of
from slimpipe.planner.simulate import simulate
from slimpipe.planner.timeline import Span, Timeline
from slimpipe.program import Unit, build_program
from tests.unit.planner.settings import setting


def test_bars_leave_waits_and_messages_out():
    unit = Unit(0, 0, 1)
    spans = (
        Span(0, "F", 1.0, 4.0, unit, waited=0.5),
        Span(0, "help B", 4.0, 5.0, unit, waited=1.0),
        Span(0, "send", 4.0, 9.0, unit),
    )
    (bar,) = bars(Timeline("", 1, 4, 1, spans))
    assert (bar.role, bar.start, bar.end, bar.context) == ("forward", 1.5, 4.0, 0.5)


@pytest.mark.parametrize(
    ("kind", "unit", "num_slices", "num_stages_per_rank", "expected"),
    [
        ("F", Unit(0, 1, 3), 4, 1, ["a3", "3", "3"]),
        ("B", Unit(27, 5, 12), 16, 3, ["ab12.2'", "ab12'", "12'", "12"]),
        ("F", Unit(2, 1, 0), 1, 1, ["c", "c", "c"]),
        ("W", Unit(1, 3, 0), 1, 2, ['b.1"', 'b"', 'b"', "b"]),
        ("help F", Unit(0, 1, 3), 4, 1, ["+"]),
        ("V", Unit(0, 1, 3), 4, 1, ["V3", "V", "$"]),
    ],
)
def test_names_become_shorter(kind, unit, num_slices, num_stages_per_rank, expected):
    (bar,) = bars(timeline := Timeline("", 2, num_slices, num_stages_per_rank, (Span(1, kind, 0.0, 1.0, unit),)))
    assert list(names(bar, timeline)) == expected


@pytest.mark.parametrize(("p", "n", "v", "m"), [(1, 1, 1, 1), (2, 4, 1, 3), (4, 8, 2, 1), (3, 6, 3, 2)])
def test_as_many_units_live_as_in_the_program(p, n, v, m):
    program = build_program(p, n, v, m)
    timeline = simulate(program, OpCosts.units(p * v, num_slices=n))
    for rank in range(p):
        curve = live_units(timeline, rank)
        assert peak_units(timeline, rank) == program.peak_live_units(rank)
        assert curve[-1].num_units == 0
        assert [step.time for step in curve] == sorted({step.time for step in curve})
    assert microbatches(n * v * p, timeline) == 1


def test_a_unit_lives_until_its_weight_gradients_are_done():
    unit = Unit(0, 0, 0)
    spans = (Span(0, "F", 0.0, 1.0, unit), Span(0, "I", 1.0, 2.0, unit), Span(0, "W", 5.0, 6.0, unit))
    assert live_units(Timeline("", 1, 1, 1, spans), 0) == [Live(0.0, 1), Live(6.0, 0)]


def test_schedules_of_torch_hold_whole_microbatches():
    one_f_one_b = timeline_of("1F1B", setting(p=4, n=8, m=4))
    assert [microbatches(peak_units(one_f_one_b, rank), one_f_one_b) for rank in range(4)] == [1, 0.75, 0.5, 0.25]


@pytest.mark.parametrize(
    "schedule", ["GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"]
)
def test_every_schedule_does_the_same_work(schedule):
    """Also with several stages, a head, and attention."""
    common = setting(p=2, n=4, m=4, head=0.25)
    ours, theirs = timeline_of("SlimPipe", common), timeline_of(schedule, common)
    work = [sum(timeline.compute_seconds(rank) for rank in range(2)) for timeline in (ours, theirs)]
    assert work[0] == pytest.approx(work[1]) == pytest.approx(3 * 4 * 4 * 1.25)


@pytest.mark.parametrize(
    ("schedule", "asked", "given"),
    [
        *[("SlimPipe", None, 1), ("SlimPipe", 5, 5), ("InterleavedSlimPipe", None, 2), ("1F1B", 5, 1)],
        *[("Interleaved1F1B", 1, 2), ("Interleaved1F1B", 3, 3), ("ZBVZeroBubble", 5, 2)],
    ],
)
def test_stages_per_rank_are_what_the_schedule_can_have(schedule, asked, given):
    asked_for = Setting(num_ranks=2, num_slices=4, num_stages_per_rank=asked, num_microbatches=2, slice_len=8)
    assert asked_for.stages_per_rank(schedule) == given
