"""Recursive feature machines on tables that no choice was made on, against what people use, all with the same time to search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata, wilcoxon

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Scale
from richter.experiments.tabular import TabularSettings, method_on_table, work

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OTHERS = ("xrfm", "forest", "boosting", "lightgbm", "network")
PEERS = ("ridge", *OTHERS)  # what RFM is ranked with: kernel ridge regression, its simplest rival, among them
SMALL = ("hayes-roth", "sonar", "housevotes", "heart", "servo", "yacht_hydrodynamics", "baseball", "autoMPG6")


def by_table(r: Results, classify: bool | None = None, name: str = "score") -> dict[str, NDArray[np.float64]]:
    """The mean over folds of each method, one entry for each table; R2 below -1 counts as -1."""
    kept = [(t, f) for t, f in r if classify is None or bool(f["classify"]) == classify]
    methods = dict.fromkeys(t.method for t, _ in kept)
    return {m: np.array([max(float(np.mean(f[name])), -1.0) for t, f in kept if t.method == m]) for m in methods}


def ranks(r: Results, methods: tuple[str, ...], classify: bool | None = None) -> dict[str, float]:
    """The mean rank over tables, 1 the best, among some methods; scores that differ by rounding alone are ties."""
    scores = by_table(r, classify)
    each = np.array([rankdata(-row) for row in np.stack([scores[m] for m in methods], 1).round(9)])
    return dict(zip(methods, each.mean(0), strict=True))


def lead(r: Results, method: str) -> float:
    """Mean rank of the best of the other methods, less that of this method."""
    rank = ranks(r, (method, *PEERS))
    return min(rank[m] for m in PEERS) - rank[method]


def doubt(r: Results, method: str, other: str) -> float:
    """The one-sided p of the signed-rank test that a method scores no higher than the other; 1 where they are the same."""
    scores = by_table(r)
    d = (scores[method] - scores[other]).round(9)
    return float(wilcoxon(d, alternative="greater").pvalue) if d.any() else 1.0


def beats(other: str) -> Callable[[Results], float]:
    """The doubt that RFM is better than a learner, or than kernel ridge regression, whichever is larger: it beats both, or what
    beats the learner is a kernel and not its metric."""
    return lambda r: max(doubt(r, "rfm", other), doubt(r, "rfm", "ridge"))


def gap(r: Results, classify: bool) -> float:
    """Mean over tables of FACT's score less that of RFM."""
    scores = by_table(r, classify)
    return float((scores["fact"] - scores["rfm"]).mean())


def gained(r: Results) -> float:
    """RFM's score less that of plain kernel ridge regression, of one table."""
    scores = by_table(r)
    (difference,) = (scores["rfm"] - scores["ridge"]).round(9)
    return float(difference)


def won(r: Results) -> float:
    """Return 1 if RFM is better than plain kernel ridge regression on this table, 1/2 for a tie, else 0."""
    return float(np.sign(gained(r)) + 1) / 2


def surplus(r: Results) -> float:
    """The least over tables of what RFM's probabilities gain on the class frequencies, in log loss per row."""
    return float((by_table(r, True, "base_loss")["rfm"] - by_table(r, True, "log_loss")["rfm"]).min())


def draw(results: Results) -> Figure:
    """Mean ranks; the share of tables won, row against column; processor time of a fit and its search; log loss."""
    from richter.report.drawing import caption, panels, styled

    @styled
    def drawn() -> Figure:
        figure, axes = panels(4, across=2, height=3.3)
        scores = by_table(results)
        rank = ranks(results, tuple(scores))
        methods = sorted(scores, key=lambda m: rank[m])
        draw_ranks(axes[0], results, methods)
        draw_wins(axes[1], scores, methods)
        draw_seconds(axes[2], results, methods)
        draw_losses(axes[3], results)
        caption(figure, "RFM and its variants against five other learners and kernel ridge regression, all with the same time to "
                        "search: shorter bars are better ranks; above the diagonal, probabilities gain on class frequencies.")
        return figure
    return drawn()


def draw_ranks(ax: Axes, results: Results, methods: list[str]) -> None:
    """Draw the mean rank of each method."""
    from richter.report.drawing import COLOURS, label
    for i, (kind, classify) in enumerate((("classification", True), ("regression", False))):
        if any(bool(f["classify"]) == classify for _, f in results):
            rank = ranks(results, tuple(methods), classify)
            ax.barh(np.arange(len(methods)) + 0.2 - 0.4 * i, [rank[m] for m in methods], 0.38, color=COLOURS[i], label=kind)
    ax.set(yticks=range(len(methods)), yticklabels=methods, xlim=(1, None))
    ax.invert_yaxis()
    label(ax, "mean rank (1 is best)", "method", "ranks", legend=True)


def draw_wins(ax: Axes, scores: Mapping[str, NDArray[np.float64]], methods: list[str]) -> None:
    """Draw how often each method beats each other one."""
    from richter.report.drawing import label
    won = np.array([[np.mean(scores[a] > scores[b]) + np.mean(scores[a] == scores[b]) / 2 for b in methods] for a in methods])
    ax.imshow(won, cmap="PuOr", vmin=0, vmax=1)
    for (i, j), share in np.ndenumerate(won):
        ax.text(j, i, f"{100 * share:.0f}", ha="center", va="center", fontsize=6,
                color="white" if abs(share - 0.5) > 0.25 else "black")
    ax.set(xticks=range(len(methods)), yticks=range(len(methods)), yticklabels=methods)
    ax.set_xticklabels(methods, rotation=45, ha="right")
    label(ax, "against", "method", "tables won, row against column, %")
    ax.grid(False)


def draw_seconds(ax: Axes, results: Results, methods: list[str]) -> None:
    """Draw the processor time of each method."""
    from richter.report.drawing import label
    seconds = [np.array([f["seconds"].mean() for t, f in results if t.method == m]) for m in methods]
    ax.boxplot([np.log10(s) for s in seconds], orientation="horizontal", tick_labels=methods, showfliers=False)
    ax.axvline(np.log10(results.settings.budget), color="grey", lw=0.8)
    ax.invert_yaxis()
    label(ax, "log10 of processor seconds of a fit and its search (line: the budget)", "method", "time")


def draw_losses(ax: Axes, results: Results) -> None:
    """Draw the log loss of class frequencies against that of RFM, one point for each table."""
    from richter.report.drawing import COLOURS, label, line
    base, ours = (by_table(results, True, name)["rfm"] for name in ("base_loss", "log_loss"))
    ends = [0, 1.05 * float(max(base.max(), ours.max()))]
    ax.plot(ours, base, "o", color=COLOURS[0], markersize=3.6)
    line(ax, ends, ends)
    label(ax, "log loss of RFM's probabilities", "log loss of class frequencies", "one point for each table")


SPOILED = Control("RFM is given shuffled labels", {"spoiled": ("rfm", "chosen")})
TOLD = Control("FACT-RFM is given shuffled labels", {"spoiled": ("fact",)})
PLAIN = Control("kernel ridge regression in RFM's place", {"plain": True})
SHARP = Control("a temperature ten times as high, and no doubt", {"sharp": True})
GOAL = "set before the tables were run"
ABOVE = 1e-6  # kernel ridge regression in RFM's place is exactly on a par with itself
FEW: dict[Scale, str] = {"smoke": "eight tables of 84 to 392 distinct rows are too few to show it"}
FACT = ("outside by 0.0016, with a standard error of 0.0019 over tables; the other half of the tables says the same, -0.0047 "
        "(0.0049), also with FACT's power 1/2 (-0.006) and the geometric rule (-0.005). On 300 rows the folds choose 1.4 "
        "iterations of FACT's metric and 2.1 of AGOP's. The paper's +0.0012 is on other sets")
ALONE = {  # p of RFM, and of kernel ridge regression in its place, at the paper's scale, against one learner alone
    "xrfm": (".0041", ".26"), "forest": (".0031", ".0063"), "boosting": ("2.5e-5", "3.3e-4"), "lightgbm": ("5.7e-4", ".0048"),
    "network": ("2.8e-4", ".0033")}
EARLIER = {"xrfm": "p = 4e-11 (1.6e-8, tuned) on 76 tables, when xrfm gave a fifth of the rows away and its grid was smaller",
           "boosting": "p = 8e-7 on 76 tables, in no record, when boosting tuned the learning rate only",
           "forest": "p = 2e-5 on 76 tables, in no record, when copies of rows and of a table were in several folds"}
WAS = {other: "; ".join(filter(None, (EARLIER.get(other), f"then p = {ours} against it alone, where kernel ridge regression in "
                                      f"RFM's place has {plain}"))) for other, (ours, plain) in ALONE.items()}
DATA = ("an own benchmark, not the paper's 120 sets: 21 of KEEL's tables and 17 of regression, on which nothing of this "
        "comparison was chosen (RFM's own defaults had been, earlier, on tables of both halves); at most "
        "600 rows of each, one draw of two outer folds, a second of the processor to search for each method and fold, in which "
        "forests and networks try two or three settings. The record before had 76 tables, up to 7,500 rows and three folds")
TRIED = ("76 tables, three folds, up to 7,500 rows; xrfm was fitted to four fifths of the rows, boosting tuned in its learning "
         "rate only, the number of folds inside RFM chosen on tables of the same list. Smoke with 0.2 s to search: RFM behind "
         "the best of the others by 0.56 of a rank, and p = 0.039 against LightGBM; with 0.4 s, ahead by 0.125, and p = 0.148")
EXPERIMENT = Experiment(
    name="rfm_tables", ref=Ref("rfm", "tabular benchmark"), title="RFM and FACT-RFM on tables, against what people use",
    smoke=TabularSettings(sets=SMALL, budget=0.4), paper=TabularSettings(), over=method_on_table, work=work,
    data=("keel", "regression"),
    figures={"rfm_tables": draw}, start={"sets": ("iris",), "methods": ("rfm",)}, missing={"tabular benchmark": DATA},
    tried=TRIED,
    reduced="the four smallest tables of each kind, of at least 150 rows, of the part that choices are made on; 0.4 s to search",
    protocol="stand-in: 38 tables of up to 600 rows for the 120 sets of the paper",
    claims=(
        Claim("mean rank of RFM, as it comes, ahead of the best of the others and of kernel ridge regression",
              lambda r: lead(r, "rfm"), Interval(low=ABOVE), (PLAIN, SPOILED), source=GOAL,
              was="1.375, ahead of the best but for kernel ridge regression, which itself was ahead of the others", own=True),
        Claim("p of the signed-rank test: RFM no better than kernel ridge regression", lambda r: doubt(r, "rfm", "ridge"),
              Interval(high=0.05), (PLAIN, SPOILED), paper="85.10 % against 83.71 % on average", source=GOAL, differs=FEW,
              says="RFM is better than kernel ridge regression on tables: 85.10 % against 83.71 % on average."),
        *(Claim(f"p of the signed-rank test: RFM no better than {other}, or than kernel ridge regression (the larger p)",
                beats(other), Interval(high=0.05), (PLAIN, SPOILED), source=GOAL, differs=FEW, was=WAS[other], own=True)
          for other in OTHERS),
        Claim("accuracy of FACT-RFM less that of RFM", lambda r: gap(r, True), Interval(-0.003, 0.003), TOLD,
              paper="85.22 % and 85.10 % on 120 sets", source=GOAL, differs={**FEW, "paper": FACT},
              was="-0.0027 on 43 tables, in the bar; the paper's +0.0012 was not",
              says="FACT-RFM is as good as RFM on tables: 85.22 % against 85.10 % on average."),
        Claim("R2 of FACT-RFM less that of RFM", lambda r: gap(r, False), Interval(low=-0.003), TOLD, source=GOAL, differs=FEW,
              own=True),
        Claim("score of RFM less that of kernel ridge regression, accuracy or R2", gained, Interval(low=ABOVE), (PLAIN, SPOILED),
              paper="85.10 % against 83.71 % on average", source="the paper's order", over="table",
              says="RFM is better than kernel ridge regression on the typical table (85.10 % against 83.71 % on average)."),
        Claim("tables on which RFM is better than kernel ridge regression, ties as halves", won, Interval(low=0.5 + ABOVE),
              (PLAIN, SPOILED), paper="85.10 % against 83.71 % on average", source="the paper's order", over="table", by="mean",
              was="at least 0.5, which a tie is too, and without an interval: .645",
              says="RFM is better than kernel ridge regression on most tables (85.10 % against 83.71 % on average)."),
        Claim("log loss of the class frequencies less that of RFM's probabilities, the least over tables", surplus,
              Interval(low=0.0), SHARP, source="a probability is no use where it is worse than the frequencies", own=True),
    ))
