"""Every parameter of measure, Observer, Probe and Probe.from_loader does something."""

from __future__ import annotations

import contextlib
import inspect
import io
import tempfile
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import richter
from observing import CLASSES, MANY, SOURCES, draw, dropout, examples, heads, indices, lengths, mlp, probe, state
from richter.core import CaptureError, MemoryBudgetError
from richter.instrument.cotangents import random_outputs
from richter.instrument.evaluate import RichterWarning
from richter.instrument.statistics import HeldOut, Moment
from richter.measures import Measure


def passes(model: nn.Module, run: Callable[[], Any]) -> list[int]:
    """Sizes of the batches that go through the model's first layer."""
    sizes: list[int] = []
    handle = model[0].register_forward_hook(lambda m, args, z: sizes.append(len(z)))
    run()
    handle.remove()
    return sizes


def both(a: Any, b: Any) -> tuple[Any, Any]:
    return a, b


def value(snap: richter.Snapshot | None, m: str = "nfc", layer: str = "0") -> float:
    assert snap is not None
    return snap.value(m, layer)


def within(snapshot: Callable[[], richter.Snapshot | None]) -> str:
    """The number, or the name of the error if there is too little memory for it."""
    try:
        return str(value(snapshot()))
    except MemoryBudgetError as error:
        return type(error).__name__


# each entry gives two results that differ in one parameter only
MEASURE_KNOBS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "model": lambda: both(*(value(richter.measure(mlp(seed), probe())) for seed in (0, 1))),
    "probe": lambda: both(*(value(richter.measure(mlp(), probe(n))) for n in (20, 24))),
    "measures": lambda: both(*(richter.measure(mlp(), probe(), m).measures for m in (None, ["nfc"]))),
    "initial": lambda: both(*(value(richter.measure(mlp(), probe(), initial=state(mlp(seed))), "weight_change")
                              for seed in (1, 2))),
    "cotangents": lambda: both(*(value(richter.measure(mlp(), probe(), cotangents=c))
                                 for c in (None, random_outputs(2)))),
    "layers": lambda: both(*(richter.measure(mlp(), probe(), layers=k).layers for k in (None, "0"))),
    "memory": lambda: both(*(within(lambda memory=memory: richter.measure(mlp(), probe(), memory=memory))
                             for memory in ("1GiB", "1KiB"))),
    "output": lambda: both(*(value(richter.measure(mlp(), richter.Probe(examples()[0], None), output=o))
                             for o in (None, lambda f: f[:, :1]))),
    "mode": lambda: both(*(value(richter.measure(dropout(), probe(), mode=m)) for m in ("eval", "train"))),
    "seed": lambda: both(*(value(richter.measure(dropout(), probe(), mode="train", seed=s)) for s in (0, 1))),
    "step": lambda: both(*(richter.measure(mlp(), probe(), ["nfc"], step=s).rows[0].step for s in (None, 3))),
    "matrices": lambda: both(*(set(richter.measure(mlp(), probe(), ["nfc"], matrices=m).arrays) for m in (0, 5))),
}  # fmt: skip


def seen(**options: Any) -> list[int]:
    watch = richter.Observer(mlp(), probe(), **{"measures": ["weight_change"], "budget": None, **options})
    for step in range(6):
        watch(step)
    return watch.frame.step.unique().tolist()


def stored(times: int = 1, **options: Any) -> SimpleNamespace:
    """A run on disk, opened so many times."""
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(times):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RichterWarning)  # a second run of one name is numbered
                watch = richter.Observer(mlp(), probe(), run=folder, **options)
            watch(0)
            watch.close()
        run = richter.runs.load(folder)
        return SimpleNamespace(settings=run.settings, arrays=run.arrays, sessions=len(run.sessions))


def told(announce: bool) -> str:
    """Text on the standard error at the first call."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        richter.Observer(mlp(), probe(64), announce=announce)(0)
    return said.getvalue()


def trained(pretrained: bool | None) -> str:
    """The verdict on a training from random weights."""
    model, examples_of = mlp(), probe(40)
    optimiser = torch.optim.Adam(model.parameters(), 0.05)
    with richter.Observer(model, examples_of, pretrained=pretrained, when=200, budget=None) as watch:
        for step in range(200):
            watch(step)
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(model(examples_of.x), examples_of.y).backward()
            optimiser.step()
    return str(richter.diagnose(watch))


def deleted(overwrite: bool) -> bool:
    """Whether a second run of one name took the place of the first."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", RichterWarning)
        for name in ("first", "second"):
            with richter.Observer(mlp(), probe(), run=f"{folder}/run", settings={"name": name}, overwrite=overwrite) as watch:
                watch(0)
        return richter.runs.load(f"{folder}/run").settings["name"] == "second"


OBSERVER_KNOBS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "model": lambda: both(*(value(richter.Observer(mlp(seed), probe())(0)) for seed in (0, 1))),
    "probe": lambda: both(*(value(richter.Observer(mlp(), probe(n))(0)) for n in (20, 24))),
    "run": lambda: both(0 if richter.Observer(mlp(), probe()).writer is None else 1, stored().sessions),
    "settings": lambda: both(*(stored(settings={"lr": lr}).settings for lr in (0.1, 0.2))),
    "resume": lambda: both(*(stored(2, resume=resume).sessions for resume in (False, True))),
    "overwrite": lambda: both(*map(deleted, (False, True))),
    "matrices": lambda: both(*(len(stored(matrices=m).arrays) for m in (5, 6))),
    "keep_features": lambda: both(*(len(stored(keep_features=n).arrays) for n in (0, 4))),
    "keep_inputs": lambda: both(*(len(stored(keep_features=4, keep_inputs=k).arrays) for k in (False, (1, 1, 5)))),
    "when": lambda: both(seen(when=2), seen(when=3)),
    "steps": lambda: both(*([step for step in range(300) if richter.Observer(mlp(), probe(), steps=n).when(step)]
                            for n in (100, 9000))),
    "measures": lambda: both(*(richter.Observer(mlp(), probe(), measures=m)(0).measures for m in (None, ["nfc"]))),
    "initial": lambda: both(*(value(richter.Observer(mlp(), probe(), initial=i)(0), "weight_change")
                              for i in (None, state(mlp(1))))),
    "budget": lambda: both(seen(when=1), seen(when=1, budget=1e-12, free_seconds=0)),
    "free_seconds": lambda: both(*(seen(when=1, budget=1e-12, free_seconds=s) for s in (0, 100))),
    "announce": lambda: both(*map(told, (False, True))),
    "pretrained": lambda: both(*map(trained, (None, False))),
    "cotangents": lambda: both(*(value(richter.Observer(mlp(), probe(), cotangents=c)(0)) for c in (None, random_outputs(2)))),
    "layers": lambda: both(*(richter.Observer(mlp(), probe(), layers=k)(0).layers for k in (None, "2"))),
    "memory": lambda: both(*(within(lambda memory=memory: richter.Observer(mlp(), probe(), memory=memory)(0))
                             for memory in ("1GiB", "1KiB"))),
    "output": lambda: both(*(value(richter.Observer(mlp(), richter.Probe(examples()[0], None), output=o)(0))
                             for o in (None, lambda f: f[:, :1]))),
    "mode": lambda: both(*(value(richter.Observer(dropout(), probe(), mode=m)(0)) for m in ("eval", "train"))),
    "seed": lambda: both(*(value(richter.Observer(dropout(), probe(), mode="train", seed=s)(0)) for s in (0, 1))),
    "on_error": lambda: both(*map(diverged, ("warn", "raise"))),
}  # fmt: skip


def diverged(on_error: str) -> str:
    """What comes out of a measurement of weights that are NaN."""
    model = mlp()
    watch = richter.Observer(model, probe(), on_error=on_error)
    nn.init.constant_(model[0].weight, torch.nan)
    with warnings.catch_warnings(action="ignore"):
        try:
            return repr(watch(0))
        except CaptureError as why:
            return str(why)


def token_value(**options: Any) -> float:
    model, x, y = heads()
    return value(richter.measure(model, richter.Probe(x, **{"y": y, **options}), ["nfc"]), layer="first")


READ = Moment("read", lambda c: c.h.sum((0, 1)))
GAP = Measure("gap", lambda ours, theirs: (ours - theirs).norm().item(), (READ, HeldOut(READ)))


def apart(seed: int) -> float:
    """How far what a layer reads of held-out examples is from what it reads of the others."""
    held_out = draw(12, 5, seed=seed), torch.arange(12) % 3
    return value(richter.measure(mlp(), probe(held_out=held_out), [GAP]), "gap")


PROBE_KNOBS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "x": lambda: both(*(value(richter.measure(mlp(), richter.Probe(draw(24, 5, seed=s), examples()[1])))
                        for s in (1, 2))),
    "y": lambda: both(*(value(richter.measure(mlp(), richter.Probe(examples()[0], y)), "tangent_cka")
                        for y in (examples()[1], examples()[1].flip(0)))),
    "chunk": lambda: both(*(max(passes(m := mlp(), lambda m=m, c=c: richter.measure(m, probe(40, chunk=c))))
                            for c in (256, 10))),
    "kernel_examples": lambda: both(*(value(richter.measure(mlp(), probe(kernel_examples=k)), "tangent_cka")
                                      for k in (10, None))),
    "held_out": lambda: both(*map(apart, (8, 9))),
    "mask": lambda: both(token_value(), token_value(mask=lengths(12, 4))),
    "ignore_index": lambda: both(*(token_value(ignore_index=i) for i in (-100, 2))),
    "loss": lambda: both(*(value(richter.measure(mlp(), probe(loss=f), ["fact"]), "fact") for f in (None, nn.MSELoss()))),
    "weight_decay": lambda: both(*(value(richter.measure(mlp(), probe(weight_decay=w), ["fact_error"]), "fact_error")
                                   for w in (0.1, 0.2))),
    "shift": lambda: both(*(token_value(shift=s) for s in (False, True))),
}  # fmt: skip

LOADER_KNOBS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "loader": lambda: both(*(indices(richter.Probe.from_loader(TensorDataset(MANY, y), n=20))
                             for y in (CLASSES, CLASSES.flip(0)))),
    "n": lambda: both(*(richter.Probe.from_loader(SOURCES["loader"](), n=n).n for n in (20, 30))),
    "balanced": lambda: both(*(richter.Probe.from_loader(SOURCES["loader"](), n=310, balanced=b).y.bincount().tolist()
                               for b in (True, False))),
    "seed": lambda: both(*(indices(richter.Probe.from_loader(SOURCES["loader"](), n=30, seed=s)) for s in (0, 1))),
    "options": lambda: both(*(richter.Probe.from_loader(SOURCES["loader"](), n=30, **o).chunk
                              for o in ({}, {"chunk": 3}))),
}  # fmt: skip

KNOBS = {"measure": (richter.measure, MEASURE_KNOBS), "Observer": (richter.Observer, OBSERVER_KNOBS),
         "Probe": (richter.Probe, PROBE_KNOBS), "from_loader": (richter.Probe.from_loader, LOADER_KNOBS)}  # fmt: skip


@pytest.mark.parametrize(("of", "knob"), [(of, knob) for of, (_, table) in KNOBS.items() for knob in table])
def test_a_knob_does_something(of: str, knob: str) -> None:
    a, b = KNOBS[of][1][knob]()
    assert a == a  # NaN is no result
    assert a != b


@pytest.mark.parametrize("of", KNOBS)
def test_every_parameter_has_such_a_test(of: str) -> None:
    function, table = KNOBS[of]
    assert list(table) == list(inspect.signature(function).parameters)
