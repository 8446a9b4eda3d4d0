"""Figures 4 and 5 of [rapid]: in a ReLU network each output gets a kernel of its own, in a linear one none does; the hidden
layer's part of the kernel turns to an output's own labels, the read-out's part to all alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from richter.experiments.evolving import EvolvingNetwork, alignments, descend, images
from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.experiments.rivals import milestones, shuffled
from richter.linalg import top_eigenvalue
from richter.report.drawing import COLOURS, band, caption, label, matrix_panel, panels, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["relu", "linear", "shuffled"]  # shuffled: the rich ReLU network, whose labels are in a random order
Part = Literal["all", "W", "V"]
RICH, LAZY = 0.1, 1.0  # sigma of the ReLU network; 1/sigma^2 is what its labels are multiplied by at sigma = 1
SHOWN = 3  # the class of Figure 5


@dataclass(frozen=True)
class RapidFig4Settings:
    """``rates``: learning rates over the largest eigenvalue of the initial kernel, of the rich, the lazy and the linear
    network. ``kind``, ``sigma``, ``part`` and ``hidden`` choose the kernel that is called specialised. ``last=False`` reads
    the untrained network."""

    n: int = 250
    width: int = 500
    steps: int = 1500
    linear_n: int = 240
    linear_width: int = 120
    linear_hidden: int = 3
    labels: float = 20.0  # that the linear network's targets are multiplied by
    rates: tuple[float, float, float] = (0.2, 0.8, 0.05)
    recorded: int = 20
    seeds: tuple[int, ...] = (0, 1)
    kind: Kind = "relu"
    sigma: float = RICH
    part: Part = "all"
    hidden: Part = "W"
    last: bool = True
    kinds: ClassVar = ("relu", "relu", "linear", "shuffled")
    sigmas: ClassVar = (RICH, LAZY, LAZY, RICH)


def work(t: Task[RapidFig4Settings], run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    if t.kind != "linear":
        x, y = images("mnist", s.n, t.seed)
        y = shuffled(y, t.seed) if t.kind == "shuffled" else y
        net, rate = EvolvingNetwork.drawn(x, [x.shape[1], s.width, 10], t.sigma, t.seed), s.rates[0 if t.sigma == RICH else 1]
    else:
        draw = torch.Generator().manual_seed(1000 + t.seed)
        x, teacher = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in
                      ((s.linear_n, s.linear_width), (s.linear_width, 10)))
        y = s.labels * x @ teacher / s.linear_width ** 0.5
        widths = [*[s.linear_width] * (1 + s.linear_hidden), 10]
        net, rate = EvolvingNetwork.drawn(x, widths, t.sigma, t.seed, relu=False), s.rates[2]
    lr = rate / top_eigenvalue(net.sub_kernels()[0])
    seen: dict[str, list[Any]] = {k: [] for k in ("steps", "loss", "all", "W", "V")}

    def look(step: int, loss: float) -> None:
        parts = net.layer_kernels()
        hidden = torch.stack(parts[:-1]).sum(0)
        values = (step, loss, *(alignments(K, y).numpy() for K in (hidden + parts[-1], hidden, parts[-1])))
        for name, value in zip(seen, values, strict=True):
            seen[name].append(value)
        run.progress(step / max(1, s.steps))

    descend(net, y, lr, s.steps, milestones(s.steps, s.recorded), look)
    return {k: np.array(v) for k, v in seen.items()}


# ------------------------------------------------------------------------------------------------ claims


def task(r: Results, kind: Kind | None = None, sigma: float | None = None) -> Mapping[str, NDArray[Any]]:
    """Arrays of one seed's task: the kind and sigma of the settings, unless others are given."""
    s = r.settings
    kind = kind or s.kind
    (_, arrays), = r.where(kind=kind, sigma=LAZY if kind == "linear" else sigma or s.sigma)
    return arrays


def ksm(A: NDArray[Any]) -> NDArray[Any]:
    """Columns of mean 1: rows are kernels, columns labels.  [Eq. 16]"""
    return A / A.mean(0)


def diagonal(A: NDArray[Any]) -> float:
    """Mean diagonal of the kernel specialisation matrix."""
    return float(np.trace(ksm(A)) / len(A))


def gap(A: NDArray[Any]) -> float:
    """The mean diagonal entry of the KSM less the mean entry off it."""
    k = len(A)
    return diagonal(A) - float((ksm(A).sum() - np.trace(ksm(A))) / (k * (k - 1)))


def of_part(number: Callable[[NDArray[Any]], float], kind: Kind | None = None, part: Part | None = None
            ) -> Callable[[Results], float]:
    """Claim's number for one part of the kernel."""
    return lambda r: number(task(r, kind)[part or r.settings.part][-1 if r.settings.last else 0])


def turned(arrays: Mapping[str, NDArray[Any]], part: str) -> tuple[float, float]:
    """Rise of the alignment of output 3's kernel with its own labels, and its mean rise with the others'."""
    rise = arrays[part][-1, SHOWN] - arrays[part][0, SHOWN]
    return float(rise[SHOWN]), float(np.delete(rise, SHOWN).mean())


def preference(part: Part | None = None) -> Callable[[Results], float]:
    """The rise with its own labels less that with others."""
    def value(r: Results) -> float:
        own, others = turned(task(r), part or r.settings.hidden)
        return own - others if r.settings.last else 0.0
    return value


def indiscriminate(r: Results) -> float:
    """The rise of a part's alignment with the other labels, on average."""
    return turned(task(r), "V")[1] if r.settings.last else 0.0


def unevenness(r: Results) -> float:
    """Largest entry of |KSM - 1| for the read-out's part; for the hidden part if the claims are about the read-out."""
    return float(np.abs(ksm(task(r)["W" if r.settings.part == "V" else "V"][-1]) - 1).max())


def against_shuffled(number: Callable[[Results], float]) -> Callable[[Results], float]:
    """A number less that of the network with shuffled labels."""
    return lambda r: number(r) - number(Results(replace(r.settings, kind="shuffled"), r.tasks, [arrays for _, arrays in r]))


def rise(arrays: Mapping[str, NDArray[Any]], last: bool) -> float:
    """Rise of the mean alignment of kernels with their own labels."""
    own = np.array([np.trace(A) / len(A) for A in arrays["all"]])
    return float(own[-1 if last else 0] - own[0])


# ------------------------------------------------------------------------------------------------ pictures


@styled
def draw4(results: Results) -> Figure:
    """Figure of the specialisation matrices of the whole kernel."""
    figure, axes = panels(3, across=3, height=2.4)
    for ax, (kind, sigma, when, title) in zip(axes, (("relu", RICH, 0, "A: ReLU, before"), ("relu", RICH, -1, "A: ReLU, after"),
                                                     ("linear", LAZY, -1, "B: linear, after")), strict=True):
        M = np.mean([ksm(A[when]) for A in results.where(kind=kind, sigma=sigma)["all"]], 0)
        ax.set_xlabel(f"labels (1 ± {matrix_panel(ax, M - 1):.2g})")
        ax.set_ylabel("kernels of outputs")
        ax.set_title(title)
    caption(figure, "Specialisation matrices, mean over seeds, red above 1: after training each output of the ReLU network has a "
                    "kernel along its own labels (the diagonal); those of the linear network have not (see its scale).")
    return figure


@styled
def draw5(results: Results) -> Figure:
    """Figure of the alignment of one output's kernel, by part."""
    figure, axes = panels(2, across=2)
    rich = results.where(kind="relu", sigma=RICH)
    for ax, part, title in ((axes[0], "V", "A: the read-out's part, K_V"), (axes[1], "W", "B: the hidden layer's part, K_W")):
        for c in [*(k for k in range(10) if k != SHOWN), SHOWN]:
            band(ax, rich["steps"][0], rich[part][:, :, SHOWN, c], COLOURS[1] if c == SHOWN else "#b0b0b0",
                 f"labels {SHOWN}" if c == SHOWN else "other labels" if c == 0 else "")
        label(ax, "step", f"alignment of kernel {SHOWN}", title, steps=True, legend=True)
    caption(figure, "The read-out's part of the kernel aligns with the labels of every class, the hidden layer's part with "
                    f"those of its own. Median and range of {len(rich.distinct('seed'))} seeds.")
    return figure


BAR = "independent check, 2 seeds"
UNTRAINED = Control("the untrained network", {"last": False})
LAZILY = Control("the lazy network", {"sigma": LAZY})
LINEAR = Control("the linear network", {"kind": "linear"})
READOUT = Control("the read-out's part", {"part": "V", "hidden": "V"})
LEARNT_BY_HEART = Control("shuffled labels in the place of both", {"kind": "shuffled"})
EXPERIMENT = Experiment(
    name="rapid_fig4", ref=Ref("rapid", "Fig. 4"), title="outputs get kernels of their own in ReLU networks, not in linear ones",
    places=("Fig. 4", "Fig. 5"), smoke=RapidFig4Settings(), paper=RapidFig4Settings(seeds=tuple(range(10)), recorded=25),
    work=work, over=(("kind", "sigma"), "seed"), analysis=("kind", "sigma", "part", "hidden", "last"),
    figures={"rapid_fig4": draw4, "rapid_fig5": draw5}, data=("mnist",),
    start={"steps": 1, "seeds": (0,), "n": 20, "linear_n": 20}, reduced="2 seeds of 10",
    missing={"Fig. 4": "a linear network of width 500, and the paper's scale of initial weights, which it does not give",
             "Fig. 5": "the paper's scale of initial weights and number of examples, which it does not give"},
    protocol={"Fig. 4": "unstated: the initial scale; the linear network is narrower than 500",
              "Fig. 5": "unstated: the initial scale and the number of examples"},
    claims=(
        Claim("ReLU: mean diagonal entry of the KSM", of_part(diagonal), Interval(low=1.2), (UNTRAINED, LAZILY, LINEAR, READOUT),
              source=BAR, places=("Fig. 4",), over="seed", paper="higher on the diagonal",
              says="The kernels of a ReLU network specialise: the diagonal of the KSM is above 1."),
        Claim("ReLU: mean diagonal entry less the mean entry off it", of_part(gap), Interval(low=0.2),
              (UNTRAINED, LAZILY, LINEAR, READOUT), source=BAR, places=("Fig. 4",), over="seed",
              says="The kernels of a ReLU network specialise: the diagonal of the KSM is above the other entries."),
        Claim("linear: |mean diagonal entry less the mean entry off it|",
              lambda r: abs(of_part(gap, "relu" if r.settings.kind == "linear" else "linear")(r)), Interval(high=0.05),
              Control("the ReLU network", {"kind": "linear"}), source=BAR, places=("Fig. 4",), over="seed",
              paper="no specialisation", says="The kernels of a linear network do not specialise."),
        Claim("linear: rise of the alignment, by which it is seen that features moved",
              lambda r: rise(task(r, "linear"), r.settings.last), Interval(low=0.015), UNTRAINED,
              source="the bar of Fig. 1", places=("Fig. 4",), over="seed", own=True),
        Claim("hidden part: mean diagonal entry of its KSM less that of the read-out's part",
              lambda r: of_part(diagonal, part=r.settings.hidden)(r) - of_part(diagonal, part="V")(r), Interval(low=0.2),
              (UNTRAINED, LAZILY, READOUT), source="as the bar of the whole kernel", places=("Fig. 5",), over="seed",
              says="The gradient of the hidden layer brings specialised alignment of the kernels."),
        Claim("read-out's part: largest |KSM - 1|", unevenness,
              Interval(high=1e-8), Control("the hidden part", {"part": "V"}), source="exact: K_V is the same for all outputs",
              places=("Fig. 5",), over="seed", own=True),
        Claim("hidden part of output 3: rise of its alignment with its own labels less that with others", preference(),
              Interval(low=0.015), (UNTRAINED, LAZILY, READOUT), source="by as much as counts as a rise of alignment",
              places=("Fig. 5",), over="seed", paper="its own labels preferred",
              says="The hidden layer's part of an output's kernel aligns with its own labels."),
        Claim("read-out's part of output 3: rise of its alignment with the labels of others", indiscriminate, Interval(low=0.015),
              (UNTRAINED, LAZILY), source="the bar of Fig. 1", places=("Fig. 5",), over="seed", paper="aligns with all",
              says="The read-out's part of an output's kernel aligns with all labels."),
        Claim("ReLU: mean diagonal entry less the mean entry off it: true labels less shuffled ones",
              against_shuffled(of_part(gap)), Interval(low=0.2), LEARNT_BY_HEART, source="the bar of the true labels alone",
              places=("Fig. 4",), over="seed", own=True, rival="shuffled labels"),
        Claim("hidden part of output 3: preference of its own labels: true labels less shuffled ones",
              against_shuffled(preference()), Interval(low=0.015), LEARNT_BY_HEART, source="the bar of the true labels alone",
              places=("Fig. 5",), over="seed", own=True, rival="shuffled labels"),
    ))
