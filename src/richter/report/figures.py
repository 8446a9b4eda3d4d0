"""Figures of runs and tables, as matplotlib Figures: curves, heat maps, spectra, matrices, scalars, several runs together.

>>> curves(run, measures=("nfc", "tangent_cka"))        # a Run, an Observer, or a frame of rows
>>> heat_map(run, "nfc"); spectra(run, "0"); matrices(run, "0")
>>> compare([run, other], "nfc"); scalars([run, other])
>>> save(compare([run, other], "nfc"), "pictures/nfc")  # nfc.svg and nfc.pdf
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from richter.core import WHOLE, SelectionError, unknown
from richter.cosine import cosine
from richter.report import plotdata
from richter.report.plotdata import Framed, Grid, Line
from richter.report.thin import shrink, thin
from richter.report.titles import TITLES, UNIT, short_names, shortened
from richter.runs import Run
from richter.verdict import LAZY, RICH

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any colour vision can tell apart; line styles go on where they end.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
STYLES = ("-", "--", ":", "-.")
WHOLE_COLOUR, FAINT, EMPTY = "#444444", "#8a8a8a", "#ececec"
LEGEND = 7  # more layers than this are coloured along depth
WIDTH = 10.6  # inches, of a full figure
BLOCKS = 128  # pixels of a matrix

# Names come from users, so no text is read as mathematics; ticks are written by the functions below.
LOOK: dict[Any, Any] = {
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans", "Verdana", "Helvetica", "Arial"], "font.size": 8.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9, "axes.labelsize": 8.5, "axes.linewidth": 0.7,
    "axes.edgecolor": "#555555", "axes.labelcolor": "#333333", "axes.titlepad": 7.0, "axes.formatter.useoffset": False,
    "text.color": "#222222", "xtick.color": "#555555", "ytick.color": "#555555", "xtick.labelcolor": "#333333",
    "ytick.labelcolor": "#333333", "xtick.labelsize": 8, "ytick.labelsize": 8, "xtick.major.width": 0.7,
    "ytick.major.width": 0.7, "grid.color": "#d8d8d8",
    "grid.linewidth": 0.5, "legend.fontsize": 8.5, "lines.linewidth": 1.4, "text.parse_math": False, "text.usetex": False,
}
SAVED: dict[Any, Any] = {"svg.fonttype": "none", "pdf.fonttype": 42, "path.simplify": True, "text.parse_math": False,
                         "savefig.facecolor": "white", "figure.autolayout": False, "figure.constrained_layout.use": False}

F = TypeVar("F", bound=Callable[..., "Figure"])


class Look(NamedTuple):
    colour: str
    style: Any = "-"


def _styled(draw: F) -> F:
    """Draw in this file's look, whatever the reader's own settings are, and leave those as they were."""
    @functools.wraps(draw)
    def drawn(*args: Any, **options: Any) -> Figure:
        from matplotlib.style import context
        with context(["default", LOOK]):
            return draw(*args, **options)
    return drawn  # type: ignore[return-value]


# ----------------------------------------------------------------------------------------------------- for everyone

@_styled
def curves(found: pandas.DataFrame | Framed, scalars: pandas.DataFrame | None = None,
           measures: Sequence[str] = ("nfc", "cnfc", "c_uc_ratio", "weight_change", "tangent_cka"),
           title: str = "") -> Figure:
    """One panel for each measure, one curve for each layer with its standard error as a band, and the scalars."""
    frame = plotdata.frame_of(found)
    measures = [m for m in measures if (frame.measure == m).any()]
    layers = plotdata.depth([frame])
    look = depth_looks(layers)
    mine = {} if scalars is None else plotdata.scalar_lines(scalars)
    panels = {m: plotdata.lines(frame, m) for m in measures}
    linear = plotdata.threshold(s for lines in panels.values() for line in lines.values() for s in line.step[:2].tolist()
                                + line.step[-1:].tolist())
    figure, axes = _grid(len(measures) + len(mine), across=4 if len(measures) + len(mine) == 4 else 3)
    for ax, (m, lines) in zip(axes, panels.items(), strict=False):
        _panel(ax, {k: (line, look[k]) for k, line in lines.items()}, m, linear)
    _same_width(axes[:len(measures)])
    for ax, (name, line) in zip(axes[len(measures):], mine.items(), strict=True):
        _scalar(ax, name, {name: (line, Look("#222222"))}, plotdata.threshold(line.step.tolist()))
    for ax, (m, lines) in zip(axes, panels.items(), strict=False):
        if not lines:
            _why(ax, frame.note[frame.measure == m])
    shown = [k for k in layers if any(k in lines for lines in panels.values())]
    _layer_key(figure, axes[:len(measures)], shown, look, layers)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


@_styled
def heat_map(found: pandas.DataFrame | Framed, measure: str) -> Figure:
    """Layers by measurements, the value as a colour; grey where there is no finding."""
    grid = plotdata.grid(_having(found, measure), measure)
    return _heat_maps([(TITLES.get(measure, measure), grid, _limits([grid], measure))])


@_styled
def heat_maps(found: pandas.DataFrame | Framed, measures: Sequence[str]) -> Figure:
    """One heat map for each measure."""
    grids = {m: plotdata.grid(_having(found, m), m) for m in measures}
    return _heat_maps([(TITLES.get(m, m), g, _limits([g], m)) for m, g in grids.items()])


@_styled
def compare_heat(runs: Sequence[Run] | Mapping[str, Any], measure: str) -> Figure:
    """One heat map of a measure for each run, on one scale of colours."""
    grids = {name: plotdata.grid(plotdata.frame_of(run), measure) for name, run in _named(runs).items()}
    limits = _limits(grids.values(), measure)
    return _heat_maps([(name, g, limits) for name, g in grids.items()], TITLES.get(measure, measure))


@_styled
def compare(runs: Sequence[Run] | Mapping[str, Any], measure: str, layers: Sequence[str] | None = None, most: int = 12) -> Figure:
    """One panel for each layer, one colour for each run. Of more than ``most`` layers some are shown, evenly over depth.

    Runs, or Runs, Observers and frames by the names they shall have."""
    frames = {name: plotdata.frame_of(run) for name, run in _named(runs).items()}
    lines = {name: plotdata.lines(frame, measure) for name, frame in frames.items()}
    every = [k for k in plotdata.depth(frames.values()) if any(k in mine for mine in lines.values())]
    shown = plotdata.chosen(every, most) if layers is None else [k for k in layers if k in every]
    look = run_looks(frames)
    linear = plotdata.threshold(s for mine in lines.values() for line in mine.values() for s in line.step.tolist())
    figure, axes = _grid(len(shown), across=4, height=2.35)
    names = short_names(shown, 30)
    for ax, k in zip(axes, shown, strict=False):
        _panel(ax, {name: (mine[k], look[name]) for name, mine in lines.items() if k in mine}, measure, linear)
        ax.set_title(names[k] if k == WHOLE or len(names[k]) > 20 else f"layer {names[k]}")
    _same_height(axes)
    _same_width(axes)
    figure.suptitle(TITLES.get(measure, measure), fontsize=10)
    _key(figure, look, "")
    return figure


@_styled
def scalars(found: Run | pandas.DataFrame | Sequence[Run] | Mapping[str, Run], names: Sequence[str] | None = None) -> Figure:
    """Loss, accuracy and other curves of the user's, a panel each; one colour for each run."""
    runs: dict[str, Any] = {"": found} if isinstance(found, Run) or hasattr(found, "columns") else _named(found)  # type: ignore[arg-type]
    tables = {name: plotdata.scalar_lines(getattr(run, "scalars", run)) for name, run in runs.items()}
    shown = list(dict.fromkeys(n for mine in tables.values() for n in mine)) if names is None else list(names)
    measured = plotdata.threshold(s for run in runs.values() for s in getattr(run, "steps", ()))
    look = run_looks(tables)
    figure, axes = _grid(len(shown), across=4 if len(shown) == 4 else 3)
    for ax, n in zip(axes, shown, strict=False):
        drawn = {name: (mine[n], look[name]) for name, mine in tables.items() if n in mine}
        own = plotdata.threshold(s for line, _ in drawn.values() for s in line.step.tolist())
        _scalar(ax, n, drawn, measured if own is not None and measured is not None else own)
    if len(tables) > 1:
        _key(figure, look, "")
    return figure


@_styled
def side_by_side(matrices: Mapping[str, np.ndarray[Any, Any]], title: str = "") -> Figure:
    """Matrices by their titles, which may hold mathematics between dollar signs; each on its own scale."""
    figure, axes = _grid(len(matrices), across=max(1, len(matrices)), width=2.2, height=2.3)
    for ax, (name, A) in zip(axes, matrices.items(), strict=False):
        top = _matrix(ax, np.asarray(A))
        ax.set_title(name, parse_math=True)
        ax.set_xlabel(f"±{top:.2g}")
    if title:
        figure.suptitle(title, fontsize=10, parse_math=True)
    return figure


@_styled
def spectra(run: Run, layer: str = WHOLE, across: int = 3) -> Figure:
    """Eigenvalues of each stored matrix of a layer, at the first and at the last step; so many panels side by side."""
    found = plotdata.spectra(run, layer)
    if not found:
        raise SelectionError(f"the run {run.name} has no matrix of layer {layer!r} that has eigenvalues. Matrices are of: "
                             f"{', '.join(map(repr, dict.fromkeys(k for k, *_ in run.arrays))) or 'no layer'}.")
    figure, axes = _grid(len(found), across=across, width=2.6 if across > 1 else 4.4, height=2.3)
    for ax, (name, mine) in zip(axes, found.items(), strict=False):
        for i, (step, values) in enumerate(mine.items()):
            after = i == len(mine) - 1
            ax.plot(np.arange(1, len(values) + 1), values, "-" if after else "--", color=COLOURS[0] if after else COLOURS[1],
                    label=f"step {step}", linewidth=1.3, marker="o" if len(values) <= 70 else None, markersize=1.8)
        ax.set_xscale("log")
        ax.set_yscale("log")
        _decades(ax)
        ax.set_xlabel("rank")
        ax.grid(alpha=0.7)
        ax.set_title(f"{name.upper() if name in plotdata.MATRICES else shortened(name, 18)}: eigenvalues")
    ends = list(dict.fromkeys(s for mine in found.values() for s in (min(mine), max(mine))))
    first, last = (f"step {ends[0]}", f"step {ends[-1]}") if len(ends) <= 2 else ("first step", "last step")
    _key(figure, {first: Look(COLOURS[1], "--"), last: Look(COLOURS[0])} if first != last else {last: Look(COLOURS[0])}, "")
    return figure


@_styled
def matrices(run: Run, layer: str, step: int | None = None) -> Figure:
    """NFM, AGOP and EGOP side by side with their cosines: at one step, or (None) at the first and at the last."""
    steps = [step] if step is not None else plotdata.matrix_steps(run, layer) or [0]
    rows = {s: plotdata.matrices(run, layer, s) for s in steps}
    names = [n for n in plotdata.MATRICES if any(n in mine for mine in rows.values())]
    width = min(2.2, 5.4 / max(1, len(names)))
    figure, axes = _grid(len(rows) * len(names), across=max(1, len(names)), width=width, height=width + 0.3)
    for i, (s, mine) in enumerate(rows.items()):
        for j, name in enumerate(names):
            ax = axes[i * len(names) + j]
            if name not in mine:
                ax.set_axis_off()
                continue
            top = _matrix(ax, mine[name])
            ax.set_title(f"{name.upper()}, {len(mine[name])} x {len(mine[name])}" if i == 0 else "")
            ax.set_ylabel(f"step {s}" if j == 0 else "")
            cosines = {other: cosine(mine[other], mine[name]) for other in names[:j] if other in mine}
            words = [f"±{top:.2g}", *(f"cosine with {k.upper()}: {v:.3f}" for k, v in cosines.items())]
            ax.set_xlabel("\n".join(words))
    return figure


def save(figure: Figure, stem: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write ``<stem>.svg`` and ``<stem>.pdf``: text stays text, and the same figure gives the same bytes."""
    from richter.report.svg import pdf_bytes, svg_text
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    drawn, printed = stem.with_name(stem.name + ".svg"), stem.with_name(stem.name + ".pdf")
    drawn.write_text(svg_text(figure, stem.name), encoding="utf-8")
    printed.write_bytes(pdf_bytes(figure))
    return drawn, printed


# --------------------------------------------------------------------------------------------------- colours, names

def depth_looks(layers: Sequence[str]) -> dict[str, Look]:
    """A colour for each layer: a few by distinct colours, many along depth from dark to light."""
    inner = [k for k in layers if k != WHOLE]
    if len(inner) <= LEGEND:
        return {k: Look(COLOURS[i]) for i, k in enumerate(inner)} | {WHOLE: Look(WHOLE_COLOUR, "--")}
    from matplotlib.colors import to_hex
    colours = _depth_map()(np.linspace(0, 1, len(inner)))
    return {k: Look(to_hex(c)) for k, c in zip(inner, colours, strict=True)} | {WHOLE: Look("#D55E00", "--")}


def run_looks(names: Iterable[str]) -> dict[str, Look]:
    return {name: Look(COLOURS[i % 7], STYLES[i // 7 % 4]) for i, name in enumerate(names)}


def _named(runs: Sequence[Run] | Mapping[str, Any]) -> dict[str, Any]:
    if not runs:
        raise SelectionError("there is no run to show: give at least one.")
    return dict(runs) if isinstance(runs, Mapping) else plotdata.labelled(runs)


def _depth_map() -> Any:
    """Dark blue to green-yellow: viridis without its lightest end, which is faint on white."""
    import matplotlib
    from matplotlib.colors import ListedColormap
    return ListedColormap(matplotlib.colormaps["viridis"](np.linspace(0.0, 0.9, 256)))


# ------------------------------------------------------------------------------------------------------------ pieces

def _grid(panels: int, across: int, width: float | None = None, height: float = 2.5) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels; with none of them, a sentence."""
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


def _panel(ax: Axes, lines: Mapping[str, tuple[Line, Look]], measure: str, linear: float | None) -> None:
    """Curves of one measure with their bands."""
    most = min(400, max(40, 5000 // max(1, len(lines))))
    for label, (line, look) in lines.items():
        _curve(ax, label, thin(line, most, linear), look, faint=len(lines) > LEGEND + 1)
    _steps(ax, linear)
    _heights(ax, [line for line, _ in lines.values()], measure)
    if measure == "c_uc_ratio" and lines:
        for level, word, side in ((LAZY, "lazy", "top"), (RICH, "rich", "bottom")):
            if ax.get_ylim()[0] < level < ax.get_ylim()[1]:
                ax.axhline(level, color=FAINT, linewidth=0.7, linestyle=(0, (2, 3)), zorder=0)
                ax.text(1.01, level, word, transform=ax.get_yaxis_transform(), fontsize=7, color="#707070", va=side)
    ax.set_title(TITLES.get(measure, shortened(measure)))


def _why(ax: Axes, notes: Iterable[str]) -> None:
    """An empty panel says why: by the first note of its rows."""
    import textwrap
    note = next((n for n in notes if n), "")
    words = textwrap.fill(f"no value: {note}" if note else "no value", 34, max_lines=5)
    ax.text(0.5, 0.5, words, transform=ax.transAxes, ha="center", va="center", color="#707070")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.set_xlabel("")


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


def _scalar(ax: Axes, name: str, lines: Mapping[str, tuple[Line, Look]], linear: float | None) -> None:
    for label, (line, look) in lines.items():
        few = thin(line, 600, linear)
        ax.plot(few.step, few.value, look.style, color=look.colour, label=label, linewidth=1.1,
                marker="o" if len(few.step) <= 30 else None, markersize=2.6)
    values = np.concatenate([line.value for line, _ in lines.values()] or [np.empty(0)])
    if len(values) and values.min() > 0 and values.max() > 50 * values.min():
        ax.set_yscale("log")
        _decades(ax, "y")
    _steps(ax, linear)
    ax.set_title(shortened(name))
    if not len(values):
        _why(ax, [])


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


def _same_height(axes: Sequence[Axes]) -> None:
    if axes:
        low, high = min(a.get_ylim()[0] for a in axes), max(a.get_ylim()[1] for a in axes)
        for ax in axes:
            ax.set_ylim(low, high)


def _same_width(axes: Sequence[Axes]) -> None:
    """One range of steps for all panels that have curves."""
    drawn = [ax for ax in axes if ax.lines]
    if drawn:
        low, high = min(a.get_xlim()[0] for a in drawn), max(a.get_xlim()[1] for a in drawn)
        for ax in axes:
            ax.set_xlim(low, high)


def _steps(ax: Axes, linear: float | None) -> None:
    """A step axis from what is drawn: logarithmic after its first positive step when it spans decades."""
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


def _decades(ax: Axes, which: str = "xy") -> None:
    """Ticks of logarithmic axes as text, 10 with a raised exponent where the number would be long."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
    for axis in [a for w, a in (("x", ax.xaxis), ("y", ax.yaxis)) if w in which]:
        low, high = axis.get_view_interval()
        wide = high > 30 * low > 0
        axis.set_major_locator(LogLocator(numticks=7) if wide else LogLocator(subs=(1.0, 2.0, 5.0), numticks=7))
        axis.set_major_formatter(FuncFormatter(lambda v, _: decade_text(v)))
        axis.set_minor_locator(NullLocator())


def decade_text(v: float) -> str:
    if v <= 0 or 1e-3 <= v < 1e4:
        return f"{v:g}"
    exponent = math.floor(math.log10(v) + 1e-9)
    raised = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    lead = v / 10.0 ** exponent
    return f"10{raised}" if abs(lead - 1) < 1e-6 else f"{lead:g}·10{raised}"


def _layer_key(figure: Figure, axes: Sequence[Axes], shown: Sequence[str], look: Mapping[str, Look],
               layers: Sequence[str]) -> None:
    """A legend for a few layers; for many a bar of colours along depth with some of the names."""
    inner = [k for k in layers if k != WHOLE]
    if len(inner) <= LEGEND or not axes:
        _key(figure, {k: look[k] for k in shown}, "layer")
        return
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    bar = figure.colorbar(ScalarMappable(Normalize(0, len(inner) - 1), _depth_map()), ax=list(axes), aspect=40, pad=0.01,
                          shrink=0.9, label=f"layer, of {len(inner)}")
    marks = plotdata.chosen(range(len(inner)), 9)
    names = short_names(inner, 26)
    bar.set_ticks(marks, labels=[names[inner[i]] for i in marks])
    figure.set_figwidth(min(WIDTH, figure.get_figwidth() + 0.6 + 0.07 * max(len(names[inner[i]]) for i in marks)))
    bar.ax.invert_yaxis()
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2)
    if WHOLE in shown:
        _key(figure, {WHOLE: look[WHOLE]}, "")


def _key(figure: Figure, looks: Mapping[str, Look], title: str) -> None:
    """A legend below all panels, in as many columns as its longest name leaves room for."""
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
        text.set_text(name)  # afterwards: as a label, a name that begins with _ would be left out


# ------------------------------------------------------------------------------------------------ images of numbers

def _having(found: pandas.DataFrame | Framed, measure: str) -> pandas.DataFrame:
    frame = plotdata.frame_of(found)
    if not (frame.measure == measure).any():
        raise unknown("this run", "measure", measure, frame.measure.unique())
    return frame


def _limits(grids: Iterable[Grid], measure: str) -> tuple[float, float]:
    """Of the colours: 0 to 1 for correlations, otherwise from 0 (if the values come near it) to the largest."""
    values = np.concatenate([g.values[np.isfinite(g.values)] for g in grids] or [np.empty(0)])
    if not len(values) or (measure in UNIT and values.min() >= 0 and values.max() <= 1):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    low = 0.0 if 0 <= low < 0.6 * high else low
    return (low, high) if high > low else (low - 0.5 * abs(low) - 1e-12, high + 0.5 * abs(high) + 1e-12)


def _heat_maps(panels: Sequence[tuple[str, Grid, tuple[float, float]]], title: str = "") -> Figure:
    most = max((len(g.layers) for _, g, _ in panels), default=1)
    one = bool(title)  # one measure, one scale of colours
    figure, axes = _grid(len(panels), across=4 if one and len(panels) > 3 else 3, height=min(6.5, max(1.55, 0.16 * most + 0.95)))
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
    """One column for each measurement, so that early and late ones are equally wide; their steps are written below."""
    import matplotlib
    ax.spines[:].set_visible(False)
    ax.tick_params(length=2)
    if not grid.values.size:
        _why(ax, [])
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


def _matrix(ax: Axes, A: np.ndarray[Any, Any]) -> float:
    """Entries as colours around white for zero; the largest half per cent share the darkest, whose value is returned."""
    shown = shrink(A, BLOCKS)
    tall, wide = (d / max(1, k) for d, k in zip(A.shape, shown.shape, strict=True))  # of a block
    finite = np.abs(shown[np.isfinite(shown)])
    top = (float(np.quantile(finite, 0.995)) if finite.size else 0.0) or float(finite.max(initial=0.0)) or 1.0
    ax.imshow(np.ma.masked_invalid(shown), cmap="RdBu_r", vmin=-top, vmax=top, interpolation="none", aspect=tall / wide)
    ax.spines[:].set_visible(True)
    ax.set_xticks([])
    ax.set_yticks([])
    return top
