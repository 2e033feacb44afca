"""A step as its ranks recorded it, in the form in which steps are simulated."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from slimpipe.gather import gather_objects
from slimpipe.planner.timeline import KIND_OF, Span, Timeline
from slimpipe.program import Program
from slimpipe.program.ir import COMPUTE_OF, RECEIVE_OF
from slimpipe.runtime.record import InstructionTime, StepRecord


def spans_of(times: Sequence[InstructionTime], *, rank: int, origin: float) -> Iterator[Span]:
    """Instructions of a rank as spans, in seconds from ``origin``.

    A send lasts as long as its instruction, a receive from its posting until its unit has what it waited for.
    """
    used = {(it.instruction.op, it.instruction.unit): it for it in times}
    for it in times:
        tick, op, unit, _ = it.instruction
        end, num_bytes, waited = it.end, it.num_bytes, it.waited
        if op in RECEIVE_OF.values():
            user = used[COMPUTE_OF[op], unit]
            end, num_bytes, waited = max(end, user.start + user.waited), user.num_bytes, 0.0
        elif op in RECEIVE_OF:
            num_bytes = 0  # they are the receive's
        start = it.start - origin
        yield Span(rank, KIND_OF[op], start, end - origin, unit, tick, min(waited, end - it.start), num_bytes)


def gather_timeline(
    record: StepRecord,
    program: Program,
    *,
    rank: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
    title: str,
) -> Timeline:
    """The last step of all ranks. Collective over ``group``; None where there is but one rank.

    Clocks of ranks are compared by their time of day: to microseconds on one machine, as well as the machines' clocks
    agree on several. On GPUs instructions are timed as they run there, by events; what they wait for in the exchange
    and in the vocabulary's collectives is part of their time and not told apart.

    Raises:
        ValueError: Nothing was recorded.
    """
    if not record.times:
        raise ValueError("SlimPipeOptions.record_times = False: no step was recorded; nearest legal value: True")
    epoch = time.perf_counter() - time.time()
    mine = list(spans_of(record.times, rank=rank, origin=epoch))
    everyone = [mine] if group is None else gather_objects(mine, group=group, device=device)
    spans = [span for row in everyone for span in row]
    first = min(span.start for span in spans)
    shifted = [replace(span, start=span.start - first, end=span.end - first) for span in spans]
    return Timeline(title, program.num_ranks, program.num_slices, program.num_stages_per_rank, tuple(shifted))
