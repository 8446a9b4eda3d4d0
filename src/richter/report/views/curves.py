"""One panel of curves per measure and scalar, and a table with every point."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from richter.core import Mark, Remark, SelectionError
from richter.report.query import Query
from richter.report.shelf import Chosen
from richter.report.thin import numbers, thin
from richter.report.views import Sheet, View
from richter.runs import Series

MOST = 4000  # curves in one answer
MARKED = 3  # runs whose stages are computed


def curves(runs: Chosen, query: Query) -> Any:
    """Return the curves that exist of the chosen runs, measures, layers and scalars, and the stages of losses if there are few
    runs."""
    few = len(runs) <= MARKED
    points = query.whole("points", 4, 10_000, 400)
    return {"curves": [{"run": name, "measure": measure, "layer": layer, "note": remark.text, "mark": remark.mark.value,
                        "count": len(series.step), "step": line.step.tolist(), "value": numbers(line.value),
                        "error": numbers(line.error), "stages": _stages(measure, series) if layer is None and few else None}
                       for name, measure, layer, series, remark in _chosen(runs, query) for line in [thin(series, points)]]}


def curves_csv(runs: Chosen, query: Query) -> Sheet:
    """Return the same curves with every point, as a table."""
    rows = [(name, int(step), layer or "", measure, float(value), float(error), remark.text, remark.mark.value)
            for name, measure, layer, series, remark in _chosen(runs, query)
            for step, value, error in zip(*series, strict=True)]
    return Sheet("curves", ["run", "step", "layer", "measure", "value", "error", "note", "mark"], rows)


def _chosen(runs: Chosen, query: Query) -> Iterator[tuple[str, str, str | None, Series, Remark]]:
    """(run, measure, layer or None for a scalar, series, the mark and the note of its last row)."""
    measures, layers, scalars = (query.several(k) for k in ("measure", "layer", "scalar"))
    if (count := len(runs) * (len(measures) * len(layers) + len(scalars))) > MOST:
        raise SelectionError(f"{count} curves were requested, and one answer has at most {MOST}. Choose fewer runs or layers.")
    for name, run in runs:
        for (measure, layer), (series, remark) in run.curves(measures, layers).items() if measures and layers else ():
            yield name, measure, layer, series, remark
        for scalar, series in run.scalar_curves(scalars).items() if scalars else ():
            yield name, scalar, None, series, Remark(Mark.EXACT)


def _stages(name: str, series: Series) -> dict[str, Any] | None:
    """Stages of a loss as a record; None for other scalars."""
    from richter.measures.stages import is_loss, stages_in
    stages = stages_in(series) if is_loss(name) else None
    return None if stages is None else stages.to_json()


VIEW = View("curves", "Curves", curves, more={"curves.csv": curves_csv}, script="view-curves.js", place=0)
