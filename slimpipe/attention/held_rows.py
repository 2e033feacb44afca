"""K,V that a helper holds for another rank's attention layer, and in backward their dK,dV.

Shapes: B batch, K rows (tokens of the past), G K,V heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from slimpipe.attention.kv_store import cut_by_run
from slimpipe.dtypes import wide_dtype
from slimpipe.program.runs import Run, Runs

_Pair = tuple[Tensor, Tensor]


@dataclass
class _Piece:
    """Consecutive rows."""

    run: Run
    kv: _Pair
    gradient: _Pair | None = None
    """dK,dV in float32 or wider, once there are any."""

    def cut(self, run: Run) -> _Piece:
        """A part of it, as views."""
        gradient = None if self.gradient is None else self._views(self.gradient, run)
        return _Piece(run, self._views(self.kv, run), gradient)

    def own(self) -> _Piece:
        """The same in memory of its own, so that what it was cut from can go."""
        gradient = None if self.gradient is None else _map(torch.clone, self.gradient)
        return _Piece(self.run, _map(torch.clone, self.kv), gradient)

    def _views(self, pair: _Pair, run: Run) -> _Pair:
        start, length = run[0] - self.run[0], run[1] - run[0]
        return pair[0].narrow(1, start, length), pair[1].narrow(1, start, length)


class HeldRows:
    """Rows of one attention layer, by token index in their microbatch."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []

    def __bool__(self) -> bool:
        return bool(self._pieces)

    @property
    def num_bytes(self) -> int:
        """Bytes held, gradients included."""
        pairs = [pair for piece in self._pieces for pair in (piece.kv, piece.gradient) if pair is not None]
        return sum(x.nbytes for pair in pairs for x in pair)

    def add(self, runs: Runs, k_BKGH: Tensor, v_BKGH: Tensor) -> None:
        """Hold more rows."""
        for run, k, v in cut_by_run(runs, k_BKGH, v_BKGH):
            self._pieces.append(_Piece(run, (k, v)))
        self._pieces.sort(key=lambda piece: piece.run)

    def rows(self, runs: Runs) -> _Pair:
        """K,V of held rows, in the order of tokens."""
        return _join([piece.cut(run).kv for piece, run in self._overlaps(runs)])

    def add_gradient(self, runs: Runs, dk_BKGH: Tensor, dv_BKGH: Tensor) -> None:
        """Add to dK,dV of held rows, in float32 or wider."""
        overlaps = list(self._overlaps(runs))
        for (piece, run), (_, dk, dv) in zip(
            overlaps, cut_by_run(tuple(run for _, run in overlaps), dk_BKGH, dv_BKGH), strict=True
        ):
            if piece.gradient is None:
                piece.gradient = _map(lambda x: torch.zeros_like(x, dtype=wide_dtype(x.dtype)), piece.kv)
            for total, share in zip(piece.cut(run).gradient or (), (dk, dv), strict=True):
                total.add_(share)

    def drop(self, runs: Runs) -> _Pair | None:
        """Let rows go; returns their dK,dV in the order of tokens, None if there are none."""
        dropped = [gradient for piece, run in self._overlaps(runs) if (gradient := piece.cut(run).gradient)]
        kept: list[_Piece] = []
        for piece in self._pieces:
            start = piece.run[0]
            for run in [run for other, run in self._overlaps(runs) if other is piece]:
                if start < run[0]:
                    kept.append(piece.cut((start, run[0])).own())
                start = run[1]
            if start == piece.run[0]:
                kept.append(piece)
            elif start < piece.run[1]:
                kept.append(piece.cut((start, piece.run[1])).own())
        self._pieces = kept
        return _join(dropped) if dropped else None

    def _overlaps(self, runs: Runs) -> Iterator[tuple[_Piece, Run]]:
        """Where the runs lie in the pieces, by token."""
        for start, stop in runs:
            for piece in self._pieces:
                low, high = max(start, piece.run[0]), min(stop, piece.run[1])
                if low < high:
                    assert low == start, f"tokens {start} .. {low - 1} are not held"
                    yield piece, (low, high)
                    start = high
            assert start == stop, f"tokens {start} .. {stop - 1} are not held"


def _join(pairs: list[_Pair]) -> _Pair:
    if len(pairs) == 1:
        return pairs[0]
    return torch.cat([k for k, _ in pairs], dim=1), torch.cat([v for _, v in pairs], dim=1)


def _map(fn: Callable[[Tensor], Tensor], pair: _Pair) -> _Pair:
    return fn(pair[0]), fn(pair[1])
