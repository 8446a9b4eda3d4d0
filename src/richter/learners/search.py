"""Choice of bandwidth and ridge for a given metric, by the prediction of held-out rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from richter.learners.kernel import Kernel, Tunable
from richter.learners.solvers import SingularKernelError, Solution, solve
from richter.learners.views import DataView, Judged, Solver

Loss = Callable[[Tensor, Tensor, Tensor], float]


@dataclass(frozen=True)
class Choice:
    """The choice made at an iteration, and its loss."""

    iteration: int
    kernel: Kernel
    ridge: float
    loss: float


@dataclass(frozen=True)
class FittedStage:
    """A fitted function: the choice, the metric, the solution of each view and its held-out predictions."""

    choice: Choice
    metric: Tensor | None
    solutions: tuple[Solution, ...]
    judged: Judged | None

    def forgotten(self) -> FittedStage:
        """Return a stage that keeps only the choice."""
        return FittedStage(self.choice, None, (), None)


Place = tuple[int, int]  # log2 of the bandwidth over the typical one, log10 of the ridge over K's diagonal times the mean weight
START, LOWEST, HIGHEST = (2, -2), (-4, -6), (5, 3)
GAIN = 0.004  # smallest relative gain of the loss that is worth another step
SMALL = 400  # points of the subset on which the search starts


@dataclass(frozen=True)
class Search:
    """A search for bandwidth and ridge: downhill in the loss from a start, in steps of factors 2 and 10."""

    kernel: Kernel
    ridge: float | None
    intercept: bool
    loss: Loss
    solver: Solver = solve

    @property
    def open(self) -> bool:
        """Whether there is more than one setting to choose from."""
        return bool(self.axes)

    @property
    def axes(self) -> tuple[int, ...]:
        """Axes of a place along which there is something to choose."""
        return ((0,) if self.free else ()) + ((1,) if self.ridge is None else ())

    @property
    def free(self) -> Tunable | None:
        """The kernel, if its bandwidth is to be chosen."""
        return self.kernel if isinstance(self.kernel, Tunable) and self.kernel.bandwidth is None else None

    def at(self, views: Sequence[DataView], place: Place) -> tuple[Kernel, float]:
        """Return the kernel and the ridge of a place, in the units of the first view."""
        kernel = self.free.at(views[0].typical(self.free) * 2.0 ** place[0]) if self.free else self.kernel
        if self.ridge is not None:
            return kernel, self.ridge
        corner = views[0].geometry(kernel)[..., :64, :64]
        return kernel, 10.0 ** place[1] * kernel.values(corner).diagonal().mean().item() * views[0].data.w.mean().item()

    def stage(self, views: Sequence[DataView], place: Place, iteration: int, known: tuple[Solution, ...] = ()) -> FittedStage:
        """Fit all views at a place. ``known``: solutions of the first views, if already computed."""
        kernel, ridge = self.at(views, place)
        solutions = (*known, *(view.solve(kernel, ridge, self.intercept, self.solver) for view in views[len(known):]))
        parts = zip(*(view.judge(kernel, s) for view, s in zip(views, solutions, strict=True)), strict=True)
        f, y, w = (torch.cat(part) for part in parts)
        loss = self.loss(f, y, w)
        return FittedStage(Choice(iteration, kernel, ridge, loss if math.isfinite(loss) else math.inf), views[0].metric,
                     solutions, (f, y, w))

    @property
    def starts(self) -> list[Place]:
        """Places where the search starts: distant bandwidths, for kernels whose loss is flat at much too large bandwidths."""
        return [START, *((k, START[1]) for k in (self.free.scanned if self.free else ()))]

    def descend(self, views: Sequence[DataView], starts: Sequence[Place], iteration: int,
                only: int | None = None) -> tuple[Place, FittedStage]:
        """Move from the best start to a better neighbour (along one axis only, if given) until there is none."""
        visited: dict[Place, FittedStage | SingularKernelError] = {}

        def loss(place: Place) -> float:
            if place not in visited:
                try:
                    visited[place] = self.stage(views, place, iteration)
                except SingularKernelError as why:
                    visited[place] = why
            stage = visited[place]
            return stage.choice.loss if isinstance(stage, FittedStage) else math.inf

        best, moved = min(starts, key=loss), True
        while moved:
            moved = False
            for axis in (a for a in self.axes if only in (None, a)):
                for sign in (1, -1):
                    while _inside(near := _step(best, axis, sign)) and loss(near) < (1 - GAIN) * loss(best):
                        best, moved = near, True
                    if moved:
                        break
        stage = visited[best]
        if not isinstance(stage, FittedStage):
            raise stage
        return best, stage


def _step(place: Place, axis: int, sign: int) -> Place:
    """Neighbouring place of the grid."""
    return (place[0] + sign, place[1]) if axis == 0 else (place[0], place[1] + sign)


def _inside(place: Place) -> bool:
    """Return whether a place is within the bounds of the search."""
    return all(low <= at <= high for low, at, high in zip(LOWEST, place, HIGHEST, strict=True))
