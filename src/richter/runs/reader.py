"""Reading a run, also while it is being written: rows, curves, arrays, claims, figures. Loads what is asked for, no more."""

from __future__ import annotations

import html
import math
import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from richter.core import WHOLE, Failure, Labels, Mark, Remark, Row, SelectionError, StoreError, unknown
from richter.instrument.snapshot import Snapshot
from richter.runs import format as arrays
from richter.runs import place as lock
from richter.runs.format import MARKS, Columns, joined, parsed
from richter.runs.place import DATABASE, LOCK, OBJECTS, object_path
from richter.runs.sqlite import Curve, Kind, Reader

if TYPE_CHECKING:
    import pandas

COLUMNS = ["step", "layer", "measure", "value", "error", "note", "mark"]


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
    >>> run.frame                          # pandas: step, layer, measure, value, error, note, mark
    >>> run.array("agop", layer="0", step=100)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._database = Reader(self.path)
        self.name = self.path.resolve().name

    def close(self) -> None:
        """Close the file; the next question opens it again."""
        self._database.close()

    def _table(self, name: str) -> list[Any]:
        """The rows of a small table without their sums."""
        with self._database.moment() as now:
            return [row[:-1] for row in now.table(name)]

    def _meta(self, key: str) -> Any:
        text = next((value for _, name, value in self._table("meta") if name == key), None)
        return None if text is None else parsed(text)

    def _curves(self, kind: Kind) -> list[Curve]:
        with self._database.moment() as now:
            return now.of_kind(kind)

    # -------------------------------------------------------------------------------------------------- what it is

    @property
    def settings(self) -> Any:
        return self._meta("settings")

    @property
    def seeds(self) -> dict[str, int]:
        return _record(self._meta("seeds"))

    @property
    def about(self) -> dict[str, Any]:
        """What it is of: model, parameters, examples, measures."""
        return _record(self._meta("about"))

    @property
    def sessions(self) -> list[Session]:
        return [Session(_number(begun), ended, how, _record(parsed(provenance)))
                for _, begun, ended, how, provenance in self._table("sessions")]

    @property
    def status(self) -> str:
        """running, finished, interrupted (its process has gone), or failed with the reason."""
        if lock.held(self.path / LOCK):
            return "running"
        last = self.sessions[-1:]
        return str(last[0].how) if last and last[0].how else "interrupted"

    @property
    def failures(self) -> list[Failure]:
        """What could not be measured or written, and why."""
        try:
            return [Failure.from_json(record) for record in self._meta("failures") or []]
        except (ValueError, TypeError) as why:
            raise StoreError(f"the run {self.path} holds something else than failures: {why}. It is damaged.") from why

    # --------------------------------------------------------------------------------------------------------- rows

    @property
    def measures(self) -> list[str]:
        return list(dict.fromkeys(c.name for c in self._curves("row")))

    @property
    def layers(self) -> list[str]:
        """In the order in which they were measured, the whole model (``"*"``) last."""
        return sorted(dict.fromkeys(c.layer for c in self._curves("row")), key=lambda layer: layer == WHOLE)

    @property
    def names(self) -> list[str]:
        """The names of the scalars."""
        return [c.name for c in self._curves("scalar") if c.layer == ""]

    @property
    def steps(self) -> list[int]:
        """The steps at which it was measured."""
        return [row[0] for row in self._table("snapshots")]

    @property
    def last(self) -> int | None:
        """The last step that anything was written for."""
        with self._database.moment() as now:
            rows = now.extent(now.curves.values())
            return max([*(rows or ()), *self.steps, *(step for _, _, step in self.arrays)], default=None)

    def has(self, measure: str, layer: str = WHOLE) -> bool:
        return any((c.name, c.layer) == (measure, layer) for c in self._curves("row"))

    def series(self, measure: str, layer: str = WHOLE, *, after: int | None = None) -> Series:
        """One measure of one layer over time; ``after``: only later steps."""
        if (series := self._series("row", layer, measure, after)) is not None:
            return series
        layers = [c.layer for c in self._curves("row") if c.name == measure]
        if not layers:
            raise unknown(f"the run {self.name}", "measure", measure, self.measures)
        raise unknown(f"the run {self.name}", "layer", layer, layers, of=f" for {measure!r}")

    def scalar(self, name: str, *, after: int | None = None) -> Series:
        if (series := self._series("scalar", "", name, after)) is None:
            raise unknown(f"the run {self.name}", "scalar", name, self.names)
        return series

    def _series(self, kind: Kind, layer: str, name: str, after: int | None) -> Series | None:
        if after is not None and not -2 ** 63 <= after < 2 ** 63:
            raise SelectionError(f"no run can hold what was asked for ({after!r}): a step has at most 64 bits.")
        with self._database.moment() as now:
            if (c := now.curves.get((kind, layer, name))) is None:
                return None
            rows = now.rows([c], after=after)[c.number]
        return Series(rows.step, rows.value, rows.error)

    def curves(self, measures: Iterable[str], layers: Iterable[str]) -> dict[tuple[str, str], tuple[Series, Remark]]:
        """Those of these measures and layers that there are, in one question: by (measure, layer), the series, and the mark and
        note of its last row."""
        return self._several("row", {(layer, name) for name in measures for layer in layers})

    def scalar_curves(self, names: Iterable[str]) -> dict[str, Series]:
        """Those of these scalars that there are."""
        return {name: series for (name, _), (series, _) in self._several("scalar", {("", name) for name in names}).items()}

    def _several(self, kind: Kind, wanted: set[tuple[str, str]]) -> dict[tuple[str, str], tuple[Series, Remark]]:
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
        """A table, column by column, by kind, step and curve; ``steps``: of one or two steps only."""
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
        import pandas as pd
        frame = pd.DataFrame(dict(zip(COLUMNS, self._rows(*kinds), strict=True)))
        return frame.astype({"step": "int64", "value": "float64", "error": "float64"})

    @property
    def scalars(self) -> pandas.DataFrame:
        """The user's curves: a column for each name, by step."""
        import pandas as pd
        frame = pd.DataFrame({name: pd.Series(s.value, index=s.step) for name, s in self.scalar_curves(self.names).items()})
        return frame.rename_axis("step").reset_index(allow_duplicates=True)

    @property
    def snapshots(self) -> list[Snapshot]:
        """What was measured, as it was returned then (without the matrices)."""
        return self.at()

    @property
    def ends(self) -> list[Snapshot]:
        """The first and the last measurement: what a verdict needs, without reading what lies between."""
        with self._database.moment() as now:
            steps = now.extent(now.of_kind("row"))
            return [] if steps is None else self.at(steps)

    def at(self, steps: Sequence[int] = ()) -> list[Snapshot]:
        """What was measured at these steps (none: at all of them)."""
        with self._database.moment() as now:
            table = [column.tolist() if isinstance(column, np.ndarray) else column for column in self._rows("row", steps=steps)]
            costs = {step: cost for step, _, *cost, _ in now.table("snapshots") if not steps or step in steps}
        rows: dict[int, list[Row]] = {step: [] for step in sorted({*costs, *table[0]})}
        for step, layer, name, value, error, note, mark in zip(*table, strict=True):
            rows[step].append(Row(step, layer, name, value, error, note, Mark(mark)))
        snapshots, labels = [], Labels.from_json(self.about.get("labels"))
        for step, mine in rows.items():
            seconds, passes, examples, notes = costs.get(step, (math.nan, math.nan, 0, "{}"))
            snapshots.append(Snapshot(tuple(mine), step, _record(parsed(notes)), _number(seconds), examples or 0, _number(passes),
                                      labels=labels))
        return snapshots

    # ------------------------------------------------------------------------------------- arrays, claims, figures

    @property
    def arrays(self) -> list[tuple[str, str, int]]:
        """(layer, name, step) of every array; none is loaded."""
        return sorted((row[1:4] for row in self._table("arrays")), key=operator.itemgetter(2))

    def array(self, name: str, layer: str = WHOLE, step: int | None = None) -> NDArray[Any]:
        """One array; of the last step if none is given. A matrix kept by eigenpairs is put together again."""
        form, dtype, shape, data = self._stored(name, layer, step)
        return arrays.decode(form, dtype, shape, data)

    def shape(self, name: str, layer: str = WHOLE, step: int | None = None) -> tuple[int, ...]:
        """Of an array, as its run says, before it is put together."""
        return self._stored(name, layer, step, load=False)[2]

    def eigenpairs(self, name: str, layer: str = WHOLE, step: int | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
        """Leading eigenvalues [r] and vectors [d, r] of a symmetric matrix, however it is kept."""
        form, dtype, shape, data = self._stored(name, layer, step)
        if form == "eigen":
            return arrays.eigenpairs(dtype, shape, data)
        return arrays.leading(arrays.decode(form, dtype, shape, data), 1.0)

    def _stored(self, name: str, layer: str, step: int | None, load: bool = True) -> tuple[str, str, tuple[int, ...], bytes]:
        with self._database.moment() as now:
            rows = [row for row in now.arrays.get((layer, name), []) if step is None or row[3] == step]
            if not rows:
                known = [f"{n} of {k} at step {s}" for k, n, s in self.arrays]
                raise SelectionError(f"the run {self.name} has no array {name!r} of layer {layer!r}"
                                     + (f" at step {step}" if step is not None else "") + ". It has: "
                                     + (", ".join(known[:20]) + (", ..." if len(known) > 20 else "") if known else "none") + ".")
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
        """A safetensors file that was kept as ``initial`` or ``previous`` state, its content checked."""
        name = self.state_name(key)
        return None if name is None else object_path(self.path, name)

    def state_name(self, key: str) -> str | None:
        """The name of its object; nothing is read."""
        return None if (name := self._meta(key)) is None else str(name)

    @property
    def initial(self) -> Path | None:
        """The safetensors file of the weights at initialisation, its content checked."""
        return self.state("initial")

    @property
    def claims(self) -> dict[str, dict[str, Any]]:
        return {name: _record(parsed(record)) for _, name, record in self._table("claims")}

    @property
    def figures(self) -> list[tuple[str, str]]:
        return [row[1:3] for row in self._table("figures")]

    def figure(self, name: str, kind: str = "svg") -> bytes:
        with self._database.moment() as now:
            for number, *figure, body, _ in now.table("figures"):
                if figure == [name, kind]:
                    return now.data("figures", number, body)
        raise unknown(f"the run {self.name}", "figure", f"{name}.{kind}", [".".join(f) for f in self.figures])

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
        return self._frame("row", "scalar")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}: {self.status}, {len(self.steps)} measurements of {len(self.layers)} layers)"

    def _repr_html_(self) -> str:
        """Name, status, how much there is, and the last numbers. ``richter.report.html.card(run)`` shows more."""
        steps, last = self.steps, self.ends[-1:]
        layers = len([k for k in self.layers if k != WHOLE])
        words = f"{len(steps)} measurements of {layers} layers" + (f", the last at step {steps[-1]}" if steps else "")
        table = f'<div style="max-height:24em;overflow:auto">{last[0]._repr_html_()}</div>' if last else ""
        return f"<p><b>{html.escape(self.name)}</b> ({html.escape(self.status)}): {words}</p>{table}"


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
    """Folders that hold a run's database, those inside of another run's as well."""
    try:
        with os.scandir(folder) as entries:
            within = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    except OSError:  # no folder, deleted meanwhile, or not for us to read
        return
    if DATABASE in within and os.path.isfile(folder / DATABASE):
        yield folder
    for name in sorted(name for name, is_folder in within.items() if is_folder and name != OBJECTS):
        if depth:
            yield from paths(folder / name, depth - 1)


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


def _marks(c: Columns) -> list[Mark]:
    return [MARKS[0]] * len(c.step) if c.mark is None else [MARKS[code] for code in c.mark.tolist()]


def _notes(c: Columns, notes: dict[int, str]) -> list[str]:
    return [""] * len(c.step) if c.note is None else [notes.get(number, "") for number in c.note.tolist()]


def _number(v: Any) -> float:
    return math.nan if v is None else float(v)


def _record(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict | None):
        raise StoreError(f"a record of this run is damaged: it is a {type(value).__name__}.")
    return value or {}

