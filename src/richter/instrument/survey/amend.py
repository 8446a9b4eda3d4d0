"""What a survey of the first examples could not know: maps that are used for other examples only, and maps that cannot be read
for many examples at a time after all. They are read one example at a time, or, if that does not rebuild autograd's gradients
either, refused with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from richter.core import Mark, Remark
from richter.instrument.capture import Pass, State, select
from richter.instrument.survey.audit import Doubt
from richter.instrument.survey.examine import SURVEYED, check_alone, check_sums
from richter.instrument.survey.layouts import Bench, grouped
from richter.instrument.survey.maps import MapInfo, Survey, with_siblings
from richter.instrument.survey.verify import Tally, describe, verify_one
from richter.layers import LinearMap

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
        later = {k: (m.info, W) for k, m in self.later.items() if k not in survey.maps and (W := m.matrix(state)) is not None}
        self.later = {k: m for k, m in self.later.items() if k in later or k in survey.maps}
        maps = survey.maps | {k: info for k, (info, _) in later.items()}
        matrices = survey.matrices | {k: W for k, (_, W) in later.items()}
        maps = {k: replace(info, layouts=(), rows=()) if k in self.singly else info for k, info in maps.items()
                if k not in self.refused}
        notes = {k: remark for k, remark in survey.notes.items() if k not in maps} | self.refused
        biases = {k: own for k, own in survey.biases.items() if k not in self.biases}
        return describe(replace(survey, maps=maps, matrices=matrices, notes=notes, biases=biases))


def amended(known: Survey, bench: Bench, doubt: Doubt, kept: Amendments) -> Survey:
    """The survey without what is in doubt: ``bench`` has the inputs of the chunk in which the doubt arose. What changes is also
    ``kept``."""
    kept.biases |= set(doubt.biases)
    new = set(doubt.maps) - known.maps.keys()
    doubted = set(doubt.maps) - new
    for i in _order(bench.n, doubt.example):
        missing = new - kept.later.keys()
        if not missing and i != doubt.example:
            break
        one = bench.alone(i, seed=i)
        kept.later |= _described(bench, one, missing)
        kept.refused |= verify_one(one, [*missing, *doubted])
    kept.refused |= {k: Remark(Mark.REFUSED, IN_BATCHES) for k in new - kept.later.keys()}
    failed = {k for k in doubted - kept.refused.keys() if not known.maps[k].layouts}  # it was read alone already
    kept.refused |= {k: _unexplained(k) for k in failed}
    maps = known.maps | {k: m.info for k, m in kept.later.items()}
    kept.singly |= maps.keys() & with_siblings(maps, doubt.maps)
    _check_mixing(bench, known, doubt, kept.singly)
    result = kept.apply(known, bench.state)
    if _same(result, known):  # nothing more can be done about it
        kept.refused |= {k: _unexplained(k) for k in doubt.maps}
        result = kept.apply(known, bench.state)
    return result


def _same(survey: Survey, other: Survey) -> bool:
    kinds = ("notes", "maps", "biases")
    return all(getattr(survey, kind).keys() == getattr(other, kind).keys() for kind in kinds) and all(
        info.layouts == other.maps[k].layouts for k, info in survey.maps.items())


def _order(n: int, first: int) -> Iterable[int]:
    """All examples, that in doubt first."""
    return [first, *(i for i in range(n) if i != first)]


def _described(bench: Bench, one: Pass, names: set[str]) -> dict[str, Later]:
    """Maps that a pass of one example has used, read one example at a time."""
    weights = {id(weight): name for name, weight in reversed(bench.state.items())}
    g = dict(zip(map(id, one.calls), one.backward(torch.ones_like(one.f))[0], strict=True))
    later = {}
    for name, calls in grouped(one.calls).items():
        if name in names:
            first = calls[0]
            tally = Tally(first, [()] * len(calls), regular=False)
            for c in calls:
                tally.add(c, c.inputs(), c.map.outputs(c.module, g[id(c)]))
            info = tally.info(bench.modules.get(id(first.module), ""), weights.get(id(first.weight)), 1)
            later[name] = Later(info, first.map, first.module, first.weight.detach(), bench.state)
    return later


def _check_mixing(bench: Bench, known: Survey, doubt: Doubt, singly: set[str]) -> None:
    """If gradients of single examples do not add up to that of a batch, there are none."""
    if known.drawn or bench.n < 2:
        return
    check_alone(bench, bench.run(record=False), doubt.example)  # some models mix large batches only
    few = torch.tensor(list(_order(bench.n, doubt.example))[:SURVEYED])
    names = dict.fromkeys([*(w for k in singly if k in known.maps and (w := known.maps[k].weight)), *doubt.biases])
    batch = replace(bench, x=select(bench.x, few))
    run = batch.run(record=False)
    R = torch.randn(run.f.flatten(1).shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(run.f)
    weights = [bench.state[w] for w in names]
    check_sums(batch, R, weights, {id(w): d for w, d in zip(weights, run.backward(R, weights)[1], strict=True)})


def _unexplained(name: str) -> Remark:
    return Remark(Mark.REFUSED, f"layer {name!r}: on some examples of the probe, what it read and what is asked of it do not "
                                f"rebuild its weight gradient. The weight is also used in a way that is not a linear map of one "
                                f"input; its tangent kernel is exact, by gradients of single examples")
