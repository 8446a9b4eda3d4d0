"""What the instrument says of an architecture beside what brute force says: correlations and kernels.

The Jacobian of each example is taken alone, in every parameter, and in a zero that is added to whatever a parameter's product
writes. Products are seen where torch computes them (`Products`), whichever module or function asks for them; nothing of
`richter.instrument` takes part.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import oracles
import richter
import zoo
from richter.core import WHOLE, Mark
from richter.instrument.capture import state_of
from richter.instrument.survey import survey
from zoo_architectures import Architecture

EXAMPLES = 14
ASSESSED = (*(m for m in richter.measures.DEFAULT if m not in richter.measures.MOVEMENT),
            "tangent_stable_rank", "tangent_correlation")
CORRELATIONS = ("nfc", "cnfc", "c_uc_ratio", "weight_change")
TANGENT = ("tangent_alignment", "tangent_cka", "tangent_stable_rank", "tangent_correlation")
PRODUCTS = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__, Tensor.__rmatmul__}
TRANSPOSED = {F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}
SUMS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}
CONVOLUTIONS = {F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d}


@dataclass
class Product:
    """z = W h at each position of one example: which entries of which parameter are W, and the zero that was added to z."""

    parameter: str
    index: Tensor  # [r, d_out, d_in], r > 1 for a convolution in groups
    modules: tuple[nn.Module, ...]  # whose forward was running
    delta: Tensor  # [s, r d_out]


class Products(TorchFunctionMode):
    """Adds a zero to every product of a parameter, or of a part of one, and keeps it."""

    def __init__(self, model: nn.Module, running: list[nn.Module]) -> None:
        super().__init__()
        self.running, self.products = running, list[Product]()
        self.parameters = {p.untyped_storage().data_ptr(): (k, p) for k, p in reversed(list(model.named_parameters()))}
        self.computed = {m: k for k, m in model.named_modules() if hasattr(m, "parametrizations")}

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        z = func(*args, **kwargs)
        named = [kwargs[k] for k in ("input", "weight") if k in kwargs]
        if func is F.linear:
            x, w = [*args, *named][:2]
            if x.dim() > 1 and x.shape[:-2].numel() == 1 and self._entries(x):  # a table that a layer reads whole
                z = self._keep(z.mT, x, lambda i: i.flatten(0, -2)[None]).mT
            return self._keep(z, w, lambda i: i[None])
        if func in PRODUCTS and self._entries(args[1], 2):
            return self._keep(z, args[1], lambda i: i.T[None])
        if func in PRODUCTS and self._entries(args[0], 2):
            return self._keep(z.mT, args[0], lambda i: i[None]).mT
        if func in (torch.addmm, Tensor.addmm):
            return self._keep(z, args[2], lambda i: i.T[None])
        if func in (F.embedding, torch.embedding):
            return self._keep(z, args[0] if func is torch.embedding else args[1], lambda i: i.T[None])
        if func is F.embedding_bag:
            return self._keep(z, args[1], lambda i: i.T[None])
        if func in (F.bilinear, torch.bilinear):
            return self._keep(z, args[2], lambda i: i.flatten(1)[None])
        if func in CONVOLUTIONS:
            x, w = [*args, *named][:2]
            groups = x.shape[1] // w.shape[1]
            return self._keep(z.movedim(1, -1), w, lambda i: i.flatten(1).unflatten(0, (groups, -1))).movedim(-1, 1)
        if func in TRANSPOSED:
            return self._scattered(func, z, [*args, *named], kwargs)
        if func is torch.einsum and len(args) == 3:
            return self._einsum(z, *args)
        if func is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dim() and self._entries(args[0], 2):
            return self._keep(z, args[0], lambda i: i.T[None])
        if func in SUMS:
            table = next((w for w in args[:2] if isinstance(w, Tensor) and w.dim() > 1 and self._entries(w)), None)
            return z if table is None else self._keep(z, table, lambda i: i.flatten(0, -2).T[None])
        return z

    def _scattered(self, func: Callable[..., Any], z: Tensor, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        """A transposed convolution, as what each place of its input writes into the places of its output."""
        x, w, *rest = args
        settings = dict(zip(("bias", "stride", "padding", "output_padding", "groups", "dilation"), rest, strict=False)) | {
            k: v for k, v in kwargs.items() if k not in ("input", "weight")}
        groups, out, kernel = settings.get("groups", 1), w.shape[1] * settings.get("groups", 1), w.shape[2:].numel()
        rows = x.new_zeros(*x.movedim(1, -1).shape[:-1], out * kernel)
        written = self._keep(rows, w, lambda i: i.unflatten(0, (groups, -1)).flatten(2).mT).movedim(-1, 1)
        each = torch.eye(out * kernel, dtype=z.dtype).reshape(out * kernel, out, *w.shape[2:])
        return z + func(written, each, None, **{k: v for k, v in settings.items() if k not in ("bias", "groups")})

    def _einsum(self, z: Tensor, equation: str, x: Tensor, w: Tensor) -> Tensor:
        """A parameter's axes that are summed are what it reads, those of its own what it writes; the others are groups."""
        (first, second), out = equation.replace(" ", "").split("->")[0].split(","), equation.replace(" ", "").split("->")[1]
        if not self._entries(w):
            (first, x), (second, w) = (second, w), (first, x)
        read, written = [c for c in second if c not in out], [c for c in second if c in out and c not in first]
        group = [c for c in second if c in out and c in first]
        if not self._entries(w) or not read or not written or set(read) - set(first):
            return z
        order = [*(c for c in out if c not in group + written), *group, *written]
        rows = z.permute([out.index(c) for c in order]).flatten(-len(group + written))
        sizes = [math.prod(w.shape[second.index(c)] for c in axes) for axes in (group, written, read)]
        kept = self._keep(rows, w, lambda i: i.permute([second.index(c) for c in group + written + read]).reshape(sizes))
        return kept.reshape([z.shape[out.index(c)] for c in order]).permute([order.index(c) for c in out])

    def _entries(self, w: Any, dim: int | None = None) -> tuple[str, Tensor] | None:
        """The parameter and the places in it of a view of it, or of a module's weight that is computed; None of anything else."""
        if not isinstance(w, Tensor) or w.layout is not torch.strided or (dim is not None and w.dim() != dim):
            return None
        name, p = self.parameters.get(w.untyped_storage().data_ptr(), ("", None))
        if p is not None and (w is p or w._base is not None):
            return name, torch.arange(p.numel()).as_strided(w.shape, w.stride(), w.storage_offset() - p.storage_offset())
        if self.running and self.running[-1] in self.computed and w.dim() > 1 and w.requires_grad:
            return f"{self.computed[self.running[-1]]}.weight", torch.arange(w.numel()).reshape(w.shape)
        return None

    def _keep(self, z: Tensor, w: Any, arrange: Callable[[Tensor], Tensor]) -> Tensor:
        entries = self._entries(w)
        if entries is None:
            return z
        delta = torch.zeros(z.numel() // z.shape[-1], z.shape[-1], dtype=z.dtype, requires_grad=True)
        self.products.append(Product(entries[0], arrange(entries[1]), tuple(self.running), delta))
        return z + delta.reshape(z.shape)


@contextmanager
def opened(model: nn.Module) -> Iterator[None]:
    """While open, recurrent layers and torch's attention are computed step by step, by products that can be seen."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(F, "has_torch_function", return_value=False))  # F.multi_head_attention_forward
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                stack.enter_context(mock.patch.object(module, "forward", partial(recurrent, module)))
        yield


def recurrent(module: nn.RNNBase, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
    """nn.LSTM, nn.GRU and nn.RNN from zero states, by their formulas."""
    assert state is None
    x = x.transpose(0, 1) if module.batch_first else x
    finals = []
    for layer in range(module.num_layers):
        written = []
        for way in range(1 + module.bidirectional):
            suffix = f"l{layer}" + "_reverse" * way
            parts = [getattr(module, f"{kind}_{suffix}", None) for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
            steps, last = _unrolled(module.mode, x.flip(0) if way else x, module.hidden_size, parts)
            written.append(steps.flip(0) if way else steps)
            finals.append(last)
        x = torch.cat(written, -1)
    h, c = (torch.stack([final[j] for final in finals]) for j in range(2))
    return x.transpose(0, 1) if module.batch_first else x, (h, c) if module.mode == "LSTM" else h


def _unrolled(mode: str, x: Tensor, d: int, parts: list[Any]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One layer in one direction: all states, and the last state and cell."""
    U, W, a, b = parts
    h = c = x.new_zeros(x.shape[1], d)
    states = []
    for now in x:
        z, r = F.linear(now, U, a), F.linear(h, W, b)
        if mode == "LSTM":
            i, f, g, o = (z + r).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        elif mode == "GRU":
            (reset, update, new), (reset2, update2, new2) = z.chunk(3, -1), r.chunk(3, -1)
            gate = (update + update2).sigmoid()
            h = (1 - gate) * (new + (reset + reset2).sigmoid() * new2).tanh() + gate * h
        else:
            h = torch.tanh(z + r) if mode == "RNN_TANH" else F.relu(z + r)
        states.append(h)
    return torch.stack(states), (h, c)


@dataclass
class Truth:
    """Jacobians of every example: in parameters J[n,k,*shape], and in what products write, by example and product."""

    model: nn.Module
    jacobian: dict[str, Tensor]
    products: list[list[tuple[Product, Tensor]]]  # example -> (product, g[k, s, d_out])


def brute_force(case: Architecture) -> Truth:
    """One example and one output at a time."""
    model, (x, _) = case.build(), case.batch(EXAMPLES)
    parameters = {k: p for k, p in model.named_parameters() if p.requires_grad}
    running: list[nn.Module] = []
    handles = [m.register_forward_pre_hook(lambda module, _: running.append(module)) for m in model.modules()]
    handles += [m.register_forward_hook(lambda *_: (running.pop(), None)[1], always_call=True) for m in model.modules()]
    rows: dict[str, list[Tensor]] = {k: [] for k in parameters}
    seen = []
    for i in range(EXAMPLES):
        running.clear()
        with opened(model), Products(model, running) as mode:
            f = oracles.outputs(model, oracles.example(x, i), case.output)[0]
        torch.testing.assert_close(f, oracles.outputs(model, oracles.example(x, i), case.output)[0])  # only zeros were added
        variables = [*parameters.values(), *(p.delta for p in mode.products)]
        gradients = [oracles._gradient(f[o], variables) for o in range(len(f))]
        for j, k in enumerate(parameters):
            rows[k].append(torch.stack([g[j] for g in gradients]))
        seen.append([(p, torch.stack([g[len(parameters) + j] for g in gradients])) for j, p in enumerate(mode.products)])
    for handle in handles:
        handle.remove()
    return Truth(model, {k: torch.stack(J) for k, J in rows.items()}, seen)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, and the weights that modules compute from theirs."""
    computed = {f"{k}.weight": m.weight for k, m in model.named_modules() if hasattr(m, "parametrizations")}
    return {k: w.detach() for k, w in {**dict(model.named_parameters(remove_duplicate=False)), **computed}.items()}


def correlations(truth: Truth, W: Tensor, W0: Tensor, name: str, parameter: str, index: Tensor) -> dict[str, float] | None:
    """The feature correlations of the map whose matrix has these entries of the parameter; None where no product has them."""
    index = index.reshape(-1, *index.shape[-2:])
    modules = dict(truth.model.named_modules())
    owner = modules.get(name) or modules.get(name.rpartition(".")[0])
    for strict in (True, False):  # its own products; if it has none, those that others make with its weight
        uses = [[(rows, g) for p, g in products if p.parameter == parameter and (not strict or owner in p.modules[-1:])
                 and (rows := _rows(p.index, index)) is not None] for products in truth.products]
        if any(uses):
            break
    else:
        return None
    positions = max(sum(g.shape[1] for _, g in mine) for mine in uses)
    asked = [g[..., rows].flatten(0, 1) for mine in uses for rows, g in mine]
    K = sum(g.T @ g for g in asked) / (len(uses) * positions)
    now, then = (torch.block_diag(*weight.flatten()[index]) for weight in (W, W0))
    dW = now - then
    F_W, F_dW, G, G_c = now.T @ now, dW.T @ dW, now.T @ K @ now, dW.T @ K @ dW
    return {"nfc": oracles.cosine(F_W, G), "cnfc": oracles.cosine(F_dW, G_c),
            "c_uc_ratio": oracles._ratio(torch.trace(F_dW @ G_c), torch.trace(F_W @ G)),
            "weight_change": oracles._ratio(dW.norm(), now.norm())}


def _rows(product: Tensor, index: Tensor) -> Tensor | None:
    """Which outputs of a product are the rows of a map; the order of what a row reads changes no correlation."""
    if product.shape[0] != index.shape[0] or product.shape[2] != index.shape[2]:
        return None
    places = {tuple(row): o for o, row in enumerate(product.flatten(0, 1).sort(-1).values.tolist())}
    rows = [places.get(tuple(row)) for row in index.flatten(0, 1).sort(-1).values.tolist()]
    return None if None in rows else torch.tensor(rows)


def tangents(truth: Truth, Y: Tensor) -> dict[tuple[str, str], float]:
    """The tangent measures of every module and of the whole model, from Jacobians."""
    kernels: dict[str, Tensor] = {}
    for name, module in truth.model.named_modules():
        own = [f"{name}.{p}" if name else p for p, _ in module.named_parameters(recurse=False)]
        if own := [p for p in own if p in truth.jacobian]:
            kernels[name] = torch.stack([oracles._inner(truth.jacobian[p], truth.jacobian[p]) for p in own]).sum(0)
    kernels[WHOLE] = torch.stack(list(kernels.values())).sum(0)
    return {(m, layer): float(getattr(oracles, m)(K, *(() if m == "tangent_stable_rank" else (Y,))))
            for layer, K in kernels.items() for m in TANGENT}


# ----------------------------------------------------------------------------------------------------------- assessment


@dataclass
class Assessment:
    """Of one architecture: what kinds of rows each measure has, what is wrong, and which weight matrices have correlations."""

    case: Architecture
    model: str  # its class
    matrices: list[str]  # trainable parameters with at least two axes longer than one
    error: str = ""  # with which the whole model was refused
    rows: dict[str, Counter[str]] = field(default_factory=dict)  # measure -> kind -> how many; kinds are marks, wrong, unchecked
    wrong: list[str] = field(default_factory=list)
    misplaced: list[str] = field(default_factory=list)  # maps named q, k or v that are other rows of their matrix
    unchecked: list[str] = field(default_factory=list)  # maps that brute force does not see
    missing: dict[str, str] = field(default_factory=dict)  # weight matrix without correlations -> why
    remarks: dict[str, str] = field(default_factory=dict)  # measure -> why a row of it has no number

    @property
    def failure(self) -> str:
        """Of the whole model: refused, as it should be, or failed."""
        return "" if not self.error else "refused" if re.search(self.case.refused or "$^", self.error) else "failed"

    @property
    def covered(self) -> int:
        """Weight matrices with feature correlations."""
        return len(self.matrices) - len(self.missing)


def assess(case: Architecture) -> Assessment:
    """Measure with the default set and compare every row with brute force."""
    model, (x, y) = case.build(), case.batch(EXAMPLES)
    result = Assessment(case, type(model).__name__, [
        k for k, p in model.named_parameters() if p.requires_grad and sum(d > 1 for d in p.shape) >= 2])
    initial = zoo.initial(case)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what cannot be measured is in the notes
            snap = richter.measure(model, richter.Probe(x, y), ASSESSED, initial=initial, output=case.output)
    except Exception as error:
        result.error = f"{type(error).__name__}: {error}"
        result.missing = dict.fromkeys(result.matrices, "the whole model is refused")
        return result
    truth = brute_force(case)
    f = zoo.call(model, x) if case.output is None else case.output(zoo.call(model, x))
    Y = richter.Probe(x, y).targets(f.shape)[0]
    assert Y is not None
    expected = tangents(truth, Y) | _of_maps(case, truth, initial, snap, result)
    for row in snap.rows:
        kind = _kind(row, expected.get((row.measure, row.layer)), case.tolerance)
        if row.layer in result.misplaced and row.measure in CORRELATIONS:
            kind = "misplaced"
        result.rows.setdefault(row.measure, Counter())[kind] += 1
        if kind == "wrong":
            value = expected[row.measure, row.layer]
            result.wrong.append(f"{row.measure} of {row.layer}: {row.value:.9g} instead of {value:.9g}")
        elif math.isnan(row.value):
            result.remarks.setdefault(row.measure, row.note)
    rows = {(r.measure, r.layer) for r in snap.rows}
    result.wrong += [f"{measure} of {layer}: no row" for measure, layer in expected if (measure, layer) not in rows]
    return result


def _of_maps(case: Architecture, truth: Truth, initial: dict[str, Tensor], snap: richter.Snapshot,
             result: Assessment) -> dict[tuple[str, str], float]:
    """Correlations by brute force of every map that has some; what has none is noted in the result."""
    maps = survey(truth.model, case.batch(EXAMPLES)[0], state_of(truth.model), case.output).maps
    before = case.build()
    before.load_state_dict(initial)
    now, then = weights(truth.model), weights(before)
    expected: dict[tuple[str, str], float] = {}
    covered: set[str] = set()
    for name in dict.fromkeys(r.layer for r in snap.rows if r.measure == "nfc"):
        m = maps[name]
        parameter, index = m.weight or f"{m.module}.weight", m.index.reshape(m.shape)
        if m.kind == "dense" and (sentence := case.misplaced(name, index, now[parameter].numel())):
            result.wrong.append(sentence)
            result.misplaced.append(name)
        if math.isfinite(snap.value("nfc", name)):
            covered |= {parameter, *(k for k in result.matrices if k.startswith(f"{m.module}.parametrizations."))}
        values = correlations(truth, now[parameter], then[parameter], name, parameter, index)
        if values is None:
            result.unchecked.append(name)
        else:
            expected |= {(measure, name): v for measure, v in values.items()}
    for k in result.matrices:
        if k not in covered:
            notes = [note for n, note in snap.notes.items() if n in (k, k.rpartition(".")[0]) or n.startswith(f"{k}.")]
            notes += [r.note for r in snap.rows if r.measure == "nfc" and k in (r.layer, f"{r.layer}.weight")]
            result.missing[k] = next(filter(None, notes), "neither number nor note")
    return expected


def _kind(row: richter.core.Row, value: float | None, tolerance: float) -> str:
    """Estimated, undefined with a note, ..., or what brute force says of the number."""
    if row.mark in (Mark.ESTIMATED, Mark.BOUND) or (math.isnan(row.value) and row.note):
        return row.mark.value
    if value is None:
        return "unchecked"
    same = math.isnan(row.value) if math.isnan(value) else math.isclose(row.value, value, rel_tol=tolerance, abs_tol=1e-12)
    return "exact" if same else "wrong"
