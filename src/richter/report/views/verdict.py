"""The verdict, lazy or rich, of the whole model and of each layer; for an experiment also its claims and figures."""

from __future__ import annotations

from typing import Any

from richter.core import SelectionError
from richter.instrument.verdict import diagnose
from richter.measures.delay import delay_of
from richter.report.claims import told
from richter.report.query import Query
from richter.report.shelf import Chosen
from richter.report.views import Picture, View

KINDS = ("svg", "png")  # kinds of images that a browser shows


def verdict(runs: Chosen, query: Query) -> Any:
    """Return the verdict in words, the run's claims, and the names of its stored figures."""
    name, run = runs.one()
    base = {"run": name, "claims": [told(k, record)._asdict() for k, record in run.claims.items()],
            "figures": [{"name": n, "kind": kind} for n, kind in run.figures if kind in KINDS]}
    late = [f"{late}." for late in [delay_of(run)] if late]
    try:
        d = diagnose(run)
    except SelectionError:
        return {**base, "word": "", "verdict": "Nothing has been measured yet.", "step": None, "measured": "", "magnitude": None,
                "margin": None, "remarks": late, "unknown": [], "evidence": [str(failure) for failure in run.failures],
                "advice": [], "layers": []}
    answer = d.to_json()
    return {**base, **answer, "remarks": [*answer["remarks"], *late],
            "layers": [{"layer": v.layer, "verdict": v.verdict, "words": str(v)} for v in d.layers]}


def figure(runs: Chosen, query: Query) -> Picture:
    """Return a figure that was stored with a run."""
    kind = query.one("kind")
    if kind not in KINDS:
        raise SelectionError(f"kind={kind[:100]!r}: pictures are shown as {' or '.join(KINDS)}.")
    return Picture(kind, runs.one()[1].figure(query.one("name"), kind))


VIEW = View("verdict", "Verdict", verdict, more={"figure": figure}, script="view-verdict.js", place=5)
