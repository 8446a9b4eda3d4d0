"""Centred tangent kernels of many outputs from gradients of random vectors, and the choice between all ways to a kernel.

|C K C|_F^2 is the mean of (z^T C K C z')^2 over independent random vectors z != z' of all examples and outputs, without bias;
y~^T K y~ is exact (SKETCH). The other sketch, of combinations of each example's outputs, also gives the largest eigenvalue
(output_sketch.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import WHOLE, Mark, Remark, show_bytes
from richter.core.values import SMALL, give_back
from richter.instrument.capture import Call, Pass, select, to_device, weight_bytes
from richter.instrument.cotangents import Cotangents
from richter.instrument.statistics.frame import GROUPS, Derived, Gathering, Missing, OfKernels, Statistic, Wants
from richter.instrument.statistics.kernels import (
    BLOCKS,
    LABELS,
    TANGENT_KERNEL,
    CentredKernel,
    Estimate,
    Estimates,
    Tangents,
    centred_kernel,
    centred_kernel_leaving,
)
from richter.instrument.statistics.output_sketch import DRAWN
from richter.instrument.stream import by_example, check_finite, chunks, fitting, steps, timed
from richter.instrument.subject import Subject
from richter.instrument.survey import passed
from richter.kernels.contract import Unit

# ---------------------------------------------------------------------------------------------------- the random vectors


class Vectors:
    """Random signs for every output of every example, which are kept as bits, and the labels last, each minus its mean over the
    outputs that count."""

    def __init__(self, t: Tangents) -> None:
        self.t, self.k, self.q, self.labelled = t, t.subject.survey.outputs, t.cotangents.vectors, t.subject.targets.Y is not None
        self.dtype = torch.float64 if t.n * self.k * self.q <= SMALL else t.subject.network.dtype
        self.bits = [[np.packbits(t.cotangents.signs([i], self.k, [v]).numpy().reshape(-1) > 0) for i in t.rows.tolist()]
                     for v in range(self.q)]
        self.means = [self._mean(v) for v in range(len(self))]

    def __len__(self) -> int:
        return self.q + self.labelled

    def _signs(self, v: int, rows: slice) -> Tensor:
        """Random signs of a vector on some examples, as int8."""
        return torch.stack([torch.from_numpy(np.unpackbits(bits, count=self.k).view(np.int8)).mul_(2).sub_(1)
                            for bits in self.bits[v][rows]])

    def _plain(self, v: int, rows: slice) -> Float[Tensor, "n k"]:
        """A vector before its mean is subtracted, in a tensor of its own."""
        if v < self.q:
            return self._signs(v, rows).to(self.dtype)
        return self.t.subject.targets.Y[self.t.rows[rows]]  # type: ignore[index]

    def _counted(self, rows: slice) -> Tensor | None:
        """Mask of the outputs that count, of these rows; None if all do."""
        counted = self.t.subject.targets.counted
        return None if counted is None else counted[self.t.rows[rows]]

    def _mean(self, v: int) -> float:
        """Mean of a random vector over the outputs that count."""
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
        """Some of the classes for all tokens of all examples, in single precision: a row for each token."""
        parts = []
        for i in range(self.t.n):
            rows, counted = slice(i, i + 1), self._counted(slice(i, i + 1))
            plain = self._signs(v, rows) if v < self.q else self._plain(v, rows)
            z = plain.view(-1, classes)[:, some].float() - self.means[v]
            parts.append(z if counted is None else z * counted.view(-1, classes)[:, some].to(z))
        return torch.cat(parts)

    @property
    def energy(self) -> float:
        """Squared norm |y~|^2 of the centred labels."""
        return sum(self(self.q, slice(i, i + 1)).square().sum().item() for i in range(self.t.n))


# ---------------------------------------------------------------------------------------------- gradients of the vectors
# J^T z of each module: whole where the gradients of all vectors fit side by side, else compressed while they are made. A
# compressed gradient has a few thousand numbers: every entry gets a random sign, and entries whose places are equal modulo m are
# added up. The inner product of two such sums is that of the gradients, plus noise of mean 0 and a variance of at most
# 2 |x|^2 |y|^2 / m. The same signs serve several m without a common divisor: two entries meet in two of them only if their places
# are equal modulo the product, so products of what two of them say of an inner product are right for its square, without noise.

SKETCHES = 6  # each can be left out for an error, which would be too uncertain with fewer
SIZES = {4096: (4093, 4091, 4079, 4073, 4057, 4051), 2048: (2039, 2029, 2027, 2017, 2011, 2003),  # primes below each
         1024: (1021, 1019, 1013, 1009, 997, 991), 256: (251, 241, 239, 233, 229, 227)}
TILE = 2 ** 22  # entries that are squared in double precision at a time
TABLE = 1 << 20  # the number of an example that no probe has: its signs are those of the gradients' entries
TURNS = 2  # gradients are compressed if those of all vectors take more passes over the probe than this


@dataclass
class Grams:
    """For each module, inner products of the gradients of all vectors, "sketches q q" (one sketch if they are exact), and the
    square of the gradient of the labels."""

    products: dict[str, Float[Tensor, "r q q"]] = field(default_factory=dict)
    squares: dict[str, float] = field(default_factory=dict)

    def add(self, module: str, T: Float[Tensor, "r q q"], square: float | None) -> None:
        self.products[module] = T if module not in self.products else self.products[module] + T
        if square is not None:
            self.squares[module] = self.squares.get(module, 0.0) + square


class Whole:
    """Gradients "v p" of some modules."""

    maps = ()

    def __init__(self, t: Tangents, units: Sequence[Unit], vectors: int, labelled: bool) -> None:
        self.subject, self.names, self.labelled = t.subject, t.parameters(units), labelled
        dtype, device = self.subject.network.dtype, self.subject.device
        self.B = [torch.zeros(vectors, p.numel(), dtype=dtype, device=device) for p in self.places]

    @property
    def places(self) -> list[Tensor]:
        return [self.subject.state[k] for k in self.names]

    def add(self, v: int, run: Pass, z: Tensor) -> None:
        for total, d in zip(self.B, run.backward(z, self.places)[1], strict=True):
            total[v] += d.reshape(-1)

    def add_grams(self, grams: Grams, vectors: Vectors) -> None:
        """Add the Gram matrices of the sketched gradients of each module, without compression."""
        parts: dict[str, list[Tensor]] = {}
        for name, b in zip(self.names, self.B, strict=True):
            parts.setdefault(name.rpartition(".")[0], []).append(b)
        self.B = []
        for module in list(parts):
            B = torch.cat(parts.pop(module), 1)
            T = (B @ B.T).double()
            q = len(T) - self.labelled
            grams.add(module, T[None, :q, :q], T[-1, -1].item() if self.labelled else None)


class Compressed:
    """Gradients of all modules at once, each parameter's in ``SKETCHES`` sums of its signed entries; small parameters, and those
    of a vocabulary, are not compressed. The gradient of the labels is whole."""

    def __init__(self, t: Tangents, units: Sequence[Unit], vectors: int, labelled: bool) -> None:
        subject = t.subject
        self.tables = tables_of(t, t.parameters(units))
        self.maps = tuple(k for table in self.tables for k in table.maps)
        self.subject, self.names = subject, without_tables(t.parameters(units), self.tables)
        self.q, self.labelled = vectors - labelled, labelled
        self.sizes = SIZES[size(subject, self.names, self.q)]
        places, dtype, device = self.places, subject.network.dtype, subject.device
        self.small = [p.numel() <= sum(self.sizes) for p in places]
        self.B = [torch.zeros(self.q, p.numel() if small else sum(self.sizes), dtype=dtype, device=device)
                  for p, small in zip(places, self.small, strict=True)]
        self.y = [torch.zeros(p.numel(), dtype=dtype, device=device) for p in places] if labelled else []
        longest = max((p.numel() for p, small in zip(places, self.small, strict=True) if not small), default=0)
        self.signs = t.cotangents.signs([TABLE], longest + len(places), [0])[0, 0].to(device)

    @property
    def places(self) -> list[Tensor]:
        return [self.subject.state[k] for k in self.names]

    def add(self, v: int, run: Pass, z: Tensor) -> None:
        signals, gradients = run.backward(z, self.places)
        for table in self.tables:
            if v == 0 and not table.is_cotangent(self.subject, run, signals, z):
                raise OtherReadOut(table.parameter)
            table.add(v, self.subject, run.calls, signals, len(z))
        for j, d in enumerate(gradients):
            x = d.reshape(-1)
            if v == self.q:
                self.y[j] += x
            elif self.small[j]:
                self.B[j][v] += x
            else:
                self._fold(self.B[j][v], x * self.signs[j:j + len(x)])

    def _fold(self, total: Tensor, x: Tensor) -> None:
        """Add up entries whose places are equal modulo m, for each m."""
        for part, m in zip(total.split(self.sizes), self.sizes, strict=True):
            whole = len(x) - len(x) % m
            part += x[:whole].view(-1, m).sum(0)
            part[:len(x) - whole] += x[whole:]

    def add_grams(self, grams: Grams, vectors: Vectors) -> None:
        """Add the Gram matrices of the compressed gradients of each module; those of tables are exact."""
        give_back(weight_bytes(self.subject.model))  # what the passes have freed
        for table in self.tables:
            T = table.gram(self.subject, vectors)
            exact = T[None, :self.q, :self.q].expand(SKETCHES, -1, -1)
            grams.add(table.parameter.rpartition(".")[0], exact, T[-1, -1].item() if self.labelled else None)
        for j, (name, small) in enumerate(zip(self.names, self.small, strict=True)):
            parts = [self.B[j]] * SKETCHES if small else self.B[j].split(self.sizes, 1)
            T = torch.stack([(B @ B.T).double() for B in parts])
            square = sum(part.double().square().sum().item() for part in self.y[j].split(TILE)) if self.labelled else None
            grams.add(name.rpartition(".")[0], T, square)


def size(subject: Subject, names: Sequence[str], q: int) -> int:
    """Numbers of a sketch: as many as fit into an eighth of memory, for all parameters and vectors."""
    large = sum(subject.state[k].numel() > min(SIZES) for k in names)
    return next((m for m in SIZES if q * large * SKETCHES * m * subject.itemsize <= subject.memory // 8), min(SIZES))


def compressed_bytes(t: Tangents, q: int) -> int:
    """Bytes of compressed gradients, of those of the labels, and of one example with the gradients of one vector; or, afterwards,
    of some rows of a vocabulary's gradients."""
    names = t.parameters(t.units)
    tables = tables_of(t, names)
    subject, names = t.subject, without_tables(names, tables)
    numbers = [subject.state[k].numel() for k in names]
    m = SIZES[size(subject, names, q)]
    kept = q * sum(min(p, sum(m)) for p in numbers)
    labels = sum(numbers) if subject.targets.Y is not None else 0
    example = 2 * subject.survey.graph + 6 * subject.survey.outputs
    held = sum(table_bytes(t, table, q + 1) for table in tables) + subject.itemsize * (kept + labels)
    rows = max((tile_rows(subject, table.d, q + 1) * (q + 1) * table.d * subject.itemsize for table in tables), default=0)
    return held + max(rows, subject.itemsize * (sum(numbers) + 2 * max(numbers, default=0) + example))


# ------------------------------------------------------------------------------------------------- a vocabulary's matrix
# Its gradients are not compressed: a sketch of them says little, because they have as many directions as there are tokens times
# positions. The gradient in the output of a read-out is the vector itself, and where tokens are looked up few rows are read. So
# what it read, and the gradients in the tokens, are kept, and the gradients of the matrix are made some rows at a time.

SHARE = 6  # one part in so many of memory is for rows of gradients
LARGE = 2 ** 16  # entries from which a matrix is worth it
SAME = 1e-5  # relative


class OtherReadOut(Exception):
    """The gradient in the output of a read-out is not the vector: tokens are masked behind it, or logits clipped."""

    def __init__(self, parameter: str) -> None:
        super().__init__(parameter)
        self.parameter = parameter


@dataclass
class TableParameter:
    """A parameter "tokens d" that is the read-out, or looks tokens up, or both."""

    parameter: str
    readout: str  # the map that writes the logits; empty if there is none
    lookups: tuple[str, ...]
    d: int
    read: list[Tensor] = field(default_factory=list)  # by the read-out, "n s d"
    tokens: list[Tensor] = field(default_factory=list)  # that are looked up, " m", by chunk
    signals: list[list[Tensor]] = field(default_factory=list)  # gradients in them, "m d", for each vector, by chunk

    @property
    def maps(self) -> tuple[str, ...]:
        """Maps of the table: its lookups, and the read-out if it is shared."""
        return self.lookups + ((self.readout,) if self.readout else ())

    def add(self, v: int, subject: Subject, calls: Sequence[Call], g: Sequence[Tensor], n: int) -> None:
        """Keep the gradients of one vector in the tokens of a chunk; with the first one, what was read."""
        parts: list[Tensor] = []
        tokens: list[Tensor] = []
        for k in self.maps:
            uses = [(c, d) for c, d in zip(calls, g, strict=True) if c.name == k]
            for (c, d), layout in zip(uses, subject.survey.maps[k].layouts, strict=True):
                if k != self.readout:
                    parts.append(by_example(c.map.outputs(c.module, d), n, layout).flatten(0, 1).to(subject.network.dtype))
                if v == 0:
                    h = by_example(c.inputs(), n, layout).detach()
                    (self.read if k == self.readout else tokens).append(h.clone() if k == self.readout else h.flatten())
        if v == 0 and self.lookups:
            self.tokens.append(torch.cat(tokens))
        while len(self.signals) <= v:
            self.signals.append([])
        if parts:
            self.signals[v].append(torch.cat(parts).clone())

    def is_cotangent(self, subject: Subject, run: Pass, g: Sequence[Tensor], z: Float[Tensor, "n k"]) -> bool:
        """Is the gradient of <z, f> in the output of the read-out the vector z itself, for every example?"""
        for c, d in zip(run.calls, g, strict=True):
            if c.name == self.readout:
                layout = subject.survey.maps[c.name].layouts[0]
                z = z.to(run.f.dtype).to(d)
                off = by_example(c.map.outputs(c.module, d), len(z), layout).reshape(len(z), -1) - z
                return bool((off.norm(dim=1) <= SAME * z.norm(dim=1)).all())
        return not self.readout

    def gram(self, subject: Subject, vectors: Vectors) -> Float[Tensor, "q q"]:
        """Inner products of the gradients of all vectors, some rows at a time."""
        rows_in_all = subject.state[self.parameter].numel() // self.d
        dtype, device = subject.network.dtype, subject.device
        T = torch.zeros(len(vectors), len(vectors), dtype=torch.float64, device=subject.home)
        H = torch.cat(self.read).flatten(0, 1).to(dtype) if self.read else None
        tokens = torch.cat(self.tokens) if self.tokens else None
        signals = [torch.cat(self.signals.pop(0)) for _ in range(len(self.signals))] if tokens is not None else []
        for rows in steps(rows_in_all, tile_rows(subject, self.d, len(vectors))):
            width = rows.stop - rows.start
            B = torch.zeros(len(vectors), width, self.d, dtype=dtype, device=device)
            inside = None if tokens is None else ((tokens >= rows.start) & (tokens < rows.stop)).nonzero().flatten()
            for v in range(len(vectors)):
                if H is not None:
                    z = vectors.columns(v, rows_in_all, rows).to(device, dtype)
                    torch.mm(z.T, H, out=B[v])
                if tokens is not None and inside is not None:
                    B[v].index_add_(0, tokens[inside] - rows.start, signals[v][inside])
            flat = B.flatten(1)
            T += (flat @ flat.T).to(T)
        return T


def tile_rows(subject: Subject, d: int, vectors: int) -> int:
    """Rows of gradients that are made at a time."""
    return int(max(1, subject.memory // SHARE // (vectors * d * subject.itemsize)))


def table_bytes(t: Tangents, table: TableParameter, vectors: int) -> int:
    """Bytes that are kept: what is read, the gradients in tokens, and the signs as bits."""
    subject, maps = t.subject, t.subject.survey.maps
    kept = sum((vectors * maps[k].width + maps[k].positions * 2) * t.n for k in table.lookups)
    kept += t.n * maps[table.readout].positions * table.d if table.readout else 0
    return subject.itemsize * kept + t.n * subject.survey.outputs // 8 * vectors


def without_tables(names: Sequence[str], tables: Sequence[TableParameter]) -> list[str]:
    """Names without those of tables."""
    return [k for k in names if k not in {table.parameter for table in tables}]


def tables_of(t: Tangents, names: Sequence[str]) -> list[TableParameter]:
    """The large parameters among these that are used as tables and in no other way; found once, on one example."""
    kept = t.subject.kept
    if ("tables", *names) not in kept:
        kept["tables", *names] = [(table.parameter, table.readout, table.lookups, table.d) for table in _find_tables(t, names)]
    return [TableParameter(*known) for known in kept["tables", *names]]


def no_table(t: Tangents, parameter: str) -> None:
    """Forget a table: some examples use it in another way."""
    for key, known in t.subject.kept.items():
        if isinstance(key, tuple) and key[0] == "tables":
            known[:] = [table for table in known if table[0] != parameter]


def _find_tables(t: Tangents, names: Sequence[str]) -> Iterator[TableParameter]:
    """Yield the large embedding tables, which need no gradients of their own size."""
    subject, survey = t.subject, t.subject.survey
    for name in names:
        maps = survey.structured.get(name, ())
        infos = [survey.maps[k] for k in maps]
        numbers = subject.state[name].numel()
        whole = all(m.entries == numbers and m.layouts for m in infos)
        if not maps or numbers < LARGE or subject.state[name].dim() != 2 or not whole:
            continue
        lookups = tuple(k for k in maps if survey.maps[k].kind == "lookup")
        others = [k for k in maps if k not in lookups]
        d = survey.maps[lookups[0]].shape[0] if lookups else survey.maps[others[0]].shape[-1]
        table = TableParameter(name, others[0] if others else "", lookups, d)
        if len(others) <= 1 and (not others or _writes_all(subject, others[0])) and _is_table(t, table):
            yield table


def _writes_all(subject: Subject, name: str) -> bool:
    """Does a map write all outputs, those of a token side by side?"""
    survey = subject.survey
    info, tokens = survey.maps[name], survey.outputs // survey.shape[-1]
    return name in survey.readouts and info.kind == "dense" and len(info.layouts) == 1 and info.shape[0] == survey.shape[-1] \
        and info.positions == tokens and info.width == survey.outputs


def _is_table(t: Tangents, table: TableParameter) -> bool:
    """Are all uses one matrix, and is the gradient in the output of the read-out the cotangent itself?"""
    subject = t.subject
    run = recorded(subject, to_device(select(t.x, slice(0, 1)), subject.device), int(t.rows[0]), table.maps)
    W = {c.name: c.map.matrix(c.module, c.weight.detach()) for c in run.calls}
    tall = [W[k].T if k in table.lookups else W[k] for k in table.maps if k in W]
    if len(tall) != len(table.maps) or any(M.data_ptr() != tall[0].data_ptr() or M.stride() != tall[0].stride() for M in tall):
        return False
    if not table.readout:
        return True
    V = torch.randn(run.f.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(run.f)
    return table.is_cotangent(subject, run, run.backward(V)[0], V.reshape(1, -1))


def recorded(subject: Subject, x: object, seed: int, maps: Sequence[str]) -> Pass:
    """A pass with gradients of weights that remembers these maps alone; derivatives of activations are computed once."""
    survey = subject.survey
    run = passed(subject.network, x, seed, None if survey.differentiates else ())
    return replace(run, calls=[c for c in run.calls if c.name in maps])


# --------------------------------------------------------------------------------------------------------- the statistic


class GradientSketch(OfKernels):
    """|C K C|_F from the gradients of random vectors of all examples and outputs; y~^T K y~ exactly."""

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        t = Tangents(subject, cotangents)
        q = cotangents.vectors
        if _compresses(t):
            turns, alone = 1, compressed_bytes(t, q)
        else:
            turns, alone = len(t.parameter_groups(q + 1)), 3 * (q + 1) * t.largest_gradient
        passes = turns * (1 + 2 * (q + (subject.targets.Y is not None))) / 3 * t.n / subject.probe.n
        return Wants(alone=alone, what=f"estimates of kernels over {t.n} examples", passes=passes)

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        t, label = Tangents(subject, cotangents), cotangents.label(subject.survey.outputs)
        groups = {"vectors": min(GROUPS, cotangents.vectors)}
        if _compresses(t):
            m = size(subject, t.parameters(t.units), cotangents.vectors)
            label, groups = f"{label}, gradients compressed to {SKETCHES} x {m} numbers", groups | {"sketches": SKETCHES}
        return Estimates(lambda: _sketch(t), groups, Remark(Mark.ESTIMATED, label))


SKETCH = GradientSketch("sketched_kernel")


def _compresses(t: Tangents) -> bool:
    """Return whether gradients are so large that the sketch compresses them."""
    vectors = t.cotangents.vectors + 1
    return vectors * t.largest_gradient > t.subject.memory // 3 or len(t.parameter_groups(vectors)) > TURNS


def _sketch(t: Tangents) -> Iterator[tuple[str, Estimate]]:
    """Yield the estimate of each module from a sketch by random vectors."""
    vectors, grams, lacking, compresses = Vectors(t), Grams(), DRAWN.why_not(t.subject, t.cotangents), _compresses(t)
    for units in [t.units] if compresses else t.parameter_groups(vectors.q + 1):
        _gradients(t, vectors, units, Compressed if compresses else Whole).add_grams(grams, vectors)
    if t.subject.layers is None and grams.products:
        grams.products[WHOLE] = torch.stack([*grams.products.values()]).sum(0)
        if vectors.labelled:
            grams.squares[WHOLE] = sum(grams.squares.values())
    energy = vectors.energy if vectors.labelled else math.nan
    for name, T in grams.products.items():
        yield name, _of_products(T, (grams.squares[name], energy) if vectors.labelled else None, lacking)


def _of_products(T: Float[Tensor, "r q q"], labelled: tuple[float, float] | None, lacking: str) -> Estimate:
    """The estimate from inner products of the gradients of random vectors, with groups of vectors and sketches left out."""
    q = T.shape[1]
    group = torch.arange(q) % min(GROUPS, q)
    squares = squared(T)

    def value(P: Float[Tensor, "p p"]) -> CentredKernel:
        p = len(P)  # the mean over v != w
        norm = max(((P.sum() - P.diagonal().sum()) / (p * (p - 1))).item(), 0.0) ** 0.5 if p > 1 else math.nan
        return CentredKernel(norm, labelled, lambda: math.nan, lacking)
    fewer = [value(squared(T, torch.arange(len(T)) != r)) for r in range(len(T))] if len(T) > 1 else []
    leaving = [value(squares[group != g][:, group != g]) for g in range(int(group.max()) + 1)]
    return Estimate(value(squares), {"vectors": leaving, "sketches": fewer})


def squared(T: Float[Tensor, "r q q"], sketches: Tensor | None = None) -> Float[Tensor, "q q"]:
    """The squares of inner products, without bias: products of what different sketches say."""
    if len(T) == 1:
        return T[0].square()
    T = T if sketches is None else T[sketches]
    return (T.sum(0).square() - T.square().sum(0)) / (len(T) * (len(T) - 1))


def _gradients(t: Tangents, vectors: Vectors, units: Sequence[Unit], kind: type[Whole | Compressed]) -> Whole | Compressed:
    """J^T z~ of each module for every vector (and for the labels, last). A vocabulary's matrix that some examples use in another
    way is compressed as the others are, if there is room."""
    if kind is Compressed and (need := compressed_bytes(t, vectors.q)) > t.subject.memory:
        raise Missing("the outputs of a vocabulary's matrix are used differently between examples, and its compressed "
                      f"gradients take memory='{show_bytes(need + t.subject.fixed)}'")
    gradients, subject = kind(t, units, len(vectors), vectors.labelled), t.subject
    room = subject.memory - compressed_bytes(t, vectors.q) if kind is Compressed else subject.memory // 3
    each = subject.itemsize * (2 * subject.survey.graph + 6 * subject.survey.outputs) + 1
    at_once = fitting(room + each, each, min(subject.probe.chunk, t.n), subject.survey.drawn)
    try:
        for chunk in chunks(subject.network, t.x, at_once, title="kernels"):
            with timed(subject.device) as seconds:
                run = recorded(subject, chunk.x, chunk.rows.start, gradients.maps)
            subject.forwards.add(chunk.n, seconds())
            check_finite(run.f)
            for v in range(len(vectors)):
                gradients.add(v, run, vectors(v, chunk.rows).to(run.f.device))
    except OtherReadOut as why:
        no_table(t, why.parameter)
        return _gradients(t, vectors, units, kind)
    return gradients


# ------------------------------------------------------------------------------------------------------------ the choice

Way = Literal["formed", "blocks", "combinations", "gradients"]


def way(t: Tangents) -> Way:
    """Choose how kernels are computed: formed where they fit into memory or take less than blocks, else exactly in blocks; with
    too many outputs, from combinations of each example's outputs, or from gradients of random vectors. docs/costs.md has the
    table."""
    if t.cotangents.exact:
        small = t.fits or t.bytes() + t.least() <= BLOCKS.wants(t.subject, t.cotangents).alone
        return "formed" if small else "blocks"
    return "gradients" if DRAWN.why_not(t.subject, t.cotangents) else "combinations"


class Centred(OfKernels):
    """The CentredKernel of each module and of the whole model, in the form that belongs to the way to it."""

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        forms: dict[Way, Statistic] = {"formed": FORMED, "blocks": BLOCKS, "combinations": DRAWN, "gradients": SKETCH}
        return forms[way(Tangents(subject, cotangents))].planned(subject, cotangents)

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        raise AssertionError("it is planned as one of its forms")


FORMED = Derived("centred_kernel", centred_kernel, (TANGENT_KERNEL, LABELS), centred_kernel_leaving)
CENTRED_KERNEL = Centred("centred_kernel")
