"""Reading a run, also while it is being written: rows, curves, arrays, claims, figures. Loads what is asked for, no more."""

from __future__ import annotations

import json
import operator
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from richter.core import WHOLE, Row, SelectionError, StoreError, unknown
from richter.instrument.snapshot import Snapshot
from richter.runs import arrays, lock
from richter.runs.format import DATABASE, LATEST, LOCK, OBJECTS, bounded, explained, readable

if TYPE_CHECKING:
    import pandas


NAMED = f"""SELECT step, layer, name, value, error, coalesce(text, '') FROM ({LATEST}) AS found
    JOIN series ON series.id = found.series LEFT JOIN notes ON notes.id = note
    WHERE kind {{kind}} ORDER BY kind, step, series.id"""
COLUMNS = ["step", "layer", "measure", "value", "error", "note"]
# what a column must hold, by a letter: a file of unknown origin can hold anything anywhere
EXPECTED: dict[str, set[type]] = {"i": {int}, "n": {int, float, type(None)}, "t": {str}, "?": {str, type(None)}, "b": {bytes}}


class Series(NamedTuple):
    """One curve: steps, values and their standard errors."""

    step: NDArray[np.int64]
    value: NDArray[np.float64]
    error: NDArray[np.float64]


class Session(NamedTuple):
    """One process that wrote the run: when, how it ended, and on what."""

    begun: float
    ended: float | None
    how: str | None
    provenance: dict[str, Any]


class Run:
    """A run on disk.

    >>> run = richter.runs.open("runs/demo")
    >>> run.status, run.measures, run.layers
    >>> run.series("nfc", "0")             # steps, values, errors
    >>> run.frame                          # pandas: step, layer, measure, value, error, note
    >>> run.array("agop", layer="0", step=100)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._guard = threading.RLock()
        self._db  # noqa: B018  opened at once, so that an error comes where it belongs
        self.name = self.path.resolve().name

    @cached_property
    def _db(self) -> sqlite3.Connection:
        return readable(self.path)

    def close(self) -> None:
        with self._guard:
            if "_db" in self.__dict__:
                self.__dict__.pop("_db").close()

    def _ask(self, question: str, values: Sequence[Any] = (), kinds: str = "") -> list[Any]:
        """``kinds``: a letter of EXPECTED for each column."""
        with self._guard, explained(self.path, "read"):
            bounded(self._db)
            try:
                rows = self._db.execute(question, values).fetchall()
            except (OverflowError, UnicodeEncodeError) as why:
                raise SelectionError(f"no run can hold what was asked for ({', '.join(map(repr, values))}): {why}.") from why
        for column, kind in enumerate(kinds):
            if other := {type(row[column]) for row in rows} - EXPECTED[kind]:
                raise StoreError(f"the run {self.path} holds {other.pop().__name__} where something else belongs. It is damaged.")
        return rows

    @contextmanager
    def _moment(self) -> Iterator[None]:
        """Several questions about one state of a run that is being written."""
        with self._guard:
            self._ask("BEGIN")
            try:
                yield
            finally:
                self._ask("COMMIT")

    def _said(self, key: str) -> Any:
        found = self._ask("SELECT value FROM meta WHERE key = ?", (key,), "t")
        return _json(found[0][0]) if found else None

    # -------------------------------------------------------------------------------------------------- what it is

    @property
    def settings(self) -> Any:
        return self._said("settings")

    @property
    def seeds(self) -> dict[str, int]:
        return _record(self._said("seeds"))

    @property
    def about(self) -> dict[str, Any]:
        """What it is of: model, parameters, examples, measures."""
        return _record(self._said("about"))

    @property
    def sessions(self) -> list[Session]:
        return [Session(_number(a), b, c, _record(_json(d))) for a, b, c, d in
                self._ask("SELECT begun, ended, how, provenance FROM sessions ORDER BY id", kinds="nn?t")]

    @property
    def status(self) -> str:
        """running, finished, interrupted (its process has gone), or failed with the reason."""
        if lock.held(self.path / LOCK):
            return "running"
        last = self.sessions[-1:]
        return str(last[0].how) if last and last[0].how else "interrupted"

    # --------------------------------------------------------------------------------------------------------- rows

    @property
    def measures(self) -> list[str]:
        return [r[0] for r in
                self._ask("SELECT name FROM series WHERE kind = 'row' GROUP BY name ORDER BY min(id)", kinds="t")]

    @property
    def layers(self) -> list[str]:
        """In the order in which they were measured, the whole model (``"*"``) last."""
        found = [r[0] for r in
                 self._ask("SELECT layer FROM series WHERE kind = 'row' GROUP BY layer ORDER BY min(id)", kinds="t")]
        return [k for k in found if k != WHOLE] + [k for k in found if k == WHOLE]

    @property
    def names(self) -> list[str]:
        """Of the scalars."""
        return [r[0] for r in self._ask("SELECT name FROM series WHERE kind = 'scalar' AND layer = '' ORDER BY id", kinds="t")]

    @property
    def steps(self) -> list[int]:
        """At which it was measured."""
        return [r[0] for r in self._ask("SELECT step FROM snapshots ORDER BY step")]

    @property
    def last(self) -> int | None:
        """The last step that anything was written for."""
        found = [r[0] for r in self._ask(
            "SELECT (SELECT max(step) FROM rows WHERE series = series.id) FROM series UNION ALL SELECT max(step) FROM recent "
            "UNION ALL SELECT max(step) FROM snapshots UNION ALL SELECT max(step) FROM arrays") if r[0] is not None]
        with self._numbers():
            return max(map(operator.index, found), default=None)

    def has(self, measure: str, layer: str = WHOLE) -> bool:
        return self._id("row", layer, measure) is not None

    def series(self, measure: str, layer: str = WHOLE, *, after: int | None = None) -> Series:
        """One measure of one layer over time; ``after``: only later steps."""
        if (number := self._id("row", layer, measure)) is None:
            self._absent(measure, layer)
        return self._series(number, after)

    def scalar(self, name: str, *, after: int | None = None) -> Series:
        if (number := self._id("scalar", "", name)) is None:
            raise unknown(f"the run {self.name}", "scalar", name, self.names)
        return self._series(number, after)

    def curves(self, measures: Iterable[str], layers: Iterable[str]) -> dict[tuple[str, str], tuple[Series, str]]:
        """Those of these measures and layers that there are, in one question: by (measure, layer), the series and the note
        of its last row."""
        return self._curves("row", {(name, layer) for name in measures for layer in layers})

    def scalar_curves(self, names: Iterable[str]) -> dict[str, Series]:
        """Those of these scalars that there are."""
        return {name: series for (name, _), (series, _) in self._curves("scalar", {(name, "") for name in names}).items()}

    def _curves(self, kind: str, wanted: set[tuple[str, str]]) -> dict[tuple[str, str], tuple[Series, str]]:
        every = self._ask("SELECT id, layer, name FROM series WHERE kind = ? ORDER BY id", (kind,), "itt")
        known = {number: (name, layer) for number, layer, name in every if (name, layer) in wanted}
        where = f"WHERE series IN ({', '.join(map(str, known))})"  # SQLite's own row numbers
        found = self._ask(f"SELECT series, step, value, error, note, 0 FROM rows {where} UNION ALL "
                          f"SELECT series, step, value, error, note, id FROM recent {where}")
        notes = dict(self._ask("SELECT id, text FROM notes"))
        with self._numbers():
            columns = list(zip(*found, strict=True)) or [()] * 6
            number, step, age = (np.array(columns[i], dtype=np.int64) for i in (0, 1, 5))
            value, error = (np.array(columns[i], dtype=np.float64) for i in (2, 3))
        order = np.lexsort((age, step, number))  # what LATEST does, and faster than SQLite sorts
        same = (np.diff(number[order]) == 0) & (np.diff(step[order]) == 0)
        order = order[~np.append(same, False)[:len(order)]]  # of rows for the same step, the latest
        curves = {}
        for k, key in known.items():
            mine = order[np.searchsorted(number[order], k):np.searchsorted(number[order], k, side="right")]
            said = notes.get(columns[4][mine[-1]], "") if len(mine) else ""
            curves[key] = Series(step[mine], value[mine], error[mine]), str(said)
        return curves

    def _series(self, number: int | None, after: int | None) -> Series:
        where = "WHERE series = ?" if after is None else "WHERE series = ? AND step > ?"
        return self._table([r[1:4] for r in self._ask(LATEST.format(where=where) + " ORDER BY step",
                                                      ((number,) if after is None else (number, after)) * 2)])

    def _table(self, rows: list[Any]) -> Series:
        with self._numbers():
            table = np.array([r[1:3] for r in rows], dtype=np.float64).reshape(-1, 2)  # NULL, which is NaN, becomes NaN again
            return Series(np.array([r[0] for r in rows], dtype=np.int64), table[:, 0], table[:, 1])

    @contextmanager
    def _numbers(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError, OverflowError) as why:
            raise StoreError(f"the run {self.path} holds something else than numbers: {why}. It is damaged.") from why

    def _id(self, kind: str, layer: str, name: str) -> int | None:
        found = self._ask("SELECT id FROM series WHERE kind = ? AND layer = ? AND name = ?", (kind, layer, name))
        return found[0][0] if found else None

    def _absent(self, measure: str, layer: str) -> None:
        known = self.measures
        if measure not in known:
            raise unknown(f"the run {self.name}", "measure", measure, known)
        has = [r[0] for r in self._ask("SELECT layer FROM series WHERE kind = 'row' AND name = ? ORDER BY id", (measure,), "t")]
        raise unknown(f"the run {self.name}", "layer", layer, has, of=f" for {measure!r}")

    @property
    def frame(self) -> pandas.DataFrame:
        """All rows: step, layer, measure, value, error, note."""
        return self._frame("= 'row'")

    def _frame(self, kind: str) -> pandas.DataFrame:
        import pandas as pd
        found = pd.DataFrame(self._ask(NAMED.format(where="", kind=kind), kinds="ittnnt"), columns=COLUMNS)
        return found.astype({"step": "int64", "value": "float64", "error": "float64"})

    @property
    def scalars(self) -> pandas.DataFrame:
        """The user's curves: a column for each name, by step."""
        import pandas as pd
        found = pd.DataFrame({name: pd.Series(s.value, index=s.step) for name, s in self.scalar_curves(self.names).items()})
        return found.rename_axis("step").reset_index(allow_duplicates=True)

    @property
    def snapshots(self) -> list[Snapshot]:
        """What was measured, as it was returned then (without the matrices)."""
        return self._snapshots()

    @property
    def ends(self) -> list[Snapshot]:
        """The first and the last measurement: what a verdict needs, without reading what lies between."""
        steps = self._ask("SELECT min(a), max(b) FROM (SELECT (SELECT min(step) FROM rows WHERE series = series.id) AS a, "
                          "(SELECT max(step) FROM rows WHERE series = series.id) AS b FROM series WHERE kind = 'row' UNION ALL "
                          "SELECT step, step FROM recent WHERE series IN (SELECT id FROM series WHERE kind = 'row'))", kinds="nn")
        return self._snapshots(steps[0]) if steps[0][0] is not None else []

    def _snapshots(self, steps: Sequence[int] = ()) -> list[Snapshot]:
        only = "step IN (?, ?)" if steps else "true"
        where = f"WHERE series IN (SELECT id FROM series) AND {only}" if steps else ""  # by the key, without a scan
        with self._moment():
            found = self._ask(NAMED.format(where=where, kind="= 'row'"), [*steps] * 2, "ittnnt")
            costs = {s: rest for s, *rest in self._ask(
                f"SELECT step, seconds, passes, examples, notes FROM snapshots WHERE {only}", steps, "innnt")}
        rows: dict[int, list[Row]] = {step: [] for step in sorted({*costs, *(r[0] for r in found)})}
        for step, layer, name, value, error, note in found:
            rows[step].append(Row(step, layer, name, _number(value), _number(error), note))
        snapshots = []
        for step, mine in rows.items():
            seconds, passes, examples, notes = costs.get(step, (None, None, 0, "{}"))
            snapshots.append(Snapshot(tuple(mine), step, _record(_json(notes)), _number(seconds), examples or 0, _number(passes)))
        return snapshots

    # ------------------------------------------------------------------------------------- arrays, claims, figures

    @property
    def arrays(self) -> list[tuple[str, str, int]]:
        """(layer, name, step) of every array; none is loaded."""
        return [tuple(r) for r in self._ask("SELECT layer, name, step FROM arrays ORDER BY step, id", kinds="tti")]

    def array(self, name: str, layer: str = WHOLE, step: int | None = None) -> NDArray[Any]:
        """One array; of the last step if none is given. A matrix kept by eigenpairs is put together again."""
        form, dtype, shape, data = self._stored(name, layer, step)
        return arrays.decode(form, dtype, shape, data)

    def shape(self, name: str, layer: str = WHOLE, step: int | None = None) -> tuple[int, ...]:
        """Of an array, as its run says, before it is put together."""
        return self._stored(name, layer, step)[2]

    def eigenpairs(self, name: str, layer: str = WHOLE, step: int | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
        """Leading eigenvalues [r] and vectors [d, r] of a symmetric matrix, however it is kept."""
        form, dtype, shape, data = self._stored(name, layer, step)
        if form == "eigen":
            return arrays.eigenpairs(dtype, shape, data)
        return arrays.leading(arrays.decode(form, dtype, shape, data), 1.0)

    def _stored(self, name: str, layer: str, step: int | None) -> tuple[str, str, tuple[int, ...], bytes]:
        found = self._ask("SELECT form, dtype, shape, bytes, object FROM arrays WHERE layer = ? AND name = ?"
                          + (" AND step = ?" if step is not None else " ORDER BY step DESC LIMIT 1"),
                          (layer, name) if step is None else (layer, name, step))
        if not found:
            known = [f"{n} of {k} at step {s}" for k, n, s in self.arrays]
            raise SelectionError(f"the run {self.name} has no array {name!r} of layer {layer!r}"
                                 + (f" at step {step}" if step is not None else "") + ". It has: "
                                 + (", ".join(known[:20]) + (", ..." if len(known) > 20 else "") if known else "none") + ".")
        form, dtype, shape, data, stored = found[0]
        sizes = _json(shape)
        if not isinstance(sizes, list) or {type(k) for k in sizes} - {int}:
            raise StoreError(f"the array {name!r} of the run {self.path} is damaged: its shape is {shape!r}.")
        if stored is not None:
            data = arrays.from_file(arrays.object_path(self.path / OBJECTS, str(stored)))
        if not isinstance(data, bytes):
            raise StoreError(f"the array {name!r} of the run {self.path} has no bytes. It is damaged.")
        return str(form), str(dtype), tuple(sizes), data

    @property
    def initial(self) -> Path | None:
        """The safetensors file of the weights at initialisation, its content checked."""
        name = self._said("initial")
        return None if name is None else arrays.object_path(self.path / OBJECTS, str(name))

    @property
    def claims(self) -> dict[str, dict[str, Any]]:
        return {name: _record(_json(record)) for name, record in
                self._ask("SELECT name, record FROM claims ORDER BY rowid", kinds="tt")}

    @property
    def figures(self) -> list[tuple[str, str]]:
        return [tuple(r) for r in self._ask("SELECT name, kind FROM figures ORDER BY id", kinds="tt")]

    def figure(self, name: str, kind: str = "svg") -> bytes:
        found = self._ask("SELECT bytes FROM figures WHERE name = ? AND kind = ?", (name, kind), "b")
        if not found:
            raise unknown(f"the run {self.name}", "figure", f"{name}.{kind}", [".".join(f) for f in self.figures])
        return found[0][0]

    # ------------------------------------------------------------------------------------------------------- export

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """All rows and scalars (as measure = name, layer empty) as a table."""
        self.table.to_csv(path, index=False, lineterminator="\r\n")  # RFC 4180, under which a name may hold either

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            raise StoreError("writing Parquet needs pyarrow: pip install 'richter[parquet]'. CSV needs nothing.") from None
        self.table.to_parquet(path, index=False)

    @property
    def table(self) -> pandas.DataFrame:
        """Rows and then scalars in one long table."""
        return self._frame("IN ('row', 'scalar')")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}: {self.status}, {len(self.steps)} measurements of {len(self.layers)} layers)"

    def _repr_html_(self) -> str:
        """Name, status, how much there is, and the last numbers. ``richter.report.html.card(run)`` shows more."""
        steps, last = self.steps, self.ends[-1:]
        layers = len([k for k in self.layers if k != WHOLE])
        words = f"{len(steps)} measurements of {layers} layers" + (f", the last at step {steps[-1]}" if steps else "")
        table = f'<div style="max-height:24em;overflow:auto">{last[0]._repr_html_()}</div>' if last else ""
        return f"<p><b>{_escaped(self.name)}</b> ({_escaped(self.status)}): {words}</p>{table}"


def default_store() -> Path:
    """Where runs are unless said otherwise: RICHTER_RUNS, or runs/ in the working folder."""
    return Path(os.environ.get("RICHTER_RUNS") or "runs")


def find(store: str | os.PathLike[str], depth: int = 3) -> Iterator[Run]:
    """The runs below a folder, by name; what cannot be read is left out. Links are not followed."""
    for path in paths(Path(store), depth):
        try:
            yield Run(path)
        except StoreError:
            continue


def paths(folder: Path, depth: int) -> Iterator[Path]:
    """Folders that hold a run's database."""
    if os.path.isfile(folder / DATABASE):  # unlike Path's, False where one may not look
        yield folder
    elif depth and os.path.isdir(folder):
        for below in _within(folder):
            if os.path.isdir(below) and not below.is_symlink() and below.name != OBJECTS:
                yield from paths(below, depth - 1)


def _within(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # deleted meanwhile, or not for us to read
        return []


def inside(store: str | os.PathLike[str], name: str) -> Path:
    """The folder of a run by its name relative to a store; a name cannot lead out of it."""
    try:
        root = Path(store).resolve()
        path = (root / name).resolve()
    except (OSError, ValueError, RuntimeError) as why:  # too long; a zero byte; links in a circle
        raise StoreError(f"{name!r} is no name of a run in {store}: {why}.") from why
    if path != root and root not in path.parents:
        raise StoreError(f"{name!r} leads out of the store {store}.")
    return path


def _number(v: Any) -> float:
    return float("nan") if v is None else float(v)


def _json(text: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as why:
        raise StoreError(f"a record of this run is damaged: {why}.") from why


def _record(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict | None):
        raise StoreError(f"a record of this run is damaged: it is a {type(found).__name__}.")
    return found or {}


def _escaped(text: str) -> str:
    import html
    return html.escape(text)
