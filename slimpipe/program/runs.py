"""Sets of tokens as runs: sorted, disjoint (start, stop) pairs that do not touch."""

from __future__ import annotations

from collections.abc import Iterable

Run = tuple[int, int]
"""Tokens start .. stop - 1."""
Runs = tuple[Run, ...]


def num_rows(runs: Runs) -> int:
    """How many tokens there are."""
    return sum(stop - start for start, stop in runs)


def union(*sets: Runs) -> Runs:
    """Tokens of any."""
    return join(run for runs in sets for run in runs)


def join(runs: Iterable[Run]) -> Runs:
    """Any runs, sorted and joined where they touch or overlap."""
    joined: list[Run] = []
    for start, stop in sorted(runs):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return tuple(joined)


def intersect(a: Runs, b: Runs) -> Runs:
    """Tokens of both."""
    both: list[Run] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            both.append((start, stop))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(both)


def subtract(a: Runs, b: Runs) -> Runs:
    """Tokens of ``a`` that are not in ``b``."""
    if not a or not b:
        return a
    gaps = zip([a[0][0], *(stop for _, stop in b)], [*(start for start, _ in b), a[-1][1]], strict=True)
    return intersect(a, tuple((start, stop) for start, stop in gaps if start < stop))


def first_rows(runs: Runs, count: int) -> Runs:
    """The ``count`` lowest tokens, or all if there are fewer."""
    taken: list[Run] = []
    for start, stop in runs:
        if count <= 0:
            break
        stop = min(stop, start + count)
        taken.append((start, stop))
        count -= stop - start
    return tuple(taken)
