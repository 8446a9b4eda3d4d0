"""What is asked of a map that writes more than it reads is kept as what is asked of its inputs: through its matrix, and through
what was added to that since initialisation. It takes less room, nothing is lost that is later multiplied by the one or the other,
and the feature matrices lie in the sums as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from richter.instrument.stream import steps

if TYPE_CHECKING:
    from richter.instrument.subject import Subject

ASKED = 8  # cotangents of an example, from which is told how a moment is kept
WRITTEN = 2 ** 20  # entries of matrices that are written down side by side
TILE = 2 ** 20  # entries of a larger one that are read at a time
PRODUCTS = 20  # of a moment with a map's matrix that are made of a snapshot's sums


def size(shape: Sequence[int], matrices: int, rows: int) -> int | None:
    """How many numbers of each of so many rows are kept where they are asked of the inputs of a map of this shape, through so
    many matrices; None where to keep them as they are takes fewer operations, with those that are made of the sums."""
    d, r = shape[0], matrices * shape[1]
    return r if shape[1] <= d and rows * r * (d + r) < d * d * (rows + PRODUCTS * d) else None


def seen(subject: Subject, name: str) -> int | None:
    """How many numbers a moment keeps of what is asked of a map at a position, where it does so through the map's matrices."""
    info, n = subject.survey.maps[name], subject.probe.n
    return size(*_matrices(subject, name), n * info.positions * min(subject.survey.outputs, ASKED))


def rank(subject: Subject, name: str) -> int:
    """The same, or all of them."""
    return seen(subject, name) or _matrices(subject, name)[0][0]


def written_bytes(subject: Subject, name: str) -> int:
    """Of a map's matrices side by side, where they are written down."""
    (o, i), matrices = _matrices(subject, name)
    return subject.itemsize * matrices * o * i if seen(subject, name) and matrices * o * i <= WRITTEN else 0


def _matrices(subject: Subject, name: str) -> tuple[tuple[int, int], int]:
    """The shape of a map's matrix, grouped ones as one, and how many there are: now, and then."""
    shape, kind = subject.survey.maps[name].shape, subject.survey.maps[name].kind
    return (shape[0] * shape[1], shape[0] * shape[2]) if kind == "grouped" else (shape[0], shape[1]), 1 + (name in subject.W0)


class Through:
    """A = (W / |W|, (W - W0) / |W - W0|), without W0 its first part alone: rows g [..., o] are kept as g A [..., r], and their
    moment K as A^T K A. The norms keep both parts in the range of single precision. Large matrices are read where they lie."""

    def __init__(self, W: Float[Tensor, "o i"], W0: Float[Tensor, "o i"] | None, wide: Callable[[Tensor], Tensor]) -> None:
        self.W, self.W0, self.wide, self.shape = W, W0, wide, W.shape
        norms = [torch.stack([A.norm() for A in parts]) for parts in self._tiles(wide)]  # one tile after another: they are large
        self.norms = [norm or 1.0 for norm in torch.stack(norms).norm(dim=0).tolist()]
        self._written: Tensor | None = None

    def _tiles(self, kind: Callable[[Tensor], Tensor]) -> Iterator[list[Tensor]]:
        """Rows of W and of W - W0."""
        for rows in self._steps:
            W = kind(self.W[rows])
            yield [W] if self.W0 is None else [W, W - kind(self.W0[rows])]

    @cached_property
    def _steps(self) -> list[slice]:
        return steps(self.shape[0], max(1, TILE // self.shape[1]))

    def _scaled(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([A / norm for A, norm in zip(parts, self.norms, strict=True)], 1)

    def rows(self, g: Float[Tensor, "... o"]) -> Float[Tensor, "... r"]:
        """g A, in the precision of g."""
        if len(self.norms) * self.W.numel() <= WRITTEN:
            if self._written is None or self._written.dtype != g.dtype:
                self._written = torch.cat([self._scaled(parts) for parts in self._tiles(lambda W: W.to(g))])
            return g @ self._written
        now = g @ self.W.to(g) / self.norms[0]
        if self.W0 is None:
            return now
        change = torch.zeros_like(now)
        for rows in self._steps:
            change += g[..., rows] @ (self.W[rows].to(g) - self.W0[rows].to(g)).div_(self.norms[1])
        return torch.cat([now, change], -1)

    def gram(self) -> Float[Tensor, "r r"]:
        """A^T A."""
        total = None
        for parts in self._tiles(self.wide):
            A = self._scaled(parts)
            total = A.T @ A if total is None else total.addmm_(A.T, A)
        assert total is not None  # a matrix has rows
        return total

    def block(self, K: Float[Tensor, "r r"], now: float, change: float) -> Float[Tensor, "i i"]:
        """V^T K' V of V = now W + change (W - W0), from K = A^T K' A."""
        i, weights = self.shape[1], [c * norm for c, norm in zip((now, change), self.norms, strict=False)]
        parts = [(a * b, K[j * i:(j + 1) * i, k * i:(k + 1) * i]) for j, a in enumerate(weights) for k, b in enumerate(weights)]
        first, *rest = (part * weight for weight, part in parts if weight)
        for part in rest:
            first += part
        return first


class Bases(dict[str, Through | None]):
    """By map, each made when it is first asked for; None where what is asked of a map is kept as it is."""

    def __init__(self, subject: Subject, wide: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.subject, self.wide = subject, wide
        self._gram: tuple[str, Tensor] | None = None  # of the map that was looked at last

    def __missing__(self, name: str) -> Through | None:
        self[name] = Through(*self.subject.plain(name), self.wide) if seen(self.subject, name) else None
        return self[name]

    def gram(self, name: str) -> Tensor:
        """A^T A of one map after another."""
        if self._gram is None or self._gram[0] != name:
            through = self[name]
            assert through is not None
            self._gram = name, through.gram()
        return self._gram[1]
