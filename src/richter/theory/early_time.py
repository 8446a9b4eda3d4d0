"""Early training: how the centred NFM and AGOP of a layer leave zero under gradient flow.  [nfa, Sec. 3.1, App. D]

A layer z = W x reads X[n,d_in]. Its backward signals are J[n,c,d_out] = df/dz, and dL[n,c] = dL/df (f - y for the loss
sum |f - y|^2 / 2). With V = W - W(0), both V^T V and V^T K V start at zero with slope zero. Their second derivatives are
closed forms of X, J, dL. Here K = sum_{n,c} J J^T, not divided by n.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import Ref, SelectionError, unknown
from richter.core.arrays import Array, ArrayLike
from richter.theory.arrays import column, held, in_units, like, network, normal, read, whole
from richter.theory.flows import flow
from richter.theory.frame import Theory

STILL = ("the layer does not start to move, so its early correlation is 0/0 and not defined: its inputs, its backward signals, "
         "or dL (the labels, with outputs 0 at the start) are all zero. Give data with a gradient.")
Matrices = tuple[Float[Tensor, "d_in d_in"], Float[Tensor, "d_in d_in"]]

# ------------------------------------------------------------------------------------------------ predict


def second_derivatives(X: ArrayLike, J: ArrayLike, dL: ArrayLike, *, factor: float = 2.0) -> tuple[Array, Array]:
    """Return d^2/dt^2 (V^T V) = 2 W'^T W' and d^2/dt^2 (V^T K V) = 2 W'^T K W' at t = 0, both [d_in, d_in].  [nfa, Prop. 3, Eq.
    (5)]

    W' = -sum_{n,c} dL[n,c] J[n,c] X[n]^T is gradient flow. For c = 1 these are 2 X^T L P L X and 2 X^T L P^2 L X with
    P = J J^T [n,n] and L = diag(dL). The change of K does not contribute, because it multiplies V = 0. For a layer used at
    positions s, replace n by (n s) and repeat dL along s. ``factor``: the 2 in front, from d^2/dt^2 t^2; with 1 the results are
    the coefficients of t^2.
    """
    X_, J_, dL_ = read(X=(X, "n d_in"), J=(J, "n c d_out"), dL=(dL, "n c"))
    nfm_dd, agop_dd = _second_derivatives(X_, J_, dL_, factor=factor)
    return like(nfm_dd, X), like(agop_dd, X)


def predict(weights: Sequence[ArrayLike], X: ArrayLike, y: ArrayLike,
            activation: Callable[[Tensor], Tensor] = torch.relu, layer: int = 0, *,
            factor: float = 2.0) -> tuple[Array, Array]:
    """Return ``second_derivatives`` of one layer of the network that ``simulate`` trains. X and J follow from its weights by the
    chain rule, and dL = f - y."""
    W, X_, y_ = network(weights, X, y, layer)
    nfm_dd, agop_dd = _second_derivatives(*_at_layer(W, X_, y_, activation, layer), factor=factor)
    return like(nfm_dd, X), like(agop_dd, X)


def correlation(X: ArrayLike, J: ArrayLike, dL: ArrayLike) -> float:
    """Limit of the centred NFC as t -> 0: the cosine of the two second derivatives.  [nfa, Eq. (6)]"""
    X_, J_, dL_ = (in_units(t)[0] for t in read(X=(X, "n d_in"), J=(J, "n c d_out"), dL=(dL, "n c")))
    return _cosine(*_unscaled(X_, J_, dL_))


def expected_kernel(X: ArrayLike, activation: str, depth: int = 2) -> Array:
    """Return E[P] [n,n] of the first layer of an infinitely wide network with ``depth`` hidden layers and one output, where
    P(x,z) = df/dh(x) . df/dh(z) and all weights are N(0, 1/fan_in).  [nfa, App. D]

    It is a product of one factor E[phi'(u) phi'(v)] for each hidden layer, (u, v) ~ N(0, S_l), starting at S_0 = X X^T / d:
      quadratic: 4 S_l(x,z),             S_{l+1} = S_l(x,x) S_l(z,z) + 2 S_l(x,z)^2
      relu: (pi - t_l) / (2 pi),         cos t_{l+1} = (sin t_l + (pi - t_l) cos t_l) / pi   (t_0 the angle of x and z)
    Two layers give 16 S (S_xx S_zz + 2 S^2), and (pi - t_0)(pi - t_1) / (2 pi)^2. An input of zero has a zero backward signal.
    """
    X_, unit = in_units(read(X=(X, "n d"))[0])
    E = _expected_kernel(X_, activation, depth)
    degree = 2 ** (depth + 1) - 2 if activation == "quadratic" else 0  # degree of the kernel in the inputs
    return like(_in_old_units(E, "the expected kernel", [(unit, degree)]), X)


def predicted_correlation(X: ArrayLike, y: ArrayLike, activation: str, depth: int = 2) -> float:
    """Centred NFC of the first layer as t -> 0: Eq. (6) with P -> E[P] and P^2 -> E[P]^2, outputs 0 at the start, squared loss.
    It is exact as the width grows with n and d fixed, and still close at width n.  [nfa, Sec. 4.1, Fig. 7]"""
    X_, y_ = (in_units(t)[0] for t in read(X=(X, "n d"), y=(column(y), "n")))
    A = _expected_kernel(X_, activation, depth) @ (y_[:, None] * X_)  # E[P] Y X
    return _cosine(X_.T @ (y_[:, None] * A), A.T @ A)


def _second_derivatives(X: Float[Tensor, "n d_in"], J: Float[Tensor, "n c d_out"], dL: Float[Tensor, "n c"],
                        *, factor: float = 2.0) -> Matrices:
    """Second time derivatives of NFM and AGOP, computed in units in which nothing overflows."""
    (X, x), (J, j), (dL, dl) = in_units(X), in_units(J), in_units(dL)
    nfm_dd, agop_dd = _unscaled(X, J, dL, factor=factor)
    name, powers = "the second derivatives", [(x, 2), (j, 2), (dl, 2)]
    return _in_old_units(nfm_dd, name, powers), _in_old_units(agop_dd, name, [*powers, (j, 2)])


def _unscaled(X: Float[Tensor, "n d_in"], J: Float[Tensor, "n c d_out"], dL: Float[Tensor, "n c"],
              *, factor: float = 2.0) -> Matrices:
    """Second time derivatives of NFM and AGOP from inputs, Jacobians and loss gradients in good units."""
    W_dot = -torch.einsum("nc,nco,ni->oi", dL, J, X)
    response = torch.einsum("nco,oi->nci", J, W_dot).flatten(0, 1)  # W'^T K W' = response^T response, so K is never formed
    return factor * W_dot.T @ W_dot, factor * response.T @ response


def _in_old_units(t: Tensor, name: str, powers: Sequence[tuple[float, int]]) -> Tensor:
    """Multiply t by units to their powers, in an order that avoids overflow where the result is finite."""
    exponent = sum(power * round(math.log2(unit)) for unit, power in powers)
    half = max(-1000, min(1000, exponent // 2))
    result = t * 2.0**half * 2.0 ** max(-1000, min(1000, exponent - half))
    if t.any() or not torch.isfinite(t).all():
        held(**{name: result})
    return result


def _at_layer(weights: list[Tensor], X: Float[Tensor, "n d"], y: Float[Tensor, "n c"], activation: Callable[[Tensor], Tensor],
              layer: int) -> tuple[Float[Tensor, "n d_in"], Float[Tensor, "n c d_out"], Float[Tensor, "n c"]]:
    """Return the inputs of a layer, its backward signals df/dz, and dL/df = f - y."""
    reads, slopes = [X], []
    for W in weights[:-1]:
        with torch.enable_grad():
            z = (reads[-1] @ W.T).detach().requires_grad_()
            h = activation(z)
        slopes.append(torch.autograd.grad(h.sum(), z)[0])
        reads.append(h.detach())
    f = reads[-1] @ weights[-1].T
    J = torch.eye(f.shape[1], dtype=X.dtype, device=X.device).expand(len(X), -1, -1)
    for W, slope in zip(reversed(weights[layer + 1:]), reversed(slopes[layer:]), strict=True):
        J = (J @ W) * slope[:, None]
    return reads[layer], J, f - y


def _cosine(A: Float[Tensor, "a b"], B: Float[Tensor, "a b"]) -> float:
    """<A, B> / (|A| |B|)."""
    if not (A.any() and B.any()):
        raise SelectionError(STILL)
    A, B = (Z / Z.abs().max().clamp(min=torch.finfo(Z.dtype).tiny) for Z in (A, B))  # squares neither overflow nor underflow
    return ((A * B).sum() / (A.norm() * B.norm())).item()


def _expected_kernel(X: Float[Tensor, "n d"], activation: str, depth: int) -> Float[Tensor, "n n"]:
    """Expected inner products of the backward signals of pairs of examples (PTK) over random weights."""
    whole(depth=depth)
    if activation not in _EXPECTED:
        raise unknown("the table of expected kernels", "activation", activation, _EXPECTED)
    return _EXPECTED[activation](X, depth)


def _quadratic(X: Float[Tensor, "n d"], depth: int) -> Float[Tensor, "n n"]:
    """Expected kernel for the activation z^2."""
    S = X @ X.T / X.shape[1]
    E = 4 * S
    for _ in range(depth - 1):
        S = torch.outer(S.diagonal(), S.diagonal()) + 2 * S**2
        E = E * 4 * S
    return E


def _relu(X: Float[Tensor, "n d"], depth: int) -> Float[Tensor, "n n"]:
    """Expected kernel for ReLU."""
    largest, tiny = X.abs().amax(1), torch.finfo(X.dtype).tiny
    U = X / largest.clamp(min=tiny)[:, None]
    U = U / U.norm(dim=1).clamp(min=tiny)[:, None]
    # arccos would lose half of the digits where x and z are close
    apart, sum_ = (torch.cdist(U, V, compute_mode="donot_use_mm_for_euclid_dist") for V in (U, -U))
    t = 2 * torch.atan2(apart, sum_)
    E = (math.pi - t) / (2 * math.pi)
    for _ in range(depth - 1):
        versine = 2 * (t / 2).sin() ** 2 - (t.sin() - t * t.cos()) / math.pi  # 1 - cos t_{l+1}
        t = 2 * (versine.clamp(min=0) / 2).sqrt().asin()
        E = E * (math.pi - t) / (2 * math.pi)
    return E * torch.outer(largest > 0, largest > 0)


_EXPECTED: dict[str, Callable[[Tensor, int], Tensor]] = {"quadratic": _quadratic, "relu": _relu}

# ------------------------------------------------------------------------------------------------ simulate


def simulate(weights: Sequence[ArrayLike], X: ArrayLike, y: ArrayLike, activation: Callable[[Tensor], Tensor] = torch.relu,
             layer: int = 0, movement: float = 1e-4) -> tuple[Array, Array]:
    """Return the two second derivatives of one layer from the training of an actual network: f(x) = W_L phi(... phi(W_0 x)), all
    layers under gradient flow on sum |f - y|^2 / 2, y [n,c].

    The flow is integrated (``flows.flow``) to the times +-t and +-t/2 at which the fastest layer has moved by ``movement`` of its
    norm. C(t) = C'' t^2/2 + O(t^3) then gives C'' up to O(t^4).
    """
    start, X_, y_ = network(weights, X, y, layer)
    nfm_dd, agop_dd = _from_flow(start, X_, y_, activation, layer, movement)
    return like(nfm_dd, X), like(agop_dd, X)


def _from_flow(start: list[Tensor], X: Tensor, y: Tensor, activation: Callable[[Tensor], Tensor], layer: int,
               movement: float) -> Matrices:
    """Centred NFM and AGOP after a short gradient flow that moves the weights by this share."""
    velocity = _gradient_flow(X, y, activation)
    speed = max((v.norm() / W.norm()).item() for v, W in zip(velocity(start), start, strict=True))
    t = movement / speed if speed > 0 else 1.0

    def moved(by: list[Tensor]) -> list[Tensor]:
        return [W + V for W, V in zip(start, by, strict=True)]

    # integrate V = W - W(0), so that the precision is that of V and not of W
    still = [torch.zeros_like(W) for W in start]
    size = movement * max(W.abs().max().item() for W in start) or 1.0
    halves, wholes = zip(*(flow(lambda by: velocity(moved(by)), still, [sign * t / 2, sign * t], atol=1e-12 * size)
                           for sign in (1, -1)), strict=True)

    def curvature(both_ways: Sequence[list[Tensor]], t: float) -> Tensor:
        """Return (C(t) + C(-t)) / t^2 of both matrices C."""
        total = X.new_zeros(2, start[layer].shape[1], start[layer].shape[1])
        for by in both_ways:
            V, J = by[layer], _jacobian(moved(by), X, activation, layer)
            total += torch.stack([V.T @ V, V.T @ torch.einsum("nco,ncp->op", J, J) @ V])
        return total / t / t

    both = (4 * curvature(halves, t / 2) - curvature(wholes, t)) / 3
    if not torch.isfinite(both).all():
        held(**{"the second derivatives": both})
    return both[0], both[1]


def simulate_correlation(X: ArrayLike, y: ArrayLike, activation: str, width: int, depth: int = 2, seed: int = 0) -> float:
    """Centred NFC of the first layer just after initialisation, in one random network of ``depth`` hidden layers with weights
    N(0, 1/fan_in). Its initial outputs are added to y, so training starts from the residual -y."""
    X_, y_ = read(X=(X, "n d"), y=(column(y), "n"))
    X_, y_ = X_ if activation == "tanh" else in_units(X_)[0], in_units(y_)[0]  # the other activations are homogeneous
    whole(width=width, depth=depth)
    whole(0, seed=seed)
    if not (X_.any() and y_.any()):
        raise SelectionError(STILL)
    known = {"quadratic": torch.square, "relu": torch.relu, "tanh": torch.tanh}
    if activation not in known:
        raise unknown("the simulation", "activation", activation, known)
    draw = np.random.default_rng((seed, 13))
    sizes = [X_.shape[1], *[width] * depth, 1]
    weights = [torch.from_numpy(draw.standard_normal((o, i)) / math.sqrt(i)).to(X_)
               for i, o in itertools.pairwise(sizes)]
    f = _forward(weights, X_, known[activation])[0]
    F, G = _from_flow(weights, X_, f + y_[:, None], known[activation], 0, 1e-5)
    held(**{"the second derivative of the NFM": F, "that of the AGOP": G})
    F, G = F / F.abs().max(), G / G.abs().max()
    return ((F * G).sum() / (F.norm() * G.norm())).item()


def _forward(weights: Sequence[Tensor], X: Tensor, activation: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return f [n,c] and the pre-activations of every layer."""
    x, z = X, []
    for W in weights:
        z.append(x @ W.T)
        x = activation(z[-1])
    return z[-1], z


def _gradient_flow(X: Tensor, y: Tensor, activation: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return the function from weights to the velocity of gradient flow on the squared error."""
    def velocity(weights: list[Tensor]) -> list[Tensor]:
        with torch.enable_grad():
            live = [W.detach().requires_grad_() for W in weights]
            loss = (_forward(live, X, activation)[0] - y).square().sum() / 2
            return [-g for g in torch.autograd.grad(loss, live)]
    return velocity


def _jacobian(weights: list[Tensor], X: Tensor, activation: Callable[[Tensor], Tensor], layer: int) -> Tensor:
    """Return df/dz of a layer [n,c,d_out]."""
    with torch.enable_grad():
        f, z = _forward([W.detach().requires_grad_() for W in weights], X, activation)
        return torch.stack([torch.autograd.grad(f[:, c].sum(), z[layer], retain_graph=True)[0] for c in range(f.shape[1])], 1)


# ------------------------------------------------------------------------------------------------ theories


def _small_networks() -> list[tuple[Any, ...]]:
    """Three layers of widths 5, 6 and 2, with each activation and each layer."""
    cases = []
    for seed, activation in enumerate((torch.relu, torch.tanh, torch.square)):
        weights = [normal(o, i, seed=seed) / math.sqrt(i) for i, o in itertools.pairwise((4, 5, 6, 2))]
        cases += [(weights, normal(7, 4, seed=seed + 1), normal(7, 2, seed=seed + 2), activation, layer) for layer in range(3)]
    return cases


def _decaying_spectra() -> list[tuple[Any, ...]]:
    """Inputs with a spectrum 1/(1 + k^decay), and labels that are a polynomial of the first five directions."""
    cases = []
    for decay, activation in itertools.product((1.0, 1.5), ("quadratic", "relu")):
        X = normal(48, 128) / (1 + torch.arange(1.0, 129.0, dtype=torch.float64) ** decay).sqrt()
        cases.append((X, sum(X[:, i] * X[:, (i + 1) % 5] for i in range(5)), activation))
    return cases


THEORIES = (
    Theory("early_time.second_derivatives", ref=Ref("nfa", "Prop. 3, Eq. (5)"),
           title="how the centred NFM and AGOP of a layer leave zero under gradient flow",
           predict=predict, simulate=simulate, cases=_small_networks, tolerance=1e-7, perturb={"factor": 2.001}),
    Theory("early_time.predicted_correlation", ref=Ref("nfa", "Sec. 4.1, Fig. 7"),
           title="the early centred correlation of the first of several wide layers, from the data alone",
           predict=predicted_correlation, simulate=functools.partial(simulate_correlation, width=1024), cases=_decaying_spectra,
           tolerance=0.05, perturb={"depth": 4}, seeds=(0,)),
)
