"""Views of the data: the points to fit, the points to evaluate, and the metric of each view."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from richter.learners.features import Features, Pairs, next_metric
from richter.learners.kernel import Geometry, Kernel, Tunable
from richter.learners.metric import root, stretch
from richter.learners.problem import FitProblem
from richter.learners.solvers import Solution

Judged = tuple[Tensor, Tensor, Tensor]  # predictions (or inputs), targets and weights of held-out rows
Solver = Callable[..., Solution]


class Flat(Exception):
    """The fitted function does not depend on its inputs, so there is no next metric."""


@dataclass(frozen=True)
class Update:
    """Rule for the next metric from a fit."""

    features: Features
    exponent: float
    diagonal: bool
    normalise: bool
    memory: int

    def __call__(self, kernel: Kernel, u: Tensor, x: Tensor, R: Tensor | None, A: Tensor, w: Tensor, pairs: Pairs) -> Tensor:
        """Compute the metric from a fit with coefficients A on the inputs x, which the kernel sees as u = R x."""
        M = next_metric(self.features, kernel, u, x, R, A, w, pairs, exponent=self.exponent, diagonal=self.diagonal,
                        memory=self.memory)
        size = (M if M.dim() == 1 else M.diagonal()).mean()
        if not torch.isfinite(size) or size <= 0:
            raise Flat
        return M / size if self.normalise else M


class DataView:
    """A part of the data to fit, and the rows that evaluate the fit: rows of its last ``judged`` points by leave-one-out, or the
    ``held_out`` rows. It moves from metric to metric, and caches the geometry of its points under the current metric."""

    def __init__(self, data: FitProblem, judged: int = 0, held_out: Judged | None = None) -> None:
        self.data, self.judged, self.held_out = data, judged, held_out
        self.metric: Tensor | None = None
        self.R: Tensor | None = None
        self._known: dict[tuple[type, bool], Geometry] = {}
        self._typical: dict[type, float] = {}
        self.u, self.v = data.x, held_out[0] if held_out else None

    def shrunk(self, n: int) -> DataView:
        """Return a view of only n points."""
        held = None if self.held_out is None else tuple(part[:n] for part in self.held_out)
        size = min(n, len(self.data))
        return DataView(self.data.last(size), min(size, self.judged), held)  # type: ignore[arg-type]

    def move(self, metric: Tensor) -> None:
        """Use another metric, and forget the geometry of the last one."""
        self.metric, self.R = metric, root(metric)
        self.u = stretch(self.data.x, self.R)
        self.v = stretch(self.held_out[0], self.R) if self.held_out else None
        self._known, self._typical = {}, {}

    def typical(self, kernel: Tunable) -> float:
        """Bandwidth by the rule of thumb, from some hundred points."""
        kind = type(kernel)
        if kind not in self._typical:
            self._typical[kind] = kernel.typical(self.geometry(kernel)[..., :500, :500])
        return self._typical[kind]

    def geometry(self, kernel: Kernel) -> Geometry:
        """Geometry of the kernel on the rows, computed once for each kind of kernel."""
        kind = type(kernel), False
        if kind not in self._known:
            self._known[kind] = kernel.geometry(self.u, self.u)
        return self._known[kind]

    def others(self, kernel: Kernel) -> Iterator[Geometry]:
        """Yield the geometry of held-out rows, in parts that are not cached if it is larger than that of the fitted points."""
        assert self.v is not None
        kind = type(kernel), True
        if len(self.v) > len(self.u):
            yield from (kernel.geometry(part, self.u) for part in self.v.split(len(self.u)))
            return
        if kind not in self._known:
            self._known[kind] = kernel.geometry(self.v, self.u)
        yield self._known[kind]

    def solve(self, kernel: Kernel, ridge: float, intercept: bool, solver: Solver) -> Solution:
        """Solve the regression on these rows with this kernel."""
        g = self.geometry(kernel)
        K = kernel.values(g)
        if K.untyped_storage().data_ptr() == g.untyped_storage().data_ptr():
            K = K.clone()  # a copy, because a solver writes into it, and the geometry is used again
        return solver(K, self.data, ridge, intercept=intercept, judged=self.judged)

    def judge(self, kernel: Kernel, s: Solution) -> Judged:
        """Return predictions, targets and weights of the rows that evaluate the fit."""
        if self.held_out is None:
            assert s.left_out is not None and s.judged is not None
            return s.left_out, self.data.rows[s.judged], self.data.weight[s.judged]
        return torch.cat([kernel.values(h) @ s.A for h in self.others(kernel)]) + s.b, *self.held_out[1:]

    def advance(self, update: Update, kernel: Kernel, A: Tensor) -> None:
        """Move to the metric that this fit gives."""
        g = self.geometry(kernel)
        self.move(update(kernel, self.u, self.data.x, self.R, A, self.data.w, lambda rows: g[..., rows, :]))
