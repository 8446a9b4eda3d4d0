"""One thread at a time: whoever calls a model while another thread measures it waits until the measurement is over.

A measurement gives modules other weights and another mode for a while. A thread that trains the same model goes on where it is,
as long as it needs none of its modules (a backward pass, a step of the optimiser), and waits at the first one that it calls, or
asks for its parameters (``DOORS``): it then finds everything as it was. A thread that is inside a forward pass of the model when
a measurement begins is waited for, until it comes to the next module or out; if it does not for ``PATIENCE`` seconds, the
measurement is refused before it has begun. Two threads that measure the same model, or models that share modules, take turns. If
the weights changed meanwhile, the measurement is refused (see ``guard``), and what the other thread did stays.

Not held up: threads for which the model's own forward pass waits (they are let through after ``HELPING`` seconds, the first
time), and threads that are not Python's (torch's on a GPU, when a backward pass runs modules again). Not seen: a thread that
reads ``model.head.weight`` outside a forward pass, or asks a part or a wrapper of the model for its ``parameters()``. Whether
it was another thread that changed weights is judged by who has the model, a weight or the optimiser at hand, and has done
something since the measurement began: a thread that has ended by then is not seen either.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from richter.core import CaptureError
from richter.instrument.capture.guard import ADVICE

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
