"""Style of figures: colours, line styles, fonts, and matplotlib's settings while one is drawn or saved."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from richter.core import WHOLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The colours of Okabe and Ito can be told apart with any colour vision; after the last one, line styles change.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
STYLES = ("-", "--", ":", "-.")
WHOLE_COLOUR, FAINT, EMPTY = "#444444", "#8a8a8a", "#ececec"
LEGEND = 7  # with more layers, colours follow depth

# Names come from users, so no text is parsed as mathematics; axes.py writes the ticks.
LOOK: dict[Any, Any] = {
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans", "Verdana", "Helvetica", "Arial"], "font.size": 8.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9, "axes.labelsize": 8.5, "axes.linewidth": 0.7,
    "axes.edgecolor": "#555555", "axes.labelcolor": "#333333", "axes.titlepad": 7.0, "axes.formatter.useoffset": False,
    "text.color": "#222222", "xtick.color": "#555555", "ytick.color": "#555555", "xtick.labelcolor": "#333333",
    "ytick.labelcolor": "#333333", "xtick.labelsize": 8, "ytick.labelsize": 8, "xtick.major.width": 0.7,
    "ytick.major.width": 0.7, "grid.color": "#d8d8d8",
    "grid.linewidth": 0.5, "legend.fontsize": 8.5, "lines.linewidth": 1.4, "text.parse_math": False, "text.usetex": False,
}
SAVED: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "richter", "pdf.fonttype": 42, "path.simplify": True,
                         "text.parse_math": False, "savefig.facecolor": "white", "figure.autolayout": False,
                         "figure.constrained_layout.use": False}

F = TypeVar("F", bound=Callable[..., "Figure"])


class LineStyle(NamedTuple):
    colour: str
    style: Any = "-"


def styled(draw: F) -> F:
    """Draw in this style, whatever the user's settings are, and restore these afterwards."""
    @functools.wraps(draw)
    def drawn(*args: Any, **options: Any) -> Figure:
        from matplotlib.style import context
        with context(["default", LOOK]):
            return draw(*args, **options)
    return drawn  # type: ignore[return-value]


def depth_looks(layers: Sequence[str]) -> dict[str, LineStyle]:
    """Choose a colour for each layer: distinct colours for a few layers, dark to light over depth for many."""
    inner = [k for k in layers if k != WHOLE]
    if len(inner) <= LEGEND:
        return {k: LineStyle(COLOURS[i]) for i, k in enumerate(inner)} | {WHOLE: LineStyle(WHOLE_COLOUR, "--")}
    from matplotlib.colors import to_hex
    colours = depth_map()(np.linspace(0, 1, len(inner)))
    return {k: LineStyle(to_hex(c)) for k, c in zip(inner, colours, strict=True)} | {WHOLE: LineStyle("#D55E00", "--")}


def run_looks(names: Iterable[str]) -> dict[str, LineStyle]:
    """Colour and line style of each run."""
    return {name: LineStyle(COLOURS[i % 7], STYLES[i // 7 % 4]) for i, name in enumerate(names)}


def depth_map() -> Any:
    """Return viridis without its lightest end, which is faint on white."""
    import matplotlib
    from matplotlib.colors import ListedColormap
    return ListedColormap(matplotlib.colormaps["viridis"](np.linspace(0.0, 0.9, 256)))
