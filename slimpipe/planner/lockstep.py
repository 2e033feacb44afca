"""Step time and bubble in closed form: every rank in step, each phase of a tick as long as its busiest rank's work.

For ranking many layouts; the simulator times the best of them. In a phase a rank runs one unit or none. All units cost
the same but for attention, which grows with the past: its *load* is past slices plus half the own one. With context
exchange loads are level, as far as the own halves, which cannot move, allow, wherever that saves more than the messages
of the busiest rank take. Without exchange real ranks are not quite in step, and faster than this.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from slimpipe.planner.costs import OpCosts
from slimpipe.planner.layout import Layout
from slimpipe.program.cost import ExchangeCosts
from slimpipe.program.ir import Op
from slimpipe.program.order import forward_order

_SENT_SHARE = 0.4
"""Rows sent, of rows moved: a row that is sent serves at several ticks."""

_UNHIDDEN = 0.5
"""Of the message time that the exchange's plan charges, to be safe, what is really paid."""


def step_seconds(layout: Layout, costs: OpCosts, exchange: ExchangeCosts | None = None) -> float:
    """Of the pipeline; what data parallelism and the optimizer add is not in it.

    Args:
        layout: How the run is cut.
        costs: Of its units.
        exchange: Of the exchange, where the layout has it; None if it costs nothing.
    """
    if layout.schedule != "SlimPipe":
        return _whole_step_seconds(layout, costs)
    m, n, p = layout.num_microbatches, layout.num_slices, layout.pipeline
    again = max(costs.recompute_forward, default=0.0)
    linear = max(costs.linear_forward) + max(costs.linear_backward) + again + 2 * costs.host_seconds
    seconds = (m * n * layout.stages_per_rank + p - 1) * linear + _attention_seconds(layout, costs, exchange)
    if layout.vocab_parallel == "none":
        seconds += m * n * (costs.head_forward + costs.head_backward)
    else:
        seconds += m * n * (costs.vocabulary + costs.embed + costs.embed_backward)
        seconds += 2 * m * n * costs.link.seconds(costs.activation_bytes)
    return seconds + 2 * (p - 1) * costs.link.seconds(costs.activation_bytes)  # hops of the ramps; others are hidden


def compute_seconds(layout: Layout, costs: OpCosts) -> float:
    """What all ranks compute in a step, added up and divided by their number: the step time without a bubble."""
    n, p = layout.num_slices, layout.pipeline
    per_microbatch = n * (sum(costs.linear_forward) + sum(costs.linear_backward) + sum(costs.recompute_forward))
    pairs = sum(costs.pairs(i) for i in range(n))
    per_microbatch += pairs * (sum(costs.attention_forward) + sum(costs.attention_backward))
    if layout.vocab_parallel == "none":
        per_microbatch += n * (costs.head_forward + costs.head_backward)
    else:
        per_microbatch += n * p * (costs.vocabulary + costs.embed + costs.embed_backward)
    return layout.num_microbatches * per_microbatch / p


def equal_units_bubble(layout: Layout) -> float:
    """Share of time in which ranks are idle if all units cost the same."""
    p, m = layout.pipeline, layout.num_microbatches
    return (p - 1) / (m * layout.num_slices * layout.stages_per_rank + p - 1)


def _whole_step_seconds(layout: Layout, costs: OpCosts) -> float:
    """Of torch's schedules: a unit is a whole microbatch."""
    m, p, v = layout.num_microbatches, layout.pipeline, layout.stages_per_rank
    unit = max(costs.linear_forward) + max(costs.linear_backward) + max(costs.recompute_forward, default=0.0)
    unit += costs.pairs(0) * (max(costs.attention_forward) + max(costs.attention_backward))
    head = m * (costs.head_forward + costs.head_backward)
    return (m * v + p - 1) * unit + head


def _attention_seconds(layout: Layout, costs: OpCosts, exchange: ExchangeCosts | None) -> float:
    """Of the busiest rank, added up over all phases of all ticks."""
    per_load = costs.slice_len**2
    forward, backward = per_load * max(costs.attention_forward), per_load * max(costs.attention_backward)
    ticks = _ticks(layout.pipeline, layout.num_slices, layout.stages_per_rank, layout.num_microbatches)
    if not layout.exchange:
        return (forward + backward) * sum(count * most for (most, _), count in ticks)
    if exchange is None:
        return (forward + backward) * sum(count * level for (_, level), count in ticks)
    layers = max(map(costs.num_layers, range(costs.num_stages)))
    total = 0.0
    for phase, seconds in ((Op.FORWARD, forward), (Op.BACKWARD, backward)):
        fixed = layers * exchange.message_seconds(phase, num_sent_rows=0)
        row = layers * exchange.message_seconds(phase, num_sent_rows=costs.slice_len) - fixed
        for (most, level), count in ticks:
            messages = fixed + _SENT_SHARE * row * (most - level)
            pays = messages < (most - level) * seconds
            total += count * (level * seconds + _UNHIDDEN * messages if pays else most * seconds)
    return total


@lru_cache(maxsize=4096)
def _ticks(p: int, n: int, v: int, m: int) -> tuple[tuple[tuple[float, float], int], ...]:
    """Highest load, and load if level, of one phase of a tick, in slices; with the number of such ticks in a step."""
    slices = [slice_index for _, slice_index in forward_order(n, num_ranks=p, num_stages_per_rank=v)]

    def tick(running: list[int]) -> tuple[float, float]:
        return max(running) + 0.5, max(0.5, (sum(running) + len(running) / 2) / p)

    # Rank r runs index k at tick k + r (backward alike, mirrored): p neighbours of the order run at a time.
    twice = slices * 2
    full = [tick(twice[start : start + p]) for start in range(n * v)]
    counts = Counter({pair: (m - 1) * count for pair, count in Counter(full).items()})
    counts.update(full[: n * v - p + 1])
    for count in range(1, p):
        counts.update([tick(slices[:count]), tick(slices[n * v - count :])])
    return tuple(counts.items())
