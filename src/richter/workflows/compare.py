"""Similarity of two networks, layer by layer. ``compare(a, b, probe)``: two models, or one model with two checkpoints.

    seen = richter.workflows.compare(model, (model, initial), probe)
    print(seen)                                # CKA of every pair of layers, and the overlap of their leading features
    seen.cka, seen.overlap, seen.frame
    seen.plot().savefig("compare.png")

Either Gram matrices [n, n] of each layer are held, or products of features [p, q] of each pair of layers, whichever takes less
memory. Both give the same numbers.
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

Network = nn.Module | tuple[nn.Module, Mapping[str, Tensor]]  # a model, or a model with a state_dict that replaces its weights


class _Products(NamedTuple):
    """Sums for a comparison of layers i of one network with layers j of the other, on n rows."""

    both: Numbers  # |X_i^T Y_j|^2 [i, j], with centred features
    own: tuple[Numbers, Numbers]  # |X_i^T X_i|^2 [i]
    squares: tuple[Numbers, Numbers]  # squared lengths of rows [i, n]
    cosines: list[list[Numbers]]  # cosines between leading eigenfunctions, [i][j] of [r, s]
    shares: tuple[list[Numbers], list[Numbers]]  # variance shares of the leading eigenfunctions, [i] of [r]


def compare(a: Network, b: Network, probe: Probe, layers: Layers = None, *, layers_b: Layers = None, features: int = 10,
            debiased: bool = False, memory: str | float = "2GiB", output: Output | None = None,
            names: tuple[str, str] = ("A", "B")) -> Comparison:
    """Compare the features of two networks on the examples of a probe, for every pair of their layers.

    ``a`` and ``b`` are models, or (model, state_dict) with the weights of a checkpoint; the model itself is not changed. The
    features of a layer are its inputs; the model's outputs come last. ``layers``: names or patterns, as in ``richter.measure``.
    ``layers_b``: those of ``b``, if they have other names. ``features``: the number of leading eigenfunctions to compare.
    ``debiased``: CKA with the unbiased estimate of HSIC, for few examples. ``memory``: limit of working memory.
    """
    if not isinstance(probe, Probe):
        raise SelectionError(f"compare(a, b, probe): probe is a {type(probe).__name__}; make one with richter.Probe(x, y), or "
                             f"richter.Probe(x, None).")
    if features < 1:
        raise SelectionError(f"features={features}: the number of leading eigenfunctions to compare must be at least 1.")
    (one, weights_a), (other, weights_b) = _network(a, "a"), _network(b, "b")
    room = parse_bytes(memory)
    with reading(one, other):
        readers = (Reader(one, probe, weights=weights_a, layers=layers, memory=room, output=output),
                   Reader(other, probe, weights=weights_b, layers=layers if layers_b is None else layers_b, memory=room,
                          output=output))
        if readers[0].tokens != readers[1].tokens:
            raise SelectionError("the layers of one network read a vector for each token, those of the other one for each "
                                 "example, so they have no rows in common. Compare only some layers of both: layers=..., "
                                 "layers_b=....")
        n = sum(readers[0].counts())
        least = likeness.FEWEST if debiased else 2
        if n < least:
            raise ProbeError(f"the probe has {n} examples: a comparison of features needs {least}"
                             f"{' with the debiased estimate' if debiased else ''}. Give more.")
        products = until_certain(lambda: _gathered(readers, n, room, features), partial(_amended, readers))
    values = likeness.cka(products.both, *products.own, *products.squares, debiased)
    notes = tuple(f"{name}, layer {k}: {why}." for name, reader in zip(names, readers, strict=True)
                  for k, why in reader.notes.items())
    cosines, (first, second) = likeness.padded(products.cosines, features), products.shares
    shares = likeness.padded_rows(first, features), likeness.padded_rows(second, features)
    return Comparison(names, (tuple(readers[0].names), tuple(readers[1].names)), values, cosines, shares, n, debiased,
                      "tokens" if readers[0].tokens else "examples", notes)


def _network(given: Any, name: str) -> tuple[nn.Module, Mapping[str, Tensor] | None]:
    """Model and weights of an argument of compare."""
    model, weights = given if isinstance(given, (tuple, list)) and len(given) == 2 else (given, None)
    if not isinstance(model, nn.Module):
        raise SelectionError(f"compare(a, b, probe): {name} is a {type(given).__name__}; a model is needed, or (model, "
                             f"state_dict) for the weights of a checkpoint.")
    return unwrap(model), weights


def _amended(readers: tuple[Reader, Reader], doubt: Doubt) -> None:
    """Drop a layer whose inputs on later examples differ in kind from those on the first examples."""
    for reader in readers:
        if set(doubt.maps) & set(reader.subject.survey.maps):
            reader.amend(doubt)


def _gathered(readers: tuple[Reader, Reader], n: int, room: int, features: int) -> _Products:
    """Collect the sums by Gram matrices, or by products of features, whichever is smaller."""
    p, q = (list(reader.widths.values()) for reader in readers)
    squares = 8 * n**2 * (len(p) + len(q))
    moments = 8 * (sum(p) * sum(q) + sum(k * k for k in p) + sum(k * k for k in q) + n * (len(p) + len(q)))
    each = sum(reader.each for reader in readers)
    if min(squares, moments) + 2 * each > room:
        raise MemoryBudgetError(
            f"memory={show_bytes(room)} is too small to compare {len(p)} and {len(q)} layers on {n:,} rows: "
            f"{show_bytes(squares)} as Gram matrices, {show_bytes(moments)} as products of features. Choose fewer layers "
            f"(layers=...), give a smaller probe, or memory='{show_bytes(min(squares, moments) + 2 * each)}'.")
    if squares <= moments:
        return _by_grams(readers, room - squares, features)
    drawn = any(reader.subject.survey.drawn for reader in readers)
    return _by_moments(readers, fitting(room - moments, each, readers[0].subject.probe.chunk, drawn), features)


# ----------------------------------------------------------------------------------------------------- by Gram matrices


def _by_grams(readers: tuple[Reader, Reader], room: int, features: int) -> _Products:
    """Inner products and leading eigenpairs from Gram matrices of examples."""
    grams_of_networks = [_grams(reader, room, title) for reader, title in zip(readers, ("first", "second"), strict=True)]
    home = grams_of_networks[0].device
    flat = [K.flatten(1) for K in grams_of_networks]
    both = _numpy(torch.stack([flat[0] @ row.to(home) for row in flat[1]], 1))
    squares = [_numpy(K.diagonal(dim1=1, dim2=2)) for K in grams_of_networks]
    bar = progress([*grams_of_networks[0], *grams_of_networks[1]], title="eigenfunctions", unit="layer")
    pairs = [leading_eigenpairs(K, features) for K in bar]
    shares = [_numpy(v) / max(s.sum(), 1e-300) for (v, _), s in zip(pairs, [*squares[0], *squares[1]], strict=True)]
    cut = len(grams_of_networks[0])
    cosines = [[_numpy(u.T @ w.to(home)) for _, w in pairs[cut:]] for _, u in pairs[:cut]]
    self_products = [np.array([(row @ row).item() for row in F]) for F in flat]
    return _Products(both, (self_products[0], self_products[1]), (squares[0], squares[1]), cosines, (shares[:cut], shares[cut:]))


def _grams(reader: Reader, room: int, title: str) -> Float[Tensor, "layer n n"]:
    """Compute Gram matrices of every layer from pairs of blocks of examples (one block if memory allows)."""
    size = fitting(room, 2 * reader.each, reader.subject.probe.n, reader.subject.survey.drawn)
    return grams(reader, size, partial(progress, title=f"features of the {title} network", unit="block"))


# ------------------------------------------------------------------------------------------------ by products of features


def _by_moments(readers: tuple[Reader, Reader], size: int, features: int) -> _Products:
    """Make two passes over the examples: one for means, one for products of centred features."""
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
        for F, covariance, lengths in zip((X, Y), covariances, squares, strict=True):
            for k, x in F.items():
                covariance[k] = covariance.get(k, 0) + x.T @ x
                lengths.setdefault(k, []).append(x.square().sum(1))
        for i, x in X.items():
            for j, y in Y.items():
                cross[i, j] = cross.get((i, j), 0) + x.T @ y.to(x.device)
    for reader, covariance, mean in zip(readers, covariances, means, strict=True):
        for k, C in covariance.items():
            if reader.constant(spread := C.trace().item(), spread + rows * mean[k].square().sum().item()):
                C.zero_()
    return _of_moments(covariances, cross, squares, features)


def _of_moments(covariances: tuple[dict[str, Tensor], dict[str, Tensor]], cross: dict[tuple[str, str], Tensor],
                squares: tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]], features: int) -> _Products:
    """Compute cosines of eigenfunctions. With X^T X = V S^2 V^T they are X V / S; their cosines with those of Y are
    (V / S)^T X^T Y (V' / S')."""
    pairs = [{k: leading_eigenpairs(C, features) for k, C in self_products.items()} for self_products in covariances]
    bases = [{k: V / v.sqrt() for k, (v, V) in network.items()} for network in pairs]
    shares = [[_numpy(v / self_products[k].diagonal().sum()) for k, (v, _) in network.items()]
              for network, self_products in zip(pairs, covariances, strict=True)]
    cosines = [[_numpy(u.T @ cross[i, j] @ w.to(u.device)) for j, w in bases[1].items()] for i, u in bases[0].items()]
    both = np.array([[cross[i, j].square().sum().item() for j in covariances[1]] for i in covariances[0]])
    self_products = [np.array([C.square().sum().item() for C in network.values()]) for network in covariances]
    lengths = [np.stack([_numpy(torch.cat(parts)) for parts in network.values()]) for network in squares]
    return _Products(both, (self_products[0], self_products[1]), (lengths[0], lengths[1]), cosines, (shares[0], shares[1]))


def _numpy(t: Tensor) -> Numbers:
    """Convert a tensor to a numpy array of float64."""
    return np.asarray(t.detach().cpu().numpy(), np.float64)

