"""Bytes that measuring a large model takes, whatever is measured, and that looking at it takes. Those of a small one are not what
a bound of memory is about."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from richter.core.sizes import SMALL
from richter.instrument.capture import BACKUP_BYTES, TOGETHER, count, weight_bytes
from richter.instrument.survey import looked

if TYPE_CHECKING:
    from richter.instrument.subject import Subject


def survey_bytes(subject: Subject) -> int:
    """That a look at a few examples of a large model takes."""
    survey, asked = subject.survey, sum(info.width for info in subject.survey.maps.values())
    need = subject.itemsize * looked(subject.model, count(subject.few), survey.graph, asked, survey.outputs)
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
