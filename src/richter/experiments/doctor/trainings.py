"""One training, watched by an Observer and judged by `richter.diagnose`; then the training of its linearised network, and the
correct verdict."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from richter.experiments.doctor import judging
from richter.experiments.doctor.cases import CASES, RATES, SCALES, TrainingCase
from richter.experiments.doctor.networks import (
    NETWORKS,
    Batch,
    Linearised,
    NetworkSetup,
    ScaledNetwork,
    batches,
    optimiser,
    train,
)
from richter.experiments.doctor.truth import above_chance, correct_words, departure, ridge_error
from richter.experiments.kit import Task, Writer
from richter.instrument.observe import Observer
from richter.instrument.probe import Probe
from richter.instrument.verdict import diagnose

if TYPE_CHECKING:
    from richter.tasks import Split

MEASURES = ("linearisation_gap", "magnitude", "feature_change_cka", "function_change", "c_uc_ratio", "weight_change",
            "probe_loss", "probe_accuracy", "output_spread", "output_rms")
BASE = 64  # the width at which the maximal-update parametrisation is torch's own


@dataclass(frozen=True)
class DoctorSettings:
    """Cross-entropy, batches of 64; the probe has training examples. ``rule`` and ``number`` choose the judged rule and
    number and change no training. ``wide`` is the width of the widest MLP."""

    networks: tuple[str, ...] = ("MLP", "CNN", "GPT", "ResNet-10", "ViT")
    scaled: tuple[str, ...] = ("MLP", "CNN", "GPT")  # networks whose output scale is varied
    epochs: float = 1.0  # times those of each network
    wide: int = 2048
    seeds: tuple[int, ...] = (100, 101, 102)
    rule: str = "verdict"
    number: str = "magnitude"


def trainings(s: DoctorSettings) -> list[Task[DoctorSettings]]:
    """Return a task for each case of each network, then for each output scale of the networks whose scale is varied."""
    chosen = [(network, name, case) for network in s.networks for name, case in CASES[network].items()]
    chosen += [(network, f"scale {alpha:g}", TrainingCase(alpha=alpha)) for network in s.scaled for alpha in SCALES]
    rest = replace(s, networks=(), scaled=(), wide=0, seeds=())
    return [Task(rest, network=network, name=name, case=with_defaults(case, network, s), seed=seed)
            for seed in s.seeds for network, name, case in chosen]


def with_defaults(case: TrainingCase, network: str, s: DoctorSettings) -> TrainingCase:
    """Return the case with the learning rate of its network, if it has none of its own, and with the width of the settings."""
    rate = RATES[network] * (min(1.0, case.alpha) if case.alpha else 1.0)
    return replace(case, lr=case.lr or rate, width=s.wide / 256 if case.width > 1 else case.width)


def network_and_data(case: TrainingCase, network: NetworkSetup, data: Split, seed: int, epochs: int) -> tuple[nn.Module, Split]:
    """Return the network before training, and the data that it is trained on."""
    draw = torch.Generator().manual_seed(seed)
    body = network.build(case.width, seed)
    with torch.no_grad():
        for p in body.parameters():
            p.mul_(case.init)
        if case.maximal:
            list(body.parameters())[-2].mul_(math.sqrt(BASE / (256 * case.width)))
    if case.random:  # nothing to generalise: the test is on what was taught
        x, y = data.x, torch.randint(network.classes, data.y.shape, generator=draw)
        data = data._replace(y=y, x_test=x, y_test=y)
    if case.pretrained:
        half = len(data.x) // 2
        first = batches((data.x[:half], data.y[:half]), epochs, 64, draw)
        train(body, first, optimiser(list(body.parameters()), "sgd", RATES["MLP"]))
        data = data._replace(x=data.x[half:], y=data.y[half:])
    if case.frozen:
        body.requires_grad_(False)
        list(body.children())[-1].requires_grad_(True)
    return body, data


def trained(model: nn.Module, case: TrainingCase, steps: list[Batch], watch: Observer | None = None) -> None:
    """Train a model by the recipe of a case; the linearised network gets the same training."""
    params = [p for p in model.parameters() if p.requires_grad]
    k = 256 * case.width / BASE
    factors = [k, k, 1.0, k, 1 / k, 1.0] if case.maximal else None  # weight and bias of three layers
    train(model, steps, optimiser(params, case.optimiser, case.lr, case.decay, factors), case.alpha ** 2 or 1.0, watch)


def work(t: Task[DoctorSettings], run: Writer) -> Mapping[str, ArrayLike]:
    case, network = t.case, NETWORKS[t.network]
    epochs = round(t.settings.epochs * case.epochs * network.epochs)
    body, data = network_and_data(case, network, network.data(t.seed), t.seed, epochs)
    model = ScaledNetwork(body, case.alpha) if case.alpha else body
    linear = Linearised(model)
    before = features(network, body, data)
    steps = batches((data.x, data.y), epochs, 64, torch.Generator().manual_seed(t.seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that diverged weights cannot be measured
        with Observer(model, Probe(data.x[:network.probe], data.y[:network.probe], chunk=64), run=run, matrices=0,
                      measures=MEASURES, when=[0], budget=None) as watch:
            watch(0)
            trained(model, case, steps, watch)
    run.progress(0.5)
    last, diagnosis = watch.snapshots[-1], diagnose(watch)
    numbers = {"gap": "linearisation_gap", "turn": "feature_change_cka", "magnitude": "magnitude"}
    arrays = {**{k: judging.value(last, name) for k, name in numbers.items()}, "accuracy": accuracy(model, data),
              "remarked": judging.makes_remark(case, diagnosis),
              **judging.words(diagnosis, last)}
    if judging.in_scale_series(t):
        return arrays
    if case.words:
        return {**arrays, "D": math.nan, "gain": math.nan, "allowed": judging.codes(case.words)}
    trained(linear, case, steps)
    return {**arrays, **truth(case, network, model, linear, before, features(network, body, data), data)}


def features(network: NetworkSetup, body: nn.Module, data: Split) -> tuple[Tensor, Tensor]:
    """Features of the training and test inputs."""
    with torch.no_grad():
        return network.features(body, data.x), network.features(body, data.x_test)


def accuracy(model: nn.Module, data: Split) -> float:
    """Test accuracy."""
    with torch.no_grad():
        return (model(data.x_test).argmax(-1) == data.y_test).double().mean().item()


def truth(case: TrainingCase, network: NetworkSetup, model: nn.Module, linear: nn.Module, before: tuple[Tensor, Tensor],
          after: tuple[Tensor, Tensor], data: Split) -> dict[str, ArrayLike]:
    """Distance D from the linearised network, gain of the features, and the correct words."""
    with torch.no_grad():
        D = departure(model(data.x_test), linear(data.x_test))
    known = above_chance(accuracy(model, data), data.y_test.numel(), network.classes)
    y, y_test = data.y.flatten(), data.y_test.flatten()
    if case.random:  # the test is on what was taught: fit one half of it, ask the other
        half = len(y) // 2
        before, after = ((h[:half], h[half:]) for h, _ in (before, after))
        y, y_test = y[:half], y[half:]
    gain = math.nan
    if all(torch.isfinite(h).all() for h in after):
        first, now = (ridge_error(h, y, h_test, y_test, network.classes) for h, h_test in (before, after))
        gain = 1 - now / first
    return {"D": D, "gain": gain, "allowed": judging.codes(correct_words(D, gain, known))}
