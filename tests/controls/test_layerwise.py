"""Chains of modules, training layer by layer, frozen layers."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jaxtyping import install_import_hook
from torch import Tensor, nn

from richter.core import SelectionError
from richter.core.modules import chain
from richter.models import mlp
from richter.tasks import digits

with install_import_hook("richter.controls", "checker.typechecked"):
    from richter.controls import layerwise


def leaky(widths: list[int], seed: int = 0) -> nn.Sequential:
    return mlp(widths, activation=nn.LeakyReLU, seed=seed)


class Own(nn.Module):
    """A chain that is no nn.Sequential; ``functional``: with an activation that is no module."""

    def __init__(self, functional: bool = False, residual: bool = False) -> None:
        super().__init__()
        self.first, self.act, self.body = nn.Linear(64, 20), nn.ReLU(), nn.Sequential(nn.Linear(20, 20), nn.ReLU())
        self.head = nn.Linear(20, 10)
        self.functional, self.residual = functional, residual

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.first(x))
        z = self.body(h)
        return self.head(z.tanh() if self.functional else z + h if self.residual else z)


# ------------------------------------------------------------------------------------------------ chains


def test_stages_of_a_chain() -> None:
    x = torch.randn(5, 1, 8, 8)
    act = nn.ReLU()  # one module in two places
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), act, nn.Dropout(0.5), nn.Linear(20, 30), act, nn.Linear(30, 10))
    stages = chain(model, x)
    assert [s.name for s in stages] == ["1", "4", "6"]
    assert [type(m) for m in stages[0].modules] == [nn.Flatten, nn.Linear, nn.ReLU, nn.Dropout]
    assert all(m.training for m in model.modules())  # looked at in eval mode, and left as it was
    assert [s.name for s in chain(Own(), x.flatten(1))] == ["first", "body.0", "head"]


@pytest.mark.parametrize(("model", "sentence"), [
    (Own(functional=True), r"is not a chain: its parts, one after another \(Linear -> ReLU -> Linear -> ReLU -> Linear\), give"),
    (Own(residual=True), "give another output than the model itself. Write activations and reshapes as modules"),
    (nn.Sequential(nn.ReLU()), "the Sequential has no module with weights"),
])
def test_what_is_no_chain(model: nn.Module, sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        chain(model, torch.randn(3, 64))


def test_parts_that_cannot_read_each_other_and_shared_weights() -> None:
    class Reshaped(Own):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(1))

    with pytest.raises(SelectionError, match=r"cannot read each other \(mat1 and mat2 shapes cannot be multiplied"):
        chain(Reshaped(), torch.randn(3, 1, 8, 8))
    tied = nn.Linear(64, 64)
    with pytest.raises(SelectionError, match="uses a layer with weights twice"):
        chain(nn.Sequential(tied, nn.ReLU(), tied), torch.randn(3, 64))
    with pytest.raises(SelectionError, match="x is empty: give a tensor of examples"):
        chain(Own(), torch.randn(0, 64))


# ------------------------------------------------------------------------------------------------ layer by layer


def test_the_loss_is_the_definition() -> None:
    h, y = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 0, 2, 1, 1])
    for kernel, target in ((layerwise.inner, 0.5), (layerwise.cosine, 1.0)):
        total = 0.0
        for i, j in itertools.product(range(6), repeat=2):
            k = h[i] @ h[j] / (h[i].norm() * h[j].norm() if kernel is layerwise.cosine else 1)
            total += float((k - target * (y[i] == y[j])) ** 2) / 36
        assert abs(layerwise.feature_loss(h, y, kernel, target).item() - total) < 1e-12


def test_layers_are_trained_one_after_another() -> None:
    data = digits(seed=0)
    model = leaky([64, 64, 64, 10])
    before = {k: v.clone() for k, v in model.state_dict().items()}
    trained = layerwise.train(model, data.x, data.y, kernel=layerwise.cosine, target=1.0, epochs=8, seed=0)
    right = (trained.model(data.x_test).argmax(1) == data.y_test).double().mean().item()
    assert right > 0.9
    assert [h.layer for h in trained.history] == ["0", "2", "4"]
    for h in trained.history:
        assert len(h.train) == len(h.validation) <= 8
        assert min(h.validation) >= h.validation[h.kept - 1] * (1 - 1e-3)
        assert h.kept == len(h.validation) or len(h.validation) - h.kept == 3 or len(h.validation) == 8
    assert trained.model[1] is model[0]
    assert all(not torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert abs(trained.model[0](data.x[:3] * 7).norm(dim=1) - 1).max() < 1e-6
    assert (trained.model[0](torch.zeros(1, 64)) == 0).all()


def test_later_layers_do_not_change_earlier_ones() -> None:
    """The first layer is trained as it would be alone with the read-out."""
    data = digits(seed=0)
    models = [leaky([64, 32, 10]), leaky([64, 32, 16, 10])]
    models[1][0].load_state_dict(models[0][0].state_dict())
    for model in models:
        layerwise.train(model, data.x[:300], data.y[:300], epochs=2)
    torch.testing.assert_close(models[0][0].weight, models[1][0].weight)


def test_every_knob_turns() -> None:
    data = digits(seed=0)

    def first(**knobs: Any) -> Tensor:
        model = leaky([64, 16, 10])
        return layerwise.train(model, data.x[:256], data.y[:256], **{"epochs": 4, **knobs}).model[1].weight.detach()

    plain = first()
    torch.testing.assert_close(first(), plain, rtol=0, atol=0)
    held = (data.x[300:400], data.y[300:400])
    for knobs in ({"validation": 0.3}, {"validation": held}, {"kernel": layerwise.cosine}, {"target": 1.0}, {"batch": 64},
                  {"epochs": 1}, {"seed": 1}, {"optimiser": functools.partial(torch.optim.SGD, lr=0.1)},
                  {"patience": 1, "tolerance": 0.9}):
        assert not torch.equal(first(**knobs), plain), knobs


@pytest.mark.parametrize(("model", "y", "options", "sentence"), [
    (mlp([64, 10]), None, {}, "the model has one layer with weights, and no hidden layer"),
    (nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)), None, {}, "layer '1' is a BatchNorm1d: training"),
    (Own(residual=True), None, {}, "the Own is not a chain"),
    (leaky([64, 8, 10]), torch.zeros(20), {}, r"y is \(20,\) of torch.float32, and x has 20 examples: class ids"),
    (leaky([64, 8, 10]), torch.zeros(20, dtype=torch.long), {}, "y has one class only"),
    (leaky([64, 8, 10]), torch.arange(19), {}, "class ids .n. are needed, one for each example"),
    (leaky([64, 8, 10]), None, {"validation": 0.0}, "validation=0.0 of 20 examples leaves 0 to stop by"),
])
def test_what_cannot_be_trained_by_layers(model: nn.Module, y: Tensor | None, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        layerwise.train(model, torch.randn(20, 64), torch.arange(20) % 10 if y is None else y, **options)


# ------------------------------------------------------------------------------------------------ frozen


def test_frozen_layers_do_not_move() -> None:
    x, y = torch.randn(30, 64), torch.arange(30) % 10
    model = leaky([64, 8, 8, 10])
    model[0].bias.requires_grad_(False)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with layerwise.frozen(model, but="4") as parameters:
        assert {id(p) for p in parameters} == {id(p) for p in model[4].parameters()}
        F.cross_entropy(model(x), y).backward()
        torch.optim.SGD(parameters, lr=0.1).step()
        assert model[0].weight.grad is None
    moved = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert moved == {"4.weight", "4.bias"}
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True, True, True]
    with pytest.raises(SelectionError, match=r"the model has no layer '7'\. .*It has: '0', '2'"), layerwise.frozen(model, "7"):
        pass
    with pytest.raises(SelectionError, match="every layer is frozen, and nothing is left to train"), layerwise.frozen(model, []):
        pass
    with pytest.raises(ZeroDivisionError), layerwise.frozen(model, ["0", "2"]):
        raise ZeroDivisionError
    assert model[4].weight.requires_grad


# ------------------------------------------------------------------------------------------------ what may go wrong


def test_two_layers_that_share_weights_are_no_chain() -> None:
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    second.weight = first.weight
    with pytest.raises(SelectionError, match="or the weights of one layer in another, so a step of one is a step"):
        chain(nn.Sequential(first, nn.ReLU(), second), torch.randn(3, 64))


def test_outputs_that_are_not_finite_are_said() -> None:
    with pytest.raises(SelectionError, match="outputs of the Sequential contain NaN or Inf, so nothing can be compared"):
        chain(leaky([64, 8, 10]), torch.full((3, 64), torch.nan))


def test_a_first_module_in_place_does_not_write_into_the_examples() -> None:
    x = torch.randn(6, 64)
    before = x.clone()
    assert len(chain(nn.Sequential(nn.LeakyReLU(0.1, inplace=True), *leaky([64, 8, 10])), x)) == 2
    assert torch.equal(x, before)


@pytest.mark.parametrize("kind", [torch.int32, torch.int16, torch.uint8, torch.bool])
def test_class_ids_of_every_whole_type(kind: torch.dtype) -> None:
    """Cross-entropy reads two types only, and comes last."""
    x, y = torch.randn(30, 64), torch.arange(30) % 2
    given, plain = leaky([64, 8, 2]), leaky([64, 8, 2])
    layerwise.train(given, x, y.to(kind), validation=(x[:9], y[:9].to(kind)), epochs=1)
    layerwise.train(plain, x, y, validation=(x[:9], y[:9]), epochs=1)
    torch.testing.assert_close(given[2].weight, plain[2].weight, rtol=0, atol=0)


def test_dropout_is_the_seeds_own_and_not_in_what_is_evaluated() -> None:
    x, y = torch.randn(40, 64), torch.arange(40) % 2
    held = (x[:10], y[:10])
    state, models = torch.get_rng_state(), []
    for _ in range(2):
        model = leaky([64, 30, 2])
        model.insert(2, nn.Dropout(0.5))
        models.append(model)
        trained = layerwise.train(model, x, y, validation=held, epochs=1)
        torch.rand(3)
    assert torch.equal(models[0][0].weight, models[1][0].weight)
    assert model[2].training
    torch.set_rng_state(state)
    layerwise.train(model, x, y, epochs=1)
    assert torch.equal(torch.get_rng_state(), state)
    model.load_state_dict(models[0].state_dict())
    a = layerwise.UnitNorm()(held[0])
    loss = layerwise.feature_loss(model[1](model[0](a)), held[1])
    assert trained.history[0].validation[0] == pytest.approx(loss.item(), rel=1e-5)


def test_training_leaves_no_gradients() -> None:
    model = leaky([64, 8, 10])
    layerwise.train(model, torch.randn(20, 64), torch.arange(20) % 10, epochs=1)
    assert all(p.grad is None for p in model.parameters())


def test_a_layer_that_diverges_is_said_and_has_its_weights_again() -> None:
    x, y = torch.randn(40, 64), torch.arange(40) % 10
    model = leaky([64, 8, 10])
    before = {k: v.clone() for k, v in model.state_dict().items()}
    wild = functools.partial(torch.optim.SGD, lr=1e12)
    with pytest.raises(SelectionError, match=r"layer '0': the loss on the validation examples is \w+ after epoch 1: .*of before"):
        layerwise.train(model, x, y, optimiser=wild, batch=8)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    x[30:] = torch.nan
    with pytest.raises(SelectionError, match="examples that are not finite, or too large a learning rate"):
        layerwise.train(model, x, y)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(("model", "y", "options", "sentence"), [
    (leaky([64, 8, 3]), torch.arange(20) % 5, {}, r"y has classes from 0 to 4, and outputs have shape \(1, 3\)"),
    (leaky([64, 8, 3]), torch.arange(20) % 3 - 1, {}, "y has classes from -1 to 1, .* ids from 0 on are needed"),
    (nn.Sequential(nn.Unflatten(1, (8, 8)), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), None, {}, r"have shape \(1, 8, 3\)"),
    (nn.Sequential(nn.Linear(64, 8).requires_grad_(False), nn.ReLU(), nn.Linear(8, 10)), None, {}, "layer '0' is frozen"),
    (leaky([64, 8, 10]), None, {"validation": (torch.randn(0, 64), torch.arange(0))}, "or validation=.x2, y2."),
    (leaky([64, 8, 10]), None, {"validation": (torch.randn(5, 64), torch.arange(3))}, r"validation: y is \(3,\)"),
    (leaky([64, 8, 10]), None, {"validation": float("nan")}, "validation=nan of 20 examples leaves 0 to stop by"),
    (leaky([64, 8, 10]), None, {"batch": 0}, "batch=0, epochs=50 and patience=3: a batch has one example at least"),
])
def test_what_would_fail_at_the_last_layer_is_said_before_the_first(model: nn.Module, y: Tensor | None, options: dict[str, Any],
                                                                    sentence: str) -> None:
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(SelectionError, match=sentence):
        layerwise.train(model, torch.randn(20, 64), torch.arange(20) % 3 if y is None else y, **options)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
