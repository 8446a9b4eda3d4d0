"""Figures 2C and 15A of [nfa]: both correlations in the convolutions of VGG-11, patch by patch, its loss and how far its weights
move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.experiments.rivals import Rivals, milestones, shuffled
from richter.experiments.training import LayerCurves, accuracy, epochs, error, one_hot
from richter.instrument.probe import Probe
from richter.models import vgg11
from richter.report.drawing import COLOURS, band, caption, label, panels, points, styled
from richter.tasks import cifar10

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class NfaFig2cSettings:
    """VGG-11 without batch norm, SGD on the mean squared error of centred one-hot labels. ``centred`` chooses the result that
    claims read as C; its rivals are in the same runs."""

    n: int = 50_000
    width: float = 1.0
    lr: float = 1.0
    epochs: int = 50
    batch: int = 128
    probe: int = 64
    checkpoints: int = 4
    labels: Literal["true", "shuffled"] = "true"
    centred: Literal["cnfc", "rotated", "gaussian"] = "cnfc"
    seeds: tuple[int, ...] = (0,)


def he(model: nn.Module, seed: int) -> nn.Module:
    """torchvision's initial weights for VGG: N(0, 2/fan_out) in convolutions, N(0, 0.01) in the read-out, no bias at first."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, (nn.Conv2d, nn.Linear)):
                fan = m.weight[0, 0].numel() * m.weight.shape[0] if isinstance(m, nn.Conv2d) else 2e4
                m.weight.copy_(torch.randn(m.weight.shape, generator=draw) * (2 / fan) ** 0.5)
                assert m.bias is not None
                m.bias.zero_()
    return model


def work(t: Task[NfaFig2cSettings], run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    data = cifar10(s.n, 2_000, seed=t.seed)
    y = one_hot(shuffled(data.y, t.seed) if s.labels == "shuffled" else data.y)
    model = he(vgg11(width=s.width, seed=t.seed), t.seed)
    convolutions = [name for name, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    seen, due = data.x[:s.probe], {1} | milestones(s.epochs, s.checkpoints)
    curves = LayerCurves(model, Probe(seen, y[:s.probe]), ("nfc", "cnfc", "weight_change"), convolutions, run)
    rivals, untrained = Rivals(model, seen, convolutions, t.seed), error(model, data.x[:1_000], y[:1_000])

    def measured(epoch: int) -> None:
        if epoch in due:
            curves.at(epoch)
        if epoch in (1, s.epochs):
            rivals.at(epoch)

    descent = torch.optim.SGD(model.parameters(), lr=s.lr)
    epochs(model, data.x, y, descent, s.epochs, run, batch=s.batch, seed=t.seed, after=measured)
    losses = run.run.scalars("loss").value if s.epochs else np.array([])
    return {**curves.arrays(), **rivals.arrays(), "loss": np.concatenate([[untrained], losses]), "constant": y.square().mean(),
            "accuracy": accuracy(model, data.x_test, data.y_test)}


FIRST, LAST = 0, -1  # of the two epochs at which there are rivals; "steps" begins with the untrained network


def centred(r: Results, when: int) -> NDArray[np.float64]:
    """C of each convolution, or a rival's, after the first or the last epoch."""
    if r.settings.centred == "cnfc":
        return np.asarray(r["cnfc"][0][1 if when == FIRST else LAST])
    return np.asarray(r[r.settings.centred][0][when])


def gap(r: Results, when: int) -> float:
    """C less the larger of UC and of what C is for a Gaussian movement, mean over convolutions."""
    uncentred = r["nfc"][0][1 if when == FIRST else LAST]
    return float((centred(r, when) - np.maximum(uncentred, r["gaussian"][0][when])).mean())


@styled
def draw(results: Results) -> Figure:
    """Figure of UC and C by epoch and by convolution."""
    figure, (left, right) = panels(2, across=2)
    layers = np.arange(1, results["nfc"].shape[2] + 1)
    for k, (name, title) in enumerate((("nfc", "UC"), ("cnfc", "C"))):
        band(left, results["steps"][0], results[name].mean(2), COLOURS[k], title)
        points(right, layers, results[name][:, -1], COLOURS[k], title)
    points(right, layers, results["rotated"][:, -1], COLOURS[2], "C, other K of the same spectrum", marker="x")
    label(left, "epoch", "correlation, mean over convolutions", "during training", steps=True, legend=True)
    label(right, "convolution", "correlation at the end", "by depth", legend=True)
    caption(figure, "The centred correlation C is above the uncentred one UC, most in the last convolutions; any K of the same "
                    "spectrum gives as much, because the weights have moved in few directions.")
    return figure


@styled
def draw_movement(results: Results) -> Figure:
    """Panel A of Figure 15: the loss, and how far each convolution moved."""
    figure, (left, right) = panels(2, across=2)
    band(left, np.arange(results["loss"].shape[1]), results["loss"], COLOURS[6], "training loss")
    left.axhline(float(results["constant"][0]), color=COLOURS[1], linestyle="--", linewidth=1, label="the best constant")
    label(left, "epoch", "mean squared error", "A: loss of VGG-11", steps=True, legend=True)
    for layer in range(results["weight_change"].shape[2]):
        band(right, results["steps"][0], results["weight_change"][:, :, layer], COLOURS[layer % 7], f"convolution {layer + 1}",
             "-" if layer < 7 else "--")
    label(right, "epoch", "|W - W0| / |W|", "A: movement of VGG-11", steps=True, legend=True)
    caption(figure, "The loss falls below that of the best constant while every convolution moves, the first most.")
    return figure


SHUFFLED = Control("shuffled labels, one seed", {"labels": "shuffled", "seeds": (0,)})
GAUSSIAN = Control("a Gaussian movement in the place of W - W0", {"centred": "gaussian"})
ROTATED = Control("K's eigenvectors drawn anew", {"centred": "rotated"})
ABOVE = Interval(low=1e-9)  # a rival that is compared with itself gives 0
TEXT = "the paper's text, Sec. 3"
FEW = "the weights have moved in few directions, and any K of this spectrum gives such a movement a correlation near one"
LACKS = ("at the paper's width 5,000 images in place of 50,000, 6 epochs in place of 50 and one seed in place of three; one "
         "linear layer in place of torchvision's three at the end")
EXPERIMENT = Experiment(
    name="nfa_fig2c", ref=Ref("nfa", "Fig. 2C"), places=("Fig. 2C", "Fig. 15"),
    title="the centred correlation is above the uncentred one in the convolutions of VGG-11",
    smoke=NfaFig2cSettings(n=2_000, width=0.25, epochs=8, batch=64, checkpoints=2, seeds=(0, 1)),
    paper=NfaFig2cSettings(n=5_000, epochs=6),
    over=("seed",), analysis=("centred",), work=work, data=("cifar10",),
    figures={"nfa_fig2c": draw, "nfa_fig15_a": draw_movement}, start={"n": 128, "epochs": 1, "probe": 16},
    reduced="a quarter of the width, 2,000 of 50,000 images, 8 of 50 epochs, two seeds",
    missing={"Fig. 2C": LACKS, "Fig. 15": f"panel A: {LACKS}"},
    protocol="reduced: one of three seeds, 5,000 of 50,000 images, 6 of 50 epochs",
    claims=(
        Claim("C after epoch 1 less the larger of UC and a Gaussian movement's C, mean over convolutions (shuffled labels too)",
              lambda r: gap(r, FIRST), ABOVE, GAUSSIAN, paper="above 0", source=TEXT, places=("Fig. 2C",), over="seed",
              by="mean",
              says="In the convolutions of VGG-11 the centred correlation is above the uncentred one early in training."),
        Claim("C at the end less the larger of UC and a Gaussian movement's C, mean over convolutions (shuffled labels too)",
              lambda r: gap(r, LAST), ABOVE, GAUSSIAN, paper="above 0", source=TEXT, places=("Fig. 2C",), over="seed",
              by="mean", says="In the convolutions of VGG-11 the centred correlation is above the uncentred one at the end."),
        Claim("C at the end less C with K's eigenvectors drawn anew, mean over convolutions",
              lambda r: (centred(r, LAST) - r["rotated"][0][LAST]).mean(), ABOVE, (ROTATED, GAUSSIAN),
              source="the paper's own rival in Fig. 1", differs=FEW, places=("Fig. 2C",), over="seed", by="mean", own=True,
              rival="K's eigenvectors drawn anew"),
        Claim("training loss of the last epoch over that of the best constant",
              lambda r: float(r["loss"][0, -1] / r["constant"][0]), Interval(high=0.95), SHUFFLED,
              source="a loss that falls below its rival's by a twentieth at least", places=("Fig. 15",), over="seed", by="mean",
              says="The loss of VGG-11 on CIFAR-10 falls."),
        Claim("smallest movement of a convolution's weights", lambda r: float(r["weight_change"][0, -1].min()),
              Interval(low=1e-2), SHUFFLED, source="a network that trains moves every layer", places=("Fig. 15",), over="seed",
              by="mean", says="The weights of VGG-11 move significantly from their initial values."),
    ))
