"""Small models, probes and comparisons that the tests of Probe, measure, Snapshot and Observer share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import richter
from zoo import CASES

FEW = ("nfc", "tangent_cka")  # one moment, one kernel


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def mlp(seed: int = 0, dtype: torch.dtype = torch.float64, outputs: int = 3) -> nn.Sequential:
    """5 -> 8 -> 6 -> outputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, outputs)).to(dtype)


def examples(n: int = 24, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return draw(n, 5, seed=1, dtype=dtype), torch.arange(n) % 3


def probe(n: int = 24, **options: Any) -> richter.Probe:
    return richter.Probe(*examples(n), **options)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def numbers(snap: richter.Snapshot) -> dict[tuple[str, str], float]:
    return {(r.measure, r.layer): r.value for r in snap.rows}


def assert_close(a: richter.Snapshot, b: richter.Snapshot, rel: float = 1e-10, errors: bool = True) -> None:
    """The same rows with the same values and standard errors; NaN where the other is NaN."""
    assert [(r.measure, r.layer) for r in a.rows] == [(r.measure, r.layer) for r in b.rows]
    assert a.rows
    assert any(math.isfinite(r.value) for r in a.rows)
    for p, q in zip(a.rows, b.rows, strict=True):
        assert p.value == pytest.approx(q.value, rel=rel, abs=rel, nan_ok=True), (p, q)
        if errors:
            assert p.error == pytest.approx(q.error, rel=max(rel, 1e-6), abs=max(rel, 1e-8), nan_ok=True), (p, q)


def moved(model: nn.Module, size: float = 0.1) -> nn.Module:
    """The model after a step of training."""
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.add_(size * draw(*p.shape, seed=100 + i).to(p))
    return model


MANY = draw(400, 5, seed=3)
CLASSES = torch.tensor([0] * 300 + [1] * 60 + [2] * 40)  # sorted and unbalanced: the first examples are of one class


def hugging_face(**columns: Any) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict({k: v.tolist() for k, v in columns.items()})


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(MANY, CLASSES, strict=True)


def in_batches(*columns: Any) -> list[Any]:
    return [tuple(c[i:i + 50] for c in columns) for i in range(0, 400, 50)]


SOURCES: dict[str, Callable[[], Any]] = {
    "loader": lambda: DataLoader(TensorDataset(MANY, CLASSES), batch_size=32),
    "shuffling loader": lambda: DataLoader(TensorDataset(MANY, CLASSES), batch_size=32, shuffle=True),
    "tensor dataset": lambda: TensorDataset(MANY, CLASSES),
    "dataset": lambda: [(x, int(y)) for x, y in zip(MANY, CLASSES, strict=True)],
    "stream": lambda: DataLoader(Stream(), batch_size=32),
    "list of batches": lambda: in_batches(MANY, CLASSES),
    "list of numpy batches": lambda: in_batches(MANY.numpy(), CLASSES.numpy()),
    "generator of batches": lambda: iter(in_batches(MANY, CLASSES)),
    "list of dicts": lambda: [{"x": x, "labels": y} for x, y in in_batches(MANY, CLASSES)],
    "loader of dicts": lambda: DataLoader([{"x": x, "label": y} for x, y in zip(MANY, CLASSES, strict=True)], 32),
    "hugging face": lambda: hugging_face(x=MANY, label=CLASSES).with_format("torch"),
    "hugging face without a format": lambda: hugging_face(x=MANY, label=CLASSES),
    "loader of hugging face": lambda: DataLoader(hugging_face(x=MANY, label=CLASSES).with_format("torch"), 32),
}  # fmt: skip


def indices(p: richter.Probe) -> list[int]:
    """Which of MANY the examples of a probe are."""
    found = torch.cdist(p.x.double(), MANY).min(1)
    assert found.values.max() < 1e-6
    return found.indices.tolist()


class Heads(nn.Module):
    """Position by position; `head` works on [n, T, 2, 4]: two heads of every token, one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.readout = nn.Linear(5, 8), nn.Linear(4, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.first(x))
        z = torch.tanh(self.head(z.unflatten(-1, (2, 4)))).flatten(-2)
        return self.readout(z)


def heads(n: int = 12, T: int = 4) -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = Heads().double()
    return model, draw(n, T, 5, seed=4), torch.arange(n * T).reshape(n, T) * 7 % 3


def gpt(n: int = 8) -> tuple[nn.Module, Tensor, Tensor]:
    case = CASES["gpt"]
    return case.build(), *case.batch(n)


def lengths(n: int, T: int, left: bool = False) -> Tensor:
    """Masks of T, T-1, ... real tokens (at least one), the others behind them, or before them."""
    mask = torch.arange(T)[None] < T - (torch.arange(n) % T)[:, None]
    return mask.flip(1) if left else mask


def dropout() -> nn.Module:
    model = mlp()
    model[1] = nn.Dropout(0.5)
    return model.train()
