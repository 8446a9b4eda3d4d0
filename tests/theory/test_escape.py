"""Escape from the origin: against finite differences, scans and the numbers of the worked example."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from richter.core import SelectionError
from richter.theory import escape
from richter.theory.flows import FlowError

ANGLES = np.arange(8) * np.pi / 4
CIRCLE, SIGNS = np.stack([np.cos(ANGLES), np.sin(ANGLES)], 1), np.tile([-1.0, 1.0], 4)[:, None]


def rank_two() -> list[np.ndarray]:
    """relu((|u.x| - |v.x|) / 4), u and v along the diagonals."""
    u, v = np.array([1.0, 1.0]) / math.sqrt(2), np.array([-1.0, 1.0]) / math.sqrt(2)
    return [np.stack([u, -u, v, -v]) / 2, np.array([[1.0, 1.0, -1.0, -1.0]]) / 2, np.ones((1, 1))]


DIRECTION = escape.Direction([np.eye(2), np.ones((1, 2))], 1.0, 0.0, np.ones(1))
BIASED = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))


def slow_potential(weights: list[Any], X: Any, G: Any) -> float:
    """sum_n G_n . f(x_n), example by example, unit by unit."""
    total = 0.0
    for x, g in zip(np.asarray(X), np.asarray(G), strict=True):
        h = x
        for i, W in enumerate(weights):
            h = np.array([sum(w * a for w, a in zip(row, h, strict=True)) for row in np.asarray(W)])
            h = np.maximum(h, 0) if i < len(weights) - 1 else h
        total += float(g @ h)
    return total


def test_the_circle() -> None:
    """Eight points with alternating labels: with all layers of rank one the speed is sqrt(2) - 1, with two rows 1/2."""
    best = 0.0
    for angle in np.linspace(0, np.pi, 721):
        u = np.array([[math.cos(angle), math.sin(angle)]])
        for sign in (1.0, -1.0):
            best = max(best, escape.speed([u, np.ones((1, 1)), np.array([[sign]])], CIRCLE, SIGNS))
    assert abs(best - (math.sqrt(2) - 1)) < 1e-6
    signs = SIGNS if escape.speed(rank_two(), CIRCLE, SIGNS) > 0 else -SIGNS
    assert abs(escape.speed(rank_two(), CIRCLE, signs) - 0.5) < 1e-12
    np.testing.assert_allclose(np.linalg.svd(rank_two()[0])[1], [math.sqrt(0.5)] * 2, rtol=1e-12)


def test_the_search_beats_rank_one_on_the_circle() -> None:
    found = escape.fastest(CIRCLE, SIGNS, 3, width=24, restarts=40)
    assert 0.49 < found.speed <= 0.5 + 1e-9
    np.testing.assert_allclose([np.linalg.norm(W) for W in found.weights], 1.0, atol=0.02)
    assert sum(np.linalg.norm(W) ** 2 for W in found.weights) == pytest.approx(3, rel=1e-12)
    assert found.speed == pytest.approx(float(np.max(found.speeds)), rel=1e-12)
    assert escape.layers(found.weights, CIRCLE)[0].ratio < 1.1 < 10 < escape.layers(found.weights, CIRCLE)[1].ratio


def test_speeds_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    X, G, W = rng.standard_normal((5, 3)), rng.standard_normal((5, 2)), [rng.standard_normal(s) for s in ((4, 3), (3, 4), (2, 3))]
    radius = math.sqrt(sum((w**2).sum() for w in W) / 3)
    assert escape.speed(W, X, G) == pytest.approx(-slow_potential([w / radius for w in W], X, G), rel=1e-12)
    np.testing.assert_allclose(escape.pull(G), -G / 5)
    np.testing.assert_allclose(escape.pull(G[:, 0]), -G[:, :1] / 5)


def test_a_direction_is_one_that_the_flow_keeps() -> None:
    """grad L_0 = -s rho by finite differences, where no unit lies on its kink; every layer has norm 1."""
    rng = np.random.default_rng(0)
    X, G = rng.standard_normal((20, 3)), rng.standard_normal((20, 3))
    found = escape.fastest(X, G, 3, width=6, restarts=6, steps=1000)
    assert found.residual < 1e-8
    np.testing.assert_allclose([np.linalg.norm(W) for W in found.weights], 1.0, rtol=1e-8)
    W = [np.array(w) for w in found.weights]
    for layer, (i, j) in ((0, (2, 1)), (1, (0, 3)), (2, (1, 2))):
        sides = []
        for h in (1e-5, -1e-5):
            moved = [w.copy() for w in W]
            moved[layer][i, j] += h
            sides.append(slow_potential(moved, X, G))
        assert (sides[0] - sides[1]) / 2e-5 == pytest.approx(-found.speed * W[layer][i, j], abs=1e-7 * found.speed)
    h = np.maximum(np.maximum(X @ W[0].T, 0) @ W[1].T, 0)
    v = np.abs(np.linalg.svd(h)[2][0])  # all that the last layer reads lies along it, so that a layer v v^T changes nothing
    assert escape.speed([*W[:2], np.outer(v, v), W[2]], X, G) == pytest.approx(found.speed, rel=1e-8)  # deeper is no slower


@settings(max_examples=20, deadline=None)
@given(c0=st.floats(1e-3, 1.0), speed=st.floats(0.1, 3.0), depth=st.integers(2, 6))
def test_growth_solves_its_equation(c0: float, speed: float, depth: int) -> None:
    end = 0.5 * (1 / speed if depth == 2 else c0 ** (2 - depth) / ((depth - 2) * speed))
    t = np.array([0.0, end * (1 - 1e-5), end, end * (1 + 1e-5)])
    c = escape.growth(c0, speed, depth, t)
    assert c[0] == pytest.approx(c0, rel=1e-12)
    assert (c[3] - c[1]) / (t[3] - t[1]) == pytest.approx(speed * c[2] ** (depth - 1), rel=1e-6)


@pytest.mark.parametrize(("c0", "depth", "speed", "end"), [
    (1e-200, 4, 1e150, 1e250 / 2), (1e-150, 3, 1.0, 1e150), (1e150, 3, 1.0, 1e-150), (1e-3, 40, 1.0, 1e114 / 38)])
def test_growth_from_starts_of_any_size(c0: float, depth: int, speed: float, end: float) -> None:
    """In units of the time 1 / ((L - 2) s c0^(L-2)) at which c is infinite the law has no scale."""
    c = np.asarray(escape.growth(c0, speed, depth, [0.0, 0.5 * end]))
    np.testing.assert_allclose(c / c0, [1.0, 0.5 ** (-1 / (depth - 2))], rtol=1e-10)
    back = np.asarray(escape.growth(c0, -speed, depth, [0.0, 3 * end]))
    np.testing.assert_allclose(back / c0, [1.0, 4 ** (-1 / (depth - 2))], rtol=1e-10)
    np.testing.assert_allclose(escape.growth(c0, 0.0, depth, [0.0, 1e300]), [c0, c0])


@pytest.mark.parametrize("scale", [1e-170, 1e-3, 1e200])
def test_speeds_and_layers_do_not_depend_on_the_size_of_weights(scale: float) -> None:
    W = [scale * w for w in rank_two()]
    assert escape.speed(W, CIRCLE, SIGNS) == pytest.approx(escape.speed(rank_two(), CIRCLE, SIGNS), rel=1e-12)
    assert escape.speed(W, scale * CIRCLE, SIGNS) == pytest.approx(scale * escape.speed(rank_two(), CIRCLE, SIGNS), rel=1e-12)
    for mine, plain in zip(escape.layers(W, scale * CIRCLE), escape.layers(rank_two(), CIRCLE), strict=True):
        np.testing.assert_allclose(mine, plain, rtol=1e-9, atol=1e-30)


@pytest.mark.parametrize("start", [1e-20, 1e-5, 1e100])
def test_the_flow_is_followed_from_starts_of_any_size(start: float) -> None:
    """To the same digits: the error that is allowed goes with the start."""
    X = np.abs(np.random.default_rng(4).standard_normal((7, 3))) + 0.1
    W, G = [X.mean(0)[None] / np.linalg.norm(X.mean(0)), np.ones((1, 1)), np.ones((1, 1))], np.full((7, 1), -1 / 7)
    t = [0.0, 0.95 * math.sqrt(3) / (escape.speed(W, X, G) * start)]  # 20 times as large
    np.testing.assert_allclose(escape.simulate_growth(W, X, G, start, t), escape.predict_growth(W, X, G, start, t), rtol=1e-8)


def test_paths_of_tiny_weights_take_steps_of_one_relative_length() -> None:
    """Squares of a gradient of 1e-240 are no numbers, and its direction is known all the same."""
    rng = np.random.default_rng(2)
    X, y, W = rng.standard_normal((9, 3)), rng.standard_normal((9, 1)), [rng.standard_normal(s) for s in ((4, 3), (4, 4), (1, 4))]
    plain, tiny = (escape.follow([c * w for w in W], X, y, 5) for c in (1e-8, 1e-120))
    assert len(tiny.loss) == 6
    np.testing.assert_allclose(np.asarray(tiny.norm) / 1e-120, np.asarray(plain.norm) / 1e-8, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(tiny.time) * 1e-120, np.asarray(plain.time) * 1e-8, rtol=1e-6)


def test_training_in_relative_steps_leaves_along_few_directions() -> None:
    """From small weights the loss rests at its start, then falls; deep layers have one singular value then. Times are those of
    gradient flow: the first steps against the flow itself."""
    rng = np.random.default_rng(2)
    X, y = rng.standard_normal((40, 4)), rng.standard_normal((40, 2))
    W = [0.05 * rng.standard_normal(s) / math.sqrt(s[1]) for s in ((8, 4), (8, 8), (8, 8), (2, 8))]
    path = escape.follow(W, X, y, 400)
    start = (y**2).sum() / 80
    assert path.loss[0] == pytest.approx(start, rel=1e-3)
    assert path.loss[-1] < 0.9 * start
    assert (np.diff(path.time) > 0).all()
    drop = int(np.argmax(np.asarray(path.loss) < 0.98 * start))
    assert all(values[drop, 0] > 5 * values[drop, 1] for values in path.values[1:-1])
    np.testing.assert_allclose(path.norm[-1] ** 2, sum((w**2).sum() for w in path.weights), rtol=1e-10)
    np.testing.assert_allclose(path.values[0][0], np.linalg.svd(W[0])[1][:4], rtol=1e-10)


def test_layers_without_and_with_rank_one() -> None:
    u, v = np.array([[1.0], [2.0]]), np.array([[3.0, 1.0]])
    rank_one, both = escape.layers([u @ v, np.eye(2)], np.abs(CIRCLE) + 0.1)
    assert rank_one.weights < 1e-30
    assert rank_one.cut == 0.0
    assert both.weights == pytest.approx(0.5)
    assert both.ratio == 1.0
    assert escape.bound(16) == 2.0


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda: escape.fastest(CIRCLE, 0 * SIGNS, 3), "G is zero: nothing pulls the network away from the origin"),
    (lambda: escape.fastest(0 * CIRCLE, SIGNS, 3), "X is zero: nothing pulls"),
    (lambda: escape.fastest(CIRCLE, SIGNS[:3], 3), "so n = 3; but n = 8 in X"),
    (lambda: escape.fastest(CIRCLE, SIGNS, 1), "depth=1; a whole number, at least 2"),
    (lambda: escape.speed([np.eye(3), np.eye(3)], CIRCLE, SIGNS), "do not make a network of two layers or more"),
    (lambda: escape.growth(0.0, 1.0, 3, [0.0]), "at the origin itself nothing moves"),
    (lambda: escape.growth(0.1, 1.0, 3, [0.0, 20.0]), "weights are infinite at t = 10, and long before that"),
    (lambda: escape.follow(rank_two(), CIRCLE, SIGNS, 5, relative=2.0), "relative=2.0: the length of a step as a share"),
    (lambda: escape.pull([math.nan, 1.0]), "y contains NaN or Inf"),
    (lambda: escape.fastest(np.where(CIRCLE > 0.9, np.nan, CIRCLE), SIGNS, 3), "X contains NaN or Inf"),
    (lambda: escape.fastest(CIRCLE, SIGNS, 3, seed=-1), "seed=-1; a whole number, at least 0"),
    (lambda: escape.fastest(np.concatenate([CIRCLE, CIRCLE]), np.concatenate([SIGNS, -SIGNS]) / 3, 3, width=4, restarts=4,
                            steps=50), "Examples that are equal and pull against each other leave none"),
    (lambda: escape.speed([np.zeros((2, 2)), np.zeros((1, 2))], CIRCLE, SIGNS), "the origin has no direction, and no speed"),
    (lambda: escape.speed([np.eye(2), np.ones((2, 2))], CIRCLE, SIGNS), "the last layer writes the c outputs"),
    (lambda: escape.speed(BIASED, CIRCLE, SIGNS), r"weights are a Sequential: .*weights_of\(model, X\) reads them"),
    (lambda: escape.speed([p.detach() for p in BIASED.parameters()], CIRCLE, SIGNS), "as a bias has: near the origin a network"),
    (lambda: escape.weights_of(BIASED, torch.tensor(CIRCLE).float()), "'0' has a bias: near the origin a network with biases"),
    (lambda: escape.weights_of(torch.nn.Sequential(torch.nn.Linear(2, 3, bias=False), torch.nn.Tanh(), torch.nn.Linear(
        3, 1, bias=False)), torch.tensor(CIRCLE).float()), "'0' is Linear -> Tanh: the theory is of linear layers with a ReLU"),
    (lambda: escape.weights_of(3, torch.tensor(CIRCLE)), "model is a int"),  # type: ignore[arg-type]
    (lambda: escape.layers([np.eye(3), np.eye(2)], CIRCLE), "do not make a network of two layers or more"),
    (lambda: escape.layers([np.eye(2)], CIRCLE), "do not make a network of two layers or more"),
    (lambda: escape.follow([np.zeros((2, 2)), np.zeros((1, 2))], CIRCLE, SIGNS, 5), "the gradient is zero at these weights"),
    (lambda: escape.simulate_growth([np.eye(3), np.ones((1, 2))], CIRCLE, SIGNS, 0.1, [1.0]), "do not make a network"),
    (lambda: escape.simulate_growth([np.eye(2), np.ones((1, 2))], CIRCLE, SIGNS, 0.0, [1.0]),
     "start=0.0: a start .at the origin itself nothing moves., a number"),
    (lambda: escape.growth(0.1, 1.0, 2, [1e4]), "beyond what a float holds"),
    (lambda: escape.growth("a", 1.0, 3, [1.0]), "c0='a': a start .at the origin itself nothing moves., a number above 0"),
    (lambda: escape.growth(0.1, math.nan, 3, [1.0]), "speed=nan, power=1.0: a finite speed is needed"),
    (lambda: escape.growth(0.1, "a", 3, [1.0]), "speed='a', power=1.0: a finite speed is needed"),
    (lambda: escape.growth(0.1, 1.0, 3, [1.0], power=math.inf), "speed=1.0, power=inf: a finite speed is needed"),
    (lambda: DIRECTION.norm([0.0], 0.0), "start=0.0: a start .at the origin itself nothing moves."),
    (lambda: escape.predict_growth(rank_two(), CIRCLE, SIGNS, -1.0, [1.0]), "start=-1.0: a start"),
    (lambda: escape.predict_growth(3, CIRCLE, SIGNS, 1.0, [1.0]), "weights are a int: a list of matrices"),
    (lambda: escape.speed(torch.tensor(0.5), CIRCLE, SIGNS), "weights are a Tensor: a list of matrices"),
    (lambda: escape.speed([], CIRCLE, SIGNS), "do not make a network of two layers or more"),
    (lambda: escape.speed(rank_two(), 1e200 * CIRCLE, 1e200 * SIGNS), r"X and G are of sizes .e\+199 and .e\+199: speeds go"),
    (lambda: escape.fastest(1e-200 * CIRCLE, 1e-200 * SIGNS, 3), "speeds go with their product, which is no number of float64"),
    (lambda: escape.follow([1e200 * W for W in rank_two()], CIRCLE, SIGNS, 5), "the loss at these weights is nan: outputs or"),
    (lambda: escape.follow(rank_two(), CIRCLE, 1e200 * SIGNS, 5), "the loss at these weights is inf: outputs or labels"),
    (lambda: escape.follow([1e-170 * W for W in rank_two()], CIRCLE, SIGNS, 5), "products of tiny weights leave the range of"),
    (lambda: escape.follow(rank_two(), CIRCLE, SIGNS, 5, relative="a"), "relative='a': the length of a step as a share"),
    (lambda: escape.follow(rank_two(), CIRCLE, SIGNS, 0), "steps=0; a whole number"),
    (lambda: escape.simulate_growth([np.zeros((2, 2)), np.zeros((1, 2))], CIRCLE, SIGNS, 0.1, [1.0]), "all weights are zero"),
    (lambda: escape.simulate_speed(CIRCLE[:, 0], SIGNS, 3), r"X has shape \(8,\); \[n, d\] is needed"),
    (lambda: escape.simulate_speed(CIRCLE, SIGNS, 1), "depth=1; a whole number, at least 2"),
    (lambda: escape.weights_of(BIASED, torch.ones(2, 5)), r"the Sequential does not run on X, of shape \(2, 5\)"),
    (lambda: escape.weights_of(BIASED, CIRCLE), "x is a ndarray: give a tensor of examples"),  # type: ignore[arg-type]
    (lambda: escape.pull(3.0), r"y has shape \(\); \[n, c\] is needed"),
    (lambda: escape.bound(0), "layer=0; a whole number"),
])
def test_what_is_refused(call: Any, sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        call()


def test_tensors_come_back_as_tensors() -> None:
    found = escape.fastest(torch.tensor(CIRCLE), torch.tensor(SIGNS), 3, width=4, restarts=4, steps=20)
    assert isinstance(found.weights[0], torch.Tensor)
    assert isinstance(found.norm([0.0, 0.1], 0.1), torch.Tensor)
    assert found.norm([0.0], 0.1)[0].item() == pytest.approx(0.1)


def test_a_flow_that_slides_along_a_kink_ends_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in an hour of ever shorter steps."""
    monkeypatch.setattr(escape, "PATIENCE", 500)
    with pytest.raises(FlowError, match="after 500 gradients the flow has not come to t = 1: it slides along a kink of a ReLU"):
        escape.simulate_growth([np.array([[1.0, 0.0]]), np.ones((1, 1))], CIRCLE, SIGNS, 0.1, [0.0, 1.0])


@pytest.mark.parametrize("scale", [1e-200, 1e-3, 1e200])
def test_speeds_are_proportional_to_what_pulls(scale: float) -> None:
    """Also where squares of it leave the range of floats; of lists and of single precision the same."""
    options: dict[str, Any] = {"width": 4, "restarts": 4, "steps": 60}
    plain, scaled = escape.fastest(CIRCLE, SIGNS, 3, **options), escape.fastest(CIRCLE, scale * SIGNS, 3, **options)
    assert scaled.speed == pytest.approx(scale * plain.speed, rel=1e-9)
    assert scaled.residual == pytest.approx(plain.residual, rel=1e-6)
    listed = escape.fastest((scale * CIRCLE).tolist(), SIGNS[:, 0].tolist(), 3, **options)
    assert listed.speed == pytest.approx(scale * plain.speed, rel=1e-9)
    single = escape.fastest(torch.tensor(CIRCLE).float(), torch.tensor(SIGNS).float(), 3, **options)
    assert single.speed == pytest.approx(plain.speed, rel=1e-4)


def test_the_loss_never_rises_along_a_path() -> None:
    """Steps of one relative length swing about a minimum; those that would raise the loss are halved, and at its end it stops."""
    rng = np.random.default_rng(3)
    X, y = rng.standard_normal((12, 3)), rng.standard_normal((12, 1))
    W = [0.3 * rng.standard_normal(s) for s in ((5, 3), (1, 5))]
    path = escape.follow(W, X, y, 800, relative=0.1)
    assert (np.diff(path.loss) <= 0).all()
    before = np.asarray(path.norm)[:-1] * 0.1
    assert (np.abs(np.diff(path.norm)) <= before + 1e-12).all()


def test_weights_of_a_model() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(2, 3, bias=False), torch.nn.ReLU(),
                                torch.nn.Linear(3, 1, bias=False))
    W = escape.weights_of(model, torch.tensor(CIRCLE).float())
    assert [tuple(w.shape) for w in W] == [(3, 2), (1, 3)]
    assert not any(w.requires_grad for w in W)
    arrays = [w.double().numpy() for w in W]
    assert escape.speed(W, CIRCLE, SIGNS) == pytest.approx(escape.speed(arrays, CIRCLE, SIGNS), rel=1e-12)
