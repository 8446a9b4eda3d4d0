"""Every parameter of a learner does something."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

import oracles
from machines import BASE, apart, assert_close, losses, table
from richter.learners import Gaussian, KernelRidge, Laplace, RFMClassifier, RFMRegressor
from richter.learners.features import FEATURES
from richter.learners.problem import FitProblem, problem
from richter.learners.solvers import solve_blocks

KNOBS: dict[str, Any] = {
    "kernel": Gaussian(3.0), "features": "fact", "iterations": 1, "ridge": 1.0, "power": 0.3, "diagonal": True,
    "normalise": False, "scale": True, "intercept": True}


def last(model: Any, X: np.ndarray) -> np.ndarray:
    """Outputs of the last iteration."""
    return model._outputs(X, len(model.stages_) - 1)


@pytest.mark.parametrize("knob", [*KNOBS, "loss"])
@pytest.mark.parametrize("learner", [RFMRegressor, RFMClassifier])
def test_a_knob_does_something(learner: Any, knob: str) -> None:
    if knob == "loss" and learner is RFMRegressor:
        assert "loss" not in RFMRegressor().get_params()
        return
    X, y, labels = table()
    target = labels if learner is RFMClassifier else y
    new = table(seed=5)[0]
    before = learner(**BASE).fit(X, target)
    after = learner(**BASE | {knob: "logistic" if knob == "loss" else KNOBS[knob]}).fit(X, target)
    assert apart(last(after, new), last(before, new)) > 1e-3


@pytest.mark.parametrize("features", FEATURES)
def test_every_rule_for_features_is_another(features: str) -> None:
    X, y, _ = table()
    found: dict[str, Any] = {rule: last(RFMRegressor(**BASE | {"features": rule}).fit(X, y), X) for rule in FEATURES}
    assert all(apart(found[features], found[rule]) > 1e-3 for rule in FEATURES if rule != features)


@pytest.mark.parametrize("knob", ["kernel", "ridge", "scale", "intercept"])
def test_a_knob_of_kernel_ridge_does_something(knob: str) -> None:
    X, y, _ = table()
    base: dict[str, Any] = {"kernel": Laplace(3.0), "ridge": 0.1}
    before = KernelRidge(**base).fit(X, y).predict(X)
    assert apart(KernelRidge(**base | {knob: KNOBS[knob]}).fit(X, y).predict(X), before) > 1e-3


def test_standardising_and_the_constant_are_on_when_the_ridge_is_chosen() -> None:
    X, y, _ = table()
    chosen = KernelRidge().fit(X, y)
    same = KernelRidge(chosen.kernel_, chosen.ridge_, scale=True, intercept=True).fit(X, y)
    assert_close(chosen.predict(X), same.predict(X), 1e-9)
    Z = (X - X.mean(0)) / X.std(0)
    K = chosen.kernel_(Z)
    A, b = oracles.kernel_ridge(torch.from_numpy(K), torch.from_numpy(y)[:, None], chosen.ridge_, intercept=True)
    assert_close(chosen.predict(X), (K @ A.numpy() + b.numpy())[:, 0], 1e-8)


@pytest.mark.parametrize("learner", [RFMRegressor, RFMClassifier])
def test_little_memory_takes_the_other_route(learner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conjugate gradients on all rows, to nearly the same function."""
    X, y, labels = table(400)
    target = labels if learner is RFMClassifier else y
    taken: list[int] = []

    def spy(*args: Any, **options: Any) -> Any:
        taken.append(1)
        return solve_blocks(*args, **options)

    monkeypatch.setattr("richter.learners.fit.solve_blocks", spy)
    options = {"kernel": Laplace(5.0), "ridge": 1.0, "iterations": 1}
    enough = learner(**options).fit(X, target)
    assert not taken
    little = learner(**options, memory="2MiB").fit(X, target)
    assert taken
    new = table(seed=5)[0]
    assert little.best_iteration_ == enough.best_iteration_
    assert_close(little._outputs(new), enough._outputs(new), 1e-2)


def test_random_state_draws_the_rows_that_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y, _ = table()
    monkeypatch.setattr("richter.learners.fit.JUDGED", 10)
    models = [KernelRidge(Laplace(3.0), ridge=0.1, select="loo", random_state=seed).fit(X, y) for seed in (0, 0, 1)]
    found = [losses(m)[0] for m in models]
    assert found[0] == found[1] != found[2]
    assert_close(models[0].predict(X), models[2].predict(X), 1e-10)


def test_device_is_where_it_computes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    X, y, _ = table()
    seen: list[Any] = []

    def spy(*args: Any, **options: Any) -> FitProblem:
        found = problem(*args, **options)
        seen.append(found.x.device)
        return found

    monkeypatch.setattr("richter.learners.fit.problem", spy)
    model = RFMRegressor(**BASE, device=device).fit(X, y)
    assert {d.type for d in seen} == {device}
    assert_close(model.predict(X), RFMRegressor(**BASE).fit(X, y).predict(X), 1e-6)
    with pytest.raises(RuntimeError, match="device"):
        RFMRegressor(**BASE, device="gpu").fit(X, y)


def test_every_parameter_has_its_test() -> None:
    tested = {*KNOBS, "loss", "select", "early_stopping", "keep", "memory", "device", "random_state"}
    assert set(RFMClassifier().get_params()) == tested
    assert set(RFMRegressor().get_params()) == tested - {"loss"}
    assert set(KernelRidge().get_params()) == {
        "kernel", "ridge", "scale", "intercept", "select", "memory", "device", "random_state"}
    assert list(inspect.signature(RFMRegressor.fit).parameters) == ["self", "X", "y", "sample_weight", "validation"]
