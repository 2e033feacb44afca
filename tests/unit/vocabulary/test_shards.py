"""Rows of the vocabulary by rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slimpipe.vocabulary import shard_rows


def test_examples() -> None:
    assert [len(shard_rows(9, num_ranks=8, rank=r)) for r in range(8)] == [2, 2, 2, 2, 1, 0, 0, 0]
    assert [len(shard_rows(50257, num_ranks=4, rank=r)) for r in range(4)] == [12565, 12565, 12565, 12562]
    assert [len(shard_rows(1, num_ranks=3, rank=r)) for r in range(3)] == [1, 0, 0]


@given(vocab_size=st.integers(1, 300), num_ranks=st.integers(1, 40))
def test_cut_as_torch_chunk_with_empty_shards_at_the_end(vocab_size: int, num_ranks: int) -> None:
    shards = [list(shard_rows(vocab_size, num_ranks=num_ranks, rank=rank)) for rank in range(num_ranks)]
    chunks = [chunk.tolist() for chunk in torch.arange(vocab_size).chunk(num_ranks)]
    assert shards == chunks + [[]] * (num_ranks - len(chunks))


@pytest.mark.parametrize(
    ("vocab_size", "num_ranks", "rank", "message"),
    [
        (0, 2, 0, "vocab_size = 0: it must be at least 1; nearest legal value: 1"),
        (8, 0, 0, "num_ranks = 0: it must be at least 1"),
        (8, 2, 2, r"rank = 2: ranks are 0 .. 1; nearest legal value: 1"),
        (8, 2, -1, "nearest legal value: 0"),
    ],
)
def test_refusals(vocab_size: int, num_ranks: int, rank: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_rows(vocab_size, num_ranks=num_ranks, rank=rank)
