"""Extrapolation of a loss. ``scaling(x, loss)`` fits a power law, with and without an offset, and the multilinear model of skills
to your curve. It reports what each law predicts beyond the data, and whether the data can tell the laws apart. Against time
(a training curve) the forecast is that of ``workflows.trend`` instead, whose intervals were validated on real trainings.

    seen = richter.workflows.scaling(sizes, losses, resource="data")
    print(seen)                                # exponents and offsets with errors, AICc, the loss at 10 and 100 times the last x
    seen.best, seen.rivals                     # "power law with an offset", ("multilinear",)
    seen.predict(1e9)                          # the loss there with its 95 % interval, over all laws that cannot be told apart
    seen.plot().savefig("scaling.png")
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from richter.core import SelectionError
from richter.core.values import progress
from richter.workflows.laws import Average, LawFit, Numbers, Resource, averaged, fitted, laws
from richter.workflows.trend import FAR, Trend, forecast

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEWEST = 8  # smallest number of points
DECADES = 0.7  # smallest range of x, in decades
FLAT = 1e-6  # exponent below which a curve counts as constant
POINTS = 40  # number of points to which long curves are reduced, evenly in log x
MARGIN = 6.0  # in -2 log likelihood: laws that differ by less (odds of 20 to 1) cannot be told apart
EACH = 2  # points needed per parameter of a law
ALIKE = 2.0  # in AICc: among laws this close to the smallest, the one with the fewest parameters is called best
HELD = 0.3  # last share of log x, which is predicted from the rest to compare laws
DOUBTFUL = 0.2  # relative error there above which a warning is given
CONFIDENCE = 0.9  # of the intervals of a training curve, which were validated
RESOURCES = ("time", "data", "parameters", "compute")


@dataclass(frozen=True)
class Scaling:
    """Fits of several laws to a curve; ``fits`` by their names, best first."""

    resource: Resource
    x: Float[np.ndarray, " n"]
    loss: Float[np.ndarray, " n"]
    fits: Mapping[str, Average]
    # relative error of each law on the last part, extrapolated from the first
    held: Mapping[str, float] = field(default_factory=dict)
    at: tuple[float, ...] = ()
    trend: Trend | None = None  # the forecast of a training curve; of other resources the laws forecast

    @property
    def best(self) -> str:
        """Name of the best law."""
        return next(iter(self.fits))

    @property
    def rivals(self) -> tuple[str, ...]:
        """Laws that the data cannot tell from the best: by AICc, or by their fit, whatever the number of their parameters."""
        best = self.fits[self.best].best
        return tuple(name for name, fit in self.fits.items() if name != self.best and min(
            fit.best.aicc - best.aicc, best.points * math.log(fit.best.rss / best.rss)) < MARGIN)

    def predict(self, x: ArrayLike, law: str | None = None, confidence: float = 0.95) -> tuple[Numbers, Numbers, Numbers]:
        """Predict the loss at x and the ends of its interval: by one law, or (None) by the best law, with an interval that covers
        all laws that cannot be told apart. After the last step of a training curve None is the forecast by its trend, NaN where
        there is none (``trend.refusal``, and beyond ten times the last step)."""
        if law is not None:
            if law not in self.fits:
                raise SelectionError(f"law={law!r}: the laws are {', '.join(map(repr, self.fits))}.")
            return self.fits[law].predict(x, confidence)
        every = [self.fits[name].predict(x, confidence) for name in (self.best, *self.rivals)]
        value, low, high = every[0][0], np.min([low for _, low, _ in every], 0), np.max([high for *_, high in every], 0)
        if self.trend is not None:
            after = np.atleast_1d(np.asarray(x, np.float64)) > self.trend.last
            later = self.trend.predict(x, confidence)
            value, low, high = (np.where(after, b, a) for a, b in zip((value, low, high), later, strict=True))
        return value, low, high

    @property
    def words(self) -> str:
        """Sentence that says how clearly the best law wins."""
        if self.rivals:
            return (f"{self.best} is best, but the data cannot tell it from {' or '.join(self.rivals)} (odds below 20 to 1): "
                    f"more decades of {self.resource} would")
        return f"{self.best}: every other law fits worse, by odds of 20 to 1 or more"

    def __str__(self) -> str:
        from richter.core.values import table
        first = self.fits[self.best].best.aicc
        rows = [[name, f"{a.best.aicc - first:.1f}", f"{a.best.noise:.2g}", f"{self.held[name]:.2g}" if name in self.held else "",
                 ", ".join(f"{k} {_number(v, e)}" for k, (v, e) in a.best.parameters().items())] for name, a in self.fits.items()]
        laws = table([["law", "AICc", "noise", "held out", "numbers"], *rows], right=(1, 2, 3))
        return "\n".join([laws, f"{self.words}.", *self.warnings, *(self._forecast(x) for x in self.at)])

    @property
    def warnings(self) -> list[str]:
        """Sentences on how far the forecasts can be trusted, from how they would have done on the curve itself."""
        lines = []
        if self.held.get(self.best, 0.0) > DOUBTFUL:
            lines.append(f"Warning: fitted to the first part of this curve, the law {self.best} misses its last part by "
                         f"{self.held[self.best]:.0%}.")
        if self.trend is None:
            return lines
        if self.trend.refusal:
            return [*lines, f"No forecast: {self.trend.refusal}."]
        lines.append(f"The laws describe the curve. The forecast goes on with the trend of its end (loss ~ step^-"
                     f"{self.trend.slope:.2g}), as fast or slow as real trainings did.")
        lines += [f"Tested on this curve: {test}." for test in self.trend.backtests]
        if self.trend.widening > 1:
            lines.append(f"Warning: that missed the interval, so the intervals below are {self.trend.widening:.3g} times as "
                         f"wide.")
        return lines

    def _forecast(self, x: float) -> str:
        """Sentence with the predicted loss at x."""
        value, low, high = (float(v[0]) for v in self.predict(x, confidence=0.95 if self.trend is None else CONFIDENCE))
        if self.trend is not None and math.isnan(value):
            why = "" if self.trend.refusal else f", because forecasts were validated up to {FAR:g} times the last step only"
            return f"at {self.resource} {x:.3g}: no forecast{why}"
        above = f", above the last loss ({self.loss[-1]:.4g})" if x > self.x[-1] and value > self.loss[-1] else ""
        return f"at {self.resource} {x:.3g}: {value:.4g} ({'' if self.trend is None else '90 %: '}{low:.4g} to {high:.4g}){above}"

    def to_json(self) -> dict[str, Any]:
        return {"resource": self.resource, "best": self.best, "rivals": list(self.rivals), "words": self.words,
                "warnings": self.warnings, "confidence": 0.95 if self.trend is None else CONFIDENCE,
                "laws": {name: {"aicc": a.best.aicc, "noise": a.best.noise, "held_out": self.held.get(name),
                                "parameters": {k: {"value": v, "error": e} for k, (v, e) in a.best.parameters().items()}}
                         for name, a in self.fits.items()},
                "at": [{"x": x, "loss": v[0], "low": v[1], "high": v[2]} for x in self.at
                       for v in [[float(z[0]) for z in self.predict(x, confidence=0.95 if self.trend is None else CONFIDENCE)]]]}

    def plot(self) -> Figure:
        """Draw the curve, every law beyond its end, and the band of those that cannot be told apart."""
        from richter.report.drawing import COLOURS, caption, label, line, panels, points, styled

        @styled
        def draw() -> Figure:
            figure, (ax,) = panels(1, across=1, width=5.2, height=3.4)
            x = np.geomspace(self.x[0], max(10 * self.x[-1], *self.at) if self.at else 10 * self.x[-1], 120)
            value, low, high = self.predict(x, confidence=0.95 if self.trend is None else CONFIDENCE)
            ax.fill_between(x, low, high, color=COLOURS[0], alpha=0.15, linewidth=0)
            if self.trend is not None:
                line(ax, x[x > self.trend.last], value[x > self.trend.last], "#222222", "forecast", "--")
            x = x if self.trend is None else x[x <= self.trend.last]  # laws forecast no training
            for i, name in enumerate(self.fits):
                line(ax, x, self.fits[name].predict(x)[0], COLOURS[i], name, "-" if name in (self.best, *self.rivals) else ":")
            points(ax, self.x, self.loss, "#222222", "measured")
            ax.axvline(self.x[-1], color="#999999", linewidth=0.7, linestyle=(0, (2, 3)))
            label(ax, self.resource, "loss", log="xy", legend=True)
            words = f"{self.words[0].upper()}{self.words[1:]}." if self.trend is None else \
                f"No forecast: {self.trend.refusal}." if self.trend.refusal else "The band holds 90 % of real trainings."
            caption(figure, f"{words} Right of the dashed line there are no measurements.")
            return figure

        return draw()


def scaling(x: ArrayLike, loss: ArrayLike, *, resource: Resource = "time", errors: ArrayLike | None = None, start: float = 0.0,
            at: ArrayLike | None = None, initial: float = 1e-3, rates: ArrayLike | None = None) -> Scaling:
    """Fit a loss against ``resource``: time (steps), data (examples), parameters or compute, at increasing x > 0.

    ``errors``: standard errors of the losses (default: equal relative errors). ``start``: points below are left out, because
    laws hold late. ``at``: x of the reported predictions (default: 10 and 100 times the last x; of a training curve 2 and 10
    times). ``rates``: of a training curve the learning rate at each point; after it has decayed there is no forecast.
    ``initial``: for the multilinear model in time, the initial strength of a skill over its final one, which a curve cannot
    separate from the unit of time. Long curves are reduced to 40 points, evenly in log x.
    """
    t, y, e = _curve(x, loss, errors, start)
    if resource not in RESOURCES:
        raise SelectionError(f"resource={resource!r}: use one of {', '.join(RESOURCES)}; the exponents of the laws depend "
                             f"on it.")
    if not 0 < initial < 0.5:
        raise SelectionError(f"initial={initial!r}: give a share of the final strength, above 0 and below 1/2.")
    factors = (2, FAR) if resource == "time" else (10, 100)
    where = np.atleast_1d(np.asarray([factor * t[-1] for factor in factors] if at is None else at, np.float64))
    if not (where > 0).all() or not np.isfinite(where).all():
        raise SelectionError(f"at={at!r}: give finite values of {resource} above 0.")
    trend = forecast(t, y, _rates(rates, x, start)) if resource == "time" else None
    t, y, e = _reduced(t, y, e)
    fits = _fits(t, y, e, resource, initial, f"laws in {resource}")
    cut = t <= t[0] * (t[-1] / t[0])**(1 - HELD)
    held = {}
    if cut.sum() >= FEWEST and (~cut).sum() >= 2:
        early = _fits(t[cut], y[cut], e[cut], resource, initial, "laws of the first part")
        held = {name: float(np.sqrt(np.mean(np.log(a.predict(t[~cut])[0] / y[~cut])**2))) for name, a in early.items()}
    return Scaling(resource, t, y, fits, held, tuple(float(v) for v in where), trend)


def _fits(t: Numbers, y: Numbers, e: Numbers, resource: Resource, initial: float, title: str) -> dict[str, Average]:
    """Fit every law for which there are enough points per parameter (including the noise and the number of skills), best AICc
    first."""
    scale = float(np.exp(np.log(t).mean())), float(np.exp(np.log(y).mean()))
    x, z, weights = t / scale[0], y / scale[1], np.exp(np.log(e).mean()) / e
    groups: dict[str, list[LawFit]] = {}
    for name, law, extra in progress([*laws(x, z, resource, initial)], title=title, unit="law"):
        fit = fitted(law, x, z, weights, scale, extra) if EACH * (len(law.starts[0]) + extra) <= len(x) else None
        if fit is not None:
            groups.setdefault(name, []).append(fit)
    bar = progress(groups.values(), title=f"{title}, exactly", unit="law")
    every = [averaged(group, x, z, weights) for group in bar]
    least = min(a.best.aicc for a in every)
    best = min((a for a in every if a.best.aicc <= least + ALIKE), key=lambda a: (a.best.count, a.best.aicc))
    return {best.name: best, **{a.name: a for a in sorted(every, key=lambda a: a.best.aicc)}}


def _curve(x: ArrayLike, loss: ArrayLike, errors: ArrayLike | None, start: float) -> tuple[Numbers, Numbers, Numbers]:
    """x, losses and errors as arrays from ``start`` on, checked."""
    t, y = np.asarray(x, np.float64), np.asarray(loss, np.float64)
    e = y if errors is None else np.asarray(errors, np.float64)  # equal relative errors
    if t.ndim != 1 or y.shape != t.shape or e.shape != t.shape:
        raise SelectionError(f"x of shape {t.shape}, losses of {y.shape} and errors of {e.shape}: give one of each for "
                             f"every point.")
    if not np.isfinite(t).all() or not (np.diff(t) > 0).all():
        raise SelectionError("x must be finite and increase from point to point: sort the points, and average "
                             "duplicates.")
    selected = (t >= start) & (t > 0)
    t, y, e = t[selected], y[selected], e[selected]
    if not np.isfinite(y).all() or not (y > 0).all():
        raise SelectionError(f"{(~(np.isfinite(y) & (y > 0))).sum()} of {len(y)} losses are not above 0, or NaN, and have no "
                             f"logarithm. Leave out points without a measurement.")
    if errors is not None and not (np.isfinite(e).all() and (e > 0).all()):
        raise SelectionError("errors must be finite and above 0: standard errors of the losses.")
    if len(t) < FEWEST or math.log10(t[-1] / t[0]) < DECADES:
        spans = f" over {math.log10(t[-1] / t[0]):.2g} decades" if len(t) else ""
        raise SelectionError(f"a curve of {len(t)} points above 0{spans} is too short to fit a law: it needs at least {FEWEST} "
                             f"points over {DECADES:g} decades, and more for an extrapolation by a factor of ten.")
    if not np.polyfit(np.log(t / t[0]), np.log(y / y[0]), 1)[0] < -FLAT:
        raise SelectionError(f"from {t[0]:.3g} to {t[-1]:.3g} the loss does not fall: it goes from {y[0]:.3g} to {y[-1]:.3g}, "
                             f"so no scaling law fits. Begin later (start=) if it falls there. Were x and "
                             f"the loss exchanged?")
    return t, y, e / y


def _rates(rates: ArrayLike | None, x: ArrayLike, start: float) -> Numbers | None:
    """Read the learning rates of the points from ``start`` on."""
    if rates is None:
        return None
    given, t = np.asarray(rates, np.float64), np.asarray(x, np.float64)
    if given.shape != t.shape or not (np.isfinite(given).all() and (given >= 0).all() and given.any()):
        raise SelectionError(f"rates of shape {given.shape} for {len(t)} points: give the learning rate at each, 0 or more.")
    return given[(t >= start) & (t > 0)]


def _reduced(t: Numbers, y: Numbers, e: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Reduce a curve to geometric means of at most POINTS bins, evenly in log x; ``e`` are relative errors. Without given errors,
    all bins have the same weight, because the misfit of a law is not smaller where there are more points."""
    if len(t) <= POINTS:
        return t, y, e
    place = np.log(t / t[0]) / math.log(t[-1] / t[0])
    starts = np.flatnonzero(np.diff(np.minimum((place * POINTS).astype(int), POINTS - 1), prepend=-1))
    count = np.diff(starts, append=len(t))
    weight = np.add.reduceat(e**-2.0, starts)
    return (np.exp(np.add.reduceat(np.log(t), starts) / count), np.exp(np.add.reduceat(np.log(y) / e**2, starts) / weight),
            weight**-0.5 if np.ptp(e) else np.ones(len(count)))


def _number(value: float, error: float) -> str:
    """Number with its error, as text."""
    return f"{value:.3g} ± {error:.1g}" if 0 < error < 1e3 * abs(value) else f"{value:.3g}"
