"""A network beside its own kernel: what is said of it at the edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from richter.core import SelectionError
from richter.workflows.acceleration import Acceleration, acceleration

X, Y = torch.randn(16, 5, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 3


def network() -> nn.Module:
    layers = [nn.Linear(5, 8), nn.Linear(8, 3)]
    draw = torch.Generator().manual_seed(0)
    for layer in layers:
        nn.init.normal_(layer.weight, std=0.3, generator=draw)
        nn.init.normal_(layer.bias, std=0.1, generator=draw)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1])


def run(**curves: list[float]) -> Acceleration:
    losses = {name: np.array(values) for name, values in curves.items()}
    return Acceleration(np.arange(3), losses, 0.1, np.array([0.1]), 1.0, (0.1, 0.2), np.zeros(3), 0.1)


def test_a_gain_of_a_few_hundredths_is_none() -> None:
    """A lazy network that ends at .97 of kernel descent, and of that at the final norm, did not outrun it."""
    lazy = run(network=[10, 9, 7.7], kernel=[10, 9.1, 7.94], rescaled=[10, 9.05, 7.87], ofe=[10, 9, 8])
    assert lazy.summary.startswith("No, the network did not learn faster than its initial kernel")
    rich = run(network=[10, 9, 1], kernel=[10, 9.1, 7.94], rescaled=[10, 8, 4], ofe=[10, 9, 8])
    assert rich.summary.startswith("Yes, the network learned faster than its initial kernel, even if rescaled (from step 2 on)")
    larger = run(network=[10, 9, 5], kernel=[10, 9.1, 7.94], rescaled=[10, 8, 4], ofe=[10, 9, 8])
    assert larger.summary.startswith("In part: the network learned faster than its initial kernel, but not")


def test_a_kernel_that_shrank_and_won_all_the_same() -> None:
    shrank = run(network=[10, 6, 1], kernel=[10, 8, 4], rescaled=[10, 9, 5], ofe=[10, 9, 8])
    assert shrank.ahead == 1
    assert shrank.summary.startswith("Yes, the network learned faster than its initial kernel, even if rescaled")


@pytest.mark.parametrize(("record", "sentence"), [([0, 2.7], r"record contains 2\.7: .* whole numbers .* 0 and steps=5"),
                                                  ([9], "record contains 9"), ([-1], "record contains -1")])
def test_steps_are_whole(record: Any, sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        acceleration(network(), X, Y, lr=0.01, steps=5, record=record)


def test_the_ends_are_known() -> None:
    """The kernels are those of the first and the last step, and so is what the summary says."""
    a = acceleration(network(), X, Y, lr=0.01, steps=5, record=[2])
    assert a.steps.tolist() == [0, 2, 5]
    assert "after 5 steps" in a.summary
    same = acceleration(network(), X, Y, lr=np.float32(0.01), steps=5, record=[2])  # type: ignore[arg-type]
    np.testing.assert_allclose(same.curves["network"], a.curves["network"], rtol=1e-5)


def test_the_curves_are_those_of_loops() -> None:
    """Full-batch descent by autograd, and D <- D - lr J J^T D with the Jacobian of each output, step by step."""
    a = acceleration(network(), X, Y, lr=0.005, steps=30, record=range(31), reduction="sum")
    model, x, y = network().double(), X.double(), nn.functional.one_hot(Y, 3).double()
    parameters = list(model.parameters())

    def kernel() -> Tensor:
        f = model(x).flatten()
        J = torch.stack([torch.cat([g.flatten() for g in torch.autograd.grad(v, parameters, retain_graph=True)]) for v in f])
        return J @ J.T

    K0, D = kernel(), (model(x) - y).detach().flatten()
    frozen, trained = [], []
    for _ in range(31):
        frozen.append(D.square().sum().item())
        D = D - 0.01 * K0 @ D
        f = model(x)
        trained.append((f - y).square().sum().item())
        K = kernel()
        gradient = torch.autograd.grad((f - y).square().sum() / 2, parameters)
        with torch.no_grad():
            for p, g in zip(parameters, gradient, strict=True):
                p.sub_(0.01 * g)
    np.testing.assert_allclose(a.curves["kernel"], frozen, rtol=1e-6)
    np.testing.assert_allclose(a.curves["network"], trained, rtol=1e-5)
    assert a.norm == pytest.approx(float(K.norm() / K0.norm()), rel=1e-5)
