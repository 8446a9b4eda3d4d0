"""Images of numbers: heat maps over layers and measurements, and matrices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from richter.core import Card
from richter.report import plotdata
from richter.report.axes import grid_of_panels, say_why, shows_whole_range, step_text
from richter.report.looks import EMPTY
from richter.report.names import short_names, shortened
from richter.report.plotdata import Grid
from richter.report.thin import shrink

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLOCKS = 128  # pixels of a matrix
CELLS = 14  # rows or columns up to which numbers are written in their cells


def limits_of(grids: Iterable[Grid], card: Card) -> tuple[float, float]:
    """Limits of the colours: the card's whole range if the card asks for it, otherwise from 0 (if values come near it) to the
    largest value."""
    values = np.concatenate([g.values[np.isfinite(g.values)] for g in grids] or [np.empty(0)])
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    if shows_whole_range(card, low, high):
        return card.bounds.low, card.bounds.high
    low = 0.0 if 0 <= low < 0.6 * high else low
    return (low, high) if high > low else (low - 0.5 * abs(low) - 1e-12, high + 0.5 * abs(high) + 1e-12)


def heat_panels(panels: Sequence[tuple[str, Grid, tuple[float, float]]], title: str = "") -> Figure:
    """Figure with a heat map for each (name, grid, limits)."""
    most = max((len(g.layers) for _, g, _ in panels), default=1)
    one = bool(title)  # one measure, one scale of colours
    across, height = 4 if one and len(panels) > 3 else 3, min(6.5, max(1.55, 0.16 * most + 0.95))
    figure, axes = grid_of_panels(len(panels), across, height=height)
    image = None
    for ax, (name, grid, limits) in zip(axes, panels, strict=False):
        image = _heat(ax, grid, limits)
        ax.set_title(shortened(name))
        if image is not None and not one:
            _bar(figure, image, ax, -(-len(panels) // 3))
    if one and image is not None:
        _bar(figure, image, axes, 1)
    if title:
        figure.suptitle(title, fontsize=10)
    return figure


def _heat(ax: Axes, grid: Grid, limits: tuple[float, float]) -> Any:
    """Draw one column per measurement, so that all are equally wide; their steps are written below."""
    import matplotlib
    ax.spines[:].set_visible(False)
    ax.tick_params(length=2)
    if not grid.values.size:
        say_why(ax, [])
        return None
    colours = matplotlib.colormaps["viridis"].with_extremes(bad=EMPTY)
    image = ax.imshow(np.ma.masked_invalid(grid.values), aspect="auto", interpolation="none", cmap=colours,
                      vmin=limits[0], vmax=limits[1])
    rows = plotdata.chosen(range(len(grid.layers)), 30)
    size = 8 if len(rows) <= 12 else 6
    names = short_names(grid.layers, 26)
    ax.set_yticks(rows, labels=[names[grid.layers[i]] for i in rows], fontsize=size)
    columns = plotdata.chosen(range(len(grid.steps)), 5)
    ax.set_xticks(columns, labels=[step_text(grid.steps[j]) for j in columns])
    ax.set_xlabel("step of the measurement")
    return image


def _bar(figure: Figure, image: Any, ax: Any, rows: int) -> None:
    from matplotlib.ticker import MaxNLocator
    bar = figure.colorbar(image, ax=ax, aspect=11 * figure.get_figheight() / rows, pad=0.02)
    bar.locator = MaxNLocator(4)
    bar.update_ticks()
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2, labelsize=7.5)


def cells_panel(ax: Axes, values: np.ndarray[Any, Any], rows: Sequence[str], columns: Sequence[str], low: float = 0.0,
                high: float = 1.0) -> None:
    """Draw a matrix as colours. Numbers are written into cells that are large enough; missing values are grey."""
    import matplotlib
    colours = matplotlib.colormaps["viridis"].with_extremes(bad=EMPTY)
    ax.imshow(np.ma.masked_invalid(values), aspect="auto", interpolation="none", cmap=colours, vmin=low, vmax=high)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    shown = [plotdata.chosen(range(len(names)), 30) for names in (rows, columns)]
    ax.set_yticks(shown[0], labels=[rows[i] for i in shown[0]], fontsize=8 if len(rows) <= 14 else 6)
    long = max(map(len, columns), default=0) > (4 if len(columns) > 5 else 8)
    ax.set_xticks(shown[1], labels=[columns[j] for j in shown[1]], fontsize=8 if len(columns) <= 14 else 6,
                  rotation=45 if long else 0, ha="right" if long else "center", rotation_mode="anchor")
    if max(len(rows), len(columns)) > CELLS:
        return
    size = 7.5 if len(columns) <= 9 else 6
    for (i, j), v in np.ndenumerate(values):
        dark = not np.isfinite(v) or v > low + 0.5 * (high - low)
        ax.text(j, i, f"{v:.2f}" if np.isfinite(v) else "", ha="center", va="center", fontsize=size,
                color="#111111" if dark else "#ffffff")


def matrix_panel(ax: Axes, A: np.ndarray[Any, Any]) -> float:
    """Draw entries as colours, with white for zero. The largest 0.5 % share the darkest colour, whose value is returned."""
    shown = shrink(A, BLOCKS)
    tall, wide = (d / max(1, k) for d, k in zip(A.shape, shown.shape, strict=True))  # sides of a block
    finite = np.abs(shown[np.isfinite(shown)])
    top = (float(np.quantile(finite, 0.995)) if finite.size else 0.0) or float(finite.max(initial=0.0)) or 1.0
    ax.imshow(np.ma.masked_invalid(shown), cmap="RdBu_r", vmin=-top, vmax=top, interpolation="none", aspect=tall / wide)
    ax.spines[:].set_visible(True)
    ax.set_xticks([])
    ax.set_yticks([])
    return top
