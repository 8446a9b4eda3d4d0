"""Uses of a parameter as a linear map outside the forward of a module that is known to be one: products of it or of a part of it,
lookups in it, convolutions with it, and the projections inside nn.MultiheadAttention.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from richter.instrument.capture.state import State
from richter.layers import Kind, LinearMap, View
from richter.layers.attention import split, whole
from richter.layers.conv import convolution
from richter.layers.linear import positions

# --------------------------------------------------------------------------------------------------------------- parts
# A parameter, or a part of it, as it stands in a product: which entries, in which order.

Axis = tuple[int, int]  # (length, stride)
Axes = tuple[Axis, ...]


class Key(NamedTuple):
    """Entries of a parameter that form a map's matrix [groups, d_out, d_in], and the kind of its inputs. Uses of a parameter with
    equal keys are the same map."""

    kind: Kind
    offset: int
    groups: Axes
    d_out: Axes
    d_in: Axes


def merged(axes: Sequence[Axis]) -> Axes:
    """Drop axes of length one, and join neighbours that can be walked through as one."""
    result: list[Axis] = []
    for length, stride in axes:
        if length == 1:
            continue
        if result and result[-1][1] == length * stride:
            result[-1] = (result[-1][0] * length, stride)
        else:
            result.append((length, stride))
    return tuple(result)


@dataclass(frozen=True)
class ParameterPart:
    """A view of a parameter, or a multiple of one: the whole, a slice, a transpose, a reshape."""

    parameter: Tensor
    axes: Axes
    offset: int  # from the parameter's first entry, in its memory
    scale: float = 1.0  # by which it is multiplied before it is used (W / sqrt(n))

    @property
    def distinct(self) -> bool:
        """Return whether each entry of the parameter occurs in the part at most once."""
        reach = 0
        for length, stride in sorted((a for a in self.axes if a[0] > 1), key=lambda a: a[1]):
            if stride <= reach:
                return False
            reach += (length - 1) * stride
        return True

    def label(self) -> str | None:
        """"" for the whole parameter, "2" for its third row, "0:4", ":,0:3"; None if it is no slice of it."""
        first = self._index(self.offset)
        stops = self._stops(first)
        if stops is None:
            return None
        texts = [":" if (a, b, step) == (0, length, 1) else str(a) if b == a + 1 else f"{a}:{b}" + f":{step}" * (step > 1)
                 for a, (b, step), length in zip(first, stops, self.parameter.shape, strict=True)]
        while texts and texts[-1] == ":":
            texts.pop()
        return ",".join(texts)

    def _index(self, offset: int) -> list[int]:
        """Index of the entry of the parameter at this offset."""
        lengths, strides = self.parameter.shape, self.parameter.stride()
        index = [0] * len(lengths)
        for i in sorted(range(len(lengths)), key=lambda i: -strides[i]):
            if lengths[i] > 1:
                index[i], offset = divmod(offset, strides[i])
        return index

    def _stops(self, first: list[int]) -> list[tuple[int, int]] | None:
        """For each axis of the parameter, where the slice that starts at ``first`` ends, and its step."""
        lengths, strides = self.parameter.shape, self.parameter.stride()
        axes = _sorted(self.axes)
        ends = self._index(self.offset + sum((length - 1) * stride for length, stride in axes))
        box = [(b - a + 1, stride) for a, b, stride in zip(first, ends, strides, strict=True)]
        if all(length > 0 for length, _ in box) and merged(_sorted(box)) == merged(axes):
            return [(b + 1, 1) for b in ends]
        stops: dict[int, tuple[int, int]] = {}
        for length, stride in axes:  # with steps: each axis is one of the parameter's
            fitting = [i for i in range(len(lengths)) if lengths[i] > 1 and stride % strides[i] == 0
                       and first[i] + (length - 1) * (stride // strides[i]) < lengths[i] and i not in stops]
            if not fitting:
                return None
            i = max(fitting, key=lambda i: strides[i])
            stops[i] = (first[i] + (length - 1) * (stride // strides[i]) + 1, stride // strides[i])
        return [stops.get(i, (first[i] + 1, 1)) for i in range(len(lengths))]


def _sorted(axes: Sequence[Axis]) -> list[Axis]:
    """Axes longer than one, by falling stride."""
    return sorted((a for a in axes if a[0] > 1), key=lambda a: -a[1])


def key_of_map(m: LinearMap, module: nn.Module, weight: Tensor) -> Key | None:
    """Key of a map that a file in layers/ describes; None if its view copies entries."""
    whole = torch.empty_strided(weight.shape, weight.stride(), device="meta")
    matrix = m.matrix(module, whole)
    if (matrix is not whole and matrix._base is not whole) or matrix.dim() not in (2, 3):
        return None
    axes = [*zip(matrix.shape, matrix.stride(), strict=True)]
    return Key(m.kind, int(matrix.storage_offset()), *map(merged, (axes[:-2], axes[-2:-1], axes[-1:])))


@lru_cache(maxsize=4096)
def as_map(strides: tuple[int, ...], kind: Kind, offset: int, groups: Axes, d_out: Axes, d_in: Axes) -> LinearMap:
    """The map whose matrix [groups, d_out, d_in] are these entries of a parameter that lies in memory with ``strides``. It reads
    [..., groups, d_in] (a lookup: indices), and writes [..., groups, d_out]."""
    axes = (*groups, *d_out, *d_in)
    size, stride = [length for length, _ in axes], [step for _, step in axes]
    many = [math.prod(length for length, _ in role) for role in (groups, d_out, d_in)]
    shape = many if kind == "grouped" else many[1:]

    def matrix(m: nn.Module, w: Tensor) -> Tensor:
        if w.stride() != strides:
            w = torch.empty_strided(w.shape, strides, dtype=w.dtype, device=w.device).copy_(w)
        return w.as_strided(size, stride, w.storage_offset() + offset).reshape(shape)

    def arrange(m: nn.Module, x: Tensor) -> Tensor:
        return in_groups(x) if kind == "grouped" else positions(x)

    return LinearMap(matrix, rows if kind == "lookup" else arrange, arrange, kind)


def rows(m: nn.Module, x: Tensor) -> Tensor:
    """Indices [n, ...] of a lookup as rows [n, s]."""
    return x.reshape(x.shape[0], x.shape[1:].numel()) if x.dim() else x.reshape(1, 1)


def in_groups(x: Tensor) -> Tensor:
    """[n, ..., r, d] -> [n, s, r, d];  [r, d] -> [1, 1, r, d]."""
    if x.dim() < 3:
        return x[None, None]
    return x.reshape(x.shape[0], x.shape[1:-2].numel(), *x.shape[-2:])


# ------------------------------------------------------------------------------------------------------------ products
# Calls that multiply two tensors and add up: F.linear, matmul and its kin, einsum, tensordot. Each axis of the two operands and
# of the result gets a label; equal labels are the same axis.

Labels = tuple[Any, ...]  # one for each axis


class Contraction(NamedTuple):
    """Axes of a product result[out] = sum of a[in_a] b[in_b] over the axes that are not in out; an axis of length one is
    broadcast."""

    a: Tensor
    in_a: Labels
    b: Tensor
    in_b: Labels
    out: Labels


Parse = Callable[..., Contraction | None]  # of the arguments of a function; None if it does something else, or something more


def _matmul(p: int, q: int) -> tuple[Labels, Labels, Labels] | None:
    """Labels of operands with p and q axes: the leading ones are matched from behind."""
    if not p or not q:
        return None
    batch = tuple(range(max(p, q, 2) - 2))
    rows, columns = (("row",) if p > 1 else ()), (("column",) if q > 1 else ())
    in_a = (*batch[len(batch) - max(p - 2, 0):], *rows, "sum")
    in_b = (*batch[len(batch) - max(q - 2, 0):], "sum", *columns)
    return in_a, in_b, (*batch, *rows, *columns)


def _inner(p: int, q: int) -> tuple[Labels, Labels, Labels] | None:
    """The last axes are summed over: F.linear, and torch.inner."""
    if not p or not q:
        return None
    rows, columns = tuple(("row", i) for i in range(p - 1)), tuple(("column", i) for i in range(q - 1))
    return (*rows, "sum"), (*columns, "sum"), (*rows, *columns)


def _tensordot(a: Tensor, b: Tensor, dims: Any = 2) -> Contraction | None:
    """``dims``: how many of the last and first axes are summed over, or which."""
    p, q = a.dim(), b.dim()
    if isinstance(dims, Tensor):
        return None
    left, right = ([*range(p - dims, p)], [*range(dims)]) if isinstance(dims, int) else map(list, dims)
    in_a: list[Any] = [("row", i) for i in range(p)]
    in_b: list[Any] = [("column", i) for i in range(q)]
    for i, j in zip(left, right, strict=True):
        in_a[i] = in_b[j] = ("sum", i % p)
    return Contraction(a, tuple(in_a), b, tuple(in_b), tuple(k for k in (*in_a, *in_b) if k[0] != "sum"))


def _einsum(equation: str, *operands: Any) -> Contraction | None:
    """Parse an einsum of two operands, with or without an arrow and an ellipsis; not with axes given as lists."""
    if not isinstance(equation, str):
        return None
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(operands) != 2 or len(terms) != 2 or not all(isinstance(t, Tensor) for t in operands):
        return None
    letters = [k for k in sorted(left) if k.isalpha() and left.count(k) == 1]
    lengths = [max(t.dim() - len(term.replace("...", "")), 0) if "..." in term else 0
               for t, term in zip(operands, terms, strict=True)]
    widest = max(lengths)
    dots = {m: tuple(("dot", widest - m + i) for i in range(m)) for m in (*lengths, widest)}
    in_a, in_b = (_labels(term, dots[m]) for term, m in zip(terms, lengths, strict=True))
    out = _labels(right, dots[widest]) if arrow else (*dots[widest], *letters)
    return Contraction(operands[0], in_a, operands[1], in_b, out)


def _labels(term: str, dots: Labels) -> Labels:
    """Labels of a term of an einsum, with the ellipsis replaced by ``dots``."""
    before, ellipsis, after = term.partition("...")
    return (*before, *(dots if ellipsis else ()), *after)


def _of(label: Callable[[int, int], tuple[Labels, Labels, Labels] | None], *names: str) -> Parse:
    """Reader of the arguments of a function by these names, the last two of which are the operands."""
    def parse(*args: Any, **kwargs: Any) -> Contraction | None:
        given = dict(zip(names, args, strict=False)) | kwargs
        a, b = given.get(names[-2]), given.get(names[-1])
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            return None
        labels = label(a.dim(), b.dim())
        return None if labels is None else Contraction(a, labels[0], b, labels[1], labels[2])
    return parse


def _contractions() -> dict[Any, Parse]:
    """Functions of torch that contract two tensors, with how their operands are read."""
    table: dict[Any, Parse] = {F.linear: _of(_inner, "input", "weight"), torch.tensordot: _tensordot, torch.einsum: _einsum}
    operands = {"matmul": ("input", "other"), "mm": ("input", "mat2"), "bmm": ("input", "mat2"), "mv": ("input", "vec"),
                "dot": ("input", "tensor"), "addmm": ("input", "mat1", "mat2"), "baddbmm": ("input", "batch1", "batch2"),
                "addmv": ("input", "mat", "vec")}
    for owner, (name, names) in itertools.product((torch, Tensor), operands.items()):
        table[getattr(owner, name)] = _of(_matmul, *names)
    table |= dict.fromkeys((Tensor.__matmul__, torch.linalg.matmul), _of(_matmul, "input", "other"))
    table |= dict.fromkeys((torch.inner, Tensor.inner), _of(_inner, "input", "other"))
    table[Tensor.__rmatmul__] = lambda b, a: table[Tensor.__matmul__](a, b)
    return table


# ---------------------------------------------------------------------------------------------------------------- uses

TIMES = {torch.mul, Tensor.mul, torch.multiply, Tensor.multiply}
OVER = {torch.div, Tensor.div, torch.divide, Tensor.divide, torch.true_divide, Tensor.true_divide}
MINUS = {torch.neg, Tensor.neg, torch.negative, Tensor.negative, Tensor.__neg__}
STEPS = 64  # of a computation of a weight that are looked at
COPIES = {Tensor.contiguous, Tensor.clone, torch.clone, Tensor.to, Tensor.float, Tensor.double, Tensor.type_as}


class Use(NamedTuple):
    """A weight with its other operand, and how their product is a linear map."""

    name: str  # of the map
    map: LinearMap
    module: nn.Module  # that owns the weight
    weight: Tensor
    read: Tensor
    order: tuple[int, ...] | None = None  # of the axes of what is written: positions, groups, d_out; None: as they are
    shape: tuple[int, ...] = ()  # in that order, with groups and d_out as one axis each


class Scope:
    """Whose the parameters of a model are, and whose forward is running."""

    def __init__(self, state: State) -> None:
        self.named, self.views = state.named, dict(state.views)  # modules that are known to be linear maps
        self.modules = {name: module for module, name in self.named.items()}
        self.names: dict[int, list[str]] = {}  # id of a weight -> its names, the first one first
        for name, weight in state.items():
            if weight.requires_grad and name.rpartition(".")[0] in self.modules:  # a module with two names is known by the first
                self.names.setdefault(id(weight), []).append(name)
        self.path = [nn.Module()]  # the modules whose forward is running, the innermost last; the first stands for none
        self.called: set[nn.Module] = set()
        self._maps: dict[str, dict[str, Key | None]] = {}  # parameter -> its maps by their names, in the order of their first use
        self.copies: dict[int, tuple[Tensor, int, ParameterPart]] = {}  # id of a copy of a part -> it, its version, the part
        self.duals = {id(w._base): w for w in state.values() if w._base is not None and w.shape == w._base.shape
                      and w.stride() == w._base.stride()}  # in forward mode a view of a weight has the weight without its tangent

    def view(self, module: nn.Module) -> View:
        """View of a module's parameters as linear maps; empty if its type has none."""
        return self.views.get(module, ("", {}))[1]

    def contracted(self, args: Any, kwargs: Any, z: Tensor, parse: Parse) -> Iterator[Use]:
        """Yield the uses of a product of two tensors, either of which may be a weight."""
        if kwargs.get("out") is not None or kwargs.get("alpha", 1) != 1:
            return
        call = parse(*args, **{name: value for name, value in kwargs.items() if name not in ("out", "alpha", "beta")})
        if call is None:
            return
        a, in_a, b, in_b, out = call
        for w, in_w, x, in_x in ((b, in_b, a, in_a), (a, in_a, b, in_b)):
            part = self._part(w)
            if part is not None:
                yield from self._multiplied(part, in_w, x.detach(), in_x, out, z)

    def projection(self, which: str, x: Tensor, weight: Tensor) -> Use:
        """One of the four maps of nn.MultiheadAttention, whose forward is running: q, k, v or out_proj."""
        attention = self.path[-1]
        name = self.named.get(attention, "")
        owner, m, parameter = attention, whole(f"{which}_proj_weight"), weight
        if which == "out_proj":
            owner, m = getattr(attention, "out_proj", attention), whole("weight")
        elif weight._base is not None and id(weight._base) in self.names:
            m, parameter = split(which), weight._base  # a third of in_proj_weight
        return Use(f"{name}.{which}" if name else which, m, owner, parameter, x)

    def returned(self, module: nn.Embedding, z: Tensor) -> Use | None:
        """Use of an embedding as a lookup of its first rows, if ``z`` is these rows unchanged; otherwise None."""
        part = self._part(z)
        if part is None or part.parameter is not module.weight or z.dim() != 2 or part.axes[0][1] != module.weight.stride(0) \
                or part.axes[1] != (module.weight.shape[1], module.weight.stride(1)):
            return None
        first = part.offset // module.weight.stride(0)
        rows = torch.arange(first, first + len(z), device=z.device)
        table = ParameterPart(part.parameter, tuple(zip(module.weight.shape, module.weight.stride(), strict=True)), 0)
        return next(self._lookup(table, rows), None)

    def _part(self, w: Any) -> ParameterPart | None:
        """The part of a parameter that ``w`` is; None if it is none, or of the weight of the module whose own forward is running
        (which speaks for itself)."""
        if not isinstance(w, Tensor) or not w.requires_grad or w.layout is not torch.strided:
            return None
        base = w._base if w.grad_fn is not None else None  # None: a view made under no_grad
        copy = self.copies.get(id(w)) or self.copies.get(id(base))
        if copy is not None and copy[1] == w._version:
            return copy[2] if copy[0] is w else _part_of_copy(w, copy[0], copy[2])
        p, running = w if id(w) in self.names else self.duals.get(id(base), base), self.path[-1]
        if p is None or id(p) not in self.names or p.dtype != w.dtype \
                or any(getattr(running, m.weight, None) is p for m in self.view(running).values()):
            return None
        return ParameterPart(p, tuple(zip(w.shape, w.stride(), strict=True)), int(w.storage_offset() - p.storage_offset()))

    def copied(self, args: Any, kwargs: Any, z: Tensor) -> tuple[()]:
        """A copy of a part stands for the part, until it is written into; not one that rounds: its gradients are rounded too."""
        w = args[0] if args else kwargs["input"]
        part = self._part(w)
        if part is not None and z is not w and z.shape == w.shape and z.device == w.device and z.is_floating_point() \
                and torch.finfo(z.dtype).eps <= torch.finfo(w.dtype).eps:
            self.copies[id(z)] = (z, z._version, part)
        return ()

    def multiple(self, args: Any, kwargs: Any, z: Tensor, over: bool = False) -> tuple[()]:
        """A part times a number, or divided by one (``over``), stands for the part: W / sqrt(n) in the NTK parametrisation. A
        product with it then reads x / sqrt(n)."""
        if len(args) != 2 or kwargs:
            return ()
        w, number = args
        if not over and not isinstance(number, (int, float)) and self._part(w) is None:
            w, number = number, w
        constant = isinstance(number, Tensor) and number.dim() == 0 and not number.requires_grad
        part = self._part(w)
        if part is not None and (constant or isinstance(number, (int, float))) and z.shape == w.shape and z.dtype == w.dtype:
            value = float(number)
            if math.isfinite(value) and value:
                self.copies[id(z)] = (z, z._version, replace(part, scale=part.scale / value if over else part.scale * value))
        return ()

    def _multiplied(self, part: ParameterPart, in_w: Labels, x: Tensor, in_x: Labels, out: Labels, z: Tensor) -> Iterator[Use]:
        """Yield the uses of a product with a part of a parameter. Axes of the part are groups if both the other operand and the
        result have them, d_in or d_out if one of the two has them."""
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

    def looked_up(self, x: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
                  norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False) -> Iterator[Use]:
        """F.embedding; the padding index reads nothing, because its row has no gradient."""
        part = self._part(weight)
        if part is not None and not scale_grad_by_freq:
            padding = None if padding_idx is None else padding_idx % len(weight)
            yield from self._lookup(part, x if padding is None else torch.where(x == padding, -1, x))

    def indexed(self, table: Tensor, index: Any, z: Tensor) -> Iterator[Use]:
        """table[index]; one row, or a slice, is a part."""
        index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
        if z._is_view() or not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32):
            return
        part = self._part(table)
        if part is not None and len(part.axes) == 2:
            yield from self._lookup(part, torch.where(index < 0, index + len(table), index))

    def selected(self, args: Any, kwargs: Any, z: Tensor) -> Iterator[Use]:
        """Yield the lookup of ``table.index_select(0, index)``."""
        given = dict(zip(("input", "dim", "index"), args, strict=False)) | kwargs
        if given.get("dim") == 0:
            yield from self.indexed(given["input"], given.get("index"), z)

    def _lookup(self, part: ParameterPart, rows: Tensor) -> Iterator[Use]:
        """Yield the use of a table whose rows are looked up."""
        if len(part.axes) == 2 and part.scale == 1:
            yield from self._use(part, "lookup", [[], [part.axes[1]], [part.axes[0]]], rows)

    def convolved(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
                  dilation: Any = 1, groups: int = 1) -> Iterator[Use]:
        """Yield the use of the kernel in ``F.conv1d``, ``F.conv2d`` or ``F.conv3d``."""
        part, m = self._part(weight), convolution(tuple(weight.shape[2:]), stride, padding, dilation, groups)
        if part is None:
            if self._computed(weight):
                yield Use(self.named[self.path[-1]], m, self.path[-1], weight, x)
            return
        x = x if part.scale == 1 else x * part.scale
        (d, step), *patch = part.axes
        roles = [[], [(d, step)], patch] if groups == 1 else [[(groups, d // groups * step)], [(d // groups, step)], patch]
        for use in self._use(part, m.kind, roles, x):
            yield use._replace(map=LinearMap(use.map.matrix, m.inputs, m.outputs, m.kind))

    def _computed(self, w: Tensor) -> bool:
        """Return whether a tensor has the shape of the running module's weight and is computed from the module's own parameters
        alone. It then stands for the weight, as with a parametrisation."""
        running = self.path[-1]
        own = getattr(running, "weight", None)
        if running in self.views or not isinstance(own, nn.Parameter) or own.shape != w.shape or w.grad_fn is None:
            return False
        parameters = {id(p) for p in running._parameters.values()}
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

    def _use(self, part: ParameterPart, kind: Any, roles: list[list[Any]], read: Tensor, order: tuple[int, ...] | None = None,
             shape: tuple[int, ...] = ()) -> Iterator[Use]:
        """Yield the use of a parameter part as a linear map with these groups, outputs and inputs, if it has a name."""
        groups, d_out, d_in = (tuple(role) for role in roles)
        key = Key(kind, part.offset, *map(merged, (groups, d_out, d_in)))
        name = self._name(part, key) if part.distinct else None
        if name is not None:
            m = as_map(part.parameter.stride(), kind, part.offset, groups, d_out, d_in)
            yield Use(name, m, self._owner(part.parameter)[0], part.parameter, read, order, shape)

    def _owner(self, parameter: Tensor) -> tuple[nn.Module, str]:
        """Module and attribute: of the module whose forward is running, if it has the parameter, or of the first that has it
        inside the innermost running module: a tied weight belongs to the block that uses it."""
        for attribute in self.path[-1]._parameters:
            if getattr(self.path[-1], attribute) is parameter:
                return self.path[-1], attribute
        owner, _, attribute = self.nearest(parameter).rpartition(".")
        return self.modules[owner], attribute

    def nearest(self, parameter: Tensor) -> str:
        """Return the first name of a parameter inside the innermost running module that has it; else its first name."""
        names = self.names[id(parameter)]
        for module in reversed(self.path if len(names) > 1 else ()):
            inside = f"{self.named.get(module, '')}."
            for name in names:
                if name.startswith(inside):
                    return name
        return names[0]

    def _name(self, part: ParameterPart, key: Key) -> str | None:
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
            way = f"use{len(maps) + 1}"
            if other is not None and key[1:] == (other.offset, other.groups, other.d_in, other.d_out):
                way = "T"
            elif other is not None and key[1:] == other[1:]:
                way = key.kind
            name = f"{plain}.{way}" if f"{plain}.{way}" not in maps else f"{plain}.use{len(maps) + 1}"
        maps[name] = key
        return name


Reader = Callable[[Scope, Any, Any, Tensor], Iterable[Use]]  # arguments of a call by position and by keyword, what it returned


READERS: dict[Any, Reader] = {  # what a call of a function does with parameters that are not the running module's own
    **{func: partial(Scope.contracted, parse=parse) for func, parse in _contractions().items()},
    **dict.fromkeys(COPIES, Scope.copied), **dict.fromkeys(TIMES, Scope.multiple),
    **dict.fromkeys(OVER, partial(Scope.multiple, over=True)),
    **dict.fromkeys(MINUS, lambda scope, args, kwargs, z: scope.multiple((*args, -1.0), kwargs, z)),
    F.embedding: lambda scope, args, kwargs, z: scope.looked_up(*args, **kwargs),
    Tensor.__getitem__: lambda scope, args, kwargs, z: scope.indexed(args[0], args[1], z),
    **dict.fromkeys((torch.index_select, Tensor.index_select), Scope.selected),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), lambda scope, args, kwargs, z: scope.convolved(*args, **kwargs)),
}


def _part_of_copy(w: Tensor, copy: Tensor, part: ParameterPart) -> ParameterPart | None:
    """A view of a copy that lies in memory as the part does."""
    if tuple(zip(copy.shape, copy.stride(), strict=True)) != part.axes:
        return None
    return replace(part, axes=tuple(zip(w.shape, w.stride(), strict=True)),
                   offset=part.offset + int(w.storage_offset() - copy.storage_offset()))
