"""From a shape to a program: lay out each rank's units by tick, then put the messages beside them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from slimpipe.options import SlimPipeOptions, check_vocab_parallel
from slimpipe.program.cost import ExchangeCosts
from slimpipe.program.exchange import plan_exchange
from slimpipe.program.ir import Instruction, Op, Transfer, Unit
from slimpipe.program.order import backward_tick, forward_order, forward_tick, hop_ticks
from slimpipe.program.program import Program
from slimpipe.program.vocabulary import shared_instructions


def build_program(
    num_ranks: int,
    num_slices: int,
    num_stages_per_rank: int,
    num_microbatches: int,
    *,
    slice_len: int = 1,
    layers_per_stage: tuple[int, ...] | None = None,
    forward_only: bool = False,
    options: SlimPipeOptions | None = None,
    exchange_costs: ExchangeCosts | None = None,
    vocab_parallel: str = "none",
) -> Program:
    """Builds the program of one step.

    Args:
        num_ranks: pipeline ranks.
        num_slices: equal slices per microbatch; at least ``num_ranks``.
        num_stages_per_rank: stages on each rank; local stage j of rank r is global stage j * num_ranks + r.
        num_microbatches: microbatches per step.
        slice_len: tokens per slice. Has no influence on the order of units, but on what the exchange moves.
        layers_per_stage: layers of each global stage. Has no influence on the order of units.
        forward_only: leave out everything backward, for evaluation.
        options: the options of the schedule; those of the exchange say who helps whom. None has an influence on the
            order of units. None: no exchange.
        exchange_costs: what the exchange costs and saves. Without it ``context_exchange = "auto"`` moves nothing, and
            "on" moves all that levels the loads.
        vocab_parallel: which work on the vocabulary all ranks share: "none", "output" (output layer and loss) or "both"
            (the embedding as well). Has no influence on the order of units.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument breaks its rule; the message names the value, the rule and the nearest legal value.
    """
    _require_int("num_ranks", num_ranks, at_least=1)
    _require_int("num_stages_per_rank", num_stages_per_rank, at_least=1)
    _require_int("num_microbatches", num_microbatches, at_least=1)
    _require_int("num_slices", num_slices, at_least=num_ranks, named="num_ranks")
    _require_int("slice_len", slice_len, at_least=1)
    _require_layers(layers_per_stage, num_stages=num_ranks * num_stages_per_rank)
    if type(forward_only) is not bool:
        raise TypeError(f"forward_only = {forward_only!r}: it must be a bool, not {type(forward_only).__name__}")
    if not isinstance(options, SlimPipeOptions | None):
        raise TypeError(f"options = {options!r}: it must be SlimPipeOptions or None, not {type(options).__name__}")
    check_vocab_parallel(vocab_parallel)

    computes = [
        _compute_instructions(
            rank, num_ranks, num_slices, num_stages_per_rank, num_microbatches, forward_only=forward_only
        )
        for rank in range(num_ranks)
    ]
    transfers = _transfers(computes, slice_len, num_stages_per_rank, options, exchange_costs)
    shared = shared_instructions(computes, num_stages=num_ranks * num_stages_per_rank, vocab_parallel=vocab_parallel)
    instructions = tuple(
        tuple(
            _with_messages(
                _with_help(row, transfers, rank),
                shared,
                rank=rank,
                num_ranks=num_ranks,
                num_slices=num_slices,
                num_stages=num_ranks * num_stages_per_rank,
            )
        )
        for rank, row in enumerate(computes)
    )
    return Program(
        num_ranks=num_ranks,
        num_slices=num_slices,
        num_stages_per_rank=num_stages_per_rank,
        num_microbatches=num_microbatches,
        slice_len=slice_len,
        layers_per_stage=layers_per_stage,
        forward_only=forward_only,
        num_ticks=1 + max(row[-1].tick for row in instructions),
        instructions=instructions,
        transfers=transfers,
        vocab_parallel=vocab_parallel,
    )


def _transfers(
    computes: list[list[Instruction]],
    slice_len: int,
    num_stages_per_rank: int,
    options: SlimPipeOptions | None,
    costs: ExchangeCosts | None,
) -> tuple[Transfer, ...]:
    if options is None or options.context_exchange == "off" or len(computes) == 1:
        return ()
    if options.context_exchange == "auto" and costs is None:
        return ()
    return plan_exchange(
        computes,
        slice_len=slice_len,
        granularity=options.exchange_granularity,
        max_held_rows=options.exchange_max_slices * slice_len * num_stages_per_rank,
        costs=costs if options.context_exchange == "auto" else None,
    )


def _with_help(computes: list[Instruction], transfers: tuple[Transfer, ...], rank: int) -> list[Instruction]:
    """Adds help where the rank has no unit of its own in the phase of a tick."""
    busy = {(compute.tick, compute.op.phase) for compute in computes}
    helped: dict[tuple[int, Op], Unit] = {}
    for transfer in transfers:
        if transfer.helper == rank and (transfer.tick, transfer.phase) not in busy:
            helped.setdefault((transfer.tick, transfer.phase), transfer.unit)
    op_of = {Op.FORWARD: Op.HELP_FORWARD, Op.BACKWARD: Op.HELP_BACKWARD}
    helps = [Instruction(tick, op_of[phase], unit) for (tick, phase), unit in helped.items()]
    return sorted(computes + helps, key=_moment)


def _compute_instructions(
    rank: int, num_ranks: int, num_slices: int, num_stages_per_rank: int, num_microbatches: int, *, forward_only: bool
) -> list[Instruction]:
    """What the rank computes, by tick; in a tick forward comes before backward."""
    order = list(forward_order(num_slices, num_ranks=num_ranks, num_stages_per_rank=num_stages_per_rank))
    local_units = [(local_stage * num_ranks + rank, slice_index) for local_stage, slice_index in order]
    forward_units = [Unit(microbatch, *rest) for microbatch in range(num_microbatches) for rest in local_units]
    forwards = [
        Instruction(forward_tick(index, rank=rank), Op.FORWARD, unit) for index, unit in enumerate(forward_units)
    ]
    if forward_only:
        return forwards
    first_backward = backward_tick(
        0, rank=rank, num_ranks=num_ranks, num_slices=num_slices, num_stages_per_rank=num_stages_per_rank
    )
    backward_units = [Unit(microbatch, *rest) for microbatch in range(num_microbatches) for rest in local_units[::-1]]
    backwards = [Instruction(first_backward + index, Op.BACKWARD, unit) for index, unit in enumerate(backward_units)]
    return sorted(forwards + backwards, key=_moment)


def _moment(instruction: Instruction) -> tuple[int, int]:
    """When something is computed: tick, and place in the tick."""
    assert instruction.op.place is not None
    return instruction.tick, instruction.op.place


def _with_messages(
    computes: list[Instruction],
    shared: list[Instruction],
    *,
    rank: int,
    num_ranks: int,
    num_slices: int,
    num_stages: int,
) -> Iterator[Instruction]:
    """Puts a rank's messages beside what it computes, and what all ranks share in its places between.

    Receives are posted one compute instruction ahead, so that they overlap it: two receive buffers at most.

    A send follows its compute instruction, unless the peer will not need it for more than two ticks (on the way from
    the last rank back to the first, in cycles longer than the pipeline). Then it waits here until two ticks before:
    sent at once it would have no receive to match and stop the sender, for good where the peer waits for it in turn.
    """
    delay = {
        Op.FORWARD: max(0, hop_ticks(rank, num_ranks=num_ranks, num_slices=num_slices, forward=True) - 2),
        Op.BACKWARD: max(0, hop_ticks(rank, num_ranks=num_ranks, num_slices=num_slices, forward=False) - 2),
    }
    done: dict[Op, list[Unit]] = {Op.FORWARD: [], Op.BACKWARD: []}
    due = deque(shared)
    for compute, following in zip([None, *computes], [*computes, None], strict=True):
        tick = (compute or computes[0]).tick
        while due and _moment(due[0]) < _moment(compute or computes[0]):
            yield due.popleft()
        # Standing before `compute`, post what `following` needs.
        if following is not None:
            receive = _receive(following, tick, num_ranks, num_stages)
            if receive is not None:
                yield receive
        if compute is None:
            continue
        yield compute
        if compute.op not in done:
            continue
        units = done[compute.op]
        units.append(compute.unit)
        if len(units) > delay[compute.op]:
            send = _send(compute.op, units[-1 - delay[compute.op]], tick, num_ranks, num_stages)
            if send is not None:
                yield send
    yield from due


def _receive(compute: Instruction, tick: int, num_ranks: int, num_stages: int) -> Instruction | None:
    if num_ranks == 1:
        return None
    stage = compute.unit.stage
    if compute.op is Op.FORWARD and stage > 0:
        return Instruction(tick, Op.RECEIVE_FORWARD, compute.unit, peer=(stage - 1) % num_ranks)
    if compute.op is Op.BACKWARD and stage < num_stages - 1:
        return Instruction(tick, Op.RECEIVE_BACKWARD, compute.unit, peer=(stage + 1) % num_ranks)
    return None


def _send(op: Op, unit: Unit, tick: int, num_ranks: int, num_stages: int) -> Instruction | None:
    if num_ranks == 1:
        return None
    if op is Op.FORWARD and unit.stage < num_stages - 1:
        return Instruction(tick, Op.SEND_FORWARD, unit, peer=(unit.stage + 1) % num_ranks)
    if op is Op.BACKWARD and unit.stage > 0:
        return Instruction(tick, Op.SEND_BACKWARD, unit, peer=(unit.stage - 1) % num_ranks)
    return None


def _require_int(name: str, value: int, *, at_least: int, named: str = "") -> None:
    if type(value) is not int:
        raise TypeError(f"{name} = {value!r}: it must be an int, not {type(value).__name__}")
    if value < at_least:
        least = f"{named} = {at_least}" if named else f"{at_least}"
        raise ValueError(f"{name} = {value}: it must be at least {least}; nearest legal value: {at_least}")


def _require_layers(layers_per_stage: tuple[int, ...] | None, *, num_stages: int) -> None:
    if layers_per_stage is None:
        return
    if type(layers_per_stage) is not tuple:
        raise TypeError(
            f"layers_per_stage = {layers_per_stage!r}: it must be a tuple of ints or None, "
            f"not {type(layers_per_stage).__name__}"
        )
    if len(layers_per_stage) != num_stages:
        nearest = (layers_per_stage + (0,) * num_stages)[:num_stages]
        raise ValueError(
            f"layers_per_stage = {layers_per_stage}: it must have one entry for each of the {num_stages} stages; "
            f"nearest legal value: {nearest}"
        )
    for stage, num_layers in enumerate(layers_per_stage):
        _require_int(f"layers_per_stage[{stage}]", num_layers, at_least=0)
