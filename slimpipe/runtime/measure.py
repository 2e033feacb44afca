"""Rates that decide whether the exchange pays: of attention on this rank, and of the links between pipeline ranks.

Everything here is short, leaves the random state of the model alone, and keeps nothing.

Shapes: B batch, L queries, K keys, N query heads, G K,V heads, H head dim.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from slimpipe.attention.events import AttentionLayer
from slimpipe.attention.kernels import choose_kernel
from slimpipe.dtypes import wide_dtype
from slimpipe.gather import gather_tensors
from slimpipe.options import SlimPipeOptions
from slimpipe.program.cost import AttentionShape, ExchangeCosts

_ATTENTION_SECONDS = 0.15  # for the last, largest size; the smaller ones before it take a third of that together
_LINK_SECONDS = 0.3  # likewise
_FIRST_TOKENS, _MAX_TOKENS = 16, 4096  # no kernel gets faster with more
_MESSAGE_BYTES = (1 << 20, 8 << 20, 64 << 20)
_NUM_RUNS = 3
_NUM_SMALL_RUNS = 21
_RATES = ("attention_flops", "link_bandwidth", "link_latency")


class LinkRates(NamedTuple):
    """What a link between two ranks does while it carries as much in the other direction."""

    bytes_per_second: float
    """Of each direction."""
    latency: float
    """Seconds of a message of one byte, its handling on the host included."""


def exchange_costs(
    layer: AttentionLayer, *, options: SlimPipeOptions, group: dist.ProcessGroup, device: torch.device
) -> ExchangeCosts:
    """Costs of the exchange, equal on all ranks: the rates that the options give, and measured ones for the others.

    Collective over ``group``. Where ranks measure different figures, those count at which the exchange is worth least:
    the fastest attention and the slowest link. The link is measured unless both of its figures are given.

    Args:
        layer: The attention layer to count and measure, equal on all ranks.
        options: ``attention_flops``, ``link_bandwidth`` and ``link_latency`` of them.
        group: The pipeline's process group, of two ranks or more.
        device: This rank's device.

    Raises:
        ValueError: The three options differ between ranks (raised on every rank), or the kernel refuses the layer.
    """
    _check_equal_rates(options, group, device)
    flops, bandwidth, latency = options.attention_flops, options.link_bandwidth, options.link_latency
    if flops is None:
        flops = _largest(measure_attention(layer, device=device), group, device)
    if bandwidth is None or latency is None:
        link = measure_link(group, device=device)
        bandwidth = link.bytes_per_second if bandwidth is None else bandwidth
        latency = link.latency if latency is None else latency
    return ExchangeCosts(shape=_shape(layer), flops_per_second=flops, bytes_per_second=bandwidth, latency=latency)


def measure_attention(layer: AttentionLayer, *, device: torch.device) -> float:
    """FLOP per second of a slice's queries on as many past keys, forward; in about 0.2 s.

    Long slices are measured on fewer tokens where the time asks for it.

    Raises:
        ValueError: The kernel refuses the layer.
    """
    # Of its own: a run must not depend on whether it was measured.
    generator = torch.Generator(device).manual_seed(0)
    num_tokens, most = min(layer.slice_len, _FIRST_TOKENS), min(layer.slice_len, _MAX_TOKENS)
    while True:
        part = replace(layer, slice_len=num_tokens)
        q_BLNH, k_BKGH, v_BKGH = (
            torch.randn(meta.shape, dtype=meta.dtype, device=device, generator=generator)
            for meta in (part.q, *part.rows(num_tokens))
        )
        forward = choose_kernel(layer.kernel, q_BLNH, k_BKGH, v_BKGH).forward
        seconds = _median_seconds(
            partial(forward, q_BLNH, k_BKGH, v_BKGH, causal=False, scale=layer.scale), device=device
        )
        # Twice the tokens take four times as long.
        if num_tokens == most or 4 * seconds * (1 + _NUM_RUNS) > _ATTENTION_SECONDS:
            return _shape(part).flops_per_row * num_tokens / seconds
        num_tokens = min(2 * num_tokens, most)


def measure_link(group: dist.ProcessGroup, *, device: torch.device) -> LinkRates:
    """Rates of the slowest link between neighbours, equal on all ranks; in about 0.3 s.

    Collective over ``group``. Ranks (0, 1), (2, 3) ... exchange messages at the same time, then (1, 2), (3, 4) ...; the
    larger messages are left out where they would take long.
    """
    assert dist.get_world_size(group) > 1, "one rank has no link"
    _largest(0.0, group, device)  # NCCL wants all ranks in the first operation of a group
    latency = _slowest_swap(1, num_runs=_NUM_SMALL_RUNS, group=group, device=device)
    bytes_per_second = 0.0
    for num_bytes in _MESSAGE_BYTES:
        seconds = _slowest_swap(num_bytes, num_runs=_NUM_RUNS, group=group, device=device)
        bytes_per_second = num_bytes / seconds
        if 8 * seconds * (1 + _NUM_RUNS) > _LINK_SECONDS:
            break
    return LinkRates(bytes_per_second, latency)


def _shape(layer: AttentionLayer) -> AttentionShape:
    return AttentionShape(
        batch=layer.batch,
        slice_len=layer.slice_len,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        value_head_dim=layer.value_head_dim,
        bytes_per_value=layer.dtype.itemsize,
        bytes_per_statistic=wide_dtype(layer.dtype).itemsize,
    )


def _slowest_swap(num_bytes: int, *, num_runs: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds in which the slowest pair of neighbours passes one message each way."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    sent = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    slowest = 0.0
    for first in range(min(2, num_ranks - 1)):
        partner = rank + 1 if (rank - first) % 2 == 0 else rank - 1
        if 0 <= partner < num_ranks:
            seconds = _median_seconds(partial(_swap, sent, received, partner, group), num_runs=num_runs, device=device)
            slowest = max(slowest, seconds)
    return _largest(slowest, group, device)


def _swap(sent: torch.Tensor, received: torch.Tensor, partner: int, group: dist.ProcessGroup) -> None:
    # As one batch: NCCL would let two unbatched sends wait for each other.
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, group=group, group_peer=partner),
            dist.P2POp(dist.irecv, received, group=group, group_peer=partner),
        ]
    )
    for work in works:
        work.wait()


def _median_seconds(run: Callable[[], object], *, device: torch.device, num_runs: int = _NUM_RUNS) -> float:
    """Of ``num_runs`` runs after one that does not count."""
    seconds = []
    for _ in range(1 + num_runs):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _largest(value: float, group: dist.ProcessGroup, device: torch.device) -> float:
    """Of all ranks; the very same number on each."""
    largest = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest.item()


def _check_equal_rates(options: SlimPipeOptions, group: dist.ProcessGroup, device: torch.device) -> None:
    """A rate that only some ranks measure would leave them waiting for the others."""
    mine = torch.tensor([getattr(options, name) or 0 for name in _RATES], dtype=torch.float64, device=device)
    everyone = gather_tensors(mine, group)
    for name, values in zip(_RATES, torch.stack(everyone).T.tolist(), strict=True):
        if len(set(values)) > 1:
            raise ValueError(
                f"the pipeline's ranks differ in SlimPipeOptions.{name}: rank by rank "
                f"{[value or None for value in values]}"
            )
