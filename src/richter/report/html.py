"""The report of one or several runs: one HTML file that needs nothing else, with the verdict on top.

>>> report([richter.runs.open("runs/demo")], "report.html")
>>> report(runs, "report.html", figures="pictures")        # every figure also as SVG and PDF
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from richter.core import WHOLE, RichterError, SelectionError
from richter.instrument.snapshot import Snapshot
from richter.report import plotdata
from richter.report.looks import run_looks
from richter.report.markup import Markup, joined, tag
from richter.report.record import claims, cost, last_values, references, sessions, settings, verdict
from richter.report.titles import TITLES, families
from richter.runs import Run

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

STATIC = Path(__file__).parent / "static"
HEAT = ("nfc", "c_uc_ratio", "tangent_cka")  # of several runs; of one, all
LAYERS = 6  # whose matrices are shown
PICTURE = 2 ** 20  # bytes of a stored picture


@dataclass(frozen=True)
class Shown:
    """A run with a name that no other of the report has, its colour, and its rows, read once."""

    name: str
    run: Run
    colour: str
    frame: pandas.DataFrame
    snapshots: list[Snapshot]


@dataclass
class Album:
    """The figures of a report: put into its page, and saved if there is a folder for them."""

    folder: Path | None
    names: list[str] = field(default_factory=list)

    def page(self, name: str, draw: Callable[[], Figure], caption: str) -> Markup:
        """A figure with its caption, or the sentence why there is none."""
        from richter.report.figures import save
        from richter.report.svg import inline_svg
        try:
            figure = draw()
        except RichterError as why:
            return tag("p", f"{caption} Not drawn: {why}", class_="soft")
        name = self._own(name)
        if self.folder is not None:
            save(figure, self.folder / name)
        return tag("figure", tag("div", Markup(inline_svg(figure, name, caption)), class_="picture"), tag("figcaption", caption))

    def _own(self, name: str) -> str:
        """A file name that cannot lead anywhere, and that no other figure has."""
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
    path.write_text(page.substitute(title=tag("b", f"{names}: Richter report")[3:-4], body=body,
                                    style=(STATIC / "report.css").read_text(encoding="utf-8")), encoding="utf-8")
    return path


def card(run: Run) -> str:
    """For a notebook: the verdict, the last numbers and the curves of the feature correlation. ``HTML(card(run))``."""
    from richter.report.figures import curves
    from richter.report.svg import inline_svg
    (shown,) = _shown([run])
    measure = next((m for m in ("nfc", *run.measures) if m in run.measures), None)
    picture = Markup(inline_svg(curves(shown.frame, measures=[measure]), f"card-{run.name}", TITLES.get(measure, measure))
                     ) if measure else Markup("")
    return tag("div", verdict(shown, brief=True), last_values(shown), picture)


# ---------------------------------------------------------------------------------------------------------- the page

def _shown(runs: Sequence[Run]) -> list[Shown]:
    named = plotdata.labelled(runs)
    look = run_looks(named)
    return [Shown(name, run, look[name].colour, run.frame, run.snapshots) for name, run in named.items()]


def _header(shown: Sequence[Shown], names: str, titles: Iterable[str]) -> Markup:
    measured = sum(len(s.run.steps) for s in shown)
    layers = len([k for k in plotdata.depth(s.frame for s in shown) if k != WHOLE])
    words = f"{_count(len(shown), 'run')}, {_count(measured, 'measurement')} of {_count(layers, 'layer')}"
    return tag("header", tag("h1", names), tag("p", f"Richter report: {words}"),
               tag("nav", *(tag("a", title, href=f"#{_anchor(title)}") for title in titles)))


def _sections(shown: Sequence[Shown], album: Album) -> Iterable[tuple[str, Markup]]:
    yield "Verdict", joined(verdict(s, several=len(shown) > 1) for s in shown)
    if len(shown) > 1:
        yield "What differs", settings([(s.name, s.run.settings) for s in shown], differing=True)
    yield "Measures over training", _curves(shown, album)
    yield "Layers and time", _heat(shown, album)
    yield "Matrices and spectra", _matrices(shown, album)
    yield "Loss and other curves", _scalars(shown, album)
    yield "Last values", joined(last_values(s, several=len(shown) > 1) for s in shown)
    yield "Claims", joined(claims(s.name, s.run.claims, several=len(shown) > 1) for s in shown)
    yield "Stored pictures", joined(_stored_pictures(s) for s in shown)
    yield "Cost of measuring", cost(shown)
    yield "Settings", settings([(s.name, s.run.settings) for s in shown])
    yield "Record", sessions(shown)
    yield "References", references(m for s in shown for m in s.run.measures)


def _curves(shown: Sequence[Shown], album: Album) -> Markup:
    from richter.report import figures
    frames = {s.name: s.frame for s in shown}
    parts: list[Markup] = []
    bands = "Bands: one standard error over probe examples. Layers whose value is 1 by definition are left out."
    for heading, words, measures in families(m for s in shown for m in s.run.measures):
        parts += [tag("h3", heading), tag("p", words, class_="soft")]
        if len(shown) == 1:
            parts.append(album.page(f"curves-{heading}", lambda m=measures: figures.curves(shown[0].frame, measures=m), bands))  # type: ignore[misc]
        else:
            parts += [album.page(f"compare-{m}", lambda m=m: figures.compare(frames, m), _compared(frames, m)) for m in measures]  # type: ignore[misc]
    return joined(parts)


def _compared(frames: dict[str, pandas.DataFrame], measure: str) -> str:
    layers = len({k for f in frames.values() for k in f.layer[f.measure == measure]})
    some = f" Of {layers} layers, 12 evenly over depth; the heat maps below show all." if layers > 12 else ""
    return f"{TITLES.get(measure, measure)}: a panel for each layer, a colour for each run.{some}"


def _heat(shown: Sequence[Shown], album: Album) -> Markup:
    from richter.report import figures
    caption = "One row for each layer, one column for each measurement; grey: no finding."
    if len(shown) == 1:
        frame = shown[0].frame
        wide = [m for _, _, measures in families(shown[0].run.measures) for m in measures
                if min(plotdata.grid(frame, m).values.shape) > 1]
        return album.page("heat", lambda: figures.heat_maps(frame, wide), caption) if wide else Markup("")
    frames = {s.name: s.frame for s in shown}
    every = list(dict.fromkeys(m for s in shown for m in s.run.measures))
    chosen = [m for m in [m for m in HEAT if m in every] or every[:3]
              if any(min(plotdata.grid(f, m).values.shape) > 1 for f in frames.values())]
    return joined(album.page(f"heat-{m}", lambda m=m: figures.compare_heat(frames, m), caption) for m in chosen)  # type: ignore[misc]


def _matrices(shown: Sequence[Shown], album: Album) -> Markup:
    parts = [part for s in shown for part in _matrices_of(s, album, len(shown))]
    about = ("Red is positive, blue negative; each matrix has its own scale, written below it. Of a wide one, a point is the "
             "largest entry of its block.")
    return joined([tag("p", about, class_="soft"), *parts]) if parts else Markup("")


def _matrices_of(s: Shown, album: Album, runs: int) -> Iterable[Markup]:
    """Some layers, evenly over depth; with several runs fewer, and not the read-out, whose NFM is its AGOP."""
    from richter.report import figures
    run, layers = s.run, plotdata.with_matrices(s.run)
    some = plotdata.chosen(layers if runs == 1 else layers[:-1] or layers, max(1, LAYERS // runs))
    of = f"{s.name}: " if runs > 1 else ""
    for i, k in enumerate(some):
        steps = plotdata.matrix_steps(run, k)
        when = f"at the first and the last step ({steps[0]}, {steps[-1]})" if len(steps) > 1 else f"at step {steps[0]}"
        few = f" {len(some)} of {len(layers)} layers are shown." if i == 0 and len(some) < len(layers) else ""
        yield tag("h3", f"{of}layer {k}")
        yield tag("div", album.page(f"matrices-{of}{k}", lambda k=k: figures.matrices(run, k), f"Feature matrices {when}.{few}"),  # type: ignore[misc]
                  _spectra(s, k, album, of), class_="pair")
    if any(name not in plotdata.MATRICES or not layers for name in plotdata.stored(run, WHOLE)):
        yield tag("h3", f"{of}whole model")
        yield _spectra(s, WHOLE, album, of)


def _spectra(s: Shown, layer: str, album: Album, of: str) -> Markup:
    from richter.report import figures
    try:
        names = plotdata.stored(s.run, layer)
        width = max(max(s.run.array(n, layer, steps[-1]).shape, default=0) for n, steps in names.items())
    except RichterError as why:
        return tag("p", f"No spectra: {why}", class_="soft")
    if width > plotdata.SPECTRUM:
        return tag("p", f"Spectra of matrices wider than {plotdata.SPECTRUM} are not part of a report; they are drawn by "
                        f"richter.report.figures.spectra(run, {layer!r}).", class_="soft")
    return album.page(f"spectra-{of}{layer}", lambda: figures.spectra(s.run, layer, across=1),
                      "Eigenvalues before and after; stored are the leading ones.")


def _scalars(shown: Sequence[Shown], album: Album) -> Markup:
    from richter.report import figures
    runs = {s.name: s.run for s in shown if s.run.names}
    return album.page("scalars", lambda: figures.scalars(runs), "As they were logged during training.") if runs else Markup("")


def _stored_pictures(s: Shown) -> Markup:
    """Pictures that were stored with the run: as images, in which nothing can run."""
    parts = []
    for name, kind in s.run.figures:
        data = s.run.figure(name, kind)
        if kind == "pdf" or len(data) > PICTURE:
            parts.append(tag("p", f"{name}.{kind} ({len(data) / 1000:.0f} kB) lies in the run.", class_="soft"))
            continue
        source = f"data:image/{'svg+xml' if kind == 'svg' else 'png'};base64,{base64.b64encode(data).decode()}"
        parts.append(tag("figure", tag("div", tag("img", src=source, alt=name), class_="picture"), tag("figcaption", name)))
    return joined(parts)


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z]+", "-", title.lower())


def _count(n: int, word: str) -> str:
    return f"{n} {word}" + ("" if n == 1 else "s")
