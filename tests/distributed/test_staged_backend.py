"""`tools/staged_backend.py`: what it carries, and how; schedules over it, ours and torch's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from slimpipe.torch_private import group_timeout, set_group_timeout
from tests.distributed.parity import TOLERANCE, Case, check_cases, make_batch, make_schedule, unsliced
from tests.harness import RankPool
from tests.model import relative_error, sum_loss

TOOLS = str(Path(__file__).parents[2] / "tools")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@pytest.fixture
def staged(pool: RankPool, tmp_path: Path) -> RankPool:
    """Four ranks whose default group, hence every group, is staged."""
    pool.run(use_staged, str(tmp_path / "store"))
    return pool


def use_staged(store: str) -> None:
    if dist.get_backend() == "staged":
        return
    sys.path.insert(0, TOOLS)
    from staged_backend import register_staged_backend

    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    register_staged_backend()
    dist.init_process_group("staged", store=dist.FileStore(store, size), rank=rank, world_size=size)


def test_collectives(staged: RankPool) -> None:
    assert len(staged.run(run_collectives)) == 4


def run_collectives() -> None:
    rank = dist.get_rank()
    group = dist.new_group([0, 1, 2, 3], use_local_synchronization=True)
    mine = torch.tensor([rank, -rank], dtype=torch.bfloat16)
    for op, expected in ((dist.ReduceOp.SUM, [6, -6]), (dist.ReduceOp.MAX, [3, 0]), (dist.ReduceOp.MIN, [0, -3])):
        reduced = mine.clone()
        dist.all_reduce(reduced, op, group=group)
        assert reduced.tolist() == expected
    reduced = mine.clone()
    work = dist.reduce(reduced, group=group, group_dst=1, async_op=True)
    assert work is not None
    for _ in range(2):  # a second time it does nothing
        work.wait()
    assert work.is_completed()
    assert reduced.tolist() == ([6, -6] if rank == 1 else mine.tolist())
    square = torch.arange(9.0).view(3, 3) * (rank == 2)
    dist.broadcast(square.T, group=group, group_src=2)  # a view, not contiguous
    assert square.flatten().tolist() == list(range(9))
    gathered = torch.zeros(4, 2)
    dist.all_gather(list(gathered), mine.float(), group=group)
    assert gathered[:, 0].tolist() == [0, 1, 2, 3]
    objects: list[Any] = [None] * 4
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": r} for r in range(4)]
    dist.barrier(group)
    dist.destroy_process_group(group)


def test_messages(staged: RankPool) -> None:
    assert len(staged.run(run_messages)) == 4


def run_messages() -> None:
    """What is sent is what the tensor holds then; what is received is there after the wait and not before."""
    rank = dist.get_rank()
    sent, received = torch.full((2, 3), float(rank)), torch.full((2, 3), -1.0)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, (rank + 1) % 4),
            dist.P2POp(dist.irecv, received, (rank - 1) % 4),
        ]
    )
    sent.fill_(100)
    dist.barrier()
    assert received.unique().tolist() == [-1]
    for work in works:
        work.wait()
        assert work.is_completed()
    assert received.unique().tolist() == [(rank - 1) % 4]


def test_groups_have_timeouts(staged: RankPool) -> None:
    assert staged.run(run_into_timeout) == [True, True, True, True]


def run_into_timeout() -> bool:
    group = dist.new_group([0, 1, 2, 3], timeout=timedelta(seconds=0.5), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    assert group_timeout(group, CPU) == group_timeout(group, torch.device("cuda")) == timedelta(seconds=0.5)
    failed = True
    if dist.get_rank() == 0:
        failed = False
        try:
            dist.recv(torch.zeros(1), 1, group=group)
        except RuntimeError:
            failed = True
    set_group_timeout(group, timedelta(seconds=7))
    assert group_timeout(group, CPU) == timedelta(seconds=7)
    dist.barrier()
    return failed


def test_our_schedules_are_exact(staged: RankPool) -> None:
    exchange = {"context_exchange": "on", "exchange_granularity": 1}
    auto = {"context_exchange": "auto", "attention_flops": 1e3, "exchange_granularity": 1}
    cases = [
        Case(p=4, n=8, documents=(5, 27), num_kv_heads=2, vocab_parallel="both", runs="TTET", options=exchange),
        Case(p=4, n=4, v=2, recompute=True, vocab_parallel="output", runs="TTE", options=exchange),
        Case(p=4, n=4, m=1, runs="TT", options=auto),  # measures the links
    ]
    check_cases(lambda p: staged, cases, check_schedule=check_is_staged)


def check_is_staged(schedule: Any, case: Case) -> None:
    assert dist.get_backend() == "staged"
    assert schedule.program.transfers


def test_torchs_schedule_is_exact(staged: RankPool) -> None:
    errors = staged.run(errors_of_1f1b, Case(p=4, n=4, m=4))
    assert max(errors) <= TOLERANCE, errors


def errors_of_1f1b(case: Case) -> float:
    rank = dist.get_rank()
    tokens, labels, _ = make_batch(case, seed=1)
    gradients, expected_losses = unsliced(case, [(tokens, labels, None)])
    _, (part,) = make_schedule(case)
    loss_fn = partial(sum_loss, num_tokens=tokens.numel())
    schedule = Schedule1F1B(PipelineStage(part, rank, 4, CPU), case.m, loss_fn, scale_grads=False)
    losses: list[torch.Tensor] = []
    schedule.step(
        *([tokens] if rank == 0 else []),
        target=labels if rank == 3 else None,
        losses=losses,
        positions=torch.arange(case.seq_len).expand_as(tokens),
    )
    errors = [relative_error(parameter.grad, gradients[name]) for name, parameter in part.named_parameters()]
    if rank == 3:
        errors += [relative_error(*pair) for pair in zip(losses, expected_losses, strict=True)]
    return max(errors)


def test_a_gpus_tensor_is_copied_in_stream_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the copy is queued on the current stream, and the host waits for it before gloo gets it."""
    monkeypatch.syspath_prepend(TOOLS)
    import staged_backend

    log: list[str] = []

    class OnGpu(torch.Tensor):
        is_cuda = True
        device = torch.device("cuda", 1)

    class Host(torch.Tensor):
        def copy_(self, tensor: torch.Tensor, non_blocking: bool = False) -> Host:
            log.append(f"copy, non_blocking={non_blocking}")
            return super().copy_(tensor.as_subclass(torch.Tensor))

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking

        def record(self, stream: str) -> None:
            log.append(f"record on {stream}")

        def synchronize(self) -> None:
            log.append("synchronize")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    monkeypatch.setattr(staged_backend, "_empty_host", lambda tensor: torch.empty(2).as_subclass(Host))
    (host,) = staged_backend._to_host([torch.ones(2).as_subclass(OnGpu)])
    assert log == ["copy, non_blocking=True", "record on the stream of cuda:1", "synchronize"]
    assert host.tolist() == [1, 1]
