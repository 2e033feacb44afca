"""Timelines as a picture, SVG or PNG, one below the other on one time axis. The only file that needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimpipe.planner.draw import ROLES, Bar, bars, live_units, microbatches, names, peak_microbatches
from slimpipe.planner.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"forward": "#1f6fb4", "backward": "#2e8b57", "help": "#f0a33a", "vocabulary": "#a569bd"}
_TEXTS = {"forward": "forward", "backward": "backward", "help": "helps others", "vocabulary": "vocabulary"}
_IDLE = "#f1f1f1"
_INCHES = 10.0
_POINTS_PER_INCH = 72
_FONT_SIZE = 6.5
_MOST = 0.8
_ROW_INCHES, _CURVE_INCHES, _EDGE_INCHES = 0.24, 0.9, 0.34


def write_picture(
    path: Path, timelines: Sequence[Timeline], *, memory: bool = False, time_label: str = "seconds", dpi: int = 150
) -> None:
    """Draw timelines into a file, in the format that its name ends with.

    Equal timelines give equal SVG files, byte by byte, under one version of matplotlib.

    Args:
        path: The file; .svg, .png or what else matplotlib knows.
        timelines: What is drawn; all share the time axis of the longest.
        memory: Draw the activations that live on each rank below each grid.
        time_label: What the time axis says.
        dpi: Dots per inch, of pixel formats.

    Raises:
        ValueError: matplotlib is missing, or does not know the format.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("pictures need matplotlib; install it with: pip install 'slimpipe[picture]'") from None

    seconds = max(timeline.seconds for timeline in timelines) or 1.0
    highest = max(peak_microbatches(timeline, rank) for timeline in timelines for rank in range(timeline.num_ranks))
    heights = []
    for timeline in timelines:
        heights += [timeline.num_ranks * _ROW_INCHES] + [_CURVE_INCHES] * memory
    figure = Figure(figsize=(_INCHES, sum(heights) + _EDGE_INCHES * (len(heights) + 2)), layout="constrained")
    settings: dict[Any, Any] = {
        "svg.hashsalt": "slimpipe",
        "svg.fonttype": "none",
        "font.size": 8.0,
        "font.family": "DejaVu Sans",
    }
    with matplotlib.rc_context(settings):
        axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        remaining = iter(axes)
        for timeline in timelines:
            _draw_grid(next(remaining), timeline, seconds=seconds)
            if memory:
                _draw_live(next(remaining), timeline, seconds=seconds, highest=highest)
        axes[-1].set_xlabel(time_label)
        roles = {bar.role for timeline in timelines for bar in bars(timeline)}
        figure.legend(handles=_legend(roles), loc="outside lower right", ncols=5, frameon=False)
        try:
            figure.savefig(path, dpi=dpi, metadata={"Date": None} if path.suffix == ".svg" else None)
        except ValueError as error:  # of matplotlib: a format that it does not know
            raise ValueError(f"{path}: {error}") from None


def _draw_grid(axes: Axes, timeline: Timeline, *, seconds: float) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    axes.set_facecolor(_IDLE)
    drawn = list(bars(timeline))
    characters_per_second = _INCHES * 0.9 * _POINTS_PER_INCH / seconds / (0.65 * _FONT_SIZE)
    chosen = [
        next((name for name in names(bar, timeline) if len(name) + 0.5 < characters_per_second * _length(bar)), "")
        for bar in drawn
    ]
    # Names for a few wide bars among many would only confuse.
    if sum(map(bool, chosen)) > _MOST * len(chosen):
        for bar, name in zip(drawn, chosen, strict=True):
            colour = "white" if _is_dark(bar) else "black"
            middle = bar.start + _length(bar) / 2
            axes.text(middle, bar.rank, name, color=colour, fontsize=_FONT_SIZE, ha="center", va="center_baseline")
    patches = [Rectangle((bar.start, bar.rank - 0.46), _length(bar), 0.92) for bar in drawn]
    colours = [_colour(bar) for bar in drawn]
    axes.add_collection(PatchCollection(patches, facecolors=colours, edgecolors="white", linewidths=0.4))
    axes.set(xlim=(0, seconds), ylim=(timeline.num_ranks - 0.5, -0.5))
    axes.set_yticks(range(timeline.num_ranks), [f"rank {rank}" for rank in range(timeline.num_ranks)])
    axes.tick_params(axis="y", length=0)
    axes.set_title(f"{timeline.title}: {timeline.idle_share:.1%} idle", loc="left", fontsize=9)
    _without_frame(axes)


def _draw_live(axes: Axes, timeline: Timeline, *, seconds: float, highest: float) -> None:
    import matplotlib

    colours = matplotlib.colormaps["viridis"]
    for rank in range(timeline.num_ranks):
        curve = live_units(timeline, rank)
        times = [step.time for step in curve] + [timeline.seconds]
        shares = [microbatches(step.num_units, timeline) for step in [*curve, curve[-1]]]
        colour = colours(rank / max(1, timeline.num_ranks))
        axes.step(times, shares, where="post", color=colour, linewidth=1.0, label=f"rank {rank}")
    axes.set(xlim=(0, seconds), ylim=(0, 1.1 * highest))
    axes.set_ylabel("live activations,\nmicrobatches", fontsize=7)
    axes.legend(loc="upper right", fontsize=6, ncols=4, frameon=False)
    _without_frame(axes)


def _length(bar: Bar) -> float:
    return bar.end - bar.start


def _without_frame(axes: Axes) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)


def _legend(roles: set[str]) -> list[Any]:
    from matplotlib.patches import Patch

    shown = [Patch(facecolor=_COLOURS[role], label=_TEXTS[role]) for role in ROLES if role in roles]
    return [*shown, Patch(facecolor=_IDLE, label="idle")]


def _strength(bar: Bar) -> float:
    """How strong its colour is: the longer the context of a slice, the stronger."""
    return 0.3 + 0.7 * bar.context if bar.role in ("forward", "backward") else 1.0


def _is_dark(bar: Bar) -> bool:
    return bar.role in ("forward", "backward") and _strength(bar) > 0.65


def _colour(bar: Bar) -> str:
    """Its role's colour, mixed with white."""
    colour, strength = _COLOURS[bar.role], _strength(bar)
    parts = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(255 + (part - 255) * strength):02x}" for part in parts)
