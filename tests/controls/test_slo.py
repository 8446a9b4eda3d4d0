"""Speed Limited Optimisation: one step against the definition, and its laws."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from descents import ADAM, MOMENTUM, close, draw, give, parameters, same, small, train
from oracles import adam_direction, momentum_direction, slo_step
from richter.controls import SLO
from richter.controls.slo import LARGE, norms


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize(("speed", "eps", "decay"), [(1.0, 0.1, 0.0), (500.0, 0.01, 0.0), (0.002, 0.0, 0.3), (0.0, 0.1, 0.2)])
def test_the_step_is_the_definition(speed: float, eps: float, decay: float, foreach: bool, device: str) -> None:
    params = parameters(device=device)
    optimiser = SLO(params, 0.03, speed, eps, weight_decay=decay, foreach=foreach)
    expected = draw()
    for seed in range(1, 6):
        gradients = give(params, seed)
        expected = [slo_step(W, g, 0.03, speed, eps, decay) for W, g in zip(expected, gradients, strict=True)]
        optimiser.step()
    close(params, expected)


def test_groups_have_speeds_of_their_own() -> None:
    params = parameters()
    optimiser = SLO([{"params": params[:1], "speed": 500.0}, {"params": params[1:2], "lr": 0.5, "eps": 2.0},
                     {"params": params[2:3], "weight_decay": 0.1}], lr=0.03, speed=0.002)
    optimiser.add_param_group({"params": params[3:], "maximize": True})
    g = give(params, 1)
    W = draw()
    optimiser.step()
    close(params, [slo_step(W[0], g[0], 0.03, 500.0), slo_step(W[1], g[1], 0.5, 0.002, 2.0),
                   slo_step(W[2], g[2], 0.03, 0.002, 0.1, 0.1), slo_step(W[3], -g[3], 0.03, 0.002)])


DIRECTIONS: dict[str, tuple[Any, Callable[[list[Tensor]], Tensor]]] = {
    "momentum": (MOMENTUM, lambda g: momentum_direction(g, 0.9)),
    "nesterov": (functools.partial(torch.optim.SGD, momentum=0.8, nesterov=True), lambda g: momentum_direction(g, 0.8, True)),
    "adam": (ADAM, lambda g: adam_direction(g, 0.8, 0.9, 1e-3)),
    "adamw": (functools.partial(torch.optim.AdamW, weight_decay=0, betas=(0.8, 0.9), eps=1e-3),
              lambda g: adam_direction(g, 0.8, 0.9, 1e-3)),
    "sgd": (torch.optim.SGD, lambda g: g[-1]),
}


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("name", list(DIRECTIONS))
def test_a_base_gives_the_direction(name: str, maximize: bool, device: str) -> None:
    base, direction = DIRECTIONS[name]
    params = parameters(device=device)
    optimiser = SLO([{"params": params[:2], "speed": 3.0}, {"params": params[2:], "speed": 3.0}], 0.03, base=base,
                    weight_decay=0.1, maximize=maximize)
    expected, past = draw(), [[] for _ in params]
    for seed in range(1, 7):
        for g, history in zip(give(params, seed), past, strict=True):
            history.append(-g if maximize else g)
        expected = [slo_step(W, direction(h), 0.03, 3.0, 0.1, 0.1) for W, h in zip(expected, past, strict=True)]
        optimiser.step()
    close(params, expected)


def test_a_base_is_exact_where_weights_are_large() -> None:
    p = nn.Parameter(torch.full((8,), 1e6))
    optimiser = SLO([p], lr=1e5, eps=0.0, base=MOMENTUM)
    p.grad = torch.full((8,), 1e-6)
    optimiser.step()  # (1e6 - 1e-6) - 1e6 would be 0 in float32
    assert torch.allclose(p, torch.full((8,), 1e6 - 1e5 / math.sqrt(8)))


@pytest.mark.parametrize("base", [None, MOMENTUM, ADAM])
def test_frozen_parameters_are_left_alone(base: Any) -> None:
    params = parameters()
    before = [p.detach().clone() for p in params]
    optimiser = SLO(params, 0.1, weight_decay=0.5, base=base)
    for seed in (1, 2):
        give(params, seed)
        params[1].grad = None
        optimiser.step()
    assert torch.equal(params[1], before[1])
    assert not torch.equal(params[0], before[0])


def test_a_step_without_a_gradient_is_none_of_the_base() -> None:
    params = parameters()
    optimiser = SLO(params, 0.1, base=MOMENTUM)
    past: list[Tensor] = []
    for seed in (1, 2, 3):
        g = give(params, seed)
        if seed == 2:
            params[0].grad = None
        else:
            past.append(g[0])
        before = params[0].detach().clone()
        optimiser.step()
    close(params[:1], [slo_step(before, momentum_direction(past, 0.9), 0.1)])


@pytest.mark.parametrize("base", [None, MOMENTUM, ADAM])
def test_a_closure_is_evaluated_once_with_gradients(base: Any) -> None:
    (p,), (q,) = ([nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))] for _ in range(2))
    with_closure, without = SLO([p], 0.1, base=base), SLO([q], 0.1, base=base)
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        with_closure.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        expected = q.square().sum()
        without.zero_grad()
        expected.backward()
        without.step()
        assert with_closure.step(closure) == expected  # type: ignore[arg-type, call-overload]
    assert len(calls) == 3
    assert torch.equal(p, q)


@pytest.mark.parametrize("base", [None, MOMENTUM])
@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("foreach", [True, False])
def test_zero_gradients_move_nothing(eps: float, foreach: bool, base: Any) -> None:
    params = parameters()
    optimiser = SLO(params, 0.1, eps=eps, foreach=foreach, base=base)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimiser.step()
    same(params, draw())


def test_an_empty_tensor_and_no_gradient_at_all() -> None:
    p = nn.Parameter(torch.zeros(0, 3))
    optimiser = SLO([p], 0.1, eps=0.0)
    optimiser.step()
    p.grad = torch.zeros(0, 3)
    optimiser.step()
    assert p.shape == (0, 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_bad_gradients_are_seen(eps: float, bad: float) -> None:
    params = parameters()
    give(params, 1)
    assert params[0].grad is not None
    params[0].grad[1, 2] = bad
    SLO(params, 0.1, eps=eps).step()
    assert params[0][1, 2].isnan()
    assert params[0].isnan().all() == math.isnan(bad)
    assert all(p.isfinite().all() for p in params[1:])


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_once(dtype: torch.dtype, foreach: bool) -> None:
    W = torch.ones(300, 300, dtype=dtype)
    p = nn.Parameter(W.clone())
    p.grad = torch.full_like(p, 1000.0)  # its norm, 3e5, is beyond float16, and so is its inverse
    SLO([p], lr=1.0, speed=3.0, eps=0.0, foreach=foreach).step()
    assert p.dtype == dtype
    assert torch.equal(p.detach(), (W.double() - 3.0 / 300).to(dtype))
    p.grad = torch.full_like(p, 6e-8 if dtype == torch.float16 else 1e-12)
    p.data.copy_(W)
    SLO([p], lr=1.0, speed=3.0, eps=0.0, foreach=foreach).step()
    assert torch.equal(p.detach(), (W.double() - 3.0 / 300).to(dtype))


def test_norms_of_large_tensors_keep_their_digits() -> None:
    tensors = [torch.full((3000, 1000), 100.0), torch.randn(512, 64, 3, 3), torch.randn(7)]
    assert tensors[0].numel() > LARGE
    for foreach in (True, False):
        close(norms(tensors, foreach), [t.double().norm() for t in tensors], tol=1e-5)


@pytest.mark.parametrize("base", [None, MOMENTUM])
def test_foreach_is_the_loop(base: Any) -> None:
    a, b = small(dtype=torch.float32), small(dtype=torch.float32)
    train(a, SLO(a.parameters(), 0.1, weight_decay=0.1, base=base), 5)
    train(b, SLO(b.parameters(), 0.1, weight_decay=0.1, base=base, foreach=False), 5)
    same(a.parameters(), b.parameters())


def test_a_group_may_mix_precisions() -> None:
    p, q = nn.Parameter(torch.ones(3, dtype=torch.float64)), nn.Parameter(torch.ones(3))
    p.grad, q.grad = torch.ones(3, dtype=torch.float64), torch.ones(3)
    SLO([p, q], 0.1).step()
    close([p], [slo_step(torch.ones(3), torch.ones(3), 0.1)])
    close([q], [p], 1e-6)


@settings(max_examples=40, deadline=None)
@given(scale=st.floats(1e-6, 1e6), seed=st.integers(0, 99), speed=st.floats(0, 100))
def test_without_eps_the_size_of_a_gradient_does_not_matter(scale: float, seed: int, speed: float) -> None:
    found = []
    for factor in (1.0, scale):
        params = parameters()
        for p, g in zip(params, draw(seed), strict=True):
            p.grad = g * factor
        SLO(params, 0.1, speed, eps=0.0).step()
        found.append(params)
    close(*found, tol=1e-11)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 99), speed=st.floats(1e-3, 1e3), lr=st.floats(1e-4, 1.0))
def test_a_tensor_moves_by_its_speed(seed: int, speed: float, lr: float) -> None:
    params = parameters()
    give(params, seed)
    SLO(params, lr, speed, eps=0.0).step()
    for p, W in zip(params, draw(), strict=True):
        assert (p - W).norm().item() == pytest.approx(lr * speed, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 99), lr=st.floats(1e-3, 1.0))
def test_with_a_large_eps_it_is_gradient_descent(seed: int, lr: float) -> None:
    a, b = parameters(), parameters()
    give(a, seed)
    give(b, seed)
    SLO(a, lr, speed=1e12, eps=1e12).step()
    torch.optim.SGD(b, lr).step()
    close(a, b, tol=1e-10)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), eps=st.floats(0, 10))
def test_rotations_of_a_tensor_commute_with_a_step(seed: int, eps: float) -> None:
    Q = torch.linalg.qr(draw(seed, ((4, 4),))[0])[0]
    W, g = draw(seed + 1, ((4, 3), (4, 3)))
    p, q = nn.Parameter(W.clone()), nn.Parameter(Q @ W)
    p.grad, q.grad = g, Q @ g
    SLO([p], 0.1, eps=eps).step()
    SLO([q], 0.1, eps=eps).step()
    close([Q @ p], [q], tol=1e-10)


KNOBS: list[dict[str, Any]] = [{"lr": 0.2}, {"speed": 2.0}, {"eps": 0.3}, {"weight_decay": 0.1}, {"maximize": True},
                               {"base": ADAM}]


@pytest.mark.parametrize("knob", KNOBS, ids=lambda k: next(iter(k)))
def test_every_knob_does_something(knob: dict[str, Any]) -> None:
    a, b = small(), small()
    train(a, SLO(a.parameters(), **{"lr": 0.1}), 3)
    train(b, SLO(b.parameters(), **{"lr": 0.1, **knob}), 3)
    assert not torch.equal(a[0].weight, b[0].weight)
