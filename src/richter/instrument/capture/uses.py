"""Uses of a parameter as a linear map outside the forward of a module that is known to be one: products of it or of a part of it,
lookups in it, convolutions with it, and the projections inside nn.MultiheadAttention."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from richter.instrument.capture.parts import Key, Part, as_map, key_of, key_of_map
from richter.instrument.capture.products import Labels, product
from richter.instrument.capture.state import State
from richter.layers import LinearMap, View, view_of
from richter.layers.attention import split, whole
from richter.layers.conv import convolution

CONVOLUTIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
TIMES = {torch.mul, Tensor.mul, torch.multiply, Tensor.multiply}
OVER = {torch.div, Tensor.div, torch.divide, Tensor.divide, torch.true_divide, Tensor.true_divide}
STEPS = 64  # of a computation of a weight that are looked at
COPIES = {Tensor.contiguous, Tensor.clone, torch.clone, Tensor.to, Tensor.float, Tensor.double, Tensor.type_as}


class Use(NamedTuple):
    """A weight, what it is multiplied with, and how that is a linear map."""

    name: str  # of the map
    map: LinearMap
    module: nn.Module  # that owns the weight
    weight: Tensor
    read: Tensor
    order: tuple[int, ...] | None = None  # of the axes of what is written: positions, groups, d_out; None: as they are
    shape: tuple[int, ...] = ()  # in that order, with groups and d_out as one axis each


class Scope:
    """Whose the parameters of a model are, and whose forward is running."""

    def __init__(self, model: nn.Module, state: State) -> None:
        self.model = model
        self.modules = dict(model.named_modules())
        self.named = {module: name for name, module in self.modules.items()}
        self.names: dict[int, list[str]] = {}  # id of a weight -> its names, the first one first
        for name, weight in state.items():
            if weight.requires_grad and name.rpartition(".")[0] in self.modules:  # a module with two names is known by the first
                self.names.setdefault(id(weight), []).append(name)
        self.views: dict[nn.Module, tuple[str, View]] = {}  # modules that are known to be linear maps
        for name, module in self.modules.items():
            if module not in self.views and (view := view_of(name, module)):
                self.views[module] = (name, view)
        self.path: list[nn.Module] = []  # the modules whose forward is running, the innermost last
        self.called: set[nn.Module] = set()
        self._maps: dict[str, dict[str, Key | None]] = {}  # parameter -> its maps by their names, in the order of their first use
        self.copies: dict[int, tuple[Tensor, int, Part]] = {}  # id of a copy of a part -> it, its version, the part
        self.duals = {id(w._base): w for w in state.values() if w._base is not None and w.shape == w._base.shape
                      and w.stride() == w._base.stride()}  # in forward mode a view of a weight has the weight without its tangent

    @property
    def running(self) -> nn.Module | None:
        return self.path[-1] if self.path else None

    def view(self, module: nn.Module | None) -> View:
        return {} if module is None else self.views.get(module, ("", {}))[1]

    def uses(self, func: Any, args: Any, kwargs: Any, z: Tensor) -> Iterator[Use]:
        """What a call of ``func`` that returned ``z`` does with parameters that are not the running module's own."""
        if func in COPIES:
            self._copied(args[0], z)
        elif func in TIMES or func in OVER:
            self._multiple(func, args, kwargs, z)
        elif func is F.embedding:
            yield from self._looked_up(*args, **kwargs)
        elif func is Tensor.__getitem__ or func in (torch.index_select, Tensor.index_select):
            if not z._is_view():  # one row, or a slice, is a part
                yield from self._indexed(func, args, kwargs)
        elif func in CONVOLUTIONS:
            yield from self._convolved(CONVOLUTIONS[func], *args, **kwargs)
        elif (call := product(func, args, kwargs)) is not None:
            for w, in_w, x, in_x in call.sides():
                part = self._part(w)
                if part is not None:
                    yield from self._multiplied(part, in_w, x.detach(), in_x, call.out, z)

    def projection(self, which: str, x: Tensor, weight: Tensor) -> Use:
        """One of the four maps of nn.MultiheadAttention, whose forward is running: q, k, v or out_proj."""
        attention = self.model if self.running is None else self.running
        name = self.named.get(attention, "")
        owner, m, parameter = attention, whole(f"{which}_proj_weight"), weight
        if which == "out_proj":
            owner, m = getattr(attention, "out_proj", attention), whole("weight")
        elif weight._base is not None and id(weight._base) in self.names:
            m, parameter = split(which), weight._base  # a third of in_proj_weight
        return Use(f"{name}.{which}" if name else which, m, owner, parameter, x)

    def returned(self, module: nn.Module, z: Tensor) -> Use | None:
        """A table that returns its first, second, ... rows as they are looks them up."""
        part = self._part(z) if isinstance(module, nn.Embedding) else None
        if part is None or part.parameter is not module.weight or z.dim() != 2 or part.axes[0][1] != module.weight.stride(0) \
                or part.axes[1] != (module.weight.shape[1], module.weight.stride(1)):
            return None
        first = part.offset // module.weight.stride(0)
        rows = torch.arange(first, first + len(z), device=z.device)
        table = Part(part.parameter, tuple(zip(module.weight.shape, module.weight.stride(), strict=True)), 0)
        return next(self._lookup(table, rows), None)

    def _part(self, w: Any) -> Part | None:
        """The part of a parameter that ``w`` is; None if it is none, or of the weight of the module whose own forward is running
        (which speaks for itself)."""
        if not isinstance(w, Tensor) or not w.requires_grad or w.layout is not torch.strided:
            return None
        base = w._base if w.grad_fn is not None else None  # None: a view made under no_grad
        copy = self.copies.get(id(w)) or self.copies.get(id(base))
        if copy is not None and copy[1] == w._version:
            return copy[2] if copy[0] is w else _part_of_copy(w, copy[0], copy[2])
        p = w if id(w) in self.names else self.duals.get(id(base), base)
        if p is None or id(p) not in self.names or p.dtype != w.dtype \
                or any(getattr(self.running, m.weight, None) is p for m in self.view(self.running).values()):
            return None
        return Part(p, tuple(zip(w.shape, w.stride(), strict=True)), int(w.storage_offset() - p.storage_offset()))

    def _copied(self, w: Any, z: Tensor) -> None:
        """A copy of a part stands for the part, until it is written into; not one that rounds: its gradients are rounded too."""
        part = self._part(w)
        if part is not None and z is not w and z.shape == w.shape and z.device == w.device and z.is_floating_point() \
                and torch.finfo(z.dtype).eps <= torch.finfo(w.dtype).eps:
            self.copies[id(z)] = (z, z._version, part)

    def _multiple(self, func: Any, args: Any, kwargs: Any, z: Tensor) -> None:
        """A part times a number, or divided by one, stands for the part: W / sqrt(n) in the NTK parametrisation. A product with
        it then reads x / sqrt(n)."""
        if len(args) != 2 or kwargs:
            return
        (w, number), over = args, func in OVER
        if not over and not isinstance(number, (int, float)) and self._part(w) is None:
            w, number = number, w
        constant = isinstance(number, Tensor) and number.dim() == 0 and not number.requires_grad
        part = self._part(w)
        if part is not None and (constant or isinstance(number, (int, float))) and z.shape == w.shape and z.dtype == w.dtype:
            value = float(number)
            if math.isfinite(value) and value:
                self.copies[id(z)] = (z, z._version, replace(part, scale=part.scale / value if over else part.scale * value))

    def _multiplied(self, part: Part, in_w: Labels, x: Tensor, in_x: Labels, out: Labels, z: Tensor) -> Iterator[Use]:
        """A product with a part. Its axes are groups where both what it is multiplied with and the result have them, d_in and
        d_out where one of the two has; those that it has not are positions."""
        if any(len(set(labels)) < len(labels) for labels in (in_w, in_x, out)) or x.is_sparse or not x.is_floating_point():
            return  # a diagonal is taken
        lengths = dict(zip(in_x, x.shape, strict=True))
        axes = {k: a for k, a in zip(in_w, part.axes, strict=True)
                if not (k in lengths and k in out and (a[0] == 1 or a[1] == 0))}  # the same weight along this axis
        for k in (k for k in in_x if k in axes and lengths[k] == 1 < axes[k][0]):
            x, in_x = x.select(in_x.index(k), 0), tuple(other for other in in_x if other != k)  # the same input along this axis
        groups, d_in = [k for k in axes if k in in_x and k in out], [k for k in axes if k in in_x and k not in out]
        d_out, sites = [k for k in axes if k not in in_x and k in out], [k for k in out if k not in axes]
        if len(groups) + len(d_in) + len(d_out) < len(axes) or {*sites, *groups, *d_in} != set(in_x) \
                or any(lengths[k] != axes[k][0] for k in d_in):
            return  # something is added up beforehand
        for role in (groups, d_out, d_in):
            role.sort(key=lambda k: -axes[k][1])  # as they lie in the parameter, in whatever order the product names them
        read = x.permute([in_x.index(k) for k in (*sites, *groups, *d_in)])
        order = tuple(out.index(k) for k in (*sites, *groups, *d_out))
        lead = z.permute(order).shape[:len(sites)]
        if read.shape[:len(sites)] != lead:
            return
        many, reads, writes = (math.prod(axes[k][0] for k in role) for role in (groups, d_in, d_out))
        ends = (*lead, many) if groups else lead
        shape = (*ends, writes)
        plain = order == tuple(range(z.dim())) and shape == z.shape
        part, read = replace(part, axes=tuple(axes.values())), read if part.scale == 1 else read * part.scale
        yield from self._use(part, "grouped" if groups else "dense", [[axes[k] for k in role] for role in (groups, d_out, d_in)],
                             read.reshape(*ends, reads), None if plain else order, shape)

    def _looked_up(self, x: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
                   norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False) -> Iterator[Use]:
        """F.embedding; the padding index reads nothing, because its row has no gradient."""
        part = self._part(weight)
        if part is not None and not scale_grad_by_freq:
            padding = None if padding_idx is None else padding_idx % len(weight)
            yield from self._lookup(part, x if padding is None else torch.where(x == padding, -1, x))

    def _indexed(self, func: Any, args: Any, kwargs: Any) -> Iterator[Use]:
        """table[rows], or table.index_select(0, rows)."""
        table, *index = args
        if func is not Tensor.__getitem__:
            given = dict(zip(("dim", "index"), index, strict=False)) | kwargs
            index = [given.get("index")] if given.get("dim") == 0 else []
        elif isinstance(index[0], tuple):
            index = list(index[0])
        part = self._part(table) if len(index) == 1 and isinstance(index[0], Tensor) else None
        if part is not None and index[0].dtype in (torch.int64, torch.int32) and len(part.axes) == 2:
            yield from self._lookup(part, torch.where(index[0] < 0, index[0] + len(table), index[0]))

    def _lookup(self, part: Part, rows: Tensor) -> Iterator[Use]:
        if len(part.axes) == 2 and part.scale == 1:
            yield from self._use(part, "lookup", [[], [part.axes[1]], [part.axes[0]]], rows)

    def _convolved(self, space: int, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
                   dilation: Any = 1, groups: int = 1) -> Iterator[Use]:
        """F.conv1d, F.conv2d, F.conv3d."""
        part = self._part(weight)
        if part is None and self._computed(weight):
            m, running = convolution(tuple(weight.shape[2:]), stride, padding, dilation, groups), self.running
            yield Use(self.named[running], m, running, weight, x)  # type: ignore[index, arg-type]
        if part is None or len(part.axes) != space + 2:
            return
        x = x if part.scale == 1 else x * part.scale
        (d, step), *patch = part.axes
        roles = [[], [(d, step)], patch] if groups == 1 else [[(groups, d // groups * step)], [(d // groups, step)], patch]
        m = convolution(tuple(weight.shape[2:]), stride, padding, dilation, groups)
        for use in self._use(part, m.kind, roles, x):
            yield use._replace(map=LinearMap(use.map.matrix, m.inputs, m.outputs, m.kind))

    def _computed(self, w: Tensor) -> bool:
        """Is this computed from the weight of the running module, and of its shape? It then stands for the weight, as that of a
        parametrisation does. It may depend on nothing but the module's own parameters: not on what the module reads."""
        own = getattr(self.running, "weight", None)
        if self.running in self.views or not isinstance(own, nn.Parameter) or own.shape != w.shape or w.grad_fn is None:
            return False
        parameters = {id(p) for p in self.running._parameters.values()}  # type: ignore[union-attr]
        todo, seen = [w.grad_fn], set[Any]()
        while todo and len(seen) < STEPS:
            node = todo.pop()
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) not in parameters:
                return False
            befores = {before for before, _ in node.next_functions if before is not None} - seen
            seen |= befores
            todo += befores
        return not todo

    def _use(self, part: Part, kind: Any, roles: list[list[Any]], read: Tensor, order: tuple[int, ...] | None = None,
             shape: tuple[int, ...] = ()) -> Iterator[Use]:
        groups, d_out, d_in = (tuple(role) for role in roles)
        name = self._name(part, key_of(kind, part.offset, groups, d_out, d_in)) if part.distinct else None
        if name is not None:
            m = as_map(part.parameter.stride(), kind, part.offset, groups, d_out, d_in)
            yield Use(name, m, self._owner(part.parameter)[0], part.parameter, read, order, shape)

    def _owner(self, parameter: Tensor) -> tuple[nn.Module, str]:
        """Module and attribute: of the module whose forward is running, if it has the parameter, or of the first that has it
        inside the innermost running module: a tied weight belongs to the block that uses it."""
        if self.running is not None:
            for attribute in self.running._parameters:
                if getattr(self.running, attribute) is parameter:
                    return self.running, attribute
        owner, _, attribute = self.nearest(parameter).rpartition(".")
        return self.modules[owner], attribute

    def nearest(self, parameter: Tensor) -> str:
        """Of the names of a parameter the first inside the innermost running module that has it; else the first."""
        names = self.names[id(parameter)]
        for module in reversed(self.path if len(names) > 1 else ()):
            inside = f"{self.named.get(module, '')}."
            for name in names:
                if name.startswith(inside):
                    return name
        return names[0]

    def _name(self, part: Part, key: Key) -> str | None:
        """``block.proj`` for a raw parameter, ``block.proj.2`` and ``block.proj.0:4`` for parts of it; a weight that is called
        "weight" goes by its module. Where one parameter is several maps, its module's own or the first in forward has this name;
        the transpose has ``.T`` behind it, the same matrix that reads in another way its kind, any other ``.use2`` and so on."""
        module, attribute = self._owner(part.parameter)
        owner, view = self.named[module], self.view(module)
        parameter = f"{owner}.{attribute}" if owner else attribute
        maps = self._maps.get(parameter)
        if maps is None:
            maps = self._maps[parameter] = {
                (f"{owner}.{suffix}" if suffix and owner else owner or suffix): key_of_map(m, module, part.parameter)
                for suffix, m in view.items() if getattr(module, m.weight, None) is part.parameter}
        for name, known in maps.items():
            if known == key:
                return name
        label = part.label()
        if label is None:
            return None
        plain = owner if attribute == "weight" and not label and owner and (not view or "" in view) else parameter
        name = plain = f"{plain}.{label}" if label else plain
        if plain in maps:
            other = maps[plain]
            way = "T" if other is not None and key.entries == other.transposed else \
                key.kind if other is not None and key.entries == other.entries else f"use{len(maps) + 1}"
            name = f"{plain}.{way}" if f"{plain}.{way}" not in maps else f"{plain}.use{len(maps) + 1}"
        maps[name] = key
        return name


def _part_of_copy(w: Tensor, copy: Tensor, part: Part) -> Part | None:
    """A view of a copy that lies in memory as the part does."""
    if tuple(zip(copy.shape, copy.stride(), strict=True)) != part.axes:
        return None
    return replace(part, axes=tuple(zip(w.shape, w.stride(), strict=True)),
                   offset=part.offset + int(w.storage_offset() - copy.storage_offset()))
