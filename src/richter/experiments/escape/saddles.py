"""From saddle to saddle on real images [escape]: a network of small weights rests on plateaus of the loss, and the ranks of its
deep layers grow from one to the next. Four layers and six; the paper's have 1,000 units in each hidden one and all of MNIST."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from richter.experiments.escape.images import images, initial
from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.measures.ranks import rank
from richter.measures.saddles import saddles
from richter.measures.stages import find
from richter.report.drawing import COLOURS, caption, label, line, panels, styled
from richter.theory import escape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Vector = NDArray[np.float64]
REST = 0.02  # of a training: a shorter plateau is no rest
MOST = 8  # saddles that are kept
LEFT = 0.995  # of the first loss: below it a network has left the origin


@dataclass(frozen=True)
class EscapeSaddlesSettings:
    """Weights N(0, 1) times ``gain`` / sqrt(fan-in). Steps have 2 % of the norm until the loss has fallen by half a per cent;
    then full-batch descent with momentum, in single precision. Ranks are measured at every ``every``th step. ``at`` says
    whether ranks are read on plateaus or from the initial weights."""

    data: str = "mnist"
    n: int = 500
    depths: tuple[int, ...] = (4, 6)
    width: int = 64
    gain: float = 0.01
    relative: int = 160  # steps at the origin, at most
    lr: float = 0.05
    momentum: float = 0.9
    steps: int = 3000
    every: int = 20
    seeds: tuple[int, ...] = tuple(range(5))
    at: Literal["plateaus", "start"] = "plateaus"


def descend(s: EscapeSaddlesSettings, weights: list[Any], x: torch.Tensor, y: torch.Tensor,
            run: Writer) -> tuple[list[float], list[Vector]]:
    """The loss at every step, and the ranks of the layers at every ``every``th."""
    W = [torch.as_tensor(w).float().requires_grad_() for w in weights]
    x, y = x.float(), y.float()
    optimiser = torch.optim.SGD(W, lr=s.lr, momentum=s.momentum)
    losses, ranks = list[float](), list[Vector]()
    for step in range(s.steps + 1):
        h = x
        for w in W[:-1]:
            h = (h @ w.T).relu()
        loss = (h @ W[-1].T - y).square().sum() / (2 * len(x))
        losses.append(loss.item())
        if step % s.every == 0:
            ranks.append(ranked([torch.linalg.svdvals(w.detach().double()) for w in W]))
            run.progress(step / max(1, s.steps))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return losses, ranks


def ranked(values: list[torch.Tensor]) -> Vector:
    """Rank of each matrix."""
    return np.array([float(rank(v.numpy())) for v in values])


def work(t: Task[EscapeSaddlesSettings], run: Writer) -> Mapping[str, ArrayLike]:
    """The loss, ranks, and for each rest: its beginning, end, level and ranks [saddles, layers]; NaN behind the last."""
    s = t.settings
    x, y = images(s.data, s.n, t.seed)
    W = initial([x.shape[1], *[s.width] * (t.depth - 1), y.shape[1]], s.gain, t.seed)
    start = escape.follow(W, x, y, s.relative, values=s.width)
    loss = np.asarray(start.loss)
    left = int(np.argmax(loss < LEFT * loss[0])) if (loss < LEFT * loss[0]).any() else len(loss) - 1
    reached = escape.follow(W, x, y, left, values=s.width) if left else start
    losses, ranks = descend(s, reached.weights if left else W, x, y, run)
    first = [ranked([torch.as_tensor(v[k]) for v in start.values]) for k in range(left)]
    curve, table = np.array([*loss[:left], *losses]), np.array([*first, *ranks])
    steps = np.concatenate([np.arange(left), left + s.every * np.arange(len(ranks))])
    seen = saddles(find(np.arange(len(curve)), curve), steps, {str(i): table[:, i] for i in range(t.depth)})
    rests = [q for q in seen.saddles
             if q.plateau.end - q.plateau.start >= REST * len(curve) and q.plateau.level < LEFT * curve[0]]
    kept = np.full((MOST, 3 + t.depth), np.nan)
    for row, q in zip(kept, rests, strict=False):
        row[:] = [q.plateau.start, q.plateau.end, q.plateau.level, *q.ranks.values()]
    deepest = 6
    padded = np.pad(kept, ((0, 0), (0, deepest - t.depth)), constant_values=np.nan)
    whole = np.full((2, s.relative + s.steps + 1), np.nan)
    whole[0, :len(curve)] = curve
    at = np.full((s.relative + s.steps + 1, deepest), np.nan)
    at[steps, :t.depth] = table
    return {"loss": whole[0], "ranks": at, "rests": padded, "start": np.pad(table[0], (0, deepest - t.depth),
                                                                          constant_values=np.nan)}


# ------------------------------------------------------------------------------------------------ claims


def at_rests(r: Results) -> Vector:
    """Ranks of layers 2 and deeper [networks, saddles, layers]; of the initial weights in their place as a control."""
    if r.settings.at == "start":
        return np.asarray(np.repeat(r["start"][:, None, 1:], MOST, 1))
    return np.asarray(r["rests"][:, :, 4:])


def first_rank(r: Results) -> float:
    """The largest rank of layers 2 and deeper at the first saddle behind the origin, over depths; of a training without one, the
    largest at its start."""
    ranks = at_rests(r)[:, 0]
    none = np.isnan(ranks).all(1, keepdims=True)
    return float(np.nanmax(np.where(none, r["start"][:, 1:], ranks)))


def growth(r: Results) -> float:
    """Growth of the bottleneck rank, the smallest rank of layers 2 and deeper, from the first to the last saddle of four
    layers; 0 if there are not two saddles."""
    ranks = at_rests(r.where(depth=min(r.distinct("depth"))))[0]
    bottleneck = np.array([np.nanmin(row) for row in ranks if not np.isnan(row).all()])
    return float(bottleneck[-1] - bottleneck[0]) if len(bottleneck) > 1 else 0.0


@styled
def draw(results: Results) -> Figure:
    depths = results.distinct("depth")
    figure, axes = panels(2 * len(depths), across=2)
    for (left, right), depth in zip(zip(axes[::2], axes[1::2], strict=True), depths, strict=True):
        chosen = results.where(depth=depth)
        loss, ranks, rests = chosen["loss"][0], chosen["ranks"][0], chosen["rests"][0]
        steps = np.arange(len(loss))
        line(left, steps, loss, COLOURS[0])
        for start, end, level in rests[~np.isnan(rests[:, 0]), :3]:
            left.plot([start, end], [level] * 2, color=COLOURS[1], alpha=0.5, linewidth=5, solid_capstyle="butt")
        label(left, "step", "loss", f"{depth} layers; bars: plateaus")
        for k in range(depth):
            known = ~np.isnan(ranks[:, k])
            line(right, steps[known], ranks[known, k], COLOURS[k], f"layer {k + 1}")
        label(right, "step", "rank of the weights", "singular values of a tenth of the largest or more", log="y", legend=True)
    caption(figure, "One seed: on each plateau behind the origin deep layers have a rank, first one, then more; the first layer "
                    "gains directions in between.")
    return figure


UNTRAINED = Control("untrained", {"at": "start"})
LARGE = Control("initial weights of 0.55 / sqrt(fan-in)", {"gain": 0.55})
PLACE = "Experiments, saddles"
EXPERIMENT = Experiment(
    name="escape_saddles", ref=Ref("escape", PLACE), title="from saddle to saddle on images the rank of deep layers grows",
    smoke=EscapeSaddlesSettings(data="digits", n=600, lr=0.1, steps=1500, depths=(4, 6), seeds=(0,)),
    paper=EscapeSaddlesSettings(), over=("depth", "seed"), analysis=("at",), work=work,
    start={"seeds": (0,), "steps": 20, "data": "digits"}, figures={"escape_experiments_saddles": draw}, more_data=("mnist",),
    reduced="scikit-learn's digits, half of the steps, 1 seed of 5",
    missing={PLACE: "hidden layers of 1,000 units (64 here), all of MNIST (500 images here), mini-batches, CIFAR-10"},
    protocol="reduced: 64 of 1,000 hidden units, 500 images, full batches",
    partial={"Experiments, saddles": "MNIST of MNIST and CIFAR-10"},
    claims=(
        Claim("largest rank of layers 2 and deeper at the first saddle, over depths", first_rank, Interval(1.0, 1.0),
              (UNTRAINED, LARGE), over="seed", paper="one dominant singular value", source="the abstract: the first saddle has "
              "bottleneck rank one", says="At the first saddle on images, deep layers have rank one."),
        Claim("growth of the bottleneck rank from the first saddle to the last, four layers", growth, Interval(low=1.0),
              (UNTRAINED, LARGE), over="seed", paper="increasing bottleneck rank", source="the abstract",
              says="Descent visits saddles of increasing bottleneck rank."),
    ))
