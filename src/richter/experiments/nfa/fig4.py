"""Figures 4 and 11 of [nfa]: limiting the speed of layers (SLO) makes feature learning independent of the initial scale."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from richter.controls import SLO
from richter.core.likeness import cosine
from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.experiments.training import LayerCurves, descend, error, linears, scaled
from richter.instrument.probe import Probe
from richter.report.drawing import COLOURS, band, caption, label, matrix_panel, panels, styled
from richter.tasks import chain_monomial

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Method = Literal["gd", "slo", "equal", "second"]
SPEEDS: dict[Method, tuple[float, ...]] = {
    "slo": (500.0, 0.002, 0.002), "equal": (1.0, 1.0, 1.0), "second": (0.002, 500.0, 0.002)}  # of the three weight matrices


@dataclass(frozen=True)
class NfaFig4Settings:
    """The read-out starts 100 times smaller (the paper prints 'divided by 0.01', which does not train). Beside the paper's speeds
    two rivals: equal ones, and speed for the second layer."""

    n: int = 256
    d: int = 32
    rank: int = 5
    width: int = 256
    steps: int = 600
    eps: float = 0.1
    scales: tuple[float, ...] = (1.0, 0.1, 0.01, 0.001)
    rates: tuple[float, ...] = (0.03, 0.1, 0.2, 0.4)
    readout: float = 0.01
    seeds: tuple[int, ...] = (0,)
    limited: Method = "slo"  # the runs that are called SLO
    plain: Method = "gd"  # the runs that are called descent
    methods: ClassVar = ("gd", *SPEEDS)


def work(t: Task[NfaFig4Settings], run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    data = chain_monomial(s.n, s.d, s.rank, seed=t.seed, standardise=True, dtype=torch.float64)
    model = scaled([s.d, s.width, s.width, 1], [t.scale, 1.0, s.readout], t.seed)
    if t.method == "gd":
        optimiser: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=t.rate)
    else:
        groups = [{"params": [p], "speed": speed} for p, speed in zip(model.parameters(), SPEEDS[t.method], strict=True)]
        optimiser = SLO(groups, lr=t.rate, eps=s.eps)
    curves = LayerCurves(model, Probe(data.x, data.y), ("nfc", "cnfc", "c_uc_ratio"), linears(model)[:1], run, matrices=s.d)
    due = {0, s.steps} | {round(v) for v in np.geomspace(1, max(1, s.steps), 12)}
    losses = []

    def before(step: int) -> None:
        if step in due:
            curves.at(step)
            losses.append(error(model, data.x, data.y))

    descend(model, data.x, data.y, optimiser, s.steps, run, before)
    last, egop = curves.snapshots[-1].arrays, data.egop.numpy()
    nfm, agop = last["0", "nfm"].astype(float), last["0", "agop"].astype(float)
    return {**curves.arrays(), "losses": np.array(losses), "nfm": nfm, "agop": agop, "nfm_egop": cosine(nfm, egop),
            "agop_egop": cosine(agop, egop), "test": error(model, data.x_test, data.y_test)}


# ------------------------------------------------------------------------------------------------ claims


def last(r: Results, name: str, method: Method, scales: Callable[[float], bool] = lambda s: True) -> NDArray[np.float64]:
    """The final value of each run with these scales."""
    return np.array([arrays[name][-1, 0] if np.ndim(arrays[name]) else arrays[name]
                     for t, arrays in r.where(method=method) if scales(t.scale)])


def limited(r: Results, name: str, scales: Callable[[float], bool] = lambda s: True) -> NDArray[np.float64]:
    return last(r, name, r.settings.limited, scales)


def plain(r: Results, name: str, scales: Callable[[float], bool] = lambda s: True) -> NDArray[np.float64]:
    return last(r, name, r.settings.plain, scales)


def small(scale: float) -> bool:
    """Return whether a scale counts as small."""
    return scale <= 0.01


def largest(scale: float) -> bool:
    """Return whether a scale is the largest."""
    return scale == 1.0


GD = Control("plain descent called SLO", {"limited": "gd"})
EQUAL = Control("equal speeds", {"limited": "equal"})
SECOND = Control("speed for the second layer", {"limited": "second"})
LIMITED = Control("SLO called descent", {"plain": "slo"})
UNTRAINED = Control("untrained networks", {"steps": 0})
RIVALS = (GD, EQUAL, SECOND)
BAR = "independent check of the recipe, 3 seeds"
FIG4: dict[str, Any] = {"places": ("Fig. 4",), "over": "seed", "source": BAR}
FIG11: dict[str, Any] = {"places": ("Fig. 11",), "over": "seed"}
CLAIMS = (
    Claim("SLO: smallest UC over scales", lambda r: limited(r, "nfc").min(), Interval(low=0.90), RIVALS, **FIG4,
          says="SLO gives a high UC-NFC at every initial scale."),
    Claim("SLO: smallest C/UC over scales", lambda r: limited(r, "c_uc_ratio").min(), Interval(low=0.95), RIVALS, **FIG4,
          says="SLO brings the ratio of C-NFC to UC-NFC close to 1 at every initial scale.", reason="misprint"),
    Claim("SLO: spread of UC over scales", lambda r: float(np.ptp(limited(r, "nfc"))), Interval(high=0.04), RIVALS, **FIG4,
          says="SLO makes the UC-NFC independent of the initial scale.", reason="misprint"),
    Claim("descent at scale 1: UC", lambda r: plain(r, "nfc", largest)[0], Interval(0.50, 0.70), LIMITED, **FIG4,
          says="With plain descent and a large initial scale the UC-NFC is low.", reason="misprint"),
    Claim("descent at scale 1: C/UC", lambda r: plain(r, "c_uc_ratio", largest)[0], Interval(high=0.05), LIMITED, **FIG4,
          says="With plain descent and a large initial scale the C-NFC is a small part of the UC-NFC.", reason="misprint"),
    Claim("descent at scales <= 0.01: smallest UC", lambda r: plain(r, "nfc", small).min(), Interval(low=0.92), UNTRAINED,
          **FIG4, says="With plain descent the UC-NFC is high at small initial scales.",
          reason="misprint"),
    Claim("descent at scales <= 0.01: smallest C/UC", lambda r: plain(r, "c_uc_ratio", small).min(), Interval(low=0.95),
          UNTRAINED, **FIG4, says="With plain descent the C-NFC dominates the UC-NFC at small initial scales.",
          reason="misprint"),
    Claim("correlation of NFM and EGOP at scale 1: SLO less descent",
          lambda r: (limited(r, "nfm_egop", largest) - last(r, "nfm_egop", "gd", largest))[0], Interval(low=0.25), RIVALS,
          source=BAR, **FIG11, says="At a large initial scale SLO gives better features than plain descent.",
          reason="misprint"),
    Claim("SLO: spread over scales of the correlation of NFM and EGOP", lambda r: float(np.ptp(limited(r, "nfm_egop"))),
          Interval(high=0.1), RIVALS, paper="the features become invariant to the initial scale",
          source="independent check: .797 to .862 over scales, against .364 to .866 of descent", **FIG11,
          says="With SLO the features become invariant to the initial scale.", reason="misprint"),
    Claim("descent: correlation of NFM and EGOP at scales <= 0.01 less that at scale 1",
          lambda r: plain(r, "nfm_egop", small).min() - plain(r, "nfm_egop", largest)[0], Interval(low=0.25), LIMITED,
          paper="the quality of the NFM falls as the scale grows", source="independent check: .860 against .364", **FIG11,
          says="With plain descent the quality of the NFM falls as the initial scale grows.", reason="misprint"),
)

# ------------------------------------------------------------------------------------------------ figures

TITLES: dict[str, str] = {"gd": "descent", "slo": "SLO", "equal": "equal speeds", "second": "speed for layer 2"}


@styled
def draw_curves(results: Results) -> Figure:
    """UC, C, their ratio and the loss by step (A: descent, B: SLO), and the matrices at scale 1 (C, D)."""
    figure, axes = panels(12, across=4)
    names = {"nfc": "UC-NFC", "cnfc": "C-NFC", "c_uc_ratio": "C / UC", "losses": "training loss"}
    for row, (letter, method) in enumerate((("A", "gd"), ("B", "slo"))):
        for ax, (name, words) in zip(axes[4 * row:], names.items(), strict=False):
            for i, scale in enumerate(results.distinct("scale")):
                chosen = results.where(method=method, scale=scale)
                band(ax, chosen["steps"][0], chosen[name].reshape(len(chosen), -1), COLOURS[i], f"scale {scale:g}")
            label(ax, "step", words, f"{letter}: {TITLES[method]}", steps=True, legend=ax is axes[0])
    for k, method in enumerate(("gd", "slo")):
        arrays = next(a for _, a in results.where(method=method, scale=results.distinct("scale")[0]))
        for j, name in enumerate(("nfm", "agop")):
            ax = axes[8 + 2 * k + j]
            top = matrix_panel(ax, arrays[name])
            label(ax, f"input (±{top:.2g})", "input", f"{'CD'[k]}: {TITLES[method]}, {name.upper()}")
    caption(figure, "Descent (A) learns features from small initial scales only; with speed for the first layer (B) all "
                    "scales end "
                    "alike, and the features of scale 1 are clean (D beside C). Median and range of "
                    f"{len(results.distinct('seed'))} seeds.")
    return figure


@styled
def draw_matrices(results: Results) -> Figure:
    """Figure of the final NFM for each scale."""
    scales = results.distinct("scale")
    figure, axes = panels(2 * len(scales), across=len(scales))
    for i, (method, scale) in enumerate(itertools.product(("gd", "slo"), scales)):
        top = matrix_panel(axes[i], next(a for _, a in results.where(method=method, scale=scale))["nfm"])
        label(axes[i], f"input (±{top:.2g})", "input", f"{TITLES[method]}, scale {scale:g}")
    caption(figure, "The NFM at the end: descent loses the task's five coordinates as the initial scale grows, SLO keeps "
                    "them at every "
                    "scale. First seed, each matrix on its own scale of colours.")
    return figure


EXPERIMENT = Experiment(
    name="nfa_fig4", ref=Ref("nfa", "Fig. 4"), places=("Fig. 4", "Fig. 11"),
    title="limited speeds make feature learning independent of the initial scale",
    smoke=NfaFig4Settings(), paper=NfaFig4Settings(seeds=tuple(range(6))), start={"steps": 1},
    over=("method", ("scale", "rate"), "seed"), analysis=("limited", "plain"), work=work,
    figures={"nfa_fig4": draw_curves, "nfa_fig11": draw_matrices}, reduced="one seed in the place of 6",
    protocol="exact",
    claims=CLAIMS)
