"""SlimPipe: slice-level pipeline parallelism for long sequences, as an extension of torch.distributed.pipelining."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slimpipe.attention.slice_attention import SliceAttention
    from slimpipe.options import SlimPipeOptions
    from slimpipe.program import build_program
    from slimpipe.runtime.schedules import ScheduleInterleavedSlimPipe, ScheduleSlimPipe

__all__ = [
    "ScheduleInterleavedSlimPipe",
    "ScheduleSlimPipe",
    "SliceAttention",
    "SlimPipeOptions",
    "build_program",
]

_PLACES = {
    "ScheduleInterleavedSlimPipe": "runtime.schedules",
    "ScheduleSlimPipe": "runtime.schedules",
    "SliceAttention": "attention.slice_attention",
    "SlimPipeOptions": "options",
    "build_program": "program",
}


def __getattr__(name: str) -> object:
    """Import what is asked for: planning imports no torch, which takes seconds to load."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
