"""Shapes of programs for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import strategies as st

from slimpipe.options import SlimPipeOptions
from slimpipe.program import Program, build_program

Shape = tuple[int, int, int, int]
"""(num_ranks, num_slices, num_stages_per_rank, num_microbatches), the first arguments of `build_program`."""


def small_shapes() -> Iterator[Shape]:
    """Every shape up to 5 ranks, 10 slices, 3 stages per rank and 5 microbatches."""
    for num_ranks in range(1, 6):
        for num_slices in range(num_ranks, 11):
            for num_stages_per_rank in (1, 2, 3):
                for num_microbatches in (1, 2, 3, 5):
                    yield num_ranks, num_slices, num_stages_per_rank, num_microbatches


@st.composite
def shapes(
    draw: st.DrawFn, *, max_ranks: int = 16, max_slices: int = 40, max_stages: int = 4, max_microbatches: int = 9
) -> Shape:
    """A shape for hypothesis; large ones are rare, so that many can be tried."""
    num_ranks = draw(st.integers(1, max_ranks))
    num_slices = draw(st.integers(num_ranks, max(num_ranks, min(3 * num_ranks, max_slices))))
    return num_ranks, num_slices, draw(st.integers(1, max_stages)), draw(st.integers(1, max_microbatches))


def programs(**limits: int) -> st.SearchStrategy[Program]:
    """A program of such a shape, with backward or without."""
    return st.builds(
        lambda shape, forward_only: build_program(*shape, forward_only=forward_only), shapes(**limits), st.booleans()
    )


def with_exchange(
    shape: Shape,
    *,
    slice_len: int = 1024,
    granularity: int = 1,
    max_slices: int = SlimPipeOptions.exchange_max_slices,
    forward_only: bool = False,
) -> Program:
    """A program whose ranks help one another wherever that levels their loads."""
    options = SlimPipeOptions(context_exchange="on", exchange_granularity=granularity, exchange_max_slices=max_slices)
    return build_program(*shape, slice_len=slice_len, forward_only=forward_only, options=options)


@st.composite
def programs_with_exchange(draw: st.DrawFn, **limits: int) -> Program:
    """Such a program; the granularity may be more than a slice, the slice no multiple of it."""
    return with_exchange(
        draw(shapes(**limits)),
        slice_len=draw(st.integers(1, 40)),
        granularity=draw(st.integers(1, 50)),
        max_slices=draw(st.integers(0, 20)),
        forward_only=draw(st.booleans()),
    )
