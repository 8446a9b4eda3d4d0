"""Times and levels of losses that fall in jumps, and simple rivals of a prediction of these times."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from richter.report.drawing import COLOURS, label, line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Numbers = NDArray[np.float64]


def crossings(t: ArrayLike, loss: ArrayLike, levels: ArrayLike) -> Numbers:
    """Times at which a loss first is half way from each level to the next; NaN if it never is."""
    times, values, stairs = (np.asarray(a, dtype=float) for a in (t, loss, levels))
    return np.array([_first_below(times, values, half) for half in (stairs[:-1] + stairs[1:]) / 2])


def _first_below(t: Numbers, loss: Numbers, level: float) -> float:
    """Time at which the loss first is at this level, on the straight line between two points; NaN if it never is."""
    i = int(np.argmax(loss <= level))
    if not loss[i] <= level:
        return float("nan")
    return float(t[i] - (t[i] - t[i - 1]) * (level - loss[i]) / (loss[i - 1] - loss[i])) if i else float(t[0])


def plateaus(t: ArrayLike, loss: ArrayLike, jumps: ArrayLike) -> Numbers:
    """Loss in the middle between each jump and the next, and at the end."""
    times, seen = np.asarray(t, dtype=float), np.asarray(jumps, dtype=float)
    middles = np.concatenate([(seen[:-1] + seen[1:]) / 2, times[-1:]])
    return np.interp(middles, times, np.asarray(loss, dtype=float))


def even_times(jumps: ArrayLike) -> Numbers:
    """Evenly spaced times from the first jump to the last, as many as there are jumps: a rival that knows both ends."""
    seen = np.asarray(jumps, dtype=float)
    return np.linspace(seen[0], seen[-1], len(seen))


def times_around(jumps: ArrayLike, end: float, points: int = 400, share: float = 0.25) -> Numbers:
    """Times from 0 to ``end``, denser around each of these jumps."""
    near = [np.linspace(1 - share, 1 + share, points) * time for time in np.asarray(jumps, dtype=float)]
    return np.unique(np.clip(np.concatenate([np.linspace(0, end, points), *near]), 0, end))


def relative_error(predicted: ArrayLike, seen: ArrayLike) -> Numbers:
    """|predicted / measured - 1|."""
    return np.abs(np.asarray(predicted, dtype=float) / np.asarray(seen, dtype=float) - 1)


def draw_staircase(ax: Axes, t: ArrayLike, loss: ArrayLike, times: ArrayLike, levels: ArrayLike, flow: str, theory: str) -> None:
    """Draw a loss along a flow, and the predicted staircase."""
    end = float(np.asarray(t, dtype=float)[-1])
    ends = np.concatenate([[0.0], np.minimum(np.asarray(times, dtype=float), end), [end]])
    ax.plot(np.asarray(t, dtype=float), np.asarray(loss, dtype=float), color=COLOURS[0], linewidth=1.8, label=flow)
    line(ax, np.repeat(ends, 2)[1:-1], np.repeat(np.asarray(levels, dtype=float), 2), label=theory, style="--")
    label(ax, "time", "loss", legend=True)


def descend(phi: str, theta: Numbers, x: Numbers, y: Numbers, lr: float, steps: int, every: int) -> tuple[Numbers, list[Numbers]]:
    """Gradient descent of sum_i a_i phi(w_i.x) with phi ReLU or a square, theta_i = (w_i, a_i): losses and parameters at every
    so many steps, the first among them. In steps this short it is the flow, and kinks do not stop it."""
    W, A = theta[:, :x.shape[1]].copy(), theta[:, x.shape[1]:].copy()
    losses, kept = list[float](), list[Numbers]()
    for step in range(steps + 1):
        z = x @ W.T
        h, slope = (np.maximum(z, 0), z > 0) if phi == "relu" else (z * z, 2 * z)
        r = y - h @ A
        if step % every == 0:
            losses.append(float((r * r).sum() / (2 * len(y))))
            kept.append(np.concatenate([W, A], 1))
        r *= lr / len(y)
        W, A = W + (slope * (r @ A.T)).T @ x, A + h.T @ r
    return np.array(losses), kept
