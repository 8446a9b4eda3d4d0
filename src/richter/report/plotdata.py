"""Data of figures as arrays: curves, grids, spectra, matrices. They are computed here and drawn in figures.py."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from richter.core import WHOLE, Mark, SelectionError, StoreError
from richter.core.likeness import INPUTS
from richter.runs import Run

if TYPE_CHECKING:
    import pandas

Numbers = NDArray[np.float64]
T = TypeVar("T")
MATRICES = ("nfm", "agop", "egop")
TIMES = 5  # steps at which profiles over layers are drawn
FEATURES = "features"  # intensity, quality and utilisation of the features that a layer reads, one row each
KSM = "ksm"  # alignment of kernels with labels; it is not a feature matrix and has no spectrum
NESTED = 8  # levels of nested settings that become dotted names
SPECTRUM = 1024  # rows of a matrix whose spectrum is computed while the user waits
ENTRIES = 2 ** 24  # entries of an array that is shown; a small file may unpack to more than the memory holds
FLOOR = 1e-7  # relative to the largest eigenvalue; smaller ones are rounding noise in single precision


class Framed(Protocol):
    """An object with rows: a Run or an Observer."""

    @property
    def frame(self) -> pandas.DataFrame: ...


class CurveData(NamedTuple):
    """One curve: steps, values, standard errors (NaN: none)."""

    step: Numbers
    value: Numbers
    error: Numbers


class Profile(NamedTuple):
    """A measure over layers at one step, in order of depth; NaN where a layer has no finding."""

    step: int
    value: Numbers
    error: Numbers


class Grid(NamedTuple):
    """A measure over layers and steps: values [layer, step], NaN where there is no finding."""

    layers: list[str]
    steps: list[int]
    values: Numbers


# ------------------------------------------------------------------------------------------------------------ rows

def frame_of(subject: pandas.DataFrame | Framed) -> pandas.DataFrame:
    """Return the rows of a Run, an Observer or a table. A user's own table may lack the column of marks."""
    return subject if hasattr(subject, "columns") else subject.frame  # type: ignore[return-value, union-attr]


def depth(frames: Iterable[pandas.DataFrame]) -> list[str]:
    """Layers of one or several frames in measuring order, with the whole model last."""
    layers = dict.fromkeys(k for frame in frames for k in frame.layer.unique())
    return [k for k in layers if k != WHOLE] + [WHOLE] * (WHOLE in layers)


def findings(frame: pandas.DataFrame, measure: str) -> pandas.DataFrame:
    """Return the finite rows of a measure, by step, without trivial values."""
    rows = frame[(frame.measure == measure) & np.isfinite(frame.value)]
    if "mark" in rows:
        rows = rows[rows.mark != Mark.TRIVIAL.value]
    return rows.sort_values("step", kind="stable")


def lines(frame: pandas.DataFrame, measure: str) -> dict[str, CurveData]:
    """Return one curve per layer that has values, in order of depth."""
    parts = dict(tuple(findings(frame, measure).groupby("layer", sort=False)))
    return {k: CurveData(*(parts[k][c].to_numpy(np.float64) for c in ("step", "value", "error")))
            for k in depth([frame]) if k in parts}


def grid(frame: pandas.DataFrame, measure: str) -> Grid:
    """Values of a measure by layer and step."""
    rows = findings(frame, measure)
    steps = sorted(int(s) for s in rows.step.unique())
    measured = set(rows.layer)
    layers = [k for k in depth([frame]) if k in measured]
    values = np.full((len(layers), len(steps)), np.nan)
    row, column = {k: i for i, k in enumerate(layers)}, {s: j for j, s in enumerate(steps)}
    values[[row[k] for k in rows.layer], [column[int(s)] for s in rows.step]] = rows.value
    return Grid(layers, steps, values)


def profiles(lines: Mapping[str, CurveData], most: int = TIMES) -> tuple[list[str], list[Profile]]:
    """Return the layers without the whole model, and profiles at a few steps, including the first and the last. With fewer than
    three layers there is no profile."""
    inner = {k: line for k, line in lines.items() if k != WHOLE}
    steps = sorted({int(s) for line in inner.values() for s in line.step})
    if len(inner) < 3:
        return list(inner), []
    by_step = [{int(s): (v, e) for s, v, e in zip(*line, strict=True)} for line in inner.values()]
    nothing = (np.nan, np.nan)
    drawn = [Profile(s, *np.array([layer_values.get(s, nothing) for layer_values in by_step]).T) for s in chosen(steps, most)]
    return list(inner), [p for p in drawn if np.isfinite(p.value).sum() > 1]


def scalar_lines(table: pandas.DataFrame) -> dict[str, CurveData]:
    """Return the user's logged curves from a frame with a column ``step``."""
    lines = {}
    for name in (c for c in table.columns if c != "step"):
        value = table[name].to_numpy(np.float64)
        real = np.isfinite(value)
        lines[str(name)] = CurveData(table.step.to_numpy(np.float64)[real], value[real], np.full(real.sum(), np.nan))
    return lines


# ------------------------------------------------------------------------------------------------ selection for figures

def threshold(steps: Iterable[float]) -> float | None:
    """End of the linear part of a step axis, where the logarithmic part starts; None if the axis is linear throughout."""
    positive = [s for s in steps if s > 0]
    return None if not positive or max(positive) < 20 * min(positive) else float(min(positive))


def chosen(items: Sequence[T], most: int) -> list[T]:
    """Choose at most ``most`` items, evenly spaced, including the first and (of two or more) the last."""
    if len(items) <= most or most < 2:
        return list(items[:most])
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


# --------------------------------------------------------------------------------------------------------- matrices

def stored(run: Run, layer: str) -> dict[str, list[int]]:
    """Map the name of each array of a layer to its steps."""
    steps: dict[str, list[int]] = {}
    for k, name, step in run.arrays:
        if k == layer and name not in (INPUTS, FEATURES):  # these have figures of their own
            steps.setdefault(name, []).append(step)
    return {name: sorted(steps[name]) for name in sorted(steps, key=_order)}


def with_matrices(run: Run) -> list[str]:
    """Layers that have an NFM or an AGOP, by depth."""
    have = list(dict.fromkeys(k for k, name, _ in run.arrays if name in MATRICES[:2]))
    place = {k: i for i, k in enumerate(run.layers)}
    return sorted(have, key=lambda k: place.get(k, len(place)))


def shown(run: Run, name: str, layer: str, step: int | None = None) -> NDArray[Any]:
    """Return a stored array as real numbers if it is small enough to show; complex numbers become magnitudes."""
    fitting(run, name, layer, step)
    stored = run.array(name, layer, step)
    return stored.astype(np.uint8) if stored.dtype == bool else np.abs(stored) if np.iscomplexobj(stored) else stored


def fitting(run: Run, name: str, layer: str, step: int | None = None) -> tuple[int, ...]:
    """Return the shape of a stored array, checked against the size limit before it is unpacked."""
    shape = run.shape(name, layer, step)
    if math.prod(shape) > ENTRIES:
        raise StoreError(f"the array {name!r} of layer {layer!r} has shape {shape}; arrays of up to {ENTRIES:,} entries are "
                         f"shown. Read it with Run.array, if there is memory for it.")
    return shape


def spectrum(run: Run, name: str, layer: str, step: int) -> Numbers:
    """Eigenvalues of a stored matrix above rounding noise, largest first. A stored vector is already a spectrum."""
    shape = fitting(run, name, layer, step)
    values = run.array(name, layer, step) if len(shape) == 1 else run.eigenpairs(name, layer, step)[0]
    values = np.sort(values.astype(np.float64))[::-1]
    values = values[np.isfinite(values)]
    return values[values > FLOOR * values[0]] if len(values) and values[0] > 0 else values[:0]


def spectra(run: Run, layer: str) -> dict[str, dict[int, Numbers]]:
    """Map names to {first step: eigenvalues, last step: eigenvalues}. Matrices without a spectrum (not symmetric) are left
    out."""
    spectra: dict[str, dict[int, Numbers]] = {}
    for name, steps in stored(run, layer).items():
        if name == KSM:
            continue
        try:
            spectra[name] = {s: spectrum(run, name, layer, s) for s in dict.fromkeys((steps[0], steps[-1]))}
        except StoreError:
            continue
    return {name: by_step for name, by_step in spectra.items() if any(len(v) for v in by_step.values())}


def matrices(run: Run, layer: str, step: int) -> dict[str, NDArray[Any]]:
    """NFM, AGOP and EGOP of a layer at a step. The EGOP of the whole model is placed with the layer that reads the input."""
    have = stored(run, layer)
    arrays = {name: shown(run, name, layer, step) for name in MATRICES if step in have.get(name, ())}
    square = {name: a for name, a in arrays.items() if a.ndim == 2 and a.shape[0] == a.shape[1]}
    if not square:
        steps = sorted({s for name in MATRICES for s in have.get(name, ())})
        raise SelectionError(f"the run {run.name} has no square NFM or AGOP of layer {layer!r} at step {step}. "
                             + (f"It has matrices at: {', '.join(map(str, steps))}." if steps else
                                f"Layers that have them: {', '.join(map(repr, with_matrices(run))) or 'none'}."))
    if "egop" not in square:
        reads_input = with_matrices(run)[:1] == [layer] and "egop" in stored(run, WHOLE)
        other = shown(run, "egop", layer) if "egop" in have else shown(run, "egop", WHOLE) if reads_input else None
        if other is not None and other.shape == next(iter(square.values())).shape:
            square["egop"] = other
    return square


def matrix_steps(run: Run, layer: str) -> list[int]:
    """First and last step at which a layer has an NFM or an AGOP."""
    steps = sorted({s for name, array_steps in stored(run, layer).items() if name in MATRICES[:2] for s in array_steps})
    return list(dict.fromkeys(steps[:1] + steps[-1:]))


def matrix_entries(run: Run, layer: str) -> int:
    """Number of entries in all matrices of a layer that are drawn, a measure of the time to read them."""
    steps, have = matrix_steps(run, layer), stored(run, layer)
    return sum(math.prod(run.shape(name, layer, s)) for name in MATRICES for s in steps if s in have.get(name, ()))


def specialisations(run: Run) -> dict[str, list[int]]:
    """Map each layer to the first and last step of its KSM, by depth, with the whole model last. Matrices too wide to draw are
    left out."""
    steps: dict[str, list[int]] = {}
    for k, name, step in run.arrays:
        if name == KSM:
            steps.setdefault(k, []).append(step)
    ends = {k: dict.fromkeys((min(steps[k]), max(steps[k]))) for k in (*run.layers, WHOLE) if k in steps}
    drawn = {k: [s for s in ksm_steps if len(shape := run.shape(KSM, k, s)) == 2 and shape[0] == shape[1] <= SPECTRUM]
             for k, ksm_steps in ends.items()}
    return {k: ksm_steps for k, ksm_steps in drawn.items() if ksm_steps}


def _order(name: str) -> tuple[int, str]:
    return (MATRICES.index(name) if name in MATRICES else len(MATRICES), name)


# --------------------------------------------------------------------------------------------------- names, settings

def labelled(runs: Sequence[Run]) -> dict[str, Run]:
    """Give each run a unique name: its folder, with the parent folder if two are equal, and a number if that is not enough."""
    names = [r.name for r in runs]
    names = [n if names.count(n) == 1 else f"{r.path.resolve().parent.name}/{n}" for n, r in zip(names, runs, strict=True)]
    return {n if names.count(n) == 1 else f"{n} ({names[:i + 1].count(n)})": r
            for i, (n, r) in enumerate(zip(names, runs, strict=True))}


def flat(settings: Any, path: tuple[str, ...] = ()) -> dict[str, str]:
    """Flatten settings to dotted names: {"model": {"width": 8}, "tags": {}} gives {"model.width": "8", "tags": "{}"}. Settings
    nested deeper than NESTED become one text. Settings that are no mapping get the name "settings"."""
    if isinstance(settings, Mapping) and len(path) < NESTED and (settings or not path):
        return {name: text for k, v in settings.items() for name, text in flat(v, (*path, str(k))).items()}
    if settings is None and not path:
        return {}
    return {".".join(path) if path else "settings": settings if isinstance(settings, str) else
            json.dumps(settings, ensure_ascii=False)}


def differences(settings: Sequence[Mapping[str, str]]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Split settings into those that differ (name -> one text per run, empty where absent) and those in common."""
    names = dict.fromkeys(k for s in settings for k in s)
    values = {k: [s.get(k, "") for s in settings] for k in names}
    return ({k: v for k, v in values.items() if len(set(v)) > 1}, {k: v[0] for k, v in values.items() if len(set(v)) == 1})
