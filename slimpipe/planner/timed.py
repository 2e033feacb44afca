"""A planned layout's own program: what the simulator says of its time, and the program of its memory and messages."""

from __future__ import annotations

from dataclasses import dataclass

from slimpipe.options import SlimPipeOptions
from slimpipe.planner.layout import Layout
from slimpipe.planner.model_cost import VALUE_BYTES, data_parallel_seconds, exchange_costs
from slimpipe.planner.search import Judged
from slimpipe.planner.simulate import simulate
from slimpipe.program import Program, build_program

_MICROBATCHES = 3
"""The second may still be unsteady: with n = p and v = 1 it runs into the ramps of the first."""


@dataclass(frozen=True)
class Timed:
    """Of a whole step."""

    seconds: float
    bubble: float
    exchange_bytes: float
    """That all ranks of one pipeline and tensor coordinate send."""
    held_rows: int
    """Most K,V rows of a layer that the rank with most memory holds for others."""


def num_units(layout: Layout) -> int:
    """Units that are simulated: a measure of how long that takes."""
    shortened = min(layout.num_microbatches, _MICROBATCHES)
    return layout.pipeline * layout.num_slices * layout.stages_per_rank * shortened


def program_of(judged: Judged, *, num_microbatches: int | None = None) -> Program:
    """The program of a layout of ours, with the exchange that "auto" would plan on this hardware."""
    q, layout = judged.question, judged.layout
    return build_program(
        layout.pipeline,
        layout.num_slices,
        layout.stages_per_rank,
        num_microbatches or layout.num_microbatches,
        slice_len=q.seq_len // layout.num_slices,
        layers_per_stage=layout.layers_per_stage(q.model.num_layers),
        options=SlimPipeOptions(context_exchange="auto" if layout.exchange else "off"),
        exchange_costs=exchange_costs(q.model, layout, q.hardware, seq_len=q.seq_len),
        vocab_parallel=layout.vocab_parallel,
    )


def timed(judged: Judged) -> Timed:
    """Simulates two and three microbatches; each further one takes as long as the third does."""
    q, m = judged.question, judged.layout.num_microbatches
    costs = judged.costs
    shape = costs.attention_shape
    assert shape is not None
    seconds, computed, sent, held = [], [], [], 0
    most = min(m, _MICROBATCHES)
    for count in range(max(1, most - 1), most + 1):
        program = program_of(judged, num_microbatches=count)
        timeline = simulate(program, costs)
        seconds.append(timeline.seconds)
        computed.append((1 - timeline.idle_share) * timeline.seconds)
        num_bytes = program.exchange_bytes(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            bytes_per_value=VALUE_BYTES,
        )
        sent.append(float(sum(num_bytes.values())))
        held = program.peak_held_rows(judged.rank)
    step = _extended(seconds, m)
    data_parallel = data_parallel_seconds(q.model, judged.layout, q.hardware)
    return Timed(step + data_parallel, 1 - _extended(computed, m) / step, _extended(sent, m), held)


def _extended(values: list[float], count: int) -> float:
    """For ``count`` microbatches, from the values for the last two counts that are simulated."""
    return values[-1] + max(0, count - _MICROBATCHES) * (values[-1] - values[0])
