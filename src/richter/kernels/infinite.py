"""Kernels of infinitely wide networks in closed form: ``ntk`` (gradient descent) and ``nngp`` (the prior), of fully connected
networks and, with ``convolutional``, of convolutional ones.

    K = ntk(x, depth=2, activation="relu", weight_var=2.0, bias_var=0.1)
    K = convolutional(images, depth=3, kind="ntk", pool=True, weight_var=2.0, memory="1GiB")

A layer is z = sqrt(weight_var / d_in) W h + sqrt(bias_var) b with all entries of W and b N(0, 1) and trained (the NTK
parametrisation); ``depth`` hidden layers are followed by a read-out of the same kind. With (u, v) ~ N(0, [[q1, c], [c, q2]]), an
activation enters through its duals k = E[phi(u) phi(v)] and k' = E[phi'(u) phi'(v)] alone. With ``residual``, every hidden layer
but the first adds to its input: z + W phi(z) + b.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from richter.core import MemoryBudgetError, SelectionError, parse_bytes, show_bytes, unknown
from richter.core.arrays import Array, ArrayLike, like, to_tensor
from richter.core.values import progress

Dual = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # c, q1, q2 -> k, k'; elementwise, and symmetric in q1, q2
Mix = Callable[[Tensor], Tensor]  # how a layer averages over pixels
Kind = Literal["ntk", "nngp"]
BLOCK = 2**16  # entries (pairs of inputs, times pixels) that are computed at once: they fit the cache of a processor
HELD = 16  # arrays of their size that a step of the recursion holds


def ntk(x: ArrayLike, x2: ArrayLike | None = None, *, depth: int, activation: str | Dual = "relu", weight_var: float = 1.0,
        bias_var: float = 0.0, residual: bool = False) -> Array:
    """The neural tangent kernel [n,m] of one output, of inputs x [n,d] and x2 [m,d] (x itself if None), in float64.

    ``depth`` is the number of hidden layers, 0 a linear model. ``activation`` is a name in ``ACTIVATIONS``, ``LeakyRelu(slope)``
    or any function (c, q1, q2) -> (k, k'). For gradients see ``recursion``.
    """
    return _kernel(x, x2, InfiniteLayers.make(depth, activation, weight_var, bias_var, "ntk", residual))


def nngp(x: ArrayLike, x2: ArrayLike | None = None, *, depth: int, activation: str | Dual = "relu", weight_var: float = 1.0,
         bias_var: float = 0.0, residual: bool = False) -> Array:
    """E[f(x) f(x')] [n,m] of one output at initialisation, where the network is a Gaussian process; arguments as of ``ntk``."""
    return _kernel(x, x2, InfiniteLayers.make(depth, activation, weight_var, bias_var, "nngp", residual))


def convolutional(x: ArrayLike, x2: ArrayLike | None = None, *, depth: int, kind: Kind = "ntk", activation: str | Dual = "relu",
                  weight_var: float = 1.0, bias_var: float = 0.0, width: int = 3, pool: bool = False, residual: bool = False,
                  memory: str | float = "1GiB") -> Array:
    """The kernel [n,m] of a network of ``depth`` convolutions for images x [n,c,h,w] and x2 [m,c,h,w] (x itself if None).

    A convolution has filters of ``width`` x ``width`` pixels, stride 1, and zeros around the image. The read-out takes every
    pixel by itself (n m h w numbers for each layer), or with ``pool`` their mean (n m (h w)^2 numbers). Pairs of images are
    computed in blocks, which with the result stay within ``memory``; equal pairs are computed once.
    """
    layers = InfiniteLayers.make(depth, activation, weight_var, bias_var, kind, residual)
    if depth < 1:
        raise SelectionError(f"depth={depth}: it counts convolutions, at least one. kernels.infinite.ntk(x.flatten(1), depth=0) "
                             f"is the kernel of a linear model.")
    if isinstance(width, bool) or not isinstance(width, (int, np.integer)) or width < 1 or width % 2 == 0:
        raise SelectionError(f"width={width!r}: a filter is an odd number of pixels wide, so that it has a middle.")
    a = _images(to_tensor(x, "x"), "x")
    b = None if x2 is None else _images(to_tensor(x2, "x2"), "x2").to(a.device)
    if b is not None and a.shape[1:] != b.shape[1:]:
        raise SelectionError(f"x has images of {tuple(a.shape[1:])} and x2 of {tuple(b.shape[1:])} (channels, height, width): a "
                             f"kernel compares inputs of one network. Give both with the same shape.")
    return like(image_kernel(a, b, layers, width=int(width), pool=pool, memory=parse_bytes(memory)), x)


def recursion(c: Float[Tensor, "*nm"], q1: Float[Tensor, "*nm1"], q2: Float[Tensor, "*nm2"], *, depth: int,
              activation: str | Dual = "relu", weight_var: float = 1.0, bias_var: float = 0.0, kind: Kind = "ntk",
              residual: bool = False) -> Float[Tensor, "*nm"]:
    """The kernel as an elementwise function of c = x.x'/d, q1 = x.x/d and q2 = x'.x'/d (shapes that broadcast to c's).

    c <- w k(c) + b,   q <- w k(q, q, q) + b,   Theta <- c + w k' Theta;   c = Theta = w c + b at the start.

    Differentiable in c, q1 and q2, with finite gradients. At parallel inputs (c^2 = q1 q2 up to rounding) k' of the ReLU family
    has a kink, and its derivative counts as 0 there; all else is exact. Where x and x' are one input, set c to q, so that no
    rounding comes between them.
    """
    return InfiniteLayers.make(depth, activation, weight_var, bias_var, kind, residual)(c, q1, q2)


def _same(z: Tensor) -> Tensor:
    return z


@dataclass(frozen=True)
class InfiniteLayers:
    """Layers of an infinitely wide network, as a map from the products of two inputs to their kernel."""

    depth: int
    dual: Dual
    weight_var: float
    bias_var: float
    kind: Kind
    residual: bool

    def __call__(self, c: Tensor, q1: Tensor, q2: Tensor, mix: Mix = _same, mix1: Mix = _same, mix2: Mix = _same,
                 read: Mix = _same) -> Tensor:
        """Return the kernel. ``mix``, ``mix1``, ``mix2``: how a layer averages products, and each input's squares, over pixels;
        ``read``: how the read-out does."""
        w, b = self.weight_var, self.bias_var
        if not self.depth:
            return w * read(c) + b
        c, q1, q2 = w * mix(c) + b, w * mix1(q1) + b, w * mix2(q2) + b
        theta = c
        for layer in range(self.depth):
            last = layer == self.depth - 1
            skip, average = self.residual and not last, read if last else mix
            k, k_dot = self.dual(c, q1, q2)
            if not last:
                q1, q2 = ((q if skip else 0) + w * m(self.dual(q, q, q)[0]) + b for q, m in ((q1, mix1), (q2, mix2)))
            branch = w * average(k) + b
            if self.kind == "ntk":
                theta = (theta if skip else 0) + branch + w * average(k_dot * theta)
            c = (c if skip else 0) + branch
        return theta if self.kind == "ntk" else c

    @classmethod
    def make(cls, depth: int, activation: str | Dual, weight_var: float, bias_var: float, kind: str,
             residual: bool) -> InfiniteLayers:
        """Make layers when all settings make sense."""
        if isinstance(depth, bool) or not isinstance(depth, (int, np.integer)) or depth < 0:
            raise SelectionError(f"depth={depth!r}: it counts hidden layers. Give a whole number, 0 for a linear model.")
        for name, value in (("weight_var", weight_var), ("bias_var", bias_var)):
            if not (math.isfinite(value) and value >= 0):
                raise SelectionError(f"{name}={value!r} is a variance (the square of sigma). Give a finite number, 0 or larger.")
        if kind not in ("ntk", "nngp"):
            raise unknown("richter.kernels.infinite", "kind", str(kind), ("ntk", "nngp"))
        if not callable(activation) and activation not in ACTIVATIONS:
            raise unknown("richter.kernels.infinite", "activation", str(activation), ACTIVATIONS)
        dual = activation if callable(activation) else ACTIVATIONS[activation]
        return cls(int(depth), dual, weight_var, bias_var, "ntk" if kind == "ntk" else "nngp", residual)


# ------------------------------------------------------------------------------------------------ images


def image_kernel(a: Float[Tensor, "n c h w"], b: Float[Tensor, "m c h w"] | None, layers: InfiniteLayers, *, width: int,
                 pool: bool, memory: int) -> Float[Tensor, "n m"]:
    """Return the kernel of two stacks of images (b None: of a with itself), block by block. Differentiable in the images."""
    one = b is None
    b = a if b is None else b
    n, m, pixels = len(a), len(b), a.shape[2] * a.shape[3]
    each = pixels**2 if pool else pixels
    held, result = HELD * each * a.element_size(), n * m * a.element_size()
    if result + held > memory:
        raise MemoryBudgetError(f"memory={show_bytes(memory)} cannot hold the kernel of {n:,} x {m:,} images and what one pair "
                                f"of {pixels} pixels needs. The smallest that works is {show_bytes(result + held)}.")
    count = max(1, min(BLOCK // each, (memory - result) // held))  # pairs at once
    rows = max(1, min(n, math.isqrt(count)))
    columns = rows if one else max(1, min(m, count // rows))
    qa, qb = (t.square().mean(1) for t in (a, b))
    compute, K = _pooled if pool else _flattened, a.new_empty(n, m)
    for start in progress(range(0, n, rows), title=f"kernel of {n:,} x {m:,} images", unit="rows"):
        i = slice(start, start + rows)
        for begin in range(start if one else 0, m, columns):
            j = slice(begin, begin + columns)
            part = compute(a[i], b[j], qa[i], qb[j], layers, width)
            K[i, j] = (part + part.T) / 2 if one and begin == start else part
            if one and begin > start:
                K[j, i] = part.T
    if not torch.isfinite(K).all():
        raise SelectionError(f"the kernel overflows at depth {layers.depth} with weight_var={layers.weight_var}. Scale the "
                             f"images, or take a smaller weight_var.")
    return K


def _flattened(a: Tensor, b: Tensor, qa: Tensor, qb: Tensor, layers: InfiniteLayers, width: int) -> Float[Tensor, "r s"]:
    """Return a block of the kernel whose read-out takes each pixel by itself: only equal pixels of two images are compared."""
    c = torch.einsum("ichw,jchw->ijhw", a, b) / a.shape[1]

    def average(z: Tensor) -> Tensor:
        return F.avg_pool2d(z, width, 1, width // 2)  # zeros around the image count

    return layers(c, qa[:, None], qb[None], average, average, average, lambda z: z.mean((2, 3)))


def _pooled(a: Tensor, b: Tensor, qa: Tensor, qb: Tensor, layers: InfiniteLayers, width: int) -> Float[Tensor, "r s"]:
    """Return a block of the kernel whose read-out takes the mean over pixels: all pairs of pixels are compared."""
    c = torch.einsum("ichw,jcuv->ijhwuv", a, b) / a.shape[1]

    def average(z: Tensor) -> Tensor:  # z[h, w, u, v] over equal shifts of both pixels
        return _along(_along(z, 2, 4, width), 3, 5, width) / width**2

    return layers(c, qa[:, None, :, :, None, None], qb[None, :, None, None],
                  average, lambda q: _box(q, (2, 3), width), lambda q: _box(q, (4, 5), width), lambda z: z.mean((2, 3, 4, 5)))


def _along(z: Tensor, first: int, second: int, width: int) -> Tensor:
    """Return the sum of z over equal shifts of two axes, by at most width // 2 either way; zero outside."""
    total, size = z.clone(), z.shape[first]
    for s in range(1, min(width // 2, size - 1) + 1):
        def moved(t: Tensor, start: int, s: int = s) -> Tensor:
            return t.narrow(first, start, size - s).narrow(second, start, size - s)

        moved(total, 0).add_(moved(z, s))
        moved(total, s).add_(moved(z, 0))
    return total


def _box(q: Tensor, axes: tuple[int, int], width: int) -> Tensor:
    """Return the mean of q over windows of two of its axes; all others have one entry each, or are in front."""
    shape = q.shape
    return F.avg_pool2d(q.reshape(-1, 1, shape[axes[0]], shape[axes[1]]), width, 1, width // 2).reshape(shape)


# ------------------------------------------------------------------------------------------------ duals


@dataclass(frozen=True)
class LeakyRelu:
    """phi(u) = max(u, 0) + slope min(u, 0): relu for slope 0, linear for 1, the modulus for -1.

    k = (1 - a)^2 (r + (pi - t) c) / (2 pi) + a c   and   k' = (1 - a)^2 (pi - t) / (2 pi) + a,
    where r = sqrt(q1 q2 - c^2) and t = atan2(r, c) is the angle of the inputs; an input of zero is orthogonal to all.
    """

    slope: float = 0.01

    def __call__(self, c: Tensor, q1: Tensor, q2: Tensor) -> tuple[Tensor, Tensor]:
        r2 = q1 * q2 - c * c
        parallel = r2 <= max(1e-13, 32 * torch.finfo(c.dtype).eps) * (q1 * q2)  # the rounding of long sums
        r = torch.where(parallel, 1.0, r2).sqrt()  # the 1 is never read, and its gradient is 0 and not 0 x inf
        t = torch.where(parallel, (math.pi / 2) * (1 - c.detach().sign()), torch.atan2(r, c))
        share = (1 - self.slope) ** 2 / (2 * math.pi)
        k = share * (torch.where(parallel, 0.0, r) + (math.pi - t) * c) + self.slope * c
        return k, share * (math.pi - t) + self.slope


def erf(c: Tensor, q1: Tensor, q2: Tensor) -> tuple[Tensor, Tensor]:
    """k = (2/pi) arcsin(2c / sqrt((1 + 2 q1)(1 + 2 q2))) and k' = (4/pi) / sqrt((1 + 2 q1)(1 + 2 q2) - 4 c^2)."""
    A = (1 + 2 * (q1 + q2) + 4 * _determinant(c, q1, q2)).sqrt()
    return (2 / math.pi) * torch.atan2(2 * c, A), (4 / math.pi) / A


def gelu(c: Tensor, q1: Tensor, q2: Tensor) -> tuple[Tensor, Tensor]:
    """phi(u) = u P(z < u), z ~ N(0, 1). With A^2 = (1 + q1)(1 + q2) - c^2, G = 1/4 + atan2(c, A) / (2 pi) and
    B = 1 / (1 + q1) + 1 / (1 + q2):   k = c G + (q1 q2 - c^2 + c^2 B) / (2 pi A),   k' = G + c (B + 1 / A^2) / (2 pi A)."""
    det = _determinant(c, q1, q2)
    A2 = 1 + (q1 + q2) + det
    A = A2.sqrt()
    G = 0.25 + torch.atan2(c, A) / (2 * math.pi)
    B = 1 / (1 + q1) + 1 / (1 + q2)
    return c * G + (det + c * c * B) / (2 * math.pi * A), G + c * (B + 1 / A2) / (2 * math.pi * A)


def quadratic(c: Tensor, q1: Tensor, q2: Tensor) -> tuple[Tensor, Tensor]:
    """phi(u) = u^2:   k = q1 q2 + 2 c^2,   k' = 4 c. It explodes with depth unless weight_var is small."""
    return q1 * q2 + 2 * c * c, 4 * c


def sine(c: Tensor, q1: Tensor, q2: Tensor) -> tuple[Tensor, Tensor]:
    """phi(u) = sin u:   k = exp(-(q1 + q2) / 2) sinh c,   k' = exp(-(q1 + q2) / 2) cosh c."""
    near, far = (c - (q1 + q2) / 2).exp(), (-c - (q1 + q2) / 2).exp()
    return (near - far) / 2, (near + far) / 2


def cosine(c: Tensor, q1: Tensor, q2: Tensor) -> tuple[Tensor, Tensor]:
    """phi(u) = cos u:   the duals of the sine, exchanged."""
    k, k_dot = sine(c, q1, q2)
    return k_dot, k


ACTIVATIONS: dict[str, Dual] = {"relu": LeakyRelu(0.0), "leaky_relu": LeakyRelu(), "abs": LeakyRelu(-1.0),
                                "linear": LeakyRelu(1.0), "erf": erf, "gelu": gelu, "quadratic": quadratic, "sine": sine,
                                "cosine": cosine}


def _determinant(c: Tensor, q1: Tensor, q2: Tensor) -> Tensor:
    """q1 q2 - c^2, not negative by rounding; its gradient is that of the formula everywhere."""
    det = q1 * q2 - c * c
    return det + (det.clamp(min=0) - det).detach()


# ------------------------------------------------------------------------------------------------ arguments


def _kernel(x: ArrayLike, x2: ArrayLike | None, layers: InfiniteLayers) -> Array:
    """Infinite-width kernel of the rows of x and x2, in blocks of rows; equal rows get equal numbers."""
    a = _inputs(to_tensor(x, "x"), "x")
    b = a if x2 is None else _inputs(to_tensor(x2, "x2"), "x2").to(a.device)
    if a.shape[1] != b.shape[1]:
        raise SelectionError(f"x has {a.shape[1]} columns and x2 has {b.shape[1]}: a kernel compares inputs of one network. "
                             f"Give both with the same columns.")
    rows, same = torch.unique(a if x2 is None else torch.cat([a, b]), dim=0, return_inverse=True)
    q = rows.square().sum(1) / a.shape[1]
    i, j = same[:len(a)], same[-len(b):]
    K = a @ b.T / a.shape[1]
    for part in _rows(len(a), len(b)):  # in place: a block of rows at a time
        q1, q2 = q[i[part]][:, None], q[j][None]
        c = torch.where(i[part, None] == j, q1, K[part])  # equal inputs are so exactly, however a product is rounded
        K[part] = layers(c, q1, q2)
    if not torch.isfinite(K).all():
        raise SelectionError(f"the kernel overflows at depth {layers.depth} with weight_var={layers.weight_var} and inputs of up "
                             f"to |x|^2 / d = {q.max().item():.2g}. Scale the inputs, or take a smaller weight_var.")
    if x2 is None:
        for part in _rows(len(a), len(a)):  # symmetric to the last bit
            mean = (K[part, part.start:] + K[part.start:, part].T).div_(2)
            K[part, part.start:], K[part.start:, part] = mean, mean.T
    return like(K, x)


def _rows(n: int, m: int) -> Iterator[slice]:
    """Yield blocks of the rows of a kernel [n, m], with a progress bar."""
    step = max(1, 4 * BLOCK // m)
    yield from progress([slice(i, min(i + step, n)) for i in range(0, n, step)], title=f"kernel of {n:,} x {m:,} inputs",
                        unit="block")


def _inputs(x: Tensor, name: str) -> Float[Tensor, "n d"]:
    """Return inputs if they are rows [n, d]; otherwise raise an error."""
    if x.dim() != 2 or 0 in x.shape:
        raise SelectionError(f"{name} has shape {tuple(x.shape)}: a fully connected network reads rows [n, d], at least one, of "
                             f"at least one number. Flatten images, and write one input as x[None].")
    return x


def _images(x: Tensor, name: str) -> Float[Tensor, "n c h w"]:
    """Return images if they are [n, c, h, w]; otherwise raise an error."""
    if x.dim() != 4 or 0 in x.shape:
        raise SelectionError(f"{name} has shape {tuple(x.shape)}: a convolutional network reads images [n, channels, height, "
                             f"width]. Write one image as x[None], and grey ones as x[:, None].")
    return x
