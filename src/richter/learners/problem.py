"""The rows to which a kernel machine is fitted: copies are merged, weights count copies, and the order is random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class FitProblem:
    """Distinct points x [n, d] with weights w and mean targets y [n, c], and the rows [r] that they represent.

    For squared (and logistic) loss this problem is equivalent to that of the rows, but copies do not make the kernel matrix
    singular. Points are in random order, so the last ones are a random sample."""

    x: Float[Tensor, "n d"]
    y: Float[Tensor, "n c"]
    w: Float[Tensor, " n"]
    point: Int[Tensor, " r"]  # index of the point of each row
    rows: Float[Tensor, "r c"]  # targets of the rows
    weight: Float[Tensor, " r"]

    def __len__(self) -> int:
        return len(self.x)

    def to(self, dtype: torch.dtype) -> FitProblem:
        """Copy in another precision."""
        return FitProblem(self.x.to(dtype), self.y.to(dtype), self.w.to(dtype), self.point, self.rows.to(dtype),
                       self.weight.to(dtype))

    def last(self, n: int) -> FitProblem:
        """Return the problem of the last n points."""
        return self.take(torch.arange(len(self), device=self.x.device) >= len(self) - n)

    def take(self, kept: Bool[Tensor, " n"]) -> FitProblem:
        """Return the problem of the selected points."""
        rows = kept[self.point]
        place = kept.cumsum(0) - 1
        return FitProblem(self.x[kept], self.y[kept], self.w[kept], place[self.point[rows]], self.rows[rows], self.weight[rows])

    def judged(self) -> tuple[Float[Tensor, "r d"], Float[Tensor, "r c"], Float[Tensor, " r"]]:
        """Return inputs, targets and weights of all rows, in the order of the points, so that the first rows are a random
        sample."""
        order = self.point.argsort(stable=True)
        return self.x[self.point[order]], self.rows[order], self.weight[order]

    def folds(self, k: int) -> Int[Tensor, " n"]:
        """Assign a fold 0..k-1 to each point. Copies of a row are in one fold, and folds are stratified by class, or by the size
        of the targets."""
        target = self.y.argmax(1) if self.y.shape[1] > 1 else self.y[:, 0]
        order = torch.argsort(target, stable=True)
        fold = torch.empty_like(order)
        fold[order] = torch.arange(len(self), device=order.device) % k
        return fold


def usual_folds(rows: int) -> int:
    """Default number of folds."""
    return 5 if rows <= 1000 else 2


def problem(x: NDArray[np.float64], y: NDArray[np.float64], weight: NDArray[np.float64], random: np.random.RandomState,
            device: torch.device | str = "cpu") -> FitProblem:
    """Merge rows with equal inputs, and drop rows with weight 0."""
    kept = weight > 0
    x, y, weight = x[kept], y[kept], weight[kept]
    points, point = np.unique(x, axis=0, return_inverse=True)
    order = random.permutation(len(points))
    point = np.argsort(order)[point.reshape(-1)]
    w = np.bincount(point, weight)
    mean = np.stack([np.bincount(point, weight * column) for column in y.T], 1) / w[:, None]

    def tensor(a: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(a)).to(device)

    return FitProblem(tensor(points[order]), tensor(mean), tensor(w), tensor(point), tensor(y), tensor(weight))
