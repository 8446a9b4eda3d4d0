"""Signal propagation in infinitely wide, deep ReLU networks at initialisation: similarity of inputs and of gradients.

[signal, Sec. 3]
z_1 = W_1 x and z_l = W_l phi(z_{l-1}), W_l ~ N(0, 2/fan_in). For two inputs with correlation c_1 = cos(x, x'), the inputs of
layer l have the correlation cos(phi(z_{l-1}(x)), phi(z_{l-1}(x'))) = c_l. The gradients of one output at z_l have the correlation
I^b_l, l = 1..L:

    c_{l+1} = g(c_l),   g(c) = (c arcsin c + sqrt(1 - c^2)) / pi + c/2,      I^b_l = prod_{k=l}^{L-1} g'(c_k),  I^b_L = 1.

Everything is computed in the angle t = arccos c, where nothing cancels even if c is close to 1:

    1 - g(cos t) = (1 - cos t) - (sin t - t cos t) / pi,      g'(cos t) = 1 - t/pi.

Leaky ReLU with the slope a below 0 (weights N(0, 2 / ((1 + a^2) fan_in))) multiplies the subtracted terms by
(1 - a)^2 / (1 + a^2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from richter.core import Ref, SelectionError
from richter.core.arrays import Array, ArrayLike, to_tensor
from richter.theory.arrays import like, whole
from richter.theory.frame import Theory

EXPONENT = 3 / 5  # l* = Theta(L^(3/5)) as L grows  [Cor. 1]
FORWARD = 9 * math.pi**2 / 2  # l^2 (1 - c_l) as l grows, for ReLU
BACKWARD = 3.0  # l (1 - g'(c_l)) as l grows, for every slope
KAPPA = 9 / 2  # g'(c_l) = 1 - 3/l + kappa log(l) / l^2 + O(l^-2), for every slope
# Coefficients of (sin t - t cos t) / t^3 in powers of t^2, highest first; on [0, pi] the next term is below 1e-18.
_SERIES = tuple((-1) ** (k + 1) * 2 * k / math.factorial(2 * k + 1) for k in range(16, 0, -1))

# ------------------------------------------------------------------------------------------------ predict


def correlations(c1: ArrayLike, depth: int, *, slope: float = 0.0) -> Array:
    """Return c_l of layers l = 1..depth, [depth, *c1.shape]: the correlation of layer l's inputs for two examples.  [signal, App.
    A.3]"""
    return like(1 - 2 * (_angles(c1, depth, slope) / 2).sin() ** 2, c1)


def gradients(c1: ArrayLike, depth: int, *, slope: float = 0.0) -> Array:
    """Return I^b_l of layers l = 1..depth, [depth, *c1.shape]: the correlation of the gradients of one output at z_l.
    [signal, App. A.3, Eq. (4)]"""
    kept = 1 - _share(slope) * _angles(c1, depth, slope) / math.pi  # g'(c_1), ..., g'(c_L)
    kept[-1] = 1.0
    return like(kept.flip(0).cumprod(0).flip(0), c1)


def forward_loss(c1: ArrayLike, depth: int, *, q1: float = 1.0, slope: float = 0.0) -> Array:
    """Return |I^f_l - q1/2| = q1 (1 - c_l) / 2 of layers 1..depth: how well the forward kernel still separates two inputs.

    [signal, Thm. 1]
    I^f_l = E[phi(z_{l-1}(x)) phi(z_{l-1}(x'))] = q_1 c_l / 2. ``q1``: the variance of z_1, 1 in the text. With the He first layer
    that the text states, N(0, 2/d), and |x|^2 = d it is 2, and the limit is 1 instead of 1/2.
    """
    return like(q1 * (_angles(c1, depth, slope) / 2).sin() ** 2, c1)


def backward_loss(c1: ArrayLike, depth: int, *, slope: float = 0.0) -> Array:
    """Return |I^b_l - (l/L)^3| of layers 1..depth: the distance of the backward kernel from its input-independent limit.
    [signal, Thm. 2]"""
    information = to_tensor(gradients(c1, depth, slope=slope))
    layer = torch.arange(1, depth + 1, dtype=torch.float64, device=information.device)
    return like((information - ((layer / depth) ** BACKWARD).reshape(-1, *[1] * (information.dim() - 1))).abs(), c1)


def backward_expansion(alpha: ArrayLike, depth: ArrayLike, *, kappa: float = KAPPA) -> Array:
    """Return alpha^3 + kappa alpha^2 (1 - alpha) log(L) / L: I^b at the layer alpha L of L, up to O(1/L).  [signal, Thm. 2, by
    Lemma 2 with corrected sign and constant: log b_l = log b_inf - a log l - kappa log(l) / l + O(1/l)]"""
    a, L = to_tensor(alpha, "alpha"), to_tensor(depth, "depth")
    if not ((a >= 0) & (a <= 1)).all() or not (L >= 1).all():
        raise SelectionError(f"backward_expansion of alpha from {a.min().item():g} to {a.max().item():g} and depth from "
                             f"{L.min().item():g}: alpha is a share of the layers, from 0 to 1, of a depth from 1 on.")
    return like(a**3 + kappa * a**2 * (1 - a) * L.log() / L, alpha)


def balanced_layer(depth: int, forward: float = 0.0, backward: float = 0.0, *, slope: float = 0.0) -> float:
    """Layer l* of a network of ``depth`` layers, possibly between two layers, where forward and backward information balance:

    (1 - c_l) / 2 = I^b_l. It is the first sign change over integer l, with the logarithm of the ratio interpolated.
    [signal, Cor. 1]
    ``forward``, ``backward``: the correlation of the input pair used for each side. One pair: the same number for both. All pairs
    with x.x'/d < 1 - eps (E_eps): -1 and 1 - eps, where each side has its supremum.
    """
    return float(balanced_layers([depth], forward, backward, slope=slope)[0])


def balanced_layers(depths: Sequence[int], forward: float = 0.0, backward: float = 0.0, *, slope: float = 0.0
                    ) -> NDArray[np.float64]:
    """Return ``balanced_layer`` of several depths, at the cost of the largest."""
    for depth in depths:
        whole(depth=depth)
    deepest = max(depths, default=0)
    if min(depths, default=0) < 2:
        raise SelectionError(f"balanced_layer of depths {list(depths)}: a network of one layer has no hidden layer, so nothing "
                             f"lies between its input and its output that could be balanced. Give depths from 2 on.")
    lost = np.log(_at_least_tiny(np.asarray(forward_loss(float(forward), deepest, slope=slope))))
    angles = np.asarray(_angles(float(backward), deepest, slope))
    kept = np.concatenate([[0.0], np.log(_at_least_tiny(1 - _share(slope) * angles[:-1] / np.pi)).cumsum()])  # log prod_{k<l} g'
    return np.array([_crossing(lost[:L] - (kept[L - 1] - kept[:L]), forward, backward) for L in depths])


def exponent(depths: Sequence[int], forward: float = 0.0, backward: float = 0.0, *, slope: float = 0.0) -> float:
    """Return d log l* / d log L over these depths, the slope of the least-squares line. Its limit is 3/5. At depths that can be
    trained it is far larger: .77 (one pair, c = 0) to .87 (supremum, eps = 0.1) from 10 to 100 layers."""
    if len(set(depths)) < 2:
        raise SelectionError(f"exponent of depths {list(depths)}: at least two different depths make a slope.")
    return float(np.polyfit(np.log(depths), np.log(balanced_layers(depths, forward, backward, slope=slope)), 1)[0])


def _share(slope: float) -> float:
    """Return (1 - a)^2 / (1 + a^2), the strength of the contraction of angles by slope a below 0; 1 for ReLU, 0 for a linear
    map."""
    if not (isinstance(slope, (int, float)) and math.isfinite(slope)):
        raise SelectionError(f"slope={slope!r}: a finite number is needed, 0 for ReLU, 0.01 for torch's LeakyReLU.")
    return (1 - slope) ** 2 / (1 + slope**2)


def _angles(c1: ArrayLike, depth: int, slope: float) -> Tensor:
    """Return arccos c_l of layers l = 1..depth: [depth, *c1.shape]."""
    start = to_tensor(c1, "c1")
    whole(depth=depth)
    if not (start.abs() <= 1).all():
        raise SelectionError(f"c1 reaches {start.abs().max().item():.6g}: it is a correlation x.x'/(|x| |x'|), from -1 to 1.")
    share = _share(slope) / math.pi
    if start.numel() == 1:  # floats are ten times faster than arrays of one number; a depth of a million takes a second
        angle, out = math.acos(start.item()), []
        for _ in range(depth):
            out.append(angle)
            angle = 2 * math.asin(math.sqrt(math.sin(angle / 2) ** 2 - share * _folded(angle) / 2))
        return start.new_tensor(out).reshape(depth, *start.shape)
    angles = [start.arccos()]
    for _ in range(depth - 1):
        t = angles[-1]
        angles.append(2 * ((t / 2).sin() ** 2 - share * _folded(t) / 2).sqrt().asin())
    return torch.stack(angles)


def _folded(t: Any) -> Any:
    """Return sin t - t cos t of a float or a tensor in [0, pi], with full precision also where it is about t^3/3."""
    square, series = t * t, 0.0
    for coefficient in _SERIES:
        series = series * square + coefficient
    return t * square * series


def _at_least_tiny(a: NDArray[np.float64]) -> NDArray[np.float64]:
    """Numbers with 0 replaced by the smallest positive one."""
    return np.maximum(a, np.finfo(np.float64).tiny)  # opposite inputs have g' = 0, and equal inputs lose nothing


def _crossing(excess: NDArray[np.float64], forward: float, backward: float) -> float:
    """Find the layer where log(forward loss / backward information), which decreases over layers, passes 0."""
    if excess[0] < -1e-12 or not (excess[1:] < 0).any():
        raise SelectionError(f"balanced_layer of {len(excess)} layers with forward={forward:g} and backward={backward:g}: at the "
                             f"first layer inputs this close are told apart less than gradients are alike, and further on still "
                             f"less, so that no layer is balanced. Take a deeper network, or inputs further apart.")
    # the last layer's is negative: I^b_L = 1, and (1 - c) / 2 < 1 from the second layer on
    after = 1 + int(np.argmax(excess[1:] < 0))
    before = max(float(excess[after - 1]), 0.0)  # 0 for two layers and c = 0, up to rounding
    return float(after + before / (before - excess[after]))  # layer numbers start at 1


# ------------------------------------------------------------------------------------------------ simulate


def simulate_correlations(c1: ArrayLike, depth: int) -> Array:
    """Return the correlations c_l from the Gaussian integral that defines them, layer by layer: c' = 2 E[relu(u) relu(v)] for
    standard normal u, v with correlation c. In polar coordinates u = r cos a, v = r cos(a - t), with Gauss-Legendre nodes where
    both are positive."""
    start = to_tensor(c1, "c1")
    whole(depth=depth)
    nodes, weights = np.polynomial.legendre.leggauss(40)
    c, out = start.cpu().numpy(), []
    for _ in range(depth):
        out.append(c)
        t = np.arctan2(np.sqrt((1 - c) * (1 + c)), c)[..., None]
        a = t / 2 + nodes * (np.pi - t) / 2
        c = (2 / np.pi * np.cos(a) * np.cos(a - t) * weights * (np.pi - t) / 2).sum(-1)
    return like(torch.from_numpy(np.stack(out)), c1)


def simulate_gradients(c1: ArrayLike, depth: int, width: int = 2048, outputs: int = 64, seed: int = 0) -> Array:
    """Return the gradient correlations in one wide random network by autograd, with inner products summed over ``outputs``."""
    start = to_tensor(c1, "c1")
    whole(depth=depth, width=width, outputs=outputs)
    draw = torch.Generator().manual_seed(seed)
    angles = torch.cat([start.new_zeros(1), start.flatten().arccos()]).cpu()
    h = torch.stack([angles.cos(), angles.sin()], 1).float()  # the first input, then its partners, on a circle
    z = list[Tensor]()
    with torch.enable_grad():
        for layer in range(depth):
            d_out = outputs if layer == depth - 1 else width
            W = torch.randn(d_out, h.shape[1], generator=draw) * math.sqrt(2 / h.shape[1])
            z.append((h @ W.T).requires_grad_())
            h = z[-1].relu()
        grams = [torch.zeros(len(angles), len(angles), dtype=torch.float64) for _ in z]
        for k in range(outputs):
            for gram, g in zip(grams, torch.autograd.grad(z[-1][:, k].sum(), z, retain_graph=True), strict=True):
                gram += (g.double() @ g.double().T)
    cosines = [gram[0, 1:] / (gram[0, 0] * gram.diagonal()[1:]).sqrt() for gram in grams]
    return like(torch.stack(cosines).reshape(depth, *start.shape), c1)


def simulate_balanced_layer(depth: int, forward: float = 0.0, backward: float = 0.0) -> float:
    """Return the balanced layer by the textbook form of the recursion in extended precision, with every product formed
    directly."""
    def followed(c: float) -> list[np.longdouble]:
        out = [np.longdouble(c)]
        while len(out) < depth:
            out.append((out[-1] * np.arcsin(out[-1]) + np.sqrt(1 - out[-1] ** 2)) / np.longdouble(np.pi) + out[-1] / 2)
        return out

    def excess(layer: int) -> float:
        information = np.prod([np.longdouble(0.5) + np.arcsin(c) / np.longdouble(np.pi) for c in back[layer - 1:-1]])
        return float(np.log((1 - ahead[layer - 1]) / 2) - np.log(information))

    ahead, back = followed(forward), followed(backward)
    layer = next(k for k in range(2, depth + 1) if excess(k) < 0)
    low, high = excess(layer - 1), excess(layer)
    return layer - 1 + low / (low - high)


# ------------------------------------------------------------------------------------------------ theories

_PAIRS = np.array([-1.0, -0.4, 0.0, 0.5, 0.9])

THEORIES = (
    Theory("signal.correlations", ref=Ref("signal", "App. A.3, Thm. 1"),
           title="how alike two inputs become on their way through a deep ReLU network",
           predict=correlations, simulate=simulate_correlations, cases=lambda: [(_PAIRS, 1), (_PAIRS, 2), (_PAIRS, 60)],
           tolerance=1e-11, perturb={"slope": 1e-4}),
    Theory("signal.gradients", ref=Ref("signal", "App. A.3, Thm. 2"),
           title="how alike the gradients of two inputs are on their way back through a deep ReLU network",
           predict=gradients, simulate=simulate_gradients, cases=lambda: [(_PAIRS[1:], 5)], tolerance=0.05,
           perturb={"slope": 0.2}, seeds=(0, 1, 2)),
    Theory("signal.balanced_layer", ref=Ref("signal", "Cor. 1"),
           title="the layer at which forward and backward information are balanced",
           predict=balanced_layer, simulate=simulate_balanced_layer,
           cases=lambda: [(10, 0.0, 0.0), (30, -1.0, 0.9), (100, -1.0, 0.9), (200, 0.5, 0.5)], tolerance=1e-9,
           perturb={"slope": 1e-4}),
)
