"""Kernels of many outputs from random combinations of each example's own: against their definitions, and against the truth."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracles
import richter
from richter.core import WHOLE, Mark
from richter.instrument.cotangents import every_output, random_outputs
from richter.instrument.evaluate import jackknife
from richter.instrument.statistics import feature_matrices as pairs
from richter.instrument.statistics import feature_matrices as weights
from richter.instrument.statistics import moments
from richter.instrument.statistics import output_sketch as drawn
from richter.models import GPT

ALL = ["tangent_cka", "tangent_stable_rank", "tangent_correlation"]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def talker() -> tuple[nn.Module, Tensor, Tensor]:
    """3 tokens of 30 classes: 90 outputs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 30)).double(), draw(10, 3, 5), torch.arange(30).reshape(10, 3)


def own(snap: richter.Snapshot, measure: str, layer: str) -> float:
    """The sketch's own standard error, as the row says it."""
    return float(re.findall(r"sketch error (\S+)$", snap.note(measure, layer))[0])


def seen(model: nn.Module, probe: richter.Probe, v: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, drawn.Small]:
    """What the statistic knows of each module, with eigenvectors to rounding."""
    monkeypatch.setattr(drawn, "CLOSE", 1e-12)
    monkeypatch.setattr(drawn, "ROUGH", 1e-12)
    made: list[drawn._Drawn] = []
    real = drawn._Drawn.value
    monkeypatch.setattr(drawn._Drawn, "value", lambda self, *rest: made.append(self) or real(self, *rest))  # type: ignore[func-returns-value]
    richter.measure(model, probe, ALL, cotangents=random_outputs(v, 3))
    return made[0].known


@pytest.mark.parametrize("masked", [False, True])
def test_what_is_known_of_small_matrices_is_its_definition(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = talker()
    mask = torch.ones(10, 3, dtype=torch.bool)
    if masked:
        mask[::3, 2] = False
    small = seen(model, richter.Probe(x, y, mask=mask if masked else None), 64, monkeypatch)
    K, Y = oracles.tangent_kernels(model, x), F.one_hot(y, 30).double().flatten(1)
    K[WHOLE] = sum(K.values())
    keep = mask[:, :, None].expand(-1, -1, 30).flatten(1)
    S = random_outputs(64, 3).signs(range(10), 90, range(32)).double() / 32 ** 0.5
    examples = torch.arange(10)
    for name, mine in small.items():
        for left, known in [(examples, mine.value), *((examples[examples % 8 != g], mine.without_examples(g)) for g in (0, 5))]:
            counted = keep[left].flatten()
            C = torch.diag(counted.double()) - torch.outer(counted.double(), counted.double()) / counted.sum()
            rows = len(left) * 90
            centred = C @ K[name][left][:, :, left].reshape(rows, rows) @ C
            labels = C @ Y[left].flatten()
            M = oracles.drawn_matrix(centred.reshape(len(left), 90, len(left), 90), S[:, left])
            assert known.norm == pytest.approx(oracles.drawn_norm(M), rel=1e-8)
            assert known.quadratic == pytest.approx((labels @ centred @ labels).item(), rel=1e-8)
            assert known.energy == pytest.approx((labels @ labels).item(), rel=1e-8)
            largest = torch.linalg.eigvalsh(M.reshape(32 * len(left), -1))[-1].item()
            if len(left) == 10:
                whole, top = M, largest
            elif mine.bracket.stands_out and name != "2":
                assert known.top == pytest.approx(mine.value.top * largest / top, rel=1e-8)
        group = torch.arange(32) % 8
        above, below = oracles.drawn_bracket(whole, group)
        assert mine.bracket.above == pytest.approx(above, rel=1e-8)
        assert mine.bracket.below == pytest.approx(below, rel=1e-8)
        fewer = whole[group != 2][:, :, group != 2] * 32 / 28
        assert mine.without_draws(2).norm == pytest.approx(oracles.drawn_norm(fewer), rel=1e-8)
        if mine.bracket.stands_out and name != "2":
            assert mine.value.top == pytest.approx(math.sqrt(sum(above) * sum(below)) / 8, rel=1e-8)
            others = [d for g, d in enumerate(below) if g != 2]
            assert mine.without_draws(2).top == pytest.approx(math.sqrt(above[2] * sum(others) / 7), rel=1e-8)
            turned = [mine.turned(i).top for i in (0, 1)]
            assert jackknife(turned) == pytest.approx(mine.value.top * mine.bracket.turn, rel=1e-8)


def test_eigenvalues_that_are_mixed_in_are_counted() -> None:
    """Those near the largest one by one, the others by their sums: as if all were known, but for third powers."""
    values = torch.cat([torch.tensor([1.0, 0.9, 0.8, 0.6]), torch.full((60,), 0.05)]).double()
    Q = torch.linalg.qr(draw(64, 64))[0]
    M = Q * values @ Q.T
    found = drawn.top(M, torch.ones(64).double(), draw(64), 1e-12)
    assert found.value == pytest.approx(1, rel=1e-10)
    q = values[1:] / (1 - values[1:])
    directions, others = drawn.mixed(M, found)
    assert directions == pytest.approx((q.sum() ** 2 / q.square().sum()).item(), rel=0.01)
    assert sorted(others.tolist())[-3:] == pytest.approx([0.6, 0.8, 0.9], rel=1e-6)


def bracket(M: Tensor, n: int, m: int) -> drawn.Bracket:
    nothing = drawn.SketchSums(torch.ones(n).double(), torch.zeros(m, n).double(), None, None)
    small = drawn.Small(torch.zeros(m + 1, n, m + 1, n).double(), nothing, torch.arange(m) % 6, torch.arange(n) % 8)
    small.__dict__["M"] = M
    return small.bracket


def test_one_of_many_equal_eigenvalues_does_not_stand_out() -> None:
    """Forty of them, and 480 rows: the bracket alone would say a fifth more."""
    n, k, m = 40, 60, 12
    U = torch.linalg.qr(draw(n * k, 40))[0].view(n, k, -1)
    for seed in range(6):
        S = random_outputs(64, seed).signs(range(n), k, range(m)).double() / m ** 0.5
        B = torch.einsum("mnk,nkp->mnp", S, U).flatten(0, 1)
        b = bracket(B @ B.T, n, m)
        assert b.value > 1.1
        assert not b.stands_out


def test_an_eigenvalue_that_stands_out_of_many_is_found_between_its_brackets() -> None:
    """u d = l^2 whatever lies below, here 399 others of at most a sixth of it."""
    n, k, m = 40, 60, 12
    spectrum = torch.cat([torch.tensor([30.0]), torch.rand(399, generator=torch.Generator().manual_seed(1)) * 5]).double()
    U = torch.linalg.qr(draw(n * k, 400))[0]
    factor = U * spectrum.sqrt()
    found, raw = [], []
    for seed in range(12):
        S = random_outputs(64, seed).signs(range(n), k, range(m)).double() / m ** 0.5
        B = torch.einsum("mnk,nkp->mnp", S, factor.view(n, k, -1)).flatten(0, 1)
        b = bracket(B @ B.T, n, m)
        assert b.stands_out
        found.append(b.value)
        raw.append(b.whole)
    values = torch.tensor(found)
    assert values.mean() == pytest.approx(30, abs=3 * values.std().item() / 12 ** 0.5 + 0.3)
    assert sum(raw) / 12 > 31.5  # what a sketch says without more


@pytest.mark.parametrize("others", ["equal", "uniform"])
def test_above_and_below_are_what_large_sample_covariances_say(others: str) -> None:
    """Of an eigenvalue among p others t, from m draws: u = top (1 + sum t / (top - t) / m), the mean of 1 / (t - u)
    over the other eigenvalues t of M is -1 / top, d = 1 / (u mean^2), and u d = top^2."""
    p, m, top = 400, 200, 8.0
    t = torch.ones(p).double() if others == "equal" else 2 * torch.rand(p, generator=torch.Generator().manual_seed(1)).double()
    spectrum = torch.cat([torch.tensor([top]).double(), t])
    known = []
    for seed in range(20):
        B = random_outputs(64, seed).signs([0], p + 1, range(m))[:, 0].double() / m ** 0.5 * spectrum.sqrt()
        values, vectors = torch.linalg.eigh(B @ B.T)
        u, mean = values[-1], (1 / (values[:-1] - values[-1])).mean()
        d = spectrum @ (B.T @ vectors[:, -1] / u.sqrt()).square()
        known.append((u.item(), mean.item(), d.item()))
    above, mean, below = (sum(numbers) / 20 for numbers in zip(*known, strict=True))
    assert above == pytest.approx(top * (1 + (t / (top - t)).sum().item() / m), rel=0.03)
    assert mean == pytest.approx(-1 / top, rel=0.03)
    assert below == pytest.approx(1 / (above * mean ** 2), rel=0.03)
    assert math.sqrt(above * below) == pytest.approx(top, rel=0.02)
    assert above > 1.2 * top


def test_an_eigenvalue_is_found_where_the_others_are_those_of_few_examples() -> None:
    """Draws of examples that differ much are not alike: it is 7 % too small (60 seeds: 27.8)."""
    n, k, m = 40, 60, 12
    spectrum = torch.rand(399, generator=torch.Generator().manual_seed(1)).double() * 5
    top, some = draw(n * k), torch.zeros(n, k, 399).double()
    some[:8] = draw(8, k, 399, seed=1)
    U = torch.linalg.qr(torch.cat([top[:, None], some.flatten(0, 1)], 1))[0]
    factor = (U * torch.cat([torch.tensor([30.0]).double(), spectrum]).sqrt()).view(n, k, -1)
    found = []
    for seed in range(12):
        S = random_outputs(64, seed).signs(range(n), k, range(m)).double() / m ** 0.5
        B = torch.einsum("mnk,nkp->mnp", S, factor).flatten(0, 1)
        b = bracket(B @ B.T, n, m)
        assert b.stands_out
        found.append(b.value)
    assert 0.87 * 30 < sum(found) / 12 < 30


def test_many_outputs_have_a_stable_rank_and_its_error_is_stated() -> None:
    model, x, y = talker()
    K, Y = oracles.tangent_kernels(model, x), F.one_hot(y, 30).double().flatten(1)
    K[WHOLE] = sum(K.values())
    probe = richter.Probe(x, y)
    snaps = [richter.measure(model, probe, ALL, cotangents=random_outputs(64, seed)) for seed in range(40)]
    assert snaps[0].row("tangent_stable_rank", "0").mark is Mark.ESTIMATED
    assert snaps[0].note("tangent_stable_rank", "0").startswith("32 random combinations of the 90 outputs of each example; ")
    exact = {"tangent_stable_rank": oracles.tangent_stable_rank(K["0"]), "tangent_cka": oracles.tangent_cka(K["0"], Y),
             "tangent_correlation": oracles.tangent_correlation(K["0"], Y)}
    for measure, true in exact.items():
        values = torch.tensor([s.value(measure, "0") for s in snaps])
        errors = torch.tensor([own(s, measure, "0") for s in snaps])
        assert values.mean() == pytest.approx(true, abs=4 * values.std().item() / 40 ** 0.5 + 0.02 * true), measure
        assert 0.6 < errors.square().mean().sqrt() / values.std() < 1.7, measure
        assert 0.45 <= ((values - true).abs() <= errors).double().mean() <= 0.9, measure
        assert all(s.error(measure, "0") > own(s, measure, "0") for s in snaps)  # few examples add to it
    for s in snaps:  # of one number each
        assert s.value("tangent_cka", "0") == pytest.approx(
            s.value("tangent_correlation", "0") / s.value("tangent_stable_rank", "0") ** 0.5, rel=1e-9)


def test_a_read_out_has_as_many_largest_eigenvalues_as_classes_and_gets_no_number() -> None:
    model, x, y = talker()
    snap = richter.measure(model, richter.Probe(x, y), ALL)
    assert snap.row("tangent_cka", "2").mark is Mark.ESTIMATED
    for name in ("tangent_stable_rank", "tangent_correlation"):
        assert math.isnan(snap.value(name, "2"))
        assert "once per class" in snap.note(name, "2")


def test_little_memory_leaves_the_norm_and_says_what_the_rest_takes() -> None:
    model, x, y = talker()
    probe = richter.Probe(x, y)
    little = richter.measure(model, probe, ALL, memory="500KiB")
    assert little.note("tangent_cka", "0").startswith("64 random outputs of 90; sketch error")
    reason = little.note("tangent_stable_rank", "0")
    need = re.findall(r"is drawn from memory='([^']+)' on", reason)[0]
    enough = richter.measure(model, probe, ALL, memory=need)
    assert math.isfinite(enough.value("tangent_stable_rank", "0"))


def test_what_is_dear_is_not_drawn_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = talker()
    probe = richter.Probe(x, y)
    assert richter.measure(model, probe, ALL).row("tangent_stable_rank").mark is Mark.ESTIMATED  # few operations
    monkeypatch.setattr(drawn, "FEW", 0)
    snap = richter.measure(model, probe, ALL)
    assert snap.row("tangent_cka").mark is Mark.ESTIMATED
    reason = snap.note("tangent_stable_rank")
    assert math.isnan(snap.value("tangent_stable_rank"))
    passes = int(re.findall(r"takes as many operations as (\d+) passes: fewer Probe\(kernel_examples=", reason)[0])
    assert passes > drawn.DEAR
    monkeypatch.setattr(drawn, "DEAR", passes + 1)
    assert richter.measure(model, probe, ALL).row("tangent_stable_rank").mark is Mark.ESTIMATED


class Talking(nn.Module):
    """A vocabulary's table, a norm and a read-out: 3 tokens of 30 classes."""

    def __init__(self, words: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm, self.out = nn.Embedding(words, 6), nn.LayerNorm(6), nn.Linear(6, 30)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.norm(self.table(ids))))


def test_looking_up_a_word_makes_no_kernel_look_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many words there are: a table multiplies nothing in a pass, and a norm each number once."""
    monkeypatch.setattr(drawn, "FEW", 0)
    ids, y = torch.arange(30).reshape(10, 3), torch.arange(30).flip(0).reshape(10, 3)
    asked: list[drawn.Seen] = []
    real = drawn.operations
    monkeypatch.setattr(drawn, "operations", lambda t: asked.append(t) or real(t))  # type: ignore[func-returns-value]
    for words in (30, 3000):
        reason = richter.measure(Talking(words), richter.Probe(ids, y), ALL).note("tangent_stable_rank")
        passes = int(re.findall(r"takes as many operations as (\d+) passes", reason)[0])
        assert passes == round(real(asked[-1]) / (3 * 10 * 2 * 3 * (6 * 30 + 6)))


def test_tables_alone_are_drawn_or_dear_and_nothing_is_divided_by_no_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn, "FEW", 0)
    torch.manual_seed(0)
    probe = richter.Probe(torch.arange(12), torch.arange(12))
    assert "as many operations as" in richter.measure(nn.Embedding(12, 80), probe, ALL).note("tangent_stable_rank")


def test_more_draws_are_more_exact_and_fewer_are_never_less_than_four() -> None:
    model, x, y = talker()
    few, many = (richter.measure(model, richter.Probe(x, y), ALL, cotangents=random_outputs(v)) for v in (8, 256))
    assert own(many, "tangent_cka", "0") < own(few, "tangent_cka", "0")
    assert [drawn.draws_of(random_outputs(64), n) for n in (4, 16, 32, 64, 1000)] == [32, 32, 16, 8, 8]
    assert drawn.draws_of(random_outputs(1), 10) == 4


@pytest.mark.parametrize("chunk", [1, 3, 10])
def test_chunks_change_nothing(chunk: int) -> None:
    model, x, y = talker()
    random = random_outputs(32, 1)
    whole, pieces = (richter.measure(model, richter.Probe(x, y, chunk=c), ALL, cotangents=random) for c in (10, chunk))
    for a, b in zip(whole.rows, pieces.rows, strict=True):
        assert a.value == pytest.approx(b.value, rel=1e-9, nan_ok=True)
        assert a.error == pytest.approx(b.error, rel=1e-6, nan_ok=True)


def test_no_labels_are_needed_for_a_stable_rank() -> None:
    model, x, y = talker()
    seeing, blind = (richter.measure(model, richter.Probe(x, labels), ALL) for labels in (y, None))
    assert blind.value("tangent_stable_rank", "0") == pytest.approx(seeing.value("tangent_stable_rank", "0"), rel=1e-9)
    assert "the probe has no labels" in blind.note("tangent_correlation", "0")


def test_a_gpt_beside_its_kernel() -> None:
    """5 tokens of 40 characters, and a kernel of 1,600 rows; within four stated errors in every layer."""
    model = GPT(40, 5, d=16, depth=1, heads=2).double()
    ids = torch.randint(0, 40, (8, 6), generator=torch.Generator().manual_seed(0))
    x, y = ids[:, :-1], ids[:, 1:]
    K, Y = oracles.tangent_kernels(model, x), F.one_hot(y, 40).double().flatten(1)
    K[WHOLE] = sum(K.values())
    snap = richter.measure(model, richter.Probe(x, y), ALL)
    numbers = 0
    for name, kernel in K.items():
        for measure, true in (("tangent_stable_rank", oracles.tangent_stable_rank(kernel)),
                              ("tangent_correlation", oracles.tangent_correlation(kernel, Y))):
            if math.isfinite(snap.value(measure, name)):
                numbers += 1
                assert abs(snap.value(measure, name) - true) < 4 * own(snap, measure, name), (measure, name)
    assert numbers >= 14


# ------------------------------------------------------------------------------------------------ averages over examples


def test_a_sketched_average_says_its_own_error_beside_that_of_few_examples() -> None:
    model, x, y = talker()
    probe = richter.Probe(x, y)
    exact = richter.measure(model, probe, ["nfc"], cotangents=lambda f, t: every_output(f))
    assert "sketch error" not in exact.note("nfc", "0")
    snaps = [richter.measure(model, probe, ["nfc"], cotangents=random_outputs(64, seed)) for seed in range(60)]
    values = torch.tensor([s.value("nfc", "0") for s in snaps])
    errors = torch.tensor([own(s, "nfc", "0") for s in snaps])
    assert 0.7 < errors.square().mean().sqrt() / values.std() < 1.4
    assert 0.5 <= ((values - exact.value("nfc", "0")).abs() <= errors).double().mean() <= 0.86


def test_sums_that_are_moved_in_one_group_are_what_their_halves_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """In closed form, to first order, beside the moved moments themselves; and the jackknife of both steps of a group is one."""
    model, x, y = talker()
    asked: list[tuple[float, float]] = []
    real = pairs.Factor.with_each_moved

    def both(factor: weights.Factor, parts: list[tuple[Tensor, Tensor, int]]) -> list[tuple[float, float]]:
        known = real(factor, parts)
        small = [(A, A + (B - A) * 1e-4, n) for A, B, n in parts]  # halves that hardly differ: first order is all
        number = sum(n for _, _, n in parts)
        first, second = (sum(part[half] for part in small) / number for half in (0, 1))
        for (g, share), (inner, size) in zip(moments.shares(len(parts)), real(factor, small), strict=True):
            step = (small[g][0] - small[g][1]) * share / 2 / number
            moved = pairs.Pair(factor, moments.Sketched((first + second) / 2 + step, first + step, second + step))
            asked.append((inner / moved.inner - 1, size / moved.size - 1))
        return known
    monkeypatch.setattr(pairs.Factor, "with_each_moved", both)
    richter.measure(model, richter.Probe(x, y), ["nfc"], cotangents=random_outputs(64))
    assert len(asked) == 16
    assert torch.tensor(asked).abs().max() < 1e-8
    values = [share * (g == 0) for g, share in moments.shares(8)]
    assert jackknife(values) == pytest.approx(1, rel=1e-12)


def test_the_outputs_that_are_looked_at_are_drawn_from_the_seed() -> None:
    model, x, y = talker()
    a, b, c = (richter.measure(model, richter.Probe(x, y), ["tangent_alignment"], cotangents=random_outputs(64, seed))
               for seed in (0, 0, 1))
    assert a.value("tangent_alignment", "0") == b.value("tangent_alignment", "0") != c.value("tangent_alignment", "0")
