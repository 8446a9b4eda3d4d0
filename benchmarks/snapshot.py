"""What a snapshot costs, as ratios within one run: against one forward-backward pass of the probe, against the same
kernel by naive torch.func, and the overhead of an Observer that does not fire."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import richter
from richter.models import mlp


def fastest(work: Callable[[], object], repeats: int = 5) -> float:
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
                         nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(32, 10))


def naive_trace_kernel(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The textbook: vmapped Jacobians of all outputs, then one product for each parameter."""
    parameters = {k: p.detach() for k, p in model.named_parameters()}

    def f(p: dict[str, torch.Tensor], one: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, p, (one[None],))[0]

    J = torch.func.vmap(torch.func.jacrev(f), (None, 0))(parameters, x)
    return sum(torch.einsum("ncp,mcp->nm", j.flatten(2), j.flatten(2)) for j in J.values())


def main() -> None:
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads; each line is a ratio of the fastest of five warm runs")
    for name, model, shape in (("MLP 784-256x3-10", mlp([784, 256, 256, 256, 10], seed=0), (784,)),
                               ("CNN 16-32-32", cnn(), (3, 32, 32))):
        x, y = torch.randn(256, *shape), torch.arange(256) % 10
        probe, start = richter.Probe(x, y), {k: v.clone() for k, v in model.state_dict().items()}

        def step(model: nn.Module = model, x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()

        unit = fastest(step)
        for what, measures in (("default set", None), ("nfc only", ["nfc"]), ("kernels only", ["tangent_cka"])):
            cost = fastest(lambda m=measures, model=model, probe=probe, start=start: richter.measure(  # type: ignore[misc]
                model, probe, m, initial=start), 3)
            print(f"{name}: {what}, 256 examples, 64 in kernels: {cost / unit:.1f} forward-backward passes of the probe")
        few = x[:32]
        K, naive = richter.kernels.ntk(model, few), naive_trace_kernel(model, few)
        print(f"{name}: trace kernel n=32 agrees to {((K - naive).norm() / naive.norm()).item():.1e}; naive torch.func takes "
              f"{fastest(lambda model=model, few=few: naive_trace_kernel(model, few), 3) / fastest(lambda model=model, few=few: richter.kernels.ntk(model, few), 3):.1f}"  # noqa: E501
              f" times as long")
        watch = richter.Observer(model, probe, when=[0])
        watch(0)
        idle = fastest(lambda watch=watch: [watch(1) for _ in range(1000)]) / 1000
        print(f"{name}: an Observer that does not fire costs {idle / unit:.1e} of a training step of 256 examples")


if __name__ == "__main__":
    main()
