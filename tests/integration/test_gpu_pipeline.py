"""Parts (c) and (d) of the checks on a GPU (`tools/gpu_pipeline.py`) run on a CPU, tiny, and say so where they fail."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integration.conftest import ROOT

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory, no_numpy: dict[str, str]) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("gpu_check")
    command = [sys.executable, "tools/gpu_check.py", "--tiny", "--device=cpu", "--parts", "c", "d", "--out", folder]
    result = subprocess.run(command, cwd=ROOT, env=no_numpy, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads((folder / "gpu_check.json").read_text())
    return {figure["name"]: figure for figure in found["figures"]}


def test_all_is_well(figures: dict[str, dict[str, Any]]) -> None:
    assert {figure["part"] for figure in figures.values()} == {"c", "d"}
    for figure in figures.values():
        assert figure["ok"] and math.isfinite(figure["value"]), figure
    with_limits = [name for name, figure in figures.items() if figure["limit"] is not None]
    assert len(with_limits) == 4 + 2 + 2 + 2 * 3  # float64, bfloat16, formula, SlimPipe over 1F1B


def test_held_bytes_fall_as_the_formula_says(figures: dict[str, dict[str, Any]]) -> None:
    for n in (8, 16):
        by_rank = [figures[f"SlimPipe n={n}: held between units, rank {rank}"]["value"] for rank in range(4)]
        assert by_rank == sorted(by_rank, reverse=True) or by_rank[3] > by_rank[2]  # the last one has the loss
        assert by_rank[0] < figures["1F1B: held between units, rank 0"]["value"] / 2


def test_nan_is_not_ok(tool: Callable[[str], ModuleType]) -> None:
    figure = tool("gpu_figures").Figure
    assert figure("c", "", 1.0, "").ok and figure("c", "", 1.0, "", 1.0).ok
    assert not figure("c", "", 1.1, "", 1.0).ok
    assert not figure("c", "", math.nan, "", 1.0).ok


def good(device: torch.device, tiny: bool) -> list[str]:
    dist.barrier()
    return [f"good {os.getpid()}"]


def bad(device: torch.device, tiny: bool) -> list[str]:
    if dist.get_rank() == 1:
        raise ValueError("no good")
    return good(device, tiny)


def test_a_check_that_fails_is_a_failed_figure(
    tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank, which waits for the one that failed, is ended; the next check runs on fresh ones.

    What a check finds comes before the next one ends, and after the deadline none starts.
    """
    pipeline = tool("gpu_pipeline")
    monkeypatch.setattr(pipeline, "_NUM_RANKS", 2)
    checks = (("c", "1", good), ("d", "2", bad), ("c", "3", good), ("c", "4", hang))
    monkeypatch.setattr(pipeline, "_CHECKS", checks)
    monkeypatch.setattr(pipeline, "over_1f1b", lambda found, num_ranks: [len(found)])
    deadline = time.monotonic() + 1000
    others = set(multiprocessing.active_children())
    found = pipeline.run(CPU, tiny=True, deadline=deadline)
    first, failed, second = (next(found) for _ in range(3))
    assert first.startswith("good") and second.startswith("good") and first != second
    assert failed.part == "d" and failed.name == "2 failed: ValueError: no good" and not failed.ok
    monkeypatch.setattr(pipeline, "time", SimpleNamespace(monotonic=lambda: deadline))
    skipped, num_found = found
    assert (skipped.part, skipped.name, skipped.text) == ("c", "4", "skipped: the time is over") and num_found == 2
    assert set(multiprocessing.active_children()) <= others


def test_figures_that_failed_are_not_compared(tool: Callable[[str], ModuleType]) -> None:
    memory, figure = tool("gpu_memory"), tool("gpu_figures").Figure
    names = (": allocator's peak, rank 0", ", a step: loss", ", a step: norm of gradients")
    eight, other = ([figure("c", title + name, 2.0, "") for name in names] for title in ("SlimPipe n=8", "1F1B"))
    compared = memory.over_1f1b(eight + other, num_ranks=4)
    assert [(f.value, f.ok) for f in compared] == [(1.0, False), (0.0, True), (0.0, True)]
    assert memory.over_1f1b(eight, num_ranks=4) == memory.over_1f1b(other, num_ranks=4) == []


def hang(*_: object) -> None:
    time.sleep(600)


def test_ranks_that_hang_are_ended(tool: Callable[[str], ModuleType]) -> None:
    others = set(multiprocessing.active_children())
    with pytest.raises(TimeoutError, match=r"no result within 0\.5 s"):
        list(tool("bench_ranks").stream_ranks([hang], num_ranks=1, timeout=0.5))
    assert set(multiprocessing.active_children()) <= others


def test_syncs_fail_from_the_first_forward_to_the_end_of_a_step(rank_pool: Callable) -> None:
    ((quiet, loud, modes),) = rank_pool(1).run(run_sync_checks, str(ROOT / "tools"))
    assert [(value, limit) for _, value, limit in quiet] == [(0, 0)] * 4
    assert modes == ["error", "default"] * 4
    name, value, limit = loud
    assert value > limit == 0
    assert name.startswith("host syncs in a step, p = 1, one stage: slice_attention.py:")


def run_sync_checks(tools: str) -> tuple[list, tuple, list[str]]:
    """On a CPU, with stand-ins for the mode, which does nothing, and for an operation that it stops."""
    sys.path.insert(0, tools)
    import gpu_host_time

    from slimpipe.attention import slice_attention

    modes: list[str] = []

    def set_mode(mode: str) -> None:
        if modes[-1:] != [mode]:
            modes.append(mode)

    def merge(*args: Any) -> Any:
        if modes[-1:] == ["error"]:
            raise RuntimeError("called a synchronizing CUDA operation")
        return real(*args)

    real = slice_attention.merge
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
        check = gpu_host_time.syncs_in_a_step
        quiet = [check(case, CPU, dist.group.WORLD) for case in gpu_host_time.SYNC_CASES]
        seen = [*modes]
        patch.setattr(slice_attention, "merge", merge)
        loud = check("one stage", CPU, dist.group.WORLD)
    return [(f.name, f.value, f.limit) for f in quiet], (loud.name, loud.value, loud.limit), seen
