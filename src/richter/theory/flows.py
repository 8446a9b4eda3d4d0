"""Integration of a flow dy/dt = velocity(y), e.g. gradient flow, to given times: scipy's Runge-Kutta method of order eight with
an error tolerance, or gradient descent with a fixed step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from richter.core import RichterError, SelectionError
from richter.core.values import progress

State = TypeVar("State")  # an array, a tensor, or a list of them
Method = Literal["flow", "descent"]
FINEST = 100 * np.finfo(np.float64).eps  # smallest relative tolerance that float64 allows


class FlowError(RichterError, ArithmeticError):
    """A flow cannot be integrated: it leaves the finite numbers, or changes faster than any step size resolves."""


def flow(velocity: Callable[[State], State], start: State, times: Sequence[float], rtol: float = 1e-10,
         atol: float = 1e-12) -> list[State]:
    """Return the states y(t) at ``times``, where dy/dt = velocity(y) and y(0) = ``start``.

    A state is an array, a tensor, or a list of them. Results have the same kind, dtype and device. ``times`` go one way from 0,
    forward (0.5, 1.0) or backward (-0.5, -1.0). In each step the error of an entry y_i stays below ``atol`` + ``rtol`` |y_i|.
    """
    wanted = np.asarray(times, dtype=np.float64)
    if wanted.ndim != 1 or not len(wanted) or not np.isfinite(wanted).all() or not _one_way(wanted):
        raise SelectionError(f"times={list(times)!r}: finite times that go one way from 0 are needed, forward or backward.")
    if not (math.isfinite(rtol) and rtol > 0 and math.isfinite(atol) and atol > 0):
        raise SelectionError(f"rtol={rtol!r}, atol={atol!r}: positive numbers are needed.")
    y0 = _packed(start)
    if wanted[-1] == 0:
        return [_unpacked(y0, start) for _ in wanted]

    def slope(t: float, y: NDArray[np.float64]) -> NDArray[np.float64]:
        out = _packed(velocity(_unpacked(y, start)))
        if out.shape != y.shape:
            raise SelectionError(f"the velocity has {out.size} numbers and the state {y.size}; they must have the same shapes.")
        if not np.isfinite(out).all():
            raise FlowError(f"the velocity is NaN or Inf near t = {t:.4g}: the flow cannot be followed further. Ask for earlier "
                            f"times.")
        return out

    from scipy.integrate import solve_ivp
    distinct, number = np.unique(np.abs(wanted), return_inverse=True)
    done = solve_ivp(slope, (0.0, wanted[-1]), y0, method="DOP853", t_eval=distinct * np.sign(wanted[-1]),
                     rtol=max(rtol, FINEST), atol=atol)
    if not done.success:
        raise FlowError(f"the flow cannot be followed to t = {wanted[-1]:.4g}: {done.message} Ask for earlier times, or for less "
                        f"precision (rtol, atol).")
    return [_unpacked(done.y[:, i], start) for i in number]


def descend(velocity: Callable[[State], State], start: State, times: Sequence[float], lr: float) -> list[State]:
    """Return the states after round(t / ``lr``) steps y <- y + lr velocity(y) from ``start``: gradient descent with the learning
    rate ``lr``, whose limit is the flow."""
    if not (isinstance(lr, (int, float)) and math.isfinite(lr) and lr > 0):
        raise SelectionError(f"lr={lr!r}: the length of a step, above 0, is needed.")
    wanted = np.asarray(times, dtype=np.float64)
    if wanted.ndim != 1 or not len(wanted) or not np.isfinite(wanted).all() or (wanted < 0).any():
        raise SelectionError(f"times={list(times)!r}: finite times from 0 on are needed.")
    numbers = np.rint(wanted / lr).astype(int)
    needed = set(numbers.tolist())
    kept, y = {0: _unpacked(_packed(start), start)}, _packed(start)
    for step in progress(range(1, numbers.max() + 1), title="descent", unit="step"):
        with np.errstate(over="ignore", invalid="ignore"):  # reported below, as an error
            y = y + lr * _packed(velocity(_unpacked(y, start)))
        if not np.isfinite(y).all():
            raise FlowError(f"descent left the finite numbers in step {step}: lr={lr:g} is too large. Take a smaller one.")
        if step in needed:
            kept[step] = _unpacked(y, start)
    return [kept[number] for number in numbers.tolist()]


def follow(velocity: Callable[[State], State], start: State, times: Sequence[float], method: Method = "flow",
           lr: float | None = None) -> list[State]:
    """Run ``flow`` in full precision, or ``descend`` with steps of ``lr``. Simulations of theories use it."""
    if method not in ("flow", "descent"):
        raise SelectionError(f"method={method!r}: \"flow\" (integrated) or \"descent\" (steps of lr) is needed.")
    if (method == "descent") != (lr is not None):
        raise SelectionError(f"method={method!r} with lr={lr!r}: descent takes steps of lr, e.g. 1e-3; the flow chooses its own.")
    return flow(velocity, start, times, rtol=1e-12, atol=1e-14) if lr is None else descend(velocity, start, times, lr)


def _one_way(times: NDArray[np.float64]) -> bool:
    """Return whether times move away from 0 in one direction."""
    away = np.diff(np.concatenate([[0.0], times]))
    return bool((away >= 0).all() or (away <= 0).all())


def _packed(state: Any) -> NDArray[np.float64]:
    """Concatenate all numbers of a state."""
    parts = state if isinstance(state, (list, tuple)) else [state]
    return np.concatenate([np.asarray(p.detach().cpu() if isinstance(p, Tensor) else p, dtype=np.float64).reshape(-1)
                           for p in parts])


def _unpacked(numbers: NDArray[np.float64], like: Any) -> Any:
    """Restore a state with the kind and shapes of ``like`` from its numbers."""
    if isinstance(like, (list, tuple)):
        ends = np.cumsum([p.numel() if isinstance(p, Tensor) else np.size(p) for p in like])[:-1]
        return [_unpacked(part, p) for part, p in zip(np.split(numbers, ends), like, strict=True)]
    if isinstance(like, Tensor):
        return torch.tensor(numbers).reshape(like.shape).to(like)
    return numbers.reshape(np.shape(like)).astype(np.asarray(like).dtype)
