"""The doctor's experiment: what the truth of a training is made of, which words are right, and what its rivals say."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from judged import assert_consistent
from richter.core import Row
from richter.experiments import Task
from richter.experiments.doctor import basics, cases, judging, networks, trainings, truth
from richter.experiments.doctor.cases import TrainingCase
from richter.experiments.frame import Results
from richter.instrument.observe import Observer
from richter.instrument.probe import Probe
from richter.instrument.snapshot import Snapshot
from richter.instrument.verdict import diagnose
from richter.models import mlp
from richter.runs import create


def snapshot(**layers: dict[str, float]) -> Snapshot:
    """Rows of a measurement: measure=dict(layer=value)."""
    rows = tuple(Row(1, layer, measure, v) for measure, numbers in layers.items() for layer, v in numbers.items())
    return Snapshot(rows, 1, {}, 0.0, 8)


# ------------------------------------------------------------------------------------------------------------- networks

def test_a_scaled_network_begins_at_zero_and_keeps_its_start() -> None:
    body = mlp([5, 7, 3], seed=0)
    model, x = networks.ScaledNetwork(body, 10.0), torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    first = body(x).detach()
    assert torch.equal(model(x), torch.zeros(4, 3))
    assert len(list(model.parameters())) == len(list(body.parameters()))  # the start is no parameter
    with torch.no_grad():
        body[0].weight.mul_(1.5)
    assert torch.allclose(model(x), 10 * (body(x) - first))


@pytest.mark.parametrize("name", list(networks.NETWORKS))
def test_a_linearised_network_is_the_first_order_expansion(name: str) -> None:
    network = networks.NETWORKS[name]
    body = network.build(0.5, 0).double()
    x = torch.randint(70, (3, networks.CONTEXT)) if name == "GPT" else \
        torch.randn(3, *((64,) if name == "MLP" else (1, 14, 14)), generator=torch.Generator().manual_seed(0)).double()
    linear = networks.Linearised(copy.deepcopy(body))
    assert torch.allclose(linear(x), body(x), atol=1e-12)
    draw = torch.Generator().manual_seed(1)
    directions = [torch.randn(p.shape, generator=draw).double() for p in body.parameters()]
    outputs = []
    for t in (1e-6, -1e-6):
        moved = copy.deepcopy(body)
        with torch.no_grad():
            for p, d in zip(moved.parameters(), directions, strict=True):
                p.add_(t * d)
            outputs.append(moved(x))
    before = linear(x).detach()
    with torch.no_grad():
        for w, d in zip(linear.weights, directions, strict=True):
            w.add_(d)
        change = linear(x) - before
    expected = (outputs[0] - outputs[1]) / 2e-6
    assert (change - expected).norm() < 1e-5 * expected.norm()


def test_a_network_that_is_linear_in_its_weights_trains_as_its_linearisation() -> None:
    model = nn.Sequential(nn.Linear(6, 4)).double()
    linear = networks.Linearised(copy.deepcopy(model))
    draw = torch.Generator().manual_seed(0)
    steps = networks.batches((torch.randn(32, 6, generator=draw).double(), torch.randint(4, (32,), generator=draw)), 3, 8, draw)
    for m in (model, linear):
        networks.train(m, steps, networks.optimiser(list(m.parameters()), "adam", 0.05, decay=0.1))
    assert torch.allclose(model(steps[0][0]), linear(steps[0][0]), atol=1e-10)


def test_factors_of_the_learning_rate_reach_their_parameters() -> None:
    params = [torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)]
    step = networks.optimiser(params, "sgd", 0.1, factors=[1.0, 5.0])
    (params[0] + params[1]).backward()
    step.step()
    assert [round(p.item(), 6) for p in params] == [0.9, 0.5]


# ---------------------------------------------------------------------------------------------------------------- truth

@pytest.mark.parametrize(("D", "gain", "right", "wrong"), [
    (0.059, 0.0, "lazy", "uncertain"), (0.059, 0.5, "probably lazy", "rich"), (0.1, 0.0, "uncertain", "amplified"),
    (0.1, 0.0, "lazy", "untrained"), (0.16, 0.2, "rich", "uncertain"), (0.5, 0.7, "rich", "amplified"),
    (0.3, 0.05, "amplified", "rich"),
    (0.3, 0.05, "uncertain", "lazy"), (0.3, 0.15, "rich", "probably lazy"), (0.17, 0.0, "amplified", "lazy")])
def test_the_words_that_are_right(D: float, gain: float, right: str, wrong: str) -> None:
    words = truth.correct_words(D, gain, True)
    assert right in words
    assert wrong not in words


def test_what_was_not_learned_is_no_regime() -> None:
    assert truth.correct_words(0.9, 0.5, False) == cases.FAILED
    assert truth.above_chance(0.3, 300, 10)
    assert not truth.above_chance(0.18, 300, 10)


def test_distance_and_ridge_error_are_their_definitions() -> None:
    f = torch.tensor([[3.0, 4.0]])
    assert truth.departure(f, f) == 0
    assert truth.departure(f, -f) == 1
    assert truth.departure(f, 0 * f) == 1
    draw = torch.Generator().manual_seed(0)
    y, y_test = torch.randint(3, (200,), generator=draw), torch.randint(3, (100,), generator=draw)
    told, told_test = torch.eye(3)[y] @ torch.randn(3, 5, generator=draw), torch.eye(3)[y_test]
    noise, noise_test = torch.randn(200, 5, generator=draw), torch.randn(100, 5, generator=draw)
    assert truth.ridge_error(torch.eye(3)[y], y, told_test, y_test, 3) < 1e-6
    assert told.shape == noise.shape
    constant = float(np.square(np.eye(3)[y].mean(0) - np.eye(3)[y_test]).mean())
    assert truth.ridge_error(noise, y, noise_test, y_test, 3) == pytest.approx(constant, rel=0.1)


# -------------------------------------------------------------------------------------------------------------- judging

def test_the_rivals_say_what_they_say() -> None:
    words = [judging.by_gap(g) for g in (0.01, 0.07, 0.2, 0.4, float("nan"))]
    assert words == ["lazy", "probably lazy", "uncertain", "rich", "unknown"]
    assert judging.by_share(snapshot(c_uc_ratio={"0": 0.01, "2": 0.04})) == "lazy"
    assert judging.by_share(snapshot(c_uc_ratio={"0": 0.6, "2": 2e51})) == "rich"  # what is wrong with it
    assert judging.by_share(snapshot(c_uc_ratio={"0": 0.6, "2": 0.04})) == "uncertain"
    assert judging.by_share(snapshot(c_uc_ratio={"0": float("nan"), "2": 0.7}, weight_change={"0": 0.0})) == "uncertain"
    assert judging.by_share(snapshot()) == "unknown"


def results(rule: str = "verdict", number: str = "magnitude") -> Results:
    """Two seeds of three trainings, of which the verdict is wrong about one of the second seed, and a series of scales."""
    s = trainings.DoctorSettings(rule=rule, number=number)
    tasks, returned = [], []
    for seed in (0, 1):
        for name, says in (("a", "rich"), ("b", "rich"), ("c", "lazy" if seed else "rich")):
            tasks.append(Task(s, network="MLP", name=name, case=TrainingCase(), seed=seed))
            returned.append({"allowed": np.array(judging.codes(["rich"])), "says_verdict": judging.WORDS.index(says),
                             "says_constant": judging.WORDS.index("rich"), "remarked": name != "b"})
        for alpha in (0.1, 1.0, 10.0):
            tasks.append(Task(s, network="MLP", name=f"scale {alpha}", case=TrainingCase(alpha=alpha), seed=seed))
            returned.append({"magnitude": -np.log10(alpha), "accuracy": 0.5 if alpha == 1 else 0.4})
    return Results(s, tasks, returned)


def test_a_verdict_is_right_with_its_word_and_its_remark() -> None:
    assert judging.fewest_right(results(), "MLP") == 1  # of three: one without its remark, one wrong
    assert judging.fewest_right(results("constant"), "MLP") == 3  # of rivals no remark is asked
    assert np.isnan(judging.fewest_right(results(), "GPT"))


def test_the_magnitude_is_monotone_and_a_score_is_not() -> None:
    assert judging.monotone(results()) == pytest.approx(1)
    assert judging.monotone(results(number="accuracy")) < 0.5


# ------------------------------------------------------------------------------------------------------- the experiment

def test_nineteen_settings_and_rules_that_change_no_training() -> None:
    s, scaled, tasks_of = basics.EXPERIMENT.paper, judging.in_scale_series, basics.EXPERIMENT.tasks
    tasks = tasks_of(s)
    assert len({t.name for t in tasks if t.network == "MLP" and not scaled(t)}) == 19
    assert all(len({t.name for t in tasks if t.network == n and not scaled(t)}) == 5 for n in cases.CASES if n != "MLP")
    assert all(sum(scaled(t) for t in tasks if t.network == n and t.seed == 100) == 7 for n in s.scaled)
    assert tasks_of(dataclasses.replace(s, rule="gap", number="accuracy")) == tasks  # so that controls cost nothing
    assert {t.case.width for t in tasks} == {1.0, 8.0}
    assert all(t.case.lr > 0 for t in tasks)


@pytest.mark.parametrize(("name", "word"), [("untrained", "untrained"), ("diverged", "diverged"), ("frozen backbone", None)])
def test_a_training_is_judged(tmp_path: Path, name: str, word: str | None) -> None:
    settings = trainings.DoctorSettings(networks=("MLP",), scaled=(), seeds=(0,), epochs=0.1)
    [task] = [t for t in basics.EXPERIMENT.tasks(settings) if t.name == name]
    with create(tmp_path / "run", task) as run:
        arrays = trainings.work(task, run)
    assert arrays["remarked"]
    if word is not None:
        assert judging.WORDS[int(arrays["says_verdict"])] == word  # type: ignore[call-overload]
        assert arrays["allowed"] == judging.codes([word])
    if name == "frozen backbone":
        assert arrays["D"] < 1e-5  # type: ignore[operator]
        assert abs(arrays["gain"]) < 1e-9  # type: ignore[arg-type]
        assert arrays["gap"] < 1e-5  # type: ignore[operator]


# ------------------------------------------------------------------------------------------- verdicts that agree with themselves

@pytest.mark.parametrize(("network", "name"), [(network, name) for network, named in cases.CASES.items() for name in named])
@pytest.mark.filterwarnings("ignore::richter.RichterWarning")
def test_no_verdict_contradicts_its_own_layers(network: str, name: str) -> None:
    """Every case of the experiment, with few steps."""
    settings = trainings.DoctorSettings(wide=320)
    setup, case = networks.NETWORKS[network], trainings.with_defaults(cases.CASES[network][name], network, settings)
    body, data = trainings.network_and_data(case, setup, setup.data(7), 7, 2)
    model = networks.ScaledNetwork(body, case.alpha) if case.alpha else body
    steps = networks.batches((data.x, data.y), 2, 64, torch.Generator().manual_seed(7))[:24 if case.epochs else 0]
    probe = Probe(data.x[:64], data.y[:64], chunk=64)
    with Observer(model, probe, measures=trainings.MEASURES, when=[0], budget=None) as watch:
        watch(0)
        trainings.trained(model, case, steps, watch)
    found = diagnose(watch)
    assert_consistent(found)
    assert (found.word == "untrained") is (name == "untrained")
    assert name != "diverged" or found.word == "diverged"
