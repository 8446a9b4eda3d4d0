"""Which outputs of a fused projection are queries, keys and values? A name only says where to look. What the model does with the
outputs decides: attention multiplies queries with keys, and what comes of it with values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from richter.instrument.capture import Call, Product, State
from richter.instrument.survey.layouts import Bench
from richter.layers.linear import is_fused

Channels = Bool[Tensor, "d_out"]
Split = dict[str, Tensor]  # "q", "k", "v" -> which outputs


def splits(bench: Bench) -> dict[str, Split]:
    """For each module that is named like a fused projection and acts as one in all of its calls: its parts. Any other is one
    map."""
    candidates = {name for name, module in bench.model.named_modules() if is_fused(name, module)}
    if not candidates:
        return {}
    products: list[Product] = []
    run = bench.run(products=products)
    parts: dict[str, list[Split | None]] = {}
    for i, call in enumerate(run.calls):
        if call.name in candidates:
            parts.setdefault(call.name, []).append(_parts(call, [p.operands for p in products if p.after > i], run.state))
    return {name: first for name, (first, *others) in parts.items()
            if first is not None and all(_same(first, other) for other in others)}


def _parts(call: Call, products: Sequence[tuple[Tensor, ...]], state: State) -> Split | None:
    """What the first products whose factors all depend on the outputs of ``call`` make of them: q k^T and then (...) v, or
    k^T v and then q (...), or all of it at once. None if they are something else."""
    pair: tuple[Channels, Channels] | None = None
    for operands in products:
        reached = [_reached(t, call, state) for t in operands]
        if not reached or not all(c.any() for c in reached):
            continue  # a constant, or another projection, is a factor
        if len(reached) == 3:
            return _disjoint(*reached)
        if len(reached) != 2:
            return None
        a, b = reached
        if pair is None:
            if (a & b).any():
                return None
            pair = (a, b)
            continue
        both = pair[0] | pair[1]
        if torch.equal(a, both):
            return _disjoint(*pair, b)
        return _disjoint(a, *pair) if torch.equal(b, both) else None
    return None


def _reached(t: Tensor, call: Call, state: State) -> Channels:
    """The outputs of ``call`` on which ``t`` depends: of others, the derivative is zero to the last bit."""
    nothing = torch.zeros(call.shape[-1], dtype=torch.bool)
    if not t.requires_grad:
        return nothing
    weights = torch.randn(t.shape, generator=torch.Generator().manual_seed(0)).to(t.device, t.dtype)
    with state.in_place():  # a backward pass may run modules again
        (g,) = torch.autograd.grad(t, [call.edge], grad_outputs=weights, retain_graph=True, allow_unused=True)
    state.accumulated()  # is let go
    return nothing if g is None else (g.reshape(-1, g.shape[-1]) != 0).any(0).cpu()


def _disjoint(q: Channels, k: Channels, v: Channels) -> Split | None:
    """The parts, if every output is in one of them."""
    if not bool((q.int() + k.int() + v.int() == 1).all()):
        return None
    return {name: part.nonzero()[:, 0] for name, part in zip("qkv", (q, k, v), strict=True)}


def _same(split: Split, other: Split | None) -> bool:
    return other is not None and all(torch.equal(split[name], other[name]) for name in split)
