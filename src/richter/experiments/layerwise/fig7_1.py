"""Figure 7.1 of [layerwise]: with more images a network needs fewer features, and its error falls faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from richter.core import Interval, Ref
from richter.experiments.frame import Claim, Control, Experiment, Results, Scale
from richter.experiments.layerwise.evolution import CLASSES, TUNED, Settings, tasks, work
from richter.experiments.layerwise.metrics import metric_panels
from richter.experiments.layerwise.pictures import outside, seeds
from richter.experiments.layerwise.reading import SHIFTED, TRAINING, UNTRAINED, better, following, read_at, strength_top, when
from richter.measures.features import MINIMUM
from richter.report.drawing import caption, label, line, panels, points, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ------------------------------------------------------------------------------------------------ claims


def kappa(r: Results, n: int) -> float:
    """After training on so many images."""
    return float(read_at(r.where(n=n), "kappa_cka")[0])


def both_sides(r: Results) -> float:
    """How far the smallest size is outside the minimum feature regime, or the largest inside, whichever is less."""
    few, many = ends(r)
    return min(kappa(r, few) - MINIMUM, MINIMUM - kappa(r, many))


def ends(r: Results) -> tuple[int, int]:
    """The smallest and the largest size; the largest and the smallest, where they are exchanged."""
    sizes = sorted(r.distinct("n"))
    return (sizes[-1], sizes[0]) if r.settings.subject == "exchanged" else (sizes[0], sizes[-1])


def faster(r: Results, error: Callable[[Results], NDArray[np.float64]]) -> float:
    """The exponent of the error in the upper half of the sizes over that in the lower half, the middle size in both."""
    order = np.argsort([t.n for t in r.tasks])
    x, y = np.log([t.n for t in r.tasks])[order], np.log(error(r))[order]
    if r.settings.subject == "single":
        y = np.polyval(np.polyfit(x, y, 1), x)
    half = len(x) // 2
    lower, upper = (np.polyfit(x[part], y[part], 1)[0] for part in (slice(half + 1), slice(half, None)))
    return float(lower / upper if r.settings.subject == "exchanged" else upper / lower)


def growing(number: Callable[[Results], NDArray[np.float64]]) -> Callable[[Results], float]:
    """What a number gains from the smallest to the largest size."""
    def value(r: Results) -> float:
        few, many = ends(r)
        return float(number(r.where(n=many))[0] - number(r.where(n=few))[0])
    return value


# ------------------------------------------------------------------------------------------------ drawing


@styled
def draw(results: Results) -> Figure:
    figure, axes = panels(6, across=3)
    sizes, by_size = sorted(results.distinct("n")), when(results)
    for ax, name, y, title in ((axes[0], "error", "test error", "a (i): error"), (axes[1], "loss", "test loss", "a (ii): loss"),
                               (axes[2], "kappa_cka", "kappa", "a (iii): distance from the minimum")):
        rows = np.stack([1 - c["accuracy"] if name == "error" else c[name] for c in (by_size.where(n=n) for n in sizes)], 1)
        points(ax, sizes, rows)
        line(ax, sizes, np.median(rows, 0), "#b0b0b0")
        if name == "kappa_cka":
            line(ax, sizes, [MINIMUM] * len(sizes), style=":")
        label(ax, "training images", y, title, log="x" if name == "kappa_cka" else "xy")
    metric_panels(axes[3:], {f"{n:,} images": by_size.where(n=n) for n in sizes}, CLASSES, legend=False)
    outside(axes[5])
    for ax, title in zip(axes[3:], ("b (i): of the target", "b (ii): by the learned function", "b (iii): strength"), strict=True):
        ax.set_title(title)
    caption(figure, "Test error, loss and kappa fall and rise together, and with more images more of the target is in the first "
                    "ten features (dotted). Below the dotted line of a (iii) is the minimum feature regime. "
                    f"In parentheses the test accuracy, in square brackets kappa. {seeds(results)}")
    return figure


TEXT = "the text of Sec. 7.2"
VISIBLY = f"{TEXT}; visibly: by 0.02"
EXCHANGED = Control("small and large sizes exchanged", {"subject": "exchanged"})
SHORT = ("150 steps show the 2,000 images of the largest size less than three times, and the 100 of the smallest 48 times: "
         "kappa falls with training too. After 500 steps 1,500 images gave 0.05 and 100 images 0.12 (one seed)")
PHASE = ("the larger sizes are seen fewer times in the same 150 steps, and are not learned by heart as the smaller ones are: "
         "their errors are too large")
INSIDE = ("100 images are enough for the minimum: kappa 0.084 in the median (0.06 to 0.20), after 160 epochs in which they are "
          "learned by heart, and 0.022 of 3,600. Images of Fashion-MNIST are easier than those of CIFAR-10")
ONE_PHASE = ("there is no second, faster phase: the exponent of the error is 0.24 up to 600 images and 0.18 from there on, that "
             "of the loss 0.22 and 0.20. Nearly all sizes are in the minimum feature regime already, and the two largest, seen "
             "for 12 epochs, are not learned by heart (training accuracy 0.98 and 0.96)")
FULL = "it is 0.987 of 100 images, so that no more than 0.013 can be gained; 3,600 have 0.997"
REASONS: tuple[tuple[str, Callable[[Results], NDArray[np.float64]], Mapping[Scale, str]], ...] = (
    ("the target", lambda r: read_at(r, "quality_top"), {}),
    ("the learned function", lambda r: read_at(r, "utilisation_top"), {"smoke": SHORT, "paper": FULL}),
    ("intensity", strength_top, {"smoke": SHORT}))
PAPER = Settings(sizes=(3_600, 1_500, 600, 250, 100), least=12, seeds=tuple(range(1, 6)))
EXPERIMENT = Experiment(
    name="layerwise_fig7_1", ref=Ref("layerwise", "Fig. 7.1"), title="with more images fewer features and a faster falling error",
    smoke=replace(PAPER, sizes=(2_000, 1_000, 400, 200, 100), steps=150, least=1, n_test=1_000, seeds=(0,)), paper=PAPER,
    work=work, tasks=tasks, figures={"layerwise_fig7_1": draw}, data=("fashion_mnist",),
    start={"steps": 1, "least": 1, "sizes": (100, 50, 40), "n_test": 200, "seeds": (0,)},
    reduced="100 to 2,000 images, 150 steps, one seed",
    missing={"Fig. 7.1": "CIFAR-10, up to 50,000 images and a ResNet-18 of full width: these are 100 to 3,600 images of "
                         "Fashion-MNIST of 16 x 16 pixels and an eighth of the width, 500 steps or 12 epochs, no augmentation"},
    tried="500 steps at all sizes up to 4,000: the largest was seen four times only, and had a larger error than 1,500 images. "
          f"{TUNED}",
    claims=(
        Claim("rank correlation of kappa with the test error over sizes", following, Interval(low=0.85), (SHIFTED, TRAINING),
              paper="both fall", source=f"{TEXT}; of five sizes at most one pair of neighbours is exchanged", over="seed"),
        Claim("the same, less that of the better of two rivals, training loss and norm of the weights", better,
              Interval(low=0.02), TRAINING, source="a measure must beat its best simple rival, visibly", over="seed"),
        Claim("kappa at the largest size", lambda r: kappa(r, ends(r)[1]), Interval(high=MINIMUM), UNTRAINED,
              paper="below 0.1", source=TEXT, over="seed", differs={"smoke": SHORT}),
        Claim("the lesser of kappa at the smallest size less 0.1, and 0.1 less kappa at the largest", both_sides,
              Interval(low=0.0), (UNTRAINED, EXCHANGED), paper="above 0", source=TEXT, over="seed",
              differs={"smoke": SHORT, "paper": INSIDE}),
        Claim("exponent of the error at the larger sizes over that at the smaller ones",
              lambda r: faster(r, lambda q: 1 - when(q)["accuracy"]), Interval(low=1.1),
              Control("one power law through all sizes", {"subject": "single"}), paper="a faster power law",
              source=f"{TEXT}; visibly: by a tenth", over="seed", differs={"smoke": PHASE, "paper": ONE_PHASE}),
        Claim("exponent of the loss at the larger sizes over that at the smaller ones",
              lambda r: faster(r, lambda q: when(q)["loss"]), Interval(low=1.1),
              Control("one power law through all sizes", {"subject": "single"}), paper="a faster power law",
              source=f"{TEXT}; visibly: by a tenth", over="seed", differs={"smoke": PHASE, "paper": ONE_PHASE}),
        *(Claim(f"share of {name} in the first ten features, largest less smallest size", growing(number), Interval(low=0.02),
                UNTRAINED, paper="greater concentration", source=VISIBLY, over="seed",
                differs=why)
          for name, number, why in REASONS),
    ))
