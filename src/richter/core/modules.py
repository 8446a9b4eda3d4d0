"""The user's own module inside what wraps it, and its buffers; nothing but torch."""

from __future__ import annotations

from collections.abc import Container

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import ParametrizationList

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


def running_norms(model: nn.Module) -> list[tuple[_NormBase, list[str]]]:
    """Norms that keep running statistics, each with the names of its buffers."""
    return [(m, [f"{name}.{k}" if name else k for k, _ in m.named_buffers(recurse=False)]) for name, m in model.named_modules()
            if isinstance(m, _NormBase) and m.track_running_stats and m.running_mean is not None]


def understood(model: nn.Module) -> set[str]:
    """Names of buffers whose initial values are those of the initial network: running statistics of norms, which use those of
    batches where they have moved, and buffers of parametrisations, which make a weight."""
    parts = tuple(f"{name}." for name, m in model.named_modules() if isinstance(m, ParametrizationList))
    return {k for _, buffers in running_norms(model) for k in buffers} | {
        k for k, _ in model.named_buffers(remove_duplicate=False) if k.startswith(parts)}
