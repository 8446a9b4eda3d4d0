"""Queries, keys and values among the outputs of a fused projection. A name only says where to look. What the model does with the
outputs decides: attention multiplies queries with keys, and what comes of it with values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from richter.core import Mark, Remark
from richter.instrument.capture import Call, Inputs, Output, Pass, Product, State, count, device_of, forward, select, unkept
from richter.layers import Kind
from richter.layers.linear import is_fused

# ---------------------------------------------------------------------------------------------------------------- maps
# What a survey learns: about each linear map, and about the model as a whole.

Layout = Literal["major", "minor", "second"]  # where the examples are in a layer's own [b, s, ...]: see by_example


@dataclass(frozen=True)
class MapInfo:
    """Facts that the survey learned about one linear map."""

    name: str
    kind: Kind
    layouts: tuple[Layout, ...]  # one for each call; empty when only one example at a time can be read
    rows: tuple[int, ...]  # of each call, for one example on the axis that holds the examples
    module: str
    weight: str | None  # the parameter behind it; None for a weight computed from parameters
    shape: tuple[int, ...]  # of the matrix
    width: int  # numbers written per example, over all calls
    placed: Callable[[], Tensor]  # makes ``index``: for a large matrix it takes more memory than the matrix
    unfolded: int = 0  # numbers per example that reading it copies (patches of a convolution); 0 for a view
    live: int = 0  # positions from which an output can be reached

    @property
    def index(self) -> Tensor:
        """Position of each entry of the matrix in the flattened weight."""
        return self.placed().reshape(-1)

    @property
    def entries(self) -> int:
        """Number of entries of the matrix."""
        return math.prod(self.shape)

    @property
    def writes(self) -> int:
        """Number of outputs of the map at one position."""
        return self.shape[0] if self.kind == "diagonal" else math.prod(self.shape[:-1])

    @property
    def positions(self) -> int:
        """Number of positions of one example, over all calls."""
        return max(1, self.width // self.writes)

    @property
    def reads(self) -> int:
        """Numbers of one example that it reads; a lookup one at each position."""
        return self.positions * (1 if self.kind == "lookup" else self.shape[-1])

    @property
    def silent(self) -> bool:
        """Return whether no output is reached from most positions."""
        return 0 < 2 * self.live <= self.positions


@dataclass
class Survey:
    """Maps that can be measured, and how; ``notes`` says what cannot."""

    maps: dict[str, MapInfo] = field(default_factory=dict)
    expand: set[str] = field(default_factory=set)  # modules whose output all examples share
    splits: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)  # modules that are several maps
    structured: dict[str, tuple[str, ...]] = field(default_factory=dict)  # parameter -> maps that rebuild its gradient
    biases: dict[str, tuple[str, ...]] = field(default_factory=dict)  # bias -> maps whose summed g is its gradient
    notes: dict[str, Remark] = field(default_factory=dict)  # layer -> why it has no number
    outputs: int = 0
    shape: tuple[int, ...] = ()  # of one example's output
    matrices: dict[str, Tensor] = field(default_factory=dict)  # of every map that is called
    graph: int = 0  # numbers per example that a forward pass keeps for its backward passes
    blocks: tuple[str, ...] = ()  # that could be computed again for every backward pass, where it has no room
    light: int = 0  # numbers per example that would be kept then
    anew: tuple[str, ...] = ()  # those that are
    differentiates: bool = False  # the model itself does, inside its forward pass
    accumulates: bool = False  # the model adds to .grad in its backward pass
    given: frozenset[str] = frozenset()  # maps that read the model's input, as it is or in a form that depends on no weight
    readouts: frozenset[str] = frozenset()  # maps whose output is the model's
    direct: frozenset[str] = frozenset()  # those of them whose units are the outputs, each one output, as it is or scaled
    examples: int = 0  # that were looked at
    vectorised: bool = True  # may torch.func.vmap be tried for gradients of single examples?
    drawn: bool = False  # the forward pass draws (dropout): examples go one by one, each with a seed of its own

    def note(self, name: str) -> Mark | None:
        """Mark of the remark on a layer."""
        return self.notes[name].mark if name in self.notes else None

    def lightened(self) -> Survey:
        """Return the survey with blocks that are recomputed for every backward pass."""
        return replace(self, anew=self.blocks, graph=self.light) if self.blocks else self

    @property
    def silent(self) -> set[str] | None:
        """Modules all of whose maps are silent; None if the model differentiates: then nothing may be skipped."""
        if self.differentiates:
            return None
        return {m.module for m in self.maps.values()} - {m.module for m in self.maps.values() if not m.silent}

    @property
    def batched(self) -> dict[str, MapInfo]:
        """Maps that can be read for many examples at a time."""
        return {name: m for name, m in self.maps.items() if m.layouts}


def with_siblings(maps: Mapping[str, MapInfo], names: Collection[str]) -> list[str]:
    """These maps, and then the other uses of the same parameters, of whatever kind: together they make a gradient."""
    weights = {maps[k].weight for k in names if k in maps} - {None}
    return [*names, *(k for k, info in maps.items() if info.weight in weights and k not in names)]


# ------------------------------------------------------------------------------------------------------------- layouts
# The few examples on which a model is surveyed, and how they lie in what a layer reads and writes: on the axis that shrinks when
# there are fewer of them.

Candidates = tuple[str, ...]  # how examples may lie in a call; none: in no way that is known; SHARED: not at all
Layouts = dict[str, list[Candidates]]  # of each map, for each of its calls
UNABLE = (RuntimeError, ValueError, IndexError, AssertionError)  # what models raise that do not run on so few examples, or so
SHARED: Candidates = ("shared",)  # what all examples have in common


@dataclass
class Forwards:
    """Timed forward passes: their examples and seconds."""

    examples: int = 0
    seconds: float = 0.0

    def add(self, examples: int, seconds: float) -> None:
        self.examples, self.seconds = self.examples + examples, self.seconds + seconds


@dataclass(frozen=True)
class Network:
    """A model with the weights, the survey and the output with which it is run."""

    model: nn.Module
    state: State
    survey: Survey = field(default_factory=Survey)
    output: Output | None = None
    audit: Any = None  # the Audit that checks what is captured in this measurement; None: nothing is checked
    wide: bool = False  # compute in float64 with what is captured: products of single precision leave its range
    forwards: Forwards = field(default_factory=Forwards)  # timed passes
    norms: Sequence[nn.Module] = ()  # these use the mean and variance of the examples in hand

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return device_of(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """Precision of sums of products; float32 for networks in half precision."""
        weights = next((t.dtype for t in self.state.values() if t.is_floating_point()), torch.float32)
        return torch.float64 if self.wide or weights == torch.float64 else torch.float32

    @cached_property
    def modules(self) -> dict[int, str]:
        """Names of the modules by id."""
        return {id(module): name for name, module in self.model.named_modules()}

    def run(self, x: Inputs, rows: slice = slice(None), **options: Any) -> Pass:
        """Make a forward pass of some of the examples; ``options`` as in richter.instrument.capture.forward."""
        x = x if rows == slice(None) else select(x, rows)
        return forward(self.model, x, self.state, output=self.output, splits=self.survey.splits, anew=self.survey.anew,
                       norms=self.norms, **options)

    def glance(self, x: Inputs, rows: slice = slice(None), **options: Any) -> Pass:
        """Make a forward pass without a graph: for what layers read, and for outputs."""
        return unkept(lambda: self.run(x, rows, **options))

    def alone(self, x: Inputs, i: int, **options: Any) -> Pass:
        """Run a forward pass of one example."""
        return self.run(x, slice(i, i + 1), **options)


def inner(x: Inputs) -> slice:
    """Examples without their neighbours on both sides, which must not matter to them."""
    n = count(x)
    return slice(1, n - 1) if n > 2 else slice(1, 2)


def by_example(t: Shaped[Tensor, "b s *rest"], n: int, layout: Layout) -> Shaped[Tensor, "n p *rest"]:
    """Rearrange what a layer saw on its own axes b, s: the examples first, then the positions of each."""
    b, s, rest = t.shape[0], t.shape[1], t.shape[2:]
    if layout == "second":  # examples along the second axis, as in recurrent layers
        return t.reshape(b, n, s // n, *rest).movedim(1, 0).reshape(n, -1, *rest)
    if layout == "minor":  # b counts examples fastest
        return t.reshape(b // n, n, s, *rest).movedim(1, 0).reshape(n, -1, *rest)
    return t.reshape(n, -1, *rest)  # b counts examples slowest


def grouped(calls: Sequence[Call]) -> dict[str, list[Call]]:
    """Calls of each map, in order."""
    groups: dict[str, list[Call]] = {}
    for c in calls:
        groups.setdefault(c.name, []).append(c)
    return groups


def layouts_of(whole: Pass, part: Pass, n: int, m: int) -> Layouts:
    """Find where the examples may be in each call of each map: a pass of n of them is compared with one of m (the second to the
    last but one)."""
    fewer = grouped(part.calls)
    return {name: [_candidates(c, d, n, m, whole.state.precision) for c, d in zip(calls, fewer[name], strict=True)]
            if len(calls) == len(fewer.get(name, [])) else [()] * len(calls)
            for name, calls in grouped(whole.calls).items()}


def _candidates(c: Call, d: Call, n: int, m: int, precision: torch.dtype) -> Candidates:
    """Candidates of one call, on n examples and on m. Rows that are alike leave several: which of them it is, gradients tell."""
    if c.shape == d.shape:
        return SHARED if c.shape.numel() else ()  # of no example: nothing is known
    if len(c.shape) != len(d.shape):
        return ()
    axes = [i for i, (p, q) in enumerate(zip(c.shape, d.shape, strict=True)) if p != q]
    axis = axes[0]
    if len(axes) > 1 or axis > 1 or c.shape[axis] % n or c.shape[axis] // n * m != d.shape[axis]:
        return ()
    if axis == 1:
        return ("second",) if len(c.shape) > 2 else ()
    if c.shape[0] == n:
        return ("major",)
    r, x, y = c.shape[0] // n, c.read, d.read  # r rows for each example: side by side, or n apart?
    if x.shape[0] != c.shape[0] or y.shape[1:] != x.shape[1:]:
        return ()
    apart = x.reshape(r, n, *x.shape[1:])[:, 1:1 + m].reshape(y.shape)
    return tuple(layout for layout, rows in (("major", x[r:r + r * m]), ("minor", apart)) if close(rows, y, precision))


def tolerance(dtype: torch.dtype) -> float:
    """How far two right computations of one gradient may differ."""
    return {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 5e-2 if dtype.is_floating_point else 0.0)


def rounding(dtype: torch.dtype) -> float:
    """How large a gradient that should be zero may be, beside those of other weights."""
    return min(64 * torch.finfo(dtype).eps, tolerance(dtype))


def close(x: Tensor, y: Tensor, precision: torch.dtype) -> bool:
    """Tell whether two tensors are equal up to the rounding of two right computations of this precision; relative to the largest
    of them, however small that is."""
    x, y = x.detach(), y.detach()
    tol = max(tolerance(x.dtype), tolerance(precision)) if x.is_floating_point() else 0.0
    return x.shape == y.shape and (not x.numel() or bool((x - y).abs().max() <= tol * x.abs().max()))


def expanded(network: Network, x: Inputs, whole: Pass, layouts: Layouts) -> tuple[Pass, Layouts, set[str]]:
    """Give outputs that all examples share (a position embedding) an example axis, wherever that leaves the model's output as it
    was: (the pass with it, its layouts, the modules that got one)."""
    shared = {network.modules[id(c.module)] for c in whole.calls if c.name in layouts and SHARED in layouts[c.name]}
    accepted: set[str] = set()
    for module in sorted(shared):
        try:
            trial = network.glance(x, expand=dict.fromkeys({*accepted, module}, count(x)))
        except (*UNABLE, TypeError):
            continue  # the model does not broadcast there: one example at a time, then
        if close(trial.f, whole.f, whole.state.precision):
            accepted.add(module)
            whole = trial
    if accepted:
        m = inner(x).stop - 1
        part = network.glance(x, inner(x), expand=dict.fromkeys(accepted, m))
        layouts = layouts_of(whole, part, count(x), m)
    return whole, layouts, accepted


# ---------------------------------------------------------------------------------------------------------------- ends
# The two ends of a model: the maps that read its input, and those whose output is its own.

# names of operations, as autograd has them, that only move, add up or scale numbers
LINEAR = ("Add", "Alias", "AsStrided", "Cat", "Clone", "Div", "Expand", "Gather", "Index", "Mean", "Mul", "Neg", "Permute",
          "Reshape", "Select", "Slice", "Split", "Squeeze", "Stack", "Sub", "Sum", "T", "ToCopy", "Transpose", "Unbind",
          "UnsafeView", "Unsqueeze", "View")
SUMS = ("Add", "Sub", "Cat", "Stack")


def given(run: Pass) -> frozenset[str]:
    """Maps none of whose calls read anything that depends on weights."""
    return frozenset(c.name for c in run.calls) - {c.name for c in run.calls if not c.given}


def readouts(run: Pass) -> frozenset[str]:
    """The maps that are met first on the way back from the outputs: through what only moves numbers, through sums of several
    branches, and through functions of one tensor (a softmax, a mean over positions) where nothing has been added yet."""
    maps: dict[Any, set[str]] = {}
    for c in run.calls:
        maps.setdefault(c.edge.node, set()).add(c.name)
    met: set[str] = set()
    seen, todo = set(), [(run.f.grad_fn, False)]
    while todo:
        node, branched = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in maps:
            met |= maps[node]
            continue
        if isinstance(node, BackwardCFunction):  # a function of a user's own: what happens inside is not seen
            continue
        befores = [before for before, _ in node.next_functions if before is not None]
        branches = [before for before in befores if not hasattr(before, "variable")]  # without weights
        kind = node.name().rpartition("Backward")[0]
        if len(branches) < len(befores) and kind not in LINEAR:  # a product with a weight that is no map
            continue
        if len(branches) == 1 and (kind in LINEAR or not branched):
            todo.append((branches[0], branched))
        elif kind in SUMS:
            todo += [(before, True) for before in branches]
    return frozenset(met)


def direct(run: Pass) -> frozenset[str]:
    """Read-outs whose units are the outputs: a random vector, sent back from the outputs of one example, arrives there with the
    same numbers in another order (up to one factor), as many in every unit. The sum of g^T g over all outputs is then c I."""
    f, found = run.f, set[str]()
    vector = torch.zeros_like(f)
    vector[0] = 1 + torch.rand(f[0].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(f)
    sent = vector[0].flatten().double().sort().values
    called, last = [c.name for c in run.calls], readouts(run)
    for c in run.calls:
        if c.name not in last or called.count(c.name) > 1 or c.map.kind != "dense":
            continue
        with run.state.in_place(), torch.enable_grad():
            (g,) = torch.autograd.grad((f * vector).sum(), [c.edge], retain_graph=True, allow_unused=True)
        run.state.accumulated()
        units = None if g is None else c.map.outputs(c.module, g)
        if units is None or not units.any():
            continue
        reached = (units != 0).flatten(0, -2).sum(0)
        arrived = units[units != 0].abs().double().sort().values
        if (reached == reached[0]).all() and len(arrived) == len(sent) and torch.allclose(
                arrived / arrived[-1], sent / sent[-1], rtol=1e-5):
            found.add(c.name)
    return frozenset(found)


# -------------------------------------------------------------------------------------------------------------- splits

Channels = Bool[Tensor, "d_out"]
Split = dict[str, Tensor]  # "q", "k", "v" -> which outputs


def splits(network: Network, x: Inputs) -> dict[str, Split]:
    """For each module that is named like a fused projection and acts as one in all of its calls: its parts. Any other is one
    map."""
    candidates = {name for name, module in network.model.named_modules() if is_fused(name, module)}
    if not candidates:
        return {}
    products: list[Product] = []
    run = network.run(x, products=products)
    parts: dict[str, list[Split | None]] = {}
    for i, call in enumerate(run.calls):
        if call.name in candidates:
            parts.setdefault(call.name, []).append(_parts(call, [p.operands for p in products if p.after > i], run.state))
    return {name: first for name, (first, *others) in parts.items()
            if first is not None and all(_same(first, other) for other in others)}


def _parts(call: Call, products: Sequence[tuple[Tensor, ...]], state: State) -> Split | None:
    """Find how the first products whose factors all depend on the outputs of ``call`` use them: q k^T and then (...) v, or
    k^T v and then q (...), or all of it at once. None if they are something else."""
    pair: tuple[Channels, Channels] | None = None
    for operands in products:
        reached = [_reached(t, call, state) for t in operands]
        if not reached or not all(c.any() for c in reached):
            continue  # a constant, or another projection, is a factor
        if len(reached) == 3:
            return _disjoint(*reached)
        if len(reached) != 2:
            return None
        a, b = reached
        if pair is None:
            if (a & b).any():
                return None
            pair = (a, b)
            continue
        both = pair[0] | pair[1]
        if torch.equal(a, both):
            return _disjoint(*pair, b)
        return _disjoint(a, *pair) if torch.equal(b, both) else None
    return None


def _reached(t: Tensor, call: Call, state: State) -> Channels:
    """The outputs of ``call`` on which ``t`` depends: of others, the derivative is zero to the last bit."""
    nothing = torch.zeros(call.shape[-1], dtype=torch.bool)
    if not t.requires_grad:
        return nothing
    weights = torch.randn(t.shape, generator=torch.Generator().manual_seed(0)).to(t.device, t.dtype)
    with state.in_place():  # a backward pass may run modules again
        (g,) = torch.autograd.grad(t, [call.edge], grad_outputs=weights, retain_graph=True, allow_unused=True)
    state.accumulated()  # is let go
    return nothing if g is None else (g.reshape(-1, g.shape[-1]) != 0).any(0).cpu()


def _disjoint(q: Channels, k: Channels, v: Channels) -> Split | None:
    """The parts, if every output is in one of them."""
    if not bool((q.int() + k.int() + v.int() == 1).all()):
        return None
    return {name: part.nonzero()[:, 0] for name, part in zip("qkv", (q, k, v), strict=True)}


def _same(split: Split, other: Split | None) -> bool:
    """Return whether two splits of the weights are equal."""
    return other is not None and all(torch.equal(split[name], other[name]) for name in split)
