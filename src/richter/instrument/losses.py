"""The logged loss of a training: which scalar it is, what it began with, where it is now, and whether it still falls.

The loss has come to rest if it fell from the third to the last quarter of the steps by less than a tenth of its whole fall, and
by less than a fifth even with two standard errors more. (An even fall gives .29, an exponential one .09 after three time
constants.)
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LOSSES = ("loss", "train_loss", "training_loss", "loss_train")  # names of scalars that are the training's loss, best first
MEMORY = 1000  # values of a loss that smoothing remembers: older ones weigh less than 1e-22
REST, SURELY = 0.1, 0.2  # of its whole fall: what a loss at rest falls by in its last quarter at most, and with two errors more
QUARTER = 8  # values of a loss in each of the last two quarters: with fewer it is not known whether it still falls


@dataclass(frozen=True)
class Loss:
    """What the logged loss says: its first and last value, and the smoothed one."""

    name: str
    first: float
    last: float
    smoothed: float
    lost: int | None = None  # the step from which on it is not finite, if it ended so
    gaps: int = 0  # values that are not finite and were followed by finite ones
    late: float = math.nan  # by how much it fell from the third to the last quarter of the steps, as a share of its whole fall
    late_error: float = math.nan

    @property
    def ratio(self) -> float:
        return self.smoothed / self.first if self.first > 0 else math.nan

    @property
    def rests(self) -> bool:
        """Does it no longer fall? Not where that is not known."""
        return self.late < REST and self.late + 2 * self.late_error < SURELY


def loss_name(names: Iterable[str]) -> str | None:
    """Which scalar is the training's loss: ``loss``, ``train_loss``, ``train/loss``, ``Loss/train``, ...; none of validation."""
    plain = {re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_"): name for name in names}
    return next((plain[name] for name in LOSSES if name in plain), None)


def summary(name: str, steps: Sequence[int], values: Sequence[float]) -> Loss | None:
    """What a curve of losses says."""
    real = [v for v in values if math.isfinite(v)]
    lost = None
    if values and not math.isfinite(values[-1]):
        lost = next(steps[i] for i in range(len(values) - 1, -1, -1) if i == 0 or math.isfinite(values[i - 1]))
    if len(real) < 2 and lost is None:
        return None
    first = real[0] if real else math.nan
    gaps = sum(1 for s, v in zip(steps, values, strict=True) if not math.isfinite(v) and (lost is None or s < lost))
    return Loss(name, first, real[-1] if real else math.nan, _smoothed(real), lost, gaps, *_late(steps, values))


def _late(steps: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """How much of its whole fall a loss fell from the third to the last quarter of the steps, and the standard error of that:
    differences between neighbours say how much values scatter."""
    finite = [(s, v) for s, v in zip(steps, values, strict=True) if math.isfinite(v)]
    if len(finite) < 2:
        return math.nan, math.nan
    begun, end = finite[0][0], finite[-1][0]
    quarters = [[v for s, v in finite if low < (s - begun) / max(1, end - begun) <= low + 0.25] for low in (0.5, 0.75)]
    if min(map(len, quarters)) < QUARTER:
        return math.nan, math.nan
    third, fourth = (sum(q) / len(q) for q in quarters)
    scatter = [sum((b - a) ** 2 for a, b in itertools.pairwise(q)) / (2 * (len(q) - 1)) / len(q) for q in quarters]
    whole = finite[0][1] - fourth
    return ((third - fourth) / whole, math.sqrt(sum(scatter)) / whole) if whole > 0 else (math.nan, math.nan)


def _smoothed(values: Sequence[float]) -> float:
    level, skipped = math.nan, max(0, len(values) - MEMORY)
    for k, v in enumerate(values[skipped:], skipped + 1):
        level = v if math.isnan(level) else level + max(0.05, 1 / k) * (v - level)
    return level
