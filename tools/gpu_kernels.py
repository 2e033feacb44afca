"""Part (a) of `gpu_check.py`: every attention kernel in bfloat16 against the reference kernel in float64.

Errors are norms of differences over norms. A kernel is compared alone, on one slice's own and past keys, and as
`SliceAttention` uses it: error of a sequence in slices over error of the same in one piece.

Shapes: B batch, L slice, S sequence, K keys, N query heads, G K,V heads, H head dim (Hv that of V).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from bench_attention import AttentionCase, random_qkv_and_dout, relative_error
from gpu_figures import Figure
from gpu_report import Note, failed
from torch import Tensor

from slimpipe.attention.kernels import AttentionKernel, choose_kernel
from slimpipe.attention.kernels.choose import refusals
from slimpipe.attention.kernels.padded import PaddedValues
from slimpipe.attention.kernels.reference import ReferenceKernel
from slimpipe.attention.kernels.torch_cudnn import TorchCudnnKernel
from slimpipe.attention.mask import Documents, Mask

PART = "a"
DTYPE = torch.bfloat16
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (256, 256), (192, 128))
"""H and Hv."""
NAMES = ("out", "LSE", "dq", "dk", "dv")
BUILDS_PLANS = (TorchCudnnKernel.name,)
"""Kernels that take half a second for every new shape, forward and again backward: checked last, with few shapes."""

MAX_ERROR, MAX_LSE_ERROR = 1e-2, 1e-4
"""A bfloat16 has 8 bits: its rounding alone costs 2e-3. The LSE is float32; another base or scale would be far off."""
MAX_OVER_ROUNDING = 2.0
"""Where rounding nothing but ``out`` to bfloat16 already costs much, as rows of large scores do, so often that."""
MAX_SLICED_OVER_WHOLE = 1.5

QUERY_SLICE = 3
"""The slice whose queries attend, so that it has three slices of past."""
LARGE_SCORES = 40.0


@dataclass(frozen=True)
class Size:
    """Sizes of the inputs; slices are no multiple of a kernel's tiles."""

    batch: int
    heads: tuple[tuple[int, int], ...]
    """N and G: grouped queries, and as many K,V heads as query heads."""
    slice_len: int
    seq_len: int
    """Of the sequence that is attended in one piece and in slices."""
    num_slices: tuple[int, ...]


# Per kernel FULL takes about 5 TFLOP of float64, seconds where that is fast, and at most 10 GiB.
FULL = Size(batch=2, heads=((32, 8), (32, 32)), slice_len=520, seq_len=2080, num_slices=(4, 8))
TINY = Size(batch=2, heads=((4, 2), (4, 4)), slice_len=24, seq_len=96, num_slices=(4,))


@dataclass(frozen=True)
class View:
    """What the queries of a slice attend to in one kernel call."""

    name: str
    num_keys: int
    causal: bool
    mask: Mask | None = None
    factor: float = 1.0
    """On every sixteenth query."""
    window: int | None = None
    """Sliding window of the mask."""

    @property
    def has_many_shapes(self) -> bool:
        """Whether kernels that know no masks get a call for each document."""
        return self.mask is not None and self.window is None


def views(size: Size, *, device: torch.device) -> list[View]:
    """All kinds of call that `SliceAttention` makes."""
    L, past = size.slice_len, QUERY_SLICE * size.slice_len
    i, B, W = QUERY_SLICE, size.batch, L // 3
    slots = [(L, 2 * L), (2 * L, 3 * L), (0, L)]
    whole, long = Documents((), L), 2 * L + W  # past the neighbouring slice
    long_mask = whole.part_mask(i, slots, window=long, num_rows=B)
    documents = Documents.from_positions(packed_positions(size.batch, past + L, device=device), slice_len=L)
    return [
        View("causal", L, causal=True),
        View("past", past, causal=False),
        View("documents causal", L, causal=True, mask=documents.own_mask(i)),
        View("documents past", past, causal=False, mask=documents.part_mask(i, slots)),
        View("large scores causal", L, causal=True, factor=LARGE_SCORES),
        View("large scores past", past, causal=False, factor=LARGE_SCORES),
        View("window causal", L, causal=True, window=W, mask=whole.own_mask(i, window=W, num_rows=B)),
        View("window past", past, causal=False, window=W, mask=whole.part_mask(i, slots, window=W, num_rows=B)),
        View("long window past", past, causal=False, window=long, mask=long_mask),
        View("window documents causal", L, causal=True, window=W, mask=documents.own_mask(i, window=W)),
        View("window documents past", past, causal=False, window=W, mask=documents.part_mask(i, slots, window=W)),
    ]


def packed_positions(batch: int, seq_len: int, *, device: torch.device) -> Tensor:
    """Positions of packed documents, other ones in every row, one of a single token and one across slices."""
    positions_BS = torch.arange(seq_len).repeat(batch, 1)
    for row in range(batch):
        starts = (seq_len // 8 + 3 * row, seq_len * 4 // 5 - row, seq_len * 4 // 5 + 1 - row, seq_len * 9 // 10)
        for start in starts:
            positions_BS[row, start:] = torch.arange(seq_len - start)
    return positions_BS.to(device)


def labels(device: torch.device) -> tuple[dict[str, list[str]], list[Note]]:
    """Of each kernel the head dims that it serves, and notes of what kernels refuse."""
    served: dict[str, list[str]] = {}
    refused: dict[tuple[str, str], list[str]] = {}
    for H, Hv in HEAD_DIMS:
        q_BLNH, v_BLNH = _probe(H, Hv, device=device)
        for kernel, reason in refusals(q_BLNH, q_BLNH, v_BLNH).items():
            into = served.setdefault(kernel, []) if reason is None else refused.setdefault((kernel, reason), [])
            into.append(label(H, Hv))
    return served, [
        Note(PART, f"{kernel}, head dim {', '.join(dims)}", f"{kernel} {reason}")
        for (kernel, reason), dims in refused.items()
    ]


def _probe(H: int, Hv: int, *, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tensors to choose a kernel by: Q or K, and V."""
    q_BLNH, v_BLNH = (torch.empty(1, 8, 1, dim, dtype=DTYPE, device=device) for dim in (H, Hv))
    return q_BLNH, v_BLNH


def label(H: int, Hv: int) -> str:
    """Name of a head dim."""
    return f"{H}" if Hv == H else f"{H}/{Hv}"


def check(device: torch.device, *, kernel: str, head_dims: Sequence[str], tiny: bool) -> Iterator[Figure | Note]:
    """Errors of one kernel, for those of `HEAD_DIMS` that it serves."""
    size = TINY if tiny else FULL
    all_views = views(size, device=device)
    pairs = [pair for pair in HEAD_DIMS if label(*pair) in head_dims]
    q_BLNH, v_BLNH = _probe(*pairs[0], device=device)
    no_windows = refusals(q_BLNH, q_BLNH, v_BLNH, window=True)[kernel]
    if no_windows is not None:
        yield Note(PART, f"{kernel}, sliding windows", f"{kernel} {no_windows}")
        all_views = [view for view in all_views if view.window is None]
    few_shapes = kernel in BUILDS_PLANS
    if few_shapes:
        size = replace(size, heads=size.heads[:1], num_slices=size.num_slices[:1])
        text = f"documents, and a sequence in slices, only at H={label(*pairs[0])}; no other heads, no n but the first"
        yield Note(PART, f"{kernel}, most shapes", f"left out, as it builds a plan for each: {text}")
    for H, Hv in pairs:
        q_BLNH, v_BLNH = _probe(H, Hv, device=device)
        pads = isinstance(choose_kernel(kernel, q_BLNH, q_BLNH, v_BLNH), PaddedValues)
        dims = f"H={label(H, Hv)}" + (" (V padded)" if pads else "")
        all_shapes = not few_shapes or (H, Hv) == pairs[0]
        for (N, G), view in product(size.heads, all_views):
            if view.has_many_shapes and not all_shapes:
                continue
            name = f"{kernel}, error: {dims} {N}/{G} heads, {view.name}"
            try:
                yield from _view_errors(view, size, (N, G, H, Hv), kernel=kernel, name=name, device=device)
            except Exception as error:
                yield failed(PART, name, error)
        for packed in (False, True):
            if few_shapes and (packed or not all_shapes):
                continue
            name = f"{dims} {'documents' if packed else 'causal'}"
            try:
                yield from _sliced_errors(size, (H, Hv), kernel=kernel, packed=packed, name=name, device=device)
            except Exception as error:
                yield failed(PART, f"{kernel}, in slices: {name}", error)


def _view_errors(
    view: View, size: Size, dims: tuple[int, int, int, int], *, kernel: str, name: str, device: torch.device
) -> Iterator[Figure]:
    inputs = _view_inputs(view, size, dims, device=device)
    got = _run(choose_kernel(kernel, *inputs[:3], window=view.window is not None), inputs, view)
    want = _run(ReferenceKernel(), [x.double() for x in inputs], view)
    rounded = _run(ReferenceKernel(), inputs, view)
    for what, x, exact, least in zip(NAMES, got, want, rounded, strict=True):
        limit = MAX_LSE_ERROR if what == "LSE" else MAX_ERROR
        limit = max(limit, MAX_OVER_ROUNDING * relative_error(least, exact))
        yield Figure(PART, f"{name} {what}", relative_error(x, exact), "", limit)


def _view_inputs(
    view: View, size: Size, dims: tuple[int, int, int, int], *, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout; k and v as the K,V store hands them out, here with NaN around them."""
    N, G, H, Hv = dims
    generator = torch.Generator(device).manual_seed(view.num_keys + N + G + H + Hv)

    def normal(length: int, heads: int, dim: int) -> Tensor:
        return torch.randn(size.batch, length, heads, dim, generator=generator, dtype=DTYPE, device=device)

    def stored(x_BKGH: Tensor) -> Tensor:
        B, K, *heads = x_BKGH.shape
        buffer = x_BKGH.new_full((B, K + 2 * size.slice_len, *heads), torch.nan)
        return buffer.narrow(1, size.slice_len, K).copy_(x_BKGH)

    q_BLNH, dout_BLNH = normal(size.slice_len, N, H), normal(size.slice_len, N, Hv)
    q_BLNH[:, ::16] *= view.factor
    return q_BLNH, stored(normal(view.num_keys, G, H)), stored(normal(view.num_keys, G, Hv)), dout_BLNH


def _run(kernel: AttentionKernel, tensors: Sequence[Tensor], view: View) -> tuple[Tensor, ...]:
    """out, LSE, dq, dk, dv; all but the LSE in the dtype of q."""
    q, k, v, dout = tensors
    scale = q.shape[-1] ** -0.5
    out, lse = kernel.forward(q, k, v, causal=view.causal, scale=scale, mask=view.mask)
    out = out.to(q.dtype)
    grads = kernel.backward(dout, q, k, v, out, lse, causal=view.causal, scale=scale, mask=view.mask)
    return out, lse, *(grad.to(q.dtype) for grad in grads)


def _sliced_errors(
    size: Size, dims: tuple[int, int], *, kernel: str, packed: bool, name: str, device: torch.device
) -> Iterator[Figure]:
    (N, G), (H, Hv) = size.heads[0], dims
    tensors = random_qkv_and_dout(
        seq_len=size.seq_len, num_heads=N, num_kv_heads=G, head_dim=H, value_head_dim=Hv, dtype=DTYPE, device=device
    )
    positions_BS = packed_positions(1, size.seq_len, device=device) if packed else None
    doubles = [x.double() for x in tensors]
    want = AttentionCase(doubles, kernel="reference", positions_BS=positions_BS).results(1)
    case = AttentionCase(tensors, kernel=kernel, positions_BS=positions_BS)
    whole = list(map(relative_error, case.results(1), want))
    what = [each for each in NAMES if each != "LSE"]
    for each, error in zip(what, whole, strict=True):
        yield Figure(PART, f"{kernel}, error in one piece: {name} {each}", error, "", MAX_ERROR)
    for num_slices in size.num_slices:
        sliced = map(relative_error, case.results(num_slices), want)
        for each, error, whole_error in zip(what, sliced, whole, strict=True):
            title = f"{kernel}, error in slices over that in one piece: {name} n={num_slices} {each}"
            yield Figure(PART, title, error / whole_error, "x", MAX_SLICED_OVER_WHOLE)
