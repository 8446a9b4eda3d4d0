"""Figure 7 of [nfa]: with K replaced by its expectation, Eq. 6 follows the early centred correlation of two hidden layers over
the decay of the data's spectrum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from richter.core import Interval, Ref
from richter.experiments.frame import Claim, Control, Experiment, Results
from richter.experiments.nfa.fig3 import Quadratic, early
from richter.models import mlp
from richter.runs import Writer
from richter.tasks.synthetic import chain
from richter.theory import early_time

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Settings:
    """Gaussian inputs with eigenvalues 1/(1 + k^decay) in a random basis."""

    n: int = 128
    d: int = 128
    width: int = 128
    rank: int = 5
    decays: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0)
    activations: tuple[str, ...] = ("quadratic", "relu")
    targets: tuple[str, ...] = ("low", "high")
    networks: int = 3
    backwards: bool = False  # predict for the decays in reverse order
    seeds: tuple[int, ...] = (0, 1, 2, 3)


@dataclass(frozen=True)
class Task:
    settings: Settings
    activation: str
    target: str
    decay: float
    assumed: float  # the decay that is predicted for
    seed: int


def tasks(s: Settings) -> list[Task]:
    alone = replace(s, decays=(), activations=(), targets=(), seeds=())
    assumed = s.decays[::-1] if s.backwards else s.decays
    return [Task(alone, a, target, *decays, seed) for a in s.activations for target in s.targets
            for decays in zip(s.decays, assumed, strict=True) for seed in s.seeds]


def inputs(s: Settings, decay: float, seed: int) -> Tensor:
    draw = np.random.default_rng((seed, 3))
    basis = np.linalg.qr(draw.standard_normal((s.d, s.d)))[0]
    return torch.from_numpy(draw.standard_normal((s.n, s.d)) / np.sqrt(1 + np.arange(1, s.d + 1) ** decay) @ basis.T)


def labels(s: Settings, target: str, x: Tensor, seed: int) -> Tensor:
    """The chain monomial, or |Q x|^2 with a Gaussian Q; of deviation 1."""
    Q = torch.from_numpy(np.random.default_rng((seed, 5)).standard_normal((s.d, s.d)))
    y = chain(x, s.rank) if target == "low" else (x @ Q.T).square().sum(1)
    return (y / y.std())[:, None]


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    x = inputs(s, t.decay, t.seed)
    y = labels(s, t.target, x, t.seed)
    observed = []
    for seed in range(s.networks):
        if t.activation == "quadratic":
            model: nn.Module = Quadratic(s.d, s.width, seed, hidden=2)
            name = "layers.0"
        else:
            model, name = mlp([s.d, s.width, s.width, 1], bias=False, seed=seed).double(), "0"
        observed.append(early(model, x, y, name))
    z = inputs(s, t.assumed, t.seed)
    return {"observed": np.mean(observed),
            "predicted": early_time.predicted_correlation(z, labels(s, t.target, z, t.seed), t.activation)}


def curve(r: Results, name: str, activation: str, target: str) -> np.ndarray:
    """By decay, averaged over seeds."""
    return np.array([r.where(activation=activation, target=target, decay=decay)[name].mean()
                     for decay in dict.fromkeys(t.decay for t in r.tasks)])


def distance(r: Results) -> float:
    """Mean |predicted - observed| in units of what the width allows: 0.05 at 128, 0.02 at 1024."""
    return float(np.abs(r["predicted"] - r["observed"]).mean() / (0.05 if r.settings.width < 512 else 0.02))


def dip(r: Results, activation: str) -> float:
    """How far the smallest value inside lies below both ends, for the low-rank target."""
    values = curve(r, "observed", activation, "low")
    return float(min(values[0], values[-1]) - values[1:-1].min())


def draw(results: Results) -> Figure:
    from matplotlib.figure import Figure

    from richter.report.figures import COLOURS
    figure = Figure(figsize=(7, 3), layout="constrained")
    decays = list(dict.fromkeys(t.decay for t in results.tasks))
    for ax, activation in zip(figure.subplots(1, 2, sharey=True), ("quadratic", "relu"), strict=True):
        for k, target in enumerate(("low", "high")):
            for name, style in (("predicted", "-"), ("observed", "o")):
                ax.plot(decays, curve(results, name, activation, target), style, color=COLOURS[k], label=f"{target} rank, {name}")
        ax.set(title=activation, xlabel="decay of the spectrum", ylim=(0.6, 1.02))
        ax.legend(frameon=False, fontsize=8)
    return figure


BAR = "independent check at widths 128 and 1024"
SIDE = Control("decays of one side only", {"decays": (2.0, 3.0, 5.0)})
EXPERIMENT = Experiment(
    name="nfa_fig7", ref=Ref("nfa", "Fig. 7"), title="the expected kernel predicts the early correlation of two hidden layers",
    smoke=Settings(), paper=Settings(width=1024), tasks=tasks, work=work, figures={"nfa_fig7": draw},
    start={"decays": (1.0,), "networks": 1}, reduced="width 128 instead of 1024",
    claims=(
        Claim("mean |predicted - observed|, in units of 0.05 at width 128 and 0.02 at 1024", distance, Interval(high=1.0),
              Control("the decays in reverse order", {"backwards": True}), source=BAR),
        Claim("depth of the dip inside, low-rank target, ReLU", lambda r: dip(r, "relu"), Interval(low=0.0), SIDE, source=BAR),
        Claim("depth of the dip inside, low-rank target, quadratic", lambda r: dip(r, "quadratic"), Interval(low=0.0), SIDE,
              source=BAR, differs="shallow: whether it is there depends on the draw of the data"),
    ))
