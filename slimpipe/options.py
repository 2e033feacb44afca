"""The options of a SlimPipe schedule, one frozen record, checked before anything is communicated."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, fields

from slimpipe.nearest import nearest_name

KERNEL_NAMES = (
    "auto",
    "reference",
    "torch_cpu_flash",
    "torch_cuda_flash",
    "torch_cudnn",
    "flash_attn",
    "flash_attn_3",
    "flash_attn_4",
)
EXCHANGE_NAMES = ("auto", "on", "off")
VOCAB_PARALLEL_NAMES = ("none", "output", "both")


def check_kernel_name(name: str) -> str:
    """Return ``name`` if a kernel is called so.

    Raises:
        ValueError: No such kernel; the message gives the nearest name.
    """
    return _check_name("kernel", name, KERNEL_NAMES)


def check_vocab_parallel(name: str) -> str:
    """Return ``name`` if it says which work on the vocabulary is shared.

    Raises:
        ValueError: It does not; the message gives the nearest name.
    """
    return _check_name("vocab_parallel", name, VOCAB_PARALLEL_NAMES)


def _check_name(option: str, name: str, names: tuple[str, ...]) -> str:
    if name not in names:
        raise ValueError(
            f"{option} = {name!r}: it must be one of {', '.join(names)}; nearest legal value: "
            f"{nearest_name(str(name), names)!r}"
        )
    return name


@dataclass(frozen=True, kw_only=True)
class SlimPipeOptions:
    """Options of a SlimPipe schedule.

    Raises:
        TypeError: a field got a value of the wrong type.
        ValueError: a field got a value outside its rule; the message names the value, the rule and the nearest legal
            value.
    """

    seq_dim: int = 1
    """Dimension of tokens, labels, positions and hidden states that holds the sequence and is cut into slices."""

    kernel: str = "auto"
    """Attention kernel of every SliceAttention that does not choose one itself: "auto", "reference",
    "torch_cpu_flash", "torch_cuda_flash", "torch_cudnn", "flash_attn" (2.7 or newer), "flash_attn_3" or "flash_attn_4".
    "auto" takes the fastest one that serves the device, dtype and head sizes at hand; "torch_cudnn" only by name."""

    sliced_kwargs: tuple[str, ...] = ("positions",)
    """Names of keyword arguments of the model that are cut along seq_dim together with the tokens. Every other keyword
    argument reaches each slice whole."""

    keep_attention_output: bool = True
    """Under activation checkpointing, keep each attention's output and LSE so that recomputing a layer does not run its
    attention again. Costs one hidden state per layer and live slice; saves the part of the work that grows with
    context."""

    context_exchange: str = "auto"
    """Whether ranks with long contexts hand part of their attention to others: "on", "off", or "auto" for wherever it
    saves more time than its messages cost. It begins with the second step of a batch shape; the first one learns the
    attention layers (and with "auto" measures this machine)."""

    exchange_granularity: int = 128
    """Tokens that move together in the exchange."""

    exchange_max_slices: int = 16
    """Most K,V that a rank holds for others from one tick to a later, in slices of as many layers as a rank has (K and
    V in their own dtype; in backward dK and dV in float32 as well). 0: hold nothing, send every row anew each tick."""

    attention_flops: float | None = None
    """FLOP per second of attention on one rank, for context_exchange = "auto". None: measured."""

    link_bandwidth: float | None = None
    """Bytes per second between two pipeline ranks, for context_exchange = "auto". None: measured."""

    link_latency: float | None = None
    """Seconds that the smallest message between two pipeline ranks takes, for context_exchange = "auto". None:
    measured."""

    measure_memory: bool = False
    """Count the bytes that autograd, the K,V store and message buffers hold, for `schedule.metrics()`. Costs a few
    microseconds per saved tensor."""

    record_times: bool = False
    """Record start and end of every instruction, in `schedule.record.times`."""

    def __post_init__(self) -> None:
        for field in fields(self):
            self._check_type(field.name, getattr(self, field.name), field.default)
        check_kernel_name(self.kernel)
        _check_name("context_exchange", self.context_exchange, EXCHANGE_NAMES)
        for name in self.sliced_kwargs:
            if not isinstance(name, str):
                raise TypeError(f"SlimPipeOptions.sliced_kwargs holds {name!r}; it must hold argument names (str)")
        for name, least, rule in (
            ("seq_dim", 0, "it must count from the front"),
            ("exchange_granularity", 1, "it must be at least one token"),
            ("exchange_max_slices", 0, "it must be at least 0"),
        ):
            if getattr(self, name) < least:
                raise ValueError(
                    f"SlimPipeOptions.{name} = {getattr(self, name)}: {rule}; nearest legal value: {least}"
                )
        for name in ("attention_flops", "link_bandwidth", "link_latency"):
            value = getattr(self, name)
            if value is not None and not (0 < value < float("inf")):
                raise ValueError(
                    f"SlimPipeOptions.{name} = {value}: it must be positive and finite, or None to have it measured; "
                    "nearest legal value: None"
                )

    @property
    def exchange_hash(self) -> int:
        """A number that differs where ranks would plan the exchange differently, by all likelihood."""
        return zlib.crc32(repr((self.context_exchange, self.exchange_granularity, self.exchange_max_slices)).encode())

    def _check_type(self, name: str, value: object, default: object) -> None:
        wanted = float if default is None else type(default)
        allowed = (float, int, type(None)) if default is None else (wanted,)
        if type(value) not in allowed:
            example = 1e9 if default is None else default
            raise TypeError(
                f"SlimPipeOptions.{name} got {value!r} of type {type(value).__name__}; it must be a "
                f"{wanted.__name__}{' or None' if default is None else ''}, for example {example!r}"
            )
