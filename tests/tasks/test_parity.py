"""Multitask sparse parity by its definition: rows of Table 4.2, frequencies, skills and their strengths, what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import install_import_hook
from torch import Tensor, nn

from richter.core import SelectionError
from richter.models import mlp

with install_import_hook(["richter.tasks.parity"], "checker.typechecked"):
    from richter.tasks import parity
    from richter.tasks.parity import MultitaskParity, multitask_parity


def skill_value(task: MultitaskParity, row: list[float], k: int) -> int:
    """g_k of one input, k from 1 on, by Eq. 4.2."""
    control, bits = row[:task.skills], row[task.skills:]
    if control[k - 1] != 1:
        return 0
    return int((-1) ** sum(bits[i] for i in task.positions[k - 1].tolist()))


def strength_by_definition(task: MultitaskParity, model: Any, k: int) -> tuple[float, float]:
    """(R_k, L_k): the mean over every input of skill k, one after the other."""
    control = [float(i == k - 1) for i in range(task.skills)]
    total, loss, inputs = 0.0, 0.0, list(itertools.product((0.0, 1.0), repeat=task.bits))
    for bits in inputs:
        row = [*control, *bits]
        f, g = model(torch.tensor([row], dtype=task.dtype)).item(), skill_value(task, row, k)
        total, loss = total + f * g, loss + (f - task.target * g) ** 2 / 2
    return total / len(inputs), loss / len(inputs)


@pytest.mark.parametrize("exclusive", [True, False])
def test_examples_by_their_definition(exclusive: bool) -> None:
    task = multitask_parity(4, 12, 3, 0.6, seed=1, target=2.5, exclusive=exclusive, dtype=torch.float64)
    data = task.sample(300, seed=2)
    assert data.x.shape == (300, 16)
    assert set(data.x.flatten().tolist()) == {0, 1}
    functions = task.functions(data.x)
    columns = data.x.tolist(), data.y[:, 0].tolist(), data.skill.tolist(), functions.tolist()
    for row, y, skill, values in zip(*columns, strict=True):
        assert row[:4] == [float(i == skill) for i in range(4)]
        expected = [skill_value(task, row, k) for k in (1, 2, 3, 4)]
        assert values == expected
        assert y == 2.5 * sum(expected)
    for k in (1, 2, 3, 4):
        assert torch.equal(task.skill(k)(data.x), functions[:, k - 1])
    products = functions.T @ functions  # no two skills live on the same input
    assert torch.equal(products, torch.diag(task.counts(data.skill).double()))
    sets = [frozenset(row) for row in task.positions.tolist()]
    assert all(len(s) == 3 for s in sets)
    assert len(set(sets)) == 4
    assert (len(frozenset().union(*sets)) == 12) == exclusive


def test_frequencies_and_bits_are_those_of_the_law() -> None:
    task = multitask_parity(5, 37, 3, 0.6)
    expected = np.arange(1, 6) ** -1.6 / (np.arange(1, 6) ** -1.6).sum()
    np.testing.assert_allclose(task.frequencies, expected, rtol=1e-12)
    n = 200_000
    data = task.sample(n, seed=3)
    counts = task.counts(data.skill).numpy()
    assert np.abs((counts - n * expected) / np.sqrt(n * expected * (1 - expected))).max() < 4
    bits = data.x[:, 5:].double()
    assert abs(bits.mean(0) - 0.5).max() < 4.5 * 0.5 / n**0.5
    covariance = torch.cov(bits.T) - 0.25 * torch.eye(37)
    assert covariance.abs().max() < 5 * 0.25 / n**0.5  # bits of one byte are independent, and bytes are
    by_skill = torch.stack([bits[data.skill == k].mean(0) for k in range(5)])
    assert abs(by_skill - 0.5).max() < 5 * 0.5 / counts.min() ** 0.5


def test_streams_and_samples_have_seeds() -> None:
    task = multitask_parity(3, 16)
    first, second = itertools.islice(task.stream(20, seed=1), 2)
    assert not torch.equal(first.x, second.x)
    assert torch.equal(next(task.stream(20, seed=1)).x, first.x)
    assert not torch.equal(next(task.stream(20, seed=2)).x, first.x)
    assert torch.equal(task.sample(20, 1).x, task.sample(20, 1).x)
    assert not torch.equal(task.sample(20, 1).x, first.x)
    assert not torch.equal(multitask_parity(3, 16, seed=1).positions, task.positions)
    before = torch.random.get_rng_state()
    task.skill_strength(mlp([19, 4, 1], seed=0), n=100)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_skill_strength_is_the_mean_over_every_input() -> None:
    task = multitask_parity(2, 6, 3, dtype=torch.float64)
    model = mlp([8, 16, 1], seed=0).double()
    out = task.skill_strength(model)
    for k in (1, 2):
        R, loss = strength_by_definition(task, model, k)
        assert abs(out.strength[k - 1].item() - R) < 1e-12
        assert abs(out.loss[k - 1].item() - loss) < 1e-12
    assert torch.equal(out.error, torch.zeros(2, dtype=torch.float64))


def test_of_many_bits_it_is_within_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    task = multitask_parity(3, 12, 3, dtype=torch.float64)
    model = mlp([15, 40, 1], scale=3.0, seed=1).double()
    exact = task.skill_strength(model).strength
    monkeypatch.setattr(parity, "EXACT_BITS", 4)
    scores = []
    for seed in range(20):
        drawn = task.skill_strength(model, n=256, seed=seed)
        assert (drawn.error > 0).all()
        scores.append((drawn.strength - exact) / drawn.error)
    z = torch.cat(scores)
    assert 0.7 < z.std() < 1.4
    assert abs(z.mean()) < 0.4


def test_known_functions_have_known_strengths() -> None:
    task = multitask_parity(4, 32, 3, target=5.0)
    full = task.skill_strength(lambda x: 5.0 * task.functions(x).sum(1), n=64)
    torch.testing.assert_close(full.strength, torch.full((4,), 5.0, dtype=torch.float64))
    torch.testing.assert_close(full.loss, torch.zeros(4, dtype=torch.float64))
    one = task.skill_strength(lambda x: 2.0 * task.skill(3)(x) + 7 * x[:, 5:6].sum(1), n=400)
    torch.testing.assert_close(one.strength, torch.tensor([0.0, 0, 2, 0], dtype=torch.float64))  # fewer bits cancel
    R, norm = one.strength[2].item(), 4 + 2 * 2.0 * 7 * 0 + 49 / 2
    assert abs(one.loss[2].item() - (25 + norm - 10 * R) / 2) < 0.6  # Eq. 4.8


def test_a_network_learns_the_frequent_skill_first() -> None:
    task = multitask_parity(2, 8, 2, alpha=1.5, seed=0, target=1.0)
    model = mlp([10, 64, 1], seed=0)
    optimiser = torch.optim.SGD(model.parameters(), 0.2)
    for x, y, _ in itertools.islice(task.stream(128), 400):
        loss = (model(x) - y).square().mean() / 2
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    R = task.skill_strength(model).strength
    assert R[0] > 0.9
    assert R[1] < 0.5


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :2]


@pytest.mark.parametrize(("change", "sentence"), [
    ({"skills": 11}, "32 bits have room for 10 skills of 3 bits that share none. Take 33 bits, or exclusive=False"),
    ({"skills": 11, "bits": 5, "exclusive": False}, "room for 10 skills of 3 bits that are not the same. Take more bits"),
    ({"relevant": 33}, "no more relevant bits than bits"),
    ({"skills": 0}, "a skill, a bit and a relevant bit at least are needed"),
    ({"seed": -1}, "a seed from 0 on"),
    ({"alpha": 0.0}, "a law of scaling needs alpha above 0"),
    ({"alpha": float("nan")}, "a law of scaling needs alpha above 0"),
    ({"target": -1.0}, "S or -S with S above 0"),
])
def test_what_is_no_task_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        multitask_parity(**change)


def test_what_cannot_be_asked_is_refused() -> None:
    task = multitask_parity()
    with pytest.raises(SelectionError, match="skill 6: they are counted from 1 to 5"):
        task.skill(6)
    with pytest.raises(SelectionError, match="a batch of 0 examples"):
        next(task.stream(0))
    with pytest.raises(SelectionError, match="seed=-1"):
        task.sample(5, -1)
    with pytest.raises(SelectionError, match="n=16 inputs at least are needed for an error"):
        task.skill_strength(mlp([37, 2, 1], seed=0), n=8)
    with pytest.raises(SelectionError, match="one output for each input"):
        task.skill_strength(Twice(), n=100)


@pytest.mark.parametrize(("skills", "bits"), [(10, 5), (9, 20)])
def test_as_many_skills_as_bits_allow(skills: int, bits: int) -> None:
    task = multitask_parity(skills, bits, 3, exclusive=False)
    assert len({tuple(row) for row in task.positions.tolist()}) == skills


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_another_device() -> None:
    task = multitask_parity().to("cuda")
    x, y, _ = next(task.stream(100))
    assert x.is_cuda
    assert torch.equal(y[:, 0], 5 * task.functions(x).sum(1))
    assert task.skill_strength(mlp([37, 8, 1], seed=0).cuda(), n=64).strength.is_cuda


def test_a_model_is_asked_as_it_answers_and_left_as_it_was() -> None:
    """No dropout is drawn, no batch is counted; a model of double precision is asked in its own."""
    torch.manual_seed(0)
    task = multitask_parity(2, 8)
    model = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 1)).double()
    model[3].eval()
    before, modes = {k: v.clone() for k, v in model.state_dict().items()}, [m.training for m in model.modules()]
    stream = torch.get_rng_state()
    first, second = task.skill_strength(model), task.skill_strength(model)
    assert torch.equal(first.strength, second.strength)
    assert torch.equal(torch.get_rng_state(), stream)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(first.strength, task.skill_strength(model.eval()).strength)


@pytest.mark.parametrize("make", [lambda: multitask_parity(2.5), lambda: multitask_parity(2, bits=8.0),
                                  lambda: multitask_parity(2, 8).sample(2.5)])
def test_numbers_that_are_not_whole(make: Callable[[], object]) -> None:
    with pytest.raises(SelectionError, match="whole number"):
        make()
