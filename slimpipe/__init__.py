"""SlimPipe: slice-level pipeline parallelism for long sequences, as an extension of torch.distributed.pipelining."""

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
