"""Order in which features are learned. ``features_order(x, y)`` combines the staircase that alternating flows predict for a
two-layer network on your data, the input weights of each neuron that becomes active, and the same network trained, in one table
and one figure.

    seen = richter.workflows.features_order(x, y, names=("age", "weight", "height"))
    print(seen)                                # when each feature is learned, the fall of the loss, its input weights
    seen.plot().savefig("order.png")           # the prediction and the trained network
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

POINTS = 1_000  # points of the trained network's loss curve
SHOWN = 3  # largest input weights of a feature that are listed
FEWEST, MOST = 20, 1_000_000  # training steps: fewer do not follow the flow, and more take longer than a minute or two
ALPHA, ALPHAS = 1e-6, {"square": 1e-2}  # initial norms; activations whose neurons have degree 3


@dataclass(frozen=True)
class FeaturesOrder:
    """The prediction, and the loss of the network that was trained from the same weights."""

    learned: alternating.Learned
    t: Float[np.ndarray, " t"]
    loss: Float[np.ndarray, " t"]
    features: Float[np.ndarray, "k d"]  # unit input weights of the neuron that becomes active at each jump
    names: tuple[str, ...]
    note: str = ""  # how targets were made of class ids

    @property
    def seen(self) -> Float[np.ndarray, " k"]:
        """Times at which the trained network's loss is half way between predicted levels; NaN if it never is."""
        levels = np.asarray(self.learned.staircase.levels)
        below = self.loss[None] <= ((levels[:-1] + levels[1:]) / 2)[:, None]
        return np.where(below.any(1), self.t[below.argmax(1)], np.nan)

    def __str__(self) -> str:
        stairs = self.learned.staircase
        rows = [[str(k + 1), f"{float(stairs.times[k]):.4g}", "never" if math.isnan(crossing) else f"{crossing:.4g}",
                 f"{float(stairs.levels[k]):.3g} to {float(stairs.levels[k + 1]):.3g}", self._made_of(k)]
                for k, crossing in enumerate(self.seen)]
        lines = table([["feature", "predicted", "trained", "loss", "made of"], *rows], right=(1, 2))
        return f"{lines}\n{self.note}" if self.note else lines

    def _made_of(self, k: int, shown: int = SHOWN) -> str:
        """Largest coefficients of a feature, with the names of the inputs."""
        order = np.argsort(-np.abs(self.features[k]))[:shown]
        return ", ".join(f"{self.features[k][i]:+.2f} {self.names[i]}" for i in order)

    def plot(self) -> Figure:
        """Draw the loss of the trained network and the staircase."""
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
            caption(figure, "Each fall of the loss is a neuron that becomes active, as predicted from initial weights and data.")
            return figure

        return draw()


def features_order(x: ArrayLike, y: ArrayLike, *, activation: alternating.Activation = "relu", neurons: int = 8,
                   alpha: float | None = None, jumps: int = 3, lr: float = 0.01, seed: int = 0, names: Sequence[str] = ()
                   ) -> FeaturesOrder:
    """Predict the first ``jumps`` jumps of a network sum_i a_i phi(w_i.x) from neurons of norm ``alpha`` on ``x`` [n, d]. Train
    it by gradient descent at the rate ``lr`` on mean_n |y - f|^2 / 2 until a third after the last jump.

    ``y``: targets [n] or [n, c], or class ids [n] (integers), which become centred one-hot targets. Steps are clearer if inputs
    have one scale, and if inputs and targets are centred. Default ``alpha``: 1e-6; 1e-2 for squares, whose times scale like
    1 / alpha instead of log(1 / alpha)."""
    y, note = _targets(y)
    x_, y_ = to_tensor(x, "x"), columns(y)
    if x_.dim() != 2 or y_.dim() != 2 or len(x_) != len(y_):
        raise SelectionError(f"x has shape {tuple(x_.shape)} and y {tuple(y_.shape)}: give [n, d] and [n] or [n, c].")
    d, labels = x_.shape[1], _labels(names, x_.shape[1])
    whole(neurons=neurons, jumps=jumps)
    whole(0, seed=seed)
    alpha = ALPHAS.get(activation, ALPHA) if alpha is None else alpha
    above_zero(alpha=alpha, lr=lr)
    if not alpha < 1:
        raise SelectionError(f"alpha={alpha!r}: give the initial norm of neurons, above 0 and well below 1.")
    theta = normal(neurons, d + y_.shape[1], seed=seed)
    theta = alpha * theta / theta.norm(dim=1, keepdim=True)
    neuron, arrays = alternating.layers(activation, theta, x_, y_)
    learned = alternating.alternating_flows(neuron, *arrays, jumps=jumps)
    t = _sampled(float(learned.staircase.times[-1]), lr)
    loss = alternating.simulate(activation, theta, x_, y_, t, lr=lr)
    woken = [torch.as_tensor(p)[i, :d] for p, i in zip(learned.parameters, learned.order, strict=True)]
    features = torch.stack([w / w.norm() for w in woken])
    return FeaturesOrder(learned, t.numpy(), np.asarray(loss), features.numpy(), labels, note)


def _targets(y: ArrayLike) -> tuple[ArrayLike, str]:
    """Make centred one-hot targets of class ids, and a note that says so; other targets are unchanged."""
    whole_numbers = not y.is_floating_point() if isinstance(y, torch.Tensor) else np.asarray(y).dtype.kind in "biu"
    if not whole_numbers or (ids := to_tensor(y, "y").long()).dim() != 1 or not len(ids):
        return y, ""
    classes = int(ids.max()) + 1
    if ids.min() < 0 or not 2 <= classes <= max(2, len(ids) // 2):
        raise SelectionError(f"y holds integers from {int(ids.min())} to {classes - 1}, which are no class ids of {len(ids)} "
                             f"examples: these run from 0, and a class has several examples. For targets that are "
                             f"numbers give floats.")
    hot = torch.nn.functional.one_hot(ids, classes).double()
    return hot - hot.mean(0), f"y holds class ids: the targets are one-hot vectors of {classes} classes, centred."


def _sampled(last: float, lr: float) -> Float[torch.Tensor, " t"]:
    """Return times of gradient descent until a third after the last jump; raise an error if these are too few or too many
    steps."""
    steps = math.ceil(4 / 3 * last / lr)
    if steps < FEWEST:
        raise SelectionError(f"the last jump is predicted at {last:.3g}: at lr={lr:g} training takes {steps} steps until then, "
                             f"which are too long to follow the flow. Take lr={last / 1000:.1g} or less.")
    if steps > MOST:
        raise SelectionError(f"the last jump is predicted at {last:.3g}: training at lr={lr:g} needs {steps:.2g} steps to reach "
                             f"it, and {MOST:.0e} is the limit. Take a larger lr, a larger alpha (times scale like "
                             f"log(1/alpha); for squares like 1/alpha), fewer jumps, or the prediction alone: "
                             f"theory.alternating.predict.")
    return lr * torch.linspace(0, steps, min(POINTS, steps + 1), dtype=torch.float64).round()


def _labels(names: Sequence[str], d: int) -> tuple[str, ...]:
    """Names of the inputs, x0, x1, ... by default."""
    if isinstance(names, str) or not hasattr(names, "__len__") or len(names) not in (0, d):
        count = len(names) if hasattr(names, "__len__") and not isinstance(names, str) else repr(names)
        raise SelectionError(f"{count} names for {d} inputs: give one for each, as a list, or none.")
    return tuple(map(str, names)) or tuple(f"x{i}" for i in range(d))
