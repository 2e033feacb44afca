"""`check` accepts what `build_program` makes, and sees what is wrong with anything else."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimpipe.program import Instruction, Op, Program, ProgramError, Unit, build_program, check
from tests.unit.program.shapes import programs, small_shapes

COMPUTE_OF_SEND = {Op.SEND_FORWARD: Op.FORWARD, Op.SEND_BACKWARD: Op.BACKWARD}


@pytest.mark.parametrize("forward_only", [False, True])
def test_every_small_program_passes(forward_only: bool) -> None:
    for shape in small_shapes():
        assert check(build_program(*shape, forward_only=forward_only)) is None


@given(programs(max_ranks=12, max_slices=24, max_stages=3, max_microbatches=4))
@settings(max_examples=60, deadline=None)
def test_larger_programs_pass(program: Program) -> None:
    assert check(program) is None


def change(program: Program, rank: int, edit: Callable[[list[Instruction]], None]) -> Program:
    """The program with one rank's list edited."""
    rows = [list(row) for row in program.instructions]
    edit(rows[rank])
    return replace(program, instructions=tuple(map(tuple, rows)))


def find(row: list[Instruction], op: Op, unit: tuple[int, int, int]) -> int:
    return next(index for index, i in enumerate(row) if (i.op, i.unit) == (op, unit))


def drop(op: Op, unit: tuple[int, int, int]) -> Callable[[list[Instruction]], None]:
    return lambda row: row.remove(row[find(row, op, unit)])


def move(op: Op, unit: tuple[int, int, int], *, before: tuple[Op, tuple[int, int, int]]) -> Callable:
    def edit(row: list[Instruction]) -> None:
        instruction = row.pop(find(row, op, unit))
        index = find(row, *before)
        row.insert(index, instruction._replace(tick=row[index].tick))

    return edit


def alter(op: Op, unit: tuple[int, int, int], /, **fields: object) -> Callable[[list[Instruction]], None]:
    def edit(row: list[Instruction]) -> None:
        index = find(row, op, unit)
        row[index] = row[index]._replace(**fields)

    return edit


def swap(one: tuple[Op, tuple[int, int, int]], other: tuple[Op, tuple[int, int, int]]) -> Callable:
    """Exchange the units of two instructions of the same kind."""

    def edit(row: list[Instruction]) -> None:
        i, j = find(row, *one), find(row, *other)
        row[i], row[j] = row[i]._replace(unit=row[j].unit), row[j]._replace(unit=row[i].unit)

    return edit


def repeat(op: Op, unit: tuple[int, int, int]) -> Callable[[list[Instruction]], None]:
    def edit(row: list[Instruction]) -> None:
        index = find(row, op, unit)
        row.insert(index, row[index])

    return edit


RF, F, SF = Op.RECEIVE_FORWARD, Op.FORWARD, Op.SEND_FORWARD
RB, B, SB = Op.RECEIVE_BACKWARD, Op.BACKWARD, Op.SEND_BACKWARD


@pytest.mark.parametrize(
    ("rank", "edit", "message"),
    [
        (0, drop(F, (0, 0, 1)), "rank 0 never runs forward of microbatch 0, stage 0, slice 1"),
        (1, drop(B, (1, 3, 0)), "rank 1 never runs backward of microbatch 1, stage 3, slice 0"),
        (0, repeat(F, (0, 0, 1)), "rank 0 runs forward of microbatch 0, stage 0, slice 1 2 times"),
        (0, alter(F, (0, 0, 1), unit=Unit(0, 0, 0)), "rank 0 never runs forward of microbatch 0, stage 0, slice 1"),
        (1, lambda row: row.append(Instruction(99, F, Unit(0, 0, 0))), "rank 1 runs forward of .* not its own"),
        (0, repeat(SF, (0, 0, 1)), "rank 0 has send_forward with rank 1 .* twice"),
        (1, lambda row: row.append(Instruction(99, SF, Unit(0, 0, 0), 0)), "rank 1 has .* it does not hold"),
        (0, lambda row: row.append(Instruction(99, RF, Unit(0, 0, 0), 1)), "the other end should be no message"),
        (0, alter(SF, (0, 0, 1), peer=0), "send_forward with rank 0 .*: the other end should be rank 1"),
        (0, alter(SF, (0, 0, 1), peer=None), "the other end should be rank 1"),
        (0, alter(F, (0, 0, 1), peer=1), "the other end should be no message"),
        (1, drop(RF, (0, 1, 2)), "rank 1 runs forward of .* slice 2 without a receive posted before it"),
        (0, drop(RB, (0, 0, 2)), "rank 0 runs backward of .* slice 2 without a receive posted before it"),
        (1, move(RF, (0, 1, 2), before=(F, (0, 1, 3))), "rank 1 runs forward of .* without a receive posted before it"),
        (0, drop(SF, (0, 0, 1)), "rank 0 runs forward of .* slice 1 without a send after it"),
        (1, drop(SB, (1, 3, 2)), "rank 1 runs backward of .* slice 2 without a send after it"),
        (0, move(SF, (0, 0, 1), before=(F, (0, 0, 1))), "rank 0 runs forward of .* slice 1 without a send after it"),
        (1, move(RF, (0, 1, 3), before=(F, (0, 1, 0))), "rank 1 has more than 2 receives posted"),
        (0, swap((F, (0, 0, 0)), (F, (0, 0, 1))), "rank 0 runs forward of .* without a send after it"),
        (1, swap((F, (0, 3, 2)), (F, (0, 3, 3))), "rank 1 runs forward of .* slice 3 without a receive|before forward"),
        (1, swap((RF, (0, 1, 0)), (RF, (0, 1, 1))), "the forward channel from rank 0 to rank 1: message 0 is sent"),
        (1, move(B, (0, 3, 3), before=(F, (0, 3, 3))), "rank 1 runs backward of .* before forward of"),
        (1, alter(F, (0, 1, 1), tick=7), "the schedule runs it at tick 2"),
        (0, alter(B, (0, 0, 1), tick=7), "the schedule runs it at tick"),
        (0, alter(SF, (0, 0, 1), tick=0), "comes after an instruction of a later moment"),
        (0, alter(SB, (0, 2, 3), tick=0), "comes after an instruction of a later moment"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_rank(rank: int, edit: Callable[[list[Instruction]], None], message: str) -> None:
    program = change(build_program(2, 4, 2, 2), rank, edit)
    with pytest.raises(ProgramError) as error:
        check(program)
    assert re.search(message, str(error.value)), str(error.value)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ((F, (0, 0, 0)), (F, (0, 0, 1)), "runs forward of microbatch 0, stage 0, slice 1 before forward of .* slice 0"),
        ((F, (0, 0, 0)), (F, (0, 1, 0)), "runs forward of microbatch 0, stage 1, slice 0 before forward of .* stage 0"),
        ((B, (0, 1, 2)), (B, (0, 1, 1)), "runs backward of .* stage 1, slice 1 before backward of .* slice 2"),
        ((B, (0, 1, 0)), (B, (0, 0, 0)), "runs backward of .* stage 0, slice 0 before backward of .* stage 1, slice 0"),
    ],
)  # fmt: skip
def test_causality_within_a_rank(one: tuple, other: tuple, message: str) -> None:
    program = change(build_program(1, 3, 2, 1), 0, swap(one, other))
    with pytest.raises(ProgramError, match=message):
        check(program)


def test_missing_list() -> None:
    program = build_program(2, 2, 1, 1)
    with pytest.raises(ProgramError, match="1 lists of instructions for 2 ranks"):
        check(replace(program, instructions=program.instructions[:1]))


def test_backward_in_a_forward_only_program() -> None:
    program = build_program(2, 2, 1, 1)
    with pytest.raises(ProgramError, match=r"rank 0 runs backward of .* not its own"):
        check(replace(program, forward_only=True))


def test_number_of_ticks() -> None:
    program = build_program(2, 2, 1, 1)
    with pytest.raises(ProgramError, match="the program says that it has 4 ticks"):
        check(replace(program, num_ticks=program.num_ticks - 1))


def test_forward_too_early_holds_too_much() -> None:
    """A backward changes places with the forward behind it: it runs, but a unit more is live."""

    def edit(row: list[Instruction]) -> None:
        index = next(index for index, i in enumerate(row) if i.op is B)
        row[index], row[index + 1] = row[index + 1], row[index]

    program = change(build_program(1, 3, 1, 2), 0, edit)
    with pytest.raises(ProgramError, match="rank 0 holds 4 live units at its peak; the schedule allows it 3"):
        check(program)


def test_capped_rank_that_holds_too_little() -> None:
    """With one microbatch all units are live at the first backward, on every rank."""
    program = build_program(4, 4, 1, 1)
    assert [program.peak_live_units(rank) for rank in range(4)] == [4, 4, 4, 4]
    check(program)
    with pytest.raises(ProgramError, match="rank 0 holds 4 live units at its peak; the schedule allows it 8"):
        check(_with_two_microbatches_one_at_a_time(program))


def _with_two_microbatches_one_at_a_time(program: Program) -> Program:
    """The whole program twice, without overlap."""

    def again(instruction: Instruction) -> Instruction:
        return instruction._replace(
            tick=instruction.tick + program.num_ticks, unit=instruction.unit._replace(microbatch=1)
        )

    return replace(
        program,
        num_microbatches=2,
        num_ticks=2 * program.num_ticks,
        instructions=tuple((*row, *map(again, row)) for row in program.instructions),
    )


def test_sends_at_once_would_deadlock_in_long_cycles() -> None:
    """Why a send may stand later than its compute instruction: in a cycle of 7 slices on 2 ranks the last rank would
    stop at a send that the first rank, waiting for the last, does not post."""

    def edit(row: list[Instruction]) -> None:
        sends = [i for i in row if i.op in COMPUTE_OF_SEND]
        row[:] = [i for i in row if i.op not in COMPUTE_OF_SEND]
        for send in sends:
            index = find(row, COMPUTE_OF_SEND[send.op], send.unit)
            row.insert(index + 1, send._replace(tick=row[index].tick))

    program = build_program(2, 7, 2, 2)
    check(program)
    with pytest.raises(ProgramError, match=r"the ranks wait for one another: rank 0 at .*; rank 1 at send_forward"):
        check(change(program, 1, edit))


def test_ranks_that_wait_for_one_another() -> None:
    """The first rank finishes a microbatch before the next; the last wants every forward before a backward."""
    program = _with_two_microbatches_one_at_a_time(build_program(2, 2, 1, 1))
    row = program.instructions[1]
    forwards_first = sorted(row, key=lambda i: i.op in (B, SB))
    with pytest.raises(ProgramError) as error:
        check(replace(program, instructions=(program.instructions[0], tuple(forwards_first))))
    assert re.search("wait for one another: rank 0 at backward .*0, slice 1.*; rank 1 at forward", str(error.value))


@given(programs(max_ranks=4, max_slices=6, max_stages=2, max_microbatches=3), st.data())
@settings(max_examples=400, deadline=None)
def test_no_change_goes_unseen(program: Program, data: st.DataObject) -> None:
    """Drop, repeat or redirect any instruction, move any in time, or exchange any two compute instructions."""
    rank = data.draw(st.integers(0, program.num_ranks - 1))
    row = program.instructions[rank]
    index = data.draw(st.integers(0, len(row) - 1))
    kind = data.draw(st.sampled_from(["drop", "repeat", "peer", "tick", "exchange"]))

    def edit(row: list[Instruction]) -> None:
        instruction = row[index]
        if kind == "drop":
            del row[index]
        elif kind == "repeat":
            row.insert(data.draw(st.integers(0, len(row))), instruction)
        elif kind == "peer":
            row[index] = instruction._replace(peer=program.num_ranks if instruction.peer is None else None)
        elif kind == "tick":
            row[index] = instruction._replace(
                tick=instruction.tick + data.draw(st.sampled_from([-program.num_ticks, 999]))
            )
        else:
            computes = [place for place, i in enumerate(row) if i.peer is None]
            one, other = data.draw(st.lists(st.sampled_from(computes), min_size=2, max_size=2, unique=True))
            row[one], row[other] = row[other], row[one]

    if kind == "exchange" and sum(i.peer is None for i in row) < 2:
        kind = "drop"
    with pytest.raises(ProgramError):
        check(change(program, rank, edit))
