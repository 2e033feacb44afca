"""Documents cut by slices, against attention of each document by itself."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from slimpipe.attention.kernels.reference import ReferenceKernel
from slimpipe.attention.kernels.torch_cpu_flash import TorchCpuFlashKernel
from slimpipe.attention.mask import Block, Documents

KERNELS = [ReferenceKernel(), TorchCpuFlashKernel()]


def positions_of(*rows):
    """Positions of rows given as document lengths."""
    return torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in rows])


def past_mask(documents, index, slots):
    """What a slice sees of its past, one slot of the view after the other."""
    L = documents.slice_len
    return documents.part_mask(index, [(held * L, (held + 1) * L) for held in slots])


def per_document(q, k, v, dout, rows, scale):
    """Every document on its own through PyTorch's attention, with gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    outs = []
    for row, lengths in enumerate(rows):
        documents = zip(*(leaf[row].split(list(lengths)) for leaf in leaves))
        attended = [
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1) for x in one), is_causal=True, scale=scale, enable_gqa=True
            )
            for one in documents
        ]
        outs.append(torch.cat(attended, dim=1).transpose(0, 1))
    out = torch.stack(outs)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def worst_error(sliced, kernel, rows, slice_len, orders):
    """Largest relative error of output, dQ, dK and dV."""
    S, generator = sum(rows[0]), torch.Generator().manual_seed(1)
    q, k, v, dout = (
        torch.randn(len(rows), S, heads, 4, generator=generator, dtype=torch.float64) for heads in (2, 1, 1, 2)
    )
    documents = Documents.from_positions(positions_of(*rows), slice_len=slice_len)
    got = sliced(kernel, q, k, v, dout, documents, orders, 0.5)
    pairs = zip(got, per_document(q, k, v, dout, rows, 0.5), strict=True)
    # One-token documents have dQ = dK = 0: the scale of the gradients is that of dout.
    return max(((mine - truth).norm() / max(truth.norm(), dout.norm())).item() for mine, truth in pairs)


# With slices of 4 tokens: boundaries inside slices, at their edges and beside them, documents longer than slices.
LAYOUTS = {
    "one document": [(16,)],
    "inside": [(6, 10)],
    "at edges": [(4, 8, 4)],
    "across edges": [(3, 2, 6, 5)],
    "one token each": [(1,) * 16],
    "many in one slice": [(5, 1, 1, 9)],
    "two rows, one of them whole": [(16,), (6, 10)],
    "two rows, boundaries apart": [(7, 9), (3, 6, 7)],
    "two rows, boundaries alike": [(7, 9), (7, 9)],
    "two rows, a past and none": [(9, 7), (8, 8)],
    "four rows": [(16,), (16,), (5, 11), (16,)],
}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(
    "orders", [((), (0,), (0, 1), (0, 1, 2)), ((), (0,), (1, 0), (1, 0, 2)), ((), (0,), (1, 0), (2, 1, 0))]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_equal_documents_on_their_own(kernel, orders, layout, sliced):
    assert worst_error(sliced, kernel, LAYOUTS[layout], 4, orders) <= 1e-12


def rows_of(S):
    bounds = st.sets(st.integers(1, S - 1), max_size=5).map(lambda inner: sorted({0, S} | inner))
    return bounds.map(lambda cuts: tuple(b - a for a, b in pairwise(cuts)))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_documents_in_any_slot_order(kernel, sliced, data):
    slice_len, num_slices = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    S = slice_len * num_slices
    rows = data.draw(st.lists(rows_of(S) if S > 1 else st.just((1,)), min_size=1, max_size=3))
    orders = [data.draw(st.permutations(range(index))) for index in range(num_slices)]
    assert worst_error(sliced, kernel, rows, slice_len, orders) <= 1e-12


def test_nothing_to_mask_is_none():
    for documents in (
        Documents.from_positions(None, slice_len=4),
        Documents.from_positions(positions_of((12,), (12,)), slice_len=4),
    ):
        assert [documents.own_mask(index) for index in range(3)] == [None] * 3
        assert [past_mask(documents, index, tuple(range(index))) for index in (1, 2)] == [None] * 2


def test_a_past_of_other_documents_only_is_skipped():
    documents = Documents.from_positions(positions_of((4, 8), (2, 2, 8)), slice_len=4)
    assert documents.own_mask(1) is None and past_mask(documents, 1, (0,)).sees_nothing
    assert past_mask(documents, 2, (1, 0)).blocks == (Block(slice(0, 2), slice(0, 4), slice(0, 4)),)


def test_past_is_cropped_to_the_document_that_reaches_into_the_slice():
    documents = Documents.from_positions(positions_of((2, 11, 3)), slice_len=4)
    past = past_mask(documents, 3, (0, 1, 2))
    assert past.blocks == (Block(slice(0, 1), slice(0, 1), slice(2, 12)),)
    assert [block.keys for block in past_mask(documents, 3, (1, 0, 2)).blocks] == [slice(0, 4), slice(6, 12)]


def test_dense_mask_and_segments_are_made_once():
    mask = Documents.from_positions(positions_of((1, 3), (4,)), slice_len=4).own_mask(0)
    device = torch.device("cpu")
    assert mask.dense_BLK(device) is mask.dense_BLK(device)
    assert mask.dense_BLK(device)[0].tolist() == [[True] + [False] * 3] + [[False] + [True] * 3] * 3
    cu_seqlens, longest = mask.cu_seqlens(device)
    assert cu_seqlens.tolist() == [0, 1, 4, 8] and cu_seqlens.dtype == torch.int32 and longest == 4
    assert mask.cu_seqlens(device)[0] is cu_seqlens


@pytest.mark.parametrize(
    "row, said",
    [
        ([0, 1, 3, 4], r"positions\[1, 2\] = 3 .*nearest legal value: 2"),
        ([-1, 0, 1, 2], r"positions\[1, 0\] = -1 .*nearest legal value: 0"),
        ([0, 1, -1, 0], r"positions\[1, 2\] = -1 .*nearest legal value: 0"),
        ([0, 1, 1, 2], r"positions\[1, 2\] = 1 .*batch row 1, index 2"),
    ],
)
def test_inconsistent_positions_are_refused(row, said):
    with pytest.raises(ValueError, match=said):
        Documents.from_positions(torch.tensor([[0, 1, 2, 3], row]), slice_len=2)


def test_positions_of_a_wrong_kind_are_refused():
    with pytest.raises(TypeError, match=r"torch\.float32; they must be integers"):
        Documents.from_positions(torch.zeros(1, 4), slice_len=2)
    with pytest.raises(ValueError, match=r"shape \(4,\); it must be \(batch, sequence\)"):
        Documents.from_positions(torch.arange(4), slice_len=2)
    assert Documents.from_positions(torch.arange(4, dtype=torch.int32)[None], slice_len=2).starts == ()


def test_a_sequence_may_start_in_the_middle_of_a_document():
    documents = Documents.from_positions(torch.tensor([[7, 8, 9, 10, 0, 1]]), slice_len=3)
    assert documents.starts == ((0, 4),)
