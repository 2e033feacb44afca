"""Sliding windows: what masks let a query see, token by token, and what kernels make of it."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimpipe import SliceAttention, build_program
from slimpipe.attention.context import SliceContext, StageStore
from slimpipe.attention.kernels.reference import ReferenceKernel
from slimpipe.attention.kernels.torch_cpu_flash import TorchCpuFlashKernel
from slimpipe.attention.mask import Block, Documents, Mask
from slimpipe.program import Unit, plan_slots
from slimpipe.program.runs import join
from tests.model import DenseAttention

CPU = torch.device("cpu")
KERNELS = [ReferenceKernel(), TorchCpuFlashKernel()]


def visible_BLK(mask, num_rows, queries, keys, *, causal):
    """What a mask lets tokens see of tokens; where it is None, everything, or with ``causal`` what came before."""
    if mask is None:
        dense_BLK = torch.ones(num_rows, len(queries), len(keys), dtype=torch.bool)
    else:
        dense_BLK = mask.dense_BLK(CPU)
    return dense_BLK.tril() if causal else dense_BLK


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_masks_show_each_query_its_window_of_its_document(data):
    slice_len, num_slices = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    S, num_rows = slice_len * num_slices, data.draw(st.integers(1, 3))
    window = data.draw(st.integers(1, S + 2))
    starts = data.draw(
        st.just(())
        | st.lists(
            st.sets(st.integers(1, S), max_size=4).map(lambda cuts: (0, *sorted(cuts - {S}))),
            min_size=num_rows,
            max_size=num_rows,
        ).map(tuple)
    )
    documents = Documents(starts, slice_len)
    index = data.draw(st.integers(0, num_slices - 1))
    queries = range(index * slice_len, (index + 1) * slice_len)

    own = documents.own_mask(index, window=window, num_rows=num_rows)
    got = [(list(queries), visible_BLK(own, num_rows, queries, queries, causal=True))]
    if index:
        slots = data.draw(st.permutations(range(index)))
        layout = [(held * slice_len, (held + 1) * slice_len) for held in slots]
        tokens = [token for start, stop in layout for token in range(start, stop)]
        moved = data.draw(st.sets(st.integers(0, index * slice_len - 1)))
        here = join((token, token + 1) for token in range(index * slice_len) if token not in moved)
        there = join((token, token + 1) for token in moved)
        settings = {"num_rows": num_rows, "window": window}
        past = documents.part_mask(index, layout, rows=here, **settings)
        got.append((tokens, visible_BLK(past, num_rows, queries, tokens, causal=False)))
        if there:
            part = documents.part_mask(index, there, **settings)
            got.append((sorted(moved), visible_BLK(part, num_rows, queries, sorted(moved), causal=False)))

    for row in range(num_rows):
        row_starts = starts[row] if starts else (0,)
        for number, query in enumerate(queries):
            oldest = max(query - window + 1, max(start for start in row_starts if start <= query))
            seen = [token for tokens, seen in got for token, sees in zip(tokens, seen[row, number]) if sees]
            assert sorted(seen) == list(range(oldest, query + 1))  # each key once


@settings(max_examples=100, deadline=None)
@given(slice_len=st.integers(1, 6), num_slices=st.integers(2, 5), window=st.integers(1, 32))
def test_every_query_of_a_block_sees_a_key(slice_len, num_slices, window):
    layout = [(held * slice_len, (held + 1) * slice_len) for held in range(num_slices - 1)]
    mask = Documents((), slice_len).part_mask(num_slices - 1, layout, num_rows=1, window=window)
    for block in () if mask is None else mask.blocks:
        alone = Mask(mask.shape_BLK, (block,)).dense_BLK(CPU)[block.rows, block.queries, block.keys]
        assert alone.any(-1).all()
        assert (block.left is None) == bool(alone.all())


def test_a_window_takes_one_call_per_part_in_slice_order():
    documents = Documents((), slice_len=4)
    past = documents.part_mask(3, [(0, 4), (4, 8), (8, 12)], num_rows=2, window=6)
    assert past.blocks == (Block(slice(0, 2), slice(0, 4), slice(7, 12), left=1),)
    own = documents.own_mask(3, window=3, num_rows=2)
    assert own.blocks == (Block(slice(0, 2), slice(0, 4), slice(0, 4), left=2),) and own.is_one_band
    assert documents.own_mask(3, window=4, num_rows=2) is None, "a window as long as the slice hides none of its keys"
    assert documents.part_mask(3, [(8, 12)], num_rows=2, window=1).sees_nothing


def test_a_past_out_of_sight_is_left_alone():
    plan = plan_slots(build_program(1, 4, 1, 1), [0])
    store = StageStore(plan, {})

    def seen(starts, window):
        context = SliceContext(Unit(0, 0, 3), store, Documents(starts, slice_len=4), keep_output=False)
        return context.seen(1, window=window)[1]

    assert seen((), None) == ((0, 3), None)
    slots, mask = seen((), 3)
    assert slots == (2, 3) and mask.blocks == (Block(slice(0, 1), slice(0, 2), slice(2, 4), left=0),)
    slots, mask = seen(((0, 6),), None)
    assert slots == (1, 3) and mask.blocks == (Block(slice(0, 1), slice(0, 4), slice(2, 8)),)
    assert seen(((0, 12),), None) is None and seen((), 1) is None


def dense(q, k, v, starts, window):
    index = torch.arange(q.shape[1])
    first = torch.zeros(len(q), len(index), dtype=torch.int64)
    for row, of_row in enumerate(starts):
        for start, stop in pairwise((*of_row, len(index))):
            first[row, start:stop] = start
    return DenseAttention(window)(q, k, v, positions=index - first)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("starts", [(), ((0, 3, 4, 11), (0, 8, 13))])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 7, 16])
def test_slices_equal_dense_attention(kernel, starts, window, sliced):
    generator = torch.Generator().manual_seed(3)
    q, k, v, dout = (torch.randn(2, 16, N, 4, generator=generator, dtype=torch.float64) for N in (4, 2, 2, 4))
    orders = (), (0,), (1, 0), (1, 0, 2)
    got = sliced(kernel, q, k, v, dout, Documents(starts, slice_len=4), orders, 0.5, window=window)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = dense(*leaves, starts, window)
    for mine, truth in zip(got, (out.detach(), *torch.autograd.grad(out, leaves, dout)), strict=True):
        assert (mine - truth).norm() <= 1e-12 * max(truth.norm(), dout.norm())


@pytest.mark.parametrize("window", [1, 5, 12, 40])
def test_outside_a_schedule(window):
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(2, 12, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    for starts in ((), ((0, 5), (0, 2, 9))):
        masks = Documents(starts, slice_len=12) if starts else None
        got = SliceAttention(window=window)(q, k, v, attention_masks=masks)
        torch.testing.assert_close(got, dense(q, k, v, starts, window), rtol=1e-12, atol=1e-12)


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"SliceAttention\(window=0\).*nearest legal value: 1"):
        SliceAttention(window=0)


@pytest.mark.parametrize("window", [True, 3.5, float("nan"), "128", torch.tensor(4)])
def test_a_window_of_another_type_is_refused(window):
    with pytest.raises(TypeError, match="it must be an int"):
        SliceAttention(window=window)


@pytest.mark.parametrize("shape", [(1, 6), (2, 5), (2, 7)])
def test_positions_of_another_shape_are_refused(shape):
    q = torch.zeros(2, 6, 2, 4)
    with pytest.raises(ValueError, match=r"nearest legal shape: \(2, 6\)"):
        SliceAttention()(q, q, q, positions=torch.arange(shape[1]).expand(shape))
