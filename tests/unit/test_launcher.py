"""The launcher: every way in which a run can end, with small ranks that import no torch."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slimpipe import launcher

RANK = """
import os, sys, time
from launcher import prepare_rank  # not from slimpipe, which imports torch
prepare_rank()
rank = int(os.environ["RANK"])
open(f"pid{rank}", "w").write(str(os.getpid()))
"""
REPORTED = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if rank == 1:
        raise ValueError("slice 3 of 8")
    time.sleep(60)
main()
"""
PARENT = """
import sys
from pathlib import Path
from slimpipe.launcher import Stopped, launch
try:
    launch([sys.executable, "-c", sys.argv[1]], num_ranks=2, shown_rank=0, log_dir=Path("logs"), env={})
except Stopped as stopped:
    sys.exit(f"{stopped}")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    package = Path(launcher.__file__).parent
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(package.parent), str(package), os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _launch(body, **env):
    before = dict(os.environ), signal.getsignal(signal.SIGINT)
    try:
        _launch_two(body, env)
    finally:
        assert (dict(os.environ), signal.getsignal(signal.SIGINT)) == before


def _launch_two(body, env):
    command = [sys.executable, "-c", RANK + body]
    launcher.launch(command, num_ranks=2, shown_rank=1, log_dir=Path("logs"), env=env)


def _pids(folder):
    return [int(file.read_text()) for file in sorted(folder.glob("pid*"))]


def _alive(pid):
    try:
        os.kill(pid, 0)
        # A killed launcher's children belong to init then, which may be slow to reap them.
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def _wait_until_ended(pids, seconds=10):
    deadline = time.monotonic() + seconds
    while alive := [pid for pid in pids if _alive(pid)]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.1)


def test_success_shows_one_rank_and_keeps_every_log(folder, monkeypatch, capfd):
    monkeypatch.setenv("MINE", "user")
    names = "[os.environ[name] for name in ('WORLD_SIZE', 'MINE', 'GIVEN')]"
    _launch(f"print('rank', rank, *{names})", MINE="x", GIVEN="y")
    assert capfd.readouterr().out == "[rank1] rank 1 2 user y\n"
    texts = [file.read_text() for file in sorted(folder.glob("logs/*/attempt_0/*/stdout.log"))]
    assert texts == ["rank 0 2 user y\n", "rank 1 2 user y\n"]


def test_the_first_exception_is_reported_and_the_others_end(folder):
    with pytest.raises(launcher.RanksFailed, match="rank 1 failed: ValueError: slice 3 of 8") as caught:
        _launch(REPORTED)
    assert "in main" in caught.value.failure.details
    _wait_until_ended(_pids(folder))


@pytest.mark.parametrize(
    ("end", "how"),
    [("os._exit(7)", "exit code 7"), ("os.kill(os.getpid(), 9)", "SIGKILL"), ("sys.exit('no memory')", "exit code 1")],
)
def test_a_rank_that_dies_without_a_report(folder, end, how):
    with pytest.raises(launcher.RanksFailed, match=re.escape(f"rank 0 failed: its process ended with {how}")) as caught:
        _launch(f"if rank == 0:\n    print('last words', file=sys.stderr)\n    {end}\ntime.sleep(60)")
    assert "last words" in caught.value.failure.details
    _wait_until_ended(_pids(folder))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_a_stopped_launcher(folder, number):
    command = [sys.executable, "-c", PARENT, RANK + "time.sleep(60)"]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while sum(bool(file.read_text()) for file in folder.glob("pid*")) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    stopped = time.monotonic()
    parent.send_signal(number)
    _, errors = parent.communicate(timeout=20)
    _wait_until_ended(_pids(folder), seconds=5)
    assert time.monotonic() - stopped < 8
    if number != signal.SIGKILL:
        assert errors.strip() == f"stopped by {number.name}"


def test_a_process_that_is_no_rank_is_left_alone(monkeypatch):
    monkeypatch.setenv("SLIMPIPE_LAUNCHER_PID", "1")
    before = signal.getsignal(signal.SIGINT)
    launcher.prepare_rank()
    assert signal.getsignal(signal.SIGINT) == before
