"""Learning curves from spectra: what error a kernel, or a network in its lazy limit, will have with more examples.

    curve = learning_curve(Laplace(), X, y)          # or a Gram matrix and X=None, or a torch model
    print(curve)                                     # predicted and measured errors, and what would help
    curve.verdict                                    # one sentence
    curve.plot().savefig("curve.png")

The spectrum of the kernel on all M examples, and the labels' power along its eigenvectors, give the error of ridge regression on
n < M of them (``theory.eigenlearning``). Subsamples are then trained on, and tested on the rest. Errors are mean squares in
units of the labels' variance: 1 is the error of their mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from richter.core import SelectionError
from richter.core.arrays import ArrayLike, to_tensor
from richter.core.values import progress, table
from richter.learners import NNGP, Kernel, Laplace, RFMRegressor, Tunable
from richter.theory import eigenlearning, overfitting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Numbers = np.ndarray
FEWEST = 40  # examples
SIZES = 12  # default number of sizes
HALVES = 4  # random halves whose spectra say how far predictions depend on the examples
JITTER = 1e-9  # smallest ridge, relative to the mean of the diagonal: what ridge 0 means in floating point
TELLING = 0.1  # relative improvement below which a remedy is not worth a sentence
LEARNED = 1000  # largest number of examples on which features are learned for comparison
AHEAD = (1, 2, 4)  # how many times all examples errors are extrapolated to


@dataclass(frozen=True)
class LearningCurve:
    """Predicted and measured test errors of a kernel by the number of examples, in units of the labels' variance.

    ``predicted``, ``measured`` [trials, sizes]: at the ``ridge`` asked for; ``best``, ``measured_best``: at the best ridge of
    each size, ``best_ridges``. ``error``: relative standard error of predictions, from random halves and from how far the
    measured points lie off. ``ahead``: {examples: (low, middle, high)} beyond the data, at the best ridge. ``remedies``: relative
    improvement of the error by each change (at the largest size; by twice the data: of all). ``examples``: how many
    were given."""

    sizes: tuple[int, ...]
    ridge: float
    predicted: Numbers
    measured: Numbers
    best: Numbers
    measured_best: Numbers
    best_ridges: Numbers
    error: Numbers
    ahead: Mapping[int, tuple[float, float, float]]
    remedies: Mapping[str, float]
    overfitting: float
    examples: int

    @property
    def verdict(self) -> str:
        """Name what lowers the error most, in one sentence."""
        name, gain = max(self.remedies.items(), key=lambda item: item[1])
        others = ", ".join(f"{other} by {_percent(g)}" for other, g in self.remedies.items() if other != name)
        if gain < TELLING:
            return (f"Nothing that was tried lowers the error by {TELLING:.0%} or more ({name} by {_percent(gain)}, {others}): "
                    f"what is left is noise, or not to be seen in these inputs.")
        return f"{name[0].upper()}{name[1:]} would lower the test error by about {gain:.0%}; {others}."

    def __str__(self) -> str:
        rows = [["examples", "predicted", "measured", "predicted, best ridge", "measured, best ridge", "best ridge"]]
        for i, n in enumerate(self.sizes):
            rows.append([f"{n:,}", f"{self.predicted[i]:.3g} ± {self.predicted[i] * self.error[i]:.1g}",
                         f"{self.measured[:, i].mean():.3g}", f"{self.best[i]:.3g} ± {self.best[i] * self.error[i]:.1g}",
                         f"{self.measured_best[:, i].mean():.3g}", f"{self.best_ridges[i]:.2g}"])
        ahead = [f"with {n:,} examples {middle:.3g} is expected ({low:.3g} to {high:.3g})"
                 for n, (low, middle, high) in self.ahead.items()]
        return "\n".join([table(rows, right=range(6)), f"{'; '.join(ahead)}.",
                          f"Fitting every label exactly costs at most a factor {self.overfitting:.3g} with "
                          f"{self.examples // 2:,} examples, whatever the labels.", self.verdict])

    def to_json(self) -> dict[str, Any]:
        return {"sizes": list(self.sizes), "ridge": self.ridge, "predicted": self.predicted.tolist(),
                "measured": self.measured.tolist(), "best": self.best.tolist(), "measured_best": self.measured_best.tolist(),
                "best_ridges": self.best_ridges.tolist(), "relative_error": self.error.tolist(), "remedies": dict(self.remedies),
                "overfitting": self.overfitting, "examples": self.examples, "verdict": self.verdict,
                "ahead": [{"examples": n, "low": a, "error": b, "high": c} for n, (a, b, c) in self.ahead.items()]}

    def plot(self) -> Figure:
        """Draw predicted curves with their band, measured points, and what is expected beyond the data."""
        from richter.report.drawing import COLOURS, caption, label, line, panels, points, styled

        @styled
        def draw() -> Figure:
            figure, (ax,) = panels(1, across=1, width=5.2, height=3.4)
            for colour, name, curve, seen in ((COLOURS[0], f"ridge {self.ridge:.2g}", self.predicted, self.measured),
                                              (COLOURS[1], "best ridge", self.best, self.measured_best)):
                line(ax, self.sizes, curve, colour, f"predicted, {name}")
                ax.fill_between(self.sizes, curve * np.exp(-2 * self.error), curve * np.exp(2 * self.error), color=colour,
                                alpha=0.15, linewidth=0)
                points(ax, self.sizes, seen, colour, f"measured, {name}")
            low, middle, high = np.array(list(self.ahead.values())).T
            line(ax, list(self.ahead), middle, COLOURS[1], "expected beyond", "--")
            ax.fill_between(list(self.ahead), low, high, color=COLOURS[1], alpha=0.1, linewidth=0)
            label(ax, "examples", "test error / variance of labels", log="xy", legend=True)
            caption(figure, self.verdict)
            return figure

        return draw()


def learning_curve(kernel: Kernel | nn.Module | ArrayLike, X: ArrayLike, y: ArrayLike, *, ridge: float = 0.0,
                   sizes: tuple[int, ...] | None = None, trials: int = 5, seed: int = 0) -> LearningCurve:
    """Predict and measure the learning curve of a kernel.

    ``kernel``: a kernel of ``richter.learners``, a Gram matrix [M, M] (then X may be None), or a torch model, whose tangent
    kernel is taken and whose outputs are the start: the lazy limit of its further training. ``y``: targets [M] or [M, c], or
    class ids (whole numbers or words), which become one column for each class. ``ridge`` is added to the Gram matrix.
    """
    Y = _targets(y)
    K, Y, inputs = _gram(kernel, X, Y)
    M = len(K)
    if sizes is None:
        sizes = tuple(int(n) for n in np.unique(np.geomspace(max(8, M // 64), M // 2, SIZES).round()))
    if M < FEWEST or not sizes or not all(1 < n < M for n in sizes) or list(sizes) != sorted(set(sizes)):
        raise SelectionError(f"{M} examples and sizes={sizes}: at least {FEWEST} examples are needed, and increasing sizes "
                             f"between 2 and {M - 1}, so that examples are left to test on.")
    scale = float(K.diagonal().mean())
    floor = JITTER * scale
    draw = np.random.default_rng(seed)
    modes = eigenlearning.modes(K, Y)
    variance = float(np.sum(np.asarray(modes.power)))
    optima = np.array([eigenlearning.optimal_ridge(*modes[:2], n, population=M) for n in sizes])
    best_ridges = np.clip(optima, floor, 1e6 * scale * np.array(sizes))
    ridges = np.full(len(sizes), max(ridge, floor))
    predicted, best = (_predicted(modes, sizes, r, M) / variance for r in (ridges, best_ridges))
    measured, measured_best = _measured(K, Y, sizes, (ridges, best_ridges), trials, draw)
    measured, measured_best = measured / variance, measured_best / variance
    halves = [eigenlearning.modes(K[rows][:, rows], Y[rows]) for rows in
              (torch.from_numpy(draw.permutation(M)[: M // 2]).to(K.device) for _ in range(HALVES))]
    off = np.log(measured_best.mean(0) / best) ** 2
    near = np.array([off[max(0, i - 1): i + 2].mean() for i in range(len(off))])
    error = np.sqrt(_spread(halves, M // 2, sizes, best_ridges) ** 2 + near)
    ahead = _ahead(modes, halves, M, sizes, measured_best.mean(0))
    which = "a larger" if best_ridges[-1] > 1.001 * ridges[-1] else "another"
    remedies = {f"{which} ridge ({best_ridges[-1]:.2g})": 1 - best[-1] / predicted[-1],
                "twice the data": 1 - ahead[2 * M][1] / ahead[M][1]}
    if inputs is not None:
        remedies |= _others(kernel, K, inputs, Y, sizes[-1], float(best_ridges[-1]), float(best[-1]) * variance, draw)
    return LearningCurve(sizes, float(ridges[0]), predicted, measured, best, measured_best, best_ridges, error, ahead, remedies,
                         overfitting.bound(np.asarray(modes.eigenvalues), M // 2), M)


# ------------------------------------------------------------------------------------------------ predicted


def _predicted(modes: eigenlearning.KernelModes, sizes: tuple[int, ...], ridges: Numbers, M: int) -> Numbers:
    """Return the predicted error on examples that were not drawn, for each size."""
    return np.array([eigenlearning.unseen(eigenlearning.krr(*modes[:2], n, float(r)), n, M)
                     for n, r in zip(sizes, ridges, strict=True)])


def _spread(halves: list[eigenlearning.KernelModes], M: int, sizes: tuple[int, ...], ridges: Numbers) -> Numbers:
    """Return the relative standard error of predictions: their spread over random halves, of M examples, over the root of two.
    Sizes above half of these have that of the largest size below."""
    some = tuple(n for n in sizes if n <= M // 2) or (M // 2,)
    logs = [np.log(_predicted(modes, some, np.resize(ridges, len(some)), M)) for modes in halves]
    each = np.std(logs, 0, ddof=1) / math.sqrt(2)
    return np.concatenate([each, np.full(len(sizes), each[-1])])[: len(sizes)]


def _ahead(modes: eigenlearning.KernelModes, halves: list[eigenlearning.KernelModes], M: int, sizes: tuple[int, ...],
           measured: Numbers) -> dict[int, tuple[float, float, float]]:
    """Extrapolate the error at the best ridge to more examples than there are, from the largest measured size on.

    How well this works is tried on the data: spectra of halves extrapolate from the size nearest to a quarter of the largest, to
    the largest. Their error for each doubling widens the interval, by twice as much."""
    last, first = sizes[-1], int(np.argmin(np.abs(np.log(np.array(sizes) * 4 / sizes[-1]))))
    tried = [np.log(np.mean(end) / np.mean(start) * measured[first] / measured[-1])
             for start, end in (_continued(half, [sizes[first], last]) for half in halves)]
    doublings = max(1.0, math.log2(last / sizes[first]))
    each = max(float(np.sqrt(np.mean(np.square(tried)))) / doublings, 0.02)
    start, *ends = _continued(modes, [last, *(times * M for times in AHEAD)])
    out = {}
    for times, pair in zip(AHEAD, ends, strict=True):
        low, high = sorted(measured[-1] * np.array(pair) / np.array(start))
        wide = math.exp(2 * each * math.log2(times * M / last))
        out[times * M] = (float(low / wide), float(math.sqrt(low * high)), float(high * wide))
    return out


def _continued(modes: eigenlearning.KernelModes, numbers: list[int]) -> list[tuple[float, float]]:
    """Return test errors at the best ridge for numbers of examples, by a spectrum that goes on beyond a quarter of its modes: its
    eigenvalues like a power law, the labels' power there as noise (which no one learns), or like a power law too."""
    lam, v2 = (np.asarray(a) for a in modes[:2])
    last = len(lam) // 4
    rank = np.arange(max(2, last // 10), last + 1)
    left = np.cumsum(v2[::-1])[::-1]  # power from each rank on
    alpha, slope = (-float(np.polyfit(np.log(rank), np.log(np.maximum(a[rank - 1], 1e-300)), 1)[0]) for a in (lam, left))
    i = np.unique(np.geomspace(last + 1, 1000 * len(lam), 400).round())
    count = np.diff(np.append(i, 2 * i[-1] - i[-2]))
    eigenvalues = np.r_[lam[:last], lam[last - 1] * (i / last) ** -max(alpha, 1.05)]
    signal, rest = i ** -(1 + max(slope, 0.02)) * count, float(v2[last:].sum())
    out = []
    for n in numbers:
        ends = []
        for noise, tail in ((rest, 0 * signal), (0.0, rest * signal / signal.sum())):
            given = (eigenvalues, np.r_[v2[:last], tail], n)
            weight = np.r_[np.ones(last), count]
            ridge = eigenlearning.optimal_ridge(*given, noise, multiplicity=weight)
            ends.append(eigenlearning.krr(*given, min(ridge, 1e9 * float(lam.sum())), noise, multiplicity=weight).test)
        out.append((ends[0], ends[1]))
    return out


# ------------------------------------------------------------------------------------------------ measured


def _measured(K: Tensor, Y: Tensor, sizes: tuple[int, ...], ridges: tuple[Numbers, Numbers], trials: int,
              draw: np.random.Generator) -> tuple[Numbers, Numbers]:
    """Return mean squared errors [trials, sizes] on the examples that a random subsample leaves, for both ridges of each size."""
    out = np.empty((2, trials, len(sizes)))
    for t in progress(range(trials), title="subsamples of the learning curve", unit="trial"):
        order = torch.from_numpy(draw.permutation(len(K))).to(K.device)
        for j, n in enumerate(sizes):
            rows, rest = order[:n], order[n:]
            part, across = K[rows][:, rows], K[rest][:, rows]
            for k in range(2):
                f = across @ _solved(part, Y[rows], float(ridges[k][j]))
                out[k, t, j] = (f - Y[rest]).square().sum(1).mean().item()
    return out[0], out[1]


def _solved(K: Tensor, y: Tensor, ridge: float) -> Tensor:
    """Return (K + ridge)^-1 y; equal examples make K singular, and get a larger ridge."""
    for more in (1.0, 1e2, 1e4):
        L, info = torch.linalg.cholesky_ex(K + more * ridge * torch.eye(len(K), dtype=K.dtype, device=K.device))
        if not info.item():
            return torch.cholesky_solve(y, L)
    raise SelectionError(f"the Gram matrix of {len(K)} examples has eigenvalues below 0 by more than rounding errors: it is no "
                         f"kernel. A kernel is positive semi-definite.")


# ------------------------------------------------------------------------------------------------ other remedies


def _others(kernel: Any, K: Tensor, X: Tensor, Y: Tensor, n: int, ridge: float, predicted: float, draw: np.random.Generator
            ) -> dict[str, float]:
    """Return the improvement by another kernel, as predicted, and by learned features, as measured, at n examples."""
    flat = X.flatten(1)
    name, other = ("an NNGP kernel", NNGP(depth=2, bias_var=0.1)) if isinstance(kernel, Laplace) else (
        "a Laplace kernel", Laplace().fitted(flat))
    modes = eigenlearning.modes(to_tensor(other(flat)), Y)
    best = max(eigenlearning.optimal_ridge(*modes[:2], n, population=len(X)), JITTER)
    rival = eigenlearning.unseen(eigenlearning.krr(*modes[:2], n, min(best, 1e9)), n, len(X))
    out = {name: 1 - rival / predicted}
    if n <= LEARNED:
        rows, rest = torch.from_numpy(draw.permutation(len(X))).split([n, len(X) - n])
        varying = flat[:, (flat[rows] != flat[rows[0]]).any(0)].numpy()
        learner = RFMRegressor(Laplace(), iterations=3).fit(varying[rows], Y[rows].numpy())
        learned = torch.from_numpy(np.asarray(learner.predict(varying[rest]))).reshape(len(rest), -1)
        frozen = K[rest][:, rows] @ _solved(K[rows][:, rows], Y[rows], ridge)
        errors = [float((f - Y[rest]).square().sum()) for f in (learned, frozen)]
        out["learned features (RFM)"] = 1 - errors[0] / errors[1]
    return out


# ------------------------------------------------------------------------------------------------ arguments


def _targets(y: ArrayLike) -> Float[Tensor, "n c"]:
    """Return targets less their mean; class ids and words become one column for each class."""
    values = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if values.ndim not in (1, 2) or not len(values):
        raise SelectionError(f"y has shape {values.shape}: targets [M] or [M, c], or class ids [M], are needed.")
    if values.dtype.kind in "fc":
        Y = to_tensor(values, "y")
        Y = Y[:, None] if Y.dim() == 1 else Y
    else:
        classes, ids = np.unique(values.astype(str) if values.dtype == object else values, return_inverse=True)
        if len(classes) > max(2, len(values) // 4):
            raise SelectionError(f"y has {len(classes)} classes in {len(values)} examples: too few of each to learn. Give "
                                 f"numbers as floats (y.astype(float)) if they are quantities.")
        Y = torch.eye(len(classes), dtype=torch.float64)[torch.from_numpy(ids.reshape(-1))]
    Y = Y - Y.mean(0)
    if not Y.abs().max() > 1e-12 * values.size:
        raise SelectionError("all labels are equal (one class, or a constant target): there is nothing to be learned, and no "
                             "error to predict.")
    return Y


def _gram(kernel: Any, X: ArrayLike, Y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the Gram matrix, the targets that are left to learn, and the inputs if there are any."""
    if isinstance(kernel, nn.Module):
        from richter.kernels import ntk
        with torch.no_grad():
            f = kernel(X)
        f = f.detach().double().cpu().flatten(1)
        if f.shape != Y.shape:
            raise SelectionError(f"the model has {f.shape[1]} outputs for each example and y has {Y.shape[1]} columns: give a "
                                 f"model with one output for each target or class.")
        K = to_tensor(ntk(kernel, X)) / Y.shape[1]
        return K.cpu(), Y - (f - f.mean(0)), to_tensor(X, "X").cpu()
    if isinstance(kernel, Kernel):
        x = to_tensor(X, "X")
        if len(x) != len(Y):
            raise SelectionError(f"X has {len(x)} rows and y has {len(Y)}: one label for each row is needed.")
        fitted = kernel.fitted(x.flatten(1)) if isinstance(kernel, Tunable) else kernel
        return to_tensor(fitted(x.flatten(1))).cpu(), Y, x.cpu()
    K = to_tensor(kernel, "the Gram matrix").cpu()
    if K.dim() != 2 or K.shape[0] != K.shape[1] or len(K) != len(Y):
        raise SelectionError(f"the kernel is an array of shape {tuple(K.shape)} and y has {len(Y)} rows: a Gram matrix [M, M] "
                             f"of the same M examples is needed, or a kernel of richter.learners, or a torch model.")
    return K, Y, None if X is None else to_tensor(X, "X").cpu()


def _percent(gain: float) -> str:
    return f"{gain:.0%}" if math.isfinite(gain) else "unknown"
