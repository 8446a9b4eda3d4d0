"""The views of the dashboard: one file per tab, listed by this folder. Add a view of your own by a call:

    def last_losses(runs, query):
        rows = [(name, run.scalars("loss").value[-1]) for name, run in runs]
        return [Table("Last losses", ("run", "loss"), rows)]

    richter.report.views.add(View("losses", "Losses", last_losses))
    richter.report.server.serve("runs")

A view answers with panels that the page can draw: ``Cells`` first, then ``Curves``, then ``Gallery``, ``Table`` and ``Words``.
Most views in this folder have their own scripts (``script``) and answer with the data for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from richter.core.catalogue import Catalogue
from richter.report.plotdata import CurveData
from richter.report.query import Query
from richter.report.shelf import Chosen
from richter.report.thin import numbers, thin

POINTS = 2000  # points of a curve in a panel
Answer = Callable[[Chosen, Query], Any]  # computed from the chosen runs: panels, JSON, a Sheet or a Picture


@dataclass(frozen=True)
class View:
    """A tab of the dashboard."""

    name: str  # used in the page's address, and after api/ in its requests
    title: str
    answer: Answer
    more: Mapping[str, Answer] = field(default_factory=dict)  # further answers for its script, by the path after api/
    script: str = "view-panels.js"  # in static/: the script that draws the view
    place: int = 100  # order among the tabs


# ------------------------------------------------------------------------------------------------- panels of a view

@dataclass(frozen=True)
class Curves:
    """A panel of curves: for each label steps and values, and standard errors if available (a ``Series`` is these three). If x is
    not a step, ``axis`` names it, and ``ticks`` name the places 1, 2, ...."""

    title: str
    curves: Mapping[str, Sequence[Any]]
    sentence: str = ""
    axis: str = ""
    ticks: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        lines = []
        for label, (step, value, *error) in self.curves.items():
            columns = [np.asarray(c, dtype=np.float64) for c in (step, value, *error)]
            line = thin(CurveData(columns[0], columns[1], columns[2] if error else np.full(len(columns[0]), np.nan)), POINTS)
            lines.append({"label": label, "step": numbers(line.step), "value": numbers(line.value), "error": numbers(line.error)})
        return {"kind": "curves", "title": self.title, "sentence": self.sentence, "curves": lines, "axis": self.axis,
                "ticks": list(self.ticks)}


@dataclass(frozen=True)
class Table:
    """A panel with a table; a cell is a number or a text."""

    title: str
    columns: Sequence[str]
    rows: Iterable[Sequence[Any]]
    sentence: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"kind": "table", "title": self.title, "sentence": self.sentence, "columns": list(self.columns),
                "rows": [[_cell(v) for v in row] for row in self.rows]}


@dataclass(frozen=True)
class Words:
    """A panel with a sentence."""

    title: str
    sentence: str

    def to_json(self) -> dict[str, Any]:
        return {"kind": "words", "title": self.title, "sentence": self.sentence}


@dataclass(frozen=True)
class Cells:
    """A panel with a matrix of numbers, each in a coloured cell. ``axes``: the names of rows and columns."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float]] | np.ndarray[Any, Any]
    sentence: str = ""
    axes: tuple[str, str] = ("", "")
    low: float = 0.0
    high: float = 1.0

    def to_json(self) -> dict[str, Any]:
        return {"kind": "cells", "title": self.title, "sentence": self.sentence, "rows": list(self.rows),
                "columns": list(self.columns), "values": [numbers(np.asarray(row, np.float64)) for row in self.values],
                "axes": list(self.axes), "low": self.low, "high": self.high}


@dataclass(frozen=True)
class Gallery:
    """A panel of images with labels. Each has the path after ``api/`` that answers with a Picture, and its query."""

    title: str
    pictures: Sequence[tuple[str, str, Mapping[str, Any]]]  # label, word, query
    sentence: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"kind": "gallery", "title": self.title, "sentence": self.sentence,
                "pictures": [{"label": label, "path": path, "query": dict(query)} for label, path, query in self.pictures]}


Panel = Curves | Table | Words | Cells | Gallery


class Sheet(NamedTuple):
    """A table to be downloaded as CSV."""

    name: str
    header: Iterable[Any]
    rows: Iterable[Iterable[Any]]


class Picture(NamedTuple):
    """An image file; the page shows it so that no script in it can run."""

    kind: str  # svg or png
    data: bytes


def _cell(value: Any) -> float | str | None:
    if isinstance(value, (int, float, np.number)) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else None
    return str(value)


# ------------------------------------------------------------------------------------------------- catalogue of views

VIEWS: Catalogue[View] = Catalogue(__name__, "VIEW", "view")
add = VIEWS.add


def tabs() -> list[View]:
    """Return all views in the order of the tabs."""
    return sorted(VIEWS.all().values(), key=lambda v: v.place)
