"""Figure 3.5 of [layerwise]: networks reach the minimum of features also on random labels, so that few features are not the same
as good ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from richter.core import Interval, Ref
from richter.experiments.frame import Claim, Control, Experiment, Results
from richter.experiments.layerwise import targets
from richter.experiments.layerwise.metrics import metric_panels
from richter.experiments.layerwise.pictures import outside, seeds
from richter.experiments.layerwise.targets import Case, number, tasks, work
from richter.report.drawing import caption, panels, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

@dataclass(frozen=True)
class Settings(targets.Settings):
    """``noisy``, ``random``, ``lazy``, ``good``: the networks that claims say learned labels of which some are wrong, random
    labels, little of features, and what is true."""

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
          paper="minimum feature regime in all three", source=DEFINITION, over="seed"),
    Claim("kappa on the training set, all labels random", lambda r: number(r, "kappa_cka_fit", r.settings.random),
          Interval(high=0.05), (NO_DECAY, LAST, NONE), paper="minimum feature regime", source=BAR, over="seed"),
    Claim("share of random labels that is learned", lambda r: number(r, "accuracy_fit", r.settings.random), Interval(low=0.99),
          (LAST, NONE), paper="converged", source="the caption: all three converge", over="seed"),
    Claim("test accuracy, all labels random", lambda r: number(r, "accuracy", r.settings.random), Interval(high=0.2), OWN,
          paper="markedly lower", source="chance is 0.1", over="seed"),
    Claim("test accuracy on true labels less that on random ones",
          lambda r: number(r, "accuracy", r.settings.good) - number(r, "accuracy", r.settings.random), Interval(low=0.5), OWN,
          paper="differ markedly", source="half of what there is", over="seed"),
    Claim("rich is not good: kappa of a lazy network (its last layer) less that of the one that learned random labels",
          lambda r: number(r, "kappa_cka", r.settings.lazy) - number(r, "kappa_cka", r.settings.random), Interval(low=0.1),
          EXCHANGED, paper="a network may be in the minimum regime at chance accuracy", source="the border of Definition 2",
          over="seed"),
    Claim("rich is not good: test accuracy of the lazy network less that of the one that learned random labels",
          lambda r: number(r, "accuracy", r.settings.lazy) - number(r, "accuracy", r.settings.random), Interval(low=0.5),
          EXCHANGED, paper="a network may be in the minimum regime at chance accuracy", source="half of what there is",
          over="seed"),
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
        outside(row[2])
        for ax in row:
            ax.set_title(f"{ax.get_title()}, {'fitting sample' if mark else 'held-out'}")
    caption(figure, "With weight decay ten features are left whatever the labels (dotted: ten); of random labels they hold "
                    "nothing of the true classes (panel a). In parentheses test accuracy, in brackets kappa. Sums above one "
                    f"are of held-out examples, too few for 256 features. {seeds(results)}")
    return figure


EXPERIMENT = Experiment(
    name="layerwise_fig3_5", ref=Ref("layerwise", "Fig. 3.5"), title="few features of random labels",
    smoke=Settings(seeds=(0,)), paper=Settings(), work=work, tasks=tasks, figures={"layerwise_fig3_5": draw},
    start={"shortened": 200, "width": 16, "seeds": (0,)}, data=("mnist_5k",), reduced="one seed for 5",
    missing={"Fig. 3.5": "ResNet18 on 10,000 images of CIFAR-10, for which a fully connected network on 4,000 of MNIST stands"},
    claims=CLAIMS)
