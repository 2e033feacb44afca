"""Stand-ins for the CUDA libraries: published signatures, checks of every argument, and results by the reference.

A signature is that of the library, all of it, so that a name or a default that does not exist fails here as it would
there. What an adapter has no use for must be left alone.

Shapes: B batch, L queries, K keys, T tokens laid end to end, N query heads, G K,V heads, H head dim.
"""

import inspect
import types

import torch

from slimpipe.attention.kernels.flash_attn import FlashAttnKernel
from slimpipe.attention.kernels.flash_attn_3 import FlashAttn3Kernel
from slimpipe.attention.kernels.flash_attn_4 import FlashAttn4Kernel
from slimpipe.attention.kernels.reference import ReferenceKernel
from slimpipe.attention.kernels.torch_cuda_flash import TorchCudaFlashKernel
from slimpipe.attention.kernels.torch_cudnn import TorchCudnnKernel
from slimpipe.dtypes import wide_dtype

REFERENCE = ReferenceKernel()


# How the libraries read a window (-1 and None: no limit): the limits they keep of L queries on K keys, counted from the
# last query's last key.


def limits_of_2(L, K, causal, left, right):
    left, right = (-1 if limit >= K else limit for limit in (left, right))
    right = 0 if causal else right
    if left >= 0 and right < 0:
        right = K  # not enough where L > K + 1
    return left if left >= 0 else None, right if right >= 0 else None


def limits_of_3(L, K, causal, left, right):
    left, right = -1 if left >= K - 1 else left, -1 if right >= L - 1 else right
    right = 0 if causal else right
    return left if left >= 0 else None, right if right >= 0 else None


def limits_of_4(L, K, causal, left, right):
    assert left is None or left >= 0
    return left, 0 if causal else right


def hidden_LK(L, K, left, right):
    from_diagonal_LK = torch.arange(K) - torch.arange(L)[:, None] - (K - L)
    hidden = torch.zeros(L, K, dtype=torch.bool)
    hidden |= from_diagonal_LK < -left if left is not None else False
    hidden |= from_diagonal_LK > right if right is not None else False
    assert not hidden.all(-1).any(), "a query sees nothing"
    return hidden


def check_tensors(*tensors):
    assert len({x.dtype for x in tensors}) == 1
    for x in tensors:
        assert x.stride(-1) == 1, "the head dim must be contiguous"
        assert all(stride % 8 == 0 for stride in x.stride()[:-1]) and x.storage_offset() % 8 == 0, "not aligned"


def check_segments(cu_seqlens, longest, num_tokens):
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.is_contiguous() and cu_seqlens[0] == 0
    lengths = cu_seqlens.diff().tolist()
    assert type(longest) is int and sum(lengths) == num_tokens and max(lengths) == longest and min(lengths) > 0
    return lengths


def attend(q, k, v, cu_seqlens, longest, causal, limits, scale):
    """Dense (B, L, N, H) with LSE (B, N, L), or segments (T, N, H) with LSE (N, T)."""
    assert type(causal) is bool and type(scale) is float
    check_tensors(q, k, v)
    if cu_seqlens is None:
        assert q.dim() == 4
        hidden = hidden_LK(q.shape[1], k.shape[1], *limits(q.shape[1], k.shape[1], causal))
        out, lse = REFERENCE._attend(q, k, v, hidden, scale)
        return out.to(q.dtype), lse.contiguous()
    assert q.dim() == 3 and causal
    lengths = check_segments(cu_seqlens, longest, len(q))
    parts = []
    for one in zip(*(x[None].split(lengths, dim=1) for x in (q, k, v)), strict=True):
        L = one[0].shape[1]
        parts.append(REFERENCE._attend(*one, hidden_LK(L, L, *limits(L, L, causal)), scale))
    return torch.cat([out[0] for out, _ in parts]).to(q.dtype), torch.cat([lse[0] for _, lse in parts], dim=-1)


def attend_backward(dout, q, k, v, out, lse, cu_seqlens, longest, causal, limits, scale):
    assert type(causal) is bool and type(scale) is float
    check_tensors(dout, q, k, v, out)
    assert lse.dtype == wide_dtype(q.dtype) and lse.isfinite().all()
    assert lse.is_contiguous(), "the LSE is read without strides"
    if cu_seqlens is None:
        assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        hidden = hidden_LK(q.shape[1], k.shape[1], *limits(q.shape[1], k.shape[1], causal))
        grads = REFERENCE._attend_backward(dout, q, k, v, out, lse, hidden, scale)
    else:
        assert lse.shape == (q.shape[1], q.shape[0]) and causal
        lengths = check_segments(cu_seqlens, longest, len(q))
        parts = []
        for *one, lse_TN in zip(*(x[None].split(lengths, dim=1) for x in (dout, q, k, v, out, lse.T)), strict=True):
            L = lse_TN.shape[1]
            hidden = hidden_LK(L, L, *limits(L, L, causal))
            parts.append(REFERENCE._attend_backward(*one, lse_TN.transpose(1, 2), hidden, scale))
        grads = (torch.cat([part[index][0] for part in parts]) for index in range(3))
    return tuple(grad.to(q.dtype) for grad in grads)


# PyTorch's ops: the real ones, on meta tensors, check the call against their schemas.


def on_meta(op, args, kwargs):
    return op(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in args), **kwargs)


def torch_forward(*args, **kwargs):
    shapes = on_meta(torch.ops.aten._flash_attention_forward.default, args, kwargs)
    q, k, v, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, return_debug_mask = args
    assert cum_q is cum_k and dropout_p == 0.0 and return_debug_mask is False
    assert (max_q, max_k) == (q.shape[1], k.shape[1]) if cum_q is None else max_q == max_k
    assert kwargs.keys() == {"scale", "window_size_left"}
    out, lse = attend(q, k, v, cum_q, max_q, is_causal, torch_limits(kwargs), kwargs["scale"])
    assert out.shape[:-1] == shapes[0].shape[:-1] and lse.shape == shapes[1].shape
    return out, lse, torch.empty(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def torch_backward(*args, **kwargs):
    shapes = on_meta(torch.ops.aten._flash_attention_backward.default, args, kwargs)
    dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, rng_state, unused = args
    assert cum_q is cum_k and dropout_p == 0.0
    assert (max_q, max_k) == (q.shape[1], k.shape[1]) if cum_q is None else max_q == max_k
    assert rng_state.dtype == unused.dtype == torch.uint64
    assert kwargs.keys() == {"scale", "window_size_left"}
    limits = torch_limits(kwargs)
    grads = attend_backward(dout, q, k, v, out, lse, cum_q, max_q, is_causal, limits, kwargs["scale"])
    assert [grad.shape for grad in grads] == [shape.shape for shape in shapes]
    return grads


def torch_limits(kwargs):
    left = kwargs["window_size_left"]
    return lambda L, K, causal: limits_of_2(L, K, causal, -1 if left is None else left, -1)


def cudnn_forward(*args, **kwargs):
    shapes = on_meta(torch.ops.aten._scaled_dot_product_cudnn_attention.default, args, kwargs)
    *by_head, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask = args
    q, k, v = (x.transpose(1, 2) for x in by_head)
    assert (attn_bias, compute_log_sumexp, dropout_p, return_debug_mask) == (None, True, 0.0, False)
    assert k.shape[1] > 1, "cuDNN has no attention to a single key"
    assert kwargs.keys() == {"scale"}
    out, lse = attend(q, k, v, None, None, is_causal, top_left, kwargs["scale"])
    out, lse = out.transpose(1, 2), lse[..., None]
    assert out.shape == shapes[0].shape and lse.shape == shapes[1].shape
    return out, lse, *[None] * 7


def cudnn_backward(*args, **kwargs):
    shapes = on_meta(torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default, args, kwargs)
    dout, q, k, v, out, lse, seed, offset, *rest, dropout_p, is_causal = args
    assert rest == [None, None, None, q.shape[2], k.shape[2]] and dropout_p == 0.0 and kwargs.keys() == {"scale"}
    assert seed.dtype == offset.dtype == torch.int64 and seed.shape == offset.shape == ()
    assert lse.shape == (*q.shape[:3], 1) and k.shape[2] > 1
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    assert dout.is_contiguous() and out.is_contiguous(), "a kept plan has other strides"
    grads = attend_backward(dout, q, k, v, out, lse[..., 0], None, None, is_causal, top_left, kwargs["scale"])
    grads = tuple(grad.transpose(1, 2) for grad in grads)
    assert [grad.shape for grad in grads] == [shape.shape for shape in shapes]
    return grads


def top_left(L, K, causal):
    assert L == K or not causal
    return None, 0 if causal else None


# Packages. (name, signature) as published, in the order of releases.

FORWARD_2 = (
    "q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, "
    "return_softmax"
)
VARLEN_FORWARD_2 = (  # num_splits is newer than 2.8.3
    "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, "
    "window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, "
    "block_table=None, leftpad_k=None, seqused_k=None"
)
BACKWARD_2 = (
    "dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, "
    "window_size_right, softcap, alibi_slopes, deterministic, rng_state=None"
)
VARLEN_BACKWARD_2 = (
    "dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, "
    "softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None"
)
# hopper/flash_attn_interface.py as tagged v2.7.3 and v2.8.3, and of November 2025.
_OPTIONAL_3 = "kv_batch_idx{0}, leftpad_k{0}, rotary_cos{0}, rotary_sin{0}, "
FORWARD_3 = {
    "January 2025": (
        "q, k, v, k_new, v_new, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, max_seqlen_q, "
        "max_seqlen_k, page_table, " + _OPTIONAL_3.format("") + "q_descale, k_descale, v_descale, softmax_scale, "
        "causal, window_size=(-1, -1), sink_token_length=0, softcap=0.0, rotary_interleaved=True, num_splits=1, "
        "pack_gqa=None, sm_margin=0"
    ),
    "v2.8.3": (
        "q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, "
        "max_seqlen_q, max_seqlen_k, page_table, " + _OPTIONAL_3.format("") + "seqlens_rotary, q_descale, k_descale, "
        "v_descale, softmax_scale, causal, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
        "rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0"
    ),
    "November 2025": (
        "q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, "
        "cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, "
        + _OPTIONAL_3.format("=None") + "seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, "
        "softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, "
        "rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0"
    ),
}  # fmt: skip
BACKWARD_3 = {
    "January 2025": (
        "dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k, "
        "dq, dk, dv, softmax_scale, causal, window_size=(-1, -1), sink_token_length=0, softcap=0.0, "
        "deterministic=False, sm_margin=0"
    ),
    "v2.8.3": (
        "dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k, "
        "dq, dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0, deterministic=False, sm_margin=0"
    ),
    "November 2025": (
        "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None, "
        "max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, "
        "window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0"
    ),
}
# flash_attn/cute/interface.py of flash-attn-4 4.0.0b36.
FORWARD_4 = (
    "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, "
    "max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None, "
    "window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None, "
    "intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, score_mod=None, mask_mod=None, "
    "block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None, aux_scalars=None, "
    "q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None, scheduler_metadata=None, "
    "seqlen_k_per_split=None, disable_scheduler_metadata=False, gather_bwd_recompute_p=False"
)
BACKWARD_4 = (
    "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None, "
    "window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2, "
    "num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2, "
    "AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
    "max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None, "
    "score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None, "
    "learnable_sink=None"
)
_USED = {
    *("q", "k", "v", "dout", "out", "softmax_lse", "lse", "dq", "dk", "dv", "softmax_scale", "causal", "is_causal"),
    *("window_size", "window_size_left", "window_size_right", "deterministic", "return_lse"),
    *("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
}
_OFF = {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None, "return_softmax": False}


def function(signature, compute):
    """A function with this signature, which checks that all but the usual is left alone."""
    parameters = inspect.signature(eval(f"lambda {signature}: None")).parameters.values()
    unused = {
        each.name: _OFF.get(each.name) if each.default is each.empty else each.default
        for each in parameters
        if each.name not in _USED
    }

    def call(given):
        assert {name: given[name] for name in unused} == unused
        return compute(types.SimpleNamespace(**given))

    return eval(f"lambda {signature}: call(locals())", {"call": call, "locals": locals})


def package_functions(limits, signatures, *, names, fills):
    """The functions of a package, by the signatures of their forwards and backwards."""

    def where(a):
        cu_seqlens = getattr(a, "cu_seqlens_q", None)
        if cu_seqlens is None:
            assert getattr(a, "max_seqlen_q", None) is getattr(a, "max_seqlen_k", None) is None
            return None, None
        assert cu_seqlens is a.cu_seqlens_k and a.max_seqlen_q == a.max_seqlen_k
        return cu_seqlens, a.max_seqlen_q

    def how(a):
        left, right = getattr(a, "window_size", None) or (a.window_size_left, a.window_size_right)
        causal = a.is_causal if hasattr(a, "is_causal") else a.causal
        return causal, lambda L, K, causal: limits(L, K, causal, left, right), a.softmax_scale

    def forward(a):
        assert getattr(a, "return_lse", True) and getattr(a, "out", None) is None
        return *attend(a.q, a.k, a.v, *where(a), *how(a)), torch.empty(0), torch.empty(2)

    def backward(a):
        assert a.deterministic is False
        lse = a.lse if hasattr(a, "lse") else a.softmax_lse
        grads = attend_backward(a.dout, a.q, a.k, a.v, a.out, lse, *where(a), *how(a))
        if not fills:
            assert a.dq is a.dk is a.dv is None
            return grads
        for place, grad in zip((a.dq, a.dk, a.dv), grads, strict=True):
            assert place.is_contiguous() and place.dtype == grad.dtype
            place.copy_(grad)
        return torch.empty(0)

    computes = (forward, backward) * (len(names) // 2)
    made = zip(names, map(function, signatures, computes), strict=True)
    return types.SimpleNamespace(**dict(made))


NAMES_2 = "_flash_attn_forward", "_flash_attn_backward", "_flash_attn_varlen_forward", "_flash_attn_varlen_backward"
FLASH_ATTN_2 = {
    release: package_functions(
        limits_of_2,
        (FORWARD_2, BACKWARD_2, VARLEN_FORWARD_2 + forward_more, VARLEN_BACKWARD_2 + backward_more),
        names=NAMES_2,
        fills=True,
    )
    for release, forward_more, backward_more in (
        ("2.7.0", "", ""),
        ("2.8.3", ", zero_tensors=False", ", zero_tensors=False"),
        ("newer", ", zero_tensors=False, num_splits=0", ", zero_tensors=False"),
    )
}
FLASH_ATTN_3 = {
    release: package_functions(limits_of_3, (FORWARD_3[release], BACKWARD_3[release]), names=NAMES_2[:2], fills=True)
    for release in FORWARD_3
}
FLASH_ATTN_4 = package_functions(
    limits_of_4, (FORWARD_4, BACKWARD_4), names=("_flash_attn_fwd", "_flash_attn_bwd"), fills=False
)
TORCH = TorchCudaFlashKernel(forward_op=torch_forward, backward_op=torch_backward)
CUDNN = TorchCudnnKernel(forward_op=cudnn_forward, backward_op=cudnn_backward)
ADAPTERS = {
    "torch_cuda_flash": TORCH,
    **{f"flash_attn {release}": FlashAttnKernel(functions=of) for release, of in FLASH_ATTN_2.items()},
    **{f"flash_attn_3 {release}": FlashAttn3Kernel(functions=of) for release, of in FLASH_ATTN_3.items()},
    "flash_attn_4": FlashAttn4Kernel(functions=FLASH_ATTN_4),
}


class OnGpu:
    """As much of a tensor as a refusal looks at."""

    def __init__(self, head_dim, dtype=torch.bfloat16):
        self.device, self.dtype, self.shape = torch.device("cuda", 0), dtype, (1, 4, 2, head_dim)

    def is_floating_point(self):
        return True
