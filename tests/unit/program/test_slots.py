"""Slot plans: no collision, contiguous ranges, as few slots as can be."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimpipe.program import Instruction, Op, Program, SlotPlan, Unit, build_program, plan_slots
from tests.unit.program.shapes import programs, small_shapes


def replay(program: Program, stages: Sequence[int], plan: SlotPlan) -> int:
    """Run the instructions of these stages on the slots of a plan; returns the peak of live slices."""
    holder: dict[int, Unit] = {}
    peak = 0
    for instruction in compute_instructions(program, stages):
        unit = instruction.unit
        slot = plan.slot(unit)
        if instruction.op is Op.FORWARD:
            assert 0 <= slot < plan.num_slots
            assert slot not in holder, f"{instruction}: slot {slot} is taken by {holder[slot]}"
            holder[slot] = unit
            peak = max(peak, len(holder))
        low, high = plan.past(unit)
        slices = plan.slices_in(unit, low, high)
        assert sorted(slices) == list(range(unit.slice))
        assert [holder[at] for at in range(low, high)] == [unit._replace(slice=past) for past in slices]
        assert holder[slot] == unit
        if instruction.op is Op.BACKWARD:
            del holder[slot]
        elif program.forward_only and unit.slice == program.num_slices - 1:
            holder = {at: held for at, held in holder.items() if held[:2] != unit[:2]}
    assert not holder
    return peak


def compute_instructions(program: Program, stages: Sequence[int]) -> list[Instruction]:
    row = program.instructions[program.rank_of(stages[0])]
    return [i for i in row if i.unit.stage in stages and i.op in (Op.FORWARD, Op.BACKWARD)]


def stages_of(program: Program, rank: int) -> range:
    return range(rank, program.num_stages, program.num_ranks)


def fewest_slots(peak: int, num_slices: int, num_microbatches: int) -> int:
    """The figure that the module explains."""
    num_full, num_more = divmod(peak, num_slices)
    if num_full >= 2 and num_microbatches > 2 * num_full:
        return peak + min(num_more, num_slices - num_more)
    return peak


@pytest.mark.parametrize("forward_only", [False, True])
def test_every_stage_of_small_programs(forward_only: bool) -> None:
    for shape in small_shapes():
        program = build_program(*shape, forward_only=forward_only)
        for stage in range(program.num_stages):
            plan = plan_slots(program, [stage])
            peak = replay(program, [stage], plan)
            assert plan.num_slots == fewest_slots(peak, program.num_slices, program.num_microbatches)


@pytest.mark.parametrize("forward_only", [False, True])
def test_every_rank_of_small_programs(forward_only: bool) -> None:
    for shape in small_shapes():
        program = build_program(*shape, forward_only=forward_only)
        for rank in range(program.num_ranks):
            stages = stages_of(program, rank)
            plan = plan_slots(program, stages)
            assert replay(program, stages, plan) <= plan.num_slots
            assert plan.num_slots <= sum(plan_slots(program, [stage]).num_slots for stage in stages)


@given(programs(max_ranks=16, max_slices=40, max_stages=3, max_microbatches=9), st.data())
@settings(max_examples=60, deadline=None)
def test_a_rank_and_a_stage_of_a_larger_program(program: Program, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, program.num_ranks - 1))
    stages = stages_of(program, rank)
    plan = plan_slots(program, stages)
    assert replay(program, stages, plan) <= plan.num_slots
    plan = plan_slots(program, stages[-1:])
    peak = replay(program, stages[-1:], plan)
    fewest, found_always = (fewest_slots(peak, program.num_slices, program.num_microbatches + i) for i in (0, 1))
    assert fewest <= plan.num_slots <= found_always


@pytest.mark.parametrize(
    ("shape", "stages", "num_slots"),
    [
        ((2, 4, 1, 4), [0], 6),  # T = 6
        ((8, 32, 1, 4), [0], 46),
        ((4, 4, 1, 4), [0], 10),  # T = 10 = 2 n + 2: enough for 4 microbatches, not for 5
        ((4, 4, 1, 5), [0], 12),
        ((16, 16, 1, 5), [0], 48),  # T = 46
        ((8, 16, 5, 4), [0], 30),
        ((8, 16, 5, 4), [8], 24),
        ((8, 16, 5, 4), [32], 16),
        # Together: T = 4, 14, 20 and 14, where the stages by themselves need 6, 21, 21 and 18.
        ((2, 2, 2, 8), [1, 3], 4),
        ((2, 7, 2, 8), [1, 3], 14),
        ((4, 7, 2, 8), [0, 4], 20),
        ((4, 4, 2, 8), [0, 4], 16),
    ],
)
def test_known_figures(shape: tuple[int, int, int, int], stages: list[int], num_slots: int) -> None:
    assert plan_slots(build_program(*shape), stages).num_slots == num_slots


def test_two_stages_need_a_quarter_more_than_their_peak_at_most() -> None:
    for p, n in itertools.product((2, 3, 4), range(4, 9)):
        program = build_program(p, n, 2, 8)
        for rank in range(p):
            assert plan_slots(program, stages_of(program, rank)).num_slots <= 1.25 * program.peak_live_units(rank)


def test_forward_only_needs_one_microbatch() -> None:
    program = build_program(3, 6, 2, 4, forward_only=True)
    assert [plan_slots(program, [stage]).num_slots for stage in range(6)] == [6] * 6


def test_plans_do_not_change() -> None:
    program = build_program(4, 4, 2, 7)
    assert plan_slots(program, [0, 4]) == plan_slots(build_program(4, 4, 2, 7), [0, 4])


@pytest.mark.parametrize("shape", [(3, 3, 1, 5), (4, 4, 1, 5), (4, 4, 1, 8), (4, 4, 2, 5), (4, 5, 1, 5), (4, 5, 2, 5)])
def test_fewer_slots_are_impossible(shape: tuple[int, int, int, int]) -> None:
    """Where a plan has more slots than the peak: no placement whatsoever, slice by slice, gets by with one less."""
    program = build_program(*shape)
    plan = plan_slots(program, [0])
    assert plan.num_slots > replay(program, [0], plan)
    assert exists_placement(program, 0, plan.num_slots)
    assert not exists_placement(program, 0, plan.num_slots - 1)


def exists_placement(program: Program, stage: int, num_slots: int) -> bool:
    """Exhaustive search over every slot of every slice; independent of the planner."""
    instructions = compute_instructions(program, [stage])
    failed: set[tuple[int, tuple[tuple[int, ...], ...]]] = set()

    def place(index: int, live: tuple[tuple[int, ...], ...]) -> bool:
        while index < len(instructions) and instructions[index].op is Op.BACKWARD:
            oldest = live[0][:-1]
            live = (oldest, *live[1:]) if oldest else live[1:]
            index += 1
        if index == len(instructions):
            return True
        if (index, live) in failed:
            return False
        free = set(range(num_slots)).difference(*live)
        if instructions[index].unit.slice == 0:
            found = any(place(index + 1, (*live, (slot,))) for slot in sorted(free))
        else:
            *others, newest = live
            ends = free & {min(newest) - 1, max(newest) + 1}
            found = any(place(index + 1, (*others, (*newest, slot))) for slot in sorted(ends))
        if not found:
            failed.add((index, live))
        return found

    return place(0, ())


@pytest.mark.parametrize("shape", [(4, 4, 1, 5), (3, 6, 2, 4), (8, 9, 1, 9)])
def test_without_search_each_microbatch_gets_a_range(
    shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left if a search should ever give up."""
    monkeypatch.setattr("slimpipe.program.slots._MAX_SEARCH_STEPS", 0)
    program = build_program(*shape)
    for stage in range(program.num_stages):
        plan = plan_slots(program, [stage])
        peak = replay(program, [stage], plan)
        assert peak <= plan.num_slots <= (peak // program.num_slices + 2) * program.num_slices
    for rank in range(program.num_ranks):
        stages = stages_of(program, rank)
        plan = plan_slots(program, stages)
        replay(program, stages, plan)
        assert plan.num_slots == sum(plan_slots(program, [stage]).num_slots for stage in stages)


def test_planning_is_fast_and_does_not_search_longer_for_more_microbatches() -> None:
    program = build_program(8, 32, 1, 4)
    start = time.perf_counter()
    for stage in range(program.num_stages):
        plan_slots(program, [stage])
    assert time.perf_counter() - start < 0.5
    start = time.perf_counter()
    plan_slots(build_program(8, 16, 5, 4), range(0, 40, 8))  # gives up
    assert time.perf_counter() - start < 3
    few, many = (plan_slots(build_program(4, 4, 2, num_microbatches), [0, 4]) for num_microbatches in (20, 400))
    assert few == many
