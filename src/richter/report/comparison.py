"""Two networks side by side, layer by layer: ``Comparison``, what ``richter.workflows.compare`` returns, and the same of what
runs keep of their probes' features (``Observer(keep_features=...)``), without torch.

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
MOST = 2 * plotdata.ENTRIES  # entries of all Gram matrices of one step, which a small file may unpack to
ROWS = 1024  # of a Gram matrix, as many as an Observer keeps: its eigenfunctions are computed while somebody waits
FEATURES = 10  # leading eigenfunctions that are compared


@dataclass(frozen=True, eq=False)
class Comparison:
    """How alike the features of the layers of two networks are, on the same examples.

    ``cka`` [a, b] centred kernel alignment of linear kernels; ``overlap`` [a, b] the mean squared cosine of the principal angles
    between the leading eigenfunctions of two layers; ``cosines`` [a, b, r, s] between these, one by one (their signs say nothing;
    NaN where a layer has fewer); ``shares`` of the variance that each of them has, [a, r] and [b, s]. Features are centred."""

    names: tuple[str, str]
    layers: tuple[tuple[str, ...], tuple[str, ...]]
    cka: Numbers
    cosines: Numbers
    shares: tuple[Numbers, Numbers]
    rows: int
    debiased: bool = False
    kind: str = "examples"  # what the rows are
    notes: tuple[str, ...] = ()

    @property
    def overlap(self) -> Numbers:
        squares = self.cosines**2
        sizes = [[likeness.overlap(_filled(pair)) for pair in row] for row in squares]
        return np.array(sizes, np.float64)

    @property
    def chance(self) -> float:
        """The overlap of leading features that have nothing to do with each other."""
        return min(1.0, self.cosines.shape[-1] / max(1, self.rows - 1))

    def features(self, layer_a: str, layer_b: str) -> Numbers:
        """Squared cosines between the leading eigenfunctions of two layers, one by one, [r, s]. Where two eigenvalues are nearly
        equal their eigenfunctions are any mixture, and only the overlap of all is sure."""
        return _filled(self.cosines[self._place(layer_a, layer_b)] ** 2)

    def angles(self, layer_a: str, layer_b: str) -> Numbers:
        """Principal angles between the leading features of two layers, in degrees, the smallest first."""
        return likeness.angles(_filled(self.cosines[self._place(layer_a, layer_b)]))

    def _place(self, layer_a: str, layer_b: str) -> tuple[int, int]:
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
        """Of each layer of the first network: the layer of the second by its place (where both have the same layers) or else the
        one that is most alike, CKA and overlap."""
        a, b = self.layers
        known = np.nan_to_num(self.cka, nan=-np.inf)
        places = [b.index(k) if a == b else int(known[i].argmax()) for i, k in enumerate(a)]
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
    """Without the rows and columns of features that are not there."""
    real = np.isfinite(pair)
    return pair[real.any(1)][:, real.any(0)]


def _number(v: float) -> str:
    return f"{v:.3f}" if np.isfinite(v) else "undefined"


# --------------------------------------------------------------------------------------------------- what runs have kept


def about(run: Run) -> dict[str, Any]:
    """What a run says of the features that it has kept: a digest of the examples, their classes, the layers by depth."""
    facts = run.about.get("features")
    return facts if isinstance(facts, dict) else {}


def depth(run: Run) -> list[str]:
    """The layers whose features a run has kept, from the input to the outputs."""
    known = about(run).get("layers")
    return [k for k in known if isinstance(k, str)] if isinstance(known, list) else []


def steps_of(run: Run) -> list[int]:
    """Those at which a run has kept the features of its probe."""
    return sorted({step for _, name, step in run.arrays if name == GRAM})


def grams(run: Run, step: int) -> dict[str, Numbers]:
    """Centred Gram matrices of what the layers read at a step, by depth."""
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
    return {k: likeness.centred(K) for k, K in stored if np.isfinite(K).all()}  # what is stored is rounded


class Kept(NamedTuple):
    """What a run has kept of its features at a step: enough to compare it with another after the run is closed."""

    name: str
    step: int
    grams: dict[str, Numbers]
    examples: str  # a digest
    kind: str = "examples"  # what the rows are

    @property
    def title(self) -> str:
        return f"{self.name}, step {step_text(self.step)}"


def kept(run: Run, step: int | None = None, name: str = "") -> Kept:
    """At the last step at or before this one (None: of all) of which features were kept."""
    place = last_kept(run, step)
    facts = about(run)
    kind = "tokens" if facts.get("kind") == "tokens" else "examples"
    return Kept(name or run.name, place, grams(run, place), str(facts.get("examples")), kind)


def between(a: Run, b: Run, steps: tuple[int | None, int | None] = (None, None), *, debiased: bool = False,
            features: int = FEATURES, layers: Sequence[str] | None = None) -> Comparison:
    """Two runs, or two steps of one, by the features that they have kept of the same examples. A step that is None is the last
    that was kept; another is the last kept at or before it. ``layers``: names or patterns; the outputs are always there."""
    one, other = (_chosen(kept(run, step), layers) for run, step in zip((a, b), steps, strict=True))
    return of_kept(one, other, debiased=debiased, features=features)


def _chosen(k: Kept, layers: Sequence[str] | None) -> Kept:
    """Those of its layers that match, and the last, which is the outputs."""
    if layers is None:
        return k
    *known, outputs = k.grams
    mine = [layer for layer in known if any(matches(layer, pattern) for pattern in layers)]
    if not mine:
        raise unknown(k.name, "layer", ", ".join(layers), known)
    return k._replace(grams={layer: k.grams[layer] for layer in (*mine, outputs)})


def of_kept(a: Kept, b: Kept, *, debiased: bool = False, features: int = FEATURES) -> Comparison:
    if a.examples != b.examples:
        raise SelectionError(f"the runs {a.name} and {b.name} have kept features of different examples, so that they have no "
                             f"rows in common. Watch both with the same Probe and the same keep_features=.")
    seen = of_grams(a.grams, b.grams, (a.title, b.title), debiased=debiased, features=features, noise=likeness.SINGLE)
    return replace(seen, kind=a.kind)


def drift(run: Run, most: int = 40) -> tuple[list[int], dict[str, Numbers]]:
    """How far each layer has gone from its features of the first kept step: the debiased CKA with these, at no more than so many
    steps, and at fewer where the matrices of all these would be many; the steps, and a curve for each layer."""
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
    """The last step at or before this one (None: of all) of which features were kept."""
    known = steps_of(run)
    if not known:
        raise SelectionError(f"the run {run.name} has kept no features of its probe: watch with Observer(..., run=..., "
                             f"keep_features=64), or compare checkpoints with richter.workflows.compare.")
    before = [s for s in known if step is None or s <= step]
    if not before:
        raise SelectionError(f"the run {run.name} has kept no features at or before step {step}; the first are of step "
                             f"{known[0]}.")
    return before[-1]


def of_grams(a: Mapping[str, Numbers], b: Mapping[str, Numbers], names: tuple[str, str], *, debiased: bool = False,
             features: int = FEATURES, noise: float = likeness.NOISE) -> Comparison:
    """From centred Gram matrices of the same rows."""
    values = _alike(a, b, debiased)
    if features < 1:
        raise SelectionError(f"features={features}: how many leading eigenfunctions are compared, at least one.")
    pairs = [[likeness.leading(K, features, noise) for K in mine.values()] for mine in (a, b)]
    shares = [[v / max(np.trace(K), 1e-300) for (v, _), K in zip(mine, Ks.values(), strict=True)]
              for mine, Ks in zip(pairs, (a, b), strict=True)]
    cosines = [[u.T @ w for _, w in pairs[1]] for _, u in pairs[0]]
    return Comparison(names, (tuple(a), tuple(b)), values, likeness.padded(cosines, features),
                      (likeness.padded_rows(shares[0], features), likeness.padded_rows(shares[1], features)),
                      len(next(iter(a.values()))), debiased)


def _alike(a: Mapping[str, Numbers], b: Mapping[str, Numbers], debiased: bool) -> Numbers:
    """CKA of every pair of layers."""
    sizes = {len(K) for K in (*a.values(), *b.values())}
    if not a or not b or len(sizes) != 1:
        raise SelectionError(f"Gram matrices of {', '.join(map(str, sorted(sizes))) or 'no'} examples cannot be compared: the "
                             f"same examples are needed for all.")
    if debiased and max(sizes) < likeness.FEWEST:
        raise SelectionError(f"{max(sizes)} examples have no debiased alignment: it takes {likeness.FEWEST}.")
    flat = [np.stack([K.ravel() for K in mine.values()]) for mine in (a, b)]
    squares = [np.stack([K.diagonal() for K in mine.values()]) for mine in (a, b)]
    return likeness.cka(flat[0] @ flat[1].T, (flat[0] ** 2).sum(1), (flat[1] ** 2).sum(1), squares[0], squares[1], debiased)
