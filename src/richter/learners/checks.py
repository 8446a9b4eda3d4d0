"""Validation of rows, weights and settings before a fit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.model_selection import check_cv
from sklearn.utils.validation import _check_sample_weight, validate_data

from richter.core import SelectionError, unknown
from richter.learners.problem import usual_folds

Array = NDArray[Any]


def look_at_size(a: Array, name: str) -> None:
    """Raise an error for numbers whose squares overflow."""
    if len(a) and (largest := float(np.abs(a).max())) > 1e100:
        raise ValueError(f"there are {name} as large as {largest:.3g}: their squares are too large. Rescale them.")


def look_at_columns(X: Array) -> None:
    """Raise an error if all rows have the same inputs; warn about constant columns."""
    constant = np.flatnonzero(np.ptp(X, axis=0) == 0)
    if len(constant) == X.shape[1]:
        raise ValueError(f"all {len(X)} rows have the same inputs: there is nothing to learn a function of.")
    if len(constant):
        shown = ", ".join(map(str, constant[:5])) + (", ..." if len(constant) > 5 else "")
        warnings.warn(f"{len(constant)} of {X.shape[1]} columns are constant ({shown}): they are kept, and say nothing of "
                      f"distances.", stacklevel=4)


def row_weights(sample_weight: ArrayLike | None, X: Array) -> Array:
    """Weights of the rows, at least two of them positive."""
    weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    if (weight > 0).sum() < 2:
        raise ValueError(f"only {int((weight > 0).sum())} rows have a positive sample_weight: at least 2 are needed.")
    return weight


def held_out(learner: BaseEstimator, validation: Any, targets: Callable[[Any], Array]) -> tuple[Array, Array, Array]:
    """Return inputs, targets and weights of the rows given as ``fit(..., validation=(X, y))``."""
    try:
        X, y = validation
    except (TypeError, ValueError) as error:
        raise SelectionError(f"validation= is a {type(validation).__name__}; a pair (X, y) is needed.") from error
    X = validate_data(learner, X, reset=False, dtype=np.float64)
    if len(X) != len(y):
        raise SelectionError(f"validation has {len(X)} rows and {len(y)} targets.")
    return X, targets(y), np.ones(len(X))


def chosen_folds(learner: Any, X: Array, y: Array, classifier: bool) -> Any:
    """Resolve ``select`` of a learner for these rows: "loo", "last", a number of folds, or pairs of row numbers."""
    by = learner.select
    squared = getattr(learner, "loss", "squared") == "squared"
    if isinstance(by, str) and by == "auto":
        return "loo" if squared and learner.iterations == 0 else usual_folds(len(X))
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
