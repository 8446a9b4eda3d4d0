"""What the features of a layer are, of a run that has measured them (``kappa_cka`` keeps an array of them): how good, used and
strong each is, how they evolve, kappa beside the learning curve; and the inputs that excite a feature most, where the run has
kept features and inputs (``Observer(keep_features=..., keep_inputs=...)``).

>>> spectrum(run); evolution(run); learning(run); exciting(run)          # matplotlib Figures
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from richter.core import WHOLE, SelectionError, likeness
from richter.core.likeness import GRAM, INPUTS
from richter.measures.cards import MINIMUM
from richter.report import comparison, plotdata
from richter.report.axes import decade_ticks, grid_of_panels, key, step_axis, step_text
from richter.report.looks import COLOURS, FAINT, Look, depth_map, styled
from richter.report.names import shortened
from richter.report.plotdata import FEATURES, Line
from richter.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Numbers = NDArray[np.float64]
NAMES = ("intensity", "quality", "utilisation")  # the rows of the array
WIDEST = 2 ** 16  # features of a layer that are shown
FIRST = 20  # features whose evolution is shown
TIMES = 400  # steps of it that are read
FAINTEST = 1e-6  # of the largest intensity: what is below is not drawn
SHOWN, EXAMPLES = 8, 10  # features whose most exciting inputs are shown, and how many of these
GAP = 2  # pixels between them
KAPPA = "kappa_cka"


# ------------------------------------------------------------------------------------------------------------ as numbers


def layers(run: Run) -> list[str]:
    """Those whose features were measured, the whole model (its last layer) first."""
    known = dict.fromkeys(k for k, name, _ in run.arrays if name == FEATURES)
    return sorted(known, key=lambda k: k != WHOLE)


def steps(run: Run, layer: str = WHOLE) -> list[int]:
    return sorted(s for k, name, s in run.arrays if name == FEATURES and k == layer)


def of_step(run: Run, layer: str, step: int) -> dict[str, Numbers]:
    """Intensity, quality and utilisation of every feature, the strongest first."""
    shape = run.shape(FEATURES, layer, step)
    if len(shape) != 2 or shape[0] != len(NAMES) or shape[1] > WIDEST:
        raise SelectionError(f"the array {FEATURES!r} of the run {run.name} has shape {shape}: {len(NAMES)} rows are needed, "
                             f"{', '.join(NAMES)}, of up to {WIDEST:,} features.")
    return dict(zip(NAMES, plotdata.shown(run, FEATURES, layer, step).astype(np.float64), strict=True))


def through_time(run: Run, layer: str = WHOLE, first: int = FIRST) -> tuple[list[int], dict[str, Numbers]]:
    """The steps (of very many some, evenly), and by name the numbers of the first features at each of them, [step, feature];
    intensity is relative to the strongest feature of its step."""
    known = plotdata.chosen(steps(run, layer), TIMES)
    parts = [{name: values[:first].copy() for name, values in of_step(run, layer, s).items()} for s in known]  # not the rest
    width = min([first, *(len(p[NAMES[0]]) for p in parts)])
    table = {name: np.array([p[name][:width] for p in parts]).reshape(len(known), width) for name in NAMES}
    largest = table["intensity"].max(1, initial=0.0, keepdims=True)
    return known, {**table, "intensity": table["intensity"] / np.where(largest > 0, largest, np.nan)}


def curves_of(run: Run) -> dict[str, dict[str, Line]]:
    """What is drawn beside kappa: shares (kappa and accuracies, between 0 and 1) and losses, by their names."""
    wanted = (KAPPA, "probe_accuracy", "probe_loss")
    measured = run.curves(wanted, [WHOLE])
    known = {m: measured[m, WHOLE][0] for m in wanted if (m, WHOLE) in measured}
    scalars = run.scalar_curves(run.names)
    lines = {name: Line(*(np.asarray(c, np.float64)[np.isfinite(s.value)] for c in s)) for name, s in (known | scalars).items()}
    lines = {name: line for name, line in lines.items() if len(line.step)}
    return {"shares": {n: line for n, line in lines.items() if n == KAPPA or _is_accuracy(n, line)},
            "losses": {n: line for n, line in lines.items() if "loss" in n.lower()}}


def _is_accuracy(name: str, line: Line) -> bool:
    return "acc" in name.lower() and bool(line.value.min() >= 0 and line.value.max() <= 1)


class Excited(NamedTuple):
    """One feature of a layer, and the examples that excite it most."""

    number: int  # 1: the strongest
    share: float  # of the variance
    examples: list[int]  # among those that the run has kept, the most excited first
    values: list[float]  # of the eigenfunction there, whose mean square is 1


def readout_layer(run: Run) -> str:
    """The last layer that reads features: what the outputs are made of."""
    known = comparison.depth(run)
    if len(known) < 2:
        raise SelectionError(f"the run {run.name} has kept no features of a layer: watch with Observer(..., keep_features=64).")
    return known[-2]


def excited(run: Run, layer: str | None = None, step: int | None = None, features: int = SHOWN,
            examples: int = EXAMPLES) -> list[Excited]:
    """The examples on which each leading eigenfunction of what a layer reads is largest (features are centred, and each has the
    sign in which its largest value is positive); of the last kept step, and of the last layer, if none is named."""
    layer = readout_layer(run) if layer is None else layer
    step = comparison.last_kept(run, step)
    K = comparison.grams(run, step).get(layer)
    if K is None:
        raise SelectionError(f"the run {run.name} has kept no features of layer {layer!r} at step {step}. It has: "
                             f"{', '.join(map(repr, comparison.grams(run, step)))}.")
    values, functions = likeness.leading(K, features, likeness.SINGLE)
    functions = functions * np.sqrt(len(K)) * np.sign(functions[np.abs(functions).argmax(0), np.arange(functions.shape[1])])
    order = np.argsort(-functions, axis=0, kind="stable")[:examples].T
    return [Excited(k + 1, float(v / max(np.trace(K), 1e-300)), [int(i) for i in rows], [float(functions[i, k]) for i in rows])
            for k, (v, rows) in enumerate(zip(values, order, strict=True))]


def inputs(run: Run) -> NDArray[np.uint8] | None:
    """The pictures that a run has kept, [n, h, w, 1 or 3]; None where it has none."""
    known = [s for k, name, s in run.arrays if name == INPUTS and k == WHOLE]
    if not known:
        return None
    stored = plotdata.shown(run, INPUTS, WHOLE, known[0])
    if stored.dtype != np.uint8 or stored.ndim != 4 or stored.shape[1] not in (1, 3):
        return None
    return np.moveaxis(stored, 1, 3)


def classes(run: Run) -> list[str]:
    """Of the examples that a run has kept; empty where they have none."""
    known = comparison.about(run).get("classes")
    return [str(k) for k in known] if isinstance(known, list) else []


def mosaic(run: Run, chosen: list[int]) -> NDArray[np.uint8]:
    """Some of the pictures side by side, [h, w, 3]; white between them, and where there is none."""
    known = inputs(run)
    if known is None:
        raise SelectionError(f"the run {run.name} has kept no pictures of its inputs: watch with Observer(..., "
                             f"keep_inputs=True).")
    _, h, w, _ = known.shape
    sheet = np.full((h, len(chosen) * (w + GAP) - GAP, 3), 255, np.uint8)
    for j, i in enumerate(chosen):
        if i < len(known):
            sheet[:, j * (w + GAP):j * (w + GAP) + w] = known[i]
    return sheet


# ---------------------------------------------------------------------------------------------------------------- drawn


@styled
def spectrum(run: Run, layer: str = WHOLE) -> Figure:
    """The thesis' figure: cumulative quality, cumulative utilisation and intensity of the features, the strongest first, at the
    first and at the last step.  [layerwise, Fig. 2.3]"""
    known = steps(run, layer)
    figure, axes = grid_of_panels(3 if known else 0, across=3)
    ends = list(dict.fromkeys([*known[:1], *known[-1:]]))
    looks = {f"step {step_text(s)}": Look(COLOURS[1 - i], "--" if i == 0 and len(ends) > 1 else "-") for i, s in
             enumerate(ends, 2 - len(ends))}
    for step, look in zip(ends, looks.values(), strict=True):
        p = of_step(run, layer, step)
        strength = p["intensity"] / max(p["intensity"].max(initial=0.0), 1e-300)
        drawn = (p["quality"].cumsum(), p["utilisation"].cumsum(), np.where(strength > FAINTEST, strength, np.nan))
        for ax, values in zip(axes, drawn, strict=True):
            ax.plot(np.arange(1, len(values) + 1), values, look.style, color=look.colour, linewidth=1.4)
    titles = ("cumulative quality", "cumulative utilisation", "intensity, relative to the first")
    for ax, title in zip(axes, titles, strict=False):
        ax.set_xscale("log")
        ax.set_title(title)
        ax.set_xlabel("feature")
        ax.grid(alpha=0.7)
        if ax is axes[2]:
            ax.set_yscale("log")
        else:
            ax.set_ylim(bottom=0)
        decade_ticks(ax, "xy" if ax is axes[2] else "x")
    key(figure, looks, "")
    return figure


@styled
def evolution(run: Run, layer: str = WHOLE, first: int = FIRST) -> Figure:
    """Quality, utilisation and intensity of the first features through training, a curve each, from dark (the strongest) to
    light.  [layerwise, Fig. 7.5]"""
    known, table = through_time(run, layer, first)
    figure, axes = grid_of_panels(3 if known else 0, across=3)
    linear = plotdata.threshold(known)
    for ax, name in zip(axes, ("quality", "utilisation", "intensity"), strict=False):
        values = table[name]
        colours = depth_map()(np.linspace(0, 1, max(2, values.shape[1])))
        for k in range(values.shape[1]):
            ax.plot(known, values[:, k], color=colours[k], linewidth=1.1, marker="o" if len(known) <= 30 else None,
                    markersize=1.8)
        if name == "intensity" and np.nanmin(values, initial=1.0) > 0:
            ax.set_yscale("log")
            ax.set_ylim(bottom=max(FAINTEST, float(np.nanmin(values)) / 2))
            decade_ticks(ax, "y")
        step_axis(ax, linear)
        ax.set_title(name if name != "intensity" else "intensity, relative to the first")
    if axes:
        _feature_bar(figure, axes, table["quality"].shape[1])
    return figure


def _feature_bar(figure: Figure, axes: list[Axes], number: int) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    bar = figure.colorbar(ScalarMappable(Normalize(1, max(2, number)), depth_map()), ax=axes, aspect=40, pad=0.01, shrink=0.9,
                          label="feature, the strongest first")
    bar.set_ticks([*dict.fromkeys(plotdata.chosen(range(1, number + 1), 5))])
    bar.ax.invert_yaxis()
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2)


@styled
def learning(run: Run) -> Figure:
    """Kappa beside the accuracies, and the losses, through training; a dotted line at the border of the minimum feature
    regime."""
    parts = {title: lines for title, lines in curves_of(run).items() if lines}
    figure, axes = grid_of_panels(len(parts), across=2)
    linear = plotdata.threshold(s for lines in parts.values() for line in lines.values() for s in line.step.tolist())
    looks: dict[str, Look] = {}
    for ax, (title, lines) in zip(axes, parts.items(), strict=False):
        for name, line in lines.items():
            look = looks.setdefault(name, Look(COLOURS[len(looks) % len(COLOURS)], "-" if name == KAPPA else "--"))
            ax.plot(line.step, line.value, look.style, color=look.colour, linewidth=1.7 if name == KAPPA else 1.2)
        if title == "shares":
            ax.set_ylim(0, 1.02)
            ax.axhline(MINIMUM, color=FAINT, linewidth=0.7, linestyle=(0, (2, 3)), zorder=0)
        step_axis(ax, linear)
        ax.set_title("kappa and accuracy" if title == "shares" else "loss")
    key(figure, {shortened(name, 30): look for name, look in looks.items()}, "")
    return figure


@styled
def exciting(run: Run, layer: str | None = None, step: int | None = None) -> Figure:
    """The inputs that excite each leading feature of a layer most, a row for each feature."""
    rows = excited(run, layer, step)
    sheets = [mosaic(run, e.examples) for e in rows]
    names = classes(run)
    height = 0.72 if names else 0.62
    figure, axes = grid_of_panels(len(rows), across=1, width=min(10.6, 1.6 + 0.55 * EXAMPLES), height=height)
    for ax, e, sheet in zip(axes, rows, sheets, strict=True):
        ax.imshow(sheet, interpolation="nearest")
        ax.spines[:].set_visible(False)
        ax.set_yticks([])
        pitch = (sheet.shape[1] + GAP) / len(e.examples)
        ax.set_xticks([j * pitch + (pitch - GAP - 1) / 2 for j in range(len(e.examples))] if names else [],
                      labels=[names[i] for i in e.examples] if names else [], fontsize=6.5)
        ax.tick_params(length=0, pad=1)
        ax.set_ylabel(f"feature {e.number}\n{e.share:.0%} of variance", rotation=0, ha="right", va="center", fontsize=7)
    return figure


def can_excite(run: Run) -> bool:
    """Has it kept features and pictures?"""
    return any(name == GRAM for _, name, _ in run.arrays) and inputs(run) is not None
