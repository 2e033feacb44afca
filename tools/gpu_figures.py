"""What a part of `gpu_check.py` yields."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One number, and the most that it may be."""

    part: str
    name: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the limit, if there is one, is kept; NaN keeps none."""
        return not math.isnan(self.value) and (self.limit is None or self.value <= self.limit)
