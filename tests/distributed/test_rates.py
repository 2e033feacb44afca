"""Rates for the exchange: equal on all ranks, and not measured where they are given."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from slimpipe import SlimPipeOptions
from slimpipe.program.cost import AttentionShape, ExchangeCosts
from slimpipe.runtime import measure
from slimpipe.runtime.measure import exchange_costs, measure_link
from tests.model import ATTENTION_LAYER as LAYER

CPU = torch.device("cpu")


def _measure_all() -> tuple:
    start = time.perf_counter()
    link = measure_link(dist.group.WORLD, device=CPU)
    seconds = time.perf_counter() - start
    return link, seconds, exchange_costs(LAYER, options=SlimPipeOptions(), group=dist.group.WORLD, device=CPU)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_ranks_agree(rank_pool, num_ranks):
    links, seconds, costs = zip(*rank_pool(num_ranks).run(_measure_all))
    assert len(set(links)) == 1 and links[0].bytes_per_second > 0 and links[0].latency > 0
    assert max(seconds) < 10
    assert len(set(costs)) == 1
    assert costs[0].shape == AttentionShape(
        slice_len=32, num_heads=4, num_kv_heads=2, head_dim=16, value_head_dim=16, bytes_per_value=4
    )
    assert min(costs[0].flops_per_second, costs[0].bytes_per_second, costs[0].latency) > 0


def _given(options: SlimPipeOptions, forbidden: tuple[str, ...]) -> ExchangeCosts:
    with pytest.MonkeyPatch.context() as patch:
        for name in forbidden:
            patch.delattr(measure, name)
        return exchange_costs(LAYER, options=options, group=dist.group.WORLD, device=CPU)


def test_what_is_given_is_not_measured(rank_pool):
    link = {"link_bandwidth": 1e9, "link_latency": 1e-4}
    for options, forbidden in (
        (SlimPipeOptions(attention_flops=1e12, **link), ("measure_attention", "measure_link")),
        (SlimPipeOptions(attention_flops=1e12, link_latency=1e-4), ("measure_attention",)),
        (SlimPipeOptions(**link), ("measure_link",)),
    ):
        costs, other = rank_pool(2).run(_given, options, forbidden)
        assert costs == other
        for name, rate in zip(
            ("attention_flops", "link_bandwidth", "link_latency"),
            (costs.flops_per_second, costs.bytes_per_second, costs.latency),
        ):
            given = getattr(options, name)
            assert rate > 0 if given is None else rate == given


def _differ() -> str:
    options = SlimPipeOptions(link_bandwidth=1e9 if dist.get_rank() else None)
    with pytest.raises(ValueError) as caught:
        exchange_costs(LAYER, options=options, group=dist.group.WORLD, device=CPU)
    return str(caught.value)


def test_options_that_differ_are_told_on_every_rank(rank_pool):
    said = "the pipeline's ranks differ in SlimPipeOptions.link_bandwidth: rank by rank [None, 1000000000.0]"
    assert rank_pool(2).run(_differ) == [said, said]
