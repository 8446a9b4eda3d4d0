"""Heads of linear attention, trained on contexts by online descent, learn large principal components first.  [agf, Sec. 5]"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike

from richter.experiments.agf.attention import eigenvalues, long_levels
from richter.experiments.agf.staircases import Numbers, crossings, draw_staircase, plateaus, relative_error
from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.report.drawing import COLOURS, band, caption, label, panels, styled
from richter.theory import agf

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class AgfHeadsSettings:
    """Four components, 32 examples in a context and five heads, as in the paper's code. Heads start larger and batches are
    smaller than there (1e-3 and 8,192), to need fewer steps, and the rate is 0.02 in place of 0.01."""

    d: int = 4
    length: int = 32
    heads: int = 5
    alpha: float = 1e-2
    batch: int = 1_024
    lr: float = 0.02
    steps: int = 6_000
    decay: float = 1.0  # eigenvalues ~ i^-decay
    levels: Literal["agf", "long"] = "agf"  # as if contexts were infinitely long
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


def work(t: Task[AgfHeadsSettings], run: Writer) -> Mapping[str, ArrayLike]:
    """The population's loss of the heads, and what they have learned of each component, at 300 steps."""
    s = t.settings
    lam = torch.from_numpy(eigenvalues(s.d, s.decay))
    draw = torch.Generator().manual_seed(t.seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    v, k, q = s.alpha * normal(s.heads), s.alpha * normal(s.heads, s.d), s.alpha * normal(s.heads, s.d)
    E = torch.diag(s.length * (s.length + 1) * lam**2 + s.length * lam.sum() * lam)
    every = max(1, s.steps // 300)
    losses, modes = list[float](), list[Numbers]()
    for step in range(s.steps + 1):
        if step % every == 0:
            M = torch.einsum("h,hi,hj->ij", v, k, q)
            losses.append(float(lam.sum() - 2 * s.length * (lam**2 * M.diagonal()).sum() + (M * (E @ M) * lam).sum()) / 2)
            modes.append(M.diagonal().numpy().copy())
            run.progress(step / s.steps)
        x = normal(s.batch, s.length + 1, s.d) * lam.sqrt()
        y = torch.einsum("bnd,bd->bn", x, normal(s.batch, s.d))
        context, query = torch.einsum("bn,bnd->bd", y[:, :-1], x[:, :-1]), x[:, -1]
        a, b = context @ k.T, query @ q.T  # [b, h]
        r = (y[:, -1] - (a * b) @ v)[:, None] / s.batch
        v, k, q = v + s.lr * (r * a * b).sum(0), k + s.lr * (r * b * v).T @ context, q + s.lr * (r * a * v).T @ query
    theory = agf.attention(lam.numpy(), s.length)
    return {"losses": losses, "modes": modes, "steps": np.arange(0, s.steps + 1, every), "levels_agf": theory.levels,
            "levels_long": np.concatenate([theory.levels[:1], long_levels(lam.numpy())]), "values": theory.values}


def ordered(r: Results) -> float:
    """The share of pairs of components of which the heads have half of the larger one first."""
    (modes,), (values,) = r["modes"], r["values"]
    half = [np.argmax(m >= v / 2) if m.max() >= v / 2 else len(m) for m, v in zip(modes.T, values, strict=True)]
    return float(np.mean([half[i] < half[j] for i in range(len(half)) for j in range(i + 1, len(half))]))


def jumps(one: Mapping[str, Numbers]) -> Numbers:
    """Steps at which the loss crosses the levels of the algorithm."""
    return crossings(one["steps"], one["losses"], one["levels_agf"])


def level_error(r: Results) -> float:
    """The largest relative error of a level between jumps, and at the end."""
    ((_, one),) = r
    return float(relative_error(one[f"levels_{r.settings.levels}"][1:], plateaus(one["steps"], one["losses"], jumps(one))).max())


def value_error(r: Results) -> float:
    """The largest relative error of what is learned of a component; at the end, as the mean of the last tenth."""
    modes = r["modes"][:, -len(r["steps"][0]) // 10:].mean(1)
    return float(relative_error(r["values"] if r.settings.levels == "agf" else 1 / (33 * eigenvalues(r.settings.d)), modes).max())


@styled
def draw(results: Results) -> Figure:
    figure, (left, right) = panels(2, across=2)
    _, one = next(iter(results))
    draw_staircase(left, one["steps"], one["losses"], jumps(one), one["levels_agf"], "trained heads", "levels of the theory")
    label(left, "step", "loss", "one training", legend=True)
    for i in range(results.settings.d):
        band(right, one["steps"], results["modes"][:, :, i] / results["values"][:, None, i], COLOURS[i], f"component {i + 1}")
    label(right, "step", "learned / predicted", f"{len(results)} trainings", legend=True)
    caption(figure, "Trained on contexts, heads learn principal components one after the other, the largest first, and the loss "
                    "stays at the levels of the closed form in between. Median and range of seeds on the right.")
    return figure


LONG = Control("as if contexts were infinitely long", {"levels": "long"})
EXPERIMENT = Experiment(
    name="agf_heads", ref=Ref("agf", "Sec. 5"), title="trained linear attention learns principal components in their order",
    smoke=AgfHeadsSettings(seeds=(0,), steps=4_000), paper=AgfHeadsSettings(), over=("seed",), analysis=("levels",), work=work,
    figures={"agf_heads": draw},
    start={"steps": 1}, reduced="one training of five, of 4,000 steps",
    missing={"Sec. 5": "heads start from 1e-2 and see batches of 1,024 contexts; the paper's code has 1e-3 and 8,192"},
    protocol="reduced: 1,024 of 8,192 contexts in a batch, initial weights of 1e-2 for 1e-3",
    claims=(
        Claim("share of pairs of components that are learned in the order of their eigenvalues", ordered, Interval(low=0.99),
              Control("all eigenvalues equal", {"decay": 0.0}), paper="all", source="the paper's result", over="seed",
              says="Trained linear attention learns the principal components of its inputs in the order of their eigenvalues."),
        Claim("largest relative error of a level between jumps, and at the end", level_error, Interval(high=0.02), LONG,
              paper="equal", source="the closed form, up to noise of batches: 2 %", over="seed",
              says="The loss of trained linear attention has the plateaus that AGF computes."),
        Claim("largest relative error of what is learned of a component at the end", value_error, Interval(high=0.02), LONG,
              paper="1 / (Tr + (N + 1) lambda)", source="the closed form, up to noise of batches: 2 %", over="seed",
              says="A component with eigenvalue lambda is learned up to 1 / (Tr + (N + 1) lambda)."),
    ))
