"""Bytes of logit size on the last rank, with and without a shared vocabulary.

    python tools/bench_vocabulary.py [--num-ranks 4] [--vocab 32000] [--vocab-parallel none output both] [--json]

Starts its own ranks (gloo on the loopback address). Counted on the last rank, through one whole step, is every tensor
that has a dim as large as the vocabulary, or as a rank's rows of it, and is no weight or gradient of one: logits,
softmax, their gradients, whoever holds them. *Peak*: most bytes of them alive after any operation. *Between units*:
most alive when a unit ends, that is, kept for backward. *Bound*: two tensors of block size x V/p in float32.
"""

from __future__ import annotations

import json
import weakref
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from bench_cli import aligned, check_layers, parse_setting, setting_parser
from bench_pipeline import SCHEDULES, Bench
from bench_pipeline import Setting as PipelineSetting
from bench_ranks import gathered, run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slimpipe import SlimPipeOptions
from slimpipe.options import VOCAB_PARALLEL_NAMES
from slimpipe.vocabulary import VocabularyHead, shard_rows


@dataclass(frozen=True, kw_only=True)
class Setting(PipelineSetting):
    """What is measured."""

    num_ranks: int = 4
    seq_len: int = 8192
    vocab: int = 32000
    num_microbatches: int = 1
    num_layers: int = 4
    num_stages_per_rank: int = 1
    schedules: tuple[str, ...] = ("SlimPipe",)
    vocab_parallel: tuple[str, ...] = ("none", "output", "both")


class LogitBytes(TorchDispatchMode):
    """Counts live bytes of tensors with a dim in ``sizes`` and none of size ``dim``."""

    def __init__(self, *, sizes: set[int], dim: int) -> None:
        super().__init__()
        self._sizes, self._dim = sizes, dim
        self._seen: dict[int, weakref.ref[Tensor]] = {}
        self.peak = self.peak_between_units = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and self._sizes & {*value.shape} and self._dim not in value.shape:
                self._seen[id(value)] = weakref.ref(value)
        self.peak = max(self.peak, self._alive())
        return result

    def end_unit(self) -> None:
        """A unit has ended."""
        self.peak_between_units = max(self.peak_between_units, self._alive())

    def _alive(self) -> int:
        tensors = [tensor for tensor in (ref() for ref in self._seen.values()) if tensor is not None]
        self._seen = {id(tensor): weakref.ref(tensor) for tensor in tensors}
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values())


def measure(setting: Setting) -> dict[str, Any]:
    """Runs on every rank; all return the same figures."""
    figures: dict[str, Any] = {}
    rows = shard_rows(setting.vocab, num_ranks=setting.num_ranks, rank=dist.get_rank())
    for name in setting.schedules:
        ours = name.endswith("SlimPipe")
        for num_slices in setting.num_slices if ours else (1,):
            for vocab_parallel in setting.vocab_parallel if ours else ("none",):
                options = SlimPipeOptions(context_exchange="off")
                bench = Bench(name, setting, num_slices=num_slices, vocab_parallel=vocab_parallel, options=options)
                with LogitBytes(sizes={setting.vocab, len(rows)}, dim=setting.dim) as counted:
                    bench.clock.after_call = counted.end_unit
                    bench.step()
                head = next((part for part in bench.parts if isinstance(part, VocabularyHead)), None)
                figures[bench.title] = {
                    "peak_bytes": gathered(counted.peak)[-1],
                    "peak_bytes_between_units": gathered(counted.peak_between_units)[-1],
                    "bound": None if head is None else 2 * 4 * head.block_size * gathered(len(rows))[0],
                }
                bench.close()
    return {"setting": asdict(setting), "schedules": figures}


def table(report: dict[str, Any]) -> str:
    """The figures to read."""
    rows = [("schedule", "peak MiB", "between units MiB", "bound MiB")]
    for name, figure in report["schedules"].items():
        numbers = (figure["peak_bytes"], figure["peak_bytes_between_units"], figure["bound"])
        rows.append((name, *("" if number is None else f"{number / 2**20:.1f}" for number in numbers)))
    return aligned(rows)


def main(argv: list[str] | None = None) -> None:
    parser = setting_parser(
        Setting,
        description="Count bytes of logit size on the last rank.",
        helps={"schedules": "torch's and ours", "vocab_parallel": "what all ranks share under our schedules"},
        choices={"schedules": SCHEDULES, "vocab_parallel": VOCAB_PARALLEL_NAMES},
    )
    setting, as_json = parse_setting(parser, Setting, argv)
    check_layers(parser, setting.num_layers, setting.num_ranks * setting.num_stages_per_rank)
    report = run_ranks(measure, setting, num_ranks=setting.num_ranks, num_threads=setting.num_threads)
    print(json.dumps(report, indent=2) if as_json else table(report))


if __name__ == "__main__":
    main()
