"""Schedules, and the executor that runs their programs."""

from slimpipe.runtime.schedules import ScheduleInterleavedSlimPipe, ScheduleSlimPipe
from slimpipe.transport import PipelineError

__all__ = ["PipelineError", "ScheduleInterleavedSlimPipe", "ScheduleSlimPipe"]
