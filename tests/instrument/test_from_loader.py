"""A Probe drawn from a loader, a data set or a stream: balanced, by its own seed, disturbing nothing."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

import richter
from observing import CLASSES, MANY, SOURCES, draw, hugging_face, indices, mlp


@contextlib.contextmanager
def streams_untouched() -> Iterator[None]:
    def now() -> tuple[Any, ...]:
        _, keys, *rest = np.random.get_state()  # noqa: NPY002
        return torch.get_rng_state().tolist(), keys.tolist(), rest, random.getstate()

    before = now()
    yield
    assert now() == before


@pytest.fixture
def own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """beartype draws the items it checks from Python's global stream; here `random` is another one."""
    fresh = random.Random(0)
    for name in random.__all__:
        if getattr(getattr(random, name), "__self__", None) is not None:
            monkeypatch.setattr(random, name, getattr(fresh, name))


class Drawn(Dataset):
    """Augmentations that draw from every global stream."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        noise = torch.rand(1).item() + np.random.rand() + random.random()  # noqa: NPY002
        return MANY[i] + 1e-9 * noise, int(CLASSES[i])


@pytest.mark.parametrize("name", SOURCES)
def test_from_everything_that_gives_batches(name: str) -> None:
    """As many of each class, no example twice, each with its own label."""
    p = richter.Probe.from_loader(SOURCES[name](), n=30)
    assert isinstance(p.x, Tensor)
    assert p.x.shape == (30, 5)
    assert p.y is not None
    rows = indices(p)
    assert len(set(rows)) == 30
    assert torch.equal(CLASSES[rows], p.y)
    assert p.y.bincount().tolist() == [10, 10, 10]
    assert math.isfinite(richter.measure(mlp(dtype=p.x.dtype), p, ["tangent_cka"]).value("tangent_cka"))


def test_scarce_classes_are_filled_up_from_the_others() -> None:
    p = richter.Probe.from_loader(TensorDataset(MANY, CLASSES), n=150)
    assert p.y is not None
    assert p.y.bincount().tolist() == [55, 55, 40]
    everything = richter.Probe.from_loader(TensorDataset(MANY, CLASSES), n=1000)
    assert everything.n == 400


def test_unbalanced() -> None:
    """The examples as they come: the first of a loader, a random draw of a dataset."""
    first = richter.Probe.from_loader(SOURCES["loader"](), n=310, balanced=False)
    assert indices(first) == list(range(310))
    drawn = richter.Probe.from_loader(SOURCES["tensor dataset"](), n=200, balanced=False)
    assert drawn.y is not None
    assert 120 < drawn.y.bincount()[0] < 180  # three quarters are of class 0


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("name", ["shuffling loader", "tensor dataset", "hugging face"])
def test_a_seed_owns_the_draw(name: str, balanced: bool) -> None:
    def drawn(seed: int) -> list[int]:
        return indices(richter.Probe.from_loader(SOURCES[name](), n=20, balanced=balanced, seed=seed))

    first = drawn(0)
    torch.rand(3)
    assert first == drawn(0) != drawn(1)


@pytest.mark.parametrize("name", [*SOURCES, "augmented", "workers"])
@pytest.mark.usefixtures("own_stream")
def test_no_random_stream_is_touched(name: str) -> None:
    more = {"augmented": Drawn, "workers": lambda: DataLoader(Drawn(), batch_size=100, shuffle=True, num_workers=1)}
    source = (SOURCES | more)[name]()
    with streams_untouched():
        richter.Probe.from_loader(source, n=20)


@pytest.mark.parametrize("where", ["loader", "sampler", "batch sampler"])
def test_the_loader_shuffles_as_if_it_had_not_been_asked(where: str) -> None:
    """A loader with a generator of its own: this stream is the training's, too."""
    def order(asked: bool) -> list[int]:
        data, own = TensorDataset(MANY, torch.arange(400)), torch.Generator().manual_seed(4)
        sampler = RandomSampler(data, generator=own)
        loader: Any = {
            "loader": lambda: DataLoader(data, batch_size=100, shuffle=True, generator=own),
            "sampler": lambda: DataLoader(data, batch_size=100, sampler=sampler),
            "batch sampler": lambda: DataLoader(data, batch_sampler=BatchSampler(sampler, 100, drop_last=False)),
        }[where]()  # fmt: skip
        if asked:
            richter.Probe.from_loader(loader, n=20, balanced=False)
        return torch.cat([y for _, y in loader]).tolist()

    assert order(True) == order(False)


def test_options_of_a_probe_pass_through() -> None:
    p = richter.Probe.from_loader(SOURCES["loader"](), n=30, chunk=7, kernel_examples=9)
    assert (p.chunk, p.kernel_examples, len(p.kernel_rows())) == (7, 9, 9)


def test_inputs_without_labels_and_of_several_parts() -> None:
    for source in (DataLoader(TensorDataset(MANY), 50), list(DataLoader(TensorDataset(MANY), 50)), TensorDataset(MANY)):
        p = richter.Probe.from_loader(source, n=20)
        assert p.y is None
        assert p.x.shape == (20, 5)
        assert len(set(indices(p))) == 20
    p = richter.Probe.from_loader(DataLoader(TensorDataset(MANY, 2 * MANY, CLASSES), 50), n=20)
    assert p.y is not None
    assert isinstance(p.x, tuple)
    assert torch.equal(2 * p.x[0], p.x[1])
    assert torch.equal(CLASSES[[int((row == MANY).all(1).nonzero()[0, 0]) for row in p.x[0]]], p.y)


def test_examples_with_targets_are_not_batches() -> None:
    """A list of (x[5], target[3]) is a data set of examples, though targets are tensors with an axis."""
    targets = draw(400, 3, seed=8)
    p = richter.Probe.from_loader(list(zip(MANY, targets, strict=True)), n=20)
    assert p.x.shape == (20, 5)
    assert p.y is not None
    assert torch.equal(targets[indices(p)], p.y)


SEQUENCES, TAGS = draw(60, 4, 5, seed=6), torch.arange(240).reshape(60, 4) % 3


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("kind", ["dataset", "loader", "hugging face"])
def test_examples_that_look_like_batches(kind: str, labelled: bool) -> None:
    """One example of a data set has axes of its own, and perhaps a label for each position: it is one example."""
    columns = {"x": SEQUENCES, "labels": TAGS} if labelled else {"x": SEQUENCES}
    data: Any = TensorDataset(*columns.values())
    if kind == "hugging face":
        data = hugging_face(**columns).with_format("torch")
    p = richter.Probe.from_loader(DataLoader(data, batch_size=8) if kind == "loader" else data, n=20)
    assert p.x.shape == (20, 4, 5)
    rows = torch.cdist(p.x.double().flatten(1), SEQUENCES.flatten(1)).argmin(1)
    assert len(rows.unique()) == 20
    assert (p.y is not None and torch.equal(p.y, TAGS[rows])) if labelled else p.y is None


@pytest.mark.parametrize("name", ["list of numpy batches", "hugging face without a format"])
def test_numbers_without_a_precision_take_the_models(name: str) -> None:
    """numpy arrays and lists of floats, drawn from a loader, fit a float32 model as they do when given directly."""
    p = richter.Probe.from_loader(SOURCES[name](), n=30)
    assert math.isfinite(richter.measure(mlp(dtype=torch.float32), p, ["nfc"]).value("nfc", "0"))


@pytest.mark.parametrize("formatted", [True, False])
def test_tokens_of_hugging_face(formatted: bool) -> None:
    """Dicts with input_ids, an attention mask and token labels stay dicts."""
    ids = torch.randint(0, 9, (60, 6), generator=torch.Generator().manual_seed(0))
    data = hugging_face(input_ids=ids, attention_mask=(ids > 0).long(), labels=ids.roll(-1, 1))
    p = richter.Probe.from_loader(data.with_format("torch") if formatted else data, n=16)
    assert set(p.x) == {"input_ids", "attention_mask"}
    assert p.x["input_ids"].shape == (16, 6)
    assert p.y is not None
    assert torch.equal(p.x["input_ids"].roll(-1, 1), p.y)
