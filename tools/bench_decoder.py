"""A small decoder in plain PyTorch, Llama's layout, whose inner attention is `SliceAttention`.

Shapes: B batch, L slice or whole sequence, N query heads, G K,V heads, H head dim, D model dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimpipe import SliceAttention


@dataclass(frozen=True, kw_only=True)
class DecoderSize:
    """Sizes of a decoder."""

    num_layers: int = 8
    dim: int = 256
    num_heads: int = 8
    num_kv_heads: int = 8
    vocab: int = 2048


class Block(nn.Module):
    """Attention with rotary positions, then SwiGLU, each behind an RMSNorm."""

    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        dim, self.head_dim = size.dim, size.dim // size.num_heads
        hidden = 64 * math.ceil(dim * 8 / 3 / 64)
        self.wq, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wk, self.wv = (nn.Linear(dim, size.num_kv_heads * self.head_dim, bias=False) for _ in range(2))
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.inner_attention = SliceAttention()

    def forward(self, x_BLD: Tensor, rotation: tuple[Tensor, Tensor], **kwargs: Any) -> Tensor:
        h_BLD = self.attention_norm(x_BLD)
        q_BLNH, k_BLGH, v_BLGH = (w(h_BLD).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q_BLNH, k_BLGH = rotate(q_BLNH, *rotation), rotate(k_BLGH, *rotation)
        out_BLNH = self.inner_attention(q_BLNH, k_BLGH, v_BLGH, enable_gqa=True, **kwargs)
        x_BLD = x_BLD + self.wo(out_BLNH.flatten(2))
        h_BLD = self.mlp_norm(x_BLD)
        return x_BLD + self.down(F.silu(self.gate(h_BLD)) * self.up(h_BLD))


def rotate(x_BLNH: Tensor, cos_BL1H: Tensor, sin_BL1H: Tensor) -> Tensor:
    """Rotary position embedding; cos and sin are of half the head dim."""
    a, b = x_BLNH.chunk(2, dim=-1)
    return torch.cat([a * cos_BL1H - b * sin_BL1H, a * sin_BL1H + b * cos_BL1H], dim=-1)


class Decoder(nn.Module):
    """A decoder, or after `keep` one stage of it."""

    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        self.embedding: nn.Embedding | None = nn.Embedding(size.vocab, size.dim)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.num_layers))
        self.norm: nn.RMSNorm | None = nn.RMSNorm(size.dim)
        self.head: nn.Linear | None = nn.Linear(size.dim, size.vocab, bias=False)
        self.half_head_dim = size.dim // size.num_heads // 2

    def keep(self, stage: int, num_stages: int, *, vocab_parallel: str = "none") -> Decoder:
        """Drop what other stages hold, and what all ranks share."""
        count = len(self.blocks) // num_stages
        self.blocks = self.blocks[stage * count : (stage + 1) * count]
        if stage > 0 or vocab_parallel == "both":
            self.embedding = None
        if stage < num_stages - 1 or vocab_parallel != "none":
            self.head = None
        if stage < num_stages - 1:
            self.norm = None
        return self

    def forward(self, x: Tensor, positions: Tensor, attention_masks: object = None) -> Tensor:
        h_BLD = x if self.embedding is None else self.embedding(x)
        frequency_H = 10000.0 ** (-torch.arange(self.half_head_dim, device=h_BLD.device) / self.half_head_dim)
        angle_BL1H = (positions[..., None] * frequency_H)[:, :, None]
        rotation = angle_BL1H.cos().to(h_BLD.dtype), angle_BL1H.sin().to(h_BLD.dtype)
        for block in self.blocks:
            h_BLD = block(h_BLD, rotation, positions=positions, attention_masks=attention_masks)
        h_BLD = h_BLD if self.norm is None else self.norm(h_BLD)
        return h_BLD if self.head is None else self.head(h_BLD)
