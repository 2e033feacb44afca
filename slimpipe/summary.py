"""What a finished command says: figures per rank and where its outputs are, or the rates that it has measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slimpipe.program.cost import ExchangeCosts


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.2f} MiB"


_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("rank", "rank", str),
    ("peak_live_units", "peak live units", str),
    ("peak_live_bytes", "peak live activations", _mib),
    ("one_f_one_b_bytes", "1F1B needs", _mib),
    ("losses", "first loss", lambda losses: f"{losses[0]:.4f}"),
    ("losses", "last loss", lambda losses: f"{losses[-1]:.4f}"),
)


def rank_table(records: Sequence[dict[str, Any]]) -> str:
    """A text table of what each rank has measured; a column that no rank has is left out."""
    columns = [column for column in _COLUMNS if any(record.get(column[0]) is not None for record in records)]
    rows = [[title for _, title, _ in columns]]
    for record in sorted(records, key=lambda record: record.get("rank", 0)):
        cells = [(record.get(key), show) for key, _, show in columns]
        rows.append(["-" if value is None else show(value) for value, show in cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def summarise(dump_folder: Path, *, since: float) -> str:
    """Describe a run by the files that it has written into `dump_folder` after the time `since` (seconds)."""

    def fresh(pattern: str) -> list[Path]:
        return sorted(path for path in dump_folder.glob(pattern) if path.stat().st_mtime >= since)

    parts = []
    if records := [json.loads(file.read_text()) for file in fresh("slimpipe/rank*.json")]:
        parts.append(rank_table(records))
    parts.append(f"outputs:      {dump_folder}")
    parts += [f"wandb run:    {run}  (upload with: wandb sync {run})" for run in fresh("**/wandb/offline-run-*")]
    parts += [f"logs by rank: {run}" for run in fresh("slimpipe/logs/*")]
    return "\n".join(parts)


def rates_text(costs: ExchangeCosts, *, num_ranks: int, device: str, as_json: bool = False) -> str:
    """The rates of `costs`, for people with the lines for a TOML file, or as one JSON object in SI units."""
    rates = {
        "attention_flops": costs.flops_per_second,
        "link_bandwidth": costs.bytes_per_second,
        "link_latency": costs.latency,
    }
    if as_json:
        return json.dumps({"num_ranks": num_ranks, "device": device, **rates})
    lines = [
        f"ranks      {num_ranks}, on {device}",
        f"attention  {costs.flops_per_second / 1e9:.1f} GFLOP/s on each rank",
        f"link       {costs.bytes_per_second / 1e9:.3f} GB/s in each direction",
        f"latency    {costs.latency * 1e6:.1f} us",
        "",
        "[slimpipe]",
        *(f"{name} = {value:.3g}" for name, value in rates.items()),
    ]
    return "\n".join(lines)
