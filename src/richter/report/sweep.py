"""One table of many runs: the settings that differ, the last values, the verdicts. `richter runs`, `richter doctor FOLDER` and
the dashboard show it.

>>> t = table({run.name: run for run in richter.runs.find("runs/lr")})
>>> print(t.by("magnitude")); t.points("magnitude", "lr"); t.plot("magnitude", "lr")
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from richter.core import WHOLE, Failure, Mark, RichterError, SelectionError, unknown
from richter.core.values import table as aligned
from richter.core.values import visible
from richter.instrument.training import LOSSES
from richter.instrument.verdict import diagnose
from richter.measures.delay import TEST, TRAIN
from richter.report import plotdata
from richter.report.names import shortened
from richter.runs import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The final values in the columns "loss" and "accuracy": of these names, the one that most runs have; of several, the first.
LOSS = (*LOSSES, "train/loss", "probe_loss")
ACCURACY = (*TEST, "test/accuracy", "val/accuracy", "accuracy", "acc", *TRAIN, "probe_accuracy")
MAGNITUDE = "magnitude"
OWN = "settings."  # before the name of a setting that is also the name of a final value
LONGEST, WIDEST = 60, 22  # characters of a name and of a setting in a table


@dataclass(frozen=True)
class RunRow:
    """One run of the table."""

    run: str
    status: str
    last: int | None = None  # last step
    measured: int = 0  # number of measurements
    layers: int = 0  # that are measured
    begun: float | None = None
    settings: Mapping[str, str] = field(default_factory=dict)  # all of them, by dotted names
    finals: Mapping[str, float] = field(default_factory=dict)  # see ``finals``
    verdict: str = ""  # the word
    sentence: str = ""
    magnitude: str = ""  # with its error
    failures: tuple[Failure, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the record for machines; a run that could not be read has its name and the reason alone."""
        if self.begun is None:
            return {"run": self.run, "status": self.status}
        return {**asdict(self), "failures": [{**f.to_json(), "text": str(f)} for f in self.failures]}


def row(name: str, run: Run) -> RunRow:
    """Read the row of one run."""
    sessions = run.sessions
    base = RunRow(name, run.status, run.last, len(run.steps), len([k for k in run.layers if k != WHOLE]),
                  sessions[0].begun if sessions else 0.0, plotdata.flat(run.settings), finals(run),
                  failures=tuple(run.failures))
    try:
        d = diagnose(run)
    except SelectionError:  # nothing has been measured yet
        return base
    # the magnitude of a training that failed says nothing
    values = {k: v for k, v in base.finals.items() if k != MAGNITUDE or d.magnitude is not None}
    return replace(base, finals=values, verdict=d.word, sentence=d.verdict, magnitude=str(d.magnitude or ""))


def finals(run: Run) -> dict[str, float]:
    """Return the last value of each scalar, of each measure of the whole model, and of each single number that was returned by
    the task of a sweep, by name."""
    last = run.ends[-1:]
    measured = {r.measure: r.value for s in last for r in s.rows
                if r.layer == WHOLE and math.isfinite(r.value) and r.mark is not Mark.TRIVIAL}
    logged = {n: float(s.value[-1]) for n, s in run.scalar_curves(run.scalar_names).items() if len(s.value)}
    return {**measured, **logged, **returned(run)}


def returned(run: Run) -> dict[str, float]:
    """Return the single numbers among the arrays of a run; the task of a sweep returns them."""
    names = dict.fromkeys(name for layer, name, _ in run.arrays if layer == WHOLE)
    numbers = {}
    for name in names:
        if math.prod(run.shape(name)) == 1:
            value = run.array(name).reshape(-1)[0]
            if not isinstance(value, complex):
                numbers[name] = float(value)
    return numbers


def read(name: str, path: Path) -> RunRow:
    """Open a run for its row. If it cannot be read, the row says why."""
    try:
        run = Run(path)
        try:
            return row(name, run)
        finally:
            run.close()
    except RichterError as why:
        return RunRow(name, f"unreadable: {why}")


def table(runs: Mapping[str, Run]) -> SweepTable:
    """Make the table of several runs."""
    return SweepTable(tuple(row(name, run) for name, run in runs.items()))


@dataclass(frozen=True)
class SweepTable:
    """Rows, and the columns that follow from them."""

    rows: tuple[RunRow, ...]

    @property
    def settings(self) -> list[str]:
        """Names of the settings that differ, those that most runs have first; ``settings.lr`` if ``lr`` is a final value too."""
        differ, _ = plotdata.differences([r.settings for r in self.rows if r.settings])
        values = self.values
        order = sorted(differ, key=lambda name: sum(not v for v in differ[name]))
        return [f"{OWN}{name}" if name in values else name for name in order]

    @property
    def values(self) -> list[str]:
        """Names of all final values."""
        return list(dict.fromkeys(name for r in self.rows for name in r.finals))

    @property
    def loss(self) -> str | None:
        """Name of the loss that most runs have; None if no run has one."""
        return self._most(LOSS)

    @property
    def accuracy(self) -> str | None:
        """Name of the accuracy that most runs have; None if no run has one."""
        return self._most(ACCURACY)

    def _most(self, names: Iterable[str]) -> str | None:
        """The name that most runs have; None if no run has any."""
        counts = Counter(name for r in self.rows for name in r.finals)
        best = max(names, key=lambda name: counts[name])  # the first of several
        return best if counts[best] else None

    @property
    def columns(self) -> list[str]:
        """Names of the columns: run, status, last step, settings that differ, loss, accuracy, magnitude, verdict."""
        scores = [name for name in (self.loss, self.accuracy) if name]
        return ["run", "status", "step", *self.settings, *scores, MAGNITUDE, "verdict"]

    def value(self, r: RunRow, column: str) -> float | str | None:
        """Return a cell: a number where it is one; None where the run has none."""
        if column == "step":
            return r.last
        if column == "status":
            return r.status.partition(":")[0]
        if column in ("run", "verdict"):
            return getattr(r, column) or None
        if column in r.finals:
            return r.finals[column]
        return number_or_text(r.settings.get(column) or r.settings.get(column.removeprefix(OWN)))

    def by(self, column: str = "run", reverse: bool = False) -> SweepTable:
        """Sort by a column: numbers first, then words; runs without a value are last."""
        known = ("run", "status", "step", MAGNITUDE, "verdict", *self.settings, *self.values)
        if column not in known and not any(column in r.settings for r in self.rows):
            raise unknown("this table", "column", column, known)
        have, lack = (([r for r in self.rows if (self.value(r, column) is not None) is there]) for there in (True, False))
        return SweepTable((*sorted(have, key=lambda r: _key(self.value(r, column)), reverse=reverse), *lack))

    def cell(self, r: RunRow, column: str) -> str:
        """Write a cell."""
        if column == MAGNITUDE:
            return r.magnitude
        v = self.value(r, column)
        if v is None:
            return ""
        return shortened(f"{v:.4g}" if isinstance(v, float) else str(v), LONGEST if column == "run" else WIDEST)

    def points(self, value: str, setting: str) -> list[tuple[float | str, float, str]]:
        """Return (setting, final value, run) of every run that has both, sorted by the setting; a final value may stand in for
        the setting."""
        for name in (value, setting):
            if not any(self.value(r, name) is not None for r in self.rows):
                missing = unknown("this table", "column", name, [*self.settings, *self.values])
                raise missing if self.settings else SelectionError(f"{missing} These runs differ in no setting: give each its "
                                                                   f"own, Observer(..., run=..., settings={{'lr': 0.1}}).")
        pairs = [(x, y, r.run) for r in self.rows for x, y in [(self.value(r, setting), self.value(r, value))]
                 if x is not None and isinstance(y, (int, float)) and math.isfinite(y)]
        return sorted(pairs, key=lambda p: _key(p[0]))

    def text(self, width: int | None = None) -> str:
        """Write the table; with a ``width``, as many settings as it has room for, and the names of those left out."""
        columns, dropped = self.columns, list[str]()
        while True:
            lines = [[visible(c, lines=False) for c in columns],
                     *([visible(self.cell(r, c), lines=False) for c in columns] for r in self.rows)]
            text = aligned(lines, right=range(2, len(columns) - 1))
            if width is None or not (shown := [c for c in columns if c in self.settings]) \
                    or max(map(len, text.splitlines())) <= width:
                break
            dropped.insert(0, shown[-1])
            columns.remove(shown[-1])
        if dropped:
            more = f"{', '.join(dropped[:6])}{f' and {len(dropped) - 6} more' if len(dropped) > 6 else ''}"
            text += f"\nSettings that differ too: {visible(more, lines=False)} (a wider terminal or --json shows them)."
        return text

    def __str__(self) -> str:
        return self.text()

    def plot(self, value: str, setting: str) -> Figure:
        """Draw a final value of every run against a setting; the axis is logarithmic where the setting spans decades."""
        from richter.report.figures import against
        return against(self.points(value, setting), value, setting)


def number_or_text(text: str | None) -> float | str | None:
    """Read a setting as a number, if it is one."""
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text


def _key(v: Any) -> tuple[bool, float, str]:
    """Sort numbers before words; NaN after numbers."""
    if isinstance(v, str):
        return True, 0.0, v
    return False, math.inf if math.isnan(v) else v, ""
