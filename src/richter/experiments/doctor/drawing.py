"""The doctor's experiment drawn: what the trainings were, which rule is right about them, the magnitude by output scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from richter.experiments.doctor import judging, truth
from richter.experiments.doctor.judging import RULES, WORDS
from richter.experiments.kit import Results
from richter.report.drawing import COLOURS, band, caption, label, line, panels, points, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@styled
def draw_mlp(results: Results) -> Figure:
    """D and gain of the trainings with the verdict on each, and how often each rule is right."""
    figure, (left, right) = panels(2, across=2)
    _regions(left, [arrays for _, arrays in judging.with_known_truth(results, "MLP")])
    _rules(right, results, ("MLP",))
    figure.set_size_inches(figure.get_size_inches()[0], 4.6)
    caption(figure, "The verdict (colours on the left) falls into the regions that the linearised network and the features draw, "
                    "and is right where simpler rules are not.")
    return figure


@styled
def draw_others(results: Results) -> Figure:
    """Draw how often each rule is right about a CNN and a GPT."""
    known = {t.network for t, _ in judging.with_known_truth(results)}
    networks = [n for n in ("CNN", "GPT", "ResNet-10", "ViT") if n in known]
    figure, axes = panels(max(1, len(networks)), across=max(1, len(networks)))
    for ax, network in zip(axes, networks, strict=False):
        _rules(ax, results, (network,))
    caption(figure, "Lazy, rich, frozen, untrained and diverged trainings are told apart in other architectures too.")
    return figure


@styled
def draw_scales(results: Results) -> Figure:
    """The magnitude by output scale. Far from rich, what a linearisation leaves of a smooth network falls like 1/scale; of ReLU
    like its root, because the share of units that change sides falls like 1/scale, and what they do adds up at random."""
    figure, (ax,) = panels(1, across=1)
    networks = list(dict.fromkeys(t.network for t, _ in results if judging.in_scale_series(t)))
    for colour, network in zip(COLOURS, networks, strict=False):
        curves: dict[int, dict[float, float]] = {}
        for t, arrays in results:
            if judging.in_scale_series(t) and t.network == network:
                curves.setdefault(t.seed, {})[t.case.alpha] = float(arrays["magnitude"])
        scales = sorted(next(iter(curves.values())))
        rows = [[curve[a] for a in scales] for curve in curves.values()]
        band(ax, scales, rows, colour)
        points(ax, scales, rows, colour, network)
    line(ax, (10, 1000), (-1, -3), label="curvature: a unit for each factor of ten", style="--")
    line(ax, (10, 1000), (-0.7, -1.7), label="kinks of ReLU: half a unit", style=":")
    label(ax, "output scale", "magnitude", log="x", legend=True)
    figure.set_size_inches(6.4, 3.8)
    caption(figure, "The magnitude falls with the output scale in every network: by a unit for each factor of ten where "
                    "curvature is what is left, by less where kinks are.")
    return figure


def _regions(ax: Axes, runs: list[Any]) -> None:
    """Draw linearisation gap and gain of each training, with the borders of the true regimes."""
    for colour, word in zip(COLOURS, ("lazy", "rich", "uncertain", "probably lazy", "amplified"), strict=False):
        rows = [(float(a["D"]), float(a["gain"])) for a in runs if WORDS[int(a["says_verdict"])] == word]
        if rows:
            D, gain = np.transpose(rows)
            ax.plot(D, np.clip(gain, -0.5, 1), "o", color=colour, markersize=4, label=word)
    for at in (truth.LAZY, truth.RICH, truth.AMPLIFIED):
        ax.axvline(at, color="#999999", linewidth=0.7, linestyle="--")
    for at in (truth.KEPT, truth.TURNED):
        ax.axhline(at, color="#999999", linewidth=0.7, linestyle="--")
    label(ax, "D: distance to the linearised network", "gain of the features (clipped at -0.5)",
          "truth, and the verdict", legend=True)


def _rules(ax: Axes, results: Results, networks: tuple[str, ...]) -> None:
    """Draw which trainings each rule judges right."""
    names = list(dict.fromkeys(t.name for t, _ in judging.with_known_truth(results) if t.network in networks))
    for at, rule in enumerate(RULES):
        for row, name in enumerate(names):
            right = [judging.is_right(a, rule) for t,
                     a in judging.with_known_truth(results) if t.network in networks and t.name == name]
            ax.plot([at], [row], "o", markersize=6, color=COLOURS[0] if all(right) else "white" if not any(right) else "#9db8d9",
                    markeredgecolor=COLOURS[0])
    ax.set_yticks(range(len(names)), names, fontsize=7)
    ax.set_xticks(range(len(RULES)), [text.replace(" ", "\n", 1) for text in RULES.values()], fontsize=6.5)
    ax.set_xlim(-0.5, len(RULES) - 0.5)
    ax.invert_yaxis()
    label(ax, "rule", "training", f"{', '.join(networks)}: right on all seeds (filled), some (pale), none (empty)")
