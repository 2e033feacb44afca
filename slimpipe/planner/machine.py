"""A machine in simulated time: processes that take time and wait for one another, and links that carry their messages.

A process is a generator. It yields seconds of work, or a `Signal` for which it waits.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Generator, Hashable
from itertools import count

from slimpipe.planner.costs import Link
from slimpipe.planner.timeline import Span
from slimpipe.program.ir import Unit
from slimpipe.program.program import ProgramError


class Signal:
    """Something that happens once; at ``time``, once that is known."""

    __slots__ = ("time", "waiting")

    def __init__(self) -> None:
        self.time: float | None = None
        self.waiting: list[Process] = []


Process = Generator[float | Signal, None, None]
"""One thing after another."""


class Machine:
    """Simulated time. `run` brings all processes to their end, or as far as they get.

    Args:
        alone_speed: How many times as fast a process works while all others wait; with more at work it falls to 1 for
            all. 1 where each has hardware of its own.
    """

    def __init__(self, alone_speed: float = 1.0) -> None:
        self.now = 0.0
        self._alone_speed = alone_speed
        self._num_processes = 0
        self._due: list[_Entry] = []
        """Heap, by time."""
        self._working: list[_Entry] = []
        """By seconds of work left; empty where no speed depends on it."""
        self._order = count()  # what is due at one time happens in the order in which it became due

    def start(self, process: Process) -> None:
        """Let a process begin now."""
        self._num_processes += 1
        heapq.heappush(self._due, (self.now, next(self._order), process))

    def set(self, signal: Signal, time: float) -> None:
        """Say when a signal happens: now or later."""
        assert signal.time is None and time >= self.now, "a signal happens once, and not in the past"
        signal.time = time
        for process in signal.waiting:
            heapq.heappush(self._due, (time, next(self._order), process))
        signal.waiting.clear()

    def run(self) -> None:
        """Run until nothing is due. Processes that wait for what never happens are left where they are."""
        while self._due or self._working:
            process = self._next()
            for step in process:
                if not isinstance(step, Signal):
                    if step:
                        self._work(step, process)
                        break
                elif step.time is None:
                    step.waiting.append(process)
                    break
                elif step.time > self.now:
                    heapq.heappush(self._due, (step.time, next(self._order), process))
                    break

    def _work(self, seconds: float, process: Process) -> None:
        if self._alone_speed == 1.0:
            heapq.heappush(self._due, (self.now + seconds, next(self._order), process))
        else:
            self._working.append((seconds, next(self._order), process))

    def _next(self) -> Process:
        """Let time pass until something goes on."""
        if not self._working:
            self.now, _, process = heapq.heappop(self._due)
            return process
        others = self._num_processes - 1
        speed = 1 + (self._alone_speed - 1) * (1 - (len(self._working) - 1) / max(1, others))
        first = min(self._working)
        then = self.now + first[0] / speed
        if not self._due or then <= self._due[0][0]:
            self._working.remove(first)
            process = first[2]
        else:
            then, _, process = heapq.heappop(self._due)
        worked = (then - self.now) * speed
        self._working = [(max(0.0, left - worked), order, other) for left, order, other in self._working]
        self.now = then
        return process


_Entry = tuple[float, int, Process]


class Wire:
    """What is sent and received: the k-th send of a channel meets its k-th receive.

    A message travels when both are posted and the link is free, which carries one message at a time in each direction
    between two ranks.
    """

    def __init__(self, machine: Machine, link: Link) -> None:
        self.spans: list[Span] = []
        self._machine, self._link = machine, link
        self._posted: dict[Hashable, deque[_Post]] = defaultdict(deque)
        """By channel: what has no other end yet, all sends or all receives."""
        self._free: dict[tuple[int, int], float] = defaultdict(float)

    def send(self, channel: Hashable, source: int, destination: int, num_bytes: float, unit: Unit, tick: int) -> Signal:
        """Post a send; the signal is when it has arrived."""
        return self._post(channel, _Post(True, source, destination, num_bytes, unit, tick))

    def receive(self, channel: Hashable, source: int, destination: int, unit: Unit, tick: int) -> Signal:
        """Post a receive; the signal is when it has arrived.

        Raises:
            ProgramError: As `send` does, if what comes is of another slice: what is meant for another unit would be
                taken for this one's.
        """
        return self._post(channel, _Post(False, source, destination, 0.0, unit, tick))

    def _post(self, channel: Hashable, post: _Post) -> Signal:
        posted = self._posted[channel]
        if not posted or posted[0].is_send == post.is_send:
            posted.append(post)
            return post.done
        other = posted.popleft()
        self._transmit(*((post, other) if post.is_send else (other, post)), done=other.done)
        return other.done

    def _transmit(self, send: _Post, receive: _Post, *, done: Signal) -> None:
        if send.unit._replace(stage=0) != receive.unit._replace(stage=0):
            raise ProgramError(
                f"rank {send.source} sends what rank {send.destination} receives, at tick {send.tick} for {send.unit}, "
                f"at tick {receive.tick} for {receive.unit}"
            )
        ends = send.source, send.destination
        start = max(self._machine.now, self._free[ends])
        self._free[ends] = start + send.num_bytes / self._link.bandwidth
        end = self._free[ends] + self._link.latency
        num_bytes = round(send.num_bytes)
        self.spans += [
            Span(send.source, "send", start, end, send.unit, send.tick, 0.0, num_bytes),
            Span(send.destination, "receive", start, end, receive.unit, receive.tick, 0.0, num_bytes),
        ]
        self._machine.set(done, end)


class _Post:
    """One end of a message."""

    __slots__ = ("destination", "done", "is_send", "num_bytes", "source", "tick", "unit")

    def __init__(self, is_send: bool, source: int, destination: int, num_bytes: float, unit: Unit, tick: int) -> None:
        self.is_send, self.source, self.destination = is_send, source, destination
        self.num_bytes, self.unit, self.tick = num_bytes, unit, tick
        self.done = Signal()
