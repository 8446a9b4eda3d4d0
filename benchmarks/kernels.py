"""What tangent kernels cost, as ratios within one process: Richter against naive torch.func and against other libraries,
and against the time that the fewest floating point operations would take at the machine's own GEMM rate.

    python benchmarks/kernels.py [--threads 1 2] [--jobs PATTERN] [--quick] [--no-checks]

Other libraries are used where they are installed: pip install nngeometry torchjd curvlinops-for-pytorch
backpack-for-pytorch opacus asdfghjkl. Linux only: it forks, and reads memory from /proc. A whole run takes tens of minutes."""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import importlib.metadata
import multiprocessing
import re
import resource
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import inf, isnan, nan
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

import richter
from richter.instrument.survey import Audit
from richter.models import mlp

C = 10  # outputs of every model
TOLERANCE = 1e-4  # relative Frobenius distance up to which two kernels in float32 agree


# ---- models ----
def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
                         nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, C))


class Block(nn.Module):
    """Pre-norm causal attention, in plain products that every library can differentiate, and an MLP."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, h: Tensor) -> Tensor:
        z = self.norm1(h)
        q, k, v = (f(z).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        future = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).triu(1)
        A = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(future, float("-inf")).softmax(-1)
        h = h + self.o((A @ v).transpose(1, 2).flatten(2))
        return h + self.mlp(self.norm2(h))


class GPT(nn.Module):
    """Three blocks over 64 characters out of 65; the outputs are the first C logits at the last position."""

    def __init__(self, d: int = 192) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(65, d), nn.Embedding(64, d)
        self.blocks = nn.Sequential(*(Block(d, heads=6) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 65, bias=False)
        self.register_buffer("positions", torch.arange(64))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.token(tokens) + self.position(self.positions.expand(len(tokens), -1))
        return self.head(self.norm(self.blocks(h)))[:, -1, :C]


MODELS: dict[str, Callable[[int], tuple[nn.Module, Tensor]]] = {
    "MLP": lambda n: (mlp([784, *10 * [256], C], scale=6**0.5), torch.randn(n, 784)),  # 6**0.5: He's variance
    "CNN": lambda n: (cnn(), torch.randn(n, 3, 32, 32)),
    "GPT": lambda n: (GPT(), torch.randint(65, (n, 64)))}


class Job(NamedTuple):
    model: str
    kind: str  # "trace": one [n,n] for each module; "full": [n,C,n,C]
    n: int

    def __str__(self) -> str:
        return f"{self.model} {self.kind} n={self.n}"


JOBS = [Job("MLP", "full", 100), Job("MLP", "trace", 200), Job("CNN", "trace", 32), Job("CNN", "trace", 128),
        Job("CNN", "full", 16), Job("GPT", "trace", 8), Job("GPT", "trace", 32), Job("GPT", "full", 8)]

# alternative / Richter, at least
GOALS = [(Job("MLP", "full", 100), "nngeometry", 8.0), (Job("MLP", "full", 100), "naive", 100.0),
         (Job("MLP", "trace", 200), "best peer", 2.4), (Job("CNN", "trace", 32), "naive", 1.5),
         (Job("CNN", "full", 16), "TorchJD", 1.6), (Job("GPT", "trace", 8), "naive", 2.0),
         (Job("GPT", "full", 8), "TorchJD", 1.5)]
NEAR = 1.5  # Richter / time of the fewest operations, at most, in every job


# ---- the ways to a kernel: each takes a model and "trace" or "full" and returns a function of x ----
Kernel = Any  # {module name: Tensor}, or one Tensor for the whole model
Function = Callable[[Tensor], Kernel]


def by_richter(model: nn.Module, kind: str) -> Function:
    return lambda x: richter.kernels.ntk(model, x, form=kind, per_layer=kind == "trace")


def unchecked(model: nn.Module, kind: str) -> Function:
    """Richter without the checks of what was captured: to see what they cost, and for nothing else."""
    kernel = by_richter(model, kind)

    def without(x: Tensor) -> Kernel:
        with mock.patch.object(Audit, "due", return_value=False):
            return kernel(x)

    return without


def from_gradients(rows: Iterable[dict[str, Tensor]], kind: str) -> Kernel:
    """The kernel of per-example gradients that come one output at a time: {parameter name: [n, ...]}."""
    if kind == "full":
        columns = [{k: g.flatten(1) for k, g in row.items()} for row in rows]
        return from_jacobians(torch.stack([row.pop(k) for row in columns], 1) for k in list(columns[0]))
    K: dict[str, Tensor] = {}
    for row in rows:
        while row:
            name, G = row.popitem()
            module, G = name.rpartition(".")[0], G.flatten(1)
            K[module] = K.get(module, 0) + G @ G.T
            del G  # freed before the next output's gradients are made
    return K


def from_jacobians(Js: Iterable[Tensor]) -> Tensor:
    """The full kernel of Jacobians [n, C, p], one parameter at a time."""
    return sum(torch.einsum("ncp,mdp->ncmd", J, J) for J in Js)


def naive(model: nn.Module, kind: str) -> Function:
    """torch.func as in its tutorials: vmap(jacrev) for all outputs, vmap(grad) for one output at a time."""
    p = {k: q.detach() for k, q in model.named_parameters()}

    def f(p: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(model, p, (one[None],))[0]

    if kind == "full":
        return lambda x: from_jacobians(J.flatten(2) for J in vmap(jacrev(f), (None, 0))(p, x).values())
    return lambda x: from_gradients((vmap(grad(lambda p, one, c=c: f(p, one)[c]), (None, 0))(p, x) for c in range(C)), kind)


def by_torchjd(model: nn.Module, kind: str) -> Function:
    from torchjd.autogram import Engine
    engine = Engine(model, batch_dim=0)
    if kind == "full":
        return lambda x: engine.compute_gramian(model(x)).reshape(len(x), C, len(x), C)
    return lambda x: sum(engine.compute_gramian(model(x)[:, c]) for c in range(C))


def by_nngeometry(model: nn.Module, kind: str) -> Function:
    from nngeometry.gram import GramMatrix
    equation = {"full": "cndm->ncmd", "trace": "cncm->nm"}[kind]
    return lambda x: torch.einsum(equation, GramMatrix(model, (x.clone(),)).to_torch())  # the clone gets requires_grad


def by_curvlinops(model: nn.Module, kind: str) -> Function:
    from curvlinops import JacobianLinearOperator

    def kernel(x: Tensor) -> Tensor:
        J = JacobianLinearOperator(model, list(model.parameters()), [(x, x)], check_deterministic=False, num_data=len(x))
        columns = [J @ (J.adjoint() @ E) for E in torch.eye(len(x) * C).split(50, dim=1)]  # at once they would not fit
        return torch.cat(columns, 1).reshape(len(x), C, len(x), C)

    return kernel


def by_backpack(model: nn.Module, kind: str) -> Function:
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad
    extend(model)

    def rows(x: Tensor) -> Iterator[dict[str, Tensor]]:
        f = model(x)
        for c in range(C):
            with backpack(BatchGrad(), retain_graph=True):
                f[:, c].sum().backward(retain_graph=True)
            yield {k: p.__dict__.pop("grad_batch") for k, p in model.named_parameters()}

    return lambda x: from_gradients(rows(x), kind)


def by_opacus(model: nn.Module, kind: str) -> Function:
    from opacus import GradSampleModule
    wrapped = GradSampleModule(model, loss_reduction="sum")

    def rows(x: Tensor) -> Iterator[dict[str, Tensor]]:
        for c in range(C):  # its hooks use up the activations, so that each output needs a forward pass
            wrapped(x)[:, c].sum().backward()
            yield {k: p.grad_sample for k, p in model.named_parameters()}
            wrapped.zero_grad()

    return lambda x: from_gradients(rows(x), kind)


def by_asdl(model: nn.Module, kind: str) -> Function:
    import asdl
    if kind == "full":
        return lambda x: asdl.empirical_implicit_ntk(model, x).transpose(1, 2)
    plain = not any(isinstance(m, nn.Conv2d) for m in model.modules())  # its conv "hadamard" is an approximation
    kernel = asdl.empirical_class_wise_hadamard_ntk if plain else asdl.empirical_class_wise_direct_ntk
    return lambda x: kernel(model, x).sum(-1)


class Method(NamedTuple):
    name: str
    package: str
    models: str
    kinds: str
    way: Callable[[nn.Module, str], Function]


# Left out because they fail on the GPT: nngeometry (no Embedding), BackPACK (no LayerNorm), asdl's trace (shapes). Curvlinops
# has no cheaper trace. A library that gives only the sum over modules is compared with the sum of Richter's.
RICHTER = Method("Richter", "richter", "MLP CNN GPT", "trace full", by_richter)
UNCHECKED = Method("no checks", "richter", "MLP CNN GPT", "trace full", unchecked)
NAIVE = Method("naive", "torch", "MLP CNN GPT", "trace full", naive)
PEERS = [Method("TorchJD", "torchjd", "MLP CNN GPT", "trace full", by_torchjd),
         Method("nngeometry", "nngeometry", "MLP CNN", "trace full", by_nngeometry),
         Method("curvlinops", "curvlinops-for-pytorch", "MLP CNN GPT", "full", by_curvlinops),
         Method("BackPACK", "backpack-for-pytorch", "MLP CNN", "trace full", by_backpack),
         Method("Opacus", "opacus", "MLP CNN GPT", "trace full", by_opacus),
         Method("asdl", "asdfghjkl", "MLP CNN", "trace", by_asdl), Method("asdl", "asdfghjkl", "MLP CNN GPT", "full", by_asdl)]


# ---- the fewest operations ----
def layers(model: nn.Module, x: Tensor) -> list[tuple[type, int, int, int, int]]:
    """(type, positions, live positions, d_in, d_out) in the order of the calls; live is where the outputs depend on it."""
    seen: list[tuple[nn.Module, Tensor]] = []
    hooks = [m.register_forward_hook(lambda m, _, out: seen.append((m, out))) for m in model.modules()
             if isinstance(m, (nn.Linear, nn.Conv2d, nn.Embedding, Block))]
    f = model(x)
    found = []
    for (m, _), g in zip(seen, torch.autograd.grad(f, [out for _, out in seen], torch.randn_like(f)), strict=True):
        live = (g != 0).any(1 if isinstance(m, nn.Conv2d) else -1).any(0)
        W = m.o.weight if isinstance(m, Block) else m.weight.T if isinstance(m, nn.Embedding) else m.weight
        found.append((type(m), live.numel(), int(live.sum()), W[0].numel(), len(W)))
    for hook in hooks:
        hook.remove()
    return found


def fewest_flops(found: list[tuple[type, int, int, int, int]], n: int, v: int, kind: str) -> float:
    """Operations of the cheapest known algorithm for each layer: a multiply-add is 2, a symmetric product costs half.

    Elementwise work, norms and biases are not counted. The forward pass is the model's own, at all positions; what goes
    backward and into the kernel is at live ones only.
    """
    total, vv = 0.0, v if kind == "trace" else v * v
    for i, (what, s, live, d_in, d_out) in enumerate(found):
        P = d_in * d_out
        by_gradients = n * n * vv * P  # the Gram matrix of per-example gradients
        if what is Block:  # attention: two products forward, four backward
            total += 4 * n * s * s * d_out + 8 * v * n * live * s * d_out
        elif what is nn.Embedding:  # lookups cost nothing
            total += by_gradients
        else:
            by_gradients += 2 * v * n * live * P
            by_pairs = n * n * live**2 * (d_in + v * d_out) + (n * n * live * vv * d_out if kind == "full" else 0)
            total += 2 * n * s * P + (2 * v * n * live * P if i else 0)
            total += n * n * (d_in + vv * d_out) if live == 1 else min(by_gradients, by_pairs)
    return total


# ---- measuring, each in a process of its own ----
def apart(work: Callable[..., Any], threads: int, *arguments: Any, limit: float = 600) -> Any:
    """``work(*arguments)`` in a forked process, or one sentence (str) about its failure.

    This process never computes, so that every child starts with clean threads and memory.
    """
    receive, send = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        warnings.simplefilter("ignore")
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        try:
            send.send(work(*arguments))
        except ModuleNotFoundError as e:
            send.send(f"not installed ({e.name})")
        except Exception as e:
            send.send(f"{type(e).__name__}: {(str(e).strip() or 'no message').splitlines()[0][:100]}")

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    send.close()
    try:
        return receive.recv() if receive.poll(limit) else f"more than {limit:.0f} s"
    except EOFError:
        return "killed (out of memory?)"
    finally:
        child.kill()
        child.join()


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def gemm_rate() -> float:
    """The machine's best float32 rate, in operations a second."""
    sizes = 5 * [1024, 2048]
    return max(2 * d**3 / seconds(partial(torch.mm, A, A)) for d in sizes for A in [torch.randn(d, d)])


def distance(K: Kernel, reference: Kernel) -> float:
    """Relative Frobenius distance: of the worst module where both have modules, else of the sums."""
    if isinstance(K, dict):
        if K.keys() != reference.keys():
            raise ValueError(f"modules {sorted(K.keys() ^ reference.keys())} have a kernel on one side only")
        return torch.tensor([distance(K[name], reference[name]) for name in K]).max().item()  # NaN, if there is one
    reference = sum(reference.values()) if isinstance(reference, dict) else reference
    if K.shape != reference.shape:
        raise ValueError(f"kernel of shape {tuple(K.shape)}, not {tuple(reference.shape)}")
    return ((K - reference).double().norm() / reference.double().norm()).item()


def richter_alone(job: Job, enough: float) -> tuple[float, float, float]:
    """Median seconds of warm calls, the GEMM rate of the same process, and the fewest operations."""
    model, x = MODELS[job.model](job.n)
    kernel, rate, times = by_richter(model, job.kind), gemm_rate(), []
    kernel(x)
    while len(times) < 3 or sum(times) < enough:
        times.append(seconds(lambda: kernel(x)))
    return statistics.median(times), max(rate, gemm_rate()), fewest_flops(layers(model, x[:2]), job.n, C, job.kind)


def against_richter(job: Job, method: Method, enough: float) -> tuple[float, float, bool]:
    """Distance to Richter's kernel, ratio of median warm times (alternative / Richter), and whether modules were given."""
    model, x = MODELS[job.model](job.n)
    ours, theirs = by_richter(model, job.kind), method.way(copy.deepcopy(model), job.kind)
    start, reference, K = time.perf_counter(), ours(x), theirs(x)
    far, modules = distance(K, reference), isinstance(K, dict)
    del K, reference
    ours_took: list[float] = []
    theirs_took: list[float] = []
    while not theirs_took or ((len(theirs_took) < 3 or sum(theirs_took) < enough) and time.perf_counter() - start < 30 * enough):
        theirs_took.append(seconds(lambda: theirs(x)))
        spent = 0.0
        while spent < min(theirs_took[-1], 0.5):  # several calls of the faster one for each of the slower
            ours_took.append(seconds(lambda: ours(x)))
            spent += ours_took[-1]
    return far, statistics.median(theirs_took) / statistics.median(ours_took), modules


def peak_memory(job: Job, method: Method) -> float:
    """MiB above the start, sampled every millisecond; a first call on two examples has loaded what is loaded once."""
    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20

    def watch() -> None:
        while not done.wait(0.001):
            samples.append(resident())

    model, x = MODELS[job.model](job.n)
    kernel = method.way(model, job.kind)
    kernel(x[:2])
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed would hide the same amount of the peak
    samples, done, watcher = [resident()], threading.Event(), threading.Thread(target=watch)
    watcher.start()
    K = kernel(x)
    samples.append(resident())
    done.set()
    watcher.join()
    del K
    return max(samples) - samples[0]


# ---- the report ----
def report(job: Job, threads: int, enough: float, no_checks: bool = False) -> dict[str, float]:
    """Measure one job, print its rows, and return what the goals need: ratios of those that agree only."""
    def memory(of: Job, method: Method) -> float:
        mib = apart(peak_memory, threads, of, method)
        return mib if isinstance(mib, float) else nan

    def row(method: str, gives: str = "", far: str = "", ratio: str = "", mib: float = nan, note: str = "") -> None:
        peak = "" if isnan(mib) else f"{mib:.0f}"
        print(f"{job!s:<16} {method:<11} {gives:<8} {far:>9} {ratio:>7} {peak:>9}  {note}", flush=True)

    alone = apart(richter_alone, threads, job, enough)
    if isinstance(alone, str):
        row("Richter", note=alone)
        return {}
    took, rate, flops = alone
    ours, one = memory(job, RICHTER), memory(job._replace(kind="trace"), NAIVE)
    numbers = {"minimum": took * rate / flops}
    row("Richter", "modules" if job.kind == "trace" else "total", "", "1", ours,
        f"{took:.3f} s; minimal {flops / 1e9:.1f} GFLOP take {flops / rate:.3f} s at the GEMM rate of {rate / 1e9:.0f} GFLOP/s: "
        f"Richter is {took * rate / flops:.2f} times that")
    for method in (*[UNCHECKED] * no_checks, NAIVE, *PEERS):
        if job.model not in method.models or job.kind not in method.kinds:
            continue
        found = apart(against_richter, threads, job, method, enough)
        if isinstance(found, str):
            row(method.name, note=found)
            continue
        far, ratio, modules = found
        agrees = far <= TOLERANCE
        row(method.name, "modules" if modules else "total", f"{far:.0e}", f"{ratio:.2f}",
            one if method is NAIVE and job.kind == "trace" else memory(job, method), "" if agrees else "WRONG")
        numbers |= {method.name: ratio} if agrees else {}
    if job.kind == "full":
        row("naive", mib=one, note="one output at a time (trace), for its memory")
    best = min((numbers[m.name] for m in PEERS if m.name in numbers), default=nan)
    return numbers | {"best peer": best, "memory": ours / one}


def verdict(results: dict[int, dict[Job, dict[str, float]]], job: Job, key: str, least: float, most: float, what: str) -> str:
    """A goal is met when it is met at every number of threads."""
    values = [numbers[job].get(key, nan) for numbers in results.values()]
    word = "unknown" if any(map(isnan, values)) else "met" if all(least <= value <= most for value in values) else "missed"
    shown = ", ".join(f"{value:.2f} with {threads} threads" for threads, value in zip(results, values, strict=True))
    return f"{word:<7} {job}: {what} {f'>= {least:g}' if least else f'<= {most:g}'}: {shown}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--jobs", default="", help="a regular expression; the jobs are " + ", ".join(map(str, JOBS)))
    parser.add_argument("--quick", action="store_true", help="an eighth of the examples: does it run, not how fast is it")
    parser.add_argument("--no-checks", action="store_true", help="Richter without its checks as one more method; 1 - ratio is "
                                                                   "their share of the time")
    given = parser.parse_args()
    jobs = [job for job in JOBS if re.search(given.jobs, str(job), re.IGNORECASE)]
    if not jobs:
        parser.error(f"--jobs {given.jobs!r} is none of " + ", ".join(map(str, JOBS)))
    packages = dict.fromkeys(m.package for m in (RICHTER, NAIVE, *PEERS))
    installed = {d.name: d.version for d in importlib.metadata.distributions()}
    results: dict[int, dict[Job, dict[str, float]]] = {}
    for threads in given.threads:
        print(f"\n{threads} threads; GEMM {apart(gemm_rate, threads) / 1e9:.0f} GFLOP/s; float32, {C} outputs; "
              + ", ".join(f"{name} {installed.get(name, 'not installed')}" for name in packages))
        print("ratio: median time / Richter's, warm and interleaved; peak: MiB above the start" + given.quick * "; QUICK")
        print(f"{'job':<16} {'method':<11} {'gives':<8} {'rel.diff':>9} {'ratio':>7} {'peak MiB':>9}")
        sizes = [max(4, job.n // 8) if given.quick else job.n for job in jobs]
        results[threads] = {job: report(job._replace(n=n), threads, 0 if given.quick else 2, given.no_checks)
                            for job, n in zip(jobs, sizes, strict=True)}
    print("\ngoals" + given.quick * " (QUICK: the numbers mean nothing)")
    for job, peer, ratio in GOALS:
        if job in jobs:
            print(verdict(results, job, peer, ratio, inf, f"{peer} / Richter"))
    for job in jobs:
        print(verdict(results, job, "minimum", 0, NEAR, "Richter / time of the fewest operations"))
    for job in jobs:
        print(verdict(results, job, "memory", 0, 1, "peak memory, Richter / naive one output at a time"))


if __name__ == "__main__":
    main()
