"""The calls of the CUDA kernels, made on the CPU: stand-ins check every argument as the libraries do, and compute."""

import pytest
import torch

from slimpipe.attention.kernels.flash_attn import FlashAttnKernel
from slimpipe.attention.kernels.flash_attn_4 import FlashAttn4Kernel
from slimpipe.attention.kernels.torch_cuda_flash import TorchCudaFlashKernel
from slimpipe.attention.mask import Documents
from tests.unit.attention.flash_stand_ins import (
    ADAPTERS,
    CUDNN,
    FLASH_ATTN_2,
    REFERENCE,
    limits_of_2,
    torch_backward,
    torch_forward,
)

SCALE = 0.5
LAYOUTS = {
    "one document": ((0,), (0,)),
    "documents": ((0, 3, 4, 11), (0, 8, 13)),
    "alike": ((0, 6), (0, 6)),
    "of one token": (tuple(range(16)), (0, 4, 5, 6, 7, 8)),
}
ORDERS = (), (0,), (1, 0), (1, 0, 2)
EXACT = 1e-13


def tensors(num_rows, *, head_dim=8, head_dim_v=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    shapes = ((heads, size) for heads, size in ((4, head_dim), (2, head_dim), (2, head_dim_v), (4, head_dim_v)))
    wide = (torch.randn(num_rows, 16, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.to(dtype) for x in wide]


def assert_equal_reference(kernel, sliced, *, layout, num_rows, window=None, **sizes):
    documents = Documents(LAYOUTS[layout][:num_rows] if layout != "one document" else (), slice_len=4)
    q, k, v, dout = tensors(num_rows, **sizes)
    got, want = (sliced(each, q, k, v, dout, documents, ORDERS, SCALE, window=window) for each in (kernel, REFERENCE))
    for mine, truth in zip(got, want, strict=True):
        assert (mine - truth).norm() <= EXACT * truth.norm()


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_rows", [1, 2])
def test_adapter_equals_reference(adapter, layout, num_rows, sliced):
    for window in (None, 1, 2, 3, 5, 6, 9, 20):
        assert_equal_reference(ADAPTERS[adapter], sliced, layout=layout, num_rows=num_rows, window=window)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_rows", [1, 2])
def test_cudnn_equals_reference(layout, num_rows, sliced):
    assert_equal_reference(CUDNN, sliced, layout=layout, num_rows=num_rows)


@pytest.mark.parametrize(
    "adapter", ["flash_attn_3 v2.8.3", "flash_attn_3 November 2025", "flash_attn_4", "torch_cudnn"]
)
def test_head_dims_of_multi_head_latent_attention(adapter, sliced):
    kernel = CUDNN if adapter == "torch_cudnn" else ADAPTERS[adapter]
    assert_equal_reference(kernel, sliced, layout="documents", num_rows=2, head_dim=192, head_dim_v=128)


@pytest.mark.parametrize("adapter", [*ADAPTERS, "torch_cudnn"])
def test_bfloat16_keeps_the_lse_in_float32(adapter):
    kernel = CUDNN if adapter == "torch_cudnn" else ADAPTERS[adapter]
    q, k, v, dout = tensors(1, dtype=torch.bfloat16)
    out, lse = kernel.forward(q, k, v, causal=True, scale=SCALE)
    grads = kernel.backward(dout, q, k, v, out, lse, causal=True, scale=SCALE)
    assert lse.dtype == torch.float32 and {x.dtype for x in (out, *grads)} == {torch.bfloat16}


@pytest.mark.parametrize("adapter", [*ADAPTERS, "torch_cudnn"])
def test_any_strides(adapter):
    kernel = CUDNN if adapter == "torch_cudnn" else ADAPTERS[adapter]
    q, k, v, dout = tensors(2)
    out, lse = kernel.forward(q, k, v, causal=True, scale=SCALE)
    want = out, lse, *kernel.backward(dout, q, k, v, out, lse, causal=True, scale=SCALE)
    q, k, v, dout, out = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v, dout, out))
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    again = kernel.forward(q, k, v, causal=True, scale=SCALE)
    got = *again, *kernel.backward(dout, q, k, v, out, lse, causal=True, scale=SCALE)
    assert all(map(torch.equal, got, want))


def recorded(calls):
    def forward(*args, **kwargs):
        calls.append((args[0].shape, kwargs["window_size_left"]))
        return torch_forward(*args, **kwargs)

    return TorchCudaFlashKernel(forward_op=forward, backward_op=torch_backward)


def test_documents_of_one_row_in_slice_order_take_one_call_per_part():
    calls = []
    kernel = recorded(calls)
    q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 8, 2, 8)
    documents = Documents(((0, 3, 10),), slice_len=4)
    kernel.forward(q, q, q, causal=True, scale=0.5, mask=documents.own_mask(2))
    kernel.forward(q, k, k, causal=False, scale=0.5, mask=documents.part_mask(2, [(0, 4), (4, 8)]))
    assert calls == [((4, 2, 8), None), ((1, 2, 2, 8), None)]


def test_a_window_takes_one_call_per_part_where_keys_are_not_few():
    calls = []
    kernel = recorded(calls)
    q, k = torch.randn(1, 8, 2, 8), torch.randn(1, 8, 2, 8)
    mask = Documents((), slice_len=8).part_mask(1, [(0, 8)], window=5, num_rows=1)
    kernel.forward(q, k, k, causal=False, scale=0.5, mask=mask)
    assert calls == [((1, 4, 2, 8), 0)]


def test_few_keys_under_a_window_are_not_lost_to_flash_attention_2():
    # A document begins 2 tokens before the slice: 6 of 8 queries see both keys, the next one sees one.
    assert limits_of_2(7, 2, False, 0, -1) == (0, 2), "the first query would see keys up to 0 + 2 - 7 + 2 only"
    calls = []
    q, k = torch.randn(1, 8, 2, 8), torch.randn(1, 8, 2, 8)
    mask = Documents(((0, 6),), slice_len=8).part_mask(1, [(0, 8)], window=8, num_rows=1)
    recorded(calls).forward(q, k, k, causal=False, scale=0.5, mask=mask)
    assert calls == [((1, 6, 2, 8), None), ((1, 1, 2, 8), 0)]
    newer = FlashAttn4Kernel(functions=ADAPTERS["flash_attn_4"]._functions)
    assert newer._cut(q, k[:, :2], False, 0) is None


def test_the_cut_off_the_window_is_exact_for_every_size():
    kernel = FlashAttnKernel(functions=FLASH_ATTN_2["2.8.3"])
    for L in range(1, 9):
        for K in range(1, 9):
            for left in range(max(0, K - L), K - 1):
                q, k, v, dout = (torch.randn(1, n, 1, 8, dtype=torch.float64) for n in (L, K, K, L))
                out, lse = REFERENCE._forward(q, k, v, False, left, SCALE)
                want = out, lse, *REFERENCE._backward(dout, q, k, v, out, lse, False, left, SCALE)
                got = (
                    *kernel._forward(q, k, v, False, left, SCALE),
                    *kernel._backward(dout, q, k, v, out, lse, False, left, SCALE),
                )
                assert all((mine - truth).norm() <= EXACT * truth.norm() + 1e-300 for mine, truth in zip(got, want))
