"""What devices that run behind the host rely on, held on the CPU: a step never looks at a tensor's values, every
message is waited for before its tensor goes, and times are read by events."""

from __future__ import annotations

import contextlib
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from slimpipe.attention import slice_attention
from slimpipe.program.ir import RECEIVE_OF
from slimpipe.runtime import clock, executor
from slimpipe.runtime.executor import Executor
from slimpipe.runtime.refusals import check_backend
from slimpipe.vocabulary.rows import VocabularyRows
from tests.distributed.parity import Case, make_batch, make_schedule, run_step
from tests.harness import run_ranks

EXCHANGE = {"context_exchange": "on", "exchange_granularity": 1}
CASES = [
    Case(p=2, n=4, v=2, documents=(5, 9, 2), ignored="scattered", options=EXCHANGE, num_kv_heads=2, window=5, batch=2),
    Case(p=2, n=4, documents=(5, 9, 2), ignored="scattered", options=EXCHANGE, vocab_parallel="both", recompute=True),
    Case(p=1, n=4, ignored="scattered", vocab_parallel="both", options={}),
]
LOOKS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::unique_dim",
    "aten::_unique2",
    "aten::allclose",
}
"""Operators for which the host waits until a device has computed their arguments."""


class RefuseLooks(TorchDispatchMode):
    """Fails at any operator that needs a tensor's values on the host, and at methods that read them without one."""

    def __enter__(self):
        self._patch = pytest.MonkeyPatch()
        for name in ("tolist", "numpy", "cpu"):
            self._patch.setattr(torch.Tensor, name, self._refuse(name))
        return super().__enter__()

    def __exit__(self, *error):
        self._patch.undo()
        return super().__exit__(*error)

    def _refuse(self, name: str):
        def refuse(*args, **kwargs):
            raise AssertionError(f"Tensor.{name} makes the host wait for the device")

        return refuse

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split(".")[0]
        by_bools = name.startswith("aten::index") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for arg in args
            if isinstance(arg, list | tuple)
            for index in arg
        )
        assert name not in LOOKS and not by_bools, f"{name} makes the host wait for the device"
        return func(*args, **(kwargs or {}))


def steps_without_looks(case: Case) -> int:
    """Runs on every rank: the third step runs under `RefuseLooks` from its first instruction to its last."""
    schedule, _ = make_schedule(case)
    batch, run, num_watched = make_batch(case, 1), Executor.run, 0

    def watched(*args, **kwargs):
        nonlocal num_watched
        num_watched += 1
        with RefuseLooks():
            return run(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        # Both look only on a CPU, or hide from this test what they do.
        patch.setattr(VocabularyRows, "check_ids", lambda *args, **kwargs: None)
        patch.setattr(slice_attention, "hidden_from_dispatch_modes", contextlib.nullcontext)
        for _ in range(2):
            run_step(schedule, case, batch)
        patch.setattr(Executor, "run", watched)
        run_step(schedule, case, batch)
        run_step(schedule, case, make_batch(case, 2))
    schedule.close()
    return num_watched


@pytest.mark.parametrize("case", CASES, ids=["exchange", "vocabulary", "one rank"])
def test_no_instruction_looks_at_values(rank_pool, case: Case) -> None:
    assert rank_pool(case.p).run(steps_without_looks, case) == [2] * case.p


@pytest.mark.parametrize("look", ["item", "bools", "equal", "list"])
def test_looks_are_seen(look: str) -> None:
    x = torch.arange(4)
    looks = {
        "item": lambda: x[1].item(),
        "bools": lambda: x[x > 1],
        "equal": lambda: torch.equal(x, x),
        "list": lambda: x.tolist(),
    }
    with pytest.raises(AssertionError, match="makes the host wait"), RefuseLooks():
        looks[look]()


class Waited:
    """A message under way: notes that it was waited for, and whether its tensor went before that."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor, lost: list[str], kind: str) -> None:
        self.work, self.done = work, False
        weakref.finalize(tensor, lambda: None if self.done else lost.append(kind))

    def wait(self, *args, **kwargs):
        result = self.work.wait(*args, **kwargs)
        self.done = True
        return result

    def is_completed(self) -> bool:
        return self.work.is_completed()


def messages_not_waited_for(case: Case) -> tuple[int, list[str]]:
    """Runs on every rank: how many messages two steps have, and those whose tensor went too early."""
    schedule, _ = make_schedule(case)
    works: list[Waited] = []
    lost: list[str] = []

    def watch(kind):
        start = getattr(dist, kind)

        def started(tensor, *args, **kwargs):
            work = start(tensor, *args, **kwargs)
            if not isinstance(work, dist.Work):
                return work
            works.append(Waited(work, tensor, lost, kind))
            return works[-1]

        return started

    run_step(schedule, case, make_batch(case, 1))
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("isend", "irecv", "broadcast", "reduce"):
            patch.setattr(dist, kind, watch(kind))
        for seed in (2, 3):
            run_step(schedule, case, make_batch(case, seed))
    lost += ["never waited for"] * sum(not work.done for work in works)
    schedule.close()
    return len(works), lost


def test_every_message_is_waited_for_before_its_tensor_goes() -> None:
    for case in CASES[:2]:
        for num_messages, lost in run_ranks(messages_not_waited_for, case.p, case):
            assert num_messages > 100
            assert not lost


class FakeEvent:
    """A device's event; this device is as fast as the host, and its clock began elsewhere."""

    recorded: list[FakeEvent] = []  # noqa: RUF012 - of one process that runs one test

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        assert device.type == "cpu" and enable_timing

    def record(self) -> None:
        self.milliseconds = (time.perf_counter() - 1e4) * 1e3
        self.recorded.append(self)

    def synchronize(self) -> None:
        assert self.milliseconds

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.milliseconds - self.milliseconds


def timed_by_events(case: Case) -> None:
    """Runs on every rank."""
    schedule, _ = make_schedule(case, record_times=True)
    run_step(schedule, case, make_batch(case, 1))
    num_synchronized = 0

    def synchronize(device: torch.device) -> None:
        nonlocal num_synchronized
        num_synchronized += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Event", FakeEvent)
        patch.setattr(torch.accelerator, "synchronize", synchronize)
        patch.setattr(executor, "clock_of", clock.DeviceClock)
        begin = time.perf_counter()
        run_step(schedule, case, make_batch(case, 2))
        end = time.perf_counter()
    times = schedule.record.times
    assert num_synchronized == 1
    assert len(times) == len(schedule.program.instructions[dist.get_rank()])
    assert len(FakeEvent.recorded) >= 1 + 2 * len(times)
    assert begin <= times[0].start and times[-1].end <= end
    assert all(a.start <= a.end <= b.start for a, b in zip(times, times[1:]))
    assert all(0 <= it.waited <= it.end - it.start + 1e-9 for it in times)
    assert any(it.waited > 0 for it in times if it.instruction.op in RECEIVE_OF.values())
    assert len(schedule.timeline().spans) == sum(map(len, schedule.program.instructions))
    schedule.close()


def test_steps_are_timed_by_events_on_a_device() -> None:
    run_ranks(timed_by_events, 2, Case(p=2, n=4, m=2))


def refused_backend() -> str:
    with pytest.raises(ValueError) as refused:
        check_backend(torch.device("cuda", 0))
    check_backend(torch.device("cpu"))
    return str(refused.value)


def test_gloo_for_device_tensors_is_refused(rank_pool) -> None:
    (said,) = set(rank_pool(2).run(refused_backend))
    assert said.startswith("torch.distributed was initialised with gloo for cuda tensors")


def test_one_hardware_queue_is_warned_of(monkeypatch, caplog) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    check_backend(torch.device("cuda"))
    assert not caplog.records
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    check_backend(torch.device("cuda"))
    assert "CUDA_DEVICE_MAX_CONNECTIONS = 1" in caplog.text
