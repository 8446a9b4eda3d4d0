"""Speeds by layer: given by name, or following a measurement."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import richter
from descents import batch, close, richness_of, small, train
from oracles import adaptive_speeds, slo_step
from richter.controls import SLO, AdaptiveSLO, slo_groups
from richter.core import Mark
from richter.models import GPT, mlp
from richter.workflows.nfc_by_layer import nfc_by_layer


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.read = nn.Embedding(5, 4)
        self.block = nn.ModuleDict({"norm": nn.LayerNorm(4), "fc": nn.Linear(4, 4)})
        self.write = nn.Linear(4, 5)
        self.write.weight = self.read.weight


def speeds_of(groups: list[dict[str, Any]]) -> dict[str, float]:
    return {g["layer"]: g["speed"] for g in groups}


def test_groups_are_modules_with_weight_and_bias_and_shared_ones_once() -> None:
    model = Tied()
    groups = slo_groups(model)
    assert {g["layer"]: len(g["params"]) for g in groups} == {"": 1, "read": 1, "block.norm": 2, "block.fc": 2, "write": 1}
    assert {id(p) for g in groups for p in g["params"]} == {id(p) for p in model.parameters()}
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    SLO(groups, 0.1)


def test_speeds_by_name_pattern_and_part() -> None:
    model = Tied()
    everything = {"": 1.0, "read": 1.0, "block.norm": 1.0, "block.fc": 1.0, "write": 1.0}
    assert speeds_of(slo_groups(model)) == everything
    assert speeds_of(slo_groups(model, default=3.0)) == dict.fromkeys(everything, 3.0)
    assert speeds_of(slo_groups(model, {"block": 2.0})) == {**everything, "block.norm": 2.0, "block.fc": 2.0}
    assert speeds_of(slo_groups(model, {"block.*": 2.0, "*.fc": 4.0})) == {**everything, "block.norm": 2.0, "block.fc": 4.0}
    assert speeds_of(slo_groups(model, {"block.fc": 9.0, "*": 0.5})) == {**dict.fromkeys(everything, 0.5), "block.fc": 9.0}


def test_wrapped_models_have_the_inner_names() -> None:
    model = small()
    for wrapped in (nn.DataParallel(model), torch.compile(model)):
        assert speeds_of(slo_groups(wrapped, {"2": 2.0})) == {"0": 1.0, "2": 2.0, "4": 1.0}  # type: ignore[arg-type]


def test_the_chosen_layers_are_those_of_the_rule() -> None:
    model = mlp([4, 5, 5, 5, 2], seed=0).double()
    layers = ["0", "2", "4", "6"]
    script = [{"0": 0.5, "2": 0.4, "4": 0.3}, {"0": 0.6, "2": 0.7, "4": 0.5}, {"0": 0.1, "2": 0.7, "4": 0.9},
              {"0": 0.3, "2": 0.2, "4": 0.9}, {"0": 0.3, "2": 0.3, "4": math.nan}]
    answers = iter(script)
    optimiser = AdaptiveSLO(slo_groups(model), 0.05, lambda: next(answers), s=20.0)
    for values in script:
        before = {k: model.get_submodule(k).weight.detach().clone() for k in layers}
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimiser.step()
        expected = adaptive_speeds(values, layers, 20.0)
        assert speeds_of(optimiser.param_groups) == expected
        close([model.get_submodule(k).weight for k in layers],
              [slo_step(before[k], torch.ones_like(before[k]), 0.05, expected[k], 0.01) for k in layers])
    assert [int(layer) // 2 for _, layer in optimiser.history] == [2, 2, 0, 1, 0]  # type: ignore[arg-type]
    assert [step for step, _ in optimiser.history] == [0, 1, 2, 3, 4]


@settings(max_examples=30, deadline=None)
@given(values=st.lists(st.sampled_from([0.0, 0.2, 0.2, 0.5, 1.0, math.nan]), min_size=4, max_size=4), s=st.floats(1, 100))
def test_any_values_choose_as_the_oracle(values: list[float], s: float) -> None:
    model, layers = mlp([2, 2, 2, 2, 2], seed=0), ["0", "2", "4", "6"]
    mapping = dict(zip(layers, values, strict=True))
    optimiser = AdaptiveSLO(slo_groups(model), 0.1, lambda: mapping, s=s)
    optimiser.step()
    assert speeds_of(optimiser.param_groups) == adaptive_speeds(mapping, layers, s)
    assert (optimiser.history[0][1] is None) == all(map(math.isnan, values))


def test_cadence_exclusion_and_speed_do_something() -> None:
    def run(**options: Any) -> AdaptiveSLO:
        model = small()
        optimiser = AdaptiveSLO(slo_groups(model), 0.1, richness_of(model), **options)
        train(model, optimiser, 6)
        return optimiser

    assert [step for step, _ in run(every=4).history] == [0, 4]
    (first,) = {layer for _, layer in run(every=6).history}
    assert first is not None
    assert first not in {layer for _, layer in run(exclude=first).history}
    assert run(exclude=["0", "2", "4"], every=6).history == [(0, None)]
    assert max(g["speed"] for g in run(s=7.0).param_groups) == 7.0
    assert max(g["speed"] for g in run().param_groups) == 20.0


def test_nothing_that_can_be_chosen_keeps_the_speeds() -> None:
    model = small()
    answers = iter([{"0": 0.1, "2": 0.2}, {"0": math.nan, "2": math.nan}])
    optimiser = AdaptiveSLO(slo_groups(model), 0.1, lambda: next(answers))
    optimiser.step()
    before = speeds_of(optimiser.param_groups)
    optimiser.step()
    assert speeds_of(optimiser.param_groups) == before
    assert optimiser.history == [(0, "0"), (1, None)]


def test_a_map_of_a_fused_layer_stands_for_its_module() -> None:
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(4, 2), "fc": nn.Linear(4, 4)})
    optimiser = AdaptiveSLO(slo_groups(model), 0.1, lambda: {"attn.q": 0.1, "attn.out_proj": 0.5, "fc": 0.3}, s=2.0)
    optimiser.step()
    assert speeds_of(optimiser.param_groups) == {"attn": 2.0, "attn.out_proj": 0.5, "fc": 0.5}


def test_a_layer_added_later_is_slow_until_it_is_chosen() -> None:
    model, extra = small(), nn.Linear(3, 3)
    optimiser = AdaptiveSLO(slo_groups(model), 0.1, lambda: {"0": 0.1}, every=10)
    optimiser.step()
    optimiser.add_param_group({"params": extra.parameters(), "layer": "extra"})
    assert speeds_of(optimiser.param_groups)["extra"] == 1 / 20


def test_a_measurement_that_fails_leaves_the_optimiser_as_it_was() -> None:
    model = small()
    optimiser = AdaptiveSLO(slo_groups(model), 0.1, lambda: {}[0])
    with pytest.raises(KeyError):
        optimiser.step()
    assert (optimiser.steps, optimiser.history) == (0, [])


def measured(model: nn.Module, probe: richter.Probe, **options: Any) -> dict[str, float]:
    snap = richter.measure(model, probe, ["nfc"], **options)
    return {r.layer: r.value for r in snap.rows if r.mark is not Mark.TRIVIAL}


class Net(nn.Module):
    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3)
        self.deep = nn.Conv2d(6, 4, 3, groups=groups)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.deep(self.conv(x).relu())).relu()).flatten(1))


def cases() -> dict[str, tuple[nn.Module, richter.Probe, dict[str, Any]]]:
    torch.manual_seed(0)
    x, y = batch()
    images, ids = torch.randn(10, 2, 6, 6).double(), torch.randint(0, 7, (6, 5))
    return {
        "mlp": (small(), richter.Probe(x, y, chunk=7), {}),
        "wide": (mlp([5, 4, 40, 3], seed=1).double(), richter.Probe(x, y), {}),
        "layers": (small(), richter.Probe(x, y), {"layers": ["2"]}),
        "output": (small(), richter.Probe(x, None), {"output": lambda out: out[:, :2]}),
        "conv": (Net().double(), richter.Probe(images, torch.arange(10) % 3), {}),
        "grouped": (Net(2).double(), richter.Probe(images, torch.arange(10) % 3), {}),
        "gpt": (GPT(7, 5, d=8, depth=1, heads=2).double(), richter.Probe(ids, ids.roll(-1, 1)), {}),
        "mask": (GPT(7, 5, d=8, depth=1, heads=2).double(), richter.Probe(ids, ids, mask=ids < 6, shift=False), {}),
    }


@pytest.mark.parametrize("name", list(cases()))
def test_nfc_by_layer_is_what_measure_says(name: str) -> None:
    model, probe, options = cases()[name]
    rich = nfc_by_layer(model, probe, **options)
    for seed in range(3):  # the first call is the long way
        expected = measured(model, probe, **options)
        found = rich()
        assert list(found) == list(expected)
        assert len(found) > 0
        assert found == pytest.approx(expected, rel=1e-9, nan_ok=True)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    assert all(m.training for m in model.modules())


def test_nfc_by_layer_leaves_out_the_read_out_and_notices_new_modules() -> None:
    model, probe = small(), richter.Probe(*batch())
    rich = nfc_by_layer(model, probe)
    assert list(rich()) == list(rich()) == ["0", "2"]
    model.append(nn.Linear(3, 3).double())
    assert list(rich()) == ["0", "2", "4"]
    assert rich() == pytest.approx(measured(model, probe), rel=1e-9)


def test_small_memory_changes_no_number() -> None:
    model, probe = small(), richter.Probe(*batch())
    rich, tight = nfc_by_layer(model, probe), nfc_by_layer(model, probe, memory="64KiB")
    rich(), tight()
    assert tight() == pytest.approx(rich(), rel=1e-10)


def test_adaptive_slo_with_a_real_measurement() -> None:
    model = small()
    rich = nfc_by_layer(model, richter.Probe(*batch(7)))
    optimiser = AdaptiveSLO(slo_groups(model), 0.05, rich, every=2)
    seen = []

    def each(step: int) -> None:
        if step % 2 == 0:
            values = measured(model, richter.Probe(*batch(7)))
            seen.append((step, min(values, key=values.__getitem__)))

    train(model, optimiser, 8, each=each)
    assert optimiser.history == seen
