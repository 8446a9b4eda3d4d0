"""The first escape of [escape] on real images: from small weights the layers of a deep ReLU network leave the origin with one
large singular value each. A network of six layers; the paper's has 1,000 units in each hidden one and all of MNIST."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.experiments.training import one_hot
from richter.measures.stages import find
from richter.report.drawing import COLOURS, band, caption, label, line, panels, points, styled
from richter.tasks import digits, mnist
from richter.theory import escape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class EscapeImagesSettings:
    """Class labels one-hot and centred, half a mean squared error; weights N(0, 1) times ``gain`` / sqrt(fan-in). Steps have
    2 % of the norm of all weights. ``at`` says whether singular values are read after the first drop of the loss or at the
    start. Data are sets of images, and "noise": Gaussian pixels, with the labels of digits. ``subject`` says which of them
    claims call images."""

    data: tuple[str, ...] = ("digits", "mnist", "noise")
    n: int = 600
    depth: int = 6
    width: int = 64
    gain: float = 0.01
    steps: int = 250
    seeds: tuple[int, ...] = tuple(range(10))
    at: Literal["drop", "start"] = "drop"
    subject: Literal["images", "noise"] = "images"


def images(data: str, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs [n, d] and labels [n, 10] in float64, another subset for each seed."""
    if data == "digits":
        split = digits(seed=seed, dtype=torch.float64)
    else:
        split = mnist(n, seed=seed, flat=True, dtype=torch.float64)
    return split.x[:n], one_hot(split.y[:n], dtype=torch.float64)


def initial(sizes: list[int], gain: float, seed: int) -> list[Tensor]:
    """Weights N(0, 1) times ``gain`` / sqrt(fan-in), for each layer."""
    draw = torch.Generator().manual_seed(seed)
    return [gain * torch.randn(o, i, generator=draw, dtype=torch.float64) / math.sqrt(i) for i, o in pairwise(sizes)]


def work(t: Task[EscapeImagesSettings], run: Writer) -> Mapping[str, ArrayLike]:
    """Singular values [layers, 10] at the start and behind the first drop; the loss and s_1/s_2 at every step."""
    s = t.settings
    x, y = images("digits" if t.data == "noise" else t.data, s.n, t.seed)
    if t.data == "noise":
        x = torch.randn(x.shape, generator=torch.Generator().manual_seed(t.seed), dtype=x.dtype)
    path = escape.follow(initial([x.shape[1], *[s.width] * (s.depth - 1), y.shape[1]], s.gain, t.seed), x, y, s.steps, values=10)
    run.progress(1.0)
    loss = np.asarray(path.loss)
    stages = find(np.arange(len(loss)), loss)
    behind = min(len(loss) - 1, math.ceil(stages.drops[0].end)) if len(stages) else len(loss) - 1
    values = np.stack([np.asarray(v) for v in path.values], 1)  # [steps, layers, 10]
    full = np.full(s.steps + 1, np.nan)
    full[:len(loss)] = loss
    ratio = np.full((s.steps + 1, s.depth), np.nan)
    ratio[:len(loss)] = values[:, :, 0] / values[:, :, 1]
    return {"loss": full, "ratio": ratio, "start": values[0], "drop": values[behind], "behind": behind, "drops": len(stages)}


def ratios(r: Results) -> Vector:
    """s_1 / s_2 [sets, layers] where they are read."""
    values = r[r.settings.at][[(t.data == "noise") == (r.settings.subject == "noise") for t in r.tasks]]
    return np.asarray(values[:, :, 0] / values[:, :, 1])


def over_noise(r: Results) -> float:
    """The smallest s_1 / s_2 of layers 2 and deeper on images over that on noise."""
    noise = Results(replace(r.settings, subject="noise"), r.tasks, [arrays for _, arrays in r])
    return float(ratios(r)[:, 1:].min() / ratios(noise)[:, 1:].min())


def above_bound(r: Results) -> float:
    """The smallest (s_1/s_2) / l^(1/4), over layers and sets of images."""
    both = ratios(r)
    return float((both / [escape.bound(i + 1) for i in range(both.shape[1])]).min())


def last_fall(r: Results) -> float:
    """The share of the loss that the first drop takes, the smaller over sets."""
    return float(min(1 - loss[int(at)] / loss[0] for loss, at in zip(r["loss"], r["behind"], strict=True)))


@styled
def draw(results: Results) -> Figure:
    sets = results.distinct("data")
    figure, axes = panels(2 * len(sets), across=2)
    for (left, right), data in zip(zip(axes[::2], axes[1::2], strict=True), sets, strict=True):
        chosen = results.where(data=data)
        steps = np.arange(chosen["loss"].shape[1])
        known = ~np.isnan(chosen["loss"]).any(0)
        band(left, steps[known], chosen["loss"][:, known], label="loss")
        for at in chosen["behind"]:
            left.axvline(float(at), color=COLOURS[1], linewidth=0.5, alpha=0.5)
        label(left, "step of 2 % of the norm", "loss", f"{data}; lines: behind the first drop")
        layers = np.arange(1, chosen["drop"].shape[1] + 1)
        points(right, layers, chosen["drop"][:, :, 0] / chosen["drop"][:, :, 1], label="behind the first drop")
        points(right, layers, chosen["start"][:, :, 0] / chosen["start"][:, :, 1], COLOURS[2], "at initialisation", "s")
        line(right, layers, [escape.bound(int(i)) for i in layers], label="l^(1/4)")
        line(right, [layers[0], layers[-1]], [20, 20], COLOURS[1], "20", ":")
        label(right, "layer", "s1 / s2", data, log="y", legend=True)
    caption(figure, "The loss rests, falls once, and then layers 2 and deeper have one singular value that is more than 20 "
                    "times the next; the first layer less so.")
    return figure


UNTRAINED = Control("untrained", {"at": "start"})
LARGER = Control("initial weights of 0.15 / sqrt(fan-in)", {"gain": 0.15})
LARGE = Control("initial weights of 0.55 / sqrt(fan-in)", {"gain": 0.55})
PLACE = "Experiments, first escape"
EXPERIMENT = Experiment(
    name="escape_images", ref=Ref("escape", PLACE), title="on images deep layers leave the origin with rank one",
    smoke=EscapeImagesSettings(data=("digits", "noise"), seeds=(0, 1)), paper=EscapeImagesSettings(), over=("data", "seed"),
    analysis=("at", "subject"), work=work,
    start={"seeds": (0,), "steps": 20, "data": ("digits",)}, figures={"escape_experiments_first_escape": draw}, data=(),
    more_data=("mnist",), reduced="scikit-learn's digits alone, 2 seeds of 10",
    missing={PLACE: "hidden layers of 1,000 units (64 here), all of MNIST (600 images here), mini-batches, CIFAR-10"},
    protocol="reduced: 64 of 1,000 hidden units, 600 images, full batches",
    partial={"Experiments, first escape": "MNIST of MNIST and CIFAR-10"},
    claims=(
        Claim("smallest s1/s2 of layers 2 and deeper behind the first drop, over sets of images",
              lambda r: float(ratios(r)[:, 1:].min()), Interval(low=20.0), (UNTRAINED, LARGER, LARGE),
              over="seed", paper="one dominant singular value", source="definitions: 27 to 70 on digits",
              says="After the first escape on images, deep layers have one dominant singular value."),
        Claim("smallest (s1/s2) / l^(1/4) of all layers behind the first drop, over sets of images", above_bound,
              Interval(low=1.0), (UNTRAINED, LARGE), over="seed", paper="s1/s2 at least proportional to l^(1/4)",
              source="Thm. 3.1 with its constant at 1, as the definitions have it",
              says="After the first escape on images s1/s2 of layer l is at least of the order l^(1/4)."),
        Claim("smallest s1/s2 of layers 2 and deeper over that of layer 1, behind the first drop",
              lambda r: float((ratios(r)[:, 1:] / ratios(r)[:, :1]).min()), Interval(low=1.0), (UNTRAINED, LARGE), over="seed",
              paper="low rank in deep layers", source="the theorem is of deep layers; definitions: 1.7, then 44 to 70",
              says="The bias to low rank is one of deep layers: their s1/s2 is above that of the first layer."),
        Claim("smallest s1/s2 of layers 2 and deeper behind the first drop: images over Gaussian noise with the same labels",
              over_noise, Interval(low=2.0), Control("noise in the place of both", {"subject": "noise"}), over="seed",
              source="a rival is told apart by a factor of two", own=True, rival="Gaussian noise for pixels",
              differs="0.81 for two seeds of digits: with noise for pixels the dominant singular value is as large, so that low "
                      "rank after the escape does not show that anything of images was learned; the theorem asks for none"),
    ))
