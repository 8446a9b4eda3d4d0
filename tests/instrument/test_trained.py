"""The network that is measured is the one that is trained: with aliases in the place of its parameters a model has the outputs
and gradients that it has with its own, or is refused. Of `tests/zoo.py`, "containers" has what torch makes anew in forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import richter
import zoo
from richter.core import CaptureError

N = 8
X, Y = zoo.gaussian(5)(N)
CONSTANT = "never used: no gradient reaches it from the output on the probe (read by .data, detached, wrapped in a new"


class Two(nn.Module):
    """tanh(first(x)) B^T, with two ways to keep a matrix of the first layer."""

    def __init__(self, first: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = first
        self.a, self.b = zoo.matrix(6, 5), zoo.matrix(3, 6)
        self.more = nn.ParameterList([zoo.matrix(6, 5)])
        self.lin = nn.Linear(5, 6)
        self.table = {self.a: 3.0}

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(self, x)) @ self.b.T


def two(first: Callable[[Any, Tensor], Tensor]) -> Any:
    return zoo.seeded(lambda: Two(first))()


def by_autograd(model: nn.Module) -> Tensor:
    """The tangent kernel, traced over outputs, of the model called as in training."""
    f, own = model(X), list(model.parameters())
    J = [torch.cat([d.flatten() for d in torch.autograd.grad(f[i, c], own, retain_graph=True, materialize_grads=True)])
         for i in range(N) for c in range(3)]
    return torch.einsum("ncp,mcp->nm", *[torch.stack(J).view(N, 3, -1)] * 2)


def test_slices_of_lists_have_the_kernel_of_the_model_called_as_in_training() -> None:
    model = zoo.CASES["containers"].build()
    torch.testing.assert_close(richter.kernels.ntk(model, X), by_autograd(model), rtol=1e-10, atol=0)


@pytest.mark.parametrize(("first", "label", "note"), [
    (lambda m, x: x @ m.a.data.T, "a", CONSTANT),
    (lambda m, x: x @ m.a.detach().T, "a", CONSTANT),
    (lambda m, x: x @ nn.Parameter(m.a).T, "a", CONSTANT),
    (lambda m, x: x @ m.more[0].data.T, "more.0", CONSTANT),
    (lambda m, x: nn.ParameterList([m.more[0] * 1.0])[0].sum() + x @ m.a.T, "more.0", CONSTANT),
    (lambda m, x: copy.deepcopy(m.lin)(x), "lin", "never called on the probe"),
], ids=["data", "detached", "a new Parameter", "data of a list", "a new list of what was computed", "a copy of a module"])
def test_what_training_does_not_reach_has_no_part_in_the_kernel(first: Callable[[Any, Tensor], Tensor], label: str,
                                                               note: str) -> None:
    model = two(first)
    torch.testing.assert_close(richter.kernels.ntk(model, X), by_autograd(model), rtol=1e-10, atol=0)
    assert richter.measure(model, richter.Probe(X, Y), ["nfc"]).notes[label].startswith(note)


def test_what_is_written_on_a_parameter_can_be_read_in_forward() -> None:
    model = two(lambda m, x: m.a.gain * x @ m.a.T)
    model.a.gain = 3.0
    torch.testing.assert_close(richter.kernels.ntk(model, X), by_autograd(model), rtol=1e-10, atol=0)
    assert vars(model.a) == {"gain": 3.0}


def by_type(m: Any, x: Tensor) -> Tensor:
    """The same numbers, cut off unless the weight is a Parameter by its type."""
    return x @ (m.a if type(m.a) is nn.Parameter else m.a.detach()).T


@pytest.mark.parametrize(("first", "seen"), [
    (lambda m, x: m.table.get(m.a, 1.0) * x @ m.a.T, r"the model's outputs differ by 0\.\d+ \(relative\) between training"),
    (by_type, r"the gradient of parameter 'a' differs by 1 \(relative\) between training and measuring"),
    (lambda m, x: m.table.get(m.a, 0.0) * x @ m.a.T, r"the model's outputs differ by inf \(relative\) between training"),
], ids=["a table", "by type", "nothing but zeros"])
def test_a_model_that_does_something_else_with_aliases_is_refused(first: Callable[[Any, Tensor], Tensor], seen: str) -> None:
    model = two(first)
    model(X).sum().backward()
    grads = [(p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    for work in (lambda: richter.measure(model, richter.Probe(X, Y), ["nfc"]), lambda: richter.kernels.ntk(model, X)):
        with pytest.raises(CaptureError, match=seen) as error:
            work()
        assert "The numbers would belong to another network. Use parameters as tensors in forward()" in str(error.value)
    for p, (grad, before) in zip(model.parameters(), grads, strict=True):
        assert p.grad is grad
        assert grad is None or torch.equal(grad, before)


def test_hooks_of_parameters_are_not_heard_and_gradients_stay() -> None:
    model, heard = two(lambda m, x: x @ m.a.T), []
    model(X).sum().backward()
    grad = model.a.grad
    model.a.register_hook(heard.append)
    model.b.register_post_accumulate_grad_hook(heard.append)
    richter.measure(model, richter.Probe(X, Y), ["nfc"])
    assert not heard
    assert model.a.grad is grad


def test_frozen_parameters_and_those_a_pass_writes_into_are_looked_at_through_copies() -> None:
    class Clipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(7, 5, max_norm=0.5)
            self.out = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.words(x).sum(1))

    model = zoo.seeded(Clipped)()
    model.out.weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    ids = torch.arange(N * 3).view(N, 3) % 7
    richter.measure(model, richter.Probe(ids, Y), ["nfc", "tangent_cka"])
    assert all(torch.equal(before[k], t) for k, t in model.state_dict().items())
