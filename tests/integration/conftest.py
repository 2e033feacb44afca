"""What several files of integration tests use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a tool by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module
