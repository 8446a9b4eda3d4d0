"""What spectra and kernels of infinite networks cost: growth with examples and pixels, blocks against one array, and memory.

    python benchmarks/spectra.py                     # a table, and docs/spectra_growth.png with --figure
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

import numpy as np
import torch

from richter.core.values import table
from richter.kernels import infinite
from richter.theory import eigenlearning


def seconds(call: object, *given: object, **options: object) -> float:
    start = time.process_time()
    call(*given, **options)  # type: ignore[operator]
    return time.process_time() - start


def images(n: int, pixels: int) -> torch.Tensor:
    return torch.randn(n, 3, pixels, pixels, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def growth() -> list[tuple[str, int, int, float]]:
    """CPU seconds by examples and pixels, read-out flattened and pooled."""
    out = []
    for pool, cases in ((False, ((40, 16), (80, 16), (160, 16), (40, 32), (80, 32))),
                        (True, ((10, 8), (20, 8), (40, 8), (10, 16), (20, 16)))):
        for n, pixels in cases:
            t = seconds(infinite.convolutional, images(n, pixels), depth=2, weight_var=2.0, pool=pool)
            out.append(("pooled" if pool else "flattened", n, pixels, t))
    return out


def naive(x: torch.Tensor) -> float:
    """One array of all pairs of images and pixels, in place of blocks and of equal pairs once."""
    block, infinite.BLOCK = infinite.BLOCK, 2**40
    try:
        return seconds(infinite.convolutional, x, x, depth=2, weight_var=2.0, pool=True, memory="16GiB")
    finally:
        infinite.BLOCK = block


def peak(code: str) -> float:
    """Peak bytes of a fresh process above those after the imports."""
    script = ("import torch\nfrom richter.kernels import infinite\nfrom richter.theory import eigenlearning\n"
              "def highest():\n"
              "    return int(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])\n"
              "x = torch.randn(9, 4).double()\neigenlearning.modes(infinite.nngp(x, depth=2), x[:, 0])\n"  # loads libraries
              "before = highest()\n" + code + "\nprint(1024 * (highest() - before))")
    return float(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figure", help="save the growth as a picture")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = growth()
    shown = [[a, str(n), f"{p} x {p}", f"{t:.2f}"] for a, n, p, t in rows]
    print(table([["read-out", "images", "pixels", "CPU seconds"], *shown], right=(1, 2, 3)))
    x = images(16, 16)
    blocks = seconds(infinite.convolutional, x, depth=2, weight_var=2.0, pool=True)
    print(f"one array of all pairs takes {naive(x) / blocks:.1f} times the blocks' time (16 images of 16 x 16, pooled)")
    for memory in ("32MiB", "128MiB"):
        used = peak(f"infinite.convolutional(torch.randn(24, 3, 16, 16).double(), depth=2, pool=True, memory={memory!r})")
        print(f"memory={memory}: {used / 2**20:.0f} MiB at the peak")
    n = 2000
    code = f"x = torch.randn({n}, 20).double()\nK = infinite.nngp(x, depth=2)\neigenlearning.modes(K, x[:, 0])"
    arrays = peak(code) / (8 * n * n)
    print(f"kernel and modes of {n:,} examples: {arrays:.1f} arrays of n^2 numbers; of 15,000: "
          f"{arrays * 8 * 15_000**2 / 2**30:.1f} GiB")
    grams = [np.cov(np.random.default_rng(0).standard_normal((m, 2 * m))) for m in (500, 1000)]
    t = [seconds(eigenlearning.modes, K, np.ones(len(K))) for K in grams]
    print(f"modes: {t[1] / t[0]:.1f} times as long for twice as many examples")
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_utime:.0f} CPU seconds")
    if args.figure:
        draw(rows).savefig(args.figure, dpi=150)


def draw(rows: list[tuple[str, int, int, float]]) -> object:
    from richter.report.drawing import COLOURS, caption, label, line, panels, points, styled

    @styled
    def figure() -> object:
        picture, (ax,) = panels(1, across=1, width=5.2, height=3.2)
        for i, (kind, pixels) in enumerate(dict.fromkeys((r[0], r[2]) for r in rows)):
            n, t = np.array([(r[1], r[3]) for r in rows if (r[0], r[2]) == (kind, pixels)]).T
            points(ax, n, t, COLOURS[i], f"{kind}, {pixels} x {pixels}")
            line(ax, n, t[-1] * (n / n[-1]) ** 2, COLOURS[i])
        label(ax, "images", "CPU seconds", log="xy", legend=True)
        caption(picture, "Time grows like pairs of images (lines), and like pixels or their pairs.")
        return picture

    return figure()


if __name__ == "__main__":
    main()
