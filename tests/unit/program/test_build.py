"""Arguments of `build_program`, what its programs look like, and how long it takes."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings

from slimpipe.options import SlimPipeOptions
from slimpipe.program import Op, Program, Unit, build_program
from slimpipe.program.order import cycle_size, live_units
from tests.unit.program.shapes import Shape, programs

RECEIVES = (Op.RECEIVE_FORWARD, Op.RECEIVE_BACKWARD)
SENDS = (Op.SEND_FORWARD, Op.SEND_BACKWARD)


@pytest.mark.parametrize(
    ("shape", "named", "message"),
    [
        ((0, 4, 1, 1), {}, "num_ranks = 0: it must be at least 1; nearest legal value: 1"),
        ((4, 3, 1, 1), {}, "num_slices = 3: it must be at least num_ranks = 4; nearest legal value: 4"),
        ((2, 1, 1, 1), {}, "num_slices = 1: it must be at least num_ranks = 2; nearest legal value: 2"),
        ((2, 2, 0, 1), {}, "num_stages_per_rank = 0: it must be at least 1; nearest legal value: 1"),
        ((2, 2, 1, -3), {}, "num_microbatches = -3: it must be at least 1; nearest legal value: 1"),
        ((2, 2, 1, 1), {"slice_len": 0}, "slice_len = 0: it must be at least 1; nearest legal value: 1"),
        ((2, 2, 1, 1), {"layers_per_stage": (1,)}, "each of the 2 stages; nearest legal value: (1, 0)"),
        ((2, 2, 1, 1), {"layers_per_stage": (1, 2, 3)}, "each of the 2 stages; nearest legal value: (1, 2)"),
        ((2, 2, 1, 1), {"layers_per_stage": (1, -1)}, "layers_per_stage[1] = -1: it must be at least 0"),
    ],
)
def test_illegal_values(shape: Shape, named: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        build_program(*shape, **named)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("shape", "named", "message"),
    [
        ((True, 4, 1, 1), {}, "num_ranks = True: it must be an int, not bool"),
        ((2, 4.0, 1, 1), {}, "num_slices = 4.0: it must be an int, not float"),
        ((2, 4, "1", 1), {}, "num_stages_per_rank = '1': it must be an int, not str"),
        ((2, 4, 1, None), {}, "num_microbatches = None: it must be an int, not NoneType"),
        ((2, 4, 1, 1), {"slice_len": 1.5}, "slice_len = 1.5"),
        ((2, 4, 1, 1), {"layers_per_stage": [1, 1]}, "it must be a tuple of ints or None, not list"),
        ((2, 4, 1, 1), {"layers_per_stage": (1, True)}, "layers_per_stage[1] = True"),
        ((2, 4, 1, 1), {"forward_only": 1}, "forward_only = 1: it must be a bool, not int"),
        ((2, 4, 1, 1), {"options": {}}, "options = {}: it must be SlimPipeOptions or None, not dict"),
    ],
)
def test_wrong_types(shape: Any, named: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError) as error:
        build_program(*shape, **named)
    assert message in str(error.value)


def test_the_program_tells_what_it_was_built_for() -> None:
    program = build_program(2, 4, 2, 3, slice_len=128, layers_per_stage=(1, 2, 2, 1), options=SlimPipeOptions())
    assert (program.num_ranks, program.num_slices, program.num_stages_per_rank, program.num_microbatches) == (
        2,
        4,
        2,
        3,
    )
    assert (program.slice_len, program.layers_per_stage, program.forward_only) == (128, (1, 2, 2, 1), False)
    assert program.num_stages == 4
    assert [program.rank_of(stage) for stage in range(4)] == [0, 1, 0, 1]
    assert program == build_program(2, 4, 2, 3, slice_len=128, layers_per_stage=(1, 2, 2, 1))


def test_one_small_program_in_full() -> None:
    rank_0, rank_1 = build_program(2, 2, 1, 1).instructions
    first, second = Unit(0, 0, 0), Unit(0, 0, 1)
    assert [tuple(instruction) for instruction in rank_0] == [
        (0, Op.FORWARD, first, None),
        (0, Op.SEND_FORWARD, first, 1),
        (1, Op.RECEIVE_BACKWARD, second, 1),
        (1, Op.FORWARD, second, None),
        (1, Op.SEND_FORWARD, second, 1),
        (3, Op.RECEIVE_BACKWARD, first, 1),
        (3, Op.BACKWARD, second, None),
        (4, Op.BACKWARD, first, None),
    ]
    first, second = Unit(0, 1, 0), Unit(0, 1, 1)
    assert [tuple(instruction) for instruction in rank_1] == [
        (1, Op.RECEIVE_FORWARD, first, 0),
        (1, Op.RECEIVE_FORWARD, second, 0),
        (1, Op.FORWARD, first, None),
        (2, Op.FORWARD, second, None),
        (2, Op.BACKWARD, second, None),
        (2, Op.SEND_BACKWARD, second, 0),
        (3, Op.BACKWARD, first, None),
        (3, Op.SEND_BACKWARD, first, 0),
    ]


def test_one_rank_sends_nothing() -> None:
    program = build_program(1, 3, 2, 2)
    assert {instruction.op for instruction in program.instructions[0]} == {Op.FORWARD, Op.BACKWARD}


@given(programs(max_ranks=8, max_slices=16, max_stages=3, max_microbatches=5))
@settings(max_examples=60, deadline=None)
def test_where_messages_stand(program: Program) -> None:
    """A receive one compute instruction ahead of its own; a send behind its own, or later where a long cycle turns."""
    wait = max(0, cycle_size(program.num_slices, program.num_ranks) - program.num_ranks - 1)
    for rank, row in enumerate(program.instructions):
        index_of: dict[tuple[Op, Unit], int] = {}
        for index, compute in enumerate(i for i in row if i.peer is None):
            index_of[compute.op, compute.unit] = index
        num_done = defaultdict(int)
        next_index = 0
        for instruction in row:
            _, op, unit, _ = instruction
            if op in RECEIVES:
                compute_op = Op.FORWARD if op is Op.RECEIVE_FORWARD else Op.BACKWARD
                assert next_index == max(0, index_of[compute_op, unit] - 1)
            elif op is Op.SEND_FORWARD:
                turns = rank == program.num_ranks - 1
                assert num_done[Op.FORWARD] - 1 - num_done[Op.FORWARD, unit] == (wait if turns else 0)
            elif op is Op.SEND_BACKWARD:
                turns = rank == 0
                assert num_done[Op.BACKWARD] - 1 - num_done[Op.BACKWARD, unit] == (wait if turns else 0)
            else:
                num_done[op, unit] = num_done[op]
                num_done[op] += 1
                next_index += 1


def test_messages_on_the_edges_of_the_pipeline() -> None:
    program = build_program(3, 6, 2, 2)
    for row in program.instructions:
        for _, op, unit, peer in row:
            if peer is not None:
                neighbour = unit.stage + (1 if op in (Op.SEND_FORWARD, Op.RECEIVE_BACKWARD) else -1)
                assert 0 <= neighbour < program.num_stages
                assert peer == neighbour % 3


@given(programs(max_ranks=8, max_slices=16, max_stages=3, max_microbatches=5))
@settings(max_examples=60, deadline=None)
def test_peak_live_units_and_first_backward(program: Program) -> None:
    for rank, row in enumerate(program.instructions):
        computes = [instruction for instruction in row if instruction.peer is None]
        if program.forward_only:
            assert program.peak_live_units(rank) == 1
            assert all(instruction.op is Op.FORWARD for instruction in computes)
            continue
        live = live_units(
            rank,
            num_ranks=program.num_ranks,
            num_slices=program.num_slices,
            num_stages_per_rank=program.num_stages_per_rank,
            num_microbatches=program.num_microbatches,
        )
        assert program.peak_live_units(rank) == live
        assert [instruction.op for instruction in computes].index(Op.BACKWARD) == live
        first = computes[live]
        num_units = program.num_slices * program.num_stages_per_rank
        assert first.tick == num_units - 1 + 2 * (program.num_ranks - 1) - rank
        assert first.unit.slice == program.num_slices - 1
    num_units = program.num_slices * program.num_stages_per_rank * program.num_microbatches
    if program.forward_only:
        assert program.num_ticks == num_units + program.num_ranks - 1
    else:
        num_units_one = program.num_slices * program.num_stages_per_rank
        assert program.num_ticks == num_units + num_units_one - 1 + 2 * (program.num_ranks - 1)


def test_building_is_fast() -> None:
    """Takes about 10 ms; promised are 50 ms."""

    def seconds() -> float:
        start = time.perf_counter()
        build_program(8, 32, 1, 4)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.05
