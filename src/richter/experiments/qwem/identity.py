"""Quadratic word embeddings factorise a matrix, and their modes rise when the QR rule says.  [qwem, Thm. 1 and Result 3]"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.report.drawing import COLOURS, band, caption, label, line, panels, points, styled
from richter.theory import word_embeddings as we

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class QwemIdentitySettings:
    """Planted texts of ``topics`` whose sizes fall; embeddings with a dimension for each difference of topics, from normal
    numbers of size ``scale``."""

    size: int = 40
    topics: int = 5
    scales: tuple[float, ...] = (1e-2, 1e-4, 1e-8)
    draws: int = 20
    weight: Literal["solvable", "word2vec"] = "solvable"  # Psi = 1 / (P_ij + P_i P_j), or 1
    target: Literal["tanh", "pmi"] = "tanh"
    rule: Literal["qr", "svd"] = "qr"  # s_k(0) by the QR rule, or singular values of W(0)
    start: Literal["aligned", "random"] = "aligned"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


def work(t: Task[QwemIdentitySettings], run: Writer) -> Mapping[str, ArrayLike]:
    """Spreads of the two losses, distances of targets, and half-rise times of the integrated flow for one scale and seed."""
    s, draw, d = t.settings, np.random.default_rng((t.seed, 47)), t.settings.topics - 1
    P = np.asarray(we.planted(s.size, s.topics, t.seed))
    p = P.sum(1)
    M, mutual = np.asarray(we.target_matrix(P, p)), np.log(P / np.outer(p, p))
    gaps: dict[str, list[float]] = {"solvable": [], "word2vec": []}
    ones = np.ones_like(P)
    for W in draw.standard_normal((s.draws, s.size, d)):
        apart = float(((W @ W.T - M) ** 2).sum() / 4)
        gaps["solvable"].append(we.loss(W, P, p) - apart)
        gaps["word2vec"].append(we.loss(W, P, p, ones, ones) - apart)
    modes = we.leading(M, d)
    lam, vectors = np.asarray(modes.eigenvalues), np.asarray(modes.vectors)
    W0 = t.scale * draw.standard_normal((s.size, d))
    starts = {"qr": np.asarray(we.starts(vectors, W0)), "svd": np.linalg.svd(W0)[1]}
    times = np.linspace(0, 1.2 * float(we.rise_times(lam, starts["qr"]).max()), 3_000)
    squares = np.linalg.svd(np.asarray(we.gradient_flow(M, W0, times)), compute_uv=False) ** 2
    run.progress(0.7)
    seen = [float(np.interp(np.log(lam[k] / 2), np.log(squares[:, k]), times)) for k in range(d)]
    short = np.linspace(0, 1.5 * seen[0], 8)
    aligned = {"aligned": vectors * (t.scale * np.arange(1, d + 1)), "random": W0}
    errors = {}
    for kind, W in aligned.items():
        exact = (vectors.T @ np.asarray(we.gradient_flow(M, W, short))) ** 2
        errors[kind] = np.abs(exact.sum(-1).T - np.asarray(we.trajectory(M, W, short))).max() / lam[0]
    return {**{f"spread_{name}": np.ptp(values) for name, values in gaps.items()},
            "distance_tanh": np.abs(M - 2 * np.tanh(mutual / 2)).max(), "distance_pmi": np.abs(M - mutual).max(),
            "seen": seen, **{f"times_{name}": we.rise_times(lam, start) for name, start in starts.items()},
            **{f"error_{name}": value for name, value in errors.items()}, "eigenvalues": lam,
            "t": times[::10], "squares": squares[::10].T, "grown": we.growth(lam, starts["qr"], times[::10])}


def time_error(r: Results) -> float:
    """Largest relative error of a half-rise time, over modes and scales."""
    return float(np.abs(r[f"times_{r.settings.rule}"] / r["seen"] - 1).max())


@styled
def draw(results: Results) -> Figure:
    figure, (left, right) = panels(2, across=2)
    seed = results.distinct("seed")[0]
    one = results.where(seed=seed, scale=results.distinct("scale")[1])
    t: NDArray[np.float64] = one["t"][0]
    for k in range(results.settings.topics - 1):
        left.plot(t, one["squares"][0, k], color=COLOURS[k], linewidth=1.8, label="integrated flow" if not k else None)
        line(left, t, one["grown"][0, k], label="QR rule" if not k else "", style="--")
    label(left, "time", "squared singular values", f"from embeddings of size {one.distinct('scale')[0]:g}", legend=True)
    scales = results.distinct("scale")
    for colour, (rule, words) in zip(COLOURS, {"qr": "QR rule", "svd": "singular values of W(0)"}.items(), strict=False):
        errors = [np.abs(h[f"times_{rule}"] / h["seen"] - 1).max(1) for h in (results.where(scale=s) for s in scales)]
        band(right, scales, np.stack(errors, 1), colour)
        points(right, scales, np.stack(errors, 1), colour, words)
    label(right, "size of initial embeddings", "largest relative error of a half-rise time", log="xy", legend=True)
    caption(figure, "Each mode is learned along its own sigmoid, at the time that the QR rule predicts; the singular values of "
                    "the initial embeddings predict it badly.")
    return figure


SOURCE = "independent check of one problem with five modes"
EXPERIMENT = Experiment(
    name="qwem_identity", ref=Ref("qwem", "Thm. 1"), title="quadratic word embeddings factorise a known matrix, mode by mode",
    smoke=QwemIdentitySettings(), paper=QwemIdentitySettings(size=120, topics=6), over=("scale", "seed"),
    analysis=("weight", "target", "rule", "start"), work=work, places=("Thm. 1", "Lemma", "Result 3"),
    figures={"qwem_identity": draw}, start={"seeds": (0,), "scales": (1e-2,), "size": 20}, quick=True,
    reduced="planted texts of 40 words", protocol="exact",
    claims=(
        Claim("spread over random W of the loss minus |W W^T - M|^2 / 4", lambda r: float(r["spread_" + r.settings.weight].max()),
              Interval(high=1e-9), Control("without the weights of the solvable setting", {"weight": "word2vec"}), paper="0",
              source=f"{SOURCE}: 5e-12", places=("Thm. 1",),
              says="With Psi = 1 / (P_ij + P_i P_j) the loss is |W W^T - M|^2 / 4 plus a constant."),
        Claim("largest entry of M - 2 tanh(PMI / 2)", lambda r: float(r["distance_" + r.settings.target].max()),
              Interval(high=1e-12), Control("the mutual information itself", {"target": "pmi"}), source=f"{SOURCE}: 2e-16",
              places=("Thm. 1",), own=True),
        Claim("aligned embeddings: largest error of a squared singular value, relative to the largest eigenvalue",
              lambda r: float(r["error_" + r.settings.start].max()), Interval(high=1e-8),
              Control("random embeddings of the same size, to which the sigmoid applies in the limit", {"start": "random"}),
              paper="0", source="bar set with the task", places=("Lemma",),
              says="From embeddings along eigenvectors each singular value follows its sigmoid exactly."),
        Claim("random embeddings: largest relative error of a half-rise time by the QR rule", time_error, Interval(high=0.002),
              Control("singular values of W(0) in place of |R_kk|", {"rule": "svd"}), paper="0 in the limit",
              source=f"{SOURCE}: ratios 0.999 to 1.001", over="seed", places=("Result 3",),
              says="From small random embeddings the trajectory tends to the aligned one."),
    ))
