"""Base classes of kernels: values, gradients, and the sums of gradients in closed forms.

A kernel of your own needs two methods:

    @dataclass(frozen=True)
    class Cauchy(Kernel):
        L: float = 2.0

        def geometry(self, x, z):
            return squared_distances(x, z)

        def values(self, g):
            return 1 / (1 + g / self.L ** 2)

Its gradients are then automatic. ``slopes`` (or ``pull``) makes them faster. A ``Tunable`` has its bandwidth chosen.
``richter.testing.check_kernel(Cauchy())`` reports faults.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import SelectionError
from richter.core.arrays import Array, ArrayLike, like, to_tensor
from richter.learners.metric import checked_metric, root, stretch

Geometry = Tensor  # "... n m": the data of pairs of inputs from which values are computed, before the bandwidth
Slopes = tuple[Tensor, Tensor | float]
Self = TypeVar("Self", bound="Tunable")


@dataclass(frozen=True)
class Kernel(ABC):
    """Interface of a kernel for the learners. ``geometry`` depends on the inputs alone and is cached. The other methods depend on
    the geometry and on the kernel's own numbers, and must not modify the geometry."""

    homogeneous: ClassVar[bool] = False  # whether scaling the metric only scales the kernel
    arrays: ClassVar[int] = 1  # number of arrays in a geometry

    @abstractmethod
    def geometry(self, x: Float[Tensor, "n d"], z: Float[Tensor, "m d"]) -> Geometry:
        """Compute the data of each pair, [n, m] or [arrays, n, m]: distances or inner products. ``z`` may be ``x`` itself."""

    @abstractmethod
    def values(self, g: Geometry) -> Float[Tensor, "n m"]:
        """Return k(x_i, z_j), from the geometry of some rows and columns."""

    def slopes(self, g: Geometry, d: int) -> Slopes:
        """Return (a, b) of grad_x k(x, z) = a z + b x for inputs with d columns, two numbers per pair. A single number b means b
        times a. This method is optional; with it, a kernel needs neither ``pull`` nor automatic gradients."""
        raise NotImplementedError(f"{type(self).__name__} has no slopes")

    @property
    def sloped(self) -> bool:
        """Whether the kernel has ``slopes``."""
        return type(self).slopes is not Kernel.slopes

    def nearest(self, g: Geometry) -> float:
        """Smallest non-zero distance of two inputs, in units of the bandwidth, for a kernel with a kink, whose slopes grow
        without bound as it shrinks. Infinite for smooth kernels."""
        return math.inf

    def pull(self, x: Float[Tensor, "n d"], z: Float[Tensor, "m d"], g: Geometry,
             C: Float[Tensor, "m c"]) -> Float[Tensor, "n c d"]:
        """Return sum_j C_jc grad_x k(x_i, z_j), the gradient of f_c = sum_j C_jc k(., z_j)."""
        if not self.sloped:
            return _automatic(self, x, z, C)
        a, b = self.slopes(g, x.shape[1])
        along_z = (a @ (C[:, :, None] * z[:, None]).flatten(1)).unflatten(1, (C.shape[1], z.shape[1]))
        return along_z.add_(along_x(a, b, C)[:, :, None] * x[:, None])

    def pull_weighted(self, x: Float[Tensor, "n d"], z: Float[Tensor, "m d"], g: Geometry, weights: Float[Tensor, "n c"],
                      C: Float[Tensor, "m c"]) -> Float[Tensor, "n d"]:
        """Return sum_c weights_ic sum_j C_jc grad_x k(x_i, z_j)."""
        if not self.sloped:
            each = (self.pull(x, z, g, C[:, c:c + 1])[:, 0] * weights[:, c:c + 1] for c in range(C.shape[1]))
            return sum(each, torch.zeros_like(x))
        B = weights @ C.T
        a, b = self.slopes(g, x.shape[1])
        P = (b * B).sum(1) if isinstance(b, Tensor) else None
        aB = B.mul_(a)  # not in place in a, which may be the geometry itself
        P = b * aB.sum(1) if P is None else P
        return (aB @ z).add_(P[:, None] * x)

    def __call__(self, x: ArrayLike, z: ArrayLike = None, metric: ArrayLike = None) -> Array:
        """Return k(x_i, z_j) [n, m] in float64; torch for torch, otherwise numpy."""
        X, Z, R = self._inputs(x, z, metric)
        u = stretch(X, R)
        return like(self.values(self.geometry(u, u if Z is None else stretch(Z, R))), x)

    def gradients(self, x: ArrayLike, z: ArrayLike = None, metric: ArrayLike = None) -> Array:
        """Return d k(x_i, z_j) / d x_i [n, m, d]. For inspection; the learners never form it."""
        X, Z, R = self._inputs(x, z, metric)
        Z = X if Z is None else Z
        u, v = stretch(X, R), stretch(Z, R)
        each = torch.eye(len(v), dtype=u.dtype, device=u.device)
        return like(stretch(self.pull(u, v, self.geometry(u, v), each), R), x)

    def _inputs(self, x: ArrayLike, z: ArrayLike, metric: ArrayLike) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Inputs and the root of the metric as tensors, checked."""
        X = to_tensor(x, "x")
        Z = None if z is None else to_tensor(z, "z").to(X.device)
        for name, t in (("x", X), ("z", Z)):
            if t is not None and (t.dim() != 2 or t.shape[1] != X.shape[-1] or not len(t)):
                raise SelectionError(f"{name} has shape {tuple(t.shape)}; inputs [n, d] with as many columns each are needed.")
        return X, Z, None if metric is None else root(checked_metric(metric, X))


def along_x(a: Float[Tensor, "n m"], b: Tensor | float, C: Float[Tensor, "m c"]) -> Float[Tensor, "n c"]:
    """Return b C, the component of a gradient along x."""
    return b @ C if isinstance(b, Tensor) else b * (a @ C)


def _automatic(kernel: Kernel, x: Float[Tensor, "n d"], z: Float[Tensor, "m d"],
               C: Float[Tensor, "m c"]) -> Float[Tensor, "n c d"]:
    """Compute the result of ``pull`` by differentiating the values: one backward pass per output."""
    name = type(kernel).__name__
    with torch.inference_mode(False), torch.enable_grad():
        x, z, C = x.clone().requires_grad_(), z.clone(), C.clone()
        K = kernel.values(kernel.geometry(x, z))
        if not K.requires_grad:
            raise SelectionError(f"{name} has neither slopes nor pull, and its values cannot be differentiated: on the way from "
                                 f"the inputs to the values is something other than torch (numpy, .item(), .detach()). Write "
                                 f"geometry() and values() in torch, or write pull().")
        each = [torch.autograd.grad(K, x, c.expand_as(K), retain_graph=True)[0] for c in C.T]
    G = torch.stack(each, 1)
    if not G.isfinite().all():
        raise SelectionError(f"{name} has neither slopes nor pull, and differentiating its values gives NaN or Inf: often from "
                             f"the root of a distance of 0, of a point to itself. richter.learners.distances has a gradient of 0 "
                             f"there; or write slopes() or pull().")
    return G


@dataclass(frozen=True)
class Tunable(Kernel):
    """A kernel with a bandwidth L. None lets a learner choose it."""

    bandwidth: float | None = None
    # powers of 2, relative to the rule of thumb, to try first, because a local search may miss distant minima
    scanned: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        L = self.bandwidth
        if L is not None and not (isinstance(L, Real) and math.isfinite(L) and L > 0):
            raise SelectionError(f"{type(self).__name__}(bandwidth={L!r}): a positive number is needed, or None to have one "
                                 f"chosen by a learner.")

    @property
    def L(self) -> float:
        """Bandwidth; raise an error if it is not set."""
        if self.bandwidth is None:
            name = type(self).__name__
            raise SelectionError(f"{name}(): its bandwidth is not set. A learner chooses one; by itself the kernel needs "
                                 f"{name}(bandwidth=...), or {name}().fitted(x) for the rule of thumb.")
        return self.bandwidth

    @abstractmethod
    def typical(self, g: Geometry) -> float:
        """Bandwidth by a rule of thumb, from the geometry of the inputs with themselves."""

    def fitted(self: Self, x: ArrayLike) -> Self:
        """Return the kernel with the bandwidth of the rule for these inputs, if none was set."""
        if self.bandwidth is not None:
            return self
        X = to_tensor(x, "x")
        return self.at(self.typical(self.geometry(X, X)))

    def at(self: Self, bandwidth: float) -> Self:
        """Copy with this bandwidth."""
        return dataclasses.replace(self, bandwidth=bandwidth)
