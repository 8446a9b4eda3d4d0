"""Closed forms of alternating gradient flows: linear networks whose inputs fall into blocks, the frequency that is its own mirror
image, waiting times of heads, sizes at the ends of float64, tensors on devices, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from richter.core import SelectionError
from richter.linalg import haar
from richter.theory import agf, linear_jumps
from richter.theory.arrays import normal
from richter.theory.flows import flow

Numbers = NDArray[np.float64]


def conjecture(S: Numbers, C: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Jump times, drops and strengths of one block, as the formula has them, in numpy."""
    mu, U = np.linalg.eigh(C @ np.linalg.inv(S) @ C.T)
    mu, U = mu[::-1], U[:, ::-1]
    rank = int((mu > 1e-12 * mu[0]).sum())
    values = [np.linalg.svd(C - U[:, :k] @ U[:, :k].T @ C, compute_uv=False) for k in range(rank)]
    tau = [0.0]
    for k in range(1, rank + 1):
        earlier = sum(values[i][k - i - 1] * (tau[i + 1] - tau[i]) for i in range(k - 1))
        tau.append(tau[k - 1] + (1 - earlier) / values[k - 1][0])
    return np.array(tau[1:]), mu[:rank] / 2, np.array([v[0] for v in values])


def merged(*blocks: tuple[Numbers, Numbers, Numbers]) -> tuple[Numbers, Numbers, Numbers]:
    """Times, levels and strengths of blocks that learn each for itself."""
    times, drops, strengths = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    order = np.argsort(times, kind="stable")
    return times[order], np.append(np.cumsum(drops[order][::-1])[::-1], 0.0), strengths[order]


def random_block(rng: np.random.Generator, m: int, size: float) -> tuple[Numbers, Numbers]:
    A = rng.standard_normal((m + 3, m))
    return A.T @ A / (m + 3) + 0.2 * np.eye(m), size * rng.standard_normal((m, m))


def block_diagonal(*blocks: Numbers) -> Numbers:
    from scipy.linalg import block_diag
    return np.asarray(block_diag(*blocks))


# ------------------------------------------------------------------------------------------------ linear networks


@pytest.mark.parametrize(("S", "C", "times", "levels"), [
    ([10.0, 0.1], [3.0, 1.0], [1 / 3, 1.0], [5.45, 5.0, 0.0]), ([4.0, 1.0], [3.0, 2.0], [1 / 3, 0.5], [3.125, 2.0, 0.0]),
    ([1.0, 1.0], [2.0, 2.0], [0.5, 0.5], [4.0, 2.0, 0.0])])
def test_a_strong_mode_that_explains_little_comes_first(S: Any, C: Any, times: Any, levels: Any) -> None:
    """It cannot turn to the other, because nothing leads there: the flow rests at the level without it."""
    stairs = agf.linear(np.diag(S), np.diag(C))
    np.testing.assert_allclose(stairs.times, times, rtol=1e-12)
    np.testing.assert_allclose(stairs.levels, levels, rtol=1e-12, atol=1e-12)
    middle = [times[0] / 2, (times[0] + times[1]) / 2, 2 * times[1]] if times[0] < times[1] else [times[0] / 2, 2 * times[0]]
    np.testing.assert_allclose(agf.simulate_linear(np.diag(S), np.diag(C), 6, 30.0, middle), stairs.loss(middle), atol=0.01)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**20), d=st.integers(1, 8), c=st.integers(1, 8))
def test_commuting_moments_are_learned_by_singular_value(seed: int, d: int, c: int) -> None:
    rng = np.random.default_rng(seed)
    rank = min(c, d)
    V, U, s, variances = haar(d, rng), haar(c, rng), rng.uniform(0.3, 3, rank), rng.uniform(0.05, 8, d)
    stairs = agf.linear((V * variances) @ V.T, (U[:, :rank] * s) @ V[:, :rank].T)
    order = np.argsort(-s)
    np.testing.assert_allclose(stairs.times, 1 / s[order], rtol=1e-9)
    np.testing.assert_allclose(-np.diff(stairs.levels), (s**2 / variances[:rank] / 2)[order], rtol=1e-9)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**20), sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_every_block_learns_as_if_it_were_alone(seed: int, sizes: list[int]) -> None:
    """Also one block alone, whose formula is that of the paper."""
    rng = np.random.default_rng(seed)
    parts = [random_block(rng, m, rng.uniform(0.5, 3)) for m in sizes]
    V, U = haar(sum(sizes), rng), haar(sum(sizes), rng)
    S, C = (block_diagonal(*(part[i] for part in parts)) for i in (0, 1))
    S, C = V @ S @ V.T, U @ C @ V.T
    times, levels, strengths = merged(*(conjecture(*part) for part in parts))
    stairs = agf.linear((S + S.T) / 2, C)
    np.testing.assert_allclose(linear_jumps.modes((S + S.T) / 2, C).strengths, strengths, rtol=1e-7)
    np.testing.assert_allclose(stairs.times, times, rtol=1e-7)
    np.testing.assert_allclose(stairs.levels, levels, rtol=1e-7, atol=1e-9)
    assert sorted(V.shape[1] for V in linear_jumps.blocks(torch.tensor(S), torch.tensor(C))) == sorted(sizes)


def test_blocks_of_the_flow() -> None:
    """Two blocks of two modes, turned; the one of larger singular values explains less of the loss, and is learned first. Levels
    are those of the flow where jumps are apart; those of the best functions of rank k are not."""
    rng = np.random.default_rng(0)
    turned, V, U = np.array([[1.0, 0.4], [0.4, 0.7]]), haar(4, rng), haar(4, rng)
    parts = [(8 * turned, np.array([[3.0, 0.5], [0.0, 1.5]])), (0.2 * turned, np.array([[0.8, 0.2], [0.0, 0.4]]))]
    S, C = (block_diagonal(*(part[i] for part in parts)) for i in (0, 1))
    S, C = V @ S @ V.T, U @ C @ V.T
    S = (S + S.T) / 2
    stairs = agf.linear(S, C)
    ends = np.concatenate([[0.0], stairs.times, [1.5 * float(stairs.times[-1])]])
    t, levels = (ends[:-1] + ends[1:]) / 2, np.asarray(stairs.levels)
    np.testing.assert_allclose(agf.simulate_linear(S, C, 8, 32.0, t), levels, rtol=2e-3, atol=2e-3 * float(levels[0]))
    assert np.abs(merged(conjecture(S, C))[1] - levels).max() > 0.1 * float(levels[0])


def test_inputs_that_go_with_nothing_link_modes() -> None:
    """The third input has no correlation with y; but it goes with both others, and through it a neuron turns to the best."""
    S = np.array([[4.0, 0.0, 0.6], [0.0, 1.0, 0.6], [0.6, 0.6, 1.0]])
    C = np.array([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    assert len(linear_jumps.blocks(torch.tensor(S), torch.tensor(C))) == 1
    stairs = agf.linear(S, C)
    np.testing.assert_allclose(stairs.levels, merged(conjecture(S, C))[1], rtol=1e-10, atol=1e-12)
    apart = np.diag([4.0, 1.0, 1.0])
    assert len(linear_jumps.blocks(torch.tensor(apart), torch.tensor(C))) == 3
    np.testing.assert_allclose(agf.linear(apart, C).times, [1 / 3, 1 / 2], rtol=1e-12)


def test_inputs_that_do_not_vary_are_left_out() -> None:
    S, C = np.diag([2.0, 0.0, 1.0]), np.array([[3.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    stairs = agf.linear(S, C)
    np.testing.assert_allclose(stairs.times, [1 / 3, 1], rtol=1e-12)
    np.testing.assert_allclose(stairs.levels, [9 / 4 + 1 / 2, 1 / 2, 0], rtol=1e-12)


def test_jumps_that_merge_are_seen_in_their_merged_order() -> None:
    """Strengths 3, 1 and 2.9: the first and the third mode of the blocks are neighbours."""
    with pytest.warns(UserWarning, match=r"jumps 1 and 2 come at 2.667 and 2.759"):
        agf.predict_linear(np.diag([10.0, 0.1, 1.0]), np.diag([3.0, 1.0, 2.9]), 3, 8.0, [0.1])


# ------------------------------------------------------------------------------------------------ modular addition


def utility(template: Numbers, u: Numbers, v: Numbers, w: Numbers) -> float:
    """E (u.x_a + v.x_b)^2 w.x_{a+b}, pair by pair."""
    p = len(template)
    x = [np.roll(template, a) for a in range(p)]
    return float(np.mean([(u @ x[a] + v @ x[b]) ** 2 * (w @ x[(a + b) % p]) for a in range(p) for b in range(p)]))


@pytest.mark.parametrize("p", [2, 4, 12])
def test_the_frequency_that_is_its_own_mirror_image(p: int) -> None:
    """The utility of a neuron of this wave in all three blocks, of equal norms, and no other on the sphere has more."""
    wave = (-1.0) ** np.arange(p)
    best = wave / math.sqrt(3 * p)
    out = agf.modular(1.5 * wave)
    assert out.frequencies.tolist() == [p // 2]
    assert out.utilities[0] == pytest.approx(utility(1.5 * wave, best, best, best), rel=1e-12)
    np.testing.assert_allclose(out.levels, [1.5**2, 0.0], atol=1e-12)
    rng = np.random.default_rng(p)
    for _ in range(50):
        theta = rng.standard_normal((3, p))
        assert utility(1.5 * wave, *(theta / np.linalg.norm(theta))) <= float(out.utilities[0]) + 1e-12


def test_it_may_come_before_a_larger_coefficient() -> None:
    """|x_6| = 12 and |x_1| = 13.2: 12^3 sqrt(2) is more than 13.2^3. Two neurons fit it, one does not."""
    n = np.arange(12)
    alone = np.cos(np.pi * n)
    out = agf.modular(alone + 2.2 * np.cos(2 * np.pi * n / 12 + 0.3))
    assert out.frequencies.tolist() == [6, 1]
    np.testing.assert_allclose(out.levels, [1 + 2.42, 2.42, 0], atol=1e-12)
    x, y = (np.asarray(a) for a in agf.modular_pairs(alone))
    c = alone / np.linalg.norm(alone)
    a, b = (x[:, :12] @ c) + (x[:, 12:] @ c), (x[:, :12] @ c) - (x[:, 12:] @ c)
    both = (a**2 - b**2)[:, None] * c
    np.testing.assert_allclose(both * (y * both).sum() / (both**2).sum(), y, atol=1e-12)


# ------------------------------------------------------------------------------------------------ attention


def heads(lam: Numbers, length: int, count: int, alpha: float, t: Numbers, seed: int) -> tuple[Numbers, Numbers]:
    """Norms [t, count] and losses [t] along the flow of heads v k q^T."""
    S, N = torch.diag(torch.from_numpy(lam)), length
    E = N * (N + 1) * S @ S + N * S.trace() * S
    start = [alpha * normal(*shape, seed=seed + i) for i, shape in enumerate(((count,), (count, len(lam)), (count, len(lam))))]

    def velocity(state: list[Tensor]) -> list[Tensor]:
        v, k, q = state
        pull = N * S @ S - E @ torch.einsum("h,hi,hj->ij", v, k, q) @ S
        return [torch.einsum("ij,hi,hj->h", pull, k, q), v[:, None] * (q @ pull.T), v[:, None] * (k @ pull)]

    states = flow(velocity, start, t.tolist(), rtol=1e-7, atol=1e-10)
    norms = [(v**2 + (k**2).sum(1) + (q**2).sum(1)).sqrt().numpy() for v, k, q in states]
    M = [torch.einsum("h,hi,hj->ij", *state) for state in states]
    return np.stack(norms), np.array([float(S.trace() - 2 * N * (S @ m @ S).trace() + (m.T @ E @ m @ S).trace()) / 2 for m in M])


def waited(seed: int) -> tuple[Numbers, Numbers, Numbers]:
    """Of three components: how long each was waited for, at least how long by the norms when the wait began, and by the norms of
    the start. A wait begins where the loss has fallen by all but a hundredth, and the k - 1 largest heads are awake."""
    lam, alpha, length = np.array([1.0, 0.7, 0.5]), 1e-2, 16
    theory = agf.attention(lam, length)
    t = np.linspace(0, 12 / (alpha * length), 1_500)
    norms, loss = heads(lam, length, 4, alpha, t, 100 * seed)
    levels = np.asarray(theory.levels)
    half = [int(np.argmax(loss <= level)) for level in (levels[:-1] + levels[1:]) / 2]
    assert min(half) > 0
    rests = [0, *(int(np.argmax(loss <= level)) for level in 0.01 * levels[:-2] + 0.99 * levels[1:-1])]
    asleep = [np.sort(norms[at])[-1 - k] for k, at in enumerate(rests)]
    gaps = np.array([t[end] - t[begin] for begin, end in zip(rests, half, strict=True)])
    return gaps, np.asarray(theory.waits(asleep)), np.asarray(theory.waits(norms[0].max()))


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=() if seed == 3 else pytest.mark.long) for seed in range(20)])
def test_no_component_comes_before_its_wait_is_over(seed: int) -> None:
    """Of seed 3 both later ones come long before the norms of the start would allow: sleeping heads have grown meanwhile."""
    gaps, least, naive = waited(seed)
    assert (gaps >= least).all()
    assert (least > 0).all()
    assert gaps[0] >= naive[0]
    assert seed != 3 or (gaps[1:] < naive[1:] / 2).all()


def test_waits_are_those_of_one_head() -> None:
    """d n / dt = 3 U n^2 integrated to where v k q has 1 - sqrt(1/2) of what it comes to; a smaller rate takes longer."""
    theory = agf.attention([1.0, 0.5], 8)
    value, top = float(theory.values[0]), float(theory.utilities[0])
    end = flow(lambda n: 3 * top * n**2, np.array([0.02]), [float(theory.waits(0.02)[0])])[0][0]
    assert (end / math.sqrt(3)) ** 3 == pytest.approx((1 - math.sqrt(0.5)) * value, rel=1e-7)
    np.testing.assert_allclose(theory.waits([0.02, 0.03], lr=0.5), 2 * np.asarray(theory.waits([0.02, 0.03])))
    assert float(theory.waits(10.0)[0]) == 0  # such a head is awake


# ------------------------------------------------------------------------------------------------ sizes and devices


@pytest.mark.parametrize("scale", [1e-140, 1e-12, 1e3, 1e140])
def test_diagonal_networks_in_other_units(scale: float) -> None:
    """Times go like 1 / (x y), losses like y^2, coefficients like y / x."""
    rng = np.random.default_rng(1)
    X, y = rng.standard_normal((20, 3)), rng.standard_normal(20)
    (plain, path), (labels, labels_path), (inputs, inputs_path) = agf.diagonal(X, y), agf.diagonal(X, scale * y), agf.diagonal(
        scale * X, y)
    for stairs in (labels, inputs):
        np.testing.assert_allclose(np.asarray(stairs.times) * scale, plain.times, rtol=1e-9)
    np.testing.assert_allclose(np.asarray(labels.levels) / scale / scale, plain.levels, rtol=1e-9)
    np.testing.assert_allclose(inputs.levels, plain.levels, rtol=1e-9)
    np.testing.assert_allclose(np.asarray(labels_path) / scale, path, rtol=1e-9)
    np.testing.assert_allclose(np.asarray(inputs_path) * scale, path, rtol=1e-9)


@pytest.mark.parametrize("scale", [1e-80, 1e80])
def test_other_closed_forms_in_other_units(scale: float) -> None:
    S, C = np.array([[2.0, 0.7], [0.7, 1.0]]), np.diag([3.0, 1.0])
    plain, scaled = agf.linear(S, C), agf.linear(S / scale, scale * C)
    np.testing.assert_allclose(np.asarray(scaled.times) * scale, plain.times, rtol=1e-9)
    np.testing.assert_allclose(np.asarray(scaled.levels) / scale / scale / scale, plain.levels, rtol=1e-9)
    wave = np.cos(np.pi * np.arange(6) / 3)
    one, other = agf.modular(wave), agf.modular(scale * wave)
    np.testing.assert_allclose(np.asarray(other.utilities) / scale / scale / scale, one.utilities, rtol=1e-9)
    lam = np.array([1.0, 0.5])
    np.testing.assert_allclose(np.asarray(agf.attention(scale * lam, 8).levels) / scale, agf.attention(lam, 8).levels, rtol=1e-9)


class Elsewhere(torch.Tensor):
    """A tensor that numpy cannot read, as one on a device: it must be brought home by cpu()."""

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        return self.as_subclass(torch.Tensor)

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert a tensor of a device to numpy")

    __array__ = numpy  # type: ignore[assignment]


def elsewhere(*values: Any) -> list[Any]:
    return [torch.tensor(np.asarray(v), dtype=torch.float64).as_subclass(Elsewhere) for v in values]


@pytest.mark.parametrize("call", [
    lambda: agf.diagonal(*elsewhere(np.eye(2), [2.0, 1.0])).coefficients,
    lambda: agf.simulate_diagonal(*elsewhere(np.eye(2), [2.0, 1.0]), 8.0, [0.1]),
    lambda: agf.linear(*elsewhere(np.eye(2), np.diag([2.0, 1.0]))).times,
    lambda: agf.simulate_linear(*elsewhere(np.eye(2), np.diag([2.0, 1.0])), 2, 8.0, [0.1]),
    lambda: agf.attention(*elsewhere([2.0, 1.0]), 8).waits(*elsewhere([0.1, 0.1])),
    lambda: agf.attention_flow(*elsewhere([1.0, 0.5]), 8, 2, 0.01, [0.01])[1],
    lambda: agf.modular(*elsewhere([1.0, -1.0, 0.0])).utilities,
    lambda: agf.simulate_modular(*elsewhere([1.0, -1.0, 0.0]))[1],
    lambda: agf.predict_diagonal(*elsewhere(np.eye(2), [2.0, 1.0]), 32.0, [0.1]),
    lambda: agf.predict_linear(*elsewhere(np.eye(2), np.diag([2.0, 1.0])), 2, 32.0, [0.1]),
])
def test_tensors_on_devices(call: Any) -> None:
    assert isinstance(call(), Tensor)


# ------------------------------------------------------------------------------------------------ what is refused

EYE, X, Y = np.eye(2), np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), np.array([1.0, 2.0, 3.0])
WAVE = np.array([1.0, -1.0, 0.0])


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda: agf.linear([[1.0, 5.0], [0.0, 1.0]], EYE), "Sxx is not symmetric: the second moments"),
    (lambda: agf.linear(np.diag([1.0, -1.0]), EYE), "Sxx has the eigenvalue -1: second moments"),
    (lambda: agf.linear(np.diag([1.0, 0.0]), EYE), "Syx has a part along inputs whose variance is 0"),
    (lambda: agf.linear(EYE, np.eye(3)), r"Syx has shape \(3, 3\) for \[c, d\], so d = 3; but d = 2 in Sxx"),
    (lambda: agf.linear(EYE, 1e200 * EYE), r"Syx is at most 1e\+200: losses go with squares of it"),
    (lambda: agf.linear(EYE, EYE, threshold=0.0), "threshold=0.0: a threshold, a number above 0"),
    (lambda: agf.predict_linear(EYE, EYE, 1, 8.0, [1.0]), "width=1, and there are 2 modes: a neuron holds one"),
    (lambda: agf.predict_linear(EYE, EYE, 0, 8.0, [1.0]), "width=0; a whole number, at least 1"),
    (lambda: agf.predict_linear(EYE, EYE, 2, -5.0, [1.0]), r"log_inverse=-5.0: log\(1 / alpha\) of an alpha below 1"),
    (lambda: agf.predict_linear(EYE, np.diag([3.0, 1.0]), 2, 32.0, [-1.0]), "t contains -1: the flow starts at 0"),
    (lambda: agf.simulate_linear(EYE, EYE, 0, 8.0, [1.0]), "width=0; a whole number"),
    (lambda: agf.simulate_linear(EYE, EYE, 2, 8.0, [1.0], seed=-1), "seed=-1; a whole number, at least 0"),
    (lambda: agf.simulate_linear(EYE, np.eye(3), 2, 8.0, [1.0]), "so d = 3; but d = 2 in Sxx"),
    (lambda: agf.diagonal(X, Y, threshold=math.nan), "threshold=nan: a threshold"),
    (lambda: agf.diagonal(X, 1e200 * Y), "losses from data of such a size leave the range of float64"),
    (lambda: agf.diagonal(1e-200 * X, 1e-150 * Y), "times from data of such a size leave the range of float64"),
    (lambda: agf.diagonal(X, np.stack([Y, Y], 1)), r"y has shape \(3, 2\); \[n\] is needed"),
    (lambda: agf.predict_diagonal(X, Y, -5.0, [1.0]), r"log_inverse=-5.0: log\(1 / alpha\)"),
    (lambda: agf.predict_diagonal(X, Y, "a", [1.0]), r"log_inverse='a': log\(1 / alpha\)"),
    (lambda: agf.simulate_diagonal(X, Y[:2], 8.0, [1.0]), "so n = 2; but n = 3 in X"),
    (lambda: agf.simulate_diagonal(X, 1e200 * Y, 8.0, [1.0]), r"y is at most 3e\+200: losses go with squares of it"),
    (lambda: agf.attention([1.0], 0), "length=0; a whole number"),
    (lambda: agf.attention([1.0], 8, extra=math.nan), "extra=nan: a number above 0 is needed"),
    (lambda: agf.attention(1.0, 8), r"eigenvalues has shape \(\); \[d\] is needed"),
    (lambda: agf.attention([1e200], 8), r"eigenvalues is at most 1e\+200"),
    (lambda: agf.attention([1.0, 0.5], 8).waits(-0.1), "norms reach -0.1: those of sleeping heads, above 0"),
    (lambda: agf.attention([1.0, 0.5], 8).waits(0.0), "a head of norm 0 never wakes"),
    (lambda: agf.attention([1.0, 0.5], 8).waits([0.1] * 3), r"norms has shape \(3,\) for \[m\], so m = 3; but m = 2"),
    (lambda: agf.attention([1.0, 0.5], 8).waits(0.1, lr=0), "lr=0: a rate, a number above 0"),
    (lambda: agf.predict_attention([1.0, 0.5], 8, 1, 0.1), "heads=1, and there are 2 components: a head holds one"),
    (lambda: agf.predict_attention([1.0, 0.5], 8, 2, 0.0), "alpha=0.0: the scale of initial weights"),
    (lambda: agf.simulate_attention([1.0, 0.5], 8, 0, 0.1), "heads=0; a whole number"),
    (lambda: agf.attention_flow([1.0, -0.5], 8, 2, 0.1, [1.0]), "eigenvalues reach -0.5: those of a covariance"),
    (lambda: agf.attention_flow([1.0, 0.5], 8, 2, -0.1, [1.0]), "alpha=-0.1: the scale of initial weights"),
    (lambda: agf.attention_flow([1.0, 0.5], 8, 2, 0.1, [1.0], seed=-1), "seed=-1; a whole number"),
    (lambda: agf.modular(np.zeros(5)), "the template is zero: it has no frequency"),
    (lambda: agf.modular([0.0]), "the template is zero: it has no frequency"),
    (lambda: agf.modular(1e200 * WAVE), r"template is at most 1e\+200: losses go with squares of it"),
    (lambda: agf.simulate_modular(np.zeros(5)), "the template is zero: it has no frequency"),
    (lambda: agf.simulate_modular(WAVE, seed=-1), "seed=-1; a whole number"),
    (lambda: agf.predict_modular(WAVE, share=0.0), "share=0.0: a share, a number above 0"),
    (lambda: agf.modular_pairs([[1.0]]), r"template has shape \(1, 1\); \[p\] is needed"),
])
def test_what_is_refused(call: Any, sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        call()


def test_moments_that_nearly_commute_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="a share of 0.0033 of the mode that it is to learn: moments nearly commute"):
        agf.linear([[10.0, 0.01], [0.01, 0.1]], np.diag([3.0, 1.0]))
