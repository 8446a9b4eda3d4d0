"""Before a number leaves: which axis of each layer holds the examples, do examples mix, and do the captured ``h`` and
``g`` rebuild autograd's gradient? A survey runs a few examples twice and answers all three by looking, not by trust."""

from __future__ import annotations

import math
import types
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from richter.core import CaptureError, Mark, MixingError, Remark
from richter.instrument.capture import Call, Inputs, Output, Pass, State, copy_of, forward, kept_for_backward, state_of, written
from richter.instrument.captures import MapInfo, Survey, by_example, check_finite, count, grouped, map_gradient, select

SURVEYED = 8  # examples


def tolerance(dtype: torch.dtype) -> float:
    """How far two right computations of one gradient may differ."""
    return {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 5e-2)


def coarsest(state: State, f: Tensor) -> torch.dtype:
    """Of the precisions that a model computes in: half-precision layers before a float32 output round as they do."""
    return max({f.dtype, *(t.dtype for t in state.values() if t.is_floating_point())}, key=lambda d: torch.finfo(d).eps)


_LAST: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Inputs, Tensor, set[str], Survey]] = weakref.WeakKeyDictionary()


def surveyed(model: nn.Module, x: Inputs, output: Output | None = None) -> tuple[set[str], State, Survey]:
    """(parameters that the forward pass writes into, aliases of all, the survey). The same model with the same weights on
    the same examples is surveyed once; that it gives the same outputs is looked at on the first of them."""
    now = _fingerprint(model, output)
    known = _LAST.get(model)
    if now is not None and known is not None and known[0] == now and _equal(known[1], x):
        _, _, f, copied, found = known
        state = state_of(model, copied=copied)
        if _equal(f, _first(model, x, state, output)):
            return copied, state, replace(found, notes=dict(found.notes))
    copied = written(model, x, output)
    state = state_of(model, copied=copied)
    found = survey(model, x, state, output)
    if now is not None:
        _LAST[model] = (now, copy_of(x), _first(model, x, state_of(model, copied=copied), output), copied,
                        replace(found, notes=dict(found.notes)))
    return copied, state, found


def _first(model: nn.Module, x: Inputs, state: State, output: Output | None) -> Tensor:
    """Outputs of the first examples: what is compared to see that a model is still the one that was surveyed."""
    return forward(model, select(x, slice(0, 2)), state, output=output, record=False).f.detach()


def _fingerprint(model: nn.Module, output: Output | None) -> Any:
    """Everything of a model that a survey depends on; None when it cannot be told (inference tensors count no changes)."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if any(t.is_inference() for _, t in tensors) or not (output is None or isinstance(output, types.FunctionType)):
        return None
    return (None if output is None else weakref.ref(output),
            [(name, id(t), t._version, t.requires_grad, t.data_ptr()) for name, t in tensors],
            [(name, id(m), type(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks), id(m.__dict__.get("forward")))
             for name, m in model.named_modules()])


def _equal(x: Inputs, y: Inputs) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and x.dtype == y.dtype and x.device == y.device and torch.equal(x, y)
    if isinstance(x, dict) and isinstance(y, dict):
        return x.keys() == y.keys() and all(_equal(x[k], y[k]) for k in x)
    if isinstance(x, (tuple, list)) and isinstance(y, (tuple, list)):
        return len(x) == len(y) and all(map(_equal, x, y))
    return x is y


def survey(model: nn.Module, x: Inputs, state: State, output: Output | None = None) -> Survey:
    """Look at ``x`` (a few examples): run all of them and the first half, and compare."""
    n, names = count(x), {id(m): name for name, m in model.named_modules()}
    inner = slice(1, n - 1) if n > 2 else slice(1, 2)  # without its neighbours on both sides: they must not matter
    m = inner.stop - 1
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise MixingError(f"layer {name!r} is a {type(module).__name__} in train mode: {MIXING}")
    whole = forward(model, x, state, output=output)
    with kept_for_backward(state) as kept:
        part = forward(model, select(x, inner), state, output=output)
    off = max(_check_outputs(whole, part, n, inner), *(_alone(model, x, state, output, whole, i) for i in (0, n - 1)))
    drawn = False
    if off > math.sqrt(torch.finfo(coarsest(state, whole.f)).eps):
        again = forward(model, x, state, output=output, record=False, seed=1)
        drawn = not torch.equal(again.f, whole.f)  # dropout: outputs differ from pass to pass anyway
        if not drawn:
            raise MixingError(f"the output of an example changes by {off:.1g} (relative) with the other examples in its batch: "
                              f"{MIXING}")
    graph = sum(kept.values()) // (m * part.f.element_size())
    found = Survey(outputs=whole.f[0].numel(), shape=tuple(whole.f.shape[1:]), graph=graph, drawn=drawn,
                   differentiates=whole.differentiates)
    layouts = _layouts(whole, part, n, m)
    shared = {names[id(c.module)] for c in whole.calls if c.name in layouts and "shared" in layouts[c.name]}
    whole, layouts, found.expand = _expanded(model, x, inner, state, output, whole, layouts, shared)
    R, exact = _verify(model, whole, layouts, found, n, n // 2, {id(v): k for k, v in reversed(state.items())}, names, drawn)
    single = [name for name, info in found.maps.items() if not info.layouts]
    if single and not drawn:
        _check_sums(model, x, state, output, R, [state[w] for k in single if (w := found.maps[k].weight)], exact)
    if single:
        _verify_single(forward(model, select(x, slice(0, 1)), state, output=output), single, found)
    found.matrices = {c.name: c.map.matrix(c.module, c.weight.detach()) for c in whole.calls}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.dim() >= 2 and not any(
                k == name or k.startswith(f"{name}.") for k in found.maps) and name not in found.notes:
            found.notes[name] = Remark(Mark.IDLE, "its forward was never called on the probe, or not as a linear map"
                                       if any(c.module is module for c in whole.calls) else "never called on the probe")
    return found


MIXING = ("the model mixes examples (BatchNorm in train mode or without running statistics, a batch-wide normalisation or "
          "attention), so gradients of single examples do not exist. Measure in eval mode (the default), or give BatchNorm "
          "running statistics.")


def _check_outputs(whole: Pass, part: Pass, n: int, inner: slice) -> float:
    """Shapes and numbers as they should be; how much the inner examples' outputs change without the others."""
    f = whole.f
    if f.dim() == 0 or not f.numel() or f.shape[0] != n or part.f.shape[0] != inner.stop - 1:
        raise CaptureError(f"the model's output has shape {tuple(f.shape)} for {n} examples. Richter needs the examples "
                           f"on the first axis: use output=lambda out: ... to pick or transpose it (a loss averaged over "
                           f"the batch is not an output).")
    check_finite(f)
    size = f.detach().abs().max().item() + 1e-300
    return (f[inner] - part.f).detach().abs().max().item() / size


def _alone(model: nn.Module, x: Inputs, state: State, output: Output | None, whole: Pass, i: int) -> float:
    """How much the output of one example changes when it is alone; 0 for models that cannot run on one."""
    try:
        f = forward(model, select(x, slice(i, i + 1)), state, output=output, record=False).f
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return 0.0
    if f.shape != whole.f[i:i + 1].shape:
        return 0.0
    return (f - whole.f[i:i + 1]).detach().abs().max().item() / (whole.f.detach().abs().max().item() + 1e-300)


def _layouts(whole: Pass, part: Pass, n: int, m: int) -> dict[str, list[str]]:
    """For each map, where the examples are in each of its calls: the axis that shrinks when the examples do."""
    a, b = grouped(whole.calls), grouped(part.calls)
    found: dict[str, list[str]] = {}
    for name, calls in a.items():
        if len(calls) != len(b.get(name, [])):
            found[name] = ["irregular"] * len(calls)
        else:
            found[name] = [_layout(c, d, n, m) for c, d in zip(calls, b[name], strict=True)]
    return found


def _layout(c: Call, d: Call, n: int, m: int) -> str:
    if c.shape == d.shape:
        return "shared"
    if len(c.shape) != len(d.shape):
        return "irregular"
    axes = [i for i, (p, q) in enumerate(zip(c.shape, d.shape, strict=True)) if p != q]
    axis = axes[0]
    if len(axes) > 1 or axis > 1 or c.shape[axis] % n or c.shape[axis] // n * m != d.shape[axis]:
        return "irregular"
    if axis == 1:
        return "second" if len(c.shape) > 2 else "irregular"
    if c.shape[0] == n:
        return "major"
    r, x, y = c.shape[0] // n, c.read, d.read
    if x.shape[0] != c.shape[0]:
        return "irregular"
    if torch.allclose(x[r:r + r * m], y, rtol=1e-3, atol=1e-6):
        return "major"
    unfold = x.reshape(r, n, *x.shape[1:])[:, 1:1 + m].reshape(y.shape)
    return "minor" if torch.allclose(unfold, y, rtol=1e-3, atol=1e-6) else "irregular"


def _expanded(model: nn.Module, x: Inputs, inner: slice, state: State, output: Output | None, whole: Pass,
              layouts: dict[str, list[str]], shared: set[str]) -> tuple[Pass, dict[str, list[str]], set[str]]:
    """Give shared outputs (a position embedding) an example axis, wherever that leaves the model's output as it was."""
    n = count(x)
    accepted: set[str] = set()
    for module in sorted(shared):
        try:
            trial = forward(model, x, state, output=output, expand=dict.fromkeys({*accepted, module}, n))
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
            continue  # the model does not broadcast there: one example at a time, then
        if trial.f.shape == whole.f.shape and torch.allclose(trial.f, whole.f, rtol=1e-4, atol=1e-6):
            accepted.add(module)
            whole = trial
    if accepted:
        m = inner.stop - 1
        part = forward(model, select(x, inner), state, output=output, expand=dict.fromkeys(accepted, m))
        layouts = _layouts(whole, part, n, m)
    return whole, layouts, accepted


def _verify(model: nn.Module, whole: Pass, layouts: dict[str, list[str]], found: Survey, n: int, m: int,
            parameters: dict[int, str], names: dict[int, str], drawn: bool) -> tuple[Tensor, dict[int, Tensor]]:
    """Rebuild gradients of a random output from h and g; keep what agrees with autograd, say what does not."""
    f, tol = whole.f, tolerance(coarsest(whole.aliases, whole.f))
    draw = torch.Generator().manual_seed(0)
    R = torch.randn(n, f[0].numel(), generator=draw, dtype=torch.float64).to(f.device, f.dtype)
    first = R.clone()
    first[m:] = 0
    weights = list({id(c.weight): c.weight for c in whole.calls}.values())
    aliases = list({id(t): t for t in whole.aliases.values()}.values())
    g1, w1 = whole.backward(first, weights + aliases)
    g2, w2 = whole.backward(R - first, weights + aliases)
    exact = [p + q for p, q in zip(w1, w2, strict=True)]
    of_weight = {id(w): e for w, e in zip(weights, exact[:len(weights)], strict=True)}
    of_alias = {id(a): e for a, e in zip(aliases, exact[len(weights):], strict=True)}
    _check_references(model, whole)

    rebuilt = {k: torch.zeros(e.numel(), dtype=e.dtype, device=e.device) for k, e in of_weight.items()}
    scale = dict.fromkeys(of_weight, 0.0)
    summed: dict[str, tuple[Tensor, float]] = {}  # map -> its g summed over examples and positions, and its size
    copied, wrote, live = (dict.fromkeys(layouts, 0) for _ in range(3))  # map -> numbers copied, written; positions in use
    seen: dict[str, int] = {}
    local = dict(layouts)
    for c, p, q in zip(whole.calls, g1, g2, strict=True):
        call, seen[c.name] = seen.get(c.name, 0), seen.get(c.name, 0) + 1
        if local[c.name][call] in ("shared", "irregular"):
            local[c.name] = ["irregular"] * len(local[c.name])
        else:
            out = [by_example(c.map.outputs(c.module, t), n, local[c.name][call]) for t in (p, q)]  # type: ignore[arg-type]
            if out[0][m:].norm() > tol * out[0].norm() or out[1][:m].norm() > tol * out[1].norm():
                if drawn:
                    raise MixingError(f"layer {c.name!r}: what one example's output asks of it reaches other examples: {MIXING}")
                local[c.name] = ["irregular"] * len(local[c.name])
            live[c.name] += int(((out[0] + out[1]).flatten(2).abs().sum((0, 2)) > 0).sum())
        h, g = c.inputs(), c.map.outputs(c.module, p + q)
        anew = h.untyped_storage().data_ptr() != c.read.untyped_storage().data_ptr()
        copied[c.name] += anew * h.numel()
        wrote[c.name] += g.numel()
        index = c.map.matrix(c.module, torch.arange(c.weight.numel(), device=g.device).view(c.weight.shape))
        h = h if c.map.kind == "lookup" else h.to(g.dtype)
        gradient = map_gradient(c.map.kind, h, g, index.shape[-1])
        rebuilt[id(c.weight)].index_add_(0, index.reshape(-1), _fitting(c, gradient, index).to(rebuilt[id(c.weight)].dtype))
        size = g.flatten(2).norm(dim=-1) * (h.flatten(2).norm(dim=-1) if c.map.kind != "lookup" else 1.0)
        scale[id(c.weight)] += size.square().sum().item()
        total, squares = summed.get(c.name, (g.new_zeros(()), 0.0))
        summed[c.name] = (total + g.flatten(2).sum((0, 1)), squares + g.square().sum().item())
        if c.name not in found.maps:
            found.maps[c.name] = MapInfo(c.name, c.map.kind, (), names.get(id(c.module), ""),
                                         parameters.get(id(c.weight)), tuple(index.shape), 0, index.reshape(-1))
    errors = {k: ((rebuilt[k] - e.reshape(-1)).norm() / (e.norm() + math.sqrt(scale[k]) + 1e-300)).item()
              for k, e in of_weight.items()}
    for name, calls in grouped(whole.calls).items():
        error, info = errors[id(calls[0].weight)], found.maps[name]
        if error > tol:
            found.notes[name] = Remark(Mark.REFUSED, _blind(name, len(calls), error))
            del found.maps[name]
            continue
        regular = all(k in ("major", "minor", "second") for k in local[name])
        found.maps[name] = MapInfo(name, info.kind, tuple(local[name]) if regular else (),  # type: ignore[arg-type]
                                   info.module, info.weight, info.shape, wrote[name] // n,
                                   info.index, copied[name] // n, live[name])
    _structure(model, found, whole.aliases, of_alias, summed, tol)
    return R, of_alias


def _fitting(c: Call, gradient: Tensor, index: Tensor) -> Tensor:
    if gradient.shape != index.shape:
        raise CaptureError(f"layer {c.name!r}: its view gives a matrix of shape {tuple(index.shape)}, but its inputs and outputs "
                           f"make a gradient of shape {tuple(gradient.shape)}. richter.testing.check_layer tells what is wrong.")
    return gradient.reshape(-1)


def _blind(name: str, calls: int, error: float) -> str:
    return (f"layer {name!r}: {calls} calls were seen, and they rebuild its weight gradient only up to a relative error of "
            f"{error:.2g}. The weight is also used in a way that is not a linear map of one input. "
            f"Leave it out with layers=..., or teach richter.layers to see it.")


def _verify_single(one: Pass, single: list[str], found: Survey) -> None:
    """Maps that are read one example at a time are checked on one example."""
    R = torch.randn(one.f[0].numel(), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights = list({id(c.weight): c.weight for c in one.calls}.values())
    g, exact = one.backward(R.to(one.f.device), weights)
    rebuilt = {id(w): torch.zeros_like(e).reshape(-1) for w, e in zip(weights, exact, strict=True)}
    for c, d in zip(one.calls, g, strict=True):
        index = c.map.matrix(c.module, torch.arange(c.weight.numel(), device=d.device).view(c.weight.shape))
        h = c.inputs() if c.map.kind == "lookup" else c.inputs().to(d.dtype)
        gradient = map_gradient(c.map.kind, h, c.map.outputs(c.module, d), index.shape[-1])
        rebuilt[id(c.weight)].index_add_(0, index.reshape(-1), _fitting(c, gradient, index).to(rebuilt[id(c.weight)].dtype))
    for name in single:
        calls = grouped(one.calls).get(name, [])
        for w, e in zip(weights, exact, strict=True):
            if calls and calls[0].weight is w:
                error = ((rebuilt[id(w)] - e.reshape(-1)).norm() / (e.norm() + 1e-300)).item()
                if error > tolerance(coarsest(one.aliases, one.f)) and e.norm() > 0:
                    found.notes[name] = Remark(Mark.REFUSED, _blind(name, len(calls), error))
                    found.maps.pop(name, None)


def _check_sums(model: nn.Module, x: Inputs, state: State, output: Output | None, R: Tensor, weights: list[Tensor],
                exact: dict[int, Tensor]) -> None:
    """The gradients of single examples must add up to that of the batch, or there are no gradients of single examples."""
    added = [torch.zeros_like(w) for w in weights]
    for i in range(count(x)):
        one = forward(model, select(x, slice(i, i + 1)), state, output=output, record=False)
        added = [a + d for a, d in zip(added, one.backward(R[i], weights)[1], strict=True)]
    for w, a in zip(weights, added, strict=True):
        if (a - exact[id(w)]).norm() > 10 * tolerance(a.dtype) * (a.norm() + exact[id(w)].norm()):
            raise MixingError(f"the gradients of single examples do not add up to that of the batch: {MIXING}")


def _check_references(model: nn.Module, whole: Pass) -> None:
    """A parameter reached through a reference outside the module tree would be missed: refuse, do not guess."""
    real = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not real:
        return
    found = torch.autograd.grad(whole.f.sum(), list(real.values()), retain_graph=True, allow_unused=True)
    for name, d in zip(real, found, strict=True):
        if d is not None:
            raise CaptureError(f"parameter {name!r} reaches the output through a reference kept outside its module (a list, a "
                               f"closure). Its gradient cannot be separated by example. Read it as an attribute in forward().")


def _structure(model: nn.Module, found: Survey, aliases: State, of_alias: dict[int, Tensor],
               summed: dict[str, tuple[Tensor, float]], tol: float) -> None:
    """Which parameters' gradients are fully described by batched maps; the rest is left to per-example autograd."""
    users: dict[str, list[str]] = {}
    first: dict[int, str] = {}
    for name, a in aliases.items():
        first.setdefault(id(a), name)
    for name, info in found.maps.items():
        if info.weight is not None:
            users.setdefault(info.weight, []).append(name)
    for weight, maps in users.items():
        if weight.rpartition(".")[0] not in found.notes and all(found.maps[k].layouts for k in maps):
            found.structured[weight] = tuple(maps)
    for name, _ in model.named_modules():
        own = [k for k, info in found.maps.items() if info.module == name and info.layouts and k.rpartition(".")[2] != "T"]
        for attribute in ("bias", "in_proj_bias"):
            bias = f"{name}.{attribute}" if name else attribute
            if bias not in aliases or first[id(aliases[bias])] != bias or not own:
                continue
            total, exact = torch.cat([summed[k][0] for k in own]), of_alias[id(aliases[bias])].reshape(-1)
            size = exact.norm() + math.sqrt(sum(summed[k][1] for k in own)) + 1e-300
            if total.shape == exact.shape and (total - exact).norm() <= tol * size:
                found.biases[bias] = tuple(own)
