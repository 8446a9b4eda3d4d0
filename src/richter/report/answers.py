"""What the dashboard's page asks for, as JSON or as a table. Every answer is a function of the store and the query."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from richter.core import SelectionError, StoreError
from richter.instrument.verdict import diagnose
from richter.report.claims import told
from richter.report.plotdata import SPECTRUM, flat
from richter.report.shelf import Shelf
from richter.report.thin import shrink, thin
from richter.report.titles import TITLES
from richter.runs import Run, Series

CURVES = 4000  # in one answer
PICTURES = {"svg": "image/svg+xml", "png": "image/png"}
ALONE = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"  # the policy of a picture
ENTRIES = 2 ** 24  # of a matrix that is shown


def runs(shelf: Shelf, request: Request) -> Response:
    """Every run: name, status, last step, times, and a mark that differs when there is something new."""
    found = [asdict(s) for s in shelf.summaries()]
    return _tagged(request, repr(found), lambda: {"store": shelf.given, "now": time.time(), "runs": found})


def run(shelf: Shelf, request: Request) -> Response:
    """What one run holds, its settings, and where it ran."""
    name = _one(request, "run")

    def found() -> Any:
        with shelf.open(name) as r:
            sessions = r.sessions
            return {"run": name, "measures": r.measures, "layers": r.layers, "scalars": r.names,
                    "titles": {m: TITLES[m] for m in r.measures if m in TITLES},
                    "settings": flat(r.settings), "seeds": flat(r.seeds), "sessions": len(sessions),
                    "where": flat(sessions[-1].provenance) if sessions else {}}
    return _tagged(request, shelf.mark(name), found)


def verdict(shelf: Shelf, request: Request) -> Response:
    """Lazy or rich, in words; the run's claims, and the names of its pictures."""
    name = _one(request, "run")

    def found() -> Any:
        with shelf.open(name) as r:
            base = {"run": name, "claims": [told(k, record)._asdict() for k, record in r.claims.items()],
                    "figures": [{"name": n, "kind": kind} for n, kind in r.figures if kind in PICTURES]}
            try:
                d = diagnose(r)
            except SelectionError:
                return {**base, "verdict": "Nothing has been measured yet.", "layers": [], "evidence": [], "advice": []}
            return {**base, "step": d.step, "verdict": d.verdict, "evidence": d.evidence, "advice": d.advice,
                    "layers": [{"layer": v.layer, "verdict": v.verdict, "words": str(v)} for v in d.layers]}
    return _tagged(request, shelf.mark(name), found)


def figure(shelf: Shelf, request: Request) -> Response:
    """A picture that was stored with a run: as an image, in which nothing runs and which loads nothing."""
    kind = _one(request, "kind")
    if kind not in PICTURES:
        raise SelectionError(f"kind={kind[:100]!r}: pictures are shown as {' or '.join(PICTURES)}.")
    with shelf.open(_one(request, "run")) as r:
        data = r.figure(_one(request, "name"), kind)
    return Response(data, media_type=PICTURES[kind], headers={"Content-Security-Policy": ALONE})


def curves(shelf: Shelf, request: Request) -> Response:
    """Every chosen measure of every chosen layer, and every chosen scalar, of every chosen run: what there is of them."""
    points = _whole(request, "points", 4, 10_000, 400)

    def found() -> Any:
        return {"curves": [{"run": name, "measure": measure, "layer": layer, "note": note, "count": len(series.step),
                            "step": s.step.tolist(), "value": numbers(s.value), "error": numbers(s.error)}
                           for name, measure, layer, series, note in _chosen(shelf, request) for s in [thin(series, points)]]}
    return _tagged(request, [shelf.mark(name) for name in _several(request, "run")], found)


def curves_csv(shelf: Shelf, request: Request) -> Response:
    """The same with every point, as a table."""
    rows = ((cell(name), int(step), cell(layer or ""), cell(measure), float(value), float(error), cell(note))
            for name, measure, layer, series, note in _chosen(shelf, request) for step, value, error in zip(*series, strict=True))
    return _table("curves", ["run", "step", "layer", "measure", "value", "error", "note"], rows)


def arrays(shelf: Shelf, request: Request) -> Response:
    """Names, layers and steps of the arrays of a run."""
    name = _one(request, "run")

    def found() -> Any:
        steps: dict[tuple[str, str], list[int]] = {}
        with shelf.open(name) as r:
            for layer, array, step in r.arrays:
                steps.setdefault((array, layer), []).append(int(step))
        return {"run": name, "arrays": [{"name": a, "layer": k, "steps": s} for (a, k), s in steps.items()]}
    return _tagged(request, shelf.mark(name), found)


def matrix(shelf: Shelf, request: Request) -> Response:
    """One array: its entries as 32-bit floats (of a large one, the largest of each block), and its spectrum."""
    size = _whole(request, "size", 4, 1024, 256)

    def found() -> Any:
        a, (values, words) = _array(shelf, request, _spectrum)
        small = shrink(a, size) if a.ndim == 2 else thin(Series(np.arange(len(a)), a, a), 2000).value
        finite = a[np.isfinite(a)]
        return {"shape": a.shape, "shown": small.shape, "data": base64.b64encode(small.astype("<f4").tobytes()).decode(),
                "low": float(finite.min(initial=0)), "high": float(finite.max(initial=0)),
                "spectrum": numbers(values), "spectrum_words": words}
    return _tagged(request, shelf.mark(_one(request, "run")), found)


def matrix_csv(shelf: Shelf, request: Request) -> Response:
    """All entries of one array."""
    a, _ = _array(shelf, request, lambda *_: None)
    a = np.atleast_2d(a)
    return _table("matrix", range(a.shape[1]), a.tolist())


ANSWERS: dict[str, Callable[[Shelf, Request], Response]] = {
    "runs": runs, "run": run, "verdict": verdict, "figure": figure, "curves": curves, "curves.csv": curves_csv, "arrays": arrays,
    "matrix": matrix, "matrix.csv": matrix_csv}


# --------------------------------------------------------------------------------------------------------- what was asked

def _chosen(shelf: Shelf, request: Request) -> Iterator[tuple[str, str, str | None, Series, str]]:
    """(run, measure, layer or None for a scalar, series, note)."""
    names, measures, layers, scalars = (_several(request, k) for k in ("run", "measure", "layer", "scalar"))
    if (asked := len(names) * (len(measures) * len(layers) + len(scalars))) > CURVES:
        raise SelectionError(f"{asked} curves were asked for, and one answer has up to {CURVES}. Choose fewer runs or layers.")
    for name in names:
        with shelf.open(name) as r:
            for (measure, layer), (series, remark) in r.curves(measures, layers).items() if measures and layers else ():
                yield name, measure, layer, series, remark.text
            for scalar, series in r.scalar_curves(scalars).items() if scalars else ():
                yield name, scalar, None, series, ""


def _array(shelf: Shelf, request: Request, also: Callable[..., Any]) -> tuple[NDArray[np.float64], Any]:
    """A vector or matrix of real numbers, and what ``also`` makes of it."""
    name, layer = _one(request, "name"), _one(request, "layer")
    step = _whole(request, "step", -2 ** 63, 2 ** 63 - 1, None)
    with shelf.open(_one(request, "run")) as r:
        shape = r.shape(name, layer, step)
        if len(shape) not in (1, 2) or not 0 < np.prod([float(k) for k in shape]) <= ENTRIES:
            raise SelectionError(f"the array {name!r} has shape {shape}. Vectors and matrices of up to {ENTRIES:,} entries can "
                                 f"be shown; read others with Run.array.")
        stored = r.array(name, layer, step)
        a = np.abs(stored) if np.iscomplexobj(stored) else stored
        return a.astype(np.float64), also(r, name, layer, step, a)


def _spectrum(r: Run, name: str, layer: str, step: int | None, a: NDArray[Any]) -> tuple[NDArray[np.float64], str]:
    """Its eigenvalues, largest first, or what else there is; and which of these it is."""
    if a.ndim == 1:
        return np.array([]), ""
    if min(a.shape) > SPECTRUM:
        return np.array([]), f"The spectrum is shown of matrices of up to {SPECTRUM} rows; this one has {min(a.shape)}."
    if not np.isfinite(a).all():
        return np.array([]), "Some entries are not finite: there is no spectrum."
    try:
        values, _ = r.eigenpairs(name, layer, step)
        return values, "eigenvalues" if len(values) == len(a) else f"the {len(values)} largest of {len(a)} eigenvalues"
    except StoreError:  # not symmetric, or with negative eigenvalues
        if a.shape[0] == a.shape[1] and np.allclose(a, a.T, rtol=1e-4, atol=1e-6 * np.abs(a).max()):
            return np.linalg.eigvalsh(a)[::-1], "eigenvalues"
        return np.linalg.svd(a, compute_uv=False), "singular values"


def _several(request: Request, key: str) -> list[str]:
    return list(dict.fromkeys(request.query_params.getlist(key)))


def _one(request: Request, key: str) -> str:
    found = _several(request, key)
    if len(found) != 1:
        raise SelectionError(f"{key}= was given {len(found)} times; this address needs it once.")
    return found[0]


def _whole(request: Request, key: str, low: int, high: int, default: Any) -> Any:
    text = request.query_params.get(key)
    if text is None:
        return default
    try:
        number = int(text[:30])
    except ValueError:
        raise SelectionError(f"{key}={text[:100]!r} is not a whole number.") from None
    if not low <= number <= high:
        raise SelectionError(f"{key}={number} is not between {low} and {high}.")
    return number


# -------------------------------------------------------------------------------------------------------- how it is said

def _tagged(request: Request, state: Any, found: Callable[[], Any]) -> Response:
    """Nothing but 304 if the browser has the answer for this state already."""
    tag = f'"{hashlib.sha256(repr((state, request.url.query)).encode("utf-8", "replace")).hexdigest()[:24]}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    return as_json(found(), headers={"ETag": tag})


def as_json(found: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(found, allow_nan=False, separators=(",", ":")), status, headers, media_type="application/json")


def _table(name: str, header: Iterable[Any], rows: Iterable[Iterable[Any]]) -> Response:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return Response(text.getvalue(), media_type="text/csv",
                    headers={"Content-Disposition": f'attachment; filename="richter-{name}.csv"'})


def cell(text: str) -> str:
    """A name in a table. One that a spreadsheet would take for a formula gets an apostrophe."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def numbers(values: NDArray[np.float64]) -> list[float | None]:
    """To 7 digits, which no screen shows; None for what is no number."""
    with np.errstate(all="ignore"):
        scale = 10.0 ** (6 - np.floor(np.log10(np.abs(values))))
        short = np.round(values * scale) / scale
    short = np.where(np.isfinite(short), short, values)
    return [v if ok else None for v, ok in zip(short.tolist(), np.isfinite(short), strict=True)]
