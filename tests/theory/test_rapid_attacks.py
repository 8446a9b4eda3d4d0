"""Kernels and labels at the edges: singular, nearly reached, of one rank, few ranks; tiny and huge rates of feature learning."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor, nn

import richter
from richter import linalg as spectra
from richter.core import WHOLE, Mark, SelectionError
from richter.kernels import dynamics
from richter.theory import gofe, linear_kernels
from richter.theory.ofe import OptimalFeatureEvolution

Matrix = np.ndarray[Any, Any]
TIMES = [0.0, 0.05, 0.5, 3.0, 20.0]


def normal(*shape: int, seed: int = 0) -> Matrix:
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


def gram(n: int, p: int, seed: int = 0) -> Matrix:
    J = normal(p, n, seed=seed)
    return J.T @ J / p


def turned(*eigenvalues: float) -> tuple[Matrix, Matrix]:
    """A kernel with these eigenvalues, and its eigenvectors."""
    Q = np.linalg.qr(normal(len(eigenvalues), len(eigenvalues), seed=9))[0]
    return Q @ np.diag(eigenvalues) @ Q.T, Q


def integrated(K0: Matrix, y: Matrix, gamma: float, t: list[float]) -> tuple[Matrix, Matrix]:
    """D [t, n] and K [t, n, n] of D' = -Psi^T Psi D, Psi' = gamma Psi D D^T, from a root of K0 that has K0's rank."""
    n = len(y)
    values, vectors = np.linalg.eigh(K0.astype(float))
    Psi = (vectors * np.sqrt(np.where(values > 1e-14 * values[-1], values, 0))).T

    def slope(_: float, state: Matrix) -> Matrix:
        D, P = state[:n], state[n:].reshape(n, n)
        PD = P @ D
        return np.concatenate([-P.T @ PD, (gamma * np.outer(PD, D)).ravel()])

    done = solve_ivp(slope, (0, t[-1]), np.concatenate([-y, Psi.ravel()]), method="DOP853", t_eval=t, rtol=1e-12, atol=1e-16)
    P = done.y[n:].T.reshape(-1, n, n)
    return done.y[:n].T, P.transpose(0, 2, 1) @ P


def alignment(K: Matrix, y: Matrix) -> float:
    return float(y @ K @ y / np.linalg.norm(K) / (y @ y))


# ------------------------------------------------------------------------------------------------ optimal feature evolution


@pytest.mark.parametrize("gamma", [1e-30, 1e-16, 1e-13, 1e-8, 1e-3, 1.0])
def test_a_slow_evolution_under_a_singular_kernel(gamma: float) -> None:
    """C's slowest eigenvalue is as small as gamma, far below the rounding of the others."""
    K0, y = gram(5, 3), normal(5, seed=1)
    D, K = integrated(K0, y, gamma, TIMES)
    residual, kernel = OptimalFeatureEvolution(K0, y, gamma).predict(TIMES)
    np.testing.assert_allclose(residual, D, atol=1e-9)
    np.testing.assert_allclose(kernel, K, atol=1e-9)


@pytest.mark.parametrize("gamma", [1e-3, 1.0])
@pytest.mark.parametrize("part", [1e-4, 1e-6, 1e-9])
def test_labels_that_a_singular_kernel_nearly_reaches(part: float, gamma: float) -> None:
    K0, Q = turned(1.0, 2.0, 3.0, 0.0)
    y = Q @ np.array([1, 1, 1, part])
    D, K = integrated(K0, y, gamma, TIMES)
    evolution = OptimalFeatureEvolution(K0, y, gamma)
    np.testing.assert_allclose(evolution.residual(TIMES), D, atol=1e-10)
    np.testing.assert_allclose(evolution.kernel(TIMES), K, atol=1e-10)
    np.testing.assert_allclose(evolution.residual([1e4])[0], evolution.final_residual, atol=1e-5 * part)


def test_labels_that_a_kernel_does_not_reach_at_all_stay() -> None:
    """Rounding leaves them a part in slower directions, which is not to grow."""
    K0, Q = turned(1.0, 2.0, 3.0, 0.0, 0.0)
    y = 2 * Q[:, 4]
    evolution = OptimalFeatureEvolution(K0, y, 0.7)
    np.testing.assert_allclose(evolution.residual([0.0, 1.0, 100.0, 1e6]), [-y] * 4, atol=1e-13)
    np.testing.assert_allclose(evolution.final_residual, -y, atol=1e-13)
    np.testing.assert_allclose(evolution.alignment([0.0, 1e6]), 0, atol=1e-13)


@pytest.mark.parametrize("gamma", [1e-9, 1e-3, 1.0])
def test_a_singular_kernel_of_single_precision(gamma: float) -> None:
    """Its eigenvalues near 0 have both signs."""
    K0, y = gram(12, 5).astype(np.float32), normal(12, seed=1)
    evolution = OptimalFeatureEvolution(K0, y, gamma)
    np.testing.assert_allclose(evolution.residual([0.0])[0], -y, atol=1e-7)
    np.testing.assert_allclose(evolution.residual(TIMES), evolution.simulate(TIMES)[0], atol=1e-7)


def test_rounding_is_not_a_feature_of_the_simulated_flow() -> None:
    """The root of an eigenvalue 1e-17 is a feature of 3e-9, and features grow exponentially."""
    K0, y = gram(6, 3, seed=7), normal(6, seed=8)
    evolution = OptimalFeatureEvolution(K0, y, 6.5)
    np.testing.assert_allclose(evolution.simulate([0.0, 20.0])[0], evolution.residual([0.0, 20.0]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("gamma", [1e5, 1e9])
def test_alignment_where_labels_outweigh_the_first_kernel(gamma: float) -> None:
    """|C|^2 - ... loses K0 once gamma |y|^2 is 10^8 times as large: the alignment at first was infinite."""
    K0, y = gram(5, 9), normal(5, seed=1)
    t = [0.0, 1e-3 / gamma, 1 / gamma, 10 / gamma]
    aligned = [alignment(K, y) for K in integrated(K0, y, gamma, t)[1]]
    np.testing.assert_allclose(OptimalFeatureEvolution(K0, y, gamma).alignment(t), aligned, rtol=1e-5)
    assert OptimalFeatureEvolution(K0, y, gamma).alignment([0.0])[0] == pytest.approx(alignment(K0, y), rel=1e-6)


def test_units_of_the_kernel_do_not_matter_to_the_alignment() -> None:
    K0, y = gram(4, 8), normal(4, seed=1)
    one = OptimalFeatureEvolution(K0, y, 0.5).alignment([0.0, 1.0])
    for unit in (1e-200, 1e200):
        np.testing.assert_allclose(OptimalFeatureEvolution(unit * K0, y, unit * 0.5).alignment([0.0, 1 / unit]), one, rtol=1e-9)
    assert np.isfinite(OptimalFeatureEvolution(gram(3, 2), normal(3), 0.5, 1e10).loss([1e300])).all()


def test_the_diagonal_approximation_is_of_the_labels_and_of_any_rate() -> None:
    K0, y, f0 = gram(4, 8), normal(4, seed=1), normal(4, seed=2)
    moved = OptimalFeatureEvolution(K0, y, 0.8, f0=f0)
    assert moved.diagonal_alignment([1e6])[0] == pytest.approx(moved.final_alignment, rel=1e-9)  # right at the end
    frozen = OptimalFeatureEvolution(K0, y, 0.0)
    np.testing.assert_allclose(frozen.diagonal_alignment([0.0, 1.0]), frozen.alignment([0.0, 1.0]), rtol=1e-12)


def test_the_turning_time_does_not_wait_for_what_has_no_part_in_the_labels() -> None:
    evolution = OptimalFeatureEvolution(np.diag([1e-3, 3.999, 4.0]), [0.0, 1.0, 5.0], 1e-9)
    assert evolution.turning_time == pytest.approx(math.log(25) / 0.002, rel=1e-3)


# ------------------------------------------------------------------------------------------------ under a frozen kernel


def test_times_keep_their_digits() -> None:
    times = dynamics.kernel_gradient_flow(gram(3, 4), normal(3), 0.1, [0.1, 1e300]).times
    assert times.tolist() == [0.1, 1e300]
    assert dynamics.kernel_gradient_descent(gram(3, 4), normal(3), 0.1, 2).times.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("steps", "record", "sentence"), [
    (5, [30], "record contains 30: .* from 0 to steps=5"), (5, [0.5], r"record contains 0\.5"), (-1, None, "steps=-1: a number")])
def test_rescaled_descent_checks_its_steps_also_beyond_stability(steps: int, record: Any, sentence: str) -> None:
    for ratio in (1.0, 90.0):
        with pytest.raises(SelectionError, match=sentence):
            dynamics.rescaled_gradient_descent(np.eye(3), ratio * np.eye(3), np.ones(3), 0.1, steps, record=record)


def test_steps_to_record_may_be_a_tensor() -> None:
    K, y = gram(3, 4), normal(3)
    some = dynamics.kernel_gradient_descent(K, y, 0.1, 5, record=torch.tensor([0, 5]))
    np.testing.assert_array_equal(some.loss, dynamics.kernel_gradient_descent(K, y, 0.1, 5).loss[[0, 5]])


def test_each_of_several_kernels_must_be_one() -> None:
    """A small one beside a large one too."""
    for K, sentence in ((np.diag([1.0, -1, 1]), "K is indefinite: it has the eigenvalue -1e-08 beside 1e-08"),
                        (np.triu(np.ones((3, 3))), r"K is not symmetric: \|K - K\^T\| = 1 \|K\|")):
        with pytest.raises(SelectionError, match=sentence):
            dynamics.kernel_gradient_descent(np.stack([np.eye(3), 1e-8 * K]), np.ones((3, 2)), 0.1, 5)
    silent = np.stack([np.eye(3), np.zeros((3, 3))])  # an output that nothing moves
    np.testing.assert_allclose(dynamics.kernel_gradient_descent(silent, np.ones((3, 2)), 0.1, 2).residual[:, :, 1], -1)


def test_oblong_kernels_are_told() -> None:
    oblong = gram(5, 9)[:4]
    for call in (lambda: dynamics.effective_gamma(oblong, oblong, np.ones(5)), lambda: dynamics.overlap(oblong, oblong)):
        with pytest.raises(SelectionError, match=r"K0 has shape \(4, 5\); square kernels"):
            call()


# ------------------------------------------------------------------------------------------------ spectra


def test_a_spectrum_ends_where_rounding_begins() -> None:
    """Ten features of 50 examples: eleven and more eigenvalues are no power law, though 1e-15 has a logarithm."""
    K = gram(50, 10)
    s = dynamics.spectrum(K, normal(50))
    assert not s.eigenvalues[10:].any()
    values = np.linalg.eigvalsh(K)[::-1][4:10]
    assert s.b.exponent == pytest.approx(-np.polyfit(np.log(np.arange(5, 11)), np.log(values), 1)[0], rel=1e-9)
    vectors = np.linalg.eigh(gram(40, 60))[1]
    alone = dynamics.spectrum(gram(40, 60), vectors[:, -1])
    assert np.flatnonzero(alone.power).tolist() == [0]
    with pytest.raises(SelectionError, match="a power law needs two positive values among ranks 3 to 20; 0 found"):
        alone.a  # noqa: B018


def test_exponents_of_flat_spectra() -> None:
    late = dynamics.spectrum(np.diag(np.arange(40.0, 0, -1)), np.eye(40)[39])  # all power in the last: its tail is flat
    assert late.a.exponent == 1
    assert late.loss_exponent.exponent == 0
    flat = dynamics.spectrum(np.eye(40), normal(40))
    assert flat.b.exponent == 0
    assert math.isnan(flat.loss_exponent.exponent)


def test_an_interval_of_few_values_counts_them() -> None:
    """Delete one, by hand: of five values there are five to leave out, not ten, and four degrees of freedom."""
    values = np.array([1.0, 0.4, 0.35, 0.2, 0.1])
    k = np.log(np.arange(1, 6))

    def slope(keep: Matrix) -> float:
        return float(-np.polyfit(k[keep], np.log(values[keep]), 1)[0])

    without = np.array([slope(np.arange(5) != i) for i in range(5)])
    error = math.sqrt(4 / 5 * ((without - without.mean()) ** 2).sum())
    for padded in (values, np.concatenate([values, np.zeros(20)])):
        law = spectra.power_law_interval(padded, first=1, last=len(padded))
        assert law.exponent == pytest.approx(slope(np.arange(5) >= 0), rel=1e-12)
        assert law.high - law.exponent == pytest.approx(2.7764451 * error, rel=1e-6)
    assert math.isnan(spectra.power_law_interval(values[:2], first=1, last=2).low)


# ------------------------------------------------------------------------------------------------ effective gamma


def test_kernels_that_are_the_labels_own() -> None:
    y = normal(5, seed=3)
    own = np.outer(y, y)
    assert dynamics.effective_gamma(gram(5, 9), 0.7 * own, y) == math.inf
    assert math.isnan(dynamics.effective_gamma(2.3 * own, 0.7 * own, y))  # any gamma has this alignment, 1
    assert math.isnan(dynamics.effective_gamma([[2.0]], [[3.0]], [1.7]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_measure_knows_such_kernels(dtype: torch.dtype) -> None:
    x = torch.tensor(normal(11, 1), dtype=dtype)
    model = nn.Linear(1, 1, bias=False).to(dtype)  # its kernel is x x^T for ever
    snap = richter.measure(model, richter.Probe(x, 1.7 * x), ["effective_gamma"], initial=model.state_dict())
    assert math.isnan(snap.value("effective_gamma", WHOLE))
    assert snap.note("effective_gamma", WHOLE) == "the kernel equals y y^T, which no finite rate reaches"


# ------------------------------------------------------------------------------------------------ velocity


@pytest.mark.filterwarnings("ignore:step 2 comes after step 5")
def test_no_time_between_two_snapshots() -> None:
    """A step that is measured again, and a run that went back."""
    model, probe = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double(), richter.Probe(
        torch.tensor(normal(18, 5)), torch.arange(18) % 3)
    watch = richter.Observer(model, probe, measures=["kernel_velocity"], when=lambda step: True, budget=None, on_error="raise")
    rows = {}
    for i, step in enumerate((0, 5, 5, 2, 9)):
        with torch.no_grad():
            model[0].weight += 0.01
        snap = watch(step)
        assert snap is not None
        rows[i] = next(r for r in snap.rows if r.layer == WHOLE)
    for i, at in ((2, 5), (3, 2)):
        assert math.isnan(rows[i].value)
        assert rows[i].mark is Mark.UNDEFINED
        assert rows[i].note == f"the last snapshot is from step 5, and this one from step {at}: no time has passed between them"
    assert rows[1].value > 0
    assert rows[4].value > 0


# ------------------------------------------------------------------------------------------------ other theories


@pytest.mark.parametrize("number", [np.float32(0.5), np.int64(2), torch.tensor(0.5), np.array(0.5)])
def test_a_velocity_is_a_number_of_any_kind(number: Any) -> None:
    Psi = torch.tensor(normal(4, 3))

    def loss(F: Tensor) -> Tensor:
        return (F - 1).square().sum() / 2

    F, _ = gofe.GeneralisedFeatureEvolution(Psi, number, loss).simulate([0.5])
    torch.testing.assert_close(F, gofe.GeneralisedFeatureEvolution(Psi, float(number), loss).simulate([0.5])[0])


def test_weights_that_make_no_network() -> None:
    broken = [normal(4, 3), normal(2, 5)]
    for weights in (broken, []):
        with pytest.raises(SelectionError, match="do not make a network: each layer reads what the one before it writes"):
            linear_kernels.specialisation_bound(weights)
