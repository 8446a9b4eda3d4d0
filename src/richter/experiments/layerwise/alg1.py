"""Algorithm 1 of [layerwise]: eigenfunctions and eigenvalues of a feature map from a sample, as corrected and as printed; and the
utilisation that sums up to one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.measures.features import analyse
from richter.report.drawing import COLOURS, caption, label, line, panels, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Matrix = NDArray[np.float64]
Form = Literal["corrected", "printed", "mixed"]
COVARIANCE = np.array([[1.5, 0.5], [0.5, 1.5]])  # of Sec. 1.5.3, with eigenvalues 2 and 1


@dataclass(frozen=True)
class LayerwiseAlg1Settings:
    """``n`` examples of ``p`` features that overlap, ``outputs`` linear in them. ``form``: rho_k = s_k^2/n and e_k = sqrt(n)
    u_k Phi/s_k, or as printed, s_k^2 and u_k Phi/s_k, or one of each. ``utilisation``: that of Eq. 2.5 without the square, or
    with it, as printed."""

    n: int = 300
    p: int = 20
    outputs: int = 4
    many: int = 100_000  # examples of the text's own case
    seeds: tuple[int, ...] = tuple(range(10))
    form: Form = "corrected"
    utilisation: Form = "corrected"


def work(t: Task[LayerwiseAlg1Settings], run: Writer) -> Mapping[str, ArrayLike]:
    s, draw = t.settings, np.random.default_rng((t.seed, 19))
    mixing = draw.standard_normal((s.p, s.p)) / np.arange(1, s.p + 1)

    def features(n: int) -> Matrix:
        """[n, p], of a random layer of rectified units: not centred, and correlated."""
        return np.maximum(draw.standard_normal((n, s.p)) @ mixing.T + 0.3, 0)

    Phi, others = features(s.n), features(s.n)
    f = Phi @ draw.standard_normal((s.p, s.outputs))
    U, values, _ = np.linalg.svd(Phi.T, full_matrices=False)
    printed = values**2, U.T / values[:, None]  # rho, and the rows by which e_k = row . Phi
    corrected = values**2 / s.n, np.sqrt(s.n) * U.T / values[:, None]
    a = analyse(Phi, f, f)
    x = draw.multivariate_normal([0, 0], COVARIANCE, s.many, method="cholesky")
    squares = np.linalg.svd(x.T, full_matrices=False)[1] ** 2
    P = f @ np.linalg.solve(f.T @ f, f.T)
    rows: dict[str, ArrayLike] = {"intensity": np.asarray(a.intensity), "utilisation": np.asarray(a.utilisation)}
    for name, (rho, E), own in (("corrected", corrected, squares / s.many), ("printed", printed, squares)):
        e = Phi @ E.T
        rows |= {
            f"operator_{name}": relative(Phi @ (Phi.T @ e) / s.n, e * rho), f"rho_{name}": rho,
            f"orthonormal_{name}": relative(e.T @ e / s.n, np.eye(s.p)),
            f"rebuilt_{name}": relative((others @ E.T * np.sqrt(rho)) @ U.T, others),
            f"measure_{name}": relative(np.asarray(a.intensity), rho), f"own_{name}": float(np.abs(own / [2, 1] - 1).max())}
    rows["rebuilt_mixed"] = relative((others @ corrected[1].T * np.sqrt(printed[0])) @ U.T, others)
    e = Phi @ corrected[1].T
    inside = np.einsum("nk,nm,mk->k", e, P, e) / s.n  # <e_k|P e_k>
    for name, used in (("corrected", inside / s.outputs), ("printed", inside**2 / s.outputs)):
        rows |= {f"sum_{name}": used.sum(), f"apart_{name}": float(np.abs(used - np.asarray(a.utilisation)).max())}
    return rows


def relative(a: Matrix, b: Matrix) -> float:
    """Relative distance |a - b| / |b|."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def largest(r: Results, name: str) -> float:
    """Largest of the errors of this name in the chosen form."""
    return float(r[f"{name}_{r.settings.form}"].max())


def distance(r: Results) -> float:
    """Largest distance of the summed utilisation from one."""
    return float(np.abs(r[f"sum_{r.settings.utilisation}"] - 1).max())


@styled
def draw(results: Results) -> Figure:
    """Left: intensities by both forms; right: utilisation summed up by both."""
    figure, (left, right) = panels(2, across=2)
    k = np.arange(1, results["rho_corrected"].shape[1] + 1)
    for name, colour, text in (("corrected", COLOURS[0], "s^2/n"), ("printed", COLOURS[1], "as printed, s^2")):
        line(left, k, results[f"rho_{name}"][0], colour, text)
    left.plot(k, results["intensity"][0], "o", color="#222222", markersize=3, label="measured intensity")
    label(left, "feature", "rho", "eigenvalues", log="y", legend=True)
    for i, (name, text) in enumerate((("corrected", "<e|P e>"), ("printed", "as printed, its square"))):
        right.plot(np.full(len(results), i), results[f"sum_{name}"], "o", color=COLOURS[i], label=text)
    line(right, [-0.5, 1.5], [1, 1], label="all of the function")
    right.set_xticks([])
    label(right, "form of Eq. 2.5", "utilisation of all features", "summed utilisation", legend=True)
    caption(figure, "Only s^2/n is the spectrum of the operator, whatever the number of examples, and only without the extra "
                    f"square the features together use all of the function. {len(results)} draws; left: the first of them.")
    return figure


PRINTED = Control("as printed: s_k^2, and e_k = u_k Phi/s_k", {"form": "printed"})
SQUARE = Control("as printed, with the square", {"utilisation": "printed"})
IDENTITY = "an identity, to 1e-8"
EXPERIMENT = Experiment(
    name="layerwise_alg1", ref=Ref("layerwise", "Alg. 1"), title="eigenfunctions of a feature map from a sample",
    smoke=LayerwiseAlg1Settings(), paper=LayerwiseAlg1Settings(), work=work, over=("seed",), analysis=("form", "utilisation"),
    figures={"layerwise_alg1": draw},
    start={"seeds": (0,)}, quick=True,
    protocol="exact",
    claims=(
        Claim("relative error of T e_k = rho_k e_k on the sample, largest over draws", lambda r: largest(r, "operator"),
              Interval(high=1e-8), PRINTED, paper="exact", source=IDENTITY,
              says="Alg. 1 gives the eigenfunctions of the feature map on a sample: T e_k = rho_k e_k, with rho_k = s_k^2.",
              reason="misprint"),
        Claim("relative error of <e_k|e_l> = delta_kl, largest over draws", lambda r: largest(r, "orthonormal"),
              Interval(high=1e-8), PRINTED, paper="exact", source=IDENTITY,
              says="Alg. 1 gives orthonormal eigenfunctions on a sample, with e_k = u_k Phi / s_k.", reason="misprint"),
        Claim("relative error of Phi(x) = sum_k sqrt(rho_k) e_k(x) u_k on other examples", lambda r: largest(r, "rebuilt"),
              Interval(high=1e-8), Control("rho_k of one form, e_k of the other", {"form": "mixed"}), paper="Eq. 1.27",
              source=IDENTITY, says="Eq. 1.27: features are Phi(x) = sum_k sqrt(rho_k) e_k(x) u_k, also of new examples."),
        Claim("relative error of the measured intensities against the algorithm's", lambda r: largest(r, "measure"),
              Interval(high=1e-8), PRINTED, paper="exact", source=IDENTITY,
              says="Alg. 1 gives the intensities rho_k = s_k^2 of a feature map.", reason="misprint"),
        Claim("the text's own case of eigenvalues 2 and 1: largest relative error of rho", lambda r: largest(r, "own"),
              Interval(high=5 * (2 / 100_000) ** 0.5), PRINTED, paper="2 and 1",
              source="five standard deviations of an eigenvalue of 100,000 examples, sqrt(2/n) each",
              says="Alg. 1 finds the intensities 2 and 1 in the text's own two-dimensional example.", reason="misprint"),
        Claim("largest |sum over features of the utilisation - 1|, on the fitting sample, without a bias", distance,
              Interval(high=1e-8), SQUARE, paper="1", source="Eq. 2.5: all features together express the function",
              says="Eq. 2.5: the utilisations of all features add up to 1.", reason="misprint"),
        Claim("largest |utilisation by the projection - as measured|",
              lambda r: float(r[f"apart_{r.settings.utilisation}"].max()), Interval(high=1e-8), SQUARE, paper="equal",
              source=IDENTITY, says="Eq. 2.5 gives the utilisation of a feature as its projection on the learned functions.",
              reason="misprint"),
    ))
