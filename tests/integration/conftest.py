"""What several files of integration tests use."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.harness import FORKS, run_ranks

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def no_numpy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a tool that finds the package by itself, but no NumPy."""
    folder = tmp_path_factory.mktemp("no_numpy")
    (folder / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')\n")
    return {"OMP_NUM_THREADS": "1", "PATH": "", "PYTHONPATH": str(folder)}


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a tool by its name. The processes that it starts are forked from the server of tests/harness.py."""
    monkeypatch.setattr(FORKS, "set_forkserver_preload", lambda modules: None)
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
