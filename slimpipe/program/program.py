"""The program: for every rank, the list of instructions it runs, and the shape it was built for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from slimpipe.program.cost import AttentionShape
from slimpipe.program.exchange import Load, loads
from slimpipe.program.ir import Instruction, Op, Transfer, Unit
from slimpipe.program.runs import num_rows

if TYPE_CHECKING:
    from slimpipe.torch_private import Action


class ProgramError(Exception):
    """A program breaks a rule; the message names the rank, the instruction or transfer, and the rule."""


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
    transfers: tuple[Transfer, ...] = ()
    """Who helps whom with which part of their attention, by tick, phase, rank of the unit and helper. Every rank works
    through those that it is part of in this order, layer by layer."""
    vocab_parallel: str = "none"
    """Which work on the vocabulary all ranks share: "none", "output" (output layer and loss) or "both" (the embedding
    as well)."""

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

    def attention_load(self) -> list[Load]:
        """Attention work by phase ("F", "B"), tick and rank: what the rank's own unit needs, and what it computes.

        In past tokens plus half the own slice; a row for every rank in each phase of each tick in which any rank has a
        unit.
        """
        return loads(self.instructions, self.transfers, slice_len=self.slice_len)

    @cached_property
    def load_max_over_mean(self) -> float:
        """Attention time of a step over what it would be with perfectly level loads, if every phase of every tick
        lasted as long as its highest load."""
        rows = self.attention_load()
        moments = [rows[start : start + self.num_ranks] for start in range(0, len(rows), self.num_ranks)]
        highest = sum(max(load.computed for load in moment) for moment in moments)
        return highest / (sum(load.own for load in rows) / self.num_ranks)

    def exchange_bytes(
        self,
        *,
        num_heads: int = 1,
        num_kv_heads: int | None = None,
        head_dim: int = 128,
        value_head_dim: int | None = None,
        batch: int = 1,
        bytes_per_value: int = 2,
        bytes_per_statistic: int = 4,
    ) -> dict[tuple[str, int, int], int]:
        """Bytes that the exchange sends in one step, by kind, source and destination.

        Kinds: "K,V"; "Q"; "output" (output and LSE of a part, forward); "gradients" (in backward: gradient of the
        output, output and LSE to the helper, dQ, dK, dV back). Layers as in `layers_per_stage`, one per stage where it
        is not given. Attention that is recomputed sends queries and outputs once more; they are not counted.

        Args:
            num_heads: Query heads.
            num_kv_heads: K,V heads; as many as query heads if None.
            head_dim: Of Q and K.
            value_head_dim: Of V; ``head_dim`` if None.
            batch: Sequences per microbatch.
            bytes_per_value: Of Q, K, V and their like.
            bytes_per_statistic: Of the LSE and of dK,dV.
        """
        shape = AttentionShape(
            batch=batch,
            slice_len=self.slice_len,
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_dim=head_dim,
            value_head_dim=head_dim if value_head_dim is None else value_head_dim,
            bytes_per_value=bytes_per_value,
            bytes_per_statistic=bytes_per_statistic,
        )
        total: Counter[tuple[str, int, int]] = Counter()
        for _, phase, unit, helper, _, sent, dropped in self.transfers:
            owner = self.rank_of(unit.stage)
            layers = 1 if self.layers_per_stage is None else self.layers_per_stage[unit.stage]
            total["K,V", owner, helper] += layers * num_rows(sent) * shape.kv_row
            total["Q", owner, helper] += layers * shape.query
            if phase is Op.FORWARD:
                total["output", helper, owner] += layers * shape.reply(phase)
            else:
                total["gradients", owner, helper] += layers * (shape.request(phase) - shape.query)
                returned = num_rows(dropped) * shape.gradient_row
                total["gradients", helper, owner] += layers * (shape.reply(phase) + returned)
        return {key: num_bytes for key, num_bytes in sorted(total.items()) if num_bytes}

    def peak_held_rows(self, rank: int) -> int:
        """Most K,V rows, of one layer and over all units, that ``rank`` holds for others from one tick to a later."""
        held = peak = 0
        for transfer in self.transfers:
            if transfer.helper == rank:
                held += num_rows(transfer.sent) - num_rows(transfer.dropped)
                peak = max(peak, held)
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
