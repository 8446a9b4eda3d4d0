"""Similarity of the layers of the chosen runs: CKA and overlap of leading features, if the runs stored features of the same
examples. A single run compares its first and its last step; several runs compare the first run with each of the others."""

from __future__ import annotations

import numpy as np

from richter.core import SelectionError
from richter.report.comparison import Comparison, StoredFeatures, drift, kept, of_kept, steps_of
from richter.report.query import Query
from richter.report.shelf import Chosen
from richter.report.views import Cells, Curves, Panel, View, Words

MOST = 4  # runs
NOTHING = ("No features to compare", "The chosen runs have stored no features of their probes. An Observer stores them with "
           "keep_features: Observer(..., keep_features=64).")


def compare(runs: Chosen, query: Query) -> list[Panel]:
    """Return matrices of all pairs of layers, and for a single run how far each layer moved from its first features."""
    first, last = query.whole("first", -2**63, 2**63 - 1, None), query.whole("last", -2**63, 2**63 - 1, None)
    ends: list[tuple[StoredFeatures, StoredFeatures]] = []
    panels: list[Panel] = []
    alone = len(runs) == 1
    for name, run in runs:
        if (steps := steps_of(run)) and len(ends) < MOST:
            start = steps[0] if first is None else first
            ends.append((kept(run, start, name) if alone else kept(run, last, name), kept(run, last, name)))
    pairs = [ends[0]] if alone and ends else [(ends[0][0], other[1]) for other in ends[1:]]
    try:
        matrices = [panel for a, b in pairs for panel in _cells(of_kept(a, b, debiased=True))]
        panels = _drift(runs) if alone and ends else []
    except SelectionError as why:
        matrices = [Words("Not compared", str(why))]
    if not matrices and ends:
        return [Words("Only one run has stored features", f"Only {ends[0][0].name} has stored features. Choose it alone to see "
                                                          f"its first and last step.")]
    return [*matrices, *panels] or [Words(*NOTHING)]


def _drift(runs: Chosen) -> list[Panel]:
    """Return the drift of a single run."""
    lines = {k: (np.array(steps), v) for _, run in runs for steps, curves in [drift(run)] for k, v in curves.items()}
    return [Curves("CKA with the first step, by layer", lines, "CKA of what each layer reads, debiased: 1 while its features are "
                   "unchanged.")] if lines else []


def _cells(seen: Comparison) -> list[Panel]:
    """Panels of CKA and overlap of all pairs of layers."""
    (a, b), (rows, columns) = seen.names, seen.layers
    words = (f"CKA of what each layer reads, on {seen.rows} {seen.kind}. 1: the same features up to a rotation and a scale; "
             f"debiased, so that 0 means nothing in common.")
    overlap = (f"Mean squared cosine of the principal angles between the {seen.cosines.shape[-1]} leading eigenfunctions; up to "
               f"{seen.chance:.2f} by chance.")
    return [Cells("CKA of every pair of layers", rows, columns, seen.cka, words, (a, b)),
            Cells("Overlap of leading features", rows, columns, seen.overlap, overlap, (a, b))]


VIEW = View("compare", "Compare", compare, place=4)
