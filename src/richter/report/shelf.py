"""The runs of a store as a dashboard sees them: found again and again, opened a few at a time, asked only if they changed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from richter.core import RichterError, SelectionError, StoreError
from richter.instrument.verdict import diagnose
from richter.runs import Run, inside
from richter.runs.format import DATABASE, LOCK
from richter.runs.lock import held
from richter.runs.reader import paths

DEPTH = 3  # folders below the store that are looked into
SETTLED = 2.0  # seconds; a file that changed more recently may change again without a new time of change
VERDICTS = 0.3  # seconds for the verdicts of runs that changed, each time the list is made; those left over come the next time
# in which reading a file that somebody has damaged can end
DAMAGE = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError, MemoryError, OSError,
          sqlite3.Error)


@dataclass(frozen=True)
class Summary:
    """A line of the list of runs."""

    name: str
    mark: str  # differs when there is something new
    status: str  # running, finished, interrupted, failed, unreadable, or the writer's own word
    reason: str = ""
    last: int | None = None
    updated: float | None = None
    progress: float | None = None  # 0 to 1, of one that is running and says so
    verdict: str | None = None  # the word, and the magnitude where there is one; None: not looked at yet


@dataclass
class _Entry:
    run: Run
    file: tuple[int, int]
    users: int = 0
    retired: bool = False


class Shelf:
    """Thread-safe. ``with shelf.open(name) as run``: at most ``most`` runs stay open that nobody reads."""

    def __init__(self, store: str | os.PathLike[str], most: int = 64) -> None:
        self.given, self.store, self.most = os.fspath(store), Path(store).resolve(), most
        self._guard = threading.Lock()
        self._open: OrderedDict[Path, _Entry] = OrderedDict()
        self._known: dict[str, Summary] = {}
        self._paths: list[Path] = []
        self._search_at = 0.0

    # ------------------------------------------------------------------------------------------------------ one run

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[Run]:
        """A run of the store by its name; whatever is wrong with it is a StoreError."""
        with understood(name):
            entry = self._take(self.path(name))
        try:
            with understood(name):
                yield entry.run
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
        return _seen(self.path(name))[0]

    def _take(self, path: Path) -> _Entry:
        status = os.stat(path / DATABASE)
        file = status.st_dev, status.st_ino
        with self._guard:
            entry = self._open.get(path)
            if entry is not None and entry.file != file:  # deleted, and another one made in its place
                self._retire(path)
                entry = None
            if entry is None:
                entry = self._open[path] = _Entry(Run(path), file)
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
            entry.run.close()

    def _give_back(self, entry: _Entry) -> None:
        with self._guard:
            entry.users -= 1
            if entry.retired and not entry.users:
                entry.run.close()

    def close(self) -> None:
        with self._guard:
            for path in list(self._open):
                self._retire(path)

    # ---------------------------------------------------------------------------------------------------- all of them

    def summaries(self) -> list[Summary]:
        """Every run of the store, also those that cannot be read. Those that have not changed cost a look at their files."""
        summaries = [self._summary(path) for path in self._search()]
        end = time.monotonic() + VERDICTS
        summaries = [s if s.verdict is not None or time.monotonic() > end else self._judged(s) for s in summaries]
        self._known = {s.name: s for s in summaries}
        return summaries

    def _judged(self, s: Summary) -> Summary:
        """With its verdict: the word and the magnitude, or nothing, if it has none."""
        try:
            with self.open(s.name) as run:
                d = diagnose(run)
        except (RichterError, OSError):
            return replace(s, verdict="")
        return replace(s, verdict=f"{d.word}, magnitude {d.magnitude}" if d.magnitude else d.word)

    def _search(self) -> list[Path]:
        """Not again at once, if the store is so large that looking through it takes long."""
        begun = time.monotonic()
        if begun >= self._search_at:
            self._paths = list(paths(self.store, DEPTH))
            self._search_at = time.monotonic() + 20 * (time.monotonic() - begun)
        return self._paths

    def _summary(self, path: Path) -> Summary:
        name = path.relative_to(self.store).as_posix()
        try:
            (mark, updated), known = _seen(path), self._known.get(name)
            if known is not None and known.mark == mark and (known.status != "running" or held(path / LOCK)):
                return known
            with self.open(name) as run:
                status, _, reason = run.status.partition(": ")
                last = run.last
                if not isinstance(last, int | None):
                    raise StoreError(f"the run {name!r} is damaged: its last step is {last!r}.")
                return Summary(name, mark, status, reason, last, updated, _share(run) if status == "running" else None)
        except (StoreError, OSError) as why:
            return Summary(name, "unreadable", "unreadable", str(why))


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


def _share(run: Run) -> float | None:
    """How much is done, as its writer said; None if that is no share."""
    share = run.about.get("progress")
    return float(share) if isinstance(share, (int, float)) and 0 <= share <= 1 else None


@contextlib.contextmanager
def understood(name: str) -> Iterator[None]:
    """A damaged file can hold anything anywhere; what goes wrong in reading it is said in a sentence."""
    try:
        yield
    except RichterError:
        raise
    except DAMAGE as why:
        raise StoreError(f"the run {name!r} is damaged: {type(why).__name__}: {why}.") from why


def _seen(path: Path) -> tuple[str, float]:
    """The mark of a run, and when something was last written."""
    files = []
    for name in (DATABASE, f"{DATABASE}-wal"):
        with contextlib.suppress(FileNotFoundError):
            s = os.stat(path / name)
            files += [(s.st_mtime_ns, s.st_size, s.st_ino)] if s.st_size else []  # a reader may leave an empty log behind
    updated = max(files)[0] / 1e9 if files else 0.0
    fresh = time.monotonic() if time.time() - updated < SETTLED else None
    return hashlib.sha256(repr((files, fresh)).encode()).hexdigest()[:16], updated
