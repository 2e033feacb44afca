"""`slimpipe show`: what every rank does in one step of a schedule or of a measured run, as text, picture or trace."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slimpipe.arguments import positive, require_torchtitan
from slimpipe.options import VOCAB_PARALLEL_NAMES, SlimPipeOptions
from slimpipe.planner.compare import compare, fit_costs, shape_of
from slimpipe.planner.costs import OpCosts
from slimpipe.planner.draw import peak_microbatches, peak_units
from slimpipe.planner.draw_text import LEGEND, grid, live_curve, num_bands
from slimpipe.planner.hardware import HARDWARE, hardware_named
from slimpipe.planner.shown import Setting, timeline_of, with_exchange
from slimpipe.planner.timeline import Timeline
from slimpipe.planner.trace import to_trace
from slimpipe.schedule_names import SLIMPIPE_SCHEDULES

_UNITS = "time (1: forward of a slice through the whole model)"


def add_parser(commands: Any) -> argparse.ArgumentParser:
    command = commands.add_parser(
        "show",
        allow_abbrev=False,
        usage="slimpipe show (CONFIG.toml [--section.key value ...] | --ranks P --slices N --microbatches M) [options]",
        help="show who does what and when, as planned or measured",
        description="Show one step of a pipeline: who does what and when, who is idle, what lives. Simulates the very "
        "program that a run executes, or draws one of torch's schedules in the same manner.",
    )
    command.add_argument("config", nargs="?", metavar="CONFIG.toml", help="configuration file of a run")
    shape = command.add_argument_group("instead of a file")
    shape.add_argument("--ranks", type=positive, metavar="P", help="pipeline ranks")
    shape.add_argument("--slices", type=positive, metavar="N", help="slices per microbatch")
    shape.add_argument("--stages-per-rank", type=positive, metavar="V", help="as few as the schedule needs by default")
    shape.add_argument("--microbatches", type=positive, metavar="M", help="microbatches per step; 2 by default")
    shape.add_argument("--slice-len", type=positive, metavar="L", help="tokens of a slice; 1024 by default")
    what = command.add_argument_group("what is shown")
    what.add_argument(
        "--schedule",
        type=lambda text: text.split(","),
        metavar="NAME[,NAME...]",
        help="SlimPipe, InterleavedSlimPipe, 1F1B, Interleaved1F1B, GPipe, ZBVZeroBubble or others of torch",
    )
    what.add_argument("--exchange", choices=("on", "off"), help="whether ranks help one another with attention")
    what.add_argument("--vocab-parallel", choices=VOCAB_PARALLEL_NAMES, help="what of the vocabulary all ranks share")
    what.add_argument("--attention-share", type=_share, metavar="X", help="of attention in all work; 0.5 by default")
    what.add_argument("--head", type=_share, metavar="X", help="output layer with loss, where all layers are 1")
    what.add_argument("--costs", type=Path, metavar="FILE", help="measured costs, as tools/measure_ops.py writes them")
    what.add_argument("--gpu", metavar="NAME", help=f"of a file, estimate seconds on {', '.join(HARDWARE)}")
    what.add_argument("--run", type=Path, metavar="FILE", help="a recorded step, to lay beside the plan")
    how = command.add_argument_group("how")
    how.add_argument("--memory", action="store_true", help="with the activations that live on each rank")
    how.add_argument("--svg", type=Path, metavar="FILE", help="write a picture")
    how.add_argument("--png", type=Path, metavar="FILE", help="write a picture")
    how.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev")
    how.add_argument("--json", action="store_true", help="print figures as JSON")
    return command


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run the command.

    Raises:
        ValueError: Something cannot be shown as asked; one line says why.
    """
    for path in filter(None, (arguments.svg, arguments.png, arguments.trace)):
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"{path}: {'it is a folder' if path.is_dir() else f'there is no folder {path.parent}'}")
    recorded = None if arguments.run is None else Timeline.from_json(_read(arguments.run))
    schedules, setting = _what(arguments, overrides, recorded)
    comparison = None
    if recorded is not None:
        if len(schedules) > 1 or schedules[0] not in SLIMPIPE_SCHEDULES:
            raise ValueError("--run: it is laid beside the plan of its own schedule; leave out --schedule")
        program = setting.program(schedules[0])
        if setting.costs is None:
            setting = replace(setting, costs=fit_costs(recorded, program))
        planned = timeline_of(schedules[0], setting)
        comparison = compare(recorded, planned)
        timelines = [
            replace(planned, title=f"plan: {planned.title}"),
            replace(recorded, title=f"run: {recorded.title}"),
        ]
    else:
        if not any(name in SLIMPIPE_SCHEDULES for name in schedules):
            for flag in ("exchange", "vocab_parallel"):
                if getattr(arguments, flag) is not None:
                    raise ValueError(f"--{flag.replace('_', '-')}: schedules of torch have no such thing; add SlimPipe")
        timelines = [timeline_of(name, setting) for name in schedules]
    for path in filter(None, (arguments.svg, arguments.png)):
        from slimpipe.planner.draw_picture import write_picture

        write_picture(path, timelines, memory=arguments.memory, time_label="seconds" if setting.in_seconds else _UNITS)
    if arguments.trace is not None:
        arguments.trace.write_text(to_trace(timelines))
    if arguments.json:
        figures: dict[str, Any] = {"timelines": [_figures(timeline) for timeline in timelines]}
        if comparison is not None:
            figures["comparison"] = comparison.figures()
        print(json.dumps(figures))
        return 0
    print("\n".join(_text(timelines, memory=arguments.memory, in_seconds=setting.in_seconds)))
    if comparison is not None:
        print("\n".join(["", *comparison.lines()]))
    return 0


def _what(
    arguments: argparse.Namespace, overrides: Sequence[str], recorded: Timeline | None
) -> tuple[list[str], Setting]:
    """Names of schedules, and what they have in common."""
    given = {
        name: getattr(arguments, name) for name in ("ranks", "slices", "stages_per_rank", "microbatches", "slice_len")
    }
    named = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]
    if arguments.config is not None:
        if named:
            raise ValueError(f"{', '.join(named)}: the file says so already; change it with --section.key value")
        require_torchtitan("showing a file")
        from slimpipe.torchtitan.shown import setting_of

        hardware = None if arguments.gpu is None else hardware_named(arguments.gpu)
        schedule, setting = setting_of(arguments.config, overrides, hardware=hardware)
    elif arguments.gpu is not None:
        raise ValueError("--gpu: the model is not known; give a CONFIG.toml")
    elif recorded is not None:
        shape = shape_of(recorded)
        schedule = "SlimPipe" if shape.num_stages_per_rank == 1 else "InterleavedSlimPipe"
        setting = replace(shape, slice_len=arguments.slice_len or 1024)
    else:
        missing = [flag for flag in ("ranks", "slices") if given[flag] is None]
        if missing:
            raise ValueError(
                f"--{missing[0]} is missing; for example: slimpipe show --ranks 4 --slices 8 --microbatches 2"
            )
        schedule = "SlimPipe" if arguments.stages_per_rank in (None, 1) else "InterleavedSlimPipe"
        setting = Setting(
            num_ranks=arguments.ranks,
            num_slices=arguments.slices,
            num_stages_per_rank=arguments.stages_per_rank,
            num_microbatches=arguments.microbatches or 2,
            slice_len=arguments.slice_len or 1024,
            options=SlimPipeOptions(context_exchange="off"),
        )
    setting = with_exchange(setting, arguments.exchange)
    vocab_parallel = arguments.vocab_parallel or setting.vocab_parallel
    changes: dict[str, Any] = {"vocab_parallel": vocab_parallel}
    if arguments.attention_share is not None:
        changes["attention_share"] = arguments.attention_share
    if arguments.head is not None or vocab_parallel != "none":
        changes["head"] = setting.head or 0.1 if arguments.head is None else arguments.head
    if arguments.costs is not None:
        changes["costs"] = OpCosts.from_json(_read(arguments.costs))
        changes["slice_len"] = changes["costs"].slice_len
    return arguments.schedule or [schedule], replace(setting, **changes)


def _text(timelines: Sequence[Timeline], *, memory: bool, in_seconds: bool) -> list[str]:
    columns = shutil.get_terminal_size((100, 24)).columns
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    seconds = max(timeline.seconds for timeline in timelines)
    bands = max(num_bands(timeline, columns=columns, seconds=seconds) for timeline in timelines)
    highest = max(peak_microbatches(timeline, rank) for timeline in timelines for rank in range(timeline.num_ranks))
    lines = []
    for timeline in timelines:
        lines += [timeline.title, *grid(timeline, columns=columns, colour=colour, seconds=seconds, bands=bands)]
        if memory:
            lines += ["live units over time, peak in units and in microbatches of the whole model:"]
            lines += live_curve(timeline, columns=columns, seconds=seconds, highest=highest)
        lines.append("")
    lines += [LEGEND, ""]
    lines.append(f"{'seconds' if in_seconds else 'time':>9}  {'idle':>6}  live microbatches, first and last rank")
    for timeline in timelines:
        peaks = [peak_microbatches(timeline, rank) for rank in (0, timeline.num_ranks - 1)]
        live = f"{peaks[0]:.3f}, {peaks[1]:.3f}"
        lines.append(f"{timeline.seconds:9.4g}  {timeline.idle_share:6.1%}  {live}  {timeline.title}")
    return lines


def _figures(timeline: Timeline) -> dict[str, Any]:
    ranks = []
    for rank in range(timeline.num_ranks):
        ranks.append(
            {
                "rank": rank,
                "compute_seconds": timeline.compute_seconds(rank),
                "peak_live_units": peak_units(timeline, rank),
                "peak_live_microbatches": peak_microbatches(timeline, rank),
            }
        )
    return {
        "title": timeline.title,
        "seconds": timeline.seconds,
        "idle_share": timeline.idle_share,
        "num_ranks": timeline.num_ranks,
        "num_slices": timeline.num_slices,
        "num_stages_per_rank": timeline.num_stages_per_rank,
        "ranks": ranks,
    }


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ValueError(f"{path}: cannot read the file: {error.strerror}") from None


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number from 0 to 1; nearest legal value: 0.5")
    return value
