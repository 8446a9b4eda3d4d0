"""What a snapshot costs, in forward-backward passes of the probe in the same run: all default measures and each alone, on VGG-11,
a GPT and a small MLP; and what an Observer takes of the wall time, within its budget and when it does not fire."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import richter
from richter.instrument.cotangents import random_outputs
from richter.models import GPT, mlp, vgg11

KERNEL_EXAMPLES = 64
WHAT = {"the default set": None, "what is cheap alone": list(richter.measures.MOVEMENT),
        "linearisation_gap": ["linearisation_gap"], "feature_change_cka": ["feature_change_cka"],
        "function_change": ["function_change"],
        "nfc, cnfc, c_uc_ratio": ["nfc", "cnfc", "c_uc_ratio"], "weight_change": ["weight_change"],
        "tangent_alignment": ["tangent_alignment"], "tangent_cka": ["tangent_cka"],
        "tangent_cka, _stable_rank, _correlation": ["tangent_cka", "tangent_stable_rank", "tangent_correlation"],
        "fisher_stable_rank, _correlation": ["fisher_stable_rank", "fisher_correlation"]}


@dataclass(frozen=True)
class Subject:
    name: str
    model: nn.Module
    x: Tensor
    y: Tensor
    required: float  # backward passes that the outputs require, in forward-backward passes: each is a third of one
    options: Mapping[str, Any] = field(default_factory=dict)

    def step(self) -> None:
        self.model.zero_grad()
        F.cross_entropy(self.model(self.x).flatten(0, -2), self.y.flatten()).backward()


def subjects() -> list[Subject]:
    ids, share = torch.randint(65, (256, 17)), KERNEL_EXAMPLES / 256
    gpt = (8 + 32 * share + 8 * share) / 3  # correlations: 8 for each example; norms of kernels: 32; single outputs: 8
    return [Subject("VGG-11, 256 images, 10 outputs", vgg11(), torch.randn(256, 3, 32, 32), torch.arange(256) % 10, 10 / 3),
            Subject("GPT (3 blocks, d=128), T=16, 65 tokens, 64 random outputs", GPT(65, 16, d=128, depth=3),
                    ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), gpt, {"cotangents": random_outputs(64)}),
            Subject("MLP 784-256x3-10", mlp([784, 256, 256, 256, 10], seed=0), torch.randn(256, 784), torch.arange(256) % 10,
                    10 / 3)]


def fastest(work: Callable[[], object], repeats: int = 3) -> float:
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def costs(s: Subject) -> None:
    start = {k: v + 0.01 * torch.randn_like(v) for k, v in s.model.state_dict().items()}
    probe, unit = richter.Probe(s.x, s.y, kernel=KERNEL_EXAMPLES), fastest(s.step)

    def snapshot(measures: list[str] | None) -> None:
        with torch.no_grad():
            next(s.model.parameters()).mul_(1.0)  # as in training, the weights are not those of the last survey
        richter.measure(s.model, probe, measures, initial=start, **s.options)

    print(f"\n{s.name}: a forward-backward pass takes {1e3 * unit:.1f} ms; the outputs require {s.required:.1f} of it")
    for what, measures in WHAT.items():
        cost = fastest(lambda m=measures: snapshot(m), 2) / unit  # type: ignore[misc]
        beyond = f", {cost - s.required:.1f} beyond what the outputs require" if measures is None else ""
        print(f"  {what}: {cost:.1f}{beyond}", flush=True)


def shares(seconds: float) -> None:
    """Training for a while under Observer(budget=0.05), measuring as often as it may."""
    print()
    for s in subjects():
        if s.name.startswith("VGG"):
            s = Subject("CNN (VGG-11, an eighth of the channels)", vgg11(width=0.125), s.x, s.y, s.required)
        optimiser = torch.optim.SGD(s.model.parameters(), 1e-3)
        watch = richter.Observer(s.model, richter.Probe(s.x, s.y), when=1)
        begun, step = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            watch(step)
            s.step()
            optimiser.step()
            step += 1
        print(f"{s.name}: {step} steps in {seconds:.0f} s, measured {len(watch.snapshots)} times, {watch.share:.1%} of the wall "
              f"time (budget {watch.budget:.0%}), {len(watch.put_off)} put off", flush=True)


def idle() -> None:
    s = subjects()[-1]
    watch = richter.Observer(s.model, richter.Probe(s.x, s.y), when=[0])
    watch(0)
    cost = fastest(lambda: [watch(1) for _ in range(1000)]) / 1000
    print(f"\nAn Observer that does not fire costs {cost / fastest(s.step):.0e} of a training step of {s.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30, help="of training under a budget")
    asked = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads; in forward-backward passes of the probe of the same run")
    for s in subjects():
        costs(s)
    shares(asked.seconds)
    idle()


if __name__ == "__main__":
    main()
