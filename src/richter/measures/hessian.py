"""Second-order operator H_w = sum_i w_i d^2 f_i / dtheta^2: the part of the loss's Hessian that comes from the curvature of the
network, for any weights w "n k" of the outputs (default dL/df). H_w is never formed: a product is a gradient of a gradient.

    H = curvature.hessian(model, probe)         # w = dL/df of the probe's loss
    H(v)                                        # one product, in float64
    pairs = H.top(20)                           # values, vectors "k p", and the number of products
    H.energy(pairs.vectors)                     # {layer: share of each vector in this layer}
    H.moments()                                 # {layer: tr(M_l H^p), p = 2, 3, 4, with errors}

The operator belongs to the weights at its creation; it raises an error after they change.  [signal, App. B.4, D]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from richter import linalg
from richter.core import SelectionError, parse_bytes
from richter.core.values import progress
from richter.instrument.capture import Output, differentiable_twice, quiet, same_bits, unwrap
from richter.instrument.probe import Probe
from richter.instrument.statistics.fisher import NO_CLASSES, ONE_CLASS, fisher_times, no_classes
from richter.instrument.statistics.frame import NO_LABELS
from richter.instrument.statistics.operators import HIDDEN, ParameterVectors
from richter.instrument.stream import check_weights, chunks, fitting
from richter.instrument.subject import Subject
from richter.linalg import Eigenpairs

DENSE = 2000  # number of parameters up to which traces are exact
VECTORS = 32  # random vectors for estimates of traces
GRAPH = 6  # copies of an example's graph: the graph, that of its gradient, and intermediate results of a product


class TraceMoment(NamedTuple):
    """A trace, and the standard error of its estimate (0 if exact)."""

    value: float
    error: float


@dataclass(frozen=True, eq=False)
class Hessian(ParameterVectors):
    """H_w of a network on a probe; made by ``hessian``. Vectors range over all trainable parameters, in their order."""

    w: Float[Tensor, "n k"]  # weights of the outputs
    made_at: tuple[Tensor, ...]  # copies of the parameters, because a change through .data does not increase the version
    held: list[Any] = field(default_factory=list)  # graphs of gradients, held during many products

    # ------------------------------------------------------------------------------------------------------ parameters

    @property
    def theta(self) -> Float[Tensor, " p"]:
        """Flat vector of the parameters."""
        return self.flat(self.places)

    @cached_property
    def layers(self) -> dict[str, Tensor]:
        """Map each module to the entries of a vector that belong to it, in the order of the parameters."""
        owners, ends = [name.rpartition(".")[0] for name in self.names], np.cumsum([p.numel() for p in self.places])
        entries = [torch.arange(end - p.numel(), end) for end, p in zip(ends.tolist(), self.places, strict=True)]
        return {k: torch.cat([part for part, owner in zip(entries, owners, strict=True) if owner == k]).to(self.subject.home)
                for k in dict.fromkeys(owners)}

    # -------------------------------------------------------------------------------------------------------- products

    def __call__(self, v: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        """H_w v."""
        vectors = self._vectors(v)
        with self._measured():
            return self._sum(torch.autograd.grad(along, self.places, retain_graph=bool(self.held), allow_unused=True)
                             for gradient in self._gradients()
                             if (along := _inner(gradient, vectors)) is not None)

    matvec = __call__

    def features(self, v: Float[Tensor, "n k"]) -> Float[Tensor, " p"]:
        """Product Psi v = sum_i v_i df_i/dtheta with the gradients of all outputs."""
        v = _weights(v, self.w.shape)
        with self._measured():
            return self._sum(torch.autograd.grad(f, self.places, v[rows].to(f), allow_unused=True) for f, rows in self._outputs())

    @cached_property
    def gradient(self) -> Float[Tensor, " p"]:
        """Return Psi w, the gradient of the loss if w = dL/df."""
        return self.features(self.w)

    def weighted(self, v: Float[Tensor, "n k"]) -> Hessian:
        """Return the operator with other weights of the outputs: H_v."""
        return replace(self, w=_weights(v, self.w.shape), held=[])

    def fisher(self, v: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        """Multiply by the Fisher matrix of cross-entropy, the sum over the probe's examples of J^T (diag(p) - p p^T) J. Outputs
        that do not count (tokens or examples without a label) are left out."""
        classes, counted = self.subject.survey.shape[-1], self.subject.targets.counted
        if classes < 2:
            raise SelectionError(f"{ONE_CLASS}. It needs a network with an output for each class.")
        if no_classes(self.subject):
            raise SelectionError(f"{NO_CLASSES}.")
        vectors = self._vectors(v)
        with self._measured():
            return self._sum(fisher_times(f if counted is None else torch.where(counted[rows].to(f.device), f, 0.0),
                                          self.places, vectors, classes) for f, rows in self._outputs())

    @property
    def softmaxes(self) -> int:
        """Number of examples or tokens over which the mean loss is taken."""
        counted, classes = self.subject.targets.counted, self.subject.survey.shape[-1]
        return (self.w.numel() if counted is None else int(counted.sum())) // classes

    @contextmanager
    def many(self) -> Iterator[None]:
        """Compute the gradient's graph of all examples once, if memory allows it: a product is then one backward pass."""
        if self.held or self.subject.memory < GRAPH * self._each * self.subject.probe.n:
            yield
            return
        with self._measured():
            try:
                self.held.extend(self._gradients())
                yield
            finally:
                self.held.clear()

    def dense(self) -> Float[Tensor, "p p"]:
        """Hessian of a small network as a matrix."""
        if self.size > DENSE:
            raise SelectionError(f"H_w of {self.size:,} parameters is not formed, because there are more than {DENSE:,}. "
                                 f"Use its products: H(v), H.top(k), H.moments().")
        with self.many():
            columns = [self(e) for e in progress(torch.eye(self.size, dtype=torch.float64, device=self.subject.home),
                                                 title="products")]
        M = torch.stack(columns)
        return (M + M.T) / 2

    # ------------------------------------------------------------------------------------------------------- spectrum and traces

    def top(self, k: int = 20, *, tolerance: float = 1e-4, basis: int | None = None, seed: int = 0) -> Eigenpairs:
        """Compute the ``k`` eigenpairs of largest absolute value by Lanczos: |H v - lambda v| <= ``tolerance`` |lambda_1|. The
        basis has at most 2.5 k vectors by default. It, the k pairs and their products take all the memory."""
        if not (isinstance(k, int) and 1 <= k < self.size):
            raise SelectionError(f"k={k} eigenpairs of a matrix of {self.size} parameters: k must be between 1 and "
                                 f"{self.size - 1}.")
        if basis is not None and basis <= k:
            raise SelectionError(f"basis={basis} vectors for {k} eigenpairs: Lanczos needs more vectors than pairs, at best 2 k "
                                 f"or more.")
        kind = torch.float32 if self.subject.itemsize == 4 and tolerance >= 1e-4 else torch.float64
        start = torch.from_numpy(np.random.default_rng(seed).standard_normal(self.size)).to(self.subject.home, kind)
        wide = min(self.size, basis or max(20, math.ceil(2.5 * k)))

        def product(v: Tensor) -> Tensor:
            bar.update()
            return self(v.double()).to(kind)

        with self.many(), progress(title="products", total=wide + k) as bar:
            try:
                pairs = linalg.largest_eigenpairs(product, start, k, wide, tolerance)
            except ArithmeticError as why:
                raise SelectionError(f"{k} eigenpairs did not converge to a tolerance of {tolerance:.1g} of |lambda_1| ({why}): "
                                     f"give a larger basis= than {wide} vectors, or a larger tolerance=.") from why
        if not pairs.values.any():
            raise SelectionError("H_w is 0: the outputs are linear in the trainable parameters (no hidden layer, or all others "
                                 "frozen), or their weights w are 0. There are no eigenvectors to find.")
        return pairs._replace(vectors=pairs.vectors.double())

    def energy(self, vectors: Float[Tensor, "k p"]) -> dict[str, Float[Tensor, " k"]]:
        """Map each layer to the share of each vector's squared norm in it."""
        squares = vectors.square()
        return {layer: squares[:, columns].sum(1) / squares.sum(1) for layer, columns in self.layers.items()}

    def moments(self, vectors: int = VECTORS, *, exact: bool | None = None, seed: int = 0) -> dict[str, dict[int, TraceMoment]]:
        """Return {layer: {p: tr(M_l H^p)}} for p = 2, 3, 4, where M_l selects the layer's parameters. Exact up to 2,000
        parameters, otherwise estimated from random signs z: with a = H z and b = H a they are the means of |a_l|^2, <a_l, b_l>
        and |b_l|^2."""
        whole = self.size <= DENSE if exact is None else exact
        if whole:
            a = self.dense()
            b = a @ a
        else:
            if vectors < 2:
                raise SelectionError(f"vectors={vectors}: an error estimate needs at least two.")
            draw = torch.Generator().manual_seed(seed)
            Z = (torch.randint(0, 2, (vectors, self.size), generator=draw) * 2 - 1).to(self.subject.home, torch.float64)
            with self.many():
                a = torch.stack([self(z) for z in progress(Z, title="products")])
                b = torch.stack([self(z) for z in a])

        def moment(x: Tensor, y: Tensor) -> TraceMoment:
            terms = (x * y).sum(1)  # one term per unit vector, or per draw
            if whole:
                return TraceMoment(terms.sum().item(), 0.0)
            return TraceMoment(terms.mean().item(), (terms.std() / len(x) ** 0.5).item())

        parts = {layer: (a[:, columns], b[:, columns]) for layer, columns in self.layers.items()}
        return {layer: {2: moment(x, x), 3: moment(x, y), 4: moment(y, y)} for layer, (x, y) in parts.items()}

    # ------------------------------------------------------------------------------------------------------- passes over the
    # probe

    @property
    def _each(self) -> int:
        """Bytes of the graph of one example."""
        return self.subject.itemsize * self.subject.survey.graph

    def _vectors(self, v: Float[Tensor, " p"]) -> list[Tensor]:
        """A vector over all weights as one tensor per parameter."""
        v = v.reshape(-1)
        if len(v) != self.size:
            raise SelectionError(f"a vector of {len(v)} numbers: the network has {self.size} trainable parameters.")
        return [piece.to(p) for piece, p in zip(self.parts(v).values(), self.places, strict=True)]

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Restore the model afterwards, and raise an error if its weights have changed since the operator was made."""
        model = self.subject.model
        if self.held:
            yield
            return
        if not all(same_bits(p.detach(), then) for p, then in zip(model.parameters(), self.made_at, strict=True)):
            raise SelectionError("the weights have changed since this operator was made, so its labels and gradients are out of "
                                 "date: make a new one with hessian(model, probe).")
        with quiet(model), differentiable_twice():
            yield

    def _outputs(self) -> Iterator[tuple[Tensor, slice]]:
        """Yield f "n k" with its graph, some examples at a time."""
        s = self.subject
        size = fitting(s.memory, GRAPH * self._each, min(s.probe.chunk, s.probe.n), s.survey.drawn)
        for chunk in chunks(s.network, s.x, size):
            with s.state.in_place():
                yield chunk.graph.f.reshape(chunk.n, -1), chunk.rows

    def _gradients(self) -> Iterator[Sequence[Tensor | None]]:
        """Yield Psi w with its graph, some examples at a time."""
        if self.held:
            yield from self.held
            return
        for f, rows in self._outputs():
            yield torch.autograd.grad(f, self.places, self.w[rows].to(f), create_graph=True, allow_unused=True)

    def _sum(self, terms: Iterator[Sequence[Tensor | None]]) -> Float[Tensor, " p"]:
        """Sum of the terms as one vector over all weights."""
        total = torch.zeros(self.size, dtype=torch.float64, device=self.subject.home)
        for term in terms:
            total += self.flat(term)
        return total


def _inner(a: Sequence[Tensor | None], b: Sequence[Tensor]) -> Tensor | None:
    """Return <a, b> if it has a graph; None if a is constant in the parameters, so that it has no second derivative."""
    terms = [(x * y).sum() for x, y in zip(a, b, strict=True) if x is not None and x.requires_grad]
    return torch.stack(terms).sum() if terms else None


def _weights(v: Tensor, shape: torch.Size) -> Tensor:
    """Weights of the outputs in the shape of the outputs, checked."""
    if v.numel() != shape.numel():
        raise SelectionError(f"weights of shape {tuple(v.shape)} for outputs of shape {tuple(shape)}: give one weight for each "
                             f"output of each example.")
    if not torch.isfinite(v).all():
        raise SelectionError("the weights of the outputs contain NaN or Inf, so every product would too. If they are the loss's "
                             "gradient, the network has diverged.")
    return v.detach().double().reshape(shape)


def hessian(model: nn.Module, probe: Probe, weights: Float[Tensor, "n k"] | None = None, *, memory: str | float = "2GiB",
            output: Output | None = None) -> Hessian:
    """Make H_w of a model on a probe, with ``weights`` w "n k" of its outputs, or the gradient of the probe's loss in them."""
    model = unwrap(model)
    check_weights(model)
    subject = Subject(model, probe, None, None, parse_bytes(memory), output, errors=False)
    with quiet(model):
        subject.renew()
        subject.audit = None
        if subject.survey.accumulates:
            raise SelectionError(f"H_w of this model cannot be computed: {HIDDEN}.")
        if weights is None and subject.targets.objective is None:
            raise SelectionError(f"{NO_LABELS}, so there is no loss whose gradient could weight the outputs: give labels, or "
                                 f"weights= of shape [examples, outputs].")
        w = subject.loss_gradient.double() / subject.probe.n if weights is None else weights
    return Hessian(subject, _weights(w, torch.Size((probe.n, subject.survey.outputs))),
                   tuple(p.detach().clone() for p in model.parameters()))
