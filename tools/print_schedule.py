"""Print a schedule as text: one row per rank, one column per unit of time.

    python tools/print_schedule.py --ranks 2 --slices 4 --microbatches 2 [--stages-per-rank 1]

``a0`` is the forward of slice 0 of the first microbatch, ``a0'`` its backward; ``b`` is the second microbatch. With
several stages per rank the local stage follows: ``a0.1``. Forward and backward are drawn equally long.
"""

from __future__ import annotations

import argparse
import string

from slimpipe import build_program


def rows(num_ranks: int, num_slices: int, num_stages_per_rank: int, num_microbatches: int) -> list[str]:
    """The lines of the picture."""
    program = build_program(num_ranks, num_slices, num_stages_per_rank, num_microbatches)
    lines = []
    for rank, row in program.pipeline_order().items():
        cells = []
        for entry in row:
            if entry is None:
                cells.append("")
                continue
            stage, kind, flat = entry
            microbatch, slice_index = divmod(flat, num_slices)
            name = f"{string.ascii_lowercase[microbatch % 26]}{slice_index}"
            local = f".{stage // num_ranks}" if num_stages_per_rank > 1 else ""
            cells.append(name + local + ("'" if kind == "B" else ""))
        lines.append((f"rank {rank}", cells))
    width = max(len(cell) for _, cells in lines for cell in cells) + 1
    return [f"{name}  " + "".join(cell.ljust(width) for cell in cells).rstrip() for name, cells in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--slices", type=int, default=4)
    parser.add_argument("--stages-per-rank", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=2)
    chosen = parser.parse_args()
    print("\n".join(rows(chosen.ranks, chosen.slices, chosen.stages_per_rank, chosen.microbatches)))


if __name__ == "__main__":
    main()
