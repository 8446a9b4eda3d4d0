"""The real sets, where they have been fetched: their digests, their counts, and the documents' examples."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from richter import tasks
from richter.tasks import registry, store, tabular
from richter.tasks.web import manifest
from samples import mat_of, site

REAL = store.root()  # before any test changes where the data are


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Skip unless the set has been fetched on this machine."""
    monkeypatch.setenv("RICHTER_DATA", str(REAL))
    def need(name: str) -> None:
        if not store.where(name).is_dir():
            pytest.skip(f"{name} is not cached here; `richter data fetch {name}` gets it")
    return need


@pytest.mark.parametrize("name", sorted(registry.SETS))
def test_real_digests(real: Callable[[str], None], name: str) -> None:
    real(name)
    entry = registry.SETS[name]
    assert store.digest(store.where(name)) == entry.digest
    assert sum(p.stat().st_size for p in store.where(name).rglob("*") if p.is_file()) == entry.size


@pytest.mark.parametrize("name", sorted(name for name, data in registry.SETS.items() if not data.sources[0].files))
def test_real_files_from_the_web(real: Callable[[str], None], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets that lie on the web file by file: the same files, served from this machine at the address of the first source."""
    real(name)
    data = registry.SETS[name]
    monkeypatch.setenv("no_proxy", "*")
    with site(store.where(name)) as (address, requests):
        monkeypatch.setenv("RICHTER_DATA", str(tmp_path))
        monkeypatch.setitem(registry.SETS, name, replace(data, sources=(replace(data.sources[0], address=address),)))
        assert store.digest(store.fetch(name)) == data.digest
    assert len(requests) == len(manifest(name))


@pytest.mark.parametrize(("load", "mean", "deviation", "counts", "test_counts"), [
    (tasks.mnist, 0.1307, 0.3081, [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
     [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]),
    (tasks.fashion_mnist, 0.2860, 0.3530, [6000] * 10, [1000] * 10)])
def test_real_images(real: Callable[[str], None], load: Callable[..., tasks.Split], mean: float, deviation: float,
                     counts: list[int], test_counts: list[int]) -> None:
    real(load.__name__)
    data = load(standardise=False)
    assert (data.x.shape, data.x_test.shape) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    found = torch.std_mean(data.x)
    assert [round(k.item(), 4) for k in found] == [deviation, mean]
    assert torch.bincount(data.y).tolist() == counts
    assert torch.bincount(data.y_test).tolist() == test_counts


@pytest.mark.long
def test_real_cifar10(real: Callable[[str], None]) -> None:
    real("cifar10")
    data = tasks.cifar10(standardise=False)
    for x, sha in ((data.x, "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a"),
                   (data.x_test, "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04")):
        rows = (x * 255).round().byte().permute(0, 2, 3, 1).contiguous()
        assert hashlib.sha256(rows.numpy().tobytes()).hexdigest() == sha
    assert torch.bincount(data.y).tolist() == [5000] * 10
    assert torch.bincount(data.y_test).tolist() == [1000] * 10
    means = (data.x.double() * 255).mean((0, 2, 3))
    published = torch.tensor([125.30691805, 122.95039414, 113.86538318], dtype=torch.float64)
    torch.testing.assert_close(means, published, atol=1e-4, rtol=0)


def test_real_text(real: Callable[[str], None]) -> None:
    for name in ("shakespeare", "kjv", "analogies", "imdb"):
        real(name)
    text = tasks.shakespeare()
    assert (len(text.ids), len(text.ids_test), len(text.vocabulary)) == (990_000, 110_000, 77)
    assert text.decode(text.ids[:25]) == "ALL'S WELL THAT ENDS WELL"
    reviews, verses, lists = tasks.corpus("imdb"), tasks.corpus("kjv"), tasks.analogies()
    assert (len(reviews.texts), torch.bincount(reviews.y).tolist()) == (49_582, [24_698, 24_884])
    assert (len(verses.texts), len(verses.classes), verses.classes[0]) == (31_102, 66, "Genesis")
    assert (len(lists.questions), len({q[0] for q in lists.questions})) == (19_544, 14)
    assert (len(lists.wordsim353), len(lists.simlex999)) == (353, 999)


SHAPES = {"iris": (150, 4, 3), "wine": (178, 13, 3), "pima": (768, 8, 2), "vowel": (990, 13, 11), "mushroom": (5644, 98, 2),
          "laser": (993, 4, None), "yacht_hydrodynamics": (308, 6, None), "communities": (1993, 100, None)}


@pytest.mark.parametrize("name", SHAPES)
def test_real_tables(real: Callable[[str], None], name: str) -> None:
    n, d, classes = SHAPES[name]
    real("keel" if classes else "regression")
    data = tasks.tables(name)
    assert (len(data.x) + len(data.x_test), data.x.shape[1]) == (n, d)
    assert (int(data.y.max()) + 1 if classes else None) == classes


@pytest.mark.long
def test_every_real_table(real: Callable[[str], None]) -> None:
    real("keel")
    real("regression")
    for name in tasks.table_names():
        data = tasks.tables(name)
        for part in data:
            assert part.isfinite().all(), name
        assert data.y.ndim == (1 if name in tabular.CLASSIFICATION else 2)


def test_real_mnist_5k(real: Callable[[str], None]) -> None:
    real("mnist_5k")
    data = tasks.mnist_5k()
    assert (data.x.shape, torch.bincount(data.y_test).tolist()) == ((4000, 784), [100] * 10)


def test_the_examples_run(real: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mnist", "keel", "shakespeare"):
        real(name)
    svhn = mat_of(X=np.zeros((32, 32, 3, 1000), dtype=np.uint8), y=np.arange(1000) % 10 + 1)
    for part in ("train", "test"):
        (tmp_path / f"{part}_32x32.mat").write_bytes(svhn)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    document = Path(__file__).parents[2] / "docs" / "data.md"
    for code in re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL):
        exec(code, names)
    assert names["x"].shape == (1000, 3, 32, 32)
    assert all(f"| {name} |" in document.read_text() for name in registry.SETS)
