"""Speed Limited Optimisation: its step against the definition, its laws, and that it is an optimiser like any other."""

from __future__ import annotations

import copy
import functools
import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import richter
from oracles import adam_direction, adaptive_speeds, momentum_direction, slo_step
from richter.controls import SLO, AdaptiveSLO, slo_groups
from richter.controls.slo import LARGE, norms
from richter.core import CaptureError, SelectionError
from richter.models import GPT, mlp
from richter.workflows.richness import nfc_by_layer

MOMENTUM = functools.partial(torch.optim.SGD, momentum=0.9)
ADAM = functools.partial(torch.optim.Adam, betas=(0.8, 0.9), eps=1e-3)
SHAPES = ((4, 3), (4,), (2, 3, 2), ())


def draw(seed: int = 0, shapes: tuple[tuple[int, ...], ...] = SHAPES, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def parameters(seed: int = 0, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[nn.Parameter]:
    return [nn.Parameter(t.to(device)) for t in draw(seed, dtype=dtype)]


def give(params: list[nn.Parameter], seed: int) -> list[Tensor]:
    gradients = draw(seed, dtype=params[0].dtype)
    for p, g in zip(params, gradients, strict=True):
        p.grad = g.to(p.device)
    return gradients


def close(found: Any, expected: Any, tol: float = 1e-12) -> None:
    for p, q in zip(found, expected, strict=True):
        torch.testing.assert_close(p.detach().cpu().double(), q.detach().cpu().double(), rtol=tol, atol=tol)


def same(found: Any, expected: Any) -> None:
    assert all(torch.equal(p, q) for p, q in zip(found, expected, strict=True))


def small(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return mlp([5, 6, 6, 3], seed=seed).to(dtype)


def batch(seed: int = 0, n: int = 24, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype), torch.arange(n) % 3


def train(model: nn.Module, optimiser: torch.optim.Optimizer, steps: int, begin: int = 0,
          each: Callable[[int], object] = lambda step: None) -> None:
    for step in range(begin, begin + steps):
        x, y = batch(step, dtype=next(model.parameters()).dtype)
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        each(step)
        optimiser.step()


# ------------------------------------------------------------------------------------------------ the step itself


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


# ------------------------------------------------------------------------------------------------ laws


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


# ------------------------------------------------------------------------------------------------ an optimiser like any other


def saved(optimiser: torch.optim.Optimizer) -> Any:
    """Through a file that may hold nothing but numbers."""
    file = io.BytesIO()
    torch.save(optimiser.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def richness_of(model: nn.Module) -> Callable[[], dict[str, float]]:
    """A stand-in for a measurement: it depends on the weights alone."""
    return lambda: {name: float(m.weight.detach().norm()) for name, m in model.named_modules() if isinstance(m, nn.Linear)}


MAKERS: dict[str, Callable[[nn.Module], SLO]] = {
    "slo": lambda m: SLO(slo_groups(m, {"0": 5.0}, default=0.5), 0.1, weight_decay=0.01),
    "momentum": lambda m: SLO(slo_groups(m, {"0": 5.0}, default=0.5), 0.1, base=MOMENTUM),
    "adam": lambda m: SLO(m.parameters(), 0.1, base=ADAM),
    "adaptive": lambda m: AdaptiveSLO(slo_groups(m), 0.1, richness_of(m), s=3.0, every=3),
    "adaptive momentum": lambda m: AdaptiveSLO(slo_groups(m), 0.1, richness_of(m), s=3.0, every=2, base=MOMENTUM),
}


@pytest.mark.parametrize("name", list(MAKERS))
def test_resuming_is_bit_identical(name: str) -> None:
    whole, first = small(), small()
    a, b = MAKERS[name](whole), MAKERS[name](first)
    train(whole, a, 10)
    train(first, b, 5)
    second = small(seed=9)
    second.load_state_dict(first.state_dict())
    c = MAKERS[name](second)
    c.load_state_dict(saved(b))
    train(second, c, 5, begin=5)
    same(whole.parameters(), second.parameters())
    assert [g["speed"] for g in a.param_groups] == [g["speed"] for g in c.param_groups]
    if isinstance(a, AdaptiveSLO) and isinstance(c, AdaptiveSLO):
        assert a.history == c.history
        assert len(a.history) == math.ceil(10 / a.every)
        assert a.steps == c.steps == 10


@pytest.mark.parametrize("name", list(MAKERS))
def test_a_deep_copy_goes_its_own_way(name: str) -> None:
    model = small()
    optimiser = MAKERS[name](model)
    train(model, optimiser, 4)
    other, copied = copy.deepcopy((model, optimiser))
    before = copy.deepcopy(model.state_dict())
    train(other, copied, 4, begin=4)
    same(model.state_dict().values(), before.values())
    if not isinstance(optimiser, AdaptiveSLO):  # whose copy asks the same richness
        train(model, optimiser, 4, begin=4)
        same(model.parameters(), other.parameters())


def test_a_state_needs_the_same_base() -> None:
    p = parameters()
    with pytest.raises(SelectionError, match="the state has not a base optimiser, and one was given here"):
        SLO(p, 0.1, base=ADAM).load_state_dict(SLO(p, 0.1).state_dict())
    with pytest.raises(SelectionError, match="the state has a base optimiser, and none was given here"):
        SLO(p, 0.1).load_state_dict(SLO(p, 0.1, base=ADAM).state_dict())


def test_a_group_added_later_is_trained() -> None:
    for base in (None, MOMENTUM):
        params = parameters()
        optimiser = SLO(params[:2], 0.1, base=base)
        give(params, 1)
        optimiser.step()
        optimiser.add_param_group({"params": params[2:], "speed": 7.0})
        g = give(params, 2)
        optimiser.step()
        close([params[2]], [slo_step(draw()[2], g[2], 0.1, 7.0)])


@pytest.mark.parametrize("base", [None, MOMENTUM])
def test_schedulers_set_the_rate(base: Any) -> None:
    model = small()
    optimiser = SLO(model.parameters(), 0.1, eps=0.0, base=base)
    scheduler = torch.optim.lr_scheduler.StepLR(optimiser, step_size=1, gamma=0.5)
    for step in range(4):
        before = model[0].weight.detach().clone()
        train(model, optimiser, 1, begin=step)
        scheduler.step()
        assert (model[0].weight - before).norm().item() == pytest.approx(0.1 * 0.5 ** step, rel=1e-9)


def test_the_rate_may_be_a_tensor() -> None:
    a, b = small(), small()
    lr = torch.tensor(0.1, dtype=torch.float64)
    train(a, SLO(a.parameters(), lr, weight_decay=0.1), 3)
    train(b, SLO(b.parameters(), 0.1, weight_decay=0.1), 3)
    close(a.parameters(), b.parameters())


@pytest.mark.parametrize("base", [None, MOMENTUM])
def test_a_gradient_scaler_changes_nothing_but_skips_what_overflows(base: Any) -> None:
    a, b = small(dtype=torch.float32), small(dtype=torch.float32)
    plain, scaled = SLO(a.parameters(), 0.1, base=base), SLO(b.parameters(), 0.1, base=base)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    train(a, plain, 3)
    for step in range(3):
        x, y = batch(step, dtype=torch.float32)
        scaled.zero_grad()
        scaler.scale(F.cross_entropy(b(x), y)).backward()
        scaler.step(scaled)
        scaler.update()
    close(a.parameters(), b.parameters(), 1e-6)
    before = [p.detach().clone() for p in b.parameters()]
    scaled.zero_grad()
    scaler.scale(b(batch()[0].float()).sum() * math.inf).backward()
    scaler.step(scaled)
    same(b.parameters(), before)


def test_step_hooks_run_once() -> None:
    model = small()
    for optimiser in (SLO(model.parameters(), 0.1), AdaptiveSLO(slo_groups(model), 0.1, richness_of(model))):
        calls: list[int] = []
        optimiser.register_step_post_hook(lambda *args: calls.append(1))  # noqa: B023
        train(model, optimiser, 2)
        assert len(calls) == 2


def test_a_step_can_be_compiled() -> None:
    a, b = small(), small()
    eager, compiled = SLO(a.parameters(), 0.1, weight_decay=0.1), SLO(b.parameters(), 0.1, weight_decay=0.1)
    step = torch.compile(compiled.step, backend="eager", fullgraph=True)
    for k in range(2):
        for model in (a, b):
            x, y = batch(k)
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
        eager.step()
        step()
    close(a.parameters(), b.parameters())


def test_training_twice_gives_the_same_bits() -> None:
    a, b = small(), small()
    train(a, SLO(a.parameters(), 0.1), 5)
    train(b, SLO(b.parameters(), 0.1), 5)
    same(a.parameters(), b.parameters())


@pytest.mark.parametrize("name", list(MAKERS))
def test_an_observer_changes_no_bit(name: str) -> None:
    a, b = small(dtype=torch.float32), small(dtype=torch.float32)
    watch = richter.Observer(a, richter.Probe(*batch(7, 16, torch.float32)), when=1, measures=["nfc"], budget=None)
    train(a, MAKERS[name](a), 4, each=lambda step: watch(step))
    train(b, MAKERS[name](b), 4)
    same(a.parameters(), b.parameters())
    assert len(watch.snapshots) == 4


# ------------------------------------------------------------------------------------------------ speeds by layer


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.read = nn.Embedding(5, 4)
        self.block = nn.ModuleDict({"norm": nn.LayerNorm(4), "fc": nn.Linear(4, 4)})
        self.write = nn.Linear(4, 5)
        self.write.weight = self.read.weight


def speeds_of(groups: list[dict[str, Any]]) -> dict[str, float]:
    return {g["layer"]: g["speed"] for g in groups}


def test_groups_are_modules_with_weight_and_bias_and_shared_ones_once() -> None:
    model = Tied()
    groups = slo_groups(model)
    assert {g["layer"]: len(g["params"]) for g in groups} == {"": 1, "read": 1, "block.norm": 2, "block.fc": 2, "write": 1}
    assert {id(p) for g in groups for p in g["params"]} == {id(p) for p in model.parameters()}
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    SLO(groups, 0.1)


def test_speeds_by_name_pattern_and_part() -> None:
    model = Tied()
    everything = {"": 1.0, "read": 1.0, "block.norm": 1.0, "block.fc": 1.0, "write": 1.0}
    assert speeds_of(slo_groups(model)) == everything
    assert speeds_of(slo_groups(model, default=3.0)) == dict.fromkeys(everything, 3.0)
    assert speeds_of(slo_groups(model, {"block": 2.0})) == {**everything, "block.norm": 2.0, "block.fc": 2.0}
    assert speeds_of(slo_groups(model, {"block.*": 2.0, "*.fc": 4.0})) == {**everything, "block.norm": 2.0, "block.fc": 4.0}
    assert speeds_of(slo_groups(model, {"block.fc": 9.0, "*": 0.5})) == {**dict.fromkeys(everything, 0.5), "block.fc": 9.0}


def test_wrapped_models_have_the_inner_names() -> None:
    model = small()
    for wrapped in (nn.DataParallel(model), torch.compile(model)):
        assert speeds_of(slo_groups(wrapped, {"2": 2.0})) == {"0": 1.0, "2": 2.0, "4": 1.0}  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ adaptive


def test_the_chosen_layers_are_those_of_the_rule() -> None:
    model = mlp([4, 5, 5, 5, 2], seed=0).double()
    layers = ["0", "2", "4", "6"]
    script = [{"0": 0.5, "2": 0.4, "4": 0.3}, {"0": 0.6, "2": 0.7, "4": 0.5}, {"0": 0.1, "2": 0.7, "4": 0.9},
              {"0": 0.3, "2": 0.2, "4": 0.9}, {"0": 0.3, "2": 0.3, "4": math.nan}]
    answers = iter(script)
    optimiser = AdaptiveSLO(slo_groups(model), 0.05, lambda: next(answers), s=20.0)
    for values in script:
        before = {k: model.get_submodule(k).weight.detach().clone() for k in layers}
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimiser.step()
        expected = adaptive_speeds(values, layers, 20.0)
        assert speeds_of(optimiser.param_groups) == expected
        close([model.get_submodule(k).weight for k in layers],
              [slo_step(before[k], torch.ones_like(before[k]), 0.05, expected[k], 0.01) for k in layers])
    assert [int(layer) // 2 for _, layer in optimiser.history] == [2, 2, 0, 1, 0]  # type: ignore[arg-type]
    assert [step for step, _ in optimiser.history] == [0, 1, 2, 3, 4]


@settings(max_examples=30, deadline=None)
@given(values=st.lists(st.sampled_from([0.0, 0.2, 0.2, 0.5, 1.0, math.nan]), min_size=4, max_size=4), s=st.floats(1, 100))
def test_any_values_choose_as_the_oracle(values: list[float], s: float) -> None:
    model, layers = mlp([2, 2, 2, 2, 2], seed=0), ["0", "2", "4", "6"]
    mapping = dict(zip(layers, values, strict=True))
    optimiser = AdaptiveSLO(slo_groups(model), 0.1, lambda: mapping, s=s)
    optimiser.step()
    assert speeds_of(optimiser.param_groups) == adaptive_speeds(mapping, layers, s)
    assert (optimiser.history[0][1] is None) == all(map(math.isnan, values))


def test_cadence_exclusion_and_speed_do_something() -> None:
    def run(**options: Any) -> AdaptiveSLO:
        model = small()
        optimiser = AdaptiveSLO(slo_groups(model), 0.1, richness_of(model), **options)
        train(model, optimiser, 6)
        return optimiser

    assert [step for step, _ in run(every=4).history] == [0, 4]
    (first,) = {layer for _, layer in run(every=6).history}
    assert first is not None
    assert first not in {layer for _, layer in run(exclude=first).history}
    assert run(exclude=["0", "2", "4"], every=6).history == [(0, None)]
    assert max(g["speed"] for g in run(s=7.0).param_groups) == 7.0
    assert max(g["speed"] for g in run().param_groups) == 20.0


def test_nothing_that_can_be_chosen_keeps_the_speeds() -> None:
    model = small()
    answers = iter([{"0": 0.1, "2": 0.2}, {"0": math.nan, "2": math.nan}])
    optimiser = AdaptiveSLO(slo_groups(model), 0.1, lambda: next(answers))
    optimiser.step()
    before = speeds_of(optimiser.param_groups)
    optimiser.step()
    assert speeds_of(optimiser.param_groups) == before
    assert optimiser.history == [(0, "0"), (1, None)]


def test_a_map_of_a_fused_layer_stands_for_its_module() -> None:
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(4, 2), "fc": nn.Linear(4, 4)})
    optimiser = AdaptiveSLO(slo_groups(model), 0.1, lambda: {"attn.q": 0.1, "attn.out_proj": 0.5, "fc": 0.3}, s=2.0)
    optimiser.step()
    assert speeds_of(optimiser.param_groups) == {"attn": 2.0, "attn.out_proj": 0.5, "fc": 0.5}


def test_a_layer_added_later_is_slow_until_it_is_chosen() -> None:
    model, extra = small(), nn.Linear(3, 3)
    optimiser = AdaptiveSLO(slo_groups(model), 0.1, lambda: {"0": 0.1}, every=10)
    optimiser.step()
    optimiser.add_param_group({"params": extra.parameters(), "layer": "extra"})
    assert speeds_of(optimiser.param_groups)["extra"] == 1 / 20


def test_a_measurement_that_fails_leaves_the_optimiser_as_it_was() -> None:
    model = small()
    optimiser = AdaptiveSLO(slo_groups(model), 0.1, lambda: {}[0])
    with pytest.raises(KeyError):
        optimiser.step()
    assert (optimiser.steps, optimiser.history) == (0, [])


# ------------------------------------------------------------------------------------------------ nfc as richness


def measured(model: nn.Module, probe: richter.Probe, **options: Any) -> dict[str, float]:
    snap = richter.measure(model, probe, ["nfc"], **options)
    return {r.layer: r.value for r in snap.rows if not r.note.startswith("trivial")}


class Net(nn.Module):
    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3)
        self.deep = nn.Conv2d(6, 4, 3, groups=groups)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.deep(self.conv(x).relu())).relu()).flatten(1))


def cases() -> dict[str, tuple[nn.Module, richter.Probe, dict[str, Any]]]:
    torch.manual_seed(0)
    x, y = batch()
    images, ids = torch.randn(10, 2, 6, 6).double(), torch.randint(0, 7, (6, 5))
    return {
        "mlp": (small(), richter.Probe(x, y, chunk=7), {}),
        "wide": (mlp([5, 4, 40, 3], seed=1).double(), richter.Probe(x, y), {}),
        "layers": (small(), richter.Probe(x, y), {"layers": ["2"]}),
        "output": (small(), richter.Probe(x, None), {"output": lambda out: out[:, :2]}),
        "conv": (Net().double(), richter.Probe(images, torch.arange(10) % 3), {}),
        "grouped": (Net(2).double(), richter.Probe(images, torch.arange(10) % 3), {}),
        "gpt": (GPT(7, 5, d=8, depth=1, heads=2).double(), richter.Probe(ids, ids.roll(-1, 1)), {}),
        "mask": (GPT(7, 5, d=8, depth=1, heads=2).double(), richter.Probe(ids, ids, mask=ids < 6), {}),
    }


@pytest.mark.parametrize("name", list(cases()))
def test_nfc_by_layer_is_what_measure_says(name: str) -> None:
    model, probe, options = cases()[name]
    rich = nfc_by_layer(model, probe, **options)
    for seed in range(3):  # the first call is the long way
        expected = measured(model, probe, **options)
        found = rich()
        assert list(found) == list(expected)
        assert len(found) > 0
        assert found == pytest.approx(expected, rel=1e-9, nan_ok=True)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    assert all(m.training for m in model.modules())


def test_nfc_by_layer_leaves_out_the_read_out_and_notices_new_modules() -> None:
    model, probe = small(), richter.Probe(*batch())
    rich = nfc_by_layer(model, probe)
    assert list(rich()) == list(rich()) == ["0", "2"]
    model.append(nn.Linear(3, 3).double())
    assert list(rich()) == ["0", "2", "4"]
    assert rich() == pytest.approx(measured(model, probe), rel=1e-9)


def test_small_memory_changes_no_number() -> None:
    model, probe = small(), richter.Probe(*batch())
    rich, tight = nfc_by_layer(model, probe), nfc_by_layer(model, probe, memory="64KiB")
    rich(), tight()
    assert tight() == pytest.approx(rich(), rel=1e-10)


def test_adaptive_slo_with_a_real_measurement() -> None:
    model = small()
    rich = nfc_by_layer(model, richter.Probe(*batch(7)))
    optimiser = AdaptiveSLO(slo_groups(model), 0.05, rich, every=2)
    seen = []

    def each(step: int) -> None:
        if step % 2 == 0:
            values = measured(model, richter.Probe(*batch(7)))
            seen.append((step, min(values, key=values.__getitem__)))

    train(model, optimiser, 8, each=each)
    assert optimiser.history == seen


# ------------------------------------------------------------------------------------------------ bad input


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: SLO(parameters(), lr=-0.1), r"SLO: lr is -0.1: a finite number from 0 on is needed"),
    (lambda: SLO(parameters(), lr=0.1, speed=-1.0), "SLO: speed is -1.0"),
    (lambda: SLO(parameters(), lr=0.1, eps=-1e-3), "SLO: eps is -0.001"),
    (lambda: SLO(parameters(), lr=0.1, weight_decay=-1), "SLO: weight_decay is -1"),
    (lambda: SLO(parameters(), lr=math.nan), "SLO: lr is nan"),
    (lambda: SLO(parameters(), lr="fast"), "SLO: lr is 'fast'"),  # type: ignore[arg-type]
    (lambda: SLO([{"params": parameters(), "speed": math.inf}], lr=0.1), "SLO: speed is inf"),
    (lambda: SLO([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], lr=0.1), "complex dtype torch.complex64"),
    (lambda: SLO(parameters(), 0.1, base=torch.optim.SGD(parameters(), 0.1)), "give what makes an optimiser"),  # type: ignore[arg-type]
    (lambda: SLO(parameters(), 0.1, base="adam"), "give what makes an optimiser"),  # type: ignore[arg-type]
    (lambda: SLO(parameters(), 0.1, base=functools.partial(torch.optim.Adam, lr=0.1)), "sets lr=0.1, which would do nothing"),
    (lambda: SLO(parameters(), 0.1, base=torch.optim.AdamW), "base=AdamW looks at the weights"),
    (lambda: SLO(parameters(), 0.1, base=functools.partial(torch.optim.SGD, weight_decay=0.1)), "base=SGD looks at the weights"),
    (lambda: SLO(parameters(), 0.1, base=torch.optim.Adafactor), "base=Adafactor looks at the weights"),
    (lambda: SLO(parameters(), 0.1, base=torch.optim.LBFGS), "base=LBFGS could not take a step"),
    (lambda: slo_groups(small(), {"1": 2.0}), "the model has no layer '1'.*It has: '0', '2', '4'"),
    (lambda: slo_groups(small(), {"enc.*": 2.0}), r"the model has no layer 'enc\.\*'"),
    (lambda: slo_groups(small(), {"0": -2.0}), "the speed of '0' is -2.0"),
    (lambda: slo_groups(small(), default=math.nan), "the speed of 'default' is nan"),
    (lambda: slo_groups(small(), [1.0]), "a mapping from layers to speeds"),  # type: ignore[arg-type]
    (lambda: slo_groups(nn.ReLU()), "has no parameters"),
    (lambda: slo_groups([1]), "the model is a list"),  # type: ignore[arg-type]
    (lambda: AdaptiveSLO(slo_groups(small()), 0.1, {"0": 1.0}), "richness=.*a function is needed"),  # type: ignore[arg-type]
    (lambda: AdaptiveSLO(slo_groups(small()), 0.1, dict, s=0.5), "s=0.5"),
    (lambda: AdaptiveSLO(slo_groups(small()), 0.1, dict, every=0), "every=0: a positive number of steps"),
    (lambda: AdaptiveSLO(slo_groups(small()), 0.1, dict, every=1.5), "every=1.5"),  # type: ignore[arg-type]
    (lambda: AdaptiveSLO(parameters(), 0.1, dict), "does not say which layer it is"),  # type: ignore[arg-type]
    (lambda: AdaptiveSLO(slo_groups(small(), {"0": 2.0}), 0.1, dict), "layer '0' has speed=2.0, which would do nothing"),
    (lambda: AdaptiveSLO(slo_groups(small()), 0.1, dict).step(), r"richness\(\) returned \{\}"),
    (lambda: AdaptiveSLO(slo_groups(small()), 0.1, lambda: {"fc": 1.0}).step(), "the optimiser has no layer 'fc'"),
    (lambda: AdaptiveSLO(slo_groups(small()), 0.1, dict).load_state_dict(SLO(small().parameters(), 0.1).state_dict()),
     "not the state of an AdaptiveSLO"),
]


@pytest.mark.parametrize(("act", "sentence"), REFUSED, ids=[s[:30] for _, s in REFUSED])
def test_bad_input_is_refused_in_words(act: Callable[[], object], sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        act()


def test_a_refused_group_is_not_added() -> None:
    params = parameters()
    optimiser = SLO(params[:1], 0.1, base=MOMENTUM)
    with pytest.raises(SelectionError, match="speed is -1"):
        optimiser.add_param_group({"params": params[1:], "speed": -1.0})
    assert len(optimiser.param_groups) == 1
    optimiser.add_param_group({"params": params[1:]})


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(CaptureError, match=r"a gradient is sparse.*sparse=False"):
        SLO(table.parameters(), 0.1).step()


def test_the_examples_of_the_document_run() -> None:
    text = (Path(__file__).parent.parent / "docs/controls.md").read_text()
    fixed, adaptive = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(fixed.replace("range(600)", "range(10)"), names)
    assert [g["speed"] for g in names["optimiser"].param_groups] == [500.0, 0.002, 0.002]
    exec(adaptive.replace("range(500)", "range(11)"), names)
    assert str(names["optimiser"].history[:3]) in text
