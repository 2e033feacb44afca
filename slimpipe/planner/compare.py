"""A measured step beside the plan for it: what its operations take, and where the two differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

from slimpipe.planner.costs import OpCosts
from slimpipe.planner.shown import Setting
from slimpipe.planner.timeline import COMPUTE_KINDS, Span, Timeline
from slimpipe.program import Program

_NUM_WAITS = 8


class Row(NamedTuple):
    """All operations of one kind, of all ranks together."""

    kind: str
    num: int
    run_seconds: float
    """Without waits."""
    plan_seconds: float
    run_waited: float
    plan_waited: float


class Wait(NamedTuple):
    """A wait of the run that the plan does not have, or not as long."""

    rank: int
    name: str
    start: float
    run_waited: float
    plan_waited: float

    @property
    def excess(self) -> float:
        """Seconds that the plan does not know of."""
        return self.run_waited - self.plan_waited


@dataclass(frozen=True)
class Comparison:
    """Where a run and its plan differ."""

    num_ranks: int
    run_seconds: float
    plan_seconds: float
    run_idle_share: float
    plan_idle_share: float
    rows: tuple[Row, ...]
    waits: tuple[Wait, ...]
    """The longest beyond the plan, longest first."""

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **{name: value for name, value in asdict(self).items() if name not in ("rows", "waits")},
            "rows": [row._asdict() for row in self.rows],
            "waits": [{**wait._asdict(), "excess": wait.excess} for wait in self.waits],
        }

    def lines(self) -> list[str]:
        """For people."""
        error = self.plan_seconds / self.run_seconds - 1
        run_all, plan_all = self.num_ranks * self.run_seconds, self.num_ranks * self.plan_seconds
        lines = [
            f"step: run {self.run_seconds:.4g} s, plan {self.plan_seconds:.4g} s ({error:+.1%}); "
            f"idle: run {self.run_idle_share:.1%}, plan {self.plan_idle_share:.1%}",
            "",
            "                  seconds of all ranks       share of their time           waited",
            "kind   number         run        plan         run        plan         run        plan",
        ]
        for row in self.rows:
            figures = (row.run_seconds, row.plan_seconds)
            shares = (row.run_seconds / run_all, row.plan_seconds / plan_all)
            lines.append(
                f"{row.kind:7}{row.num:6}"
                + "".join(f"{value:12.4g}" for value in figures)
                + "".join(f"{value:12.1%}" for value in shares)
                + "".join(f"{value:12.4g}" for value in (row.run_waited, row.plan_waited))
            )
        if self.waits:
            lines += ["", "longest waits that the plan does not have:"]
        for wait in self.waits:
            lines.append(
                f"  rank {wait.rank} at {wait.start:.4g} s, {wait.name}: waited {wait.run_waited:.3g} s, "
                f"plan {wait.plan_waited:.3g} s"
            )
        return lines


def compare(run: Timeline, plan: Timeline) -> Comparison:
    """Lay a recorded step beside a simulated one.

    Raises:
        ValueError: They are of different programs; the message names what only one of them has.
    """
    in_run, in_plan = _by_key(run), _by_key(plan)
    for here, there, name, other in ((in_run, in_plan, "run", "plan"), (in_plan, in_run, "plan", "run")):
        if only := next((span for key, span in here.items() if key not in there), None):
            raise ValueError(
                f"--run: the {name} has {_name(only)} on rank {only.rank} and the {other} has not; give the settings "
                "of the run: its CONFIG.toml, or --exchange and --vocab-parallel as they were"
            )
    rows = []
    for kind in COMPUTE_KINDS:
        keys = [key for key, span in in_run.items() if span.kind == kind]
        if keys:
            rows.append(Row(kind, len(keys), *_totals(in_run, in_plan, keys, lambda span: span.seconds),
                            *_totals(in_run, in_plan, keys, lambda span: span.waited)))  # fmt: skip
    waits = [Wait(span.rank, _name(span), span.start, span.waited, in_plan[key].waited) for key, span in in_run.items()]
    longest = sorted((wait for wait in waits if wait.excess > 0), key=lambda wait: -wait.excess)[:_NUM_WAITS]
    return Comparison(
        run.num_ranks,
        run.seconds,
        plan.seconds,
        run.idle_share,
        plan.idle_share,
        tuple(rows),
        tuple(longest),
    )


def shape_of(run: Timeline) -> Setting:
    """The setting of a recorded step, as far as its spans say: exchange is taken as off."""
    units = [span.unit for span in run.spans if span.unit is not None]
    kinds = {span.kind for span in run.spans}
    if not units:
        raise ValueError("--run: nothing was recorded; record with slimpipe.record_times = true")
    return Setting(
        num_ranks=run.num_ranks,
        num_slices=run.num_slices,
        num_stages_per_rank=run.num_stages_per_rank,
        num_microbatches=1 + max(unit.microbatch for unit in units),
        slice_len=1,
        vocab_parallel="both" if "E" in kinds else "output" if "V" in kinds else "none",
    )


def fit_costs(run: Timeline, program: Program) -> OpCosts:
    """Costs that explain a recorded step: for each stage a time of its own, and attention by the load that each rank
    has in the program, exchange included. Messages and hosts cost nothing: what they took shows as a difference."""
    loads = {(load.phase, load.tick, load.rank): load.computed for load in program.attention_load()}
    fitted: dict[str, tuple[list[float], float]] = {}
    for kind in ("F", "B"):
        points: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for span in run.spans:
            if span.kind == kind and span.unit is not None:
                load = loads.get((kind, span.tick or 0, span.rank))
                if load is None:
                    raise ValueError("--run: it ran another program than the plan's; give the settings of the run")
                points[span.unit.stage].append((load, span.seconds))
        fitted[kind] = _fit(points, program.num_stages)
    # A load is in past tokens, for each of the slice's queries.
    per_pair = {kind: slope / program.slice_len for kind, (_, slope) in fitted.items()}

    def typical(kind: str) -> float:
        return median([span.seconds for span in run.spans if span.kind == kind] or [0.0])

    return OpCosts(
        slice_len=program.slice_len,
        linear_forward=tuple(fitted["F"][0]),
        linear_backward=tuple(fitted["B"][0]),
        attention_forward=(per_pair["F"],) * program.num_stages,
        attention_backward=(per_pair["B"],) * program.num_stages,
        vocabulary=typical("V"),
        embed=typical("E"),
        embed_backward=typical("EB"),
    )


def _fit(points: Mapping[int, list[tuple[float, float]]], num_stages: int) -> tuple[list[float], float]:
    """Least squares of a constant per stage and one slope for all, none of them negative."""
    means = {stage: (fmean(x for x, _ in row), fmean(y for _, y in row)) for stage, row in points.items()}
    pairs = [(x - means[stage][0], y - means[stage][1]) for stage, row in points.items() for x, y in row]
    spread = sum(x * x for x, _ in pairs)
    slope = max(0.0, sum(x * y for x, y in pairs) / spread) if spread else 0.0
    slope = min([slope, *(y / x for x, y in means.values())])
    return [means[stage][1] - slope * means[stage][0] if stage in means else 0.0 for stage in range(num_stages)], slope


Key = tuple[int, str, object, int | None]


def _by_key(timeline: Timeline) -> dict[Key, Span]:
    """What computes, by what it is. Help has no unit of its own and is known by its tick."""
    spans = (span for span in timeline.spans if not span.is_message)
    return {(s.rank, s.kind, None if s.kind.startswith("help") else s.unit, s.tick): s for s in spans}


def _totals(
    run: Mapping[Key, Span], plan: Mapping[Key, Span], keys: Iterable[Key], value: Callable[[Span], float]
) -> tuple[float, float]:
    keys = list(keys)
    return sum(value(run[key]) for key in keys), sum(value(plan[key]) for key in keys)


def _name(span: Span) -> str:
    return f"{span.kind} of {span.unit}" if span.unit is not None else span.kind
