"""Tables by name: numbers, words, missing values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from richter import tasks
from richter.core import DataError, SelectionError
from richter.tasks import tabular
from samples import fake


def test_tables(cache: Path) -> None:
    rows = [f"{i}.5, {'red' if i % 3 else 'blue'}, 7, {'?' if i == 4 else i}, {10 - i % 2}" for i in range(20)]
    fake("keel", {"iris.dat": "\n".join(["@relation iris", *rows]).encode()})
    data = tasks.tables("iris", test=0.25, seed=1, standardise=False)
    assert (data.x.shape, data.x_test.shape) == ((14, 5), (5, 5))  # one row had no value
    both = torch.cat([data.x, data.x_test])
    assert set(both[:, 1].tolist()) == {0, 1}
    assert torch.equal(both[:, 1] + both[:, 2], torch.ones(19))
    assert torch.equal(torch.cat([data.y, data.y_test]), (both[:, 4] % 2 == 0).long())  # class 9 is 0, class 10 is 1
    scaled = tasks.tables("iris", seed=1)
    torch.testing.assert_close(scaled.x[:, 0].mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    assert torch.equal(scaled.x[:, 3], torch.zeros(len(scaled.x)))  # a constant column
    assert not torch.equal(tasks.tables("iris", seed=2).x, scaled.x)
    assert tasks.tables("iris", dtype=torch.float64).x.dtype == torch.float64
    fake("regression", {"excitation_current/synchronous_machine.csv":
                        b"Iy;PF;e;dIf;If\n3;0,66;0,34;0,3;1,5\n4;0,7;0,3;0,1;2\n5;1;0;0;3\n"})
    target = tasks.tables("excitation_current", test=0.3, standardise=False)
    assert (target.x.shape, target.y.shape) == ((2, 3), (2, 1))
    assert sorted(torch.cat([target.y, target.y_test])[:, 0].tolist()) == [1.5, 2.0, 3.0]
    fake("keel", {"iris.dat": b"1,2,a\n1,b\n"})
    with pytest.raises(DataError, match=r"rows of \[2, 3\] columns"):
        tasks.tables("iris")
    with pytest.raises(SelectionError, match="no table 'irises'"):
        tasks.tables("irises")
    with pytest.raises(SelectionError, match="share"):
        tasks.tables("iris", test=0)


def test_names_of_tables() -> None:
    assert len(tasks.table_names("classification")) == 43
    assert set(tasks.table_names()) == {*tabular.CLASSIFICATION, *tabular.REGRESSION}
    assert len(tasks.table_names()) == len(set(tasks.table_names()))
    with pytest.raises(SelectionError, match="kind 'clustering'"):
        tasks.table_names("clustering")
