"""Orthonormal bases of the columns of a map's matrices, now and then: what is later multiplied by W or W0 loses nothing when it
is kept there, and a map that writes more than it reads takes less room."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from richter.instrument.stream import steps

WRITTEN = 2 ** 22  # entries of a basis that is written down
TILE = 2 ** 20  # entries of a matrix in double precision at a time
SMALL = 1e-13  # eigenvalues of a Gram matrix of unit matrices, relative: what is below is rounding


class Basis(Protocol):
    """Of the columns of W, and of W0 if there is one."""

    size: int  # how many vectors

    def rows(self, g: Float[Tensor, "... o"]) -> Float[Tensor, "... r"]:
        """g Q."""
        ...

    def matrices(self) -> tuple[Float[Tensor, "r i"], Float[Tensor, "r i"] | None]:
        """Q^T W and Q^T W0, in double precision."""
        ...


def size(shape: Sequence[int], matrices: int) -> int | None:
    """How many vectors a basis of so many matrices of this shape has, where to go there, d r + r^2 operations for each g, is less
    than d^2; None where it is not."""
    d, r = shape[0], matrices * shape[1]
    return r if r * (d + r) < d * d else None


def basis_bytes(shape: Sequence[int], matrices: int) -> int:
    """That a basis of so many matrices of this shape takes, if there is one."""
    d, r = shape[0], size(shape, matrices)
    if r is None:
        return 0
    return 8 * (d * r + d * matrices * shape[1]) if d * r <= WRITTEN else 8 * 2 * r * r


def basis(W: Float[Tensor, "o i"], W0: Float[Tensor, "o i"] | None) -> Float[Tensor, "o r"] | None:
    """Its vectors Q, by a QR decomposition, where it is worth it."""
    columns = W if W0 is None else torch.cat([W, W0], 1)
    return None if size(W.shape, columns.shape[1] // W.shape[1]) is None else torch.linalg.qr(columns)[0]


class Written(Basis):
    """Q itself."""

    def __init__(self, W: Float[Tensor, "o i"], W0: Float[Tensor, "o i"] | None) -> None:
        Q = basis(W, W0)
        assert Q is not None  # or there would be none
        self.W, self.W0, self.Q, self.size = W, W0, Q, Q.shape[1]

    def rows(self, g: Float[Tensor, "... o"]) -> Float[Tensor, "... r"]:
        return g @ self.Q.to(g)

    def matrices(self) -> tuple[Tensor, Tensor | None]:
        return self.Q.T @ self.W, None if self.W0 is None else self.Q.T @ self.W0


class Implied(Basis):
    """Q = A (A^T A)^-1/2 with A = (W / |W|, (W - W0) / |W - W0|), which is never written down: a vocabulary's would be several
    times the model. Both are read where they lie, in the precision of the model."""

    def __init__(self, W: Float[Tensor, "o i"], W0: Float[Tensor, "o i"] | None) -> None:
        self.W, self.W0 = W, W0
        i = W.shape[1]
        r = i if W0 is None else 2 * i
        G = torch.zeros(r, r, dtype=torch.float64, device=W.device)
        for A in self._tiles():
            G += A.T @ A
        norms = G.diagonal().view(-1, i).sum(1).sqrt()
        self.norms = torch.where(norms > 0, norms, 1.0)
        self.scale = self.norms.repeat_interleave(i)
        values, vectors = torch.linalg.eigh(G / self.scale / self.scale[:, None])
        keep = values > SMALL * values[-1]
        self.T = vectors[:, keep] / values[keep].sqrt() / self.scale[:, None]  # Q = (W, W - W0) T
        self.WQ = self.T.T @ G
        self.size = self.T.shape[1]

    @cached_property
    def _steps(self) -> list[slice]:
        return steps(len(self.W), max(1, TILE // self.W.shape[1]))

    def _tiles(self) -> Iterator[Tensor]:
        """Rows of (W, W - W0), in double precision."""
        for rows in self._steps:
            W = self.W[rows].double()
            yield W if self.W0 is None else torch.cat([W, W - self.W0[rows].double()], 1)

    def rows(self, g: Float[Tensor, "... o"]) -> Float[Tensor, "... r"]:
        parts = [g @ self.W.to(g)]
        if self.W0 is not None:
            parts.append(torch.zeros_like(parts[0]))
            for rows in self._steps:
                parts[1] += g[..., rows] @ (self.W[rows].to(g) - self.W0[rows].to(g))
        return torch.cat(parts, -1) @ self.T.to(g)

    def matrices(self) -> tuple[Tensor, Tensor | None]:
        i = self.W.shape[1]
        return self.WQ[:, :i], None if self.W0 is None else self.WQ[:, :i] - self.WQ[:, i:]


class Bases(dict[str, Basis | None]):
    """By map, each made when it is first asked for; None where a map's own coordinates are as good."""

    def __init__(self, shapes: Callable[[str], tuple[Sequence[int], int]], pair: Callable[[str], tuple[Tensor, Tensor | None]],
                 plain: Callable[[str], tuple[Tensor, Tensor | None]]) -> None:
        super().__init__()
        self.shapes, self.pair, self.plain = shapes, pair, plain

    def __missing__(self, name: str) -> Basis | None:
        shape, matrices = self.shapes(name)
        r = size(shape, matrices)
        if r is None:
            self[name] = None
        else:
            self[name] = Written(*self.pair(name)) if shape[0] * r <= WRITTEN else Implied(*self.plain(name))
        return self[name]
