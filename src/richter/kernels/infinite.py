"""Kernels of infinitely wide fully connected networks in closed form: ``ntk`` (gradient descent) and ``nngp`` (the prior).

    K = ntk(x, depth=2, activation="relu", weight_var=2.0, bias_var=0.1)

A layer is z = sqrt(weight_var / d_in) W h + sqrt(bias_var) b with all entries of W and b N(0, 1) and trained (the NTK
parametrisation); ``depth`` hidden layers are followed by a read-out of the same kind. With (u, v) ~ N(0, [[q1, c], [c, q2]]), an
activation enters through its duals k = E[phi(u) phi(v)] and k' = E[phi'(u) phi'(v)] alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import SelectionError, unknown
from richter.core.arrays import Array, ArrayLike, like, to_tensor

Dual = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # c, q1, q2 -> k, k'; elementwise, and symmetric in q1, q2


def ntk(x: ArrayLike, x2: ArrayLike | None = None, *, depth: int, activation: str | Dual = "relu", weight_var: float = 1.0,
        bias_var: float = 0.0) -> Array:
    """The neural tangent kernel [n,m] of one output, of inputs x [n,d] and x2 [m,d] (x itself if None), in float64.

    ``depth`` is the number of hidden layers, 0 a linear model. ``activation`` is a name in ``ACTIVATIONS``, ``LeakyRelu(slope)``
    or any function (c, q1, q2) -> (k, k'). For gradients see ``recursion``.
    """
    return _kernel(x, x2, depth, activation, weight_var, bias_var, "ntk")


def nngp(x: ArrayLike, x2: ArrayLike | None = None, *, depth: int, activation: str | Dual = "relu", weight_var: float = 1.0,
         bias_var: float = 0.0) -> Array:
    """E[f(x) f(x')] [n,m] of one output at initialisation, where the network is a Gaussian process; arguments as of ``ntk``."""
    return _kernel(x, x2, depth, activation, weight_var, bias_var, "nngp")


def recursion(c: Float[Tensor, "*nm"], q1: Float[Tensor, "*nm1"], q2: Float[Tensor, "*nm2"], *, depth: int,
              activation: str | Dual = "relu", weight_var: float = 1.0, bias_var: float = 0.0,
              kind: Literal["ntk", "nngp"] = "ntk") -> Float[Tensor, "*nm"]:
    """The kernel as an elementwise function of c = x.x'/d, q1 = x.x/d and q2 = x'.x'/d (shapes that broadcast to c's).

    c <- w k(c) + b,   q <- w k(q, q, q) + b,   Theta <- c + w k' Theta;   c = Theta = w c + b at the start.

    Differentiable in c, q1 and q2, with finite gradients. At parallel inputs (c^2 = q1 q2 up to rounding) k' of the ReLU family
    has a kink, and its derivative counts as 0 there; all else is exact. Where x and x' are one input, set c to q, so that no
    rounding comes between them.
    """
    dual = _settings(depth, activation, weight_var, bias_var, kind)
    c, q1, q2 = (weight_var * z + bias_var for z in (c, q1, q2))
    theta = c
    for _ in range(depth):
        k, k_dot = dual(c, q1, q2)
        q1, q2 = (weight_var * dual(q, q, q)[0] + bias_var for q in (q1, q2))
        c = weight_var * k + bias_var
        theta = c + weight_var * k_dot * theta if kind == "ntk" else c
    return theta


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


ACTIVATIONS: dict[str, Dual] = {"relu": LeakyRelu(0.0), "leaky_relu": LeakyRelu(), "abs": LeakyRelu(-1.0),
                                "linear": LeakyRelu(1.0), "erf": erf, "gelu": gelu, "quadratic": quadratic}


def _determinant(c: Tensor, q1: Tensor, q2: Tensor) -> Tensor:
    """q1 q2 - c^2, not negative by rounding; its gradient is that of the formula everywhere."""
    det = q1 * q2 - c * c
    return det + (det.clamp(min=0) - det).detach()


# ------------------------------------------------------------------------------------------------ arguments


def _kernel(x: ArrayLike, x2: ArrayLike | None, depth: int, activation: str | Dual, weight_var: float, bias_var: float,
            kind: Literal["ntk", "nngp"]) -> Array:
    """Infinite-width kernel of the rows of x and x2, layer by layer; equal rows are computed once."""
    a = _inputs(to_tensor(x, "x"), "x")
    b = a if x2 is None else _inputs(to_tensor(x2, "x2"), "x2").to(a.device)
    if a.shape[1] != b.shape[1]:
        raise SelectionError(f"x has {a.shape[1]} columns and x2 has {b.shape[1]}: a kernel compares inputs of one network. "
                             f"Give both with the same columns.")
    rows, same = torch.unique(a if x2 is None else torch.cat([a, b]), dim=0, return_inverse=True)
    q = rows.square().sum(1) / a.shape[1]
    i, j = same[:len(a)], same[-len(b):]
    q1, q2 = q[i][:, None], q[j][None]
    c = torch.where(i[:, None] == j, q1, a @ b.T / a.shape[1])  # equal inputs are so exactly, however a product is rounded
    K = recursion(c, q1, q2, depth=depth, activation=activation, weight_var=weight_var, bias_var=bias_var, kind=kind)
    if not torch.isfinite(K).all():
        raise SelectionError(f"the kernel overflows at depth {depth} with weight_var={weight_var} and inputs of up to "
                             f"|x|^2 / d = {q.max().item():.2g}. Scale the inputs, or take a smaller weight_var.")
    return like(K if x2 is not None else (K + K.T) / 2, x)


def _inputs(x: Tensor, name: str) -> Float[Tensor, "n d"]:
    """Return inputs if they are rows [n, d]; otherwise raise an error."""
    if x.dim() != 2 or 0 in x.shape:
        raise SelectionError(f"{name} has shape {tuple(x.shape)}: a fully connected network reads rows [n, d], at least one, of "
                             f"at least one number. Flatten images, and write one input as x[None].")
    return x


def _settings(depth: int, activation: str | Dual, weight_var: float, bias_var: float, kind: str) -> Dual:
    """The dual of the activation, when all settings make sense."""
    if isinstance(depth, bool) or not isinstance(depth, (int, np.integer)) or depth < 0:
        raise SelectionError(f"depth={depth!r}: it counts hidden layers. Give a whole number, 0 for a linear model.")
    for name, value in (("weight_var", weight_var), ("bias_var", bias_var)):
        if not (math.isfinite(value) and value >= 0):
            raise SelectionError(f"{name}={value!r} is a variance (the square of sigma). Give a finite number, 0 or larger.")
    if kind not in ("ntk", "nngp"):
        raise unknown("richter.kernels.infinite.recursion", "kind", kind, ("ntk", "nngp"))
    if callable(activation):
        return activation
    if activation not in ACTIVATIONS:
        raise unknown("richter.kernels.infinite", "activation", str(activation), ACTIVATIONS)
    return ACTIVATIONS[activation]
