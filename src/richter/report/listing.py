"""The list of runs, kept by a thread of its own: who asks waits for it a moment, and gets what is known by then."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from richter.core import RichterError, StoreError
from richter.instrument.verdict import diagnose
from richter.runs.place import DATABASE, LOCK, Stamp, held, is_lasting, stamp
from richter.runs.reader import paths

if TYPE_CHECKING:
    from richter.report.shelf import Shelf
    from richter.runs import Run

DEPTH = 3  # folders below the store that are looked into
FIRST, LATER = 2.0, 0.1  # seconds that one waits for the list: the first who asks, or of a small store; and others
OFTEN = 0.5  # seconds in which a list is shown again before it is looked at once more, of a store that takes long to look at
UNREAD = "not read yet"  # a status: it will be


@dataclass(frozen=True)
class Summary:
    """A line of the list of runs."""

    name: str
    mark: str  # differs when there is something new
    status: str  # running, finished, interrupted, failed, unreadable, not read yet, or the writer's own word
    reason: str = ""
    last: int | None = None
    updated: float | None = None
    progress: float | None = None  # 0 to 1, of one that is running and says so
    verdict: str | None = None  # the word, and the magnitude where there is one; None: not looked at yet


class Listing:
    """Lines by name. Each look goes through all runs: those whose files have not changed cost a look at these; others are read,
    those that were written last first, and at last their verdicts are told. What is known so far may be asked at any time."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self.lines: dict[str, Summary] = {}
        self.version = 0  # counts changes
        self._texts: dict[str, tuple[Summary, str]] = {}
        self._guard = threading.Lock()
        self._look: threading.Event | None = None  # set when the look that is going on has ended
        self._ended, self._took = 0.0, 0.0
        self._closed = False
        self._search_at, self._paths = 0.0, list[Path]()

    def known(self) -> list[Summary]:
        """Every run of the store, also those that cannot be read; of a large one, what is known by now."""
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
        """The lines as JSON; each is written once."""
        return f"[{','.join(map(self._written, self.known()))}]"

    def _written(self, line: Summary) -> str:
        known = self._texts.get(line.name)
        if known is None or known[0] is not line:
            known = self._texts[line.name] = line, json.dumps(asdict(line), allow_nan=False, separators=(",", ":"))
        return known[1]

    def close(self) -> None:
        self._closed = True

    def _go(self, look: threading.Event) -> None:
        begun = time.monotonic()
        try:
            self._through()
        finally:
            with self._guard:
                self._ended, self._look = time.monotonic(), None
                self._took = self._ended - begun
            look.set()

    def _through(self) -> None:
        there = {path.relative_to(self.shelf.store).as_posix(): path for path in self._search()}
        unread = []
        lines = dict[str, Summary]()
        for name, path in there.items():
            files, before = stamp(path / DATABASE), self.lines.get(name)
            mark = mark_of(files)
            same = before is not None and before.mark == mark and before.status != UNREAD
            if before is not None and same and (before.status != "running" or held(path / LOCK)):
                lines[name] = before
            else:
                unread.append(name)
                lines[name] = before or Summary(name, "", UNREAD, updated=_updated(files))
        if self.lines.keys() != lines.keys():
            self._publish(lines)
        for name in sorted(unread, key=lambda name: -(lines[name].updated or 0.0)):
            if not self._closed:
                self._say(self._read(name, there[name]))
        for line in [s for s in self.lines.values() if s.verdict is None]:
            if not self._closed:
                self._say(self._judged(line))

    def _publish(self, lines: dict[str, Summary]) -> None:
        self.lines, self.version = lines, self.version + 1

    def _say(self, line: Summary) -> None:
        if self.lines[line.name] != line:
            self.lines[line.name] = line  # no line more: who goes through them meanwhile is not disturbed
            self.version += 1

    def _search(self) -> list[Path]:
        """Not again at once, if the store is so large that looking through it takes long."""
        begun = time.monotonic()
        if begun >= self._search_at:
            self._paths = list(paths(self.shelf.store, DEPTH))
            self._search_at = time.monotonic() + 20 * (time.monotonic() - begun)
        return self._paths

    def _read(self, name: str, path: Path) -> Summary:
        files = stamp(path / DATABASE)  # before it is read: what is written meanwhile is seen at the next look
        try:
            with self.shelf.open(name) as run:
                status, _, reason = run.status.partition(": ")
                last = run.last
                if not isinstance(last, int | None):
                    raise StoreError(f"the run {name!r} is damaged: its last step is {last!r}.")
                share = _share(run) if status == "running" else None
                return Summary(name, mark_of(files), status, reason, last, _updated(files), share)
        except (StoreError, OSError) as why:  # read again when its files have changed, or at once if it may be the moment
            return Summary(name, mark_of(files) if is_lasting(why) else "", "unreadable", str(why))

    def _judged(self, s: Summary) -> Summary:
        """With its verdict: the word and the magnitude, or nothing, if it has none."""
        if s.status in (UNREAD, "unreadable"):
            return replace(s, verdict="")
        try:
            with self.shelf.open(s.name) as run:
                d = diagnose(run)
        except (RichterError, OSError):
            return replace(s, verdict="")
        return replace(s, verdict=f"{d.word}, magnitude {d.magnitude}" if d.magnitude else d.word)


def _share(run: Run) -> float | None:
    """How much is done, as its writer said; None if that is no share."""
    share = run.about.get("progress")
    return float(share) if isinstance(share, (int, float)) and 0 <= share <= 1 else None


# --------------------------------------------------------------------------------------------------- has it changed?

SETTLED = 2.0  # seconds; a file that changed more recently may change again without a new time of change


def mark_of(files: Stamp) -> str:
    """Something short that differs when the run has changed."""
    updated = _updated(files)
    fresh = time.monotonic() if abs(time.time() - updated) < SETTLED else None  # later: of another clock, or it was set back
    return hashlib.sha256(repr((files, fresh)).encode()).hexdigest()[:16]


def _updated(files: Stamp) -> float:
    """When something was last written."""
    return max(files)[0] / 1e9 if files else 0.0
