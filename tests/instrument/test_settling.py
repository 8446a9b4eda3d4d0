"""Norms that have not seen the data, buffers that move without a gradient, and what guessing costs: what a measurement says of
them, and that a verdict is not misled."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import spectral_norm

import oracles
import richter
from richter.core.values import FEW_BATCHES, MOVED_BUFFERS, NO_DATA
from richter.instrument.verdict import Diagnosis
from richter.measures import MOVEMENT

GAP, TURNED, LAYER = "linearisation_gap", "feature_change_cka", "function_change"
ANSWERS = ("probe_loss", "probe_accuracy", "output_spread", "output_rms")
DRAW = torch.Generator().manual_seed(0)
X = torch.randn(512, 20, generator=DRAW, dtype=torch.float64)
Y = (X[:, 0] > 0).long() + 2 * (X[:, 1] > 0).long()


class Running(nn.Module):
    """A BatchNorm of one's own."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(d))
        self.register_buffer("variance", torch.ones(d))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            m, v = x.mean(0), x.var(0, unbiased=False)
            self.mean, self.variance = 0.9 * self.mean + 0.1 * m.detach(), 0.9 * self.variance + 0.1 * v.detach()
            self.steps = self.steps + 1
            return (x - m) / (v + 1e-5).sqrt()
        return (x - self.mean) / (self.variance + 1e-5).sqrt()


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def network(norm: type[nn.Module] | None, width: int = 64, scale: float = 1.0, first: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    norms = (lambda d: [norm(d)]) if norm is not None else (lambda d: [])
    return nn.Sequential(*(norms(20) if first else []), nn.Linear(20, width), *norms(width), nn.ReLU(), nn.Linear(width, width),
                         nn.ReLU(), nn.Linear(width, 4), Times(scale)).double()


def trained(model: nn.Module, x: Tensor = X, y: Tensor = Y, lr: float = 0.05, steps: int = 150) -> richter.Observer:
    """The first measurement comes before the first batch."""
    optimiser, draw = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr), torch.Generator().manual_seed(1)
    with richter.Observer(model, richter.Probe(x[:128], y[:128]), when=steps, measures=NAMES, budget=None) as watch:
        for step in range(steps):
            watch(step)
            rows = torch.randint(len(x), (64,), generator=draw)
            optimiser.zero_grad()
            F.cross_entropy(model.train()(x[rows]), y[rows]).backward()
            optimiser.step()
    return watch


NAMES = (*MOVEMENT, "weight_change")


def judged(*args: object, **options: object) -> Diagnosis:
    return richter.diagnose(trained(*args, **options))  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------- norms

def test_what_a_network_answers_before_its_norms_have_seen_data_says_so() -> None:
    model, probe = network(nn.BatchNorm1d, first=True), richter.Probe(X[:64], Y[:64])

    def notes() -> set[str]:
        snap = richter.measure(model.eval(), probe, ANSWERS)
        return {snap.note(m) for m in ANSWERS}

    assert notes() == {f"2 {NO_DATA} yet, and do not normalise"}
    model.train()(X)
    assert notes() == {f"2 {FEW_BATCHES} (1), and still use part of their initial statistics"}
    for _ in range(42):
        model.train()(X)
    assert f"2 {FEW_BATCHES} (43)" in notes().pop()  # 0.9^43 is 1.1 %
    model.train()(X)
    assert notes() == {""}
    for module in model:
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()
            module.momentum = None  # the mean of all batches
    model.train()(X)
    assert notes() == {""}
    model[0].reset_running_stats()  # type: ignore[operator]
    assert notes() == {f"1 {NO_DATA} yet, and do not normalise"}
    model[0].running_mean += 1.0  # type: ignore[operator]  # given, with no count
    assert notes() == {""}
    assert {richter.measure(network(None), probe, ANSWERS).note(m) for m in ANSWERS} == {""}


def test_columns_that_a_norm_would_have_scaled_are_no_collapse() -> None:
    """At the start the norms normalise nothing: outputs of 1e5, of which those of the trained network are nothing."""
    found = judged(network(nn.BatchNorm1d, first=True), 3e5 * X)
    assert found.word == "rich", str(found)
    assert "large" not in str(found)
    assert any("are not compared, because norms had not seen enough data" in r for r in found.remarks)


def test_a_network_that_is_trained_in_eval_mode_is_compared_with_its_start() -> None:
    model = network(nn.BatchNorm1d).eval()
    model.train = lambda mode=True: model  # type: ignore[method-assign,assignment]
    found = judged(model, 20 * X, lr=1e-3)
    assert any("large initial outputs" in r for r in found.remarks), str(found)
    assert not any("not compared" in r for r in found.remarks)


# -------------------------------------------------------------------------------------------------------------- buffers

@pytest.mark.parametrize("make", [lambda: network(Running, 256, 30.0), lambda: by_spectral_norm()])
def test_buffers_that_move_by_themselves_do_not_make_a_lazy_network_rich(make: object) -> None:
    watch = trained(make(), lr=3e-5, steps=100)  # type: ignore[operator]
    snap, found = watch.snapshots[-1], richter.diagnose(watch)
    assert snap.value(GAP) < 0.02
    assert snap.value(TURNED) < 0.002
    for m in (GAP, "magnitude", TURNED):
        assert MOVED_BUFFERS in snap.note(m)
        assert "the initial network is run with the current buffers" in snap.note(m)
    assert max(r.value for r in snap.rows if r.measure in (LAYER, "weight_change") and math.isfinite(r.value)) < 0.2
    assert any("what the buffers did that moved besides the weights" in line for line in found.unknown), str(found)


def by_spectral_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(spectral_norm(nn.Linear(20, 256)), nn.ReLU(), spectral_norm(nn.Linear(256, 256)), nn.ReLU(),
                         nn.Linear(256, 4), Times(30.0)).double()


def test_the_gap_is_that_of_the_weights_with_the_buffers_of_now() -> None:
    model = network(Running)
    before = copy.deepcopy(model)
    watch = trained(model, steps=60)
    snap = richter.measure(model.eval(), richter.Probe(X[:12], Y[:12]), [GAP, LAYER], initial=before.state_dict())
    for name, b in model.named_buffers():
        before.get_buffer(name).copy_(b)
    assert snap.value(GAP) == pytest.approx(oracles.linearisation_gap(model, before.eval(), X[:12]), rel=1e-9)
    assert "(1.mean, 1.variance, 1.steps)" in snap.note(GAP)
    assert watch.snapshots[0].note(GAP).startswith("0/0")


def test_a_buffer_without_effect_is_not_spoken_of() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + self.training
            return x

    model = nn.Sequential(Counted(), *network(None))
    snap = trained(model, steps=20).snapshots[-1]
    assert model[0].calls == 20
    assert snap.note(GAP) == snap.note(TURNED) == ""


# ----------------------------------------------------------------------------------------- guessing, one layer, known answers

@pytest.mark.parametrize(("loss", "known"), [
    (None, True), (F.cross_entropy, True), (nn.CrossEntropyLoss(), True), (nn.CrossEntropyLoss(label_smoothing=0.1), False),
    (nn.CrossEntropyLoss(weight=torch.ones(4).double()), False), (nn.MSELoss(), False)])
def test_guessing_is_known_of_plain_cross_entropies(loss: object, known: bool) -> None:
    y = torch.tensor([0] * 20 + [1] * 5 + [2] * 5)
    labels = richter.measure(network(None), richter.Probe(X[:30], y, loss=loss), ["probe_loss"]).labels  # type: ignore[arg-type]
    assert labels is not None
    shares = torch.tensor([20, 5, 5]).double() / 30
    best = F.cross_entropy(shares.log().expand(30, 3), y).item()  # of outputs that are always the same
    assert (labels.entropy is not None) is known
    assert labels.guess == pytest.approx(best if known else math.log(4), rel=1e-12)


def test_a_network_that_only_knows_how_frequent_classes_are_has_not_learned() -> None:
    rare = (torch.rand(512, generator=torch.Generator().manual_seed(3)) < 0.1).long()  # nothing to be seen in x
    found = judged(network(None), y=rare, lr=0.01, steps=100)
    assert found.word == "not learning", str(found)
    assert "no better than that of guessing" in found.verdict


def test_one_layer_is_linear_and_two_are_not() -> None:
    torch.manual_seed(0)
    one = judged(nn.Linear(20, 4).double(), lr=0.5)
    assert (one.word, one.magnitude) == ("linear", None), str(one)
    two = judged(nn.Sequential(nn.Linear(20, 20, bias=False), nn.Linear(20, 4, bias=False)).double(), lr=0.5)
    assert two.word == "rich", str(two)  # a deep linear network has both regimes


def test_weights_beside_a_layer_make_a_hidden_one() -> None:
    """relu(W x) summed with weights of no linear map: not linear in its weights, though every map reads the input."""
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.weights = nn.Linear(20, 30), nn.Parameter(torch.randn(30, 4) / 5)

        def forward(self, x: Tensor) -> Tensor:
            return (F.relu(self.layer(x))[..., None] * self.weights).sum(1)

    torch.manual_seed(0)
    found = judged(Summed().double(), lr=0.1)
    assert found.word == "unknown"
    assert "no hidden layer: " not in found.verdict


def test_a_new_head_on_known_features_may_have_been_trained_before() -> None:
    model = network(None)
    trained(model, lr=0.3)
    model[-2].reset_parameters()  # type: ignore[operator]
    found = judged(model, lr=0.01)
    assert found.word in ("lazy", "probably lazy"), str(found)
    assert any(line.startswith("whether the network was pretrained: accuracy started at chance") for line in found.unknown)
    assert "If they were pretrained (a new head on pretrained layers), leave their scale alone" in found.advice[-1]


def test_a_network_that_has_converged_is_not_to_be_trained_faster() -> None:
    model = network(None)
    trained(model, lr=0.5, steps=300)
    found = judged(model, lr=1e-4, steps=30)
    assert found.word == "not learning", str(found)
    assert "there was nothing left to learn on this probe" in found.verdict
    assert "learning rate" not in " ".join(found.advice)
