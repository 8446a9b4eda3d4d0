"""The Fisher information of cross-entropy: against explicit matrices, by sketch where outputs are many, and its products."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import oracles
import richter
from richter.core import WHOLE, Mark, Row, SelectionError
from richter.instrument.evaluate import jackknife
from richter.instrument.statistics.fisher import (
    FISHER,
    FISHER_MATRIX,
    ROOT,
    ROUGH_REACH,
    ROUGH_STEP,
    Fisher,
    FisherKernel,
    factor_times,
    metric_times,
    root_times,
)
from richter.measures import Measure
from richter.measures.fisher import fisher_correlation, fisher_stable_rank
from richter.models import GPT, mlp

BOTH = ["fisher_stable_rank", "fisher_correlation"]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_definition(model: nn.Module, x: Tensor, Y: Tensor, classes: int) -> dict[tuple[str, str], float]:
    Psi = oracles.tangent_features(model, x)
    Psi[WHOLE] = torch.cat(list(Psi.values()))
    H = oracles.cross_entropy_metric(oracles.outputs(model, x), classes)
    return {("fisher_stable_rank", k): oracles.fisher_stable_rank(P, H) for k, P in Psi.items()} | {
        ("fisher_correlation", k): oracles.fisher_correlation(P, H, Y) for k, P in Psi.items()}


def own(row: Row) -> float:
    """The sketch's own standard error."""
    return float(row.note.rpartition("sketch error ")[2])


def of(S: Fisher) -> list[Measure]:
    return [Measure("fisher_stable_rank", fisher_stable_rank, (S,), ROOT),
            Measure("fisher_correlation", fisher_correlation, (S,), ROOT)]


# ------------------------------------------------------------------------------------------------------------- exact


def test_it_is_what_explicit_matrices_give() -> None:
    model = mlp([5, 7, 6, 3], seed=0).double()
    x, y = drawn(12, 5), torch.arange(12) % 3
    snap = richter.measure(model, richter.Probe(x, y), BOTH)
    for (m, layer), value in by_definition(model, x, oracles.one_hot(y, 3), 3).items():
        assert snap.value(m, layer) == pytest.approx(value, rel=1e-8), (m, layer)
        assert snap.row(m, layer).mark is Mark.EXACT
        assert snap.error(m, layer) > 0


def test_errors_are_those_of_examples_left_out() -> None:
    """Eight groups, each left out of the definition."""
    model = mlp([5, 6, 3], seed=1).double()
    x, y = drawn(16, 5), torch.arange(16) % 3
    snap = richter.measure(model, richter.Probe(x, y), BOTH)
    without = [by_definition(model, x[keep], oracles.one_hot(y[keep], 3), 3)
               for g in range(8) for keep in [torch.arange(16) % 8 != g]]
    for m, layer in without[0]:
        values = torch.tensor([w[m, layer] for w in without])
        assert snap.error(m, layer) == pytest.approx(math.sqrt(7 / 8 * (values - values.mean()).square().sum()), rel=1e-4)


def test_tokens_have_a_softmax_each_and_those_without_a_label_none() -> None:
    torch.manual_seed(0)
    model = GPT(5, 4, d=8, depth=1, heads=2).double()
    ids = torch.randint(5, (6, 5), generator=torch.Generator().manual_seed(0))
    x, y = ids[:, :-1], ids[:, 1:].clone()
    snap = richter.measure(model, richter.Probe(x, y), BOTH)
    for (m, layer), value in by_definition(model, x, torch.nn.functional.one_hot(y, 5).double().flatten(1), 5).items():
        assert snap.value(m, layer) == pytest.approx(value, rel=1e-7), (m, layer)
    y[:, 0] = -100  # the first token of each text counts no more
    snap = richter.measure(model, richter.Probe(x, y), BOTH)
    late = Last(model, 1)
    Y = torch.nn.functional.one_hot(y[:, 1:], 5).double().flatten(1)
    exact = by_definition(late, x, Y, 5)
    for m in BOTH:
        assert snap.value(m) == pytest.approx(exact[m, WHOLE], rel=1e-7)


class Last(nn.Module):
    """The outputs of the later tokens alone."""

    def __init__(self, model: nn.Module, first: int) -> None:
        super().__init__()
        self.model, self.first = model, first

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)[:, self.first:]


def test_shifts_of_the_logits_change_nothing_and_scales_of_the_gradients_cancel() -> None:
    x, y = drawn(10, 4), torch.arange(10) % 3
    model = mlp([4, 6, 3], seed=2).double()
    before = richter.measure(model, richter.Probe(x, y), BOTH)
    with torch.no_grad():
        model[-1].bias += 7.0
    after = richter.measure(model, richter.Probe(x, y), BOTH)
    for r in before.rows:
        assert after.value(r.measure, r.layer) == pytest.approx(r.value, rel=1e-9)


def test_a_saturated_softmax_keeps_its_digits() -> None:
    """Two classes have H = p (1 - p) a a^T with a = (1, -1), and 1 - p is a sigmoid that no subtraction spoils."""
    x, y = drawn(10, 4), torch.arange(10) % 2
    model = mlp([4, 6, 2], seed=2).double()
    with torch.no_grad():
        model[-1].bias[0] += 50.0
    d = (model(x)[:, 0] - model(x)[:, 1]).detach()
    assert (d.sigmoid() == 1).all()
    weights = d.sigmoid() * (-d).sigmoid()
    snap = richter.measure(model, richter.Probe(x, y), BOTH)
    for layer, P in oracles.tangent_features(model, x).items():
        scores = (P[:, 0::2] - P[:, 1::2]) * weights.sqrt()
        assert snap.value("fisher_stable_rank", layer) == pytest.approx(oracles.stable_rank(scores.T @ scores), rel=1e-8)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 12), st.floats(0.1, 30.0), st.integers(0, 100))
def test_the_root_of_the_metric(classes: int, scale: float, seed: int) -> None:
    """H^1/2 H^1/2 = H = B B^T, symmetric, and H = diag(p) - p p^T where that has its digits."""
    p = (scale * drawn(classes, seed=seed)).softmax(0)
    eye = torch.eye(classes, dtype=torch.float64)
    S, B, H = root_times(p, eye.clone()), factor_times(p, eye.clone()).T, metric_times(p, eye.clone())
    size = H.abs().max()
    assert (S @ S - H).abs().max() <= 1e-11 * size
    assert (B @ B.T - H).abs().max() <= 1e-11 * size
    assert (S - S.T).abs().max() <= 1e-11 * size.sqrt()
    assert torch.linalg.eigvalsh(S).min() >= -1e-11 * size.sqrt()
    assert (H - torch.diag(p) + torch.outer(p, p)).abs().max() <= 1e-15
    rough = root_times(p, eye.clone(), ROUGH_STEP, ROUGH_REACH)
    assert 0 < (rough - S).abs().max() <= 1e-5 * size.sqrt()


# ------------------------------------------------------------------------------------------------------- what it needs


@pytest.mark.parametrize(("y", "widths", "words"), [
    (None, [4, 6, 3], "needs outputs that are logits of classes"),
    (drawn(10, 3), [4, 6, 3], "needs outputs that are logits of classes: give class or token ids as labels"),
    (torch.arange(10) % 2, [4, 6, 1], "one class: the softmax of a single output is 1 whatever the network does"),
    (drawn(10, 1), [4, 6, 1], "one class")])
def test_labels_that_are_no_classes(y: Tensor | None, widths: list[int], words: str) -> None:
    snap = richter.measure(mlp(widths, seed=0).double(), richter.Probe(drawn(10, 4), y), BOTH)
    for r in snap.rows:
        assert math.isnan(r.value)
        assert r.mark is Mark.UNDEFINED
        assert words in r.note


def test_one_hot_targets_are_classes_and_a_class_without_examples_is_no_obstacle() -> None:
    x, y, model = drawn(10, 4), torch.arange(10) % 2, mlp([4, 6, 3], seed=0).double()
    ids, hot = (richter.measure(model, richter.Probe(x, labels), BOTH) for labels in (y, oracles.one_hot(y, 3)))
    for r in ids.rows:
        assert math.isfinite(r.value)
        assert hot.value(r.measure, r.layer) == pytest.approx(r.value, rel=1e-12)


def test_cotangents_of_other_measures_do_not_change_it() -> None:
    x, y, model = drawn(10, 4), torch.arange(10) % 3, mlp([4, 6, 3], seed=0).double()
    plain = richter.measure(model, richter.Probe(x, y), BOTH)
    other = richter.measure(model, richter.Probe(x, y), BOTH, cotangents=lambda f, y: torch.ones(1, *f.shape))
    assert [r.value for r in plain.rows] == [r.value for r in other.rows]


# -------------------------------------------------------------------------------------------------------- many outputs


def test_many_outputs_are_sketched_and_the_row_says_so() -> None:
    x, y = drawn(40, 6), torch.arange(40) % 70
    model = mlp([6, 8, 70], seed=0).double()
    snap = richter.measure(model, richter.Probe(x, y, kernel_examples=None), BOTH)
    exact = richter.measure(model, richter.Probe(x, y, kernel_examples=None), of(replace(FISHER, most=70)))
    for r in snap.rows:
        assert exact.row(r.measure, r.layer).mark is Mark.EXACT
        assert r.mark is Mark.ESTIMATED
        assert "16 random combinations of the 70 outputs of each example" in r.note
        assert r.value == pytest.approx(exact.value(r.measure, r.layer), abs=4 * own(r))
        assert own(r) < 0.4 * r.value + 0.05 * own(r)  # it is said in two digits
    again = richter.measure(model, richter.Probe(x, y, kernel_examples=None, chunk=7), BOTH)
    assert [r.value for r in again.rows] == pytest.approx([r.value for r in snap.rows], rel=1e-9)
    other = richter.measure(model, richter.Probe(x, y, kernel_examples=None), of(replace(FISHER, seed=1)))
    assert other.rows[0].value != snap.rows[0].value


@pytest.mark.parametrize("tokens", [False, True])
def test_a_sketch_has_the_error_of_few_examples_too(tokens: bool) -> None:
    """Without the last group it is that of the other examples, whose draws are the same; some tokens have no label."""
    torch.manual_seed(0)
    model = GPT(4, 3, d=8, depth=1, heads=2).double() if tokens else mlp([5, 6, 3], seed=1).double()
    ids = torch.randint(4, (8, 4), generator=torch.Generator().manual_seed(0))
    x = ids[:, :-1] if tokens else drawn(8, 5)
    y = ids[:, 1:].masked_fill(torch.arange(24).reshape(8, 3) % 5 == 0, -100) if tokens else torch.arange(8) % 3
    kernels: list[FisherKernel] = []

    def keeping(k: FisherKernel) -> float:
        kernels.append(k)
        return fisher_correlation(k)
    measure = Measure("fisher_correlation", keeping, (replace(FISHER, most=0),), ROOT)
    row = richter.measure(model, richter.Probe(x, y), [measure]).rows[-1]
    whole, *fewer, without = kernels[-25:]  # 16 draws and 8 groups of examples left out
    own_error, few = (jackknife([fisher_correlation(k) for k in part]) for part in (fewer[:16], [*fewer[16:], without]))
    assert row.error == pytest.approx(max(own_error, few), rel=1e-9)
    assert row.note.endswith(f"sketch error {own_error:.2g}")
    assert row.value == pytest.approx(fisher_correlation(whole), rel=1e-12)
    kernels.clear()
    richter.measure(model, richter.Probe(x[:7], y[:7]), [measure])
    seven = kernels[-24]  # 16 draws and 7 groups
    for name in ("norm", "top", "quadratic", "energy"):
        assert getattr(without, name) == pytest.approx(getattr(seven, name), rel=1e-8), name


def test_too_few_draws_are_refused() -> None:
    with pytest.raises(SelectionError, match=r"draws=2: give 3 or more"):
        replace(FISHER, draws=2)


def test_little_memory_means_a_sketch() -> None:
    x, y, model = drawn(40, 6), torch.arange(40) % 40, mlp([6, 8, 40], seed=0).double()
    few = of(replace(FISHER, draws=3))
    wide, narrow = (richter.measure(model, richter.Probe(x, y), few, memory=memory) for memory in ("2GiB", "12MiB"))
    assert wide.row("fisher_stable_rank").mark is Mark.EXACT
    assert narrow.row("fisher_stable_rank").mark is Mark.ESTIMATED


@pytest.mark.long
def test_the_sketch_s_error_is_its_error() -> None:
    """Of a language model with a small vocabulary the exact values lie within two standard errors for 90 of 100 seeds."""
    torch.manual_seed(0)
    model = GPT(12, 3, d=8, depth=1, heads=2).double()
    ids = torch.randint(12, (24, 4), generator=torch.Generator().manual_seed(0))
    probe = richter.Probe(ids[:, :-1], ids[:, 1:])
    exact = richter.measure(model, probe, BOTH)
    assert {r.mark for r in exact.rows} == {Mark.EXACT}
    within = {(r.measure, r.layer): 0 for r in exact.rows}
    for seed in range(100):
        for r in richter.measure(model, probe, of(replace(FISHER, most=0, seed=seed))).rows:
            within[r.measure, r.layer] += abs(r.value - exact.value(r.measure, r.layer)) <= 2 * own(r)
    assert min(within.values()) >= 90, within


@pytest.mark.long
def test_a_vocabulary_of_thirty_thousand() -> None:
    """A GPT-2 of transformers: the sketch of a layer against the layer's matrix, column by column from its products."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=30_000, n_positions=8, n_embd=16, n_layer=1, n_head=2, initializer_range=0.2, bos_token_id=0, eos_token_id=0))
    ids = torch.randint(30_000, (8, 4), generator=torch.Generator().manual_seed(0))
    probe = richter.Probe(ids[:, :-1], ids[:, 1:])
    snap = richter.measure(model, probe, BOTH)
    for r in snap.rows:
        assert r.mark is Mark.ESTIMATED, r
        assert "16 random combinations of the 90000 outputs of each example" in r.note
        assert 0 < r.error < math.inf, r
        assert r.value > 0
    matrices: list[Tensor] = []

    def columns(A: Any) -> float:
        sizes = {k: p.numel() for k, p in model.named_parameters()}
        starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
        mine = torch.cat([torch.arange(starts[k], starts[k] + sizes[k]) for k in sizes if k.startswith("transformer.ln_f")])
        for entry in mine:
            v = torch.zeros(sum(sizes.values()), dtype=torch.float64)
            v[entry] = 1
            matrices.append(A(v)[mine])
        return 0.0

    richter.measure(model, probe, [Measure("kept", columns, (FISHER_MATRIX,))])
    values = torch.linalg.eigvalsh(torch.stack(matrices))
    exact = (values.square().sum() / values[-1] ** 2).item()
    row = snap.row("fisher_stable_rank", "transformer.ln_f")
    assert abs(row.value - exact) < 2 * row.error
    assert row.error < 0.5 * exact


# ------------------------------------------------------------------------------------------------------------ products


def test_products_with_the_fisher_matrix() -> None:
    model = mlp([5, 6, 3], seed=0).double()
    x, y = drawn(12, 5), torch.arange(12) % 3
    v = drawn(6 * 5 + 6 + 3 * 6 + 3, seed=1)
    values: list[Tensor] = []
    keep = Measure("kept", lambda A: values.append((A(v), A.parts(v)["0.weight"])) or 0.0, (FISHER_MATRIX,))
    richter.measure(model, richter.Probe(x, y, chunk=5), [keep])
    Psi = torch.cat(list(oracles.tangent_features(model, x).values()))
    H = oracles.cross_entropy_metric(oracles.outputs(model, x), 3)
    torch.testing.assert_close(values[0][0], Psi @ H @ Psi.T @ v / 12, rtol=1e-9, atol=1e-12)
    assert torch.equal(values[0][1], v[:30].view(6, 5))


def test_of_one_output_there_is_no_fisher_matrix() -> None:
    snap = richter.measure(mlp([4, 1], seed=0), richter.Probe(torch.randn(8, 4), torch.randn(8, 1)),
                           [Measure("kept", lambda A: 0.0, (FISHER_MATRIX,))])
    assert "one class" in snap.note("kept")


# ------------------------------------------------------------------------------------------------------------ saturated


def test_one_example_that_is_certain_does_not_spoil_the_others() -> None:
    """Where p is 0 and 1 to the last digit H is 0: the others have the Fisher information that they have alone."""
    model = mlp([5, 7, 3], seed=0).double()
    x, y = drawn(8, 5), torch.arange(8) % 3
    with torch.no_grad():
        model[2].bias.zero_()
        model[0].bias.zero_()
    x[0] *= 1e5
    H = torch.zeros(3, dtype=torch.float64)
    H[1] = 1.0
    assert (root_times(H, torch.eye(3, dtype=torch.float64)) == 0).all()
    snap = richter.measure(model, richter.Probe(x, y), BOTH)
    p = model(x).softmax(1)
    assert (p[0].max() == 1) & (p[0].min() == 0)
    for (m, layer), value in by_definition(model, x, oracles.one_hot(y, 3), 3).items():
        assert snap.value(m, layer) == pytest.approx(value, rel=1e-8), (m, layer)


def test_the_matrix_is_not_that_of_targets_that_are_no_classes() -> None:
    norm = Measure("fisher_product", lambda F: float(F(torch.ones(F.size, dtype=torch.float64)).norm()), (FISHER_MATRIX,))
    model, x = mlp([5, 4, 3], seed=0).double(), drawn(8, 5)
    row = richter.measure(model, richter.Probe(x, drawn(8, 3, seed=1)), [norm]).row("fisher_product", WHOLE)
    assert row.mark is Mark.UNDEFINED
    assert "needs outputs that are logits of classes" in row.note
    assert richter.measure(model, richter.Probe(x, None), [norm]).value("fisher_product", WHOLE) > 0  # no label enters it
