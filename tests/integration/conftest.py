"""What several files of integration tests use."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.harness import run_ranks

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a tool by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module


@pytest.fixture
def bench(
    tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Callable[..., Any]:
    """Calls a benchmark in this process and gives its figures; its ranks, too, have imported torch already, which
    otherwise takes longer than what they measure."""

    def forked(measure: Callable, setting: Any, *, num_ranks: int, **_: int) -> Any:
        return run_ranks(measure, num_ranks, setting, timeout=200)[0]

    def figures(name: str, *args: str) -> Any:
        module = tool(name)
        monkeypatch.setattr(module, "run_ranks", forked)
        module.main([*args, "--json"])
        return json.loads(capsys.readouterr().out)

    return figures
