"""Timelines and tables of costs: what they add up, and that a file brings them back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slimpipe.planner.costs import Link, OpCosts
from slimpipe.planner.timeline import Span, Timeline
from slimpipe.program import Unit
from slimpipe.program.cost import AttentionShape

TIMELINE = Timeline(
    "two ranks",
    num_ranks=2,
    num_slices=1,
    num_stages_per_rank=1,
    spans=(
        Span(1, "F", 1.0, 4.0, Unit(0, 1, 0), 1, waited=1.0),
        Span(0, "send", 2.0, 3.0, Unit(0, 0, 0), 0, num_bytes=12),
        Span(1, "receive", 2.0, 3.0, Unit(0, 1, 0), 0, num_bytes=12),
        Span(0, "F", 0.0, 2.0, Unit(0, 0, 0), 0),
        Span(0, "V", 3.0, 4.0),
    ),
)


def test_sums() -> None:
    assert TIMELINE.seconds == 4
    assert [TIMELINE.compute_seconds(rank) for rank in (0, 1, 2)] == [3, 2, 0]
    assert TIMELINE.idle_share == 1 - 5 / 8
    assert [span.kind for span in TIMELINE.of_rank(0)] == ["F", "send", "V"]
    assert Timeline("", 1, 1, 1, ()).idle_share == 0


def test_file() -> None:
    assert Timeline.from_json(TIMELINE.to_json()) == TIMELINE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a timeline .*JSON"),
        ('{"title": "x"}', "not a timeline .*KeyError: 'num_ranks'"),
        (TIMELINE.to_json().replace('"V"', '"X"'), "kind 'X' is none of F, B"),
        (TIMELINE.to_json().replace('"start"', '"begin"'), "not a timeline .*begin"),
        ("[]", "not a timeline"),
        ('{"title": "", "num_ranks": 1, "num_slices": 1, "num_stages_per_rank": 1, "spans": [1]}', "not a timeline"),
        (TIMELINE.to_json().replace('"num_slices": 1', '"num_slices": 0'), "num_slices = 0"),
        (TIMELINE.to_json().replace('"end": 4.0', '"end": "x"'), "not a timeline"),
        (TIMELINE.to_json().replace('"end": 4.0', '"end": NaN'), "start, end, waited = "),
        (TIMELINE.to_json().replace('"end": 4.0', '"end": 0.0'), "no time runs backwards"),
        (TIMELINE.to_json().replace('"rank": 1', '"rank": 2'), "rank = 2: it must be an integer from 0 to 1"),
        (TIMELINE.to_json().replace("[0, 1, 0]", "[0, 2, 0]"), "stage = 2: it must be an integer from 0 to 1"),
    ],
)
def test_other_files(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Timeline.from_json(text)


COSTS = OpCosts(
    slice_len=4,
    linear_forward=(1.0, 2.0),
    linear_backward=(2.0, 4.0),
    attention_forward=(0.5, 0.25),
    attention_backward=(1.0, 0.5),
    recompute_forward=(0.25, 0.125),
    head_forward=3.0,
    head_backward=5.0,
    layers=(2, 0),
    link=Link(latency=0.5, bandwidth=2.0),
    attention_shape=AttentionShape(slice_len=4, num_heads=2, num_kv_heads=1, head_dim=8, value_head_dim=8),
)


def test_units() -> None:
    assert COSTS.pairs(0) == 8 and COSTS.pairs(2) == 40
    assert COSTS.forward_seconds(Unit(0, 0, 2)) == 1 + 0.5 * 40
    assert COSTS.backward_seconds(Unit(0, 1, 0)) == 4 + 0.5 * 8 + 0.125 + 5
    assert COSTS.forward_seconds(Unit(0, 1, 0)) - COSTS.forward_seconds(Unit(0, 1, 0), vocab_parallel="output") == 3
    assert [COSTS.num_layers(stage) for stage in (0, 1)] == [2, 1]
    assert COSTS.link.seconds(4) == 2.5


def test_whole_microbatches() -> None:
    """As much as their slices together, the attention to the past included."""
    whole = COSTS.whole(3)
    for stage in (0, 1):
        for seconds in (OpCosts.forward_seconds, OpCosts.backward_seconds):
            assert seconds(whole, Unit(0, stage, 0)) == sum(seconds(COSTS, Unit(0, stage, i)) for i in range(3))
    assert whole.slice_len == 12 and whole.attention_shape and whole.attention_shape.slice_len == 12
    assert whole.layers == COSTS.layers and whole.link == COSTS.link


def test_costs_for_a_look() -> None:
    costs = OpCosts.units(4, num_slices=8, attention_share=0.75, slice_len=16, backward_to_forward=2.5)
    forward = sum(costs.forward_seconds(Unit(0, 1, i)) for i in range(8))
    backward = sum(costs.backward_seconds(Unit(0, 1, i)) for i in range(8))
    assert forward == pytest.approx(8 / 4) and backward == pytest.approx(2.5 * forward)
    linear = 8 * costs.linear_forward[1]
    assert linear == pytest.approx(forward / 4)


def test_costs_file() -> None:
    assert OpCosts.from_json(COSTS.to_json()) == COSTS
    assert OpCosts.from_json(OpCosts.units(2).to_json()) == OpCosts.units(2)
    assert "Infinity" not in OpCosts.units(2).to_json()
    shape = '"attention_shape": {\n    "batch": 1'
    assert shape in COSTS.to_json()
    wrong = [COSTS.to_json().replace(shape, shape.replace("1", '"q"'))]
    wrong += [COSTS.to_json().replace('"bandwidth": 2.0', f'"bandwidth": {value}') for value in ("0", "NaN", '"q"')]
    wrong += [
        COSTS.to_json().replace('"head_forward": 3.0', f'"head_forward": {value}') for value in ("null", "[1, 2]")
    ]
    for text in ("{", "[]", "{}", '{"slice": 3}', *wrong):
        with pytest.raises(ValueError, match="not a table of costs"):
            OpCosts.from_json(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_backward": (1.0,)}, "linear_backward has 1 entries: it must have one for each of the 2 stages"),
        ({"layers": (1, 2, 3)}, "layers has 3 entries"),
        ({"slice_len": "q"}, "slice_len = q"),
        ({"slice_len": 0}, "slice_len = 0: it must be an integer of at least 1"),
        ({"linear_forward": (1.0, float("inf"))}, "linear_forward = .* and finite"),
        ({"embed": -1.0}, "embed = -1.0: costs must be at least 0"),
        ({"attention_forward": (0.0, float("nan"))}, "attention_forward = .*: costs must be at least 0"),
    ],
)
def test_costs_that_are_none(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(OpCosts.units(2), **change)
