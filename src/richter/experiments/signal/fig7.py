"""Figure 7 of [signal], the Fashion-MNIST half: after training, alignment with the labels rises and falls over the layers, and
its peak lies deeper in deeper networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor, nn

from richter.core import Interval, Ref
from richter.experiments.frame import Claim, Control, Experiment, Results
from richter.experiments.rivals import shuffled
from richter.instrument.observe import Observer
from richter.instrument.probe import Probe
from richter.models import mlp
from richter.report.drawing import COLOURS, band, caption, depth_looks, label, line, panels, styled
from richter.runs import Writer
from richter.tasks import fashion_mnist

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Settings:
    """Standardised pixels, bias-free He networks, cross-entropy, SGD with momentum 0.9 and weight decay 1e-4, batches of 128;
    alignment on 100 class-balanced training images. The paper does not state the weight decay."""

    n: int = 10_000
    depths: tuple[int, ...] = (10, 30)
    widths: tuple[int, ...] = (256, 100)
    rates: tuple[float, ...] = (0.003, 0.004)
    epochs: int = 30
    measured: int = 16  # times during training
    shuffled: bool = False  # the labels
    seeds: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Task:
    settings: Settings
    depth: int
    width: int
    lr: float
    seed: int


def tasks(s: Settings) -> list[Task]:
    alone = replace(s, depths=(), widths=(), rates=(), seeds=())
    return [Task(alone, depth, width, lr, seed) for depth, width, lr in zip(s.depths, s.widths, s.rates, strict=True)
            for seed in s.seeds]


def network(t: Task) -> nn.Sequential:
    """He weights: N(0, 2/fan_in)."""
    model = mlp([784, *[t.width] * (t.depth - 1), 10], bias=False, seed=t.seed)
    draw = torch.Generator().manual_seed(t.seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=draw) * (2 / p.shape[1]) ** 0.5)
    return model


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    data = fashion_mnist(s.n, flat=True, seed=t.seed)
    draw = torch.Generator().manual_seed(t.seed)
    y = shuffled(data.y, t.seed + 1) if s.shuffled else data.y
    model = network(t)
    optimiser = torch.optim.SGD(model.parameters(), lr=t.lr, momentum=0.9, weight_decay=1e-4)
    watch = Observer(model, _probe(data.x, y), run=run, measures=["tangent_cka"], when=[], budget=None, matrices=0,
                     on_error="raise")
    batches = -(-s.n // 128)
    due = {round(v) for v in np.geomspace(1, max(1, s.epochs * batches), s.measured)}
    losses, step = [F.cross_entropy(model(data.x[:1000]), y[:1000]).item()], 0
    watch(0, loss=losses[0])
    for _ in range(s.epochs):
        for rows in torch.randperm(s.n, generator=draw).split(128):
            loss = F.cross_entropy(model(data.x[rows]), y[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            step += 1
            if step in due:
                watch(step, loss=loss.detach())
                watch.now(step)
                losses.append(loss.item())
            run.progress(step / (s.epochs * batches))
    names = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    A = np.array([[snap.value("tangent_cka", k) for k in names] for snap in watch.snapshots])
    with torch.no_grad():
        accuracy = (model(data.x_test).argmax(1) == data.y_test).double().mean().item()
    return {"steps": [snap.step for snap in watch.snapshots], "alignment": A, "losses": losses, "accuracy": accuracy,
            "peak": 1 + int(A[-1].argmax()), "growth": A[-1].max() / A[0].max(), "last": A[-1, -1] / A[-1].max()}


def _probe(x: Tensor, y: Tensor) -> Probe:
    """The first ten of each class."""
    rows = torch.cat([(y == c).nonzero()[:10, 0] for c in range(10)])
    return Probe(x[rows], y[rows], kernel=100)


@styled
def draw(results: Results) -> Figure:
    """Loss and alignment of every layer by step, and the alignments before and after training; a row for each depth."""
    depths = results.distinct("depth")
    figure, axes = panels(3 * len(depths), across=3)
    for row, depth in enumerate(depths):
        chosen = results.where(depth=depth)
        steps, A = chosen["steps"][0], chosen["alignment"]
        left, middle, right = axes[3 * row:3 * row + 3]
        band(left, steps, chosen["losses"], COLOURS[0])
        label(left, "step", "training loss", f"{depth} layers", steps=True)
        for layer, look in enumerate(depth_looks([str(k) for k in range(depth)]).values()):
            if layer < depth:
                line(middle, steps, np.median(A[:, :, layer], 0), look.colour)
        label(middle, "step", "alignment (tangent_cka)", "every layer, dark to light along depth", steps=True)
        band(right, np.arange(1, depth + 1), A[:, 0], COLOURS[1], "before training", "--")
        band(right, np.arange(1, depth + 1), A[:, -1], COLOURS[0], "at the end")
        label(right, "layer", "alignment (tangent_cka)", "by layer", legend=True)
    caption(figure, "Alignment with the labels grows with training, most in some layers inside the network, and least in the "
                    "last; in the "
                    f"deeper network the peak lies deeper. Median and range of {len(results.distinct('seed'))} seeds.")
    return figure


def shallow(r: Results) -> Results:
    return r.where(depth=min(t.depth for t in r.tasks))


def deep(r: Results) -> Results:
    return r.where(depth=max(t.depth for t in r.tasks))


def learned_peak(r: Results) -> float:
    """The layer of the largest alignment, counted from 1; 0 where training has not raised it, because one is always largest."""
    return float(np.median(np.where(r["growth"] >= GROWN, r["peak"], 0)))


def prominence(r: Results) -> float:
    """How far the best layer's alignment stands out over the last layer's: at the end over before training."""
    A = r["alignment"]
    return float(np.median((A[:, -1].max(1) - A[:, -1, -1]) / (A[:, 0].max(1) - A[:, 0, -1])))


GROWN = 2.5  # by which alignment grows at least where something is learned
UNTRAINED = Control("an untrained network", {"epochs": 0})
SHUFFLED = Control("trained on shuffled labels", {"shuffled": True})
SHALLOW = Control("networks of one and two layers", {"depths": (1, 2)})
BAR = "independent check of the recipe, depths 10 to 30, 3 seeds"
EXPERIMENT = Experiment(
    name="signal_fig7", ref=Ref("signal", "Fig. 7"), title="alignment with the labels peaks inside the network",
    smoke=Settings(n=5_000, epochs=6, widths=(100, 100)),
    paper=Settings(n=60_000, seeds=(0, 1, 2, 3, 4)),
    tasks=tasks, work=work, data=("fashion_mnist",), figures={"signal_fig7": draw}, start={"n": 256, "epochs": 1, "measured": 1},
    reduced="5,000 of 60,000 images, 6 epochs, width 100, one seed",
    missing={"Fig. 7": "panel a: KMNIST, which cannot be had here; panel b is on Fashion-MNIST as in the paper"},
    claims=(
        Claim("growth of the best layer's alignment, the smaller of both depths", lambda r: min(
            shallow(r)["growth"].min(), deep(r)["growth"].min()), Interval(low=GROWN), (UNTRAINED, SHUFFLED), source=BAR,
            over="seed", was=">= 2.5 in the shallow network alone, for one seed: 7.02"),
        Claim("growth of what the best layer's alignment is above the last's, the smaller of both depths",
              lambda r: min(prominence(shallow(r)), prominence(deep(r))), Interval(low=GROWN), (UNTRAINED, SHUFFLED),
              source=f"{BAR}: 2.5 for the alignment itself", over="seed"),
        Claim("the last layer's alignment over the best layer's, the larger of both depths (untrained, and with shuffled labels "
              "too)", lambda r: max(shallow(r)["last"].max(), deep(r)["last"].max()), Interval(high=0.5), SHALLOW,
              source=f"{BAR}. About the architecture; what is learned is in the claim before", over="seed"),
        Claim("layer of the peak in the deep network, where alignment has grown", lambda r: learned_peak(deep(r)),
              Interval(3, 20), (UNTRAINED, SHUFFLED), source=BAR, over="seed",
              was="in [3, 20] wherever alignment was largest, for one seed: 10"),
        Claim("how much deeper the peak lies than in the shallow network, where alignment has grown",
              lambda r: learned_peak(deep(r)) - learned_peak(shallow(r)), Interval(low=1), (UNTRAINED, SHUFFLED),
              source=BAR, over="seed", was=">= 1 wherever alignment was largest, for one seed: 8; shuffled labels passed it too"),
    ))
