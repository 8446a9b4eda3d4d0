"""Worker processes that share a list of tasks. A worker that dies fails its own task only, and another worker replaces it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from richter.core import RichterError


class EngineError(RichterError, RuntimeError):
    """Error of the engine itself: work could not be started."""


class Pool:
    """A pool of ``count`` worker processes that divide the cores among them."""

    def __init__(self, count: int) -> None:
        self._spawn = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        self._cores = max(1, (os.cpu_count() or 1) // count)
        self._count = count
        self._all: dict[Connection, multiprocessing.process.BaseProcess] = {}
        self._ready: set[Connection] = set()

    def run(self, work: Callable[..., str | None], tasks: Sequence[tuple[Any, ...]],
            advance: Callable[[Path, float], None]) -> Iterator[tuple[Path, str]]:
        """Run ``work(*task, listener)`` in any worker; yield (path of the task, error or "") as tasks end."""
        left = list(reversed(tasks))
        busy: dict[Connection, Any] = {self._started(): None for _ in range(self._count)}  # its task, if it has one
        while left or any(task is not None for task in busy.values()):
            for pipe in [p for p, task in busy.items() if task is None and left]:
                busy[pipe] = left.pop()
                pipe.send((work, busy[pipe]))
            for ready in wait([p for p, task in busy.items() if task is not None]):
                pipe = next(p for p in busy if p is ready)
                path = busy[pipe][2]
                try:
                    kind, message = pipe.recv()
                except (EOFError, ConnectionResetError):
                    if pipe not in self._ready:
                        raise EngineError("the workers could not start (their messages are above). A script that uses workers "
                                          "guards its own work by `if __name__ == '__main__':`.") from None
                    process = self._all.pop(pipe)
                    process.join()
                    del busy[pipe]
                    busy[self._started()] = None
                    yield path, f"its process ended ({_ending(process.exitcode)}); run it again to resume"
                    continue
                if kind == "ready":
                    self._ready.add(pipe)
                elif kind == "share":
                    advance(path, message)
                else:
                    busy[pipe] = None
                    yield path, message or ""

    def _started(self) -> Connection:
        """Start a worker and return the pipe to it."""
        mine, theirs = self._spawn.Pipe()
        process = self._spawn.Process(target=_loop, args=(theirs,))
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = str(self._cores)  # read once, when the child loads its libraries
        try:
            process.start()
        finally:
            os.environ.pop("OMP_NUM_THREADS") if before is None else os.environ.update(OMP_NUM_THREADS=before)
        theirs.close()
        self._all[mine] = process
        return mine

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for pipe, process in self._all.items():
            pipe.close()
            if kind is not None:
                process.terminate()
            process.join()


def _loop(pipe: Connection) -> None:
    """Do tasks from the pipe until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and ends us
    pipe.send(("ready", None))
    while True:
        try:
            work, task = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        pipe.send(("done", work(*task, lambda share: pipe.send(("share", share)))))


def _ending(code: int | None) -> str:
    """Return how a process ended, in words."""
    return f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
