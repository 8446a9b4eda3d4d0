"""Tasks that are made, against their definitions."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import oracles
from richter import tasks
from richter.core import SelectionError
from richter.tasks import synthetic


@pytest.mark.parametrize("r", [3, 4, 5, 6, 7, 8, 12])
def test_chain_monomial_by_its_definition(r: int) -> None:
    data = tasks.chain_monomial(20, 14, r, seed=1, n_test=7, dtype=torch.float64)
    torch.testing.assert_close(data.y[:, 0], oracles.chain_monomial(data.x, r))
    torch.testing.assert_close(data.y_test[:, 0], oracles.chain_monomial(data.x_test, r))
    assert data.egop.tolist() == oracles.chain_egop(14, r)
    assert int(torch.linalg.matrix_rank(data.egop)) == (r - 2 if r % 4 == 0 else r)
    off = data.egop[:r, :r][~torch.eye(r, dtype=torch.bool)]
    assert set(off.tolist()) == ({0, 2} if r == 4 else {1} if r == 3 else {0, 1})
    scaled = tasks.chain_monomial(20, 14, r, seed=1, n_test=7, standardise=True, dtype=torch.float64)
    torch.testing.assert_close(scaled.egop * r, data.egop)
    torch.testing.assert_close(scaled.y * r**0.5, data.y)


@pytest.mark.parametrize("r", [4, 5])
def test_chain_egop_by_sampling(r: int) -> None:
    data = tasks.chain_monomial(40_000, 7, r, standardise=True, dtype=torch.float64)
    x = data.x.clone().requires_grad_()
    gradients, = torch.autograd.grad(synthetic.chain(x, r).sum() / r**0.5, x)
    torch.testing.assert_close(gradients.T @ gradients / len(x), data.egop, atol=0.03, rtol=0)
    assert abs(data.y.var().item() - 1) < 0.05


def test_chain_monomial_settings() -> None:
    data = tasks.chain_monomial(5, 6, 3, seed=0, n_test=4)
    assert data.x.dtype == torch.float32
    assert torch.equal(data.x_test, tasks.chain_monomial(9, 6, 3, seed=0, n_test=4).x_test)
    assert not torch.equal(data.x, tasks.chain_monomial(5, 6, 3, seed=1).x)
    assert not torch.equal(data.x[:4], data.x_test)
    for wrong in ((5, 6, 2), (5, 6, 7), (0, 6, 3), (5, 6, 3, -1)):
        with pytest.raises(SelectionError, match="3 <= rank <= d"):
            tasks.chain_monomial(*wrong)


def test_heaviside_by_its_definition() -> None:
    data = tasks.heaviside(2000, seed=3, n_test=500)
    for x, y in ((data.x, data.y), (data.x_test, data.y_test)):
        assert y.tolist() == [[1.0 if value > 0 else 0.0] for (value,) in x.tolist()]
        assert -1 <= x.min() < -0.9
        assert 0.9 < x.max() <= 1
    assert abs(data.x.mean()) < 0.05
    assert abs(data.x.square().mean() - 1 / 3) < 0.03
    assert torch.equal(data.x_test, tasks.heaviside(5, seed=3, n_test=500).x_test)
    assert not torch.equal(data.x, tasks.heaviside(2000, seed=4).x)
    assert tasks.heaviside(5, dtype=torch.float64).y.dtype == torch.float64
    for wrong in ({"n": 0}, {"n_test": 0}, {"seed": -1}):
        with pytest.raises(SelectionError, match="one example at least is needed"):
            tasks.heaviside(**wrong)


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_sparse_parity_by_its_definition(k: int) -> None:
    data = tasks.sparse_parity(50, 6, k, seed=1, n_test=30, dtype=torch.float64)
    assert len(set(data.support)) == k
    for x, y in ((data.x, data.y), (data.x_test, data.y_test)):
        assert set(x.flatten().tolist()) == {-1, 1}
        for row, label in zip(x.tolist(), y[:, 0].tolist(), strict=True):
            assert label == (-1) ** sum(row[i] == -1 for i in data.support)
    corners = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=6)), dtype=torch.float64).requires_grad_()
    gradients, = torch.autograd.grad(corners[:, list(data.support)].prod(1).sum(), corners)
    assert torch.equal(gradients.T @ gradients / 64, data.egop)


def test_sparse_parity_settings() -> None:
    make = functools.partial(tasks.sparse_parity, 2000, 20, 3)
    data = make()
    assert (data.x.shape, data.y.shape, data.x_test.shape, data.x.dtype) == ((2000, 20), (2000, 1), (1000, 20), torch.float32)
    assert torch.equal(data.x, make().x)
    assert abs(data.x.mean()) < 0.02  # 4 standard errors
    assert abs(data.y.mean()) < 0.09
    other = tasks.sparse_parity(5, 20, 3, n_test=1000)
    assert torch.equal(other.x_test, data.x_test)
    assert other.support == data.support
    assert not torch.equal(data.x[:1000], data.x_test)
    assert not torch.equal(data.x, make(seed=1).x)
    assert len({make(seed=s).support for s in range(10)}) > 5
    chosen = make(support=[7, 2, 19])
    assert chosen.support == (2, 7, 19)
    assert torch.equal(chosen.x, data.x)
    assert torch.equal(chosen.y[:, 0], data.x[:, 2] * data.x[:, 7] * data.x[:, 19])
    for wrong in ((5, 6, 0), (5, 6, 7), (0, 6, 3), (5, 6, 3, -1)):
        with pytest.raises(SelectionError, match=r"1 <= k <= d is needed"):
            tasks.sparse_parity(*wrong)
    for support in ([1, 2], [1, 2, 2], [1, 2, 20], [-1, 2, 3]):
        with pytest.raises(SelectionError, match=r"k different coordinates, from 0 to d - 1"):
            make(support=support)


@pytest.mark.parametrize(("operation", "f"), [("add", lambda a, b: a + b), ("subtract", lambda a, b: a - b),
                                              ("multiply", lambda a, b: a * b)])
def test_modular_arithmetic_by_its_definition(operation: Any, f: Callable[[int, int], int]) -> None:
    data = tasks.modular_arithmetic(7, operation=operation, share=0.6)
    assert (len(data.x), len(data.x_test)) == (29, 20)
    seen = []
    for x, y, labels in ((data.x, data.y, data.labels), (data.x_test, data.y_test, data.labels_test)):
        assert x.shape[1:] == (14,)
        for row, target, label in zip(x.tolist(), y.tolist(), labels.tolist(), strict=True):
            a, b = row[:7].index(1), row[7:].index(1)
            assert (sum(row), sum(target), target[label]) == (2, 1, 1)
            assert label == f(a, b) % 7
            seen.append((a, b))
    assert sorted(seen) == list(itertools.product(range(7), repeat=2))


def test_modular_arithmetic_settings() -> None:
    data = tasks.modular_arithmetic(11)
    assert (data.x.dtype, data.labels.dtype, len(data.x)) == (torch.float32, torch.int64, 60)
    assert torch.equal(data.x, tasks.modular_arithmetic(11).x)
    assert not torch.equal(data.x, tasks.modular_arithmetic(11, seed=1).x)
    assert tasks.modular_arithmetic(11, dtype=torch.float64).y.dtype == torch.float64
    assert set(data.x[:, :11].argmax(1).tolist()) == set(range(11))  # not the first rows of the table
    for wrong in ({"p": 1}, {"share": 0.0}, {"share": 1.0}, {"share": float("nan")}, {"seed": -1}):
        with pytest.raises(SelectionError, match="both parts need a pair"):
            tasks.modular_arithmetic(**{"p": 5} | wrong)
    with pytest.raises(SelectionError, match=r"no operation 'power'.*'add', 'subtract', 'multiply', 'divide'"):
        tasks.modular_arithmetic(5, operation="power")  # type: ignore[arg-type]


@pytest.mark.parametrize("p", [2, 3, 7, 23])
def test_division_undoes_multiplication(p: int) -> None:
    data = tasks.modular_arithmetic(p, operation="divide", share=0.6)
    rows = [(a, b, c) for x, labels in ((data.tokens, data.labels), (data.tokens_test, data.labels_test))
            for (a, o, b, e), c in zip(x.tolist(), labels.tolist(), strict=True) if (o, e) == (p, p + 1)]
    assert all(c * b % p == a for a, b, c in rows)
    assert sorted((a, b) for a, b, _ in rows) == [(a, b) for a in range(p) for b in range(1, p)]  # none by zero, each once
    assert len(data.x) == round(0.6 * p * (p - 1))
    assert torch.equal(data.y.argmax(1), data.labels)


def test_division_needs_a_prime() -> None:
    for p, other in ((9, 11), (1, 2), (0, 2), (100, 101)):
        with pytest.raises(SelectionError, match=rf"p is no prime, and modulo p .* an inverse.*such as {other}"):
            tasks.modular_arithmetic(p, operation="divide")
    assert len(tasks.modular_arithmetic(9, operation="multiply").x) == 40  # other operations need none


def test_pairs_are_the_same_for_every_other_operation() -> None:
    add, product = (tasks.modular_arithmetic(7, operation=o) for o in ("add", "multiply"))
    assert torch.equal(add.x, product.x)
    assert add.tokens[:3].tolist() == [[3, 7, 3, 8], [1, 7, 0, 8], [4, 7, 2, 8]]  # as ever


def test_the_examples_of_made_tasks_run() -> None:
    document = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    section = document[document.index("## Made, not fetched"):]
    names: dict[str, Any] = {"tasks": tasks, "torch": torch}
    exec(section.split("```python\n")[1].split("```")[0], names)
    assert names["parity"].support == (3, 7)
    assert all(f"`{name}(" in section for name, where in tasks.CATALOGUE.files().items() if where == "synthetic")
