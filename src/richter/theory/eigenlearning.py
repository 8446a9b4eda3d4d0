"""Test and train error of kernel ridge regression and random-feature regression, from the spectrum of the kernel alone.

[eigenlearning]
K(x, x') = sum_i lambda_i phi_i(x) phi_i(x') with orthonormal phi_i, labels y = sum_i v_i phi_i(x) + noise. The predictor is
f(x) = K(x, X) (K(X, X) + ridge I)^-1 y on n examples: **the ridge is added to the Gram matrix, without a factor n**. With k
random features, K is replaced by the average of k products of features whose mean is K. All errors are mean squares, the
label's noise included.

    risk = krr(eigenvalues, power, n=100, ridge=0.1, noise=0.5)      # power: v_i^2, summed over outputs
    risk.test, risk.train, risk.learnability, risk.overfitting       # L_i is the share of mode i that is learned
    random_features(eigenvalues, power, n=100, k=400, ridge=0.1)
    optimal_ridge(eigenvalues, power, n=100, noise=0.5)
    krr(*modes(K, y), n=100, ridge=0.1)                              # of data: a Gram matrix and labels

One equation is solved, for gamma = kappa k / (k - z), on the branch z(gamma) = sum_i lambda_i / (lambda_i + gamma) < min(n, k):

    ridge = gamma (n - z) (k - z) / k.

It is symmetric in n and k, and monotone in gamma. k = infinity is kernel ridge regression, where gamma = kappa.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from richter.core import Ref, SelectionError
from richter.core.arrays import Array, ArrayLike, like
from richter.theory.arrays import columns, read, whole
from richter.theory.frame import Theory
from richter.theory.powerlaw import grouped

Vector = NDArray[np.float64]
FARTHEST = 1e8  # largest gamma that is tried for the best ridge, in units of Tr K / min(n, k)
POINTS = 160  # values of gamma between which the best ridge is searched


class KernelModes(NamedTuple):
    """Eigenvalues of a kernel's operator, the power v_i^2 of the target along its eigenfunctions, and how many modes each entry
    stands for (None: one each); the power of an entry is that of all its modes together."""

    eigenvalues: ArrayLike
    power: ArrayLike
    multiplicity: ArrayLike | None = None


@dataclass(frozen=True)
class Risk:
    """Errors of a regression in expectation. ``learnability`` [m]: the share of each mode's coefficient that is learned.
    ``overfitting``: the factor by which fitting the noise multiplies the error. ``kappa``: the effective ridge, below which
    eigenvalues are not learned."""

    kappa: float
    learnability: Array
    overfitting: float
    test: float
    train: float

    @property
    def fitting_ratio(self) -> float:
        """Train error over test error."""
        return self.train / self.test if self.test else math.nan


def krr(eigenvalues: ArrayLike, power: ArrayLike, n: float, ridge: float, noise: float = 0.0, *,
        multiplicity: ArrayLike | None = None) -> Risk:
    """Return the errors of kernel ridge regression on n examples.  [eigenlearning, Sec. 2]

    n = sum_i L_i + ridge / kappa with L_i = lambda_i / (lambda_i + kappa), and E_0 = n / (n - sum_i L_i^2);
    test = E_0 (sum_i (1 - L_i)^2 v_i^2 + noise),   train = (ridge / (n kappa))^2 test.

    ``noise``: variance of the labels' noise. At ridge 0 with fewer modes than examples this is least squares.
    """
    return random_features(eigenvalues, power, n, math.inf, ridge, noise, multiplicity=multiplicity)


def random_features(eigenvalues: ArrayLike, power: ArrayLike, n: float, k: float, ridge: float, noise: float = 0.0, *,
                    multiplicity: ArrayLike | None = None) -> Risk:
    """Return the errors of ridge regression on k random features of the kernel.  [eigenlearning, Sec. 3]

    With z = sum_i L_i, q = sum_i L_i^2 and L_i = lambda_i / (lambda_i + gamma):
    test = (sum_i (1 - L_i - (1 - L_i) L_i (k - z) / (k - q)) v_i^2 + noise) / (1 - (q (k - 2z) + z^2) / (n (k - q))),
    train = (1 - z / n)^2 test.
    """
    lam, v2, w = _modes(eigenvalues, power, multiplicity)
    _checked(n, k, ridge, noise)
    gamma = _gamma(lam, w, n, k, ridge)
    return _risk(lam, v2, w, n, k, gamma, noise, eigenvalues)


def optimal_ridge(eigenvalues: ArrayLike, power: ArrayLike, n: float, noise: float = 0.0, k: float = math.inf, *,
                  multiplicity: ArrayLike | None = None, population: int | None = None) -> float:
    """Return the ridge of the smallest test error: 0 where interpolation is best, infinity where it is best to predict zero.

    The error is scanned over gamma, where it has a closed form, and refined around its smallest value. ``population``: of so many
    examples n are drawn (``modes``), and the error is that on the others (``unseen``).
    """
    from scipy.optimize import minimize_scalar
    lam, v2, w = _modes(eigenvalues, power, multiplicity)
    _checked(n, k, 0.0, noise)
    start = _gamma(lam, w, n, k, 0.0)
    trace = float(w @ lam)
    high = math.log(FARTHEST * trace / min(n, k))
    low = math.log(start) if start > 0 else min(math.log(1e-12 * trace / min(n, k)), math.log(lam[lam > 0].min()) - 30)

    def test(log_gamma: float) -> float:
        return error(math.exp(log_gamma))

    def error(gamma: float) -> float:
        risk = _risk(lam, v2, w, n, k, gamma, noise, None)
        return risk.test if population is None else unseen(risk, int(n), population)

    grid = np.linspace(low, high, POINTS)
    errors = np.array([test(g) for g in grid])
    errors[0] = error(start)
    best = int(errors.argmin())
    seen = minimize_scalar(test, bounds=(grid[max(best - 1, 0)], grid[min(best + 1, POINTS - 1)]), method="bounded",
                           options={"xatol": 1e-10})
    if errors[0] <= min(seen.fun, errors[best]) * (1 + 1e-12):
        return 0.0
    if best == POINTS - 1:
        return math.inf
    gamma = math.exp(seen.x if seen.fun <= errors[best] else grid[best])
    z = _sums(lam, w, gamma)[0]
    return gamma * (n - z) * (1 - z / k)


# ------------------------------------------------------------------------------------------------ power laws


def power_law(alpha: float, beta: float, last: int = 10**8) -> KernelModes:
    """Return modes with eigenvalues i^-alpha and power i^-beta for all i from 1 on.

    Sums over ``last`` modes are made of few points (``theory.powerlaw``). One more entry stands for all modes beyond, whose
    eigenvalues are too small to be told apart: so sums have no truncation error where kappa is well above last^-alpha.
    """
    _exponents(alpha, beta)
    whole(last=last)
    i, weight = grouped(int(last))
    lam, v2 = i**-alpha, i**-beta * weight
    lam_beyond, v2_beyond = ((last + 0.5) ** (1 - e) / (e - 1) for e in (alpha, beta))
    end = float(last) ** -alpha
    return KernelModes(np.append(lam, end), np.append(v2, v2_beyond), np.append(weight, lam_beyond / end))


def fitting_ratio(alpha: float, beta: float, noise: float = 0.0) -> float:
    """Return the train error over the test error at the optimal ridge, on power laws with many examples.  [eigenlearning, Thm. 2]

    It is r^2 with r the root in [0, 1] of alpha - beta - (alpha - 1) beta r + alpha (alpha - 1) noise (1 - r)^beta, and 0 if that
    is not positive at r = 0: then interpolation is optimal. ``noise``: variance of the labels' noise over the error of
    ridgeless regression without noise.
    """
    from scipy.optimize import brentq
    _exponents(alpha, beta)
    _variance(noise)

    def slope(r: float) -> float:
        return alpha - beta - (alpha - 1) * beta * r + alpha * (alpha - 1) * noise * (1 - r) ** beta

    return 0.0 if slope(0.0) <= 0 else float(brentq(slope, 0.0, 1.0, xtol=1e-15, rtol=1e-15)) ** 2


def interpolation_is_optimal(alpha: float, beta: float, noise: float = 0.0) -> bool:
    """Return whether ridge 0 is best on power laws: noise <= (beta - alpha) / (alpha (alpha - 1)).  [eigenlearning, Cor. 1]"""
    _exponents(alpha, beta)
    _variance(noise)
    return noise <= (beta - alpha) / (alpha * (alpha - 1))


def risk_at_ratio(ratio: ArrayLike, n: float, alpha: float, beta: float, noise: float = 0.0) -> Array:
    """Return the test error on power laws at the ridge with this fitting ratio, for many examples.  [eigenlearning, App.]

    test = alpha C / (1 + (alpha - 1) r) ((1 - r)^(1 - beta) + alpha noise), r = sqrt(ratio), s = (beta - 1) / alpha and
    C = (1 - s) pi / (alpha sin(pi s)) (n alpha sin(pi / alpha) / pi)^(1 - beta). ``noise`` as in ``fitting_ratio``: relative to
    alpha C, the error of ridgeless regression without noise.
    """
    _exponents(alpha, beta)
    _variance(noise)
    (R,) = read(ratio=(np.atleast_1d(ratio) if not isinstance(ratio, Tensor) else ratio.reshape(-1), "r"))
    if not ((R >= 0) & (R < 1)).all():
        raise SelectionError(f"ratio reaches {R.max().item():g}: train error over test error is from 0 on and below 1.")
    r, s = R.sqrt(), (beta - 1) / alpha
    C = (1 - s) * math.pi / (alpha * math.sin(math.pi * s)) * (n * alpha * math.sin(math.pi / alpha) / math.pi) ** (1 - beta)
    return like(alpha * C / (1 + (alpha - 1) * r) * ((1 - r) ** (1 - beta) + alpha * noise), ratio)


# ------------------------------------------------------------------------------------------------ data


def modes(K: Float[Any, "n n"], y: ArrayLike) -> KernelModes:
    """Return the modes of a Gram matrix on M examples, largest first: eigenvalues / M, and the power of labels y [M] or [M, c].

    The examples then are the whole population. Of n of them drawn without replacement, the others have the mean error
    ``unseen(risk, n, M)``. The smallest eigenvalues say less about new examples, so n should be well below M.
    """
    K_, y_ = read(K=(K, "n n"), y=(columns(y), "n c"))
    largest = max(part.abs().max() for part in K_.split(256))
    if any((a - b).abs().max() > 1e-8 * largest for a, b in zip(K_.split(256), K_.T.split(256), strict=True)):
        raise SelectionError("K is not symmetric: a Gram matrix K(x_i, x_j) of the same examples in rows and columns is needed.")
    if not y_.any():
        raise SelectionError("y is zero: there is nothing to be learned, and every predicted error is that of the noise. Give "
                             "labels that are not all zero (were they centred within one class?).")
    values, vectors = _eigh(K_)
    if values[0] < -1e-6 * values[-1].abs():
        raise SelectionError(f"K has the eigenvalue {values[0].item():.3g}, the largest being {values[-1].item():.3g}: it is no "
                             f"kernel. A kernel is positive semi-definite; distances or correlations that were cut off are not.")
    order = torch.arange(len(K_) - 1, -1, -1, device=K_.device)
    lam = values[order].clamp(min=0) / len(K_)
    v2 = (vectors.T @ y_).square().sum(1)[order] / len(K_)
    return KernelModes(like(lam, K), like(v2, K))


def _eigh(K: Float[Tensor, "n n"]) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, smallest first, and eigenvectors of a symmetric matrix; on a CPU by the method that holds the fewest
    copies (three beside K; torch holds four)."""
    from richter.linalg import eigh
    if K.device.type != "cpu":
        return eigh(K)
    import scipy.linalg
    values, vectors = scipy.linalg.eigh(K.numpy().T, driver="evd", check_finite=False)
    return torch.from_numpy(values), torch.from_numpy(vectors)


def unseen(risk: Risk, n: int, M: int) -> float:
    """Return the mean error on the M - n examples that were not drawn, where n of a population of M were: (M test - n train) /
    (M - n). The theory's test error is over all M, those that were learned among them."""
    if not 0 < n < M:
        raise SelectionError(f"n={n} of a population of {M}: at least one example must be drawn, and one be left.")
    return (M * risk.test - n * risk.train) / (M - n)


@dataclass(frozen=True)
class SpectralExponents:
    """Decay of eigenvalues i^-alpha and of the target's power i^-beta, with standard errors over subsamples; and the sizes, the
    1 / Tr K_n^-1 and the ridgeless errors [trials, sizes] that they were fitted to."""

    alpha: float
    beta: float
    alpha_error: float
    beta_error: float
    sizes: tuple[int, ...]
    inverse_traces: Vector
    errors: Vector


def exponents(K: Float[Any, "n n"], y: ArrayLike, *, sizes: tuple[int, ...] | None = None, trials: int = 5, seed: int = 0,
              jitter: float = 1e-10) -> SpectralExponents:
    """Measure alpha by 1 / Tr K_n^-1 ~ n^-alpha, and beta by the error ~ n^-(beta - 1) of ridgeless regression on n examples, on
    those left over. Fits to the spectrum itself are unreliable.  [eigenlearning, Sec. 5]

    ``sizes``: numbers n of examples (default: six, from 1/32 to 1/2 of them). ``jitter`` is added to the diagonal, relative to
    its mean.
    """
    K_, y_ = read(K=(K, "n n"), y=(columns(y), "n c"))
    M = len(K_)
    sizes = tuple(int(n) for n in np.geomspace(max(4, M // 32), M // 2, 6).round()) if sizes is None else sizes
    whole(trials=trials)
    if len(set(sizes)) < 2 or not all(0 < n < M for n in sizes):
        raise SelectionError(f"sizes={sizes} of {M} examples: at least two different sizes are needed, each below {M}, so that a "
                             f"slope can be fitted and examples are left to test on.")
    draw = np.random.default_rng(seed)
    ridge, traces, errors = jitter * K_.diagonal().mean(), np.empty((trials, len(sizes))), np.empty((trials, len(sizes)))
    for t in range(trials):
        order = torch.from_numpy(draw.permutation(M)).to(K_.device)
        for j, n in enumerate(sizes):
            rows, rest = order[:n], order[n:]
            part = K_[rows][:, rows] + ridge * torch.eye(n, dtype=K_.dtype, device=K_.device)
            L, info = torch.linalg.cholesky_ex(part)
            if info.item():
                raise SelectionError(f"the Gram matrix of {n} examples is not positive definite, so it has no inverse: are there "
                                     f"equal rows among the examples, or fewer features than examples? Give a larger jitter than "
                                     f"{jitter:g}, or smaller sizes.")
            traces[t, j] = 1 / torch.cholesky_inverse(L).trace().item()
            f = K_[rest][:, rows] @ torch.cholesky_solve(y_[rows], L)
            errors[t, j] = (f - y_[rest]).square().sum(1).mean().item()
    x = np.log(np.array(sizes)) - np.log(np.array(sizes)).mean()
    a, b = (-(np.log(v) @ x) / (x @ x) for v in (traces, errors))
    spread = [float(s.std(ddof=1) / math.sqrt(trials)) if trials > 1 else math.nan for s in (a, b)]
    return SpectralExponents(float(a.mean()), float(b.mean()) + 1, spread[0], spread[1], sizes, traces, errors)


# ------------------------------------------------------------------------------------------------ simulate


def errors(eigenvalues: ArrayLike, power: ArrayLike, n: int, k: float, ridge: float, noise: float = 0.0, *,
           shared: float = 1.0) -> tuple[float, float, Array]:
    """Return test error, train error and learnability [m], as ``simulate`` does. ``shared``: the 1 of a ridge that is added to
    the Gram matrix as it is; tests perturb it."""
    risk = random_features(eigenvalues, power, n, k, shared * ridge, noise)
    return risk.test, risk.train, risk.learnability


def simulate(eigenvalues: ArrayLike, power: ArrayLike, n: int, k: float, ridge: float, noise: float = 0.0, *, trials: int = 60,
             seed: int = 0) -> tuple[float, float, Array]:
    """Return the mean test error, train error and learnability over random data sets: eigenfunctions are standard normal
    variables, random features Gaussian combinations of them, and each regression is solved."""
    lam, v2 = (t.cpu().numpy() for t in read(eigenvalues=(eigenvalues, "m"), power=(power, "m")))
    whole(n=n, trials=trials)
    draw, v = np.random.default_rng(seed), np.sqrt(v2)
    test, train, learned = [], [], []
    for _ in range(trials):
        phi = draw.standard_normal((n, len(lam)))
        y = phi @ v + math.sqrt(noise) * draw.standard_normal(n)
        root = np.diag(np.sqrt(lam))
        if math.isfinite(k):
            root = np.sqrt(lam)[:, None] * draw.standard_normal((len(lam), int(k))) / math.sqrt(k)
        psi = phi @ root  # "n k": the features of the examples
        inverse = np.linalg.pinv(psi @ psi.T + ridge * np.eye(n), hermitian=True)
        back = root @ (psi.T @ inverse)  # "m n": from labels to coefficients of the predictor
        fitted = back @ y
        test.append(((v - fitted) ** 2).sum() + noise)
        train.append(((y - phi @ fitted) ** 2).mean())
        learned.append(np.einsum("mn,nm->m", back, phi))
    return float(np.mean(test)), float(np.mean(train)), like(torch.from_numpy(np.mean(learned, 0)), eigenvalues)


# ------------------------------------------------------------------------------------------------ the equation


def _modes(eigenvalues: ArrayLike, power: ArrayLike, multiplicity: ArrayLike | None) -> tuple[Vector, Vector, Vector]:
    """Read eigenvalues, power and multiplicities [m] as numpy arrays."""
    lam, v2 = (t.cpu().numpy() for t in read(eigenvalues=(eigenvalues, "m"), power=(power, "m")))
    return spectrum(lam), _powers(v2), _multiplicities(multiplicity, len(lam))


def spectrum(eigenvalues: ArrayLike) -> Vector:
    """Read eigenvalues of a kernel: none is negative, and one at least is above 0."""
    lam = read(eigenvalues=(eigenvalues, "m"))[0].cpu().numpy()
    if (lam < 0).any():
        raise SelectionError(f"eigenvalues reach {lam.min():.3g}: those of a kernel are not negative. Set rounding errors to 0; "
                             f"a larger one means that the matrix was no kernel.")
    if not lam.any():
        raise SelectionError("all eigenvalues are 0: such a kernel predicts zero, whatever the data.")
    return lam


def _powers(v2: Vector) -> Vector:
    """Return squared coefficients of the target, none of them negative."""
    if (v2 < 0).any():
        raise SelectionError(f"power reaches {v2.min():.3g}: it is the square v_i^2 of each coefficient of the target, never "
                             f"negative. Square the coefficients.")
    return v2


def _multiplicities(multiplicity: ArrayLike | None, m: int) -> Vector:
    """Multiplicities of m eigenvalues; 1 by default."""
    if multiplicity is None:
        return np.ones(m)
    w = read(multiplicity=(multiplicity, "m"))[0].cpu().numpy()
    if len(w) != m or not (w > 0).all():
        raise SelectionError(f"multiplicity has shape {w.shape} and a smallest entry of {w.min():g}: one number above 0 is "
                             f"needed for each of {m} eigenvalues.")
    return w


def _checked(n: float, k: float, ridge: float, noise: float) -> None:
    """Raise an error unless numbers of examples and features, ridge and noise are valid."""
    for name, value in (("n", n), ("k", k)):
        if not value > 0 or math.isnan(value) or (name == "n" and math.isinf(value)):
            raise SelectionError(f"{name}={value!r}: a number of {'examples' if name == 'n' else 'random features'} above 0 is "
                                 f"needed{'' if name == 'n' else ' (math.inf for the kernel itself)'}.")
    if not (math.isfinite(ridge) and ridge >= 0):
        raise SelectionError(f"ridge={ridge!r}: a finite number, 0 or larger, is needed; it is added to the diagonal of the Gram "
                             f"matrix. The theory says nothing about negative ridges.")
    _variance(noise)


def _variance(noise: float) -> None:
    """Raise an error unless the noise is a variance."""
    if not (math.isfinite(noise) and noise >= 0):
        raise SelectionError(f"noise={noise!r} is the variance of the labels' noise: a finite number, 0 or larger, is needed.")


def _exponents(alpha: float, beta: float) -> None:
    """Raise an error unless the power laws have these exponents in their range."""
    if not (math.isfinite(alpha) and alpha > 1) or not 1 < beta < 2 * alpha + 1:
        raise SelectionError(f"alpha={alpha!r} and beta={beta!r}: eigenvalues i^-alpha have a finite sum for alpha above 1, and "
                             f"these laws hold for beta between 1 and 2 alpha + 1.")


def _sums(lam: Vector, w: Vector, gamma: float) -> tuple[float, float]:
    """Return z = sum of L_i and q = sum of L_i^2."""
    L = lam / (lam + gamma) if gamma > 0 else (lam > 0).astype(float)
    return float(w @ L), float(w @ (L * L))


def _gamma(lam: Vector, w: Vector, n: float, k: float, ridge: float) -> float:
    """Solve ridge = gamma (n - z)(k - z) / k on the branch z < min(n, k), in log gamma; 0 for least squares."""
    from scipy.optimize import brentq
    s, rank = min(n, k), float(w[lam > 0].sum())
    if ridge == 0 and rank <= s:
        return 0.0
    trace, least = float(w @ lam), float(lam[lam > 0].min())
    low = math.log(least) + math.log(rank / s - 1) - 1e-9 if rank > s else -math.inf  # z > s below it
    high = math.log(2 * trace / s) + 1e-9
    edge = low
    if rank > s:
        edge = float(brentq(lambda g: _sums(lam, w, math.exp(g))[0] - s, low, high, xtol=1e-15, rtol=1e-15, maxiter=500))
    if ridge == 0:
        return math.exp(edge)
    low, high = max(edge, math.log(ridge / n)), max(high, math.log(4 * ridge / n)) + 1e-9

    def excess(g: float) -> float:
        z = _sums(lam, w, math.exp(g))[0]
        return g + math.log(max(n - z, 1e-300)) + math.log(max(1 - z / k, 1e-300)) - math.log(ridge)

    if excess(low) >= 0:  # the ridge is below rounding errors, or all of it is ridge
        return math.exp(low)
    return math.exp(float(brentq(excess, low, high, xtol=1e-15, rtol=1e-15, maxiter=500)))


def _risk(lam: Vector, v2: Vector, w: Vector, n: float, k: float, gamma: float, noise: float, kind: ArrayLike) -> Risk:
    """Test and train errors from the constant gamma that solves the self-consistent equation."""
    L = lam / (lam + gamma) if gamma > 0 else (lam > 0).astype(float)
    lost = gamma / (lam + gamma) if gamma > 0 else (lam == 0).astype(float)
    z, q = float(w @ L), float(w @ (L * L))
    if math.isinf(k):
        kappa, bias, shrink = gamma, float(v2 @ lost**2), q / n
    elif k - q <= 1e-12 * k:  # least squares on as many features as modes: all is learned but what no feature has
        kappa, bias, shrink = 0.0, float(v2 @ lost), min(k, z) / n
    else:
        kappa = gamma * max(1 - z / k, 0.0)
        bias = float(v2 @ (lost * (1 - L * max(k - z, 0.0) / (k - q))))
        shrink = (q * (k - 2 * z) + z * z) / (n * (k - q))
    left = 1 - shrink
    overfitting = 1 / left if left > 1e-13 else math.inf
    inside = bias + noise
    test = overfitting * inside if inside > 0 else 0.0
    train = max(1 - z / n, 0.0) ** 2 * test if math.isfinite(test) else 0.0
    return Risk(kappa, like(torch.from_numpy(L), kind), overfitting, test, train)


# ------------------------------------------------------------------------------------------------ theories


def _cases(sizes: tuple[tuple[int, float], ...]) -> list[tuple[Any, ...]]:
    """Cases (power laws, sizes, ridges) on which theory and simulation are compared."""
    i = np.arange(1, 401.0)
    return [(i**-1.5, i**-1.3, n, k, ridge, 0.3) for n, k in sizes for ridge in (0.03, 1.0)]


THEORIES = (
    Theory("eigenlearning.krr", ref=Ref("eigenlearning", "Sec. 2"),
           title="errors of kernel ridge regression from the spectrum of the kernel",
           predict=errors, simulate=simulate, cases=lambda: _cases(((60, math.inf), (120, math.inf))), tolerance=0.08,
           perturb={"shared": 2.0}, seeds=(0, 1)),
    Theory("eigenlearning.random_features", ref=Ref("eigenlearning", "Sec. 3"),
           title="errors of ridge regression on random features from the spectrum of their kernel",
           predict=errors, simulate=simulate, cases=lambda: _cases(((80, 40), (60, 200))), tolerance=0.08,
           perturb={"shared": 2.0}, seeds=(0, 1)),
)
