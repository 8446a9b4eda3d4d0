"""Before a number leaves: which axis of each layer holds the examples, do examples mix, and do the captured ``h`` and
``g`` rebuild autograd's gradient? A survey runs a few examples twice and answers all three by looking, not by trust."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from richter.capture import Call, Inputs, Output, Pass, State, forward
from richter.core import CaptureError, MixingError, SelectionError
from richter.layers import Kind

Layout = Literal["major", "minor", "second"]  # where the examples are in a layer's own [b, s, ...]
SURVEYED = 8  # examples


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


@dataclass
class Survey:
    """What can be measured, and how; ``notes`` says in words what cannot."""

    maps: dict[str, MapInfo] = field(default_factory=dict)
    expand: set[str] = field(default_factory=set)  # modules whose output all examples share
    structured: dict[str, tuple[str, ...]] = field(default_factory=dict)  # parameter -> maps that rebuild its gradient
    biases: dict[str, tuple[str, ...]] = field(default_factory=dict)  # bias -> maps whose summed g is its gradient
    notes: dict[str, str] = field(default_factory=dict)  # layer -> why it has no number
    outputs: int = 0
    drawn: bool = False  # the forward pass draws (dropout): examples go one by one, each with a seed of its own

    @property
    def batched(self) -> dict[str, MapInfo]:
        return {name: m for name, m in self.maps.items() if m.layouts}


def tolerance(dtype: torch.dtype) -> float:
    """How far two right computations of one gradient may differ."""
    return {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 5e-2)


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


def survey(model: nn.Module, x: Inputs, state: State, output: Output | None = None) -> Survey:
    """Look at ``x`` (a few examples): run all of them and the first half, and compare."""
    n, names = count(x), {id(m): name for name, m in model.named_modules()}
    inner = slice(1, n - 1) if n > 2 else slice(1, 2)  # without its neighbours on both sides: they must not matter
    m = inner.stop - 1
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise MixingError(f"layer {name!r} is a {type(module).__name__} in train mode: {MIXING}")
    whole, part = (forward(model, select(x, rows), state, output=output) for rows in (slice(0, n), inner))
    off = max(_check_outputs(whole, part, n, inner), *(_alone(model, x, state, output, whole, i) for i in (0, n - 1)))
    drawn = False
    if off > math.sqrt(torch.finfo(whole.f.dtype).eps):
        again = forward(model, x, state, output=output, record=False, seed=1)
        drawn = not torch.equal(again.f, whole.f)  # dropout: outputs differ from pass to pass anyway
        if not drawn:
            raise MixingError(f"the output of an example changes by {off:.1g} (relative) with the other examples in its batch: "
                              f"{MIXING}")
    found = Survey(outputs=whole.f[0].numel(), drawn=drawn)
    layouts = _layouts(whole, part, n, m)
    shared = {names[id(c.module)] for c in whole.calls if c.name in layouts and "shared" in layouts[c.name]}
    whole, layouts, found.expand = _expanded(model, x, inner, state, output, whole, layouts, shared)
    R, exact = _verify(model, whole, layouts, found, n, n // 2, {id(v): k for k, v in reversed(state.items())}, names, drawn)
    single = [name for name, info in found.maps.items() if not info.layouts]
    if single and not drawn:
        _check_sums(model, x, state, output, R, [state[w] for k in single if (w := found.maps[k].weight)], exact)
    if single:
        _verify_single(forward(model, select(x, slice(0, 1)), state, output=output), single, found)
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.dim() >= 2 and not any(
                k == name or k.startswith(f"{name}.") for k in found.maps) and name not in found.notes:
            found.notes[name] = "its forward was never called on the probe, or not as a linear map" \
                if any(c.module is module for c in whole.calls) else "never called on the probe"
    return found


MIXING = ("the model mixes examples (BatchNorm in train mode or without running statistics, a batch-wide normalisation or "
          "attention), so gradients of single examples do not exist. Measure in eval mode (the default), or give BatchNorm "
          "running statistics.")


def check_finite(f: Tensor) -> None:
    if not torch.isfinite(f).all():
        raise CaptureError("the model's output on the probe contains NaN or Inf, so every statistic of it would too. "
                           "Look for a diverged run, or inputs outside the range the model was trained on.")


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
    a, b = _grouped(whole.calls), _grouped(part.calls)
    found: dict[str, list[str]] = {}
    for name, calls in a.items():
        if len(calls) != len(b.get(name, [])):
            found[name] = ["irregular"] * len(calls)
        else:
            found[name] = [_layout(c, d, n, m) for c, d in zip(calls, b[name], strict=True)]
    return found


def _grouped(calls: Sequence[Call]) -> dict[str, list[Call]]:
    groups: dict[str, list[Call]] = {}
    for c in calls:
        groups.setdefault(c.name, []).append(c)
    return groups


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
    f, tol = whole.f, tolerance(whole.f.dtype)
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
        h, g = c.inputs(), c.map.outputs(c.module, p + q)
        index = c.map.matrix(c.module, torch.arange(c.weight.numel(), device=g.device).view(c.weight.shape))
        h = h if c.map.kind == "lookup" else h.to(g.dtype)
        gradient = map_gradient(c.map.kind, h, g, index.shape[-1])
        rebuilt[id(c.weight)].index_add_(0, index.reshape(-1), _fitting(c, gradient, index))
        size = g.flatten(2).norm(dim=-1) * (h.flatten(2).norm(dim=-1) if c.map.kind != "lookup" else 1.0)
        scale[id(c.weight)] += size.square().sum().item()
        total, squares = summed.get(c.name, (g.new_zeros(()), 0.0))
        summed[c.name] = (total + g.flatten(2).sum((0, 1)), squares + g.square().sum().item())
        if c.name not in found.maps:
            found.maps[c.name] = MapInfo(c.name, c.map.kind, (), names.get(id(c.module), ""),
                                         parameters.get(id(c.weight)), tuple(index.shape), 0, index.reshape(-1))
    errors = {k: ((rebuilt[k] - e.reshape(-1)).norm() / (e.norm() + math.sqrt(scale[k]) + 1e-300)).item()
              for k, e in of_weight.items()}
    for name, calls in _grouped(whole.calls).items():
        error, info = errors[id(calls[0].weight)], found.maps[name]
        if error > tol:
            found.notes[name] = _blind(name, len(calls), error)
            del found.maps[name]
            continue
        regular = all(k in ("major", "minor", "second") for k in local[name])
        width = sum(c.shape.numel() for c in calls) // n
        found.maps[name] = MapInfo(name, info.kind, tuple(local[name]) if regular else (),  # type: ignore[arg-type]
                                   info.module, info.weight, info.shape, width, info.index)
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
        rebuilt[id(c.weight)].index_add_(0, index.reshape(-1), _fitting(c, gradient, index))
    for name in single:
        calls = _grouped(one.calls).get(name, [])
        for w, e in zip(weights, exact, strict=True):
            if calls and calls[0].weight is w:
                error = ((rebuilt[id(w)] - e.reshape(-1)).norm() / (e.norm() + 1e-300)).item()
                if error > tolerance(one.f.dtype) and e.norm() > 0:
                    found.notes[name] = _blind(name, len(calls), error)
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

    def take(self, rows: slice | Tensor) -> LayerCapture:
        """The same for some of the examples."""
        return replace(self, h=self.h[rows], g=self.g[:, rows], f=None if self.f is None else self.f[rows],
                       h0=None if self.h0 is None else self.h0[rows], g0=None if self.g0 is None else self.g0[:, rows])


RowCotangents = Callable[[Tensor, slice], Tensor]  # f "n k" of the examples `rows` of a probe -> V "v n k"


def layer_captures(model: nn.Module, x: Inputs, rows: slice, cotangents: RowCotangents, state: State, found: Survey,
                   names: Sequence[str], output: Output | None = None, reads: bool = True) -> dict[str, LayerCapture]:
    """Capture the maps ``names`` on one chunk: one forward pass, one backward pass for each cotangent. A map that is not
    batched can only be captured on a single example, whose every call it then is; it is left out if there is none."""
    n = count(x)
    seen = forward(model, x, state, output=output, expand=dict.fromkeys(found.expand, n), seed=rows.start)
    groups = _grouped(seen.calls)
    names = [name for name in names if groups.get(name) or n > 1]
    for name in groups.keys() - found.maps.keys() - found.notes.keys():
        found.notes[name] = "called for some examples only, and not for the first ones, on which the capture is verified"
    for name in names:
        if n > 1 and len(groups.get(name, [])) != len(found.maps[name].layouts):
            raise CaptureError(f"layer {name!r} was called {len(found.maps[name].layouts)} times on the first examples and "
                               f"{len(groups.get(name, []))} times on others: its use depends on the data. "
                               f"Leave it out with layers=..., or measure with chunk=1.")
    calls = [c for name in names for c in groups[name]]
    alone: Layout = "major"  # a single example: everything is its own
    where = [k for name in names for k in (found.maps[name].layouts if n > 1 else (alone,) * len(groups[name]))]
    f = seen.f.detach().reshape(n, -1)
    check_finite(f)
    V = cotangents(f, rows)
    seen = Pass(seen.f, calls, seen.aliases)
    asked: list[Tensor] = []
    for v in range(len(V)):
        for i, d in enumerate(seen.backward(V[v])[0]):
            d = by_example(calls[i].map.outputs(calls[i].module, d), n, where[i])
            if v == 0:
                asked.append(d.new_empty(len(V), *d.shape))
            asked[i][v] = d
    captured, start = {}, 0
    for name in names:
        own = slice(start, start + len(groups[name]))
        start, first = own.stop, calls[own.start]
        h = [by_example(c.inputs(), n, k) for c, k in zip(calls[own], where[own], strict=True)] if reads else [f[:, :0]]
        captured[name] = LayerCapture(first.map.kind, first.map.matrix(first.module, first.weight.detach()), _joined(h, 1),
                                      _joined(asked[own], 2), f=f, calls=tuple(g.shape[2] for g in asked[own]))
    return captured


def _joined(parts: Sequence[Tensor], axis: int) -> Tensor:
    """The calls of one map side by side along its positions; most maps are called once."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), axis)


def matrices(model: nn.Module, x: Inputs, state: State, output: Output | None = None) -> dict[str, Tensor]:
    """The matrix of every map that is called on ``x``, with the weights of ``state``."""
    seen = forward(model, x, state, output=output)
    return {c.name: c.map.matrix(c.module, c.weight.detach()) for c in seen.calls}


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
