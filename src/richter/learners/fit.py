"""From rows and validated settings to a fitted kernel machine: the data for choices, the best variant, and the refit with the
same choices on all rows."""

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
from richter.learners.path import MetricPath, large
from richter.learners.problem import FitProblem, problem, usual_folds
from richter.learners.search import SMALL, Choice, FittedStage, Search
from richter.learners.solvers import SingularKernelError, Solution, solve, solve_blocks
from richter.learners.views import DataView, Flat, Judged, Update

JUDGED = 2000  # maximum number of points that are left out one by one; each prediction uses all other points
FEWEST = 20  # points needed for a choice
SEARCHED = 5000  # points used for choices if not all fit into memory

Array = NDArray[Any]
Variant = tuple[Search, Update]


class FittedIteration(NamedTuple):
    """An iteration that is kept with its solution, so that it can predict."""

    choice: Choice
    metric: Tensor | None
    solution: Solution


@dataclass(frozen=True)
class FitSettings:
    """Validated settings of a learner. ``last``: take the last iteration, whatever its loss."""

    variants: list[Variant]  # kernels and kinds of metric to choose from
    iterations: int
    early_stopping: bool
    last: bool
    keep_all: bool
    unseen: bool  # outputs are needed for rows that the metric has not seen either
    memory: int  # bytes
    device: Any
    title: str  # of the progress bar


@dataclass(frozen=True)
class FitRows:
    """Rows to fit: inputs [r, d], targets [r, c] and weights [r]; and how to choose: separate rows for ``validation``, or
    ``folds`` ("loo" or "last" (each row left out), a number, or pairs of row numbers)."""

    X: Array
    Y: Array
    weight: Array
    validation: tuple[Array, Array, Array] | None = None
    folds: Any = None

    def views(self, whole: FitProblem, kernels: Sequence[Kernel], memory: int, random: RandomState) -> list[DataView]:
        """Return the views on which choices are made: data to fit and data to evaluate. ``whole`` is the problem of all rows."""
        device = whole.x.device
        if self.validation is not None:
            others = problem(*self.validation, random, device)
            return [DataView(fitting(whole, kernels, memory), held_out=others.judged())]
        if self.folds in ("loo", "last"):
            data = fitting(whole, kernels, memory)
            return [DataView(data, min(len(data), JUDGED))]
        if isinstance(self.folds, int):
            data = fitting(whole, kernels, memory, min(self.folds, len(whole)))
            count = min(self.folds, len(data))
            fold = data.folds(count)
            parts = [(data.take(fold != k), data.take(fold == k)) for k in range(count)]
            return [DataView(fitted, held_out=others.judged()) for fitted, others in parts]
        splits = [[problem(self.X[rows], self.Y[rows], self.weight[rows], random, device) for rows in split]
                  for split in self.folds]
        return [DataView(fitting(fitted, kernels, memory, len(splits)), held_out=others.judged()) for fitted, others in splits]


@dataclass(frozen=True)
class Fitted:
    """Result of a fit: the choice of each iteration, the best iteration, the stored iterations, the distinct points, and the
    held-out predictions of the best iteration."""

    choices: list[Choice]
    best: int
    kept: list[FittedIteration]
    points: FitProblem
    judged: Judged


class Fit:
    """One fit of a learner."""

    def __init__(self, rows: FitRows, settings: FitSettings, random: RandomState) -> None:
        self.rows, self.settings, self.random = rows, settings, random
        self.whole = problem(rows.X, rows.Y, rows.weight, random, settings.device)
        self.variants = settings.variants
        self.kernels = [search.kernel for search, _ in settings.variants]
        self._refuse_logistic_blocks()
        self.views = self._views()

    def run(self) -> Fitted:
        """Fit all iterations, and choose the best one."""
        if len(self.variants) > 1 and large(self.views):
            self.variants = [self._race()]
        variant, stages = self._walk_all()
        best = stages[-1] if self.settings.last else min(stages, key=lambda s: s.choice.loss)
        judged = self._judged(variant, stages, best)
        return Fitted([s.choice for s in stages], best.choice.iteration, self._kept(variant, stages, best), self.whole, judged)

    def _refuse_logistic_blocks(self) -> None:
        """Raise an error if the logistic loss does not fit the memory limit."""
        memory, n = self.settings.memory, len(self.whole)
        squared = all(search.solver is solve for search, _ in self.variants)
        if not squared and not fits(self.whole, self.kernels, memory):
            raise MemoryBudgetError(
                f"memory={show_bytes(memory)} does not hold the system of {n} points that the logistic loss needs. The "
                f"smallest that works is {show_bytes(pair_bytes(self.kernels) * n ** 2)}; loss=\"squared\" needs less.")

    def _views(self) -> list[DataView]:
        """Views of the data for each split."""
        return self.rows.views(self.whole, self.kernels, self.settings.memory, self.random)

    def _stages(self, views: list[DataView], variant: Variant) -> Iterator[FittedStage]:
        """Yield the iterations of a variant until patience ends."""
        patience = (1 if large(views) else 2) if self.settings.early_stopping else None
        return MetricPath(views, *variant).stages(self.settings.iterations, patience)

    def _race(self) -> Variant:
        """Return the variant with the smallest loss on a subset of the points."""
        least = [min(stage.choice.loss for stage in self._stages([view.shrunk(SMALL) for view in self.views], variant))
                 for variant in self.variants]
        return self.variants[int(np.argmin(least))]

    def _walk_all(self) -> tuple[Variant, list[FittedStage]]:
        """Return the best variant and its stages. Stages that are no longer needed keep only their choice."""
        runs: list[tuple[Variant, list[FittedStage]]] = []
        with progress(total=(self.settings.iterations + 1) * len(self.variants), title=self.settings.title) as bar:
            for i, variant in enumerate(self.variants):
                stages: list[FittedStage] = []
                for stage in self._stages(self.views if i == 0 else self._views(), variant):
                    better = not stages or stage.choice.loss < min(s.choice.loss for s in stages)
                    needed = better or self.settings.last or self.settings.keep_all
                    stages.append(stage if needed else stage.forgotten())
                    bar.update()
                runs.append((variant, stages))
        return min(runs, key=lambda run: min(stage.choice.loss for stage in run[1]))

    def _judged(self, variant: Variant, stages: list[FittedStage], best: FittedStage) -> Judged:
        """Return outputs, targets and weights of held-out rows, as evaluated for the choice. A metric that was learned with the
        labels of these rows is optimistic; if that matters, use folds with a separate metric each."""
        assert best.judged is not None
        if not (self.settings.unseen and self.views[0].judged and best.choice.iteration):
            return best.judged
        return cross_fitted(self.views[0].data, [s.choice for s in stages[:best.choice.iteration + 1]], variant)

    def _kept(self, variant: Variant, stages: list[FittedStage], best: FittedStage) -> list[FittedIteration]:
        """Return the best iteration, or all iterations. If the choice was made on all points its fits are reused, otherwise
        refitted."""
        keep_all = self.settings.keep_all
        if self.views[0].data is self.whole:
            return [FittedIteration(s.choice, s.metric, s.solutions[0]) for s in (stages if keep_all else [best])]
        self.views.clear()  # frees the memory of their distances for the fit of all rows
        wanted = stages if keep_all else stages[:best.choice.iteration + 1]
        kept = list(replay(self.whole, [s.choice for s in wanted], variant, self.settings.memory))
        return kept if keep_all else kept[-1:]


def replay(whole: FitProblem, choices: Sequence[Choice], variant: Variant, memory: int) -> Iterator[FittedIteration]:
    """Repeat the choices on all data, as a dense system if it fits into memory, otherwise in blocks of float32."""
    search, update = variant
    if fits(whole, [search.kernel], memory):
        view = DataView(whole)
        for i, c in enumerate(choices):
            solution = view.solve(c.kernel, c.ridge, search.intercept, partial(search.solver, final=True))
            yield FittedIteration(c, view.metric, solution)
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
        yield FittedIteration(c, metric, solution)
        if i + 1 < len(choices):
            metric = update(c.kernel, u, data.x, R, solution.A, data.w, geometry_of(c.kernel, u))


def cross_fitted(data: FitProblem, choices: Sequence[Choice], variant: Variant) -> Judged:
    """Repeat the choices in folds with a separate metric each; return outputs, targets and weights of the held-out rows."""
    count = min(usual_folds(len(data)), len(data))
    fold = data.folds(count)
    views = (DataView(data.take(fold != k), held_out=data.take(fold == k).judged()) for k in range(count))
    f, y, w = (torch.cat(part) for part in zip(*(followed(view, choices, variant) for view in views), strict=True))
    return f, y, w


def followed(view: DataView, choices: Sequence[Choice], variant: Variant) -> Judged:
    """Return the held-out predictions of a view after these choices, or before the first choice that gives a flat function or a
    singular system."""
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
    """Bytes per pair of points while dense systems are solved: the geometry, (k - 1) times in k folds; the kernel, its factor,
    and the inverse for leave-one-out."""
    arrays = max(k.arrays for k in kernels)
    return 8 * max(6, arrays + 4, arrays * (folds - 1) + 2)


def fits(whole: FitProblem, kernels: Sequence[Kernel], memory: int) -> bool:
    """Return whether the kernel matrices of all points fit the memory limit."""
    return pair_bytes(kernels) * len(whole) ** 2 <= memory


def fitting(whole: FitProblem, kernels: Sequence[Kernel], memory: int, folds: int = 1) -> FitProblem:
    """Return the part of the problem that fits into memory as a dense system."""
    each = pair_bytes(kernels, folds)
    most = int((memory / each) ** 0.5)
    if most < min(len(whole), FEWEST):
        raise MemoryBudgetError(f"memory={show_bytes(memory)} holds a system of {most} points, too few to choose anything by. "
                                f"The smallest that works is {show_bytes(each * min(len(whole), FEWEST) ** 2)}.")
    return whole if len(whole) <= most else whole.last(min(most, SEARCHED))
