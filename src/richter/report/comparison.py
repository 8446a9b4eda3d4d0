"""Comparison of two networks, layer by layer. ``Comparison`` is the result of ``richter.workflows.compare``; ``between`` makes
one, without torch, from the probe features that runs have stored (``Observer(keep_features=...)``).

>>> between(run, other)                                # at their last steps
>>> between(run, run, steps=(0, 1000)).plot()
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from richter.core import SelectionError, StoreError, likeness, matches, unknown
from richter.core.likeness import GRAM
from richter.core.values import table
from richter.report import plotdata
from richter.report.axes import WIDTH, grid_of_panels, step_text
from richter.report.images import cells_panel
from richter.report.looks import styled
from richter.report.names import short_names, shortened
from richter.runs import Run

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

Numbers = NDArray[np.float64]
MOST = 2 * plotdata.ENTRIES  # entries of all Gram matrices of one step; a limit, because a small file may unpack to a huge one
ROWS = 1024  # rows of a Gram matrix, as in Observer: its eigenfunctions are computed while the user waits
FEATURES = 10  # number of leading eigenfunctions that are compared


@dataclass(frozen=True, eq=False)
class Comparison:
    """Similarity of the layers' features of two networks, on the same examples.

    ``cka`` [a, b]: centred kernel alignment of linear kernels. ``overlap`` [a, b]: mean squared cosine of the principal angles
    between the leading eigenfunctions of two layers. ``cosines`` [a, b, r, s]: cosines between single eigenfunctions (their signs
    mean nothing; NaN where a layer has fewer). ``shares`` [a, r] and [b, s]: share of the variance of each eigenfunction.
    Features are centred."""

    names: tuple[str, str]
    layers: tuple[tuple[str, ...], tuple[str, ...]]
    cka: Numbers
    cosines: Numbers
    shares: tuple[Numbers, Numbers]
    rows: int
    debiased: bool = False
    kind: str = "examples"  # the kind of the rows
    notes: tuple[str, ...] = ()

    @property
    def overlap(self) -> Numbers:
        squares = self.cosines**2
        sizes = [[likeness.overlap(_filled(pair)) for pair in row] for row in squares]
        return np.array(sizes, np.float64)

    @property
    def chance(self) -> float:
        """Expected overlap of leading features that are unrelated."""
        return min(1.0, self.cosines.shape[-1] / max(1, self.rows - 1))

    def features(self, layer_a: str, layer_b: str) -> Numbers:
        """Squared cosines between single leading eigenfunctions of two layers, [r, s]. Where two eigenvalues are nearly equal,
        their eigenfunctions are an arbitrary mixture, and only the overlap of all is reliable."""
        return _filled(self.cosines[self._place(layer_a, layer_b)] ** 2)

    def angles(self, layer_a: str, layer_b: str) -> Numbers:
        """Principal angles between the leading features of two layers, in degrees, the smallest first."""
        return likeness.angles(_filled(self.cosines[self._place(layer_a, layer_b)]))

    def _place(self, layer_a: str, layer_b: str) -> tuple[int, int]:
        """Positions of two layers; raise an error for unknown ones."""
        for name, layers, layer in zip(self.names, self.layers, (layer_a, layer_b), strict=True):
            if layer not in layers:
                raise unknown(name, "layer", layer, layers)
        return self.layers[0].index(layer_a), self.layers[1].index(layer_b)

    @property
    def frame(self) -> pandas.DataFrame:
        """One row for each pair of layers: layer_a, layer_b, cka, overlap."""
        import pandas as pd
        a, b = self.layers
        return pd.DataFrame({"layer_a": np.repeat(a, len(b)), "layer_b": np.tile(b, len(a)), "cka": self.cka.ravel(),
                             "overlap": self.overlap.ravel()})

    @property
    def counterparts(self) -> list[tuple[str, str, float, float]]:
        """For each layer of the first network: its name, the matching layer of the second, their CKA and overlap. The match is
        the layer at the same place if both networks have the same layers, otherwise the most similar one."""
        a, b = self.layers
        cka = np.nan_to_num(self.cka, nan=-np.inf)
        places = [b.index(k) if a == b else int(cka[i].argmax()) for i, k in enumerate(a)]
        overlap = self.overlap
        return [(a[i], b[j], float(self.cka[i, j]), float(overlap[i, j])) for i, j in enumerate(places)]

    def __str__(self) -> str:
        kind = "debiased CKA" if self.debiased else "CKA"
        head = (f"{self.names[0]} and {self.names[1]} on {self.rows:,} {self.kind}: {kind} of what each layer reads, and overlap "
                f"of the {self.cosines.shape[-1]} leading features (up to {self.chance:.2f} by chance)")
        same = self.layers[0] == self.layers[1]
        rows = [["layer", "beside", kind, "overlap"], *([a, b, _number(c), _number(o)] for a, b, c, o in self.counterparts)]
        rows = [[row[0], *row[2:]] if same else row for row in rows]
        return "\n".join([head, table(rows, right=(1, 2) if same else (2, 3)), *self.notes])

    @styled
    def plot(self) -> Figure:
        """CKA and overlap of every pair of layers, as colours with the numbers written in them."""
        a, b = ([*short_names(layers, 16).values()] for layers in self.layers)
        width = min(WIDTH / 2, max(2.6, 0.36 * len(b) + 1.4))
        figure, axes = grid_of_panels(2, across=2, width=width, height=max(2.0, min(7.0, 0.26 * len(a) + 1.3)))
        kind = "debiased CKA" if self.debiased else "CKA"
        titles = (f"{kind} of features", f"overlap of {self.cosines.shape[-1]} leading features")
        for ax, values, title in zip(axes, (self.cka, self.overlap), titles, strict=True):
            cells_panel(ax, values, a, b)
            ax.set_title(title)
            ax.set_xlabel(f"layer of {shortened(self.names[1], 30)}")
            ax.set_ylabel(f"layer of {shortened(self.names[0], 30)}")
        return figure


def _filled(pair: Numbers) -> Numbers:
    """Drop rows and columns of missing features (all NaN)."""
    real = np.isfinite(pair)
    return pair[real.any(1)][:, real.any(0)]


def _number(v: float) -> str:
    return f"{v:.3f}" if np.isfinite(v) else "undefined"


# -------------------------------------------------------------------------------------------- features stored in runs


def about(run: Run) -> dict[str, Any]:
    """Facts about the features that a run has stored: a digest of the examples, their classes, the layers by depth."""
    facts = run.about.get("features")
    return facts if isinstance(facts, dict) else {}


def depth(run: Run) -> list[str]:
    """Layers whose features a run has stored, from the input to the outputs."""
    layers = about(run).get("layers")
    return [k for k in layers if isinstance(k, str)] if isinstance(layers, list) else []


def steps_of(run: Run) -> list[int]:
    """Steps at which a run has stored the features of its probe."""
    return sorted({step for _, name, step in run.arrays if name == GRAM})


def grams(run: Run, step: int) -> dict[str, Numbers]:
    """Centred Gram matrices of the layers' inputs at a step, by depth."""
    order = {k: i for i, k in enumerate(depth(run))}
    layers = [k for k, name, s in run.arrays if name == GRAM and s == step]
    layers.sort(key=lambda k: order.get(k, len(order)))
    shapes = [run.shape(GRAM, k, step) for k in layers]
    if wide := [shape for shape in shapes if len(shape) != 2 or shape[0] != shape[1] or not 0 < shape[0] <= ROWS]:
        raise StoreError(f"the run {run.name} has kept features of step {step} in arrays of shape {wide[0]}; square ones of up "
                         f"to {ROWS:,} rows are compared. Read others with Run.array.")
    if (entries := sum(map(math.prod, shapes))) > MOST:
        raise StoreError(f"the run {run.name} has kept features of step {step} in matrices of {entries:,} entries together; up "
                         f"to {MOST:,} are compared. Keep features of fewer examples (keep_features=), or read them one by one "
                         f"with Run.array.")
    stored = ((k, plotdata.shown(run, GRAM, k, step).astype(np.float64)) for k in layers)
    # stored values are rounded, so they are centred again
    return {k: likeness.centred(K) for k, K in stored if np.isfinite(K).all()}


class StoredFeatures(NamedTuple):
    """The features that a run has stored at one step: enough to compare it with another run after it is closed."""

    name: str
    step: int
    grams: dict[str, Numbers]
    examples: str  # a digest
    kind: str = "examples"  # the kind of the rows

    @property
    def title(self) -> str:
        """Name and step."""
        return f"{self.name}, step {step_text(self.step)}"


def kept(run: Run, step: int | None = None, name: str = "") -> StoredFeatures:
    """Return the features stored at the last step at or before ``step``; ``None``: at the last step of all."""
    place = last_kept(run, step)
    facts = about(run)
    kind = "tokens" if facts.get("kind") == "tokens" else "examples"
    return StoredFeatures(name or run.name, place, grams(run, place), str(facts.get("examples")), kind)


def between(a: Run, b: Run, steps: tuple[int | None, int | None] = (None, None), *, debiased: bool = False,
            features: int = FEATURES, layers: Sequence[str] | None = None) -> Comparison:
    """Compare two runs, or two steps of one run, by the features that they stored of the same examples. A step of None is the
    last stored step; a number means the last stored step at or before it. ``layers``: names or patterns; the outputs are always
    included."""
    one, other = (_chosen(kept(run, step), layers) for run, step in zip((a, b), steps, strict=True))
    return of_kept(one, other, debiased=debiased, features=features)


def _chosen(k: StoredFeatures, layers: Sequence[str] | None) -> StoredFeatures:
    """Keep the layers that match, and the last layer, which is the outputs."""
    if layers is None:
        return k
    *hidden, outputs = k.grams
    matching = [layer for layer in hidden if any(matches(layer, pattern) for pattern in layers)]
    if not matching:
        raise unknown(k.name, "layer", ", ".join(layers), hidden)
    return k._replace(grams={layer: k.grams[layer] for layer in (*matching, outputs)})


def of_kept(a: StoredFeatures, b: StoredFeatures, *, debiased: bool = False, features: int = FEATURES) -> Comparison:
    """Compare the stored features of two runs."""
    if a.examples != b.examples:
        raise SelectionError(f"the runs {a.name} and {b.name} have kept features of different examples, so that they have no "
                             f"rows in common. Watch both with the same Probe and the same keep_features=.")
    comparison = of_grams(a.grams, b.grams, (a.title, b.title), debiased=debiased, features=features, noise=likeness.SINGLE)
    return replace(comparison, kind=a.kind)


def drift(run: Run, most: int = 40) -> tuple[list[int], dict[str, Numbers]]:
    """How far each layer moved from the features of the first stored step: the debiased CKA with them, over steps. At most
    ``most`` steps are used, and fewer if the matrices of all steps would need too much memory. Returns the steps, and a curve for
    each layer."""
    steps = steps_of(run)
    if len(steps) < 2:
        return steps, {}
    first = grams(run, steps[0])
    steps = plotdata.chosen(steps, max(2, min(most, MOST // max(1, sum(K.size for K in first.values())))))
    curves: dict[str, list[float]] = {k: [] for k in first}
    for step in steps:
        here = grams(run, step)
        for k, values in curves.items():
            values.append(float(_alike({k: first[k]}, {k: here[k]}, debiased=True)[0, 0]) if k in here else np.nan)
    return steps, {k: np.array(values) for k, values in curves.items()}


def last_kept(run: Run, step: int | None = None) -> int:
    """The last step at or before ``step`` (None: the last of all) at which features were stored."""
    steps = steps_of(run)
    if not steps:
        raise SelectionError(f"the run {run.name} has kept no features of its probe: watch with Observer(..., run=..., "
                             f"keep_features=64), or compare checkpoints with richter.workflows.compare.")
    before = [s for s in steps if step is None or s <= step]
    if not before:
        raise SelectionError(f"the run {run.name} has kept no features at or before step {step}; the first are of step "
                             f"{steps[0]}.")
    return before[-1]


def of_grams(a: Mapping[str, Numbers], b: Mapping[str, Numbers], names: tuple[str, str], *, debiased: bool = False,
             features: int = FEATURES, noise: float = likeness.NOISE) -> Comparison:
    """Compare centred Gram matrices of the same rows."""
    values = _alike(a, b, debiased)
    if features < 1:
        raise SelectionError(f"features={features}: the number of leading eigenfunctions to compare must be at least 1.")
    pairs = [[likeness.leading(K, features, noise) for K in network.values()] for network in (a, b)]
    shares = [[v / max(np.trace(K), 1e-300) for (v, _), K in zip(network, Ks.values(), strict=True)]
              for network, Ks in zip(pairs, (a, b), strict=True)]
    cosines = [[u.T @ w for _, w in pairs[1]] for _, u in pairs[0]]
    return Comparison(names, (tuple(a), tuple(b)), values, likeness.padded(cosines, features),
                      (likeness.padded_rows(shares[0], features), likeness.padded_rows(shares[1], features)),
                      len(next(iter(a.values()))), debiased)


def _alike(a: Mapping[str, Numbers], b: Mapping[str, Numbers], debiased: bool) -> Numbers:
    """CKA of every pair of layers."""
    sizes = {len(K) for K in (*a.values(), *b.values())}
    if not a or not b or len(sizes) != 1:
        raise SelectionError(f"Gram matrices of {', '.join(map(str, sorted(sizes))) or 'no'} examples cannot be compared: all "
                             f"need the same examples.")
    if debiased and max(sizes) < likeness.FEWEST:
        raise SelectionError(f"{max(sizes)} examples are too few for the debiased alignment, which needs {likeness.FEWEST}.")
    flat = [np.stack([K.ravel() for K in network.values()]) for network in (a, b)]
    squares = [np.stack([K.diagonal() for K in network.values()]) for network in (a, b)]
    return likeness.cka(flat[0] @ flat[1].T, (flat[0] ** 2).sum(1), (flat[1] ** 2).sum(1), squares[0], squares[1], debiased)
