"""The report of one or several runs: one self-contained HTML file with the verdict on top.

>>> report([richter.runs.load("runs/demo")], "report.html")
>>> report(runs, "report.html", figures="pictures")        # every figure also as SVG and PDF
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from richter.core import WHOLE, Card, Failure, RichterError, SelectionError
from richter.instrument.snapshot import Snapshot
from richter.instrument.verdict import Diagnosis, diagnose
from richter.measures.cards import SHOWN_FIRST, panels
from richter.measures.cards import card as measure_card
from richter.measures.delay import delay_of
from richter.measures.profile import peak
from richter.report import featured, plotdata
from richter.report.cards import cards_of, cards_of_all
from richter.report.looks import run_looks
from richter.report.markup import Markup, joined, tag
from richter.report.opening import opening
from richter.report.record import brief, claims, cost, evidence, last_values, references, sessions, settings
from richter.report.svg import STATIC, picture, put, stored_picture
from richter.runs import Run

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

LAYERS = 6  # layers whose matrices are shown
ENTRIES = 2 ** 27  # matrix entries that are read for one report; with wide matrices fewer layers are shown
SPECTRA = 24  # arrays per layer whose spectra are shown


@dataclass(frozen=True)
class Shown:
    """A run in a report: its unique name, its colour, its rows (read once), and the cards of its measures."""

    name: str
    run: Run
    colour: str
    frame: pandas.DataFrame
    snapshots: list[Snapshot]
    cards: dict[str, Card]
    failures: list[Failure]
    diagnosis: Diagnosis | None


@dataclass
class Album:
    """The figures of a report: placed in its page, and also saved as files if a folder is given."""

    folder: Path | None
    names: list[str] = field(default_factory=list)

    def page(self, name: str, draw: Callable[[], Figure], caption: str) -> Markup:
        """Return a figure with its caption, or a sentence that says why it is missing."""
        from richter.report.figures import save
        try:
            figure = draw()
        except RichterError as why:
            return tag("p", f"{caption} Not drawn: {why}", class_="soft")
        if self.folder is not None:
            save(figure, self.folder / self._own(name))
        return tag("figure", tag("div", picture(figure, caption), class_="picture drawn"), tag("figcaption", caption))

    def _own(self, name: str) -> str:
        """Return a unique file name that cannot point outside the folder."""
        plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("._-")[:80] or "figure"
        taken = self.names.count(plain)
        self.names.append(plain)
        return f"{plain}-{taken + 1}" if taken else plain


def report(runs: Sequence[Run], path: str | os.PathLike[str], *, figures: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of one or several runs. ``figures``: a folder for every figure as SVG and PDF."""
    if not runs:
        raise SelectionError("a report needs at least one run. `richter runs FOLDER` lists those of a store.")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = _shown(runs)
    album = Album(None if figures is None else Path(figures))
    names = ", ".join(s.name for s in shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")
    sections = [(title, body) for title, body in _sections(shown, album) if body]
    body = joined([_header(shown, names, [title for title, _ in sections]),
                   tag("main", *(tag("section", tag("h2", title), inside, id=_anchor(title)) for title, inside in sections)),
                   tag("footer", "Made by Richter from the record of the run. The file needs no network.")], "\n")
    page = Template((STATIC / "report.html").read_text(encoding="utf-8"))
    text = page.substitute(title=tag("b", f"{names}: Richter report")[3:-4], body=body,
                           style=(STATIC / "report.css").read_text(encoding="utf-8"))
    return put(path, text.encode("utf-8", "replace"))


def card(run: Run) -> str:
    """Return a summary for notebooks: the verdict, the last numbers and the curve of the magnitude. ``HTML(card(run))``."""
    from richter.report.figures import curves
    (shown,) = _shown([run])
    first = next((m for m in (*SHOWN_FIRST, *run.measures) if m in run.measures), None)
    drawn = picture(curves(shown, measures=[first]), measure_card(first, shown.cards).heading) if first else Markup("")
    return tag("div", brief(shown), last_values(shown), drawn)


# ---------------------------------------------------------------------------------------------------------- the page

def _shown(runs: Sequence[Run]) -> list[Shown]:
    """Runs with their names, colours and data."""
    named = plotdata.labelled(runs)
    look = run_looks(named)
    return [Shown(name, run, look[name].colour, plotdata.frame_of(run), run.snapshots, cards_of(run), run.failures, _verdict(run))
            for name, run in named.items()]


def _verdict(run: Run) -> Diagnosis | None:
    """Return the verdict; None if nothing has been measured."""
    try:
        return diagnose(run)
    except SelectionError:
        return None


def _header(shown: Sequence[Shown], names: str, titles: Iterable[str]) -> Markup:
    measured = sum(len(s.run.steps) for s in shown)
    layers = len([k for k in plotdata.depth(s.frame for s in shown) if k != WHOLE])
    words = f"{_count(len(shown), 'run')}, {_count(measured, 'measurement')} of {_count(layers, 'layer')}"
    return tag("header", tag("h1", names), tag("p", f"Richter report: {words}"),
               tag("nav", *(tag("a", title, href=f"#{_anchor(title)}") for title in titles)))


def _sections(shown: Sequence[Shown], album: Album) -> Iterable[tuple[str, Markup]]:
    """Yield title and content of each section."""
    yield "Verdict", opening(shown, album)
    if len(shown) > 1:
        yield "What differs", settings([(s.name, s.run.settings) for s in shown], differing=True)
    yield "Evidence and caveats", tag("div", *(evidence(s, several=len(shown) > 1) for s in shown), class_="columns")
    yield "Measures over training", _curves(shown, album)
    yield "Layers and time", _heat(shown, album)
    yield "Profiles over layers", _columns(_profiles(s, album, len(shown)) for s in shown)
    yield "Features", featured.of_runs(shown, album)
    yield "Are layers alike?", featured.compared(shown, album)
    yield "Matrices and spectra", _matrices(shown, album)
    yield "Loss and other curves", _scalars(shown, album)
    yield "Last values", joined(last_values(s, several=len(shown) > 1) for s in shown)
    yield "Claims", joined(claims(s.name, s.run.claims, several=len(shown) > 1) for s in shown)
    yield "Stored pictures", joined(_stored_pictures(s) for s in shown)
    yield "Cost of measuring", cost(shown)
    yield "Settings", settings([(s.name, s.run.settings) for s in shown])
    yield "Record", sessions(shown)
    yield "References", references(shown)


def _columns(parts: Iterable[Markup]) -> Markup:
    """Put parts beside each other where the page is wide enough."""
    filled = [part for part in parts if part]
    if len(filled) < 2:
        return joined(filled)
    return tag("div", *(tag("div", part) for part in filled), class_="columns")


def _curves(shown: Sequence[Shown], album: Album) -> Markup:
    """Section of measures over training."""
    from richter.report import figures
    by_name, cards = {s.name: s for s in shown}, cards_of_all(shown)
    parts: list[Markup] = []
    bands = "Bands: one standard error over probe examples. Layers with a trivial value (true by definition) are left out."
    for heading, words, measures in panels(_measures(shown), cards):
        parts += [tag("h3", heading), tag("p", words, class_="soft") if words else Markup(""), _sentences(measures, cards)]
        if len(shown) == 1:
            parts.append(album.page(f"curves-{heading}", lambda m=measures: figures.curves(shown[0], measures=m), bands))  # type: ignore[misc]
        else:
            whole = [m for m in measures if not _layers_of(by_name, m) - {WHOLE}]
            several = [m for m in measures if m not in whole]
            pages = [album.page(f"compare-{heading}", lambda w=whole: figures.compare_whole(by_name, w),  # type: ignore[misc]
                                "Of the whole model: one panel per measure, one colour per run.")] if whole else []
            pages += [album.page(f"compare-{m}", lambda m=m: figures.compare(by_name, m), _compared(by_name, m, cards))  # type: ignore[misc]
                      for m in several]
            parts.append(tag("div", *pages, class_="flow"))
    return joined(parts)


def _measures(shown: Sequence[Shown]) -> list[str]:
    """Measures of all runs."""
    return list(dict.fromkeys(m for s in shown for m in s.run.measures))


def _sentences(measures: Sequence[str], kept: Mapping[str, Card]) -> Markup:
    """Return the sentence of each measure of a panel's card, folded."""
    cards = [c for m in measures for c in [measure_card(m, kept)] if c.sentence]
    lines = [tag("li", tag("em", c.heading), f": {c.sentence}") for c in cards]
    return tag("details", tag("summary", "What each measure says"), tag("ul", *lines, class_="soft")) if lines else Markup("")


def _layers_of(runs: Mapping[str, Shown], measure: str) -> set[str]:
    return {k for s in runs.values() for k in s.frame.layer[s.frame.measure == measure]}


def _compared(runs: Mapping[str, Shown], measure: str, kept: Mapping[str, Card]) -> str:
    layers = len(_layers_of(runs, measure))
    few = f" 12 of {layers} layers are shown, evenly spaced over depth; the heat maps below show all." if layers > 12 else ""
    return f"{measure_card(measure, kept).heading}: one panel per layer, one colour per run.{few}"


def _heat(shown: Sequence[Shown], album: Album) -> Markup:
    """Draw heat maps: every measure of a single run, or, for several runs, the first measure of each panel."""
    from richter.report import figures
    caption = "One row for each layer, one column for each measurement; grey: no finding."
    filled = [measures for *_, measures in panels(_measures(shown), cards_of_all(shown))]
    wide = [m for measures in filled for m in (measures if len(shown) == 1 else measures[:1])
            if any(min(plotdata.grid(s.frame, m).values.shape) > 1 for s in shown)]
    if len(shown) == 1:
        return album.page("heat", lambda: figures.heat_maps(shown[0], wide), caption) if wide else Markup("")
    runs = {s.name: s for s in shown}
    return joined(album.page(f"heat-{m}", lambda m=m: figures.compare_heat(runs, m), caption) for m in wide)  # type: ignore[misc]


def _profiles(s: Shown, album: Album, runs: int) -> Markup:
    """Draw profiles: every measure of a single run that has one, or, for several runs, the first measure of each panel."""
    from richter.report import figures
    filled = [measures for *_, measures in panels(_measures([s]), s.cards)]
    drawn = {m: (layers, profiles[-1]) for measures in filled for m in (measures if runs == 1 else measures[:1])
             for layers, profiles in [plotdata.profiles(plotdata.lines(s.frame, m))] if profiles}
    if not drawn:
        return Markup("")
    peaks = [tag("li", tag("em", measure_card(m, s.cards).heading), f": {layers[top.layer - 1]}, {top}")
             for m, (layers, p) in drawn.items() for top in [peak(p.value, p.error)]]
    owner = f"{s.name}: " if runs > 1 else ""
    return joined([
        tag("h3", f"{owner}profiles") if owner else Markup(""),
        album.page(f"profiles-{owner}", lambda: figures.profiles(s, list(drawn), across=3 if runs == 1 else 2),
                   "Each measure over the layers, from early steps (light) to late ones (dark). A point marks the peak; a bar "
                   "marks all layers that may be the peak."),
        tag("details", tag("summary", "Layers where each measure is largest at the end"), tag("ul", *peaks, class_="soft"))])


def _matrices(shown: Sequence[Shown], album: Album) -> Markup:
    """Section of matrices."""
    parts = [_columns(joined(_matrices_of(s, album, len(shown))) for s in shown)]
    about = ("Red is positive, blue negative; each matrix has its own scale, written below it. In a wide matrix, a point is the "
             "largest entry of its block.")
    return joined([tag("p", about, class_="soft"), *parts]) if any(parts) else Markup("")


def _matrices_of(s: Shown, album: Album, runs: int) -> Iterable[Markup]:
    """Draw the matrices of a few layers, evenly spaced over depth. With several runs there are fewer layers, and no read-out (its
    NFM is its AGOP)."""
    from richter.report import figures
    run, layers = s.run, plotdata.with_matrices(s.run)
    few = plotdata.chosen(layers if runs == 1 else layers[:-1] or layers, max(1, LAYERS // runs))
    widest = max((plotdata.matrix_entries(run, k) for k in few), default=0)
    drawn = plotdata.chosen(few, max(1, ENTRIES // max(1, runs * widest)))
    owner = f"{s.name}: " if runs > 1 else ""
    for i, k in enumerate(drawn):
        steps = plotdata.matrix_steps(run, k)
        when = f"at the first and the last step ({steps[0]}, {steps[-1]})" if len(steps) > 1 else f"at step {steps[0]}"
        part = f" {len(drawn)} of {len(layers)} layers are shown." if i == 0 and len(drawn) < len(layers) else ""
        yield tag("h3", f"{owner}layer {k}")
        pictures = album.page(f"matrices-{owner}{k}", lambda k=k: figures.matrices(run, k), f"Feature matrices {when}.{part}")  # type: ignore[misc]
        yield tag("div", pictures, _spectra(s, k, album, owner, across=1 if runs == 1 else 3), class_="pair")
    if plotdata.specialisations(run):
        yield tag("h3", f"{owner}specialisation of the outputs' kernels")
        yield album.page(f"specialisation-{owner}", lambda: figures.specialisation(run),
                         "Alignment of each output's kernel (rows) with each output's labels (columns), relative to the mean of "
                         "its column: red is above it. A red diagonal means that outputs have specialised kernels.")
    if any(name != plotdata.KSM and (name not in plotdata.MATRICES or not layers) for name in plotdata.stored(run, WHOLE)):
        yield tag("h3", f"{owner}whole model")
        yield _spectra(s, WHOLE, album, owner)


def _spectra(s: Shown, layer: str, album: Album, owner: str, across: int = 1) -> Markup:
    """Figure of the eigenvalues of a layer's matrices."""
    from richter.report import figures
    try:
        names = plotdata.stored(s.run, layer)
        width = max(max(s.run.shape(n, layer, step), default=0) for n, steps in names.items() for step in (steps[0], steps[-1]))
    except RichterError as why:
        return tag("p", f"No spectra: {why}", class_="soft")
    if width > plotdata.SPECTRUM or len(names) > SPECTRA:
        return tag("p", f"Spectra are left out for matrices wider than {plotdata.SPECTRUM}, and for layers with more than "
                        f"{SPECTRA} arrays. Draw them with richter.report.figures.spectra(run, {layer!r}).", class_="soft")
    return album.page(f"spectra-{owner}{layer}", lambda: figures.spectra(s.run, layer, across),
                      "Leading eigenvalues at the first and the last step.")


def _scalars(shown: Sequence[Shown], album: Album) -> Markup:
    """Section of logged scalars, with stages of losses and delays of generalisation."""
    from richter.measures.saddles import RANK, saddles_of
    from richter.measures.stages import stages_of
    from richter.report import figures
    runs = {s.name: s.run for s in shown if s.run.scalar_names}
    if not runs:
        return Markup("")
    late = {name: delay_of(run) for name, run in runs.items()}
    stages = {f"{name}: {n}" if len(runs) > 1 else n: result
              for name, run in runs.items() for n, result in stages_of(run).items()}
    ranks = {f"{name}: {n}" if len(runs) > 1 else n: result for name, run in runs.items() if RANK in run.measures
             for n, result in saddles_of(run).items() if len(result)}
    marks = " Dotted lines: drops, with the uncertainty of their times as a band. Pale bars: plateaus."
    caption = f"Curves as logged during training.{marks if any(map(len, stages.values())) else ''}"
    return joined([album.page("scalars", lambda: figures.scalars(runs), caption),
                   *(tag("p", f"{name}: {result}.") for name, result in (*stages.items(), *ranks.items())),
                   *(tag("p", f"{f'{name}: ' if len(runs) > 1 else ''}{words}.") for name, words in late.items() if words)])


def _stored_pictures(s: Shown) -> Markup:
    return joined(stored_picture(s.run, name, kind) for name, kind in s.run.figures)


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z]+", "-", title.lower())


def _count(n: int, word: str) -> str:
    return f"{n} {word}" + ("" if n == 1 else "s")
