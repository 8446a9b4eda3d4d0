"""Did its kernel outrun the one it started with? The workflow, its sentences, its picture; and networks of the experiments."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import richter
from richter.core import DivergedError, SelectionError
from richter.experiments.evolving import EvolvingNetwork, alignments, descend
from richter.instrument.statistics import per_output as own
from richter.kernels import dynamics, ntk
from richter.models import mlp
from richter.report.drawing import faults
from richter.workflows import acceleration
from richter.workflows.acceleration import Acceleration


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X = normal(0, 24, 6)
Y = torch.stack([X[:, 0] * X[:, 1], X[:, 2]], 1)


def network(scale: float = 0.3, seed: int = 0, outputs: int = 2) -> nn.Sequential:
    model = mlp([6, 40, outputs], seed=seed).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    return model


# ------------------------------------------------------------------------------------------------ the workflow


def test_the_curves_are_those_of_plain_loops() -> None:
    model, twin = network(), network()
    K0 = ntk(model, X, form="full").reshape(48, 48)
    result = acceleration(model, X, Y, lr=0.005, steps=50, chunk=10, reduction="sum")
    losses, residual, f0 = [], (model(X) - Y).detach(), model(X).detach()
    for _ in range(51):
        f = twin(X)
        losses.append((f - Y).square().sum().item())
        gradients = torch.autograd.grad(0.5 * (f - Y).square().sum(), list(twin.parameters()))
        with torch.no_grad():
            for p, g in zip(twin.parameters(), gradients, strict=True):
                p -= 0.01 * g
    kernel, D = [], residual.reshape(-1)
    for _ in range(51):
        kernel.append(D.square().sum().item())
        D = D - 0.01 * K0 @ D
    assert result.curves["network"] == pytest.approx(np.array(losses)[result.steps], rel=1e-8)
    assert result.curves["kernel"] == pytest.approx(np.array(kernel)[result.steps], rel=1e-8)
    assert result.curves["ofe"][0] == pytest.approx((f0 - Y).square().sum().item())
    assert torch.equal(model(X), f0)  # a copy was trained


def test_gamma_norm_and_alignment_are_those_of_the_kernels() -> None:
    model = network()
    first = ntk(model, X, form="full")

    def step(m: nn.Module) -> None:
        loss = 0.5 * (m(X) - Y).square().sum()
        loss.backward()
        with torch.no_grad():
            for p in m.parameters():
                p -= 0.01 * p.grad
                p.grad = None

    result = acceleration(model, X, Y, lr=0.005, steps=100, train_step=step, reduction="sum")
    last = ntk(model, X, form="full")  # the model itself was trained
    assert result.norm == pytest.approx((last.norm() / first.norm()).item())
    own0, own1 = own.diagonal(first), own.diagonal(last)
    assert result.gamma == pytest.approx(dynamics.effective_gamma(own0, own1, Y, normalised=True))
    assert result.alignment == pytest.approx([alignments(K, Y).diagonal().mean().item() for K in (own0, own1)])
    assert result.curves["network"] == pytest.approx(
        acceleration(network(), X, Y, lr=0.005, steps=100, reduction="sum").curves["network"])


def test_the_measure_of_gamma_is_that_of_the_kernels() -> None:
    model, y = network(outputs=3), torch.arange(24) % 3
    first = {k: v.clone() for k, v in model.state_dict().items()}
    own0 = ntk(model, X, form="diagonal")
    optimiser = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(20):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(X), y).backward()
        optimiser.step()
    names = ["effective_gamma", "kernel_norm", "kernel_rotation", "kernel_distance"]
    snap = richter.measure(model, richter.Probe(X, y), names, initial=first)
    K, labels = ntk(model, X, form="diagonal"), nn.functional.one_hot(y).double()
    assert snap.value("effective_gamma") == pytest.approx(dynamics.effective_gamma(own0, K, labels, normalised=True), rel=1e-8)
    functions = {"kernel_norm": dynamics.norm_ratio, "kernel_rotation": dynamics.rotation, "kernel_distance": dynamics.distance}
    for name, function in functions.items():
        assert snap.value(name) == pytest.approx(function(own0, K), rel=1e-8)


def test_the_rate_is_that_of_the_usual_loss() -> None:
    """By default lr means what it means in a loop with nn.MSELoss(); with reduction="sum", what it means with that of the sum."""
    for reduction, lr in (("mean", 0.2), ("sum", 0.2 / Y.numel())):
        model, twin, losses, loss_of = network(), network(), [], nn.MSELoss(reduction=reduction)
        result = acceleration(model, X, Y, lr=lr, steps=20, **({} if reduction == "mean" else {"reduction": reduction}))
        optimiser = torch.optim.SGD(twin.parameters(), lr=lr)
        for _ in range(21):
            optimiser.zero_grad()
            loss = loss_of(twin(X), Y)
            losses.append(loss.item())
            loss.backward()
            optimiser.step()
        assert result.curves["network"] == pytest.approx(np.array(losses)[result.steps], rel=1e-8)
        assert (result.lr, result.reduction) == (lr, reduction)
        assert f"loss, {reduction} of (f - y)²" in result.draw().axes[0].get_ylabel()


def test_usual_rates_on_digits_are_stable() -> None:
    """The call of the README, on a network and a rate as users have them."""
    data = richter.tasks.digits()
    result = acceleration(mlp([64, 64, 10], seed=0), data.x[:64], data.y[:64], lr=0.1, steps=50)
    assert result.curves["network"][-1] < result.curves["network"][0]


def test_without_room_each_output_has_its_own_kernel_and_the_note_says_so() -> None:
    small = acceleration(network(), X, Y, lr=0.01, steps=20, memory=60_000)
    assert "Kernels are computed for each output separately: the joint kernel of all 2 needs memory=" in small.summary
    assert small.curves["kernel"][0] == pytest.approx(small.curves["network"][0])
    with pytest.raises(SelectionError, match="the kernels of 24 examples and 2 outputs need memory="):
        acceleration(network(), X, Y, lr=0.01, steps=20, memory=1000)


def example(network: float, rescaled: float, kernel: float) -> Acceleration:
    curves = {"network": [9.0, network], "rescaled": [9.0, rescaled], "kernel": [9.0, kernel], "ofe": [9.0, 1.0]}
    return Acceleration(np.array([0, 10]), {k: np.array(v) for k, v in curves.items()}, 0.5, np.array([0.5]), 2.0, (0.1, 0.2),
                        np.array([0.1, 0.2]), 0.1)


@pytest.mark.parametrize(("losses", "words", "step"), [
    ((1.0, 2.0, 3.0), "Yes, the network learned faster than its initial kernel, even if rescaled (from step 10 on)", 10),
    ((2.0, 1.0, 3.0), "In part: the network learned faster than its initial kernel, but not faster than that", None),
    ((2.9, 2.5, 3.0), "No, the network did not learn faster than its initial kernel", None)])
def test_the_sentence(losses: tuple[float, float, float], words: str, step: int | None) -> None:
    result = example(*losses)
    assert result.summary.startswith(words)
    assert result.ahead == step
    assert "its alignment with the labels went from 0.100 to 0.200, and the effective gamma is 0.5" in result.summary


def test_the_picture(tmp_path: Path) -> None:
    result = acceleration(network(), X, Y, lr=0.01, steps=20)
    figure: Any = result.draw(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert not faults(figure)
    assert len(figure.axes[0].lines) == 4


def test_classes_become_targets_and_outputs_without_labels_do_not_count() -> None:
    y = torch.arange(24) % 2
    result = acceleration(network(outputs=3), X, y, lr=0.01, steps=10)
    assert math.isnan(result.gammas[2])
    assert math.isfinite(result.gamma)
    assert all(np.isfinite(curve).all() for curve in result.curves.values())


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 2, dtype=torch.float64)
        self.requires_grad_(False)


@pytest.mark.parametrize(("given", "sentence"), [
    ({"y": Y[:5]}, r"y has shape \(5, 2\) for 24 examples and 2 outputs: give class ids \[24\] or targets \[24, 2\]"),
    ({"y": [1, 2]}, "y is a list for 24 examples"),
    ({"y": torch.arange(24)}, "class ids from 0 to 23, and the model has 2 outputs"),
    ({"y": X[:, 0]}, r"one target per example, but the model has 2 outputs: give targets \[24, 2\]"),
    ({"y": 0 * Y}, "y is zero, so no kernel can align with it"), ({"y": Y * math.nan}, "y is not finite"),
    ({"lr": 5000.0}, r"lr=5000 is beyond stability: .* The largest stable lr is \d+"),
    ({"lr": -1.0}, r"lr=-1\.0: give a rate above 0"),
    ({"steps": 0}, "steps=0: give a number of steps"), ({"x": X[:1], "y": Y[:1]}, "two or more examples"),
    ({"model": Frozen()}, r"\(Frozen\) has no trainable parameter"),
    ({"reduction": "none"}, "reduction='none': lr is the rate of"),
    ({"record": [0, 99]}, "whole numbers between 0 and steps=10"),
    ({"output": lambda out: 3}, "the model returns a int, not a tensor")])
def test_bad_input(given: dict[str, Any], sentence: str) -> None:
    arguments: dict[str, Any] = {"model": network(), "x": X, "y": Y, "lr": 0.01, "steps": 10, **given}
    with pytest.raises(SelectionError, match=sentence):
        acceleration(**arguments)


def test_the_largest_stable_rate_is_told_in_the_units_of_the_rate() -> None:
    top = torch.linalg.eigvalsh(ntk(network(), X, form="full").reshape(48, 48))[-1].item()
    with pytest.raises(SelectionError, match=f"The largest stable lr is {2 / top * Y.numel() / 2:.4g}"):
        acceleration(network(), X, Y, lr=1e4, steps=10)


def test_a_training_that_diverges_is_told() -> None:
    def spoil(model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(math.nan)

    with pytest.raises(DivergedError, match="the loss is nan at step 1 of 10: training diverged"):
        acceleration(network(), X, Y, lr=0.01, steps=10, train_step=spoil)


# ------------------------------------------------------------------------------------------------ networks of the experiments


@pytest.mark.parametrize("relu", [True, False])
def test_networks_in_closed_form_are_those_of_autograd(relu: bool) -> None:
    x, y = normal(3, 9, 5), normal(4, 9, 3)
    net = EvolvingNetwork.drawn(x, [5, 7, 6, 3], 0.8, 0, relu)
    draw = torch.Generator().manual_seed(0)
    W = [(0.8 * torch.randn(shape, generator=draw, dtype=torch.float64)).requires_grad_() for shape in ((7, 5), (6, 7), (3, 6))]

    def f() -> Tensor:
        h = x
        for i, w in enumerate(W):
            h = h @ w.T / w.shape[1] ** 0.5
            h = h.relu() if relu and i < 2 else h
        return h

    seen: list[tuple[int, float]] = []
    descend(net, y, 0.05, 5, (0, 2), lambda step, loss: seen.append((step, loss)))
    for step in range(5):
        if step in (0, 2):
            assert dict(seen)[step] == pytest.approx((f() - y).square().sum().item())
        gradients = torch.autograd.grad(0.5 * (f() - y).square().sum(), W)
        with torch.no_grad():
            for w, g in zip(W, gradients, strict=True):
                w -= 0.05 * g
    assert [step for step, _ in seen] == [0, 2, 5]
    assert torch.allclose(net.f, f(), rtol=1e-10)
    out = f()
    J = torch.stack([torch.cat([g.flatten() for g in torch.autograd.grad(out[i, c], W, retain_graph=True)])
                     for i in range(9) for c in range(3)])
    K = (J @ J.T).view(9, 3, 9, 3)
    assert torch.allclose(net.kernel(), K, atol=1e-12)
    assert torch.allclose(net.sub_kernels(), own.diagonal(K), atol=1e-12)


def test_descent_ends_once_the_loss_is_small() -> None:
    x, y = normal(3, 9, 5), normal(4, 9, 3)
    net, seen = EvolvingNetwork.drawn(x, [5, 7, 3], 0.8, 0), []
    steps = descend(net, y, 0.05, 1000, (), lambda step, loss: seen.append((step, loss)), until=5.0)
    assert steps < 1000
    assert seen[-1][0] == steps
    assert seen[-1][1] < 5.0
