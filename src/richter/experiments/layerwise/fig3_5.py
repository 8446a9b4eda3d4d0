"""Figure 3.5 of [layerwise]: networks reach the minimum of features also on random labels, so that few features are not the
same as good ones. The trainings of Fig. 3.6, towards the value of a digit, are here too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import ArrayLike
from torch import Tensor

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.experiments.layerwise.common import (
    SgdRecipe,
    feature_numbers,
    features_and_outputs,
    fit,
    indicators,
    legend_outside,
    metric_panels,
    seeds_note,
)
from richter.experiments.rivals import shuffled
from richter.measures.features import analyse
from richter.models import mlp
from richter.report.drawing import caption, panels, styled
from richter.tasks import mnist_5k

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Case = Literal["classes", "tenth", "random", "no decay", "last", "none", "value", "value, last", "value, none"]


class Teaching(NamedTuple):
    """Training of a network: its recipe, the share of labels that are shuffled, and whether it learns the value of a digit by
    one output."""

    recipe: SgdRecipe
    noise: float = 0.0
    value: bool = False


TEACHINGS: dict[Case, Teaching] = {
    "classes": Teaching(SgdRecipe()), "tenth": Teaching(SgdRecipe(), 0.1), "random": Teaching(SgdRecipe(epochs=150), 1.0),
    "no decay": Teaching(SgdRecipe(epochs=70, decay=0.0), 1.0), "last": Teaching(SgdRecipe(last=True)),
    "none": Teaching(SgdRecipe(epochs=0)), "value": Teaching(SgdRecipe(lr=0.002, epochs=40), value=True),
    "value, last": Teaching(SgdRecipe(lr=0.002, epochs=40, last=True), value=True),
    "value, none": Teaching(SgdRecipe(epochs=0), value=True)}


@dataclass(frozen=True)
class LayerwiseTargetSettings:
    """Three hidden layers on 4,000 images of MNIST-5k."""

    cases: tuple[Case, ...]
    width: int = 256
    shortened: int = 1  # the number of epochs is divided by this
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


def noisy(y: Int[Tensor, " n"], share: float, seed: int) -> Int[Tensor, " n"]:
    """Labels of which this share is shuffled among themselves."""
    rows = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[:round(share * len(y))]
    mixed = y.clone()
    mixed[rows] = shuffled(y[rows], seed + 1)
    return mixed


def work(t: Task[LayerwiseTargetSettings], run: Writer) -> Mapping[str, ArrayLike]:
    """Train one network. Accuracy on the fitting sample is measured on the labels that were taught, accuracy on held-out
    examples on the true labels."""
    data, (recipe, noise, value) = mnist_5k(seed=t.seed), TEACHINGS[t.case]
    model = mlp([784, *[t.settings.width] * 3, 1 if value else 10], seed=t.seed)
    y, y_test = (c[:, None].float() if value else indicators(c) for c in (noisy(data.y, noise, t.seed), data.y_test))
    fit(model, data.x, y, replace(recipe, epochs=recipe.epochs // t.settings.shortened), run, seed=t.seed)
    return {**feature_numbers(model, data.x, y, data.x_test, y_test),
            **centred_dimensions(*features_and_outputs(model, data.x), y)}


def centred_dimensions(Phi: Float[Tensor, "n p"], f: Float[Tensor, "n k"], y: Float[Tensor, "n k"]) -> dict[str, float]:
    """Effective dimensions: ``strong`` of all intensities; after centring features and outputs ``strong_varying`` of the
    intensities and ``used_varying`` of the utilisation."""
    parts = [part.double() for part in (Phi, y, f)]
    centred = analyse(*(part - part.mean(0) for part in parts))
    return {"strong": analyse(parts[0], parts[1] - parts[1].mean(0), parts[2]).deff_intensity,
            "strong_varying": centred.deff_intensity, "used_varying": centred.deff_utilisation}


def number(r: Results, name: str, case: Case) -> float:
    """Median of a number over the draws of a case."""
    return float(np.median(r.where(case=case)[name]))


@dataclass(frozen=True)
class LayerwiseFig3_5Settings(LayerwiseTargetSettings):
    """``noisy``, ``random``, ``lazy`` and ``good`` choose the networks that claims call trained on labels of which some are
    wrong, trained on random labels, trained in the last layer only, and trained on true labels."""

    cases: tuple[Case, ...] = ("classes", "tenth", "random", "no decay", "last", "none")
    noisy: tuple[Case, ...] = ("classes", "tenth", "random")
    random: Case = "random"
    lazy: Case = "last"
    good: Case = "classes"


def widest(r: Results) -> float:
    """The largest kappa on the training set, over the shares of noise."""
    return max(number(r, "kappa_cka_fit", case) for case in r.settings.noisy)


DEFINITION, BAR = "Definition 2: 0.1", "independent check of the recipe, one seed"
NO_DECAY = Control("without weight decay", {"random": "no decay"})
LAST, NONE = (Control(text, {"noisy": (case,), "random": case}) for text, case in (
    ("only the last layer trained, on the true labels", "last"), ("untrained", "none")))
OWN = Control("the true labels", {"random": "classes"})
EXCHANGED = Control("the network of true labels for that of random ones", {"random": "classes", "lazy": "classes"})
CLAIMS = (
    Claim("kappa on the training set, largest over 0, 10 and 100 % of random labels", widest, Interval(high=0.1), (LAST, NONE),
          paper="minimum feature regime in all three", source=DEFINITION, over="seed",
          says="With 0, 10 and 100 % of random labels training ends in the minimum feature regime (kappa below 0.1)."),
    Claim("kappa on the training set, all labels random", lambda r: number(r, "kappa_cka_fit", r.settings.random),
          Interval(high=0.05), (NO_DECAY, LAST, NONE), paper="minimum feature regime", source=BAR, over="seed",
          says="With labels all random training ends in the minimum feature regime."),
    Claim("share of random labels that is learned", lambda r: number(r, "accuracy_fit", r.settings.random), Interval(low=0.99),
          (LAST, NONE), paper="converged", source="the caption: all three converge", over="seed",
          says="Training on random labels converges."),
    Claim("test accuracy, all labels random", lambda r: number(r, "accuracy", r.settings.random), Interval(high=0.2), OWN,
          paper="markedly lower", source="chance is 0.1", over="seed",
          says="With random labels the test accuracy is markedly lower."),
    Claim("test accuracy on true labels less that on random ones",
          lambda r: number(r, "accuracy", r.settings.good) - number(r, "accuracy", r.settings.random), Interval(low=0.5), OWN,
          paper="differ markedly", source="half of what there is", over="seed",
          says="Networks of true and of random labels differ markedly in test accuracy."),
    Claim("rich is not good: kappa of a lazy network (its last layer) less that of the one that learned random labels",
          lambda r: number(r, "kappa_cka", r.settings.lazy) - number(r, "kappa_cka", r.settings.random), Interval(low=0.1),
          EXCHANGED, paper="a network may be in the minimum regime at chance accuracy", source="the border of Definition 2",
          over="seed", says="The minimum feature regime does not imply good generalisation: a lazy network has a larger kappa."),
    Claim("rich is not good: test accuracy of the lazy network less that of the one that learned random labels",
          lambda r: number(r, "accuracy", r.settings.lazy) - number(r, "accuracy", r.settings.random), Interval(low=0.5),
          EXCHANGED, paper="a network may be in the minimum regime at chance accuracy", source="half of what there is",
          over="seed",
          says="The minimum feature regime does not imply good generalisation: a lazy network has a higher test accuracy."),
)


@styled
def draw(results: Results) -> Figure:
    """The three panels on held-out examples, and again on the fitting sample."""
    figure, axes = panels(6, across=3)
    words: dict[Case, str] = {"classes": "0 % random", "tenth": "10 %", "random": "100 %", "no decay": "100 %, no decay",
                              "last": "last layer only"}
    cases = {text: results.where(case=case) for case, text in words.items()}
    for row, mark in ((axes[:3], ""), (axes[3:], "_fit")):
        metric_panels(row, cases, classes=10, mark=mark, legend=False)
        legend_outside(row[2])
        for ax in row:
            ax.set_title(f"{ax.get_title()}, {'fitting sample' if mark else 'held-out'}")
    caption(figure, "With weight decay ten features are left whatever the labels (dotted: ten); of random labels they hold "
                    "nothing of the true classes (panel a). In parentheses test accuracy, in brackets kappa. Sums above one "
                    f"are of held-out examples, too few for 256 features. {seeds_note(results)}")
    return figure


EXPERIMENT = Experiment(
    name="layerwise_fig3_5", ref=Ref("layerwise", "Fig. 3.5"), title="few features of random labels",
    smoke=LayerwiseFig3_5Settings(seeds=(0,)), paper=LayerwiseFig3_5Settings(), work=work, over=("case", "seed"),
    analysis=("noisy", "random", "lazy", "good"), figures={"layerwise_fig3_5": draw},
    start={"shortened": 200, "width": 16, "seeds": (0,)}, data=("mnist_5k",), reduced="one seed for 5",
    missing={"Fig. 3.5": "ResNet18 on 10,000 images of CIFAR-10, for which a fully connected network on 4,000 of MNIST stands"},
    protocol="stand-in: a fully connected network on 4,000 of MNIST for ResNet-18 on 10,000 of CIFAR-10",
    claims=CLAIMS)
