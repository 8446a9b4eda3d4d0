"""Everything a measurement could disturb, put back afterwards whatever happens in between: modes, what modules keep
(``remembered``), weights and gradients (``guard``), autocast, and random streams, of which the process has one for each device,
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
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from richter.core import CaptureError, DisturbedError, SelectionError
from richter.instrument.capture.attributes import BACKUP_BYTES, Original, finished, remembered, size_of

# --------------------------------------------------------------------------------------------------------------- guard
# Weights, buffers and gradients of a model that is measured: nothing may write into them. What does is put back, and an error.
#
# Copies are kept of weights and buffers, and of gradients, if each come to at most ``originals.BACKUP_BYTES``: then every bit
# that
# changes is seen, however it was written, and put back. Of larger models, a change that torch counts is seen and said.

ADVICE = "Measure in the thread that trains, or a copy (copy.deepcopy(model))."


class Guard:
    """The weights of a model as they are now. ``others``: does another thread seem to work with the model?"""

    def __init__(self, model: nn.Module, others: Callable[[], bool]) -> None:
        self.others = others
        weights = {f"parameter {name!r}": p for name, p in model.named_parameters()}
        buffers = {f"buffer {name!r}": b for name, b in model.named_buffers()}
        self.grads = {label: (p, p.grad) for label, p in weights.items()}
        self.weights = _originals({**weights, **buffers})
        self.gradients = _originals({label: grad for label, (_, grad) in self.grads.items() if grad is not None})

    def finish(self) -> list[str]:
        """Put back what changed, unless another thread trains the model; what there is to say of it."""
        written = [label for label, original in self.weights.items() if original.changed()]
        graded = [label for label, (p, grad) in self.grads.items()
                  if p.grad is not grad or (grad is not None and self.gradients[label].changed())]
        if not written and not graded:
            return []
        if self.others():
            raise DisturbedError(f"{_names(written or graded)} changed while the model was measured, and another thread works "
                                 f"with the model. Its training goes on as if nothing had been measured, but numbers would "
                                 f"belong to no single set of weights. {ADVICE}")
        return [*self._weights_back(written), *self._gradients_back(graded)]

    def _weights_back(self, labels: list[str]) -> list[str]:
        if not labels:
            return []
        lost = [label for label in labels if not self.weights[label].restore()]
        return [f"{_names(labels)} changed while the model was measured: a forward or backward pass writes into the model's own "
                f"weights, not into those that it was called with (through .data, or another reference to them). "
                f"{_outcome(not lost)} Numbers would belong to no single set of weights. Write to it as an attribute of its "
                f"module, or keep such a tensor as a plain attribute."]

    def _gradients_back(self, labels: list[str]) -> list[str]:
        if not labels:
            return []
        back = True
        for label in labels:
            p, grad = self.grads[label]
            p.grad = grad
            if grad is not None and self.gradients[label].changed():
                back &= self.gradients[label].restore()
        return [f"the .grad of {_names(labels)} changed while the model was measured: something in the model differentiates its "
                f"own parameters, not those that it was called with (a backward() inside, an autograd.Function that recomputes). "
                f"{_outcome(back)} What arrived there is missing in the numbers. Use torch.autograd.grad inside the model, "
                f"toward tensors that were handed to it."]


def _originals(tensors: Mapping[str, Tensor]) -> dict[str, Original]:
    copied = sum(map(size_of, tensors.values())) <= BACKUP_BYTES
    return {label: Original(t, copied) for label, t in tensors.items()}


def _names(labels: list[str]) -> str:
    return ", ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else "")


def _outcome(back: bool) -> str:
    return "It was put back." if back else "It could not be put back: the model is too large for a copy to be kept."


@contextlib.contextmanager
def guarded(model: nn.Module, others: Callable[[], bool]) -> Iterator[None]:
    """Weights, buffers and gradients are afterwards as they were; that they were not meanwhile is an error."""
    with finished(Guard(model, others).finish):
        yield


# ------------------------------------------------------------------------------------------------------------- detours
# Detours around what a capture cannot look through: checkpointed functions are simply called, compiled ones run eagerly,
# parametrised weights are computed once in a pass, and batch norms of one example get gradients that torch reads correctly.
# Each is
# taken by the thread that measures, and by no other.

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


# ---------------------------------------------------------------------------------------------------------------- gate
# One thread at a time: whoever calls a model while another thread measures it waits until the measurement is over.
#
# A measurement gives modules other weights and another mode for a while. A thread that trains the same model goes on where it is,
# as long as it needs none of its modules (a backward pass, a step of the optimiser), and waits at the first one that it calls, or
# asks for its parameters (``DOORS``): it then finds everything as it was. A thread that is inside a forward pass of the model
# when
# a measurement begins is waited for, until it comes to the next module or out; if it does not for ``PATIENCE`` seconds, the
# measurement is refused before it has begun. Two threads that measure the same model, or models that share modules, take turns.
# If
# the weights changed meanwhile, the measurement is refused (see ``guard``), and what the other thread did stays.
#
# Not held up: threads for which the model's own forward pass waits (they are let through after ``HELPING`` seconds, the first
# time), and threads that are not Python's (torch's on a GPU, when a backward pass runs modules again). Not seen: a thread that
# reads ``model.head.weight`` outside a forward pass, or asks a part or a wrapper of the model for its ``parameters()``. Whether
# it was another thread that changed weights is judged by who has the model, a weight or the optimiser at hand, and has done
# something since the measurement began: a thread that has ended by then is not seen either.

PATIENCE = 30.0  # seconds
HELPING = 1.0
DOORS = ("named_parameters", "named_buffers", "state_dict", "load_state_dict", "train")  # with them parameters(), eval()
LOOKS = 0.005  # between two looks at another thread
DEEP = 20_000  # frames of a stack: there are no more
WAITS = ("threading", "queue", "concurrent.futures", "selectors", "multiprocessing")  # modules in which threads wait
_TURNS = threading.Condition()
_MEASURED: dict[int, Gate] = {}  # by the ids of modules under measurement


class Gate:
    """Of one measurement, on each module of its model."""

    def __init__(self, model: nn.Module) -> None:
        self.owner, self.over = threading.get_ident(), threading.Event()
        self.modules = {id(module): module for module in model.modules()}
        self.tensors = {id(t) for t in (*model.parameters(), *model.buffers())}
        self.held: set[int] = set()  # threads that wait here
        self.came: set[int] = set()  # threads that have waited here
        self.helpers: set[int] = set()  # threads that do the owner's work
        self.idle = {thread: _standing(frame) for thread, frame in sys._current_frames().items() if _waits(frame)}

    def __call__(self, module: nn.Module, args: Any) -> None:
        """The forward pre-hook."""
        here = threading.get_ident()
        if here == self.owner or here in self.helpers or self.over.is_set() or measures(here) or not _of_python(here):
            return
        self.came.add(here)
        self.held.add(here)
        try:
            self._wait(here)
        finally:
            self.held.discard(here)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, ()  # a copy that somebody makes of the model meanwhile

    def _wait(self, here: int) -> None:
        stands, since = None, time.monotonic()
        while not self.over.wait(LOOKS):
            frame = sys._current_frames().get(self.owner)
            now = None if frame is None else _standing(frame)
            if now != stands:
                stands, since = now, time.monotonic()
            stood = time.monotonic() - since
            if frame is not None and stood > HELPING and _waits(frame) and self.is_inside(frame):
                self.helpers.add(here)  # it waits in a forward pass: for this thread, or whatever this thread holds
                self.came.discard(here)
                return
            if stood > PATIENCE:
                return

    def is_inside(self, frame: FrameType | None) -> bool:
        """Is this thread inside the forward pass of one of the modules? Perhaps, where its stack was torn while it was read."""
        frames = _up(frame)
        return frames is None or any(id(f.f_locals.get("self")) in self.modules for f in frames
                                     if f.f_code.co_name == "_call_impl")

    def others(self) -> bool:
        """Does another thread work with the model, or has it since the measurement began?"""
        return bool(self.came) or any(self._knows(frame) for thread, frame in sys._current_frames().items()
                                      if thread != self.owner and thread not in self.helpers
                                      and self.idle.get(thread) != _standing(frame))

    def _knows(self, frame: FrameType) -> bool:
        """Has this thread the model, its weights or their optimiser at hand?"""
        values = (value for f in _up(frame) or () for value in list(f.f_locals.values()))
        return any(id(value) in self.modules or id(value) in self.tensors or self._steps(value) for value in values)

    def _steps(self, value: Any) -> bool:
        groups = value.param_groups if issubclass(type(value), torch.optim.Optimizer) else []
        return any(id(p) in self.tensors for group in groups for p in group["params"])

    def wait_for_others(self) -> None:
        """Until no other thread is inside a forward pass, or all that are wait at the gate."""
        if threading.active_count() == 1:
            return
        deadline = time.monotonic() + PATIENCE
        while any(thread != self.owner and thread not in self.held and self.is_inside(frame)
                  for thread, frame in sys._current_frames().items()):
            if time.monotonic() > deadline:
                raise CaptureError(f"another thread has been inside a forward pass of the model for {PATIENCE:.0f} seconds: to "
                                   f"measure now would change the weights under its feet, and nothing was touched. {ADVICE}")
            time.sleep(LOOKS)


def wait_at(module: nn.Module) -> None:
    """Before a module runs: threads that do not measure it wait, if another one does."""
    gate = _MEASURED.get(id(module))
    if gate is not None:
        gate(module, ())


class Door:
    """A method of a module through which other threads would see, or change, what is not the model's own."""

    def __init__(self, gate: Gate, module: nn.Module, name: str) -> None:
        self.gate, self.module, self.name = gate, module, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.gate(self.module, args)
        return getattr(type(self.module), self.name)(self.module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _method, (self.module, self.name)


def _method(module: nn.Module, name: str) -> Any:
    """A door in a copy of the model: the method itself."""
    return getattr(type(module), name).__get__(module)


def _open() -> Any:
    return _nothing


def _nothing(module: nn.Module, args: Any) -> None:
    """A gate in a copy of the model."""


def measures(thread: int) -> bool:
    """Does this thread measure something itself?"""
    return any(gate.owner == thread for gate in list(_MEASURED.values()))


def _of_python(thread: int) -> bool:
    return any(t.ident == thread and not isinstance(t, threading._DummyThread) for t in threading.enumerate())


def _up(frame: Any) -> list[FrameType] | None:
    """A frame of another thread and those that have called it; None where that thread has gone on meanwhile, and what stands in
    the place of a caller is none, or leads nowhere: a generator that was left points to where its caller was."""
    frames: list[FrameType] = []
    while isinstance(frame, FrameType) and len(frames) <= DEEP:
        frames.append(frame)
        frame = frame.f_back
    return frames if frame is None else None


def _waits(frame: FrameType) -> bool:
    name = f"{frame.f_globals.get('__name__', '')}."
    return any(name.startswith(f"{module}.") for module in WAITS)


def _standing(frame: FrameType) -> list[tuple[int, int]]:
    """Where a thread is: the same as long as it does nothing in Python."""
    return [(id(f), f.f_lasti) for f in _up(frame) or ()]


@contextlib.contextmanager
def gated(model: nn.Module) -> Iterator[Gate]:
    """The model is this thread's until the block ends. A thread that measures the model already goes on as before."""
    gate = Gate(model)
    with _TURNS:
        holders = {id(_MEASURED[k]): _MEASURED[k] for k in gate.modules if k in _MEASURED}.values()
        own = next((holder for holder in holders if holder.owner == gate.owner), None)
        if own is None:
            _TURNS.wait_for(lambda: not any(k in _MEASURED for k in gate.modules))
            _MEASURED.update(dict.fromkeys(gate.modules, gate))
    if own is not None:
        yield own
        return
    handles: list[Any] = []
    doors = [name for name in DOORS if name not in vars(model)]
    try:
        for module in gate.modules.values():
            if not isinstance(module, torch.jit.ScriptModule):  # it takes no hooks
                handles.append(module.register_forward_pre_hook(gate, prepend=True))
        vars(model).update({name: Door(gate, model, name) for name in doors})
        gate.wait_for_others()
        yield gate
    finally:
        for handle in handles:
            handle.remove()
        for name in doors:
            vars(model).pop(name, None)
        with _TURNS:
            for k in gate.modules:
                del _MEASURED[k]
            _TURNS.notify_all()
        gate.over.set()


# --------------------------------------------------------------------------------------------------------------- quiet

_BORROWED = threading.RLock()  # by the one thread that may change the state of torch's streams
# of the measurement that is running: its seed, and the streams of the devices of its model
_DRAWN: contextvars.ContextVar[tuple[int, Sequence[torch.Generator]]] = contextvars.ContextVar("richter_drawn", default=(0, ()))


@contextlib.contextmanager
def quiet(model: nn.Module, mode: str = "eval", seed: int = 0) -> Iterator[None]:
    """Around a measurement: random streams, train/eval flags, what modules keep in their attributes, autocast, gradient and
    inference mode are afterwards as they were. Compiled code runs eagerly inside. That weights, buffers or gradients of the model
    itself changed meanwhile is an error, and they are put back.

    Threads may measure different models at the same time, while others train theirs: apart from the random streams (see
    above) everything here belongs to the calling thread or to its model. A thread that calls the same model, or one that shares
    modules with it, waits for the end; if it changed the weights, the measurement is refused, and what it did stays (``gate``).
    """
    if mode not in ("eval", "train"):
        raise SelectionError(f"mode={mode!r}: choose 'eval' (default) or 'train'.")
    devices = {"cpu"} | {p.device.type for p in model.parameters()}
    with (torch.inference_mode(False), torch.enable_grad(), gated(model) as gate, guarded(model, gate.others), remembered(model),
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


@contextlib.contextmanager
def seeded(model: nn.Module, seed: int) -> Iterator[None]:
    """For one forward pass: what is drawn inside depends on ``seed`` and on that of the measurement alone, and the streams are
    as they were afterwards."""
    mine = _DRAWN.get()[0]
    with _borrowed(model) as generators:
        for generator in generators:
            generator.manual_seed(mine * 1_000_003 + seed)
        yield


@contextlib.contextmanager
def _borrowed(model: nn.Module) -> Iterator[Sequence[torch.Generator]]:
    """The streams of a model, for this thread alone; they are as they were afterwards."""
    generators = _DRAWN.get()[1] or _generators(model)
    with _BORROWED:
        states = [generator.get_state() for generator in generators]
        try:
            yield generators
        finally:
            _restore(generators, states)


@contextlib.contextmanager
def _streams_kept(model: nn.Module, seed: int) -> Iterator[None]:
    """For a whole measurement, with its ``seed``: all streams are afterwards as they were, whoever drew from them in between (a
    loss, a backward pass that draws)."""
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


def streams(model: nn.Module) -> list[Tensor]:
    """The states of the random streams that a model may draw from."""
    return [generator.get_state() for generator in _DRAWN.get()[1] or _generators(model)]


def drawn_since(model: nn.Module, states: Sequence[Tensor]) -> Sequence[Tensor]:
    """These states, if something was drawn since."""
    return () if all(map(torch.equal, states, streams(model))) else states


@contextlib.contextmanager
def draws_again(model: nn.Module, states: Sequence[Tensor]) -> Iterator[None]:
    """Inside, what was drawn from streams in these states, if any, is drawn again; afterwards they are as they were."""
    if not states:
        yield
        return
    with _borrowed(model) as generators:
        _restore(generators, states)
        yield


def _restore(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
