"""`slimpipe plan`: which layouts of a run fit, and what they would do."""

from __future__ import annotations

import argparse
import logging
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from slimpipe.arguments import positive, require_torchtitan
from slimpipe.options import VOCAB_PARALLEL_NAMES
from slimpipe.planner.hardware import HARDWARE, hardware_named
from slimpipe.planner.layout import RECOMPUTE, SCHEDULES, broken_rule
from slimpipe.planner.models import MODELS, ModelShape, model_named
from slimpipe.planner.report import as_json, as_text, longest_text, no_layout
from slimpipe.planner.search import CONSTANTS, GIB, Judged, Question, Wanted, longest, nearest_question, search
from slimpipe.planner.timed import num_units, timed
from slimpipe.planner.write_toml import to_toml

_UNITS_TO_SIMULATE = 2600
"""Of all layouts together; more take seconds, and only --simulate asks for it."""
_LONGEST_STEP = 4096
_TOP = 5
_MOST_BYTES = 2**50

_SIZES = {"num-layers": "L", "dim": "D", "ffn-dim": "F", "num-heads": "N", "num-kv-heads": "G"}
_MORE_SIZES = {"vocab": "V", "head-dim": "H", "num-experts": "E", "experts-per-token": "K"}


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command."""
    command = commands.add_parser(
        "plan",
        allow_abbrev=False,
        help="find the layouts of a run that fit, and what they would do",
        description="Judge every layout of a grid for a model, a sequence length and some GPUs: memory per rank by "
        "part, bubble, step time and MFU of the best of each split of the GPUs, and why the others do not fit. Needs "
        "no GPU. docs/planner.md says what is counted, and how.",
    )
    command.add_argument("--model", metavar="NAME", help=f"one of {', '.join(MODELS)}")
    command.add_argument("--toml", metavar="FILE", help="take model and sequence length from a configuration file")
    for flag, letter in {**_SIZES, **_MORE_SIZES}.items():
        command.add_argument(f"--{flag}", type=positive, metavar=letter, help="of a model that has no name here")
    command.add_argument("--seq-len", type=positive, metavar="S", help="tokens per sequence")
    command.add_argument("--gpus", type=positive, required=True, metavar="N")
    command.add_argument("--gpu", default="h100", metavar="NAME", help=f"{', '.join(HARDWARE)}; h100 by default")
    command.add_argument("--gpu-memory", type=_bytes, metavar="80GiB", help="the GPU's own by default")
    command.add_argument(
        "--sequences",
        type=positive,
        metavar="N",
        help="per step, all replicas together; 4 Mi tokens or less by default",
    )
    command.add_argument("--schedule", choices=SCHEDULES, default="SlimPipe", help="SlimPipe by default")
    command.add_argument("--constants", choices=CONSTANTS, default="ours", help="whose rule of memory; ours by default")
    command.add_argument("--headroom", type=_gib, metavar="GiB", help="memory of a GPU that must stay free of it")
    command.add_argument("--longest", action="store_true", help="find the longest sequence that fits instead")
    command.add_argument("--top", type=positive, metavar="N", help=f"layouts to show, {_TOP} by default")
    command.add_argument("--simulate", type=_count, metavar="N", help="simulate the best N; by default the quick ones")
    command.add_argument("--write", metavar="FILE.toml", help="write the best layout as a configuration file")
    command.add_argument("--json", action="store_true", help="print figures as JSON")
    fixed = command.add_argument_group("settings to keep; all of the grid otherwise")
    for flag in ("tensor", "pipeline", "context", "num-slices", "stages-per-rank"):
        fixed.add_argument(f"--{flag}", type=positive, metavar="N")
    fixed.add_argument("--recompute", choices=RECOMPUTE)
    fixed.add_argument("--exchange", choices=("on", "off"))
    fixed.add_argument("--vocab-parallel", choices=VOCAB_PARALLEL_NAMES)
    return command


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code.

    Raises:
        ValueError: Wrong input, or nothing that fits; one line.
    """
    _check_flags(arguments)
    question, config = _question(arguments)
    wanted = _wanted(arguments)
    if arguments.longest:
        seq_len, best = longest(question, wanted, step=_LONGEST_STEP)
        print(longest_text(question, seq_len, best, step=_LONGEST_STEP, as_json=arguments.json))
        return 0
    splits = search(question, wanted)
    fitting = [split.best for split in splits if split.best is not None]
    if not fitting:
        raise ValueError(no_layout(question, splits, nearest_question(question, wanted)))
    top = arguments.top or _TOP
    candidates = fitting[: max(top, arguments.simulate or 0, _TOP)]  # the same, however many are shown
    times = {judged.layout: timed(judged) for judged in _to_simulate(arguments.simulate, candidates)}
    candidates.sort(key=lambda judged: times[judged.layout].seconds if judged.layout in times else judged.seconds)
    shown = candidates[:top]
    own, own_breaks = (None, None) if config is None else _own_layout(question, config)
    if arguments.write:
        text = to_toml(question.model, shown[0].layout, seq_len=question.seq_len, command=_command(arguments))
        _write(arguments.write, text)
    report = as_json if arguments.json else as_text
    print(report(question, splits, shown, times, own=own, own_breaks=own_breaks))
    if arguments.write and not arguments.json:
        settled = shown[0].layout in times or shown[0].layout.schedule != "SlimPipe"
        remark = "" if settled else f" (first by the closed form; --simulate {len(candidates)} may find another one)"
        print(f"\nwritten: {arguments.write}, layout 1{remark}")
    return 0


def _check_flags(arguments: argparse.Namespace) -> None:
    """Flags that would have no effect."""
    if arguments.longest:
        for flag in ("seq_len", "write", "top", "simulate"):
            if getattr(arguments, flag) is not None:
                raise ValueError(f"--{flag.replace('_', '-')}: --longest has no use for it; give one of the two")
    schedule = arguments.schedule
    if schedule != "SlimPipe":
        for flag, value, neutral in (
            ("--num-slices", arguments.num_slices, 1),
            ("--exchange", arguments.exchange, "off"),
            ("--vocab-parallel", arguments.vocab_parallel, "none"),
            ("--simulate", arguments.simulate, 0),
        ):
            if value not in (None, neutral):
                raise ValueError(
                    f"{flag} {value}: only --schedule SlimPipe has it, not {schedule}; nearest legal value: {neutral}"
                )
    if arguments.gpus < 2:
        raise ValueError(f"--gpus {arguments.gpus}: a pipeline needs 2 GPUs; nearest legal value: 2")
    if arguments.write is not None and Path(arguments.write).exists():
        raise ValueError(f"--write {arguments.write!r}: it must name a file that does not exist yet")


def _question(arguments: argparse.Namespace) -> tuple[Question, Any]:
    """What is asked, and the configuration of its file."""
    model, seq_len, config = _model(arguments)
    if seq_len is None and not arguments.longest:
        raise ValueError("--seq-len: how many tokens a sequence has must be given, for example --seq-len 131072")
    seq_len = seq_len or _LONGEST_STEP
    hardware = hardware_named(arguments.gpu)
    question = Question(
        model=model,
        seq_len=seq_len,
        num_gpus=arguments.gpus,
        hardware=hardware,
        memory=arguments.gpu_memory or hardware.memory,
        sequences=arguments.sequences,
        headroom=arguments.headroom,
        constants=arguments.constants,
        schedule=arguments.schedule,
    )
    if question.limit <= 0:
        raise ValueError(
            f"--headroom {(question.memory - question.limit) / GIB:g}: a GPU has {question.memory / GIB:g} GiB only; "
            f"nearest: less than that"
        )
    if arguments.context not in (None, 1):
        raise ValueError(f"--context {arguments.context}: context parallelism is not supported with slices; nearest: 1")
    return question, config


def _model(arguments: argparse.Namespace) -> tuple[ModelShape, int | None, Any]:
    given = [flag for flag in {**_SIZES, **_MORE_SIZES} if getattr(arguments, flag.replace("-", "_"))]
    sources = [name for name, value in (("--model", arguments.model), ("--toml", arguments.toml)) if value]
    sources += [f"--{given[0]}"] if given else []
    if len(sources) != 1:
        sizes = " ".join(f"--{flag}" for flag in _SIZES)
        raise ValueError(f"give one of --model NAME, --toml FILE, or {sizes}; given: {', '.join(sources) or 'none'}")
    if arguments.model:
        return model_named(arguments.model), arguments.seq_len, None
    if arguments.toml:
        return _from_toml(arguments.toml, arguments.seq_len)
    if missing := [flag for flag in _SIZES if flag not in given]:
        raise ValueError(f"--{missing[0]}: a model in numbers needs it too")
    shape = ModelShape(
        name="model",
        num_layers=arguments.num_layers,
        dim=arguments.dim,
        ffn_dim=arguments.ffn_dim,
        num_heads=arguments.num_heads,
        num_kv_heads=arguments.num_kv_heads,
        head_dim=arguments.head_dim,
        num_experts=arguments.num_experts or 1,
        experts_per_token=arguments.experts_per_token or 1,
    )
    return replace(shape, vocab_size=arguments.vocab or shape.vocab_size), arguments.seq_len, None


def _from_toml(path: str, seq_len: int | None) -> tuple[ModelShape, int, Any]:
    require_torchtitan("--toml")
    from slimpipe.torchtitan.cpu import use_cpu

    use_cpu()
    from slimpipe.torchtitan.config import ConfigError
    from slimpipe.torchtitan.shape import shape_of
    from slimpipe.torchtitan.toml import load_toml

    logging.disable(logging.WARNING)  # torchtitan's remarks on default settings, not this file's
    try:
        config = load_toml(path)
    except ConfigError as error:
        raise ValueError(f"{path}: {'; '.join(error.errors)}") from None
    finally:
        logging.disable(logging.NOTSET)
    return shape_of(config), seq_len or config.training.seq_len, config


def _own_layout(question: Question, config: Any) -> tuple[Judged | None, str | None]:
    """The layout that the file has itself, or why plan cannot judge it."""
    from slimpipe.torchtitan.shape import layout_of

    try:
        layout = layout_of(config, num_gpus=question.num_gpus)
    except ValueError as error:
        return None, str(error)
    if rule := broken_rule(layout, question.model, seq_len=question.seq_len):
        return None, rule
    own = replace(question, schedule=layout.schedule, sequences=layout.num_microbatches * layout.data)
    return Judged(own, layout, *own.parts(layout)), None


def _wanted(arguments: argparse.Namespace) -> Wanted:
    return Wanted(
        tensor=arguments.tensor,
        pipeline=arguments.pipeline,
        num_slices=arguments.num_slices,
        stages_per_rank=arguments.stages_per_rank,
        recompute=arguments.recompute,
        exchange=None if arguments.exchange is None else arguments.exchange == "on",
        vocab_parallel=arguments.vocab_parallel,
    )


def _to_simulate(asked: int | None, candidates: list[Judged]) -> list[Judged]:
    """As many as were asked for, or those of the best that are simulated in about half a second together."""
    if candidates[0].layout.schedule != "SlimPipe":
        return []
    if asked is not None:
        return candidates[:asked]
    chosen, units = [], 0
    for judged in candidates:
        if units + num_units(judged.layout) <= _UNITS_TO_SIMULATE:
            chosen.append(judged)
            units += num_units(judged.layout)
    return chosen


def _write(path: str, text: str) -> None:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("x") as file:
            file.write(text)
    except OSError as error:
        raise ValueError(f"--write {path}: {error.strerror}") from None


def _command(arguments: argparse.Namespace) -> str:
    """The flags that the answer depends on."""
    names = {"command", "write", "json", "top", "simulate", "longest"}
    defaults = {"gpu": "h100", "schedule": "SlimPipe", "constants": "ours"}
    given = {key: value for key, value in vars(arguments).items() if key not in names and value is not None}
    given = {key: value for key, value in given.items() if defaults.get(key) != value}
    if arguments.gpu_memory:
        given["gpu_memory"] = f"{arguments.gpu_memory / GIB:g}GiB"
    if arguments.headroom is not None:
        given["headroom"] = f"{arguments.headroom / GIB:g}"
    flags = [f"--{key.replace('_', '-')} {shlex.quote(str(value))}" for key, value in given.items()]
    return " ".join(["slimpipe plan", *flags])


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 0; nearest legal value: 0")
    return int(text)


def _bytes(text: str) -> float:
    units = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "MB": 1e6, "GB": 1e9, "TB": 1e12}
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if not match or match[2] not in units or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a size like 80GiB; units: {', '.join(filter(None, units))}")
    if (value := float(match[1]) * units[match[2]]) > _MOST_BYTES:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is more than any GPU has; nearest legal value: 1024TiB")
    return value


def _gib(text: str) -> float:
    try:
        value = float(text.removesuffix("GiB"))
    except ValueError:
        value = -1.0
    if not 0 <= value <= _MOST_BYTES / GIB:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} must be GiB, at least 0 and at most {_MOST_BYTES // GIB}")
    return value * GIB
