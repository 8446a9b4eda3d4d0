"""A measure over the layers of a network: where it is largest, and how sure that is. Numbers in, numbers out; needs no torch.

    top = peak([0.09, 0.14, 0.18, 0.17, 0.03], errors=[0.01] * 5)
    top.layer, top.low, top.high         # 3, and it could be layer 3 or 4, counted from 1 as in [signal]
    str(top)                             # "layer 3 of 5 (0.18), on a flat top: layers 3 to 4 can hardly be told apart"
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from richter.core import SelectionError

FLAT = 0.1  # of the height of a profile: layers that come so near to its largest value are on one flat top with it
DEVIATIONS = 2.0  # standard errors of a difference within which two layers cannot be told apart


@dataclass(frozen=True)
class Peak:
    """The layer in which a measure is largest. Layers count from 1 in the order of the profile, those without a value
    too."""

    layer: int
    could: tuple[int, ...]  # the layers that may as well be the peak, itself among them
    value: float
    layers: int  # of the profile
    known: tuple[int, ...] = field(default=(), compare=False)  # the layers that have a value; (): all of them

    @property
    def low(self) -> int:
        """The first layer that may as well be the peak."""
        return self.could[0]

    @property
    def high(self) -> int:
        """The last one."""
        return self.could[-1]

    @property
    def flat(self) -> bool:
        """Do other layers come so near that the place of the peak says little?"""
        return len(self.could) > 1

    @property
    def interior(self) -> bool:
        """Do the values fall to both sides, however flat the top is?"""
        known = self.known or range(1, self.layers + 1)
        return known[0] < self.low and self.high < known[-1]

    def __str__(self) -> str:
        place = f"layer {self.layer} of {self.layers} ({self.value:.3g})"
        if len(self.could) == len(self.known or range(self.layers)):
            return f"{place}, but the profile has no peak: it is flat from its first layer to its last"
        if len(self.could) < self.high - self.low + 1:
            return f"{place}, not alone: layers {', '.join(map(str, self.could))} can hardly be told apart"
        return f"{place}, on a flat top: layers {self.low} to {self.high} can hardly be told apart" if self.flat else place


def peak(values: ArrayLike, errors: ArrayLike | None = None, *, flat: float = FLAT, deviations: float = DEVIATIONS) -> Peak:
    """Where a profile over layers has its peak, and which layers could have it: those that lie below the largest value by at most
    ``flat`` of the height of the profile (largest minus smallest), or by at most so many standard errors of the difference, where
    ``errors`` are known. Layers without a value (NaN) are passed over. Errors of layers that were measured on the same examples
    mostly go the same way, so that the second rule calls a top flat rather too often than too seldom."""
    v, e = _profile(values, errors)
    known = np.isfinite(v)
    if known.sum() < 2:
        raise SelectionError(f"a profile over layers needs the values of at least two, and {known.sum()} of {len(v)} layers "
                             f"{'has' if known.sum() == 1 else 'have'} one: in a network of one layer there is no peak.")
    if not (flat >= 0 and deviations >= 0):
        raise SelectionError(f"flat={flat} and deviations={deviations} say how near to the largest value a layer lies that may "
                             f"as well be the peak: they are 0 or more.")
    top = int(np.nanargmax(v))
    near = np.maximum(flat * (v[top] - np.nanmin(v)), deviations * np.hypot(e, e[top]))
    near[top] = np.inf
    could = np.flatnonzero(known & (v[top] - np.where(known, v, -np.inf) <= near))
    return Peak(top + 1, tuple((could + 1).tolist()), float(v[top]), len(v), tuple((np.flatnonzero(known) + 1).tolist()))


def _profile(values: ArrayLike, errors: ArrayLike | None) -> tuple[np.ndarray, np.ndarray]:
    """As arrays, infinite values refused; layers without an error (NaN) have none, an infinite one says that nothing is known."""
    v = np.asarray(values, dtype=np.float64)
    e = np.zeros_like(v) if errors is None else np.asarray(errors, dtype=np.float64)
    if v.ndim != 1 or e.shape != v.shape:
        raise SelectionError(f"a profile is one value for each layer and perhaps one error for each: values of shape {v.shape} "
                             f"with errors of shape {e.shape} are not.")
    if np.isinf(v).any() or (e < 0).any():
        raise SelectionError("a profile has infinite values or negative errors: its largest value would say nothing. Leave such "
                             "layers out, or give NaN for them.")
    return v, np.where(np.isnan(e), 0.0, e)
