"""Profile of a measure over the layers of a network: its peak, and the uncertainty of the peak. Numbers in, numbers out; needs no
torch.

    top = peak([0.09, 0.14, 0.18, 0.17, 0.03], errors=[0.01] * 5)
    top.layer, top.low, top.high         # 3, but layer 4 is possible too; layers count from 1 as in [signal]
    str(top)                             # "layer 3 of 5 (0.18), on a flat top: layers 3 to 4 can hardly be told apart"
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from richter.core import SelectionError

FLAT = 0.1  # share of the height of a profile; layers this close to the largest value belong to a flat top
DEVIATIONS = 2.0  # standard errors of a difference within which two layers cannot be told apart


@dataclass(frozen=True)
class Peak:
    """The layer in which a measure is largest. Layers count from 1 in the order of the profile, including layers without a
    value."""

    layer: int
    could: tuple[int, ...]  # layers that may be the peak, including this one
    value: float
    layers: int  # number of layers of the profile
    known: tuple[int, ...] = field(default=(), compare=False)  # layers that have a value; () means all

    @property
    def low(self) -> int:
        """The first layer that may be the peak."""
        return self.could[0]

    @property
    def high(self) -> int:
        """The last layer that may be the peak."""
        return self.could[-1]

    @property
    def flat(self) -> bool:
        """Whether other layers are so close to the largest value that the place of the peak is uncertain."""
        return len(self.could) > 1

    @property
    def interior(self) -> bool:
        """Whether values fall on both sides of the top, however flat it is."""
        layers = self.known or range(1, self.layers + 1)
        return layers[0] < self.low and self.high < layers[-1]

    def __str__(self) -> str:
        place = f"layer {self.layer} of {self.layers} ({self.value:.3g})"
        if len(self.could) == len(self.known or range(self.layers)):
            return f"{place}, but the profile has no peak: it is flat from its first layer to its last"
        if len(self.could) < self.high - self.low + 1:
            return f"{place}, not alone: layers {', '.join(map(str, self.could))} can hardly be told apart"
        return f"{place}, on a flat top: layers {self.low} to {self.high} can hardly be told apart" if self.flat else place


def peak(values: ArrayLike, errors: ArrayLike | None = None, *, flat: float = FLAT, deviations: float = DEVIATIONS) -> Peak:
    """Find the peak of a profile over layers, and the layers that may be the peak. These are lower than the largest value by at
    most ``flat`` times the height of the profile (largest minus smallest), or by at most ``deviations`` standard errors of the
    difference, if ``errors`` are given. Layers without a value (NaN) are skipped. Errors of layers measured on the same examples
    are positively correlated, so the second rule calls a top flat too often rather than too rarely."""
    v, e = _profile(values, errors)
    finite = np.isfinite(v)
    if finite.sum() < 2:
        raise SelectionError(f"a profile over layers needs values of at least two layers, and {finite.sum()} of {len(v)} layers "
                             f"{'has' if finite.sum() == 1 else 'have'} one: a network of one layer has no peak.")
    if not (flat >= 0 and deviations >= 0):
        raise SelectionError(f"flat={flat} and deviations={deviations} must be 0 or more: they say how close to the largest "
                             f"value a layer must be to count as a possible peak.")
    top = int(np.nanargmax(v))
    near = np.maximum(flat * (v[top] - np.nanmin(v)), deviations * np.hypot(e, e[top]))
    near[top] = np.inf
    could = np.flatnonzero(finite & (v[top] - np.where(finite, v, -np.inf) <= near))
    return Peak(top + 1, tuple((could + 1).tolist()), float(v[top]), len(v), tuple((np.flatnonzero(finite) + 1).tolist()))


def _profile(values: ArrayLike, errors: ArrayLike | None) -> tuple[np.ndarray, np.ndarray]:
    """Read values and errors as arrays; infinite values raise an error. A NaN error counts as no error, an infinite one as
    unknown."""
    v = np.asarray(values, dtype=np.float64)
    e = np.zeros_like(v) if errors is None else np.asarray(errors, dtype=np.float64)
    if v.ndim != 1 or e.shape != v.shape:
        raise SelectionError(f"a profile needs one value per layer and optionally one error per layer, not values of shape "
                             f"{v.shape} with errors of shape {e.shape}.")
    if np.isinf(v).any() or (e < 0).any():
        raise SelectionError("a profile must not have infinite values or negative errors: leave such layers out, or give NaN for "
                             "them.")
    return v, np.where(np.isnan(e), 0.0, e)
