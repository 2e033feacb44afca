"""What a rank holds for backward: as little as the schedule promises, measured on tensors (design 4.2).

With `SLIMPIPE_FULL=1` for every number of slices up to eight, else for the smallest two and the largest.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile, record_function

from slimpipe import ScheduleInterleavedSlimPipe, ScheduleSlimPipe, SlimPipeOptions
from slimpipe.attention.context import SliceContext, StageStore
from slimpipe.attention.held_rows import HeldRows
from slimpipe.attention.helper import SharedPhase
from slimpipe.attention.kv_store import LayerStore, SlotBuffers
from slimpipe.mailbox import Letter
from slimpipe.program.order import live_units
from slimpipe.runtime import PipelineError
from slimpipe.runtime.executor import _Step
from slimpipe.runtime.meter import MemoryMeter
from slimpipe.runtime.stage import _Live
from slimpipe.transport import Receive, Transport
from tests.distributed.failures import Runs, run_together
from tests.distributed.parity import FULL
from tests.model import Decoder, stage_layers, sum_loss

LAYERS_PER_STAGE = 2
LIMIT = 1.03
EXCHANGE = {"context_exchange": "on", "exchange_granularity": 1}
# (p, n, v, rank) where no placement in contiguous ranges has as few K,V slots as two microbatches need: two slots more.
MORE_SLOTS_FROM_THE_THIRD_MICROBATCH_ON = {(3, 3, 2, 0), (4, 4, 2, 0), (4, 5, 2, 0)}


class Setting:
    """One rank's stages and schedule; layers of width 64 on slices of 64 tokens."""

    def __init__(
        self, p: int, n: int, v: int, m: int, *, num_kv_heads: int = 4, recompute=False, group=None, exchange=None
    ) -> None:
        self.p, self.n, self.v, self.m = p, n, v, m
        self.rank = dist.get_rank() if p > 1 else 0
        num_stages = p * v
        layers = stage_layers(LAYERS_PER_STAGE * num_stages, num_stages)
        indices = range(self.rank, num_stages, p)
        self.parts = [
            Decoder(
                layers=layers[index],
                is_first=index == 0,
                is_last=index == num_stages - 1,
                dim=64,
                num_kv_heads=num_kv_heads,
                recompute=recompute,
                dtype=torch.float32,
            )
            for index in indices
        ]
        if p > 1:
            device = torch.device("cpu")
            stages = [
                PipelineStage(part, index, num_stages, device, group=group) for part, index in zip(self.parts, indices)
            ]
        else:
            stages = [lonely_stage(part, index, num_stages) for part, index in zip(self.parts, indices)]
        self.seq_len = n * (64 if n >= 4 else 128)
        self.tokens, self.labels = torch.randint(0, 32, (2, m, self.seq_len)).unbind()
        options = SlimPipeOptions(measure_memory=True, **exchange or {"context_exchange": "off"})
        settings = {"loss_fn": sum_loss, "num_slices": n, "options": options}
        if v == 1:
            self.schedule = ScheduleSlimPipe(stages[0], m, **settings)
        else:
            self.schedule = ScheduleInterleavedSlimPipe(stages, m, **settings)

    def step(self, run: Callable | None = None) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        args = (self.tokens,) if self.rank == 0 else ()
        target = self.labels if self.rank == self.p - 1 else None
        (run or self.schedule.step)(*args, target=target, losses=losses, return_outputs=False)
        return losses

    @property
    def peak_live_units(self) -> int:
        shape = {"num_ranks": self.p, "num_slices": self.n, "num_stages_per_rank": self.v}
        return live_units(rank=self.rank, num_microbatches=self.m, **shape)

    def unsliced_bytes(self) -> int:
        """What one whole microbatch leaves for backward in all stages of this rank."""
        meter, kept = MemoryMeter(self.parts), []
        positions = torch.arange(self.seq_len)[None]
        meter.exclude([self.tokens, self.labels, positions])
        for part in self.parts:
            x = self.tokens[:1] if part.embedding is not None else torch.randn(1, self.seq_len, 64, requires_grad=True)
            with meter.saving():
                y = part(x, positions)
                kept.append(y if part.head is None else sum_loss(y, self.labels[:1]))
            kept.append(meter.hold(x))
        return meter.read()


def lonely_stage(submod: nn.Module, index: int, num_stages: int) -> SimpleNamespace:
    """What a schedule needs of a stage, without torch.distributed."""
    return SimpleNamespace(
        submod=submod,
        stage_index=index,
        num_stages=num_stages,
        group=None,
        group_rank=0,
        group_size=1,
        is_first=index == 0,
        is_last=index == num_stages - 1,
        device=torch.device("cpu"),
    )


# How much ------------------------------------------------------------------------------------------------------------


def measure(shapes: list[tuple[int, int, int, int, int]]) -> list[dict[str, float]]:
    """Runs on every rank."""
    results = []
    for p, n, v, m, num_kv_heads in shapes:
        setting = Setting(p, n, v, m, num_kv_heads=num_kv_heads)
        share = setting.peak_live_units / (n * v)
        setting.step()
        record = setting.schedule.record
        results.append(
            setting.schedule.metrics()
            | {
                "ratio": setting.schedule.metrics()["peak_live_bytes"] / (share * setting.unsliced_bytes()),
                "expected_units": setting.peak_live_units,
                "receives": record.peak_receives,
                "sends": record.peak_sends,
            }
        )
        setting.schedule.close()
    return results


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("v", [1, 2])
def test_peak_is_the_schedule_s_share_of_a_microbatch(rank_pool, p: int, v: int) -> None:
    num_slices = range(p, 9) if FULL else (p, p + 1, 8)
    shapes = [(p, n, v, m, heads) for n in num_slices for m in (2, 5) for heads in ((4, 1) if n == 8 else (4,))]
    for rank, results in enumerate(rank_pool(p).run(measure, shapes, timeout=280)):
        by_shape = dict(zip(shapes, results, strict=True))
        for shape, result in by_shape.items():
            assert result["ratio"] <= LIMIT, f"rank {rank}, (p, n, v, m, K,V heads) {shape}: {result}"
            assert result["ratio"] > 0.98, f"rank {rank}, {shape}: something is not counted: {result}"
            assert result["peak_live_units"] == result["expected_units"]
            assert result["receives"] <= 2
            assert result["sends"] <= 2
            assert result["carry_bytes"] > 0
        for p_, n, v_, m, heads in shapes:
            if m == 2 and n * v_ >= 2 * (p_ - 1):
                two, five = by_shape[p_, n, v_, 2, heads], by_shape[p_, n, v_, 5, heads]
                for name in ("peak_live_units", "carry_bytes"):
                    assert two[name] == five[name], f"rank {rank}, {(p_, n, v_, heads)}: {name}"
                if (p_, n, v_, rank) in MORE_SLOTS_FROM_THE_THIRD_MICROBATCH_ON:
                    assert two["peak_live_bytes"] < five["peak_live_bytes"]
                else:
                    assert two["peak_live_bytes"] == five["peak_live_bytes"], f"rank {rank}, {(p_, n, v_, heads)}"


def growth(num_microbatches: list[int]) -> list[dict[str, int]]:
    results = []
    for m in num_microbatches:
        setting = Setting(2, 4, 2, m)
        setting.step()
        results.append(setting.schedule.metrics())
        setting.schedule.close()
    return results


def test_nothing_grows_with_microbatches(rank_pool) -> None:
    for results in rank_pool(2).run(growth, [3, 6, 12]):
        names = {name for name in results[0] if name.endswith(("_bytes", "_units"))} - {"message_bytes"}
        kept = [{name: result[name] for name in names} for result in results]
        assert kept[0] == kept[1] == kept[2]
        # How many sends are under way depends on how fast the peer is, but never more than two in each direction.
        hidden_bytes = 64 * 64 * 4
        assert max(result["message_bytes"] for result in results) <= 2 * 2 * 2 * hidden_bytes + 2 * 80


# The meter itself ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_meter_agrees_with_the_allocator(recompute: bool) -> None:
    """At every reading, the bytes that the allocator gave out and did not get back are those counted."""
    setting = Setting(1, 4, 1, 2, recompute=recompute)
    setting.step()  # gradients exist from here on
    meter, executor = setting.schedule._meter, setting.schedule._executors._plain[True]
    (stage,) = setting.schedule._stages_by_index.values()
    counted: list[int] = []
    read = meter.read

    def marked_read() -> int:
        with record_function("reading"):
            total = read()
        counted.append(total + stage.carry_bytes)
        return total

    meter.read = marked_read
    assert executor._meter is meter
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        setting.step()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    live, allocated = 0, []
    for event in events:
        if event.name() == "[memory]":
            live += event.nbytes()
        elif event.name() == "reading":
            allocated.append(live)
    assert len(allocated) == len(counted) == 16
    highest = max(counted)
    for k, (theirs, ours) in enumerate(zip(allocated, counted)):
        assert abs(theirs - ours) <= 0.01 * highest, f"reading {k}: allocator {theirs}, meter {ours}"


# Live units on real tensors ------------------------------------------------------------------------------------------


class Mark(torch.autograd.Function):
    """Identity that saves one tensor of its own for backward, and tells of its storage."""

    @staticmethod
    def forward(ctx, x, storages):
        mark = torch.empty(1)
        ctx.save_for_backward(mark)
        storages.append(StorageWeakRef(mark.untyped_storage()))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        ctx.saved_tensors  # noqa: B018
        return dy, None


def marked(setting: Setting) -> tuple[list[StorageWeakRef], list[int]]:
    """Every unit saves a tensor from now on: their storages, and how many were alive at each forward."""
    storages: list[StorageWeakRef] = []
    alive: list[int] = []

    def mark(_module, _args, output):
        output = Mark.apply(output, storages)
        alive.append(sum(not storage.expired() for storage in storages))
        return output

    for part in setting.parts:
        part.register_forward_hook(mark)
    return storages, alive


def count_live_units(shapes: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int]]:
    results = []
    for shape in shapes:
        setting = Setting(*shape)
        storages, alive = marked(setting)
        setting.step()
        results.append((max(alive), setting.peak_live_units, sum(not storage.expired() for storage in storages)))
        setting.schedule.close()
    return results


@pytest.mark.parametrize("p", [1, 2, 4])
def test_peak_live_units_on_tensors(rank_pool, p: int) -> None:
    shapes = [(p, n, v, m) for n in (p, 8) for v in (1, 2, 3) for m in (1, 3)]
    for rank, results in enumerate(rank_pool(p).run(count_live_units, shapes, timeout=120)):
        for shape, (measured, expected, left) in zip(shapes, results, strict=True):
            assert measured == expected, f"rank {rank}, (p, n, v, m) {shape}"
            assert left == 0


# Nothing is left -----------------------------------------------------------------------------------------------------

RUNS = ("step", "eval", "step", "eval", "step")
STATE = (HeldRows, Letter, SharedPhase, LayerStore, SlotBuffers, StageStore, SliceContext, _Live, _Step, Receive)


def leftovers(before: set[int]) -> list[str]:
    """Tensors made since, other than gradients, and objects that hold a step's state."""
    objects = gc.get_objects()
    gradients = {id(o.grad) for o in objects if isinstance(o, nn.Parameter) and o.grad is not None}
    made = [o for o in objects if type(o) is torch.Tensor and id(o) not in before | gradients]
    return [f"tensor {tuple(o.shape)}" for o in made] + [type(o).__name__ for o in objects if isinstance(o, STATE)]


@contextmanager
def no_garbage_collection():
    """Nothing may need it: what sits in a reference cycle keeps its memory until Python happens to look."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def what_is_left(p: int, v: int, helped: bool) -> list[list[str]]:
    group = dist.new_group(timeout=timedelta(seconds=5)) if p > 1 else None
    setting = Setting(p, 4, v, 2, group=group, exchange=EXCHANGE if helped else None)
    storages, _ = marked(setting)
    sent: list[tuple[StorageWeakRef, weakref.ref]] = []
    most_alive = 0
    isend = Transport._isend

    def noted_isend(self, channel, tensor):
        nonlocal most_alive
        sent.append((StorageWeakRef(tensor.untyped_storage()), channel))
        for other in {c for _, c in sent}:
            alive = sum(not storage.expired() for storage, c in sent if c == other)
            most_alive = max(most_alive, alive)
        return isend(self, channel, tensor)

    Transport._isend = noted_isend
    results = []
    try:
        with no_garbage_collection():
            before = {id(o) for o in gc.get_objects() if isinstance(o, torch.Tensor)}
            for name in RUNS:
                losses = setting.step(getattr(setting.schedule, name))
                assert all(loss.grad_fn is None for loss in losses)
                del losses
                found = leftovers(before)
                found += [f"unit {i}" for i, storage in enumerate(storages) if not storage.expired()]
                found += [f"sent {i}" for i, (storage, _) in enumerate(sent) if not storage.expired()]
                results.append(found)
            results.append(leftovers_of_a_failure(setting, before))
    finally:
        Transport._isend = isend
    # Two sends and one header under way, and the one that is about to start.
    assert most_alive <= 4, most_alive
    setting.schedule.close()
    return results


def leftovers_of_a_failure(setting: Setting, before: set[int]) -> list[str]:
    calls = 0

    def fail(*_):
        nonlocal calls
        calls += 1
        if calls == 5:
            raise ArithmeticError("as the test wants it")

    hooks = [part.register_forward_pre_hook(fail) for part in setting.parts]
    try:
        setting.step()
    except (ArithmeticError, PipelineError):
        pass
    else:
        raise AssertionError("the step did not raise")
    for hook in hooks:
        hook.remove()
    return leftovers(before)


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    yield from run_together(
        [(what_is_left, p, p, v, helped) for p in (1, 2) for v in (1, 2) for helped in (False, True)]
    )


@pytest.mark.parametrize("helped", [False, True], ids=["alone", "exchange"])
@pytest.mark.parametrize("v", [1, 2])
@pytest.mark.parametrize("p", [1, 2])
def test_nothing_is_left_after_a_step(runs: Runs, p: int, v: int, helped: bool) -> None:
    # Ranks of their own: a message that nobody receives any more keeps a thread of gloo busy for ever.
    for outcome in runs[what_is_left, p, p, v, helped].result():
        assert outcome.ok, outcome
        for when, found in zip((*RUNS, "step that raised"), outcome.value, strict=True):
            assert not found, f"rank {outcome.rank}, after {when}: {found}"
