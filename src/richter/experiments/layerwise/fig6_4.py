"""Figure 6.4 of [layerwise]: a transformer on division modulo a prime knows its training pairs at once and all others two
thousand steps later; its features are many before, and about as few as could be after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from richter.core import Interval, Ref
from richter.experiments.frame import Claim, Control, Experiment, Results
from richter.measures.features import FeatureAnalysis, analyse
from richter.models import modular_transformer
from richter.models.modular import ModularTransformer
from richter.report.drawing import COLOURS, band, caption, label, line, panels, styled
from richter.runs import Writer
from richter.tasks import modular_arithmetic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Moment = Literal["before", "after"]
SOLVED = 0.99  # of accuracies
NUMBERS = ("kappa_cka", "deff_intensity", "deff_utilisation", "quality_top", "utilisation_top", "constant")
CURVES = ("quality", "utilisation", "intensity")


@dataclass(frozen=True)
class Settings:
    """AdamW on cross-entropy, batches of ``batch`` pairs, no more than there are. Every so many steps accuracies and features are
    looked at, on the training pairs, on which they are fitted (the test pairs are hardly more than the features), kappa also on
    all pairs. ``before`` is when training is solved, ``after`` when the test is, and training stops ``more`` steps later.
    ``exchanged``: claims take the one for the other."""

    p: int = 23
    d: int = 96
    share: float = 0.75
    lr: float = 1e-3
    decay: float = 2.0
    batch: int = 512
    steps: int = 3000
    more: int = 0
    every: int = 50
    seeds: tuple[int, ...] = (0,)
    exchanged: bool = False


@dataclass(frozen=True)
class Task:
    settings: Settings
    seed: int


def tasks(s: Settings) -> list[Task]:
    return [Task(replace(s, seeds=(), exchanged=False), seed) for seed in s.seeds]


@torch.no_grad()
def features(model: ModularTransformer, x: Tensor, y: Tensor, p: int) -> FeatureAnalysis:
    h = model.features(x)
    return analyse(h, F.one_hot(y, p).float(), model.head(h))


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    data = modular_arithmetic(s.p, t.seed, operation="divide", share=s.share)
    (x, y), (x_test, y_test) = parts = (data.tokens, data.labels), (data.tokens_test, data.labels_test)
    everything = torch.cat([x, x_test]), torch.cat([y, y_test])
    model, draw = modular_transformer(s.p, s.d, seed=t.seed), torch.Generator().manual_seed(t.seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=s.lr, betas=(0.9, 0.98), weight_decay=s.decay, fused=True)
    curves, moments, last = list[tuple[float, ...]](), dict[Moment, tuple[FeatureAnalysis, float]](), s.steps
    for step in range(s.steps + 1):
        if step % s.every == 0:
            with torch.no_grad():
                train, test = ((model(a).argmax(1) == b).double().mean().item() for a, b in parts)
            run.scalars(step, train_accuracy=train, test_accuracy=test)
            now, whole = features(model, x, y, s.p), features(model, *everything, s.p).kappa_cka
            curves.append((step, train, test, *(getattr(now, name) for name in NUMBERS), whole))
            if train >= SOLVED:
                moments.setdefault("before", (now, whole))
            if test >= SOLVED and "before" in moments and "after" not in moments:
                moments["after"], last = (now, whole), step + s.more
        if step >= last:
            break
        rows = torch.randperm(len(x), generator=draw)[:s.batch]
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        run.progress(step / s.steps)
    for name in ("before", "after"):
        moments.setdefault(name, (now, whole))  # it was not reached: then the end
    return {"curves": np.array(curves), **{f"{moment}_kappa_all": whole for moment, (_, whole) in moments.items()},
            **{f"{moment}_{name}": np.asarray(getattr(a, name)) for moment, (a, _) in moments.items()
               for name in (*NUMBERS, *CURVES)}}


# ------------------------------------------------------------------------------------------------ claims


def only(r: Results) -> Mapping[str, NDArray[Any]]:
    (_, arrays), = r
    return arrays


def solved(r: Results) -> int:
    """The row at which training is solved; with ``exchanged`` the test. The last row where it is not."""
    reached = only(r)["curves"][:, 2 if r.settings.exchanged else 1] >= SOLVED
    return int(np.argmax(reached)) if reached.any() else len(reached) - 1


def at(name: str, moment: Moment) -> Any:
    other: Moment = "before" if moment == "after" else "after"
    return lambda r: float(only(r)[f"{other if r.settings.exchanged else moment}_{name}"])


def best_test(r: Results) -> float:
    """Up to the end; with ``exchanged`` up to the solved training set."""
    curves = only(r)["curves"]
    row = int(np.argmax(curves[:, 1] >= SOLVED)) + 1 if r.settings.exchanged else len(curves)
    return float(curves[:row, 2].max())


def few(r: Results) -> float:
    """D_eff of the intensities after over that before."""
    ratio = float(only(r)["after_deff_intensity"] / only(r)["before_deff_intensity"])
    return 1 / ratio if r.settings.exchanged else ratio


# ------------------------------------------------------------------------------------------------ pictures


@styled
def draw(results: Results) -> Figure:
    figure, axes = panels(6, across=3)
    length = min(len(a["curves"]) for _, a in results)
    rows = np.stack([a["curves"][:length] for _, a in results])
    steps, p = rows[0, :, 0], results.settings.p
    for column, colour, words in ((1, COLOURS[0], "training"), (2, COLOURS[1], "test")):
        for k, (_, arrays) in enumerate(results):
            axes[0].plot(arrays["curves"][:, 0], arrays["curves"][:, column], color=colour, alpha=0.8, linewidth=1.0,
                         label=words if not k else None)
    label(axes[0], "step", "accuracy", "a: accuracies, a curve for each seed", legend=True)
    band(axes[1], steps, rows[..., 3], COLOURS[0], "training pairs")
    band(axes[1], steps, rows[..., -1], COLOURS[1], "all pairs")
    line(axes[1], [0, steps[-1]], [0.1, 0.1], "#999999", "minimum below", ":")
    label(axes[1], "step", "kappa", "kappa", legend=True)
    band(axes[2], steps, rows[..., 4], COLOURS[0], "intensity")
    band(axes[2], steps, rows[..., 5], COLOURS[1], "utilisation")
    line(axes[2], [0, steps[-1]], [p, p], "#999999", f"{p} classes", ":")
    label(axes[2], "step", "effective number", "features", legend=True)
    for moment, colour in (("before", "#d62728"), ("after", "#7b3fa0")):
        kappa = np.median(results[f"{moment}_kappa_cka"])
        for ax, name in zip(axes[3:], CURVES, strict=True):
            values = results[f"{moment}_{name}"]
            shown = values / values[:, :1] if name == "intensity" else values.cumsum(1)
            band(ax, np.arange(1, shown.shape[1] + 1), np.maximum(shown, 1e-6), colour, f"{moment} [{kappa:.2g}]")
    for ax, y, title in zip(axes[3:], ("cumulative quality", "cumulative utilisation", "intensity, relative to the first"),
                            ("b: of the target", "b: by the learned function", "b: strength"), strict=True):
        line(ax, [p, p], [1e-3 if ax is axes[5] else 0, 1], "#999999", style=":")
        label(ax, "feature", y, title, log="xy" if ax is axes[5] else "x", legend=True)
    seeds = len(results.distinct("seed"))
    caption(figure, "Long after the training pairs are known, the test accuracy rises; then the first features hold nearly all "
                    "of the target and of the function. In brackets kappa; before: training solved, after: test solved. "
                    f"{f'Median and range of {seeds} seeds' if seeds > 1 else 'One seed'}.")
    return figure


BAR = "independent check of this recipe, 2 seeds"
EARLIER = Control("before generalisation in the place of after", {"exchanged": True})
LATER = Control("after generalisation in the place of before", {"exchanged": True})
EXPERIMENT = Experiment(
    name="layerwise_fig6_4", ref=Ref("layerwise", "Fig. 6.4"),
    title="features of a transformer on modular division, before and after it generalises", smoke=Settings(),
    paper=Settings(more=300, seeds=(0, 1, 2, 3, 4)), work=work, tasks=tasks, figures={"layerwise_fig6_4": draw},
    start={"steps": 1, "seeds": (0,)},
    reduced="1 seed of 5; training stops where the test is solved",
    missing={"Fig. 6.4": "the thesis' prime and width, which it does not give; here p = 23 and d = 96"},
    tried="p = 13 and d = 64, which did not generalise within 3,000 steps; GELU in the place of ReLU and embeddings of "
          "variance 1, which generalise by a few frequencies of the group: 13 strong features, kappa 0.28; ReLU with these "
          "embeddings, which does not generalise within 2,400 steps",
    claims=(
        Claim("step at which the training accuracy is 0.99", lambda r: float(only(r)["curves"][solved(r), 0]), Interval(high=150),
              Control("the step at which the test accuracy is", {"exchanged": True}), source=BAR, paper="before step 200",
              over="seed"),
        Claim("test accuracy at that step", lambda r: float(only(r)["curves"][solved(r), 2]), Interval(high=0.15), LATER,
              source=BAR, paper="at chance", over="seed"),
        Claim("best test accuracy by step 3,000", best_test, Interval(low=0.95),
              Control("by the step at which training is solved", {"exchanged": True}), source=BAR, paper="1", over="seed"),
        Claim("kappa before, on training pairs", at("kappa_cka", "before"), Interval(low=0.15), LATER, source=BAR,
              paper="extended", over="seed"),
        Claim("kappa after, on all pairs", at("kappa_all", "after"), Interval(high=0.15), EARLIER, source=BAR, paper="minimum",
              over="seed"),
        Claim("kappa after, on training pairs", at("kappa_cka", "after"), Interval(high=0.15), EARLIER, source=BAR,
              paper="minimum", over="seed"),
        Claim("share of the target in the first 23 features after", at("quality_top", "after"), Interval(low=0.9), EARLIER,
              source=BAR, paper="1", over="seed"),
        Claim("strong features (D_eff of the intensities) after, as a share of those before", few, Interval(high=1), EARLIER,
              source="the thesis: from more features than classes to as few", paper="fewer", over="seed"),
    ))
