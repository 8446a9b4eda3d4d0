"""Whoever measures again and again has a survey made once. What it found out of the architecture holds for other weights; that
what is captured rebuilds autograd's gradients is looked at again with every new ones.
"""

from __future__ import annotations

import functools
import math
import types
import weakref
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from richter.core import Mark, ProbeError, Remark, RichterError
from richter.core.values import DEVICE_LOST, NO_MEMORY, give_back
from richter.instrument.capture import (
    OF_TORCH,
    Inputs,
    Output,
    Pass,
    State,
    copy_of,
    count,
    fingerprint,
    forward,
    raised_by_model,
    select,
    state_of,
    weight_bytes,
    written,
)
from richter.instrument.survey import examine
from richter.instrument.survey.audit import Doubt
from richter.instrument.survey.examine import (
    SURVEYED,
    Tally,
    biases,
    check_alone,
    check_sums,
    coarsest,
    describe,
    verify,
    verify_one,
)
from richter.instrument.survey.survey import Layouts, MapInfo, Network, Survey, grouped, inner, tolerance, with_siblings
from richter.layers import LinearMap, registered

# --------------------------------------------------------------------------------------------------------------- amend
# What a survey of the first examples could not know: maps that are used for other examples only, and maps that cannot be read
# for many examples at a time after all. They are read one example at a time, or, if that does not rebuild autograd's gradients
# either, refused with the reason.

IN_BATCHES = "it is used only when several examples go through the model together, so single examples say nothing of it"


@dataclass(frozen=True)
class Later:
    """A map that later examples use, and the first ones do not."""

    info: MapInfo
    map: LinearMap
    module: nn.Module
    weight: Tensor  # in the pass in which it was seen
    state: State

    def matrix(self, state: State) -> Tensor | None:
        """With these weights; None if the weight is computed, and was computed from others."""
        name = self.info.weight
        weight = state[name].detach() if name is not None else self.weight if state is self.state else None
        return None if weight is None else self.map.matrix(self.module, weight)


@dataclass
class Amendments:
    """All that was amended, to be applied to the next survey of the same model."""

    singly: set[str] = field(default_factory=set)
    later: dict[str, Later] = field(default_factory=dict)
    refused: dict[str, Remark] = field(default_factory=dict)
    biases: set[str] = field(default_factory=set)  # that are used in another way too

    def apply(self, survey: Survey, state: State) -> Survey:
        """Survey with all amendments."""
        later = {k: (m.info, W) for k, m in self.later.items() if k not in survey.maps and (W := m.matrix(state)) is not None}
        self.later = {k: m for k, m in self.later.items() if k in later or k in survey.maps}
        maps = survey.maps | {k: info for k, (info, _) in later.items()}
        matrices = survey.matrices | {k: W for k, (_, W) in later.items()}
        maps = {k: replace(info, layouts=(), rows=()) if k in self.singly else info for k, info in maps.items()
                if k not in self.refused}
        notes = {k: remark for k, remark in survey.notes.items() if k not in maps} | self.refused
        biases = {k: own for k, own in survey.biases.items() if k not in self.biases}
        return describe(replace(survey, maps=maps, matrices=matrices, notes=notes, biases=biases))


def amended(network: Network, doubt: Doubt, kept: Amendments) -> Survey:
    """Return the network's survey without what is in doubt, and keep the changes in ``kept``."""
    known, x = network.survey, doubt.x
    kept.biases |= set(doubt.biases)
    new = set(doubt.maps) - known.maps.keys()
    doubted = set(doubt.maps) - new
    for i in _order(count(x), doubt.example):
        missing = new - kept.later.keys()
        if not missing and i != doubt.example:
            break
        one = network.alone(x, i, seed=i)
        kept.later |= _described(network, one, missing)
        kept.refused |= verify_one(one, [*missing, *doubted])
    kept.refused |= {k: Remark(Mark.REFUSED, IN_BATCHES) for k in new - kept.later.keys()}
    failed = {k for k in doubted - kept.refused.keys() if not known.maps[k].layouts}  # it was read alone already
    kept.refused |= {k: _unexplained(k) for k in failed}
    maps = known.maps | {k: m.info for k, m in kept.later.items()}
    kept.singly |= maps.keys() & with_siblings(maps, doubt.maps)
    _check_mixing(network, doubt, kept.singly)
    result = kept.apply(known, network.state)
    if _same(result, known):  # nothing more can be done about it
        kept.refused |= {k: _unexplained(k) for k in doubt.maps}
        result = kept.apply(known, network.state)
    return result


def _same(survey: Survey, other: Survey) -> bool:
    """Return whether two surveys have the same maps, layouts and notes."""
    kinds = ("notes", "maps", "biases")
    return all(getattr(survey, kind).keys() == getattr(other, kind).keys() for kind in kinds) and all(
        info.layouts == other.maps[k].layouts for k, info in survey.maps.items())


def _order(n: int, first: int) -> Iterable[int]:
    """Numbers of all examples, the doubtful one first."""
    return [first, *(i for i in range(n) if i != first)]


def _described(network: Network, one: Pass, names: set[str]) -> dict[str, Later]:
    """Maps that a pass of one example has used, read one example at a time."""
    weights = {id(weight): name for name, weight in reversed(network.state.items())}
    g = dict(zip(map(id, one.calls), one.backward(torch.ones_like(one.f))[0], strict=True))
    later = {}
    for name, calls in grouped(one.calls).items():
        if name in names:
            first = calls[0]
            tally = Tally(first, [()] * len(calls), regular=False)
            for c in calls:
                tally.add(c, c.inputs(), c.map.outputs(c.module, g[id(c)]))
            info = tally.info(network.modules.get(id(first.module), ""), weights.get(id(first.weight)), 1)
            later[name] = Later(info, first.map, first.module, first.weight.detach(), network.state)
    return later


def _check_mixing(network: Network, doubt: Doubt, singly: set[str]) -> None:
    """If gradients of single examples do not add up to that of a batch, there are none."""
    known, x = network.survey, doubt.x
    if known.drawn or count(x) < 2:
        return
    check_alone(network, x, network.run(x, record=False), doubt.example)  # some models mix large batches only
    few = torch.tensor(list(_order(count(x), doubt.example))[:SURVEYED])
    names = dict.fromkeys([*(w for k in singly if k in known.maps and (w := known.maps[k].weight)), *doubt.biases])
    x = select(x, few)
    run = network.run(x, record=False)
    R = torch.randn(run.f.flatten(1).shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(run.f)
    weights = [network.state[w] for w in names]
    check_sums(network, x, R, weights, {id(w): d for w, d in zip(weights, run.backward(R, weights)[1], strict=True)})


def _unexplained(name: str) -> Remark:
    """Refusal of a map whose captures do not rebuild its weight gradient."""
    return Remark(Mark.REFUSED, f"layer {name!r}: on some examples of the probe, its inputs and backward signals do not rebuild "
                                "its weight gradient. The weight is also used in a way that is not a linear map of one input; "
                                "its tangent kernel is exact, by gradients of single examples")


# ---------------------------------------------------------------------------------------------------------------- memo

UNTRUSTED = 16  # of measurements, in one the survey is looked at again though nothing has changed
LONG = 16  # entries of a list that is compared
DEPTH = 5  # containers and objects inside each other into which ``everything`` looks
MOST_LOOKED_AT = 20_000  # numbers, words and objects; a model that keeps more is surveyed in every call


@dataclass(frozen=True)
class _Entry:
    """A survey, and everything by which one sees that it still holds."""

    model: weakref.ref[nn.Module]
    architecture: Any
    settings: Any
    weights: Any
    x: Inputs
    f: Tensor  # outputs of the first examples
    copied: set[str]
    survey: Survey
    memory: float  # that it was allowed
    everything: Any  # the numbers of the weights, and what modules and their classes keep


class SurveyMemo:
    """Remembers the last survey. It belongs to one measurer (an Observer has one) and one thread at a time; a survey is never
    shared between measurers."""

    def __init__(self) -> None:
        self.trusted = False  # was the last survey taken as it was, without a look?
        self._entry: _Entry | None = None
        self.surveys = 0  # that were made anew
        self.amendments = Amendments()  # what later examples have taught of the model
        self._amended: Any = None  # the architecture that they are of

    def amend(self, network: Network, doubt: Doubt) -> Survey:
        """Return the survey without what is in doubt; later measurements of this model begin with it."""
        result = amended(network, doubt, self.amendments)
        self.surveys += 1
        self._amended = _architecture(network.model, network.output)
        if self._entry is not None:
            self._entry = replace(self._entry, survey=_own(result))
        return result

    def lightened(self, survey: Survey) -> Survey:
        """The last survey, with blocks computed again for every backward pass, from now on."""
        if self._entry is not None:
            self._entry = replace(self._entry, survey=self._entry.survey.lightened())
        return survey.lightened()

    def known(self, model: nn.Module, output: Output | None, survey: Survey, state: State) -> Survey:
        """A new survey, with what is known of later examples."""
        if self._amended is None or self._amended != _architecture(model, output):
            self.amendments, self._amended = Amendments(), None
            return survey
        return self.amendments.apply(survey, state)

    def recall(self, model: nn.Module, x: Inputs, output: Output | None, look: bool) -> tuple[set[str], State, Survey] | None:
        """Return what ``surveyed`` gives, if this model was surveyed on these examples. That the same modules of a plain model,
        with the same settings, work in the same way is trusted, unless one is to ``look``: then that it gives the same outputs
        with the same weights is looked at on the first of them, and with others, that its gradients are still rebuilt."""
        self.trusted = False
        entry, now = self._entry, _architecture(model, output)
        if now is None or entry is None or entry.model() is not model or entry.architecture != now or not _equal(entry.x, x):
            return None
        plain = not entry.copied and all(info.weight is not None for info in entry.survey.maps.values())
        if plain and not look and entry.settings == settings(model) and _places(entry.weights) == _places(_weights(model)) \
                and _follow(entry.survey, model):
            self.trusted = True
            return entry.copied, state_of(model, copied=entry.copied), _own(entry.survey)
        if plain and entry.weights == _weights(model):  # then its matrices are the parameters themselves
            state = state_of(model, copied=entry.copied)
            if _equal(entry.f, _first_outputs(model, x, state, output, entry.survey)):  # else they were changed by .data
                return entry.copied, state, _own(entry.survey)
        if written(model, x, output) != entry.copied:
            return None
        state = state_of(model, copied=entry.copied)
        result = renewed(Network(model, state, entry.survey, output), x)
        if result is None:
            return None
        self._keep(model, x, output, entry.copied, result)
        return entry.copied, state, _own(result)

    def unchanged(self, model: nn.Module, x: Inputs, output: Output | None, memory: float) -> tuple[State, Survey, Tensor] | None:
        """Return the state, the survey, and the outputs of the first examples when it was made, if nothing has changed since: the
        modules with their modes, hooks and attributes, all numbers of the weights, and the first examples. No pass is made; what
        cannot be seen here (global variables) changes the outputs, which the caller compares."""
        entry = self._entry
        if entry is None or entry.model() is not model or entry.memory != memory or entry.everything is None or entry.copied:
            return None
        now = _architecture(model, output)
        if now is None or entry.architecture != now or entry.weights != _weights(model) or not _equal(x, entry.x):
            return None
        plain = not entry.survey.drawn and all(info.weight is not None for info in entry.survey.maps.values())
        if not plain or entry.everything != everything(model):
            return None
        return state_of(model, copied=entry.copied), _own(entry.survey), entry.f

    def keep(self, model: nn.Module, x: Inputs, output: Output | None, copied: set[str], result: Survey,
             memory: float = math.inf, exact: bool = False) -> None:
        """Remember a survey. ``exact``: by all that ``unchanged`` compares."""
        self.surveys += 1
        self._keep(model, x, output, copied, result, memory, exact)

    def _keep(self, model: nn.Module, x: Inputs, output: Output | None, copied: set[str], result: Survey,
              memory: float = math.inf, exact: bool = False) -> None:
        """Remember a survey with everything that must stay the same for it to hold."""
        architecture = _architecture(model, output)
        if architecture is not None:
            few = result.examples if exact else 2  # some models run on no other number of examples than that of the survey
            f = _first_outputs(model, x, state_of(model, copied=copied), output, result, few)
            self._entry = _Entry(weakref.ref(model), architecture, settings(model), _weights(model), copy_of(x), f, copied,
                                 _own(result), memory, everything(model) if exact else None)


def renewed(network: Network, x: Inputs) -> Survey | None:
    """Return the survey for other weights, if all that it says of the maps still holds; None where it must be made again."""
    known = network.survey
    plain = not known.drawn and all(info.layouts for info in known.maps.values())
    if not plain or any(remark.mark is Mark.REFUSED for remark in known.notes.values()):
        return None
    whole = network.run(x, expand=dict.fromkeys(known.expand, count(x)))
    if whole.f.shape != (count(x), *known.shape) or whole.differentiates != known.differentiates:
        return None
    if examine.draws(network, x, whole, network.glance(x, inner(x), record=False), again=True):
        return None
    calls: dict[str, int] = {}
    for c in whole.calls:
        calls[c.name] = calls.get(c.name, 0) + 1
    if calls != {name: len(info.layouts) for name, info in known.maps.items()}:
        return None
    try:
        layouts: Layouts = {name: [(k,) for k in info.layouts] for name, info in known.maps.items()}
        verified = verify(network, x, whole, layouts, drawn=False)
    except RuntimeError:  # what a layer reads has another shape now: routing, early exits
        return None
    tol = tolerance(coarsest(whole.state, whole.f))
    same = all((info.layouts, info.rows) == (known.maps[k].layouts, known.maps[k].rows) for k, info in verified.maps.items())
    if verified.notes or not same or verified.accumulates != known.accumulates \
            or biases(network.model, known, verified, whole.aliases, tol) != known.biases:
        return None
    return replace(known, maps=verified.maps, matrices=examine.matrices_of(whole))


def _unreadable(model: nn.Module, x: Inputs, why: Exception) -> str:
    """Say what the model was given when it raised an error on its first examples."""
    parts = {f"x[{i}]": t for i, t in enumerate(x)} if isinstance(x, tuple) else x if isinstance(x, Mapping) else {"x": x}
    given = ", ".join(f"{name} [n{''.join(f', {d}' for d in t.shape[1:])}] of {str(t.dtype).removeprefix('torch.')}"
                      for name, t in parts.items())
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    call = "model(**x)" if isinstance(x, Mapping) else "model(*x)" if isinstance(x, tuple) else "model(x)"
    return (f"the model ({type(model).__name__}, weights of {' and '.join(kinds)}) cannot read its inputs: given {given}, {call} "
            f"raised {type(why).__name__}: {str(why).rstrip('.')}. Make the probe of inputs as they enter the model in training, "
            f"of the same shape and dtype, examples first: Probe(x, y). A model of several inputs takes a tuple or a dict.")


def surveyed(model: nn.Module, x: Inputs, output: Output | None = None,
             memo: SurveyMemo | None = None, look: bool = True, memory: float = math.inf) -> tuple[set[str], State, Survey]:
    """(parameters that the forward pass writes into, aliases of all, the survey); from ``memo`` where it is known."""
    known = None if memo is None else memo.recall(model, x, output, look)
    if known is not None:
        return known
    try:
        copied = written(model, x, output)
    except (RuntimeError, TypeError, ValueError, IndexError) as why:
        passing = any(words in str(why) for words in (*NO_MEMORY, *DEVICE_LOST))
        if passing or isinstance(why, RichterError) or not raised_by_model(why):
            raise
        raise ProbeError(_unreadable(model, x, why)) from why
    give_back(weight_bytes(model))
    state = state_of(model, copied=copied)
    result = examine.survey(model, x, state, output, memory)
    if memo is not None:
        result = memo.known(model, output, result, state)
        memo.keep(model, x, output, copied, result)
    return copied, state, result


def _own(result: Survey) -> Survey:
    """A copy to which a measurement may add notes."""
    return replace(result, notes=dict(result.notes))


def _first_outputs(model: nn.Module, x: Inputs, state: State, output: Output | None, survey: Survey, few: int = 2) -> Tensor:
    """Outputs that are compared to see that a model is still the one that was surveyed."""
    return forward(model, select(x, slice(0, few)), state, output=output, record=False, anew=survey.anew).f.detach()


def _architecture(model: nn.Module, output: Output | None) -> Any:
    """Everything of a model but its numbers that a survey depends on; None when it cannot be told (inference tensors count no
    changes)."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if any(t.is_inference() for _, t in tensors) or not (output is None or isinstance(output, types.FunctionType)):
        return None
    return (None if output is None else weakref.ref(output),
            [(name, id(t), t.requires_grad, t.shape, t.dtype, t.device) for name, t in tensors],
            [(name, id(m), type(m), m.training, *(len(hooks) for hooks in _hooks(m)), id(m.__dict__.get("forward")))
             for name, m in model.named_modules()])


def _hooks(m: nn.Module) -> tuple[Mapping[int, Any], ...]:
    """All hooks of a module."""
    return m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks


def everything(model: nn.Module) -> Any:
    """The numbers of a model's weights, and all that its modules and their classes keep; None if that is too much to compare."""
    modules = list(model.modules())
    bases = dict.fromkeys(kind for m in modules for kind in type(m).__mro__[:-1])
    kinds = [kind for kind in bases if not f"{kind.__module__}.".startswith("torch.")]
    holders = [*({k: v for k, v in vars(m).items() if k not in OF_TORCH} for m in modules),
               *(dict(vars(kind)) for kind in kinds)]
    looker = _Looker({id(m): m for m in modules})
    contents = [[(k, looker.look(kept, DEPTH)) for k, kept in holder.items()] for holder in holders]
    hooks = [[list(box) for box in _hooks(m)] for m in modules]  # their keys: no two hooks have the same
    if looker.left < 0:
        return None
    return contents, hooks, registered(), [fingerprint(t) for t in (*model.parameters(), *model.buffers())]


class _Looker:
    """Looks into what hangs on a model, and writes down what can be compared later."""

    def __init__(self, modules: dict[int, nn.Module]) -> None:
        self.modules, self.left = modules, MOST_LOOKED_AT
        self.inside: set[int] = set()  # ids of the objects that are being looked into

    def look(self, kept: Any, depth: int) -> Any:
        """The value of numbers and words, the bits of arrays, the contents of containers, functions and objects; and which object
        it is, if it may change."""
        self.left -= 1
        if kept is None or isinstance(kept, (bool, int, str, bytes)):
            return kept
        if isinstance(kept, (float, complex, torch.dtype, torch.device)):
            return repr(kept)  # NaN is NaN
        if id(kept) in self.modules or id(kept) in self.inside or depth == 0 or self.left < 0 or isinstance(kept, type):
            return id(kept)
        self.inside.add(id(kept))
        found = self._inside(kept, depth - 1)
        self.inside.discard(id(kept))
        return id(kept), found

    def _inside(self, kept: Any, depth: int) -> Any:
        """Comparable summary of a value: of tensors a fingerprint, of containers their contents."""
        if isinstance(kept, Tensor):
            return kept.requires_grad, kept.shape, kept.dtype, fingerprint(kept)
        if isinstance(kept, np.ndarray):
            bits = b"" if kept.dtype.hasobject else np.ascontiguousarray(kept).tobytes()
            return kept.shape, str(kept.dtype), zlib.crc32(bits)
        if isinstance(kept, (Mapping, tuple, list, frozenset, set)) and len(kept) > self.left:
            self.left = -1
        elif isinstance(kept, Mapping):
            return [(self.look(k, depth), self.look(v, depth)) for k, v in list(kept.items())]
        elif isinstance(kept, (tuple, list, frozenset, set)):
            return [self.look(v, depth) for v in kept]
        elif isinstance(kept, types.FunctionType):
            cells = [cell.cell_contents for cell in kept.__closure__ or () if _filled(cell)]
            return id(kept.__code__), [self.look(v, depth) for v in (*cells, kept.__defaults__, kept.__kwdefaults__)]
        if isinstance(kept, (staticmethod, classmethod, types.MethodType)):
            return self.look(kept.__func__, depth), self.look(getattr(kept, "__self__", None), depth)
        if isinstance(kept, functools.partial):
            return [self.look(v, depth) for v in (kept.func, kept.args, kept.keywords)]
        return self.look(getattr(kept, "__dict__", None) or None, depth)


def _filled(cell: Any) -> bool:
    """Return whether a cell of a closure has a value."""
    try:
        cell.cell_contents  # noqa: B018  a name that is not bound yet
    except ValueError:
        return False
    return True


def settings(model: nn.Module) -> Any:
    """Settings of a model besides its modules and weights, as far as one can see: numbers and words that its modules keep."""
    return [(name, key, value) for name, m in model.named_modules() for key, kept in list(vars(m).items())
            for value in [_setting(kept)] if value is not None]


def _setting(kept: Any) -> Any:
    """Return a setting as a value that does not change with it; None for anything else."""
    if isinstance(kept, (bool, int, str)):
        return kept
    if isinstance(kept, float):
        return repr(kept)  # NaN is NaN
    if isinstance(kept, Tensor):
        version = 0 if kept.is_inference() else kept._version  # these count no changes
        return id(kept), version, kept.data_ptr() if kept.layout is torch.strided else 0
    if isinstance(kept, (tuple, list)) and len(kept) <= LONG:
        return tuple(map(_setting, kept))
    return None


def _weights(model: nn.Module) -> Any:
    """Identities and versions of the weights: every change counts."""
    return [(t._version, (t.data_ptr(), t.stride()) if t.layout is torch.strided else 0)
            for t in (*model.parameters(), *model.buffers())]


def _places(weights: Any) -> list[Any]:
    """Memory addresses of the weights: where they do not move, matrices that are views of them follow every change."""
    return [place for _, place in weights]


def _follow(result: Survey, model: nn.Module) -> bool:
    """Are the matrices views of the parameters? Those that are copied (heads put one behind the other) do not follow a change."""
    storages = {p.untyped_storage().data_ptr() for p in model.parameters() if p.layout is torch.strided}
    return all(W.untyped_storage().data_ptr() in storages for W in result.matrices.values())


def _equal(x: Inputs, y: Inputs) -> bool:
    """Return whether two inputs are equal."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and x.dtype == y.dtype and x.device == y.device and torch.equal(x, y)
    if isinstance(x, dict) and isinstance(y, dict):
        return x.keys() == y.keys() and all(_equal(x[k], y[k]) for k in x)
    if isinstance(x, (tuple, list)) and isinstance(y, (tuple, list)):
        return len(x) == len(y) and all(map(_equal, x, y))
    return x is y
