"""Figures 6.3 and 6.1 of [layerwise]: plain training ends with few features, small targets and a trained read-out with as many as
at the start. Rich is not good: a network that has learned random labels by heart has few features too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray

from richter.controls import Richness
from richter.controls.richness import last_layer_only
from richter.core import Interval, Ref
from richter.experiments.frame import Claim, Control, Experiment, Results
from richter.experiments.rivals import shuffled
from richter.experiments.training import epochs
from richter.kernels import cka
from richter.measures.features import analyse
from richter.models import mlp
from richter.report.drawing import COLOURS, band, caption, label, line, panels, points, styled
from richter.runs import Writer
from richter.tasks import mnist

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["rich", "lazy", "linear", "random"]
KINDS: dict[Kind, str] = {"rich": "plain", "lazy": "targets / 100, from zero", "linear": "last layer only",
                          "random": "random labels"}
CURVES = ("quality", "utilisation", "intensity")
PLAIN = Richness()


@dataclass(frozen=True)
class Settings:
    """Four layers, ReLU, torch's initial weights, momentum 0.9, no weight decay but for random labels, whose rate falls to a
    fifth after ``every`` epochs. ``rich``, ``lazy``, ``linear`` and ``bad`` are what claims take for them; ``trained``: False
    looks at the network before training; ``sorted_by``: how the networks that moved are told from those that did not."""

    n: int = 5000
    width: int = 256
    alpha: float = 100.0
    lr: float = 0.05
    epochs: int = 40
    random_n: int = 2000
    random_epochs: int = 150
    every: int = 80
    decay: float = 1e-3
    seeds: tuple[int, ...] = (0,)
    rich: Kind = "rich"
    lazy: Kind = "lazy"
    linear: Kind = "linear"
    bad: Kind = "random"
    trained: bool = True
    sorted_by: Literal["moved", "accuracy"] = "moved"


@dataclass(frozen=True)
class Task:
    settings: Settings
    kind: Kind
    seed: int


def tasks(s: Settings) -> list[Task]:
    alone = replace(s, seeds=(), rich="rich", lazy="lazy", linear="linear", bad="random", trained=True, sorted_by="moved")
    return [Task(alone, kind, seed) for kind in KINDS for seed in s.seeds]


def half(f: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean over examples of |f - y|^2 / 2."""
    return (f - y).square().sum(1).mean() / 2


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
    s, random = t.settings, t.kind == "random"
    data = mnist(s.random_n if random else s.n, 1000, seed=t.seed, flat=True)
    labels = shuffled(data.y, t.seed) if random else data.y
    plain = mlp([784, s.width, s.width, s.width, 10], seed=t.seed)
    knobs = Richness(target=1 / s.alpha, zero=True) if t.kind == "lazy" else PLAIN
    model, y = knobs.model(plain), knobs.targets(F.one_hot(labels, 10).float())
    with torch.no_grad():
        first = plain[:-1](data.x_test)
    start = analyse(first, F.one_hot(data.y_test, 10).float(), plain(data.x_test).detach())
    count = s.random_epochs if random else s.epochs
    with last_layer_only(plain) if t.kind == "linear" else nullcontext(list(model.parameters())) as trained:
        optimiser = torch.optim.SGD([p for p in trained if p.requires_grad], s.lr, 0.9, weight_decay=s.decay if random else 0.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimiser, s.every if random else count + 1, 0.2)
        epochs(model, data.x, y, optimiser, count, run, seed=t.seed, loss=half, after=lambda e: schedule.step() if e else None)
    with torch.no_grad():
        h, f = plain[:-1](data.x_test), model(data.x_test)
        inside, said = plain[:-1](data.x), model(data.x)
    a = analyse(h, F.one_hot(data.y_test, 10).float(), f)
    return {"kappa": a.kappa_cka, "kappa_start": start.kappa_cka, "deff": a.deff_intensity, "deff_start": start.deff_intensity,
            "accuracy": (f.argmax(1) == data.y_test).double().mean().item(),
            "fitted": (said.argmax(1) == labels).double().mean().item(),
            "kappa_train": analyse(inside, F.one_hot(labels, 10).float(), said).kappa_cka,
            "moved": 1 - float(cka(first @ first.T, h @ h.T)), **{name: np.asarray(getattr(a, name)) for name in CURVES}}


# ------------------------------------------------------------------------------------------------ claims


def of_kind(r: Results, kind: Kind) -> Mapping[str, NDArray[Any]]:
    (_, arrays), = r.where(kind=kind)
    return arrays


def kappa(r: Results, kind: Kind) -> float:
    arrays = of_kind(r, kind)
    return float(arrays["kappa" if r.settings.trained else "kappa_start"])


def turned(r: Results) -> float:
    """By how much the number of strong features changed, relative."""
    arrays = of_kind(r, r.settings.lazy)
    return float(abs(arrays["deff"] / arrays["deff_start"] - 1))


def apart(r: Results) -> float:
    """The smaller kappa of the two networks whose features moved least, less the larger kappa of the other two."""
    order = sorted(KINDS, key=lambda kind: float(of_kind(r, kind)[r.settings.sorted_by]))
    return min(kappa(r, kind) for kind in order[:2]) - max(kappa(r, kind) for kind in order[2:])


def better(r: Results) -> float:
    """Test accuracy of the lazy network less that of the one with random labels."""
    return float(of_kind(r, r.settings.lazy)["accuracy"] - of_kind(r, r.settings.bad)["accuracy"])


def number(name: Literal["rich", "lazy", "linear", "bad"], field: str = "kappa") -> Callable[[Results], float]:
    def value(r: Results) -> float:
        kind: Kind = getattr(r.settings, name)
        return kappa(r, kind) if field == "kappa" else float(of_kind(r, kind)[field])
    return value


# ------------------------------------------------------------------------------------------------ pictures


@styled
def draw_features(results: Results) -> Figure:
    figure, axes = panels(3, across=3)
    for i, kind in enumerate(("rich", "lazy", "linear")):
        r = results.where(kind=kind)
        words = f"{KINDS[kind]} ({100 * np.median(r['accuracy']):.1f} %) [{np.median(r['kappa']):.2g}]"  # type: ignore[index]
        for ax, name in zip(axes, CURVES, strict=True):
            values = r[name] / r[name][:, :1] if name == "intensity" else r[name].cumsum(1)
            shown = np.where(values > 1e-8, values, np.nan)
            band(ax, np.arange(1, shown.shape[1] + 1), shown, COLOURS[i], words)
    for ax, y, title in zip(axes, ("cumulative quality", "cumulative utilisation", "intensity, relative to the first"),
                            ("a: of the target", "b: by the learned function", "c: strength"), strict=True):
        line(ax, [10, 10], [1e-6 if ax is axes[2] else 0, 1], "#999999", style=":")
        label(ax, "feature", y, title, log="xy" if ax is axes[2] else "x", legend=ax is axes[1])
    caption(figure, "After plain training ten features do all; with small targets, or a trained read-out alone, the function is "
                    "spread over as many as at the start. In parentheses test accuracy, in brackets kappa, medians over seeds.")
    return figure


@styled
def draw_map(results: Results) -> Figure:
    figure, (left, right) = panels(2, across=2)
    for i, (kind, words) in enumerate(KINDS.items()):
        r = results.where(kind=kind)
        points(left, [np.median(r["moved"])], r["kappa"][:, None], COLOURS[i], words)
        points(right, [np.median(r["accuracy"])], r["kappa"][:, None], COLOURS[i], words)
    for ax, x, title in ((left, "movement of features, 1 - CKA with those at the start", "lazy to rich"),
                         (right, "test accuracy", "rich is not good")):
        line(ax, ax.get_xlim(), [0.1, 0.1], "#999999", "minimum below", ":")
        label(ax, x, "kappa", title, legend=ax is left)
    caption(figure, "Networks whose features moved are near the minimum, those whose features stayed are far from it; how good "
                    "they are is another matter: random labels learned by heart end near the minimum with chance accuracy.")
    return figure


BAR = "independent check, one seed each"
AS_RICH = Control("the plainly trained network", {"lazy": "rich"})
AS_LAZY = Control("the lazy network", {"rich": "lazy", "bad": "lazy"})
UNTRAINED = Control("the untrained network", {"trained": False})
EXPERIMENT = Experiment(
    name="layerwise_fig6_3", ref=Ref("layerwise", "Fig. 6.3"),
    title="rich training uses few features, lazy training as many as before",
    places=("Fig. 6.3", "Fig. 6.1"), smoke=Settings(), work=work, tasks=tasks,
    paper=Settings(n=10_000, seeds=(0, 1, 2, 3, 4)),
    figures={"layerwise_fig6_3": draw_features, "layerwise_fig6_1": draw_map}, data=("mnist",),
    start={"n": 100, "random_n": 100, "epochs": 1, "random_epochs": 1, "seeds": (0,)},
    reduced="5,000 images of 10,000; 1 seed of 5",
    tried="random labels of 2,000 images with a rate that falls every 30 epochs, which ends at kappa 0.07 on the training "
          "images; the mean over outputs in the loss, a fifth of the rate: plain training then ends at kappa 0.16",
    missing={"Fig. 6.1": "a scheme: drawn here from measured networks"},
    claims=(
        Claim("targets / 100: kappa", number("lazy"), Interval(low=0.4), AS_RICH, source=BAR, paper="extended",
              places=("Fig. 6.3",), over="seed"),
        Claim("kappa with targets / 100 over that of plain training", lambda r: kappa(r, r.settings.lazy) / kappa(r, "rich"),
              Interval(low=3), (AS_RICH, UNTRAINED), source=BAR, paper="extended against minimum", places=("Fig. 6.3",),
              over="seed"),
        Claim("targets / 100: relative change of D_eff of the intensities", turned, Interval(high=0.02), AS_RICH, source=BAR,
              paper="features stay", places=("Fig. 6.3",), over="seed"),
        Claim("plain training: kappa", number("rich"), Interval(high=0.1), (AS_LAZY, UNTRAINED), source="Def. 2 of the thesis",
              paper="minimum", places=("Fig. 6.3",), over="seed"),
        Claim("last layer only: kappa", number("linear"), Interval(low=0.1), Control("plain training", {"linear": "rich"}),
              source="Def. 2 of the thesis", paper="extended", places=("Fig. 6.3",), over="seed"),
        Claim("kappa of the two networks whose features moved least less that of the other two, at least", apart, Interval(low=0),
              Control("sorted by test accuracy, not by movement", {"sorted_by": "accuracy"}), source="Fig. 6.1: an order",
              paper="lazy is extended, rich is minimum", places=("Fig. 6.1",), over="seed"),
        Claim("random labels: kappa on the training images", number("bad", "kappa_train"), Interval(high=0.05), AS_LAZY,
              source=BAR, paper="rich", places=("Fig. 6.1",), over="seed"),
        Claim("random labels: test accuracy", number("bad", "accuracy"), Interval(high=0.2), AS_LAZY, source="chance is 0.1",
              paper="chance", places=("Fig. 6.1",), over="seed"),
        Claim("test accuracy with targets / 100 less that with random labels, which is the richer network", better,
              Interval(low=0.5), Control("the lazy network in the place of both", {"bad": "lazy"}), source="good against chance",
              paper="rich is not good", places=("Fig. 6.1",), over="seed"),
    ))
