"""From the initial network to this one: passes of both on the same examples.

A network is compared as it was trained. Norms that were trained with the statistics of their batches use those of fixed blocks of
examples, because running statistics of initialisation are those of no data. A layer before a norm is taken at its initial scale,
because its scale has no effect on the outputs. This is the one exception to the rule that a probe runs in eval mode.
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

from richter.core.freed import give_back
from richter.core.sizes import SMALL
from richter.instrument.capture import Call, Pass, State, batch_statistics, check_finite, same_bits, select, to_device
from richter.instrument.captures import grouped, timed
from richter.instrument.statistics.norms import buffers, tracking
from richter.instrument.stream import chunks, fitting, steps
from richter.instrument.survey import UNTRUSTED, Bench, check_calls, passed

if TYPE_CHECKING:
    from richter.instrument.subject import Subject

GRAPHS = 6  # of an example: in both networks, with tangents in one of them, and of the backward pass that these agree with
OUTPUTS = 7  # arrays of outputs in double precision
TILE = 2 ** 20  # entries that are multiplied in double precision at a time
BLOCK = 64  # examples whose statistics a norm uses
IN_VAIN = 0.01  # of the change of the outputs: what the scale of a layer may do to them where it is said to have no effect
IN_VAIN_BESIDE = 1e-4  # of what the scale of the layer that matters most does: the eps of a norm is no effect
FEW, FEWEST = 16, 4  # examples on which a way is tried, and effects of scales are seen: one in 16
COTANGENTS = 3  # random ones, from which the effect of a layer's scale is seen
CLEARLY = 10  # times what counts as none: an effect that one of them is enough to see


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
        """|W0| / |W| of weights whose scale has no effect on the outputs, and of the biases beside them."""
        layers = self._layers()
        sizes = {k: (self.first[k].norm().item(), self.subject.state[k].norm().item()) for k in layers}
        grown = {k: before / size for k, (before, size) in sizes.items() if before and size and before != size}
        if not grown:
            return {}
        idle = self._without_effect(self.subject.state)
        if idle:
            idle &= self._without_effect(self.first)
        chosen = self._in_vain({k: {name: grown[k] for name in (k, layers[k]) if name} for k in grown if k in idle})
        del self._few_runs  # their graphs
        return chosen

    def _in_vain(self, scales: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Of layers whose scale seems to have no effect, those that can be scaled so far: a saturated layer has no derivative,
        and an effect all the same. All of them if they can together, else one after another."""
        now, then = self._few_runs
        size = self.wide(now.f - then.f).norm()

        def idle(factors: Mapping[str, float]) -> bool:
            f = self.run(self._scaled(factors), self.few, 0, record=False).f
            return bool(self.wide(f - now.f).norm() <= IN_VAIN * size)

        together = {name: s for factors in scales.values() for name, s in factors.items()}
        if not together or idle(together):
            return together
        kept: dict[str, float] = {}
        for factors in scales.values():
            kept = {**kept, **factors} if idle({**kept, **factors}) else kept
        return kept

    def _scaled(self, factors: Mapping[str, float]) -> State:
        """The weights of now, some times a number."""
        state = self.subject.state
        return state.exchanged({id(state[k]): (state[k].detach() * s).requires_grad_() for k, s in factors.items()})

    @cached_property
    def last(self) -> State:
        """The weights of now, at their initial scale where scale has no effect."""
        return self._scaled(self.scales) if self.scales else self.subject.state

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

    def _without_effect(self, state: State) -> set[str]:
        """Weights for which <W, df/dW> + <b, df/db> vanishes, for random combinations of the outputs of a few examples. Where the
        first of these shows that every weight has an effect, the others are not asked."""
        layers, runs = self._layers(), self._few_runs
        run, moved = runs[state is self.first], self.wide(runs[0].f - runs[1].f)
        names = list(dict.fromkeys([*layers, *filter(None, layers.values())]))
        draw, eps = torch.Generator().manual_seed(0), 8 * torch.finfo(state.precision).eps
        effects: dict[str, float] = dict.fromkeys(layers, 0.0)
        rounding: dict[str, float] = dict.fromkeys(layers, 0.0)
        size, expected = 0.0, moved.square().sum().item()

        def idle(size: float) -> set[str]:
            beside = IN_VAIN * math.sqrt(size) + IN_VAIN_BESIDE * math.sqrt(max(effects.values(), default=0.0))
            return {k for k, effect in effects.items() if rounding[k] > 0  # a weight that is not used says nothing
                    and math.sqrt(effect) <= beside + eps * math.sqrt(rounding[k])}

        for combination in range(COTANGENTS):
            V = torch.randn(run.f.shape, generator=draw, dtype=torch.float64).to(run.f)
            known = {k: (self.inner(state[k], d), state[k].detach().norm().item() * d.norm().item())
                     for k, d in zip(names, run.in_turns(V, [state[k] for k in names]), strict=True)}
            size += (self.wide(V) * moved).sum().item() ** 2
            for weight, bias in layers.items():
                parts = [known[k] for k in (weight, bias) if k]
                effects[weight] += sum(effect for effect, _ in parts) ** 2
                rounding[weight] += sum(rounded for _, rounded in parts) ** 2
            if not combination and not idle(CLEARLY ** 2 * max(size, expected)):
                return set()
        return idle(size)

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
        bench = self.bench(state, x)
        with batch_statistics(self.norms) if self.mixes else contextlib.nullcontext():
            run = passed(bench, subject.survey, seed, None, plain) if record else bench.run(record=False, seed=seed)
        if record:
            check_calls(subject.survey, x, run.calls, bench.n)
        check_finite(run.f)
        return run

    def bench(self, state: State, x: Any) -> Bench:
        return replace(self.subject.source, state=state).bench(x)

    def _look(self) -> None:
        """Where no other pass of this measurement has looked whether maps are read as they should be, in a first measurement."""
        subject = self.subject
        if subject.audit is None or subject.audit.done or subject.measured % UNTRUSTED != 1:
            return
        survey, most = subject.survey, min(subject.probe.chunk, subject.probe.n)
        size = fitting(min(subject.memory // 2, subject.memory - self._weights()), self._each(), most, survey.drawn)
        for chunk in chunks(subject.source, subject.x, size, maps=list(survey.batched)):
            chunk.recording.look()

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
        self._look()
        for i, rows in enumerate(self.blocks):
            self._step(i, rows, then, pushed)
            self.give_back()
        self.__dict__.pop("direction", None)  # as large as the model, and nobody looks at it again

    def _step(self, i: int, rows: slice, then: bool, pushed: Callable[[Stretch, Any], Stretch] | None) -> None:
        """One block of examples; nothing of it is held when the next one begins."""
        x, last = self.examples(rows), self.last  # which takes passes of its own, when it is first asked for
        with timed(self.subject.device) as seconds:
            now = self.run(last, x, rows.start)
        self.subject.forwards.add(rows.stop - rows.start, seconds())
        stretch = Stretch(self.subject, rows, self._group(i, rows), now)
        if pushed is not None:
            stretch = pushed(stretch, x)
        if stretch.then is None and then:
            stretch = replace(stretch, then=self.run(self.first, x, rows.start))
        for listener in self.listeners:
            listener.take(stretch)
