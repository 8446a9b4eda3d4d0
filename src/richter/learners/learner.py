"""The shared part of regressors and classifiers: everything except the encoding of targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from richter.core import SelectionError, parse_bytes, unknown
from richter.learners.checks import look_at_columns, look_at_size
from richter.learners.features import FEATURES, Features, geometry_of, gradient_outer
from richter.learners.fit import Fit, FitRows, FitSettings, Fitted, FittedIteration, Variant
from richter.learners.kernel import Kernel
from richter.learners.kernels import Laplace
from richter.learners.metric import between, root, stretch
from richter.learners.search import Loss, Search
from richter.learners.solvers import Solution, solve
from richter.learners.views import Judged, Update

Array = NDArray[Any]


class Learner(BaseEstimator):
    """Base class of regressors and classifiers: everything except the encoding of targets."""

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
             solver: Callable[..., Solution] = solve, folds: Any = None, unseen: bool = False) -> Judged:
        """Fit numeric targets [n, c]. Returns outputs for held-out rows at the best iteration; with ``unseen`` also the metric
        has not seen these rows."""
        settings = self._settings(loss, solver, unseen)
        look_at_size(X, "inputs")
        random = check_random_state(self.random_state)
        self.mean_, self.scale_ = _standard(X, weight, self.ridge is None if self.scale is None else bool(self.scale))
        X = self._scaled(X)
        look_at_columns(X)
        if validation is not None:
            validation = (self._scaled(validation[0]), *validation[1:])
        fitted = Fit(FitRows(X, Y, weight, validation, folds), settings, random).run()
        self._publish(fitted)
        return fitted.judged

    def _scaled(self, X: Array) -> Array:
        """Inputs with the mean and scale of the training rows."""
        return (X - self.mean_) / self.scale_

    def _publish(self, fitted: Fitted) -> None:
        """Set the public attributes of a fitted learner."""
        self._derived: dict[str, Any] = {}  # cache of results that are computed on first use
        self.best_iteration_, self.stages_ = fitted.best, fitted.kept
        self.history_ = [{"iteration": c.iteration, "kernel": c.kernel, "ridge": c.ridge, "loss": c.loss} for c in fitted.choices]
        points = fitted.points
        chosen, metric, solution = self._stage()
        M = torch.eye(points.x.shape[1]) if metric is None else torch.diag(metric) if metric.dim() == 1 else metric
        self.feature_matrix_ = M.cpu().double().numpy()
        self.kernel_, self.ridge_, self.loss_ = chosen.kernel, chosen.ridge, chosen.loss
        self.points_, self.point_weights_ = points.x.cpu().numpy(), points.w.cpu().numpy()
        self.dual_coef_, self.intercept_ = solution.A.cpu().numpy(), solution.b.cpu().numpy()

    @property
    def feature_importances_(self) -> Array:
        """Mean squared slope of the fitted function along each column, normalised to sum 1: the diagonal of its AGOP. It shows
        which columns the function uses, even if the best metric is the initial one."""
        check_is_fitted(self)
        if "importances" not in self._derived:
            stage = self._stage()
            R, u = self._seen(stage)
            w = torch.from_numpy(self.point_weights_).to(u)
            G = gradient_outer(stage.choice.kernel, u, stage.solution.A, w, geometry_of(stage.choice.kernel, u),
                               diagonal=R is None or R.dim() == 1, memory=parse_bytes(self.memory) // 8)
            G = between(G, R)
            slopes = (G if G.dim() == 1 else G.diagonal()).cpu().double().numpy()
            total = slopes.sum()
            self._derived["importances"] = slopes / total if total > 0 else np.full(len(slopes), 1 / len(slopes))
        return cast(Array, self._derived["importances"])

    def _seen(self, stage: FittedIteration) -> tuple[Tensor | None, Tensor]:
        """Return the root of a stage's metric, and the points as its kernel sees them; cached."""
        if self._derived.get("stage") != stage.choice.iteration:
            R = None if stage.metric is None else root(stage.metric)
            points = torch.from_numpy(self.points_).to(stage.solution.A)
            self._derived |= {"stage": stage.choice.iteration, "seen": (R, stretch(points, R))}
        return cast(tuple[Tensor | None, Tensor], self._derived["seen"])

    def _stage(self) -> FittedIteration:
        """Iteration that was chosen."""
        return next(s for s in self.stages_ if s.choice.iteration == self.best_iteration_)

    def _settings(self, loss: Loss, solver: Callable[..., Solution], unseen: bool) -> FitSettings:
        """Validate the settings and return them."""
        variants = self._variants(loss, solver)
        if self.keep not in ("best", "all"):
            raise SelectionError(f"keep={self.keep!r}: 'best' (the chosen iteration) or 'all' (for staged_predict) is needed.")
        return FitSettings(variants, int(self.iterations), early_stopping=bool(self.early_stopping),
                        last=isinstance(self.select, str) and self.select == "last", keep_all=self.keep == "all",
                        unseen=unseen, memory=parse_bytes(self.memory), device=self.device or "cpu", title=type(self).__name__)

    def _variants(self, loss: Loss, solver: Callable[..., Solution]) -> list[Variant]:
        """Return a search and an update for each kernel and kind of metric to choose from."""
        kernels = self._kernels()
        if self.features not in FEATURES:
            raise unknown(type(self).__name__, "rule features=", str(self.features), FEATURES)
        if not (isinstance(self.iterations, Integral) and self.iterations >= 0):
            raise SelectionError(f"iterations={self.iterations!r}: a whole number is needed; 0 is plain kernel ridge regression.")
        if self.ridge is not None and not (isinstance(self.ridge, Real) and 0 <= self.ridge < np.inf):
            raise SelectionError(f"ridge={self.ridge!r}: a number of at least 0 is needed, or None to have it chosen.")
        power = self.power if self.power is not None else 1.0 if self.features.startswith("fact") else 0.5
        if not (isinstance(power, Real) and 0 < power < np.inf):
            raise SelectionError(f"power={self.power!r}: a positive exponent of the feature matrix is needed, e.g. 0.5 or 1.")
        ridge = None if self.ridge is None else float(self.ridge)
        intercept = ridge is None if self.intercept is None else bool(self.intercept)
        memory = parse_bytes(self.memory) // 2
        features = cast(Features, self.features)
        diagonals = (False, True) if self.diagonal is None and self.iterations else (bool(self.diagonal),)
        return [(Search(k, ridge, intercept, loss, solver),
                 Update(features, float(power), diagonal, _normalised(self.normalise, features, k), memory))
                for k in kernels for diagonal in diagonals]

    def _kernels(self) -> list[Kernel]:
        """Return the kernels to choose from."""
        given = Laplace() if self.kernel is None else self.kernel
        kernels = [*given] if isinstance(given, (list, tuple)) else [given]
        for k in kernels or [None]:
            if not isinstance(k, Kernel):
                raise SelectionError(f"kernel={self.kernel!r}: a kernel object (or several to choose from) is needed, e.g. "
                                     f"richter.learners.Laplace(bandwidth=3.0).")
        return cast(list[Kernel], kernels)

    def _outputs(self, X: Any, which: int | None = None) -> Array:
        """Return f(X) [n, c] of the chosen stage, or of another stored one."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        look_at_size(X, "inputs")
        stage = self._stage() if which is None else self.stages_[which]
        kernel, solution = stage.choice.kernel, stage.solution
        R, u = self._seen(stage)
        x = torch.from_numpy(self._scaled(X)).to(u)
        step = max(1, int(parse_bytes(self.memory) / 8 / (3 * u.element_size() * len(u))))
        return torch.cat([kernel.values(kernel.geometry(stretch(part, R), u)) @ solution.A + solution.b
                          for part in x.split(step)]).cpu().double().numpy()

    def _kept_stages(self) -> range:
        """Iterations of staged predictions, which are stored with keep="all"."""
        check_is_fitted(self)
        if len(self.stages_) < len(self.history_):
            raise SelectionError('only the best iteration was kept: fit with keep="all" for staged predictions.')
        return range(len(self.stages_))

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "stages_")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state on the CPU, so that a file can be read without the original device."""
        state = super().__getstate__()
        if "stages_" in state:
            moved = [FittedIteration(c, None if M is None else M.cpu(), Solution(s.A.cpu(), s.b.cpu()))
                     for c, M, s in state["stages_"]]
            state = {**state, "stages_": moved, "_derived": {}}
        return state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = False
        return tags


@contextmanager
def restored(learner: Learner) -> Iterator[None]:
    """Restore the estimator if a fit fails."""
    before = dict(learner.__dict__)
    try:
        yield
    except BaseException:
        learner.__dict__.clear()
        learner.__dict__.update(before)
        raise


def _standard(X: Array, weight: Array, scale: bool) -> tuple[Array, Array]:
    """Mean and standard deviation of the columns; 0 and 1 without ``scale``, and a deviation of 1 for constant columns."""
    if not scale:
        return np.zeros(X.shape[1]), np.ones(X.shape[1])
    mean = np.average(X, 0, weight)
    deviation = np.sqrt(np.average((X - mean) ** 2, 0, weight))
    return mean, np.where(deviation > 1e-12 * np.abs(mean), deviation, 1.0)


def _normalised(given: bool | None, features: str, kernel: Kernel) -> bool:
    """Whether the metric is divided by the mean of its diagonal. FACT fixes its own scale if scaling the metric scales the
    kernel; otherwise the bandwidth would drift."""
    return not (features.startswith("fact") and kernel.homogeneous) if given is None else bool(given)
