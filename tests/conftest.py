"""Fixtures for all tests."""

from collections.abc import Callable, Iterator

import pytest

from tests.harness import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """`rank_pool(world_size)`: a pool of gloo ranks that all tests of the session share."""
    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield get
    for pool in pools.values():
        pool.close()
