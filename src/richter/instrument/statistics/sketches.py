"""Tangent kernels that are too large to be formed: estimates of what is asked of them, with a standard error.

* many outputs: combinations of each example's (drawn.py); where these have no room, y~^T K y~ is one backward pass of all layers
  and |C K C|_F^2 the mean of (z^T K z')^2 over independent random vectors z != z' of all outputs, which is unbiased (SKETCH);
* many examples: products of C K C with a few vectors, without K: the norm by Hutch++, the largest eigenvalue on the same
  subspace (FREE);
* each output's own kernels, of all outputs or of a few that are drawn (DIAGONAL).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from richter import linalg
from richter.core import WHOLE, Mark, Remark, show_bytes
from richter.core.values import SMALL, give_back
from richter.instrument.capture import Pass, weight_bytes
from richter.instrument.cotangents import Cotangents, SomeOutputs
from richter.instrument.probe import columns, counts
from richter.instrument.probe import labelled as having_labels
from richter.instrument.statistics import stored
from richter.instrument.statistics.frame import (
    GROUPS,
    NO_LABELS,
    Derived,
    Gathering,
    Group,
    Missing,
    OfKernels,
    Simple,
    Statistic,
    Wants,
    in_range,
)
from richter.instrument.statistics.kernels import (
    KERNEL,
    LABELS,
    TANGENT_KERNEL,
    CentredKernel,
    Sample,
    Tangents,
    by_labels,
    centred_kernel,
    centred_kernel_leaving,
    of_diagonal,
    of_diagonal_leaving,
    of_drawn_leaving,
    same_output,
    same_output_leaving,
    uniform,
)
from richter.instrument.statistics.output_sketch import (
    DRAWN,
    NotItself,
    Table,
    no_table,
    recorded,
    rows_bytes,
    table_bytes,
    tables_of,
)
from richter.instrument.stream import LayerCapture, check_finite, chunks, fitting, timed
from richter.kernels.contract import Room, Unit, bias_gradients, forward_operations, gradient_tiles, make_plan
from richter.kernels.ntk import Job, shared_gradients

if TYPE_CHECKING:
    from richter.instrument.subject import Subject

# ------------------------------------------------------------------------------------------------------------ products
# Products with tangent kernels that are never formed: J (J^T Z), chunk by chunk and output by output.

def centred(t: Tangents, z: Tensor) -> Tensor:
    """z - mean over the outputs that count, zero at the others."""
    counted = t.subject.counted
    if counted is None:
        return z - z.mean()
    keep = counted[t.rows].to(z)
    return (z - (z * keep).sum() / keep.sum()) * keep


def parameters(t: Tangents, units: Sequence[Unit]) -> list[str]:
    """Those of their modules."""
    modules = {u.module for u in units}
    return [name for module, name in t.parameters if module in modules]


def parameter_groups(t: Tangents, vectors: int) -> Iterator[list[Unit]]:
    """Modules whose gradients of so many vectors fit side by side."""
    subject, memory = t.subject, t.subject.memory
    group: list[Unit] = []
    held = 0
    for units in t.by_module.values():
        size = vectors * subject.itemsize * sum(subject.state[p].numel() for p in parameters(t, units))
        if group and held + size > memory // 3:
            yield group
            group, held = [], 0
        group, held = [*group, *units], held + size
    if group:
        yield group


def products(t: Tangents, Z: Mapping[str, Tensor], used: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """({name: K Z "q n v"} of the first ``used`` vectors of each module and of the whole, {name: |J^T z|^2} of the
    last): over the examples once for J^T Z and once for J (J^T Z), with nothing but a chunk held."""
    subject, whole = t.subject, Z.get(WHOLE)
    KZ = {name: torch.zeros(used, t.n, t.v, dtype=torch.float64, device=subject.home) for name in Z}
    squares = dict.fromkeys(Z, 0.0)
    vectors = max(len(z) for z in Z.values()) * (2 if whole is not None else 1)
    for units in parameter_groups(t, 2 * vectors):
        job = t.job(units, "trace")
        mine = {name: Z[name] if whole is None else torch.cat([Z[name], whole]) for name in job.modules}
        room = Room()
        pulls = {u: Pull(u, job, mine[u.module].to(subject.device, job.source.dtype), room) for u in units}
        size = make_plan(t.request(units, "trace", same=False, chunk=subject.probe.chunk), subject.memory // 3).chunk
        for back in (False, True):
            for chunk in chunks(job.source, t.x, size, maps=job.maps, cotangents=job.cotangents, parameters=job.loose,
                                title="kernels"):
                for c in range(t.v):
                    captures = chunk.captures(slice(c, c + 1))
                    for u, pull in pulls.items():
                        if not back:
                            pull.add(captures, chunk.gradients, chunk.rows, c)
                            continue
                        pushed = pull.push(captures, chunk.gradients, c).to(subject.home, torch.float64)
                        KZ[u.module][:, chunk.rows, c] += pushed[:used]
                        if whole is not None:
                            KZ[WHOLE][:, chunk.rows, c] += pushed[len(Z[u.module]):][:used]
                for pull in pulls.values():
                    pull.end_of_chunk()
        for u, pull in pulls.items():
            squares[u.module] += pull.square()
    if whole is not None:
        squares[WHOLE] = sum(v for name, v in squares.items() if name != WHOLE)
    return {name: P.cpu() for name, P in KZ.items()}, squares


class Pull:
    """J^T Z of one unit, then J (J^T Z): added up chunk by chunk, output by output."""

    def __init__(self, unit: Unit, job: Job, Z: Tensor, room: Room) -> None:
        self.unit, self.job, self.Z, self.room = unit, job, Z, room
        self.B: Tensor | None = None  # "q p" of what is multiplied by gradients, tile after tile
        self.b: Tensor | None = None  # "q p" of a bias
        self.asked: Tensor | None = None  # sum_c z_c g_c of a chunk, "q n o", for one position
        self.h: Tensor | None = None
        self.moved: Tensor | None = None

    def _one_position(self, c: LayerCapture) -> bool:
        return c.kind == "dense" and c.g.shape[2] == 1

    def _own(self, asked: dict[str, LayerCapture]) -> LayerCapture | None:
        """What is asked of the map, if the unit is one."""
        return None if self.unit.parameter else asked[self.unit.maps[0]]

    def _features(self, asked: dict[str, LayerCapture], whole: dict[str, Tensor], c: int) -> Iterator[Tensor]:
        """Gradients "n p" of output c, some parameters at a time."""
        u = self.unit
        if u.parameter:
            yield shared_gradients(self.job, u, asked)[0] if u.maps else whole[u.parameter][c]
        elif u.weight:
            for A in gradient_tiles(asked[u.maps[0]], self.room):
                yield A[0]

    def add(self, asked: dict[str, LayerCapture], whole: dict[str, Tensor], rows: slice, c: int) -> None:
        u, z = self.unit, self.Z[:, rows, c]
        mine = self._own(asked)
        if mine is not None and u.bias:
            b = z @ bias_gradients(mine)[0]
            self.b = b if self.b is None else self.b.add_(b)
        if mine is not None and u.weight and self._one_position(mine):
            part = z[:, :, None] * mine.g[0, :, 0]
            self.asked, self.h = part if self.asked is None else self.asked.add_(part), mine.h[:, 0]
            return
        found = [z @ A for A in self._features(asked, whole, c)]
        if found:
            B = torch.cat(found, 1)
            self.B = B if self.B is None else self.B.add_(B)

    def end_of_chunk(self) -> None:
        self.moved = None
        if self.asked is not None and self.h is not None:
            B = torch.matmul(self.asked.mT, self.h).flatten(1)  # "q o i"
            self.B = B if self.B is None else self.B.add_(B)
            self.asked = self.h = None

    def push(self, asked: dict[str, LayerCapture], whole: dict[str, Tensor], c: int) -> Tensor:
        """J B of one output of a chunk, "q n"."""
        u, q = self.unit, len(self.Z)
        mine = self._own(asked)
        found: Tensor | float = 0.0
        if mine is not None and u.bias:
            assert self.b is not None
            found = self.b @ bias_gradients(mine)[0].T
        if mine is not None and u.weight and self._one_position(mine):
            assert self.B is not None
            if self.moved is None:
                self.moved = torch.matmul(mine.h[:, 0], self.B.view(q, *mine.W.shape).mT)  # "q n o"
            return found + (self.moved * mine.g[0, :, 0]).sum(2)
        start = 0
        for A in self._features(asked, whole, c):
            assert self.B is not None
            found = found + self.B[:, start:start + A.shape[1]] @ A.T
            start += A.shape[1]
        return found  # type: ignore[return-value]

    def square(self) -> float:
        """|J^T y~|^2 of the last vector."""
        return sum(t[-1].double().square().sum().item() for t in (self.B, self.b) if t is not None)


# ---------------------------------------------------------------------------------------------------------- compressed
# Gradients of random vectors of all examples and outputs, J^T z of each module: whole where they have room side by side, else
# compressed on the fly to a few thousand numbers, from which inner products are had without bias and with an error of their own.
#
# Every entry of a gradient gets a random sign, and entries whose places are equal modulo m are added up: the inner product of two
# such sums is that of the gradients, plus noise of mean 0 and a variance of at most 2 |x|^2 |y|^2 / m. The same signs serve
# several
# m that have no common divisor: two entries fall together in two of them only if they do so modulo their product, so that the
# products of what two of them say of an inner product are those of its square, without the noise's own.

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


# ----------------------------------------------------------------------------------------------------------- estimates

SMALL_SAMPLE = 2 ** 26  # bytes: kernels below this size are never estimated
TURNS = 2  # over the probe in which the gradients of all vectors are had, some modules after others; else they are compressed
SAMPLED = 8  # outputs whose own kernels are looked at when there are too many
SKETCHED, CORRECTING = 32, 16  # vectors that span most of a kernel, and that sample what is left of it
UNRESOLVED = 0.03  # a largest eigenvalue is not reported when its vector is further than this from being one
UNRESOLVED_TOP = ("the largest eigenvalue of so large a kernel was not resolved: fewer examples (Probe(kernel=...)) give it "
                  "exactly")


@dataclass(frozen=True)
class Estimate:
    """A value, and the same with parts of what it rests on left out: the jackknife makes a standard error of them."""

    value: Any
    leaving: Mapping[str, Sequence[Any]]  # by kind of groups


class Estimates(Simple):
    """Estimates of all modules and of the whole model, made together when the first is asked for."""

    def __init__(self, make: Callable[[], Iterator[tuple[str, Estimate]]], groups: Mapping[str, int], remark: Remark) -> None:
        super().__init__(groups, remark)
        self.make = make

    @cached_property
    def known(self) -> dict[str, Estimate]:
        return dict(self.make())

    def value(self, place: str, without: Group | None = None) -> Any:
        if place not in self.known:
            raise Missing(KERNEL)
        known = self.known[place]
        return known.value if without is None else known.leaving[without[0]][without[1]]


# ------------------------------------------------------------------------------------------------ many outputs


class Sketch(OfKernels):
    """|C K C|_F from random vectors of all examples and outputs; y~^T K y~ exactly."""

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        t = Tangents(subject, cotangents)
        q = cotangents.vectors
        compresses = _compresses(t)
        alone = compressed_bytes(t, q) if compresses else 3 * _vectors_bytes(t, q + 1)
        turns = 1 if compresses else sum(1 for _ in parameter_groups(t, q + 1))
        passes = turns * (1 + 2 * (q + (subject.Y is not None))) / 3 * t.n / subject.probe.n
        return Wants(alone=alone, what=f"estimates of kernels over {t.n} examples", passes=passes)

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        t, label = Tangents(subject, cotangents), cotangents.label(subject.survey.outputs)
        groups = {"vectors": min(GROUPS, cotangents.vectors)}
        if _compresses(t):
            m = size(subject, parameters(t, t.units), cotangents.vectors)
            label, groups = f"{label}, gradients compressed to {SKETCHES} x {m} numbers", groups | {"sketches": SKETCHES}
        return Estimates(lambda: _sketch(t), groups, Remark(Mark.ESTIMATED, label))


def _compresses(t: Tangents) -> bool:
    """Are gradients compressed? Where those of all vectors take more than two turns to be had."""
    vectors = t.cotangents.vectors + 1
    return _vectors_bytes(t, vectors) > t.subject.memory // 3 or sum(1 for _ in parameter_groups(t, vectors)) > TURNS


def _sketch(t: Tangents) -> Iterator[tuple[str, Estimate]]:
    vectors, every, lacking, compresses = Vectors(t), Grams(), DRAWN.why_not(t.subject, t.cotangents), _compresses(t)
    for units in [t.units] if compresses else parameter_groups(t, vectors.q + 1):
        gradients = _pulled(t, vectors, units, Compressed if compresses else Whole)
        mine = gradients.grams(vectors)
        every.products |= mine.products
        every.squares |= mine.squares
    if t.subject.layers is None and every.products:
        every.products[WHOLE] = summed(every.products)
        if vectors.labelled:
            every.squares[WHOLE] = summed(every.squares)
    energy = vectors.energy if vectors.labelled else math.nan
    for name, T in every.products.items():
        yield name, _of_products(T, (every.squares[name], energy) if vectors.labelled else None, lacking)


def _of_products(T: Float[Tensor, "r q q"], labelled: tuple[float, float] | None, lacking: str) -> Estimate:
    """From inner products of the gradients of random vectors: of all, without some of the vectors, without a sketch."""
    q = T.shape[1]
    group = torch.arange(q) % min(GROUPS, q)
    squares = squared(T)

    def value(P: Tensor) -> CentredKernel:
        return CentredKernel(max(_off_diagonal(P), 0.0) ** 0.5 if len(P) > 1 else math.nan, labelled, math.nan, lacking)
    fewer = [value(squared(T, torch.arange(len(T)) != r)) for r in range(len(T))] if len(T) > 1 else []
    leaving = [value(squares[group != g][:, group != g]) for g in range(int(group.max()) + 1)]
    return Estimate(value(squares), {"vectors": leaving, "sketches": fewer})


def _pulled(t: Tangents, vectors: Vectors, units: Sequence[Unit], kind: type[Whole | Compressed]) -> Whole | Compressed:
    """The gradients of all vectors. Where a vocabulary's matrix is used in another way for some examples than for the first, it
    is compressed as the others are, if there is room."""
    if kind is Compressed and (need := compressed_bytes(t, vectors.q)) > t.subject.memory:
        raise Missing(f"what is done with the outputs of a vocabulary's matrix differs between examples, and its gradients, "
                      f"compressed, take memory='{show_bytes(need + t.subject.fixed)}'")
    gradients = kind(t, units, len(vectors), vectors.labelled)
    try:
        _pull(t, vectors, gradients)
    except NotItself as why:
        no_table(t, why.parameter)
        return _pulled(t, vectors, units, kind)
    return gradients


def _pull(t: Tangents, vectors: Vectors, gradients: Whole | Compressed) -> None:
    """J^T z~ of each module for every vector (and for the labels, last): plain gradients."""
    subject = t.subject
    room = subject.memory - compressed_bytes(t, vectors.q) if isinstance(gradients, Compressed) else subject.memory // 3
    each = subject.itemsize * (2 * subject.survey.graph + 6 * subject.survey.outputs) + 1
    size = fitting(room + each, each, min(subject.probe.chunk, t.n), subject.survey.drawn)
    for chunk in chunks(subject.source, t.x, size, title="kernels"):
        with timed(subject.device) as seconds:
            run = recorded(subject, chunk.x, chunk.rows.start, gradients.maps)
        subject.forwards.add(chunk.n, seconds())
        check_finite(run.f)
        for v in range(len(vectors)):
            gradients.add(v, run, vectors(v, chunk.rows).to(run.f.device))


def _off_diagonal(squares: Float[Tensor, "q q"]) -> float:
    """Their mean over v != w."""
    q = len(squares)
    return ((squares.sum() - squares.diagonal().sum()) / (q * (q - 1))).item()


def _vectors_bytes(t: Tangents, vectors: int) -> int:
    """Of a module's products with so many vectors: all its parameters for each."""
    subject = t.subject
    return max((vectors * subject.itemsize * sum(subject.state[p].numel() for p in parameters(t, units))
                for units in t.by_module.values()), default=0)


# ----------------------------------------------------------------------------------------------- many examples


class Free(OfKernels):
    """|C K C|_F and its largest eigenvalue without K, y~^T K y~ exactly."""

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        t = Tangents(subject, cotangents)  # a module's products in a third of the memory, a pair of examples in another
        held = max(_vectors_bytes(t, 2 * 2 * (SKETCHED + CORRECTING)), t.least("trace"))
        turns = sum(1 for _ in parameter_groups(t, 2 * 2 * (SKETCHED + CORRECTING)))
        return Wants(alone=3 * held, what=f"estimates of kernels over {t.n} examples",
                     passes=turns * 4 * (1 + t.v) / 3 * t.n / subject.probe.n)

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        t = Tangents(subject, cotangents)
        label = f"estimated by products with the kernel of {t.n} examples, which is not formed"
        return Estimates(lambda: _free(t), {"vectors": GROUPS}, Remark(Mark.ESTIMATED, label))


def operations(t: Tangents) -> tuple[float, float]:
    """(of the exact kernel, of its estimate)"""
    subject, survey = t.subject, t.subject.survey
    q = SKETCHED + 2 * (SKETCHED + CORRECTING)
    exact = make_plan(t.request(subject.wanted, "full"), 2 ** 62).operations
    maps = [survey.maps[k] for u in subject.wanted for k in u.maps]
    through = t.n * (1 + t.v) * forward_operations(survey)
    own = sum(2 * t.n * (m.width * m.shape[-1] * t.v + t.v * q * m.entries if m.unfolded or
                         m.width > m.shape[0] else q * m.entries) for m in maps)
    return exact, 4 * through + 2 * own


def _free(t: Tangents) -> Iterator[tuple[str, Estimate]]:
    """Twice K~ times some vectors: the first products span where most of K~ acts, the second are exact there and sampled in what
    is left (Hutch++ for the trace of K~^2)."""
    subject = t.subject
    y = None if subject.Y is None else centred(t, subject.Y[t.rows])
    draw = torch.Generator().manual_seed(0)
    first, second = (_all_centred(t, torch.randn(q, t.n, t.v, generator=draw, dtype=torch.float64))
                     for q in (SKETCHED, CORRECTING))
    names = [*t.by_module, *([WHOLE] if subject.layers is None else [])]
    last = torch.zeros(t.n, t.v, dtype=torch.float64) if y is None else y
    once, quadratic = _centred_products(t, dict.fromkeys(names, torch.cat([first, last[None]])), len(first))
    spans = {name: linalg.span_and_rest(Y.flatten(1), second.flatten(1)) for name, Y in once.items()}
    again = {name: _all_centred(t, torch.cat([Q, Z]).view(-1, t.n, t.v)) for name, (Q, Z) in spans.items()}
    twice, _ = _centred_products(t, again, len(again[names[0]]))
    for name in names:
        labelled = None if y is None else (quadratic[name], y.square().sum().item())
        (Q, Z), K = spans[name], twice[name].flatten(1)
        yield name, _hutch(linalg.Sketch(Q, Z, K[:len(Q)], K[len(Q):]), labelled)


def _all_centred(t: Tangents, Z: Tensor) -> Tensor:
    return torch.stack([centred(t, z) for z in Z])


def _centred_products(t: Tangents, Z: Mapping[str, Tensor], used: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    KZ, squares = products(t, Z, used)
    return {name: _all_centred(t, P) for name, P in KZ.items()}, squares


def _hutch(K: linalg.Sketch, labelled: tuple[float, float] | None) -> Estimate:
    """From products with vectors that span most of a kernel, and with others that sample the rest. The largest eigenvalue on
    their span is at most that of the kernel; it is reported where its vector is nearly one of the kernel's."""
    top, off = K.top()
    top = top if off <= UNRESOLVED * top else math.nan
    group = torch.arange(len(K.Z)) % GROUPS

    def value(keep: Tensor) -> CentredKernel:
        return CentredKernel(K.norm(keep), labelled, top, UNRESOLVED_TOP)
    return Estimate(value(group >= 0), {"vectors": [value(group != g) for g in range(GROUPS)]})


# ---------------------------------------------------------------------------------------- one output at a time


@dataclass(frozen=True)
class Diagonal(OfKernels):
    """Each output's own kernels: of all outputs, or of some drawn from those that have labels. ``sums``: what is to be known of
    them ("v n n") and of their labels ("n v"); ``leaving``: the same with each group of examples left out."""

    sums: Callable[[Tensor, Tensor], Any] = of_diagonal
    leaving: Callable[[Tensor, Tensor, int], Sequence[Any]] = of_diagonal_leaving
    of_drawn: Callable[[Tensor, Tensor, int], Sequence[Any]] = of_drawn_leaving  # the same where outputs are drawn
    labelled: bool = True  # are labels needed?
    by_labels: bool = False  # does it grow with the number of examples that have an output as their label?

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        t = Tangents(subject, cotangents)
        v = t.v if cotangents.exact else SAMPLED
        least = t.least("diagonal", v)
        least = min(least, stored.least(t)) if not cotangents.exact and stored.can_be_kept(t) else least
        passes = stored.passes(t, v) if not cotangents.exact and stored.fewer_passes(t, v) else t.passes("diagonal", v)
        return Wants(alone=8 * v * t.n ** 2 + least + t.audited, passes=passes * t.n / subject.probe.n,
                     what=f"estimates of kernels over {t.n} examples")

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        t = Tangents(subject, cotangents)
        if subject.Y is None and self.labelled:
            return Estimates(_unlabelled, {"examples": 0}, Remark())
        k = subject.survey.outputs
        sample = Sample(torch.arange(k), k, ()) if cotangents.exact else self._drawn(t, k, cotangents.seed)
        among = f"{sample.among} that have labels" if subject.Y is not None else str(sample.among)
        remark = Remark(Mark.ESTIMATED, f"{len(sample.picked)} outputs drawn of {among}") if sample.drawn else Remark()
        groups = {**({"outputs": len(sample.chosen)} if sample.drawn else {}), **t.groups}
        return Estimates(lambda: self._estimates(t, sample), groups, remark)

    def _drawn(self, t: Tangents, outputs: int, seed: int) -> Sample:
        """Of those that have labels; without labels any output may be drawn."""
        Y, draw = t.subject.Y, torch.Generator().manual_seed(seed)
        known = counts(Y, t.rows, t.groups["examples"]) if self.by_labels and Y is not None else None
        if known is not None:
            return by_labels(*known, SAMPLED, draw)
        return uniform(torch.arange(outputs) if Y is None else having_labels(Y, t.rows).nonzero().flatten().cpu(), SAMPLED, draw)

    def _estimates(self, t: Tangents, sample: Sample) -> Iterator[tuple[str, Estimate]]:
        if not len(sample.picked):
            raise Missing(NO_LABELS)
        total: Tensor | None = None
        Y = columns(t.subject.Y, t.rows, sample.picked).to(t.subject.home)
        for name, kernel in self._kernels(t, sample.picked):
            K = in_range(kernel, t.subject)
            if t.subject.layers is None:
                total = K.clone() if total is None else total.add_(K)
            yield name, self._estimate(t, K, Y, sample)
        if total is not None:
            yield WHOLE, self._estimate(t, total, Y, sample)

    def _kernels(self, t: Tangents, picked: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Of each module, of all outputs or of some."""
        if t.cotangents.exact:
            return t.anew("diagonal")
        chosen = tuple(picked.tolist())
        if stored.fewer_passes(t, len(chosen)):
            return stored.one_at_a_time(t, chosen)
        return t.anew("diagonal", SomeOutputs(chosen))

    def _estimate(self, t: Tangents, K: Tensor, Y: Tensor, sample: Sample) -> Estimate:
        """Outputs that were drawn and examples are left out apart from each other: their variances add."""
        value, outputs = self.sums(K, Y), torch.arange(len(K), device=K.device)
        if not sample.drawn:
            return Estimate(value, {"examples": self.leaving(K, Y, t.groups["examples"])})
        groups = {"outputs": [self.sums(K[outputs != i], Y[:, outputs != i]) for i in sample.chosen],
                  "examples": self.of_drawn(K, Y, t.groups["examples"])}
        if sample.weights is None:
            return Estimate(value, groups)
        weights = {"outputs": sample.without_chosen, "examples": sample.without_examples}
        weighted = {kind: [replace(part, weights=w) for part, w in zip(parts, weights[kind], strict=True)]
                    for kind, parts in groups.items()}
        return Estimate(replace(value, weights=sample.weights), weighted)


def _unlabelled() -> Iterator[tuple[str, Estimate]]:
    raise Missing(NO_LABELS)
    yield


SKETCH, FREE, DIAGONAL = (Sketch("sketched_kernel"), Free("products_with_the_kernel"),
                          Diagonal("kernels_of_single_outputs", by_labels=True))

# -------------------------------------------------------------------------------- what they stand in for


def formed(t: Tangents, reason: str) -> bool:
    """Is the kernel itself formed? When it fits and is not dearer than its estimate."""
    if reason or not t.cotangents.whole or t.bytes() <= SMALL_SAMPLE:
        return not reason
    exact, estimate = operations(t)
    return t.bytes() + t.least() <= t.subject.memory and exact <= estimate


def one_at_a_time(subject: Subject, cotangents: Cotangents, reason: str) -> bool:
    """Are each output's own kernels made one after another, in passes of their own? Where the whole kernel is not formed; and of
    the initial network, because captures that are kept for a whole kernel would be kept for good."""
    return not formed(Tangents(subject, cotangents), reason) or (bool(subject.origin) and cotangents.whole)


def _same_output_estimate(subject: Subject, cotangents: Cotangents, reason: str) -> Statistic | None:
    return DIAGONAL if one_at_a_time(subject, cotangents, reason) else None


def _centred_estimate(subject: Subject, cotangents: Cotangents, reason: str) -> Statistic | None:
    if not cotangents.exact:
        return SKETCH if DRAWN.why_not(subject, cotangents) else DRAWN
    return None if formed(Tangents(subject, cotangents), reason) else FREE


SAME_OUTPUT = Derived("same_output", same_output, (TANGENT_KERNEL, LABELS), same_output_leaving, _same_output_estimate)
CENTRED_KERNEL = Derived("centred_kernel", centred_kernel, (TANGENT_KERNEL, LABELS), centred_kernel_leaving, _centred_estimate)
