"""What several commands ask of their arguments, and of what is installed."""

from __future__ import annotations

import argparse
import importlib.util

_MOST = 10**15


def positive(text: str) -> int:
    """An integer of at least 1, and of a size that floats can take."""
    if text.isdecimal() and (len(text) > len(str(_MOST)) or int(text) > _MOST):
        raise argparse.ArgumentTypeError(f"{text[:20]!r}... must be at most {_MOST}; nearest legal value: {_MOST}")
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1; nearest legal value: 1")
    return int(text)


def require_torchtitan(what: str) -> None:
    """Raises ValueError, in one line, if torchtitan is missing, which ``what`` needs."""
    if importlib.util.find_spec("torchtitan") is None:
        raise ValueError(f"{what} needs torchtitan; install it with: pip install 'slimpipe[torchtitan]'")
