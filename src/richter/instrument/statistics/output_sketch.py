"""Centred tangent kernels of many outputs, seen through random combinations of each example's own outputs: M = S^T C K C S, where
the columns of S are random signs of one example, divided so that S S^T is the identity on the average.

* |C K C|_F^2 without bias: block (a, b) of M is S_a^T (C K C)_ab S_b, whose square is right on the average for two examples, and
  for different draws of the same one;
* y~^T K y~ exactly: the labels, and ones, are two more combinations;
* the largest eigenvalue l from two numbers that bracket it: that of M, u, which is too large on the average, and what draws left
  out say of its vector, d, which is too small (no vector does better than the first one). To second order in S S^T - I both are
  off by as much, whatever S is, so that u d = l^2. For many draws that are alike, as of a sample covariance, this holds of every
  eigenvalue that stands out of the others, however many these are: d = 1 / (u m^2) by the oracle of nonlinear shrinkage
  [Ledoit and Peche 2011], where m, the limit of the mean of 1 / (t - u) over all other eigenvalues t of M, is -1 / l outside of
  the bulk [where the others are 1, Baik and Silverstein 2006: u = l + c l / (l - 1)]. Draws of examples that differ much are not
  alike: with all others in a fifth of the examples and d / u = 0.65, the root of u d is 7 % too small. Where they lie too far
  apart, the eigenvalue does not stand out, and there is no number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from richter import linalg
from richter.core import WHOLE, Mark, Remark, show_bytes
from richter.instrument.capture import Call, Pass, select, to_device
from richter.instrument.cotangents import Cotangents
from richter.instrument.statistics.frame import GROUPS, Gathering, Group, Missing, OfKernels, Simple, Wants, finite, in_range
from richter.instrument.statistics.kernels import KERNEL, CentredKernel, Tangents
from richter.instrument.stream import by_example, steps
from richter.instrument.survey import passed
from richter.kernels.contract import forward_operations

if TYPE_CHECKING:
    from richter.instrument.cotangents import Use
    from richter.instrument.statistics.sketches import Vectors
    from richter.instrument.subject import Subject

# -------------------------------------------------------------------------------------------------------------- tables
# Gradients of a vocabulary's matrix for random vectors of all examples and outputs, without compression: in the read-out it is
# asked for the vector itself, and where tokens are looked up few of its rows are read. So what it read, and what is asked of the
# tokens, is kept, and the gradients are made some rows at a time. (Sketches of such gradients say little: there are as many
# directions in them as tokens times positions.)

SHARE = 6  # of memory, one part in so many is for rows of gradients
LARGE = 2 ** 16  # entries of a matrix that is worth it
SAME = 1e-5  # relative


class NotItself(Exception):
    """What is asked of a read-out is not what is asked of the outputs: tokens are masked behind it, or logits clipped."""

    def __init__(self, parameter: str) -> None:
        super().__init__(parameter)
        self.parameter = parameter


@dataclass
class Table:
    """A parameter "tokens d" that is the read-out, or looks tokens up, or both."""

    parameter: str
    readout: str  # the map that writes the logits; empty if there is none
    lookups: tuple[str, ...]
    d: int
    read: list[Tensor] = field(default_factory=list)  # by the read-out, "n s d"
    tokens: list[Tensor] = field(default_factory=list)  # that are looked up, " m", by chunk
    asked: list[list[Tensor]] = field(default_factory=list)  # of them, "m d", for each vector, by chunk

    @property
    def maps(self) -> tuple[str, ...]:
        return self.lookups + ((self.readout,) if self.readout else ())

    def add(self, v: int, subject: Subject, calls: Sequence[Call], g: Sequence[Tensor], n: int) -> None:
        """What one vector asks of the tokens of a chunk; at the first one, what was read."""
        parts: list[Tensor] = []
        tokens: list[Tensor] = []
        for k in self.maps:
            mine = [(c, d) for c, d in zip(calls, g, strict=True) if c.name == k]
            for (c, d), layout in zip(mine, subject.survey.maps[k].layouts, strict=True):
                if k != self.readout:
                    parts.append(by_example(c.map.outputs(c.module, d), n, layout).flatten(0, 1).to(subject.source.dtype))
                if v == 0:
                    h = by_example(c.inputs(), n, layout).detach()
                    (self.read if k == self.readout else tokens).append(h.clone() if k == self.readout else h.flatten())
        if v == 0 and self.lookups:
            self.tokens.append(torch.cat(tokens))
        while len(self.asked) <= v:
            self.asked.append([])
        if parts:
            self.asked[v].append(torch.cat(parts).clone())

    def itself(self, subject: Subject, run: Pass, g: Sequence[Tensor], z: Float[Tensor, "n k"]) -> bool:
        """Is what a vector asks of the read-out, of every example, the vector itself?"""
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
        dtype, device = subject.source.dtype, subject.device
        T = torch.zeros(len(vectors), len(vectors), dtype=torch.float64, device=subject.home)
        H = torch.cat(self.read).flatten(0, 1).to(dtype) if self.read else None
        tokens = torch.cat(self.tokens) if self.tokens else None
        asked = [torch.cat(self.asked.pop(0)) for _ in range(len(self.asked))] if tokens is not None else []
        for rows in steps(rows_in_all, tile_rows(subject, self.d, len(vectors))):
            width = rows.stop - rows.start
            B = torch.zeros(len(vectors), width, self.d, dtype=dtype, device=device)
            inside = None if tokens is None else ((tokens >= rows.start) & (tokens < rows.stop)).nonzero().flatten()
            for v in range(len(vectors)):
                if H is not None:
                    z = vectors.columns(v, rows_in_all, rows).to(device, dtype)
                    torch.mm(z.T, H, out=B[v])
                if tokens is not None and inside is not None:
                    B[v].index_add_(0, tokens[inside] - rows.start, asked[v][inside])
            flat = B.flatten(1)
            T += (flat @ flat.T).to(T)
        return T


def tile_rows(subject: Subject, d: int, vectors: int) -> int:
    return int(max(1, subject.memory // SHARE // (vectors * d * subject.itemsize)))


def table_bytes(t: Tangents, table: Table, vectors: int) -> int:
    """Of what is kept: what is read, what is asked of tokens, and the signs as bits."""
    subject, maps = t.subject, t.subject.survey.maps
    kept = sum((vectors * maps[k].width + maps[k].positions * 2) * t.n for k in table.lookups)
    kept += t.n * maps[table.readout].positions * table.d if table.readout else 0
    return subject.itemsize * kept + t.n * subject.survey.outputs // 8 * vectors


def rows_bytes(subject: Subject, table: Table, vectors: int) -> int:
    """Of some rows of gradients."""
    return tile_rows(subject, table.d, vectors) * vectors * table.d * subject.itemsize


def tables_of(t: Tangents, names: Sequence[str]) -> list[Table]:
    """Those among these parameters that are large, and used in no other way; looked at once, on an example."""
    kept = t.subject.kept
    if ("tables", *names) not in kept:
        kept["tables", *names] = [(table.parameter, table.readout, table.lookups, table.d) for table in _seen(t, names)]
    return [Table(*known) for known in kept["tables", *names]]


def no_table(t: Tangents, parameter: str) -> None:
    """It was taken for one, and is used in another way for some examples."""
    for key, known in t.subject.kept.items():
        if isinstance(key, tuple) and key[0] == "tables":
            known[:] = [table for table in known if table[0] != parameter]


def _seen(t: Tangents, names: Sequence[str]) -> Iterator[Table]:
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
        table = Table(name, others[0] if others else "", lookups, d)
        if len(others) <= 1 and (not others or _writes_all(subject, others[0])) and _as_said(t, table):
            yield table


def _writes_all(subject: Subject, name: str) -> bool:
    """Does a map write all outputs, a token's side by side?"""
    survey = subject.survey
    info, tokens = survey.maps[name], survey.outputs // survey.shape[-1]
    return name in survey.readouts and info.kind == "dense" and len(info.layouts) == 1 and info.shape[0] == survey.shape[-1] \
        and info.positions == tokens and info.width == survey.outputs


def _as_said(t: Tangents, table: Table) -> bool:
    """Is what the outputs ask of the read-out what is asked of the outputs, and are all uses one matrix?"""
    subject = t.subject
    run = recorded(subject, to_device(select(t.x, slice(0, 1)), subject.device), int(t.rows[0]), table.maps)
    W = {c.name: c.map.matrix(c.module, c.weight.detach()) for c in run.calls}
    tall = [W[k].T if k in table.lookups else W[k] for k in table.maps if k in W]
    if len(tall) != len(table.maps) or any(M.data_ptr() != tall[0].data_ptr() or M.stride() != tall[0].stride() for M in tall):
        return False
    if not table.readout:
        return True
    V = torch.randn(run.f.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(run.f)
    return table.itself(subject, run, run.backward(V)[0], V.reshape(1, -1))


def recorded(subject: Subject, x: object, seed: int, maps: Sequence[str]) -> Pass:
    """A pass with gradients of weights, that remembers these maps alone; derivatives of activations are computed once."""
    survey = subject.survey
    run = passed(subject.source, x, seed, None if survey.differentiates else ())
    return replace(run, calls=[c for c in run.calls if c.name in maps])


# --------------------------------------------------------------------------------------------------------------- drawn

STANDS_OUT = 0.5  # d / u of a largest eigenvalue that is reported
CROWD = 3  # and so many other eigenvalues of M at most are larger than it: of one that is there often there are more
CLOSE, ROUGH = 1e-5, 1e-3  # residuals of an eigenvector, relative to its eigenvalue: of values, and for standard errors
ROOM = 1.2  # making kernels has been seen to take 1.13 times what is foreseen, of a vocabulary's matrix
NOT_OUT = ("the largest eigenvalue of the kernel of all outputs does not stand out of the others in a sketch of them: pick at "
           "most 64 outputs with output=, e.g. lambda out: out[:, -1, :64]")
TOP, FEWER = "needs the largest eigenvalue of the kernel of all outputs", "pick at most 64 outputs"
FEW, DEAR = 2e11, 20  # operations that are made anyway; passes of the probe beyond which kernels are not drawn
READ_OUT = ("a read-out's kernel has its largest eigenvalue once for every class, and no sketch of so many outputs shows it: "
            "pick at most 64 with output=, e.g. lambda out: out[:, -1, :64]")


@dataclass(frozen=True)
class Combined(Cotangents):
    """Random signs of each example's outputs, divided by the root of their number; then ones; then the labels."""

    signs_of: Cotangents
    draws: int
    labelled: bool
    exact = False

    @property
    def looks(self) -> bool:  # type: ignore[override]
        return self.labelled

    def count(self, outputs: int, use: Use, Y: Tensor | None = None) -> int:
        return self.draws + 1 + self.labelled

    def rows(self, f: Float[Tensor, "n k"], Y: Tensor | None, examples: Sequence[int], block: slice,
             use: Use) -> Float[Tensor, "v n k"]:
        V = [self._row(v, f, Y, examples) for v in range(*block.indices(self.count(f.shape[1], use)))]
        return torch.stack(V) if V else f.new_zeros(0, *f.shape)

    def _row(self, v: int, f: Float[Tensor, "n k"], Y: Tensor | None, examples: Sequence[int]) -> Float[Tensor, "n k"]:
        if v < self.draws:
            return self.signs_of.signs(examples, f.shape[1], [v])[0].to(f) / self.draws ** 0.5
        if v == self.draws:
            return torch.ones_like(f)
        assert Y is not None
        return Y.to(f)


class Sums(NamedTuple):
    """Of each example: how many outputs count, the sums of its combinations over them, its labels' sum and sum of squares."""

    number: Float[Tensor, " n"]
    signs: Float[Tensor, "m n"]
    labels: Float[Tensor, " n"] | None
    squares: Float[Tensor, " n"] | None


def sums(t: Tangents, cotangents: Combined) -> Sums:
    """One example after another: all together may be too many."""
    subject, k = t.subject, t.subject.survey.outputs
    parts: list[tuple[Tensor, ...]] = []
    for i in t.rows:
        keep = torch.ones(1, k, dtype=torch.float64) if subject.counted is None else subject.counted[i[None]].cpu().double()
        S = cotangents.signs_of.signs([int(i)], k, range(cotangents.draws))[:, 0].double() / cotangents.draws ** 0.5
        Y = None if subject.Y is None else subject.Y[i[None]].cpu().double() * keep
        parts.append((keep.sum(1), S @ keep.T, *(() if Y is None else (Y.sum(1), Y.square().sum(1)))))
    number, signs, *labels = (torch.cat(p, -1).to(subject.home) for p in zip(*parts, strict=True))
    return Sums(number, signs, *(labels or (None, None)))


# ------------------------------------------------------------------------------------------------- what small matrices say


class Bracket(NamedTuple):
    """What encloses a largest eigenvalue: with each group of draws left out, the largest one of M, and what the draws of that
    group say of its vector."""

    above: list[float]
    below: list[float]
    whole: float  # the largest eigenvalue of M
    vector: Float[Tensor, " r"]
    directions: float  # how many others it is mixed with
    others: Float[Tensor, " k"]  # eigenvalues of M that are not much smaller

    @property
    def value(self) -> float:
        return math.sqrt(_mean(self.above) * _mean(self.below))

    def without(self, group: int) -> float:
        """From the other draws."""
        return math.sqrt(self.above[group] * _mean([d for g, d in enumerate(self.below) if g != group]))

    @property
    def stands_out(self) -> bool:
        larger = self.others > self.whole * self.value / _mean(self.above) if self.whole else self.others > 0
        return _mean(self.below) >= STANDS_OUT * _mean(self.above) and int(larger.sum()) <= CROWD

    @property
    def turn(self) -> float:
        """The standard error, relative to the value, that its vector brings: by second order in S S^T - I, log(u / d) / 2 is the
        sum of what is mixed in of each other direction, and the value has its deviation from the average, each that of a square
        of a normal number."""
        return max(0.0, math.log(_mean(self.above) / _mean(self.below))) * math.sqrt(0.5 / self.directions)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass(eq=False)
class Small:
    """One module's K, seen through combinations: random ones, ones, and labels; ``group`` of each draw and of each example."""

    K: Float[Tensor, "v n v n"]
    sums: Sums
    draws: Tensor  # the group of each, "m"
    examples: Tensor  # "n"
    lacking: str = ""  # why it has no largest eigenvalue, where that is known before

    @property
    def m(self) -> int:
        return len(self.sums.signs)

    def centred(self, keep: Float[Tensor, " n"]) -> Float[Tensor, "r r"]:
        """S^T C K C S with C = I - 11^T/N over the outputs that count of the examples that are kept; rows of others are there."""
        m = self.m
        a = self.sums.signs / (self.sums.number @ keep)
        b = self.K[:m, :, m] @ keep - a * (keep @ self.K[m, :, m] @ keep / 2)
        a, b = a.flatten(), b.flatten()
        return torch.addmm(self.K[:m, :, :m].reshape(len(a), -1), torch.stack([a, b], 1), torch.stack([b, a]), alpha=-1)

    def labelled(self, keep: Float[Tensor, " n"]) -> tuple[float, float] | None:
        """y~^T K y~ and |y~|^2 of labels minus their mean: exact."""
        if self.sums.labels is None or self.sums.squares is None:
            return None
        m, N = self.m, self.sums.number @ keep
        mean = self.sums.labels @ keep / N
        yy, y1, one = (keep @ self.K[i, :, j] @ keep for i, j in ((m + 1, m + 1), (m + 1, m), (m, m)))
        return (yy - 2 * mean * y1 + mean.square() * one).item(), (self.sums.squares @ keep - N * mean.square()).item()

    @cached_property
    def everything(self) -> Float[Tensor, " n"]:
        return torch.ones_like(self.sums.number)

    @cached_property
    def M(self) -> Float[Tensor, "r r"]:
        return self.centred(self.everything)

    def _blocks(self, M: Float[Tensor, "r r"]) -> tuple[Float[Tensor, "m n m n"], Float[Tensor, "m m n"]]:
        """Squares of all entries, and of those of the same example, of which a draw with itself has none."""
        squares = M.square().view(self.m, -1, self.m, M.shape[1] // self.m)
        same = squares.diagonal(dim1=1, dim2=3)
        return squares, same - torch.diag_embed(same.diagonal(dim1=0, dim2=1)).movedim(0, -1)

    def norm(self, M: Float[Tensor, "r r"], keep: Float[Tensor, " n"]) -> float:
        """|C K C|_F of these examples: the squares of products of different examples, and of different draws of the same one."""
        squares, same = self._blocks(M)
        pairs = squares.sum((0, 2))
        return _root(keep @ pairs @ keep - pairs.diagonal() @ keep + same.sum((0, 1)) @ keep * (self.m / (self.m - 1)))

    @cached_property
    def norms_without(self) -> list[float]:
        """|C K C|_F without each group of draws."""
        squares, same = self._blocks(self.M)
        inside = torch.nn.functional.one_hot(self.draws).to(self.M)
        pairs = squares.sum((1, 3)) - squares.diagonal(dim1=1, dim2=3).sum(2)
        apart, within = linalg.without_each(inside.T @ torch.stack([pairs, same.sum(2)]) @ inside)
        left = self.m - inside.sum(0)
        return [_root(total) for total in (apart + within * left / (left - 1)) * (self.m / left) ** 2]

    @cached_property
    def bracket(self) -> Bracket:
        M, m, n = self.M, self.m, len(self.examples)
        rows = self.draws.repeat_interleave(n)
        whole = top(M, torch.ones_like(M[0]), linalg.anywhere(len(M), M), CLOSE)
        above, below = [], []
        for g in range(int(self.draws.max()) + 1):
            keep = (rows != g).to(M)
            found, left = top(M, keep, whole.vector, CLOSE), int(keep.sum()) // n
            seen = (M @ found.vector) * (1 - keep)
            above.append(found.value * m / left)
            below.append((seen @ seen).item() / found.value * m / (m - left) if found.value else 0.0)
        return Bracket(above, below, whole.value, whole.vector, *mixed(M, whole))

    def _known(self, size: float, keep: Float[Tensor, " n"], largest: Callable[[Bracket], float]) -> CentredKernel:
        """``largest``: made of the bracket when somebody asks, if it encloses a number."""
        def known() -> float:
            return largest(self.bracket) if not self.lacking and self.bracket.stands_out else math.nan
        return CentredKernel(size, self.labelled(keep), known, self.lacking or NOT_OUT)

    @cached_property
    def value(self) -> CentredKernel:
        return self._known(self.norm(self.M, self.everything), self.everything, lambda b: b.value)

    def without_draws(self, g: int) -> CentredKernel:
        return self._known(self.norms_without[g], self.everything, lambda b: b.without(g))

    def without_examples(self, g: int) -> CentredKernel:
        """The largest eigenvalue changes as that of M does."""
        keep = (self.examples != g).to(self.M)

        def largest(b: Bracket) -> float:
            found = top(self.centred(keep), keep.repeat(self.m), b.vector, ROUGH)  # made again: eight would be held
            return b.value * found.value / b.whole if b.whole else 0.0
        return self._known(self.norm(self.centred(keep), keep), keep, largest)

    def turned(self, up: int) -> CentredKernel:
        """With the standard error of its vector added or subtracted: what a jackknife of these two gives is that error."""
        return self._known(self.value.norm, self.everything, lambda b: b.value * (1 + b.turn if up else 1 - b.turn))


class Top(NamedTuple):
    """A largest eigenvalue, its vector, and the directions in which it was found, itself the last of them."""

    value: float
    vector: Float[Tensor, " r"]
    directions: Float[Tensor, "r k"]


def top(M: Float[Tensor, "r r"], keep: Float[Tensor, " r"], start: Float[Tensor, " r"], tolerance: float) -> Top:
    """The largest eigenvalue of a matrix on some of its rows."""
    if not M.any():
        return Top(0.0, torch.zeros_like(start), start[:, None])
    matrix, rows = M.cpu().numpy(), keep.cpu().numpy()
    found = linalg.lanczos(lambda q: linalg.product(matrix, q) * rows, (start * keep).cpu().numpy(), tolerance)
    vector, directions = (torch.from_numpy(z).to(M) for z in (found.vector, found.turns.T @ found.basis))
    return Top(found.value, vector, directions.T)


def mixed(M: Float[Tensor, "r r"], found: Top) -> tuple[float, Float[Tensor, " k"]]:
    """Of the other eigenvalues (sum q)^2 / sum q^2 with q = l / (l_1 - l): those above half of the largest as Lanczos has them,
    the rest by their sum and sum of squares; and these that Lanczos has."""
    if not found.value:
        return 1.0, M.new_zeros(0)
    values = (found.directions * (M @ found.directions)).sum(0)[:-1]
    large = values[values > found.value / 2].clamp(max=found.value * (1 - 1e-3))
    q = large / (found.value - large)
    first = (M.trace() - found.value - large.sum()).clamp(min=0) / found.value
    second = (M.square().sum() - found.value ** 2 - large.square().sum()).clamp(min=0) / found.value ** 2
    squares = q.square().sum() + second
    directions = ((q.sum() + first + second).square() / squares).item() if squares > 0 else 1.0
    return max(1.0, directions), values


def _root(square: Tensor) -> float:
    return finite(square.clamp(min=0).sqrt().item())


# ------------------------------------------------------------------------------------------------------- the statistic


def draws_of(cotangents: Cotangents, n: int) -> int:
    """Of each example: as many as make a fixed number of rows (512 of ``random_outputs(64)``), within bounds."""
    v = 2 * cotangents.vectors
    return max(4, min(v // 2, max(v // 8, 8 * v // n)))


class Seen(Tangents):
    """Kernels of which all modules' are held."""

    @property
    def held(self) -> int:
        """Of small matrices, as they are and centred."""
        return 16 * (len(self.by_module) + 1) * (self.n * self.v) ** 2

    @property
    def memory(self) -> int:
        return max(0, super().memory - self.held)


def operations(t: Seen) -> float:
    """Of making the kernels, some examples at a time."""
    return sum(plan.operations for plan in t.plans("full", t.v))


class Drawn(OfKernels):
    """A CentredKernel from random combinations of each example's outputs, with groups of examples and of draws to leave out."""

    def seen(self, subject: Subject, cotangents: Cotangents) -> Seen:
        draws = draws_of(cotangents, len(subject.kernel_rows))
        return Seen(subject, Combined(cotangents, draws, subject.Y is not None))

    def least(self, subject: Subject, cotangents: Cotangents) -> int:
        """Bytes that it takes: all modules' small matrices, one that is being made, and looking at captures."""
        t = self.seen(subject, cotangents)
        return int(ROOM * (t.bytes() + t.least() + t.held + t.audited))

    def why_not(self, subject: Subject, cotangents: Cotangents) -> str:
        """Why the kernels are not drawn: for want of memory, or because they are dear. Nothing where they are."""
        t, least = self.seen(subject, cotangents), self.least(subject, cotangents)
        if least > subject.memory:
            return f"{TOP}, which is drawn from memory='{show_bytes(least + subject.fixed)}' on: give that, or {FEWER}"
        number = operations(t)
        passes = number / max(1, 3 * subject.probe.n * forward_operations(subject.survey))  # tables multiply nothing
        if number > FEW and passes > DEAR:
            return f"{TOP}, and drawing it takes as many operations as {passes:.0f} passes: fewer Probe(kernel=...), or {FEWER}"
        return ""

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        t = self.seen(subject, cotangents)
        return Wants(alone=self.least(subject, cotangents), what=f"the kernel of one layer over {t.n} examples and {t.v} draws",
                     passes=t.passes("full", t.v) * t.n / subject.probe.n)

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        t = self.seen(subject, cotangents)
        assert isinstance(t.cotangents, Combined)
        draws = t.cotangents.draws
        label = f"{draws} random combinations of the {subject.survey.outputs} outputs of each example"
        return _Drawn(t, {**t.groups, "draws": min(GROUPS, draws), "vector": 2}, Remark(Mark.ESTIMATED, label))


class _Drawn(Simple):
    """All modules' small matrices, made when the first is asked for."""

    def __init__(self, t: Tangents, groups: dict[str, int], remark: Remark) -> None:
        super().__init__(groups, remark)
        self.t = t

    @cached_property
    def known(self) -> dict[str, Small]:
        t, home = self.t, self.t.subject.home
        assert isinstance(t.cotangents, Combined)
        s = sums(t, t.cotangents)
        draws, examples = (torch.arange(count, device=home) % self.groups[kind]
                           for count, kind in ((t.cotangents.draws, "draws"), (t.n, "examples")))
        return {name: Small(K, s, draws, examples, self._lacking(name)) for name, K in self._kernels()}

    def _lacking(self, name: str) -> str:
        maps = {k for u in self.t.by_module.get(name, []) for k in u.maps}
        return READ_OUT if maps & set(self.t.subject.survey.readouts) else ""

    def _kernels(self) -> Iterator[tuple[str, Tensor]]:
        subject = self.t.subject
        whole: Tensor | None = None
        for name, kernel in self.t.anew("full"):
            K = in_range(kernel.to(subject.home, torch.float64), subject)
            if subject.layers is None:
                whole = K.clone() if whole is None else whole.add_(K)
            yield name, K
        if whole is not None:
            yield WHOLE, whole

    def value(self, place: str, without: Group | None = None) -> CentredKernel:
        if place not in self.known:
            raise Missing(KERNEL)
        small = self.known[place]
        if without is None:
            return small.value
        kind, g = without
        return {"draws": small.without_draws, "examples": small.without_examples, "vector": small.turned}[kind](g)


DRAWN = Drawn("drawn_kernel")
