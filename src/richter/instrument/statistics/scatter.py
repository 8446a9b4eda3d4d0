"""Means and products of rows that come in parts, and of all but each part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

REMAINING = 1e-3  # of a sum of squares: where less is left by a subtraction, too many digits are lost


@dataclass(frozen=True, eq=False)
class Scatter:
    """Rows Z as their number, their mean and the sum of products about it. Parts add up without subtracting large sums from each
    other, so that rows which hardly differ have a small scatter that is right."""

    n: int
    mean: Float[Tensor, " d"]
    about: Float[Tensor, "d d"]

    @classmethod
    def of(cls, Z: Float[Tensor, "n d"]) -> Scatter:
        Z = Z.double()
        mean = Z.mean(0)
        Z = Z - mean
        return cls(len(Z), mean, Z.T @ Z)

    def __add__(self, other: Scatter) -> Scatter:
        n, step = self.n + other.n, other.mean - self.mean
        return Scatter(n, self.mean + step * (other.n / n),
                       self.about + other.about + torch.outer(step, step) * (self.n * other.n / n))

    def __sub__(self, part: Scatter) -> Scatter:
        """Of the other rows; to be used where what is left is no small share."""
        n, step = self.n - part.n, part.mean - self.mean
        about = torch.addr(self.about - part.about, step, step, alpha=-part.n * self.n / n)
        return Scatter(n, self.mean - step * (part.n / n), about)

    @cached_property
    def covariance(self) -> Float[Tensor, "d d"]:
        """The mean of (z - mean)(z - mean)^T."""
        return self.about / self.n

    @cached_property
    def second(self) -> Float[Tensor, "d d"]:
        """The mean of z z^T."""
        return self.covariance + torch.outer(self.mean, self.mean)


def scatter_without_each(parts: Sequence[Scatter]) -> list[Scatter]:
    """Of all rows but those of each part, of which there are two at least: from all of them by one subtraction; added up anew
    where so little is left that it would cost digits."""
    first, *others = parts
    whole = sum(others, start=first)
    least = REMAINING * whole.about.trace()
    return [rest if (rest := whole - part).about.trace() > least else sum(others[1:], start=others[0])
            for i, part in enumerate(parts) for others in [[*parts[:i], *parts[i + 1:]]]]
