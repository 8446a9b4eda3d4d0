"""Panels of curves: a measure or a scalar over the steps, or a measure over the layers, with the bands of its errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from richter.core import Card, Interval
from richter.measures.profile import Peak, peak
from richter.report import plotdata
from richter.report.axes import decade_ticks, say_why, shows_whole_range, step_axis, step_text
from richter.report.looks import FAINT, LEGEND, LineStyle, depth_map
from richter.report.names import short_names, shortened
from richter.report.plotdata import CurveData, Profile
from richter.report.thin import thin

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from richter.measures.stages import Stages


def measure_panel(ax: Axes, lines: Mapping[str, tuple[CurveData, LineStyle]], card: Card, linear: float | None) -> None:
    """Draw curves of one measure with their bands, and the levels that separate lazy from rich, if the card has them."""
    most = min(400, max(40, 5000 // max(1, len(lines))))
    for label, (line, look) in lines.items():
        _curve(ax, label, thin(line, most, linear), look, faint=len(lines) > LEGEND + 1)
    step_axis(ax, linear)
    _heights(ax, [line for line, _ in lines.values()], card)
    if lines and card.rich and card.typical:
        _levels(ax, card.typical, ("lazy", "rich") if card.rich == "up" else ("rich", "lazy"))
    ax.set_title(shortened(card.heading))


def _levels(ax: Axes, typical: Interval, words: tuple[str, str]) -> None:
    """Write the words for below and above the interval at the ends of the panel."""
    for level, word, side in ((typical.low, words[0], "top"), (typical.high, words[1], "bottom")):
        if ax.get_ylim()[0] < level < ax.get_ylim()[1]:
            ax.axhline(level, color=FAINT, linewidth=0.7, linestyle=(0, (2, 3)), zorder=0)
            ax.text(1.01, level, word, transform=ax.get_yaxis_transform(), fontsize=7, color="#707070", va=side)


def _curve(ax: Axes, label: str, line: CurveData, look: LineStyle, faint: bool = False) -> None:
    width, size = (0.9, 1.5) if faint else (1.4, 2.6)
    ax.plot(line.step, line.value, look.style, color=look.colour, label=label, linewidth=width,
            marker="o" if len(line.step) <= 30 else None, markersize=size if len(line.step) > 1 else 4)
    error = np.where(np.isfinite(line.error), line.error, 0.0)
    if len(line.step) == 1 and error[0]:
        ax.errorbar(line.step, line.value, error, fmt="none", ecolor=look.colour, elinewidth=1)
    elif error.any():
        ax.fill_between(line.step, line.value - error, line.value + error, color=look.colour, alpha=0.07 if faint else 0.16,
                        linewidth=0)


def scalar_panel(ax: Axes, name: str, lines: Mapping[str, tuple[CurveData, LineStyle]], linear: float | None) -> None:
    """Draw logged scalars of one or several runs."""
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


def stage_marks(ax: Axes, stages: Stages, look: LineStyle) -> None:
    """Mark drops by dotted lines at their times, with a band for the uncertainty, and plateaus by pale bars at their levels."""
    for plateau in stages.plateaus:
        ax.plot([plateau.start, plateau.end], [plateau.level] * 2, color=look.colour, alpha=0.25, linewidth=4, gid="plateau",
                solid_capstyle="butt", zorder=0)
    for drop in stages.drops:
        ax.axvspan(*drop.interval, color=look.colour, alpha=0.12, linewidth=0, gid="interval")
        ax.axvline(drop.time, color=look.colour, linewidth=0.9, linestyle=(0, (1, 2)), gid="drop")
        ax.annotate(step_text(round(drop.time)), (drop.time, 1), (2, -2), xycoords=ax.get_xaxis_transform(),
                    textcoords="offset points", fontsize=6.5, color="#707070", va="top")


def profile_panel(ax: Axes, layers: Sequence[str], profiles: Sequence[Profile], card: Card) -> Peak:
    """Draw a measure over the layers, one curve per step with the last one darkest. A point marks each peak. If the top of the
    last curve is flat, a bar shows all layers that may be the peak. Returns the last peak."""
    place = np.arange(1.0, len(layers) + 1)
    colours = depth_map()(np.linspace(1, 0, max(2, len(profiles)))[-len(profiles):])
    for p, colour in zip(profiles, colours, strict=True):
        top = peak(p.value, p.error)
        error = np.where(np.isfinite(p.error), p.error, 0.0)
        ax.fill_between(place, p.value - error, p.value + error, color=colour, alpha=0.12, linewidth=0)
        ax.plot(place, p.value, color=colour, linewidth=1.3, label=f"step {step_text(p.step)}")
        ax.plot([top.layer], [top.value], "o", color=colour, markersize=5)
    if top.flat:
        ax.plot([top.low, top.high], [top.value] * 2, "-|", color=colour, linewidth=0.9, markersize=7, gid="flat")
    marks = plotdata.chosen(place.tolist(), 7)
    names = short_names(layers, 12)
    ax.set_xticks(marks, [names[layers[int(i) - 1]] for i in marks])
    ax.set_xlabel("layer")
    ax.grid(alpha=0.7)
    ax.legend(frameon=False, fontsize=7)
    finite = [(p, np.isfinite(p.value)) for p in profiles]
    _heights(ax, [CurveData(place[rows], p.value[rows], p.error[rows]) for p, rows in finite], card)
    ax.set_title(shortened(card.heading))
    return top


def profile_lines(ax: Axes, profiles: Mapping[str, Mapping[str, float]], looks: Mapping[str, LineStyle], title: str) -> None:
    """Draw a value over the layers, one curve for each run."""
    layers = list(dict.fromkeys(k for values in profiles.values() for k in values))
    for name, values in profiles.items():
        at = [i for i, k in enumerate(layers) if k in values]
        ax.plot(at, [values[layers[i]] for i in at], looks[name].style, color=looks[name].colour, marker="o", markersize=4)
    marks = plotdata.chosen(range(len(layers)), 7)
    names = short_names(layers, 12)
    ax.set_xticks(marks, [names[layers[i]] for i in marks])
    numbers = [v for values in profiles.values() for v in values.values()]
    if numbers and min(numbers) > 0 and max(numbers) > 20 * min(numbers):
        ax.set_yscale("log")
        decade_ticks(ax, "y")
    ax.set_xlabel("layer")
    ax.grid(alpha=0.7)
    ax.set_title(shortened(title))


def _heights(ax: Axes, lines: Sequence[CurveData], card: Card) -> None:
    """Set limits from the values and a typical error, so that one wide band does not flatten the curves."""
    if not lines:
        return
    values, errors = (np.concatenate([getattr(line, c) for line in lines]) for c in ("value", "error"))
    low, high = float(values.min()), float(values.max())
    if shows_whole_range(card, low, high):
        ax.set_ylim(card.bounds.low, card.bounds.high + 0.02 * (card.bounds.high - card.bounds.low))
        return
    typical = float(np.quantile(errors[np.isfinite(errors)], 0.8)) if np.isfinite(errors).any() else 0.0
    band = min(typical, high - low) if high > low else 1.5 * typical
    room = max(0.06 * (high - low) + band, 1e-6 * max(abs(low), abs(high)), 1e-12)
    low, floor = low - room, 0.0 if values.min() >= 0 and values.min() < 0.6 * values.max() else -math.inf
    ax.set_ylim(max(low, floor) if floor == 0.0 and low < 0 else low, high + room)
