"""What `gpu_check.py` found: figures and notes, as a file that grows with them and as a table."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from bench_cli import aligned
from gpu_figures import Figure

PACKAGES = ("numpy", "triton", "flash-attn", "flash_attn_3", "flash-attn-4", "nvidia-cudnn-frontend", "torchtitan")

MAX_FAILURES = 20
"""That the table lists; the file has all."""


@dataclass(frozen=True)
class Note:
    """What there is no number for, such as a kernel that does not serve or a size that was skipped, and why."""

    part: str
    name: str
    text: str
    missed: bool = False
    """Whether something that belongs to the check was not measured, for want of time: then nothing is proven."""


def failed(part: str, name: str, error: BaseException) -> Figure:
    """The figure of something that raised: it fails."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return Figure(part, f"{name} raised {text[:300]}", math.nan, "", 0.0)


@dataclass
class Report:
    """Everything found so far."""

    setting: dict[str, Any]
    figures: list[Figure] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each job."""
    complete: bool = False

    @property
    def ok(self) -> bool:
        """Whether all parts came to their end, nothing was missed, and every figure keeps its limit."""
        missed = any(note.missed for note in self.notes)
        return self.complete and not missed and all(figure.ok for figure in self.figures)

    def add(self, item: Figure | Note) -> None:
        """Keep one more."""
        (self.figures if isinstance(item, Figure) else self.notes).append(item)

    def write(self, path: Path) -> None:
        """Write all as JSON, NaN as null; a reader never sees half of it."""
        figures = [
            {**asdict(f), "value": f.value if math.isfinite(f.value) else None, "ok": f.ok} for f in self.figures
        ]
        content = {**asdict(self), "figures": figures, "ok": self.ok}
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(".part")
        half.write_text(json.dumps(content, indent=1) + "\n")
        half.replace(path)

    @classmethod
    def read(cls, path: Path) -> Report:
        """What `write` wrote."""
        content = json.loads(path.read_text())
        figures = [
            Figure(f["part"], f["name"], math.nan if f["value"] is None else f["value"], f["unit"], f["limit"])
            for f in content["figures"]
        ]
        notes = [Note(**note) for note in content["notes"]]
        return cls(content["setting"], figures, notes, content["seconds"], content["complete"])

    def table(self, *, markdown: bool) -> str:
        """Head, figures and notes to read.

        Figures whose names agree up to their first ": " share a row: of those with a limit the one nearest to it is
        shown, of those without all.
        """
        head = f"{self.setting['date']}, {self.setting['device']}, torch {self.setting['versions']['torch']}"
        head += f", commit {self.setting['commit'] or 'unknown'}, `{self.setting['command']}`"
        if self.setting["tiny"]:
            head += " (small sizes: nothing to compare with)"
        if not self.complete:
            head += " (cut off)"
        rows: list[tuple[str, ...]] = [("part", "figure", "value", "limit", "")]
        rows += [_row(group) for group in _groups(self.figures)]
        if markdown:
            rows.insert(1, ("---", "---", "---:", "---:", "---"))
            lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
            table = "\n".join(lines)
        else:
            table = aligned([(f"{row[0]:5} {row[1]}", *row[2:]) for row in rows])
        failures = [f"- FAILED: ({f.part}) {f.name}: {f.value:.4g} {f.unit}" for f in self.figures if not f.ok]
        if len(failures) > MAX_FAILURES:
            failures[MAX_FAILURES:] = [f"- FAILED: {len(failures) - MAX_FAILURES} more"]
        notes = [f"- ({note.part}) {note.name}: {note.text}" for note in self.notes if "\n" not in note.text]
        return "\n".join([head, "", table, "", *failures, *notes])


def describe(device: torch.device, *, tiny: bool) -> dict[str, Any]:
    """When, on what, and with which versions."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    if device.type == "cuda":
        versions["cudnn"] = str(torch.backends.cudnn.version())
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})",
        "capability": torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        "cpus": os.cpu_count(),
        "versions": versions,
        "commit": _commit(),
        "command": " ".join(["python", *sys.argv]),
        "tiny": tiny,
    }


def _commit() -> str | None:
    """The checkout's commit, with "+" where files differ from it; None outside a checkout."""

    def git(*args: str) -> str:
        command = ["git", *args]
        root = Path(__file__).parent
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _groups(figures: Iterable[Figure]) -> list[list[Figure]]:
    """Figures that share a row of the table, by part, in order of their first."""
    groups: dict[tuple, list[Figure]] = {}
    for figure in sorted(figures, key=lambda figure: figure.part):
        title, colon, _ = figure.name.partition(": ")
        key: tuple = (figure.part, title, figure.limit is None, figure.unit if figure.limit else "")
        if not colon or math.isnan(figure.value):
            key = (figure.part, figure.name)
        groups.setdefault(key, []).append(figure)
    return list(groups.values())


def _row(group: list[Figure]) -> tuple[str, ...]:
    worst = max(group, key=_nearness)
    num_failed = sum(not figure.ok for figure in group)
    verdict = f"{num_failed} FAILED" if num_failed else "" if worst.limit is None else "ok"
    limit = "" if worst.limit is None else f"{worst.limit:.4g}"
    if len(group) == 1:
        return worst.part, worst.name, _value(worst), limit, verdict
    title, _, rest = worst.name.partition(": ")
    if worst.limit is None:
        values = ", ".join(f"{figure.name.partition(': ')[2]} {_value(figure)}" for figure in group)
        return worst.part, f"{title}: {values}", "", "", verdict
    return worst.part, f"{title}: worst of {len(group)}: {rest}", _value(worst), limit, verdict


def _nearness(figure: Figure) -> float:
    """The larger, the nearer to the limit or the further beyond."""
    if math.isnan(figure.value):
        return math.inf
    return figure.value / figure.limit if figure.limit else figure.value


def _value(figure: Figure) -> str:
    return f"{figure.value:.4g} {figure.unit}".strip()
