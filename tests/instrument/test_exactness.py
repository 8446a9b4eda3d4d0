"""Every number of the instrument equals its definition, on every model of the zoo."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import oracles
import richter
import zoo
from richter import kernels
from richter.core import WHOLE, SelectionError
from richter.instrument.capture import state_of
from richter.instrument.cotangents import every_output, loss_gradient
from richter.instrument.survey import survey
from richter.measures import collapse, embedding, features

RELATIVE = 1e-8
DECAY = 0.07
COMPUTED = ("parametrized", "old_weight_norm")  # cases whose matrices are computed from their parameters
TANGENT = ("tangent_alignment", "tangent_cka", "tangent_stable_rank", "tangent_correlation")
EVOLVED = ("kernel_norm", "kernel_rotation", "kernel_distance")
LARGE = ("hf_bert", "hf_vit", "hf_resnet")  # of parts that smaller cases have too
EVERY_CASE = pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.long] if name in LARGE else []) for name in zoo.CASES])
FEW = ("mlp_nobias", "cnn", "tied", "raw", "parametrized", "multi_input", "moe", "lstm", "groups", "every_product")
SOME_CASES = pytest.mark.parametrize("name", [  # of numbers whose parts are right in every case
    pytest.param(name, marks=[] if name in FEW else [pytest.mark.long]) for name in zoo.CASES])


def examples(name: str) -> int:
    """Few, because the definitions are slow; as many as tokens where a layer could take the one for the other."""
    return 6 if name == "encoder_seq_first" else 4


def moved(x: zoo.Inputs, device: str) -> zoo.Inputs:
    """A tensor, tuple or dict of tensors on another device."""
    if isinstance(x, dict):
        return {key: value.to(device) for key, value in x.items()}
    return tuple(value.to(device) for value in x) if isinstance(x, tuple) else x.to(device)


def there(name: str, device: str) -> tuple[nn.Module, zoo.Inputs, Tensor]:
    """Model, inputs and labels of a case, on a device."""
    x, y = zoo.CASES[name].batch(examples(name))
    return zoo.CASES[name].build().to(device), moved(x, device), y.to(device)


@cache
def measured(name: str, device: str) -> richter.Snapshot:
    """Every measure of the catalogue."""
    case, (model, x, y) = zoo.CASES[name], there(name, device)
    return richter.measure(model, richter.Probe(x, y, weight_decay=DECAY), list(richter.measures.catalogue()),
                           initial=zoo.initial(case), output=case.output)  # fmt: skip


@cache
def read_and_asked(name: str, layer: str) -> tuple[Tensor, Tensor, Tensor]:
    """W, h, J of one map, one example and one output at a time."""
    case = zoo.CASES[name]
    return oracles.layer_io(case.build(), case.batch(examples(name))[0], layer, case.output)


@cache
def tangent_kernels(name: str) -> dict[str, Tensor]:
    """{module: K[n,k,n,k]} from whole Jacobians."""
    case = zoo.CASES[name]
    return oracles.tangent_kernels(case.build(), case.batch(examples(name))[0], output=case.output)


def output_shape(name: str) -> torch.Size:
    """Of what the case's `output` picks, all examples."""
    case = zoo.CASES[name]
    result = zoo.call(case.build(), case.batch(examples(name))[0])
    return (result if case.output is None else case.output(result)).shape


def disagreements(got: dict[tuple[str, str], float], expected: dict[tuple[str, str], float]) -> list[str]:
    """What differs by more than the tolerance, and what is NaN on one side only."""
    found = []
    for key, value in expected.items():
        if math.isnan(value) != math.isnan(got[key]):
            found.append(f"{key}: {got[key]} instead of {value}")
        elif not math.isnan(value) and not math.isclose(got[key], value, rel_tol=RELATIVE, abs_tol=1e-14):
            found.append(f"{key}: {got[key]:.17g} instead of {value:.17g}")
    return found


def close(K: Tensor, expected: Tensor) -> bool:
    """The relative Frobenius distance is small; kernels that should be zero are."""
    return K.shape == expected.shape and bool((K.cpu() - expected).norm() <= RELATIVE * expected.norm())


@EVERY_CASE
def test_feature_correlations_are_those_of_the_definition(name: str, device: str) -> None:
    case, snap = zoo.CASES[name], measured(name, device)
    then = case.build()
    then.load_state_dict(zoo.initial(case))
    expected = {}
    for layer in case.maps:
        W, _, J = read_and_asked(name, layer)
        W0, _, J0 = oracles.layer_io(then, case.batch(examples(name))[0], layer, case.output)
        expected |= {(measure, layer): v for measure, v in oracles.nfa_measures(W, W0, J, J0).items()}
        expected["nfc_sqrt", layer] = oracles.nfc_sqrt(W, J)
        expected |= {(measure, layer): v for measure, v in oracles.weight_ranks(W).items()}
    of_outputs = {m.name for m in richter.measures.catalogue().values() if not m.of_kernels and m.cotangents is every_output}
    # in test_movement.py, test_curvature.py, test_features_measured.py and test_embedding.py
    of_outputs -= {*richter.measures.MOVEMENT, "held_out_accuracy", "label_gradient_correlation"}
    of_outputs -= {m.name for m in (*features.MEASURES, *collapse.MEASURES, *embedding.MEASURES)}
    assert {measure for measure, _ in expected} == of_outputs
    assert not disagreements({key: snap.value(*key) for key in expected}, expected)


@EVERY_CASE
def test_features_at_convergence_are_those_of_the_definition(name: str, device: str) -> None:
    """The loss is differentiated as a whole, in the parameters themselves: tied ones are, with all their uses."""
    case, snap = zoo.CASES[name], measured(name, device)
    x, y = case.batch(examples(name))
    expected = {}
    for layer in case.maps:
        if name in COMPUTED:
            W, h, J = read_and_asked(name, layer)
            G = oracles.gradient_through(oracles.outputs(case.build(), x, case.output), y, h, J)
        else:
            W, G = oracles.weight_and_gradient(case.build(), x, y, layer, case.output)
        expected |= {(measure, layer): v for measure, v in oracles.fact_measures(W, G, DECAY).items()}
    of_loss = {m.name for m in richter.measures.catalogue().values() if m.cotangents is loss_gradient}
    assert not expected or {measure for measure, _ in expected} == of_loss
    assert not disagreements({key: snap.value(*key) for key in expected}, expected)


@EVERY_CASE
def test_tangent_measures_are_those_of_the_definition(name: str, device: str) -> None:
    case, snap = zoo.CASES[name], measured(name, device)
    Y = richter.Probe(*case.batch(examples(name))).targets(output_shape(name))[0]
    assert Y is not None
    layers = tangent_kernels(name)
    expected = {}
    for layer, K in {**layers, WHOLE: torch.stack(list(layers.values())).sum(0)}.items():
        for measure in TANGENT:
            labels = () if measure == "tangent_stable_rank" else (Y,)
            expected[measure, layer] = float(getattr(oracles, measure)(K, *labels))
        expected["specialisation", layer] = oracles.specialisation_ratio(K, Y)
    evolution = {*EVOLVED, "effective_gamma", "kernel_velocity"}  # the last is in test_evolution.py
    fisher = {"fisher_stable_rank", "fisher_correlation"}  # in test_fisher.py
    of_kernels = {m.name for m in richter.measures.catalogue().values() if m.of_kernels}
    assert of_kernels == {*TANGENT, "specialisation"} | evolution | fisher
    assert not disagreements({key: snap.value(*key) for key in expected}, expected)


@SOME_CASES
def test_the_evolution_of_kernels_is_that_of_the_definition(name: str, device: str) -> None:
    case, snap = zoo.CASES[name], measured(name, device)
    Y = richter.Probe(*case.batch(examples(name))).targets(output_shape(name))[0]
    assert Y is not None
    then = case.build()
    then.load_state_dict(zoo.initial(case))
    first, last = oracles.tangent_kernels(then, case.batch(examples(name))[0], output=case.output), tangent_kernels(name)
    expected = {}
    for layer in (*last, WHOLE):
        K0, K = (torch.stack(list(k.values())).sum(0) if layer == WHOLE else k[layer] for k in (first, last))
        evolution = oracles.kernel_evolution(K0, K)
        expected |= {(measure, layer): evolution[measure] for measure in EVOLVED}
        expected["effective_gamma", layer] = oracles.effective_gamma(K0, K, Y)
    assert not disagreements({key: snap.value(*key) for key in expected}, expected)


@EVERY_CASE
def test_only_maps_and_modules_of_the_model_have_rows(name: str) -> None:
    """A second use of a tied weight goes by its module's name with .T behind it; everything else is in the case."""
    known = {*zoo.CASES[name].maps, *tangent_kernels(name), WHOLE}
    assert {layer for layer in measured(name, "cpu").layers if not layer.endswith(".T")} <= known


@EVERY_CASE
def test_maps_have_the_kinds_of_the_case(name: str, device: str) -> None:
    case, (model, x, _) = zoo.CASES[name], there(name, device)
    found = survey(model, x, state_of(model), case.output)
    assert {k: found.maps[k].kind for k in case.maps} == case.maps
    extra = {k for k, m in found.maps.items() if m.kind != "diagonal"} - set(case.maps)
    assert all(k.endswith(".T") for k in extra), extra
    weights = {name for name, p in model.named_parameters() if sum(d > 1 for d in p.shape) >= 2}
    assert not case.unmapped - weights


@EVERY_CASE
@pytest.mark.parametrize("outputs", ["trace", "diagonal", "full"])
def test_tangent_kernels_are_products_of_jacobians(name: str, outputs: str, device: str) -> None:
    case, (model, x, _) = zoo.CASES[name], there(name, device)
    layers = kernels.ntk(model, x, form=outputs, per_layer=True, output=case.output)
    expected = tangent_kernels(name)
    assert set(layers) == set(expected)
    wrong = [k for k, K in expected.items() if not close(layers[k], oracles.reduce_outputs(K, outputs))]
    assert not wrong
    if outputs == "trace":
        whole = torch.stack(list(expected.values())).sum(0)
        assert close(kernels.ntk(model, x, output=case.output), oracles.reduce_outputs(whole, "trace"))


@SOME_CASES
def test_pre_activation_kernels_are_those_of_the_definition(name: str, device: str) -> None:
    """Of some maps, on two examples, and at no more than four of their positions: the definition is slow."""
    case, (model, x, _) = zoo.CASES[name], there(name, device)
    x, wrong = zoo.select(x, slice(0, 2)), []
    batched = survey(model, x, state_of(model), case.output).batched
    for layer in list(case.maps)[:: -(-len(case.maps) // 7)]:
        if layer not in batched:  # its positions differ from example to example (routing)
            with pytest.raises(SelectionError, match="is not one of the linear maps"):
                kernels.ptk(model, x, layer, output=case.output)
            assert name in ("moe", "packed")
            continue
        K, J = kernels.ptk(model, x, layer, output=case.output), read_and_asked(name, layer)[2][:2]
        n, _, s, _ = J.shape
        assert K.shape == ((n, n) if s == 1 else (n, s, n, s))
        some = slice(None, None, -(-s // 4))
        if not close(K.reshape(n, s, n, s)[:, some][..., some], oracles.ptk(J[:, :, some])):
            wrong.append(layer)
    assert not wrong


def test_nearly_every_weight_matrix_gets_a_feature_correlation() -> None:
    """At least 95 % of the weight matrices of the zoo, those that are used in no linear map included."""
    values = [measured(name, "cpu").value("nfc", k) for name, case in zoo.CASES.items() for k in case.maps]
    finite = sum(map(math.isfinite, values))
    matrices = sum(len(case.maps) + len(case.unmapped) for case in zoo.CASES.values())
    assert matrices > 100
    assert finite >= 0.95 * matrices, f"{finite} of {matrices}"


def test_a_layer_that_one_example_reaches_has_a_value_and_no_error() -> None:
    """Without that example there is nothing: a value is given, how sure it is cannot be told."""
    case = zoo.CASES["moe"]
    x, y = case.batch(10)
    x[..., 0] = -x[..., 0].abs()
    x[2, :, 0] *= -1  # the only one that is sent to the second expert
    measures = ["nfc", "nfc_sqrt", "fact"]
    snap = richter.measure(case.build(), richter.Probe(x, y, weight_decay=DECAY), measures)
    for measure in measures:
        assert math.isfinite(snap.value(measure, "experts.1"))
        assert math.isnan(snap.error(measure, "experts.1"))
        assert math.isfinite(snap.error(measure, "experts.0"))
    W, G = oracles.weight_and_gradient(case.build(), x, y, "experts.1")
    assert snap.value("fact", "experts.1") == pytest.approx(oracles.fact_measures(W, G, DECAY)["fact"], rel=RELATIVE)
