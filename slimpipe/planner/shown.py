"""From the settings of a run to timelines of it under several schedules: ours, and those of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from slimpipe.nearest import nearest_name
from slimpipe.options import SlimPipeOptions
from slimpipe.planner.costs import OpCosts
from slimpipe.planner.simulate import simulate
from slimpipe.planner.simulate_torch import simulate_torch, torch_order
from slimpipe.planner.timeline import Timeline
from slimpipe.program import Program, build_program
from slimpipe.program.cost import ExchangeCosts
from slimpipe.schedule_names import ONE_STAGE_PER_RANK, SLIMPIPE_SCHEDULES, TORCH_SCHEDULES, TWO_STAGES_PER_RANK


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the schedules that are shown have in common."""

    num_ranks: int
    num_slices: int
    """Slices per microbatch; schedules of torch cut none."""
    num_stages_per_rank: int | None
    """None: as many as the schedule needs."""
    num_microbatches: int
    slice_len: int
    options: SlimPipeOptions = field(default_factory=lambda: SlimPipeOptions(context_exchange="off"))
    exchange_costs: ExchangeCosts | None = None
    vocab_parallel: str = "none"
    attention_share: float = 0.5
    """Share of attention in the time of a microbatch."""
    head: float = 0.0
    """Forward of output layer and loss for a slice, where a slice takes 1 through all the model's layers."""
    costs: OpCosts | None = None
    """Measured costs, for as many stages as the setting has; if None, ``estimate``'s."""
    estimate: Callable[[str, Setting], OpCosts] | None = None
    """Estimated costs of a schedule by its name, of whole microbatches for those of torch; if None, costs in units of a
    slice's forward through the model."""

    def stages_per_rank(self, schedule: str) -> int:
        """How many stages each rank has under a schedule: what was asked for, as far as the schedule can have it."""
        if schedule in SLIMPIPE_SCHEDULES:
            return self.num_stages_per_rank or (1 if schedule == "SlimPipe" else 2)
        if schedule in ONE_STAGE_PER_RANK:
            return 1
        return 2 if schedule in TWO_STAGES_PER_RANK else max(2, self.num_stages_per_rank or 2)

    def program(self, schedule: str = "SlimPipe") -> Program:
        """The program that the executor would run."""
        return build_program(
            self.num_ranks,
            self.num_slices,
            self.stages_per_rank(schedule),
            self.num_microbatches,
            slice_len=self.slice_len,
            options=self.options,
            exchange_costs=self.exchange_costs,
            vocab_parallel=self.vocab_parallel,
        )

    @property
    def in_seconds(self) -> bool:
        """Whether costs are in seconds, not in units."""
        return self.costs is not None or self.estimate is not None

    def costs_of(self, schedule: str) -> OpCosts:
        """Costs on the stages of a schedule, of slices unless ``estimate`` gives those of whole microbatches."""
        num_stages = self.num_ranks * self.stages_per_rank(schedule)
        if self.costs is not None and self.costs.num_stages == num_stages:
            return self.costs
        if self.costs is not None:
            raise ValueError(
                f"the costs are of {self.costs.num_stages} stages, {schedule} has {num_stages}; nearest legal value: "
                f"--stages-per-rank {max(1, self.costs.num_stages // self.num_ranks)}, or other schedules"
            )
        if self.estimate is not None:
            return self.estimate(schedule, self)
        return OpCosts.units(
            num_stages,
            num_slices=self.num_slices,
            attention_share=self.attention_share,
            slice_len=self.slice_len,
            head_forward=self.head,
            head_backward=2 * self.head,
            vocabulary=3 * self.head / self.num_ranks,
            vocabulary_forward=self.head / self.num_ranks,
        )


def timeline_of(schedule: str, setting: Setting) -> Timeline:
    """One step under a schedule, simulated.

    Raises:
        ValueError: No such schedule, or the setting is none that it can run.
    """
    known = (*SLIMPIPE_SCHEDULES, *TORCH_SCHEDULES)
    if schedule not in known:
        near = nearest_name(schedule, known)
        raise ValueError(f"schedule {schedule!r}: it must be one of {', '.join(known)}; nearest legal value: {near!r}")
    costs, stages, count = setting.costs_of(schedule), setting.stages_per_rank(schedule), setting.num_microbatches
    title = f"{schedule}, {setting.num_ranks} ranks" + (f" x {stages} stages" if stages > 1 else "")
    title += f", {count} microbatch{'es' if count > 1 else ''}"
    if schedule in SLIMPIPE_SCHEDULES:
        title += f" x {setting.num_slices} slices{_extras(setting)}"
        return simulate(setting.program(schedule), costs, title=title)
    order = torch_order(
        schedule, num_ranks=setting.num_ranks, num_stages_per_rank=stages, num_microbatches=setting.num_microbatches
    )
    if costs.slice_len == setting.slice_len:
        costs = costs.whole(setting.num_slices)
    return simulate_torch(order, costs, title=title)


def with_exchange(setting: Setting, exchange: str | None) -> Setting:
    """The same with context exchange "on" or "off"; as it was for None."""
    if exchange is None:
        return setting
    return replace(setting, options=replace(setting.options, context_exchange=exchange))


def _extras(setting: Setting) -> str:
    auto = "exchange as its costs say" if setting.exchange_costs else "no exchange (auto: decided in the run)"
    exchange = {"on": "every rank helps", "off": "", "auto": auto}[setting.options.context_exchange]
    vocabulary = {"none": "", "output": "shared output layer", "both": "shared vocabulary"}[setting.vocab_parallel]
    return "".join(f", {extra}" for extra in (exchange, vocabulary) if extra)
