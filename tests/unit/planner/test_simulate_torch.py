"""Torch's orders run in simulated time and have the bubbles that they are known for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slimpipe.planner.costs import Link, OpCosts
from slimpipe.planner.simulate_torch import simulate_torch, torch_order
from slimpipe.planner.timeline import Timeline
from slimpipe.program import ProgramError
from slimpipe.schedule_names import TORCH_SCHEDULES


def simulated(schedule: str, p: int, v: int, m: int, costs: OpCosts | None = None) -> Timeline:
    order = torch_order(schedule, num_ranks=p, num_stages_per_rank=v, num_microbatches=m)
    return simulate_torch(order, costs or OpCosts.units(p * v), title=schedule)


@pytest.mark.parametrize(
    ("schedule", "p", "v", "m"),
    [("1F1B", 4, 1, 8), ("GPipe", 4, 1, 8), ("1F1B", 2, 1, 2), ("LoopedBFS", 4, 2, 8), ("Interleaved1F1B", 8, 5, 8)],
)
def test_bubble(schedule: str, p: int, v: int, m: int) -> None:
    """(p - 1) / (m v + p - 1); the last one is the 14.89 % that the SlimPipe paper's authors plan for 13B, 256K."""
    assert simulated(schedule, p, v, m).idle_share == pytest.approx((p - 1) / (m * v + p - 1))


@pytest.mark.parametrize("schedule", TORCH_SCHEDULES)
def test_every_schedule_runs(schedule: str) -> None:
    v = 1 if schedule in ("1F1B", "GPipe") else 2
    timeline = simulated(schedule, 4, v, 8)
    assert (timeline.title, timeline.num_ranks, timeline.num_slices) == (schedule, 4, 1)
    assert timeline.num_stages_per_rank == v
    kinds = [span.kind for span in timeline.spans if not span.is_message]
    assert kinds.count("F") == kinds.count("B") + kinds.count("I") == 4 * v * 8
    assert kinds.count("I") == kinds.count("W")
    work = sum(timeline.compute_seconds(rank) for rank in range(4))
    assert work == pytest.approx(8 * 3)  # 1 for a microbatch forward and 2 for it backward, however it is split


def test_the_last_rank_of_1f1b_starts_with_the_first_microbatch() -> None:
    """Torch's own order, which it draws and never runs, numbers its forwards from 1."""
    forwards = [s.unit.microbatch for s in simulated("1F1B", 2, 1, 3).of_rank(1) if s.kind == "F" and s.unit]
    assert forwards == [0, 1, 2]


def test_single_stage_schedules_receive_when_they_compute() -> None:
    """A message takes as long as a unit: nothing of it is hidden, neither way."""
    costs = replace(OpCosts.units(2), link=Link(latency=0.5), activation_bytes=7)
    timeline = simulated("1F1B", 2, 1, 2, costs)
    # F, message, F and B on the last rank, message, F and B, message, B.
    assert timeline.seconds == pytest.approx(0.5 + 0.5 + (0.5 + 1) + 0.5 + (0.5 + 1) + 0.5 + 1)
    assert sum(span.num_bytes for span in timeline.spans if span.kind == "send") == 4 * 7


def test_orders_with_messages_receive_ahead() -> None:
    costs = replace(OpCosts.units(4), link=Link(latency=0.01), activation_bytes=7)
    timeline = simulated("Interleaved1F1B", 2, 2, 4, costs)
    assert sum(span.kind == "send" for span in timeline.spans) == 2 * 3 * 4


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (("1f1b", 2, 1, 2), "schedule '1f1b': it must be one of 1F1B, .*; nearest: '1F1B'"),
        (("1F1B", 4, 1, 2), "num_microbatches = 2: .*nearest legal value: 4"),
        (("GPipe", 4, 2, 4), "num_stages_per_rank = 2: GPipe has 1 per rank; nearest legal value: 1"),
        (("ZBVZeroBubble", 2, 3, 4), "num_stages_per_rank = 3: .*nearest legal value: 2"),
        (("Interleaved1F1B", 4, 1, 4), "num_stages_per_rank = 1: .* at least 2 per rank; nearest legal value: 2"),
        (("Interleaved1F1B", 4, 2, 9), "torch's Interleaved1F1B refuses 9 microbatches: .*multiple"),
    ],
)
def test_what_torch_does_not_serve(shape: tuple[str, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulated(*shape)


def test_damaged_order() -> None:
    order = torch_order("1F1B", num_ranks=2, num_stages_per_rank=1, num_microbatches=2)
    last = [action for action in order[1] if str(action) != "1B0"]
    with pytest.raises(ProgramError, match="wait for one another: rank 0 at 0B0; rank 1 at the end of its step"):
        simulate_torch({0: order[0], 1: last}, OpCosts.units(2))
    with pytest.raises(ValueError, match="costs are of 3 stages, the order has 2"):
        simulate_torch(order, OpCosts.units(3))
