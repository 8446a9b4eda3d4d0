"""Unwrapping of models, and models as chains: modules that each read the output of the one before."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from richter.core.values import SelectionError

WRAPPERS = ("module.", "_orig_mod.")  # prefixes of names added by DistributedDataParallel, DataParallel and torch.compile


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own module inside DistributedDataParallel, DataParallel and torch.compile; layers have its names."""
    if not isinstance(model, nn.Module):
        raise SelectionError(f"the model is a {type(model).__name__}; give a torch.nn.Module.")
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def unwrapped_name(name: str, known: Container[str]) -> str:
    """Find the name in ``known`` (the names of the user's own module) of an entry in the state_dict of a wrapper."""
    while name not in known and name.startswith(WRAPPERS):
        name = name.partition(".")[2]
    return name


# -------------------------------------------------------------------------------------------------------------- chains

TRIED = 4  # examples on which the chain is compared with the model itself


@dataclass(frozen=True)
class ChainStage:
    """A module with weights, with the modules without weights around it: those before the first one, and those up to the next."""

    name: str
    module: nn.Module
    before: tuple[nn.Module, ...]
    after: tuple[nn.Module, ...]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """All modules of the stage, in order."""
        return (*self.before, self.module, *self.after)

    def __call__(self, x: Tensor) -> Tensor:
        return composed(self.modules, x)


def composed(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Apply modules one after another."""
    for module in modules:
        x = module(x)
    return x


def chain(model: nn.Module, x: Tensor) -> list[ChainStage]:
    """Split a model that is a chain into stages: an ``nn.Sequential``, or a module that equals its children applied in the order
    of registration. This is verified on the first rows of ``x``."""
    model = unwrap(model)
    leaves = list(_leaves(model, ""))
    if not isinstance(x, Tensor) or x.dim() == 0 or not len(x):
        raise SelectionError(f"x is {'empty' if isinstance(x, Tensor) else f'a {type(x).__name__}'}: give a tensor of examples "
                             f"[n, ...], on which the chain can be verified.")
    _tried(model, [m for _, m in leaves], x[:TRIED])
    weighted = [i for i, (_, m) in enumerate(leaves) if any(True for _ in m.parameters())]
    parameters = [p for i in weighted for p in leaves[i][1].parameters()]
    if len(set(parameters)) < len(parameters):
        raise SelectionError(f"the {type(model).__name__} uses a layer with weights twice, or the weights of one layer in "
                             f"another, so a step of one is a step of the other, and the model is not a chain. Give each place "
                             f"a layer with its own weights.")
    if not weighted:
        raise SelectionError(f"the {type(model).__name__} has no module with weights, so there is no layer in it.")
    ends = [*weighted[1:], len(leaves)]
    return [ChainStage(leaves[i][0], leaves[i][1], tuple(m for _, m in leaves[:i]) if i == weighted[0] else (),
                  tuple(m for _, m in leaves[i + 1:end])) for i, end in zip(weighted, ends, strict=True)]


def _leaves(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules without children in the order of registration; a module that is used twice (an activation) is yielded
    twice."""
    parts = [(k, m) for k, m in module._modules.items() if m is not None]
    for k, m in parts:
        yield from _leaves(m, f"{name}.{k}" if name else k)
    if not parts:
        yield name, module


def _tried(model: nn.Module, modules: Sequence[nn.Module], x: Tensor) -> None:
    """Raise an error unless the modules one after another compute what the model does."""
    names = " -> ".join(type(m).__name__ for m in modules[:6]) + (" -> ..." if len(modules) > 6 else "")
    advice = ("Write activations and reshapes as modules (nn.ReLU(), nn.Flatten()) in an nn.Sequential; models with branches and "
              "residual connections are not chains.")
    with torch.no_grad(), evaluated(model):
        wanted = model(x.clone())  # a clone, because a first module that works in place would write into x
        try:
            got = composed(modules, x.clone())
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise SelectionError(f"the {type(model).__name__} is not a chain: its parts, one after another ({names}), cannot "
                                 f"read each other ({str(error).splitlines()[0][:120]}). {advice}") from error
    if isinstance(wanted, Tensor) and not torch.isfinite(wanted).all():
        raise SelectionError(f"outputs of the {type(model).__name__} contain NaN or Inf, so nothing can be compared with "
                             f"them. Check the inputs, and whether the weights diverged.")
    if not isinstance(wanted, Tensor) or not isinstance(got, Tensor) or got.shape != wanted.shape or not torch.allclose(
            got, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max())):
        raise SelectionError(f"the {type(model).__name__} is not a chain: its parts, one after another ({names}), give another "
                             f"output than the model itself. {advice}")


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Put every module in eval mode, and restore the modes afterwards."""
    modes = [(m, m.training) for m in model.modules()]
    try:
        for m, _ in modes:
            m.training = False  # not m.eval(), because some models react to it
        yield
    finally:
        for m, mode in modes:
            m.training = mode
