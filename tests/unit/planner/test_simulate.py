"""The simulator times programs as arithmetic does where there is a formula, and takes every program to its end."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from slimpipe.options import SlimPipeOptions
from slimpipe.planner.costs import Link, OpCosts
from slimpipe.planner.simulate import simulate
from slimpipe.planner.timeline import Timeline
from slimpipe.program import Instruction, Op, Program, ProgramError, build_program, check
from slimpipe.program.cost import AttentionShape

NUM_LAYOUTS = 2000 if os.environ.get("SLIMPIPE_FULL") == "1" else 60
SHAPES = [
    *((4, 4, 1, 3), (4, 8, 2, 2), (8, 8, 10, 8), (8, 12, 3, 2), (5, 15, 1, 3)),
    *((4, 6, 2, 3), (8, 16, 1, 1), (4, 4, 1, 1), (16, 32, 5, 2)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bubble_of_equal_units(shape: tuple[int, int, int, int]) -> None:
    p, n, v, m = shape
    timeline = simulate(build_program(*shape), OpCosts.units(p * v))
    assert timeline.idle_share == pytest.approx((p - 1) / (m * n * v + p - 1), rel=1e-9)


@pytest.mark.parametrize(
    ("dim", "ffn", "kv_share", "seq_len", "shape", "without", "levelled"),
    [
        (5120, 13824, 1, 262144, (8, 16, 1, 2), 31.8, 3.8),
        (5120, 13824, 1, 262144, (8, 16, 5, 4), 16.4, 0.4),
        (5120, 13824, 1, 262144, (8, 8, 1, 1), 60.2, 14.2),
        (8192, 28672, 1 / 8, 524288, (16, 32, 1, 2), 34.0, 3.4),
        (4096, 11008, 1, 32768, (8, 16, 1, 2), 23.9, 11.1),
    ],
)
def test_bubble_of_unequal_units(
    dim: int, ffn: int, kv_share: float, seq_len: int, shape: tuple[int, ...], without: float, levelled: float
) -> None:
    """Bubbles in percent, forward to backward 1:2 for linear work and 1:2.5 for attention, free messages, with and
    without the exchange of tokens in which idle ranks help, too."""
    p, n, v, m = shape
    num_stages, slice_len = p * v, seq_len // n
    linear = 4.0 * slice_len * dim * (dim * (1 + kv_share) + 1.5 * ffn)
    costs = OpCosts(
        slice_len=slice_len,
        linear_forward=(linear,) * num_stages,
        linear_backward=(2 * linear,) * num_stages,
        attention_forward=(4.0 * dim,) * num_stages,
        attention_backward=(10.0 * dim,) * num_stages,
    )
    for exchange, bubble in (("off", without), ("on", levelled)):
        options = SlimPipeOptions(context_exchange=exchange)
        program = build_program(p, n, v, m, slice_len=slice_len, options=options)
        assert 100 * simulate(program, costs).idle_share == pytest.approx(bubble, abs=0.06)


@pytest.mark.parametrize(("latency", "bandwidth", "num_bytes"), [(0.25, 100.0, 0), (0.0, 40.0, 10), (0.125, 80.0, 10)])
def test_messages_take_their_time(latency: float, bandwidth: float, num_bytes: int) -> None:
    """Two ranks, two slices: 1 F, then on the last rank 2 F and 1 B until the first may go backward twice; and two
    messages on the way."""
    costs = OpCosts.units(2, slice_len=1, link=Link(latency=latency, bandwidth=bandwidth), activation_bytes=num_bytes)
    timeline = simulate(build_program(2, 2, 1, 1), costs)
    unit = costs.linear_forward[0]
    message = latency + num_bytes / bandwidth
    assert timeline.seconds == pytest.approx((1 + 2 + 2 + 2 + 2) * unit + 2 * message)
    first_backward = next(span for span in timeline.of_rank(0) if span.kind == "B")
    assert first_backward.waited == pytest.approx(3 * unit + 2 * message)
    sent = [span for span in timeline.spans if span.kind == "send"]
    assert [span.num_bytes for span in sent] == [num_bytes] * 4
    assert all(span.end - span.start == pytest.approx(message) for span in sent)


def test_a_link_carries_one_message_at_a_time() -> None:
    """Messages as long as 4 units: the last rank waits for each of them."""
    costs = OpCosts.units(2, link=Link(bandwidth=1.0), activation_bytes=2)
    timeline = simulate(build_program(2, 2, 1, 1), costs)
    arrivals = [span.end for span in timeline.of_rank(1) if span.kind == "receive"]
    assert arrivals == [2.5, 4.5]


def test_no_more_sends_than_allowed_are_under_way() -> None:
    """Messages that take far longer than units hold up the sender at its third."""
    costs = OpCosts.units(2, link=Link(latency=100.0))
    timeline = simulate(build_program(2, 8, 1, 1), costs)
    forwards = [span for span in timeline.of_rank(0) if span.kind == "F"]
    assert [span.start < 100 for span in forwards[:5]] == [True, True, True, False, False]


def test_host_time_is_spent_for_every_instruction() -> None:
    program = build_program(1, 3, 1, 1)
    timeline = simulate(program, OpCosts.units(1, host_seconds=0.5))
    assert timeline.seconds == pytest.approx(3 * 1 + 3 * 2 + 0.5 * len(program.instructions[0]))


def test_a_rank_that_is_alone_may_be_faster() -> None:
    """Two ranks on one core, two slices. Alone: F of the first rank; F and B of the last, before the first can go
    backward; B of the first rank at the end."""
    costs = OpCosts.units(2, alone_speed=2.0)
    timeline = simulate(build_program(2, 2, 1, 1), costs)
    units = 0.5 + 1 + 0.5 + 1 + 2 + 1
    assert timeline.seconds == pytest.approx(units * costs.linear_forward[0])


def test_recomputing_and_the_head_belong_to_their_units() -> None:
    costs = OpCosts.units(2, recompute_forward=(0.5, 0.25), head_forward=3.0, head_backward=7.0)
    timeline = simulate(build_program(2, 2, 1, 1), costs)
    seconds = {(span.rank, span.kind): span.seconds for span in timeline.spans if not span.is_message}
    assert seconds == pytest.approx({(0, "F"): 0.5, (1, "F"): 3.5, (0, "B"): 1.5, (1, "B"): 8.25})


# The exchange --------------------------------------------------------------------------------------------------------


def exchanging(layers: int) -> tuple[Program, OpCosts]:
    shape, slice_len = (4, 8, 2, 2), 16
    options = SlimPipeOptions(context_exchange="on", exchange_granularity=4)
    program = build_program(*shape, slice_len=slice_len, layers_per_stage=(layers,) * 8, options=options)
    costs = OpCosts.units(
        8,
        num_slices=8,
        attention_share=0.9,
        slice_len=slice_len,
        layers=(layers,) * 8,
        activation_bytes=1000,
        link=Link(bandwidth=1e8),
        attention_shape=AttentionShape(
            slice_len=slice_len, num_heads=4, num_kv_heads=2, head_dim=8, value_head_dim=16, bytes_per_value=2
        ),
    )
    return program, costs


@pytest.mark.parametrize("layers", [1, 3])
def test_the_exchange_moves_work_and_bytes_as_the_program_says(layers: int) -> None:
    program, costs = exchanging(layers)
    timeline = simulate(program, costs)
    plain = build_program(4, 8, 2, 2, slice_len=program.slice_len)
    alone = simulate(plain, costs)
    work = [sum(t.compute_seconds(rank) for rank in range(4)) for t in (timeline, alone)]
    assert work[0] == pytest.approx(work[1])
    assert timeline.seconds < 0.9 * alone.seconds
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "value_head_dim": 16, "bytes_per_value": 2}
    sends = (Op.SEND_FORWARD, Op.SEND_BACKWARD)
    pipeline_bytes = 1000 * sum(i.op in sends for row in program.instructions for i in row)
    sent = sum(span.num_bytes for span in timeline.spans if span.kind == "send")
    assert sent == pipeline_bytes + sum(program.exchange_bytes(**shape).values())
    assert {span.kind for span in timeline.spans} >= {"help F", "help B"}


def test_helpers_and_owners_wait_for_messages() -> None:
    program, costs = exchanging(2)
    free = simulate(program, replace(costs, link=Link()))
    slow = simulate(program, replace(costs, link=Link(latency=0.02)))
    helps = [[s for s in t.spans if s.kind.startswith("help")] for t in (free, slow)]
    assert sum(s.waited for s in helps[1]) > sum(s.waited for s in helps[0])
    assert slow.seconds > free.seconds


# The vocabulary ------------------------------------------------------------------------------------------------------


def test_all_ranks_share_the_vocabulary() -> None:
    """By hand, for two ranks and slices: F 1, B 2, E 1, V 2 of which 1 before the ranks meet, EB 1, begun by a rank's
    next one or at the end."""
    costs = OpCosts(
        slice_len=1,
        linear_forward=(1.0, 1.0),
        linear_backward=(2.0, 2.0),
        attention_forward=(0.0, 0.0),
        attention_backward=(0.0, 0.0),
        vocabulary_forward=1.0,
        vocabulary=2.0,
        embed=1.0,
        embed_backward=1.0,
        head_forward=100.0,
    )
    timeline = simulate(build_program(2, 2, 1, 1, vocab_parallel="both"), costs)
    ends = [[(s.kind, s.end) for s in timeline.of_rank(rank) if not s.is_message] for rank in (0, 1)]
    assert [" ".join(kind for kind, _ in row) for row in ends] == [
        "E F E F V V B EB B EB EB",
        "E E F V F V B B EB EB EB",
    ]
    assert [[end for _, end in row] for row in ends] == [
        [1, 2, 3, 4, 6, 9, 13, 13, 15, 16, 17],
        [1, 2, 3, 6, 7, 9, 11, 13, 13, 14, 17],
    ]
    assert timeline.compute_seconds(0) == timeline.compute_seconds(1) == 2 * (1 + 1 + 2 + 2 + 1)


# Every program -------------------------------------------------------------------------------------------------------


def random_layout(seed: int) -> tuple[Program, OpCosts]:
    """A program with all that programs have, and costs of all kinds."""
    pick = random.Random(seed)
    p, v, m = pick.randint(1, 6), pick.randint(1, 3), pick.randint(1, 3)
    n, slice_len = pick.randint(p, 2 * p + 2), pick.randint(1, 40)
    num_stages = p * v
    layers = tuple(pick.randint(1, 3) for _ in range(num_stages))
    options = SlimPipeOptions(
        context_exchange=pick.choice(["on", "off"]),
        exchange_granularity=pick.randint(1, 50),
        exchange_max_slices=pick.randint(0, 20),
    )
    program = build_program(
        *(p, n, v, m),
        slice_len=slice_len,
        layers_per_stage=layers,
        forward_only=pick.random() < 0.2,
        options=options,
        vocab_parallel=pick.choice(["none", "output", "both"]),
    )

    def seconds(most: float) -> tuple[float, ...]:
        return tuple(pick.random() * most for _ in range(num_stages))

    costs = OpCosts(
        slice_len=slice_len,
        linear_forward=seconds(1),
        linear_backward=seconds(2),
        attention_forward=seconds(0.01),
        attention_backward=seconds(0.02),
        vocabulary=pick.random(),
        vocabulary_forward=pick.random(),
        embed=pick.random(),
        embed_backward=pick.random(),
        head_forward=pick.random(),
        layers=layers,
        host_seconds=pick.choice([0.0, 0.001]),
        alone_speed=pick.choice([1.0, 1.0, 1.7]),
        link=Link(latency=pick.choice([0.0, 0.1, 5.0]), bandwidth=pick.choice([1.0, 1e3, 1e9])),
        activation_bytes=pick.randint(0, 5),
        attention_shape=AttentionShape(slice_len=slice_len, num_heads=2, num_kv_heads=1, head_dim=1, value_head_dim=1),
    )
    return program, costs


def test_no_program_that_check_accepts_deadlocks() -> None:
    for seed in range(NUM_LAYOUTS):
        program, costs = random_layout(seed)
        check(program)
        timeline = simulate(program, costs)
        check_timeline(timeline, program)


def check_timeline(timeline: Timeline, program: Program) -> None:
    """Every instruction that computes is a span, one after another on each rank; every message goes from one rank to
    another."""
    computing = sum(not i.op.is_message for row in program.instructions for i in row)
    spans = [span for span in timeline.spans if not span.is_message]
    ends_of_embedding = len([s for s in spans if s.kind == "EB"]) - sum(
        i.op is Op.EMBED_BACKWARD for row in program.instructions for i in row
    )
    assert ends_of_embedding in (0, program.num_ranks)
    assert len(spans) == computing + ends_of_embedding
    for rank in range(program.num_ranks):
        row = [span for span in spans if span.rank == rank]
        assert all(one.end <= other.start + 1e-9 for one, other in zip(row, row[1:]))
        assert all(-1e-9 <= span.waited <= span.end - span.start + 1e-9 for span in row)
    kinds = Counter(span.kind for span in timeline.spans if span.is_message)
    assert kinds["send"] == kinds["receive"]
    assert 0 <= timeline.idle_share < 1


def test_damaged_programs_end_in_an_error_or_in_time() -> None:
    """Without an instruction, or with two in each other's place, ranks may wait for ever; the simulator does not."""
    stuck = named = 0
    for seed in range(NUM_LAYOUTS):
        program, costs = random_layout(seed)
        pick = random.Random(seed)
        rank = pick.randrange(program.num_ranks)

        def edit(row: list[Instruction], pick: random.Random = pick) -> None:
            one, other = pick.randrange(len(row)), pick.randrange(len(row))
            if pick.random() < 0.5:
                del row[one]
            else:
                row[one], row[other] = row[other], row[one]

        try:
            simulate(change(program, rank, edit), costs)
        except ProgramError as error:
            assert "rank " in str(error)
            named += 1
            stuck += "wait for one another" in str(error)
    assert stuck and named > NUM_LAYOUTS / 2


def change(program: Program, rank: int, edit: Callable[[list[Instruction]], None]) -> Program:
    rows = [list(row) for row in program.instructions]
    edit(rows[rank])
    return replace(program, instructions=tuple(map(tuple, rows)))


def without(op: Op, index: int = 0) -> Callable[[list[Instruction]], None]:
    def edit(row: list[Instruction]) -> None:
        del row[[i for i, instruction in enumerate(row) if instruction.op is op][index]]

    return edit


@pytest.mark.parametrize(
    ("rank", "edit", "message"),
    [
        (0, without(Op.SEND_FORWARD), "rank 0 sends what rank 1 receives, at tick 1 for .*slice 1, at tick 1 for .*0$"),
        (0, without(Op.SEND_FORWARD, -1), "wait for one another: rank 0 at vocabulary .*; rank 1 at forward .*slice 3"),
        (1, without(Op.SEND_BACKWARD, -1), "wait for one another: rank 0 at backward .*slice 0; tick"),
        (1, without(Op.RECEIVE_FORWARD), "rank 1: forward .*slice 0.*: nothing was received for it"),
        (1, without(Op.VOCABULARY), "rank 1 is at vocabulary .*slice 1.* where another is at vocabulary .*slice 0"),
        (1, without(Op.VOCABULARY, -1), "wait for one another: rank 0 at vocabulary .*; rank 1 at backward .*slice 3"),
        (0, without(Op.FORWARD), "rank 0: send_forward .*slice 0.*: there is nothing to send yet"),
    ],
)
def test_what_is_wrong_is_named(rank: int, edit: Callable[[list[Instruction]], None], message: str) -> None:
    program = change(build_program(2, 4, 1, 1, vocab_parallel="output"), rank, edit)
    with pytest.raises(ProgramError, match=message):
        simulate(program, OpCosts.units(2))


def test_a_circle_is_named() -> None:
    """The last rank sends all it has at once, more than may be under way, and so does the first."""

    def edit(row: list[Instruction]) -> None:
        sends = [i for i in row if i.op in (Op.SEND_FORWARD, Op.SEND_BACKWARD)]
        computes = {Op.SEND_FORWARD: Op.FORWARD, Op.SEND_BACKWARD: Op.BACKWARD}
        row[:] = [i for i in row if i not in sends]
        for send in sends:
            index = next(k for k, i in enumerate(row) if (i.op, i.unit) == (computes[send.op], send.unit))
            row.insert(index + 1, send)

    program = build_program(2, 7, 2, 2)
    simulate(program, OpCosts.units(4))
    message = r"the ranks wait for one another: rank 0 at .*; rank 1 at send_forward with rank 0 \(.*tick"
    with pytest.raises(ProgramError, match=message):
        simulate(change(program, 1, edit), OpCosts.units(4))


def test_costs_must_be_of_the_program() -> None:
    program = build_program(2, 2, 1, 1, slice_len=8)
    with pytest.raises(ValueError, match=r"slices of 1 tokens.*nearest legal value: slice_len = 8"):
        simulate(program, OpCosts.units(2))
    with pytest.raises(ValueError, match="of 3 stages, the program has 2"):
        simulate(program, OpCosts.units(3, slice_len=8))
