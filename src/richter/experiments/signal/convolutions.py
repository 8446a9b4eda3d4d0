"""Figures 11 to 15 of [signal], and panels b and c of Figure 4: alignment by layer of VGG-19 and ResNet-18 for several
learning rates, optimisers and batch sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from richter.core import Interval, Ref
from richter.experiments.frame import Claim, Experiment, Results
from richter.experiments.signal.cells import Settings, convolutional, work
from richter.experiments.signal.grids import UNTRAINED, heights, higher
from richter.report.drawing import COLOURS, band, caption, label, panels, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def less_salient(r: Results) -> float:
    """The best peak of Adam's networks over the best of SGD's."""
    return float(heights(r.where(figure="Fig. 13")).max() / heights(r.where(figure="Fig. 12")).max())


def drawing(place: str, words: str, field: str) -> Callable[[Results], Figure]:
    @styled
    def draw(results: Results) -> Figure:
        chosen = results.where(figure=place)
        figure, axes = panels(len(chosen.distinct(field)), across=4, height=2.4)
        for ax, value in zip(axes, chosen.distinct(field), strict=True):
            mine = chosen.where(**{field: value})
            layers = np.arange(1, mine["alignment"].shape[-1] + 1)
            band(ax, layers, mine["alignment"][:, 0], COLOURS[1], "before", "--")
            band(ax, layers, mine["alignment"][:, 1], COLOURS[0], "after training")
            gap = np.median(mine["test_loss"] - mine["loss"])
            label(ax, "layer", "alignment (tangent_cka)", f"{field} {value:g}: loss gap {gap:.2f}", legend=ax is axes[0])
        caption(figure, words)
        return figure
    return draw


SMALL = "300 of 50,000 images, a sixteenth of the channels, 10 epochs, one seed"
EXPERIMENT = Experiment(
    name="signal_convolutions", ref=Ref("signal", "Fig. 12"), title="alignment by layer of VGG-19 and ResNet-18",
    smoke=Settings(n=300, width=1 / 16, epochs=10, probe=30, tested=500, seeds=(0,)),
    paper=Settings(n=50_000, width=1.0, epochs=500, probe=100), tasks=convolutional, work=work, data=("cifar10",), reduced=SMALL,
    start={"n": 60, "epochs": 1, "width": 1 / 16, "probe": 20, "tested": 100, "seeds": (0,)},
    places=("Fig. 4", "Fig. 11", "Fig. 12", "Fig. 13", "Fig. 14", "Fig. 15"),
    figures={"signal_fig12": drawing("Fig. 12", "VGG-19 by SGD: the larger the learning rate, the higher the peak.", "lr"),
             "signal_fig13": drawing("Fig. 13", "VGG-19 by Adam: alignment is less salient.", "lr"),
             "signal_fig14": drawing("Fig. 14", "VGG-19 by SGD: the smaller the batches, the higher the peak.", "batch"),
             "signal_fig15": drawing("Fig. 15", "ResNet-18 by SGD: alignment by layer.", "lr"),
             "signal_fig4_bc": drawing("Fig. 15", "ResNet-18 on CIFAR-10 for several learning rates.", "lr")},
    missing={**dict.fromkeys(("Fig. 4", "Fig. 12", "Fig. 13", "Fig. 14", "Fig. 15"), f"run here at reduced sizes: {SMALL}"),
             "Fig. 11": "CIFAR-100, which cannot be had here; --set cifar100=FOLDER runs it, with train.bin and test.bin there"},
    claims=(
        Claim("VGG-19: height of the peak at the largest learning rate over that at the smallest",
              higher("lr", True, figure="Fig. 12"), Interval(low=1.001), UNTRAINED, paper="larger", source="the figure",
              over="seed"),
        Claim("VGG-19: the best peak by Adam over the best by SGD", less_salient, Interval(high=0.999), UNTRAINED,
              paper="less salient", source="the text", over="seed", places=("Fig. 13",)),
        Claim("VGG-19: height of the peak with the smallest batches over that with the largest",
              higher("batch", False, figure="Fig. 14"), Interval(low=1.001), UNTRAINED, paper="larger", source="the text",
              over="seed", places=("Fig. 14",)),
        Claim("ResNet-18: height of the peak at the largest learning rate over that at the smallest",
              higher("lr", True, figure="Fig. 15"), Interval(low=1.001), UNTRAINED, paper="larger", source="the text",
              over="seed", places=("Fig. 15", "Fig. 4")),
    ))
