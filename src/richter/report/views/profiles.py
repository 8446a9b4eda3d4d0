"""Each chosen measure over the layers at a few steps, with the place of its peak."""

from __future__ import annotations

import numpy as np

from richter.core import Mark
from richter.measures.cards import SHOWN_FIRST, card
from richter.measures.profile import peak
from richter.report import plotdata
from richter.report.axes import step_text
from richter.report.cards import cards_of
from richter.report.plotdata import CurveData
from richter.report.query import Query
from richter.report.shelf import Chosen
from richter.report.views import Curves, Table, View, Words
from richter.runs import Run


def profiles(runs: Chosen, query: Query) -> list[Curves | Table | Words]:
    """Return one panel per run and measure, and one table of the peaks."""
    curves: list[Curves | Table | Words] = []
    peaks = []
    for name, run in runs:
        cards = cards_of(run)
        for m in query.several("measure") or SHOWN_FIRST:
            layers, drawn = plotdata.profiles(_lines(run, m))
            if drawn:
                described, place = card(m, cards), np.arange(1, len(layers) + 1)
                curves.append(Curves(f"{name}: {described.heading}" if len(runs) > 1 else described.heading,
                                     {f"step {step_text(p.step)}": (place, p.value, p.error) for p in drawn},
                                     described.sentence, axis="layer", ticks=layers))
                peaks += [(name, described.heading, p.step, layers[top.layer - 1], str(top)) for p in drawn
                          for top in [peak(p.value, p.error)]]
    if not curves:
        return [Words("No profiles", "None of the chosen measures has values in three layers or more.")]
    return [*curves, Table("Peaks", ("run", "measure", "step", "layer", "where"), peaks)]


def _lines(run: Run, measure: str) -> dict[str, CurveData]:
    """Return the findings of a measure, one curve per layer in order of depth."""
    curves = run.curves([measure], run.layers)
    lines = {}
    for layer in run.layers:
        series, remark = curves.get((measure, layer), (None, None))
        if series is not None and remark is not None and remark.mark is not Mark.TRIVIAL:
            real = np.isfinite(series.value)
            if real.any():
                lines[layer] = CurveData(*(np.asarray(c, dtype=np.float64)[real] for c in series))
    return lines


VIEW = View("profiles", "Profiles", profiles, script="view-profiles.js", place=1)
