"""To import before torch, which warns in every process where NumPy is missing. Nothing here needs it."""

from __future__ import annotations

import warnings

NO_NUMPY = "Failed to initialize NumPy"

warnings.filterwarnings("ignore", NO_NUMPY)
