"""Reading of runs, also while they are being written: rows, curves, arrays, claims, figures. Everything is loaded on demand."""

from __future__ import annotations

import html
import math
import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from richter.core import WHOLE, Failure, Labels, Mark, Remark, Row, SelectionError, StoreError, unknown
from richter.instrument.snapshot import Series, Snapshot, unknown_row
from richter.runs import format as arrays
from richter.runs import place as lock
from richter.runs.format import MARKS, Columns, joined, parsed
from richter.runs.place import DATABASE, LOCK, OBJECTS, object_path
from richter.runs.sqlite import Kind, RunReader, StoredCurve

if TYPE_CHECKING:
    import pandas

COLUMNS = ["step", "layer", "measure", "value", "error", "note", "mark"]


class Session(NamedTuple):
    """One process that wrote the run: its times, how it ended, and its provenance."""

    begun: float
    ended: float | None
    how: str | None
    provenance: dict[str, Any]


class Run:
    """A run on disk.

    >>> run = richter.runs.load("runs/demo")
    >>> run.status, run.measures, run.layers
    >>> run.value("nfc", "0")              # the last one
    >>> run.series("nfc", "0")             # steps, values, errors
    >>> run.scalars("loss")                # a logged scalar: steps and values
    >>> run.frame                          # pandas: step, layer, measure, value, error, note, mark
    >>> run.array("agop", layer="0", step=100)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._database = RunReader(self.path)
        self.name = self.path.resolve().name

    def close(self) -> None:
        """Close the file; the next access opens it again."""
        self._database.close()

    def _table(self, name: str) -> list[Any]:
        """Return the rows of a small table without their checksums."""
        with self._database.moment() as now:
            return [row[:-1] for row in now.table(name)]

    def _meta(self, key: str) -> Any:
        """Value of a key of the run; None if it has none."""
        text = next((value for _, name, value in self._table("meta") if name == key), None)
        return None if text is None else parsed(text)

    def _curves(self, kind: Kind) -> list[StoredCurve]:
        """All curves of measures, or of scalars."""
        with self._database.moment() as now:
            return now.of_kind(kind)

    # -------------------------------------------------------------------------------------------------- what it is

    @property
    def settings(self) -> Any:
        """Settings of the training, as they were given."""
        return self._meta("settings")

    @property
    def seeds(self) -> dict[str, int]:
        """Seeds by name."""
        return _record(self._meta("seeds"))

    @property
    def about(self) -> dict[str, Any]:
        """Facts about the run: model, parameters, examples, measures."""
        return _record(self._meta("about"))

    @property
    def sessions(self) -> list[Session]:
        """Sessions of the processes that wrote the run, in order."""
        return [Session(_number(begun), ended, how, _record(parsed(provenance)))
                for _, begun, ended, how, provenance in self._table("sessions")]

    @property
    def status(self) -> str:
        """Status: running, finished, interrupted (its process has ended), or failed with the reason."""
        if lock.held(self.path / LOCK):
            return "running"
        last = self.sessions[-1:]
        return str(last[0].how) if last and last[0].how else "interrupted"

    @property
    def failures(self) -> list[Failure]:
        """Everything that could not be measured or written, with reasons."""
        try:
            return [Failure.from_json(record) for record in self._meta("failures") or []]
        except (ValueError, TypeError) as why:
            raise StoreError(f"the run {self.path} has an invalid record of failures: {why}. It is damaged.") from why

    # --------------------------------------------------------------------------------------------------------- rows

    @property
    def measures(self) -> list[str]:
        """Names of the measures."""
        return list(dict.fromkeys(c.name for c in self._curves("row")))

    @property
    def layers(self) -> list[str]:
        """Layers in measuring order, with the whole model (``"*"``) last."""
        return sorted(dict.fromkeys(c.layer for c in self._curves("row")), key=lambda layer: layer == WHOLE)

    @property
    def scalar_names(self) -> list[str]:
        """Names of the logged scalars."""
        return [c.name for c in self._curves("scalar") if c.layer == ""]

    @property
    def steps(self) -> list[int]:
        """Steps of the measurements."""
        return [row[0] for row in self._table("snapshots")]

    @property
    def last(self) -> int | None:
        """Last step of any written data."""
        with self._database.moment() as now:
            rows = now.extent(now.curves.values())
            return max([*(rows or ()), *self.steps, *(step for _, _, step in self.arrays)], default=None)

    def has(self, measure: str, layer: str = WHOLE) -> bool:
        """Return whether a measure of a layer has rows."""
        return any((c.name, c.layer) == (measure, layer) for c in self._curves("row"))

    def value(self, measure: str, layer: str = WHOLE) -> float:
        """Return the last number of one measure of one layer; ``"*"`` is the whole model. NaN if its rows were deleted."""
        values = self.series(measure, layer).value
        return float(values[-1]) if len(values) else math.nan

    def series(self, measure: str, layer: str = WHOLE) -> Series:
        """Return one measure of one layer over time: steps, values, standard errors."""
        if (series := self._series("row", layer, measure)) is None:
            raise unknown_row(f"the run {self.name}", measure, layer, [(c.name, c.layer) for c in self._curves("row")])
        return series

    def scalars(self, name: str) -> Series:
        """Return one logged scalar over time: steps and values, without standard errors."""
        if (series := self._series("scalar", "", name)) is None:
            raise unknown(f"the run {self.name}", "scalar", name, self.scalar_names)
        return series

    def _series(self, kind: Kind, layer: str, name: str) -> Series | None:
        """One curve; None if it does not exist."""
        with self._database.moment() as now:
            if (c := now.curves.get((kind, layer, name))) is None:
                return None
            rows = now.rows([c])[c.number]
        return Series(rows.step, rows.value, rows.error)

    def curves(self, measures: Iterable[str], layers: Iterable[str]) -> dict[tuple[str, str], tuple[Series, Remark]]:
        """Return the existing series of these measures and layers, by (measure, layer), with the mark and note of the last
        row."""
        return self._several("row", {(layer, name) for name in measures for layer in layers})

    def scalar_curves(self, names: Iterable[str]) -> dict[str, Series]:
        """Return the existing series of these scalars, by name."""
        return {name: series for (name, _), (series, _) in self._several("scalar", {("", name) for name in names}).items()}

    def _several(self, kind: Kind, wanted: set[tuple[str, str]]) -> dict[tuple[str, str], tuple[Series, Remark]]:
        """Several curves, each with the mark and note of its last row, by (name, layer)."""
        with self._database.moment() as now:
            curves = [c for c in now.of_kind(kind) if (c.layer, c.name) in wanted]
            rows, notes = now.rows(curves), now.notes
        result = {}
        for c in curves:
            columns = rows[c.number]
            last = columns.taken(slice(-1, None))
            remark = Remark(_marks(last)[0], _notes(last, notes)[0]) if len(last.step) else Remark()
            result[c.name, c.layer] = Series(columns.step, columns.value, columns.error), remark
        return result

    def _rows(self, *kinds: Kind, steps: Sequence[int] = ()) -> list[Any]:
        """Return a table as columns, ordered by kind, step and curve; ``steps``: only these one or two steps."""
        with self._database.moment() as now:
            curves, notes = [c for kind in kinds for c in now.of_kind(kind)], now.notes
            rows = now.rows(curves, steps).values()
        table: Any = joined([r._replace(series=np.full(len(r.step), place)) for place, r in enumerate(rows)])
        kind = np.array([kinds.index(c.kind) for c in curves], np.int64)[table.series]
        table = table.taken(np.lexsort((table.series, table.step, kind)))
        named = [curves[place] for place in table.series.tolist()]
        return [table.step, [c.layer for c in named], [c.name for c in named], table.value, table.error, _notes(table, notes),
                [mark.value for mark in _marks(table)]]

    @property
    def frame(self) -> pandas.DataFrame:
        """All rows: step, layer, measure, value, error, note, mark (a word of ``richter.core.Mark``)."""
        return self._frame("row")

    def _frame(self, *kinds: Kind) -> pandas.DataFrame:
        """All rows of some kinds as a table."""
        import pandas as pd
        frame = pd.DataFrame(dict(zip(COLUMNS, self._rows(*kinds), strict=True)))
        return frame.astype({"step": "int64", "value": "float64", "error": "float64"})

    @property
    def scalar_frame(self) -> pandas.DataFrame:
        """All logged scalars: one column per name, by step."""
        import pandas as pd
        curves = self.scalar_curves(self.scalar_names)
        frame = pd.DataFrame({name: pd.Series(s.value, index=s.step) for name, s in curves.items()})
        return frame.rename_axis("step").reset_index(allow_duplicates=True)

    @property
    def snapshots(self) -> list[Snapshot]:
        """All measurements as they were returned, without their matrices."""
        return self.at()

    @property
    def ends(self) -> list[Snapshot]:
        """First and last measurement, which a verdict needs; the others are not read."""
        with self._database.moment() as now:
            steps = now.extent(now.of_kind("row"))
            return [] if steps is None else self.at(steps)

    def at(self, steps: Sequence[int] = ()) -> list[Snapshot]:
        """Return the measurements at these steps (default: at all)."""
        with self._database.moment() as now:
            table = [column.tolist() if isinstance(column, np.ndarray) else column for column in self._rows("row", steps=steps)]
            costs = {step: cost for step, _, *cost, _ in now.table("snapshots") if not steps or step in steps}
        by_step: dict[int, list[Row]] = {step: [] for step in sorted({*costs, *table[0]})}
        for step, layer, name, value, error, note, mark in zip(*table, strict=True):
            by_step[step].append(Row(step, layer, name, value, error, note, Mark(mark)))
        snapshots, labels = [], Labels.from_json(self.about.get("labels"))
        for step, rows in by_step.items():
            seconds, passes, examples, notes = costs.get(step, (None, None, 0, "{}"))
            snapshots.append(Snapshot(tuple(rows), step, _record(parsed(notes)), _number(seconds), examples or 0, _number(passes),
                                      labels=labels))
        return snapshots

    # ------------------------------------------------------------------------------------- arrays, claims, figures

    @property
    def arrays(self) -> list[tuple[str, str, int]]:
        """Return (layer, name, step) of every array; none is loaded."""
        return sorted((row[1:4] for row in self._table("arrays")), key=operator.itemgetter(2))

    def array(self, name: str, layer: str = WHOLE, step: int | None = None) -> NDArray[Any]:
        """Return one array; default: at its last step. A matrix stored by eigenpairs is reconstructed."""
        form, dtype, shape, data = self._stored(name, layer, step)
        return arrays.decode(form, dtype, shape, data)

    def shape(self, name: str, layer: str = WHOLE, step: int | None = None) -> tuple[int, ...]:
        """Return the shape of an array without reading its data."""
        return self._stored(name, layer, step, load=False)[2]

    def eigenpairs(self, name: str, layer: str = WHOLE, step: int | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return leading eigenvalues [r] and vectors [d, r] of a symmetric matrix, in whatever form it is stored."""
        form, dtype, shape, data = self._stored(name, layer, step)
        if form == "eigen":
            return arrays.eigenpairs(dtype, shape, data)
        return arrays.leading(arrays.decode(form, dtype, shape, data), 1.0)

    def _stored(self, name: str, layer: str, step: int | None, load: bool = True) -> tuple[str, str, tuple[int, ...], bytes]:
        """Form, type, shape and bytes of an array; by default at its last step."""
        with self._database.moment() as now:
            rows = [row for row in now.arrays.get((layer, name), []) if step is None or row[3] == step]
            if not rows:
                names = [f"{n} of {k} at step {s}" for k, n, s in self.arrays]
                raise SelectionError(f"the run {self.name} has no array {name!r} of layer {layer!r}"
                                     + (f" at step {step}" if step is not None else "") + ". It has: "
                                     + (", ".join(names[:20]) + (", ..." if len(names) > 20 else "") if names else "none") + ".")
            number, _, _, _, form, dtype, shape, stored, body = max(rows, key=operator.itemgetter(3))
            data = now.data("arrays", number, body) if load and body is not None else b""
        sizes = parsed(shape)
        if not isinstance(sizes, list) or {type(k) for k in sizes} - {int}:
            raise StoreError(f"the array {name!r} of the run {self.path} is damaged: its shape is {shape!r}.")
        if load and stored is not None:
            data = arrays.from_file(object_path(self.path, stored))
        elif load and body is None:
            raise StoreError(f"the array {name!r} of the run {self.path} has no bytes. It is damaged.")
        return form, dtype, tuple(sizes), data

    def state(self, key: str) -> Path | None:
        """Return the safetensors file of the ``initial`` or ``previous`` state, with its content verified."""
        name = self.state_name(key)
        return None if name is None else object_path(self.path, name)

    def state_name(self, key: str) -> str | None:
        """Return the name of the state's object; nothing is read."""
        return None if (name := self._meta(key)) is None else str(name)

    @property
    def initial(self) -> Path | None:
        """Safetensors file of the initial weights, with its content verified."""
        return self.state("initial")

    @property
    def claims(self) -> dict[str, dict[str, Any]]:
        """Records of the claims of an experiment, by name."""
        return {name: _record(parsed(record)) for _, name, record in self._table("claims")}

    @property
    def figures(self) -> list[tuple[str, str]]:
        """(name, kind) of each stored figure."""
        return [row[1:3] for row in self._table("figures")]

    def figure(self, name: str, kind: str = "svg") -> bytes:
        """Bytes of a stored figure."""
        with self._database.moment() as now:
            for number, *figure, body, _ in now.table("figures"):
                if figure == [name, kind]:
                    return now.data("figures", number, body)
        raise unknown(f"the run {self.name}", "figure", f"{name}.{kind}", [".".join(f) for f in self.figures])

    # ------------------------------------------------------------------------------------------------------- export

    def to_csv(self, path: str | os.PathLike[str] | TextIO) -> None:
        """Write all rows and scalars (as measure = name, layer empty) as a table, to a file by its name or an open one."""
        self.table.to_csv(path, index=False, lineterminator="\r\n")  # RFC 4180, which allows line breaks in names

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write all rows and scalars as a Parquet file."""
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            raise StoreError("writing Parquet needs pyarrow: pip install 'richter[parquet]'. CSV works without it.") from None
        self.table.to_parquet(path, index=False)

    @property
    def table(self) -> pandas.DataFrame:
        """All rows and then all scalars in one long table."""
        return self._frame("row", "scalar")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}: {self.status}, {len(self.steps)} measurements of {len(self.layers)} layers)"

    def _repr_html_(self) -> str:
        """Name, status, counts, and the last numbers. ``richter.report.html.card(run)`` shows more."""
        steps, last = self.steps, self.ends[-1:]
        layers = len([k for k in self.layers if k != WHOLE])
        words = f"{len(steps)} measurements of {layers} layers" + (f", the last at step {steps[-1]}" if steps else "")
        table = f'<div style="max-height:24em;overflow:auto">{last[0]._repr_html_()}</div>' if last else ""
        return f"<p><b>{html.escape(self.name)}</b> ({html.escape(self.status)}): {words}</p>{table}"


def default_store() -> Path:
    """Return the default folder of runs: RICHTER_RUNS, or runs/ in the working folder."""
    return Path(os.environ.get("RICHTER_RUNS") or "runs")


def find(store: str | os.PathLike[str], depth: int = 3) -> Iterator[Run]:
    """Yield the runs below a folder, by name. Unreadable ones are skipped, and links are not followed."""
    for path in paths(Path(store), depth):
        try:
            yield Run(path)
        except StoreError:
            continue


def paths(folder: Path, depth: int) -> Iterator[Path]:
    """Yield folders that contain a run's database, also inside other runs."""
    try:
        with os.scandir(folder) as entries:
            within = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    except OSError:  # not a folder, deleted in between, or not readable
        return
    if DATABASE in within and os.path.isfile(folder / DATABASE):
        yield folder
    for name in sorted(name for name, is_folder in within.items() if is_folder and name != OBJECTS):
        if depth:
            yield from paths(folder / name, depth - 1)


def inside(store: str | os.PathLike[str], name: str) -> Path:
    """Return the folder of a run by its name relative to a store; a name cannot lead out of it."""
    try:
        root = Path(store).resolve()
        path = (root / name).resolve()
    except (OSError, ValueError, RuntimeError) as why:  # too long; a zero byte; circular links
        raise StoreError(f"{name!r} is not a valid name of a run in {store}: {why}.") from why
    if path != root and root not in path.parents:
        raise StoreError(f"{name!r} leads out of the store {store}.")
    return path


def _marks(c: Columns) -> list[Mark]:
    """Marks of some rows."""
    return [MARKS[0]] * len(c.step) if c.mark is None else [MARKS[code] for code in c.mark.tolist()]


def _notes(c: Columns, notes: dict[int, str]) -> list[str]:
    """Notes of some rows."""
    return [""] * len(c.step) if c.note is None else [notes.get(number, "") for number in c.note.tolist()]


def _number(v: Any) -> float:
    """Number, with NaN for None."""
    return math.nan if v is None else float(v)


def _record(value: Any) -> dict[str, Any]:
    """A stored mapping, empty for None; raise an error for anything else."""
    if not isinstance(value, dict | None):
        raise StoreError(f"a record of this run is damaged: it is a {type(value).__name__}.")
    return value or {}

