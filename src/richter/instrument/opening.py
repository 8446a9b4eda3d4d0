"""How an Observer's run is opened: by the first of several ranks, with the initial weights and measurements of a run that was
begun before."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from richter.core import SelectionError
from richter.instrument.snapshot import Snapshot
from richter.measures.cards import CARDS
from richter.runs import Writer, create

if TYPE_CHECKING:
    from richter.instrument.observe import Observer


def open_run(watch: Observer, run: str | os.PathLike[str] | Writer, settings: Any, resume: bool, given: bool) -> None:
    """The first rank opens the run; the others have its initial weights and earlier measurements, or its error."""
    subject = watch.measurement.subject
    message: list[Any] = [None]
    if _rank() == 0:
        try:
            watch.writer = _opened(watch, run, settings, resume, given)
        except Exception as why:
            message = [why]
    if _ranks() > 1:
        message = [message[0] or ({k: v.cpu() for k, v in watch.initial.items()}, watch.snapshots, subject.previous)]
        torch.distributed.broadcast_object_list(message, src=0)
    if isinstance(message[0], Exception):
        raise message[0]
    if _rank() and message[0] is not None:
        initial, watch.snapshots, previous = message[0]
        watch.initial = {k: v.to(watch.initial[k].device) for k, v in initial.items()}
        subject.previous = {k: v.to(subject.home) for k, v in previous.items()}


def _opened(watch: Observer, run: str | os.PathLike[str] | Writer, settings: Any, resume: bool, given: bool) -> Writer:
    """The run that is written; one that was begun before hands over its initial weights and measurements."""
    writer = run if isinstance(run, Writer) else create(run, settings, resume=resume)
    try:
        if writer.observer is not None:
            raise SelectionError(f"another Observer writes to the run {writer.path}; their rows would replace each other. "
                                 f"Give each a run of its own.")
        kept = writer.run.initial
        if kept is not None and given:
            raise SelectionError(f"the run {writer.path} has initial weights of its own; leave initial= out to resume it.")
        if kept is not None:
            watch.initial = _fitting(watch.model, load_file(kept), writer.path)
        watch.snapshots = writer.run.snapshots
        if (before := writer.run.state("previous")) is not None:
            device = watch.measurement.subject.home
            watch.measurement.subject.previous = {key: t.to(device) for key, t in load_file(before).items()}
        work = partial(_described, writer, watch, None if kept is not None else watch.initial)
        if writer.begun:
            work()
        else:
            writer.defer(work)
        writer.observer = watch
    except BaseException:
        if writer is not run:
            writer.close()
        raise
    return writer


def _described(writer: Writer, watch: Observer, initial: dict[str, Tensor] | None) -> None:
    """What the run is of; ``initial``: its initial weights, if it has none yet."""
    if initial is not None:
        writer.keep_state(lambda path: save_file({k: v.contiguous() for k, v in initial.items()}, path))
    writer.describe(model=type(watch.model).__name__, parameters=sum(p.numel() for p in watch.model.parameters()),
                    examples=watch.probe.n, budget=watch.budget, measures=[m.name for m in watch.measures],
                    cards={m.name: card.to_json() for m in watch.measures if (card := m.card or CARDS.get(m.name))})


def is_new(model: nn.Module, initial: Mapping[str, Tensor], before: Sequence[Snapshot], now: Snapshot) -> bool:
    """Was the model of a resumed run initialised again, instead of loaded from a checkpoint? Its weights are the initial ones of
    the run, or much farther from them than when they were last measured: two random draws differ by 1.4 times their norm."""
    last, here = _changes(before[-1]), _changes(now)
    if all(k not in initial or torch.equal(p.detach(), initial[k].to(p)) for k, p in model.named_parameters()):
        return any(last) if last else len(before) > 1
    return bool(last and here) and median(here) > 1 and median(here) > 1.3 * median(last)


def _changes(snap: Snapshot) -> list[float]:
    """|W - W0| / |W| of the layers, where it was measured."""
    return [r.value for r in snap.rows if r.measure == "weight_change" and math.isfinite(r.value)]


def _ranks() -> int:
    """Processes that train one model together."""
    return torch.distributed.get_world_size() if torch.distributed.is_available() and torch.distributed.is_initialized() else 1


def _rank() -> int:
    return torch.distributed.get_rank() if _ranks() > 1 else 0


def _fitting(model: nn.Module, kept: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The initial weights of a run, if they are of this architecture."""
    own = {k: tuple(v.shape) for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    other = {k: tuple(v.shape) for k, v in kept.items()}
    if own != other:
        name = next(k for k in {**own, **other} if own.get(k) != other.get(k))
        raise SelectionError(f"the run {path} was begun with another architecture: {name!r} has shape "
                             f"{own.get(name, 'none')} in this model and {other.get(name, 'none')} in the run. A run is of one "
                             f"model; choose another name for this one.")
    return {k: v.to(model.state_dict()[k].device) for k, v in kept.items()}
