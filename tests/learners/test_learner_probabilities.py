"""Probabilities of the classifier on rows that it has not seen: calibrated by rows that neither fit nor metric has seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sklearn.datasets
import sklearn.metrics
import sklearn.model_selection
import torch

from machines import NAMED, apart, assert_close, normal, table
from richter.learners import Gaussian, Laplace, RFMClassifier
from richter.learners.calibration import calibrate, levelled, probabilities


def noisy(n: int, classes: int = 2, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Labels of which the first of 20 columns tells a little."""
    X = normal(n, 20, seed=seed).numpy()
    return X, np.digitize(X[:, 0] + 2 * normal(n, seed=seed + 100).numpy(), [0.0] if classes == 2 else [-1.5, 1.5])


def losses(model: Any, X: np.ndarray, y: np.ndarray, new: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """Log loss of the model's probabilities and of the class frequencies on new rows."""
    P = np.tile(np.bincount(y) / len(y), (len(new), 1))
    return sklearn.metrics.log_loss(truth, model.fit(X, y).predict_proba(new)), sklearn.metrics.log_loss(truth, P)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("select", ["auto", "loo", "last"])
def test_a_metric_that_has_seen_the_labels_does_not_make_probabilities_sure(select: str, classes: int) -> None:
    """Leaving a row out of the fit alone, its label still shaped the metric: outputs look far better than those for new rows."""
    X, y = noisy(120, classes)
    model, base = losses(RFMClassifier(select=select), X, y, *noisy(1000, classes, seed=1))
    assert model < 1.02 * base


@pytest.mark.parametrize("name", ["load_breast_cancer", "load_wine", "load_iris"])
@pytest.mark.parametrize("select", ["auto", "last"])
def test_never_worse_than_class_frequencies(name: str, select: str) -> None:
    X, y = getattr(sklearn.datasets, name)(return_X_y=True)
    for seed, size in enumerate((20, 40, 80)):
        fit, rest = sklearn.model_selection.train_test_split(np.arange(len(y)), train_size=size, stratify=y, random_state=seed)
        model, base = losses(RFMClassifier(select=select, iterations=2), X[fit], y[fit], X[rest], y[rest])
        assert model < 0.5 * base


def test_no_number_of_right_rows_makes_a_probability_certain() -> None:
    """Two clouds far apart are told apart without an error; that the next row is so too, n rows show to about 1 in n."""
    X = np.concatenate([normal(30, 2).numpy() - 20, normal(30, 2, seed=1).numpy() + 20])
    y = np.repeat([0, 1], 30)
    model = RFMClassifier(Gaussian(), iterations=1).fit(X, y)
    P = model.predict_proba(X)
    assert (P.argmax(1) == y).all()
    assert 0.5 / 61 * 0.9 < P.min() < 0.1
    assert model.temperature_ < 100


def test_outputs_that_say_nothing_leave_the_frequencies() -> None:
    f = torch.from_numpy(np.random.default_rng(0).standard_normal((4000, 3)))
    y = torch.eye(3, dtype=torch.float64)[torch.from_numpy(np.random.default_rng(1).choice(3, 4000, p=[0.7, 0.2, 0.1]))]
    q = y.mean(0)
    T, doubt = calibrate(f, y, torch.ones(4000, dtype=torch.float64), q)
    P = probabilities(f, T, doubt, q)
    assert doubt > 0.95
    assert_close(P[f.argmax(1) == 0], q.expand(int((f.argmax(1) == 0).sum()), 3), 5e-2)
    assert torch.equal(P.argmax(1), f.argmax(1))


def test_frequencies_are_levelled_for_the_predicted_class() -> None:
    q = torch.tensor([0.5, 0.3, 0.2])
    assert_close(levelled(q, torch.tensor([0, 1, 2])), torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2], [1 / 3] * 3]), 1e-6)


@pytest.mark.parametrize("model", [RFMClassifier(Laplace(3.0), ridge=0.3, iterations=1, select="last"),
                                   RFMClassifier(Laplace(3.0), ridge=0.3, iterations=1)], **NAMED)
def test_weights_without_a_unit_count_the_same_in_every_unit(model: Any) -> None:
    X, _, labels = table(40)
    w = 0.5 + np.random.default_rng(0).random(40)
    new = table(seed=5)[0]
    first, *others = (model.set_params(ridge=0.3 * unit).fit(X, labels, unit * w).predict_proba(new) for unit in (1.0, 1e-3, 4.0))
    for P in others:
        assert_close(P, first, 1e-5)
    copies = np.repeat(np.arange(40), np.arange(40) % 3 + 1)
    model.set_params(ridge=0.3)
    counted = model.fit(X, labels, np.arange(40) % 3 + 1).predict_proba(new)
    assert_close(counted, model.fit(X[copies], labels[copies]).predict_proba(new), 1e-5)


def test_groups_are_not_mixed_to_calibrate() -> None:
    """Each group has one label: by rows alone the group is recognised, by groups there is nothing to know."""
    r = np.random.default_rng(0)
    centres, kinds = 3 * r.standard_normal((40, 5)), r.integers(0, 2, 40)
    group = np.repeat(np.arange(40), 10)
    X, y = centres[group] + 0.1 * r.standard_normal((400, 5)), kinds[group]
    split = list(sklearn.model_selection.GroupKFold(5).split(X, y, group))
    new, truth = 3 * r.standard_normal((2000, 5)), r.integers(0, 2, 2000)
    rows, groups = (sklearn.metrics.log_loss(truth, RFMClassifier(select=by).fit(X, y).predict_proba(new)) for by in (5, split))
    assert groups < 0.75 < rows


@pytest.mark.parametrize("select", ["loo", "last"])
def test_calibrating_again_does_not_change_what_is_predicted(select: str) -> None:
    """The outputs are those of the chosen iteration on all rows; folds are for probabilities alone."""
    X, y = noisy(100)
    model = RFMClassifier(Laplace(), iterations=2, select=select, keep="all").fit(X, y)
    staged = list(model.staged_predict(X))[model.best_iteration_]
    assert np.array_equal(staged, model.predict(X))
    assert np.array_equal(model.classes_[model.predict_proba(X).argmax(1)], model.predict(X))
    assert apart(model.predict_proba(X), np.tile(model.class_frequencies_, (100, 1))) > 1e-3
