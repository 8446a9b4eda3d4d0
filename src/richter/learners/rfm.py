"""Recursive feature machines as scikit-learn estimators: fit a kernel machine, compute the metric from its gradients, repeat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, column_or_1d, validate_data

from richter.core import SelectionError, unknown
from richter.learners import scores
from richter.learners.calibration import calibrate, probabilities
from richter.learners.checks import chosen_folds, held_out, look_at_size, row_weights
from richter.learners.learner import Array, Learner, restored
from richter.learners.logistic import solve_logistic
from richter.learners.solvers import solve

_DOC = """
    Parameters
    ----------
    kernel : a kernel object, or several to choose from
        Default ``Laplace()``. A bandwidth of None is chosen; a number is used as it is.
    features : "agop", "agop_centred", "fact" or "fact_geometric"
        What the metric is made of after each fit.
    iterations : int
        Updates of the metric; 0 is plain kernel ridge regression.
    ridge : float or None
        Added to the Gram matrix. None: chosen, and then columns are standardised and an intercept is fitted too. With a number,
        the system solved is (K_M(X, X) + ridge I) A = Y and nothing else.
    power : float or None
        Exponent of the feature matrix. None: 1/2 for AGOP, and 1 for FACT, whose fixed point is M = FACT.
    diagonal : bool or None
        Learn a weight for each column only. None: both are tried.
    normalise : bool or None
        Divide the metric by the mean of its diagonal. None: yes, but not for FACT with a homogeneous kernel, which sets its own
        scale.
    scale, intercept : bool or None
        Standardise the columns; fit a constant. None: when the ridge is chosen.
    select : "auto", "loo", "last", int or splitter
        How bandwidth, ridge and iteration are chosen: each row, with its copies, left out in turn (in closed form; at most 2,000
        of them), or by folds of distinct rows.
        "auto" is "loo" for iterations=0, and else 5 folds (2 above 1,000 rows): a learned metric has seen the labels of a row
        that is left out, so "loo" then flatters late iterations. "last" is "loo", but the last iteration is taken whatever its
        loss. ``fit(..., validation=(X, y))`` chooses by that set instead.
    early_stopping : bool
        Stop when two iterations (one, of more than 600 distinct rows in a fold) have brought nothing. With False all are done,
        and the best one is still what predicts.
    keep : "best" or "all"
        All iterations, for ``staged_predict``.
    memory : bytes, e.g. "4GiB"
        Bound on working memory. Beyond it choices are made on a sample, and the system is solved in blocks.
    device : where to compute, e.g. "cuda"
    random_state : the order of points, which decides about folds and samples

    Attributes
    ----------
    feature_matrix_ : the metric [d, d] on the columns (in units of their deviation, if they were standardised)
    feature_importances_ : the mean squared slope of the function along each column (in the same units), with sum 1
    history_ : one entry for each iteration: its kernel, ridge and loss
    best_iteration_, kernel_, ridge_, loss_ : what was chosen, and its loss on rows left out: 1 - R2, or minus log likelihood
    """


class RFMRegressor(RegressorMixin, Learner):  # type: ignore[misc]
    """Kernel ridge regression with a learned metric: a recursive feature machine.

    >>> RFMRegressor().fit(X, y).predict(X_new)
    """

    __doc__ = f"{__doc__}{_DOC}"

    def __init__(self, kernel: Any = None, features: str = "agop", iterations: int = 5, ridge: float | None = None, *,
                 power: float | None = None, diagonal: bool | None = False, normalise: bool | None = None,
                 scale: bool | None = None, intercept: bool | None = None, select: Any = "auto", early_stopping: bool = True,
                 keep: str = "best", memory: str | float = "4GiB", device: Any = None, random_state: Any = 0) -> None:
        self.kernel, self.features, self.iterations, self.ridge = kernel, features, iterations, ridge
        self.power, self.diagonal, self.normalise, self.scale, self.intercept = power, diagonal, normalise, scale, intercept
        self.select, self.early_stopping, self.keep = select, early_stopping, keep
        self.memory, self.device, self.random_state = memory, device, random_state

    def fit(self, X: Any, y: Any, sample_weight: ArrayLike | None = None,
            validation: tuple[Any, Any] | None = None) -> RFMRegressor:
        """Fit the model. ``validation=(X, y)``: choose settings by these rows."""
        with restored(self):
            X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, ensure_min_samples=2)
            Y = y.reshape(len(y), -1).astype(np.float64)
            look_at_size(Y, "targets")
            weight = row_weights(sample_weight, X)
            self._flat = y.ndim == 1
            held = None if validation is None else held_out(self, validation, lambda v: _targets_like(y, v))
            self._fit(X, Y, weight, held, scores.unexplained, folds=None if held else chosen_folds(self, X, y, False))
        return self

    def predict(self, X: Any) -> Array:
        f = self._outputs(X)
        return f[:, 0] if self._flat else f

    def staged_predict(self, X: Any) -> Iterator[Array]:
        """Yield the prediction after each iteration; needs keep="all"."""
        for i in self._kept_stages():
            f = self._outputs(X, i)
            yield f[:, 0] if self._flat else f

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = True
        return tags


def _targets_like(y: Array, given: Any) -> Array:
    """Return validation targets [n, c], with as many outputs as the training targets."""
    targets = check_array(given, dtype=np.float64, ensure_2d=False)
    if targets.shape[1:] != y.shape[1:]:
        raise SelectionError(f"validation has targets of shape {targets.shape}; those to fit have {y.shape}.")
    return targets.reshape(len(targets), -1)


class KernelRidge(RFMRegressor):
    """Kernel ridge regression with the same solver and choice of bandwidth and ridge: an RFMRegressor without iterations."""

    def __init__(self, kernel: Any = None, ridge: float | None = None, *, scale: bool | None = None,
                 intercept: bool | None = None, select: Any = "auto", memory: str | float = "4GiB", device: Any = None,
                 random_state: Any = 0) -> None:
        super().__init__(kernel, iterations=0, ridge=ridge, scale=scale, intercept=intercept, select=select, memory=memory,
                         device=device, random_state=random_state)


class RFMClassifier(ClassifierMixin, Learner):  # type: ignore[misc]
    """A kernel classifier with a learned metric: a recursive feature machine on one-hot labels.

    >>> RFMClassifier().fit(X, y).predict_proba(X_new)
    """

    __doc__ = f"""{__doc__}{_DOC}
    loss : "squared" (default) on one-hot labels, or "logistic", for which folds choose: leaving rows out has no closed form
    temperature_, doubt_, class_frequencies_ : what makes probabilities of outputs in ``predict_proba``; the first two from the
        outputs for rows that neither the fit nor its metric has seen
    """

    def __init__(self, kernel: Any = None, features: str = "agop", iterations: int = 5, ridge: float | None = None, *,
                 loss: str = "squared", power: float | None = None, diagonal: bool | None = False, normalise: bool | None = None,
                 scale: bool | None = None, intercept: bool | None = None, select: Any = "auto", early_stopping: bool = True,
                 keep: str = "best", memory: str | float = "4GiB", device: Any = None, random_state: Any = 0) -> None:
        self.kernel, self.features, self.iterations, self.ridge, self.loss = kernel, features, iterations, ridge, loss
        self.power, self.diagonal, self.normalise, self.scale, self.intercept = power, diagonal, normalise, scale, intercept
        self.select, self.early_stopping, self.keep = select, early_stopping, keep
        self.memory, self.device, self.random_state = memory, device, random_state

    def fit(self, X: Any, y: Any, sample_weight: ArrayLike | None = None,
            validation: tuple[Any, Any] | None = None) -> RFMClassifier:
        """Fit the model. ``validation=(X, y)``: choose settings by these rows."""
        if self.loss not in ("squared", "logistic"):
            raise unknown(type(self).__name__, "loss", str(self.loss), ("squared", "logistic"))
        with restored(self):
            X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
            check_classification_targets(y)
            weight = row_weights(sample_weight, X)
            self.classes_, ids = np.unique(y, return_inverse=True)
            if len(np.unique(ids[weight > 0])) < 2:
                raise ValueError(f"y has one class only, {self.classes_[ids[weight > 0][0]]}: there is nothing to tell apart. "
                                 f"Are the rows sorted and cut?")
            held = None if validation is None else held_out(self, validation, lambda v: self._targets(self._known(v)))
            f, t, w = self._fit(X, self._targets(ids), weight, held, scores.cross_entropy,
                                solve if self.loss == "squared" else solve_logistic,
                                None if held else chosen_folds(self, X, y, True), unseen=True)
            self.class_frequencies_ = np.bincount(ids, weight) / weight.sum()
            self.temperature_, self.doubt_ = calibrate(f.cpu(), t.cpu(), w.cpu(), torch.from_numpy(self.class_frequencies_))
        return self

    def _targets(self, ids: Array) -> Array:
        """Return labels as one-hot [n, k], or as +-1 [n, 1] for two classes."""
        return (2.0 * ids - 1)[:, None] if len(self.classes_) == 2 else np.eye(len(self.classes_))[ids]

    def _known(self, given: Any) -> Array:
        """Labels as positions in ``classes_``; raise an error for unknown ones."""
        y = column_or_1d(given)
        strange = np.setdiff1d(y, self.classes_)
        if len(strange):
            raise ValueError(f"validation has classes that the training rows have not: {strange[:5].tolist()}.")
        return np.searchsorted(self.classes_, y)

    def decision_function(self, X: Any) -> Array:
        """Return the outputs: [n] for two classes, otherwise [n, k]."""
        f = self._outputs(X)
        return f[:, 0] if f.shape[1] == 1 else f

    def predict(self, X: Any) -> Array:
        f = torch.from_numpy(self._outputs(X))
        return self.classes_[scores.classes(f).numpy()]

    def predict_proba(self, X: Any) -> Array:
        """Return (1 - doubt) softmax(T f) + doubt times the class frequencies, with the temperature T and the doubt fitted on
        held-out rows. The largest probability belongs to the class that ``predict`` returns."""
        f = torch.from_numpy(self._outputs(X))
        return probabilities(f, self.temperature_, self.doubt_, torch.from_numpy(self.class_frequencies_)).numpy()

    def staged_predict(self, X: Any) -> Iterator[Array]:
        """Yield the prediction after each iteration; needs keep="all"."""
        for i in self._kept_stages():
            yield self.classes_[scores.classes(torch.from_numpy(self._outputs(X, i))).numpy()]
