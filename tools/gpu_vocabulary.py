"""Part (e) of `gpu_check.py`: the output layer with its loss, `VocabularyHead` against plain cross entropy.

Of one slice, forward and backward: time, and peak bytes beyond weight, hidden states and labels. The head is measured
with all rows of the vocabulary and with those that one of eight ranks would hold, without the ranks' collectives.

Shapes: T tokens, V vocabulary, R rows, D model dim.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from bench_attention import relative_error, seconds_of
from gpu_figures import Figure
from gpu_report import Note, failed
from torch import Tensor, nn

from slimpipe.vocabulary import VocabularyHead

PART = "e"
DTYPE = torch.bfloat16
NUM_RANKS = 8

MAX_LOSS_ERROR, MAX_GRADIENT_ERROR = 1e-3, 1e-2
"""Logits are rounded to bfloat16, as by nn.Linear."""

PLAIN, HEAD = "plain cross entropy in float32", "VocabularyHead"

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Summed loss of hidden_TD, weight_RD, labels_T."""


@dataclass(frozen=True)
class Size:
    """What is timed."""

    num_tokens: int
    vocab: int
    dim: int
    rounds: int
    """After one that does not count."""


# 52 TFLOP per pass with all rows, 0.1 s; plain cross entropy in float32 holds about 25 GiB.
FULL = Size(num_tokens=16384, vocab=128256, dim=4096, rounds=5)
TINY = Size(num_tokens=64, vocab=1000, dim=32, rounds=2)
CHECKED = Size(num_tokens=2048, vocab=5000, dim=512, rounds=0)
CHECKED_TINY = Size(num_tokens=64, vocab=999, dim=32, rounds=0)


def plain(hidden_TD: Tensor, weight_RD: Tensor, labels_T: Tensor) -> Tensor:
    """Cross entropy of logits in float32 or wider, all of them at once."""
    logits_TR = F.linear(hidden_TD, weight_RD)
    return F.cross_entropy(logits_TR.to(torch.promote_types(logits_TR.dtype, torch.float32)), labels_T, reduction="sum")


def head(hidden_TD: Tensor, weight_RD: Tensor, labels_T: Tensor) -> Tensor:
    """Ours. The head shares the leaf, so its gradient arrives there."""
    module = VocabularyHead(weight_RD, vocab_size=len(weight_RD))  # type: ignore[arg-type]
    return module(hidden_TD, labels_T)


def torch_chunked() -> Loss | None:
    """torch's own loss that does not hold all logits, where this torch has it."""
    if not hasattr(F, "linear_cross_entropy"):
        return None
    options = nn.LinearCrossEntropyOptions()

    def loss(hidden_TD: Tensor, weight_RD: Tensor, labels_T: Tensor) -> Tensor:
        return F.linear_cross_entropy(hidden_TD, weight_RD, labels_T, reduction="sum", options=options)

    return loss


def run(device: torch.device, *, tiny: bool) -> Iterator[Figure | Note]:
    """Errors, then times and bytes."""
    for name, loss in (("VocabularyHead", head), ("plain", plain)):
        try:
            yield from _errors(name, loss, CHECKED_TINY if tiny else CHECKED, device)
        except Exception as error:
            yield failed(PART, f"{name}, error", error)
    size = TINY if tiny else FULL
    yield from _costs(size, device)


def _errors(name: str, loss: Loss, size: Size, device: torch.device) -> Iterator[Figure]:
    inputs = _inputs(size, size.vocab, device)
    got = _forward_backward(loss, inputs)
    want = _forward_backward(plain, tuple(x.double() if x.is_floating_point() else x for x in inputs))
    limits = MAX_LOSS_ERROR, MAX_GRADIENT_ERROR, MAX_GRADIENT_ERROR
    for what, x, exact, limit in zip(("loss", "d(hidden)", "d(weight)"), got, want, limits, strict=True):
        yield Figure(PART, f"{name}, error: {what}", relative_error(x, exact), "", limit)


def _costs(size: Size, device: torch.device) -> Iterator[Figure | Note]:
    rows = -(-size.vocab // NUM_RANKS)
    variants: list[tuple[str, Loss | None, int]] = [
        (PLAIN, plain, size.vocab),
        (HEAD, head, size.vocab),
        (f"{HEAD}, V/{NUM_RANKS} rows", head, rows),
        ("F.linear_cross_entropy in chunks", torch_chunked(), size.vocab),
    ]
    peaks: dict[str, int] = {}
    medians: dict[str, float] = {}
    for variant, loss, num_rows in variants:
        name = f"T={size.num_tokens} V={size.vocab}, {variant}"
        if loss is None:
            yield Note(PART, name, f"torch {torch.__version__} has none")
            continue
        try:
            inputs = _inputs(size, num_rows, device)
            medians[variant], peaks[variant] = _measure(loss, inputs, size.rounds, device)
        except Exception as error:
            yield failed(PART, name, error)
            continue
        yield Figure(PART, f"{name}: time", medians[variant] * 1e3, "ms")
        if device.type == "cuda":
            yield Figure(PART, f"{name}: peak", peaks[variant] / 2**30, "GiB")
    if PLAIN in medians and HEAD in medians:
        name = f"T={size.num_tokens} V={size.vocab}, {HEAD} over plain"
        yield Figure(PART, f"{name}: time", medians[HEAD] / medians[PLAIN], "x")
        if device.type == "cuda":
            yield Figure(PART, f"{name}: peak", peaks[HEAD] / peaks[PLAIN], "x", 1.0)
    if device.type != "cuda":
        yield Note(PART, "peak bytes", f"skipped: no allocator statistics on {device.type}")


def _inputs(size: Size, num_rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """hidden_TD, weight_RD, labels_T."""
    generator = torch.Generator(device).manual_seed(0)
    hidden_TD = torch.randn(size.num_tokens, size.dim, generator=generator, dtype=DTYPE, device=device)
    weight_RD = torch.randn(num_rows, size.dim, generator=generator, dtype=DTYPE, device=device) * size.dim**-0.5
    labels_T = torch.randint(num_rows, (size.num_tokens,), generator=generator, device=device)
    return hidden_TD, weight_RD, labels_T


def _forward_backward(loss: Loss, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Loss, d(hidden), d(weight)."""
    hidden_TD, weight_RD = (nn.Parameter(x) for x in inputs[:2])
    result = loss(hidden_TD, weight_RD, inputs[2])
    result.backward()
    assert hidden_TD.grad is not None and weight_RD.grad is not None
    return result.detach(), hidden_TD.grad, weight_RD.grad


def _measure(loss: Loss, inputs: tuple[Tensor, ...], rounds: int, device: torch.device) -> tuple[float, int]:
    """Median seconds, and peak bytes beyond the inputs, which are 0 without a GPU."""
    on_gpu = device.type == "cuda"
    _forward_backward(loss, inputs)  # warms up
    before = 0
    if on_gpu:
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    times = [seconds_of(lambda: _forward_backward(loss, inputs), device) for _ in range(rounds)]
    return statistics.median(times), torch.cuda.max_memory_allocated(device) - before if on_gpu else 0
