"""``richter demo``: train a small network on handwritten digits, measure it, and print which layers learned features."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from richter.core.values import progress
from richter.instrument.observe import Observer
from richter.instrument.probe import Probe
from richter.instrument.snapshot import Snapshot, shown
from richter.instrument.verdict import Diagnosis, diagnose
from richter.models import mlp
from richter.report.html import report as write_report
from richter.runs import Run
from richter.tasks import digits


@dataclass(frozen=True)
class DemoSettings:
    """Settings of the demo; they are stored with its run."""

    steps: int = 10000
    scale: float = 0.5
    seed: int = 0
    widths: tuple[int, ...] = (64, 256, 256, 10)
    lr: float = 0.01
    batch: int = 256


def demo(run: Path, steps: int = 10000, scale: float = 0.5, seed: int = 0) -> Diagnosis:
    """Run the README's example: these lines are all that a user needs."""
    s = DemoSettings(steps, scale, seed)
    data = digits(seed=seed)
    model = mlp(s.widths, scale=scale, seed=seed)
    optimiser = torch.optim.SGD(model.parameters(), lr=s.lr)
    draw = torch.Generator().manual_seed(seed)

    probe = Probe(data.x[:256], data.y[:256], kernel_examples=32)
    watch = Observer(model, probe, run=run, settings=s, steps=steps)

    layers = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    print(f"{'step':>6} {'loss':>7} {'test':>6}   {'   '.join(f'nfc {k}'.rjust(9) for k in layers)}   {'tangent_cka':>11}")
    bar = progress(range(steps), title="training", unit="step")

    def report(step: int, loss: Tensor, snap: Snapshot) -> None:
        with torch.no_grad():
            right = (model(data.x_test).argmax(1) == data.y_test).double().mean().item()
        numbers = "   ".join(shown(snap.row("nfc", k)).rjust(9) for k in layers)
        cka = shown(snap.row("tangent_cka"))
        bar.write(f"{step:6d} {loss.item():7.4f} {right:6.3f}   {numbers}   {cka:>11}", file=sys.stdout)

    for step in bar:
        rows = torch.randint(len(data.x), (s.batch,), generator=draw)
        loss = F.cross_entropy(model(data.x[rows]), data.y[rows])
        snap = watch(step, loss=loss)
        if snap is not None and "nfc" in snap.measures:
            report(step, loss, snap)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    if (snap := watch.now(steps)) is not None:
        report(steps, loss, snap)
    diagnosis = diagnose(watch)
    print(f"\n{watch.snapshots[-1]}\n\n{diagnosis}")
    whole = sum("nfc" in s.measures for s in watch.snapshots)
    print(f"Measured {whole} times, and {len(watch.snapshots) - whole} times the movement alone: {watch.share:.1%} of the time "
          f"({len(watch.put_off)} measurements put off to stay within the budget of {watch.budget:.0%}).")
    watch.close()
    print(f"Report:    {write_report([Run(run)], run / 'report.html')}")
    # as the user called it, because it may not be on the PATH
    program = sys.argv[0] if Path(sys.argv[0]).name == "richter" else "richter"
    print(f"Dashboard: {program} serve {run.parent}")
    return diagnosis
