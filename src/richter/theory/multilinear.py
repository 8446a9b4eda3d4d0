"""The multilinear model of scaling laws: skills of decreasing frequency, each learned by two weights.  [layerwise, Ch. 4]

    f(i, x) = sum_{k <= N} a_k b_k g_k(i, x),   f* = S sum_k g_k,   P(k) = A k^-(alpha + 1),   loss = E[(f - f*)^2] / 2.

The skill functions g_k have disjoint supports, so every skill is learned independently. From a_k = b_k gradient flow makes
R_k = a_k b_k a sigmoid (Lemma 1), later for rarer skills. The loss is a sum over skills. It falls like a power of the scarce
resource: time T, examples D, basis functions N, or compute C = T N.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import Ref, SelectionError
from richter.core.arrays import Array, ArrayLike, like
from richter.theory.arrays import read, whole
from richter.theory.flows import flow
from richter.theory.frame import Theory
from richter.theory.powerlaw import PowerLaw, Values, remaining
from richter.theory.prefactors import Prefactors, prefactors

Resource = float | Sequence[float] | Array
SMALLEST, LARGEST = 1e-150, 1e150  # of the target, and of target times lr; their squares stay within the range of float64


class Exponents(NamedTuple):
    """Exponents of the loss in each scarce resource, and of the optimal time and size in compute.  [Table 4.1, Eq. 4.43]"""

    time: float
    data: float
    parameters: float
    compute: float
    optimal_time: float
    optimal_parameters: float

    @classmethod
    def make(cls, alpha: float) -> Exponents:
        """Exponents of the scaling laws from that of the skills' frequencies."""
        a = alpha
        return cls(-a / (a + 1), -a / (a + 1), -a, -a / (a + 2), (a + 1) / (a + 2), 1 / (a + 2))


class Frontier(NamedTuple):
    """Smallest loss for a given compute, with the parameters and time that reach it."""

    loss: Array
    parameters: Array
    time: Array


class _Model(Protocol):
    """Interface of a model for the scaling laws: its skills, its target, and (S - R) / S of a skill by data share times time."""

    @property
    def law(self) -> PowerLaw: ...
    @property
    def target(self) -> float: ...
    def left(self, y: Values) -> Values: ...


# ------------------------------------------------------------------------------------------------ models


@dataclass(frozen=True)
class Multilinear:
    """Multilinear model of ``skills`` with frequencies A k^-(alpha + 1), target scale S = ``target``, learning rate ``lr`` and
    initial strength R_k(0) = ``initial``. ``rate`` is the 2 of the sigmoid's exponent; tests perturb it.

    >>> model = Multilinear(alpha=0.6, skills=10**6, target=5.0, lr=1.0, initial=0.01)
    >>> model.skill_strength(T=[1.0, 10.0])                      # R_k [skills, t], from infinite data
    >>> model.loss(T=100.0), model.loss(D=10_000), model.loss(N=500)
    >>> model.exponents.time, model.prefactors.time, model.finite_size(10**6)
    """

    alpha: float
    skills: int
    target: float = 5.0
    lr: float = 1.0
    initial: float = 0.01
    rate: float = field(default=2.0, kw_only=True)

    def __post_init__(self) -> None:
        _check(self.law, target=self.target, lr=self.lr)
        if not 0 < self.initial < self.target:
            raise SelectionError(f"initial={self.initial!r}: the strength at the start lies between 0 and the target, "
                                 f"{self.target:g}. From 0 the flow never leaves, and the closed form needs a_k = b_k.")

    @cached_property
    def law(self) -> PowerLaw:
        """Power law of the skills' frequencies."""
        return PowerLaw(self.alpha, self.skills)

    def left(self, y: Values) -> Values:
        """Return (S - R) / S after training on a data share d_k / D for a time T, y = share T.  [Eq. 4.11]"""
        return torch.sigmoid(self._delay - self.rate * self.lr * self.target * y)

    def skill_strength(self, T: Resource, counts: ArrayLike | None = None, D: float | None = None) -> Array:
        """Return R_k at times T: [skills, t], or [skills] for one time. ``counts`` = d_k of a data set of ``D`` examples
        (default: their sum). Without counts, data are infinite and shares are the frequencies.  [Eq. 4.11; Lemma 1]"""
        return _strength(self, T, counts, D)

    def loss(self, T: Resource = math.inf, D: Resource = math.inf, N: int | Sequence[int] | Array | None = None) -> float | Array:
        """Expected loss after a time T, over data sets of D examples, with the N most frequent skills as basis functions. Each
        argument is a number or an array; arrays have one length. A skill without examples, or beyond N, costs S^2 / 2, which is
        the limit of small initial strengths.  [Eqs. 4.17, 4.28, 4.36]"""
        return _loss(self, T, D, N)

    def loss_of(self, counts: ArrayLike, T: float = math.inf, D: float | None = None, N: int | None = None) -> float:
        """Loss after training on one data set, with d_k = ``counts`` examples of each skill.  [Eq. 4.17]"""
        return _loss_of(self, counts, T, D, N)

    @cached_property
    def exponents(self) -> Exponents:
        """Exponents of the scaling laws."""
        return Exponents.make(self.alpha)

    @cached_property
    def prefactors(self) -> Prefactors:
        """Prefactors c in loss = c x^exponent, after the finite-size correction, and of the optimal time and size in compute."""
        # a skill that starts above a half has no half time
        half = max(self._delay, math.log(2)) / (self.rate * self.lr * self.target)
        return prefactors(self.law, self.left, self.target, half)

    def finite_size(self, N: int | None = None) -> float:
        """Return L_C = S^2 A N^-alpha / (2 alpha), the cost of skills beyond N if there were infinitely many. The loss of N
        skills follows the power laws only after L_C is added. Default N: all skills.  [Eq. C.2]"""
        whole(N=self.skills if N is None else N)
        return self.target**2 * self.law.A * float(self.skills if N is None else N) ** -self.alpha / (2 * self.alpha)

    def frontier(self, C: Resource) -> Frontier:
        """Smallest loss for compute C = T N, over N = 1..60 and then in steps of 2 %.  [Sec. 4.3.4]"""
        return _frontier(self, C)

    def emergent_time(self, eps: float = 0.5) -> Array:
        """Time at which R_k / S = eps [skills].  [Sec. 3.4.2]"""
        _between(eps)
        y = (self._delay + math.log(eps / (1 - eps))) / (self.rate * self.lr * self.target)
        return np.maximum(0.0, y) / self.law.frequency(np.arange(1, self.skills + 1))

    def saturation_time(self, eps: float = 0.05) -> Array:
        """Time from R_k / S = eps to 1 - eps [skills]."""
        _between(eps, below=0.5)
        y = 2 * math.log((1 - eps) / eps) / (self.rate * self.lr * self.target)
        return np.asarray(y / self.law.frequency(np.arange(1, self.skills + 1)))

    def simulate(self, T: Sequence[float] | Array, counts: ArrayLike | None = None, D: float | None = None) -> Array:
        """Return R_k [skills, t] by integrating the gradient flow of all a_k and b_k."""
        return simulate(self.alpha, self.skills, self.target, self.lr, self.initial, T, counts, D)[0]

    @cached_property
    def _delay(self) -> float:
        """log((S - R(0)) / R(0)), which delays the sigmoid."""
        return math.log(self.target - self.initial) - math.log(self.initial)


@dataclass(frozen=True)
class Linear:
    """The linear model f = sum_k w_k g_k from w = 0, with the same basis and exponents. Its skills saturate from the start,
    without an emergence time.  [App. C.2]"""

    alpha: float
    skills: int
    target: float = 5.0
    lr: float = 1.0
    rate: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        _check(self.law, target=self.target, lr=self.lr)

    @cached_property
    def law(self) -> PowerLaw:
        """Power law of the skills' frequencies."""
        return PowerLaw(self.alpha, self.skills)

    def left(self, y: Values) -> Values:
        """Share of a skill that is not learned after time times frequency y."""
        return torch.exp(-self.rate * self.lr * y)

    def skill_strength(self, T: Resource, counts: ArrayLike | None = None, D: float | None = None) -> Array:
        """Return R_k = S (1 - exp(-lr d_k T / D)); arguments as in ``Multilinear.skill_strength``.  [Eq. C.4]"""
        return _strength(self, T, counts, D)

    def loss(self, T: Resource = math.inf, D: Resource = math.inf, N: int | Sequence[int] | Array | None = None) -> float | Array:
        """Expected loss; arguments as in ``Multilinear.loss``."""
        return _loss(self, T, D, N)

    @cached_property
    def exponents(self) -> Exponents:
        """Exponents of the scaling laws."""
        return Exponents.make(self.alpha)

    @cached_property
    def prefactors(self) -> Prefactors:
        """Prefactors of the scaling laws."""
        return prefactors(self.law, self.left, self.target, math.log(2) / (self.rate * self.lr))

    def simulate(self, T: Sequence[float] | Array, counts: ArrayLike | None = None, D: float | None = None) -> Array:
        """Return R_k [skills, t] by integrating the gradient flow."""
        return simulate_linear(self.alpha, self.skills, self.target, self.lr, T, counts, D)[0]


# ------------------------------------------------------------------------------------------------ what the laws share


def _check(law: PowerLaw, **positive: float) -> None:
    """Raise an error unless all are positive and within the range of float64."""
    for name, value in positive.items():
        if not (math.isfinite(value) and value > 0):
            raise SelectionError(f"{name}={value!r}: a number above 0 is needed.")
    if not SMALLEST < positive["target"] < LARGEST or not SMALLEST < positive["target"] * positive["lr"] < LARGEST:
        raise SelectionError(f"target={positive['target']:g} with lr={positive['lr']:g}: losses go with the square of the target "
                             f"and rates with lr times target, which leave the range of float64. Give them in other units.")


def _between(eps: float, below: float = 1.0) -> None:
    """Raise an error unless eps is a share below ``below``."""
    if not 0 < eps < below:
        raise SelectionError(f"eps={eps!r}: a share of the target between 0 and {below:g} is needed.")


def _amounts(name: str, value: Any) -> Float[Tensor, " n"]:
    """Read one number or a list of numbers from 0 on; infinity is allowed."""
    t = value.detach().double() if isinstance(value, Tensor) else torch.as_tensor(np.array(value, dtype=np.float64))
    if t.dim() > 1 or not t.numel() or bool((t < 0).any()) or bool(t.isnan().any()):
        raise SelectionError(f"{name} = {value!r}: a number from 0 on, or a list of them, is needed (inf: without end).")
    return t.reshape(-1)


def _strength(model: _Model, T: Resource, counts: ArrayLike | None, D: float | None) -> Array:
    """Strength of each skill at these times, [skills, t]."""
    times = _amounts("T", T)
    share = torch.from_numpy(_shares(model.law, counts, D)).to(times.device)[:, None]
    R = model.target * (1 - model.left(torch.where(share == 0, 0.0, share * times)))
    return like(R if _listed(T) else R[:, 0], counts if counts is not None else T)


def _shares(law: PowerLaw, counts: ArrayLike | None, D: float | None) -> np.ndarray:
    """Share d_k / D of each skill in the data."""
    if counts is None:
        if D is not None and math.isfinite(D):
            raise SelectionError(f"D={D!r} examples: which skills they are of decides; give counts, or use loss(D=...), the mean "
                                 f"over data sets.")
        return law.frequency(np.arange(1, law.skills + 1))
    d = read(counts=(counts, "skills"))[0].cpu().numpy()
    total = d.sum() if D is None else D
    if len(d) != law.skills or (d < 0).any() or total <= 0 or d.sum() > total * (1 + 1e-12):
        raise SelectionError(f"counts of {len(d)} skills, from {d.min():g} on, {d.sum():g} together, of D={total:g} examples: a "
                             f"number from 0 on for each of {law.skills} skills is needed, no more than D together.")
    return np.asarray(d / total)


def _listed(value: Any) -> bool:
    """Return whether a value is a list or an array, not a single number."""
    return isinstance(value, (list, tuple)) or (isinstance(value, (np.ndarray, Tensor)) and value.ndim > 0)


def _sizes(N: Any, skills: int) -> list[int]:
    """Numbers of basis functions, at most as many as skills."""
    given = np.atleast_1d(skills if N is None else N.cpu() if isinstance(N, Tensor) else N)
    if given.ndim > 1 or not given.size or not np.isfinite(given).all() or (given < 0).any() or (given != given.round()).any():
        raise SelectionError(f"N={N!r}: whole numbers of basis functions, from 0 on, are needed; {skills} is all of them.")
    return [min(int(n), skills) for n in given]


def _loss(model: _Model, T: Resource, D: Resource, N: Any) -> float | Array:
    """Loss for times, data and parameters, each one number or a list."""
    times, data, sizes = _amounts("T", T), _amounts("D", D), _sizes(N, model.law.skills)
    lengths = {len(v) for v, given in ((times, T), (data, D), (sizes, N)) if _listed(given)}
    if len(lengths) > 1:
        raise SelectionError(f"T has {len(times)} entries, D {len(data)} and N {len(sizes)}: those that are lists are of one "
                             f"length, and the losses are of their first, second, ... entries together.")
    (length,) = lengths or {1}
    pairs = list(zip(data.tolist() * (length if len(data) == 1 else 1), sizes * (length if len(sizes) == 1 else 1), strict=True))
    times = times.expand(length) if len(times) == 1 else times
    out = torch.zeros(length, dtype=torch.float64, device=times.device)
    for pair in dict.fromkeys(pairs):
        rows = torch.tensor([i for i, p in enumerate(pairs) if p == pair], device=times.device)
        out[rows] = model.target**2 / 2 * (remaining(model.law, model.left, times[rows], *pair) if pair[1] else 1.0)
    return like(out, next(v for v in (T, D, N) if _listed(v))) if lengths else out.item()


def _loss_of(model: _Model, counts: ArrayLike, T: float, D: float | None, N: int | None) -> float:
    """Loss for a sample with these counts of the skills."""
    share = _shares(model.law, counts, D)
    (size,), (T,) = _sizes(N, model.law.skills), _amounts("T", T).tolist()
    left = model.left(torch.where(torch.from_numpy(share) == 0, 0.0, torch.from_numpy(share) * T)).numpy()
    left[(share == 0) | (np.arange(len(share)) >= size)] = 1.0
    return float(model.target**2 / 2 * (model.law.frequency(np.arange(1, len(share) + 1)) @ left**2))


def _frontier(model: _Model, C: Resource) -> Frontier:
    """Lowest loss for each compute, with its number of parameters and time."""
    compute = _amounts("C", C)
    last = model.law.skills
    sizes = np.unique(np.concatenate([np.arange(1, min(60, last) + 1), np.geomspace(1, last, 1 + math.ceil(math.log(last) / 0.02)
                                                                                    ).round()])).astype(int)
    losses = torch.stack([model.target**2 / 2 * remaining(model.law, model.left, compute / n, math.inf, int(n)) for n in sizes])
    best = losses.argmin(0)
    N = torch.from_numpy(sizes).to(compute.device)[best].double()
    return Frontier(*(like(v, C if _listed(C) else [0.0]) for v in (losses.gather(0, best[None])[0], N, compute / N)))


# ------------------------------------------------------------------------------------------------ predict and simulate


def predict(alpha: float, skills: int, target: float, lr: float, initial: float, T: Resource, counts: ArrayLike | None = None,
            D: float | None = None, *, rate: float = 2.0) -> tuple[Array, Array]:
    """Return (R [skills, t], loss [t]) of ``Multilinear``, for infinite data or for one data set."""
    model = Multilinear(alpha, skills, target, lr, initial, rate=rate)
    return _predict(model, T, counts, D)


def predict_linear(alpha: float, skills: int, target: float, lr: float, T: Resource, counts: ArrayLike | None = None,
                   D: float | None = None, *, rate: float = 1.0) -> tuple[Array, Array]:
    """Return (R [skills, t], loss [t]) of ``Linear``."""
    return _predict(Linear(alpha, skills, target, lr, rate=rate), T, counts, D)


def _predict(model: Multilinear | Linear, T: Any, counts: ArrayLike | None, D: float | None) -> tuple[Array, Array]:
    """Skill strengths and losses at these times."""
    losses = model.loss(T) if counts is None else np.array([_loss_of(model, counts, float(t), D, None) for t in T])
    return model.skill_strength(T, counts, D), np.asarray(losses)


def predict_loss(alpha: float, skills: int, target: float, lr: float, initial: float, T: Resource, D: int, N: int, *,
                 rate: float = 2.0) -> Array:
    """Losses [t] of ``Multilinear`` at times T, averaged over data sets of D examples, with N basis functions."""
    return np.asarray(Multilinear(alpha, skills, target, lr, initial, rate=rate).loss(T, D, N))


def simulate(alpha: float, skills: int, target: float, lr: float, initial: float, T: Sequence[float] | Array,
             counts: ArrayLike | None = None, D: float | None = None) -> tuple[Array, Array]:
    """Return (R [skills, t], loss [t]) by integrating a' = -lr dL/da and b' = -lr dL/db of the loss on the data. A skill without
    examples costs S^2 / 2."""
    P, share = _drawn(alpha, skills, counts, D)

    def velocity(state: np.ndarray) -> np.ndarray:
        a, b = state
        force = -lr * share * (a * b - target)
        return np.stack([force * b, force * a])

    states = flow(velocity, np.full((2, skills), math.sqrt(initial)), list(T), rtol=1e-12, atol=1e-14)
    return _read_off(np.stack([a * b for a, b in states], 1), P, share, target)


def simulate_linear(alpha: float, skills: int, target: float, lr: float, T: Sequence[float] | Array,
                    counts: ArrayLike | None = None, D: float | None = None) -> tuple[Array, Array]:
    """Return (R [skills, t], loss [t]) by integrating w' = -lr dL/dw."""
    P, share = _drawn(alpha, skills, counts, D)
    states = flow(lambda w: lr * share * (target - w), np.zeros(skills), list(T), rtol=1e-12, atol=1e-14)
    return _read_off(np.stack(states, 1), P, share, target)


def simulate_loss(alpha: float, skills: int, target: float, lr: float, initial: float, T: Sequence[float] | Array, D: int,
                  N: int) -> Array:
    """Losses [t] of every data set of D examples, each trained by integrating its flow, averaged with their probabilities."""
    P, _ = _drawn(alpha, skills, None, None)
    out = np.zeros(len(T))
    for counts in itertools.product(range(D + 1), repeat=skills):
        if sum(counts) == D:
            d = np.array(counts)
            ways = math.factorial(D) / math.prod(math.factorial(c) for c in counts)
            R = np.asarray(simulate(alpha, skills, target, lr, initial, T, d, D)[0])
            lost = np.where((d == 0)[:, None] | (np.arange(skills) >= N)[:, None], target, target - R)
            out += ways * float(np.prod(P**d)) * (P @ lost**2) / 2
    return out


def _drawn(alpha: float, skills: int, counts: ArrayLike | None, D: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Return frequencies, and the shares of a data set."""
    powers = np.arange(1, skills + 1) ** -(1.0 + alpha)
    P = powers / powers.sum()
    d = P if counts is None else np.asarray(counts, dtype=np.float64)
    return P, d / (d.sum() if D is None else D)


def _read_off(R: np.ndarray, P: np.ndarray, share: np.ndarray, target: float) -> tuple[Array, Array]:
    """Skill strengths and the loss that they add up to."""
    return R, P @ np.where((share == 0)[:, None], target, target - R) ** 2 / 2


# ------------------------------------------------------------------------------------------------ theories


def _cases() -> list[tuple[Any, ...]]:
    """Cases on which theory and simulation are compared."""
    t = [0.0, 0.5, 2.0, 10.0]
    return [(0.6, 6, 5.0, 0.3, 0.01, t), (0.1, 3, 1.0, 2.0, 0.4, t), (2.0, 1, 2.0, 1.0, 1e-4, t),
            (0.6, 4, 5.0, 0.3, 0.01, t, [7, 0, 2, 1]), (0.6, 3, 5.0, 0.3, 0.01, t, [7, 0, 2], 20)]


THEORIES = (
    Theory("multilinear.multilinear", ref=Ref("layerwise", "Lemma 1"),
           title="strengths of skills of falling frequency, and their loss, at all times",
           predict=predict, simulate=simulate, cases=_cases, tolerance=1e-8, perturb={"rate": 1.0}),
    Theory("multilinear.linear", ref=Ref("layerwise", "App. C.2"), title="the same of a linear model with the same basis",
           predict=predict_linear, simulate=simulate_linear, cases=lambda: [(*c[:4], *c[5:]) for c in _cases()], tolerance=1e-8,
           perturb={"rate": 2.0}),
    Theory("multilinear.loss", ref=Ref("layerwise", "Eqs. 4.17, 4.28"),
           title="its loss in time, data and parameters, over all data sets",
           predict=predict_loss, simulate=simulate_loss,
           cases=lambda: [(0.6, 3, 5.0, 0.3, 0.01, [0.5, 3.0, 40.0], 4, 3), (0.3, 3, 1.0, 1.0, 0.1, [1.0, 5.0], 3, 2)],
           tolerance=1e-8, perturb={"rate": 1.0}),
)
