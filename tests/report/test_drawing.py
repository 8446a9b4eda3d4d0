"""The parts that drawings of experiments are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from richter.report.drawing import COLOURS, LineStyle, band, caption, faults, key, label, line, panels, points, styled
from richter.report.svg import svg_text

YS = np.array([[1.0, 2.0, 3.0], [2.0, 4.0, 9.0], [3.0, 3.0, 6.0]])


@styled
def drawn(sentence: str = "It rises.", names: tuple[str, str] = ("width", "error"), **options: Any) -> Any:
    figure, (left, right, picture) = panels(3, across=3)
    band(left, [0, 10, 100], YS, COLOURS[1], "a run")
    points(right, [1, 10, 100], YS, label="measured")
    line(right, [1, 10, 100], [1, 2, 3], label="theory")
    picture.imshow(YS)
    label(left, "step", "correlation", "A", steps=True)
    label(right, *names, "B", log="xy", legend=True, **options)
    key(figure, {"a run": LineStyle(COLOURS[1])}, "")
    if sentence:
        caption(figure, sentence)
    return figure


def test_bands_and_points_are_over_seeds() -> None:
    left, right, _ = drawn().axes
    assert left.lines[0].get_ydata().tolist() == [2.0, 3.0, 6.0]
    ends = left.collections[0].get_paths()[0].vertices
    assert {tuple(v) for v in ends} >= {(0.0, 1.0), (0.0, 3.0), (100.0, 3.0), (100.0, 9.0)}
    assert right.lines[0].get_ydata().tolist() == [2.0, 3.0, 6.0]
    bars = [segment.tolist() for segment in right.collections[0].get_segments()]
    assert bars == [[[1, 1], [1, 3]], [[10, 2], [10, 4]], [[100, 3], [100, 9]]]
    assert right.lines[0].get_linestyle() == "None"
    assert right.lines[1].get_marker() == "None"


def test_one_seed_has_no_band() -> None:
    _, (ax,) = panels(1, across=1)
    band(ax, [0, 1], [1.0, 2.0])
    points(ax, [0, 1], [1.0, 2.0])
    assert not ax.collections
    assert [d.get_ydata().tolist() for d in ax.lines] == [[1.0, 2.0]] * 2


def test_a_whole_drawing_has_no_faults() -> None:
    figure = drawn()
    assert faults(figure) == []
    assert "It rises." in svg_text(figure)


@pytest.mark.parametrize(("options", "fault"), [
    ({"sentence": ""}, "no sentence says what to see"), ({"names": ("", "error")}, "panel 2 (B) does not name its x axis"),
    ({"names": ("width", "")}, "panel 2 (B) does not name its y axis")])
def test_faults_of_a_drawing(options: dict[str, Any], fault: str) -> None:
    (only,) = faults(drawn(**options))
    assert only.startswith(fault)


def test_a_long_caption_takes_room() -> None:
    short, long = drawn("It rises."), drawn("It rises, and then it falls. " * 20)
    assert long.get_figheight() > short.get_figheight() + 0.3
    long.draw_without_rendering()
    boxes = [ax.get_tightbbox() for ax in long.axes]
    text = next(t for t in long.texts if t.get_gid() == "caption").get_window_extent()
    assert all(box.y1 <= text.y0 + 1 for box in boxes)


def test_there_is_no_layer_and_a_half() -> None:
    figure, (layers, widths) = panels(2, across=2)
    for ax, name in ((layers, "hidden layer"), (widths, "share of the width")):
        line(ax, [1, 2, 3, 4], [1, 2, 3, 4])
        label(ax, name, "value")
    figure.canvas.draw()
    assert all(tick == int(tick) for tick in layers.get_xticks())
    assert not all(tick == int(tick) for tick in widths.get_xticks())
