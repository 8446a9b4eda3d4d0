"""Bytes that measuring a large model takes, whatever is measured, and that looking at it takes. Those of a small one are not what
a bound of memory is about."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from richter.core.sizes import SMALL
from richter.instrument.capture import BACKUP_BYTES, TOGETHER, count, weight_bytes

if TYPE_CHECKING:
    from richter.instrument.subject import Subject

OUTPUTS = 8  # arrays of an example's outputs that a survey holds


def survey_bytes(subject: Subject) -> int:
    """That a look at a few examples of a large model takes: their graphs, what two halves of them ask, arrays of their outputs,
    the gradients of all weights, and the largest of them twice more."""
    survey, numbers = subject.survey, [p.numel() for p in subject.model.parameters()]
    asked = sum(info.width for info in survey.maps.values())
    each = survey.graph + 2 * asked + OUTPUTS * survey.outputs
    need = subject.itemsize * (count(subject.few) * each + sum(numbers) + 2 * max(numbers, default=0))
    return need if weight_bytes(subject.model) > SMALL else 0


def audit_bytes(subject: Subject, maps: Iterable[str]) -> int:
    """Of the gradients with which captures of these maps are compared: some of them at once, or one that is several maps, whose
    parts are added up. Those of a small model are not what a bound is about."""
    survey, item = subject.survey, subject.itemsize
    weights = {name: subject.state[name].numel() for k in maps if (name := survey.maps[k].weight) is not None}
    largest = item * max(weights.values(), default=0)
    need = max(min(item * sum(weights.values()), TOGETHER) + largest, 3 * largest)
    return need if need > SMALL and subject.audit is not None else 0


def copied_bytes(model: nn.Module) -> int:
    """Of copies of weights and of gradients, where they are kept to see that nothing was disturbed."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    copies = [weight_bytes(model), sum(g.numel() * g.element_size() for g in grads)]
    return sum(size for size in copies if size <= BACKUP_BYTES)


def fixed_bytes(copied: int, held: Iterable[Tensor | None]) -> int:
    """Bytes that a measurement of a large model takes whatever is measured: what is ``copied``, and what is ``held`` of the
    probe."""
    arrays = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held if isinstance(t, Tensor)}
    need = copied + sum(arrays.values())
    return need if need > SMALL else 0
