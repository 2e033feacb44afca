"""Which rows of a vocabulary matrix each rank holds."""

from __future__ import annotations


def shard_rows(vocab_size: int, *, num_ranks: int, rank: int) -> range:
    """The rows of ``rank``: contiguous, in rank order, cut as torch's ``Shard(0)`` (and torch.chunk) cuts a tensor.

    Every rank gets ceil(vocab_size / num_ranks) rows until they run out, so the last rank that has any may have fewer,
    and ranks after it none: 9 rows over 8 ranks are 2, 2, 2, 2, 1, 0, 0, 0. So cut, the shards are one DTensor, and
    the shards of a further ``Shard(0)`` inside them (FSDP2's) are too.

    Raises:
        ValueError: No row or no rank at all, or ``rank`` is none of the ranks.
    """
    for name, value in (("vocab_size", vocab_size), ("num_ranks", num_ranks)):
        if value < 1:
            raise ValueError(f"{name} = {value}: it must be at least 1; nearest legal value: 1")
    if not 0 <= rank < num_ranks:
        raise ValueError(
            f"rank = {rank}: ranks are 0 .. {num_ranks - 1}; nearest legal value: {min(max(rank, 0), num_ranks - 1)}"
        )
    rows_per_rank = -(-vocab_size // num_ranks)
    return range(min(rank * rows_per_rank, vocab_size), min((rank + 1) * rows_per_rank, vocab_size))
