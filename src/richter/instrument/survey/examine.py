"""The survey: which maps there are, how examples lie in them, do examples mix, and is what was captured right?"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from richter.core import CaptureError, Mark, MixingError, Remark
from richter.core.values import NO_MAP, SMALL, trim
from richter.instrument.capture import (
    Call,
    Inputs,
    Output,
    Own,
    Pass,
    Scale,
    State,
    Wanted,
    Weight,
    check_finite,
    count,
    index_of,
    same_bits,
    select,
    weight_bytes,
)
from richter.instrument.survey.survey import (
    SHARED,
    UNABLE,
    Candidates,
    Layout,
    Layouts,
    MapInfo,
    Network,
    Survey,
    by_example,
    direct,
    expanded,
    given,
    grouped,
    inner,
    layouts_of,
    readouts,
    rounding,
    splits,
    tolerance,
)
from richter.layers import Kind, LinearMap

# -------------------------------------------------------------------------------------------------------------- verify
# Do the captured ``h`` and ``g`` rebuild autograd's gradients? Looked at, not trusted: gradients of a random combination of the
# outputs are added up from what was captured, and what does not agree with autograd is not measured.

LARGE = 2 ** 26  # bytes of gradients that are not held twice
REMEMBERED = 2 ** 16  # entries of a matrix whose places in its weight are kept; of larger ones they are made again
BIASES = ("bias", "in_proj_bias")
BIASES_OF_GATES = ("bias_ih", "bias_hh")  # how those of recurrent layers begin
MIXING = ("the model mixes examples (BatchNorm in train mode or without running statistics, a batch-wide normalisation or "
          "attention), so gradients of single examples do not exist. Measure in eval mode (the default), or give BatchNorm "
          "running statistics.")


def coarsest(state: State, f: Tensor) -> torch.dtype:
    """Coarsest precision that a model computes in: half-precision layers before a float32 output round as they do."""
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


def remade(c: Call, matrices: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Outputs of a call with each of these matrices and no bias, in its own layout "b s ..."."""
    matrices = [W.to(c.read.device, dtype) for W in matrices]
    if c.map.apply is not None and c.read._version == c.version:
        read = c.read.to(dtype)
        return [c.map.outputs(c.module, c.map.apply(c.module, read, W)) for W in matrices]
    h = c.inputs()
    h = h.to(dtype) if h.is_floating_point() else h
    return [applied(c.map.kind, W, h) for W in matrices]


class Rebuilt:
    """Gradients of weights, added up call by call from what was captured, beside those of autograd."""

    def __init__(self, weights: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
        self.exact = {id(w): e for w, e in zip(weights, exact, strict=True)}
        self.sums: dict[int, Tensor] = {}  # flat; of a weight whose calls were all seen, no more
        self.apart: dict[int, float] = {}  # how far the sums of those were from autograd's gradient
        self.squares = dict.fromkeys(self.exact, 0.0)  # of the sizes of the terms that were added

    def add(self, call: Call, h: Tensor, g: Tensor) -> None:
        """Add what one call contributes to the gradient of its weight."""
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
    """Sums over the calls of one map."""

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
        """Facts about a map, from all its calls."""
        layouts, rows = (tuple(self.layouts), tuple(self.rows)) if self.regular else ((), ())
        c = self.first
        shape = tuple(c.map.matrix(c.module, c.weight.detach()).shape)
        placed = partial(_placed, c.map, weakref.ref(c.module), c.weight.shape, c.weight.device)
        if math.prod(shape) <= REMEMBERED:
            placed = partial(_itself, placed())
        return MapInfo(c.name, c.map.kind, layouts, rows, module, weight, shape, self.wrote // n, placed, self.copied // n,
                       self.live)


def _placed(view: LinearMap, module: weakref.ref[nn.Module], shape: torch.Size, device: torch.device) -> Tensor:
    """The index of a map whose survey does not keep the model alive."""
    owner = module()
    assert owner is not None
    return index_of(view, owner, shape, device)


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


def verify(network: Network, x: Inputs, whole: Pass, layouts: Layouts, drawn: bool) -> Verified:
    """Rebuild the gradient of a random combination of the outputs, in two halves of the examples."""
    n, f, tol = count(x), whole.f, tolerance(coarsest(whole.state, whole.f))
    R = torch.randn(n, f[0].numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(f.device, f.dtype)
    mine = torch.tensor([i.bit_count() % 2 == 0 for i in range(n)], device=f.device)  # neighbours are on either side
    half = R * mine[:, None]
    weights, parameters = _distinct([c.weight for c in whole.calls]), _distinct([*whole.aliases.values(), *whole.leaves()])
    places = _distinct([*weights, *parameters])
    g1, g2, exact = _halves(whole, R, half, places)
    del half
    rebuilt = Rebuilt(weights, [exact[id(w)] for w in weights])
    by_parameter = {id(a): exact[id(a)] for a in parameters}
    _check_references(network.model, whole)
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
    return _accepted(network, n, Verified(R, by_parameter, tallies, bool(whole.adds)), rebuilt, tol)


def _accepted(network: Network, n: int, verified: Verified, rebuilt: Rebuilt, tol: float) -> Verified:
    names = {id(weight): name for name, weight in reversed(network.state.items())}  # the first of each
    modules = {name: network.modules.get(id(tally.first.module), "") for name, tally in verified.tallies.items()}
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
            verified.maps[name] = tally.info(modules[name], names.get(id(tally.first.weight)), n)
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
    """Refusal of a layer whose captures do not rebuild its gradient."""
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
    """Return the backward signals of every call from each half of the examples, and the gradients of all by the ids of the
    weights. Of a large model the gradients of both halves are not held at once: it takes a third backward pass."""
    if sum(p.numel() * p.element_size() for p in places) > LARGE:
        g1, g2 = whole.backward(half)[0], whole.backward(R - half)[0]
        return g1, g2, {id(p): d for p, d in zip(places, replace(whole, calls=[]).backward(R, places)[1], strict=True)}
    (g1, w1), (g2, w2) = whole.backward(half, places), whole.backward(R - half, places)
    return g1, g2, _added(places, w1, w2)


def _added(places: Sequence[Tensor], first: list[Tensor], second: list[Tensor]) -> dict[int, Tensor]:
    """The sum of two gradients of each weight, by its id; the lists are emptied on the way: one weight more is held, not all."""
    return {id(place): first.pop() + second.pop() for place in reversed(places)}


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors without repetitions."""
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
    """Derive what follows from its maps: all uses of a weight are read for many examples at a time, or none; and which parameters
    have gradients that are rebuilt from maps."""
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
    """Yield each module with the names of its maps."""
    for name, _ in model.named_modules():
        own = [k for k, info in survey.maps.items() if info.module == name and info.layouts and k.rpartition(".")[2] != "T"]
        if own:
            yield name, own


def _is_sum(tallies: list[Tally], exact: Tensor, tol: float) -> bool:
    """Is the gradient ``exact`` the summed g of these maps, one behind the other?"""
    total = torch.cat([tally.summed for tally in tallies])
    size = exact.norm() + math.sqrt(sum(tally.squares for tally in tallies)) + 1e-300
    return total.shape == exact.shape and bool((total - exact).norm() <= tol * size)


# ------------------------------------------------------------------------------------------------------------- trained
# Is the network that is measured the one that is trained? Passes are made with aliases in the place of the model's parameters. A
# model may ask what they are, look them up in a table or wrap them anew, and then do something else with an alias.

def check_trained(network: Network, x: Inputs, f: Tensor, verified: Verified) -> None:
    """The outputs of a few examples, and the gradients of a random combination of them, must be those that the model has with its
    own parameters, called as in training."""
    if verified.accumulates:  # its backward pass would add to the user's .grad
        return
    own = Own(network.state)
    names = [name for name, p in network.model.named_parameters() if p.requires_grad and p.is_floating_point()]
    weights = [network.state[name] for name in names]
    plain = replace(network, state=own).run(x, record=False)
    largest = max((float(verified.exact[id(w)].norm()) for w in weights), default=0.0)
    others = plain.in_turns(verified.R, [own[name] for name in names])
    if _agree(plain.f, f) and all(_first_apart(plain, [d], [verified.exact[id(w)]], largest) is None
                                  for d, w in zip(others, weights, strict=True)):
        return
    gradients = plain.backward(verified.R, [own[name] for name in names])[1]
    again = network.run(x, record=False)  # as plainly: what still differs is no rounding
    exact = again.backward(verified.R, weights)[1]
    if not _agree(plain.f, again.f):
        raise _other("the model's outputs differ", _relative(plain.f, again.f))
    apart = _first_apart(plain, gradients, exact)
    if apart is not None:
        raise _other(f"the gradient of parameter {names[apart]!r} differs", _relative(exact[apart], gradients[apart]))


def _agree(f: Tensor, other: Tensor) -> bool:
    """Return whether outputs are equal up to rounding."""
    eps = max(torch.finfo(t.dtype).eps for t in (f, other))
    return f.shape == other.shape and _relative(other, f) <= math.sqrt(eps)


def _relative(f: Tensor, other: Tensor) -> float:
    """|f - other| / |other|, for numbers of any size; 0 where both are the same, also NaN or infinite."""
    f, other = f.detach(), other.detach()
    same = (f == other) | (f.isnan() & other.isnan())
    apart, size = torch.where(same, 0, f - other), float(other.abs().max()) if other.numel() else 0.0
    if bool(same.all()):
        return 0.0
    return float((apart / size).norm() / (other / size).norm()) if size else math.inf


def _first_apart(plain: Pass, gradients: list[Tensor], others: list[Tensor], largest: float = 0.0) -> int | None:
    """Return the first of these gradients that differ by more than the rounding of the ``largest``."""
    precision = coarsest(plain.state, plain.f)
    noise = rounding(precision) * max([largest, *(float(d.norm()) for d in gradients)])
    return next((i for i, (d, e) in enumerate(zip(gradients, others, strict=True))
                 if (d - e).norm() > 10 * tolerance(precision) * (d.norm() + e.norm()) + noise), None)


def _other(what: str, off: float) -> CaptureError:
    """Make the error for a model that differs between training and measuring."""
    return CaptureError(f"{what} by {off:.2g} (relative) between training and measuring. A measurement replaces the model's "
                        "parameters by aliases with the same numbers, and the model depends on which objects they are (it asks "
                        "for their type, or looks them up in a table). The numbers would belong to another network. Use "
                        "parameters as tensors in forward(), and keep tables by their names.")


# ------------------------------------------------------------------------------------------------------------- examine

SURVEYED, FEWEST = 8, 4  # examples, and how many it takes at least
OUTPUTS = 8  # arrays of their outputs that a survey holds
UNCALLED = Remark(Mark.IDLE, "never called on the probe")
UNREACHED = Remark(Mark.IDLE, "never used: no gradient reaches it from the output on the probe (read by .data, detached, "
                              "wrapped in a new Parameter or cached by an earlier call, it is a constant)")
UNKNOWN = Remark(Mark.UNDEFINED, f"{NO_MAP}: its tangent kernel is exact, by gradients of single examples, and its feature "
                                 f"correlations are not known")


def survey(model: nn.Module, x: Inputs, state: State, output: Output | None = None, memory: float = math.inf) -> Survey:
    """Look at ``x`` (a few examples): run all of them and the inner ones, and compare. Where the graphs of all have no room in
    ``memory``, it takes fewer of them; and where these have none, blocks of the model are computed again for every backward
    pass."""
    network = Network(model, state, output=output)
    _check_modes(model)
    part, weight = _weighed(network, x)
    m, item, n = inner(x).stop - 1, part.f.element_size(), count(x)
    graph, light, asked = weight.kept // (m * item), weight.light // (m * item), sum(c.shape.numel() for c in part.calls) // m
    few, blocks = min(n, FEWEST), weight.blocks
    options: list[tuple[int, int, tuple[str, ...]]] = [(n, graph, ()), (few, graph, ()), (few, light, blocks)]
    fit = (o for o in options if item * looked(model, o[0], o[1], asked, part.f.numel() // m) <= max(memory, SMALL))
    n, _, anew = next(fit, options[-1])
    x = select(x, slice(0, n))
    network = replace(network, survey=Survey(anew=anew))
    network = replace(network, survey=Survey(anew=anew, splits=splits(network, x)))
    if network.survey.splits or inner(x).stop - 1 != m:
        part = network.glance(x, inner(x))
    m = inner(x).stop - 1
    first = network.glance(x)
    drawn = draws(network, x, first, part)
    first, layouts, expand = expanded(network, x, first, layouts_of(first, part, count(x), m))
    del part, first
    trim(weight_bytes(model))
    whole = network.run(x, expand=dict.fromkeys(expand, count(x)))
    verified = verify(network, x, whole, layouts, drawn)
    result = describe(Survey(
        verified.maps, expand, notes=verified.notes, outputs=whole.f[0].numel(), shape=tuple(whole.f.shape[1:]), drawn=drawn,
        differentiates=whole.differentiates, accumulates=verified.accumulates, splits=network.survey.splits,
        given=given(whole), readouts=readouts(whole), direct=direct(whole),
        matrices=matrices_of(whole), graph=graph, blocks=weight.blocks, light=light, examples=count(x)))
    result = result.lightened() if network.survey.anew else result
    result.biases = biases(model, result, verified, whole.aliases, tolerance(coarsest(whole.state, whole.f)))
    result = _one_by_one(network, x, result, verified)
    result.notes |= _idle(model, result, whole)
    f = whole.f.detach()
    verified.tallies.clear()  # calls hold the graph
    del whole
    check_trained(network, x, f, verified)
    return result


def _weighed(network: Network, x: Inputs) -> tuple[Pass, Weight]:
    """A pass of the inner examples, through which nothing goes backward, and what it would keep. A model that differentiates
    inside its forward pass must keep it; torch.func allows no such look."""
    for hold in (False, True):
        scale = Scale(network.model, network.state, hold)
        with contextlib.suppress(Wanted, RuntimeError):
            with scale:
                part = network.run(x, inner(x))
            weight = scale.weight(c.read for c in part.calls)
            return part, Weight(weight.kept) if part.differentiates or network.state.parametrised else weight
    return network.run(x, inner(x)), Weight()


def looked(model: nn.Module, n: int, graph: int, asked: int, outputs: int) -> int:
    """Numbers that a look at n examples holds: their graphs, what two halves of them ask, arrays of their outputs, the gradients
    of all weights, and the largest of them three times more: in what maps add up to, its parts, and the difference."""
    weights = [p.numel() for p in model.parameters()]
    return n * (graph + 2 * asked + OUTPUTS * outputs) + sum(weights) + 3 * max(weights, default=0)


def _one_by_one(network: Network, x: Inputs, result: Survey, verified: Verified) -> Survey:
    """Maps that are read one example at a time are looked at on one example; those that fail are refused. The gradients of such
    parameters, and of those without a map, are taken from single examples: they must be the batch's."""
    names = [name for name, info in result.maps.items() if not info.layouts]
    own = {id(network.state[name]) for name in {*result.structured, *result.biases}}
    loose = {key: network.state[name] for name, p in network.model.named_parameters()
             if p.requires_grad and (key := id(network.state[name])) in verified.exact and key not in own}
    if loose and not result.drawn:
        check_sums(network, x, verified.R, list(loose.values()), verified.exact)
    if not names:
        return result
    refused = verify_one(network.alone(x, 0), names)
    return describe(replace(result, notes=result.notes | refused,
                            maps={name: info for name, info in result.maps.items() if name not in refused}))


def matrices_of(run: Pass) -> dict[str, Tensor]:
    """Matrices of all maps that are called, by name."""
    return {c.name: c.map.matrix(c.module, c.weight.detach()) for c in run.calls}


def _check_modes(model: nn.Module) -> None:
    """A batch norm in train mode is known to mix, and named."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise MixingError(f"layer {name!r} is a {type(module).__name__} in train mode: {MIXING}")


def draws(network: Network, x: Inputs, whole: Pass, part: Pass, again: bool = False) -> bool:
    """Do outputs differ from pass to pass (dropout)? They are compared with those of fewer examples, of single ones, and of the
    same ones among others: if they differ there and not from pass to pass, examples mix, and an error says so. ``again``: mixing
    is looked for by the audit."""
    _check_outputs(network, x, whole, part)
    off = _difference(whole.f[inner(x)], part.f, whole.f)
    if not again:
        _check_neighbours(network, x, whole)
        off = max(off, *(_alone(network, x, whole, i) for i in (0, count(x) - 1)))
    if not off > math.sqrt(torch.finfo(coarsest(network.state, whole.f)).eps):
        return network.model.training and _draws_within(network, x)
    if torch.equal(network.glance(x, record=False, seed=1).f, whole.f):
        raise _mixing(off)
    _check_repeatable(network, x, whole)
    return True


def _check_repeatable(network: Network, x: Inputs, whole: Pass) -> None:
    """Raise an error unless the same inputs, weights and seed give the same outputs: else there is no one function to measure."""
    change = _difference(network.glance(x, record=False).f, whole.f, whole.f)
    if change > math.sqrt(torch.finfo(coarsest(network.state, whole.f)).eps):
        raise CaptureError(f"the model's outputs change by {change:.1g} (relative) from one call to the next, with the same "
                           f"inputs, weights and random seed. It keeps a state between calls, or draws random numbers from a "
                           f"generator of its own, so there is no one function to measure. Reset the state at the start of "
                           f"forward(), or keep it in an attribute or a buffer of a module: these are the same in every pass.")


def _draws_within(network: Network, x: Inputs) -> bool:
    """Does what layers read differ from pass to pass? Outputs need not: a head that was initialised with zeros has the same."""
    a, b = (network.glance(x, seed=seed).calls for seed in (0, 1))
    return len(a) != len(b) or any(not same_bits(c.read, d.read) for c, d in zip(a, b, strict=True))


def _check_neighbours(network: Network, x: Inputs, whole: Pass) -> None:
    """Each half of the examples among copies of itself, in a batch of the same size with the same draws: nothing but rounding may
    change its outputs, and rounding changes them no more than another order does."""
    n, here = count(x), torch.arange(count(x))
    others = [here % (n // 2), n // 2 + here % (n - n // 2)]
    kept = [here[:n // 2], here[n // 2:]]
    off = 0.0
    for among, mine in zip(others, kept, strict=True):
        index = torch.where(torch.isin(here, mine), here, among.roll(1))
        run = network.glance(select(x, index), record=False)
        off = max(off, _difference(run.f[mine], whole.f[mine], whole.f) if run.f.shape == whole.f.shape else math.inf)
    eps = torch.finfo(coarsest(network.state, whole.f)).eps
    if off > 32 * eps:
        turned = network.glance(select(x, here.flip(0)), record=False)
        rounding = _difference(turned.f.flip(0), whole.f, whole.f) if not _drawing(network, x, whole) else 0.0
        if off > max(32 * eps, 10 * rounding):
            _check_repeatable(network, x, whole)
            raise _mixing(off)


def _drawing(network: Network, x: Inputs, whole: Pass) -> bool:
    """Return whether the outputs depend on the random seed."""
    return not torch.equal(network.glance(x, record=False, seed=1).f, whole.f)


def _mixing(off: float) -> MixingError:
    """Make the error for a model that mixes examples."""
    return MixingError(f"the output of an example changes by {off:.1g} (relative) with the other examples in its batch: {MIXING}")


def _check_outputs(network: Network, x: Inputs, whole: Pass, part: Pass) -> None:
    """Raise an error unless outputs have valid shapes and finite numbers."""
    f, n, m = whole.f, count(x), inner(x).stop - 1
    if f.dim() == 0 or not f.numel() or f.shape[0] != n or part.f.shape[0] != m:
        raise CaptureError(f"the model's output has shape {tuple(f.shape)} for {n} examples. Richter needs the examples "
                           f"on the first axis: use output=lambda out: ... to pick or transpose it (a loss averaged over "
                           f"the batch is not an output).")
    if part.f.shape[1:] != f.shape[1:]:
        raise MixingError(f"the model's output has shape {tuple(f.shape)} for {n} examples and {tuple(part.f.shape)} for {m} of "
                          f"them: what one example gives depends on how many others there are (similarities between the "
                          f"examples of a batch, or padding to its longest). Pick outputs that each example has by itself, e.g. "
                          f"the embeddings: output=lambda out: ....")
    check_finite(f)


def _alone(network: Network, x: Inputs, whole: Pass, i: int) -> float:
    """How much the output of one example changes when it is alone; 0 for models that cannot run on one."""
    try:
        f = network.glance(x, slice(i, i + 1), record=False).f
    except UNABLE:
        return 0.0
    among = whole.f[i:i + 1]
    return _difference(f, among, whole.f) if f.shape == among.shape else 0.0


def check_alone(network: Network, x: Inputs, whole: Pass, i: int) -> None:
    """Does an example give alone what it gives among the others?"""
    off = _alone(network, x, whole, i)
    if off > math.sqrt(torch.finfo(coarsest(network.state, whole.f)).eps):
        _check_repeatable(network, x, whole)
        raise _mixing(off)


def check_same(network: Network, x: Inputs, whole: Pass, order: Tensor, outputs: Tensor) -> None:
    """Has each example the same outputs among all others as among half of them? ``outputs`` are those of ``order``."""
    f = whole.f.detach()
    if outputs.shape != f.shape:
        raise MixingError(f"the model's output has shape {tuple(f.shape)} for {len(f)} examples and another one for half of "
                          f"them: what one example gives depends on the others. Pick outputs that each has by itself.")
    off = (f[order.to(f.device)] - outputs).reshape(len(f), -1).abs().amax(1) / (f.abs().max() + 1e-300)
    if off.max() > math.sqrt(torch.finfo(coarsest(network.state, f)).eps):
        check_alone(network, x, whole, int(order[off.argmax()]))
        check_alone(network, select(x, order), replace(whole, f=outputs), int(off.argmax()))


def _difference(f: Tensor, other: Tensor, scale: Tensor) -> float:
    """The largest difference, relative to the largest of all outputs."""
    return (f - other).detach().abs().max().item() / (scale.detach().abs().max().item() + 1e-300)


def check_sums(network: Network, x: Inputs, R: Tensor, weights: Sequence[Tensor], exact: dict[int, Tensor]) -> None:
    """The gradients of single examples must add up to that of the batch, or there are no gradients of single examples. One that
    is nothing but rounding beside those of other weights (of a shift before a softmax) says nothing."""
    added, largest = [torch.zeros(w.shape, dtype=w.dtype, device=w.device) for w in weights], 0.0
    for i in range(count(x)):
        run = network.alone(x, i, record=False)
        if i == 0:
            others = list({id(w): w for w in run.aliases.values()}.values())
            largest = max(float(d.norm()) for d in run.backward(R[i], others)[1])
        gradients = run.backward(R[i], weights)[1]
        added = [a + d for a, d in zip(added, gradients, strict=True)]
    precision = coarsest(network.state, R)
    noise = rounding(precision) * largest
    for w, a in zip(weights, added, strict=True):
        if (a - exact[id(w)]).norm() > 10 * tolerance(precision) * (a.norm() + exact[id(w)].norm()) + noise:
            raise MixingError(f"the gradients of single examples do not add up to that of the batch (in its backward pass, if "
                              f"not in its forward pass): {MIXING}")


def _idle(model: nn.Module, survey: Survey, whole: Pass) -> dict[str, Remark]:
    """Remarks on weight matrices that no map speaks of: does autograd use them?"""
    users: dict[int, list[str]] = {}  # id of a weight -> the maps that it is
    for c in whole.calls:
        users.setdefault(id(c.weight), []).append(c.name)
    computed = tuple(f"{m.module}." if m.module else "" for m in survey.maps.values() if m.weight is None)
    silent: dict[str, tuple[str, nn.Module]] = {}
    remarks = {}
    for owner, module in model.named_modules():
        for attribute, p in module._parameters.items():
            name = f"{owner}.{attribute}" if owner else attribute
            label = owner if attribute == "weight" else name
            if p is None or not _matrix(attribute, p) or name.startswith(computed) or label in survey.notes \
                    or name not in whole.aliases or any(k == label or k.startswith(f"{label}.") for k in survey.maps):
                continue
            shared = users.get(id(whole.aliases[name]))
            if shared is None:
                silent[label] = (name, module)
            elif attribute == "weight":
                remarks[label] = Remark(Mark.IDLE, f"not called itself: its weight is used as {shared[0]!r}")
    places = [whole.aliases[name] for name, _ in silent.values()]
    with whole.state.in_place():
        gradients = torch.autograd.grad(whole.f.sum(), places, retain_graph=True, allow_unused=True) if places else ()
    whole.state.accumulated()  # is let go: whether a model adds to .grad is asked of the pass
    for (label, (_, module)), alias, gradient in zip(silent.items(), places, gradients, strict=True):
        used = gradient is not None or (whole.accumulates and id(alias) in whole.adds)
        reachable = module in whole.called or isinstance(module, (nn.ParameterList, nn.ParameterDict))  # these are never called
        remarks[label] = UNKNOWN if used else UNREACHED if reachable else UNCALLED
    return remarks


def note_called(network: Network, x: Inputs, run: Pass) -> None:
    """Layers that none of the first examples has called and these do, though not as a linear map: their remark is another one."""
    survey = network.survey
    idle = [label for label, remark in survey.notes.items() if remark == UNCALLED]
    called = {network.modules.get(id(module)) for module in run.called} if idle else ()
    if any(label in called or label.rpartition(".")[0] in called for label in idle):
        others = {label: remark for label, remark in survey.notes.items() if label not in idle}
        survey.notes.update(_idle(network.model, replace(survey, notes=others), network.run(x)))


def _matrix(attribute: str, p: Tensor) -> bool:
    """Is this a weight matrix, and not a bias, a gain or a token in the shape of one?"""
    return p.dim() >= 2 if attribute == "weight" else sum(length > 1 for length in p.shape) >= 2
