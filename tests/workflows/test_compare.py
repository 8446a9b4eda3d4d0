"""Two networks side by side: CKA and overlap of leading features, of models, of checkpoints and of what runs keep."""

from __future__ import annotations

import copy
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_movement import Language
from torch import Tensor, nn

import oracles
import richter
import zoo
from richter.cli import main
from richter.core import DivergedError, MemoryBudgetError, ProbeError, SelectionError, StoreError, likeness
from richter.instrument.keepsakes import Keepsakes
from richter.linalg import leading_eigenpairs
from richter.models import mlp
from richter.report.comparison import between, of_grams, steps_of
from richter.workflows import checkpoints, compare

D = torch.float64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def expected(X: dict[str, Tensor], Y: dict[str, Tensor], debiased: bool) -> np.ndarray[Any, Any]:
    def cka(x: Tensor, y: Tensor) -> float:
        return oracles.debiased_cka(x, y) if debiased else oracles.cka(x @ x.T, y @ y.T)
    return np.array([[cka(x, y) for y in Y.values()] for x in X.values()])


def features_of(model: nn.Module, x: Any, names: list[str], output: Any = None) -> dict[str, Tensor]:
    """What the layers read and the model says, by hooks."""
    H = {k: h.flatten(1) for k, h in oracles.reads(model, x, names, output).items()}
    return {**H, "outputs": oracles.outputs(model, x, output).detach().flatten(1)}


# ----------------------------------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("debiased", [False, True])
@pytest.mark.parametrize("n", [11, 90])
def test_cka_and_overlap_are_those_of_the_definitions(n: int, debiased: bool) -> None:
    """By Gram matrices of few examples, and by products of features of many."""
    x = 1 + normal(n, 6)
    a, b = mlp([6, 12, 9, 3], seed=0).double(), mlp([6, 8, 3], seed=1).double()
    seen = compare(a, b, richter.Probe(x, None, chunk=13), debiased=debiased, features=4)
    A, B = features_of(a, x, ["0", "2", "4"]), features_of(b, x, ["0", "2"])
    assert seen.layers == (tuple(A), tuple(B))
    assert seen.rows == n
    np.testing.assert_allclose(seen.cka, expected(A, B, debiased), rtol=1e-8)
    for i, k in enumerate(A):
        for j, m in enumerate(B):
            overlap, angles = oracles.overlap(A[k], B[m], 4)
            assert seen.overlap[i, j] == pytest.approx(overlap, rel=1e-8)
            np.testing.assert_allclose(seen.angles(k, m), angles, atol=1e-4)  # an arccos near 1 loses half the digits
            assert seen.features(k, m).sum() / min(seen.features(k, m).shape) == pytest.approx(overlap, rel=1e-8)
    np.testing.assert_allclose(seen.frame.cka.to_numpy().reshape(4, 3), seen.cka)
    assert list(seen.frame.columns) == ["layer_a", "layer_b", "cka", "overlap"]
    S = torch.linalg.svdvals(A["2"] - A["2"].mean(0)).square()
    np.testing.assert_allclose(seen.shares[0][1], (S / S.sum())[:4], rtol=1e-8)


@pytest.mark.parametrize("name", ["cnn", "resnet", "conv1d"])
def test_every_layer_reads_each_number_once(name: str) -> None:
    """Pictures, and not their patches."""
    case = zoo.CASES[name]
    x, y = case.batch(14)
    a, b = case.build(), case.build(seed=3)
    names = [k for k in case.maps if k in dict(a.named_modules())]
    seen = compare(a, b, richter.Probe(x, y, chunk=5), layers=names, output=case.output)
    assert seen.layers[0][-1] == "outputs"
    assert len(seen.layers[0]) > 2
    A, B = (features_of(m, x, names, case.output) for m in (a, b))
    A, B = ({k: H[k] for k in seen.layers[0]} for H in (A, B))
    np.testing.assert_allclose(seen.cka, expected(A, B, False), rtol=1e-8)


@pytest.mark.parametrize("name", ["conv3d", "encoder_seq_first", "tied_autoencoder", "inplace_view", "folded", "dict_io", "moe",
                                  "lstm_deep", "groups", "tables"])
def test_a_network_of_any_kind_is_like_itself(name: str) -> None:
    case = zoo.CASES[name]
    x, y = case.batch(9)
    other = (case.build(seed=1), case.build().state_dict())
    seen = compare(case.build(), other, richter.Probe(x, y, chunk=4), output=case.output)
    known = np.isfinite(seen.cka.diagonal())
    assert known.sum() > 1
    np.testing.assert_allclose(seen.cka.diagonal()[known], 1, rtol=1e-8)
    np.testing.assert_allclose(seen.overlap.diagonal()[known], 1, rtol=1e-8)
    assert any("one example at a time" in note for note in seen.notes) == (name == "moe")


@pytest.mark.parametrize("masked", [False, True])
def test_rows_are_tokens_where_each_has_an_output(masked: bool) -> None:
    n = 12
    a = nn.Sequential(Language(dim=5, vocabulary=7)).double()
    b = nn.Sequential(Language(dim=6, vocabulary=7)).double()
    ids = torch.randint(0, 7, (n, 6), generator=torch.Generator().manual_seed(1))
    real = torch.rand(n, 6, generator=torch.Generator().manual_seed(2)) > 0.3 if masked else torch.ones(n, 6, dtype=torch.bool)
    seen = compare(a, b, richter.Probe(ids, None, mask=real if masked else None, chunk=5), debiased=True)
    A, B = ({**{k: h[real] for k, h in oracles.reads(m, ids, ["0.mix", "0.head"]).items()},
             "outputs": m(ids).detach()[real]} for m in (a, b))
    np.testing.assert_allclose(seen.cka, expected(A, B, True), rtol=1e-8)
    assert seen.rows == int(real.sum())
    assert "tokens" in str(seen)


def test_blocks_and_memory_change_nothing() -> None:
    """Less room: pairs of blocks of examples instead of all at once."""
    x, a, b = normal(40, 6), mlp([6, 70, 3], seed=0).double(), mlp([6, 60, 3], seed=1).double()
    whole = compare(a, b, richter.Probe(x, None))
    need = 8 * 40**2 * 6
    few = compare(a, b, richter.Probe(x, None), memory=need + 30_000)
    np.testing.assert_allclose(few.cka, whole.cka, rtol=1e-10)
    np.testing.assert_allclose(few.overlap, whole.overlap, rtol=1e-8)
    shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(compare(a, b, richter.Probe(x[shuffled], None, chunk=7)).cka, whole.cka, rtol=1e-10)
    with pytest.raises(MemoryBudgetError, match=r"is too small to compare 3 and 3 layers on 40 rows: .* as Gram "
                                                r"matrices, .* as products of features. Choose fewer layers"):
        compare(a, b, richter.Probe(x, None), memory=20_000)


# ------------------------------------------------------------------------------------------------------------------ laws


def test_a_network_is_like_itself_however_it_is_turned_and_scaled() -> None:
    """A rotation of hidden units and a scale that the next layer undoes: other weights, the same features."""
    x, a = normal(50, 6), nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(5, 2)).double()
    b = copy.deepcopy(a)
    Q = torch.linalg.qr(normal(8, 8))[0]
    with torch.no_grad():
        b[0].weight.copy_(3 * Q @ a[0].weight)
        b[0].bias.copy_(3 * Q @ a[0].bias + 1)
        b[1].weight.copy_(a[1].weight @ Q.T / 3)
        b[1].bias.copy_(a[1].bias - a[1].weight @ Q.T.sum(1) / 3)
    for debiased in (False, True):
        seen = compare(a, b, richter.Probe(x, None), debiased=debiased, features=5)
        np.testing.assert_allclose(seen.cka.diagonal(), 1, rtol=1e-9)
        np.testing.assert_allclose(seen.overlap.diagonal(), 1, rtol=1e-9)
        np.testing.assert_allclose(seen.features("1", "1"), np.eye(5), atol=1e-8)
        other = compare(b, a, richter.Probe(x, None), debiased=debiased, features=5)
        np.testing.assert_allclose(other.cka, seen.cka.T, rtol=1e-9)


def test_independent_features_have_a_debiased_cka_about_0() -> None:
    """Which the plain one of few examples is far from."""
    plain, debiased = [], []
    for seed in range(30):
        X, Y = normal(20, 40, seed=seed), normal(20, 40, seed=1000 + seed)
        plain.append(richter.kernels.cka(X @ X.T, Y @ Y.T))
        debiased.append(richter.kernels.cka(X @ X.T, Y @ Y.T, debiased=True))
        assert debiased[-1] == pytest.approx(oracles.debiased_cka(X, Y), rel=1e-8)
    assert np.mean(plain) > 0.5
    assert abs(np.mean(debiased)) < 2.5 * np.std(debiased) / math.sqrt(30)
    assert np.std(debiased) < 0.2


def test_the_debiased_alignment_of_any_kernels() -> None:
    X = normal(12, 3)
    K, L = (-torch.cdist(X, X)).exp(), (X @ X.T + 1) ** 2
    A, B = (M - M.diagonal().diag() for M in (K, L))
    n, one = 12, torch.ones(12, dtype=D)

    def hsic(A: Tensor, B: Tensor) -> Tensor:
        return (A * B).sum() + A.sum() * B.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (one @ A @ B @ one)
    exact = (hsic(A, B) / (hsic(A, A) * hsic(B, B)).sqrt()).item()
    assert richter.kernels.cka(K, L, debiased=True) == pytest.approx(exact, rel=1e-10)
    assert richter.kernels.cka(K, 3 * K + 2, debiased=True) == pytest.approx(1, rel=1e-10)
    assert math.isnan(richter.kernels.cka(K, torch.ones(n, n), debiased=True))
    with pytest.raises(SelectionError, match=r"kernels of 3 examples are too few for the debiased alignment, which needs 4."):
        richter.kernels.cka(K[:3, :3], L[:3, :3], debiased=True)


def test_the_overlap_of_random_features_is_chance() -> None:
    n, overlaps = 60, []
    for seed in range(20):
        grams = [{"0": likeness.centred((X @ X.T).numpy())} for X in (normal(n, 30, seed=seed), normal(n, 30, seed=500 + seed))]
        seen = of_grams(*grams, ("a", "b"), features=6)
        overlaps.append(seen.overlap[0, 0])
    assert np.mean(overlaps) == pytest.approx(seen.chance, rel=0.15)
    assert seen.chance == pytest.approx(6 / 59)


@pytest.mark.parametrize("rank", [700, 3, 0])
def test_leading_eigenpairs_of_a_large_matrix_are_those_of_all(rank: int) -> None:
    """Found by Lanczos, which has nothing to begin with where a layer is dead."""
    K = torch.zeros(700, 700, dtype=D) if not rank else (lambda X: X @ X.T)(normal(700, rank))
    values, vectors = leading_eigenpairs(K, 10)
    assert len(values) == min(10, rank)
    torch.testing.assert_close(values, torch.linalg.eigvalsh(K).flip(0)[:len(values)], rtol=1e-10, atol=0)
    torch.testing.assert_close(K @ vectors, vectors * values, rtol=0, atol=1e-9)


# --------------------------------------------------------------------------------------------------- checkpoints and words


def test_checkpoints_of_one_model_and_the_model_is_left_as_it_was() -> None:
    model = zoo.CASES["cnn_modes"].build().train()
    x, y = zoo.CASES["cnn_modes"].batch(10)
    first = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(normal(*p.shape, seed=p.numel()) * 0.3)
    now = {k: v.clone() for k, v in model.state_dict().items()}
    seen = compare((model, first), model, richter.Probe(x, y))
    assert model.training
    assert all(torch.equal(v, now[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    other = copy.deepcopy(model)
    other.load_state_dict(first)
    np.testing.assert_allclose(seen.cka, compare(other, model, richter.Probe(x, y)).cka, rtol=1e-10)
    assert seen.cka[0, 0] == pytest.approx(1)
    assert seen.cka.diagonal()[-1] < 0.99


def test_layers_that_read_the_same_are_one_and_names_may_differ() -> None:
    case = zoo.CASES["gpt"]
    x, y = case.batch(8)
    model = case.build()
    seen = compare(model, case.build(seed=2), richter.Probe(x, y), output=case.output)
    names = [k for k in seen.layers[0] if k.endswith((".q", ".k", ".v"))]
    assert names
    assert all(k.endswith(".q") for k in names)
    a, b = mlp([6, 8, 3], seed=0).double(), nn.Sequential(nn.Flatten(), mlp([6, 8, 3], seed=1).double())
    seen = compare(a, b, richter.Probe(normal(20, 6), None), layers="2", layers_b="1.2")
    assert seen.layers == (("2", "outputs"), ("1.2", "outputs"))


def test_it_says_what_it_saw() -> None:
    x, a, b = normal(30, 6), mlp([6, 8, 3], seed=0).double(), mlp([6, 5, 4, 3], seed=1).double()
    seen = compare(a, b, richter.Probe(x, None), names=("small", "deep"), features=3)
    assert str(seen).startswith("small and deep on 30 examples: CKA of what each layer reads, and overlap of the 3 leading "
                                "features (up to 0.10 by chance)\nlayer    beside")
    lines = str(compare(a, a, richter.Probe(x, None), debiased=True)).splitlines()
    assert lines[1].split() == ["layer", "debiased", "CKA", "overlap"]
    figure = seen.plot()
    assert [ax.get_title() for ax in figure.axes] == ["CKA of features", "overlap of 3 leading features"]
    written = [t.get_text() for t in figure.axes[0].texts]
    assert written == [f"{v:.2f}" for v in seen.cka.ravel()]
    with pytest.raises(SelectionError, match=r"small has no layer '7'"):
        seen.features("7", "0")


def test_a_constant_layer_has_no_number() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    seen = compare(model, mlp([4, 5, 2]).double(), richter.Probe(normal(20, 4), None))
    assert np.isnan(seen.cka[1]).all()
    assert np.isnan(seen.overlap[1]).all()
    assert np.isfinite(seen.cka[0]).all()
    assert "undefined" in str(seen)
    seen.plot()


class Overflowing(nn.Module):
    """Some hidden features of late examples are infinite; the outputs are not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nan_to_num(self.b(self.a(x) + torch.where(x[:, :1] > 100, math.inf, 0.0)))


def test_features_that_are_not_finite_are_refused() -> None:
    x, model = normal(30, 6), Overflowing().double()
    x[20, 0] = 1000.0
    with pytest.raises(DivergedError, match=r"layer 'b' reads NaN or Inf on some examples .* leave it out with layers="):
        compare(model, model, richter.Probe(x, None))
    assert compare(model, model, richter.Probe(x, None), layers="a").layers[0] == ("a", "outputs")


def test_mistakes_are_said_in_a_sentence() -> None:
    x, model = normal(30, 6), mlp([6, 8, 3]).double()
    probe = richter.Probe(x, None)
    with pytest.raises(SelectionError, match=r"probe is a Tensor; make one with richter\.Probe"):
        compare(model, model, x)  # type: ignore[arg-type]
    with pytest.raises(SelectionError, match=r"b is a OrderedDict; a model is needed, or \(model, state_dict\)"):
        compare(model, model.state_dict(), probe)  # type: ignore[arg-type]
    with pytest.raises(SelectionError, match="features=0: the number of leading eigenfunctions to compare must be at least 1"):
        compare(model, model, probe, features=0)
    with pytest.raises(ProbeError, match="the probe has 3 examples: a comparison of features needs 4 with the debiased estimate"):
        compare(model, model, richter.Probe(x[:3], None), debiased=True)
    with pytest.raises(SelectionError, match=r"weights\[.0.weight.\] has shape .* it is the state of another architecture"):
        compare(model, (model, mlp([6, 9, 3]).state_dict()), probe)
    ids = torch.randint(0, 7, (12, 6))
    pooled = nn.Sequential(nn.Embedding(7, 5), nn.Flatten(), nn.Linear(30, 3)).double()
    with pytest.raises(SelectionError, match="one network read a vector for each token, those of the other one for each example"):
        compare(nn.Sequential(Language(dim=5, vocabulary=7)).double(), pooled, richter.Probe(ids, None))


# ------------------------------------------------------------------------------------------------------ what runs have kept


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs on the same examples, one on others, one without features; weights drift at random."""
    store = tmp_path_factory.mktemp("runs")
    x, y = normal(40, 1, 4, 4), torch.arange(40) % 2
    for name, seed, mine, options in (("a", 0, x, {"keep_inputs": True}), ("b", 1, x, {}), ("other", 0, x + 1, {}),
                                      ("without", 0, x, {"keep_features": 0})):
        model = nn.Sequential(nn.Flatten(), mlp([16, 12, 2], seed=seed)).double()
        with richter.Observer(model, richter.Probe(mine, y), run=store / name, measures=["nfc", "magnitude"], when=1, budget=None,
                              settings={"seed": seed}, **{"keep_features": 24, **options}) as watch:
            for step in range(3):
                watch(step)
                if name == "a" and step in (0, 2):
                    torch.save(model.state_dict(), store / f"{step}.pt")
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(normal(*p.shape, seed=step) * 0.1)
    return store


def test_steps_of_a_run_are_compared_by_what_it_kept(watched: Path) -> None:
    a = richter.runs.load(watched / "a")
    x, y = normal(40, 1, 4, 4), torch.arange(40) % 2
    states = [torch.load(watched / f"{step}.pt", weights_only=True) for step in (0, 2)]
    model = nn.Sequential(nn.Flatten(), mlp([16, 12, 2])).double()
    rows = richter.Probe(x, y, kernel_examples=24).kernel_rows()
    for debiased in (False, True):
        seen = between(a, a, (0, 2), debiased=debiased, features=3)
        exact = compare((model, states[0]), (model, states[1]), richter.Probe(x[rows], None), debiased=debiased, features=3)
        assert seen.layers == exact.layers == (("1.0", "1.2", "outputs"),) * 2
        assert seen.rows == 24
        np.testing.assert_allclose(seen.cka, exact.cka, atol=2e-6)  # they are kept in single precision
        np.testing.assert_allclose(seen.overlap, exact.overlap, atol=2e-5)
        np.testing.assert_allclose(seen.shares[0], exact.shares[0], atol=2e-5)
    assert between(a, a, (0, 1)).cka[2, 2] != between(a, a, (0, 2)).cka[2, 2]
    assert str(between(a, a, (0, 5))).startswith("a, step 0 and a, step 2 on 24 examples")


def test_what_is_kept_is_bounded_and_said(watched: Path) -> None:
    a = richter.runs.load(watched / "a")
    assert [s for k, n, s in a.arrays if n == "inputs"] == [0]
    pictures = a.array("inputs")
    assert pictures.dtype == np.uint8
    assert pictures.shape == (24, 1, 4, 4)
    assert pictures.max() == 255
    assert a.about["features"]["layers"] == ["1.0", "1.2", "outputs"]
    assert len(a.about["features"]["classes"]) == 24
    K = a.array("feature_gram", "1.2", 2)
    assert K.dtype == np.float32
    assert K.shape == (24, 24)
    assert np.abs(K.sum(0)).max() < 1e-4
    x, model = normal(8, 3), mlp([3, 4, 2]).double()
    for n in (1, 5000, 2.5):
        with pytest.raises(SelectionError, match=f"keep_features={n}: how many examples of the probe the kept Gram matrices are"):
            richter.Observer(model, richter.Probe(x, None), keep_features=n)  # type: ignore[arg-type]
    with pytest.raises(SelectionError, match=r"keep_inputs=True: the inputs are a tensor \[8, 3\], which are no pictures"):
        richter.Observer(model, richter.Probe(x, None), keep_features=8, keep_inputs=True)
    large = Keepsakes(nn.Flatten(), richter.Probe(normal(300, 3 * 90 * 70).float(), None), 300, (3, 90, 70))
    assert large.pictures is not None
    assert large.pictures.shape == (256, 3, 64, 50)


def test_features_of_tokens_are_kept_of_fewer_examples() -> None:
    ids = torch.randint(0, 7, (40, 6), generator=torch.Generator().manual_seed(0))
    kept = Keepsakes(nn.Sequential(Language(dim=5, vocabulary=7)).double(), richter.Probe(ids, None), 30)
    assert {K.shape for K in kept.take().values()} == {(30, 30)}
    assert len(kept.rows) == 5


def test_watching_features_changes_no_number_and_no_weight(tmp_path: Path) -> None:
    def trained(**options: Any) -> tuple[dict[str, Tensor], list[float]]:
        model = mlp([5, 8, 2], seed=0)
        x, y = normal(32, 5).float(), torch.arange(32) % 2
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        watch = richter.Observer(model, richter.Probe(x, y), measures=["nfc"], when=1, budget=None, **options)
        for step in range(4):
            watch(step)
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()
        return model.state_dict(), watch.frame.value.tolist()
    plain, kept = trained(), trained(keep_features=16, run=tmp_path / "run")
    assert all(torch.equal(v, kept[0][k]) for k, v in plain[0].items())
    assert plain[1] == kept[1]


def test_features_are_kept_when_matrices_are(tmp_path: Path) -> None:
    """Whenever the step has grown by a tenth, also by those who keep no matrices."""
    for name, matrices in (("both", None), ("alone", 0)):
        model = mlp([5, 8, 2], seed=0).double()
        watch = richter.Observer(model, richter.Probe(normal(32, 5), torch.arange(32) % 2), measures=["nfc"], when=1, budget=None,
                                 keep_features=8, matrices=matrices, run=tmp_path / name)
        for step in range(15):
            watch(step)
        watch.close()
    both, alone = (richter.runs.load(tmp_path / name) for name in ("both", "alone"))
    assert steps_of(both) == steps_of(alone) == [*range(12), 13]
    assert sorted({s for _, name, s in both.arrays if name == "nfm"}) == steps_of(both)
    assert not [name for _, name, _ in alone.arrays if name == "nfm"]


def test_a_failure_to_keep_features_costs_no_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = mlp([5, 8, 2], seed=0).double()
    watch = richter.Observer(model, richter.Probe(normal(32, 5), torch.arange(32) % 2), measures=["nfc"], when=1, budget=None,
                             keep_features=16, run=tmp_path / "run")
    watch(0)

    def fails(*_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")
    monkeypatch.setattr(Keepsakes, "take", fails)
    with pytest.warns(UserWarning, match="features not kept"):
        assert watch(1) is not None
    assert watch.failures[-1].reason.startswith("features not kept")
    assert steps_of(richter.runs.load(tmp_path / "run")) == [0]


def test_runs_that_cannot_be_compared_say_why(watched: Path) -> None:
    a, other, without = (richter.runs.load(watched / k) for k in ("a", "other", "without"))
    with pytest.raises(SelectionError, match="the runs a and other have kept features of different examples"):
        between(a, other)
    with pytest.raises(SelectionError, match="the run without has kept no features of its probe: watch with Observer"):
        between(a, without)
    with pytest.raises(SelectionError, match="has kept no features at or before step -3; the first are of step 0"):
        between(a, a, (-3, 2))
    with pytest.raises(SelectionError, match="3 examples are too few for the debiased alignment, which needs 4"):
        of_grams({"0": np.eye(3)}, {"0": np.eye(3)}, ("a", "b"), debiased=True)
    with pytest.raises(SelectionError, match="Gram matrices of 3, 4 examples cannot be compared"):
        of_grams({"0": np.eye(3)}, {"0": np.eye(4)}, ("a", "b"))


# ------------------------------------------------------------------------------------------------------- the command line


def run_cli(*words: Any) -> None:
    assert main(["compare", *map(str, words)]) == 0


def test_the_command_compares_runs_and_steps(watched: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_cli(watched / "a", watched / "b", "--figures", tmp_path / "pictures")
    text = capsys.readouterr().out
    assert text.startswith("Settings that differ:\nseed: 0, 1\n\nmeasure")
    assert "a, step 2 and b, step 2 on 24 examples: CKA" in text
    assert (tmp_path / "pictures" / "compare.svg").exists()
    run_cli(watched / "a", "--steps", 0, 2, "--json", "--debiased", "--features", 3, "--measures", "nfc")
    record = json.loads(capsys.readouterr().out)
    seen = between(richter.runs.load(watched / "a"), richter.runs.load(watched / "a"), (0, 2), debiased=True, features=3)
    np.testing.assert_allclose(record["cka"], seen.cka)
    assert {p["measure"] for p in record["rows_of_both"]} == {"nfc"}
    assert record["names"] == ["a, step 0", "a, step 2"]
    run_cli(watched / "a", watched / "without")
    assert "Features cannot be compared: a run stores them only with" in capsys.readouterr().out


def test_the_command_compares_checkpoints(watched: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "made_here.py").write_text("from torch import nn\nfrom richter.models import mlp\n"
                                           "def make():\n    return nn.Sequential(nn.Flatten(), mlp([16, 12, 2])).double()\n"
                                           "def wrong():\n    return 3\n")
    np.save(tmp_path / "x.npy", normal(30, 1, 4, 4).numpy())
    model = ("--model", "made_here:make", "--data", tmp_path / "x.npy")
    run_cli(watched / "a", watched / "2.pt", *model, "--layers", "1.2")  # a run: its initial weights
    assert "a and 2.pt on 30 examples" in capsys.readouterr().out
    run_cli(watched / "0.pt", watched / "2.pt", *model, "--json", "--examples", 20)
    assert json.loads(capsys.readouterr().out)["rows"] == 20
    for words, sentence in (((watched / "0.pt", watched / "2.pt"), "0.pt is not a run. To compare checkpoints, give the model"),
                            ((watched / "a",), "only one run was given, a. Name another run, or two of its steps"),
                            ((watched / "0.pt", *model), "two checkpoint files are needed"),
                            ((watched / "0.pt", "none.pt", *model), "there is no file none.pt"),
                            ((watched / "0.pt", "made_here.py", *model), "made_here.py could not be read as weights"),
                            ((watched / "0.pt", "x.npy", *model), "could not be read as weights"),
                            ((watched / "0.pt", watched / "2.pt", "--model", "made_here:wrong"), "returned a int, not a torch"),
                            ((watched / "0.pt", watched / "2.pt", "--model", "made_here:no"), "has no attribute 'no'"),
                            ((watched / "0.pt", watched / "2.pt", "--model", "made_here"), "as module:function"),
                            ((watched / "0.pt", watched / "2.pt", *model[:2], "--data", "dogs"), "has no data set 'dogs'"),
                            ((watched / "a", watched / "b", "--measures", "dogs"), "'dogs' has not been measured in both")):
        assert main(["compare", *map(str, words)]) != 0
        assert sentence in capsys.readouterr().err.replace("\n", " ")


class Malice:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("touched"),))


def test_files_of_strangers_are_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Malice()}, "evil.pt")
    (tmp_path / "evil.npy").write_bytes(b"\x93NUMPY\x01\x00" + b"not an array")
    with pytest.raises(StoreError, match=r"evil.pt could not be read as weights .* read as numbers only, because code in a"):
        checkpoints.load(Path("evil.pt"))
    with pytest.raises(StoreError, match=r"evil.npy could not be read as arrays"):
        checkpoints.examples("evil.npy", 3)
    assert not (tmp_path / "touched").exists()
    torch.save({"model": {"w": torch.ones(2)}, "epoch": 3}, "good.pt")
    save_file({"w": torch.ones(2)}, "good.safetensors")
    assert checkpoints.load(Path("good.pt"))["w"].tolist() == checkpoints.load(Path("good.safetensors"))["w"].tolist() == [1, 1]
    torch.save({"epoch": 3}, "empty.pt")
    with pytest.raises(StoreError, match=r"empty.pt contains no state_dict: give a mapping of names to tensors"):
        checkpoints.load(Path("empty.pt"))


def test_the_examples_of_the_page_print_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "compare.md").read_text()
    names: dict[str, Any] = {}
    comparing, keeping = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(comparing, names)
    shown = re.findall(r"```\n\n```\n(.*?)```", page, re.DOTALL)[0]
    numbers = [[float(v) for v in re.findall(r"\d+\.\d+", text)] for text in (capsys.readouterr().out, shown)]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.02)
    assert (tmp_path / "compare.png").stat().st_size > 10_000
    exec(keeping, names)
    assert capsys.readouterr().out.count("on 64 examples: debiased CKA") == 2
