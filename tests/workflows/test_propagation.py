"""Kernels of a network beside the recursion of infinite width, and each layer's share of a step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import richter
from richter.core import SelectionError
from richter.models import mlp
from richter.report.drawing import faults
from richter.tasks import digits
from richter.theory import signal
from richter.workflows.layer_shares import layer_shares
from richter.workflows.propagation import propagation


def he(widths: list[int], slope: float = 0.0, seed: int = 0) -> nn.Sequential:
    """Weights N(0, 2 / ((1 + slope^2) fan_in)), no biases, in float64."""
    model = mlp(widths, activation=lambda: nn.LeakyReLU(slope) if slope else nn.ReLU(), bias=False, seed=seed).double()
    draw = torch.Generator().manual_seed(seed + 1000)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=draw) * math.sqrt(2 / ((1 + slope**2) * p.shape[1])))
    return model


def inputs(n: int = 6, d: int = 10) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


# ------------------------------------------------------------------------------------------------ propagation


@pytest.mark.parametrize("frozen", [False, True])
def test_cosines_are_those_of_the_kernels(frozen: bool) -> None:
    model, x = he([10, 12, 14, 3]), inputs()
    model[1] = nn.ReLU(inplace=True)
    seen = propagation(model.requires_grad_(not frozen), x, networks=1)
    model.requires_grad_(True)
    i, j = np.triu_indices(len(x), 1)
    for row, name in enumerate(("0", "2", "4")):
        K = richter.kernels.forward_kernel(model, x, name).numpy()
        norm = np.sqrt(K.diagonal())
        np.testing.assert_allclose(seen.forward[row], (K / np.outer(norm, norm))[i, j], atol=1e-12)
        B = np.einsum("iaja->ij", richter.kernels.backward_kernel(model, x, name).numpy())
        norm = np.sqrt(B.diagonal())
        np.testing.assert_allclose(seen.backward[row], (B / np.outer(norm, norm))[i, j], atol=1e-12)
    assert seen.layers == ("0", "2", "4")
    apart = np.concatenate([(seen.forward - seen.forward_predicted)[1:], (seen.backward - seen.backward_predicted)[:-1]])
    assert abs(seen.distance - np.sqrt((apart**2).mean())) < 1e-12
    np.testing.assert_allclose(seen.forward_predicted, signal.correlations(seen.forward[0], 3))
    np.testing.assert_allclose(seen.backward_predicted, signal.gradients(seen.forward[0], 3))


@pytest.mark.parametrize("slope", [0.0, 0.3])
def test_wide_networks_follow_the_recursion(slope: float) -> None:
    near = propagation(he([10, 2000, 2000, 2000, 10], slope), inputs(), networks=2)
    far = propagation(he([10, 20, 20, 20, 10], slope), inputs(), networks=2)
    assert near.distance < 0.05 < far.distance
    assert max(near.chance) < 0.05 < min(far.chance)
    assert 0.4 < near.ratio < 2
    assert "infinite width describes the network" in str(near)
    wrong = np.asarray(signal.gradients(near.forward[0], 4, slope=slope + 0.3))
    assert np.abs(near.backward - wrong).max() > 0.1


def test_training_leaves_the_picture() -> None:
    data = digits(seed=0)
    model = he([64, 100, 100, 10]).float()
    before = propagation(model, data.x)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(150):
        optimiser.zero_grad()
        F.cross_entropy(model(data.x), data.y).backward()
        optimiser.step()
    after = propagation(model, data.x)
    assert before.ratio < 1.6 < after.ratio
    assert before.chance == after.chance
    assert "differ from those of a random network" in str(after)
    assert f"forward and backward kernels carry equal information at layer {after.balanced:.1f} of 3" in str(after) or \
        math.isnan(after.balanced)
    assert all(p.grad is not None for p in model.parameters())  # left as they were
    figure = after.draw()
    assert len(figure.axes) == 2
    assert not faults(figure)


def test_knobs_of_propagation() -> None:
    model, x = he([10, 12, 14, 3]), inputs()
    assert propagation(model, x, examples=3, networks=1).forward.shape == (3, 3)
    assert len(propagation(model, x, networks=3).chance) == 3
    assert propagation(model, x, seed=1).chance != propagation(model, x, seed=0).chance


def test_biases_are_remarked() -> None:
    biased = mlp([10, 12, 3], seed=0).double()
    assert "Layers 0, 2 have non-zero biases" in str(propagation(biased, inputs()))
    assert not propagation(he([10, 12, 3]), inputs()).notes


@pytest.mark.parametrize(("model", "sentence"), [
    (mlp([10, 8, 3], activation=nn.Tanh), r"after layer '0' comes Tanh: the recursion needs an activation with phi\(a u\) = a"),
    (nn.Sequential(nn.Linear(10, 8), nn.Linear(8, 3)), "after layer '0' comes no activation"),
    (nn.Linear(10, 3), "the network has depth 1, without a hidden layer"),
    (nn.Sequential(nn.Unflatten(1, (1, 10)), nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)),
     "layer '1' is a Conv1d: the recursion describes chains of dense layers"),
    (nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 8), nn.LeakyReLU(0.1), nn.Linear(8, 3)), "2 different slopes"),
    (nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3), nn.Softmax(1)), "the network ends with Softmax"),
])
def test_where_the_recursion_does_not_hold(model: nn.Module, sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        propagation(model.double(), inputs())


def test_examples_without_a_cosine() -> None:
    x = inputs()
    with pytest.raises(SelectionError, match="x has 1 example, but cosines need pairs"):
        propagation(he([10, 12, 3]), x[:1])
    x[2] = 0
    with pytest.raises(SelectionError, match="an input of zeros, a dead layer or weights that diverged"):
        propagation(he([10, 12, 3]), x)


# ------------------------------------------------------------------------------------------------ shares of a step


def test_shares_are_those_of_the_tangent_kernels() -> None:
    """-lr K_l dL/df with kernels formed by definition."""
    model, x, y = he([10, 12, 14, 3]), inputs(), torch.tensor([0, 1, 2, 0, 1, 2])
    seen = layer_shares(model, x, y, lr=1e-3)
    f = model(x)
    g = (f.softmax(1) - F.one_hot(y, 3)).detach() / len(x)
    K = richter.kernels.ntk(model, x, form="full", per_layer=True)
    assert seen.layers == tuple(K)
    Y = F.one_hot(y, 3).double()
    Y = (Y - Y.mean()).numpy()
    for row, name in enumerate(seen.layers):
        expected = -1e-3 * torch.einsum("iajb,jb->ia", K[name], g).detach().numpy()
        np.testing.assert_allclose(seen.predicted[row], expected, atol=1e-12)
    squares = [p.grad.square().sum().item() for p in _with_gradients(model, x, y)]
    np.testing.assert_allclose(seen.share, np.array(squares) / sum(squares), rtol=1e-9)
    along = (seen.predicted * Y).sum((1, 2))
    np.testing.assert_allclose(seen.toward_labels, along / along.sum(), rtol=1e-9)
    assert (seen.error < 0.02).all()
    assert "layer  share  toward labels  error" in str(seen)


def _with_gradients(model: nn.Module, x: Tensor, y: Tensor) -> list[nn.Parameter]:
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    return list(model.parameters())


def test_actual_steps() -> None:
    model, x, y = he([10, 12, 14, 3]), inputs(), torch.tensor([0, 1, 2, 0, 1, 2])
    lr = 0.3
    seen = layer_shares(model, x, y, lr=lr)
    before, start = model(x).detach(), [p.detach().clone() for p in model.parameters()]
    for row, p in enumerate(_with_gradients(model, x, y)):
        with torch.no_grad():
            p.sub_(lr * p.grad)
            np.testing.assert_allclose(seen.actual[row], (model(x) - before).numpy(), atol=1e-12)
            p.copy_(start[row])
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(lr * p.grad)
    np.testing.assert_allclose(seen.whole, (model(x).detach() - before).numpy(), atol=1e-12)
    assert seen.interaction > 1e-3
    with torch.no_grad():
        for p, w in zip(model.parameters(), start, strict=True):
            p.copy_(w)
    np.testing.assert_allclose(seen.error[-1], 0, atol=1e-12)  # the read-out is linear in its weights
    small = layer_shares(model, x, y, lr=lr / 100)
    assert (small.error <= seen.error + 1e-12).all()


def test_shares_of_other_losses_and_labels() -> None:
    model, x = he([10, 12, 1]), inputs()
    target = x.sum(1)
    seen = layer_shares(model, x, target, 1e-3, lambda f, y: (f[:, 0] - y).square().mean())
    assert abs(seen.toward_labels.sum() - 1) < 1e-12
    strange = layer_shares(model, x, target[:3], 1e-3, lambda f, y: (f[:3, 0] - y).square().mean())
    assert np.isnan(strange.toward_labels).all()
    model[0].weight.requires_grad_(False)
    assert layer_shares(model, x, target, 1e-3, lambda f, y: (f[:, 0] - y).square().mean()).layers == ("2",)


@pytest.mark.parametrize(("change", "sentence"), [
    ({"lr": 0.0}, "lr=0.0: give a positive step size"),
    ({"model": he([10, 3]).requires_grad_(False)}, "no parameter of the model is trained"),
    ({"model": nn.Sequential(he([10, 12]), nn.Unflatten(1, (3, 4)))}, r"the model's output has shape \(6, 3, 4\)"),
])
def test_steps_that_have_no_shares(change: dict[str, object], sentence: str) -> None:
    given = {"model": he([10, 12, 3]), "x": inputs(), "y": torch.zeros(6, dtype=torch.long), "lr": 0.1, **change}
    with pytest.raises(SelectionError, match=sentence):
        layer_shares(**given)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ what may go wrong


def test_random_networks_that_died_are_left_out() -> None:
    """Of five random networks with two units in a layer some have no features for an example."""
    model = he([10, 2, 3], seed=3)
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0] * 10, [-1.0] * 10]))  # alive for every example
    seen = propagation(model, inputs(), networks=8)
    assert np.isfinite(seen.chance).all()
    assert math.isfinite(seen.ratio)
    assert "nan" not in str(seen)


def test_narrow_networks_that_are_all_dead_are_said() -> None:
    """One unit that reads inputs of one direction is there for all of them or for none."""
    model, x = he([10, 1, 3]), torch.rand(4, 1, dtype=torch.float64) + torch.zeros(10, dtype=torch.float64)
    with torch.no_grad():
        model[0].weight.abs_()
    dead = list[str]()
    for seed in range(10):
        try:
            assert len(propagation(model, x, networks=1, seed=seed).chance) == 1
        except SelectionError as error:
            dead.append(str(error))
    assert 0 < len(dead) < 10
    assert dead[0].startswith("1 random networks of these widths are dead: some layer is so narrow that no pair of examples has")


@pytest.mark.parametrize(("model", "x", "sentence"), [
    (he([10, 8, 3]), torch.randn(6, 4, 10, dtype=torch.float64), r"layer '0' reads \[6, 4, 10\]: the recursion needs one vector"),
    (nn.Sequential(*he([10, 8, 1]), nn.Flatten(0)), inputs(), r"the network's output has shape \(6,\)"),
    (he([10, 8, 3]), inputs() * math.nan, "contain NaN or Inf, so nothing can be compared"),
])
def test_shapes_and_numbers_that_have_no_recursion(model: nn.Module, x: Tensor, sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        propagation(model, x)


def test_counts_of_propagation_are_whole() -> None:
    for options, sentence in (({"networks": 0}, "networks=0; a whole number"), ({"examples": -1}, "examples=-1; a whole")):
        with pytest.raises(SelectionError, match=sentence):
            propagation(he([10, 8, 3]), inputs(), **options)


def test_propagation_leaves_the_examples_and_works_in_inference_mode() -> None:
    model, x = nn.Sequential(nn.LeakyReLU(0.5, inplace=True), *he([10, 12, 3])), inputs()
    before = x.clone()
    seen = propagation(model, x, networks=1)
    assert torch.equal(x, before)
    with torch.inference_mode():
        again = propagation(model, x, networks=1)
    np.testing.assert_array_equal(again.backward, seen.backward)


def test_examples_without_a_label_have_no_part_in_the_shares_toward_labels() -> None:
    model, x, y = he([10, 12, 3]), inputs(), torch.tensor([0, 1, -100, 0, 1, 2])
    seen = layer_shares(model, x, y, 1e-3)
    keep = y >= 0
    alone = layer_shares(model, x[keep], y[keep], 1e-3)
    np.testing.assert_allclose(seen.labels[keep.numpy()], alone.labels, atol=1e-15)
    assert (seen.labels[2] == 0).all()
    np.testing.assert_allclose(seen.toward_labels, alone.toward_labels, rtol=1e-9)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x)[:, None].chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(q, k, v)[:, 0].mean(1))


def test_shares_of_attention() -> None:
    """Fused attention cannot be differentiated twice."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Attending().double(), torch.randn(6, 5, 4, dtype=torch.float64)
    seen = layer_shares(model, x, torch.arange(6) % 3, 1e-5)
    assert (seen.error < 1e-3).all()


@pytest.mark.parametrize(("x", "k", "sentence"), [
    (inputs(), 1, "the loss's gradient in the outputs is 0 .cross-entropy of a single output"),
    (inputs() * math.nan, 3, "outputs, or the loss's gradient in them, contain NaN or Inf")])
def test_steps_that_are_none(x: Tensor, k: int, sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        layer_shares(he([10, 12, k]), x, torch.zeros(6, dtype=torch.long), 0.1)
