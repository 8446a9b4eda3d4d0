"""What recursive feature machines cost. One update of the metric and whole fits on tables, against xrfm (0.4.5) in the same run,
after checking that both compute the same matrix; a fit of 10,000 rows in units of one Cholesky factor; fits of 20,000 and 50,000
rows in bounded memory, each in a process of its own (Linux); and exponents of growth, with a figure. What is compared takes turns
on one thread, and processor time is told: machines are shared."""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from growth import exponent
from memory import peak
from slo import turns
from torch import Tensor

from richter.core import parse_bytes, show_bytes
from richter.learners import Laplace, RFMClassifier, RFMRegressor
from richter.learners.features import _by_pairs, _by_rows, gradient_outer, residual_outer
from richter.learners.metric import between, stretch

SIZES = ((1000, 1, 20), (300, 1, 10), (1437, 10, 64), (480, 31, 62), (1000, 100, 200), (4000, 1, 50))  # n, c, d
GOALS = {(1000, 1, 20): 0.9, (1000, 100, 200): 10.0}  # how many times as fast
TABLES = {"digits": 0.987, "breast_cancer": 0.979, "wine": 0.989, "diabetes": 0.488}  # what to reach
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Machine:
    """f(x) = sum_j A_j exp(-|R (x - x_j)| / L), and the ways to its feature matrices. Distances are computed in each, as xrfm
    does; in a fit they are there already."""

    x: Tensor
    A: Tensor
    R: Tensor

    @classmethod
    def drawn(cls, n: int, c: int, d: int, dtype: torch.dtype = torch.float32) -> Machine:
        g = torch.Generator().manual_seed(0)
        B = torch.randn(d, d, generator=g, dtype=torch.float64)
        R = B @ B.T / d
        x, A = torch.randn(n, d, generator=g, dtype=torch.float64), torch.randn(n, c, generator=g, dtype=torch.float64) / n
        return cls(x.to(dtype), A.to(dtype), (R / R.diagonal().mean()).to(dtype))

    @property
    def kernel(self) -> Laplace:
        return Laplace(self.x.shape[1] ** 0.5)

    def agop(self, route: Callable[..., Tensor] = gradient_outer, **options: Any) -> Tensor:
        u, w = stretch(self.x, self.R), self.x.new_ones(len(self.x))
        return between(route(self.kernel, u, self.A, w, lambda rows: self.kernel.geometry(u[rows], u), **options), self.R)

    def by_rows(self) -> Tensor:
        return self.agop(_by_rows, centred=False, diagonal=False, memory=2 ** 30)

    def by_pairs(self) -> Tensor:
        return self.agop(_by_pairs, centred=False, memory=2 ** 30)

    def fact(self) -> Tensor:
        u = stretch(self.x, self.R)
        return self.R @ residual_outer(self.kernel, u, self.x, self.A, lambda rows: self.kernel.geometry(u[rows], u))

    def agop_at_hand(self) -> Callable[[], Tensor]:
        """With the distances that solving the system left behind."""
        u, w = stretch(self.x, self.R), self.x.new_ones(len(self.x))
        g = self.kernel.geometry(u, u)
        return lambda: between(gradient_outer(self.kernel, u, self.A, w, lambda rows: g[rows]), self.R)

    def xrfm(self) -> Tensor:
        """The sum over points, not the mean."""
        from xrfm.rfm_src.kernels import LaplaceKernel
        return LaplaceKernel(self.kernel.L, 1.0).get_agop(x=self.x, z=self.x, coefs=self.A.T, mat=self.R)


def updates(rounds: int) -> None:
    print(f"\none update of the metric: times as fast as xrfm's get_agop, medians of {rounds} turns")
    print(f"{'n, c, d':<15} {'':<8} {'differ by':>9} {'xrfm ms':>8} {'AGOP':>6} {'distances at hand':>18} {'FACT':>6}   goal")
    for dtype, most in ((torch.float32, 1e-4), (torch.float64, 1e-8)):
        for size in SIZES:
            m = Machine.drawn(*size, dtype)
            ours, theirs = m.agop(), m.xrfm() / len(m.x)
            off = ((ours - theirs).norm() / theirs.norm()).item()
            assert off <= most, (size, dtype, off)
            times = turns({"xrfm": m.xrfm, "agop": m.agop, "at hand": m.agop_at_hand(), "fact": m.fact}, rounds)

            def faster(name: str, times: dict[str, list[float]] = times) -> float:
                return statistics.median(a / b for a, b in zip(times["xrfm"], times[name], strict=True))

            goal = GOALS.get(size)
            verdict = "" if goal is None else f"{goal:g} {'met' if faster('agop') >= goal else 'MISSED'}"
            print(f"{str(size)[1:-1]:<15} {str(dtype)[6:]:<8} {off:>9.0e} {1e3 * statistics.median(times['xrfm']):>8.1f} "
                  f"{faster('agop'):>6.2f} {faster('at hand'):>18.2f} {faster('fact'):>6.2f}   {verdict}", flush=True)


def smooth(n: int, d: int = 50) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, a function of three directions, and the function with noise."""
    draw = np.random.default_rng(0)
    B = draw.standard_normal((d, 3)) / d ** 0.5
    x = draw.standard_normal((n, d))
    z = x @ B
    f = np.sin(2 * z[:, 0]) + z[:, 1] * z[:, 2]
    return x, f, f + 0.3 * draw.standard_normal(n)


def fits(n: int = 10_000, iterations: int = 3) -> None:
    """A fit with everything given, beside the factors alone of the first of its systems."""
    print(f"\na fit of n={n}, d=50 with {iterations} updates, in units of {iterations + 1} Cholesky factors of n x n (float64)")
    x, _, y = smooth(n)
    H = torch.as_tensor(Laplace(7.0)(x))
    H.diagonal().add_(1e-2)

    def factor() -> None:
        for _ in range(iterations + 1):
            torch.linalg.cholesky(H)

    def fit(select: Any) -> Callable[[], Any]:
        return lambda: RFMRegressor(Laplace(7.0), ridge=1e-2, iterations=iterations, early_stopping=False, select=select,
                                    memory="8GiB").fit(x, y)

    ways = {"last": 2.0, "loo": 2.0, "auto": None}
    torch.linalg.cholesky(H[:2000, :2000])
    times: dict[str, list[float]] = {name: [] for name in ("factor", *ways)}
    for name, work in (("factor", factor), ("last", fit("last")), ("factor", factor), ("loo", fit("loo")), ("auto", fit("auto")),
                       ("factor", factor)):
        begun = time.process_time()
        work()
        times[name].append(time.process_time() - begun)
    base = statistics.median(times["factor"])
    print(f"{iterations + 1} factors: {base:.1f} s of processor time ({min(times['factor']):.1f} to {max(times['factor']):.1f})")
    for name, goal in ways.items():
        ratio = times[name][0] / base
        verdict = "" if goal is None else f"   goal {goal:g} {'met' if ratio <= goal else 'MISSED'}"
        print(f'select="{name}": {times[name][0]:.1f} s, ratio {ratio:.2f}{verdict}', flush=True)


def bounded(n: int, memory: str, iterations: int, out: str) -> None:
    """In a process of its own."""
    x, f, y = smooth(n + 10_000)
    model = RFMRegressor(Laplace(7.0), ridge=1e-2, iterations=iterations, early_stopping=False, select="last", memory=memory)
    model.fit(x[:300], y[:300]).predict(x[:10])  # libraries are loaded
    Path("/proc/self/clear_refs").write_text("5")
    before, begun = peak(), time.process_time()
    model.fit(x[:n], y[:n])
    found = {"peak": peak() - before, "resident": peak(), "minutes": (time.process_time() - begun) / 60}
    Path("/proc/self/clear_refs").write_text("5")
    before, begun = peak(), time.process_time()
    predicted = model.predict(x[n:])
    found |= {"predicting": peak() - before, "seconds": time.process_time() - begun,
              "R2": 1 - ((predicted - f[n:]) ** 2).mean() / f[n:].var()}
    some = slice(0, n, n // 1000)
    u = torch.from_numpy(model.points_[some])  # the system itself, in float64, for some of its rows
    R = torch.linalg.cholesky(torch.from_numpy(model.feature_matrix_) + 1e-12 * torch.eye(x.shape[1]))
    places = {tuple(row): i for i, row in enumerate(x[:n])}
    target = y[[places[tuple(row)] for row in model.points_[some] * model.scale_ + model.mean_]]
    K = Laplace(7.0)(u @ R, torch.from_numpy(model.points_) @ R)
    left = torch.as_tensor(K) @ torch.from_numpy(model.dual_coef_).double() + 1e-2 * torch.from_numpy(model.dual_coef_[some])
    found["residual"] = float(np.linalg.norm(left[:, 0].numpy() - target) / np.linalg.norm(target))
    np.save(out, predicted)
    print(json.dumps(found))


def large(iterations: int = 2) -> None:
    print(f"\nmemory kept, d=50, {iterations} updates: peaks beyond what was there before; R2 of 10,000 rows against the "
          f"function without noise")
    first: dict[int, np.ndarray] = {}
    for n, memory in ((5_000, "4GiB"), (20_000, "3GiB"), (20_000, "1GiB"), (20_000, "512MiB"), (50_000, "6GiB")):
        with tempfile.TemporaryDirectory() as folder:
            file = f"{folder}/predicted.npy"
            done = subprocess.run([sys.executable, __file__, "--bounded", str(n), memory, str(iterations), file], check=True,
                                  capture_output=True, text=True)
            found, predicted = json.loads(done.stdout.splitlines()[-1]), np.load(file)
        reference = first.setdefault(n, predicted)
        off = np.linalg.norm(predicted - reference) / np.linalg.norm(reference)
        kept = "kept" if max(found["peak"], found["predicting"]) <= parse_bytes(memory) else "NOT KEPT"
        print(f"n={n:<6} memory={memory:<6}: peak {show_bytes(found['peak'])} fitting ({show_bytes(found['resident'])} in all), "
              f"{show_bytes(max(found['predicting'], 0))} predicting: {kept}; {found['minutes']:.1f} CPU minutes, predicting "
              f"{found['seconds']:.1f} s; residual {found['residual']:.0e}; R2 {found['R2']:.3f}; predictions differ from the "
              f"first by {off:.0e}", flush=True)


GROWTH = {"points n": [250, 500, 1000, 2000, 4000], "inputs d": [16, 32, 64, 128, 256, 512], "outputs c": [1, 4, 16, 64, 256]}
AT = {"points n": 1000, "inputs d": 64, "outputs c": 10}
FITS = [500, 1000, 2000, 4000, 8000]


def growth(file: Path, rounds: int = 3) -> None:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter, NullLocator
    print("\ngrowth of one update (n=1000, d=64, c=10 where not told), and of a fit with one update")
    figure, panels = plt.subplots(1, 4, figsize=(15, 4.2))
    for panel, (axis, values) in zip(panels, GROWTH.items(), strict=False):
        found: dict[str, list[float]] = {name: [] for name in ("AGOP by rows", "AGOP by pairs", "FACT", "AGOP of xrfm")}
        for v in values:
            n, d, c = (AT | {axis: v}).values()
            m = Machine.drawn(n, c, d)
            slow = rounds if n * n * c * d < 4e9 else 1
            for name, times in turns(dict(zip(found, (m.by_rows, m.by_pairs, m.fact, m.xrfm), strict=True)), slow).items():
                found[name].append(statistics.median(times))
        _lines(panel, axis, values, found)
    found = {"fit": [], "two Cholesky factors": []}
    for n in FITS:
        x, _, y = smooth(n)
        H = torch.as_tensor(Laplace(7.0)(x))
        H.diagonal().add_(1e-2)
        model = RFMRegressor(Laplace(7.0), ridge=1e-2, iterations=1, early_stopping=False, select="last", memory="8GiB")

        def factors(H: Tensor = H) -> None:
            for _ in range(2):
                torch.linalg.cholesky(H)

        work: dict[str, Callable[[], object]] = {"fit": functools.partial(model.fit, x, y), "two Cholesky factors": factors}
        for name, times in turns(work, rounds if n < 4000 else 1).items():
            found[name].append(statistics.median(times))
    _lines(panels[3], "points n, one update", FITS, found)
    for panel in panels:
        panel.xaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_minor_formatter(NullFormatter())
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    panels[0].set_ylabel("seconds of one thread")
    figure.suptitle("One update of the metric (n = 1000, d = 64, c = 10, float32), and fits (float64); exponents: upper half")
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def _lines(panel: Any, axis: str, values: list[int], found: dict[str, list[float]]) -> None:
    for name, times in found.items():
        slope = exponent(values, times)
        panel.loglog(values, times, "o:" if "xrfm" in name or "Chol" in name else "o-", label=f"{name}: {slope:.2f}")
        shown = ", ".join(f"{v}: {1e3 * t:.3g}" for v, t in zip(values, times, strict=True))
        print(f"{name} over {axis}: exponent {slope:.2f}  (ms: {shown})", flush=True)
    panel.set_xlabel(axis)
    panel.set_xticks(values, [str(v) for v in values])


def tables() -> None:
    """Five folds, drawn five times (the first draw alone is told too: one row of breast cancer more or less moves a score by
    .0018, and another draw moves it by .006), each model as it comes. xrfm is given standardised columns, and a fifth of each
    training fold to choose by."""
    from sklearn import datasets
    from sklearn.model_selection import KFold, StratifiedKFold
    warnings.filterwarnings("ignore", "[0-9]+ of [0-9]+ columns are constant")
    print("\ntables, five folds drawn five times: mean score (of the first draw) and processor time of all fits")
    for name, goal in TABLES.items():
        x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        classes = name != "diabetes"
        scores = {m: np.zeros((5, 5)) for m in ("Richter", "xrfm")}
        spent = dict.fromkeys(scores, 0.0)
        for draw in range(5):
            folds = (StratifiedKFold if classes else KFold)(5, shuffle=True, random_state=draw)
            for k, (train, test) in enumerate(folds.split(x, y)):
                for model in scores:
                    begun = time.process_time()
                    predicted = (_ours if model == "Richter" else _xrfm)(x[train], y[train], x[test], classes)
                    spent[model] += time.process_time() - begun
                    truth = y[test]
                    scores[model][draw, k] = (predicted == truth).mean() if classes \
                        else 1 - ((predicted - truth) ** 2).sum() / ((truth - truth.mean()) ** 2).sum()
        ratio, most = spent["Richter"] / spent["xrfm"], 1.0 if name == "digits" else 10.0
        told = [f"{m} {s.mean():.4f} ({s[0].mean():.4f}) in {spent[m] / 5:.2f} s a draw" for m, s in scores.items()]
        print(f"{name:<14} {'; '.join(told)}   goal {goal} {_met(scores['Richter'].mean() >= goal)}; ratio of times {ratio:.2f}, "
              f"goal {most:g} {_met(ratio <= most)}", flush=True)


def _ours(x: Array, y: Array, test: Array, classes: bool) -> Array:
    return (RFMClassifier() if classes else RFMRegressor()).fit(x, y).predict(test)


def _xrfm(x: Array, y: Array, test: Array, classes: bool) -> Array:
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import StandardScaler
    from xrfm import xRFM
    scale = StandardScaler().fit(x)
    a, b, ya, yb = train_test_split(scale.transform(x), y, test_size=0.2, random_state=0, stratify=y if classes else None)
    targets = (ya, yb) if classes else (ya[:, None], yb[:, None])
    fitted = xRFM(verbose=False, random_state=0)
    fitted.fit(*(torch.tensor(v, dtype=torch.float32) if v.dtype.kind == "f" else torch.tensor(v)
                 for v in (a, targets[0], b, targets[1])))
    return np.asarray(fitted.predict(torch.tensor(scale.transform(test), dtype=torch.float32))).squeeze()


def _met(yes: bool) -> str:
    return "met" if yes else "MISSED"


def main() -> None:
    parts = ("updates", "fits", "large", "growth", "tables")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--rounds", type=int, default=11, help="turns that each of the compared has")
    parser.add_argument("--figure", type=Path, default=Path("learners_growth.png"))
    parser.add_argument("--bounded", nargs=4)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.bounded:
        n, memory, iterations, out = asked.bounded
        bounded(int(n), memory, int(iterations), out)
        return
    for part in asked.only:
        {"updates": lambda: updates(asked.rounds), "fits": fits, "large": large, "growth": lambda: growth(asked.figure),
         "tables": tables}[part]()


if __name__ == "__main__":
    main()
