"""Reading of the arguments of theories: arrays become float64 tensors with consistent axes, and results the kind of the input."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from richter.core import SelectionError, unknown
from richter.core.arrays import Array, ArrayLike, to_tensor
from richter.core.arrays import like as like  # re-exported for the theories, which all return the kind of array they get

BIASES = ("near the origin a network with biases has no one degree in its weights, and no escape direction as the theory has "
          "them. Take one without: nn.Linear(..., bias=False).")
Times = float | Sequence[float] | Array  # a single number is one time
SIZES = (1e-145, 1e145)  # sizes of weights whose squares and products stay within the range of float64
LARGEST = (1e-290, 1e300)  # sizes of the largest weight for which sums and halves keep their digits
SYMMETRIC = 1e-10  # relative to the norm; a matrix that differs more from its transpose is not symmetric
ORDINARY = (1e-90, 1e90)  # sizes of data for which products of any three numbers, or of their inverses, stay within the range


def read(**given: tuple[ArrayLike, str]) -> list[Tensor]:
    """Read ``X, y = read(X=(X, "n d"), y=(y, "n"))``: check that arrays are real, finite and not empty, and that axes of one name
    have one length."""
    lengths: dict[str, tuple[int, str]] = {}
    out: list[Tensor] = []
    for name, (value, axes) in given.items():
        t, wanted = to_tensor(value, name), axes.split()
        shape = f"{name} has shape {tuple(t.shape)}"
        if t.dim() != len(wanted):
            raise SelectionError(f"{shape}; [{', '.join(wanted)}] is needed.")
        for axis, length in zip(wanted, t.shape, strict=True):
            if length == 0:
                raise SelectionError(f"{shape}: it is empty along {axis!r} of [{', '.join(wanted)}].")
            seen, where = lengths.setdefault(axis, (length, name))
            if seen != length:
                raise SelectionError(f"{shape} for [{', '.join(wanted)}], so {axis} = {length}; but {axis} = {seen} in {where}.")
        out.append(t.to(out[0].device) if out else t)
    return out


def network(weights: Sequence[ArrayLike], X: ArrayLike, y: ArrayLike, layer: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Read the weights [d_out, d_in] of a network, first layer first, with its inputs and labels. ``layer`` is one of its
    layers."""
    X_, y_ = read(X=(X, "n d"), y=(y, "n c"))
    W_ = [read(**{f"weights[{i}]": (W, "d_out d_in")})[0].to(X_.device) for i, W in enumerate(weights)]
    sizes = [X_.shape[1], *(W.shape[0] for W in W_)]
    if not W_ or [W.shape[1] for W in W_] != sizes[:-1] or sizes[-1] != y_.shape[1] or not 0 <= layer < len(W_):
        raise SelectionError(f"weights {[tuple(W.shape) for W in W_]} [d_out, d_in], X {tuple(X_.shape)}, y {tuple(y_.shape)} "
                             f"and layer={layer} do not make a network: each layer reads what the one before it writes.")
    return W_, X_, y_


def relu_network(weights: Sequence[ArrayLike], X: ArrayLike, y: ArrayLike) -> tuple[list[Tensor], Tensor, Tensor]:
    """Read W_1..W_L [d_out, d_in] of a network of two layers or more without biases, its inputs, and a row of outputs for
    each."""
    X_, y_ = read(X=(X, "n d"), y=(columns(y), "n c"))
    W = relu_layers(weights, X_)[0]
    if W[-1].shape[0] != y_.shape[1]:
        raise SelectionError(f"weights {[tuple(w.shape) for w in W]} [d_out, d_in] and targets {tuple(y_.shape)} [n, c] do not "
                             f"make a network: the last layer writes the c outputs.")
    return W, X_, y_


def relu_layers(weights: Sequence[ArrayLike], X: ArrayLike) -> tuple[list[Tensor], Tensor]:
    """Read W_1..W_L [d_out, d_in] and inputs like ``relu_network``, without outputs."""
    (X_,) = read(X=(X, "n d"))
    if isinstance(weights, nn.Module):
        raise SelectionError(f"weights are a {type(weights).__name__}: matrices [d_out, d_in] are needed. "
                             f"theory.escape.weights_of(model, X) reads them.")
    if not isinstance(weights, Iterable) or getattr(weights, "ndim", 1) == 0:
        raise SelectionError(f"weights are a {type(weights).__name__}: a list of matrices [d_out, d_in] is needed.")
    W = [to_tensor(w, f"weights[{i}]").detach().to(X_.device) for i, w in enumerate(weights)]
    for i, w in enumerate(W):
        if w.dim() == 1:
            raise SelectionError(f"weights[{i}] has shape {tuple(w.shape)}, as a bias has: {BIASES}")
        read(**{f"weights[{i}]": (w, "d_out d_in")})
    if len(W) < 2 or [w.shape[1] for w in W] != [X_.shape[1], *(w.shape[0] for w in W[:-1])]:
        raise SelectionError(f"weights {[tuple(w.shape) for w in W]} [d_out, d_in] and X {tuple(X_.shape)} do not make a network "
                             f"of two layers or more: each layer reads what the one before it writes.")
    return W, X_


def two_layers(theta: ArrayLike, x: ArrayLike, y: ArrayLike, activation: str, activations: Iterable[str]
               ) -> tuple[list[Tensor], int]:
    """Return [theta, x, y] of a network sum_i a_i phi(w_i.x) with theta_i = (w_i, a_i) [H, d + c], and d. phi is one of
    ``activations``."""
    theta_, x_, y_ = read(theta=(theta, "H p"), x=(x, "n d"), y=(y, "n c"))
    d = x_.shape[1]
    if theta_.shape[1] != d + y_.shape[1]:
        raise SelectionError(f"theta has {theta_.shape[1]} numbers for each neuron; {d} weights of inputs and {y_.shape[1]} of "
                             f"outputs are needed.")
    if activation not in activations:
        raise unknown("networks of two layers", "activation", activation, list(activations))
    return [theta_, x_, y_], d


def linear_layers(weights: Sequence[ArrayLike], correlation: ArrayLike, covariance: ArrayLike | None = None
                  ) -> tuple[list[Tensor], Float[Tensor, "d c"], Float[Tensor, "d d"] | None]:
    """Read the weights of a linear network f(x) = x^T W_1 W_2 ... W_L, each [d_in, d_out], with E[x y^T] [d, c] and E[x x^T] [d,
    d] (None: whitened inputs). At least one weight must not be zero."""
    (C,) = read(correlation=(correlation, "d c"))
    W = [read(**{f"W{i + 1}": (w, "d_in d_out")})[0].to(C.device) for i, w in enumerate(weights)]
    sizes = [len(C), *(w.shape[1] for w in W)]
    if not W or [len(w) for w in W] != sizes[:-1] or sizes[-1] != C.shape[1]:
        raise SelectionError(f"weights {[tuple(w.shape) for w in W]} [d_in, d_out] and correlation {tuple(C.shape)} [d, c] do "
                             f"not make a network x^T W_1 ... W_L: each layer reads what the one before it writes.")
    for i, w in enumerate(W):
        squarable(f"W{i + 1}", w.abs().max())
    if sum(not w.any() for w in W) > 1:
        raise SelectionError("two layers or more are zero: the flow starts at a saddle, which no gradient leaves, and nothing is "
                             "ever learned. Start from small weights.")
    if covariance is None:
        return W, C, None
    _, S = read(correlation=(C, "d c"), covariance=(covariance, "d d"))
    if (S - S.T).norm() > 1e-10 * S.norm() or torch.linalg.eigvalsh(S)[0] < -1e-10 * S.norm():
        raise SelectionError("covariance is not symmetric, or has an eigenvalue below 0: E[x x^T] of the inputs is needed.")
    if (C - S @ (torch.linalg.pinv(S, rtol=1e-10, hermitian=True) @ C)).norm() > 1e-8 * C.norm():
        raise SelectionError("correlation has a part along inputs whose variance is 0: E[x y^T] and E[x x^T] are not of the same "
                             "data.")
    return W, C, (S + S.T) / 2


def joint_embedding(Gamma: ArrayLike, W0: ArrayLike) -> tuple[Float[Tensor, "m m"], Float[Tensor, "d m"]]:
    """Read the covariance Gamma [m, m] of positive pairs, symmetric, and weights W0 [d, m], not zero."""
    W, G = read(W0=(W0, "d m"), Gamma=(Gamma, "m m2"))
    if G.shape[0] != G.shape[1] or len(W) > len(G):
        raise SelectionError(f"Gamma is {tuple(G.shape)} and W0 {tuple(W.shape)}: Gamma [m, m] and W0 [d, m] with d at most m "
                             f"are needed.")
    ordinary(Gamma=G, W0=W)
    if (G - G.T).norm() > SYMMETRIC * G.norm():
        raise SelectionError("Gamma is not symmetric. pair_covariance(x, x2) makes it from positive pairs.")
    if not W.any():
        raise SelectionError("W0 is zero: the flow starts at a saddle, which no gradient leaves. Start from small weights.")
    return (G + G.T) / 2, W


def moving(a0: ArrayLike, b0: ArrayLike) -> tuple[Float[Tensor, " p"], Float[Tensor, " p"]]:
    """Read the weights a_i and b_i of units a_i b_i x; at least one must not be zero."""
    a, b = read(a0=(a0, "p"), b0=(b0, "p"))
    if not (a.any() or b.any()):
        raise SelectionError("a0 and b0 are all zero: no gradient reaches such weights, and they never move. Give small weights.")
    largest = max(a.abs().max().item(), b.abs().max().item())
    if not LARGEST[0] <= largest <= LARGEST[1]:
        raise SelectionError(f"the largest weight is {largest:.2g}; between {LARGEST[0]:g} and {LARGEST[1]:g} is needed.")
    return a, b


def squarable(name: str, sizes: Tensor) -> None:
    """Raise an error if the square of a weight leaves the range of float64. Zeros are allowed."""
    odd = sizes[(sizes > 0) & ((sizes < SIZES[0]) | (sizes > SIZES[1]))]
    if odd.numel():
        raise SelectionError(f"{name} has weights of size {odd.reshape(-1)[0].item():.2g}: their squares are no numbers of "
                             f"float64. Take weights between {SIZES[0]:g} and {SIZES[1]:g}; the time of a mode grows only with "
                             f"the logarithm of its start.")


def ordinary(**given: Tensor) -> None:
    """Raise an error if data are so large or small that products of three numbers leave the range of float64. All-zero data are
    allowed."""
    for name, t in given.items():
        largest = t.abs().max().item()
        if largest and not ORDINARY[0] < largest < ORDINARY[1]:
            raise SelectionError(f"{name} is at most {largest:.2g}: losses go with squares of it, and those leave the range of "
                                 f"float64. Give it in other units, between {ORDINARY[0]:g} and {ORDINARY[1]:g}.")


def held(**results: Tensor) -> None:
    """Raise an error if a result left the range of float64. No result is zero everywhere."""
    for name, t in results.items():
        if not (torch.isfinite(t).all() and t.any()):
            raise SelectionError(f"{name} from data of such a size leave the range of float64. Give data in other units.")


def in_units(t: Tensor) -> tuple[Tensor, float]:
    """Divide by a power of two near the largest entry, which is exact, so that squares of tiny and huge numbers are finite.
    Returns the array and the unit."""
    largest = t.abs().max().item()
    unit = 2.0 ** math.floor(math.log2(largest)) if largest else 1.0
    return t / unit, unit


def joint_norm(W: Sequence[Tensor]) -> float:
    """Return |theta| over the weights of all layers, also if its square leaves the range of float64."""
    flat, unit = in_units(torch.cat([w.flatten() for w in W]))
    return float(flat.norm()) * unit


def moments(Sxx: ArrayLike, Syx: ArrayLike) -> tuple[Float[Tensor, "d d"], Float[Tensor, "c d"]]:
    """Read E[x x^T] and E[y x^T] of the same data. The first is symmetric without negative eigenvalues. The second is not zero,
    and it is zero along inputs without variance."""
    S, C = read(Sxx=(Sxx, "d d"), Syx=(Syx, "c d"))
    ordinary(Sxx=S, Syx=C)
    if not C.any():
        raise SelectionError("E[y x^T] is zero: nothing linear is to be learned, and every neuron sleeps for ever.")
    if (S - S.T).norm() > 1e-10 * S.norm():
        raise SelectionError("Sxx is not symmetric: the second moments E[x x^T] of the inputs are needed.")
    S = (S + S.T) / 2
    least = torch.linalg.eigvalsh(S)[0]
    if least < -1e-10 * S.norm():
        raise SelectionError(f"Sxx has the eigenvalue {least.item():.3g}: second moments E[x x^T] of inputs have none below 0.")
    axes = varying(S)
    if (C - C @ axes @ axes.T).norm() > 1e-8 * C.norm():
        raise SelectionError("Syx has a part along inputs whose variance is 0: Sxx = E[x x^T] and Syx = E[y x^T] are not of the "
                             "same data.")
    return S, C


def varying(S: Float[Tensor, "d d"]) -> Float[Tensor, "d m"]:
    """Return the principal axes along which the inputs vary by more than rounding errors."""
    variances, axes = torch.linalg.eigh(S)
    return axes[:, variances > len(S) * torch.finfo(S.dtype).eps * variances.abs().max()]


def spectrum(eigenvalues: ArrayLike) -> Float[Tensor, " d"]:
    """Read eigenvalues of a covariance, all above 0."""
    (values,) = read(eigenvalues=(eigenvalues, "d"))
    if not (values > 0).all():
        raise SelectionError(f"eigenvalues reach {values.min().item():g}: those of a covariance, above 0, are needed.")
    ordinary(eigenvalues=values)
    return values


def centred_template(template: ArrayLike) -> Float[Tensor, " p"]:
    """Read a template of modular addition, which has mean zero and is not zero itself."""
    (x,) = read(template=(template, "p"))
    ordinary(template=x)
    if abs(x.mean().item()) > 1e-9 * x.abs().max().item():
        raise SelectionError(f"the template has mean {x.mean().item():g}: take its mean off, because no frequency stands for it.")
    if not x.any():
        raise SelectionError("the template is zero: it has no frequency, and nothing is to be learned.")
    return x


def per_mode(**given: ArrayLike) -> list[Float[Tensor, " m"]]:
    """Read numbers of modes [m], all of one length; a single number counts for every mode."""
    tensors = {name: to_tensor(value, name) for name, value in given.items()}
    modes = next((t.shape[0] for t in tensors.values() if t.dim() == 1), 1)
    return read(**{name: (t.expand(modes) if t.dim() == 0 else t, "m") for name, t in tensors.items()})


def first_array(*given: ArrayLike) -> ArrayLike:
    """Return the first tensor among the arguments, or the first argument if there is none. Arguments may be numbers."""
    return next((g for g in given if isinstance(g, Tensor)), given[0])


def columns(y: ArrayLike) -> Tensor:
    """Return labels [n] as [n, 1]; other shapes are unchanged."""
    t = to_tensor(y, "y")
    return t[:, None] if t.dim() == 1 else t


def column(y: ArrayLike) -> Tensor:
    """Return labels [n, 1] as [n]; other shapes are unchanged."""
    t = to_tensor(y, "y")
    return t[:, 0] if t.dim() == 2 and t.shape[1] == 1 else t


def evolution(K0: ArrayLike, y: ArrayLike, gamma: float, lr: float, f0: ArrayLike | None) -> tuple[Tensor, Tensor, Tensor]:
    """Read the initial condition of optimal feature evolution: K0, y and D(0) = f0 - y."""
    K, y_ = read(K0=(K0, "n n"), y=(column(y), "n"))
    if not (math.isfinite(gamma) and gamma >= 0):
        raise SelectionError(f"gamma={gamma!r}: the feature learning rate is 0 (a frozen kernel) or more; below 0 features would "
                             f"turn away from the labels, without bound. effective_gamma may be negative: then alignment fell, "
                             f"and this theory does not apply.")
    if not (math.isfinite(lr) and lr > 0):
        raise SelectionError(f"lr={lr!r}: a rate above 0 is needed.")
    if not y_.any():
        raise SelectionError("y is zero: no kernel is aligned with it, and nothing is to be learned. Give labels that are not "
                             "all zero.")
    D = -y_ if f0 is None else read(y=(y_, "n"), f0=(column(f0), "n"))[1] - y_
    if not D.any():
        raise SelectionError("f0 equals y: the residual is zero from the start, and nothing moves.")
    return K, y_, D


def times_from_zero(t: Times) -> Float[Tensor, " t"]:
    """Read times as a tensor [t]."""
    given = to_tensor(t if isinstance(t, (Tensor, np.ndarray, float, int)) else list(t), "t")
    (times,) = read(t=(given.reshape(1) if given.dim() == 0 else given, "t"))
    if (times < 0).any():
        raise SelectionError(f"t contains {times.min().item():g}: the flow starts at 0. Give times from 0 on.")
    return times


def whole(least: int = 1, **given: Any) -> None:
    """Raise an error unless sizes and seeds are integers, at least ``least``."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise SelectionError(f"{name}={value!r}; a whole number, at least {least}, is needed.")


def above_zero(what: str = "", **given: Any) -> None:
    """Raise an error unless rates, norms and tolerances are finite numbers above 0. ``what`` names the quantity in the error."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not 0 < value < math.inf:
            raise SelectionError(f"{name}={value!r}: {what}{', ' if what else ''}a number above 0 is needed.")


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Draw standard normal numbers for the cases of a theory, from a seed that includes the shape."""
    return torch.from_numpy(np.random.default_rng((seed, *shape)).standard_normal(shape))
