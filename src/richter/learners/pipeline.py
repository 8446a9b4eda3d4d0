"""Tables with words and gaps in front of a learner."""

from __future__ import annotations

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler


def tabular(learner: BaseEstimator) -> Pipeline:
    """A pipeline for data frames: numbers are standardised, gaps filled with the median and marked by a column of their own,
    words and categories become one column for each value.

    >>> tabular(RFMClassifier()).fit(frame, labels)
    """
    numbers = make_pipeline(SimpleImputer(strategy="median", add_indicator=True), StandardScaler())
    words = make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder(handle_unknown="ignore", sparse_output=False))
    return make_pipeline(make_column_transformer(
        (numbers, make_column_selector(dtype_include=np.number)),  # type: ignore[arg-type]
        (words, make_column_selector(dtype_exclude=np.number)), verbose_feature_names_out=False), learner)  # type: ignore[arg-type]
