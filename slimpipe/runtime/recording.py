"""A step as its ranks recorded it, in the form in which steps are simulated."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from slimpipe.planner.timeline import Span, Timeline
from slimpipe.program import Op, Program
from slimpipe.runtime.executor import InstructionTime, StepRecord

_KIND = {
    Op.FORWARD: "F",
    Op.BACKWARD: "B",
    Op.HELP_FORWARD: "help F",
    Op.HELP_BACKWARD: "help B",
    Op.EMBED: "E",
    Op.VOCABULARY: "V",
    Op.EMBED_BACKWARD: "EB",
    Op.SEND_FORWARD: "send",
    Op.SEND_BACKWARD: "send",
    Op.RECEIVE_FORWARD: "receive",
    Op.RECEIVE_BACKWARD: "receive",
}
_USER_OF = {Op.RECEIVE_FORWARD: Op.FORWARD, Op.RECEIVE_BACKWARD: Op.BACKWARD}


def spans_of(times: Sequence[InstructionTime], *, rank: int, origin: float) -> Iterator[Span]:
    """Instructions of a rank as spans, in seconds from ``origin``.

    A send lasts as long as its instruction, a receive from its posting until its unit has what it waited for.
    """
    used = {(it.instruction.op, it.instruction.unit): it for it in times}
    for it in times:
        tick, op, unit, _ = it.instruction
        end, num_bytes, waited = it.end, it.num_bytes, it.waited
        if op in _USER_OF:
            user = used[_USER_OF[op], unit]
            end, num_bytes, waited = max(end, user.start + user.waited), user.num_bytes, 0.0
        elif op in (Op.FORWARD, Op.BACKWARD):
            num_bytes = 0  # they are the receive's
        start = it.start - origin
        yield Span(rank, _KIND[op], start, end - origin, unit, tick, min(waited, end - it.start), num_bytes)


def gather_timeline(
    record: StepRecord, program: Program, *, rank: int, group: dist.ProcessGroup | None, title: str
) -> Timeline:
    """The last step of all ranks. Collective over ``group``; None where there is but one rank.

    Clocks of ranks are compared by their time of day: to microseconds on one machine, as well as the machines' clocks
    agree on several. On GPUs they are the hosts' times: of instructions as they are queued, not as they run.

    Raises:
        ValueError: Nothing was recorded.
    """
    if not record.times:
        raise ValueError("SlimPipeOptions.record_times = False: no step was recorded; nearest legal value: True")
    epoch = time.perf_counter() - time.time()
    mine = list(spans_of(record.times, rank=rank, origin=epoch))
    everyone: list[list[Span] | None] = [mine]
    if group is not None:
        everyone = [None] * program.num_ranks
        dist.all_gather_object(everyone, mine, group=group)
    spans = [span for row in everyone for span in row or ()]
    first = min(span.start for span in spans)
    shifted = [
        Span(it.rank, it.kind, it.start - first, it.end - first, it.unit, it.tick, it.waited, it.num_bytes)
        for it in spans
    ]
    return Timeline(title, program.num_ranks, program.num_slices, program.num_stages_per_rank, tuple(shifted))
