"""Kernels of one head dim, given values of a smaller one: exact, under every mask, in any slot order."""

import pytest
import torch

from slimpipe import SliceAttention
from slimpipe.attention.kernels import choose_kernel
from slimpipe.attention.kernels.choose import refusals
from slimpipe.attention.kernels.padded import PaddedValues, padded_where_needed
from slimpipe.attention.kernels.reference import ReferenceKernel
from slimpipe.attention.kernels.torch_cpu_flash import TorchCpuFlashKernel
from slimpipe.attention.mask import Documents

PADDED = PaddedValues(TorchCpuFlashKernel())
REFERENCE = ReferenceKernel()


def tensors(*, S=16, N=4, G=2, H=6, Hv=4, dtype=torch.float64):
    """q, k, v and the output's gradient."""
    generator = torch.Generator().manual_seed(5)
    shapes = (2, S, N, H), (2, S, G, H), (2, S, G, Hv), (2, S, N, Hv)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("orders", [((), (0,), (0, 1), (0, 1, 2)), ((), (0,), (1, 0), (1, 0, 2))])
@pytest.mark.parametrize("window", [None, 1, 5, 7])
@pytest.mark.parametrize("starts", [(), ((0, 3, 4, 11), (0, 8, 13))])
@pytest.mark.parametrize("G", [4, 2, 1])
def test_slices_equal_the_reference(orders, window, starts, G, sliced):
    q, k, v, dout = tensors(G=G)
    runs = [
        sliced(kernel, q, k, v, dout, Documents(starts, slice_len=4), orders, 0.4, window=window)
        for kernel in (PADDED, REFERENCE)
    ]
    for mine, truth in zip(*runs, strict=True):
        assert mine.shape == truth.shape
        assert (mine - truth).norm() <= 1e-13 * max(truth.norm(), dout.norm())


class _Counting(TorchCpuFlashKernel):
    """Serves a mask in one call of its own, as kernels with varlen do."""

    num_masked = 0

    def _masked_forward(self, *tensors_and_how):
        self.num_masked += 1
        return super()._masked_forward(*tensors_and_how)

    def _masked_backward(self, *tensors_and_how):
        self.num_masked += 1
        return super()._masked_backward(*tensors_and_how)


def test_masks_are_the_other_kernel_s():
    kernel, (q, k, v, dout) = _Counting(), tensors()
    mask = Documents(((0, 5), (0, 9)), slice_len=16).own_mask(0, window=None, num_rows=2)
    how = {"causal": True, "scale": 0.4, "mask": mask}
    out, lse = PaddedValues(kernel).forward(q, k, v, **how)
    PaddedValues(kernel).backward(dout, q, k, v, out, lse, **how)
    assert kernel.num_masked == 2
    assert out.is_contiguous(), "the output must not keep its zeros alive"


def test_chosen_where_only_padding_lets_the_kernel_serve():
    q, k, v, _ = tensors()
    for name in ("auto", "torch_cpu_flash"):
        kernel = choose_kernel(name, q, k, v)
        assert isinstance(kernel, PaddedValues) and kernel.name == "torch_cpu_flash"
    assert type(choose_kernel("auto", q, k, k)) is TorchCpuFlashKernel
    assert type(padded_where_needed(REFERENCE, q, k, v)) is ReferenceKernel
    assert refusals(q, k, v)["torch_cpu_flash"] is None


def test_values_wider_than_queries_are_left_to_others():
    q, k, v, _ = tensors(Hv=8)
    assert choose_kernel("auto", q, k, v).name == "reference"
    with pytest.raises(ValueError, match="torch_cpu_flash needs one head dim; q and k have 6, v has 8"):
        choose_kernel("torch_cpu_flash", q, k, v)
    assert "pads the head dim of V, 8, to that of Q, 6" in PADDED.refusal(q, k, v)


def test_reasons_that_padding_does_not_remove_stay():
    q, k, v, _ = tensors()
    assert "needs tensors on a GPU" in refusals(q, k, v)["torch_cuda_flash"]
    with pytest.raises(ValueError, match=r"torch_cpu_flash needs one of .*; these tensors are torch.float8"):
        choose_kernel("torch_cpu_flash", *(x.to(torch.float8_e5m2) for x in (q, k, v)))


def test_outside_a_schedule():
    q, k, v, dout = tensors()
    grads = []
    for name in ("auto", "reference"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = SliceAttention(kernel=name)(*leaves, enable_gqa=True)
        grads.append((out, *torch.autograd.grad(out, leaves, dout)))
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_low_precision_is_as_exact_as_one_head_dim(relative_error):
    q, k, v, dout = tensors(S=64, H=32, Hv=24, dtype=torch.bfloat16)
    exact = [x.double() for x in (q, k, v, dout)]
    out, lse = REFERENCE.forward(*exact[:3], causal=True, scale=0.2)
    truth = out, *REFERENCE.backward(exact[3], *exact[:3], out, lse, causal=True, scale=0.2)
    out, lse = PADDED.forward(q, k, v, causal=True, scale=0.2)
    mine = out, *PADDED.backward(dout, q, k, v, out, lse, causal=True, scale=0.2)
    for got, want in zip(mine, truth, strict=True):
        assert relative_error(got, want) < 0.01
