"""What a step measures of itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from slimpipe.program import Instruction
from slimpipe.runtime.clock import Clock


@dataclass(frozen=True, slots=True)
class InstructionTime:
    """When an instruction ran, in seconds of `time.perf_counter`: on the device, where it has a time of its own."""

    instruction: Instruction
    start: float
    end: float
    waited: float
    """Of that, waiting for a message."""
    num_bytes: int = 0
    """Of the message that it sent or waited for."""


@dataclass
class StepRecord:
    """What one step measured. Bytes and message counts only where memory is measured."""

    peak_live_units: int = 0
    peak_kv_bytes: int = 0
    peak_carry_bytes: int = 0
    peak_receives: int = 0
    """Most receives posted and not yet used in one direction."""
    peak_sends: int = 0
    """Most sends under way on one channel."""
    peak_message_bytes: int = 0
    """Bytes of both."""
    peak_held_bytes: int = 0
    """Of K,V and dK,dV held for other ranks."""
    exchange_bytes: int = 0
    """Bytes that this rank sent to give away, or take over, attention; counted always, as are the seconds."""
    exchange_wait_seconds: float = 0.0
    """Time this rank's host waited in the exchange."""
    vocabulary_wait_seconds: float = 0.0
    """Time this rank's host spent in collectives of the shared vocabulary."""
    times: list[InstructionTime] = field(default_factory=list)


@dataclass(slots=True)
class _Marks:
    """An instruction, by marks of the clock."""

    instruction: Instruction
    start: Any
    end: Any = None
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    waited: float = 0.0
    """Seconds of the host, beside `waits`."""
    num_bytes: int = 0


class Recorder:
    """Notes when the instructions of one step run."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: list[_Marks] = []

    @contextmanager
    def instruction(self, instruction: Instruction) -> Iterator[_Marks]:
        """Around one instruction; what it gives takes what else is known of it."""
        marks = _Marks(instruction, self._clock.mark())
        self._marks.append(marks)
        yield marks
        marks.end = self._clock.mark()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what an instruction does for a message."""
        start = self._clock.mark()
        yield
        self._marks[-1].waits.append((start, self._clock.mark()))

    def times(self) -> list[InstructionTime]:
        """What was noted; after the step."""
        seconds = self._clock.seconds
        return [
            InstructionTime(
                marks.instruction,
                seconds(marks.start),
                seconds(marks.end),
                marks.waited + sum(seconds(end) - seconds(start) for start, end in marks.waits),
                marks.num_bytes,
            )
            for marks in self._marks
        ]
