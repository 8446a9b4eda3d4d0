"""Figure 7 of [signal], the Fashion-MNIST half: after training, alignment with the labels rises and falls over the layers, and
its peak lies deeper in deeper networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.experiments.signal.common import balanced, he, images
from richter.experiments.training import accuracy, linears
from richter.instrument.observe import Observer
from richter.report.drawing import COLOURS, band, caption, depth_looks, label, line, panels, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class SignalFig7Settings:
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


def work(t: Task[SignalFig7Settings], run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    data = images("fashion_mnist", s.n, t.seed, "shuffled" if s.shuffled else "own")
    draw = torch.Generator().manual_seed(t.seed)
    model = he([784, *[t.width] * (t.depth - 1), 10], t.seed)
    optimiser = torch.optim.SGD(model.parameters(), lr=t.rate, momentum=0.9, weight_decay=1e-4)
    watch = Observer(model, balanced(data.x, data.y, 100), run=run, measures=["tangent_cka"], when=[], budget=None, matrices=0,
                     on_error="raise")
    batches = -(-s.n // 128)
    due = {round(v) for v in np.geomspace(1, max(1, s.epochs * batches), s.measured)}
    losses, step = [F.cross_entropy(model(data.x[:1000]), data.y[:1000]).item()], 0
    watch(0, loss=losses[0])
    for _ in range(s.epochs):
        for rows in torch.randperm(s.n, generator=draw).split(128):
            loss = F.cross_entropy(model(data.x[rows]), data.y[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            step += 1
            if step in due:
                watch(step, loss=loss.detach())
                watch.now(step)
                losses.append(loss.item())
            run.progress(step / (s.epochs * batches))
    A = np.array([[snap.value("tangent_cka", k) for k in linears(model)] for snap in watch.snapshots])
    return {"steps": [snap.step for snap in watch.snapshots], "alignment": A, "losses": losses,
            "accuracy": accuracy(model, data.x_test, data.y_test),
            "peak": 1 + int(A[-1].argmax()), "growth": A[-1].max() / A[0].max(), "last": A[-1, -1] / A[-1].max()}


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
                    f"deeper network the peak lies deeper. Seeds: {len(results.distinct('seed'))}, their median and range.")
    return figure


def shallow(r: Results) -> Results:
    """Results of the shallower network."""
    return r.where(depth=min(t.depth for t in r.tasks))


def deep(r: Results) -> Results:
    """Results of the deeper network."""
    return r.where(depth=max(t.depth for t in r.tasks))


def learned_peak(r: Results) -> float:
    """The layer of the largest alignment, counted from 1; 0 where training has not raised it, because one is always largest."""
    return float(np.median(np.where(r["growth"] >= GROWN, r["peak"], 0)))


def prominence(r: Results) -> float:
    """Excess of the best layer's alignment over the last layer's: its value at the end over that before training."""
    A = r["alignment"]
    return float(np.median((A[:, -1].max(1) - A[:, -1, -1]) / (A[:, 0].max(1) - A[:, 0, -1])))


GROWN = 2.5  # by which alignment grows at least where something is learned
UNTRAINED = Control("an untrained network", {"epochs": 0})
SHUFFLED = Control("trained on shuffled labels", {"shuffled": True})
SHALLOW = Control("networks of one and two layers", {"depths": (1, 2)})
BAR = "independent check of the recipe, depths 10 to 30, 3 seeds"
EXPERIMENT = Experiment(
    name="signal_fig7", ref=Ref("signal", "Fig. 7"), title="alignment with the labels peaks inside the network",
    smoke=SignalFig7Settings(n=5_000, epochs=6, widths=(100, 100)),
    paper=SignalFig7Settings(seeds=(0, 1, 2, 3, 4)),
    over=(("depth", "width", "rate"), "seed"), work=work, data=("fashion_mnist",), figures={"signal_fig7": draw},
    start={"n": 256, "epochs": 1, "measured": 1},
    reduced="5,000 of 60,000 images, 6 epochs, width 100, one seed",
    missing={"Fig. 7": "panel a: KMNIST, which cannot be had here; panel b is on 10,000 of the 60,000 images of Fashion-MNIST"},
    protocol="reduced: 10,000 of 60,000 images",
    partial={"Fig. 7": "panel b; panel a has KMNIST, which cannot be had here"},
    claims=(
        Claim("growth of the best layer's alignment, the smaller of both depths", lambda r: min(
            shallow(r)["growth"].min(), deep(r)["growth"].min()), Interval(low=GROWN), (UNTRAINED, SHUFFLED), source=BAR,
            over="seed", was=">= 2.5 in the shallow network alone, for one seed: 7.02",
              says="The alignment of the best layer grows in training (Fashion-MNIST)."),
        Claim("growth of what the best layer's alignment is above the last's, the smaller of both depths",
              lambda r: min(prominence(shallow(r)), prominence(deep(r))), Interval(low=GROWN), (UNTRAINED, SHUFFLED),
              source=f"{BAR}: 2.5 for the alignment itself", over="seed", own=True),
        Claim("the last layer's alignment over the best layer's, the larger of both depths (untrained, and with shuffled labels "
              "too)", lambda r: max(shallow(r)["last"].max(), deep(r)["last"].max()), Interval(high=0.5), SHALLOW,
              source=f"{BAR}. About the architecture; what is learned is in the claim before", over="seed",
              says="The last layer aligns least."),
        Claim("layer of the peak in the deep network, where alignment has grown", lambda r: learned_peak(deep(r)),
              Interval(3, 20), (UNTRAINED, SHUFFLED), source=BAR, over="seed",
              was="in [3, 20] wherever alignment was largest, for one seed: 10", says="The alignment peaks inside the network."),
        Claim("how much deeper the peak lies than in the shallow network, where alignment has grown",
              lambda r: learned_peak(deep(r)) - learned_peak(shallow(r)), Interval(low=1), (UNTRAINED, SHUFFLED),
              source=BAR, over="seed", was=">= 1 wherever alignment was largest, for one seed: 8; shuffled labels passed it too",
              says="The peak of the alignment lies deeper in deeper networks."),
    ))
