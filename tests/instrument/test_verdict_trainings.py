"""The verdict on trainings whose outcome is known from how they were made: an MLP on digits, in settings that people use."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import richter
from richter.instrument.verdict import Diagnosis
from richter.models import mlp
from richter.tasks import digits

DATA = digits()
pytestmark = pytest.mark.filterwarnings("ignore::richter.RichterWarning")  # of measurements after weights were lost


class Centred(nn.Module):
    """f = alpha (h(w) - h(w0)); with the loss divided by alpha^2, a large alpha is lazy."""

    def __init__(self, alpha: float, width: int = 128) -> None:
        super().__init__()
        self.net, self.alpha = mlp([64, width, width, 10], seed=0), alpha
        self.first = [copy.deepcopy(self.net)]  # in a list: no part of the model

    def forward(self, x: Tensor) -> Tensor:
        return self.alpha * (self.net(x) - self.first[0](x).detach())


def network(scale: float = 1.0, width: int = 128) -> nn.Module:
    return mlp([64, width, width, 10], scale=scale, seed=0)


def trained(model: nn.Module, steps: int = 300, y: Tensor = DATA.y, alpha: float = 1.0,
            optimiser: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> Diagnosis:
    """With the options of the optimiser; by default SGD at 0.1."""
    step_by = optimiser(model.parameters(), **({"lr": 0.1} if optimiser is torch.optim.SGD else {}) | options)
    draw = torch.Generator().manual_seed(1)
    with richter.Observer(model, richter.Probe(DATA.x[:256], y[:256]), when=steps, budget=None, measures=NAMES) as watch:
        for step in range(steps):
            rows = torch.randint(len(DATA.x), (64,), generator=draw)
            loss = F.cross_entropy(model(DATA.x[rows]), y[rows])
            watch(step, loss=loss)
            step_by.zero_grad()
            (loss / alpha ** 2).backward()
            step_by.step()
    return richter.diagnose(watch)


NAMES = ("linearisation_gap", "magnitude", "feature_change_cka", "function_change", "weight_change", "probe_loss",
         "probe_accuracy", "output_spread", "output_rms")


def pretrained() -> nn.Module:
    model = network()
    trained(model, 60)
    return model


def frozen() -> nn.Module:
    model = network()
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("4."))
    return model


SHUFFLED = DATA.y[torch.randperm(len(DATA.y), generator=torch.Generator().manual_seed(3))]
Case = tuple[Callable[[], nn.Module], dict[str, Any], set[str], str]  # its words, and a text that the whole must have
QUICK: dict[str, Case] = {
    "output scale 100": (lambda: Centred(100.0), {"alpha": 100.0}, {"lazy"}, "start smaller"),
    "SGD": (network, {}, {"rich"}, "nothing to turn for richness"),
    "frozen backbone": (frozen, {}, {"lazy"}, "frozen: 0, 2 did not move at all"),
    "untrained": (network, {"lr": 0.0, "steps": 20}, {"untrained"}, "does the optimiser hold"),
    "diverged": (network, {"lr": 1e4, "steps": 20}, {"diverged"}, "smaller learning rate"),
    "init x 1e-4": (lambda: network(1e-4), {"steps": 50}, {"collapsed", "not learning"}, "initial weights"),
    "fine-tuning": (pretrained, {"lr": 0.05}, {"lazy", "probably lazy", "uncertain", "rich"}, "relative to the given start"),
}
LONG: dict[str, Case] = {
    "output scale 0.1": (lambda: Centred(0.1), {"alpha": 0.1, "lr": 0.001, "steps": 1000}, {"rich"}, "Magnitude"),
    "init x 3": (lambda: network(3.0), {}, {"uncertain", "rich", "amplified"}, "Magnitude"),
    "init x 5": (lambda: network(5.0), {}, {"rich", "uncertain", "amplified"}, "large initial outputs"),
    "init x 0.2": (lambda: network(0.2), {}, {"rich"}, "Magnitude"),
    "Adam": (network, {"optimiser": torch.optim.Adam}, {"rich"}, "Magnitude"),
    "Adam at 1e-5": (network, {"optimiser": torch.optim.Adam, "lr": 1e-5}, {"early", "not learning"}, "train longer"),
    "Adam at 0.3": (network, {"optimiser": torch.optim.Adam, "lr": 0.3}, {"collapsed", "diverged", "not learning"},
                    "smaller learning rate"),
    "random labels": (network, {"optimiser": torch.optim.Adam, "y": SHUFFLED, "steps": 1500}, {"rich"},
                      "memorised noise is rich too"),
    "weight decay 0.1": (network, {"weight_decay": 0.1, "steps": 600}, {"rich"}, "Magnitude"),
    "weight decay 0.3": (network, {"weight_decay": 0.3, "steps": 600}, {"collapsed"}, "less weight decay"),
    "width 1024": (lambda: network(width=1024), {}, {"rich", "uncertain"}, "Magnitude"),
}


def check(case: Case) -> None:
    make, options, words, text = case
    found = trained(make(), **options)
    assert found.word in words, str(found)
    assert text in str(found)
    assert (found.magnitude is not None) is (found.word in ("lazy", "probably lazy", "uncertain", "amplified", "rich"))
    advice = " ".join(found.advice)
    assert found.word not in ("diverged", "collapsed", "not learning") or "start smaller" not in advice
    assert "given start" not in found.verdict or "start smaller" not in advice


@pytest.mark.parametrize("name", QUICK)
def test_trainings(name: str) -> None:
    check(QUICK[name])


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_more_trainings(name: str) -> None:
    check(LONG[name])


@pytest.mark.long
def test_the_magnitude_follows_the_scale_of_the_output() -> None:
    found = [trained(Centred(alpha), alpha=alpha) for alpha in (1.0, 10.0, 100.0, 1000.0)]
    magnitudes = [d.magnitude.value for d in found if d.magnitude is not None]
    assert len(magnitudes) == 4
    assert magnitudes == sorted(magnitudes, reverse=True)
    assert [d.word for d in found][::3] == ["rich", "lazy"]


# ------------------------------------------------------------------------------------ trainings whose loss cannot fall far


def watched(model: nn.Module, probe: richter.Probe, draw: Callable[[], tuple[Tensor, Tensor]], steps: int, lr: float,
            loss_of: Callable[[Tensor, Tensor], Tensor]) -> tuple[Diagnosis, float]:
    """The verdict, and the mean of the last tenth of the losses. Measured at the start and at the end."""
    step_by, losses = torch.optim.SGD(model.parameters(), lr), []
    with richter.Observer(model, probe, when=steps, budget=None, measures=NAMES) as watch:
        for step in range(steps):
            x, y = draw()
            loss = loss_of(model(x), y)
            watch(step, loss=loss)
            losses.append(loss.item())
            step_by.zero_grad()
            loss.backward()
            step_by.step()
    late = losses[-max(1, steps // 10):]
    return richter.diagnose(watch), sum(late) / len(late)


def deep_linear(steps: int, lr: float = 0.05) -> tuple[Diagnosis, float, float]:
    """Three linear layers on noisy linear targets; and the loss of least squares."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(256, 8, generator=draw)
    y = x @ torch.randn(8, 4, generator=draw) * 0.17 + 1.13 * torch.randn(256, 4, generator=draw)
    optimum = F.mse_loss(x @ torch.linalg.lstsq(x, y).solution, y).item()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(i, o, bias=False) for i, o in ((8, 16), (16, 16), (16, 4))))
    return *watched(model, richter.Probe(x, y, loss=nn.MSELoss()), lambda: (x, y), steps, lr, F.mse_loss), optimum


def flipped_xor(steps: int, lr: float = 0.1) -> tuple[Diagnosis, float, float]:
    """Online XOR of two of six signs, three labels in ten flipped; and the loss of the best answer."""
    generator, flipped = torch.Generator().manual_seed(0), 0.3

    def draw(n: int = 64) -> tuple[Tensor, Tensor]:
        x = torch.randint(0, 2, (n, 6), generator=generator).float() * 2 - 1
        return x, ((x[:, 0] * x[:, 1] > 0) ^ (torch.rand(n, generator=generator) < flipped)).long()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 2))
    found, loss = watched(model, richter.Probe(*draw(256)), draw, steps, lr, F.cross_entropy)
    return found, loss, -flipped * math.log(flipped) - (1 - flipped) * math.log(1 - flipped)


@pytest.mark.parametrize(("train", "steps"), [(deep_linear, 600), (flipped_xor, 1500)])
def test_a_finished_training_whose_loss_cannot_fall_by_a_quarter(train: Callable[..., tuple[Diagnosis, float, float]],
                                                                 steps: int) -> None:
    found, loss, optimum = train(steps)
    assert loss < 1.02 * optimum
    assert found.word in ("lazy", "probably lazy", "uncertain", "amplified", "rich"), str(found)
    assert any("only, and no longer falls" in remark for remark in found.remarks)
    assert found.magnitude is not None


@pytest.mark.parametrize(("train", "steps", "lr"), [(deep_linear, 30, 0.01), (flipped_xor, 300, 0.002)])
def test_the_same_trainings_when_they_have_only_begun(train: Callable[..., tuple[Diagnosis, float, float]], steps: int, lr: float
                                                      ) -> None:
    found, loss, optimum = train(steps, lr)
    assert loss > 1.05 * optimum
    assert found.word in ("early", "not learning"), str(found)


def test_one_measurement_with_initial_weights_and_labels_says_what_was_learned() -> None:
    """The loss and the accuracy of the initial network are measured too: a verdict from one snapshot knows whether it learned."""
    model, probe = network(), richter.Probe(DATA.x[:256], DATA.y[:256])
    initial, draw = copy.deepcopy(model.state_dict()), torch.Generator().manual_seed(1)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(200):
        rows = torch.randint(len(DATA.x), (64,), generator=draw)
        optimiser.zero_grad()
        F.cross_entropy(model(DATA.x[rows]), DATA.y[rows]).backward()
        optimiser.step()
    snap = richter.measure(model, probe, NAMES, initial=initial)
    seen = richter.diagnose(snap)
    assert seen.word == "rich"
    assert not any("whether anything was learned" in line for line in seen.unknown)
    first = richter.measure(mlp([64, 128, 128, 10], seed=0), probe, ["probe_loss", "probe_accuracy"])
    assert snap.start is not None
    for name in ("probe_loss", "probe_accuracy"):
        assert snap.start.value(name) == pytest.approx(first.value(name), rel=1e-6)
    assert f"the accuracy on the probe rose: {first.value('probe_accuracy'):.3g} -> " in " ".join(seen.evidence)
    noise = torch.randint(10, (256,), generator=draw)  # labels that it has not seen: nothing was learned of them
    unlearned = richter.diagnose(richter.measure(model, richter.Probe(DATA.x[:256], noise), NAMES, initial=initial))
    assert unlearned.word in ("diverged", "not learning")
    assert any("whether anything was learned" in line for line in richter.diagnose(replace(snap, start=None)).unknown)
