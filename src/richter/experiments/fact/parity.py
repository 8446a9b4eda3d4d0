"""Sparse parities: a kernel machine that takes its metric from FACT finds the few coordinates that count.  [fact]"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.learners import Gaussian, RFMRegressor
from richter.report.drawing import COLOURS, band, caption, label, panels, styled
from richter.tasks import sparse_parity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {"fact": "FACT", "fact_geometric": "FACT, geometric", "agop": "AGOP"}
D, K, N = 20, 3, 600  # the small parity


@dataclass(frozen=True)
class FactParitySettings:
    """Inputs of -1 and 1, a Gaussian kernel of bandwidth ``width`` sqrt(d), no intercept, the metric divided by the mean of its
    diagonal, and each rule's matrix itself (power 1). The paper's kernel, bandwidth and ridge are not known to us. A ridge of
    0.003 is too small for the iterative solver, in single precision, at 12,000 examples."""

    d: int = 50
    degrees: tuple[int, ...] = (2, 3)
    examples: tuple[int, ...] = (800, 1_500)  # of each degree
    rules: tuple[str, ...] = ("fact", "fact_geometric", "agop")
    iterations: int = 5
    width: float = 1.2
    ridge: float = 1e-2
    shuffled: bool = False  # the training labels
    sweep: tuple[int, ...] = (100, 150, 200, 250, 300, 400, N)  # examples of the parity of 3 of 20 coordinates
    large: tuple[int, ...] = ()  # examples of the parity of 3 of 50
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    memory: str = "6GiB"


def trainings(s: FactParitySettings) -> list[Task[FactParitySettings]]:
    """Return the cases, the small parity and the sweeps over the number of examples; beyond 10,000 of them FACT alone."""
    rest = replace(s, degrees=(), examples=(), rules=(), sweep=(), large=(), seeds=())
    parities = [*((s.d, k, n) for k, n in zip(s.degrees, s.examples, strict=True)), *((D, K, n) for n in s.sweep),
                *((s.d, K, n) for n in s.large)]
    cases = [(*parity, seed) for parity in parities for seed in s.seeds]
    return [Task(rest, d=d, k=k, n=n, rule=rule, seed=seed) for d, k, n, seed in dict.fromkeys(cases) for rule in s.rules
            if n <= 10_000 or rule == "fact"]


def work(t: Task[FactParitySettings], run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    data = sparse_parity(t.n, t.d, t.k, t.seed, n_test=2_000, dtype=torch.float64)
    y = data.y[:, 0].numpy()
    if s.shuffled:
        y = np.random.default_rng((t.seed, 6)).permutation(y)
    model = RFMRegressor(Gaussian(s.width * t.d ** 0.5), t.rule, s.iterations, s.ridge, power=1.0, select="last",
                         early_stopping=False, keep="all", memory=s.memory)
    model.fit(data.x.numpy(), y)
    right = data.y_test[:, 0].numpy() > 0
    metrics = [np.eye(t.d) if M is None else M.double().numpy() for _, M, _ in model.stages_]
    return {"accuracy": [np.mean((f > 0) == right) for f in model.staged_predict(data.x_test.numpy())],
            "share": [on_support(M, data.support) for M in metrics], "support": data.support, "metric": metrics[-1]}


def on_support(M: NDArray[Any], support: tuple[int, ...]) -> float:
    """Share of the trace that lies on the support, sum_{i in support} M_ii / Tr M."""
    return float(M.diagonal()[list(support)].sum() / M.trace())


def cases(r: Results) -> Results:
    """The parities of d = 50 that the claims are about."""
    s = r.settings
    known = set(zip(s.degrees, s.examples, strict=True))
    kept = [(t, arrays) for t, arrays in r if t.d == s.d and (t.k, t.n) in known]
    return Results(s, [t for t, _ in kept], [arrays for _, arrays in kept])


def least(r: Results, name: str) -> float:
    """The smallest value after the last iteration."""
    return min(float(np.asarray(arrays[name])[-1]) for _, arrays in r)


def small(r: Results, rule: str = "fact") -> Results:
    """Results of the small problem with this rule."""
    return r.where(d=D, k=K, n=N, rule=rule)


@styled
def draw(results: Results) -> Figure:
    """Accuracy and the support's share of the trace by iteration, for each parity; accuracy by the number of examples, and the
    diagonal of the metric below."""
    s = results.settings
    columns = [*dict.fromkeys((t.d, t.k, t.n) for t in cases(results).tasks), (D, K, N)]
    sweeps = [(d, many) for d, many in ((D, s.sweep), (s.d, s.large)) if many]
    across = len(columns) + len(sweeps)
    figure, axes = panels(2 * across, across=across)
    for column, (d, k, n) in enumerate(columns):
        upper, lower = axes[column], axes[across + column]
        for colour, (rule, words) in zip(COLOURS, LABELS.items(), strict=False):
            mine = results.where(d=d, k=k, n=n, rule=rule)
            if len(mine):
                band(upper, np.arange(mine["accuracy"].shape[1]), mine["accuracy"], colour, words)
                band(lower, np.arange(mine["share"].shape[1]), mine["share"], colour, words)
        label(upper, "iteration", "test accuracy", f"d = {d}, k = {k}\nn = {n:,}", legend=not column)
        label(lower, "iteration", "share of Tr M on the support")
        upper.set_ylim(0.45, 1.02)
        lower.set_ylim(0, 1.02)
    for column, (d, many) in enumerate(sweeps, len(columns)):
        _sweep(axes[column], results, d, many)
        _diagonal(axes[across + column], results, d)
    caption(figure, "Within a few iterations the metric goes to the coordinates of the parity, and accuracy to 1; without a "
                    f"metric it stays at chance. Median and range of {len(results.distinct('seed'))} seeds.")
    return figure


def _sweep(ax: Axes, results: Results, d: int, sizes: tuple[int, ...]) -> None:
    """Accuracy after the last iteration against the number of examples."""
    curves = {words: (rule, -1) for rule, words in LABELS.items()} | {"no metric": ("fact", 0)}
    for colour, (words, (rule, step)) in zip(COLOURS, curves.items(), strict=False):
        rows = [results.where(d=d, k=K, n=n, rule=rule)["accuracy"][:, step] for n in sizes]
        band(ax, sizes, np.stack(rows, 1), colour, words if step == 0 else "")
    label(ax, "examples", "test accuracy", f"d = {d}, k = {K}\nlast iteration", legend=True)
    ax.set_ylim(0.45, 1.02)


def _diagonal(ax: Axes, results: Results, d: int) -> None:
    """Draw the diagonal of FACT's last metric at the most examples, with the support marked."""
    task, arrays = max(results.where(d=d, k=K, rule="fact"), key=lambda pair: pair[0].n)
    diagonal = np.asarray(arrays["metric"]).diagonal() / np.asarray(arrays["metric"]).trace()
    on = np.isin(np.arange(d), arrays["support"])
    ax.bar(np.arange(d), diagonal, color=np.where(on, COLOURS[0], COLOURS[5]))
    label(ax, "coordinate", "diagonal of M / Tr M", f"FACT, n = {task.n:,}\nparity blue")


# Of the controls only the claims are read: no sweep.
RIDGE = Control("kernel ridge regression: no iteration", {"iterations": 0, "sweep": (N,), "large": ()})
SHUFFLED = Control("shuffled training labels, one seed", {"shuffled": True, "sweep": (N,), "large": (), "seeds": (0,)})
ISSUE = "bar set with the task, for the sizes of the paper's figure: exact within 5 iterations"
PEER = "independent check, 3 seeds: accuracy 1.000 and 0.998 of the diagonal with a Gaussian kernel"
WORST = "the lowest of three seeds"
MISSING = ("the paper's kernel, bandwidth and ridge, and its numbers of examples for k = 2 and 3, are not known to us; at k = 4 "
           "with 25,000 examples FACT alone is run; coordinates of the parity are drawn, the paper's are fixed")
TRIED = ("bandwidths from 3 to 10 at d = 50 (0.4 to 1.4 sqrt(d)) and ridges from 0.001 to 10, seed 0: bandwidth 1.2 sqrt(d) and "
         "ridge 0.01 served every parity. With a bandwidth of 5 accuracy is 1 as well, but nearly half of the trace of M for "
         "k = 2 is off the support")


def by_rule(words: str, rule: str, smallest: str) -> tuple[Claim, Claim]:
    """Claims about the parity of 3 of 20 coordinates under one rule."""
    return (Claim(f"{words}, d = 20, k = 3, n = 600: test accuracy after 5 iterations",
                  lambda r: least(small(r, rule), "accuracy"), Interval(low=1.0), RIDGE, source=PEER, over="seed",
                  was=f">= 1 for {WORST}: 1", own=True),
            Claim(f"{words}, d = 20, k = 3, n = 600: share of Tr M on the support", lambda r: least(small(r, rule), "share"),
                  Interval(low=0.99), SHUFFLED, source=PEER, over="seed",
                  was=f">= 0.99 for {WORST}: {smallest}", own=True))


EXPERIMENT = Experiment(
    name="fact_parity", ref=Ref("fact", "sparse parity"),
    title="FACT-RFM learns sparse parities and puts its metric on their support",
    smoke=FactParitySettings(),
    paper=FactParitySettings(degrees=(2, 3, 4), examples=(800, 1_500, 25_000), large=(500, 750, 1_000, 1_500, 2_000, 3_000)),
    over=trainings, work=work, figures={"fact_parity": draw}, start={"iterations": 1},
    reduced="k = 2 and 3; the paper's figure has k = 4 at 25,000 examples too",
    missing={"sparse parity": MISSING}, tried=TRIED,
    protocol="unstated: kernel, bandwidth and ridge",
    claims=(
        Claim("FACT, d = 50: test accuracy after 5 iterations, lowest over k",
              lambda r: least(cases(r).where(rule="fact"), "accuracy"), Interval(low=1.0), RIDGE, paper="1", source=ISSUE,
              over="seed", was=">= 1 for one seed: 1",
              says="FACT-RFM learns sparse parities (d = 50): test accuracy 1 within 5 iterations."),
        Claim("FACT, d = 50: share of Tr M on the support, smallest over k",
              lambda r: least(cases(r).where(rule="fact"), "share"), Interval(low=0.85), SHUFFLED, over="seed",
              source="set with the task; bandwidth and ridge were chosen among a few for it", was=">= 0.85 for one seed: .931",
              own=True),
        *by_rule("FACT", "fact", ".9980"), *by_rule("AGOP", "agop", ".9993"),
    ))
