"""Drawings that several figures of chapter 7 of [layerwise] share: metrics between epochs, and how the first twenty features
evolve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from richter.experiments.frame import Results
from richter.experiments.layerwise.evolution import CLASSES
from richter.experiments.layerwise.metrics import metric_panels, relative
from richter.experiments.layerwise.reading import when
from richter.report.drawing import COLOURS, band, depth_looks, label, line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = 20  # features whose evolution is drawn


def seeds(r: Results, what: str = "Median and range") -> str:
    """What a caption says of them."""
    count = len(r.distinct("seed"))
    return "One seed." if count == 1 else f"{what} of {count} seeds."


def outside(ax: Axes) -> None:
    """The legend to the right of a panel, where it hides nothing."""
    ax.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def looks(r: Results, most: int = 6) -> list[int]:
    """Numbers of the looks that are drawn: the first and the last, and some between them."""
    count = r["epoch"].shape[1]
    return sorted({round(i) for i in np.linspace(0, count - 1, min(most, count))})


def by_epoch(axes: Sequence[Axes], r: Results, name: str) -> None:
    """Cumulative quality and utilisation, and intensity, at several epochs.  [layerwise, Fig. 7.4]"""
    metric_panels(axes, {f"epoch {int(r['epoch'][0, i])}": when(r, i) for i in looks(r)}, CLASSES, legend=False)
    outside(axes[2])
    for ax, part in zip(axes, ("(i): of the target", "(ii): by the learned function", "(iii): strength"), strict=True):
        ax.set_title(f"{name} {part}")


def first_features(axes: Sequence[Axes], r: Results, name: str) -> None:
    """Quality, utilisation, accuracies and intensity by epoch; of single features, the first C from dark to light, those after
    them grey.  [layerwise, Fig. 7.5]"""
    epoch, look = r["epoch"][0], depth_looks([str(k) for k in range(CLASSES)])
    for ax, values in ((axes[0], r["quality"]), (axes[1], r["utilisation"]), (axes[3], relative(r["intensity"]))):
        for k in reversed(range(SHOWN)):
            line(ax, epoch, np.median(values[:, :, k], 0), look[str(k)].colour if k < CLASSES else "#c4c4c4",
                 {0: "feature 1", CLASSES - 1: f"feature {CLASSES}", CLASSES: f"{CLASSES + 1} to {SHOWN}"}.get(k, ""))
    for rows, colour, words in ((r["accuracy_fit"], COLOURS[0], "training"), (r["accuracy"], COLOURS[1], "test")):
        band(axes[2], epoch, rows, colour, words)
    for ax, y, part in zip(axes, ("quality", "utilisation", "accuracy", "intensity, relative to the first"),
                           ("(i)", "(ii)", "(iii)", "(iv)"), strict=True):
        label(ax, "epoch", y, f"{name} {part}", log="y" if ax is axes[3] else "", legend=ax is axes[2])
    outside(axes[3])
