"""Checkpoints for the command line: weights from files, which are read as numbers and never executed; a model from a function of
the user's own; examples from a data set or a file.

    weights = load("model.safetensors")               # or .pt, read with torch.load(weights_only=True)
    model = built("my_code:make_model")
    probe = examples("mnist", 256)
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from richter import tasks
from richter.core import SelectionError, StoreError, unknown
from richter.instrument.probe import Probe
from richter.runs import Run
from richter.runs.place import DATABASE

INSIDE = ("state_dict", "model_state_dict", "model")  # where others put the weights in a checkpoint


def load(path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint; of a run those it was begun with."""
    if (path / DATABASE).exists():
        initial = Run(path).initial
        if initial is None:
            raise StoreError(f"the run {path} has kept no initial weights. Give a checkpoint: a file .safetensors or .pt.")
        return load_file(initial)
    if not path.is_file():
        raise StoreError(f"there is no file {path}: a checkpoint is a file .safetensors or .pt with a state_dict.")
    try:
        kept = load_file(path) if path.suffix == ".safetensors" else torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as why:
        raise StoreError(f"{path} could not be read as weights ({_reason(path, why)}). Files are read as numbers alone, because "
                         f"code from a file would run here: save model.state_dict(), by torch.save or, better, "
                         f"safetensors.torch.save_file.") from None
    inner = next((kept[k] for k in INSIDE if isinstance(kept.get(k), Mapping)), kept) if isinstance(kept, Mapping) else kept
    if not isinstance(inner, Mapping) or not any(isinstance(v, Tensor) for v in inner.values()):
        raise StoreError(f"{path} holds no state_dict: a mapping of names to tensors is needed, alone or as "
                         f"{' or '.join(map(repr, INSIDE))}.")
    return {str(k): v for k, v in inner.items() if isinstance(v, Tensor)}


def _reason(path: Path, why: Exception) -> str:
    """Not in torch's words, where these say how to execute the file."""
    if not path.stat().st_size:
        return "it is empty"
    if isinstance(why, pickle.UnpicklingError):
        return "it is broken, or holds Python objects besides tensors: a whole model, or worse"
    return f"{type(why).__name__}: {next(iter(str(why).splitlines()), 'no reason is given')[:200]}"


def built(place: str) -> nn.Module:
    """What the user's own function returns: ``module:function``, looked for in this folder first."""
    module, _, name = place.partition(":")
    if not module or not name:
        raise SelectionError(f"--model {place}: a function that makes the model is needed, as module:function.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as why:
        raise SelectionError(f"--model {place}: {why}. It is looked for as Python looks for modules, in this folder "
                             f"first.") from why
    model = make()
    if not isinstance(model, nn.Module):
        raise SelectionError(f"--model {place} returned a {type(model).__name__}, not a torch.nn.Module.")
    return model


def examples(place: str, n: int) -> Probe:
    """The first ``n`` test examples of a data set by its name, or of a file .npy, .npz or .safetensors (its array ``x``)."""
    path = Path(place)
    if n < 1:
        raise SelectionError(f"--examples {n}: how many examples are compared on, a few hundred say.")
    if path.suffix in (".npy", ".npz", ".safetensors"):
        return Probe(_from_file(path)[:n], None, kernel=None)
    known = [name for name in ("digits", "mnist", "fashion_mnist", "cifar10") if hasattr(tasks, name)]
    if place not in known:
        raise unknown("--data", "data set", place, [*known, "a file .npy, .npz or .safetensors"])
    split: Any = getattr(tasks, place)()
    return Probe(split.x_test[:n], split.y_test[:n], kernel=None)


def _from_file(path: Path) -> Any:
    """Tensors as they are; numpy's arrays have double precision unless told otherwise, and a Probe gives them the model's."""
    try:
        if path.suffix == ".safetensors":
            arrays: Mapping[str, Any] = load_file(path)
        else:
            stored = np.load(path, allow_pickle=False)
            arrays = {"x": stored} if isinstance(stored, np.ndarray) else dict(stored)
    except (OSError, ValueError, SafetensorError) as why:
        raise StoreError(f"{path} could not be read as arrays: {why}.") from None
    if "x" not in arrays:
        raise unknown(str(path), "array", "x", arrays)
    return arrays["x"]
