"""Figures 5, 6, 8, 9 and 10 of [nfa]: both correlations, the doubly centred term and the tangent-centred one during training, for
three spectra of the inputs and three scales of the first layer."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.experiments.training import LayerCurves, descend, error, linears, scaled
from richter.instrument.observe import measure
from richter.instrument.probe import Probe
from richter.report.drawing import COLOURS, band, caption, label, panels, styled
from richter.tasks.synthetic import chain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DECAY: dict[str, float] = {"flat": 0.0, "1/(1+k)": 1.0, "1/(1+k^2)": 2.0}
PLACES = {"Fig. 8": "flat", "Fig. 9": "1/(1+k)", "Fig. 10": "1/(1+k^2)"}
MEASURES = ("nfc", "cnfc", "dc_c_ratio", "ptk_centred_nfc", "weight_change")


@dataclass(frozen=True)
class NfaFig5Settings:
    """Two hidden layers, full-batch descent, labels of deviation 1; n, d and the width, which the paper does not give, as in
    Fig. 1. The last four say how results are read; no run depends on them."""

    n: int = 384
    d: int = 32
    rank: int = 5
    width: int = 128
    lr: float = 0.05
    steps: int = 800
    spectra: tuple[str, ...] = tuple(DECAY)
    scales: tuple[float, ...] = (1.0, 0.1, 0.01)
    seeds: tuple[int, ...] = (0, 1, 2)
    early: int = 1  # the step that is called early
    late: int = -1  # the step that is called the end; -1 is the last
    centred: Literal["cnfc", "nfc", "random"] = "cnfc"  # what is called C; random: C of weights that moved at random
    tangent: Literal["ptk_centred_nfc", "nfc"] = "ptk_centred_nfc"  # what is called the tangent-centred correlation


def inputs(s: NfaFig5Settings, decay: float, seed: int, n: int, basis: NDArray[Any]) -> Float[Tensor, "n d"]:
    """x = Q L^(1/2) z with eigenvalues 1/(1 + k^decay), k from 1; all 1 without decay."""
    k = np.arange(1, s.d + 1)
    values = 1 / (1 + k ** decay) if decay else np.ones(s.d)
    z = np.random.default_rng((seed, n)).standard_normal((n, s.d))
    return torch.from_numpy(z * np.sqrt(values) @ basis.T)


def work(t: Task[NfaFig5Settings], run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    basis = np.linalg.qr(np.random.default_rng((t.seed, 7)).standard_normal((s.d, s.d)))[0]
    x, x_test = (inputs(s, DECAY[t.spectrum], t.seed, n, basis) for n in (s.n, 1001))
    y, y_test = (chain(v, s.rank)[:, None] for v in (x, x_test))
    y, y_test = y / y.std(), y_test / y.std()
    model = scaled([s.d, s.width, s.width, 1], [t.scale, 1.0, 1.0], t.seed)
    curves = LayerCurves(model, Probe(x, y), MEASURES, linears(model)[:2], run)
    due = {0, s.steps} | {round(v) for v in np.geomspace(1, max(1, s.steps), 14)}
    losses, random = [], []

    def before(step: int) -> None:
        if step in due:
            curves.at(step)
            losses.append((error(model, x, y), error(model, x_test, y_test)))
        if step == 1:
            random.extend(moved_at_random(model, curves, t.seed))

    descend(model, x, y, torch.optim.SGD(model.parameters(), lr=s.lr), s.steps, run, before)
    return {**curves.arrays(), "losses": np.array(losses), "random": np.array(random)}


def moved_at_random(model: nn.Module, curves: LayerCurves, seed: int) -> list[float]:
    """``cnfc`` of both layers where every weight matrix moved as far as in this model, but in a direction that is drawn: what the
    correlation of any change is."""
    draw, other = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    with torch.no_grad():
        for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
            start = curves.initial[name]
            away = torch.randn(p.shape, generator=draw, dtype=p.dtype).to(p)
            q.copy_(start + away * ((p - start).norm() / away.norm()))
    snap = measure(other, curves.probe, ["cnfc"], initial=curves.initial, layers=curves.layers)
    return [snap.value("cnfc", k) for k in curves.layers]


# ------------------------------------------------------------------------------------------------ claims


def values(r: Results, name: str, step: int, layer: int) -> NDArray[np.float64]:
    """Value of each run at a step; -1 is the last step."""
    return np.array([arrays[name][-1 if step < 0 else list(arrays["steps"]).index(step), layer] for _, arrays in r])


def early(r: Results, name: str, layer: int) -> NDArray[np.float64]:
    """Values of a number at the early step, in a layer."""
    return values(r, name, r.settings.early, layer)


def late(r: Results, name: str, layer: int) -> NDArray[np.float64]:
    """Values of a number at the late step, in a layer."""
    return values(r, name, r.settings.late, layer)


def early_c(r: Results, layer: int) -> NDArray[np.float64]:
    """C at the early step, or the quantity that a control puts in its place."""
    return r["random"][:, layer] if r.settings.centred == "random" else early(r, r.settings.centred, layer)


def above(r: Results) -> float:
    """The smallest of (early C - UC at initialisation) over runs and layers."""
    return float(min((early_c(r, k) - values(r, "nfc", 0, k)).min() for k in (0, 1)))


def spread(r: Results) -> float:
    """Range of the early C over scales, the larger of both layers."""
    return float(max(np.ptp(early_c(r, k)) for k in (0, 1)))


def dc_shares(r: Results) -> float:
    """Worse of two numbers of DC/C in layer 1: its largest early value, and one less its smallest value at the end."""
    return float(max(early(r, "dc_c_ratio", 0).max(), 1 - late(r, "dc_c_ratio", 0).min()))


def fall(r: Results) -> float:
    """The largest (end - early) of the tangent-centred correlation, over runs and layers."""
    name = r.settings.tangent
    return float(max((late(r, name, k) - early(r, name, k)).max() for k in (0, 1)))


def small(r: Results) -> Results:
    """Results of runs with an initial scale of a tenth or less."""
    kept = [(t, arrays) for t, arrays in r if t.scale <= 0.1]
    return Results(r.settings, [t for t, _ in kept], [arrays for _, arrays in kept])


def gain(r: Results) -> float:
    """Test loss at the smallest scale less that at the largest, at the end."""
    small, large = sorted(r.distinct("scale"))[::len(r.distinct("scale")) - 1]
    return float((late(r.where(scale=small), "losses", 1) - late(r.where(scale=large), "losses", 1)).mean())


LATE = Control("the end of training called early", {"early": 800})
FIRST = Control("the first step called the end", {"late": 1})
UNCENTRED = Control("the uncentred correlation called C", {"centred": "nfc"})
RANDOM = Control("C of weights that moved as far in a random direction", {"centred": "random"})
AT_THE_END = Control("UC at the end of training", {"early": 800, "centred": "nfc"})
BAR = "independent check of the recipe, 9 settings; for the median over at least 10 seeds"
TEXT = "the paper's text, for nine seeds of ten"


def within(spectrum: str, value: Callable[[Results], float]) -> Callable[[Results], float]:
    """Claim's number for one spectrum."""
    return lambda r: value(r.where(spectrum=spectrum))


def claims(place: str, spectrum: str, worse: str = "") -> tuple[Claim, ...]:
    """Claims of Figs. 8 to 10, one spectrum each. Every number is the worst over the scales of one seed. ``worse`` says why a
    small scale is not the better one."""
    mine: dict[str, Any] = {"places": (place,), "over": "seed"}
    where = f"inputs {spectrum}"
    mean = "the mean of three seeds, after the worst of them had failed"
    return (
        Claim(f"{where}: C of layer 1 after one step, smallest over scales", within(spectrum, lambda r: early_c(r, 0).min()),
              Interval(low=0.70), (UNCENTRED, RANDOM), source=BAR, was=f">= 0.70 for {mean}: .713, then .787", **mine,
              says=f"The centred correlation is high from the first step at every initial scale (layer 1, {where})."),
        Claim(f"{where}: C of layer 2 after one step, smallest over scales", within(spectrum, lambda r: early_c(r, 1).min()),
              Interval(low=0.93), (UNCENTRED, RANDOM), source=BAR, was=f">= 0.93 for {mean}: .927, then .960", **mine,
              says=f"The centred correlation is high from the first step at every initial scale (layer 2, {where})."),
        Claim(f"{where}: C after one step less UC at initialisation, smallest over scales and layers", within(spectrum, above),
              Interval(low=0.25), (UNCENTRED, RANDOM), source=BAR, was=f">= 0.25 for {mean}: .236, then .332", **mine, own=True),
        Claim(f"{where}: C after one step is above UC at initialisation at every scale and layer", within(spectrum, above),
              Interval(low=0.0), RANDOM, paper="above", source=TEXT, by="each", **mine,
              says=f"The centred correlation is above the initial uncentred one at every scale and layer ({where})."),
        Claim(f"{where}: spread of C after one step over scales, the worse layer", within(spectrum, spread), Interval(high=0.05),
              AT_THE_END, source=BAR, **mine,
              says=f"The centred correlation is more robust to the initial scale than the uncentred one ({where})."),
        Claim(f"{where}: final UC of layer 1 at scales <= 0.1, smallest",
              within(spectrum, lambda r: late(small(r), "nfc", 0).min()), Interval(low=0.88), FIRST, source=BAR, **mine,
              says=f"The uncentred correlation is low at first and becomes high through training ({where})."),
        Claim(f"{where}: final test loss of the smallest scale less that of the largest", within(spectrum, gain),
              Interval(high=-0.01), FIRST, paper="below 0", source="the paper's text, App. G: visibly below", differs=worse,
              was="<= 0 for the worst spectrum's mean over seeds, .046, marked as differing for 1/(1+k^2) alone", **mine,
              says=f"The test loss improves with smaller initial weights ({where})."),
    )


WORSE = {  # by place
    "Fig. 9": "after the paper's 800 steps the small scale has not converged (training loss .078 against .013); after 8,000 it "
              "is the better one (.220 against .310, and .164 against .234, in two seeds)",
    "Fig. 10": "after 800 steps the small scale has not converged (training loss .132 against .063); after 8,000 it is still the "
               "worse one (.180 against .165, and .127 against .113, in two seeds)"}
FIG5: dict[str, Any] = {"places": ("Fig. 5",), "over": "seed"}
FIG6: dict[str, Any] = {"places": ("Fig. 6",), "over": "seed"}
CLAIMS = (
    Claim("DC/C of layer 1 after one step, largest over 9 settings", lambda r: early(r, "dc_c_ratio", 0).max(),
          Interval(high=0.06), LATE, source=BAR,
          was="<= 0.06 for the mean of three seeds, after the worst of them had failed: .106, then .073", **FIG5,
          differs={"smoke": "seeds differ by a factor of ten at the smallest scale: of these three two are above, of ten four"},
          says="The double-centred term is not significant early in training."),
    Claim("DC/C of layer 1 at the end, smallest over 9 settings", lambda r: late(r, "dc_c_ratio", 0).min(), Interval(low=0.85),
          FIRST, source=BAR, **FIG5, says="The double-centred term is relevant late in training."),
    Claim("DC/C of layer 1 is the smaller part early and the larger part at the end, in all 9 settings", dc_shares,
          Interval(high=0.5), (LATE, FIRST), paper="not significant early, relevant later", source=TEXT, by="each", **FIG5,
          says="The double-centred term is not significant early in training and relevant late."),
    Claim("change of the tangent-centred correlation, largest over 9 settings and layers", fall, Interval(high=-0.15),
          (LATE, Control("UC in its place", {"tangent": "nfc"})), source=BAR, **FIG6,
          says="The tangent-kernel-centred correlation decreases in training."),
    Claim("the tangent-centred correlation falls in all 9 settings and both layers", fall, Interval(high=-1e-6),
          (LATE, Control("UC in its place", {"tangent": "nfc"})), paper="decreases", source=TEXT, by="each", **FIG6,
          says="The tangent-kernel-centred correlation decreases in training, in all settings."),
    *(claim for place, spectrum in PLACES.items() for claim in claims(place, spectrum, WORSE.get(place, ""))),
)


# ------------------------------------------------------------------------------------------------ figures


def curves(ax: Axes, r: Results, name: str, column: int, relative: bool = False) -> None:
    """A curve for each scale: the median and the range over seeds; ``relative`` to the largest value of a run."""
    for i, scale in enumerate(sorted(r.distinct("scale"), reverse=True)):
        chosen = r.where(scale=scale)
        rows = chosen[name][:, :, column]
        band(ax, chosen["steps"][0], rows / rows.max(1, keepdims=True) if relative else rows, COLOURS[i], f"scale {scale:g}")


def by_spectrum(name: str, axis: str, sentence: str) -> Callable[[Results], Figure]:
    """Function that draws a number: layers in rows, spectra in columns."""
    @styled
    def drawn(results: Results) -> Figure:
        spectra = results.distinct("spectrum")
        figure, axes = panels(2 * len(spectra), across=len(spectra))
        for ax, (layer, spectrum) in zip(axes, itertools.product((0, 1), spectra), strict=True):
            curves(ax, results.where(spectrum=spectrum), name, layer)
            label(ax, "step", axis, f"layer {layer + 1}, variances {spectrum}", steps=True, legend=ax is axes[0])
        caption(figure, f"{sentence} Median and range of {len(results.distinct('seed'))} seeds.")
        return figure
    return drawn


def at_spectrum(spectrum: str) -> Callable[[Results], Figure]:
    """UC, C and both losses, each over its largest value, as the paper has them; a row for each layer."""
    @styled
    def drawn(results: Results) -> Figure:
        chosen = results.where(spectrum=spectrum)
        figure, axes = panels(8, across=4)
        for layer in (0, 1):
            for ax, name, words in zip(axes[4 * layer:], ("nfc", "cnfc"), ("UC-NFC", "C-NFC"), strict=False):
                curves(ax, chosen, name, layer)
                label(ax, "step", words, f"{words}, layer {layer + 1}", steps=True, legend=ax is axes[1])
            for ax, k, words in zip(axes[4 * layer + 2:], (0, 1), ("train", "test"), strict=False):
                curves(ax, chosen, "losses", k, relative=True)
                label(ax, "step", f"{words} loss / its largest", f"{words} loss", steps=True)
        for ax in axes:
            ax.set_ylim(0, 1.03)
        caption(figure, f"Input variances {spectrum}: C is high from the first step on, whatever the scale; UC follows where "
                        f"the scale "
                        f"is small. Median and range of {len(chosen.distinct('seed'))} seeds.")
        return figure
    return drawn


SIZES = "the paper's n, d and width, which it does not give: 384, 32 and 128, those of Fig. 1"
EXPERIMENT = Experiment(
    name="nfa_fig5", ref=Ref("nfa", "Fig. 5"), places=("Fig. 5", "Fig. 6", *PLACES),
    title="the centred correlation is high from the first step, whatever the scale",
    smoke=NfaFig5Settings(), paper=NfaFig5Settings(seeds=(*range(5), *range(100, 105))), start={"steps": 1},
    over=("spectrum", "scale", "seed"), analysis=("early", "late", "centred", "tangent"), work=work,
    reduced="3 seeds in the place of 10", missing=dict.fromkeys(("Fig. 5", "Fig. 6", *PLACES), SIZES),
    protocol="unstated: n, d and width; here 384, 32 and 128, those of Fig. 1",
    claims=CLAIMS,
    figures={"nfa_fig5": by_spectrum(
                 "dc_c_ratio", "DC / C", "The doubly centred term is a small share of the centred one early, and most of it "
                                         "later."),
             "nfa_fig6": by_spectrum(
                 "ptk_centred_nfc", "PTK-centred NFC", "Initial weights lose their alignment with the change of tangent "
                                                       "features."),
             **{f"nfa_fig{place[5:]}": at_spectrum(spectrum) for place, spectrum in PLACES.items()}})
