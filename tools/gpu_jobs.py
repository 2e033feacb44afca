"""Work in a process of its own: a kernel that ends the process, ruins its CUDA context or hangs costs one job."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

EXIT_SECONDS = 30.0
"""For a process to end whose work is done."""
STOP_SECONDS = 10.0
"""For one to end its own processes once it is told to end."""

Work = Callable[[], Iterable[Any]]


def run_job(work: Work, *, seconds: float, preload: Sequence[str] = ()) -> Iterator[Any]:
    """Yield what ``work()`` yields, as it comes.

    Args:
        work: A function of a module or a `functools.partial` of one; what it yields can be pickled.
        seconds: The process is ended after these.
        preload: Modules to import once for all jobs, where PYTHONPATH finds them. They must not touch the GPU.

    Raises:
        JobError: The work raised, the process died or was ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_all, args=(work, sender))
    process.start()
    sender.close()
    end = time.monotonic() + seconds
    is_done = False
    try:
        while receiver.poll(max(0.0, end - time.monotonic())):
            item = receiver.recv()
            if isinstance(item, JobError):
                is_done = True
                raise item
            yield item
        raise JobError(f"ended after {seconds:.0f} s", details="")
    except EOFError:
        process.join(EXIT_SECONDS)
        if process.exitcode is None:
            raise JobError("its process did not end", details="") from None
        if process.exitcode:
            raise JobError(f"its process ended with exit code {process.exitcode}", details="") from None
    finally:
        process.join(EXIT_SECONDS if is_done else 0.0)
        for stop in (process.terminate, process.kill):
            if process.is_alive():
                stop()
                process.join(STOP_SECONDS)


class JobError(Exception):
    """A job did not come to its end; ``details`` is its traceback."""

    def __init__(self, message: str, details: str) -> None:
        super().__init__(message, details)
        self.details = details

    def __str__(self) -> str:
        return str(self.args[0])


def _send_all(work: Work, sender: Connection) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that work ends the processes that it has started
    try:
        for item in work():
            sender.send(item)
    except Exception as error:
        sender.send(JobError(f"{type(error).__name__}: {error}", traceback.format_exc()))
