"""Optimal feature evolution: features that move, at every moment, so that the loss falls fastest.  [rapid, Sec. 4, App. A.1]

The residual D = f - y [n] and features Psi [p, n], K = Psi^T Psi, follow
    D' = -lr K D,    Psi' = gamma lr Psi D D^T.
C = K + gamma D D^T never changes. That solves the flow: with c, v the eigenvalues and vectors of C and d = v^T D(0),
    D(t) = e^(-lr C t) D(0) / sqrt(N(t)),   N(t) = 1 - gamma sum_k d_k^2 (1 - e^(-2 lr c_k t)) / c_k,
    K(t) = C - gamma D(t) D(t)^T.
The paper has C and the ends of the flow; the solution at all times is ours. No kernel is inverted, so K(0) may be singular.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from richter.core import Ref, SelectionError
from richter.core.arrays import Array, ArrayLike, to_tensor
from richter.kernels.dynamics import decompose
from richter.kernels.dynamics import effective_gamma as effective_gamma  # also known as a part of this theory
from richter.theory.arrays import Times, column, evolution, like, normal, times_from_zero
from richter.theory.flows import flow
from richter.theory.frame import Theory
from richter.theory.gofe import GeneralisedFeatureEvolution as GeneralisedFeatureEvolution

# ------------------------------------------------------------------------------------------------ predict


@dataclass(frozen=True)
class OptimalFeatureEvolution:
    """The flow from a kernel ``K0`` [n, n], labels ``y`` [n] and first outputs ``f0`` [n] (zero), at feature learning rate
    ``gamma``; with gamma = 0 the kernel is frozen.

    Residuals, losses and alignments at any times cost two eigendecompositions together; kernels are formed only by ``kernel``
    and ``predict``. ``doubling`` is the 2 of e^(-2 lr C t), there to be perturbed.

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
        self._modes  # noqa: B018  what is no kernel, or has no labels, is refused here

    def predict(self, t: Times) -> tuple[Array, Array]:
        """(residual [t, n], K [t, n, n])."""
        return self.residual(t), self.kernel(t)

    def residual(self, t: Times) -> Array:
        """D(t) = f - y [t, n]."""
        return like(self._coefficients(t) @ self._modes.v.T, self.K0)

    def kernel(self, t: Times) -> Array:
        """K(t) [t, n, n]."""
        D = self._coefficients(t) @ self._modes.v.T
        return like(self._modes.C - self.gamma * D[:, :, None] * D[:, None, :], self.K0)

    def loss(self, t: Times) -> Array:
        """|D(t)|^2 [t]."""
        return like(self._coefficients(t).square().sum(1), self.K0)

    def alignment(self, t: Times) -> Array:
        """A(K(t), y) [t] = y^T K y / (|K| |y|^2). It need not rise to its end: it may pass above and return."""
        return like(self._alignment(self._coefficients(t)), self.K0)

    @cached_property
    def conserved(self) -> Array:
        """C = K(0) + gamma D(0) D(0)^T [n, n], to which K(t) goes where the loss goes to zero.  [Eq. (6)]"""
        return like(self._modes.C, self.K0)

    @cached_property
    def final_residual(self) -> Array:
        """D at the end of time [n]: zero, unless K(0) is singular and D(0) has a part that it does not reach. K never gains a
        rank, so that then one direction stays: the slowest of C, with |D|^2 = c / gamma."""
        return like(self._modes.v @ self._modes.last(self.gamma), self.K0)

    @cached_property
    def final_alignment(self) -> float:
        """A(C, y), where the loss goes to zero.  [Eq. (7)]"""
        return self._alignment(self._modes.last(self.gamma)[None]).item()

    @cached_property
    def threshold(self) -> float:
        """gamma* = (lambda_1 - D^T K0 D / |D|^2) / |D|^2, D = D(0): about here the top eigenvector of C turns toward D(0) (the
        labels, from f0 = 0)."""
        energy = self._modes.d.square().sum().item()
        rayleigh = (self._modes.on_k0 * self._modes.first).sum().item() / energy
        return (self._modes.first[-1].item() - rayleigh) / energy

    @cached_property
    def top_overlap(self) -> float:
        """(u_1 . y)^2 / |y|^2 for the top eigenvector of C.  [Fig. 2C]"""
        return ((self._modes.v[:, -1] @ self._modes.y).square() / self._modes.y.square().sum()).item()

    # -------------------------------------------------------------------------------------------- phases and approximations

    def early_loss(self, t: Times) -> Array:
        """|e^(-lr K0 t) D(0)|^2 [t]: the loss as long as the kernel has not moved."""
        decay = torch.exp(-2 * self.lr * self._times(t)[:, None] * self._modes.first)
        return like(decay @ self._modes.on_k0, self.K0)

    @cached_property
    def alignment_speed(self) -> float:
        """dA/dt at t = 0, from K' = gamma lr (D D^T K + K D D^T)."""
        K, y, D = (to_tensor(Z) for Z in (self.kernel([0.0])[0], self.y, self.residual([0.0])[0]))
        y, D = column(y).to(K.device), D.to(K.device)
        KD = K @ D
        moved = 2 * self.gamma * self.lr * (y @ D) * (y @ KD)  # y^T K' y
        grown = 2 * self.gamma * self.lr * (KD @ KD)  # <K, K'>
        size, top = K.norm(), y @ K @ y
        return ((moved / size - top * grown / size**3) / y.square().sum()).item()

    def late_loss(self, t: Times) -> Array:
        """sum_k d_k^2 e^(-2 lr c_k t) / N(infinity) [t]: the loss once the kernel has arrived and is frozen at C. It needs labels
        that K0 reaches."""
        if not self._modes.rest:
            raise SelectionError("K0 is singular, and the residual at the start has a part in its null space: the loss does not "
                                 "go to zero, and there is no late phase under a frozen kernel. final_residual says what stays; "
                                 "take more features than examples, or add a ridge to K0.")
        decay = torch.exp(-2 * self.lr * self._times(t)[:, None] * self._modes.c)
        return like(decay @ self._modes.d.square() / self._modes.rest, self.K0)

    @cached_property
    def turning_time(self) -> float:
        """When what the top direction of C still has to learn falls below all others: before, the loss falls exponentially, as
        (u_1 . D)^2 e^(-2 lr c_1 t); after, as slowly as the tail of the spectrum lets it. 0 if it is so from the start."""
        power, c, lr = self._modes.d.square(), self._modes.c, self.lr

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
        """A(t) [t] if K(t) were diagonal in the eigenvectors of C, its diagonal A_k a logistic function of time: an approximation
        that is off at first and right at the end.  [Eqs. (32), (35), corrected]"""
        c, v, gap = self._modes.c, self._modes.v, self.gamma * self._modes.d.square()  # c - A(0)
        start = (v * (self._modes.K0 @ v)).sum(0).clamp(min=0)
        decay = torch.exp(-2 * self.lr * self._times(t)[:, None] * c)
        A = torch.where(start > 0, c * start / (start + gap * decay).clamp(min=torch.finfo(c.dtype).tiny), 0.0)
        power = (v.T @ self._modes.y).square()
        return like((A @ power) / (A.norm(dim=1) * self._modes.y.square().sum()), self.K0)

    def simulate(self, t: Times) -> tuple[Array, Array]:
        """(residual [t, n], K [t, n, n]) by integrating the flow of D and Psi."""
        return simulate(self.K0, self.y, self.gamma, t, self.lr, self.f0)

    # -------------------------------------------------------------------------------------------- inside

    @cached_property
    def _modes(self) -> _Modes:
        return _Modes.make(*evolution(self.K0, self.y, self.gamma, self.lr, self.f0), self.gamma)

    def _times(self, t: Times) -> Float[Tensor, " t"]:
        return times_from_zero(t).to(self._modes.c.device)

    def _coefficients(self, t: Times) -> Float[Tensor, "t m"]:
        return self._modes.at(self._times(t), self.lr, self.doubling)

    def _alignment(self, d: Float[Tensor, "t m"]) -> Float[Tensor, " t"]:
        """A(K, y), D = v d, without forming K = K0 + gamma (D0 D0^T - D D^T) = K0 + gamma (E D0^T + D0 E^T - E E^T) with
        E = D0 - D: a K0 that is small beside gamma D0 D0^T keeps its digits."""
        m = self._modes
        unit = m.K0.abs().max()
        y, K0, gamma = m.y, m.K0 / unit, self.gamma / unit
        D0, E = m.v @ m.d, (m.d - d) @ m.v.T
        KE, Ey, ED, EE = E @ K0, E @ y, E @ D0, E.square().sum(1)
        top = y @ K0 @ y + gamma * Ey * (2 * (D0 @ y) - Ey)
        moved = 2 * (KE @ D0) - (KE * E).sum(1)  # <K0, E D0^T + D0 E^T - E E^T>, and below its square norm
        size = K0.square().sum() + 2 * gamma * moved + gamma**2 * (2 * EE * (D0 @ D0) + 2 * ED**2 + EE**2 - 4 * EE * ED)
        return top / (size.sqrt() * y.square().sum())


@dataclass(frozen=True)
class _Modes:
    """C and D(0) in the eigenvectors of C, ascending; those with c = 0 may be left out, as no part of D lies there."""

    y: Float[Tensor, " n"]
    K0: Float[Tensor, "n n"]
    C: Float[Tensor, "n n"]
    c: Float[Tensor, " m"]
    v: Float[Tensor, "n m"]
    d: Float[Tensor, " m"]  # v^T D(0)
    share: Float[Tensor, " m"]  # gamma d_k^2 / c_k: these and ``rest`` sum to 1
    rest: float  # 1 - gamma D^T C^-1 D = 1 / (1 + gamma D^T K0^-1 D) = N(infinity); 0 where K0 does not reach all of D
    first: Float[Tensor, " n"]  # eigenvalues of K0
    on_k0: Float[Tensor, " n"]  # (u_k . D(0))^2 in its eigenvectors

    @classmethod
    def make(cls, K0: Float[Tensor, "n n"], y: Float[Tensor, " n"], D: Float[Tensor, " n"], gamma: float) -> _Modes:
        first, directions = decompose(K0, "K0")
        K0 = (K0 + K0.T) / 2
        C = K0 + gamma * torch.outer(D, D)
        nothing = len(D) * torch.finfo(D.dtype).eps  # relative
        coefficients = directions.T @ D
        power, reached = coefficients.square(), first > nothing * first[-1]
        missed = power[~reached].sum()
        unreached = bool(missed > (1e-10 * D.norm()).square())
        if unreached and gamma * missed > 0:
            c, v, d = _unreached(first, directions, coefficients, reached, gamma)
            rest = 0.0
        else:
            c, v = torch.linalg.eigh(C)
            c = torch.where(c > nothing * c[-1], c, 0.0)
            d = v.T @ D
            d = torch.where(c > 0, d, 0.0) if gamma and not unreached else d  # C reaches D by its definition
            rest = 1 / (1 + gamma * (power[reached] / first[reached]).sum().item())
        share = torch.where(c > 0, (gamma * d.square() / c).clamp(max=1), 0.0)
        return cls(y, K0, C, c, v, d, share * ((1 - rest) / share.sum() if share.any() else 1.0), rest, first, power)

    def at(self, t: Float[Tensor, " t"], lr: float, doubling: float) -> Float[Tensor, "t m"]:
        """v^T D(t)."""
        slowest = self.c[self.share > 0].min() if not self.rest and self.share.any() else self.c.new_zeros(())
        # the common factor e^(-slowest t) cancels; with it 0/0 would be reached where K0 is singular
        late = ((-lr * t[:, None]).clamp(min=-1e300) * (self.c - slowest)).clamp(max=0)
        size = self.rest + torch.exp(doubling * late) @ self.share
        return torch.exp(late) * self.d / size.sqrt()[:, None]

    def last(self, gamma: float) -> Float[Tensor, " m"]:
        """v^T D(infinity)."""
        if not gamma:
            return torch.where(self.c == 0, self.d, 0.0)
        if self.rest:
            return torch.zeros_like(self.d)
        slow = self.share > 0
        lowest = self.c[slow].min()
        d = torch.where(slow & (self.c <= lowest * (1 + 1e-9)), self.d, 0.0)
        return d / d.norm() * (lowest / gamma).sqrt()


def _unreached(first: Float[Tensor, " n"], U: Float[Tensor, "n n"], D: Float[Tensor, " n"], reached: Bool[Tensor, " n"],
               gamma: float) -> tuple[Float[Tensor, " m"], Float[Tensor, "n m"], Float[Tensor, " m"]]:
    """c > 0, v and v^T D(0) of C, where K0 = U first U^T does not reach all of D (given as U^T D).

    The part that is not reached is one direction, of length h. With the eigenvectors of K0 that have a part of D it makes up
        C = [[first + gamma D D^T, gamma h D], [gamma h D^T, gamma h^2]].
    Its slowest eigenvalue c may be far below the rounding of the others. It is read off C^-1, which is known: for the eigenvector
    w, 1/c = sum_k (w_k - w_h D_k / h)^2 / first_k + w_h^2 / (gamma h^2)."""
    nothing = 10 * len(D) * torch.finfo(D.dtype).eps * D.norm()
    live = reached & (D.abs() > nothing)
    h = D[~reached].norm()
    basis = torch.cat([U[:, live], (U[:, ~reached] @ D[~reached] / h)[:, None]], 1)
    values, part = torch.cat([first[live], first.new_zeros(1)]), torch.cat([D[live], h[None]])
    c, w = torch.linalg.eigh(values.diag() + gamma * torch.outer(part, part))
    slow = w[:, 0]
    inverse = ((slow[:-1] - slow[-1] * D[live] / h).square() / first[live]).sum() + slow[-1].square() / (gamma * h * h)
    c[0] = 1 / inverse
    d = w.T @ part
    d[0] = c[0] * slow[-1] / (gamma * h)  # the last row of C w = c w; as a sum it would have few digits
    idle = reached & ~live
    c, order = torch.cat([c, first[idle]]).sort()
    return c, torch.cat([basis @ w, U[:, idle]], 1)[:, order], torch.cat([d, torch.zeros_like(D[idle])])[order]


def predict(K0: ArrayLike, y: ArrayLike, gamma: float, t: Times, lr: float = 1.0,
            f0: ArrayLike | None = None, *, doubling: float = 2.0) -> tuple[Array, Array]:
    """(residual [t, n], K [t, n, n]) of ``OptimalFeatureEvolution``."""
    return OptimalFeatureEvolution(K0, y, gamma, lr, f0, doubling=doubling).predict(t)


def scalar(psi0: float, delta0: float, gamma: float, t: Times, lr: float = 1.0, *,
           prefactor: float | None = None) -> tuple[Array, Array]:
    """One example and one feature: u = D^2 and v = psi^2 [t], both logistic.  [Eq. (27), corrected]

    u = (C / gamma) A / (A + e^(2 lr C t)), A = gamma D0^2 / psi0^2;   v = C B / (B + e^(-2 lr C t)), B = psi0^2 / (C - psi0^2);
    C = psi0^2 + gamma D0^2. ``prefactor``: what stands for 1 / gamma, which the paper leaves out."""
    numbers = {"psi0": psi0, "delta0": delta0, "gamma": gamma, "lr": lr}
    for name, value in numbers.items():
        if not math.isfinite(value) or value == 0 or (value < 0 and name in ("gamma", "lr")):
            raise SelectionError(f"{name}={value!r}: a finite number is needed, not 0; for gamma and lr above 0.")
    C, A = psi0**2 + gamma * delta0**2, gamma * delta0**2 / psi0**2
    decay = torch.exp(-2 * lr * C * times_from_zero(t))
    u = C * (1 / gamma if prefactor is None else prefactor) * A * decay / (A * decay + 1)
    return like(u, t), like(C / (1 + A * decay), t)


# ------------------------------------------------------------------------------------------------ simulate


def simulate(K0: ArrayLike, y: ArrayLike, gamma: float, t: Times, lr: float = 1.0,
             f0: ArrayLike | None = None) -> tuple[Array, Array]:
    """(residual [t, n], K [t, n, n]) by integrating D' = -lr Psi^T Psi D and Psi' = gamma lr Psi D D^T from a root Psi of K0."""
    K, _, D = evolution(K0, y, gamma, lr, f0)
    values, vectors = decompose(K, "K0")
    values = torch.where(values > len(values) * torch.finfo(values.dtype).eps * values[-1], values, 0.0)
    root = (values.sqrt() * vectors).T  # rounding of an eigenvalue 0 would be a feature, and features grow

    def velocity(state: list[Tensor]) -> list[Tensor]:
        D, Psi = state
        PsiD = Psi @ D
        return [-lr * Psi.T @ PsiD, gamma * lr * torch.outer(PsiD, D)]

    states = flow(velocity, [D, root], times_from_zero(t).tolist())
    return like(torch.stack([D for D, _ in states]), K0), like(torch.stack([Psi.T @ Psi for _, Psi in states]), K0)


# ------------------------------------------------------------------------------------------------ theories


def _kernels() -> list[tuple[Any, ...]]:
    """Kernels with more features than examples, as many, and fewer (singular); from zero and from elsewhere."""
    t = [0.0, 0.1, 0.5, 2.0]
    cases = [(normal(p, 6, seed=p).T @ normal(p, 6, seed=p) / p, normal(6, seed=1), gamma, t, 0.7)
             for p in (12, 6, 4) for gamma in (0.0, 0.3, 3.0)]
    return [*cases, (*cases[1], normal(6, seed=2))]


THEORIES = (
    Theory("ofe.optimal_feature_evolution", ref=Ref("rapid", "Sec. 4, App. A.1"),
           title="residual and kernel at all times when features move so that the loss falls fastest",
           predict=predict, simulate=simulate, cases=_kernels, tolerance=1e-8, perturb={"doubling": 2.001}),
)
