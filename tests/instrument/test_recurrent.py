"""A recurrent layer that is taken apart into the maps of its gates computes what torch does, and every way of using one is
measured right."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.overrides import TorchFunctionMode

import oracles
import richter
import zoo
from richter import kernels
from richter.instrument.capture import quiet, state_of
from richter.instrument.survey import survey
from richter.layers.recurrent import recurrent_in_parts, weights_of


class InParts(TorchFunctionMode):
    """Every recurrent function is taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if weights_of(func, args, kwargs):
            return recurrent_in_parts(lambda which, *_: self.names.append(which), func, args)
        return func(*args, **(kwargs or {}))


def tensors(result: Any) -> list[Tensor]:
    """All that a recurrent layer returns."""
    if isinstance(result, Tensor):
        return [result]
    return [result.data] if isinstance(result, PackedSequence) else [t for part in result for t in tensors(part)]


KINDS: dict[str, Callable[..., nn.Module]] = {
    "lstm": nn.LSTM, "lstm, projected": lambda *a, **k: nn.LSTM(*a, **k, proj_size=2), "gru": nn.GRU, "rnn": nn.RNN,
    "rnn, relu": lambda *a, **k: nn.RNN(*a, **k, nonlinearity="relu")}


@pytest.mark.parametrize("packed", [None, "sorted", "not sorted"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_in_parts_compute_what_torch_does(kind: str, packed: str | None) -> None:
    """Outputs, states and gradients; in train mode, with the same draws of dropout."""
    for layers, both, first, bias in itertools.product((1, 3), (False, True), (False, True), (True, False)):
        torch.manual_seed(0)
        model = KINDS[kind](4, 5, layers, bias=bias, bidirectional=both, batch_first=first, dropout=0.4 * (layers > 1)).double()
        x = torch.randn(3, 6, 4, dtype=torch.float64, requires_grad=True)
        given: Any = x if first else x.transpose(0, 1)
        if packed:
            lengths = torch.tensor([6, 4, 1] if packed == "sorted" else [1, 6, 4])
            given = pack_padded_sequence(given, lengths, batch_first=first, enforce_sorted=packed == "sorted")
        results = []
        for mode in (torch.overrides.BaseTorchFunctionMode(), InParts()):
            torch.manual_seed(1)
            with mode:
                result = tensors(model(given))
            weights = [torch.randn(t.shape, generator=torch.Generator().manual_seed(2), dtype=t.dtype) for t in result]
            total = sum((t * w).sum() for t, w in zip(result, weights, strict=True))
            results.append([*result, *torch.autograd.grad(total, [x, *model.parameters()], retain_graph=True)])
        assert isinstance(mode, InParts)
        assert {f"weight_{name}" for name in mode.names} == {n for n, _ in model.named_parameters() if n.startswith("weight")}
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell, lambda *a, **k: nn.RNNCell(*a, **k, nonlinearity="relu")])
def test_cells_in_parts_compute_what_torch_does(kind: Callable[..., nn.Module]) -> None:
    for bias, alone in itertools.product((True, False), (True, False)):
        torch.manual_seed(0)
        cell, x = kind(4, 5, bias=bias).double(), torch.randn(3, 4, dtype=torch.float64)
        x = x[0] if alone else x
        with InParts() as mode:
            result = tensors(cell(x))
        assert mode.names == ["ih", "hh"]
        for a, b in zip(result, tensors(cell(x)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class Using(nn.Module):
    """z = readout(f(x)) with layers of a test's own."""

    def __init__(self, layers: dict[str, Any], function: Callable[[Any, Tensor], Tensor], width: int) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.function, self.readout = function, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.function(self, x))


class Halved(nn.LSTM):
    """A subclass with a forward of its own around that of torch."""

    def forward(self, x: Tensor, hx: Any = None) -> Any:  # type: ignore[override]
        z, state = super().forward(x / 2, hx)
        return z * 2, state


def shared() -> dict[str, Any]:
    one, two = nn.GRU(3, 4, batch_first=True), nn.GRU(3, 4, batch_first=True)
    two.weight_hh_l0 = one.weight_hh_l0
    return {"one": one, "two": two}


def last(z: Tensor) -> Tensor:
    return z[:, -1]


USES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "called twice": (lambda: Using({"gru": nn.GRU(3, 4, batch_first=True)}, lambda m, x:
                                   last(m.gru(x)[0]) * last(m.gru(x[:, :2].flip(1))[0]), 4), ["gru.ih_l0.n", "gru.hh_l0.r"]),
    "a learned start": (lambda: Using({"gru": nn.GRU(3, 4, batch_first=True), "start": nn.Parameter(torch.randn(1, 1, 4))},
                                      lambda m, x: last(m.gru(x, m.start.expand(-1, len(x), -1).contiguous())[0]), 4),
                        ["gru.ih_l0.r", "gru.hh_l0.n"]),
    "sequences of sequences": (lambda: Using({"inner": nn.LSTM(3, 4, batch_first=True), "outer": nn.GRU(4, 2, batch_first=True)},
                                             lambda m, x: m.outer(m.inner(x.unflatten(1, (2, 2)).flatten(0, 1))[1][0][0]
                                                                  .unflatten(0, (-1, 2)))[1][0], 2),
                               ["inner.hh_l0.g", "outer.ih_l0.z", "outer.hh_l0.z"]),
    "examples last": (lambda: Using({"rnn": nn.RNN(3, 4)}, lambda m, x: m.rnn(
        x.unflatten(1, (2, 2)).permute(2, 1, 0, 3).flatten(1, 2))[0][-1].unflatten(0, (2, -1)).sum(0), 4),
        ["rnn.ih_l0", "rnn.hh_l0"]),
    "a subclass": (lambda: Using({"lstm": Halved(3, 4, batch_first=True)}, lambda m, x: last(m.lstm(x)[0]), 4),
                   ["lstm.ih_l0.o", "lstm.hh_l0.f"]),
    "the cell alone": (lambda: Using({"lstm": nn.LSTM(3, 4, batch_first=True)}, lambda m, x: m.lstm(x)[1][1][0], 4),
                       ["lstm.ih_l0.g", "lstm.hh_l0.g"]),
}


@pytest.mark.parametrize("use", USES)
def test_uses_of_recurrent_layers(use: str) -> None:
    factory, names = USES[use]
    model, x = zoo.seeded(factory, 2.0)(), zoo.gaussian(4, 3)(5)[0]
    snap = richter.measure(model, richter.Probe(x, zoo.classes(5, 3)), ["nfc"])
    for name in names:
        W, _, J = oracles.layer_io(model, x, name) if use != "a subclass" else _halved(model, x, name)
        assert snap.value("nfc", name) == pytest.approx(oracles.cosine(oracles.nfm(W), oracles.agop(W, J)), rel=1e-9), name
    K = torch.stack(list(oracles.tangent_kernels(model, x).values())).sum(0)
    torch.testing.assert_close(kernels.ntk(model, x, form="full"), K, rtol=1e-9, atol=1e-12)


def _halved(model: nn.Module, x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """The same layer without its own forward."""
    plain = nn.LSTM(3, 4, batch_first=True).double()
    plain.load_state_dict(model.lstm.state_dict())
    around = Using({"lstm": plain}, lambda m, u: last(m.lstm(u / 2)[0]) * 2, 4)
    around.readout = model.readout
    return oracles.layer_io(around, x, name)


def test_weights_that_are_shared_or_computed() -> None:
    """The tangent kernel has both uses of a shared weight; a computed weight is measured as it is used."""
    model = zoo.seeded(lambda: Using(shared(), lambda m, x: last(m.one(x)[0]) * last(m.two(x)[0]), 4), 2.0)()
    x = zoo.gaussian(4, 3)(5)[0]
    snap = richter.measure(model, richter.Probe(x, zoo.classes(5, 3)), ["nfc"])
    for name in ("one.hh_l0.z", "two.hh_l0.z"):
        W, _, J = oracles.layer_io(model, x, name)
        assert snap.value("nfc", name) == pytest.approx(oracles.cosine(oracles.nfm(W), oracles.agop(W, J)), rel=1e-9)
    K = torch.stack(list(oracles.tangent_kernels(model, x).values())).sum(0)
    torch.testing.assert_close(kernels.ntk(model, x, form="full"), K, rtol=1e-9, atol=1e-12)
    normed = zoo.seeded(lambda: Using({"gru": parametrizations.weight_norm(nn.GRU(3, 4, batch_first=True), "weight_hh_l0")},
                                      lambda m, x: last(m.gru(x)[0]), 4), 2.0)()
    snap = richter.measure(normed, richter.Probe(x, zoo.classes(5, 3)), ["nfc"])
    plain = Using({"gru": nn.GRU(3, 4, batch_first=True)}, lambda m, x: last(m.gru(x)[0]), 4).double()
    with torch.no_grad():
        for name, p in plain.gru.named_parameters():
            p.copy_(getattr(normed.gru, name))
        plain.readout.load_state_dict(normed.readout.state_dict())
    W, _, J = oracles.layer_io(plain, x, "gru.hh_l0.n")
    assert snap.value("nfc", "gru.hh_l0.n") == pytest.approx(oracles.cosine(oracles.nfm(W), oracles.agop(W, J)), rel=1e-9)


def test_biases_of_gates_need_no_gradients_of_single_examples() -> None:
    case = zoo.CASES["lstm_deep"]
    model, (x, _) = case.build(), case.batch(4)
    with quiet(model):
        seen = survey(model, x, state_of(model))
    assert seen.biases["lstm.bias_hh_l1_reverse"] == tuple(f"lstm.hh_l1_reverse.{gate}" for gate in "ifgo")
    parameters = {name for name, _ in model.named_parameters()}
    assert parameters == {*seen.biases, *seen.structured}
