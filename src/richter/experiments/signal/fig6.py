"""Figure 6 and Approximation 1 of [signal]: early in training the loss's gradient in the outputs points against the centred
labels. Full-batch descent shows this; single steps from the initial network show how little it says of a step of ReLU
networks, because units switch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor, nn

from richter.core.likeness import cosine
from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.experiments.rivals import shuffled
from richter.experiments.signal.common import SETS, balanced, he
from richter.instrument.observe import measure
from richter.instrument.probe import Probe
from richter.measures.curvature import early_step
from richter.models import vgg11
from richter.report.drawing import COLOURS, band, caption, label, panels, points, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "softplus": lambda: nn.Softplus(beta=10.0)}


@dataclass(frozen=True)
class SignalFig6Settings:
    """Pixels in [0, 1], bias-free He networks of depth 10 and width 64, full-batch gradient descent on the mean cross-entropy;
    single steps of other rates are taken from the initial network, in float64."""

    n: int = 500
    depth: int = 10
    width: int = 64
    lr: float = 0.03  # Table 2 has 0.003 with momentum 0.9
    steps: tuple[int, ...] = (0, 1, 2, 5, 10, 20, 60, 200, 600)
    sets: tuple[str, ...] = ("mnist", "fashion_mnist", "cifar10", "vgg")
    rates: tuple[float, ...] = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)  # of single steps
    examples: int = 50  # of single steps
    labels: Literal["own", "shuffled"] = "own"  # with which the gradient is compared
    late: bool = False  # compared at the last step
    read: Literal["own", "flipped"] = "own"  # steps in which no unit switches, or those in which some do
    smooth: str = "softplus"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


def hidden(s: SignalFig6Settings) -> list[int]:
    """Widths of the hidden layers."""
    return [s.width] * (s.depth - 1)


def work(t: Task[SignalFig6Settings], run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    images = t.set == "vgg"
    data = SETS["cifar10" if images else t.set](s.n // 4 if images else s.n, flat=not images, seed=t.seed, standardise=False)
    model = vgg11(width=0.125, seed=t.seed) if images else he([data.x.shape[1], *hidden(s), 10], t.seed)
    x, y = data.x, data.y
    optimiser = torch.optim.SGD(model.parameters(), lr=s.lr)
    rows = []
    for step in range(max(s.steps) + 1):
        if step in s.steps:
            rows.append([correlation(model, x, y, labels) for labels in (y, shuffled(y, t.seed + 1))])
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()
        run.progress(step / max(s.steps))
    found = {"correlation": np.array(rows).T}  # own and shuffled labels, by step
    return found if t.set != "fashion_mnist" else {**found, **single_steps(s, x, y, t.seed)}


def correlation(model: nn.Module, x: Tensor, y: Tensor, labels: Tensor) -> float:
    """corr(y~, w) over all outputs of all examples; with other labels than those of the loss for a rival."""
    if labels is y:
        return measure(model, Probe(x, y), "label_gradient_correlation").value("label_gradient_correlation")
    with torch.no_grad():
        w = model(x).softmax(1) - F.one_hot(y, 10)
    return cosine((F.one_hot(labels, 10) - 0.1).numpy(), w.numpy())


def single_steps(s: SignalFig6Settings, x: Tensor, y: Tensor, seed: int) -> dict[str, ArrayLike]:
    """Effect on Psi y~ of a single step from the initial network, beside both orders, and flips, for each activation and
    rate."""
    probe = balanced(x.double(), y, s.examples)
    rows = []
    for activation in ACTIVATIONS:
        model = he([x.shape[1], *hidden(s), 10], seed, ACTIVATIONS[activation]).double()
        steps = [early_step(model, probe, lr) for lr in s.rates]
        rows.append([[e.first_order, e.approximation, e.flips, e.units] for e in steps])
    return {"single": np.array(rows)}  # activation, rate, number


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
        rates, single = np.array(r.tasks[0].settings.rates), r.where(set="fashion_mnist")["single"][0]
        relu = list(ACTIVATIONS).index("relu")
        if activation == "relu":
            still = single[relu, :, 2] == 0
            at = still.nonzero()[0].max() + (r.settings.read == "flipped")
            return float(single[relu, at, 0])
        return float(single[list(ACTIVATIONS).index(r.settings.smooth), (rates <= 1e-4).nonzero()[0].max(), 0])
    return value


def approximation(r: Results) -> float:
    """corr(change of Psi y~, -lr H_w Psi y~) of ReLUs at the rate of training; of the rival, with the smallest rate."""
    return float(r.where(set="fashion_mnist")["single"][0][0, 0 if r.settings.read == "flipped" else -1, 1])


@styled
def draw(results: Results) -> Figure:
    sets = results.distinct("set")
    figure, (ax,) = panels(1, across=1, width=4.6, height=3.0)
    for k, name in enumerate(sets):
        band(ax, results.tasks[0].settings.steps, -results.where(set=name)["correlation"][:, 0], COLOURS[k], NAMES[name])
    label(ax, "step", "-corr(y~, w)", steps=True, legend=True)
    caption(figure, "At first the gradient in the outputs points against the labels; the sooner a network learns, the sooner no "
                    "more.")
    return figure


@styled
def draw_steps(results: Results) -> Figure:
    """Figure of how well the first order predicts one step, against the learning rate."""
    single, rates = results.where(set="fashion_mnist")["single"], results.tasks[0].settings.rates
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
    smoke=SignalFig6Settings(n=200, sets=("fashion_mnist",)), paper=SignalFig6Settings(), over=("set", "seed"),
    analysis=("labels", "late", "read", "smooth"), work=work,
    data=("fashion_mnist",), more_data=("mnist", "cifar10"), figures={"signal_fig6": draw, "signal_approx1": draw_steps},
    start={"n": 20, "steps": (0, 1), "examples": 10, "sets": ("fashion_mnist",), "seeds": (0,)}, places=("Fig. 6", "Approx. 1"),
    reduced="200 images of one set", tried="a rate of 0.1: corr(y~, w) was -.88 to -.96 at step 20 for three seeds",
    missing={"Fig. 6": "its architectures are not named; here fully connected networks on three sets, and VGG-11 at an eighth "
                       "of its channels"},
    protocol="unstated: the architectures",
    claims=(
        Claim("largest corr(y~, w) of steps 5 to 20, over sets", early, Interval(high=-0.9),
              (SHUFFLED, Control("at the last step", {"late": True})), paper="about -1", source=BAR, over="seed",
              places=("Fig. 6", "Approx. 1"),
              says="Approximation 1: early in training the loss's gradient is against the labels: corr(y~, w) is about -1."),
        Claim("corr(change of Psi y~, first order) of ReLUs while no unit switches", first_order("relu"), Interval(low=0.999),
              Control("the next larger rate, at which some do", {"read": "flipped"}), source=BAR, over="seed",
              places=("Approx. 1",), own=True),
        Claim("corr(change of Psi y~, first order) of a smooth activation at a rate of 1e-4", first_order("smooth"),
              Interval(low=0.99), Control("ReLUs at that rate", {"smooth": "relu"}), source=BAR, over="seed",
              places=("Approx. 1",), own=True),
        Claim("corr(change of Psi y~, -lr H_w Psi y~) of ReLUs at a rate of 0.01", approximation, Interval(low=0.9),
              Control("at a rate at which no unit switches", {"read": "flipped"}), paper="highly correlated", over="seed",
              source="the text: the two are highly correlated", places=("Approx. 1",), differs=NOT,
              says="Approximation 1: the change of Psi y~ is highly correlated with -lr H_w Psi y~."),
    ))
