"""Parts of the experiments on linear networks: half-times, forecasts, order and variance explained, the crossing of two modes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from richter.experiments.kit import Results, Task
from richter.experiments.layerwise import app_a_2, fig3_3, sec3_5
from richter.tasks import digits
from richter.theory.linear_networks import DiagonalNetwork, LinearNetwork


def test_half_times_are_interpolated() -> None:
    t = np.array([0.0, 1.0, 2.0, 3.0])
    curves = np.array([[0.0, 0.25, 0.75, 1.0], [0.6, 0.7, 0.8, 0.9], [0.0, 0.1, 0.2, 0.3]])
    np.testing.assert_allclose(sec3_5.halves(curves, t), [1.5, 0.0, 3.0])  # there at once; not there at the end
    assert fig3_3.first(curves[0], t, 0.5) == 1.5
    assert (fig3_3.first(curves[1], t, 0.5), fig3_3.first(curves[2], t, 0.5)) == (0.0, 3.0)


def test_forecasts_and_their_rivals() -> None:
    C = np.diag([2.0, 1.0])
    seen = np.array([1.0, 4.0])
    told = sec3_5.forecasts(LinearNetwork(0.1 * np.eye(2), 0.1 * np.eye(2), C), seen)
    exact = np.log(np.array([2.0, 1.0]) / 0.01 - 1) / np.array([4.0, 2.0])
    np.testing.assert_allclose(told["alone"], exact, rtol=1e-9)
    np.testing.assert_allclose(told["printed"], exact, rtol=1e-9)  # of aligned weights they are the same
    np.testing.assert_allclose(told["constant"], [2.0, 2.0])
    np.testing.assert_allclose(told["spaced"], [2 / 2**0.5, 4 / 2**0.5])


def test_order_and_variance_explained() -> None:
    s = sec3_5.LayerwiseSec3_5Settings()
    task = Task(s, seed=0)

    def numbers(half: list[float], alone: list[float]) -> tuple[float, float]:
        r = Results(s, [task], [{"relu_half": np.array(half), "relu_alone": np.array(alone)}])
        return sec3_5.ordered(r, "relu"), sec3_5.explained(r, "relu")

    order, share = numbers([2.0, 4.0, 8.0], [1.0, 2.0, 4.0])  # twice the forecast
    assert (order, share) == (1.0, pytest.approx(1.0))
    order, share = numbers([2.0, 4.0, 8.0], [3.0, 3.0, 3.0])  # a constant
    assert (order, share) == (0.5, pytest.approx(0.0))
    order, share = numbers([2.0, 4.0, 8.0], [4.0, 2.0, 1.0])
    assert order == 0.0
    assert share < 0


def test_the_crossing_of_two_modes_is_found_on_the_flow() -> None:
    pair = DiagonalNetwork(1.3, [2.0, 0.7], 0.05, 0.05)
    assert app_a_2.crossing(pair) == pytest.approx(float(np.asarray(pair.stage_eps)[0]), rel=1e-9)


@pytest.fixture
def _embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digits that need not be fetched."""
    monkeypatch.setattr(sec3_5, "mnist_5k", lambda seed: digits(seed=seed))


@pytest.mark.usefixtures("_embedded")
def test_digits_are_white_and_labels_centred() -> None:
    x, y = sec3_5.whitened(sec3_5.LayerwiseSec3_5Settings(images=300, directions=5), 0)
    torch.testing.assert_close(x.T @ x / 300, torch.eye(5, dtype=torch.float64), rtol=1e-10, atol=1e-10)
    assert y.shape == (300, 10)
    assert float(y.mean(0).abs().max()) < 1e-12


@pytest.mark.usefixtures("_embedded")
@pytest.mark.parametrize("net", ["linear", "relu"])
def test_a_network_on_digits_reaches_its_modes(net: str) -> None:
    rows = sec3_5.digits(sec3_5.LayerwiseSec3_5Settings(images=200, directions=6, units=16, lr=0.5), 0, net)
    half, curves = np.asarray(rows[f"{net}_half"]), np.asarray(rows[f"{net}_curves"])
    assert half.shape == rows[f"{net}_alone"].shape == curves.shape[:1]  # type: ignore[union-attr]
    assert np.abs(curves[:2, 0]).max() < 0.1
    np.testing.assert_allclose(curves[:2, -1], 1.0, atol=0.2)
