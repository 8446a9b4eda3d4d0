"""Tangent kernels of any model, layer by layer and exact: K_l = J_l J_l^T from what each linear map read and wrote.

No Jacobian is formed. Cotangents are streamed: after each backward pass every map adds its share, by the contraction that
takes the fewest operations, within the memory that is given (kernels.contract).
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from richter.core import MemoryBudgetError, SelectionError, parse_bytes
from richter.core.arrays import Array, as_tensors, like
from richter.instrument.capture import Inputs, Output, device_of, quiet, to_device, unwrap
from richter.instrument.cotangents import Cotangents, Function, as_cotangents, every_output
from richter.instrument.stream import (
    Chunk,
    LayerCapture,
    check_inputs,
    check_weights,
    count,
    covariance,
    pairs,
    ready,
    select,
    steps,
)
from richter.instrument.survey import MOST_DOUBTS, SURVEYED, Amendments, Audit, Doubt, Network, SurveyMemo, amended, surveyed
from richter.kernels.contract import FORMS, Form, Job, KernelBlock, KernelPlan, mirror, read_products, units_of

T = TypeVar("T")
MODELS = 8  # whose surveys are remembered from one call to the next; none keeps its model alive
_surveys: weakref.WeakKeyDictionary[nn.Module, SurveyMemo] = weakref.WeakKeyDictionary()


def kernels(job: Job, x: Inputs, x2: Inputs | None, memory: int) -> dict[str, Tensor]:
    """{module: K}, or {"*": K} of all of them, summed over trainable parameters: "n m" | "v n m" | "v n w m", in float64
    (full kernels, which have nothing to add up over outputs, in the model's precision)."""
    job, plan = planned(job, memory)
    dtype = job.network.dtype if job.outputs == "full" else torch.float64
    names = job.modules if job.per_layer else ["*"]
    result = {name: torch.zeros(_shape(job, job.n, job.m), dtype=dtype, device=_home(job)) for name in names}
    for a, b in pairs(job.network, x, x2, plan.chunk, maps=job.maps, cotangents=job.cotangents, parameters=job.loose,
                      title="kernels"):
        _check_unchanged(job, a)
        r, c = a.rows, b.rows
        out = {name: K[..., r, c] if job.outputs != "full" else K[:, r, :, c] for name, K in result.items()}
        _fill(job, plan.block, a, b, {k: out[k if job.per_layer else "*"] for k in job.modules})
        for K, block in zip(result.values(), out.values(), strict=True):
            if a is b:
                mirror(block, job.outputs)
            elif x2 is None and job.outputs == "full":
                K[:, c, :, r] = block.permute(2, 3, 0, 1)
            elif x2 is None:
                K[..., c, r] = block.mT
    return result


def full_blocks(job: Job, x: Inputs, memory: int) -> Iterator[tuple[slice, slice, dict[str, Tensor]]]:
    """Yield (rows, columns, {module: K "v n w m"}) of the blocks on and below the diagonal of full kernels, one at a time."""
    job, plan = planned(job, memory)
    for a, b in pairs(job.network, x, None, plan.chunk, maps=job.maps, cotangents=job.cotangents, parameters=job.loose,
                      title="kernels"):
        _check_unchanged(job, a)
        shape = _shape(job, a.n, b.n)
        out = {name: torch.zeros(shape, dtype=job.network.dtype, device=_home(job)) for name in job.modules}
        _fill(job, plan.block, a, b, out)
        yield a.rows, b.rows, {name: mirror(K, "full") if a is b else K for name, K in out.items()}


def _check_unchanged(job: Job, chunk: Chunk) -> None:
    """Raise a Doubt if the first examples have other outputs than when the survey was made: global variables, or whatever else
    cannot be seen from the model, have changed it."""
    then = job.first_outputs
    if then is None or chunk.rows.start > 0:
        return
    f, then = (chunk.run if job.maps else chunk.graph).f.detach(), then[:chunk.n]
    now = f[:len(then)]
    if now.shape != then.shape or (now - then).abs().max() > math.sqrt(torch.finfo(f.dtype).eps) * then.abs().max():
        raise Doubt((), chunk.x, 0, "the model has other outputs than when it was surveyed")


def _shape(job: Job, n: int, m: int) -> tuple[int, ...]:
    """Shape of the kernel of n and m examples in the form of the job."""
    return {"trace": (n, m), "diagonal": (job.v, n, m), "full": (job.v, n, job.v, m)}[job.outputs]


def _home(job: Job) -> torch.device:
    """The device of kernels: one that has float64."""
    return torch.device("cpu") if job.network.device.type == "mps" else job.network.device


def _fill(job: Job, size: int, a: Chunk, b: Chunk, out: Mapping[str, Tensor]) -> None:
    """Stream the cotangents of a pair of chunks into its kernels, ``size`` at a time."""
    device = job.network.device
    here = out if _home(job) == device else {k: torch.zeros(K.shape, dtype=job.network.dtype, device=device)
                                             for k, K in out.items()}
    block = KernelBlock(job, here)
    if job.maps:
        for rows in steps(job.v, size):
            left = a.captures(rows)
            block.add(left, left if b is a else b.captures(rows))
            del left  # before the next backward pass
    block.add_whole(a.gradients, b.gradients)
    block.close()
    if here is not out:
        for k, K in out.items():
            K += here[k].to(K)


def ntk(model: nn.Module, x: Any, x2: Any = None, *, form: Form = "trace", per_layer: bool = False,
        output: Output | None = None, memory: str | float = "2GiB", mode: str = "eval",
        cotangents: Cotangents | Function = every_output) -> Any:
    """The empirical neural tangent kernel of all trainable parameters.

    ``form="trace"`` sums over outputs: [n,m]; ``"diagonal"`` keeps each output with itself: [k,n,m]; ``"full"``
    all pairs of outputs: [n,k,m,k]. ``per_layer`` gives {module name: kernel}; the entries sum to the whole kernel. A tensor
    that the model has cached under ``no_grad`` is a constant: empty such a cache first.
    """
    given = (x, x2)
    model, x, x2 = _checked(model, x, x2, form)
    with quiet(model, mode):
        def prepared() -> Job:
            job = prepare(model, x, x2, cotangents, output, form, parse_bytes(memory))
            return replace(job, per_layer=per_layer)

        job, result = undoubted(prepared, lambda job: kernels(job, x, x2, parse_bytes(memory)))
    if form == "full":
        result = {name: K.permute(1, 0, 3, 2) for name, K in result.items()}
    undefined = [name for name, K in result.items() if name != "*" and K.isnan().any()]
    if undefined or any(K.isnan().any() for K in result.values()):
        layers = f" of {', '.join(map(repr, undefined))}" if undefined else ""
        warnings.warn(f"the tangent kernel{layers} has NaN: the outputs are finite, and their gradients are not. Look for a "
                      f"square root or a norm at 0, or for a softmax or log whose inputs are all masked with -inf.",
                      RuntimeWarning, stacklevel=2)
    shown = {name: like(K.to(job.network.dtype), *given) for name, K in result.items()}
    return shown if per_layer else shown["*"]


def undoubted(prepared: Callable[[], Job], work: Callable[[Job], T]) -> tuple[Job, T]:
    """Work until no captured map is in doubt: each time one is, it is read in another way, or refused. A survey that an earlier
    call has made is made anew first."""
    job = prepared()
    amendments = Amendments()
    for left in range(MOST_DOUBTS, -1, -1):
        try:
            return job, work(job)
        except Doubt as doubt:
            if not left:
                raise
            s = job.network
            _surveys.pop(s.model, None)
            if job.first_outputs is not None:
                job = prepared()
                _surveys.pop(s.model, None)
                continue
            survey = amended(s, doubt, amendments)
            job = replace(job, network=replace(s, survey=survey, audit=Audit()), units=units_of(s.model, survey))
    raise AssertionError("the last doubt is raised")


def plan(model: nn.Module, x: Any, x2: Any = None, *, form: Form = "trace", per_layer: bool = False,
         output: Output | None = None, memory: str | float = "2GiB", mode: str = "eval",
         cotangents: Cotangents | Function = every_output) -> KernelPlan:
    """Plan what ``ntk`` with the same arguments will do: contractions, passes, operations and bytes. Runs a few examples only.

    >>> print(richter.kernels.plan(model, x, form="full"))
    """
    model, x, x2 = _checked(model, x, x2, form)
    with quiet(model, mode):
        job = prepare(model, x, x2, cotangents, output, form, parse_bytes(memory))
    return planned(replace(job, per_layer=per_layer), parse_bytes(memory))[1]


def planned(job: Job, memory: int) -> tuple[Job, KernelPlan]:
    """Plan a job within ``memory``; where it does not fit, with blocks that are recomputed for every backward pass."""
    try:
        return job, job.plan(memory)
    except MemoryBudgetError:
        light = job.network.survey.lightened()
        if light.graph >= job.network.survey.graph:
            raise
        job = replace(job, network=replace(job.network, survey=light))
        return job, job.plan(memory)


def _checked(model: nn.Module, x: Any, x2: Any, form: str) -> tuple[nn.Module, Inputs, Inputs | None]:
    """Check the form and the model; return the unwrapped model and both inputs."""
    if form not in FORMS:
        raise SelectionError(f"form={form!r}: choose one of {', '.join(FORMS)}.")
    model = unwrap(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise SelectionError("the model has no trainable parameter, so its tangent kernel is empty. "
                             "Set requires_grad=True on the parameters to be counted.")
    check_weights(model)
    return model, _inputs(model, x), None if x2 is None else _inputs(model, x2)


def prepare(model: nn.Module, x: Inputs, x2: Inputs | None, cotangents: Cotangents | Function, output: Output | None,
            form: Form, memory: float = math.inf) -> Job:
    """Survey the model on the first examples of ``x`` (on its device), unless the last call did and nothing has changed since."""
    few = to_device(select(x, slice(0, SURVEYED)) if count(x) > 1 else select(x, [0, 0]), device_of(model))
    memo = _surveys.setdefault(model, SurveyMemo())
    remembered, first_outputs = memo.unchanged(model, few, output, memory), None
    if remembered is not None:
        state, survey, first_outputs = remembered
    else:
        copied, state, survey = surveyed(model, few, output, memory=memory)
        memo.keep(model, few, output, copied, survey, memory, exact=True)
        while len(_surveys) > MODELS:
            _surveys.pop(next(iter(_surveys)), None)
    chosen = as_cotangents(cotangents)
    assert chosen is not None

    def V(f: Tensor, rows: slice) -> Tensor:
        return chosen.rows(f, None, range(rows.start, rows.stop), slice(None), "kernel")

    network = Network(model, state, survey, output, Audit())
    return Job(network, units_of(model, survey), V, chosen.count(survey.outputs, "kernel"), form,
               count(x), count(x if x2 is None else x2), x2 is None, first_outputs=first_outputs)


def _inputs(model: nn.Module, x: Any) -> Inputs:
    """numpy arrays become tensors of the model's dtype; everything goes to the model's device."""
    x = as_tensors(x, next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32))
    if count(x) == 0:
        raise SelectionError("x holds no example.")
    check_inputs(x)
    return to_device(x, device_of(model))


def _captured(model: nn.Module, x: Any, layer: str, output: Output | None, mode: str) -> LayerCapture:
    """Capture of one layer on all examples."""
    model = unwrap(model)
    check_weights(model)
    x = _inputs(model, x)
    with quiet(model, mode):
        return undoubted(lambda: prepare(model, x, None, every_output, output, "full"), lambda job: _capture(job, x, layer))[1]


def _capture(job: Job, x: Inputs, layer: str) -> LayerCapture:
    """Capture of one layer in a prepared job."""
    known = list(job.network.survey.batched)
    if layer not in known:
        raise SelectionError(f"layer {layer!r} is not one of the linear maps of this model: {', '.join(known)}.")
    chunk = Chunk(job.network, x, slice(0, count(x)), [layer], job.cotangents)
    return ready(chunk.ask(chunk.V)[layer])


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
    K = covariance(g)
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
