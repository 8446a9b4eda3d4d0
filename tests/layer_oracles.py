"""The forward of layers whose products are hidden in one call of torch, written out: one example, one step, one gate and one
pixel at a time. Every product z = W h (+ b) goes through `perturb(role, W, h, z)`, which gives z back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

Perturb = Callable[[str, Tensor, Tensor, Tensor], Tensor]  # (role, W[d_out,d_in], h[s,d_in], z[s,d_out]) -> z
Result = Any
Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Written = Transposed | nn.Bilinear | nn.EmbeddingBag | nn.RNNBase | nn.RNNCellBase


@contextmanager
def written_out(module: nn.Module, role: str, uses: list[tuple[Tensor, Tensor, Tensor]]) -> Iterator[None]:
    """While open, the module computes by its formula, and every z of its map `role` has a zero tensor added to it, kept in
    `uses` with W and h."""
    def perturb(which: str, W: Tensor, h: Tensor, z: Tensor) -> Tensor:
        if which != role:
            return z
        delta = torch.zeros_like(z, requires_grad=True)
        uses.append((W.detach().clone(), h.detach().clone(), delta))
        return z + delta

    formula = next(f for kind, f in FORMULAS.items() if isinstance(module, kind))
    module.forward = lambda *args, **kwargs: formula(module, perturb, uses, *args, **kwargs)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward


def transposed(m: Transposed, perturb: Perturb, uses: list[Any], x: Tensor) -> Tensor:
    """Pixel p writes the patch W x[p] at p stride - padding + dilation offset; patches that overlap add up."""
    assert len(x) == 1
    (c_in, per_group), size, r = m.weight.shape[:2], m.kernel_size, m.groups
    width = per_group * torch.Size(size).numel()
    W = m.weight.new_zeros(r * width, c_in)
    for c in range(c_in):
        group = c // (c_in // r)
        W[group * width:(group + 1) * width, c] = m.weight[c].flatten()
    space = [(n - 1) * s - 2 * p + d * (k - 1) + o + 1 for n, s, p, d, k, o in
             zip(x.shape[2:], m.stride, m.padding, m.dilation, size, m.output_padding, strict=True)]
    h = x[0].flatten(1).T
    patches = perturb("", W, h, h @ W.T).reshape(len(h), r * per_group, *size)
    out: dict[tuple[int, ...], Tensor] = {}
    for patch, pixel in zip(patches, itertools.product(*map(range, x.shape[2:])), strict=True):
        for offset in itertools.product(*map(range, size)):
            place = tuple(i * s - p + d * k for i, s, p, d, k in zip(pixel, m.stride, m.padding, m.dilation, offset, strict=True))
            entry = patch[(slice(None), *offset)]
            out[place] = out[place] + entry if place in out else entry
    nothing = patches.new_zeros(r * per_group)
    z = torch.stack([out.get(place, nothing) for place in itertools.product(*map(range, space))], -1)
    return z.reshape(1, -1, *space) + (0 if m.bias is None else m.bias.reshape(-1, *[1] * len(space)))


def bilinear(m: nn.Bilinear, perturb: Perturb, uses: list[Any], input1: Tensor, input2: Tensor) -> Tensor:
    """z_o = sum_ij W_oij x_i y_j; the arguments are named as torch names them."""
    h = torch.stack([torch.outer(a, b).flatten() for a, b in
                     zip(input1.reshape(-1, input1.shape[-1]), input2.reshape(-1, input2.shape[-1]), strict=True)])
    W = m.weight.reshape(len(m.weight), -1)
    z = perturb("", W, h, h @ W.T + (0 if m.bias is None else m.bias))
    return z.reshape(*input1.shape[:-1], -1)


def bag(m: nn.EmbeddingBag, perturb: Perturb, uses: list[Any], ids: Tensor, offsets: None = None,
        weights: Tensor | None = None) -> Tensor:
    """The sum, mean or maximum of the rows of all tokens but padding."""
    assert len(ids) == 1
    h = m.weight.new_zeros(ids.numel(), len(m.weight))
    for s, token in enumerate(ids[0].tolist()):
        h[s, token] = float(token != m.padding_idx)
    rows = perturb("", m.weight.T, h, h @ m.weight)
    kept = [s for s, token in enumerate(ids[0].tolist()) if token != m.padding_idx]
    if not kept:
        return rows.new_zeros(1, m.embedding_dim)
    rows = torch.stack([rows[s] * (1 if weights is None else weights[0, s]) for s in kept])
    return {"sum": rows.sum(0), "mean": rows.mean(0), "max": rows.max(0).values}[m.mode][None]


# ---------------------------------------------------------------------------------------------------------- recurrent


def _products(m: nn.Module, perturb: Perturb, kind: str, h: Tensor, names: str) -> dict[str, Tensor]:
    """{gate: W h + b} of the weight `kind` ("ih_l0") for h[d]; a layer without gates has the gate "-"."""
    W, b = getattr(m, f"weight_{kind}"), getattr(m, f"bias_{kind}", None)
    parts = {}
    for i, gate in enumerate(names):
        rows = slice(i * len(W) // len(names), (i + 1) * len(W) // len(names))
        z = W[rows] @ h + (0 if b is None else b[rows])
        parts[gate] = perturb(kind if gate == "-" else f"{kind}.{gate}", W[rows], h[None], z[None])[0]
    return parts


def _step(m: nn.Module, perturb: Perturb, side: str, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """One step of one sequence: (h, c) after it."""
    gru, lstm = isinstance(m, nn.GRU | nn.GRUCell), isinstance(m, nn.LSTM | nn.LSTMCell)
    names = "rzn" if gru else "ifgo" if lstm else "-"
    a, b = (_products(m, perturb, f"{kind}{side}", t, names) for kind, t in (("ih", x), ("hh", h)))
    if gru:
        r, z = (torch.sigmoid(a[k] + b[k]) for k in "rz")
        n = torch.tanh(a["n"] + r * b["n"])
        return (1 - z) * n + z * h, c
    if not lstm:
        return (torch.relu if m.nonlinearity == "relu" else torch.tanh)(a["-"] + b["-"]), c
    i, f, o = (torch.sigmoid(a[k] + b[k]) for k in "ifo")
    c = f * c + i * torch.tanh(a["g"] + b["g"])
    h = o * torch.tanh(c)
    return (_products(m, perturb, f"hr{side}", h, "-")["-"] if hasattr(m, f"weight_hr{side}") else h), c


def cell(m: nn.RNNCellBase, perturb: Perturb, uses: list[Any], x: Tensor, state: Any = None) -> Result:
    assert len(x) == 1
    h, c = (state if isinstance(state, tuple) else (state, None))
    h, c = (x.new_zeros(m.hidden_size) if t is None else t[0] for t in (h, c))
    h, c = _step(m, perturb, "", x[0], h, c)
    return (h[None], c[None]) if isinstance(m, nn.LSTMCell) else h[None]


def layers(m: nn.RNNBase, perturb: Perturb, uses: list[Any], x: Any, state: Any = None) -> Result:
    """All layers in all directions, of one sequence after the other, in eval mode."""
    packed, batch = isinstance(x, PackedSequence), 0 if m.batch_first else 1
    if not packed and x.shape[batch] > 1:
        assert state is None
        zs, ends = zip(*(layers(m, perturb, uses, one) for one in x.split(1, batch)), strict=True)
        states = [torch.cat(parts, 1) for parts in zip(*(e if isinstance(e, tuple) else (e,) for e in ends), strict=True)]
        return torch.cat(zs, batch), (tuple(states) if isinstance(m, nn.LSTM) else states[0])
    steps = list(x.data if packed else x[0] if m.batch_first else x[:, 0])
    given = (state if isinstance(state, tuple) else (state, None))
    hs, cs, zero = [], [], steps[0].new_zeros(m.hidden_size)
    for layer in range(m.num_layers):
        outputs = []
        for side in ("", "_reverse")[: 1 + m.bidirectional]:
            k, first = len(hs), len(uses)
            h, c = (t[k, 0] if t is not None else zero for t in given)
            h = h[: getattr(m, "proj_size", 0) or None] if given[0] is None else h
            out: list[Tensor] = []
            for t in reversed(range(len(steps))) if side else range(len(steps)):
                h, c = _step(m, perturb, f"_l{layer}{side}", steps[t], h, c)
                out.append(h)
            uses[first:] = uses[first:][::-1] if side else uses[first:]  # positions are counted along the sequence
            outputs.append(out[::-1] if side else out)
            hs.append(h)
            cs.append(c)
        steps = [torch.cat(parts) for parts in zip(*outputs, strict=True)]
    z, h, c = torch.stack(steps), torch.stack(hs)[:, None], torch.stack(cs)[:, None]
    z = PackedSequence(z, x.batch_sizes) if packed else z[None] if m.batch_first else z[:, None]
    return z, ((h, c) if isinstance(m, nn.LSTM) else h)


FORMULAS: dict[Any, Callable[..., Result]] = {
    Transposed: transposed, nn.Bilinear: bilinear, nn.EmbeddingBag: bag, nn.RNNCellBase: cell, nn.RNNBase: layers,
}
