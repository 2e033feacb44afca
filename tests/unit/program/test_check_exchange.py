"""`check` sees what is wrong with the transfers of a program and with its instructions to help."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimpipe.program import Instruction, Op, Program, ProgramError, Transfer, Unit, check
from slimpipe.program.check_exchange import meetings
from tests.unit.program.shapes import programs_with_exchange, with_exchange

HF, HB = Op.HELP_FORWARD, Op.HELP_BACKWARD
F, B = Op.FORWARD, Op.BACKWARD


def good() -> Program:
    """Among its transfers are

    forward:  tick 1  rank 0 -> 2 (slice 1, rows 0..2, held)
              tick 2  rank 0 -> 2 (slice 2, rows 0..3, held; row 3 is sent)
              tick 3  rank 0 -> 2 (slice 3, rows 0..3, the last time)
              tick 4  rank 1 -> 0 (slice 3, rows 0..5), rank 2 -> 0 (slice 2, rows 0..1, held)
    """
    return with_exchange((3, 4, 1, 1), slice_len=4)


def find(program: Program, phase: Op, tick: int, owner: int, helper: int) -> int:
    return next(
        index
        for index, t in enumerate(program.transfers)
        if (t.phase, t.tick, program.rank_of(t.unit.stage), t.helper) == (phase, tick, owner, helper)
    )


Edit = Callable[[list[Transfer]], None]
At = tuple[Op, int, int, int]
"""Phase, tick, owner and helper of a transfer of `good`."""


def alter(at: At, /, **fields: object) -> Edit:
    def edit(transfers: list[Transfer]) -> None:
        index = find(good(), *at)
        transfers[index] = transfers[index]._replace(**fields)

    return edit


def drop(at: At) -> Edit:
    return lambda transfers: transfers.remove(transfers[find(good(), *at)])


def repeat(at: At) -> Edit:
    return lambda transfers: transfers.insert(find(good(), *at), transfers[find(good(), *at)])


def swap(one: At, other: At) -> Edit:
    def edit(transfers: list[Transfer]) -> None:
        i, j = find(good(), *one), find(good(), *other)
        transfers[i], transfers[j] = transfers[j], transfers[i]

    return edit


def both(first: Edit, second: Edit) -> Edit:
    def edit(transfers: list[Transfer]) -> None:
        first(transfers)
        second(transfers)

    return edit


def test_the_good_one_is_good() -> None:
    assert check(good()) is None


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        # Who, and in which order.
        (alter((F, 1, 0, 2), helper=0), "rank 0: transfer .* the helper must be another of 3 ranks"),
        (alter((F, 1, 0, 2), helper=3), "rank 0: transfer .* to rank 3 .* the helper must be another of 3 ranks"),
        (swap((F, 2, 0, 2), (F, 3, 0, 2)), "rank 0: transfer .* tick 2.: comes after one of tick 3 from rank 0 to"),
        (swap((F, 5, 2, 0), (F, 5, 2, 1)), "rank 2: transfer .* to rank 0 .*: comes after one of tick 5 from rank 2"),
        (swap((F, 5, 2, 1), (B, 5, 2, 0)), "rank 2: transfer .* comes after one of tick 5 from rank 2 to rank 0"),
        (repeat((F, 1, 0, 2)), "rank 0: transfer .* comes after one of tick 1 from rank 0 to rank 2; .* one each"),
        (alter((F, 4, 2, 0), helper=1), "rank 1: transfer .* to rank 1 .* it would both hand over and take over"),
        # What they run.
        (alter((F, 2, 0, 2), tick=1), "rank 0: transfer .* comes after one of tick 1"),
        (alter((F, 2, 0, 2), unit=Unit(0, 0, 3)), "rank 0: transfer .* slice 3 .*: it does not run the unit there"),
        (alter((F, 2, 0, 2), unit=Unit(1, 0, 2)), "rank 0: transfer .*microbatch 1.*: it does not run the unit there"),
        (alter((F, 4, 2, 0), phase=B), "rank 2: transfer .* .backward, tick 4.: it does not run the unit there"),
        (drop((F, 1, 0, 2)), "rank 2: help_forward .*: there is no transfer to it"),
        (drop((F, 4, 1, 0)), "rank 0: help_forward .*: the first that it helps there is .* stage 2, slice 2"),
        # Rows.
        (alter((F, 4, 1, 0), rows=((3, 6), (0, 3))), "rows = .*: runs must be sorted, not empty, and not touch"),
        (alter((F, 4, 1, 0), rows=((0, 3), (3, 6))), "rows = .*: runs must be sorted, not empty, and not touch"),
        (alter((F, 4, 1, 0), sent=((0, 3), (4, 4), (5, 6))), "sent = .*: runs must be sorted, not empty, and not"),
        (alter((F, 4, 1, 0), dropped=((0, 4), (3, 6))), "dropped = .*: runs must be sorted, not empty, and not"),
        (alter((F, 4, 1, 0), rows=()), "rank 1: transfer of 0 rows .*: they must be some of the unit's 12 past tokens"),
        (alter((F, 4, 1, 0), rows=((0, 13),)), "transfer of 13 rows .*: they must be some of the unit's 12 past"),
        (alter((F, 4, 1, 0), rows=((-1, 6),)), "transfer of 7 rows .*: they must be some of the unit's 12 past"),
        (alter((F, 4, 1, 0), sent=((0, 7),)), r"rank 1: transfer .*: sent rows \(\(6, 7\),\) are not among its rows"),
        (alter((F, 4, 1, 0), dropped=((5, 7),)), r"dropped rows \(\(6, 7\),\) are not among its rows"),
        (
            alter((F, 5, 2, 1), rows=((4, 9),), sent=((4, 9),), dropped=((4, 9),)),
            r"rank 2: .* rows \(\(4, 5\),\) are computed by another helper too",
        ),
        # What helpers hold.
        (alter((F, 2, 0, 2), sent=((2, 4),)), r"rank 2: transfer .*: is sent rows \(\(2, 3\),\), which it holds"),
        (alter((F, 2, 0, 2), sent=()), r"rank 2: .* computes on rows \(\(3, 4\),\), which it does not hold"),
        (alter((F, 1, 0, 2), dropped=((0, 1),)), r"rank 2: .* computes on rows \(\(0, 1\),\), which it does not hold"),
        (alter((F, 3, 0, 2), dropped=()), r"rank 2: holds 4 rows of microbatch 0, stage 0 .forward. at the end"),
        (alter((B, 9, 0, 2), dropped=()), r"rank 2: holds 3 rows of microbatch 0, stage 0 .backward. at the end"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_transfers(edit: Edit, message: str) -> None:
    program = good()
    transfers = list(program.transfers)
    edit(transfers)
    with pytest.raises(ProgramError) as error:
        check(replace(program, transfers=tuple(transfers)))
    assert re.search(message, str(error.value)), str(error.value)


@given(programs_with_exchange(max_ranks=6, max_slices=10, max_stages=3, max_microbatches=3))
@settings(max_examples=60, deadline=None)
def test_gradients_come_back_before_they_are_needed(program: Program) -> None:
    """`check` need not look at it: it follows from the rules about rows and the order of slices."""
    backward_tick = {i.unit: i.tick for row in program.instructions for i in row if i.op is B}
    for transfer in program.transfers:
        if transfer.phase is B:
            for run in transfer.dropped:
                for token in range(*run):
                    of = transfer.unit._replace(slice=token // program.slice_len)
                    assert transfer.tick < backward_tick[of]


def help_at(row: list[Instruction], op: Op) -> int:
    return next(index for index, i in enumerate(row) if i.op is op)


@pytest.mark.parametrize(
    ("rank", "edit", "message"),
    [
        (2, lambda row: row.pop(help_at(row, HF)), "rank 2: transfer .* tick 1.: it has no instruction there"),
        (2, lambda row: row.pop(help_at(row, HB)), "rank 2: transfer .* tick 9.: it has no instruction there"),
        (0, lambda row: row.insert(0, row[help_at(row, HF)]), "rank 0 has help_forward .* twice"),
        (0, lambda row: row.insert(0, row[help_at(row, HF)]._replace(unit=Unit(0, 2, 2))), "the first that it helps"),
        (0, lambda row: row.insert(help_at(row, HF) + 1, Instruction(4, HF, Unit(0, 2, 2))), "it helps there already"),
        (0, lambda row: row.append(Instruction(10, HF, Unit(0, 1, 2))), "help_forward .*: there is no transfer to it"),
        (0, lambda row: row.append(Instruction(6, HF, Unit(0, 1, 2), 1)), "the other end should be no message"),
        (2, lambda row: row.append(Instruction(3, HF, Unit(0, 0, 3))), "it has a unit of its own there"),
        (0, lambda row: row.append(row.pop(help_at(row, HF))), "comes after an instruction of a later moment|wait for"),
        (0, lambda row: row.append(row.pop(help_at(row, HB))), "comes after an instruction of a later moment|wait for"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_help(rank: int, edit: Callable[[list[Instruction]], None], message: str) -> None:
    program = good()
    rows = [list(row) for row in program.instructions]
    edit(rows[rank])
    with pytest.raises(ProgramError) as error:
        check(replace(program, instructions=tuple(map(tuple, rows))))
    assert re.search(message, str(error.value)), str(error.value)


def test_ranks_that_wait_for_one_another_to_help() -> None:
    """At tick 5 ranks 0 and 1 help in both phases; if one begins with backward, each waits for the other."""
    program = good()
    row = list(program.instructions[0])
    forward, backward = (next(index for index, i in enumerate(row) if i.op is op and i.tick == 5) for op in (HF, HB))
    row[forward], row[backward] = row[backward], row[forward]
    with pytest.raises(ProgramError) as error:
        check(replace(program, instructions=(tuple(row), *program.instructions[1:])))
    assert re.search(
        r"wait for one another: rank 0 at help_backward .* tick 5.*; rank 1 at help_forward .* tick 5",
        str(error.value),
    )


def test_help_at_another_place_that_nobody_waits_for() -> None:
    """A message may not stand before the help of an earlier tick: lists do not go back in time."""
    program = good()
    row = list(program.instructions[0])
    index = help_at(row, HB)
    assert row[index + 1].tick > row[index].tick
    row[index], row[index + 1] = row[index + 1], row[index]
    with pytest.raises(ProgramError, match="comes after an instruction of a later moment"):
        check(replace(program, instructions=(tuple(row), *program.instructions[1:])))


def test_meetings_join_ranks_directly_and_through_others() -> None:
    program = good()
    met = meetings(program)
    assert met[2, (1, F)] == met[0, (1, F)] == {0, 2}
    assert (1, (1, F)) not in met
    assert met[0, (4, F)] == met[1, (4, F)] == met[2, (4, F)] == {0, 1, 2}
    four = with_exchange((4, 8, 1, 1), slice_len=64)
    assert all(met_by in joined for (met_by, _), joined in meetings(four).items())


@given(programs_with_exchange(max_ranks=4, max_slices=6, max_stages=2, max_microbatches=3), st.data())
@settings(max_examples=200, deadline=None)
def test_no_change_of_help_goes_unseen(program: Program, data: st.DataObject) -> None:
    """Drop any instruction to help, repeat it, give it another unit or tick, or move it past another computation."""
    places = [
        (rank, index)
        for rank, row in enumerate(program.instructions)
        for index, instruction in enumerate(row)
        if instruction.op in (HF, HB)
    ]
    if not places:
        check(program)
        return
    rank, index = data.draw(st.sampled_from(places))
    row = list(program.instructions[rank])
    kind = data.draw(st.sampled_from(["drop", "repeat", "unit", "tick", "move"]))
    if kind == "drop":
        del row[index]
    elif kind == "repeat":
        row.insert(data.draw(st.integers(0, len(row))), row[index])
    elif kind == "unit":
        row[index] = row[index]._replace(unit=row[index].unit._replace(stage=rank))
    elif kind == "tick":
        row[index] = row[index]._replace(tick=row[index].tick + data.draw(st.sampled_from([-1, 1, 999])))
    else:
        others = [place for place, i in enumerate(row) if i.op.phase is not None and place != index]
        other = data.draw(st.sampled_from(others))
        row.insert(other, row.pop(index))
    rows = [*program.instructions[:rank], tuple(row), *program.instructions[rank + 1 :]]
    with pytest.raises(ProgramError):
        check(replace(program, instructions=tuple(rows)))
