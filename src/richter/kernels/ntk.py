"""Tangent kernels of any model, layer by layer and exact: K_l = J_l J_l^T from what each linear map read and wrote.

Where a layer has one position, K_l = (h h^T) o (g g^T) and no gradient is formed; with positions the cheaper of
per-example gradients and pairs of positions is taken, by counting operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from richter.capture import Inputs, Output, State, device_of, quiet, state_of, to_device, unwrap, written
from richter.checks import check_inputs, check_weights
from richter.core import MemoryBudgetError, SelectionError, parse_bytes, show_bytes
from richter.cotangents import Cotangents, every_output
from richter.kernels.arrays import Array, as_tensors, like
from richter.layercapture import LayerCapture, MapInfo, RowCotangents, Survey, count, example_gradients, layer_captures, select
from richter.survey import SURVEYED, survey

Outputs = Literal["trace", "diagonal", "full"]
OUTPUTS = ("trace", "diagonal", "full")


def total(tensors: Iterable[Tensor]) -> Tensor:
    """Their sum, in a tensor of its own."""
    first, *rest = tensors
    first = first.clone()
    for t in rest:
        first += t
    return first


def contract(a: Tensor, b: Tensor, outputs: Outputs) -> Tensor:
    """Products of features "n v p" with "m w p": [n,m] | [v,n,m] | [n,v,m,w]. No large operand is copied."""
    if outputs == "full":
        return (a.reshape(-1, a.shape[2]) @ b.reshape(-1, b.shape[2]).T).view(*a.shape[:2], *b.shape[:2])
    same = torch.bmm(a.transpose(0, 1), b.permute(1, 2, 0))
    return same.sum(0) if outputs == "trace" else same


def gradients(c: LayerCapture) -> Tensor:
    """Per-example gradients in the map's matrix, "n v p"."""
    v, n, s = c.g.shape[:3]
    if c.kind == "diagonal":
        return torch.einsum("vnsd,nsd->nvd", c.g, c.h)
    if c.kind == "grouped":
        return torch.einsum("vnsro,nsri->nvroi", c.g, c.h).flatten(2)
    if c.kind == "dense":  # one product for each example: (v d_out) x s x d_in
        return torch.bmm(c.g.permute(1, 0, 3, 2).reshape(n, -1, s), c.h).view(n, v, -1)
    d = c.g.shape[3]
    rows = c.g.new_zeros(n, v, c.W.shape[1], d)
    index = c.h.clamp(min=0)[:, None, :, None].expand(n, v, s, d)
    rows.scatter_add_(2, index, c.g.transpose(0, 1) * (c.h >= 0)[:, None, :, None])
    return rows.transpose(2, 3).flatten(2)  # the matrix of a lookup is d_out x d_in


def bias_gradients(c: LayerCapture) -> Tensor:
    """Per-example gradients in the bias, "n v p"."""
    return c.g.sum(2).flatten(2).transpose(0, 1)


def of_both(make: Callable[[LayerCapture], Tensor], a: LayerCapture, b: LayerCapture, outputs: Outputs) -> Tensor:
    """The product of two batches' features, made once where the batches are one."""
    left = make(a)
    return contract(left, left if b is a else make(b), outputs)


def map_kernel(a: LayerCapture, b: LayerCapture, outputs: Outputs, room: float) -> Tensor:
    """The tangent kernel of one map's matrix between two batches, by the cheapest exact contraction."""
    if a.kind not in ("dense", "lookup"):
        return of_both(gradients, a, b, outputs)
    (v, n, s, d_out), (w, m, t), d_in = a.g.shape, b.g.shape[:3], a.W.shape[1]
    if s == t == 1:
        hh = _read(a, b)[:, 0, :, 0]
        return of_both(bias_gradients, a, b, outputs).mul_(hh[:, None, :, None] if outputs == "full" else hh)
    size, reading = d_out * d_in, 1 if a.kind == "lookup" else d_in
    sides = n * s if b is a else n * s + m * t
    making = sides * v * (d_out if a.kind == "lookup" else size)
    if outputs == "full":
        by_gradients = making + v * n * w * m * size
        by_pairs, held = n * m * s * (t * reading + w * d_out * (t + v)), n * m * s * (t + w * d_out)
    else:
        by_gradients = making + v * n * m * size
        by_pairs, held = n * m * s * t * (reading + v * d_out), 2 * n * m * s * t
    if by_pairs >= by_gradients or held * a.g.element_size() > room:
        return of_both(gradients, a, b, outputs)
    hh = _read(a, b)
    if outputs == "full":
        return torch.einsum("nswmo,vnso->nvmw", torch.einsum("nsmt,wmto->nswmo", hh, b.g), a.g)
    if outputs == "trace":
        return (hh * torch.einsum("vnso,vmto->nsmt", a.g, b.g)).sum((1, 3))
    return torch.stack([(hh * torch.einsum("nso,mto->nsmt", p, q)).sum((1, 3)) for p, q in zip(a.g, b.g, strict=True)])


def _read(a: LayerCapture, b: LayerCapture) -> Tensor:
    """Inner products of what two batches read, "n s m t"."""
    if a.kind == "lookup":
        same = (a.h[:, :, None, None] == b.h) & (a.h >= 0)[:, :, None, None]
        return same.to(a.g.dtype)
    return torch.einsum("nsi,mti->nsmt", a.h, b.h)


@dataclass(frozen=True)
class Part:
    """The kernel of one parameter: from maps (their matrices or their biases), or from whole per-example gradients."""

    parameter: str
    module: str
    maps: tuple[str, ...] = ()
    bias: bool = False
    overlapping: bool = False  # several maps share the parameter: their gradients are added before the product


def parts_of(model: nn.Module, found: Survey) -> list[Part]:
    """One part for each trainable parameter; a shared one belongs to the first module that has it."""
    parts = []
    for name, p in model.named_parameters():
        if not p.requires_grad or not p.is_floating_point():
            continue
        module = name.rpartition(".")[0]
        if name in found.structured:
            maps = found.structured[name]
            sizes = sum(torch.Size(found.maps[k].shape).numel() for k in maps)
            parts.append(Part(name, module, maps, overlapping=sizes != p.numel()))
        elif name in found.biases:
            parts.append(Part(name, module, found.biases[name], bias=True))
        else:
            parts.append(Part(name, module))
    return parts


@dataclass(frozen=True)
class Job:
    """Everything a kernel computation needs besides the data."""

    model: nn.Module
    state: State
    found: Survey
    parts: Sequence[Part]
    cotangents: RowCotangents
    output: Output | None
    outputs: Outputs

    @property
    def maps(self) -> list[str]:
        return list(dict.fromkeys(k for p in self.parts for k in p.maps))

    @property
    def loose(self) -> list[str]:
        return [p.parameter for p in self.parts if not p.maps]

    def capture(self, x: Inputs, rows: slice) -> dict[str, LayerCapture | Tensor]:
        """Everything one chunk contributes: captures by map name, whole gradients by parameter name."""
        wide: dict[str, LayerCapture | Tensor] = {}
        if self.maps:
            for name, c in layer_captures(self.model, x, rows, self.cotangents, self.state, self.found, self.maps,
                                          self.output).items():
                wide[name] = widened(c)
        if self.loose:
            for name, J in example_gradients(self.model, x, rows, self.cotangents, self.state, self.loose,
                                             self.output).items():
                J = J.transpose(0, 1).contiguous()  # features are "n v p"
                wide[name] = J if J.dtype in (torch.float32, torch.float64) else J.float()
        return wide

    def block(self, part: Part, a: Mapping[str, Any], b: Mapping[str, Any], room: float) -> Tensor:
        if not part.maps:
            return contract(a[part.parameter], b[part.parameter], self.outputs)
        if part.bias:
            return total(of_both(bias_gradients, a[k], b[k], self.outputs) for k in part.maps)
        if part.overlapping:
            added = self._added(part, a)
            return contract(added, added if b is a else self._added(part, b), self.outputs)
        return total(map_kernel(a[k], b[k], self.outputs, room) for k in part.maps)

    def _added(self, part: Part, a: Mapping[str, Any]) -> Tensor:
        """Gradients of several maps of one parameter, added in the parameter's own layout."""
        weight = self.state[part.parameter]
        added: Tensor | None = None
        for k in part.maps:
            J = gradients(a[k])
            added = J.new_zeros(*J.shape[:2], weight.numel()) if added is None else added
            added.index_add_(2, self.found.maps[k].index, J)
        assert added is not None
        return added


def widened(c: LayerCapture) -> LayerCapture:
    """Half precision is read as it is and summed in float32."""
    if c.g.dtype in (torch.float32, torch.float64):
        return c
    h = c.h.float() if c.h.is_floating_point() else c.h
    return replace(c, W=c.W.float(), h=h, g=c.g.float())


def bytes_per_example(job: Job, v: int, itemsize: int) -> tuple[int, int]:
    """(what one captured example holds, what a product of it needs for a moment), estimated from the survey."""
    held, moment = 0, 0
    for k in job.maps:
        info = job.found.maps[k]
        s = positions(info)
        held += v * info.width + s * read_width(info)
    held += 3 * sum(info.width for info in job.found.maps.values())
    for p in job.parts:
        size = job.state[p.parameter].numel()
        if not p.maps:
            held += v * size
        elif not p.bias and (p.overlapping or any(positions(job.found.maps[k]) > 1 for k in p.maps)):
            moment = max(moment, 2 * v * size)
    return held * itemsize, moment * itemsize


def positions(info: MapInfo) -> int:
    wrote = torch.Size(info.shape[:-1]).numel() if info.kind != "diagonal" else info.shape[0]
    return max(1, info.width // wrote)


def read_width(info: MapInfo) -> int:
    if info.kind == "lookup":
        return 2
    return info.shape[0] * info.shape[2] if info.kind == "grouped" else info.shape[-1]


def least(job: Job, n: int, m: int, v: int, itemsize: int) -> tuple[int, int]:
    """Bytes of the kernels themselves, and of the smallest piece of work beside them: a pair of examples."""
    held, moment = bytes_per_example(job, v, itemsize)
    pairs = n * m * (1 if job.outputs == "trace" else v if job.outputs == "diagonal" else v * v)
    return 8 * pairs * (len({p.module for p in job.parts}) + 1), 2 * (held + moment)


def chunk_size(job: Job, n: int, m: int, v: int, itemsize: int, memory: int) -> int:
    """The largest chunk for which two captured chunks and their product fit; an error that says the least that would."""
    result, each = least(job, n, m, v, itemsize)
    modules = len({p.module for p in job.parts})
    if result + each > memory:
        raise MemoryBudgetError(
            f"memory={show_bytes(memory)} cannot hold the kernels of {modules} layers ({show_bytes(result)}) and one pair of "
            f"examples ({show_bytes(each)}). The smallest that works here is memory='{show_bytes(result + each)}'; "
            f"fewer examples (Probe(kernel=...)), fewer outputs (output=...) or fewer layers (layers=...) need less.")
    return max(1, min(n, (memory - result) // each))


def kernels(job: Job, x: Inputs, x2: Inputs | None, memory: int, chunk: int | None = None) -> dict[str, Tensor]:
    """{module: K} in float64, summed over the module's trainable parameters, block by block within ``memory``."""
    n, m = count(x), count(x if x2 is None else x2)
    one = job.cotangents(torch.zeros(1, job.found.outputs, dtype=next(iter(job.state.values())).dtype), slice(0, 1))
    v, itemsize = len(one), max(4, one.element_size())
    size = chunk_size(job, n, m, v, itemsize, memory)
    size = 1 if job.found.drawn else min(size, chunk or size)
    shape = {"trace": (n, m), "diagonal": (v, n, m), "full": (n, v, m, v)}[job.outputs]
    device = device_of(job.model)
    home = torch.device("cpu") if device.type == "mps" else device
    result = {p.module: torch.zeros(shape, dtype=torch.float64, device=home) for p in job.parts}
    keep_all = bytes_per_example(job, v, itemsize)[0] * (n + (0 if x2 is None else m)) < memory // 2
    cache: dict[tuple[int, int], dict[str, Any]] = {}

    def captured(which: int, rows: slice) -> dict[str, Any]:
        if (which, rows.start) not in cache:
            piece = job.capture(to_device(select(x2 if which else x, rows), device), rows)
            if not keep_all:
                return piece
            cache[which, rows.start] = piece
        return cache[which, rows.start]

    for rows in _slices(n, size):
        a = captured(0, rows)
        for columns in _slices(m, size):
            if x2 is None and columns.start < rows.start:
                continue
            b = a if x2 is None and columns == rows else captured(0 if x2 is None else 1, columns)
            for part in job.parts:
                K = job.block(part, a, b, memory / 4).to(home)  # in the model's precision; added up in float64
                _add(result[part.module], K, rows, columns, job.outputs, mirror=x2 is None and columns != rows)
    return result


def _slices(n: int, size: int) -> Iterator[slice]:
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def _add(total: Tensor, K: Tensor, rows: slice, columns: slice, outputs: Outputs, mirror: bool) -> None:
    if outputs == "full":
        total[rows, :, columns] += K
        if mirror:
            total[columns, :, rows] += K.permute(2, 3, 0, 1)
    else:
        total[..., rows, columns] += K
        if mirror:
            total[..., columns, rows] += K.transpose(-1, -2)


def ntk(model: nn.Module, x: Any, x2: Any = None, *, outputs: Outputs = "trace", per_layer: bool = False,
        output: Output | None = None, memory: str | float = "2GiB", mode: str = "eval",
        cotangents: Cotangents = every_output) -> Any:
    """The empirical neural tangent kernel of all trainable parameters.

    ``outputs="trace"`` sums over outputs: [n,m]; ``"diagonal"`` keeps each output with itself: [k,n,m]; ``"full"``
    all pairs of outputs: [n,k,m,k]. ``per_layer`` gives {module name: kernel}; the entries sum to the whole kernel.
    """
    if outputs not in OUTPUTS:
        raise SelectionError(f"outputs={outputs!r}: choose one of {', '.join(OUTPUTS)}.")
    given = (x, x2)
    model = unwrap(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise SelectionError("the model has no trainable parameter, so its tangent kernel is empty. "
                             "Set requires_grad=True on the parameters to be counted.")
    check_weights(model)
    x, x2 = _inputs(model, x), None if x2 is None else _inputs(model, x2)
    with quiet(model, mode):
        job = prepare(model, x, cotangents, output, outputs)
        layers = kernels(job, x, x2, parse_bytes(memory))
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    dtype = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    if per_layer:
        return {name: like(K.to(dtype), *given) for name, K in layers.items()}
    return like(total(layers.values()).to(dtype), *given)


def prepare(model: nn.Module, x: Inputs, cotangents: Cotangents, output: Output | None, outputs: Outputs) -> Job:
    """Survey the model on the first examples of ``x`` (on its device) and plan one part for each parameter."""
    few = to_device(select(x, slice(0, SURVEYED)) if count(x) > 1 else select(x, [0, 0]), device_of(model))
    state = state_of(model, copied=written(model, few, output))
    found = survey(model, few, state, output)
    return Job(model, state, found, parts_of(model, found), lambda f, rows: cotangents(f, None), output, outputs)


def _inputs(model: nn.Module, x: Any) -> Inputs:
    """numpy arrays become tensors of the model's dtype; everything goes to the model's device."""
    x = as_tensors(x, next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32))
    if count(x) == 0:
        raise SelectionError("x holds no example.")
    check_inputs(x)
    return to_device(x, device_of(model))


def _captured(model: nn.Module, x: Any, layer: str, output: Output | None, mode: str) -> LayerCapture:
    model = unwrap(model)
    check_weights(model)
    x = _inputs(model, x)
    with quiet(model, mode):
        job = prepare(model, x, every_output, output, "full")
        known = list(job.found.batched)
        if layer not in known:
            raise SelectionError(f"layer {layer!r} is not one of the linear maps of this model: {', '.join(known)}.")
        return widened(layer_captures(model, x, slice(0, count(x)), job.cotangents, job.state, job.found, [layer],
                                      output)[layer])


def ptk(model: nn.Module, x: Any, layer: str, *, output: Output | None = None, mode: str = "eval") -> Array:
    """The pre-activation tangent kernel sum_o df_o/dz . df_o/dz: [n,n] for one position, [n,s,n,s] otherwise; no 1/n.
    [nfa, Sec. 1]"""
    c = _captured(model, x, layer, output, mode)
    g = c.g.flatten(3)
    K = torch.einsum("vnso,vmto->nsmt", g, g)
    return like(K[:, 0, :, 0] if K.shape[1] == 1 else K, x)


def forward_kernel(model: nn.Module, x: Any, layer: str, *, output: Output | None = None, mode: str = "eval") -> Array:
    """Inner products of what the layer reads, h . h': [n,n] for one position, [n,s,n,s] otherwise.  [signal, Sec. 1]"""
    c = _captured(model, x, layer, output, mode)
    if c.kind == "lookup":
        K = _read(c, c)
    else:
        h = c.h.flatten(2)
        K = torch.einsum("nsi,mti->nsmt", h, h)
    return like(K[:, 0, :, 0] if K.shape[1] == 1 else K, x)


def backward_kernel(model: nn.Module, x: Any, layer: str, *, output: Output | None = None, mode: str = "eval") -> Array:
    """Inner products df_a/dz . df_b/dz of what the outputs ask of the layer: [n,k,n,k] for one position,
    [n,k,s,n,k,s] otherwise. For a bias-free dense layer with one position the tangent kernel is
    ``forward_kernel[:, None, :, None] * backward_kernel``.  [signal, Sec. 1]"""
    g = _captured(model, x, layer, output, mode).g.flatten(3)
    K = torch.einsum("vnso,wmto->nvsmwt", g, g)
    return like(K[:, :, 0, :, :, 0] if K.shape[2] == 1 else K, x)
