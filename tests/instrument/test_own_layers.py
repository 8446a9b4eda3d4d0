"""Layers that users write for infinite width: parameters of their own, multiplied by numbers such as 1 / sqrt(n)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracles
import richter
from richter.instrument.verdict import Diagnosis
from richter.kernels import ntk

pytestmark = pytest.mark.filterwarnings("ignore::richter.RichterWarning")
BETA = 0.3


class Own(nn.Module):
    """(W x) / sqrt(n) + beta b, or without a bias, however it is written."""

    def __init__(self, way: Callable[[Any, Tensor, float], Tensor], d_in: int, d_out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_out, d_in, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(d_out, dtype=torch.float64)) if bias else None
        self.way, self.root = way, math.sqrt(d_in)
        self.register_buffer("factor", torch.tensor(1 / self.root, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x, self.root)

    @property
    def shift(self) -> Tensor | float:
        return 0.0 if self.bias is None else BETA * self.bias


def biased(m: Own, factor: float = 1.0) -> Tensor | None:
    return None if m.bias is None else m.bias * (BETA * factor)


WAYS: dict[str, Callable[[Any, Tensor, float], Tensor]] = {
    "F.linear(x, W) / sqrt(n)": lambda m, x, r: F.linear(x, m.weight) / r + m.shift,
    "F.linear(x, W / sqrt(n))": lambda m, x, r: F.linear(x, m.weight / r) + m.shift,
    "F.linear(x, W / sqrt(n), beta b)": lambda m, x, r: F.linear(x, m.weight / r, biased(m)),
    "F.linear(x, W, beta sqrt(n) b) / sqrt(n)": lambda m, x, r: F.linear(x, m.weight, biased(m, r)) / r,
    "x @ W.T / sqrt(n)": lambda m, x, r: x @ m.weight.T / r + m.shift,
    "(x / sqrt(n)) @ W.T": lambda m, x, r: (x / r) @ m.weight.T + m.shift,
    "x @ (W.T / sqrt(n))": lambda m, x, r: x @ (m.weight.T / r) + m.shift,
    "x @ (W / sqrt(n)).T": lambda m, x, r: x @ (m.weight / r).T + m.shift,
    "x @ (W / n * sqrt(n)).T": lambda m, x, r: x @ (m.weight / r**2 * r).T + m.shift,
    "matmul, t()": lambda m, x, r: torch.matmul(x, m.weight.t()) / r + m.shift,
    "einsum": lambda m, x, r: torch.einsum("ni,oi->no", x, m.weight) / r + m.shift,
    "einsum of W / sqrt(n)": lambda m, x, r: torch.einsum("...i,oi->...o", x, torch.mul(1 / r, m.weight)) + m.shift,
    "a buffer times W": lambda m, x, r: F.linear(x, m.factor * m.weight) + m.shift,
    "-F.linear(x, -W) / sqrt(n)": lambda m, x, r: -F.linear(x, -m.weight) / r + m.shift,
    "W x": lambda m, x, r: (m.weight / r @ x.unsqueeze(-1)).squeeze(-1) + m.shift,
}


def network(way: Callable[[Any, Tensor, float], Tensor], bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Own(way, 6, 24, bias), nn.Tanh(), Own(way, 24, 24, bias), nn.Tanh(), Own(way, 24, 3, bias))


def moved(model: nn.Module) -> dict[str, Tensor]:
    """The weights as they were; the model has others then."""
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(p.numel())))
    return before


X = torch.randn(80, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
PROBE = richter.Probe(X, (X[:, 0] > 0).long())
UNLABELLED = richter.Probe(X, None)  # weights that moved at random learn no labels; without labels only G and F decide


def part(model: nn.Sequential, i: int) -> Any:
    return model[i]


def correlation(model: nn.Sequential, layer: int) -> float:
    """Of W^T W with the products of gradients in what the layer reads."""
    read = X
    for m in list(model)[:layer]:
        read = m(read)
    read = read.detach().requires_grad_()
    f = read
    for m in list(model)[layer:]:
        f = m(f)
    g = torch.cat([torch.autograd.grad(f[:, k].sum(), read, retain_graph=True)[0] for k in range(f.shape[1])])
    G = g.T @ g
    W = part(model, layer).weight.detach()
    return float(((W.T @ W) * G).sum() / ((W.T @ W).norm() * G.norm()))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_layers_of_ones_own_are_recognised(way: str, bias: bool) -> None:
    model = network(WAYS[way], bias)
    before = moved(model)
    snap = richter.measure(model, PROBE, initial=before)
    assert not snap.notes
    for name in ("0", "2"):
        assert snap.value("nfc", name) == pytest.approx(correlation(model, int(name)), rel=1e-10)
    plain = network(WAYS["F.linear(x, W) / sqrt(n)"], bias)
    reference = richter.measure(plain, PROBE, initial=moved(plain))
    for row in reference.rows:
        if row.measure in ("linearisation_gap", "feature_change_cka", "function_change", "weight_change", "nfc"):
            assert snap.value(row.measure, row.layer) == pytest.approx(row.value, rel=1e-9, nan_ok=True), (row.measure, row.layer)
    expected = torch.stack(list(oracles.tangent_kernels(model, X[:9]).values())).sum(0)
    assert float((ntk(model, X[:9], form="full") - expected).norm() / expected.norm()) < 1e-12
    unlabelled = richter.measure(model, UNLABELLED, initial=before)
    assert richter.diagnose(unlabelled).word in ("lazy", "probably lazy", "uncertain", "amplified", "rich")
    assert not any("not recognised" in remark for remark in richter.diagnose(snap).remarks)


def test_the_bias_of_a_layer_is_in_its_change_only_as_it_is() -> None:
    """Of beta b it is not known how large it is, so that it is left out; b itself is counted."""
    model = network(lambda m, x, r: F.linear(x, m.weight / r, m.bias))
    before = moved(model)
    W, b, W0, b0 = (t.detach() for t in (part(model, 0).weight, part(model, 0).bias, before["0.weight"], before["0.bias"]))
    h = X / math.sqrt(6)
    change, first = h @ (W - W0).T + b - b0, h @ W0.T + b0
    snap = richter.measure(model, PROBE, ["function_change"], initial=before)
    assert snap.value("function_change", "0") == pytest.approx(float(change.norm() / first.norm()), rel=1e-10)
    model = network(WAYS["F.linear(x, W / sqrt(n), beta b)"])
    snap = richter.measure(model, PROBE, ["function_change"], initial=moved(model))
    assert snap.value("function_change", "0") == pytest.approx(float((h @ (W - W0).T).norm() / (h @ W0.T).norm()), rel=1e-10)


def test_a_convolution_with_a_multiple_of_its_weight() -> None:
    class Conv(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(x, self.weight / 3, self.bias, padding=1)

    torch.manual_seed(0)
    model = nn.Sequential(Conv(2, 4, 3), nn.Tanh(), Conv(4, 4, 3), nn.Flatten(), nn.Linear(100, 2)).double()
    other = copy.deepcopy(model)
    for i in (0, 2):
        other[i] = nn.Conv2d(*((2, 4), (4, 4))[i // 2], 3, padding=1).double()
        other[i].load_state_dict({"weight": part(model, i).weight.detach() / 3, "bias": part(model, i).bias.detach()})
    x = torch.randn(40, 2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a, b = (richter.measure(m, richter.Probe(x, torch.arange(40) % 2), ["nfc"]) for m in (model, other))
    for name in ("0", "2"):
        assert a.value("nfc", name) == pytest.approx(b.value("nfc", name), rel=1e-10)


class Gained(Own):
    """A learned gain is no number."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gain = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))


UNKNOWN: dict[str, Callable[[Any, Tensor, float], Tensor]] = {
    "tanh(W)": lambda m, x, r: F.linear(x, torch.tanh(m.weight)) / r,
    "a learned gain": lambda m, x, r: F.linear(x, m.gain * m.weight),
    "a multiple that is written into": lambda m, x, r: F.linear(x, (m.weight / r).mul_(2.0)),
    "a multiple of a multiple that is written into": lambda m, x, r: F.linear(x, (m.weight / r).sin_().T.T),
}


@pytest.mark.parametrize("way", UNKNOWN)
def test_weights_that_are_not_recognised_are_named(way: str) -> None:
    torch.manual_seed(0)
    own = [Gained(UNKNOWN[way], *sizes, False) for sizes in ((6, 24), (24, 24), (24, 3))]
    model = nn.Sequential(own[0], nn.Tanh(), own[1], nn.Tanh(), own[2])
    before = moved(model)
    expected = torch.stack(list(oracles.tangent_kernels(model, X[:9]).values())).sum(0)
    assert float((ntk(model, X[:9], form="full") - expected).norm() / expected.norm()) < 1e-12
    found = richter.diagnose(richter.measure(model, UNLABELLED, initial=before))
    assert found.word == "unknown"
    assert "The weights of 0, 2, 4 are not used as linear maps that Richter knows" in found.verdict
    assert "initial=" not in found.verdict
    mixed = nn.Sequential(own[0], nn.Tanh(), nn.Linear(24, 24).double(), nn.Tanh(), nn.Linear(24, 3).double())
    found = richter.diagnose(richter.measure(mixed, UNLABELLED, initial=moved(mixed)))
    assert found.word != "unknown"
    assert any(r.startswith("not recognised: the weights of 0 are not used as linear maps") for r in found.remarks), str(found)


def test_a_multiple_of_a_table_has_an_exact_kernel() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(7, 5, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return F.embedding(x, self.weight / 2).flatten(1)

    torch.manual_seed(0)
    model, x = nn.Sequential(Table(), nn.Linear(15, 2).double()), torch.randint(0, 7, (8, 3))
    expected = torch.stack(list(oracles.tangent_kernels(model, x).values())).sum(0)
    assert float((ntk(model, x, form="full") - expected).norm() / expected.norm()) < 1e-12


def test_a_training_of_such_layers_has_a_verdict() -> None:
    """Whatever way they are written in, the same."""
    def trained(way: str) -> Diagnosis:
        model, y = network(WAYS[way]), PROBE.y
        step_by = torch.optim.SGD(model.parameters(), 0.5)
        with richter.Observer(model, PROBE, when=60, budget=None) as watch:
            for step in range(60):
                loss = F.cross_entropy(model(X), y)  # type: ignore[arg-type]
                watch(step, loss=loss)
                step_by.zero_grad()
                loss.backward()
                step_by.step()
        return richter.diagnose(watch)

    found = [trained(way) for way in ("F.linear(x, W) / sqrt(n)", "x @ W.T / sqrt(n)", "F.linear(x, W / sqrt(n))")]
    assert len({d.word for d in found}) == 1
    assert found[0].word in ("lazy", "probably lazy", "uncertain", "amplified", "rich"), str(found[0])
