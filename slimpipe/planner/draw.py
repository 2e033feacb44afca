"""What there is to draw of a timeline on any canvas: bars, their names and shades, and the activations that live."""

from __future__ import annotations

import string
from collections.abc import Iterator
from typing import NamedTuple

from slimpipe.planner.timeline import Span, Timeline

ROLES = ("forward", "backward", "help", "vocabulary")
"""What a bar is, for its colour. Where there is none, the rank is idle or waits."""

_ROLE_OF = {"F": "forward", "B": "backward", "I": "backward", "W": "backward", "help F": "help", "help B": "help"}


class Bar(NamedTuple):
    """Time in which a rank computes, waits left out."""

    rank: int
    role: str
    """One of `ROLES`."""
    start: float
    end: float
    context: float
    """Share of the sequence that its slice sees, above 0 and at most 1; 1 where there is no such thing."""
    span: Span


class Live(NamedTuple):
    """From this moment on, so many units live on a rank: between start of their forward and end of their backward."""

    time: float
    num_units: int


def bars(timeline: Timeline) -> Iterator[Bar]:
    """What ranks compute, by rank and time. The wait inside a span, which comes first, is cut off."""
    for span in timeline.spans:
        start = min(span.start + span.waited, span.end)
        if span.is_message or start == span.end:
            continue
        role = _ROLE_OF.get(span.kind, "vocabulary")
        sliced = role in ("forward", "backward") and span.unit is not None
        context = (span.unit.slice + 1) / timeline.num_slices if sliced and span.unit else 1.0
        yield Bar(span.rank, role, start, span.end, context, span)


def names(bar: Bar, timeline: Timeline) -> Iterator[str]:
    """Names of a bar, the longest first, for the room that there is.

    ``a3.1'``: of the first microbatch (a) slice 3 on local stage 1, backward ('); of whole microbatches ``a``. ``a3"``
    are weight gradients, ``+`` helps others, ``$`` is work on the vocabulary.
    """
    unit = bar.span.unit
    if bar.role == "help":
        yield "+"
    elif bar.role == "vocabulary":
        if unit is not None:
            yield f"{bar.span.kind}{unit.slice}"
        yield bar.span.kind
        yield "$"
    elif unit is not None:
        mark = {"B": "'", "I": "'", "W": '"'}.get(bar.span.kind, "")
        microbatch = _microbatch_name(unit.microbatch)
        slice_name = str(unit.slice) if timeline.num_slices > 1 else ""
        if timeline.num_stages_per_rank > 1:
            yield f"{microbatch}{slice_name}.{unit.stage // timeline.num_ranks}{mark}"
        yield f"{microbatch}{slice_name}{mark}"
        yield f"{slice_name or microbatch}{mark}"
        yield slice_name or microbatch


def live_units(timeline: Timeline, rank: int) -> list[Live]:
    """How many units live on a rank, as steps in time; the first step is at 0."""
    spans = [span for span in timeline.of_rank(rank) if span.unit is not None]
    apart = {span.unit for span in spans if span.kind == "W"}
    changes: list[tuple[float, int]] = []
    for span in spans:
        if span.kind == "F":
            changes.append((span.start, 1))
        elif span.kind == "W" or (span.kind == "B" and span.unit not in apart):
            changes.append((span.end, -1))
    steps = [Live(0.0, 0)]
    for time, change in sorted(changes):  # an end before a start of the same moment
        step = Live(time, steps[-1].num_units + change)
        if time == steps[-1].time:
            steps[-1] = step
        else:
            steps.append(step)
    return steps


def microbatches(num_units: float, timeline: Timeline) -> float:
    """Units of a rank as a share of one microbatch's activations in the whole model, if all stages are alike."""
    return num_units / (timeline.num_slices * timeline.num_stages_per_rank * timeline.num_ranks)


def peak_units(timeline: Timeline, rank: int) -> int:
    """Most units that live on a rank at one time."""
    return max(step.num_units for step in live_units(timeline, rank))


def peak_microbatches(timeline: Timeline, rank: int) -> float:
    """The same as `microbatches`."""
    return microbatches(peak_units(timeline, rank), timeline)


def _microbatch_name(index: int) -> str:
    """a..z, then aa, ab, ..."""
    letters = string.ascii_lowercase
    return letters[index] if index < 26 else letters[index // 26 % 26 - 1] + letters[index % 26]
