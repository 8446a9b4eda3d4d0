"""Acceleration by feature learning: whether a network learned faster than under its initial kernel.  [rapid, Fig. 1A, Sec. 4 and
7]

    found = richter.workflows.acceleration(model, x, y, lr=0.01, steps=1000)
    print(found.summary); found.draw("acceleration.png")

The measured loss is compared with three that need only kernels: descent under the initial kernel; the same with the rate scaled
to the final kernel's norm (the effect of a larger kernel that does not rotate); and optimal feature evolution with the gamma that
the two kernels imply. All descend on the squared error of ``nn.MSELoss``: its mean over examples and outputs, or with
``reduction="sum"`` its sum.
"""

from __future__ import annotations

import copy
import html
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from richter.core import DivergedError, SelectionError, parse_bytes, show_bytes
from richter.core.modules import unwrap
from richter.core.values import progress
from richter.instrument.capture import Output, quiet
from richter.kernels import dynamics, ntk
from richter.linalg import alignment, top_eigenvalue
from richter.theory.ofe import OptimalFeatureEvolution

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Numbers = NDArray[np.float64]
Reduction = Literal["mean", "sum"]
RECORDED = 60  # default number of recorded steps
MATERIAL = 0.9  # the gain is material if a loss is below this share of the other
TITLES = {"network": "the network", "kernel": "its initial kernel", "rescaled": "the same, to the final norm",
          "ofe": "optimal feature evolution"}


@dataclass(frozen=True, repr=False)
class Acceleration:
    """Result of ``acceleration``. ``curves``: losses [t] at ``steps``, by name: network, kernel, rescaled, ofe."""

    steps: NDArray[np.int64]
    curves: Mapping[str, Numbers]
    gamma: float  # mean over outputs, for kernels in units of |K0|
    gammas: Numbers = field(repr=False)  # of each output, NaN if it has no labels; in the kernels' own units
    norm: float  # final |K| / |K0|
    alignment: tuple[float, float]  # alignment of the kernel with the labels before and after, averaged over outputs
    evolution: Numbers = field(repr=False)  # alignment [t] of optimal feature evolution
    lr: float
    reduction: Reduction = "mean"  # of the losses, to whose gradient the rate belongs
    note: str = ""

    @property
    def ahead(self) -> int | None:
        """First step from which the network stays below kernel descent, and below descent with the rescaled kernel; None if there
        is none. (A kernel that shrank slows descent down.)"""
        network, kernel, rescaled = (self.curves[k] for k in ("network", "kernel", "rescaled"))
        behind = np.flatnonzero(~(network < np.minimum(rescaled, kernel)))
        last = behind[-1] if len(behind) else -1
        return int(self.steps[last + 1]) if last + 1 < len(self.steps) else None

    @property
    def summary(self) -> str:
        """Sentences that compare the network with both kernel descents."""
        network, kernel, rescaled = (float(self.curves[k][-1]) for k in ("network", "kernel", "rescaled"))
        numbers = (f"after {self.steps[-1]:,} steps the loss is {network:.3g}, {kernel:.3g} under the initial kernel and "
                   f"{rescaled:.3g} under that kernel rescaled to the final norm")
        if self.ahead is not None and network < MATERIAL * kernel:
            verdict = f"Yes, the network learned faster than its initial kernel, even if rescaled (from step {self.ahead:,} on)"
        elif network < MATERIAL * kernel:
            verdict = "In part: the network learned faster than its initial kernel, but not faster than that kernel rescaled"
        else:
            verdict = "No, the network did not learn faster than its initial kernel"
        moved = (f"The kernel's norm is {self.norm:.3g} times its initial value, its alignment with the labels went from "
                 f"{self.alignment[0]:.3f} to {self.alignment[1]:.3f}, and the effective gamma is {self.gamma:.3g}.")
        return f"{verdict}: {numbers}. {moved}" + (f" {self.note}" if self.note else "")

    def __repr__(self) -> str:
        losses = ", ".join(f"{name} {float(curve[-1]):.3g}" for name, curve in self.curves.items())
        return f"Acceleration({int(self.steps[-1]):,} steps: losses {losses}; gamma {self.gamma:.3g})"

    def _repr_html_(self) -> str:
        """The summary and the figure."""
        drawn = io.StringIO()
        self.draw().savefig(drawn, format="svg")
        return f"<p>{html.escape(self.summary)}</p>{drawn.getvalue()[drawn.getvalue().index('<svg'):]}"

    def draw(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw the four losses and the alignment; save the figure if a path is given."""
        figure = _drawn(self)
        if path is not None:
            figure.savefig(path)
        return figure


def acceleration(model: nn.Module, x: Tensor, y: Tensor, *, lr: float, steps: int = 1000,
                 train_step: Callable[[nn.Module], Any] | None = None, reduction: Reduction = "mean",
                 record: Sequence[int] | None = None, output: Output | None = None, chunk: int = 256,
                 memory: str | float = "2GiB") -> Acceleration:
    """Train a network, and compare it with training under fixed kernels. Kernels and losses are computed in eval mode.

    By default a copy of ``model`` takes ``steps`` full-batch steps of plain gradient descent of size ``lr`` on all of ``x``,
    ``chunk`` examples at a time. With ``train_step(model)``, called once per step, the model itself is trained; ``lr`` is then
    the rate of the comparison. ``reduction``: of the squared error, as of ``nn.MSELoss``: its mean over examples and outputs, or
    its sum. ``y``: class ids [n], or targets [n, k]. ``record``: steps at which losses are recorded, besides the first
    and the last. If the kernel of all outputs does not fit into ``memory``, each output's own kernel is used, and the note says
    so. """
    subject = unwrap(model) if train_step is not None else copy.deepcopy(unwrap(model))
    _check(subject, x, lr, steps, reduction)
    Y = _targets(y, _outputs(subject, x, output, chunk))
    per = Y.numel() if reduction == "mean" else 1
    rate = 2 * lr / per  # of sum (f - y)^2 / 2, on which everything below descends
    due = _due(steps, record)
    before = _Kernels.of(subject, x, output, memory, Y)
    _stable(before.whole, lr, rate)
    frozen = dynamics.kernel_gradient_descent(before.whole, Y, rate, steps, before.f, due)
    losses = _trained(subject, x, Y, rate, steps, due, train_step, output, chunk)
    after = _Kernels.of(subject, x, output, memory, Y)
    rescaled = dynamics.rescaled_gradient_descent(before.whole, after.whole, Y, rate, steps, before.f, due)
    gammas, evolved, aligned = _evolution(before, after, Y, rate, due)
    sizes = before.own.flatten(1).norm(dim=1)
    curves = {"network": losses, "kernel": np.asarray(frozen.loss), "rescaled": np.asarray(rescaled.loss), "ofe": evolved}
    curves = {name: losses / per for name, losses in curves.items()}
    gamma = float(np.nanmean(gammas / sizes.numpy())) if np.isfinite(gammas).any() else math.nan
    return Acceleration(np.array(due), curves, gamma, gammas, dynamics.norm_ratio(before.whole, after.whole),
                        (before.alignment(Y), after.alignment(Y)), aligned, float(lr), reduction, before.note)


# ------------------------------------------------------------------------------------------------ kernels


@dataclass(frozen=True)
class _Kernels:
    """Tangent kernels of a network in its current state, in double precision."""

    whole: Tensor  # "n k n k", or "k n n" if that is too large
    own: Float[Tensor, "k n n"]
    f: Float[Tensor, "n k"]
    note: str

    @classmethod
    def of(cls, model: nn.Module, x: Tensor, output: Output | None, memory: str | float, Y: Float[Tensor, "n k"]) -> _Kernels:
        """Kernel of each output and its eigenpairs, in float64."""
        twin = copy.deepcopy(model).double().eval()
        x = x.double() if x.is_floating_point() else x
        (n, k), allowed = Y.shape, parse_bytes(memory)
        whole, single = 8 * 4 * (n * k) ** 2, 8 * 4 * k * n ** 2  # with eigenvectors and intermediate results
        if single > allowed:
            raise SelectionError(f"the kernels of {n} examples and {k} outputs need memory='{show_bytes(single)}', and memory="
                                 f"{show_bytes(allowed)}: give fewer examples, or fewer outputs with output=.")
        f = _outputs(twin, x, output, n).cpu()
        outputs: Literal["full", "diagonal"] = "full" if whole <= allowed else "diagonal"
        K = ntk(twin, x, form=outputs, output=output, memory=memory).double().cpu()
        if outputs == "diagonal":
            return cls(K, K, f, f"Kernels are computed for each output separately: the joint kernel of all {k} needs "
                                f"memory='{show_bytes(whole)}'.")
        return cls(K, K.diagonal(dim1=1, dim2=3).permute(2, 0, 1).contiguous(), f, "")

    def alignment(self, Y: Float[Tensor, "n k"]) -> float:
        """Mean alignment of each output's kernel with its labels."""
        return float(np.mean([alignment(K, y) for K, y in zip(self.own, Y.T, strict=True) if y.any() and K.any()]))


def _evolution(before: _Kernels, after: _Kernels, Y: Float[Tensor, "n k"], lr: float, due: Sequence[int]
               ) -> tuple[Numbers, Numbers, Numbers]:
    """Return (gamma of each output, loss [t], alignment [t]) of optimal feature evolution, output by output. If the alignment
    fell, or there are no labels, the kernel is constant."""
    gammas, losses, aligned = np.full(Y.shape[1], math.nan), np.zeros(len(due)), []
    t = [float(step) for step in due]
    for c, y in enumerate(Y.T):
        K0, K = before.own[c], after.own[c]
        if y.any() and K0.any() and K.any():
            gammas[c] = dynamics.effective_gamma(K0, K, y)
            theory = OptimalFeatureEvolution(K0, y, max(0.0, gammas[c]) if math.isfinite(gammas[c]) else 0.0, lr, before.f[:, c])
            losses += np.asarray(theory.loss(t))
            aligned.append(np.asarray(theory.alignment(t)))
        elif K0.any():
            losses += np.asarray(dynamics.kernel_gradient_flow(K0, y, lr, t, before.f[:, c]).loss)
        else:
            losses += (before.f[:, c] - y).square().sum().item()
    return gammas, losses, np.mean(aligned, 0) if aligned else np.full(len(due), math.nan)


# ------------------------------------------------------------------------------------------------ training


def _trained(model: nn.Module, x: Tensor, Y: Float[Tensor, "n k"], lr: float, steps: int, due: Sequence[int],
             train_step: Callable[[nn.Module], Any] | None, output: Output | None, chunk: int) -> Numbers:
    """Train, and return sum (f - y)^2 at the steps that are due."""
    losses, wanted = [], set(due)
    for step in progress(range(steps + 1), title="training"):
        if step in wanted:
            losses.append((_outputs(model, x, output, chunk).cpu() - Y).square().sum().item())
            if not math.isfinite(losses[-1]):
                raise DivergedError(f"the loss is {losses[-1]} at step {step} of {steps}: training diverged. The rate is stable "
                                    f"under the initial kernel, but kernels grow: try a tenth of it.")
        if step == steps:
            break
        if train_step is None:
            _descend(model, x, Y, lr, output, chunk)
        else:
            train_step(model)
    return np.array(losses)


def _descend(model: nn.Module, x: Tensor, Y: Float[Tensor, "n k"], lr: float, output: Output | None, chunk: int) -> None:
    """Take one step of full-batch gradient descent in eval mode, with the gradient summed over chunks."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in parameters]
    model.eval()
    for rows in torch.arange(len(x)).split(chunk):
        f = _picked(model(x[rows].to(parameters[0].device)), output)
        half = 0.5 * (f - Y[rows].to(f)).square().sum()
        for t, g in zip(total, torch.autograd.grad(half, parameters, allow_unused=True), strict=True):
            t += 0 if g is None else g
    with torch.no_grad():
        for p, t in zip(parameters, total, strict=True):
            p.sub_(t, alpha=lr)


def _outputs(model: nn.Module, x: Tensor, output: Output | None, chunk: int) -> Float[Tensor, "n k"]:
    """Compute outputs in eval mode, as double precision; the model is restored."""
    device = next(model.parameters()).device
    with torch.no_grad(), quiet(model):
        return torch.cat([_picked(model(rows.to(device)), output).double() for rows in x.split(chunk)])


def _picked(result: Any, output: Output | None) -> Float[Tensor, "n k"]:
    """Outputs as a matrix [n, k]."""
    f = result if output is None else output(result)
    if not isinstance(f, Tensor) or f.dim() == 0:
        raise SelectionError(f"the model returns a {type(f).__name__}, not a tensor [n, ...]: select one with output=, e.g. "
                             f"output=lambda out: out.logits.")
    return f.reshape(len(f), -1)


# ------------------------------------------------------------------------------------------------ arguments


def _check(model: nn.Module, x: Tensor, lr: float, steps: int, reduction: str) -> None:
    """Raise an error for arguments that are not valid."""
    if not isinstance(x, Tensor) or x.dim() == 0 or len(x) < 2:
        shape = f" of shape {tuple(x.shape)}" if isinstance(x, Tensor) else ""
        raise SelectionError(f"x is a {type(x).__name__}{shape}: give a tensor of "
                             f"two or more examples, because kernels compare examples.")
    if not any(p.requires_grad for p in model.parameters()):
        raise SelectionError(f"the model ({type(model).__name__}) has no trainable parameter, so it has no tangent kernel, and "
                             f"there is nothing to train. Is everything frozen (requires_grad=False)?")
    if not (isinstance(lr, Real) and math.isfinite(lr) and lr > 0):
        raise SelectionError(f"lr={lr!r}: give a rate above 0.")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise SelectionError(f"steps={steps!r}: give a number of steps, 1 or more.")
    if reduction not in ("mean", "sum"):
        raise SelectionError(f"reduction={reduction!r}: lr is the rate of the 'mean' of (f - y)^2 over examples and outputs, "
                             f"as of nn.MSELoss(), or of its 'sum'.")


def _targets(y: Tensor, f: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """Return targets "n k"; class ids become one-hot."""
    n, k = f.shape
    if not isinstance(y, Tensor) or y.dim() == 0 or len(y) != n or y.dim() > 2 or (y.dim() == 2 and y.shape[1] != k):
        description = f"has shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"is a {type(y).__name__}"
        raise SelectionError(f"y {description} for {n} examples and {k} outputs: give class ids [{n}] or targets [{n}, {k}].")
    if y.dim() == 1 and not y.is_floating_point() and k > 1:
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= k:
            raise SelectionError(f"y has class ids from {low} to {high}, and the model has {k} outputs: give ids from 0 to "
                                 f"{k - 1}.")
        return F.one_hot(y.long(), k).double().cpu()
    Y = y.double().cpu().reshape(n, -1)
    if Y.shape[1] != k:
        raise SelectionError(f"y has one target per example, but the model has {k} outputs: give targets [{n}, {k}].")
    if not bool(torch.isfinite(Y).all()) or not Y.any():
        raise SelectionError(f"y is {'zero' if not Y.any() else 'not finite'}, so no kernel can align with it. "
                             f"Give labels that are finite and not all 0.")
    return Y


def _stable(K: Tensor, lr: float, rate: float) -> None:
    """Raise an error if descent under the initial kernel diverges. ``rate`` is ``lr`` as a rate of sum (f - y)^2 / 2."""
    n = K.shape[0]
    top = max(map(top_eigenvalue, K)) if K.dim() == 3 else top_eigenvalue(K.reshape(n * K.shape[1], -1))
    if rate * top > 2:
        raise SelectionError(f"lr={lr:g} is beyond stability: under the initial kernel each step multiplies a residual by "
                             f"{1 - rate * top:.3g}, and it diverges. The largest stable lr is {2 * lr / (rate * top):.4g}; "
                             f"kernels grow, so take a fraction of it.")


def _due(steps: int, record: Sequence[int] | None) -> list[int]:
    """Steps at which losses are recorded."""
    if record is None:
        return sorted({0, steps, *(round(v) for v in np.geomspace(1, steps, RECORDED))})
    wrong = [s for s in record if s != int(s) or not 0 <= s <= steps]
    if wrong:
        raise SelectionError(f"record contains {wrong[0]!r}: the steps at which losses are recorded must be whole numbers "
                             f"between 0 and steps={steps}.")
    return sorted({0, steps, *(int(s) for s in record)})


# ------------------------------------------------------------------------------------------------ the figure


def _drawn(a: Acceleration) -> Figure:
    """Figure of losses and alignment."""
    from richter.report.drawing import COLOURS, caption, label, line, panels, styled

    @styled
    def draw() -> Figure:
        figure, (left, right) = panels(2, across=2, width=3.6, height=2.7)
        looks = (("#222222", "-"), (COLOURS[0], "--"), (COLOURS[1], "-."), (COLOURS[2], ":"))
        for (colour, style), (name, title) in zip(looks, TITLES.items(), strict=True):
            line(left, a.steps, np.maximum(a.curves[name], 1e-300), colour, title, style)
        label(left, "step", f"loss, {a.reduction} of (f - y)²", "loss", log="y", steps=True, legend=True)
        line(right, a.steps, a.evolution, COLOURS[2], TITLES["ofe"], ":")
        right.plot([a.steps[0], a.steps[-1]], a.alignment, "o", color="#222222", label="the network, before and after")
        label(right, "step", "alignment of kernel and labels", f"alignment, gamma = {a.gamma:.2g}", steps=True, legend=True)
        caption(figure, a.summary)
        return figure

    return draw()
