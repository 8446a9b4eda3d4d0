"""Cost of a snapshot, in forward-backward passes of the probe in the same run: all default measures and each alone, on VGG-11,
a GPT and a small MLP; snapshots of an Observer on two MLPs and four models of transformers; and the share of the wall time that
an Observer takes, within its budget and when it does not fire.

    python benchmarks/snapshot.py --only observed      # processor time of one thread
"""

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
    probe, unit = richter.Probe(s.x, s.y, kernel_examples=KERNEL_EXAMPLES), fastest(s.step)

    def snapshot(measures: list[str] | None) -> None:
        with torch.no_grad():
            next(s.model.parameters()).mul_(1.0)  # as in training, the weights are not those of the last survey
        richter.measure(s.model, probe, measures, initial=start, **s.options)

    print(f"\n{s.name}: a forward-backward pass takes {1e3 * unit:.1f} ms; the outputs require {s.required:.1f} of it")
    for what, measures in WHAT.items():
        cost = fastest(lambda m=measures: snapshot(m), 2) / unit  # type: ignore[misc]
        beyond = f", {cost - s.required:.1f} beyond what the outputs require" if measures is None else ""
        print(f"  {what}: {cost:.1f}{beyond}", flush=True)


def from_config(name: str) -> nn.Module:
    """A small classifier of transformers for 10 classes of images of 32 x 32, with initial weights."""
    import transformers

    sizes: dict[str, dict[str, Any]] = {
        "ViT": {"image_size": 32, "patch_size": 4, "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
                "intermediate_size": 512},
        "ResNet": {"embedding_size": 32, "hidden_sizes": [32, 64, 128, 256], "depths": [2, 2, 2, 2], "layer_type": "basic"},
        "Swin": {"image_size": 32, "patch_size": 2, "embed_dim": 48, "depths": [2, 2], "num_heads": [3, 6], "window_size": 4},
        "ConvNext": {"image_size": 32, "patch_size": 2, "hidden_sizes": [48, 96, 192], "depths": [2, 2, 2], "num_stages": 3}}
    config = getattr(transformers, f"{name}Config")(num_labels=10, **sizes[name])
    model: nn.Module = getattr(transformers, f"{name}ForImageClassification")(config)
    return model.eval()


def observed(repeats: int = 5) -> None:
    """The first and later snapshots of an Observer, the weights moved by noise in between."""
    print("\nSnapshots of an Observer, in processor time")
    builds: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
        "MLP 64-256-256-10": (lambda: mlp([64, 256, 256, 10], seed=0), (256, 64), 64, 30),
        "MLP 784-256x3-10": (lambda: mlp([784, 256, 256, 256, 10], seed=0), (256, 784), 64, 40),
        **{name: (lambda name=name: from_config(name), (64, 3, 32, 32), 32, 20)  # type: ignore[misc]
           for name in ("ViT", "ResNet", "Swin", "ConvNext")}}
    for name, (build, shape, kernel_examples, goal) in builds.items():
        torch.manual_seed(0)
        model, x = build(), torch.randn(*shape)
        y, parameters = torch.arange(len(x)) % 10, list(model.parameters())

        def step(model: nn.Module = model, x: Tensor = x, y: Tensor = y) -> None:
            f = model(x)
            F.cross_entropy(f if isinstance(f, Tensor) else f.logits, y).backward()

        unit = processor_time(step, max(repeats, 10))
        model.zero_grad()
        watch = richter.Observer(model, richter.Probe(x, y, kernel_examples=kernel_examples), when=1, budget=None)
        costs = []
        for i in range(1 + repeats):
            costs.append(processor_time(lambda i=i, watch=watch: watch(i), 1) / unit)  # type: ignore[misc]
            with torch.no_grad():
                for p in parameters:
                    p.add_(0.01 * p.std(correction=0) * torch.randn_like(p))
        later = sorted(costs[1:])
        print(f"  {name}: a pass takes {1e3 * unit:.1f} ms; the first snapshot {costs[0]:.0f} passes, later ones "
              f"{later[repeats // 2]:.0f} ({later[0]:.0f} to {later[-1]:.0f}); goal {goal}", flush=True)


def processor_time(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begun = time.process_time()
        work()
        times.append(time.process_time() - begun)
    return min(times)


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30, help="of training under a budget")
    parser.add_argument("--only", choices=("costs", "observed", "shares", "idle"), help="one of the four parts")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads; in forward-backward passes of the probe of the same run")
    parts: dict[str, Callable[[], object]] = {"costs": lambda: [costs(s) for s in subjects()], "observed": observed,
                                              "shares": lambda: shares(options.seconds), "idle": idle}
    for name, part in parts.items():
        if options.only in (None, name):
            part()


if __name__ == "__main__":
    main()
