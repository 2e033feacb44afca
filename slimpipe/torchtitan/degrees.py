"""How many ranks a run has: the product of its parallel degrees."""

from __future__ import annotations

from typing import Any

from slimpipe.nearest import nearest_divisor

_DEGREES = (
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "context_parallel_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "expert_parallel_degree",  # of no ranks of its own
)


def broken_degree(parallelism: Any) -> str | None:
    """Why a degree cannot be one, whatever the others are; None where all can. FSDP's may be -1: what is left."""
    for name in _DEGREES:
        degree = getattr(parallelism, name)
        if degree < 1 and (name, degree) != ("data_parallel_shard_degree", -1):
            return f"parallelism.{name} = {degree}: it must be at least 1; nearest legal value: 1"
    return None


def product_of_degrees(parallelism: Any) -> int:
    """Ranks that the degrees ask for; the least, where one of them takes what the others leave."""
    return (
        parallelism.data_parallel_replicate_degree
        * max(1, parallelism.data_parallel_shard_degree)  # -1 takes the ranks that the others leave
        * parallelism.context_parallel_degree
        * parallelism.tensor_parallel_degree
        * parallelism.pipeline_parallel_degree
    )


def check_num_ranks(parallelism: Any, num_ranks: int) -> None:
    """Check that the parallel degrees fit `num_ranks`.

    Raises:
        ValueError: they do not; the message names a number that fits.
    """
    product = product_of_degrees(parallelism)
    if parallelism.data_parallel_shard_degree == -1:
        fits, rule = num_ranks % product == 0, f"a multiple of {product}"
        nearest = max(1, round(num_ranks / product)) * product
    else:
        fits, rule, nearest = num_ranks == product, str(product), product
    if fits and parallelism.data_parallel_shard_degree == -1:
        shards = num_ranks // (parallelism.data_parallel_replicate_degree * parallelism.pipeline_parallel_degree)
        if shards % (experts := parallelism.expert_parallel_degree):
            raise ValueError(
                f"parallelism.expert_parallel_degree = {experts}: it must divide the {shards} ranks that "
                f"{num_ranks} ranks leave for it; nearest legal value: {nearest_divisor(shards, experts)}"
            )
    if not fits:
        raise ValueError(
            f"{num_ranks} ranks: their number must be {rule}, the product of the degrees in [parallelism]; "
            f"use --nproc {nearest}, or change a degree"
        )
