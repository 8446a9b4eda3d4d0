"""Are two networks alike, layer by layer? ``compare(a, b, probe)``: two models, two checkpoints of one, or one before and after.

    seen = richter.workflows.compare(model, (model, initial), probe)
    print(seen)                                # CKA of every pair of layers, and how far their leading features overlap
    seen.cka, seen.overlap, seen.frame
    seen.plot().savefig("compare.png")

Nothing is held but what is asked for: Gram matrices [n, n] of each layer, or products of features [p, q] of each pair of layers,
whichever takes less memory. Both give the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from richter.core import MemoryBudgetError, ProbeError, SelectionError, likeness, parse_bytes, show_bytes
from richter.core.modules import unwrap
from richter.core.values import progress
from richter.instrument.capture import Output
from richter.instrument.keepsakes import Layers, Reader, grams, reading
from richter.instrument.probe import Probe
from richter.instrument.stream import fitting
from richter.instrument.survey import Doubt, until_certain
from richter.linalg import leading_eigenpairs
from richter.report.comparison import Comparison, Numbers

Network = nn.Module | tuple[nn.Module, Mapping[str, Tensor]]  # a model, or one with a state_dict in the place of its weights


class _Products(NamedTuple):
    """All that a comparison is made of, of layers i of one network and j of the other, on n rows."""

    both: Numbers  # |X_i^T Y_j|^2 [i, j], of centred features
    own: tuple[Numbers, Numbers]  # |X_i^T X_i|^2 [i]
    squares: tuple[Numbers, Numbers]  # of the lengths of rows [i, n]
    cosines: list[list[Numbers]]  # between the leading eigenfunctions, [i][j] of [r, s]
    shares: tuple[list[Numbers], list[Numbers]]  # of the variance that each of these has, [i] of [r]


def compare(a: Network, b: Network, probe: Probe, layers: Layers = None, *, layers_b: Layers = None, features: int = 10,
            debiased: bool = False, memory: str | float = "2GiB", output: Output | None = None,
            names: tuple[str, str] = ("A", "B")) -> Comparison:
    """How alike the features of two networks are on the examples of a probe, for every pair of their layers.

    ``a`` and ``b`` are models, or (model, state_dict): the weights of a checkpoint in the place of the model's own, which are not
    touched. Features of a layer are what it reads; the model's outputs come last. ``layers``: names or patterns, as in
    ``richter.measure``; ``layers_b``: those of ``b``, if they have other names. ``features``: how many leading eigenfunctions of
    each layer are compared. ``debiased``: CKA by the estimate of HSIC without bias, which few examples need. ``memory`` bounds
    what is held.
    """
    if not isinstance(probe, Probe):
        raise SelectionError(f"compare(a, b, probe): probe is a {type(probe).__name__}; make one with richter.Probe(x, y), or "
                             f"richter.Probe(x, None).")
    if features < 1:
        raise SelectionError(f"features={features}: how many leading eigenfunctions are compared, at least one.")
    (one, weights_a), (other, weights_b) = _network(a, "a"), _network(b, "b")
    room = parse_bytes(memory)
    with reading(one, other):
        readers = (Reader(one, probe, weights=weights_a, layers=layers, memory=room, output=output),
                   Reader(other, probe, weights=weights_b, layers=layers if layers_b is None else layers_b, memory=room,
                          output=output))
        if readers[0].tokens != readers[1].tokens:
            raise SelectionError("the layers of one network read a vector for each token, those of the other one for each "
                                 "example, so that they have no rows in common. Compare them on a part of both: layers=..., "
                                 "layers_b=....")
        n = sum(readers[0].counts())
        least = likeness.FEWEST if debiased else 2
        if n < least:
            raise ProbeError(f"the probe has {n} examples: to compare features takes {least}"
                             f"{' for the estimate without bias' if debiased else ''}. Give more.")
        products = until_certain(lambda: _gathered(readers, n, room, features), partial(_amended, readers))
    values = likeness.cka(products.both, *products.own, *products.squares, debiased)
    notes = tuple(f"{name}, layer {k}: {why}." for name, reader in zip(names, readers, strict=True)
                  for k, why in reader.notes.items())
    cosines, (first, second) = likeness.padded(products.cosines, features), products.shares
    shares = likeness.padded_rows(first, features), likeness.padded_rows(second, features)
    return Comparison(names, (tuple(readers[0].names), tuple(readers[1].names)), values, cosines, shares, n, debiased,
                      "tokens" if readers[0].tokens else "examples", notes)


def _network(given: Any, name: str) -> tuple[nn.Module, Mapping[str, Tensor] | None]:
    model, weights = given if isinstance(given, (tuple, list)) and len(given) == 2 else (given, None)
    if not isinstance(model, nn.Module):
        raise SelectionError(f"compare(a, b, probe): {name} is a {type(given).__name__}; a model is needed, or (model, "
                             f"state_dict) for the weights of a checkpoint.")
    return unwrap(model), weights


def _amended(readers: tuple[Reader, Reader], doubt: Doubt) -> None:
    """A layer that reads something else on later examples than the first ones say is left out."""
    for reader in readers:
        if set(doubt.maps) & set(reader.subject.survey.maps):
            reader.amend(doubt)


def _gathered(readers: tuple[Reader, Reader], n: int, room: int, features: int) -> _Products:
    """By Gram matrices, or by products of features, whichever is smaller."""
    p, q = (list(reader.widths.values()) for reader in readers)
    squares = 8 * n**2 * (len(p) + len(q))
    moments = 8 * (sum(p) * sum(q) + sum(k * k for k in p) + sum(k * k for k in q) + n * (len(p) + len(q)))
    each = sum(reader.each for reader in readers)
    if min(squares, moments) + 2 * each > room:
        raise MemoryBudgetError(
            f"memory={show_bytes(room)} cannot hold what {len(p)} and {len(q)} layers are compared by on {n:,} rows: "
            f"{show_bytes(squares)} as Gram matrices, {show_bytes(moments)} as products of features. Choose fewer layers "
            f"(layers=...), give a smaller probe, or memory='{show_bytes(min(squares, moments) + 2 * each)}'.")
    if squares <= moments:
        return _by_grams(readers, room - squares, features)
    drawn = any(reader.subject.survey.drawn for reader in readers)
    return _by_moments(readers, fitting(room - moments, each, readers[0].subject.probe.chunk, drawn), features)


# ----------------------------------------------------------------------------------------------------- by Gram matrices


def _by_grams(readers: tuple[Reader, Reader], room: int, features: int) -> _Products:
    known = [_grams(reader, room, title) for reader, title in zip(readers, ("first", "second"), strict=True)]
    home = known[0].device
    flat = [K.flatten(1) for K in known]
    both = _numpy(torch.stack([flat[0] @ row.to(home) for row in flat[1]], 1))
    squares = [_numpy(K.diagonal(dim1=1, dim2=2)) for K in known]
    bar = progress([*known[0], *known[1]], title="eigenfunctions", unit="layer")
    pairs = [leading_eigenpairs(K, features) for K in bar]
    shares = [_numpy(v) / max(s.sum(), 1e-300) for (v, _), s in zip(pairs, [*squares[0], *squares[1]], strict=True)]
    cut = len(known[0])
    cosines = [[_numpy(u.T @ w.to(home)) for _, w in pairs[cut:]] for _, u in pairs[:cut]]
    own = [np.array([(row @ row).item() for row in F]) for F in flat]
    return _Products(both, (own[0], own[1]), (squares[0], squares[1]), cosines, (shares[:cut], shares[cut:]))


def _grams(reader: Reader, room: int, title: str) -> Float[Tensor, "layer n n"]:
    """Of every layer, from pairs of blocks of examples: of one block, where all have room."""
    size = fitting(room, 2 * reader.each, reader.subject.probe.n, reader.subject.survey.drawn)
    return grams(reader, size, partial(progress, title=f"features of the {title} network", unit="block"))


# ------------------------------------------------------------------------------------------------ by products of features


def _by_moments(readers: tuple[Reader, Reader], size: int, features: int) -> _Products:
    """Two passes over the examples: means, and then products of what is centred on them."""
    n, rows = readers[0].subject.probe.n, sum(readers[0].counts())
    means = []
    for reader in readers:
        sums = {k: torch.zeros(p, dtype=torch.float64, device=reader.subject.home) for k, p in reader.widths.items()}
        for _, X in progress(reader.blocks(size), title="means", total=math.ceil(n / size), unit="block"):
            for k, x in X.items():
                sums[k] += x.sum(0)
        means.append({k: s / rows for k, s in sums.items()})
    covariances: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    cross: dict[tuple[str, str], Tensor] = {}
    squares: tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]] = ({}, {})
    steps = zip(readers[0].blocks(size), readers[1].blocks(size), strict=True)
    for (_, X), (_, Y) in progress(steps, title="products of features", total=math.ceil(n / size), unit="block"):
        X, Y = ({k: x - mean[k] for k, x in F.items()} for F, mean in zip((X, Y), means, strict=True))
        for F, own, lengths in zip((X, Y), covariances, squares, strict=True):
            for k, x in F.items():
                own[k] = own.get(k, 0) + x.T @ x
                lengths.setdefault(k, []).append(x.square().sum(1))
        for i, x in X.items():
            for j, y in Y.items():
                cross[i, j] = cross.get((i, j), 0) + x.T @ y.to(x.device)
    for reader, own, mean in zip(readers, covariances, means, strict=True):
        for k, C in own.items():
            if reader.constant(spread := C.trace().item(), spread + rows * mean[k].square().sum().item()):
                C.zero_()
    return _of_moments(covariances, cross, squares, features)


def _of_moments(covariances: tuple[dict[str, Tensor], dict[str, Tensor]], cross: dict[tuple[str, str], Tensor],
                squares: tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]], features: int) -> _Products:
    """With X^T X = V S^2 V^T the eigenfunctions are X V / S, and their cosines with those of Y are (V / S)^T X^T Y (V' / S')."""
    pairs = [{k: leading_eigenpairs(C, features) for k, C in own.items()} for own in covariances]
    bases = [{k: V / v.sqrt() for k, (v, V) in mine.items()} for mine in pairs]
    shares = [[_numpy(v / own[k].diagonal().sum()) for k, (v, _) in mine.items()]
              for mine, own in zip(pairs, covariances, strict=True)]
    cosines = [[_numpy(u.T @ cross[i, j] @ w.to(u.device)) for j, w in bases[1].items()] for i, u in bases[0].items()]
    both = np.array([[cross[i, j].square().sum().item() for j in covariances[1]] for i in covariances[0]])
    own = [np.array([C.square().sum().item() for C in mine.values()]) for mine in covariances]
    lengths = [np.stack([_numpy(torch.cat(parts)) for parts in mine.values()]) for mine in squares]
    return _Products(both, (own[0], own[1]), (lengths[0], lengths[1]), cosines, (shares[0], shares[1]))


def _numpy(t: Tensor) -> Numbers:
    return np.asarray(t.detach().cpu().numpy(), np.float64)

