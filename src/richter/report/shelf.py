"""The runs of a store as the dashboard reads them: a few stay open, and files are read again only when they have changed."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

from richter.core import RichterError, SelectionError, StoreError
from richter.report.listing import Listing, RunSummary, mark_of
from richter.report.sweep import RunRow, row
from richter.runs import Run, inside
from richter.runs.place import DATABASE, stamp

Answer = TypeVar("Answer")
PATIENCE = 10.0  # seconds to wait for the file system of a run
# errors that reading a damaged file can raise
DAMAGE = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError, MemoryError, OSError,
          sqlite3.Error)


class _OpenRun:
    """A run that is open or is being opened."""

    def __init__(self) -> None:
        self.users, self.retired = 0, False
        self.run: Run | None = None

    def close(self) -> None:
        if self.run is not None:
            self.run.close()


class Turns:
    """Serialise access to each run's file system. If it does not answer, only the first request waits for it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._taken: dict[str, tuple[threading.Event, float]] = {}  # event set at the end of the turn, and the start time

    def __call__(self, name: str, work: Callable[[], Answer], apart: bool = False) -> Answer:
        """Run ``work`` for a run. ``apart``: use a separate thread, so that the wait can time out. Runs that are already open
        have answered before, and starting a thread would take longer than the work itself."""
        self._take(name)
        if not apart:
            try:
                return work()
            finally:
                self._give_back(name)
        result: Future[Answer] = Future()
        try:
            threading.Thread(target=self._go, args=(name, work, result), daemon=True, name="richter look").start()
        except BaseException:
            self._give_back(name)
            raise
        if not wait([result], PATIENCE).done:
            raise self._refusal(name)
        return result.result()

    def _go(self, name: str, work: Callable[[], Answer], result: Future[Answer]) -> None:
        try:
            result.set_result(work())
        except BaseException as why:
            result.set_exception(why)
        finally:
            self._give_back(name)

    def _take(self, name: str) -> None:
        """Wait for this run's turn; raise an error if the turn before has not ended in time."""
        while True:
            with self._guard:
                if name not in self._taken:
                    self._taken[name] = threading.Event(), time.monotonic()
                    return
                ended, begun = self._taken[name]
            if not ended.wait(max(0.0, begun + PATIENCE - time.monotonic())):
                raise self._refusal(name)

    def _give_back(self, name: str) -> None:
        """End the turn of a run."""
        with self._guard:
            self._taken.pop(name)[0].set()

    def _refusal(self, name: str) -> StoreError:
        """Make the error for a run whose file system does not answer."""
        why = StoreError(f"the run {name!r} cannot be looked at: its file system has not answered for {PATIENCE:.0f} seconds.")
        why.__cause__ = TimeoutError()
        return why


class Shelf:
    """Open runs of a store. Thread-safe. ``with shelf.open(name) as run``: at most ``most`` unused runs stay open."""

    def __init__(self, store: str | os.PathLike[str], most: int = 64) -> None:
        self.given, self.store, self.most = os.fspath(store), Path(store).resolve(), most
        self._guard = threading.Lock()
        self._open: OrderedDict[str, _OpenRun] = OrderedDict()
        self._turns = Turns()
        self.listing = Listing(self)

    # ------------------------------------------------------------------------------------------------------ one run

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[Run]:
        """Open a run of the store by its name. Every failure is a StoreError."""
        entry = self._take(name)
        try:
            with understood(name):
                yield self._turns(name, lambda: self._opened(name, entry), apart=entry.run is None)
        finally:
            self._give_back(name, entry)

    def _opened(self, name: str, entry: _OpenRun) -> Run:
        """Open run of an entry, opened again if its folder was replaced."""
        path = self.path(name)
        if entry.run is None or entry.run.path != path:
            entry.run = Run(path)
        return entry.run

    def path(self, name: str) -> Path:
        """Return the run's folder. Names cannot lead outside the store; the reader checks that the files inside are no links."""
        try:
            folder = inside(self.store, name)
            exists = (folder / DATABASE).is_file()
        except (ValueError, RuntimeError, OSError) as why:
            if isinstance(why, RichterError):
                raise
            raise StoreError(f"{name[:100]!r} cannot be the name of a run: {why}.") from why
        if not exists:
            raise StoreError(f"there is no run {name[:100]!r} in this store.")
        return folder

    def mark(self, name: str) -> str:
        """Return a short text that differs when the run has changed. It only reads file times and sizes."""
        with understood(name):
            return mark_of(self._turns(name, lambda: stamp(self.path(name) / DATABASE)))

    def _take(self, name: str) -> _OpenRun:
        """Entry of a run, with one more user; idle ones beyond the limit are closed."""
        with self._guard:
            entry = self._open.setdefault(name, _OpenRun())
            self._open.move_to_end(name)
            entry.users += 1
            idle = [n for n, e in self._open.items() if not e.users]
            for old in idle[:max(0, len(self._open) - self.most)]:
                self._retire(old)
            return entry

    def _retire(self, name: str) -> None:
        """Remove an entry, and close its run when nobody uses it."""
        entry = self._open.pop(name)
        entry.retired = True
        if not entry.users:
            entry.close()

    def _give_back(self, name: str, entry: _OpenRun) -> None:
        """Count one user less."""
        with self._guard:
            entry.users -= 1
            if entry.users:
                return
            if entry.retired:
                entry.close()
            elif entry.run is None:  # the run does not exist, or cannot be opened
                self._retire(name)

    def close(self) -> None:
        self.listing.close()
        with self._guard:
            for name in list(self._open):
                self._retire(name)

    def summaries(self) -> list[RunSummary]:
        """Return every run of the store, also unreadable ones."""
        return self.listing.known()


class Chosen:
    """The runs that a page shows. ``for name, run in runs`` keeps each open until the next one; ``one()`` is the only run."""

    def __init__(self, shelf: Shelf, names: Sequence[str]) -> None:
        self.names, self.current = list(names), ""
        self._shelf, self._stack = shelf, contextlib.ExitStack()

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[tuple[str, Run]]:
        for name in self.names:
            self._stack.close()
            self.current = name
            yield name, self._stack.enter_context(self._shelf.open(name))

    def one(self) -> tuple[str, Run]:
        """Name and run, if exactly one was chosen; otherwise raise an error."""
        if len(self.names) != 1:
            raise SelectionError(f"run= was given {len(self.names)} times; this address needs it once.")
        return next(iter(self))

    @property
    def mark(self) -> str:
        """Return a text that differs when one of the runs has changed, or, if no run is named, the list of runs. It only reads
        file times and sizes."""
        return repr([self._shelf.mark(name) for name in self.names]) if self.names else str(self._shelf.listing.version)

    def rows(self) -> list[RunRow]:
        """Return the rows of these runs for a table, of all runs if none is named. Runs that are not read yet are left out."""
        if self.names:
            return [row(name, run) for name, run in self]
        listing = self._shelf.listing
        return [listing.rows[s.name] for s in listing.known() if s.name in listing.rows]

    @property
    def total(self) -> int:
        """Number of these runs, of all runs if none is named."""
        return len(self.names) or len(self._shelf.listing.lines)

    def __enter__(self) -> Chosen:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@contextlib.contextmanager
def understood(name: str) -> Iterator[None]:
    """Turn errors from reading a damaged file into a StoreError."""
    try:
        yield
    except RichterError:
        raise
    except DAMAGE as why:
        raise StoreError(f"the run {name!r} is damaged: {type(why).__name__}: {why}.") from why
