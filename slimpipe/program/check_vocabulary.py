"""Proof that the ranks of a program share the vocabulary's work without getting in each other's way."""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest

from slimpipe.program.ir import Instruction, Op, Unit
from slimpipe.program.program import Program, ProgramError

# What is shared, with the work that it belongs to: whose rank runs it, and on which side of it the shared work stands.
_BESIDE = {Op.EMBED: Op.FORWARD, Op.VOCABULARY: Op.FORWARD, Op.EMBED_BACKWARD: Op.BACKWARD}


def check_vocabulary(program: Program) -> None:
    """Proves the instructions that work on the vocabulary.

    Guarantees that all ranks have the same ones in the same order, which is the order of collectives on their
    communicators; that they are exactly those that ``vocab_parallel`` asks for, each once; and that each stands in the
    tick of its unit's own forward or backward. That in a tick they come in their places, and so after what they need
    and before what needs them, is one of the rules that `check` proves for all instructions.

    Raises:
        ProgramError: at the first rule that is broken.
    """
    rows = [[i for i in row if i.op.is_shared] for row in program.instructions]
    for rank, row in enumerate(rows[1:], start=1):
        if row != rows[0]:
            other, mine = _first_difference(rows[0], row)
            raise ProgramError(f"rank {rank} has {mine} where rank 0 has {other}: all must share work in one order")
    _check_complete(program, rows[0])
    _check_moments(program, rows[0])


def _check_complete(program: Program, shared: list[Instruction]) -> None:
    stages = {}
    if program.vocab_parallel != "none":
        stages[Op.VOCABULARY] = program.num_stages - 1
    if program.vocab_parallel == "both":
        stages |= {Op.EMBED: 0} if program.forward_only else {Op.EMBED: 0, Op.EMBED_BACKWARD: 0}
    wanted = {
        (op, Unit(microbatch, stage, slice_index))
        for op, stage in stages.items()
        for microbatch in range(program.num_microbatches)
        for slice_index in range(program.num_slices)
    }
    counts = Counter((i.op, i.unit) for i in shared)
    for (op, unit), count in counts.items():
        if (op, unit) not in wanted or count > 1:
            raise ProgramError(
                f"the ranks share {op.name.lower()} of {unit} {count} times; nobody asked for it so often"
            )
    for op in stages:
        num_units = sum(key[0] is op for key in counts)
        if num_units != program.num_microbatches * program.num_slices:
            raise ProgramError(
                f"the ranks share {op.name.lower()} of {num_units} units; there are {program.num_microbatches} "
                f"microbatches x {program.num_slices} slices"
            )


def _check_moments(program: Program, shared: list[Instruction]) -> None:
    ticks: dict[tuple[Op, Unit], int] = {
        (i.op, i.unit): i.tick for row in program.instructions for i in row if i.op in (Op.FORWARD, Op.BACKWARD)
    }
    for instruction in shared:
        tick = ticks[_BESIDE[instruction.op], instruction.unit]
        if instruction.tick != tick:
            raise ProgramError(f"{instruction}: its unit runs {_BESIDE[instruction.op].name.lower()} at tick {tick}")


def _first_difference(left: list[Instruction], right: list[Instruction]) -> tuple[object, object]:
    """The entries at the first place where two lists differ."""
    return next(pair for pair in zip_longest(left, right, fillvalue="nothing") if pair[0] != pair[1])
