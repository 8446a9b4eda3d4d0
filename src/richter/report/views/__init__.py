"""The views of the dashboard: one file for each tab, and this folder is their list. One from outside is added by a call:

    def last_losses(runs, query):
        rows = [(name, run.scalar("loss").value[-1]) for name, run in runs]
        return [Table("Last losses", ("run", "loss"), rows)]

    richter.report.views.add(View("losses", "Losses", last_losses))
    richter.report.server.serve("runs")

A view answers with panels, which the page knows how to draw: ``Cells`` first, then ``Curves``, then ``Gallery``, ``Table`` and
``Words``. Most of this folder have scripts of their own (``script``), and answer with what these draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from richter.core.catalogue import Catalogue
from richter.report.plotdata import Line
from richter.report.query import Query
from richter.report.shelf import Chosen
from richter.report.thin import numbers, thin

POINTS = 2000  # of a curve of a panel
Answer = Callable[[Chosen, Query], Any]  # of the runs that were chosen: panels, JSON, a Sheet or a Picture


@dataclass(frozen=True)
class View:
    """A tab of the dashboard."""

    name: str  # in the address of the page, and after api/ in those it asks
    title: str
    answer: Answer
    more: Mapping[str, Answer] = field(default_factory=dict)  # what else its script asks for, by the word after api/
    script: str = "view-panels.js"  # in static/: how it is drawn
    place: int = 100  # among the tabs


# ------------------------------------------------------------------------------------------------- what a view answers

@dataclass(frozen=True)
class Curves:
    """A panel of curves: by label, steps and values, and standard errors if there are (a ``Series`` is these three). What is not
    over steps names its ``axis``, and its ``ticks`` at 1, 2, ... if they have names."""

    title: str
    curves: Mapping[str, Sequence[Any]]
    sentence: str = ""
    axis: str = ""
    ticks: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        lines = []
        for label, (step, value, *error) in self.curves.items():
            given = [np.asarray(c, dtype=np.float64) for c in (step, value, *error)]
            line = thin(Line(given[0], given[1], given[2] if error else np.full(len(given[0]), np.nan)), POINTS)
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
    """A panel with a matrix of numbers, each written in a cell of its colour; ``axes``: what rows and columns are."""

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
    """A panel with pictures, each under a label: the word after ``api/`` that answers with a Picture, and what it is asked."""

    title: str
    pictures: Sequence[tuple[str, str, Mapping[str, Any]]]  # label, word, query
    sentence: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"kind": "gallery", "title": self.title, "sentence": self.sentence,
                "pictures": [{"label": label, "path": path, "query": dict(query)} for label, path, query in self.pictures]}


Panel = Curves | Table | Words | Cells | Gallery


class Sheet(NamedTuple):
    """A table to be saved as CSV."""

    name: str
    header: Iterable[Any]
    rows: Iterable[Iterable[Any]]


class Picture(NamedTuple):
    """A picture, shown as an image, in which nothing runs."""

    kind: str  # svg or png
    data: bytes


def _cell(value: Any) -> float | str | None:
    if isinstance(value, (int, float, np.number)) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else None
    return str(value)


# ------------------------------------------------------------------------------------------------- which views there are

VIEWS: Catalogue[View] = Catalogue(__name__, "VIEW", "view")
add = VIEWS.add


def tabs() -> list[View]:
    """Every view in the order of the tabs."""
    return sorted(VIEWS.all().values(), key=lambda v: v.place)
