"""Figures 2D and 15B of [nfa]: both correlations in the query, key and value maps of a small GPT on Shakespeare's characters, its
loss and how far its weights move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.experiments.rivals import Matrix, Rivals, milestones, weight
from richter.experiments.training import LayerCurves
from richter.instrument.probe import Probe
from richter.kernels import ptk_covariance
from richter.models import GPT
from richter.report.drawing import COLOURS, band, caption, label, panels, styled
from richter.tasks import shakespeare

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OUTPUTS = 32  # random combinations of all logits, for the K of rivals


@dataclass(frozen=True)
class NfaFig2dSettings:
    """Three attention layers, no dropout, Adam without weight decay at 5e-3, as in the paper. ``centred`` chooses the result
    that claims read as C; its rivals are in the same runs."""

    context: int = 256
    d: int = 384
    heads: int = 6
    depth: int = 3
    batch: int = 64
    lr: float = 5e-3
    steps: int = 5000
    probe: int = 16
    targets: Literal["next", "shuffled"] = "next"  # what is to be predicted: the next character, or one of elsewhere
    centred: Literal["cnfc", "rotated", "gaussian"] = "cnfc"
    seeds: tuple[int, ...] = (0,)


class MapRivals(Rivals):
    """Rivals of the three maps of a fused layer: K from random combinations of all logits."""

    def __init__(self, model: GPT, ids: Tensor, seed: int) -> None:
        outputs = ids.shape[1] * model.head.out_features
        R = torch.randn(outputs, OUTPUTS, generator=torch.Generator().manual_seed(seed))
        maps = [f"blocks.{i}.qkv.{kind}" for i in range(len(model.blocks)) for kind in "qkv"]
        super().__init__(model, ids, maps, seed, lambda layer: np.asarray(
            ptk_covariance(model, ids, layer, output=lambda f: f.flatten(1) @ R), dtype=float))

    def weight(self, layer: str) -> Matrix:
        """Weight of a map."""
        fused, _, kind = layer.rpartition(".")
        return np.split(weight(self.model, fused), 3)["qkv".index(kind)]


def work(t: Task[NfaFig2dSettings], run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    text = shakespeare()
    draw = torch.Generator().manual_seed(t.seed)
    model = GPT(len(text.vocabulary), s.context, s.d, s.depth, s.heads, seed=t.seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=s.lr)
    ids, after = text.batch(s.probe, s.context, draw)
    curves = LayerCurves(model, Probe(ids, after), ("nfc", "cnfc", "weight_change"), ["blocks.*.qkv.*"], run)
    rivals, due = MapRivals(model, ids, t.seed), {1} | milestones(s.steps, 5)
    for step in range(s.steps + 1):
        if step in due:
            curves.at(step)
        if step in (1, s.steps):
            rivals.at(step)
        if step == s.steps:
            break
        x, y = text.batch(s.batch, s.context, draw)
        if s.targets == "shuffled":
            y = y.flatten()[torch.randperm(y.numel(), generator=draw)].view_as(y)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        run.scalars(step + 1, loss=loss.item())
        run.progress((step + 1) / s.steps)
    return {**curves.arrays(), **rivals.arrays(), "pairs": pair_entropy(text.ids.numpy()),
            "loss": run.run.scalars("loss").value if s.steps else np.array([])}


def pair_entropy(ids: NDArray[np.int64]) -> float:
    """The loss of a table that knows how often each character follows each other one in this text: the mean of -log p(b | a)."""
    counts = np.zeros((ids.max() + 1, ids.max() + 1))
    np.add.at(counts, (ids[:-1], ids[1:]), 1)
    seen = counts > 0
    return float(-(counts * np.log(np.where(seen, counts, 1) / counts.sum(1, keepdims=True).clip(1)))[seen].sum() / counts.sum())


FIRST, LAST = 0, -1  # of the two steps at which there are rivals; "steps" begins with the untrained network


def correlations(r: Results, name: str, when: int) -> NDArray[np.float64]:
    """Correlations of each map of each block, after the first or the last step."""
    return np.asarray(r[name][0][when if name in ("rotated", "gaussian") else 1 if when == FIRST else LAST])


def gaps(r: Results, when: int) -> NDArray[np.float64]:
    """Difference C - UC of each map at one of the measured times."""
    return correlations(r, r.settings.centred, when) - correlations(r, "nfc", when)


def over_any_covariance(r: Results, when: int) -> float:
    """C less what it is with another K of the same spectrum."""
    return float((correlations(r, r.settings.centred, when) - correlations(r, "rotated", when)).mean())


def final_loss(r: Results) -> float:
    """Mean loss of the last 20 steps."""
    return float(r["loss"][0][-20:].mean())


@styled
def draw(results: Results) -> Figure:
    """A row for each block, a column for q, k and v."""
    maps = results["nfc"].shape[2]
    figure, axes = panels(maps, across=3)
    for i, ax in enumerate(axes):
        for k, (name, title) in enumerate((("nfc", "UC"), ("cnfc", "C"))):
            band(ax, results["steps"][0], results[name][:, :, i], COLOURS[k], title)
        label(ax, "step", "correlation", f"block {i // 3 + 1}, {'qkv'[i % 3]}", steps=True, legend=i == 0)
        ax.set_ylim(0, 1.02)
    caption(figure, "The centred correlation C starts far above the uncentred one UC in every query, key and value map; then "
                    "they come together.")
    return figure


@styled
def draw_movement(results: Results) -> Figure:
    """Panel B of Figure 15: the loss, and how far each map moved."""
    maps = results["weight_change"].shape[2]
    figure, axes = panels(1 + maps // 3, across=2)
    loss = results["loss"]
    band(axes[0], np.arange(1, loss.shape[1] + 1), loss, COLOURS[6], "training loss")
    axes[0].axhline(float(results["pairs"][0]), color=COLOURS[1], linestyle="--", linewidth=1, label="a table of character pairs")
    label(axes[0], "step", "cross-entropy", "B: loss of the GPT", legend=True)
    for block, ax in enumerate(axes[1:]):
        for k in range(3):
            band(ax, results["steps"][0], results["weight_change"][:, :, 3 * block + k], COLOURS[k], "qkv"[k])
        label(ax, "step", "|W - W0| / |W|", f"B: movement in block {block + 1}", steps=True, legend=True)
    caption(figure, "The loss falls while the weights of every map move by about their own size.")
    return figure


SHUFFLED = Control("shuffled next characters, one seed", {"targets": "shuffled", "seeds": (0,)})
UNTRAINED = Control("an untrained network, one seed", {"steps": 0, "seeds": (0,)})
GAUSSIAN = Control("a Gaussian movement in the place of W - W0", {"centred": "gaussian"})
ROTATED = Control("K's eigenvectors drawn anew", {"centred": "rotated"})
ABOVE = Interval(low=1e-9)  # a rival that is compared with itself gives 0
TEXT = "the paper's text, Sec. 3"
LACKS = "150 of 5,000 steps of 12 windows of 64 characters for 64 of 256; the text is the same author's, not the same file"
EXPERIMENT = Experiment(
    name="nfa_fig2d", ref=Ref("nfa", "Fig. 2D"), places=("Fig. 2D", "Fig. 15"),
    title="both correlations in the attention maps of a small GPT",
    smoke=NfaFig2dSettings(context=32, d=64, heads=4, batch=32, steps=300, seeds=(0, 1, 2)),
    paper=NfaFig2dSettings(context=64, batch=12, steps=150, probe=8),
    over=("seed",), analysis=("centred",), work=work, data=("shakespeare",),
    figures={"nfa_fig2d": draw, "nfa_fig15_b": draw_movement}, start={"steps": 1, "probe": 2, "context": 16},
    reduced="width 64, 32 characters, 300 steps, correlations from 64 random outputs; the text is the same author's, not "
            "the same file",
    missing={"Fig. 2D": LACKS, "Fig. 15": f"panel B: {LACKS}"},
    protocol="reduced: one seed, 150 of 5,000 steps, 64 of 256 characters",
    claims=(
        Claim("C - UC after one step, mean over q, k, v and blocks (shuffled characters too)",
              lambda r: gaps(r, FIRST).mean(), Interval(low=0.0), GAUSSIAN,
              paper="above 0", source=TEXT, places=("Fig. 2D",), over="seed", by="mean",
              says="In the attention maps of a small GPT the centred correlation is above the uncentred one early in training."),
        Claim("C - UC at the end, mean over q, k, v and blocks (shuffled characters too)",
              lambda r: gaps(r, LAST).mean(), Interval(low=0.0), GAUSSIAN,
              paper="above 0", source=TEXT, places=("Fig. 2D",), over="seed", by="mean",
              says="In the attention maps of a small GPT the centred correlation is above the uncentred one at the end."),
        *(Claim(f"C {when} less C with K's eigenvectors drawn anew, mean over q, k, v and blocks (shuffled characters too)",
                partial(over_any_covariance, when=step), ABOVE, (ROTATED, GAUSSIAN), source="the paper's own rival in Fig. 1",
                places=("Fig. 2D",), over="seed", by="mean", own=True,
                rival="K's eigenvectors drawn anew") for step, when in ((FIRST, "after one step"), (LAST, "at the end"))),
        Claim("loss of the last 20 steps over that of a table of character pairs", lambda r: final_loss(r) / float(r["pairs"][0]),
              Interval(high=1.0), SHUFFLED, source="the best simple rival: what follows each character, counted in the text",
              differs={"paper": "150 of 5,000 steps of 12 windows; at smoke scale 300 steps of a narrower network are enough"},
              places=("Fig. 15",), over="seed", by="mean", says="The loss of the small GPT on Shakespeare falls."),
        Claim("smallest movement of a map's weights (shuffled characters too)",
              lambda r: float(r["weight_change"][0, -1].min()), Interval(low=0.1), UNTRAINED,
              source="the paper's text, Sec. 3: weights move significantly; a tenth of their size is asked",
              places=("Fig. 15",), over="seed", by="mean",
              says="The weights of the small GPT move significantly from their initial values."),
    ))
