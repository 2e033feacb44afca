"""A program as torch sees it, and its bubble."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from slimpipe.program import Op, Program, Unit, build_program
from slimpipe.program.ir import MAX_UNMATCHED_SENDS
from tests.unit.program.shapes import Shape

SHAPES = [
    (4, 4, 1, 3),
    (4, 8, 2, 2),
    (8, 8, 10, 8),
    (8, 12, 3, 2),
    (5, 15, 1, 3),
    (4, 6, 2, 3),
    (8, 16, 1, 1),
    (4, 4, 1, 1),
    (16, 32, 5, 2),
    (2, 7, 3, 4),
    (1, 3, 2, 2),
]


def ideal_bubble(program: Program) -> float:
    num_units = program.num_microbatches * program.num_slices * program.num_stages_per_rank
    return (program.num_ranks - 1) / (num_units + program.num_ranks - 1)


@pytest.mark.parametrize("shape", [*SHAPES[:2], *SHAPES[3:8], *SHAPES[9:]])
def test_torch_accepts_the_order(shape: Shape) -> None:
    program = build_program(*shape)
    order = program.to_pipeline_order()
    num_slices_in_step = program.num_microbatches * program.num_slices
    torch_schedules._validate_schedule(order, program.num_ranks, program.num_stages, num_slices_in_step)
    compute = {rank: [action for action in row if action is not None] for rank, row in order.items()}
    with_messages = torch_schedules._add_send_recv(compute, program.rank_of, program.num_stages)
    simulated = torch_schedules._simulate_comms_compute(with_messages, program.rank_of, program.num_stages)
    assert {action for row in simulated.values() for action in row} >= {
        action for row in order.values() for action in row if action is not None
    }


@pytest.mark.parametrize("forward_only", [False, True])
def test_order_is_the_program(forward_only: bool) -> None:
    program = build_program(2, 4, 2, 3, forward_only=forward_only)
    for rank, row in program.pipeline_order().items():
        assert [entry for entry in row if entry is not None] == [
            (unit.stage, op.value, unit.microbatch * 4 + unit.slice)
            for _, op, unit, peer in program.instructions[rank]
            if peer is None
        ]
    names = [str(action) for action in program.to_pipeline_order()[1] if action is not None]
    assert names[:3] == ["1F0", "1F1", "3F0"]


@pytest.mark.parametrize("shape", SHAPES)
def test_idle_share_of_the_order_is_the_bubble(shape: Shape) -> None:
    program = build_program(*shape)
    rows = program.pipeline_order().values()
    assert len({len(row) for row in rows}) == 1
    num_idle = sum(entry is None for row in rows for entry in row)
    assert num_idle / sum(map(len, rows)) == pytest.approx(ideal_bubble(program))


@pytest.mark.parametrize("backward_cost", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_bubble_in_time(shape: Shape, backward_cost: int) -> None:
    program = build_program(*shape)
    assert simulated_bubble(program, {Op.FORWARD: 1, Op.BACKWARD: backward_cost}) == pytest.approx(
        ideal_bubble(program)
    )


def simulated_bubble(program: Program, cost: dict[Op, int]) -> float:
    """Share of idle time when every rank runs its list as soon as it can; messages take no time, but a send still waits
    for the receive of the one `MAX_UNMATCHED_SENDS` before it."""
    clock = [0] * program.num_ranks
    num_done = [0] * program.num_ranks
    sent: dict[tuple[Op, Unit], int] = {}
    posted: dict[tuple[int, int, Op], list[int]] = {}
    num_sent: dict[tuple[int, int, Op], int] = {}
    needs: dict[tuple[Op, Unit], tuple[Op, Unit]] = {}

    def run_one(rank: int) -> bool:
        _, op, unit, peer = program.instructions[rank][num_done[rank]]
        start = clock[rank]
        if op in cost:
            if (op, unit) in needs:
                if needs[op, unit] not in sent:
                    return False
                start = max(start, sent[needs[op, unit]])
            clock[rank] = start + cost[op]
        elif op in (Op.RECEIVE_FORWARD, Op.RECEIVE_BACKWARD):
            compute, send, step = (
                (Op.FORWARD, Op.SEND_FORWARD, -1) if op is Op.RECEIVE_FORWARD else (Op.BACKWARD, Op.SEND_BACKWARD, 1)
            )
            needs[compute, unit] = send, unit._replace(stage=unit.stage + step)
            posted.setdefault((peer, rank, send), []).append(start)
        else:
            channel = (rank, peer, op)
            earlier = num_sent.get(channel, 0) - MAX_UNMATCHED_SENDS
            if earlier >= 0:
                if len(posted.get(channel, ())) <= earlier:
                    return False
                start = max(start, posted[channel][earlier])
            num_sent[channel] = num_sent.get(channel, 0) + 1
            sent[op, unit] = clock[rank] = start
        num_done[rank] += 1
        return True

    while any(done < len(row) for done, row in zip(num_done, program.instructions, strict=True)):
        before = list(num_done)
        for rank, row in enumerate(program.instructions):
            while num_done[rank] < len(row) and run_one(rank):
                pass
        assert num_done != before, "the ranks wait for one another"
    busy = sum(cost[op] for row in program.instructions for _, op, _, _ in row if op in cost)
    return 1 - busy / (program.num_ranks * max(clock))
