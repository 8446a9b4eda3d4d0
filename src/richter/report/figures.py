"""Figures of runs and tables, as matplotlib Figures: curves, heat maps, profiles over layers, spectra, matrices, scalars,
several runs together.

>>> curves(run, measures=("nfc", "tangent_cka"))        # a Run, an Observer, or a frame of rows
>>> heat_map(run, "nfc"); profiles(run, ["tangent_cka"]); spectra(run, "0"); matrices(run, "0"); specialisation(run)
>>> compare([run, other], "nfc"); scalars([run, other])
>>> save(compare([run, other], "nfc"), "pictures/nfc")  # nfc.svg and nfc.pdf
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from richter.core import WHOLE, SelectionError, unknown
from richter.core.likeness import cosine
from richter.measures.cards import SHOWN_FIRST, card
from richter.report import plotdata
from richter.report.axes import decade_ticks, grid_of_panels, key, layer_key, plain_ticks, same_height, same_width, say_why
from richter.report.cards import cards_of, cards_of_all
from richter.report.images import BLOCKS, heat_panels, limits_of, matrix_panel
from richter.report.looks import COLOURS, LineStyle, depth_looks, run_looks, styled
from richter.report.names import short_names, shortened
from richter.report.panels import measure_panel, profile_panel, scalar_panel, stage_marks
from richter.report.plotdata import Framed
from richter.report.thin import shrink
from richter.runs import Run

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "against", "compare", "compare_heat", "compare_whole", "curves", "heat_map", "heat_maps", "matrices",
           "profiles", "save", "scalars", "side_by_side", "specialisation", "spectra"]


MARKED = 3  # runs whose stages are marked


@styled
def curves(subject: pandas.DataFrame | Framed, scalars: pandas.DataFrame | None = None,
           measures: Sequence[str] = SHOWN_FIRST, title: str = "") -> Figure:
    """Draw one panel per measure with one curve per layer, with its standard error as a band, and one panel per scalar."""
    frame, cards = plotdata.frame_of(subject), cards_of(subject)
    measures = [m for m in measures if (frame.measure == m).any()]
    layers = plotdata.depth([frame])
    look = depth_looks(layers)
    logged = {} if scalars is None else plotdata.scalar_lines(scalars)
    panels = {m: plotdata.lines(frame, m) for m in measures}
    linear = plotdata.threshold(s for lines in panels.values() for line in lines.values() for s in line.step[:2].tolist()
                                + line.step[-1:].tolist())
    figure, axes = grid_of_panels(len(measures) + len(logged), across=4 if len(measures) + len(logged) == 4 else 3)
    for ax, (m, lines) in zip(axes, panels.items(), strict=False):
        measure_panel(ax, {k: (line, look[k]) for k, line in lines.items()}, card(m, cards), linear)
    same_width(axes[:len(measures)])
    for ax, (name, line) in zip(axes[len(measures):], logged.items(), strict=True):
        scalar_panel(ax, name, {name: (line, LineStyle("#222222"))}, plotdata.threshold(line.step.tolist()))
    for ax, (m, lines) in zip(axes, panels.items(), strict=False):
        if not lines:
            say_why(ax, frame.note[frame.measure == m])
    shown = [k for k in layers if any(k in lines for lines in panels.values())]
    layer_key(figure, axes[:len(measures)], shown, look, layers)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def heat_map(subject: pandas.DataFrame | Framed, measure: str) -> Figure:
    """Draw layers against measurements, with the value as a colour; grey where there is no finding."""
    return heat_maps(subject, [measure])


@styled
def heat_maps(subject: pandas.DataFrame | Framed, measures: Sequence[str]) -> Figure:
    """Draw one heat map per measure."""
    frame, cards = plotdata.frame_of(subject), cards_of(subject)
    for m in measures:
        if not (frame.measure == m).any():
            raise unknown("this run", "measure", m, frame.measure.unique())
    grids = [(card(m, cards), plotdata.grid(frame, m)) for m in measures]
    return heat_panels([(c.heading, grid, limits_of([grid], c)) for c, grid in grids])


@styled
def profiles(subject: pandas.DataFrame | Framed, measures: Sequence[str], times: int = plotdata.TIMES, across: int = 3) -> Figure:
    """Draw one panel per measure: its values over the layers at a few steps, from light to dark, and the peak of each curve."""
    frame, cards = plotdata.frame_of(subject), cards_of(subject)
    for m in measures:
        if not (frame.measure == m).any():
            raise unknown("this run", "measure", m, frame.measure.unique())
    figure, axes = grid_of_panels(len(measures), across, width=None if across == 3 else 2.85, height=2.7)
    for ax, m in zip(axes, measures, strict=True):
        layers, drawn = plotdata.profiles(plotdata.lines(frame, m), times)
        if drawn:
            profile_panel(ax, layers, drawn, card(m, cards))
        else:
            say_why(ax, [f"a profile needs three layers, and {len(layers)} have values"])
    return figure


@styled
def compare_heat(runs: Sequence[Run] | Mapping[str, Any], measure: str) -> Figure:
    """Draw one heat map of a measure per run, all on one colour scale."""
    grids = {name: plotdata.grid(plotdata.frame_of(run), measure) for name, run in _named(runs).items()}
    described = card(measure, cards_of_all(_named(runs).values()))
    limits = limits_of(grids.values(), described)
    return heat_panels([(name, grid, limits) for name, grid in grids.items()], shortened(described.heading, 80))


@styled
def compare(runs: Sequence[Run] | Mapping[str, Any], measure: str, layers: Sequence[str] | None = None, most: int = 12) -> Figure:
    """Draw one panel per layer, with one colour per run. Of more than ``most`` layers some are shown, evenly spaced over depth.

    ``runs``: Runs, or a mapping from names to Runs, Observers and frames."""
    frames = {name: plotdata.frame_of(run) for name, run in _named(runs).items()}
    described = card(measure, cards_of_all(_named(runs).values()))
    lines = {name: plotdata.lines(frame, measure) for name, frame in frames.items()}
    every = [k for k in plotdata.depth(frames.values()) if any(k in curves for curves in lines.values())]
    shown = plotdata.chosen(every, most) if layers is None else [k for k in layers if k in every]
    look = run_looks(frames)
    linear = plotdata.threshold(s for curves in lines.values() for line in curves.values() for s in line.step.tolist())
    figure, axes = grid_of_panels(len(shown), across=5 if len(shown) == 5 else 4, width=_narrow(len(shown)), height=2.35)
    names = short_names(shown, 30)
    for ax, k in zip(axes, shown, strict=False):
        measure_panel(ax, {name: (curves[k], look[name]) for name, curves in lines.items() if k in curves}, described, linear)
        ax.set_title(names[k] if k == WHOLE or len(names[k]) > 20 else f"layer {names[k]}")
    same_height(axes)
    same_width(axes)
    figure.suptitle(shortened(described.heading, 80), fontsize=10)
    key(figure, look, "")
    return figure


@styled
def compare_whole(runs: Sequence[Run] | Mapping[str, Any], measures: Sequence[str]) -> Figure:
    """Draw measures of the whole model: one panel per measure, one colour per run."""
    frames, cards = {name: plotdata.frame_of(run) for name, run in _named(runs).items()}, cards_of_all(_named(runs).values())
    look = run_looks(frames)
    panels = {m: {name: lines[WHOLE] for name, frame in frames.items() for lines in [plotdata.lines(frame, m)] if WHOLE in lines}
              for m in measures}
    linear = plotdata.threshold(s for lines in panels.values() for line in lines.values() for s in line.step.tolist())
    figure, axes = grid_of_panels(len(panels), across=4, width=_narrow(len(panels)), height=2.35)
    for ax, (m, lines) in zip(axes, panels.items(), strict=False):
        measure_panel(ax, {name: (line, look[name]) for name, line in lines.items()}, card(m, cards), linear)
    same_width(axes)
    key(figure, look, "")
    return figure


@styled
def scalars(subject: Run | pandas.DataFrame | Sequence[Run] | Mapping[str, Run], names: Sequence[str] | None = None) -> Figure:
    """Draw loss, accuracy and other logged curves, one panel each and one colour per run. Stages of losses are marked for up to
    three runs."""
    from richter.measures.stages import stages_of
    one = isinstance(subject, Run) or hasattr(subject, "columns")
    runs: dict[str, Any] = {"": subject} if one else _named(subject)  # type: ignore[arg-type]
    tables = {name: plotdata.scalar_lines(getattr(run, "scalar_frame", run)) for name, run in runs.items()}
    shown = list(dict.fromkeys(n for run_stages in tables.values() for n in run_stages)) if names is None else list(names)
    measured = plotdata.threshold(s for run in runs.values() for s in getattr(run, "steps", ()))
    look = run_looks(tables)
    stages = {name: stages_of(run) for name, run in runs.items() if isinstance(run, Run)} if len(runs) <= MARKED else {}
    figure, axes = grid_of_panels(len(shown), across=4 if len(shown) == 4 else 3)
    for ax, n in zip(axes, shown, strict=False):
        drawn = {name: (run_stages[n], look[name]) for name, run_stages in tables.items() if n in run_stages}
        linear = plotdata.threshold(s for line, _ in drawn.values() for s in line.step.tolist())
        scalar_panel(ax, n, drawn, measured if linear is not None and measured is not None else linear)
        for name, run_stages in stages.items():
            if n in run_stages:
                stage_marks(ax, run_stages[n], look[name])
    if len(tables) > 1:
        key(figure, look, "")
    return figure


@styled
def against(points: Sequence[tuple[float | str, float, str]], value: str, setting: str) -> Figure:
    """Draw (setting, value, run) as points, with the median of the runs of each setting. Settings that are words are placed in
    order; the axis is logarithmic where positive settings span decades."""
    words = list(dict.fromkeys(str(x) for x, *_ in points)) if any(isinstance(x, str) for x, *_ in points) else []
    at = [words.index(str(x)) if words else float(x) for x, *_ in points]
    levels = sorted(set(at))
    figure, (ax,) = grid_of_panels(1, across=1, width=5.4, height=3.2)
    medians = [float(np.median([y for a, (_, y, _) in zip(at, points, strict=True) if a == level])) for level in levels]
    ax.plot(levels, medians, "-", color=COLOURS[0], alpha=0.5, gid="median")
    ax.plot(at, [y for _, y, _ in points], "o", color=COLOURS[0], markersize=4)
    if words:
        ax.set_xticks(range(len(words)), [shortened(w, 16) for w in words])
    elif levels and levels[0] > 0 and levels[-1] > 20 * levels[0]:
        ax.set_xscale("log")
        decade_ticks(ax, "x")
    ax.set_xlabel(shortened(setting))
    ax.set_ylabel(shortened(value))
    ax.grid(alpha=0.7)
    return figure


@styled
def side_by_side(matrices: Mapping[str, np.ndarray[Any, Any]], title: str = "") -> Figure:
    """Draw matrices with their titles, which may contain mathematics between dollar signs. Each has its own colour scale."""
    figure, axes = grid_of_panels(len(matrices), across=max(1, len(matrices)), width=2.2, height=2.3)
    for ax, (name, A) in zip(axes, matrices.items(), strict=False):
        top = matrix_panel(ax, np.asarray(A))
        ax.set_title(name, parse_math=True)
        ax.set_xlabel(f"±{top:.2g}")
    if title:
        figure.suptitle(title, fontsize=10, parse_math=True)
    return figure


@styled
def spectra(run: Run, layer: str = WHOLE, across: int = 3) -> Figure:
    """Draw the eigenvalues of each stored matrix of a layer, at the first and the last step. ``across``: panels per row."""
    eigenvalues = plotdata.spectra(run, layer)
    if not eigenvalues:
        raise SelectionError(f"the run {run.name} has no matrix of layer {layer!r} that has eigenvalues. Matrices are of: "
                             f"{', '.join(map(repr, dict.fromkeys(k for k, *_ in run.arrays))) or 'no layer'}.")
    figure, axes = grid_of_panels(len(eigenvalues), across=across, width=2.6 if across > 1 else 4.4, height=2.3)
    for ax, (name, by_step) in zip(axes, eigenvalues.items(), strict=False):
        for i, (step, values) in enumerate(by_step.items()):
            after = i == len(by_step) - 1
            ax.plot(np.arange(1, len(values) + 1), values, "-" if after else "--", color=COLOURS[0] if after else COLOURS[1],
                    label=f"step {step}", linewidth=1.3, marker="o" if len(values) <= 70 else None, markersize=1.8)
        ax.set_xscale("log")
        ax.set_yscale("log")
        decade_ticks(ax)
        ax.set_xlabel("rank")
        ax.grid(alpha=0.7)
        ax.set_title(f"{name.upper() if name in plotdata.MATRICES else shortened(name, 18)}: eigenvalues")
    ends = list(dict.fromkeys(s for by_step in eigenvalues.values() for s in (min(by_step), max(by_step))))
    first, last = (f"step {ends[0]}", f"step {ends[-1]}") if len(ends) <= 2 else ("first step", "last step")
    earlier = {first: LineStyle(COLOURS[1], "--")} if first != last else {}
    key(figure, {**earlier, last: LineStyle(COLOURS[0])}, "")
    return figure


@styled
def matrices(run: Run, layer: str, step: int | None = None) -> Figure:
    """Draw NFM, AGOP and EGOP with their cosines: at one step, or (``step=None``) at the first and the last."""
    steps = [step] if step is not None else plotdata.matrix_steps(run, layer) or [0]
    rows = {s: _pictured(plotdata.matrices(run, layer, s)) for s in steps}
    names = [n for n in plotdata.MATRICES if any(n in row for row in rows.values())]
    width = min(2.2, 5.4 / max(1, len(names)))
    figure, axes = grid_of_panels(len(rows) * len(names), across=max(1, len(names)), width=width, height=width + 0.3)
    for i, (s, row) in enumerate(rows.items()):
        for j, name in enumerate(names):
            ax = axes[i * len(names) + j]
            if name not in row:
                ax.set_axis_off()
                continue
            wide, blocks, cosines = row[name]
            top = matrix_panel(ax, blocks)
            ax.set_title(f"{name.upper()}, {wide} x {wide}" if i == 0 else "")
            ax.set_ylabel(f"step {s}" if j == 0 else "")
            words = [f"±{top:.2g}", *(f"cosine with {k.upper()}: {v:.3f}" for k, v in cosines.items())]
            ax.set_xlabel("\n".join(words))
    return figure


def _pictured(matrices: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, tuple[int, np.ndarray[Any, Any], dict[str, float]]]:
    """Reduce square matrices to the data of their pictures: width, blocks, and cosines with the matrices before. The matrices are
    then freed."""
    names = list(matrices)
    return {n: (len(A), shrink(A, BLOCKS), {other: cosine(matrices[other], A) for other in names[:j]})
            for j, (n, A) in enumerate(matrices.items())}


@styled
def specialisation(run: Run, most: int = 5) -> Figure:
    """Draw how far each output's kernel aligns with each output's labels, at the first and the last step, for layers evenly
    spaced over depth and the whole model: red above the column's mean (1), blue below."""
    every = plotdata.specialisations(run)
    if not every:
        raise SelectionError(f"the run {run.name} has no specialisation matrix: observe the measure 'specialisation' with a run.")
    shown = [*plotdata.chosen([k for k in every if k != WHOLE], most), *([WHOLE] if WHOLE in every else [])]
    names = short_names(shown, 20)
    rows = max(len(every[k]) for k in shown)
    figure, axes = grid_of_panels(rows * len(shown), across=len(shown), width=1.9, height=2.2)
    for j, k in enumerate(shown):
        for i, step in enumerate(every[k]):
            ax, KSM = axes[i * len(shown) + j], plotdata.shown(run, plotdata.KSM, k, step).astype(np.float64)
            ax.set_xlabel(f"labels (1 ± {matrix_panel(ax, KSM - 1):.2g})")
            ax.set_ylabel(f"kernels, step {step}" if j == 0 else "")
            ax.set_title(names[k] if i == 0 else "")
        for i in range(len(every[k]), rows):
            axes[i * len(shown) + j].set_axis_off()
    return figure


def save(figure: Figure, stem: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write ``<stem>.svg`` and ``<stem>.pdf``. Text stays text, and the same figure gives the same bytes."""
    from richter.report.svg import pdf_bytes, put, svg_text
    plain_ticks(figure)
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    return (put(stem.with_name(f"{stem.name}.svg"), svg_text(figure).encode()),
            put(stem.with_name(f"{stem.name}.pdf"), pdf_bytes(figure)))


def _narrow(panels: int) -> float | None:
    """Width of a panel with which two figures of two or three panels stand beside each other on a page."""
    return 1.86 if panels in (2, 3) else None


def _named(runs: Sequence[Run] | Mapping[str, Any]) -> dict[str, Any]:
    """Runs by name."""
    if not runs:
        raise SelectionError("there is no run to show: give at least one.")
    return dict(runs) if isinstance(runs, Mapping) else plotdata.labelled(runs)
