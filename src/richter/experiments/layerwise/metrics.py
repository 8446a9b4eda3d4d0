"""What experiments on the features of networks share: a recipe of training, what the last layer reads, the numbers of the thesis
on the fitting sample and on held-out examples, and its drawing of three panels.

    fit(model, data.x, indicators(data.y), Recipe(epochs=30), run, seed=t.seed)            # all layers, or the last one only
    return numbers(model, data.x, indicators(data.y), data.x_test, indicators(data.y_test))

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
from numpy.typing import NDArray
from torch import Tensor, nn

from richter.core.modules import evaluated
from richter.experiments.frame import Results
from richter.experiments.training import Step, epochs, linears
from richter.measures import collapse, features
from richter.report.drawing import COLOURS, band, label, line
from richter.runs import Writer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BATCH = 500  # examples that go through a network at a time
FEATURES = ("kappa_cka", "deff_intensity", "deff_quality", "deff_utilisation", "quality_top", "utilisation_top", "constant")
COLLAPSE = ("nc1", "nc1_trace", "nc2_angle", "nc2_norm", "nc3", "nc4")
FAINTEST = 1e-8  # intensities below this share of the strongest are not drawn


@dataclass(frozen=True)
class Recipe:
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
    """The mean over examples of |f - y|^2 / 2, summed over outputs.  [layerwise, Eq. 1.11]"""
    return (f - y).square().sum(1).mean() / 2


def fit(model: nn.Module, x: Tensor, targets: Float[Tensor, "n k"], recipe: Recipe, run: Writer, *, seed: int = 0,
        loss: Callable[[Tensor, Tensor], Tensor] = squared, after: Step | None = None) -> None:
    """Train in place; ``after(epoch)`` is called after each epoch, and before the first with 0.

    Where only the last layer is trained, its inputs do not change: they are computed once, in eval mode."""
    trained, inputs = (readout(model), read(model, x)[0]) if recipe.last else (model, x)
    optimiser = torch.optim.SGD(trained.parameters(), recipe.lr, recipe.momentum, weight_decay=recipe.decay)
    schedule = torch.optim.lr_scheduler.StepLR(optimiser, recipe.every or recipe.epochs + 1, recipe.factor)

    def then(epoch: int) -> None:
        if epoch:
            schedule.step()
        if after is not None:
            after(epoch)

    epochs(trained, inputs, targets, optimiser, recipe.epochs, run, batch=recipe.batch, seed=seed, loss=loss, after=then)


def readout(model: nn.Module) -> nn.Linear:
    """The last linear layer."""
    last = model.get_submodule(linears(model)[-1])
    assert isinstance(last, nn.Linear)
    return last


@torch.no_grad()
def read(model: nn.Module, x: Tensor, batch: int = BATCH) -> tuple[Float[Tensor, "n p"], Float[Tensor, "n k"]]:
    """What the last layer reads of each example, and what it makes of it. The model is in eval mode, and afterwards as it was.

    It ends with that layer: another module stands in its place while the examples go through."""
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


def numbers(model: nn.Module, x: Tensor, targets: Float[Tensor, "n k"], x_test: Tensor, targets_test: Float[Tensor, "m k"]
            ) -> dict[str, Any]:
    """Of features fitted on ``x``: on the fitting sample (names with ``_fit``) and on held-out examples, as the thesis has them.

    Quality and utilisation of single features on held-out examples are inflated unless these are many more than the features;
    so the effective dimensions are to be read on the fitting sample. Neural collapse is of the fitting sample."""
    (Phi, f), (Phi_test, f_test) = read(model, x), read(model, x_test)
    fitted = features.analyse(Phi, targets, f)
    apart = features.analyse(Phi, targets, f, Phi_test, targets_test, f_test)
    rows: dict[str, Any] = {"intensity": fitted.intensity.numpy(force=True)}  # type: ignore[union-attr]
    for a, mark, y, outputs in ((fitted, "_fit", targets, f), (apart, "", targets_test, f_test)):
        rows |= {f"quality{mark}": a.quality.numpy(force=True),  # type: ignore[union-attr]
                 f"utilisation{mark}": a.utilisation.numpy(force=True)}  # type: ignore[union-attr]
        rows |= {f"{name}{mark}": getattr(a, name) for name in FEATURES}
        rows[f"accuracy{mark}"] = right(outputs, y)
    if targets.shape[1] > 1:
        last = readout(model)
        c = collapse.analyse(Phi, targets.argmax(1), last.weight.detach(), None if last.bias is None else last.bias.detach())
        rows |= {name: getattr(c, name) for name in COLLAPSE}
    return rows


def right(outputs: Float[Tensor, "n k"], targets: Float[Tensor, "n k"]) -> float:
    """The share of examples whose largest output is that of their class; of one output: that is nearest to its target among the
    whole numbers.  [layerwise, Fig. 3.6]"""
    if targets.shape[1] == 1:
        return ((outputs - targets).abs() < 0.5).double().mean().item()
    return (outputs.argmax(1) == targets.argmax(1)).double().mean().item()


def metric_panels(axes: Sequence[Axes], cases: Mapping[str, Results], classes: int = 0, *, mark: str = "", first: int = 0,
                  legend: bool = True) -> None:
    """The thesis' figure, a curve for each case: cumulative quality, cumulative utilisation and intensity by feature, the
    strongest first. Beside a case's name, test accuracy in parentheses and kappa in square brackets.  [layerwise, Fig. 2.3]

    ``mark``: "_fit" for the fitting sample; ``classes``: a line at so many features; ``first``: only so many are drawn."""
    for i, (name, r) in enumerate(cases.items()):
        words = f"{name} ({100 * np.median(r['accuracy']):.1f} %) [{np.median(r['kappa_cka' + mark]):.2g}]"
        curves = (r[f"quality{mark}"].cumsum(1), r[f"utilisation{mark}"].cumsum(1), relative(r["intensity"]))
        for ax, rows in zip(axes, curves, strict=True):
            shown = rows[:, :first or None]
            band(ax, np.arange(1, shown.shape[1] + 1), shown, COLOURS[i % len(COLOURS)], words)
    for ax, y, title in zip(axes, ("cumulative quality", "cumulative utilisation", "intensity, relative to the first"),
                            ("a: of the target", "b: by the learned function", "c: strength"), strict=True):
        if classes:
            line(ax, [classes, classes], ax.get_ylim(), "#999999", style=":")
        label(ax, "feature", y, title, log="xy" if ax is axes[2] else "x", legend=legend and ax is axes[2])


def relative(intensity: NDArray[np.float64]) -> NDArray[np.float64]:
    """To that of the strongest feature; what is too faint to be drawn is left out."""
    share = intensity / intensity.max(-1, keepdims=True)
    return np.where(share > FAINTEST, share, np.nan)
