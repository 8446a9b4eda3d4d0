"""The user's own module inside what wraps it; nothing but torch."""

from __future__ import annotations

from collections.abc import Container

from torch import nn

from richter.core.values import SelectionError

WRAPPERS = ("module.", "_orig_mod.")  # what DistributedDataParallel, DataParallel and torch.compile write before names


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside DistributedDataParallel, DataParallel and torch.compile: its names are the layers'."""
    if not isinstance(model, nn.Module):
        raise SelectionError(f"the model is a {type(model).__name__}; a torch.nn.Module is needed.")
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def unwrapped_name(name: str, known: Container[str]) -> str:
    """The name among ``known``, those of the user's own module, of an entry in the state_dict of what wraps it."""
    while name not in known and name.startswith(WRAPPERS):
        name = name.partition(".")[2]
    return name
