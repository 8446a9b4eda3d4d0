"""Flows against their closed forms, for every kind of state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from richter.core import SelectionError
from richter.theory.flows import FlowError, descend, flow, follow

TIMES = [0.0, 0.5, 2.0, 2.0, 7.0]


def test_decay_and_oscillation() -> None:
    for t, y in zip(TIMES, flow(lambda y: -y, np.array([1.0, 3.0]), TIMES), strict=True):
        np.testing.assert_allclose(y, [math.exp(-t), 3 * math.exp(-t)], rtol=1e-9)
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    for t, z in zip(TIMES, flow(lambda z: turn @ z, torch.tensor([1.0, 0.0], dtype=torch.float64), TIMES), strict=True):
        np.testing.assert_allclose(z.numpy(), [math.cos(t), math.sin(t)], atol=1e-9)


def test_backward_is_the_inverse() -> None:
    def velocity(y: np.ndarray) -> np.ndarray:
        return np.sin(y) - y**3
    start = np.array([0.3, -1.2, 0.9])
    (end,) = flow(velocity, start, [0.7])
    np.testing.assert_allclose(flow(velocity, end, [-0.2, -0.7])[1], start, rtol=1e-8)


def test_gradient_flow_of_a_linear_model() -> None:
    """The residual of |X w - y|^2 / 2 decays as exp(-X X^T t)."""
    draw = torch.Generator().manual_seed(0)
    X, y = (torch.randn(s, generator=draw, dtype=torch.float64) for s in ((4, 6), (4,)))
    w = torch.zeros(6, dtype=torch.float64)
    for t, now in zip((0.1, 1.0), flow(lambda w: -X.T @ (X @ w - y), w, [0.1, 1.0]), strict=True):
        torch.testing.assert_close(X @ now - y, -torch.matrix_exp(-X @ X.T * t) @ y, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("start", [
    np.ones((2, 3)), np.ones(2, dtype=np.float32), torch.ones(2, 3), torch.ones(2, dtype=torch.float64),
    [torch.ones(2, 3), torch.ones(4, dtype=torch.float64)], [np.ones((1, 2)), np.ones(3)]])
def test_what_goes_in_comes_out(start: Any) -> None:
    seen: list[Any] = []

    def velocity(y: Any) -> Any:
        seen.append(y)
        return [-part for part in y] if isinstance(y, list) else -y

    for state in (*flow(velocity, start, [0.0]), *flow(velocity, start, [0.0, 0.3]), seen[0]):
        assert type(state) is type(start)
        for a, b in zip(*((s if isinstance(s, list) else [s]) for s in (state, start)), strict=True):
            assert type(a) is type(b)
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
    end = flow(velocity, start, [0.3])[0]
    for part in end if isinstance(end, list) else [end]:
        np.testing.assert_allclose(np.asarray(part), math.exp(-0.3), rtol=1e-6)
    for part in start if isinstance(start, list) else [start]:
        assert bool((part == 1).all())  # the start is left alone


@pytest.mark.parametrize(("tight", "loose"), [({}, {"rtol": 1e-3}), ({}, {"atol": 1.0})])
def test_tolerances_do_something(tight: dict[str, float], loose: dict[str, float]) -> None:
    """Of y' = cos(y + 20 s), s' = 1, from y = 0."""
    def error(**options: float) -> tuple[float, int]:
        calls = 0

        def velocity(y: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return torch.stack([torch.cos(y[0] + 20 * y[1]), torch.ones_like(y[1])])
        y = flow(velocity, torch.zeros(2, dtype=torch.float64), [3.0], **options)[0]
        exact = flow(velocity, torch.zeros(2, dtype=torch.float64), [3.0], rtol=1e-13, atol=1e-15)[0]
        return abs(float(y[0] - exact[0])), calls
    few, many = error(**loose), error(**tight)
    assert many[0] < 1e-9
    assert few[0] > 100 * many[0]


@pytest.mark.parametrize(("velocity", "times", "message"), [
    (lambda y: y * y, [2.0], r"cannot be followed.*earlier times"),  # infinite at t = 1
    (lambda y: y / 0 * 0, [1.0], r"NaN or Inf near t = 0"),
])
def test_flows_that_end_early_are_refused(velocity: Callable[[Any], Any], times: list[float], message: str) -> None:
    with np.errstate(all="ignore"), pytest.raises(FlowError, match=message):
        flow(velocity, np.array([1.0]), times)


@pytest.mark.parametrize(("times", "options", "message"), [
    ([1.0, 0.5], {}, "one way from 0"), ([-1.0, 1.0], {}, "one way from 0"), ([], {}, "one way from 0"),
    ([math.inf], {}, "finite times"), ([1.0], {"rtol": 0.0}, "rtol=0.0"), ([1.0], {"atol": math.nan}, "atol=nan"),
])
def test_bad_settings(times: list[float], options: dict[str, float], message: str) -> None:
    with pytest.raises(SelectionError, match=message):
        flow(lambda y: y, np.array([1.0]), times, **options)


def test_a_velocity_of_another_shape() -> None:
    with pytest.raises(SelectionError, match="3 numbers and the state 1"):
        flow(lambda y: np.ones(3), np.ones(1), [1.0])


# ------------------------------------------------------------------------------------------------ descent


def test_descent_is_the_steps_that_it_says() -> None:
    """y <- y + lr velocity(y), kept after round(t / lr) of them, in any order of times; lists of arrays and tensors too."""
    states = descend(lambda y: -2 * y, np.array([1.0, 3.0]), [0.3, 0.0, 0.1, 0.12], lr=0.1)
    for steps, y in zip((3, 0, 1, 1), states, strict=True):
        np.testing.assert_allclose(y, 0.8**steps * np.array([1.0, 3.0]), rtol=1e-14)
    a, b = descend(lambda s: [-s[0], s[1]], [torch.ones(2), np.ones(1)], [1.0], lr=0.5)[0]
    np.testing.assert_allclose(a, 0.25 * torch.ones(2))
    np.testing.assert_allclose(b, [2.25])
    with pytest.raises(FlowError, match=r"left the finite numbers in step \d+: lr=1 is too large"):
        descend(lambda y: y**3, np.array([2.0]), [100.0], lr=1.0)
    with pytest.raises(SelectionError, match="lr=0: the length of a step, above 0"):
        descend(lambda y: y, np.array([1.0]), [1.0], lr=0)
    with pytest.raises(SelectionError, match="finite times from 0 on"):
        descend(lambda y: y, np.array([1.0]), [-1.0], lr=0.1)


def test_following_is_one_of_the_two() -> None:
    start = np.array([1.0])
    np.testing.assert_allclose(follow(lambda y: -y, start, [1.0])[0], np.exp(-1.0), rtol=1e-11)
    np.testing.assert_allclose(follow(lambda y: -y, start, [1.0], "descent", 0.5)[0], [0.25])
    with pytest.raises(SelectionError, match="descent takes steps of lr"):
        follow(lambda y: -y, start, [1.0], "descent")
