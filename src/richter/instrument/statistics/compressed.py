"""Gradients of random vectors of all examples and outputs, J^T z of each module: whole where they have room side by side, else
compressed on the fly to a few thousand numbers, from which inner products are had without bias and with an error of their own.

Every entry of a gradient gets a random sign, and entries whose places are equal modulo m are added up: the inner product of two
such sums is that of the gradients, plus noise of mean 0 and a variance of at most 2 |x|^2 |y|^2 / m. The same signs serve several
m that have no common divisor: two entries fall together in two of them only if they do so modulo their product, so that the
products of what two of them say of an inner product are those of its square, without the noise's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from richter.core.freed import give_back
from richter.core.sizes import SMALL
from richter.instrument.capture import Pass, weight_bytes
from richter.instrument.statistics.grams import Tangents
from richter.instrument.statistics.products import parameters
from richter.instrument.statistics.tables import NotItself, Table, rows_bytes, table_bytes, tables_of
from richter.kernels.planning import Unit

if TYPE_CHECKING:
    from richter.instrument.subject import Subject

SKETCHES = 6  # each can be left out, for an error: of fewer it would itself be too uncertain
SIZES = {4096: (4093, 4091, 4079, 4073, 4057, 4051), 2048: (2039, 2029, 2027, 2017, 2011, 2003),  # primes below each
         1024: (1021, 1019, 1013, 1009, 997, 991), 256: (251, 241, 239, 233, 229, 227)}
TILE = 2 ** 22  # entries that are squared in double precision at a time
TABLE = 1 << 20  # the number of an example that no probe has: its signs are those of the gradients' entries


class Vectors:
    """Random signs for every output of every example, and the labels last; each minus its mean over the outputs that count. Kept
    where they have room, else drawn again whenever they are asked for."""

    def __init__(self, t: Tangents) -> None:
        self.t, self.k, self.q = t, t.subject.survey.outputs, t.cotangents.vectors
        self.Z = self.bits = None
        if t.n * self.k * self.q <= SMALL:
            self.Z = t.cotangents.signs(t.rows.tolist(), self.k, range(self.q))
        elif t.n * self.k * self.q // 8 <= t.subject.memory // 8:
            self.bits = [[_packed(self._drawn(v, slice(i, i + 1))) for i in range(t.n)] for v in range(self.q)]
        self.labelled = t.subject.Y is not None
        self.means = [self._mean(v) for v in range(len(self))]

    def __len__(self) -> int:
        return self.q + self.labelled

    def _plain(self, v: int, rows: slice) -> Float[Tensor, "n k"]:
        """In a tensor of its own."""
        mine = self.t.rows[rows]
        if v == self.q:
            return self.t.subject.Y[mine]  # type: ignore[index]
        signs = self._signs(v, rows)
        return signs.double() if self.Z is not None else signs.to(self.t.subject.source.dtype)

    def _drawn(self, v: int, rows: slice) -> Tensor:
        return self.t.cotangents.signs(self.t.rows[rows].tolist(), self.k, [v])[0]

    def _signs(self, v: int, rows: slice) -> Tensor:
        """As int8."""
        if self.Z is not None:
            return self.Z[v, rows]
        return self._drawn(v, rows) if self.bits is None else torch.stack([_unpacked(b, self.k) for b in self.bits[v][rows]])

    def _counted(self, rows: slice) -> Tensor | None:
        counted = self.t.subject.counted
        return None if counted is None else counted[self.t.rows[rows]]

    def _mean(self, v: int) -> float:
        total, number = 0.0, 0.0
        for i in range(self.t.n):
            z, counted = self._plain(v, slice(i, i + 1)), self._counted(slice(i, i + 1))
            z = z if counted is None else z * counted.to(z)
            total, number = total + z.sum().item(), number + (z.numel() if counted is None else counted.sum().item())
        return total / number

    def __call__(self, v: int, rows: slice) -> Float[Tensor, "n k"]:
        z, counted = self._plain(v, rows).sub_(self.means[v]), self._counted(rows)
        return z if counted is None else z.mul_(counted)

    def columns(self, v: int, classes: int, some: slice) -> Float[Tensor, "m c"]:
        """Of all tokens of all examples some of the classes, in single precision: a row for each token."""
        parts = []
        for i in range(self.t.n):
            rows, counted = slice(i, i + 1), self._counted(slice(i, i + 1))
            plain = self._signs(v, rows) if v < self.q else self._plain(v, rows)
            z = plain.view(-1, classes)[:, some].float() - self.means[v]
            parts.append(z if counted is None else z * counted.view(-1, classes)[:, some].to(z))
        return torch.cat(parts)

    @property
    def energy(self) -> float:
        """|y~|^2 of the labels."""
        return sum(self(self.q, slice(i, i + 1)).square().sum().item() for i in range(self.t.n))


def _packed(signs: Tensor) -> np.ndarray:
    """Signs as bits."""
    return np.packbits(signs.numpy().reshape(-1) > 0)


def _unpacked(bits: np.ndarray, k: int) -> Tensor:
    return torch.from_numpy(np.unpackbits(bits, count=k).view(np.int8)).mul_(2).sub_(1)


@dataclass
class Grams:
    """Of each module, inner products of the gradients of all vectors, "sketches q q" (one, if they are exact), and the square of
    that of the labels."""

    products: dict[str, Float[Tensor, "r q q"]] = field(default_factory=dict)
    squares: dict[str, float] = field(default_factory=dict)

    def add(self, parameter: str, T: Float[Tensor, "r q q"], square: float | None) -> None:
        """Of one more parameter of a module."""
        module = parameter.rpartition(".")[0]
        self.products[module] = T if module not in self.products else self.products[module] + T
        if square is not None:
            self.squares[module] = self.squares.get(module, 0.0) + square


class Whole:
    """Gradients "v p" of some modules."""

    maps = ()

    def __init__(self, t: Tangents, units: Sequence[Unit], vectors: int, labelled: bool) -> None:
        self.subject, self.names, self.labelled = t.subject, parameters(t, units), labelled
        dtype, device = self.subject.source.dtype, self.subject.device
        self.B = [torch.zeros(vectors, p.numel(), dtype=dtype, device=device) for p in self.places]

    @property
    def places(self) -> list[Tensor]:
        return [self.subject.state[k] for k in self.names]

    def add(self, v: int, run: Pass, z: Tensor) -> None:
        for total, d in zip(self.B, run.backward(z, self.places)[1], strict=True):
            total[v] += d.reshape(-1)

    def grams(self, vectors: Vectors) -> Grams:
        parts: dict[str, list[Tensor]] = {}
        for name, b in zip(self.names, self.B, strict=True):
            parts.setdefault(name.rpartition(".")[0], []).append(b)
        result, self.B = Grams(), []
        for module in list(parts):
            B = torch.cat(parts.pop(module), 1)
            T = (B @ B.T).double()
            q = len(T) - self.labelled
            result.products[module] = T[None, :q, :q]
            if self.labelled:
                result.squares[module] = T[-1, -1].item()
        return result


class Compressed:
    """The same of all modules at once, each parameter's in ``SKETCHES`` sums of its signed entries; small ones, and those of a
    vocabulary, as they are. The gradient of the labels is whole."""

    def __init__(self, t: Tangents, units: Sequence[Unit], vectors: int, labelled: bool) -> None:
        subject = t.subject
        self.tables = tables_of(t, parameters(t, units))
        self.maps = tuple(k for table in self.tables for k in table.maps)
        self.subject, self.names = subject, without_tables(parameters(t, units), self.tables)
        self.q, self.labelled = vectors - labelled, labelled
        self.sizes = SIZES[size(subject, self.names, self.q)]
        places, dtype, device = self.places, subject.source.dtype, subject.device
        self.own = [p.numel() <= sum(self.sizes) for p in places]
        self.B = [torch.zeros(self.q, p.numel() if own else sum(self.sizes), dtype=dtype, device=device)
                  for p, own in zip(places, self.own, strict=True)]
        self.y = [torch.zeros(p.numel(), dtype=dtype, device=device) for p in places] if labelled else []
        longest = max((p.numel() for p, own in zip(places, self.own, strict=True) if not own), default=0)
        self.signs = t.cotangents.signs([TABLE], longest + len(places), [0])[0, 0].to(device)

    @property
    def places(self) -> list[Tensor]:
        return [self.subject.state[k] for k in self.names]

    def add(self, v: int, run: Pass, z: Tensor) -> None:
        asked, gradients = run.backward(z, self.places)
        for table in self.tables:
            if v == 0 and not table.itself(self.subject, run, asked, z):
                raise NotItself(table.parameter)
            table.add(v, self.subject, run.calls, asked, len(z))
        for j, d in enumerate(gradients):
            x = d.reshape(-1)
            if v == self.q:
                self.y[j] += x
            elif self.own[j]:
                self.B[j][v] += x
            else:
                self._fold(self.B[j][v], x * self.signs[j:j + len(x)])

    def _fold(self, total: Tensor, x: Tensor) -> None:
        """Entries whose places are equal modulo m are added up, for each m."""
        for part, m in zip(total.split(self.sizes), self.sizes, strict=True):
            whole = len(x) - len(x) % m
            part += x[:whole].view(-1, m).sum(0)
            part[:len(x) - whole] += x[whole:]

    def grams(self, vectors: Vectors) -> Grams:
        result = Grams()
        give_back(weight_bytes(self.subject.model))  # of all that has passed
        for table in self.tables:
            T = table.gram(self.subject, vectors)
            own = T[None, :self.q, :self.q].expand(SKETCHES, -1, -1)
            result.add(table.parameter, own, T[-1, -1].item() if self.labelled else None)
        for j, (name, small) in enumerate(zip(self.names, self.own, strict=True)):
            parts = [self.B[j]] * SKETCHES if small else self.B[j].split(self.sizes, 1)
            T = torch.stack([(B @ B.T).double() for B in parts])
            result.add(name, T, _square(self.y[j]) if self.labelled else None)
        return result


def _square(x: Tensor) -> float:
    """|x|^2 in double precision, some entries at a time."""
    return sum(part.double().square().sum().item() for part in x.split(TILE))


def size(subject: Subject, names: Sequence[str], q: int) -> int:
    """Numbers of a sketch: as many as have an eighth of memory, for all parameters and vectors."""
    large = sum(subject.state[k].numel() > min(SIZES) for k in names)
    return next((m for m in SIZES if q * large * SKETCHES * m * subject.itemsize <= subject.memory // 8), min(SIZES))


def without_tables(names: Sequence[str], tables: Sequence[Table]) -> list[str]:
    return [k for k in names if k not in {table.parameter for table in tables}]


def compressed_bytes(t: Tangents, q: int) -> int:
    """That compressed gradients take, those of the labels, and with one example those of one vector on their way; or, afterwards,
    some rows of a vocabulary's."""
    tables = tables_of(t, parameters(t, t.units))
    subject, names = t.subject, without_tables(parameters(t, t.units), tables)
    numbers = [subject.state[k].numel() for k in names]
    m = SIZES[size(subject, names, q)]
    kept = q * sum(min(p, sum(m)) for p in numbers)
    labels = sum(numbers) if subject.Y is not None else 0
    example = 2 * subject.survey.graph + 6 * subject.survey.outputs
    own = sum(table_bytes(t, table, q + 1) for table in tables) + subject.itemsize * (kept + labels)
    rows = max((rows_bytes(subject, table, q + 1) for table in tables), default=0)
    return own + max(rows, subject.itemsize * (sum(numbers) + 2 * max(numbers, default=0) + example))


def squared(T: Float[Tensor, "r q q"], sketches: Tensor | None = None) -> Float[Tensor, "q q"]:
    """The squares of inner products, without bias: products of what different sketches say."""
    if len(T) == 1:
        return T[0].square()
    T = T if sketches is None else T[sketches]
    return (T.sum(0).square() - T.square().sum(0)) / (len(T) * (len(T) - 1))


def summed(parts: Mapping[str, Any]) -> Any:
    """Of the whole model: inner products add up over modules."""
    values = list(parts.values())
    return torch.stack(values).sum(0) if isinstance(values[0], Tensor) else sum(values)
