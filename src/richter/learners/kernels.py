"""Built-in kernels.

    k = Laplace(bandwidth=3.0)
    k(x, z)                          # [n, m]
    k(x, z, metric=M)                # after the map x -> M^(1/2) x
    k.gradients(x, z)                # [n, m, d]: d k(x_i, z_j) / d x_i

Every kernel but ``LaplaceL1`` has grad_x k(x, z) = a(x, z) z + b(x, z) x with two numbers for each pair, its ``slopes``.
Therefore no closed form needs an array of pairs times coordinates. Where a kernel has a kink, at x = z, its gradient is set to 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from richter.core import SelectionError, parse_bytes
from richter.kernels.infinite import InfiniteLayers, image_kernel, recursion
from richter.learners.distances import distances
from richter.learners.kernel import Geometry, Kernel, Tunable


@dataclass(frozen=True)
class Radial(Tunable):
    """A function of the distance. The rule of thumb for the bandwidth is the median distance."""

    def geometry(self, x: Tensor, z: Tensor) -> Geometry:
        """Euclidean distances."""
        return distances(x, z)

    def typical(self, g: Geometry) -> float:
        """Median distance, the rule of thumb for the bandwidth."""
        away = g[g > 0]
        return away[:: max(1, len(away) // 10 ** 6)].median().item() if len(away) else 1.0


@dataclass(frozen=True)
class Laplace(Radial):
    """exp(-|x - z| / L)."""

    def values(self, g: Geometry) -> Tensor:
        """exp(-g / L) of the distances g."""
        return (g / -self.L).exp_()

    def nearest(self, g: Geometry) -> float:
        """Smallest positive distance, in bandwidths."""
        return torch.where(g > 0, g, math.inf).min().item() / self.L

    def slopes(self, g: Geometry, d: int) -> tuple[Tensor, float]:
        """Factors (a, b) of the gradient a (z + b x): the derivative over the distance, 0 at the kink, and -1."""
        a = torch.add(g.new_tensor(-math.log(self.L)), g, alpha=-1 / self.L).exp_().div_(g)
        return a.nan_to_num_(nan=math.nan, posinf=0.0), -1.0  # the kink, where g = 0


@dataclass(frozen=True)
class Gaussian(Radial):
    """exp(-|x - z|^2 / (2 L^2))."""

    scanned: ClassVar[tuple[int, ...]] = (0, -2)

    def values(self, g: Geometry) -> Tensor:
        """exp(-g^2 / (2 L^2)) of the distances g."""
        return g.square().div_(-2 * self.L ** 2).exp_()

    def slopes(self, g: Geometry, d: int) -> tuple[Tensor, float]:
        """Factors (a, b) of the gradient a (z + b x)."""
        return self.values(g).div_(self.L ** 2), -1.0


@dataclass(frozen=True)
class LaplaceL1(Radial):
    """exp(-sum_d |x_d - z_d| / L), a product over coordinates. Sums of its gradients take one pass for each coordinate."""

    def geometry(self, x: Tensor, z: Tensor) -> Geometry:
        """Distances in the L1 norm."""
        return torch.cdist(x, z, p=1)

    def values(self, g: Geometry) -> Tensor:
        """exp(-g / L) of the L1 distances g."""
        return (g / -self.L).exp_()

    def pull(self, x: Tensor, z: Tensor, g: Geometry, C: Tensor) -> Tensor:
        """Gradients of sum_m k(x, z_m) C_m in x, [n, c, d]."""
        K = self.values(g).div_(-self.L)
        return torch.stack([(K * torch.sign(x[:, d, None] - z[None, :, d])) @ C for d in range(x.shape[1])], 2)

    def pull_weighted(self, x: Tensor, z: Tensor, g: Geometry, weights: Tensor, C: Tensor) -> Tensor:
        """Gradients in x of the outputs, weighted and summed over outputs, [n, d]."""
        K = self.values(g).div_(-self.L).mul_(weights @ C.T)
        return torch.stack([(K * torch.sign(x[:, d, None] - z[None, :, d])).sum(1) for d in range(x.shape[1])], 1)


@dataclass(frozen=True)
class Quadratic(Kernel):
    """(x . z)^2."""

    homogeneous: ClassVar[bool] = True

    def geometry(self, x: Tensor, z: Tensor) -> Geometry:
        """Inner products."""
        return x @ z.T

    def values(self, g: Geometry) -> Tensor:
        """Squares of the inner products."""
        return g.square()

    def slopes(self, g: Geometry, d: int) -> tuple[Tensor, float]:
        """Factors (a, b) of the gradient a (z + b x)."""
        return 2 * g, 0.0


@dataclass(frozen=True)
class Exponential(Tunable):
    """exp(x . z / L^2). The rule of thumb for L is the root mean square norm."""

    scanned: ClassVar[tuple[int, ...]] = (0, -2)

    def geometry(self, x: Tensor, z: Tensor) -> Geometry:
        """Inner products."""
        return x @ z.T

    def values(self, g: Geometry) -> Tensor:
        """exp(g / L^2) of the inner products g."""
        return (g / self.L ** 2).exp_()

    def slopes(self, g: Geometry, d: int) -> tuple[Tensor, float]:
        """Factors (a, b) of the gradient a (z + b x)."""
        return self.values(g).div_(self.L ** 2), 0.0

    def typical(self, g: Geometry) -> float:
        """Root of the mean squared norm."""
        return max(g.diagonal().clamp(min=0).mean().item(), 1e-12) ** 0.5


@dataclass(frozen=True)
class NTK(Kernel):
    """Tangent kernel of an infinitely wide fully connected network; see ``richter.kernels.infinite``. The metric acts on its
    inputs, x -> M^(1/2) x."""

    depth: int = 1
    activation: Any = "relu"
    weight_var: float = 2.0
    bias_var: float = 0.0
    kind: ClassVar[Literal["ntk", "nngp"]] = "ntk"
    arrays: ClassVar[int] = 3

    def geometry(self, x: Tensor, z: Tensor) -> Geometry:
        """Inner products and squared norms over the dimension, [3, n, m]."""
        c = x @ z.T
        p, q = x.square().sum(1), z.square().sum(1)
        if z is x:
            c.diagonal().copy_(p)
        return torch.stack([c, p[:, None].expand_as(c), q[None].expand_as(c)]) / x.shape[1]

    def nearest(self, g: Geometry) -> float:
        """Smallest relative distance of two different inputs."""
        gap = ((g[1] + g[2] - 2 * g[0]) / (g[1] + g[2])).clamp(min=0)
        return torch.where(gap > 16 * torch.finfo(gap.dtype).eps, gap, math.inf).min().sqrt().item()

    def values(self, g: Geometry) -> Tensor:
        """Kernel by the recursion over layers."""
        return torch.cat([self._recursion(*part) for part in self._parts(g)])

    def slopes(self, g: Geometry, d: int) -> tuple[Tensor, Tensor]:
        """Factors (a, b) of the gradient a z + b x, from the recursion's derivatives by autograd."""
        slopes = []
        for part in self._parts(g):
            with torch.inference_mode(False), torch.enable_grad():
                c, p, q = (t.clone() for t in part)
                c.requires_grad_(), p.requires_grad_()
                slopes.append(torch.autograd.grad(self._recursion(c, p, q).sum(), (c, p), materialize_grads=True))
        a, b = (torch.cat(parts) for parts in zip(*slopes, strict=True))
        return a.div_(d), b.mul_(2 / d)

    def _recursion(self, c: Tensor, p: Tensor, q: Tensor) -> Tensor:
        """Kernel from inner products and squared norms."""
        return recursion(c, p, q, depth=self.depth, activation=self.activation, weight_var=self.weight_var,
                         bias_var=self.bias_var, kind=self.kind)

    @staticmethod
    def _parts(g: Geometry) -> tuple[Geometry, ...]:
        """Split the rows, because the recursion holds tens of arrays of their size."""
        return g.split(max(1, 2 ** 17 // max(1, g.shape[2])), 1)


@dataclass(frozen=True)
class NNGP(NTK):
    """Covariance kernel of an infinitely wide fully connected network."""

    kind: ClassVar[Literal["ntk", "nngp"]] = "nngp"


@dataclass(frozen=True)
class ConvolutionalNTK(Kernel):
    """Kernel of an infinitely wide convolutional network, for images that are given as rows: ``shape`` is (channels, height,
    width). See ``richter.kernels.infinite.convolutional``, also for what it costs."""

    shape: tuple[int, int, int]
    depth: int = 2
    activation: Any = "relu"
    weight_var: float = 2.0
    bias_var: float = 0.0
    width: int = 3
    pool: bool = False
    residual: bool = False
    kind: Literal["ntk", "nngp"] = "ntk"
    memory: str | float = "1GiB"

    def geometry(self, x: Tensor, z: Tensor) -> Geometry:
        layers = InfiniteLayers.make(self.depth, self.activation, self.weight_var, self.bias_var, self.kind, self.residual)
        a = self._images(x)
        return image_kernel(a, None if z is x else self._images(z), layers, width=self.width, pool=self.pool,
                            memory=parse_bytes(self.memory))

    def values(self, g: Geometry) -> Tensor:
        return g

    def _images(self, x: Tensor) -> Tensor:
        if x.shape[1] != math.prod(self.shape):
            raise SelectionError(f"rows have {x.shape[1]} columns, and images of shape {tuple(self.shape)} (channels, height, "
                                 f"width) have {math.prod(self.shape)} numbers. Flatten images with x.reshape(len(x), -1), and "
                                 f"give their shape.")
        return x.unflatten(1, self.shape)
