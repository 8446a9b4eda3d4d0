"""Features of the chosen runs: quality, utilisation and intensity of each, their evolution, kappa beside the learning curve, and
the inputs that activate each feature most."""

from __future__ import annotations

import itertools

import numpy as np

from richter.core import WHOLE, SelectionError
from richter.report import features, plotdata
from richter.report.axes import step_text
from richter.report.comparison import last_kept
from richter.report.png import png
from richter.report.query import Query
from richter.report.shelf import Chosen
from richter.report.views import Curves, Gallery, Panel, Picture, View, Words
from richter.runs import Run

RUNS = 4  # runs whose features are shown
TIMES = 4  # steps of one run
BARE = Words("No features", "The chosen runs have measured no features: add 'kappa_cka' to measures=. With keep_features=64 and "
             "keep_inputs=True an Observer also stores the inputs that activate each feature most.")


def shown(runs: Chosen, query: Query) -> list[Panel]:
    """Return the panels of every chosen run that has features."""
    panels: list[Panel] = []
    for name, run in itertools.islice(runs, RUNS):
        owner = f"{name}: " if len(runs) > 1 else ""
        evolution = [] if owner else _evolution(run)
        panels += [*_spectrum(run, owner), *_learning(run, owner), *evolution, *_exciting(name, run, owner)]
    return panels or [BARE]


def _spectrum(run: Run, owner: str) -> list[Panel]:
    """Return cumulative quality, cumulative utilisation and intensity of the features at a few steps."""
    if WHOLE not in features.layers(run):
        return []
    read_steps = plotdata.chosen(features.steps(run), TIMES)
    parts = {f"step {step_text(s)}": features.of_step(run, WHOLE, s) for s in read_steps}

    def curves(name: str, total: bool) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        values = {k: p[name].cumsum() if total else p[name] / max(p[name].max(initial=0.0), 1e-300) for k, p in parts.items()}
        return {k: (np.arange(1, len(v) + 1), v) for k, v in values.items()}
    return [Curves(f"{owner}Cumulative quality", curves("quality", True), "Share of the targets.",
                   axis="feature"),
            Curves(f"{owner}Cumulative utilisation", curves("utilisation", True), "Share of the outputs' space.",
                   axis="feature"),
            Curves(f"{owner}Intensity, relative to the first", curves("intensity", False), "Strength of each feature.",
                   axis="feature")]


def _learning(run: Run, owner: str) -> list[Panel]:
    """Panel of kappa and accuracy over training."""
    shares = features.curves_of(run)["shares"]
    if features.KAPPA not in shares:
        return []
    return [Curves(f"{owner}Kappa and accuracy", shares, "Kappa below 0.1: as few features as the outputs need. Few features are "
                                                         "not always good features.")]


def _evolution(run: Run) -> list[Panel]:
    """Return curves of the first features, one each."""
    if WHOLE not in features.layers(run) or len(features.steps(run)) < 2:
        return []
    steps, table = features.through_time(run)
    return [Curves(f"{name.capitalize()} of the first features", {f"feature {k + 1}": (np.array(steps), values[:, k])
                                                                  for k in range(values.shape[1])},
                   "Relative to the strongest." if name == "intensity" else "One curve per feature, strongest first.")
            for name, values in ((name, table[name]) for name in ("quality", "utilisation", "intensity"))]


def _exciting(name: str, run: Run, owner: str) -> list[Panel]:
    """Panels of the examples that excite each feature most."""
    if not features.can_excite(run):
        return []
    rows = features.excited(run)
    step = last_kept(run)
    return [Gallery(f"{owner}Inputs that activate each feature most", [
        (f"feature {e.number}, {e.share:.0%} of the variance", "exciting", {"run": name, "feature": e.number, "step": step})
        for e in rows], f"Eigenfunctions of what layer {features.readout_layer(run)} reads, centred, at step {step_text(step)}.")]


def exciting(runs: Chosen, query: Query) -> Picture:
    """Return the inputs that activate a feature most, side by side."""
    _, run = runs.one()
    number = query.whole("feature", 1, features.SHOWN, 1)
    rows = features.excited(run, None, query.whole("step", -2**63, 2**63 - 1, None))
    for e in rows:
        if e.number == number:
            return Picture("png", png(features.mosaic(run, e.examples)))
    raise SelectionError(f"the run {run.name} has {len(rows)} such features; feature {number} does not exist.")


VIEW = View("features", "Features", shown, more={"exciting": exciting}, place=3)
