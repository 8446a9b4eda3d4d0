"""Figure 5 of [signal]: what the largest eigenvectors of H_w have to do with a step, and in which layers they lie, before,
during and after the time at which alignment rises."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from richter.core import Interval, Ref
from richter.experiments.frame import Claim, Control, Experiment, Results
from richter.experiments.signal.eigenvectors import SHOWN, Settings, tasks, work
from richter.report.drawing import COLOURS, band, caption, label, panels, points, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WHEN = ("before training", "while alignment rises most", "at the end")


def concentration(r: Results) -> float:
    """The mean energy of layer 7 over that of the layers 1 and 10, while alignment rises; of the rival, before training."""
    energy = r["energy"][0, 0 if r.settings.read == "first" else 1]
    return float(energy[6] / energy[[0, 9]].mean())


def growth(r: Results) -> float:
    """The largest |eigenvalue| while alignment rises, over the larger of those before and after; of the rival, of none."""
    top = np.abs(r["values"][0]).max(1)
    return float(top[0] / top[0] if r.settings.read == "first" else top[1] / max(top[0], top[2]))


def projected(r: Results) -> float:
    """corr(U change, -U H_w Psi y~) while alignment rises, at the rate of training."""
    return float(r["random" if r.settings.read == "random" else "projected"][0, 1, -1])


@styled
def draw(results: Results) -> Figure:
    figure, axes = panels(5, across=3)
    rates = results.tasks[0].settings.steps
    for k, words in enumerate(WHEN):
        points(axes[0], rates, results["projected"][:, k], COLOURS[k], words)
    label(axes[0], "learning rate of one step", "corr(U change, -U H_w Psi y~)", "a: in the span of the eigenvectors", log="x",
          legend=True)
    for k, words in enumerate(WHEN):
        energies = np.median(results["each"][:, k], 0)
        for j, layer in enumerate(SHOWN):
            axes[1 + k].plot(np.arange(1, energies.shape[1] + 1), energies[j], color=COLOURS[j], label=f"layer {layer}")
        top = np.median(np.abs(results["values"][:, k]).max(1))
        label(axes[1 + k], "eigenvector", "energy", f"b: {words}: {top:.2g}", legend=k == 0)
        band(axes[4], np.arange(1, 11), results["energy"][:, k], COLOURS[k], words)
    label(axes[4], "layer", "mean energy of the largest", "every layer", legend=True)
    caption(figure, "The largest eigenvectors of H_w lie in the first layer more than in any other, at every time: no "
                    "concentration on layers inside the network is seen. The titles of b have |lambda_1|.")
    return figure


NOT_B = ("the first layer, which has 3,072 inputs and most of the weights, has the most energy at every time; without it the "
         "others have about the same")
NOT_A = ("units switch: at the rate of training the first order of a step no longer says what it does (signal_fig6), in the "
         "span of the eigenvectors as elsewhere")
NOT_L = ("standardised images give outputs of size 1 to 2 at once, so that |lambda_1| is largest before training (28, then 9 and "
         "12 on 200 images; about 40, then 15 to 20 at smoke scale); how the paper scales its inputs is not said")
EXPERIMENT = Experiment(
    name="signal_fig5", ref=Ref("signal", "Fig. 5"), title="eigenvectors of H_w, a step, and the layers",
    smoke=Settings(n=500, epochs=6, vectors=20, examples=50, seeds=(0, 1)), paper=Settings(), tasks=tasks, work=work,
    data=("cifar10",), figures={"signal_fig5": draw},
    start={"n": 100, "epochs": 1, "vectors": 4, "examples": 20, "seeds": (0,)},
    reduced="500 images, 6 epochs, the 20 largest eigenvectors on 50 images, two seeds",
    missing={"Fig. 5": "2,000 of 50,000 images, width 64 in the place of 256, H_w of 200 images"},
    claims=(
        Claim("mean energy of eigenvectors in layer 7 over that in layers 1 and 10, while alignment rises", concentration,
              Interval(low=1.0), Control("before training", {"read": "first"}), paper="larger", source="panel b, and the text",
              differs=NOT_B, over="seed"),
        Claim("corr(U change, -U H_w Psi y~) at the rate of training, while alignment rises", projected, Interval(low=0.9),
              Control("random directions", {"read": "random"}), paper="high", source="panel a; the text: highly correlated",
              differs=NOT_A, over="seed"),
        Claim("|lambda_1| while alignment rises over the larger of those before and after", growth, Interval(low=1.001),
              Control("before training", {"read": "first"}), paper="15/6", source="the caption: 2, 15 and 6", differs=NOT_L,
              over="seed"),
    ))
