"""``richter demo``: train one network on handwritten digits twice, lazily and richly, and measure both while they train."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from richter.core.values import progress
from richter.instrument.fitting import log_spaced
from richter.instrument.observe import Observer
from richter.instrument.probe import Probe
from richter.instrument.verdict import Diagnosis, diagnose
from richter.measures import DEFAULT
from richter.models import mlp
from richter.report.html import report as write_report
from richter.report.sweep import table
from richter.runs import Run
from richter.tasks import Split, digits

SCALES = {"lazy": 1000.0, "rich": 1.0}  # of the outputs: the one thing in which the two runs differ
TIMES = 46  # steps, evenly spaced in their logarithm, at which a run is measured; the first of them fall together


@dataclass(frozen=True)
class DemoSettings:
    """Settings of a run of the demo; they are stored with it."""

    scale: float
    steps: int = 2000
    seed: int = 0
    widths: tuple[int, ...] = (64, 128, 128, 128, 10)
    lr: float = 0.1
    batch: int = 64


class ScaledOutputs(nn.Module):
    """f(x) = scale (h(x) - h0(x)), with h0 the network h at the start. Trained on loss / scale^2, a larger scale reaches the same
    outputs with smaller changes of the weights, so that training is lazier."""

    def __init__(self, body: nn.Module, scale: float) -> None:
        super().__init__()
        self.body, self.scale = body, scale
        self._start = (copy.deepcopy(body).requires_grad_(False),)  # a constant; in a tuple torch does not register it

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (self.body(x) - self._start[0](x))


def train(s: DemoSettings, run: Path) -> Diagnosis:
    """Train one network and measure it: the lines with ``probe`` and ``watch`` are all that a user adds."""
    data = digits(seed=s.seed)
    model = ScaledOutputs(mlp(s.widths, seed=s.seed), s.scale)
    optimiser = torch.optim.SGD(model.parameters(), lr=s.lr * min(1.0, s.scale))
    draw = torch.Generator().manual_seed(s.seed)

    probe = Probe(data.x[:256], data.y[:256], kernel_examples=32)
    with Observer(model, probe, run=run, settings=s, measures=(*DEFAULT, "kappa_cka"), when=log_spaced(s.steps, TIMES),
                  budget=None,  # the measurements are what the demo shows
                  keep_features=64, keep_inputs=(1, 8, 8)) as watch:
        for step in progress(range(s.steps), title=run.name, unit="step"):
            rows = torch.randint(len(data.x), (s.batch,), generator=draw)
            loss = F.cross_entropy(model(data.x[rows]), data.y[rows])
            seen = watch.when(step) or step == s.steps - 1
            watch(step, loss=loss, **(accuracies(model, data) if seen else {}))
            optimiser.zero_grad()
            (loss / s.scale ** 2).backward()
            optimiser.step()
    return diagnose(watch)


@torch.no_grad()
def accuracies(model: nn.Module, data: Split) -> dict[str, float]:
    """Return the shares of training and of test images that are classified correctly."""
    parts = {"train": (data.x, data.y), "test": (data.x_test, data.y_test)}
    return {f"{name}_accuracy": (model(x).argmax(1) == y).double().mean().item() for name, (x, y) in parts.items()}


def demo(folder: Path, steps: int = 2000, seed: int = 0) -> dict[str, Diagnosis]:
    """Train and measure both networks, print what was found, and write the report."""
    print(f"Training a network on digits twice: outputs times {SCALES['lazy']:g}, and times {SCALES['rich']:g}.", flush=True)
    diagnoses = {name: train(DemoSettings(scale, steps, seed), folder / name) for name, scale in SCALES.items()}
    runs = {name: Run(folder / name) for name in SCALES}
    print(f"\n{table(runs)}\n")
    for name, d in diagnoses.items():
        print(f"{name}: {d.verdict}")
    measured = ", ".join(f"{name} {len(run.steps)}" for name, run in runs.items())
    print(f"\nMeasurements: {measured}.")
    print(f"Report:       {write_report(list(runs.values()), folder / 'report.html')}")
    # as the user called it, because it may not be on the PATH
    program = sys.argv[0] if Path(sys.argv[0]).name == "richter" else "richter"
    print(f"Dashboard:    {program} serve {folder}")
    return diagnoses
