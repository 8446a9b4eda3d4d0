"""How does a loss go on? ``scaling(x, loss)``: fits of a power law, with and without an offset, and of the multilinear model of
skills to a curve of your own, what each of them says beyond its end, and whether the data can tell them apart.

    seen = richter.workflows.scaling(sizes, losses, resource="data")
    print(seen)                                # exponents and offsets with errors, AICc, the loss at 10 and 100 times the last
    seen.best, seen.rivals                     # "power law with an offset", ("multilinear",)
    seen.predict(1e9)                          # the loss there, and its 95 % interval, over all laws that cannot be told apart
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
from richter.workflows.laws import Average, Fit, Numbers, Resource, averaged, fitted, laws

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEWEST = 8  # points
DECADES = 0.7  # that x must span
FLAT = 1e-6  # an exponent: a curve that falls more slowly does not fall
POINTS = 40  # to which long curves are reduced, evenly in log x
MARGIN = 6.0  # of -2 log likelihood: laws that fit worse by less than that (odds of 20 to 1) cannot be told apart
EACH = 2  # points for every number of a law
ALIKE = 2.0  # of AICc: among laws that are so near the smallest, that with the fewest numbers is the best
HELD = 0.3  # the last share of log x, from which the first is extrapolated to compare laws
RESOURCES = ("time", "data", "parameters", "compute")


@dataclass(frozen=True)
class Scaling:
    """What several laws make of a curve; ``fits`` by their names, the best first."""

    resource: Resource
    x: Float[np.ndarray, " n"]
    loss: Float[np.ndarray, " n"]
    fits: Mapping[str, Average]
    held: Mapping[str, float] = field(default_factory=dict)  # relative error where the last part was extrapolated from the first
    at: tuple[float, ...] = ()

    @property
    def best(self) -> str:
        return next(iter(self.fits))

    @property
    def rivals(self) -> tuple[str, ...]:
        """Laws that the data cannot tell from the best: by AICc, or by how well they fit, however many numbers they have."""
        best = self.fits[self.best].best
        return tuple(name for name, fit in self.fits.items() if name != self.best and min(
            fit.best.aicc - best.aicc, best.points * math.log(fit.best.rss / best.rss)) < MARGIN)

    def predict(self, x: ArrayLike, law: str | None = None, confidence: float = 0.95) -> tuple[Numbers, Numbers, Numbers]:
        """The loss at x by a law, or by the best, and the ends of its interval: of one law, or (None) from the lowest to the
        highest of all that cannot be told apart."""
        if law is not None:
            if law not in self.fits:
                raise SelectionError(f"law={law!r}: there are {', '.join(map(repr, self.fits))}.")
            return self.fits[law].predict(x, confidence)
        every = [self.fits[name].predict(x, confidence) for name in (self.best, *self.rivals)]
        return every[0][0], np.min([low for _, low, _ in every], 0), np.max([high for *_, high in every], 0)

    @property
    def words(self) -> str:
        if self.rivals:
            return (f"{self.best} is best, but the data cannot tell it from {' or '.join(self.rivals)} (odds below 20 to 1): "
                    f"more decades of {self.resource} would")
        return f"{self.best}: every other law fits worse, by odds of 20 to 1 or more"

    def __str__(self) -> str:
        from richter.core.values import table
        first = self.fits[self.best].best.aicc
        rows = [[name, f"{a.best.aicc - first:.1f}", f"{a.best.noise:.2g}", f"{self.held[name]:.2g}" if name in self.held else "",
                 ", ".join(f"{k} {_number(v, e)}" for k, (v, e) in a.best.parameters().items())] for name, a in self.fits.items()]
        lines = [table([["law", "AICc", "noise", "held out", "numbers"], *rows], right=(1, 2, 3)), f"{self.words}."]
        for x in self.at:
            value, low, high = (float(v[0]) for v in self.predict(x))
            lines.append(f"at {self.resource} {x:.3g}: {value:.4g} ({low:.4g} to {high:.4g})")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {"resource": self.resource, "best": self.best, "rivals": list(self.rivals), "words": self.words,
                "laws": {name: {"aicc": a.best.aicc, "noise": a.best.noise, "held_out": self.held.get(name),
                                "parameters": {k: {"value": v, "error": e} for k, (v, e) in a.best.parameters().items()}}
                         for name, a in self.fits.items()},
                "at": [{"x": x, "loss": v[0], "low": v[1], "high": v[2]} for x in self.at
                       for v in [[float(z[0]) for z in self.predict(x)]]]}

    def plot(self) -> Figure:
        """The curve, every law beyond its end, and the band of those that cannot be told apart."""
        from richter.report.drawing import COLOURS, caption, label, line, panels, points, styled

        @styled
        def draw() -> Figure:
            figure, (ax,) = panels(1, across=1, width=5.2, height=3.4)
            x = np.geomspace(self.x[0], max(10 * self.x[-1], *self.at) if self.at else 10 * self.x[-1], 120)
            _, low, high = self.predict(x)
            ax.fill_between(x, low, high, color=COLOURS[0], alpha=0.15, linewidth=0)
            for i, name in enumerate(self.fits):
                line(ax, x, self.fits[name].predict(x)[0], COLOURS[i], name, "-" if name in (self.best, *self.rivals) else ":")
            points(ax, self.x, self.loss, "#222222", "measured")
            ax.axvline(self.x[-1], color="#999999", linewidth=0.7, linestyle=(0, (2, 3)))
            label(ax, self.resource, "loss", log="xy", legend=True)
            caption(figure, f"{self.words[0].upper()}{self.words[1:]}. Right of the dashed line nothing was measured.")
            return figure

        return draw()


def scaling(x: ArrayLike, loss: ArrayLike, *, resource: Resource = "time", errors: ArrayLike | None = None, start: float = 0.0,
            at: ArrayLike | None = None, initial: float = 1e-3) -> Scaling:
    """Fit a loss against ``resource``: time (steps), data (examples), parameters or compute, at values x > 0 that rise.

    ``errors``: standard errors of the losses (without them all have the same relative error). ``start``: points below are left
    out, as laws hold late. ``at``: where to say the loss (10 and 100 times the last x). ``initial``: of the multilinear model in
    time, the strength of a skill at the start over that at the end, which a curve cannot tell from the unit of time. Long curves
    are reduced to 40 points, evenly in log x.
    """
    t, y, e = _curve(x, loss, errors, start)
    if resource not in RESOURCES:
        raise SelectionError(f"resource={resource!r}: one of {', '.join(RESOURCES)} is needed; the exponents of the laws depend "
                             f"on it.")
    if not 0 < initial < 0.5:
        raise SelectionError(f"initial={initial!r}: a share of the last strength, above 0 and below 1/2, is needed.")
    where = np.atleast_1d(np.asarray([10 * t[-1], 100 * t[-1]] if at is None else at, np.float64))
    if not (where > 0).all() or not np.isfinite(where).all():
        raise SelectionError(f"at={at!r}: finite values of {resource} above 0 are needed.")
    t, y, e = _reduced(t, y, e)
    fits = _fits(t, y, e, resource, initial, f"laws in {resource}")
    cut = t <= t[0] * (t[-1] / t[0])**(1 - HELD)
    held = {}
    if cut.sum() >= FEWEST and (~cut).sum() >= 2:
        early = _fits(t[cut], y[cut], e[cut], resource, initial, "laws of the first part")
        held = {name: float(np.sqrt(np.mean(np.log(a.predict(t[~cut])[0] / y[~cut])**2))) for name, a in early.items()}
    return Scaling(resource, t, y, fits, held, tuple(float(v) for v in where))


def _fits(t: Numbers, y: Numbers, e: Numbers, resource: Resource, initial: float, title: str) -> dict[str, Average]:
    """Every law for whose numbers (the noise and that of skills among them) there are points enough, the best first by AICc."""
    scale = float(np.exp(np.log(t).mean())), float(np.exp(np.log(y).mean()))
    x, z, weights = t / scale[0], y / scale[1], np.exp(np.log(e).mean()) / e
    groups: dict[str, list[Fit]] = {}
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
    t, y = np.asarray(x, np.float64), np.asarray(loss, np.float64)
    e = y if errors is None else np.asarray(errors, np.float64)  # the same relative error everywhere
    if t.ndim != 1 or y.shape != t.shape or e.shape != t.shape:
        raise SelectionError(f"x of shape {t.shape}, losses of {y.shape} and errors of {e.shape}: one of each for "
                             f"every point is needed.")
    if not np.isfinite(t).all() or not (np.diff(t) > 0).all():
        raise SelectionError("x must be finite and rise from each point to the next: sort the points, and average those that are "
                             "there twice.")
    kept = (t >= start) & (t > 0)
    t, y, e = t[kept], y[kept], e[kept]
    if not np.isfinite(y).all() or not (y > 0).all():
        raise SelectionError(f"{(~(np.isfinite(y) & (y > 0))).sum()} of {len(y)} losses are not above 0, or NaN: a power law has "
                             f"a logarithm. Leave out points that were not measured.")
    if errors is not None and not (np.isfinite(e).all() and (e > 0).all()):
        raise SelectionError("errors must be finite and above 0: standard errors of the losses.")
    if len(t) < FEWEST or math.log10(t[-1] / t[0]) < DECADES:
        spans = f" over {math.log10(t[-1] / t[0]):.2g} decades" if len(t) else ""
        raise SelectionError(f"a curve of {len(t)} points above 0{spans} is too short to fit a law: {FEWEST} points over "
                             f"{DECADES:g} decades are needed at least, and an extrapolation by ten times wants more.")
    if not np.polyfit(np.log(t / t[0]), np.log(y / y[0]), 1)[0] < -FLAT:
        raise SelectionError(f"from {t[0]:.3g} to {t[-1]:.3g} the loss does not fall: it goes from {y[0]:.3g} to {y[-1]:.3g}, "
                             f"and no law of scaling is of such a curve. Begin later (start=) if it falls there. Were x and "
                             f"the loss exchanged?")
    return t, y, e / y


def _reduced(t: Numbers, y: Numbers, e: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Geometric means of at most POINTS bins, evenly in log x; ``e`` are relative errors. Without any, every bin counts as much
    as another: what a law misses is not less where there are more points."""
    if len(t) <= POINTS:
        return t, y, e
    place = np.log(t / t[0]) / math.log(t[-1] / t[0])
    starts = np.flatnonzero(np.diff(np.minimum((place * POINTS).astype(int), POINTS - 1), prepend=-1))
    count = np.diff(starts, append=len(t))
    weight = np.add.reduceat(e**-2.0, starts)
    return (np.exp(np.add.reduceat(np.log(t), starts) / count), np.exp(np.add.reduceat(np.log(y) / e**2, starts) / weight),
            weight**-0.5 if np.ptp(e) else np.ones(len(count)))


def _number(value: float, error: float) -> str:
    return f"{value:.3g} ± {error:.1g}" if 0 < error < 1e3 * abs(value) else f"{value:.3g}"
