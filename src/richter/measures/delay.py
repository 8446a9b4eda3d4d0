"""Late generalisation (grokking): whether the test accuracy follows the training accuracy long after it. Numbers in, numbers out;
needs no torch.

    late = delay(steps, train, test)          # accuracies between 0 and 1
    late.state, late.delay                    # "ended", 1340
    str(late)                                 # "training solved at step 65 with a test accuracy of 0.391 then; ..."
    delay_of(run)                             # for a run that logged train_accuracy and test_accuracy
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from richter.core import SelectionError

SOLVED = 0.99  # training accuracy at which the training set counts as solved
GAP = 0.25  # gap between training and test accuracy that counts as overfitting
RISE = 0.1  # later rise of the test accuracy that counts
NEAR = 0.02  # tolerance around the solved step, because a single point may be lower
NOISE = 4  # a rise must be this many times the noise of single points, because the best of many points is above all of them
SHARE = 0.95  # share of the best test accuracy at which the test set counts as solved
REST = 0.2  # share of the delay for which the test set must stay solved; otherwise accuracy may still be rising
FEWEST = 5  # smallest number of points of a curve
TRAIN, TEST = ("train_accuracy", "train_acc"), ("test_accuracy", "test_acc", "val_accuracy", "val_acc", "validation_accuracy")

State = Literal["unsolved", "together", "overfitted", "rising", "ended"]


@dataclass(frozen=True)
class Delay:
    """Delay of the test accuracy after the training accuracy.

    | state | |
    |---|---|
    | unsolved | the training set was never solved, so a delay is undefined |
    | together | when the training set was solved, the test accuracy was close: no overfitting, no delay |
    | overfitted | the training set was solved, the test accuracy was far below and has not risen since |
    | rising | the test accuracy has risen late, and may rise further |
    | ended | the test accuracy has risen late, and has stayed there |
    """

    state: State
    train_solved: float | None  # step at which the training set was solved
    test_solved: float | None  # step at which the test accuracy was first near its best; None if it never rose
    test_then: float  # test accuracy when the training set was solved, or at the end if it was not
    test_best: float  # best test accuracy, by medians of three points
    train_best: float  # best training accuracy, by medians too
    first: float  # first and last step of the curve
    last: float

    @property
    def delay(self) -> float | None:
        """Steps from training solved to test solved; 0 if the test came first, None if one of them was not solved."""
        if self.train_solved is None or self.test_solved is None:
            return None
        return max(0.0, self.test_solved - self.train_solved)

    @property
    def late(self) -> bool:
        """Whether the test accuracy has risen late."""
        return self.state in ("rising", "ended")

    def __str__(self) -> str:
        if self.train_solved is None or self.state == "unsolved":
            return (f"the training set is not solved: its accuracy has reached {self.train_best:.3g} by step {self.last:g}. "
                    f"A delay of the test accuracy ({self.test_then:.3g}) cannot be measured yet")
        before = f"by step {self.first:g}, the first of the curve," if self.train_solved == self.first else \
            f"at step {self.train_solved:g}"
        start = f"training solved {before} with a test accuracy of {self.test_then:.3g} then"
        if self.state == "together":
            if not self.delay:
                return f"{start}: no overfitting, and no delay (best {self.test_best:.3g})"
            return (f"{start}: no overfitting; near its best ({self.test_best:.3g}) at step {self.test_solved:g}, {self.delay:g} "
                    f"later")
        if self.state == "overfitted":
            return (f"{start}, and {self.test_best:.3g} at best since, until step {self.last:g}: it has overfitted. These curves "
                    f"cannot say whether late generalisation will follow")
        how = f"{start}; test near its best ({self.test_best:.3g}) at step {self.test_solved:g}, {self.delay:g} later"
        return f"{how}: late generalisation" if self.state == "ended" else \
            f"{how}: late generalisation, perhaps not complete: the curve ends at step {self.last:g}"


def delay(steps: ArrayLike, train: ArrayLike, test: ArrayLike, *, solved: float = SOLVED, gap: float = GAP, rise: float = RISE,
          share: float = SHARE, rest: float = REST) -> Delay:
    """Measure the delay from curves of accuracy. The training set is solved at the accuracy ``solved``. The network overfitted if
    the test accuracy was then lower by more than ``gap``. A late rise is at least ``rise``, and the test set is solved at a
    ``share`` of the best test accuracy. The state is "ended" if it stays there for a share ``rest`` of the delay. Medians of
    three points are used, so that single outliers do not count, and a rise must exceed the noise of single points.
    """
    t, a, b = _curves(steps, train, test)
    for name, value in (("solved", solved), ("gap", gap), ("rise", rise), ("share", share)):
        if not 0 < value <= 1:
            raise SelectionError(f"{name}={value!r}: give a share of the examples above 0, up to 1.")
    if not rest >= 0:
        raise SelectionError(f"rest={rest!r}: give a share of the delay, 0 or more.")
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
    """Measure the delay of a run (``richter.runs.load``) that logged both accuracies, under a name of ``TRAIN`` and one of
    ``TEST``; None if it did not, or has too few points."""
    names = [next((name for name in finite if name in run.scalar_names), None) for finite in (TRAIN, TEST)]
    if None in names:
        return None
    (s, a, *_), (r, b, *_) = (run.scalars(name) for name in names)
    both, i, j = np.intersect1d(s, r, return_indices=True)
    a, b = np.asarray(a, dtype=float)[i], np.asarray(b, dtype=float)[j]
    finite = np.isfinite(a) & np.isfinite(b)
    both, a, b = both[finite], a[finite], b[finite]
    shares = all(((c >= 0) & (c <= 1)).all() for c in (a, b))  # percentages are not accepted
    return delay(both, a, b) if shares and len(both) >= FEWEST else None


def _curves(steps: ArrayLike, *accuracies: ArrayLike) -> list[NDArray[np.float64]]:
    """Steps and accuracies as arrays, checked."""
    t, *curves = (np.asarray(z, dtype=np.float64) for z in (steps, *accuracies))
    if t.ndim != 1 or any(c.shape != t.shape for c in curves):
        raise SelectionError(f"steps of shape {t.shape} with accuracies of shapes {[c.shape for c in curves]}: give one accuracy "
                             f"of each kind for every step.")
    if len(t) < FEWEST:
        raise SelectionError(f"a curve of {len(t)} points is too short to measure a delay: it needs at least {FEWEST} points, "
                             f"some of them before the training set is solved.")
    if not np.isfinite(t).all() or not (np.diff(t) > 0).all():
        raise SelectionError("steps must be finite and increase from point to point: sort the points, and remove "
                             "duplicates.")
    if not all(((c >= 0) & (c <= 1)).all() for c in curves):  # also false for NaN
        raise SelectionError("accuracies must be shares between 0 and 1, without NaN: divide percentages by 100, and leave out "
                             "steps without a measurement.")
    return [t, *curves]


def _noise(values: NDArray[np.float64]) -> float:
    """Noise of a single point: the median distance of points from the line between their neighbours, scaled to a standard
    deviation. A curve that rises steadily, or in one jump, has none."""
    bends = np.abs(values[:-2] - 2 * values[1:-1] + values[2:])
    return 1.4826 * float(np.median(bends)) / 6**0.5


def _medians(values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Medians of three neighbours; the first and the last point are unchanged."""
    v = np.asarray(values, dtype=np.float64)
    inner = np.median(np.stack([v[:-2], v[1:-1], v[2:]]), 0)
    return np.concatenate([v[:1], inner, v[-1:]])
