"""Rules for the steps that are due, and how many examples of a probe a budget pays for.

When an Observer measures, and what. ``when`` says which steps are due, and the budget what is measured there:

    everything                if the budget pays for it
    the light set (LIGHT)     if the budget pays for no more; everything is then owed
    nothing                   otherwise: the step is put off, and everything is owed

What is owed is measured at the first call for which the budget pays, due or not. All measuring, the first and the last
measurement included, takes at most max(free seconds, share of the wall time). Seconds that may have been spent after d steps:

    steps unknown     max(share (t + cost), free (log(1 + d) / log(1 + D))^EARLY),  D: the step at which the share pays for more
    steps = N         the whole budget, in proportion to log(1 + d) / log(1 + N), and up to half of it to d / N

Of these, everything takes at most half of what a curve of CURVE light measurements leaves, and the light set the rest, or all
where everything can only be paid for at the end. The seconds of a last full measurement are always kept.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol, SupportsIndex

import torch

from richter.core import SelectionError
from richter.instrument.probe import Probe

Due = Callable[[int], bool]
When = SupportsIndex | Iterable[SupportsIndex] | Due  # every so many steps, these steps, or a rule
Part = Literal["everything", "light", "nothing"]

LEAST = 32  # examples to which a probe may be reduced (half of them, of texts); an eighth of them enter kernels
CURVE = 16  # light measurements for which the budget should pay before any but the last full one
FULL = 2.0  # cost of a full measurement relative to a light one, over the ratio of their passes, until one has been made


def epochs(steps_per_epoch: Any, every_epochs: int = 1) -> Due:
    """At the start of every epoch; ``steps_per_epoch`` is a number, or a DataLoader."""
    k = (steps_per_epoch if isinstance(steps_per_epoch, int) else len(steps_per_epoch)) * every_epochs
    if k < 1:
        raise SelectionError(f"epochs({steps_per_epoch}, {every_epochs}): a positive number of steps is needed.")
    return lambda step: step % k == 0


def log_spaced(last: int, count: int = 20) -> Due:
    """0 and about ``count`` steps, evenly spaced in the logarithm up to ``last``: where features move is early."""
    if last < 1 or count < 2:
        raise SelectionError(f"log_spaced({last}, {count}): a last step and at least two points are needed.")
    chosen = {0} | {round(math.exp(math.log(last) * i / (count - 1))) for i in range(count)}
    return chosen.__contains__


def whole_step_of(step: Any) -> int:
    """Return a whole number; raise an error about ``when`` otherwise."""
    try:
        return operator.index(step)
    except TypeError:
        raise SelectionError(f"when={step!r}: a number of steps, a list of steps or a function of the step is needed.") from None


# ---------------------------------------------------------------------------------------------------------- a probe that fits

def on_ranks() -> bool:
    """Are there several processes? They would choose different sizes."""
    return torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def least_examples(probe: Probe) -> int:
    """The fewest examples with enough rows of features: texts have a row for each token."""
    return LEAST // 2 if probe.y is not None and probe.y.dim() > 1 and not probe.y.is_floating_point() else LEAST


def fitted(given: int, least: int, cost: float, seconds: float, light: float, full: float, whole: float
           ) -> tuple[int, dict[Part, float]]:
    """Choose the largest number of examples for which ``whole`` seconds pay: a curve of light measurements, and everything at the
    end; and estimate what these cost. ``cost``: of a light measurement of the ``least`` examples; ``seconds``: of a pass of one
    example; ``light``, ``full``: passes of each set."""
    n = given
    while True:
        one = cost + light * seconds * (n - least)
        guess: dict[Part, float] = {"light": one, "everything": FULL * max(1.0, full / light) * one}
        if n // 2 < least or CURVE * one + guess["everything"] <= whole:
            return n, guess
        n //= 2


class Spending(Protocol):
    """The part of a schedule that an announcement reads."""

    share: float | None
    free: float
    spent: float

    def expected(self, part: Part) -> float:
        """Seconds of the next measurement."""


def announcement(s: Spending, probe: Probe, given: int) -> str:
    """One line: what a measurement costs, how many there may be, and how to get more or fewer."""
    light, full = s.expected("light"), s.expected("everything")
    fewer = "" if probe.n == given else (f" The probe has {given}, which cost more than the budget of a short training; "
                                         f"{probe.kernel_examples} of these {probe.n} enter kernels.")
    number = max(1, int((s.free - full - s.spent) / light)) if light > 0 else 1
    return (f"richter: measuring {probe.n} examples takes about {light:.2g} s for the light set and {full:.2g} s for everything. "
            f"The budget ({s.share:.0%} of the time, or {s.free:g} s if that is more) pays for about {number} light "
            f"measurements and a full one at the end of a short training.{fewer} More: free_seconds=, budget=; fewer: when=; "
            f"to hide this line: announce=False.")
