"""Figures 1, 2, 9 and 10 of [signal]: alignment with the labels forms a hierarchy over layers, mostly in the first epochs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Scale, Task, Writer
from richter.experiments.signal.common import balanced, fit, he, images, profile
from richter.experiments.training import accuracy
from richter.report.drawing import COLOURS, band, caption, depth_looks, label, line, panels, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Subject = Literal["trained", "untrained", "shuffled"]
DEEP_RATE = 0.004  # of Fig. 1, as in Table 2


@dataclass(frozen=True)
class SignalFig2Settings:
    """Bias-free He networks, SGD with momentum 0.9 and weight decay 1e-4, batches of 128; alignment on class-balanced training
    images. The learning rates of panels a and b of Figs 9 and 10 are not legible; those of Fig. 2 and one between are taken."""

    n: int = 2_000
    epochs: int = 10
    measured: tuple[int, ...] = (0, 1, 3, 10)  # epochs
    probe: int = 60
    depth: int = 10  # of Figs 2, 9 and 10, at this width
    width: int = 100
    deep: int = 20  # of Fig. 1
    deep_width: int = 100
    rates: tuple[float, ...] = (0.003, 0.01, 0.05)
    subject: Subject = "trained"  # what the claims are read from
    seeds: tuple[int, ...] = (0, 1)


def trainings(s: SignalFig2Settings) -> list[Task[SignalFig2Settings]]:
    """Return the deep networks, the pair of true and shuffled labels, and those of each rate, for each seed."""
    rest = replace(s, depth=0, width=0, deep=0, deep_width=0, rates=(), seeds=())
    kinds = [*((data, s.deep, s.deep_width, DEEP_RATE, "own") for data in ("fashion_mnist", "cifar10")),
             ("mnist", s.depth, s.width, s.rates[0], "own"), ("mnist", s.depth, s.width, s.rates[0], "shuffled"),
             *((data, s.depth, s.width, lr, "own") for data in ("fashion_mnist", "cifar10") for lr in s.rates)]
    return [Task(rest, data=data, depth=depth, width=width, lr=lr, labels=labels, seed=seed)
            for seed in s.seeds for data, depth, width, lr, labels in kinds]


def work(t: Task[SignalFig2Settings], run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    data = images(t.data, s.n, t.seed, t.labels)
    model = he([data.x.shape[1], *[t.width] * (t.depth - 1), 10], t.seed)
    probe, rows, losses = balanced(data.x, data.y, s.probe), [], []

    def after(epoch: int) -> None:
        if epoch in s.measured:
            rows.append(profile(model, probe, errors=False)[0])
            losses.append(F.cross_entropy(model(data.x[:1000]), data.y[:1000]).item())

    fit(model, data, t.lr, s.epochs, run, seed=t.seed, after=after)
    return {"epochs": np.array([k for k in s.measured if k <= s.epochs]), "alignment": np.array(rows), "losses": losses,
            "accuracy": accuracy(model, data.x_test, data.y_test)}


NAMES = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}

# ------------------------------------------------------------------------------------------------ claims


def chosen(r: Results, data: str, deep: bool = False, lr: float | None = None) -> Results:
    """The networks of one panel; those trained on shuffled labels where they are the subject."""
    s = r.settings
    if s.subject == "shuffled":
        return r.where(labels="shuffled")
    return r.where(data=data, labels="own", depth=s.deep if deep else s.depth, lr=DEEP_RATE if deep else lr or s.rates[0])


def alignments(r: Results) -> NDArray[np.float64]:
    """[measured, layers] of the one network left; before training at all times where that is the subject."""
    A = r["alignment"][0]
    return np.repeat(A[:1], len(A), 0) if r.settings.subject == "untrained" else A


def panel(value: Callable[[Results], float], data: str, deep: bool, lr: float | None) -> Callable[[Results], float]:
    """Function that reads a number of the networks of one panel."""
    return lambda r: value(chosen(r, data, deep, lr))


def growth(r: Results) -> float:
    """The best layer's alignment at the end over the best one's before training."""
    return float(alignments(r)[-1].max() / r["alignment"][0][0].max())


def gap(r: Results) -> float:
    """The last layer's share in the growth of the layer that grew most: nothing grows, nothing is shared, 1."""
    grown = alignments(r)[-1] - r["alignment"][0][0]
    return float(grown[-1] / grown.max()) if grown.max() > 0 else 1.0


def early(r: Results) -> float:
    """The share of the best layer's final growth that is there after the first three epochs."""
    A, epochs = alignments(r)[:, alignments(r)[-1].argmax()], r["epochs"][0]
    total = A[-1] - A[0]
    return float((A[epochs.tolist().index(3)] - A[0]) / total) if total > 0 else 0.0


# ------------------------------------------------------------------------------------------------ drawings


@styled
def draw_deep(results: Results) -> Figure:
    """Figure 1."""
    figure, axes = panels(2, across=2)
    for ax, data in zip(axes, ("fashion_mnist", "cifar10"), strict=True):
        A = chosen(results, data, deep=True)["alignment"]
        layers = np.arange(1, A.shape[2] + 1)
        band(ax, layers, A[:, 0], COLOURS[1], "before training", "--")
        band(ax, layers, A[:, -1], COLOURS[0], "at the end")
        label(ax, "layer", "alignment (tangent_cka)", NAMES[data], legend=True)
    caption(figure, f"Alignment of {results.settings.deep}-layer networks peaks inside them, and is least in the last layers. "
                    f"Median and range of {len(results.distinct('seed'))} seeds.")
    return figure


@styled
def draw_two(results: Results) -> Figure:
    """Fig. 2: loss, every layer's alignment over epochs, and the profile at the end."""
    figure, axes = panels(6, across=3)
    for row, data in enumerate(("mnist", "cifar10")):
        r = chosen(results, data)
        epochs, A = r["epochs"][0], r["alignment"]
        left, middle, right = axes[3 * row:3 * row + 3]
        band(left, epochs, r["losses"])
        label(left, "epoch", "training loss", NAMES[data])
        for layer, look in enumerate(list(depth_looks([str(k) for k in range(A.shape[2])]).values())[:A.shape[2]]):
            line(middle, epochs, np.median(A[:, :, layer], 0), look.colour)
        label(middle, "epoch", "alignment (tangent_cka)", "every layer, dark to light along depth")
        band(right, np.arange(1, A.shape[2] + 1), A[:, -1])
        label(right, "layer", "alignment (tangent_cka)", "at the end")
    caption(figure, "Alignment grows in the first epochs, in some layers much more than in the last ones.")
    return figure


def growing(data: str) -> Callable[[Results], Figure]:
    """Figs 9 and 10: profiles at several times, a panel for each learning rate."""
    @styled
    def draw(results: Results) -> Figure:
        rates = results.settings.rates
        figure, axes = panels(len(rates), across=len(rates))
        for ax, lr, letter in zip(axes, rates, "abc", strict=False):
            r = chosen(results, data, lr=lr)
            for k, epoch in enumerate(r["epochs"][0]):
                A = r["alignment"][:, k]
                band(ax, np.arange(1, A.shape[1] + 1), A, COLOURS[k % len(COLOURS)], f"epoch {epoch}")
            label(ax, "layer", "alignment (tangent_cka)", f"{letter}: rate {lr:g}, test accuracy {np.median(r['accuracy']):.1%}",
                  legend=True)
        caption(figure, f"{NAMES[data]}: the profile over layers forms in the first epochs, the sooner the larger the rate.")
        return figure
    return draw


UNTRAINED = Control("untrained networks", {"subject": "untrained"})
SHUFFLED = Control("trained on shuffled labels (MNIST)", {"subject": "shuffled"})
BAR, TEXT = "independent check of the recipe, depths 10 to 30, 3 seeds", "the paper's text: mostly in the first few epochs"
PANELS = (("Fig. 1", "20 layers, Fashion-MNIST", "fashion_mnist", True, None),
          ("Fig. 1", "20 layers, CIFAR-10", "cifar10", True, None),
          ("Fig. 2", "MNIST", "mnist", False, None), ("Fig. 2", "CIFAR-10", "cifar10", False, None),
          ("Fig. 9", "Fashion-MNIST, rate 0.003", "fashion_mnist", False, None),
          ("Fig. 9", "Fashion-MNIST, rate 0.05", "fashion_mnist", False, 0.05),
          ("Fig. 10", "CIFAR-10, rate 0.003", "cifar10", False, None), ("Fig. 10", "CIFAR-10, rate 0.05", "cifar10", False, 0.05))
SMALL = "2,000 images: 160 steps in all, 48 of them in three epochs"
SHORT = ("10 epochs of 10,000 images: 1.56. It goes on growing, in one seed to 1.4, 2.0 and 2.4 after 10, 20 and 30 epochs,"
         " while the test accuracy stays at .42; the paper's tables have 100 to 700 epochs. A rate of 0.05 has 2.8 after ten")
SLOW: Mapping[Scale, str] = {"smoke": SMALL, "paper": SHORT}
NOT_GROWN: dict[str, Mapping[Scale, str]] = {"MNIST": {"smoke": SMALL}, "CIFAR-10": SLOW, "CIFAR-10, rate 0.003": SLOW}
CLAIMS = (
    *(Claim(f"{name}: growth of the best layer's alignment", panel(growth, d, deep, lr),
            Interval(low=2.5), (UNTRAINED, SHUFFLED), source=BAR, over="seed", places=(place,),
            differs=NOT_GROWN.get(name, ""), says=f"The alignment of the best layer grows in training ({name}).")
      for place, name, d, deep, lr in PANELS),
    *(Claim(f"{name}: growth of the last layer over that of the layer that grew most",
            panel(gap, d, deep, lr), Interval(high=0.5), UNTRAINED, source=BAR, over="seed",
            places=(place,), says=f"The last layer aligns least: alignment forms a hierarchy over layers ({name}).")
      for place, name, d, deep, lr in PANELS if place in ("Fig. 1", "Fig. 2")),
    *(Claim(f"{name}: share of the best layer's growth that three epochs bring",
            panel(early, d, False, lr), Interval(low=0.5), UNTRAINED, paper="mostly", source=TEXT,
            over="seed", places=(place,), differs={"smoke": SMALL} if name in ("MNIST", "Fashion-MNIST, rate 0.003") else "",
            says=f"Alignment rises mostly in the first few epochs ({name}).")
      for place, name, d, _, lr in PANELS if place in ("Fig. 2", "Fig. 9", "Fig. 10")),
)
LESS = "10,000 images and 10 epochs"
EXPERIMENT = Experiment(
    name="signal_fig2", ref=Ref("signal", "Fig. 2"), title="alignment forms a hierarchy over layers in the first epochs",
    smoke=SignalFig2Settings(), paper=SignalFig2Settings(n=10_000, probe=100, width=256, seeds=(0, 1, 2, 3, 4)),
    over=trainings, analysis=("subject",), work=work, data=("mnist", "fashion_mnist", "cifar10"),
    places=("Fig. 1", "Fig. 2", "Fig. 9", "Fig. 10"),
    figures={"signal_fig1": draw_deep, "signal_fig2": draw_two, "signal_fig9": growing("fashion_mnist"),
             "signal_fig10": growing("cifar10")}, start={"n": 256, "epochs": 1, "measured": (0, 1), "seeds": (0,)},
    reduced="2,000 images, width 100, two seeds",
    missing={"Fig. 1": f"{LESS}; the width and rate are not stated, ours are 100 and 0.004", "Fig. 2": LESS,
             "Fig. 9": f"{LESS}; the rates of panels a and b are not legible, ours are 0.003 and 0.01",
             "Fig. 10": f"{LESS}; the rates as in Fig. 9"},
    protocol={"Fig. 1": "unstated: width and rate; 10,000 images and 10 epochs", "Fig. 2": "reduced: 10,000 images, 10 epochs",
              "Fig. 9": "unstated: rates of two panels; 10,000 images, 10 epochs",
              "Fig. 10": "unstated: rates of two panels; 10,000 images, 10 epochs"},
    claims=CLAIMS)
