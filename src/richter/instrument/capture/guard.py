"""Weights, buffers and gradients of a model that is measured: nothing may write into them. What does is put back, and an error.

Copies are kept of weights and buffers, and of gradients, if each come to at most ``originals.BACKUP_BYTES``: then every bit that
changes is seen, however it was written, and put back. Of larger models, a change that torch counts is seen and said.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor, nn

from richter.core import DisturbedError
from richter.instrument.capture.originals import BACKUP_BYTES, Original, finished, size_of

ADVICE = "Measure in the thread that trains, or a copy (copy.deepcopy(model))."


class Guard:
    """The weights of a model as they are now. ``others``: does another thread seem to work with the model?"""

    def __init__(self, model: nn.Module, others: Callable[[], bool]) -> None:
        self.others = others
        weights = {f"parameter {name!r}": p for name, p in model.named_parameters()}
        buffers = {f"buffer {name!r}": b for name, b in model.named_buffers()}
        self.grads = {label: (p, p.grad) for label, p in weights.items()}
        self.weights = _originals({**weights, **buffers})
        self.gradients = _originals({label: grad for label, (_, grad) in self.grads.items() if grad is not None})

    def finish(self) -> list[str]:
        """Put back what changed, unless another thread trains the model; what there is to say of it."""
        written = [label for label, original in self.weights.items() if original.changed()]
        graded = [label for label, (p, grad) in self.grads.items()
                  if p.grad is not grad or (grad is not None and self.gradients[label].changed())]
        if not written and not graded:
            return []
        if self.others():
            raise DisturbedError(f"{_names(written or graded)} changed while the model was measured, and another thread works "
                                 f"with the model. Its training goes on as if nothing had been measured, but numbers would "
                                 f"belong to no single set of weights. {ADVICE}")
        return [*self._weights_back(written), *self._gradients_back(graded)]

    def _weights_back(self, labels: list[str]) -> list[str]:
        if not labels:
            return []
        lost = [label for label in labels if not self.weights[label].restore()]
        return [f"{_names(labels)} changed while the model was measured: a forward or backward pass writes into the model's own "
                f"weights, not into those that it was called with (through .data, or another reference to them). "
                f"{_outcome(not lost)} Numbers would belong to no single set of weights. Write to it as an attribute of its "
                f"module, or keep such a tensor as a plain attribute."]

    def _gradients_back(self, labels: list[str]) -> list[str]:
        if not labels:
            return []
        back = True
        for label in labels:
            p, grad = self.grads[label]
            p.grad = grad
            if grad is not None and self.gradients[label].changed():
                back &= self.gradients[label].restore()
        return [f"the .grad of {_names(labels)} changed while the model was measured: something in the model differentiates its "
                f"own parameters, not those that it was called with (a backward() inside, an autograd.Function that recomputes). "
                f"{_outcome(back)} What arrived there is missing in the numbers. Use torch.autograd.grad inside the model, "
                f"toward tensors that were handed to it."]


def _originals(tensors: Mapping[str, Tensor]) -> dict[str, Original]:
    copied = sum(map(size_of, tensors.values())) <= BACKUP_BYTES
    return {label: Original(t, copied) for label, t in tensors.items()}


def _names(labels: list[str]) -> str:
    return ", ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else "")


def _outcome(back: bool) -> str:
    return "It was put back." if back else "It could not be put back: the model is too large for a copy to be kept."


@contextlib.contextmanager
def guarded(model: nn.Module, others: Callable[[], bool]) -> Iterator[None]:
    """Weights, buffers and gradients are afterwards as they were; that they were not meanwhile is an error."""
    with finished(Guard(model, others).finish):
        yield
