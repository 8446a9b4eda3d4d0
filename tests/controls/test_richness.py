"""Knobs of richness: what each does, that it does nothing where it is neutral, checkpoints, and what it refuses."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from jaxtyping import install_import_hook
from torch import Tensor, nn

import richter
from richter.core import SelectionError
from richter.models import GPT, mlp

with install_import_hook("richter.controls", "checker.typechecked"):
    from richter.controls import Scales, richness

x = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
y = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))


def net(seed: int = 0) -> nn.Sequential:
    return mlp([6, 8, 8, 3], nn.Tanh, seed=seed)


def noisy() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))


def trained(model: nn.Module, y: Tensor, steps: int = 5, lr: float = 0.1) -> nn.Module:
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        optimiser.zero_grad()
        (model(x) - y).square().mean().backward()
        optimiser.step()
    return model


def same(a: nn.Module, b: nn.Module) -> bool:
    A, B = a.state_dict(), b.state_dict()
    return A.keys() == B.keys() and all(torch.equal(A[k], B[k]) for k in A)


def test_neutral_knobs_change_nothing() -> None:
    model, knobs = net(), Scales()
    assert knobs.model(model) is model
    assert knobs.targets(y) is y
    assert same(trained(knobs.model(model), knobs.targets(y)), trained(net(), y))
    assert torch.equal(richness.Scaled(net())(x), net()(x))
    assert same(richness.scale_weights_(net(), 1.0), net())
    outcomes = []  # the same random numbers, the same training
    for model in (noisy(), richness.Scaled(noisy())):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            trained(model, y)
        outcomes.append(model if isinstance(model, nn.Sequential) else model.model)
    assert same(*outcomes)


@pytest.mark.parametrize("scale", [0.1, 5.0])
def test_weights(scale: float) -> None:
    model = Scales(weight=scale).model(noisy())
    for (name, p), (_, q) in zip(model.named_parameters(), noisy().named_parameters(), strict=True):
        torch.testing.assert_close(p, q * scale if name in ("0.weight", "4.weight") else q)
    some = richness.scale_weights_(net(), {"*": scale, "2": 3.0})
    for i, factor in ((0, scale), (2, 3.0), (4, scale)):
        torch.testing.assert_close(some[i].weight, net()[i].weight * factor)
        assert torch.equal(some[i].bias, net()[i].bias)
    tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    tied[1].weight = tied[0].weight
    before = tied[0].weight.detach().clone()
    torch.testing.assert_close(richness.scale_weights_(tied, scale)[0].weight, before * scale)  # once


def test_inputs_outputs_and_targets() -> None:
    model = Scales(input=0.5, output=3.0).model(net())
    torch.testing.assert_close(model(x), 3 * net()(0.5 * x))
    assert "input=0.5, output=3" in repr(model)
    torch.testing.assert_close(Scales(target=4.0).targets(y), 4 * y)
    assert set(model.state_dict()) == {f"model.{k}" for k in net().state_dict()}
    ids = torch.tensor([[1, 2, 3]])
    gpt = GPT(vocabulary=5, context=3, d=8, depth=1, heads=2)
    torch.testing.assert_close(richness.Scaled(gpt, output=2.0)(ids), 2 * gpt(ids))
    with pytest.raises(SelectionError, match=r"the first input is of torch.int64, and has no scale. Token ids are scaled where"):
        richness.Scaled(gpt, input=2.0)(ids)
    with pytest.raises(SelectionError, match=r"class ids cannot be scaled. Give targets of a squared loss"):
        Scales(target=2.0).targets(torch.tensor([0, 1]))


def test_output_scale_and_target_scale_are_one_knob() -> None:
    """alpha f trained on alpha y at the rate lr / alpha^2 is f trained on y: only their ratio matters for a squared loss."""
    a = trained(Scales(output=2.0, target=2.0).model(net()), Scales(target=2.0).targets(y), lr=0.1 / 4)
    b = trained(net(), y, lr=0.1)
    torch.testing.assert_close(a(x), 2 * b(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [net, noisy])
@pytest.mark.parametrize("training", [True, False])
def test_a_function_that_starts_at_zero(make: Any, training: bool) -> None:
    model = Scales(zero=True).model(make()).train(training)
    assert torch.equal(model(x), torch.zeros(12, 3))  # also with dropout and batch statistics
    plain = make()
    start = copy.deepcopy(plain)
    trained(model.train(), y)
    model.eval()
    assert model(x).abs().max() > 1e-3
    assert same(model.get_submodule("start"), start) or make is noisy  # batch statistics follow the batches
    assert all(torch.equal(p, q) for p, q in zip(model.get_submodule("start").parameters(), start.parameters(), strict=True))
    torch.testing.assert_close(model(x), model.get_submodule("model")(x) - model.get_submodule("start")(x))


def test_the_copy_does_not_change_what_the_model_draws() -> None:
    model, plain, drawn = noisy(), noisy(), []
    for f in (richness.FromZero(model), plain):
        with torch.random.fork_rng():
            torch.manual_seed(5)
            f.train()(x)
            drawn.append(torch.rand(3))
    assert torch.equal(*drawn)
    assert torch.equal(model[1].running_mean, plain[1].running_mean)


def test_a_run_is_resumed_bit_for_bit() -> None:
    knobs = Scales(weight=2.0, output=0.5, zero=True)
    whole = trained(knobs.model(net()), y, 8)
    half = trained(knobs.model(net()), y, 4)
    file = io.BytesIO()
    torch.save(half.state_dict(), file)
    file.seek(0)
    resumed = knobs.model(net(seed=9))  # other weights, and another function at the start
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert same(trained(resumed, y, 4), whole)
    assert torch.equal(resumed(x), whole(x))


def test_only_the_last_layer_is_trained() -> None:
    model = net()
    with richness.last_layer_only(model) as parameters:
        assert [id(p) for p in parameters] == [id(p) for p in model[4].parameters()]
        trained(model, y)
    assert all(p.requires_grad for p in model.parameters())
    assert same(model[:4], net()[:4])
    assert not same(model[4], net()[4])
    with richness.last_layer_only(model, "0") as parameters:
        assert parameters[0] is model[0].weight
    centred = richness.FromZero(net())
    with richness.last_layer_only(centred) as parameters:  # not that of the copy, which is not trained
        assert parameters[0] is centred.model[4].weight
    with pytest.raises(SelectionError, match=r"no parameter of the model asks for gradients"):
        richness.last_layer_only(net().requires_grad_(False))


def test_what_is_wrapped_can_be_measured() -> None:
    probe = richter.Probe(x, y)
    model = trained(Scales(output=0.5, zero=True).model(net()), y)
    snap = richter.measure(model, probe, ["nfc", "function_change"], initial=model.state_dict())
    plain = richter.measure(model.model.model, probe, ["nfc"])
    assert abs(snap.value("nfc", "model.model.0") - plain.value("nfc", "0")) < 1e-5  # a scale and an offset change no correlation
    assert math.isnan(snap.value("nfc", "model.start.0")) or snap.value("nfc", "model.start.0") <= 1


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf, True, "2"])
def test_scales_are_positive(wrong: Any) -> None:
    for make in (lambda: Scales(weight=wrong), lambda: Scales(target=wrong), lambda: Scales(input=wrong),
                 lambda: Scales(output=wrong), lambda: richness.Scaled(net(), wrong),
                 lambda: richness.Scaled(net(), 1.0, wrong),
                 lambda: richness.scale_weights_(net(), wrong), lambda: richness.scale_weights_(net(), {"0": wrong})):
        with pytest.raises((SelectionError, TypeError), match=r"a finite number above 0 is needed; 1 changes nothing|type"):
            make()


def test_refusals() -> None:
    with pytest.raises(SelectionError, match="no layer 'head'"):
        richness.scale_weights_(net(), {"head": 2.0})
    lstm = nn.LSTM(6, 4)
    for knob in (richness.Scaled(lstm, output=2.0), richness.FromZero(lstm)):
        with pytest.raises(SelectionError, match=r"the model returns a tuple, and one tensor is needed. Wrap the part"):
            knob(x[:, None])
