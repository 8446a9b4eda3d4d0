"""Drawing functions for experiments: panels with labelled axes, bands over seeds, lines for theory, points for measurements,
and a caption that says what the figure shows.

    @styled
    def draw(results):
        figure, (left, right) = panels(2, across=2)
        band(left, steps, results["nfc"], label="NFC")                 # one row for each seed
        points(right, widths, results["error"], colour=COLOURS[1], label="measured")
        line(right, widths, predicted, label="theory")
        label(left, "step", "correlation", "A: during training")
        label(right, "width", "error", "B: by width", log="xy")
        caption(figure, "The correlation rises with training; the error falls as the theory says.")
        return figure
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from richter.report.axes import decade_ticks, key, step_text
from richter.report.axes import grid_of_panels as panels
from richter.report.images import matrix_panel
from richter.report.looks import COLOURS, LineStyle, depth_looks, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "LineStyle", "band", "caption", "depth_looks", "faults", "key", "label", "line", "matrix_panel", "panels",
           "points", "styled"]

CAPTION = "caption"  # the id of the caption's text object, by which it is recognised
# quantities that are whole numbers, so ticks are whole numbers too
COUNTED = ("layer", "depth", "epoch", "network", "eigenvector")


def band(ax: Axes, x: ArrayLike, ys: ArrayLike, colour: str = COLOURS[0], label: str = "", style: str = "-") -> None:
    """A curve over seeds: the median of the rows of ``ys``, and a band from the smallest to the largest."""
    rows = np.atleast_2d(np.asarray(ys, dtype=float))
    if len(rows) > 1:
        ax.fill_between(np.asarray(x, dtype=float), rows.min(0), rows.max(0), color=colour, alpha=0.18, linewidth=0)
    ax.plot(np.asarray(x, dtype=float), np.median(rows, 0), style, color=colour, label=label or None, linewidth=1.4)


def points(ax: Axes, x: ArrayLike, ys: ArrayLike, colour: str = COLOURS[0], label: str = "", marker: str = "o") -> None:
    """Measurement: the median of the rows of ``ys`` as points, with bars from the smallest to the largest."""
    rows = np.atleast_2d(np.asarray(ys, dtype=float))
    middle = np.median(rows, 0)
    bars = np.stack([middle - rows.min(0), rows.max(0) - middle]) if len(rows) > 1 else None
    ax.errorbar(np.asarray(x, dtype=float), middle, bars, fmt=marker, color=colour, label=label or None, markersize=3.6,
                elinewidth=0.9, capsize=0)


def line(ax: Axes, x: ArrayLike, y: ArrayLike, colour: str = "#222222", label: str = "", style: str = "-") -> None:
    """Theory: a line, without marks."""
    ax.plot(np.asarray(x, dtype=float), np.asarray(y, dtype=float), style, color=colour, label=label or None, linewidth=1.2)


def label(ax: Axes, x: str, y: str, title: str = "", *, log: str = "", steps: bool = False, legend: bool = False) -> None:
    """Name the axes. ``log``: the logarithmic axes, "x", "y" or "xy". ``steps``: x is a training step, on a scale that is linear
    up to 1 and logarithmic above. ``legend``: draw a legend for the curves of this panel."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.set_title(title)
    ax.grid(alpha=0.7)
    if steps:
        ax.set_xscale("symlog", linthresh=1, linscale=0.6)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: step_text(v)))
    for which in log:
        (ax.set_xscale if which == "x" else ax.set_yscale)("log")
    if log:
        decade_ticks(ax, log)
    if x.endswith(COUNTED) and not steps and "x" not in log:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if legend:
        ax.legend(frameon=False, fontsize=7.5)


def caption(figure: Figure, sentence: str) -> None:
    """Write the caption above the panels. The figure grows by the height of its lines."""
    width, height = figure.get_size_inches()
    lines = textwrap.wrap(sentence, max(20, int(15 * width)))
    figure.set_size_inches(width, height + 0.17 * len(lines))
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=8.5, gid=CAPTION)


def faults(figure: Figure) -> list[str]:
    """List the missing parts of a drawing: names of axes, or the caption. Images of matrices need no axis names."""
    lacking = ["no sentence says what to see: caption(figure, ...)"] if not any(
        text.get_gid() == CAPTION and text.get_text() for text in figure.texts) else []
    for i, ax in enumerate(figure.axes):
        if ax.axison and (ax.lines or ax.collections or ax.patches) and not ax.images and not _is_colorbar(ax):
            lacking += [f"panel {i + 1} ({ax.get_title() or 'without a title'}) does not name its {name} axis"
                        for name, axis_label in (("x", ax.get_xlabel()), ("y", ax.get_ylabel())) if not axis_label]
    return lacking


def _is_colorbar(ax: Axes) -> bool:
    return ax.get_label() == "<colorbar>"
