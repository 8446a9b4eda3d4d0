"""The iteration of a metric: fit, choose bandwidth and ridge, compute the next metric from the fit, repeat."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from richter.learners.search import GAIN, HIGHEST, LOWEST, SMALL, START, FittedStage, Place, Search
from richter.learners.solvers import SingularKernelError
from richter.learners.views import DataView, Flat, Update


def large(views: Sequence[DataView]) -> bool:
    """Whether the search starts on a subset of the points."""
    return len(views[0].data) > 1.5 * SMALL


class MetricPath:
    """The stages of a fit, one per iteration; each choice starts from the previous one.

    With more than ``SMALL`` points, each search starts on a view of a subset. The first view of all points is then fitted at the
    result and, at the first iteration, at its neighbours with another ridge."""

    def __init__(self, views: Sequence[DataView], search: Search, update: Update) -> None:
        self.views, self.search, self.update = views, search, update
        self.small = [view.shrunk(SMALL) for view in views] if large(views) and search.open else []
        self.place: Place = START  # place of the last fit of all points
        self.guess: Place = START  # last result of the search on a subset
        self.offset = 0  # offset along the ridge axis from the guess to the place
        self.settled = False  # whether the place has converged

    def stages(self, iterations: int, patience: int | None) -> Iterator[FittedStage]:
        """Yield at most ``iterations`` + 1 stages. Stop earlier after ``patience`` stages without improvement, or if there is no
        next metric."""
        best, since = math.inf, 0
        for iteration in range(iterations + 1):
            try:
                stage = self.choose(iteration)
            except SingularKernelError:  # a metric of low rank; the earlier stages remain valid
                if iteration == 0 or not self.search.open:
                    raise
                return
            yield stage
            since = 0 if stage.choice.loss < (1 - GAIN) * best else since + 1
            best = min(best, stage.choice.loss)
            if iteration == iterations or (patience is not None and since >= patience):
                return
            try:
                self.advance(stage)
            except Flat:  # constant targets, or a ridge so large that the function is flat
                return

    def choose(self, iteration: int) -> FittedStage:
        """Fit all views with their current metrics, at the best place that the search finds."""
        if self.settled:
            return self.search.stage(self.views, self.place, iteration)
        if self.small:
            return self._begin() if iteration == 0 else self._follow(iteration)
        starts = self.search.starts if iteration == 0 else [self.place]
        self.place, stage = self.search.descend(self.views, starts, iteration)
        return stage

    def _begin(self) -> FittedStage:
        """Start the search. The best ridge for all points may differ from that for a subset; the offset is stored."""
        self.guess, _ = self.search.descend(self.small, self.search.starts, 0)
        self.place, first = self.search.descend(self.views[:1], [self.guess], 0, only=1)
        self.offset = self.place[1] - self.guess[1]
        return self.search.stage(self.views, self.place, 0, first.solutions)

    def _follow(self, iteration: int) -> FittedStage:
        """Fit the better of the last place and the one that the subset suggests; settled if both are unchanged."""
        before = self.guess
        self.guess, _ = self.search.descend(self.small, [self.guess], iteration)
        new = (self.guess[0], min(max(self.guess[1] + self.offset, LOWEST[1]), HIGHEST[1]))
        tried = {place: self.search.stage(self.views[:1], place, iteration) for place in (self.place, new)}
        self.place = min(tried, key=lambda place: tried[place].choice.loss)
        stage = self.search.stage(self.views, self.place, iteration, tried[self.place].solutions)
        self.settled = self.guess == before
        return stage

    def advance(self, stage: FittedStage) -> None:
        """Move each view to the metric of its own fit; views of a subset get the metric of the view that they come from."""
        for view, solution in zip(self.views, stage.solutions, strict=True):
            view.advance(self.update, stage.choice.kernel, solution.A)
        for view, few in zip(self.views, self.small, strict=False):
            assert view.metric is not None
            few.move(view.metric)
