"""What `slimpipe plan` says: for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from slimpipe.planner.layout import Layout
from slimpipe.planner.memory import PARTS
from slimpipe.planner.search import GIB, Judged, Question, Split, nearest_fitting
from slimpipe.planner.timed import Timed

_MOST_REFUSED = 8


def as_text(
    question: Question,
    splits: Sequence[Split],
    shown: Sequence[Judged],
    times: Mapping[Layout, Timed],
    *,
    own: Judged | None = None,
    own_breaks: str | None = None,
) -> str:
    """Tables: layouts, their memory, what does not fit; ``own_breaks`` is why the file's own layout is no row."""
    judged = [*shown, *([own] if own else [])]
    names = [str(rank + 1) for rank in range(len(shown))] + (["file"] if own else [])
    blocks = [_head(question, splits), _layout_table(names, judged, times), _memory_table(names, judged)]
    if own and not own.fits:
        blocks.append(f"the file's own layout does not fit: {_why(own)}")
    if own_breaks:
        blocks.append(f"the file's own layout is not among them: {own_breaks}")
    if refused := [split for split in splits if split.best is None]:
        lines = [_refusal(splits, split) for split in refused[:_MOST_REFUSED]]
        more = len(refused) - len(lines)
        lines += [f"  ... and {more} more (--json has all)"] if more > 0 else []
        blocks.append("\n".join(["does not fit, the nearest first:", *lines]))
    blocks.append("not searched: context parallelism (c > 1), which does not run together with slices")
    return "\n\n".join(blocks)


def as_json(
    question: Question,
    splits: Sequence[Split],
    shown: Sequence[Judged],
    times: Mapping[Layout, Timed],
    *,
    own: Judged | None = None,
    own_breaks: str | None = None,
) -> str:
    """Everything in SI units and bytes."""
    refused = [
        {
            "split": str(split),
            "num_layouts": split.num_layouts,
            "breaks": _broken(split),
            "smallest": None if split.smallest is None else _figures(split.smallest, times),
            "nearest_fitting": None if (near := nearest_fitting(list(splits), split)) is None else asdict(near.layout),
        }
        for split in splits
        if split.best is None
    ]
    report = {
        "model": {**asdict(question.model), "parameters": question.model.parameters},
        "seq_len": question.seq_len,
        "gpus": question.num_gpus,
        "gpu": asdict(question.hardware),
        "gpu_memory": question.memory,
        "limit": question.limit,
        "constants": question.constants,
        "sequences_per_step": question.num_sequences,
        "num_layouts": sum(split.num_layouts for split in splits),
        "layouts": [_figures(judged, times) for judged in shown],
        "refused": refused,
        "unsupported": ["context parallelism (c > 1)"],
    }
    if own:
        report["own_layout"] = _figures(own, times)
    if own_breaks:
        report["own_layout_breaks"] = own_breaks
    return json.dumps(report, indent=2)


def longest_text(question: Question, seq_len: int, best: Judged | None, *, step: int, as_json: bool) -> str:
    """The longest sequence that fits."""
    if as_json:
        layout = None if best is None else asdict(best.layout)
        return json.dumps({"longest_seq_len": seq_len, "step": step, "layout": layout, "limit": question.limit})
    if best is None:
        return f"no sequence of {step} tokens or more fits"
    return (
        f"longest sequence that fits, in steps of {step}: {seq_len} tokens ({seq_len / 1024:g}K)\n"
        f"{best.layout}: {best.bytes / GIB:.1f} of {question.limit / GIB:.1f} GiB on rank {best.rank}"
    )


def no_layout(question: Question, splits: Sequence[Split], near: Judged | None) -> str:
    """Why nothing fits, in one line; ``near`` is what fits instead."""
    head = f"no layout fits {question.model.name} with {question.seq_len} tokens on {question.num_gpus} GPUs"
    nearest = ""
    if near is not None:
        length = "" if near.question.seq_len == question.seq_len else f"{near.question.seq_len} tokens with "
        nearest = f"; nearest that fits: {length}{near.layout}"
    smallest = min((s.smallest for s in splits if s.smallest), key=lambda judged: judged.bytes, default=None)
    if smallest is not None:
        return f"{head}: even {smallest.layout} takes {_why(smallest)}{nearest}"
    # Where sequences do not divide among replicas, nothing else was looked at: fewest replicas tell most.
    fewest = min((split for split in splits if split.broken), key=lambda split: split.data, default=None)
    return f"{head}: {fewest.broken if fewest else 'no t times p in the grid divides the GPUs'}{nearest}"


def _head(question: Question, splits: Sequence[Split]) -> str:
    fitting = sum(split.best is not None for split in splits)
    model = question.model
    return (
        f"{model.name} ({model.parameters / 1e9:.1f} B parameters), {question.seq_len} tokens, "
        f"{question.num_sequences} sequences per step\n"
        f"{question.num_gpus} {question.hardware.name} of {question.memory / GIB:.1f} GiB, of which "
        f"{question.limit / GIB:.1f} may be planned (headroom {(question.memory - question.limit) / GIB:.2f}); memory "
        f"by {'our own rule' if question.constants == 'ours' else 'the rule of the reference'}\n"
        f"{sum(split.num_layouts for split in splits)} layouts judged; {fitting} of {len(splits)} splits of the GPUs "
        "fit; the best of each:"
    )


def _layout_table(names: Sequence[str], judged: Sequence[Judged], times: Mapping[Layout, Timed]) -> str:
    head = (
        "",
        "t",
        "p",
        "d",
        "n",
        "v",
        "m",
        "recompute",
        "exchange",
        "vocab",
        "GiB",
        "bubble",
        "(equal)",
        "step s",
        "MFU causal",
    )
    rows: list[tuple[str, ...]] = [(*head, "full", "P2P GiB", "exch. GiB")]
    for name, item in zip(names, judged, strict=True):
        layout, time = item.layout, times.get(item.layout)
        seconds, bubble = (time.seconds, time.bubble) if time else (item.seconds, item.bubble)
        rows.append(
            (
                name,
                *map(str, (layout.tensor, layout.pipeline, layout.data, layout.num_slices, layout.stages_per_rank)),
                str(layout.num_microbatches),
                layout.recompute,
                "on" if layout.exchange else "off",
                layout.vocab_parallel,
                f"{item.bytes / GIB:.1f}",
                f"{100 * bubble:.1f} %",
                f"{100 * item.equal_units_bubble:.2f} %",
                (f"{seconds:#.3g}" if seconds < 100 else f"{seconds:.1f}") + ("" if time else "~"),
                f"{100 * item.mfu(causal=True, seconds=seconds):.1f} %",
                f"{100 * item.mfu(causal=False, seconds=seconds):.1f} %",
                f"{item.p2p_bytes / GIB:.1f}",
                f"{time.exchange_bytes / GIB:.1f}" if time else "-",
            )
        )
    notes = (
        "~ closed form (ranks in lock-step); others simulated. (equal): the bubble if all units took equally long.\n"
        "MFU causal / full: attention counted by half, as a causal mask leaves it / whole."
    )
    return f"{_aligned(rows)}\n{notes}"


def _memory_table(names: Sequence[str], judged: Sequence[Judged]) -> str:
    rows: list[tuple[str, ...]] = [("GiB", "rank", *PARTS, "total")]
    for name, item in zip(names, judged, strict=True):
        values = (f"{item.parts[part] / GIB:.1f}" for part in PARTS)
        rows.append((name, str(item.rank), *values, f"{item.bytes / GIB:.1f}"))
    return _aligned(rows)


def _refusal(splits: Sequence[Split], split: Split) -> str:
    near = nearest_fitting(list(splits), split)
    nearest = "" if near is None else f"; nearest that fits: {near.layout}"
    return f"  {split}: {_broken(split)}{nearest}"


def _broken(split: Split) -> str:
    if split.smallest is not None:
        return _why(split.smallest)
    return split.broken or "no layout in the grid"


def _why(judged: Judged) -> str:
    part = judged.largest_part
    return (
        f"{judged.bytes / GIB:.1f} GiB on rank {judged.rank}, limit {judged.question.limit / GIB:.1f}; "
        f"{part} {judged.parts[part] / GIB:.1f} GiB are the most (recompute {judged.layout.recompute})"
    )


def _figures(judged: Judged, times: Mapping[Layout, Timed]) -> dict[str, Any]:
    time = times.get(judged.layout)
    seconds = time.seconds if time else judged.seconds
    return {
        "layout": asdict(judged.layout),
        "fits": judged.fits,
        "rank": judged.rank,
        "bytes": judged.parts,
        "total_bytes": judged.bytes,
        "largest_part": judged.largest_part,
        "step_seconds": seconds,
        "bubble": time.bubble if time else judged.bubble,
        "bubble_equal_units": judged.equal_units_bubble,
        "simulated": time is not None,
        "lock_step_seconds": judged.seconds,
        "mfu_causal_attention": judged.mfu(causal=True, seconds=seconds),
        "mfu_full_attention": judged.mfu(causal=False, seconds=seconds),
        "p2p_bytes": judged.p2p_bytes,
        "exchange_bytes": None if time is None else time.exchange_bytes,
        "exchange_held_rows": None if time is None else time.held_rows,
    }


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.rjust, row, widths)).rstrip() for row in rows)
