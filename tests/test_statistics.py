"""Statistics of one's own, written outside the package: gathered per example, estimated where they do not fit, of several passes,
of the initial network, of the snapshot before, of held-out examples; and operators."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracles
import richter
from richter.core import WHOLE, Mark, Ref, Remark
from richter.instrument.cotangents import Cotangents, every_output, random_outputs
from richter.instrument.statistics import (
    CENTRED_KERNEL,
    FEATURES,
    LABELS,
    MATRIX,
    PTK_COVARIANCE,
    TANGENT_KERNEL,
    WEIGHT_GRADIENT,
    Gathering,
    HeldOut,
    Initial,
    Moment,
    Operator,
    Previous,
    Reading,
    Statistic,
    Wants,
    passes,
)
from richter.instrument.stream import Share
from richter.instrument.subject import Subject
from richter.measures import Measure, catalogue
from richter.models import mlp
from richter.testing import check_measure

REF = Ref("here", "Sec. 1")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(k: int = 3, seed: int = 0) -> nn.Sequential:
    return mlp([5, 7, k], seed=seed).double()


def probe(n: int = 20, k: int = 3, **options: Any) -> richter.Probe:
    return richter.Probe(draw(n, 5), torch.arange(n) % k, **options)


# ------------------------------------------------------------------------------------------- gathered example by example


@dataclass(frozen=True)
class Sensitivity(Statistic):
    """|dz| of every example: the norm of what all outputs ask of a layer. Where there are very many examples, of the first 16."""

    name: str = "sensitivity"
    first: int | None = None

    def planned(self, subject: Subject, cotangents: Cotangents) -> Statistic | str:
        if not cotangents.exact:
            return "random outputs have other norms: pick outputs with output="
        fits = 8 * subject.probe.n <= subject.memory // 1000
        return self if fits else Sensitivity("sensitivity of the first", 16)

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        return Wants(tuple(subject.maps), held=8 * subject.probe.n, what="a number for each example")

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        n = min(subject.probe.n, self.first or subject.probe.n)
        remark = Remark(Mark.ESTIMATED, f"of {n} examples") if n < subject.probe.n else Remark()
        return Sensitivities({k: torch.zeros(n, dtype=torch.float64) for k in subject.maps}, {"examples": min(8, n)}, remark)


@dataclass
class Sensitivities(Gathering):
    squares: dict[str, Tensor]
    groups: dict[str, int]
    remark: Remark

    def add(self, reading: Reading) -> None:
        for name, total in self.squares.items():
            c = reading.capture(name)
            assert c is not None
            for i, example in enumerate(reading.examples):
                if example < len(total):
                    total[example] += c.g[:, i].square().sum()  # blocks of cotangents add up

    def merge(self, other: Sensitivities) -> None:
        for name, total in self.squares.items():
            total += other.squares[name]

    def value(self, place: str, without: tuple[str, int] | None = None) -> Tensor:
        values = self.squares[place].sqrt()
        return values if without is None else values[torch.arange(len(values)) % self.groups["examples"] != without[1]]


SPREAD = Measure("sensitivity_spread", lambda s: (s.std() / s.mean()).item(), (Sensitivity(),), ref=REF)


def test_a_statistic_gathered_per_example() -> None:
    check_measure(SPREAD)
    model, p = network(), probe()
    snap = richter.measure(model, p, ["nfc", SPREAD])
    _, _, J = oracles.layer_io(model, p.x, "0")  # n k s o
    norms = J.flatten(1).norm(dim=1)
    assert snap.value("sensitivity_spread", "0") == pytest.approx((norms.std() / norms.mean()).item(), rel=1e-12)
    left_out = [norms[torch.arange(20) % 8 != g] for g in range(8)]
    spread = torch.tensor([(v.std() / v.mean()).item() for v in left_out], dtype=torch.float64)
    assert snap.error("sensitivity_spread", "0") == pytest.approx((7 / 8 * (spread - spread.mean()).square().sum()).sqrt().item())
    assert snap.row("sensitivity_spread", "0").mark is Mark.EXACT


def test_its_estimate_stands_in_and_says_so() -> None:
    snap = richter.measure(network(), probe(), [SPREAD], memory=100_000)
    assert snap.note("sensitivity_spread", "0") == "of 16 examples"
    assert snap.row("sensitivity_spread", "0").mark is Mark.ESTIMATED
    few = richter.measure(network(), richter.Probe(probe().x[:16], probe().y[:16]), [SPREAD])
    assert snap.value("sensitivity_spread", "0") == few.value("sensitivity_spread", "0")


def test_what_cannot_be_estimated_has_no_number_and_a_reason() -> None:
    row = richter.measure(network(), probe(), [SPREAD], cotangents=random_outputs(4)).row("sensitivity_spread", "0")
    assert math.isnan(row.value)
    assert "random outputs have other norms" in row.note
    assert row.mark is Mark.UNDEFINED


def plain_cka(K: Tensor, labels: Any) -> float:
    n, v = K.shape[:2]
    K, y = K.reshape(n * v, n * v), labels.Y.reshape(-1)
    y, C = y - y.mean(), torch.eye(n * v, dtype=K.dtype) - 1 / (n * v)
    return (y @ K @ y / ((C @ K @ C).norm() * (y @ y))).item()


PLAIN = Measure("plain_cka", plain_cka, (TANGENT_KERNEL, LABELS), ref=REF)


def test_the_kernel_itself_is_never_that_of_random_outputs() -> None:
    """The formula of tangent_cka, written with the kernel: on 80 outputs the kernel of random ones gave another number."""
    model, p = network(80), probe(k=80, kernel=6)
    K, Y = oracles.tangent_kernels(model, p.x[p.kernel_rows()]), p.targets(torch.Size((20, 80)))[0][p.kernel_rows()]
    snap = richter.measure(model, p, [PLAIN, "tangent_cka"])
    for layer in ("0", "2"):
        assert snap.value("plain_cka", layer) == pytest.approx(float(oracles.tangent_cka(K[layer], Y)), rel=1e-9)
    assert snap.row("plain_cka").mark is Mark.EXACT
    assert snap.row("tangent_cka").mark is Mark.ESTIMATED


@pytest.mark.parametrize(("options", "words"), [
    ({"memory": "1MiB"}, "the kernel of 80 outputs and 6 examples needs memory='8.96MiB'"),
    ({"cotangents": random_outputs(8)}, "needs the kernel itself, and 8 random outputs of 80 give another one"),
])
def test_a_kernel_that_cannot_be_had_has_a_reason(options: dict[str, Any], words: str) -> None:
    row = richter.measure(network(80), probe(k=80, kernel=6), [PLAIN], **options).row("plain_cka")
    assert math.isnan(row.value)
    assert words in row.note


# ----------------------------------------------------------------------------------------------------- several passes


@dataclass(frozen=True)
class Within(Statistic):
    """Variance of the outputs within classes: means of classes in a first pass, what is centred on them in a second."""

    name: str = "within"
    place: Any = "model"

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        return Wants(outputs=True, backward=False)

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return Classes(len(subject.Y[0]))  # type: ignore[index]


@dataclass
class Classes(Gathering):
    k: int
    groups: dict[str, int] = field(default_factory=dict)
    remark: Remark = field(default_factory=Remark)
    passes: int = 0
    sums: Tensor | None = None
    squares: float = 0.0
    n: int = 0

    def add(self, reading: Reading) -> None:
        Y, f = reading.Y, reading.f.double()
        assert Y is not None
        if self.passes == 0:
            stacked = torch.cat([Y.T @ f, Y.sum(0)[:, None]], 1)
            self.sums = stacked if self.sums is None else self.sums + stacked
        else:
            assert self.sums is not None
            means = self.sums[:, :-1] / self.sums[:, -1:]
            self.squares += (f - Y @ means).square().sum().item()
            self.n += len(f)

    def again(self) -> bool:
        self.passes += 1
        return self.passes < 2

    def value(self, place: str, without: tuple[str, int] | None = None) -> float:
        return self.squares / self.n


@pytest.mark.parametrize("chunk", [256, 7])
def test_a_statistic_of_two_passes(chunk: int) -> None:
    model, p = network(), probe(chunk=chunk)
    measure = Measure("within", lambda v: v, (Within(),), ref=REF)
    snap = richter.measure(model, p, [measure, "nfc"])
    f, y = model(p.x).detach(), p.y
    means = torch.stack([f[y == c].mean(0) for c in range(3)])
    assert snap.value("within") == pytest.approx((f - means[y]).square().sum(1).mean().item(), rel=1e-12)
    assert [r.layer for r in snap.rows if r.measure == "within"] == [WHOLE]
    assert math.isfinite(snap.value("nfc", "0"))  # in the same first pass


# ------------------------------------------------------------------------------------- another network, other examples


def test_a_statistic_of_the_initial_network() -> None:
    """K of the initial network is what measuring the initial network gives, and it is gathered once."""
    now = Measure("now", lambda K: K.trace().item(), (PTK_COVARIANCE,), ref=REF)
    then = Measure("then", lambda K: K.trace().item(), (Initial(PTK_COVARIANCE),), ref=REF)
    check_measure(then)
    model, first, p = network(), network(seed=1), probe()
    snap = richter.measure(model, p, [now, then], initial=first.state_dict())
    for layer in ("0", "2"):
        assert snap.value("then", layer) == richter.measure(first, p, [now]).value("now", layer)
        assert snap.error("then", layer) == richter.measure(first, p, [now]).error("now", layer)
        assert layer == "2" or snap.value("then", layer) != snap.value("now", layer)
    assert "needs the initial weights" in richter.measure(model, p, [then]).note("then", "0")
    watch = richter.Observer(model, p, measures=[now, then], initial=first.state_dict(), when=1, budget=None)
    watch(0)
    kept = dict(watch.measurement.subject.kept)
    assert len(kept) == 1
    model[0].weight.data.mul_(2)
    again = watch(1)
    assert watch.measurement.subject.kept == kept
    assert again is not None
    assert again.value("then", "0") == snap.value("then", "0")


def test_a_kernel_of_the_initial_network() -> None:
    """How far a kernel has turned from its initial one."""
    def overlap(K: Tensor, K0: Tensor) -> float:
        return ((K * K0).sum() / (K.norm() * K0.norm())).item()

    turned = Measure("turned", overlap, (TANGENT_KERNEL, Initial(TANGENT_KERNEL)), ref=REF)
    model, first, p = network(), network(seed=1), probe()
    snap = richter.measure(model, p, [turned], initial=first.state_dict())
    K, K0 = oracles.tangent_kernels(model, p.x), oracles.tangent_kernels(first, p.x)
    K[WHOLE], K0[WHOLE] = sum(K.values()), sum(K0.values())  # type: ignore[assignment]
    for layer in ("0", "2", WHOLE):
        assert snap.value("turned", layer) == pytest.approx(overlap(K[layer], K0[layer]), rel=1e-10)
        assert 0 < snap.error("turned", layer) < 0.2


STEP = Measure("step_size", lambda W, before: (W - before).norm().item(), (MATRIX, Previous(MATRIX)), ref=REF)


def test_a_statistic_of_the_snapshot_before(tmp_path: Path) -> None:
    model, p = network(), probe()
    assert "no earlier snapshot" in richter.measure(model, p, [STEP]).note("step_size", "0")
    watch = richter.Observer(model, p, measures=[STEP], when=1, budget=None, run=tmp_path / "run")
    first = watch(0)
    assert first is not None
    assert first.row("step_size", "0").mark is Mark.UNDEFINED
    before = model[0].weight.detach().clone()
    model[0].weight.data.add_(0.1)
    second = watch(1)
    assert second is not None
    assert second.value("step_size", "0") == pytest.approx((model[0].weight - before).norm().item(), rel=1e-12)
    watch.close()
    before = model[0].weight.detach().clone()
    model[0].weight.data.mul_(3)
    resumed = richter.Observer(model, p, measures=[STEP], when=1, budget=None, run=tmp_path / "run", resume=True)
    third = resumed(2)
    assert third is not None
    assert third.value("step_size", "0") == pytest.approx((model[0].weight - before).norm().item(), rel=1e-12)


def test_a_statistic_of_held_out_examples() -> None:
    mean = Moment("read", lambda c: c.h.sum((0, 1)))
    gap = Measure("gap", lambda a, b: (a - b).norm().item(), (mean, HeldOut(mean)), ref=REF)
    model, p = network(), probe()
    x2, y2 = draw(30, 5, seed=5), torch.arange(30) % 3
    snap = richter.measure(model, probe(held_out=(x2, y2)), [gap, "nfc"])
    assert snap.value("gap", "0") == pytest.approx((p.x.mean(0) - x2.mean(0)).norm().item(), rel=1e-12)
    assert "Probe(x, y, held_out=(x2, y2))" in richter.measure(model, p, [gap]).note("gap", "0")

    def jackknifed(x: Tensor, other: Tensor, value: Any) -> float:
        left = torch.tensor([value(x[torch.arange(len(x)) % 8 != g].mean(0), other.mean(0)) for g in range(8)])
        return (7 / 8 * (left - left.mean()).square().sum()).item()

    distance = lambda a, b: (a - b).norm().item()  # noqa: E731
    variance = jackknifed(p.x, x2, distance) + jackknifed(x2, p.x, distance)  # both samples are left out in turn
    assert snap.error("gap", "0") == pytest.approx(math.sqrt(variance), rel=1e-5)


@pytest.mark.parametrize(("given", "sentence"), [
    (draw(4, 5), "a pair \\(x2, y2\\) is needed"),
    ((draw(4, 6), torch.arange(4) % 3), r"inputs \[6\] beside \[5\]"),
    ((draw(4, 5), None), "labels in one of them only"),
    ((draw(1, 5), torch.arange(1)), "has one example"),
])
def test_held_out_examples_that_do_not_fit(given: Any, sentence: str) -> None:
    with pytest.raises(richter.RichterError, match=sentence):
        probe(held_out=given)


def test_features_are_what_layers_read() -> None:
    rank = Measure("rank", lambda Phi: float(torch.linalg.matrix_rank(Phi)), (FEATURES,), ref=REF)
    model, p = network(), probe(chunk=6)
    snap = richter.measure(model, p, [rank, Measure("first", lambda Phi: Phi[3, 2].item(), (FEATURES,), ref=REF)])
    hidden = model[1](model[0](p.x)).detach()
    assert snap.value("rank", "0") == 5
    assert snap.value("rank", "2") == torch.linalg.matrix_rank(hidden)
    assert snap.value("first", "2") == pytest.approx(hidden[3, 2].item(), rel=1e-12)


# ---------------------------------------------------------------------------------------------------------- operators


def curvature(f: Tensor, Y: Tensor | None, parameters: Any, vectors: Any) -> Any:
    assert Y is not None
    g = torch.autograd.grad(((f - Y) ** 2).sum(), parameters, create_graph=True)
    return torch.autograd.grad(sum((a * v).sum() for a, v in zip(g, vectors, strict=True)), parameters)


@pytest.mark.parametrize("chunk", [256, 3])
def test_an_operator_multiplies_by_the_hessian(chunk: int) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    p = probe(chunk=chunk)
    Y = p.targets(torch.Size((20, 3)))[0]
    H = Operator("curvature", curvature)

    def product(A: Any) -> float:
        v = draw(A.size, seed=3)
        return float(v @ A(v))

    snap = richter.measure(model, p, [Measure("vHv", product, (H,), ref=REF),
                                      Measure("trace", lambda A: A.trace(400)[0], (H,), ref=REF)])
    names = [name for name, _ in model.named_parameters()]
    flat = torch.cat([q.detach().reshape(-1) for q in model.parameters()])

    def loss(theta: Tensor) -> Tensor:
        pieces = theta.split([q.numel() for q in model.parameters()])
        state = {n: piece.view_as(q) for n, piece, q in zip(names, pieces, model.parameters(), strict=True)}
        return (torch.func.functional_call(model, state, (p.x,)) - Y).square().sum() / 20

    exact = torch.autograd.functional.hessian(loss, flat)
    v = draw(len(flat), seed=3)
    assert snap.value("vHv") == pytest.approx((v @ exact @ v).item(), rel=1e-10)
    assert snap.value("trace") == pytest.approx(exact.trace().item(), rel=0.2)
    assert [r.layer for r in snap.rows if r.measure == "vHv"] == [WHOLE]


# -------------------------------------------------------------------------------------------------------------- ranks


@pytest.mark.parametrize("statistic", [PTK_COVARIANCE, WEIGHT_GRADIENT, FEATURES, Sensitivity()], ids=lambda s: s.name)
def test_ranks_that_share_the_chunks_add_up(statistic: Statistic) -> None:
    """Two processes, each with every other chunk, have together what one has alone."""
    subject = Subject(network(), probe(chunk=3), None, None, 2 ** 30, None)
    subject.renew()
    key = (statistic, every_output)
    plan = passes.planned(subject, [key])
    whole = passes.gather(subject, plan)[key]
    first, second = (passes.gather(subject, plan, Share(rank, 2))[key] for rank in range(2))
    first.gathering.merge(second.gathering)  # type: ignore[attr-defined]
    for layer in ("0", "2"):
        for without in (None, ("examples", 1)):
            a, b = whole.value(layer, without), first.gathering.value(layer, without)  # type: ignore[attr-defined]
            assert torch.allclose(a, b, rtol=1e-12, atol=0)


def test_every_shipped_statistic_has_a_place_and_a_use() -> None:
    for m in catalogue().values():
        assert m.needs
        for s in m.needs:
            assert s.place in ("map", "module", "model", "any")
            assert s.use in ("mean", "kernel")
    assert CENTRED_KERNEL.use == "kernel"
