"""The legal value nearest to a wrong one, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest_name(name: str, names: Iterable[str]) -> str:
    """The one of ``names`` that is written most like ``name``."""
    return difflib.get_close_matches(name, list(names), n=1, cutoff=0.0)[0]


def nearest_divisor(number: int, value: int) -> int:
    """The divisor of ``number`` that is nearest to ``value``, the smaller of two."""
    return min((x for x in range(1, number + 1) if number % x == 0), key=lambda x: abs(x - value))
