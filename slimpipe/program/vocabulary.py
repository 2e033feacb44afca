"""Work on the vocabulary that all ranks share, and the ticks at which they do it.

The output layer with its loss is as heavy as several layers, so no single stage should hold it. Every rank holds some
rows of the vocabulary and works on every slice: right after the last stage has run it forward, because the last slice
of a microbatch goes backward in that very tick. The input embedding may be shared alike: right before the first stage
runs a slice forward, and right after it has run it backward. So a tick has five places: E, F, V, B, EB.

All ranks run the same list, in the same order, also those that have no unit of their own at the time.
"""

from __future__ import annotations

from slimpipe.program.ir import Instruction, Op


def shared_instructions(
    computes: list[list[Instruction]], *, num_stages: int, vocab_parallel: str
) -> list[Instruction]:
    """What every rank does for the vocabulary, in order.

    Args:
        computes: units of each rank, forward and backward, by tick.
        num_stages: stages of the whole pipeline.
        vocab_parallel: "none", "output" or "both".
    """
    shared: list[Instruction] = []
    if vocab_parallel == "none":
        return shared
    shared += [
        Instruction(tick, Op.VOCABULARY, unit)
        for tick, op, unit, _ in computes[-1]
        if op is Op.FORWARD and unit.stage == num_stages - 1
    ]
    if vocab_parallel == "both":
        of = {Op.FORWARD: Op.EMBED, Op.BACKWARD: Op.EMBED_BACKWARD}
        shared += [Instruction(tick, of[op], unit) for tick, op, unit, _ in computes[0] if unit.stage == 0]
    return sorted(shared, key=lambda instruction: (instruction.tick, instruction.op.place))
