"""A trace that Perfetto opens: known phases, one process per rank, events of a track nested or apart."""

import json
from collections import defaultdict
from dataclasses import replace

import pytest

from slimpipe.planner.costs import Link
from slimpipe.planner.shown import timeline_of
from slimpipe.planner.timeline import Span, Timeline
from slimpipe.planner.trace import to_trace
from slimpipe.program import Unit
from tests.unit.planner.settings import setting


def nested(events) -> bool:
    """Whether no two events of one track cross."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        open_ends = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= start + 1e-4:
                open_ends.pop()
            if open_ends and end > open_ends[-1] + 1e-4:
                return False
            open_ends.append(end)
    return True


def events_of(*timelines: Timeline) -> list[dict]:
    return json.loads(to_trace(timelines))["traceEvents"]


@pytest.mark.parametrize("schedule", ["SlimPipe", "InterleavedSlimPipe", "1F1B", "ZBVZeroBubble"])
def test_events_are_nested_and_complete(schedule):
    common = setting(p=3, n=6, m=6, exchange="on")
    slow = replace(common, costs=replace(common.costs_of(schedule), link=Link(latency=0.3)))
    timeline = timeline_of(schedule, slow)
    events = events_of(timeline)
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    assert nested(events)
    assert {event["pid"] for event in events} == set(range(3))
    spans = [event for event in events if event["ph"] == "X" and event["name"] != "wait"]
    assert len(spans) == len(timeline.spans)
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(timeline.seconds * 1e6, abs=0.01)
    named = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert named == ["rank 0", "rank 1", "rank 2"]
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_messages_that_overlap_get_tracks_of_their_own():
    spans = [Span(0, "receive", start, start + 3.0, Unit(0, 0, int(start)), num_bytes=8) for start in (0.0, 1.0, 3.0)]
    events = events_of(Timeline("", 1, 4, 1, tuple(spans)))
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(tracks.values()) == ["compute", "send", "receive", "receive 1"]
    assert [tracks[event["tid"]] for event in events if event["ph"] == "X"] == ["receive", "receive", "receive 1"]
    assert nested(events)


def test_waits_stand_inside_their_span_and_details_are_kept():
    span = Span(1, "B", 1.0, 3.0, Unit(2, 1, 5), tick=7, waited=0.5)
    events = [event for event in events_of(Timeline("", 2, 8, 1, (span,))) if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in events] == [
        ("B 2.5 stage 1", 1e6, 2e6),
        ("wait", 1e6, 0.5e6),
    ]
    assert events[0]["args"] == {"tick": 7, "microbatch": 2, "stage": 1, "slice": 5}


def test_several_timelines_stand_below_one_another():
    one, two = (timeline_of(name, setting(p=2, n=2)) for name in ("SlimPipe", "1F1B"))
    names = {event["pid"]: event["args"]["name"] for event in events_of(one, two) if event["name"] == "process_name"}
    assert list(names) == [0, 1, 2, 3]
    assert names[3] == f"rank 1 of {two.title}"
