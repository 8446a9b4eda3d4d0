"""Text that a notebook shows of probes, measurements, Observers, verdicts and comparisons: one line, and HTML in which names are
no markup."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
import torch

import richter
from richter.models import mlp

X = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def watch() -> richter.Observer:
    model = mlp([4, 8, 3], seed=0)
    watch = richter.Observer(model, richter.Probe(X, torch.arange(80) % 3), budget=None, when=1)
    watch(0, loss=1.2)
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    watch(10, loss=1.0)
    return watch


def test_each_is_one_short_line(watch: richter.Observer) -> None:
    seen = richter.diagnose(watch)
    a = richter.workflows.acceleration(mlp([4, 8, 3], seed=0), X[:20], torch.arange(20) % 3, lr=0.05, steps=10)
    lines = {"Probe(80 examples, x [80, 4] of float32, 3 classes)": watch.probe,
             "Snapshot(step 10: 14 measures of 2 layers on 80 examples)": watch.snapshots[-1],
             "Observer(Sequential on 80 examples: 2 measurements, the last at step 10, ": watch,
             f"Diagnosis({seen.word!r}": seen, "Acceleration(10 steps: losses network ": a}
    for line, thing in lines.items():
        assert repr(thing).startswith(line)
        assert len(repr(thing)) < 160
        assert "\n" not in repr(thing)
        text = thing._repr_html_()  # type: ignore[attr-defined]
        HTMLParser().feed(text)
        assert len(text) > 20
    assert "<svg" in a._repr_html_()
    assert all(v.layer in seen._repr_html_() for v in seen.layers)


def test_other_probes() -> None:
    tokens = torch.randint(9, (6, 5), generator=torch.Generator().manual_seed(0))
    probe = richter.Probe({"input_ids": tokens}, tokens, shift=True, mask=torch.ones(6, 5, dtype=torch.bool))
    assert repr(probe) == "Probe(6 examples, x['input_ids'] [6, 5] of int64, y [6, 5], a mask)"
    held = richter.Probe(X, None, held_out=(X[:7], None))
    assert repr(held) == "Probe(80 examples, x [80, 4] of float32, no labels, 7 held out)"


def test_names_of_a_user_are_no_markup() -> None:
    snap = richter.Snapshot((), 3)
    assert repr(snap) == "Snapshot(step 3: 0 measures of 0 layers on 0 examples)"
    probe = richter.Probe({"<b>": X}, torch.arange(80) % 3)
    assert "<b>'" not in probe._repr_html_()
    assert "&lt;b&gt;" in probe._repr_html_()
