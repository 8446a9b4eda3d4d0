"""Figure 7.7 of [layerwise], whose two panels come from two experiments: claims about single features, and their drawing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from richter.core import Interval
from richter.experiments.frame import Claim, Control, Results, Scale
from richter.experiments.layerwise.evolution import CLASSES
from richter.experiments.layerwise.metrics import relative
from richter.experiments.layerwise.pictures import looks, outside, seeds
from richter.experiments.layerwise.reading import UNTRAINED, rank_correlation, read_at, when
from richter.report.drawing import COLOURS, caption, label, line, panels, points, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Choice = Callable[[Results], Results]
Why = str | Mapping[Scale, str]
PAIRS = (("quality", "utilisation"), ("quality", "intensity"))
SHUFFLED = Control("features in a random order", {"subject": "shuffled"})
TEXT = "the text of Sec. 7.4.1"


def of_features(r: Results, a: str, b: str, seed: int = 0) -> float:
    """The rank correlation over the features of one network of two of quality, utilisation and intensity: after training, before
    it where untrained networks are the subject, with features in a random order of one of them where that is."""
    return _over_features(r, read_at(r, a)[0], read_at(r, b)[0], seed)


def _over_features(r: Results, x: NDArray[np.float64], y: NDArray[np.float64], seed: int = 0) -> float:
    """Of the features that there are."""
    strong = read_at(r, "intensity")[0] > 0
    x, y = x[strong], y[strong]
    return rank_correlation(x, np.random.default_rng(seed).permutation(y) if r.settings.subject == "shuffled" else y)


def gained(r: Results, a: str, b: str) -> float:
    """What that correlation gained by training."""
    before, after = (of_features(when_only(r, look), a, b) for look in (0, 0 if r.settings.subject == "untrained" else -1))
    return after - before


def when_only(r: Results, look: int) -> Results:
    """One look, as if there were no other."""
    return Results(r.settings, r.tasks, [{name: rows[look][None] for name, rows in arrays.items()} for _, arrays in r])


def throughout(r: Results, a: str, b: str) -> float:
    """The median of that correlation over the looks after the first."""
    return float(np.median([of_features(when_only(r, look), a, b, seed=look) for look in range(1, r["epoch"].shape[1])]))


def faster(r: Results) -> float:
    """The rank correlation over features of the intensity after training with the quality that was gained by it."""
    return _over_features(r, read_at(r, "intensity")[0], read_at(r, "quality")[0] - when(r, 0)["quality"][0])


def claims(choice: Choice, panel: str, before: Why = "", gains: Why = "", between: Why = "") -> tuple[Claim, ...]:
    """Of the trainings of ``choice``. Why the correlation is not learned (``before``), why there is none of ``gains``, and why
    none of quality and utilisation ``between`` the epochs."""
    def claim(text: str, value: Callable[[Results], float], paper: str, differs: Why = "") -> Claim:
        return Claim(f"{panel}: {text}", value, Interval(low=0.5), SHUFFLED, paper=paper, over="seed", places=("Fig. 7.7",),
                     source=f"{TEXT}; 0.5 is commonly called strong", differs=differs)

    def read(number: Callable[[Results, str, str], float], a: str, b: str) -> Callable[[Results], float]:
        return lambda r: number(choice(r), a, b)

    words = [(f"rank correlation of {a} and {b} over features", a, b) for a, b in PAIRS]
    clear = "a clear correlation"
    return (*(claim(text, read(of_features, a, b), clear) for text, a, b in words),
            *(claim(f"{text}, median over epochs that were looked at", read(throughout, a, b), clear,
                    between if b == "utilisation" else "") for text, a, b in words),
            claim("rank correlation over features of intensity and the quality gained in training", lambda r: faster(choice(r)),
                  "larger features gain better quality faster", gains),
            *(Claim(f"{panel}: {text}, less that of the untrained network", read(gained, a, b), Interval(low=0.02), UNTRAINED,
                    paper="from learning", source=f"{TEXT}; visibly", over="seed", places=("Fig. 7.7",),
                    differs=before) for text, a, b in words))


def drawing(choice: Choice, network: str) -> Callable[[Results], Figure]:
    """Quality, utilisation and intensity of each feature, not summed up."""
    @styled
    def draw(results: Results) -> Figure:
        figure, axes = panels(3, across=3)
        r = choice(results)
        for k, i in enumerate(looks(r)):
            now = when(r, i)
            words = f"epoch {int(r['epoch'][0, i])} ({np.median(now['accuracy']):.1%}) [{np.median(now['kappa_cka']):.2g}]"
            for ax, rows in zip(axes, (now["quality"], now["utilisation"], relative(now["intensity"])), strict=True):
                points(ax, np.arange(1, rows.shape[1] + 1), np.median(rows, 0), COLOURS[k % len(COLOURS)], words)
        names = ("quality", "utilisation", "intensity, relative to the first")
        for ax, y, title in zip(axes, names, ("(i)", "(ii)", "(iii)"), strict=True):
            line(ax, [CLASSES, CLASSES], ax.get_ylim(), "#999999", style=":")
            label(ax, "feature", y, title, log="xy" if ax is axes[2] else "x")
        outside(axes[2])
        caption(figure, f"Single features of {network}, the strongest first, between epochs: those that are strong are used "
                        "more, and are better. In parentheses the test accuracy, in square brackets kappa. "
                        f"{seeds(results, 'Median')}")
        return figure
    return draw
