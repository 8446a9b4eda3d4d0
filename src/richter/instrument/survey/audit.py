"""Checks of what was captured, in every chunk of every measurement: a survey of a few examples cannot know what a model does with
the others.

Each example of a chunk gets a random weight w_n. With R a random combination of the cotangents, the captured h and g must add up,
with these weights, to autograd's gradient of sum_n w_n <R_n, f(x_n)>, for every weight and bias. They do so only if every row
belongs to the example that it is assigned to, if no example reaches the output of another one, and if the weight is used as its
maps say. It takes one backward pass through the graph that is there. A map that fails is a ``Doubt``: it ends the measurement,
the survey is amended (richter.instrument.survey.memo), and the measurement begins again."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from richter.core import CaptureError, Mark, RichterError
from richter.core.values import SMALL
from richter.instrument.capture import Call, Inputs, Pass, count, moved_in_last_place, select
from richter.instrument.survey.examine import check_same, coarsest, map_gradient, remade
from richter.instrument.survey.survey import UNABLE, Layout, Network, Survey, by_example, grouped, rounding, tolerance

MOST_DOUBTS = 100  # about one model: each time less of it is taken for granted
CHANGED = 0.1  # share of itself by which a gradient that is rounding error changes at least; others change by some 1e-3
STEADY = 1e-4  # share by which a gradient changes at most that is known not to be a rounding error
MOVES = 8  # times that the weights are moved: a rounding error of a few numbers may come back as the same number
DEVIATION = 16  # times the change of a gradient when the weights move, by which two right computations of it may differ
PIECES = 8  # in which a large chunk goes through the model once more; a small one goes in halves
EXACT = 1e-6  # share of a gradient by which it may change among other examples, in double precision
FLIPPED = 0.03  # the same in single precision, where rounding may turn a unit on or off
BLOCKS = 16  # of cotangents that are added up as they come: of more, one backward pass of their sum costs less
_measurements = itertools.count()
T = TypeVar("T")

Where = Mapping[str, Sequence[tuple[int, Layout]]]  # of each map, its calls in a pass and how examples lie in them


class Doubt(CaptureError):
    """Captures of some maps do not rebuild autograd's gradients."""

    def __init__(self, maps: Sequence[str], x: Inputs, example: int, why: str, biases: Sequence[str] = ()) -> None:
        names = ", ".join(map(repr, [*maps, *biases]))
        super().__init__(f"what was captured of {names} is not what single examples say: {why}")
        self.maps, self.biases, self.x, self.example = tuple(maps), tuple(biases), x, example  # of these inputs, this one


def until_certain(work: Callable[[], T], amend: Callable[[Doubt], None]) -> T:
    """``work()``, done again after every Doubt, which ``amend`` is told of; the last Doubt is raised."""
    for left in range(MOST_DOUBTS, -1, -1):
        try:
            return work()
        except Doubt as doubt:
            if not left:
                raise
            amend(doubt)
    raise AssertionError("the last doubt is raised")


@dataclass(frozen=True)
class Audit:
    """The recordings that one measurement has checked, each once; its random numbers are those of its number."""

    number: int = field(default_factory=lambda: next(_measurements))
    done: set[tuple[Any, ...]] = field(default_factory=set)  # state, which examples, which maps
    parts: dict[str, Audit] = field(default_factory=dict)
    undefined: set[str] = field(default_factory=set)  # maps whose gradients are NaN
    sizes: dict[str, float] = field(default_factory=dict)  # of each map's gradient, relative to the largest; of all its chunks

    @property
    def faint(self) -> list[str]:
        """Maps whose gradients are zero, or might be but for rounding errors."""
        sizes = dict(self.sizes)
        for part in self.parts.values():
            sizes |= {k: max(size, sizes.get(k, 0.0)) for k, size in part.sizes.items()}
        return [k for k, size in sizes.items() if size <= 1]

    def part(self, name: str) -> Audit:
        """The audit of another set of examples, which have numbers of their own."""
        return self.parts.setdefault(name, Audit(self.number, undefined=self.undefined))

    def due(self, state: object, rows: slice, maps: Sequence[str]) -> bool:
        """Have these maps not been checked yet on these examples?"""
        key = (id(state), rows.start, rows.stop, frozenset(maps))
        if key in self.done:
            return False
        self.done.add(key)
        return True

    def compared(self, sizes: Mapping[str, float]) -> None:
        """Gradients of a chunk were compared; ``sizes``: relative to what rounding may leave of one that should be zero."""
        for name, size in sizes.items():
            self.sizes[name] = max(size, self.sizes.get(name, 0.0)) if math.isfinite(size) else size

    def turns(self, state: object, rows: slice) -> Tensor | None:
        """Another order of these examples, once: their outputs are compared, whichever maps are asked for."""
        return self.order(rows.stop - rows.start) if rows.stop - rows.start > 1 and self.due(state, rows, ()) else None

    def order(self, n: int) -> Tensor:
        """A random order of n examples, another one in every measurement."""
        return torch.randperm(n, generator=torch.Generator().manual_seed(self.number))


# ----------------------------------------------------------------------------------------------------------- calls of a chunk


def check_calls(network: Network, x: Inputs, calls: Sequence[Call]) -> None:
    """Raise a Doubt unless these are the calls of the survey, with as many rows for each example."""
    survey, seen, n = network.survey, grouped(calls), count(x)
    new = [name for name in seen if name not in survey.maps and survey.note(name) in (None, Mark.IDLE)]
    if new:
        raise Doubt(new, x, 0, "they are used for some examples only, and not for the first ones")
    other = [name for name, info in survey.batched.items() if not _as_surveyed(info.layouts, info.rows, seen.get(name, []), n)]
    if other:
        raise Doubt(other, x, 0, "how often or for how many examples they are used depends on the data")


def passed(network: Network, x: Inputs, seed: int, silent: Collection[str] | None, plain: bool = False) -> Pass:
    """Run a forward pass in the way that the survey prescribes."""
    survey = network.survey
    try:
        return network.run(x, expand=dict.fromkeys(survey.expand, count(x)), silent=silent, seed=seed, plain=plain)
    except (*UNABLE, TypeError):
        shared = [name for name, info in survey.maps.items() if info.module in survey.expand and info.layouts]
        if not shared:
            raise
        network.run(x, record=False, seed=seed)  # whatever is wrong with the model itself is raised here
        raise Doubt(shared, x, 0, "their outputs are not shared by all examples of a batch") from None


def _as_surveyed(layouts: Sequence[str], rows: Sequence[int], calls: Sequence[Call], n: int) -> bool:
    """Return whether the calls of a map have the layouts and rows that the survey found."""
    return len(calls) == len(layouts) and all(c.shape[layout == "second"] == n * r
                                              for c, layout, r in zip(calls, layouts, rows, strict=True))


# ----------------------------------------------------------------------------------------------- gradients that are rounding


class Noise(NamedTuple):
    """Maps and modules whose gradients are nothing but rounding errors."""

    maps: frozenset[str] = frozenset()  # in g
    modules: frozenset[str] = frozenset()  # in the gradients of all their parameters
    shares: Mapping[str, float] = {}  # of each map: how much its g changes, relative to g, when every weight moves
    tried: frozenset[str] = frozenset()  # the modules that were looked at


def rounding_errors(network: Network, x: Inputs, faint: Sequence[str], without_maps: Collection[str] = (),
                    known: Collection[str] = ()) -> Noise:
    """The maps, of those that are faint, whose gradients are rounding errors, and such modules, among them modules without maps.
    A rounding error becomes another one when every weight moves by one unit in its last place; a gradient stays what it is. One
    move is enough for maps and modules that are ``known`` to have had gradients before, if theirs are steady now."""
    trained = [k for k, w in network.state.items() if w.requires_grad]
    modules_of_maps = [network.survey.maps[k].module for k in faint]
    owned = {m: [k for k in trained if k.rpartition(".")[0] == m] for m in dict.fromkeys([*modules_of_maps, *without_maps])}
    if any(owned[m] for m in without_maps):
        small = _small(network, x, trained, owned)
        owned = {m: own for m, own in owned.items() if m in modules_of_maps or m in small}
    else:
        owned = {m: owned[m] for m in modules_of_maps}
    if not owned:
        return Noise()
    names = [k for own in owned.values() for k in own]
    here = passed(network, x, 0, None)
    maps, modules = dict.fromkeys(faint, 0.0), dict.fromkeys(owned, 0.0)
    for move in range(MOVES):
        seen: list[tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]] = []
        for run in (here, passed(replace(network, state=moved_in_last_place(network.state, trained, seed=2 + move)), x, 0, None)):
            calls = grouped([c for c in run.calls if c.name in faint])
            draw = torch.Generator().manual_seed(3 + move)
            R = torch.randn(run.f.shape, generator=draw, dtype=torch.float64).to(run.f)
            only = replace(run, calls=[c for own in calls.values() for c in own])
            g, gradients = only.backward(R, [run.state[k] for k in names])
            of_calls, of_weights = iter(g), dict(zip(names, gradients, strict=True))
            seen.append(({k: [c.map.outputs(c.module, next(of_calls)) for c in own] for k, own in calls.items()},
                         {m: [of_weights[k] for k in own] for m, own in owned.items()}))
        for shares, before, after in zip((maps, modules), *seen, strict=True):
            shares |= {k: max(shares[k], _changed(own, after.get(k, []))) for k, own in before.items()}
        if all(share > CHANGED or (share < STEADY and k in known) for shares in (maps, modules) for k, share in shares.items()):
            break
    of_maps, of_modules = (frozenset(k for k, share in shares.items() if share > CHANGED) for shares in (maps, modules))
    return Noise(of_maps, of_modules, maps, frozenset(modules))


def _small(network: Network, x: Inputs, trained: Sequence[str], owned: Mapping[str, Sequence[str]]) -> set[str]:
    """The modules with gradients that rounding may have left of zeros: they are that small beside the largest one."""
    run = network.run(x, record=False)
    R = torch.randn(run.f.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(run.f)
    gradients = run.in_turns(R, [network.state[k] for k in trained])
    sizes = {k: float(d.norm()) for k, d in zip(trained, gradients, strict=True)}
    bound = rounding(coarsest(run.state, run.f)) * max(sizes.values())
    return {m for m, own in owned.items() if 0 < math.hypot(*(sizes[k] for k in own)) <= bound}


def _changed(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """Relative difference of two tensors."""
    if [t.shape for t in before] != [t.shape for t in after]:
        return 0.0
    off = math.hypot(*(float((a.double() - b.double()).norm()) for a, b in zip(before, after, strict=True)))
    size = math.hypot(*(float(t.double().norm()) for t in before))
    return off / size if size else math.inf if off else 0.0


# ------------------------------------------------------------------------------------------------------ gradients of a chunk


class Check:
    """Compares what is captured of one chunk with autograd's gradients."""

    def __init__(self, network: Network, x: Inputs, rows: slice, run: Pass, where: Where, names: Sequence[str]) -> None:
        self.network, self.x, self.run, self.n = network, x, run, count(x)
        self.survey, self.seed = network.survey, rows.start
        self.audit: Audit = network.audit
        self.order = self.audit.turns(network.state, rows)
        self.calls = {name: [(run.calls[i], layout) for i, layout in where.get(name, ())] for name in names}  # some have none
        self.draw = torch.Generator().manual_seed(self.audit.number)
        self.w = torch.rand(self.n, generator=self.draw) + 0.5
        self.w *= torch.randint(0, 2, self.w.shape, generator=self.draw) * 2 - 1
        self.R: Tensor | None = None
        self.blocks = 0
        self.last: tuple[Mapping[str, Tensor], Sequence[float]] = {}, ()  # block of cotangents
        self.totals = self._empty()

    def add(self, V: Float[Tensor, "v n k"], stacked: Mapping[str, Tensor], last: bool = True) -> None:
        """Add some cotangents, and the gradients "v n s ..." that each map has for them. ``last``: none follow."""
        a = torch.randn(len(V), generator=self.draw).tolist()
        self.R = _combined(V, a, self.R)
        self.blocks += 1
        if self.blocks == BLOCKS + 1:
            self.totals = self._empty()  # filled at the end, by one backward pass
        for name, g in stacked.items() if self.blocks <= BLOCKS else ():
            if not self.totals.add_rows(name, g, a, self.w):
                self.totals.add(name, weighted(_combined(g, a), self.w))
        self.last = (stacked, a) if last else ({}, ())  # earlier blocks are let go

    def finish(self, gradients: Callable[[Tensor], Mapping[str, Tensor]]) -> None:
        """Raise a Doubt if the captures do not rebuild autograd's gradients. ``gradients``: cotangents "n k" -> "n s ..." by
        map."""
        assert self.R is not None
        everything = gradients(self.R.to(self.run.f.dtype)) if self.blocks > BLOCKS else None
        if everything is not None:
            self.totals = self._totals(everything, self.w)
        apart = self._apart() if self.order is not None else None
        (stacked, a), self.last = self.last, ({}, ())
        if apart is not None and (self._agree(self.totals, apart) or self._cancel(apart, stacked, a)):
            return
        del stacked
        here = self._autograd(self.totals, self.w)
        agree = self._agree(self.totals, here)
        odd = [k for k in self.calls if not math.isfinite(self.audit.sizes.get(k, 0.0))]
        if not agree or odd:
            everything = everything or gradients(self.R.to(self.run.f.dtype))
            self.audit.undefined.update(k for k in odd if k in everything and everything[k].isnan().any())
            wrong = self._beyond_rounding(self._wrong(self.totals, here, self.w, everything), here, everything)
            if wrong:
                self._doubt(wrong, self._culprit(wrong, everything), "they do not rebuild autograd's gradients")
        if apart is not None and (mixed := self._mixed(here, apart)):
            self._doubt(mixed, 0, "their gradients depend on the other examples of the batch")

    def _doubt(self, names: Sequence[str], example: int, why: str) -> None:
        """Raise a doubt about these maps, found on an example."""
        biases = [k for k in names if k in self.survey.biases]
        raise Doubt([k for k in names if k not in biases], self.x, example, why, biases)

    def _apart(self) -> list[Tensor] | None:
        """Autograd's gradients if the examples go through the model in another order, and a few at a time; a MixingError if they
        have other outputs then. None if only the outputs are compared: weights that are computed differ from pass to pass."""
        assert self.order is not None
        assert self.R is not None
        V = weighted(self.R, self.w).to(self.run.f.dtype)
        n, graph = self.n, self.survey.graph * self.run.f.element_size()
        pieces = 2 if n * graph <= 2 * SMALL else PIECES
        for parts in (self.order.chunk(pieces) if n > 3 else (self.order,), (self.order,)):
            gradients: list[Tensor] = []
            outputs = []
            try:
                for part in parts:
                    run = self.network.run(select(self.x, part), record=False, seed=self.seed)
                    outputs.append(run.f.detach())
                    if not self.totals.computed and run.f.shape[1:] == self.run.f.shape[1:]:
                        some = self.totals.expected(run.in_turns(V[part.to(V.device)], self.totals.weights))
                        gradients = [g + d for g, d in zip(gradients, some, strict=True)] if gradients else some
                    del run
            except RichterError:
                raise
            except UNABLE:  # the model does not run on so few
                if len(parts) == 1:
                    raise
                continue
            break
        same = len({f.shape[1:] for f in outputs}) == 1
        check_same(self.network, self.x, self.run, self.order, torch.cat(outputs) if same else outputs[0])
        return None if self.totals.computed else gradients

    def _autograd(self, totals: Totals, w: Tensor) -> list[Tensor]:
        """Compute what the totals should be, by a backward pass through the graph that is there."""
        assert self.R is not None
        return totals.expected(self.run.in_turns(weighted(self.R, w).to(self.run.f.dtype), totals.weights))

    def _empty(self) -> Totals:
        """Empty totals of all maps."""
        return Totals(self.run, self.survey, self.calls, self.n)

    def _totals(self, gradients: Mapping[str, Tensor], w: Tensor) -> Totals:
        """Totals of autograd's gradients, in the form of the captured ones."""
        totals = self._empty()
        for name, g in gradients.items():
            totals.add(name, weighted(g.to(torch.promote_types(g.dtype, torch.float32)), w))
        return totals

    @cached_property
    def _noise(self) -> float:
        """Size that rounding may leave of a gradient that should be zero, relative to the largest."""
        return rounding(coarsest(self.run.state, self.run.f))

    @cached_property
    def _tolerance(self) -> float:
        """Relative error up to which gradients agree."""
        return tolerance(coarsest(self.run.state, self.run.f))

    def _agree(self, totals: Totals, expected: Sequence[Tensor]) -> bool:
        """Is every total what is expected, relative to its own size?"""
        compared = totals.compared(expected)
        largest = max((size for _, _, size in compared if math.isfinite(size)), default=0.0)
        self.audit.compared({k: size / (self._noise * largest + 1e-300) for names, _, size in compared for k in names
                             if k in self.survey.maps})
        return all(off <= self._tolerance * size for _, off, size in compared)

    def _cancel(self, apart: Sequence[Tensor], stacked: Mapping[str, Tensor], a: Sequence[float]) -> bool:
        """Is every total that of the examples in another order, but for the rounding of terms that cancel (in the bias of keys)?
        The terms of the last block of cotangents are fewer than all, which makes the comparison stricter."""
        compared, tol = self.totals.compared(apart), self._tolerance
        off = [(names, off, size) for names, off, size in compared if not off <= tol * size]
        if any(math.isnan(far) for _, far, _ in off) or any(names[0] not in self.survey.biases for names, _, _ in off):
            return False
        needed = {k for names, _, _ in off for k in self.survey.biases[names[0]]}
        terms = {k: _combined(stacked[k], a) for k in needed if k in stacked}
        exact = coarsest(self.run.state, self.run.f) == torch.float64
        share = EXACT if exact else max(FLIPPED, 2 * tol)
        noise = self._noise * max((size for _, _, size in compared), default=0.0)
        return all(far <= min(tol * (size + self._terms(names, terms, self.w)), share * size + noise) for names, far, size in off)

    def _wrong(self, totals: Totals, expected: Sequence[Tensor], w: Tensor, gradients: Mapping[str, Tensor]) -> list[str]:
        """Maps and biases whose totals are not autograd's, relative to the terms of their sums too, because they may cancel."""
        tol = self._tolerance
        return [k for names, off, size in totals.compared(expected) if off > tol * size
                and off > tol * (size + self._terms(names, gradients, w)) for k in names]

    def _beyond_rounding(self, wrong: Sequence[str], expected: Sequence[Tensor], gradients: Mapping[str, Tensor]) -> list[str]:
        """Select the maps and biases that are off by more than rounding errors: a gradient that is small beside others has
        other ones in every backward pass."""
        compared = self.totals.compared(expected)
        noise = self._noise * max((float(e.norm()) for e in expected), default=0.0)
        faint = {k: (names, off, size) for names, off, size in compared for k in names if k in wrong and off <= noise}
        own = {k: self.survey.biases.get(k, (k,)) for k in wrong}
        found = rounding_errors(self.network, self.x, list(dict.fromkeys(m for k in faint for m in own[k])))

        def rounded(k: str) -> bool:
            names, off, size = faint[k]
            share = min((found.shares.get(m, 0.0) for m in own[k]), default=0.0)
            return share > CHANGED or off <= DEVIATION * share * (size + self._terms(names, gradients, self.w))
        return [k for k in wrong if k not in faint or not rounded(k)]

    def _mixed(self, here: Sequence[Tensor], apart: Sequence[Tensor]) -> list[str]:
        """Maps and biases that have other gradients among other examples, by more than rounding does: it may turn a unit on."""
        exact = coarsest(self.run.state, self.run.f) == torch.float64
        share = EXACT if exact else max(FLIPPED, 2 * self._tolerance)
        noise = self._noise * max((float(e.norm()) for e in here), default=0.0)
        return [k for (names, _), e, d in zip(self.totals.parts, here, apart, strict=True)
                if float((e - d).norm()) > share * float(e.norm()) + noise for k in names]

    def _terms(self, names: Sequence[str], gradients: Mapping[str, Tensor], w: Tensor) -> float:
        """The size of what a gradient is the sum of: the root of the sum of |w_n g|^2 |h|^2 over all rows, or, of a bias,
        without h."""
        biases, squares = self.survey.biases, 0.0
        for name in (k for own in names for k in biases.get(own, (own,)) if k in gradients):
            sizes = weighted(gradients[name], w).flatten(2).norm(dim=-1)
            h = [by_example(c.inputs(), self.n, layout).flatten(2) for c, layout in self.calls[name]
                 if names[0] not in biases and c.map.kind != "lookup"]
            squares += (sizes * torch.cat(h, 1).norm(dim=-1).to(sizes) if h else sizes).square().sum().item()
        return math.sqrt(squares)

    def _culprit(self, wrong: Sequence[str], gradients: Mapping[str, Tensor]) -> int:
        """An example by which one of these maps is wrong, found by halving."""
        first, last = 0, self.n
        while last - first > 1:
            middle, some = (first + last) // 2, torch.zeros_like(self.w)
            some[first:middle] = self.w[first:middle]
            totals = self._totals(gradients, some)
            off = self._wrong(totals, self._autograd(totals, some), some, gradients)
            first, last = (first, middle) if set(off) & set(wrong) else (middle, last)
        return first


def weighted(g: Tensor, w: Tensor) -> Tensor:
    """Signals of each example times its weight w_n, in the precision of g."""
    return g * w.to(g).reshape(-1, *[1] * (g.dim() - 1))


def _combined(parts: Iterable[Tensor], a: Sequence[float], total: Tensor | None = None) -> Tensor:
    """total + sum_v a_v parts_v, at least in single precision."""
    for part, number in zip(parts, a, strict=True):
        if total is None:
            total = torch.zeros_like(part, dtype=torch.promote_types(part.dtype, torch.float32))
        total.add_(part, alpha=number)
    assert total is not None
    return total


@dataclass
class GradientPart:
    """Some numbers of a weight's gradient, added up from captures."""

    names: tuple[str, ...]  # of the maps, or of the bias
    total: Tensor
    of: Callable[[Tensor], Tensor]  # the same numbers of autograd's gradient


class Totals:
    """Gradients of the weights behind a recording, added up from captures. Instead of a matrix, its product with one vector u is
    added up where the maps of a weight allow: it costs less than their gradient, and sees the same."""

    def __init__(self, run: Pass, survey: Survey, calls: Mapping[str, Sequence[tuple[Call, Layout]]], n: int) -> None:
        self.run, self.maps, self.calls, self.n = run, survey.maps, calls, n
        self.weights: list[Tensor] = []  # of which autograd's gradients are asked
        self.computed = any(self.maps[k].weight is None for k in calls)  # is some weight known from calls alone?
        self._groups: list[tuple[int, list[GradientPart]]] = []  # how many of these, one after another, add up to which parts
        self._adding: dict[str, list[tuple[Way, Tensor]]] = {}  # map -> how it adds to which totals
        self._products: dict[str, Tensor] = {}  # h u of each map
        self._factors: dict[str, Tensor] = {}  # w_n times h u or 1, of each map and each of its totals
        groups: dict[Any, tuple[list[Tensor], list[str]]] = {}
        for name in calls:
            weight = self.maps[name].weight
            weights = [run.state[weight]] if weight else list({id(c.weight): c.weight for c, _ in calls[name]}.values())
            groups.setdefault(tuple(map(id, weights)), (weights, []))[1].append(name)
        for weights, names in groups.values():
            if weights:
                self._group(weights, self._parts(weights[0].detach(), names))
        for bias, own in survey.biases.items():
            if all(k in calls for k in own):
                self._group([run.state[bias]], [self._bias(bias, own)])

    def add(self, name: str, g: Tensor) -> None:
        """Add the capture "n s ..." of one map to its total."""
        for way, total in self._adding.get(name, ()):
            way(self, name, g, total)

    def add_rows(self, name: str, g: Float[Tensor, "v n s ..."], a: Sequence[float], w: Tensor) -> bool:
        """Add sum_v a_v w_n g_vns of one map, by one product with g. False if its totals are no such sums."""
        ways = self._adding.get(name, ())
        if g.dim() != 4 or g.dtype not in (torch.float32, torch.float64) or not all(
                way in (Totals._add_rows, Totals._add_bias) for way, _ in ways):
            return False
        if ways:
            if name not in self._factors:
                ones = g.new_ones(g.shape[1:3])
                self._factors[name] = torch.stack([weighted(self._read(name).to(g) if way is Totals._add_rows else ones, w)
                                                   for way, _ in ways])
            rows = self._factors[name]
            if len(g) > 1 and g.is_contiguous():
                products = torch.tensor(a, dtype=g.dtype, device=g.device)[None, :, None, None] * rows[:, None]
                parts = [(1.0, products.flatten(1) @ g.flatten(0, 2))]
            else:
                parts = [(number, rows.flatten(1) @ part.flatten(0, 1) if part.is_contiguous()
                          else (rows.transpose(0, 1) @ part).sum(0)) for number, part in zip(a, g, strict=True)]
            for number, sums in parts:
                for (_, total), row in zip(ways, sums, strict=True):
                    total.add_(row, alpha=number)
        return True

    @property
    def parts(self) -> list[tuple[tuple[str, ...], Tensor]]:
        """(names, total) of each group of maps that share a weight."""
        return [(part.names, part.total) for _, parts in self._groups for part in parts]

    def expected(self, exact: Iterable[Tensor]) -> list[Tensor]:
        """Return what each part should be. ``exact``: autograd's gradients, one for each of the weights."""
        result, exact = [], iter(exact)
        for many, parts in self._groups:
            gradient = functools.reduce(torch.add, itertools.islice(exact, many))
            result += [part.of(gradient).to(part.total) for part in parts]
        next(exact, None)  # it lets go of the last ones
        return result

    def compared(self, expected: Sequence[Tensor]) -> list[tuple[tuple[str, ...], float, float]]:
        """Names, how far their gradient is from what is expected, and the size of that."""
        return [(names, float((total - e).norm()), float(e.norm()))
                for (names, total), e in zip(self.parts, expected, strict=True)]

    def _group(self, weights: Sequence[Tensor], parts: list[GradientPart]) -> None:
        self.weights += weights
        self._groups.append((len(weights), parts))

    def _begin(self, names: Iterable[str], like: Tensor, of: Callable[[Tensor], Tensor], ways: Mapping[str, Way]) -> GradientPart:
        """A part to which nothing has been added, of the form that ``of`` gives; and the way in which each map adds to it."""
        dtype = torch.promote_types(torch.promote_types(like.dtype, self.run.f.dtype), torch.float32)
        part = GradientPart(tuple(names), torch.zeros_like(of(like), dtype=dtype, memory_format=torch.contiguous_format), of)
        for name, way in ways.items():
            self._adding.setdefault(name, []).append((way, part.total))
        return part

    def _parts(self, weight: Tensor, names: Sequence[str]) -> list[GradientPart]:
        """Choose what is compared of a weight's gradient: products with a vector if these maps divide the weight among them, or
        if each of them reads all of it; otherwise the gradient."""
        called = {k: self.calls[k][0][0] for k in names if self.calls[k]}
        if len(called) == len(names) and all(c.map.kind in ("dense", "grouped") for c in called.values()) and self._divided(
                weight, called):
            return [self._begin([k], weight, partial(_matrix_times_vector, c), {k: Totals._add_rows}) for k, c in called.items()]
        if called and weight.dim() == 2 and all(_turned(c, weight) is not None for c in called.values()):
            ways = {k: Totals._add_turned if _turned(c, weight) else Totals._add_rows for k, c in called.items()}
            return [self._begin(names, weight, _times_vector, ways)]
        return [self._begin(names, weight, _flat, dict.fromkeys(called, Totals._add_whole))]

    def _divided(self, weight: Tensor, called: Mapping[str, Call]) -> bool:
        """Does each entry of the weight stand in one of the matrices?"""
        if sum(self.maps[k].entries for k in called) != weight.numel():
            return False
        if len(called) == 1:
            return True
        marks = _ramp(weight.numel(), weight.device).view(weight.shape).double()
        again = sum(float(c.map.matrix(c.module, marks).square().sum()) for c in called.values())
        return math.isclose(again, float(marks.square().sum()), rel_tol=1e-9)

    def _bias(self, bias: str, names: Sequence[str]) -> GradientPart:
        """The summed g of these maps, one behind the other."""
        part = self._begin([bias], self.run.state[bias].detach(), _flat, {})
        for name, total in zip(names, part.total.split([self.maps[k].writes for k in names]), strict=True):
            self._adding.setdefault(name, []).append((Totals._add_bias, total))
        return part

    def _add_bias(self, name: str, g: Tensor, total: Tensor) -> None:
        """Add the gradient of a map's bias."""
        total += g.flatten(2).sum((0, 1)).to(total)

    def _add_rows(self, name: str, g: Tensor, total: Tensor) -> None:
        """Add the product of the matrix's gradient with the random vector u."""
        total += torch.einsum("ns...o,ns...->...o", g, self._read(name).to(g)).to(total)

    def _add_turned(self, name: str, g: Tensor, total: Tensor) -> None:
        """G^T u, where the matrix is the weight's transpose."""
        c, h, along = self.calls[name][0][0], self._inputs(name), (g @ _vector(g.shape[-1], g.device).to(g)).reshape(-1)
        if c.map.kind == "lookup":
            keep = h.reshape(-1) >= 0
            total.index_add_(0, h.reshape(-1)[keep], along[keep].to(total))
        else:
            total += (along @ h.flatten(0, 1).to(g)).to(total)

    def _add_whole(self, name: str, g: Tensor, total: Tensor) -> None:
        """Add the gradient of the weight itself."""
        c, h = self.calls[name][0][0], self._inputs(name)
        matrix = c.map.matrix(c.module, total.view(c.weight.shape))
        gradient = map_gradient(c.map.kind, h if c.map.kind == "lookup" else h.to(g), g, matrix.shape[-1]).to(matrix)
        if matrix.untyped_storage().data_ptr() == total.untyped_storage().data_ptr():
            matrix += gradient
        else:
            total.index_add_(0, self.maps[name].index, gradient.reshape(-1))

    def _inputs(self, name: str) -> Tensor:
        """h "n s ...", made again each time: it may be large."""
        return torch.cat([by_example(c.inputs(), self.n, layout) for c, layout in self.calls[name]], 1)

    def _read(self, name: str) -> Tensor:
        """Product of the inputs with u: "n s", or "n s r" for grouped maps."""
        if name not in self._products:
            parts, shape = [], self.maps[name].shape
            for c, layout in self.calls[name]:
                dtype = torch.promote_types(c.read.dtype, torch.float32)
                U = _vector(shape[-1], c.read.device).to(dtype).expand(*shape[:-2], 1, -1)  # a matrix with one row
                parts.append(by_example(remade(c, [U], dtype)[0], self.n, layout)[..., 0])
            self._products[name] = torch.cat(parts, 1)
        return self._products[name]


Way = Callable[[Totals, str, Tensor, Tensor], None]


def _matrix_times_vector(c: Call, exact: Tensor) -> Tensor:
    return _times_vector(c.map.matrix(c.module, exact))


def _times_vector(exact: Tensor) -> Tensor:
    return exact @ _vector(exact.shape[-1], exact.device).to(exact)


def _flat(exact: Tensor) -> Tensor:
    """Gradient as a vector."""
    return exact.reshape(-1)


def _turned(c: Call, weight: Tensor) -> bool | None:
    """Is the matrix of this call the transpose of the weight? None if it is neither the weight nor that, or cannot be added up
    by columns."""
    matrix = c.map.matrix(c.module, weight)
    if c.map.kind not in ("dense", "lookup") or matrix.dim() != 2:
        return None
    turned = matrix.shape != weight.shape
    same = matrix.T if turned else matrix
    one = same.data_ptr() == weight.data_ptr() and same.shape == weight.shape and same.stride() == weight.stride()
    return turned if one and (turned or c.map.kind == "dense") else None


def _ramp(n: int, device: torch.device) -> Tensor:
    """n numbers that are as good as random, and always the same."""
    return torch.arange(1, n + 1, device=device, dtype=torch.float32).mul_(0.754877).cos_()


_vector = functools.lru_cache(maxsize=64)(_ramp)  # u
