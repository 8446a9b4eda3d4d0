"""The dashboard's list of runs, updated by its own thread: a request waits briefly and gets what is known by then."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from richter.core import RichterError, StoreError
from richter.report.sweep import RunRow, row
from richter.runs.place import DATABASE, LOCK, Stamp, held, is_lasting, stamp
from richter.runs.reader import paths

if TYPE_CHECKING:
    from richter.report.shelf import Shelf
    from richter.runs import Run

DEPTH = 3  # levels of folders that are searched below the store
FIRST, LATER = 2.0, 0.1  # seconds a request waits for the list: the first request or a small store, and all others
OFTEN = 0.5  # seconds for which the list of a slow store is reused before the store is searched again
UNREAD = "not read yet"  # a status: the run will be read later


@dataclass(frozen=True)
class RunSummary:
    """A line of the list of runs."""

    name: str
    mark: str  # changes when the run has new data
    status: str  # running, finished, interrupted, failed, unreadable, not read yet, or the writer's own word
    reason: str = ""
    last: int | None = None
    updated: float | None = None
    progress: float | None = None  # 0 to 1, for a running run that reports it
    verdict: str | None = None  # its word, with the magnitude if there is one; None: not computed yet


class Listing:
    """The lines of the list, by name. Each scan goes through all runs. Runs with unchanged files are not read again; the others
    are read, most recently written first, and verdicts come last. Requests get the lines known so far."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self.lines: dict[str, RunSummary] = {}
        self.rows: dict[str, RunRow] = {}  # of the runs whose verdicts are known
        self.version = 0  # counts changes
        self._texts: dict[str, tuple[RunSummary, str]] = {}
        self._guard = threading.Lock()
        self._look: threading.Event | None = None  # set when the running scan ends
        self._ended, self._took = 0.0, 0.0
        self._closed = False
        self._search_at, self._paths = 0.0, list[Path]()

    def known(self) -> list[RunSummary]:
        """Return every run of the store, also unreadable ones; for a large store, the runs known so far."""
        with self._guard:
            if self._look is None and (self._took < LATER or time.monotonic() - self._ended > OFTEN):
                self._look = threading.Event()
                threading.Thread(target=self._go, args=(self._look,), daemon=True, name="richter list of runs").start()
            small = self._ended > 0 and self._took < LATER
            look, wait = self._look, FIRST if small or not self.lines else LATER
        if look is not None:
            look.wait(wait)
        return list(self.lines.values())

    def text(self) -> str:
        """Return the lines as JSON; each line is encoded once."""
        return f"[{','.join(map(self._written, self.known()))}]"

    def _written(self, line: RunSummary) -> str:
        """Line of a run as JSON, cached until the run changes."""
        cached = self._texts.get(line.name)
        if cached is None or cached[0] is not line:
            cached = self._texts[line.name] = line, json.dumps(asdict(line), allow_nan=False, separators=(",", ":"))
        return cached[1]

    def close(self) -> None:
        self._closed = True

    def _go(self, look: threading.Event) -> None:
        """Search the folder once, and note how long it took."""
        begun = time.monotonic()
        try:
            self._through()
        finally:
            with self._guard:
                self._ended, self._look = time.monotonic(), None
                self._took = self._ended - begun
            look.set()

    def _through(self) -> None:
        """Read the lines of all runs that have changed."""
        run_paths = {path.relative_to(self.shelf.store).as_posix(): path for path in self._search()}
        unread = []
        lines = dict[str, RunSummary]()
        for name, path in run_paths.items():
            files, before = stamp(path / DATABASE), self.lines.get(name)
            mark = mark_of(files)
            same = before is not None and before.mark == mark and before.status != UNREAD
            if before is not None and same and (before.status != "running" or held(path / LOCK)):
                lines[name] = before
            else:
                unread.append(name)
                lines[name] = before or RunSummary(name, "", UNREAD, updated=_updated(files))
        if self.lines.keys() != lines.keys():
            self._publish(lines)
        for name in sorted(unread, key=lambda name: -(lines[name].updated or 0.0)):
            if not self._closed:
                self._say(self._read(name, run_paths[name]))
        for line in [s for s in self.lines.values() if s.verdict is None]:
            if not self._closed:
                self._say(self._judged(line))

    def _publish(self, lines: dict[str, RunSummary]) -> None:
        """Replace all lines."""
        self.lines, self.version = lines, self.version + 1

    def _say(self, line: RunSummary) -> None:
        """Replace one line if it has changed."""
        if self.lines[line.name] != line:
            self.lines[line.name] = line  # replaces a line and adds none, so that concurrent iteration is safe
            self.version += 1

    def _search(self) -> list[Path]:
        """Search the store for runs, but not more often than its size allows."""
        begun = time.monotonic()
        if begun >= self._search_at:
            self._paths = list(paths(self.shelf.store, DEPTH))
            self._search_at = time.monotonic() + 20 * (time.monotonic() - begun)
        return self._paths

    def _read(self, name: str, path: Path) -> RunSummary:
        """Read the line of one run."""
        files = stamp(path / DATABASE)  # taken before reading, so that later writes are noticed at the next scan
        try:
            with self.shelf.open(name) as run:
                status, _, reason = run.status.partition(": ")
                last = run.last
                if not isinstance(last, int | None):
                    raise StoreError(f"the run {name!r} is damaged: its last step is {last!r}.")
                share = _share(run) if status == "running" else None
                return RunSummary(name, mark_of(files), status, reason, last, _updated(files), share)
        except (StoreError, OSError) as why:  # read again when its files have changed, or at once if the failure may be momentary
            return RunSummary(name, mark_of(files) if is_lasting(why) else "", "unreadable", str(why))

    def _judged(self, s: RunSummary) -> RunSummary:
        """Add the verdict: its word and the magnitude, or an empty text if the run has none."""
        if s.status in (UNREAD, "unreadable"):
            return replace(s, verdict="")
        try:
            with self.shelf.open(s.name) as run:
                r = self.rows[s.name] = row(s.name, run)
        except (RichterError, OSError):
            return replace(s, verdict="")
        return replace(s, verdict=f"{r.verdict}, magnitude {r.magnitude}" if r.magnitude else r.verdict)


def _share(run: Run) -> float | None:
    """Share of the work that is done, as reported by the run's writer; None if the number is invalid."""
    share = run.about.get("progress")
    return float(share) if isinstance(share, (int, float)) and 0 <= share <= 1 else None


# --------------------------------------------------------------------------------------------------- has it changed?

SETTLED = 2.0  # seconds; a file changed more recently may change again without a new time stamp


def mark_of(files: Stamp) -> str:
    """Return a short text that differs when the run has changed."""
    updated = _updated(files)
    # a time far away comes from another clock, or the clock was set back
    fresh = time.monotonic() if abs(time.time() - updated) < SETTLED else None
    return hashlib.sha256(repr((files, fresh)).encode()).hexdigest()[:16]


def _updated(files: Stamp) -> float:
    """Time of the last write."""
    return max(files)[0] / 1e9 if files else 0.0
