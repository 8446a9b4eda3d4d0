"""Tangent kernels of any model, layer by layer and exact: K_l = J_l J_l^T from what each linear map read and wrote.

No Jacobian is formed. Cotangents are streamed: after each backward pass every map adds its share, by the contraction that
takes the fewest operations (kernels.contract), within the memory that is given (kernels.planning).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from richter.core import SelectionError, parse_bytes
from richter.core.arrays import Array, as_tensors, like
from richter.instrument.capture import Inputs, Output, State, device_of, quiet, to_device, unwrap
from richter.instrument.captures import (
    LayerCapture,
    Recording,
    RowCotangents,
    Survey,
    count,
    example_gradients,
    layer_captures,
    record,
    select,
)
from richter.instrument.checks import check_inputs, check_weights
from richter.instrument.cotangents import Cotangents, every_output
from richter.instrument.survey import SURVEYED, surveyed
from richter.kernels.contract import OUTPUTS, Outputs, Room, Sum, add_products, gradients, mirror, read_products, steps
from richter.kernels.planning import Plan, Unit, make_plan, units_of


@dataclass(frozen=True)
class Job:
    """Everything a kernel computation needs besides the data."""

    model: nn.Module
    state: State
    found: Survey
    units: Sequence[Unit]
    cotangents: RowCotangents
    output: Output | None
    outputs: Outputs

    @property
    def maps(self) -> list[str]:
        return list(dict.fromkeys(k for u in self.units for k in u.maps))

    @property
    def loose(self) -> list[str]:
        return [u.parameter for u in self.units if not u.maps]

    @property
    def modules(self) -> list[str]:
        return list(dict.fromkeys(u.module for u in self.units))

    @property
    def dtype(self) -> torch.dtype:
        """Half precision is read as it is and computed with in float32."""
        found = next((t.dtype for t in self.state.values() if t.is_floating_point()), torch.float32)
        return found if found in (torch.float32, torch.float64) else torch.float32

    @property
    def v(self) -> int:
        return len(self.cotangents(torch.zeros(1, self.found.outputs, dtype=self.dtype), slice(0, 1)))


@dataclass
class Chunk:
    """Some examples of one side of a kernel, to be asked block by block."""

    job: Job
    x: Inputs
    rows: slice
    seen: Recording | None = None
    V: Tensor | None = None
    whole: dict[str, Tensor] = field(default_factory=dict)  # gradients of parameters without a map, "v n p"

    def begin(self) -> Chunk:
        job = self.job
        if job.maps and self.seen is None:
            self.seen = record(job.model, self.x, self.rows, job.state, job.found, job.maps, job.output)
            self.V = job.cotangents(self.seen.f, self.rows)
        if job.loose and not self.whole:
            found = example_gradients(job.model, self.x, self.rows, job.cotangents, job.state, job.loose, job.output)
            self.whole = {k: J.to(job.dtype) for k, J in found.items()}
        return self

    def asked(self, block: slice) -> dict[str, LayerCapture]:
        if self.seen is None or self.V is None:
            return {}
        found = self.seen.captures(self.V[block])
        return {k: self.seen.trimmed(k, widened(c)) for k, c in found.items()}


def widened(c: LayerCapture) -> LayerCapture:
    """Half precision is read as it is and summed in float32; what is read and what is asked have one precision."""
    dtype = c.g.dtype if c.g.dtype in (torch.float32, torch.float64) else torch.float32
    h = c.h.to(dtype) if c.h.is_floating_point() else c.h
    return c if c.g.dtype == dtype and h is c.h else replace(c, W=c.W.to(dtype), h=h, g=c.g.to(dtype))


class Block:
    """The kernels of all units between two chunks in the making."""

    def __init__(self, job: Job, out: Mapping[str, Tensor], v: int) -> None:
        self.job, self.out = job, out
        self.room = Room()
        self.sums = {u: Sum(out[u.module], job.outputs, u.weight, u.bias, v, self.room) for u in job.units
                     if u.maps and not u.parameter}

    def add(self, a: Mapping[str, LayerCapture], b: Mapping[str, LayerCapture]) -> None:
        """One block of cotangents."""
        for u in self.job.units:
            if u in self.sums:
                self.sums[u].add(a[u.maps[0]], b[u.maps[0]])
            elif u.maps:
                A = shared_gradients(self.job, u, a)
                self.add_gradients(u, A, A if b is a else shared_gradients(self.job, u, b))

    def add_whole(self, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
        """Whole gradients of the parameters without a map, all cotangents at once."""
        for u in self.job.units:
            if not u.maps:
                self.add_gradients(u, a[u.parameter], b[u.parameter])

    def add_gradients(self, u: Unit, A: Tensor, B: Tensor) -> None:
        add_products(self.out[u.module], A, B, self.job.outputs, A is B, self.room)

    def close(self) -> None:
        for s in self.sums.values():
            s.close()


def shared_gradients(job: Job, u: Unit, a: Mapping[str, LayerCapture]) -> Tensor:
    """Gradients "v n p" of several maps of one parameter, added in the parameter's own layout."""
    added: Tensor | None = None
    for k in u.maps:
        J = gradients(a[k])
        added = J.new_zeros(*J.shape[:2], job.state[u.parameter].numel()) if added is None else added
        added.index_add_(2, job.found.maps[k].index, J)
    assert added is not None
    return added


def kernels(job: Job, x: Inputs, x2: Inputs | None, memory: int, per_layer: bool = True,
            chunk: int | None = None) -> dict[str, Tensor]:
    """{module: K}, or {"*": K} of all of them, summed over trainable parameters: "n m" | "v n m" | "v n w m", in float64
    (full kernels, which have nothing to add up over outputs, in the model's precision)."""
    n, m, v = count(x), count(x if x2 is None else x2), job.v
    plan = make_plan(job.found, job.units, job.state, n, m, v, job.outputs, job.dtype.itemsize, memory, per_layer,
                     same=x2 is None, chunk=chunk)
    device = device_of(job.model)
    home = torch.device("cpu") if device.type == "mps" else device
    shape = {"trace": (n, m), "diagonal": (v, n, m), "full": (v, n, v, m)}[job.outputs]
    dtype = job.dtype if job.outputs == "full" else torch.float64
    names = job.modules if per_layer else ["*"]
    result = {name: torch.zeros(shape, dtype=dtype, device=home) for name in names}
    rows, columns = steps(n, plan.chunk), steps(m, plan.chunk)
    bar = tqdm(total=sum(i + 1 for i in range(len(rows))) if x2 is None else len(rows) * len(columns), desc="kernels",
               delay=2, leave=False, disable=None)
    for r in rows:
        a = Chunk(job, to_device(select(x, r), device), r).begin()
        for c in columns:
            if x2 is None and c.start > r.start:
                continue
            b = a if x2 is None and c == r else Chunk(job, to_device(select(x if x2 is None else x2, c), device), c).begin()
            out = {name: K[..., r, c] if job.outputs != "full" else K[:, r, :, c] for name, K in result.items()}
            _fill(job, plan, a, b, {k: out[k if per_layer else "*"] for k in job.modules}, v, home)
            for K, block in zip(result.values(), out.values(), strict=True):
                if a is b:
                    mirror(block, job.outputs)
                elif x2 is None and job.outputs == "full":
                    K[:, c, :, r] = block.permute(2, 3, 0, 1)
                elif x2 is None:
                    K[..., c, r] = block.mT
            bar.update()
    bar.close()
    return result


def _fill(job: Job, plan: Plan, a: Chunk, b: Chunk, out: Mapping[str, Tensor], v: int, home: torch.device) -> None:
    """Stream the cotangents of one pair of chunks into its kernels."""
    here = out if home == device_of(job.model) else {k: torch.zeros(K.shape, dtype=job.dtype, device=device_of(job.model))
                                                    for k, K in out.items()}
    block = Block(job, here, v)
    if job.maps:
        for some in steps(v, plan.block):
            mine = a.asked(some)
            block.add(mine, mine if b is a else b.asked(some))
            del mine  # before the next backward pass
    block.add_whole(a.whole, b.whole)
    block.close()
    if here is not out:
        for k, K in out.items():
            K += here[k].to(K)


def ntk(model: nn.Module, x: Any, x2: Any = None, *, outputs: Outputs = "trace", per_layer: bool = False,
        output: Output | None = None, memory: str | float = "2GiB", mode: str = "eval",
        cotangents: Cotangents = every_output) -> Any:
    """The empirical neural tangent kernel of all trainable parameters.

    ``outputs="trace"`` sums over outputs: [n,m]; ``"diagonal"`` keeps each output with itself: [k,n,m]; ``"full"``
    all pairs of outputs: [n,k,m,k]. ``per_layer`` gives {module name: kernel}; the entries sum to the whole kernel.
    """
    given = (x, x2)
    model, x, x2 = _checked(model, x, x2, outputs)
    with quiet(model, mode):
        job = prepare(model, x, cotangents, output, outputs)
        found = kernels(job, x, x2, parse_bytes(memory), per_layer)
    if outputs == "full":
        found = {name: K.permute(1, 0, 3, 2) for name, K in found.items()}
    shown = {name: like(K.to(job.dtype), *given) for name, K in found.items()}
    return shown if per_layer else shown["*"]


def plan(model: nn.Module, x: Any, x2: Any = None, *, outputs: Outputs = "trace", per_layer: bool = False,
         output: Output | None = None, memory: str | float = "2GiB", mode: str = "eval",
         cotangents: Cotangents = every_output) -> Plan:
    """What ``ntk`` with the same arguments will do: contractions, passes, operations and bytes. Runs a few examples only.

    >>> print(richter.kernels.plan(model, x, outputs="full"))
    """
    model, x, x2 = _checked(model, x, x2, outputs)
    with quiet(model, mode):
        job = prepare(model, x, cotangents, output, outputs)
    n, m = count(x), count(x if x2 is None else x2)
    return make_plan(job.found, job.units, job.state, n, m, job.v, outputs, job.dtype.itemsize, parse_bytes(memory), per_layer,
                     same=x2 is None)


def _checked(model: nn.Module, x: Any, x2: Any, outputs: str) -> tuple[nn.Module, Inputs, Inputs | None]:
    if outputs not in OUTPUTS:
        raise SelectionError(f"outputs={outputs!r}: choose one of {', '.join(OUTPUTS)}.")
    model = unwrap(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise SelectionError("the model has no trainable parameter, so its tangent kernel is empty. "
                             "Set requires_grad=True on the parameters to be counted.")
    check_weights(model)
    return model, _inputs(model, x), None if x2 is None else _inputs(model, x2)


def prepare(model: nn.Module, x: Inputs, cotangents: Cotangents, output: Output | None, outputs: Outputs) -> Job:
    """Survey the model on the first examples of ``x`` (on its device) and plan one part for each parameter."""
    few = to_device(select(x, slice(0, SURVEYED)) if count(x) > 1 else select(x, [0, 0]), device_of(model))
    _, state, found = surveyed(model, few, output)
    return Job(model, state, found, units_of(model, found), lambda f, rows: cotangents(f, None), output, outputs)


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


def ptk_covariance(model: nn.Module, x: Any, layer: str, *, normalise: bool = True, output: Output | None = None,
                   mode: str = "eval") -> Array:
    """K [d_out,d_out] = 1/(n s) sum over n, s, o of (df_o/dz)(df_o/dz)^T, so that the AGOP is W^T K W; without 1/(n s) if
    not ``normalise``.  [nfa, Sec. 1]"""
    g = _captured(model, x, layer, output, mode).g.flatten(3)
    K = torch.einsum("vnso,vnsp->op", g, g)
    return like(K / (g.shape[1] * g.shape[2]) if normalise else K, x)


def forward_kernel(model: nn.Module, x: Any, layer: str, *, output: Output | None = None, mode: str = "eval") -> Array:
    """Inner products of what the layer reads, h . h': [n,n] for one position, [n,s,n,s] otherwise.  [signal, Sec. 1]"""
    c = _captured(model, x, layer, output, mode)
    if c.kind == "lookup":
        K = read_products(c, c, slice(None), slice(None))
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
