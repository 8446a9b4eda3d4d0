"""Choosing bandwidth, ridge and the number of iterations: by leaving rows out, by folds, or by a given set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from richter.learners.features import Features, Pairs, next_metric
from richter.learners.kernels import Geometry, Kernel, Tunable, root, stretch
from richter.learners.problem import Problem
from richter.learners.solvers import SingularKernelError, Solution, solve

Loss = Callable[[Tensor, Tensor, Tensor], float]
Solver = Callable[..., Solution]


class Flat(Exception):
    """The fitted function does not depend on its inputs, so there is no next metric."""


@dataclass(frozen=True)
class Update:
    """How the metric follows from a fit."""

    features: Features
    exponent: float
    diagonal: bool
    normalise: bool
    memory: int

    def __call__(self, kernel: Kernel, u: Tensor, x: Tensor, R: Tensor | None, A: Tensor, w: Tensor, pairs: Pairs) -> Tensor:
        """From a fit with coefficients A on the inputs x, which the kernel sees as u = R x."""
        M = next_metric(self.features, kernel, u, x, R, A, w, pairs, exponent=self.exponent, diagonal=self.diagonal,
                        memory=self.memory)
        size = (M if M.dim() == 1 else M.diagonal()).mean()
        if not torch.isfinite(size) or size <= 0:
            raise Flat
        return M / size if self.normalise else M


class View:
    """Some of the data to fit, some to judge: the rows themselves, each left out in turn, or others."""

    def __init__(self, data: Problem, judged: int = 0, held_out: tuple[Tensor, Tensor, Tensor] | None = None) -> None:
        self.data, self.judged, self.held_out = data, judged, held_out
        self.metric: Tensor | None = None
        self.R: Tensor | None = None
        self._known: dict[tuple[type, bool], Geometry] = {}
        self._typical: dict[type, float] = {}
        self.u, self.v = data.x, held_out[0] if held_out else None

    def shrunk(self, n: int) -> View:
        """A view of as many points only."""
        held = None if self.held_out is None else tuple(part[:n] for part in self.held_out)
        size = min(n, len(self.data))
        return View(self.data.some(size), min(size, self.judged), held)  # type: ignore[arg-type]

    def move(self, metric: Tensor) -> None:
        self.metric, self.R = metric, root(metric)
        self.u = stretch(self.data.x, self.R)
        self.v = stretch(self.held_out[0], self.R) if self.held_out else None
        self._known, self._typical = {}, {}

    def typical(self, kernel: Tunable) -> float:
        """The bandwidth of the rule of thumb, from some hundred points."""
        kind = type(kernel)
        if kind not in self._typical:
            self._typical[kind] = kernel.typical(self.geometry(kernel)[:500, :500])
        return self._typical[kind]

    def geometry(self, kernel: Kernel) -> Geometry:
        kind = type(kernel), False
        if kind not in self._known:
            self._known[kind] = kernel.geometry(self.u)
        return self._known[kind]

    def others(self, kernel: Kernel) -> Iterator[Geometry]:
        """That of what is judged; in parts, and not kept, where it is more than what is fitted."""
        assert self.v is not None
        kind = type(kernel), True
        if len(self.v) > len(self.u):
            yield from (kernel.geometry(part, self.u) for part in self.v.split(len(self.u)))
            return
        if kind not in self._known:
            self._known[kind] = kernel.geometry(self.v, self.u)
        yield self._known[kind]

    def solve(self, kernel: Kernel, ridge: float, intercept: bool, solver: Solver) -> Solution:
        return solver(kernel.values(self.geometry(kernel)), self.data, ridge, intercept=intercept, judged=self.judged)

    def judge(self, kernel: Kernel, s: Solution) -> tuple[Tensor, Tensor, Tensor]:
        """Predictions, targets and weights of what is judged."""
        if self.held_out is None:
            assert s.left_out is not None and s.judged is not None
            return s.left_out, self.data.rows[s.judged], self.data.weight[s.judged]
        return torch.cat([kernel.values(h) @ s.A for h in self.others(kernel)]) + s.b, *self.held_out[1:]

    def advance(self, update: Update, kernel: Kernel, A: Tensor) -> None:
        """To the metric that this fit gives."""
        g = self.geometry(kernel)
        self.move(update(kernel, self.u, self.data.x, self.R, A, self.data.w, lambda rows: g[..., rows, :]))


@dataclass(frozen=True)
class Choice:
    """What was chosen at an iteration, and how good it is."""

    iteration: int
    kernel: Kernel
    ridge: float
    loss: float


@dataclass(frozen=True)
class Stage:
    """A fitted function: the choice, the metric, the solution and what is judged of it (predictions, targets, weights)."""

    choice: Choice
    metric: Tensor | None
    solutions: tuple[Solution, ...]
    judged: tuple[Tensor, Tensor, Tensor] | None

    def forgotten(self) -> Stage:
        """The choice alone."""
        return Stage(self.choice, None, (), None)


Place = tuple[int, int]  # log2 of the bandwidth over the typical one, log10 of the ridge over K's diagonal and the mean weight
START, LOWEST, HIGHEST = (2, -2), (-4, -6), (5, 3)
GAIN = 0.004  # of the loss: less is not worth another step
SMALL = 400  # points on which places are searched before all points are asked


@dataclass(frozen=True)
class Search:
    """How a bandwidth and a ridge are looked for: by steps of a factor 2 and 10, uphill from a start."""

    kernel: Kernel
    ridge: float | None
    intercept: bool
    loss: Loss
    solver: Solver = solve

    @property
    def open(self) -> bool:
        """Whether there is anything to choose."""
        return bool(self.axes)

    @property
    def axes(self) -> tuple[int, ...]:
        return ((0,) if self.free else ()) + ((1,) if self.ridge is None else ())

    @property
    def free(self) -> Tunable | None:
        """The kernel, if its bandwidth is to be chosen."""
        return self.kernel if isinstance(self.kernel, Tunable) and self.kernel.bandwidth is None else None

    def at(self, views: Sequence[View], place: Place) -> tuple[Kernel, float]:
        """The kernel and the ridge of a place, in the units of the first view."""
        kernel = self.free.at(views[0].typical(self.free) * 2.0 ** place[0]) if self.free else self.kernel
        if self.ridge is not None:
            return kernel, self.ridge
        corner = views[0].geometry(kernel)[..., :64, :64]
        return kernel, 10.0 ** place[1] * kernel.values(corner).diagonal().mean().item() * views[0].data.w.mean().item()

    def stage(self, views: Sequence[View], place: Place, iteration: int, known: tuple[Solution, ...] = ()) -> Stage:
        """All views at a place; the solutions of the first of them may be known."""
        kernel, ridge = self.at(views, place)
        solutions = (*known, *(view.solve(kernel, ridge, self.intercept, self.solver) for view in views[len(known):]))
        parts = zip(*(view.judge(kernel, s) for view, s in zip(views, solutions, strict=True)), strict=True)
        f, y, w = (torch.cat(part) for part in parts)
        loss = self.loss(f, y, w)
        return Stage(Choice(iteration, kernel, ridge, loss if math.isfinite(loss) else math.inf), views[0].metric,
                     solutions, (f, y, w))

    @property
    def starts(self) -> list[Place]:
        """Where to begin: bandwidths that are far apart, for kernels that see nothing with one much too large."""
        return [START, *((k, START[1]) for k in (self.free.scanned if self.free else ()))]

    def climb(self, views: Sequence[View], starts: Sequence[Place], iteration: int,
              only: int | None = None) -> tuple[Place, Stage]:
        """From the best of some starts to a neighbour (along one axis only, if given) as long as one is better."""
        known: dict[Place, Stage | SingularKernelError] = {}

        def look(place: Place) -> float:
            if place not in known:
                try:
                    known[place] = self.stage(views, place, iteration)
                except SingularKernelError as why:
                    known[place] = why
            found = known[place]
            return found.choice.loss if isinstance(found, Stage) else math.inf

        best, moved = min(starts, key=look), True
        while moved:
            moved = False
            for axis in (a for a in self.axes if only in (None, a)):
                for sign in (1, -1):
                    while _inside(near := _step(best, axis, sign)) and look(near) < (1 - GAIN) * look(best):
                        best, moved = near, True
                    if moved:
                        break
        found = known[best]
        if not isinstance(found, Stage):
            raise found
        return best, found


def _step(place: Place, axis: int, sign: int) -> Place:
    return (place[0] + sign, place[1]) if axis == 0 else (place[0], place[1] + sign)


def _inside(place: Place) -> bool:
    return all(low <= at <= high for low, at, high in zip(LOWEST, place, HIGHEST, strict=True))


def large(views: Sequence[View]) -> bool:
    return len(views[0].data) > 1.5 * SMALL


def path(views: Sequence[View], search: Search, update: Update, iterations: int, patience: int | None) -> Iterator[Stage]:
    """Fit, choose, move the metric, and again. With more than ``SMALL`` points, each search begins on some of them, and the first
    view is asked about its end (and, at first, its neighbours with another ridge)."""
    small = [v.shrunk(SMALL) for v in views] if large(views) and search.open else None
    place, guess, offset, settled, best, since = START, START, 0, False, math.inf, 0
    for t in range(iterations + 1):
        try:
            if settled:
                stage = search.stage(views, place, t)
            elif small is None:
                place, stage = search.climb(views, search.starts if t == 0 else [place], t)
            elif t == 0:
                guess, _ = search.climb(small, search.starts, t)
                place, first = search.climb(views[:1], [guess], t, only=1)
                offset = place[1] - guess[1]
                stage = search.stage(views, place, t, first.solutions)
            else:
                before = guess
                guess, _ = search.climb(small, [guess], t)
                there = (guess[0], min(max(guess[1] + offset, LOWEST[1]), HIGHEST[1]))
                found = {p: search.stage(views[:1], p, t) for p in (place, there)}
                place = min(found, key=lambda p: found[p].choice.loss)
                stage = search.stage(views, place, t, found[place].solutions)
                settled = guess == before
        except SingularKernelError:  # a metric of low rank: what was found before it stands
            if t == 0 or not search.open:
                raise
            return
        yield stage
        since = 0 if stage.choice.loss < (1 - GAIN) * best else since + 1
        best = min(best, stage.choice.loss)
        if t == iterations or (patience is not None and since >= patience):
            return
        try:
            for view, solution in zip(views, stage.solutions, strict=True):
                view.advance(update, stage.choice.kernel, solution.A)
        except Flat:  # constant targets, or a ridge so large that nothing is fitted
            return
        for view, tiny in zip(views, small or (), strict=False):
            assert view.metric is not None
            tiny.move(view.metric)
