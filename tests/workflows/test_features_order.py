"""The order of features on a user's data: what is predicted, what training shows, the table and the picture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import richter
from richter.core import SelectionError
from richter.experiments.agf import staircases

rng = np.random.default_rng(0)
X = np.linalg.qr(rng.standard_normal((60, 3)))[0] * np.sqrt(60)
Y = X[:, :2] * np.array([2.0, 1.0])


def test_two_features_come_in_the_order_of_their_strengths(tmp_path: Any) -> None:
    """A linear network on white inputs: 1 / strength, and levels of what is left."""
    seen = richter.workflows.features_order(X, Y, activation="linear", neurons=5, alpha=1e-9, jumps=2, lr=0.05,
                                            names=("a", "b", "c"))
    np.testing.assert_allclose(seen.learned.staircase.levels, [2.5, 0.5, 0.0], atol=1e-6)
    np.testing.assert_allclose(seen.learned.staircase.times / -np.log(1e-9), [0.5, 1.0], rtol=0.1)
    np.testing.assert_allclose(seen.seen, seen.learned.staircase.times, rtol=0.1)
    assert [int(np.abs(w).argmax()) for w in seen.features] == [0, 1]
    lines = str(seen).splitlines()
    assert lines[0].split() == ["feature", "predicted", "trained", "loss", "made", "of"]
    assert " a" in lines[1].split("to")[1][:20]
    assert len(lines) == 3
    figure = seen.plot()
    assert "becomes active" in figure.texts[0].get_text()
    figure.savefig(tmp_path / "order.png")


def test_settings_change_what_comes_out() -> None:
    usual: dict[str, Any] = {"activation": "linear", "neurons": 2, "jumps": 1, "lr": 0.05}
    first = richter.workflows.features_order(X, Y[:, 0], **usual)
    for change in ({"alpha": 1e-3}, {"seed": 1}, {"neurons": 3}, {"activation": "relu"}):
        other = richter.workflows.features_order(X, Y[:, 0], **(usual | change))
        assert float(other.learned.staircase.times[0]) != float(first.learned.staircase.times[0]), change
    finer = richter.workflows.features_order(X, Y[:, 0], **(usual | {"lr": 0.1}))
    assert finer.loss[-1] != first.loss[-1]


def test_squares_start_larger_because_their_times_go_like_one_over_alpha() -> None:
    seen = richter.workflows.features_order(X, X[:, :1]**2, activation="square", jumps=1, neurons=3)
    assert np.isfinite(seen.seen).all()
    with pytest.raises(SelectionError, match=r"is predicted at .*: training at lr=0.01 needs .* steps to reach it, and 1e\+06"):
        richter.workflows.features_order(X, X[:, :1]**2, activation="square", jumps=1, neurons=3, alpha=1e-6)


def test_names_are_any_list() -> None:
    seen = richter.workflows.features_order(X, Y, activation="linear", jumps=1, lr=0.1, names=np.array(["a", "b", "c"]))
    assert seen.names == ("a", "b", "c")


@pytest.mark.parametrize(("change", "sentence"), [
    ({"x": X[:, 0]}, r"x has shape \(60,\) and y"), ({"y": Y[:10]}, r"give \[n, d\] and \[n\] or \[n, c\]"),
    ({"names": ("a",)}, "1 names for 3 inputs"), ({"alpha": 2.0}, "alpha=2.0: give the initial norm of neurons"),
    ({"names": 3}, "3 names for 3 inputs: give one for each, as a list"), ({"names": "abc"}, "'abc' names for 3 inputs"),
    ({"seed": -1}, "seed=-1; a whole number, at least 0"), ({"neurons": 1.5}, "neurons=1.5; a whole number"),
    ({"neurons": 0}, "neurons=0; a whole number"), ({"jumps": 0}, "jumps=0; a whole number"),
    ({"lr": 5.0}, "at lr=5 training takes .* steps until then, which are too long to follow the flow. Take lr="),
    ({"lr": 0}, "lr=0: a number above 0"), ({"lr": float("nan")}, "lr=nan: a number above 0"),
    ({"alpha": "a"}, "alpha='a': a number above 0"),
    ({"y": 3.0}, r"y \(\): give \[n, d\] and"), ({"activation": "tanh"}, "tanh"),
    ({"y": 0 * Y}, "y is zero: nothing is to be learned")])
def test_what_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        richter.workflows.features_order(**{"x": X, "y": Y, **change})


def test_class_ids_become_one_hot_targets() -> None:
    """Classes are no numbers: renaming them changes nothing, and the answer is that of centred one-hot targets."""
    ids = np.array([0, 2, 1])[(X[:, 0] > 0.5).astype(int) + (X[:, 0] < -0.5)]
    usual = {"activation": "linear", "neurons": 5, "alpha": 1e-6, "jumps": 1, "lr": 0.05}
    hot = np.eye(3)[ids] - np.eye(3)[ids].mean(0)
    seen, same = (richter.workflows.features_order(X, y, **usual) for y in (ids, hot))  # type: ignore[arg-type]
    np.testing.assert_allclose(seen.loss, same.loss, rtol=1e-10)
    assert str(seen).splitlines()[-1] == "y holds class ids: the targets are one-hot vectors of 3 classes, centred."
    assert "class ids" not in str(same)
    renamed = richter.workflows.features_order(X, np.array([1, 2, 0])[ids], **usual)  # type: ignore[arg-type]
    np.testing.assert_allclose(renamed.learned.staircase.levels, seen.learned.staircase.levels, rtol=1e-8)
    numbers = richter.workflows.features_order(X, ids.astype(float), **usual)  # type: ignore[arg-type]
    assert abs(numbers.loss[0] - seen.loss[0]) > 0.1


@pytest.mark.parametrize(("ids", "words"), [
    (np.where(X[:, 0] > 0, 1, -1), "integers from -1 to 1, which are no class ids of 60 examples.* give floats"),
    (np.arange(60), "integers from 0 to 59, which are no class ids"), (np.zeros(60, int), "integers from 0 to 0, which are no")])
def test_integers_that_are_no_class_ids_are_refused(ids: np.ndarray, words: str) -> None:
    with pytest.raises(SelectionError, match=words):
        richter.workflows.features_order(X, ids)


# ------------------------------------------------------------------------------------------------ what experiments read off


def test_crossings_and_plateaus() -> None:
    t = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    loss = np.array([4.0, 4.0, 2.0, 2.0, 0.0, 0.0])
    np.testing.assert_allclose(staircases.crossings(t, loss, [4.0, 2.0, 0.0]), [1.5, 3.5])
    np.testing.assert_allclose(staircases.plateaus(t, loss, [1.5, 3.5]), [2.0, 0.0])
    assert np.isnan(staircases.crossings(t, loss + 1.5, [2.0, 0.0])).all()
    np.testing.assert_allclose(staircases.even_times([1.0, 2.0, 9.0]), [1, 5, 9])


@pytest.mark.parametrize("phi", ["relu", "square"])
def test_short_steps_of_descent_are_those_of_the_theory(phi: Any) -> None:
    from richter.theory import alternating
    theta = 0.3 * rng.standard_normal((4, 5))
    losses, kept = staircases.descend(phi, theta, X, Y, 0.01, 50, 25)
    np.testing.assert_allclose(losses, alternating.simulate(phi, theta, X, Y, [0.0, 0.25, 0.5], lr=0.01), rtol=1e-10)
    assert kept[-1].shape == theta.shape
