"""From the initial network to this one: passes of both on the same examples.

A network is compared as it was trained. Norms that were trained with the statistics of their batches use those of fixed blocks of
examples, because running statistics of initialisation are those of no data. A scale-invariant layer (before a norm) is taken at
its initial norm, because its scale has no effect on the outputs. This is the one exception to the rule that a probe runs in eval
mode.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import ParametrizationList

from richter.core import DivergedError, Remark
from richter.core.values import FEW_BATCHES, NO_DATA, SMALL, give_back
from richter.instrument.capture import Call, Pass, State, batch_statistics, check_finite, same_bits, select, to_device
from richter.instrument.stream import Chunk, chunks, fitting, grouped, steps, timed
from richter.instrument.survey import Audit, check_calls, passed

if TYPE_CHECKING:
    from richter.instrument.subject import Subject

# --------------------------------------------------------------------------------------------------------------- norms
# Norms with running statistics (BatchNorm and its kin): which there are, and whether what they keep is of data.

SETTLED = 0.01  # the share of what a norm was made with, mean 0 and variance 1, in what it keeps


def tracking(model: nn.Module) -> dict[str, _NormBase]:
    """Norms that keep running statistics, by name."""
    return {name: m for name, m in model.named_modules()
            if isinstance(m, _NormBase) and m.track_running_stats and m.running_mean is not None}


def buffers(name: str, norm: nn.Module) -> list[str]:
    """The names of what a norm keeps."""
    return [f"{name}.{k}" if name else k for k, _ in norm.named_buffers(recurse=False)]


def understood(model: nn.Module) -> set[str]:
    """Names of buffers whose initial values are those of the initial network: what norms keep, which use statistics of batches
    where they have moved (see Journey), and those of parametrisations, which make a weight."""
    parts = [f"{name}." for name, m in model.named_modules() if isinstance(m, ParametrizationList)]
    return {k for name, m in tracking(model).items() for k in buffers(name, m)} | {
        k for k, _ in model.named_buffers(remove_duplicate=False) if any(k.startswith(part) for part in parts)}


def settling(subject: Subject) -> Remark:
    """What is to be said of outputs in eval mode: norms that have seen no data normalise nothing, and after few batches what they
    keep is still in part what they were made with."""
    fresh, batches = 0, []
    for name, norm in tracking(subject.model).items():
        kept = {k.rpartition(".")[2]: subject.state[k] for k in buffers(name, norm)}
        if _untouched(kept):
            fresh += 1
        elif (seen := int(kept.get("num_batches_tracked", 0))) and norm.momentum is not None \
                and (1 - norm.momentum) ** seen > SETTLED:
            batches.append(seen)
    texts = [*([f"{fresh} {NO_DATA} yet, and normalise nothing"] if fresh else []),
             *([f"{len(batches)} {FEW_BATCHES} ({min(batches)}), and normalise in part by what they were made with"]
               if batches else [])]
    return Remark(text="; ".join(texts))


def _untouched(kept: Mapping[str, Tensor]) -> bool:
    mean, variance = kept.get("running_mean"), kept.get("running_var")
    return mean is not None and variance is not None and not mean.any() and bool((variance == 1).all())


# ------------------------------------------------------------------------------------------------------------- journey

GRAPHS = 6  # of an example: in both networks, with tangents in one of them, and of the backward pass that these agree with
OUTPUTS = 7  # arrays of outputs in double precision
TILE = 2 ** 20  # entries that are multiplied in double precision at a time
BLOCK = 64  # examples whose statistics a norm uses
SCALE_CANDIDATE = 1e-4  # a layer may be scale-invariant if |<W, df/dW>| is below this share of |W| |df/dW|
SCALE_TOLERANCE = 1e-3  # share of a layer's contribution to the outputs that the eps of a norm behind it may change
EPS_EFFECT = 0.4  # share of the effect of a norm's eps that is left, at most, when its layer is doubled: about 1/4
SCALE_ROUNDING = 16  # machine epsilons of the outputs: their rounding error when a layer is multiplied by a power of two
FEW, FEWEST = 16, 4  # examples on which a way is tried, and scale invariance is tested: one in 16
COTANGENTS = 3  # random cotangents of the test for candidates
CLEARLY = 10  # one cotangent is enough if no layer is within this factor of SCALE_CANDIDATE


class Listener(Protocol):
    """What is told of every block of examples."""

    then: bool  # does it look at the initial network?
    push: bool  # and at the product of its Jacobian with the change of the weights?

    def take(self, stretch: Stretch) -> None: ...


@dataclass(frozen=True, eq=False)
class Stretch:
    """Some examples in both networks."""

    subject: Subject
    rows: slice
    group: Int[Tensor, " n"]  # that each example is left out with
    now: Pass
    then: Pass | None = None
    change: Float[Tensor, "n k"] | None = None  # of the outputs, or of combinations of them
    linear: Float[Tensor, "n k"] | None = None  # the same to first order
    _calls: dict[int, dict[str, list[Call]]] = field(default_factory=dict)

    @property
    def n(self) -> int:
        return self.rows.stop - self.rows.start

    def calls(self, run: Pass) -> dict[str, list[Call]]:
        """By map."""
        return self._calls.setdefault(id(run), grouped(run.calls))


class Journey:
    """One walk over the probe for all that compare the two networks."""

    def __init__(self, subject: Subject) -> None:
        assert subject.then is not None
        self.subject, self.first = subject, subject.then
        self.listeners: list[Listener] = []
        self.push: Callable[[Stretch, Any], Stretch] | None = None  # adds ``change`` and ``linear``
        self.walked = False

    # ------------------------------------------------------------------------------------------------- the networks

    @cached_property
    def parameters(self) -> list[str]:
        """Their names; of a shared one the first."""
        return [name for name, p in self.subject.model.named_parameters() if p.is_floating_point()]

    @cached_property
    def norms(self) -> list[nn.Module]:
        """Those that were trained with statistics of batches: their running ones have moved."""
        def moved(name: str, norm: nn.Module) -> bool:
            now = {k: self.subject.state[k] for k in buffers(name, norm)}
            return any(not same_bits(b, self.first[k].to(b)) for k, b in now.items())
        return [m for name, m in tracking(self.subject.model).items() if moved(name, m)]

    @cached_property
    def scales(self) -> dict[str, float]:
        """|W0| / |W| for the weights of scale-invariant layers and for their biases."""
        layers = self._layers()
        sizes = {k: (self.first[k].norm().item(), self.subject.state[k].norm().item()) for k in layers}
        grown = {k: before / size for k, (before, size) in sizes.items() if before and size and before != size}
        if not grown:
            return {}
        candidates = self._scale_candidates(self.subject.state) & grown.keys()
        if candidates:
            candidates &= self._scale_candidates(self.first)
        names = {k: [name for name in (k, layers[k]) if name] for k in grown if k in candidates}
        chosen = {name: grown[k] for k in self._scale_invariant(names) for name in names[k]}
        del self._few_runs  # their graphs
        return chosen

    def _scale_invariant(self, layers: Mapping[str, list[str]]) -> list[str]:
        """The layers that may be multiplied by any large number without effect, in both networks. All of them are tested
        together; if that fails, one after another."""
        states = (self.subject.state, self.first)

        def invariant(some: list[str]) -> bool:
            names = [name for k in some for name in layers[k]]
            return all(self._unchanged(state, names, self._few_runs[i].f) for i, state in enumerate(states))

        everything = list(layers)
        if not everything or invariant(everything):
            return everything
        return [k for k in everything if invariant([k])] if len(everything) > 1 else []

    def _unchanged(self, state: State, names: list[str], f: Tensor) -> bool:
        """Do the outputs stay the same if these weights are multiplied by t and by 2t?

        For a large t the eps of a norm is negligible, so f(2t W) = f(t W) up to rounding error; a power of two adds no rounding
        error of its own. f(t W) - f(W) shows what eps, or saturation, does at the scale of now. It must be small beside the
        layer's contribution to the outputs, f(W) - f(0), not beside the outputs: a branch may contribute little. The effect of
        eps falls as 1/t^2, to a quarter for 2 W; a small effect of another kind, such as saturation, does not fall so fast.
        """
        eps = torch.finfo(state.precision).eps
        t = 2.0 ** round(-math.log2(eps) / 2)
        try:
            twice, near, far = (self._outputs_scaled(state, dict.fromkeys(names, factor)) for factor in (2.0, t, 2 * t))
        except DivergedError:  # the products overflow: they grow with the weights
            return False
        rounding = SCALE_ROUNDING * eps * near.norm()
        if (far - near).norm() > rounding or (twice - near).norm() > EPS_EFFECT * (near - self.wide(f)).norm() + rounding:
            return False
        try:
            contribution = self.wide(f) - self._outputs_scaled(state, dict.fromkeys(names, 0.0))
        except DivergedError:  # a norm without eps divides by zero: without the layer there are no outputs
            contribution = self.wide(f)
        return bool((near - self.wide(f)).norm() <= SCALE_TOLERANCE * contribution.norm())

    def _outputs_scaled(self, state: State, factors: Mapping[str, float]) -> Tensor:
        """Outputs of a few examples with some weights multiplied by a number."""
        return self.wide(self.run(_scaled(state, factors), self.few, 0, record=False).f)

    @cached_property
    def last(self) -> State:
        """The weights of now; scale-invariant layers have their initial norm."""
        return _scaled(self.subject.state, self.scales) if self.scales else self.subject.state

    @cached_property
    def direction(self) -> dict[str, Tensor]:
        """W - W0 of what has moved."""
        changes = {k: self.last[k].detach() - self.first[k].detach() for k in self.parameters}
        return {k: d for k, d in changes.items() if bool(d.any())}

    @cached_property
    def moved(self) -> bool:
        """Has any weight?"""
        return bool(self.direction)

    @cached_property
    def few(self) -> Any:
        """Some examples from all over the probe; of a large model as many as have room."""
        n, weights = self.subject.probe.n, self._weights()
        number = min(n, max(FEWEST, min(FEW, n // 16)))
        if weights:
            number = fitting(self.subject.memory - weights, self._each(), number)
        rows = torch.linspace(0, n - 1, number).long()
        return to_device(select(self.subject.x, rows), self.subject.device)

    def _layers(self) -> dict[str, str]:
        """Weight matrices, and their biases, if they have one."""
        names = set(self.parameters)
        biases = {k: f"{owner}.{attribute.replace('weight', 'bias')}" if (owner := k.rpartition(".")[0]) else
                  attribute.replace("weight", "bias") for k in self.parameters for attribute in [k.rpartition(".")[2]]}
        return {k: bias if (bias := biases[k]) in names and bias != k else "" for k in self.parameters
                if self.first[k].dim() > 1}

    @cached_property
    def _few_runs(self) -> tuple[Pass, Pass]:
        """A few examples in the network of now, and in the initial one."""
        return self.run(self.subject.state, self.few, 0, record=False), self.run(self.first, self.few, 0, record=False)

    def _scale_candidates(self, state: State) -> set[str]:
        """Weights for which <W, df/dW> + <b, df/db> is nearly zero beside |W| |df/dW| + |b| |df/db|, for random combinations of
        the outputs of a few examples. The first combination is enough where every weight has a clear effect."""
        layers, run = self._layers(), self._few_runs[state is self.first]
        names = list(dict.fromkeys([*layers, *filter(None, layers.values())]))
        draw, share = torch.Generator().manual_seed(0), SCALE_CANDIDATE + 8 * torch.finfo(state.precision).eps
        effects: dict[str, float] = dict.fromkeys(layers, 0.0)
        bounds: dict[str, float] = dict.fromkeys(layers, 0.0)

        def candidates(share: float) -> set[str]:
            return {k for k, effect in effects.items() if bounds[k] > 0 and effect <= share ** 2 * bounds[k]}

        for combination in range(COTANGENTS):
            V = torch.randn(run.f.shape, generator=draw, dtype=torch.float64).to(run.f)
            known = {k: (self.inner(state[k], d), state[k].detach().norm().item() * d.norm().item())
                     for k, d in zip(names, run.in_turns(V, [state[k] for k in names]), strict=True)}
            for weight, bias in layers.items():
                parts = [known[k] for k in (weight, bias) if k]
                effects[weight] += sum(effect for effect, _ in parts) ** 2
                bounds[weight] += sum(bound for _, bound in parts) ** 2
            if not combination and not candidates(CLEARLY * share):
                return set()
        return candidates(share)

    def wide(self, t: Tensor) -> Tensor:
        """Differences of near numbers take float64."""
        return t.detach().to(self.subject.home, torch.float64)

    # --------------------------------------------------------------------------------------------------- the walk

    @property
    def mixes(self) -> bool:
        return bool(self.norms)

    @cached_property
    def blocks(self) -> list[slice]:
        """Of examples that go through the networks together: fixed ones where they mix, whatever the size of chunks. What is left
        at the end joins the last block, if it is less than half of one."""
        n = self.subject.probe.n
        if not self.mixes:
            room = min(self.subject.memory // 2, self.subject.memory - self._weights())  # the other half is for what is compared
            return steps(n, fitting(room, self._each(), min(self.subject.probe.chunk, n), self.subject.survey.drawn))
        starts = list(range(0, n, BLOCK))
        if len(starts) > 1 and n - starts[-1] < BLOCK // 2:
            del starts[-1]
        return [slice(a, b) for a, b in zip(starts, [*starts[1:], n], strict=True)]

    def _each(self) -> int:
        """Bytes of one example: its graphs in both networks with what is pushed through one, and what a layer reads; and its
        outputs in double precision, of both, their change, and to first order."""
        survey = self.subject.survey
        unfolded = max((m.unfolded for m in survey.maps.values()), default=0)
        return self.subject.itemsize * (GRAPHS * survey.graph + unfolded) + 8 * OUTPUTS * survey.outputs

    def _weights(self) -> int:
        """Bytes of the change of the weights, and of gradients of some: of one that is used twice, three; those of a small model
        are not what a bound is about."""
        numbers = [self.first[k].numel() for k in self.parameters]
        need = self.subject.itemsize * (sum(numbers) + 3 * max(numbers, default=0))
        return need if need > SMALL else 0

    def least(self) -> int:
        """Bytes of the smallest piece of work: of one example; or of weights that are moved in their last place."""
        survey, weights = self.subject.survey, sum(self.first[k].numel() for k in self.parameters)
        moved = 2 * self.subject.itemsize * (weights + survey.graph) + 8 * OUTPUTS * survey.outputs if self._weights() else 0
        return max(self._each() * (min(BLOCK, self.subject.probe.n) if self.mixes else 1) + self._weights(), moved)

    def inner(self, a: Tensor, b: Tensor) -> float:
        """<a, b> in double precision; of large ones some entries at a time."""
        if a.numel() <= TILE:
            return (self.wide(a) * self.wide(b)).sum().item()
        return sum((self.wide(p) * self.wide(q)).sum().item()
                   for p, q in zip(a.detach().reshape(-1).split(TILE), b.detach().reshape(-1).split(TILE), strict=True))

    def examples(self, rows: slice) -> Any:
        return to_device(select(self.subject.x, rows), self.subject.device)

    @property
    def groups(self) -> int:
        """Of examples, for the jackknife: blocks where examples mix."""
        return (len(self.blocks) if self.subject.errors else 1) if self.mixes else self.subject.groups

    def _group(self, i: int, rows: slice) -> Tensor:
        if self.mixes:
            return torch.full((rows.stop - rows.start,), i % self.groups)
        return torch.arange(rows.start, rows.stop) % self.groups

    def run(self, state: State, x: Any, seed: int, record: bool = True, plain: bool = False) -> Pass:
        """A pass of some examples, as the survey says that it is made; ``record=False``: remembering no map."""
        subject = self.subject
        network = replace(subject.source, state=state)
        with batch_statistics(self.norms) if self.mixes else contextlib.nullcontext():
            run = passed(network, x, seed, None, plain) if record else network.run(x, record=False, seed=seed)
        if record:
            check_calls(network, x, run.calls)
        check_finite(run.f)
        return run

    def _checked(self, state: State, x: Any, rows: slice, audit: Audit) -> Pass:
        """A pass whose captures were compared with autograd's gradients."""
        network = replace(self.subject.source, state=state, audit=audit)
        chunk = Chunk(network, x, rows, list(self.subject.survey.batched))
        chunk.look()
        return chunk.run

    def _timed(self, state: State, x: Any, rows: slice) -> Pass:
        with timed(self.subject.device) as seconds:
            run = self.run(state, x, rows.start)
        self.subject.forwards.add(rows.stop - rows.start, seconds())
        return run

    def _look(self) -> None:
        """Check in eval mode that maps are read as they should be."""
        subject = self.subject
        survey, most = subject.survey, min(subject.probe.chunk, subject.probe.n)
        size = fitting(min(subject.memory // 2, subject.memory - self._weights()), self._each(), most, survey.drawn)
        for chunk in chunks(subject.source, subject.x, size, maps=list(survey.batched)):
            chunk.look()

    def give_back(self) -> None:
        """What a large model has let go, to the system."""
        give_back(self._weights())

    def walk(self) -> None:
        """Once, when the first value is asked for."""
        if self.walked:
            return
        self.walked = True
        then, push = (any(getattr(listener, what) for listener in self.listeners) for what in ("then", "push"))
        pushed = self.push if push and self.moved else None
        audit = self.subject.audit
        unchecked = audit is not None and not audit.done  # no other pass of this measurement has checked anything
        if unchecked and self.mixes:
            self._look()
        for i, rows in enumerate(self.blocks):
            self._step(i, rows, then, pushed, audit if unchecked and not self.mixes else None)
            self.give_back()
        self.__dict__.pop("direction", None)  # as large as the model, and nobody looks at it again

    def _step(self, i: int, rows: slice, then: bool, pushed: Callable[[Stretch, Any], Stretch] | None,
              audit: Audit | None) -> None:
        """One block of examples; nothing of it is held when the next one begins."""
        x, last = self.examples(rows), self.last  # which takes passes of its own, when it is first asked for
        now = self._timed(last, x, rows) if audit is None else self._checked(last, x, rows, audit)
        stretch = Stretch(self.subject, rows, self._group(i, rows), now)
        if pushed is not None:
            stretch = pushed(stretch, x)
        if stretch.then is None and then:
            stretch = replace(stretch, then=self.run(self.first, x, rows.start))
        for listener in self.listeners:
            listener.take(stretch)


def _scaled(state: State, factors: Mapping[str, float]) -> State:
    """The same weights, with some multiplied by a number."""
    return state.exchanged({id(state[k]): (state[k].detach() * s).requires_grad_() for k, s in factors.items()})
