"""Part (b) of `gpu_check.py`: attention in slices over the same in one piece, forward and backward, per kernel.

What is timed is `SliceAttention` with all that a pipeline stage does for one layer, as in `bench_slicing.py`. Rounds
alternate; ratios are medians of the rounds' own ratios. Where the time goes is measured besides: the same kernel calls
alone, merging, copies into the K,V store, dK,dV added up.

Shapes: B batch, L slice, S sequence, N query heads, G K,V heads, H head dim.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from bench_attention import AttentionCase, Inputs, one_rank_plan, random_qkv_and_dout, seconds_of
from gpu_figures import Figure
from gpu_kernels import BUILDS_PLANS
from gpu_report import Note

from slimpipe.attention.kernels import AttentionKernel, choose_kernel, merge
from slimpipe.attention.kernels.reference import ReferenceKernel
from slimpipe.attention.kv_store import LayerStore, SlotBuffers
from slimpipe.program import Unit

PART = "b"
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Size:
    """What is timed."""

    seq_lens: tuple[int, ...]
    num_slices: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rounds: int
    """After one that does not count."""

    def flops(self, seq_len: int) -> float:
        """Of causal attention: two products forward, five backward, over half of the S x S scores."""
        return 7 * 2 * seq_len**2 / 2 * self.num_heads * self.head_dim


# 0.5 PFLOP per pass at 128K: 18 passes take 26 s at 350 TFLOP/s, the rest 3 s.
FULL = Size((32768, 131072), (8, 32), num_heads=32, num_kv_heads=8, head_dim=128, rounds=5)
TINY = Size((256, 512), (4, 8), num_heads=4, num_kv_heads=2, head_dim=64, rounds=2)
MAX_RATIO = {(131072, 8): 1.05}
"""By S and n."""
PIECES_SLICES = 8


def too_slow(kernel: str) -> Note | None:
    """Why a kernel is not timed."""
    return Note(PART, kernel, "skipped: it holds all S x S scores") if kernel == ReferenceKernel.name else None


def run(device: torch.device, *, kernel: str, tiny: bool, deadline: float) -> Iterator[Figure | Note]:
    """Times of one kernel.

    Args:
        deadline: By `time.monotonic`. A sequence length that would not be done by then is skipped.
    """
    size = TINY if tiny else FULL
    if kernel in BUILDS_PLANS:
        size = replace(size, seq_lens=size.seq_lens[-1:], num_slices=size.num_slices[:1])
        yield Note(PART, kernel, "other S and n are left out: it builds a plan for each length of a slice's past")
    flops_per_second, warm_up = 0.0, 0.0
    for seq_len in size.seq_lens:
        passes = (size.rounds + 1) * (len(size.num_slices) + 1)
        needed = warm_up + passes * size.flops(seq_len) / flops_per_second if flops_per_second else 0.0
        left = deadline - time.monotonic()
        if left < needed or left < 0:
            text = f"skipped: needs {needed:.0f} s, {max(0.0, left):.0f} s are left"
            yield Note(PART, f"{kernel} S={seq_len}", text, missed=True)
            continue
        heads = {"num_heads": size.num_heads, "num_kv_heads": size.num_kv_heads, "head_dim": size.head_dim}
        tensors = random_qkv_and_dout(seq_len=seq_len, **heads, dtype=DTYPE, device=device)
        case = AttentionCase(tensors, kernel=kernel)
        first, *rounds = [_round(case, size.num_slices, device) for _ in range(size.rounds + 1)]
        unsliced = statistics.median(times[1] for times in rounds)
        flops_per_second = size.flops(seq_len) / unsliced
        warm_up = sum(first.values()) - statistics.median(sum(times.values()) for times in rounds)
        yield from _figures(f"{kernel} S={seq_len}", rounds, size.flops(seq_len), seq_len)
        if seq_len == size.seq_lens[-1]:
            for piece, seconds in _pieces(case, kernel, device).items():
                yield Figure(
                    PART, f"{kernel} S={seq_len} n={PIECES_SLICES} over unsliced: {piece}", seconds / unsliced, "x"
                )


def _round(case: AttentionCase, num_slices: tuple[int, ...], device: torch.device) -> dict[int, float]:
    """Seconds by number of slices, 1 for one piece."""
    times = {}
    for n in (1, *num_slices):
        inputs = case.inputs(n)
        run = case.whole if n == 1 else case.sliced
        times[n] = seconds_of(lambda run=run, inputs=inputs: run(inputs), device)
    return times


def _figures(name: str, rounds: list[dict[int, float]], flops: float, seq_len: int) -> Iterator[Figure]:
    for n in rounds[0]:
        title = f"{name} unsliced" if n == 1 else f"{name} n={n}"
        seconds = statistics.median(times[n] for times in rounds)
        yield Figure(PART, f"{title}: time", seconds * 1e3, "ms")
        yield Figure(PART, f"{title}: rate", flops / seconds / 1e12, "TFLOP/s")
        if n > 1:
            ratio = statistics.median(times[n] / times[1] for times in rounds)
            yield Figure(PART, f"{title}: sliced/unsliced", ratio, "x", MAX_RATIO.get((seq_len, n)))


def _pieces(case: AttentionCase, kernel_name: str, device: torch.device) -> dict[str, float]:
    """Seconds of what a sequence in slices consists of, each alone; the second of two runs counts."""
    with torch.no_grad():
        slices = [tuple(x.detach() for x in tensors) for tensors in case.inputs(PIECES_SLICES)]
        kernel = choose_kernel(kernel_name, *slices[0][:3])
        pieces = _Pieces(slices, kernel)
        runs: dict[str, Callable[[], object]] = {
            "kernel calls alone": pieces.call_kernel,
            "merges": pieces.merge,
            "copies of K,V": pieces.append,
            "sums of dK,dV": pieces.carry,
        }
        return {name: [seconds_of(run, device) for _ in range(2)][-1] for name, run in runs.items()}


class _Pieces:
    """The steps of `SliceAttention`, one kind at a time, over all slices of a sequence."""

    def __init__(self, slices: Inputs, kernel: AttentionKernel) -> None:
        self._slices, self._kernel = slices, kernel
        self._units = [Unit(0, 0, index) for index in range(len(slices))]
        self._layer = LayerStore(SlotBuffers(one_rank_plan(len(slices))))
        self._scale = slices[0][0].shape[-1] ** -0.5
        self.append()
        # Any output and LSE of the right shapes do: time does not depend on them.
        self._out, self._lse = kernel.forward(*slices[0][:3], causal=True, scale=self._scale)

    def append(self) -> None:
        for unit, (_, k, v, _) in zip(self._units, self._slices, strict=True):
            self._layer.append(unit, k, v)

    def call_kernel(self) -> None:
        saved = self._out.to(DTYPE), self._lse
        for unit, (q, _, _, dout) in zip(self._units, self._slices, strict=True):
            parts = [(True, self._layer.own(unit))]
            parts += [(False, self._layer.slots(0, unit.slice))] if unit.slice else []
            for causal, kv in parts:
                self._kernel.forward(q, *kv, causal=causal, scale=self._scale)
                self._kernel.backward(dout, q, *kv, *saved, causal=causal, scale=self._scale)

    def merge(self) -> None:
        for _ in self._slices[1:]:
            merge(self._out, self._lse, self._out, self._lse)[0].to(DTYPE)

    def carry(self) -> None:
        for unit, (_, k, v, _) in reversed(list(zip(self._units, self._slices, strict=True))):
            if unit.slice:
                self._layer.add_past_gradient(unit, (0, unit.slice), *self._layer.slots(0, unit.slice))
            self._layer.take_gradient(unit, k, v)
