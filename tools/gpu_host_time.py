"""Host time that a schedule adds to its units, and whether the host ever waits for the GPU inside a step.

Host time is CPU time of the thread that runs the program, outside of stage modules, loss functions and
`torch.autograd.backward`, per forward or backward of a unit.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_decoder import Decoder, DecoderSize
from bench_pipeline import Bench, ComputeClock, Setting, backward_replaced, cross_entropy_sum
from gpu_figures import Figure
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from slimpipe import ScheduleInterleavedSlimPipe, ScheduleSlimPipe, SlimPipeOptions
from slimpipe.vocabulary import VocabularyEmbedding, VocabularyHead

SYNC_CASES = ("one stage", "three stages", "documents", "shared vocabulary")
_OFF = SlimPipeOptions(context_exchange="off")


class _Nothing(nn.Module):
    """A stage that does next to nothing."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), device=device))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def host_time(device: torch.device, tiny: bool) -> list[Figure]:
    """Runs on every rank."""
    num_ranks = dist.get_world_size()
    num_slices, num_microbatches, num_steps = (8, 2, 3) if tiny else (16, 4, 9)
    alone = _alone()
    figures = []
    if dist.get_rank() == 0:  # the others would only disturb
        stage = PipelineStage(_Nothing(device), 0, 1, device, group=alone)
        seconds = _seconds_alone(stage, num_slices, num_microbatches, num_steps)
        figures.append(Figure("d", "host time of a trivial unit's forward or backward, p = 1", 1e6 * seconds, "us"))
    dist.barrier()
    setting = Setting(
        num_ranks=num_ranks,
        num_layers=num_ranks,
        dim=64,
        num_heads=2,
        num_kv_heads=2,
        vocab=64,
        seq_len=16 * num_slices,
        num_microbatches=num_microbatches,
    )
    bench = Bench("SlimPipe", setting, num_slices=num_slices, options=_OFF, device=device)
    bench.step()
    seconds = statistics.median(bench.host_seconds_per_call() for _ in range(num_steps))
    name = f"host time of a unit's forward or backward, p = {num_ranks}, messages' host copies included"
    return [*figures, Figure("d", name, 1e6 * seconds, "us")]


def syncs(device: torch.device, tiny: bool) -> list[Figure]:
    """Runs on every rank, on a GPU: a step fails at the first operation in which the host waits for it.

    One rank alone, so that no message is in the way; from the first unit's forward to the end of the step.
    """
    alone = _alone()
    figures = []
    if dist.get_rank() == 0 and device.type == "cuda":
        figures = [syncs_in_a_step(case, device, alone) for case in SYNC_CASES]
    dist.barrier()
    return figures


def _alone() -> dist.ProcessGroup:
    """A group of this rank alone. Every rank must make one: torch names groups by counting."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _seconds_alone(stage: PipelineStage, num_slices: int, num_microbatches: int, num_steps: int) -> float:
    clock = ComputeClock()
    stage.submod.forward = clock.timed(stage.submod.forward)
    loss_fn = clock.timed(lambda output, target: output.sum())
    schedule = ScheduleSlimPipe(stage, num_microbatches, loss_fn, num_slices=num_slices, options=_OFF)
    batch = torch.ones(num_microbatches, 8 * num_slices, 1, device=stage.device)
    seconds = []
    with backward_replaced(clock.timed(torch.autograd.backward)):
        for _ in range(1 + num_steps):
            clock.reset()
            start = time.thread_time()
            schedule.step(batch, target=batch, return_outputs=False)
            seconds.append(time.thread_time() - start - clock.cpu_seconds)
    return statistics.median(seconds[1:]) / (2 * num_slices * num_microbatches)


def syncs_in_a_step(case: str, device: torch.device, alone: dist.ProcessGroup) -> Figure:
    """1 if the host waited, with what it waited for; else 0. ``case`` is one of `SYNC_CASES`."""
    size = DecoderSize(num_layers=3, dim=256, num_heads=2, num_kv_heads=1, vocab=512)
    num_stages = 3 if case == "three stages" else 1
    shares = case == "shared vocabulary"
    with device:
        parts: list[Any] = [
            Decoder(size).keep(index, num_stages, vocab_parallel="both" if shares else "none").to(torch.bfloat16)
            for index in range(num_stages)
        ]
        whole = Decoder(size).to(torch.bfloat16)
        positions = torch.arange(8 * 32).expand(2, -1)
        tokens = positions % size.vocab
    loss_fn: Any = _mean_loss
    embedding = None
    if shares:
        assert whole.head is not None and whole.embedding is not None
        loss_fn = VocabularyHead.from_linear(whole.head, reduce_to=None)
        embedding = VocabularyEmbedding.from_embedding(whole.embedding, reduce_to=None)
        parts += [loss_fn, embedding]
    stages = [PipelineStage(parts[i], i, num_stages, device, group=alone) for i in range(num_stages)]
    settings: dict[str, Any] = {"num_slices": 8, "options": _OFF, "embedding": embedding}
    schedule: Any
    if num_stages == 1:
        schedule = ScheduleSlimPipe(stages[0], 2, loss_fn, **settings)
    else:
        schedule = ScheduleInterleavedSlimPipe(stages, 2, loss_fn, **settings)
    if case == "documents":  # some inside of a slice, some longer than one
        positions = positions % 90

    def step() -> None:
        schedule.step(
            tokens,
            target=tokens,
            positions=positions,
            loss_kwargs={"denominator": tokens.numel()},
            return_outputs=False,
        )

    step()
    name = f"host syncs in a step, p = 1, {case}"
    try:
        with _syncs_raise(parts):
            step()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return Figure("d", f"{name}: {_where(error)}", 1, "at least", 0)
    return Figure("d", name, 0, "", 0)


def _mean_loss(output: Tensor, target: Tensor, denominator: int) -> Tensor:
    return cross_entropy_sum(output, target) / denominator


@contextmanager
def _syncs_raise(parts: list[nn.Module]) -> Iterator[None]:
    """From the first forward of a part to the end, operations in which the host waits for the GPU raise RuntimeError.

    What comes before it in a step, reading positions for one, may wait.
    """

    def switched_on(forward: Callable) -> Callable:
        @wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            return forward(*args, **kwargs)

        return call

    for part in parts:
        part.forward = switched_on(part.forward)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _where(error: BaseException) -> str:
    """The innermost line of the package that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    inner = next((frame for frame in reversed(frames) if "slimpipe" in Path(frame.filename).parts), frames[-1])
    return f"{Path(inner.filename).name}:{inner.lineno}: {inner.line}"
