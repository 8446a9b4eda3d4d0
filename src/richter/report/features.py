"""Figures of the features of a layer, from a run that has measured them (``kappa_cka`` stores an array of them): quality,
utilisation and intensity of each feature, their evolution, and kappa beside the learning curve. If the run has stored features
and inputs (``Observer(keep_features=..., keep_inputs=...)``), also the inputs that activate a feature most.

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
from richter.report.looks import COLOURS, FAINT, LineStyle, depth_map, styled
from richter.report.names import shortened
from richter.report.plotdata import FEATURES, CurveData
from richter.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Numbers = NDArray[np.float64]
NAMES = ("intensity", "quality", "utilisation")  # the rows of the array
WIDEST = 2 ** 16  # features of a layer that are shown
FIRST = 20  # features whose evolution is shown
TIMES = 400  # steps of the evolution that are read
FAINTEST = 1e-6  # relative to the largest intensity; features below are not drawn
SHOWN, EXAMPLES = 8, 10  # features whose most activating inputs are shown, and how many inputs each
GAP = 2  # pixels between images
KAPPA = "kappa_cka"


# ------------------------------------------------------------------------------------------------------------ as numbers


def layers(run: Run) -> list[str]:
    """Layers whose features were measured, with the whole model (its last layer) first."""
    measured_layers = dict.fromkeys(k for k, name, _ in run.arrays if name == FEATURES)
    return sorted(measured_layers, key=lambda k: k != WHOLE)


def steps(run: Run, layer: str = WHOLE) -> list[int]:
    """Steps at which features of a layer are stored."""
    return sorted(s for k, name, s in run.arrays if name == FEATURES and k == layer)


def of_step(run: Run, layer: str, step: int) -> dict[str, Numbers]:
    """Intensity, quality and utilisation of every feature, strongest first."""
    shape = run.shape(FEATURES, layer, step)
    if len(shape) != 2 or shape[0] != len(NAMES) or shape[1] > WIDEST:
        raise SelectionError(f"the array {FEATURES!r} of the run {run.name} has shape {shape}: {len(NAMES)} rows are needed, "
                             f"{', '.join(NAMES)}, of up to {WIDEST:,} features.")
    return dict(zip(NAMES, plotdata.shown(run, FEATURES, layer, step).astype(np.float64), strict=True))


def through_time(run: Run, layer: str = WHOLE, first: int = FIRST) -> tuple[list[int], dict[str, Numbers]]:
    """Return the steps, and the numbers of the first features at each of them, [step, feature], by name. Very long runs are
    thinned evenly. Intensity is relative to the strongest feature of the same step."""
    read_steps = plotdata.chosen(steps(run, layer), TIMES)
    # a copy, so that the other features are freed
    parts = [{name: values[:first].copy() for name, values in of_step(run, layer, s).items()} for s in read_steps]
    width = min([first, *(len(p[NAMES[0]]) for p in parts)])
    table = {name: np.array([p[name][:width] for p in parts]).reshape(len(read_steps), width) for name in NAMES}
    largest = table["intensity"].max(1, initial=0.0, keepdims=True)
    return read_steps, {**table, "intensity": table["intensity"] / np.where(largest > 0, largest, np.nan)}


def curves_of(run: Run) -> dict[str, dict[str, CurveData]]:
    """Curves that are drawn with kappa, by name: shares between 0 and 1 (kappa and accuracies), and losses."""
    wanted = (KAPPA, "probe_accuracy", "probe_loss")
    measured = run.curves(wanted, [WHOLE])
    finite = {m: measured[m, WHOLE][0] for m in wanted if (m, WHOLE) in measured}
    scalars = run.scalar_curves(run.scalar_names)
    lines = {name: CurveData(*(np.asarray(c, np.float64)[np.isfinite(s.value)] for c in s))
             for name, s in (finite | scalars).items()}
    lines = {name: line for name, line in lines.items() if len(line.step)}
    return {"shares": {n: line for n, line in lines.items() if n == KAPPA or _is_accuracy(n, line)},
            "losses": {n: line for n, line in lines.items() if "loss" in n.lower()}}


def _is_accuracy(name: str, line: CurveData) -> bool:
    """Return whether a curve is an accuracy, by its name and range."""
    return "acc" in name.lower() and bool(line.value.min() >= 0 and line.value.max() <= 1)


class Excited(NamedTuple):
    """One feature of a layer, and the examples that activate it most."""

    number: int  # 1 is the strongest
    share: float  # share of the variance
    examples: list[int]  # numbers of stored examples, the most activating first
    values: list[float]  # values of the eigenfunction there; its mean square over all examples is 1


def readout_layer(run: Run) -> str:
    """The last layer that reads features, which computes the outputs."""
    layers_by_depth = comparison.depth(run)
    if len(layers_by_depth) < 2:
        raise SelectionError(f"the run {run.name} has kept no features of a layer: watch with Observer(..., keep_features=64).")
    return layers_by_depth[-2]


def excited(run: Run, layer: str | None = None, step: int | None = None, features: int = SHOWN,
            examples: int = EXAMPLES) -> list[Excited]:
    """Find the examples where each leading eigenfunction of a layer's input is largest. Features are centred, and signs are
    chosen so that the largest value is positive. By default the last layer at the last stored step."""
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
    """Images stored by a run, [n, h, w, 1 or 3]; None if it has none."""
    input_steps = [s for k, name, s in run.arrays if name == INPUTS and k == WHOLE]
    if not input_steps:
        return None
    stored = plotdata.shown(run, INPUTS, WHOLE, input_steps[0])
    if stored.dtype != np.uint8 or stored.ndim != 4 or stored.shape[1] not in (1, 3):
        return None
    return np.moveaxis(stored, 1, 3)


def classes(run: Run) -> list[str]:
    """Classes of the stored examples; empty if they have none."""
    class_names = comparison.about(run).get("classes")
    return [str(k) for k in class_names] if isinstance(class_names, list) else []


def mosaic(run: Run, chosen: list[int]) -> NDArray[np.uint8]:
    """Put the chosen images side by side, [h, w, 3]; gaps and missing images are white."""
    images = inputs(run)
    if images is None:
        raise SelectionError(f"the run {run.name} has kept no pictures of its inputs: watch with Observer(..., "
                             f"keep_inputs=True).")
    _, h, w, _ = images.shape
    sheet = np.full((h, len(chosen) * (w + GAP) - GAP, 3), 255, np.uint8)
    for j, i in enumerate(chosen):
        if i < len(images):
            sheet[:, j * (w + GAP):j * (w + GAP) + w] = images[i]
    return sheet


# --------------------------------------------------------------------------------------------------------------- figures


@styled
def spectrum(run: Run, layer: str = WHOLE) -> Figure:
    """Draw cumulative quality, cumulative utilisation and intensity of the features, strongest first, at the first and at the
    last step.  [layerwise, Fig. 2.3]"""
    measured_steps = steps(run, layer)
    figure, axes = grid_of_panels(3 if measured_steps else 0, across=3)
    ends = list(dict.fromkeys([*measured_steps[:1], *measured_steps[-1:]]))
    looks = {f"step {step_text(s)}": LineStyle(COLOURS[1 - i], "--" if i == 0 and len(ends) > 1 else "-") for i, s in
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
    """Draw quality, utilisation and intensity of the first features over training, one curve each, from dark (strongest) to
    light.  [layerwise, Fig. 7.5]"""
    read_steps, table = through_time(run, layer, first)
    figure, axes = grid_of_panels(3 if read_steps else 0, across=3)
    linear = plotdata.threshold(read_steps)
    for ax, name in zip(axes, ("quality", "utilisation", "intensity"), strict=False):
        values = table[name]
        colours = depth_map()(np.linspace(0, 1, max(2, values.shape[1])))
        for k in range(values.shape[1]):
            ax.plot(read_steps, values[:, k], color=colours[k], linewidth=1.1, marker="o" if len(read_steps) <= 30 else None,
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
    """Draw the colour bar of features."""
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
    """Draw kappa with the accuracies, and the losses, over training. A dotted line marks the border of the minimum feature
    regime."""
    parts = {title: lines for title, lines in curves_of(run).items() if lines}
    figure, axes = grid_of_panels(len(parts), across=2)
    linear = plotdata.threshold(s for lines in parts.values() for line in lines.values() for s in line.step.tolist())
    looks: dict[str, LineStyle] = {}
    for ax, (title, lines) in zip(axes, parts.items(), strict=False):
        for name, line in lines.items():
            look = looks.setdefault(name, LineStyle(COLOURS[len(looks) % len(COLOURS)], "-" if name == KAPPA else "--"))
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
    """Draw the inputs that activate each leading feature of a layer most, one row per feature."""
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
    """Whether the run has stored features and images."""
    return any(name == GRAM for _, name, _ in run.arrays) and inputs(run) is not None
