"""A small decoder in plain PyTorch, and the unsliced truth to compare with.

Shapes: B batch, S sequence, L slice or sequence, N query heads, G K,V heads, H head dim, D model dim, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slimpipe import SliceAttention
from slimpipe.attention.events import AttentionLayer

IGNORED = -100
ATTENTION_LAYER = AttentionLayer(
    batch=1,
    slice_len=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    value_head_dim=16,
    dtype=torch.float32,
    kernel="auto",
    scale=0.25,
)


def visible(positions_BS: Tensor, window: int | None) -> Tensor:
    """(B, S, S), True where a query sees a key: of its own document, not later, inside the window."""
    index = torch.arange(positions_BS.shape[1])
    query, key = index[None, :, None], index[None, None]
    first = (index - positions_BS)[:, :, None]
    oldest = first if window is None else first.maximum(query - window + 1)
    return (key <= query) & (key >= oldest)


class DenseAttention(nn.Module):
    """Causal attention of a whole sequence, written out; documents from positions. Shares nothing with slimpipe."""

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window

    def forward(self, q_BLNH, k_BLGH, v_BLGH, *, positions, attention_masks=None, scale=None, enable_gqa=False):
        assert attention_masks is None
        groups = q_BLNH.shape[2] // k_BLGH.shape[2]
        k, v = (x.repeat_interleave(groups, dim=2) for x in (k_BLGH, v_BLGH))
        scores = torch.einsum("blnh,bknh->bnlk", q_BLNH, k) * q_BLNH.shape[-1] ** -0.5
        visible_BLL = visible(positions, self.window)
        weights = scores.masked_fill(~visible_BLL[:, None], -torch.inf).softmax(-1)
        return torch.einsum("bnlk,bknh->blnh", weights, v)


class TorchAttention(nn.Module):
    """The same by torch's own attention function, for sequences too long to write out."""

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window

    def forward(self, q_BLNH, k_BLGH, v_BLGH, *, positions, attention_masks=None, scale=None, enable_gqa=False):
        assert attention_masks is None
        mask = visible(positions, self.window)[:, None]
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLGH, v_BLGH))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


class Block(nn.Module):
    def __init__(
        self, dim: int, num_heads: int, num_kv_heads: int, inner: nn.Module, *, value_head_dim: int | None = None
    ) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.value_head_dim = value_head_dim or self.head_dim
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, num_kv_heads * self.value_head_dim, bias=False)
        self.wo = nn.Linear(num_heads * self.value_head_dim, dim, bias=False)
        self.up = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)
        self.norm_in, self.norm_mid = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.inner = inner

    def forward(self, x_BLD: Tensor, attention_masks: object, positions: Tensor) -> Tensor:
        B, L, _ = x_BLD.shape
        h = self.norm_in(x_BLD)
        q, k = (w(h).view(B, L, -1, self.head_dim) for w in (self.wq, self.wk))
        v = self.wv(h).view(B, L, -1, self.value_head_dim)
        q, k = rotate(q, positions), rotate(k, positions)
        out = self.inner(q, k, v, positions=positions, attention_masks=attention_masks, enable_gqa=True)
        x_BLD = x_BLD + self.wo(out.reshape(B, L, -1))
        return x_BLD + self.down(F.silu(self.up(self.norm_mid(x_BLD))))


def rotate(x_BLNH: Tensor, positions_BL: Tensor) -> Tensor:
    """Rotary position embedding."""
    half = x_BLNH.shape[-1] // 2
    frequency = 100.0 ** (-torch.arange(half, dtype=x_BLNH.dtype) / half)
    angle = (positions_BL[..., None] * frequency)[:, :, None].to(x_BLNH.dtype)
    a, b = x_BLNH[..., :half], x_BLNH[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


class Decoder(nn.Module):
    """A decoder, or a stage of one.

    Args:
        layers: Indices of the layers it holds.
        is_first: Whether it holds the embedding.
        is_last: Whether it holds the norm and the head.
        recompute: Non-reentrant checkpointing of every block.
        vocab_parallel: What it leaves to the shared vocabulary: "none"; "output": the head; "both": the embedding too.
        tied: The head's weight is the embedding's.
        window: Sliding window of every layer but each third.
        value_head_dim: Head dim of V, if another than that of Q and K.
    """

    def __init__(
        self,
        *,
        layers: range,
        is_first: bool = True,
        is_last: bool = True,
        vocab: int = 32,
        dim: int = 16,
        num_heads: int = 4,
        num_kv_heads: int = 4,
        recompute: bool = False,
        inner: type[nn.Module] = SliceAttention,
        dtype: torch.dtype = torch.float64,
        vocab_parallel: str = "none",
        tied: bool = False,
        window: int | None = None,
        value_head_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(vocab, dim) if is_first and vocab_parallel != "both" else None
        settings = {i: {} if window is None or i % 3 == 0 else {"window": window} for i in layers}
        self.blocks = nn.ModuleDict(
            {
                str(i): Block(dim, num_heads, num_kv_heads, inner(**settings[i]), value_head_dim=value_head_dim)
                for i in layers
            }
        )
        self.norm = nn.RMSNorm(dim) if is_last else None
        self.head = nn.Linear(dim, vocab, bias=False) if is_last and vocab_parallel == "none" else None
        if tied and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.weight
        self.to(dtype)

    def forward(self, x: Tensor, positions: Tensor, attention_masks: object = None) -> Tensor:
        h = x if self.embedding is None else self.embedding(x)
        for block in self.blocks.values():
            if self.recompute:
                h = checkpoint(block, h, attention_masks, positions, use_reentrant=False, preserve_rng_state=False)
            else:
                h = block(h, attention_masks, positions)
        h = h if self.norm is None else self.norm(h)
        return h if self.head is None else self.head(h)


def sum_loss(output: Tensor, target: Tensor, *, num_tokens: int = 1) -> Tensor:
    """Cross entropy, summed over tokens and divided by the step's token count."""
    loss = F.cross_entropy(
        output.flatten(0, 1).to(torch.promote_types(output.dtype, torch.float32)),
        target.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )
    return loss / num_tokens


def stage_layers(num_layers: int, num_stages: int) -> list[range]:
    """Layers of each stage, the first stages holding one more where they do not divide."""
    size, more = divmod(num_layers, num_stages)
    starts = [i * size + min(i, more) for i in range(num_stages + 1)]
    return [range(a, b) for a, b in zip(starts[:-1], starts[1:], strict=True)]


def packed_positions(lengths: list[int], batch: int = 1) -> Tensor:
    """(B, S) positions of documents of these lengths, rotated by one document from row to row."""
    rows = [lengths[i % len(lengths) :] + lengths[: i % len(lengths)] for i in range(batch)]
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])


def relative_error(a: Tensor, b: Tensor) -> float:
    """Norm of the difference over the norm of ``b``; 0 where both are zero."""
    difference, norm = (a.double() - b.double()).norm().item(), b.double().norm().item()
    return difference / norm if norm else difference
