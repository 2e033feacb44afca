"""The schedule's arithmetic: order of units, live units, ticks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given

from slimpipe.program.order import (
    backward_tick,
    cycle_size,
    forward_order,
    forward_tick,
    hop_ticks,
    live_units,
)
from tests.unit.program.shapes import Shape, shapes


@pytest.mark.parametrize(
    ("num_slices", "num_ranks", "size"),
    [(8, 4, 4), (6, 4, 6), (15, 5, 5), (12, 5, 6), (7, 2, 7), (1, 1, 1), (9, 1, 1), (16, 16, 16)],
)
def test_cycle_is_the_smallest_divisor_that_spans_the_ranks(num_slices: int, num_ranks: int, size: int) -> None:
    assert cycle_size(num_slices, num_ranks) == size


def test_slices_pass_the_stages_in_cycles() -> None:
    order = list(forward_order(4, num_ranks=2, num_stages_per_rank=3))
    assert order == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1),
        (0, 2), (0, 3), (1, 2), (1, 3), (2, 2), (2, 3),
    ]  # fmt: skip


@given(shapes())
def test_order_is_the_closed_form(shape: Shape) -> None:
    num_ranks, num_slices, num_stages_per_rank, _ = shape
    cycle = cycle_size(num_slices, num_ranks)
    order = list(forward_order(num_slices, num_ranks=num_ranks, num_stages_per_rank=num_stages_per_rank))
    assert order == [
        (k % (num_stages_per_rank * cycle) // cycle, k // (num_stages_per_rank * cycle) * cycle + k % cycle)
        for k in range(num_slices * num_stages_per_rank)
    ]
    assert set(Counter(order).values()) == {1}


@pytest.mark.parametrize(
    ("shape", "live"),
    [
        ((4, 4, 1, 3), [10, 8, 6, 4]),
        ((8, 16, 5, 4), [94, 92, 90, 88, 86, 84, 82, 80]),
        ((4, 4, 1, 1), [4, 4, 4, 4]),
        ((4, 6, 1, 2), [12, 10, 8, 6]),
        ((1, 1, 1, 5), [1]),
    ],
)
def test_live_units(shape: Shape, live: list[int]) -> None:
    num_ranks, num_slices, num_stages_per_rank, num_microbatches = shape
    assert live == [
        live_units(
            rank,
            num_ranks=num_ranks,
            num_slices=num_slices,
            num_stages_per_rank=num_stages_per_rank,
            num_microbatches=num_microbatches,
        )
        for rank in range(num_ranks)
    ]


@given(shapes())
def test_every_hop_ends_before_the_next_stage_begins(shape: Shape) -> None:
    """A slice runs on its next stage exactly `hop_ticks` later, and so does its gradient on the previous stage."""
    num_ranks, num_slices, num_stages_per_rank, _ = shape
    order = list(forward_order(num_slices, num_ranks=num_ranks, num_stages_per_rank=num_stages_per_rank))
    sizes = {"num_ranks": num_ranks, "num_slices": num_slices}
    forward, backward = {}, {}
    for rank in range(num_ranks):
        for index, (local_stage, slice_index) in enumerate(order):
            stage = local_stage * num_ranks + rank
            forward[stage, slice_index] = forward_tick(index, rank=rank)
            backward[stage, slice_index] = backward_tick(
                len(order) - 1 - index, rank=rank, num_stages_per_rank=num_stages_per_rank, **sizes
            )
    for stage in range(num_ranks * num_stages_per_rank - 1):
        for slice_index in range(num_slices):
            hop = hop_ticks(stage % num_ranks, forward=True, **sizes)
            assert forward[stage + 1, slice_index] - forward[stage, slice_index] == hop >= 1
            hop = hop_ticks((stage + 1) % num_ranks, forward=False, **sizes)
            assert backward[stage, slice_index] - backward[stage + 1, slice_index] == hop >= 1
    last_stage = num_ranks * num_stages_per_rank - 1
    assert all(forward[last_stage, s] <= backward[last_stage, s] for s in range(num_slices))
