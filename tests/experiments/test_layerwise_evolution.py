"""Trainings of chapter 7 of the thesis, what claims read out of them, and their drawings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from richter import experiments
from richter.experiments.kit import Results, Task
from richter.experiments.layerwise import common, fig7_1, fig7_2, fig7_3, fig7_4
from richter.experiments.layerwise.common import features_and_outputs, indicators
from richter.experiments.layerwise.fig7_1 import LayerwiseFig7_1Settings, cases, epochs_of, work
from richter.measures import features
from richter.report.drawing import faults
from richter.tasks.images import Split


class Unwritten:
    """A run that is not kept."""

    def scalars(self, *_: Any, **__: Any) -> None: ...

    def progress(self, *_: Any) -> None: ...


RUN: Any = Unwritten()
Training = Task[LayerwiseFig7_1Settings]
tasks, tasks_by_architecture = fig7_1.EXPERIMENT.tasks, fig7_4.EXPERIMENT.tasks
SMALL = LayerwiseFig7_1Settings(sizes=(30,), n_test=40, width=1 / 16, hidden=12, steps=2, watched=(1,))


def pictures(channels: int, side: int) -> Callable[..., Split]:
    def drawn(n: int, n_test: int, seed: int) -> Split:
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(n + n_test, channels, side, side, generator=draw)
        y = torch.arange(n + n_test) % 10
        x += y[:, None, None, None] / 10
        return Split(x[:n], y[:n], x[n:], y[n:])
    return drawn


@pytest.fixture(autouse=True)
def small_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = {"cifar10": pictures(3, 32), "fashion_mnist": pictures(1, 28), "mnist": pictures(1, 28)}
    monkeypatch.setattr(fig7_1, "SETS", sets)


def test_one_knob_is_turned_at_a_time() -> None:
    s = replace(SMALL, rates=(0.1, 0.2, 0.3), decays=(0.0, 1.0), seeds=(0, 1))
    turned = [(t.lr, t.decay) for t in tasks(s) if t.seed == 1]
    assert turned == [(0.1, 0.0), (0.2, 0.0), (0.3, 0.0), (0.1, 1.0)]
    assert len(tasks(s)) == 8
    assert len({repr(replace(t.settings, seeds=())) for t in tasks(replace(s, subject="untrained")) + tasks(s)}) == 1, \
        "what is read out of trainings runs none again"


def test_every_network_has_every_rate_and_the_last_the_other_data() -> None:
    s = replace(SMALL, networks=("resnet", "fcn"), sets=("cifar10", "mnist"), rates=(0.1, 0.2))
    assert [(t.network, t.data, t.lr) for t in tasks_by_architecture(s)] == [
        ("resnet", "cifar10", 0.1), ("resnet", "cifar10", 0.2), ("fcn", "cifar10", 0.1), ("fcn", "cifar10", 0.2),
        ("fcn", "mnist", 0.1)]


def test_steps_are_the_same_for_any_number_of_images_unless_epochs_are_few() -> None:
    s = replace(SMALL, steps=50, batch=30, least=4)
    assert [epochs_of(cases(s, n=n)[0]) for n in (30, 150, 1500)] == [50, 10, 4]


@pytest.mark.parametrize(("network", "side"), [("resnet", 16), ("fcn", 16), ("vgg", 32), ("vgg, no norm", 32)])
@pytest.mark.parametrize("data", ["cifar10", "mnist"])
def test_a_training_is_looked_at_before_between_and_after(network: Any, side: int, data: Any) -> None:
    s = replace(SMALL, networks=(network,), sets=(data,))
    t, = tasks(s)
    assert fig7_1.images(t).x.shape == (30, 3 if data == "cifar10" else 1, side, side)
    assert fig7_1.images(t).x_test.shape[-1] == side
    arrays = work(t, RUN)
    assert np.asarray(arrays["epoch"]).tolist() == [0, 1, 2]
    assert not np.allclose(np.asarray(arrays["loss_fit"])[0], np.asarray(arrays["loss_fit"])[-1])
    model, images = fig7_1.network(t), fig7_1.images(t)
    Phi, f = features_and_outputs(model, images.x_test)
    a = features.analyse(Phi, indicators(images.y_test), f)
    np.testing.assert_allclose(np.asarray(arrays["quality"])[0], a.quality, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(arrays["kappa_cka"])[0], a.kappa_cka, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(arrays["norm"])[0], torch.cat([p.flatten() for p in model.parameters()]).norm().item(),
                               rtol=1e-5)
    assert np.asarray(arrays["accuracy"])[0] == (f.argmax(1) == images.y_test).double().mean().item()


def test_weights_of_vgg_keep_the_variance_of_what_goes_through() -> None:
    t, = tasks(replace(SMALL, networks=("vgg, no norm",), width=0.5))
    model: Any = fig7_1.network(t)
    weight = model[17].weight  # 128 channels read 128
    assert weight.std().item() == pytest.approx((2 / weight[0].numel()) ** 0.5, rel=0.02)
    assert not model[17].bias.any()
    assert torch.equal(weight, fig7_1.network(t)[17].weight)  # type: ignore[index]
    assert not torch.equal(weight, fig7_1.network(Task(**{**vars(t), "seed": 1}))[17].weight)  # type: ignore[index]


# ------------------------------------------------------------------------------------------------ what is read


def made(trainings: list[Training], subject: str = "trained", **arrays: Callable[[Training], Any]) -> Results:
    returned = [{k: np.asarray(f(t)) for k, f in arrays.items()} for t in trainings]
    return Results(replace(SMALL, subject=subject), trainings, returned)


def learning_curve(subject: str, steeper: float) -> Results:
    """The error is a power of the number of images, another one from 600 on; kappa falls with it, training loss rises."""
    def error(t: Training) -> float:
        return 0.5 * (t.n / 600) ** (-0.2 * (steeper if t.n > 600 else 1))
    return made(tasks(replace(SMALL, sizes=(5400, 1800, 600, 200, 66))), subject,
                accuracy=lambda t: [0.1, 1 - error(t)], kappa_cka=lambda t: [0.6, error(t) / 5], loss_fit=lambda t: [1.0, t.n],
                norm=lambda t: [3.0, 3.0], quality_top=lambda t: [0.1, 1 - error(t)])


@pytest.mark.parametrize(("subject", "ratio"), [("trained", 2.0), ("exchanged", 0.5), ("single", 1.0)])
def test_the_two_exponents_of_a_learning_curve(subject: str, ratio: float) -> None:
    r = learning_curve(subject, 2.0)
    assert fig7_1.faster(r, lambda q: 1 - common.at_look(q)["accuracy"]) == pytest.approx(ratio, rel=1e-9)


@pytest.mark.parametrize(("subject", "value"), [("trained", 1.0), ("shifted", 0.0), ("training", -1.0)])
def test_kappa_follows_the_error_and_its_rivals_do_not(subject: str, value: float) -> None:
    assert common.error_correlation(learning_curve(subject, 2.0)) == pytest.approx(value)


def test_what_a_curve_says_of_its_ends() -> None:
    r = learning_curve("trained", 2.0)
    assert common.kappa_over_rivals(r) == pytest.approx(1.0)  # the norm does not vary: it says nothing
    assert fig7_1.ends(r) == (66, 5400)
    assert fig7_1.both_sides(r) == pytest.approx(0.1 * (66 / 600) ** -0.2 - 0.1)
    assert fig7_1.both_sides(learning_curve("exchanged", 2.0)) == pytest.approx(0.1 * 9 ** -0.4 - 0.1)
    assert fig7_1.both_sides(learning_curve("untrained", 2.0)) == pytest.approx(-0.5)
    assert fig7_1.kappa(r, 600) == pytest.approx(0.1)
    assert fig7_1.kappa(learning_curve("untrained", 2.0), 600) == 0.6
    gain = fig7_1.gain_with_size(lambda q: common.read_at(q, "quality_top"))
    assert gain(r) == pytest.approx(0.5 * ((66 / 600) ** -0.2 - 9 ** -0.4))
    assert gain(learning_curve("exchanged", 2.0)) == pytest.approx(-gain(r))
    assert gain(learning_curve("untrained", 2.0)) == 0


def test_a_knob_is_read_from_its_smallest_value_on() -> None:
    r = made(tasks(replace(SMALL, rates=(0.2, 0.1, 0.3), decays=(1e-3, 0.0, 1e-2))), accuracy=lambda t: [0.1, t.lr + t.decay],
             kappa_cka=lambda t: [0.6, 0.5 - t.lr], loss_fit=lambda t: [1.0, t.lr], norm=lambda t: [1.0, 2.0])
    assert [t.lr for t in fig7_2.along(r, "lr").tasks] == [0.1, 0.2, 0.3]
    assert [t.decay for t in fig7_2.along(r, "decay").tasks] == [0.0, 1e-3, 1e-2]
    assert fig7_2.error_correlation_along("lr")(r) == pytest.approx(1.0)
    assert fig7_2.kappa_over_rivals_along("lr")(r) == pytest.approx(1.0)
    assert fig7_2.above_lowest(r) == pytest.approx(-0.2)
    assert fig7_2.both_sides(r) == pytest.approx(-0.1)  # of the best rate kappa is 0.2
    assert fig7_2.change("accuracy", "decay")(r) == pytest.approx(0.01)
    assert fig7_2.kappa(r, "lr", 0) == pytest.approx(0.4)


def test_flat_intensities_are_flat() -> None:
    t, = tasks(SMALL)
    rho = np.r_[5.0, np.ones(9), 0.5 * np.ones(6)]
    r = made([t], intensity=lambda _: [np.r_[5.0, 1, np.full(14, 1e-9)], rho])
    assert common.flatness(r)[0] == pytest.approx(1.0)
    assert common.flatness(Results(replace(SMALL, subject="untrained"), [t], [dict(r)[t]]))[0] == pytest.approx(1 / 9, abs=1e-5)
    assert common.strength_top(r)[0] == pytest.approx(0.75)
    assert fig7_3.gap(r)[0] == pytest.approx(np.log10(2))


@pytest.mark.parametrize(("subject", "value", "gain"), [("trained", 1.0, 2.0), ("untrained", -1.0, 0.0)])
def test_correlations_over_features(subject: str, value: float, gain: float) -> None:
    k = np.arange(1.0, 31)
    r = made(tasks(SMALL), subject, quality=lambda _: [k, 1 / k], intensity=lambda _: [1 / k, 1 / k ** 2])
    assert common.feature_correlation(r, "quality", "intensity") == pytest.approx(value)
    assert common.correlation_gain(r, "quality", "intensity") == pytest.approx(gain)
    assert abs(common.feature_correlation(Results(replace(SMALL, subject="shuffled"), r.tasks, [a for _, a in r]), "quality",
                                   "intensity")) < 0.5


def test_correlations_between_looks_and_what_is_gained() -> None:
    k = np.arange(1.0, 31)
    r = made(tasks(SMALL), epoch=lambda _: [0, 1, 2, 3], quality=lambda _: [k, 1 / k, 1 / k, k],
             intensity=lambda _: [1 / k] * 4)
    assert common.median_correlation(r, "quality", "intensity") == pytest.approx(1.0)  # 1, 1 and -1 after the start
    assert common.intensity_quality_correlation(r) == 0, "nothing is gained between the first look and the last"
    risen = made(tasks(SMALL), epoch=lambda _: [0, 1], quality=lambda _: [k, k + 1 / k], intensity=lambda _: [k, 1 / k])
    assert common.intensity_quality_correlation(risen) == pytest.approx(1.0)
    for subject, value in (("untrained", 0.0), ("shuffled", 0.0)):
        other = Results(replace(SMALL, subject=subject), risen.tasks, [a for _, a in risen])
        assert common.intensity_quality_correlation(other) == pytest.approx(value, abs=0.5)


@pytest.mark.parametrize(("subject", "value"), [("trained", 0.2), ("shifted", 0.0), ("untrained", 0.0)])
def test_the_accuracy_of_the_tightest(subject: str, value: float) -> None:
    trainings = tasks(replace(SMALL, decays=(0.0, 1.0, 2.0)))
    r = made(trainings, subject, kappa_cka=lambda t: [0.6, [0.3, 0.2, 0.1][int(t.decay)]],
             accuracy=lambda t: [0.1, [0.5, 0.5, 0.7][int(t.decay)]])
    assert common.accuracy_of_smallest_kappa(r) == pytest.approx(value)


def test_constants_are_correlated_with_nothing() -> None:
    assert common.rank_correlation([1, 1, 1], [1, 2, 3]) == 0.0
    assert common.rank_correlation([3, 2, 9], [1, 0, 2]) == pytest.approx(1.0)


def evolving(subject: str = "trained") -> Results:
    """A ResNet of kappa 0.05, a fully connected network that uses ten features at epoch 5 and more at the end."""
    s = replace(SMALL, networks=("resnet", "fcn"), sets=("cifar10", "mnist"), rates=(0.2, 0.1))
    end = {"resnet": 0.05, "fcn": 0.3}
    used = np.zeros((4, 30))
    used[:, :10] = np.array([0.03, 0.05, 0.09, 0.07])[:, None]
    used[:, 10:20] = np.array([0.03, 0.03, 0.01, 0.03])[:, None]
    return made(tasks_by_architecture(s), subject, epoch=lambda _: [0, 1, 5, 9],
                kappa_cka=lambda t: [0.6, 0.4, 0.2, 0.01 if t.data == "mnist" else end[t.network]],
                utilisation=lambda _: used, utilisation_top=lambda _: used[:, :10].sum(1),
                accuracy=lambda _: [0.1, 0.2, 0.3, 0.3], accuracy_fit=lambda _: [0.1, 0.2, 0.4, 0.9])


@pytest.mark.parametrize(("value", "trained", "untrained"), [
    (fig7_4.final("kappa_cka", "resnet"), 0.05, 0.6), (fig7_4.final("kappa_cka", "fcn", data="mnist"), 0.01, 0.6),
    (fig7_4.both_sides, 0.05, -0.5), (fig7_4.tighter(), 0.25, 0.0), (fig7_4.first_epoch_gain, 0.2, 0.0),
    (fig7_4.deviation, -0.2, 0.0), (fig7_4.later_feature_gain, 0.2, 0.0), (fig7_4.accuracy_gap_gain, 0.5, 0.0),
    (fig7_4.harder, 0.29, 0.0)])
def test_what_is_read_between_epochs(value: Callable[[Results], float], trained: float, untrained: float) -> None:
    assert value(evolving()) == pytest.approx(trained)
    assert value(evolving("untrained")) == pytest.approx(untrained, abs=1e-12)


def test_rivals_of_what_is_read_between_epochs() -> None:
    assert fig7_4.tighter()(evolving("exchanged")) == pytest.approx(-0.25)
    assert fig7_4.both_sides(evolving("exchanged")) == pytest.approx(-0.2)
    assert fig7_4.harder(evolving("photographs")) == 0


@pytest.mark.parametrize("name", ["layerwise_fig7_1", "layerwise_fig7_2", "layerwise_fig7_3", "layerwise_fig7_4"])
def test_drawings_of_one_seed_and_of_two(name: str) -> None:
    e = experiments.get(name)
    sizes = (40, 30, 20)[:len(e.paper.sizes)]
    s = replace(e.paper, steps=1, least=1, sizes=sizes, n_test=60, width=1 / 16, hidden=24, watched=(1,))
    for seeds in ((0,), (0, 1)):
        trainings = e.tasks(replace(s, seeds=seeds))
        results = Results(s, trainings, [{k: np.asarray(v) for k, v in work(t, RUN).items()} for t in trainings])
        for draw in e.figures.values():
            figure = draw(results)
            assert faults(figure) == []
            caption, = (text.get_text() for text in figure.texts if text.get_gid() == "caption")
            assert ("One seed." if len(seeds) == 1 else "of 2 seeds.") in caption.replace("\n", " ")
