"""What one batch says about each linear map: captures with the examples first, and what a survey found out that makes
them possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from richter.core import CaptureError, Mark, Remark, SelectionError
from richter.instrument.capture import Call, Inputs, Output, Pass, State, forward
from richter.layers import Kind

Layout = Literal["major", "minor", "second"]  # where the examples are in a layer's own [b, s, ...]


@dataclass(frozen=True)
class MapInfo:
    """What the survey learned about one linear map."""

    name: str
    kind: Kind
    layouts: tuple[Layout, ...]  # one for each call; empty when only one example at a time can be read
    module: str
    weight: str | None  # the parameter behind it; None for a weight computed from parameters
    shape: tuple[int, ...]  # of the matrix
    width: int  # numbers written per example, over all calls
    index: Tensor  # where each entry of the matrix stands in the flattened weight
    unfolded: int = 0  # numbers per example that reading it copies (patches of a convolution); 0 for a view
    live: int = 0  # positions from which an output can be reached

    @property
    def positions(self) -> int:
        """Of one example, over all calls."""
        return max(1, self.width // (self.shape[0] if self.kind == "diagonal" else torch.Size(self.shape[:-1]).numel()))

    @property
    def silent(self) -> bool:
        """Is nothing asked of it at most positions?"""
        return 0 < 2 * self.live <= self.positions


@dataclass
class Survey:
    """What can be measured, and how; ``notes`` says in words what cannot."""

    maps: dict[str, MapInfo] = field(default_factory=dict)
    expand: set[str] = field(default_factory=set)  # modules whose output all examples share
    structured: dict[str, tuple[str, ...]] = field(default_factory=dict)  # parameter -> maps that rebuild its gradient
    biases: dict[str, tuple[str, ...]] = field(default_factory=dict)  # bias -> maps whose summed g is its gradient
    notes: dict[str, Remark] = field(default_factory=dict)  # layer -> why it has no number
    outputs: int = 0
    shape: tuple[int, ...] = ()  # of one example's output
    matrices: dict[str, Tensor] = field(default_factory=dict)  # of every map that is called
    graph: int = 0  # numbers per example that a forward pass keeps for its backward passes
    differentiates: bool = False  # the model itself does, inside its forward pass
    drawn: bool = False  # the forward pass draws (dropout): examples go one by one, each with a seed of its own

    @property
    def silent(self) -> set[str] | None:
        """Modules all of whose maps are silent; None if the model differentiates: then nothing may be skipped."""
        if self.differentiates:
            return None
        return {m.module for m in self.maps.values()} - {m.module for m in self.maps.values() if not m.silent}

    @property
    def batched(self) -> dict[str, MapInfo]:
        return {name: m for name, m in self.maps.items() if m.layouts}


def count(x: Inputs) -> int:
    """The number of examples of a tensor, tuple or dict of tensors."""
    if isinstance(x, (dict, tuple, list)) and len(x):
        return count(next(iter(x.values() if isinstance(x, dict) else x)))
    if not isinstance(x, Tensor) or x.dim() == 0:
        raise SelectionError(f"inputs are tensors, or tuples or dicts of tensors, with the examples first; not "
                             f"{'a number' if isinstance(x, Tensor) else type(x).__name__}.")
    return x.shape[0]


def select(x: Inputs, index: slice | Tensor | Sequence[int]) -> Inputs:
    """Some examples of a tensor, or of a tuple or dict of tensors; what is not a tensor is passed on."""
    if isinstance(x, Tensor):
        return x[index.to(x.device)] if isinstance(index, Tensor) else x[index]
    if isinstance(x, dict):
        return {k: select(v, index) for k, v in x.items()}
    return tuple(select(v, index) for v in x) if isinstance(x, (tuple, list)) else x


def by_example(t: Tensor, n: int, layout: Layout) -> Tensor:
    """[b, s, ...] as the layer saw it -> [n, s', ...]."""
    b, s, rest = t.shape[0], t.shape[1], t.shape[2:]
    if layout == "second":
        return t.reshape(b, n, s // n, *rest).movedim(1, 0).reshape(n, -1, *rest)
    if layout == "minor":
        return t.reshape(b // n, n, s, *rest).movedim(1, 0).reshape(n, -1, *rest)
    return t.reshape(n, -1, *rest)


def check_finite(f: Tensor) -> None:
    if not torch.isfinite(f).all():
        raise CaptureError("the model's output on the probe contains NaN or Inf, so every statistic of it would too. "
                           "Look for a diverged run, or inputs outside the range the model was trained on.")


def grouped(calls: Sequence[Call]) -> dict[str, list[Call]]:
    groups: dict[str, list[Call]] = {}
    for c in calls:
        groups.setdefault(c.name, []).append(c)
    return groups


@dataclass(frozen=True)
class LayerCapture:
    """What one batch says about one linear map. Axes: n examples, s positions, v cotangents; the last axes depend on
    the kind of map, see richter.layers.LinearMap."""

    kind: Kind
    W: Tensor  # the matrix now
    h: Tensor  # "n s d_in": what it read
    g: Tensor  # "v n s d_out": what the outputs ask of it, d <V_v, f(x_n)> / dz
    W0: Tensor | None = None  # the same at initialisation
    h0: Tensor | None = None
    g0: Tensor | None = None
    f: Tensor | None = None  # "n k"
    calls: tuple[int, ...] = ()  # how many of the positions belong to each call
    shapes: tuple[torch.Size, ...] = ()  # of what each call wrote, as the layer saw it

    def take(self, rows: slice | Tensor) -> LayerCapture:
        """The same for some of the examples."""
        return replace(self, h=self.h[rows], g=self.g[:, rows], f=None if self.f is None else self.f[rows],
                       h0=None if self.h0 is None else self.h0[rows], g0=None if self.g0 is None else self.g0[:, rows])


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


RowCotangents = Callable[[Tensor, slice], Tensor]  # f "n k" of the examples `rows` of a probe -> V "v n k"


@dataclass
class Recording:
    """One forward pass of some examples, to be asked any number of times: ``g`` for any cotangents, ``h`` once."""

    found: Survey
    n: int
    f: Tensor  # "n k", detached
    seen: Pass  # with the calls of the chosen maps alone
    where: dict[str, list[tuple[int, Layout]]]  # for each map, its calls among seen.calls and where their examples are
    _reads: dict[str, Tensor] = field(default_factory=dict)
    _live: dict[str, tuple[Tensor, Tensor, Tensor] | None] = field(default_factory=dict)  # live, silent, what the live ones read

    def asked(self, V: Tensor) -> dict[str, Tensor]:
        """d <V, f> / dz of each map, "n s d_out", by one backward pass; views where the layout allows."""
        found, calls = self.seen.backward(V)[0], self.seen.calls
        return {name: _joined([by_example(calls[i].map.outputs(calls[i].module, found[i]), self.n, k) for i, k in own], 1)
                for name, own in self.where.items()}

    def reads(self, name: str) -> Tensor:
        """What a map read, "n s d_in"; computed once."""
        if name not in self._reads:
            self._reads[name] = _joined([by_example(self.seen.calls[i].inputs(), self.n, k) for i, k in self.where[name]], 1)
        return self._reads[name]

    def reads_of(self, name: str, rows: Tensor) -> Tensor:
        """The same of some examples; only their patches are unfolded where the layout allows."""
        calls = [self.seen.calls[i] for i, _ in self.where[name]]
        if len(calls) > 1 or name in self._reads or self.where[name][0][1] != "major" or len(calls[0].read) != self.n:
            return self.reads(name)[rows]
        return calls[0].inputs(rows).flatten(0, 1).unflatten(0, (len(rows), -1))

    def captures(self, V: Tensor, reads: bool = True) -> dict[str, LayerCapture]:
        """The same for a stack of cotangents V "v n k", with what was read and the matrices."""
        stacked: dict[str, Tensor] = {}
        for v in range(len(V)):
            for name, g in self.asked(V[v]).items():
                if len(V) == 1:
                    stacked[name] = g[None]
                    continue
                if v == 0:
                    stacked[name] = room_for(g, len(V))
                stacked[name][v] = g
        captured = {}
        for name, own in self.where.items():
            calls = [self.seen.calls[i] for i, _ in own]
            h, g = self.reads(name) if reads else self.f[:, :0], stacked[name]
            wrote = max(1, sum(c.shape.numel() for c in calls) // max(1, g.shape[2]))  # numbers at one position
            captured[name] = LayerCapture(calls[0].map.kind, calls[0].map.matrix(calls[0].module, calls[0].weight.detach()), h,
                                          g, f=self.f, calls=tuple(c.shape.numel() // wrote for c in calls),
                                          shapes=tuple(c.shape for c in calls))
        return captured

    def trimmed(self, name: str, c: LayerCapture) -> LayerCapture:
        """Without the positions from which no output can be reached (those before the last token, say). They are found in
        the first cotangents and looked at again in all others: what is dropped is zero."""
        if c.g.shape[2] < 2:
            return c
        if name not in self._live:
            spoken = c.g[0].flatten(2).abs().sum((0, 2)) > 0
            live, silent = spoken.nonzero()[:, 0], (~spoken).nonzero()[:, 0]
            self._live[name] = (live, silent, c.h[:, live]) if 0 < len(live) <= len(silent) else None
        known = self._live[name]
        if known is None:
            return c
        live, silent, h = known
        if c.g.index_select(2, silent).any():
            self._live[name] = None
            return c
        return replace(c, g=c.g.index_select(2, live), h=h)


def record(model: nn.Module, x: Inputs, rows: slice, state: State, found: Survey, names: Sequence[str],
           output: Output | None = None) -> Recording:
    """One forward pass of the examples ``rows`` of a probe, remembering the maps ``names``. A map that is not batched can
    only be seen on a single example, whose every call it then is; it is left out if there is none."""
    n = count(x)
    seen = forward(model, x, state, output=output, expand=dict.fromkeys(found.expand, n), silent=found.silent,
                   seed=rows.start)
    groups = grouped(seen.calls)
    names = [name for name in names if groups.get(name) or n > 1]
    for name in groups.keys() - found.maps.keys() - found.notes.keys():
        found.notes[name] = Remark(Mark.IDLE, "called for some examples only, and not for the first ones, on which the capture "
                                              "is verified")
    where: dict[str, list[tuple[int, Layout]]] = {}
    calls: list[Call] = []
    for name in names:
        own, layouts = groups.get(name, []), found.maps[name].layouts
        if n > 1 and len(own) != len(layouts):
            raise CaptureError(f"layer {name!r} was called {len(layouts)} times on the first examples and "
                               f"{len(own)} times on others: its use depends on the data. "
                               f"Leave it out with layers=..., or measure with chunk=1.")
        alone: list[Layout] = ["major"] * len(own)  # a single example: everything is its own
        where[name] = list(enumerate(layouts if n > 1 else tuple(alone), len(calls)))
        calls += own
    f = seen.f.detach().reshape(n, -1)
    check_finite(f)
    return Recording(found, n, f, replace(seen, calls=calls), where)


def layer_captures(model: nn.Module, x: Inputs, rows: slice, cotangents: RowCotangents, state: State, found: Survey,
                   names: Sequence[str], output: Output | None = None, reads: bool = True) -> dict[str, LayerCapture]:
    """Capture the maps ``names`` on one chunk: one forward pass, one backward pass for each cotangent."""
    seen = record(model, x, rows, state, found, names, output)
    return seen.captures(cotangents(seen.f, rows), reads)


def room_for(g: Tensor, v: int, shape: Sequence[int] | None = None) -> Tensor:
    """Empty "v ..." of which each part lies in memory as ``g`` does: a transposed view is filled without transposing."""
    shape = g.shape if shape is None else shape
    order = sorted(range(g.dim()), key=g.stride, reverse=True)
    store = g.new_empty(v, *(shape[i] for i in order))
    return store.permute(0, *(1 + order.index(i) for i in range(g.dim())))


def _joined(parts: Sequence[Tensor], axis: int) -> Tensor:
    """The calls of one map side by side along its positions; most maps are called once."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), axis)


def example_gradients(model: nn.Module, x: Inputs, rows: slice, cotangents: RowCotangents, state: State,
                      names: Sequence[str], output: Output | None = None) -> dict[str, Tensor]:
    """d <V_v, f(x_n)> / d parameter, "v n p", by plain autograd on one example after another: always right."""
    gathered: dict[str, list[Tensor]] = {name: [] for name in names}
    for i in range(count(x)):
        seen = forward(model, select(x, slice(i, i + 1)), state, output=output, record=False, seed=rows.start + i)
        check_finite(seen.f)
        V = cotangents(seen.f.detach().reshape(1, -1), slice(rows.start + i, rows.start + i + 1))
        places = [state[name] for name in names]
        found = [seen.backward(V[v], places)[1] for v in range(len(V))]
        for j, name in enumerate(names):
            gathered[name].append(torch.stack([d[j].reshape(-1) for d in found]))
    return {name: torch.stack(r, 1) for name, r in gathered.items()}


def widened(c: LayerCapture) -> LayerCapture:
    """Half precision is read as it is and summed in float32; what is read and what is asked have one precision."""
    dtype = c.g.dtype if c.g.dtype in (torch.float32, torch.float64) else torch.float32
    h = c.h.to(dtype) if c.h.is_floating_point() else c.h
    return c if c.g.dtype == dtype and h is c.h else replace(c, W=c.W.to(dtype), h=h, g=c.g.to(dtype))


def covariance(g: Float[Tensor, "v n s o"]) -> Float[Tensor, "o o"]:
    """sum over v, n, s of g g^T."""
    if g.shape[2] > g.shape[3]:
        g = g.flatten(0, 1)
        return torch.bmm(g.mT, g).sum(0)
    g = g.reshape(-1, g.shape[-1])
    return g.T @ g
