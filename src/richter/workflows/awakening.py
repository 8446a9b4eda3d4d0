"""In which order will features be learned? ``features_order(x, y)``: the staircase that alternating flows predict for a network
of two layers on data of your own, what each neuron that wakes looks at, and the same network trained, as one table and a picture.

    seen = richter.workflows.features_order(x, y, names=("age", "weight", "height"))
    print(seen)                                # when each feature is learned, how far the loss falls, what it is made of
    seen.plot().savefig("order.png")           # the prediction over the trained network
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float

from richter.core import SelectionError
from richter.core.arrays import ArrayLike, to_tensor
from richter.core.values import table
from richter.theory import alternating
from richter.theory.arrays import above_zero, columns, normal, whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = 1_000  # of the trained network's loss
SHOWN = 3  # inputs of a feature that are named
FEWEST, MOST = 20, 1_000_000  # steps of training: fewer follow no flow, and more take longer than a minute or two
ALPHA, ALPHAS = 1e-6, {"square": 1e-2}  # norms at the start; activations whose neurons have degree 3


@dataclass(frozen=True)
class FeaturesOrder:
    """What was predicted, and the loss of the network that was trained from the same weights."""

    learned: alternating.Learned
    t: Float[np.ndarray, " t"]
    loss: Float[np.ndarray, " t"]
    features: Float[np.ndarray, "k d"]  # input weights of the neuron that wakes at each jump, of norm 1
    names: tuple[str, ...]

    @property
    def seen(self) -> Float[np.ndarray, " k"]:
        """When the trained network's loss is half way from each predicted level to the next; NaN where it never is."""
        levels = np.asarray(self.learned.staircase.levels)
        below = self.loss[None] <= ((levels[:-1] + levels[1:]) / 2)[:, None]
        return np.where(below.any(1), self.t[below.argmax(1)], np.nan)

    def __str__(self) -> str:
        stairs = self.learned.staircase
        rows = [[str(k + 1), f"{float(stairs.times[k]):.4g}", "never" if math.isnan(seen) else f"{seen:.4g}",
                 f"{float(stairs.levels[k]):.3g} to {float(stairs.levels[k + 1]):.3g}", self._made_of(k)]
                for k, seen in enumerate(self.seen)]
        return table([["feature", "predicted", "trained", "loss", "made of"], *rows], right=(1, 2))

    def _made_of(self, k: int, shown: int = SHOWN) -> str:
        order = np.argsort(-np.abs(self.features[k]))[:shown]
        return ", ".join(f"{self.features[k][i]:+.2f} {self.names[i]}" for i in order)

    def plot(self) -> Figure:
        """The loss of the trained network, and the staircase."""
        from richter.report.drawing import COLOURS, caption, label, line, panels, styled

        @styled
        def draw() -> Figure:
            figure, (ax,) = panels(1, across=1, width=5.4, height=3.2)
            stairs = self.learned.staircase
            ends = np.concatenate([[0.0], np.asarray(stairs.times), self.t[-1:]])
            ax.plot(self.t, self.loss, color=COLOURS[0], linewidth=1.8, label="trained network")
            line(ax, np.repeat(ends, 2)[1:-1], np.repeat(np.asarray(stairs.levels), 2), label="alternating flows", style="--")
            for k in range(len(stairs.times)):
                ax.annotate(f"{k + 1}: {self._made_of(k, 2)}", (1.0, float(stairs.levels[k])), xycoords=("axes fraction", "data"),
                            xytext=(-3, 3), textcoords="offset points", ha="right", fontsize=6.5)
            label(ax, "time (steps x rate)", "loss", legend=True)
            caption(figure, "Each fall of the loss is a neuron that wakes, as predicted from the initial weights and the data.")
            return figure

        return draw()


def features_order(x: ArrayLike, y: ArrayLike, *, activation: alternating.Activation = "relu", neurons: int = 8,
                   alpha: float | None = None, jumps: int = 3, lr: float = 0.01, seed: int = 0, names: Sequence[str] = ()
                   ) -> FeaturesOrder:
    """Predict the first ``jumps`` of a network sum_i a_i phi(w_i.x) from neurons of norm ``alpha`` on ``x`` [n, d], ``y`` [n] or
    [n, c], and train it by gradient descent at the rate ``lr`` of mean_n |y - f|^2 / 2 for a third longer. Inputs of one scale,
    and inputs and targets that are centred, are learned in clearer steps. Without ``alpha`` it is 1e-6; 1e-2 for squares, whose
    times go like 1 / alpha, not like log(1 / alpha)."""
    x_, y_ = to_tensor(x, "x"), columns(y)
    if x_.dim() != 2 or y_.dim() != 2 or len(x_) != len(y_):
        raise SelectionError(f"x has shape {tuple(x_.shape)} and y {tuple(y_.shape)}: [n, d] and [n] or [n, c] are needed.")
    d, labels = x_.shape[1], _labels(names, x_.shape[1])
    whole(neurons=neurons, jumps=jumps)
    whole(0, seed=seed)
    alpha = ALPHAS.get(activation, ALPHA) if alpha is None else alpha
    above_zero(alpha=alpha, lr=lr)
    if not alpha < 1:
        raise SelectionError(f"alpha={alpha!r}: the norm of neurons at the start, above 0 and well below 1, is needed.")
    theta = normal(neurons, d + y_.shape[1], seed=seed)
    theta = alpha * theta / theta.norm(dim=1, keepdim=True)
    neuron, given = alternating.layers(activation, theta, x_, y_)
    learned = alternating.alternating_flows(neuron, *given, jumps=jumps)
    t = _sampled(float(learned.staircase.times[-1]), lr)
    loss = alternating.simulate(activation, theta, x_, y_, t, lr=lr)
    woken = [torch.as_tensor(p)[i, :d] for p, i in zip(learned.parameters, learned.order, strict=True)]
    features = torch.stack([w / w.norm() for w in woken])
    return FeaturesOrder(learned, t.numpy(), np.asarray(loss), features.numpy(), labels)


def _sampled(last: float, lr: float) -> Float[torch.Tensor, " t"]:
    """Times of descent, for a third longer than to the last jump; refused where that is too few steps or too many."""
    steps = math.ceil(4 / 3 * last / lr)
    if steps < FEWEST:
        raise SelectionError(f"the last jump is predicted at {last:.3g}: at lr={lr:g} a training comes there in {steps} steps, "
                             f"which are too long to follow the flow. Take lr={last / 1000:.1g} or less.")
    if steps > MOST:
        raise SelectionError(f"the last jump is predicted at {last:.3g}: a training at lr={lr:g} that shows it has {steps:.2g} "
                             f"steps, and {MOST:.0e} are the most here. Take a larger lr, a larger alpha (times go like "
                             f"log(1/alpha); for squares like 1/alpha), fewer jumps, or the prediction alone: "
                             f"theory.alternating.predict.")
    return lr * torch.linspace(0, steps, min(POINTS, steps + 1), dtype=torch.float64).round()


def _labels(names: Sequence[str], d: int) -> tuple[str, ...]:
    if isinstance(names, str) or not hasattr(names, "__len__") or len(names) not in (0, d):
        count = len(names) if hasattr(names, "__len__") and not isinstance(names, str) else repr(names)
        raise SelectionError(f"{count} names for {d} inputs: give one for each, as a list, or none.")
    return tuple(map(str, names)) or tuple(f"x{i}" for i in range(d))
