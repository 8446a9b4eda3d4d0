"""What experiments on the features of networks share: recipes, what the last layer reads, the numbers, the drawing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from richter.core.modules import evaluated
from richter.experiments.frame import Results
from richter.experiments.kit import Task
from richter.experiments.layerwise import common, fig2_2, fig2_3, fig3_5, fig3_6, fig6_3, prop2_5_1, table2_2
from richter.experiments.layerwise.common import SgdRecipe, feature_numbers, features_and_outputs, fit, indicators, share_correct
from richter.measures import collapse, features
from richter.models import mlp, resnet18, vgg16
from richter.report.drawing import caption, faults, panels


class Unwritten:
    """A run that is not kept."""

    def scalars(self, *_: Any, **__: Any) -> None: ...

    def progress(self, *_: Any) -> None: ...


RUN: Any = Unwritten()
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), *mlp([3072, 12, 8, 5], seed=0)),
    "resnet": lambda: resnet18(5, width=1 / 16), "vgg": lambda: vgg16(5, width=1 / 16)}


def images(n: int = 30) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 5
    return torch.randn(n, 3, 32, 32, generator=draw) + y[:, None, None, None].float(), y


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("name", NETWORKS)
def test_what_the_last_layer_reads_is_what_a_hook_sees(name: str) -> None:
    model, (x, _) = NETWORKS[name](), images()
    before, seen = weights(model), list[Tensor]()
    Phi, f = features_and_outputs(model, x, batch=7)
    handle = common.readout(model).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad(), evaluated(model):
        outputs = model(x)
    handle.remove()
    torch.testing.assert_close(Phi, seen[0])
    torch.testing.assert_close(f, outputs)
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_failing_network_keeps_its_last_layer() -> None:
    model = mlp([4, 3, 2], seed=0)
    with pytest.raises(RuntimeError):
        features_and_outputs(model, torch.zeros(5, 3))
    assert isinstance(model[2], nn.Linear)
    assert model.training


@pytest.mark.parametrize("last", [False, True])
def test_the_last_layer_alone_is_trained_where_this_is_wanted(last: bool) -> None:
    model, (x, y) = NETWORKS["mlp"](), images()
    before = weights(model)
    fit(model, x, indicators(y, 5), SgdRecipe(epochs=2, last=last), RUN)
    moved = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert moved == ({"5.weight", "5.bias"} if last else set(before))
    assert all(p.requires_grad for p in model.parameters())


def test_the_last_layer_alone_learns_as_with_the_others_frozen() -> None:
    (x, y), one, other = images(), NETWORKS["mlp"](), NETWORKS["mlp"]()
    recipe = SgdRecipe(epochs=3, batch=8, every=1)
    fit(one, x, indicators(y, 5), SgdRecipe(**{**vars(recipe), "last": True}), RUN, seed=3)
    for p in list(other.parameters())[:-2]:
        p.requires_grad_(False)
    fit(other, x, indicators(y, 5), recipe, RUN, seed=3)
    torch.testing.assert_close(weights(one), weights(other))


def test_a_recipe_is_plain_descent_with_a_falling_rate() -> None:
    """One example, no momentum: by hand."""
    model, x, y = mlp([3, 1], seed=0).double(), torch.ones(1, 3).double(), torch.ones(1, 1).double()
    W, b = (p.detach().clone() for p in model.parameters())
    fit(model, x, y, SgdRecipe(lr=0.1, decay=0.5, epochs=3, every=2, factor=0.1, momentum=0.0), RUN)
    for rate in (0.1, 0.1, 0.01):
        residual = W.sum() + b - 1
        W, b = W - rate * (residual + 0.5 * W), b - rate * (residual + 0.5 * b)
    torch.testing.assert_close(model[0].weight.detach(), W)
    torch.testing.assert_close(model[0].bias.detach(), b)


def test_steps_between_epochs_are_told() -> None:
    seen = list[int]()
    fit(mlp([3, 1], seed=0), torch.ones(2, 3), torch.ones(2, 1), SgdRecipe(epochs=3), RUN, after=seen.append)
    assert seen == [0, 1, 2, 3]


def test_numbers_are_those_of_the_measures() -> None:
    model, (x, y), (x2, y2) = NETWORKS["mlp"](), images(60), images(40)
    rows = feature_numbers(model, x, indicators(y, 5), x2, indicators(y2, 5))
    (Phi, f), (Phi2, f2) = features_and_outputs(model, x), features_and_outputs(model, x2)
    fitted, apart = features.analyse(Phi, y, f), features.analyse(Phi, y, f, Phi2, y2, f2)
    assert (rows["kappa_cka_fit"], rows["kappa_cka"]) == (fitted.kappa_cka, apart.kappa_cka)
    assert (rows["deff_utilisation_fit"], rows["deff_utilisation"]) == (fitted.deff_utilisation, apart.deff_utilisation)
    np.testing.assert_array_equal(rows["quality"], apart.quality)
    np.testing.assert_array_equal(rows["intensity"], fitted.intensity)
    last = common.readout(model)
    c = collapse.analyse(Phi, y, last.weight, last.bias)
    assert (rows["nc1"], rows["nc4"]) == (c.nc1, c.nc4)
    assert rows["accuracy_fit"] == (f.argmax(1) == y).double().mean()
    one = feature_numbers(nn.Sequential(nn.Flatten(), *mlp([3072, 8, 1], seed=0)), x, y[:, None].float(), x2, y2[:, None].float())
    assert "nc1" not in one


def test_a_number_is_right_if_it_rounds_to_its_target() -> None:
    assert share_correct(torch.tensor([[0.4], [0.6], [2.0], [7.6]]), torch.tensor([[0.0], [0.0], [2.0], [8.0]])) == 0.75
    assert share_correct(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([[0.0, 1.0], [0.0, 1.0]])) == 0.5


def test_the_drawing_has_a_curve_for_each_case_and_says_accuracy_and_kappa() -> None:
    model, (x, y) = NETWORKS["mlp"](), images()
    rows = {k: np.asarray(v) for k, v in feature_numbers(model, x, indicators(y, 5), x, indicators(y, 5)).items()}
    figure, axes = panels(3, across=3)
    both = {"all": Results(None, [0, 1], [rows, rows]), "last": Results(None, [0], [rows])}
    common.metric_panels(axes, both, classes=5)
    caption(figure, "What to see.")
    assert faults(figure) == []
    words = [text.get_text() for text in axes[2].get_legend().get_texts()]
    assert words == [f"{name} ({100 * rows['accuracy']:.1f} %) [{rows['kappa_cka']:.2g}]" for name in both]
    assert all(len(ax.lines) == 3 for ax in axes)  # two curves, and the line at five features


def test_a_share_of_the_labels_is_wrong() -> None:
    y = torch.arange(1000) % 10
    for share in (0.0, 0.1, 1.0):
        mixed = fig3_5.noisy(y, share, 3)
        assert torch.equal(mixed.bincount(), y.bincount())
        assert ((mixed != y).double().mean() - 0.9 * share).abs() < 0.03
    assert not torch.equal(fig3_5.noisy(y, 1.0, 3), fig3_5.noisy(y, 1.0, 4))


def test_the_last_layer_of_least_squares() -> None:
    """Beside many steps of descent on all of it, in float64."""
    model, (x, y) = NETWORKS["mlp"]().double(), images(60)
    x, targets = x.double(), indicators(y, 5).double()
    fig2_3.solve(model, x, targets, 0.01)
    Phi, last = features_and_outputs(model, x)[0], common.readout(model)
    penalty = 0.01 * Phi.square().sum(1).mean()
    W, b = (p.detach().clone().requires_grad_() for p in (last.weight, last.bias))
    loss = common.squared(Phi @ W.T + b, targets) + penalty * W.square().sum() / 2
    for gradient in torch.autograd.grad(loss, (W, b)):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-12, rtol=0)


def test_the_constant_among_features() -> None:
    draw = torch.Generator().manual_seed(0)
    Phi = torch.randn(500, 6, generator=draw) + 20
    a = features.analyse(Phi, torch.zeros(500, 1) + 1, Phi[:, :1])
    strongest, second = np.asarray(fig2_3.constants(Phi))
    assert strongest == pytest.approx(a.constant, abs=1e-9)
    assert second < 0.05 < 0.99 < strongest


def test_features_of_minimum_projection_have_that_operator() -> None:
    C, y = 4, np.arange(20) % 4
    Phi = prop2_5_1.features_of_kind("minimum", y, C, 9, (0.7, 1.3), np.random.default_rng(0))
    P = np.equal.outer(y, y) / 5  # onto functions that are constant on classes
    np.testing.assert_allclose(Phi @ Phi.T / 20, 0.7 / 20 + 1.3 * P, atol=1e-12)


def test_images_of_the_first_classes_in_the_size_of_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(n: int, n_test: int, seed: int) -> table2_2.Split:
        return table2_2.Split(torch.rand(n, 1, 28, 28), torch.arange(n) % 10, torch.rand(n_test, 1, 28, 28),
                              torch.arange(n_test) % 10)
    monkeypatch.setitem(table2_2.SETS, "mnist", drawn)
    s = table2_2.LayerwiseTable2_2Settings(per_class=3, n_test=20)
    for model, size in (("resnet18", 16), ("vgg16", 32)):
        data = table2_2.images(Task(s, cell=table2_2.TableCell(model, "mnist", 3), seed=0))
        assert data.x.shape == (9, 1, size, size)
        assert set(data.y.tolist()) == set(data.y_test.tolist()) == {0, 1, 2}


def test_features_that_vary_are_counted_without_the_constant() -> None:
    """Of a constant, one direction that tells the target and a third: one is used besides the constant, two vary."""
    drawn = torch.randn(400, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn[:, 0] = 1.0
    u = torch.linalg.qr(drawn)[0] * 20  # orthogonal functions of the examples, the first constant
    Phi, f = u * torch.tensor([3.0, 2.0, 1.0]), 5 * u[:, :1] + u[:, 1:2]

    def spread(*intensity: float) -> float:
        share = np.array(intensity) / sum(intensity)
        return float(np.exp(-(share * np.log(share)).sum()))

    rows = fig3_5.centred_dimensions(Phi, f, f)
    assert rows["used_varying"] == pytest.approx(1.0, abs=1e-8)
    assert rows["strong_varying"] == pytest.approx(spread(4, 1), abs=1e-8)
    assert rows["strong"] == pytest.approx(spread(9, 4, 1), abs=1e-8)
    assert features.analyse(Phi, f, f).deff_utilisation == pytest.approx(spread(25, 1), abs=1e-8)  # mostly the constant


@pytest.mark.parametrize(("case", "outputs"), [("classes", 10), ("random", 10), ("value", 1), ("value, last", 1)])
def test_a_network_is_taught_classes_or_values(case: fig3_5.Case, outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Tensor]()
    monkeypatch.setattr(fig3_5, "mnist_5k", lambda seed: targets_made())
    monkeypatch.setattr(fig3_5, "fit", lambda model, x, y, recipe, run, seed: seen.append(y))
    rows = fig3_5.work(Task(fig3_5.LayerwiseTargetSettings((), 6), case=case, seed=0), RUN)
    (taught,) = seen
    assert taught.shape == (40, outputs)
    assert ("nc1" in rows) == (outputs == 10)
    labels = taught.argmax(1) if outputs == 10 else taught[:, 0].long()
    assert torch.equal(labels, targets_made().y) == (case != "random")


def targets_made() -> table2_2.Split:
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(40) % 10
    return table2_2.Split(torch.randn(40, 784, generator=draw), y, torch.randn(20, 784, generator=draw), y[:20])


def test_values_of_the_step_at_random_places_are_another_training() -> None:
    s = fig2_2.LayerwiseFig2_2Settings(n=128, width=8, epochs=1, middle=1)
    rows = {training: fig2_2.work(Task(s, training=training, seed=0), RUN) for training in ("all", "shuffled")}
    first, last = ([np.asarray(rows[k]["learned"])[i] for k in rows] for i in (0, -1))
    np.testing.assert_array_equal(*first)
    assert not np.array_equal(*last)
    assert rows["all"]["power"][0] == rows["shuffled"]["power"][0]  # both are judged by the step  # type: ignore[index]


@pytest.mark.parametrize(("kind", "last", "decay"), [("rich", False, 0.0), ("linear", True, 0.0), ("random", False, 1e-3)])
def test_recipes_of_lazy_and_rich_trainings(kind: fig6_3.Kind, last: bool, decay: float) -> None:
    recipe = fig6_3.recipe(fig6_3.LayerwiseFig6_3Settings(), kind)
    assert (recipe.last, recipe.decay) == (last, decay)


def test_the_read_out_of_least_squares_solves_the_normal_equations() -> None:
    draw = np.random.default_rng(0)
    A, y, B = draw.standard_normal((30, 4)), draw.standard_normal((30, 2)), draw.standard_normal((7, 4))
    centre, mean = A.mean(0), y.mean(0)
    expected = (B - centre) @ np.linalg.solve((A - centre).T @ (A - centre), (A - centre).T @ (y - mean)) + mean
    np.testing.assert_allclose(fig6_3.least_squares(*map(torch.as_tensor, (A, y, B))), expected, atol=1e-10)


def test_explained_variance_is_r2() -> None:
    y = torch.tensor([[1.0], [2.0], [6.0]])
    assert fig3_6.explained(y, y) == 1
    assert fig3_6.explained(torch.full_like(y, 3.0), y) == 0
    assert fig3_6.explained(y + torch.tensor([[1.0], [0.0], [0.0]]), y) == pytest.approx(1 - 1 / 14)
