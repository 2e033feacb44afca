"""What the exchange costs and saves: bytes of its messages, and seconds on a machine of known rates."""

from __future__ import annotations

from dataclasses import dataclass

from slimpipe.program.ir import Op

BACKWARD_TO_FORWARD = 2.5
"""FLOP of an attention backward over those of its forward: five products of queries and keys instead of two."""

_MARGIN = 2.0
"""Messages are charged this many times over: rates are measured while the ranks are idle, and the exchange must never
make a step slower."""


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """One slice in one attention layer. Sizes of what travels, in bytes."""

    batch: int = 1
    slice_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    bytes_per_value: int = 2
    bytes_per_statistic: int = 4
    """Of the LSE and of dK,dV, which travel in float32 or wider."""

    @property
    def kv_row(self) -> int:
        """K and V of one token."""
        return self.batch * self.num_kv_heads * (self.head_dim + self.value_head_dim) * self.bytes_per_value

    @property
    def gradient_row(self) -> int:
        """dK and dV of one token."""
        return self.batch * self.num_kv_heads * (self.head_dim + self.value_head_dim) * self.bytes_per_statistic

    @property
    def query(self) -> int:
        """Queries of the slice; as many are their gradients."""
        return self.batch * self.slice_len * self.num_heads * self.head_dim * self.bytes_per_value

    @property
    def output(self) -> int:
        """Output of the slice; as many is its gradient."""
        return self.batch * self.slice_len * self.num_heads * self.value_head_dim * self.bytes_per_value

    @property
    def lse(self) -> int:
        """LSE of the slice."""
        return self.batch * self.slice_len * self.num_heads * self.bytes_per_statistic

    def request(self, phase: Op) -> int:
        """What the owner of a unit sends to a helper in one layer, K,V apart."""
        return self.query if phase is Op.FORWARD else self.query + 2 * self.output + self.lse

    def reply(self, phase: Op) -> int:
        """What a helper returns in one layer, dK,dV apart."""
        return self.output + self.lse if phase is Op.FORWARD else self.query

    @property
    def flops_per_row(self) -> int:
        """Of the slice's queries on one key, forward."""
        return 2 * self.batch * self.slice_len * self.num_heads * (self.head_dim + self.value_head_dim)


@dataclass(frozen=True, kw_only=True)
class ExchangeCosts:
    """Rates of a machine and the attention layer that runs on it."""

    shape: AttentionShape
    flops_per_second: float
    """Of attention on one rank."""
    bytes_per_second: float
    """Of one link between two ranks."""
    latency: float
    """Seconds of a message without content, its handling on the host included."""

    def seconds_per_row(self, phase: Op) -> float:
        """Attention of one slice on one past token in one layer."""
        factor = BACKWARD_TO_FORWARD if phase is Op.BACKWARD else 1.0
        return factor * self.shape.flops_per_row / self.flops_per_second

    def message_seconds(self, phase: Op, *, num_sent_rows: float) -> float:
        """All messages of one transfer in one layer, as if none were hidden behind compute."""
        shape = self.shape
        # dK,dV of a row return once for each time it was sent.
        row = shape.kv_row + (shape.gradient_row if phase is Op.BACKWARD else 0)
        num_messages = 3 if num_sent_rows else 2
        num_bytes = num_sent_rows * row + shape.request(phase) + shape.reply(phase)
        return _MARGIN * (num_messages * self.latency + num_bytes / self.bytes_per_second)
