"""Figures 3 and 7 and Equations 10 to 14 of [rapid]: a two-layer linear student of a linear teacher, its weights, its kernel and
its top eigenvector during training; what its final kernel is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from richter import kernels
from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.experiments.rivals import milestones
from richter.kernels import dynamics
from richter.report.drawing import COLOURS, band, caption, label, line, panels, points, styled
from richter.theory import linear_kernels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class RapidFig3Settings:
    """W [N,N] and V [N] start at N(0, sigma^2); r = V^T W x / N; the teacher has |s| = 1, inputs are N(0, 1)."""

    N: int = 30
    P: int = 90
    sigmas: tuple[float, ...] = (1.0, 0.3, 0.1, 0.03)
    steps: int = 20000
    decayed: int = 60000  # steps with weight decay, from sigma = 1
    decay: float = 2e-2  # on |W|^2 + |V|^2, beside the sum of squared errors
    seeds: tuple[int, ...] = tuple(range(10))
    looked_at: Literal["end", "start"] = "end"
    start: Literal["small", "large"] = "small"  # of the network whose spectra and Eq. 14 are looked at: sigma = .1 or 1
    formula: Literal["own", "printed", "partial"] = "own"  # an equation as printed; or without one of its terms


@dataclass
class Student:
    """Gradient descent on the mean of (V^T W x / N - s^T x)^2 / 2.  [Eq. (10)]"""

    X: Matrix
    s: Matrix
    W: Matrix
    V: Matrix

    def __post_init__(self) -> None:
        self.S = self.X.T @ self.X / len(self.X)
        curvature = np.linalg.eigvalsh(self.S)[-1] * max(self.V @ self.V + np.linalg.norm(self.W, 2) ** 2, 2 * len(self.s))
        self.rate = 0.5 * len(self.s) ** 2 / curvature

    @property
    def learned(self) -> Matrix:
        """Learned vector of the linear student."""
        return np.asarray(self.V @ self.W / len(self.s))

    @property
    def y(self) -> Matrix:
        """Labels of the teacher."""
        return self.X @ self.s

    def step(self, decay: float = 0.0) -> None:
        """Take one step of gradient descent with weight decay."""
        e = self.S @ (self.learned - self.s) / len(self.s)
        keep = 1 - self.rate * decay / len(self.X)
        self.W, self.V = keep * self.W - self.rate * np.outer(self.V, e), keep * self.V - self.rate * self.W @ e

    @property
    def kernel(self) -> Matrix:
        """Tangent kernel by Eq. 12, corrected."""
        return self._gram(self.W.T @ self.W)

    @property
    def printed(self) -> Matrix:
        """Tangent kernel by Eq. 12 as printed, with W W^T."""
        return self._gram(self.W @ self.W.T)

    def _gram(self, inner: Matrix) -> Matrix:
        """Tangent kernel with this matrix in place of W^T W."""
        return np.asarray((self.X @ inner @ self.X.T + self.V @ self.V * self.X @ self.X.T) / len(self.s) ** 2)


def relative(a: Matrix, b: Matrix) -> float:
    """Relative distance |a - b| / |b|."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def top_cosine(K: Matrix, y: Matrix) -> float:
    """Cosine |u_1 . y| / |y| of the first eigenvector with the labels."""
    return float(abs(np.linalg.eigh(K)[1][:, -1] @ y) / np.linalg.norm(y))


def work(t: Task[RapidFig3Settings], run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    rows: dict[str, list[Any]] = {}
    for k, sigma in enumerate(s.sigmas):
        for name, value in trained(s, sigma, t.seed).items():
            rows.setdefault(name, []).append(value)
        run.progress(0.7 * (k + 1) / len(s.sigmas))
    return {**{name: np.array(values) for name, values in rows.items()}, **with_decay(s, t.seed)}


def begin(s: RapidFig3Settings, sigma: float, seed: int) -> Student:
    draw = np.random.default_rng((seed, 3))
    X, teacher = draw.standard_normal((s.P, s.N)), draw.standard_normal(s.N)
    W, V = draw.standard_normal((s.N, s.N)), draw.standard_normal(s.N)
    return Student(X, teacher / np.linalg.norm(teacher), sigma * W, sigma * V)


def trained(s: RapidFig3Settings, sigma: float, seed: int) -> dict[str, Any]:
    """Curves of Fig. 3, both spectra of Fig. 7, and the errors of Eqs. 10 to 14 at the start and at the end."""
    student, when = begin(s, sigma, seed), sorted(milestones(s.steps, 30))
    K0, X, y = student.kernel, student.X, student.y
    curves, first = [], {f"{name}_start": value for name, value in errors(student, K0).items()}
    for step in range(s.steps + 1):
        if step in when:
            w = student.learned
            curves.append([abs(w @ student.s) / np.linalg.norm(w), kernels.alignment(student.kernel, y),
                           top_cosine(student.kernel, y)])
        student.step()
    K, size = student.kernel, float(student.V @ student.V)
    approximate = np.asarray(linear_kernels.final_kernel(y, X, size, s.N))
    rich = linear_kernels.final_kernel(y, X, linear_kernels.rich_size(student.s, s.N), s.N)
    exact, near = dynamics.spectrum(K, y), dynamics.spectrum(approximate, y)
    return {"when": when, "cosine": [c[0] for c in curves], "A": [c[1] for c in curves], "top": [c[2] for c in curves],
            "A_rich": kernels.alignment(rich, y), "size": size,
            "values": np.stack([exact.eigenvalues, near.eigenvalues]), "power": np.stack([exact.power, near.power]) / (y @ y),
            **first, **{f"{name}_end": value for name, value in errors(student, K0).items()}}


def errors(student: Student, K0: Matrix) -> dict[str, float]:
    """Relative errors of Eqs. 10 to 14, as corrected, as printed, and without a term."""
    X, y, V, N = student.X, student.y, student.V, len(student.s)
    size, K = float(V @ V), student.kernel
    model = nn.Sequential(nn.Linear(N, N, bias=False), nn.Linear(N, 1, bias=False)).double()
    with torch.no_grad():
        for p, value in zip(model.parameters(), (student.W, V[None]), strict=True):
            p.copy_(torch.from_numpy(value))
    layers = {k: np.asarray(v) / N**2 for k, v in kernels.ntk(model, torch.from_numpy(X), per_layer=True).items()}
    whole = layers["0"] + layers["1"]
    parts = linear_kernels.decompose(student.W, V, X)
    task, bulk = np.outer(y, y) / size, np.asarray(parts.bulk)
    alpha = linear_kernels.bulk_coefficient(K0, X, N)
    return {"eq10": relative(student.learned, student.s), "eq11": relative(whole, K), "eq11_partial": relative(layers["1"], K),
            "eq12": relative(K, whole), "eq12_printed": relative(student.printed, whole),
            "eq13": relative(task + np.asarray(parts.rest) + bulk, whole), "eq13_partial": relative(task + bulk, whole),
            "eq14": relative(task + bulk, whole), "eq14_alpha": relative(task + size / alpha * K0, whole),
            "eq14_printed": relative(task + size / alpha**2 * K0, whole), "alpha": alpha,
            "gamma": dynamics.effective_gamma(K0, K, y), "gamma_own": alpha / size**2, "gamma_printed": alpha**2 / size**2}


def with_decay(s: RapidFig3Settings, seed: int) -> dict[str, ArrayLike]:
    """Training from sigma = 1 with weight decay: |W_p| / |W|, and the error of r r^T / |V|^2 + |V|^2 Sigma, before and after."""
    student = begin(s, 1.0, seed)
    looks = []
    for steps in (0, s.decayed):
        for _ in range(steps):
            student.step(s.decay)
        parts = linear_kernels.decompose(student.W, student.V, student.X)
        across = student.W - np.outer(student.V, student.V @ student.W) / (student.V @ student.V)
        looks.append([np.linalg.norm(across) / np.linalg.norm(student.W),
                      relative(np.asarray(parts.task) + np.asarray(parts.bulk), student.kernel)])
    return {"decayed": np.array(looks)}


# ------------------------------------------------------------------------------------------------ claims


def at_start_or_end(r: Results, name: str, k: int) -> float:
    """Number of one start, at the end of training or, for the control, before it."""
    return float(r[name][0, k, -1 if r.settings.looked_at == "end" else 0])


def rise(r: Results, name: str) -> float:
    """Rise of a number during training, from a start with sigma = .1."""
    return at_start_or_end(r, name, 2) - float(r[name][0, 2, 0])


def smallest_gain(r: Results) -> float:
    """Smallest gain of the final alignment from one sigma to the next smaller."""
    return float(np.diff([at_start_or_end(r, "A", k) for k in range(len(r.settings.sigmas))]).min())


def error(r: Results, name: str) -> float:
    """Largest error over starts of an equation, or of its rival."""
    which = name if r.settings.formula == "own" else f"{name}_{r.settings.formula}"
    return float(r[f"{which}_{r.settings.looked_at}"][0].max())


def own_start(r: Results) -> int:
    """Number of the start whose sigma the settings choose, .1 or 1."""
    return 2 if r.settings.start == "small" else 0


def eq14(r: Results, k: int | None = None) -> float:
    """The error of Eq. 14 of one start; as printed with alpha_K^-2."""
    name = "eq14" if r.settings.formula == "own" else "eq14_printed"
    return float(r[f"{name}_{r.settings.looked_at}"][0, own_start(r) if k is None else k])


def eq14_ratio(r: Results) -> float:
    """The largest ratio of its errors from one sigma to the next smaller."""
    rows = np.array([eq14(r, k) for k in range(len(r.settings.sigmas))])
    return float((rows[1:] / rows[:-1]).max())


def spectra_error(r: Results) -> float:
    """Largest |difference of eigenvalues| / lambda_1."""
    exact, near = r["values"][0, own_start(r)]
    return float(np.abs(exact - near).max() / exact[0])


def power_error(r: Results) -> float:
    """Largest |difference of the label power up to a rank|."""
    exact, near = r["power"][0, own_start(r)]
    return float(np.abs(np.cumsum(exact) - np.cumsum(near)).max())


# ------------------------------------------------------------------------------------------------ drawing


@styled
def draw(results: Results) -> Figure:
    figure, (A, B, C) = panels(3, across=3)
    when = results["when"][0, 0]
    for k, sigma in enumerate(results.settings.sigmas):
        for ax, name in ((A, "cosine"), (B, "A"), (C, "top")):
            band(ax, when, results[name][:, k], COLOURS[k], f"sigma = {sigma:g}" if ax is A else "")
    rich = float(np.median(results["A_rich"]))
    line(B, [0, when[-1]], [rich, rich], label="Eq. 14 with |V|^2 = N |s|", style="--")
    label(A, "step", "cosine of V^T W and s", "A: weights", steps=True, legend=True)
    label(B, "step", "A(K, y)", "B: alignment of the kernel", steps=True, legend=True)
    label(C, "step", "|u_1 . y| / |y|", "C: top eigenvector", steps=True)
    caption(figure, "A linear student turns its weights to the teacher, and its kernel and top eigenvector to the labels, the "
                    f"further the smaller it starts. {len(results)} draws of data and weights, N = {results.settings.N}.")
    return figure


@styled
def draw_spectra(results: Results) -> Figure:
    """Figure of the eigenspectra and the cumulative power."""
    figure, (A, B) = panels(2, across=2)
    ranks = np.arange(1, results.settings.N + 1)
    for k, sigma in ((0, 1.0), (2, 0.1)):
        values, power = results["values"][:, k], np.cumsum(results["power"][:, k, :, ::-1], -1)[..., ::-1]
        for ax, both in ((A, values), (B, power)):
            points(ax, ranks, both[:, 0, :len(ranks)], COLOURS[k], f"Eq. 12, sigma = {sigma:g}")
            band(ax, ranks, both[:, 1, :len(ranks)], COLOURS[k], "Eq. 14")
    label(A, "rank k", "eigenvalue", "A: eigenspectra", log="xy", legend=True)
    label(B, "rank k", "label power from k on", "B: task spectra", log="xy", legend=True)
    caption(figure, "From a small start the final kernel (points) has the spectra of y y^T / |V|^2 + |V|^2 Sigma (lines); from a "
                    "large one it has a rest that the formula leaves out.")
    return figure


START = Control("before training", {"looked_at": "start"})
PRINTED, PARTIAL = Control("as printed", {"formula": "printed"}), Control("one term left out", {"formula": "partial"})
LARGE = Control("a start with sigma = 1", {"start": "large"})
CHECK = "independent check at N = 30, P = 90"
SEED: dict[str, Any] = {"over": "seed"}
EXPERIMENT = Experiment(
    name="rapid_fig3", ref=Ref("rapid", "Fig. 3"), title="kernel alignment in two-layer linear networks",
    smoke=RapidFig3Settings(seeds=(0, 1, 2, 3, 4)), paper=RapidFig3Settings(), work=work, over=("seed",),
    analysis=("looked_at", "start", "formula"),
    figures={"rapid_fig3": draw, "rapid_fig7": draw_spectra}, start={"seeds": (0,), "steps": 10, "decayed": 10},
    places=("Fig. 3", "Fig. 7", "Eq. 10", "Eq. 11", "Eq. 12", "Eq. 13", "Eq. 14"),
    reduced="5 draws instead of 10",
    protocol="exact",
    claims=(
        Claim("A: cosine of the student's and the teacher's weights at the end, sigma = 1",
              lambda r: at_start_or_end(r, "cosine", 0),
              Interval(low=0.99), START, paper="1", source="the paper's panel", places=("Fig. 3",), **SEED,
              says="The weights of a linear student align with the teacher: cosine 1."),
        Claim("B: rise of the kernel's alignment in training, sigma = .1", lambda r: rise(r, "A"), Interval(low=0.015), START,
              paper="the kernel becomes more aligned", source="the definitions' bar for kernels that move",
              places=("Fig. 3",), **SEED, says="The tangent kernel of a linear network becomes more aligned with the task."),
        Claim("B: smallest gain of the final alignment from one sigma to the next smaller", smallest_gain, Interval(low=1e-6),
              START, paper="smaller weights, stronger feature learning", source=CHECK, places=("Fig. 3",), **SEED,
              says="Smaller initial weights give stronger feature learning."),
        Claim("B: error of the alignment of Eq. 14 with |V|^2 = N |s|, over its rise in training, sigma = .03",
              lambda r: float(abs((r["A_rich"][0, 3] if r.settings.looked_at == "end" else r["A"][0, 3, 0]) - r["A"][0, 3, -1])
                              / abs(r["A"][0, 3, -1] - r["A"][0, 3, 0])),
              Interval(high=0.05), Control("the initial kernel's alignment", {"looked_at": "start"}),
              source="derivation: nearly balanced weights", places=("Fig. 3",), **SEED, own=True),
        Claim("C: rise of |u_1 . y| / |y| in training, sigma = .1", lambda r: rise(r, "top"), Interval(low=0.2), START,
              paper="the top eigenfunction becomes more aligned", source="the paper's panel", places=("Fig. 3",), **SEED,
              says="The top eigenfunction of the kernel becomes more aligned with the target."),
        Claim("A: largest error of an eigenvalue of Eq. 14, over the top one, sigma = .1", spectra_error, Interval(high=0.05),
              LARGE, paper="good consistency", source=CHECK, places=("Fig. 7",), **SEED,
              says="Eq. 14 gives the eigenvalues of the final kernel with good consistency."),
        Claim("B: largest error of the label power up to a rank, sigma = .1", power_error, Interval(high=0.05), LARGE,
              paper="good consistency", source=CHECK, places=("Fig. 7",), **SEED,
              says="Eq. 14 gives the task spectrum of the final kernel with good consistency."),
        Claim("largest |V^T W / N - s| / |s| at the end, over starts", lambda r: error(r, "eq10"), Interval(high=1e-8), START,
              paper="the global minimum", source="an identity at convergence", places=("Eq. 10",), **SEED,
              says="Eq. 10: at the global minimum V' W / N is the teacher."),
        Claim("largest relative error of the measured kernel, both layers together, against W^T W and |V|^2",
              lambda r: error(r, "eq11"), Interval(high=1e-8), PARTIAL, paper="exact", source="an identity",
              places=("Eq. 11",), **SEED, says="Eq. 11 is the tangent kernel of a two-layer linear network."),
        Claim("largest relative error of Eq. 12 with W^T W against the measured kernel", lambda r: error(r, "eq12"),
              Interval(high=1e-8), PRINTED, paper="W W^T", source="an identity", places=("Eq. 12",), **SEED,
              says="Eq. 12 is the tangent kernel with W W' (corrected: W' W).", reason="misprint"),
        Claim("largest relative error of Eq. 13 against the measured kernel at the end", lambda r: error(r, "eq13"),
              Interval(high=1e-10), (PARTIAL, START), paper="exact", source="an identity", places=("Eq. 13",), **SEED,
              says="Eq. 13 is the tangent kernel at the end."),
        Claim("relative error of Eq. 14, sigma = .1", eq14, Interval(high=0.05), (PRINTED, START, LARGE), paper="approximate",
              source=CHECK, places=("Eq. 14",), **SEED,
              says="Eq. 14 approximates the final kernel from small weights (its last coefficient is corrected).",
              reason="misprint"),
        Claim("largest ratio of the errors of Eq. 14, from one sigma to the next smaller", eq14_ratio, Interval(high=0.95),
              PRINTED, paper="", source=CHECK, places=("Eq. 14",), **SEED, own=True),
        Claim("alpha_K^-1 |V|^2 K_0 for the bulk: its error over that of the printed alpha_K^-2, sigma = .03",
              lambda r: float(r["eq14_alpha_end" if r.settings.formula == "own" else "eq14_printed_end"][0, 3]
                              / r["eq14_printed_end"][0, 3]),
              Interval(high=0.5), PRINTED, paper="alpha_K^-2", source="half of the printed form's error",
              places=("Eq. 14",), **SEED,
              says="Eq. 14: the initial kernel enters with alpha_K^-2 (corrected: alpha_K^-1 |V|^2).", reason="misprint"),
        Claim("log2 of the effective gamma of training over alpha_K |V|^-4, sigma = .03",
              lambda r: math.log2(r["gamma_end"][0, 3] / r[f"gamma_{r.settings.formula}_end"][0, 3]), Interval(-1, 1),
              PRINTED, paper="alpha_K^2 |V|^-4", source="within a factor 2: K_0 is alpha_K Sigma up to a third at N = 30",
              places=("Eq. 14",), **SEED, says="Eq. 14: the effective gamma is alpha_K^2 |V|^-4 (corrected: alpha_K |V|^-4).",
              reason="misprint"),
        Claim("with weight decay: |W_p| / |W| at the end",
              lambda r: float(r["decayed"][0, -1 if r.settings.looked_at == "end" else 0, 0]), Interval(high=0.01), START,
              paper="W_p vanishes under weight decay", source="the paper's sentence, a hundredth",
              places=("Eq. 14",), **SEED, says="With weight decay the part of the weights that is not the teacher vanishes."),
    ))
