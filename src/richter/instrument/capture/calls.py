"""What a forward pass has left: calls of linear maps, and the graph behind the outputs, from which any number of backward passes
start."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from richter.core import CaptureError
from richter.core.freed import trim
from richter.instrument.capture.detours import checkpoints_called
from richter.instrument.capture.shortcuts import Asked, Parameters, ours
from richter.instrument.capture.state import State
from richter.layers import LinearMap

TOGETHER = 2 ** 27  # bytes of gradients that are held at once, where they can be had one after another


@dataclass(frozen=True)
class Call:
    """One application of a linear map: what it read, and the place in the graph that it wrote."""

    name: str
    map: LinearMap
    module: nn.Module
    weight: Tensor
    read: Tensor
    edge: GradientEdge
    shape: torch.Size  # of what it wrote
    version: int  # of `read`: an in-place change afterwards must not go unnoticed
    given: bool = False  # did a module read what depends on no weight: the model's input? (Of other uses this is not known)

    def inputs(self, rows: Tensor | None = None) -> Tensor:
        """h [b, s, d_in] as the layer saw it (b is its own first axis, not yet the examples); of some ``rows`` of b."""
        if self.read._version != self.version:
            raise CaptureError(f"layer {self.name!r}: its input was changed in place after it was read, so what it read "
                               f"is lost. Replace the in-place operation, or leave the layer out with layers=....")
        read = self.read if rows is None else self.read[rows]
        return read if self.map.kind == "diagonal" else self.map.inputs(self.module, read)

    def index(self) -> Tensor:
        """Where each entry of the matrix stands in the flattened weight."""
        return index_of(self.map, self.module, self.weight.shape, self.weight.device)


def index_of(view: LinearMap, module: nn.Module, shape: torch.Size, device: torch.device) -> Tensor:
    """Where each entry of a map's matrix stands in a flattened weight of this shape, in the shape of the matrix."""
    return view.matrix(module, torch.arange(shape.numel(), device=device).view(shape))


class Product(NamedTuple):
    """A product of tensors that depend on weights, after so many calls of linear maps."""

    after: int
    operands: tuple[Tensor, ...]


@dataclass(frozen=True)
class Pass:
    """One forward pass: outputs ``f`` with their graph, and every call of every linear map in it."""

    f: Tensor
    calls: list[Call]
    state: State
    parameters: Parameters = field(default_factory=Parameters)  # some steps give gradients of parameters only where wanted
    differentiates: bool = False  # the model itself does, inside its forward pass
    adds: set[int] = field(default_factory=set)  # ids of the weights to whose .grad the model's own backward passes have added
    transforms: bool = False  # the model differentiates, or maps over an axis, by torch.func
    called: Collection[nn.Module] = ()  # modules whose forward ran

    @property
    def aliases(self) -> dict[str, Tensor]:
        """The weights that a gradient can reach."""
        return {k: v for k, v in self.state.items() if v.requires_grad}

    def leaves(self) -> list[Tensor]:
        """All tensors from which the outputs are computed: weights, and what a model made to be differentiated."""
        return [variable for node in self._nodes() if (variable := getattr(node, "variable", None)) is not None]

    @cached_property
    def _hidden(self) -> list[Tensor]:
        """All leaves, if an autograd.Function of the model's own is among the outputs' graph: it may add to .grad in its backward
        pass, and only when all leaves are asked for, all of a backward pass runs."""
        return self.leaves() if any(isinstance(node, BackwardCFunction) and not ours(node) for node in self._nodes()) else []

    @cached_property
    def accumulates(self) -> bool:
        """Does the model add to .grad in a backward pass of its own?"""
        if self._hidden:
            self.backward(torch.ones_like(self.f), self._hidden)
        return bool(self.adds)

    def _nodes(self) -> Iterator[Any]:
        """Of the graph behind the outputs."""
        seen, todo = set(), [self.f.grad_fn]
        while todo:
            node = todo.pop()
            if node is not None and node not in seen:
                seen.add(node)
                yield node
                todo += [following for following, _ in node.next_functions]

    def backward(self, V: Tensor, also: Sequence[Tensor] = ()) -> tuple[list[Tensor], list[Tensor]]:
        """d <V, f> / dz for each call, and the same derivative in the tensors of ``also``; zero where unused.

        The aliases stand in the model meanwhile: a model's own autograd.Function may run its modules again in its backward pass,
        and what it adds to ``.grad`` there is part of the derivative."""
        self.parameters.wanted = bool(also)
        places: list[Any] = [*(c.edge for c in self.calls), *also]
        if not places:
            return [], []
        cut, end = len(self.calls), len(places)
        if also:
            places += self._hidden
        with self.state.in_place(), checkpoints_called():
            asked = Asked.apply(self.f, V.to(self.f.dtype).reshape(self.f.shape), not self.calls)
            gradients = torch.autograd.grad(asked, places, retain_graph=True, allow_unused=True)
        added = self.state.accumulated()
        self.adds.update(added)
        g = [self.f.new_zeros(c.shape) if d is None else _dense(d) for c, d in zip(self.calls, gradients[:cut], strict=True)]
        exact = [_dense(torch.zeros_like(t) if d is None else d) for t, d in zip(also, gradients[cut:end], strict=True)]
        return g, [d + added[id(t)] if id(t) in added else d for t, d in zip(also, exact, strict=True)] if added else exact

    def in_turns(self, V: Tensor, also: Sequence[Tensor]) -> Iterator[Tensor]:
        """d <V, f> in each of these tensors, one after another: of a large model in several backward passes, so that not all are
        held at once."""
        plain = replace(self, calls=[])
        some: list[Tensor] = []
        for i, t in enumerate(also):
            some.append(t)
            following = also[i + 1].numel() * also[i + 1].element_size() if i + 1 < len(also) else math.inf
            if sum(s.numel() * s.element_size() for s in some) + following > TOGETHER:
                yield from plain.backward(V, some)[1]
                trim(sum(s.numel() * s.element_size() for s in some))  # or they would lie beside the next ones
                some = []


def _dense(d: Tensor) -> Tensor:
    return d.to_dense() if d.is_sparse else d
