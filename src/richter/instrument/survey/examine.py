"""The survey: which maps there are, how examples lie in them, do examples mix, and is what was captured right?"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from richter.core import CaptureError, Mark, MixingError, Remark
from richter.core.freed import trim
from richter.core.sizes import SMALL
from richter.core.text import NO_MAP
from richter.instrument.capture import (
    Inputs,
    Output,
    Pass,
    Scale,
    State,
    Wanted,
    Weight,
    check_finite,
    same_bits,
    select,
    weight_bytes,
)
from richter.instrument.survey.ends import given, readouts
from richter.instrument.survey.layouts import UNABLE, Bench, expanded, layouts_of, rounding, tolerance
from richter.instrument.survey.maps import Survey
from richter.instrument.survey.splits import splits
from richter.instrument.survey.trained import check_trained
from richter.instrument.survey.verify import MIXING, Verified, biases, coarsest, describe, verify, verify_one

SURVEYED, FEWEST = 8, 4  # examples, and how many it takes at least
OUTPUTS = 8  # arrays of their outputs that a survey holds
UNCALLED = Remark(Mark.IDLE, "never called on the probe")
UNREACHED = Remark(Mark.IDLE, "never used: no gradient reaches it from the output on the probe (read by .data, detached, "
                              "wrapped in a new Parameter or cached by an earlier call, it is a constant)")
UNKNOWN = Remark(Mark.UNDEFINED, f"{NO_MAP}: its tangent kernel is exact, by gradients of single examples, and its feature "
                                 f"correlations are not known")


def survey(model: nn.Module, x: Inputs, state: State, output: Output | None = None, memory: float = math.inf) -> Survey:
    """Look at ``x`` (a few examples): run all of them and the inner ones, and compare. Where the graphs of all have no room in
    ``memory``, it takes fewer of them; and where these have none, blocks of the model are computed again for every backward
    pass."""
    bench = Bench(model, x, state, output)
    _check_modes(model)
    part, weight = _weighed(bench)
    m, item = bench.inner.stop - 1, part.f.element_size()
    graph, light, asked = weight.kept // (m * item), weight.light // (m * item), sum(c.shape.numel() for c in part.calls) // m
    fewer = bench if bench.n <= FEWEST else replace(bench, x=select(x, slice(0, FEWEST)))
    for some, kept in ((bench, graph), (fewer, graph), (replace(fewer, anew=weight.blocks), light)):
        bench = some
        if item * looked(model, bench.n, kept, asked, part.f.numel() // m) <= max(memory, SMALL):
            break
    bench = replace(bench, splits=splits(bench))
    if bench.splits or bench.inner.stop - 1 != m:
        part = bench.glance(bench.inner)
    m = bench.inner.stop - 1
    first = bench.glance()
    drawn = draws(bench, first, part)
    first, layouts, expand = expanded(bench, first, layouts_of(first, part, bench.n, m))
    del part, first
    trim(weight_bytes(model))
    whole = bench.run(expand=dict.fromkeys(expand, bench.n))
    verified = verify(bench, whole, layouts, drawn)
    result = describe(Survey(
        verified.maps, expand, notes=verified.notes, outputs=whole.f[0].numel(), shape=tuple(whole.f.shape[1:]), drawn=drawn,
        differentiates=whole.differentiates, accumulates=verified.accumulates, splits=bench.splits,
        given=given(whole), readouts=readouts(whole),
        matrices=matrices_of(whole), graph=graph, blocks=weight.blocks, light=light, examples=bench.n))
    result = result.lightened() if bench.anew else result
    result.biases = biases(model, result, verified, whole.aliases, tolerance(coarsest(whole.state, whole.f)))
    result = _one_by_one(bench, result, verified)
    result.notes |= _idle(model, result, whole)
    f = whole.f.detach()
    verified.tallies.clear()  # calls hold the graph
    del whole
    check_trained(bench, f, verified)
    return result


def _weighed(bench: Bench) -> tuple[Pass, Weight]:
    """A pass of the inner examples, through which nothing goes backward, and what it would keep. A model that differentiates
    inside its forward pass must keep it; torch.func allows no such look."""
    for hold in (False, True):
        scale = Scale(bench.model, bench.state, hold)
        with contextlib.suppress(Wanted, RuntimeError):
            with scale:
                part = bench.run(bench.inner)
            weight = scale.weight(c.read for c in part.calls)
            return part, Weight(weight.kept) if part.differentiates or bench.state.parametrised else weight
    return bench.run(bench.inner), Weight()


def looked(model: nn.Module, n: int, graph: int, asked: int, outputs: int) -> int:
    """Numbers that a look at n examples holds: their graphs, what two halves of them ask, arrays of their outputs, the gradients
    of all weights, and the largest of them three times more: in what maps add up to, its parts, and the difference."""
    weights = [p.numel() for p in model.parameters()]
    return n * (graph + 2 * asked + OUTPUTS * outputs) + sum(weights) + 3 * max(weights, default=0)


def _one_by_one(bench: Bench, result: Survey, verified: Verified) -> Survey:
    """Maps that are read one example at a time are looked at on one example; those that fail are refused. The gradients of such
    parameters, and of those without a map, are taken from single examples: they must be the batch's."""
    names = [name for name, info in result.maps.items() if not info.layouts]
    own = {id(bench.state[name]) for name in {*result.structured, *result.biases}}
    loose = {key: bench.state[name] for name, p in bench.model.named_parameters()
             if p.requires_grad and (key := id(bench.state[name])) in verified.exact and key not in own}
    if loose and not result.drawn:
        check_sums(bench, verified.R, list(loose.values()), verified.exact)
    if not names:
        return result
    refused = verify_one(bench.alone(0), names)
    return describe(replace(result, notes=result.notes | refused,
                            maps={name: info for name, info in result.maps.items() if name not in refused}))


def matrices_of(run: Pass) -> dict[str, Tensor]:
    """Of every map that is called."""
    return {c.name: c.map.matrix(c.module, c.weight.detach()) for c in run.calls}


def _check_modes(model: nn.Module) -> None:
    """A batch norm in train mode is known to mix, and named."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise MixingError(f"layer {name!r} is a {type(module).__name__} in train mode: {MIXING}")


def draws(bench: Bench, whole: Pass, part: Pass, again: bool = False) -> bool:
    """Do outputs differ from pass to pass (dropout)? They are compared with those of fewer examples, of single ones, and of the
    same ones among others: if they differ there and not from pass to pass, examples mix, and an error says so. ``again``: mixing
    is looked for by the audit."""
    _check_outputs(bench, whole, part)
    off = _difference(whole.f[bench.inner], part.f, whole.f)
    if not again:
        _check_neighbours(bench, whole)
        off = max(off, *(_alone(bench, whole, i) for i in (0, bench.n - 1)))
    if not off > math.sqrt(torch.finfo(coarsest(bench.state, whole.f)).eps):
        return bench.model.training and _draws_within(bench)
    if torch.equal(bench.glance(record=False, seed=1).f, whole.f):
        raise _mixing(off)
    _check_repeatable(bench, whole)
    return True


def _check_repeatable(bench: Bench, whole: Pass) -> None:
    """The same inputs, weights and seed give the same outputs, or there is no one function to measure."""
    change = _difference(bench.glance(record=False).f, whole.f, whole.f)
    if change > math.sqrt(torch.finfo(coarsest(bench.state, whole.f)).eps):
        raise CaptureError(f"the model's outputs change by {change:.1g} (relative) from one call to the next, with the same "
                           f"inputs, weights and random seed. It keeps a state between calls, or draws random numbers from a "
                           f"generator of its own, so there is no one function to measure. Reset the state at the start of "
                           f"forward(), or keep it in an attribute or a buffer of a module: these are the same in every pass.")


def _draws_within(bench: Bench) -> bool:
    """Does what layers read differ from pass to pass? Outputs need not: a head that was initialised with zeros has the same."""
    a, b = (bench.glance(seed=seed).calls for seed in (0, 1))
    return len(a) != len(b) or any(not same_bits(c.read, d.read) for c, d in zip(a, b, strict=True))


def _check_neighbours(bench: Bench, whole: Pass) -> None:
    """Each half of the examples among copies of itself, in a batch of the same size with the same draws: nothing but rounding may
    change its outputs, and rounding changes them no more than another order does."""
    n, here = bench.n, torch.arange(bench.n)
    others = [here % (n // 2), n // 2 + here % (n - n // 2)]
    kept = [here[:n // 2], here[n // 2:]]
    off = 0.0
    for among, mine in zip(others, kept, strict=True):
        index = torch.where(torch.isin(here, mine), here, among.roll(1))
        run = replace(bench, x=select(bench.x, index)).glance(record=False)
        off = max(off, _difference(run.f[mine], whole.f[mine], whole.f) if run.f.shape == whole.f.shape else math.inf)
    eps = torch.finfo(coarsest(bench.state, whole.f)).eps
    if off > 32 * eps:
        turned = replace(bench, x=select(bench.x, here.flip(0))).glance(record=False)
        rounding = _difference(turned.f.flip(0), whole.f, whole.f) if not _drawing(bench, whole) else 0.0
        if off > max(32 * eps, 10 * rounding):
            _check_repeatable(bench, whole)
            raise _mixing(off)


def _drawing(bench: Bench, whole: Pass) -> bool:
    return not torch.equal(bench.glance(record=False, seed=1).f, whole.f)


def _mixing(off: float) -> MixingError:
    return MixingError(f"the output of an example changes by {off:.1g} (relative) with the other examples in its batch: {MIXING}")


def _check_outputs(bench: Bench, whole: Pass, part: Pass) -> None:
    """Shapes and numbers as they should be."""
    f, n, m = whole.f, bench.n, bench.inner.stop - 1
    if f.dim() == 0 or not f.numel() or f.shape[0] != n or part.f.shape[0] != m:
        raise CaptureError(f"the model's output has shape {tuple(f.shape)} for {n} examples. Richter needs the examples "
                           f"on the first axis: use output=lambda out: ... to pick or transpose it (a loss averaged over "
                           f"the batch is not an output).")
    if part.f.shape[1:] != f.shape[1:]:
        raise MixingError(f"the model's output has shape {tuple(f.shape)} for {n} examples and {tuple(part.f.shape)} for {m} of "
                          f"them: what one example gives depends on how many others there are (similarities between the "
                          f"examples of a batch, or padding to its longest). Pick outputs that each example has by itself, e.g. "
                          f"the embeddings: output=lambda out: ....")
    check_finite(f)


def _alone(bench: Bench, whole: Pass, i: int) -> float:
    """How much the output of one example changes when it is alone; 0 for models that cannot run on one."""
    try:
        f = bench.glance(slice(i, i + 1), record=False).f
    except UNABLE:
        return 0.0
    among = whole.f[i:i + 1]
    return _difference(f, among, whole.f) if f.shape == among.shape else 0.0


def check_alone(bench: Bench, whole: Pass, i: int) -> None:
    """Does an example give alone what it gives among the others?"""
    off = _alone(bench, whole, i)
    if off > math.sqrt(torch.finfo(coarsest(bench.state, whole.f)).eps):
        _check_repeatable(bench, whole)
        raise _mixing(off)


def check_same(bench: Bench, whole: Pass, order: Tensor, outputs: Tensor) -> None:
    """Has each example the same outputs among all others as among half of them? ``outputs`` are those of ``order``."""
    f = whole.f.detach()
    if outputs.shape != f.shape:
        raise MixingError(f"the model's output has shape {tuple(f.shape)} for {len(f)} examples and another one for half of "
                          f"them: what one example gives depends on the others. Pick outputs that each has by itself.")
    off = (f[order.to(f.device)] - outputs).reshape(len(f), -1).abs().amax(1) / (f.abs().max() + 1e-300)
    if off.max() > math.sqrt(torch.finfo(coarsest(bench.state, f)).eps):
        check_alone(bench, whole, int(order[off.argmax()]))
        check_alone(replace(bench, x=select(bench.x, order)), replace(whole, f=outputs), int(off.argmax()))


def _difference(f: Tensor, other: Tensor, scale: Tensor) -> float:
    """The largest difference, relative to the largest of all outputs."""
    return (f - other).detach().abs().max().item() / (scale.detach().abs().max().item() + 1e-300)


def check_sums(bench: Bench, R: Tensor, weights: Sequence[Tensor], exact: dict[int, Tensor]) -> None:
    """The gradients of single examples must add up to that of the batch, or there are no gradients of single examples. One that
    is nothing but rounding beside those of other weights (of a shift before a softmax) says nothing."""
    added, largest = [torch.zeros(w.shape, dtype=w.dtype, device=w.device) for w in weights], 0.0
    for i in range(bench.n):
        run = bench.alone(i, record=False)
        if i == 0:
            others = list({id(w): w for w in run.aliases.values()}.values())
            largest = max(float(d.norm()) for d in run.backward(R[i], others)[1])
        gradients = run.backward(R[i], weights)[1]
        added = [a + d for a, d in zip(added, gradients, strict=True)]
    precision = coarsest(bench.state, R)
    noise = rounding(precision) * largest
    for w, a in zip(weights, added, strict=True):
        if (a - exact[id(w)]).norm() > 10 * tolerance(precision) * (a.norm() + exact[id(w)].norm()) + noise:
            raise MixingError(f"the gradients of single examples do not add up to that of the batch (in its backward pass, if "
                              f"not in its forward pass): {MIXING}")


def _idle(model: nn.Module, survey: Survey, whole: Pass) -> dict[str, Remark]:
    """Remarks on weight matrices that no map speaks of: does autograd use them?"""
    users: dict[int, list[str]] = {}  # id of a weight -> the maps that it is
    for c in whole.calls:
        users.setdefault(id(c.weight), []).append(c.name)
    computed = tuple(f"{m.module}." if m.module else "" for m in survey.maps.values() if m.weight is None)
    silent: dict[str, tuple[str, nn.Module]] = {}
    remarks = {}
    for owner, module in model.named_modules():
        for attribute, p in module._parameters.items():
            name = f"{owner}.{attribute}" if owner else attribute
            label = owner if attribute == "weight" else name
            if p is None or not _matrix(attribute, p) or name.startswith(computed) or label in survey.notes \
                    or name not in whole.aliases or any(k == label or k.startswith(f"{label}.") for k in survey.maps):
                continue
            shared = users.get(id(whole.aliases[name]))
            if shared is None:
                silent[label] = (name, module)
            elif attribute == "weight":
                remarks[label] = Remark(Mark.IDLE, f"not called itself: its weight is used as {shared[0]!r}")
    places = [whole.aliases[name] for name, _ in silent.values()]
    with whole.state.in_place():
        gradients = torch.autograd.grad(whole.f.sum(), places, retain_graph=True, allow_unused=True) if places else ()
    whole.state.accumulated()  # is let go: whether a model adds to .grad is asked of the pass
    for (label, (_, module)), alias, gradient in zip(silent.items(), places, gradients, strict=True):
        used = gradient is not None or (whole.accumulates and id(alias) in whole.adds)
        reachable = module in whole.called or isinstance(module, (nn.ParameterList, nn.ParameterDict))  # these are never called
        remarks[label] = UNKNOWN if used else UNREACHED if reachable else UNCALLED
    return remarks


def note_called(bench: Bench, survey: Survey, run: Pass) -> None:
    """Layers that none of the first examples has called and these do, though not as a linear map: their remark is another one."""
    idle = [label for label, remark in survey.notes.items() if remark == UNCALLED]
    called = {bench.modules.get(id(module)) for module in run.called} if idle else ()
    if any(label in called or label.rpartition(".")[0] in called for label in idle):
        others = {label: remark for label, remark in survey.notes.items() if label not in idle}
        survey.notes.update(_idle(bench.model, replace(survey, notes=others), bench.run()))


def _matrix(attribute: str, p: Tensor) -> bool:
    """Is this a weight matrix, and not a bias, a gain or a token in the shape of one?"""
    return p.dim() >= 2 if attribute == "weight" else sum(length > 1 for length in p.shape) >= 2
