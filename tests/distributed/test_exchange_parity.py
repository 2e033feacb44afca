"""Loss and every gradient with context exchange equal those of the unsliced model; what is sent is what was planned.

With `SLIMPIPE_FULL=1` every shape of the grid runs, else a fixed sample of it.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch.distributed as dist

from slimpipe.program import Op, Program
from tests.distributed.parity import FULL, HEAD_DIM, NUM_HEADS, Case, check_cases

PARTS = 16 if FULL else 1
SAMPLE = {2: 9, 3: 5, 4: 3, 5: 2}
BYTES = 8  # float64


def exchange(granularity: int, max_slices: int = 16) -> dict[str, object]:
    return {
        "context_exchange": "on",
        "exchange_granularity": granularity,
        "exchange_max_slices": max_slices,
    }


def draw_documents(draw: random.Random, seq_len: int) -> tuple[int, ...] | None:
    """Lengths of up to five documents."""
    cuts = sorted(draw.sample(range(1, seq_len), min(draw.randrange(5), seq_len - 1)))
    lengths = tuple(stop - start for start, stop in itertools.pairwise([0, *cuts, seq_len]))
    return lengths if cuts else None


def grid(p: int) -> list[Case]:
    """Every n, v, m and granularity; recompute, documents, heads, batch and layers as drawn from these."""
    cases = []
    for n, v, m, granularity in itertools.product(range(p, 4 * p + 1), (1, 2, 3), (1, 2, 3), (1, 128)):
        draw = random.Random(f"{p} {n} {v} {m} {granularity}")
        # Slices so long that 128 tokens fit between the heaviest and the mean.
        long = next(slice_len for most, slice_len in ((2, 160), (4, 96), (8, 64), (20, 32)) if n <= most)
        slice_len = draw.randint(2, 4) if granularity == 1 else long
        cases.append(
            Case(
                p=p,
                n=n,
                v=v,
                m=m,
                slice_len=slice_len,
                batch=draw.randint(1, 2) if granularity == 1 else 1,
                num_kv_heads=draw.choice((4, 2, 1)),
                documents=draw_documents(draw, n * slice_len),
                recompute=(recompute := draw.random() < 0.6),
                keep_output=not recompute or draw.random() < 0.5,
                num_layers=p * v + draw.choice((0, 1, p * v // 2)),
                runs="TTEE" if FULL else "TTEET",
                options=exchange(granularity),
            )
        )
    return cases


def planned_bytes(program: Program, case: Case) -> int:
    """What this rank sends in a step."""
    rank = dist.get_rank()
    by_pair = program.exchange_bytes(
        num_heads=NUM_HEADS,
        num_kv_heads=case.num_kv_heads,
        head_dim=HEAD_DIM,
        value_head_dim=case.value_head_dim,
        batch=case.batch,
        bytes_per_value=BYTES,
        bytes_per_statistic=BYTES,
    )
    total = sum(num_bytes for (_, source, _), num_bytes in by_pair.items() if source == rank)
    if case.recompute and not case.keep_output:
        lse = case.batch * case.slice_len * NUM_HEADS * BYTES
        query, output = lse * HEAD_DIM, lse * case.value_head_dim
        for transfer in program.transfers:
            if transfer.phase is Op.BACKWARD:
                layers = program.layers_per_stage[transfer.unit.stage]
                if rank == program.rank_of(transfer.unit.stage):
                    total += layers * query
                elif rank == transfer.helper:
                    total += layers * (output + lse)
    return total


def check_exchange(schedule, case: Case) -> None:
    """Runs on every rank: work has moved, in training and in evaluation, and what was sent is what was planned."""
    assert schedule.record.exchange_bytes == planned_bytes(schedule.program, case), case
    if case.options["exchange_granularity"] == 1 or case.n <= 8:
        assert schedule.program.transfers, case
        evaluation = [executor.program for executor in schedule._executors._planned.values()][-1]
        assert evaluation.forward_only and evaluation.transfers, case


@pytest.mark.timeout(1200 if FULL else 300)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("p", SAMPLE)
def test_grid(rank_pool, p: int, part: int) -> None:
    cases = grid(p)[part::PARTS] if FULL else random.Random(p).sample(grid(p), SAMPLE[p])
    check_cases(rank_pool, cases, check_schedule=check_exchange, timeout=1100 if FULL else 240)


def test_layers_with_a_window_keep_their_work(rank_pool) -> None:
    common = {"num_layers": 7, "window": 6, "batch": 2, "num_kv_heads": 2, "options": exchange(1), "runs": "TTEE"}
    cases = [
        Case(p=p, n=6, v=v, recompute=recompute, keep_output=False, documents=documents, **common)
        for p, v, recompute, documents in ((2, 1, True, (3, 14, 7)), (3, 2, False, None))
    ]
    check_cases(rank_pool, cases, check_schedule=check_exchange)


def test_values_of_another_head_dim(rank_pool) -> None:
    """Smaller than the queries', as in latent attention, and larger."""
    common = {"slice_len": 5, "num_kv_heads": 2, "options": exchange(1), "runs": "TTEET"}
    cases = [
        Case(p=2, n=4, m=3, value_head_dim=2, documents=(7, 9, 4), **common),
        Case(p=2, n=3, v=2, value_head_dim=3, window=7, recompute=True, keep_output=False, **common),
        Case(p=2, n=2, value_head_dim=6, **common),
        Case(p=3, n=6, value_head_dim=2, batch=2, recompute=True, **common),
    ]
    check_cases(rank_pool, cases, check_schedule=check_exchange)
