"""Starts one process per rank on this machine with torch's own launcher, and sees to it that all of them end.

Whatever happens (success, a failing rank, Ctrl-C, SIGTERM, the death of the launcher itself), no rank is left behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_LAUNCHER_PID = "SLIMPIPE_LAUNCHER_PID"
_SECONDS_TO_END = 5  # between asking ranks to end and killing them
_TAIL_LINES = 20
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The rank that failed first.

    Attributes:
        rank: its number.
        reason: its exception, or how its process ended.
        details: its traceback, or the last lines it wrote.
    """

    rank: int
    reason: str
    details: str


class RanksFailed(Exception):
    """A rank failed; every rank has ended."""

    def __init__(self, failure: Failure):
        super().__init__(f"rank {failure.rank} failed: {failure.reason}")
        self.failure = failure


class Stopped(Exception):
    """A signal stopped the run; every rank has ended."""


def under_launcher() -> bool:
    """Whether this process is a rank already, started by `launch`, torchrun or the like."""
    return "RANK" in os.environ


def threads_per_rank(num_ranks: int) -> str:
    """`OMP_NUM_THREADS` of each of so many ranks on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return str(max(1, cores // num_ranks))


def launch(
    command: Sequence[str], *, num_ranks: int, shown_rank: int | None, log_dir: Path, env: Mapping[str, str]
) -> None:
    """Run `command` once per rank and wait for all of them.

    Every rank's output goes to files under `log_dir`; what `shown_rank` writes to stdout is shown as well. Uses a free
    port, so that several launches at once do not meet.

    Args:
        shown_rank: None to show nothing.
        env: environment variables of the ranks, unless they are set already.

    Raises:
        RanksFailed: a rank failed; the others were ended.
        Stopped: SIGINT, SIGTERM, SIGHUP or SIGQUIT arrived; the ranks were ended.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=run_id,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(
            str(log_dir), redirects=Std.ERR, tee=Std.OUT, local_ranks_filter={-1 if shown_rank is None else shown_rank}
        ),
        log_line_prefix_template="[rank${rank}] ",
        shutdown_timeout=_SECONDS_TO_END,
        signals_to_handle=",".join(number.name for number in _SIGNALS),
    )
    with _process_state_kept():
        for name, value in {**env, "PYTHONUNBUFFERED": "1"}.items():
            os.environ.setdefault(name, value)
        os.environ[_LAUNCHER_PID] = str(os.getpid())
        logging.disable(logging.CRITICAL)  # the exceptions below say it briefly
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            (logs,) = log_dir.glob(f"{run_id}_*")
            raise RanksFailed(_first_failure(error.failures, logs)) from None
        except SignalException as error:
            raise Stopped(f"stopped by {error.sigval.name}") from None
        except KeyboardInterrupt:  # before torch's launcher has set its signal handlers
            raise Stopped("stopped by SIGINT") from None


@contextlib.contextmanager
def _process_state_kept() -> Iterator[None]:
    """Undo what launching changes in this process: environment, signal handlers (torch's stay otherwise), logging."""
    environ = os.environ.copy()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(environ)


def prepare_rank() -> None:
    """Called first in each rank that `launch` started (in others it does nothing): lets it end with the launcher.

    Signals end the process at once, even while it is blocked in communication, and without a traceback per rank. A
    thread ends it when the launcher has gone without a signal.
    """
    launcher = os.environ.get(_LAUNCHER_PID)
    if launcher is None or os.getppid() != int(launcher):
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    def watch() -> None:
        while os.getppid() == int(launcher):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="watch-launcher", daemon=True).start()


def _first_failure(failures: Mapping, logs: Path) -> Failure:
    """Which of torch's ProcessFailures, by rank, came first; the others are what it caused."""

    def order(rank: int) -> tuple:
        failure = failures[rank]
        ended_by_launcher = failure.exitcode == -signal.SIGTERM
        # A process that died left no report, and those of its peers are about its silence.
        reported = os.path.exists(failure.error_file)
        return ended_by_launcher, reported, os.stat(failure.error_file).st_mtime_ns if reported else failure.timestamp

    rank = min(failures, key=order)
    failure = failures[rank]
    report = failure.error_file_data.get("message")
    if isinstance(report, dict):
        return Failure(rank=rank, reason=report["message"], details=report["extraInfo"]["py_callstack"].strip())
    how = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    tail = _log_file(logs, rank).read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    return Failure(rank=rank, reason=f"its process ended with {how}", details="\n".join(tail))


def _log_file(logs: Path, rank: int) -> Path:
    return logs / "attempt_0" / str(rank) / "stderr.log"
