"""Where the K,V of live slices sit: slots of one buffer, so that the past of every slice is one contiguous view.

A slot holds the K,V of one slice. The slices of one stage and microbatch fill a contiguous *range* of slots, which may
grow at either end, so slot order is not slice order. A slot is free again when the backward of its slice has run;
backward is in reverse order, so a range shrinks as it grew. A new range grows into the slots that old ones free.

Stages of one rank share the slots: their peaks come at different times, and a rank never has more live slices than its
peak, whereas the peaks of its stages add up to more (by half for two stages on the last of two ranks).

How few slots are enough? Never fewer than the peak; let it be q microbatches and d slices more. With no slot to spare,
each slice goes where one was just freed. For one stage that is enough for q = 1, for d = 0, and up to 2 q microbatches;
otherwise min(d, n - d) more are needed. With just 2 q microbatches and five ranks or more the search may not find the
placement without them in the steps that it is given. For several stages a search tells; it finds the peak or little
more for two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slimpipe.program.ir import Op, Unit
from slimpipe.program.program import Program

_MAX_SEARCH_STEPS = 1000
"""Ranges started, per search."""


@dataclass(frozen=True)
class SlotPlan:
    """The slot of every slice of some stages of one rank. Made by `plan_slots`.

    Guarantees that no two live slices share a slot, and that the slices 0..i of a stage and microbatch fill a
    contiguous range.
    """

    num_slots: int
    _stages: tuple[int, ...]
    _slots: tuple[tuple[tuple[int, ...], ...], ...]
    """Slots of each slice of each stage, for the microbatches up to the end of the first period."""
    _period_start: int
    """Microbatch at which the first period starts."""

    def slot(self, unit: Unit) -> int:
        """Slot of a unit."""
        return self._slots_of(unit)[unit.slice]

    def past(self, unit: Unit) -> tuple[int, int]:
        """Range (low, high), without high, of the slots of the slices before this one; (0, 0) for the first slice."""
        past = self._slots_of(unit)[: unit.slice]
        return (min(past), max(past) + 1) if past else (0, 0)

    def slices_in(self, unit: Unit, low: int, high: int) -> tuple[int, ...]:
        """The slice in each of the slots low..high - 1, in that order; all must be of the unit's range."""
        slots = self._slots_of(unit)
        return tuple(slots.index(slot) for slot in range(low, high))

    def _slots_of(self, unit: Unit) -> tuple[int, ...]:
        microbatch = unit.microbatch
        if microbatch >= len(self._slots):
            period = len(self._slots) - self._period_start
            microbatch = self._period_start + (microbatch - self._period_start) % period
        return self._slots[microbatch][self._stages.index(unit.stage)]


def plan_slots(program: Program, stages: Sequence[int]) -> SlotPlan:
    """Plans the slots of global stages of one rank together. The same program and stages always give the same plan.

    In a forward-only program all slots of a microbatch are free after its last forward on that stage.
    """
    stages = tuple(stages)
    events = list(_read_events(program, stages))
    fallback = _side_by_side(program, stages) if len(stages) > 1 else _one_range_each(program, stages)
    for num_slots in range(_peak_live(events), fallback.num_slots):
        plan = _search(events, stages, num_slots)
        if plan is not None:
            return plan
    return fallback


def _side_by_side(program: Program, stages: tuple[int, ...]) -> SlotPlan:
    """Every stage by itself."""
    plans = [plan_slots(program, (stage,)) for stage in stages]
    rows, num_slots = [], 0
    for stage, plan in zip(stages, plans):
        units = [[Unit(m, stage, i) for i in range(program.num_slices)] for m in range(program.num_microbatches)]
        rows.append([tuple(num_slots + plan.slot(unit) for unit in row) for row in units])
        num_slots += plan.num_slots
    return SlotPlan(num_slots, stages, tuple(zip(*rows)), 0)


def _one_range_each(program: Program, stages: tuple[int, ...]) -> SlotPlan:
    """One stage, whose microbatches take turns in as many whole ranges as are ever live."""
    live: set[int] = set()
    most = 0
    for takes, unit in _read_events(program, stages):
        if takes:
            live.add(unit.microbatch)
            most = max(most, len(live))
        elif unit.slice == 0:
            live.remove(unit.microbatch)
    size = program.num_slices
    return SlotPlan(most * size, stages, tuple((tuple(range(i * size, (i + 1) * size)),) for i in range(most)), 0)


class _Event(NamedTuple):
    takes: bool
    """Whether the unit takes a slot or frees its own."""
    unit: Unit


def _read_events(program: Program, stages: tuple[int, ...]) -> Iterator[_Event]:
    for _, op, unit, _ in program.instructions[program.rank_of(stages[0])]:
        if unit.stage not in stages:
            continue
        if op is Op.FORWARD:
            yield _Event(True, unit)
            if program.forward_only and unit.slice == program.num_slices - 1:
                yield from (_Event(False, unit._replace(slice=i)) for i in reversed(range(program.num_slices)))
        elif op is Op.BACKWARD:
            yield _Event(False, unit)


def _peak_live(events: list[_Event]) -> int:
    live = peak = 0
    for event in events:
        live += 1 if event.takes else -1
        peak = max(peak, live)
    return peak


_Key = tuple[int, int]
"""Microbatch and stage: what a range is of."""


class _Node(NamedTuple):
    """A search has come to an event that starts a range."""

    at: int
    """Index of the event."""
    live: dict[_Key, tuple[int, ...]]
    """Slots of the live slices of each range, in the order of slices."""
    steps: dict[_Key, int]
    """1 for ranges that grow upwards where they can, -1 for downwards."""
    placed: dict[_Key, tuple[int, ...]]
    """Slots of all slices placed so far."""
    met: dict[tuple, int]
    """Microbatch at whose start the live ranges stood so."""


def _search(events: list[_Event], stages: tuple[int, ...], num_slots: int) -> SlotPlan | None:
    """Depth first: where does a range start, and which way does it grow while it can?

    Nothing but the live ranges matters for what comes after. So the search ends when a microbatch starts with those of
    an earlier one: from there on the placement repeats.
    """
    root = _Node(0, {}, {}, {}, {})
    choices = [(root, start, step) for start in range(num_slots) for step in (1, -1)][::-1]
    failed: set[tuple] = set()
    for _ in range(_MAX_SEARCH_STEPS):
        if not choices:
            return None
        node = _grow(events, *choices.pop(), num_slots)
        if node is None:
            continue
        if node.at == len(events):
            return _make_plan(num_slots, stages, node.placed, events[-1].unit.microbatch + 1, 0)
        microbatch, stage, _ = events[node.at].unit
        if stage == stages[0]:
            standing = tuple((of[0] - microbatch, of[1], slots) for of, slots in node.live.items())
            if standing in node.met:
                return _make_plan(num_slots, stages, node.placed, microbatch, node.met[standing])
            node = node._replace(met=node.met | {standing: microbatch})
        seen = node.at, tuple(node.live.items()), tuple(node.steps.items())
        if seen in failed:
            continue
        failed.add(seen)
        taken = {slot for slots in node.live.values() for slot in slots}
        free = (slot for slot in reversed(range(num_slots)) if slot not in taken)
        choices += [(node, start, step) for start in free for step in (-1, 1)]
    return None


def _grow(events: list[_Event], node: _Node, start: int, step: int, num_slots: int) -> _Node | None:
    """The next node if the range starts there, or None if some range can grow at neither end before."""
    live, steps, placed = dict(node.live), dict(node.steps), dict(node.placed)
    taken = {slot for slots in live.values() for slot in slots}
    for index in range(node.at, len(events)):
        takes, unit = events[index]
        of = unit.microbatch, unit.stage
        if not takes:
            taken.remove(live[of][-1])
            live[of] = live[of][:-1]
            if not live[of]:
                del live[of], steps[of]
            continue
        if index == node.at:
            ends, steps[of] = [start], step
        elif unit.slice == 0:
            return _Node(index, live, steps, placed, node.met)
        else:
            above, below = max(live[of]) + 1, min(live[of]) - 1
            ends = [above, below] if steps[of] > 0 else [below, above]
        slot = next((end for end in ends if 0 <= end < num_slots and end not in taken), None)
        if slot is None:
            return None
        taken.add(slot)
        live[of] = live.get(of, ()) + (slot,)
        placed[of] = live[of]
    return _Node(len(events), live, steps, placed, node.met)


def _make_plan(
    num_slots: int, stages: tuple[int, ...], placed: dict[_Key, tuple[int, ...]], num_placed: int, period_start: int
) -> SlotPlan:
    rows = tuple(tuple(placed[microbatch, stage] for stage in stages) for microbatch in range(num_placed))
    return SlotPlan(num_slots, stages, rows, period_start)
