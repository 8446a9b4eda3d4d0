"""Figures 3 and 8 of [signal] and Tables 1 to 3: in which layer alignment peaks, by depth, data, learning rate and batch size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.experiments.signal.common import PANELS, balanced, fit, he, images, profile
from richter.experiments.training import accuracy
from richter.measures.profile import peak
from richter.report.drawing import COLOURS, caption, label, line, panels, points, styled
from richter.theory import signal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Subject = Literal["trained", "untrained", "shuffled", "theory", "exchanged"]
Law = Literal["balanced", "constant", "proportional"]
FASHION = "fashion_mnist"
RATES = {"mnist": {10: 0.003, 20: 0.003, 30: 0.003}, "cifar10": {10: 0.005, 20: 0.003, 30: 0.003},
         FASHION: {5: 0.003, 10: 0.003, 20: 0.004, 30: 0.004, 40: 0.002, 60: 0.0007}}  # Tables 1 to 3; 5 layers are ours


@dataclass(frozen=True)
class SignalFig3Settings:
    """Width 100, bias-free He networks, SGD with momentum 0.9 and weight decay 1e-4; alignment over 10 outputs on
    class-balanced training images, the last profile with standard errors."""

    n: int = 2_000
    width: int = 100
    epochs: int = 20
    depths: tuple[int, ...] = (10, 30)  # on Fashion-MNIST
    few: tuple[int, ...] = (10, 30)  # on the other sets, and for Fig. 8
    probe: int = 60  # images for the depth sweep
    probe_few: int = 60
    subject: Subject = "trained"  # what the claims are read from
    law: Law = "balanced"
    seeds: tuple[int, ...] = (0, 1)


def trainings(s: SignalFig3Settings) -> list[Task[SignalFig3Settings]]:
    """Return all depths on Fashion-MNIST, and few depths with other labels, training conditions and data, for each seed."""
    rest = replace(s, depths=(), few=(), probe=0, probe_few=0, seeds=())
    kinds = [(FASHION, "base", "own", s.depths, s.probe), (FASHION, "base", "shuffled", (s.few[0], s.few[-1]), s.probe_few),
             *((FASHION, condition, "own", s.few, s.probe_few) for condition in ("slow", "large")),
             *((data, "base", "own", s.few, s.probe_few) for data in ("mnist", "cifar10"))]
    return [Task(rest, data=data, condition=condition, labels=labels, depth=depth, probe=probe, seed=seed) for seed in s.seeds
            for data, condition, labels, depths, probe in kinds for depth in depths]


def work(t: Task[SignalFig3Settings], run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    data = images(t.data, s.n, t.seed, t.labels)
    model = he([data.x.shape[1], *[s.width] * (t.depth - 1), 10], t.seed)
    probe = balanced(data.x, data.y, t.probe)
    (initial, _), untrained = profile(model, probe, errors=False), accuracy(model, data.x_test, data.y_test)
    rate = RATES[t.data].get(t.depth, 0.003) / (4 if t.condition == "slow" else 1)
    fit(model, data, rate, s.epochs, run, batch=512 if t.condition == "large" else 128, seed=t.seed)
    values, errors = profile(model, probe)
    top = peak(values, errors)
    return {"initial": initial, "profile": values, "errors": errors, "low": top.low, "high": top.high,
            "untrained": untrained, "accuracy": accuracy(model, data.x_test, data.y_test)}


PAPER = {"cifar10": {10: 0.56, 20: 0.583, 30: 0.577}, "mnist": {10: 0.97, 20: 0.97, 30: 0.969},
         FASHION: {10: 0.883, 20: 0.886, 30: 0.896, 40: 0.889, 60: 0.877}}  # test accuracies there
CONDITIONS = {"base": "a: learning rates of Table 2", "slow": "b: a quarter of them", "large": "c: batches of 512"}

# ------------------------------------------------------------------------------------------------ claims


def profiles(r: Results, data: str = FASHION, condition: str = "base") -> dict[int, NDArray[np.float64]]:
    """Profiles of one seed by depth: after training, before it, or after training on shuffled labels."""
    subject = r.settings.subject
    chosen = r.where(data=data, condition=condition, labels="shuffled" if subject == "shuffled" else "own")
    return {t.depth: arrays["initial" if subject == "untrained" else "profile"] for t, arrays in chosen}


def peaks(r: Results, data: str = FASHION, condition: str = "base") -> dict[int, float]:
    """The layer by depth in which alignment grew most, the first where it grew in none; that which theory balances, where theory
    is the subject. Before training the profile is flat, and its largest value anywhere."""
    if r.settings.subject == "theory":
        return {depth: signal.balanced_layer(depth) for depth in r.where(data=data, condition=condition).distinct("depth")}
    before = {t.depth: arrays["initial"] for t, arrays in r.where(data=data, condition=condition, labels="own")}
    return {depth: 1.0 + int((A - before[depth]).argmax()) for depth, A in profiles(r, data, condition).items()}


def reading(value: Callable[[Results, str], float], which: str) -> Callable[[Results], float]:
    """Return the value of one data set or condition."""
    return lambda r: value(r, which)


def growth(r: Results, data: str) -> float:
    """The best layer's alignment over that of the best layer before training, smallest over depths from 10 on."""
    before = {t.depth: arrays["initial"].max() for t, arrays in r.where(data=data, condition="base", labels="own")}
    return float(min(A.max() / before[depth] for depth, A in profiles(r, data).items() if depth >= 10))


def deeper(r: Results, data: str) -> float:
    """Layer of the peak in the deepest network of up to 30 layers, less that in the network of 10 layers."""
    layer = peaks(r, data)
    return layer[max(d for d in layer if d <= 30)] - layer[10]


def slope(r: Results) -> float:
    """d log peak / d log depth on Fashion-MNIST."""
    layer = peaks(r)
    return float(np.polyfit(np.log(list(layer)), np.log(list(layer.values())), 1)[0])


def misfit(r: Results, law: Law) -> float:
    """Root mean square of log(peak / (C law(depth))) over depths, C chosen after the fact."""
    layer = peaks(r)
    shape = {"balanced": signal.balanced_layer, "constant": lambda depth: 1.0, "proportional": float}[law]
    apart = np.log([value / shape(depth) for depth, value in layer.items()])
    return float(np.std(apart))


def advantage(r: Results) -> float:
    """Misfit of the balanced layer, less that of the better of two simple laws."""
    return misfit(r, r.settings.law) - min(misfit(r, "constant"), misfit(r, "proportional"))


def shift(r: Results, condition: str) -> float:
    """Mean over depths of log(peak under this condition / peak under the base one)."""
    base, other = peaks(r), peaks(r, condition=condition)
    sign = -1 if r.settings.subject == "exchanged" else 1
    return sign * float(np.mean([np.log(other[depth] / base[depth]) for depth in other if depth in base]))


def accuracies(r: Results, data: str, condition: str = "base") -> dict[int, float]:
    """Test accuracies by depth; before training, or after training on shuffled labels, if that is the subject."""
    labels = "shuffled" if r.settings.subject == "shuffled" else "own"
    name = "untrained" if r.settings.subject == "untrained" else "accuracy"
    return {t.depth: float(arrays[name]) for t, arrays in r.where(data=data, condition=condition, labels=labels)}


def poorer(r: Results, condition: str) -> float:
    """Test accuracy under the base condition less that under this one, mean over depths."""
    base, other = accuracies(r, FASHION), accuracies(r, FASHION, condition)
    sign = -1 if r.settings.subject == "exchanged" else 1
    return sign * float(np.mean([base[depth] - other[depth] for depth in other if depth in base]))


def short(r: Results, data: str) -> float:
    """The paper's test accuracy less ours, largest over the depths that both have."""
    ours = accuracies(r, data)
    return max(PAPER[data][depth] - value for depth, value in ours.items() if depth in PAPER[data])


# ------------------------------------------------------------------------------------------------ drawings


def by_depth(ax: Axes, chosen: Results, title: str) -> None:
    """Draw each network as a column, bright where alignment is near its best layer's, with the peaks, 3/5 and the balanced
    layer over it."""
    depths = sorted(chosen.distinct("depth"))
    for depth in depths:
        A = np.mean([a / a.max() for a in chosen.where(depth=depth)["profile"]], 0)
        ax.scatter(np.full(depth, depth), np.arange(1, depth + 1), 9, A, marker="s", cmap="Greys", vmin=0, vmax=1.4, linewidths=0)
    layers = np.array([1 + chosen.where(depth=depth)["profile"].argmax(1) for depth in depths]).T
    points(ax, depths, layers, COLOURS[1], "peak, median and range of seeds", "x")
    low, high = ([np.median(chosen.where(depth=depth)[name]) for depth in depths] for name in ("low", "high"))
    ax.fill_between(depths, low, high, color=COLOURS[1], alpha=0.2, linewidth=0, label="layers that could be the peak")
    C = np.exp(np.mean(np.log(np.median(layers, 0)) - signal.EXPONENT * np.log(depths)))
    line(ax, depths, C * np.array(depths) ** signal.EXPONENT, label="3/5 log L + C", style="--")
    line(ax, depths, signal.balanced_layers(depths), COLOURS[0], "balanced layer, one pair at c = 0")
    line(ax, depths, signal.balanced_layers(depths, -1.0, 0.9), COLOURS[0], "the same, suprema, eps = 0.1", ":")
    label(ax, "depth", "layer", title, log="xy")


@styled
def draw_depths(results: Results) -> Figure:
    """Figure of the alignment by layer for each depth, one panel per data set."""
    figure, axes = panels(3, across=3)
    for ax, (data, title) in zip(axes, PANELS.items(), strict=True):
        by_depth(ax, results.where(data=data, condition="base", labels="own"), title)
    axes[1].legend(frameon=False, fontsize=6)
    slopes = [slope(results.where(seed=seed)) for seed in results.distinct("seed")]
    caption(figure, "Dark: layers whose alignment is near the best one's. The peak (x) lies deeper in deeper networks, on a flat "
                    f"top. Its slope on Fashion-MNIST is {np.median(slopes):.2f} (median of {len(slopes)} seeds, "
                    f"{min(slopes):.2f} to {max(slopes):.2f}); 3/5 is the theory's at infinite depth, "
                    f"{signal.exponent(results.where(data=FASHION).distinct('depth')):.2f} at these depths.")
    return figure


@styled
def draw_conditions(results: Results) -> Figure:
    """Figure of the alignment by layer under each condition."""
    figure, axes = panels(3, across=3)
    for ax, (condition, title) in zip(axes, CONDITIONS.items(), strict=True):
        by_depth(ax, results.where(data=FASHION, condition=condition, labels="own"), title)
    axes[0].legend(frameon=False, fontsize=6)
    caption(figure, "The paper sees the peak move toward the output at lower learning rates (b) and larger batches (c).")
    return figure


def table_of(data: str, number: int) -> Callable[[Results], Figure]:
    """Test accuracy by depth beside the paper's."""
    @styled
    def draw(results: Results) -> Figure:
        figure, (ax,) = panels(1, across=1, width=4.8, height=3.0)
        chosen = results.where(data=data, condition="base", labels="own")
        depths = sorted(chosen.distinct("depth"))
        points(ax, depths, np.array([chosen.where(depth=depth)["accuracy"] for depth in depths]).T, label="ours")
        shown = [depth for depth in depths if depth in PAPER[data]]
        line(ax, shown, [PAPER[data][depth] for depth in shown], label=f"Table {number}")
        label(ax, "depth", "test accuracy", PANELS[data][3:], legend=True)
        s = results.settings
        caption(figure, f"{s.n:,} images and {s.epochs} epochs leave test accuracy below the paper's.")
        return figure
    return draw


UNTRAINED = Control("untrained networks", {"subject": "untrained"})
SHUFFLED = Control("trained on shuffled labels", {"subject": "shuffled"})
EXCHANGED = Control("the two conditions exchanged", {"subject": "exchanged"})
BAR, TEXT = "independent check of the recipe, depths 10 to 30, 3 seeds", "the paper's text"
LESS = "10,000 images and 30 epochs in the place of all and 100 to 700"
SMALL = "2,000 of 60,000 images"
STEEP = ("the layer moves about in proportion to the depth: in the median 1 of 5, 2 of 10, 6 of 20, 8 of 30 and 21 of 60,"
         " faster than 3/5 and than the balanced layer, whose own slope is .8 at these depths; tops are flat, and a peak in "
         "one of the first layers of the shallow networks decides the fit")
NO_SHIFT = ("-.24 and -.35 in the median of five seeds, which reach from -.77 to .25: within what flat tops leave open. "
            "It depends on how long is trained: after 12 epochs, where lower rates and larger batches had learned less, "
            "it was .35 and .28")
CLAIMS = (
    Claim("growth of the best layer's alignment, smallest over depths, Fashion-MNIST", lambda r: growth(r, FASHION),
          Interval(low=2.5), (UNTRAINED, SHUFFLED), source=BAR, over="seed", places=("Fig. 3",),
          says="Alignment with the labels grows in training, at every depth of Fashion-MNIST."),
    Claim("growth of the best layer's alignment, smaller of MNIST and CIFAR-10",
          lambda r: min(growth(r, "mnist"), growth(r, "cifar10")), Interval(low=2.5), UNTRAINED, source=BAR, over="seed",
          places=("Fig. 3",), differs={"smoke": f"{SMALL}: CIFAR-10 is hardly learned"},
          says="Alignment with the labels grows in training, also on MNIST and CIFAR-10."),
    Claim("layer of 30 in which alignment grew most, Fashion-MNIST", lambda r: peaks(r)[30], Interval(3, 20), UNTRAINED,
          source=BAR, over="seed", places=("Fig. 3",), says="In deep networks the alignment peaks inside the network."),
    Claim("layers by which that layer lies deeper in 30 layers than in 10, Fashion-MNIST", lambda r: deeper(r, FASHION),
          Interval(low=1), UNTRAINED, source=BAR, over="seed", places=("Fig. 3",),
          says="The peak of the alignment lies deeper in deeper networks."),
    Claim("slope of the log of that layer on log depth, Fashion-MNIST", slope, Interval(0.5, 0.7),
          (UNTRAINED, Control("the balanced layer of the theory at these depths", {"subject": "theory"})), paper="3/5",
          source="the paper's line, to 0.1", over="seed", places=("Fig. 3",), differs=STEEP,
          says="The layer with the largest alignment goes with depth to the power 3/5."),
    Claim("misfit of C times the balanced layer, less that of the better of a constant layer and a constant share of depth",
          advantage, Interval(high=-0.02), (Control("a constant layer", {"law": "constant"}),
                                            Control("a constant share of the depth", {"law": "proportional"})),
          source="a formula must beat its best simple rival, visibly", over="seed", places=("Fig. 3",), differs=STEEP, own=True,
          rival="a constant share of the depth"),
    *(Claim(f"{what}: log of the layer that grew most over the base one's, mean over depths", reading(shift, c),
            Interval(low=0.05), UNTRAINED, paper="a clear upward shift", source=TEXT, over="seed", places=("Fig. 8",),
            differs={"smoke": f"{SMALL}, two seeds: up in one and down in the other, on flat tops", "paper": NO_SHIFT},
            says=f"With {what} the peak of the alignment shifts towards the last layer.")
      for c, what in (("slow", "a quarter of the learning rate"), ("large", "batches of 512"))),
    *(Claim(f"{what}: test accuracy lost, mean over depths", reading(poorer, c), Interval(low=0.0), EXCHANGED,
            paper="poorer performance", source=TEXT, over="seed", places=("Fig. 8",),
            says=f"With {what} the test accuracy is poorer.")
      for c, what in (("slow", "a quarter of the learning rate"), ("large", "batches of 512"))),
    Claim("test accuracy, smallest over depths 10 to 30, Fashion-MNIST",
          lambda r: min(v for d, v in accuracies(r, FASHION).items() if 10 <= d <= 30), Interval(low=0.82), SHUFFLED,
          source=BAR, over="seed", places=("Table 2",), differs={"smoke": SMALL}, own=True),
    *(Claim(f"{place}: the paper's test accuracy less ours, largest over depths", reading(short, d), Interval(high=0.02),
            UNTRAINED, paper="0", source="the table, to 2 points", over="seed", places=(place,),
            differs=f"{ours}: {LESS}; at smoke scale 2,000 images",
            says=f"{place} gives the test accuracies of all depths: differences of 0.")
      for place, d, ours in (("Table 1", "cifar10", ".20 less"), ("Table 2", FASHION, ".13 less at 60 layers"),
                             ("Table 3", "mnist", ".03 less"))),
)
EXPERIMENT = Experiment(
    name="signal_fig3", ref=Ref("signal", "Fig. 3"), title="in which layer alignment peaks, by depth, rate and batch size",
    smoke=SignalFig3Settings(),
    paper=SignalFig3Settings(n=10_000, epochs=30, depths=(5, 10, 20, 30, 60), few=(10, 30), probe=200, seeds=(0, 1, 2, 3, 4)),
    over=trainings, analysis=("subject", "law"), work=work, data=("mnist", "fashion_mnist", "cifar10"),
    figures={"signal_fig3": draw_depths, "signal_fig8": draw_conditions,
             "signal_table1": table_of("cifar10", 1), "signal_table2": table_of(FASHION, 2),
             "signal_table3": table_of("mnist", 3)},
    places=("Fig. 3", "Fig. 8", "Table 1", "Table 2", "Table 3"), start={"n": 256, "epochs": 1, "seeds": (0,)},
    reduced="2,000 images, depths 10 and 30, two seeds",
    tried="12 epochs: test accuracy was .795 at the worst of 10 to 30 layers, 60 layers had hardly begun to learn, and the slope "
          "of the peak's logarithm was 1.28 (.88 to 1.38)",
    missing={"Fig. 3": f"depths 40, 50 and 70 to 100, of MNIST and CIFAR-10 all but 10 and 30, CIFAR-10 at width 100 in the "
                       f"place of 256; {LESS}", "Fig. 8": f"depths other than 10 and 30 under b and c; {LESS}",
             "Table 1": f"depths other than 10 and 30, width 256; {LESS}",
             "Table 2": f"depths 40, 50 and 70 to 100; {LESS}", "Table 3": f"depths other than 10 and 30; {LESS}"},
    protocol="reduced: 10,000 images and 30 of 100 to 700 epochs, fewer depths",
    partial=dict.fromkeys(("Fig. 3", "Fig. 8", "Table 1", "Table 2", "Table 3"), "some of ten depths"),
    claims=CLAIMS)
