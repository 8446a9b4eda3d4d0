"""Sparse parities: a kernel machine that takes its metric from FACT finds the few coordinates that count.  [fact]"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from richter.core import Interval, Ref
from richter.experiments.frame import Claim, Control, Experiment, Results
from richter.learners import Gaussian, RFMRegressor
from richter.report.drawing import caption
from richter.runs import Writer
from richter.tasks import sparse_parity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = {"fact": "FACT", "fact_geometric": "FACT, geometric", "agop": "AGOP"}
D, K, N = 20, 3, 600  # the small parity


@dataclass(frozen=True)
class Settings:
    """Inputs of -1 and 1, a Gaussian kernel of bandwidth ``width`` sqrt(d), no intercept, the metric divided by the mean of its
    diagonal, and each rule's matrix itself (power 1). The paper's kernel, bandwidth and ridge are not known to us. Of bandwidths
    from 3 to 10 at d = 50 (0.4 to 1.4 sqrt(d)) and ridges from 0.001 to 10 this pair served every parity. With a bandwidth of 5
    accuracy is 1 as well, but nearly half of the trace of M for k = 2 is off the support; a ridge of 0.003 is too small for the
    iterative solver, in single precision, at 12,000 examples."""

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
    seeds: tuple[int, ...] = (0, 1, 2)
    memory: str = "6GiB"


@dataclass(frozen=True)
class Task:
    settings: Settings
    d: int
    k: int
    n: int
    rule: str
    seed: int


def tasks(s: Settings) -> list[Task]:
    """The cases at one seed and the small parity and its sweep at all; beyond 10,000 examples FACT alone."""
    alone = replace(s, degrees=(), examples=(), rules=(), sweep=(), large=(), seeds=())
    cases = [(s.d, k, n, seed) for k, n in zip(s.degrees, s.examples, strict=True) for seed in s.seeds[:1]]
    cases += [(D, K, n, seed) for n in s.sweep for seed in s.seeds] + [(s.d, K, n, seed) for n in s.large for seed in s.seeds]
    return [Task(alone, d, k, n, rule, seed) for d, k, n, seed in dict.fromkeys(cases) for rule in s.rules
            if n <= 10_000 or rule == "fact"]


def work(t: Task, run: Writer) -> Mapping[str, ArrayLike]:
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
    """sum_{i in support} M_ii / Tr M."""
    return float(M.diagonal()[list(support)].sum() / M.trace())


def cases(r: Results) -> Results:
    """The parities of d = 50 that the claims are about."""
    s = r.settings
    known = set(zip(s.degrees, s.examples, strict=True))
    kept = [i for i, t in enumerate(r.tasks) if t.d == s.d and (t.k, t.n) in known and t.seed == s.seeds[0]]
    pairs = list(r)
    return Results(s, [r.tasks[i] for i in kept], [pairs[i][1] for i in kept])


def least(r: Results, name: str) -> float:
    """The smallest value after the last iteration."""
    return min(float(np.asarray(arrays[name])[-1]) for _, arrays in r)


def small(r: Results, rule: str = "fact") -> Results:
    return r.where(d=D, k=K, n=N, rule=rule)


def draw(results: Results) -> Figure:
    """Accuracy and the support's share of the trace by iteration, for each parity; accuracy by the number of examples."""
    from matplotlib.figure import Figure

    from richter.report.figures import COLOURS
    s, parities = results.settings, cases(results)
    columns = [*dict.fromkeys((t.d, t.k, t.n) for t in parities.tasks), (D, K, N)]
    sweeps = [d for d, many in ((D, s.sweep), (s.d, s.large)) if many]
    figure = Figure(figsize=(2.7 * (len(columns) + len(sweeps)), 4.8), layout="constrained")
    axes = figure.subplots(2, len(columns) + len(sweeps), squeeze=False)
    for column, (d, k, n) in enumerate(columns):
        for colour, (rule, label) in zip(COLOURS, LABELS.items(), strict=False):
            mine = results.where(d=d, k=k, n=n, rule=rule)
            if len(mine):
                axes[0, column].plot(mine["accuracy"].mean(0), "o-", color=colour, label=label, markersize=3)
                axes[1, column].plot(mine["share"].mean(0), "o-", color=colour, markersize=3)
        axes[0, column].set(xlabel="iteration", ylabel="test accuracy", ylim=(0.45, 1.02))
        axes[0, column].set_title(f"d = {d}, k = {k}, n = {n:,}", fontsize=10)
        axes[1, column].set(xlabel="iteration", ylabel="share of Tr M on the support", ylim=(0, 1.02))
    axes[0, 0].legend(frameon=False, fontsize=8, loc="lower right")
    for column, d in enumerate(sweeps, len(columns)):
        _sweep(axes[0, column], results, d, s.sweep if d == D else s.large)
        _diagonals(axes[1, column], results, d)
    caption(figure, "Within a few iterations the metric goes to the coordinates of the parity, and accuracy to 1; without a "
                    "metric it stays at chance.")
    return figure


def _sweep(ax: Any, results: Results, d: int, sizes: tuple[int, ...]) -> None:
    """Accuracy after the last iteration against the number of examples, the mean and the range over seeds."""
    from richter.report.figures import COLOURS
    curves = {label: (rule, -1) for rule, label in LABELS.items()} | {"no metric": ("fact", 0)}
    for colour, (label, (rule, step)) in zip(COLOURS, curves.items(), strict=False):
        values = [results.where(d=d, k=K, n=n, rule=rule)["accuracy"][:, step] for n in sizes]
        ax.plot(sizes, [v.mean() for v in values], "o-", color=colour, markersize=3, label=label if step == 0 else None)
        ax.fill_between(sizes, [v.min() for v in values], [v.max() for v in values], color=colour, alpha=0.15, linewidth=0)
    ax.set(xlabel="examples", ylabel="test accuracy", ylim=(0.45, 1.02))
    ax.set_title(f"d = {d}, k = {K}, last iteration", fontsize=10)
    ax.legend(frameon=False, fontsize=8, loc="lower right")


def _diagonals(ax: Any, results: Results, d: int) -> None:
    """The diagonal of the last metric of FACT, the support marked, at the most examples."""
    from richter.report.figures import COLOURS
    mine = results.where(d=d, k=K, rule="fact")
    task, arrays = max(mine, key=lambda pair: pair[0].n)
    diagonal = np.asarray(arrays["metric"]).diagonal() / np.asarray(arrays["metric"]).trace()
    on = np.isin(np.arange(d), arrays["support"])
    ax.bar(np.arange(d), diagonal, color=np.where(on, COLOURS[0], COLOURS[5]))
    ax.set_title(f"FACT, n = {task.n:,}", fontsize=10)
    ax.set(xlabel="coordinate (blue: of the parity)", ylabel="$M_{ii}$ / Tr M")
    ax.yaxis.label.set_parse_math(True)


RIDGE = Control("kernel ridge regression: no iteration", {"iterations": 0})
SHUFFLED = Control("shuffled training labels", {"shuffled": True})
ISSUE = "bar set with the task, for the sizes of the paper's figure: exact within 5 iterations"
PEER = "independent check, 3 seeds: accuracy 1.000 and 0.998 of the diagonal with a Gaussian kernel"
EXPERIMENT = Experiment(
    name="fact_parity", ref=Ref("fact", "sparse parity"),
    title="FACT-RFM learns sparse parities and puts its metric on their support",
    smoke=Settings(),
    paper=Settings(degrees=(2, 3, 4), examples=(800, 1_500, 25_000), large=(500, 750, 1_000, 1_500, 2_000, 3_000)),
    tasks=tasks, work=work, figures={"fact_parity": draw}, start={"iterations": 1},
    reduced="k = 2 and 3; the paper's figure has k = 4 at 25,000 examples too",
    claims=(
        Claim("FACT, d = 50: lowest test accuracy over k after 5 iterations",
              lambda r: least(cases(r).where(rule="fact"), "accuracy"), Interval(low=1.0), RIDGE, paper="1", source=ISSUE),
        Claim("FACT, d = 50: smallest share of Tr M on the support over k", lambda r: least(cases(r).where(rule="fact"), "share"),
              Interval(low=0.85), SHUFFLED, source="set with the task; bandwidth and ridge were chosen among a few for it"),
        Claim("FACT, d = 20, k = 3, n = 600: lowest accuracy over seeds", lambda r: least(small(r), "accuracy"),
              Interval(low=1.0), RIDGE, source=PEER),
        Claim("FACT, d = 20: smallest share of Tr M on the support", lambda r: least(small(r), "share"), Interval(low=0.99),
              SHUFFLED, source=PEER),
        Claim("AGOP, d = 20, k = 3, n = 600: lowest accuracy over seeds", lambda r: least(small(r, "agop"), "accuracy"),
              Interval(low=1.0), RIDGE, source=PEER),
        Claim("AGOP, d = 20: smallest share of Tr M on the support", lambda r: least(small(r, "agop"), "share"),
              Interval(low=0.99), SHUFFLED, source=PEER),
    ))
