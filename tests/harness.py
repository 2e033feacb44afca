"""Runs a function on several ranks over gloo and tells what became of each rank.

`run_ranks` starts fresh processes for one call; tests with many cases keep a `RankPool` (fixture `rank_pool`): its
processes and their process group serve one call after another and are replaced only where a rank has failed.

The function must live at the top level of a module (it travels to the ranks by name) and finds its rank with
`torch.distributed.get_rank()`; what it returns must be picklable.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_GRACE_SECONDS = 5.0  # for the other ranks to end once one has failed and the caller wants no report on them
_START_SECONDS = 120.0  # for importing torch and forming the process group on a busy machine
_DUMP_SIGNAL = signal.SIGUSR1

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["torchtitan.trainer", "torchtitan.models.llama3.config_registry", "slimpipe.torchtitan.train", "slimpipe"]
)


def fork(target: Callable, *args: Any, name: str) -> BaseProcess:
    """Start a process that has imported torch and torchtitan already, which otherwise costs every rank seconds.

    It is forked from one that all tests share: the target sets the environment, and variables that a library reads
    when it is imported come too late.
    """
    process = FORKS.Process(target=target, args=args, name=name, daemon=True)
    process.start()
    return process


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What became of one rank in one call.

    Exactly one of four states: `ok`; `error` (raised); `exit_code` (its process died); `stack` (killed on timeout).
    """

    rank: int
    value: Any = None
    """What the function returned."""
    error: str | None = None
    """The traceback, if the function raised."""
    exit_code: int | None = None
    """Exit code, if the process died by itself; -N means killed by signal N."""
    stack: str | None = None
    """Python stack of every thread, if the rank had not ended when the time was up."""
    seconds: float = 0.0
    """From the start of the call to this rank's end."""

    @property
    def ok(self) -> bool:
        return self.error is None and self.exit_code is None and self.stack is None

    def __str__(self) -> str:
        if self.error is not None:
            return f"rank {self.rank} raised after {self.seconds:.1f} s:\n{self.error}"
        if self.exit_code is not None:
            return f"rank {self.rank} died after {self.seconds:.1f} s with exit code {self.exit_code}"
        if self.stack is not None:
            return f"rank {self.rank} was killed after {self.seconds:.1f} s; it was at:\n{self.stack}"
        return f"rank {self.rank} returned {self.value!r}"


class RanksFailed(AssertionError):
    """At least one rank raised, died or hung; `results` holds every rank's outcome."""

    def __init__(self, results: list[RankResult]):
        # The earliest first: what the others say is often only that their peer has gone.
        failed = sorted((r for r in results if not r.ok), key=lambda r: (r.stack is not None, r.seconds))
        super().__init__("\n".join(["", *map(str, failed)]))
        self.results = results


def run_ranks(
    fn: Callable,
    world_size: int,
    *args: Any,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    backend: str = "gloo",
) -> list[Any]:
    """Run `fn(*args)` on `world_size` fresh ranks and return their results in rank order.

    Raises:
        RanksFailed: a rank raised, died, or was still running after `timeout` seconds; all ranks have ended by then.
    """
    with RankPool(world_size, env=env, backend=backend) as pool:
        return pool.run(fn, *args, timeout=timeout)


def run_ranks_outcomes(
    fn: Callable,
    world_size: int,
    *args: Any,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    backend: str = "gloo",
) -> list[RankResult]:
    """Like `run_ranks`, but never raises: for tests that make ranks fail. Every rank gets the whole `timeout`."""
    with RankPool(world_size, env=env, backend=backend) as pool:
        return pool.outcomes(fn, *args, timeout=timeout)


class RankPool:
    """`world_size` processes with one process group that run one function after another.

    Each process has one thread (OMP_NUM_THREADS=1, torch.set_num_threads(1)) and talks over the loopback address only.
    A test of what happens when a collective times out calls `torch.distributed.set_timeout` itself.

    Args:
        world_size: number of ranks.
        env: environment variables of the ranks, on top of this process's own.
        backend: of the default process group.
    """

    def __init__(self, world_size: int, *, env: Mapping[str, str] | None = None, backend: str = "gloo"):
        self.world_size = world_size
        self._env = dict(env or {})
        self._backend = backend
        self._folder: tempfile.TemporaryDirectory | None = None
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def run(self, fn: Callable, *args: Any, timeout: float = 60) -> list[Any]:
        """Run `fn(*args)` on every rank; see `run_ranks`."""
        results = self._call(fn, args, timeout, grace=_GRACE_SECONDS)
        if not all(result.ok for result in results):
            raise RanksFailed(results)
        return [result.value for result in results]

    def outcomes(self, fn: Callable, *args: Any, timeout: float = 60) -> list[RankResult]:
        """Run `fn(*args)` on every rank; see `run_ranks_outcomes`."""
        return self._call(fn, args, timeout, grace=timeout)

    def close(self) -> None:
        """End all ranks, by force if need be."""
        for pipe in self._pipes:
            pipe.close()  # an idle rank ends when its pipe closes
        for process in self._processes:
            process.join(timeout=_GRACE_SECONDS)
        self._kill()

    def _call(self, fn: Callable, args: tuple, timeout: float, *, grace: float) -> list[RankResult]:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            # A rank that died between two calls is found below, by its process.
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(pickle.dumps((fn, args, timeout)))
        results = self._collect(timeout, grace)
        if not all(result.ok for result in results):
            self._kill()
        return results

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        env = {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo" if os.uname().sysname == "Linux" else "lo0",
            "WORLD_SIZE": str(self.world_size),
            **self._env,
        }
        for rank in range(self.world_size):
            ours, theirs = FORKS.Pipe()
            own = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = fork(
                _serve, rank, self.world_size, self._backend, self._folder.name, own, theirs, name=f"rank{rank}"
            )
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        ready = self._collect(_START_SECONDS, grace=_GRACE_SECONDS)
        if not all(result.ok for result in ready):
            self._kill()
            raise RanksFailed(ready)

    def _collect(self, timeout: float, grace: float) -> list[RankResult]:
        """Wait for one message, or the death, of every rank."""
        start = time.monotonic()
        deadline = start + timeout
        waiting = set(range(self.world_size))
        results: dict[int, RankResult] = {}
        while waiting and (left := deadline - time.monotonic()) > 0:
            wait([self._pipes[r] for r in waiting] + [self._processes[r].sentinel for r in waiting], timeout=left)
            for rank in sorted(waiting):
                result = self._receive(rank, time.monotonic() - start)
                if result is not None:
                    results[rank] = result
                    waiting.remove(rank)
                    if not result.ok:
                        deadline = min(deadline, time.monotonic() + grace)
        for rank, stack in self._stacks(waiting).items():
            results[rank] = RankResult(rank=rank, stack=stack, seconds=time.monotonic() - start)
        return [results[rank] for rank in range(self.world_size)]

    def _receive(self, rank: int, seconds: float) -> RankResult | None:
        alive = self._processes[rank].is_alive()  # asked first: a message sent just before death is still read
        try:
            if self._pipes[rank].poll():
                outcome = pickle.loads(self._pipes[rank].recv_bytes())
                return RankResult(rank=rank, seconds=seconds, **outcome)
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(timeout=_GRACE_SECONDS)
            alive = False
        return None if alive else RankResult(rank=rank, exit_code=self._processes[rank].exitcode, seconds=seconds)

    def _stacks(self, ranks: set[int]) -> dict[int, str]:
        """Ask ranks for their Python stacks; works also while they are blocked outside Python."""
        if not ranks:
            return {}
        assert self._folder is not None
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid or 0, _DUMP_SIGNAL)
        time.sleep(0.5)
        return {rank: _stack_file(self._folder.name, rank).read_text() or "(no stack)" for rank in ranks}

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _serve(rank: int, world_size: int, backend: str, folder: str, env: Mapping[str, str], pipe: Connection) -> None:
    """Life of one rank: form the group, then run what comes through the pipe until it closes."""
    os.environ.update(env)
    gc.freeze()  # what was imported is never garbage, and is most of what there is to look through
    stack_file = _stack_file(folder, rank).open("w")
    faulthandler.register(_DUMP_SIGNAL, file=stack_file, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then ends its ranks

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()

    def form_group() -> None:
        import torch

        torch.set_num_threads(1)
        store = torch.distributed.FileStore(f"{folder}/store", world_size)
        torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size)

    pipe.send_bytes(_outcome(form_group))
    while True:
        try:
            call = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(_outcome(lambda call=call: _run(call)))


def _run(call: bytes) -> Any:
    import torch

    from slimpipe.torch_private import set_group_timeout

    fn, args, timeout = pickle.loads(call)
    # Later than ours, so that a hang always ends with the stacks of all ranks.
    set_group_timeout(torch.distributed.group.WORLD, timedelta(seconds=timeout + 30))
    torch.manual_seed(0)
    return fn(*args)


def _outcome(fn: Callable[[], Any]) -> bytes:
    try:
        # Plain pickle copies tensors; multiprocessing's own would share their memory with a process that may be gone.
        return pickle.dumps({"value": fn()})
    except BaseException:
        return pickle.dumps({"error": traceback.format_exc()})


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack{rank}.txt"
