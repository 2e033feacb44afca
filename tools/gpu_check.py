"""Check and time the GPU side of slimpipe on one card, in about six minutes.

    python tools/gpu_check.py [--out gpu_check] [--parts a b c d e] [--minutes 6] [--markdown]
    python tools/gpu_check.py --tiny                 # small sizes: shows that everything runs, on a CPU, too
    python tools/gpu_check.py --read gpu_check/gpu_check.json --markdown

Needs this checkout and torch, nothing else. Parts:

    a  every attention kernel against float64: output, LSE, gradients, alone and in slices
    b  time of attention in slices over the same in one piece
    c  a pipeline of four processes on the one device: parity, peak bytes against 1F1B and the formula
    d  host time per instruction, and that no step waits for the device
    e  the vocabulary head: time and peak bytes against plain cross entropy

Prints a table. The output folder gets all figures as JSON, while they come. Exit status 1: a figure misses its limit,
or something failed; all the rest is measured nevertheless.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package, where it is not installed

import gpu_quiet
import torch
from gpu_figures import Figure
from gpu_jobs import JobError, run_job
from gpu_report import Note, Report, describe, failed

TOOLS = Path(__file__).resolve().parent
PARTS = ("a", "b", "c", "d", "e")
ORDER = ("a", "b", "e", "c", "d")
"""What takes little time comes first."""
SLICING_SHARE = 0.25
"""Of the minutes, for part (b), whose longest sequence is skipped rather than late."""
JOB_SHARE = 1 / 3
"""A job that takes longer is ended, unless it has a limit of its own."""
PRELOAD = ("torch", "gpu_kernels", "gpu_slicing", "gpu_vocabulary")
FILE_NAME = "gpu_check.json"


class Job(NamedTuple):
    """A piece of the work, in a process of its own."""

    part: str
    name: str
    work: Callable[[], Iterable[Figure | Note]]
    seconds: float | None = None
    """Limit of its own."""


def jobs(parts: list[str], device: torch.device, *, tiny: bool, minutes: float) -> Iterator[Job | Note | Figure]:
    """What to do, and what can be said without doing anything; kernels that are slow to check come last."""
    end = time.monotonic() + minutes * 60
    todo = [part for part in ORDER if part in parts and not (part == "d" and "c" in parts)]  # c, d: measured together
    for part, last in [*((part, False) for part in todo), *((part, True) for part in todo if part in ("a", "b"))]:
        try:
            if part in ("a", "b"):
                yield from _jobs_by_kernel(part, device, last=last, tiny=tiny, minutes=minutes)
            elif part == "e":
                yield Job(part, "vocabulary", partial(importlib.import_module("gpu_vocabulary").run, device, tiny=tiny))
            else:
                pipeline = importlib.import_module("gpu_pipeline")
                work = partial(pipeline.run, device, tiny=tiny, deadline=end)
                yield Job(part, "pipeline", work, max(0.0, end - time.monotonic()) + 2 * pipeline.SECONDS)
        except Exception as error:
            yield failed(part, f"starting part ({part})", error)


def _jobs_by_kernel(
    part: str, device: torch.device, *, last: bool, tiny: bool, minutes: float
) -> Iterator[Job | Note | Figure]:
    kernels = importlib.import_module("gpu_kernels")
    served, refused = kernels.labels(device)
    served = {kernel: head_dims for kernel, head_dims in served.items() if (kernel in kernels.BUILDS_PLANS) == last}
    if part == "a":
        if not last:
            yield from refused
        for kernel, head_dims in served.items():
            work = partial(kernels.check, device, kernel=kernel, head_dims=head_dims, tiny=tiny)
            yield Job(part, kernel, work)
        return
    slicing = importlib.import_module("gpu_slicing")
    names = [kernel for kernel, head_dims in served.items() if str(slicing.FULL.head_dim) in head_dims]
    too_slow = {kernel: note for kernel in names if (note := slicing.too_slow(kernel)) is not None}
    yield from too_slow.values()
    names = [kernel for kernel in names if kernel not in too_slow]
    end = time.monotonic() + minutes * 60 * SLICING_SHARE
    for index, kernel in enumerate(names):
        now = time.monotonic()
        deadline = now + (end - now) / (len(names) - index)
        yield Job(part, kernel, partial(slicing.run, device, kernel=kernel, tiny=tiny, deadline=deadline))


def _prepared(work: Callable[[], Iterable[Figure | Note]], device: torch.device) -> Iterable[Figure | Note]:
    """What a job does first in its process."""
    torch.set_float32_matmul_precision("highest")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return work()


def check(
    report: Report, path: Path, todo: Iterable[Job | Note | Figure], device: torch.device, *, minutes: float
) -> None:
    """Do all jobs; the file follows what is known."""
    start = time.monotonic()
    for job in todo:
        if not isinstance(job, Job):
            report.add(job)
            continue
        began = time.monotonic()
        if began - start > minutes * 60:
            report.add(Note(job.part, job.name, f"skipped: {minutes:g} minutes are over", missed=True))
            continue
        print(f"({job.part}) {job.name} ..", end="", flush=True)
        num_before = len(report.figures)
        written = began
        try:
            work = partial(_prepared, job.work, device)
            seconds = minutes * 60 * JOB_SHARE if job.seconds is None else job.seconds
            for item in run_job(work, seconds=seconds, preload=PRELOAD):
                report.add(item)
                if time.monotonic() - written > 1:
                    report.write(path)
                    written = time.monotonic()
        except JobError as error:
            report.add(failed(job.part, job.name, error))
            if error.details:
                report.add(Note(job.part, f"{job.name}, traceback", error.details))
        finally:  # also where the tool is told to end
            report.seconds[f"{job.part} {job.name}"] = time.monotonic() - began
            report.write(path)
        new = report.figures[num_before:]
        num_failed = sum(not figure.ok for figure in new)
        print(f" {len(new)} figures, {num_failed} failed, {time.monotonic() - began:.1f} s", flush=True)
    report.complete = True
    report.write(path)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), help="folder for the JSON file")
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="one device")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which parts")
    parser.add_argument("--minutes", type=float, default=6.0, help="skip what would take longer")
    parser.add_argument("--markdown", action="store_true", help="print the table as markdown")
    parser.add_argument("--read", type=Path, help="only print the table of this file")
    args = parser.parse_args(argv)
    kind = args.device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        parser.error(f"--device {args.device}: it must be cpu or cuda; nearest legal choice: cpu, with --tiny")
    if not args.minutes >= 0:
        parser.error(f"--minutes {args.minutes}: it must be a number of at least 0; nearest legal value: 6")
    if args.read is None and kind == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: there is no GPU here; nearest legal choice: --device cpu --tiny")
    if args.read is None and not args.tiny and kind == "cpu":
        parser.error("--device cpu takes days with full sizes; nearest legal choice: --tiny")
    try:  # before anything takes time
        if args.read is not None:
            Report.read(args.read)
        else:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / FILE_NAME).touch()
    except OSError as error:
        parser.error(f"{args.read or args.out}: {error.strerror}; choose another file or folder")
    except (ValueError, KeyError, TypeError) as error:
        parser.error(f"--read {args.read}: it is no file of this tool ({type(error).__name__}: {error})")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.read is not None:
        report = Report.read(args.read)
    else:
        warnings = [os.environ.get("PYTHONWARNINGS"), f"ignore:{gpu_quiet.NO_NUMPY}"]
        os.environ["PYTHONWARNINGS"] = ",".join(filter(None, warnings))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(TOOLS), str(TOOLS.parent), os.environ.get("PYTHONPATH", "")])
        device = torch.device(args.device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        setting: dict[str, Any] = describe(device, tiny=args.tiny)
        report = Report(setting)
        todo = jobs(args.parts, device, tiny=args.tiny, minutes=args.minutes)
        try:
            check(report, args.out / FILE_NAME, todo, device, minutes=args.minutes)
        finally:  # also where the tool is told to end
            print(f"\n{report.table(markdown=args.markdown)}", flush=True)
        return 0 if report.ok else 1
    print(report.table(markdown=args.markdown))
    return 0 if report.ok else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the file gets what is known, and all processes end
    sys.exit(main())
