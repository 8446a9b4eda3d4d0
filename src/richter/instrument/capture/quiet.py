"""Everything a measurement could disturb, put back afterwards whatever happens in between: modes, what modules keep (see
``attributes.py``), weights and gradients (``Guard``), autocast, and random streams, of which the process has one for each device,
one of numpy and one of Python.

What holds with several threads. torch's streams: a forward pass that has borrowed them is alone with them, so that it draws what
it would draw alone, and puts them back; another thread's pass waits for its end, backward passes and all else run side by side.
numpy's and Python's global streams are put back when a measurement ends: measure models that draw from these one at a time. A
thread that does not measure, and draws from one of these streams (dropout, a shuffled loader) while another thread measures,
cannot be told from the model that is measured: its draws come from a borrowed stream, and are repeated.
"""

from __future__ import annotations

import contextlib
import contextvars
import random
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from richter.core import DisturbedError, SelectionError
from richter.instrument.capture.attributes import changed, finished, originals, remembered

# --------------------------------------------------------------------------------------------------------------- guard
# Nothing may write into weights, buffers and gradients of a model while it is measured; if something did, the measurement is an
# error. Weights and buffers, and gradients, are copied if each come to at most ``BACKUP_BYTES``: then every changed bit is seen.
# In larger models, a change that torch counts is seen.
#
# Where no other thread works, the model itself wrote, and it is put back. Another thread may train the model: then what changed
# stays, because to put it back would undo steps of training.

_TURNS = threading.Condition()
_MEASURED: dict[int, int] = {}  # id of a module that is measured -> the thread that measures it


@contextlib.contextmanager
def in_turn(model: nn.Module) -> Iterator[None]:
    """Context for one thread at a time per model; threads whose models share modules wait for each other."""
    here, modules = threading.get_ident(), {id(module) for module in model.modules()}
    with _TURNS:
        _TURNS.wait_for(lambda: all(_MEASURED.get(key, here) == here for key in modules))
        entered = modules - _MEASURED.keys()  # a measurement inside a measurement enters none
        _MEASURED.update(dict.fromkeys(entered, here))
    try:
        yield
    finally:
        with _TURNS:
            for key in entered:
                del _MEASURED[key]
            _TURNS.notify_all()


def alone() -> bool:
    """Is this the only thread that works? Daemons do not count: progress bars, loaders, loggers, and torch's own."""
    return all(thread.daemon or thread is threading.current_thread() for thread in threading.enumerate())


class Guard:
    """Weights, buffers and gradients of a model at the beginning of a measurement."""

    def __init__(self, model: nn.Module) -> None:
        self.alone = alone()
        weights = {f"parameter {name!r}": p for name, p in model.named_parameters()}
        buffers = {f"buffer {name!r}": b for name, b in model.named_buffers()}
        self.grads = {label: (p, p.grad) for label, p in weights.items()}
        self.weights = originals({**weights, **buffers})
        self.gradients = originals({label: grad for label, (_, grad) in self.grads.items() if grad is not None})

    def finish(self) -> list[str]:
        """Restore what the model itself changed, and report it."""
        written, added = changed(self.weights), changed(self.gradients)
        graded = [label for label, (p, grad) in self.grads.items() if p.grad is not grad or label in added]
        if (written or graded) and not (self.alone and alone()):
            raise DisturbedError(f"{_names(written or graded)} changed while the model was measured, and other threads run. One "
                                 f"of them may train the model, so nothing was put back; the numbers would belong to no single "
                                 f"set of weights. Measure in the thread that trains, or a copy (copy.deepcopy(model)).")
        sentences = []
        if written:
            lost = [label for label in written if not self.weights[label].restore()]
            sentences.append(
                f"{_names(written)} changed while the model was measured: a forward or backward pass writes into the model's own "
                f"weights, not into those that it was called with (through .data, or another reference to them). "
                f"{_outcome(lost)} Numbers would belong to no single set of weights. Write to it as an attribute of its module, "
                f"or keep such a tensor as a plain attribute.")
        if graded:
            lost = [label for label in graded if not self._gradient_back(label)]
            sentences.append(
                f"the .grad of {_names(graded)} changed while the model was measured: something in the model differentiates its "
                f"own parameters, not those that it was called with (a backward() inside, an autograd.Function that recomputes). "
                f"{_outcome(lost)} What arrived there is missing in the numbers. Use torch.autograd.grad inside the model, "
                f"toward tensors that were handed to it.")
        return sentences

    def _gradient_back(self, label: str) -> bool:
        """Restore the gradient of a parameter; return whether its values are the original ones."""
        p, grad = self.grads[label]
        p.grad = grad
        return grad is None or not self.gradients[label].changed() or self.gradients[label].restore()


def _names(labels: list[str]) -> str:
    """List the first three labels, and the number of the others."""
    return ", ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else "")


def _outcome(lost: list[str]) -> str:
    """Sentence that says whether the changes were undone."""
    return "It could not be put back: the model is too large for a copy to be kept." if lost else "It was put back."


# ------------------------------------------------------------------------------------------------------------- detours
# Detours around what a capture cannot look through: checkpointed functions are simply called, compiled ones run eagerly,
# parametrised weights are computed once in a pass, and batch norms of one example get gradients that torch reads correctly. The
# thread that measures takes each of them, and no other.

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
        """Context in which the replacement is active for this thread."""
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
        """Install the replacement, unless another thread has done so."""
        with self._lock:
            if self._instead is None or getattr(owner, self.name) is not self._instead:
                self._usual = getattr(owner, self.name)
                self._instead = self.build(self._usual, self._taken.get)
                setattr(owner, self.name, self._instead)
            self._threads += 1

    def _leave(self, owner: Any) -> None:
        """Remove the replacement if no thread needs it any more."""
        with self._lock:
            self._threads -= 1
            if not self._threads and getattr(owner, self.name) is self._instead:  # nobody has put something else there since
                setattr(owner, self.name, self._usual)
                self._usual = self._instead = None


def _called(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    """Stand-in for ``torch.utils.checkpoint`` that calls the function directly."""
    return function(*args)


def _nothing_around(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Stand-in for a context manager that does nothing."""
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
    """Stand-in for ``torch.cond`` that runs the chosen branch in Python."""
    return (true_fn if pred else false_fn)(*operands)


# The backward pass of torch's batch norm misreads the gradient of a single example that lies channels last:
# docs/torch_batch_norm.py shows it.
def _contiguous_gradient(usual: Callable[..., Any], taken: Taken) -> Callable[..., Any]:
    """Wrap a norm so that gradients reach it contiguous, as its backward kernel needs them."""
    def norm(input: Any, *args: Any, **kwargs: Any) -> Any:
        z = usual(input, *args, **kwargs)
        if taken() and len(z) == 1 and z.requires_grad and torch._C._functorch.peek_interpreter_stack() is None:
            z.register_hook(torch.Tensor.contiguous)
        return z
    return norm


BATCH_NORM = Detour("torch", "batch_norm", _contiguous_gradient)
INSTANCE_NORM = Detour("torch", "instance_norm", _contiguous_gradient)  # calls the same code


class _Stance:
    """``torch.compiler.set_stance("force_eager")`` for some threads only; torch's own holds for the whole process."""

    def __init__(self, usual: Any, taken: Taken) -> None:
        self._usual, self._taken = usual, taken

    def __getattr__(self, name: str) -> Any:
        return getattr(_EAGER if self._taken() else self._usual, name)


_EAGER = SimpleNamespace(stance="force_eager", skip_guard_eval_unsafe=False, backend=None)


STANCE = Detour("torch._dynamo.eval_frame", "_stance", _Stance)


@contextlib.contextmanager
def checkpoints_called() -> Iterator[None]:
    """Context in which a checkpointed function is called directly, so that its graph is kept, and ``torch.cond`` runs the chosen
    branch."""
    with REENTRANT.taken(), NOT_REENTRANT.taken(), CONDITION.taken():
        yield


@contextlib.contextmanager
def single_examples_right() -> Iterator[None]:
    """Batch norms of a single example have the right gradients."""
    with BATCH_NORM.taken(), INSTANCE_NORM.taken():
        yield


def compiled_eagerly() -> contextlib.AbstractContextManager[None]:
    """Context in which compiled code runs as it was written: hooks work, and nothing is compiled for the probe's shapes."""
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


# --------------------------------------------------------------------------------------------------------------- quiet

class Hooking:
    """Object that hooks modules. If the model copies a module in its forward pass, the copy has the same hook objects."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self


_BORROWED = threading.RLock()  # by the one thread that may change the state of torch's streams
# of the measurement that is running: its seed, and the streams of the devices of its model
_DRAWN: contextvars.ContextVar[tuple[int, Sequence[torch.Generator]]] = contextvars.ContextVar("richter_drawn", default=(0, ()))


@contextlib.contextmanager
def quiet(model: nn.Module, mode: str = "eval", seed: int = 0) -> Iterator[None]:
    """Around a measurement: random streams, train/eval flags, what modules keep in their attributes, autocast, gradient and
    inference mode are afterwards as they were. Compiled code runs eagerly inside. Weights, buffers or gradients that changed
    meanwhile are an error (``Guard``).

    Threads may measure different models at the same time, while others train theirs: apart from the random streams (see above)
    everything here belongs to the calling thread or to its model. Measurements of one model take turns. No other thread may call
    or train a model that is measured: it would see the weights and the mode of the measurement.
    """
    if mode not in ("eval", "train"):
        raise SelectionError(f"mode={mode!r}: choose 'eval' (default) or 'train'.")
    devices = {"cpu"} | {p.device.type for p in model.parameters()}
    with (torch.inference_mode(False), torch.enable_grad(), in_turn(model), finished(Guard(model).finish), remembered(model),
          _streams_kept(model, seed), _without_autocast(devices), compiled_eagerly()):
        for module in model.modules():
            module.training = mode == "train"  # not module.train(): some models act on being switched
        yield


@contextlib.contextmanager
def _without_autocast(devices: Collection[str]) -> Iterator[None]:
    """Autocast switched off for this thread. Leaving ``torch.autocast(device, enabled=False)`` would also empty the cache of
    weights that were cast, which all threads share: another thread in the middle of a mixed-precision step would cast its
    weights twice, and round its gradients differently."""
    enabled = {device: torch.is_autocast_enabled(device) for device in devices}
    try:
        for device in devices:
            torch.set_autocast_enabled(device, False)
        yield
    finally:
        for device, before in enabled.items():
            torch.set_autocast_enabled(device, before)


def differentiable_twice() -> AbstractContextManager[None]:
    """Inside, attention runs as plain products: of the fused kernels torch knows the gradient, but not the gradient's own."""
    return sdpa_kernel(SDPBackend.MATH)


def _generators(model: nn.Module) -> list[torch.Generator]:
    """The streams of the CPU and of the GPUs that hold the model; torch.manual_seed would seed every device there is."""
    gpus = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    return [torch.default_generator, *(torch.cuda.default_generators[i] for i in gpus)]


def streams(model: nn.Module) -> list[Tensor]:
    """The states of the random streams that a model may draw from."""
    return [generator.get_state() for generator in _DRAWN.get()[1] or _generators(model)]


def _restore(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    """Restore the states of random generators."""
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


@contextlib.contextmanager
def borrowed(model: nn.Module, states: Sequence[Tensor] | None = None) -> Iterator[Sequence[torch.Generator]]:
    """Context in which this thread's random streams of a model have the given states; the old states are restored."""
    generators = _DRAWN.get()[1] or _generators(model)
    with _BORROWED:
        before = streams(model)
        try:
            if states is not None:
                _restore(generators, states)
            yield generators
        finally:
            _restore(generators, before)


@contextlib.contextmanager
def seeded(model: nn.Module, seed: int) -> Iterator[None]:
    """Context for one forward pass in which random numbers depend only on ``seed`` and on that of the measurement; the streams
    are restored."""
    measured = _DRAWN.get()[0]
    with borrowed(model) as generators:
        for generator in generators:
            generator.manual_seed(measured * 1_000_003 + seed)
        yield


@contextlib.contextmanager
def _streams_kept(model: nn.Module, seed: int) -> Iterator[None]:
    """Context for a whole measurement with its ``seed``; all random streams are restored, whoever drew from them."""
    generators = _generators(model)
    with _BORROWED:  # not while they are another thread's
        states = [generator.get_state() for generator in generators]
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002  the global streams themselves
    token = _DRAWN.set((seed, generators))
    try:
        yield
    finally:
        _DRAWN.reset(token)
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)
        with _BORROWED:
            _restore(generators, states)
