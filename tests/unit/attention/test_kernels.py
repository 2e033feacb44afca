"""CPU kernels against dense softmax by autograd; choosing a kernel; merging."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from slimpipe.attention.kernels import choose_kernel, merge
from slimpipe.attention.kernels.reference import ReferenceKernel
from slimpipe.attention.kernels.torch_cpu_flash import TorchCpuFlashKernel
from slimpipe.attention.mask import Block, Documents, Mask

CPU_KERNELS = [ReferenceKernel(), TorchCpuFlashKernel()]
INF = float("inf")
SCALE = 0.3
each_kernel = pytest.mark.parametrize("kernel", CPU_KERNELS, ids=lambda kernel: kernel.name)


def tensors(*, B=2, L=12, K=12, N=4, G=2, H=8, Hv=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = (B, L, N, H), (B, K, G, H), (B, K, G, Hv), (B, L, N, Hv)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def dense_with_grads(dense, q, k, v, dout, visible_BLK):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out, lse = dense(*leaves, visible_BLK, SCALE)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)


def assert_close(got, want, relative=1e-12):
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        empty = b == -INF
        assert torch.equal(a == -INF, empty)
        a, b = a.masked_fill(empty, 0), b.masked_fill(empty, 0)
        assert (a - b).norm() <= relative * b.norm() + 1e-300


@each_kernel
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("G", [4, 2, 1])
def test_equals_dense_attention(kernel, causal, G, dense):
    q, k, v, dout = tensors(G=G, K=12 if causal else 20)
    visible = torch.ones(2, 12, k.shape[1], dtype=torch.bool)
    visible = visible.tril() if causal else visible
    out, lse = kernel.forward(q, k, v, causal=causal, scale=SCALE)
    grads = kernel.backward(dout, q, k, v, out, lse, causal=causal, scale=SCALE)
    assert_close((out, lse, *grads), dense_with_grads(dense, q, k, v, dout, visible))


@each_kernel
def test_long_enough_for_every_tile_of_the_kernel(kernel, dense):
    q, k, v, dout = tensors(B=1, L=800, K=1100, N=2, G=1)
    out, lse = kernel.forward(q, k, v, causal=False, scale=SCALE)
    grads = kernel.backward(dout, q, k, v, out, lse, causal=False, scale=SCALE)
    visible = torch.ones(1, 800, 1100, dtype=torch.bool)
    assert_close((out, lse, *grads), dense_with_grads(dense, q, k, v, dout, visible))


@each_kernel
def test_mask_with_rows_that_see_nothing_and_rows_that_see_two_blocks(kernel, dense):
    q, k, v, dout = tensors(K=20)
    blocks = (
        Block(slice(0, 2), slice(0, 7), slice(3, 9)),
        Block(slice(0, 1), slice(2, 9), slice(12, 20)),
    )
    mask = Mask((2, 12, 20), blocks)
    visible = mask.dense_BLK(q.device)
    assert visible.sum() == 2 * 7 * 6 + 7 * 8
    out, lse = kernel.forward(q, k, v, causal=False, scale=SCALE, mask=mask)
    grads = kernel.backward(dout, q, k, v, out, lse, causal=False, scale=SCALE, mask=mask)
    want = dense_with_grads(dense, q, k, v, dout.masked_fill(~visible.any(-1)[..., None, None], 0), visible)
    assert (lse[0, :, 9:] == -INF).all() and (out[1, 7:] == 0).all() and (grads[0][1, 7:] == 0).all()
    assert_close((out, lse, *grads), want)


@each_kernel
def test_mask_without_blocks_sees_nothing(kernel):
    q, k, v, dout = tensors()
    mask = Mask((2, 12, 12), ())
    out, lse = kernel.forward(q, k, v, causal=False, scale=SCALE, mask=mask)
    grads = kernel.backward(dout, q, k, v, out, lse, causal=False, scale=SCALE, mask=mask)
    assert mask.sees_nothing and (out == 0).all() and (lse == -INF).all()
    assert all((grad == 0).all() for grad in grads)


@each_kernel
@pytest.mark.parametrize("slice_len", [1, 3, 12, 24])
@pytest.mark.parametrize("G", [4, 1])
def test_parts_merged_equal_the_whole(kernel, slice_len, G, dense, sliced):
    q, k, v, dout = tensors(L=24, K=24, G=G)
    orders = [tuple(range(index)) for index in range(24 // slice_len)]
    got = sliced(kernel, q, k, v, dout, Documents((), slice_len), orders, SCALE)
    visible = torch.ones(2, 24, 24, dtype=torch.bool).tril()
    out, _, *grads = dense_with_grads(dense, q, k, v, dout, visible)
    assert_close(got, (out, *grads))


def test_reference_takes_another_head_dim_for_v(dense):
    q, k, v, dout = tensors(Hv=5)
    out, lse = ReferenceKernel().forward(q, k, v, causal=True, scale=SCALE)
    grads = ReferenceKernel().backward(dout, q, k, v, out, lse, causal=True, scale=SCALE)
    visible = torch.ones(2, 12, 12, dtype=torch.bool).tril()
    assert_close((out, lse, *grads), dense_with_grads(dense, q, k, v, dout, visible))


class _CopyingOps(TorchDispatchMode):
    """Collects the ops that are neither views nor attention."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if not name.startswith(("aten::transpose", "aten::slice", "aten::_scaled_dot_product_flash_attention_for_cpu")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_cpu_flash_reads_strided_views_in_place():
    kernel = TorchCpuFlashKernel()
    q, k, v, dout = tensors(K=20)
    buffers = [torch.full((2, 50, 2, 8), float("nan"), dtype=torch.float64) for _ in range(2)]
    k_view, v_view = (buffer[:, 17:37].copy_(x) for buffer, x in zip(buffers, (k, v)))
    out, lse = kernel.forward(q, k, v, causal=False, scale=SCALE)
    grads = kernel.backward(dout, q, k, v, out, lse, causal=False, scale=SCALE)
    with _CopyingOps() as copying:
        out_of_view, lse_of_view = kernel.forward(q, k_view, v_view, causal=False, scale=SCALE)
        grads_of_view = kernel.backward(dout, q, k_view, v_view, out, lse, causal=False, scale=SCALE)
    assert copying.names == []
    assert all(map(torch.equal, (out_of_view, lse_of_view, *grads_of_view), (out, lse, *grads)))


def test_cpu_flash_takes_any_strides():
    kernel = TorchCpuFlashKernel()
    q, k, v, dout = tensors()
    odd = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]
    assert all(x.stride(-1) != 1 for x in odd)
    out, lse = kernel.forward(q, k, v, causal=True, scale=SCALE)
    assert_close(kernel.forward(*odd, causal=True, scale=SCALE), (out, lse))
    expanded = torch.ones((), dtype=q.dtype).expand(dout.shape)
    want = kernel.backward(expanded.contiguous(), q, k, v, out, lse, causal=True, scale=SCALE)
    assert_close(kernel.backward(expanded, *odd, out, lse.contiguous(), causal=True, scale=SCALE), want)


@each_kernel
def test_bfloat16_is_as_exact_as_dense_bfloat16(kernel, sliced, relative_error):
    q, k, v, dout = tensors(B=1, L=256, K=256, H=32, Hv=32, dtype=torch.bfloat16)

    def whole(dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        by_head = [x.transpose(1, 2) for x in leaves]
        out = F.scaled_dot_product_attention(*by_head, is_causal=True, scale=SCALE, enable_gqa=True).transpose(1, 2)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]

    exact, dense_bfloat16 = whole(torch.float64), whole(torch.bfloat16)
    orders = [tuple(range(index)) for index in range(4)]
    got = sliced(kernel, q, k, v, dout, Documents((), 64), orders, SCALE)
    for mine, theirs, truth in zip(got, dense_bfloat16, exact, strict=True):
        # As the caller does, cast once.
        assert relative_error(mine.to(torch.bfloat16), truth) <= 1.5 * relative_error(theirs, truth)


@each_kernel
def test_low_precision_accumulates_in_float32(kernel):
    q, k, v, _ = tensors(dtype=torch.bfloat16)
    _, lse = kernel.forward(q, k, v, causal=True, scale=SCALE)
    out, merged_lse = merge(*kernel.forward(q, k, v, causal=False, scale=SCALE), torch.zeros_like(q), lse)
    assert lse.dtype == merged_lse.dtype == out.dtype == torch.float32


def test_merge_of_empty_parts():
    part, nothing = torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3, 4)
    seen, unseen = torch.full((1, 3, 2), 500.0), torch.full((1, 3, 2), -INF)
    for got in (merge(part, seen, nothing, unseen), merge(nothing, unseen, part, seen)):
        assert torch.equal(got[0], part) and torch.equal(got[1], seen)
    out, lse = merge(nothing, unseen, nothing, unseen)
    assert (out == 0).all() and (lse == -INF).all()


def test_merge_neither_overflows_nor_changes_its_arguments():
    parts = torch.ones(1, 1, 1, 4), torch.full((1, 1, 1), 3e4), torch.zeros(1, 1, 1, 4), torch.full((1, 1, 1), 3e4)
    before = [x.clone() for x in parts]
    out, lse = merge(*parts)
    assert torch.equal(out, torch.full((1, 1, 1, 4), 0.5)) and lse.isfinite().all()
    assert all(map(torch.equal, parts, before))


def test_auto_chooses_the_fastest_that_serves():
    assert choose_kernel("auto", *tensors()[:3]).name == "torch_cpu_flash"
    assert choose_kernel("auto", *tensors(Hv=9)[:3]).name == "reference"


@pytest.mark.parametrize(
    "name, change, said",
    [
        ("torch_cpu_flash", dict(Hv=9), "v has 9; these tensors can be served by auto, 'reference'"),
        ("torch_cuda_flash", {}, "needs tensors on a GPU; these are on cpu; .*'torch_cpu_flash', 'reference'"),
        ("flash_attn", {}, "needs tensors on a GPU"),
        ("flash", {}, "nearest legal value: 'flash_attn'"),
    ],
)
def test_a_wrong_choice_is_refused_with_the_reason(name, change, said):
    with pytest.raises(ValueError, match=said):
        choose_kernel(name, *tensors(**change)[:3])


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(k=(2, 12, 3, 8), v=(2, 12, 3, 8)), "multiple of the K,V heads; nearest legal number: 2"),
        (dict(k=(2, 12, 2, 9)), "head dim of k must equal that of q, 8"),
        (dict(k=(2, 11, 2, 8)), "tokens and heads in k and v"),
        (dict(k=(1, 12, 2, 8), v=(1, 12, 2, 8)), "batch must be equal"),
        (dict(k=(2, 0, 2, 8), v=(2, 0, 2, 8)), "no dimension may be 0"),
        (dict(k=(2, 12, 16)), "4 dimensions"),
        (dict(k=(2, 13, 2, 8), v=(2, 13, 2, 8)), "as many keys as queries, 12"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, said):
    shapes = dict(q=(2, 12, 4, 8), k=(2, 12, 2, 8), v=(2, 12, 2, 8)) | change
    for kernel in CPU_KERNELS:
        with pytest.raises(ValueError, match=said):
            kernel.forward(*(torch.zeros(shape) for shape in shapes.values()), causal=True, scale=SCALE)


def test_mixed_dtypes_are_refused():
    q, k, v, _ = tensors()
    for dtypes in itertools.permutations((torch.float64, torch.float64, torch.float32)):
        with pytest.raises(ValueError, match="dtypes must be equal"):
            choose_kernel("auto", *(x.to(dtype) for x, dtype in zip((q, k, v), dtypes)))
