"""Training under a frozen kernel, and how far a kernel is from staying frozen.  [rapid, Sec. 2, 7]

Squared error, gradient of sum (f - y)^2 / 2 with rate ``lr``: one step is D <- (I - lr K) D for the residual D = f - y. One
eigendecomposition gives every step of it, ``loss`` being sum D^2, without the half.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import SelectionError
from richter.core.arrays import Array, ArrayLike, like, to_tensor
from richter.linalg import ExponentInterval, power_law_interval

ROUNDING = 1e-6  # of a kernel: asymmetry and negative eigenvalues up to this are those of single precision


# ------------------------------------------------------------------------------------------------ under a frozen kernel


@dataclass(frozen=True)
class Descent:
    """Residuals f - y and the loss at the recorded ``times`` (steps of a descent). Residuals are formed when they are read."""

    times: Array
    loss: Array  # sum of squared residuals, over examples and outputs
    lr: float
    kind: Literal["descent", "flow"]
    _modes: Modes = field(repr=False)
    _decay: Float[Tensor, "t b m"] = field(repr=False)

    @cached_property
    def residual(self) -> Array:
        """f - y [t, n], or [t, n, k] for labels [n, k]."""
        parts = (self._decay[..., None] * self._modes.start).permute(1, 2, 0, 3)  # b m t c
        whole = (self._modes.vectors @ parts.flatten(2)).reshape(parts.shape)
        return like(self._modes.as_labels(whole.permute(2, 0, 1, 3)), self._modes.given)


def kernel_gradient_descent(K: ArrayLike, y: ArrayLike, lr: float, steps: int, f0: ArrayLike | None = None,
                            record: Sequence[int] | Array | None = None) -> Descent:
    """f after each step of gradient descent under the kernel K, from f = ``f0`` (0): ``.residual`` [steps+1, n] = f - y and
    ``.loss`` [steps+1], step 0 included. ``record``: the steps to return, by default all; 10^6 of them cost no more than one.

    y [n], or [n, k] with a kernel [n, n] that all outputs share, [k, n, n] of each output, or [n, k, n, k] of all pairs.

    >>> descent = kernel_gradient_descent(K, y, lr=0.1, steps=10**6, record=[0, 10**3, 10**6])
    """
    times = _recorded(steps, record)
    modes = Modes.read(K, y, f0)
    _stable(lr, modes.largest)
    return _descended(modes, lr, times)


def _descended(modes: Modes, lr: float, times: list[int]) -> Descent:
    """Gradient descent after these numbers of steps, mode by mode."""
    rate = lr * modes.values
    # exp(t log|1 - lr lambda|) keeps the digits of a small lr lambda over many steps; beyond 1 the sign alternates
    log = torch.where(rate < 1, torch.log1p(-rate.clamp(max=1)), torch.log1p((rate - 2).clamp(min=-1))).clamp(min=-1e6)
    t = torch.tensor(times, dtype=torch.float64, device=rate.device)[:, None, None]
    decay = torch.exp(t * log) * torch.where((rate > 1) & (t % 2 == 1), -1.0, 1.0)
    return modes.descent(times, decay, lr, "descent")


def kernel_gradient_flow(K: ArrayLike, y: ArrayLike, lr: float, times: Sequence[float] | Array,
                         f0: ArrayLike | None = None) -> Descent:
    """Gradient flow under a frozen kernel, D(t) = exp(-lr K t) D(0): no rate is too large. Arguments as in
    ``kernel_gradient_descent``."""
    _rate(lr)
    t = to_tensor(times, "times")
    if t.dim() != 1 or not len(t) or (t < 0).any():
        raise SelectionError(f"times has shape {tuple(t.shape)}{' and negative entries' if (t < 0).any() else ''}; times [t] are "
                             f"needed, 0 or later.")
    return _flowed(Modes.read(K, y, f0), lr, t)


def _flowed(modes: Modes, lr: float, t: Float[Tensor, " t"]) -> Descent:
    """Gradient flow at these times, mode by mode."""
    decay = torch.exp(-lr * t.to(modes.values.device)[:, None, None] * modes.values)
    return modes.descent(t.tolist(), decay, lr, "flow")


def rescaled_gradient_descent(K0: ArrayLike, K_final: ArrayLike, y: ArrayLike, lr: float, steps: int,
                              f0: ArrayLike | None = None, record: Sequence[int] | Array | None = None) -> Descent:
    """Descent under K0 with the rate lr |K_final| / |K0| from the start: all that a larger kernel can do without turning.
    [rapid, Fig. 1A]

    Where that rate is beyond stability the flow at the same times stands in for it; ``.kind`` says which one it is."""
    _rate(lr)
    times = _recorded(steps, record)
    rate, modes = lr * norm_ratio(K0, K_final), Modes.read(K0, y, f0)
    if rate * modes.largest <= 2:
        return _descended(modes, rate, times)
    return _flowed(modes, rate, torch.tensor(times, dtype=torch.float64))


# ------------------------------------------------------------------------------------------------ spectra


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues and the power of the labels in each eigenvector, largest eigenvalue first, and their power laws.

    lambda_k ~ k^-b over ranks 5 to .6 n; v_k^2 ~ k^-a from the tail sum_{j >= k} v_j^2 ~ k^-(a-1) over ranks 3 to n/2, a mean
    over outputs. A frozen kernel then learns as L(t) ~ t^-(a-1)/b.  [rapid, Sec. 2.1]"""

    eigenvalues: Array  # [n], or [k, n] of one kernel for each output
    power: Array  # v_k^2 = (u_k . y)^2: [n], or [n, k]

    @cached_property
    def b(self) -> ExponentInterval:
        """Exponent of the eigenvalues' decay, with its interval."""
        return power_law_interval(self.eigenvalues)

    @cached_property
    def a(self) -> ExponentInterval:
        """Exponent of the target's power in the tail, with its interval."""
        v = to_tensor(self.power, "power")
        v = (v[:, None] if v.dim() == 1 else v).T
        tail = v.flip(1).cumsum(1).flip(1)
        law = power_law_interval(tail[v.sum(1) > 0], first=3, last=max(v.shape[1] // 2, 3))
        return ExponentInterval(1 + law.exponent, 1 + law.low, 1 + law.high)

    @property
    def loss_exponent(self) -> ExponentInterval:
        """(a - 1) / b; the interval takes the errors of a and b to be independent. NaN for a flat spectrum, b = 0."""
        if self.b.exponent == 0:
            return ExponentInterval(math.nan, math.nan, math.nan)
        value = (self.a.exponent - 1) / self.b.exponent
        half = [(p.high - p.low) / 2 for p in (self.a, self.b)]
        error = math.hypot(half[0], value * half[1]) / abs(self.b.exponent)
        return ExponentInterval(value, value - error, value + error)


def spectrum(K: ArrayLike, y: ArrayLike) -> Spectrum:
    """Spectrum of a kernel [n, n] or kernels [k, n, n] of each output, and labels [n] or [n, k]; none for labels of zeros.
    What is left by rounding, of a kernel with fewer features than examples or of labels in a few eigenvectors, is 0."""
    modes = Modes.read(K, y, None)
    if modes.form == "full":
        raise SelectionError("K has shape [n, k, n, k]; a spectrum over examples is of [n, n], or [k, n, n] of each output: "
                             "give kernels.ntk(..., form='diagonal').")
    if not modes.start.any():
        raise SelectionError("y is zero: it has no power in any eigenvector. Give labels that are not all zero.")
    nothing = modes.values.shape[1] * torch.finfo(modes.values.dtype).eps  # relative
    power = modes.start.square().flip(1)
    power = torch.where(power > nothing**2 * power.sum(1, keepdim=True), power, 0.0)
    power = power[:, :, 0].T if modes.form == "diagonal" else power[0]
    values = modes.values.flip(1)
    values = torch.where(values > nothing * values[:, :1], values, 0.0)
    return Spectrum(like(values if modes.form == "diagonal" else values[0], K), like(power if modes.columns else power[:, 0], K))


# ------------------------------------------------------------------------------------------------ how a kernel evolved


def norm_ratio(K0: ArrayLike, K: ArrayLike) -> float:
    """|K| / |K0|. Here and below kernels have any shape, [k, n, n] or [n, k, n, k] too, the same for both, and norms are over all
    entries."""
    A, B = _pair(K0, K)
    return (B.norm() / A.norm()).item()


def rotation(K0: ArrayLike, K: ArrayLike) -> float:
    """1 - <K0, K> / (|K0| |K|): 0 for a kernel that only grew, at most 1."""
    A, B = _pair(K0, K)
    A, B = A / A.norm(), B / B.norm()
    return ((A - B).square().sum() / 2).item()  # keeps the digits of a small turn


def distance(K0: ArrayLike, K: ArrayLike) -> float:
    """Relative distance |K - K0| / |K0| of two kernels."""
    A, B = _pair(K0, K)
    return ((B - A).norm() / A.norm()).item()


def velocity(before: ArrayLike, after: ArrayLike, dt: float = 1.0) -> float:
    """|after - before| / (|before| dt): the relative change in a unit of time."""
    if not (math.isfinite(dt) and dt > 0):
        raise SelectionError(f"dt={dt!r}: the time between two kernels is needed, more than 0.")
    return distance(before, after) / dt


def overlap(K0: ArrayLike, K: ArrayLike, top: int = 1) -> float:
    """|U0^T U|^2 / top of the ``top`` largest eigenvectors of two kernels [n, n] (a mean over kernels [k, n, n]): 1 if they span
    the same, top/n by chance."""
    A, B = _pair(K0, K)
    if A.dim() not in (2, 3) or not 1 <= top <= A.shape[-1]:
        raise SelectionError(f"kernels {tuple(A.shape)} and top={top!r}: [n, n] or [k, n, n] and 1 to n eigenvectors are needed.")
    U0, U = (torch.linalg.eigh(symmetric(Z, name))[1][..., -top:] for Z, name in ((A, "K0"), (B, "K")))
    return ((U0.mT @ U).square().sum((-2, -1)) / top).mean().item()


def effective_gammas(K0: ArrayLike, K_final: ArrayLike, y: ArrayLike, *, normalised: bool = False) -> Array:
    """For each output the gamma with which optimal feature evolution, K0 + gamma y y^T, has the final kernel's alignment. With
    a = A(K0, y) and A = A(K_final, y):   gamma = |K0| / |y|^2 (-a + A sqrt((1 - a^2) / (1 - A^2))).
    [rapid, Eq. (20), corrected]

    Positive where the alignment rose; infinite where A = 1, NaN where a = 1 too. Kernels [n, n] or [k, n, n], labels [n] or
    [n, k]. ``normalised``: of K0 / |K0|, as in Fig. 6, so that networks of different kernel norms can be compared."""
    A0, A1 = _pair(K0, K_final)
    labels = _labels(y, A0)
    if A0.dim() not in (2, 3) or A0.shape[-1] != len(labels) or (A0.dim() == 3 and len(A0) != labels.shape[1]):
        raise SelectionError(_misfit(A0, labels))
    A0, A1 = (symmetric(Z, name) for Z, name in ((A0, "K0"), (A1, "K_final")))
    energy = labels.square().sum(0)
    if (energy == 0).any():
        raise SelectionError(f"y is zero in {int((energy == 0).sum())} of {len(energy)} outputs: no kernel is aligned with "
                             f"it, and there is no gamma. Leave these outputs out.")
    (p0, q0), (p1, q1) = (_split(Z, labels / energy.sqrt()) for Z in (A0, A1))
    return like((q0 * p1 / q1 - p0) / energy / (A0.flatten(-2).norm(dim=-1) if normalised else 1.0), K0)


def effective_gamma(K0: ArrayLike, K_final: ArrayLike, y: ArrayLike, *, normalised: bool = False) -> float:
    """The mean of ``effective_gammas`` over outputs."""
    return float(effective_gammas(K0, K_final, y, normalised=normalised).mean())


def _split(K: Tensor, u: Float[Tensor, "n k"]) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"]]:
    """p = u^T K u of each unit vector, and the norm q of the rest, K - p u u^T: A = p / sqrt(p^2 + q^2), and what follows from
    A / sqrt(1 - A^2) = p / q keeps its digits where A is near 1."""
    p, q = [], []
    for c, v in enumerate(u.T):
        Kc = K[c] if K.dim() == 3 else K
        p.append(v @ Kc @ v)
        rest = (Kc - p[-1] * torch.outer(v, v)).norm()
        q.append(torch.where(rest > 1e-14 * p[-1], rest, 0.0))  # below it there is only rounding
    return torch.stack(p), torch.stack(q)


# ------------------------------------------------------------------------------------------------ arguments


def symmetric(K: Float[Tensor, "... n m"], name: str = "K") -> Float[Tensor, "... n n"]:
    """(K + K^T) / 2, where that only takes rounding away; of several kernels, from each."""
    if K.shape[-1] != K.shape[-2]:
        raise SelectionError(f"{name} has shape {tuple(K.shape)}; square kernels [..., n, n] are needed, of one set of inputs "
                             f"with itself.")
    off, size = (Z.norm(dim=(-2, -1)) for Z in (K - K.mT, K))
    if (off > ROUNDING * size).any():
        worst = (off / size).nan_to_num().max().item()
        raise SelectionError(f"{name} is not symmetric: |{name} - {name}^T| = {worst:.2g} |{name}|. The kernel of one set of "
                             f"inputs with itself is needed, not that of training with other examples.")
    return (K + K.mT) / 2


def decompose(K: Float[Tensor, "... n n"], name: str = "K") -> tuple[Float[Tensor, "... n"], Float[Tensor, "... n n"]]:
    """Eigenvalues, ascending and not negative, and vectors of a kernel: symmetric, positive semi-definite and not zero."""
    values, vectors = torch.linalg.eigh(symmetric(K, name))
    wrong = values[..., 0] < -ROUNDING * values[..., -1].clamp(min=0)  # each of several
    if wrong.any():
        low, high = values[..., 0][wrong].min().item(), values[..., -1][wrong].max().item()
        raise SelectionError(f"{name} is indefinite: it has the eigenvalue {low:.3g} beside {high:.3g}. A kernel J J^T has "
                             f"none below 0, and under this one residuals would grow for ever. Give the kernel itself, not one "
                             f"that was changed.")
    if not values[..., -1].any():
        raise SelectionError(f"{name} is zero: nothing can be learned under it.")
    return values.clamp(min=0), vectors


@dataclass(frozen=True)
class Modes:
    """A kernel and the initial residual in the kernel's eigenvectors: ``b`` blocks of ``m`` rows, ``c`` columns each."""

    values: Float[Tensor, "b m"]
    vectors: Float[Tensor, "b m m"]
    start: Float[Tensor, "b m c"]
    form: Literal["shared", "diagonal", "full"]
    columns: int  # of the labels as given; 0 for [n]
    given: ArrayLike  # whose kind the results have

    @classmethod
    def read(cls, K: ArrayLike, y: ArrayLike, f0: ArrayLike | None) -> Modes:
        """K [n, n], [k, n, n] or [n, k, n, k]; y and f0 [n] or [n, k]."""
        K_ = to_tensor(K, "K")
        labels = _labels(y, K_)
        n, k = labels.shape
        forms: dict[tuple[int, ...], Literal["shared", "diagonal", "full"]]
        forms = {(n, k, n, k): "full", (k, n, n): "diagonal", (n, n): "shared"}
        if K_.shape not in forms:
            raise SelectionError(_misfit(K_, labels))
        form = forms[tuple(K_.shape)]
        f = torch.zeros_like(labels) if f0 is None else _labels(f0, K_, "f0")
        if f.shape != labels.shape:
            raise SelectionError(f"f0 has shape {tuple(f.shape)} and y {tuple(labels.shape)}: a first output for each label is "
                                 f"needed.")
        blocks, D = {"shared": lambda: (K_[None], (f - labels)[None]), "diagonal": lambda: (K_, (f - labels).T[:, :, None]),
                     "full": lambda: (K_.reshape(1, n * k, n * k), (f - labels).reshape(1, n * k, 1))}[form]()
        values, vectors = decompose(blocks)
        columns = 0 if to_tensor(y, "y").dim() == 1 else k
        return cls(values, vectors, vectors.mT @ D, form, columns, K)

    @property
    def largest(self) -> float:
        """Largest eigenvalue."""
        return self.values.max().item()

    def as_labels(self, parts: Float[Tensor, "t b m c"]) -> Tensor:
        """Convert mode parts to the shape of the labels: [t, n], or [t, n, k]."""
        if self.form == "diagonal":
            parts = parts[..., 0].mT
        else:
            parts = parts[:, 0].reshape(len(parts), -1, max(self.columns, 1))
        return parts if self.columns else parts[..., 0]

    def descent(self, times: Sequence[float], decay: Float[Tensor, "t b m"], lr: float,
                kind: Literal["descent", "flow"]) -> Descent:
        """Residuals and losses from the decay of each mode."""
        loss = torch.einsum("tbm,bm->t", decay.square(), self.start.square().sum(2))
        dtype = torch.int64 if kind == "descent" else torch.float64
        at = torch.tensor(times, dtype=dtype, device=decay.device)
        return Descent(like(at, self.given), like(loss, self.given), lr, kind, self, decay)


def _labels(y: ArrayLike, K: Tensor, name: str = "y") -> Float[Tensor, "n k"]:
    """Labels as a matrix [n, k] on the kernel's device."""
    t = to_tensor(y, name).to(K.device)
    t = t[:, None] if t.dim() == 1 else t
    if t.dim() != 2 or 0 in t.shape:
        raise SelectionError(f"{name} has shape {tuple(t.shape)}; [n] or [n, k] is needed.")
    return t


def _pair(K0: ArrayLike, K: ArrayLike) -> tuple[Tensor, Tensor]:
    """Two kernels as tensors of equal shape, neither of them zero."""
    A = to_tensor(K0, "K0")
    B = to_tensor(K, "K").to(A.device)
    if A.shape != B.shape or A.dim() < 2:
        raise SelectionError(f"kernels of shapes {tuple(A.shape)} and {tuple(B.shape)} cannot be compared: the same examples and "
                             f"outputs are needed in both.")
    for Z, name in ((A, "first"), (B, "second")):
        if not Z.any():
            raise SelectionError(f"the {name} kernel is zero: nothing can be said relative to its norm.")
    return A, B


def _misfit(K: Tensor, y: Float[Tensor, "n k"]) -> str:
    """Sentence about a kernel and labels of different shapes."""
    n, k = y.shape
    return (f"K has shape {tuple(K.shape)} and y is of {n} examples and {k} {'output' if k == 1 else 'outputs'}: they must be of "
            f"the same examples. For these labels K is [{n}, {n}] for all outputs, [{k}, {n}, {n}] for each, or "
            f"[{n}, {k}, {n}, {k}].")


def _rate(lr: float) -> None:
    """Raise an error unless the learning rate is positive."""
    if not (math.isfinite(lr) and lr > 0):
        raise SelectionError(f"lr={lr!r}: a rate above 0 is needed.")


def _stable(lr: float, largest: float) -> None:
    """Raise an error if the learning rate diverges on the largest eigenvalue."""
    _rate(lr)
    if lr * largest > 2 * (1 + 1e-12):
        raise SelectionError(f"lr={lr:g} is beyond stability: with the largest eigenvalue {largest:.6g} each step multiplies a "
                             f"residual by {1 - lr * largest:.3g}, and descent diverges. The largest stable lr is "
                             f"{2 / largest!r}; kernel_gradient_flow takes any.")


def _recorded(steps: int, record: Sequence[int] | Array | None) -> list[int]:
    """Steps to return, checked; by default all."""
    if isinstance(steps, bool) or not isinstance(steps, (int, np.integer)) or steps < 0:
        raise SelectionError(f"steps={steps!r}: a number of steps is needed, 0 or more.")
    if record is None:
        return list(range(steps + 1))
    times = record.tolist() if isinstance(record, Tensor) else list(record)
    for t in times:
        if isinstance(t, bool) or not isinstance(t, (int, np.integer)) or not 0 <= t <= steps:
            raise SelectionError(f"record contains {t!r}: the steps to return are whole numbers from 0 to steps={steps}.")
    return [int(t) for t in times]
