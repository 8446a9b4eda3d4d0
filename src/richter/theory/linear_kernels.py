"""Tangent kernels of linear networks: the final kernel of two layers, and why deep ones cannot specialise.  [rapid, Sec. 5, A.3]

Weights are N(0, sigma^2) and each layer divides by sqrt(fan_in); the inputs are the rows of X. Two layers, W [h, d] and V [h]:
    r = V^T W x / sqrt(h d),   K = (X W^T W X^T + |V|^2 X X^T) / (h d),
with 1/N^2 in front in the paper's square case h = d = N. The component of W along V determines the outputs r, at any time:
    K = r r^T / |V|^2 + X W_p^T W_p X^T / (h d) + |V|^2 X X^T / (h d),   W_p = (I - V V^T / |V|^2) W.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import Ref, SelectionError
from richter.core.arrays import Array, ArrayLike
from richter.theory.arrays import column, like, normal, read
from richter.theory.frame import Theory

# ------------------------------------------------------------------------------------------------ two layers


@dataclass(frozen=True)
class Decomposition:
    """The three parts [n, n] of a two-layer linear network's kernel, and the network's outputs r [n].  [Eq. (13), at any time]"""

    task: Array  # r r^T / |V|^2; at the end of training r = y
    rest: Array  # X W_p^T W_p X^T / (h d), which weight decay removes
    bulk: Array  # |V|^2 X X^T / (h d)
    outputs: Array

    @property
    def kernel(self) -> Array:
        """Kernel, the sum of its three parts."""
        return self.task + self.rest + self.bulk


def decompose(W: ArrayLike, V: ArrayLike, X: ArrayLike) -> Decomposition:
    """Decompose the kernel of the network with weights W [h, d] and V [h] on inputs X [n, d]."""
    W_, V_, X_ = read(W=(W, "h d"), V=(column(V), "h"), X=(X, "n d"))
    if not V_.any():
        raise SelectionError("V is zero: no part of W lies along it, and the kernel X W^T W X^T / (h d) has no such parts.")
    scale, size = 1 / W_.numel(), V_.square().sum()
    along = V_ @ W_
    r = X_ @ along * math.sqrt(scale)
    Z = X_ @ (W_ - torch.outer(V_, along) / size).T
    task, rest, bulk = torch.outer(r, r) / size, scale * Z @ Z.T, scale * size * X_ @ X_.T
    return Decomposition(like(task, W), like(rest, W), like(bulk, W), like(r, W))


def two_layer(W: ArrayLike, V: ArrayLike, X: ArrayLike, *, exponent: float = 1.0) -> Array:
    """K [n, n] of the two-layer network, as the sum of its parts. ``exponent``: of |V|^2 in the bulk; tests perturb it."""
    parts = decompose(W, V, X)
    return parts.task + parts.rest + parts.bulk * float(read(V=(column(V), "h"))[0].square().sum()) ** (exponent - 1)


def final_kernel(y: ArrayLike, X: ArrayLike, size: float, width: int) -> Array:
    """Return y y^T / |V|^2 + |V|^2 X X^T / (h d) [n, n] with ``size`` = |V|^2: the final kernel if W_p vanishes, by weight decay
    or from a small start.  [Eq. (14); the paper's Sigma is X X^T / (h d)]"""
    y_, X_ = read(y=(column(y), "n"), X=(X, "n d"))
    if not (math.isfinite(size) and size > 0):
        raise SelectionError(f"size={size!r}: |V|^2 at the end of training is needed, above 0.")
    return like(torch.outer(y_, y_) / size + size * X_ @ X_.T / (width * X_.shape[1]), y)


def rich_size(s: ArrayLike, width: int) -> float:
    """Final |V|^2 -> sqrt(h d) |s| from a small start, for labels y = X s. Gradient flow conserves W W^T - V V^T, which was
    nearly zero, so |W| = |V|, and V^T W / sqrt(h d) = s."""
    (s_,) = read(s=(column(s), "d"))
    return math.sqrt(width * len(s_)) * s_.norm().item()


def bulk_coefficient(K0: ArrayLike, X: ArrayLike, width: int) -> float:
    """Least-squares alpha_K of K0 ~ alpha_K X X^T / (h d); 2 h sigma^2 on average, up to 1/h.  [Eq. (14)]"""
    K, X_ = read(K0=(K0, "n n"), X=(X, "n d"))
    S = X_ @ X_.T / (width * X_.shape[1])
    return ((K * S).sum() / S.square().sum()).item()


# ------------------------------------------------------------------------------------------------ any depth, several outputs


def pair_kernels(weights: Sequence[ArrayLike], X: ArrayLike, *, shift: int = 0) -> Array:
    """K^{c,c'} for every pair of outputs [n, k, n, k] of a deep linear network. ``weights`` [d_out, d_in], first layer first, the
    read-out [k, d_out] last.  [Eq. (43), corrected]

    K^{c,c'} = (delta_cc' f_L f_L^T + sum_{l<L} alpha_l(c,c') f_l f_l^T) / prod fan_in, with f_l [n, d_l] the input of layer l+1
    and alpha_l = V W^L ... W^{l+2} (V W^L ... W^{l+2})^T. ``shift`` = 1 also includes W^{l+1}, as printed (square layers
    only)."""
    W, X_ = _network(weights, X)
    alphas, f = coefficients(W, shift=shift), _read_by_layers(W, X_)
    n, k = len(X_), len(W[-1])
    K = X_.new_zeros(n, k, n, k)
    for alpha, h in zip(alphas, f, strict=True):
        K += torch.einsum("cb,nm->ncmb", alpha, h @ h.T)
    return like(K / math.prod(w.shape[1] for w in W), weights)


def coefficients(weights: Sequence[ArrayLike], *, shift: int = 0) -> Float[Tensor, "l k k"]:
    """Return alpha_l(c, c') of layers 0 .. L-1, and delta_cc' for the read-out."""
    W = _chain(weights)
    back = torch.eye(len(W[-1]), dtype=W[-1].dtype, device=W[-1].device)
    alphas = [back]
    for i in range(len(W) - 1, 0, -1):
        back = back @ W[i]
        shifted = back @ W[i - 1] if shift else back
        alphas.append(shifted @ shifted.T)
    return torch.stack(alphas[::-1])


def specialisation_bound(weights: Sequence[ArrayLike]) -> float:
    """Bound rho >= 1: every entry of the specialisation matrix of this linear network lies in [1/rho, rho], for all inputs and
    labels.

    The kernels of all outputs are sums of the same positive semi-definite matrices f_l f_l^T with weights alpha_l(c, c) >= 0.
    With m = min_l and M = max_l of alpha_l(c, c) / alpha_l(b, b), m K^bb <= K^cc <= M K^bb holds in every y^T K y and in norm. So
    A(K^cc, y) <= (M / m) A(K^bb, y) for every y. If the alpha_l are equal for all outputs, e.g. by symmetry, rho = 1: all outputs
    share one kernel. Only layers, not examples, can make outputs differ."""
    diagonal = coefficients(weights).diagonal(dim1=1, dim2=2)  # l, k
    if (diagonal == 0).any():
        return math.inf
    ratios = diagonal[:, :, None] / diagonal[:, None, :]
    return (ratios.amax(0) / ratios.amin(0)).max().item()


def _network(weights: Sequence[ArrayLike], X: ArrayLike) -> tuple[list[Tensor], Float[Tensor, "n d"]]:
    """Weights and inputs as tensors on one device."""
    (X_,) = read(X=(X, "n d"))
    return [w.to(X_.device) for w in _chain(weights, X_)], X_


def _chain(weights: Sequence[ArrayLike], X: Float[Tensor, "n d"] | None = None) -> list[Tensor]:
    """Read weights whose shapes fit to one another, and to the inputs."""
    W = [read(**{f"weights[{i}]": (w, "d_out d_in")})[0] for i, w in enumerate(weights)]
    if not W or any(b.shape[1] != len(a) for a, b in itertools.pairwise(W)) or (X is not None and W[0].shape[1] != X.shape[1]):
        inputs = "" if X is None else f" and X {tuple(X.shape)}"
        raise SelectionError(f"weights {[tuple(w.shape) for w in W]} [d_out, d_in]{inputs} do not make a network: each layer "
                             f"reads what the one before it writes.")
    return W


def _read_by_layers(W: list[Tensor], X: Float[Tensor, "n d"]) -> list[Tensor]:
    """Inputs of all layers and the outputs: f_0 = X, f_1 = X W_1^T, ... f_L."""
    reads = [X]
    for w in W[:-1]:
        reads.append(reads[-1] @ w.T)
    return reads


# ------------------------------------------------------------------------------------------------ simulate


def simulate_two_layer(W: ArrayLike, V: ArrayLike, X: ArrayLike) -> Array:
    """Tangent kernel of the actual network, from the gradient of each output."""
    W_, V_, X_ = read(W=(W, "h d"), V=(column(V), "h"), X=(X, "n d"))
    return like(_jacobian_kernel([W_, V_[None]], X_)[:, 0, :, 0], W)


def simulate_pair_kernels(weights: Sequence[ArrayLike], X: ArrayLike) -> Array:
    """Tangent kernels of a deep network from gradients, for every pair of outputs [n, k, n, k]."""
    (X_,) = read(X=(X, "n d"))
    return like(_jacobian_kernel([read(W=(w, "d_out d_in"))[0].to(X_.device) for w in weights], X_), weights)


def _jacobian_kernel(weights: list[Tensor], X: Tensor) -> Tensor:
    """Tangent kernel from the Jacobian by autograd, [n, c, m, b]."""
    with torch.enable_grad():
        live = [w.detach().requires_grad_() for w in weights]
        f = X
        for w in live:
            f = f @ w.T / math.sqrt(w.shape[1])
        rows = [torch.cat([g.flatten() for g in torch.autograd.grad(one, live, retain_graph=True)]) for one in f.flatten()]
    J = torch.stack(rows).reshape(*f.shape, -1)
    return torch.einsum("ncp,mbp->ncmb", J, J)


# ------------------------------------------------------------------------------------------------ theories


def _deep() -> list[tuple[Any, ...]]:
    """Cases (networks of several depths) on which theory and simulation are compared."""
    return [([normal(o, i, seed=o) for i, o in itertools.pairwise(sizes)], normal(5, sizes[0]))
            for sizes in ((4, 4, 3), (4, 4, 4, 4, 2))]


THEORIES = (
    Theory("linear_kernels.two_layer", ref=Ref("rapid", "Sec. 5, Eq. (13), corrected"),
           title="the kernel of a two-layer linear network: task, bulk and rest",
           predict=two_layer, simulate=simulate_two_layer,
           cases=lambda: [(normal(h, d), normal(h, seed=1), normal(6, d, seed=2)) for h, d in ((4, 4), (7, 3))],
           tolerance=1e-10, perturb={"exponent": 1.001}),
    Theory("linear_kernels.pair_kernels", ref=Ref("rapid", "App. A.3, Eq. (43), corrected"),
           title="the kernels of every pair of outputs of a deep linear network",
           predict=pair_kernels, simulate=simulate_pair_kernels, cases=_deep, tolerance=1e-10, perturb={"shift": 1}),
)
