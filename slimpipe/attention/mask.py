"""Which keys a query may see when documents are packed, exact wherever a slice boundary falls.

The rule comes from positions alone: the query at token index i with position q sees keys i - q .. i. Documents are
contiguous, so what a slice sees is a short list of rectangles (queries x keys), known on the host. Kernels crop views
to these rectangles, cut segments from them, or draw them into a dense mask.

Shapes: B batch rows, S tokens of the sequence, L queries of one slice, K keys.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

import torch
from torch import Tensor

from slimpipe.program.runs import Run, Runs, intersect


@dataclass(frozen=True)
class Block:
    """A rectangle: in these batch rows, these queries see these keys (where `causal`, up to their own index)."""

    rows: slice
    queries: slice
    keys: slice
    left: int | None = None
    """Of a sliding window: query l of L sees no key before l + K - L - left of K, which is the distance that flash
    kernels count from the last query's last key. Every query sees a key. None: no limit."""


@dataclass(frozen=True, eq=False)
class Mask:
    """What the queries of one kernel call may see: nothing but the blocks. Valid for every layer of one unit.

    Of any batch row, a key belongs to at most one block; a query belongs to several where its keys are not adjacent in
    the K,V view. With `causal`, every block is square, lies on the diagonal and has the same `Block.left`.
    """

    shape_BLK: tuple[int, int, int]
    blocks: tuple[Block, ...]
    # One device serves all layers of a unit, so each derived tensor is made once; the mask dies with its unit.
    _made: dict = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        cuts = [cut for block in self.blocks for cut in (block.rows, block.queries, block.keys)]
        assert all(0 <= cut.start < cut.stop for cut in cuts), f"a block is empty: {self.blocks}"  # ops crash on these

    @property
    def sees_nothing(self) -> bool:
        """True if no query sees any key: the kernel call can be skipped."""
        return not self.blocks

    @property
    def is_one_band(self) -> bool:
        """True if all queries see all keys, but for `left`."""
        return len(self.blocks) == 1 and self._is_whole(self.blocks[0])

    @property
    def left(self) -> int | None:
        """`Block.left` of every block, which must be the same."""
        (left,) = {block.left for block in self.blocks}
        return left

    def keys_seen(self, *, step: int) -> tuple[int, int]:
        """The range of keys outside of which no query sees any, rounded outwards to multiples of ``step``."""
        low = min(block.keys.start for block in self.blocks)
        high = max(block.keys.stop for block in self.blocks)
        return low // step * step, -(-high // step) * step

    def of_keys(self, low: int, high: int) -> Mask:
        """The mask of the keys low .. high - 1 alone, which must hold all that any query sees."""
        B, L, _ = self.shape_BLK
        cut = [replace(block, keys=slice(block.keys.start - low, block.keys.stop - low)) for block in self.blocks]
        return Mask((B, L, high - low), tuple(cut))

    def _is_whole(self, block: Block) -> bool:
        cuts = block.rows, block.queries, block.keys
        return all((cut.start, cut.stop) == (0, size) for cut, size in zip(cuts, self.shape_BLK, strict=True))

    def dense_BLK(self, device: torch.device) -> Tensor:
        """The mask as a bool tensor, True where the key is visible. Made once, without a device sync; do not write."""
        if ("dense", device) not in self._made:
            dense_BLK = torch.zeros(self.shape_BLK, dtype=torch.bool, device=device)
            for block in self.blocks:
                num_queries, num_keys = (cut.stop - cut.start for cut in (block.queries, block.keys))
                dense_BLK[block.rows, block.queries, block.keys] = band_LK(
                    num_queries, num_keys, left=block.left, device=device
                )
            self._made["dense", device] = dense_BLK
        return self._made["dense", device]

    def cu_seqlens(self, device: torch.device) -> tuple[Tensor, int]:
        """Bounds (int32) of the segments of B * L tokens laid end to end, and the longest segment's length.

        Only for the mask of a causal part, whose blocks are the segments. Made once, without a device sync.
        """
        if ("cu_seqlens", device) not in self._made:
            B, L, _ = self.shape_BLK
            assert all(block.queries == block.keys for block in self.blocks), "segments need blocks on the diagonal"
            starts = [
                row * L + block.queries.start
                for block in self.blocks
                for row in range(block.rows.start, block.rows.stop)
            ]
            bounds = sorted(starts) + [B * L]
            longest = max(end - start for start, end in pairwise(bounds))
            cu_seqlens = torch.tensor(bounds, dtype=torch.int32).to(device, non_blocking=True)
            self._made["cu_seqlens", device] = cu_seqlens, longest
        return self._made["cu_seqlens", device]


@dataclass(frozen=True)
class Documents:
    """Where documents start in each batch row of a microbatch: read once per step, used by every slice and layer."""

    starts: tuple[tuple[int, ...], ...]
    """Ascending token indices, per batch row; each row begins with 0. Empty where no row holds a second document."""

    slice_len: int
    """Tokens per slice."""

    @classmethod
    def from_positions(cls, positions_BS: Tensor | None, *, slice_len: int) -> Documents:
        """Reads the documents off positions that restart at 0 where a document starts; None means one document.

        Costs one device-to-host copy if the positions are on a device.

        Raises:
            TypeError: positions are not integers.
            ValueError: positions are not (B, S), or do not count up by one within each document; the message names the
                batch row and the index.
        """
        if positions_BS is None:
            return cls((), slice_len)
        if positions_BS.is_floating_point() or positions_BS.is_complex() or positions_BS.dtype == torch.bool:
            raise TypeError(
                f"positions have dtype {positions_BS.dtype}; they must be integers, for example torch.int64"
            )
        if positions_BS.dim() != 2:
            raise ValueError(f"positions have shape {tuple(positions_BS.shape)}; it must be (batch, sequence)")
        positions_BS = positions_BS.detach().to("cpu", torch.int64)
        is_start_BS = positions_BS == 0
        continued_BS = positions_BS.clamp(min=0)  # a sequence may start in the middle of a document
        continued_BS[:, 1:] = positions_BS[:, :-1] + 1
        wrong = (~is_start_BS & (positions_BS != continued_BS)).nonzero()
        is_start_BS[:, 0] = True
        if len(wrong):
            row, index = wrong[0].tolist()
            value, continued = int(positions_BS[row, index]), int(continued_BS[row, index])
            raise ValueError(
                f"positions[{row}, {index}] = {value} (batch row {row}, index {index}): a position must be 0, where a "
                f"document or the sequence starts, or one more than the position before it; nearest legal value: "
                f"{min((0, continued), key=lambda legal: abs(legal - value))}"
            )
        starts: list[list[int]] = [[] for _ in range(len(positions_BS))]
        for row, index in is_start_BS.nonzero().tolist():
            starts[row].append(index)
        if all(len(row) == 1 for row in starts):
            return cls((), slice_len)
        return cls(tuple(map(tuple, starts)), slice_len)

    def own_mask(self, slice_index: int, *, window: int | None = None, num_rows: int | None = None) -> Mask | None:
        """The mask, on top of causality, of a slice's queries on its own keys; None if they see all that came before.

        Args:
            slice_index: The slice.
            window: Of the last tokens, how many a query sees, itself included; None for all.
            num_rows: Batch rows, where `starts` does not tell; with a window.
        """
        L, begin = self.slice_len, slice_index * self.slice_len
        left = window - 1 if window is not None and window < L else None
        rows = []
        for starts in self.starts or ((0,),) * (num_rows or 0):
            inside = starts[bisect.bisect_right(starts, begin) : bisect.bisect_left(starts, begin + L)]
            bounds = [0, *(start - begin for start in inside), L]
            segments = [slice(*bound) for bound in pairwise(bounds)]
            rows.append([(segment, segment, left) for segment in segments])
        return _mask_from_rows(rows, num_queries=L, num_keys=L)

    def part_mask(
        self,
        slice_index: int,
        layout: Sequence[Run],
        *,
        rows: Runs | None = None,
        num_rows: int | None = None,
        window: int | None = None,
    ) -> Mask | None:
        """The mask of a slice's queries on some past keys; None if every query sees all keys of the view.

        Only the document that spans the start of the slice has keys in the past, so a row's first queries, up to the
        first document start, all see the same keys, and its later queries see none. With a window, keys go out of
        sight one by one.

        Args:
            slice_index: The slice of the queries.
            layout: The past tokens that the K,V view holds, in the order of the view. Any order.
            rows: Those of them to attend to; None for all.
            num_rows: Batch rows, where `starts` does not tell.
            window: Of the last tokens, how many a query sees, itself included; None for all.
        """
        L, begin = self.slice_len, slice_index * self.slice_len
        blocks = []
        for starts in self.starts or ((0,),) * (num_rows or 0):
            after = bisect.bisect_left(starts, begin)  # starts[after - 1] is the document that reaches into the slice
            num_queries = min(starts[after] - begin, L) if after < len(starts) else L
            low = starts[after - 1] if window is None else max(starts[after - 1], begin - window + 1)
            visible: Runs = ((low, begin),) if low < begin and num_queries else ()
            visible = visible if rows is None else intersect(rows, visible)
            blocks.append(
                [
                    _rectangle(keys, stop - begin, num_queries=num_queries, window=window)
                    for keys, stop in _visible_runs(visible, layout, joins_any=window is None)
                ]
            )
        return _mask_from_rows(blocks, num_queries=L, num_keys=sum(stop - start for start, stop in layout))


def band_LK(num_queries: int, num_keys: int, *, left: int | None, device: torch.device, causal: bool = False) -> Tensor:
    """Bool, True where `Block.left`, and with ``causal`` the order of tokens, lets a query see a key."""
    visible_LK = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    if left is not None:
        visible_LK.triu_(num_keys - num_queries - left)
    return visible_LK.tril_() if causal else visible_LK


_Rectangle = tuple[slice, slice, int | None]
"""Queries, keys and `Block.left`."""


def _rectangle(keys: slice, stop: int, *, num_queries: int, window: int | None) -> _Rectangle:
    """What a slice's first queries see of consecutive past tokens, the last of which is ``stop - 1`` from the slice's
    start."""
    if window is None:
        return slice(0, num_queries), keys, None
    last = stop + window - 2  # the last query that sees any
    num_queries = min(num_queries, last + 1)
    left = last + 1 - num_queries
    return slice(0, num_queries), keys, left if left < keys.stop - keys.start - 1 else None


def _visible_runs(visible: Runs, layout: Sequence[Run], *, joins_any: bool) -> list[tuple[slice, int]]:
    """The key ranges of a view that hold the visible tokens, and the token after each.

    Adjacent ranges are joined; unless ``joins_any``, only where their tokens are adjacent as well.
    """
    runs: list[tuple[slice, int]] = []
    place = 0
    for start, stop in layout:
        for low, high in intersect(visible, ((start, stop),)):
            begin, end = place + low - start, place + high - start
            if runs and runs[-1][0].stop == begin and (joins_any or runs[-1][1] == low):
                begin = runs.pop()[0].start
            runs.append((slice(begin, end), high))
        place += stop - start
    return runs


def _mask_from_rows(rows: list[list[_Rectangle]], *, num_queries: int, num_keys: int) -> Mask | None:
    """Joins neighbouring batch rows that see the same; None if everything is visible."""
    blocks: list[Block] = []
    for rectangles, group in groupby(enumerate(rows), key=lambda numbered: numbered[1]):
        members = [row for row, _ in group]
        joined = slice(members[0], members[-1] + 1)
        blocks += [Block(joined, *rectangle) for rectangle in rectangles]
    if not rows or blocks == [Block(slice(0, len(rows)), slice(0, num_queries), slice(0, num_keys))]:
        return None
    return Mask((len(rows), num_queries, num_keys), tuple(blocks))
