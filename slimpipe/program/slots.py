"""Where the K,V of live slices sit: slots of one buffer, so that the past of every slice is one contiguous view.

A slot holds the K,V of one slice. The slices of a microbatch fill a contiguous range of slots, which may grow at
either end, so slot order is not slice order. A slot is free again when the backward of its slice has run; backward is
in reverse order, so a range shrinks as it grew. A new microbatch grows into the slots that an old one frees.

How few slots are enough? Never fewer than the stage's peak of live slices; let it be q microbatches of n slices and d
slices more. With no slot to spare, each slice goes where one was just freed: the last n - d slices of a microbatch into
those of the q-th before it, its first d into those of the (q + 1)-th before it. So every q-th microbatch has the same
n - d slots as its tail, but a head of d others, and only two heads fit beside one tail. The peak is enough for q = 1,
for d = 0, and while no third head comes, up to 2 q microbatches. Otherwise min(d, n - d) slots more are enough: two
heads for each tail alone, or a whole range for each of q + 1 microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slimpipe.program.ir import Op
from slimpipe.program.program import Program

_MAX_SEARCH_STEPS = 200
"""Microbatches placed, per search. Programs of up to 16 ranks, 64 slices and 4 stages per rank need 40 at most."""


@dataclass(frozen=True)
class SlotPlan:
    """The slot of every slice of one stage. Made by `plan_slots`.

    Guarantees that no two live slices share a slot, and that the slices 0..i of a microbatch fill a contiguous range.
    """

    num_slots: int
    _slots: tuple[tuple[int, ...], ...]
    """Slot of each slice, for the microbatches up to the end of the first period."""
    _period_start: int
    """Microbatch at which the first period starts."""

    def slot(self, microbatch: int, slice_index: int) -> int:
        """Slot of a slice."""
        return self._slots_of(microbatch)[slice_index]

    def past(self, microbatch: int, slice_index: int) -> tuple[int, int]:
        """Range (low, high), without high, of the slots of the slices before this one; (0, 0) for the first slice."""
        past = self._slots_of(microbatch)[:slice_index]
        return (min(past), max(past) + 1) if past else (0, 0)

    def slices_in(self, microbatch: int, low: int, high: int) -> tuple[int, ...]:
        """The slice in each of the slots low..high - 1, in that order; all of them must be the microbatch's."""
        slots = self._slots_of(microbatch)
        return tuple(slots.index(slot) for slot in range(low, high))

    def _slots_of(self, microbatch: int) -> tuple[int, ...]:
        if microbatch >= len(self._slots):
            period = len(self._slots) - self._period_start
            microbatch = self._period_start + (microbatch - self._period_start) % period
        return self._slots[microbatch]


def plan_slots(program: Program, stage: int) -> SlotPlan:
    """Plans the slots of the global stage ``stage``. The same program and stage always give the same plan.

    In a forward-only program all slots of a microbatch are free after its last forward.
    """
    timing = _read_timing(program, stage)
    num_slices = program.num_slices
    num_full, num_more = divmod(timing.peak_live, num_slices)
    least = timing.peak_live
    if num_full >= 2 and program.num_microbatches > 2 * num_full:
        least += min(num_more, num_slices - num_more)
    most = timing.peak_microbatches * num_slices
    for num_slots in range(least, most):
        for first_slot in (0, num_slices):
            search = _Search(timing, num_slots, program.num_microbatches)
            if search.run(first_slot):
                return SlotPlan(num_slots, tuple(search.placed), search.period_start)
    ranges = (range(first, first + num_slices) for first in range(0, most, num_slices))
    return SlotPlan(most, tuple(map(tuple, ranges)), 0)


@dataclass(frozen=True)
class _Timing:
    """When the slots of a stage are taken and freed; the same for every microbatch, but for a shift."""

    taken: tuple[int, ...]
    """Tick of each slice's forward, counted from the first."""
    freed: tuple[int, ...]
    """Tick in which each slice's slot is freed, after the forward of that tick."""
    shift: int
    """Ticks from one microbatch to the next."""
    peak_live: int
    """Most slices live at one time."""
    peak_microbatches: int
    """Most microbatches live at one time."""


def _read_timing(program: Program, stage: int) -> _Timing:
    num_slices = program.num_slices
    taken: dict[tuple[int, int], int] = {}
    freed: dict[tuple[int, int], int] = {}
    live: dict[int, int] = {}
    peak_live = peak_microbatches = 0
    for tick, op, unit, _ in program.instructions[program.rank_of(stage)]:
        if unit.stage != stage or op not in (Op.FORWARD, Op.BACKWARD):
            continue
        microbatch = unit.microbatch
        if op is Op.FORWARD:
            taken[microbatch, unit.slice] = tick
            live[microbatch] = live.get(microbatch, 0) + 1
            peak_live, peak_microbatches = max(peak_live, sum(live.values())), max(peak_microbatches, len(live))
        if op is Op.BACKWARD:
            freed[microbatch, unit.slice] = tick
            live[microbatch] -= 1
        elif program.forward_only and live[microbatch] == num_slices:
            freed.update({(microbatch, slice_index): tick for slice_index in range(num_slices)})
            live[microbatch] = 0
        if live[microbatch] == 0:
            del live[microbatch]
    start = taken[0, 0]
    shift = taken[1, 0] - start if program.num_microbatches > 1 else 0
    for ticks in (taken, freed):
        assert all(tick == ticks[0, slice_] + microbatch * shift for (microbatch, slice_), tick in ticks.items())
    return _Timing(
        taken=tuple(taken[0, slice_index] - start for slice_index in range(num_slices)),
        freed=tuple(freed[0, slice_index] - start for slice_index in range(num_slices)),
        shift=shift,
        peak_live=peak_live,
        peak_microbatches=peak_microbatches,
    )


_FreeFrom = tuple[int, ...]
"""For each slot, the tick after which it is free, counted from the first forward of the microbatch to be placed; -1
where it is free already."""


class _Search:
    """Depth-first search, a microbatch at a time.

    Nothing but `_FreeFrom` matters for what comes after. So the search ends when it meets one for the second time: from
    there on the placement repeats.
    """

    def __init__(self, timing: _Timing, num_slots: int, num_microbatches: int) -> None:
        self.placed: list[tuple[int, ...]] = []
        self.period_start = 0
        self._timing = timing
        self._num_slots = num_slots
        self._num_microbatches = num_microbatches
        self._met: dict[_FreeFrom, int] = {}
        self._num_steps = 0

    def run(self, first_slot: int) -> bool:
        """Whether a placement was found in which the first microbatch starts at ``first_slot``."""
        return first_slot < self._num_slots and self._place((-1,) * self._num_slots, [first_slot])

    def _place(self, free_from: _FreeFrom, starts: list[int]) -> bool:
        microbatch = len(self.placed)
        if microbatch == self._num_microbatches:
            return True
        if free_from in self._met:
            self.period_start = self._met[free_from]
            return True
        self._num_steps += 1
        self._met[free_from] = microbatch
        for slots in _growths(free_from, self._timing.taken, starts):
            if self._num_steps == _MAX_SEARCH_STEPS:
                return False
            after = list(free_from)
            for slot, freed in zip(slots, self._timing.freed, strict=True):
                after[slot] = freed
            self.placed.append(slots)
            if self._place(tuple(max(tick - self._timing.shift, -1) for tick in after), list(range(self._num_slots))):
                return True
            self.placed.pop()
        del self._met[free_from]
        return False


def _growths(free_from: _FreeFrom, taken: tuple[int, ...], starts: list[int]) -> Iterator[tuple[int, ...]]:
    """Ways to place a microbatch: from each start, growing upwards where possible, or downwards where possible."""
    for start in starts:
        found = [_grow(free_from, taken, start, step) for step in (1, -1)]
        yield from dict.fromkeys(slots for slots in found if slots is not None)


def _grow(free_from: _FreeFrom, taken: tuple[int, ...], start: int, step: int) -> tuple[int, ...] | None:
    """The slots in the order of slices, or None if at some slice neither end can grow."""

    def is_free(slot: int, tick: int) -> bool:
        return 0 <= slot < len(free_from) and free_from[slot] < tick

    if not is_free(start, taken[0]):
        return None
    slots = [start]
    ahead, behind = start + step, start - step
    for tick in taken[1:]:
        if is_free(ahead, tick):
            slots.append(ahead)
            ahead += step
        elif is_free(behind, tick):
            slots.append(behind)
            behind -= step
        else:
            return None
    return tuple(slots)
