"""Shapes of decoder models: what memory, work and messages of a run depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slimpipe.nearest import nearest_divisor, nearest_name


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder of equal layers: grouped-query attention, then SwiGLU (of several experts), each behind an RMSNorm.

    Raises:
        ValueError: sizes that do not fit together; the message names the nearest legal value.
    """

    name: str
    num_layers: int
    dim: int
    ffn_dim: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int = 128256
    head_dim: int | None = None
    """None: dim / num_heads."""
    num_experts: int = 1
    experts_per_token: int = 1
    tied: bool = False
    """Whether embedding and output layer are one matrix."""
    titan: tuple[str, str] | None = None
    """Name and flavor under which torchtitan knows the model."""

    def __post_init__(self) -> None:
        if self.head_dim is None and self.dim % self.num_heads:
            raise ValueError(f"{self.num_heads} heads do not divide {self.dim} dimensions; give the size of a head too")
        if self.num_heads % self.num_kv_heads:
            nearest = nearest_divisor(self.num_heads, self.num_kv_heads)
            raise ValueError(
                f"{self.num_kv_heads} K,V heads do not divide {self.num_heads} heads; nearest legal value: {nearest}"
            )
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"{self.experts_per_token} experts per token of {self.num_experts}; nearest legal value: "
                f"{self.num_experts}"
            )

    @property
    def query_dim(self) -> int:
        """Of all query heads together."""
        return self.num_heads * (self.head_dim or self.dim // self.num_heads)

    @property
    def kv_dim(self) -> int:
        """Of all K heads together; as much for V."""
        return self.num_kv_heads * (self.head_dim or self.dim // self.num_heads)

    @property
    def attention_parameters(self) -> int:
        """Of one layer, its two norms included."""
        return self.dim * (2 * self.query_dim + 2 * self.kv_dim) + 2 * self.dim

    @property
    def layer_parameters(self) -> int:
        """Of one layer, all experts and their router included."""
        router = self.dim * self.num_experts if self.num_experts > 1 else 0
        return self.attention_parameters + self.num_experts * 3 * self.dim * self.ffn_dim + router

    @property
    def active_layer_parameters(self) -> int:
        """Of one layer, those that a token is multiplied with."""
        router = self.dim * self.num_experts if self.num_experts > 1 else 0
        return self.attention_parameters + self.experts_per_token * 3 * self.dim * self.ffn_dim + router

    @property
    def matrix_parameters(self) -> int:
        """Of the embedding; as many has the output layer."""
        return self.vocab_size * self.dim

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        matrices = 1 if self.tied else 2
        return self.num_layers * self.layer_parameters + matrices * self.matrix_parameters + self.dim

    def flops(self, seq_len: int, *, causal: bool) -> float:
        """Of one sequence, forward and backward, nothing recomputed: what an MFU counts.

        Args:
            seq_len: Tokens.
            causal: Count only the half of the attention that a causal mask leaves; otherwise all of it.
        """
        matrices = 6 * (self.num_layers * self.active_layer_parameters + self.matrix_parameters)
        attention = 12 * self.num_layers * self.query_dim * seq_len * (0.5 if causal else 1)
        return seq_len * (matrices + attention)


def _shape(name: str, *sizes: int, **others: Any) -> ModelShape:
    num_layers, dim, ffn_dim, num_heads, num_kv_heads = sizes
    return ModelShape(
        name=name,
        num_layers=num_layers,
        dim=dim,
        ffn_dim=ffn_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        **others,
    )


def _llama3(flavor: str, *sizes: int, **others: Any) -> ModelShape:
    return _shape(f"llama3-{flavor.lower()}", *sizes, titan=("llama3", flavor), **others)


MODELS = {
    shape.name: shape
    for shape in (
        # torchtitan's, and under its names
        _llama3("debugmodel", 6, 256, 768, 16, 16, vocab_size=2048),
        _llama3("1B", 16, 2048, 8192, 32, 8, tied=True),
        _llama3("3B", 28, 3072, 8192, 24, 8, tied=True),
        _llama3("8B", 32, 4096, 14336, 32, 8),
        _llama3("70B", 80, 8192, 28672, 64, 8),
        _llama3("405B", 126, 16384, 53248, 128, 8),
        # of the SlimPipe paper
        _shape("llama-7b", 32, 4096, 11008, 32, 32),
        _shape("llama-13b", 40, 5120, 13824, 40, 40),
        _shape("llama-70b", 80, 8192, 28672, 64, 8),
        _shape("llama-149b", 96, 12288, 32768, 96, 8),
        _shape("mixtral-8x7b", 32, 4096, 14336, 32, 8, num_experts=8, experts_per_token=2),
        _shape("mixtral-8x22b", 56, 6144, 16384, 48, 8, num_experts=8, experts_per_token=2),
    )
}


def model_named(name: str) -> ModelShape:
    """A model by its name, in any case.

    Raises:
        ValueError: no such model; the message gives the nearest name and all of them.
    """
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    near = nearest_name(name.lower(), MODELS)
    raise ValueError(f'--model: no model "{name}"; nearest: "{near}"; known: {", ".join(MODELS)}')
