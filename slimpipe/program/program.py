"""The program: for every rank, the list of instructions it runs, and the shape it was built for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slimpipe.program.ir import Instruction, Op, Unit

if TYPE_CHECKING:
    from slimpipe.torch_private import Action


@dataclass(frozen=True, kw_only=True)
class Program:
    """Who does what, and when, in one step. Made by `build_program`, proven by `check`."""

    num_ranks: int
    num_slices: int
    num_stages_per_rank: int
    num_microbatches: int
    slice_len: int
    """Tokens per slice."""
    layers_per_stage: tuple[int, ...] | None
    """Layers of each global stage, where the caller said so."""
    forward_only: bool
    num_ticks: int
    """Lock-step slots from the first instruction of any rank to the last."""
    instructions: tuple[tuple[Instruction, ...], ...]
    """``instructions[rank]``, in the order in which the rank runs them."""

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.num_ranks * self.num_stages_per_rank

    def rank_of(self, stage: int) -> int:
        """Rank that holds the global stage ``stage``."""
        return stage % self.num_ranks

    def peak_live_units(self, rank: int) -> int:
        """Most units of ``rank`` at one time between the start of their forward and the end of their backward, counted
        from the instructions. A forward-only program keeps no unit: 1."""
        live = peak = 0
        for instruction in self.instructions[rank]:
            if instruction.op is Op.FORWARD:
                live += 1
                peak = max(peak, live)
            if instruction.op is Op.BACKWARD or (self.forward_only and instruction.op is Op.FORWARD):
                live -= 1
        return peak

    def flat_microbatch(self, unit: Unit) -> int:
        """The index under which torch's schedules would know this slice: ``microbatch * num_slices + slice``."""
        return unit.microbatch * self.num_slices + unit.slice

    def pipeline_order(self) -> dict[int, list[tuple[int, str, int] | None]]:
        """Compute instructions in time: for each rank a row of (stage, "F" or "B", flat microbatch index), or None
        where the rank is idle.

        A tick is one column of forwards, where any rank has one, then one column of backwards. All rows are equally
        long, and with equal costs the share of None is the bubble.
        """
        columns = sorted(
            {_column(instruction) for row in self.instructions for instruction in row if _is_compute(instruction)}
        )
        place = {column: index for index, column in enumerate(columns)}
        order: dict[int, list[tuple[int, str, int] | None]] = {}
        for rank, row in enumerate(self.instructions):
            order[rank] = [None] * len(columns)
            for instruction in filter(_is_compute, row):
                unit = instruction.unit
                order[rank][place[_column(instruction)]] = (
                    unit.stage,
                    instruction.op.value,
                    self.flat_microbatch(unit),
                )
        return order

    def to_pipeline_order(self) -> dict[int, list[Action | None]]:
        """`pipeline_order` in torch's own words, for its validator, CSV files and visualiser. The only part of a
        program that needs torch."""
        from slimpipe.torch_private import make_action

        return {
            rank: [None if entry is None else make_action(*entry) for entry in row]
            for rank, row in self.pipeline_order().items()
        }


def _is_compute(instruction: Instruction) -> bool:
    return instruction.op in (Op.FORWARD, Op.BACKWARD)


def _column(instruction: Instruction) -> tuple[int, bool]:
    return instruction.tick, instruction.op is Op.BACKWARD
