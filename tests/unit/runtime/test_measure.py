"""The measured rate of attention: of what really ran, bounded in time, without a trace."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from slimpipe.runtime import measure
from slimpipe.runtime.measure import measure_attention, measure_link
from tests.model import ATTENTION_LAYER as LAYER

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "layer",
    [
        LAYER,
        replace(LAYER, slice_len=1),
        replace(LAYER, kernel="reference", dtype=torch.float64),
        replace(LAYER, value_head_dim=8),
        replace(LAYER, slice_len=1 << 20, num_heads=32, head_dim=128, value_head_dim=128),
    ],
)
def test_attention_rate_is_plausible_soon_there_and_leaves_random_numbers_alone(layer):
    before, start = torch.get_rng_state(), time.process_time()
    assert 1e3 < measure_attention(layer, device=CPU) < 1e15
    assert time.process_time() - start < 2 * torch.get_num_threads()
    assert torch.equal(torch.get_rng_state(), before)


def test_rate_counts_what_ran(monkeypatch):
    """A kernel that takes its time: FLOP over seconds, both of the number of tokens that was run in the end."""
    ran = []

    def seconds(run, **_):
        ran.append(run.args[0].shape[1])
        return 0.001 * ran[-1]

    monkeypatch.setattr(measure, "_median_seconds", seconds)
    rate = measure_attention(replace(LAYER, slice_len=1024), device=CPU)
    assert ran == [16]  # twice as many would take too long
    assert rate == pytest.approx(2 * 16 * 16 * 4 * (16 + 16) / 0.016)
    monkeypatch.setattr(measure, "_ATTENTION_SECONDS", 1e9)
    measure_attention(replace(LAYER, slice_len=100), device=CPU)
    assert ran[1:] == [16, 32, 64, 100]


def test_a_kernel_that_cannot_serve_is_told():
    with pytest.raises(ValueError, match="flash_attn needs"):
        measure_attention(replace(LAYER, kernel="flash_attn"), device=CPU)


def test_one_rank_has_no_link(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    with pytest.raises(AssertionError, match="one rank has no link"):
        measure_link(None, device=CPU)
