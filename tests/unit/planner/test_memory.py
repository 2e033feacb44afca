"""Memory in closed form against the program's own facts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimpipe.planner.layout import Layout
from slimpipe.planner.memory import PARTS, Numerics, _messages, parameters, peak_bytes, saved_bytes
from slimpipe.planner.models import MODELS, ModelShape
from slimpipe.planner.slices import most_messages, most_slots, peak_live, peak_live_of_stage, waiting_gradients
from slimpipe.program import Op, Program, build_program, plan_slots


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    p = draw(st.integers(1, 4))
    return Layout(
        tensor=1,
        pipeline=p,
        data=1,
        num_slices=draw(st.integers(p, 9)),
        stages_per_rank=draw(st.integers(1, 3)),
        num_microbatches=draw(st.integers(1, 5)),
        exchange=False,
    )


def program_of(layout: Layout) -> Program:
    return build_program(layout.pipeline, layout.num_slices, layout.stages_per_rank, layout.num_microbatches)


def walked(program: Program, rank: int) -> tuple[list[int], int]:
    """Peak of live units of each local stage, and of slices of dK,dV in waiting, counted from the instructions."""
    live, peaks = [0] * program.num_stages_per_rank, [0] * program.num_stages_per_rank
    waiting: set[int] = set()
    most_waiting = 0
    for instruction in program.instructions[rank]:
        stage = instruction.unit.stage // program.num_ranks
        if instruction.op is Op.FORWARD:
            live[stage] += 1
            peaks[stage] = max(peaks[stage], live[stage])
        if instruction.op is Op.BACKWARD:
            live[stage] -= 1
            (waiting.add if instruction.unit.slice else waiting.discard)(stage)
            most_waiting = max(most_waiting, len(waiting))
    return peaks, most_waiting * (program.num_slices - 1)


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_counts_are_the_program_s(layout: Layout) -> None:
    program = program_of(layout)
    for rank in range(layout.pipeline):
        peaks, waiting = walked(program, rank)
        assert [peak_live_of_stage(layout, rank, stage) for stage in range(layout.stages_per_rank)] == peaks
        assert peak_live(layout, rank) == program.peak_live_units(rank)
        assert waiting_gradients(layout) == waiting
        assert _messages(program, rank) <= most_messages(layout, rank)
        slots = plan_slots(program, range(rank, layout.num_stages, layout.pipeline)).num_slots
        assert peak_live(layout, rank) <= slots <= most_slots(layout, rank)


def test_counts_of_torch_s_schedules() -> None:
    cut = Layout(tensor=1, pipeline=4, data=1, num_microbatches=8, schedule="1F1B", exchange=False)
    assert [peak_live(cut, rank) for rank in range(4)] == [4, 3, 2, 1]
    interleaved = Layout(
        tensor=1, pipeline=4, data=1, num_microbatches=8, stages_per_rank=2, schedule="Interleaved1F1B", exchange=False
    )
    assert [peak_live(interleaved, rank) for rank in range(4)] == [11, 9, 7, 5]
    assert peak_live_of_stage(interleaved, 3, 1) == 1


def test_a_layer_s_tensors_by_hand() -> None:
    """Llama's block, bf16: 12 h + 8 f values' bytes, of which the outputs of both norms are not cut by t."""
    model = MODELS["llama-13b"]
    h, f, heads = model.dim, model.ffn_dim, model.num_heads
    alone = Layout(tensor=1, pipeline=2, data=1, num_slices=2)
    assert saved_bytes(model, alone, Numerics()) == 12 * h + 8 * f + 4 * heads + 8
    shared = Layout(tensor=8, pipeline=2, data=1, num_slices=2)
    assert saved_bytes(model, shared, Numerics()) == (8 * h + 8 * f + 4 * heads + 8) / 8 + 4 * h
    kept = Layout(tensor=8, pipeline=2, data=1, num_slices=2, recompute="full")
    assert saved_bytes(model, kept, Numerics()) == (4 * h + 4 * heads) / 8


@pytest.mark.parametrize("vocab_parallel", ["none", "output", "both"])
def test_ranks_hold_every_parameter_once(vocab_parallel: str) -> None:
    model = ModelShape(name="m", num_layers=10, dim=64, ffn_dim=128, num_heads=4, num_kv_heads=2, vocab_size=1000)
    cut = Layout(tensor=2, pipeline=4, data=3, num_slices=4, stages_per_rank=2, vocab_parallel=vocab_parallel)
    held = 2 * sum(parameters(model, cut, rank) for rank in range(4))
    assert held == pytest.approx(model.parameters - model.dim)  # all but the last norm


def test_recompute_and_shared_vocabulary_save_what_they_should() -> None:
    model, settings_ = MODELS["llama3-70b"], {"tensor": 8, "pipeline": 8, "data": 2, "num_slices": 16}

    def total(rank: int, **more: object) -> dict[str, float]:
        return peak_bytes(model, Layout(**settings_, **more), seq_len=262144, rank=rank)  # type: ignore[arg-type]

    kinds = [total(0, recompute=kind)["activations"] for kind in ("none", "selective", "full")]
    assert kinds == sorted(kinds, reverse=True) and kinds[0] > 3 * kinds[2]
    assert total(7)["output"] > 4 * total(7, vocab_parallel="output")["output"]
    assert total(0)["output"] == 0
    assert total(0, exchange=False)["exchange"] == 0 < total(0)["exchange"]
    assert tuple(total(0)) == PARTS


def test_exchange_holds_no_more_than_it_may() -> None:
    from slimpipe import SlimPipeOptions

    model = MODELS["llama3-debugmodel"]
    cut = Layout(tensor=1, pipeline=4, data=1, num_slices=8, num_microbatches=2)
    options = SlimPipeOptions(context_exchange="on", exchange_granularity=1, exchange_max_slices=3)
    program = build_program(4, 8, 1, 2, slice_len=64, options=options)
    for rank in range(4):
        most = peak_bytes(model, cut, seq_len=512, rank=rank, exchange_max_slices=3)["exchange"]
        assert peak_bytes(model, cut, seq_len=512, rank=rank, program=program)["exchange"] <= most
