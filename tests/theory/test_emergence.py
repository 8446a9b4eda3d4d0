"""Emergence in time, data and width: calibration on one skill, the extended model against brute force, the three-unit network."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import install_import_hook

from richter.core import SelectionError

with install_import_hook(["richter.theory.emergence", "richter.theory.three_units"], "checker.typechecked"):
    from richter.theory import emergence, three_units
    from richter.theory.emergence import Emergence, Extended, crossing

FREQUENCIES = np.arange(1, 6) ** -1.6 / (np.arange(1, 6) ** -1.6).sum()


@settings(max_examples=25, deadline=None)
@given(st.floats(0.01, 0.5), st.floats(50, 5000), st.floats(1.5, 9), st.sampled_from([1e-5, 1e-3, 0.1]),
       st.sampled_from(["corrected", "text"]))
def test_what_is_calibrated_is_what_the_curves_were_made_of(speed: float, shots: float, units: float, initial: float,
                                                           form: Any) -> None:
    true = Emergence(speed, shots, units, 5.0, 0.05, initial, form)
    T, D, N = (np.geomspace(x / 50, 3 * x, 20_000) for x in (true.time([1.0])[0], shots, units))
    model = Emergence.calibrated(5.0, 0.05, initial, form, time=(T, true.in_time(T, [1.0])[0]),
                                 data=(D, true.in_data(D, [1.0])[0]), width=(N, true.in_width(N, 1)[0]))
    np.testing.assert_allclose([model.speed, model.shots, model.units], [speed, shots, units], rtol=1e-5)
    for k, P in enumerate(FREQUENCIES):  # the curves reach a half where it is said that they do
        assert true.in_time([true.time(FREQUENCIES)[k]], [P])[0, 0] == pytest.approx(0.5)
        assert true.in_data([true.data(FREQUENCIES)[k]], [P])[0, 0] == pytest.approx(0.5)
        assert true.in_width([true.width(5)[k]], 5)[k, 0] == pytest.approx(0.5)
    np.testing.assert_allclose(true.time(FREQUENCIES) * FREQUENCIES, true.time([1.0])[0])
    np.testing.assert_allclose(true.data(FREQUENCIES) * FREQUENCIES, true.data([1.0])[0])


def test_the_speed_means_nothing_without_the_start() -> None:
    """Half the time of the definitions' runs, 550 steps: B^2 is 1/40 for R(0) / S = 1e-3 and 1/24 for 1e-5."""
    curve = ([1.0, 550.0, 1100.0], [0.0, 0.5, 1.0])
    speeds = [Emergence.calibrated(5.0, 0.05, initial, time=curve).speed for initial in (1e-3, 1e-4, 1e-5)]
    np.testing.assert_allclose(1 / np.array(speeds), [39.8, 29.9, 23.9], rtol=5e-3)
    times = [Emergence.calibrated(5.0, 0.05, initial, time=curve).time(FREQUENCIES) for initial in (1e-3, 1e-5)]
    np.testing.assert_allclose(times[0], times[1])  # what is predicted is the same


def test_a_curve_is_read_between_its_points() -> None:
    assert crossing([1.0, 10.0, 100.0], [0.0, 0.25, 0.75]) == pytest.approx(10**1.5)
    assert crossing([0.0, 10.0], [0.0, 1.0]) == pytest.approx(5.0)
    assert crossing([1.0, 2.0, 4.0], [0.0, 0.5, 1.0]) == 2.0
    assert crossing([1.0, 2.0, 4.0], [0.0, 0.9, 0.1], 0.9) == 2.0


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 12), st.integers(1, 12), st.integers(0, 50), st.sampled_from([0.5, 1.0, 5.0]))
def test_strength_and_loss_of_one_draw(shots: int, d: int, seed: int, S: float) -> None:
    """By pseudo-inverse: what fits the data with the least weights; L = (S^2 / 2)(1 - R / S) in each draw, not (S - R)^2 / 2."""
    d = min(d, shots)
    Phi = np.random.default_rng(seed).standard_normal((shots, d))
    v = np.linalg.pinv(Phi.T) @ (S * Phi.sum(0) / math.sqrt(shots))
    R, loss = emergence.projected(Phi, S)
    brute = v.sum() / math.sqrt(shots), ((S / math.sqrt(shots) - v) ** 2).sum() / 2
    np.testing.assert_allclose([R, loss], brute, atol=1e-9 * S**2)
    assert abs(loss - S**2 / 2 * (1 - R / S)) < 1e-10 * S**2
    if 0.2 < R / S < 0.8:
        assert abs(loss - (S - R) ** 2 / 2) > 0.05 * S**2
    assert emergence.projected(Phi, S, form="text")[0] == pytest.approx(S - math.sqrt(2 * loss), abs=1e-12)


def test_in_the_mean_it_is_linear_in_the_examples() -> None:
    """The numbers of the check: D_c = 200; the printed law has .051, .134, .293, .5, .776."""
    counts = [20, 50, 100, 150, 190]
    drawn = emergence.simulate_shots(counts, 200, draws=60)
    np.testing.assert_allclose(drawn, emergence.data_strength(counts, 200), atol=0.02)
    np.testing.assert_allclose(emergence.data_strength(counts, 200, "text"), [0.0513, 0.134, 0.2929, 0.5, 0.7764], atol=1e-4)
    assert np.abs(drawn - emergence.data_strength(counts, 200, "text")).min() > 0.04
    assert emergence.data_strength([300], 200) == emergence.data_strength([300], 200, "text") == 1


def test_what_the_flow_conserves() -> None:
    """Lemmas 2 and 3: B moves in the span of the data, a^2 - |B|^2 stays; B.41 with a at the end, not at the start."""
    rng = np.random.default_rng(0)
    Phi, B0 = rng.standard_normal((9, 4)), 0.02 * rng.standard_normal(9)
    model = Extended(Phi, 2.0, 0.1, B0)
    a, B = (np.asarray(v) for v in model.simulate([0.0, 1.0, 5.0, 100.0]))
    U = np.linalg.qr(Phi)[0]
    outside = (np.eye(9) - U @ U.T) @ B
    np.testing.assert_allclose(outside, np.repeat(outside[:, :1], 4, 1), atol=1e-10)
    np.testing.assert_allclose(a**2 - (B**2).sum(0), 0.1**2 - B0 @ B0, atol=1e-9)
    end, last = (np.asarray(v) for v in model.limit)
    np.testing.assert_allclose([end, *last], [a[-1], *B[:, -1]], rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose((outside[:, -1] * a[-1]), outside[:, 0] * end, atol=1e-10)
    assert abs(a[-1] / a[0]) > 10
    small = Extended(Phi, 2.0, 1e-6)
    np.testing.assert_allclose(small.learned, emergence.projected(Phi, 2.0), rtol=1e-9)


def test_three_units_fit_parity() -> None:
    S = 3.0
    rest = torch.tensor([[2 * S, 2 * S, 2 * S, -S]], dtype=torch.float64)
    np.testing.assert_allclose(three_units.velocities(rest, S), np.zeros((1, 4)), atol=1e-12)
    t = np.linspace(0.0, 30.0, 601)
    modes = three_units.modes(t, 5.0)
    R = np.asarray(modes.strength)
    np.testing.assert_allclose(R[:, -1], [0.5, 0.25, 0.25], atol=1e-4)
    assert modes.loss[-1] < 1e-5
    half = [crossing(t, row / row[-1]) for row in R]
    np.testing.assert_allclose(half, [3.05, 3.60, 4.75], atol=0.02)  # of the independent check
    np.testing.assert_allclose([crossing(t, R.sum(0), share) for share in (0.5, 0.9)], [3.61, 7.72], atol=0.02)


def test_the_printed_equations_do_not_move_down() -> None:
    z = np.array([[0.1, 0.2, 0.3, -0.1]])
    np.testing.assert_allclose(three_units.velocities(z, 1.0), three_units.simulate_velocities(z, 1.0), rtol=1e-12)
    np.testing.assert_allclose(three_units.velocities(z, 1.0, 2.0), 2 * np.asarray(three_units.velocities(z, 1.0)))
    assert (np.sign(three_units.velocities(z, 1.0, form="text")) != np.sign(three_units.velocities(z, 1.0))).any()


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda: Emergence(initial=0.0), "B.2 cannot be told without it"),
    (lambda: Emergence(lr=0.0), "lr=0.0: a number above 0 is needed"),
    (lambda: Emergence(form="sqrt"), "has no form 'sqrt'"),  # type: ignore[arg-type]
    (lambda: Emergence().time([1.0]), "speed=nan: this constant is not known"),
    (lambda: Emergence(shots=-1.0).data([1.0]), "shots=-1.0: this constant is not known"),
    (lambda: Emergence(speed=1.0).time([0.7, 0.7]), "1.4 together: each skill needs one above 0"),
    (lambda: Emergence(speed=1.0).in_time([-1.0], [1.0]), "T = .*numbers from 0 on"),
    (lambda: crossing([1.0, 2.0], [0.1, 0.3]), "reaches 0.3 of the target and never 0.5"),
    (lambda: crossing([1.0, 2.0], [0.7, 0.9]), "Begin with a smaller x"),
    (lambda: crossing([2.0, 1.0], [0.1, 0.9]), "x must grow"),
    (lambda: crossing([1.0, 2.0], [0.1, math.nan]), "strength contains NaN or Inf"),
    (lambda: emergence.data_strength([1], 2, "other"), "has no form 'other'"),  # type: ignore[arg-type]
    (lambda: emergence.projected(np.eye(3), 1.0, form="other"), "has no form 'other'"),  # type: ignore[arg-type]
    (lambda: Extended(np.eye(3), 1.0, 0.1, np.ones(3)), "a0 above 0 and at least .B0. is needed"),
    (lambda: Extended(np.eye(3), 1.0, 0.0), "a0 above 0"),
    (lambda: three_units.modes([1.0], 1.0, 0.0), "from 0 the units never leave"),
    (lambda: three_units.velocities(np.ones((2, 3)), 1.0), "rows .alpha.2, beta.2, gamma.2, c. are needed"),
    (lambda: three_units.velocities(-np.ones((2, 4)), 1.0), "squares from 0 on"),
    (lambda: three_units.velocities(np.ones((2, 4)), 1.0, form="other"), "has no form 'other'"),  # type: ignore[arg-type]
])
def test_what_is_refused(call: Any, sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        call()


def test_the_page_of_emergence(capsys: pytest.CaptureFixture[str]) -> None:
    """What it prints: three skills within a third of a decade of what one says, and the exponent twice."""
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs/emergence.md").read_text(), re.DOTALL):
        exec(code, names)
    lines = capsys.readouterr().out.splitlines()
    apart = [float(line.split()[-3]) for line in lines[:3]]
    assert max(apart) < 0.33, apart
    assert (np.diff(names["seen"]) > 0).all()
    slope, exponent = (float(v) for v in lines[3].split())
    assert abs(slope - exponent) < 0.001


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, 2.0, math.nan])
@pytest.mark.parametrize("of", ["time", "data", "width"])
def test_shares_of_a_skill_lie_between_nothing_and_all(of: str, share: float) -> None:
    model = Emergence(0.05, 800, 4)
    with pytest.raises(SelectionError, match="between 0 and 1"):
        getattr(model, of)(3 if of == "width" else [0.5, 0.3], share)


def test_learners_of_no_examples_or_units() -> None:
    for size in (0, -1.0, math.nan, math.inf):
        with pytest.raises(SelectionError, match=f"shots={size!r}: a number above 0"):
            emergence.data_strength([1, 2], size)
        with pytest.raises(SelectionError, match=f"units={size!r}: a number above 0"):
            emergence.width_strength([1, 2], size, 3)
