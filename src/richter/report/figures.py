"""Figures from tables: a frame of rows (step, layer, measure, value, error, note) and one of scalars (step, loss, ...)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any colour vision can tell apart; line styles go on where they end.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
STYLES = ("-", "--", ":", "-.")
TITLES = {
    "nfc": "feature correlation (nfc)", "cnfc": "centred feature correlation (cnfc)",
    "c_uc_ratio": "share learned (c_uc_ratio)", "weight_change": "weights moved |W-W0|/|W|",
    "tangent_cka": "tangent kernel x labels (cka)", "tangent_alignment": "tangent alignment",
    "tangent_stable_rank": "tangent stable rank", "tangent_correlation": "tangent correlation",
}


def curves(frame: pandas.DataFrame, scalars: pandas.DataFrame | None = None,
           measures: tuple[str, ...] = ("nfc", "cnfc", "c_uc_ratio", "weight_change", "tangent_cka"),
           title: str = "") -> Figure:
    """One panel for each measure, one curve for each layer with its standard error as a band, and the scalars."""
    import matplotlib
    from matplotlib.figure import Figure
    measures = tuple(m for m in measures if (frame.measure == m).any())
    panels = len(measures) + (scalars is not None and len(scalars) > 0)
    across = min(3, max(1, panels))
    down = -(-panels // across)
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(3.6 * across + 0.6, 2.7 * down + 0.5), layout="constrained")
        axes = [figure.add_subplot(down, across, i + 1) for i in range(panels)]
        layers = [k for k in dict.fromkeys(frame.layer) if k != "*"] + ["*"]
        look = {k: (COLOURS[i % 7], STYLES[i // 7 % 4]) for i, k in enumerate(layers[:-1])} | {"*": ("#444444", "-")}
        for ax, m in zip(axes, measures, strict=False):
            _panel(ax, frame[frame.measure == m], layers, look, TITLES.get(m, m))
        if panels > len(measures):
            assert scalars is not None
            _scalars(axes[-1], scalars)
        handles = {line.get_label(): line for ax in axes[:len(measures)] for line in ax.get_lines()}
        shown = {("whole model" if k == "*" else k): handles[k] for k in layers if k in handles}
        figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=min(6, len(shown)),
                      title="layer", frameon=False)
        if title:
            figure.suptitle(title)
    return figure


def _panel(ax: Axes, rows: pandas.DataFrame, layers: list[str], look: dict[str, tuple[str, str]], title: str) -> None:
    for k in layers:
        real = rows.value.notna() & ~rows.note.str.startswith("trivial")  # 1 by definition is no finding
        mine = rows[(rows.layer == k) & real].sort_values("step")
        if not len(mine):
            continue
        colour, style = look[k]
        ax.plot(mine.step, mine.value, style, color=colour, label=k, marker="o", markersize=2.5, linewidth=1.3)
        error = mine.error.fillna(0.0)
        ax.fill_between(mine.step, mine.value - error, mine.value + error, color=colour, alpha=0.15, linewidth=0)
    _steps(ax)
    ax.set_title(title, fontsize=9)


def _scalars(ax: Axes, scalars: pandas.DataFrame) -> None:
    names = [c for c in scalars.columns if c != "step"]
    for i, name in enumerate(names):
        ax.plot(scalars.step, scalars[name], STYLES[i % 4], color=COLOURS[-1 - i % 7], label=name, linewidth=1.3)
    _steps(ax)
    ax.set_title(" and ".join(names), fontsize=9)
    ax.legend(frameon=False)


def _steps(ax: Axes) -> None:
    ax.set_xscale("symlog", linthresh=1)
    ax.set_xlim(left=0)
    ax.set_xlabel("step")
    ax.grid(alpha=0.25, linewidth=0.5)
