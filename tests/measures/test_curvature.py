"""Second order: H_w against explicit Hessians, its eigenpairs, energies and moments, Theorem A, and what a step does early on."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import oracles
import richter
from richter.core import SelectionError
from richter.measures import curvature
from richter.measures.curvature import TraceMoment, early_step, hessian, natural, predicted_alignment, theorem_a
from richter.models import mlp
from richter.theory.gofe import descent_velocity

N, CLASSES = 8, 3
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(N) % CLASSES
PROBE = richter.Probe(X, Y)


def network(*hidden: int, bias: bool = True, activation: type[nn.Module] = nn.ReLU, seed: int = 0) -> nn.Sequential:
    return mlp([4, *hidden, CLASSES], activation, bias=bias, seed=seed).double()


def vector(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_weights(model: nn.Module) -> Tensor:
    """dL/df of the mean cross-entropy."""
    return (model(X).softmax(1).detach() - oracles.one_hot(Y, CLASSES)) / N


def explicit(model: nn.Module, w: Tensor) -> Tensor:
    return torch.einsum("nk,nkpq->pq", w, oracles.output_hessians(model, X))


def psi(model: nn.Module) -> Tensor:
    """Psi [p, n k], parameters in their order."""
    return torch.cat([J.flatten(2).flatten(0, 1).T for J in oracles.jacobian(model, X).values()])


def centred_labels() -> Tensor:
    H = oracles.one_hot(Y, CLASSES)
    return H - H.mean()


# ------------------------------------------------------------------------------------------------------------ products


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_products_are_those_of_the_explicit_matrix(activation: type[nn.Module]) -> None:
    model = network(5, 4, activation=activation)
    H = hessian(model, richter.Probe(X, Y, chunk=3))
    M = explicit(model, loss_weights(model))
    v = vector(H.size)
    torch.testing.assert_close(H(v), M @ v, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(H.dense(), M, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(H.gradient, psi(model) @ loss_weights(model).flatten(), rtol=1e-9, atol=1e-12)
    with H.many():  # graphs are made once; the numbers are the same
        torch.testing.assert_close(H(v), M @ v, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(H(v), M @ v, rtol=1e-9, atol=1e-12)
    other = vector(N * CLASSES, 1).view(N, CLASSES)
    torch.testing.assert_close(H.weighted(other)(v), explicit(model, other) @ v, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(hessian(model, PROBE, other)(v), explicit(model, other) @ v, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(H.features(other), psi(model) @ other.flatten(), rtol=1e-9, atol=1e-12)
    metric = oracles.cross_entropy_metric(model(X), CLASSES)
    torch.testing.assert_close(H.fisher(v), psi(model) @ metric @ psi(model).T @ v, rtol=1e-9, atol=1e-12)


def test_the_loss_s_hessian_is_the_sum_of_both_parts() -> None:
    """d^2 L / dtheta^2 = H_w + Psi L_ff Psi^T.  [signal, Eq. (20)]"""
    model = network(5)
    names, values = zip(*model.named_parameters(), strict=True)

    def loss(theta: Tensor) -> Tensor:
        pieces = {n: t.view_as(v) for n, t, v in zip(names, theta.split([v.numel() for v in values]), values, strict=True)}
        return F.cross_entropy(torch.func.functional_call(model, pieces, (X,)), Y)

    H = hessian(model, PROBE)
    whole = torch.autograd.functional.hessian(loss, H.theta)
    v = vector(H.size)
    torch.testing.assert_close(H(v) + H.fisher(v) / N, whole @ v, rtol=1e-9, atol=1e-12)


def test_a_network_that_is_linear_in_its_weights_has_none() -> None:
    H = hessian(network(), PROBE)
    assert H(vector(H.size)).abs().max() == 0


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, CLASSES)).double().train()
    before, stream = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    H = hessian(model, PROBE)
    H.top(3)
    early_step(model, PROBE, 0.1)
    assert model.training
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    np.testing.assert_allclose(H(vector(H.size)).numpy(), hessian(model, PROBE)(vector(H.size)).numpy())


@pytest.mark.parametrize("how", ["in place", "by .data", "other .data", "through numpy"])
def test_weights_that_moved_are_noticed(how: str) -> None:
    model = network(5)
    H = hessian(model, PROBE)
    W = model[0].weight
    with torch.no_grad():
        if how == "in place":
            W += 0.1
        elif how == "by .data":
            W.data += 0.1
        elif how == "other .data":
            W.data = W.data + 0.1
        else:
            W.numpy()[0, 0] += 0.1
    with pytest.raises(SelectionError, match=r"weights have changed since .*make a new one"):
        H(vector(H.size))


@pytest.mark.parametrize(("act", "words"), [
    (lambda: hessian(network(5), richter.Probe(X, None)), "the probe has no labels, so there is no loss"),
    (lambda: hessian(network(5), PROBE)(vector(3)), "a vector of 3 numbers: the network has 43 trainable parameters"),
    (lambda: hessian(network(5), PROBE, torch.ones(2, 2)), r"weights of shape \(2, 2\) for outputs of shape \(8, 3\)"),
    (lambda: hessian(network(5), PROBE).top(43), "k=43 eigenpairs of a matrix of 43 parameters: k must be between 1 and 42"),
    (lambda: hessian(mlp([4, 600, 3]).double(), PROBE).dense(),
     "H_w of 4,803 parameters is not formed, because there are more than 2,000"),
    (lambda: hessian(network(5), PROBE).moments(1, exact=False), "vectors=1: an error estimate needs at least two"),
    (lambda: hessian(mlp([4, 5, 1]).double(), richter.Probe(X, X[:, :1])).fisher(vector(31)), "one class: .*an output for each"),
    (lambda: theorem_a(network(5, activation=nn.Tanh), PROBE), r"1 is a Tanh: Theorem A applies to .*positively homogeneous"),
    (lambda: theorem_a(network(), PROBE), "the model has one weight matrix: without a hidden layer .*reads 0 = 0"),
    (lambda: early_step(network(5), PROBE, 0.0), "lr=0.0: the learning rate of a step must be above 0"),
    (lambda: natural(hessian(network(5), PROBE), 0.0), "damping=0.0: give a number above 0, because the Fisher matrix is"),
    (lambda: predicted_alignment({"7": 0.1}, {"0": {}}, 0.1), "no moments of layer '7'. Moments are of: 0")])
def test_what_cannot_be_had_is_said(act: object, words: str) -> None:
    with pytest.raises(SelectionError, match=words):
        act()  # type: ignore[operator]


# ------------------------------------------------------------------------------------------------- eigenpairs and traces


def test_eigenpairs_of_largest_absolute_value() -> None:
    model = network(6, 5)
    H = hessian(model, PROBE)
    values = torch.linalg.eigvalsh(explicit(model, loss_weights(model)))
    largest = values[values.abs().argsort(descending=True)][:6]
    pairs = H.top(6, tolerance=1e-9)
    torch.testing.assert_close(pairs.values, largest, rtol=1e-8, atol=1e-10)
    assert pairs.residuals.max() <= 1e-8 * pairs.values[0].abs()
    for x, v in zip(pairs.values, pairs.vectors, strict=True):
        torch.testing.assert_close(H(v), x * v, rtol=0, atol=1e-8)
    energy = H.energy(pairs.vectors)
    assert list(energy) == ["0", "2", "4"]
    torch.testing.assert_close(torch.stack(list(energy.values())).sum(0), torch.ones(6, dtype=torch.float64))
    first = pairs.vectors[:, :4 * 6 + 6].square().sum(1)  # the first layer's weights and biases
    torch.testing.assert_close(energy["0"], first)
    assert 0 < pairs.products <= 200


def test_the_spectrum_of_two_layers_is_symmetric_and_of_more_it_is_not() -> None:
    """H of two bias-free layers couples only one with the other.  [signal, Sec. 5 of the definitions]"""
    two, three = (torch.linalg.eigvalsh(hessian(network(*hidden, bias=False), PROBE).dense()) for hidden in ((6,), (6, 5)))
    assert (two + two.flip(0)).abs().max() <= 1e-12
    assert (three + three.flip(0)).abs().max() > 1e-3 * three.abs().max()


def test_moments_are_traces() -> None:
    model = network(4, 4)
    H = hessian(model, PROBE)
    M = explicit(model, loss_weights(model))
    exact, drawn = H.moments(), H.moments(400, exact=False, seed=1)
    for layer, mine in H.layers.items():
        for p in (2, 3, 4):
            trace = torch.linalg.matrix_power(M, p).diagonal()[mine].sum().item()
            assert exact[layer][p] == TraceMoment(pytest.approx(trace, rel=1e-8), 0.0)
            assert drawn[layer][p].error > 0
            assert drawn[layer][p].value == pytest.approx(trace, abs=4 * drawn[layer][p].error)
    assert H.moments(4, exact=False, seed=1) != H.moments(4, exact=False, seed=2)


# --------------------------------------------------------------------------------------------------------- Theorem A


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(2, 5), min_size=1, max_size=3), st.integers(0, 20), st.booleans())
def test_theorem_a(hidden: list[int], seed: int, bias: bool) -> None:
    model = network(*hidden, bias=bias, seed=seed)
    found = theorem_a(model, PROBE)
    if not found.right.any():  # no example reaches the outputs
        assert not found.left.any()
        return
    assert found.depth == len(hidden) + 1
    assert found.biases == bias
    assert found.error <= 1e-10
    printed = theorem_a(model, PROBE, biases=False)
    assert (printed.error <= 1e-10) == (not bias)
    if not bias:  # the step itself
        H = hessian(model, PROBE)
        step = H.theta - 0.1 * H.gradient
        torch.testing.assert_close(H.theta - 0.1 / len(hidden) * H(H.theta), step, rtol=1e-10, atol=1e-12)


def test_theorem_a_holds_for_leaky_units_and_convolutions() -> None:
    model = nn.Sequential(nn.Conv1d(1, 3, 2), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(9, CLASSES)).double()
    assert theorem_a(model, richter.Probe(X[:, None], Y)).error <= 1e-10


# ------------------------------------------------------------------------------------------------------ early in training


def test_labels_and_gradient() -> None:
    model = network(5)
    w = loss_weights(model)
    expected = float((w * centred_labels()).sum() / (w.norm() * centred_labels().norm()))
    snap = richter.measure(model, PROBE, "label_gradient_correlation")
    assert snap.value("label_gradient_correlation") == pytest.approx(expected, rel=1e-9)
    with torch.no_grad():
        model[-1].weight.zero_()
        model[-1].bias.zero_()
    balanced = richter.Probe(X[:6], Y[:6])  # outputs of 0 ask for the labels themselves
    assert richter.measure(model, balanced, "label_gradient_correlation").value("label_gradient_correlation") == pytest.approx(-1)
    snap = richter.measure(model, richter.Probe(X, None), "label_gradient_correlation")
    assert "no labels" in snap.note("label_gradient_correlation")


def test_a_step_and_its_first_order() -> None:
    """By explicit Hessians and Jacobians of both networks."""
    model, lr = network(6, 5, activation=nn.Tanh), 0.05
    y, w = centred_labels(), loss_weights(model)
    step = early_step(model, PROBE, lr)
    gradient = psi(model) @ w.flatten()
    then = copy.deepcopy(model)
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(then.parameters()).detach() - lr * gradient, then.parameters())
    torch.testing.assert_close(step.change, (psi(then) - psi(model)) @ y.flatten(), rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(step.first, -lr * explicit(model, y) @ gradient, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(step.collinear, -lr * explicit(model, w) @ psi(model) @ y.flatten(), rtol=1e-8, atol=1e-12)
    assert step.correlation == pytest.approx(float((y * w).sum() / (y.norm() * w.norm())))
    assert step.first_order > 0.99
    assert (step.flips, step.units) == (0, N * 11)
    assert early_step(model, PROBE, 1e-5).first_order > step.first_order
    eye = torch.eye(len(gradient), dtype=torch.float64)
    assert step.projected(eye) == pytest.approx(step.approximation)
    assert step.projected(eye[:3]) != pytest.approx(step.approximation)


def test_flips_are_counted() -> None:
    model, lr = network(6, 5), 1.0
    step = early_step(model, PROBE, lr)
    then = copy.deepcopy(model)
    H = hessian(model, PROBE)
    nn.utils.vector_to_parameters(H.theta - lr * H.gradient, then.parameters())
    signs = [[(net[:2](X) > 0), (net[:4](X) > 0)] for net in (model, then)]
    expected = sum(int((a != b).sum()) for a, b in zip(*signs, strict=True))
    assert 0 < step.flips == expected
    quiet = early_step(model, PROBE, 1e-7)
    assert quiet.flips == 0
    assert quiet.first_order > 0.999


def test_the_alignment_after_a_step() -> None:
    """The corrected Eq. (25) is A_l times the ratio of tr M_l (1 - lr H) H^2 (1 - lr H) to tr M_l H^2."""
    model, lr = network(4, 4), 0.3
    H = hessian(model, PROBE)
    M = explicit(model, loss_weights(model))
    step = torch.eye(H.size, dtype=torch.float64) - lr * M
    A = {"0": 0.1, "2": 0.3, "4": 0.05}
    for layer, value in predicted_alignment(A, H.moments(), lr).items():
        mine = H.layers[layer]
        ratio = (step @ M @ M @ step).diagonal()[mine].sum() / (M @ M).diagonal()[mine].sum()
        assert value == pytest.approx(A[layer] * ratio.item(), rel=1e-8)


def test_velocities_of_feature_evolution() -> None:
    """With V = -H_w A / |w|^2, d(Psi w)/dt is that of training with the adjustment A.  [signal, Eqs (18), (19)]"""
    model = network(4)
    H = hessian(model, PROBE)
    P, w, metric = psi(model), loss_weights(model).flatten(), oracles.cross_entropy_metric(model(X), CLASSES) / N
    fisher = P @ metric @ P.T
    inverse = torch.linalg.inv(fisher + 0.1 * torch.eye(H.size, dtype=torch.float64))
    solve = natural(H, 0.1)
    v = vector(H.size)
    torch.testing.assert_close(solve(v), inverse @ v, rtol=1e-7, atol=1e-9)
    for A in (torch.eye(H.size, dtype=torch.float64), inverse):
        V = descent_velocity(H.dense(), H.w.flatten(), A)
        evolved = V @ P @ w * (w @ w) - P @ metric @ P.T @ A @ P @ w
        trained = -(explicit(model, w.view(N, CLASSES)) + fisher) @ A @ P @ w
        torch.testing.assert_close(evolved, trained, rtol=1e-7, atol=1e-10)


def test_every_public_name_is_there() -> None:
    assert all(hasattr(curvature, name) for name in curvature.__all__)
    assert not math.isnan(theorem_a(network(5), PROBE).error)


# ------------------------------------------------------------------------------------------------------- what may go wrong


@pytest.mark.parametrize("classes", [Y, torch.where(torch.arange(N) == 2, -100, Y)])
def test_products_with_the_fisher_matrix_leave_out_what_does_not_count(classes: Tensor) -> None:
    model = network(6, 5)
    H, keep = hessian(model, richter.Probe(X, classes)), (classes >= 0).repeat_interleave(CLASSES)
    P, M = psi(model)[:, keep], oracles.cross_entropy_metric(oracles.outputs(model, X), CLASSES)[keep][:, keep]
    v = vector(H.size)
    torch.testing.assert_close(H.fisher(v), P @ (M @ (P.T @ v)), rtol=1e-9, atol=1e-12)
    mean = P @ M @ P.T / int((classes >= 0).sum()) + 0.1 * torch.eye(H.size, dtype=torch.float64)
    torch.testing.assert_close(natural(H, 0.1)(v), torch.linalg.solve(mean, v), rtol=1e-6, atol=1e-8)


def test_the_fisher_matrix_of_targets_that_are_no_classes_is_refused() -> None:
    H = hessian(network(6), richter.Probe(X, torch.randn(N, CLASSES, dtype=torch.float64)))
    with pytest.raises(SelectionError, match="needs outputs that are logits of classes"):
        natural(H)(vector(H.size))


def test_eigenpairs_of_nothing_are_refused() -> None:
    for H in (hessian(nn.Linear(4, CLASSES).double(), PROBE), hessian(network(6), PROBE, torch.zeros(N, CLASSES))):
        with pytest.raises(SelectionError, match=r"H_w is 0: the outputs are linear in the trainable parameters \(no hidden"):
            H.top(2)


def test_eigenpairs_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    def crowded(*_: object) -> None:
        raise ArithmeticError("500 products, and residuals of 0.01")

    monkeypatch.setattr("richter.linalg.largest_eigenpairs", crowded)
    words = r"2 eigenpairs did not converge to a tolerance of 0.0001 of .*500 products, .*larger basis= than 20 vectors"
    with pytest.raises(SelectionError, match=words):
        hessian(network(6), PROBE).top(2)


def test_eigenpairs_that_cannot_be_had() -> None:
    H = hessian(network(6), PROBE)
    with pytest.raises(SelectionError, match="basis=3 vectors for 5 eigenpairs: Lanczos needs more vectors than pairs"):
        H.top(5, basis=3)
    with pytest.raises(SelectionError, match=r"k=2\.5 eigenpairs"):
        H.top(2.5)  # type: ignore[arg-type]
    with pytest.raises(SelectionError, match="the weights of the outputs contain NaN or Inf"):
        H.weighted(torch.full((N, CLASSES), math.nan))


def test_products_through_attention() -> None:
    """Fused attention cannot be differentiated twice, plain products can."""
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.head = nn.Linear(2, 6), nn.Linear(2, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.mix(x.view(-1, 1, 2, 2)).chunk(3, -1)
            return self.head(F.scaled_dot_product_attention(q, k, v)[:, 0].mean(1))

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Attending().double()
    H = hessian(model, PROBE)
    v, step = vector(H.size), 1e-5

    def gradient(theta: Tensor) -> Tensor:
        places = {name: piece.clone().requires_grad_() for name, piece in H.parts(theta).items()}
        f = torch.func.functional_call(model, places, (X,))
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad((f * H.w).sum(), list(places.values()))])

    change = (gradient(H.theta + step * v) - gradient(H.theta - step * v)) / (2 * step)
    torch.testing.assert_close(H(v), change, rtol=1e-6, atol=1e-9)
    assert H.fisher(v) @ v > 0


def test_theorem_a_is_of_all_parameters_of_a_chain() -> None:
    frozen = network(6, 5, bias=False)
    frozen[0].weight.requires_grad_(False)
    with pytest.raises(SelectionError, match=r"0\.weight is frozen .*, but H_w covers trainable parameters only"):
        theorem_a(frozen, PROBE)
    twice = nn.Linear(4, 4)
    with pytest.raises(SelectionError, match="a layer with weights occurs twice in the model"):
        theorem_a(nn.Sequential(twice, nn.ReLU(), twice, nn.ReLU(), nn.Linear(4, CLASSES)).double(), PROBE)
    assert theorem_a(nn.DataParallel(network(6)), PROBE).error < 1e-10
