"""Propositions 2.5.1 to 2.5.3 of [layerwise]: features of minimum projection are collapsed, with the printed forms as rivals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.linalg import haar
from richter.measures import collapse, features
from richter.report.drawing import COLOURS, caption, label, line, panels, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Matrix = NDArray[np.float64]
Kind = Literal["minimum", "more", "unequal", "random"]
KINDS: tuple[Kind, ...] = ("minimum", "more", "unequal", "random")


@dataclass(frozen=True)
class LayerwiseProp2_5_1Settings:
    """``each`` examples of each class. ``kind`` chooses the features that claims are about: those of minimum projection; with
    one more, weak feature within classes; with another intensity for each class; those of a random layer. ``form`` is that of
    Eqs 2.18 and 2.19. ``bias``: whether the last layer has one."""

    classes: tuple[int, ...] = (3, 5, 10)
    each: int = 12
    spare: int = 5  # features more than classes
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    kind: Kind = "minimum"
    form: Literal["corrected", "printed"] = "corrected"
    bias: bool = True


def features_of_kind(kind: Kind, y: NDArray[np.int64], C: int, p: int, a: tuple[float, float],
                     draw: np.random.Generator) -> Matrix:
    """Features [n, p] whose operator (1/n) Phi Phi^T is a1 |1><1| + a2 P, with P onto the indicators of classes; or those of
    a rival."""
    n, own = len(y), np.eye(C)[y]  # own: the indicators, of norm 1/sqrt(C)
    if kind == "random":
        return np.maximum(draw.standard_normal((n, 2 * p)) @ draw.standard_normal((2 * p, p)), 0) / p
    within = draw.standard_normal(n)
    K = a[0] + a[1] * C * (own * (np.linspace(1, 2, C) if kind == "unequal" else 1)) @ own.T
    K = K + 0.05 * np.outer(within, within) * (kind == "more")
    values, vectors = np.linalg.eigh(K)
    k = min(p, C + (kind == "more"))
    return vectors[:, -k:] * np.sqrt(values[-k:]) @ haar(p, draw)[:k]


def work(t: Task[LayerwiseProp2_5_1Settings], run: Writer) -> Mapping[str, ArrayLike]:
    s, C, draw = t.settings, t.classes, np.random.default_rng((t.seed, t.classes, 20))
    y = draw.permutation(np.arange(C * s.each) % C)
    a = tuple(draw.uniform(0.5, 2, 2))
    rows: dict[str, Any] = {}
    for kind in KINDS:
        Phi = features_of_kind(kind, y, C, C + s.spare, (a[0], a[1]), np.random.default_rng((t.seed, 21)))
        rows |= {f"{name}_{kind}": value for name, value in of_features(Phi, y, C, a[1]).items()}
    return rows


def of_features(Phi: Matrix, y: NDArray[np.int64], C: int, a2: float) -> dict[str, float]:
    """Errors of the propositions, relative to the size of what they speak of."""
    n, f = len(y), np.eye(C)[y]
    mu = np.stack([Phi[y == c].mean(0) for c in range(C)])
    m = mu - mu.mean(0)
    T = Phi @ Phi.T / n  # the operator: inner products are means over examples
    inner = (C * f).T @ T @ (C * f - 1) / n
    ones = np.ones(n) @ T @ (C * f - 1) / n
    frame = a2 * (C * np.eye(C) - 1)
    apart = Phi - mu[y]
    text = np.trace(apart.T @ apart @ m.T @ m) / (np.sum(Phi**2) * np.sum(m**2))  # Eq. 2.10, without a unit
    W, bias = min_norm(Phi, f, True)
    U, _ = min_norm(Phi, f, False)
    c, free = collapse.analyse(Phi, y, W, bias), collapse.analyse(Phi, y, U)
    return {"indicators_corrected": relative(inner, frame), "indicators_printed": relative(inner, frame / C),
            "constant": float(np.abs(ones).max() / np.abs(frame).max()),
            "means_corrected": relative(C**2 * f.T @ T @ f / n, mu @ mu.T), "means_printed": relative(f.T @ T @ f / n, mu @ mu.T),
            "simplex": relative(m @ m.T, frame), "text": float(text), "nc1": c.nc1, "nc2": max(c.nc2_angle, c.nc2_norm),
            "nc3_bias": c.nc3, "nc4_bias": c.nc4, "nc3_free": free.nc3, "nc4_free": free.nc4,
            "kappa": features.analyse(Phi, y, f).kappa_cka}


def min_norm(Phi: Matrix, f: Matrix, bias: bool) -> tuple[Matrix, Matrix]:
    """The last layer of least norm that fits the indicators; a bias has no penalty."""
    mean, target = (Phi.mean(0), f.mean(0)) if bias else (np.zeros(Phi.shape[1]), np.zeros(f.shape[1]))
    W = (np.linalg.pinv(Phi - mean, rcond=1e-10) @ (f - target)).T
    return W, target - W @ mean


def relative(a: Matrix, b: Matrix) -> float:
    """Relative distance |a - b| / |b|."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


# ------------------------------------------------------------------------------------------------ claims


def largest(r: Results, *names: str) -> float:
    """Largest error of these names over draws and numbers of classes, for the chosen features."""
    return float(max(np.abs(r[f"{name}_{r.settings.kind}"]).max() for name in names))


MORE = Control("one more feature, weak and within classes", {"kind": "more"})
UNEQUAL = Control("another intensity for each class", {"kind": "unequal"})
RANDOM = Control("features of a random layer", {"kind": "random"})
PRINTED = Control("as printed", {"form": "printed"})
FREE = Control("no bias", {"bias": False})
IDENTITY, TIGHT = "an identity, to 1e-8", Interval(high=1e-8)
ONE, TWO, THREE = ("Prop. 2.5.1",), ("Prop. 2.5.2",), ("Prop. 2.5.3",)
CLAIMS = (
    Claim("Eq. 2.10, the trace over the sizes of its matrices, largest over draws", lambda r: largest(r, "text"), TIGHT,
          (MORE, RANDOM), paper="0", source=IDENTITY, places=ONE,
          says="Prop. 2.5.1: features of minimum projection have no spread within classes: the trace of Eq. 2.10 is 0."),
    Claim("nc1, features within classes beside those between them", lambda r: largest(r, "nc1"), Interval(high=1e-12),
          (MORE, RANDOM), paper="0", source="features of minimum projection are constant on classes", places=ONE,
          says="Prop. 2.5.1: features of minimum projection satisfy NC1 exactly: 0."),
    Claim("error of (mu_i - mu_g).(mu_j - mu_g) = a2 (C delta_ij - 1)", lambda r: largest(r, "simplex"), TIGHT,
          (UNEQUAL, RANDOM), paper="Eq. 2.11", source=IDENTITY, places=TWO,
          says="Eq. 2.11: centred class means of minimum projection form a simplex."),
    Claim("nc2, deviations of angles and lengths from the simplex", lambda r: largest(r, "nc2"), Interval(high=1e-12),
          (UNEQUAL, RANDOM), paper="0", source="features of minimum projection have a simplex of means", places=TWO,
          says="Prop. 2.5.2: features of minimum projection satisfy NC2 exactly: 0."),
    Claim("error of mu_i.mu_j = C^2 <f_i|T f_j>", lambda r: largest(r, f"means_{r.settings.form}"), TIGHT, PRINTED,
          paper="Eq. 2.18, without C^2", source=IDENTITY, places=TWO,
          says="Eq. 2.18: class means have inner products <f_i|T f_j> (printed without the factor C^2).", reason="misprint"),
    Claim("nc3 and nc4 of the last layer of least norm", lambda r: largest(r, *(
              f"{name}_{'bias' if r.settings.bias else 'free'}" for name in ("nc3", "nc4"))), TIGHT, FREE,
          paper="follow from NC1 and NC2", source="independent check: with a bias that has no penalty", places=TWO,
          says="Prop. 2.5.2: NC3 and NC4 follow from NC1 and NC2."),
    Claim("error of <C f_i|T(C f_j - 1)> = a2 (C delta_ij - 1)", lambda r: largest(r, f"indicators_{r.settings.form}"), TIGHT,
          (PRINTED, UNEQUAL, RANDOM), paper="Eq. 2.19: a2 (delta_ij - 1/C)", source=f"{IDENTITY}; Eq. D.12", places=THREE,
          says="Eq. 2.19: <C f_i|T (C f_j - 1)> = a2 (delta_ij - 1/C) (corrected: a2 (C delta_ij - 1)).", reason="misprint"),
    Claim("|<1|T(C f_j - 1)>|, relative to a2", lambda r: largest(r, "constant"), TIGHT, (UNEQUAL, RANDOM), paper="0",
          source=IDENTITY, places=THREE, says="Prop. 2.5.3: the constant is orthogonal to T (C f_j - 1): 0."),
    Claim("kappa of features of minimum projection", lambda r: largest(r, "kappa"), TIGHT, (UNEQUAL, RANDOM), paper="0",
          source="Definitions 1 and 2", places=THREE, says="Prop. 2.5.3: features of minimum projection have kappa = 0."),
)


@styled
def draw(results: Results) -> Figure:
    """Draw the measured collapse of each kind of features, by the number of classes."""
    figure, (left, right) = panels(2, across=2)
    words = {"minimum": "minimum projection", "more": "one feature more", "unequal": "unequal", "random": "random layer"}
    classes = results.distinct("classes")
    for k, (kind, text) in enumerate(words.items()):
        for ax, name in ((left, "nc1"), (right, "nc2")):
            values = [np.median(results.where(classes=c)[f"{name}_{kind}"]) for c in classes]
            line(ax, classes, np.maximum(values, 1e-17), COLOURS[k], text, "-" if kind == "minimum" else "--")
    label(left, "classes", "nc1", "Prop. 2.5.1: within classes", log="y", legend=True)
    label(right, "classes", "nc2, angles or lengths", "Prop. 2.5.2: between classes", log="y")
    caption(figure, "Only features of minimum projection are collapsed in both ways (what is left is rounding): one weak feature "
                    "more varies within classes, unequal intensities make a simplex that is not regular.")
    return figure


EXPERIMENT = Experiment(
    name="layerwise_prop2_5_1", ref=Ref("layerwise", "Prop. 2.5.1"), title="minimum projection implies neural collapse",
    smoke=LayerwiseProp2_5_1Settings(), paper=LayerwiseProp2_5_1Settings(), work=work, over=("classes", "seed"),
    analysis=("kind", "form", "bias"), start={"classes": (3,), "seeds": (0,)}, quick=True,
    places=("Prop. 2.5.1", "Prop. 2.5.2", "Prop. 2.5.3"), figures={"layerwise_prop2_5_1": draw},
    protocol="exact",
    claims=CLAIMS)
