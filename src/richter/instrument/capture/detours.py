"""Detours around what a capture cannot look through: checkpointed functions are simply called, compiled ones run eagerly,
parametrised weights are computed once in a pass, and batch norms of one example get gradients that torch reads correctly. Each is
taken by the thread that measures, and by no other."""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch.utils.checkpoint  # a model may import it as late as in its forward
from torch import nn

Taken = Callable[[], bool]


class Detour:
    """A name of another module that means something else to the threads that take the detour.

    ``build(usual, taken)`` makes what stands in its place: it asks ``taken()`` whenever it is used, and does the usual thing for
    all other threads. It stands there as long as some thread takes the detour. Where torch has no such name (it is its own to
    change, or the module was never imported) nothing happens.
    """

    def __init__(self, module: str, name: str, build: Callable[[Any, Taken], Any]) -> None:
        self.module, self.name, self.build = module, name, build
        self._taken: contextvars.ContextVar[bool] = contextvars.ContextVar(f"richter_{name}", default=False)
        self._lock, self._threads = threading.Lock(), 0
        self._usual: Any = None
        self._instead: Any = None

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        owner = sys.modules.get(self.module)
        if not hasattr(owner, self.name):
            yield
            return
        self._enter(owner)
        token = self._taken.set(True)
        try:
            yield
        finally:
            self._taken.reset(token)
            self._leave(owner)

    def _enter(self, owner: Any) -> None:
        with self._lock:
            if self._instead is None or getattr(owner, self.name) is not self._instead:
                self._usual = getattr(owner, self.name)
                self._instead = self.build(self._usual, self._taken.get)
                setattr(owner, self.name, self._instead)
            self._threads += 1

    def _leave(self, owner: Any) -> None:
        with self._lock:
            self._threads -= 1
            if not self._threads and getattr(owner, self.name) is self._instead:  # nobody has put something else there since
                setattr(owner, self.name, self._usual)
                self._usual = self._instead = None


def _called(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    return function(*args)


def _nothing_around(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


# Activation checkpointing recomputes inside backward, where the recorder is gone, and its older form cannot differentiate toward
# activations at all.
REENTRANT = Detour("torch.utils.checkpoint", "CheckpointFunction", lambda usual, taken: SimpleNamespace(
    apply=lambda *args: (_called if taken() else usual.apply)(*args)))
NOT_REENTRANT = Detour("torch.utils.checkpoint", "_checkpoint_without_reentrant_generator", lambda usual, taken: (
    lambda *args, **kwargs: (_nothing_around if taken() else usual)(*args, **kwargs)))


# torch.cond traces both of its branches with tensors that hold no numbers.
CONDITION = Detour("torch", "cond", lambda usual, taken: (
    lambda *args, **kwargs: (_branch if taken() else usual)(*args, **kwargs)))


def _branch(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()) -> Any:
    return (true_fn if pred else false_fn)(*operands)


# The backward pass of torch's batch norm misreads the gradient of a single example that lies channels last:
# docs/torch_batch_norm.py shows it.
def _contiguous_gradient(usual: Callable[..., Any], taken: Taken) -> Callable[..., Any]:
    def norm(input: Any, *args: Any, **kwargs: Any) -> Any:
        z = usual(input, *args, **kwargs)
        if taken() and len(z) == 1 and z.requires_grad and torch._C._functorch.peek_interpreter_stack() is None:
            z.register_hook(torch.Tensor.contiguous)
        return z
    return norm


BATCH_NORM = Detour("torch", "batch_norm", _contiguous_gradient)
INSTANCE_NORM = Detour("torch", "instance_norm", _contiguous_gradient)  # calls the same code


class _Stance:
    """torch.compiler.set_stance("force_eager"), for some threads only: that of torch holds for the whole process."""

    def __init__(self, usual: Any, taken: Taken) -> None:
        self._usual, self._taken = usual, taken

    def __getattr__(self, name: str) -> Any:
        return getattr(_EAGER if self._taken() else self._usual, name)


_EAGER = SimpleNamespace(stance="force_eager", skip_guard_eval_unsafe=False, backend=None)


STANCE = Detour("torch._dynamo.eval_frame", "_stance", _Stance)


@contextlib.contextmanager
def checkpoints_called() -> Iterator[None]:
    """The checkpointed function is called, and what it computes is kept for the backward passes; of the two branches of a
    ``torch.cond``, the one that is taken."""
    with REENTRANT.taken(), NOT_REENTRANT.taken(), CONDITION.taken():
        yield


@contextlib.contextmanager
def single_examples_right() -> Iterator[None]:
    """Batch norms of a single example have the right gradients."""
    with BATCH_NORM.taken(), INSTANCE_NORM.taken():
        yield


def compiled_eagerly() -> contextlib.AbstractContextManager[None]:
    """Compiled code runs as it was written: hooks are heard, and nothing is compiled for the probe's shapes."""
    return STANCE.taken()


@contextlib.contextmanager
def parametrised_once(modules: Sequence[nn.Module]) -> Iterator[None]:
    """The parametrised weights of these modules are computed once in a pass. ``parametrize.cached()`` keeps them for
    every model and thread of the process; here each module becomes one of a class of its own for the length of the pass. What a
    surrounding ``cached()`` of the user's keeps is neither used nor replaced."""
    parametrised = [(module, type(module)) for module in dict.fromkeys(modules)]
    try:
        for module, usual in parametrised:
            module.__class__ = _computing_once(module, usual)
        yield
    finally:
        for module, usual in parametrised:
            module.__class__ = usual


def _computing_once(module: nn.Module, usual: type[nn.Module]) -> type[nn.Module]:
    """A subclass whose parametrised weights are computed when they are first read."""
    weights: dict[str, Any] = {}

    def once(name: str) -> property:
        def weight(self: nn.Module) -> Any:
            if name not in weights:
                weights[name] = self.parametrizations[name]()  # type: ignore[index,operator]
            return weights[name]
        return property(weight, getattr(usual, name).fset)

    names = list(module.parametrizations)  # type: ignore[arg-type]
    same = {"__module__": usual.__module__, "__qualname__": usual.__qualname__}
    return type(usual.__name__, (usual,), same | {name: once(name) for name in names})
