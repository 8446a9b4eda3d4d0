"""Features and neural collapse of a large sample: memory, and time against one pass of the products that they need; against a
plain implementation with n x n matrices; what they add to a snapshot of the default set. CPU time, as ratios within one run."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import richter
from richter.measures import collapse, features
from richter.models import mlp

ROWS = 4096  # of the products of one pass
NAMES = [m.name for part in (features, collapse) for m in part.MEASURES]


def sample(n: int, p: int, C: int = 10) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features in single precision with a class structure, labels, a last layer and its outputs."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.arange(n) % C
    Phi = torch.relu(torch.randn(n, p, generator=draw) + torch.randn(C, p, generator=draw)[ids])
    W = torch.randn(C, p, generator=draw) / p ** 0.5
    return Phi, ids, W, Phi @ W.T


def seconds(work: Callable[[], object], repeats: int = 1) -> float:
    """CPU time of the fastest."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def products(Phi: Tensor, ids: Tensor, f: Tensor) -> None:
    """One pass of the covariance products: features, targets and outputs with each other, in double precision."""
    d = Phi.shape[1] + 2 * f.shape[1]
    total = torch.zeros(d, d, dtype=torch.float64)
    Y = torch.nn.functional.one_hot(ids, f.shape[1])
    for rows in torch.arange(len(Phi)).split(ROWS):
        Z = torch.cat([Phi[rows].double(), Y[rows].double(), f[rows].double()], 1)
        total += Z.T @ Z


def peak() -> int:
    """The largest resident size since it was last reset, in bytes."""
    (line,) = (s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def large(n: int, p: int) -> None:
    """In a process of its own, because of its peak."""
    Phi, ids, W, f = sample(n, p)
    features.analyse(Phi[:1000], ids[:1000], f[:1000])  # libraries are loaded
    unit = seconds(lambda: products(Phi, ids, f), 2)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    of_features = seconds(lambda: features.analyse(Phi, ids, f))
    of_classes = seconds(lambda: collapse.analyse(Phi, ids, W))
    print(f"{n:,} x {p} features, 10 classes: one pass of the products takes {unit:.2f} s; features {of_features / unit:.1f} and "
          f"collapse {of_classes / unit:.1f} of it, together {(of_features + of_classes) / unit:.1f}; "
          f"{(peak() - before) / 2 ** 30:.2f} GiB beside the {Phi.nbytes / 2 ** 30:.2f} GiB of features", flush=True)


def plain(Phi: Tensor, ids: Tensor, f: Tensor) -> float:
    """The same by the n x n matrices of the definition."""
    n = len(Phi)
    P, F = Phi.double(), f.double()
    K = P @ P.T / n
    rho, e = torch.linalg.eigh(K)
    Y = torch.nn.functional.one_hot(ids, f.shape[1]).double()
    projector = F @ torch.linalg.pinv(F)
    quality = (e.T @ Y).square() / Y.square().sum(0)
    used = (e * (projector @ e)).sum(0)
    centred, kept = (M - M.mean(0) - M.mean(1)[:, None] + M.mean() for M in (K, projector))
    kappa = 1 - (centred * kept).sum() / (centred.norm() * kept.norm())
    return (kappa + 0 * (rho.sum() + quality.sum() + used.sum())).item()


def against_plain(n: int, p: int) -> None:
    Phi, ids, _, f = sample(n, p)
    ours = seconds(lambda: features.analyse(Phi, ids, f), 3)
    values: list[float] = []
    theirs = seconds(lambda: values.append(plain(Phi, ids, f)))
    off = abs(values[0] - features.analyse(Phi, ids, f).kappa_cka)
    print(f"{n:,} x {p}: {theirs / ours:,.0f} times as quick as with n x n matrices ({ours:.2f} s and {theirs:.1f} s); kappa_cka "
          f"differs by {off:.0e}", flush=True)


def in_a_snapshot() -> None:
    """The second snapshot of the default probe."""
    for name, widths in (("MLP 64-256-256-10", [64, 256, 256, 10]), ("MLP 784-256x3-10", [784, 256, 256, 256, 10])):
        model = mlp(widths, seed=0)
        x, y = torch.randn(256, widths[0]), torch.arange(256) % 10
        start = {k: v + 0.01 * torch.randn_like(v) for k, v in model.state_dict().items()}
        unit = seconds(lambda: torch.nn.functional.cross_entropy(model(x), y).backward(), 10)  # noqa: B023
        print(f"{name}, 256 examples: in forward-backward passes of the probe")
        for what, names in (("the default set", list(richter.measures.DEFAULT)), ("kappa_cka", ["kappa_cka"]),
                            ("all of features", NAMES[:6]), ("all of collapse", NAMES[6:]),
                            ("a look at the model", ["probe_loss"]),
                            ("the default set and all of them", [*richter.measures.DEFAULT, *NAMES])):
            probe = richter.Probe(x, y)
            cost = seconds(lambda: richter.measure(model, probe, names, initial=start), 3) / unit  # noqa: B023
            print(f"  {what}: {cost:.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="fewer examples")
    parser.add_argument("--large", nargs=2, type=int, help="rows and features, in this process")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.large:
        large(*given.large)
        return
    n = 6_000 if given.small else 60_000
    subprocess.run([sys.executable, __file__, "--large", str(n), "512"], check=True)
    against_plain(1_000 if given.small else 5_000, 512)
    in_a_snapshot()


if __name__ == "__main__":
    main()
