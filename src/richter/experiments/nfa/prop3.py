"""Proposition 3 of [nfa] and Eq. 6: how the centred NFM and AGOP leave zero under gradient flow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from richter.core.likeness import cosine
from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.experiments.nfa.prop2 import derivatives
from richter.instrument.observe import measure
from richter.instrument.probe import Probe
from richter.report.drawing import COLOURS, caption, label, line, panels, styled
from richter.theory import early_time

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


@dataclass(frozen=True)
class NfaProp3Settings:
    """Two hidden layers; inputs whose variances fall like 1/k^2, so that Eq. 6 is not always close to 1."""

    n: int = 12
    d: int = 8
    width: int = 16
    movement: float = 1e-4  # of the fastest layer, relative to its norm, where the correlation is measured
    activations: tuple[str, ...] = ("relu", "tanh")
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    formula: Literal["own", "half", "normalised", "constant"] = "own"  # without the 2; with K divided by n; one number for Eq. 6
    grown: Literal["centred", "uncentred"] = "centred"  # the NFM whose growth is looked at


def network(s: NfaProp3Settings, activation: str, seed: int) -> nn.Sequential:
    """Network with weights N(0, 1/fan_in) and one output."""
    draw = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for i, o in itertools.pairwise((s.d, s.width, s.width, 1)):
        linear = nn.Linear(i, o, bias=False, dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(torch.randn(o, i, generator=draw, dtype=torch.float64) / math.sqrt(i))
        layers += [linear, ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1])


def work(t: Task[NfaProp3Settings], run: Writer) -> Mapping[str, ArrayLike]:
    """Compute for the two hidden layers: Eq. 5 with the kernel P = J J^T written out, the same from a network that follows
    gradient flow, and the measured ``cnfc`` after a short way down the gradient beside Eq. 6."""
    s = t.settings
    draw = np.random.default_rng((t.seed, 10))
    x = torch.from_numpy(draw.standard_normal((s.n, s.d)) / np.arange(1, s.d + 1))
    y = torch.from_numpy(draw.standard_normal((s.n, 1)))
    model = network(s, t.activation, t.seed)
    weights = [p.detach().clone() for p in model.parameters()]
    residual = (model(x) - y).detach()[:, 0]
    factors = {"own": (1, 1), "half": (1 / 2, 1 / 2), "normalised": (1, 1 / s.n)}
    errors: dict[str, list[float]] = {name: [] for name in factors}
    eq6 = []
    for layer in (0, 1):
        X, J = model[:2 * layer](x).detach(), derivatives(model, x, 2 * layer)[1][0]
        P, L = J @ J.T, torch.diag(residual)
        closed = 2 * X.T @ L @ P @ L @ X, 2 * X.T @ L @ P @ P @ L @ X
        flows = early_time.simulate(weights, x, y, {"relu": torch.relu, "tanh": torch.tanh}[t.activation], layer)
        for name, both in factors.items():
            errors[name].append(max(((c * a - b).norm() / b.norm()).item()
                                    for c, a, b in zip(both, closed, map(torch.as_tensor, flows), strict=True)))
        eq6.append(cosine(*(C.numpy() for C in closed)))
    return {**{f"error_{name}": np.array(rows) for name, rows in errors.items()}, "eq6": np.array(eq6), **moved(model, x, y, s)}


def moved(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor, s: NfaProp3Settings) -> dict[str, ArrayLike]:
    """Down the gradient, and then twice as far: the measured ``cnfc`` after the first time, and log2 of how the sizes of the
    centred NFM and of the change of the NFM grow."""
    initial = {k: v.detach().clone() for k, v in model.state_dict().items()}
    gradient = torch.autograd.grad((model(x) - y).square().sum() / 2, list(model.parameters()))
    speed = max((g.norm() / p.norm()).item() for g, p in zip(gradient, initial.values(), strict=True))
    sizes: dict[int, NDArray[np.float64]] = {}
    for times in (1, 2):
        with torch.no_grad():
            for p, start, g in zip(model.parameters(), initial.values(), gradient, strict=True):
                p.copy_(start - times * s.movement / speed * g)
        if times == 1:
            snap = measure(model, Probe(x, y), ["cnfc"], initial=initial, layers=["0", "2"])
        W0, W = initial["0.weight"], model[0].weight.detach()  # type: ignore[union-attr, operator]
        sizes[times] = np.array([((W - W0).T @ (W - W0)).norm().item(), (W.T @ W - W0.T @ W0).norm().item()])
    growth = np.log2(sizes[2] / sizes[1])
    return {"cnfc": [snap.value("cnfc", k) for k in ("0", "2")], "growth_centred": growth[0], "growth_uncentred": growth[1]}


def error(r: Results) -> float:
    """The largest relative error of Eq. 5, over both matrices, layers and networks."""
    return float(r[f"error_{r.settings.formula}"].max())


def apart(r: Results) -> float:
    """Largest |cnfc - Eq. 6|; or |cnfc - the best constant|."""
    predicted = np.full_like(r["cnfc"], np.ptp(r["cnfc"]) / 2 + r["cnfc"].min()) if r.settings.formula == "constant" else r["eq6"]
    return float(np.abs(r["cnfc"] - predicted).max())


@styled
def draw(results: Results) -> Figure:
    figure, (ax,) = panels(1, across=1, width=4.2, height=3.2)
    low = min(results["eq6"].min(), results["cnfc"].min())
    line(ax, [low, 1], [low, 1], label="equal")
    for k, activation in enumerate(results.distinct("activation")):
        for layer, marker in ((0, "o"), (1, "s")):
            chosen = results.where(activation=activation)
            ax.plot(chosen["eq6"][:, layer], chosen["cnfc"][:, layer], marker, color=COLOURS[k],
                    label=f"{activation}, layer {layer + 1}")
    label(ax, "Eq. 6", "measured cnfc after a short way", legend=True)
    caption(figure, "The correlation of the second derivatives is what is measured just after the start, in every network "
                    "and layer.")
    return figure


HALF = Control("without the factor 2", {"formula": "half"})
NORMALISED = Control("K divided by n", {"formula": "normalised"})
CONSTANT = Control("the best constant, chosen after the fact", {"formula": "constant"})
EXPERIMENT = Experiment(
    name="nfa_prop3", ref=Ref("nfa", "Prop. 3"), title="how the centred NFM and AGOP leave zero",
    smoke=NfaProp3Settings(), paper=NfaProp3Settings(seeds=tuple(range(10))), work=work, figures={"nfa_prop3": draw},
    over=("activation", "seed"), analysis=("formula", "grown"),
    start={"seeds": (0,)}, quick=True,
    protocol="exact",
    claims=(
        Claim("largest relative error of both second derivatives against gradient flow, over networks and layers", error,
              Interval(high=1e-6), (HALF, NORMALISED), paper="exact",
              source="an identity; what is left is the integration of the flow",
              says="Prop. 3: closed forms of the second derivatives of the centred NFM and AGOP at the start."),
        Claim("largest |measured C - Eq. 6| after 1e-4 of the way, over networks and layers", apart, Interval(high=1e-3),
              CONSTANT, paper="equal", source="independent check of the proposition",
              says="Eq. 6: the limit of the centred correlation at the start."),
        Claim("exponent with which the centred NFM grows at first, mean over networks",
              lambda r: float(r[f"growth_{r.settings.grown}"].mean()), Interval(1.99, 2.01),
              Control("the change of the uncentred NFM", {"grown": "uncentred"}), paper="2: no first derivative",
              source="the proposition",
              says="Prop. 3: the centred NFM has no first derivative at the start: it grows with exponent 2."),
    ))
