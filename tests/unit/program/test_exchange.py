"""The plan of the exchange: how level the loads are, what it sends and holds, and when it does not pay."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings

from slimpipe.options import SlimPipeOptions
from slimpipe.program import Instruction, Op, Program, build_program, check
from slimpipe.program.cost import AttentionShape, ExchangeCosts
from slimpipe.program.exchange import Load
from slimpipe.program.runs import num_rows
from tests.unit.program.shapes import Shape, programs_with_exchange, with_exchange

HELPS = (Op.HELP_FORWARD, Op.HELP_BACKWARD)


def moments(program: Program) -> dict[tuple[int, str], list[Load]]:
    """Rows of `attention_load` by tick and phase."""
    rows = defaultdict(list)
    for load in program.attention_load():
        rows[load.tick, load.phase].append(load)
    return rows


def computes(row: tuple[Instruction, ...]) -> list[Instruction]:
    return [i for i in row if i.op in (Op.FORWARD, Op.BACKWARD)]


def test_the_smallest_exchange_in_full() -> None:
    """Past and half the own slice: 6 beside 2 at ticks 1 and 3; 6 beside an idle rank at tick 2, in both phases."""
    program = with_exchange((2, 2, 1, 1), slice_len=4)
    assert [
        (t.tick, t.phase, t.unit.stage, t.unit.slice, t.helper, t.rows, t.sent, t.dropped) for t in program.transfers
    ] == [
        (1, Op.FORWARD, 0, 1, 1, ((0, 2),), ((0, 2),), ((0, 2),)),
        (2, Op.FORWARD, 1, 1, 0, ((0, 3),), ((0, 3),), ((0, 3),)),
        (2, Op.BACKWARD, 1, 1, 0, ((0, 3),), ((0, 3),), ((0, 3),)),
        (3, Op.BACKWARD, 0, 1, 1, ((0, 2),), ((0, 2),), ((0, 2),)),
    ]
    assert [[i for i in row if i.op in HELPS] for row in program.instructions] == [
        [
            Instruction(2, Op.HELP_FORWARD, program.transfers[1].unit),
            Instruction(2, Op.HELP_BACKWARD, program.transfers[1].unit),
        ],
        [],
    ]
    assert [load for load in program.attention_load() if load.tick in (0, 2, 3)] == [
        Load("F", 0, 0, 2.0, 2.0),
        Load("F", 0, 1, 0.0, 0.0),
        Load("F", 2, 0, 0.0, 3.0),
        Load("F", 2, 1, 6.0, 3.0),
        Load("B", 2, 0, 0.0, 3.0),
        Load("B", 2, 1, 6.0, 3.0),
        Load("B", 3, 0, 6.0, 4.0),
        Load("B", 3, 1, 2.0, 4.0),
    ]
    assert str(program.transfers[1]) == (
        "transfer of 3 rows of microbatch 0, stage 1, slice 1 to rank 0 (forward, tick 2)"
    )


def test_bytes_of_the_smallest_exchange() -> None:
    options = SlimPipeOptions(context_exchange="on", exchange_granularity=1)
    program = build_program(2, 2, 1, 1, slice_len=4, layers_per_stage=(1, 2), options=options)
    kv_row, gradient_row = 3 * 2 * (8 + 16) * 2, 3 * 2 * (8 + 16) * 4
    query, output, lse = 3 * 4 * 4 * 8 * 2, 3 * 4 * 4 * 16 * 2, 3 * 4 * 4 * 4
    # Rank 0 hands over 2 rows in each phase in its one layer, rank 1 hands over 3 in each of its two.
    assert program.exchange_bytes(batch=3, num_heads=4, num_kv_heads=2, head_dim=8, value_head_dim=16) == {
        ("K,V", 0, 1): 2 * 2 * kv_row,
        ("K,V", 1, 0): 2 * 2 * 3 * kv_row,
        ("Q", 0, 1): 2 * query,
        ("Q", 1, 0): 2 * 2 * query,
        ("output", 1, 0): output + lse,
        ("output", 0, 1): 2 * (output + lse),
        ("gradients", 0, 1): (2 * output + lse) + 2 * (query + 3 * gradient_row),
        ("gradients", 1, 0): 2 * (2 * output + lse) + (query + 2 * gradient_row),
    }
    without = SlimPipeOptions(context_exchange="off")
    assert build_program(2, 2, 1, 1, slice_len=4, options=without).exchange_bytes() == {}


@pytest.mark.parametrize("slice_len", [64, 1000])
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(
    "shape", [(4, 4, 1), (4, 8, 1), (4, 16, 1), (8, 8, 1), (8, 16, 1), (5, 5, 1), (4, 8, 2), (4, 6, 2)]
)
def test_loads_are_level(shape: tuple[int, int, int], num_microbatches: int, slice_len: int) -> None:
    program = with_exchange((*shape, num_microbatches), slice_len=slice_len)
    check(program)
    for rows in moments(program).values():
        assert [load.rank for load in rows] == list(range(program.num_ranks))
        mean = sum(load.own for load in rows) / len(rows)
        assert sum(load.computed for load in rows) == sum(load.own for load in rows)
        assert max(load.computed for load in rows) <= max(1.01 * mean, slice_len / 2)


@pytest.mark.parametrize(("shape", "granularity"), [((8, 16, 1, 2), 128), ((8, 16, 5, 4), 128), ((5, 7, 2, 3), 100)])
def test_loads_are_level_up_to_the_granularity(shape: Shape, granularity: int) -> None:
    """No rank is left with, or takes, more than one step too much."""
    program = with_exchange(shape, slice_len=1024, granularity=granularity)
    for rows in moments(program).values():
        level = max(sum(load.own for load in rows) / len(rows), 1024 / 2)
        assert max(load.computed for load in rows) <= level + granularity
    assert all(num_rows(transfer.rows) % granularity == 0 for transfer in program.transfers)


def test_rows_are_sent_once_where_memory_allows() -> None:
    program = with_exchange((8, 32, 1, 2), granularity=SlimPipeOptions.exchange_granularity)
    num_sent = sum(num_rows(transfer.sent) for transfer in program.transfers)
    assert 0 < num_sent <= 0.35 * sum(num_rows(transfer.rows) for transfer in program.transfers)
    # Not only of its own rows, but also of what is sent if nothing may be held.
    re_sending = with_exchange((8, 32, 1, 2), granularity=SlimPipeOptions.exchange_granularity, max_slices=0)
    assert num_sent <= 0.35 * sum(num_rows(transfer.sent) for transfer in re_sending.transfers)


def test_transfers_are_few() -> None:
    """About one per rank in a phase of a tick, on average."""
    program = with_exchange((8, 16, 1, 2), granularity=128)
    assert len(program.transfers) < 1.1 * 8 * len(moments(program))


@given(programs_with_exchange(max_ranks=8, max_slices=16, max_stages=3, max_microbatches=4))
@settings(max_examples=250, deadline=None)
def test_any_plan(program: Program) -> None:
    check(program)
    for rows in moments(program).values():
        assert sum(load.computed for load in rows) == sum(load.own for load in rows)
        assert max(load.computed for load in rows) <= max(load.own for load in rows)
        assert all(load.computed >= min(load.own, program.slice_len / 2) for load in rows)


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("max_slices", [0, 1, 3, 16])
@pytest.mark.parametrize("shape", [(4, 8, 1, 2), (4, 6, 3, 2), (8, 32, 1, 2)])
def test_what_helpers_hold_is_bounded(shape: Shape, max_slices: int, forward_only: bool) -> None:
    """In slices of all layers of a rank; a row is of one of its stages."""
    program = with_exchange(shape, slice_len=64, max_slices=max_slices, forward_only=forward_only)
    check(program)
    most = max(program.peak_held_rows(rank) for rank in range(program.num_ranks))
    assert most <= max_slices * 64 * program.num_stages_per_rank
    assert (most == 0) == (max_slices == 0)
    if max_slices == 0:
        assert all(transfer.sent == transfer.dropped == transfer.rows for transfer in program.transfers)


@given(programs_with_exchange(max_ranks=6, max_slices=10, max_stages=3, max_microbatches=3))
@settings(max_examples=60, deadline=None)
def test_the_order_of_units_does_not_change(program: Program) -> None:
    plain = build_program(
        program.num_ranks,
        program.num_slices,
        program.num_stages_per_rank,
        program.num_microbatches,
        forward_only=program.forward_only,
    )
    assert program.num_ticks == plain.num_ticks
    assert program.pipeline_order() == plain.pipeline_order()
    for rank, (row, plain_row) in enumerate(zip(program.instructions, plain.instructions, strict=True)):
        assert computes(row) == computes(plain_row)
        added = {i.op for i in row} - {i.op for i in plain_row}
        assert added <= set(HELPS)
        channels = [[(i.op, i.unit, i.peer) for i in of if i.peer is not None] for of in (row, plain_row)]
        assert sorted(channels[0], key=str) == sorted(channels[1], key=str)
        assert program.peak_live_units(rank) == plain.peak_live_units(rank)


def test_help_does_not_show_in_the_pipeline_order() -> None:
    order = with_exchange((4, 4, 1, 1)).pipeline_order()
    assert {entry[1] for row in order.values() for entry in row if entry is not None} == {"F", "B"}


def test_same_arguments_give_the_same_program() -> None:
    assert with_exchange((5, 7, 2, 3), granularity=100) == with_exchange((5, 7, 2, 3), granularity=100)


@pytest.mark.parametrize(
    "options",
    [None, SlimPipeOptions(), SlimPipeOptions(context_exchange="auto"), SlimPipeOptions(context_exchange="off")],
)
def test_no_exchange_unless_asked_for_or_known_to_pay(options: SlimPipeOptions | None) -> None:
    assert build_program(4, 8, 1, 2, slice_len=1024, options=options).transfers == ()


def test_one_rank_has_nobody_to_help() -> None:
    assert with_exchange((1, 4, 2, 2)).transfers == ()


SLICE_LEN = 8192
ATTENTION = AttentionShape(slice_len=SLICE_LEN, num_heads=32, num_kv_heads=8, head_dim=128, value_head_dim=128)


def planned_by_costs(
    shape: Shape, *, bytes_per_second: float, latency: float = 1e-5, mode: str = "auto"
) -> tuple[Program, ExchangeCosts]:
    costs = ExchangeCosts(shape=ATTENTION, flops_per_second=3e14, bytes_per_second=bytes_per_second, latency=latency)
    options = SlimPipeOptions(context_exchange=mode, exchange_granularity=128)
    return build_program(*shape, slice_len=SLICE_LEN, options=options, exchange_costs=costs), costs


def test_a_slow_link_carries_nothing() -> None:
    assert planned_by_costs((4, 16, 1, 2), bytes_per_second=1e6)[0].transfers == ()
    assert planned_by_costs((4, 16, 1, 2), bytes_per_second=1e15, latency=1.0)[0].transfers == ()


@pytest.mark.parametrize("shape", [(4, 16, 1, 2), (8, 8, 1, 1), (4, 8, 2, 2)])
def test_a_link_that_costs_nothing_is_used_as_if_forced(shape: Shape) -> None:
    program, _ = planned_by_costs(shape, bytes_per_second=1e30, latency=1e-30)
    forced = with_exchange(shape, slice_len=SLICE_LEN, granularity=128)
    assert {moment: max(load.computed for load in rows) for moment, rows in moments(program).items()} == {
        moment: max(load.computed for load in rows) for moment, rows in moments(forced).items()
    }


def test_on_asks_for_no_costs() -> None:
    program, _ = planned_by_costs((4, 8, 1, 1), bytes_per_second=1e3, mode="on")
    assert program == with_exchange((4, 8, 1, 1), slice_len=SLICE_LEN, granularity=128)


@pytest.mark.parametrize("bytes_per_second", [1e9, 1e10, 1e11, 1e12])
def test_no_predicted_loss(bytes_per_second: float) -> None:
    """Where anything moves, the busiest rank is sooner done with its attention and its messages. A row that is sent
    once serves at many ticks: each use is charged the share of rows that are sent where all that helps is moved."""
    program, costs = planned_by_costs((4, 16, 1, 2), bytes_per_second=bytes_per_second)
    check(program)
    forced = with_exchange((4, 16, 1, 2), slice_len=SLICE_LEN, granularity=128)
    sent, used = (sum(num_rows(getattr(t, name)) for t in forced.transfers) for name in ("sent", "rows"))
    moved = defaultdict(list)
    for transfer in program.transfers:
        moved[transfer.tick, transfer.phase.value].append(transfer)
    for moment, rows in moments(program).items():
        messages = [0.0] * program.num_ranks
        for transfer in moved[moment]:
            for rank in (program.rank_of(transfer.unit.stage), transfer.helper):
                messages[rank] += costs.message_seconds(
                    transfer.phase, num_sent_rows=sent / used * num_rows(transfer.rows)
                )
        per_row = costs.seconds_per_row(Op(moment[1]))
        after = max(load.computed * per_row for load in rows) + max(messages)
        before = max(load.own * per_row for load in rows)
        assert after < before if moved[moment] else after == before
    assert bool(program.transfers) == (bytes_per_second > 1e10)


def test_messages_of_a_transfer_cost() -> None:
    """Queries, output and LSE; with rows their K,V; in backward also two gradients, output, and dK,dV in return."""
    shape = AttentionShape(slice_len=2, num_heads=3, num_kv_heads=1, head_dim=4, value_head_dim=5)
    costs = ExchangeCosts(shape=shape, flops_per_second=1.0, bytes_per_second=1.0, latency=1e6)
    query, output, lse, kv_row = 2 * 3 * 4 * 2, 2 * 3 * 5 * 2, 2 * 3 * 4, 9 * 2
    charged = {
        (Op.FORWARD, 0): 2e6 + query + output + lse,
        (Op.FORWARD, 7): 3e6 + query + output + lse + 7 * kv_row,
        (Op.BACKWARD, 0): 2e6 + 2 * query + 2 * output + lse,
        (Op.BACKWARD, 7): 3e6 + 2 * query + 2 * output + lse + 7 * (kv_row + 2 * kv_row),
    }
    for (phase, num_sent), seconds in charged.items():
        margin = costs.message_seconds(phase, num_sent_rows=num_sent) / seconds
        assert margin == pytest.approx(2.0)
    assert costs.seconds_per_row(Op.FORWARD) == 2 * 2 * 3 * 9
    assert costs.seconds_per_row(Op.BACKWARD) == 2.5 * costs.seconds_per_row(Op.FORWARD)
