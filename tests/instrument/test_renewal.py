"""Between two snapshots of an Observer anything may happen to a model: the second is a fresh measurement's, or its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import richter
from richter.core import MemoryBudgetError, MixingError, SelectionError
from richter.models import mlp
from richter.workflows.nfc_by_layer import nfc_by_layer

DRAW = torch.Generator().manual_seed(0)
X, Y = torch.randn(20, 6, generator=DRAW, dtype=torch.float64), torch.arange(20) % 3


class Changing(nn.Module):
    """What it does depends on attributes, on a buffer and on its own weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.e = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.0)
        self.register_buffer("mixing", torch.zeros(()), persistent=False)
        self.scale, self.used = 1.0, False
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(torch.relu(self.a(self.scale * x + self.mixing * x.mean(0))))
        h = torch.relu(self.e(h)) if self.used else h
        if self.b.bias[0] > 5:  # then some of the examples take another way
            rows = (x[:, 0] > 0).nonzero()[:, 0]
            h = h.index_copy(0, rows, torch.relu(self.e(h[rows])))
        return self.b(h)


class Scaled(nn.Module):
    k = 1.0

    def forward(self, w: Tensor) -> Tensor:
        return self.k * w


def moved(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=DRAW, dtype=p.dtype))


def behind(model: Changing) -> None:
    """By .data, which torch does not count, while all outputs stay zero."""
    for p in model.b.parameters():
        p.data.zero_()
    model.a.weight.data.mul_(3)


CHANGES: dict[str, Callable[[Any], object]] = {
    "weights": moved, "scale": lambda m: setattr(m, "scale", 0.5), "used": lambda m: setattr(m, "used", True),
    "frozen": lambda m: m.a.requires_grad_(False), "behind": behind, "swapped": lambda m: setattr(m, "e", nn.Identity()),
    "routed": lambda m: m.b.bias.data.fill_(6.0), "hooked": lambda m: m.a.register_forward_hook(lambda *a: 2 * a[2]),
    "drawn": lambda m: setattr(m.dropout, "p", 0.5),
}


def rows(snap: richter.Snapshot | None) -> dict[tuple[str, str], float]:
    assert snap is not None
    return {(r.layer, r.measure): r.value for r in snap.rows}


@pytest.mark.parametrize("also", ["nothing", "weights"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_snapshot_is_that_of_a_fresh_measurement(name: str, also: str) -> None:
    model, mode = Changing(), "train" if name == "drawn" else "eval"
    probe = richter.Probe(X, Y)
    watch = richter.Observer(model, probe, when=1, budget=None, mode=mode, on_error="raise")
    watch(0)
    if also == "weights":
        moved(model)
    CHANGES[name](model)
    known = {k: v for k, v in watch.initial.items() if k in model.state_dict()}
    second, third = rows(watch(1)), rows(watch(2))
    fresh = rows(richter.measure(model, probe, initial=known, mode=mode))
    assert second == pytest.approx(fresh, rel=1e-10, nan_ok=True)
    assert third == pytest.approx(fresh, rel=1e-10, nan_ok=True)


def test_a_weight_computed_with_an_attribute_is_computed_anew() -> None:
    """Also the initial one."""
    model = mlp([6, 8, 3], seed=0).double()
    scaled = Scaled()
    parametrize.register_parametrization(model[0], "weight", scaled, unsafe=True)
    watch = richter.Observer(model, richter.Probe(X, Y), when=1, budget=None, on_error="raise")
    watch(0)
    moved(model)
    scaled.k = 0.5
    assert rows(watch(1)) == pytest.approx(rows(richter.measure(model, richter.Probe(X, Y), initial=watch.initial)), nan_ok=True)


def test_examples_that_begin_to_mix_are_refused() -> None:
    model = Changing()
    watch = richter.Observer(model, richter.Probe(X, Y), when=1, budget=None, on_error="raise")
    watch(0)
    moved(model)
    model.mixing.fill_(1.0)
    with pytest.raises(MixingError):
        watch(1)


def test_what_does_not_fit_is_said_in_a_sentence_each_time() -> None:
    model = mlp([6, 8, 3], seed=0).double()
    watch = richter.Observer(model, richter.Probe(X, Y), when=1, budget=None, on_error="raise")
    watch(0)
    parametrize.register_parametrization(model[0], "weight", Scaled(), unsafe=True)
    for step in (1, 2):
        with pytest.raises(SelectionError, match="has no entry"):
            watch(step)


def test_a_plan_that_failed_is_made_again() -> None:
    """A layer that is used later needs more memory than there is, at every step."""
    model = Changing()
    model.e = nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 300), nn.Linear(300, 8)).double()
    watch = richter.Observer(model, richter.Probe(X, Y), measures=["nfc"], when=1, budget=None, memory="2MB", on_error="raise")
    watch(0)
    model.used = True
    for step in (1, 2):
        with pytest.raises(MemoryBudgetError):
            watch(step)


def test_no_labels_are_said_of_every_layer() -> None:
    """Of many outputs too, where kernels of single ones are looked at."""
    snap = richter.measure(mlp([6, 8, 80], seed=0).double(), richter.Probe(X, None), ["tangent_alignment", "tangent_correlation"])
    assert {r.note for r in snap.rows} == {"the probe has no labels"}


def test_cotangents_of_a_measure_may_be_a_function() -> None:
    measure = richter.measures.Measure("first", lambda K: K.trace().item(), (richter.instrument.statistics.PTK_COVARIANCE,),
                                       cotangents=lambda f, y: torch.eye(3, dtype=f.dtype)[:1, None].expand(1, len(f), 3))
    model = mlp([6, 8, 3], seed=0).double()
    assert richter.measure(model, richter.Probe(X, Y), [measure]).value("first", "2") == pytest.approx(1.0)


def test_weights_that_lie_elsewhere_are_read_there() -> None:
    """Richness trusts that the same modules work in the same way, and still sees every number."""
    model = mlp([6, 8, 3], seed=0).double()
    rich = nfc_by_layer(model, richter.Probe(X, Y))
    rich()
    model[0].weight.data = torch.randn(8, 6, generator=DRAW, dtype=torch.float64)  # other memory, which torch does not count
    assert rich()["0"] == pytest.approx(richter.measure(model, richter.Probe(X, Y), ["nfc"]).value("nfc", "0"), rel=1e-10)
