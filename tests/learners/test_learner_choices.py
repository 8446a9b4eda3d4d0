"""How bandwidth, ridge, kernel and iteration are chosen, and by which rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.special
import sklearn.datasets
import sklearn.metrics
import sklearn.model_selection
import torch

import oracles
from machines import BASE, NAMED, Largest, assert_close, losses, normal, table
from richter.core import SelectionError
from richter.learners import NTK, Gaussian, Kernel, KernelRidge, Laplace, RFMClassifier, RFMRegressor
from richter.learners.fit import FitRows
from richter.learners.problem import problem


@pytest.mark.parametrize("given", ["copies", "weights", "tiny weights"])
def test_copies_and_the_scale_of_weights_choose_the_same_model(given: str) -> None:
    """A copy that stays in the fit would flatter the smallest ridge."""
    X, y = sklearn.datasets.make_friedman1(200, noise=3, random_state=0)
    plain = KernelRidge().fit(X[:100], y[:100])
    if given == "copies":
        model = KernelRidge().fit(np.repeat(X[:100], 3, 0), np.repeat(y[:100], 3))
    else:
        model = KernelRidge().fit(X[:100], y[:100], np.full(100, 3.0 if given == "weights" else 1e-6))
    assert model.loss_ == pytest.approx(plain.loss_, rel=1e-6)
    assert_close(torch.from_numpy(model.predict(X[100:])), torch.from_numpy(plain.predict(X[100:])), 1e-6)


@pytest.mark.parametrize("kernel", [Gaussian(), Laplace()], **NAMED)
@pytest.mark.parametrize("n", [400, 1300])
def test_a_bandwidth_far_from_the_rule_of_thumb_is_found(kernel: Kernel, n: int) -> None:
    draw = np.random.default_rng(0)
    X = draw.uniform(-3, 3, (n + 500, 2))
    y = np.sin(3 * X[:, 0]) * np.sin(3 * X[:, 1]) > 0
    assert RFMClassifier(kernel, iterations=0).fit(X[:n], y[:n]).score(X[n:], y[n:]) > 0.8


def test_what_is_chosen_does_not_depend_on_the_order_of_the_rows_to_choose_by() -> None:
    X, y = sklearn.datasets.make_classification(1800, 8, n_informative=4, flip_y=0.05, random_state=1)
    model = RFMClassifier(Gaussian(), iterations=1)
    losses = []
    for order in (np.arange(1000), np.argsort(y[800:], kind="stable")):
        losses.append(model.fit(X[:800], y[:800], validation=(X[800:][order], y[800:][order])).loss_)
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


@pytest.mark.parametrize(("kernel", "select"), [(Laplace(3.0), 5), (Laplace(3.0), 20), (NTK(3), 3), (NTK(1), 10)], **NAMED)
def test_memory_bounds_folds_and_kernels_of_several_arrays(kernel: Kernel, select: int) -> None:
    X, y, w, bound = normal(600, 5).numpy(), normal(600, 1, seed=1).numpy(), np.ones(600), 12 * 2 ** 20
    whole, random = problem(X, y, w, np.random.RandomState(0)), np.random.RandomState(0)
    views = FitRows(X, y, w, folds=select).views(whole, [kernel], bound, random)
    for view in views:
        view.geometry(kernel), list(view.others(kernel))
    held = sum(g.untyped_storage().nbytes() for view in views for g in view._known.values())
    system = 8 * len(views[0].data) ** 2
    assert bound / 3 < held + 2 * system <= bound  # a kernel and its factor are needed besides


def test_many_rows_to_choose_by_are_judged_in_parts() -> None:
    X, y = normal(4000, 4).numpy(), normal(4000, 1)[:, 0].numpy()
    model = RFMRegressor(iterations=1)
    with Largest() as held:
        whole = model.fit(X[:100], y[:100], validation=(X[100:], y[100:]))
    assert held.most < 3900 * 100 * 8
    f = whole.predict(X[100:])
    assert whole.loss_ == pytest.approx(1 - sklearn.metrics.r2_score(y[100:], f), rel=1e-9)


def test_choosing_by_groups_says_how() -> None:
    X, y = normal(40, 3).numpy(), normal(40, 1)[:, 0].numpy()
    with pytest.raises(SelectionError, match=r"select=GroupKFold.*needs groups.*select=list\(cv.split\(X, y, groups\)\)"):
        RFMRegressor(select=sklearn.model_selection.GroupKFold(4)).fit(X, y)
    RFMRegressor(iterations=1, select=list(sklearn.model_selection.GroupKFold(4).split(X, y, np.arange(40) // 5))).fit(X, y)


def test_a_set_to_choose_by_makes_select_irrelevant() -> None:
    X, y = sklearn.datasets.make_classification(80, 4, random_state=0)
    model = RFMClassifier(Laplace(3.0), iterations=0, loss="logistic", select="loo")
    model.fit(X[:40], y[:40], validation=(X[40:], y[40:, None]))
    assert model.score(X, y) > 0.6


def test_stages_that_were_not_kept_are_not_promised() -> None:
    X, y = sklearn.datasets.make_friedman1(60, random_state=0)
    model = RFMRegressor(iterations=2, early_stopping=False, ridge=0.1).fit(X, y).set_params(keep="all")
    with pytest.raises(SelectionError, match='only the best iteration was kept: fit with keep="all"'):
        list(model.staged_predict(X))


def test_what_was_chosen_is_written_down() -> None:
    X, y, _ = table()
    model = RFMRegressor([Laplace(), Gaussian()], iterations=2, early_stopping=False).fit(X, y)
    assert [h["iteration"] for h in model.history_] == [0, 1, 2]
    assert model.kernel_ == model.history_[model.best_iteration_]["kernel"]
    assert model.ridge_ == model.history_[model.best_iteration_]["ridge"]
    assert isinstance(model.kernel_, Laplace | Gaussian)
    assert model.kernel_.bandwidth
    assert model.best_iteration_ == int(np.argmin(losses(model)))
    assert model.loss_ == min(losses(model))


def test_leave_one_out_of_the_learner_by_fitting_again() -> None:
    """The loss in the history is 1 - R^2 of predictions for rows that were left out."""
    X, y, _ = table(25)
    model = RFMRegressor(Laplace(3.0), ridge=0.3, iterations=0, select="loo").fit(X, y)
    f = [KernelRidge(Laplace(3.0), ridge=0.3).fit(np.delete(X, i, 0), np.delete(y, i)).predict(X[[i]])[0] for i in range(25)]
    assert model.history_[0]["loss"] == pytest.approx(1 - sklearn.metrics.r2_score(y, f), rel=1e-8)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_loss_and_the_calibration_of_a_classifier_by_fitting_again(classes: int) -> None:
    """The least mean log loss of softmax(T f) over T, where f are outputs for rows that were left out."""
    X, y, _ = table(25)
    labels = np.digitize(y, [0] if classes == 2 else [-0.5, 0.5])
    Y = np.where(labels, 1.0, -1.0)[:, None] if classes == 2 else np.eye(3)[labels]
    model = RFMClassifier(Laplace(3.0), ridge=0.3, iterations=0, select="loo").fit(X, labels)
    f = np.concatenate([KernelRidge(Laplace(3.0), ridge=0.3).fit(np.delete(X, i, 0), np.delete(Y, i, 0)).predict(X[[i]])
                        for i in range(25)])
    Z = np.concatenate([-f, f], 1) if classes == 2 else f
    best = scipy.optimize.minimize_scalar(lambda T: sklearn.metrics.log_loss(labels, scipy.special.softmax(T * Z, axis=1)),
                                          bounds=(0.01, 100), method="bounded", options={"xatol": 1e-9})
    assert losses(model)[0] == pytest.approx(best.fun, rel=1e-7)
    T, doubt = oracles.calibration(f[:, 0] if classes == 2 else f, labels)
    assert model.temperature_ == pytest.approx(T, rel=1e-3)
    assert model.doubt_ == pytest.approx(doubt, rel=1e-3)


def test_a_validation_set_is_what_is_chosen_by() -> None:
    X, y, _ = table()
    new, truth, _ = table(seed=3)
    model = RFMRegressor(**BASE).fit(X, y, validation=(new, truth))
    for h, p in zip(model.history_, model.staged_predict(new), strict=True):
        assert h["loss"] == pytest.approx(1 - sklearn.metrics.r2_score(truth, p), rel=1e-8)
    assert model.best_iteration_ == int(np.argmin(losses(model)))


def test_the_better_of_several_kernels_and_metrics_is_taken() -> None:
    X, y, _ = table()
    model = RFMRegressor(**BASE | {"kernel": [Gaussian(0.01), Laplace(3.0)]}).fit(X, y)
    assert model.kernel_ == Laplace(3.0)
    assert_close(model.predict(X), RFMRegressor(**BASE).fit(X, y).predict(X), 1e-9)
    each = {diagonal: RFMRegressor(**BASE | {"diagonal": diagonal}).fit(X, y) for diagonal in (False, True, None)}
    least = {diagonal: min(losses(m)) for diagonal, m in each.items()}
    assert least[None] == pytest.approx(min(least[False], least[True]), rel=1e-9)
    assert_close(each[None].predict(X), each[least[True] < least[False]].predict(X), 1e-9)


def test_select_chooses_how_to_judge() -> None:
    X, y, _ = table()
    ways: list[Any] = ["loo", 2, 5, sklearn.model_selection.ShuffleSplit(3, random_state=0)]
    assert len({losses(KernelRidge(Laplace(3.0), ridge=0.1, select=by).fit(X, y))[0] for by in ways}) == 4
    folds = sklearn.model_selection.KFold(4, shuffle=True, random_state=1)
    f = sklearn.model_selection.cross_val_predict(KernelRidge(Laplace(3.0), ridge=0.1), X, y, cv=folds)
    model = KernelRidge(Laplace(3.0), ridge=0.1, select=folds).fit(X, y)
    assert model.history_[0]["loss"] == pytest.approx(1 - sklearn.metrics.r2_score(y, f), rel=1e-8)


def test_the_last_iteration_if_asked_for() -> None:
    X, y, _ = table()
    found = {by: RFMRegressor(**BASE | {"iterations": 4}, power=2.0, select=by).fit(X, y) for by in ("loo", "last")}
    assert losses(found["last"]) == losses(found["loo"])
    assert found["last"].best_iteration_ == 4 != int(np.argmin(losses(found["last"])))
    assert np.array_equal(found["last"].predict(X), list(found["loo"].staged_predict(X))[-1])


def test_early_stopping_stops() -> None:
    X, _, _ = table()
    noise = np.random.default_rng(3).standard_normal(60)
    models = [RFMRegressor(Laplace(3.0), ridge=1.0, iterations=9, early_stopping=early).fit(X, noise) for early in (True, False)]
    lengths = [len(model.history_) for model in models]
    assert lengths[1] == 10
    assert lengths[0] < 10


def test_keep_keeps() -> None:
    X, y, _ = table()
    models = {keep: RFMRegressor(**BASE | {"keep": keep}).fit(X, y) for keep in ("best", "all")}
    assert len(models["best"].stages_) == 1
    assert len(models["all"].stages_) == 3
    assert np.array_equal(models["best"].predict(X), models["all"].predict(X))
