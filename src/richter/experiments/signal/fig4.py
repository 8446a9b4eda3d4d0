"""Figure 4 of [signal], its fully connected part: batch size and learning rate change how high the alignment peaks, and where.

The networks of Figures 4 and 11 to 15 are trained here, one for each cell of the grids over learning rate, batch size and
optimiser."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import nn

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.experiments.signal.common import SETS, he
from richter.experiments.training import accuracy
from richter.instrument.observe import Measurement
from richter.instrument.probe import Probe
from richter.measures.profile import peak
from richter.models import resnet18, vgg19
from richter.report.drawing import COLOURS, band, caption, label, panels, styled
from richter.tasks.files import cifar_binary
from richter.tasks.images import Split, split

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Cell = tuple[str, str, str, float, int]  # figure, network, optimiser, learning rate, batch size
MODELS: dict[str, Callable[..., nn.Module]] = {"vgg19": vgg19, "resnet18": resnet18}
CELLS: list[Cell] = [
    *(("Fig. 12", "vgg19", "sgd", lr, 128) for lr in (0.0005, 0.001, 0.0032, 0.01)),
    *(("Fig. 13", "vgg19", "adam", lr, 128) for lr in (3.2e-5, 1e-4, 3.2e-4)),
    *(("Fig. 14", "vgg19", "sgd", 0.0032, batch) for batch in (32, 512, 2048)),  # 128 is in Fig. 12
    *(("Fig. 15", "resnet18", "sgd", lr, 128) for lr in (0.001, 0.003, 0.01, 0.02))]
HUNDRED: list[Cell] = [("Fig. 11", "vgg19", "sgd", lr, 128) for lr in (0.001, 0.003, 0.01)]


@dataclass(frozen=True)
class SignalFig4Settings:
    """Cross-entropy, SGD with momentum 0.9 and weight decay 1e-4 (or Adam), until the training loss is 0.1 or after so many
    epochs. Alignment over 10 outputs on class-balanced training images."""

    n: int = 2_000
    epochs: int = 60
    depth: int = 10  # of fully connected networks
    width: float = 100  # of those, or what multiplies the channels of the others
    rates: tuple[float, ...] = (0.001, 0.003, 0.01)
    batches: tuple[int, ...] = (32, 128, 512)
    probe: int = 100
    tested: int = 10_000  # test images
    cifar100: str = ""  # a folder with train.bin and test.bin, for Fig. 11
    subject: Literal["trained", "untrained", "reordered"] = "trained"  # what claims are read from
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


def fully_connected(s: SignalFig4Settings) -> list[Task[SignalFig4Settings]]:
    """Return the cells of Figure 4 a."""
    return _trainings(s, [("Fig. 4", "ffnn", "sgd", lr, batch) for lr in s.rates for batch in s.batches])


def convolutional(s: SignalFig4Settings) -> list[Task[SignalFig4Settings]]:
    """Return the cells of Figures 12 to 15, and those of Figure 11 where its data are."""
    return _trainings(s, [*CELLS, *(HUNDRED if s.cifar100 else [])])


def _trainings(s: SignalFig4Settings, cells: list[Cell]) -> list[Task[SignalFig4Settings]]:
    rest = replace(s, rates=(), batches=(), seeds=())
    return [Task(rest, figure=figure, network=network, optimiser=optimiser, lr=lr, batch=batch, seed=seed)
            for figure, network, optimiser, lr, batch in cells for seed in s.seeds]


def images(t: Task[SignalFig4Settings]) -> Split:
    """Images of a task's data set."""
    s, flat = t.settings, t.network == "ffnn"
    if t.figure == "Fig. 11":
        train, test = (cifar_binary(f"{s.cifar100}/{part}.bin", classes=100) for part in ("train", "test"))
        return split(train, test, s.n, s.tested, seed=t.seed)
    return SETS["fashion_mnist" if flat else "cifar10"](s.n, s.tested, seed=t.seed, flat=flat)


def network(t: Task[SignalFig4Settings], data: Split) -> nn.Module:
    """Untrained network of a task."""
    s = t.settings
    if t.network == "ffnn":
        return he([data.x.shape[1], *[int(s.width)] * (s.depth - 1), 10], t.seed)
    return MODELS[t.network](classes=int(data.y.max()) + 1, width=s.width, seed=t.seed)


def work(t: Task[SignalFig4Settings], run: Writer) -> Mapping[str, ArrayLike]:
    s = t.settings
    data = images(t)
    model = network(t, data)
    rows = torch.cat([(data.y == c).nonzero()[:max(1, s.probe // (int(data.y.max()) + 1)), 0] for c in data.y.unique()])
    layers = [name for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d)) and "skip" not in name]

    def profile() -> NDArray[np.float64]:
        snap = Measurement(model, Probe(data.x[rows], data.y[rows], kernel_examples=None), ["tangent_cka"], errors=False).take()
        return np.array([snap.value("tangent_cka", k) for k in layers])

    before = profile()
    loss, spent = train(model, data, t, run)
    A = np.stack([before, profile()])
    model.eval()
    with torch.no_grad():
        test = float(np.mean([F.cross_entropy(model(x), y).item() for x, y in zip(
            data.x_test.split(500), data.y_test.split(500), strict=True)]))
    return {"alignment": A, "height": A.max(1), "peak": peak(A[1]).layer, "loss": loss, "test_loss": test,
            "accuracy": accuracy(model, data.x_test, data.y_test), "epochs": spent}


def train(model: nn.Module, data: Split, t: Task[SignalFig4Settings], run: Writer) -> tuple[float, int]:
    """Train until the mean loss of an epoch is 0.1; return that loss and the number of epochs."""
    options: dict[str, Any] = {"lr": t.lr} if t.optimiser == "adam" else {"lr": t.lr, "momentum": 0.9, "weight_decay": 1e-4}
    optimiser = (torch.optim.Adam if t.optimiser == "adam" else torch.optim.SGD)(model.parameters(), **options)
    draw, loss = torch.Generator().manual_seed(t.seed), float("inf")
    model.train()
    for epoch in range(t.settings.epochs):
        total = 0.0
        for rows in torch.randperm(len(data.x), generator=draw).split(t.batch):
            value = F.cross_entropy(model(data.x[rows]), data.y[rows])
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
            total += value.item() * len(rows)
        loss = total / len(data.x)
        run.progress((epoch + 1) / t.settings.epochs)
        if loss <= 0.1:
            return loss, epoch + 1
    return loss, t.settings.epochs


def heights(r: Results) -> NDArray[np.float64]:
    """Largest alignment over layers, for each task."""
    found = r["height"][:, 0 if r.settings.subject == "untrained" else 1]
    return np.roll(found, len(found) // 2) if r.settings.subject == "reordered" else found


def generalising(r: Results) -> float:
    """Spearman's correlation over the grid of the height of the peak and the test accuracy."""
    height, right = (np.argsort(np.argsort(v)).astype(float) for v in (heights(r), r["accuracy"]))
    return float(np.corrcoef(height, right)[0, 1])


def higher(field: str, largest: bool, **where: Any) -> Callable[[Results], float]:
    """The mean height of the peak at the largest (or the smallest) value of a field over that at the other end."""
    def value(r: Results) -> float:
        chosen = r.where(**where)
        ends = sorted(chosen.distinct(field))
        top, bottom = (chosen.where(**{field: v}) for v in ((ends[-1], ends[0]) if largest else (ends[0], ends[-1])))
        return float(heights(top).mean() / heights(bottom).mean())
    return value


@styled
def draw(results: Results) -> Figure:
    rates, batches = sorted(results.distinct("lr")), sorted(results.distinct("batch"))
    figure, axes = panels(len(rates) * len(batches), across=len(batches), width=2.6, height=2.1)
    for ax, (lr, batch) in zip(axes, [(lr, b) for lr in rates for b in batches], strict=True):
        chosen = results.where(lr=lr, batch=batch)
        layers = np.arange(1, chosen["alignment"].shape[-1] + 1)
        band(ax, layers, chosen["alignment"][:, 0], COLOURS[1], style="--")
        band(ax, layers, chosen["alignment"][:, 1], COLOURS[0])
        gap = np.median(chosen["test_loss"] - chosen["loss"])
        test = np.median(chosen["test_loss"])
        label(ax, "layer", "tangent_cka", f"lr {lr:g}, batch {batch}\ntest loss {test:.2f}, gap {gap:.2f}")
    top = max(ax.get_ylim()[1] for ax in axes)
    for ax in axes:
        ax.set_ylim(0, top)
    caption(figure, "Alignment by layer before (dashed) and after training: it peaks higher for larger rates, smaller batches.")
    return figure


UNTRAINED = Control("untrained networks", {"subject": "untrained"})
REORDERED = Control("the heights of other cells", {"subject": "reordered"})
EXPERIMENT = Experiment(
    name="signal_fig4", ref=Ref("signal", "Fig. 4"), title="batch size and learning rate change how high the alignment peaks",
    smoke=SignalFig4Settings(n=500, epochs=20, probe=50, seeds=(0, 1)), paper=SignalFig4Settings(), over=fully_connected,
    analysis=("subject",), work=work, data=("fashion_mnist",),
    figures={"signal_fig4": draw}, start={"n": 100, "epochs": 1, "probe": 20, "seeds": (0,)},
    reduced="500 images, 20 epochs, two seeds",
    missing={"Fig. 4": "a: 2,000 of 60,000 images; b and c, ResNet-18 and VGG-19, are run by signal_fig12, reduced"},
    protocol="reduced: 2,000 of 60,000 images",
    claims=(
        Claim("rank correlation over the grid of the peak's height and the test accuracy", generalising, Interval(low=0.5),
              REORDERED, paper="clearly positive", source="the text: a clear positive correlation", over="seed",
              says="The height of the peak goes with the test accuracy: a clear positive correlation."),
        Claim("height of the peak at the largest learning rate over that at the smallest", higher("lr", True),
              Interval(low=1.001), UNTRAINED, paper="larger", source="the text: a larger peak", over="seed",
              says="A larger learning rate gives a higher peak of the alignment."),
        Claim("height of the peak with the smallest batches over that with the largest", higher("batch", False),
              Interval(low=1.001), UNTRAINED, paper="larger", source="the text: a larger peak", over="seed",
              says="Smaller batches give a higher peak of the alignment."),
    ))
