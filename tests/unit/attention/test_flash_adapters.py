"""The calls of the CUDA kernels, made on the CPU: stand-ins check every argument as the libraries do, and compute."""

import sys
import types

import pytest
import torch

from slimpipe.attention.kernels.flash_attn import FlashAttnKernel
from slimpipe.attention.kernels.reference import ReferenceKernel
from slimpipe.attention.kernels.torch_cuda_flash import TorchCudaFlashKernel
from slimpipe.attention.mask import Documents

REFERENCE = ReferenceKernel()


def segments(cu_seqlens, longest, *tensors):
    """Checks the segments and cuts the tensors into them, with a batch dimension of 1."""
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.is_contiguous() and cu_seqlens[0] == 0
    lengths = cu_seqlens.diff().tolist()
    assert sum(lengths) == len(tensors[0]) and max(lengths) == longest and min(lengths) > 0
    return zip(*(tensor[None].split(lengths, dim=1) for tensor in tensors))


def attend(q, k, v, cu_seqlens, longest, causal, scale):
    """What both libraries compute: dense (B, L, N, H) with LSE (B, N, L), or segments (T, N, H) with LSE (N, T)."""
    assert type(causal) is bool and type(scale) is float
    assert all(x.stride(-1) == 1 for x in (q, k, v)), "the head dim must be contiguous"
    if cu_seqlens is None:
        assert q.dim() == 4
        out, lse = REFERENCE.forward(q, k, v, causal=causal, scale=scale)
        return out, lse.contiguous()
    assert q.dim() == 3
    parts = [REFERENCE.forward(*one, causal=causal, scale=scale) for one in segments(cu_seqlens, longest, q, k, v)]
    return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], dim=-1)


def attend_backward(dout, q, k, v, out, lse, cu_seqlens, longest, causal, scale):
    assert type(causal) is bool and type(scale) is float
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    assert lse.is_contiguous(), "the LSE is read without strides"
    if cu_seqlens is None:
        assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        return REFERENCE.backward(dout, q, k, v, out, lse, causal=causal, scale=scale)
    assert lse.shape == (q.shape[1], q.shape[0])
    cut = segments(cu_seqlens, longest, dout, q, k, v, out, lse.T)
    parts = [REFERENCE.backward(*one, lse_TN.transpose(1, 2), causal=causal, scale=scale) for *one, lse_TN in cut]
    return tuple(torch.cat([part[index][0] for part in parts]) for index in range(3))


def torch_forward(q, k, v, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale):
    # The real op on meta tensors checks the call against its schema.
    meta = [x.to("meta") for x in (q, k, v)], [x if x is None else x.to("meta") for x in (cum_q, cum_k)]
    limits = max_q, max_k, dropout_p, is_causal, return_debug_mask
    shapes = torch.ops.aten._flash_attention_forward.default(*meta[0], *meta[1], *limits, scale=scale)
    assert cum_q is cum_k and dropout_p == 0.0 and return_debug_mask is False
    assert (max_q, max_k) == (q.shape[1], k.shape[1]) if cum_q is None else max_q == max_k
    out, lse = attend(q, k, v, cum_q, max_q, is_causal, scale)
    assert out.shape == shapes[0].shape and lse.shape == shapes[1].shape
    return out, lse, torch.empty(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def torch_backward(*args, scale):
    meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in args]
    shapes = torch.ops.aten._flash_attention_backward.default(*meta, scale=scale)
    dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, rng_state, unused = args
    assert cum_q is cum_k and dropout_p == 0.0
    assert (max_q, max_k) == (q.shape[1], k.shape[1]) if cum_q is None else max_q == max_k
    assert rng_state.dtype == unused.dtype == torch.uint64
    grads = attend_backward(dout, q, k, v, out, lse, cum_q, max_q, is_causal, scale)
    assert [grad.shape for grad in grads] == [shape.shape for shape in shapes]
    return grads


def plain(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes):
    assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0.0, -1, -1, 0.0, None)


# The signatures of flash_attn.flash_attn_interface since 2.7.
def _flash_attn_forward(
    q,
    k,
    v,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    return_softmax,
):
    plain(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    assert return_softmax is False
    return *attend(q, k, v, None, None, causal, softmax_scale), torch.empty(0), torch.empty(2)


def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    block_table=None, leftpad_k=None, seqused_k=None,
):  # fmt: skip
    plain(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k and return_softmax is False
    return *attend(q, k, v, cu_seqlens_q, max_seqlen_q, causal, softmax_scale), torch.empty(0), torch.empty(2)


def _fill(into, grads):
    for place, grad in zip(into, grads, strict=True):
        assert place.is_contiguous()
        place.copy_(grad)
    return torch.empty(0)


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
    softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    plain(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    assert deterministic is False
    return _fill((dq, dk, dv), attend_backward(dout, q, k, v, out, softmax_lse, None, None, causal, softmax_scale))


def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    zero_tensors=False,
):  # fmt: skip
    plain(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k and deterministic is False
    return _fill(
        (dq, dk, dv),
        attend_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q, max_seqlen_q, causal, softmax_scale),
    )


FLASH_ATTN = types.SimpleNamespace(
    _flash_attn_forward=_flash_attn_forward,
    _flash_attn_backward=_flash_attn_backward,
    _flash_attn_varlen_forward=_flash_attn_varlen_forward,
    _flash_attn_varlen_backward=_flash_attn_varlen_backward,
)
ADAPTERS = [
    TorchCudaFlashKernel(forward_op=torch_forward, backward_op=torch_backward),
    FlashAttnKernel(functions=FLASH_ATTN),
]
LAYOUTS = {"one document": ((0,), (0,)), "documents": ((0, 3, 4, 11), (0, 8, 13)), "alike": ((0, 6), (0, 6))}


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_rows", [1, 2])
def test_adapter_equals_reference(adapter, layout, num_rows, sliced):
    generator = torch.Generator().manual_seed(2)
    q, k, v, dout = (
        torch.randn(num_rows, 16, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4)
    )
    documents = Documents(LAYOUTS[layout][:num_rows], slice_len=4)
    orders = (), (0,), (1, 0), (1, 0, 2)
    got = sliced(adapter, q, k, v, dout, documents, orders, 0.5)
    want = sliced(REFERENCE, q, k, v, dout, documents, orders, 0.5)
    for mine, truth in zip(got, want, strict=True):
        assert (mine - truth).norm() <= 1e-13 * truth.norm()


def test_documents_of_one_row_in_slice_order_take_one_call_per_part():
    calls = []

    def counting(*args, **kwargs):
        calls.append(args[0].shape)
        return torch_forward(*args, **kwargs)

    kernel = TorchCudaFlashKernel(forward_op=counting)
    q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 8, 2, 8)
    documents = Documents(((0, 3, 10),), slice_len=4)
    kernel.forward(q, q, q, causal=True, scale=0.5, mask=documents.own_mask(2))
    kernel.forward(q, k, k, causal=False, scale=0.5, mask=documents.past_mask(2, (0, 1)))
    assert calls == [(4, 2, 8), (1, 2, 2, 8)]


class _OnGpu:
    """As much of a tensor as a refusal looks at."""

    def __init__(self, head_dim, dtype=torch.bfloat16):
        self.device, self.dtype, self.shape = torch.device("cuda", 0), dtype, (1, 4, 2, head_dim)


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(
    "q, v, said",
    [
        (_OnGpu(64, torch.float32), _OnGpu(64, torch.float32), "needs torch.bfloat16 or torch.float16"),
        (_OnGpu(192), _OnGpu(128), "q and k have 192, v has 128"),
        (_OnGpu(60), _OnGpu(60), "it is 60, nearest legal value: 64"),
        (_OnGpu(512), _OnGpu(512), "nearest legal value: 256"),
    ],
)
def test_refusals(adapter, q, v, said):
    assert said in adapter.refusal(q, q, v)


def test_flash_attn_without_the_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", None)
    assert "pip install 'slimpipe[flash]'" in FlashAttnKernel().refusal(_OnGpu(64), _OnGpu(64), _OnGpu(64))


@pytest.mark.parametrize("version, fits", [("2.6.3", False), ("2.7.0", True), ("2.8.3.post1", True), ("3.0.0", False)])
def test_flash_attn_versions(version, fits, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    package = types.ModuleType("flash_attn")
    package.__version__ = version
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    reason = FlashAttnKernel(functions=FLASH_ATTN).refusal(_OnGpu(64), _OnGpu(64), _OnGpu(64))
    assert (reason is None) == fits and (fits or f"{version} is installed" in reason)
