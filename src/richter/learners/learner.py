"""What regressors and classifiers share: from checked settings and numeric targets to a chosen, fitted kernel machine."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral, Real
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.model_selection import check_cv
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor
from tqdm import tqdm

from richter.core import MemoryBudgetError, SelectionError, parse_bytes, show_bytes, unknown
from richter.learners.features import FEATURES, Features, Pairs, between, gradient_outer
from richter.learners.kernels import Kernel, Laplace, root, stretch
from richter.learners.problem import Problem, problem
from richter.learners.search import SMALL, Choice, Loss, Search, Stage, Update, View, large, path
from richter.learners.solvers import Solution, solve, solve_blocks

JUDGED = 2000  # rows are left out one by one for at most as many points; their prediction still uses all the others
FEWEST = 20  # points that a choice needs
SEARCHED = 5000  # points that choices are made on, when all do not fit the memory

Array = NDArray[Any]
Variant = tuple[Search, Update]


class Learner(BaseEstimator):
    """What regressors and classifiers share: everything but what targets are."""

    kernel: Kernel | Sequence[Kernel] | None
    features: str
    iterations: int
    ridge: float | None
    power: float | None
    diagonal: bool | None
    normalise: bool | None
    scale: bool | None
    intercept: bool | None
    select: Any
    early_stopping: bool
    keep: str
    memory: str | float
    device: Any
    random_state: Any

    def _fit(self, X: Array, Y: Array, weight: Array, validation: tuple[Array, Array, Array] | None, loss: Loss,
             solver: Callable[..., Solution] = solve, folds: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """Everything after the targets are numbers [n, c]. Returns what was judged at the best iteration."""
        variants = self._variants(loss, solver)
        look_at_size(X, "inputs")
        self._derived: dict[str, Any] = {}  # what is computed when it is asked for
        memory = parse_bytes(self.memory)
        random = check_random_state(self.random_state)
        self.mean_, self.scale_ = _standard(X, weight, self.ridge is None if self.scale is None else bool(self.scale))
        X = (X - self.mean_) / self.scale_
        _look_at(X)
        whole = problem(X, Y, weight, random, self.device or "cpu")
        kernels = [search.kernel for search, _ in variants]
        if solver is not solve and not fits(whole, kernels, memory):
            raise MemoryBudgetError(
                f"memory={show_bytes(memory)} does not hold the system of {len(whole)} points that the logistic loss needs. The "
                f"smallest that works is {show_bytes(pair_bytes(kernels) * len(whole) ** 2)}; loss=\"squared\" needs less.")

        def views() -> list[View]:
            return self._views(X, Y, weight, whole, validation, folds, kernels, memory, random)

        def walk(views: list[View], variant: Variant) -> Iterator[Stage]:
            return path(views, *variant, self.iterations, (1 if large(views) else 2) if self.early_stopping else None)

        given = views()
        if len(variants) > 1 and large(given):  # they race on some points
            least = [min(stage.choice.loss for stage in walk([v.shrunk(SMALL) for v in given], variant)) for variant in variants]
            variants = [variants[int(np.argmin(least))]]
        bar = tqdm(total=(self.iterations + 1) * len(variants), desc=type(self).__name__, delay=2, leave=False, file=sys.stderr,
                   disable=None)
        runs = []
        with bar:
            for i, variant in enumerate(variants):
                stages: list[Stage] = []
                for stage in walk(given if i == 0 else views(), variant):
                    better = self.select == "last" or not stages or stage.choice.loss < min(s.choice.loss for s in stages)
                    stages.append(stage if better or self.keep == "all" else stage.forgotten())
                    bar.update()
                runs.append(stages)
        stages, (search, update) = min(zip(runs, variants, strict=True), key=lambda run: min(s.choice.loss for s in run[0]))
        best = stages[-1] if self.select == "last" else min(stages, key=lambda s: s.choice.loss)
        self.best_iteration_ = best.choice.iteration
        self.history_ = [{"iteration": c.iteration, "kernel": c.kernel, "ridge": c.ridge, "loss": c.loss}
                         for c in (s.choice for s in stages)]
        if given[0].data is whole:  # what was fitted to choose is the model
            kept = stages if self.keep == "all" else [best]
            self.stages_ = [(s.choice, s.metric, s.solutions[0]) for s in kept]
        else:
            given.clear()  # their distances take memory that the fit of all rows needs
            wanted = stages if self.keep == "all" else stages[:self.best_iteration_ + 1]
            self.stages_ = list(_replay(whole, [s.choice for s in wanted], search, update, memory))
            if self.keep == "best":
                self.stages_ = self.stages_[-1:]
        self._publish(whole)
        assert best.judged is not None
        return best.judged

    def _publish(self, whole: Problem) -> None:
        """What users read of the chosen stage."""
        chosen, metric, solution = self._stage()
        M = torch.eye(whole.x.shape[1]) if metric is None else torch.diag(metric) if metric.dim() == 1 else metric
        self.feature_matrix_ = M.cpu().double().numpy()
        self.kernel_, self.ridge_, self.loss_ = chosen.kernel, chosen.ridge, chosen.loss
        self.points_, self.point_weights_ = whole.x.cpu().numpy(), whole.w.cpu().numpy()
        self.dual_coef_, self.intercept_ = solution.A.cpu().numpy(), solution.b.cpu().numpy()

    @property
    def feature_importances_(self) -> Array:
        """The mean squared slope of the fitted function along each column, sum 1: the diagonal of its AGOP. It says what the
        function uses also where the best metric is the first one."""
        check_is_fitted(self)
        if "importances" not in self._derived:
            choice, metric, solution = self._stage()
            R, u = self._seen(choice, metric, solution)
            w = torch.from_numpy(self.point_weights_).to(u)
            G = gradient_outer(choice.kernel, u, solution.A, w, _geometry(choice.kernel, u), diagonal=R is None or R.dim() == 1,
                               memory=parse_bytes(self.memory) // 8)
            G = between(G, R)
            found = (G if G.dim() == 1 else G.diagonal()).cpu().double().numpy()
            self._derived["importances"] = found / found.sum() if found.sum() > 0 else np.full(len(found), 1 / len(found))
        return cast(Array, self._derived["importances"])

    def _seen(self, choice: Choice, metric: Tensor | None, solution: Solution) -> tuple[Tensor | None, Tensor]:
        """The root of a stage's metric, and the points as its kernel sees them; kept for the next time."""
        if self._derived.get("stage") != choice.iteration:
            R = None if metric is None else root(metric)
            self._derived |= {"stage": choice.iteration, "seen": (R, stretch(torch.from_numpy(self.points_).to(solution.A), R))}
        return cast(tuple[Tensor | None, Tensor], self._derived["seen"])

    def _stage(self) -> tuple[Choice, Tensor | None, Solution]:
        return next(s for s in self.stages_ if s[0].iteration == self.best_iteration_)

    def _views(self, X: Array, Y: Array, weight: Array, whole: Problem, validation: tuple[Array, Array, Array] | None, folds: Any,
               kernels: Sequence[Kernel], memory: int, random: Any) -> list[View]:
        """What is fitted and what is judged, to choose."""
        if validation is not None:
            x, y, w = validation
            others = problem((x - self.mean_) / self.scale_, y, w, random, whole.x.device)
            return [View(_fitting(whole, kernels, memory), held_out=others.judged())]
        if folds in ("loo", "last"):
            return [View(data := _fitting(whole, kernels, memory), min(len(data), JUDGED))]
        if isinstance(folds, int):
            data = _fitting(whole, kernels, memory, min(folds, len(whole)))
            count = min(folds, len(data))
            fold = data.folds(count)
            parts = [(data.take(fold != k), data.take(fold == k)) for k in range(count)]
            return [View(a, held_out=b.judged()) for a, b in parts]
        given = [[problem(X[rows], Y[rows], weight[rows], random, whole.x.device) for rows in split] for split in folds]
        return [View(_fitting(a, kernels, memory, len(given)), held_out=b.judged()) for a, b in given]

    def _variants(self, loss: Loss, solver: Callable[..., Solution]) -> list[Variant]:
        """The settings, checked: a search and an update for each kernel and kind of metric that may be chosen."""
        asked = Laplace() if self.kernel is None else self.kernel
        kernels = [*asked] if isinstance(asked, (list, tuple)) else [asked]
        for k in kernels or [None]:
            if not isinstance(k, Kernel):
                raise SelectionError(f"kernel={self.kernel!r}: a kernel object (or several to choose from) is needed, e.g. "
                                     f"richter.learners.Laplace(bandwidth=3.0).")
        if self.features not in FEATURES:
            raise unknown(type(self).__name__, "rule features=", str(self.features), FEATURES)
        if not (isinstance(self.iterations, Integral) and self.iterations >= 0):
            raise SelectionError(f"iterations={self.iterations!r}: a whole number is needed; 0 is plain kernel ridge regression.")
        if self.ridge is not None and not (isinstance(self.ridge, Real) and 0 <= self.ridge < np.inf):
            raise SelectionError(f"ridge={self.ridge!r}: a number of at least 0 is needed, or None to have it chosen.")
        power = self.power if self.power is not None else 1.0 if self.features.startswith("fact") else 0.5
        if not (isinstance(power, Real) and 0 < power < np.inf):
            raise SelectionError(f"power={self.power!r}: a positive exponent of the feature matrix is needed, e.g. 0.5 or 1.")
        if self.keep not in ("best", "all"):
            raise SelectionError(f"keep={self.keep!r}: 'best' (the chosen iteration) or 'all' (for staged_predict) is needed.")
        ridge = None if self.ridge is None else float(self.ridge)
        intercept = ridge is None if self.intercept is None else bool(self.intercept)
        memory = parse_bytes(self.memory) // 2
        features = cast(Features, self.features)
        diagonals = (False, True) if self.diagonal is None and self.iterations else (bool(self.diagonal),)
        return [(Search(k, ridge, intercept, loss, solver),
                 Update(features, float(power), diagonal, _normalised(self.normalise, features, k), memory))
                for k in kernels for diagonal in diagonals]

    def _outputs(self, X: Any, which: int | None = None) -> Array:
        """f(X) [n, c] of the chosen stage, or of another one that was kept."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        look_at_size(X, "inputs")
        choice, metric, solution = self._stage() if which is None else self.stages_[which]
        R, u = self._seen(choice, metric, solution)
        x = torch.from_numpy((X - self.mean_) / self.scale_).to(u)
        step = max(1, int(parse_bytes(self.memory) / 8 / (3 * u.element_size() * len(u))))
        return torch.cat([choice.kernel.values(choice.kernel.geometry(stretch(part, R), u)) @ solution.A + solution.b
                          for part in x.split(step)]).cpu().double().numpy()

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "stages_")

    def __getstate__(self) -> dict[str, Any]:
        """What is kept in a file can be read without the device that it was computed on."""
        state = super().__getstate__()
        if "stages_" in state:
            moved = [(c, None if M is None else M.cpu(), Solution(s.A.cpu(), s.b.cpu())) for c, M, s in state["stages_"]]
            state = {**state, "stages_": moved, "_derived": {}}
        return state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = False
        return tags


@contextmanager
def restored(learner: Learner) -> Iterator[None]:
    """A fit that fails leaves the estimator as it was."""
    before = dict(learner.__dict__)
    try:
        yield
    except BaseException:
        learner.__dict__.clear()
        learner.__dict__.update(before)
        raise


def _standard(X: Array, weight: Array, scale: bool) -> tuple[Array, Array]:
    """Mean and deviation of the columns; columns that do not vary, and all if not asked for, stay as they are."""
    if not scale:
        return np.zeros(X.shape[1]), np.ones(X.shape[1])
    mean = np.average(X, 0, weight)
    deviation = np.sqrt(np.average((X - mean) ** 2, 0, weight))
    return mean, np.where(deviation > 1e-12 * np.abs(mean), deviation, 1.0)


def look_at_size(a: Array, what: str) -> None:
    if len(a) and (largest := float(np.abs(a).max())) > 1e100:
        raise ValueError(f"there are {what} as large as {largest:.3g}: their squares are too large. Rescale them.")


def _look_at(X: Array) -> None:
    """Inputs that are the same in all rows say nothing."""
    constant = np.flatnonzero(np.ptp(X, axis=0) == 0)
    if len(constant) == X.shape[1]:
        raise ValueError(f"all {len(X)} rows have the same inputs: there is nothing to learn a function of.")
    if len(constant):
        shown = ", ".join(map(str, constant[:5])) + (", ..." if len(constant) > 5 else "")
        warnings.warn(f"{len(constant)} of {X.shape[1]} columns are constant ({shown}): they are kept, and say nothing of "
                      f"distances.", stacklevel=4)


def _normalised(asked: bool | None, features: str, kernel: Kernel) -> bool:
    """FACT sets its own scale where a scale of the metric is one of the kernel; elsewhere the bandwidth would drift."""
    return not (features.startswith("fact") and kernel.homogeneous) if asked is None else bool(asked)


def pair_bytes(kernels: Sequence[Kernel], folds: int = 1) -> int:
    """For each pair of points while dense systems are solved: what kernels need to know of it, in k folds (k - 1) times; the
    kernel, its factor, and the inverse that leaving rows out needs."""
    arrays = max(k.arrays for k in kernels)
    return 8 * max(6, arrays + 4, arrays * (folds - 1) + 2)


def fits(whole: Problem, kernels: Sequence[Kernel], memory: int) -> bool:
    return pair_bytes(kernels) * len(whole) ** 2 <= memory


def _fitting(whole: Problem, kernels: Sequence[Kernel], memory: int, folds: int = 1) -> Problem:
    """As much of the problem as fits the memory as a dense system."""
    each = pair_bytes(kernels, folds)
    most = int((memory / each) ** 0.5)
    if most < min(len(whole), FEWEST):
        raise MemoryBudgetError(f"memory={show_bytes(memory)} holds a system of {most} points, too few to choose anything by. "
                                f"The smallest that works is {show_bytes(each * min(len(whole), FEWEST) ** 2)}.")
    return whole if len(whole) <= most else whole.some(min(most, SEARCHED))


def _geometry(kernel: Kernel, u: Tensor) -> Pairs:
    return lambda rows: kernel.geometry(u[rows], u)


def _replay(whole: Problem, choices: Sequence[Choice], search: Search, update: Update, memory: int) \
        -> Iterator[tuple[Choice, Tensor | None, Solution]]:
    """The same choices on all the data."""
    if fits(whole, [search.kernel], memory):
        view = View(whole)
        for i, c in enumerate(choices):
            solution = view.solve(c.kernel, c.ridge, search.intercept, partial(search.solver, final=True))
            yield c, view.metric, solution
            if i + 1 < len(choices):
                view.advance(update, c.kernel, solution.A)
        return
    data = whole.to(torch.float32)
    metric = None
    for i, c in enumerate(tqdm(choices, desc="all rows", delay=2, leave=False, file=sys.stderr, disable=None)):
        R = None if metric is None else root(metric)
        u = stretch(data.x, R)
        s = solve_blocks(c.kernel, whole, u, c.ridge, intercept=search.intercept, memory=memory)
        solution = Solution(s.A.to(u), s.b.to(u))
        yield c, metric, solution
        if i + 1 < len(choices):
            metric = update(c.kernel, u, data.x, R, solution.A, data.w, _geometry(c.kernel, u))


def row_weights(sample_weight: ArrayLike | None, X: Array) -> Array:
    weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    if (weight > 0).sum() < 2:
        raise ValueError(f"only {int((weight > 0).sum())} rows have a positive sample_weight: at least 2 are needed.")
    return weight


def held_out(learner: Learner, validation: Any, targets: Callable[[Any], Array]) -> tuple[Array, Array, Array]:
    try:
        X, y = validation
    except (TypeError, ValueError) as error:
        raise SelectionError(f"validation= is a {type(validation).__name__}; a pair (X, y) is needed.") from error
    X = validate_data(learner, X, reset=False, dtype=np.float64)
    if len(X) != len(y):
        raise SelectionError(f"validation has {len(X)} rows and {len(y)} targets.")
    return X, targets(y), np.ones(len(X))


def folds_of(learner: Learner, X: Array, y: Array, classifier: bool) -> Any:
    """What to choose by: "loo", a number of folds, or pairs of row numbers."""
    by = learner.select
    squared = getattr(learner, "loss", "squared") == "squared"
    if isinstance(by, str) and by == "auto":
        return "loo" if squared and learner.iterations == 0 else 5 if len(X) <= 1000 else 2
    if isinstance(by, str) and by in ("loo", "last"):
        if not squared:
            raise SelectionError(f'select="{by}": leaving rows out has no closed form for the logistic loss. Give a number of '
                                 'folds.')
        return by
    if isinstance(by, str):
        raise unknown(type(learner).__name__, "way select=", by, ("auto", "loo", "last"))
    if isinstance(by, Integral):
        if not 2 <= int(by) <= len(X):
            raise SelectionError(f"select={by}: from 2 to {len(X)} folds (one for each row at most) are possible.")
        return int(by)
    try:
        return list(check_cv(by, y, classifier=classifier).split(X, y))
    except ValueError as why:
        if "groups" not in str(why):
            raise
        raise SelectionError(f"select={by!r} needs groups, which fit has not: give select=list(cv.split(X, y, groups)).") from why


def kept_stages(learner: Learner) -> range:
    check_is_fitted(learner)
    if len(learner.stages_) < len(learner.history_):
        raise SelectionError('only the best iteration was kept: fit with keep="all" for staged predictions.')
    return range(len(learner.stages_))
