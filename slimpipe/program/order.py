"""The order of units and the ticks at which they run: the whole schedule, as arithmetic.

One schedule serves any number of stages per rank. The slices of a microbatch go through a rank's stages in cycles: a
cycle is some consecutive slices on the first local stage, the same slices on the second, and so on. Backward is the
exact reverse inside a microbatch; microbatches are first-in first-out in both directions. All ranks follow the same
order, one tick apart per hop.

A *forward index* f counts a rank's forward units from the start of the step, a *backward index* b its backward units.
"""

from __future__ import annotations

from collections.abc import Iterator


def cycle_size(num_slices: int, num_ranks: int) -> int:
    """Slices per cycle: the smallest divisor of ``num_slices`` that is at least ``num_ranks``.

    At least ``num_ranks``, so that a slice which left the last rank is back at the first before its next stage begins.
    """
    return next(size for size in range(num_ranks, num_slices + 1) if num_slices % size == 0)


def forward_order(num_slices: int, *, num_ranks: int, num_stages_per_rank: int) -> Iterator[tuple[int, int]]:
    """(local stage, slice) of each forward unit of one microbatch, in order; the same on every rank."""
    cycle = cycle_size(num_slices, num_ranks)
    for first_slice in range(0, num_slices, cycle):
        for local_stage in range(num_stages_per_rank):
            for slice_index in range(first_slice, first_slice + cycle):
                yield local_stage, slice_index


def live_units(rank: int, *, num_ranks: int, num_slices: int, num_stages_per_rank: int, num_microbatches: int) -> int:
    """Units that are live on ``rank`` at its first backward, its peak: one microbatch's, and two for each hop between
    this rank and the last, because a hop takes one tick in either direction; never more than there are."""
    units_per_microbatch = num_slices * num_stages_per_rank
    hops_to_last_rank = num_ranks - 1 - rank
    return min(units_per_microbatch + 2 * hops_to_last_rank, num_microbatches * units_per_microbatch)


def forward_tick(forward_index: int, *, rank: int) -> int:
    """Tick of a forward unit: one per unit, one later for each hop from the first rank."""
    return forward_index + rank


def backward_tick(backward_index: int, *, rank: int, num_ranks: int, num_slices: int, num_stages_per_rank: int) -> int:
    """Tick of a backward unit: the last rank begins when it has forwarded a microbatch, the others a tick per hop
    later. In one tick, forward comes before backward."""
    last_rank = num_ranks - 1
    first_on_last_rank = forward_tick(num_slices * num_stages_per_rank - 1, rank=last_rank)
    return first_on_last_rank + (last_rank - rank) + backward_index


def hop_ticks(rank: int, *, num_ranks: int, num_slices: int, forward: bool) -> int:
    """Ticks from a unit on ``rank`` to the same slice on its next stage (forward) or its previous one (backward).

    One between neighbours; between the last rank and the first, where a slice waits for the rest of its cycle, more if
    the cycle is longer than the pipeline.
    """
    turning_rank = num_ranks - 1 if forward else 0
    return 1 + cycle_size(num_slices, num_ranks) - num_ranks if rank == turning_rank else 1
