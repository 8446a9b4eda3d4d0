"""Some of very many outputs, and what each counts in a mean over all of them. What an output's own kernel says of its labels
grows with the number of examples that have it as their label: outputs are drawn with chances in proportion to that number, those
that have a large share of all labels are never missed, and each counts as the inverse of its chance (Horvitz and Thompson 1952),
which is right on the average whatever the values are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

Weights = NDArray[np.float64]  # "v"


@dataclass(frozen=True)
class Sample:
    """Outputs ``picked`` of so many. ``chosen``: places among them of those that were drawn by chance, each of which may be left
    out. Weights in a mean over all outputs: of all, without each of the chosen ones, without each group of examples; None where
    all are alike."""

    picked: Int[Tensor, " v"]
    among: int
    chosen: Sequence[int]
    weights: Weights | None = None
    without_chosen: Sequence[Weights] = ()
    without_examples: Sequence[Weights] = ()

    @property
    def drawn(self) -> bool:
        return len(self.picked) < self.among


def uniform(outputs: Int[Tensor, " m"], number: int, draw: torch.Generator) -> Sample:
    """Each with the same chance."""
    picked = outputs[torch.randperm(len(outputs), generator=draw)[:number]].sort().values
    return Sample(picked, len(outputs), range(len(picked)))


def by_labels(outputs: Int[Tensor, " m"], labels: Float[Tensor, "m g"], number: int, draw: torch.Generator) -> Sample:
    """With chances in proportion to the number of labels, which is known for every group of examples."""
    if len(outputs) <= number:
        return Sample(outputs, len(outputs), range(len(outputs)))
    counts = labels.numpy().astype(np.float64)
    chances = inclusion(counts.sum(1), number)
    places = np.sort(np.concatenate([np.flatnonzero(chances == 1), _systematic(chances, draw)]))
    sure, m = chances[places] == 1, len(outputs)
    weights, free = 1 / (chances[places] * m), int((~sure).sum())
    chosen = np.flatnonzero(~sure).tolist()
    more = np.where(sure, weights, weights * free / max(1, free - 1))
    return Sample(outputs[torch.from_numpy(places)], m, chosen, weights, [np.delete(more, i) for i in chosen],
                  [_without(counts, g, places, chances) for g in range(counts.shape[1])])


def inclusion(sizes: Weights, number: int) -> Weights:
    """Chances in proportion to sizes, ``number`` in all; 1 where they would be more."""
    chances = np.zeros(len(sizes))
    while True:
        rest = chances < 1
        shares = (number - int((~rest).sum())) * sizes / sizes[rest].sum()
        beyond = rest & (shares >= 1 - 1e-9)
        if not beyond.any():
            return np.where(rest, shares, 1.0)
        chances[beyond] = 1.0


def _systematic(chances: Weights, draw: torch.Generator) -> NDArray[np.int64]:
    """Of those whose chance is below 1, in random order: where the sum of chances passes a random number, and every whole one
    after it."""
    rest = np.flatnonzero(chances < 1)
    order = rest[torch.randperm(len(rest), generator=draw).numpy()]
    sums = np.cumsum(chances[order])
    points = torch.rand(1, generator=draw, dtype=torch.float64).item() + np.arange(round(float(sums[-1])))
    return np.asarray(order[np.minimum(np.searchsorted(sums, points, side="right"), len(order) - 1)])


def _without(counts: Float[NDArray, "m g"], group: int, places: NDArray[np.int64], chances: Weights) -> Weights:
    """Weights without one group of examples: as if chances had gone by the labels that are left, of the outputs that have some.
    One that has none stays as it was."""
    every = counts.sum(1)
    left, rest = every - counts[:, group], chances < 1
    number = int((left > 0).sum())
    if not number:
        return np.asarray(1 / (chances[places] * len(counts)))
    share = left[rest].sum() / every[rest].sum()
    fewer = np.where(left > 0, every / np.maximum(left, 1), 1.0)
    return np.asarray(np.where(rest, share * fewer, 1.0)[places] / (chances[places] * number))
