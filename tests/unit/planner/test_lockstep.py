"""The closed form of step time: its loads are the program's, its bubbles those of design 1.4."""

from __future__ import annotations

from collections import defaultdict

import pytest

from slimpipe import SlimPipeOptions
from slimpipe.planner.costs import OpCosts
from slimpipe.planner.layout import Layout
from slimpipe.planner.lockstep import _ticks, compute_seconds, step_seconds
from slimpipe.planner.models import MODELS
from slimpipe.program import build_program

SHAPES = [(4, 8, 1, 2), (4, 8, 2, 3), (8, 16, 1, 1), (4, 6, 2, 2), (2, 2, 1, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("exchange", ["off", "on"])
def test_loads_are_the_program_s(shape: tuple[int, int, int, int], exchange: str) -> None:
    slice_len = 384
    options = SlimPipeOptions(context_exchange=exchange, exchange_granularity=1)
    highest: dict[tuple[str, int], float] = defaultdict(float)
    for load in build_program(*shape, slice_len=slice_len, options=options).attention_load():
        highest[load.phase, load.tick] = max(highest[load.phase, load.tick], load.computed)
    index = 0 if exchange == "off" else 1
    closed = sum(count * pair[index] for pair, count in _ticks(*shape))
    assert closed == pytest.approx(sum(highest.values()) / 2 / slice_len, rel=1e-3)


@pytest.mark.parametrize(
    ("model", "seq_len", "shape", "percent"),
    [
        ("llama-13b", 262144, (8, 16, 1, 2), 3.8),
        ("llama-13b", 262144, (8, 16, 5, 4), 0.4),
        ("llama-13b", 262144, (8, 8, 1, 1), 14.2),
        ("llama-70b", 524288, (16, 32, 1, 2), 3.4),
        ("llama-7b", 32768, (8, 16, 1, 2), 11.1),
    ],
)
def test_bubble_with_a_free_exchange(model: str, seq_len: int, shape: tuple[int, ...], percent: float) -> None:
    shape_ = MODELS[model]
    p, n, v, m = shape
    slice_len, layers = seq_len // n, shape_.num_layers / (p * v)
    linear, attention = 2 * slice_len * shape_.layer_parameters * layers, 4 * shape_.query_dim * layers
    costs = OpCosts(
        slice_len=slice_len,
        linear_forward=(linear,) * (p * v),
        linear_backward=(2 * linear,) * (p * v),
        attention_forward=(attention,) * (p * v),
        attention_backward=(2.5 * attention,) * (p * v),
    )
    layout = Layout(tensor=1, pipeline=p, data=1, num_slices=n, stages_per_rank=v, num_microbatches=m)
    bubble = 1 - compute_seconds(layout, costs) / step_seconds(layout, costs)
    assert 100 * bubble == pytest.approx(percent, abs=0.06)
