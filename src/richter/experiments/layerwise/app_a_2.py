"""Appendix A.2 of [layerwise]: what gradient flow of linear models, diagonal and linear networks finds, keeps, and follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.report.drawing import COLOURS, caption, label, line, panels, points, styled
from richter.theory.flows import flow
from richter.theory.linear_networks import DiagonalNetwork, LinearNetwork
from richter.theory.two_layers import riccati, simulate_layers

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Matrix = NDArray[np.float64]
MODES, SHAPE = 4, (6, 5, 3)  # of the diagonal network; d, p and c of the linear one
TIMES = (0.0, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True)
class LayerwiseAppA2Settings:
    """Linear model with ``features`` features of ``examples`` examples. Claims choose by ``start`` the start of the linear
    model, by ``form`` the equation of the diagonal network, by ``stage`` the form of Eq. 3.13, by ``kept`` the quantity that
    the linear network conserves ("steps": under steps of finite length), by ``alpha`` the start of a mode in Eq. 3.15, and by
    ``layers`` the layers in the solution for any start."""

    features: int = 40
    examples: int = 15
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    start: Literal["zero", "random"] = "zero"
    form: Literal["own", "one_target", "equal"] = "own"
    stage: Literal["corrected", "literal", "turned"] = "corrected"
    kept: Literal["difference", "sum", "steps"] = "difference"
    alpha: Literal["square", "printed", "random"] = "square"
    layers: Literal["balanced", "random"] = "balanced"


def work(t: Task[LayerwiseAppA2Settings], run: Writer) -> Mapping[str, ArrayLike]:
    draw = np.random.default_rng((t.seed, 120))
    rows = {**least_norm(t.settings, draw)}
    run.progress(0.2)
    rows |= diagonal(draw)
    run.progress(0.6)
    rows |= linear(draw, t.seed)
    return rows


def relative(a: ArrayLike, b: ArrayLike) -> float:
    """Relative distance |a - b| / |b|."""
    return float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(b)))


# ------------------------------------------------------------------------------------------------ A.2: least norm


def least_norm(s: LayerwiseAppA2Settings, draw: np.random.Generator) -> dict[str, ArrayLike]:
    """Flow of more parameters than examples, from zero and from elsewhere, beside the interpolation of least norm."""
    Phi, y = draw.standard_normal((s.features, s.examples)), draw.standard_normal(s.examples)
    best = np.linalg.pinv(Phi.T) @ y
    values = np.linalg.svd(Phi, compute_uv=False)
    t = np.geomspace(1e-2, 1, 12) * 40 / values[-1] ** 2
    rows: dict[str, ArrayLike] = {}
    for start, w in (("zero", np.zeros(s.features)), ("random", 0.3 * draw.standard_normal(s.features))):
        path = np.stack(flow(lambda w: -Phi @ (Phi.T @ w - y), w, t.tolist(), rtol=1e-12, atol=1e-14))
        rows[f"norm_{start}"] = np.linalg.norm(path, axis=1) / np.linalg.norm(best)
        rows[f"fit_{start}"] = np.abs(path[-1] @ Phi - y).max()
        rows[f"least_{start}"] = relative(path[-1], best)
    return rows


# ------------------------------------------------------------------------------------------------ A.2.1: a diagonal network


def diagonal(draw: np.random.Generator) -> dict[str, ArrayLike]:
    """Eq. A.20 and Theorem 1 against the flow, and the overlap of stages, by the time at which two modes have shares of sum 1."""
    S, v = draw.uniform(0.5, 2, MODES), draw.uniform(0.3, 3, MODES)
    a, b = draw.uniform(0.02, 0.2, (2, MODES))
    equal, uneven = DiagonalNetwork(S, v, a, a), DiagonalNetwork(S, v, a, b)
    root = np.sqrt(a * b)  # Eq. A.20 knows only the product
    truth, far = equal.simulate(TIMES), uneven.simulate(TIMES)
    rows = {"equal_own": relative(equal.predict(TIMES), truth),
            "equal_one_target": relative(DiagonalNetwork(S.mean(), v, a, a).predict(TIMES), truth),
            "uneven_own": relative(uneven.predict(TIMES), far),
            "uneven_equal": relative(DiagonalNetwork(S, v, root, root).predict(TIMES), far)}
    first, second = sorted(draw.uniform(0.3, 3, 2), reverse=True)
    start, target = draw.uniform(1e-4, 1e-2), draw.uniform(0.5, 2)
    pair = DiagonalNetwork(target, [first, second], start**0.5, start**0.5)
    eps, odds, share = crossing(pair), target / start - 1, (first - second) / (first + second)
    forms = {"corrected": float(pair.stage_eps[0]), "literal": 1 / (1 - odds * share), "turned": 1 / (1 + odds**-share)}
    return {**rows, "overlap": eps, **{f"stage_{form}": abs(value / eps - 1) for form, value in forms.items()}}


def crossing(pair: DiagonalNetwork) -> float:
    """The share of the second mode where that of the first is 1 less it, found on the flow by halving."""
    S = float(np.asarray(pair.S))
    low, high = 0.0, float(pair.emergent_time(0.5)[1])
    for _ in range(45):
        middle = (low + high) / 2
        shares = np.asarray(pair.simulate(middle))[:, 0] / S
        low, high = (middle, high) if shares.sum() < 1 else (low, middle)
    return float(shares[1])


# ------------------------------------------------------------------------------------------------ A.2.2, A.2.3: a hidden layer


def linear(draw: np.random.Generator, seed: int) -> dict[str, ArrayLike]:
    """Drift of the conserved quantities of a linear network, by flow and by steps."""
    d, p, c = SHAPE
    C, X = draw.standard_normal((d, c)), draw.standard_normal((3 * d, d))
    W = [torch.from_numpy(0.5 * draw.standard_normal(shape)) for shape in ((d, p), (p, c))]
    target, inputs, t = torch.from_numpy(C), torch.from_numpy(X.T @ X / (3 * d)), torch.tensor(TIMES, dtype=torch.float64)
    paths = {"difference": simulate_layers(W, target, t, inputs), "steps": simulate_layers(W, target, t, inputs, "descent", 0.1)}
    paths["sum"] = paths["difference"]
    rows: dict[str, ArrayLike] = {}
    for kept, path in paths.items():
        sign = 1 if kept == "sum" else -1
        D = torch.stack([a.T @ a + sign * b @ b.T for a, b in path])
        rows[f"drift_{kept}"] = ((D - D[0]).flatten(1).norm(dim=1) / (W[0].square().sum() + W[1].square().sum())).numpy()
    aligned, random = LinearNetwork.aligned(C, p, 0.1, seed), LinearNetwork.drawn(C, p, 0.1, seed)
    rho: Matrix = np.linalg.svd(C, compute_uv=False).astype(np.float64)
    flows = {name: modes(network, C) for name, network in (("aligned", aligned), ("random", random))}
    ahead = np.array(TIMES)
    rows |= {"mode_square": relative(sigmoid(rho, 0.01, ahead), flows["aligned"]),
             "mode_printed": relative(np.sqrt(sigmoid(rho, 0.01**2, ahead)), flows["aligned"]),
             "mode_random": relative(sigmoid(rho, flows["random"][:, 0], ahead), flows["random"]),
             "modes": flows["aligned"], "rho": rho}
    even = random.balanced()
    for name, network in (("balanced", even), ("random", random)):
        W1, W2 = riccati(torch.as_tensor(network.W1), torch.as_tensor(network.W2), target, t)
        solved = W1 @ W2
        rows[f"any_{name}"] = relative(solved, network.simulate(TIMES))
    return rows


def modes(network: LinearNetwork, C: Matrix) -> Matrix:
    """u_i^T W1 W2 v_i [m, t] along the integrated flow."""
    U, _, Vt = np.linalg.svd(C, full_matrices=False)
    return np.einsum("di,tdc,ic->it", U, np.asarray(network.simulate(TIMES)), Vt)


def sigmoid(rho: Matrix, start: ArrayLike, t: Matrix) -> Matrix:
    """Strength of the modes by Eq. 3.15, times rho."""
    first = np.broadcast_to(np.asarray(start, dtype=float), rho.shape)[:, None]
    return rho[:, None] / (1 + (rho[:, None] / first - 1) * np.exp(-2 * rho[:, None] * t))


# ------------------------------------------------------------------------------------------------ pictures


@styled
def draw_least(results: Results) -> Figure:
    """Figure of the norm that gradient flow reaches, over the least norm that fits."""
    figure, (ax,) = panels(1, across=1)
    x = np.geomspace(1e-2, 1, 12)
    for k, start in enumerate(("zero", "random")):
        points(ax, x, results[f"norm_{start}"], COLOURS[k], f"from {start} weights")
    line(ax, [1e-2, 1], [1, 1], label="least norm that fits")
    label(ax, "time, as a share of training", "|w| / least norm", "App. A.2", log="x", legend=True)
    caption(figure, "From zero, gradient flow ends at the interpolation of least norm; from elsewhere it keeps what no "
                    "example sees.")
    return figure


@styled
def draw_diagonal(results: Results) -> Figure:
    """Figure of the errors of Eqs. A.20 and 3.13 against the flow."""
    figure, (left, right) = panels(2, across=2)
    for ax, names, title in ((left, ("equal_own", "equal_one_target", "uneven_own", "uneven_equal"), "A.20 against the flow"),
                             (right, ("stage_corrected", "stage_literal", "stage_turned"), "Eq. 3.13 against the flow")):
        values = np.stack([np.maximum(results[name], 1e-16) for name in names], 1)
        points(ax, np.arange(len(names)), values)
        label(ax, "", "relative error", title, log="y")
        ax.set_xlabel("formula")
        ax.set_xticks(range(len(names)), [name.replace("_", "\n") for name in names], fontsize=6.5)
    caption(figure, "The sigmoid is exact with each mode's own target and equal weights, Theorem 1 with any; the overlap of "
                    "stages is that of Eq. 3.13 only with its exponent and the right sign.")
    return figure


@styled
def draw_kept(results: Results) -> Figure:
    """Figure of the conserved difference of Gram matrices, under the flow and under steps."""
    figure, (ax,) = panels(1, across=1)
    words = {"difference": "difference, flow", "steps": "difference, steps of 0.1", "sum": "sum, flow"}
    for k, (kept, text) in enumerate(words.items()):
        points(ax, TIMES[1:], np.maximum(results[f"drift_{kept}"][:, 1:], 1e-17), COLOURS[k], text)
    label(ax, "time", "change / size", "W1'W1 - W2 W2', App. A.2.2", log="xy", legend=True)
    caption(figure, "The flow keeps the difference of the layers' Gram matrices, whatever the inputs; steps lose it, and the sum "
                    "changes.")
    return figure


@styled
def draw_modes(results: Results) -> Figure:
    """Figure of the modes by Eq. 3.15, corrected and as printed, beside the flow."""
    figure, (ax,) = panels(1, across=1)
    fine, rho = np.linspace(0, TIMES[-1], 200), results["rho"][0]
    exact, printed = sigmoid(rho, 0.01, fine), np.sqrt(sigmoid(rho, 1e-4, fine))
    for k in range(len(rho)):
        line(ax, fine, exact[k], COLOURS[k], "alpha² (corrected)" if not k else "")
        line(ax, fine, printed[k], COLOURS[k], "alpha (as printed)" if not k else "", "--")
        points(ax, TIMES, results["modes"][0, k], COLOURS[k], "flow" if not k else "")
    label(ax, "time", "u' W1 W2 v", "Eq. 3.15, App. A.2.3", legend=True)
    caption(figure, "From aligned weights each mode of the network follows the sigmoid toward its singular value; as printed, it "
                    "would go to the root.")
    return figure


# ------------------------------------------------------------------------------------------------ claims


def largest(r: Results, name: str) -> float:
    """Largest number of this name."""
    return float(np.max(r[name]))


def shape(form: str) -> str:
    """Name of the network that an equation is compared on: equal weights, except for the equation that needs them."""
    return "uneven_equal" if form == "equal" else f"equal_{form}"


EXACT, TIGHT = "an identity, to 1e-8", Interval(high=1e-8)
A2, A21, A22, A23 = (("App. A.2",), ("App. A.2.1",), ("App. A.2.2",), ("App. A.2.3",))
CLAIMS = (
    Claim("distance of the end of the flow from the interpolation of least norm, relative", lambda r: largest(
              r, f"least_{r.settings.start}"), TIGHT, Control("from random weights", {"start": "random"}), paper="0",
          source=EXACT, places=A2, says="Gradient flow of a linear model from zero ends at the interpolation of least norm."),
    Claim("|w| at the end over the least norm, less 1", lambda r: float(np.abs(r[f"norm_{r.settings.start}"][:, -1] - 1).max()),
          TIGHT, Control("from random weights", {"start": "random"}), paper="0", source=EXACT, places=A2,
          says="Gradient flow of a linear model from zero ends at weights of the least norm."),
    Claim("error of Eq. A.20 against the flow of a diagonal network", lambda r: largest(r, shape(r.settings.form)), TIGHT,
          (Control("one target S for all modes, as A.19 prints", {"form": "one_target"}),
           Control("from unequal weights, by their product", {"form": "equal"})), paper="exact", source=EXACT, places=A21,
          says="Eq. A.20 solves the flow of a diagonal linear network (the target S_i has lost its index in A.19).",
          reason="misprint"),
    Claim("error of Theorem 1 against the flow from unequal weights", lambda r: largest(
              r, f"uneven_{'own' if r.settings.form == 'own' else 'equal'}"), TIGHT,
          Control("Eq. A.20, by the product of the weights", {"form": "equal"}), paper="see Saxe et al.", source=EXACT,
          places=A21, own=True),
    Claim("error of Eq. 3.13 as corrected: the overlap of two stages on the flow",
          lambda r: largest(r, f"stage_{r.settings.stage}"), TIGHT,
          (Control("as printed", {"stage": "literal"}), Control("with the exponent, its sign turned", {"stage": "turned"})),
          paper="Eq. 3.13", source=f"{EXACT}; independent check 9e-16", places=A21,
          says="Eq. 3.13 gives the overlap of two stages of a diagonal linear network (printed without exponent and sign).",
          reason="misprint"),
    Claim("largest change of W1'W1 - W2 W2' along the flow, inputs not white, relative to the weights", lambda r: largest(
              r, f"drift_{r.settings.kept}"), TIGHT,
          (Control("the sum of the two", {"kept": "sum"}), Control("steps of 0.1 for the flow", {"kept": "steps"})), paper="0",
          source=f"{EXACT}; independent check 5e-15", places=A22, says="Two-layer linear networks conserve W1' W1 - W2 W2'."),
    Claim("error of Eq. 3.15 against the flow from aligned weights", lambda r: largest(r, f"mode_{r.settings.alpha}"), TIGHT,
          (Control("alpha for alpha^2, as printed", {"alpha": "printed"}), Control("from random weights", {"alpha": "random"})),
          paper="exact", source=f"{EXACT}; independent check 5e-12", places=A23,
          says="Eq. 3.15 solves the flow of a two-layer linear network from aligned weights (printed with alpha for alpha^2).",
          reason="misprint"),
    Claim("error of the solution for balanced weights that are not aligned", lambda r: largest(r, f"any_{r.settings.layers}"),
          TIGHT, Control("from weights that are not balanced", {"layers": "random"}), paper="see Refs. 70-74",
          source=EXACT, places=A23, own=True),
)
EXPERIMENT = Experiment(
    name="layerwise_app_a_2", ref=Ref("layerwise", "App. A.2"), title="what flows of linear networks find, keep and follow",
    smoke=LayerwiseAppA2Settings(seeds=(0, 1)), paper=LayerwiseAppA2Settings(seeds=tuple(range(10))), work=work, over=("seed",),
    analysis=("start", "form", "stage", "kept", "alpha", "layers"), start={"seeds": (0,)},
    quick=True, reduced="2 draws of 10", places=("App. A.2", "App. A.2.1", "App. A.2.2", "App. A.2.3"),
    protocol="exact",
    claims=CLAIMS,
    figures={"layerwise_app_a_2": draw_least, "layerwise_app_a_2_1": draw_diagonal, "layerwise_app_a_2_2": draw_kept,
             "layerwise_app_a_2_3": draw_modes})
