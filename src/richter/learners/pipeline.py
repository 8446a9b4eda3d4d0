"""Preprocessing of tables with words and missing values for a learner."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler

from richter.core import SelectionError


def tabular(learner: BaseEstimator) -> Pipeline:
    """Make a pipeline for data frames. Numbers are standardised; missing ones are replaced by the median and marked in an extra
    column.

    Words and categories become one column per value, and missing counts as a value.

    >>> tabular(RFMClassifier()).fit(frame, labels)
    """
    numbers = make_pipeline(FunctionTransformer(_numbers, feature_names_out="one-to-one"),
                            SimpleImputer(strategy="median", add_indicator=True), StandardScaler())
    words = make_pipeline(FunctionTransformer(_words, feature_names_out="one-to-one"),
                          OneHotEncoder(handle_unknown="ignore", sparse_output=False))
    kinds: Any = [np.number, "bool", "boolean"]
    return make_pipeline(make_column_transformer(
        (numbers, make_column_selector(dtype_include=kinds)),  # type: ignore[arg-type]
        (words, make_column_selector(dtype_exclude=kinds)), verbose_feature_names_out=False), learner)  # type: ignore[arg-type]


def _numbers(frame: Any) -> Any:
    """Columns as floats."""
    return frame.astype("float64")


def _words(frame: Any) -> Any:
    """Columns as text, with missing values as a category; raise an error for dates."""
    dates = [name for name, kind in frame.dtypes.items() if getattr(kind, "kind", "O") in "mM"]
    if dates:
        raise SelectionError(f"columns {dates} hold dates: turn them into numbers that mean something to the task, such as days "
                             f"since the first or the month, or leave them out.")
    return frame.astype(object).where(frame.notna(), "(missing)").astype(str)
