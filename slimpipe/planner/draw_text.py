"""A timeline in a terminal: a grid of what every rank does over time, and the activations that live.

Long ones are cut into bands below one another, and drawn finer from a few bands on.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from slimpipe.planner.draw import Bar, bars, live_units, microbatches, names, peak_microbatches
from slimpipe.planner.timeline import Timeline

_MAX_BANDS = 4
_COLUMNS_PER_TIME = 23
_NOTE_WIDTH = 22
_RESET = "\033[0m"
_HEIGHTS = " ▁▂▃▄▅▆▇█"
_COLOURS = {
    # Of 256-colour terminals, short context to long.
    "forward": (153, 117, 75, 33),
    "backward": (157, 120, 77, 35),
    "help": (215,),
    "vocabulary": (177,),
}
_FILLS = {"forward": "-", "backward": "=", "help": "+", "vocabulary": "$"}

LEGEND = "a3: forward of slice 3 of the first microbatch; a3': backward; +: helps others; V, E: vocabulary; blank: idle"


def num_bands(timeline: Timeline, *, columns: int, seconds: float | None = None) -> int:
    """Bands that a grid needs: such that every unit has room for its name and a gap, up to a few."""
    units = [bar for bar in bars(timeline) if bar.role in ("forward", "backward")]
    wanted = max(((len(next(names(bar, timeline))) + 1) / (bar.end - bar.start) for bar in units), default=0.0)
    needed = wanted * (seconds or timeline.seconds) / _width(timeline, columns)
    return min(_MAX_BANDS, max(1, math.ceil(needed - 1e-9)))


def grid(
    timeline: Timeline, *, columns: int, colour: bool, seconds: float | None = None, bands: int | None = None
) -> list[str]:
    """Lines of at most ``columns`` characters: a row for every rank, in one or more bands.

    Args:
        timeline: What is drawn.
        columns: Width of the terminal.
        colour: Whether to use ANSI colours; without them, bars are filled with characters.
        seconds: Time that the grid covers; the timeline's own if None.
        bands: How many bands it is cut into; as `num_bands` if None.
    """
    label, width = _label_width(timeline), _width(timeline, columns)
    total = seconds or timeline.seconds or 1.0
    if bands is None:
        bands = num_bands(timeline, columns=columns, seconds=seconds)
    per_second = bands * width / total
    drawn = list(bars(timeline))
    rows = [
        _row([bar for bar in drawn if bar.rank == rank], timeline, per_second, colour=colour)
        for rank in range(timeline.num_ranks)
    ]
    lines = []
    for first in range(0, max([1, *map(len, rows)]), width):
        lines.append(" " * label + _axis(first, first + width, per_second))
        for rank, row in enumerate(rows):
            cells = _paint(row[first : first + width], colour=colour)
            lines.append((f"rank {rank}".ljust(label) + cells).rstrip())
    return lines


def live_curve(
    timeline: Timeline, *, columns: int, seconds: float | None = None, highest: float | None = None
) -> list[str]:
    """One line per rank: its live activations over time, and their peak in units and as a share of one microbatch.

    Args:
        timeline: What is drawn.
        columns: Width of the terminal.
        seconds: Time that the curve covers; the timeline's own if None.
        highest: Share of one microbatch that is drawn as high as can be; the timeline's own peak if None.
    """
    label, width = _label_width(timeline), max(_width(timeline, columns) - _NOTE_WIDTH, 10)
    total = seconds or timeline.seconds or 1.0
    curves = [live_units(timeline, rank) for rank in range(timeline.num_ranks)]
    if highest is None:
        highest = max(peak_microbatches(timeline, rank) for rank in range(timeline.num_ranks))
    lines = []
    for rank, curve in enumerate(curves):
        times = [step.time for step in curve]
        peak = max(step.num_units for step in curve)
        cells = []
        for column in range(width):
            # The highest within the column, so that no peak is lost.
            first = bisect_right(times, column * total / width) - 1
            last = bisect_right(times, (column + 1) * total / width)
            units = max(step.num_units for step in curve[first : max(last, first + 1)])
            height = math.ceil(8 * microbatches(units, timeline) / highest - 1e-9) if highest else 0
            cells.append(_HEIGHTS[height])
        peak_text = f"  peak {peak} = {microbatches(peak, timeline):.3f}"
        lines.append(f"rank {rank}".ljust(label) + "".join(cells) + peak_text)
    return lines


Cell = tuple[str, Bar] | None


def _row(drawn: Sequence[Bar], timeline: Timeline, per_second: float, *, colour: bool) -> list[Cell]:
    """Characters of a rank's whole time, each with its bar; None where it is idle. In the midst of its column is the
    bar that a character stands for."""
    cells: list[Cell] = []
    for bar in drawn:
        start, end = round(bar.start * per_second), round(bar.end * per_second)
        cells += [None] * (start - len(cells))
        # A column of the bar is not of its name, so that forward and backward differ without colours.
        name = next((name for name in names(bar, timeline) if len(name) < end - start), "")
        fill = " " if colour else _FILLS[bar.role]
        cells += [(character, bar) for character in name.ljust(end - start, fill)]
    return cells


def _axis(first: int, last: int, per_second: float) -> str:
    """Times, at every few columns from one to another."""
    text = ""
    for column in range(first, last - 6, _COLUMNS_PER_TIME):
        text = text.ljust(column - first) + f"|{column / per_second:.4g}"
    return text


def _paint(cells: Sequence[Cell], *, colour: bool) -> str:
    text, before = "", None
    for cell in cells:
        character, bar = cell or (" ", None)
        if colour and bar is not before:
            text += _RESET if bar is None else f"\033[38;5;16;48;5;{_shade(bar)}m"
            before = bar
        text += character
    return text + _RESET if colour else text


def _shade(bar: Bar) -> int:
    shades = _COLOURS[bar.role]
    return shades[min(len(shades) - 1, int(bar.context * len(shades) - 1e-9))]


def _label_width(timeline: Timeline) -> int:
    return len(f"rank {timeline.num_ranks - 1}  ")


def _width(timeline: Timeline, columns: int) -> int:
    return max(columns - _label_width(timeline), 10)
