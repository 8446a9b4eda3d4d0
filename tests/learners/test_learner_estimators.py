"""Learners as scikit-learn estimators: its own checks, labels, probabilities, tables, weights, files."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.special
import sklearn.base
import sklearn.datasets
import sklearn.exceptions
import sklearn.metrics
import sklearn.model_selection
import sklearn.pipeline
import sklearn.preprocessing
import sklearn.utils.estimator_checks
import torch

import oracles
from machines import NAMED, apart, assert_close, table
from richter.core import MemoryBudgetError, SelectionError
from richter.learners import NTK, Gaussian, Kernel, KernelRidge, Laplace, LaplaceL1, RFMClassifier, RFMRegressor, tabular


@pytest.mark.parametrize("model", [RFMRegressor(iterations=1), RFMClassifier(iterations=1)], ids=["regressor", "classifier"])
def test_a_fit_that_fails_leaves_the_model_that_was_there(model: Any) -> None:
    X, y = sklearn.datasets.make_classification(80, 5, random_state=0)
    model = sklearn.base.clone(model)
    with pytest.raises(MemoryBudgetError):
        model.set_params(memory="1KiB").fit(X, y)
    with pytest.raises(sklearn.exceptions.NotFittedError):
        model.predict(X)
    before = model.set_params(memory="1GiB").fit(X, y).predict(X)
    with pytest.raises(MemoryBudgetError):
        model.set_params(memory="1KiB").fit(100 * X[:, :3] + 7, 3 + y)
    assert (model.set_params(memory="1GiB").predict(X) == before).all()


def test_tables_with_all_kinds_of_columns() -> None:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"number": draw.standard_normal(60), "yes": draw.random(60) > 0.5,
                          "word": pd.array(["x", None, "y"] * 20, dtype="string"), "kind": pd.Categorical([1, 2, None] * 20),
                          "count": pd.array([1, None, 3] * 20, dtype="Int64")})
    y = frame.word.isna().to_numpy()  # a gap tells
    model = tabular(RFMClassifier(iterations=0)).fit(frame, y)
    assert model.score(frame, y) == 1
    assert list(model[:-1].get_feature_names_out()) == ["number", "yes", "count", "missingindicator_count", "word_(missing)",
                                                        "word_x", "word_y", "kind_(missing)", "kind_1", "kind_2"]
    tabular(RFMClassifier(iterations=0)).fit(frame[["yes"]], y)
    with pytest.raises(SelectionError, match=r"columns \['day'\] hold dates: turn them into numbers"):
        tabular(RFMClassifier()).fit(frame.assign(day=pd.Timestamp("2020-01-01")), y)


def test_a_model_in_a_file_holds_nothing_of_a_device() -> None:
    X, y = sklearn.datasets.make_friedman1(60, random_state=0)
    model = RFMRegressor(iterations=1).fit(X, y)
    before = model.predict(X)
    assert model._derived  # kept for the next prediction
    again = pickle.loads(pickle.dumps(model))
    assert not again._derived
    assert (again.predict(X) == before).all()


CHEAP = [
    RFMRegressor(iterations=1), KernelRidge(), RFMRegressor(Laplace(3.0), "fact", iterations=1, ridge=0.1),
    RFMClassifier(LaplaceL1(5.0), iterations=1, ridge=0.1, diagonal=True)]
WHOLE = [
    RFMRegressor(), RFMClassifier(), KernelRidge(), RFMClassifier(loss="logistic"), RFMRegressor(features="fact"),
    RFMClassifier(LaplaceL1(), diagonal=True), RFMClassifier(iterations=1),
    RFMClassifier(Laplace(3.0), loss="logistic", iterations=1, ridge=0.1, select=2)]


@sklearn.utils.estimator_checks.parametrize_with_checks(CHEAP)
def test_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.long
@sklearn.utils.estimator_checks.parametrize_with_checks(WHOLE)
def test_scikit_learn_with_defaults(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    X, y = sklearn.datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(X))
    return X[order[:300]], y[order[:300]], X[order[300:900]], y[order[300:900]]


def test_clone_and_pickle() -> None:
    X, y, labels = table()
    for model, target in ((RFMRegressor([Laplace(), Gaussian(2.0)], iterations=1), y), (KernelRidge(NTK(2)), y),
                          (RFMClassifier(iterations=1, keep="all"), labels)):
        twin = sklearn.base.clone(model)
        assert repr(twin) == repr(model)
        assert twin.get_params() == model.get_params()
        model.fit(X, target)
        again = pickle.loads(pickle.dumps(model))
        assert np.array_equal(again.predict(X), model.predict(X))
        assert np.array_equal(twin.fit(X, target).predict(X), model.predict(X))
        assert not hasattr(sklearn.base.clone(model), "feature_matrix_")


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.long)])
def test_pipelines_and_grids(jobs: int) -> None:
    """The best of a grid of kernels and ridges, also in two processes."""
    X, y, _ = table()
    pipe = sklearn.pipeline.make_pipeline(sklearn.preprocessing.StandardScaler(), RFMRegressor(iterations=1))
    grid = {"rfmregressor__kernel": [Laplace(3.0), Gaussian(0.01)], "rfmregressor__ridge": [0.1, 100.0]}
    found = sklearn.model_selection.GridSearchCV(pipe, grid, cv=3, n_jobs=jobs, error_score="raise").fit(X, y)
    assert found.best_params_ == {"rfmregressor__kernel": Laplace(3.0), "rfmregressor__ridge": 0.1}
    assert found.predict(X).shape == (60,)


def test_labels_are_given_back_as_they_came() -> None:
    X, _, labels = table()
    for names in (np.array(["low", "middle", "high"]), np.array([7, 3, 5]), np.array([2.0, 1.0, 4.0]),
                  np.array(["a", "b", "c"], dtype=object)):
        model = RFMClassifier(Laplace(4.0), ridge=0.1, iterations=1, keep="all").fit(X, names[labels])
        assert np.array_equal(model.classes_, np.unique(names))
        assert model.predict(X).dtype == names.dtype
        assert (model.predict(X) == names[labels]).mean() > 0.9
        assert all(set(p) <= set(names) for p in model.staged_predict(X))
    two = RFMClassifier(Laplace(4.0), ridge=0.1, iterations=0).fit(X, np.array([True, False])[labels % 2])
    assert two.predict(X).dtype == bool


@pytest.mark.parametrize("loss", ["squared", "logistic"])
@pytest.mark.parametrize("classes", [2, 3])
def test_probabilities(classes: int, loss: str) -> None:
    X, _, labels = table()
    labels = np.minimum(labels, classes - 1)
    model = RFMClassifier(Laplace(4.0), ridge=0.1, iterations=1, loss=loss).fit(X, labels)
    new = table(seed=5)[0]
    P, f = model.predict_proba(new), model.decision_function(new)
    assert P.shape == (60, classes)
    assert np.allclose(P.sum(1), 1, atol=1e-12)
    assert (P >= 0).all()
    assert np.array_equal(model.classes_[P.argmax(1)], model.predict(new))
    assert f.shape == ((60,) if classes == 2 else (60, 3))
    assert np.array_equal(model.predict(new), (f > 0) if classes == 2 else f.argmax(1))
    assert_close(P, oracles.probabilities(f, model.temperature_, model.doubt_, model.class_frequencies_), 1e-12)


@pytest.mark.parametrize("two", [False, True])
def test_probabilities_are_calibrated(digits: tuple[np.ndarray, ...], two: bool) -> None:
    """Nearer to the truth on new digits than with the outputs as they are, and within a tenth of the best temperature."""
    X, y, new, truth = digits
    y, truth = (y % 2, truth % 2) if two else (y, truth)
    model = RFMClassifier(Laplace(), iterations=1).fit(X, y)
    f = model.decision_function(new)
    Z = np.stack([-f, f], 1) if two else f

    def loss(T: float) -> float:
        return sklearn.metrics.log_loss(truth, scipy.special.softmax(T * Z, axis=1))

    found = sklearn.metrics.log_loss(truth, model.predict_proba(new))
    assert found < loss(1.0)
    assert found < 1.1 * min(loss(T) for T in np.geomspace(0.1, 100, 100))
    assert model.score(new, truth) > 0.9


def test_several_targets() -> None:
    """Without a choice to make, each is what it would be alone; a column of one target keeps its shape."""
    X, y, _ = table()
    Y = np.stack([y, y**2, X[:, 2]], 1)
    together = KernelRidge(Laplace(4.0), ridge=0.1).fit(X, Y).predict(X)
    for i in range(3):
        assert_close(together[:, i], KernelRidge(Laplace(4.0), ridge=0.1).fit(X, Y[:, i]).predict(X), 1e-10)
    model = RFMRegressor(iterations=1, keep="all").fit(X, Y)
    assert model.predict(X).shape == (60, 3)
    assert model.score(X, Y) > 0.7
    assert [p.shape for p in model.staged_predict(X)] == [(60, 3)] * len(model.history_)
    assert RFMRegressor(iterations=0).fit(X, Y[:, :1]).predict(X).shape == (60, 1)


def frame() -> tuple[pd.DataFrame, np.ndarray]:
    r = np.random.default_rng(0)
    n = 80
    data = pd.DataFrame({
        "size": r.standard_normal(n), "age": r.integers(20, 60, n), "city": r.choice(["Bonn", "Oslo", "Rome"], n),
        "grade": pd.Categorical(r.choice(["a", "b"], n)), "new": r.random(n) > 0.5})
    y = data["size"] + (data["city"] == "Oslo") * 2.0 - (data["grade"] == "a") * 1.0
    data.loc[3, "size"], data.loc[5, "city"], data.loc[7, "grade"] = np.nan, None, None
    return data, y.to_numpy()


def test_tables_with_words_and_gaps() -> None:
    data, y = frame()
    model = tabular(RFMRegressor(iterations=1)).fit(data, y)
    assert model.score(data, y) > 0.8
    other = data.copy()
    other.loc[0, "city"] = "Ulm"  # a word never seen
    other.loc[1, "size"] = np.nan
    assert np.isfinite(model.predict(other)).all()
    assert apart(model.predict(other)[:2], model.predict(data)[:2]) > 1e-3
    sorts = np.where(y > 1, "much", "little")
    assert tabular(RFMClassifier(iterations=1)).fit(data, sorts).score(data, sorts) > 0.9
    assert sklearn.base.clone(model).fit(data, y).predict(data) == pytest.approx(model.predict(data))
    names = model[:-1].get_feature_names_out()
    assert {"size", "age", "city_Bonn", "city_Oslo", "city_Rome"} <= set(names)
    assert len(model[-1].feature_importances_) == len(names)


@pytest.mark.parametrize("model", [
    RFMRegressor(Laplace(3.0), ridge=0.3, iterations=2), RFMRegressor(iterations=1), KernelRidge(),
    RFMRegressor(iterations=1, select=3), RFMRegressor(Laplace(3.0), "fact", 2, 0.3),
    RFMRegressor(Laplace(3.0), "agop_centred", 2, 0.3),
    RFMClassifier(Laplace(3.0), ridge=0.3, iterations=2), RFMClassifier(iterations=1),
    RFMClassifier(Laplace(3.0), ridge=0.3, iterations=1, loss="logistic")], **NAMED)
def test_a_weight_is_a_number_of_copies_and_none_is_removal(model: Any) -> None:
    X, y, labels = table(40)
    target = labels if isinstance(model, RFMClassifier) else y
    w = np.arange(40) % 4
    copies = np.repeat(np.arange(40), w)
    new = table(seed=5)[0]
    kept = w > 0

    def outputs(*fit: Any) -> np.ndarray:
        fitted = sklearn.base.clone(model).fit(*fit)
        return fitted.predict_proba(new) if isinstance(model, RFMClassifier) else fitted.predict(new)

    weighted = outputs(X, target, w)
    assert_close(weighted, outputs(X[copies], target[copies]), 1e-6)
    assert_close(weighted, outputs(X[kept], target[kept], w[kept]), 1e-6)
    assert apart(weighted, outputs(X, target)) > 1e-3


def global_state() -> tuple[Any, ...]:
    numbers: Any = np.random.get_state()[1]  # type: ignore[index]  # noqa: NPY002
    return (numbers.tolist(), torch.get_rng_state().tolist(), torch.is_grad_enabled(), torch.get_num_threads(),
            torch.get_default_dtype())


def test_fitting_again_gives_the_same_and_leaves_no_trace() -> None:
    X, y, labels = table()
    state = global_state()
    copies = X.copy(), y.copy()
    for make in (lambda: RFMRegressor(iterations=1).fit(X, y), lambda: RFMClassifier(iterations=1).fit(X, labels),
                 lambda: RFMClassifier(Laplace(3.0), iterations=1, loss="logistic", ridge=0.1).fit(X, labels),
                 lambda: KernelRidge(NTK(2)).fit(X, y), lambda: RFMRegressor(NTK(1), ridge=0.1, iterations=1).fit(X, y)):
        first = make()
        assert np.array_equal(first.predict(X), make().predict(X))
        assert np.array_equal(first.predict(X), sklearn.base.clone(first).fit(X, labels).fit(
            X, labels if isinstance(first, RFMClassifier) else y).predict(X))
        with torch.no_grad():
            assert np.array_equal(make().predict(X), first.predict(X))
    assert state == global_state()
    assert np.array_equal(X, copies[0])
    assert np.array_equal(y, copies[1])


@pytest.mark.parametrize("kernel", [Laplace(3.0), NTK(1)], **NAMED)
def test_fitting_without_gradients_of_torch(kernel: Kernel) -> None:
    X, y, _ = table()
    model = RFMRegressor(kernel, ridge=0.1, iterations=1).fit(X, y)
    with torch.inference_mode():
        assert np.array_equal(model.predict(X), RFMRegressor(kernel, ridge=0.1, iterations=1).fit(X, y).predict(X))


def test_the_default_type_of_torch_does_not_matter() -> None:
    X, y, _ = table()
    expected = RFMRegressor(iterations=1).fit(X, y).predict(X)
    try:
        torch.set_default_dtype(torch.float16)
        assert np.array_equal(RFMRegressor(iterations=1).fit(X, y).predict(X), expected)
    finally:
        torch.set_default_dtype(torch.float32)
