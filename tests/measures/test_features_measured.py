"""Features and neural collapse in the instrument: on every model of the zoo they are those of the definition, of any layer."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from test_features import hot, normal
from torch import Tensor, nn

import oracles
import richter
import zoo
from richter.core import WHOLE, Mark
from richter.instrument.cotangents import every_output
from richter.instrument.evaluate import jackknife
from richter.instrument.observe import Measurement
from richter.instrument.statistics import CLASSES, SAMPLE, FeatureMoments
from richter.instrument.statistics import frame as passes
from richter.instrument.stream import Share
from richter.instrument.subject import Subject
from richter.measures import collapse, features
from richter.models import GPT, mlp

FEATURES, COLLAPSE = (tuple(m.name for m in part.MEASURES) for part in (features, collapse))
EXAMPLES = 9
QUICK = ("mlp_nobias", "cnn", "gpt", "tied", "raw", "parametrized", "multi_input", "moe", "lstm", "groups", "every_product")


def read(name: str, layer: str) -> Tensor:
    """What a layer reads, one example at a time: h[n,s,d_in]."""
    case = zoo.CASES[name]
    model, (x, _) = case.build(), case.batch(EXAMPLES)
    rows = []
    with torch.no_grad():
        for i in range(EXAMPLES):
            uses: list[oracles.Use] = []
            with oracles._perturbed(model, layer, uses):
                oracles.outputs(model, oracles.example(x, i), case.output)
            rows.append(torch.cat([h for _, h, _ in uses]) if uses else torch.zeros(0, 1, dtype=torch.float64))
    return torch.stack(rows) if len({r.shape for r in rows}) == 1 else torch.zeros(EXAMPLES, 0, 1)


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in zoo.CASES])
def test_measures_are_those_of_the_definition(name: str) -> None:
    """Of each layer that reads one row for each row of outputs; any other has no number, and a reason."""
    case = zoo.CASES[name]
    x, y = case.batch(EXAMPLES)
    snap = Measurement(case.build(), richter.Probe(x, y), [*FEATURES, *COLLAPSE], output=case.output, errors=False).take()
    f = oracles.outputs(case.build(), x, case.output).detach()
    result = zoo.call(case.build(), x)
    shape = (result if case.output is None else case.output(result)).shape
    Y = richter.Probe(x, y).targets(shape)[0]
    assert Y is not None
    tokens = shape[1] if len(shape) == 3 else 1
    Y, f = (t.reshape(EXAMPLES * tokens, -1) for t in (Y, f))
    classes = bool(((Y == 0) | (Y == 1)).all() and (Y.sum(1) == 1).all()) and Y.shape[1] > 1
    for layer, kind in case.maps.items():
        h = torch.zeros(1, 0, 1) if kind == "lookup" else read(name, layer)
        values = {m: snap.row(m, layer) for m in (*FEATURES, *COLLAPSE)}
        if h.shape[1] != tokens:
            assert all(math.isnan(r.value) and r.note for r in values.values()), layer
            continue
        Phi = h.reshape(len(f), -1)
        expected = oracles.feature_measures(Phi, Y, f, classes)
        for m in FEATURES:
            if m == "kappa_cka" and f.shape[1] >= len(f):
                assert math.isnan(values[m].value)
            elif not math.isnan(expected[m]):
                assert values[m].value == pytest.approx(expected[m], rel=1e-7, abs=1e-9), (layer, m)
        if classes and all((Y.argmax(1) == c).any() for c in range(Y.shape[1])):
            W = f.new_zeros(Y.shape[1], Phi.shape[1])
            outcome = oracles.collapse_measures(Phi, Y.argmax(1), W, W[:, 0])
            for m in ("nc1", "nc1_trace", "nc2_angle", "nc2_norm"):
                assert values[m].value == pytest.approx(outcome[m], rel=1e-6, abs=1e-9), (layer, m)


# ------------------------------------------------------------------------------------------------- one model, looked at closely


def network(*widths: int, seed: int = 0) -> nn.Module:
    return mlp(list(widths) or [6, 8, 5, 3], seed=seed).double()


def probe(n: int = 40, held_out: int = 0, **options: Any) -> richter.Probe:
    aside = (normal(held_out, 6, seed=5) + 0.3, torch.arange(held_out) % 3) if held_out else None
    return richter.Probe(normal(n, 6), torch.arange(n) % 3, held_out=aside, **options)


def read_by(model: nn.Module, x: Tensor, layer: str = "4") -> Tensor:
    """What a layer of an MLP reads."""
    with torch.no_grad():
        return model[:int(layer)](x)  # type: ignore[index]


def analysed(model: nn.Module, x: Tensor, y: Tensor, layer: str = "4") -> features.FeatureAnalysis:
    return features.analyse(read_by(model, x, layer), y, model(x).detach())


@pytest.mark.parametrize("widths", [(6, 60, 50, 3), (6, 8, 5, 3)], ids=["rows", "sums"])  # fewer examples than features, or more
@pytest.mark.parametrize("layer", ["0", "2", "4"])
def test_values_and_errors_are_those_of_the_arrays(widths: tuple[int, ...], layer: str) -> None:
    """The jackknife leaves out every eighth example, and everything is computed again."""
    n = 40
    model, p = network(*widths), probe(n)
    snap = richter.measure(model, p, [*FEATURES, *COLLAPSE])
    W, b = (model[4].weight, model[4].bias) if layer == "4" else (None, None)  # type: ignore[index]
    kept = [torch.ones(n, dtype=torch.bool), *(torch.arange(n) % 8 != g for g in range(8))]
    whole, *parts = [analysed(model, p.x[k], p.y[k], layer) for k in kept]
    total, *rest = [collapse.analyse(read_by(model, p.x[k], layer), p.y[k], W, b) for k in kept]
    for names, value, others in ((FEATURES, whole, parts), (COLLAPSE if layer == "4" else COLLAPSE[:4], total, rest)):
        for m in names:
            row = snap.row(m, layer)
            assert row.value == pytest.approx(getattr(value, m), rel=1e-9), m
            assert row.error == pytest.approx(jackknife([getattr(a, m) for a in others]), rel=1e-6, nan_ok=True), m


def test_the_whole_model_stands_for_its_last_layer() -> None:
    snap = richter.measure(network(), probe(), [*FEATURES, *COLLAPSE])
    for m in (*FEATURES, *COLLAPSE):
        a, b = snap.row(m, "4"), snap.row(m)
        assert (a.value, a.error, a.note, a.mark) == (b.value, b.error, b.note, b.mark)
    assert {r.layer for r in snap.rows} == {"0", "2", "4", WHOLE}
    assert {r.layer for r in richter.measure(network(), probe(), FEATURES, layers="2").rows} == {"2"}


@pytest.mark.parametrize(("n", "aside"), [(40, 30), (4, 30), (40, 4), (3, 4), (3, 2)])
def test_held_out_examples(n: int, aside: int) -> None:
    """Fitted on the probe, evaluated on the others; both are in the error bar."""
    model, p = network(), probe(n, aside)
    a = features.analyse(read_by(model, p.x), p.y, model(p.x).detach(), read_by(model, p.held_out.x), p.held_out.y,
                         model(p.held_out.x).detach())
    snap = richter.measure(model, p, FEATURES)
    for m in FEATURES:
        assert snap.value(m) == pytest.approx(getattr(a, m), rel=1e-8, nan_ok=True), m
    assert ("few to evaluate" in snap.row("deff_utilisation").note) == (aside < 10 * a.rank)
    assert "few to evaluate" not in snap.row("deff_intensity").note
    errors = richter.measure(model, richter.Probe(p.x, p.y), FEATURES)
    assert snap.error("deff_intensity") == pytest.approx(errors.error("deff_intensity"), rel=1e-9)  # of the fitting sample alone


@pytest.mark.parametrize("masked", [False, True])
def test_tokens_are_examples_where_each_has_its_outputs(masked: bool) -> None:
    """Those without a label, and masked ones, count nowhere."""
    torch.manual_seed(0)
    model = GPT(7, 5, d=8, depth=1, heads=2).double()
    ids = torch.randint(7, (9, 6))
    y = ids[:, 1:].clone()
    y[2:4, 1:3] = -100
    mask = torch.arange(5) < torch.tensor([5, 3, 5, 5, 4, 2, 5, 5, 5])[:, None] if masked else None
    snap = richter.measure(model, richter.Probe(ids[:, :-1], y, chunk=4, mask=mask), [*FEATURES, *COLLAPSE])
    seen: list[Tensor] = []
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    handle = last.register_forward_hook(lambda m, given, out: seen.append(given[0].detach()))
    f = model(ids[:, :-1]).detach()
    handle.remove()
    real = (y if mask is None else torch.where(mask, y, -100)).flatten() >= 0
    Phi, labels = seen[0].flatten(0, 1)[real], y.flatten()[real]
    a, c = features.analyse(Phi, labels, f.flatten(0, 1)[real]), collapse.analyse(Phi, labels, last.weight, last.bias)
    for m in FEATURES:
        assert snap.value(m) == pytest.approx(getattr(a, m), rel=1e-8), m
    for m in COLLAPSE:
        assert snap.value(m) == pytest.approx(getattr(c, m), rel=1e-8), m
    assert snap.row("kappa_cka").error > 0


def test_targets_that_are_scaled_classes_are_classes() -> None:
    model, p = network(), probe()
    plain, scaled = (richter.measure(model, richter.Probe(p.x, y), [*FEATURES, *COLLAPSE]) for y in (p.y, 30 * hot(p.y)))
    for m in (*FEATURES, *COLLAPSE):
        assert scaled.value(m) == pytest.approx(plain.value(m), rel=1e-9), m


def test_regression_has_features_and_no_classes() -> None:
    model, p = network(6, 8, 5, 2), probe()
    y = p.x[:, :2].sin()
    snap = richter.measure(model, richter.Probe(p.x, y), [*FEATURES, *COLLAPSE])
    a = analysed(model, p.x, y)
    assert not a.one_hot
    for m in FEATURES:
        assert snap.value(m) == pytest.approx(getattr(a, m), rel=1e-9), m
    for m in COLLAPSE:
        row = snap.row(m)
        assert (math.isnan(row.value), row.mark) == (True, Mark.UNDEFINED)
        assert "only classes collapse" in row.note


@pytest.mark.parametrize("statistic", [SAMPLE, CLASSES], ids=lambda s: s.name)
@pytest.mark.parametrize("n", [4, 40])
def test_ranks_that_share_the_chunks_add_up(statistic: Any, n: int) -> None:
    """Class means are merged after the first pass, before the second."""
    subject = Subject(network(), probe(n, chunk=3), None, None, 2 ** 30, None)
    subject.renew()
    whole = passes.gathered(subject, statistic, every_output)
    parts = [statistic.begin(subject, every_output, ()) for _ in range(2)]
    wants = statistic.wants(subject, every_output)
    for again in range(2 if statistic is CLASSES else 1):
        for rank, part in enumerate(parts):
            passes.ProbePass(subject, (wants,))._once([passes.Entry(part, wants, every_output)], Share(rank, 2))
        first, second = parts
        first.merge(second)
        if again == 0 and first.again():
            second.sums, second.counts = first.sums, first.counts
            second.again()
    for without in (None, ("examples", 1)):
        a, b = whole.value("4", without), parts[0].value("4", without)
        pairs = ([(a.squares, b.squares), (a.means, b.means)] if statistic is CLASSES else
                 [(a.scatter.about, b.scatter.about)] if isinstance(a, FeatureMoments) else [(a.Z, b.Z)])
        assert all(torch.allclose(s, t, rtol=1e-10, atol=1e-13) for s, t in pairs)


def test_the_curves_are_kept_with_a_run(tmp_path: Path) -> None:
    model, p = network(), probe()
    with richter.Observer(model, p, measures=["kappa_cka"], run=tmp_path / "run", when=1, budget=None) as watch:
        watch(0)
    run, a = richter.runs.load(tmp_path / "run"), analysed(model, p.x, p.y)
    for layer in (WHOLE, "4"):
        kept = run.array("features", layer, 0)
        assert kept.shape == (3, 5)
        for row, name in zip(kept, ("intensity", "quality", "utilisation"), strict=True):
            assert torch.allclose(torch.from_numpy(row).double(), getattr(a, name), rtol=1e-5)


# ----------------------------------------------------------------------------------------------------- when there is no number


class Branches(nn.Module):
    """Two layers write the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x.cos())


class Hidden(nn.Module):
    """What the last layer reads is not finite, and its outputs are."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = torch.where((x[:, :1] > 1.5) & (torch.arange(5) == 1), math.nan, h)
        return torch.nan_to_num(self.last(h), 0.0, 0.0, 0.0)


def dead() -> nn.Module:
    model = network()
    with torch.no_grad():
        model[2].bias.fill_(-1e3)  # type: ignore[index, union-attr]
    return model


@pytest.mark.parametrize(("model", "made", "name", "sentence"), [
    (Branches().double(), {}, "kappa_cka", "2 layers write the outputs (a, b)"),
    (Branches().double(), {}, "nc1", "choose one with layers="),
    (network(), {"n": 3}, "kappa_cka", "the outputs span 3 dimensions on 3 examples"),
    (network(), {"n": 3}, "nc1", "every class has one example, which is the class mean"),
    (dead(), {}, "deff_utilisation", "the features are zero on every example"),
    (dead(), {}, "kappa_cka", "the features are zero on every example"),
    (dead(), {}, "nc2_angle", "all class means are equal"),
    (nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 3), nn.Flatten(1), nn.AdaptiveAvgPool1d(3)).double(), {}, "kappa_cka",
     "it reads 4 positions of each example, and the outputs are [n, 3]"),
])
def test_why_there_is_no_number(model: nn.Module, made: dict[str, int], name: str, sentence: str) -> None:
    row = richter.measure(model, probe(**made), [name]).row(name)
    assert (math.isnan(row.value), row.mark) == (True, Mark.UNDEFINED)
    assert sentence in row.note


def test_as_many_outputs_as_examples_use_every_feature_by_definition() -> None:
    row = richter.measure(network(), probe(3), ["deff_utilisation"]).row("deff_utilisation")
    assert row.value == pytest.approx(3)
    assert row.mark is Mark.TRIVIAL


def test_features_that_are_not_finite() -> None:
    """A number would be NaN: the row says why."""
    model = Hidden().double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("kappa_cka", "nc1"):
            row = richter.measure(model, probe(), [name]).row(name)
            assert math.isnan(row.value)
            assert "it reads NaN or Inf" in row.note


def test_without_labels() -> None:
    row = richter.measure(network(), richter.Probe(normal(40, 6), None), ["kappa_cka"]).row("kappa_cka")
    assert "the probe has no labels" in row.note


def test_one_output_and_an_empty_class() -> None:
    model, p = network(6, 8, 5, 1), probe()
    one = richter.measure(model, richter.Probe(p.x, p.x[:, 0]), FEATURES)
    assert all(math.isfinite(one.value(m)) for m in FEATURES)
    assert one.value("deff_utilisation") == pytest.approx(analysed(model, p.x, p.x[:, 0]).deff_utilisation)
    snap = richter.measure(network(), richter.Probe(p.x, p.y % 2), ["deff_quality", "nc1", "nc2_angle"])
    assert "1 of 3 classes have no example" in snap.row("deff_quality").note
    assert "1 of 3 classes have no example" in snap.row("nc1").note
    assert snap.value("nc2_angle") == pytest.approx(0, abs=1e-12)  # two means about their middle are a simplex


def test_a_last_layer_of_which_only_some_outputs_are_looked_at_has_no_rows_for_the_classes() -> None:
    """Which of its rows belongs to which class is not known."""
    p = probe()
    snap = richter.measure(network(), richter.Probe(p.x, p.y % 2), ["nc3", "nc4"], output=lambda f: f[:, 1:])
    assert math.isnan(snap.value("nc3"))
    assert "nc3 is defined for the last layer" in snap.row("nc3").note
    assert math.isfinite(snap.value("nc4"))


def test_a_hidden_layer_with_as_many_outputs_as_classes_is_not_the_last() -> None:
    snap = richter.measure(network(6, 3, 3, 3), probe(), ["nc3"])
    assert [math.isnan(snap.value("nc3", layer)) for layer in ("0", "2", "4")] == [True, True, False]


def test_memory_has_no_room_for_the_products_of_every_layer() -> None:
    """Each of two has room alone. The last layer comes first; the other has a reason, and the measurement goes on."""
    model, x = mlp([6, 120, 120, 3], seed=0).double(), normal(400, 6)
    p = richter.Probe(x, torch.arange(400) % 3, chunk=16)
    snap = richter.measure(model, p, ["kappa_cka"], memory="12MiB")
    assert math.isfinite(snap.value("kappa_cka"))
    assert "memory= has no room for the products of its 120 features" in snap.row("kappa_cka", "2").note
    alone = richter.measure(model, p, ["kappa_cka"], layers="2", memory="12MiB")
    assert alone.value("kappa_cka", "2") == richter.measure(model, p, ["kappa_cka"]).value("kappa_cka", "2")


def test_single_precision() -> None:
    model, p = network(), probe()
    exact = richter.measure(model, p, [*FEATURES, *COLLAPSE])
    rough = richter.measure(model.float(), richter.Probe(p.x.float(), p.y), [*FEATURES, *COLLAPSE])
    for m in (*FEATURES, *COLLAPSE):
        assert rough.value(m) == pytest.approx(exact.value(m), rel=1e-4), m
