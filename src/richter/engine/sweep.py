"""Sweeps: one function, a list of settings, and a run on disk for each. An interrupted sweep resumes where it stopped."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import pickle
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from richter.core import RichterError, SelectionError, StoreError
from richter.core.values import progress
from richter.engine.workers import Pool
from richter.runs import Run, Writer, create
from richter.runs.format import plain, worded

Work = Callable[[Any, Writer], Mapping[str, ArrayLike] | None]


@dataclass(frozen=True)
class Outcome:
    """Result of one task: its settings, its run, and the error message if it did not finish."""

    settings: Any
    path: Path
    error: str | None = None

    @property
    def run(self) -> Run:
        """Run of the task on disk."""
        return Run(self.path)


def sweep(work: Work, settings: Sequence[Any], store: str | Path, *, workers: int = 1, fresh: bool = False, key: str = "",
          title: str = "sweep") -> list[Outcome]:
    """Do ``work(settings, run)`` for each of the settings and keep the arrays that it returns in a run of its own.

    >>> richter.engine.sweep(train, [Settings(lr=lr) for lr in (0.1, 0.3)], "runs/lr", workers=2)

    Each task has a folder in ``store``, named by its settings and ``key``. A finished task is not run again, unless
    ``fresh``. An interrupted task is resumed with its ``run``. A task that fails does not stop the others. With more than one
    worker each worker is a process, and ``work`` must be a function of a module."""
    if workers < 1:
        raise SelectionError(f"workers={workers}: use at least one.")
    if not settings:
        raise SelectionError("this sweep has no task: give it at least one setting.")
    _check(work, settings, workers)
    paths = [Path(store) / name_of(work, s, key) for s in settings]
    if len(set(paths)) < len(paths):
        raise SelectionError("two tasks of this sweep have the same settings: the same work would be done twice for one result.")
    due = [(s, path) for s, path in zip(settings, paths, strict=True) if fresh or not finished(path)]
    errors: dict[Path, str] = {}
    with _bar(title, len(settings), len(settings) - len(due)) as advance:
        if workers == 1:
            for s, path in due:
                errors[path] = attempt(work, s, path, fresh, partial(advance, path)) or ""
                advance(path, 1.0)
        elif due:
            with Pool(min(workers, len(due))) as pool:
                for path, error in pool.run(attempt, [(work, s, path, fresh) for s, path in due], advance):
                    errors[path] = error
                    advance(path, 1.0)
    return [Outcome(s, path, errors.get(path) or None) for s, path in zip(settings, paths, strict=True)]


def attempt(work: Work, settings: Any, path: Path, fresh: bool, listener: Callable[[float], None]) -> str | None:
    """Do one task in this process; return None, or the reason why its run is marked as failed."""
    begun, cpu = time.perf_counter(), time.process_time()
    _forget_peak()
    try:
        run = create(path, settings, resume=True)
    except StoreError as why:
        return str(why)
    run.listener = listener
    try:
        with run:
            if fresh:
                run.clear()
            try:
                run.arrays(dict(work(settings, run) or {}))
            except (Exception, SystemExit):
                run.describe(traceback=traceback.format_exc())
                raise
            run.describe(done=True, seconds=time.perf_counter() - begun, cpu_seconds=time.process_time() - cpu, memory=_peak())
    except (Exception, SystemExit) as why:  # a task that ends its process ends itself, and no other
        return str(why) if isinstance(why, RichterError) else worded(why)
    return None


def name_of(work: Work, settings: Any, key: str = "") -> str:
    """Return the folder name of a task: its plain settings for people, and a digest of the function, all settings and the
    key."""
    record = plain(settings)
    identity = json.dumps([work.__module__, work.__qualname__, type(settings).__name__, record, key], sort_keys=True)
    shown = "-".join(f"{k}{v}" for k, v in record.items() if isinstance(v, (int, float, str))) if isinstance(record, dict) else ""
    readable = re.sub(r"[^A-Za-z0-9.,=_-]", "", shown)[:48].strip(".-")
    return f"{readable}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}".lstrip("-")


def finished(path: Path) -> bool:
    """Return whether the work of this run returned. A run that was only closed in good order does not count."""
    try:
        return Run(path).about.get("done") is True
    except StoreError:
        return False


def _check(work: Work, settings: Sequence[Any], workers: int) -> None:
    """Raise if the work cannot be handed to another process, before any process is started."""
    if not inspect.isfunction(work):
        raise SelectionError(f"work is a {type(work).__name__}; use a function of a module: its name identifies finished tasks.")
    if workers == 1:
        return
    main = sys.modules.get("__main__")
    if work.__module__ == "__main__" and not hasattr(main, "__file__"):
        raise SelectionError(f"workers={workers}: other processes cannot import {work.__name__}, which was defined in a notebook "
                             f"or at a prompt. Move it to a file, or use workers=1.")
    try:
        pickle.dumps((work, list(settings)))  # to our own children, over a pipe
    except Exception as why:
        raise SelectionError(f"workers={workers}: {work.__qualname__} or its settings cannot be handed to another process "
                             f"({why}). Use a function and a dataclass of a module, or workers=1.") from why


@contextlib.contextmanager
def _bar(title: str, tasks: int, done: int) -> Iterator[Callable[[Path, float], None]]:
    """Show one progress bar for all tasks; each task moves it by the share of its work that is done."""
    shares: dict[Path, float] = {}
    form = "{desc}: {percentage:3.0f}%|{bar}| {n:.1f}/{total} tasks [{elapsed}<{remaining}]"
    with progress(title=title, total=tasks, initial=done, bar_format=form) as bar:
        def advance(path: Path, share: float) -> None:
            before = shares.get(path, 0.0)
            shares[path] = max(before, min(share, 1.0))
            bar.update(shares[path] - before)
        yield advance


def _forget_peak() -> None:
    """Reset the peak memory of this process, so that the next peak belongs to the next task. Only Linux can do this."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    """Return the peak memory of this process in bytes, or 0 if the system does not report it."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
