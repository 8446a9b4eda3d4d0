"""Checkpoints for the command line: weights from files, which are read as numbers and never executed; a model from a function of
the user; examples from a data set or a file.

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

INSIDE = ("state_dict", "model_state_dict", "model")  # common keys of the weights in a checkpoint


def load(path: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint, or the initial weights of a run."""
    if (path / DATABASE).exists():
        initial = Run(path).initial
        if initial is None:
            raise StoreError(f"the run {path} has stored no initial weights. Give a checkpoint: a .safetensors or .pt file.")
        return load_file(initial)
    if not path.is_file():
        raise StoreError(f"there is no file {path}: a checkpoint is a .safetensors or .pt file with a state_dict.")
    try:
        saved = load_file(path) if path.suffix == ".safetensors" else torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as why:
        raise StoreError(f"{path} could not be read as weights ({_reason(path, why)}). Files are read as numbers only, because "
                         f"code in a file would otherwise run here: save model.state_dict() with torch.save or, better, "
                         f"safetensors.torch.save_file.") from None
    inner = saved
    if isinstance(saved, Mapping):
        inner = next((saved[k] for k in INSIDE if isinstance(saved.get(k), Mapping)), saved)
    if not isinstance(inner, Mapping) or not any(isinstance(v, Tensor) for v in inner.values()):
        raise StoreError(f"{path} contains no state_dict: give a mapping of names to tensors, alone or under "
                         f"{' or '.join(map(repr, INSIDE))}.")
    return {str(k): v for k, v in inner.items() if isinstance(v, Tensor)}


def _reason(path: Path, why: Exception) -> str:
    """Return the reason of a failure, without torch's advice on how to execute the file."""
    if not path.stat().st_size:
        return "it is empty"
    if isinstance(why, pickle.UnpicklingError):
        return "it is broken, or holds Python objects besides tensors: a whole model, or worse"
    return f"{type(why).__name__}: {next(iter(str(why).splitlines()), 'no reason is given')[:200]}"


def built(place: str) -> nn.Module:
    """Call the user's function ``module:function``, which is searched in the current folder first, and return its model."""
    module, _, name = place.partition(":")
    if not module or not name:
        raise SelectionError(f"--model {place}: give a function that builds the model, as module:function.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as why:
        raise SelectionError(f"--model {place}: {why}. Python searches the module in the current folder "
                             f"first.") from why
    model = make()
    if not isinstance(model, nn.Module):
        raise SelectionError(f"--model {place} returned a {type(model).__name__}, not a torch.nn.Module.")
    return model


def examples(place: str, n: int) -> Probe:
    """Return the first ``n`` test examples of a data set, or of a .npy, .npz or .safetensors file (its array ``x``)."""
    path = Path(place)
    if n < 1:
        raise SelectionError(f"--examples {n}: give the number of examples, e.g. a few hundred.")
    if path.suffix in (".npy", ".npz", ".safetensors"):
        return Probe(_from_file(path)[:n], None, kernel_examples=None)
    data_sets = [name for name in ("digits", "mnist", "fashion_mnist", "cifar10") if hasattr(tasks, name)]
    if place not in data_sets:
        raise unknown("--data", "data set", place, [*data_sets, "a .npy, .npz or .safetensors file"])
    split: Any = getattr(tasks, place)()
    return Probe(split.x_test[:n], split.y_test[:n], kernel_examples=None)


def _from_file(path: Path) -> Any:
    """Read arrays from a file. numpy's default is double precision; a Probe converts to the model's precision."""
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
