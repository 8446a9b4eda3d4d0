"""Matrices over all trainable parameters that are never formed: Operator, whose value is a function that multiplies by it.

def curvature(f, Y, parameters, vectors):                       # H v of the squared error, summed over these examples
    loss = ((f - Y) ** 2).sum()
    g = torch.autograd.grad(loss, parameters, create_graph=True)
    return torch.autograd.grad(sum((a * v).sum() for a, v in zip(g, vectors)), parameters)

H = Operator("curvature", curvature)
Measure("vHv", lambda H: float(v @ H(v)), needs=(H,))
Measure("trace", lambda t: t, needs=(Trace(H, vectors=32),))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import WHOLE, Mark, Remark
from richter.instrument.capture import differentiable_twice
from richter.instrument.cotangents import Cotangents
from richter.instrument.statistics.frame import (
    APART,
    GROUPS,
    Gathering,
    Group,
    Missing,
    Place,
    Reading,
    Simple,
    Statistic,
    Wants,
    in_range,
)
from richter.instrument.statistics.moments import GroupSums, remark_of
from richter.instrument.stream import check_finite, chunks, fitting, with_siblings
from richter.instrument.subject import Subject
from richter.instrument.survey import map_gradient

# (f "n k" with its graph, Y "n k" or None, parameters, a vector for each) -> a vector for each, summed over these examples
Product = Callable[[Tensor, Tensor | None, Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor | None]]
HIDDEN = "the model adds to .grad in its own backward pass, and these gradients cannot be differentiated again"


@dataclass(frozen=True)
class Operator(Statistic):
    """The mean over the probe's examples of what ``product`` multiplies by. It is not gathered: each product is a pass. Outputs
    that do not count (masked tokens, tokens without a label) come as zeros without a gradient, and so do their labels."""

    name: str
    product: Product
    place: Place = "model"

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        return HIDDEN if subject.survey.accumulates else self

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        return Wants(alone=_each(subject), what="the graph of one example, twice differentiable")

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _Multiplied(Products(subject, self.product))


def _each(subject: Subject) -> int:
    """Bytes of one example: its graph, and the graph of its gradient."""
    return 4 * subject.itemsize * subject.survey.graph


class _Multiplied(Simple):
    def __init__(self, products: Products) -> None:
        super().__init__()
        self.products = products

    def value(self, place: str, without: Group | None = None) -> Products:
        return self.products


@dataclass(frozen=True, eq=False)
class ParameterVectors:
    """Vectors of all trainable parameters of a subject, in their order."""

    subject: Subject

    @cached_property
    def names(self) -> list[str]:
        return [name for name, p in self.subject.model.named_parameters() if p.requires_grad and p.is_floating_point()]

    @property
    def places(self) -> list[Tensor]:
        """Parameters that a vector over all weights is made of."""
        return [self.subject.state[name] for name in self.names]

    @cached_property
    def size(self) -> int:
        """Number of entries of a vector over all weights."""
        return sum(p.numel() for p in self.places)

    def parts(self, v: Float[Tensor, " p"]) -> dict[str, Tensor]:
        """A vector by parameter, each part in its shape."""
        pieces = v.split([p.numel() for p in self.places])
        return {name: piece.view_as(p) for name, piece, p in zip(self.names, pieces, self.places, strict=True)}

    def flat(self, tensors: Sequence[Tensor | None]) -> Float[Tensor, " p"]:
        """A vector from its parts, None for zeros; in float64."""
        parts = [torch.zeros_like(p) if t is None else t for t, p in zip(tensors, self.places, strict=True)]
        return torch.cat([t.detach().reshape(-1) for t in parts]).to(self.subject.home, torch.float64)


@dataclass(frozen=True, eq=False)
class Products(ParameterVectors):
    """``A(v)`` for a vector v of all trainable parameters, one after another; ``parts`` reads a vector by parameter."""

    product: Product

    def __call__(self, v: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        """The product, in float64."""
        subject, places = self.subject, self.places
        vectors = [piece.to(p) for piece, p in zip(self.parts(v).values(), places, strict=True)]
        total = torch.zeros(self.size, dtype=torch.float64, device=subject.home)
        size = fitting(subject.memory, _each(subject), min(subject.probe.chunk, subject.probe.n), subject.survey.drawn)
        with differentiable_twice():
            for chunk in chunks(subject.network, subject.x, size, title="products"):
                f = chunk.graph.f.reshape(chunk.n, -1)
                check_finite(f)
                if chunk.graph.accumulates:  # on later examples only
                    raise Missing(HIDDEN)
                if subject.targets.counted is not None:  # outputs that do not count are constants, as their labels are
                    f = torch.where(subject.targets.counted[chunk.rows].to(f.device), f, 0.0)
                Y = None if subject.targets.Y is None else subject.targets.Y[chunk.rows].to(f)
                with subject.state.in_place():  # a backward pass may run modules again
                    total += self.flat(self.product(f, Y, places, vectors))
        return total / subject.probe.n


@dataclass(frozen=True)
class Trace(Statistic):
    """Hutchinson's estimate of an operator's trace, from products with random signs; its error is that of the draw."""

    operator: Operator
    vectors: int = 32
    seed: int = 0
    place: Place = "model"

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"trace({self.operator.name})"

    @property
    def needs(self) -> tuple[Statistic, ...]:  # type: ignore[override]
        return (self.operator,)

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return _Trace(self, subject, needs[0])


class _Trace(Simple):
    def __init__(self, statistic: Trace, subject: Subject, operator: Gathering) -> None:
        label = f"from {statistic.vectors} random vectors"
        super().__init__({"vectors": min(GROUPS, statistic.vectors)}, Remark(Mark.ESTIMATED, label))
        self.statistic, self.subject, self.operator = statistic, subject, operator

    @cached_property
    def samples(self) -> Float[Tensor, " v"]:
        """z^T A z for each vector of signs."""
        A = self.operator.value(WHOLE)
        draw = torch.Generator().manual_seed(self.statistic.seed)
        values = []
        for _ in range(self.statistic.vectors):
            z = (torch.randint(0, 2, (A.size,), generator=draw) * 2 - 1).to(self.subject.home, torch.float64)
            values.append(float(z @ A(z)))
        return torch.tensor(values, dtype=torch.float64)

    def value(self, place: str, without: Group | None = None) -> float:
        keep = torch.arange(len(self.samples)) % self.groups["vectors"] != (-1 if without is None else without[1])
        return self.samples[keep].mean().item()


# ----------------------------------------------------------------------------------------------------------- gradients
# The gradient in a weight itself: Gradient. Positions add up, masked ones too, and so do other uses of the same parameter.

@dataclass(frozen=True)
class Gradient(Statistic):
    """d/dW of mean_n sum_v <V_v, f(x_n)>, in the shape of the map's own matrix (grouped ones block-diagonal)."""

    name: str

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        return cotangents.lacking(subject) or self

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        users = with_siblings(subject.survey.maps, subject.maps)
        entries = sum(subject.survey.maps[k].entries for k in users)
        return Wants(tuple(users), reads=True,  # sums, those of the chunk in hand, and what is made of them
                     held=(8 * (GROUPS + 4) + subject.itemsize * GROUPS) * entries if users else 0,
                     what=f"the gradients of {len(users)} layers")

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        n, groups = subject.probe.n, subject.groups
        sizes = [len(range(g, n, groups)) if g < groups else 0 for g in range(GROUPS)]
        users = with_siblings(subject.survey.maps, subject.maps)
        return _Gradient(subject, {k: GroupSums(counts=list(sizes)) for k in users}, {"examples": groups},
                         remark_of(subject, cotangents))


@dataclass
class _Gradient(Gathering):
    subject: Subject
    sums: dict[str, GroupSums]
    groups: Mapping[str, int]
    remark: Remark

    def add(self, reading: Reading) -> None:
        """An example that does not reach the map counts as well: it asks for nothing."""
        for name, sums in self.sums.items():
            c = reading.plain(name)
            for g, mine in reading.groups() if c is not None else ():
                part = c.take(mine)  # type: ignore[union-attr]
                if part.g.shape[1]:
                    sums.add(g, map_gradient(part.kind, part.h, part.g.sum(0), part.W.shape[-1]), 0)
        if reading.last:
            for sums in self.sums.values():
                sums.settle()

    def merge(self, other: _Gradient) -> None:
        for name, sums in self.sums.items():
            theirs = other.sums[name]
            sums.merge(GroupSums(theirs.sums, [0] * GROUPS))  # every rank counts all examples

    def value(self, place: str, without: Group | None = None) -> Tensor:
        maps = self.subject.survey.maps
        if place not in self.sums:
            raise Missing(APART)
        mine, W = maps[place], self.subject.matrices.W[place]
        users = [place] if mine.weight is None else [k for k in self.sums if maps[k].weight == mine.weight]
        whole = W.new_zeros(int(max(maps[k].index.max() for k in users)) + 1)  # of the parameter
        for k in users:
            mean = self.sums[k].mean(None if without is None else without[1])
            if isinstance(mean, Tensor):  # an example reached it
                whole.index_add_(0, maps[k].index.to(W.device), mean.reshape(-1).to(W.device))
        if without is None:
            in_range(whole, self.subject)
        G = whole[mine.index.to(W.device)].reshape(W.shape)
        return torch.block_diag(*G) if mine.kind == "grouped" else G


WEIGHT_GRADIENT = Gradient("weight_gradient")
