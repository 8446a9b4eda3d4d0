"""Figures 2A, 2B, 13 and 14 of [nfa]: both correlations in the layers of a five-hidden-layer network on images, its losses and
how far its weights move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.experiments.rivals import Rivals, milestones, shuffled
from richter.experiments.training import LayerCurves, accuracy, epochs, error, linears, one_hot
from richter.instrument.probe import Probe
from richter.models import mlp
from richter.report.drawing import COLOURS, band, caption, label, panels, points, styled
from richter.tasks import images as image_sets

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class NfaFig2Settings:
    """Bias-free ReLU layers of torch's initial weights, inputs by one global mean and deviation, centred one-hot labels, mean
    squared error, SGD; K on 500 training images. On 5,000 images the paper's learning rate of 10 for MNIST is at the edge of
    stability: 1 there. The first data set is also learned with shuffled labels.

    ``labels`` and ``centred`` say which of the results claims read: the rivals are in the same runs."""

    data: tuple[str, ...] = ("mnist_5k",)
    n: int = 0  # 0: all of them
    width: int = 256
    hidden: int = 5
    rates: tuple[float, ...] = (1.0,)
    epochs: tuple[int, ...] = (40,)
    batch: int = 128
    probe: int = 500
    checkpoints: int = 2  # besides the start and epoch 5
    labels: Literal["true", "shuffled"] = "true"
    centred: Literal["cnfc", "rotated", "gaussian"] = "cnfc"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


RIVAL = ("mnist_5k", 1.0, 40)  # what is also learned with shuffled labels, at either scale: data, learning rate, epochs


def trainings(s: NfaFig2Settings) -> list[Task[NfaFig2Settings]]:
    """Return a task for each data set with its rate and epochs, and the pair of true and shuffled labels, for each seed."""
    rest = replace(s, data=(), rates=(), epochs=(), seeds=())
    sets = list(zip(s.data, s.rates, s.epochs, strict=True))
    kinds = [*((rest, *each, "true") for each in sets),
             *((replace(rest, checkpoints=2), *RIVAL, labels) for labels in ("true", "shuffled"))]
    return list(dict.fromkeys(Task(settings, data=data, lr=lr, epochs=epochs, labels=labels, seed=seed)
                              for settings, data, lr, epochs, labels in kinds for seed in s.seeds))


def work(t: Task[NfaFig2Settings], run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    data = image_sets.mnist_5k(seed=t.seed) if t.data == "mnist_5k" else \
        getattr(image_sets, t.data)(s.n or 50_000, flat=True, seed=t.seed)
    y = one_hot(shuffled(data.y, t.seed) if t.labels == "shuffled" else data.y)
    model = mlp([data.x.shape[1], *[s.width] * s.hidden, 10], bias=False, seed=t.seed)
    hidden, seen = linears(model)[:-1], data.x[:s.probe]
    curves = LayerCurves(model, Probe(seen, y[:s.probe]), ("nfc", "cnfc", "c_uc_ratio", "weight_change"), hidden, run)
    rivals, due = Rivals(model, seen, hidden, t.seed), {1, 5} | milestones(t.epochs, s.checkpoints)
    untrained = error(model, data.x[:5_000], y[:5_000])

    def measured(epoch: int) -> None:
        if epoch in due:
            curves.at(epoch)
            rivals.at(epoch)

    descent = torch.optim.SGD(model.parameters(), lr=t.lr)
    epochs(model, data.x, y, descent, t.epochs, run, batch=s.batch, seed=t.seed, after=measured)
    losses = run.run.scalars("loss").value if t.epochs else np.array([])
    return {**curves.arrays(), **rivals.arrays(), "loss": np.concatenate([[untrained], losses]),
            "accuracy": accuracy(model, data.x_test, data.y_test)}


CONSTANT = 0.09  # mean square of centred one-hot labels of ten classes, all alike
Arrays = Mapping[str, NDArray[np.float64]]
Number = Callable[[Arrays], float]  # of one task


def row(arrays: Arrays, name: str, epoch: int) -> NDArray[np.float64]:
    """The layers' values at an epoch; -1 is the last."""
    return arrays[name][-1 if epoch < 0 else list(arrays["steps"]).index(epoch)]


def mean_of(name: str, epoch: int, less: str = "") -> Number:
    """The mean over layers of one measure at an epoch, or of the difference of two."""
    return lambda arrays: float((row(arrays, name, epoch) - (row(arrays, less, epoch) if less else 0)).mean())


def over_sets(r: Results, number: Number, worst: Callable[[list[float]], float] = min) -> float:
    """Worst value of a number over the data sets; with shuffled labels only the pair's set counts."""
    names = [RIVAL[0]] if r.settings.labels == "shuffled" else r.settings.data
    return worst([number(arrays) for name in names for _, arrays in r.where(labels=r.settings.labels, data=name)])


def on_rival_pair(r: Results, number: Number, labels: str = "") -> float:
    """Number on the 5,000 images that are learned with true and with shuffled labels."""
    (_, arrays), = r.where(labels=labels or r.settings.labels, data=RIVAL[0])
    return number(arrays)


def gain_over_shuffled(r: Results, number: Number) -> float:
    """Number with true labels, less that with shuffled labels."""
    return on_rival_pair(r, number) - on_rival_pair(r, number, "shuffled")


@dataclass(frozen=True)
class DataSetCurve:
    """Drawn results of one data set with true labels: seeds by epochs by layers."""

    name: str
    epochs: NDArray[np.int64]
    results: Results

    def __getitem__(self, measure: str) -> NDArray[np.float64]:
        return self.results[measure]


def curves_of(results: Results) -> list[DataSetCurve]:
    """Curves of each data set."""
    true = {name: results.where(labels="true", data=name) for name in results.settings.data}
    return [DataSetCurve(name, part["steps"][0], part) for name, part in true.items()]


KINDS = (("nfc", "UC", "-"), ("cnfc", "C", "-"), ("rotated", "C, other K of the same spectrum", ":"))


@styled
def draw(results: Results) -> Figure:
    """Figure of panels A and B."""
    figure, (left, right) = panels(2, across=2)
    sets = curves_of(results)
    layers = np.arange(1, sets[-1]["nfc"].shape[2] + 1)
    for k, (measure, name, style) in enumerate(KINDS):
        band(left, sets[-1].epochs, sets[-1][measure].mean(2), COLOURS[k], name, style)
        points(right, layers, np.mean([c[measure][:, -1] for c in sets], 0), COLOURS[k], name)
    label(left, "epoch", "correlation, mean over layers", f"A: {sets[-1].name}", steps=True, legend=True)
    label(right, "hidden layer", "correlation at the end", "B: mean over data sets")
    right.set_xticks(layers)
    caption(figure, "The centred correlation C is above the uncentred one UC. Early it is no higher than with a K of random "
                    "eigenvectors, because the weights have moved in few directions.")
    return figure


@styled
def draw_layers(results: Results) -> Figure:
    """A row for each data set, a column for each layer."""
    sets = curves_of(results)
    layers = sets[0]["nfc"].shape[2]
    figure, axes = panels(len(sets) * layers, across=layers)
    for i, ax in enumerate(axes):
        curve, layer = sets[i // layers], i % layers
        for k, (measure, name, style) in enumerate(KINDS):
            band(ax, curve.epochs, curve[measure][:, :, layer], COLOURS[k], name, style)
        label(ax, "epoch", "correlation", f"{curve.name}, layer {layer + 1}", steps=True, legend=i == 0)
        ax.set_ylim(0, 1.02)
    caption(figure, "In nearly every layer and epoch the centred correlation C is above the uncentred one UC; dotted what C is "
                    "for a K of the same spectrum with random eigenvectors.")
    return figure


@styled
def draw_movement(results: Results) -> Figure:
    """Losses, and how far the weights moved: a row for each data set."""
    sets = curves_of(results)
    figure, axes = panels(2 * len(sets), across=2)
    for curve, left, right in zip(sets, axes[::2], axes[1::2], strict=True):
        band(left, np.arange(curve["loss"].shape[1]), curve["loss"], COLOURS[6])
        label(left, "epoch", "training loss", f"{curve.name}: loss", steps=True)
        for layer in range(curve["weight_change"].shape[2]):
            band(right, curve.epochs, curve["weight_change"][:, :, layer], COLOURS[layer], f"layer {layer + 1}")
        label(right, "epoch", "|W - W0| / |W|", f"{curve.name}: movement", steps=True, legend=True)
    caption(figure, "The loss falls while every layer moves away from its initial weights; the first moves most.")
    return figure


WHEN = {5: "at epoch 5", -1: "at the end"}
ABOVE = Interval(low=1e-9)  # a rival that is compared with itself gives 0
SHUFFLED = Control("shuffled labels", {"labels": "shuffled"})
GAUSSIAN = Control("a Gaussian movement in the place of W - W0", {"centred": "gaussian"})
ROTATED = Control("K's eigenvectors drawn anew", {"centred": "rotated"})
BAR = "definitions, 11: 5,000 images at learning rate 1, for the median of seeds"
OWN_RIVAL = ("the paper's own rival in Fig. 1. About movements that follow gradients, whatever is learned: with shuffled labels "
             "it is larger (.143 for .074 on 5,000 images)")
LABELS = "what is there because something is learned is larger with true labels"
TEXT = "the paper's text, Sec. 3"
MISSING = "CIFAR-100, SVHN, GTSRB and STL-10 cannot be had here (Fashion-MNIST stands in, 10 epochs); CIFAR-10: 15 of 150 epochs"
FEW = "early the weights have moved in few directions, and any K of this spectrum gives such a movement a correlation near one"
CLOSE = ("on MNIST at the paper's learning rate of 10 three quarters of <NFM, AGOP> of the first layer are of its movement after "
         "one epoch, and both correlations are nearly the same: in 3 of 200 numbers of five seeds C is the lower one, by .007 at "
         "most")
MEMORISED = ("with shuffled labels, which are hardly learned in this time, C - UC ends as large: it comes with descent, whatever "
             "is learned")
CLAIMS = (
    *(Claim(f"C {when} on 5,000 images, mean over layers (with shuffled labels too)",
            partial(lambda r, epoch: on_rival_pair(r, mean_of(r.settings.centred, epoch)), epoch=epoch), Interval(low=0.75),
            GAUSSIAN,
            source=BAR, places=("Fig. 2",), over="seed",
            says=f"The centred correlation of an MLP on images is high, here {when}.") for epoch, when in WHEN.items()),
    *(Claim(f"C - UC {when} on 5,000 images, mean over layers (with shuffled labels too)",
            partial(lambda r, epoch: on_rival_pair(r, mean_of(r.settings.centred, epoch, "nfc")), epoch=epoch),
            Interval(low=0.25),
            GAUSSIAN, source=BAR, places=("Fig. 2",), over="seed",
            says=f"The centred correlation of an MLP on images is above the uncentred one, here {when}.")
      for epoch, when in WHEN.items()),
    Claim("C - UC at epoch 5 on 5,000 images: true labels less shuffled ones",
          lambda r: gain_over_shuffled(r, mean_of("cnfc", 5, "nfc")), ABOVE, SHUFFLED, source=LABELS, places=("Fig. 2",),
          over="seed", own=True),
    Claim("C - UC at the end on 5,000 images: true labels less shuffled ones",
          lambda r: gain_over_shuffled(r, mean_of("cnfc", -1, "nfc")), ABOVE, SHUFFLED, source=LABELS, differs=MEMORISED,
          places=("Fig. 2",), over="seed", own=True,
          rival="shuffled labels"),
    Claim("C at the end less C with K's eigenvectors drawn anew, mean over layers, smallest over data sets (with shuffled "
          "labels too)",
          lambda r: over_sets(r, mean_of(r.settings.centred, -1, "rotated")), ABOVE, (ROTATED, GAUSSIAN), source=OWN_RIVAL,
          places=("Fig. 2",), over="seed", by="mean", own=True,
          rival="K's eigenvectors drawn anew"),
    Claim("test accuracy on 5,000 images", lambda r: on_rival_pair(r, lambda a: float(a["accuracy"])), Interval(low=0.92),
          SHUFFLED,
          source=BAR, places=("Fig. 2",), over="seed", own=True),
    Claim("smallest C - UC over data sets, layers and checkpoints (with shuffled labels too)",
          lambda r: over_sets(r, lambda a: float(np.nanmin(a[r.settings.centred] - a["nfc"]))), Interval(low=0.0), GAUSSIAN,
          paper="above 0", source=TEXT, differs={"paper": CLOSE}, was=">= 0 for the mean of three seeds: .0007",
          places=("Fig. 13",), over="seed", by="mean",
          says="The centred correlation is above the uncentred one in every layer, at all times, on all data sets."),
    Claim("C after epoch 1 less C with K's eigenvectors drawn anew, mean over layers, smallest over data sets",
          lambda r: over_sets(r, mean_of(r.settings.centred, 1, "rotated")), ABOVE, (ROTATED, GAUSSIAN), source=OWN_RIVAL,
          differs=FEW, places=("Fig. 13",), over="seed", by="mean", own=True,
          rival="K's eigenvectors drawn anew"),
    Claim("rise of UC from epoch 1 to the end, mean over layers, smallest over data sets",
          lambda r: over_sets(r, lambda a: mean_of("nfc", -1)(a) - mean_of("nfc", 1)(a)), ABOVE, SHUFFLED, paper="above 0",
          source=TEXT, places=("Fig. 13",), over="seed", by="mean", says="The uncentred correlation rises in training."),
    Claim("growth of C - UC from epoch 1 to the end, mean over layers, median over data sets",
          lambda r: over_sets(r, lambda a: mean_of("cnfc", -1, "nfc")(a) - mean_of("cnfc", 1, "nfc")(a), median),
          Interval(high=0.0), SHUFFLED, paper="below 0 in most settings: UC converges to C", source=TEXT,
          differs={"smoke": "at learning rate 1 on 5,000 images the weights move too little"},
          places=("Fig. 13",), over="seed", by="mean",
          says="The uncentred correlation converges to the centred one at late times."),
    Claim("training loss of the last epoch over that of the best constant, largest over data sets",
          lambda r: over_sets(r, lambda a: float(a["loss"][-1]) / CONSTANT, max), Interval(high=0.5), SHUFFLED,
          source="a loss that falls, at least by half",
          differs={"paper": "CIFAR-10 after 15 of 150 epochs; MNIST, after all of its 50, has 0.004"},
          places=("Fig. 14",), over="seed", by="mean", own=True),
    Claim("smallest movement of a layer on 5,000 images: true labels less shuffled ones",
          lambda r: gain_over_shuffled(r, lambda a: float(row(a, "weight_change", -1).min())), ABOVE, SHUFFLED, source=LABELS,
          places=("Fig. 14",), over="seed", own=True),
    Claim("share of the centred terms in <NFM, AGOP> at the end, mean over layers, median over data sets",
          lambda r: over_sets(r, mean_of("c_uc_ratio", -1), median), Interval(low=0.5), SHUFFLED,
          paper="changes of the weights dominate", source=TEXT,
          differs={"smoke": "at learning rate 1 on 5,000 images the weights move by a fifth of their size",
                   "paper": "0.79 on MNIST after all 50 epochs; 0.16 on Fashion-MNIST after 10, 0.05 on CIFAR-10 after 15"},
          places=("Fig. 14",), over="seed", by="mean",
          says="The weights move significantly: changes dominate the product of NFM and AGOP at late times."),
)
EXPERIMENT = Experiment(
    name="nfa_fig2", ref=Ref("nfa", "Fig. 2"), places=("Fig. 2", "Fig. 13", "Fig. 14"),
    title="the centred correlation is above the uncentred one in every layer of an MLP on images",
    smoke=NfaFig2Settings(),
    paper=NfaFig2Settings(("mnist", "fashion_mnist", "cifar10"), rates=(10.0, 1.0, 0.2), epochs=(50, 10, 15), checkpoints=7),
    over=trainings, analysis=("labels", "centred"), work=work, data=("mnist_5k",),
    more_data=("mnist", "fashion_mnist", "cifar10"),
    figures={"nfa_fig2": draw, "nfa_fig13": draw_layers, "nfa_fig14": draw_movement},
    start={"data": ("cifar10",), "n": 256, "rates": (0.2,), "epochs": (1,)},
    reduced="4,000 of 50,000 MNIST images at learning rate 1, no other data set",
    missing={"Fig. 2": f"{MISSING}; panels C and D are nfa_fig2c and nfa_fig2d", "Fig. 13": f"panels A, C, E and F: {MISSING}",
             "Fig. 14": f"panels A, C, E and F: {MISSING}"},
    protocol={"Fig. 2": "reduced: 5,000 of 50,000 images, learning rate 1 for 10",
              "Fig. 13": "reduced: 15 of 150 epochs on CIFAR-10; Fashion-MNIST stands in for four data sets",
              "Fig. 14": "reduced: 15 of 150 epochs on CIFAR-10; Fashion-MNIST stands in for four data sets"},
    partial=dict.fromkeys(("Fig. 2", "Fig. 13", "Fig. 14"), "MNIST and CIFAR-10 of six data sets"),
    claims=CLAIMS)
