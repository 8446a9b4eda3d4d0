"""Figure 6 and Approximation 1 of [signal]: early in training the loss's gradient in the outputs points against the centred
labels; and what that says of a step, which is little for networks of ReLUs, because units switch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from richter.core import Interval, Ref
from richter.experiments.frame import Claim, Control, Experiment, Results
from richter.experiments.signal.stepping import ACTIVATIONS, Settings, tasks, work
from richter.report.drawing import COLOURS, band, caption, label, panels, points, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10", "vgg": "CIFAR-10, VGG-11"}


def early(r: Results) -> float:
    """The largest corr(y~, w) of steps 5 to 20, over the sets; or that of the last step."""
    steps = np.array(r.tasks[0].settings.steps)
    chosen = steps == steps[-1] if r.settings.late else (steps >= 5) & (steps <= 20)
    return float(r["correlation"][:, ("own", "shuffled").index(r.settings.labels)][:, chosen].max())


def first_order(activation: str) -> Callable[[Results], float]:
    """corr(change of Psi y~, its first order): of ReLUs at the largest rate at which no unit switches, or at the smallest above;
    of a smooth activation at the largest rate up to 1e-4."""
    def value(r: Results) -> float:
        rates, single = np.array(r.tasks[0].settings.rates), r.where(data="fashion_mnist")["single"][0]
        relu = list(ACTIVATIONS).index("relu")
        if activation == "relu":
            still = single[relu, :, 2] == 0
            at = still.nonzero()[0].max() + (r.settings.read == "flipped")
            return float(single[relu, at, 0])
        return float(single[list(ACTIVATIONS).index(r.settings.smooth), (rates <= 1e-4).nonzero()[0].max(), 0])
    return value


def approximation(r: Results) -> float:
    """corr(change of Psi y~, -lr H_w Psi y~) of ReLUs at the rate of training; of the rival, with the smallest rate."""
    return float(r.where(data="fashion_mnist")["single"][0][0, 0 if r.settings.read == "flipped" else -1, 1])


@styled
def draw(results: Results) -> Figure:
    sets = results.distinct("data")
    figure, (ax,) = panels(1, across=1, width=4.6, height=3.0)
    for k, name in enumerate(sets):
        band(ax, results.tasks[0].settings.steps, -results.where(data=name)["correlation"][:, 0], COLOURS[k], NAMES[name])
    label(ax, "step", "-corr(y~, w)", steps=True, legend=True)
    caption(figure, "At first the gradient in the outputs points against the labels; the sooner a network learns, the sooner no "
                    "more.")
    return figure


@styled
def draw_steps(results: Results) -> Figure:
    single, rates = results.where(data="fashion_mnist")["single"], results.tasks[0].settings.rates
    figure, (first, second, right) = panels(3, across=3)
    for k, name in enumerate(ACTIVATIONS):
        shifted = np.array(rates) * 1.25**k  # beside each other
        points(first, shifted, single[:, k, :, 0], COLOURS[k], name)
        points(second, shifted, single[:, k, :, 1], COLOURS[k], name)
    points(right, rates, single[:, 0, :, 2] / single[:, 0, :, 3], COLOURS[0])
    for ax, words in ((first, "the first order, -lr H_y~ Psi w"), (second, "with w for -y~: -lr H_w Psi y~")):
        ax.set_ylim(-0.35, 1.1)
        label(ax, "learning rate of one step", "corr with the change of Psi y~", words, log="x", legend=ax is first)
    label(right, "learning rate of one step", "share of units that switch", "ReLU", log="x")
    caption(figure, "The first order says what a step does while no unit switches, and for a smooth activation; a few switched "
                    "units among thousands are enough to spoil it. With w taken for -y~ it is worse everywhere.")
    return figure


BAR = "definitions: fixed from one to five seeds of a brute-force check"
NOT = ("two reasons: as soon as one unit in 10,000 switches the first order itself says nothing of the change (correlations of 0 "
       "to .3), and w is not quite -y~: even where none switches, H_w Psi y~ and H_y~ Psi w have correlations of .2 to .9")
SHUFFLED = Control("shuffled labels", {"labels": "shuffled"})
EXPERIMENT = Experiment(
    name="signal_fig6", ref=Ref("signal", "Fig. 6"), title="early in training the loss's gradient is against the labels",
    smoke=Settings(n=200, sets=("fashion_mnist",)), paper=Settings(), tasks=tasks, work=work,
    data=("fashion_mnist",), more_data=("mnist", "cifar10"), figures={"signal_fig6": draw, "signal_approx1": draw_steps},
    start={"n": 20, "steps": (0, 1), "examples": 10, "sets": ("fashion_mnist",), "seeds": (0,)}, places=("Fig. 6", "Approx. 1"),
    reduced="200 images of one set", tried="a rate of 0.1: corr(y~, w) was -.88 to -.96 at step 20 for three seeds",
    missing={"Fig. 6": "its architectures are not named; here fully connected networks on three sets, and VGG-11 at an eighth "
                       "of its channels"},
    claims=(
        Claim("largest corr(y~, w) of steps 5 to 20, over sets", early, Interval(high=-0.9),
              (SHUFFLED, Control("at the last step", {"late": True})), paper="about -1", source=BAR, over="seed",
              places=("Fig. 6", "Approx. 1")),
        Claim("corr(change of Psi y~, first order) of ReLUs while no unit switches", first_order("relu"), Interval(low=0.999),
              Control("the next larger rate, at which some do", {"read": "flipped"}), source=BAR, over="seed",
              places=("Approx. 1",)),
        Claim("corr(change of Psi y~, first order) of a smooth activation at a rate of 1e-4", first_order("smooth"),
              Interval(low=0.99), Control("ReLUs at that rate", {"smooth": "relu"}), source=BAR, over="seed",
              places=("Approx. 1",)),
        Claim("corr(change of Psi y~, -lr H_w Psi y~) of ReLUs at a rate of 0.01", approximation, Interval(low=0.9),
              Control("at a rate at which no unit switches", {"read": "flipped"}), paper="highly correlated", over="seed",
              source="the text: the two are highly correlated", places=("Approx. 1",), differs=NOT),
    ))
