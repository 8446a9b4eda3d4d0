"""Figures 11 to 15 of [signal], and panels b and c of Figure 4: alignment by layer of VGG-19 and ResNet-18 for several
learning rates, optimisers and batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from richter.experiments.kit import Claim, Experiment, Interval, Ref, Results
from richter.experiments.signal.fig4 import UNTRAINED, SignalFig4Settings, convolutional, heights, higher, work
from richter.report.drawing import COLOURS, band, caption, label, panels, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def less_salient(r: Results) -> float:
    """The best peak of Adam's networks over the best of SGD's."""
    return float(heights(r.where(figure="Fig. 13")).max() / heights(r.where(figure="Fig. 12")).max())


@dataclass(frozen=True)
class PanelRow:
    """Networks that differ in one field, a panel for each of its values."""

    field: str
    where: Mapping[str, Any]
    title: str = ""


def drawing(words: str, *rows: PanelRow) -> Callable[[Results], Figure]:
    """Return a drawing whose panels have the same scale, so that heights can be compared."""
    @styled
    def draw(results: Results) -> Figure:
        cells = [(row, value) for row in rows for value in sorted(results.where(**row.where).distinct(row.field))]
        figure, axes = panels(len(cells), across=4, height=2.4)
        for ax, (row, value) in zip(axes, cells, strict=True):
            mine = results.where(**row.where, **{row.field: value})
            layers = np.arange(1, mine["alignment"].shape[-1] + 1)
            band(ax, layers, mine["alignment"][:, 0], COLOURS[1], "before", "--")
            band(ax, layers, mine["alignment"][:, 1], COLOURS[0], "after training")
            gap = np.median(mine["test_loss"] - mine["loss"])
            label(ax, "layer", "alignment (tangent_cka)", f"{row.title}{row.field} {value:g}: loss gap {gap:.2f}",
                  legend=ax is axes[0])
        top = max(ax.get_ylim()[1] for ax in axes)
        for ax in axes:
            ax.set_ylim(0, top)
        caption(figure, words)
        return figure
    return draw


VGG, RESNET = {"figure": "Fig. 12"}, {"figure": "Fig. 15"}
SMALL = "300 images, 10 epochs, one seed"
LESS = ("600 of 50,000 images, a sixteenth of the channels, 12 epochs in the place of as many as bring the loss to 0.1; "
        "--set n=50000 --set width=1 --set epochs=500 --set tested=10000 runs it whole, on a machine that can")
EXPERIMENT = Experiment(
    name="signal_fig12", ref=Ref("signal", "Fig. 12"), title="alignment by layer of VGG-19 and ResNet-18",
    smoke=SignalFig4Settings(n=300, width=1 / 16, epochs=10, probe=30, tested=500, seeds=(0,)),
    paper=SignalFig4Settings(n=600, width=1 / 16, epochs=12, probe=50, tested=1000), over=convolutional, analysis=("subject",),
    work=work, data=("cifar10",),
    reduced=SMALL,
    start={"n": 60, "epochs": 1, "width": 1 / 16, "probe": 20, "tested": 100, "seeds": (0,)},
    places=("Fig. 4", "Fig. 11", "Fig. 12", "Fig. 13", "Fig. 14", "Fig. 15"),
    figures={"signal_fig12": drawing("VGG-19 by SGD: the larger the learning rate, the higher the peak.", PanelRow("lr", VGG)),
             "signal_fig13": drawing("VGG-19 by Adam: alignment is less salient.", PanelRow("lr", {"figure": "Fig. 13"})),
             "signal_fig14": drawing("VGG-19 by SGD at the rate 0.0032: the smaller the batches, the higher the peak.",
                                     PanelRow("batch", {"network": "vgg19", "optimiser": "sgd", "lr": 0.0032})),
             "signal_fig15": drawing("ResNet-18 by SGD: alignment by layer.", PanelRow("lr", RESNET)),
             "signal_fig4_bc": drawing("ResNet-18 and VGG-19 on CIFAR-10: higher peaks at larger learning rates.",
                                       PanelRow("lr", RESNET, "b: "), PanelRow("lr", VGG, "c: "))},
    missing={**dict.fromkeys(("Fig. 4", "Fig. 12", "Fig. 13", "Fig. 14", "Fig. 15"), LESS),
             "Fig. 11": "CIFAR-100, which cannot be had here; --set cifar100=FOLDER runs it, with train.bin and test.bin there"},
    protocol="reduced: 600 of 50,000 images, a sixteenth of the channels, 12 epochs",
    claims=(
        Claim("VGG-19: height of the peak at the largest learning rate over that at the smallest",
              higher("lr", True, figure="Fig. 12"), Interval(low=1.001), UNTRAINED, paper="larger", source="the figure",
              over="seed", says="On VGG-19 a larger learning rate gives a higher peak of the alignment."),
        Claim("VGG-19: the best peak by Adam over the best by SGD", less_salient, Interval(high=0.999), UNTRAINED,
              paper="less salient", source="the text", over="seed", places=("Fig. 13",),
              says="On VGG-19 Adam has less salient alignment than SGD."),
        Claim("VGG-19: height of the peak with the smallest batches over that with the largest",
              higher("batch", False, figure="Fig. 14"), Interval(low=1.001), UNTRAINED, paper="larger", source="the text",
              over="seed", places=("Fig. 14",), says="On VGG-19 smaller batches give a higher peak of the alignment."),
        Claim("ResNet-18: height of the peak at the largest learning rate over that at the smallest",
              higher("lr", True, figure="Fig. 15"), Interval(low=1.001), UNTRAINED, paper="larger", source="the text",
              over="seed", places=("Fig. 15", "Fig. 4"),
              says="On ResNet-18 a larger learning rate gives a higher peak of the alignment."),
    ))
