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
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from richter.core import SelectionError
from richter.instrument.capture.detours import compiled_eagerly
from richter.instrument.capture.gate import gated
from richter.instrument.capture.guard import guarded
from richter.instrument.capture.remembered import remembered

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
