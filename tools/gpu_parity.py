"""Ranks that share one device: loss and every gradient of a pipeline against the same model in one piece.

float64 runs through the reference kernel and must agree to 1e-10. bfloat16 runs through the fastest kernel there is;
its errors are compared with those of the model in one piece in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from bench_decoder import Decoder
from bench_pipeline import Bench, Setting, cross_entropy_sum, make_batch, whole_decoder
from bench_ranks import over_ranks
from gpu_figures import Figure
from torch import Tensor

from slimpipe import SlimPipeOptions
from slimpipe.vocabulary import VocabularyHead
from slimpipe.vocabulary.rows import VocabularyRows

_EXACT = 1e-10
_ROUGH_LOSS = 1e-2
_ROUGH_RATIO = 1.5
"""More than 1: gradients add up in bfloat16, slice by slice instead of microbatch by microbatch."""


@dataclass(frozen=True)
class _Case:
    schedule: str
    num_slices: int
    vocab_parallel: str
    dtype: str


_CASES = (
    _Case("SlimPipe", 8, "both", "float64"),
    _Case("InterleavedSlimPipe", 4, "none", "float64"),
    _Case("SlimPipe", 8, "both", "bfloat16"),
)


def parity(device: torch.device, tiny: bool) -> list[Figure]:
    """Runs on every rank; context exchange is on."""
    sizes = {"num_layers": 8, "num_ranks": dist.get_world_size(), "num_microbatches": 2}
    if tiny:
        setting = Setting(**sizes, dim=32, num_heads=4, num_kv_heads=2, vocab=64, seq_len=64)
    else:
        setting = Setting(**sizes, dim=512, num_heads=8, num_kv_heads=2, vocab=512, seq_len=1024)
    return [figure for case in _CASES for figure in _compare(case, setting, device)]


def _compare(case: _Case, setting: Setting, device: torch.device) -> list[Figure]:
    setting = replace(setting, dtype=case.dtype)
    granularity = setting.seq_len // case.num_slices // 4
    bench = Bench(
        case.schedule,
        setting,
        num_slices=case.num_slices,
        vocab_parallel=case.vocab_parallel,
        options=SlimPipeOptions(context_exchange="on", exchange_granularity=granularity),
        device=device,
    )
    bench.step()  # learns what the exchange needs
    (loss,) = over_ranks(dist.ReduceOp.SUM, bench.step())
    assert bench.schedule.program.transfers, "nothing was exchanged"
    exact = whole_decoder(setting, device).double()
    exact_loss = _unsliced(exact, setting, device)
    name = f"{bench.title}, exchange, {case.dtype}"
    error_of_loss = abs(loss / exact_loss - 1)
    if case.dtype == "float64":
        worst = max(_relative_error([pair]) for pair in _gradients(bench, setting, exact))
        (worst,) = over_ranks(dist.ReduceOp.MAX, worst)
        return [
            Figure("c", f"{name}: loss", error_of_loss, "relative", _EXACT),
            Figure("c", f"{name}: worst gradient", worst, "relative", _EXACT),
        ]
    rounded = whole_decoder(setting, device)
    _unsliced(rounded, setting, device)
    ours = list(_gradients(bench, setting, exact))
    usual = [(theirs, right) for (_, theirs), (_, right) in zip(_gradients(bench, setting, rounded), ours, strict=True)]
    error, usual_error = _relative_error(ours), _relative_error(usual)
    error, usual_error, ratio = over_ranks(dist.ReduceOp.MAX, error, usual_error, error / usual_error)
    return [
        Figure("c", f"{name}: loss", error_of_loss, "relative", _ROUGH_LOSS),
        Figure("c", f"{name}: gradients of the worst rank", error, "relative"),
        Figure("c", f"{name}: the same of the model in one piece", usual_error, "relative"),
        Figure("c", f"{name}: ratio of the two, worst rank", ratio, "ratio", _ROUGH_RATIO),
    ]


def _unsliced(model: Decoder, setting: Setting, device: torch.device) -> float:
    """Loss of the batch; gradients are left in the model."""
    tokens, labels = make_batch(setting, device)
    positions = torch.arange(setting.seq_len, device=device)[None]
    total = 0.0
    for ids, targets in zip(tokens.split(1), labels.split(1), strict=True):
        loss = cross_entropy_sum(model(ids, positions), targets) / tokens.numel()
        loss.backward()
        total += loss.item()
    return total


def _gradients(bench: Bench, setting: Setting, whole: Decoder) -> Iterator[tuple[Tensor, Tensor]]:
    """Gradient of each parameter of this rank, and that of the whole model."""
    expected = dict(whole.named_parameters())
    num_parts = sum(isinstance(part, Decoder) for part in bench.parts)
    layers_per_stage = setting.num_layers // (num_parts * setting.num_ranks)
    for index, part in enumerate(bench.parts):
        first_layer = layers_per_stage * (dist.get_rank() + index * setting.num_ranks)
        for name, parameter in part.named_parameters():
            rows = slice(None)
            if isinstance(part, VocabularyRows):
                name = f"{'head' if isinstance(part, VocabularyHead) else 'embedding'}.{name}"
                rows = slice(part.rows.start, part.rows.stop)
            elif name.startswith("blocks."):
                _, layer, rest = name.split(".", 2)
                name = f"blocks.{first_layer + int(layer)}.{rest}"
            theirs = expected[name].grad
            assert parameter.grad is not None and theirs is not None, f"{name} has no gradient"
            yield parameter.grad, theirs[rows]


def _relative_error(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Norm of all differences over the norm of all second tensors; infinite where anything is NaN."""
    difference = sum((a.double() - b.double()).square().sum().item() for a, b in pairs)
    error = math.sqrt(difference / sum(b.double().square().sum().item() for _, b in pairs))
    return math.inf if math.isnan(error) else error  # a maximum may pass over NaN
