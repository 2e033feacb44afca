"""What every rank does in one step, and when: simulated from a program, or recorded in a real run. Both are drawn,
compared and exported from here."""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from slimpipe.program.ir import Op, Unit

COMPUTE_KINDS = ("F", "B", "I", "W", "help F", "help B", "E", "V", "EB")
"""Forward and backward of a unit, or, where a zero-bubble schedule runs them apart, input and weight gradients of its
backward; help with others' attention; the shared embedding, the shared output layer with its loss, and the backward of
the embedding."""
MESSAGE_KINDS = ("send", "receive")
"""One lane each, beside what computes; spans of one lane may overlap."""
KIND_OF = {
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
"""Of a program's instructions."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a rank does. Times in seconds from the start of the step."""

    rank: int
    kind: str
    """One of `COMPUTE_KINDS` or `MESSAGE_KINDS`."""
    start: float
    end: float
    unit: Unit | None = None
    """For "send" and "receive" that of the rank's own instruction, in the exchange the one whose attention moves."""
    tick: int | None = None
    waited: float = 0.0
    """Of the time from start to end: waiting for others. A unit's wait for its message comes first."""
    num_bytes: int = 0
    """Of a message."""

    @property
    def seconds(self) -> float:
        """Time without waits."""
        return self.end - self.start - self.waited

    @property
    def is_message(self) -> bool:
        """Whether it stands in a lane of its own beside what computes."""
        return self.kind in MESSAGE_KINDS


@dataclass(frozen=True)
class Timeline:
    """One step of all pipeline ranks.

    Spans that compute never overlap on one rank. They are sorted by rank, start and end.
    """

    title: str
    num_ranks: int
    num_slices: int
    """Slices per microbatch; 1 for schedules of whole microbatches."""
    num_stages_per_rank: int
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        spans = sorted(self.spans, key=lambda span: (span.rank, span.start, span.end))
        object.__setattr__(self, "spans", tuple(spans))

    @cached_property
    def seconds(self) -> float:
        """From the start of the step to the end of the last span."""
        return max((span.end for span in self.spans), default=0.0)

    @cached_property
    def _by_rank(self) -> dict[int, tuple[Span, ...]]:
        rows: dict[int, list[Span]] = defaultdict(list)
        for span in self.spans:
            rows[span.rank].append(span)
        return {rank: tuple(row) for rank, row in rows.items()}

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """All spans of a rank, by start."""
        return self._by_rank.get(rank, ())

    def compute_seconds(self, rank: int) -> float:
        """Time in which the rank computes, waits left out."""
        return sum(span.seconds for span in self.of_rank(rank) if not span.is_message)

    @cached_property
    def idle_share(self) -> float:
        """Share of all ranks' time in which they do not compute: the bubble."""
        if not self.seconds:
            return 0.0
        computed = sum(self.compute_seconds(rank) for rank in range(self.num_ranks))
        return 1 - computed / (self.num_ranks * self.seconds)

    def to_json(self) -> str:
        """As text; `from_json` reads it."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        return json.dumps({**fields, "spans": [_span_fields(span) for span in self.spans]})

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: The text is not a timeline; the message says what is wrong.
        """
        try:
            fields = json.loads(text)
            timeline = cls(**{name: fields[name] for name in _FIELDS}, spans=())
            for name in _FIELDS[1:]:
                if not _is_index(fields[name] - 1):
                    raise ValueError(f"{name} = {fields[name]}: it must be an integer of at least 1")
            return replace(timeline, spans=tuple(_read_span(span, timeline) for span in fields["spans"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a timeline as slimpipe writes it ({type(error).__name__}: {error})") from error


_FIELDS = ("title", "num_ranks", "num_slices", "num_stages_per_rank")


def _span_fields(span: Span) -> dict[str, Any]:
    """Without what says nothing."""
    nothing = {"unit": None, "tick": None, "waited": 0.0, "num_bytes": 0}
    fields = {name: getattr(span, name) for name in Span.__slots__}
    return {name: value for name, value in fields.items() if name not in nothing or value != nothing[name]}


def _is_index(value: object, limit: float = math.inf) -> bool:
    return type(value) is int and 0 <= value < limit


def _read_span(fields: Mapping[str, Any], timeline: Timeline) -> Span:
    unit = fields.get("unit")
    span = Span(**{**fields, "unit": None if unit is None else Unit(*unit)})
    if span.kind not in COMPUTE_KINDS + MESSAGE_KINDS:
        raise ValueError(f"kind {span.kind!r} is none of {', '.join(COMPUTE_KINDS + MESSAGE_KINDS)}")
    times = span.start, span.end, span.waited
    if not all(abs(time) <= sys.float_info.max for time in times) or span.end < span.start or span.waited < 0:
        raise ValueError(f"start, end, waited = {times}: they must be finite, and no time runs backwards")
    num_stages = timeline.num_ranks * timeline.num_stages_per_rank
    limits = {"microbatch": math.inf, "stage": num_stages, "slice": timeline.num_slices}
    numbers = {"rank": (span.rank, timeline.num_ranks), "num_bytes": (span.num_bytes, math.inf)}
    if span.tick is not None:
        numbers["tick"] = span.tick, math.inf
    if span.unit is not None:
        numbers |= {name: (getattr(span.unit, name), limit) for name, limit in limits.items()}
    for name, (value, limit) in numbers.items():
        if not _is_index(value, limit):
            raise ValueError(
                f"{name} = {value!r}: it must be an integer from 0" + f" to {limit - 1}" * (limit < math.inf)
            )
    return span
