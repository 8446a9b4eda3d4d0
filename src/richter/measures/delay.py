"""Late generalisation (grokking): whether the test accuracy follows the training accuracy, long after it, or not yet. Numbers in,
numbers out; needs no torch.

    late = delay(steps, train, test)          # accuracies between 0 and 1
    late.state, late.delay                    # "ended", 1340
    str(late)                                 # "training solved at step 65 with a test accuracy of 0.391 then; ..."
    delay_of(run)                             # of a run that logged train_accuracy and test_accuracy
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from richter.core import SelectionError

SOLVED = 0.99  # a training accuracy of which the training set is solved
GAP = 0.25  # by so much the test accuracy is below that of training where a network has overfitted
RISE = 0.1  # a later rise of the test accuracy that counts
NEAR = 0.02  # the training accuracy beside the step at which it is solved: one point alone may be further below
NOISE = 4  # a rise is as many times what single points are off, at least: the best of many is above all of them
SHARE = 0.95  # of the best test accuracy: there the test is solved
REST = 0.2  # of the delay: for as long the test must have been solved, or it may still be rising
FEWEST = 5  # points of a curve that say anything
TRAIN, TEST = ("train_accuracy", "train_acc"), ("test_accuracy", "test_acc", "val_accuracy", "val_acc", "validation_accuracy")

State = Literal["unsolved", "together", "overfitted", "rising", "ended"]


@dataclass(frozen=True)
class Delay:
    """How long the test accuracy took after the training accuracy.

    | state | |
    |---|---|
    | unsolved | the training set was never solved: there is nothing to be late for |
    | together | when it was solved, the test accuracy was near: it never overfitted, and nothing is late |
    | overfitted | it was solved, the test accuracy was far below, and has not risen since: the delay goes on, or has no end |
    | rising | the test accuracy has risen late, and may rise further |
    | ended | it has risen late, and has stayed there |
    """

    state: State
    train_solved: float | None  # the step at which the training set was solved
    test_solved: float | None  # the step at which the test accuracy first was near its best; None where it never rose
    test_then: float  # the test accuracy when the training set was solved; at the end, where it was not
    test_best: float  # the best test accuracy, of medians of three points
    train_best: float  # of medians too
    first: float  # the first step that was seen, and the last
    last: float

    @property
    def delay(self) -> float | None:
        """Steps from the one to the other, 0 if the test came first; None where one of them has not been solved."""
        if self.train_solved is None or self.test_solved is None:
            return None
        return max(0.0, self.test_solved - self.train_solved)

    @property
    def late(self) -> bool:
        """Has the test accuracy risen late?"""
        return self.state in ("rising", "ended")

    def __str__(self) -> str:
        if self.train_solved is None or self.state == "unsolved":
            return (f"the training set is not solved: its accuracy has reached {self.train_best:.3g} by step {self.last:g}. "
                    f"Whether the test accuracy ({self.test_then:.3g}) is late cannot be said yet")
        before = f"by step {self.first:g}, the first that was seen," if self.train_solved == self.first else \
            f"at step {self.train_solved:g}"
        start = f"training solved {before} with a test accuracy of {self.test_then:.3g} then"
        if self.state == "together":
            if not self.delay:
                return f"{start}: no overfitting, and no delay (best {self.test_best:.3g})"
            return (f"{start}: no overfitting; near its best ({self.test_best:.3g}) at step {self.test_solved:g}, {self.delay:g} "
                    f"later")
        if self.state == "overfitted":
            return (f"{start}, and {self.test_best:.3g} at best since, until step {self.last:g}: it has overfitted. Whether late "
                    f"generalisation is still to come, these curves cannot say")
        how = f"{start}; test near its best ({self.test_best:.3g}) at step {self.test_solved:g}, {self.delay:g} later"
        return f"{how}: late generalisation" if self.state == "ended" else \
            f"{how}: late generalisation, which may not have ended: the curve stops at step {self.last:g}"


def delay(steps: ArrayLike, train: ArrayLike, test: ArrayLike, *, solved: float = SOLVED, gap: float = GAP, rise: float = RISE,
          share: float = SHARE, rest: float = REST) -> Delay:
    """From curves of accuracy: when the training set was solved (``solved``), whether the test accuracy was then below by more
    than ``gap``, whether it rose by ``rise`` since, when it came to a ``share`` of its best, and whether it stayed there for a
    ``rest`` of the delay. One point that stands out decides nothing, and neither do points that scatter: medians of three are
    looked at, and a rise stands out from what single points are off.
    """
    t, a, b = _curves(steps, train, test)
    for name, value in (("solved", solved), ("gap", gap), ("rise", rise), ("share", share)):
        if not 0 < value <= 1:
            raise SelectionError(f"{name}={value!r}: a share of the examples above 0, up to 1, is needed.")
    if not rest >= 0:
        raise SelectionError(f"rest={rest!r}: 0 or more is needed; it is a share of the delay.")
    rise = max(rise, NOISE * _noise(b))
    b = _medians(b)
    solutions = (a >= solved) & (_medians(a) >= solved - NEAR)
    common: dict[str, Any] = {"train_best": float(_medians(a).max()), "first": float(t[0]), "last": float(t[-1])}
    if not solutions.any():
        return Delay("unsolved", None, None, float(b[-1]), float(b.max()), **common)
    at = int(np.argmax(solutions))
    common |= {"train_solved": float(t[at]), "test_then": float(b[at])}
    if a[at] - b[at] <= gap:
        near = float(t[np.argmax(b >= share * b.max())])
        return Delay("together", test_solved=near, test_best=float(b.max()), **common)
    best = float(b[at:].max())
    if best - b[at] < rise:
        return Delay("overfitted", test_solved=None, test_best=best, **common)
    when = at + int(np.argmax(b[at:] >= share * best))
    rested = t[when] + rest * (t[when] - t[at])
    stayed = t[-1] >= rested and np.median(b[when:][t[when:] <= rested]) >= b[at] + rise
    return Delay("ended" if stayed else "rising", test_solved=float(t[when]), test_best=best, **common)


def delay_of(run: Any) -> Delay | None:
    """Of a run (``richter.runs.open``) that logged both accuracies, under a name of ``TRAIN`` and one of ``TEST``; None where it
    has not, or too few points of them."""
    names = [next((name for name in known if name in run.names), None) for known in (TRAIN, TEST)]
    if None in names:
        return None
    (s, a, *_), (r, b, *_) = (run.scalar(name) for name in names)
    both, i, j = np.intersect1d(s, r, return_indices=True)
    a, b = np.asarray(a, dtype=float)[i], np.asarray(b, dtype=float)[j]
    known = np.isfinite(a) & np.isfinite(b)
    both, a, b = both[known], a[known], b[known]
    shares = all(((c >= 0) & (c <= 1)).all() for c in (a, b))  # no percentages
    return delay(both, a, b) if shares and len(both) >= FEWEST else None


def _curves(steps: ArrayLike, *accuracies: ArrayLike) -> list[NDArray[np.float64]]:
    t, *curves = (np.asarray(z, dtype=np.float64) for z in (steps, *accuracies))
    if t.ndim != 1 or any(c.shape != t.shape for c in curves):
        raise SelectionError(f"steps of shape {t.shape} with accuracies of shapes {[c.shape for c in curves]}: one of each for "
                             f"every step is needed.")
    if len(t) < FEWEST:
        raise SelectionError(f"a curve of {len(t)} points is too short to say whether the test accuracy is late: {FEWEST} are "
                             f"needed at least, some of them before the training set is solved.")
    if not np.isfinite(t).all() or not (np.diff(t) > 0).all():
        raise SelectionError("steps must be finite and rise from each point to the next: sort the points, and leave out those "
                             "that are there twice.")
    if not all(((c >= 0) & (c <= 1)).all() for c in curves):  # also of NaN
        raise SelectionError("accuracies are shares between 0 and 1, without NaN: divide percentages by 100, and leave out steps "
                             "that were not measured.")
    return [t, *curves]


def _noise(values: NDArray[np.float64]) -> float:
    """What a single point is off, from how far points are from the line between their neighbours (the median of it, 1.5 for a
    standard deviation): a curve that rises steadily, or once at a stroke, has none."""
    bends = np.abs(values[:-2] - 2 * values[1:-1] + values[2:])
    return 1.4826 * float(np.median(bends)) / 6**0.5


def _medians(values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Of three neighbours; the first and the last point are themselves."""
    v = np.asarray(values, dtype=np.float64)
    inner = np.median(np.stack([v[:-2], v[1:-1], v[2:]]), 0)
    return np.concatenate([v[:1], inner, v[-1:]])
