"""The reference's own planned figures, by its rule and constants (design 1.6)."""

from __future__ import annotations

from typing import Any

import pytest

from slimpipe.planner.layout import Layout
from slimpipe.planner.lockstep import equal_units_bubble
from slimpipe.planner.models import MODELS
from slimpipe.planner.reference import reference_bytes
from slimpipe.planner.search import GIB


def layout(**settings: Any) -> Layout:
    return Layout(**{"tensor": 8, "pipeline": 8, "data": 1, **settings})


def gib(model: str, cut: Layout, seq_len: int) -> dict[str, float]:
    parts = reference_bytes(MODELS[model], cut, seq_len=seq_len, rank=0)
    return {part: num_bytes / GIB for part, num_bytes in parts.items()}


def test_13b_of_256k() -> None:
    cut = layout(data=2, num_slices=16, stages_per_rank=5, num_microbatches=8)
    parts = gib("llama-13b", cut, 262144)
    assert parts["activations"] == pytest.approx(29.6, rel=0.01)
    assert parts["output"] == pytest.approx(2.0, rel=0.05)
    assert parts["dK,dV"] == pytest.approx(2.4, rel=0.02)
    assert sum(parts.values()) == pytest.approx(37.1, rel=0.05)


def test_13b_of_256k_interleaved_and_recomputed() -> None:
    cut = layout(data=2, stages_per_rank=5, num_microbatches=8, recompute="full", schedule="Interleaved1F1B")
    assert sum(gib("llama-13b", cut, 262144).values()) == pytest.approx(22.9, rel=0.05)


@pytest.mark.parametrize(
    ("cut", "percent"),
    [
        (layout(num_slices=16, stages_per_rank=5, num_microbatches=8), 1.08),
        (layout(stages_per_rank=5, num_microbatches=8, schedule="Interleaved1F1B"), 14.89),
        (layout(pipeline=16, num_slices=64, stages_per_rank=5, num_microbatches=4), 1.16),
    ],
)
def test_bubbles(cut: Layout, percent: float) -> None:
    assert 100 * equal_units_bubble(cut) == pytest.approx(percent, abs=0.01)


@pytest.mark.parametrize(("recompute", "multiple"), [("none", 33.5), ("selective", 8.5), ("full", 2.0)])
def test_bytes_of_a_token_in_a_layer_of_70b(recompute: str, multiple: float) -> None:
    model = MODELS["llama-70b"]
    cut = Layout(tensor=1, pipeline=1, data=1, schedule="1F1B", recompute=recompute)
    activations = reference_bytes(model, cut, seq_len=1, rank=0)["activations"]
    assert activations / model.num_layers / model.dim == pytest.approx(multiple)
