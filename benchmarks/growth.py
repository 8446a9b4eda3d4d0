"""How time and memory of a layerwise trace kernel grow with examples, outputs, width and text length: a figure with fitted
exponents. Every point is a process of its own, so that peaks are its own."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path

SWEEPS = {"examples n": ("n", [64, 128, 256, 512, 1024]), "outputs C": ("C", [4, 8, 16, 32, 64]),
          "width": ("width", [64, 128, 256, 512, 1024]), "text length T": ("T", [16, 32, 64, 128])}


def point(setting: dict[str, int]) -> dict[str, float]:
    """Seconds (the faster of two warm runs) and peak bytes of one kernel."""
    import torch
    from memory import peak

    import richter
    from richter.models import GPT, mlp
    torch.manual_seed(0)
    s = {"n": 128, "C": 10, "width": 256, **setting}
    if "T" in setting:
        n = 16
        model, x = GPT(65, s["T"], d=128, depth=2), torch.randint(65, (n, s["T"]))
        output = lambda f: f[:, -1, :10]  # noqa: E731
    else:
        n, output = s["n"], None
        model, x = mlp([784, s["width"], s["width"], s["width"], s["C"]], seed=0), torch.randn(n, 784)
    richter.kernels.ntk(model, x[:2], per_layer=True, output=output)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        richter.kernels.ntk(model, x, per_layer=True, output=output)
        times.append(time.perf_counter() - start)
    return {"seconds": min(times[1:]), "bytes": max(peak() - before, 2 ** 20)}


def exponent(x: list[int], y: list[float]) -> float:
    """The slope of log y over log x, on the upper half."""
    half = len(x) // 2
    u, v = [math.log(a) for a in x[half:]], [math.log(b) for b in y[half:]]
    mu, mv = sum(u) / len(u), sum(v) / len(v)
    return sum((a - mu) * (b - mv) for a, b in zip(u, v, strict=True)) / sum((a - mu) ** 2 for a in u)


def draw(found: dict[str, dict[str, list[float]]], file: Path) -> None:
    """found: {title: {"seconds": [...], "bytes": [...]}} at the values of SWEEPS."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter, NullLocator
    figure, panels = plt.subplots(2, len(SWEEPS), figsize=(13, 5.6), sharex="col", sharey="row")
    for column, (title, (_, values)) in enumerate(SWEEPS.items()):
        for row, (what, unit) in enumerate((("seconds", 1.0), ("bytes", 2.0 ** 20))):
            y = [v / unit for v in found[title][what]]
            panel = panels[row, column]
            panel.loglog(values, y, "o-", color=f"C{row}")
            panel.set_title(f"{title}: exponent {exponent(values, y):.2f}" if row == 0 else f"exponent {exponent(values, y):.2f}",
                            fontsize=10)
            panel.set_xticks(values, [str(v) for v in values])
            panel.xaxis.set_minor_locator(NullLocator())
            panel.yaxis.set_minor_formatter(NullFormatter())
            panel.grid(alpha=0.3)
        panels[1, column].set_xlabel(title)
    panels[0, 0].set_ylabel("seconds")
    panels[1, 0].set_ylabel("peak MiB")
    figure.suptitle("Layerwise trace kernels: MLP 784-256x3-10 (n = 128), and a GPT of 2 blocks for T (n = 16)")
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figure", type=Path, default=Path("growth.png"))
    parser.add_argument("--point")
    asked = parser.parse_args()
    if asked.point:
        print(json.dumps(point(json.loads(asked.point))))
        return
    found: dict[str, dict[str, list[float]]] = {}
    for title, (key, values) in SWEEPS.items():
        points = [json.loads(subprocess.run([sys.executable, __file__, "--point", json.dumps({key: v})], check=True,
                                            capture_output=True, text=True).stdout.splitlines()[-1]) for v in values]
        found[title] = {what: [p[what] for p in points] for what in ("seconds", "bytes")}
        for what, y in found[title].items():
            shown = ", ".join(f"{v}: {t:.3g}" for v, t in zip(values, y, strict=True))
            print(f"{what} over {title}: exponent {exponent(values, y):.2f}  ({shown})", flush=True)
    draw(found, asked.figure)


if __name__ == "__main__":
    main()
