"""Centred tangent kernels of many outputs from random combinations of each example's own outputs: M = S^T C K C S, where the
columns of S are random signs of one example, scaled so that E[S S^T] = I.

* |C K C|_F^2 without bias: block (a, b) of M is S_a^T (C K C)_ab S_b, whose square is right on average for two examples, and for
  different draws of the same example;
* y~^T K y~ exactly: the labels, and ones, are two more combinations;
* the largest eigenvalue l from two numbers that bracket it: the largest eigenvalue u of M, which is too large on average, and the
  quotient d of its vector with draws that were left out, which is too small (no vector does better than the first one). To second
  order in S S^T - I both are off by as much, whatever S is, so that u d = l^2. For many similar draws, as in a sample covariance,
  this holds for every eigenvalue that stands out: d = 1 / (u m^2) by the oracle of nonlinear shrinkage [Ledoit and Peche 2011],
  where m, the limit of the mean of 1 / (t - u) over all other eigenvalues t of M, is -1 / l outside of the bulk [where the others
  are 1, Baik and Silverstein 2006: u = l + c l / (l - 1)]. Draws of very different examples are not similar: with all other
  eigenvalues in a fifth of the examples and d / u = 0.65, the root of u d is 7 % too small. Where the two numbers lie too far
  apart, the eigenvalue does not stand out, and there is no number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from richter import linalg
from richter.core import Mark, Remark, show_bytes
from richter.instrument.cotangents import Cotangents, Use
from richter.instrument.statistics.frame import GROUPS, Gathering, Group, Missing, OfKernels, Simple, Wants, finite, in_range
from richter.instrument.statistics.kernels import KERNEL, CentredKernel, Tangents
from richter.instrument.subject import Subject
from richter.kernels.contract import forward_operations

STANDS_OUT = 0.5  # least d / u of a largest eigenvalue that is reported
CROWD = 3  # at most so many other eigenvalues of M may be larger than it; a multiple eigenvalue has more
CLOSE, ROUGH = 1e-5, 1e-3  # residuals of an eigenvector, relative to its eigenvalue: for values, and for standard errors
ROOM = 1.2  # computing the kernel of a vocabulary's matrix took up to 1.13 times the planned memory
NOT_OUT = ("the largest eigenvalue of the kernel of all outputs does not stand out of the others in a sketch of them: pick at "
           "most 64 outputs with output=, e.g. lambda out: out[:, -1, :64]")
TOP, FEWER = "needs the largest eigenvalue of the kernel of all outputs", "pick at most 64 outputs"
FEW, DEAR = 2e11, 20  # operations that are never too many; passes of the probe beyond which this sketch costs too much
READ_OUT = ("the kernel of a read-out has its largest eigenvalue once per class, and a sketch of this many outputs cannot "
            "resolve it: pick at most 64 with output=, e.g. lambda out: out[:, -1, :64]")


@dataclass(frozen=True)
class Combined(Cotangents):
    """Random signs of each example's outputs, divided by the root of their number; then ones; then the labels."""

    signs_of: Cotangents
    draws: int
    labelled: bool
    exact = False

    @property
    def looks(self) -> bool:  # type: ignore[override]
        """Return whether cotangents depend on the labels."""
        return self.labelled

    def count(self, outputs: int, use: Use, Y: Tensor | None = None) -> int:
        """Number of random combinations, and the sums over outputs and labels."""
        return self.draws + 1 + self.labelled

    def rows(self, f: Float[Tensor, "n k"], Y: Tensor | None, examples: Sequence[int], block: slice,
             use: Use) -> Float[Tensor, "v n k"]:
        """Random combinations of outputs, then their sum, then the labels."""
        V = [self._row(v, f, Y, examples) for v in range(*block.indices(self.count(f.shape[1], use)))]
        return torch.stack(V) if V else f.new_zeros(0, *f.shape)

    def _row(self, v: int, f: Float[Tensor, "n k"], Y: Tensor | None, examples: Sequence[int]) -> Float[Tensor, "n k"]:
        """One combination: random signs, ones, or the labels."""
        if v < self.draws:
            return self.signs_of.signs(examples, f.shape[1], [v])[0].to(f) / self.draws ** 0.5
        if v == self.draws:
            return torch.ones_like(f)
        assert Y is not None
        return Y.to(f)


class SketchSums(NamedTuple):
    """For each example: the number of outputs that count, the sums of its combinations over them, and the sum and the sum of
    squares of its labels."""

    number: Float[Tensor, " n"]
    signs: Float[Tensor, "m n"]
    labels: Float[Tensor, " n"] | None
    squares: Float[Tensor, " n"] | None


def sums(t: Tangents, cotangents: Combined) -> SketchSums:
    """The sums of all examples, one after another, because all signs together may not fit."""
    subject, k, targets = t.subject, t.subject.survey.outputs, t.subject.targets
    parts: list[tuple[Tensor, ...]] = []
    for i in t.rows:
        keep = torch.ones(1, k, dtype=torch.float64) if targets.counted is None else targets.counted[i[None]].cpu().double()
        S = cotangents.signs_of.signs([int(i)], k, range(cotangents.draws))[:, 0].double() / cotangents.draws ** 0.5
        Y = None if targets.Y is None else targets.Y[i[None]].cpu().double() * keep
        parts.append((keep.sum(1), S @ keep.T, *(() if Y is None else (Y.sum(1), Y.square().sum(1)))))
    number, signs, *labels = (torch.cat(p, -1).to(subject.home) for p in zip(*parts, strict=True))
    return SketchSums(number, signs, *(labels or (None, None)))


# ------------------------------------------------------------------------------------------------------ small matrices


class Bracket(NamedTuple):
    """Bounds of a largest eigenvalue: with each group of draws left out, the largest eigenvalue of M (``above``), and the
    quotient of its vector with the draws of that group (``below``)."""

    above: list[float]
    below: list[float]
    whole: float  # the largest eigenvalue of M
    vector: Float[Tensor, " r"]
    directions: float  # the number of other eigenvectors that it is mixed with
    others: Float[Tensor, " k"]  # eigenvalues of M that are not much smaller

    @property
    def value(self) -> float:
        return math.sqrt(_mean(self.above) * _mean(self.below))

    def without(self, group: int) -> float:
        """Largest eigenvalue from all draws but one group."""
        return math.sqrt(self.above[group] * _mean([d for g, d in enumerate(self.below) if g != group]))

    @property
    def stands_out(self) -> bool:
        """Return whether the largest eigenvalue stands out from the others, so that the sketch brackets it."""
        larger = self.others > self.whole * self.value / _mean(self.above) if self.whole else self.others > 0
        return _mean(self.below) >= STANDS_OUT * _mean(self.above) and int(larger.sum()) <= CROWD

    @property
    def turn(self) -> float:
        """The standard error, relative to the value, that comes from its vector: to second order in S S^T - I, log(u / d) / 2 is
        a sum over the other directions, and the value has its deviation from the mean: each term that of a squared normal."""
        return max(0.0, math.log(_mean(self.above) / _mean(self.below))) * math.sqrt(0.5 / self.directions)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass(eq=False)
class Small:
    """The kernel K of one module through the combinations: random ones, ones, and labels."""

    K: Float[Tensor, "v n v n"]
    sums: SketchSums
    draws: Tensor  # the group of each draw, "m"
    examples: Tensor  # the group of each example, "n"
    lacking: str = ""  # why there is no largest eigenvalue, where that is known in advance

    @property
    def m(self) -> int:
        """Number of random combinations."""
        return len(self.sums.signs)

    def centred(self, keep: Float[Tensor, " n"]) -> Float[Tensor, "r r"]:
        """S^T C K C S with C = I - 11^T/N over the outputs that count of the examples ``keep``; it has rows for all examples."""
        m = self.m
        a = self.sums.signs / (self.sums.number @ keep)
        b = self.K[:m, :, m] @ keep - a * (keep @ self.K[m, :, m] @ keep / 2)
        a, b = a.flatten(), b.flatten()
        return torch.addmm(self.K[:m, :, :m].reshape(len(a), -1), torch.stack([a, b], 1), torch.stack([b, a]), alpha=-1)

    def labelled(self, keep: Float[Tensor, " n"]) -> tuple[float, float] | None:
        """y~^T K y~ and |y~|^2 of the labels minus their mean, exactly."""
        if self.sums.labels is None or self.sums.squares is None:
            return None
        m, N = self.m, self.sums.number @ keep
        mean = self.sums.labels @ keep / N
        yy, y1, one = (keep @ self.K[i, :, j] @ keep for i, j in ((m + 1, m + 1), (m + 1, m), (m, m)))
        return (yy - 2 * mean * y1 + mean.square() * one).item(), (self.sums.squares @ keep - N * mean.square()).item()

    @cached_property
    def everything(self) -> Float[Tensor, " n"]:
        """Weights that leave no example out."""
        return torch.ones_like(self.sums.number)

    @cached_property
    def M(self) -> Float[Tensor, "r r"]:
        """Centred matrix of all examples and combinations."""
        return self.centred(self.everything)

    def _blocks(self, M: Float[Tensor, "r r"]) -> tuple[Float[Tensor, "m n m n"], Float[Tensor, "m m n"]]:
        """Squares of all entries, and of those within an example, without products of a draw with itself."""
        squares = M.square().view(self.m, -1, self.m, M.shape[1] // self.m)
        same = squares.diagonal(dim1=1, dim2=3)
        return squares, same - torch.diag_embed(same.diagonal(dim1=0, dim2=1)).movedim(0, -1)

    def norm(self, M: Float[Tensor, "r r"], keep: Float[Tensor, " n"]) -> float:
        """|C K C|_F of the examples ``keep``: squares of products of different examples, and of different draws of the same."""
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
        """Estimates of the largest eigenvalue: of all draws, and above and below it from draws inside and outside a sample."""
        M, m, n = self.M, self.m, len(self.examples)
        rows = self.draws.repeat_interleave(n)
        whole = top(M, torch.ones_like(M[0]), linalg.anywhere(len(M), M), CLOSE)
        above, below = [], []
        for g in range(int(self.draws.max()) + 1):
            keep = (rows != g).to(M)
            found, left = top(M, keep, whole.vector, CLOSE), int(keep.sum()) // n
            held_out = (M @ found.vector) * (1 - keep)
            above.append(found.value * m / left)
            below.append((held_out @ held_out).item() / found.value * m / (m - left) if found.value else 0.0)
        return Bracket(above, below, whole.value, whole.vector, *mixed(M, whole))

    def _kernel(self, norm: float, keep: Float[Tensor, " n"], largest: Callable[[Bracket], float]) -> CentredKernel:
        """``largest`` computes the largest eigenvalue from the bracket, if it stands out."""
        def find_top() -> float:
            return largest(self.bracket) if not self.lacking and self.bracket.stands_out else math.nan
        return CentredKernel(norm, self.labelled(keep), find_top, self.lacking or NOT_OUT)

    @cached_property
    def value(self) -> CentredKernel:
        """Kernel quantities of all draws and examples."""
        return self._kernel(self.norm(self.M, self.everything), self.everything, lambda b: b.value)

    def without_draws(self, g: int) -> CentredKernel:
        """Kernel quantities with one group of draws left out."""
        return self._kernel(self.norms_without[g], self.everything, lambda b: b.without(g))

    def without_examples(self, g: int) -> CentredKernel:
        """The largest eigenvalue changes as that of M does."""
        keep = (self.examples != g).to(self.M)

        def largest(b: Bracket) -> float:
            found = top(self.centred(keep), keep.repeat(self.m), b.vector, ROUGH)  # made again: eight would not fit
            return b.value * found.value / b.whole if b.whole else 0.0
        return self._kernel(self.norm(self.centred(keep), keep), keep, largest)

    def turned(self, up: int) -> CentredKernel:
        """The value with the standard error of its vector added or subtracted: a jackknife of these two is that error."""
        return self._kernel(self.value.norm, self.everything, lambda b: b.value * (1 + b.turn if up else 1 - b.turn))


class Top(NamedTuple):
    """A largest eigenvalue, its vector, and the Ritz vectors that Lanczos found, this one last."""

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
    """(sum q)^2 / sum q^2 over all other eigenvalues with q = l / (l_1 - l), and the eigenvalues that Lanczos has found. Those
    above half of the largest one are taken from Lanczos, the rest by their sum and sum of squares."""
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
    """Square root of a number that rounding may have made negative."""
    return finite(square.clamp(min=0).sqrt().item())


# ------------------------------------------------------------------------------------------------------- the statistic


def draws_of(cotangents: Cotangents, n: int) -> int:
    """The number of draws of each example: a fixed number of rows in all (512 with ``random_outputs(64)``), within bounds."""
    v = 2 * cotangents.vectors
    return max(4, min(v // 2, max(v // 8, 8 * v // n)))


def operations(t: Tangents) -> float:
    """Operations to compute the kernels, some examples at a time."""
    return sum(plan.operations for plan in t.plans("full", t.v))


class OutputSketch(OfKernels):
    """A CentredKernel from random combinations of each example's outputs, with groups of examples and of draws to leave out."""

    def combined(self, subject: Subject, cotangents: Cotangents) -> Tangents:
        """Tangents of the kernel examples with random combinations of outputs as cotangents."""
        draws = draws_of(cotangents, len(subject.kernel_rows))
        t = Tangents(subject, Combined(cotangents, draws, subject.targets.Y is not None))
        t.held = 16 * (len(t.by_module) + 1) * (t.n * t.v) ** 2  # the small matrices of all modules, as they are and centred
        return t

    def least(self, subject: Subject, cotangents: Cotangents) -> int:
        """Bytes it takes: all modules' small matrices, one that is being computed, and the audit of captures."""
        t = self.combined(subject, cotangents)
        return int(ROOM * (t.bytes() + t.least() + t.held + t.audited))

    def why_not(self, subject: Subject, cotangents: Cotangents) -> str:
        """Why this sketch is not made: it does not fit into memory, or costs too much. Empty where it is made."""
        t, least = self.combined(subject, cotangents), self.least(subject, cotangents)
        if least > subject.memory:
            return f"{TOP}, which is drawn from memory='{show_bytes(least + subject.fixed)}' on: give that, or {FEWER}"
        number = operations(t)
        passes = number / max(1, 3 * subject.probe.n * forward_operations(subject.survey))  # tables multiply nothing
        if number > FEW and passes > DEAR:
            return (f"{TOP}, and drawing it takes as many operations as {passes:.0f} passes: fewer "
                    f"Probe(kernel_examples=...), or {FEWER}")
        return ""

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        t = self.combined(subject, cotangents)
        return Wants(alone=self.least(subject, cotangents), what=f"the kernel of one layer over {t.n} examples and {t.v} draws",
                     passes=t.passes("full", t.v) * t.n / subject.probe.n)

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _Drawn(self.combined(subject, cotangents))


class _Drawn(Simple):
    """All modules' small matrices, computed when the first is read."""

    def __init__(self, t: Tangents) -> None:
        assert isinstance(t.cotangents, Combined)
        self.t, self.combined = t, t.cotangents
        label = f"{self.combined.draws} random combinations of the {t.subject.survey.outputs} outputs of each example"
        super().__init__({**t.groups, "draws": min(GROUPS, self.combined.draws), "vector": 2}, Remark(Mark.ESTIMATED, label))

    @cached_property
    def known(self) -> dict[str, Small]:
        """Sketched kernels by module, computed once."""
        t, home = self.t, self.t.subject.home
        s = sums(t, self.combined)
        draws, examples = (torch.arange(count, device=home) % self.groups[kind]
                           for count, kind in ((self.combined.draws, "draws"), (t.n, "examples")))
        kernels = ((name, in_range(K.to(home, torch.float64), t.subject)) for name, K in t.anew("full"))
        return {name: Small(K, s, draws, examples, self._lacking(name)) for name, K in t.summed(kernels)}

    def _lacking(self, name: str) -> str:
        """Reason why a module has no largest eigenvalue (it contains the read-out); empty if it may have one."""
        maps = {k for u in self.t.by_module.get(name, []) for k in u.maps}
        return READ_OUT if maps & set(self.t.subject.survey.readouts) else ""

    def value(self, place: str, without: Group | None = None) -> CentredKernel:
        if place not in self.known:
            raise Missing(KERNEL)
        small = self.known[place]
        if without is None:
            return small.value
        kind, g = without
        return {"draws": small.without_draws, "examples": small.without_examples, "vector": small.turned}[kind](g)


DRAWN = OutputSketch("drawn_kernel")
