"""Figure 4 of [signal], its fully connected part: batch size and learning rate change how high the alignment peaks, and where."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from richter.core import Interval, Ref
from richter.experiments.frame import Claim, Control, Experiment, Results
from richter.experiments.signal.cells import Settings, tasks, work
from richter.report.drawing import COLOURS, band, caption, label, panels, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def heights(r: Results) -> NDArray[np.float64]:
    """Of each task: the alignment of the layer where it is largest."""
    found = r["height"][:, 0 if r.settings.subject == "untrained" else 1]
    return np.roll(found, len(found) // 2) if r.settings.subject == "reordered" else found


def generalising(r: Results) -> float:
    """Spearman's correlation over the grid of the height of the peak and the test accuracy."""
    height, right = (np.argsort(np.argsort(v)).astype(float) for v in (heights(r), r["accuracy"]))
    return float(np.corrcoef(height, right)[0, 1])


def higher(field: str, largest: bool, **where: Any) -> Callable[[Results], float]:
    """The mean height of the peak at the largest (or the smallest) value of a field over that at the other end."""
    def value(r: Results) -> float:
        chosen = r.where(**where)
        ends = sorted(chosen.distinct(field))
        top, bottom = (chosen.where(**{field: v}) for v in ((ends[-1], ends[0]) if largest else (ends[0], ends[-1])))
        return float(heights(top).mean() / heights(bottom).mean())
    return value


@styled
def draw(results: Results) -> Figure:
    rates, batches = sorted(results.distinct("lr")), sorted(results.distinct("batch"))
    figure, axes = panels(len(rates) * len(batches), across=len(batches), width=2.6, height=2.1)
    for ax, (lr, batch) in zip(axes, [(lr, b) for lr in rates for b in batches], strict=True):
        chosen = results.where(lr=lr, batch=batch)
        layers = np.arange(1, chosen["alignment"].shape[-1] + 1)
        band(ax, layers, chosen["alignment"][:, 0], COLOURS[1], style="--")
        band(ax, layers, chosen["alignment"][:, 1], COLOURS[0])
        gap = np.median(chosen["test_loss"] - chosen["loss"])
        test = np.median(chosen["test_loss"])
        label(ax, "layer", "tangent_cka", f"lr {lr:g}, batch {batch}\ntest loss {test:.2f}, gap {gap:.2f}")
    top = max(ax.get_ylim()[1] for ax in axes)
    for ax in axes:
        ax.set_ylim(0, top)
    caption(figure, "Alignment by layer before (dashed) and after training: it peaks higher for larger rates, smaller batches.")
    return figure


UNTRAINED = Control("untrained networks", {"subject": "untrained"})
REORDERED = Control("the heights of other cells", {"subject": "reordered"})
EXPERIMENT = Experiment(
    name="signal_grids", ref=Ref("signal", "Fig. 4"), title="batch size and learning rate change how high the alignment peaks",
    smoke=Settings(n=500, epochs=20, probe=50, seeds=(0, 1)), paper=Settings(), tasks=tasks, work=work, data=("fashion_mnist",),
    figures={"signal_fig4": draw}, start={"n": 100, "epochs": 1, "probe": 20, "seeds": (0,)},
    reduced="500 images, 20 epochs, two seeds",
    missing={"Fig. 4": "a: 2,000 of 60,000 images; b and c, ResNet-18 and VGG-19, are run by signal_convolutions, reduced"},
    claims=(
        Claim("rank correlation over the grid of the peak's height and the test accuracy", generalising, Interval(low=0.5),
              REORDERED, paper="clearly positive", source="the text: a clear positive correlation", over="seed"),
        Claim("height of the peak at the largest learning rate over that at the smallest", higher("lr", True),
              Interval(low=1.001), UNTRAINED, paper="larger", source="the text: a larger peak", over="seed"),
        Claim("height of the peak with the smallest batches over that with the largest", higher("batch", False),
              Interval(low=1.001), UNTRAINED, paper="larger", source="the text: a larger peak", over="seed"),
    ))
