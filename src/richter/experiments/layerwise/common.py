"""Shared parts of the experiments of [layerwise]: a training recipe, the inputs of the read-out layer, the thesis' numbers on
fitting and held-out examples, its drawing of three panels, and the claims and drawings of chapter 7.

    fit(model, data.x, indicators(data.y), SgdRecipe(epochs=30), run, seed=t.seed)     # all layers, or the last one only
    return feature_numbers(model, data.x, indicators(data.y), data.x_test, indicators(data.y_test))

    figure, axes = panels(3, across=3)
    metric_panels(axes, {"all layers": results.where(trained="all"), "the last": results.where(trained="last")}, classes=10)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from numpy.typing import ArrayLike, NDArray
from scipy.stats import spearmanr
from torch import Tensor, nn

from richter.core.modules import evaluated
from richter.experiments.kit import Claim, Control, Interval, Results, Scale, Writer
from richter.experiments.training import Step, epochs, linears
from richter.measures import collapse, features
from richter.report.drawing import COLOURS, band, caption, depth_looks, label, line, panels, points, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


UNTRAINED = Control("untrained networks", {"subject": "untrained"})
SHIFTED = Control("kappa of another training beside each error", {"subject": "shifted"})
TRAINING = Control("the training loss in the place of kappa", {"subject": "training"})


def at_look(r: Results, look: int = -1) -> Results:
    """Return the results at one look only, the last by default."""
    return Results(r.settings, r.tasks, [{name: rows[look] for name, rows in arrays.items()} for _, arrays in r])


def read_at(r: Results, name: str) -> NDArray[np.float64]:
    """Number of each task after training, or before it if untrained networks are the subject."""
    return at_look(r, 0 if r.settings.subject == "untrained" else -1)[name]


def rank_correlation(a: ArrayLike, b: ArrayLike) -> float:
    """Spearman's rank correlation; 0 if one of the two does not vary."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    return float(spearmanr(a, b).statistic)


def error_correlation(r: Results, name: str = "kappa_cka") -> float:
    """Rank correlation over trainings of kappa, or of another number, with the test error."""
    last = at_look(r)
    values = last["loss_fit" if r.settings.subject == "training" else name]
    return rank_correlation(np.roll(values, 1) if r.settings.subject == "shifted" else values, 1 - last["accuracy"])


def kappa_over_rivals(r: Results) -> float:
    """Rank correlation of kappa with the test error, less that of its better rival: training loss or norm of the weights."""
    return error_correlation(r) - max(error_correlation(r, "loss_fit"), error_correlation(r, "norm"))


def accuracy_of_smallest_kappa(r: Results) -> float:
    """Test accuracy of the training with the smallest kappa, less that of the training with the largest."""
    kappa, accuracy = read_at(r, "kappa_cka"), read_at(r, "accuracy")
    if r.settings.subject == "shifted":
        kappa = np.roll(kappa, 1)
    return float(accuracy[kappa.argmin()] - accuracy[kappa.argmax()])


def flatness(r: Results) -> NDArray[np.float64]:
    """Effective number of the features 2 to C by intensity, as a share of C - 1: 1 if all are equally strong."""
    rho = read_at(r, "intensity")[:, 1:CLASSES]
    share = rho / rho.sum(1, keepdims=True)
    return np.exp(-(share * np.log(share)).sum(1)) / (CLASSES - 1)


def strength_top(r: Results) -> NDArray[np.float64]:
    """Share of the first C features in the total intensity, both without the first feature, which is nearly constant."""
    rho = read_at(r, "intensity")[:, 1:]
    return rho[:, :CLASSES - 1].sum(1) / rho.sum(1)


SHOWN = 20  # features whose evolution is drawn


def seeds_note(r: Results, what: str = "Median and range") -> str:
    """Return the words of a caption on the number of seeds."""
    count = len(r.distinct("seed"))
    return "One seed." if count == 1 else f"{what} of {count} seeds."


def legend_outside(ax: Axes) -> None:
    """Put the legend to the right of a panel, where it hides nothing."""
    ax.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def drawn_looks(r: Results, most: int = 6) -> list[int]:
    """Indices of the looks that are drawn: the first, the last, and some between them."""
    count = r["epoch"].shape[1]
    return sorted({round(i) for i in np.linspace(0, count - 1, min(most, count))})


def by_epoch(axes: Sequence[Axes], r: Results, name: str) -> None:
    """Draw cumulative quality and utilisation, and intensity, at several epochs. [layerwise, Fig. 7.4]"""
    metric_panels(axes, {f"epoch {int(r['epoch'][0, i])}": at_look(r, i) for i in drawn_looks(r)}, CLASSES, legend=False)
    legend_outside(axes[2])
    for ax, part in zip(axes, ("(i): of the target", "(ii): by the learned function", "(iii): strength"), strict=True):
        ax.set_title(f"{name} {part}")


def first_features(axes: Sequence[Axes], r: Results, name: str) -> None:
    """Draw quality, utilisation, accuracies and intensity by epoch. Of single features, the first C go from dark to light,
    later ones are grey. [layerwise, Fig. 7.5]"""
    epoch, look = r["epoch"][0], depth_looks([str(k) for k in range(CLASSES)])
    for ax, values in ((axes[0], r["quality"]), (axes[1], r["utilisation"]), (axes[3], relative_intensity(r["intensity"]))):
        for k in reversed(range(SHOWN)):
            line(ax, epoch, np.median(values[:, :, k], 0), look[str(k)].colour if k < CLASSES else "#c4c4c4",
                 {0: "feature 1", CLASSES - 1: f"feature {CLASSES}", CLASSES: f"{CLASSES + 1} to {SHOWN}"}.get(k, ""))
    for rows, colour, words in ((r["accuracy_fit"], COLOURS[0], "training"), (r["accuracy"], COLOURS[1], "test")):
        band(axes[2], epoch, rows, colour, words)
    for ax, y, part in zip(axes, ("quality", "utilisation", "accuracy", "intensity, relative to the first"),
                           ("(i)", "(ii)", "(iii)", "(iv)"), strict=True):
        label(ax, "epoch", y, f"{name} {part}", log="y" if ax is axes[3] else "", legend=ax is axes[2])
    legend_outside(axes[3])


Choice = Callable[[Results], Results]
Why = str | Mapping[Scale, str]
PAIRS = (("quality", "utilisation"), ("quality", "intensity"))
SHUFFLED = Control("features in a random order", {"subject": "shuffled"})
TEXT = "the text of Sec. 7.4.1"


def feature_correlation(r: Results, a: str, b: str, seed: int = 0) -> float:
    """Rank correlation, over the features of one network, of two of quality, utilisation and intensity. It is read after
    training, or before it for the subject "untrained"; for "shuffled" the features of one of the two are in a random order."""
    return correlation_over_features(r, read_at(r, a)[0], read_at(r, b)[0], seed)


def correlation_over_features(r: Results, x: NDArray[np.float64], y: NDArray[np.float64], seed: int = 0) -> float:
    """Rank correlation over the features whose intensity is not zero."""
    strong = read_at(r, "intensity")[0] > 0
    x, y = x[strong], y[strong]
    return rank_correlation(x, np.random.default_rng(seed).permutation(y) if r.settings.subject == "shuffled" else y)


def correlation_gain(r: Results, a: str, b: str) -> float:
    """Feature correlation after training, less that before it."""
    before, after = (feature_correlation(single_look(r, look), a, b) for look in (0,
                                                                                  0 if r.settings.subject == "untrained" else -1))
    return after - before


def single_look(r: Results, look: int) -> Results:
    """Return the results with one look, which keeps its axis."""
    return Results(r.settings, r.tasks, [{name: rows[look][None] for name, rows in arrays.items()} for _, arrays in r])


def median_correlation(r: Results, a: str, b: str) -> float:
    """Median of the feature correlation over the looks after the first."""
    return float(np.median([feature_correlation(single_look(r, look), a, b, seed=look) for look in range(1,
                                                                                                         r["epoch"].shape[1])]))


def intensity_quality_correlation(r: Results) -> float:
    """Rank correlation, over features, of the intensity after training with the gain in quality by training."""
    return correlation_over_features(r, read_at(r, "intensity")[0], read_at(r, "quality")[0] - at_look(r, 0)["quality"][0])


def single_feature_claims(choice: Choice, panel: str, before: Why = "", gains: Why = "", between: Why = "") -> tuple[Claim, ...]:
    """Claims on single features of the trainings that ``choice`` selects. The last three say why a claim differs: why the
    correlation is not learned (``before``), why larger features do not gain more (``gains``), and why quality and utilisation
    do not correlate between epochs (``between``)."""
    def claim(text: str, value: Callable[[Results], float], paper: str, differs: Why = "") -> Claim:
        return Claim(f"{panel}: {text}", value, Interval(low=0.5), SHUFFLED, paper=paper, over="seed", places=("Fig. 7.7",),
                     source=f"{TEXT}; 0.5 is commonly called strong", differs=differs, says=f"Panel {panel}: {text}: {paper}.")

    def of_choice(number: Callable[[Results, str, str], float], a: str, b: str) -> Callable[[Results], float]:
        return lambda r: number(choice(r), a, b)

    words = [(f"rank correlation of {a} and {b} over features", a, b) for a, b in PAIRS]
    clear = "a clear correlation"
    return (*(claim(text, of_choice(feature_correlation, a, b), clear) for text, a, b in words),
            *(claim(f"{text}, median over epochs that were looked at", of_choice(median_correlation, a, b), clear,
                    between if b == "utilisation" else "") for text, a, b in words),
            claim("rank correlation over features of intensity and the quality gained in training",
                  lambda r: intensity_quality_correlation(choice(r)),
                  "larger features gain better quality faster", gains),
            *(Claim(f"{panel}: {text}, less that of the untrained network", of_choice(correlation_gain, a, b),
                    Interval(low=0.02), UNTRAINED,
                    paper="from learning", source=f"{TEXT}; visibly", over="seed", places=("Fig. 7.7",),
                    differs=before, says=f"Panel {panel}: the {text} comes from training.") for text, a, b in words))


def single_feature_drawing(choice: Choice, network: str) -> Callable[[Results], Figure]:
    """Drawing of the quality, utilisation and intensity of each feature, not summed up."""
    @styled
    def draw(results: Results) -> Figure:
        figure, axes = panels(3, across=3)
        r = choice(results)
        for k, i in enumerate(drawn_looks(r)):
            now = at_look(r, i)
            words = f"epoch {int(r['epoch'][0, i])} ({np.median(now['accuracy']):.1%}) [{np.median(now['kappa_cka']):.2g}]"
            for ax, rows in zip(axes, (now["quality"], now["utilisation"], relative_intensity(now["intensity"])), strict=True):
                points(ax, np.arange(1, rows.shape[1] + 1), np.median(rows, 0), COLOURS[k % len(COLOURS)], words)
        names = ("quality", "utilisation", "intensity, relative to the first")
        for ax, y, title in zip(axes, names, ("(i)", "(ii)", "(iii)"), strict=True):
            line(ax, [CLASSES, CLASSES], ax.get_ylim(), "#999999", style=":")
            label(ax, "feature", y, title, log="xy" if ax is axes[2] else "x")
        legend_outside(axes[2])
        caption(figure, f"Single features of {network}, the strongest first, between epochs: those that are strong are used "
                        "more, and are better. In parentheses the test accuracy, in square brackets kappa. "
                        f"{seeds_note(results, 'Median')}")
        return figure
    return draw


CLASSES = 10
BATCH = 500  # examples that go through a network at a time
FEATURES = ("kappa_cka", "deff_intensity", "deff_quality", "deff_utilisation", "quality_top", "utilisation_top", "constant")
COLLAPSE = ("nc1", "nc1_trace", "nc2_angle", "nc2_norm", "nc3", "nc4")
FAINTEST = 1e-8  # intensities below this share of the strongest are not drawn


@dataclass(frozen=True)
class SgdRecipe:
    """SGD with momentum on ``squared``; the rate falls by ``factor`` after ``every`` epochs (0: never)."""

    lr: float = 0.05
    decay: float = 1e-3
    epochs: int = 100
    every: int = 30
    factor: float = 0.2
    batch: int = 128
    momentum: float = 0.9
    last: bool = False  # is only the last layer trained?


def squared(f: Float[Tensor, "n k"], y: Float[Tensor, "n k"]) -> Tensor:
    """Mean over examples of |f - y|^2 / 2, summed over outputs. [layerwise, Eq. 1.11]"""
    return (f - y).square().sum(1).mean() / 2


def fit(model: nn.Module, x: Tensor, targets: Float[Tensor, "n k"], recipe: SgdRecipe, run: Writer, *, seed: int = 0,
        loss: Callable[[Tensor, Tensor], Tensor] = squared, after: Step | None = None) -> None:
    """Train in place; ``after(epoch)`` is called after each epoch, and before the first with 0.

    Where only the last layer is trained, its inputs do not change: they are computed once, in eval mode."""
    trained, inputs = (readout(model), features_and_outputs(model, x)[0]) if recipe.last else (model, x)
    optimiser = torch.optim.SGD(trained.parameters(), recipe.lr, recipe.momentum, weight_decay=recipe.decay)
    schedule = torch.optim.lr_scheduler.StepLR(optimiser, recipe.every or recipe.epochs + 1, recipe.factor)

    def then(epoch: int) -> None:
        if epoch:
            schedule.step()
        if after is not None:
            after(epoch)

    epochs(trained, inputs, targets, optimiser, recipe.epochs, run, batch=recipe.batch, seed=seed, loss=loss, after=then)


def readout(model: nn.Module) -> nn.Linear:
    """Last linear layer of a model."""
    last = model.get_submodule(linears(model)[-1])
    assert isinstance(last, nn.Linear)
    return last


@torch.no_grad()
def features_and_outputs(model: nn.Module, x: Tensor, batch: int = BATCH) -> tuple[Float[Tensor, "n p"], Float[Tensor, "n k"]]:
    """Return the inputs of the last linear layer and its outputs, in eval mode; the mode of the model is restored.

    The model must end with that layer. Another module stands in its place while the examples go through."""
    *way, name = linears(model)[-1].split(".")
    parent, last = model.get_submodule(".".join(way)), readout(model)
    with evaluated(model):
        try:
            setattr(parent, name, nn.Identity())
            Phi = torch.cat([model(part) for part in x.split(batch)])
        finally:
            setattr(parent, name, last)
        return Phi, last(Phi)


def indicators(y: Int[Tensor, " n"], classes: int = 10) -> Float[Tensor, "n c"]:
    """f*_i(x) = 1 for class i, else 0.  [layerwise, Eq. 2.1]"""
    return F.one_hot(y, classes).float()


def feature_numbers(model: nn.Module, x: Tensor, targets: Float[Tensor, "n k"], x_test: Tensor, targets_test: Float[Tensor, "m k"]
            ) -> dict[str, Any]:
    """Numbers of the thesis for features fitted on ``x``, on the fitting sample (names with ``_fit``) and on held-out examples.

    Quality and utilisation of single features on held-out examples are inflated unless there are many more examples than
    features. Read the effective dimensions on the fitting sample. Neural collapse is measured on the fitting sample."""
    (Phi, f), (Phi_test, f_test) = features_and_outputs(model, x), features_and_outputs(model, x_test)
    fitted = features.analyse(Phi, targets, f)
    apart = features.analyse(Phi, targets, f, Phi_test, targets_test, f_test)
    rows: dict[str, Any] = {"intensity": fitted.intensity.numpy(force=True)}  # type: ignore[union-attr]
    for a, mark, y, outputs in ((fitted, "_fit", targets, f), (apart, "", targets_test, f_test)):
        rows |= {f"quality{mark}": a.quality.numpy(force=True),  # type: ignore[union-attr]
                 f"utilisation{mark}": a.utilisation.numpy(force=True)}  # type: ignore[union-attr]
        rows |= {f"{name}{mark}": getattr(a, name) for name in FEATURES}
        rows[f"accuracy{mark}"] = share_correct(outputs, y)
    if targets.shape[1] > 1:
        last = readout(model)
        c = collapse.analyse(Phi, targets.argmax(1), last.weight.detach(), None if last.bias is None else last.bias.detach())
        rows |= {name: getattr(c, name) for name in COLLAPSE}
    return rows


def share_correct(outputs: Float[Tensor, "n k"], targets: Float[Tensor, "n k"]) -> float:
    """Share of examples whose largest output is that of their class. For a single output: share whose output is nearest to
    its target among the whole numbers. [layerwise, Fig. 3.6]"""
    if targets.shape[1] == 1:
        return ((outputs - targets).abs() < 0.5).double().mean().item()
    return (outputs.argmax(1) == targets.argmax(1)).double().mean().item()


def metric_panels(axes: Sequence[Axes], cases: Mapping[str, Results], classes: int = 0, *, mark: str = "", first: int = 0,
                  legend: bool = True) -> None:
    """Draw the thesis' figure, a curve for each case: cumulative quality, cumulative utilisation and intensity by feature, the
    strongest first. Beside a case's name stand test accuracy in parentheses and kappa in square brackets. [layerwise, Fig. 2.3]

    ``mark``: "_fit" for the fitting sample; ``classes``: a line at so many features; ``first``: only so many are drawn."""
    for i, (name, r) in enumerate(cases.items()):
        words = f"{name} ({100 * np.median(r['accuracy']):.1f} %) [{np.median(r['kappa_cka' + mark]):.2g}]"
        curves = (r[f"quality{mark}"].cumsum(1), r[f"utilisation{mark}"].cumsum(1), relative_intensity(r["intensity"]))
        for ax, rows in zip(axes, curves, strict=True):
            shown = rows[:, :first or None]
            band(ax, np.arange(1, shown.shape[1] + 1), shown, COLOURS[i % len(COLOURS)], words)
    for ax, y, title in zip(axes, ("cumulative quality", "cumulative utilisation", "intensity, relative to the first"),
                            ("a: of the target", "b: by the learned function", "c: strength"), strict=True):
        if classes:
            line(ax, [classes, classes], ax.get_ylim(), "#999999", style=":")
        label(ax, "feature", y, title, log="xy" if ax is axes[2] else "x", legend=legend and ax is axes[2])


def relative_intensity(intensity: NDArray[np.float64]) -> NDArray[np.float64]:
    """Intensity over that of the strongest feature; features too faint to be drawn are NaN."""
    share = intensity / intensity.max(-1, keepdims=True)
    return np.where(share > FAINTEST, share, np.nan)
