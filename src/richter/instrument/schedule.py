"""When an Observer measures: every so many steps, at some steps, by a rule."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex

from richter.core import SelectionError

Schedule = Callable[[int], bool]
When = SupportsIndex | Iterable[SupportsIndex] | Schedule  # every so many steps, these steps, or a rule


def every(k: SupportsIndex) -> Schedule:
    """Every ``k`` steps."""
    k = _whole(k)
    if k < 1:
        raise SelectionError(f"when={k}: a positive number of steps is needed.")
    return lambda step: step % k == 0


def epochs(steps_per_epoch: Any, every_epochs: int = 1) -> Schedule:
    """At the start of every epoch; ``steps_per_epoch`` is a number, or a DataLoader."""
    return every((steps_per_epoch if isinstance(steps_per_epoch, int) else len(steps_per_epoch)) * every_epochs)


def log_spaced(last: int, count: int = 20) -> Schedule:
    """0 and about ``count`` steps, evenly spaced in the logarithm up to ``last``: where features move is early."""
    if last < 1 or count < 2:
        raise SelectionError(f"log_spaced({last}, {count}): a last step and at least two points are needed.")
    chosen = {0} | {round(math.exp(math.log(last) * i / (count - 1))) for i in range(count)}
    return chosen.__contains__


PER_DECADE = 20  # steps that are due, at the beginning


def early(steps: int | None = None) -> Schedule:
    """Some 20 steps in every decade, where features move, and every hundred; of a training of so many ``steps``, every hundredth
    part of it."""
    often = 100 if steps is None else max(1, steps // 100)

    def due(step: int) -> bool:
        decade = step > 1 and int(PER_DECADE * math.log10(step)) != int(PER_DECADE * math.log10(step - 1))
        return step <= 1 or decade or step % often == 0
    return due


def schedule(when: When) -> Schedule:
    if callable(when):
        return when
    if isinstance(when, Iterable):
        return {_whole(step) for step in when}.__contains__
    return every(when)


def _whole(step: Any) -> int:
    try:
        return operator.index(step)
    except TypeError:
        raise SelectionError(f"when={step!r}: a number of steps, a list of steps or a function of the step is needed.") from None
