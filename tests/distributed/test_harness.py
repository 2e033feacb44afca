"""The harness itself: results, and every way in which a rank can fail."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import harness
from tests.harness import RankPool, RanksFailed, run_ranks, run_ranks_outcomes


def _rank_plus(x: torch.Tensor) -> torch.Tensor:
    return x + dist.get_rank()


def _all_reduce() -> float:
    x = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(x)
    return x.item()


def _facts() -> dict[str, object]:
    names = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "SLIMPIPE_TEST")
    return {"pid": os.getpid(), "threads": torch.get_num_threads(), **{name: os.environ.get(name) for name in names}}


def _one_raises_others_wait() -> None:
    if dist.get_rank() == 1:
        raise ValueError("slice 3 is missing")
    dist.barrier()


def _one_dies() -> str:
    if dist.get_rank() == 0:
        os._exit(7)
    return "survived"


def _one_hangs() -> str:
    if dist.get_rank() == 1:
        time.sleep(600)
    return "done"


def _unpicklable() -> object:
    return lambda: None


def test_results_come_in_rank_order_and_the_group_and_processes_are_kept(rank_pool):
    pool = rank_pool(2)
    x = torch.arange(3.0, dtype=torch.float64)
    a, b = pool.run(_rank_plus, x)
    assert torch.equal(a, x)
    assert torch.equal(b, x + 1)
    assert a.dtype == torch.float64
    assert pool.run(_all_reduce) == [3.0, 3.0]
    first, second = pool.run(_facts), pool.run(_facts)
    assert first == second
    assert [facts["RANK"] for facts in first] == ["0", "1"]
    assert all(facts["threads"] == 1 and facts["OMP_NUM_THREADS"] == "1" for facts in first)


def test_fresh_ranks_get_the_environment_and_end():
    (facts,) = run_ranks(_facts, 1, env={"SLIMPIPE_TEST": "on"})
    assert facts["SLIMPIPE_TEST"] == "on"
    assert facts["WORLD_SIZE"] == "1"
    assert "SLIMPIPE_TEST" not in os.environ
    assert not _alive(facts["pid"])


def test_every_kind_of_failure_is_reported_and_the_pool_serves_on(monkeypatch):
    monkeypatch.setattr(harness, "_GRACE_SECONDS", 1.0)
    with RankPool(2) as pool:
        with pytest.raises(RanksFailed, match=r"rank 1 raised[\s\S]*ValueError: slice 3 is missing") as caught:
            pool.run(_one_raises_others_wait)
        assert "_one_raises_others_wait" in caught.value.results[0].__str__()
        assert caught.value.results[1].error is not None

        dead, survivor = pool.outcomes(_one_dies, timeout=60)  # on new ranks: the old ones were killed
        assert dead.exit_code == 7
        assert survivor.value == "survived"

        pids = [facts["pid"] for facts in pool.run(_facts)]
        finished, hung = pool.outcomes(_one_hangs, timeout=2)
        assert finished.ok
        assert finished.value == "done"
        assert hung.stack is not None
        assert "_one_hangs" in hung.stack
        assert 1.5 < hung.seconds < 10
        assert not any(map(_alive, pids))

        with pytest.raises(RanksFailed, match="pickle"):
            pool.run(_unpicklable)
        assert pool.run(_all_reduce) == [3.0, 3.0]


def test_outcomes_of_fresh_ranks_never_raise():
    (result,) = run_ranks_outcomes(_one_dies, 1)
    assert not result.ok
    assert result.exit_code == 7


def test_ranks_end_when_their_parent_is_killed(tmp_path):
    file = tmp_path / "pid"
    code = (
        "from tests.harness import FORKS, run_ranks\n"
        "FORKS.set_forkserver_preload(['torch'])\n"  # torchtitan takes seconds to import
        "from tests.distributed.test_harness import _report_and_hang\n"
        f"run_ranks(_report_and_hang, 1, {str(file)!r})"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    _wait_until(lambda: file.exists() and file.read_text())
    parent.kill()
    parent.wait()
    _wait_until(lambda: not _alive(int(file.read_text())))


def _report_and_hang(file: str) -> None:
    Path(file).write_text(str(os.getpid()))
    time.sleep(600)


def _alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()  # Z: ended, its exit code not yet collected
    except (FileNotFoundError, ProcessLookupError):
        return False


def _wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
