"""The theorem of [fact] as an identity: a small network at a minimum has W^T W = FACT, and W W^T in its backward form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.experiments.training import LayerCurves, linears
from richter.instrument.probe import Probe
from richter.models import mlp
from richter.report.drawing import caption

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURES = ("fact", "fact_backward", "fact_error", "fact_backward_error", "fact_stationarity", "nfc", "nfc_sqrt")


@dataclass(frozen=True)
class FactIdentitySettings:
    """Network 6-10-10-2 with biases in float64, squared error of two smooth targets; weights and biases decay. Training ends
    when no entry of the gradient is above ``least``."""

    activations: tuple[str, ...] = ("tanh", "softplus")
    widths: tuple[int, ...] = (6, 10, 10, 2)
    n: int = 40
    decay: float = 1e-2
    said: float = 1.0  # what FACT is told the decay is, in units of what it is
    steps: int = 2_000  # of L-BFGS, at most
    newton: int = 60  # steps behind it, at most
    least: float = 1e-9
    early: bool = True  # measure at initialisation too
    seeds: tuple[int, ...] = (0, 1)


def targets(x: Tensor) -> Tensor:
    """Targets sin(x_0 + x_1) and x_2 x_3 of each input."""
    return torch.stack([torch.sin(x[:, 0] + x[:, 1]), x[:, 2] * x[:, 3]], 1)


def minimise(model: nn.Module, x: Tensor, y: Tensor, s: FactIdentitySettings, run: Writer) -> float:
    """L-BFGS, and Newton's steps at its end, where differences of the loss are lost in rounding. The largest entry of the
    gradient that is left."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    theta = parameters_to_vector(model.parameters()).detach().requires_grad_()

    def objective(theta: Tensor) -> Tensor:
        parts = torch.split(theta, [shape.numel() for shape in shapes.values()])
        weights = {name: part.reshape(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}
        return (functional_call(model, weights, (x,)) - y).square().mean() + s.decay / 2 * theta.square().sum()

    optimiser = torch.optim.LBFGS([theta], max_iter=s.steps, history_size=100, line_search_fn="strong_wolfe",
                                  tolerance_grad=1e-6, tolerance_change=0.0)

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = objective(theta)
        loss.backward()
        return loss

    optimiser.step(closure)
    now = theta.detach()
    for i in range(s.newton):
        g = torch.func.grad(objective)(now)
        if g.abs().max() < s.least:
            break
        H = torch.func.hessian(objective)(now)
        values, vectors = torch.linalg.eigh(H)
        now = now - vectors @ ((vectors.T @ g) / values.abs().clamp(min=g.norm()))  # downhill also where it curves the other way
        run.progress(i / s.newton)
    vector_to_parameters(now, model.parameters())
    return float(torch.func.grad(objective)(now).abs().max())


def work(t: Task[FactIdentitySettings], run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    draw = torch.Generator().manual_seed(t.seed)
    x = torch.randn(s.n, s.widths[0], generator=draw, dtype=torch.float64)
    y = targets(x)
    model = mlp(s.widths, activation={"tanh": nn.Tanh, "softplus": nn.Softplus}[t.activation], seed=t.seed).double()
    curves = LayerCurves(model, Probe(x, y, weight_decay=s.said * s.decay), MEASURES, linears(model), run)
    if s.early:
        curves.at(0)
    left = minimise(model, x, y, s, run)
    curves.at(1)
    return {**curves.arrays(), "left": left}


def at_measurement(r: Results, name: str, step: int) -> NDArray[np.float64]:
    """[tasks, layers] at the first (0) or the last (-1) measurement."""
    return r[name][:, step]


def gap(r: Results, name: str) -> float:
    """Smallest correlation over layers of FACT, less that of the ansatz; the smallest over networks."""
    return float((at_measurement(r, "fact", -1).min(1) - at_measurement(r, name, -1).min(1)).min())


def draw(results: Results) -> Figure:
    """The three correlations of each layer, and the relative errors before and after."""
    from matplotlib.figure import Figure

    from richter.report.figures import COLOURS
    names = list(dict.fromkeys(t.activation for t in results.tasks))
    figure = Figure(figsize=(3.4 * (len(names) + 1), 3), layout="constrained")
    *left, right = figure.subplots(1, len(names) + 1)
    for ax, activation in zip(left, names, strict=True):
        chosen = results.where(activation=activation)
        layers = np.arange(1, chosen["fact"].shape[2] + 1)
        for k, (name, label) in enumerate((("fact", "FACT"), ("nfc", "AGOP"), ("nfc_sqrt", r"AGOP$^{1/2}$"))):
            ax.plot(layers, at_measurement(chosen, name, -1).T, "o-", color=COLOURS[k], label=[label, *[""] * (len(chosen) - 1)])
        ax.set(title=activation, xlabel="layer", ylabel="correlation with $W^T W$", xticks=layers)
    left[0].legend(frameon=False)
    for k, (step, label) in enumerate(((0, "at initialisation"), (-1, "at the minimum"))):
        right.semilogy(np.tile(layers, len(results)), at_measurement(results, "fact_error", step).ravel(), "o", color=COLOURS[k],
                       label=label)
    right.set(xlabel="layer", ylabel="$|W^T W -$ FACT$| / |W^T W|$", xticks=layers)
    right.legend(frameon=False)
    caption(figure, "At a minimum W^T W is FACT up to what is left of the gradient, in every layer; AGOP and its root only "
                    "resemble it.")
    return figure


OFF = Control("FACT with a decay that is 1% off", {"said": 1.01})
UNTRAINED = Control("an untrained network", {"steps": 0, "newton": 0})
EXACT, SEEN = "an identity; rounding and what is left of the gradient", "independent check, one network for each activation"
EXPERIMENT = Experiment(
    name="fact_identity", ref=Ref("fact", "Theorem (FACT)"), title="at a minimum W^T W is FACT, to the accuracy of the minimum",
    smoke=FactIdentitySettings(seeds=(0,)), paper=FactIdentitySettings(decay=1e-3, seeds=(0, 1, 2)), over=("activation", "seed"),
    work=work,
    figures={"fact_identity": draw}, start={"steps": 1, "newton": 1}, quick=True,
    protocol="exact",
    claims=(
        Claim("largest entry of the gradient that is left", lambda r: r["left"].max(), Interval(high=1e-8), UNTRAINED,
              paper="0", source="the setting of the theorem", own=True),
        Claim("largest |W^T W - FACT| / |W^T W| over layers", lambda r: at_measurement(r, "fact_error", -1).max(),
              Interval(high=1e-5), OFF,
              paper="0", source=EXACT,
              says="FACT: at a minimum with weight decay, W^T W of a layer is its FACT matrix: relative error 0."),
        Claim("the same of W W^T and the backward form", lambda r: at_measurement(r, "fact_backward_error", -1).max(),
              Interval(high=1e-5),
              OFF, paper="0", source=EXACT,
              says="FACT: at a minimum with weight decay, W W^T of a layer is the backward form: relative error 0."),
        Claim("smallest correlation of W^T W and FACT", lambda r: at_measurement(r, "fact", -1).min(), Interval(low=0.9999),
              UNTRAINED,
              paper="1", source=EXACT,
              says="FACT: at a minimum with weight decay, W^T W and the FACT matrix have correlation 1."),
        Claim("smallest correlation: FACT less AGOP", lambda r: gap(r, "nfc"), Interval(low=0.01), UNTRAINED,
              paper="above 0", source=f"{SEEN}: 0.04 and 0.15",
              says="At a minimum W^T W is closer to the FACT matrix than to the AGOP."),
        Claim("smallest correlation: FACT less the root of the AGOP", lambda r: gap(r, "nfc_sqrt"), Interval(low=0.01), UNTRAINED,
              paper="above 0", source=f"{SEEN}: 0.03 and 0.11",
              says="At a minimum W^T W is closer to the FACT matrix than to the root of the AGOP."),
        Claim("smallest relative error at initialisation", lambda r: at_measurement(r, "fact_error", 0).min(), Interval(low=1.0),
              Control("measured at the minimum", {"early": False}), source=f"{SEEN}: 8 to 200", own=True),
    ))
