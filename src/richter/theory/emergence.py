"""When skills emerge in time, data and width: the multilinear model with one more constant each, calibrated on a single skill.

A network has no skill functions and must learn them. The cost of this is one constant for each resource [layerwise, Ch. 5]:
    time    g_k is scaled by B < 1:             R_k / S = 1 / (1 + (S / R(0) - 1) exp(-2 lr P(k) B^2 S T))              [Eq. 5.2]
    data    D_c functions for each skill:       R_k / S = d_k / D_c, at most 1, from d_k examples                       [B.42]
    width   N_c functions for each skill:       R_k / S = (units of N left for skill k) / N_c, between 0 and 1          [Eq. 5.9]
B^2 has no meaning without R(0): the half time of a skill fixes only log(S / R(0) - 1) / B^2.
Eq. 5.5 prints R_k / S = 1 - sqrt(1 - d_k / D_c), named "text" here. It inverts L = (S - R)^2 / 2, which holds if f is a multiple
of g_k. The function learned by D_c > d_k functions is not a multiple, and then L = (S^2 / 2) (1 - R / S) exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import Ref, SelectionError, unknown
from richter.core.arrays import Array, ArrayLike, like
from richter.theory.arrays import normal, read, times_from_zero, whole
from richter.theory.flows import flow
from richter.theory.frame import Theory

Form = Literal["corrected", "text"]
FORMS: tuple[Form, Form] = ("corrected", "text")

# ------------------------------------------------------------------------------------------------ calibrated on one skill


@dataclass(frozen=True)
class Emergence:
    """Skill strengths over S of a network, from three constants: ``speed`` = B^2 (with R(0) / S = ``initial``), ``shots`` = D_c,
    ``units`` = N_c. ``calibrated`` fits them to a network that learns one skill.

    >>> model = Emergence.calibrated(target=5.0, lr=0.05, time=(T, R), data=(D, R), width=(N, R))     # R over S, of one skill
    >>> model.in_time(T, frequencies), model.in_data(D, frequencies), model.in_width(N, skills=5)     # [skills, ...]
    >>> model.time(frequencies), model.data(frequencies), model.width(skills=5)                       # T, D, N at which R = S / 2
    """

    speed: float = math.nan
    shots: float = math.nan
    units: float = math.nan
    target: float = 5.0
    lr: float = 0.05
    initial: float = 1e-3
    form: Form = "corrected"

    def __post_init__(self) -> None:
        for name in ("target", "lr"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise SelectionError(f"{name}={getattr(self, name)!r}: a number above 0 is needed.")
        if not 0 < self.initial < 0.5:
            raise SelectionError(f"initial={self.initial!r}: R(0) / S lies between 0 and 1/2. B^2 cannot be told without it: "
                                 f"another R(0) gives another B^2 for the same curve.")
        if self.form not in FORMS:
            raise unknown("emergence in data", "form", self.form, FORMS)

    @classmethod
    def calibrated(cls, target: float = 5.0, lr: float = 0.05, initial: float = 1e-3, form: Form = "corrected", *,
                   time: tuple[ArrayLike, ArrayLike] | None = None, data: tuple[ArrayLike, ArrayLike] | None = None,
                   width: tuple[ArrayLike, ArrayLike] | None = None) -> Emergence:
        """Fit the constants to the points where the strength of a single skill, over S, reaches a half; NaN for missing
        resources."""
        start = cls(1.0, 1.0, 1.0, target, lr, initial, form)
        speed = start.time([1.0])[0] / crossing(*time) if time is not None else math.nan
        shots = crossing(*data) / start.data([1.0])[0] if data is not None else math.nan
        units = crossing(*width) / start.width(1)[0] if width is not None else math.nan
        return cls(float(speed), float(shots), float(units), target, lr, initial, form)

    def in_time(self, T: ArrayLike, frequencies: ArrayLike) -> np.ndarray:
        """Return R_k / S at times T [skills, t].  [Eq. 5.2]"""
        y = np.outer(self._known("speed") * _frequencies(frequencies), _numbers("T", T))
        return np.asarray(1 / (1 + (1 / self.initial - 1) * np.exp(-2 * self.lr * self.target * y)))

    def in_data(self, D: ArrayLike, frequencies: ArrayLike) -> np.ndarray:
        """Return R_k / S for D examples in all, d_k = D P(k) of each skill [skills, D].  [B.42, or Eq. 5.5 as printed]"""
        return data_strength(np.outer(_frequencies(frequencies), _numbers("D", D)), self._known("shots"), self.form)

    def in_width(self, N: ArrayLike, skills: int) -> np.ndarray:
        """Return R_k / S with N units [skills, N].  [Eq. 5.9]"""
        return width_strength(N, self._known("units"), skills)

    def time(self, frequencies: ArrayLike, share: float = 0.5) -> np.ndarray:
        """Time at which R_k / S reaches ``share`` [skills]."""
        y = math.log(1 / self.initial - 1) + math.log(_share(share) / (1 - share))
        return np.asarray(y / (2 * self.lr * self.target * self._known("speed") * _frequencies(frequencies)))

    def data(self, frequencies: ArrayLike, share: float = 0.5) -> np.ndarray:
        """Number of examples at which R_k / S reaches ``share`` [skills]."""
        part = _share(share) if self.form == "corrected" else 1 - (1 - _share(share)) ** 2
        return np.asarray(part * self._known("shots") / _frequencies(frequencies))

    def width(self, skills: int, share: float = 0.5) -> np.ndarray:
        """Number of units at which R_k / S reaches ``share`` [skills]."""
        whole(skills=skills)
        return self._known("units") * (np.arange(skills) + _share(share))

    def _known(self, name: str) -> float:
        """Return a constant of the model; raise an error if it is neither given nor calibrated."""
        value: float = getattr(self, name)
        if not (math.isfinite(value) and value > 0):
            raise SelectionError(f"{name}={value!r}: this constant is not known. Give it, or calibrate it on one skill "
                                 f"(Emergence.calibrated).")
        return value


def crossing(x: ArrayLike, strength: ArrayLike, share: float = 0.5) -> float:
    """Return the first x at which a curve reaches ``share``, by linear interpolation in log x (in x, if the left x is 0)."""
    a, r = (v.cpu().numpy() for v in read(x=(x, "x"), strength=(strength, "x")))
    if (np.diff(a) <= 0).any() or a[0] < 0:
        raise SelectionError("x must grow from one entry to the next, from 0 on: it is a time, or an amount of data or units.")
    above = np.flatnonzero(r >= share)
    if not len(above):
        raise SelectionError(f"the strength reaches {r.max():.3g} of the target and never {share:g}: the skill was not learned, "
                             f"and nothing can be calibrated on it. Train longer, or with more of what is varied.")
    i = int(above[0])
    if i == 0:
        raise SelectionError(f"the strength is {r[0]:.3g} of the target at the first x, {a[0]:g}, above {share:g}: where it was "
                             f"crossed cannot be seen. Begin with a smaller x.")
    part = (share - r[i - 1]) / (r[i] - r[i - 1])
    if a[i - 1] == 0:
        return float(a[i] * part)
    return float(a[i - 1] * (a[i] / a[i - 1]) ** part)


def data_strength(counts: ArrayLike, shots: float, form: Form = "corrected") -> np.ndarray:
    """R / S of a D_c-shot learner, ``shots`` = D_c, from ``counts`` examples of a skill.  [Prop. B.1.1]"""
    if form not in FORMS:
        raise unknown("emergence in data", "form", form, FORMS)
    part = np.clip(np.asarray(counts, dtype=np.float64) / _above(0, "shots", shots), 0, 1)
    return np.asarray(part if form == "corrected" else 1 - np.sqrt(1 - part))


def width_strength(N: ArrayLike, units: float, skills: int, *, partial: bool = True) -> np.ndarray:
    """Return R_k / S [skills, N] if the first N_c = ``units`` functions serve skill 1, the next ones skill 2, and so on. With
    ``partial=False`` a skill with fewer than all its functions has strength 0.  [Eq. 5.9; Prop. B.1.2]"""
    whole(skills=skills)
    part = np.clip(_numbers("N", N)[None, :] / _above(0, "units", units) - np.arange(skills)[:, None], 0, 1)
    return np.asarray(part if partial else np.floor(part))


def _share(share: float) -> float:
    """Return a share strictly between 0 and 1; otherwise raise an error."""
    if not 0 < share < 1:
        raise SelectionError(f"share={share!r}: how much of a skill is learned, between 0 and 1, ends excluded.")
    return share


def _above(low: float, name: str, value: float) -> float:
    """Return a finite number above ``low``; otherwise raise an error."""
    if not (math.isfinite(value) and value > low):
        raise SelectionError(f"{name}={value!r}: a number above {low:g} is needed.")
    return value


def _numbers(name: str, value: ArrayLike) -> np.ndarray:
    """One or several numbers, none negative, as an array."""
    a = np.atleast_1d(np.asarray(value, dtype=np.float64))
    if a.ndim != 1 or not a.size or not (a >= 0).all():
        raise SelectionError(f"{name} = {value!r}: numbers from 0 on are needed, one or a list.")
    return a


def _frequencies(value: ArrayLike) -> np.ndarray:
    """Frequencies of the skills as an array, checked."""
    P = read(frequencies=(value, "skills"))[0].cpu().numpy()
    if (P <= 0).any() or P.sum() > 1 + 1e-6:
        raise SelectionError(f"frequencies from {P.min():g} to {P.max():g}, {P.sum():g} together: each skill needs one above 0, "
                             f"and together they are 1 at most.")
    return np.asarray(P)


# ------------------------------------------------------------------------------------------------ the extended model


class LearnedSkill(NamedTuple):
    """Strength R and loss of a skill, learned by a model after a long time."""

    strength: float
    loss: float


@dataclass(frozen=True)
class Extended:
    """The extended model f = a sum_l B_l e_l with D_c orthonormal functions e_l and target g = sum_l e_l / sqrt(D_c), trained on
    d examples with ``features`` [D_c, d] = e_l(x_j). ``a0`` and ``B0`` are the initial values; a0 >= |B0|, otherwise a may end at
    0. ``divisor`` is the 4 of Eq. B.39; tests perturb it.  [Eqs. 5.3-5.4; Lemmas 2, 3]"""

    features: ArrayLike = field(repr=False)
    target: float = 1.0
    a0: float = 1e-3
    B0: ArrayLike = field(default=0.0, repr=False)
    divisor: float = field(default=4.0, kw_only=True)

    def __post_init__(self) -> None:
        if not self.a0 > 0 or float(self._B0.norm()) > self.a0 * (1 + 1e-12):
            raise SelectionError(f"a0={self.a0!r} and |B0|={float(self._B0.norm()):.3g}: a0 above 0 and at least |B0| is needed. "
                                 f"a^2 - |B|^2 is conserved, and below 0 the flow may end at a = 0, where nothing is learned.")

    @cached_property
    def limit(self) -> tuple[Array, Array]:
        """Return (a, B [D_c]) after infinite time.  [Eqs. B.37, B.39]"""
        aim, kept = self._span(self._aim), self._span(self._B0)
        gap = self.a0**2 - float(kept @ kept)
        a = math.sqrt(math.sqrt(float(aim @ aim) + gap**2 / self.divisor) + gap / 2)
        B = aim / a + self._B0 - kept
        return like(torch.tensor(a, dtype=torch.float64), self.features), like(B, self.features)

    @cached_property
    def learned(self) -> LearnedSkill:
        """Skill strength at the end of training, and its features."""
        a, B = (torch.as_tensor(v) for v in self.limit)
        return learned(a * B, self.target)

    def simulate(self, t: Sequence[float] | Array, lr: float = 1.0) -> tuple[Array, Array]:
        """Return (a [t], B [D_c, t]) by integrating the gradient flow of the loss on the data."""
        return simulate_extended(self.features, self.target, self.a0, self.B0, t, lr)

    @cached_property
    def _features(self) -> Float[Tensor, "shots d"]:
        """Features of the examples as a tensor."""
        return read(features=(self.features, "shots d"))[0]

    @cached_property
    def _B0(self) -> Float[Tensor, " shots"]:
        """Initial second-layer coefficients, one per example."""
        if np.ndim(self.B0) == 0:
            return torch.full((len(self._features),), float(self.B0), dtype=torch.float64)
        return read(features=(self.features, "shots d"), B0=(self.B0, "shots"))[1]

    @cached_property
    def _aim(self) -> Float[Tensor, " shots"]:
        """Value that the skill's function has in each example, target / sqrt(shots)."""
        return torch.full_like(self._B0, self.target / math.sqrt(len(self._B0)))

    def _span(self, v: Float[Tensor, " shots"]) -> Float[Tensor, " shots"]:
        """Return U U^T v, the projection of v onto the span of the data."""
        U, s, _ = torch.linalg.svd(self._features, full_matrices=False)
        U = U[:, s > s.max() * 1e-12]
        return U @ (U.T @ v)


def learned(v: Float[Tensor, " shots"], target: float) -> LearnedSkill:
    """Return strength and loss of f = sum_l v_l e_l over all inputs: R = sum v / sqrt(D_c), L = |S 1 / sqrt(D_c) - v|^2 / 2."""
    root = math.sqrt(len(v))
    return LearnedSkill(float(v.sum()) / root, float((target / root - v).square().sum()) / 2)


def projected(features: ArrayLike, target: float, *, form: Form = "corrected") -> tuple[float, float]:
    """Return (R, loss) of the minimum-norm solution v = U U^T S 1 / sqrt(D_c), to which the extended multilinear model from small
    weights and the extended linear model both converge. The form "text" derives R from the loss by Eq. 4.10.  [App. C.2,
    B.1.6]"""
    if form not in FORMS:
        raise unknown("emergence in data", "form", form, FORMS)
    model = Extended(features, target)
    out = learned(model._span(model._aim), target)
    return (out.strength if form == "corrected" else target - math.sqrt(2 * out.loss)), out.loss


# ------------------------------------------------------------------------------------------------ simulate


def predict_extended(features: ArrayLike, target: float, a0: float, B0: ArrayLike, t: Sequence[float] | Array, *,
                     divisor: float = 4.0) -> tuple[Array, Array]:
    """Return (a, B [D_c]) at the end of ``t``, which must be late enough for convergence."""
    return Extended(features, target, a0, B0, divisor=divisor).limit


def simulate_extended(features: ArrayLike, target: float, a0: float, B0: ArrayLike, t: Sequence[float] | Array, lr: float = 1.0
                      ) -> tuple[Array, Array]:
    """Return (a [t], B [D_c, t]) by integrating the gradient flow of L = mean_j (sum_l (S / sqrt(D_c) - a B_l) e_l(x_j))^2 /
    2."""
    Phi = read(features=(features, "shots d"))[0].cpu().numpy()
    aim = target * Phi.sum(0) / math.sqrt(len(Phi))

    def velocity(state: np.ndarray) -> np.ndarray:
        a, B = state[0], state[1:]
        g = lr / Phi.shape[1] * (Phi @ (aim - a * (B @ Phi)))
        return np.concatenate([[B @ g], a * g])

    start = np.concatenate([[a0], np.broadcast_to(np.asarray(B0, dtype=np.float64), len(Phi))])
    path = flow(velocity, start, times_from_zero(t).tolist(), rtol=1e-12, atol=1e-14)
    states = np.stack(path, 1)
    return like(torch.from_numpy(states[0]), features), like(torch.from_numpy(states[1:]), features)


def simulate_projected(features: ArrayLike, target: float) -> tuple[float, float]:
    """Return (R, loss) of the extended linear model, trained from W = 0 by gradient descent until it fits the data."""
    (Phi,) = read(features=(features, "shots d"))
    y, W, lr = target * Phi.sum(0) / math.sqrt(len(Phi)), torch.zeros(len(Phi), dtype=torch.float64), 1.9
    lr /= torch.linalg.matrix_norm(Phi, 2).item() ** 2
    for _ in range(200_000):
        gap = y - W @ Phi
        W = W + lr * (Phi @ gap)
        if float(gap.abs().max()) < 1e-12 * target:
            break
    return float(W.sum()) / math.sqrt(len(W)), float((target / math.sqrt(len(W)) - W).square().sum()) / 2


def _simulated_end(*case: Any) -> tuple[Array, Array]:
    """Coefficients at the end of the simulation."""
    a, B = simulate_extended(*case)
    return a[-1], B[:, -1]


def simulate_shots(counts: Sequence[int], shots: int, seed: int = 0, draws: int = 1000) -> np.ndarray:
    """Mean of R / S over ``draws`` of Gaussian features, by least squares for each number of examples."""
    rng, out = np.random.default_rng((seed, shots)), []
    for d in counts:
        Phi = rng.standard_normal((draws, d, shots))
        y = Phi.sum(2, keepdims=True)
        out.append(float((y * np.linalg.solve(Phi @ Phi.transpose(0, 2, 1), y)).sum(1).mean() / shots))
    return np.array(out)


def simulate_width(N: Sequence[int], units: int, skills: int) -> np.ndarray:
    """Return R_k / S [skills, N] by integrating the flow of the extended model with N functions and infinite data.  [Eq. 5.6,
    B.47]"""
    P = np.arange(1, skills + 1)[:, None, None] ** -1.6
    has = np.arange(units) < (np.array(N)[:, None] - units * np.arange(skills)[:, None, None])  # functions of each skill

    def velocity(state: list[np.ndarray]) -> list[np.ndarray]:
        a, B = state
        g = P * np.where(has, 1 / math.sqrt(units) - a[..., None] * B, 0.0)
        return [(B * g).sum(-1), a[..., None] * g]

    a, B = flow(velocity, [np.full(has.shape[:2], 1e-3), np.zeros(has.shape)], [400.0], rtol=1e-11, atol=1e-13)[0]
    return np.asarray((a[..., None] * B).sum(-1) / math.sqrt(units))


# ------------------------------------------------------------------------------------------------ theories


def _cases() -> list[tuple[Any, ...]]:
    """Cases on which the limit and the simulation are compared."""
    late = [0.0, 60.0]
    return [(normal(8, 3, seed=1), 2.0, 0.3, 0.05 * normal(8, seed=2), late),
            (normal(7, 2, seed=3), 1.0, 0.8, 0.2 * normal(7, seed=4), late), (normal(6, 1, seed=5), 5.0, 0.1, 0.0, late)]


THEORIES = (
    Theory("emergence.extended", ref=Ref("layerwise", "Prop. B.1.1"), title="where the weights of a D_c-shot learner end",
           predict=predict_extended, simulate=_simulated_end, cases=_cases, tolerance=1e-8, perturb={"divisor": 1.0}),
    Theory("emergence.projected", ref=Ref("layerwise", "App. B.1.6, C.2"),
           title="strength and loss of a skill that was seen less than D_c times, in one draw",
           predict=projected, simulate=simulate_projected,
           cases=lambda: [(normal(12, d, seed=d), S) for d, S in ((3, 1.0), (6, 5.0), (1, 2.0))],
           tolerance=1e-8, perturb={"form": "text"}),
    Theory("emergence.shots", ref=Ref("layerwise", "Eqs. 5.5, B.42"), title="strength of a skill by the number of its examples",
           predict=data_strength, simulate=simulate_shots, cases=lambda: [([4, 10, 20, 30, 38], 40), ([5, 15], 20)],
           tolerance=0.03, perturb={"form": "text"}, seeds=(0, 1)),
    Theory("emergence.width", ref=Ref("layerwise", "Prop. B.1.2"), title="strengths of skills by the number of units",
           predict=width_strength, simulate=simulate_width, cases=lambda: [([1, 3, 4, 6, 9, 12], 4, 3), ([1, 2], 1, 2)],
           tolerance=1e-8, perturb={"partial": False}),
)
