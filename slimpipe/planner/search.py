"""Which layouts of a grid fit, and which of them is fastest: every one of the grid is judged, in the same order always.

Judged by closed forms: memory of the two ranks that can hold most (first and last), and the lock-step time. Left out
without a look are only layouts that another one of the grid beats for sure: the same with less recomputing that fits,
or with exchange and as little recomputing as the grid has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from slimpipe.options import VOCAB_PARALLEL_NAMES
from slimpipe.planner.costs import OpCosts
from slimpipe.planner.hardware import Hardware
from slimpipe.planner.layout import RECOMPUTE, Layout, broken_rule
from slimpipe.planner.lockstep import compute_seconds, equal_units_bubble, step_seconds
from slimpipe.planner.memory import peak_bytes, worst_rank
from slimpipe.planner.model_cost import data_parallel_seconds, exchange_costs, mfu, op_costs, p2p_bytes
from slimpipe.planner.models import ModelShape
from slimpipe.planner.reference import reference_bytes

GIB = 2**30

HEADROOM = {"SlimPipe": 28.25 * GIB, "1F1B": 15 * GIB, "Interleaved1F1B": 15 * GIB}
"""What a GPU needs besides what is planned: with it, and the reference's rule, the longest sequences of a 7B model on
64 GPUs of 80 GiB are those that its authors ran, 600K and 124K (see docs/planner.md)."""

CONSTANTS = ("ours", "reference")

_NEARLY = 0.01
"""Share of a step's time for which it is not worth cutting finer."""
_MULTIPLES = (1, 2, 3, 4, 6, 8, 12, 16)
_MOST_HALVINGS = 9
_LEAST_SLICE = 512
_MAX_STAGES_PER_RANK = 10
_BATCH_TOKENS = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to plan for."""

    model: ModelShape
    seq_len: int
    num_gpus: int
    hardware: Hardware
    memory: float
    """Of a GPU, in bytes."""
    sequences: int | None = None
    """Per step, all replicas together; None for the power of two that comes to 4 Mi tokens or next below."""
    headroom: float | None = None
    """Bytes; None for the schedule's `HEADROOM`."""
    constants: str = "ours"
    """Whose rule says what memory a run takes; one of `CONSTANTS`."""
    schedule: str = "SlimPipe"

    @property
    def num_sequences(self) -> int:
        """Per step. The default never rises with the sequence's length, so that `longest` may bisect."""
        if self.sequences is not None:
            return self.sequences
        return 2 ** (max(1, _BATCH_TOKENS // self.seq_len).bit_length() - 1)

    @property
    def limit(self) -> float:
        """Bytes that a layout may take."""
        return self.memory - (HEADROOM[self.schedule] if self.headroom is None else self.headroom)

    def parts(self, layout: Layout) -> tuple[int, dict[str, float]]:
        """The rank that holds most, and its bytes by part."""
        rule = peak_bytes if self.constants == "ours" else reference_bytes
        ranks = sorted({0, layout.pipeline - 1})
        parts = {rank: rule(self.model, layout, seq_len=self.seq_len, rank=rank) for rank in ranks}
        rank = worst_rank(parts)
        return rank, parts[rank]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Settings that are given; None for all of the grid."""

    tensor: int | None = None
    pipeline: int | None = None
    num_slices: int | None = None
    stages_per_rank: int | None = None
    recompute: str | None = None
    exchange: bool | None = None
    vocab_parallel: str | None = None


@dataclass(frozen=True)
class Judged:
    """A layout that breaks no rule, and what it takes."""

    question: Question
    layout: Layout
    rank: int
    """That holds most."""
    parts: dict[str, float]
    """Its bytes."""

    @cached_property
    def bytes(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.bytes <= self.question.limit

    @property
    def largest_part(self) -> str:
        return max(self.parts, key=self.parts.__getitem__)

    @cached_property
    def costs(self) -> OpCosts:
        """Of its units."""
        return op_costs(self.question.model, self.layout, self.question.hardware, seq_len=self.question.seq_len)

    @cached_property
    def pipeline_seconds(self) -> float:
        q = self.question
        exchange = exchange_costs(q.model, self.layout, q.hardware, seq_len=q.seq_len) if self.layout.exchange else None
        return step_seconds(self.layout, self.costs, exchange)

    @cached_property
    def seconds(self) -> float:
        """Of a step."""
        q = self.question
        return self.pipeline_seconds + data_parallel_seconds(q.model, self.layout, q.hardware)

    @cached_property
    def bubble(self) -> float:
        return 1 - compute_seconds(self.layout, self.costs) / self.pipeline_seconds

    @property
    def equal_units_bubble(self) -> float:
        return equal_units_bubble(self.layout)

    def mfu(self, *, causal: bool, seconds: float | None = None) -> float:
        q = self.question
        seconds = self.seconds if seconds is None else seconds
        return mfu(q.model, self.layout, q.hardware, seq_len=q.seq_len, seconds=seconds, causal=causal)

    @property
    def p2p_bytes(self) -> float:
        return p2p_bytes(self.question.model, self.layout, seq_len=self.question.seq_len)


@dataclass(frozen=True)
class Split:
    """All layouts of one choice of t, p and d."""

    tensor: int
    pipeline: int
    data: int
    num_layouts: int
    best: Judged | None
    """Of those that fit and are within 1 % of the fastest, the one with fewest units."""
    smallest: Judged | None
    """The one with least memory, where none fits."""
    broken: str | None
    """A rule that its layouts break, where all break one."""

    def __str__(self) -> str:
        return f"t{self.tensor} p{self.pipeline} d{self.data}"


def search(question: Question, wanted: Wanted = Wanted()) -> list[Split]:
    """Judges the whole grid.

    The grid: t a power of two up to a node's GPUs; p any divisor of what is left, from 2 to the number of layers; d the
    rest; n one of p times 1, 2, 3, 4, 6, 8, 12, 16, in slices of 512 tokens or more; v up to 10, with equal layers on
    all stages, or 1; all of recompute, vocabulary and exchange. A setting that is given stands in for its part.

    Returns:
        One entry for each t, p, d: those with fitting layouts first, by step time, then by memory.
    """
    splits = [_judge_split(question, wanted, t, p, d) for t, p, d in _degrees(question, wanted)]
    return sorted(splits, key=_order)


def nearest_fitting(splits: list[Split], split: Split) -> Judged | None:
    """The best layout of the split that fits and takes fewest halvings and doublings to come to."""
    fitting = [other.best for other in splits if other.best is not None]
    degrees = split.tensor, split.pipeline, split.data

    def distance(judged: Judged) -> tuple[float, float]:
        layout = judged.layout
        ratios = zip(degrees, (layout.tensor, layout.pipeline, layout.data), strict=True)
        return sum(max(a / b, b / a) - 1 for a, b in ratios), judged.seconds

    return min(fitting, key=distance, default=None)


def nearest_question(question: Question, wanted: Wanted) -> Judged | None:
    """For a question without a fitting layout, one that is near: by other settings than the given ones, else by halving
    the sequence."""
    if wanted != Wanted() and (free := _fastest(question, Wanted())) is not None:
        return free
    seq_len = question.seq_len
    for free_too in (wanted, Wanted()):
        for halvings in range(1, _MOST_HALVINGS):
            shorter = replace(question, seq_len=seq_len >> halvings)
            if seq_len % 2**halvings == 0 and (found := _fastest(shorter, free_too)) is not None:
                return found
    return None


def longest(question: Question, wanted: Wanted, *, step: int) -> tuple[int, Judged | None]:
    """The longest sequence, a multiple of ``step`` tokens, of which some layout of the grid fits, and that layout.

    By bisection, as if all shorter ones fitted too. 0 and None if not even ``step`` tokens fit.
    """
    found: dict[int, Judged | None] = {0: None}

    def fits(count: int) -> bool:
        found[count] = _fastest(replace(question, seq_len=count * step), wanted)
        return found[count] is not None

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * step, found[low]


def _fastest(question: Question, wanted: Wanted) -> Judged | None:
    first = search(question, wanted)
    return first[0].best if first else None


def _order(split: Split) -> tuple[float, ...]:
    if split.best is not None:
        return 0, split.best.seconds, split.tensor, split.pipeline
    return (1 if split.smallest else 2), split.smallest.bytes if split.smallest else 0, split.tensor, split.pipeline


def _degrees(question: Question, wanted: Wanted) -> Iterator[tuple[int, int, int]]:
    node = min(question.hardware.gpus_per_node, question.num_gpus)
    tensors = [wanted.tensor] if wanted.tensor else [2**k for k in range(node.bit_length())]
    for t in tensors:
        if question.num_gpus % t:
            continue
        rest = question.num_gpus // t
        pipelines = [wanted.pipeline] if wanted.pipeline else range(2, min(rest, question.model.num_layers) + 1)
        yield from ((t, p, rest // p) for p in pipelines if rest % p == 0)


def _judge_split(question: Question, wanted: Wanted, t: int, p: int, d: int) -> Split:
    if question.num_sequences % d:
        nearest = max(1, round(question.num_sequences / d)) * d
        uneven = (
            f"{question.num_sequences} sequences per step do not divide among d = {d}; nearest: {nearest} sequences"
        )
        return Split(t, p, d, 0, None, None, uneven)
    fitting: list[Judged] = []
    smallest = broken = None
    count = 0
    recomputes = list(RECOMPUTE) if wanted.recompute is None else [wanted.recompute]
    for n, v, vocab_parallel in product(
        _slices(question, wanted, t, p), _stages(question, wanted, p), _vocabulary(question, wanted)
    ):
        base = Layout(
            tensor=t,
            pipeline=p,
            data=d,
            num_slices=n,
            stages_per_rank=v,
            num_microbatches=question.num_sequences // d,
            exchange=question.schedule == "SlimPipe",
            vocab_parallel=vocab_parallel,
            schedule=question.schedule,
        )
        rule = broken_rule(base, question.model, seq_len=question.seq_len)
        if rule is not None:
            broken = broken or rule
            continue
        for exchange in _exchanges(question, wanted):
            for recompute in recomputes:
                count += 1
                layout = replace(base, exchange=exchange, recompute=recompute)
                judged = Judged(question, layout, *question.parts(layout))
                if judged.fits:
                    fitting.append(judged)
                    break  # recomputing more is slower
                if smallest is None or judged.bytes < smallest.bytes:
                    smallest = judged
            if judged.fits and recompute == recomputes[0]:
                break  # so is the same without exchange
    best = _fewest_units(fitting)
    return Split(t, p, d, count, best, None if best else smallest, None if count else broken)


def _fewest_units(fitting: list[Judged]) -> Judged | None:
    """Of those nearly as fast as the fastest, the one with the longest slices: short ones cost more than is counted."""
    enough = min((judged.seconds for judged in fitting), default=0.0) * (1 + _NEARLY)
    near = [judged for judged in fitting if judged.seconds <= enough]
    return min(
        near, key=lambda item: (item.layout.num_slices * item.layout.stages_per_rank, item.seconds), default=None
    )


def _exchanges(question: Question, wanted: Wanted) -> list[bool]:
    """The faster one first, by the lock-step time."""
    if question.schedule != "SlimPipe":
        return [False]
    return [True, False] if wanted.exchange is None else [wanted.exchange]


def _slices(question: Question, wanted: Wanted, t: int, p: int) -> list[int]:
    if question.schedule != "SlimPipe":
        return [1]
    if wanted.num_slices:
        return [wanted.num_slices]
    legal = [p * k for k in _MULTIPLES if question.seq_len % (p * k * t) == 0]
    return [n for n in legal if n == p or question.seq_len // n >= _LEAST_SLICE] or [p]


def _stages(question: Question, wanted: Wanted, p: int) -> list[int]:
    if wanted.stages_per_rank:
        return [wanted.stages_per_rank]
    if question.schedule == "1F1B":
        return [1]
    layers = question.model.num_layers
    least = 1 if question.schedule == "SlimPipe" else 2
    even = [v for v in range(least, min(_MAX_STAGES_PER_RANK, layers // p) + 1) if layers % (p * v) == 0]
    return even if least in even else [least, *even]


def _vocabulary(question: Question, wanted: Wanted) -> list[str]:
    if question.schedule != "SlimPipe":
        return ["none"]
    return [wanted.vocab_parallel] if wanted.vocab_parallel else list(VOCAB_PARALLEL_NAMES)
