"""Four networks with known closed-form staircases: what is learned at each jump, and when.  [agf]

From small weights of size alpha a network of two layers learns in jumps (`richter.theory.alternating` computes them for any
network).

    diagonal    f(x) = sum_i u_i v_i x_i                  learns coordinates, by the time integral of the residual's pull
    linear      f(x) = A W x                              learns modes of the inputs, by `richter.theory.linear_jumps`
    attention   one layer of linear attention heads       learns principal components of the inputs, largest first
    modular     f = sum_i (u_i.x_a + v_i.x_b)^2 w_i       learns Fourier components of the template, largest first

Losses are half a mean squared error, E|y - f|^2 / 2. Times of the first two are in units of log(1 / alpha). The neurons of the
other two have degree 3: their times scale like 1 / alpha and depend on each neuron's initial weights.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from richter.core import Ref, SelectionError
from richter.core.arrays import Array, ArrayLike, to_tensor
from richter.theory.alternating import Learned as Learned
from richter.theory.alternating import Staircase, alternating_flows, degree_of, separations, warn_of_merging  # noqa: F401
from richter.theory.arrays import (
    Times,
    above_zero,
    centred_template,
    column,
    held,
    in_units,
    like,
    normal,
    ordinary,
    per_mode,
    read,
    spectrum,
    times_from_zero,
    whole,
)
from richter.theory.flows import FlowError, flow
from richter.theory.frame import Theory
from richter.theory.linear_jumps import FINEST as FINEST
from richter.theory.linear_jumps import SMALL, linear, predict_linear, simulate_linear  # noqa: F401

Numbers = NDArray[np.float64]
SCALE = "the scale of initial weights"
HALF = 1 - math.sqrt(0.5)  # share of a component's final value at which its loss has fallen half way

# ------------------------------------------------------------------------------------------------ diagonal


class DiagonalResult(NamedTuple):
    """Result for a diagonal linear network: the staircase, and the coefficients u v on each of its levels [k + 1, d]."""

    staircase: Staircase
    coefficients: Array


def diagonal(X: ArrayLike, y: ArrayLike, *, threshold: float = 1.0) -> DiagonalResult:
    """Staircase of f(x) = sum_i u_i v_i x_i from u = sqrt(2) alpha, v = 0. A coordinate becomes active when the time integral of
    g_i = E[x_i r], with the residual r, reaches log(1 / alpha). It becomes dormant again where its coefficient would change sign.

    [agf, Sec. 3]

    >>> stairs, coefficients = diagonal(x, y)
    >>> stairs.times * math.log(1 / alpha)
    """
    X_, y_ = read(X=(X, "n d"), y=(column(y), "n"))
    above_zero("a threshold", threshold=threshold)
    # rescaled, because signed least squares works with numbers of order one
    (x, x_unit), (z, y_unit) = in_units(X_), in_units(y_)
    parts = (X_.new_tensor(a) for a in _awakenings(x.cpu().numpy(), z.cpu().numpy(), threshold))
    times, levels, path = (a * u for a, u in zip(parts, (1 / x_unit / y_unit, y_unit * y_unit, y_unit / x_unit), strict=True))
    held(times=times, losses=levels, coefficients=path)
    return DiagonalResult(Staircase(like(times, X), like(levels, X)), like(path, X))


def _awakenings(X: Numbers, y: Numbers, threshold: float) -> tuple[Numbers, Numbers, Numbers]:
    """Times and levels of the staircase, and the coefficients on each level."""
    n, d = X.shape
    if not (X.T @ y).any():
        raise SelectionError("y is zero, or no input goes with it: nothing is to be learned, and every coordinate sleeps for "
                             "ever.")
    beta, G, times, levels, path = np.zeros(d), np.zeros(d), list[float](), [_half(y)], [np.zeros(d)]
    active, time = np.zeros(d, dtype=bool), 0.0
    for _ in range(10 * d + 10):
        g = X.T @ (y - X @ beta) / n
        asleep = ~active & (np.abs(g) > 1e-12 * np.abs(X.T @ y / n).max())
        if not asleep.any():
            break
        wait = (threshold * np.sign(g[asleep]) - G[asleep]) / g[asleep]
        G[~active] += wait.min() * g[~active]
        time += wait.min()
        active[np.flatnonzero(asleep)[wait <= wait.min() * (1 + 1e-12)]] = True
        beta = _signed_least_squares(X, y, active, np.sign(G))
        active &= beta != 0
        times.append(time)
        levels.append(_half(y - X @ beta))
        path.append(beta)
    return np.array(times), np.array(levels), np.stack(path)


def _half(r: Numbers) -> float:
    """Mean squared residual over two."""
    return float(r @ r / (2 * len(r)))


def _signed_least_squares(X: Numbers, y: Numbers, active: NDArray[np.bool_], signs: Numbers) -> Numbers:
    """Least squares on the active coordinates, with the given signs of the coefficients."""
    from scipy.optimize import nnls
    beta = np.zeros(X.shape[1])
    beta[active] = signs[active] * nnls(X[:, active] * signs[active], y, maxiter=100 * X.shape[1])[0]
    return beta


def predict_diagonal(X: ArrayLike, y: ArrayLike, log_inverse: float, t: Times, *, threshold: float = 1.0) -> Array:
    """Return the loss at times ``t``, in units of ``log_inverse`` = log(1 / alpha), from the staircase."""
    above_zero(SMALL, log_inverse=log_inverse)
    stairs, path = diagonal(X, y, threshold=threshold)
    x, y_, beta, times, levels = (to_tensor(a).cpu().numpy() for a in (X, column(y), path, *stairs))
    g = np.abs((y_ - beta[:-1] @ x.T) @ x) / len(y_)
    woken = np.where((beta[:-1] == 0) & (beta[1:] != 0), g, 0.0).max(1)
    warn_of_merging(log_inverse * times, levels, separations(log_inverse * times, woken / 2, 2))
    return stairs.loss(times_from_zero(t))


def simulate_diagonal(X: ArrayLike, y: ArrayLike, log_inverse: float, t: Times) -> Array:
    """Return the loss of the gradient flow at times ``t``. The flow is integrated in G = int g dt, so alpha may be arbitrarily
    small: u v = alpha^2 sinh(2 G) exactly."""
    from scipy.integrate import solve_ivp
    above_zero(SMALL, log_inverse=log_inverse)
    given, L = read(X=(X, "n d"), y=(column(y), "n")), float(log_inverse)
    ordinary(X=given[0], y=given[1])
    x_, y_ = (a.cpu().numpy() for a in given)

    def coefficients(G: Numbers) -> Numbers:  # G in units of L
        return (_exp(2 * L * (G - 1)) - _exp(-2 * L * (G + 1))) / 2

    def velocity(_: float, G: Numbers) -> Numbers:
        return x_.T @ (y_ - x_ @ coefficients(G)) / len(y_)

    def jacobian(_: float, G: Numbers) -> Numbers:
        return -x_.T @ x_ / len(y_) * (L * (_exp(2 * L * (G - 1)) + _exp(-2 * L * (G + 1))))

    times = times_from_zero(t).cpu().numpy()
    done = solve_ivp(velocity, (0.0, float(times.max()) or 1e-12), np.zeros(x_.shape[1]), method="Radau", jac=jacobian,
                     t_eval=np.unique(times), rtol=1e-8, atol=1e-10)
    if not done.success:
        raise FlowError(f"the flow cannot be followed to t = {times.max():.4g}: {done.message}")
    residual = y_[:, None] - x_ @ coefficients(done.y)
    losses = (residual**2).sum(0) / (2 * len(y_))
    return like(given[0].new_tensor(losses[np.searchsorted(np.unique(times), times)]), X)


def _exp(a: Numbers) -> Numbers:
    """Exponential of numbers capped at 300."""
    return np.exp(np.minimum(a, 300.0))  # the solver's trial steps go further and are rejected


# ------------------------------------------------------------------------------------------------ linear attention


class Attention(NamedTuple):
    """Result for linear attention on in-context regression: levels, and the learned value of each principal component, largest
    first."""

    levels: Array  # [d + 1]
    values: Array  # [d], the singular values of sum_h v_h k_h q_h^T
    utilities: Array  # [d], largest utility of a head of norm 1

    def waits(self, norms: ArrayLike, lr: float = 1.0) -> Array:
        """Lower bound on the time until a head has learned each component so far that the loss has fallen half way to its level.
        ``norms`` [d]: the largest norm of a dormant head when the wait begins. For the first component that is the start; for a
        later one it is the plateau after the previous jump, because dormant heads keep growing. A single number is a bound for
        all. The norm n of a head of utility U n^3 follows d n / dt = 3 lr U n^2."""
        above_zero("a rate", lr=lr)
        values, utilities, sizes = per_mode(values=self.values, utilities=self.utilities, norms=norms)
        if not (sizes > 0).all():
            raise SelectionError(f"norms reach {sizes.min().item():g}: those of sleeping heads, above 0, are needed; a head of "
                                 f"norm 0 never wakes.")
        halfway = math.sqrt(3) * (HALF * values) ** (1 / 3)  # norm of a head whose v k q has this value
        return like((1 / sizes - 1 / halfway).clamp(min=0) / (3 * lr * utilities), self.levels)


def attention(eigenvalues: ArrayLike, length: int, *, extra: float = 1.0) -> Attention:
    """Levels for heads v (sum_n y_n x_n.k) (q.x_query) that see ``length`` pairs (x, y = w.x), w ~ N(0, 1), x ~ N(0, Sigma).

    Principal components are learned in the order of their ``eigenvalues``.  [agf, Sec. 5]

        l_k = [Tr - sum_{i <= k} lambda_i / (1 + (1 + Tr / lambda_i) / N)] / 2
    """
    whole(length=length)
    above_zero(extra=extra)
    lam = spectrum(eigenvalues).sort(descending=True).values
    trace = lam.sum()
    gained = lam / (1 + (extra + trace / lam) / length)
    levels = torch.cat([trace[None], trace - gained.cumsum(0)]) / 2
    values, utilities = 1 / (trace + (length + 1) * lam), length * lam**2 / (3 * math.sqrt(3))
    return Attention(*(like(a, eigenvalues) for a in (levels, values, utilities)))


def predict_attention(eigenvalues: ArrayLike, length: int, heads: int, alpha: float, *, extra: float = 1.0
                      ) -> tuple[Array, Array]:
    """Return (final loss, learned value of each component) with at least as many heads as components."""
    whole(heads=heads)
    above_zero(SCALE, alpha=alpha)
    out = attention(eigenvalues, length, extra=extra)
    if heads < len(out.values):
        raise SelectionError(f"heads={heads}, and there are {len(out.values)} components: a head holds one, so that the last "
                             f"ones are never learned. Take {len(out.values)} heads or more.")
    return out.levels[-1:], out.values


def simulate_attention(eigenvalues: ArrayLike, length: int, heads: int, alpha: float, seed: int = 0) -> tuple[Array, Array]:
    """Return the final loss and learned values along the gradient flow of the population loss, from heads of norm about
    ``alpha``."""
    _, losses, M = attention_flow(eigenvalues, length, heads, alpha, [0.0, 60.0], seed=seed)
    return losses[-1:], M[-1].diagonal()


def attention_flow(eigenvalues: ArrayLike, length: int, heads: int, alpha: float, t: Times, seed: int = 0
                   ) -> tuple[Array, Array, Array]:
    """Return (times, losses [t], sum_h v k q^T [t, d, d]) along the gradient flow of the population loss from N(0, alpha^2).
    Times are in units of 1 / (alpha N lambda_1^2), in which jump times are of order one."""
    whole(length=length, heads=heads)
    whole(0, seed=seed)
    above_zero(SCALE, alpha=alpha)
    lam, times = spectrum(eigenvalues), times_from_zero(t)
    S, d, N = torch.diag(lam.cpu()), len(lam), length
    second = N * (N + 1) * S @ S + N * S.trace() * S
    v, k, q = (alpha * normal(*shape, seed=seed + i) for i, shape in enumerate(((heads,), (heads, d), (heads, d))))
    unit = 1 / (alpha * N * float(S.max()) ** 2)
    starts = float((v**2 + (k**2).sum(1) + (q**2).sum(1)).sqrt().max())
    learned = math.sqrt(3) / float(S.trace() + (N + 1) * S.max()) ** (1 / 3)
    if starts > learned / 2:
        warnings.warn(f"alpha={alpha:g}: heads start with norms up to {starts:.2g}, and come to {learned:.2g}: none sleeps, and "
                      f"jumps are not separated. Take an alpha of {alpha * learned / starts / 10:.1g} or less.", stacklevel=2)

    def velocity(state: list[torch.Tensor]) -> list[torch.Tensor]:
        v, k, q = state
        M = torch.einsum("h,hi,hj->ij", v, k, q)
        pull = unit * (N * S @ S - second @ M @ S)  # -dL/dM
        return [torch.einsum("ij,hi,hj->h", pull, k, q), v[:, None] * (q @ pull.T), v[:, None] * (k @ pull)]

    states = flow(velocity, [v, k, q], times.tolist(), rtol=1e-8, atol=1e-12)
    M = torch.stack([torch.einsum("h,hi,hj->ij", *state) for state in states])
    losses = torch.stack([(S.trace() - 2 * N * (S @ m @ S).trace() + (m.T @ second @ m @ S).trace()) / 2 for m in M])
    on_times, on_losses, on_M = (like(a.to(lam.device), eigenvalues) for a in (times, losses, M))
    return on_times, on_losses, on_M


# ------------------------------------------------------------------------------------------------ modular addition


class Modular(NamedTuple):
    """Result for quadratic networks on modular addition: frequencies in the order in which they are learned, levels of the mean
    squared error over examples and outputs, and the largest utility of each frequency."""

    frequencies: Array  # [k]
    levels: Array  # [k + 1]
    utilities: Array  # [k]


def modular(template: ArrayLike) -> Modular:
    """Order of frequencies for f(x_a, x_b) = sum_i (u_i.x_a + v_i.x_b)^2 w_i with target x_{a+b}, where x_a is the template [p]
    shifted by a. A frequency k (with two signs and any phase) needs six neurons. The frequency k = p / 2 has one sign, so two
    neurons suffice and its utility is larger by sqrt(2): it may be learned before frequencies with larger coefficients.  [agf,
    Sec. 6]"""
    x = centred_template(template)
    p, size = len(x), torch.fft.rfft(x).abs()[1:]
    signs = torch.full_like(size, 2.0)
    if p % 2 == 0:
        signs[-1] = 1.0
    power, utilities = signs * size**2 / p**2, 2 / (27 * signs).sqrt() * p ** -1.5 * size**3
    order = utilities.argsort(descending=True, stable=True)
    order = order[size[order] > 1e-12 * size.max()]
    levels = torch.cat([power[order].flip(0).cumsum(0).flip(0), power.new_zeros(1)])
    return Modular(like(order + 1, template), like(levels, template), like(utilities[order], template))


def modular_pairs(template: ArrayLike) -> tuple[Array, Array]:
    """Return all inputs (x_a, x_b) [p^2, 2p] and targets x_{a+b} [p^2, p] of a template [p]."""
    (x,) = read(template=(template, "p"))
    p = len(x)
    shifts = torch.stack([x.roll(a) for a in range(p)])
    a, b = (i.reshape(-1) for i in torch.meshgrid(torch.arange(p), torch.arange(p), indexing="ij"))
    return like(torch.cat([shifts[a], shifts[b]], 1), template), like(shifts[(a + b) % p], template)


def predict_modular(template: ArrayLike, *, share: float = 2 / 27) -> tuple[Array, Array]:
    """Return (frequencies in order, largest utility of each). ``share``: 2 / 27 for equal norms of u, v and w."""
    above_zero("a share", share=share)
    out = modular(template)
    return out.frequencies, math.sqrt(share / (2 / 27)) * out.utilities


def simulate_modular(template: ArrayLike, seed: int = 0) -> tuple[Array, Array]:
    """Find the same pair by gradient ascent on the sphere, over all pairs of inputs. Each neuron starts with one frequency and
    keeps it."""
    whole(0, seed=seed)
    given = centred_template(template)
    x, p = given.cpu(), len(given)
    shifts = torch.stack([x.roll(a) for a in range(p)])
    target = shifts[(torch.arange(p)[:, None] + torch.arange(p)) % p]  # [a, b, p]
    sizes = torch.fft.rfft(x).abs()
    frequencies = torch.arange(1, p // 2 + 1)
    frequencies = frequencies[sizes[frequencies] > 1e-9 * sizes.max()]
    waves = 2 * math.pi * frequencies[:, None, None] * torch.arange(p) / p
    theta = torch.cos(waves + 6.3 * normal(len(frequencies), 3, 1, seed=seed))  # u, v, w
    for _ in range(400):
        theta = (theta / theta.flatten(1).norm(dim=1)[:, None, None]).requires_grad_()
        u, v, w = theta.unbind(1)
        inner = (shifts @ u.T)[:, None] + (shifts @ v.T)[None]  # [a, b, k]
        U = torch.einsum("abk,abc,kc->k", inner.square(), target, w) / p**2
        slope = torch.autograd.grad(U.sum(), theta)[0]
        theta = theta.detach() + slope / slope.flatten(1).norm(dim=1).clamp(min=1e-6 * float(slope.norm()))[:, None, None]
    order = U.argsort(descending=True)
    return like(frequencies[order].to(given.device), template), like(U.detach()[order].to(given.device), template)


# ------------------------------------------------------------------------------------------------ theories


def _diagonal_cases() -> list[tuple[Any, ...]]:
    """Random inputs, and two inputs so similar that a coordinate becomes active and dormant again; times between jumps."""
    X = np.asarray(normal(40, 6, seed=3))
    alike = np.linalg.cholesky([[11.2145, 3.7097], [3.7097, 1.7855]]).T * math.sqrt(2)
    return [(X, X @ np.array([2.0, -1.5, 1.0, 0.5, -0.25, 0.1]), 128.0, [0.3, 3.0, 7.0, 20.0]),
            (alike, alike @ np.array([-0.2, 2.0]), 128.0, [0.1, 0.4, 2.0, 5.0])]


def _linear_cases() -> list[tuple[Any, ...]]:
    """White inputs; inputs whose moments commute, also where a strong mode explains little; and inputs whose moments do not."""
    strengths, t = np.diag([3.0, 2.0, 1.0, 0.5]), [0.2, 0.42, 0.75, 1.5, 3.0]
    return [(np.eye(4), strengths, 8, 32.0, t), (np.diag([2.0, 1.0, 1.0, 0.5]), strengths, 8, 32.0, t),
            (np.diag([10.0, 0.1]), np.diag([3.0, 1.0]), 8, 32.0, [0.2, 0.6, 2.0]),
            (np.array([[2.0, 0.7], [0.7, 1.0]]), np.diag([3.0, 1.0]), 8, 32.0, [0.2, 0.6, 3.0])]


def _attention_cases() -> list[tuple[Any, ...]]:
    """Cases (singular values and sizes) on which theory and simulation of attention are compared."""
    return [(np.array([0.9, 0.7, 0.6]), 16, 4, 0.1), (np.array([1.0, 0.7]), 8, 4, 0.1)]


def _modular_cases() -> list[tuple[Any, ...]]:
    """Cases (target functions) on which theory and simulation of modular addition are compared."""
    angles = 2 * np.pi * np.arange(12) / 12
    return [(3 * np.cos(angles + 0.4) + 2 * np.cos(3 * angles) + np.cos(5 * angles - 1),),
            (np.cos(2 * angles) + 2 * np.cos(4 * angles),), (2.2 * np.cos(angles + 0.3) + np.cos(6 * angles),)]


THEORIES = (
    Theory("agf.diagonal", ref=Ref("agf", "Sec. 3"), title="the staircase of a diagonal linear network from small weights",
           predict=predict_diagonal, simulate=simulate_diagonal, cases=_diagonal_cases, tolerance=1e-3,
           perturb={"threshold": 1.3}),
    Theory("agf.linear", ref=Ref("agf", "Sec. 4"), title="the staircase of a linear network of two layers from small weights",
           predict=predict_linear, simulate=simulate_linear, cases=_linear_cases, tolerance=1e-3, perturb={"threshold": 1.3},
           seeds=(0, 1, 2)),
    Theory("agf.attention", ref=Ref("agf", "Sec. 5"), title="what linear attention learns of in-context regression",
           predict=predict_attention, simulate=simulate_attention, cases=_attention_cases, tolerance=1e-4, perturb={"extra": 2.0},
           seeds=(0, 1)),
    Theory("agf.modular", ref=Ref("agf", "Sec. 6"), title="which frequencies quadratic networks learn first of modular addition",
           predict=predict_modular, simulate=simulate_modular, cases=_modular_cases, tolerance=1e-3, perturb={"share": 1 / 27},
           seeds=(0, 1)),
)
