"""The opening of a report: a scale from lazy to rich with the runs and reference runs on it, the verdicts, the layers as a strip,
and three panels: magnitude, loss, layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from richter.core import WHOLE
from richter.instrument.verdict import LAYER_WORDS, MOVED, Diagnosis
from richter.measures.cards import card
from richter.report import plotdata
from richter.report.looks import LEGEND, LineStyle, styled
from richter.report.markup import Markup, joined, tag
from richter.report.names import called, short_names, shortened
from richter.report.sweep import LOSS, MAGNITUDE
from richter.runs import Run

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDS = (-3.0, 3.0)  # of the magnitude
NAMED = 8  # runs that have lines of their own on the scale
CELLS = 24  # layers whose names fit into the strip
# Magnitudes of reference trainings: the MLP of the experiment doctor_basics on digits (64-256-256-10, f = a (h - h0), SGD at 0.1)
# at output scales a; medians over its seeds 100, 101, 102. tests/report/test_opening.py trains one of them again.
REFERENCES = ((1000.0, -2.03), (100.0, -1.53), (10.0, -0.64), (1.0, 0.49), (0.1, 1.22))
ABOUT = ("Magnitude: 0 where half of what the network did is not in its linearisation. Below the line, for reference: one MLP "
         "trained on digits with its outputs multiplied by 1000 to 0.1.")
TROUBLE = ("diverged", "untrained", "collapsed", "not learning", "early", "stale", "unknown")


class Opened(Protocol):
    """A run as a report shows it."""

    @property
    def name(self) -> str: ...
    @property
    def run(self) -> Run: ...
    @property
    def colour(self) -> str: ...
    @property
    def frame(self) -> pandas.DataFrame: ...
    @property
    def diagnosis(self) -> Diagnosis | None: ...


class Pages(Protocol):
    """The figures of a report."""

    def page(self, name: str, draw: Callable[[], Figure], caption: str) -> Markup: ...


def colour_class(word: str) -> str:
    """Return the class of the style sheet for the word of a verdict or of a layer."""
    return "trouble" if word in TROUBLE else word.replace(" ", "-")


# ---------------------------------------------------------------------------------------------------------- the scale

def scale(runs: Sequence[tuple[str, str, Diagnosis | None]]) -> Markup:
    """Draw the scale from lazy to rich: runs (name, colour, verdict) above the line, reference trainings below it. There is none
    if no run has a magnitude."""
    marked = [(name, colour, d) for name, colour, d in runs if d is not None and d.magnitude is not None]
    if not marked:
        return Markup("")
    named = len(marked) <= NAMED
    pointers = [_pointer(name if len(runs) > 1 else "this run", colour, d, named) for name, colour, d in marked]
    rows = [tag("div", p, class_="row") for p in pointers] if named else [tag("div", *pointers, class_="row")]
    ticks = [tag("span", f"{v:+d}" if v else "0", class_="tick", style=f"left:{_place(v):.1f}%") for v in range(-3, 4)]
    references = [tag("span", f"x{a:g}", class_="reference", style=f"left:{_place(m):.1f}%",
                      title=f"Reference: an MLP on digits with outputs times {a:g} has magnitude {m:+.2f}")
                  for a, m in REFERENCES]
    missing = [name for name, _, d in runs if d is None or d.magnitude is None]
    absent = [tag("p", f"Not on the scale: {', '.join(missing)}. There is no magnitude where the "
                        "verdict finds no training to judge.", class_="soft")] \
        if missing and len(runs) > 1 else []
    ends = [tag("strong", word, class_=word) for word in ("lazy", "rich")]
    line = [tag("div", *ends, class_="ends"), tag("div", class_="line"), tag("div", *ticks, class_="ticks"),
            tag("div", *references, class_="references")]
    return tag("div", *rows, *line, tag("p", ABOUT, class_="soft"), *absent, class_="scale")


def _pointer(name: str, colour: str, d: Diagnosis | None, named: bool) -> Markup:
    m = d.magnitude if d else None
    if m is None:
        return Markup("")
    side = "left" if m.value > 0.5 else "right"  # on which the name has room
    label = tag("span", tag("strong", shortened(name, 28)), f" {m}", class_=f"name {side}") if named else Markup("")
    return tag("span", label, class_="pointer", style=f"left:{_place(m.value):.1f}%;background:{colour}", title=f"{name}: {m}")


def _place(magnitude: float) -> float:
    low, high = ENDS
    return 100 * (min(max(magnitude, low), high) - low) / (high - low)


# ------------------------------------------------------------------------------------------------------- the layers

def strip(d: Diagnosis) -> Markup:
    """Draw the layers as a strip, coloured by their verdicts, with a legend that counts them."""
    if not d.layers:
        return Markup("")
    names = short_names([v.layer for v in d.layers], 14)
    cells = [tag("li", tag("span", names[v.layer] if len(d.layers) <= CELLS else "", class_="label"),
                 class_=f"{colour_class(v.verdict)} cell", title=f"{called(v.layer)}: {v}") for v in d.layers]
    counts = [(word, sum(v.verdict == word for v in d.layers)) for word in LAYER_WORDS]
    legend = [tag("span", tag("span", class_=f"{colour_class(word)} dot"), f"{n} {LAYER_WORDS[word]}", class_="count")
              for word, n in counts if n]
    return tag("div", tag("ol", *cells, class_="strip"), tag("div", *legend, class_="soft legend"))


# ------------------------------------------------------------------------------------------------------- the panels

def opening(shown: Sequence[Opened], album: Pages) -> Markup:
    """Write the scale, one sentence and one strip for each run, and the three panels."""
    several = len(shown) > 1
    return joined([scale([(s.name, s.colour if several else "var(--ink)", s.diagnosis) for s in shown]),
                   tag("div", *(_told(s, several) for s in shown), class_="tellings"), _panels(shown, album)], "\n")


def _told(s: Opened, several: bool) -> Markup:
    """Write the verdict of a run in its own words."""
    d, status = s.diagnosis, s.run.status
    chip = tag("span", status, class_=f"chip {status if status in ('running', 'finished') else 'trouble'}")
    swatch = [tag("span", class_="dot", style=f"background:{s.colour}"), tag("strong", s.name), chip] if several else []
    head = [tag("div", *swatch, class_="who")] if several else []
    if d is None:
        words = "Nothing has been measured yet." if status == "running" else "Nothing was measured in this run."
        return tag("div", *head, tag("p", words, "" if several else chip, class_="headline"), class_="told")
    number = [tag("span", f"magnitude {d.magnitude}", class_="magnitude")] if d.magnitude else []
    word, rest = d.verdict[:len(d.word)], d.verdict[len(d.word):]
    sentence = tag("p", tag("strong", word[:1].upper() + word[1:], class_=colour_class(d.word)), rest, *number,
                   "" if several else chip, class_="headline")
    return tag("div", *head, sentence, strip(d), class_="told")


def _panels(shown: Sequence[Opened], album: Pages) -> Markup:
    measured = [s for s in shown if s.diagnosis and s.diagnosis.magnitude]
    moved = [s for s in shown if MOVED in s.run.measures]
    loss = next((n for n in LOSS for s in shown if n in s.run.scalar_names or s.run.has(n)), None)
    colours = {s.name: LineStyle("#222222" if len(shown) == 1 else s.colour) for s in shown}
    parts = []
    if measured:
        parts.append(album.page("opening-magnitude", lambda: _measure(measured, MAGNITUDE, colours), "Magnitude over training."))
    if loss is not None:
        parts.append(album.page("opening-loss", lambda: _loss(shown, loss, colours), "Loss over training."))
    if moved:
        parts.append(album.page("opening-layers", lambda: _layers(moved, colours), "How far the function of each layer changed."))
    return tag("div", *parts, class_="trio") if parts else Markup("")


@styled
def _measure(shown: Sequence[Opened], measure: str, colours: dict[str, LineStyle]) -> Figure:
    from richter.report.panels import measure_panel
    lines = {s.name: plotdata.lines(s.frame, measure).get(WHOLE) for s in shown}
    figure, ax, linear = _one([line.step for line in lines.values() if line is not None])
    measure_panel(ax, {name: (line, colours[name]) for name, line in lines.items() if line is not None}, card(measure), linear)
    return figure


@styled
def _loss(shown: Sequence[Opened], name: str, colours: dict[str, LineStyle]) -> Figure:
    from richter.report.panels import scalar_panel
    lines = {}
    for s in shown:
        if name in s.run.scalar_names:
            series = s.run.scalars(name)
            lines[s.name] = plotdata.CurveData(series.step.astype(float), series.value, series.error)
        elif s.run.has(name) and WHOLE in (curves := plotdata.lines(s.frame, name)):
            lines[s.name] = curves[WHOLE]
    figure, ax, _ = _one([line.step for line in lines.values()])
    scalar_panel(ax, name, {k: (line, colours[k]) for k, line in lines.items()}, plotdata.threshold(
        step for s in shown for step in s.run.steps))
    return figure


@styled
def _layers(shown: Sequence[Opened], colours: dict[str, LineStyle]) -> Figure:
    """Draw the change of each layer's function: of one run through training, of several at the end."""
    from richter.report.axes import layer_key
    from richter.report.looks import depth_looks
    from richter.report.panels import measure_panel, profile_lines
    described = card(MOVED)
    if len(shown) > 1:
        ends = {s.name: {k: line.value[-1] for k, line in plotdata.lines(s.frame, MOVED).items()} for s in shown}
        figure, ax, _ = _one([])
        profile_lines(ax, ends, colours, f"{described.heading}, at the end")
        return figure
    (s,) = shown
    curves = plotdata.lines(s.frame, MOVED)
    look = depth_looks(list(curves))
    figure, ax, linear = _one([line.step for line in curves.values()])
    measure_panel(ax, {k: (line, look[k]) for k, line in curves.items()}, described, linear)
    if len(curves) <= LEGEND:
        names = short_names(list(curves), 16)
        ax.legend(ax.get_lines()[:len(curves)], [names[k] for k in curves], frameon=False, fontsize=7)
    else:
        layer_key(figure, [ax], list(curves), look, list(curves))
    return figure


def _one(steps: Iterable[Any]) -> tuple[Figure, Axes, float | None]:
    from richter.report.axes import grid_of_panels
    figure, (ax,) = grid_of_panels(1, across=1, width=3.7, height=2.35)
    return figure, ax, plotdata.threshold(float(s) for line in steps for s in line)
