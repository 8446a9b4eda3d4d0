"""The runs of a store as a dashboard sees them: found again and again, opened a few at a time, asked only if they changed."""

from __future__ import annotations

import contextlib
import os
import queue
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from richter.core import RichterError, SelectionError, StoreError
from richter.report.listing import Listing, Summary, facts_of, mark_of
from richter.runs import Run, inside
from richter.runs.format import DATABASE

Answer = TypeVar("Answer")
PATIENCE = 10.0  # seconds that one waits for a run to open
# in which reading a file that somebody has damaged can end
DAMAGE = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError, MemoryError, OSError,
          sqlite3.Error)


class _Entry:
    """A run that is open, or about to be: whoever comes first opens it, the others wait for that."""

    def __init__(self, path: Path, file: tuple[int, int]) -> None:
        self.path, self.file = path, file
        self.users, self.retired = 0, False
        self._run: Run | None = None
        self._opening = threading.Lock()

    @property
    def run(self) -> Run:
        if not self._opening.acquire(timeout=PATIENCE):
            raise StoreError(f"the run {self.path} does not open: somebody else has been waiting for it for {PATIENCE:.0f} s.")
        try:
            if self._run is None:
                self._run = in_time(lambda: Run(self.path), f"the run {self.path} does not open")
            return self._run
        finally:
            self._opening.release()

    def close(self) -> None:
        if self._run is not None:
            self._run.close()


def in_time(work: Callable[[], Answer], what: str) -> Answer:
    """What is worked out, in a thread of its own: a file system that does not answer keeps nobody else waiting for ever."""
    results: queue.SimpleQueue[tuple[Answer | None, BaseException | None]] = queue.SimpleQueue()

    def go() -> None:
        try:
            results.put((work(), None))
        except BaseException as why:
            results.put((None, why))

    threading.Thread(target=go, daemon=True, name="richter open").start()
    try:
        answer, why = results.get(timeout=PATIENCE)
    except queue.Empty:
        raise StoreError(f"{what}: its file system has not answered for {PATIENCE:.0f} seconds.") from None
    if why is not None:
        raise why
    return answer  # type: ignore[return-value]


class Shelf:
    """Thread-safe. ``with shelf.open(name) as run``: at most ``most`` runs stay open that nobody reads."""

    def __init__(self, store: str | os.PathLike[str], most: int = 64) -> None:
        self.given, self.store, self.most = os.fspath(store), Path(store).resolve(), most
        self._guard = threading.Lock()
        self._open: OrderedDict[Path, _Entry] = OrderedDict()
        self.listing = Listing(self)

    # ------------------------------------------------------------------------------------------------------ one run

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[Run]:
        """A run of the store by its name; whatever is wrong with it is a StoreError."""
        with understood(name):
            entry = self._take(self.path(name))
        try:
            with understood(name):
                yield entry.run  # opened here, and not while others wait for the shelf
        finally:
            self._give_back(entry)

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
        return mark_of(facts_of(self.path(name)))

    def _take(self, path: Path) -> _Entry:
        status = os.stat(path / DATABASE)
        file = status.st_dev, status.st_ino
        with self._guard:
            entry = self._open.get(path)
            if entry is not None and entry.file != file:  # deleted, and another one made in its place
                self._retire(path)
                entry = None
            if entry is None:
                entry = self._open[path] = _Entry(path, file)
            self._open.move_to_end(path)
            entry.users += 1
            idle = [p for p, e in self._open.items() if not e.users]
            for old in idle[:max(0, len(self._open) - self.most)]:
                self._retire(old)
            return entry

    def _retire(self, path: Path) -> None:
        entry = self._open.pop(path)
        entry.retired = True
        if not entry.users:
            entry.close()

    def _give_back(self, entry: _Entry) -> None:
        with self._guard:
            entry.users -= 1
            if entry.retired and not entry.users:
                entry.close()

    def close(self) -> None:
        self.listing.close()
        with self._guard:
            for path in list(self._open):
                self._retire(path)

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
