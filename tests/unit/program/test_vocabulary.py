"""Work on the vocabulary that all ranks share: when it runs, that `check` accepts it, and what `check` sees."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimpipe.options import VOCAB_PARALLEL_NAMES, SlimPipeOptions
from slimpipe.program import Instruction, Op, Program, ProgramError, Unit, build_program, check
from tests.unit.program.shapes import Shape, shapes, small_shapes

E, F, V, B, EB = Op.EMBED, Op.FORWARD, Op.VOCABULARY, Op.BACKWARD, Op.EMBED_BACKWARD
PLACES = {E: 0, F: 1, Op.HELP_FORWARD: 1, V: 2, B: 3, Op.HELP_BACKWARD: 3, EB: 4}
SHARED = (E, V, EB)


def shared(row: Iterable[Instruction]) -> list[Instruction]:
    return [instruction for instruction in row if instruction.op in SHARED]


def moments(row: Iterable[Instruction]) -> list[tuple[int, int]]:
    """Tick and place of all but messages."""
    return [(i.tick, PLACES[i.op]) for i in row if i.op in PLACES]


# What is built -------------------------------------------------------------------------------------------------------


def expected_ticks(shape: Shape, vocab_parallel: str, *, forward_only: bool) -> dict[tuple[Op, Unit], int]:
    """The schedule's formulas: forward unit f of rank r runs at tick f + r, backward unit b at n v - 1 + 2 (p - 1) - r
    + b. In a microbatch, slice s of local stage j is forward unit s // g * v g + j g + s % g, with cycles of g slices.
    """
    p, n, v, m = shape
    g = min(size for size in range(p, n + 1) if n % size == 0)
    ticks: dict[tuple[Op, Unit], int] = {}
    for microbatch in range(m):
        for s in range(n):
            on_first_stage = s // g * v * g + s % g
            on_last_stage = on_first_stage + (v - 1) * g
            before = microbatch * n * v
            if vocab_parallel != "none":
                ticks[V, Unit(microbatch, p * v - 1, s)] = before + on_last_stage + p - 1
            if vocab_parallel == "both":
                ticks[E, Unit(microbatch, 0, s)] = before + on_first_stage
                if not forward_only:
                    backward = before + n * v - 1 - on_first_stage
                    ticks[EB, Unit(microbatch, 0, s)] = n * v - 1 + 2 * (p - 1) + backward
    return ticks


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("vocab_parallel", ["output", "both"])
def test_ticks_and_places_of_every_small_program(vocab_parallel: str, forward_only: bool) -> None:
    for shape in small_shapes():
        if shape[1] > 8 or shape[3] in (2, 5):
            continue
        program = build_program(*shape, forward_only=forward_only, vocab_parallel=vocab_parallel)
        assert program.vocab_parallel == vocab_parallel
        ticks = expected_ticks(shape, vocab_parallel, forward_only=forward_only)
        for row in program.instructions:
            assert {(i.op, i.unit): i.tick for i in shared(row)} == ticks, shape
            assert len(shared(row)) == len(ticks), shape
            assert moments(row) == sorted(moments(row)), shape
            assert shared(row) == shared(program.instructions[0]), shape
        check(program)


@pytest.mark.parametrize("vocab_parallel", ["output", "both"])
def test_nothing_else_changes(vocab_parallel: str) -> None:
    """Units and messages are those of the same program without shared vocabulary, in the same order."""
    for shape in [(1, 2, 2, 2), (2, 7, 2, 2), (3, 6, 1, 4), (4, 4, 2, 1), (4, 6, 3, 3)]:
        for options in (None, SlimPipeOptions(context_exchange="on", exchange_granularity=1)):
            plain = build_program(*shape, slice_len=8, options=options)
            program = build_program(*shape, slice_len=8, options=options, vocab_parallel=vocab_parallel)
            without = [tuple(i for i in row if i.op not in SHARED) for row in program.instructions]
            assert replace(program, instructions=tuple(without), vocab_parallel="none") == plain


def test_a_tick_in_full() -> None:
    """The first backward of a microbatch needs the loss of the last slice in the same tick; no send waits for it."""
    program = build_program(2, 2, 1, 1, vocab_parallel="both")
    first, last = ([(i.tick, i.op.value, i.unit.slice) for i in row] for row in program.instructions)
    assert first == [
        (0, "E", 0), (0, "F", 0), (0, "SF", 0),
        (1, "E", 1), (1, "RB", 1), (1, "F", 1), (1, "SF", 1), (1, "V", 0),
        (2, "V", 1),
        (3, "RB", 0), (3, "B", 1), (3, "EB", 1),
        (4, "B", 0), (4, "EB", 0),
    ]  # fmt: skip
    assert last == [
        (0, "E", 0), (1, "E", 1),
        (1, "RF", 0), (1, "RF", 1), (1, "F", 0), (1, "V", 0),
        (2, "F", 1), (2, "V", 1), (2, "B", 1), (2, "SB", 1),
        (3, "B", 0), (3, "SB", 0), (3, "EB", 1),
        (4, "EB", 0),
    ]  # fmt: skip


@given(
    shapes(max_ranks=10, max_slices=24, max_stages=3, max_microbatches=4),
    st.sampled_from(["output", "both"]),
    st.booleans(),
    st.sampled_from(["off", "on"]),
)
@settings(max_examples=30, deadline=None)
def test_larger_programs_pass(shape: Shape, vocab_parallel: str, forward_only: bool, exchange: str) -> None:
    program = build_program(
        *shape,
        slice_len=16,
        forward_only=forward_only,
        options=SlimPipeOptions(context_exchange=exchange, exchange_granularity=1),
        vocab_parallel=vocab_parallel,
    )
    ticks = expected_ticks(shape, vocab_parallel, forward_only=forward_only)
    assert {(i.op, i.unit): i.tick for i in shared(program.instructions[-1])} == ticks
    check(program)


@pytest.mark.parametrize(
    ("value", "nearest"), [("outputs", "output"), ("Both", "both"), ("non", "none"), (None, "none"), (True, ".*")]
)
def test_illegal_values(value: object, nearest: str) -> None:
    rule = "it must be one of none, output, both; nearest legal value"
    with pytest.raises(ValueError, match=f"^vocab_parallel = {value!r}: {rule}: '{nearest}'$"):
        build_program(2, 2, 1, 1, vocab_parallel=value)


# What check sees -----------------------------------------------------------------------------------------------------

SHAPE = (2, 4, 2, 2)
LAST = 3
"""Its last stage."""
Edit = Callable[[list[Instruction]], None]


def change(program: Program, ranks: Iterable[int], edit: Edit) -> Program:
    """The program with the lists of some ranks edited alike."""
    rows = [list(row) for row in program.instructions]
    for rank in ranks:
        edit(rows[rank])
    return replace(program, instructions=tuple(map(tuple, rows)))


def find(row: list[Instruction], op: Op, slice_: int) -> int:
    return next(i for i, entry in enumerate(row) if entry.op is op and entry.unit.slice == slice_)


def drop(op: Op) -> Edit:
    return lambda row: row.remove(row[find(row, op, 1)])


def double(op: Op) -> Edit:
    return lambda row: row.insert(find(row, op, 1), row[find(row, op, 1)])


def swap(op: Op) -> Edit:
    """Exchange the units of two instructions of one kind."""

    def edit(row: list[Instruction]) -> None:
        i, j = find(row, op, 1), find(row, op, 2)
        row[i], row[j] = row[i]._replace(unit=row[j].unit), row[j]._replace(unit=row[i].unit)

    return edit


def delay(op: Op) -> Edit:
    """Move to its place in the next tick."""

    def edit(row: list[Instruction]) -> None:
        entry = row.pop(find(row, op, 1))
        entry = entry._replace(tick=entry.tick + 1)
        later = (i for i, other in enumerate(row) if other.op in PLACES and moments([other]) > moments([entry]))
        row.insert(next(later, len(row)), entry)

    return edit


def misplace(op: Op) -> Edit:
    """Move behind everything else of its tick, or before it where it is the last anyway."""

    def edit(row: list[Instruction]) -> None:
        entry = row.pop(find(row, op, 1))
        in_tick = [i for i, other in enumerate(row) if other.tick == entry.tick]
        row.insert(in_tick[-1] + 1 if op is E else in_tick[0], entry)

    return edit


def elsewhere(op: Op) -> Edit:
    """Name a microbatch that there is not."""

    def edit(row: list[Instruction]) -> None:
        index = find(row, op, 1)
        row[index] = row[index]._replace(unit=row[index].unit._replace(microbatch=SHAPE[3]))

    return edit


def other_stage(op: Op) -> Edit:
    def edit(row: list[Instruction]) -> None:
        index = find(row, op, 1)
        row[index] = row[index]._replace(unit=row[index].unit._replace(stage=1))

    return edit


def with_peer(op: Op) -> Edit:
    def edit(row: list[Instruction]) -> None:
        index = find(row, op, 1)
        row[index] = row[index]._replace(peer=1)

    return edit


OF_ALL = {
    drop: "share {} of 7 units; there are 2 microbatches x 4 slices",
    double: "rank 0 has {} .* twice",
    swap: r"{} \(.*\): its unit runs (forward|backward) at tick \d+",
    delay: r"{} \(.*\): its unit runs (forward|backward) at tick \d+",
    misplace: "comes after an instruction of a later moment",
    elsewhere: "share {} of microbatch 2, .*nobody asked for it",
    other_stage: "share {} of microbatch 0, stage 1, slice 1.*nobody asked for it",
    with_peer: "{} with rank 1 .*: the other end should be no message",
}
OF_ONE = {
    drop: "rank 1 has .* where rank 0 has {}",
    double: "rank 1 has {} .* twice",
    swap: "rank 1 has {} .* where rank 0 has {}",
    delay: "rank 1 has .* where rank 0 has {}",
    misplace: "comes after an instruction of a later moment|rank 1 has .* where rank 0 has .*",
    elsewhere: "rank 1 has {} .* where rank 0 has {}",
    other_stage: "rank 1 has {} .* where rank 0 has {}",
    with_peer: "{} with rank 1 .*: the other end should be no message",
}


@pytest.mark.parametrize("ranks", [(1,), (0, 1)], ids=["one", "all"])
@pytest.mark.parametrize("op", SHARED, ids=lambda op: op.value)
@pytest.mark.parametrize("damage", OF_ALL)
def test_damage(damage: Callable[[Op], Edit], op: Op, ranks: tuple[int, ...]) -> None:
    program = change(build_program(*SHAPE, vocab_parallel="both"), ranks, damage(op))
    with pytest.raises(ProgramError) as error:
        check(program)
    pattern = (OF_ONE if len(ranks) == 1 else OF_ALL)[damage].replace("{}", op.name.lower())
    assert re.search(pattern, str(error.value)), str(error.value)


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("built", VOCAB_PARALLEL_NAMES)
@pytest.mark.parametrize("said", VOCAB_PARALLEL_NAMES)
def test_the_program_shares_what_it_says(built: str, said: str, forward_only: bool) -> None:
    program = replace(build_program(*SHAPE, vocab_parallel=built, forward_only=forward_only), vocab_parallel=said)
    if said == built:
        return check(program)
    with pytest.raises(ProgramError, match=r"the ranks share (vocabulary|embed|embed_backward) of "):
        check(program)
    return None


@pytest.mark.parametrize("op", SHARED)
def test_shared_work_that_nobody_asked_for(op: Op) -> None:
    """One more instruction on every rank; in a program that only runs forward, nothing goes backward."""
    vocab_parallel = {E: "output", V: "none", EB: "both"}[op]
    program = build_program(*SHAPE, vocab_parallel=vocab_parallel, forward_only=True)
    more = Instruction(program.num_ticks - 1, op, Unit(1, LAST if op is V else 0, 3))
    rows = tuple((*row, more) for row in program.instructions)
    with pytest.raises(ProgramError, match=f"the ranks share {op.name.lower()} of microbatch 1, .* nobody asked"):
        check(replace(program, instructions=rows))


@given(
    shapes(max_ranks=4, max_slices=6, max_stages=2, max_microbatches=3),
    st.sampled_from(["output", "both"]),
    st.booleans(),
    st.data(),
)
@settings(max_examples=200, deadline=None)
def test_no_change_goes_unseen(shape: Shape, vocab_parallel: str, forward_only: bool, data: st.DataObject) -> None:
    """Drop, repeat, redirect or move any shared instruction, on one rank or on all."""
    program = build_program(*shape, vocab_parallel=vocab_parallel, forward_only=forward_only)
    entry = data.draw(st.sampled_from(shared(program.instructions[0])))
    kind = data.draw(st.sampled_from(["drop", "repeat", "peer", "tick", "unit", "exchange"]))
    ranks = data.draw(st.sampled_from([range(program.num_ranks), [data.draw(st.integers(0, program.num_ranks - 1))]]))
    unit = entry.unit._replace(
        **data.draw(
            st.sampled_from(
                [
                    {"slice": entry.unit.slice + 1},
                    {"stage": entry.unit.stage + 1},
                    {"microbatch": entry.unit.microbatch - 1},
                ]
            )
        )
    )
    ticks = data.draw(st.sampled_from([-1, 1, 99]))
    other = data.draw(st.sampled_from([o for o in shared(program.instructions[0]) if o != entry] or [None]))

    def edit(row: list[Instruction]) -> None:
        index = row.index(entry)
        if kind == "drop" or (kind == "exchange" and other is None):
            del row[index]
        elif kind == "repeat":
            row.insert(index, entry)
        elif kind == "peer":
            row[index] = entry._replace(peer=0)
        elif kind == "unit":
            row[index] = entry._replace(unit=unit)
        elif kind == "tick":
            row[index] = entry._replace(tick=entry.tick + ticks)
        else:
            index_of_other = row.index(other)
            row[index], row[index_of_other] = other, entry

    with pytest.raises(ProgramError):
        check(change(program, ranks, edit))
