"""A timeline as a trace in the JSON format of Chrome, which Perfetto (ui.perfetto.dev) opens.

A process per rank, with a track for what computes and tracks for messages; a wait is an event inside its span. On one
track events are nested or apart, never crossing: messages that overlap get tracks of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from slimpipe.planner.draw import live_units
from slimpipe.planner.timeline import MESSAGE_KINDS, Span, Timeline

_MICROSECONDS = 1e6


def to_trace(timelines: Sequence[Timeline]) -> str:
    """The trace, as text of a JSON file. Several timelines stand below one another and begin together."""
    events: list[dict[str, Any]] = []
    process = 0
    for timeline in timelines:
        for rank in range(timeline.num_ranks):
            name = f"rank {rank}" if len(timelines) == 1 else f"rank {rank} of {timeline.title}"
            events += [{**event, "pid": process} for event in _rank_events(timeline, rank)]
            events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
            events.append({"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}})
            process += 1
    return json.dumps({"displayTimeUnit": "ns", "traceEvents": events})


def _rank_events(timeline: Timeline, rank: int) -> Iterator[dict[str, Any]]:
    """Without the process, which is the rank's."""
    spans = timeline.of_rank(rank)
    tracks = [("compute", [span for span in spans if not span.is_message])]
    for kind in MESSAGE_KINDS:
        lanes = _apart([span for span in spans if span.kind == kind])
        tracks += [(f"{kind} {index}" if index else kind, lane) for index, lane in enumerate(lanes)]
    for track, (name, lane) in enumerate(tracks):
        yield {"ph": "M", "name": "thread_name", "tid": track, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "tid": track, "args": {"sort_index": track}}
        for span in lane:
            yield from _span_events(span, track)
    for step in live_units(timeline, rank):
        yield {
            "ph": "C",
            "name": "live units",
            "ts": _round(step.time),
            "args": {"units": step.num_units},
        }


def _span_events(span: Span, track: int) -> Iterator[dict[str, Any]]:
    where = {"ph": "X", "tid": track}
    start, end = _round(span.start), _round(span.end)
    details: dict[str, Any] = {"tick": span.tick, "bytes": span.num_bytes or None}
    name = span.kind
    if span.unit is not None:
        details |= span.unit._asdict()
        name += f" {span.unit.microbatch}.{span.unit.slice} stage {span.unit.stage}"
    args = {key: value for key, value in details.items() if value is not None}
    yield {**where, "name": name, "cat": span.kind, "ts": start, "dur": _length(start, end), "args": args}
    waited_until = _round(min(span.start + span.waited, span.end))
    if waited_until > start and not span.is_message:
        yield {**where, "name": "wait", "cat": "wait", "ts": start, "dur": _length(start, waited_until)}


def _apart(spans: list[Span]) -> list[list[Span]]:
    """As few lanes as it takes for no two spans of one lane to overlap; at least one lane."""
    lanes: list[list[Span]] = [[]]
    for span in spans:  # by start
        lane = next((lane for lane in lanes if not lane or lane[-1].end <= span.start), None)
        if lane is None:
            lanes.append([span])
        else:
            lane.append(span)
    return lanes


def _round(seconds: float) -> float:
    return round(seconds * _MICROSECONDS, 3)


def _length(start: float, end: float) -> float:
    return round(end - start, 3)
