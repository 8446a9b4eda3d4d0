"""The result of one measurement: ``Snapshot``, a table of numbers with their error bars and remarks.

A Snapshot, an Observer and a Run are read in the same way: ``value``, ``series``, ``scalars`` and ``frame``."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from richter.core import WHOLE, Labels, Mark, Row, SelectionError, unknown
from richter.core.values import table

if TYPE_CHECKING:
    import pandas


class Series(NamedTuple):
    """One curve: steps, values and their standard errors."""

    step: NDArray[np.int64]
    value: NDArray[np.float64]
    error: NDArray[np.float64]

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Series:
        """Return the rows of one measure and layer as a curve. A row without a step is at step 0."""
        rows = list(rows)
        return cls(np.array([r.step or 0 for r in rows], np.int64), np.array([r.value for r in rows], np.float64),
                   np.array([r.error for r in rows], np.float64))


def unknown_row(owner: str, measure: str, layer: str, known: Iterable[tuple[str, str]]) -> SelectionError:
    """Make the error for a measure or layer that does not exist; ``known`` are the existing (measure, layer) pairs."""
    layers_by_measure: dict[str, list[str]] = {}
    for name, place in known:
        layers_by_measure.setdefault(name, []).append(place)
    if measure not in layers_by_measure:
        return unknown(owner, "measure", measure, layers_by_measure)
    return unknown(owner, "layer", layer, dict.fromkeys(layers_by_measure[measure]), of=f" for {measure!r}")


@dataclass(frozen=True, repr=False)
class Snapshot:
    """The rows of one measurement: a value, its standard error over probe examples and a note, by measure and layer."""

    rows: tuple[Row, ...]
    step: int | None = None
    notes: dict[str, str] = field(default_factory=dict)  # what holds for a layer, or (under "*") for the whole
    seconds: float = math.nan
    examples: int = 0
    passes: float = math.nan  # what it cost, in forward-backward passes of the probe (each as long as three forward passes)
    arrays: Mapping[tuple[str, str], Any] = field(default_factory=dict, repr=False)  # by (layer, name): nfm, agop; if asked for
    labels: Labels | None = None  # what guessing would get right, if the probe has class labels
    start: Snapshot | None = field(default=None, repr=False)  # of the initial network, by ``measure(initial=...)``

    @property
    def layers(self) -> list[str]:
        """Names of the layers, in measuring order."""
        return list(dict.fromkeys(r.layer for r in self.rows))

    @property
    def measures(self) -> list[str]:
        """Names of the measures, in measuring order."""
        return list(dict.fromkeys(r.measure for r in self.rows))

    def get(self, measure: str, layer: str = WHOLE) -> Row | None:
        """One row; None if there is no such measure or layer."""
        return next((r for r in self.rows if r.measure == measure and r.layer == layer), None)

    def row(self, measure: str, layer: str = WHOLE) -> Row:
        """Return one row; raise an error that lists the existing ones if there is none."""
        if (row := self.get(measure, layer)) is not None:
            return row
        raise unknown_row("this snapshot", measure, layer, ((r.measure, r.layer) for r in self.rows))

    def value(self, measure: str, layer: str = WHOLE) -> float:
        """Return one number, e.g. ``snap.value("nfc", "0")``; ``"*"`` is the whole model."""
        return self.row(measure, layer).value

    def series(self, measure: str, layer: str = WHOLE) -> Series:
        """Return the number as a curve of one point: its step, value and standard error."""
        return Series.of([self.row(measure, layer)])

    @property
    def scalar_names(self) -> list[str]:
        """Names of the logged scalars: none, because they belong to an Observer or a Run."""
        return []

    def scalars(self, name: str) -> NoReturn:
        """Raise the error for an unknown scalar: an Observer or a Run has the logged ones."""
        raise unknown("this snapshot", "scalar", name, self.scalar_names,
                      of=": scalars are logged by an Observer or a run, which measure many steps")

    def error(self, measure: str, layer: str = WHOLE) -> float:
        """Its standard error over probe examples; NaN where there is none."""
        return self.row(measure, layer).error

    def note(self, measure: str, layer: str = WHOLE) -> str:
        """Note of one number."""
        return self.row(measure, layer).note

    @property
    def frame(self) -> pandas.DataFrame:
        """One row for each layer (``"*"``: the whole model), one numeric column for each measure, then its standard
        error as ``<measure>_se`` and the notes."""
        import pandas as pd
        measures, layers = self.measures, [k for k in self.layers if k != WHOLE] + [WHOLE]
        cells = {(r.layer, r.measure): r for r in self.rows}
        rows = {m: [cells.get((k, m)) for k in layers] for m in measures}
        columns: dict[str, Sequence[object]] = {m: [math.nan if r is None else r.value for r in rows[m]] for m in measures}
        columns |= {f"{m}_se": [math.nan if r is None else r.error for r in rows[m]] for m in measures}
        notes = [[r.note for m in measures if (r := cells.get((k, m))) is not None] + [self.notes.get(k, "")] for k in layers]
        columns["note"] = ["; ".join(dict.fromkeys(filter(None, texts))) for texts in notes]
        return pd.DataFrame(columns, index=pd.Index(layers, name="layer"))

    def __str__(self) -> str:
        """A table for a terminal: value and, in brackets, the error in the last digits; below, what only the whole model has."""
        cells = {(r.layer, r.measure): r for r in self.rows}
        layers = [k for k in self.layers if k != WHOLE] + [WHOLE]
        measures = [m for m in self.measures if any((k, m) in cells for k in layers[:-1])]
        body = [["layer", *measures]] + [
            [k, *(shown(cells.get((k, m))) for m in measures)] for k in layers if any((k, m) in cells for m in measures)]
        whole = [f"{m} {shown(cells[WHOLE, m])}" for m in self.measures if m not in measures and shown(cells[WHOLE, m])]
        lines = [table(body, right=range(1, len(measures) + 1))] if measures else []
        lines += textwrap.wrap(f"whole model: {', '.join(whole)}", 130, break_on_hyphens=False) if whole else []
        return "\n".join([*lines, *(f"{k}: {text}" for k, text in self.notes.items())])

    def __repr__(self) -> str:
        layers, at = len([k for k in self.layers if k != WHOLE]), "" if self.step is None else f"step {self.step}: "
        return f"Snapshot({at}{len(self.measures)} measures of {layers} layers on {self.examples} examples)"

    def _repr_html_(self) -> str:
        """Table for notebooks."""
        return self.frame[self.measures].to_html(float_format=lambda v: f"{v:.3f}", na_rep="", escape=True)


def shown(row: Row | None) -> str:
    """0.823(12) for 0.823 +- 0.012; a dot marks what has its value by definition; empty for no number."""
    if row is None or math.isnan(row.value):
        return ""
    dot = "." if row.mark is Mark.TRIVIAL else ""
    if not (math.isfinite(row.error) and row.error > 1e-9 * abs(row.value)):
        return f"{row.value:.3f}{dot}"
    digits = min(6, max(0, 1 - math.floor(math.log10(row.error))))
    return f"{row.value:.{digits}f}({round(row.error * 10 ** digits)}){dot}"
