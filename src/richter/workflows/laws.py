"""Laws that a loss may follow as a resource grows (time, data, parameters or compute), and their fits to a curve.

- power law: a x^-beta;
- power law with an offset: a x^-beta + e;
- multilinear: finitely many skills of frequencies ~ k^-(alpha + 1), ``theory.multilinear``. In time and data it begins with a
  plateau. Later it falls faster than its power law, by the finite-size correction: a x^-beta - L_C, where beta is
  alpha / (alpha + 1) in time and data, alpha in parameters and alpha / (alpha + 2) in compute (there this form itself is fitted);
- multilinear with an offset: the same + e, in time and data (elsewhere it is the power law with an offset of either sign).
Errors are relative: squares of differences of logarithms are summed.  [layerwise, Ch. 4; App. C.2]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike, NDArray
from scipy.interpolate import RectBivariateSpline
from scipy.optimize import least_squares
from scipy.stats import t as student

from richter.theory.multilinear import Exponents, Multilinear

Numbers = NDArray[np.float64]
Resource = Literal["time", "data", "parameters", "compute"]
# numbers of skills that are tried in time and data; then numbers between these
SKILLS = (3, 5, 8, 12, 18, 30, 50, 100, 300, 1000, 10_000, 100_000)
ROUNDS = 16  # maximum number of refinements of the number of skills
NEAR = 0.4  # relative likelihood of both neighbours of the best number of skills at which refinement stops
RANGE = (math.log(1e-2), math.log(1e12))  # range of log x, in its unit, of the tabulated losses
SEARCHES = 2  # number of full searches, from the best starting points
ROUNDING = 1e-7  # smallest relative error of a loss, because searches stop there
SLOPES = (0.05, 6.0)  # range of exponents and alphas
ALPHA: dict[Resource, Callable[[float], float]] = {  # alpha as a function of an exponent, by Table 4.1
    "time": lambda b: b / (1 - b) if b < 1 else math.inf, "data": lambda b: b / (1 - b) if b < 1 else math.inf,
    "parameters": lambda b: b, "compute": lambda b: 2 * b / (1 - b) if b < 1 else math.inf}


class Law(NamedTuple):
    """A function of x > 0 with unconstrained parameters (logarithms of positive ones), starting points of the search, and the
    names of the parameters."""

    name: str
    value: Callable[[Numbers, Numbers], Numbers]
    starts: tuple[tuple[float, ...], ...]
    named: Callable[[Numbers, float, float], dict[str, float]]  # takes the parameters, and the units of x and of the loss
    skills: int = 0  # number of skills, if the law has one
    exactly: Callable[[int], Law] | None = None  # makes the same law for any number of skills, without a table


@dataclass(frozen=True)
class LawFit:
    """A law with its fitted parameters. x and loss are in units of ``scale``."""

    law: Law
    theta: Numbers
    covariance: Float[np.ndarray, "k k"]
    rss: float  # residual sum of squares of logarithms, plus rounding errors
    points: int
    scale: tuple[float, float]
    count: int  # number of fitted parameters, including the noise and the number of skills

    @property
    def aicc(self) -> float:
        """Akaike's criterion for few points. Smaller is better; differences are 2 log of the likelihood ratio."""
        n, k = self.points, self.count
        return n * math.log(self.rss / n) + 2 * k + 2 * k * (k + 1) / max(1e-9, n - k - 1)

    @property
    def noise(self) -> float:
        """Standard deviation of the relative error of a point."""
        return math.sqrt(self.rss / max(1, self.points - self.count + 1))

    def parameters(self) -> dict[str, tuple[float, float]]:
        """Return each parameter with its standard error."""
        values = self.law.named(self.theta, *self.scale)
        slopes = _gradient(lambda theta: np.array([*self.law.named(theta, *self.scale).values()]), self.theta)
        errors = np.sqrt(np.maximum(0.0, np.einsum("ij,jk,ik->i", slopes, self.covariance, slopes)))
        return {name: (value, float(e)) for (name, value), e in zip(values.items(), errors, strict=True)}

    def loss(self, x: Numbers) -> tuple[Numbers, Numbers]:
        """Return the loss and its standard error."""
        x = x / self.scale[0]
        slopes = _gradient(lambda theta: _value(self.law, theta, x), self.theta)
        variance = np.einsum("ij,jk,ik->i", slopes, self.covariance, slopes)
        return self.scale[1] * _value(self.law, self.theta, x), self.scale[1] * np.sqrt(np.maximum(0.0, variance))


@dataclass(frozen=True)
class Average:
    """Fits of one law that differ in the number of skills, each with its probability; ``best`` is the most likely."""

    name: str
    fits: tuple[LawFit, ...]
    shares: tuple[float, ...]

    @property
    def best(self) -> LawFit:
        """Law with the smallest residual."""
        return min(self.fits, key=lambda fit: fit.rss)

    def predict(self, x: ArrayLike, confidence: float = 0.95) -> tuple[Numbers, Numbers, Numbers]:
        """Predict the loss at x, and the ends of the interval of the curve (without the noise of a point)."""
        x = np.atleast_1d(np.asarray(x, np.float64))
        losses = [fit.loss(x) for fit in self.fits]
        means, errors = np.stack([m for m, _ in losses]), np.stack([e for _, e in losses])
        p = np.array(self.shares)[:, None]
        mean = (p * means).sum(0)
        wide = float(student.ppf(0.5 + confidence / 2, max(1, self.best.points - self.best.count + 1)))
        reach = wide * np.sqrt((p * (errors**2 + (means - mean)**2)).sum(0))
        near = np.exp(np.minimum(reach / mean, 1.0))  # relative errors, if they are small
        return mean, np.where(reach < mean, mean / near, 0.0), np.where(reach < mean, mean * near, mean + reach)


# ------------------------------------------------------------------------------------------------------------------- the laws

def _power(slopes: Sequence[float]) -> Law:
    """Power law with starting values."""
    return Law("power law", lambda th, x: np.exp(th[0]) * x**-np.exp(th[1]), tuple((0.0, math.log(b)) for b in slopes),
               lambda th, u, v: {"exponent": math.exp(th[1]), "prefactor": _prefactor(th, u, v)})


def _offset(slopes: Sequence[float], floor: float) -> Law:
    """Power law with an offset, with starting values."""
    starts = tuple((math.log(max(1e-3, 1 - part * floor)), math.log(b), math.log(part * floor))
                   for b in (*slopes, 3 * slopes[0]) for part in (0.01, 0.5, 0.9))
    return Law("power law with an offset", lambda th, x: np.exp(th[0]) * x**-np.exp(th[1]) + np.exp(th[2]), starts,
               lambda th, u, v: {"exponent": math.exp(th[1]), "prefactor": _prefactor(th, u, v), "offset": v * math.exp(th[2])})


def _prefactor(th: Numbers, u: float, v: float) -> float:
    """Prefactor in the units of the data."""
    return v * math.exp(th[0] + math.log(u) * math.exp(th[1]))


def _corrected(slopes: Sequence[float], last: float, resource: Resource) -> Law:
    """Make the law a (x^-beta - n^-beta), where n, the x at which the loss ends, is beyond the last point."""
    def named(th: Numbers, u: float, v: float) -> dict[str, float]:
        beta = math.exp(th[1])
        ends = last * (1 + math.exp(-th[2]))
        return {"exponent": beta, "alpha": ALPHA[resource](beta), "prefactor": _prefactor(th, u, v), "ends at": u * ends,
                "finite-size correction": v * math.exp(th[0]) * ends**-beta}

    def value(th: Numbers, x: Numbers) -> Numbers:
        beta = np.exp(th[1])
        return np.exp(th[0]) * np.maximum(x**-beta - (last * (1 + np.exp(-th[2])))**-beta, 1e-12)

    return Law("multilinear", value, tuple((0.0, math.log(b), q) for b in slopes for q in (-6.0, -1.0, 1.5)), named)


def _skilled(skills: int, resource: Resource, initial: float, x: Numbers, y: Numbers, offset: bool) -> Law:
    """Make the law for a number of skills, in time or in data, by a table: its height, alpha, the unit of x, and optionally an
    offset."""
    curve, low = _curves(skills, resource, initial), float(y.min())

    def bare(th: Numbers, x: Numbers) -> Numbers:
        return np.exp(th[0] + curve(np.clip(th[1], *np.log(SLOPES)), np.clip(np.log(x) - th[2], *RANGE), grid=False))

    starts = []
    # several values, because the slope is no guide: with few skills the curve ends in a steep fall for any alpha
    for alpha in (0.1, 0.3, 0.6, 1.2, 3.0):
        for unit in np.geomspace(3, 1e-4, 16):  # several values, because the steps of few skills fit at several units
            for part in (0.05, 0.8) if offset else (0.0,):
                theta = np.array([0.0, math.log(alpha), math.log(unit)])
                height = float(np.mean(np.log(np.maximum(y - part * low, 0.05 * low)) - np.log(np.maximum(bare(theta, x), 1e-6))))
                starts.append((height, *theta[1:].tolist(), *((math.log(part * low),) if offset else ())))
    value = (lambda th, x: bare(th, x) + np.exp(th[3])) if offset else bare
    return _exactly(skills, resource, initial, offset)._replace(value=value, starts=tuple(starts))


def _exactly(skills: int, resource: Resource, initial: float, offset: bool) -> Law:
    """Make the same law by the exact sums over skills."""
    def value(th: Numbers, x: Numbers) -> Numbers:
        model, grown = _model(float(np.exp(np.clip(th[1], *np.log(SLOPES)))), skills, initial), x / np.exp(th[2])
        bare = np.exp(th[0]) * (np.asarray(model.loss(T=grown)) if resource == "time" else _in_data(model, grown))
        return np.asarray(bare + np.exp(th[3]) if offset else bare)

    def named(th: Numbers, u: float, v: float) -> dict[str, float]:
        alpha, height = float(np.exp(np.clip(th[1], *np.log(SLOPES)))), v * math.exp(th[0])
        words = {"exponent": -Exponents.make(alpha).time, "alpha": alpha, "skills": float(skills), "before learning": height,
                 f"unit of {resource}": u * math.exp(th[2]),
                 "finite-size correction": height * _model(alpha, skills, initial).finite_size()}
        return {**words, "offset": v * math.exp(th[3])} if offset else words

    return Law("multilinear with an offset" if offset else "multilinear", value, (), named, skills,
               lambda n: _exactly(n, resource, initial, offset))


def _model(alpha: float, skills: int, initial: float) -> Multilinear:
    """Make the multilinear model with a loss of 1 before learning."""
    return Multilinear(alpha, skills, target=math.sqrt(2), lr=1 / math.sqrt(2), initial=initial * math.sqrt(2))


@lru_cache(maxsize=64)
def _curves(skills: int, resource: Resource, initial: float) -> RectBivariateSpline:
    """Tabulate the logarithm of the loss for this number of skills by log(alpha) and log(x). Splines interpolate it to 1 %, which
    makes the search a thousand times cheaper than the sums over skills. The result is refined exactly (``averaged``)."""
    alphas, grown = np.geomspace(*SLOPES, 25), np.exp(np.linspace(*RANGE, 200))
    models = [_model(float(a), skills, initial) for a in alphas]
    losses = np.stack([np.asarray(m.loss(T=grown)) if resource == "time" else _in_data(m, grown) for m in models])
    return RectBivariateSpline(np.log(alphas), np.log(grown), np.log(np.maximum(losses, 1e-12)))


def _in_data(model: Multilinear, D: Numbers) -> Numbers:
    """Return ``model.loss(D=D)`` of all D at once."""
    P, weighted = model.law.points(model.skills)
    return np.asarray(np.exp(np.outer(D, np.log1p(-P))) @ weighted)


def laws(x: Numbers, y: Numbers, resource: Resource, initial: float) -> Iterator[tuple[str, Law, int]]:
    """Yield every law to be tried, with the number of its additional parameters: one for the noise, one for the number of skills.
    x and y are in units of their geometric means."""
    slope = float(np.clip(-np.polyfit(np.log(x), np.log(y), 1)[0], 0.05, 3.0))
    floor = float(y.min())
    for law in (_power([slope]), _offset([slope], floor)):
        yield law.name, law, 1
    if resource in ("parameters", "compute"):
        yield "multilinear", _corrected([slope, slope / 2], float(x[-1]), resource), 1
        return
    for skills in SKILLS:
        for offset in (False, True):
            law = _skilled(skills, resource, initial, x, y, offset)
            yield law.name, law, 2


# ------------------------------------------------------------------------------------------------------------------- the fits

def fitted(law: Law, x: Numbers, y: Numbers, weights: Numbers, scale: tuple[float, float], extra: int) -> LawFit | None:
    """Return the better of two searches from the best starting points; None if neither converges to finite numbers."""
    def off(theta: Numbers) -> Numbers:
        return np.asarray(weights * np.log(_value(law, theta, x) / y))

    starts = sorted(law.starts, key=lambda start: float(np.square(off(np.array(start))).sum()))[:SEARCHES]
    with np.errstate(all="ignore"):
        candidates = [least_squares(off, start, xtol=1e-10, ftol=1e-10, gtol=1e-12, max_nfev=25 * len(start)) for start in starts]
    best = min((s for s in candidates if np.isfinite(s.cost)), key=lambda s: s.cost, default=None)
    if best is None:
        return None
    rss, k = 2 * float(best.cost) + len(x) * ROUNDING**2, len(best.x)
    variance = rss / max(1, len(x) - k)
    covariance = variance * np.linalg.pinv(best.jac.T @ best.jac, rcond=1e-12, hermitian=True)
    return LawFit(law, best.x, covariance, rss, len(x), scale, k + extra)


def averaged(fits: Sequence[LawFit], x: Numbers, y: Numbers, weights: Numbers) -> Average:
    """Average all fits of one law by their likelihoods. If it has a number of skills, the likely fits (at least three) are
    refined without tables. Then numbers between the best and its neighbours are tried until these are nearly as likely: between
    30 and 100 skills there are curves that neither resembles."""
    if fits[0].law.exactly is not None:
        order = sorted(_carried(fits, x, y, weights), key=lambda fit: fit.rss)
        likely = [fit for i, fit in enumerate(order) if i < 3 or _likelihood(fit, order[0]) > 1e-3]
        exact = {fit.law.skills: _again(fit, fit.law.skills, x, y, weights) or fit for fit in likely}
        for _ in range(ROUNDS):
            between, settled = _between(exact, sorted({fit.law.skills for fit in fits} | {*exact}))
            top = min(exact.values(), key=lambda fit: fit.rss)
            fresh = {n: fit for n in between if (fit := _again(top, n, x, y, weights)) is not None}
            exact |= fresh
            if not fresh or (settled and all(_likelihood(top, fit) > NEAR for fit in fresh.values())):
                break
        fits = [exact[n] for n in sorted(exact)]
    logs = np.array([-fit.points / 2 * math.log(fit.rss) for fit in fits])
    shares = np.exp(logs - logs.max()) * _widths(fits)
    weighted = [(fit, p) for fit, p in zip(fits, shares / shares.max(), strict=True) if p > 1e-3]
    total = sum(p for _, p in weighted)
    return Average(fits[0].law.name, tuple(fit for fit, _ in weighted), tuple(float(p / total) for _, p in weighted))


def _carried(fits: Sequence[LawFit], x: Numbers, y: Numbers, weights: Numbers) -> list[LawFit]:
    """Refine each fit from the parameters of the best one, because a search may stop where the steps of skills are off by one."""
    start = (tuple(min(fits, key=lambda fit: fit.rss).theta.tolist()),)
    again = [fitted(fit.law._replace(starts=start), x, y, weights, fit.scale, fit.count - len(fit.theta)) for fit in fits]
    return [fit if other is None or fit.rss <= other.rss else other for fit, other in zip(fits, again, strict=True)]


def _again(fit: LawFit, skills: int, x: Numbers, y: Numbers, weights: Numbers) -> LawFit | None:
    """Fit a number of skills without a table, from the parameters for another number."""
    assert fit.law.exactly is not None
    law = fit.law.exactly(skills)._replace(starts=(tuple(fit.theta.tolist()),))
    return fitted(law, x, y, weights, fit.scale, fit.count - len(fit.theta))


def _between(exact: Mapping[int, LawFit], numbers: Sequence[int]) -> tuple[list[int], bool]:
    """Choose the numbers of skills to try next: untried neighbours of the best, and the geometric means with neighbours that are
    much less likely. If there are none of these, the geometric means with both neighbours, and True."""
    best = min(exact, key=lambda n: exact[n].rss)
    i, far, halfway = numbers.index(best), list[int](), list[int]()
    for n in (*numbers[max(0, i - 1):i], *numbers[i + 1:i + 2]):
        middle = round(math.sqrt(n * best)) if n in exact else n
        halfway.append(middle)
        if n not in exact or _likelihood(exact[n], exact[best]) < NEAR:
            far.append(middle)
    far = [n for n in far if n not in exact]
    return (far, False) if far else ([n for n in halfway if n not in exact], True)


def _likelihood(fit: LawFit, other: LawFit) -> float:
    """Likelihood ratio of two fits."""
    return math.exp(min(700.0, fit.points / 2 * math.log(other.rss / fit.rss)))


def _widths(fits: Sequence[LawFit]) -> Numbers:
    """Width in log(skills) that each fit represents, half of the way to its neighbours; 1 for a law without skills."""
    if len(fits) == 1:
        return np.ones(1)
    places = np.log([fit.law.skills for fit in fits])
    edges = np.concatenate([places[:1], (places[1:] + places[:-1]) / 2, places[-1:]])
    return np.diff(edges)


def _value(law: Law, theta: Numbers, x: Numbers) -> Numbers:
    """Values of a law, kept within a finite range."""
    with np.errstate(all="ignore"):
        return np.asarray(np.clip(np.nan_to_num(law.value(np.clip(theta, -60, 60), x), nan=1e30), 1e-30, 1e30))


def _gradient(f: Callable[[Numbers], Numbers], theta: Numbers) -> Float[np.ndarray, "m k"]:
    """Gradient by central differences."""
    columns = []
    for i in range(len(theta)):
        step = np.zeros(len(theta))
        step[i] = 1e-5 * max(1.0, abs(theta[i]))
        columns.append((f(theta + step) - f(theta - step)) / (2 * step[i]))
    return np.stack(columns, 1)
