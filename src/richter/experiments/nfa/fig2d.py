"""Figures 2D and 15B of [nfa]: both correlations in the query, key and value maps of a small GPT on Shakespeare's characters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike

from richter.core import Interval, Ref
from richter.experiments.frame import Claim, Control, Experiment, Results
from richter.experiments.training import Curves
from richter.instrument.probe import Probe
from richter.models import GPT
from richter.runs import Writer
from richter.tasks import shakespeare

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Settings:
    """Three attention layers, no dropout, Adam without weight decay at 5e-3, as the paper has it."""

    context: int = 256
    d: int = 384
    heads: int = 6
    depth: int = 3
    batch: int = 64
    lr: float = 5e-3
    steps: int = 5000
    probe: int = 64
    seeds: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Task:
    settings: Settings
    seed: int


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    text = shakespeare()
    draw = torch.Generator().manual_seed(t.seed)
    model = GPT(len(text.vocabulary), s.context, s.d, s.depth, s.heads, seed=t.seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=s.lr)
    ids, after = text.batch(s.probe, s.context, draw)
    curves = Curves(model, Probe(ids, after), ("nfc", "cnfc", "weight_change"), ["blocks.*.qkv.*"], run)
    due = {1, s.steps} | {round(v) for v in np.geomspace(1, max(1, s.steps), 7)}
    for step in range(s.steps):
        x, y = text.batch(s.batch, s.context, draw)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        run.scalars(step + 1, loss=loss.item())
        run.progress((step + 1) / s.steps)
        if step + 1 in due:
            curves.at(step + 1)
    if not s.steps:
        curves.at(0)
    return {**curves.arrays(), "loss": run.run.scalar("loss").value if s.steps else np.array([np.log(len(text.vocabulary))])}


def draw(results: Results) -> Figure:
    """A row for each block, a column for q, k and v."""
    from matplotlib.figure import Figure

    from richter.report.figures import COLOURS
    _, arrays = next(iter(results))
    depth = arrays["nfc"].shape[1] // 3
    figure = Figure(figsize=(8, 2.2 * depth + 0.3), layout="constrained")
    axes = figure.subplots(depth, 3, sharex=True, sharey=True, squeeze=False)
    for i, ax in enumerate(axes.flat):
        for k, (name, label) in enumerate((("nfc", "UC"), ("cnfc", "C"))):
            ax.plot(arrays["steps"], arrays[name][:, i], "o-", color=COLOURS[k], markersize=3, label=label)
        ax.set(title=f"block {i // 3 + 1}, {'qkv'[i % 3]}", ylim=(0, 1.02), xscale="log")
    axes[0, 0].legend(frameon=False)
    return figure


UNTRAINED = Control("an untrained network", {"steps": 0})
EXPERIMENT = Experiment(
    name="nfa_fig2d", ref=Ref("nfa", "Fig. 2D"), title="both correlations in the attention maps of a small GPT",
    smoke=Settings(context=32, d=64, heads=4, batch=32, steps=300, probe=32), paper=Settings(),
    tasks=lambda s: [Task(replace(s, seeds=()), seed) for seed in s.seeds], work=work, data=("shakespeare",),
    figures={"nfa_fig2d": draw}, start={"steps": 1, "probe": 2, "context": 16},
    reduced="width 64, 32 characters, 300 steps, correlations from 64 random outputs; the text is the same author's, not "
            "the same file",
    absent="the paper's size takes about half a day of two cores",
    claims=(
        Claim("mean over q, k, v and blocks of C - UC at the end", lambda r: float(np.mean(
            [(arrays["cnfc"][-1] - arrays["nfc"][-1]).mean() for _, arrays in r])), Interval(low=0.0), UNTRAINED, paper="above 0",
              source="the paper's text, Sec. 3"),
        Claim("mean over q, k, v and blocks of C - UC after one step", lambda r: float(np.mean(
            [(arrays["cnfc"][0] - arrays["nfc"][0]).mean() for _, arrays in r])), Interval(low=0.0), UNTRAINED, paper="above 0",
              source="the paper's text, Sec. 3"),
        Claim("loss of the last 20 steps over that of a uniform guess", lambda r: float(np.mean(
            [arrays["loss"][-20:].mean() / np.log(77) for _, arrays in r])), Interval(high=0.75), UNTRAINED,
              source="a network that trains predicts characters"),
    ))
