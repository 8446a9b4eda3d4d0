"""Speed Limited Optimisation is an optimiser like any other: states, schedulers, scalers, hooks, observers."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import richter
from descents import ADAM, MOMENTUM, batch, close, draw, give, parameters, richness_of, same, small, train
from oracles import slo_step
from richter.controls import SLO, AdaptiveSLO, slo_groups
from richter.core import SelectionError


def saved(optimiser: torch.optim.Optimizer) -> Any:
    """Through a file that may hold nothing but numbers."""
    file = io.BytesIO()
    torch.save(optimiser.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


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
