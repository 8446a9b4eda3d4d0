"""The matrices of a layer side by side at any step, with their spectra."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from richter.core import SelectionError, StoreError
from richter.core.likeness import INPUTS
from richter.report import plotdata
from richter.report.plotdata import ENTRIES, SPECTRUM
from richter.report.query import Query
from richter.report.shelf import Chosen
from richter.report.thin import numbers, shrink, thin
from richter.report.views import Sheet, View
from richter.runs import Run, Series


def matrices(runs: Chosen, query: Query) -> Any:
    """Return names, layers and steps of the arrays of a run."""
    name, run = runs.one()
    steps: dict[tuple[str, str], list[int]] = {}
    for layer, array, step in run.arrays:
        if array != INPUTS:  # images
            steps.setdefault((array, layer), []).append(int(step))
    return {"run": name, "arrays": [{"name": a, "layer": k, "steps": s} for (a, k), s in steps.items()]}


def matrix(runs: Chosen, query: Query) -> Any:
    """Return one array: its entries as 32-bit floats (reduced to the largest of each block if it is large), and its spectrum."""
    size = query.whole("size", 4, 1024, 256)
    _, run = runs.one()
    a = _array(run, query)
    values, words = _spectrum(run, query, a)
    small = shrink(a, size) if a.ndim == 2 else thin(Series(np.arange(len(a)), a, a), 2000).value
    finite = a[np.isfinite(a)]
    return {"shape": a.shape, "shown": small.shape, "data": base64.b64encode(small.astype("<f4").tobytes()).decode(),
            "low": float(finite.min(initial=0)), "high": float(finite.max(initial=0)),
            "spectrum": numbers(values), "spectrum_words": words}


def matrix_csv(runs: Chosen, query: Query) -> Sheet:
    """Return all entries of one array, as a table."""
    a = np.atleast_2d(_array(runs.one()[1], query))
    return Sheet("matrix", range(a.shape[1]), (row.tolist() for row in a))


def _place(query: Query) -> tuple[str, str, int | None]:
    """Name, layer and step of the array that a query asks for."""
    return query.one("name"), query.one("layer"), query.whole("step", -2 ** 63, 2 ** 63 - 1, None)


def _array(run: Run, query: Query) -> NDArray[np.float64]:
    """Read a vector or matrix as real numbers."""
    shape = run.shape(*_place(query))
    if len(shape) not in (1, 2) or not 0 < np.prod([float(k) for k in shape]) <= ENTRIES:
        raise SelectionError(f"the array {query.one('name')!r} has shape {shape}. Vectors and matrices of up to {ENTRIES:,} "
                             f"entries can be shown; read others with Run.array.")
    return plotdata.shown(run, *_place(query)).astype(np.float64)


def _spectrum(run: Run, query: Query, a: NDArray[np.float64]) -> tuple[NDArray[np.float64], str]:
    """Return eigenvalues, largest first, or singular values, and words that say which of these they are."""
    if a.ndim == 1:
        return np.array([]), ""
    if min(a.shape) > SPECTRUM:
        return np.array([]), f"The spectrum is shown for matrices of up to {SPECTRUM} rows; this one has {min(a.shape)}."
    if not np.isfinite(a).all():
        return np.array([]), "Some entries are not finite: there is no spectrum."
    try:
        values, _ = run.eigenpairs(*_place(query))
        return values, "eigenvalues" if len(values) == len(a) else f"the {len(values)} largest of {len(a)} eigenvalues"
    except StoreError:  # the matrix is not symmetric, or has negative eigenvalues
        if a.shape[0] == a.shape[1] and np.allclose(a, a.T, rtol=1e-4, atol=1e-6 * np.abs(a).max()):
            return np.asarray(np.linalg.eigvalsh(a)[::-1], np.float64), "eigenvalues"
        return np.asarray(np.linalg.svd(a, compute_uv=False), np.float64), "singular values"


VIEW = View("matrices", "Matrices", matrices, more={"matrix": matrix, "matrix.csv": matrix_csv}, script="view-matrices.js",
            place=2)
