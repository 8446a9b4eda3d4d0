"""The runs of a store as a dashboard sees them: found again and again, opened a few at a time, asked only if they changed."""

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
from richter.report.listing import Listing, Summary, mark_of
from richter.runs import Run, inside
from richter.runs.place import DATABASE, stamp

Answer = TypeVar("Answer")
PATIENCE = 10.0  # seconds that one waits for the file system of a run
# in which reading a file that somebody has damaged can end
DAMAGE = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError, MemoryError, OSError,
          sqlite3.Error)


class _Entry:
    """A run that is open, or about to be."""

    def __init__(self) -> None:
        self.users, self.retired = 0, False
        self.run: Run | None = None

    def close(self) -> None:
        if self.run is not None:
            self.run.close()


class Turns:
    """Who asks the file system about a run, one at a time: where it does not answer, nobody else is sent after the first."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._taken: dict[str, tuple[threading.Event, float]] = {}  # set when the turn has ended, and when it began

    def __call__(self, name: str, work: Callable[[], Answer], apart: bool = False) -> Answer:
        """``apart``: in a thread of its own, for which nobody waits for ever. Others have been answered before; to start a thread
        would take longer than what they ask."""
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
        while True:
            with self._guard:
                if name not in self._taken:
                    self._taken[name] = threading.Event(), time.monotonic()
                    return
                ended, begun = self._taken[name]
            if not ended.wait(max(0.0, begun + PATIENCE - time.monotonic())):
                raise self._refusal(name)

    def _give_back(self, name: str) -> None:
        with self._guard:
            self._taken.pop(name)[0].set()

    def _refusal(self, name: str) -> StoreError:
        why = StoreError(f"the run {name!r} cannot be looked at: its file system has not answered for {PATIENCE:.0f} seconds.")
        why.__cause__ = TimeoutError()
        return why


class Shelf:
    """Thread-safe. ``with shelf.open(name) as run``: at most ``most`` runs stay open that nobody reads."""

    def __init__(self, store: str | os.PathLike[str], most: int = 64) -> None:
        self.given, self.store, self.most = os.fspath(store), Path(store).resolve(), most
        self._guard = threading.Lock()
        self._open: OrderedDict[str, _Entry] = OrderedDict()
        self._turns = Turns()
        self.listing = Listing(self)

    # ------------------------------------------------------------------------------------------------------ one run

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[Run]:
        """A run of the store by its name; whatever is wrong with it is a StoreError."""
        entry = self._take(name)
        try:
            with understood(name):
                yield self._turns(name, lambda: self._opened(name, entry), apart=entry.run is None)
        finally:
            self._give_back(name, entry)

    def _opened(self, name: str, entry: _Entry) -> Run:
        path = self.path(name)
        if entry.run is None or entry.run.path != path:
            entry.run = Run(path)
        return entry.run

    def path(self, name: str) -> Path:
        """Its folder, which lies in the store: names do not lead out. That the files in it are no links, the reader sees to."""
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
        """Something short that differs when the run has changed; asks the file system only."""
        with understood(name):
            return mark_of(self._turns(name, lambda: stamp(self.path(name) / DATABASE)))

    def _take(self, name: str) -> _Entry:
        with self._guard:
            entry = self._open.setdefault(name, _Entry())
            self._open.move_to_end(name)
            entry.users += 1
            idle = [n for n, e in self._open.items() if not e.users]
            for old in idle[:max(0, len(self._open) - self.most)]:
                self._retire(old)
            return entry

    def _retire(self, name: str) -> None:
        entry = self._open.pop(name)
        entry.retired = True
        if not entry.users:
            entry.close()

    def _give_back(self, name: str, entry: _Entry) -> None:
        with self._guard:
            entry.users -= 1
            if entry.users:
                return
            if entry.retired:
                entry.close()
            elif entry.run is None:  # there is no such run, or it does not open
                self._retire(name)

    def close(self) -> None:
        self.listing.close()
        with self._guard:
            for name in list(self._open):
                self._retire(name)

    def summaries(self) -> list[Summary]:
        """Every run of the store, also those that cannot be read."""
        return self.listing.known()


class Chosen:
    """The runs that a page shows: ``for name, run in runs``, each open until the next one; or the only one of them."""

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
        if len(self.names) != 1:
            raise SelectionError(f"run= was given {len(self.names)} times; this address needs it once.")
        return next(iter(self))

    @property
    def mark(self) -> str:
        """Differs when one of them has changed; asks the file system only."""
        return repr([self._shelf.mark(name) for name in self.names])

    def __enter__(self) -> Chosen:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@contextlib.contextmanager
def understood(name: str) -> Iterator[None]:
    """A damaged file can hold anything anywhere; what goes wrong in reading it is said in a sentence."""
    try:
        yield
    except RichterError:
        raise
    except DAMAGE as why:
        raise StoreError(f"the run {name!r} is damaged: {type(why).__name__}: {why}.") from why
