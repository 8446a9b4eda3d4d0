"""Figure 3.6 of [layerwise]: for the value of a digit a network needs one feature besides the constant, for its class ten."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike

from richter.core import Interval, Ref
from richter.experiments.frame import Claim, Control, Experiment, Results
from richter.experiments.layerwise.metrics import Recipe, fit, indicators, metric_panels, numbers
from richter.models import mlp
from richter.report.drawing import caption, panels, styled
from richter.runs import Writer
from richter.tasks import mnist_5k

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Case = Literal["regression", "classification", "last", "none"]
CASES: tuple[Case, ...] = ("regression", "classification", "last", "none")
RECIPES: dict[Case, Recipe] = {
    "regression": Recipe(lr=0.002, epochs=40), "classification": Recipe(), "last": Recipe(lr=0.002, epochs=40, last=True),
    "none": Recipe(epochs=0)}


@dataclass(frozen=True)
class Settings:
    """Three hidden layers on 4,000 images of MNIST-5k. ``one``, ``ten``: the networks of which claims say that they tell a value,
    and a class. "last" and "none" have one output."""

    width: int = 256
    shortened: int = 1  # the number of epochs is divided by this
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    one: Case = "regression"
    ten: Case = "classification"


@dataclass(frozen=True)
class Task:
    settings: Settings
    case: Case
    seed: int


def tasks(s: Settings) -> list[Task]:
    return [Task(replace(s, seeds=(), one="regression", ten="classification"), case, seed) for case in CASES for seed in s.seeds]


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    """``strong``: the plain effective dimension of all intensities, the first one too."""
    s, data, recipe = t.settings, mnist_5k(seed=t.seed), RECIPES[t.case]
    many = t.case == "classification"
    model = mlp([784, *[s.width] * 3, 10 if many else 1], seed=t.seed)
    y, y_test = (indicators(c) if many else c[:, None].float() for c in (data.y, data.y_test))
    fit(model, data.x, y, replace(recipe, epochs=recipe.epochs // s.shortened), run, seed=t.seed)
    rows = numbers(model, data.x, y, data.x_test, y_test)
    share = rows["intensity"] / rows["intensity"].sum()
    kept = {k: v for k, v in rows.items() if not k.startswith("nc")}
    return {**kept, "strong": np.exp(-np.sum(share * np.log(np.where(share > 0, share, 1.0))))}


# ------------------------------------------------------------------------------------------------ claims


def number(r: Results, name: str, case: Case) -> float:
    return float(np.median(r.where(case=case)[name]))


def kappa(r: Results) -> float:
    """The larger one of both samples."""
    return max(number(r, name, r.settings.one) for name in ("kappa_cka", "kappa_cka_fit"))


LAST, NONE, TEN = (Control(text, {"one": case}) for text, case in (
    ("only the last layer trained", "last"), ("untrained", "none"), ("classification", "classification")))
ONE = Control("regression", {"ten": "regression"})
TEXT = "the text: two features, of which the first is constant"
CLAIMS = (
    Claim("regression: kappa, larger of fitting and held-out sample", kappa, Interval(high=0.02), (LAST, NONE, TEN),
          paper="minimum feature regime", source="independent check of the recipe, one seed", over="seed"),
    Claim("regression: used features, D_eff(Q^) on the fitting sample",
          lambda r: number(r, "deff_utilisation_fit", r.settings.one), Interval(high=2.0), TEN, paper="2", source=TEXT,
          over="seed"),
    Claim("regression: strong features, plain D_eff(rho)", lambda r: number(r, "strong", r.settings.one), Interval(high=2.0),
          TEN, paper="2", source=TEXT, over="seed"),
    Claim("classification: used features, D_eff(Q^) on the fitting sample",
          lambda r: number(r, "deff_utilisation_fit", r.settings.ten), Interval(9.5, 11.5), ONE, paper="10",
          source="independent check of the recipe, 2 seeds", over="seed"),
    Claim("classification: kappa on held-out examples", lambda r: number(r, "kappa_cka", r.settings.ten), Interval(high=0.1),
          Control("an untrained network", {"ten": "none"}), paper="minimum feature regime", source="Definition 2: 0.1",
          over="seed"),
)


@styled
def draw(results: Results) -> Figure:
    figure, axes = panels(3, across=3)
    words = {"regression": "value", "classification": "class", "last": "value, last layer only"}
    metric_panels(axes, {text: results.where(case=case) for case, text in words.items()}, classes=10, mark="_fit")
    caption(figure, "The value of a digit is told by one feature and a constant, its class by ten (dotted). In parentheses the "
                    "share of test images that are right (a value: nearest to its digit), in brackets kappa; on the fitting "
                    f"sample, median and range of {len(results.distinct('seed'))} seeds.")
    return figure


EXPERIMENT = Experiment(
    name="layerwise_fig3_6", ref=Ref("layerwise", "Fig. 3.6"), title="one feature for a value, ten for a class",
    smoke=Settings(seeds=(0, 1)), paper=Settings(), work=work, tasks=tasks, figures={"layerwise_fig3_6": draw},
    start={"shortened": 200, "width": 16, "seeds": (0,)}, data=("mnist_5k",), reduced="2 seeds for 5",
    missing={"Fig. 3.6": "ResNet18 on 60,000 images, for which a fully connected network on 4,000 stands"}, claims=CLAIMS)
