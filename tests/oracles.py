"""Every quantity by its definition: one example, one output and one position at a time, in float64.

Axes: n examples, k outputs, s positions, d_in, d_out. A batch x is a tensor, a tuple for model(*x) or a dict for
model(**x).
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

import numpy as np
import scipy.linalg
import scipy.special
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layer_oracles import Written, written_out

Batch = Any  # a tensor, a tuple or a dict of tensors, examples first
Result = Any  # what a function returns
Output = Callable[[Any], Tensor] | None
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Use = tuple[Tensor, Tensor, Tensor]  # W[d_out,d_in], h[s,d_in] and the zero [s,d_out] added to z = W h (+ b)

# ------------------------------------------------------------------------------------------------ outputs, Jacobians


def example(x: Batch, i: int) -> Batch:
    """Example i of a batch, as a batch of one."""
    if isinstance(x, dict):
        return {key: value[i : i + 1] for key, value in x.items()}
    return tuple(value[i : i + 1] for value in x) if isinstance(x, tuple) else x[i : i + 1]


def size(x: Batch) -> int:
    """Number of examples n."""
    if isinstance(x, dict):
        return len(next(iter(x.values())))
    return len(x[0]) if isinstance(x, tuple) else len(x)


def _without_recomputation(function: Callable[..., Result], *args: Batch, use_reentrant: bool | None = None) -> Result:
    """What torch.utils.checkpoint.checkpoint returns."""
    return function(*args)


def outputs(model: nn.Module, x: Batch, output: Output = None) -> Tensor:
    """f[n,k], all axes but the first flattened; of a dict the entry "logits", of a tuple the first."""
    # a checkpoint changes no value, but its reentrant kind does not allow torch.autograd.grad
    with mock.patch("torch.utils.checkpoint.checkpoint", _without_recomputation):
        result = model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
    if output is not None:
        result = output(result)
    elif isinstance(result, dict):
        result = result["logits"]
    elif isinstance(result, tuple):
        result = result[0]
    return result.flatten(1)


def jacobian(model: nn.Module, x: Batch, output: Output = None) -> dict[str, Tensor]:
    """{parameter: J[n,k,*shape]}, J[i,o] = d f_o(x_i) / d parameter; a shared parameter once, under its first name."""
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows: dict[str, list[list[Tensor]]] = {name: [] for name in params}
    for i in range(size(x)):
        f = outputs(model, example(x, i), output)[0]
        grads = [_gradient(f[o], list(params.values())) for o in range(len(f))]
        for j, name in enumerate(params):
            rows[name].append([g[j] for g in grads])
    return {name: torch.stack([torch.stack(g) for g in J]) for name, J in rows.items()}


def _gradient(f: Tensor, variables: list[Tensor]) -> list[Tensor]:
    """d f / d variable, zero where there is no path."""
    if not f.requires_grad or not variables:
        return [torch.zeros_like(v) for v in variables]
    grads = torch.autograd.grad(f, variables, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(v) if g is None else g for g, v in zip(grads, variables, strict=True)]


# ---------------------------------------------------------------------------------------------------- tangent kernels


def tangent_kernels(model: nn.Module, x: Batch, x2: Batch = None, output: Output = None) -> dict[str, Tensor]:
    """{module: K[n,k,m,k]}, K[i,a,j,b] = <d f_a(x_i)/d theta, d f_b(x2_j)/d theta> over the module's own parameters.

    A shared parameter belongs to the first module that owns it.
    """
    J = jacobian(model, x, output)
    return kernels_of_modules(model, J, J if x2 is None else jacobian(model, x2, output))


def kernels_of_modules(model: nn.Module, J: dict[str, Tensor], J2: dict[str, Tensor]) -> dict[str, Tensor]:
    """{module: K[n,k,m,k]} from the Jacobians {parameter: J[n,k,*shape]} of two batches."""
    kernels: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        own = [f"{name}.{p}" if name else p for p, _ in module.named_parameters(recurse=False)]
        own = [p for p in own if p in J]
        if own:
            kernels[name] = torch.stack([_inner(J[p], J2[p]) for p in own]).sum(0)
    return kernels


def _inner(J: Tensor, J2: Tensor) -> Tensor:
    """K[i,a,j,b] = <J[i,a], J2[j,b]> of J[n,k,*shape], J2[m,k,*shape]."""
    (n, k), (m, k2) = J.shape[:2], J2.shape[:2]
    return (J.reshape(n * k, -1) @ J2.reshape(m * k2, -1).T).reshape(n, k, m, k2)


def ntk(
    model: nn.Module,
    x: Batch,
    x2: Batch = None,
    form: str = "trace",
    output: Output = None,
) -> Tensor:
    """Theta over all trainable parameters: "full" [n,k,m,k], "diagonal" [k,n,m], "trace" [n,m] = sum_a Theta^aa."""
    full = torch.stack(list(tangent_kernels(model, x, x2, output).values())).sum(0)
    return reduce_outputs(full, form)


def reduce_outputs(K: Tensor, outputs: str) -> Tensor:
    """K[n,k,m,k] as it is ("full"), its blocks K^aa [k,n,m] ("diagonal") or their sum [n,m] ("trace")."""
    diagonal = torch.stack([K[:, a, :, a] for a in range(K.shape[1])])
    return {"full": K, "diagonal": diagonal, "trace": diagonal.sum(0)}[outputs]


# --------------------------------------------------------------------------------- what a layer reads and is asked for


def layer_io(model: nn.Module, x: Batch, name: str, output: Output = None) -> tuple[Tensor, Tensor, Tensor]:
    """W[d_out,d_in], h[n,s,d_in] and J[n,k,s,d_out] = d f / d z of the linear map z = W h (+ b) called `name`.

    Each position reads its own copy of h, so AGOP = W^T K W. The calls of a module follow each other along s. An
    example with fewer positions than another (routing) is filled up with zeros at the end. `name` is a module, a module
    with .q, .k, .v behind it (nn.MultiheadAttention, or a fused projection with rows q, k, v) or a parameter used
    without a module. A looked-up padding token has h = 0: its row of the table is fixed at zero.
    """
    read: list[list[Tensor]] = []
    asked: list[list[list[Tensor]]] = []  # example, output, use
    W = None
    for i in range(size(x)):
        uses: list[Use] = []
        with _perturbed(model, name, uses):
            f = outputs(model, example(x, i), output)[0]
        W = uses[-1][0] if uses else W
        read.append([h for _, h, _ in uses])
        asked.append([_gradient(f[o], [delta for _, _, delta in uses]) for o in range(len(f))])
    if W is None:
        raise ValueError(f"{name!r} is never used")
    s = max(sum(map(len, h)) for h in read)
    h = torch.stack([_stacked(rows, s, W.shape[1]) for rows in read])
    J = torch.stack([torch.stack([_stacked(rows, s, W.shape[0]) for rows in of]) for of in asked])
    return W, h, J


def _stacked(rows: list[Tensor], s: int, d: int) -> Tensor:
    """All rows in one [s,d], zeros behind them."""
    out, start = torch.zeros(s, d, dtype=torch.float64), 0
    for r in rows:
        out[start : start + len(r)] = r
        start += len(r)
    return out


def _parent(name: str) -> tuple[str, str]:
    """("a.b", "c") of "a.b.c"."""
    head, _, tail = name.rpartition(".")
    return head, tail


def _module_matrix(module: nn.Module) -> Tensor:
    """W[d_out,d_in] of a module: transposed for tables and transformers' Conv1D, a block per group of a convolution."""
    weight = cast(Tensor, module.weight).detach()
    if isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D":
        return weight.T.clone()
    if not isinstance(module, Convolution):
        return weight.clone()
    d_out, width = len(weight), weight[0].numel()
    W = weight.new_zeros(d_out, width * module.groups)
    for o in range(d_out):
        group = o // (d_out // module.groups)
        W[o, group * width : (group + 1) * width] = weight[o].flatten()
    return W


@contextmanager
def _perturbed(model: nn.Module, name: str, uses: list[Use]) -> Iterator[None]:
    """While open, every z of the map `name` has a zero tensor added to it, kept in `uses` with W and h."""
    modules, (head, tail) = dict(model.named_modules()), _parent(name)
    hidden = next((k for k in modules if f"{name}.".startswith(f"{k}.") and isinstance(modules[k], Written)), None)
    if hidden is not None:
        with written_out(modules[hidden], name[len(hidden) + 1:], uses):
            yield
    elif hasattr(model, "listener") and type(modules.get(name)) is not nn.Linear:
        model.listener = _listener(name, uses)
        try:
            yield
        finally:
            del model.listener
    elif isinstance(modules.get(head), nn.MultiheadAttention):
        with _own_attention(modules[head], tail, uses):
            yield
    elif name in modules:
        handle = modules[name].register_forward_hook(_module_hook(uses), with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
    elif tail in ("q", "k", "v"):
        handle = modules[head].register_forward_hook(_module_hook(uses, "qkv".index(tail)), with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
    else:
        with _own_products(model, name, uses):
            yield


def _listener(name: str, uses: list[Use]) -> Callable[..., Tensor]:
    """What a model of the zoo tells of its maps: to the z of the map `name` a zero is added."""

    def hear(told: str, W: Tensor, h: Tensor, z: Tensor) -> Tensor:
        if told != name:
            return z
        h = h.detach().clone().reshape(-1, h.shape[-1])
        delta = torch.zeros(len(h), z.shape[-1], dtype=z.dtype, requires_grad=True)
        uses.append((W.detach().clone(), h, delta))
        return z + delta.reshape(z.shape)

    return hear


def _module_hook(uses: list[Use], third: int | None = None) -> Callable[..., Tensor]:
    """Forward hook that adds a zero [s,d_out] to a module's output, or to one third of it."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], z: Tensor) -> Tensor:
        x = args[0] if args else next(iter(kwargs.values()))
        h = _rows_read(module, x)
        convolution = isinstance(module, Convolution)
        rows = z.flatten(2)[0].T if convolution else z.reshape(-1, z.shape[-1])
        W, b = _module_matrix(module), getattr(module, "bias", None)
        torch.testing.assert_close(rows.detach(), h @ W.T + (0 if b is None else b.detach()), rtol=1e-9, atol=1e-9)
        d = rows.shape[1] if third is None else rows.shape[1] // 3
        delta = torch.zeros(len(rows), d, dtype=z.dtype, requires_grad=True)
        uses.append((W if third is None else W.chunk(3)[third], h, delta))
        if third is not None:
            delta = F.pad(delta, (third * d, (2 - third) * d))
        return z + (delta.T if convolution else delta).reshape(z.shape)

    return hook


def _rows_read(module: nn.Module, x: Tensor) -> Tensor:
    """h[s,d_in]: tokens, one-hot tokens or patches of one example."""
    x = x.detach().clone()
    if isinstance(module, nn.Embedding):
        h = torch.zeros(x.numel(), module.num_embeddings, dtype=module.weight.dtype)
        for s, token in enumerate(x.flatten().tolist()):
            h[s, token] = float(token != module.padding_idx)
        return h
    if isinstance(module, Convolution):
        return patches(x[0], module)
    return x.reshape(-1, x.shape[-1])


def patches(x: Tensor, conv: Convolution) -> Tensor:
    """u[s, C prod(kernel)] of an image x[C,*size]: what the convolution reads at each place of its output."""
    for axis, (k, d) in enumerate(zip(conv.kernel_size, conv.dilation, strict=True)):
        if conv.padding == "valid":
            left = right = 0
        elif conv.padding == "same":
            left, right = d * (k - 1) // 2, d * (k - 1) - d * (k - 1) // 2
        else:
            left = right = int(conv.padding[axis])
        x = _padded(x, axis + 1, left, right, conv.padding_mode)
    reach = [d * (k - 1) + 1 for k, d in zip(conv.kernel_size, conv.dilation, strict=True)]
    starts = [range(0, length - r + 1, st) for length, r, st in zip(x.shape[1:], reach, conv.stride, strict=True)]
    rows = []
    for corner in itertools.product(*starts):
        window = tuple(slice(c, c + r, d) for c, r, d in zip(corner, reach, conv.dilation, strict=True))
        rows.append(x[(slice(None), *window)].flatten())
    return torch.stack(rows)


def _padded(x: Tensor, axis: int, left: int, right: int, mode: str) -> Tensor:
    """x with `left` and `right` more places along `axis`, filled in the way `mode` says."""
    length = x.shape[axis]
    columns = []
    for i in range(-left, length + right):
        if 0 <= i < length:
            columns.append(x.select(axis, i))
        elif mode == "zeros":
            columns.append(torch.zeros_like(x.select(axis, 0)))
        elif mode == "circular":
            columns.append(x.select(axis, i % length))
        elif mode == "replicate":
            columns.append(x.select(axis, 0 if i < 0 else length - 1))
        else:  # reflect: the border is the mirror and is not repeated
            columns.append(x.select(axis, -i if i < 0 else 2 * (length - 1) - i))
    return torch.stack(columns, axis)


def _attention_weights(attention: nn.MultiheadAttention) -> dict[str, Tensor]:
    """The four matrices of nn.MultiheadAttention."""
    if attention.in_proj_weight is not None:
        q, k, v = attention.in_proj_weight.chunk(3)
    else:
        q, k, v = attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight
    return {"q": q, "k": k, "v": v, "out_proj": attention.out_proj.weight}


@contextmanager
def _own_attention(attention: nn.MultiheadAttention, role: str, uses: list[Use]) -> Iterator[None]:
    """Replace the forward of nn.MultiheadAttention by its formula, head_i = softmax(q_i k_i^T / sqrt(d_head)) v_i."""
    if attention.training or attention.add_zero_attn:
        raise NotImplementedError("only eval mode without add_zero_attn")
    W = _attention_weights(attention)
    zero = attention.out_proj.weight.new_zeros(attention.embed_dim)
    b = dict(zip("qkv", [zero] * 3 if attention.in_proj_bias is None else attention.in_proj_bias.chunk(3), strict=True))
    b["out_proj"] = zero if attention.out_proj.bias is None else attention.out_proj.bias

    def project(which: str, h: Tensor) -> Tensor:
        z = h @ W[which].T + b[which]
        if which == role:
            delta = torch.zeros_like(z, requires_grad=True)
            uses.append((W[which].detach().clone(), h.detach().clone(), delta))
            z = z + delta
        return z

    def forward(query: Tensor, key: Tensor, value: Tensor, **options: Result) -> tuple[Tensor, None]:
        if any(options.get(mask) is not None for mask in ("key_padding_mask", "attn_mask")):
            raise NotImplementedError("no masks")
        batch = 0 if attention.batch_first else 1
        q, k, v = (project(name, t.select(batch, 0)) for name, t in zip("qkv", (query, key, value), strict=True))
        if attention.bias_k is not None and attention.bias_v is not None:
            k, v = torch.cat([k, attention.bias_k[0]]), torch.cat([v, attention.bias_v[0]])
        heads = []
        for qi, ki, vi in zip(*(t.chunk(attention.num_heads, -1) for t in (q, k, v)), strict=True):
            weights = torch.exp(qi @ ki.T / math.sqrt(qi.shape[-1]))
            heads.append(weights / weights.sum(-1, keepdim=True) @ vi)
        return project("out_proj", torch.cat(heads, -1)).unsqueeze(batch), None

    attention.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del attention.forward


@contextmanager
def _own_products(model: nn.Module, name: str, uses: list[Use]) -> Iterator[None]:
    """Replace F.linear, x @ P and einsum("nd,do->no", x, P) where P is the parameter `name` and no module's own weight.

    A weight that a module owns counts here only where it is used transposed, outside that module.
    """
    P = dict(model.named_parameters())[name]
    owned = hasattr(dict(model.named_modules())[_parent(name)[0]], "in_features")
    linear, einsum, matmul = F.linear, torch.einsum, torch.Tensor.__matmul__

    def perturb(W: Tensor, h: Tensor, z: Tensor) -> Tensor:
        delta = torch.zeros(z.numel() // z.shape[-1], z.shape[-1], dtype=z.dtype, requires_grad=True)
        uses.append((W.detach().clone(), h.detach().clone().reshape(-1, h.shape[-1]), delta))
        return z + delta.reshape(z.shape)

    def own_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        z = linear(x, weight, bias)
        transposed = weight._base is P and weight.shape == P.T.shape
        return perturb(weight, x, z) if transposed or (weight is P and not owned) else z

    def own_einsum(equation: str, *operands: Tensor) -> Tensor:
        z = einsum(equation, *operands)
        return perturb(P.T, operands[0], z) if equation == "nd,do->no" and operands[1] is P else z

    def own_matmul(x: Tensor, other: Tensor) -> Tensor:
        z = matmul(x, other)
        return perturb(P.T, x, z) if other is P else z

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(F, "linear", own_linear))
        stack.enter_context(mock.patch.object(torch, "einsum", own_einsum))
        stack.enter_context(mock.patch.object(torch.Tensor, "__matmul__", own_matmul))
        yield


# ------------------------------------------------------------------------- models that say themselves what they wrote


@dataclass(frozen=True)
class Tapped:
    """One use of a weight matrix: whose it is, which use, W of that owner, and how dg in the shape of z is read as [s,d_out]."""

    owner: nn.Module
    use: str  # "": the module's own forward; a parameter's name, a part's name
    matrix: Callable[[nn.Module], Tensor]
    rows: Callable[[Tensor], Tensor]
    delta: Tensor


_WRITTEN: list[Tapped] | None = None


def by_definition() -> bool:
    """Is a model being run by ``jacobian_and_uses``? What only changes how something is computed then stands aside."""
    return _WRITTEN is not None


def wrote(owner: nn.Module, z: Tensor, use: str = "", matrix: Callable[[nn.Module], Tensor] | None = None, axis: int = -1,
          rows: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """A model passes every z = W h (+ b) through here. It is z itself, but while ``jacobian_and_uses`` runs z with a zero added.

    ``axis`` of z holds d_out; ``rows`` reads what cannot be said so.
    """
    if _WRITTEN is None:
        return z
    delta = torch.zeros_like(z, requires_grad=True)
    _WRITTEN.append(Tapped(owner, use, _module_matrix if matrix is None else matrix,
                            (lambda g: g.movedim(axis, -1).reshape(-1, g.shape[axis])) if rows is None else rows, delta))
    return z + delta


@dataclass(frozen=True)
class Uses:
    """A map as its model described it: ``covariance`` = sum over examples, outputs and positions of g g^T."""

    owner: str  # the module's first name
    use: str
    matrix: Callable[[nn.Module], Tensor]
    covariance: Tensor


def jacobian_and_uses(model: nn.Module, x: Batch, output: Output = None) -> tuple[dict[str, Tensor], list[Uses]]:
    """{parameter: J[n,k,*shape]} and every map that passed through ``wrote``: one example and one output at a time."""
    global _WRITTEN
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    names = {id(module): name for name, module in reversed(list(model.named_modules()))}
    J: dict[str, list[Tensor]] = {name: [] for name in params}
    covariances: dict[tuple[int, str], Tensor] = {}
    first: dict[tuple[int, str], Tapped] = {}
    for i in range(size(x)):
        _WRITTEN = []
        try:
            f = outputs(model, example(x, i), output)[0]
            written = _WRITTEN
        finally:
            _WRITTEN = None
        grads = [_gradient(f[o], [*params.values(), *(w.delta for w in written)]) for o in range(len(f))]
        for name, per_output in zip(params, zip(*grads, strict=True), strict=False):
            J[name].append(torch.stack(per_output))
        for w, per_output in zip(written, list(zip(*grads, strict=True))[len(params):], strict=True):
            key = (id(w.owner), w.use)
            first.setdefault(key, w)
            for g in per_output:
                rows = w.rows(g)
                covariances[key] = covariances.get(key, 0) + rows.T @ rows
    uses = [Uses(names[id(w.owner)], w.use, w.matrix, covariances[key]) for key, w in first.items()]
    return {name: torch.stack(rows) for name, rows in J.items()}, uses


def correlations(W: Tensor, W0: Tensor, covariance: Tensor) -> dict[str, float]:
    """nfc, cnfc and weight_change of a map, from sum g g^T: cosines do not depend on its scale."""
    dW = W - W0
    return {"nfc": cosine(W.T @ W, W.T @ covariance @ W), "cnfc": cosine(dW.T @ dW, dW.T @ covariance @ dW),
            "weight_change": _ratio(dW.norm(), W.norm())}


# ------------------------------------------------------------------------------------------ neural feature correlations


def nfm(W: Tensor) -> Tensor:
    """F = W^T W."""
    return W.T @ W


def ptk_covariance(J: Tensor) -> Tensor:
    """K = 1/(n s) sum_{n,s,o} J_o J_o^T of J[n,k,s,d_out]."""
    n, k, s, d = J.shape
    K = J.new_zeros(d, d)
    for i, o, t in itertools.product(range(n), range(k), range(s)):
        K += torch.outer(J[i, o, t], J[i, o, t])
    return K / (n * s)


def agop(W: Tensor, J: Tensor) -> Tensor:
    """G = 1/(n s) sum_{n,s,o} u u^T, u = d f_o / d h = W^T J_o the gradient in what the layer reads."""
    n, k, s, _ = J.shape
    G = J.new_zeros(W.shape[1], W.shape[1])
    for i, o, t in itertools.product(range(n), range(k), range(s)):
        u = W.T @ J[i, o, t]
        G += torch.outer(u, u)
    return G / (n * s)


def ptk(J: Tensor) -> Tensor:
    """K[i,s,j,t] = sum_o J[i,o,s] . J[j,o,t], without 1/n."""
    n, k, s, _ = J.shape
    K = J.new_zeros(n, s, n, s)
    for i, t, j, u in itertools.product(range(n), range(s), range(n), range(s)):
        K[i, t, j, u] = sum(torch.dot(J[i, o, t], J[j, o, u]) for o in range(k))
    return K


def _ratio(a: Tensor | float, b: Tensor | float) -> float:
    """a / b, NaN for a zero denominator."""
    return float(a) / float(b) if float(b) != 0 else math.nan


def cosine(A: Tensor, B: Tensor) -> float:
    """<A, B> / (|A| |B|) in the Frobenius inner product."""
    return _ratio((A * B).sum(), A.norm() * B.norm())


def pearson(A: Tensor, B: Tensor) -> float:
    """The cosine after the mean of all entries is subtracted; NaN if either is constant."""
    A0, B0 = A - A.mean(), B - B.mean()
    if A0.norm() <= 1e-13 * A.norm() or B0.norm() <= 1e-13 * B.norm():
        return math.nan
    return cosine(A0, B0)


def nfa_measures(W: Tensor, W0: Tensor, J: Tensor, J0: Tensor) -> dict[str, float]:
    """The neural feature correlations of one layer, with dW = W - W0 and dK from J - J0; 0/0 is NaN.

    nfc = rho(W^T W, W^T K W), cnfc = rho(dW^T dW, dW^T K dW), double_centred_nfc = rho(dW^T dW, dW^T dK dW),
    ptk_centred_nfc = rho(W0^T W0, W0^T dK W0), c_uc_ratio = Tr(dW^T dW dW^T K dW) / Tr(W^T W W^T K W),
    dc_c_ratio = Tr(dW^T dW dW^T dK dW) / Tr(dW^T dW dW^T K dW), weight_change = |dW| / |W|.
    """
    dW, dJ = W - W0, J - J0
    F_W, F_dW, F_W0 = nfm(W), nfm(dW), nfm(W0)
    G, G_c, G_dc, G_ptk = agop(W, J), agop(dW, J), agop(dW, dJ), agop(W0, dJ)
    return {
        "nfc": cosine(F_W, G),
        "cnfc": cosine(F_dW, G_c),
        "double_centred_nfc": cosine(F_dW, G_dc),
        "ptk_centred_nfc": cosine(F_W0, G_ptk),
        "c_uc_ratio": _ratio(torch.trace(F_dW @ G_c), torch.trace(F_W @ G)),
        "dc_c_ratio": _ratio(torch.trace(F_dW @ G_dc), torch.trace(F_dW @ G_c)),
        "weight_change": _ratio(dW.norm(), W.norm()),
        "nfc_pearson": pearson(F_W, G),
        "cnfc_pearson": pearson(F_dW, G_c),
        "nfc_diagonal": pearson(F_W.diagonal(), G.diagonal()),
        "cnfc_diagonal": pearson(F_dW.diagonal(), G_c.diagonal()),
    }


def weight_ranks(W: Tensor) -> dict[str, float]:
    """Of the singular values s of W: sum s^2 / s_1^2, and how many are at least s_1 / 10; 0/0 is NaN."""
    s = torch.linalg.svdvals(W).tolist()
    counted = sum(1 for value in s if value >= s[0] / 10)
    return {"stable_rank_of_weights": _ratio(sum(value**2 for value in s), s[0]**2),
            "rank_of_weights": float(counted) if s[0] else math.nan}


def nfc_sqrt(W: Tensor, J: Tensor) -> float:
    """rho(W^T W, AGOP^(1/2)) of J[n,k,s,d_out]: the root's eigenvalues are the singular values of all (df/dh) / sqrt(n s)."""
    n, _, s, _ = J.shape
    _, singular, V = torch.linalg.svd(J.reshape(-1, J.shape[-1]) @ W / math.sqrt(n * s), full_matrices=False)
    return cosine(nfm(W), V.T @ torch.diag(singular) @ V)


# ------------------------------------------------------------------------------------------- features at convergence


def data_loss(f: Tensor, y: Tensor) -> Tensor:
    """Of f[n,k]: the mean of -log softmax over all labels that are not -100, or of (f - y)^2 over all outputs of targets y."""
    if y.is_floating_point():
        return sum((a - b) ** 2 for a, b in zip(f.flatten(), y.flatten(), strict=True)) / f.numel()
    logits, labels = f.reshape(y.numel(), -1), y.flatten().tolist()
    terms = [torch.log(torch.exp(row).sum()) - row[c] for row, c in zip(logits, labels, strict=True) if c != -100]
    return sum(terms, f.new_zeros(())) / len(terms)


def matrix(model: nn.Module, x: Batch, name: str, output: Output = None) -> Tensor:
    """W[d_out,d_in] of the map `name`."""
    uses: list[Use] = []
    with _perturbed(model, name, uses):
        for i in range(size(x)):
            outputs(model, example(x, i), output)
    return uses[-1][0]


def weight_and_gradient(model: nn.Module, x: Batch, y: Tensor, name: str, output: Output = None,
                        loss: Callable[[Tensor, Tensor], Tensor] = data_loss) -> tuple[Tensor, Tensor]:
    """W and dL/dW of the map `name` by autograd over the whole loss, all uses of the parameter included. The matrix is linear in
    the parameter, so the gradient in its layout is the matrix of a copy of the model with gradients in the place of weights."""
    model = copy.deepcopy(model).requires_grad_(True)
    W = matrix(model, x, name, output)
    parameters = list(model.parameters())
    gradients = _gradient(loss(torch.cat([outputs(model, example(x, i), output) for i in range(size(x))]), y), parameters)
    with torch.no_grad():
        for p, g in zip(parameters, gradients, strict=True):
            p.copy_(g)
    return W, matrix(model, x, name, output)


def gradient_through(f: Tensor, y: Tensor, h: Tensor, J: Tensor) -> Tensor:
    """sum_{n,o,s} (dL/df_no) J[n,o,s] h[n,s]^T: dL/dW of a matrix that is used once, whatever it is computed from."""
    f = f.detach().requires_grad_(True)
    (d,) = _gradient(data_loss(f, y), [f])
    return torch.einsum("no,nosp,nsi->pi", d, J, h)


def fact_measures(W: Tensor, G: Tensor, decay: float) -> dict[str, float]:
    """fact = rho(W^T W, FACT), FACT = -W^T G / decay with G = dL/dW; fact_error = |W^T W - FACT| / |W^T W|; backward the same of
    W W^T and -W G^T / decay; fact_stationarity = |G + decay W| / |decay W|."""
    forward, backward = -W.T @ G / decay, -W @ G.T / decay
    return {
        "fact": cosine(W.T @ W, forward),
        "fact_backward": cosine(W @ W.T, backward),
        "fact_error": _ratio((W.T @ W - forward).norm(), (W.T @ W).norm()),
        "fact_backward_error": _ratio((W @ W.T - backward).norm(), (W @ W.T).norm()),
        "fact_stationarity": _ratio((G + decay * W).norm(), (decay * W).norm()),
    }


def egop(target: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """1/n sum_i sum_o grad f_o(x_i) grad f_o(x_i)^T of a function of x[n,d]."""
    G = x.new_zeros(x.shape[1], x.shape[1])
    for i in range(len(x)):
        xi = x[i : i + 1].detach().clone().requires_grad_(True)
        for f in target(xi).flatten():
            (g,) = _gradient(f, [xi])
            G += torch.outer(g[0], g[0])
    return G / len(x)


# ------------------------------------------------------------------------------------------ how far a network has gone


@contextmanager
def batch_norms(model: nn.Module, names: list[str]) -> Iterator[None]:
    """These norms use the statistics of the batch, and keep their own."""
    for name in names:
        model.get_submodule(name).train()
        model.get_submodule(name).momentum = 0.0  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in names:
            model.get_submodule(name).eval()


def moved_norms(now: nn.Module, then: nn.Module) -> list[str]:
    """Norms whose running statistics have changed."""
    buffers, before = dict(now.named_buffers()), dict(then.named_buffers())
    return [name for name, module in now.named_modules() if hasattr(module, "running_mean") and module.running_mean is not None
            and not torch.equal(buffers[f"{name}.running_mean"], before[f"{name}.running_mean"])]


def batch_jacobian(model: nn.Module, x: Batch, output: Output = None) -> tuple[Tensor, dict[str, Tensor]]:
    """f[n,k] of a batch and {parameter: J[n,k,*shape]}, one output of one example at a time, among the others."""
    params = dict(model.requires_grad_().named_parameters())
    f = outputs(model, x, output)
    rows = [_gradient(v, list(params.values())) for v in f.flatten()]
    return f.detach(), {name: torch.stack([r[j] for r in rows]).unflatten(0, f.shape) for j, name in enumerate(params)}


def scale_free(model: nn.Module, x: Batch, output: Output = None) -> set[str]:
    """Weight matrices whose scale, with that of their bias, has no effect on the outputs, up to the eps of norms: without
    it, the Jacobian applied to them is zero beside the product of their norms."""
    params = dict(model.named_parameters())
    with without_eps(model):
        _, J = batch_jacobian(model, x, output)
    free = set()
    for name, p in params.items():
        bias = name.replace("weight", "bias") if "weight" in name.rpartition(".")[2] else ""
        if p.ndim > 1:
            own = {k: params[k].detach() for k in (name, bias) if k in params}
            effect = sum(torch.tensordot(J[k], w, w.ndim) for k, w in own.items())
            if effect.norm() <= 1e-9 * sum(J[k].norm() * w.norm() for k, w in own.items()):
                free.add(name)
    return free


@contextmanager
def without_eps(model: nn.Module) -> Iterator[None]:
    """Norms that add nothing to a variance."""
    known = [(m, k, v) for m in model.modules() for k in ("eps", "variance_epsilon")
             if isinstance(v := getattr(m, k, None), float)]
    try:
        for m, k, _ in known:
            setattr(m, k, 1e-100)
        yield
    finally:
        for m, k, v in known:
            setattr(m, k, v)


def to_first_scale_(now: nn.Module, then: nn.Module, x: Batch, output: Output = None) -> None:
    """Bring every matrix whose scale has no effect, in both networks, to its initial norm; its bias goes with it."""
    free = scale_free(now, x, output) & scale_free(then, x, output)
    params, first = dict(now.named_parameters()), dict(then.named_parameters())
    with torch.no_grad():
        for name in free:
            factor = first[name].norm() / params[name].norm()
            for k in {name, name.replace("weight", "bias")} & params.keys():
                params[k] *= factor


def linearisation_gap(now: nn.Module, then: nn.Module, x: Batch, output: Output = None) -> float:
    """|df - J0 dw| / (|df| + |J0 dw|) with the whole Jacobian. The scale of ``now`` may be changed."""
    names = moved_norms(now, then)
    with batch_norms(now, names), batch_norms(then, names):
        to_first_scale_(now, then, x, output)
        f0, J = batch_jacobian(then, x, output)
        change = outputs(now, x, output).detach() - f0
    first = dict(then.named_parameters())
    linear = torch.zeros_like(change)
    for name, p in now.named_parameters():
        linear += torch.tensordot(J[name], (p - first[name]).detach(), p.ndim)
    return _ratio((change - linear).norm(), change.norm() + linear.norm())


def function_change(W: Tensor, W0: Tensor, b: Tensor, b0: Tensor, h: Tensor) -> float:
    """|(W - W0) h + (b - b0)| / |W0 h + b0| over h[n,s,d_in], one position at a time."""
    change = [((W - W0) @ v + (b - b0)).square().sum() for rows in h for v in rows]
    first = [(W0 @ v + b0).square().sum() for rows in h for v in rows]
    return _ratio(torch.stack(change).sum().sqrt(), torch.stack(first).sum().sqrt())


def debiased_cka(X: Tensor, Y: Tensor) -> float:
    """Centred kernel alignment with Song's unbiased estimate of HSIC, by sums over pairs, triples and quadruples of rows."""
    n = len(X)
    K, L = X @ X.T, Y @ Y.T

    def hsic(A: Tensor, B: Tensor) -> Tensor:
        A, B = A - torch.diag(A.diagonal()), B - torch.diag(B.diagonal())
        one = torch.ones(n, dtype=A.dtype)
        pairs, a, b = (A * B).sum(), A @ one, B @ one
        return (pairs + a.sum() * b.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (a @ b)) / (n * (n - 3))

    return _ratio(hsic(K, L), (hsic(K, K) * hsic(L, L)).sqrt())


def overlap(X: Tensor, Y: Tensor, features: int) -> tuple[float, Tensor]:
    """Mean squared cosine of the principal angles between the leading left singular vectors of centred features, and these angles
    in degrees, one after another: each maximises |<u, v>| among what is orthogonal to those before."""
    spans = []
    for Z in (X, Y):
        U, S, _ = torch.linalg.svd(Z - Z.mean(0), full_matrices=False)
        spans.append(U[:, :features][:, S[:features] > 1e-6 * S[0]])
    P, Q = (U @ U.T for U in spans)
    few = min(U.shape[1] for U in spans)
    cosines = torch.linalg.eigvals(P @ Q).real.clamp(0, 1).sqrt().sort(descending=True).values[:few]
    return (torch.trace(P @ Q) / few).item(), torch.rad2deg(torch.arccos(cosines))


def reads(model: nn.Module, x: Batch, names: list[str], output: Output = None) -> dict[str, Tensor]:
    """What each of these modules is given, all calls side by side, [n, ...]."""
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    handles = [model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: seen[name].append(args[0].detach()))
               for name in names]
    try:
        outputs(model, x, output)
    finally:
        for handle in handles:
            handle.remove()
    return {name: torch.cat(parts, 1) for name, parts in seen.items()}


# ------------------------------------------------------------------------------------------------ kernels and labels


def one_hot(y: Tensor, k: int) -> Tensor:
    """Y[n,k], 1 at the class and 0 elsewhere."""
    Y = torch.zeros(len(y), k, dtype=torch.float64)
    for i, c in enumerate(y.tolist()):
        Y[i, c] = 1.0
    return Y


def centring(n: int) -> Tensor:
    """C = I - 1 1^T / n."""
    return torch.eye(n, dtype=torch.float64) - torch.ones(n, n, dtype=torch.float64) / n


def chances(sizes: Sequence[float], number: int) -> list[float]:
    """In proportion to sizes, but at most 1: the largest are taken for sure, one after another, until the others' are below 1."""
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    sure = 0
    while sure < number and (number - sure) * sizes[order[sure]] >= sum(sizes[i] for i in order[sure:]) * (1 - 1e-9):
        sure += 1
    rest = sum(sizes[i] for i in order[sure:])
    return [1.0 if i in order[:sure] else (number - sure) * sizes[i] / rest for i in range(len(sizes))]


def alignment(K: Tensor, y: Tensor) -> float:
    """A(K, y) = y^T K y / (|K|_F |y|^2), uncentred; for y[n,k] the mean over columns that are not zero."""
    columns = [y] if y.ndim == 1 else [y[:, c] for c in range(y.shape[1])]
    values = [_ratio(c @ K @ c, K.norm() * (c @ c)) for c in columns if c.norm() > 0]
    return sum(values) / len(values) if values else math.nan


def cka(K: Tensor, L: Tensor) -> float:
    """<C K C, C L C> / (|C K C| |C L C|)."""
    C = centring(len(K))
    return cosine(C @ K @ C, C @ L @ C)


def stable_rank(K: Tensor) -> float:
    """|K|_F^2 / |K|_2^2."""
    singular = torch.linalg.svdvals(K)
    return _ratio((singular**2).sum(), singular.max() ** 2)


def specialisation(K: Tensor, Y: Tensor) -> Tensor:
    """KSM[c,c'] = A(K^cc, y^c') / mean_c'' A(K^c''c'', y^c') of K[k,n,n], Y[n,k]: rows are kernels, columns labels."""
    k = len(K)
    A = torch.tensor([[alignment(K[c], Y[:, label]) for label in range(Y.shape[1])] for c in range(k)],
                     dtype=torch.float64)
    return A / A.mean(0, keepdim=True)


def tangent_alignment(K: Tensor, Y: Tensor) -> float:
    """Mean over outputs c with |y_c| > 0 and |K^cc| > 0 of y_c^T K^cc y_c / (|K^cc|_F |y_c|^2), uncentred, of K[n,k,n,k],
    Y[n,k]."""
    values = [alignment(K[:, c, :, c], Y[:, c]) for c in range(Y.shape[1]) if Y[:, c].norm() > 0 and K[:, c, :, c].norm() > 0]
    return sum(values) / len(values) if values else math.nan


def specialisation_ratio(K: Tensor, Y: Tensor) -> float:
    """The mean diagonal entry of the KSM of K[n,k,n,k], Y[n,k] over the mean entry off the diagonal."""
    k = Y.shape[1]
    own = torch.stack([K[:, c, :, c] for c in range(k)])
    if k < 2 or (Y.norm(dim=0) == 0).any() or (own.flatten(1).norm(dim=1) == 0).any():
        return math.nan
    KSM = specialisation(own, Y)
    on = [float(KSM[c, c]) for c in range(k)]
    off = [float(KSM[c, a]) for c in range(k) for a in range(k) if a != c]
    return _ratio(sum(on) / len(on), sum(off) / len(off))


def kernel_evolution(K0: Tensor, K: Tensor, steps: float = 1.0) -> dict[str, float]:
    """Of each output's own kernel K[:, c, :, c] of K[n,k,n,k], all outputs as one long vector."""
    then, now = (torch.cat([Z[:, c, :, c].flatten() for c in range(Z.shape[1])]) for Z in (K0, K))
    return {"kernel_norm": _ratio(now.norm(), then.norm()), "kernel_distance": _ratio((now - then).norm(), then.norm()),
            "kernel_rotation": 1 - _ratio(now @ then, now.norm() * then.norm()),
            "kernel_velocity": _ratio((now - then).norm(), then.norm() * steps)}


def effective_gamma(K0: Tensor, K: Tensor, Y: Tensor) -> float:
    """Mean over outputs, with labels and kernels, of the gamma for which K0/|K0| + gamma y y^T has the alignment of K: found by
    bisection, since that alignment grows with gamma. NaN if none is finite."""
    rates = []
    for c in range(Y.shape[1]):
        first, last, y = K0[:, c, :, c], K[:, c, :, c], Y[:, c]
        if min(first.norm(), last.norm(), y.norm()) == 0:
            continue
        first, wanted = first / first.norm(), alignment(last, y)
        if wanted > 1 - 1e-12:
            return math.nan
        low, high = -1e3, 1e3
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if alignment(first + middle * torch.outer(y, y), y) < wanted else (low, middle)
        rates.append((low + high) / 2)
    return sum(rates) / len(rates) if rates else math.nan


def _globally_centred(K: Tensor) -> Tensor:
    """C K C over the n k pairs (example, output), C = I - 1 1^T / (n k)."""
    nk = K.shape[0] * K.shape[1]
    C = centring(nk)
    return C @ K.reshape(nk, nk) @ C


def tangent_cka(K: Tensor, Y: Tensor) -> float:
    """y~^T K y~ / (|C K C|_F |y~|^2) with y~ = C y, of K[n,k,n,k], Y[n,k]."""
    Kc, y = _globally_centred(K), centring(Y.numel()) @ Y.flatten()
    return _ratio(y @ Kc @ y, Kc.norm() * (y @ y))


def tangent_stable_rank(K: Tensor) -> float:
    """sum_i lambda_i^2 / lambda_1^2 over the eigenvalues of C K C."""
    Kc = _globally_centred(K)
    eigenvalues = torch.linalg.eigvalsh((Kc + Kc.T) / 2)
    return _ratio((eigenvalues**2).sum(), eigenvalues.max() ** 2)


def drawn_matrix(K: Tensor, S: Tensor) -> Tensor:
    """S^T C K C S "m n m n" of K[n,k,n,k], with S[m,n,k]: for each example its own combinations, as columns of one matrix."""
    m, n, k = S.shape
    columns = torch.zeros(n, k, m, n, dtype=K.dtype)
    for i in range(n):
        columns[i, :, :, i] = S[:, i].T
    columns = columns.reshape(n * k, m * n)
    return (columns.T @ _globally_centred(K) @ columns).reshape(m, n, m, n)


def drawn_norm(M: Tensor) -> float:
    """Its square: the mean over pairs of draws of squared products, for an example with itself over pairs of different ones."""
    m, n = M.shape[:2]
    total = 0.0
    for i in range(n):
        for j in range(n):
            pairs = [m * m * M[a, i, b, j].item() ** 2 for a in range(m) for b in range(m) if i != j or a != b]
            total += sum(pairs) / len(pairs)
    return math.sqrt(total)


def drawn_bracket(M: Tensor, group: Tensor) -> tuple[list[float], list[float]]:
    """With each group of draws left out the largest eigenvalue, and the mean square, over the draws of that group, of what they
    see of its vector: as if the draws that are left were all."""
    m, n = M.shape[:2]
    above, below = [], []
    for g in range(int(group.max()) + 1):
        rest, mine = (group != g).nonzero().flatten(), (group == g).nonzero().flatten()
        part = (M[rest][:, :, rest] * m / len(rest)).reshape(len(rest) * n, -1)
        values, vectors = torch.linalg.eigh(part)
        w = vectors[:, -1] / values[-1].sqrt()  # J^T S w is a unit vector
        seen = [(m ** 0.5 * (m / len(rest)) ** 0.5 * M[a][:, rest].reshape(n, -1) @ w).square().sum().item() for a in mine]
        above.append(values[-1].item())
        below.append(sum(seen) / len(seen))
    return above, below


def tangent_correlation(K: Tensor, Y: Tensor) -> float:
    """sum_i (lambda_i / lambda_1) <u_i, y~ / |y~|>^2 over the eigenpairs of C K C."""
    Kc, y = _globally_centred(K), centring(Y.numel()) @ Y.flatten()
    eigenvalues, u = torch.linalg.eigh((Kc + Kc.T) / 2)
    if eigenvalues.max() == 0 or y.norm() == 0:
        return math.nan
    total = 0.0
    for i in range(len(eigenvalues)):
        total += float(eigenvalues[i] / eigenvalues.max() * (u[:, i] @ (y / y.norm())) ** 2)
    return total


# ------------------------------------------------------------------------------------------------ Hessians of outputs


def output_hessians(model: nn.Module, x: Tensor) -> Tensor:
    """H[n,k,p,p]: the second derivatives of every output of every example in all parameters, flattened in their order."""
    names, values = zip(*model.named_parameters(), strict=True)
    sizes = [v.numel() for v in values]

    def output(theta: Tensor, i: int, o: int) -> Tensor:
        pieces = {name: t.view_as(v) for name, t, v in zip(names, theta.split(sizes), values, strict=True)}
        return torch.func.functional_call(model, pieces, (x[i : i + 1],))[0, o]

    theta = torch.cat([v.detach().flatten() for v in values])
    k = outputs(model, x[:1]).shape[1]
    return torch.stack([torch.stack([torch.autograd.functional.hessian(lambda t, i=i, o=o: output(t, i, o), theta)
                                     for o in range(k)]) for i in range(len(x))])


# --------------------------------------------------------------------------------------------- Fisher of cross-entropy


def tangent_features(model: nn.Module, x: Batch, output: Output = None) -> dict[str, Tensor]:
    """{module: Psi[p, n k]}: the gradient of every output of every example in the module's own parameters, example by example."""
    J = jacobian(model, x, output)
    features: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        own = [f"{name}.{p}" if name else p for p, _ in module.named_parameters(recurse=False)]
        if own := [p for p in own if p in J]:
            features[name] = torch.cat([J[p].flatten(2).flatten(0, 1).T for p in own])
    return features


def cross_entropy_metric(f: Tensor, classes: int) -> Tensor:
    """H[n k, n k]: the second derivatives of the cross-entropy of each softmax in the outputs f[n,k], in blocks."""
    blocks = []
    for row in f.detach().double().reshape(-1, classes):
        def loss(z: Tensor) -> Tensor:
            return torch.logsumexp(z, 0) - z[0]
        blocks.append(torch.autograd.functional.hessian(loss, row))
    return torch.block_diag(*blocks)


def fisher_stable_rank(Psi: Tensor, H: Tensor) -> float:
    """Of I = Psi H Psi^T, by its eigenvalues."""
    eigenvalues = torch.linalg.eigvalsh(Psi @ H @ Psi.T)
    return _ratio((eigenvalues**2).sum(), eigenvalues.max() ** 2)


def fisher_correlation(Psi: Tensor, H: Tensor, Y: Tensor) -> float:
    """sum_i (lambda_i / lambda_1) <mu_i, y~ / |y~|>^2: mu_i are the left singular vectors of H^1/2 Psi^T, lambda_i the squares
    of its singular values."""
    values, U = torch.linalg.eigh(H)
    mu, s, _ = torch.linalg.svd(U @ torch.diag(values.clamp(min=0.0).sqrt()) @ U.T @ Psi.T, full_matrices=False)
    y = centring(Y.numel()) @ Y.flatten()
    return sum(float((s[i] / s[0]) ** 2 * (mu[:, i] @ (y / y.norm())) ** 2) for i in range(len(s)))


# ------------------------------------------------------------------------------------------------ the chain monomial


def chain_monomial(x: Tensor, r: int) -> Tensor:
    """sum over k = 1..r of x_{k mod r} x_{(k+1) mod r}, of x[n,d]."""
    return torch.stack([sum((row[k % r] * row[(k + 1) % r] for k in range(1, r + 1)), row.new_zeros(())) for row in x])


def chain_egop(d: int, r: int) -> list[list[int]]:
    """E[df/dx_i df/dx_j] in whole numbers: df/dx_i is a sum of variables, and E[x_a x_b] = 1 if a = b, else 0."""
    slopes: list[list[int]] = [[] for _ in range(d)]  # the variables whose sum is df/dx_i
    for k in range(1, r + 1):
        a, b = k % r, (k + 1) % r
        slopes[a].append(b)
        slopes[b].append(a)
    return [[sum(a == b for a, b in itertools.product(slopes[i], slopes[j])) for j in range(d)] for i in range(d)]


# ------------------------------------------------------------------------------------------------ theory of early times


def network(weights: list[Tensor], x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """f[n,c] = W_L phi(... phi(W_0 x)) of each row of x."""
    for W in weights[:-1]:
        x = activation(x @ W.T)
    return x @ weights[-1].T


def centred_second_derivatives(weights: list[Tensor], x: Tensor, y: Tensor, activation: Callable[[Tensor], Tensor],
                               layer: int) -> tuple[Tensor, Tensor]:
    """d^2/dt^2 at t = 0 of V^T V and V^T K V, V = W_layer(t) - W_layer(0), K(t) = sum_{n,c} (df/dz)(df/dz)^T, when all layers
    follow gradient flow on sum |f - y|^2 / 2: forward-mode differentiation in time, twice, along theta + t v + t^2/2 a."""
    theta = tuple(weights)

    def velocity(*now: Tensor) -> tuple[Tensor, ...]:
        loss = torch.func.grad(lambda w: (network(list(w), x, activation) - y).square().sum() / 2)
        return tuple(-g for g in loss(now))

    v, a = torch.func.jvp(velocity, theta, velocity(*theta))

    def matrices(t: Tensor) -> tuple[Tensor, Tensor]:
        now = [w + t * dw + t * t / 2 * ddw for w, dw, ddw in zip(theta, v, a, strict=True)]
        h = x
        for W in now[:layer]:
            h = activation(h @ W.T)
        V, K = now[layer] - theta[layer], 0
        for row in h:
            z = now[layer] @ row
            above = torch.func.jacrev(lambda z: network(now[layer + 1:], activation(z), activation) if now[layer + 1:] else z)
            J = above(z)
            K = K + J.T @ J
        return V.T @ V, V.T @ K @ V

    def slope(t: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.jvp(matrices, (t,), (torch.ones_like(t),))[1]

    zero = torch.zeros((), dtype=x.dtype)
    return torch.func.jvp(slope, (zero,), (torch.ones_like(zero),))[1]


def expected_kernel(x: Tensor, activation: str) -> list[list[float]]:
    """The first-layer kernel of two wide hidden layers, by the textbook formulas, up to a constant."""
    n, d = x.shape
    K = [[0.0] * n for _ in range(n)]
    for i, j in itertools.product(range(n), repeat=2):
        xx, zz, xz = (float(u @ v) / d for u, v in ((x[i], x[i]), (x[j], x[j]), (x[i], x[j])))
        if activation == "quadratic":
            K[i][j] = xz * (xx * zz + 2 * xz**2)
        else:
            t0 = 0.0 if i == j else math.acos(xz / math.sqrt(xx * zz))
            t1 = 0.0 if i == j else math.acos((math.sin(t0) + (math.pi - t0) * math.cos(t0)) / math.pi)
            K[i][j] = (math.pi - t0) / (2 * math.pi) * (math.pi - t1) / (2 * math.pi)
    return K


def deep_quadratic_kernel(x: Tensor, depth: int) -> Tensor:
    """The same for phi(u) = u^2 and any depth, with its constant: E[phi'(u) phi'(v)] of each layer times that of the others,
    E[phi(u) phi(v)] the next layer's covariance, each a Gauss-Hermite sum over (u, v) (exact for polynomials)."""
    nodes, weights = torch.from_numpy(np.stack(np.polynomial.hermite_e.hermegauss(6)))
    S, K = x @ x.T / x.shape[1], torch.ones(len(x), len(x), dtype=x.dtype)
    for _ in range(depth):
        after = torch.zeros_like(S)
        for i, j in itertools.product(range(len(x)), repeat=2):
            square, product = 0.0, 0.0
            for (p, wp), (q, wq) in itertools.product(zip(nodes.tolist(), weights.tolist(), strict=True), repeat=2):
                u = math.sqrt(S[i, i]) * p
                v = S[i, j] / math.sqrt(S[i, i]) * p + math.sqrt(max(S[j, j] - S[i, j] ** 2 / S[i, i], 0.0)) * q
                product += float(wp * wq * 2 * u * 2 * v) / (2 * math.pi)
                square += float(wp * wq * u**2 * v**2) / (2 * math.pi)
            K[i, j] *= product
            after[i, j] = square
        S = after
    return K


# ------------------------------------------------------------------------------------------------ infinite width


def duals(phi: Callable[[Tensor], Tensor], c: float, q1: float, q2: float, nodes: int = 80) -> tuple[float, float]:
    """E[phi(u) phi(v)] and E[phi'(u) phi'(v)] for (u, v) ~ N(0, [[q1, c], [c, q2]]) as integrals over the plane, in polar
    coordinates: u = sqrt(q1) R cos(a), v = sqrt(q2) R cos(a - t). Between the rays on which u or v changes its sign, each
    integrand is smooth, so Gauss-Legendre converges fast; beyond R = 12 there is no mass."""
    t = math.acos(min(1.0, max(-1.0, c / math.sqrt(q1 * q2)))) if q1 * q2 > 0 else math.pi / 2
    rays = sorted({a % (2 * math.pi) for a in (math.pi / 2, 3 * math.pi / 2, t + math.pi / 2, t + 3 * math.pi / 2)})
    x, w = (torch.from_numpy(z) for z in np.polynomial.legendre.leggauss(nodes))
    R, wR = 6 * (x[:, None] + 1), 6 * w[:, None]
    product, slopes = 0.0, 0.0
    for low, high in itertools.pairwise([*rays, rays[0] + 2 * math.pi]):
        a, wa = (high - low) * (x + 1) / 2 + low, (high - low) * w / 2
        mass = wa * wR * R * torch.exp(-R * R / 2) / (2 * math.pi)
        u, v = (math.sqrt(q1) * R * a.cos()).requires_grad_(), (math.sqrt(q2) * R * (a - t).cos()).requires_grad_()
        slope_u, slope_v = (torch.autograd.grad(phi(z).sum(), z)[0] for z in (u, v))
        product += float((mass * phi(u) * phi(v)).detach().sum())
        slopes += float((mass * slope_u * slope_v).sum())
    return product, slopes


def second_moment(phi: Callable[[Tensor], Tensor], q: float) -> float:
    """E[phi(u)^2] for u ~ N(0, q): an integral over each half of the line."""
    x, w = (torch.from_numpy(z) for z in np.polynomial.legendre.leggauss(200))
    z = 6 * (x + 1)
    mass = 6 * w * torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return float((mass * (phi(math.sqrt(q) * z) ** 2 + phi(-math.sqrt(q) * z) ** 2)).sum())


def infinite_kernels(x: Tensor, x2: Tensor, phi: Callable[[Tensor], Tensor], depth: int, weight_var: float,
                     bias_var: float) -> tuple[Tensor, Tensor]:
    """NTK and NNGP kernels of an infinitely wide network, pair by pair and layer by layer."""
    tangent, process = (torch.zeros(len(x), len(x2), dtype=torch.float64) for _ in range(2))
    for i, j in itertools.product(range(len(x)), range(len(x2))):
        c, q1, q2 = (weight_var * float(a @ b) / len(a) + bias_var for a, b in ((x[i], x2[j]), (x[i], x[i]), (x2[j], x2[j])))
        theta = c
        for _ in range(depth):
            k, k_dot = duals(phi, q1 if torch.equal(x[i], x2[j]) else c, q1, q2)  # the arc cosine is steep at 1
            c, q1, q2 = (weight_var * z + bias_var for z in (k, second_moment(phi, q1), second_moment(phi, q2)))
            theta = c + weight_var * k_dot * theta
        tangent[i, j], process[i, j] = theta, c
    return tangent, process


# ------------------------------------------------------------------------------------------------ free probability


def set_partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every partition of a list into blocks."""
    if not items:
        yield []
        return
    for rest in set_partitions(items[1:]):
        yield [[items[0]], *rest]
        for i in range(len(rest)):
            yield [*rest[:i], [items[0], *rest[i]], *rest[i + 1:]]


def crosses(partition: list[list[int]]) -> bool:
    """Is there a < b < c < d with a, c in one block and b, d in another?"""
    for P, Q in itertools.permutations(partition, 2):
        for (a, c), (b, d) in itertools.product(itertools.combinations(sorted(P), 2), itertools.combinations(sorted(Q), 2)):
            if a < b < c < d:
                return True
    return False


def free_cumulant(word: list[Tensor]) -> float:
    """kappa_n(w_1, ..., w_n): what phi(w_1 ... w_n) has beyond the non-crossing partitions into smaller blocks."""
    product = word[0]
    for w in word[1:]:
        product = product @ w
    total = float(product.trace()) / len(product)
    for partition in set_partitions(list(range(len(word)))):
        if len(partition) > 1 and not crosses(partition):
            total -= math.prod(free_cumulant([word[i] for i in sorted(block)]) for block in partition)
    return total


def free_word(letters: list[tuple[str, Tensor]]) -> float:
    """phi(w_1 w_2 ...) of letters (family, matrix), where families are free: a sum over non-crossing partitions whose blocks
    stay within one family (mixed free cumulants vanish). Within a family phi is the normalised trace."""
    total = 0.0
    cumulants: dict[tuple[int, ...], float] = {}
    for partition in set_partitions(list(range(len(letters)))):
        if any(len({letters[i][0] for i in block}) > 1 for block in partition) or crosses(partition):
            continue
        term = 1.0
        for block in partition:
            key = tuple(sorted(block))
            if key not in cumulants:
                cumulants[key] = free_cumulant([letters[i][1] for i in key])
            term *= cumulants[key]
        total += term
    return total


def quadratic_expectations(x: Tensor, y: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """E[W'^T W'] and E[W'^T K W'] of f = a . (W x)^2 / 2 with zero outputs, a ~ N(0, 1), W ~ N(0, 1/k): Gauss-Hermite
    quadrature over every weight with 3 nodes, which is exact up to degree 5 in each (4 occurs)."""
    d = x.shape[1]
    nodes, chances = (-math.sqrt(3), 0.0, math.sqrt(3)), (1 / 6, 2 / 3, 1 / 6)
    F, G = torch.zeros(d, d, dtype=x.dtype), torch.zeros(d, d, dtype=x.dtype)
    for pick in itertools.product(range(3), repeat=width * (d + 1)):
        chance = math.prod(chances[i] for i in pick)
        values = torch.tensor([nodes[i] for i in pick], dtype=x.dtype)
        W, a = values[:width * d].reshape(width, d) / math.sqrt(width), values[width * d:]
        W_dot, K = torch.zeros(width, d, dtype=x.dtype), torch.zeros(width, width, dtype=x.dtype)
        for row, label in zip(x, y, strict=True):
            J = a * (W @ row)
            W_dot += label * torch.outer(J, row)
            K += torch.outer(J, J)
        F += chance * W_dot.T @ W_dot
        G += chance * W_dot.T @ K @ W_dot
    return F, G


def compound_poisson_moment(p: int, ratio: float) -> float:
    """m_p of R = W^T diag(a^2) W as its sides grow: the sum over non-crossing partitions of products of
    kappa_s = ratio^(s-1) E a^(2s), ratio = d / width."""
    def kappa(s: int) -> float:
        return ratio ** (s - 1) * math.prod(range(1, 2 * s, 2))
    return sum(math.prod(kappa(len(block)) for block in partition)
               for partition in set_partitions(list(range(p))) if not crosses(partition))


# ------------------------------------------------------------------------------------------------ speed limited steps


def slo_step(W: Tensor, d: Tensor, lr: float, speed: float = 1.0, eps: float = 0.1, weight_decay: float = 0.0) -> Tensor:
    """W - lr weight_decay W - lr speed d / (eps + |d|_F), one entry at a time."""
    norm = math.sqrt(math.fsum(v * v for v in d.flatten().tolist()))
    entries = [w - lr * weight_decay * w - (lr * speed * v / (eps + norm) if v else 0.0)
               for w, v in zip(W.flatten().tolist(), d.flatten().tolist(), strict=True)]
    return torch.tensor(entries, dtype=torch.float64).reshape(W.shape)


def momentum_direction(gradients: list[Tensor], momentum: float, nesterov: bool = False) -> Tensor:
    """b_t = momentum b_{t-1} + g_t with b_1 = g_1; Nesterov's is g_t + momentum b_t."""
    b = gradients[0]
    for g in gradients[1:]:
        b = momentum * b + g
    return gradients[-1] + momentum * b if nesterov else b


def adam_direction(gradients: list[Tensor], beta1: float, beta2: float, eps: float) -> Tensor:
    """m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps), m and v written out as sums over the past."""
    t = len(gradients)
    m = sum(((1 - beta1) * beta1 ** (t - 1 - i) * g for i, g in enumerate(gradients)), torch.zeros_like(gradients[0]))
    v = sum(((1 - beta2) * beta2 ** (t - 1 - i) * g**2 for i, g in enumerate(gradients)), torch.zeros_like(gradients[0]))
    return m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps)


def adaptive_speeds(values: dict[str, float], layers: list[str], s: float) -> dict[str, float]:
    """s for the layer with the smallest value (the first of equal ones), 1/s for all others, named in values or not."""
    chosen = None
    for name, value in values.items():
        if value == value and (chosen is None or value < values[chosen]):
            chosen = name
    return {name: s if name == chosen else 1 / s for name in layers}


# ------------------------------------------------------------------------------------------------ kernel machines


def metric_root(M: Tensor) -> Tensor:
    """M^(1/2) of a positive semi-definite matrix [d,d], by scipy."""
    return torch.from_numpy(np.real(scipy.linalg.sqrtm(M.numpy())))


def metric_power(M: Tensor, exponent: float) -> Tensor:
    """M^exponent of a positive definite matrix [d,d], by scipy."""
    return torch.from_numpy(np.real(scipy.linalg.fractional_matrix_power(M.numpy(), exponent)))


def kernel_values(kernel: Any, x: Tensor, z: Tensor, M: Tensor | None = None) -> Tensor:
    """k_M(x_i, z_j) [n,m] by its formula in z^T M x and (x - z)^T M (x - z), differentiable in x. At a kink, x = z, the slope
    is 0."""
    d = x.shape[1]
    M = torch.eye(d, dtype=x.dtype) if M is None else M.diag() if M.dim() == 1 else M
    same = (x.detach()[:, None] == z[None]).all(-1)
    delta = x[:, None] - z[None]
    square = torch.einsum("nmd,de,nme->nm", delta, M, delta)
    inner, own, other = (torch.einsum(form, a, M, b) for form, a, b in (
        ("nd,de,me->nm", x, z), ("nd,de,ne->n", x, x), ("md,de,me->m", z, z)))
    name = type(kernel).__name__
    if name == "Laplace":
        return torch.where(same, 1.0, torch.exp(-torch.where(same, 1.0, square).sqrt() / kernel.bandwidth))
    if name == "LaplaceL1":
        return torch.exp(-(delta @ metric_root(M)).abs().sum(-1) / kernel.bandwidth)
    if name == "Gaussian":
        return torch.exp(-square / (2 * kernel.bandwidth**2))
    if name == "Quadratic":
        return inner**2
    if name == "Exponential":
        return torch.exp(inner / kernel.bandwidth**2)
    if name in ("NTK", "NNGP"):
        c, q1, q2 = (kernel.weight_var * s / d + kernel.bias_var for s in (inner, own[:, None], other[None]))
        return _network_kernel(kernel, c, q1, q2, same, tangent=name == "NTK")
    raise NotImplementedError(name)


def _network_kernel(kernel: Any, c: Tensor, q1: Tensor, q2: Tensor, same: Tensor, tangent: bool) -> Tensor:
    """Layer by layer from the products after the first: c <- w E[phi phi] + b, Theta <- c + w E[phi' phi'] Theta."""
    w, b, theta = kernel.weight_var, kernel.bias_var, c
    for _ in range(kernel.depth):
        if kernel.activation == "relu":
            cosine = torch.where(same, 0.0, c / (q1 * q2).sqrt())
            angle = torch.acos(cosine)
            k = torch.where(same, c / 2, (q1 * q2).sqrt() * (angle.sin() + (math.pi - angle) * cosine) / (2 * math.pi))
            slopes = torch.where(same, 0.5, (math.pi - angle) / (2 * math.pi))
            k1, k2 = q1 / 2, q2 / 2
        else:  # erf
            k, k1, k2 = (2 / math.pi * torch.asin(2 * s / ((1 + 2 * s1) * (1 + 2 * s2)).sqrt()) for s, s1, s2 in (
                (c, q1, q2), (q1, q1, q1), (q2, q2, q2)))
            slopes = 4 / math.pi / ((1 + 2 * q1) * (1 + 2 * q2) - 4 * c**2).sqrt()
        c, q1, q2 = w * k + b, w * k1 + b, w * k2 + b
        theta = c + w * slopes * theta
    return theta if tangent else c


def kernel_gradients(kernel: Any, x: Tensor, z: Tensor, M: Tensor | None = None) -> Tensor:
    """d k_M(x_i, z_j) / d x_i [n,m,d] by autograd, for one z at a time: k(x_i, z) depends on no other x."""
    columns = []
    for j in range(len(z)):
        points = x.clone().requires_grad_()
        columns.append(torch.autograd.grad(kernel_values(kernel, points, z[j : j + 1], M).sum(), points)[0])
    return torch.stack(columns, 1)


def machine_gradients(kernel: Any, x: Tensor, A: Tensor, M: Tensor | None = None) -> Tensor:
    """grad f_c(x_i) [n,c,d] of f = sum_j A_j k_M(., x_j), by autograd, for one output at a time: f(x_i) depends on no other x."""
    columns = []
    for c in range(A.shape[1]):
        points = x.clone().requires_grad_()
        columns.append(torch.autograd.grad((kernel_values(kernel, points, x, M) @ A[:, c]).sum(), points)[0])
    return torch.stack(columns, 1)


def gradient_outer(G: Tensor, weights: Tensor | None = None, centred: bool = False) -> Tensor:
    """AGOP of gradients [n,c,d]: sum_i w_i sum_c g_ic g_ic^T / sum_i w_i, centred: less the weighted mean of each output."""
    w = torch.ones(len(G), dtype=G.dtype) if weights is None else weights
    mean = sum((w[i] * G[i] for i in range(len(G))), torch.zeros_like(G[0])) / w.sum() if centred else torch.zeros_like(G[0])
    result = torch.zeros(G.shape[2], G.shape[2], dtype=G.dtype)
    for i, c in itertools.product(range(len(G)), range(G.shape[1])):
        result += w[i] * torch.outer(G[i, c] - mean[c], G[i, c] - mean[c])
    return result / w.sum()


def residual_outer(G: Tensor, A: Tensor, x: Tensor) -> Tensor:
    """FACT of gradients [n,c,d]: sum_i sum_c A_ic g_ic x_i^T."""
    return sum((A[i, c] * torch.outer(G[i, c], x[i]) for i in range(len(x)) for c in range(A.shape[1])),
               torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype))


def fact_by_loss(kernel: Any, x: Tensor, y: Tensor, A: Tensor, M: Tensor | None, ridge: float) -> Tensor:
    """-1/(n lambda) sum_i grad_x l_i x_i^T with the data loss l_i = |f(x_i) - y_i|^2 / 2 and n lambda = ridge, by autograd."""
    result = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)
    for i in range(len(x)):
        point = x[i : i + 1].clone().requires_grad_()
        loss = ((kernel_values(kernel, point, x, M) @ A - y[i]) ** 2).sum() / 2
        result -= torch.outer(torch.autograd.grad(loss, point)[0][0], x[i]) / ridge
    return result


def next_metric(rule: str, kernel: Any, x: Tensor, A: Tensor, M: Tensor, exponent: float = 1.0) -> Tensor:
    """agop: AGOP^s; fact: (F F^T)^(1/2); fact_geometric: (F M^2 F^T)^(1/4), F = FACT.  [theory/FACT 1.4]"""
    G = machine_gradients(kernel, x, A, M)
    if rule.startswith("agop"):
        return metric_power(gradient_outer(G, centred=rule == "agop_centred"), exponent)
    F = residual_outer(G, A, x)
    return metric_power(metric_root(F @ F.T if rule == "fact" else metric_root(F @ M @ M @ F.T)), exponent)


def probabilities(f: np.ndarray, T: float, doubt: float, frequencies: np.ndarray) -> np.ndarray:
    """Row by row: (1 - doubt) softmax(T f) + doubt q; q are the frequencies, from that of the largest output on levelled."""
    P = []
    for row in np.stack([-f, f], 1) if f.ndim == 1 else f:
        top = row.argmax()
        level = [c for c in range(len(row)) if frequencies[c] >= frequencies[top]]
        q = [np.mean(frequencies[level]) if c in level else frequencies[c] for c in range(len(row))]
        P.append((1 - doubt) * scipy.special.softmax(T * row) + doubt * np.array(q))
    return np.array(P)


def calibration(f: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """T: the likelihood of the rows, each with 1 / (n + 1) of its class drawn from the frequencies, is largest. The doubt,
    at that T: the likelihood of the rows, times the doubt, is largest. Both on fine grids."""
    n, k = len(f), labels.max() + 1
    q, Z = np.bincount(labels) / n, np.stack([-f, f], 1) if f.ndim == 1 else f
    target = (n * np.eye(k)[labels] + q) / (n + 1)
    Ts = np.geomspace(0.01, 100, 40_001)
    T = Ts[np.argmax([(target * scipy.special.log_softmax(t * Z, axis=1)).sum() for t in Ts])]
    doubts = np.linspace(0, 1, 20_001)[1:-1]
    sure, unsure = (probabilities(f, T, d, q)[np.arange(n), labels] for d in (0.0, 1.0))
    return T, doubts[np.argmax([np.log((1 - d) * sure + d * unsure).sum() + np.log(d) for d in doubts])]


def kernel_ridge(K: Tensor, y: Tensor, ridge: float, intercept: bool = False) -> tuple[Tensor, Tensor]:
    """A and b of min |y - K A - b|^2 + ridge A^T K A: (K + ridge) A + b = y, and the sum of A is 0 if there is a b."""
    n, c = y.shape
    K = K + ridge * torch.eye(n, dtype=y.dtype)
    if not intercept:
        return torch.from_numpy(np.linalg.solve(K.numpy(), y.numpy())), torch.zeros(c, dtype=y.dtype)
    system = torch.zeros(n + 1, n + 1, dtype=y.dtype)
    system[:n, :n] = K
    system[:n, n] = system[n, :n] = 1
    solution = torch.from_numpy(np.linalg.solve(system.numpy(), torch.cat([y, torch.zeros(1, c, dtype=y.dtype)]).numpy()))
    return solution[:n], solution[n]


def left_out(kernel: Any, x: Tensor, y: Tensor, copies: list[int], ridge: float, intercept: bool) -> Tensor:
    """f^-(x_r) [r,c]: every row r stands ``copies[r]`` times in the data; all with its inputs are removed, then it is fitted."""
    rows = []
    for r in range(len(x)):
        kept = [q for q in range(len(x)) for _ in range(copies[q]) if not torch.equal(x[q], x[r])]
        A, b = kernel_ridge(kernel_values(kernel, x[kept], x[kept]), y[kept], ridge, intercept)
        rows.append(kernel_values(kernel, x[r : r + 1], x[kept]) @ A + b)
    return torch.cat(rows)


def recursive_feature_machine(kernel: Any, x: Tensor, y: Tensor, ridge: float, iterations: int, rule: str, exponent: float = 1.0,
                              normalise: bool = True) -> list[tuple[Tensor, Tensor]]:
    """(M, A) of each iteration: M = I; solve (K_M + ridge) A = y; M by the rule, over the mean of its diagonal; and again."""
    M = torch.eye(x.shape[1], dtype=x.dtype)
    stages = []
    for _ in range(iterations + 1):
        A, _ = kernel_ridge(kernel_values(kernel, x, x, M), y, ridge)
        stages.append((M, A))
        M = next_metric(rule, kernel, x, A, M, exponent)
        M = M / M.diagonal().mean() if normalise else M
    return stages


# ------------------------------------------------------------------------------------- features of a layer, as n x n matrices


def eigenfunctions(Phi: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """Intensities rho_k = s_k^2/n [r] of features Phi[n,p], the largest first, and e_k(x) = u_k^T Phi(x) / sqrt(rho_k) [m,r] of
    the rows of ``there``[m,p]; those without intensity left out."""
    _, s, Ut = torch.linalg.svd(Phi, full_matrices=False)
    rho = s**2 / len(Phi)
    real = rho > 1e-13 * rho[0]
    return rho[real], there @ Ut[real].T / rho[real].sqrt()


def projector(F: Tensor) -> Tensor:
    """P[n,n] onto the span of the columns of F[n,C]."""
    return F @ torch.linalg.pinv(F.T @ F, rtol=1e-12, hermitian=True) @ F.T


def effective_dimension(v: Tensor) -> float:
    """exp(-sum p ln p), p = v / sum v."""
    shares = [x / v.sum().item() for x in v.tolist() if x > 0]
    return math.exp(-sum(x * math.log(x) for x in shares)) if shares else math.nan


def feature_measures(Phi: Tensor, Y: Tensor, f: Tensor, hot: bool, aside: tuple[Tensor, ...] | None = None) -> dict[str, Any]:
    """Every number of measures.features, with sums over examples one after another and n x n matrices."""
    there, targets, outs = (Phi, Y, f) if aside is None else aside
    rho, e = eigenfunctions(Phi, there)
    n, P = len(there), projector(outs)
    dim = round(P.trace().item())
    classes = [j for j in range(Y.shape[1]) if targets[:, j].any()]
    quality = torch.stack([sum(((e[:, k] @ targets[:, j]) / n) ** 2 / ((targets[:, j] @ targets[:, j]) / n) for j in classes)
                           / len(classes) / ((e[:, k] @ e[:, k]) / n) for k in range(len(rho))])
    used = torch.stack([(e[:, k] @ P @ e[:, k]) / (e[:, k] @ e[:, k]) / dim for k in range(len(rho))])
    return {"intensity": rho, "quality": quality, "utilisation": used, "kappa_cka": kappa_cka(there, outs),
            "deff_intensity": 1 + effective_dimension(rho[1:]) if hot else effective_dimension(rho),
            "deff_quality": effective_dimension(quality), "deff_utilisation": effective_dimension(used),
            "quality_top": quality[:Y.shape[1]].sum().item(), "utilisation_top": used[:Y.shape[1]].sum().item(),
            "constant": abs(e[:, 0].sum().item()) / n / math.sqrt((e[:, 0] @ e[:, 0]).item() / n)}


def kappa_cka(Phi: Tensor, f: Tensor) -> float:
    """1 - Tr(HKH HPH) / (|HKH| |HPH|), literally."""
    n = len(Phi)
    H = torch.eye(n, dtype=Phi.dtype) - torch.ones(n, n, dtype=Phi.dtype) / n
    K, P = H @ (Phi @ Phi.T / n) @ H, H @ projector(f) @ H
    return 1 - ((K @ P).trace() / (K.norm() * P.norm())).item()


def collapse_measures(Phi: Tensor, ids: Tensor, W: Tensor, b: Tensor) -> dict[str, float]:
    """Neural collapse by its definition; every class has examples."""
    C, n, p = len(W), len(Phi), Phi.shape[1]
    mu = torch.stack([Phi[ids == c].sum(0) / (ids == c).sum() for c in range(C)])
    m = mu - mu.sum(0) / C
    within, between = torch.zeros(p, p, dtype=Phi.dtype), torch.zeros(p, p, dtype=Phi.dtype)
    for x, c in zip(Phi, ids, strict=True):
        within += torch.outer(x - mu[c], x - mu[c]) / n
    for v in m:
        between += torch.outer(v, v) / C
    cosines = torch.stack([torch.stack([a @ b / (a.norm() * b.norm()) for b in m]) for a in m])
    simplex = (C * torch.eye(C, dtype=Phi.dtype) - 1) / (C - 1)
    sizes = [v.norm().item() for v in m]
    mean = sum(sizes) / C
    guesses = [int((W @ x + b).argmax()) for x in Phi]
    nearest = [int((mu - x).norm(dim=1).argmin()) for x in Phi]
    return {"nc1": (within @ torch.linalg.pinv(between, rtol=1e-12, hermitian=True)).trace().item() / C,
            "nc1_trace": (within @ between.T).trace().item(), "nc2_angle": (cosines - simplex).norm().item(),
            "nc2_norm": math.sqrt(sum((s - mean) ** 2 for s in sizes) / C) / mean,
            "nc3": sum((w / w.norm() - v / v.norm()).norm().item() for w, v in zip(W, m, strict=True)) / C,
            "nc4": sum(a != b for a, b in zip(guesses, nearest, strict=True)) / n}


# ------------------------------------------------------------------------------------------------ ridge regression


def ridge_risk(eigenvalues: Any, power: Any, n: int, k: float, ridge: float, noise: float) -> tuple[float, float, float]:
    """Test error, train error and kappa by the two equations of the text, solved by bisection with sixty digits:
    sum lambda/(lambda + gamma) + ridge/kappa = n and sum lambda/(lambda + gamma) + k kappa/gamma = k."""
    import mpmath
    with mpmath.workdps(60):
        lam, v2 = ([mpmath.mpf(float(a)) for a in values] for values in (eigenvalues, power))
        delta = mpmath.mpf(ridge)

        def z(gamma: Any) -> Any:
            return mpmath.fsum(a / (a + gamma) for a in lam)

        def of(gamma: Any) -> Any:  # kappa by the second equation
            return gamma if math.isinf(k) else gamma * (k - z(gamma)) / k

        low, high = mpmath.mpf(-200), mpmath.mpf(200)
        for _ in range(220):
            middle = (low + high) / 2
            gamma = mpmath.e**middle
            kappa = of(gamma)
            below = kappa <= 0 or z(gamma) + delta / kappa > n if delta else z(gamma) > min(n, k)
            low, high = (middle, high) if below else (low, middle)
        gamma = mpmath.e**high
        kappa, q = of(gamma), mpmath.fsum((a / (a + gamma)) ** 2 for a in lam)
        if math.isinf(k):
            bias = mpmath.fsum((gamma / (a + gamma)) ** 2 * v for a, v in zip(lam, v2, strict=True))
            test = n / (n - q) * (bias + noise)
        else:
            bias = mpmath.fsum((gamma / (a + gamma) - kappa * a / (a + gamma) ** 2 * k / (k - q)) * v
                               for a, v in zip(lam, v2, strict=True))
            test = (bias + noise) / (1 - (q * (k - 2 * z(gamma)) + z(gamma) ** 2) / (n * (k - q)))
        train = (delta / (n * kappa)) ** 2 * test if delta else mpmath.mpf(0)
        return float(test), float(train), float(kappa)
