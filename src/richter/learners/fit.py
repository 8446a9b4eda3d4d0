"""From rows and checked settings to a fitted kernel machine: what choices are made on, which variant is the best, and the same
choices on all rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import RandomState
from numpy.typing import NDArray
from torch import Tensor

from richter.core import MemoryBudgetError, show_bytes
from richter.core.values import progress
from richter.learners.features import geometry_of
from richter.learners.kernel import Kernel
from richter.learners.metric import root, stretch
from richter.learners.path import Path, large
from richter.learners.problem import Problem, problem, usual_folds
from richter.learners.search import SMALL, Choice, Search, Stage
from richter.learners.solvers import SingularKernelError, Solution, solve, solve_blocks
from richter.learners.views import Flat, Judged, Update, View

JUDGED = 2000  # rows are left out one by one for at most as many points; their prediction still uses all the others
FEWEST = 20  # points that a choice needs
SEARCHED = 5000  # points that choices are made on, when all do not fit the memory

Array = NDArray[Any]
Variant = tuple[Search, Update]


class Kept(NamedTuple):
    """A fitted iteration that predicts."""

    choice: Choice
    metric: Tensor | None
    solution: Solution


@dataclass(frozen=True)
class Settings:
    """How to fit: the settings of a learner, checked. ``last``: the last iteration is taken, whatever its loss."""

    variants: list[Variant]  # kernels and kinds of metric to choose from
    iterations: int
    early_stopping: bool
    last: bool
    keep_all: bool
    unseen: bool  # outputs are needed for rows that not even the metric has seen
    memory: int  # bytes
    device: Any
    title: str  # of the progress bar


@dataclass(frozen=True)
class Rows:
    """What to fit, inputs [r, d], targets [r, c] and weights [r]; and what to choose by: other rows for ``validation``, or
    ``folds``: "loo" or "last" (each row left out), a number, or pairs of row numbers."""

    X: Array
    Y: Array
    weight: Array
    validation: tuple[Array, Array, Array] | None = None
    folds: Any = None

    def views(self, whole: Problem, kernels: Sequence[Kernel], memory: int, random: RandomState) -> list[View]:
        """What is fitted and what is judged, to choose; ``whole`` is the problem of all rows."""
        device = whole.x.device
        if self.validation is not None:
            others = problem(*self.validation, random, device)
            return [View(fitting(whole, kernels, memory), held_out=others.judged())]
        if self.folds in ("loo", "last"):
            data = fitting(whole, kernels, memory)
            return [View(data, min(len(data), JUDGED))]
        if isinstance(self.folds, int):
            data = fitting(whole, kernels, memory, min(self.folds, len(whole)))
            count = min(self.folds, len(data))
            fold = data.folds(count)
            parts = [(data.take(fold != k), data.take(fold == k)) for k in range(count)]
            return [View(fitted, held_out=others.judged()) for fitted, others in parts]
        splits = [[problem(self.X[rows], self.Y[rows], self.weight[rows], random, device) for rows in split]
                  for split in self.folds]
        return [View(fitting(fitted, kernels, memory, len(splits)), held_out=others.judged()) for fitted, others in splits]


@dataclass(frozen=True)
class Fitted:
    """The outcome: the choice of each iteration, the best of them, the iterations that were kept, the distinct points, and what
    was judged at the best iteration."""

    choices: list[Choice]
    best: int
    kept: list[Kept]
    points: Problem
    judged: Judged


class Fit:
    """One fit of a learner."""

    def __init__(self, rows: Rows, settings: Settings, random: RandomState) -> None:
        self.rows, self.settings, self.random = rows, settings, random
        self.whole = problem(rows.X, rows.Y, rows.weight, random, settings.device)
        self.variants = settings.variants
        self.kernels = [search.kernel for search, _ in settings.variants]
        self._refuse_logistic_blocks()
        self.views = self._views()

    def run(self) -> Fitted:
        if len(self.variants) > 1 and large(self.views):
            self.variants = [self._race()]
        variant, stages = self._walk_all()
        best = stages[-1] if self.settings.last else min(stages, key=lambda s: s.choice.loss)
        judged = self._judged(variant, stages, best)
        return Fitted([s.choice for s in stages], best.choice.iteration, self._kept(variant, stages, best), self.whole, judged)

    def _refuse_logistic_blocks(self) -> None:
        memory, n = self.settings.memory, len(self.whole)
        squared = all(search.solver is solve for search, _ in self.variants)
        if not squared and not fits(self.whole, self.kernels, memory):
            raise MemoryBudgetError(
                f"memory={show_bytes(memory)} does not hold the system of {n} points that the logistic loss needs. The "
                f"smallest that works is {show_bytes(pair_bytes(self.kernels) * n ** 2)}; loss=\"squared\" needs less.")

    def _views(self) -> list[View]:
        return self.rows.views(self.whole, self.kernels, self.settings.memory, self.random)

    def _stages(self, views: list[View], variant: Variant) -> Iterator[Stage]:
        patience = (1 if large(views) else 2) if self.settings.early_stopping else None
        return Path(views, *variant).stages(self.settings.iterations, patience)

    def _race(self) -> Variant:
        """The variant with the smallest loss on a few of the points."""
        least = [min(stage.choice.loss for stage in self._stages([view.shrunk(SMALL) for view in self.views], variant))
                 for variant in self.variants]
        return self.variants[int(np.argmin(least))]

    def _walk_all(self) -> tuple[Variant, list[Stage]]:
        """The best variant and its stages. Those that are no longer needed keep their choice alone."""
        runs: list[tuple[Variant, list[Stage]]] = []
        with progress(total=(self.settings.iterations + 1) * len(self.variants), title=self.settings.title) as bar:
            for i, variant in enumerate(self.variants):
                stages: list[Stage] = []
                for stage in self._stages(self.views if i == 0 else self._views(), variant):
                    better = not stages or stage.choice.loss < min(s.choice.loss for s in stages)
                    needed = better or self.settings.last or self.settings.keep_all
                    stages.append(stage if needed else stage.forgotten())
                    bar.update()
                runs.append((variant, stages))
        return min(runs, key=lambda run: min(stage.choice.loss for stage in run[1]))

    def _judged(self, variant: Variant, stages: list[Stage], best: Stage) -> Judged:
        """Outputs, targets and weights of rows left out, as they were judged to choose. A metric that was learned with the labels
        of these rows flatters them: then, where that matters, by folds that have a metric each."""
        assert best.judged is not None
        if not (self.settings.unseen and self.views[0].judged and best.choice.iteration):
            return best.judged
        return cross_fitted(self.views[0].data, [s.choice for s in stages[:best.choice.iteration + 1]], variant)

    def _kept(self, variant: Variant, stages: list[Stage], best: Stage) -> list[Kept]:
        """The best iteration, or all: as they were fitted to choose, if that was to all points; else fitted again."""
        keep_all = self.settings.keep_all
        if self.views[0].data is self.whole:
            return [Kept(s.choice, s.metric, s.solutions[0]) for s in (stages if keep_all else [best])]
        self.views.clear()  # their distances take memory that the fit of all rows needs
        wanted = stages if keep_all else stages[:best.choice.iteration + 1]
        kept = list(replay(self.whole, [s.choice for s in wanted], variant, self.settings.memory))
        return kept if keep_all else kept[-1:]


def replay(whole: Problem, choices: Sequence[Choice], variant: Variant, memory: int) -> Iterator[Kept]:
    """The same choices on all the data: as a dense system if it fits the memory, else in blocks of float32."""
    search, update = variant
    if fits(whole, [search.kernel], memory):
        view = View(whole)
        for i, c in enumerate(choices):
            solution = view.solve(c.kernel, c.ridge, search.intercept, partial(search.solver, final=True))
            yield Kept(c, view.metric, solution)
            if i + 1 < len(choices):
                view.advance(update, c.kernel, solution.A)
        return
    data = whole.to(torch.float32)
    metric = None
    for i, c in enumerate(progress(choices, title="all rows")):
        R = None if metric is None else root(metric)
        u = stretch(data.x, R)
        s = solve_blocks(c.kernel, whole, u, c.ridge, intercept=search.intercept, memory=memory)
        solution = Solution(s.A.to(u), s.b.to(u))
        yield Kept(c, metric, solution)
        if i + 1 < len(choices):
            metric = update(c.kernel, u, data.x, R, solution.A, data.w, geometry_of(c.kernel, u))


def cross_fitted(data: Problem, choices: Sequence[Choice], variant: Variant) -> Judged:
    """The same choices in folds, each with a metric of its own: outputs, targets and weights of the rows of the others."""
    count = min(usual_folds(len(data)), len(data))
    fold = data.folds(count)
    views = (View(data.take(fold != k), held_out=data.take(fold == k).judged()) for k in range(count))
    f, y, w = (torch.cat(part) for part in zip(*(followed(view, choices, variant) for view in views), strict=True))
    return f, y, w


def followed(view: View, choices: Sequence[Choice], variant: Variant) -> Judged:
    """What a view judges after these choices; or before one for which its function is flat or its system singular."""
    search, update = variant
    judged: Judged | None = None
    for i, c in enumerate(choices):
        try:
            solution = view.solve(c.kernel, c.ridge, search.intercept, search.solver)
            judged = view.judge(c.kernel, solution)
            if i + 1 < len(choices):
                view.advance(update, c.kernel, solution.A)
        except (Flat, SingularKernelError):
            if judged is None:
                raise
            break
    assert judged is not None
    return judged


def pair_bytes(kernels: Sequence[Kernel], folds: int = 1) -> int:
    """For each pair of points while dense systems are solved: what kernels need to know of it, in k folds (k - 1) times; the
    kernel, its factor, and the inverse that leaving rows out needs."""
    arrays = max(k.arrays for k in kernels)
    return 8 * max(6, arrays + 4, arrays * (folds - 1) + 2)


def fits(whole: Problem, kernels: Sequence[Kernel], memory: int) -> bool:
    return pair_bytes(kernels) * len(whole) ** 2 <= memory


def fitting(whole: Problem, kernels: Sequence[Kernel], memory: int, folds: int = 1) -> Problem:
    """As much of the problem as fits the memory as a dense system."""
    each = pair_bytes(kernels, folds)
    most = int((memory / each) ** 0.5)
    if most < min(len(whole), FEWEST):
        raise MemoryBudgetError(f"memory={show_bytes(memory)} holds a system of {most} points, too few to choose anything by. "
                                f"The smallest that works is {show_bytes(each * min(len(whole), FEWEST) ** 2)}.")
    return whole if len(whole) <= most else whole.last(min(most, SEARCHED))
