"""What a network was trained on: the data loss L of a probe, and its gradient in the outputs.

    Probe(x, y)                                                 # ids: cross-entropy; targets: squared error; as torch has them
    Probe(x, y, loss=nn.MSELoss(), weight_decay=1e-4)           # class ids are then one-hot targets
    Probe(x, y, loss=lambda f, y: (f - y).square().sum(1))      # a mean over examples, or one number for each

The loss is called as loss(f, y) with all examples of the probe at once, so that nothing depends on chunks. ``weight_decay`` is
that of the objective L + weight_decay/2 |theta|^2, whose gradient ``torch.optim.SGD(weight_decay=)`` follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from richter.core import Labels, ProbeError
from richter.instrument.probe import IGNORE_INDEX, Probe
from richter.instrument.targets import OneHot

# losses that compare each output with a target of its own
ELEMENTWISE = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCEWithLogitsLoss, nn.BCELoss)
ELEMENTWISE_FUNCTIONS = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits,
                         F.binary_cross_entropy)


@dataclass(frozen=True, eq=False)
class Objective:
    """A loss and the labels it is asked with."""

    loss: Callable[..., Any] | None
    y: Tensor | None  # as the probe has them
    Y: Any  # targets "n k", one-hot for class ids (of many outputs a OneHot), or None
    ids: Tensor | None  # class or token ids, IGNORE_INDEX where there is none
    counted: Tensor | None  # "n k", False at outputs that do not count

    @classmethod
    def of(cls, probe: Probe, shape: torch.Size, Y: Tensor | None, counted: Tensor | None) -> Objective | None:
        """That of a probe whose outputs have ``shape`` [n, ...]; None if it has neither labels nor a loss."""
        if probe.loss is None and probe.y is None:
            return None
        ids = None
        if probe.y is not None and probe.holds_ids(shape):
            ids = torch.where(probe.y == probe.ignore_index, IGNORE_INDEX, probe.y)
            if counted is not None:
                ids = torch.where(counted.reshape(*shape)[..., 0].to(ids.device), ids, IGNORE_INDEX)
        return cls(probe.loss, probe.y, Y, ids, counted)

    def of_rows(self, keep: Tensor) -> Objective:
        """The same of some examples."""
        labels = (self.y, self.Y, self.ids, self.counted)
        parts: list[Any] = [None if t is None else t.take(keep.to(t.device)) if isinstance(t, OneHot) else
                            t[keep.to(t.device)] for t in labels]
        return Objective(self.loss, *parts)

    @property
    def classes(self) -> Tensor | None:
        """Class or token ids, negative where there is none: as given, or of targets of which one is 1 and the others 0."""
        if self.ids is not None or self.Y is None or self.Y.shape[1] < 2:
            return self.ids
        hot = bool(((self.Y == 0) | (self.Y == 1)).all()) and bool((self.Y.sum(1) == 1).all()) and self.counted is None
        return self.Y.argmax(1) if hot else None

    @property
    def assumed(self) -> bool:
        """Is the loss one that these targets need not be trained with? Those of 0 and 1 and probabilities are mostly trained with
        a cross-entropy."""
        if self.loss is not None or self.ids is not None or self.Y is None:
            return False
        Y = self.Y if self.counted is None else self.Y[self.counted.to(self.Y.device)][:, None]
        sums = (Y >= 0).all() and ((Y.sum(1) - 1).abs() < 1e-4).all()
        return bool(((Y == 0) | (Y == 1)).all() or (sums and Y.shape[1] > 1))

    @property
    def labels(self) -> Labels | None:
        """What guessing would get right on the classes; None where the labels are none."""
        ids = self.classes
        if ids is None or self.Y is None:
            return None
        real, classes = ids[ids >= 0], self.Y.numel() // ids.numel()
        if not len(real) or classes < 2:
            return None
        shares = real.bincount().double() / len(real)
        entropy = -torch.special.xlogy(shares, shares).sum().item() if self._plain_cross_entropy else 0.0
        return Labels(len(real), classes, shares.max().item(), entropy or None)  # of one class there is nothing to guess

    @property
    def _plain_cross_entropy(self) -> bool:
        """Of class or token ids, every label with the same weight."""
        own = self.loss
        plain = own is None or own is F.cross_entropy or (isinstance(own, nn.CrossEntropyLoss) and own.weight is None
                                                          and not own.label_smoothing)
        return plain and self.ids is not None

    def gradient(self, f: Tensor) -> Float[Tensor, "n k"]:
        """n dL/df of outputs f [n, ...]."""
        f = f.detach().to(torch.promote_types(f.dtype, torch.float32)).requires_grad_()
        L = self.mean(f)
        (d,) = torch.autograd.grad(L, f)
        if not torch.isfinite(d).all():
            raise ProbeError(f"the gradient of {self} in the outputs is NaN or Inf, and so would be every weight's. Give a loss "
                             f"that is differentiable where the model is.")
        V = len(f) * d.reshape(len(f), -1)
        if self.counted is not None and bool(V[~self.counted.to(V.device)].any()):
            raise ProbeError(f"{self} depends on outputs that do not count (masked positions, or labels that are ignore_index). "
                             f"Leave loss= out for cross-entropy or squared error of those that do, or give a loss that leaves "
                             f"the others out; it is called with all {len(f)} examples at once.")
        self._check_mean(f.detach(), L.item())
        return V

    def mean(self, f: Tensor) -> Float[Tensor, ""]:
        """L: what the loss returns, or the mean of it where it returns one number for each example."""
        try:
            found = self._default(f) if self.loss is None else self._own(f, self.loss)
        except Exception as why:
            raise ProbeError(f"{self} failed on outputs of shape {tuple(f.shape)} and labels of shape "
                             f"{None if self.y is None else tuple(self.y.shape)} ({type(why).__name__}: {why}). It is called as "
                             f"loss(f, y) with all examples of the probe, f as the model (or output=) returns it.") from why
        if not isinstance(found, Tensor) or not found.is_floating_point() or (found.dim() and found.numel() != len(f)):
            seen = f"numbers of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise ProbeError(f"{self} returned {seen} for {len(f)} examples. Their mean is needed, or one number for each.")
        if not torch.isfinite(found).all():
            raise ProbeError(f"{self} is NaN or Inf on the probe, and so would be every number that is made of it. Has the run "
                             f"diverged, or do the labels not suit the loss?")
        if not found.requires_grad:
            raise ProbeError(f"{self} does not depend on the outputs in a way that autograd can follow: it is constant, or was "
                             f"detached.")
        return found.mean()

    def _default(self, f: Tensor) -> Tensor:
        """Cross-entropy of class or token ids, squared error of targets: means over all that count, as torch's are."""
        if self.ids is not None:
            return F.cross_entropy(_last(f), self.ids.reshape(-1).to(f.device), ignore_index=IGNORE_INDEX)
        assert self.Y is not None
        squares = (f.reshape(len(f), -1) - self.Y.to(f)).square()
        return squares.mean() if self.counted is None else squares[self.counted.to(f.device)].mean()

    def _own(self, f: Tensor, loss: Callable[..., Any]) -> Any:
        """The user's. torch's own losses get labels in the shape that they need, any other those of the probe."""
        if self.Y is not None and (isinstance(loss, ELEMENTWISE) or loss in ELEMENTWISE_FUNCTIONS):
            return loss(f, self.Y.reshape(f.shape).to(f))
        if self.Y is not None and (isinstance(loss, nn.CrossEntropyLoss) or loss is F.cross_entropy):
            if self.ids is None:
                return loss(_last(f), _last(self.Y.reshape(f.shape)).to(f))
            ignored = getattr(loss, "ignore_index", IGNORE_INDEX)
            return loss(_last(f), torch.where(self.ids == IGNORE_INDEX, ignored, self.ids).reshape(-1).to(f.device))
        y = self.y
        return loss(f, None if y is None else y.to(f) if y.is_floating_point() else y.to(f.device))

    def _check_mean(self, f: Tensor, L: float) -> None:
        """A sum over examples doubles when every example is there twice. A loss that knows how many there are is trusted."""
        if self.loss is None or not L:
            return
        labels = (self.y, self.Y, self.ids, self.counted)
        again = torch.arange(len(f)).repeat(2)
        twice = Objective(self.loss, *(None if t is None else t[again] for t in labels))
        try:
            doubled = twice.mean(torch.cat([f, f]).requires_grad_()).item()
        except ProbeError:
            return
        if abs(doubled - 2 * L) <= 1e-5 * abs(L):
            raise ProbeError(f"{self} is a sum over examples: it doubles when each is given twice. A mean is needed "
                             f"(reduction='mean'), because a probe seldom has as many examples as were trained on; divide the "
                             f"loss and weight_decay by the number of examples.")

    def __str__(self) -> str:
        name = getattr(self.loss, "__name__", type(self.loss).__name__)
        return "the loss of the probe" if self.loss is None else f"Probe(loss={name})"


def _last(t: Tensor) -> Tensor:
    """Classes are the last axis here, and the second for torch."""
    return t.reshape(-1, t.shape[-1])
