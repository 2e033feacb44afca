"""Schedules, and the executor that runs their programs."""

from slimpipe.runtime.executor import PipelineError
from slimpipe.runtime.schedules import ScheduleInterleavedSlimPipe, ScheduleSlimPipe

__all__ = ["PipelineError", "ScheduleInterleavedSlimPipe", "ScheduleSlimPipe"]
