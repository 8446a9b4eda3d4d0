"""What is being measured: a model, its survey, its weights now and then, the probe's examples and labels, and which layers
are asked for. Everything that is known before the first statistic."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from richter.core import CaptureError, MemoryBudgetError, SelectionError, matches, show_bytes
from richter.instrument.capture import Output, State, device_of, forward, state_of, to_device
from richter.instrument.captures import RowCotangents, check_finite, select
from richter.instrument.cotangents import Cotangents, RandomOutputs, loss_gradient
from richter.instrument.objective import Objective
from richter.instrument.probe import Probe
from richter.instrument.statistics import basis, block_diagonal
from richter.instrument.survey import SURVEYED, surveyed
from richter.kernels.planning import Unit, units_of

MAP_KINDS = ("dense", "grouped", "lookup")
Layers = Sequence[str] | Callable[[str], bool] | None


class Subject:
    """A model on a probe, ready to be asked."""

    def __init__(self, model: nn.Module, probe: Probe, initial: Mapping[str, Tensor] | None, layers: Layers, memory: int,
                 output: Output | None) -> None:
        self.model, self.probe, self.layers, self.memory, self.output = model, probe, layers, memory, output
        self.device = device_of(model)
        self.home = torch.device("cpu") if self.device.type == "mps" else self.device  # where float64 exists
        self.x = probe.inputs(next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32))
        few = to_device(select(self.x, slice(0, SURVEYED)), self.device)
        copied, self.state, self.found = surveyed(model, few, output)
        self._check_labels()
        shape = torch.Size((probe.n, *self.found.shape))
        self.Y, self.counted = probe.targets(shape)
        self.objective = Objective.of(probe, shape, self.Y, self.counted)
        self.W = {k: W.double() for k, W in self.found.matrices.items()}
        self.then: State | None = None
        self.W0: dict[str, Tensor] = {}
        if initial is not None:
            self.then = state_of(model, initial, copied)
            self.W0 = self._matrices_then(few)
        self.units = units_of(model, self.found)
        self.forwards: list[tuple[int, float]] = []  # (examples, seconds) of the forward passes that were made anyway
        self.maps = self.selected([k for k, m in self.found.maps.items() if m.kind in MAP_KINDS])
        self.modules = self.selected(list(dict.fromkeys(u.module for u in self.units)))
        self._check_selection()

    @cached_property
    def bases(self) -> dict[str, Tensor | None]:
        return {k: basis(*self.pair(k)) for k in self.maps}

    @property
    def itemsize(self) -> int:
        return max(4, next((p.element_size() for p in self.model.parameters() if p.is_floating_point()), 4))

    @property
    def wanted(self) -> list[Unit]:
        """What kernels are made of: everything, or the modules that were asked for."""
        return [u for u in self.units if self.layers is None or u.module in self.modules]

    def pair(self, name: str) -> tuple[Tensor, Tensor | None]:
        """The matrix now and then, grouped ones as one block-diagonal matrix."""
        grouped = self.found.maps[name].kind == "grouped"
        W, W0 = self.W[name], self.W0.get(name)
        return (block_diagonal(W), None if W0 is None else block_diagonal(W0)) if grouped else (W, W0)

    def rowwise(self, chosen: Cotangents, block: slice = slice(None), among: Tensor | None = None,
                own: bool = False) -> RowCotangents:
        """Cotangents for some rows of the probe (or of those ``among`` it), zero at outputs that do not count. Random
        ones are the same for all examples, or each example's ``own``."""
        def V(f: Tensor, rows: slice) -> Tensor:
            mine = rows if among is None else among[rows]
            if chosen is loss_gradient:
                found = self.loss_gradient[None, mine if isinstance(mine, slice) else mine.to(f.device)].to(f)[block]
            elif own and isinstance(chosen, RandomOutputs):
                found = chosen.own(f, range(self.probe.n)[mine] if isinstance(mine, slice) else mine.tolist(), block)
            else:
                found = chosen(f, None if self.Y is None else self.Y[mine].to(f.device))[block]
            return found if self.counted is None else found * self.counted[mine].to(found)
        return V

    @cached_property
    def loss_gradient(self) -> Tensor:
        """n dL/df "n k" of the probe's loss, by a forward pass of all examples."""
        if self.objective is None:
            raise SelectionError("loss_gradient needs a probe with labels, or a loss that needs none: Probe(x, y, loss=...).")
        n, each = self.probe.n, max(1, self.itemsize * self.found.graph)
        chunk = 1 if self.found.drawn else max(1, min(self.probe.chunk, self.memory // each))
        found = []
        for i in range(0, n, chunk):
            x = to_device(select(self.x, slice(i, min(i + chunk, n))), self.device)
            found.append(forward(self.model, x, self.state, output=self.output, record=False, seed=i).f.detach())
            check_finite(found[-1])
        return self.objective.gradient(torch.cat(found))

    @contextlib.contextmanager
    def timed(self, examples: int) -> Iterator[None]:
        """Around a forward pass: the unit in which the cost of a measurement is told."""
        self._wait()
        begun = time.perf_counter()
        yield
        self._wait()
        self.forwards.append((examples, time.perf_counter() - begun))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def pass_seconds(self) -> float:
        """What a forward-backward pass of the probe takes: three times its forward pass; NaN if none was made."""
        examples = sum(n for n, _ in self.forwards)
        return 3 * self.probe.n * sum(t for _, t in self.forwards) / examples if examples else math.nan

    def number(self, chosen: Cotangents) -> int:
        """How many cotangents there are for each example."""
        if chosen is loss_gradient:
            return 1
        return len(chosen(torch.zeros(1, self.found.outputs), None if self.Y is None else self.Y[:1]))

    # ------------------------------------------------------------------------------------------------------- checks

    def _check_labels(self) -> None:
        """Labels of every output, and random combinations of them, are whole arrays: a vocabulary times a text is not small."""
        n, k = self.probe.n, self.found.outputs
        need = 8 * k * n if self.probe.y is not None else 0
        if need > max(self.memory, 2 ** 26):  # smaller arrays are not what a bound is about
            raise MemoryBudgetError(
                f"memory={show_bytes(self.memory)} cannot hold the labels of {k:,} outputs for {n} examples. The smallest that "
                f"works here is above memory='{show_bytes(need)}'; pick fewer outputs, e.g. those of the last token: "
                f"output=lambda out: out.logits[:, -1].")

    def _matrices_then(self, few: Any) -> dict[str, Tensor]:
        assert self.then is not None
        seen = forward(self.model, few, self.then, output=self.output)
        if not torch.isfinite(seen.f).all():
            raise CaptureError("the network with the initial= weights gives NaN or Inf on the probe, so nothing can be centred "
                               "on it. Is this the state at initialisation?")
        return {c.name: c.map.matrix(c.module, c.weight.detach()).double() for c in seen.calls}

    def selected(self, names: list[str]) -> list[str]:
        if self.layers is None:
            return names
        if callable(self.layers):
            return [k for k in names if self.layers(k)]
        return [k for k in names if any(matches(k, pattern) for pattern in self.layers)]

    def _check_selection(self) -> None:
        known = list(dict.fromkeys([*self.found.maps, *self.modules]))
        if not self.found.maps and not self.modules:
            raise SelectionError("no weight layer was found: the model has no parameter that a linear map, a norm or a plain "
                                 "operation of its forward pass uses. Is it an empty container, or are its weights buffers?")
        if self.layers is None or callable(self.layers) or not len(self.layers):
            if not self.maps and not self.modules:
                raise SelectionError(f"layers= selects none of: {', '.join(known)}.")
            return
        for pattern in self.layers:
            idle = {k for k, why in self.found.notes.items() if not why.startswith("layer ")}
            if any(matches(k, pattern) and k not in idle for k in [*self.maps, *self.modules]):
                continue
            for name, why in self.found.notes.items():
                if matches(name, pattern):
                    raise CaptureError(f"layer {name!r} cannot be measured: {why}.")
            raise SelectionError(f"layers={pattern!r} matches nothing. This model has: {', '.join(known)}. "
                                 f"Patterns like 'h.*.attn.*' work too.")
