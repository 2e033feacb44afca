"""Two yardsticks for attention: dense softmax by autograd, and a whole sequence attended slice by slice."""

import pytest
import torch

from slimpipe.attention.kernels import merge


def _dense(q_BLNH, k_BKGH, v_BKGH, visible_BLK, scale):
    """Attention and LSE by plain autograd; K,V heads repeated. Rows that see nothing give output 0."""
    repeats = q_BLNH.shape[2] // k_BKGH.shape[2]
    k, v = (x.repeat_interleave(repeats, dim=2) for x in (k_BKGH, v_BKGH))
    scores = torch.einsum("blnh,bknh->bnlk", q_BLNH, k) * scale
    scores = scores.masked_fill(~visible_BLK[:, None], -float("inf"))
    weights = torch.softmax(scores, -1).masked_fill(~visible_BLK[:, None].any(-1, keepdim=True), 0.0)
    return torch.einsum("bnlk,bknh->blnh", weights, v), torch.logsumexp(scores, -1)


def _sliced(kernel, q, k, v, dout, documents, orders, scale, *, window=None):
    """Attention of a whole sequence in slices, as a pipeline stage runs it, forward and then backward in reverse.

    `orders[i]` is the order in which the past of slice i lies in its K,V view; the view is a part of a larger buffer.
    """
    L = documents.slice_len
    cut = [slice(begin, begin + L) for begin in range(0, q.shape[1], L)]
    out, dq, dk, dv = torch.empty_like(dout), *(torch.zeros_like(x, dtype=_wide(x)) for x in (q, k, v))

    def parts(index):
        own = k[:, cut[index]], v[:, cut[index]]
        seen = {"window": window, "num_rows": len(q)}
        yield cut[index].start + torch.arange(L), own, dict(causal=True, mask=documents.own_mask(index, **seen))
        slots = [(held * L, (held + 1) * L) for held in orders[index]]
        past_mask = documents.part_mask(index, slots, **seen) if index else None
        if index and not (past_mask and past_mask.sees_nothing):
            tokens = torch.cat([torch.arange(L) + held * L for held in orders[index]])
            buffers = [x.new_full((len(x), len(tokens) + 2 * L, *x.shape[2:]), float("nan")) for x in (k, v)]
            past = [buffer[:, L:-L] for buffer in buffers]
            for view, x in zip(past, (k, v)):
                view.copy_(x[:, tokens])
            yield tokens, past, dict(causal=False, mask=past_mask)

    lses = []
    for index, now in enumerate(cut):
        results = [kernel.forward(q[:, now], *kv, scale=scale, **how) for _, kv, how in parts(index)]
        merged = results[0] if len(results) == 1 else merge(*results[0], *results[1])
        out[:, now] = merged[0]
        lses.append(merged[1])
    for index, now in reversed(list(enumerate(cut))):
        for tokens, kv, how in parts(index):
            grads = kernel.backward(dout[:, now], q[:, now], *kv, out[:, now], lses[index], scale=scale, **how)
            for total, where, grad in zip((dq, dk, dv), (now, tokens, tokens), grads):
                total[:, where] += grad
    return out, dq, dk, dv


def _wide(x):
    return torch.promote_types(x.dtype, torch.float32)


def _relative_error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.fixture
def dense():
    return _dense


@pytest.fixture(scope="session")
def sliced():
    return _sliced


@pytest.fixture(scope="session")
def relative_error():
    return _relative_error
