"""The way of a metric: fit, choose bandwidth and ridge, take the next metric from the fit, and again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from richter.learners.search import GAIN, HIGHEST, LOWEST, SMALL, START, Place, Search, Stage
from richter.learners.solvers import SingularKernelError
from richter.learners.views import Flat, Update, View


def large(views: Sequence[View]) -> bool:
    """Whether places are looked for on a few of the points first."""
    return len(views[0].data) > 1.5 * SMALL


class Path:
    """One stage for each iteration, with what the choice at one iteration tells the next.

    Of more than ``SMALL`` points, each search begins on a view of a few of them; the first view of all points is then fitted at
    the place where it ends and (at the first iteration) at its neighbours with another ridge."""

    def __init__(self, views: Sequence[View], search: Search, update: Update) -> None:
        self.views, self.search, self.update = views, search, update
        self.small = [view.shrunk(SMALL) for view in views] if large(views) and search.open else []
        self.place: Place = START  # where all points were fitted last
        self.guess: Place = START  # where the search on a few points ended last
        self.offset = 0  # along the axis of the ridge, from the guess to the place
        self.settled = False  # the place no longer moves

    def stages(self, iterations: int, patience: int | None) -> Iterator[Stage]:
        """At most one more than ``iterations``; less, if so many as ``patience`` in a row have brought nothing, or if there is no
        next metric."""
        best, since = math.inf, 0
        for iteration in range(iterations + 1):
            try:
                stage = self.choose(iteration)
            except SingularKernelError:  # a metric of low rank: the stages before it stand
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
            except Flat:  # constant targets, or a ridge so large that nothing is fitted
                return

    def choose(self, iteration: int) -> Stage:
        """The fit of all views under the metric they are at, at the best place that is found."""
        if self.settled:
            return self.search.stage(self.views, self.place, iteration)
        if self.small:
            return self._begin() if iteration == 0 else self._follow(iteration)
        starts = self.search.starts if iteration == 0 else [self.place]
        self.place, stage = self.search.descend(self.views, starts, iteration)
        return stage

    def _begin(self) -> Stage:
        """The ridge that suits all points may be another than that of a few: how far it is off is kept."""
        self.guess, _ = self.search.descend(self.small, self.search.starts, 0)
        self.place, first = self.search.descend(self.views[:1], [self.guess], 0, only=1)
        self.offset = self.place[1] - self.guess[1]
        return self.search.stage(self.views, self.place, 0, first.solutions)

    def _follow(self, iteration: int) -> Stage:
        """The better of the last place and the one that the few points point to; settled, when these stay where they were."""
        before = self.guess
        self.guess, _ = self.search.descend(self.small, [self.guess], iteration)
        new = (self.guess[0], min(max(self.guess[1] + self.offset, LOWEST[1]), HIGHEST[1]))
        tried = {place: self.search.stage(self.views[:1], place, iteration) for place in (self.place, new)}
        self.place = min(tried, key=lambda place: tried[place].choice.loss)
        stage = self.search.stage(self.views, self.place, iteration, tried[self.place].solutions)
        self.settled = self.guess == before
        return stage

    def advance(self, stage: Stage) -> None:
        """Each view to the metric that its own fit gives; those of a few points to that of the view they are from."""
        for view, solution in zip(self.views, stage.solutions, strict=True):
            view.advance(self.update, stage.choice.kernel, solution.A)
        for view, few in zip(self.views, self.small, strict=False):
            assert view.metric is not None
            few.move(view.metric)
