"""Panels of curves: a measure or a scalar over the steps, with the bands of its errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from richter.instrument.verdict import LAZY, RICH
from richter.report.axes import decade_ticks, say_why, step_axis
from richter.report.looks import FAINT, LEGEND, Look
from richter.report.plotdata import Line
from richter.report.thin import thin
from richter.report.titles import TITLES, UNIT, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def measure_panel(ax: Axes, lines: Mapping[str, tuple[Line, Look]], measure: str, linear: float | None) -> None:
    """Curves of one measure with their bands."""
    most = min(400, max(40, 5000 // max(1, len(lines))))
    for label, (line, look) in lines.items():
        _curve(ax, label, thin(line, most, linear), look, faint=len(lines) > LEGEND + 1)
    step_axis(ax, linear)
    _heights(ax, [line for line, _ in lines.values()], measure)
    if measure == "c_uc_ratio" and lines:
        for level, word, side in ((LAZY, "lazy", "top"), (RICH, "rich", "bottom")):
            if ax.get_ylim()[0] < level < ax.get_ylim()[1]:
                ax.axhline(level, color=FAINT, linewidth=0.7, linestyle=(0, (2, 3)), zorder=0)
                ax.text(1.01, level, word, transform=ax.get_yaxis_transform(), fontsize=7, color="#707070", va=side)
    ax.set_title(TITLES.get(measure, shortened(measure)))


def _curve(ax: Axes, label: str, line: Line, look: Look, faint: bool = False) -> None:
    width, size = (0.9, 1.5) if faint else (1.4, 2.6)
    ax.plot(line.step, line.value, look.style, color=look.colour, label=label, linewidth=width,
            marker="o" if len(line.step) <= 30 else None, markersize=size if len(line.step) > 1 else 4)
    error = np.where(np.isfinite(line.error), line.error, 0.0)
    if len(line.step) == 1 and error[0]:
        ax.errorbar(line.step, line.value, error, fmt="none", ecolor=look.colour, elinewidth=1)
    elif error.any():
        ax.fill_between(line.step, line.value - error, line.value + error, color=look.colour, alpha=0.07 if faint else 0.16,
                        linewidth=0)


def scalar_panel(ax: Axes, name: str, lines: Mapping[str, tuple[Line, Look]], linear: float | None) -> None:
    for label, (line, look) in lines.items():
        few = thin(line, 600, linear)
        ax.plot(few.step, few.value, look.style, color=look.colour, label=label, linewidth=1.1,
                marker="o" if len(few.step) <= 30 else None, markersize=2.6)
    values = np.concatenate([line.value for line, _ in lines.values()] or [np.empty(0)])
    if len(values) and values.min() > 0 and values.max() > 50 * values.min():
        ax.set_yscale("log")
        decade_ticks(ax, "y")
    step_axis(ax, linear)
    ax.set_title(shortened(name))
    if not len(values):
        say_why(ax, [])


def _heights(ax: Axes, lines: Sequence[Line], measure: str) -> None:
    """Limits by the values, with the band of a typical error; one wide band does not flatten the curves."""
    if not lines:
        return
    values, errors = (np.concatenate([getattr(line, c) for line in lines]) for c in ("value", "error"))
    if measure in UNIT and values.min() >= 0 and values.max() <= 1:
        ax.set_ylim(0, 1.02)
        return
    typical = float(np.quantile(errors[np.isfinite(errors)], 0.8)) if np.isfinite(errors).any() else 0.0
    low, high = float(values.min()), float(values.max())
    band = min(typical, high - low) if high > low else 1.5 * typical
    room = max(0.06 * (high - low) + band, 1e-6 * max(abs(low), abs(high)), 1e-12)
    low, floor = low - room, 0.0 if values.min() >= 0 and values.min() < 0.6 * values.max() else -math.inf
    ax.set_ylim(max(low, floor) if floor == 0.0 and low < 0 else low, high + room)
