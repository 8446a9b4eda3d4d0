"""Kernels as objects: values, gradients, and the sums of gradients that closed forms are made of.

    k = Laplace(bandwidth=3.0)
    k(x, z)                          # [n, m]
    k(x, z, metric=M)                # the same after x -> M^(1/2) x
    k.gradients(x, z)                # [n, m, d]: d k(x_i, z_j) / d x_i

Every kernel but ``LaplaceL1`` has grad_x k(x, z) = a(x, z) z + b(x, z) x with two numbers for each pair, its ``slopes``: that is
why no closed form here needs an array of pairs and coordinates. Where a kernel has a kink, at x = z, its gradient is taken as 0.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import SelectionError
from richter.core.arrays import Array, like, to_tensor
from richter.kernels.infinite import recursion

Geometry = Tensor  # "... n m": what a kernel needs to know of pairs of inputs, before its bandwidth
Self = TypeVar("Self", bound="Tunable")


def squared_distances(x: Float[Tensor, "n d"], z: Float[Tensor, "m d"] | None = None) -> Float[Tensor, "n m"]:
    """|x - z|^2 by one matrix product; pairs so close that it would lose digits are computed again from x - z, so that the
    distance of a point to itself, or to its copy, is exactly 0."""
    centre = x.mean(0)
    x = x - centre
    z = x if z is None else z - centre
    p, q = x.square().sum(1), z.square().sum(1)
    D = torch.addmm(q.expand(len(x), len(z)), x, z.T, alpha=-2).add_(p[:, None])
    close = 2.4 * p * (1e-5 if D.dtype == torch.float64 else 1e-2)  # for close pairs more than p + q: beyond, 11 (4) digits hold
    least, nearest = D.min(1)
    near = (least <= close).nonzero()[:, 0]
    nearest = nearest[near]
    D[near, nearest] = math.inf  # of most rows the point itself: what follows then looks at few rows
    crowded = (D.amin(1) <= close).nonzero()[:, 0]
    i, j = (D[crowded] <= close[crowded, None]).nonzero(as_tuple=True)
    i, j = torch.cat([near, crowded[i]]), torch.cat([nearest, j])
    for part in torch.arange(len(i), device=D.device).split(max(1, 2 ** 22 // max(1, x.shape[1]))):
        D[i[part], j[part]] = (x[i[part]] - z[j[part]]).square().sum(1)
    return D


def root(metric: Tensor) -> Tensor:
    """M^(1/2): of a matrix [d,d] by its eigenvalues, those below zero cut off; of a diagonal [d] entry by entry."""
    if metric.dim() == 1:
        return metric.clamp(min=0).sqrt()
    return power(metric, 0.5)


def power(M: Float[Tensor, "d d"], exponent: float) -> Float[Tensor, "d d"]:
    """M^exponent of a symmetric matrix, eigenvalues below zero cut off."""
    values, vectors = torch.linalg.eigh((M + M.T) / 2)
    return (vectors * values.clamp(min=0) ** exponent) @ vectors.T


def own(a: Float[Tensor, "n m"], b: Tensor | float, C: Float[Tensor, "m c"]) -> Float[Tensor, "n c"]:
    """b C, the part of a gradient along x itself."""
    return b @ C if isinstance(b, Tensor) else b * (a @ C)


def stretch(x: Float[Tensor, "... d"], R: Tensor | None) -> Float[Tensor, "... d"]:
    """Inputs as the kernel sees them, when R is the root of its metric."""
    return x if R is None else x * R if R.dim() == 1 else x @ R


@dataclass(frozen=True)
class Kernel(ABC):
    """What the learners ask of a kernel. ``geometry`` depends on inputs only, the rest on geometry and bandwidth."""

    homogeneous: ClassVar[bool] = False  # scaling the metric only scales the kernel
    arrays: ClassVar[int] = 1  # that a geometry has

    @abstractmethod
    def geometry(self, x: Float[Tensor, "n d"], z: Float[Tensor, "m d"] | None = None) -> Geometry: ...

    @abstractmethod
    def values(self, g: Geometry) -> Float[Tensor, "n m"]: ...

    def slopes(self, g: Geometry, d: int) -> tuple[Tensor, Tensor | float]:
        """(a, b) of grad_x k(x, z) = a z + b x for inputs of d columns; a number b stands for b times a."""
        raise NotImplementedError

    def nearest(self, g: Geometry) -> float:
        """The smallest distance above 0 of two inputs, where slopes grow without bound as it shrinks: of a kernel with a kink, in
        units of its bandwidth. Others are smooth."""
        return math.inf

    def pull(self, x: Float[Tensor, "n d"], z: Float[Tensor, "m d"], g: Geometry,
             C: Float[Tensor, "m c"]) -> Float[Tensor, "n c d"]:
        """sum_j C_jc grad_x k(x_i, z_j): the gradient of f_c = sum_j C_jc k(., z_j)."""
        a, b = self.slopes(g, x.shape[1])
        found = (a @ (C[:, :, None] * z[:, None]).flatten(1)).unflatten(1, (C.shape[1], z.shape[1]))
        return found.add_(own(a, b, C)[:, :, None] * x[:, None])

    def pull_pairs(self, x: Float[Tensor, "n d"], z: Float[Tensor, "m d"], g: Geometry,
                   B: Float[Tensor, "n m"]) -> Float[Tensor, "n d"]:
        """sum_j B_ij grad_x k(x_i, z_j)."""
        a, b = self.slopes(g, x.shape[1])
        a.mul_(B)
        P = (b * B).sum(1) if isinstance(b, Tensor) else b * a.sum(1)
        return (a @ z).add_(P[:, None] * x)

    def __call__(self, x: Any, z: Any = None, metric: Any = None) -> Array:
        """k(x_i, z_j) [n, m], in float64; numpy or torch, as given."""
        X, Z, R = self._inputs(x, z, metric)
        return like(self.values(self.geometry(stretch(X, R), None if Z is None else stretch(Z, R))), x)

    def gradients(self, x: Any, z: Any = None, metric: Any = None) -> Array:
        """d k(x_i, z_j) / d x_i [n, m, d]. For looking at: the learners never form it."""
        X, Z, R = self._inputs(x, z, metric)
        Z = X if Z is None else Z
        u, v = stretch(X, R), stretch(Z, R)
        g = self.geometry(u, v)
        each = torch.eye(len(v), dtype=u.dtype, device=u.device)
        return like(stretch(self.pull(u, v, g, each), R), x)

    def _inputs(self, x: Any, z: Any, metric: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        X = to_tensor(x, "x")
        Z = None if z is None else to_tensor(z, "z").to(X.device)
        for name, t in (("x", X), ("z", Z)):
            if t is not None and (t.dim() != 2 or t.shape[1] != X.shape[-1] or not len(t)):
                raise SelectionError(f"{name} has shape {tuple(t.shape)}; inputs [n, d] with as many columns each are needed.")
        return X, Z, None if metric is None else root(checked_metric(metric, X))


def checked_metric(metric: Any, x: Float[Tensor, "n d"]) -> Tensor:
    """A diagonal [d] or a symmetric matrix [d, d] that fits the inputs."""
    M, d = to_tensor(metric, "metric").to(x), x.shape[1]
    if tuple(M.shape) not in ((d,), (d, d)):
        raise SelectionError(f"metric has shape {tuple(M.shape)} for inputs of {d} columns; [{d}] or [{d}, {d}] is needed.")
    if M.dim() == 2 and (M - M.T).norm() > 1e-8 * M.norm():
        raise SelectionError("metric is not symmetric: (x - z)^T M (x - z) sees its symmetric part only. Give (M + M^T) / 2, "
                             "or for FACT the learner's own update.")
    return M


@dataclass(frozen=True)
class Tunable(Kernel):
    """A kernel with a bandwidth L; None is for a learner to choose."""

    bandwidth: float | None = None
    scanned: ClassVar[tuple[int, ...]] = ()  # powers of 2, times the rule, to look at first: far ones are not seen from others

    def __post_init__(self) -> None:
        L = self.bandwidth
        if L is not None and not (isinstance(L, Real) and math.isfinite(L) and L > 0):
            raise SelectionError(f"{type(self).__name__}(bandwidth={L!r}): a positive number is needed, or None to have one "
                                 f"chosen by a learner.")

    @property
    def L(self) -> float:
        if self.bandwidth is None:
            name = type(self).__name__
            raise SelectionError(f"{name}(): its bandwidth is not set. A learner chooses one; by itself the kernel needs "
                                 f"{name}(bandwidth=...), or {name}().fitted(x) for the rule of thumb.")
        return self.bandwidth

    @abstractmethod
    def typical(self, g: Geometry) -> float:
        """A bandwidth by rule of thumb, from the geometry of the inputs with themselves."""

    def fitted(self: Self, x: Any) -> Self:
        """The same kernel with the bandwidth of the rule on these inputs, if none was set."""
        return self if self.bandwidth is not None else self.at(self.typical(self.geometry(to_tensor(x, "x"))))

    def at(self: Self, bandwidth: float) -> Self:
        return dataclasses.replace(self, bandwidth=bandwidth)


@dataclass(frozen=True)
class Shift(Tunable):
    """A function of the distance; the rule of thumb is the median distance."""

    def geometry(self, x: Tensor, z: Tensor | None = None) -> Geometry:
        return squared_distances(x, z).sqrt_()

    def typical(self, g: Geometry) -> float:
        away = g[g > 0]
        return away[:: max(1, len(away) // 10 ** 6)].median().item() if len(away) else 1.0


@dataclass(frozen=True)
class Laplace(Shift):
    """exp(-|x - z| / L)."""

    def values(self, g: Geometry) -> Tensor:
        return (g / -self.L).exp_()

    def nearest(self, g: Geometry) -> float:
        return torch.where(g > 0, g, math.inf).min().item() / self.L

    def slopes(self, g: Geometry, d: int) -> tuple[Tensor, float]:
        a = torch.add(g.new_tensor(-math.log(self.L)), g, alpha=-1 / self.L).exp_().div_(g)
        return a.nan_to_num_(nan=math.nan, posinf=0.0), -1.0  # the kink, where g = 0


@dataclass(frozen=True)
class Gaussian(Shift):
    """exp(-|x - z|^2 / (2 L^2))."""

    scanned: ClassVar[tuple[int, ...]] = (0, -2)

    def values(self, g: Geometry) -> Tensor:
        return g.square().div_(-2 * self.L ** 2).exp_()

    def slopes(self, g: Geometry, d: int) -> tuple[Tensor, float]:
        return self.values(g).div_(self.L ** 2), -1.0


@dataclass(frozen=True)
class LaplaceL1(Shift):
    """exp(-sum_d |x_d - z_d| / L): a product over coordinates. Sums of its gradients take one pass for each coordinate."""

    def geometry(self, x: Tensor, z: Tensor | None = None) -> Geometry:
        return torch.cdist(x, x if z is None else z, p=1)

    def values(self, g: Geometry) -> Tensor:
        return (g / -self.L).exp_()

    def pull(self, x: Tensor, z: Tensor, g: Geometry, C: Tensor) -> Tensor:
        K = self.values(g).div_(-self.L)
        return torch.stack([(K * torch.sign(x[:, d, None] - z[None, :, d])) @ C for d in range(x.shape[1])], 2)

    def pull_pairs(self, x: Tensor, z: Tensor, g: Geometry, B: Tensor) -> Tensor:
        K = self.values(g).div_(-self.L).mul_(B)
        return torch.stack([(K * torch.sign(x[:, d, None] - z[None, :, d])).sum(1) for d in range(x.shape[1])], 1)


@dataclass(frozen=True)
class Quadratic(Kernel):
    """(x . z)^2."""

    homogeneous: ClassVar[bool] = True

    def geometry(self, x: Tensor, z: Tensor | None = None) -> Geometry:
        return x @ (x if z is None else z).T

    def values(self, g: Geometry) -> Tensor:
        return g.square()

    def slopes(self, g: Geometry, d: int) -> tuple[Tensor, float]:
        return 2 * g, 0.0


@dataclass(frozen=True)
class Exponential(Tunable):
    """exp(x . z / L^2); the rule of thumb is the root mean square norm."""

    scanned: ClassVar[tuple[int, ...]] = (0, -2)

    def geometry(self, x: Tensor, z: Tensor | None = None) -> Geometry:
        return x @ (x if z is None else z).T

    def values(self, g: Geometry) -> Tensor:
        return (g / self.L ** 2).exp_()

    def slopes(self, g: Geometry, d: int) -> tuple[Tensor, float]:
        return self.values(g).div_(self.L ** 2), 0.0

    def typical(self, g: Geometry) -> float:
        return max(g.diagonal().clamp(min=0).mean().item(), 1e-12) ** 0.5


@dataclass(frozen=True)
class NTK(Kernel):
    """The tangent kernel of an infinitely wide fully connected network; see ``richter.kernels.infinite``. The metric acts on its
    inputs, x -> M^(1/2) x."""

    depth: int = 1
    activation: Any = "relu"
    weight_var: float = 2.0
    bias_var: float = 0.0
    kind: ClassVar[Literal["ntk", "nngp"]] = "ntk"
    arrays: ClassVar[int] = 3

    def geometry(self, x: Tensor, z: Tensor | None = None) -> Geometry:
        z = x if z is None else z
        c = x @ z.T
        p, q = x.square().sum(1), z.square().sum(1)
        if z is x:
            c.diagonal().copy_(p)
        return torch.stack([c, p[:, None].expand_as(c), q[None].expand_as(c)]) / x.shape[1]

    def nearest(self, g: Geometry) -> float:
        gap = ((g[1] + g[2] - 2 * g[0]) / (g[1] + g[2])).clamp(min=0)
        return torch.where(gap > 16 * torch.finfo(gap.dtype).eps, gap, math.inf).min().sqrt().item()

    def values(self, g: Geometry) -> Tensor:
        return torch.cat([self._of(*part) for part in self._parts(g)])

    def slopes(self, g: Geometry, d: int) -> tuple[Tensor, Tensor]:
        found = []
        for part in self._parts(g):
            with torch.inference_mode(False), torch.enable_grad():
                c, p, q = (t.clone() for t in part)
                c.requires_grad_(), p.requires_grad_()
                found.append(torch.autograd.grad(self._of(c, p, q).sum(), (c, p), materialize_grads=True))
        a, b = (torch.cat(parts) for parts in zip(*found, strict=True))
        return a.div_(d), b.mul_(2 / d)

    def _of(self, c: Tensor, p: Tensor, q: Tensor) -> Tensor:
        return recursion(c, p, q, depth=self.depth, activation=self.activation, weight_var=self.weight_var,
                         bias_var=self.bias_var, kind=self.kind)

    @staticmethod
    def _parts(g: Geometry) -> tuple[Geometry, ...]:
        """Some rows at a time: the recursion holds tens of arrays of their size."""
        return g.split(max(1, 2 ** 17 // max(1, g.shape[2])), 1)


@dataclass(frozen=True)
class NNGP(NTK):
    """The covariance kernel of an infinitely wide fully connected network."""

    kind: ClassVar[Literal["ntk", "nngp"]] = "nngp"
