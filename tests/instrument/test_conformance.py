"""The conformance tests shipped to people who extend Richter: they pass what is right and catch what is wrong."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import richter
from richter.core import Card, Interval, Ref
from richter.instrument.statistics import AGOP, NFM, WEIGHT
from richter.layers import _VIEWS, LinearMap, register
from richter.layers.linear import positions
from richter.measures import Measure, catalogue
from richter.testing import check_layer, check_measure

HERE = Card("a measure", ref=Ref("here"))

DRAW = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=DRAW, dtype=torch.float64)


@pytest.mark.parametrize(("layer", "x"), [
    (nn.Linear(5, 4), normal(3, 5)),
    (nn.Linear(5, 4, bias=False), normal(3, 7, 5)),
    (nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2), normal(3, 4, 9, 8)),
    (nn.Conv1d(2, 3, 3, padding="same", padding_mode="circular"), normal(3, 2, 9)),
    (nn.Conv3d(2, 3, (1, 2, 3)), normal(3, 2, 4, 4, 5)),
    (nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1), normal(3, 2, 4)),
    (nn.ConvTranspose2d(4, 6, (2, 3), dilation=2, groups=2), normal(3, 4, 3, 2)),
    (nn.ConvTranspose3d(2, 3, 1, stride=(2, 1, 1)), normal(3, 2, 2, 3, 2)),
    (nn.Embedding(7, 4, padding_idx=0), torch.tensor([[1, 2, 0], [0, 6, 6], [3, 3, 5]])),
    (nn.LayerNorm(5), normal(3, 4, 5)), (nn.LayerNorm((4, 5)), normal(3, 4, 5)), (nn.RMSNorm(5), normal(3, 5)),
    (nn.GroupNorm(2, 4), normal(3, 4, 5)), (nn.BatchNorm1d(4), normal(3, 4)), (nn.BatchNorm2d(4), normal(3, 4, 3, 3)),
], ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "")
def test_shipped_views_are_right(layer: nn.Module, x: torch.Tensor) -> None:
    check_layer(layer.double().eval(), x)


class Scaled(nn.Module):
    """A layer type of a user's own: z = W (2 h), weight stored transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(normal(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensordot(2 * x, self.kernel, 1)


RIGHT = LinearMap(matrix=lambda m, w: w.T, inputs=lambda m, x: positions(2 * x), outputs=lambda m, z: positions(z),
                  weight="kernel")


@pytest.fixture
def registered():
    yield lambda **changes: register(Scaled, {"": dataclasses.replace(RIGHT, **changes)})
    _VIEWS.pop(Scaled, None)


def test_a_new_layer_type_in_one_line(registered) -> None:
    registered()
    check_layer(Scaled(), normal(3, 5))
    model = nn.Sequential(Scaled(), nn.Tanh(), nn.Linear(4, 3).double())
    snap = richter.measure(model, richter.Probe(normal(12, 5), torch.arange(12) % 3), ["nfc"])
    assert 0 < snap.value("nfc", "0") <= 1


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"inputs": lambda m, x: positions(x)}, "rebuild"),
    ({"outputs": lambda m, z: positions(2 * z)}, "rebuild"),
    ({"matrix": lambda m, w: w.T[:2], "outputs": lambda m, z: positions(z)[..., :2]}, "cover 10 of 20"),
    ({"matrix": lambda m, w: w[:4].T * 0}, "repeats entries"),
])
def test_a_wrong_view_is_caught(registered, changes: dict, sentence: str) -> None:
    registered(**changes)
    with pytest.raises(AssertionError, match=sentence):
        check_layer(Scaled(), normal(3, 5))


def test_a_type_without_view_is_named() -> None:
    with pytest.raises(AssertionError, match="no view is registered for Scaled"):
        check_layer(Scaled(), normal(3, 5))


def test_shipped_measures_obey_the_laws() -> None:
    check_measure(*catalogue().values())


@pytest.mark.long
@pytest.mark.parametrize("name", list(catalogue()))
def test_a_shipped_measure_obeys_the_laws_by_itself(name: str) -> None:
    check_measure(catalogue()[name])


def test_a_measure_of_ones_own() -> None:
    trace = Measure("trace", lambda A, B: A.diagonal().sum().item() + 0 * B.norm, (NFM, AGOP), card=HERE)
    check_measure(trace)
    model = richter.models.mlp([5, 4, 3], seed=0)
    snap = richter.measure(model, richter.Probe(normal(12, 5).float(), torch.arange(12) % 3), ["nfc", trace])
    assert snap.value("trace", "0") == pytest.approx(model[0].weight.square().sum().item(), rel=1e-6)


@pytest.mark.parametrize(("broken", "sentence"), [
    (Measure("nowhere", lambda W: 1.0, (WEIGHT,)), "a measure needs a reference"),
    (Measure("outside", lambda W: 2.0, (WEIGHT,), card=Card("2", bounds=Interval(0, 1), ref=Ref("here"))), "outside its bounds"),
    (Measure("nan", lambda W: float("nan"), (WEIGHT,), card=HERE), "every value is NaN"),
])
def test_a_wrong_measure_is_caught(broken: Measure, sentence: str) -> None:
    for measures in ([broken], [catalogue()["nfc"], broken], [broken, catalogue()["nfc"]]):
        with pytest.raises(AssertionError, match=f"{broken.name}.*{sentence}"):
            check_measure(*measures)


def test_no_measure_is_no_check() -> None:
    with pytest.raises(AssertionError, match="give it a measure"):
        check_measure()


def test_a_measure_that_depends_on_chunks_is_caught() -> None:
    calls = iter(range(10 ** 6))
    with pytest.raises(AssertionError, match="changes with the size of chunks"):
        check_measure(Measure("drifting", lambda W: float(next(calls)), (WEIGHT,), card=HERE))
