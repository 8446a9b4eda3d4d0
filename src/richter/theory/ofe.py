"""Optimal feature evolution: features change at every moment so that the loss falls fastest.  [rapid, Sec. 4, App. A.1]

The residual D = f - y [n] and features Psi [p, n], K = Psi^T Psi, follow
    D' = -lr K D,    Psi' = gamma lr Psi D D^T.
C = K + gamma D D^T is conserved, which solves the flow. With eigenvalues c and eigenvectors v of C, and d = v^T D(0),
    D(t) = e^(-lr C t) D(0) / sqrt(N(t)),   N(t) = 1 - gamma sum_k d_k^2 (1 - e^(-2 lr c_k t)) / c_k,
    K(t) = C - gamma D(t) D(t)^T.
The paper gives C and the limits of the flow; the solution at all times is derived here. No kernel is inverted, so K(0) may be
singular.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import Ref, SelectionError
from richter.core.arrays import Array, ArrayLike
from richter.kernels.dynamics import decompose
from richter.kernels.dynamics import effective_gamma as effective_gamma  # also exported as a part of this theory
from richter.theory.arrays import Times, evolution, in_units, like, normal, times_from_zero
from richter.theory.flows import flow
from richter.theory.frame import Theory
from richter.theory.gofe import GeneralisedFeatureEvolution as GeneralisedFeatureEvolution
from richter.theory.rank_one import eigensystem

# ------------------------------------------------------------------------------------------------ predict


@dataclass(frozen=True)
class OptimalFeatureEvolution:
    """Evolution of a kernel ``K0`` [n, n] with labels ``y`` [n] and initial outputs ``f0`` [n] (zero), at feature learning rate
    ``gamma``; with gamma = 0 the kernel is frozen.

    Residuals, losses and alignments at any number of times cost two eigendecompositions in total. Only ``kernel`` and ``predict``
    form kernels. ``doubling`` is the 2 of e^(-2 lr C t); tests perturb it.

    >>> evolution = OptimalFeatureEvolution(K0, y, gamma=0.5)
    >>> evolution.alignment([0.0, 1.0, 10.0]), evolution.final_alignment
    """

    K0: ArrayLike = field(repr=False)
    y: ArrayLike = field(repr=False)
    gamma: float
    lr: float = 1.0
    f0: ArrayLike | None = field(default=None, repr=False)
    doubling: float = field(default=2.0, kw_only=True)

    def __post_init__(self) -> None:
        self._modes  # noqa: B018  raises an error if the kernel or the labels are invalid

    def predict(self, t: Times) -> tuple[Array, Array]:
        """Residual [t, n] and kernel [t, n, n] at these times."""
        return self.residual(t), self.kernel(t)

    def residual(self, t: Times) -> Array:
        """Residual D(t) = f - y at these times, [t, n]."""
        return like(self._modes.length * (self._coefficients(t) @ self._modes.v.T), self.K0)

    def kernel(self, t: Times) -> Array:
        """Kernel K(t) at these times, [t, n, n]."""
        m, E = self._modes, self._lost(t) @ self._modes.v.T
        ED = E[:, :, None] * m.D
        return like(m.unit * (m.K0 + m.g * (ED + ED.mT - E[:, :, None] * E[:, None, :])), self.K0)

    def loss(self, t: Times) -> Array:
        """Loss |D(t)|^2 at these times, [t]."""
        return like(self._modes.length**2 * self._coefficients(t).square().sum(1), self.K0)

    def alignment(self, t: Times) -> Array:
        """Return A(K(t), y) [t] = y^T K y / (|K| |y|^2). It is not always monotonic: it may exceed its final value and return."""
        return like(self._alignment(self._lost(t)), self.K0)

    @cached_property
    def conserved(self) -> Array:
        """Return C = K(0) + gamma D(0) D(0)^T [n, n], the limit of K(t) if the loss goes to zero.  [Eq. (6)]"""
        m = self._modes
        return like(m.unit * (m.K0 + m.g * torch.outer(m.D, m.D)), self.K0)

    @cached_property
    def final_residual(self) -> Array:
        """Limit of D [n]. It is zero unless K(0) is singular and D(0) has a component in its null space. The rank of K never
        increases, so one direction then remains: the slowest of C, with |D|^2 = c / gamma."""
        return like(self._modes.length * (self._modes.v @ self._modes.last()), self.K0)

    @cached_property
    def final_alignment(self) -> float:
        """Return A(C, y), the limit of the alignment if the loss goes to zero.  [Eq. (7)]"""
        return self._alignment((self._modes.d - self._modes.last())[None]).item()

    @cached_property
    def threshold(self) -> float:
        """Return gamma* = (lambda_1 - D^T K0 D / |D|^2) / |D|^2, D = D(0). Near this gamma the top eigenvector of C turns to D(0)
        (the labels, if f0 = 0)."""
        m = self._modes
        return (m.first[-1] - m.on_k0 @ m.first).item() * m.unit / m.length / m.length

    @cached_property
    def top_overlap(self) -> float:
        """Return (u_1 . y)^2 / |y|^2 for the top eigenvector of C.  [Fig. 2C]"""
        return (self._modes.v[:, -1] @ self._modes.y).square().item()

    # -------------------------------------------------------------------------------------------- phases and approximations

    def early_loss(self, t: Times) -> Array:
        """Return |e^(-lr K0 t) D(0)|^2 [t], the loss while the kernel has not changed."""
        decay = torch.exp(-2 * self._times(t)[:, None] * self._modes.first)
        return like(self._modes.length**2 * (decay @ self._modes.on_k0), self.K0)

    @cached_property
    def alignment_speed(self) -> float:
        """Return dA/dt at t = 0, from K' = gamma lr (D D^T K + K D D^T)."""
        m = self._modes
        K = m.K0 / m.K0.abs().max()  # K' is proportional to K, and A is scale-invariant
        KD = K @ m.D
        moved = 2 * (m.y @ m.D) * (m.y @ KD)  # y^T K' y
        grown = 2 * (KD @ KD)  # <K, K'>
        size, top = K.norm(), m.y @ K @ m.y
        return self.lr * m.unit * m.g * (moved / size - top * grown / size**3).item()

    def late_loss(self, t: Times) -> Array:
        """Return sum_k d_k^2 e^(-2 lr c_k t) / N(infinity) [t], the loss when the kernel has converged to C. The residual must
        lie in the range of K0."""
        if not self._modes.rest:
            raise SelectionError("K0 is singular, and the residual at the start has a part in its null space: the loss does not "
                                 "go to zero, and there is no late phase under a frozen kernel. final_residual says what stays; "
                                 "take more features than examples, or add a ridge to K0.")
        decay = torch.exp(-2 * self._times(t)[:, None] * self._modes.c)
        return like(self._modes.length**2 * (decay @ self._modes.d.square() / self._modes.rest), self.K0)

    @cached_property
    def turning_time(self) -> float:
        """Time at which the residual along the top direction of C falls below that of all others. Before it, the loss falls
        exponentially, as (u_1 . D)^2 e^(-2 lr c_1 t); after it, at the speed of the spectrum's tail. 0 if it is below from the
        start."""
        power, c, lr = self._modes.d.square(), self._modes.c, self.lr * self._modes.unit

        def ahead(t: float) -> float:
            others = torch.where(power > 0, power * torch.exp(2 * lr * t * (c[-1] - c)), 0.0)[:-1]  # 0, not 0 e^inf
            return (power[-1] - others.sum()).item()

        low, high = 0.0, 1.0 / (lr * c[-1].item())
        if len(c) == 1 or ahead(low) <= 0:
            return math.inf if len(c) == 1 else 0.0
        for _ in range(200):
            if ahead(high) <= 0:
                break
            low, high = high, 2 * high
        else:
            return math.inf
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if ahead(middle) > 0 else (low, middle)
        return high

    def diagonal_alignment(self, t: Times) -> Array:
        """Return A(t) [t] if K(t) were diagonal in the eigenvectors of C, with diagonal entries A_k that are logistic functions
        of time. This approximation is inaccurate at the start and exact at the end.  [Eqs. (32), (35), corrected]"""
        c, v, gap = self._modes.c, self._modes.v, self._modes.g * self._modes.d.square()  # c - A(0)
        start = (v * (self._modes.K0 @ v)).sum(0).clamp(min=0)
        decay = torch.exp(-2 * self._times(t)[:, None] * c)
        A = torch.where(start > 0, c * (start / (start + gap * decay).clamp(min=torch.finfo(c.dtype).tiny)), 0.0)
        A = A / A.amax(1, keepdim=True)
        return like((A @ (v.T @ self._modes.y).square()) / A.norm(dim=1), self.K0)

    def simulate(self, t: Times) -> tuple[Array, Array]:
        """Return (residual [t, n], K [t, n, n]) by integrating the flow of D and Psi."""
        return simulate(self.K0, self.y, self.gamma, t, self.lr, self.f0)

    # -------------------------------------------------------------------------------------------- inside

    @cached_property
    def _modes(self) -> _Modes:
        """Modes of the initial kernel with the parameters of the evolution."""
        return _Modes.make(*evolution(self.K0, self.y, self.gamma, self.lr, self.f0), self.gamma)

    def _times(self, t: Times) -> Float[Tensor, " t"]:
        """Return lr t, in the unit of time that corresponds to the unit of kernels."""
        return (times_from_zero(t) * (self.lr * self._modes.unit)).to(self._modes.c.device)

    def _coefficients(self, t: Times) -> Float[Tensor, "t m"]:
        """Residual in the modes at these times."""
        return self._modes.at(self._times(t), self.doubling)

    def _lost(self, t: Times) -> Float[Tensor, "t m"]:
        """Decrease D(0) - D(t) of the residual in the modes at these times."""
        return torch.stack([self._modes.lost(time, self.doubling) for time in self._times(t)])

    def _alignment(self, lost: Float[Tensor, "t m"]) -> Float[Tensor, " t"]:
        """Return A(K, y) with D = D0 - E and E = v lost, without forming K = K0 + g (D0 D0^T - D D^T) = K0 + g (E D0^T + D0 E^T -
        E E^T), so that a K0 much smaller than g D0 D0^T keeps its precision. Everything is divided by the larger of K0 and g
        |E|."""
        m = self._modes
        D0, y, E = m.D, m.y, lost @ m.v.T
        small = m.K0.abs().max()
        size = torch.maximum(small, m.g * E.norm(dim=1))
        K0, part = small / size, m.K0 / small
        gE = m.g * E / size[:, None]
        Ey, ED, EE = E @ y, E @ D0, E.square().sum(1)
        top = K0 * (y @ part @ y) + gE @ y * (2 * (D0 @ y) - Ey)
        moved = 2 * (gE @ part @ D0) - (gE @ part * E).sum(1)  # <K0, E D0^T + D0 E^T - E E^T>; below it, its squared norm
        gEgE, gED = gE.square().sum(1), gE @ D0
        square = K0**2 * part.square().sum() + 2 * K0 * moved + 2 * gEgE + 2 * gED**2 + gEgE * EE - 4 * gEgE * ED
        return top / square.sqrt()


@dataclass(frozen=True)
class _Modes:
    """C and D(0) in the eigenvectors of C, in ascending order. Kernels are in a ``unit`` and residuals in units of ``length`` =
    |D(0)|, so that C is near 1 and D(0) is a unit vector. Labels are unit vectors too: no result depends on their length."""

    y: Float[Tensor, " n"]
    D: Float[Tensor, " n"]  # D(0)
    K0: Float[Tensor, "n n"]
    g: float  # gamma |D(0)|^2
    unit: float
    length: float
    c: Float[Tensor, " m"]
    v: Float[Tensor, "n m"]
    d: Float[Tensor, " m"]  # v^T D(0)
    share: Float[Tensor, " m"]  # g d_k^2 / c_k; together with ``rest`` they sum to 1
    rest: float  # 1 - g D^T C^-1 D = 1 / (1 + g D^T K0^-1 D) = N(infinity); 0 if D is not in the range of K0
    first: Float[Tensor, " n"]  # eigenvalues of K0
    on_k0: Float[Tensor, " n"]  # (u_k . D(0))^2 for the eigenvectors of K0

    @classmethod
    def make(cls, K0: Float[Tensor, "n n"], y: Float[Tensor, " n"], D: Float[Tensor, " n"], gamma: float) -> _Modes:
        """Make the modes from the kernel, the labels and the first residual, in units in which nothing overflows."""
        first, U = decompose(K0, "K0")
        (y, _), (D, largest) = in_units(y), in_units(D)
        length = D.norm().item() * largest
        y, D = y / y.norm(), D / D.norm()
        unit = max(K0.abs().max().item(), gamma * length * length)
        if not math.isfinite(unit):
            raise SelectionError(f"gamma |D(0)|^2 with gamma = {gamma:g} and a first residual D(0) of length {length:.3g} leaves "
                                 f"the range of float64. Give labels in other units.")
        g = gamma * length / unit * length
        first, K0, z = first / unit, (K0 + K0.T) / 2 / unit, U.T @ D
        if 0 < first[-1] < torch.finfo(D.dtype).tiny / torch.finfo(D.dtype).eps:
            raise SelectionError("K0 is so far below gamma |D(0)|^2 that its eigenvalues, in units of that, leave the range of "
                                 "float64. Give a larger K0 or a smaller gamma.")
        rounding = len(D) * torch.finfo(D.dtype).eps
        reached = first > rounding * first[-1]
        p, power = torch.where(reached, first, 0.0), z.square()
        missed = z[~reached].norm().item() > 1e-10
        if g:  # so that rounding errors of D do not grow in slower directions
            z = torch.where(z.abs() > 10 * rounding if missed else reached, z, 0.0)
        c, part, d, share = eigensystem(p, z, g)
        rest = 0.0 if g and missed else 1 / (1 + g * (power[reached] / first[reached]).sum().item())
        return cls(y, D, K0, g, unit, length, c, U @ part, d, share, rest, first, power)

    def at(self, t: Float[Tensor, " t"], doubling: float) -> Float[Tensor, "t m"]:
        """Residual v^T D(t) in the modes at a time."""
        late = -t[:, None].clamp(max=1e300) * self._ahead
        size = self.rest + torch.exp(doubling * late) @ self.share
        return torch.exp(late) * self.d / size.sqrt()[:, None]

    def lost(self, t: Float[Tensor, ""], doubling: float) -> Float[Tensor, " m"]:
        """Return v^T (D(0) - D(t)) = d (1 - a / sqrt(N)), a_k = e^(-c_k t). If D has hardly changed, a^2 is near N, and
        N - a_k^2 = rest (1 - a_k^2) + sum_j share_j (e^(-2 c_j t) - a_k^2) avoids cancellation."""
        late = -t.clamp(max=1e300) * self._ahead
        a, decay = late.exp(), (doubling * late).exp()
        size = (self.rest + decay @ self.share).sqrt()
        apart = doubling * late - 2 * late[:, None]  # [k, j]
        change = -torch.expm1(-apart.abs()) * torch.where(apart > 0, decay, -a.square()[:, None])
        return self.d * (change @ self.share - self.rest * torch.expm1(2 * late)) / (size * (size + a))

    @cached_property
    def _ahead(self) -> Float[Tensor, " m"]:
        """Return c minus its smallest value, if D does not go to zero. The common factor e^(-slowest t) cancels, and including it
        would give 0/0."""
        slowest = self.c[self.share > 0].min() if not self.rest and self.share.any() else 0.0
        return (self.c - slowest).clamp(min=0)

    def last(self) -> Float[Tensor, " m"]:
        """Limit v^T D(infinity) of the residual in the modes."""
        if not self.g:
            return torch.where(self.c == 0, self.d, 0.0)
        if self.rest:
            return torch.zeros_like(self.d)
        slow = self.share > 0
        lowest = self.c[slow].min()
        d = torch.where(slow & (self.c <= lowest * (1 + 1e-9)), self.d, 0.0)
        return d / d.norm() * (lowest / self.g).sqrt()


def predict(K0: ArrayLike, y: ArrayLike, gamma: float, t: Times, lr: float = 1.0,
            f0: ArrayLike | None = None, *, doubling: float = 2.0) -> tuple[Array, Array]:
    """Return (residual [t, n], K [t, n, n]) of ``OptimalFeatureEvolution``."""
    return OptimalFeatureEvolution(K0, y, gamma, lr, f0, doubling=doubling).predict(t)


def scalar(psi0: float, delta0: float, gamma: float, t: Times, lr: float = 1.0, *,
           prefactor: float | None = None) -> tuple[Array, Array]:
    """Solve the flow for one example and one feature: u = D^2 and v = psi^2 [t], both logistic.  [Eq. (27), corrected]

    u = (C / gamma) A / (A + e^(2 lr C t)), A = gamma D0^2 / psi0^2;   v = C B / (B + e^(-2 lr C t)), B = psi0^2 / (C - psi0^2);
    C = psi0^2 + gamma D0^2. ``prefactor`` replaces 1 / gamma, which the paper omits."""
    numbers = {"psi0": psi0, "delta0": delta0, "gamma": gamma, "lr": lr}
    for name, value in numbers.items():
        if not math.isfinite(value) or value == 0 or (value < 0 and name in ("gamma", "lr")):
            raise SelectionError(f"{name}={value!r}: a finite number is needed, not 0; for gamma and lr above 0.")
    C = psi0 * psi0 + gamma * delta0 * delta0
    ahead = math.log(gamma) + 2 * (math.log(abs(delta0)) - math.log(abs(psi0))) - 2 * lr * C * times_from_zero(t)  # log(A e^-...)
    u = C * (1 / gamma if prefactor is None else prefactor) * torch.sigmoid(ahead)
    return like(u, t), like(C * torch.sigmoid(-ahead), t)


# ------------------------------------------------------------------------------------------------ simulate


def simulate(K0: ArrayLike, y: ArrayLike, gamma: float, t: Times, lr: float = 1.0,
             f0: ArrayLike | None = None) -> tuple[Array, Array]:
    """Return (residual [t, n], K [t, n, n]) by integrating D' = -lr Psi^T Psi D and Psi' = gamma lr Psi D D^T, Psi^T Psi = K0."""
    K, _, D = evolution(K0, y, gamma, lr, f0)
    values, vectors = decompose(K, "K0")
    values = torch.where(values > len(values) * torch.finfo(values.dtype).eps * values[-1], values, 0.0)
    root = (values.sqrt() * vectors).T  # a rounded zero eigenvalue would be a feature, and features grow
    length, size = D.norm(), root.abs().max()  # separate units, so that the tolerances of the flow are relative

    def velocity(state: list[Tensor]) -> list[Tensor]:
        D, Psi = state
        PsiD = Psi @ D
        return [-lr * size**2 * Psi.T @ PsiD, gamma * lr * length**2 * torch.outer(PsiD, D)]

    states = flow(velocity, [D / length, root / size], times_from_zero(t).tolist())
    return (like(torch.stack([D * length for D, _ in states]), K0),
            like(torch.stack([(size * Psi).T @ (size * Psi) for _, Psi in states]), K0))


# ------------------------------------------------------------------------------------------------ theories


def _kernels() -> list[tuple[Any, ...]]:
    """Kernels with more features than examples, as many, and fewer (singular); zero and non-zero initial outputs."""
    t = [0.0, 0.1, 0.5, 2.0]
    cases = [(normal(p, 6, seed=p).T @ normal(p, 6, seed=p) / p, normal(6, seed=1), gamma, t, 0.7)
             for p in (12, 6, 4) for gamma in (0.0, 0.3, 3.0)]
    return [*cases, (*cases[1], normal(6, seed=2))]


THEORIES = (
    Theory("ofe.optimal_feature_evolution", ref=Ref("rapid", "Sec. 4, App. A.1"),
           title="residual and kernel at all times when features move so that the loss falls fastest",
           predict=predict, simulate=simulate, cases=_kernels, tolerance=1e-8, perturb={"doubling": 2.001}),
)
