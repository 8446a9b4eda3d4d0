"""The subject of a measurement: a model, its survey, its weights now and then, the probe's examples and labels, and which layers
are asked for. Everything that is known before the first statistic."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from richter.core import WHOLE, CaptureError, Mark, Remark, SelectionError, matches
from richter.core.arrays import fingerprint
from richter.core.values import MOVED_BUFFERS, SMALL, few_of, give_back
from richter.instrument.capture import (
    BACKUP_BYTES,
    Output,
    State,
    device_of,
    outputs_of,
    same_bits,
    state_of,
    to_device,
    understood,
    weight_bytes,
)
from richter.instrument.cotangents import Cotangents, Use
from richter.instrument.probe import Objective, Probe, aligned
from richter.instrument.stream import RowCotangents, check_labels, chunks, fitting, select
from richter.instrument.survey import FEWEST, SURVEYED, UNTRUSTED, Audit, Doubt, Forwards, Network, SurveyMemo, settings, surveyed
from richter.instrument.tokens import Positions, positions_of
from richter.kernels.contract import Unit, units_of

ARRAYS = 12  # of outputs that a survey holds
GROUPS = 8  # of examples, for the jackknife
KEPT = 2 ** 22  # entries of all matrices that are kept in double precision
MAP_KINDS = ("dense", "grouped", "lookup")
Layers = Sequence[str] | Callable[[str], bool] | None


class Subject:
    """A model on a probe, ready to be asked after ``renew``."""

    def __init__(self, model: nn.Module, probe: Probe, initial: Mapping[str, Tensor] | None, layers: Layers, memory: int,
                 output: Output | None, errors: bool = True) -> None:
        self.model, self.probe, self.initial, self.layers = model, probe, initial, layers
        self.allowed, self.output, self.errors = memory, output, errors
        self.frugal = False  # are sums kept as what they are made of, where that takes less room?
        self.wide = False  # its products leave the range of single precision: they are computed in double
        self._read_model()
        self.memo = SurveyMemo()
        self._known: Any = None  # what a plan rests on besides the architecture
        self.start: Start | None = None  # the initial network, if it is known
        self.targets = Targets(0)
        self.masks = Masks()
        self.measured = 0  # how often
        self.audit: Audit | None = None  # what is looked at again in this measurement
        self.origin: tuple[str, ...] = ()  # of which network, on which examples: what is kept is kept for each
        self.kept: dict[Any, Any] = {}  # statistics of the initial network, gathered once
        self.gradients: set[str] = set()  # maps and modules whose small gradients were no rounding errors
        self.shared: dict[Any, Any] = {}  # what statistics compute once in a measurement, by its owner
        self.previous: dict[str, Any] = {}  # by statistic, cotangents and place: values at the last recorded snapshot
        self.carried: dict[str, Any] = {}  # and those of now, for the next one
        self.step: int | None = None  # of training, at which it is measured
        self.forwards = Forwards()  # that were made anyway

    @property
    def fixed(self) -> int:
        """Bytes that any measurement of a large model takes: copies of weights and gradients, by which one sees
        that nothing was disturbed, and arrays of the probe."""
        arrays = (self.targets.counted, self.targets.Y, None if self.start is None else self.start.f)
        held = [t for t in arrays if t is not None]
        need = self._copied_bytes + sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())
        return need if need > SMALL else 0

    @property
    def memory(self) -> int:
        """Bytes of memory= that are left for statistics."""
        return max(0, self.allowed - self.fixed)

    def renew(self, look: bool = False) -> bool:
        """The model as it is now. Is anything but its numbers other than the last time? A survey of a plain model is taken as it
        was, because what is captured is audited, and only one in UNTRUSTED times, or if one is to ``look``, looked at by
        itself."""
        self._forget("loss_gradient")  # computed once
        self.forwards, self.carried, self.shared = Forwards(), {}, {}
        self.measured += 1
        self.audit = Audit()
        self._read_model()
        self.few = self._first_inputs()
        before, self._known = self._known, None  # until all is well
        self.copied, self.state, self.survey = surveyed(self.model, self.few, self.output, self.memo,
                                                           look or self.measured % UNTRUSTED == 1, self.allowed)
        self.few = select(self.few, slice(0, self.survey.examples))
        self._read_matrices()
        known = (self.memo.surveys, {k: m.live for k, m in self.survey.maps.items()})
        if known == before:
            self._known = known
            return False
        self._prepare()
        self._known = known
        return True

    def amend(self, doubt: Doubt) -> None:
        """Do without captures that do not agree with single examples."""
        self._known = None
        self.survey = self.memo.amend(self.network, doubt)
        self._begin_again()
        self._prepare()
        self._known = (self.memo.surveys, {k: m.live for k, m in self.survey.maps.items()})

    def lighten(self) -> bool:
        """From now on, blocks are computed again for every backward pass. False: there are none, or it is so already."""
        before, self.survey = self.survey, self.memo.lightened(self.survey)
        return self.survey.anew != before.anew

    def widen(self) -> None:
        """From now on in double precision: products of what it reads and asks have left the range of single precision."""
        self.wide = True
        self.kept.clear()
        self._begin_again()

    def _begin_again(self) -> None:
        """A measurement that was given up has left nothing behind."""
        self.audit = Audit()
        self.forwards, self.carried, self.shared = Forwards(), {}, {}
        self._forget("loss_gradient")
        self._read_matrices()

    def _read_matrices(self) -> None:
        """Read the weights of all maps now and at initialisation."""
        before, self.start = self.start, None
        if self.initial is not None:
            self.start = Start.of(self.network, self.initial, self.copied, self.few)
            if before is None or not self.start.is_like(before):
                self.kept.clear()
        then = {} if self.start is None else self.start.matrices
        double, grouped = self.errors or self.wide, {k for k, m in self.survey.maps.items() if m.kind == "grouped"}
        self.matrices = Matrices(Widened(self.survey.matrices, double), Widened(then, double), grouped)

    def _prepare(self) -> None:
        """Prepare what depends on the architecture alone."""
        self.kept.clear()
        self._read_probe()
        self.units = units_of(self.model, self.survey)
        self.maps = self.selected([k for k, m in self.survey.maps.items() if m.kind in MAP_KINDS])
        self.modules = self.selected(list(dict.fromkeys(u.module for u in self.units)))
        self._read_mask()
        check_selection(self)
        give_back(weight_bytes(self.model))

    @property
    def groups(self) -> int:
        """Number of groups of examples for the jackknife; 1 where no errors are asked for."""
        return min(GROUPS, self.probe.n) if self.errors else 1

    def initially(self) -> Subject:
        """Return the subject with the initial weights."""
        assert self.start is not None
        other = self._changed("initial")
        other.state, other.matrices = self.start.state, replace(self.matrices, W=self.matrices.W0)
        return other

    def on_held_out(self) -> Subject:
        """Return the same network on the held-out examples of the probe."""
        assert self.probe.held_out is not None
        other = self._changed("held_out")
        other.probe = self.probe.held_out
        other.audit = self.audit and self.audit.part("held_out")
        other._read_probe()
        other._read_mask()
        return other

    def let_go(self) -> None:
        """Release what was computed once, because a stage of a measurement is over."""
        self.shared = {}
        give_back(weight_bytes(self.model))

    def narrowed(self, maps: Sequence[str]) -> Subject:
        """Return the subject with some of its maps, for a pass of their own; it keeps its sums in little room."""
        other = self._changed()
        other.maps, other.frugal = list(maps), True
        return other

    def _changed(self, *how: str) -> Subject:
        """Copy of the subject that forgets what it has computed."""
        other = copy.copy(self)
        other.origin = (*self.origin, *how)
        other._forget("loss_gradient", "kernel_rows")  # what is computed once of what changes
        other.shared = {}
        return other

    @property
    def remarks(self) -> dict[str, str]:
        """Remarks on the probe in this model, by layer; of masked positions, if somebody has asked for them."""
        return self.masks.notes | ({WHOLE: self.targets.note} if self.targets.note else {})

    def _forget(self, *names: str) -> None:
        """Forget cached values, so that they are computed again."""
        for name in names:
            self.__dict__.pop(name, None)

    @property
    def network(self) -> Network:
        """Network with its current weights."""
        return Network(self.model, self.state, self.survey, self.output, self.audit, self.wide, self.forwards)

    @property
    def initial_network(self) -> Network:
        """The network at initialisation."""
        assert self.start is not None
        return replace(self.network, state=self.start.state)

    @property
    def single(self) -> bool:
        """Are products computed in single precision, though there is double?"""
        return self.network.dtype == torch.float32 and self.home == self.device

    @property
    def itemsize(self) -> int:
        """Bytes per number in which the model is measured."""
        return 8 if self.wide else max(4, next((p.element_size() for p in self.model.parameters() if p.is_floating_point()), 4))

    @cached_property
    def kernel_rows(self) -> Tensor:
        """The numbers of the examples that enter kernels."""
        return self.probe.kernel_rows()

    @property
    def wanted(self) -> list[Unit]:
        """Units of the kernels: all of them, or those of the modules that were asked for."""
        return [u for u in self.units if self.layers is None or u.module in self.modules]

    def places(self, kind: str) -> list[str]:
        """Places of rows: linear maps, these or modules with parameters and the whole model, or the whole model alone."""
        if kind == "map":
            return self.maps
        parts = self.maps if kind == "read" else list(dict.fromkeys(u.module for u in self.wanted)) if kind == "module" else []
        return [*parts, *([WHOLE] if kind == "model" or (parts and self.layers is None) else [])]

    @cached_property
    def loss_gradient(self) -> Tensor:
        """n dL/df "n k" of the probe's loss, by a forward pass of all examples."""
        if self.targets.objective is None:
            raise SelectionError("loss_gradient needs a probe with labels, or a loss that needs none: Probe(x, y, loss=...).")
        return self.targets.objective.gradient(self.outputs(self.x))

    def outputs(self, x: Any) -> Tensor:
        """f "n ..." of these examples, without a graph."""
        size = fitting(self.memory, self.itemsize * self.survey.graph, self.probe.chunk, self.survey.drawn)
        return torch.cat([chunk.outputs for chunk in chunks(self.network, x, size)])

    @property
    def pass_seconds(self) -> float:
        """Seconds of a forward-backward pass of the probe: three times its forward pass; NaN if none was made."""
        return 3 * self.probe.n * self.forwards.seconds / self.forwards.examples if self.forwards.examples else math.nan

    def _read_model(self) -> None:
        """Find the device of the model, and the bytes of the copies by which one sees that nothing was disturbed."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        sizes = weight_bytes(self.model), sum(g.numel() * g.element_size() for g in grads)
        self._copied_bytes = sum(size for size in sizes if size <= BACKUP_BYTES)
        self.device = device_of(self.model)
        self.home = torch.device("cpu") if self.device.type == "mps" else self.device  # where float64 exists

    def _inputs(self) -> Any:
        """Inputs of the probe in the model's precision."""
        return self.probe.inputs(next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32))

    def _first_inputs(self) -> Any:
        """Inputs of the few examples on which a model is surveyed."""
        return to_device(select(self._inputs(), slice(0, self._surveyed)), self.device)

    @cached_property
    def _surveyed(self) -> int:
        """How many they are: fewer of a large model with many outputs, of which a survey holds a dozen arrays."""
        if weight_bytes(self.model) <= SMALL:
            return SURVEYED
        outputs = outputs_of(self.model, to_device(select(self._inputs(), slice(0, 2)), self.device), self.output)[0].numel()
        return int(min(SURVEYED, max(FEWEST, self.allowed // 4 // (ARRAYS * outputs * self.itemsize))))

    def _read_probe(self) -> None:
        """Inputs, and labels as the outputs have them."""
        self.x = self._inputs()
        if self.probe.y is not None:
            check_labels(self.probe.n, self.survey.outputs, self.memory, self.allowed)
        shape = torch.Size((self.probe.n, *self.survey.shape))
        self.probe, note = aligned(self.network, self._first_inputs(), self.probe, shape)
        Y, counted = self.probe.targets(shape)
        objective = Objective.of(self.probe, shape, Y, counted)
        self.targets = Targets(self.survey.outputs, Y, counted, objective, note or self.targets.note)

    def _read_mask(self) -> None:
        mask = self.probe.mask
        masked = mask is not None and not bool(mask.all())
        self.masks = Masks(mask, self.network, self.few, self.maps) if masked else Masks()

    def selected(self, names: list[str]) -> list[str]:
        """Names that the user's choice of layers selects."""
        if self.layers is None:
            return names
        if callable(self.layers):
            return [k for k in names if self.layers(k)]
        return [k for k in names if any(matches(k, pattern) for pattern in self.layers)]


# ------------------------------------------------------------------------------------------------- parts of a subject


class Widened(Mapping[str, Tensor]):
    """Matrices in the precision in which they are computed with: of small ones all are kept, of large ones none, because they
    would be several times the model."""

    def __init__(self, plain: Mapping[str, Tensor], double: bool) -> None:
        self.plain, self.double = plain, double
        self.kept: dict[str, Tensor] | None = {} if sum(W.numel() for W in plain.values()) <= KEPT else None

    def wide(self, W: Tensor) -> Tensor:
        """Errors are differences of near numbers: they take float64."""
        return W.double() if self.double else W.to(torch.promote_types(W.dtype, torch.float32))

    def __getitem__(self, name: str) -> Tensor:
        if self.kept is None:
            return self.wide(self.plain[name])
        if name not in self.kept:
            self.kept[name] = self.wide(self.plain[name])
        return self.kept[name]

    def __contains__(self, name: object) -> bool:
        return name in self.plain

    def __iter__(self) -> Iterator[str]:
        return iter(self.plain)

    def __len__(self) -> int:
        return len(self.plain)


@dataclass(frozen=True, eq=False)
class Matrices:
    """The matrices of all maps, now and at initialisation."""

    W: Widened
    W0: Widened
    grouped: Set[str]  # maps with one matrix for each group of channels

    def pair(self, name: str, most: int | None = None) -> tuple[Tensor, Tensor | None]:
        """The matrix now and then, grouped ones as one block-diagonal matrix; those of more than ``most`` entries as they lie."""
        grouped = name in self.grouped
        if most is not None and not grouped and self.W.plain[name].numel() > most:
            return self.plain(name)
        W, W0 = self.W[name], self.W0.get(name)
        return (torch.block_diag(*W), None if W0 is None else torch.block_diag(*W0)) if grouped else (W, W0)

    def plain(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Return the matrices of ``pair`` without copying them."""
        return self.pair(name) if name in self.grouped else (self.W.plain[name], self.W0.plain.get(name))


@dataclass(frozen=True, eq=False)
class Start:
    """The initial network, with the buffers of now where they have moved and are not understood: an initial mean of 0, or a first
    guess of a singular vector, is that of no network that was ever trained."""

    network: Network
    state: State
    few: Any  # the examples of the survey
    given: State  # the initial state, with its own buffers
    drifted: list[str]  # buffers that have moved, and are not understood
    f: Tensor  # its outputs on these examples
    matrices: dict[str, Tensor]
    around: Any  # what it has besides its weights

    @classmethod
    def of(cls, network: Network, weights: Mapping[str, Tensor], copied: set[str], few: Any) -> Start:
        """``network``: the network now; ``weights``: a state_dict; ``copied``: parameters that the forward pass writes into."""
        model, known = network.model, understood(network.model)
        drifted = [k for k, b in model.named_buffers(remove_duplicate=False)
                   if k in weights and k not in known and not same_bits(b, weights[k].to(b))]
        state = state_of(model, {k: v for k, v in weights.items() if k not in drifted}, copied, network.state)
        then = replace(network, state=state)
        seen = then.run(few)
        if not torch.isfinite(seen.f).all():
            raise CaptureError("the network with the initial= weights gives NaN or Inf on the probe, so nothing can be centred "
                               "on it. Is this the state at initialisation?")
        matrices = {c.name: c.map.matrix(c.module, c.weight.detach()) for c in seen.calls}
        matrices |= {k: state[m.weight].detach().flatten()[m.index].view(m.shape) for k, m in network.survey.maps.items()
                     if k not in matrices and m.weight is not None}  # maps that the first examples do not use
        others = [b for k, b in model.named_buffers() if (k not in weights or k in drifted) and b.layout is torch.strided]
        around = settings(model), fingerprint(others) if others else ""
        given = state_of(model, weights, copied) if drifted else state
        return cls(then, state, few, given, drifted, seen.f.detach(), matrices, around)

    def is_like(self, other: Start) -> bool:
        """Is it the same network? More than weights makes one: attributes, buffers that are not saved."""
        return self.around == other.around and torch.equal(self.f, other.f)

    @cached_property
    def drift(self) -> Remark:
        """Remark on buffers that changed since initialisation, if they have an effect."""
        if not self.drifted:
            return Remark()
        f = replace(self.network, state=self.given).run(self.few, record=False).f
        if f.shape == self.f.shape and torch.equal(f, self.f):
            return Remark()
        return Remark(text=f"{MOVED_BUFFERS} ({few_of(self.drifted)}): the initial network is run with the current buffers, so "
                           "this number leaves out their change")


@dataclass(frozen=True, eq=False)
class Targets:
    """The labels of the probe as the outputs have them, and cotangents for them."""

    outputs: int
    Y: Tensor | None = None  # "n k"
    counted: Tensor | None = None  # "n k", False at outputs that do not count; None: all do
    objective: Objective | None = None
    note: str = ""  # what is to be said of token labels
    _numbers: dict[tuple[Cotangents, Use], int] = field(default_factory=dict)

    def number(self, cotangents: Cotangents, use: Use) -> int:
        """How many cotangents there are for each example."""
        if (cotangents, use) not in self._numbers:
            Y = None if self.Y is None or not cotangents.looks else self.Y[:1]
            self._numbers[cotangents, use] = cotangents.count(self.outputs, use, Y)
        return self._numbers[cotangents, use]

    def rowwise(self, cotangents: Cotangents, use: Use, block: slice = slice(None), among: Tensor | None = None) -> RowCotangents:
        """Cotangents for some rows of the probe (or of those ``among`` it), zero at outputs that do not count."""
        def V(f: Tensor, rows: slice) -> Tensor:
            mine = torch.arange(rows.start, rows.stop) if among is None else among[rows]
            Y = None if self.Y is None or not cotangents.looks else self.Y[mine].to(f.device)
            values = cotangents.rows(f, Y, mine.tolist(), block, use)
            return values if self.counted is None else values * self.counted[mine].to(values)
        return V


@dataclass(frozen=True, eq=False)
class Masks:
    """The positions of each map that count, if the probe masks some tokens; looked at when they are first asked for."""

    mask: Tensor | None = None  # "n T"; None: every token counts
    network: Network | None = None
    few: Any = None
    maps: Sequence[str] = ()

    @cached_property
    def tokens(self) -> dict[str, Positions]:
        """Tokens at the positions of each map."""
        if self.mask is None or self.network is None:
            return {}
        return positions_of(self.network, self.few, self.maps, self.mask.shape[1])

    @cached_property
    def refused(self) -> dict[str, str]:
        """Maps whose masked positions cannot be told, and why: they have no averages over positions."""
        return {k: p.refused for k, p in self.tokens.items() if p.refused}

    @property
    def notes(self) -> dict[str, str]:
        """Remarks on maps, if somebody has asked for their positions."""
        return {k: p.note for k, p in self.__dict__.get("tokens", {}).items() if p.note}

    def real(self, name: str, rows: slice, positions: int) -> Tensor | None:
        """Positions of a map that count for some rows of the probe, "n s"; None: all of them."""
        if name not in self.tokens:
            return None
        mine = self.tokens[name]
        if mine.tokens is not None and len(mine.tokens) != positions:
            self.refused[name] = (f"it has {positions} positions on some examples and {len(mine.tokens)} on the first ones, so "
                                  f"which of them are masked tokens cannot be told. Leave mask= out, or the layer.")
            return None
        assert self.mask is not None
        assert self.network is not None
        return mine.real(self.mask[rows].to(self.network.device), positions)


# -------------------------------------------------------------------------------------------------------------- checks

def check_selection(subject: Subject) -> None:
    """Raise an error if the model has no layers, or the choice of layers selects none or names unknown ones."""
    known = list(dict.fromkeys([*subject.survey.maps, *subject.modules]))
    if not subject.survey.maps and not subject.modules:
        raise SelectionError("no weight layer was found: the model has no parameter that a linear map, a norm or a plain "
                             "operation of its forward pass uses. Is it an empty container, or are its weights buffers?")
    if subject.layers is None or callable(subject.layers) or not len(subject.layers):
        if not subject.maps and not subject.modules:
            raise SelectionError(f"layers= selects none of: {', '.join(known)}.")
        return
    for pattern in subject.layers:
        idle = {k for k, remark in subject.survey.notes.items() if remark.mark is Mark.IDLE}
        if any(matches(k, pattern) and k not in idle for k in [*subject.maps, *subject.modules]):
            continue
        for name, remark in subject.survey.notes.items():
            if matches(name, pattern):
                raise CaptureError(f"layer {name!r} cannot be measured: {remark.text}.")
        raise SelectionError(f"layers={pattern!r} matches nothing. This model has: {', '.join(known)}. "
                             f"Patterns like 'h.*.attn.*' work too.")
