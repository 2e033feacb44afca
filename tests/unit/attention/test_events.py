"""What a step without exchange learns of a stage's attention layers."""

from __future__ import annotations

import pytest
import torch

from slimpipe.attention.events import AttentionCall, AttentionLayer, Event, Learner, Phase, StageEvents
from slimpipe.attention.kernels import choose_kernel
from slimpipe.attention.kv_store import LayerStore, SlotBuffers
from slimpipe.program import SlotPlan, Unit, build_program, plan_slots

UNIT = Unit(0, 0, 0)
FORWARD = Phase.FORWARD
BACKWARD = Phase.BACKWARD


@pytest.fixture
def plan() -> SlotPlan:
    return plan_slots(build_program(1, 2, 1, 1), [0])


def run(
    learner: Learner, plan: SlotPlan, phase: Phase, events: list[Event], *, scale=0.5, dtype=torch.float32, windows=()
) -> None:
    """One phase of one unit as attention reports it; layers of ``windows`` have one."""
    watch = learner.phase(phase)
    stores = [LayerStore(SlotBuffers(plan), index=index) for index in range(3)]
    watch.start(stores)
    q, k, v = (torch.zeros(2, 5, heads, 8, dtype=dtype) for heads in (4, 2, 2))
    for event in events:
        stores[event.layer].append(UNIT, k, v)
        kernel = choose_kernel("reference", q, k, v)
        watch.begin(
            event.kind, stores[event.layer], (q,), AttentionCall(kernel, scale, 3 if event.layer in windows else None)
        )
        watch.serve()
        assert list(watch.replies()) == []
    watch.finish()


def test_learns_layers_and_events(plan: SlotPlan) -> None:
    learner = Learner()
    forward = [Event(FORWARD, 0), Event(FORWARD, 1)]
    backward = [Event(BACKWARD, 1), Event(FORWARD, 0), Event(BACKWARD, 0)]
    for _ in range(2):
        run(learner, plan, FORWARD, forward)
        run(learner, plan, BACKWARD, backward)
    layer = AttentionLayer(2, 5, 4, 2, 8, 8, torch.float32, "reference", 0.5)
    assert learner.learned() == StageEvents({0: layer, 1: layer}, {FORWARD: tuple(forward), BACKWARD: tuple(backward)})


def test_layers_with_a_window_have_no_events(plan: SlotPlan) -> None:
    learner = Learner()
    run(learner, plan, FORWARD, [Event(FORWARD, 0), Event(FORWARD, 1), Event(FORWARD, 2)], windows=(0, 2))
    learned = learner.learned()
    assert list(learned.layers) == [1] and learned.events[FORWARD] == (Event(FORWARD, 1),)


def test_a_stage_without_attention(plan: SlotPlan) -> None:
    learner = Learner()
    run(learner, plan, FORWARD, [])
    assert learner.learned() == StageEvents({}, {FORWARD: (), BACKWARD: ()})


def test_layers_that_change(plan: SlotPlan) -> None:
    for change in ({"scale": 1.0}, {"dtype": torch.float64}):
        learner = Learner()
        run(learner, plan, FORWARD, [Event(FORWARD, 0)])
        run(learner, plan, FORWARD, [Event(FORWARD, 0)], **change)
        assert learner.learned() == "its attention layers differ in shape or kernel from slice to slice"


def test_order_that_changes(plan: SlotPlan) -> None:
    learner = Learner()
    run(learner, plan, FORWARD, [Event(FORWARD, 0), Event(FORWARD, 1)])
    run(learner, plan, FORWARD, [Event(FORWARD, 1), Event(FORWARD, 0)])
    assert learner.learned() == "its attention layers run in another order from slice to slice"


def test_layers_that_did_not_run(plan: SlotPlan) -> None:
    learner = Learner()
    run(learner, plan, FORWARD, [Event(FORWARD, 0), Event(FORWARD, 2)])
    assert learner.learned() == "not all of its attention layers ran"


def test_messages_of_a_layer() -> None:
    layer = AttentionLayer(2, 5, 4, 2, 8, 6, torch.bfloat16, "reference", 0.5)
    q, out, lse = ((2, 5, 4, 8), torch.bfloat16), ((2, 5, 4, 6), torch.bfloat16), ((2, 4, 5), torch.float32)
    assert layer.request(FORWARD) == [q]
    assert layer.reply(FORWARD) == [out, lse]
    assert layer.request(BACKWARD) == [q, out, out, lse]
    assert layer.reply(BACKWARD) == [q]
    assert layer.rows(3) == [((2, 3, 2, 8), torch.bfloat16), ((2, 3, 2, 6), torch.bfloat16)]
    assert layer.rows(3, gradient=True) == [((2, 3, 2, 8), torch.float32), ((2, 3, 2, 6), torch.float32)]
