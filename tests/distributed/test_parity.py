"""Loss and every gradient of the sliced pipeline equal those of the unsliced model, float64 (design 1.3, 4.1).

With `SLIMPIPE_FULL=1` every shape of the grid runs, else half of it: two numbers of microbatches for each p, n and v.
"""

from __future__ import annotations

import itertools

import pytest

from tests.distributed.parity import FULL, Case, check_cases


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_every_shape(rank_pool, p: int) -> None:
    shapes = itertools.product(range(p, 9), (1, 2, 3), (1, 2, 3, 4))
    check_cases(
        rank_pool,
        [
            Case(p=p, n=n, v=v, m=m, slice_len=2, runs="T" if m in (1, 3) else "TET")
            for n, v, m in shapes
            if FULL or (m in (1, 4)) == ((p + n + v) % 2 == 0)
        ],
    )


DOCUMENTS = {
    "inside slices": (5, 9, 18),
    "at slice edges": (8, 4, 20),
    "across slice edges": (1, 14, 1, 16),
    "of one token": (1,) * 32,
}


@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS.keys())
def test_documents(rank_pool, documents: tuple[int, ...]) -> None:
    shapes = [(1, 1, 8), (2, 1, 8), (3, 1, 4), (4, 1, 8), (2, 2, 4), (3, 2, 8)]
    check_cases(
        rank_pool,
        [Case(p=p, v=v, n=n, m=3, slice_len=32 // n, batch=1 + p % 2, documents=documents) for p, v, n in shapes],
    )


@pytest.mark.parametrize("window", [1, 3, 4, 6, 9, 40])
@pytest.mark.parametrize("documents", [None, (5, 9, 18)])
def test_sliding_windows(rank_pool, window: int, documents: tuple[int, ...] | None) -> None:
    common = {"window": window, "documents": documents, "batch": 2, "num_kv_heads": 2, "m": 3, "num_layers": 6}
    shapes = [(1, 1, 8), (2, 1, 8), (3, 2, 4), (4, 1, 8)]
    check_cases(rank_pool, [Case(p=p, v=v, n=n, slice_len=32 // n, **common) for p, v, n in shapes])


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_grouped_queries(rank_pool, num_kv_heads: int) -> None:
    check_cases(rank_pool, [Case(p=p, n=4, v=v, num_kv_heads=num_kv_heads, batch=2) for p in (1, 2, 4) for v in (1, 2)])


@pytest.mark.parametrize("ignored", ["slices", "scattered", "all"])
def test_ignored_labels(rank_pool, ignored: str) -> None:
    check_cases(rank_pool, [Case(p=p, n=4, v=v, m=2, ignored=ignored) for p in (1, 2, 3) for v in (1, 2)])


@pytest.mark.parametrize("keep_output", [True, False])
def test_recompute(rank_pool, keep_output: bool) -> None:
    common = {"recompute": True, "keep_output": keep_output, "documents": (5, 9, 18), "num_kv_heads": 2}
    check_cases(rank_pool, [Case(p=p, n=8, v=v, m=3, **common) for p in (1, 2, 4) for v in (1, 2)])


def test_unequal_layers(rank_pool) -> None:
    check_cases(rank_pool, [Case(p=2, n=4, num_layers=5), Case(p=3, n=6, v=2, num_layers=8)])
