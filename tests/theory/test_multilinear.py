"""The multilinear model: its sums over skills against plain sums, its laws, its exponents and prefactors, what is refused."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import install_import_hook

from richter.core import SelectionError

with install_import_hook(["richter.theory.multilinear", "richter.theory.powerlaw", "richter.theory.prefactors"],
                         "checker.typechecked"):
    from richter.theory import powerlaw
    from richter.theory.multilinear import Linear, Multilinear


@functools.cache
def frequencies(alpha: float, skills: int) -> np.ndarray:
    """Eq. 4.1, skill by skill."""
    powers = [k ** -(alpha + 1) for k in range(1, skills + 1)]
    return np.array(powers) / math.fsum(powers)


def strength(S: float, lr: float, R0: float, share: np.ndarray, T: float) -> np.ndarray:
    """Eq. 4.11, as printed."""
    return np.asarray(S / (1 + (S / R0 - 1) * np.exp(-2 * lr * share * S * T)))


def plain_loss(m: Multilinear, T: float, N: int) -> float:
    """Eq. 4.17 for endless data, every skill by itself."""
    P = frequencies(m.alpha, m.skills)
    left = 1 / (1 + np.exp(np.minimum(2 * m.lr * P * m.target * T, 700)) / (m.target / m.initial - 1))
    return float(m.target**2 / 2 * (P[:N] @ left[:N] ** 2 + P[N:].sum()))


@pytest.mark.parametrize("alpha", [0.1, 0.6, 0.9, 2.0])
@pytest.mark.parametrize("N", [1, 999, 1001, 1040, 30_000, 200_000])
def test_few_points_stand_for_very_many_skills(alpha: float, N: int) -> None:
    m = Multilinear(alpha, 200_000, 5.0, 0.5, 0.01)
    times = 10 ** np.linspace(-1, 6 * (1 + alpha), 12)
    losses = np.asarray(m.loss(T=times, N=N))
    for T, value in zip(times, losses, strict=True):
        expected = plain_loss(m, float(T), N)
        assert abs(value - expected) <= 1e-12 * expected + 12.5e-32
    k, w = powerlaw.grouped(N)
    assert (w > 0).all()
    np.testing.assert_allclose([w.sum(), w @ k, w @ k**2], [N, N * (N + 1) / 2, N * (N + 1) * (2 * N + 1) / 6], rtol=1e-12)
    np.testing.assert_allclose(m.law.frequency(np.arange(1, 9)), frequencies(alpha, 200_000)[:8], rtol=1e-12)


def test_what_is_never_seen_and_what_is_not_there() -> None:
    """Eqs. 4.28 and 4.36 skill by skill, and the fine print: both cost S^2 / 2, whatever the strength at the start."""
    m = Multilinear(0.6, 4, 5.0, 1.0, 0.5)
    P = frequencies(0.6, 4)
    for D in (0, 1, 7, 100):
        assert m.loss(D=D) == pytest.approx(12.5 * math.fsum(P * (1 - P) ** D), rel=1e-12)
        assert m.loss(T=1e6, D=D) == pytest.approx(m.loss(D=D), rel=1e-12)
    assert m.loss(N=2) == pytest.approx(12.5 * P[2:].sum(), rel=1e-12)
    assert m.loss(N=0) == pytest.approx(12.5)
    assert m.loss(N=9) == m.loss() == 0
    assert m.loss(T=0.0) == pytest.approx((5 - 0.5) ** 2 / 2)
    assert m.loss_of([3, 0, 1, 0]) == pytest.approx(12.5 * (P[1] + P[3]))
    assert m.loss_of([3, 0, 1, 0], N=1) == pytest.approx(12.5 * P[1:].sum())
    assert Multilinear(0.6, 1).loss(D=3) == pytest.approx(0, abs=1e-30)
    assert Multilinear(0.6, 1).loss(T=2.0, D=3) == pytest.approx(Multilinear(0.6, 1).loss(T=2.0))


def test_the_mean_over_data_sets_is_the_mean_over_every_one() -> None:
    """At a finite time: all 3^4 sequences of four examples, each with its probability."""
    m = Multilinear(0.6, 3, 5.0, 0.3, 0.01)
    P = frequencies(0.6, 3)
    for T, N in ((0.7, 3), (5.0, 3), (5.0, 2)):
        expected = 0.0
        for sequence in itertools.product(range(3), repeat=4):
            counts = np.bincount(sequence, minlength=3)
            expected += float(np.prod(P[list(sequence)])) * m.loss_of(counts, T, N=N)
        assert m.loss(T=T, D=4, N=N) == pytest.approx(expected, rel=1e-10)
    for D in (2000, 3_000_000):  # more data: the loss of endless data
        assert abs(m.loss(T=5.0, D=D) / m.loss(T=5.0) - 1) < 60 / D  # type: ignore[operator]


@pytest.mark.parametrize("skills", [5, 300])
def test_monte_carlo_over_data(skills: int) -> None:
    m, rng = Multilinear(0.6, skills, 5.0, 1.0, 0.01), np.random.default_rng(0)
    losses = [[m.loss_of(rng.multinomial(50, frequencies(0.6, skills)), T) for _ in range(225)] for T in (1.0, math.inf)]
    for T, drawn in zip((1.0, math.inf), losses, strict=True):
        assert abs(np.mean(drawn) - m.loss(T=T, D=50)) < 4 * np.std(drawn) / 15


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([0.1, 0.5, 1.0, 2.5]), st.integers(1, 30), st.sampled_from([0.3, 1.0, 5.0]), st.sampled_from([0.01, 1.0]),
       st.sampled_from([1e-4, 0.2]), st.integers(0, 100))
def test_laws(alpha: float, skills: int, S: float, lr: float, share: float, seed: int) -> None:
    m = Multilinear(alpha, skills, S, lr, share * S)
    T = np.array([0.0, 0.3, 2.0, 30.0, 500.0])
    R = np.asarray(m.skill_strength(T))
    P = frequencies(alpha, skills)
    for j, t in enumerate(T):
        np.testing.assert_allclose(R[:, j], strength(S, lr, share * S, P, t), rtol=1e-9)
        assert m.loss(T=float(t)) == pytest.approx(float(P @ (S - R[:, j]) ** 2) / 2, rel=1e-9, abs=1e-15 * S**2)
        np.testing.assert_allclose(m.skill_strength(float(t)), R[:, j])
    assert (np.diff(R, axis=1) >= 0).all()  # in time
    assert (np.diff(R, axis=0) <= 1e-15 * S).all()  # frequent skills first
    np.testing.assert_allclose(Multilinear(alpha, skills, S, 2 * lr, share * S).skill_strength(T / 2), R, rtol=1e-10)
    np.testing.assert_allclose(Multilinear(alpha, skills, 3 * S, lr / 3, 3 * share * S).skill_strength(T), 3 * R, rtol=1e-10)
    counts = np.random.default_rng(seed).multinomial(20, P)
    given_counts = np.asarray(m.skill_strength(T, counts))
    np.testing.assert_allclose(given_counts, m.skill_strength(T, 3 * counts, 60))
    np.testing.assert_allclose(given_counts[counts == 0], share * S)
    assert m.loss(D=10) >= m.loss(D=20)  # type: ignore[operator]  # in data, at the end of time
    assert m.loss(T=2.0, N=skills // 2) >= m.loss(T=2.0) - 1e-15 * S**2  # type: ignore[operator]  # in parameters
    eps = 0.3
    at = np.asarray(m.emergent_time(eps))
    np.testing.assert_allclose([m.skill_strength(t)[k] for k, t in enumerate(at)], max(eps, share) * S, rtol=1e-9)
    later = at + np.asarray(m.saturation_time(eps))
    if share < eps:
        np.testing.assert_allclose([m.skill_strength(t)[k] for k, t in enumerate(later)], (1 - eps) * S, rtol=1e-9)


def test_lists_of_resources_go_together() -> None:
    m = Multilinear(0.6, 50)
    both = m.loss(T=[1.0, 2.0, 3.0], N=[10, 20, 30])
    np.testing.assert_allclose(both, [m.loss(T=t, N=n) for t, n in ((1.0, 10), (2.0, 20), (3.0, 30))])
    np.testing.assert_allclose(m.loss(D=[3, 9], N=5), [m.loss(D=3, N=5), m.loss(D=9, N=5)])
    tensor = m.loss(T=torch.tensor([1.0, 2.0]))
    assert isinstance(tensor, torch.Tensor)
    assert isinstance(m.skill_strength(torch.tensor([1.0])), torch.Tensor)
    np.testing.assert_allclose(tensor, m.loss(T=[1.0, 2.0]))


def slope(x: Any, y: Any) -> float:
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.6, 0.9])
def test_exponents_and_prefactors(alpha: float) -> None:
    """Slopes of a million skills within .005 of theory after the correction, and the prefactors within 1 %."""
    m = Multilinear(alpha, 10**6, 5.0, 1.0, 0.01)
    e, c = m.exponents, m.prefactors
    k = np.geomspace(30, 10**6 ** 0.55, 12)
    P = m.law.frequency(k)
    times, data, sizes = math.log(499) / (10 * P), np.round(1 / P), np.round(k)
    rest = m.finite_size()
    assert rest == pytest.approx(12.5 * m.law.A / alpha * 10 ** (-6 * alpha))
    best = m.frontier(k * times)
    for x, y, exponent, constant in ((times, m.loss(T=times), e.time, c.time), (data, m.loss(D=data), e.data, c.data),
                                     (sizes, m.loss(N=sizes), e.parameters, c.parameters),
                                     (k * times, best.loss, e.compute, c.compute)):
        y = np.asarray(y)
        assert abs(slope(x, y + rest) - exponent) < 0.005
        assert abs(slope(x, y) - exponent) < (0.12 if alpha < 0.2 else 0.03 if alpha < 0.5 else 0.006)
        np.testing.assert_allclose((y + rest)[-6:], constant * x[-6:] ** exponent, rtol=0.01)
    assert abs(slope(k * times, best.parameters) - e.optimal_parameters) < 0.01
    np.testing.assert_allclose(best.parameters[-3:], c.optimal_parameters * (k * times)[-3:] ** e.optimal_parameters, rtol=0.05)
    np.testing.assert_allclose(best.parameters * best.time, k * times)
    assert e.optimal_time + e.optimal_parameters == pytest.approx(1)
    assert c.optimal_time * c.optimal_parameters == pytest.approx(1)


def test_the_correction_is_right_in_sign_and_size() -> None:
    """T dL/dT of 50,000 skills at alpha = .1, where the uncorrected law is off by more than a half (Fig. C.1)."""
    m = Multilinear(0.1, 50_000, 5.0, 1.0, 0.01)
    T = 3e3
    low, here, high = (float(m.loss(T=T * f)) for f in (0.999, 1.0, 1.001))  # type: ignore[arg-type]
    measured = (high - low) / (2 * 0.001)
    assert abs(measured / (m.exponents.time * (here + m.finite_size())) - 1) < 0.01
    assert measured / (m.exponents.time * here) > 1.5


def test_prefactors_from_a_start_beyond_a_half() -> None:
    """Skills are half learned before the start then; the law is the same."""
    for initial in (2.5, 4.0):
        m = Multilinear(0.6, 10**7, 5.0, 1.0, initial)
        T, missing = 1e5, m.finite_size() * (1 - initial / 5) ** 2  # a skill that is not learned costs (S - R(0))^2 / 2 here
        assert m.loss(T=T) + missing == pytest.approx(m.prefactors.time * T**m.exponents.time, rel=1e-3)


def test_prefactors_of_the_linear_model_in_closed_form() -> None:
    """exp(-2 lr y) has a Gamma function for its integral; and the same exponents."""
    m = Linear(0.6, 10**6, 5.0, 0.7)
    power = 0.6 / 1.6
    expected = 12.5 * m.law.A ** (1 - power) / 1.6 * math.gamma(power) * (2 * 0.7) ** -power
    assert m.prefactors.time == pytest.approx(expected, rel=1e-7)
    T = np.geomspace(1e3, 1e5, 8)
    rest = Multilinear(0.6, 10**6, 5.0).finite_size()
    assert abs(slope(T, np.asarray(m.loss(T=T)) + rest) - m.exponents.time) < 0.005


def test_the_linear_model_has_no_time_of_emergence() -> None:
    """At half the time that a skill takes to its half, the linear model has .29 of it and the multilinear one 4 %."""
    linear, multi = Linear(0.6, 3, 5.0, 1.0), Multilinear(0.6, 3, 5.0, 1.0, 0.01)
    P = linear.law.frequency(np.arange(1, 4))
    half = math.log(2) / P
    np.testing.assert_allclose([linear.skill_strength(t)[k] / 5 for k, t in enumerate(half)], 0.5)
    np.testing.assert_allclose([linear.skill_strength(t / 2)[k] / 5 for k, t in enumerate(half)], 1 - 0.5**0.5)
    late = np.asarray(multi.emergent_time(0.5))
    assert max(multi.skill_strength(t / 2)[k] / 5 for k, t in enumerate(late)) < 0.05
    for D in (1, 10):  # but the same in data
        assert linear.loss(D=D) == multi.loss(D=D)
    assert linear.loss(N=2) == multi.loss(N=2)


@pytest.mark.parametrize(("change", "sentence"), [
    ({"alpha": 0.0}, "only for alpha above 0 does the loss follow powers"),
    ({"alpha": math.nan}, "only for alpha above 0"),
    ({"skills": 0}, "skills=0; a whole number, at least 1, is needed"),
    ({"skills": 2.5}, "skills=2.5; a whole number"),
    ({"target": -1.0}, "target=-1.0: a number above 0 is needed"),
    ({"lr": 0.0}, "lr=0.0: a number above 0 is needed"),
    ({"target": 1e200}, r"target=1e\+200 with lr=1: losses go with the square of the target"),
    ({"lr": 1e300}, r"target=5 with lr=1e\+300: losses go with the square of the target and rates with lr times target"),
    ({"initial": 0.0}, "From 0 the flow never leaves"),
    ({"initial": -0.1}, "lies between 0 and the target, 5"),
    ({"initial": 5.0}, "lies between 0 and the target, 5"),
])
def test_what_is_no_model_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        Multilinear(**{"alpha": 0.6, "skills": 3, "target": 5.0, "lr": 1.0, "initial": 0.01} | change)
    if "initial" not in change:
        with pytest.raises(SelectionError, match=sentence):
            Linear(**{"alpha": 0.6, "skills": 3, "target": 5.0, "lr": 1.0} | change)


def test_what_cannot_be_asked_is_refused() -> None:
    m = Multilinear(0.6, 3)
    for options, sentence in (({"T": -1.0}, "T = -1.0: a number from 0 on"), ({"T": math.nan}, "T = nan"),
                              ({"N": math.nan}, "N=nan: whole numbers"), ({"D": [1.0, -2.0]}, "D = "),
                              ({"N": -1}, "N=-1: whole numbers of basis functions"),
                              ({"N": 1.5}, "N=1.5: whole numbers"), ({"T": 1.0, "D": 2.5}, "D is a whole number"),
                              ({"T": [1.0, 2.0], "N": [1, 2, 3]}, "those that are lists are of one length"), ({"T": []}, "T = ")):
        with pytest.raises(SelectionError, match=sentence):
            m.loss(**options)  # type: ignore[arg-type]
    with pytest.raises(SelectionError, match="give counts, or use loss"):
        m.skill_strength(1.0, D=10)
    for counts, D in (([1, 2], None), ([1, 2, -1], None), ([0, 0, 0], None), ([5, 5, 5], 10)):
        with pytest.raises(SelectionError, match="no more than D together"):
            m.skill_strength(1.0, counts, D)
    with pytest.raises(SelectionError, match=r"a share of the target between 0 and 0\.5"):
        m.saturation_time(0.6)
    with pytest.raises(SelectionError, match="a share of the target between 0 and 1"):
        m.emergent_time(1.0)
    with pytest.raises(SelectionError, match="N=0; a whole number"):
        m.finite_size(0)
    for T in (-1.0, math.nan):
        with pytest.raises(SelectionError, match=r"T = .*a number from 0 on"):
            m.loss_of([1, 2, 3], T)
