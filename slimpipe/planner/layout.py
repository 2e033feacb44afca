"""How a run is cut: parallel degrees, slices and stages, and the rules that any cut must keep.

The rules are those that `slimpipe train` checks before it starts, as far as they need no torchtitan; a test holds the
two against each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slimpipe.nearest import nearest_divisor
from slimpipe.planner.models import ModelShape
from slimpipe.program.order import cycle_size

RECOMPUTE = ("none", "selective", "full")
SCHEDULES = ("SlimPipe", "1F1B", "Interleaved1F1B")
"""SlimPipe stands for both of ours: with one stage per rank and with several."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to run a model."""

    tensor: int
    """Ranks that share every matrix (t), with sequence parallelism."""
    pipeline: int
    """Pipeline ranks (p)."""
    data: int
    """Replicas of the batch (d), parameters sharded among them."""
    context: int = 1
    """Ranks that share a sequence (c)."""
    num_slices: int = 1
    """Slices per sequence (n); 1 under torch's schedules."""
    stages_per_rank: int = 1
    """(v)"""
    num_microbatches: int = 1
    """Sequences per replica and step (m)."""
    recompute: str = "none"
    """One of `RECOMPUTE`; attention is not recomputed: its output is kept."""
    exchange: bool = True
    """Whether ranks with long contexts hand part of their attention to others."""
    vocab_parallel: str = "none"
    """"none", "output" or "both"."""
    schedule: str = "SlimPipe"
    """One of `SCHEDULES`."""

    @property
    def num_gpus(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def num_stages(self) -> int:
        return self.pipeline * self.stages_per_rank

    @property
    def cycle(self) -> int:
        """Slices on one stage before the next one's turn."""
        return cycle_size(self.num_slices, self.pipeline)

    def layers_per_stage(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each global stage: as even as they go, the first ones holding more."""
        size, more = divmod(num_layers, self.num_stages)
        return tuple(size + (stage < more) for stage in range(self.num_stages))

    def __str__(self) -> str:
        name = {"SlimPipe": ""}.get(self.schedule, f"{self.schedule} ")
        cut = f"n{self.num_slices} v{self.stages_per_rank}" if not name else f"v{self.stages_per_rank}"
        return (
            f"{name}t{self.tensor} p{self.pipeline} d{self.data} {cut} m{self.num_microbatches} "
            f"recompute {self.recompute}, exchange {'on' if self.exchange else 'off'}, vocabulary {self.vocab_parallel}"
        )


def broken_rule(layout: Layout, model: ModelShape, *, seq_len: int) -> str | None:
    """The first rule that a layout breaks, in one line; None where `slimpipe train` would take it."""
    return next(_broken_rules(layout, model, seq_len), None)


def _broken_rules(layout: Layout, model: ModelShape, seq_len: int) -> Iterator[str]:
    t, p, n, v, m = layout.tensor, layout.pipeline, layout.num_slices, layout.stages_per_rank, layout.num_microbatches
    if layout.context > 1:
        yield f"c = {layout.context}: context parallelism is not supported together with slices; nearest: 1"
    if p < 2:
        yield f"p = {p}: a run without a pipeline cuts no slices and no microbatches; nearest: 2"
    if model.tied:
        yield f"{model.name}: embedding and output layer share one weight, which no pipeline can run"
    if layout.schedule == "SlimPipe":
        if n < p:
            yield f"n = {n}: it must be at least p = {p}; nearest: {p}"
        if seq_len % (n * t):
            nearest = max(1, round(seq_len / (n * t))) * n * t
            yield f"a sequence of {seq_len} does not divide into n = {n} slices times t = {t}; nearest: {nearest}"
    elif layout.vocab_parallel != "none" or layout.exchange or n > 1:
        yield f"{layout.schedule}: slices, exchange and a shared vocabulary are SlimPipe's"
    elif seq_len % t:
        yield f"a sequence of {seq_len} does not divide by t = {t}; nearest: {max(1, round(seq_len / t)) * t}"
    if layout.schedule == "1F1B" and v > 1:
        yield f"v = {v}: 1F1B has one stage per rank; nearest: 1"
    if layout.schedule == "1F1B" and m < p:
        yield f"m = {m}: 1F1B needs a microbatch for each of p = {p} ranks; nearest: {p}"
    if layout.schedule == "Interleaved1F1B":
        if v == 1 or m % p:
            yield f"Interleaved1F1B: v must be at least 2, and m = {m} a multiple of p = {p}"
        if v > 2 and not _makes_stages(model.num_layers, p * v):
            legal = [x for x in range(2, model.num_layers // p + 1) if x == 2 or _makes_stages(model.num_layers, p * x)]
            nearest = min(legal, key=lambda x: abs(x - v), default=2)
            yield f"v = {v}: torchtitan cannot cut {model.num_layers} layers into {p * v} stages; nearest: {nearest}"
    if p * v > model.num_layers:
        yield f"p v = {p * v}: there are no more than {model.num_layers} layers; nearest: v = {model.num_layers // p}"
    if model.num_kv_heads % t:
        nearest = nearest_divisor(model.num_kv_heads, t)
        yield f"t = {t}: it must divide the {model.num_kv_heads} K,V heads; nearest: {nearest}"
    if layout.vocab_parallel != "none" and -(-model.vocab_size // (p * t)) * (p * t - 1) >= model.vocab_size:
        yield f"a vocabulary of {model.vocab_size} leaves no row for the last of p t = {p * t} ranks"


def _makes_stages(num_layers: int, num_stages: int) -> bool:
    """Whether torchtitan, which is told the layers of a stage, not the stages, makes so many."""
    layers_per_stage = -(-num_layers // num_stages)
    return -(-num_layers // layers_per_stage) == num_stages
