"""Surveys that ``kernels.ntk`` remembers from one call to the next: a model that has changed in any way is surveyed anew."""

from __future__ import annotations

import copy
import gc
import importlib
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracles
import richter.instrument.survey.examine
from richter import kernels
from richter.core import MixingError

X = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Net(nn.Module):
    """A model with everything in it that a user may change between two calls."""

    level = 1.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.drop, self.norm = nn.Linear(4, 5), nn.Linear(5, 3), nn.Dropout(0.5), nn.BatchNorm1d(5)
        self.register_buffer("shift", torch.zeros(5))
        self.scale, self.options, self.limits, self.act = 1.0, {"power": [1]}, types.SimpleNamespace(low=-9.0), torch.tanh
        self.table = torch.ones(5, dtype=torch.float64)
        factors = [1.0]
        self.factor = lambda: factors[0]
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.norm(self.a(x)) + self.shift).clamp(self.limits.low) * self.scale * self.level * self.table
        h = h * self.factor()
        return self.b(self.drop(h)) ** self.options["power"][0]


def doubled(module: nn.Module, args: Any, z: Tensor) -> Tensor:
    return 2 * z


def replaced(net: Net) -> None:
    net.a = nn.Sequential(nn.Linear(4, 5)).double()


def rehooked(net: Net) -> None:
    handle = net.a.register_forward_hook(lambda m, args, z: z)
    kernels.ntk(net, X)
    handle.remove()
    net.a.register_forward_hook(doubled)


def permuted(net: Net) -> None:
    net.a.weight.data = net.a.weight.data.flip(1).contiguous()


def swapped(net: Net) -> None:
    """Two numbers change places, which no sum and no count shows."""
    w = net.b.weight.data
    w[0, 0], w[2, 4] = w[2, 4].clone(), w[0, 0].clone()


CHANGES: dict[str, Callable[[Net], Any]] = {
    "weights, counted": lambda net: net.a.weight.detach().mul_(1.5),
    "weights by .data": lambda net: net.a.weight.data.mul_(1.5),
    "new weights by .data": permuted,
    "two numbers": swapped,
    "a buffer": lambda net: net.shift.add_(0.5),
    "a buffer by .data": lambda net: net.shift.data.add_(0.5),
    "statistics of a norm": lambda net: net.norm.running_var.mul_(3.0),
    "a module": replaced,
    "a module by another of the same kind": lambda net: setattr(net, "b", nn.Linear(5, 3).double()),
    "a hook": lambda net: net.a.register_forward_hook(doubled),
    "a hook by another": rehooked,
    "a forward method": lambda net: setattr(net, "forward", types.MethodType(lambda self, x: 2 * self.b(self.a(x)), net)),
    "requires_grad": lambda net: net.a.weight.requires_grad_(False),
    "a number": lambda net: setattr(net, "scale", 2.0),
    "a number in a list in a dict": lambda net: net.options["power"].__setitem__(0, 2),
    "a number in an object": lambda net: setattr(net.limits, "low", 0.0),
    "a function": lambda net: setattr(net, "act", F.relu),
    "a number in a closure": lambda net: net.factor.__closure__[0].cell_contents.__setitem__(0, 2.0),
    "a tensor by .data": lambda net: net.table.data.mul_(2.0),
}


@pytest.fixture
def surveys(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each survey that is made."""
    runs: list[int] = []
    real = richter.instrument.survey.examine.survey
    monkeypatch.setattr(richter.instrument.survey.examine, "survey", lambda *a: runs.append(1) or real(*a))
    return runs


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are not compared, so that a change must be seen in the model itself."""
    monkeypatch.setattr(importlib.import_module("richter.kernels.ntk"), "_check_unchanged", lambda *_: None)


def kernel_of(net: nn.Module, x: Tensor = X) -> Tensor:
    return oracles.ntk(copy.deepcopy(net).eval(), x, form="trace")


def close(K: Tensor, expected: Tensor) -> None:
    assert K.shape == expected.shape
    assert (K - expected).norm() <= 1e-9 * expected.norm()


def test_a_model_that_has_not_changed_is_surveyed_once(surveys: list[int]) -> None:
    net = Net()
    first = kernels.ntk(net, X)
    assert torch.equal(kernels.ntk(net, X), first)
    kernels.ntk(net, X, X[:3], form="full", per_layer=True)
    kernels.plan(net, X)
    assert len(surveys) == 1


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_has_changed_is_surveyed_anew(change: str, surveys: list[int], unseen: None) -> None:
    net = Net()
    kernels.ntk(net, X)
    with torch.no_grad():
        CHANGES[change](net)
    before = len(surveys)
    close(kernels.ntk(net, X), kernel_of(net))
    assert len(surveys) == before + 1


def test_a_changed_class_is_seen(monkeypatch: pytest.MonkeyPatch, surveys: list[int], unseen: None) -> None:
    net = Net()
    kernels.ntk(net, X)
    monkeypatch.setattr(Net, "level", 2.0)
    close(kernels.ntk(net, X), kernel_of(net))
    assert len(surveys) == 2
    forward = Net.forward
    monkeypatch.setattr(Net, "forward", lambda self, x: 3 * forward(self, x))
    close(kernels.ntk(net, X), kernel_of(net))
    assert len(surveys) == 3


def test_a_changed_mode_is_seen(surveys: list[int], unseen: None) -> None:
    net = Net()
    net.norm = nn.Identity()
    first = kernels.ntk(net, X)
    net.train()
    assert torch.equal(kernels.ntk(net, X), first)  # it is measured in eval mode
    assert len(surveys) == 1
    assert not torch.allclose(kernels.ntk(net, X, mode="train"), first)
    assert len(surveys) == 2
    net = Net()
    kernels.ntk(net, X)
    with pytest.raises(MixingError):
        kernels.ntk(net, X, mode="train")


def test_other_inputs_outputs_and_memory_are_surveyed_anew(surveys: list[int], unseen: None) -> None:
    net = Net()
    kernels.ntk(net, X)
    for number, (x, options) in enumerate([(X, {"memory": "1GiB"}), (X + 1, {}), (X, {"output": lambda f: f[:, :1]}),
                                           (X[:5], {})], 2):
        kernels.ntk(net, x, **options)
        assert len(surveys) == number


def test_a_global_variable_that_has_changed_is_seen(surveys: list[int]) -> None:
    """A change that cannot be seen from the model shows in its outputs, whose number may change too."""
    outputs = [2]

    def some(f: Tensor) -> Tensor:
        return f[:, :GLOBAL["outputs"]]

    GLOBAL["outputs"] = outputs[0]
    net = Net()
    assert kernels.ntk(net, X, form="full", output=some).shape == (9, 2, 9, 2)
    GLOBAL["outputs"] = 1
    assert kernels.ntk(net, X, form="full", output=some).shape == (9, 1, 9, 1)
    assert len(surveys) == 2

    class Scaled(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            return h * self.a.weight.square().sum() if GLOBAL["twice"] else h

    GLOBAL["twice"] = False
    net = Scaled()
    kernels.ntk(net, X)
    GLOBAL["twice"] = True
    close(kernels.ntk(net, X), kernel_of(net))
    assert len(surveys) == 4


GLOBAL: dict[str, Any] = {}


def test_a_twin_is_another_model(surveys: list[int]) -> None:
    net = Net()
    twin = copy.deepcopy(net)
    assert torch.equal(kernels.ntk(net, X), kernels.ntk(twin, X))
    assert len(surveys) == 2


@pytest.mark.parametrize("build", [Net, lambda: nn.Linear(300, 300).double()], ids=["net", "linear"])
def test_a_remembered_survey_keeps_no_model_alive(build: Callable[[], nn.Module]) -> None:
    net = build()
    x = X if isinstance(net, Net) else torch.randn(4, 300, dtype=torch.float64)
    kernels.ntk(net, x)
    kernels.ntk(net, x)
    model = weakref.ref(net)
    del net
    gc.collect()
    assert model() is None


def test_examples_are_checked_in_every_call() -> None:
    """The first eight examples are those of the survey; a later one mixes the batch."""
    class Mixing(Net):
        def forward(self, x: Tensor) -> Tensor:
            f = super().forward(x)
            return f + f.mean(0) * (x[:, 0] > 100).any()

    net = Mixing()
    kernels.ntk(net, X)
    odd = X.clone()
    odd[8, 0] = 101.0
    with pytest.raises(MixingError):
        kernels.ntk(net, odd)
