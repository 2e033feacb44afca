"""The options of a SlimPipe schedule, one frozen record, checked before anything is communicated."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields

KERNEL_NAMES = ("auto", "reference", "torch_cpu_flash", "torch_cuda_flash", "flash_attn")


def check_kernel_name(name: str) -> str:
    """Return ``name`` if a kernel is called so.

    Raises:
        ValueError: No such kernel; the message gives the nearest name.
    """
    if name not in KERNEL_NAMES:
        near = difflib.get_close_matches(str(name), KERNEL_NAMES, n=1, cutoff=0.0)
        raise ValueError(
            f"kernel = {name!r}: it must be one of {', '.join(KERNEL_NAMES)}; nearest legal value: {near[0]!r}"
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
    "torch_cpu_flash", "torch_cuda_flash" or "flash_attn". "auto" takes the fastest one that serves the device, dtype
    and head sizes at hand."""

    sliced_kwargs: tuple[str, ...] = ("positions",)
    """Names of keyword arguments of the model that are cut along seq_dim together with the tokens. Every other keyword
    argument reaches each slice whole."""

    keep_attention_output: bool = True
    """Under activation checkpointing, keep each attention's output and LSE so that recomputing a layer does not run its
    attention again. Costs one hidden state per layer and live slice; saves the part of the work that grows with
    context."""

    measure_memory: bool = False
    """Count the bytes that autograd, the K,V store and message buffers hold, for `schedule.metrics()`. Costs a few
    microseconds per saved tensor."""

    record_times: bool = False
    """Record start and end of every instruction for `schedule.metrics()`."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            wanted = type(field.default)
            if type(value) is not wanted:
                raise TypeError(
                    f"SlimPipeOptions.{field.name} got {value!r} of type {type(value).__name__}; it must be a "
                    f"{wanted.__name__}, for example {field.default!r}"
                )
        if self.seq_dim < 0:
            raise ValueError(
                f"SlimPipeOptions.seq_dim = {self.seq_dim}: it must count from the front; nearest legal value: 0"
            )
        check_kernel_name(self.kernel)
        for name in self.sliced_kwargs:
            if not isinstance(name, str):
                raise TypeError(f"SlimPipeOptions.sliced_kwargs holds {name!r}; it must hold argument names (str)")
