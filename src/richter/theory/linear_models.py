"""Linear models in their diagonalised features: intensity, quality and utilisation, how fast each is learned, and which of them
learn the signal and which the noise.  [layerwise, Ch. 1]

f(x) = sum_k w_k Phi_k(x) = sum_k theta_k sqrt(rho_k) e_k(x), with orthonormal e_k. rho_k is the intensity of a feature, the share
of the target along e_k its quality, that of the learned function its utilisation.

    features = diagonalise(Phi)                      # Phi [n, p] on a sample
    features.intensity, features.shares(target)      # rho_k, and Q_k of a function on the sample
    learned(rho, coefficients, t)                    # <e_k|f> under gradient flow on endless data  [Eq. 1.26]
    learnability(rho, n=100)                         # L_k and kappa of n examples  [Eq. 1.35]
    model = SineModel(spiked(d=5, p=2000, tail=1 / 1995))
    fit = model.fit(x, y)                            # coefficients <e_k|f> of the least norm interpolation, or at a time t
    model.error(fit, target)                         # exact, by Parseval
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import Ref, SelectionError
from richter.core.arrays import Array, ArrayLike, like, to_tensor
from richter.theory.arrays import above_zero, normal, read, times_from_zero, whole
from richter.theory.eigenlearning import krr
from richter.theory.flows import flow
from richter.theory.frame import Theory


@dataclass(frozen=True)
class DiagonalFeatures:
    """Features of a sample, made orthogonal.  [layerwise, Alg. 1, corrected: rho_k = s_k^2 / n, e_k = sqrt(n) u_k^T Phi / s_k]

    ``intensity`` [k]: rho_k, largest first. ``directions`` [p, k]: u_k. ``values`` [n, k]: e_k on the sample."""

    intensity: Array
    directions: Array
    values: Array

    def __call__(self, features: Float[Any, "m p"]) -> Float[Any, "m k"]:
        """Return e_k at other inputs, from their features."""
        phi, U = read(features=(features, "m p"), directions=(self.directions, "p k"))
        return like(phi @ U / to_tensor(self.intensity).sqrt().to(phi.device), features)

    def shares(self, function: ArrayLike) -> Array:
        """Return <e_k|f>^2 / |f|^2 [k] of a function's values [n] on the sample: the quality of each feature if it is the target,
        its utilisation if it is the output. Cumulative sums count from the most intense feature.  [Eqs. 1.30-1.32]"""
        e, f = read(values=(self.values, "n k"), function=(function, "n"))
        if not f.any():
            raise SelectionError("the function is zero on the sample: it has no share along any feature.")
        return like((e.T @ f).square() / (e.square().sum(0) * f.square().sum()), function)


def diagonalise(features: Float[Any, "n p"]) -> DiagonalFeatures:
    """Return the orthogonal features of a sample [n, p], without those of no intensity."""
    (phi,) = read(features=(features, "n p"))
    e, s, U = torch.linalg.svd(phi, full_matrices=False)
    kept = s > max(phi.shape) * torch.finfo(s.dtype).eps * s[0]
    if not kept.any():
        raise SelectionError("the features are zero on the whole sample: there is nothing to diagonalise.")
    n = len(phi)
    return DiagonalFeatures(*(like(a, features) for a in (s[kept].square() / n, U[kept].T, e[:, kept] * math.sqrt(n))))


def learned(intensity: ArrayLike, coefficients: ArrayLike, t: Any, *, speed: float = 1.0) -> Array:
    """Return <e_k|f> [k, t] under gradient flow from f = 0 on endless data, (1 - exp(-rho_k t)) <e_k|f*>.  [layerwise, Eq. 1.26]

    ``t``: the learning rate times time. ``speed``: the 1 of the exponent; tests perturb it."""
    rho, c = read(intensity=(intensity, "k"), coefficients=(coefficients, "k"))
    return like(-torch.expm1(-speed * rho[:, None] * times_from_zero(t).to(rho.device)) * c[:, None], intensity)


def learnability(intensity: ArrayLike, n: int) -> tuple[Array, float]:
    """Return L_k = rho_k / (rho_k + kappa) [k] and kappa, with sum_k L_k = n.  [layerwise, Eq. 1.35]"""
    whole(n=n)
    (rho,) = read(intensity=(intensity, "k"))
    if n >= int((rho > 0).sum()):
        raise SelectionError(f"n={n} examples and {int((rho > 0).sum())} features of an intensity above 0: with as many "
                             f"examples as features all coefficients are determined, and nothing is preferred. Take "
                             f"fewer examples.")
    risk = krr(intensity, torch.zeros_like(rho) if isinstance(intensity, Tensor) else np.zeros(len(rho)), n, 0.0)
    return risk.learnability, risk.kappa


def spiked(d: int, p: int, tail: float) -> np.ndarray:
    """Return intensities [p]: 1 for the first d features and ``tail`` for the others.  [layerwise, Eq. 1.36]

    The text's tail of n / (p - d) is not small: for d = 5, n = 100 and p = 2000 the first features have a learnability of 0.51,
    not of about 1. That needs a tail well below n / (p - d), such as 1 / (p - d)."""
    whole(d=d, p=p)
    above_zero(tail=tail)
    if d >= p:
        raise SelectionError(f"d={d} of p={p} features are preferred: at least one must be left over.")
    return np.r_[np.ones(d), np.full(p - d, float(tail))]


def noise_time(intensity: ArrayLike, d: int, n: int) -> float:
    """Return the time (learning rate times time) at which gradient flow on n examples fits what the first d features leave: n
    over the sum of the other intensities: their Gram matrix is that sum times the identity, if they are many.

    The text has (p - d) / n, the time of a single mode on endless data for a tail of n / (p - d); on n examples that is 1."""
    (rho,) = read(intensity=(intensity, "k"))
    whole(n=n, d=d)
    return n / float(rho[d:].sum())


# ------------------------------------------------------------------------------------------------ sines


@dataclass(frozen=True)
class SineModel:
    """f(x) = sum_k w_k sqrt(rho_k) sqrt(2) sin(2 pi k x) for x in [0, 1], trained by gradient flow from w = 0 on mean squared
    error over 2.  [layerwise, Figs. 1.2-1.5]

    A function is given by its coefficients <e_k|f> [p]."""

    intensity: ArrayLike

    @cached_property
    def _root(self) -> Float[Tensor, " p"]:
        """Square roots of the intensities."""
        (rho,) = read(intensity=(self.intensity, "p"))
        if (rho < 0).any() or not rho.any():
            raise SelectionError(f"intensity reaches {rho.min().item():g}: intensities are 0 or larger, and one is above 0.")
        return rho.sqrt()

    def __call__(self, coefficients: ArrayLike, x: ArrayLike) -> Array:
        """Return the values [n] at x of the function with these coefficients."""
        c, x_ = read(coefficients=(coefficients, "p"), x=(x, "n"))
        return like(self._sines(x_) @ c, coefficients)

    def fit(self, x: ArrayLike, y: ArrayLike, t: float = math.inf) -> Array:
        """Return the coefficients [p] of what is learned of labels y [n] at x [n] until the time t: for t = inf the interpolation
        of least norm of the weights, if there are fewer examples than features."""
        x_, y_ = read(x=(x, "n"), y=(y, "n"))
        psi = self._sines(x_) * self._root
        U, s, V = torch.linalg.svd(psi, full_matrices=False)
        kept = s > max(psi.shape) * torch.finfo(s.dtype).eps * s[0]
        U, s, V = U[:, kept], s[kept], V[kept]
        done = torch.ones_like(s) if math.isinf(t) else -torch.expm1(-s.square() / len(x_) * t)
        return like(self._root * (V.T @ (done / s * (U.T @ y_))), y)

    def error(self, coefficients: ArrayLike, target: ArrayLike) -> float:
        """Return the exact mean squared difference of two functions over [0, 1], by Parseval."""
        c, v = read(coefficients=(coefficients, "p"), target=(target, "p"))
        return float((c - v).square().sum())

    def _sines(self, x: Float[Tensor, " n"]) -> Float[Tensor, "n p"]:
        """Orthonormal sines at these points."""
        k = torch.arange(1, len(self._root) + 1, dtype=torch.float64, device=x.device)
        return math.sqrt(2) * torch.sin(2 * math.pi * k * x[:, None])


# ------------------------------------------------------------------------------------------------ simulate


def predict_flow(covariance: ArrayLike, target: ArrayLike, t: Any, *, speed: float = 1.0) -> Array:
    """Return the weights [p, t] of a linear model f = w.Phi with E[Phi Phi^T] = covariance and the target w*.Phi, by Eq. 1.26:
    each diagonalised feature is learned at the rate of its intensity."""
    S, w = read(covariance=(covariance, "p p"), target=(target, "p"))
    rho, U = torch.linalg.eigh(S)
    root = rho.sqrt()
    return like(U @ (to_tensor(learned(rho, root * (U.T @ w), t, speed=speed)) / root[:, None]), covariance)


def simulate_flow(covariance: ArrayLike, target: ArrayLike, t: Any) -> Array:
    """Return the weights [p, t] by integrating w' = -E[(f - f*) Phi] from 0, without eigenvectors."""
    S, w = read(covariance=(covariance, "p p"), target=(target, "p"))
    T = times_from_zero(t)
    return like(torch.stack(flow(lambda v: -S @ (v - w), torch.zeros_like(w), T.tolist()), 1), covariance)


def predict_learnability(intensity: ArrayLike, n: int, *, examples: float = 1.0) -> Array:
    """Return ``learnability``. ``examples``: the 1 in front of n; tests perturb it."""
    return krr(intensity, 0 * np.asarray(intensity), examples * n, 0.0).learnability


def simulate_learnability(intensity: ArrayLike, n: int, *, draws: int = 400, seed: int = 0) -> Array:
    """Return the mean share of each coefficient that interpolations of least norm learn, over Gaussian eigenfunctions."""
    rho = read(intensity=(intensity, "k"))[0].numpy()
    draw, total = np.random.default_rng(seed), np.zeros(len(rho))
    for _ in range(draws):
        e = draw.standard_normal((n, len(rho)))
        total += np.einsum("k,nk,nk->k", rho, e, np.linalg.solve((e * rho) @ e.T, e))
    return like(torch.from_numpy(total / draws), intensity)


def _covariances() -> list[tuple[Any, ...]]:
    """Cases (covariances and targets) on which theory and simulation are compared."""
    out = []
    for p in (2, 5):
        A = normal(p, p)
        out.append((A @ A.T / p + 0.1 * torch.eye(p, dtype=torch.float64), normal(p, seed=1), [0.0, 0.3, 2.0, 20.0]))
    return out


THEORIES = (
    Theory("linear_models.flow", ref=Ref("layerwise", "Eq. 1.26"),
           title="a linear model learns each diagonalised feature at the rate of its intensity",
           predict=predict_flow, simulate=simulate_flow, cases=_covariances, tolerance=1e-7, perturb={"speed": 1.001}),
    Theory("linear_models.learnability", ref=Ref("layerwise", "Eq. 1.35"),
           title="the share of each coefficient that an interpolation of least norm learns",
           predict=predict_learnability, simulate=simulate_learnability,
           cases=lambda: [(spiked(5, 200, 1 / 195), 40), (spiked(5, 200, 40 / 195), 40), (np.arange(1, 81.0) ** -1.5, 30)],
           tolerance=0.06, perturb={"examples": 1.2}, seeds=(0, 1)),
)
