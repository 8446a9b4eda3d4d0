"""Are the layers of the chosen runs alike? CKA and overlap of leading features, where they have kept features of the same
examples: of one run its first and its last step, of several the first beside each of the others."""

from __future__ import annotations

import numpy as np

from richter.core import SelectionError
from richter.report.comparison import Comparison, Kept, drift, kept, of_kept, steps_of
from richter.report.query import Query
from richter.report.shelf import Chosen
from richter.report.views import Cells, Curves, Panel, View, Words

MOST = 4  # runs
NOTHING = ("No features to compare", "The chosen runs have kept no features of their probes. An Observer keeps them if asked to: "
           "Observer(..., keep_features=64).")


def compare(runs: Chosen, query: Query) -> list[Panel]:
    """Matrices of all pairs of layers; of one run also how far each layer has gone from its first features."""
    first, last = query.whole("first", -2**63, 2**63 - 1, None), query.whole("last", -2**63, 2**63 - 1, None)
    ends: list[tuple[Kept, Kept]] = []
    panels: list[Panel] = []
    alone = len(runs) == 1
    for name, run in runs:
        if (known := steps_of(run)) and len(ends) < MOST:
            start = known[0] if first is None else first
            ends.append((kept(run, start, name) if alone else kept(run, last, name), kept(run, last, name)))
    pairs = [ends[0]] if alone and ends else [(ends[0][0], other[1]) for other in ends[1:]]
    try:
        matrices = [panel for a, b in pairs for panel in _cells(of_kept(a, b, debiased=True))]
        panels = _drift(runs) if alone and ends else []
    except SelectionError as why:
        matrices = [Words("Not compared", str(why))]
    if not matrices and ends:
        return [Words("Only one has kept features", f"Of the chosen runs {ends[0][0].name} alone has. Choose it alone for its "
                                                    f"first and its last step.")]
    return [*matrices, *panels] or [Words(*NOTHING)]


def _drift(runs: Chosen) -> list[Panel]:
    """Of the only run."""
    lines = {k: (np.array(steps), v) for _, run in runs for steps, curves in [drift(run)] for k, v in curves.items()}
    return [Curves("CKA with the first step, by layer", lines, "Of what each layer reads, debiased: 1 as long as its features "
                   "are those of the beginning.")] if lines else []


def _cells(seen: Comparison) -> list[Panel]:
    (a, b), (rows, columns) = seen.names, seen.layers
    words = (f"Of what each layer reads, on {seen.rows} {seen.kind}. 1: the same features up to a rotation and a scale; "
             f"debiased, so that 0 is nothing in common.")
    overlap = (f"Of the {seen.cosines.shape[-1]} leading eigenfunctions: mean squared cosine of their principal angles; up to "
               f"{seen.chance:.2f} by chance.")
    return [Cells("CKA of every pair of layers", rows, columns, seen.cka, words, (a, b)),
            Cells("Overlap of leading features", rows, columns, seen.overlap, overlap, (a, b))]


VIEW = View("compare", "Compare", compare, place=4)
