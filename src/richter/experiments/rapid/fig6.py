"""Figure 6 of [rapid]: with more layers the kernel aligns more with the labels, its outputs specialise more, and the effective
gamma is larger; with that gamma optimal feature evolution follows the network's alignment, or does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from richter.experiments.evolving import EvolvingNetwork, alignments, descend, images
from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.experiments.rivals import milestones
from richter.kernels import dynamics
from richter.linalg import top_eigenvalue
from richter.report.drawing import COLOURS, band, caption, label, line, matrix_panel, panels, points, styled
from richter.theory.ofe import OptimalFeatureEvolution

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RICH, LAZY = 10.0, 1.0  # what labels are multiplied by
GUESSES = ("ofe", "constant", "first")


@dataclass(frozen=True)
class RapidFig6Settings:
    """``depths``: layers of weights. ``rates``: learning rates over the largest eigenvalue of the initial kernel. ``labels``:
    the scale of labels of the networks that claims are about. ``curve`` chooses the prediction of the alignment."""

    n: int = 100
    width: int = 100
    depths: tuple[int, ...] = (2, 3, 4, 5)
    rates: tuple[float, ...] = (0.2, 0.5)
    steps: int = 20_000
    until: float = 1e-4
    recorded: int = 30
    multiples: tuple[float, ...] = (RICH, LAZY)  # of the labels; a rate for each
    seeds: tuple[int, ...] = (0,)
    labels: float = RICH
    curve: Literal["ofe", "constant", "first"] = "ofe"
    shallow: bool = False  # every network has the depth of the first


def work(t: Task[RapidFig6Settings], run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    x, labels = images("mnist", s.n, t.seed)
    y = t.multiple * labels
    net = EvolvingNetwork.drawn(x, [x.shape[1], *[s.width] * (t.depth - 1), 10], 1.0, t.seed)
    first, f0 = net.sub_kernels(), net.f
    lr = t.rate / top_eigenvalue(net.kernel().view(y.numel(), -1))
    seen: list[tuple[int, float, NDArray[Any]]] = []

    def look(step: int, loss: float) -> None:
        seen.append((step, loss, alignments(net.sub_kernels(), y).numpy()))
        run.progress(step / max(1, s.steps))

    descend(net, y, lr, s.steps, milestones(s.steps, s.recorded), look, s.until)
    last = net.sub_kernels()
    rates = np.asarray(dynamics.effective_gammas(first, last, y))
    steps = np.array([float(step) for step, *_ in seen])
    # of labels as they are, 0 and 1, and kernels in units of |K(0)|: what the paper gives
    gamma = dynamics.effective_gamma(first, last, labels, normalised=True)
    curve, theory = np.array([np.trace(A) / 10 for *_, A in seen]), evolved(first, y, rates, steps, lr, f0)
    every = np.linspace(0, len(steps) - 1, s.recorded)  # for drawing, as many for every network
    steps_, measured, predicted = (np.interp(every, np.arange(len(steps)), v) for v in (steps, curve, theory))
    errors = np.array([np.abs(guess - curve).mean() for guess in (theory, np.median(curve), curve[0])])
    return {"gamma": gamma, "steps": steps_, "loss": seen[-1][1], "last": seen[-1][0], "alignment": measured, "ofe": predicted,
            "before": seen[0][2], "after": seen[-1][2], "misfit": errors / max(1e-12, errors[1])}


def evolved(first: Tensor, y: Tensor, rates: NDArray[Any], steps: NDArray[Any], lr: float, f0: Tensor) -> NDArray[np.float64]:
    """The alignment of optimal feature evolution, mean over outputs, each with its own gamma."""
    t = torch.as_tensor(steps)
    return np.mean([np.asarray(OptimalFeatureEvolution(K, y[:, c], max(0.0, float(g)), lr, f0[:, c]).alignment(t))
                    for c, (K, g) in enumerate(zip(first, rates, strict=True))], 0)


# ------------------------------------------------------------------------------------------------ claims


def by_depth(r: Results, name: str) -> NDArray[Any]:
    """[depths, ...] of the tasks that claims are about, mean over the seeds that are there."""
    depths = r.distinct("depth")
    if r.settings.shallow:
        depths = depths[:1] * len(depths)
    return np.array([r.where(depth=depth, multiple=r.settings.labels)[name].mean(0) for depth in depths])


def diagonals(r: Results) -> NDArray[Any]:
    """The mean diagonal entry of the KSM at each depth, mean over seeds."""
    depths = r.distinct("depth")
    if r.settings.shallow:
        depths = depths[:1] * len(depths)
    return np.array([np.mean([np.trace(A / A.mean(0)) / len(A) for A in r.where(depth=d, multiple=r.settings.labels)["after"]])
                     for d in depths])


def growth(values: NDArray[Any]) -> float:
    """The smallest ratio of neighbours: above 1 it grows throughout."""
    return float((values[1:] / values[:-1]).min())


def misfit(arrays: Mapping[str, NDArray[Any]], curve: str) -> float:
    """The mean absolute error of a prediction of the alignment at recorded steps over that of the best constant, the median."""
    return float(arrays["misfit"][GUESSES.index(curve)])


def misfit_at(depth: int) -> Callable[[Results], float]:
    """Claim's number at one depth."""
    def value(r: Results) -> float:
        (_, arrays), = r.where(depth=depth, multiple=r.settings.labels)
        return misfit(arrays, r.settings.curve)
    return value


# ------------------------------------------------------------------------------------------------ pictures


@styled
def draw(results: Results) -> Figure:
    figure, axes = panels(6, across=3)
    depths = results.distinct("depth")
    for ax, multiple, title in ((axes[0], RICH, "A: alignment (lines: OFE)"), (axes[4], LAZY, "A, lazy (labels not multiplied)")):
        for colour, depth in zip(COLOURS, depths, strict=False):
            mine = results.where(depth=depth, multiple=multiple)
            band(ax, np.median(mine["steps"], 0), mine["alignment"], colour, f"{depth} layers")
            line(ax, np.median(mine["steps"], 0), np.median(mine["ofe"], 0), colour, style=":")
        label(ax, "step", "alignment A(t)", title, steps=True, legend=True)
    for ax, depth, title in ((axes[1], depths[min(1, len(depths) - 1)], "B"), (axes[2], depths[-1], "C")):
        M = np.mean([A / A.mean(0) for A in results.where(depth=depth, multiple=RICH)["after"]], 0)
        ax.set_xlabel(f"labels (1 ± {matrix_panel(ax, M - 1):.2g})")
        ax.set_ylabel("kernels of outputs")
        ax.set_title(f"{title}: KSM, {depth} layers")
    for colour, multiple, words in ((COLOURS[0], RICH, "labels times 10"), (COLOURS[1], LAZY, "labels as they are")):
        gammas = np.array([results.where(depth=d, multiple=multiple)["gamma"] for d in depths]).T
        points(axes[3], depths, gammas, colour, words)
    label(axes[3], "layers of weights", "effective gamma", "D: effective gamma", log="y", legend=True)
    for colour, multiple, words in ((COLOURS[0], RICH, "labels times 10"), (COLOURS[1], LAZY, "labels as they are")):
        errors = np.array([[misfit(a, "ofe") for _, a in results.where(depth=d, multiple=multiple)] for d in depths]).T
        points(axes[5], depths, errors, colour, words)
    line(axes[5], [depths[0], depths[-1]], [0.5, 0.5], label="half of the best constant's error")
    label(axes[5], "layers of weights", "error of OFE / best constant's", "how well OFE follows A(t)", legend=True)
    caption(figure, "Deeper networks end better aligned and more specialised, and their effective gamma is larger. Median and "
                    f"range of {len(results.distinct('seed'))} seeds.")
    return figure


SHALLOW = Control("networks of the first depth in the place of all", {"shallow": True})
CONSTANT = Control("the best constant, chosen after the fact", {"curve": "constant"})
FIRST = Control("the initial alignment", {"curve": "first"})
BAR = "independent check, 3 seeds"
LATE = {"smoke": "the one seed of smoke is the worst of five. With labels times 10 two layers are but half rich: their kernel "
                 "waits until the outputs have grown, while that of OFE moves from the start, and A(t) rises by a half only, "
                 "which a constant misses by little"}
EXPERIMENT = Experiment(
    name="rapid_fig6", ref=Ref("rapid", "Fig. 6"), title="effective gamma, alignment and specialisation grow with depth",
    smoke=RapidFig6Settings(), paper=RapidFig6Settings(steps=60_000, seeds=tuple(range(5)), recorded=40), work=work,
    over=("depth", ("multiple", "rate"), "seed"), analysis=("labels", "curve", "shallow"),
    figures={"rapid_fig6": draw}, data=("mnist",), start={"steps": 1, "seeds": (0,), "n": 20, "depths": (2,)},
    reduced="1 seed of 5, at most 20,000 steps",
    missing={"Fig. 6": "the paper's widths, number of examples and scale of labels, which it does not give"},
    protocol="unstated: widths, number of examples and scale of labels",
    claims=(
        Claim("smallest ratio of the effective gamma at one depth to that at the depth before, mean over seeds",
              lambda r: growth(by_depth(r, "gamma")), Interval(low=1 + 1e-9), SHALLOW, source=BAR, paper="grows with depth",
              says="The estimated feature learning rate gamma grows with depth."),
        Claim("effective gamma with 5 layers over that with 2, mean over seeds",
              lambda r: float(by_depth(r, "gamma")[-1] / by_depth(r, "gamma")[0]), Interval(low=4.0), SHALLOW, source=BAR,
              own=True),
        Claim("effective gamma with 5 layers over that with 2",
              lambda r: float(by_depth(r, "gamma")[-1] / by_depth(r, "gamma")[0]), Interval(low=4.0), SHALLOW, source=BAR,
              over="seed", own=True),
        Claim("smallest ratio of the KSM's mean diagonal entry at one depth to that at the depth before, mean over seeds",
              lambda r: growth(diagonals(r)), Interval(low=1 + 1e-9), SHALLOW, source=BAR, paper="more specialised when deeper",
              says="Deeper networks specialise more."),
        *(Claim(f"{depth} layers: error of OFE's alignment with the effective gamma over that of the best constant",
                misfit_at(depth), Interval(high=0.5), (CONSTANT, FIRST), source="half of the best constant's error", over="seed",
                differs=LATE if depth == 2 else "",  # type: ignore[arg-type]
                says=f"With the estimated gamma optimal feature evolution follows the alignment of {depth} layers.")
          for depth in (2, 3, 4, 5)),
    ))
