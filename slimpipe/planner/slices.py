"""How many units, and how much K,V, a rank holds at its peak: read from the order of units, without building a program.

For a search over many layouts. Where a program is at hand, `Program.peak_live_units` and `plan_slots` say the same of
it (a test compares); slots and messages are here the most that there can be.
"""

from __future__ import annotations

from functools import lru_cache

from slimpipe.planner.layout import Layout
from slimpipe.program.ir import MAX_UNMATCHED_SENDS
from slimpipe.program.order import backward_tick, forward_order, forward_tick, live_units

_MICROBATCHES = 3
"""Nothing changes with more of them, once the live units are no longer capped."""


def peak_live(layout: Layout, rank: int) -> int:
    """Most units of a rank between the start of their forward and the end of their backward, one stage each."""
    p, m, v = layout.pipeline, layout.num_microbatches, layout.stages_per_rank
    if layout.schedule == "1F1B":
        return min(m, p - rank)
    if layout.schedule == "Interleaved1F1B":
        return min(m * v, 2 * (p - 1 - rank) + (v - 1) * p + 1)
    return live_units(rank, num_ranks=p, num_slices=layout.num_slices, num_stages_per_rank=v, num_microbatches=m)


def peak_live_of_stage(layout: Layout, rank: int, local_stage: int) -> int:
    """The same, of one stage of a rank."""
    if layout.schedule != "SlimPipe":
        before = layout.pipeline * local_stage  # of the other stages, at the first backward
        return max(1, min(layout.num_microbatches, peak_live(layout, rank) - before))
    return _stage_peaks(
        layout.pipeline,
        layout.num_slices,
        layout.stages_per_rank,
        min(layout.num_microbatches, _capped(layout) + _MICROBATCHES),
        rank,
    )[local_stage]


def most_slots(layout: Layout, rank: int) -> int:
    """K,V slots of a rank: the most that `plan_slots` takes for all its stages together."""
    total = 0
    for stage in range(layout.stages_per_rank):
        peak = peak_live_of_stage(layout, rank, stage)
        whole, more = divmod(peak, layout.num_slices)
        enough = whole == 0 or more == 0 or (whole == 1 and layout.num_microbatches <= 2)
        total += peak if enough else peak + min(more, layout.num_slices - more)
    return total


def waiting_gradients(layout: Layout) -> int:
    """Slices of dK,dV, of one stage's layers each, that wait for the backward of earlier slices, at most.

    From its first backward on a stage keeps the dK,dV of all slices but the last, until the one of slice 0. In cycles a
    rank comes to all its stages before it ends the first.
    """
    stages = layout.stages_per_rank if layout.num_slices > layout.cycle else 1
    return stages * (layout.num_slices - 1)


def most_messages(layout: Layout, rank: int) -> int:
    """Most messages between stages that a rank holds: receives posted ahead, and sends under way."""
    if layout.schedule != "SlimPipe":  # torch keeps a buffer for every microbatch and direction, and what it has sent
        return 2 * layout.num_microbatches * layout.stages_per_rank
    is_end = rank in (0, layout.pipeline - 1) and layout.stages_per_rank == 1
    return 2 + (1 if is_end else 2) * MAX_UNMATCHED_SENDS


def _capped(layout: Layout) -> int:
    """Microbatches that are live at a time, at most."""
    return -(-2 * layout.pipeline // (layout.num_slices * layout.stages_per_rank))


@lru_cache(maxsize=4096)
def _stage_peaks(p: int, n: int, v: int, m: int, rank: int) -> tuple[int, ...]:
    order = [stage for stage, _ in forward_order(n, num_ranks=p, num_stages_per_rank=v)]
    first = backward_tick(0, rank=rank, num_ranks=p, num_slices=n, num_stages_per_rank=v)
    live, peaks = [0] * v, [0] * v
    done = 0
    for index in range(m * n * v):
        # Of one tick, the forward comes first.
        while first + done < forward_tick(index, rank=rank):
            live[order[-1 - done % len(order)]] -= 1
            done += 1
        stage = order[index % len(order)]
        live[stage] += 1
        peaks[stage] = max(peaks[stage], live[stage])
    return tuple(peaks)
