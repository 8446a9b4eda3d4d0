"""The report's sections on features: the features of each run, and their similarity between runs, or between the first and the
last step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from richter.core import WHOLE, RichterError
from richter.report import features
from richter.report.axes import step_text
from richter.report.comparison import Comparison, between, last_kept, steps_of
from richter.report.markup import Markup, joined, tag

if TYPE_CHECKING:
    from richter.report.html import Album, Shown

PAIRS = 3  # pairs of runs that are compared


def of_runs(shown: Sequence[Shown], album: Album) -> Markup:
    """Describe the features of each run, if they were measured or stored."""
    parts: list[Markup] = []
    inputs: list[Markup] = []
    for s in shown:
        owner = f"{s.name}: " if len(shown) > 1 else ""
        try:
            parts += _of_run(s, album, owner)
            inputs += _exciting(s, album, owner)
        except RichterError as why:  # a damaged array must not stop the report
            parts.append(tag("p", f"{owner}features are not shown: {why}", class_="soft"))
    return joined([*parts, tag("div", *inputs, class_="columns") if len(inputs) > 1 else joined(inputs)])


def _of_run(s: Shown, album: Album, owner: str) -> Iterable[Markup]:
    run = s.run
    measured = WHOLE in features.layers(run)
    parts: list[Markup] = []
    if measured:
        parts.append(album.page(f"features-{owner}", lambda: features.spectrum(run), "Features of the last layer, the strongest "
                                "first: the share of the targets that the first of them hold, the share of the outputs' space, "
                                "and how strong each is. Few strong and used features are not the same as good ones."))
    if measured and len(features.steps(run)) > 1:
        evolution = album.page(f"features-time-{owner}", lambda: features.evolution(run),
                               f"The first {features.FIRST} features through training, each by itself.")
        parts.append(tag("details", tag("summary", "Through training"), evolution) if owner else evolution)
    if run.has(features.KAPPA):
        parts.append(album.page(f"kappa-{owner}", lambda: features.learning(run), "Kappa, the distance from as few features as "
                                "the outputs need, beside the learning curve; dotted: the border of the minimum feature regime."))
    if parts:
        yield tag("h3", f"{owner}features") if owner else Markup("")
        yield from parts


def _exciting(s: Shown, album: Album, owner: str) -> Iterable[Markup]:
    run = s.run
    if features.can_excite(run):
        step = step_text(last_kept(run))
        classes = " The class is written below each." if features.classes(run) else ""
        yield album.page(f"exciting-{owner}", lambda: features.exciting(run),
                         f"{owner}the inputs that excite each leading feature of layer {features.readout_layer(run)} most, at "
                         f"step {step}: eigenfunctions of what it reads, centred.{classes}")


def compared(shown: Sequence[Shown], album: Album) -> Markup:
    """Compare stored features: the first and the last step of a single run, or the first run with each of the others."""
    with_features = [s for s in shown if steps_of(s.run)]
    if len(shown) == 1 and with_features and len(steps := steps_of(with_features[0].run)) > 1:
        run = with_features[0].run
        return _pair(album, lambda: between(run, run, (steps[0], None), debiased=True), "the first and the last step")
    return joined(_pair(album, lambda other=other: between(with_features[0].run, other.run, debiased=True),  # type: ignore[misc]
                        f"{with_features[0].name} and {other.name}") for other in with_features[1:PAIRS + 1])


def _pair(album: Album, compare: Callable[[], Comparison], names: str) -> Markup:
    try:
        c = compare()
    except RichterError as why:
        return tag("p", f"{names} are not compared: {why}", class_="soft")
    return album.page(f"compare-features-{names}", c.plot, (
        f"Are the layers of {names} alike? On {c.rows} {c.kind}: debiased CKA of what each layer reads (1: the same up to "
        f"a rotation and a scale, about 0: nothing in common), and the overlap of the leading features (up to {c.chance:.2f} "
        f"by chance)."))
