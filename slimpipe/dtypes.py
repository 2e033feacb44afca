"""The dtype in which sums are kept."""

from __future__ import annotations

import torch


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to accumulate in: float32, or the given dtype if that is wider."""
    return torch.promote_types(dtype, torch.float32)
