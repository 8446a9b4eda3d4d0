"""Conformance tests for extensions of Richter: ``check_layer``, ``check_measure``, ``check_theory``, ``check_kernel`` and
``check_experiment`` raise AssertionError with a sentence that names the fault."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from richter.core import Prediction
from richter.experiments import running
from richter.experiments.frame import SCALES, Claim, Experiment, Results
from richter.experiments.ledger import figure_name, figures_at
from richter.experiments.outcomes import PROTOCOLS, REASONS, kind_of
from richter.experiments.seeds import WAYS
from richter.instrument.capture import Call, forward, quiet, state_of
from richter.instrument.observe import Observer
from richter.instrument.probe import Probe
from richter.instrument.snapshot import Snapshot
from richter.instrument.stream import by_example
from richter.instrument.survey import survey
from richter.kernels.ntk import ntk
from richter.layers import View, view_of
from richter.learners.checking import check_kernel
from richter.measures import Measure
from richter.models import mlp
from richter.report.drawing import faults
from richter.theory import Theory

EXAMPLES = 66  # examples on which measures are checked; feature comparisons need at least 64
__all__ = ["check_experiment", "check_kernel", "check_layer", "check_measure", "check_theory"]


def check_experiment(e: Experiment, store: str | Path, *, run: bool = True) -> None:
    """Check that ``e`` is a complete experiment. Its settings are one frozen dataclass, and every claim has a source for its bar
    and a control. With ``run``, every claim holds at the small scale, every control fails, and the figures are drawn."""
    _require(dataclasses.is_dataclass(e.smoke) and type(e.smoke) is type(e.paper)
             and vars(type(e.smoke))["__dataclass_params__"].frozen,
             f"{e.name}: smoke and paper must be settings of one frozen dataclass.")
    _require(e.name.startswith(f"{e.ref.paper}_"), f"{e.name}: its name begins with its paper, {e.ref.paper}_.")
    _require(bool(e.claims), f"{e.name}: an experiment without a claim is a picture.")
    _require(len({c.text for c in e.claims}) == len(e.claims), f"{e.name}: two claims have the same text.")
    for c in e.claims:
        _check_claim(e, c)
    e.settings("paper", **e.start)
    _check_places(e)
    _check_words(e)
    if not run:
        return
    checked = running.check(e, "smoke", store)
    for f in checked.findings:
        _require(f.verdict != "does not hold", f"{e.name}: {f.claim.text}: {f.value:.6g} is not {f.claim.expect}.")
        _require(not f.failure, f"{e.name}: {f.claim.text}: {f.value:.6g} {f.failure}.")
    for f in running.with_controls(checked, store).against:
        where = f"on {f.control.text if f.control else 'its control'}"
        _require(not f.invalid, f"{e.name}: {f.claim.text} has no number {where}, so the control proves nothing.")
        _require(not f.holds, f"{e.name}: {f.claim.text} holds ({f.value:.6g}) {where}, where it must fail.")
    for name, draw in e.figures.items():
        figure = draw(checked.results)
        _require(bool(figure.axes), f"{e.name}: the figure {name} is empty.")
        _require(not (lacking := faults(figure)), f"{e.name}: the figure {name}: {'; '.join(lacking)}.")


def _check_places(e: Experiment) -> None:
    """Check that every place has a claim and, if it is a figure, a drawing, unless ``missing`` names it."""
    for place in e.missing:
        _require(place in e.covers, f"{e.name}: missing={place!r} is not a place that the experiment covers.")
    for place in (place for place in e.covers if place not in e.missing):
        _require(any(place in (c.places or (e.ref.place,)) for c in e.claims),
                 f"{e.name}: {place} has no claim of its own: give one places=({place!r},), or say in missing what is not there.")
        _require(not place.startswith("Fig.") or bool(figures_at(place, e)),
                 f"{e.name}: {place} has no drawing of its own: add {figure_name(e.ref.paper, place)!r} to figures, or say in "
                 f"missing what is not there.")


def _check_words(e: Experiment) -> None:
    """Check what the ledger says of each claim: whose it is, in one sentence, by which protocol."""
    known = ", ".join(PROTOCOLS)
    for c in e.claims:
        where = f"{e.name}: the claim {c.text!r}"
        _require(not c.reason or c.reason in REASONS, f"{where} has the reason {c.reason!r}; known are {', '.join(REASONS)}.")
        _require(not (c.own and (c.reason or c.second or c.direction)),
                 f"{where} is own=True: reason, second and direction are for claims of the paper.")
        _require(c.own or not c.rival, f"{where} names a rival, which only claims with own=True do: give the others a control.")
        for place in c.places or (e.ref.place,):
            word, details = kind_of(e.protocol_of(c, place))
            _require(bool(c.says) or c.own,
                     f"{where} does not say what the paper claims: give it says='...' with the paper's number, or own=True if "
                     f"the paper makes no such claim.")
            _require(len(c.says) <= 160, f"{where} says {len(c.says)} characters; a line of the ledger has room for 160.")
            _require(c.own or word in PROTOCOLS,
                     f"{where} has the protocol {word!r} for {place}: give the experiment or the claim protocol='...', which "
                     f"begins with one of {known}.")
            _require(c.own or word == "exact" or 0 < len(details) <= 120,
                     f"{where}: after {word!r} say what differs from the paper, in at most 120 characters: "
                     f"protocol='reduced: 400 of 4,000 images'.")
    for place in e.partial:
        _require(place in e.covers, f"{e.name}: partial={place!r} is not a place that the experiment covers.")


def _check_claim(e: Experiment, c: Claim) -> None:
    """Raise an AssertionError unless a claim of an experiment can be judged."""
    _require(math.isfinite(c.expect.low) or math.isfinite(c.expect.high), f"{e.name}: the claim {c.text!r} cannot fail.")
    _require(bool(c.source), f"{e.name}: the claim {c.text!r} does not say where its bar comes from.")
    _require(bool(c.rivals), f"{e.name}: the claim {c.text!r} has no control, so it may hold of anything.")
    _require(c.by in WAYS, f"{e.name}: the claim {c.text!r} is by {c.by!r}; known are {', '.join(WAYS)}.")
    for control in c.rivals:
        _require(e.settings("smoke", **control.changes) != e.smoke, f"{e.name}: the control of {c.text!r} changes nothing.")
    for place in c.places:
        _require(place in e.covers, f"{e.name}: the claim {c.text!r} is about {place}, which the experiment does not cover.")
    for scale in SCALES if c.over else ():
        Results(None, e.tasks(e.settings(scale)), ()).distinct(c.over)


def check_layer(layer: nn.Module, x: Tensor, name: str = "layer") -> None:
    """Check that the registered view of ``layer`` is correct. ``x``: a valid batch of at least two examples.

    Checks: every weight entry is in exactly one map; z = W h (+ b) rebuilds the layer's output; h and g rebuild autograd's
    gradient; the tangent kernel equals per-example gradients.
    """
    _require(len(x) >= 2, f"x has {len(x)} examples; at least two are needed to see which axis they are on.")
    model = nn.Sequential()
    model.add_module(name, layer)
    view = view_of(name, layer)
    _require(bool(view), f"no view is registered for {type(layer).__name__} (or it overrides the forward of the type that is): "
                         f"call richter.layers.register first.")
    _check_cover(layer, view)
    with quiet(model):
        state = state_of(model)
        layer_survey = survey(model, x, state)
        recorded = forward(model, x, state)
        _require(not any(k in layer_survey.notes for k in (name, *(f"{name}.{s}" for s in view))),
                 "the captured inputs and outputs do not rebuild the gradient: "
                 + "; ".join(remark.text for remark in layer_survey.notes.values()))
        for c in recorded.calls:
            info = layer_survey.maps[c.name]
            _require(bool(info.layouts), f"map {c.name!r}: the examples cannot be found on one axis of what outputs() returns.")
            h = by_example(c.inputs(), len(x), info.layouts[0])
            _require(h.shape[0] == len(x), f"inputs() of {c.name!r} gives {tuple(h.shape)}; examples must come first.")
        _check_affine(recorded.calls, recorded.f)
    K = ntk(model, x, form="full")
    exact = _kernel_by_autograd(model, x)
    error = ((K - exact).norm() / exact.norm()).item() if exact.norm() else K.norm().item()
    _require(error < 1e-4, f"the tangent kernel differs from per-example gradients by {error:.2g} (relative).")


def _check_cover(layer: nn.Module, view: View) -> None:
    """Check that every entry of a weight is in exactly one map."""
    weights: dict[str, list[Tensor]] = {}
    for suffix, m in view.items():
        weight = getattr(layer, m.weight)
        index = m.matrix(layer, torch.arange(weight.numel(), device=weight.device).view(weight.shape)).reshape(-1)
        _require(len(index.unique()) == len(index), f"matrix() of map {suffix!r} repeats entries of {m.weight!r}.")
        weights.setdefault(m.weight, []).append(index)
    for name, parts in weights.items():
        size, covered = getattr(layer, name).numel(), len(torch.cat(parts).unique())
        _require(covered == size, f"the maps cover {covered} of {size} entries of {name!r}: kernels would miss the rest.")


def _check_affine(calls: list[Call], z: Tensor) -> None:
    """Check that z - W h, the bias, is equal at all positions."""
    for c in calls:
        m, h, W = c.map, c.inputs(), c.map.matrix(c.module, c.weight.detach())
        if m.outputs(c.module, z.detach()).numel() > z.numel():
            continue  # overlapping patches, of which z contains only the sum
        if m.kind == "lookup":
            wh = W.T[h.clamp(min=0)]
        elif m.kind == "diagonal":
            wh = h * W
        else:
            wh = torch.einsum("nsi,oi->nso" if m.kind == "dense" else "nsri,roi->nsro", h, W)
        rest = m.outputs(c.module, z.detach()) - wh
        offset = rest.reshape(-1, *rest.shape[2:])
        keep = (h.reshape(-1) >= 0) if m.kind == "lookup" else torch.ones(len(offset), dtype=torch.bool)
        spread = (offset[keep] - offset[keep][:1]).norm() / (m.outputs(c.module, z.detach()).norm() + 1e-30)
        _require(spread.item() < 1e-4, f"map {c.name!r}: z - W h is not a constant bias (relative spread {spread.item():.2g}), "
                                       f"so inputs(), outputs() or matrix() do not fit together.")


def _kernel_by_autograd(model: nn.Module, x: Tensor) -> Tensor:
    """Tangent kernel by one backward pass per example and output."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(len(x)):
        f = model(x[i:i + 1]).flatten()
        for o in f:
            gradients = torch.autograd.grad(o, parameters, retain_graph=True, allow_unused=True)
            rows.append(torch.cat([(torch.zeros_like(p) if d is None else d.to_dense()).flatten()
                                   for p, d in zip(parameters, gradients, strict=True)]))
    J = torch.stack(rows)
    return (J @ J.T).view(len(x), len(f), len(x), len(f))


def check_measure(*measures: Measure) -> None:
    """Check that measures obey the laws of the instrument, on small networks, at the second of two snapshots, with held-out
    examples. Values are within the bounds, and NaN only with a note. Neither the chunk size nor the order of examples changes
    them. Each measure has a reference. Checking several measures together is faster."""
    _require(bool(measures), "check_measure() checks nothing: give it a measure.")
    for m in measures:
        _require(m.card.ref is not None, f"{m.name}: a measure needs a reference: card=Card('title', ref=Ref('paper', "
                                         f"'Eq. 1')).")
    draw = torch.Generator().manual_seed(0)
    convolution = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), mlp([64, 3], seed=1))
    for model, shape in ((mlp([6, 8, 5, 3], seed=0), (6,)), (convolution, (2, 4, 4))):
        model = model.double()
        x = torch.randn(EXAMPLES, *shape, generator=draw, dtype=torch.float64)
        y = torch.arange(EXAMPLES) % 3
        start = {k: v + 0.1 * torch.randn(v.shape, generator=draw, dtype=v.dtype) for k, v in model.state_dict().items()}
        aside = (torch.randn(EXAMPLES, *shape, generator=draw, dtype=torch.float64), y)
        snap = _second(measures, model, start, Probe(x, y, kernel_examples=None, weight_decay=0.1, held_out=aside))
        for m in measures:
            rows = [r for r in snap.rows if r.measure == m.name]
            _require(len(rows) > 0, f"{m.name}: no layer got a row.")
            _require(any(math.isfinite(r.value) for r in rows), f"{m.name}: every value is NaN ({rows[0].note}).")
            for r in rows:
                _require(math.isfinite(r.value) or bool(r.note), f"{m.name} of {r.layer!r} is {r.value} without a note.")
                _require(not math.isfinite(r.value) or r.value in m.card.bounds.widened(1e-9 * (1 + abs(r.value))),
                         f"{m.name} of {r.layer!r} is {r.value}, outside its bounds {m.card.bounds}.")
        order = torch.randperm(EXAMPLES, generator=draw)
        options: dict[str, Any] = {"kernel_examples": None, "weight_decay": 0.1, "held_out": aside}
        for what, other in (("the size of chunks", Probe(x, y, chunk=7, **options)),
                            ("the order of examples", Probe(x[order], y[order], **options))):
            for a, b in zip(snap.rows, _second(measures, model, start, other).rows, strict=True):
                same = math.isnan(a.value) == math.isnan(b.value) and (math.isnan(a.value) or math.isclose(
                    a.value, b.value, rel_tol=1e-8, abs_tol=1e-12))
                _require(same, f"{a.measure} of {a.layer!r} changes with {what}: {a.value} and {b.value}.")


def _second(measures: Sequence[Measure], model: nn.Module, start: Mapping[str, Tensor], probe: Probe) -> Snapshot:
    """Take the second snapshot of an Observer, after one of the initial network."""
    model, now = copy.deepcopy(model), model.state_dict()
    model.load_state_dict(start)
    watch = Observer(model, probe, measures=measures, when=1, budget=None, initial=start, on_error="raise")
    watch(0)
    model.load_state_dict(now)
    snap = watch.now(1)
    assert snap is not None
    return snap


def check_theory(theory: Theory) -> None:
    """Check that the closed form agrees with the simulation, and that a wrong one would be noticed.

    Checks: in every case, and for every seed, |predict - simulate| <= tolerance |simulate| for each returned array; ``simulate``
    calls no function of a theory that ``predict`` calls; and with each keyword of ``perturb`` at its wrong value, ``predict``
    misses some case. """
    name, tolerance, cases = theory.name, theory.tolerance, list(theory.cases())
    _require(bool(cases) and bool(theory.perturb), f"{name}: give at least one case, and a constant of predict with a wrong "
                                                   f"value.")
    keywords = inspect.signature(theory.predict).parameters
    for constant in theory.perturb:
        _require(constant in keywords, f"{name}: perturb names {constant!r}, which is not a keyword of predict. It has "
                                       f"{', '.join(keywords)}.")
    simulations, run_by_both = [], set()
    for i, case in enumerate(cases):
        predicted, ran = _run(theory.predict, case)
        for options in [{"seed": seed} for seed in theory.seeds] or [{}]:
            simulated, ran_too = _run(theory.simulate, case, **options)
            simulations.append((case, simulated))
            run_by_both |= {c.co_name for c in ran & ran_too}
            error = _distance(predicted, simulated)
            _require(error <= tolerance, f"{name}, case {i}: prediction and simulation differ by {error:.3g} (relative); "
                                         f"{tolerance:g} is allowed.")
    _require(not run_by_both, f"{name}: simulate runs what predict runs ({', '.join(sorted(run_by_both))}), so their agreement "
                              f"is no evidence.")
    for constant, wrong in theory.perturb.items():
        worst = np.max([_distance(theory.predict(*case, **{constant: wrong}), simulated) for case, simulated in simulations])
        _require(not worst <= tolerance, f"{name}: with {constant}={wrong!r} the prediction still agrees within {tolerance:g} "
                                         f"(error at most {worst:.3g}): the cases do not see this constant, or the tolerance is "
                                         f"too wide.")


def _run(function: Callable[..., Any], case: tuple[Any, ...], **options: Any) -> tuple[Any, set[CodeType]]:
    """Call a function; return its result and the functions of theories that it called (except those that read arguments)."""
    ran: dict[int, tuple[CodeType, str]] = {}  # by identity, because comparing code objects takes longer than most calls
    own_module = function.func.__module__ if isinstance(function, functools.partial) else function.__module__

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and id(frame.f_code) not in ran:
            ran[id(frame.f_code)] = frame.f_code, frame.f_globals.get("__name__", "")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        result = function(*case, **options)
    finally:
        sys.setprofile(before)
    return result, {code for code, module in ran.values() if (module == own_module or module.startswith("richter.theory."))
                    and module != "richter.theory.arrays" and not code.co_name.startswith("__")}


def _distance(predicted: Any, simulated: Any) -> float:
    """Largest |p - s| / |s| of the arrays in two results; NaN if there is a NaN."""
    errors = []
    for p, s in zip(_arrays(predicted), _arrays(simulated), strict=True):
        _require(p.shape == s.shape, f"prediction and simulation have shapes {p.shape} and {s.shape}.")
        size = np.linalg.norm(s)
        errors.append(np.linalg.norm(p - s) / size if size else np.linalg.norm(p))
    return float(np.max(errors))


def _arrays(result: Any) -> list[np.ndarray]:
    """Results of a theory as numpy arrays."""
    if isinstance(result, Prediction):
        result = result.value
    parts = result if isinstance(result, tuple) else (result,)
    return [np.asarray(p.detach().cpu() if isinstance(p, Tensor) else p, dtype=np.float64) for p in parts]


def _require(true: bool, sentence: str) -> None:
    """Raise an AssertionError with this sentence unless a condition is true."""
    if not true:
        raise AssertionError(sentence)
