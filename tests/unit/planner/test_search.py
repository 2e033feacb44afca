"""The search is exact and deterministic, and offers nothing that cannot run."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimpipe.planner.costs import Link
from slimpipe.planner.hardware import HARDWARE
from slimpipe.planner.layout import RECOMPUTE, Layout, broken_rule
from slimpipe.planner.model_cost import mfu, op_costs
from slimpipe.planner.models import MODELS, ModelShape
from slimpipe.planner.search import GIB, Judged, Question, Wanted, longest, nearest_fitting, search
from slimpipe.planner.simulate import simulate
from slimpipe.planner.simulate_torch import simulate_torch, torch_order
from slimpipe.planner.timed import program_of, timed
from slimpipe.program import check

NUM_RANDOM = 3200 if os.environ.get("SLIMPIPE_FULL") == "1" else 40


def question(model: str = "llama3-8b", seq_len: int = 131072, num_gpus: int = 64, **settings: object) -> Question:
    values = {"hardware": HARDWARE["h100"], "memory": 80 * GIB, "sequences": 32, **settings}
    return Question(model=MODELS[model], seq_len=seq_len, num_gpus=num_gpus, **values)  # type: ignore[arg-type]


def test_longest_sequences_of_the_paper() -> None:
    """7B, 64 GPUs, t8 p8, nothing recomputed: 600K with n = 64, v = 4, and 124K under 1F1B; by the default headroom."""
    wanted = Wanted(tensor=8, pipeline=8, num_slices=64, stages_per_rank=4, recompute="none", vocab_parallel="both")
    ours = question("llama-7b", constants="reference", sequences=8)
    assert longest(ours, wanted, step=4096)[0] == 600 * 1024
    torch_s = replace(ours, schedule="1F1B")
    assert longest(torch_s, Wanted(tensor=8, pipeline=8, recompute="none"), step=4096)[0] == 124 * 1024


@pytest.mark.parametrize("memory", [60, 70])
def test_best_of_each_split_is_the_best_of_all_its_layouts(memory: int) -> None:
    """Pruning loses nothing: every layout of a split, judged one by one."""
    asked = question(seq_len=65536, num_gpus=16, memory=memory * GIB)
    splits = search(asked)
    assert any(split.best for split in splits) and (memory > 60 or any(split.smallest for split in splits))
    for split in splits:
        every = [
            Judged(asked, layout, *asked.parts(layout))
            for layout in grid(asked, split.tensor, split.pipeline, split.data)
            if broken_rule(layout, asked.model, seq_len=asked.seq_len) is None
        ]
        fitting = [judged for judged in every if judged.fits]
        assert (split.best is not None) == bool(fitting)
        if split.best is not None:
            fastest = min(judged.seconds for judged in fitting)
            assert split.best.fits and fastest <= split.best.seconds <= 1.01 * fastest
        elif split.smallest is not None:
            assert split.smallest.bytes == min(judged.bytes for judged in every)


def grid(asked: Question, t: int, p: int, d: int) -> list[Layout]:
    slices = [p * k for k in (1, 2, 3, 4, 6, 8, 12, 16) if k == 1 or asked.seq_len // (p * k) >= 512]
    stages = [v for v in range(1, 11) if asked.model.num_layers % (p * v) == 0 or v == 1]
    return [
        Layout(
            tensor=t,
            pipeline=p,
            data=d,
            num_slices=n,
            stages_per_rank=v,
            num_microbatches=asked.num_sequences // d,
            recompute=recompute,
            exchange=exchange,
            vocab_parallel=vocab_parallel,
        )
        for n, v, recompute, exchange, vocab_parallel in product(
            slices, stages, RECOMPUTE, (True, False), ("none", "output", "both")
        )
        if asked.num_sequences % d == 0
    ]


def test_same_question_same_answer() -> None:
    asked = question()
    assert [str(split) for split in search(asked)] == [str(split) for split in search(asked)]
    times = [split.best.seconds for split in search(asked) if split.best]
    assert times == sorted(times)


def test_splits_that_do_not_fit_say_why_and_what_is_near() -> None:
    splits = search(question("llama3-70b", 524288, 256, sequences=8))
    refused = [split for split in splits if split.smallest]
    assert refused
    for split in refused:
        assert split.smallest is not None and not split.smallest.fits
        assert split.smallest.largest_part in split.smallest.parts
        near = nearest_fitting(splits, split)
        assert near is not None and near.fits
    assert any("do not divide among d" in (split.broken or "") for split in splits)


# Exchange pays on it, and short slices cost nothing: all of the grid is worth offering.
SLOW = replace(
    HARDWARE["h100"],
    peak_flops=1e9,
    node_link=Link(bandwidth=1e12),
    network_link=Link(bandwidth=1e12),
    memory_bandwidth=1e15,
    host_seconds=0.0,
)


@st.composite
def questions(draw: st.DrawFn) -> tuple[Question, Wanted]:
    num_kv_heads = draw(st.sampled_from([1, 2, 4]))
    model = ModelShape(
        name="random",
        num_layers=draw(st.integers(2, 12)),
        dim=draw(st.sampled_from([64, 128])),
        ffn_dim=256,
        num_heads=num_kv_heads * draw(st.sampled_from([1, 3])),
        num_kv_heads=num_kv_heads,
        head_dim=16,
        vocab_size=draw(st.sampled_from([7, 500, 1001])),
    )
    asked = Question(
        model=model,
        seq_len=draw(st.sampled_from([840, 1536, 3072, 9000])),
        num_gpus=draw(st.sampled_from([2, 4, 6, 8, 12])),
        hardware=draw(st.sampled_from([SLOW, HARDWARE["h100"]])),
        memory=draw(st.sampled_from([16, 64])) * 2**20,
        sequences=draw(st.sampled_from([1, 2, 4, 6])),
        headroom=0.0,
        schedule=draw(st.sampled_from(["SlimPipe", "SlimPipe", "1F1B", "Interleaved1F1B"])),
    )
    wanted = Wanted(
        num_slices=draw(st.sampled_from([None, 4, 5, 6, 8, 12, 24])),
        stages_per_rank=draw(st.sampled_from([None, 1, 2, 3])),
        recompute=draw(st.sampled_from([None, "full"])),
        exchange=draw(st.sampled_from([None, True, False])),
        vocab_parallel=draw(st.sampled_from([None, "none", "output", "both"])),
    )
    return asked, wanted


@given(questions())
@settings(max_examples=NUM_RANDOM, deadline=None)
def test_what_is_offered_runs(question_: tuple[Question, Wanted]) -> None:
    """Every offered layout: its program passes `check`, and the simulator brings it to its end."""
    asked, wanted = question_
    for split in search(asked, wanted):
        if split.best is None:
            continue
        layout = split.best.layout
        assert broken_rule(layout, asked.model, seq_len=asked.seq_len) is None
        assert layout.num_gpus == asked.num_gpus and layout.num_microbatches * layout.data == asked.num_sequences
        costs = op_costs(asked.model, layout, asked.hardware, seq_len=asked.seq_len)
        if layout.schedule != "SlimPipe":
            order = torch_order(
                layout.schedule,
                num_ranks=layout.pipeline,
                num_stages_per_rank=layout.stages_per_rank,
                num_microbatches=layout.num_microbatches,
            )
            assert simulate_torch(order, costs).seconds > 0
            continue
        program = program_of(split.best, num_microbatches=min(3, layout.num_microbatches))
        check(program)
        assert simulate(program, costs).seconds > 0


@pytest.mark.parametrize("exchange", [False, True])
def test_lock_step_is_near_the_simulator(exchange: bool) -> None:
    asked = question("llama3-70b", 524288, 256, sequences=16)
    layout = Layout(
        tensor=8, pipeline=8, data=4, num_slices=16, num_microbatches=4, vocab_parallel="both", exchange=exchange
    )
    judged = Judged(asked, layout, *asked.parts(layout))
    simulated = timed(judged)
    assert 0.95 <= judged.seconds / simulated.seconds <= 1.15
    assert (simulated.exchange_bytes > 0) == exchange
    four = simulate(program_of(judged), op_costs(asked.model, layout, asked.hardware, seq_len=asked.seq_len))
    data_parallel = judged.seconds - judged.pipeline_seconds
    assert simulated.seconds == pytest.approx(four.seconds + data_parallel, rel=0.02)  # from three microbatches


def test_simulated_step_is_that_of_all_its_microbatches() -> None:
    """n = p, v = 1: the second microbatch is not yet steady."""
    asked = question("llama3-70b", 262144, 64, sequences=8)
    layout = Layout(tensor=8, pipeline=8, data=1, num_slices=8, num_microbatches=8, exchange=False)
    judged = Judged(asked, layout, *asked.parts(layout))
    whole = simulate(program_of(judged), op_costs(asked.model, layout, asked.hardware, seq_len=asked.seq_len))
    assert timed(judged).seconds == pytest.approx(whole.seconds, rel=0.01)


def test_longest_asks_for_as_many_sequences_as_plan_does() -> None:
    asked = question(sequences=None)
    seq_len, best = longest(asked, Wanted(), step=4096)
    assert best is not None and best.question.num_sequences == replace(asked, seq_len=seq_len).num_sequences < 32
    assert search(replace(asked, seq_len=seq_len))[0].best == best
    assert [replace(asked, seq_len=s).num_sequences for s in (4096, 614400, 2**23)] == [1024, 4, 1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pipeline": 1}, "p = 1: .*nearest: 2"),
        ({"tensor": 6}, "t = 6: .*nearest: 4"),
        ({"schedule": "1F1B", "num_microbatches": 3}, "m = 3: .*nearest: 4"),
        ({"schedule": "Interleaved1F1B", "num_microbatches": 4, "stages_per_rank": 3}, "v = 3: .*nearest: 2"),
    ],
)
def test_broken_rules(change: dict[str, object], words: str) -> None:
    layout = Layout(tensor=1, pipeline=4, data=1, num_slices=8)
    if "schedule" in change:
        layout = replace(layout, num_slices=1, exchange=False)
    rule = broken_rule(replace(layout, **change), MODELS["llama3-8b"], seq_len=49152)
    assert rule is not None and re.match(words, rule)


def test_mfu_of_a_step_without_loss_is_one() -> None:
    asked = question()
    layout = Layout(tensor=1, pipeline=8, data=8, num_slices=8, num_microbatches=4)
    seconds = 32 * asked.model.flops(asked.seq_len, causal=True) / 64 / asked.hardware.peak_flops
    of = {"hardware": asked.hardware, "seq_len": asked.seq_len, "seconds": seconds}
    assert mfu(asked.model, layout, **of, causal=True) == pytest.approx(1.0)  # type: ignore[arg-type]
    assert mfu(asked.model, layout, **of, causal=False) > 1.5  # type: ignore[arg-type]
