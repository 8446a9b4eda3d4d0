"""When an Observer measures: every so many steps, at some steps, by a rule; and how much of the wall time that may take, and how
it is spread over a training: where features move is early."""

from __future__ import annotations

import math
import operator
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from numbers import Integral, Real
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


# ---------------------------------------------------------------------------------------------------------- budget

AHEAD = 20.0  # seconds of training, whose share may be spent before it is earned where nobody knows how long the training will be
RECENT = 5  # measurements from which the cost of the next is told
DECADES = 4  # of steps over which they are spread
SURE = 0.9  # of what a training will earn, as far as one can tell: its later steps may be quicker
FEW = 8  # measurements: where no more can be paid for, all are spread over the logarithm of the step


@dataclass
class Budget:
    """``share`` of wall time, None for no limit; ``steps`` of the training, if they are known.

    Then what the whole training will earn is spread over it, most of it evenly in the logarithm of the step, and up to half
    evenly in the step, where many measurements can be paid for; how long it will take is told from the steps so far. Where they
    are not known, the share of AHEAD seconds is lent, evenly in the logarithm of the step, and paid back: what is earned later
    goes there first. Steps may begin again, in every epoch say: they are counted as they come. A training that goes on at a step
    before ``steps`` ends there.
    """

    share: float | None
    steps: int | None = None
    begun: float | None = None  # when the first call came
    at: int = 0  # the step of the last
    done: int = 0  # steps since the first
    left: int = 0  # steps to come
    spent: float = 0.0
    costs: dict[bool, deque[float]] = field(  # of the last, by whether they were brief
        default_factory=lambda: {brief: deque(maxlen=RECENT) for brief in (False, True)})
    opening: float | None = None  # seconds of the first
    on_brief: float = 0.0  # seconds of what is cheap alone
    seen: tuple[tuple[int, float], ...] = ((0, 0.0), (0, 0.0))  # steps and seconds of training, at the last two doublings

    def __post_init__(self) -> None:
        if self.share is not None and not (isinstance(self.share, Real) and 0 < self.share <= 1):
            raise SelectionError(f"budget={self.share}: a share of wall time in (0, 1], or None for no limit.")
        if self.steps is not None and not (isinstance(self.steps, Integral) and self.steps > 0):
            raise SelectionError(f"steps={self.steps!r}: the number of steps of the training, a positive number, or None if it "
                                 f"is not known.")

    def come(self, step: int) -> None:
        """At every call: so far has the training come."""
        if self.begun is None:
            self.begun, self.at = time.perf_counter(), step
            self.left = 0 if self.steps is None else self.steps - step if step < self.steps else self.steps
        further = step - self.at if step >= self.at else 1
        self.at, self.done, self.left = step, self.done + further, max(0, self.left - further)

    def pay(self, seconds: float, done: bool, brief: bool) -> None:
        """A measurement that failed is paid for, and the next is expected to take as long at least."""
        self.spent += seconds
        self.on_brief += seconds if brief else 0.0
        if self.opening is None and not brief and done:
            self.opening = seconds
        else:
            self.costs[brief].append(seconds if done else max(seconds, self._expected(brief)))

    def _expected(self, brief: bool) -> float:
        """Seconds of the next measurement: the median of the last ones, of which one may have been disturbed; until there are
        some, a guess from the first, which pays for what is loaded once."""
        if self.costs[brief]:
            return statistics.median(self.costs[brief])
        return self._expected(False) / 5 if brief else (self.opening or 0.0) / 5

    @property
    def taken(self) -> float:
        """The share that was taken."""
        elapsed = 0.0 if self.begun is None else time.perf_counter() - self.begun
        return self.spent / elapsed if elapsed else 0.0

    @property
    def allows(self) -> bool:
        """Is there room for a whole measurement now, and for one more at the end?"""
        if self.share is None or self.begun is None:
            return True
        cost = self._expected(False)
        room, in_all = self._room(cost)
        return self.spent + cost <= room and self.spent + 2 * self._at_most() <= in_all

    @property
    def allows_brief(self) -> bool:
        """Is there room for what is cheap alone? It takes half of the budget at most, leaves the room of a whole measurement at
        the end, if there is any without it, and once there is room for more, that of one now."""
        if self.share is None or self.begun is None:
            return True
        cost, whole = self._expected(True), self._expected(False)
        room, in_all = self._room(cost)
        end = self.spent + self._at_most()
        kept = end + cost <= in_all or end - self.on_brief > in_all
        return kept and self.on_brief + cost <= room / 2 and (not self.costs[False] or self.spent + cost + whole <= room)

    def _at_most(self) -> float:
        """Seconds of a whole measurement that are kept for the end: where this is known, and until there was a second one, half
        of what the first took, which is more than is expected."""
        return max(self._expected(False), 0.0 if self.costs[False] or self.steps is None else (self.opening or 0.0) / 2)

    def _room(self, cost: float) -> tuple[float, float]:
        """Seconds that may have been spent by now, if a measurement of this cost is made, and, as far as one can tell, in all."""
        assert self.share is not None and self.begun is not None
        elapsed = time.perf_counter() - self.begun
        done, left, earned = self.done, self.left, self.share * (elapsed + cost)
        if self.steps is None:
            lent = self.share * AHEAD * min(1.0, math.log10(1 + done) / DECADES)
            return max(earned, lent), max(earned, self.share * AHEAD)
        if not done:
            return 0.0, math.inf
        training = self._pace(done, elapsed - self.spent) * (done + left)
        in_all = SURE * training * self.share / (1 - self.share) if self.share < 1 else math.inf
        evenly = max(0.0, 1 - FEW * cost / in_all) / 2 if in_all else 0.0
        part = (1 - evenly) * math.log1p(done) / math.log1p(done + left) + evenly * done / (done + left)
        return in_all * part, in_all

    def _pace(self, done: int, seconds: float) -> float:
        """Seconds of a step: of all so far, or of about the later half if those were quicker, because the first steps of a
        training pay for what is loaded once."""
        if done >= 2 * self.seen[1][0]:
            self.seen = self.seen[1], (done, seconds)
        before, then = self.seen[0]
        return min(seconds / done, (seconds - then) / (done - before)) if done > before else seconds / done
