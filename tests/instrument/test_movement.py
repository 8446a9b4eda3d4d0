"""How far a network has gone from the initial one: every number against its definition, and where a shorter way is wrong."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracles
import richter
import zoo
from richter.core import WHOLE, Mark, Row
from richter.instrument import evaluate
from richter.instrument.capture import quiet
from richter.instrument.cotangents import every_output
from richter.instrument.observe import Measurement
from richter.instrument.statistics import FEATURE_CHANGE, FUNCTION_CHANGE, LINEARISATION, frame, movement
from richter.instrument.stream import Share
from richter.instrument.subject import Subject
from richter.linalg import Rows, debiased_cka
from richter.measures import MOVEMENT

EVERY_CASE = pytest.mark.parametrize("name", zoo.CASES)
GAP, TURNED, LAYER = "linearisation_gap", "feature_change_cka", "function_change"


def state(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(model.state_dict())


def plain(*widths: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [[nn.Linear(a, b), nn.ReLU()] for a, b in itertools.pairwise(widths)]
        return nn.Sequential(*[m for pair in layers for m in pair][:-1]).to(dtype)


def data(n: int = 80, d: int = 6, k: int = 3, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return x.to(dtype), torch.arange(n) % k


def nudged(model: nn.Module, size: float = 0.1, seed: int = 3) -> dict[str, Tensor]:
    """Move every weight; the state before."""
    before, draw = state(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += size * torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p)
    return before


def loaded(case: zoo.Case) -> nn.Module:
    model = case.build()
    model.load_state_dict(zoo.initial(case))
    return model


# ---------------------------------------------------------------------------------------------------- against definitions


@EVERY_CASE
def test_the_gap_is_that_of_the_definition(name: str) -> None:
    case = zoo.CASES[name]
    x, y = case.batch({"encoder_seq_first": 6, "gpt": 2, "hf_gpt2": 2}.get(name, 4))
    snap = richter.measure(case.build(), richter.Probe(x, y), [GAP, "magnitude"], initial=zoo.initial(case), output=case.output)
    exact = oracles.linearisation_gap(case.build(), loaded(case), x, case.output)
    assert snap.value(GAP) == pytest.approx(exact, rel=1e-9)
    assert snap.value("magnitude") == pytest.approx(math.log10(exact / (1 - exact)), rel=1e-8, abs=1e-9)
    assert snap.row(GAP).mark is Mark.EXACT


PLAIN = ("mlp", "mlp_nobias", "cnn_modes", "conv3d", "encoder", "mha_cross", "twice", "folded", "moe", "multi_input")


@pytest.mark.parametrize("name", PLAIN)
def test_the_change_of_a_layer_is_that_of_the_definition(name: str) -> None:
    """Without norms: what they do is looked at below."""
    case = zoo.CASES[name]
    x, y = case.batch(4)
    snap = richter.measure(case.build(), richter.Probe(x, y), [LAYER], initial=zoo.initial(case), output=case.output)
    then = loaded(case)
    for layer in case.maps:
        row = snap.row(LAYER, layer)
        if math.isnan(row.value):
            assert row.note.startswith("the read-out: ")
            continue
        W, h, _ = oracles.layer_io(case.build(), x, layer, case.output)
        W0 = oracles.matrix(then, x, layer, case.output)
        b, b0 = (bias(m, layer, len(W)) for m in (case.build(), then))
        used = h.flatten(0, 1).any(1)
        expected = oracles.function_change(W, W0, b, b0, h.flatten(0, 1)[used][None])
        assert row.value == pytest.approx(expected, rel=1e-9), layer
    assert sum(math.isnan(r.value) for r in snap.rows) == 1


def bias(model: nn.Module, layer: str, size: int) -> Tensor:
    """That of a layer, or of its third of a fused one."""
    owner, _, part = layer.rpartition(".")
    params = dict(model.named_parameters())
    if part in "qkv" and part and f"{owner}.in_proj_bias" in params:
        return params[f"{owner}.in_proj_bias"].detach().chunk(3)["qkv".index(part)]
    return params[f"{layer}.bias"].detach() if f"{layer}.bias" in params else torch.zeros(size, dtype=torch.float64)


@pytest.mark.parametrize("d", [5, 40, 300])
def test_the_alignment_of_features_is_that_of_the_definition(d: int) -> None:
    """Few features and many; also with each group of rows left out."""
    draw = torch.Generator().manual_seed(0)
    X = 3 + torch.randn(70, d, generator=draw, dtype=torch.float64)
    Y = X.tanh() + 0.3 * torch.randn(70, d, generator=draw, dtype=torch.float64)
    group = torch.arange(70) % 4

    def cka(X: Tensor, Y: Tensor) -> list[float]:
        return debiased_cka(*(Rows(Z, group, 4) for Z in (X, Y)))
    got = cka(X, Y)
    kept = [torch.ones(70, dtype=torch.bool), *(group != g for g in range(4))]
    assert got == pytest.approx([oracles.debiased_cka(X[k], Y[k]) for k in kept], rel=1e-9)
    assert cka(X, X.clone()) == pytest.approx([1.0] * 5, rel=1e-12)
    assert cka(X, 2 - 5 * X) == pytest.approx([1.0] * 5, rel=1e-9)
    assert math.isnan(cka(X, torch.full_like(X, 3.0))[0])


@pytest.mark.parametrize("name", ["mlp", "cnn_modes", "groupnorm", "resnet"])
def test_the_change_of_features_is_that_of_the_definition(name: str) -> None:
    case, n = zoo.CASES[name], 66
    x, y = case.batch(n)
    now, then = case.build(), loaded(case)
    norms = oracles.moved_norms(now, then)
    snap = richter.measure(now, richter.Probe(x, y, chunk=13), [TURNED], initial=state(then), output=case.output)
    with oracles.batch_norms(now, norms), oracles.batch_norms(then, norms):
        oracles.to_first_scale_(now, then, x[:8], case.output)
        H, H0 = (oracles.reads(m, x, list(case.maps), case.output) for m in (now, then))
    expected = {k: 1 - oracles.debiased_cka(H[k].flatten(1), H0[k].flatten(1)) for k in list(case.maps)[1:]}
    assert snap.value(TURNED) == pytest.approx(max(expected.values()), rel=1e-8)


@pytest.mark.parametrize("masked", [False, True])
def test_rows_are_real_tokens_where_each_has_an_output(masked: bool) -> None:
    n = 40
    model = nn.Sequential(Language(dim=5, vocabulary=7)).double()
    ids = torch.randint(0, 7, (n, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.rand(n, 6, generator=torch.Generator().manual_seed(2)) > 0.3 if masked else None
    then = nudged(model, 0.5)
    snap = richter.measure(model, richter.Probe(ids, (ids + 1) % 7, mask=mask), [TURNED], initial=then)
    before = copy.deepcopy(model)
    before.load_state_dict(then)
    real = torch.ones(n, 6, dtype=torch.bool) if mask is None else mask
    names = ["0.mix", "0.head"]
    H, H0 = (oracles.reads(m, ids, names) for m in (model, before))
    expected = [1 - oracles.debiased_cka(H[k][real], H0[k][real]) for k in names]
    assert snap.value(TURNED) == pytest.approx(max(expected), rel=1e-8)
    assert snap.error(TURNED) > 0


class Language(nn.Module):
    def __init__(self, dim: int, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(vocabulary, dim), nn.Linear(dim, dim), nn.Linear(dim, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        h: Tensor = self.embed(ids)
        return self.head(torch.tanh(self.mix(h + h.cumsum(1))))  # type: ignore[no-any-return]


def test_at_most_2048_tokens_evenly_spaced() -> None:
    model = Language(4, 9).double()
    ids = torch.randint(0, 9, (300, 10), generator=torch.Generator().manual_seed(1))
    then = nudged(model, 0.5)
    snap = richter.measure(model, richter.Probe(ids, (ids + 1) % 9), [TURNED], initial=then)
    before = copy.deepcopy(model)
    before.load_state_dict(then)
    rows = torch.linspace(0, 2999, 2048, dtype=torch.float64).round().long()
    H, H0 = (oracles.reads(m, ids, ["mix", "head"]) for m in (model, before))
    expected = [1 - oracles.debiased_cka(H[k].flatten(0, 1)[rows], H0[k].flatten(0, 1)[rows]) for k in H]
    assert snap.value(TURNED) == pytest.approx(max(expected), rel=1e-8)


def test_answers_are_those_of_the_definition() -> None:
    model = plain(6, 8, 3)
    x, y = data(21)
    f = model(x).detach()
    snap = richter.measure(model, richter.Probe(x, y, chunk=4), list(MOVEMENT[4:]))
    assert snap.value("probe_loss") == pytest.approx(F.cross_entropy(f, y).item(), rel=1e-9)
    assert snap.value("probe_accuracy") == pytest.approx((f.argmax(1) == y).double().mean().item(), rel=1e-12)
    assert snap.value("output_spread") == pytest.approx((f - f.mean(0)).square().sum(1).mean().sqrt().item(), rel=1e-9)
    assert snap.value("output_rms") == pytest.approx(f.square().mean().sqrt().item(), rel=1e-9)
    assert all(snap.error(name) > 0 for name in MOVEMENT[4:])
    hot = F.one_hot(y, 3).double()
    squared = richter.measure(model, richter.Probe(x, hot), ["probe_loss", "probe_accuracy"])
    assert squared.value("probe_loss") == pytest.approx((f - hot).square().mean().item(), rel=1e-9)
    assert squared.value("probe_accuracy") == snap.value("probe_accuracy")
    targets = richter.measure(model, richter.Probe(x, f + 1), ["probe_accuracy"])
    assert math.isnan(targets.value("probe_accuracy"))
    assert "the labels are not classes" in targets.note("probe_accuracy")
    none = richter.measure(model, richter.Probe(x, None), list(MOVEMENT[4:]))
    assert "no labels" in none.note("probe_loss")
    assert none.value("output_rms") == pytest.approx(snap.value("output_rms"), rel=1e-12)


def test_a_loss_that_fails_is_a_note() -> None:
    def broken(f: Tensor, y: Tensor) -> Tensor:
        raise ValueError("no such labels")
    snap = richter.measure(plain(6, 4, 3), richter.Probe(*data(10), loss=broken), ["probe_loss", "output_rms"])
    assert snap.row("probe_loss").mark is Mark.FAILED
    assert "no such labels" in snap.note("probe_loss")
    assert snap.value("output_rms") > 0


def test_tokens_without_a_label_do_not_count() -> None:
    model = Language(4, 7).double()
    ids = torch.randint(0, 7, (9, 5), generator=torch.Generator().manual_seed(1))
    labels = torch.where(torch.rand(9, 5, generator=torch.Generator().manual_seed(2)) > 0.5, (ids + 1) % 7, -100)
    then = nudged(model)
    f, before = model(ids).detach(), copy.deepcopy(model)
    before.load_state_dict(then)
    real = labels >= 0
    snap = richter.measure(model, richter.Probe(ids, labels), [GAP, *MOVEMENT[4:]], initial=then)
    assert snap.value("probe_loss") == pytest.approx(F.cross_entropy(f[real], labels[real]).item(), rel=1e-9)
    assert snap.value("probe_accuracy") == pytest.approx((f.argmax(2) == labels)[real].double().mean().item(), rel=1e-9)
    assert snap.value("output_rms") == pytest.approx(f[real].square().mean().sqrt().item(), rel=1e-9)
    exact = oracles.linearisation_gap(model, before, ids, lambda out: out[real].reshape(1, -1))
    assert snap.value(GAP) == pytest.approx(exact, rel=1e-9)


def test_outputs_that_are_nearly_the_same_have_a_small_spread() -> None:
    model = plain(6, 8, 3)
    x, y = data(40)
    with torch.no_grad():
        model[2].weight *= 1e-12
        model[2].bias += 1e3
    f = model(x).detach()
    snap = richter.measure(model, richter.Probe(x, y, chunk=7), ["output_spread"])
    exact = (f - f.mean(0)).square().sum(1).mean().sqrt().item()
    assert snap.value("output_spread") == pytest.approx(exact, rel=0.05, abs=1e-13)


# ---------------------------------------------------------------------------------------------------------- the cases


def test_an_untrained_network_has_no_gap() -> None:
    model = plain(6, 8, 3)
    snap = richter.measure(model, richter.Probe(*data()), list(MOVEMENT[:4]), initial=state(model))
    for name in (GAP, "magnitude"):
        assert math.isnan(snap.value(name))
        assert snap.row(name).mark is Mark.UNDEFINED
        assert "untrained" in snap.note(name)
    assert snap.value(TURNED) == 0
    assert snap.value(LAYER, "0") == 0


def test_without_the_initial_weights_there_is_no_number() -> None:
    snap = richter.measure(plain(6, 8, 3), richter.Probe(*data()), list(MOVEMENT))
    for name in MOVEMENT[:4]:
        rows = [r for r in snap.rows if r.measure == name]
        assert rows
        assert all(math.isnan(r.value) and r.mark is Mark.UNDEFINED and "initial" in r.note for r in rows)
    assert math.isfinite(snap.value("probe_loss"))


def test_a_frozen_backbone_is_linear_and_a_frozen_layer_has_not_changed() -> None:
    model = plain(6, 8, 8, 3)
    then = state(model)
    with torch.no_grad():
        model[4].weight += 1.0
    snap = richter.measure(model, richter.Probe(*data()), list(MOVEMENT[:4]), initial=then)
    assert snap.value(GAP) < 1e-14
    assert snap.row("magnitude") == Row(None, WHOLE, "magnitude", -3.0, 0.0, "at -3 or beyond", Mark.BOUND)
    assert snap.value(TURNED) == 0
    assert [snap.value(LAYER, k) for k in ("0", "2")] == [0, 0]
    assert "the read-out" in snap.note(LAYER, "4")


def test_a_linear_network_has_no_hidden_layer_and_few_examples_are_too_few() -> None:
    model = plain(6, 3)
    snap = richter.measure(model, richter.Probe(*data()), [TURNED], initial=nudged(model))
    assert "no hidden layer" in snap.note(TURNED)
    model = plain(6, 8, 3)
    assert "fewer than 32 rows" in richter.measure(model, richter.Probe(*data(31)), [TURNED], initial=nudged(model)).note(TURNED)


class Centred(nn.Module):
    """alpha (h(w) - h(w0))."""

    def __init__(self, alpha: float, model: nn.Module) -> None:
        super().__init__()
        self.alpha, self.model, self.first = alpha, model, copy.deepcopy(model).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.alpha * (self.model(x) - self.first(x).detach())


def trained(model: nn.Module, alpha: float, x: Tensor, y: Tensor, steps: int = 60) -> tuple[nn.Module, dict[str, Tensor]]:
    """Full-batch gradient descent on loss / alpha^2."""
    whole = Centred(alpha, model)
    then = state(whole)
    optimiser = torch.optim.SGD([p for p in whole.parameters() if p.requires_grad], lr=0.3)
    for _ in range(steps):
        optimiser.zero_grad()
        (F.cross_entropy(whole(x), y) / alpha ** 2).backward()
        optimiser.step()
    return whole.eval(), then


def test_the_gap_falls_with_the_scale_of_the_outputs_and_the_readout_is_found() -> None:
    x, y = data(80)
    gaps, magnitudes = [], []
    for alpha in (0.3, 1.0, 10.0, 100.0):
        model, then = trained(plain(6, 64, 64, 3), alpha, x, y)
        snap = richter.measure(model, richter.Probe(x, y), list(MOVEMENT[:4]), initial=then)
        gaps.append(snap.value(GAP))
        magnitudes.append(snap.value("magnitude"))
        assert {r.layer for r in snap.rows if "the read-out" in r.note} == {"model.4"}
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 0.5
    assert gaps[-1] < 0.05
    assert magnitudes[1] - magnitudes[3] > 1


def batch_normed(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU(),
                             nn.Linear(48, 3)).double()


def test_batch_norms_use_the_statistics_of_blocks() -> None:
    """A lazy network whose running statistics went from (0, 1) to those of the data."""
    x, y = data(160)
    model, then = trained(batch_normed().train(), 1000.0, x * 3 + 1, y, steps=100)
    probe = richter.Probe(x * 3 + 1, y)
    snap = richter.measure(model, probe, [GAP, TURNED], initial=then)
    assert snap.value(GAP) < 0.02
    assert snap.value(TURNED) < 0.01
    assert 0 < snap.error(GAP) < 0.02
    before = copy.deepcopy(model)
    before.load_state_dict(then)
    few = (x * 3 + 1)[:10]
    f0, J = oracles.batch_jacobian(before, few)
    change = model(few).detach() - f0
    linear = sum(torch.tensordot(J[k], (p - then[k]).detach(), p.ndim) for k, p in model.named_parameters())
    assert (change - linear).norm() > 0.4 * (change.norm() + linear.norm())  # with running statistics it would look rich


def test_norms_that_were_not_trained_keep_their_statistics() -> None:
    model = batch_normed().eval()
    before = copy.deepcopy(model)
    then = nudged(model)
    x, y = data(8)
    snap = richter.measure(model, richter.Probe(x, y), [GAP], initial=then)
    assert snap.value(GAP) == pytest.approx(oracles.linearisation_gap(model, before, x), rel=1e-9)


def test_blocks_are_fixed_whatever_chunks_are() -> None:
    model = batch_normed()
    then = nudged(model)
    for norm in (model[1], model[4]):
        norm.running_mean += 0.3
    x, y = data(150)
    snaps = [richter.measure(model, richter.Probe(x, y, chunk=chunk), [GAP, TURNED], initial=then) for chunk in (256, 7)]
    assert [r.value for r in snaps[0].rows] == pytest.approx([r.value for r in snaps[1].rows], rel=1e-12)
    before = copy.deepcopy(model)
    before.load_state_dict(then)
    norms = ["1", "4"]
    change, linear = [], []
    with oracles.batch_norms(model, norms), oracles.batch_norms(before, norms):
        oracles.to_first_scale_(model, before, x[:8])
        for rows in (slice(0, 64), slice(64, 150)):  # 22 at the end are less than half of a block
            f0, J = oracles.batch_jacobian(before, x[rows])
            first = dict(before.named_parameters())
            change.append(model(x[rows]).detach() - f0)
            linear.append(sum(torch.tensordot(J[k], (p - first[k]).detach(), p.ndim) for k, p in model.named_parameters()))
    df, dl = torch.cat(change), torch.cat(linear)
    assert snaps[0].value(GAP) == pytest.approx(((df - dl).norm() / (df.norm() + dl.norm())).item(), rel=1e-8)
    assert snaps[0].error(GAP) > 0


def normed() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(),
                             nn.Linear(64, 3)).double()


@pytest.mark.parametrize("factor", [1.2, 3.0, 0.5])
def test_scale_without_effect_is_left_out(factor: float) -> None:
    x, y = data(80)
    model, then = trained(normed(), 100.0, x, y)
    measures = [GAP, TURNED, LAYER]
    before = richter.measure(model, richter.Probe(x, y), measures, initial=then)
    with torch.no_grad():
        for layer in (model.model[0], model.model[3]):
            layer.weight *= factor
            layer.bias *= factor
    after = richter.measure(model, richter.Probe(x, y), measures, initial=then)
    assert before.value(GAP) < 0.05
    assert after.value(GAP) == pytest.approx(before.value(GAP), rel=0.02)
    assert after.value(TURNED) == pytest.approx(before.value(TURNED), abs=1e-4)
    assert after.value(LAYER, "model.3") == pytest.approx(before.value(LAYER, "model.3"), rel=0.02)


class Branch(nn.Module):
    """A small branch beside the read-out, as behind a LayerScale."""

    def __init__(self, size: float, norm: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.head, self.b, self.out = nn.Linear(6, 3), nn.Linear(6, 16), nn.Linear(16, 3)
        self.norm = nn.LayerNorm(16) if norm else nn.Identity()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + self.size * self.out(torch.tanh(self.norm(self.b(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [5e-3, 1e-6])
@pytest.mark.parametrize("norm", [False, True])
def test_a_small_branch_is_not_taken_for_a_scale_invariant_layer(size: float, norm: bool) -> None:
    model, (x, y) = Branch(size, norm).double(), data(80)
    then = state(model)
    with torch.no_grad():
        model.b.weight *= 3
        model.b.bias *= 3
    snap = richter.measure(model, richter.Probe(x, y), [GAP, LAYER], initial=then)
    assert snap.value(LAYER, "b") == pytest.approx(0 if norm else 2, abs=1e-9)
    assert ("scale-invariant layer: its weights, |W| = 3 |W0|" in snap.note(LAYER, "b")) == norm
    if not norm:
        before = copy.deepcopy(model)
        before.load_state_dict(then)
        assert snap.value(GAP) == pytest.approx(oracles.linearisation_gap(model, before, x), rel=1e-7)
        assert snap.value(GAP) > 0.01


def test_a_layer_that_is_nearly_scale_invariant_is_not() -> None:
    """A path around the norm carries 1e-5 of the layer's output: less than the tolerance for the eps of a norm."""
    class Around(Branch):
        def forward(self, x: Tensor) -> Tensor:
            z = self.b(x)
            return self.head(x) + self.out(torch.tanh(self.norm(z) + 1e-5 * z))  # type: ignore[no-any-return]

    model, (x, y) = Around(1.0, norm=True).double(), data(80)
    then = state(model)
    with torch.no_grad():
        model.b.weight *= 3
        model.b.bias *= 3
    snap = richter.measure(model, richter.Probe(x, y), [LAYER], initial=then)
    assert snap.value(LAYER, "b") == pytest.approx(2, rel=1e-9)


def test_the_eps_of_a_norm_counts_beside_a_small_branch() -> None:
    """It changes the branch by more than 1e-3, and the outputs by much less."""
    class Steep(Branch):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(x) + self.size * self.out(torch.sin(30 * self.norm(self.b(x))))  # type: ignore[no-any-return]

    model, (x, y) = Steep(1e-4, norm=True).double(), data(80)
    with torch.no_grad():
        model.b.weight *= 0.5
        model.b.bias *= 0.5
    before = copy.deepcopy(model)
    with torch.no_grad():
        model.b.weight *= 3
        model.b.bias *= 3
    snap = richter.measure(model, richter.Probe(x, y), [LAYER], initial=state(before))
    assert snap.value(LAYER, "b") == pytest.approx(2, rel=1e-9)


class ZeroEnd(nn.Module):
    """A residual branch that contributes nothing at initialisation: the gain of its norm, or its last layer, starts at zero."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.read, self.b, self.out, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.norm = nn.LayerNorm(16) if norm else nn.Identity()
        for p in (self.norm if norm else self.out).parameters():
            nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.read(x))
        z = self.norm(self.b(h)) if isinstance(self.norm, nn.LayerNorm) else self.out(torch.tanh(self.b(h)))
        return self.head(torch.tanh(h + z))  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("norm", [False, True])
def test_a_branch_without_effect_at_the_start_is_judged_by_the_network_now(norm: bool, dtype: torch.dtype) -> None:
    """Published residual networks set the gain of the last norm of each block to zero: its convolution has no gradient then."""
    model, (x, y) = ZeroEnd(norm).to(dtype), data(80, dtype=dtype)
    then = state(model)
    with torch.no_grad():
        for p in (model.norm if norm else model.out).parameters():
            p += 0.1 * torch.arange(p.numel()).cos().view(p.shape).to(p)
        model.b.weight *= 3
        model.b.bias *= 3
    snap = richter.measure(model, richter.Probe(x, y), [LAYER], initial=then)
    assert snap.value(LAYER, "b") == pytest.approx(0 if norm else 2, abs=1e-6)


@pytest.mark.parametrize("size", [1e-5, 1e-3])
def test_a_weak_second_use_beside_a_norm_counts(size: float) -> None:
    """It saturates, so that large multiples of the weights have no effect, and changes the outputs by less than eps may."""
    class Twice(Branch):
        def forward(self, x: Tensor) -> Tensor:
            z = self.b(x)
            return self.out(self.norm(z)) + size * self.out(torch.tanh(z))  # type: ignore[no-any-return]

    model, (x, y) = Twice(1.0, norm=True).double(), data(80)
    before = copy.deepcopy(model)
    with torch.no_grad():
        model.b.weight *= 3
        model.b.bias *= 3
    snap = richter.measure(model, richter.Probe(x, y), [GAP, LAYER], initial=state(before))
    assert snap.value(LAYER, "b") == pytest.approx(2, rel=1e-9)
    assert snap.value(GAP) == pytest.approx(oracles.linearisation_gap(model, before, x), rel=1e-7)


def test_scale_with_an_effect_counts() -> None:
    model = plain(6, 16, 3)
    then = state(model)
    with torch.no_grad():
        model[0].weight *= 1.5
        model[0].bias *= 1.5
    snap = richter.measure(model, richter.Probe(*data()), [LAYER, TURNED], initial=then)
    assert snap.value(LAYER, "0") == pytest.approx(0.5, rel=1e-9)
    assert snap.value(TURNED) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("make", "fewer"), [(lambda: plain(6, 16, 3), 3), (normed, 1)], ids=["plain", "norms"])
def test_one_combination_is_enough_where_every_scale_has_an_effect(make: Callable[[], nn.Module], fewer: int,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Of outputs; <W, df/dW> is asked of every weight and bias, and of three where some scale has none."""
    x, y = data(80)
    model, then = trained(make(), 1.0, x, y)
    calls: list[Tensor] = []
    real = movement.NetworkPair.inner
    monkeypatch.setattr(movement.NetworkPair, "inner", lambda self, a, b: (calls.append(a), real(self, a, b))[1])
    values, asked = [], []
    for clearly in (movement.CLEARLY, math.inf):
        calls.clear()
        monkeypatch.setattr(movement, "CLEARLY", clearly)
        snap = richter.measure(model, richter.Probe(x, y), [LAYER, TURNED], initial=then)
        values.append([r.value for r in snap.rows])
        asked.append(len(calls))
    assert asked[0] * fewer == asked[1] > 0
    assert values[0] == pytest.approx(values[1], rel=1e-12, nan_ok=True)


# ----------------------------------------------------------------------------------------------- ways to the product


class NoForward(torch.autograd.Function):
    """A tanh of a user's own, without forward mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return g * (1 - y * y)


class OnceOnly(NoForward):
    """Nor can it be differentiated twice."""

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return g * (1 - y * y)


class Curved(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], outputs: int = 3, norm: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(6, 8).double(), nn.Linear(8, outputs).double()
            self.shift = nn.Parameter(torch.randn(8, dtype=torch.float64))
            self.norm = nn.BatchNorm1d(8).double() if norm else nn.Identity()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.norm(self.a(x)) + self.shift))  # type: ignore[no-any-return]


@pytest.mark.parametrize("function", [NoForward.apply, OnceOnly.apply], ids=["twice", "captures"])
def test_every_way_gives_the_same_number(function: Callable[[Tensor], Tensor]) -> None:
    model, same = Curved(torch.tanh), Curved(function)
    then = nudged(model)
    nudged(same)
    probe = richter.Probe(*data(20))
    assert richter.measure(same, probe, [GAP], initial=then).value(GAP) == pytest.approx(
        richter.measure(model, probe, [GAP], initial=then).value(GAP), rel=1e-9)


def test_many_outputs_are_combined_where_they_are_captured() -> None:
    model, same = Curved(torch.tanh, 600), Curved(OnceOnly.apply, 600)
    then = nudged(model)
    nudged(same)
    probe = richter.Probe(data(40)[0], None)
    row = richter.measure(same, probe, [GAP], initial=then).row(GAP)
    assert row.mark is Mark.ESTIMATED
    assert "random outputs" in row.note
    assert row.value == pytest.approx(richter.measure(model, probe, [GAP], initial=then).value(GAP), rel=0.1)


def test_no_way_is_no_number_and_a_reason() -> None:
    model = Curved(OnceOnly.apply, norm=True).eval()
    then = nudged(model)
    model.norm.running_mean += 1  # type: ignore[operator]
    row = richter.measure(model, richter.Probe(*data(70)), [GAP], initial=then).row(GAP)
    assert math.isnan(row.value)
    assert row.mark is Mark.UNDEFINED
    assert "norms over batches leave no gradients of single examples" in row.note


def test_a_product_that_disagrees_with_the_backward_pass_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = plain(6, 8, 3)
    then = nudged(model)
    probe = richter.Probe(*data(20))
    right = richter.measure(model, probe, [GAP], initial=then).value(GAP)

    def wrong(*args: Any) -> tuple[Any, Tensor]:
        run, tangent = movement.pushed_forward(*args)
        return run, 1.01 * tangent
    monkeypatch.setitem(movement.WAYS, "forward mode", wrong)
    assert richter.measure(model, probe, [GAP], initial=then).value(GAP) == pytest.approx(right, rel=1e-9)


def test_a_product_that_fails_on_later_examples_costs_no_other_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The change of features was one of the examples before the failure, and nothing said so."""
    x, y = data(130)
    model, then = trained(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double(), 0.1, x, y)
    right = richter.measure(model, richter.Probe(x, y), [TURNED], initial=then).value(TURNED)
    calls: list[int] = []

    def wrong(*args: Any) -> tuple[Any, Tensor]:
        run, tangent = movement.pushed_forward(*args)
        calls.append(len(calls))
        return run, (1.0 if len(calls) == 1 else 1.01) * tangent
    monkeypatch.setitem(movement.WAYS, "forward mode", wrong)
    for _ in range(2):  # one of two blocks is compared in one measurement, the other one in the next
        calls.clear()
        snap = richter.measure(model, richter.Probe(x, y), [GAP, TURNED], initial=then)
        assert math.isnan(snap.value(GAP))
        assert "on some examples of the probe, forward mode disagrees with the backward pass" in snap.row(GAP).note
        assert snap.value(TURNED) == right


# ------------------------------------------------------------------------------------------------------- precision, errors


@pytest.mark.parametrize(("widths", "size"), [((6, 64, 3), 1e-5), ((6, 256, 256, 256, 3), 1e-6), ((6, 2048, 3), 1e-6)])
def test_a_gap_below_the_rounding_is_a_bound(widths: tuple[int, ...], size: float) -> None:
    x, y = data(80, dtype=torch.float32)
    model = plain(*widths, dtype=torch.float32)
    then = nudged(model, size)
    row = richter.measure(model, richter.Probe(x, y), [GAP], initial=then).row(GAP)
    assert row.mark is Mark.BOUND
    assert "rounding (float32)" in row.note
    exact = richter.measure(copy.deepcopy(model).double(), richter.Probe(x.double(), y), [GAP], initial=then)
    assert exact.value(GAP) < row.value


def test_errors_are_those_of_leaving_out() -> None:
    model = plain(6, 16, 16, 3)
    then = nudged(model)
    x, y = data(96)
    snap = richter.measure(model, richter.Probe(x, y), [GAP, "magnitude", LAYER, *MOVEMENT[4:], TURNED], initial=then)
    left = [richter.measure(model, richter.Probe(x[torch.arange(96) % 8 != g], y[torch.arange(96) % 8 != g]),
                            snap.measures, initial=then) for g in range(8)]
    for row in snap.rows:
        if math.isfinite(row.value):
            values = torch.tensor([s.value(row.measure, row.layer) for s in left], dtype=torch.float64)
            expected = (7 / 8 * (values - values.mean()).square().sum()).sqrt().item()
            assert row.error == pytest.approx(expected, rel=1e-6), row.measure


@pytest.mark.parametrize("name", ["resnet", "gpt", "lstm", "hf_gpt2", "moe"])
def test_nothing_of_the_model_is_touched(name: str) -> None:
    case = zoo.CASES[name]
    model = case.build().train(name != "resnet")
    x, y = case.batch(4)
    before, modes = state(model), [m.training for m in model.modules()]
    tracked = [getattr(m, "track_running_stats", None) for m in model.modules()]
    richter.measure(model, richter.Probe(x, y), list(MOVEMENT), initial=zoo.initial(case), output=case.output)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert [getattr(m, "track_running_stats", None) for m in model.modules()] == tracked
    assert all(p.grad is None for p in model.parameters())


def test_less_memory_is_fewer_rows() -> None:
    model = plain(6, 800, 800, 3)
    then = nudged(model, 0.01)
    x, y = data(128)
    whole, less = (richter.measure(model, richter.Probe(x, y, chunk=8), [TURNED], initial=then, memory=memory).row(TURNED)
                   for memory in ("2GiB", "4MB"))
    assert whole.mark is Mark.EXACT
    assert less.mark is Mark.ESTIMATED
    assert "of the rows" in less.note
    assert less.value == pytest.approx(whole.value, rel=0.3)


class Sorted(nn.Module):
    """Sorts its examples by what it has learned, but only if a large one is among them, as none of the first is."""

    def __init__(self, sorts: bool) -> None:
        super().__init__()
        self.first, self.rest, self.sorts = plain(6, 8), plain(8, 8, 3), sorts

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        order = h[:, 0].argsort() if self.sorts and bool((x[:, 0] > 1.5).any()) else torch.arange(len(x))
        return self.rest(h[order])[order.argsort()]  # type: ignore[no-any-return]


def test_rows_that_later_examples_mix_up_are_seen() -> None:
    """A layer that has examples in another order is not compared; never in the wrong order."""
    x, y = data(80)
    x[:8, 0] = x[:8, 0].clamp(max=1.0)
    model, same = Sorted(sorts=True), Sorted(sorts=False)
    then = nudged(model)
    nudged(same)
    snap, plainly = (richter.measure(m, richter.Probe(x, y), [TURNED, GAP, LAYER], initial=then) for m in (model, same))
    assert math.isnan(snap.value(TURNED))
    assert "no hidden layer reads as much of every example" in snap.note(TURNED)
    for row in snap.rows:
        if row.measure != TURNED:
            assert row.value == pytest.approx(plainly.value(row.measure, row.layer), rel=1e-9, nan_ok=True)


def test_what_it_costs_in_passes() -> None:
    """One pass of each network, beside the passes of a few examples and the outputs of each chunk in another order."""
    model = plain(6, 8, 8, 3)
    then = nudged(model)
    x, y = data(80)
    seen: list[int] = []
    model.register_forward_pre_hook(lambda m, args: seen.append(len(args[0])))
    measurement = Measurement(model, richter.Probe(x, y, chunk=40), list(MOVEMENT[:4]), initial=then)
    measurement.take()
    nudged(model)
    seen.clear()
    measurement.take()
    assert [n for n in seen if n > 8] == 2 * [40, 20, 20, 40]


def test_the_order_of_measures_costs_no_pass() -> None:
    """The pass by which the linearisation comes serves the change of features, whichever was asked for first."""
    model = plain(6, 8, 8, 3)
    then, probe = nudged(model), richter.Probe(*data(80))
    seen: list[int] = []
    model.register_forward_pre_hook(lambda m, args: seen.append(len(args[0])))
    passes = []
    for measures in ([GAP, TURNED], [TURNED, GAP]):
        seen.clear()
        richter.measure(model, probe, measures, initial=then)
        passes.append(seen.count(80))
    assert passes == [2, 2]


def numbers(value: Any) -> list[float]:
    """Numbers of a Gap, Turned or Moved."""
    if isinstance(value, movement.Gap):
        return [value.rest, value.change, value.linear, value.rounding]
    return [*value.layers.values()] if isinstance(value, movement.Turned) else [*value]


@pytest.mark.parametrize("make", [lambda: plain(6, 16, 16, 3), normed, batch_normed], ids=["plain", "scaled", "blocks"])
def test_a_pass_of_its_own_gives_the_same_numbers(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison without room in the shared pass gives the same numbers; two ranks have together what one has alone."""
    model, (x, y) = make(), data(144)
    then = nudged(model, 0.3)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm1d):
            norm.running_mean += 0.3  # type: ignore[operator, assignment]
    probe, measures = richter.Probe(x, y, chunk=24), ["nfc", *MOVEMENT[:4]]
    shared = richter.measure(model, probe, measures, initial=then)
    monkeypatch.setattr(frame, "streamed", lambda subject, wants: frame.due_of(wants))
    monkeypatch.setattr(evaluate, "streamed", lambda subject, wants: frame.due_of(wants))
    apart = richter.measure(model, probe, measures, initial=then)
    for p, q in zip(shared.rows, apart.rows, strict=True):
        assert (p.value, p.error) == pytest.approx((q.value, q.error), rel=1e-9, nan_ok=True), p
    monkeypatch.undo()
    subject = Subject(model, probe, then, None, 2 ** 30, None)
    with quiet(model):
        subject.renew()
        for statistic in (LINEARISATION, FEATURE_CHANGE, FUNCTION_CHANGE):
            ranks = []
            for rank in (Share(), Share(0, 2), Share(1, 2)):
                subject.shared.clear()
                ranks.append(frame.gathered(subject, statistic, every_output, rank).gathering)  # type: ignore[attr-defined]
            whole, first, second = ranks
            first.merge(second)
            place = "0" if statistic is FUNCTION_CHANGE else WHOLE
            for a, b in zip(numbers(whole.value(place)), numbers(first.value(place)), strict=True):
                assert a == pytest.approx(b, rel=1e-9), statistic


# ------------------------------------------------------------------------------------- where it was another network's


def test_a_saturated_layer_is_not_taken_for_one_without_scale() -> None:
    """At both ends the derivative in the scale of the first layer is small: at the start because outputs are small, at the end
    because the layer is saturated. Scaling it by a finite factor has an effect all the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x = torch.randn(600, 8)
        y = (x[:, 0] * x[:, 1] > 0).long()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.Sigmoid(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 2))
        with torch.no_grad():
            model[4].weight.mul_(0.01)  # type: ignore[union-attr, operator]
            model[4].bias.zero_()  # type: ignore[union-attr, operator]
        before, optimiser = state(model), torch.optim.Adam(model.parameters(), 0.05)
        for _ in range(600):
            rows = torch.randint(600, (64,))
            optimiser.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimiser.step()
    model, before, x = model.double(), {k: v.double() for k, v in before.items()}, x[:128].double()
    then = copy.deepcopy(model)
    then.load_state_dict(before)
    snap = richter.measure(model, richter.Probe(x, y[:128]), [GAP, LAYER], initial=before)
    assert snap.value(GAP) == pytest.approx(oracles.linearisation_gap(model, then, x), rel=1e-8)


def test_features_of_the_start_are_those_of_the_norms_that_have_moved() -> None:
    """A norm that is thawed later uses its batch from then on, in the initial network too."""
    x, y = data(128, 6, 3)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(),
                          nn.Linear(16, 3)).double()
    x = 20 * x + 2
    before, probe = state(model), richter.Probe(x, y)
    watch = richter.Observer(model, probe, when=1, budget=None, measures=[TURNED], initial=before)
    for step, thawed in enumerate((4, 1)):
        model.eval()
        model[thawed].train()
        model(x)
        nudged(model, 0.01, seed=step)
        snap = watch(step)
    assert snap is not None
    assert snap.value(TURNED) == pytest.approx(richter.measure(model, probe, [TURNED], initial=before).value(TURNED), rel=1e-10)


def test_a_gap_made_of_the_rounding_of_the_outputs_is_a_bound() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = plain(6, 16, 3, dtype=torch.float32)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) + 1e4

    x, y = data(dtype=torch.float32)
    model = Shifted()
    before = nudged(model, 1e-4)
    row = richter.measure(model, richter.Probe(x, y), [GAP], initial=before).row(GAP)
    assert row.mark is Mark.BOUND
    assert "rounding" in row.note


@pytest.mark.parametrize("targets", ["multi-label", "soft", "values"])
def test_a_loss_that_need_not_be_the_trainings_says_so(targets: str) -> None:
    x, _ = data()
    Y = {"multi-label": (x[:, :3] > 0).double(), "soft": torch.softmax(x[:, :3], 1), "values": x[:, :3]}[targets]
    note = richter.measure(plain(6, 16, 3), richter.Probe(x, Y), ["probe_loss"]).note("probe_loss")
    assert ("not known" in note) is (targets != "values")
    assert not richter.measure(plain(6, 16, 3), richter.Probe(x, Y, loss=nn.MSELoss()), ["probe_loss"]).note("probe_loss")
