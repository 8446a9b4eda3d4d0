"""Axes: the panels of a figure, scales of steps and values, ticks as text, legends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from richter.core import WHOLE, Card
from richter.report import plotdata
from richter.report.looks import FAINT, LEGEND, LineStyle, depth_map
from richter.report.names import short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 10.6  # inches, width of a full figure


def grid_of_panels(panels: int, across: int, width: float | None = None, height: float = 2.5) -> tuple[Figure, list[Axes]]:
    """Return a figure with this number of panels; with zero panels it shows one sentence."""
    from matplotlib.figure import Figure
    columns = min(across, max(1, panels))
    rows = -(-max(1, panels) // columns)
    size = (width * columns if width else WIDTH * max(columns, 1.2) / across, height * rows + 0.1)
    if not panels:
        figure = Figure(figsize=size)
        figure.text(0.5, 0.5, "nothing to show yet", ha="center", va="center", color=FAINT)
        return figure, []
    figure = Figure(figsize=size, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06, wspace=0.03, hspace=0.04)  # type: ignore[union-attr, call-arg]
    return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(panels)]


def say_why(ax: Axes, notes: Iterable[str]) -> None:
    """Write into an empty panel why it is empty: the first note of its rows."""
    import textwrap
    note = next((n for n in notes if n), "")
    words = textwrap.fill(f"no value: {note}" if note else "no value", 34, max_lines=5)
    ax.text(0.5, 0.5, words, transform=ax.transAxes, ha="center", va="center", color="#707070")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.set_xlabel("")


def shows_whole_range(card: Card, low: float, high: float) -> bool:
    """Whether the axis of a measure shows its whole range: its card asks for it, and values from ``low`` to ``high`` lie in
    it."""
    return card.whole and math.isfinite(card.bounds.low + card.bounds.high) and low in card.bounds and high in card.bounds


def same_height(axes: Sequence[Axes]) -> None:
    """Give some axes the same limits of y."""
    if axes:
        low, high = min(a.get_ylim()[0] for a in axes), max(a.get_ylim()[1] for a in axes)
        for ax in axes:
            ax.set_ylim(low, high)


def same_width(axes: Sequence[Axes]) -> None:
    """Give all panels with curves the same range of steps."""
    drawn = [ax for ax in axes if ax.lines]
    if drawn:
        low, high = min(a.get_xlim()[0] for a in drawn), max(a.get_xlim()[1] for a in drawn)
        for ax in axes:
            ax.set_xlim(low, high)


def step_axis(ax: Axes, linear: float | None) -> None:
    """Scale the step axis by its data: logarithmic after the first positive step if the steps span decades."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
    low, high = ax.dataLim.intervalx if ax.lines else (0.0, 1.0)
    if linear is not None and math.isfinite(high):
        ax.set_xscale("symlog", linthresh=linear, linscale=0.6)
        powers = [10.0 ** k for k in range(math.floor(math.log10(linear)), math.ceil(math.log10(max(high, linear))) + 1)]
        major = [p for p in powers if linear <= p <= 1.01 * high]
        ax.xaxis.set_major_locator(FixedLocator([0.0, *major[::-(-len(major) // 6) or 1]]))
        ax.xaxis.set_minor_locator(NullLocator())
    else:
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True) if low < high else FixedLocator([low]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: step_text(v)))
    if low < high:
        ax.set_xlim(left=low if low <= 0 else None)
    ax.set_xlabel("step")
    ax.grid(alpha=0.7)


def step_text(step: float) -> str:
    """0, 500, 2500, 12.5k, 3M."""
    for least, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(step) >= least:
            return f"{step / unit:.4g}{letter}"
    return f"{step:g}"


def decade_ticks(ax: Axes, which: str = "xy") -> None:
    """Write ticks of logarithmic axes as text, as 10 with a raised exponent where the number would be long."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
    for axis in [a for w, a in (("x", ax.xaxis), ("y", ax.yaxis)) if w in which]:
        low, high = axis.get_view_interval()
        wide = high > 30 * low > 0
        axis.set_major_locator(LogLocator(numticks=7) if wide else LogLocator(subs=(1.0, 2.0, 5.0), numticks=7))
        axis.set_major_formatter(FuncFormatter(lambda v, _: decade_text(v)))
        axis.set_minor_locator(NullLocator())


def plain_ticks(figure: Figure) -> None:
    """Replace Matplotlib's math text on ticks of logarithmic axes by plain text, because math text is not parsed here."""
    from matplotlib.ticker import FuncFormatter, LogFormatter, NullFormatter
    for axis in [a for ax in figure.axes for a in (ax.xaxis, ax.yaxis)]:
        if isinstance(axis.get_major_formatter(), LogFormatter):
            axis.set_major_formatter(FuncFormatter(lambda v, _: decade_text(v)))
            axis.set_minor_formatter(NullFormatter())


def decade_text(v: float) -> str:
    """Number as text, with a power of ten if it is very small or large."""
    if v <= 0 or 1e-3 <= v < 1e4:
        return f"{v:g}"
    exponent = math.floor(math.log10(v) + 1e-9)
    raised = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    lead = v / 10.0 ** exponent
    return f"10{raised}" if abs(lead - 1) < 1e-6 else f"{lead:g}·10{raised}"


def layer_key(figure: Figure, axes: Sequence[Axes], shown: Sequence[str], look: Mapping[str, LineStyle],
              layers: Sequence[str]) -> None:
    """Draw a legend for a few layers, or, for many layers, a colour bar over depth with some of the names."""
    inner = [k for k in layers if k != WHOLE]
    if len(inner) <= LEGEND or not axes:
        key(figure, {k: look[k] for k in shown}, "layer")
        return
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    bar = figure.colorbar(ScalarMappable(Normalize(0, len(inner) - 1), depth_map()), ax=list(axes), aspect=40, pad=0.01,
                          shrink=0.9, label=f"layer, of {len(inner)}")
    marks = plotdata.chosen(range(len(inner)), 9)
    names = short_names(inner, 26)
    bar.set_ticks(marks, labels=[names[inner[i]] for i in marks])
    figure.set_figwidth(min(WIDTH, figure.get_figwidth() + 0.6 + 0.07 * max(len(names[inner[i]]) for i in marks)))
    bar.ax.invert_yaxis()
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2)
    if WHOLE in shown:
        key(figure, {WHOLE: look[WHOLE]}, "")


def key(figure: Figure, looks: Mapping[str, LineStyle], title: str) -> None:
    """Draw a legend below all panels, with as many columns as the longest name allows."""
    from matplotlib.lines import Line2D
    if not looks:
        return
    names = list(short_names(list(looks)).values())
    lines = [Line2D([], [], color=v.colour, linestyle=v.style, marker="o", markersize=2.6, linewidth=1.6) for v in looks.values()]
    columns = max(1, min(len(names), int(figure.get_figwidth() / (0.075 * max(map(len, names)) + 0.6))))
    figure.set_figheight(figure.get_figheight() + 0.18 * (-(-len(names) // columns) + bool(title)) + 0.1)
    legend = figure.legend(lines, [str(i) for i in range(len(names))], loc="outside lower center", title=title or None,
                           ncols=columns, frameon=False, handlelength=2.2, columnspacing=1.6,
                           borderpad=0.0, borderaxespad=0.2)
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(name)  # set afterwards: Matplotlib hides a label that begins with _
