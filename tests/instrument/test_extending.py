"""Everything that can be added, added from outside the package: statistics gathered per example and estimated where they do not
fit, of several passes, of the initial network, of the snapshot before, of held-out examples; operators; a layer, a theory, an
experiment, a task, a learner's kernel, a view of the dashboard, a command. docs/extending.md has a page for each."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import oracles
import richter
import richter.cli
from richter.commands import Command
from richter.core import WHOLE, Card, Interval, Mark, Ref, Remark, Row, SelectionError
from richter.experiments import Claim, Control, Experiment
from richter.instrument.cotangents import Cotangents, SomeOutputs, every_output, loss_gradient, random_outputs
from richter.instrument.statistics import (
    CENTRED_KERNEL,
    FEATURES,
    LABELS,
    MATRIX,
    PTK_COVARIANCE,
    TANGENT_KERNEL,
    WEIGHT_GRADIENT,
    Derived,
    Gathering,
    HeldOut,
    Initial,
    Moment,
    Operator,
    Previous,
    Reading,
    Statistic,
    Trace,
    Wants,
)
from richter.instrument.statistics import frame as passes
from richter.instrument.statistics.frame import joined
from richter.instrument.stream import Share
from richter.instrument.subject import Subject
from richter.layers import _VIEWS, LinearMap, register
from richter.learners import Kernel, RFMRegressor, squared_distances
from richter.measures import Measure, catalogue
from richter.models import mlp
from richter.report import views
from richter.report.html import report
from richter.tasks.images import Split
from richter.testing import check_experiment, check_kernel, check_layer, check_measure, check_theory
from richter.theory import Theory

CARD = Card("a measure of one's own", ref=Ref("here", "Sec. 1"))


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


SPREAD = Measure("sensitivity_spread", lambda s: (s.std() / s.mean()).item(), (Sensitivity(),), card=CARD)


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


PLAIN = Measure("plain_cka", plain_cka, (TANGENT_KERNEL, LABELS))


def test_the_kernel_itself_is_never_that_of_random_outputs() -> None:
    """The formula of tangent_cka, written with the kernel: on 80 outputs the kernel of random ones gave another number."""
    model, p = network(80), probe(k=80, kernel_examples=6)
    K, Y = oracles.tangent_kernels(model, p.x[p.kernel_rows()]), p.targets(torch.Size((20, 80)))[0][p.kernel_rows()]
    snap = richter.measure(model, p, [PLAIN, "tangent_cka"])
    for layer in ("0", "2"):
        assert snap.value("plain_cka", layer) == pytest.approx(float(oracles.tangent_cka(K[layer], Y)), rel=1e-9)
    assert snap.row("plain_cka").mark is Mark.EXACT
    assert snap.row("tangent_cka").mark is Mark.ESTIMATED


@pytest.mark.parametrize(("options", "words"), [
    ({"memory": "1MiB"}, "the kernel of 80 outputs and 6 examples needs memory='10.71MiB'"),
    ({"cotangents": random_outputs(8)}, "needs the kernel itself, and 8 random outputs of 80 give another one"),
])
def test_a_kernel_that_cannot_be_had_has_a_reason(options: dict[str, Any], words: str) -> None:
    row = richter.measure(network(80), probe(k=80, kernel_examples=6), [PLAIN], **options).row("plain_cka")
    assert math.isnan(row.value)
    assert words in row.note


def test_measures_of_one_kernel_may_need_other_things_besides() -> None:
    """They are evaluated apart where their cotangents differ, and the kernel is there for each of them."""
    mixed = Measure("mixed", lambda K, G: K.norm().item(), (TANGENT_KERNEL, Descent()))
    alone = Measure("alone", lambda K: K.norm().item(), (TANGENT_KERNEL,))
    model, p = network(), probe()
    K = oracles.tangent_kernels(model, p.x)
    snap = richter.measure(model, p, [mixed, alone, PLAIN])
    for layer in ("0", "2"):
        assert snap.value("alone", layer) == pytest.approx(K[layer].norm().item(), rel=1e-10)
        assert snap.value("mixed", layer) == snap.value("alone", layer)
        assert math.isfinite(snap.value("plain_cka", layer))
    assert snap.value("alone") == pytest.approx(sum(K.values()).norm().item(), rel=1e-10)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Descent(Statistic):
    """A statistic of the whole probe that looks at nothing."""

    name: str = "descent"
    place: Any = "any"

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return Anything()


class Anything(Gathering):
    groups: dict[str, int] = {}  # noqa: RUF012
    remark = Remark()

    def value(self, place: str, without: tuple[str, int] | None = None) -> float:
        return 1.0


# ----------------------------------------------------------------------------------------------------- several passes


@dataclass(frozen=True)
class Within(Statistic):
    """Variance of the outputs within classes: means of classes in a first pass, what is centred on them in a second."""

    name: str = "within"
    place: Any = "model"

    def wants(self, subject: Subject, cotangents: Cotangents) -> Wants:
        return Wants(outputs=True, backward=False)

    def begin(self, subject: Subject, cotangents: Cotangents, needs: tuple[Gathering, ...]) -> Gathering:
        return Classes(len(subject.targets.Y[0]))  # type: ignore[index]


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
    measure = Measure("within", lambda v: v, (Within(),))
    snap = richter.measure(model, p, [measure, "nfc"])
    f, y = model(p.x).detach(), p.y
    means = torch.stack([f[y == c].mean(0) for c in range(3)])
    assert snap.value("within") == pytest.approx((f - means[y]).square().sum(1).mean().item(), rel=1e-12)
    assert [r.layer for r in snap.rows if r.measure == "within"] == [WHOLE]
    assert math.isfinite(snap.value("nfc", "0"))  # in the same first pass


# ------------------------------------------------------------------------------------- another network, other examples


def test_a_statistic_of_the_initial_network() -> None:
    """K of the initial network is what measuring the initial network gives, and it is gathered once."""
    now = Measure("now", lambda K: K.trace().item(), (PTK_COVARIANCE,))
    then = Measure("then", lambda K: K.trace().item(), (Initial(PTK_COVARIANCE),), card=CARD)
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

    turned = Measure("turned", overlap, (TANGENT_KERNEL, Initial(TANGENT_KERNEL)))
    model, first, p = network(), network(seed=1), probe()
    snap = richter.measure(model, p, [turned], initial=first.state_dict())
    K, K0 = oracles.tangent_kernels(model, p.x), oracles.tangent_kernels(first, p.x)
    K[WHOLE], K0[WHOLE] = sum(K.values()), sum(K0.values())  # type: ignore[assignment]
    for layer in ("0", "2", WHOLE):
        assert snap.value("turned", layer) == pytest.approx(overlap(K[layer], K0[layer]), rel=1e-10)
        assert 0 < snap.error("turned", layer) < 0.2


STEP = Measure("step_size", lambda W, before: (W - before).norm().item(), (MATRIX, Previous(MATRIX)))


def test_a_statistic_of_the_snapshot_before(tmp_path: Path) -> None:
    model, p = network(), probe()
    assert "no earlier snapshot is known" in richter.measure(model, p, [STEP]).note("step_size", "0")
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


def test_what_is_kept_is_kept_for_each_network_and_each_cotangents() -> None:
    """The same statistic through other cotangents, of held-out examples or of the initial network is another one."""
    def trace(K: Tensor) -> float:
        return K.trace().item()

    p = probe(held_out=(draw(30, 5, seed=5), torch.arange(30) % 3))
    model, first = network(), network(seed=1)
    one = SomeOutputs((0,))
    measures = [Measure("all", trace, (Previous(PTK_COVARIANCE),)),
                Measure("one", trace, (Previous(PTK_COVARIANCE),), one),
                Measure("aside", trace, (HeldOut(Previous(PTK_COVARIANCE)),)),
                Measure("then", trace, (Initial(PTK_COVARIANCE),)),
                Measure("then_aside", trace, (HeldOut(Initial(PTK_COVARIANCE)),))]
    now = [Measure("now", trace, (PTK_COVARIANCE,)), Measure("now_one", trace, (PTK_COVARIANCE,), one)]
    expected = [richter.measure(m, q, now) for m, q in ((model, p), (model, p.held_out), (first, p), (first, p.held_out))]
    for order in (measures, measures[::-1]):
        watch = richter.Observer(model, p, measures=order, initial=first.state_dict(), when=1, budget=None)
        watch(0)
        snap = watch(1)
        assert snap is not None
        assert snap.value("all", "0") == expected[0].value("now", "0")
        assert snap.value("one", "0") == expected[0].value("now_one", "0")
        assert snap.value("aside", "0") == expected[1].value("now", "0")
        assert snap.value("then", "0") == expected[2].value("now", "0")
        assert snap.value("then_aside", "0") == expected[3].value("now", "0")


def test_two_statistics_of_one_name_are_not_taken_for_each_other() -> None:
    one, two = (Moment("mine", lambda c, k=k: k * c.h.sum((0, 1))) for k in (1, 2))
    measures = [Measure(f"m{i}", lambda v: v.sum().item(), (Previous(s),)) for i, s in enumerate((one, two))]
    with pytest.raises(SelectionError, match="two statistics are called 'mine'"):
        richter.measure(network(), probe(), measures)


def test_the_initial_network_is_gathered_once_whatever_is_back_propagated() -> None:
    model, p = network(), probe()
    m = Measure("then", lambda G: G.norm().item(), (Initial(WEIGHT_GRADIENT),), loss_gradient)
    watch = richter.Observer(model, p, measures=[m], when=1, budget=None)
    for step in range(3):
        watch(step)
    assert len(watch.measurement.subject.kept) == 1


def test_a_gradient_of_outputs_needs_no_labels() -> None:
    m = Measure("gradient", lambda G: G.norm().item(), (WEIGHT_GRADIENT,))
    assert richter.measure(network(), richter.Probe(probe().x, None), [m]).value("gradient", "0") > 0
    of_loss = Measure("gradient", m.compute, m.needs, loss_gradient)
    assert "no labels" in richter.measure(network(), richter.Probe(probe().x, None), [of_loss]).note("gradient", "0")


@pytest.mark.parametrize(("compute", "words"), [(lambda W: 1 / 0, "ZeroDivisionError"), (lambda W: None, "TypeError"),
                                                (lambda W: W, "ValueError|RuntimeError")])
def test_a_measure_that_fails_does_not_end_the_training(compute: Any, words: str) -> None:
    snap = richter.measure(network(), probe(), [Measure("broken", compute, (MATRIX,)), "nfc"])
    row = snap.row("broken", "0")
    assert math.isnan(row.value)
    assert row.mark is Mark.FAILED
    assert re.search(words, row.note)
    assert math.isfinite(snap.value("nfc", "0"))


def test_what_is_of_the_whole_model_has_no_rows_at_layers() -> None:
    H = Operator("curvature", curvature)
    squared = Derived("squared", lambda A: float(A.size), (H,))
    snap = richter.measure(network(), probe(), [
        Measure("size", lambda v: v, (squared,)), Measure("then", lambda v: v, (Initial(squared),)),
        Measure("mixed", lambda W, A: 1.0, (MATRIX, H))], initial=network(seed=1).state_dict())
    assert {r.layer for r in snap.rows if r.measure in ("size", "then")} == {WHOLE}
    assert all(math.isnan(r.value) and "one measure cannot use both" in r.note for r in snap.rows if r.measure == "mixed")


@pytest.mark.parametrize("derived", [False, True])
def test_uneven_groups_have_no_error_and_say_so(derived: bool) -> None:
    """Four random vectors of one and seven of another: none can be left out of both."""
    few, many = (Trace(Operator(f"curvature {v}", curvature), vectors=v) for v in (4, 7))
    needs: tuple[Statistic, ...] = (Derived("ratio", lambda a, b: a / b, (few, many)),) if derived else (few, many)
    compute = (lambda r: r) if derived else (lambda a, b: a / b)
    row = richter.measure(network(), probe(), [Measure("ratio", compute, needs)]).row("ratio")
    assert math.isfinite(row.value)
    assert math.isnan(row.error)
    assert "4 and 7 groups of vectors" in row.note
    assert row.mark is Mark.ESTIMATED
    even = Measure("ratio", lambda a, b: a / b, (few, replace(few, seed=1, operator=many.operator)))
    assert math.isfinite(richter.measure(network(), probe(), [even]).error("ratio"))


def test_the_least_exact_mark_is_said() -> None:
    assert joined([Remark(Mark.TRIVIAL, "a"), Remark(Mark.ESTIMATED, "b"), Remark()]) == Remark(Mark.ESTIMATED, "a; b")


def test_a_statistic_of_held_out_examples() -> None:
    mean = Moment("read", lambda c: c.h.sum((0, 1)))
    gap = Measure("gap", lambda a, b: (a - b).norm().item(), (mean, HeldOut(mean)))
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
    (draw(4, 5), r"is a Tensor; give a pair \(x2, y2\) of examples"),
    ((draw(4, 6), torch.arange(4) % 3), r"inputs \[6\] beside \[5\]"),
    ((draw(4, 5), None), "labels in one of them only"),
    ((draw(1, 5), torch.arange(1)), "has one example"),
])
def test_held_out_examples_that_do_not_fit(given: Any, sentence: str) -> None:
    with pytest.raises(richter.RichterError, match=sentence):
        probe(held_out=given)


def test_features_are_what_layers_read() -> None:
    rank = Measure("rank", lambda Phi: float(torch.linalg.matrix_rank(Phi)), (FEATURES,))
    model, p = network(), probe(chunk=6)
    snap = richter.measure(model, p, [rank, Measure("first", lambda Phi: Phi[3, 2].item(), (FEATURES,))])
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
    with torch.no_grad():
        for i, weight in enumerate(model.parameters()):
            weight.copy_(0.5 * draw(*weight.shape, seed=i))
    p = probe(chunk=chunk)
    Y = p.targets(torch.Size((20, 3)))[0]
    H = Operator("curvature", curvature)

    def product(A: Any) -> float:
        v = draw(A.size, seed=3)
        return float(v @ A(v))

    snap = richter.measure(model, p, [Measure("vHv", product, (H,)),
                                      Measure("trace", lambda t: t, (Trace(H, 400),))])
    names = [name for name, _ in model.named_parameters()]
    flat = torch.cat([q.detach().reshape(-1) for q in model.parameters()])

    def loss(theta: Tensor) -> Tensor:
        pieces = theta.split([q.numel() for q in model.parameters()])
        state = {n: piece.view_as(q) for n, piece, q in zip(names, pieces, model.parameters(), strict=True)}
        return (torch.func.functional_call(model, state, (p.x,)) - Y).square().sum() / 20

    exact = torch.autograd.functional.hessian(loss, flat)
    v = draw(len(flat), seed=3)
    assert snap.value("vHv") == pytest.approx((v @ exact @ v).item(), rel=1e-10)
    row = snap.row("trace")
    assert abs(row.value - exact.trace().item()) < 4 * row.error < 0.5 * exact.trace().item()
    said = f"from 400 random vectors; sketch error {row.error:.2g} (sampling error over examples not included)"
    assert (row.mark, row.note) == (Mark.ESTIMATED, said)
    assert [r.layer for r in snap.rows if r.measure == "vHv"] == [WHOLE]


# -------------------------------------------------------------------------------------------------------------- ranks


@pytest.mark.parametrize("statistic", [PTK_COVARIANCE, WEIGHT_GRADIENT, FEATURES, Sensitivity()], ids=lambda s: s.name)
def test_ranks_that_share_the_chunks_add_up(statistic: Statistic) -> None:
    """Two processes, each with every other chunk, have together what one has alone."""
    subject = Subject(network(), probe(chunk=3), None, None, 2 ** 30, None)
    subject.renew()
    whole = passes.gathered(subject, statistic, every_output)
    first, second = (passes.gathered(subject, statistic, every_output, Share(rank, 2)) for rank in range(2))
    first.gathering.merge(second.gathering)  # type: ignore[attr-defined]
    for layer in ("0", "2"):
        for without in (None, ("examples", 1)):
            a, b = whole.value(layer, without), first.gathering.value(layer, without)  # type: ignore[attr-defined]
            assert torch.allclose(a, b, rtol=1e-12, atol=0)


def test_every_shipped_statistic_has_a_place_and_a_use() -> None:
    for m in catalogue().values():
        assert m.needs
        for s in m.needs:
            assert s.place in ("map", "read", "module", "model", "any")
            assert s.use in ("mean", "kernel")
    assert CENTRED_KERNEL.use == "kernel"


# ------------------------------------------------------------------------------------------- everything else that is added


def test_a_measure_of_ones_own_has_its_title_in_a_report(tmp_path: Path) -> None:
    """Its card is kept with the run, and known where the measure is not."""
    card = Card("Spread of the sensitivity", "How much more some examples are heard than others.")
    measure = Measure("own_spread", SPREAD.compute, SPREAD.needs, card=card)
    with richter.Observer(network(), probe(), measures=[measure], run=tmp_path / "run") as watch:
        watch(0)
    page = report([richter.runs.load(tmp_path / "run")], tmp_path / "report.html").read_text()
    assert "Spread of the sensitivity" in page
    assert "How much more some examples are heard than others." in page


class Doubling(nn.Module):
    """z = W (2 h), the weight stored transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(draw(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensordot(2 * x, self.kernel, 1)


def test_a_layer() -> None:
    flat = lambda m, t: t.reshape(len(t), -1, t.shape[-1])  # noqa: E731
    try:
        register(Doubling, {"": LinearMap(lambda m, w: w.T, lambda m, x: flat(m, 2 * x), flat, weight="kernel")})
        check_layer(Doubling(), draw(3, 5))
        model = nn.Sequential(Doubling(), nn.Tanh(), nn.Linear(4, 3).double())
        assert 0 < richter.measure(model, probe(), ["nfc"]).value("nfc", "0") <= 1
    finally:
        _VIEWS.pop(Doubling, None)


def falls(height: float, g: float = 9.81) -> float:
    return (2 * height / g) ** 0.5


def fall(height: float, dt: float = 1e-4) -> float:
    t = fallen = speed = 0.0
    while fallen < height:
        t, fallen, speed = t + dt, fallen + speed * dt, speed + 9.81 * dt
    return t


def test_a_theory(capsys: pytest.CaptureFixture[str]) -> None:
    stone = Theory("stone", ref=Ref("nfa", "Third day"), title="how long a stone falls", predict=falls, simulate=fall,
                   cases=lambda: [(1.0,), (2.0,)], tolerance=1e-3, perturb={"g": 9.9})
    check_theory(stone)
    with pytest.raises(AssertionError, match="still agrees"):
        check_theory(Theory("stone", stone.ref, "", falls, fall, stone.cases, 1e-3, {"g": 9.811}))
    richter.theory.add(stone)
    try:
        assert richter.theory.get("stone").predict(9.81 / 2) == 1
        assert richter.cli.main(["list", "theories"]) == 0
        assert "how long a stone falls" in capsys.readouterr().out
    finally:
        richter.theory.CATALOGUE.remove("stone")


@dataclass(frozen=True)
class Coin:
    n: int = 1000
    fair: bool = True


def toss(s: Coin, run: Any) -> dict[str, Any]:
    return {"share": (np.random.default_rng(0).random(s.n) < (0.5 if s.fair else 0.9)).mean()}


def test_an_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    claim = Claim("share of heads", lambda r: float(r["share"].mean()), Interval(0.4, 0.6),
                  control=Control("a bent coin", {"fair": False}), paper="0.5", source="arithmetic",
                  says="A coin falls on heads as often as not: 0.5.")
    coin = Experiment(name="nfa_coin", ref=Ref("nfa", "Sec. 0"), title="a coin falls on either side", smoke=Coin(),
                      paper=Coin(100_000), work=toss, start={"n": 1}, protocol="exact", claims=(claim,))
    check_experiment(coin, tmp_path)
    richter.experiments.add(coin)
    try:
        assert richter.cli.main(["run", "nfa_coin", "--store", str(tmp_path)]) == 0
        row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("share of heads"))
        assert row.endswith("  holds")
    finally:
        richter.experiments.CATALOGUE.remove("nfa_coin")


def test_a_task() -> None:
    def halves(n: int = 10, seed: int = 0) -> Split:
        x = draw(2 * n, 2, seed=seed)
        y = (x[:, 0] > 0).long()
        return Split(x[:n], y[:n], x[n:], y[n:])

    richter.tasks.add(halves)
    try:
        assert richter.tasks.halves(5, seed=3).x.shape == (5, 2)  # type: ignore[attr-defined]
        assert "halves" in richter.tasks.names()
        with pytest.raises(SelectionError, match="is a built-in"):
            richter.tasks.add(richter.tasks.mnist)
    finally:
        richter.tasks.CATALOGUE.remove("halves")
    with pytest.raises(AttributeError):
        _ = richter.tasks.halves  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Cauchy(Kernel):
    """1 / (1 + |x - z|^2 / L^2)."""

    L: float = 2.0

    def geometry(self, x: Tensor, z: Tensor) -> Tensor:
        return squared_distances(x, z)

    def values(self, g: Tensor) -> Tensor:
        return 1 / (1 + g / self.L ** 2)


def test_a_kernel_of_learners() -> None:
    check_kernel(Cauchy())
    X, y = draw(60, 4).numpy(), draw(60, 4)[:, 0].numpy()
    assert RFMRegressor(Cauchy(), iterations=1, ridge=1e-3).fit(X, y).score(X, y) > 0.9


def test_a_view_of_the_dashboard(tmp_path: Path) -> None:
    client = pytest.importorskip("starlette.testclient")
    from richter.report.server import application
    with richter.runs.create(tmp_path / "one") as run:
        run.rows([Row(0, "0", "nfc", 0.5)])
        run.scalars(0, loss=2.5)

    def losses(runs: Any, query: Any) -> Any:
        return [views.Table("Last losses", ("run", "loss"), [(name, r.scalars("loss").value[-1]) for name, r in runs])]

    views.add(views.View("losses", "Losses", losses))
    try:
        with client.TestClient(application(tmp_path), base_url="http://127.0.0.1") as page:
            assert "Losses" in page.get("/api/views").text
            assert page.get("/api/losses", params={"run": "one"}).json()["panels"][0]["rows"] == [["one", 2.5]]
    finally:
        views.VIEWS.remove("losses")


def test_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with richter.runs.create(tmp_path / "run") as run:
        run.rows([Row(step, "0", "nfc", 0.5) for step in range(3)])

    def steps(given: Any) -> int:
        print(len(richter.runs.load(given.run).frame))
        return 0

    richter.commands.add(Command("steps", "Count the steps of a run.", steps, lambda parser: parser.add_argument("run")))
    try:
        assert richter.cli.main(["steps", str(tmp_path / "run")]) == 0
        assert capsys.readouterr().out == "3\n"
        with pytest.raises(SystemExit):
            richter.cli.main(["--help"])
        assert "count the steps of a run" in capsys.readouterr().out
    finally:
        richter.commands.CATALOGUE.remove("steps")
