"""The README's snippet on five models, with real training: the seconds that measuring took, the points on the curve of the
magnitude, and the verdict. And the seconds that ``richter.plan`` predicts beside those of a measurement.

    python benchmarks/snippet.py                # all; processor time of one thread, because the machine may be shared
    python benchmarks/snippet.py --only ViT MLP --plans
"""

from __future__ import annotations

import argparse
import importlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import richter
import richter.instrument.evaluate
import richter.instrument.observe
from richter.models import mlp
from richter.tasks import digits, mnist_5k, shakespeare

CONTEXT = 32


@dataclass(frozen=True)
class Training:
    build: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    steps: tuple[int, ...]
    batch: int = 32
    lr: float = 0.05


def images(size: int, channels: int) -> tuple[Tensor, Tensor]:
    data = mnist_5k(flat=False)
    return F.interpolate(data.x, (size, size)).expand(-1, channels, -1, -1).contiguous(), data.y


def text() -> tuple[Tensor, Tensor]:
    return shakespeare().batch(2000, CONTEXT, torch.Generator().manual_seed(0))


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
                         nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, 10))


def vit() -> nn.Module:
    return importlib.import_module("timm.models.vision_transformer").VisionTransformer(  # type: ignore[no-any-return]
        img_size=32, patch_size=8, num_classes=10, embed_dim=128, depth=4, num_heads=4)


def resnet10() -> nn.Module:
    module = importlib.import_module("timm.models.resnet")
    return module.ResNet(module.BasicBlock, (1, 1, 1, 1), num_classes=10,  # type: ignore[no-any-return]
                         channels=(16, 32, 64, 128))


def gpt2() -> nn.Module:
    transformers = importlib.import_module("transformers")
    config = transformers.GPT2Config(vocab_size=77, n_positions=CONTEXT, n_embd=96, n_layer=3, n_head=4, resid_pdrop=0.0,
                                     embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


TRAININGS = {
    "ViT": Training(vit, lambda: images(32, 3), (60,)),
    "ResNet-10": Training(resnet10, lambda: images(32, 3), (200,)),
    "GPT-2": Training(gpt2, text, (300,), batch=16, lr=0.5),
    "CNN": Training(cnn, lambda: images(28, 1), (250,), batch=64, lr=0.1),
    "MLP": Training(lambda: mlp([64, 256, 256, 10], seed=0), lambda: (digits().x, digits().y), (200, 1000, 3000, 10_000),
                    batch=64, lr=0.1),
}


def outputs(model: nn.Module, x: Tensor) -> Tensor:
    returned = model(x)
    return returned if isinstance(returned, Tensor) else returned.logits


def run(name: str, t: Training, steps: int) -> None:
    """Train as the README does."""
    torch.manual_seed(0)
    model, (x, y) = t.build(), t.data()
    optimiser = torch.optim.SGD(model.parameters(), lr=t.lr)
    begun = time.process_time()
    watch = richter.Observer(model, richter.Probe(x[:256], y[:256]))
    for step in range(steps):
        rows = torch.randint(len(x), (t.batch,))
        loss = F.cross_entropy(outputs(model, x[rows]).flatten(0, -2), y[rows].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        watch(step, loss=loss)
    diagnosis = richter.diagnose(watch)
    seconds, spent = time.process_time() - begun, watch.spent
    points = sum(map(math.isfinite, watch.series("magnitude").value.tolist()))
    print(f"| {name}, {steps:,} steps | {seconds - spent:.1f} | {spent:.1f} | {watch.probe.n} | {points} | "
          f"{sum('nfc' in s.measures for s in watch.snapshots)} | {diagnosis.word}, step {diagnosis.step:,} |", flush=True)


def predicted(name: str, t: Training) -> None:
    torch.manual_seed(0)
    model, (x, y) = t.build(), t.data()
    start = {k: v + 0.01 * torch.randn_like(v) if v.is_floating_point() else v for k, v in model.state_dict().items()}
    for n in (256, 64):
        probe = richter.Probe(x[:n], y[:n])
        plan = richter.plan(model, probe, initial=start)
        begun = time.process_time()
        richter.measure(model, probe, initial=start)
        seconds = time.process_time() - begun
        print(f"| {name}, {n} examples | {plan.seconds:.2g} | {seconds:.2g} | {plan.seconds / seconds:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(TRAININGS))
    parser.add_argument("--plans", action="store_true", help="what richter.plan predicts, and no training")
    options = parser.parse_args()
    torch.set_num_threads(1)
    clock = SimpleNamespace(perf_counter=time.process_time)
    for module in (richter.instrument.observe, richter.instrument.evaluate):
        module.time = clock  # type: ignore[assignment]
    print("| | predicted, s | measured, s | ratio |" if options.plans else
          "| | training, s | measuring, s | examples | points of the magnitude | full measurements | verdict |")
    for name in options.only:
        if options.plans:
            predicted(name, TRAININGS[name])
        else:
            for steps in TRAININGS[name].steps:
                run(name, TRAININGS[name], steps)


if __name__ == "__main__":
    main()
