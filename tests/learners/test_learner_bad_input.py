"""What learners refuse, in words, and unusual input that works."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import sklearn.base

from machines import table
from richter.learners import KernelRidge, Laplace, Quadratic, RFMClassifier, RFMRegressor


def with_value(X: np.ndarray, value: float) -> np.ndarray:
    X = X.copy()
    X[3, 1] = value
    return X


X20, Y20, C20 = table(20, 3)
EDGE = KernelRidge(Laplace(1.0), ridge=0.1)
BAD: dict[str, tuple[Any, str]] = {
    "NaN": (lambda: RFMRegressor().fit(with_value(X20, np.nan), Y20), "Input X contains NaN"),
    "Inf": (lambda: RFMClassifier().fit(with_value(X20, np.inf), C20), "Input X contains infinity"),
    "NaN target": (lambda: RFMRegressor().fit(X20, np.where(Y20 > 0, np.nan, Y20)), "Input y contains NaN"),
    "NaN in predict": (lambda: sklearn.base.clone(EDGE).fit(X20, Y20).predict(with_value(X20, np.nan)), "Input X contains NaN"),
    "all constant": (lambda: RFMRegressor().fit(np.ones((20, 3)), Y20),
                     "all 20 rows have the same inputs: there is nothing to learn"),
    "all constant, with a ridge": (lambda: sklearn.base.clone(EDGE).fit(np.ones((20, 3)), Y20),
                                   "all 20 rows have the same inputs"),
    "one class": (lambda: RFMClassifier().fit(X20, np.zeros(20)), "y has one class only, .*nothing to tell apart"),
    "one class of weight": (lambda: RFMClassifier().fit(X20, C20, (C20 == 1) * 1.0), "y has one class only, .*1"),
    "one class, by its name": (lambda: RFMClassifier().fit(X20, np.full(20, 4)), "y has one class only, 4:"),
    "one row": (lambda: RFMRegressor().fit(X20[:1], Y20[:1]), "1 sample.*a minimum of 2 is required"),
    "one row of weight": (lambda: RFMRegressor().fit(X20, Y20, np.eye(20)[0]),
                          "only 1 rows have a positive sample_weight: at least 2"),
    "sparse": (lambda: RFMRegressor().fit(scipy.sparse.csr_matrix(X20), Y20), "Sparse data was passed.*dense data is required"),
    "singular": (lambda: KernelRidge(Quadratic(), ridge=0).fit(X20[:, :2], Y20),
                 "kernel matrix of 20 distinct rows is singular to working precision with ridge=0:.*Give a larger ridge"),
    "singular but for rounding": (lambda: KernelRidge(Quadratic(), ridge=1e-15).fit(X20[:, :2], Y20),
                                  "singular to working precision"),
    "singular, and hidden by rounding": (lambda: KernelRidge(Quadratic(), ridge=3e-13).fit(X20[:, :2], Y20),
                                         "singular to working precision"),
    "negative iterations": (lambda: RFMRegressor(iterations=-1).fit(X20, Y20),
                            "iterations=-1: a whole number is needed; 0 is plain"),
    "part of an iteration": (lambda: RFMRegressor(iterations=1.5).fit(X20, Y20),  # type: ignore[arg-type]
                             "iterations=1.5: a whole number is needed"),
    "negative ridge": (lambda: RFMRegressor(ridge=-1).fit(X20, Y20), "ridge=-1: a number of at least 0 is needed, or None"),
    "ridge NaN": (lambda: RFMRegressor(ridge=np.nan).fit(X20, Y20), "ridge=nan: a number of at least 0"),
    "ridge in words": (lambda: KernelRidge(ridge="auto").fit(X20, Y20),  # type: ignore[arg-type]
                       "ridge='auto': a number of at least 0"),
    "unknown features": (lambda: RFMRegressor(features="agopp").fit(X20, Y20), "no rule features= 'agopp'. Close to it: 'agop'"),
    "kernel in words": (lambda: RFMRegressor("laplace").fit(X20, Y20), "kernel='laplace': a kernel object .* is needed, e.g."),
    "kernel of another type": (lambda: RFMRegressor(3).fit(X20, Y20), "kernel=3: a kernel object"),
    "kernel's class": (lambda: RFMRegressor(Laplace).fit(X20, Y20), "kernel=.*Laplace.*: a kernel object"),
    "no kernel": (lambda: RFMRegressor([]).fit(X20, Y20), r"kernel=\[\]: a kernel object"),
    "unknown loss": (lambda: RFMClassifier(loss="hinge").fit(X20, C20),
                     "RFMClassifier has no loss 'hinge'. It has: 'squared', 'logistic'"),
    "unknown selection": (lambda: RFMRegressor(select="cv").fit(X20, Y20), "no way select= 'cv'. It has: .*'loo'"),
    "one fold": (lambda: RFMRegressor(select=1).fit(X20, Y20), "select=1: from 2 to 20 folds"),
    "more folds than rows": (lambda: RFMRegressor(select=21).fit(X20, Y20), "select=21: from 2 to 20 folds"),
    "logistic leave-one-out": (lambda: RFMClassifier(loss="logistic", select="loo").fit(X20, C20),
                               "leaving rows out has no closed form for the logistic loss. Give a number of folds"),
    "logistic without ridge": (lambda: RFMClassifier(loss="logistic", ridge=0).fit(X20, C20), "Give a positive ridge"),
    "no power": (lambda: RFMRegressor(power=0).fit(X20, Y20), "power=0: a positive exponent"),
    "unknown keep": (lambda: RFMRegressor(keep="some").fit(X20, Y20), "keep='some': 'best' .* or 'all'"),
    "stages not kept": (lambda: list(RFMRegressor(Laplace(3.0), ridge=0.1).fit(X20, Y20).staged_predict(X20)),
                        'fit with keep="all"'),
    "huge inputs": (lambda: RFMRegressor().fit(1e200 * X20, Y20), "1e\\+?200|too large|overflow"),
    "huge inputs, with a ridge": (lambda: RFMRegressor(Laplace(1.0), ridge=0.1).fit(1e200 * X20, Y20),
                                  "1e\\+?200|too large|overflow"),
    "one huge input": (lambda: RFMRegressor().fit(with_value(X20, 1e200), Y20), "1e\\+?200|too large|overflow"),
    "huge targets": (lambda: RFMRegressor(Laplace(3.0), ridge=0.1).fit(X20, 1e200 * Y20), "1e\\+?200|too large|overflow"),
    "huge inputs in predict": (lambda: sklearn.base.clone(EDGE).fit(X20, Y20).predict(1e200 * X20),
                               "1e\\+?200|too large|overflow"),
    "empty": (lambda: RFMRegressor().fit(X20[:0], Y20[:0]), "0 sample.*a minimum of 2 is required"),
    "no columns": (lambda: RFMRegressor().fit(X20[:, :0], Y20), "0 feature.*a minimum of 1 is required"),
    "three axes": (lambda: RFMRegressor().fit(X20[None], Y20), "dim 3"),
    "one axis": (lambda: RFMRegressor().fit(Y20, Y20), "Expected 2D array, got 1D array"),
    "other columns in predict": (lambda: sklearn.base.clone(EDGE).fit(X20, Y20).predict(X20[:, :2]),
                                 "X has 2 features, but .* expecting 3"),
    "validation of wrong width": (lambda: RFMRegressor().fit(X20, Y20, validation=(X20[:, :2], Y20)),
                                  "X has 2 features, but .* expecting 3"),
    "validation of wrong length": (lambda: RFMRegressor().fit(X20, Y20, validation=(X20, Y20[:3])),
                                   "validation has 20 rows and 3 targets"),
    "validation alone": (lambda: RFMRegressor().fit(X20, Y20, validation=X20),  # type: ignore[arg-type]
                         r"validation= is a ndarray; a pair \(X, y\) is needed"),
    "validation of more targets": (lambda: RFMRegressor().fit(X20, Y20, validation=(X20, np.stack([Y20, Y20], 1))), "validation"),
    "validation targets NaN": (lambda: RFMRegressor().fit(X20, Y20, validation=(X20, np.nan * Y20)), "NaN"),
    "validation of other classes": (lambda: RFMClassifier().fit(X20, C20, validation=(X20, C20 + 5)),
                                    r"validation has classes that the training rows have not: \[5, 6, 7\]|\[3, 4|\[5, 6"),
    "memory too small": (lambda: RFMRegressor(memory=100).fit(X20, Y20), "memory=100B?"),
    "memory in words": (lambda: RFMRegressor(memory="lots").fit(X20, Y20),
                        "memory='lots' is not a size. Write a number of bytes, or e.g."),
    "no memory": (lambda: RFMRegressor(memory=0).fit(X20, Y20), "memory=0 must be positive"),
    "negative weight": (lambda: RFMRegressor().fit(X20, Y20, -np.ones(20)), "Negative values in data passed to `sample_weight`"),
    "weights of wrong length": (lambda: RFMRegressor().fit(X20, Y20, np.ones(3)), r"sample_weight.shape == \(3,\)"),
    "numbers as classes": (lambda: RFMClassifier().fit(X20, Y20), "Unknown label type: continuous"),
    "words as numbers": (lambda: RFMRegressor().fit(X20, np.array(["a", "b"] * 10)), "could not convert string to float"),
    "words in the table": (lambda: RFMRegressor().fit(pd.DataFrame({"a": ["x"] * 20}), Y20), "could not convert string to float"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    call, sentence = BAD[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an error, and no riddle before it
        with pytest.raises((ValueError, TypeError, MemoryError), match=f"(?s){sentence}"):
            call()


def test_unusual_input_that_works() -> None:
    def fits(X: np.ndarray, y: np.ndarray, model: Any = None) -> Any:
        model = (RFMRegressor(iterations=1) if model is None else model).fit(X, y)
        assert np.isfinite(model.predict(X)).all()
        return model

    X, y, labels = table(20, 3)
    with pytest.warns(UserWarning, match=r"1 of 4 columns are constant \(3\): they are kept, and say nothing"):
        constant = fits(np.c_[X, np.full(20, 7.0)], y)
    assert constant.feature_importances_[3] == 0
    assert np.allclose(fits(X, y).predict(X), constant.predict(np.c_[X, np.full(20, 7.0)]), rtol=0.2, atol=0.2)
    fits(np.concatenate([X, X, X]), np.concatenate([y, y + 0.1, y - 0.1]))
    fits(np.concatenate([X, X]), np.concatenate([y, y]), KernelRidge(Laplace(1.0), ridge=0))  # copies do not make it singular
    fits(np.random.default_rng(0).standard_normal((10, 50)), y[:10])  # d > n
    fits(X[:3], y[:3])
    fits(X[:2], y[:2], KernelRidge())
    assert np.allclose(fits(X, np.full(20, 3.0), KernelRidge()).predict(X), 3)
    fits(X.astype(np.float32), y.astype(np.float32))
    fits((X * 10).astype(int), labels)
    assert len(fits(X, y, RFMRegressor(iterations=0)).history_) == 1
    few = RFMClassifier(iterations=1).fit(X[:5], [0, 1, 2, 2, 2])  # classes of one row
    assert set(few.predict(X)) <= {0, 1, 2}
    copies = np.array([0, 1] * 10)  # equal inputs with both labels
    both = RFMClassifier(Laplace(1.0), ridge=0.1, iterations=0).fit(X[np.arange(20) // 2], copies)
    assert np.allclose(both.predict_proba(X[:10]), 0.5, atol=1e-6)


def test_two_rows_are_enough() -> None:
    model = RFMRegressor(Laplace(3.0), ridge=0.1, iterations=1).fit(X20[:2], Y20[:2])
    assert np.isfinite(model.predict(X20)).all()
    assert set(RFMClassifier(iterations=1).fit(X20[:2], [0, 1]).predict(X20)) <= {0, 1}


def test_constant_targets_are_predicted() -> None:
    assert np.allclose(RFMRegressor().fit(X20, np.full(20, 3.0)).predict(X20), 3)
    assert np.allclose(RFMRegressor(Laplace(3.0), ridge=0.1).fit(X20, np.zeros(20)).predict(X20), 0)
    assert np.allclose(RFMRegressor(Laplace(3.0), ridge=1e300).fit(X20, Y20).predict(X20), 0)  # nothing is fitted
