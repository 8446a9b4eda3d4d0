"""Signal propagation of a network, compared with the recursion of infinite width: ``propagation(model, x)``.  [signal, Sec. 3]

    seen = richter.workflows.propagation(model, x)
    print(seen)                      # distance of the network from infinite width
    seen.draw().savefig("propagation.png")
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from richter.core import SelectionError
from richter.core.modules import ChainStage, chain, composed, unwrap
from richter.core.values import progress
from richter.instrument.capture import quiet
from richter.report.drawing import COLOURS, band, caption, label, line, panels, styled
from richter.theory import signal
from richter.theory.arrays import whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cosines = NDArray[np.float64]
QUIET = (nn.Flatten, nn.Identity, nn.Dropout)  # modules that do not change correlations in eval mode


@dataclass(frozen=True)
class Propagation:
    """Cosines of layer inputs (``forward``) and of backward signals (``backward``), for pairs of examples: [layers, pairs], with
    the predictions of the recursion from the cosines of the inputs.

    ``distance``: root mean square of measured minus predicted, over pairs and the layers where theory is not an identity.
    ``chance``: the same for random networks of the same widths, one number each. Pairs without a cosine are left out."""

    layers: tuple[str, ...]
    forward: Cosines
    backward: Cosines
    forward_predicted: Cosines
    backward_predicted: Cosines
    distance: float
    chance: tuple[float, ...]
    slope: float  # slope of the activations below 0
    notes: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        """Distance of the network from infinite width relative to random networks of its widths: about 1 before training."""
        return self.distance / float(np.mean(self.chance))

    @property
    def balanced(self) -> float:
        """Layer where the recursion balances forward and backward information for the inputs' median cosine; NaN if there is
        none."""
        c = float(np.median(self.forward[0]))
        try:
            return signal.balanced_layer(len(self.layers), c, c, slope=self.slope)
        except SelectionError:
            return math.nan

    def __str__(self) -> str:
        usual = self.distance <= 1.5 * max(self.chance)
        verdict = ("The distance is typical for random networks of these widths: infinite width describes the network." if usual
                   else "Its weights differ from those of a random network, by training or by another initialisation.")
        balance = "" if math.isnan(self.balanced) else (f" In theory, forward and backward kernels carry equal information at "
                                                        f"layer {self.balanced:.1f} of {len(self.layers)}.")
        return " ".join([f"Cosines of features and gradients differ from those of infinite width by {self.distance:.2g} (root "
                         f"mean square), {self.ratio:.1f} times as much as in {len(self.chance)} random networks of these "
                         f"widths. {verdict}{balance}", *self.notes])

    @styled
    def draw(self) -> Figure:
        """Draw both kernels by layer: measurements as bands over pairs of examples, the recursion as lines, pairs grouped by
        cosine."""
        figure, axes = panels(2, across=2)
        layers, third = np.arange(1, len(self.layers) + 1), np.array_split(np.argsort(self.forward[0]), 3)
        for ax, measured, predicted, name in ((axes[0], self.forward, self.forward_predicted, "what layers read"),
                                              (axes[1], self.backward, self.backward_predicted, "gradients of outputs")):
            for rows, colour, text in zip(third, COLOURS, ("least alike", "", "most alike"), strict=False):
                if len(rows):
                    quartiles = np.quantile(measured[:, rows], [0.25, 0.5, 0.75], axis=1)
                    band(ax, layers, quartiles, colour, text and f"{text} inputs, measured")
                    line(ax, layers, np.median(predicted[:, rows], 1), colour, style="--")
            label(ax, "layer", "cosine of two examples", name, legend=True)
        caption(figure, f"Kernels of the network (bands: quartiles of pairs) and the recursion of infinite width (dashed): "
                        f"{self.distance:.2g} apart, {self.ratio:.1f} times as far as random networks of these widths.")
        return figure


def propagation(model: nn.Module, x: Tensor, *, examples: int = 64, networks: int = 5, seed: int = 0) -> Propagation:
    """Compute forward and backward kernels of a fully connected ReLU network, between the first ``examples`` of ``x``, as
    cosines.

    They are compared with the recursion of infinite width, and with ``networks`` random networks of the same widths.
    The recursion describes chains of dense layers with ReLU (or LeakyReLU of one slope) between them, without biases, at
    initialisation. Other models raise an error with the reason; non-zero biases are noted.
    """
    model = unwrap(model)
    whole(networks=networks, examples=examples)
    stages, rows = chain(model, x), x[:examples]
    slope = _slope(stages)
    if len(rows) < 2:
        raise SelectionError(f"x has {len(rows)} example, but cosines need pairs: give at least two.")
    h, g = _cosines(model, stages, rows)
    if not (np.isfinite(h).all() and np.isfinite(g).all()):
        raise SelectionError("features or gradients of some examples are zero, NaN or Inf, so they have no cosine: an input "
                             "of zeros, a dead layer or weights that diverged. Leave out these examples, or check the weights.")
    c1 = h[0].clip(-1, 1)
    h_predicted = np.asarray(signal.correlations(c1, len(stages), slope=slope))
    g_predicted = np.asarray(signal.gradients(c1, len(stages), slope=slope))
    chance = tuple(_distance(*_cosines(*_drawn(model, rows, slope, seed + k), rows), h_predicted, g_predicted)
                   for k in progress(range(networks), title="random networks", unit="network"))
    if not (chance := tuple(c for c in chance if not math.isnan(c))):
        raise SelectionError(f"{networks} random networks of these widths are dead: some layer is so narrow that no pair of "
                             f"examples has features and gradients in it, so there is nothing to compare with. The network is "
                             f"far from infinite width.")
    biased = [s.name for s in stages if isinstance(s.module.bias, Tensor) and s.module.bias.detach().abs().max() > 0]
    notes = (f"Layers {', '.join(biased)} have non-zero biases, which the recursion ignores.",) if biased else ()
    return Propagation(tuple(s.name for s in stages), h, g, h_predicted, g_predicted,
                       _distance(h, g, h_predicted, g_predicted), chance, slope, notes)


def _slope(stages: Sequence[ChainStage]) -> float:
    """Return the common slope of the activations below 0; raise an error where the recursion does not hold."""
    for s in stages:
        if not isinstance(s.module, nn.Linear):
            raise SelectionError(f"layer {s.name!r} is a {type(s.module).__name__}: the recursion describes chains of dense "
                                 f"layers. richter.kernels.forward_kernel and backward_kernel measure any layer, without a "
                                 f"theory.")
    if len(stages) < 2:
        raise SelectionError("the network has depth 1, without a hidden layer, so nothing propagates: its kernels are those of "
                             "its inputs. Give a chain of at least two dense layers.")
    slopes = set[float]()
    for s in stages[:-1]:
        acts = [m for m in s.after if not isinstance(m, QUIET)]
        if len(acts) != 1 or not isinstance(acts[0], (nn.ReLU, nn.LeakyReLU)):
            names = ", ".join(type(m).__name__ for m in acts) or "no activation"
            raise SelectionError(f"after layer {s.name!r} comes {names}: the recursion needs an activation with phi(a u) = "
                                 f"a phi(u) for a > 0 (ReLU or LeakyReLU), because only then the size of weights does not "
                                 f"matter.")
        slopes.add(float(getattr(acts[0], "negative_slope", 0.0)))
    if len(slopes) > 1:
        raise SelectionError(f"the activations have {len(slopes)} different slopes below 0 "
                             f"({', '.join(map(str, sorted(slopes)))}): the recursion needs a single slope.")
    last = [m for m in stages[-1].after if not isinstance(m, QUIET)]
    if last:
        raise SelectionError(f"the network ends with {type(last[0]).__name__}, but the recursion describes gradients of the last "
                             f"layer's own outputs. Give the network without it.")
    return slopes.pop()


def _cosines(model: nn.Module, stages: Sequence[ChainStage], x: Float[Tensor, "n ..."]) -> tuple[Cosines, Cosines]:
    """Cosines of pairs i < j: of each stage's inputs, and of its backward signals, summed over outputs; [layers, pairs] each."""
    read, wrote = list[Tensor](), list[Tensor]()
    with quiet(model):
        h = x.clone()  # a clone, because a first module that works in place would write into x
        for s in stages:
            h = composed(s.before, h)
            if h.dim() != 2:
                raise SelectionError(f"layer {s.name!r} reads {list(h.shape)}: the recursion needs one vector per example, "
                                     f"[n, d], and this layer reads several (tokens, pixels). Flatten them before the first "
                                     f"layer.")
            read.append(h)
            wrote.append(s.module(h).requires_grad_())
            h = composed(s.after, wrote[-1].clone())  # a clone, because an activation may work in place
        if h.dim() != 2:
            raise SelectionError(f"the network's output has shape {tuple(h.shape)}: it must be [n, k].")
        grams = [torch.zeros(len(x), len(x), dtype=torch.float64, device=x.device) for _ in stages]
        for k in range(h.shape[1]):
            for gram, g in zip(grams, torch.autograd.grad(h[:, k].sum(), wrote, retain_graph=True), strict=True):
                gram += g.double() @ g.double().T
    forward = [r.detach().double().flatten(1) for r in read]
    i, j = np.triu_indices(len(x), 1)

    def cosines(K: Tensor) -> NDArray[np.float64]:
        norm = K.diagonal().sqrt()
        return np.asarray((K / torch.outer(norm, norm)).cpu())[i, j]

    return np.stack([cosines(r @ r.T) for r in forward]), np.stack([cosines(K) for K in grams])


def _distance(h: Cosines, g: Cosines, h_predicted: Cosines, g_predicted: Cosines) -> float:
    """Distance without the first layer's inputs and the last layer's gradients, which agree by construction. Examples without
    features in a layer have no cosine there; NaN if none has one."""
    apart = np.concatenate([(h - h_predicted)[1:], (g - g_predicted)[:-1]])
    apart = apart[np.isfinite(apart)]
    return float(np.sqrt(np.mean(apart**2))) if apart.size else math.nan


def _drawn(model: nn.Module, x: Tensor, slope: float, seed: int) -> tuple[nn.Module, list[ChainStage]]:
    """Return a copy with weights N(0, 2 / ((1 + slope^2) fan_in)) and no biases."""
    draw = torch.Generator().manual_seed(seed)
    with torch.inference_mode(False), torch.no_grad():  # a copy made in inference mode would have no gradients
        other = copy.deepcopy(model)
        stages = chain(other, x)
        for s in stages:
            W = s.module.weight
            assert isinstance(W, Tensor)
            W.copy_(torch.randn(W.shape, generator=draw) * math.sqrt(2 / ((1 + slope**2) * W.shape[1])))
            if isinstance(s.module.bias, Tensor):
                s.module.bias.zero_()
    return other, stages
