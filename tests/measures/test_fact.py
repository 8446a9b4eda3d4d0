"""Features at convergence: which loss is differentiated, what changes no number, what holds at a minimum, and what is said
elsewhere. That every number is its definition, on every model of the zoo: test_exactness.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from test_laws import EACH_KIND, SEEDS, N, inputs, labels, law, least_memory, network, normal, same
from torch import Tensor, nn

import oracles
import richter
import zoo
from richter.cli import main
from richter.core import WHOLE, MemoryBudgetError, SelectionError
from richter.instrument.cotangents import loss_gradient, random_outputs
from richter.instrument.statistics import MATRIX, WEIGHT_GRADIENT
from richter.measures import Measure, catalogue

FACT = [name for name, m in catalogue().items() if m.cotangents is loss_gradient]
DECAY = 0.1


def values(model: nn.Module, probe: richter.Probe, measures: Any = FACT, **options: Any) -> dict[tuple[str, str], float]:
    return {(r.measure, r.layer): r.value for r in richter.measure(model, probe, measures, **options).rows}


def by_autograd(model: nn.Module, x: Any, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor],
                layers: dict[str, Any]) -> dict[tuple[str, str], float]:
    """The definition, of f[n,k]."""
    found = {}
    for layer in layers:
        W, G = oracles.weight_and_gradient(model, x, y, layer, loss=loss)
        found |= {(m, layer): v for m, v in oracles.fact_measures(W, G, DECAY).items()}
    return found


# ---------------------------------------------------------------------------------------------------- which loss it is


def hot(y: Tensor) -> Tensor:
    return F.one_hot(y, 3).double()


LOSSES: dict[str, tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = {
    "ids": (None, F.cross_entropy),
    "CrossEntropyLoss": (nn.CrossEntropyLoss(), F.cross_entropy),
    "cross_entropy": (F.cross_entropy, F.cross_entropy),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), lambda f, y: F.cross_entropy(f, y, label_smoothing=0.1)),
    "weighted": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]).double()),
                 lambda f, y: F.cross_entropy(f, y, weight=torch.tensor([1.0, 2.0, 5.0]).double())),
    "none": (nn.CrossEntropyLoss(reduction="none"), F.cross_entropy),
    "MSELoss of ids": (nn.MSELoss(), lambda f, y: (f - hot(y)).square().mean()),
    "mse_loss of ids": (F.mse_loss, lambda f, y: (f - hot(y)).square().mean()),
    "by example": (lambda f, y: (f - hot(y)).square().sum(1) / 2, lambda f, y: (f - hot(y)).square().sum(1).mean() / 2),
    "one's own": (lambda f, y: F.multi_margin_loss(f, y), lambda f, y: F.multi_margin_loss(f, y)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_ids_is_the_users(name: str) -> None:
    model, x, y = network("mlp", 0), inputs("mlp", 0), labels()
    given, exact = LOSSES[name]
    found = values(model, richter.Probe(x, y, loss=given, weight_decay=DECAY))
    same(found, by_autograd(model, x, y, exact, {"0": 0, "2": 0, "4": 0}), 1e-10)


@pytest.mark.parametrize(("loss", "exact"), [
    (None, F.mse_loss), (nn.MSELoss(), F.mse_loss), (nn.L1Loss(), F.l1_loss), (nn.HuberLoss(), F.huber_loss),
    (nn.CrossEntropyLoss(), F.cross_entropy), (lambda f, y: ((f - y) ** 4).mean(1), lambda f, y: ((f - y) ** 4).mean()),
])
def test_the_loss_of_targets_is_the_users(loss: Any, exact: Any) -> None:
    model, x, y = network("mlp", 0), inputs("mlp", 0), normal(5, N, 3).softmax(1)
    found = values(model, richter.Probe(x, y, loss=loss, weight_decay=DECAY))
    same(found, by_autograd(model, x, y, exact, {"0": 0, "2": 0, "4": 0}), 1e-10)


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss(), None])
def test_one_output_is_not_broadcast_against_its_labels(loss: Any) -> None:
    """f [n,1] - y [n] would be [n,n]."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x, y = inputs("mlp", 0), torch.arange(N) % 2
    exact = F.binary_cross_entropy_with_logits if isinstance(loss, nn.BCEWithLogitsLoss) else F.mse_loss
    found = values(model, richter.Probe(x, y, loss=loss, weight_decay=DECAY))
    same(found, by_autograd(model, x, y, lambda f, y: exact(f, y.double()[:, None]), {"0": 0, "2": 0}), 1e-10)


@pytest.mark.parametrize("loss", [None, nn.CrossEntropyLoss(), nn.CrossEntropyLoss(ignore_index=-7)])
@pytest.mark.parametrize("masked", [True, False])
def test_tokens_without_a_label_are_not_in_the_loss(loss: Any, masked: bool) -> None:
    """The mean is over the labels of all examples, unequal in number; a masked token's gradient through others is kept."""
    case = zoo.CASES["gpt"]
    model, (x, y) = case.build(), case.batch(5)
    labelled = y.clone()
    labelled[0, 1:], labelled[3, 0] = -100, -100
    mask = torch.ones(y.shape, dtype=torch.bool)
    if masked:
        mask[1, 0] = mask[2, -1] = False
    expected = by_autograd(model, x, torch.where(mask, labelled, -100), oracles.data_loss, case.maps)
    found = values(model, richter.Probe(x, labelled, chunk=2, mask=mask if masked else None, loss=loss, weight_decay=DECAY))
    same({k: v for k, v in found.items() if k in expected}, expected, 1e-9)


def test_a_loss_is_asked_once_with_all_examples() -> None:
    """So one that mixes examples is differentiated as it is, whatever the chunks."""
    def spread(f: Tensor, y: Tensor) -> Tensor:
        return -(f - f.mean(0)).norm() / len(f) ** 0.5
    model, x, y = network("mlp", 0), inputs("mlp", 0), labels()
    expected = by_autograd(model, x, y, spread, {"0": 0, "2": 0, "4": 0})
    for chunk in (2, N):
        same(values(model, richter.Probe(x, y, loss=spread, chunk=chunk, weight_decay=DECAY)), expected, 1e-10)


# --------------------------------------------------------------------------------------------- what changes no number


@EACH_KIND
@law(3)
@given(seed=SEEDS, chunk=st.integers(1, N), order=st.permutations(range(N)))
def test_neither_chunks_nor_order_change_a_number(kind: str, seed: int, chunk: int, order: list[int]) -> None:
    model, x, y = network(kind, seed), inputs(kind, seed), labels()
    plain = values(model, richter.Probe(x, y, weight_decay=DECAY))
    assert all(map(math.isfinite, plain.values()))
    same(values(model, richter.Probe(x, y, chunk=chunk, weight_decay=DECAY)), plain, 1e-10)
    same(values(model, richter.Probe(x[order], y[order], weight_decay=DECAY)), plain, 1e-10)
    single = values(model.float(), richter.Probe(x.float(), y, chunk=chunk, weight_decay=DECAY))
    same(single, plain, 1e-4)


@EACH_KIND
@law(2)
@given(seed=SEEDS, more=st.sampled_from([1.0, 1.3, 3.0]))
def test_memory_changes_no_number(kind: str, seed: int, more: float) -> None:
    model, probe = network(kind, seed), richter.Probe(inputs(kind, seed, 4), labels(4), weight_decay=DECAY)
    least = least_memory(lambda memory: richter.measure(model, probe, FACT, memory=memory))
    assert least >= 8 * 4 * sum(p.numel() for p in model.parameters() if p.dim() > 1)  # a sum in float64 for each group
    same(values(model, probe, memory=more * least), values(model, probe), 1e-10)
    with pytest.raises(MemoryBudgetError):
        richter.measure(model, probe, FACT, memory=least / 2)


@EACH_KIND
@law(3)
@given(seed=SEEDS, scale=st.sampled_from([1e-3, 0.2, 7.0, 1e3]))
def test_the_scale_of_the_objective_changes_no_number(kind: str, seed: int, scale: float) -> None:
    """c L + c lambda/2 |theta|^2 has the same minima; lambda alone changes everything but the correlations."""
    model, x, y = network(kind, seed), inputs(kind, seed), labels()
    plain = values(model, richter.Probe(x, y, weight_decay=DECAY))
    scaled = richter.Probe(x, y, loss=lambda f, y: scale * F.cross_entropy(f, y), weight_decay=scale * DECAY)
    same(values(model, scaled), plain, 1e-9)
    other = values(model, richter.Probe(x, y, weight_decay=scale * DECAY))
    for (measure, layer), value in plain.items():
        if measure in ("fact", "fact_backward"):
            assert other[measure, layer] == pytest.approx(value, rel=1e-10)
        else:
            assert other[measure, layer] != pytest.approx(value, rel=1e-3)


def test_cotangents_that_are_asked_for_do_not_replace_the_loss() -> None:
    model, probe = network("mlp", 0), richter.Probe(inputs("mlp", 0), labels(), weight_decay=DECAY)
    same(values(model, probe, cotangents=random_outputs(2)), values(model, probe), 0.0)


def test_one_of_two_tied_layers_has_the_gradient_of_both() -> None:
    for name in ("gpt", "tied", "tied_autoencoder"):
        case = zoo.CASES[name]
        probe = richter.Probe(*case.batch(5), weight_decay=DECAY)
        whole = values(case.build(), probe, output=case.output)
        for layer in case.maps:
            alone = values(case.build(), probe, output=case.output, layers=lambda k, layer=layer: k == layer)
            same(alone, {key: v for key, v in whole.items() if key[1] == layer}, 1e-12)


class ReadByItsNorm(nn.Module):
    """The scales of a norm are the read-out as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(5, 6), nn.LayerNorm(6)
        nn.init.normal_(self.norm.weight)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(torch.tanh(self.first(x))), self.norm.weight[None])


def test_a_matrix_that_is_the_scale_of_a_norm_too_has_the_gradient_of_both() -> None:
    model, x, y = ReadByItsNorm(), inputs("mlp", 0), torch.linspace(-1, 1, len(labels()), dtype=torch.float64)[:, None]
    size = Measure("size", lambda G: G.norm().item(), (WEIGHT_GRADIENT,), loss_gradient)
    snap = richter.measure(model, richter.Probe(x, y, loss=lambda f, y: (f - y).square().sum(1) / 2), [size])
    exact = torch.autograd.grad((model(x) - y).square().sum() / 2 / len(x), [model.first.weight, model.norm.weight])
    assert {r.layer: r.value for r in snap.rows} == pytest.approx({"first": exact[0].norm().item(),
                                                                  "norm.use2": exact[1].norm().item()}, rel=1e-10)


def test_dropout_is_that_of_the_measurement() -> None:
    """The loss and its gradient see the same draws: for l = |f|^2 / 2 and f = W h, <W, dL/dW> is twice the loss."""
    model = nn.Sequential(nn.Linear(5, 20), nn.Dropout(0.5), nn.Linear(20, 3, bias=False)).double()
    seen: list[float] = []

    def loss(f: Tensor, y: Tensor) -> Tensor:
        seen.append(f.square().sum(1).mean().item() / 2)
        return f.square().sum(1) / 2

    probe = richter.Probe(inputs("mlp", 0), labels(), loss=loss, weight_decay=DECAY)
    inner = Measure("inner", lambda W, G: (W * G).sum().item(), (MATRIX, WEIGHT_GRADIENT), loss_gradient)
    for seed in (0, 1):
        seen.clear()
        found = richter.measure(model, probe, [inner], mode="train", seed=seed).value("inner", "2")
        assert found == pytest.approx(2 * seen[0], rel=1e-12)
    assert values(model, probe, mode="train", seed=0) != values(model, probe, mode="train", seed=1)


def test_the_standard_error_leaves_groups_of_examples_out() -> None:
    model, n = network("conv", 1), 16
    x, y = inputs("conv", 1, n), labels(n)
    found = richter.measure(model, richter.Probe(x, y, weight_decay=DECAY), FACT)
    rest = [torch.arange(n)[torch.arange(n) % 8 != g] for g in range(8)]
    without = [values(model, richter.Probe(x[r], y[r], weight_decay=DECAY)) for r in rest]
    for r in found.rows:
        left = torch.tensor([w[r.measure, r.layer] for w in without], dtype=torch.float64)
        assert r.error == pytest.approx(((left - left.mean()).square().sum() * 7 / 8).sqrt().item(), rel=1e-8)


# -------------------------------------------------------------------------------------------------------- at a minimum


def ridge(n: int = 20, decay: float = DECAY) -> tuple[nn.Module, Tensor, Tensor]:
    """The minimum of mean |W x - y|^2 / 2 + decay/2 |W|^2 in closed form."""
    x, y = normal(0, n, 6), normal(1, n, 3)
    model = nn.Linear(6, 3, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.linalg.solve(x.T @ x / n + decay * torch.eye(6).double(), x.T @ y / n).T)
    return nn.Sequential(model), x, y


def half(f: Tensor, y: Tensor) -> Tensor:
    return (f - y).square().sum(1) / 2


def test_ridge_regression_has_converged() -> None:
    model, x, y = ridge()
    snap = richter.measure(model, richter.Probe(x, y, loss=half, weight_decay=DECAY), FACT)
    for measure in FACT:
        assert snap.value(measure, "0") == pytest.approx(1.0 if measure in ("fact", "fact_backward") else 0.0, abs=1e-12)
        assert not snap.note(measure, "0")


@pytest.mark.parametrize("factor", [0.5, 1.05, 1.2, 4.0])
def test_another_decay_is_seen(factor: float) -> None:
    """FACT is then W^T W / factor."""
    model, x, y = ridge()
    snap = richter.measure(model, richter.Probe(x, y, loss=half, weight_decay=factor * DECAY), FACT)
    for measure in ("fact_error", "fact_backward_error", "fact_stationarity"):
        assert snap.value(measure, "0") == pytest.approx(abs(1 - 1 / factor), rel=1e-9)
    assert snap.value("fact", "0") == pytest.approx(1.0, abs=1e-12)
    assert snap.note("fact", "0").startswith("not converged") == (abs(1 - 1 / factor) > 0.1)


@law(10)
@given(seed=SEEDS, r=st.integers(1, 6), d=st.integers(1, 6))
def test_the_root_of_the_gradient_product(seed: int, r: int, d: int) -> None:
    """Of one layer whose outputs are weighed by D: AGOP = W^T D^2 W."""
    model = nn.Sequential(nn.Linear(d, r, bias=False), nn.Linear(r, r, bias=False)).double()
    D = normal(seed, r).abs() + 0.1
    with torch.no_grad():
        model[0].weight.copy_(normal(seed + 1, r, d))
        model[1].weight.copy_(torch.diag(D))
    W = normal(seed + 1, r, d)
    values_, vectors = torch.linalg.eigh(W.T @ torch.diag(D**2) @ W)
    root = vectors @ torch.diag(values_.clamp(min=0).sqrt()) @ vectors.T
    found = richter.measure(model, richter.Probe(normal(seed + 2, 4, d), None), ["nfc_sqrt"]).value("nfc_sqrt", "0")
    assert found == pytest.approx(oracles.cosine(W.T @ W, root), abs=1e-6)  # here the oracle takes roots of rounding
    for exponent in (0.5, 1.0, 2.0):  # the root's own powers
        power = vectors @ torch.diag(values_.clamp(min=0) ** exponent) @ vectors.T
        measure = richter.measures.nfc_power(exponent)
        found = richter.measure(model, richter.Probe(normal(seed + 2, 4, d), None), [measure]).value(measure.name, "0")
        assert found == pytest.approx(oracles.cosine(W.T @ W, power), abs=1e-6)


# ---------------------------------------------------------------------------------------------------------- what is said


def test_before_convergence_the_rows_say_so() -> None:
    model, probe = network("mlp", 0), richter.Probe(inputs("mlp", 0), labels(), weight_decay=DECAY)
    snap = richter.measure(model, probe, FACT)
    for layer in ("0", "2", "4"):
        off = snap.value("fact_stationarity", layer)
        for measure in ("fact", "fact_backward"):
            assert snap.note(measure, layer) == (f"not converged: |dL/dW + decay W| is {off:.2g} of |decay W|; FACT holds at "
                                                 f"convergence, on the training examples")
        assert not snap.note("fact_error", layer)


def test_without_a_decay_there_is_a_correlation_alone() -> None:
    model, x = network("mlp", 0), inputs("mlp", 0)
    snap = richter.measure(model, richter.Probe(x, labels()), FACT)
    decayed = richter.measure(model, richter.Probe(x, labels(), weight_decay=DECAY), FACT)
    for r in snap.rows:
        assert r.note.startswith("weight_decay is 0"), r
        if r.measure in ("fact", "fact_backward"):
            assert r.value == decayed.value(r.measure, r.layer)
            assert r.note.endswith("cannot be checked")
        else:
            assert math.isnan(r.value)


def test_without_labels_there_is_no_loss() -> None:
    model, x = network("mlp", 0), inputs("mlp", 0)
    snap = richter.measure(model, richter.Probe(x, None, weight_decay=DECAY), ["nfc", *FACT])
    assert all(math.isnan(r.value) and r.note == "the probe has no labels" for r in snap.rows if r.measure != "nfc")
    assert math.isfinite(snap.value("nfc", "0"))
    own = values(model, richter.Probe(x, None, loss=lambda f, y: f.square().mean(), weight_decay=DECAY))
    same(own, values(model, richter.Probe(x, torch.zeros(N, 3), weight_decay=DECAY)), 1e-12)


def test_a_root_of_random_outputs_is_not_given() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 600))
    snap = richter.measure(model, richter.Probe(inputs("mlp", 0).float(), None), ["nfc", "nfc_sqrt"])
    assert math.isnan(snap.value("nfc_sqrt", "0"))
    assert snap.note("nfc_sqrt", "0").startswith("needs every output")
    power = richter.measures.nfc_power(1 / 3)
    row = richter.measure(model, richter.Probe(inputs("mlp", 0).float(), None), [power])
    assert math.isnan(row.value("nfc_power_0.333333", "0"))
    assert row.note(power.name, "0").startswith("needs every output")
    assert math.isfinite(snap.value("nfc", "0"))


def test_the_diagnosis_and_the_report_say_it(tmp_path: Path) -> None:
    model, x, y = network("mlp", 0), inputs("mlp", 0), labels()
    probe = richter.Probe(x, y, weight_decay=DECAY)
    watch = richter.Observer(model, probe, run=tmp_path / "run", measures=["nfc", "cnfc", "c_uc_ratio", "fact"])
    snap = watch(0)
    watch.close()
    assert snap is not None
    (evidence,) = richter.diagnose(snap).evidence
    low = min((snap.value("fact", k), k) for k in ("0", "2", "4"))
    assert evidence.startswith(f"correlation of W^T W with FACT: {low[0]:.3g} ({low[1]}) to ")
    assert f"in 3 of 3 layers it says little ({low[1]}: not converged" in evidence
    from richter.report.html import report
    page = report([richter.runs.load(tmp_path / "run")], tmp_path / "r.html").read_text(encoding="utf-8")
    assert "not converged: |dL/dW + decay W| is" in page
    assert "Features at convergence" in page
    trained, x, y = ridge()
    snap = richter.measure(trained, richter.Probe(x, y, loss=half, weight_decay=DECAY), ["fact"])
    assert richter.diagnose(snap).evidence == ("correlation of W^T W with FACT: 1 (0) to 1 (0)",)
    snap = richter.measure(trained, richter.Probe(x, None), ["fact"])
    assert richter.diagnose(snap).evidence == ("features at convergence: the probe has no labels",)


def test_it_is_cited(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("fact", "fact_stationarity", "fact_identity"):
        main(["cite", name])
        assert "2507.05644" in capsys.readouterr().out


def test_the_loss_can_be_the_metric_of_other_measures() -> None:
    """cotangents=loss_gradient: K is then the covariance of the loss's gradients; elsewhere nobody knows the loss."""
    model, x, y = network("mlp", 0), inputs("mlp", 0), labels()
    found = values(model, richter.Probe(x, y), ["nfc"], cotangents=loss_gradient)
    W, _, J = oracles.layer_io(model, x, "2")
    f = model(x).detach().requires_grad_()
    (d,) = torch.autograd.grad(F.cross_entropy(f, y, reduction="sum"), f)
    asked = torch.einsum("nk,nkso->nso", d, J)[:, None]
    assert found["nfc", "2"] == pytest.approx(oracles.cosine(W.T @ W, oracles.agop(W, asked)), rel=1e-10)
    with pytest.raises(SelectionError, match="loss of a probe"):
        richter.kernels.ntk(model, x, cotangents=loss_gradient)
    unlabelled = richter.measure(model, richter.Probe(x, None), ["nfc"], cotangents=loss_gradient)
    assert math.isnan(unlabelled.value("nfc", "2"))
    assert unlabelled.note("nfc", "2") == "the probe has no labels"
    assert WHOLE not in {k for _, k in found}
