"""Do the captured ``h`` and ``g`` rebuild autograd's gradients? Looked at, not trusted: gradients of a random combination of the
outputs are added up from what was captured, and what does not agree with autograd is not measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from richter.core import CaptureError, Mark, MixingError, Remark
from richter.instrument.capture import Call, Pass, State, index_of
from richter.instrument.survey.layouts import SHARED, Bench, Candidates, Layouts, by_example, grouped, tolerance
from richter.instrument.survey.maps import Layout, MapInfo, Survey
from richter.layers import Kind

LARGE = 2 ** 26  # bytes of gradients that are not held twice
REMEMBERED = 2 ** 16  # entries of a matrix whose places in its weight are kept; of larger ones they are made again
BIASES = ("bias", "in_proj_bias")
BIASES_OF_GATES = ("bias_ih", "bias_hh")  # how those of recurrent layers begin
MIXING = ("the model mixes examples (BatchNorm in train mode or without running statistics, a batch-wide normalisation or "
          "attention), so gradients of single examples do not exist. Measure in eval mode (the default), or give BatchNorm "
          "running statistics.")


def coarsest(state: State, f: Tensor) -> torch.dtype:
    """Of the precisions that a model computes in: half-precision layers before a float32 output round as they do."""
    return max(f.dtype, state.precision, key=lambda dtype: torch.finfo(dtype).eps)


def map_gradient(kind: Kind, h: Tensor, g: Tensor, d_in: int) -> Tensor:
    """The gradient in the matrix, summed over examples and positions: h [n,s,...], g [n,s,...]."""
    if kind == "diagonal":
        return (g * h).sum((0, 1))
    if kind == "grouped":
        return torch.einsum("nsro,nsri->roi", g, h)
    if kind == "dense":
        return torch.einsum("nso,nsi->oi", g, h)
    flat, keep = h.reshape(-1), h.reshape(-1) >= 0
    return g.new_zeros(d_in, g.shape[-1]).index_add(0, flat[keep], g.reshape(-1, g.shape[-1])[keep]).T


def applied(kind: Kind, W: Tensor, h: Tensor) -> Tensor:
    """W h at every position, "n s d_out"; of grouped maps "n s r d_out"."""
    if kind == "lookup":
        rows = W.T[h.clamp(min=0)]
        return torch.where((h >= 0)[..., None], rows, torch.zeros_like(rows))
    if kind == "diagonal":
        return h * W
    return h @ W.T if kind == "dense" else torch.einsum("nsri,roi->nsro", h, W)


def remade(c: Call, W: Tensor, dtype: torch.dtype) -> Tensor:
    """What a call would have written with another matrix and no bias, in its own layout "b s ..."."""
    W = W.to(c.read.device, dtype)
    if c.map.apply is not None and c.read._version == c.version:
        return c.map.outputs(c.module, c.map.apply(c.module, c.read.to(dtype), W))
    h = c.inputs()
    return applied(c.map.kind, W, h.to(dtype) if h.is_floating_point() else h)


class Rebuilt:
    """Gradients of weights, added up call by call from what was captured, beside those of autograd."""

    def __init__(self, weights: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
        self.exact = {id(w): e for w, e in zip(weights, exact, strict=True)}
        self.sums: dict[int, Tensor] = {}  # flat; of a weight whose calls were all seen, no more
        self.apart: dict[int, float] = {}  # how far the sums of those were from autograd's gradient
        self.squares = dict.fromkeys(self.exact, 0.0)  # of the sizes of the terms that were added

    def add(self, call: Call, h: Tensor, g: Tensor) -> None:
        """What one call contributes to the gradient of its weight."""
        e = self.exact[id(call.weight)]
        total = self.sums.setdefault(id(call.weight), torch.zeros(0, dtype=e.dtype, device=e.device))
        if not len(total):
            total = self.sums[id(call.weight)] = torch.zeros(e.numel(), dtype=e.dtype, device=e.device)
        matrix = call.map.matrix(call.module, total.view(call.weight.shape))
        h = h if call.map.kind == "lookup" else h.to(g.dtype)
        gradient = map_gradient(call.map.kind, h, g, matrix.shape[-1])
        if gradient.shape != matrix.shape:
            raise CaptureError(f"layer {call.name!r}: its view gives a matrix of shape {tuple(matrix.shape)}, but its inputs and "
                               f"outputs make a gradient of shape {tuple(gradient.shape)}. richter.testing.check_layer tells "
                               f"what is wrong.")
        if matrix.untyped_storage().data_ptr() == total.untyped_storage().data_ptr():
            matrix += gradient.to(total.dtype)
        else:
            total.index_add_(0, call.index().reshape(-1), gradient.reshape(-1).to(total.dtype))
        size = g.flatten(2).norm(dim=-1) * (h.flatten(2).norm(dim=-1) if call.map.kind != "lookup" else 1.0)
        self.squares[id(call.weight)] += size.square().sum().item()

    def error(self, weight: Tensor, cancelling: bool = True) -> float:
        """How far the sum is from autograd's gradient, relative to its size; where terms may be ``cancelling`` each other,
        relative to theirs too."""
        exact = self.exact[id(weight)]
        self.finish(weight)
        terms = math.sqrt(self.squares[id(weight)]) if cancelling else 0.0
        return self.apart[id(weight)] / (exact.norm().item() + terms + 1e-300)

    def finish(self, weight: Tensor) -> None:
        """All its calls were seen: its sum is compared, and let go."""
        key = id(weight)
        if key not in self.apart:
            exact = self.exact[key].reshape(-1)
            self.apart[key] = (self.sums.pop(key) - exact).norm().item() if key in self.sums else exact.norm().item()


@dataclass
class Tally:
    """What the calls of one map add up to."""

    first: Call
    candidates: list[Candidates]  # how examples may lie in each call
    layouts: list[Layout] = field(default_factory=list)  # how they do, call by call
    rows: list[int] = field(default_factory=list)  # of each call, for one example
    regular: bool = True  # has every call had a layout so far?
    one: bool = True  # has every call had the same matrix so far?
    calls: int = 0
    copied: int = 0  # numbers that reading it copies
    wrote: int = 0
    live: int = 0  # positions from which an output is reached
    summed: Tensor = field(default_factory=lambda: torch.zeros(()))  # g, over examples and positions
    squares: float = 0.0  # of the entries of g

    def add(self, call: Call, h: Tensor, g: Tensor) -> None:
        self.calls += 1
        self.one &= call.weight is self.first.weight or torch.equal(call.weight, self.first.weight)
        anew = h.untyped_storage().data_ptr() != call.read.untyped_storage().data_ptr()
        self.copied += anew * h.numel()
        self.wrote += g.numel()
        self.summed = self.summed + g.flatten(2).sum((0, 1))
        self.squares += g.square().sum().item()

    def separate(self, call: Call, halves: tuple[Tensor, Tensor], mine: Tensor, tol: float) -> bool:
        """Does a gradient that starts from half of the examples (``mine``) stay with them? Then the map can be read for all at a
        time. False: it does not, though examples have an axis."""
        candidates, n = self.candidates[self.calls], len(mine)
        for layout in candidates if candidates != SHARED else ():
            first, second = (by_example(call.map.outputs(call.module, t), n, layout) for t in halves)  # type: ignore[arg-type]
            if first[~mine].norm() <= tol * first.norm() and second[mine].norm() <= tol * second.norm():
                self.live += int(((first + second).flatten(2).abs().sum((0, 2)) > 0).sum())
                self.layouts.append(layout)  # type: ignore[arg-type]
                self.rows.append(call.shape[layout == "second"] // n)
                return True
        self.regular = False  # nothing is claimed of it
        return candidates in ((), SHARED)

    def info(self, module: str, weight: str | None, n: int) -> MapInfo:
        layouts, rows = (tuple(self.layouts), tuple(self.rows)) if self.regular else ((), ())
        c = self.first
        shape = tuple(c.map.matrix(c.module, c.weight.detach()).shape)
        placed = partial(index_of, c.map, c.module, c.weight.shape, c.weight.device)
        if math.prod(shape) <= REMEMBERED:
            placed = partial(_itself, placed())
        return MapInfo(c.name, c.map.kind, layouts, rows, module, weight, shape, self.wrote // n, placed, self.copied // n,
                       self.live)


def _itself(index: Tensor) -> Tensor:
    return index


@dataclass
class Verified:
    """Maps whose gradients were rebuilt, and remarks on those whose were not."""

    R: Float[Tensor, "n k"]  # the random combination of outputs
    exact: dict[int, Tensor]  # id of a parameter -> the gradient of <R, f>
    tallies: dict[str, Tally]
    accumulates: bool = False  # the model adds to .grad in its backward pass
    maps: dict[str, MapInfo] = field(default_factory=dict)
    notes: dict[str, Remark] = field(default_factory=dict)


def verify(bench: Bench, whole: Pass, layouts: Layouts, drawn: bool) -> Verified:
    """Rebuild the gradient of a random combination of the outputs, in two halves of the examples."""
    n, f, tol = bench.n, whole.f, tolerance(coarsest(whole.state, whole.f))
    R = torch.randn(n, f[0].numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(f.device, f.dtype)
    mine = torch.tensor([i.bit_count() % 2 == 0 for i in range(n)], device=f.device)  # neighbours are on either side
    half = R * mine[:, None]
    weights, parameters = _distinct([c.weight for c in whole.calls]), _distinct([*whole.aliases.values(), *whole.leaves()])
    places = _distinct([*weights, *parameters])
    g1, g2, exact = _halves(whole, R, half, places)
    del half
    rebuilt = Rebuilt(weights, [exact[id(w)] for w in weights])
    by_parameter = {id(a): exact[id(a)] for a in parameters}
    _check_references(bench.model, whole)
    tallies: dict[str, Tally] = {}
    left = Counter(id(c.weight) for c in whole.calls)
    for c, *halves in _by_weight(whole.calls, g1, g2):
        if c.name not in tallies:
            tallies[c.name] = Tally(c, layouts[c.name])
        tally = tallies[c.name]
        if not tally.separate(c, (halves[0], halves[1]), mine, tol) and drawn:
            raise MixingError(f"layer {c.name!r}: what one example's output asks of it reaches other examples: {MIXING}")
        h, g = c.inputs(), c.map.outputs(c.module, halves[0] + halves[1])
        rebuilt.add(c, h, g)
        tally.add(c, h, g)
        left[id(c.weight)] -= 1
        if not left[id(c.weight)]:
            rebuilt.finish(c.weight)
    tallies = {c.name: tallies[c.name] for c in whole.calls}  # in the order of the forward pass
    return _accepted(bench, Verified(R, by_parameter, tallies, bool(whole.adds)), rebuilt, tol)


def _accepted(bench: Bench, verified: Verified, rebuilt: Rebuilt, tol: float) -> Verified:
    names = {id(weight): name for name, weight in reversed(bench.state.items())}  # the first of each
    modules = {name: bench.modules.get(id(tally.first.module), "") for name, tally in verified.tallies.items()}
    computed = tuple(f"{modules[name]}." for name, tally in verified.tallies.items() if id(tally.first.weight) not in names)
    for name, tally in verified.tallies.items():
        error = rebuilt.error(tally.first.weight)
        if error > tol and computed and names.get(id(tally.first.weight), "").startswith(computed):  # a power iteration, say
            verified.notes[name] = Remark(Mark.UNDEFINED, "its product serves to compute the weight of a layer")
        elif error > tol:
            verified.notes[name] = _refused(name, tally.calls, error)
        elif not tally.one:
            verified.notes[name] = Remark(Mark.UNDEFINED, "its weight is computed in every call, each time with other numbers")
        else:
            verified.maps[name] = tally.info(modules[name], names.get(id(tally.first.weight)), bench.n)
    return verified


def verify_one(one: Pass, names: Sequence[str]) -> dict[str, Remark]:
    """Maps that are read one example at a time are checked on a pass of one example: remarks on those that fail."""
    R = torch.randn(one.f[0].numel(), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights = _distinct([c.weight for c in one.calls])
    g, exact = one.backward(R.to(one.f.device), weights)
    rebuilt, tol = Rebuilt(weights, exact), tolerance(coarsest(one.state, one.f))
    for c, d in zip(one.calls, g, strict=True):
        rebuilt.add(c, c.inputs(), c.map.outputs(c.module, d))
    calls = grouped(one.calls)
    remarks = {}
    for name in (k for k in names if k in calls):
        weight = calls[name][0].weight
        error = rebuilt.error(weight, cancelling=False)
        if error > tol and rebuilt.exact[id(weight)].norm() > 0:
            remarks[name] = _refused(name, len(calls[name]), error)
    return remarks


def _refused(name: str, calls: int, error: float) -> Remark:
    return Remark(Mark.REFUSED, f"layer {name!r}: {calls} calls were seen, and they rebuild its weight gradient only up to a "
                                f"relative error of {error:.2g}. The weight is also used in a way that is not a linear map of "
                                f"one input. Leave it out with layers=..., or teach richter.layers to see it.")


def _by_weight(calls: Sequence[Call], *others: list[Tensor]) -> Iterator[tuple[Any, ...]]:
    """Calls of one weight after another, with what belongs to each; what was given out is let go."""
    first: dict[int, int] = {}
    for i, c in enumerate(calls):
        first.setdefault(id(c.weight), i)
    for i in sorted(range(len(calls)), key=lambda i: first[id(calls[i].weight)]):
        mine = [other[i] for other in others]
        for other in others:
            other[i] = other[i].new_empty(0)
        yield calls[i], *mine


def _halves(whole: Pass, R: Tensor, half: Tensor,
            places: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], dict[int, Tensor]]:
    """What each half of the examples asks of every call, and the gradients of all by the ids of the weights. Of a large model the
    gradients of both halves are not held at once: it takes a third backward pass."""
    if sum(p.numel() * p.element_size() for p in places) > LARGE:
        g1, g2 = whole.backward(half)[0], whole.backward(R - half)[0]
        return g1, g2, {id(p): d for p, d in zip(places, replace(whole, calls=[]).backward(R, places)[1], strict=True)}
    (g1, w1), (g2, w2) = whole.backward(half, places), whole.backward(R - half, places)
    return g1, g2, _added(places, w1, w2)


def _added(places: Sequence[Tensor], first: list[Tensor], second: list[Tensor]) -> dict[int, Tensor]:
    """The sum of two gradients of each weight, by its id; the lists are emptied on the way: one weight more is held, not all."""
    return {id(place): first.pop() + second.pop() for place in reversed(places)}


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list({id(t): t for t in tensors}.values())


def _check_references(model: nn.Module, whole: Pass) -> None:
    """A parameter reached through a reference outside the module tree would be missed: refuse, do not guess."""
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not own:
        return
    with whole.state.in_place():
        gradients = torch.autograd.grad(whole.f.sum(), list(own.values()), retain_graph=True, allow_unused=True)
    whole.state.accumulated()  # is let go
    for name, gradient in zip(own, gradients, strict=True):
        if gradient is not None:
            raise CaptureError(f"parameter {name!r} reaches the output through a reference kept outside its module (a list, a "
                               f"closure) or a tensor that an earlier call has cached. Its gradient cannot be separated by "
                               f"example. Read it as an attribute in forward(), and clear such caches first (models often do in "
                               f"train()).")


def describe(survey: Survey) -> Survey:
    """What follows from its maps: all uses of a weight are read for many examples at a time, or none; and which parameters have
    gradients that are rebuilt from maps."""
    users: dict[str, list[str]] = {}
    for name, info in survey.maps.items():
        if info.weight is not None:
            users.setdefault(info.weight, []).append(name)
    singly = {k for own in users.values() if not all(survey.maps[k].layouts for k in own) for k in own}
    maps = {k: replace(info, layouts=(), rows=()) if k in singly else info for k, info in survey.maps.items()}
    structured = {weight: tuple(own) for weight, own in users.items()
                  if weight.rpartition(".")[0] not in survey.notes and not singly.intersection(own)}
    biases = {bias: own for bias, own in survey.biases.items() if all(k in maps and maps[k].layouts for k in own)}
    expand = survey.expand & {info.module for info in maps.values() if info.layouts}
    return replace(survey, maps=maps, expand=expand, structured=structured, biases=biases)


def biases(model: nn.Module, survey: Survey, verified: Verified, aliases: dict[str, Tensor],
           tol: float) -> dict[str, tuple[str, ...]]:
    """Biases -> the maps of their module, where the bias' gradient is their summed g."""
    first = {id(t): name for name, t in reversed(aliases.items())}  # of the names of each parameter
    described = {}
    for name, own in _maps_by_module(model, survey):
        for attribute in (k for k in model.get_submodule(name)._parameters if k in BIASES or k.startswith(BIASES_OF_GATES)):
            bias = f"{name}.{attribute}" if name else attribute
            maps = own if attribute in BIASES else _of_weight(own, name, attribute)
            if maps and bias in aliases and first[id(aliases[bias])] == bias and _is_sum(
                    [verified.tallies[k] for k in maps], verified.exact[id(aliases[bias])].reshape(-1), tol):
                described[bias] = tuple(maps)
    return described


def _of_weight(maps: list[str], module: str, attribute: str) -> list[str]:
    """The maps that a bias belongs to: of ``bias_ih_l0`` in ``lstm``, those of the gates ``lstm.ih_l0.i`` and so on."""
    weight = ".".join(filter(None, (module, attribute.removeprefix("bias_"))))
    return [k for k in maps if f"{k}.".startswith(f"{weight}.")]


def _maps_by_module(model: nn.Module, survey: Survey) -> Iterator[tuple[str, list[str]]]:
    for name, _ in model.named_modules():
        own = [k for k, info in survey.maps.items() if info.module == name and info.layouts and k.rpartition(".")[2] != "T"]
        if own:
            yield name, own


def _is_sum(tallies: list[Tally], exact: Tensor, tol: float) -> bool:
    """Is the gradient ``exact`` the summed g of these maps, one behind the other?"""
    total = torch.cat([tally.summed for tally in tallies])
    size = exact.norm() + math.sqrt(sum(tally.squares for tally in tallies)) + 1e-300
    return total.shape == exact.shape and bool((total - exact).norm() <= tol * size)
