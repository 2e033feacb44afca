"""A shared vocabulary changes neither loss nor gradient: float64 against the unsliced model."""

from __future__ import annotations

import random

from tests.distributed.parity import FULL, Case, check_cases

VOCABS = (10, 9, 257)


def grid() -> list[Case]:
    """Ranks, stages, slices and vocabularies crossed; the rest drawn per case."""
    draw = random.Random(4)
    return [
        Case(
            p=p,
            n=n,
            v=v,
            m=draw.choice((1, 2, 3)),
            vocab=vocab,
            vocab_parallel=vocab_parallel,
            tied=vocab_parallel == "both" and draw.random() < 0.5,
            block_size=draw.choice((1, 3, 64)),
            batch=draw.choice((1, 2)),
            ignored=draw.choice(("none", "slices", "scattered", "all")),
            documents=draw.choice((None, (3, 4 * n - 3))),
            recompute=draw.random() < 0.5,
            options={"context_exchange": draw.choice(("on", "off")), "exchange_granularity": 1},
        )
        for p in (1, 2, 3, 4)
        for n in range(p, 9)
        for v in (1, 2)
        for vocab in VOCABS
        for vocab_parallel in ("output", "both")
    ]


def test_a_shared_vocabulary_is_exact(rank_pool) -> None:
    cases = grid()
    check_cases(rank_pool, cases if FULL else random.Random(0).sample(cases, 24), timeout=3600 if FULL else 240)


def test_a_large_vocabulary_is_exact(rank_pool) -> None:
    check_cases(
        rank_pool,
        [
            Case(p=p, n=4, vocab=50257, vocab_parallel=vocab_parallel, block_size=8, ignored="scattered", runs="TE")
            for p, vocab_parallel in ((2, "output"), (4, "both"))
        ],
    )


def test_more_ranks_than_rows(rank_pool) -> None:
    """Ranks without rows take part in everything."""
    check_cases(
        rank_pool,
        [
            Case(p=4, n=5, vocab=2, vocab_parallel="both", m=2, ignored="slices"),
            Case(p=3, n=3, vocab=2, vocab_parallel="both", tied=True, m=1),
        ],
    )
