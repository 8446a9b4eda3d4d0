"""Large models: whatever is not written down, kept in another form or had in several passes gives the same numbers; what is
compressed is right on the average and says its error; and a plan says what a measurement will cost."""

from __future__ import annotations

import importlib
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import richter
from richter.core import MemoryBudgetError, parse_bytes
from richter.instrument import probe as probes
from richter.instrument.capture import quiet
from richter.instrument.cotangents import random_outputs
from richter.instrument.probe import OneHot, labelled
from richter.instrument.statistics import feature_matrices as weights
from richter.instrument.statistics import moments as bases
from richter.instrument.statistics import per_output
from richter.instrument.statistics import sketches as compressed
from richter.instrument.statistics.kernels import Tangents
from richter.instrument.statistics.per_output import KeptCaptures
from richter.instrument.subject import Subject
from richter.instrument.survey import examine
from richter.instrument.survey import examine as verify
from richter.kernels import contract as shared

TOKENS, WIDTH, LENGTH, N = 90, 16, 5, 8

forward_module = importlib.import_module("richter.instrument.capture.forward")  # the package has a function of that name


class Tied(nn.Module):
    """A small language model whose read-out is the table that tokens are looked up in."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.place = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.up, self.down, self.norm = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids) + self.place(torch.arange(ids.shape[1]))
        h = h + self.down(torch.tanh(self.up(h.cumsum(1))))
        return F.linear(self.norm(h), self.table.weight)


def subject() -> tuple[nn.Module, richter.Probe, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Tied().double()
    ids = torch.randint(TOKENS, (N, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    initial = {k: v + 0.1 * torch.randn_like(v) for k, v in model.state_dict().items()}
    return model, richter.Probe(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()), initial


def measured(**options: Any) -> richter.Snapshot:
    model, probe, initial = subject()
    return richter.measure(model, probe, options.pop("measures", None), initial=initial, **options)


def agree(a: richter.Snapshot, b: richter.Snapshot, tolerance: float) -> None:
    compared = 0
    for p, q in zip(a.rows, b.rows, strict=True):
        assert (p.layer, p.measure) == (q.layer, q.measure)
        for x, y in ((p.value, q.value), (p.error, q.error)):
            assert x == pytest.approx(y, rel=tolerance, abs=1e-13, nan_ok=True), (p, q)
            compared += math.isfinite(x)
    assert compared > 20


@pytest.fixture(scope="module")
def plenty() -> richter.Snapshot:
    return measured()


# ------------------------------------------------------------------------------------------------------------ same numbers


def test_sums_of_layers_in_several_passes_are_the_same() -> None:
    model, probe, initial = subject()
    options = {"measures": ["nfc", "cnfc", "c_uc_ratio", "probe_loss", "weight_change"], "initial": initial}
    (together,) = richter.plan(model, probe, **options).steps
    memory = 0.8 * together.bytes
    little = richter.plan(model, probe, **options, memory=memory)
    assert sum("nfc" in step.measures for step in little.steps) > 1
    agree(richter.measure(model, probe, **options), richter.measure(model, probe, **options, memory=memory), 1e-8)


@pytest.mark.parametrize(("module", "name", "value"), [
    (probes, "WRITTEN", 0), (bases, "WRITTEN", 0), (shared, "MOST", 0), (verify, "LARGE", 0), (verify, "REMEMBERED", 0),
    (forward_module, "TOGETHER", 0), (weights, "TILE", 3 * WIDTH)], ids=lambda v: getattr(v, "__name__", v))
def test_what_is_not_written_down_is_the_same(plenty: richter.Snapshot, monkeypatch: pytest.MonkeyPatch, module: Any, name: str,
                                              value: int) -> None:
    """Labels, bases, gradients of a tied matrix, indices, gradients in a survey and in an audit, and matrices."""
    monkeypatch.setattr(module, name, value)
    agree(plenty, measured(), 1e-8)


@pytest.mark.parametrize("at_once", [8, 3, 1])
def test_kernels_of_single_outputs_from_kept_captures_are_the_same(plenty: richter.Snapshot, at_once: int,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """However many outputs one forward pass serves; chunks of examples in which outputs are reached from other positions."""
    seen, forwards, real = [], [], per_output.chunks
    monkeypatch.setattr(KeptCaptures, "fewer_passes", lambda kept, outputs: seen.append(outputs) or True)
    monkeypatch.setattr(KeptCaptures, "together", lambda kept, units, outputs: at_once)
    monkeypatch.setattr(per_output, "fitting", lambda *a: 3)
    monkeypatch.setattr(per_output, "chunks", lambda *a, **k: forwards.append(1) or real(*a, **k))
    agree(plenty, measured(), 1e-8)
    assert set(seen) == {8}
    assert len(forwards) == math.ceil(8 / at_once)


def test_captures_of_as_many_outputs_are_kept_as_have_room() -> None:
    model, probe, _ = subject()
    with quiet(model):
        found = {}
        for memory in ("2GiB", "400KiB", "1KiB"):
            s = Subject(model, probe, None, None, parse_bytes(memory), None)
            s.renew()
            t = Tangents(s, random_outputs(64))
            kept = KeptCaptures(t)
            found[memory] = kept.together(t.units, 8)
            held = kept.kept_bytes(t.units, found[memory]) + kept.chunk_bytes + kept.products_bytes
            assert held <= s.memory or found[memory] == 1
    assert found["2GiB"] == 8 > found["400KiB"] > found["1KiB"] == 1, found


@pytest.mark.parametrize("outputs", ["trace", "diagonal"])
def test_a_tied_matrix_has_the_same_kernel_without_its_gradients(monkeypatch: pytest.MonkeyPatch, outputs: str) -> None:
    model, probe, _ = subject()
    x, other = probe.x, probe.x.flip(0)[:5].contiguous()
    some = {"cotangents": random_outputs(3), "form": outputs, "per_layer": True}
    before = [richter.kernels.ntk(model, x, y, **some)["table"] for y in (None, other)]
    monkeypatch.setattr(shared, "MOST", 0)
    calls = []
    real = shared._products
    monkeypatch.setattr(shared, "_products", lambda *a: calls.append(1) or real(*a))
    after = [richter.kernels.ntk(model, x, y, **some)["table"] for y in (None, other)]
    assert calls
    for p, q in zip(before, after, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_targets_of_ids_are_those_of_one_hot() -> None:
    ids = torch.tensor([[1, 0, 2], [2, 2, 1]])
    real = torch.tensor([[True, False, True], [True, True, True]])
    Y = OneHot(ids, real, 4)
    dense = (F.one_hot(ids, 4) * real[..., None]).flatten(1).double()
    for rows in (slice(None), slice(1, 2), torch.tensor([1, 0, 1]), torch.tensor([True, False])):
        torch.testing.assert_close(Y[rows], dense[rows])
    assert (Y.shape, Y.numel(), len(Y)) == (dense.shape, dense.numel(), 2)
    assert labelled(Y, torch.tensor([0, 1])).tolist() == (dense != 0).any(0).tolist()
    torch.testing.assert_close(Y.sum(1), dense.sum(1))  # asked of the whole


def test_few_examples_are_surveyed_of_a_large_model_with_many_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    from richter.instrument import subject as subjects
    monkeypatch.setattr(subjects, "SMALL", 0)
    seen = []
    real = examine.survey
    monkeypatch.setattr(examine, "survey", lambda model, x, *rest: seen.append(len(x)) or real(model, x, *rest))
    measured(measures=["nfc"], memory="600KiB")
    assert seen == [4]


# ------------------------------------------------------------------------------------------------------------ compressed


def of_vectors(monkeypatch: pytest.MonkeyPatch) -> richter.Snapshot:
    """Norms from vectors of all outputs, as if combinations of each example's had no room."""
    monkeypatch.setattr(richter.instrument.statistics.output_sketch.OutputSketch, "least", lambda *_: 2 ** 62)
    return measured(measures=["tangent_cka"])


def compressing(monkeypatch: pytest.MonkeyPatch, size: int = 251) -> None:
    monkeypatch.setattr(richter.instrument.statistics.sketches, "_compresses", lambda t: True)
    monkeypatch.setattr(compressed, "SIZES", {256: (size, size - 10, size - 12, size - 18, size - 22, size - 24)})


def test_signed_sums_keep_inner_products_on_the_average() -> None:
    """The mean over signs, and its variance: (|x|^2 |y|^2 + <x, y>^2 - 2 sum x^2 y^2) / m at most, about."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 300, generator=draw, dtype=torch.float64)
    y += x / 2
    fold = compressed.Compressed.__new__(compressed.Compressed)
    fold.sizes = (31, 29, 23, 19)
    estimates = []
    for _ in range(2000):
        signs = torch.randint(0, 2, (300,), generator=draw) * 2 - 1
        sums = torch.zeros(2, sum(fold.sizes), dtype=torch.float64)
        for total, t in zip(sums, (x, y), strict=True):
            fold._fold(total, t * signs)
        estimates.append([(a * b).sum().item() for a, b in zip(*(s.split(fold.sizes) for s in sums), strict=True)])
    T = torch.tensor(estimates)
    exact = (x @ y).item()
    for r, m in enumerate(fold.sizes):
        spread = ((x @ x) * (y @ y) + (x @ y) ** 2 - 2 * (x * x) @ (y * y)).item() / m
        assert T[:, r].mean().item() == pytest.approx(exact, abs=4 * math.sqrt(spread / 2000))
        assert T[:, r].var().item() == pytest.approx(spread, rel=0.3)
    noise = T - exact  # of different sizes it has nothing in common, so that products of two are those of the square
    assert abs((noise[:, 0] * noise[:, 1]).mean().item()) < 4 * (noise[:, 0].std() * noise[:, 1].std()).item() / math.sqrt(2000)


def test_squares_are_products_of_different_sketches() -> None:
    T = torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    slow = sum(T[r] * T[s] for r in range(4) for s in range(4) if r != s) / 12
    torch.testing.assert_close(compressed.squared(T), slow)
    without = sum(T[r] * T[s] for r in range(3) for s in range(3) if r != s) / 6
    torch.testing.assert_close(compressed.squared(T, torch.arange(4) != 3), without)
    torch.testing.assert_close(compressed.squared(T[:1]), T[0] ** 2)


def test_compressed_gradients_give_the_same_within_their_error(monkeypatch: pytest.MonkeyPatch) -> None:
    plenty = of_vectors(monkeypatch)
    compressing(monkeypatch)
    little = measured(measures=["tangent_cka"])
    for row in little.rows:
        exact = plenty.value("tangent_cka", row.layer)
        assert "compressed to 6 x 256 numbers" in row.note
        assert abs(row.value - exact) <= 4 * row.error + 1e-9 * exact, row
    for small in ("norm", "down.bias"):
        if any(row.layer == small for row in little.rows):
            assert little.value("tangent_cka", small) == pytest.approx(plenty.value("tangent_cka", small), rel=1e-9)


def test_a_vocabulary_is_not_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    plenty = of_vectors(monkeypatch)
    compressing(monkeypatch)
    monkeypatch.setattr(compressed, "LARGE", 1)
    monkeypatch.setattr(compressed, "tile_rows", lambda *a: 7)
    for small in (2 ** 26, 0):  # signs as they are, and as bits
        monkeypatch.setattr(compressed, "SMALL", small)
        little = measured(measures=["tangent_cka"])
        for layer in ("table", "place"):
            assert little.value("tangent_cka", layer) == pytest.approx(plenty.value("tangent_cka", layer), rel=1e-6)


class TwoTables(nn.Module):
    """Both are parameters of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Parameter(torch.randn(TOKENS, WIDTH)), nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.out = nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        h = F.embedding(ids, self.tokens) + 0.5 * F.embedding(torch.arange(ids.shape[1]).expand_as(ids), self.places)
        return self.out(torch.tanh(h))


class Silenced(TwoTables):
    """The first text alone has no token whose answers are not wanted."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * (ids != 0)[..., None]


@pytest.mark.parametrize("factory", [TwoTables, Silenced])
def test_tables_are_all_of_a_module_and_as_all_use_them(factory: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two in a module one was lost; and what is asked of a read-out was taken for the vector itself, as of the first text."""
    torch.manual_seed(0)
    model = factory().double()
    ids = torch.randint(1, TOKENS, (N, LENGTH), generator=torch.Generator().manual_seed(1))
    ids[1:, 1:4] = 0
    probe = richter.Probe(ids, ids.roll(1, 0))
    monkeypatch.setattr(richter.instrument.statistics.output_sketch.OutputSketch, "least", lambda *_: 2 ** 62)
    plenty = richter.measure(model, probe, ["tangent_cka"])
    compressing(monkeypatch)
    monkeypatch.setattr(compressed, "LARGE", 1)
    little = richter.measure(model, probe, ["tangent_cka"])
    for layer in ("", "out", "*"):
        row, exact = little.row("tangent_cka", layer), plenty.value("tangent_cka", layer)
        assert abs(row.value - exact) <= 3 * row.error + 1e-9 * exact, row
    assert little.value("tangent_cka", "") == pytest.approx(plenty.value("tangent_cka", ""), rel=1e-6)  # lookups alone
    known = little.value("tangent_cka", "out") == pytest.approx(plenty.value("tangent_cka", "out"), rel=1e-6)
    assert known == (factory is TwoTables)


def test_where_a_read_out_has_no_room_to_be_compressed_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    ids = torch.randint(1, TOKENS, (N, LENGTH), generator=torch.Generator().manual_seed(1))
    ids[1:, 1:4] = 0
    monkeypatch.setattr(richter.instrument.statistics.output_sketch.OutputSketch, "least", lambda *_: 2 ** 62)
    compressing(monkeypatch)
    monkeypatch.setattr(compressed, "LARGE", 1)
    real = compressed.compressed_bytes
    monkeypatch.setattr(compressed, "compressed_bytes", lambda t, q: real(t, q) + 2 ** 40 * (len(compressed.tables_of(
        t, t.parameters(t.units))) < 3))
    snap = richter.measure(Silenced().double(), richter.Probe(ids, ids.roll(1, 0)), ["tangent_cka"])
    assert all(math.isnan(row.value) and "used differently between examples" in row.note for row in snap.rows)


# ------------------------------------------------------------------------------------------------------------------ plans


def test_plans_count_pairs_of_chunks() -> None:
    """They said as many passes as if all examples had room at once."""
    model, probe, _ = subject()
    passes = []
    for memory in ("2GiB", "300KiB", "100KiB"):
        s = Subject(model, probe, None, None, parse_bytes(memory), None)
        with quiet(model):
            s.renew()
            t = Tangents(s, random_outputs(4))
            passes.append(t.passes("full", 4))
            assert passes[-1] == sum(plan.chunk * (plan.passes + plan.backward) for plan in t.plans("full", 4)) / 3 / N
    assert passes[0] == pytest.approx((1 + 4) / 3)
    assert passes[0] < passes[1] < passes[2]


def test_every_memory_above_the_smallest_works() -> None:
    """Where drawn kernels have room one module at a time and not all at once, the plan of all was an error."""
    model, probe, _ = subject()
    with pytest.raises(MemoryBudgetError, match=r"smallest that works here is memory='([^']*)'") as why:
        richter.measure(model, probe, ["tangent_cka"], memory=1000)
    smallest = parse_bytes(re.search(r"memory='([^']*)'; ", str(why.value))[1])
    for factor in (1, 1.3, 1.7, 2, 2.5, 3, 4, 6, 9, 14, 20):
        richter.plan(model, probe, ["tangent_cka"], memory=factor * smallest)


def test_a_plan_says_what_a_measurement_will_cost() -> None:
    model, probe, initial = subject()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    plan = richter.plan(model, probe, initial=initial)
    assert (plan.examples, plan.outputs, plan.memory) == (N, TOKENS * LENGTH, parse_bytes("2GiB"))
    assert {line.measure for line in plan.lines} == {row.measure for row in measured().rows}
    assert plan.seconds == pytest.approx(plan.other_seconds + plan.passes * plan.pass_seconds)
    assert plan.other_seconds > 0
    shown = str(plan)
    for words in (f"of {N} examples with 450 outputs", "passes of", "within memory='2.00GiB'", "tangent_cka", "shares a pass",
                  "at least"):
        assert words in shown
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_plan_says_why_there_will_be_no_number() -> None:
    model, probe, _ = subject()
    (line,) = richter.plan(model, probe, ["linearisation_gap"]).lines
    assert line.note.startswith("needs the initial weights")
    assert (line.passes, line.bytes) == (0, 0)


def test_a_plan_says_the_smallest_memory_that_works() -> None:
    model, probe, initial = subject()
    with pytest.raises(MemoryBudgetError, match=r"memory=1.00KiB cannot hold .*The smallest that works here is memory='"):
        richter.plan(model, probe, initial=initial, memory="1KiB")


def test_more_memory_takes_fewer_passes() -> None:
    model, probe, initial = subject()
    options = {"measures": ["nfc", "cnfc"], "initial": initial}
    (together,) = richter.plan(model, probe, **options).steps
    passes = [richter.plan(model, probe, **options, memory=share * together.bytes).passes for share in (0.5, 0.7, 2)]
    assert passes == sorted(passes, reverse=True)
    assert passes[0] > passes[-1]
