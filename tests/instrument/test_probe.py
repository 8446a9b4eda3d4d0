"""What a Probe takes: arrays, tuples, dicts, labels of every kind; and the examples that kernels are made of."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F

import oracles
import richter
from observing import FEW, assert_close, draw, examples, mlp, moved, state
from zoo import CASES


def test_arrays_are_as_good_as_tensors() -> None:
    x, y = examples()
    model = mlp()
    expected = richter.measure(model, richter.Probe(x, y))
    assert_close(richter.measure(model, richter.Probe(x.numpy(), y.numpy())), expected)
    assert_close(richter.measure(model, richter.Probe(x.tolist(), y.tolist())), expected)
    assert_close(richter.measure(model, richter.Probe(pd.DataFrame(x.numpy()), pd.Series(y.numpy()))), expected)
    assert_close(richter.measure(model, richter.Probe(x, y.to(torch.int32))), expected)


def test_arrays_of_numpy_fit_a_model_of_torch() -> None:
    """numpy's usual number is float64, torch's float32: the probe is read in the model's own precision."""
    x, y = examples()
    model = mlp(dtype=torch.float32)
    expected = richter.measure(model, richter.Probe(x.float(), y), FEW)
    assert_close(richter.measure(model, richter.Probe(x.numpy(), y.numpy()), FEW), expected, rel=1e-5)


@pytest.mark.parametrize("name", ["multi_input", "dict_io"])
def test_tuples_and_dicts_of_inputs(name: str) -> None:
    """By position and by name, as tensors or arrays; the definition says what the number is."""
    case = CASES[name]
    model, (x, y) = case.build(), case.batch(12)
    given = {k: v.numpy() for k, v in x.items()} if isinstance(x, dict) else tuple(v.numpy() for v in x)
    snap = richter.measure(model, richter.Probe(x, y), FEW, output=case.output)
    assert_close(snap, richter.measure(model, richter.Probe(given, y), FEW, output=case.output))
    W, _, J = oracles.layer_io(model, x, "left", case.output)
    assert snap.value("nfc", "left") == pytest.approx(oracles.cosine(oracles.nfm(W), oracles.agop(W, J)), rel=1e-9)


def test_class_ids_are_one_hot_targets() -> None:
    x, y = examples()
    model = mlp()
    measures = [m for m in richter.measures.DEFAULT if m != "probe_loss"]  # cross-entropy of ids, squared error of targets
    expected = richter.measure(model, richter.Probe(x, y), measures)
    assert_close(richter.measure(model, richter.Probe(x, F.one_hot(y, 3).double()), measures), expected)
    assert_close(richter.measure(model, richter.Probe(x, F.one_hot(y, 3)), measures), expected)  # whole numbers, outputs' shape
    other = richter.measure(model, richter.Probe(x, draw(24, 3)))
    assert other.value("tangent_cka") != pytest.approx(expected.value("tangent_cka"), rel=1e-3)
    assert other.value("nfc", "0") == expected.value("nfc", "0")


def test_targets_of_one_output() -> None:
    """[n] or [n,1], numbers or two classes; by the definition."""
    x, _ = examples()
    model, y = mlp(outputs=1), draw(24, seed=9)
    snap = richter.measure(model, richter.Probe(x, y))
    assert_close(snap, richter.measure(model, richter.Probe(x, y[:, None])))
    K = oracles.tangent_kernels(model, x)["2"]
    assert snap.value("tangent_cka", "2") == pytest.approx(oracles.tangent_cka(K, y[:, None]), rel=1e-9)
    two = (y > 0).long()
    snap = richter.measure(model, richter.Probe(x, two))
    assert snap.value("tangent_cka", "2") == pytest.approx(oracles.tangent_cka(K, two.double()[:, None]), rel=1e-9)
    assert_close(snap, richter.measure(model, richter.Probe(x, y > 0)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int64])
def test_class_ids_of_every_width(dtype: torch.dtype) -> None:
    """A byte has no -100: 156 is a class like any other."""
    y = torch.tensor([0, 100, 3, 0, 100, 3], dtype=dtype) if dtype is torch.int8 else \
        torch.tensor([0, 156, 3, 0, 156, 3]).to(dtype)
    Y, keep = richter.Probe(draw(6, 5), y).targets(torch.Size((6, 200)))
    assert keep is None
    assert Y is not None
    assert torch.equal(Y.argmax(1), y.long())


def test_without_labels() -> None:
    x, y = examples()
    model, start = moved(mlp()), state(mlp())
    measures = [*richter.measures.DEFAULT, "tangent_correlation"]
    blind, seeing = (richter.measure(model, richter.Probe(x, labels), measures, initial=start) for labels in (None, y))
    for m in ("nfc", "cnfc", "c_uc_ratio", "weight_change"):
        for layer in ("0", "2"):
            assert blind.value(m, layer) == seeing.value(m, layer)
            assert math.isfinite(blind.value(m, layer))
    for m in ("tangent_alignment", "tangent_cka", "tangent_correlation"):
        for layer in ("0", "2", "4", "*"):
            assert math.isnan(blind.value(m, layer))
            assert "no labels" in blind.note(m, layer)
            assert math.isnan(blind.error(m, layer))
    assert blind.frame.tangent_cka.isna().all()


def test_a_rank_needs_no_labels() -> None:
    """tangent_stable_rank is a number of the kernel alone."""
    x, y = examples()
    blind, seeing = (richter.measure(mlp(), richter.Probe(x, labels), ["tangent_stable_rank"]) for labels in (None, y))
    assert_close(blind, seeing)


# ------------------------------------------------------------------------------------------------ the kernel's examples

def test_kernels_use_balanced_examples_always_the_same() -> None:
    y = torch.tensor([0] * 70 + [1] * 20 + [2] * 10)
    p = richter.Probe(draw(100, 5), y, kernel_examples=24)
    rows = p.kernel_rows()
    assert y[rows].bincount().tolist() == [8, 8, 8]
    assert len(rows.unique()) == 24
    assert torch.equal(rows, rows.sort().values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        assert torch.equal(rows, p.kernel_rows())
    assert torch.equal(rows, richter.Probe(draw(100, 5), y, kernel_examples=24).kernel_rows())
    scarce = richter.Probe(draw(100, 5), y, kernel_examples=64).kernel_rows()
    assert y[scarce].bincount().tolist() == [34, 20, 10]  # all of the rare ones, the rest from the others


@pytest.mark.parametrize("options", [{"kernel_examples": 24}, {"kernel_examples": 64}, {"kernel_examples": None}, {}])
def test_a_small_probe_is_used_whole_balanced_or_not(options: dict[str, Any]) -> None:
    y = torch.tensor([0] * 20 + [1] * 3 + [2])
    assert torch.equal(richter.Probe(draw(24, 5), y, **options).kernel_rows(), torch.arange(24))


def test_all_examples_or_the_first_ones_where_there_are_no_classes() -> None:
    assert len(richter.Probe(draw(100, 5), torch.arange(100) % 3, kernel_examples=None).kernel_rows()) == 100
    for y in (None, draw(100, 3)):
        assert torch.equal(richter.Probe(draw(100, 5), y, kernel_examples=10).kernel_rows(), torch.arange(10))


def test_examples_without_a_label_are_no_class() -> None:
    y = torch.tensor([0, 1, 2, -100] * 10)
    rows = richter.Probe(draw(40, 5), y, kernel_examples=9).kernel_rows()
    assert (y[rows] >= 0).all()


def test_kernel_measures_are_of_the_kernel_examples() -> None:
    x, y = examples(30)
    p = richter.Probe(x, y, kernel_examples=12)
    rows = p.kernel_rows()
    snap, part = richter.measure(mlp(), p), richter.measure(mlp(), richter.Probe(x[rows], y[rows]))
    for layer in ("0", "2", "4", "*"):
        assert snap.value("tangent_cka", layer) == pytest.approx(part.value("tangent_cka", layer), rel=1e-10)
        assert snap.error("tangent_cka", layer) == pytest.approx(part.error("tangent_cka", layer), rel=1e-6)
    whole = richter.measure(mlp(), richter.Probe(x, y, kernel_examples=None))
    assert snap.value("nfc", "0") == whole.value("nfc", "0") != part.value("nfc", "0")
    assert abs(snap.value("tangent_cka") / whole.value("tangent_cka") - 1) > 1e-3


# -------------------------------------------------------------------------------------------------- the same all the time

@pytest.mark.parametrize("kind", ["tensors", "arrays", "dict", "tuple"])
def test_a_probe_does_not_change_with_the_tensors_it_was_made_of(kind: str) -> None:
    """Inputs, labels and mask are what they were, whatever is written into the user's own."""
    x, y, mask = draw(12, 4, 5), torch.arange(48).reshape(12, 4) % 3, torch.arange(4).expand(12, 4) < 3
    mask = mask.clone()
    given = {"tensors": x, "arrays": x.numpy(), "dict": {"x": x}, "tuple": (x,)}[kind]
    labels, real = (y.numpy(), mask.numpy()) if kind == "arrays" else (y, mask)
    p = richter.Probe(given, labels, mask=real)
    watch = richter.Observer(Tokens(), p, measures=list(FEW), when=1, budget=None)
    first = watch(0)
    x.mul_(-2), y.add_(1).remainder_(3), mask.logical_not_()
    assert_close(watch(1), first)
    assert_close(richter.measure(Tokens(), p, list(FEW)), first)


class Tokens(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.readout = torch.nn.Linear(5, 6).double(), torch.nn.Linear(6, 3).double()

    def forward(self, x: Any) -> torch.Tensor:
        return self.readout(torch.tanh(self.first(x["x"] if isinstance(x, dict) else x)))
