"""The user's own module inside what wraps it, and a model as a chain: modules that each read what the one before wrote."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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


# -------------------------------------------------------------------------------------------------------------- chains

TRIED = 4  # examples on which the chain is compared with the model itself


@dataclass(frozen=True)
class Stage:
    """A module with weights and the modules without weights around it: those before the first one, and those up to the next."""

    name: str
    module: nn.Module
    before: tuple[nn.Module, ...]
    after: tuple[nn.Module, ...]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (*self.before, self.module, *self.after)

    def __call__(self, x: Tensor) -> Tensor:
        return composed(self.modules, x)


def composed(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x


def chain(model: nn.Module, x: Tensor) -> list[Stage]:
    """The stages of a model that is a chain: an ``nn.Sequential``, or any module whose parts, one after another as they were
    registered, do what it does, which is tried on the first rows of ``x``."""
    model = unwrap(model)
    leaves = list(_leaves(model, ""))
    if not isinstance(x, Tensor) or x.dim() == 0 or not len(x):
        raise SelectionError(f"x is {'empty' if isinstance(x, Tensor) else f'a {type(x).__name__}'}: a tensor of examples "
                             f"[n, ...] is needed, to see whether the model is a chain.")
    _tried(model, [m for _, m in leaves], x[:TRIED])
    weighted = [i for i, (_, m) in enumerate(leaves) if any(True for _ in m.parameters())]
    parameters = [p for i in weighted for p in leaves[i][1].parameters()]
    if len(set(parameters)) < len(parameters):
        raise SelectionError(f"the {type(model).__name__} uses a layer with weights twice, or the weights of one layer in "
                             f"another, so that a step of one is a step of the other: it is no chain of layers. Give each place "
                             f"a layer with weights of its own.")
    if not weighted:
        raise SelectionError(f"the {type(model).__name__} has no module with weights, so there is no layer in it.")
    ends = [*weighted[1:], len(leaves)]
    return [Stage(leaves[i][0], leaves[i][1], tuple(m for _, m in leaves[:i]) if i == weighted[0] else (),
                  tuple(m for _, m in leaves[i + 1:end])) for i, end in zip(weighted, ends, strict=True)]


def _leaves(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules without parts in the order of their registration; one that is used twice (an activation) comes twice."""
    parts = [(k, m) for k, m in module._modules.items() if m is not None]
    for k, m in parts:
        yield from _leaves(m, f"{name}.{k}" if name else k)
    if not parts:
        yield name, module


def _tried(model: nn.Module, modules: Sequence[nn.Module], x: Tensor) -> None:
    names = " -> ".join(type(m).__name__ for m in modules[:6]) + (" -> ..." if len(modules) > 6 else "")
    advice = ("Write activations and reshapes as modules (nn.ReLU(), nn.Flatten()) in an nn.Sequential; branches and residual "
              "connections make no chain.")
    with torch.no_grad(), evaluated(model):
        wanted = model(x.clone())  # a first module that works in place then writes into the clone
        try:
            got = composed(modules, x.clone())
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise SelectionError(f"the {type(model).__name__} is no chain: its parts, one after another ({names}), cannot read "
                                 f"each other ({str(error).splitlines()[0][:120]}). {advice}") from error
    if isinstance(wanted, Tensor) and not torch.isfinite(wanted).all():
        raise SelectionError(f"outputs of the {type(model).__name__} contain NaN or Inf, so that nothing can be compared with "
                             f"them: inputs that are not finite, or weights that diverged. Look at both.")
    if not isinstance(wanted, Tensor) or not isinstance(got, Tensor) or got.shape != wanted.shape or not torch.allclose(
            got, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max())):
        raise SelectionError(f"the {type(model).__name__} is no chain: its parts, one after another ({names}), give another "
                             f"output than the model itself. {advice}")


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Put every module in eval mode, and afterwards back."""
    modes = [(m, m.training) for m in model.modules()]
    try:
        for m, _ in modes:
            m.training = False  # not m.eval(): some models act on being switched
        yield
    finally:
        for m, mode in modes:
            m.training = mode
