"""What eigenpairs of H_w cost: the 100 largest of a network with ten layers of 256 on 1,000 points, as a ratio to as many
double-backward passes written by hand, with their residuals and the memory that they take, for several sizes of the basis."""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from memory import peak

import richter
from richter.measures.curvature import hessian
from richter.models import mlp


def by_hand(model: torch.nn.Module, x: torch.Tensor, w: torch.Tensor, v: list[torch.Tensor]) -> None:
    """H_w v as one writes it: a forward pass, a gradient with its graph, and the gradient of its product with v."""
    places = list(model.parameters())
    g = torch.autograd.grad(model(x), places, w, create_graph=True)
    along = torch.stack([(a * b).sum() for a, b in zip(g, v, strict=True)]).sum()
    torch.autograd.grad(along, places)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--basis", type=int, nargs="*", default=[0])
    a = parser.parse_args()
    model = mlp([784, *[a.width] * 9, 10], bias=False, seed=0)
    with torch.no_grad():
        for p in model.parameters():
            torch.nn.init.kaiming_normal_(p, generator=torch.Generator().manual_seed(p.numel()))
    x, y = torch.rand(a.points, 784, generator=torch.Generator().manual_seed(0)), torch.arange(a.points) % 10
    w = (model(x).softmax(1) - F.one_hot(y, 10)).detach() / a.points
    v = [torch.randn_like(p) for p in model.parameters()]
    by_hand(model, x, w, v)
    begun = time.process_time()
    for _ in range(10):
        by_hand(model, x, w, v)
    each = (time.process_time() - begun) / 10
    H = hessian(model, richter.Probe(x, y, chunk=a.points))
    print(f"{H.size:,} parameters, {a.points} points: a double-backward pass takes {each:.3f} s of CPU")
    for basis in a.basis:
        begun, before = time.process_time(), peak()
        pairs = H.top(a.pairs, basis=basis or None)
        seconds = time.process_time() - begun
        worst = (pairs.residuals.max() / pairs.values[0].abs()).item()
        print(f"  basis {basis or 'as it comes'}: {pairs.products} products for {a.pairs} pairs, largest residual {worst:.1e} of "
              f"|lambda_1|; {seconds:.1f} s with the {a.pairs} products for the residuals, {seconds / (400 * each):.2f} of 400 "
              f"passes; peak {(peak() - before) / 2 ** 20:.0f} MiB more, {(peak() - before) / (4 * H.size):.0f} vectors",
              flush=True)


if __name__ == "__main__":
    main()
