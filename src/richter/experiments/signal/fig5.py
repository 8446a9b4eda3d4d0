"""Figure 5 of [signal]: how the largest eigenvectors of H_w relate to a step, and in which layers they lie, before, during
and after the time at which alignment rises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import nn

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.experiments.signal.common import balanced, fit, he, images, profile
from richter.instrument.probe import Probe
from richter.measures.curvature import early_step, hessian
from richter.report.drawing import COLOURS, band, caption, label, panels, points, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SHOWN = (1, 7, 10)  # layers of the paper's panels


@dataclass(frozen=True)
class SignalFig5Settings:
    """Ten layers, bias-free He networks on standardised images, SGD with momentum 0.9 and weight decay 1e-4, batches of 128."""

    n: int = 2_000
    width: int = 64
    epochs: int = 15
    lr: float = 0.005  # Table 1
    vectors: int = 100  # of largest absolute eigenvalue
    examples: int = 200  # of H_w
    steps: tuple[float, ...] = (1e-6, 1e-4, 0.005)  # rates of single steps, with all examples
    read: Literal["own", "first", "random"] = "own"  # the rivals: the network before training, random directions
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


def work(t: Task[SignalFig5Settings], run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    data = images("cifar10", s.n, t.seed)
    model = he([data.x.shape[1], *[s.width] * 9, 10], t.seed)
    probe, few = balanced(data.x, data.y, s.examples), balanced(data.x, data.y, 50)
    states, heights = list[dict[str, torch.Tensor]](), list[float]()

    def after(epoch: int) -> None:
        states.append({k: v.clone() for k, v in model.state_dict().items()})
        heights.append(profile(model, few, errors=False)[0].max())

    fit(model, data, s.lr, s.epochs, run, seed=t.seed, after=after)
    rise = int(np.diff(heights).argmax()) if s.epochs else 0
    rows = [second_order(model, state, probe, s, t.seed) for state in (states[0], states[rise], states[-1])]
    return {"heights": heights, "rise": rise, **{k: np.array([row[k] for row in rows]) for k in rows[0]}}


def second_order(model: nn.Module, state: Mapping[str, torch.Tensor], probe: Probe, s: SignalFig5Settings,
                 seed: int) -> dict[str, ArrayLike]:
    """The largest eigenpairs of H_w, their energy in every layer, and how steps look in their span and in a random one."""
    model.load_state_dict(state)
    H = hessian(model, probe)
    pairs = H.top(s.vectors, seed=seed)
    energy = torch.stack(list(H.energy(pairs.vectors).values()))  # layer, vector
    draw = torch.Generator().manual_seed(seed)
    other = torch.linalg.qr(torch.randn(H.size, s.vectors, generator=draw, dtype=torch.float64))[0].T
    steps = [early_step(model, probe, lr) for lr in s.steps]
    return {"values": pairs.values.numpy(), "energy": energy.mean(1).numpy(), "each": energy[[k - 1 for k in SHOWN]].numpy(),
            "projected": [e.projected(pairs.vectors) for e in steps], "random": [e.projected(other) for e in steps],
            "flips": [e.flips / e.units for e in steps]}


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
    smoke=SignalFig5Settings(n=500, epochs=6, vectors=20, examples=50, seeds=(0, 1)), paper=SignalFig5Settings(), over=("seed",),
    analysis=("read",), work=work,
    data=("cifar10",), figures={"signal_fig5": draw},
    start={"n": 100, "epochs": 1, "vectors": 4, "examples": 20, "seeds": (0,)},
    reduced="500 images, 6 epochs, the 20 largest eigenvectors on 50 images, two seeds",
    missing={"Fig. 5": "2,000 of 50,000 images, width 64 in the place of 256, H_w of 200 images"},
    protocol="unstated: the scale of the inputs; 2,000 of 50,000 images, width 64 for 256",
    claims=(
        Claim("mean energy of eigenvectors in layer 7 over that in layers 1 and 10, while alignment rises", concentration,
              Interval(low=1.0), Control("before training", {"read": "first"}), paper="larger", source="panel b, and the text",
              differs=NOT_B, over="seed",
              says="While alignment rises, the top eigenvectors of H_w have more energy in middle layers."),
        Claim("corr(U change, -U H_w Psi y~) at the rate of training, while alignment rises", projected, Interval(low=0.9),
              Control("random directions", {"read": "random"}), paper="high", source="panel a; the text: highly correlated",
              differs=NOT_A, over="seed", says="The projected change of Psi y~ is highly correlated with -H_w Psi y~."),
        Claim("|lambda_1| while alignment rises over the larger of those before and after", growth, Interval(low=1.001),
              Control("before training", {"read": "first"}), paper="15/6", source="the caption: 2, 15 and 6", differs=NOT_L,
              over="seed",
              says="While alignment rises, the largest eigenvalue of H_w is larger (15) than before (2) and after (6)."),
    ))
