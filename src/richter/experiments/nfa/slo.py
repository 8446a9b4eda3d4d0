"""Our own question to [nfa, Sec. 5]: on images, at equal steps, does SLO beat SGD and Adam, in test loss and in nfc?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor, nn

from richter.controls import SLO, slo_groups
from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.experiments.training import LayerCurves, accuracy
from richter.instrument.probe import Probe
from richter.models import mlp
from richter.report.drawing import COLOURS, band, caption, label, panels, points, styled
from richter.tasks import images as image_sets

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = ("sgd", "adam", "slo", "equal")


@dataclass(frozen=True)
class NfaSloSettings:
    """Cross-entropy, batches of 128, torch's initial weights, one learning rate for each method; SLO with the speeds of Fig.
    17: 2.5 in the first layer and 0.4 elsewhere. The rival "equal" gives every layer the same speed, such that all weights
    together move as far in a step. ``judged`` chooses the method that claims read as SLO."""

    data: tuple[str, ...] = ("fashion_mnist", "cifar10")
    networks: tuple[str, ...] = ("mlp", "cnn")
    n: int = 10_000
    steps: int = 800
    rates: tuple[float, ...] = (0.1, 1e-3, 0.1, 0.1)  # of SGD, Adam, SLO and SLO with equal speeds
    first: float = 2.5
    others: float = 0.4
    eps: float = 0.2
    judged: Literal["slo", "equal", "sgd", "adam"] = "slo"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    methods: ClassVar = METHODS


def network(kind: str, channels: int, size: int, seed: int) -> nn.Sequential:
    """An MLP with three hidden layers of 256, or three convolutions of 16, 32 and 64 channels with a linear read-out."""
    if kind == "mlp":
        return nn.Sequential(nn.Flatten(), *mlp([channels * size * size, 256, 256, 256, 10], seed=seed))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for wide in (16, 32, 64):
            layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            channels = wide
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * (size // 8) ** 2, 10))


def optimiser(s: NfaSloSettings, method: str, model: nn.Module) -> torch.optim.Optimizer:
    """Optimiser of a method with its rate from the settings."""
    lr = dict(zip(METHODS, s.rates, strict=True))[method]
    if method == "adam":
        return torch.optim.Adam(model.parameters(), lr=lr)
    if method == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr)
    layers = [name for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    if method == "equal":
        alike = float(np.sqrt((s.first ** 2 + (len(layers) - 1) * s.others ** 2) / len(layers)))
        return SLO(model.parameters(), lr=lr, speed=alike, eps=s.eps)
    return SLO(slo_groups(model, {layers[0]: s.first}, default=s.others), lr=lr, eps=s.eps)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Mean cross-entropy over all examples."""
    with torch.no_grad():
        return float(np.mean([F.cross_entropy(model(a), b).item() for a, b in zip(x.split(500), y.split(500), strict=True)]))


def work(t: Task[NfaSloSettings], run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    data = getattr(image_sets, t.data)(s.n, 2_000, seed=t.seed)
    model = network(t.network, data.x.shape[1], data.x.shape[2], t.seed)
    moves, draw = optimiser(s, t.method, model), torch.Generator().manual_seed(t.seed)
    hidden = [name for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))][:-1]
    curves = LayerCurves(model, Probe(data.x[:128], data.y[:128]), ("nfc", "cnfc", "c_uc_ratio"), hidden, run)
    for step in range(s.steps):
        rows = torch.randint(len(data.x), (128,), generator=draw)
        loss = F.cross_entropy(model(data.x[rows]), data.y[rows])
        moves.zero_grad()
        loss.backward()
        moves.step()
        run.progress(step / s.steps)
    curves.at(s.steps)
    return {**curves.arrays(), "test": loss_of(model, data.x_test, data.y_test),
            "accuracy": accuracy(model, data.x_test, data.y_test)}


def mean(r: Results, name: str, method: str) -> float:
    """Mean of a number over data sets, networks and hidden layers."""
    return float(np.mean([np.mean(arrays[name]) for _, arrays in r.where(method=method)]))


def gain(r: Results, name: str) -> float:
    """Value of the method that is judged, less the better of SGD and equal speeds; more is better."""
    return mean(r, name, r.settings.judged) - max(mean(r, name, "sgd"), mean(r, name, "equal"))


@styled
def draw(results: Results) -> Figure:
    """Test loss and nfc of each layer, by method."""
    cells = list(dict.fromkeys((t.data, t.network) for t in results.tasks))
    figure, axes = panels(2 * len(cells), across=len(cells))
    for column, (data, kind) in enumerate(cells):
        upper, lower = axes[column], axes[column + len(cells)]
        for k, method in enumerate(METHODS):
            cell = results.where(data=data, network=kind, method=method)
            points(upper, [k], cell["test"][:, None], COLOURS[k], method)
            layers = cell["nfc"][:, -1]
            band(lower, np.arange(1, layers.shape[1] + 1), layers, COLOURS[k], method)
        label(upper, "method", "test loss", f"{data}, {kind}")
        upper.set_xticks(range(len(METHODS)), METHODS)
        label(lower, "hidden layer", "nfc", f"{data}, {kind}", legend=column == 0)
    caption(figure, CAPTION)
    return figure


CAPTION = ("Correlations of hidden layers and test loss after equal steps: SLO beside SGD, Adam and equal speeds. What is above "
           "what differs between networks and lengths of training.")
SGD = Control("SGD in SLO's place", {"judged": "sgd"})
ADAM = Control("Adam in SLO's place", {"judged": "adam"})
EQUAL = Control("equal speeds in SLO's place", {"judged": "equal"})
ABOVE, BELOW = Interval(low=1e-9), Interval(high=-1e-9)  # a method that is compared with itself gives 0
TEXT = "the paper's text, Sec. 5, carried over to images"
EXPERIMENT = Experiment(
    name="nfa_slo", ref=Ref("nfa", "Sec. 5"), title="SLO against SGD and Adam on images, at equal steps",
    smoke=NfaSloSettings(data=("fashion_mnist",), n=2_000, steps=150, seeds=(0, 1)), paper=NfaSloSettings(),
    over=("data", "network", "method", "seed"), analysis=("judged",), work=work,
    data=("fashion_mnist", "cifar10"), figures={"nfa_slo": draw}, start={"n": 256, "steps": 1},
    reduced="2,000 images of Fashion-MNIST alone, 150 steps, two seeds",
    missing={"Sec. 5": "a question of our own: the paper has SLO on the chain monomial (Fig. 4) and on SVHN (Fig. 17), beside "
                       "plain descent alone; data, networks and sizes are ours"},
    tried="SLO against SGD alone, both data sets, 10,000 images, 800 steps, three seeds: nfc -0.010, share learned 0.017, "
          "test loss 0.008; test loss less Adam's -0.095",
    protocol="exact",
    claims=(
        Claim("mean nfc of hidden layers: SLO less the better of SGD and equal speeds", lambda r: gain(r, "nfc"), ABOVE,
              (EQUAL, SGD), source=TEXT, differs={"paper": "the longer training goes, the more SGD makes up for it"}, over="seed",
              by="mean", own=True),
        Claim("mean share learned of hidden layers: SLO less the better of SGD and equal speeds", lambda r: gain(r, "c_uc_ratio"),
              ABOVE, (EQUAL, SGD), source=TEXT, over="seed", by="mean", differs={"paper": "SLO is above SGD by .016, but speeds "
              "raised alike in all layers are by .034: after 800 steps it is the speed that counts, not which layer has it"},
              own=True),
        Claim("mean test loss: SLO less the better of SGD and equal speeds",
              lambda r: mean(r, "test", r.settings.judged) - min(mean(r, "test", "sgd"), mean(r, "test", "equal")), BELOW,
              (EQUAL, SGD), source=TEXT, differs="one learning rate for each method: as good in the MLP, but in the CNN slow "
              "later layers cost more than a fast first one gains", over="seed", by="mean", own=True),
        Claim("mean test loss: SLO less Adam", lambda r: mean(r, "test", r.settings.judged) - mean(r, "test", "adam"), BELOW,
              ADAM, source=TEXT, differs={"smoke": "one learning rate for each method, and 150 steps, in which Adam is ahead"},
              over="seed", by="mean", own=True),
    ))
