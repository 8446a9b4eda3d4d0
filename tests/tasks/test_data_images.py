"""Images as tensors: balanced, standardised, shuffled by a seed."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from richter import tasks
from richter.core import DataError, SelectionError
from richter.tasks import augment, files, store
from richter.tasks.images import balanced
from samples import fake, idx_of, pixels


@pytest.fixture
def small_mnist(cache: Path) -> tuple[np.ndarray, np.ndarray]:
    x, y = pixels(70, 28, 28), (np.arange(70) * 3 % 10).astype(np.uint8)
    for name in ("mnist", "fashion_mnist"):
        fake(name, {f"{part}-{kind}-ubyte": idx_of(array)
                    for part, rows in (("train", slice(50)), ("t10k", slice(50, 70)))
                    for kind, array in (("images-idx3", x[rows]), ("labels-idx1", y[rows]))})
    return x, y


@pytest.mark.parametrize("load", [tasks.mnist, tasks.fashion_mnist])
def test_images_as_tensors(small_mnist: tuple[np.ndarray, np.ndarray], load: Callable[..., tasks.Split]) -> None:
    x, y = small_mnist
    raw = load(standardise=False, dtype=torch.float64)
    assert torch.equal(raw.x, torch.tensor(x[:50, None] / 255))
    assert torch.equal(raw.y_test, torch.tensor(y[50:].astype(np.int64)))
    mean, deviation = (x[:50] / 255).mean(), (x[:50] / 255).std()
    full = load(dtype=torch.float64)
    torch.testing.assert_close(full.x_test, (raw.x_test - mean) / deviation)
    assert (abs(full.x.mean()) < 1e-12, round(full.x.std(unbiased=False).item(), 12)) == (True, 1.0)
    part = load(n=20, n_test=10, seed=3, dtype=torch.float64)
    assert torch.bincount(part.y).tolist() == [2] * 10
    assert torch.bincount(part.y_test).tolist() == [1] * 10
    for image in part.x:  # standardised by the whole training set
        assert ((full.x - image).abs().amax((1, 2, 3)) == 0).sum() == 1
    again, other = load(n=20, n_test=10, seed=3, dtype=torch.float64), load(n=20, n_test=10, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(part, again, strict=True))
    assert not torch.equal(part.y, other.y)
    assert load(flat=True).x.shape == (50, 784)
    assert load(dtype=torch.float16).x.dtype == torch.float16
    assert torch.equal(load(n=50).x, load().x)
    for wrong in ({"n": 51}, {"n": 0}, {"n_test": -1}, {"n": 2.5}, {"n": 10, "seed": -1}, {"dtype": torch.int64}):
        with pytest.raises(SelectionError):
            load(**wrong)


@given(st.integers(0, 99), st.integers(2, 4), st.integers(1, 40), st.integers(1, 40))
def test_subsets_are_balanced_and_nested(seed: int, classes: int, n: int, m: int) -> None:
    y = np.concatenate([np.arange(classes)] * 12)
    n, m = sorted((min(n, len(y)), min(m, len(y))))
    small, large = balanced(y, n, seed), balanced(y, m, seed)
    assert len(set(small)) == n
    assert set(small) <= set(large)
    counts = np.bincount(y[large], minlength=classes)
    assert counts.max() - counts.min() <= 1


def test_different_images_are_not_mixed() -> None:
    a, b = files.Images(pixels(4, 1, 8, 8), np.arange(4)), files.Images(pixels(4, 3, 8, 8), np.arange(4))
    with pytest.raises(DataError, match=r"training images are \(1, 8, 8\) and test images \(3, 8, 8\)"):
        tasks.split(a, b)


def test_damaged_sets_say_how_to_mend(small_mnist: Any) -> None:
    path = store.where("mnist") / "train-images-idx3-ubyte"
    cut = path.read_bytes()[:-1]
    path.write_bytes(cut)
    with pytest.raises(DataError, match=r"is not what was fetched: .* `richter data fetch mnist` fetches it again"):
        tasks.mnist()
    fake("mnist", {"train-images-idx3-ubyte": cut})  # as if it had been fetched so
    with pytest.raises(DataError, match="header promises"):
        tasks.mnist()


def test_mnist_5k(cache: Path) -> None:
    rows = [",".join([str(25 * c)] * 784) + f",{c}" for c in range(10) for _ in range(500)]
    fake("mnist_5k", {"mnist_5k.csv.gz": gzip.compress("\n".join(rows).encode(), 1)})
    data = tasks.mnist_5k(test=0.1, standardise=False, flat=False)
    assert data.x.shape == (4500, 1, 28, 28)
    assert torch.bincount(data.y).tolist() == [450] * 10
    assert torch.bincount(data.y_test).tolist() == [50] * 10
    torch.testing.assert_close(data.x[:, 0, 0, 0], data.y * 25 / 255)
    assert data.y[:50].unique().numel() > 5  # shuffled
    with pytest.raises(SelectionError, match="share"):
        tasks.mnist_5k(test=1)


def test_digits() -> None:
    data = tasks.digits(test=0.25, seed=1)
    assert (len(data.x), len(data.x_test)) == (1348, 449)
    assert abs(torch.cat([data.x, data.x_test]).mean()) < 1e-6
    assert not torch.equal(data.y, tasks.digits(test=0.25, seed=2).y)


def test_global_randomness_is_left_alone(small_mnist: Any) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    draw = torch.Generator().manual_seed(0)
    x = tasks.mnist(n=20, standardise=False).x
    tasks.digits()
    tasks.chain_monomial(5, 8, 4)
    tasks.sparse_parity(5, 8, 4)
    tasks.modular_arithmetic(5)
    augment.jitter(augment.flip(augment.crop(x, 2, draw), draw), draw, 0.5, 0.5)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
