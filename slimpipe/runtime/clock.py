"""Clocks for recorded steps: the host's, and a device's, which is read by events and never waited for in a step."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Notes moments while a step runs, and tells afterwards when they were."""

    def mark(self) -> Any:
        """Note now: on a device, when it gets as far as what is queued now."""

    def seconds(self, mark: Any) -> float:
        """When a mark was, in seconds of `time.perf_counter`; after the step."""


class HostClock:
    """For devices that compute while the host waits."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, mark: float) -> float:
        return mark


class DeviceClock:
    """For a device that runs behind the host. Making it waits for the device, and so does the first `seconds`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.accelerator.synchronize(device)
        # An idle device reaches an event at once, so both clocks start here.
        self._origin, self._origin_seconds = self.mark(), time.perf_counter()

    def mark(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: torch.Event) -> float:
        mark.synchronize()
        return self._origin_seconds + self._origin.elapsed_time(mark) * 1e-3


def clock_of(device: torch.device) -> Clock:
    """The clock of what runs on a device."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)
