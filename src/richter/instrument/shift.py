"""Are token labels beside the outputs that predict them? Hugging Face's language models take ``labels=input_ids`` and move them
by one themselves; a probe's labels are compared with the outputs as they are. Labels that equal the input ids are therefore
looked at: the model's own loss of them says what it takes them for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from richter.core import ProbeError
from richter.instrument.capture import forward
from richter.instrument.probe import IGNORE_INDEX, Probe
from richter.instrument.survey import Bench


def aligned(bench: Bench, probe: Probe, shape: torch.Size) -> tuple[Probe, str]:
    """The probe with its labels beside the outputs of ``shape`` [n, ...] that predict them, and a note if they were moved there;
    ``bench`` has its first examples."""
    if probe.shift is not None or not probe.holds_ids(shape) or not probe.repeats_input():
        return probe, ""
    kind, moves = type(bench.model).__name__, _moves(bench, probe)
    if moves is None:
        raise ProbeError(f"the labels y equal the input ids, and what a {kind} takes them for cannot be told: it has no labels= "
                         f"with a loss of its own that could be asked. As they are, each output would be compared with the token "
                         f"that it has just read. Say Probe(..., shift=True) for a language model (labels=input_ids, as Hugging "
                         f"Face takes them: each belongs to the output before it), or shift=False where the token itself is the "
                         f"label (an autoencoder, a masked language model).")
    if not moves:
        return probe, ""
    return probe.shifted(), (f"the labels equal the input ids, which a {kind} moves by one in its own loss: so they are here, "
                             f"each beside the output before it (Probe(shift=True) says so, shift=False leaves them as they are)")


def _moves(bench: Bench, probe: Probe) -> bool | None:
    """Does the model's own loss compare a label with the output before it, or with the output at its place? None: it has no loss
    that could be asked."""
    assert probe.y is not None
    f = bench.run(record=False).f.detach()
    y = torch.where(probe.y == probe.ignore_index, IGNORE_INDEX, probe.y)[:bench.n].to(f.device)
    if f.shape[:2] != y.shape or y.shape[1] < 2:
        return None
    first = y.clone()
    first[:, 0] = (first[:, 0].clamp(min=0) + 1) % f.shape[-1]  # other labels, of the first token alone
    last = y.clone()
    last[:, -1] = (last[:, -1].clamp(min=0) + 1) % f.shape[-1]
    losses = [_own_loss(bench, labels) for labels in (y, first, last)]
    if any(loss is None for loss in losses) or losses[2] == losses[0]:  # a loss that does not care for the last label
        return None
    return losses[1] == losses[0]  # no output comes before the first token: a loss that moves labels leaves its label out


def _own_loss(bench: Bench, y: Tensor) -> float | None:
    """What the model returns as its loss for ``labels=y``; None if it takes none."""
    accepted, x = inspect.signature(bench.model.forward).parameters, bench.x
    if "labels" not in accepted:
        return None
    inputs = x if isinstance(x, dict) else dict(zip(accepted, x if isinstance(x, tuple) else (x,), strict=False))
    try:
        return forward(bench.model, {**inputs, "labels": y}, bench.state, output=_loss, record=False).f.item()
    except Exception:  # it may fail in any way on what it was not asked before
        return None


def _loss(returned: Any) -> Tensor:
    return returned["loss"] if isinstance(returned, Mapping) else returned[0]
