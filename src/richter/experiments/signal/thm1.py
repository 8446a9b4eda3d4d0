"""Theorems 1 and 2 of [signal], Corollary 1 and Appendix A.4: loss of information in deep networks, forward and backward, and
the balanced layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.report.drawing import COLOURS, band, caption, label, line, panels, points, styled
from richter.theory import signal

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SUPREMUM, PAIR = (-1.0, 0.9), (0.0, 0.0)  # correlations, forward and backward: over E_eps with eps = 0.1, and of one pair
DEPTHS = (10, 20, 30, 50, 100, 300, 1000)
TABLE = {SUPREMUM: (2.58, 4.62, 6.63, 10.43, 18.74, 43.86, 102.07), PAIR: (3.96, 6.92, 9.49, 13.94, 23.05, 49.13, 108.01)}
MEASURED = np.array([-0.4, 0.0, 0.5, 0.9])  # correlations of the pairs whose gradients are measured


@dataclass(frozen=True)
class SignalThm1Settings:
    """Recursion to a million layers, and wide random networks beside it. The other settings choose printed forms, or rivals."""

    depth: int = 10**6
    width: int = 1000
    layers: int = 6  # of the random networks
    limit: Literal["own", "printed"] = "own"  # of the forward information: q_1/2, or 1/2
    kappa: float = signal.KAPPA  # its sign in Lemma 2
    power: float = 3.0  # of l/L in the backward information
    first: float = 2.0  # variance of the first layer, times fan-in
    factor: Literal["own", "printed"] = "own"  # of the NTK parametrisation: sqrt(2/N), or 2/sqrt(N)
    slope: float = 0.0  # of the activation, in the prediction
    law: Literal["balanced", "3/5"] = "balanced"
    depths: Literal["own", "to 1,000"] = "own"  # over which exponents of the balanced layer are taken
    seeds: tuple[int, ...] = tuple(range(10))


def recursion_and_networks(s: SignalThm1Settings) -> list[Task[SignalThm1Settings]]:
    """Return the recursion as seed -1, and a network for each seed."""
    return [Task(replace(s, seeds=()), seed=seed) for seed in (-1, *s.seeds)]


def work(t: Task[SignalThm1Settings], run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    if t.seed >= 0:
        return {**sizes(s, t.seed), "gradients": np.asarray(signal.simulate_gradients(MEASURED, s.layers, s.width, seed=t.seed))}
    shown = np.unique(np.geomspace(1, s.depth, 200).round().astype(int))
    ahead, back = signal.forward_loss(-1.0, s.depth), np.asarray(signal.gradients(0.0, s.depth))
    deep = tuple(s.depth // k for k in (100, 10, 1))
    run.progress(0.5)
    return {"layers": shown, "forward": np.asarray(ahead)[shown - 1], "backward": back[shown - 1],
            "halves": back[[int(a * s.depth) - 1 for a in (0.3, 0.5)]], "early": back[s.depth // 100 - 1],
            "table": np.stack([signal.balanced_layers(DEPTHS, *pair) for pair in (SUPREMUM, PAIR)]),
            "deep": [signal.exponent(deep, *pair) for pair in (SUPREMUM, PAIR)]}


def sizes(s: SignalThm1Settings, seed: int) -> dict[str, Any]:
    """Sizes in one random network for one input with |x|^2 = d: the mean square of the last layer's inputs, if the first
    layer is N(0, first/d); and the mean square of its last outputs over its first ones in the NTK parametrisation."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(s.width, generator=draw, dtype=torch.float64)
    h = z = x * math.sqrt(s.width) / x.norm()
    u, squares = h, []
    for layer in range(s.layers):
        W = torch.randn(s.width, s.width, generator=draw, dtype=torch.float64)
        z = W @ h * math.sqrt((s.first if layer == 0 else 2.0) / s.width)
        v = W @ u * (2 / math.sqrt(s.width) if s.factor == "printed" else math.sqrt(2 / s.width))
        squares.append(v.square().mean().item())
        h, u = z.relu(), v.relu()
    return {"information": h.square().mean().item(), "covariance": squares[-1] / squares[0]}


# ------------------------------------------------------------------------------------------------ claims


def reading(value: Callable[[Results, int], float], which: int) -> Callable[[Results], float]:
    """Return the value of one pair of inputs, or of one place."""
    return lambda r: value(r, which)


def recursion(r: Results) -> Results:
    """Results of the recursion."""
    return r.where(seed=-1)


def forward_exponent(r: Results) -> float:
    """d log |I^f_l - limit| / d log l over the last tenth of the layers, for the largest loss over E_eps."""
    layers, lost = recursion(r)["layers"][0], recursion(r)["forward"][0]
    lost = np.abs((1 - 2 * lost) - 1 / 2) if r.settings.limit == "printed" else lost  # I^f = 1 - 2 lost with q_1 = 2
    late = layers >= r.settings.depth // 10
    return float(np.polyfit(np.log(layers[late]), np.log(lost[late]), 1)[0])


def backward_ratio(r: Results, which: int) -> float:
    """(I^b - alpha^3) over its leading term, at alpha = 0.3 or 0.5."""
    alpha = (0.3, 0.5)[which]
    leading = float(signal.backward_expansion(alpha, r.settings.depth, kappa=r.settings.kappa)) - alpha**3
    return float((recursion(r)["halves"][0][which] - alpha**3) / leading)


def gradient_error(r: Results) -> float:
    """Largest |measured - predicted| correlation of gradients over layers and pairs of inputs, in one random network."""
    predicted = np.asarray(signal.gradients(MEASURED, r.settings.layers, slope=r.settings.slope))
    return max(float(np.abs(a["gradients"] - predicted).max()) for t, a in r if t.seed >= 0)


def random_networks(r: Results, name: str) -> float:
    """Mean of a number over the random networks."""
    return float(np.mean([a[name] for t, a in r if t.seed >= 0]))


def table_error(r: Results) -> float:
    """Largest distance of balanced layers from the table; those of C L^(3/5), C fitted, where that is the law."""
    layers, wanted = recursion(r)["table"][0], np.array([TABLE[SUPREMUM], TABLE[PAIR]])
    if r.settings.law == "3/5":
        power = np.array(DEPTHS) ** signal.EXPONENT
        layers = np.exp(np.log(wanted / power).mean(1, keepdims=True)) * power
    return float(np.abs(layers - wanted).max())


def table_slope(r: Results, which: int, count: int = len(DEPTHS)) -> float:
    """Slope of log l* against log L over the first ``count`` depths of the table."""
    return float(np.polyfit(np.log(DEPTHS[:count]), np.log(recursion(r)["table"][0][which, :count]), 1)[0])


def deep_slope(r: Results, which: int) -> float:
    return float(recursion(r)["deep"][0][which]) if r.settings.depths == "own" else table_slope(r, which)


def shallow_slope(r: Results) -> float:
    """Slope from 10 to 100 layers, of the pair of inputs whose slope is nearer to 3/5."""
    return min((table_slope(r, which, 5 if r.settings.depths == "own" else len(DEPTHS)) for which in (0, 1)),
               key=lambda v: abs(v - signal.EXPONENT))


# ------------------------------------------------------------------------------------------------ drawings


@styled
def draw_forward(results: Results) -> Figure:
    """Figure of the forward information loss by layer."""
    figure, (ax,) = panels(1, across=1, width=4.8, height=3.0)
    r = recursion(results)
    points(ax, r["layers"][0], r["forward"], label="recursion, opposite inputs")
    line(ax, r["layers"][0], signal.FORWARD / 2 / r["layers"][0] ** 2.0, label="(9 pi^2 / 4) / l^2")
    label(ax, "layer", "forward information loss", log="xy", legend=True)
    caption(figure, f"What the forward kernel still tells apart falls as l^-2: slope {forward_exponent(results):.4f} at the end.")
    return figure


@styled
def draw_backward(results: Results) -> Figure:
    """Figure of the backward information and the cosines of gradients by layer."""
    figure, (left, right) = panels(2, across=2)
    r = recursion(results)
    share = r["layers"][0] / results.settings.depth
    points(left, share, r["backward"], label="recursion, orthogonal inputs")
    line(left, share, share**3, label="(l/L)^3")
    label(left, "layer / depth", "backward information", f"{results.settings.depth:,} layers", log="xy", legend=True)
    networks = np.array([a["gradients"] for t, a in results if t.seed >= 0])
    layers = np.arange(1, results.settings.layers + 1)
    for k, c in enumerate(MEASURED):
        band(right, layers, networks[:, :, k], COLOURS[k], f"c = {c:g}")
        line(right, layers, np.asarray(signal.gradients(float(c), results.settings.layers)), COLOURS[k], style="--")
    label(right, "layer", "cosine of gradients", f"networks of width {results.settings.width}", legend=True)
    caption(figure, "Gradients of two inputs are less alike the further they have come from the output, as (l/L)^3 at great "
                    "depth. Random networks (bands) follow the recursion (dashed).")
    return figure


@styled
def draw_balance(results: Results) -> Figure:
    """Figure of the balanced layer."""
    figure, (ax,) = panels(1, across=1, width=4.8, height=3.0)
    for k, (row, name) in enumerate(zip(recursion(results)["table"][0], ("suprema over pairs, eps = 0.1", "one pair, c = 0"),
                                        strict=True)):
        points(ax, DEPTHS, row, COLOURS[k], name)
    line(ax, DEPTHS, 1.7 * np.array(DEPTHS) ** signal.EXPONENT, label="slope 3/5")
    label(ax, "depth", "balanced layer", log="xy", legend=True)
    deep = recursion(results)["deep"][0]
    caption(figure, f"The balanced layer rises faster than 3/5 at depths that can be trained, with {deep[1]:.3f} to "
                    f"{deep[0]:.3f} up to a million layers.")
    return figure


@styled
def draw_parametrisation(results: Results) -> Figure:
    """Figure of the variance over layers under both parametrisations."""
    figure, (ax,) = panels(1, across=1, width=4.8, height=3.0)
    values = [a["covariance"] for t, a in results if t.seed >= 0]
    points(ax, np.arange(len(values)), values, label="sqrt(2/N): measured")
    line(ax, [0, len(values) - 1], [1, 1], label="the same covariance")
    line(ax, [0, len(values) - 1], [2.0 ** (results.settings.layers - 1)] * 2, COLOURS[1], "2/sqrt(N), as printed")
    label(ax, "random network", "variance, last layer over first", log="y", legend=True)
    caption(figure, "With sqrt(2/N) the NTK parametrisation keeps the variance over layers; with the printed 2/sqrt(N) it "
                    "doubles.")
    return figure


TRAINABLE = Control("from 10 to 1,000 layers", {"depths": "to 1,000"})
RECURSION = "independent check of the recursion"
CLAIMS = (
    Claim("exponent of the forward information loss", forward_exponent, Interval(-2.005, -1.995),
          Control("against the printed limit 1/2, with the He first layer", {"limit": "printed"}), paper="-2", source="Thm. 1",
          places=("Thm. 1",), says="Theorem 1: the forward information loss falls with exponent -2 in depth."),
    Claim("limit of the forward information with the He first layer and |x|^2 = d, wide random networks",
          lambda r: random_networks(r, "information"), Interval(0.9, 1.1),
          Control("a first layer N(0, 1/d), which the printed 1/2 needs", {"first": 1.0}), paper="1/2",
          source="q_1/2 with q_1 = 2: the printed 1/2 is for q_1 = 1", places=("Thm. 1",),
          says="Theorem 1: the forward information goes to 1/2 (corrected: to 1 with the printed first layer).",
          reason="misprint"),
    *(Claim(f"backward information at {alpha} L less {alpha}^3, over its leading term", reading(backward_ratio, k),
            Interval(0.95, 1.06), Control("the sign of Lemma 2 as printed", {"kappa": -signal.KAPPA}), paper="Theta(log(L)/L)",
            source=f"{RECURSION}: 1.015 and 1.039 at a million layers", places=("Thm. 2",),
            says=f"Theorem 2: backward information at {alpha} L differs from {alpha}^3 by the order log(L) / L (Lemma 2 has a"
                 " wrong sign).", reason="misprint")
      for k, alpha in enumerate((0.3, 0.5))),
    Claim("backward information at L/100 over (1/100)^3",
          lambda r: float(recursion(r)["early"][0] * 100**r.settings.power), Interval(0.99, 1.02),
          Control("(l/L)^2", {"power": 2.0}), paper="Theta((l/L)^3)", source=f"{RECURSION}: 1.005", places=("Thm. 2",),
          says="Theorem 2: backward information of layer l of L is of the order (l/L)^3."),
    Claim("largest |measured - predicted| correlation of gradients, over layers, pairs and random networks", gradient_error,
          Interval(high=0.1), Control("the prediction for a leaky ReLU of slope 0.3", {"slope": 0.3}),
          source="fluctuations of some 1/sqrt(width)", places=("Thm. 2",), own=True),
    *(Claim(f"exponent of the balanced layer from 10,000 to a million layers, {name}", reading(deep_slope, k),
            Interval(0.595, 0.615), TRAINABLE, paper="3/5", source="Cor. 1", places=("Cor. 1",),
            says=f"Corollary 1: the balanced layer goes with depth to the power 3/5 (very deep, {name}).")
      for k, name in enumerate(("suprema over pairs", "one pair"))),
    Claim("largest distance of balanced layers from the table, depths 10 to 1,000", table_error, Interval(high=0.01),
          Control("C L^(3/5), C fitted", {"law": "3/5"}), source=RECURSION, places=("Cor. 1",), own=True),
    Claim("exponent of the balanced layer from 10 to 100 layers, the nearer to 3/5 of both", shallow_slope, Interval(0.55, 0.65),
          TRAINABLE, paper="3/5", source="the line that the paper draws over its depths", places=("Cor. 1",),
          differs="3/5 is the exponent of infinite depth; the theory itself has .77 (one pair) to .87 (suprema) here",
          says="Corollary 1: the balanced layer goes with depth to the power 3/5 at the depths of Fig. 3, 10 to 100.",
          direction=Interval(0.3, 0.99), reason="scale"),
    Claim("variance of the last layer over the first, NTK parametrisation, wide random networks",
          lambda r: random_networks(r, "covariance"), Interval(0.8, 1.25),
          Control("the printed factor 2/sqrt(N)", {"factor": "printed"}), paper="1",
          source="the same covariance as the standard one", places=("App. A.4",),
          says="App. A.4: in the NTK parametrisation the covariance is the same, with the factor 2/sqrt(N) (corrected: "
               "sqrt(2/N)).", reason="misprint"),
)
EXPERIMENT = Experiment(
    name="signal_thm1", ref=Ref("signal", "Thm. 1"), title="what deep networks lose forward and backward",
    smoke=SignalThm1Settings(), paper=SignalThm1Settings(), over=recursion_and_networks,
    analysis=("limit", "kappa", "power", "slope", "law", "depths"), work=work, places=("Thm. 1", "Thm. 2", "Cor. 1", "App. A.4"),
    figures={"signal_thm1": draw_forward, "signal_thm2": draw_backward, "signal_cor1": draw_balance,
             "signal_app_a_4": draw_parametrisation}, start={"seeds": (0,), "depth": 1000},
    protocol="exact",
    claims=CLAIMS)
