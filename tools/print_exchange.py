"""Print what the context exchange plans for some shapes: how level the attention load is, and what is sent for it.

    python tools/print_exchange.py [--shapes 8,32,1,2 ...] [--slice-len 8192] [--granularity 1] [--json]

Columns, each over all ticks and phases with any work, idle ranks counted:

- *off*, *on*: the worst load of any rank over the mean, without and with exchange. Where a rank's own block alone (half
  its slice) is more than the mean, it counts as the mean, because it cannot move.
- *time off*, *time on*: attention time of a step over that of perfectly level loads, in lock-step ticks.
- *K,V*: rows of K,V that are sent over those that would be sent anew at every tick in both phases.
- *transfers*: per tick and phase, mean and most.
- *held*: most K,V that a rank holds for others from one tick to a later / most of its own, in slices of a layer.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

from bench_cli import aligned

from slimpipe import SlimPipeOptions, build_program
from slimpipe.program import Program
from slimpipe.program.runs import num_rows

SHAPES = (
    *((4, 4, 1), (4, 8, 1), (4, 16, 1), (8, 8, 1), (8, 16, 1), (5, 5, 1), (4, 8, 2), (4, 6, 2)),
    *((8, 32, 1), (8, 16, 5)),
)


def parse_shape(text: str) -> tuple[int, ...]:
    """p,n,v,m as numbers."""
    shape = tuple(int(number) for number in text.split(","))
    if len(shape) != 4:
        raise argparse.ArgumentTypeError(f"{text!r}: it must be p,n,v,m, for example 8,32,1,2")
    return shape


def worst_load(program: Program, *, moved: bool) -> float:
    """The highest load of any rank over what is possible, at the worst tick and phase."""
    loads, p = program.attention_load(), program.num_ranks
    worst = 0.0
    for start in range(0, len(loads), p):
        moment = loads[start : start + p]
        possible = max(sum(load.own for load in moment) / p, program.slice_len / 2)
        worst = max(worst, max(load.computed if moved else load.own for load in moment) / possible)
    return worst


def describe(shape: tuple[int, ...], *, slice_len: int, options: SlimPipeOptions) -> dict[str, Any]:
    """The columns of one shape."""
    program = build_program(*shape, slice_len=slice_len, options=options)
    transfers = program.transfers
    moments = Counter((transfer.tick, transfer.phase) for transfer in transfers)
    rows = sum(num_rows(transfer.rows) for transfer in transfers)
    return {
        "shape": shape,
        "load_off": worst_load(program, moved=False),
        "load_on": worst_load(program, moved=True),
        "time_off": build_program(*shape, slice_len=slice_len).load_max_over_mean,
        "time_on": program.load_max_over_mean,
        "kv_share": sum(num_rows(transfer.sent) for transfer in transfers) / rows if rows else 0.0,
        "mean_transfers": len(transfers) / len(moments) if moments else 0.0,
        "most_transfers": max(moments.values(), default=0),
        "held_slices": max(program.peak_held_rows(rank) for rank in range(program.num_ranks)) / slice_len,
        "own_slices": max(program.peak_live_units(rank) for rank in range(program.num_ranks)),
    }


def table(figures: list[dict[str, Any]]) -> str:
    """The figures to read."""
    rows: list[tuple[str, ...]] = [("p,n,v,m", "off", "on", "time off", "time on", "K,V", "transfers", "held")]
    for figure in figures:
        loads = (f"{figure[name]:.3f}" for name in ("load_off", "load_on", "time_off", "time_on", "kv_share"))
        transfers = f"{figure['mean_transfers']:.1f} / {figure['most_transfers']}"
        held = f"{figure['held_slices']:.1f} / {figure['own_slices']}"
        rows.append((",".join(map(str, figure["shape"])), *loads, transfers, held))
    return aligned(rows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Print what the context exchange plans for some shapes.")
    default = [(*shape, 2) for shape in SHAPES]
    parser.add_argument("--shapes", type=parse_shape, nargs="+", default=default, metavar="P,N,V,M")
    parser.add_argument("--slice-len", type=int, default=8192, help="tokens per slice")
    parser.add_argument("--granularity", type=int, default=1, help="tokens that move together")
    parser.add_argument("--max-slices", type=int, default=SlimPipeOptions().exchange_max_slices, help="see the options")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    args = parser.parse_args(argv)
    try:
        options = SlimPipeOptions(
            context_exchange="on", exchange_granularity=args.granularity, exchange_max_slices=args.max_slices
        )
        figures = [describe(shape, slice_len=args.slice_len, options=options) for shape in args.shapes]
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps(figures, indent=2) if args.json else table(figures))


if __name__ == "__main__":
    main()
