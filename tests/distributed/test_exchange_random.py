"""Random programs with context exchange on real ranks: none hangs, all are exact, nothing stays.

With `SLIMPIPE_FULL=1` 500 of them run, else 19.
"""

from __future__ import annotations

import gc
import random

import pytest

from slimpipe.attention.helper import Exchange
from tests.distributed.parity import FULL, Case, check_cases
from tests.distributed.test_exchange_parity import draw_documents, exchange, planned_bytes

PARTS = 10 if FULL else 1
COUNTS = {2: 180, 3: 150, 4: 100, 5: 70} if FULL else {2: 8, 3: 5, 4: 4, 5: 2}
"""Programs by number of ranks."""


def draw_case(draw: random.Random, p: int) -> Case:
    n, v, slice_len = draw.randint(p, 4 * p), draw.randint(1, 3), draw.randint(1, 9)
    recompute = draw.random() < 0.5
    return Case(
        p=p,
        n=n,
        v=v,
        m=draw.randint(1, 4),
        slice_len=slice_len,
        batch=draw.randint(1, 2),
        num_kv_heads=draw.choice((4, 2, 1)),
        documents=draw_documents(draw, n * slice_len),
        ignored=draw.choice(("none", "slices", "scattered", "all")),
        recompute=recompute,
        keep_output=draw.random() < 0.5,
        num_layers=draw.randint(max(1, p * v - 3), p * v + 3),  # stages without any attention layer among them
        runs="TTEE",
        window=draw.choice((None, None, draw.randint(1, n * slice_len))),
        options=exchange(draw.randint(1, 7), max_slices=draw.choice((0, 1, 2, 3, 4, 16))),
    )


def check_exchange(schedule, case: Case) -> None:
    """Runs on every rank."""
    assert schedule.record.exchange_bytes == planned_bytes(schedule.program, case), case
    assert not any(exchange.held for exchange in gc.get_objects() if isinstance(exchange, Exchange)), case


@pytest.mark.timeout(1200 if FULL else 300)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("p", COUNTS)
def test_random_programs(rank_pool, p: int, part: int) -> None:
    draw = random.Random(p)
    cases = [draw_case(draw, p) for _ in range(COUNTS[p])][part::PARTS]
    check_cases(rank_pool, cases, check_schedule=check_exchange, timeout=1100 if FULL else 240)
