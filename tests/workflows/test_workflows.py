"""The verdict, the picture, the demo's data and network."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import ClassVar

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import richter
from richter.core import Row, SelectionError
from richter.instrument.snapshot import Snapshot, shown
from richter.instrument.verdict import diagnose
from richter.models import mlp
from richter.report.figures import curves
from richter.tasks import digits


@pytest.mark.parametrize(("before", "after", "error", "words"), [
    (0.1, 0.5, 0.01, ["0.1 -> 0.5 (x5.0), beyond probe noise"]),
    (0.1, 0.11, 0.01, ["0.1 -> 0.11 (x1.1), within probe noise (0.014)"]),
    (0.1, 0.1000001, math.nan, ["0.1 -> 0.1 (x1.0), no error bar"]), (0.0, 0.5, math.inf, ["0 -> 0.5, no error bar"]),
    (math.nan, 0.5, 0.01, []), (0.1, math.nan, 0.01, []), (0.1, math.inf, math.nan, [])])
def test_evidence_is_said_with_its_noise(before: float, after: float, error: float, words: list[str]) -> None:
    ends = [Snapshot((Row(s, "*", "tangent_cka", v, e),), s) for s, v, e in ((0, before, 0.01), (9, after, error))]
    found = diagnose(SimpleNamespace(snapshots=ends))
    assert [e.partition(": ")[2] for e in found.evidence] == words
    assert found.step == 9


def test_the_verdict_does_not_read_what_lies_between() -> None:
    class Long:
        ends: ClassVar = [Snapshot((Row(s, "a", "weight_change", w),), s) for s, w in ((0, 0.5), (9, 0.0))]

        @property
        def snapshots(self) -> list[Snapshot]:
            raise AssertionError("all of them were read")

    assert diagnose(Long()).verdict.startswith("untrained")


def trained(scale: float, output: float, lr: float, steps: int = 300) -> richter.Observer:
    """A network whose output is multiplied by ``output``: large is lazy."""
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp([64, 64, 64, 10], scale=scale, seed=0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return output * self.net(x)

    data, model = digits(), Scaled()
    optimiser = torch.optim.SGD(model.parameters(), lr=lr)
    watch = richter.Observer(model, richter.Probe(data.x[:64], data.y[:64], kernel_examples=32), when=steps, budget=None)
    for step in range(steps):
        loss = F.cross_entropy(model(data.x), data.y)
        watch(step, loss=loss)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    watch.now(steps)
    return watch


def test_lazy_and_rich_training_are_told_apart() -> None:
    lazy, rich = trained(scale=2.0, output=100.0, lr=1e-6), trained(scale=0.5, output=1.0, lr=0.5)
    assert diagnose(lazy).verdict.startswith("lazy")
    assert "start smaller" in diagnose(lazy).advice[0]
    assert diagnose(rich).verdict.startswith("rich")
    assert any("kernel with the labels (tangent_cka) rose: " in e and "beyond probe noise" in e for e in diagnose(rich).evidence)


def test_what_cannot_be_diagnosed() -> None:
    with pytest.raises(SelectionError, match="takes a Snapshot, an Observer, a Run or the folder of one, not int"):
        diagnose(3)  # type: ignore[arg-type]
    watch = richter.Observer(mlp([3, 2], seed=0), richter.Probe(torch.eye(3), torch.arange(3) % 2))
    with pytest.raises(SelectionError, match="nothing has been measured yet"):
        diagnose(watch)


def test_curves_show_each_layer_and_leave_out_what_is_trivial() -> None:
    rows = [(s, k, m, v * s, 0.01, "", mark) for s in (0, 1, 10) for k, v, mark in
            (("first", 0.1, "exact"), ("last", 0.2, "trivial"), ("*", 0.3, "estimated")) for m in ("nfc", "tangent_cka")]
    frame = pd.DataFrame(rows, columns=["step", "layer", "measure", "value", "error", "note", "mark"])
    figure = curves(frame, pd.DataFrame({"step": [0, 1], "loss": [2.0, 1.0]}), title="a title")
    assert [a.get_title() for a in figure.axes] == ["feature correlation (nfc)", "tangent kernel x labels (cka)", "loss"]
    assert {line.get_label() for line in figure.axes[0].get_lines()} == {"first", "*"}
    assert len(curves(frame).axes) == 2
    assert figure.get_suptitle() == "a title"


@pytest.mark.parametrize(("value", "error", "text"), [
    (0.8234, 0.012, "0.823(12)"), (0.5, math.nan, "0.500"), (12.34, 2.5, "12.3(25)"), (math.nan, 0.1, ""), (1.0, 0.0, "1.000"),
])
def test_numbers_as_people_write_them(value: float, error: float, text: str) -> None:
    assert shown(Row(0, "a", "m", value, error)) == text
    assert shown(None) == ""


def test_digits_and_networks_are_drawn_by_their_seed() -> None:
    a, b, c = digits(), digits(), digits(seed=1)
    assert len(a.x) + len(a.x_test) == 1797
    assert torch.equal(a.x, b.x)
    assert not torch.equal(a.x, c.x)
    assert abs(torch.cat([a.x, a.x_test]).mean().item()) < 1e-5
    assert digits(dtype=torch.float64, test=0.5).x.shape == (898, 64)
    with pytest.raises(ValueError, match="between 0 and 1"):
        digits(test=1.5)
    state = torch.get_rng_state()
    assert torch.equal(mlp([4, 3], seed=1)[0].weight * 2, mlp([4, 3], seed=1, scale=2.0)[0].weight)
    assert torch.equal(state, torch.get_rng_state())
    assert mlp([4, 3, 2], activation=nn.Tanh, bias=False, seed=0)[0].bias is None
    with pytest.raises(ValueError, match="at least an input and an output width"):
        mlp([4])
