"""How time and memory grow, with fitted exponents, in a figure. Every point is a process of its own, so that peaks are its own;
seconds are of the processor.

    python benchmarks/growth.py kernels       # a layerwise trace kernel with examples, outputs, width and text length
    python benchmarks/growth.py snapshots     # the default set of a GPT-2 (transformers, from config): tokens, layers, width
    python benchmarks/growth.py observed      # later snapshots of an Observer of a ViT: blocks, width, outputs
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

Sweeps = Mapping[str, tuple[str, list[int]]]
KERNELS: Sweeps = {"examples n": ("n", [64, 128, 256, 512, 1024]), "outputs C": ("C", [4, 8, 16, 32, 64]),
                   "width": ("width", [64, 128, 256, 512, 1024]), "text length T": ("T", [16, 32, 64, 128])}
SNAPSHOTS: Sweeps = {"tokens of each of 16 texts": ("T", [8, 16, 32, 64]), "layers": ("layers", [1, 2, 4, 8]),
                     "width": ("width", [32, 64, 128, 256])}
OBSERVED: Sweeps = {"blocks": ("blocks", [6, 12, 24, 48]), "width": ("width", [64, 128, 256]),
                    "outputs": ("outputs", [8, 16, 32, 64])}
SWEEPS = {"kernels": KERNELS, "snapshots": SNAPSHOTS, "observed": OBSERVED}
TITLES = {"kernels": "Layerwise trace kernels: MLP 784-256x3-10 (n = 128), and a GPT of 2 blocks for T (n = 16)",
          "snapshots": "The default set of a GPT-2: 2 layers of 64, 1,000 tokens, 16 texts of 16 tokens",
          "observed": "Later snapshots of a ViT: 6 blocks of 64, 17 tokens, 10 outputs, 32 images, 16 of them for kernels"}


def kernel(setting: dict[str, int]) -> Callable[[], object]:
    import torch

    import richter
    from richter.models import GPT, mlp
    s = {"n": 128, "C": 10, "width": 256, **setting}
    if "T" in setting:
        n = 16
        model, x = GPT(65, s["T"], d=128, depth=2), torch.randint(65, (n, s["T"]))
        output = lambda f: f[:, -1, :10]  # noqa: E731
    else:
        n, output = s["n"], None
        model, x = mlp([784, s["width"], s["width"], s["width"], s["C"]], seed=0), torch.randn(n, 784)
    richter.kernels.ntk(model, x[:2], per_layer=True, output=output)
    return lambda: richter.kernels.ntk(model, x, per_layer=True, output=output)


def snapshot(setting: dict[str, int]) -> Callable[[], object]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import richter
    s = {"T": 16, "layers": 2, "width": 64, **setting}
    model = GPT2LMHeadModel(GPT2Config(n_layer=s["layers"], n_embd=s["width"], n_head=s["width"] // 32, vocab_size=1000,
                                       bos_token_id=0, eos_token_id=0, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)).eval()
    initial = {k: v + 0.01 * torch.randn_like(v) for k, v in model.state_dict().items()}
    ids = torch.randint(1000, (16, s["T"]))
    return lambda: richter.measure(model, richter.Probe(ids, ids), initial=initial, output=lambda out: out.logits)


def observed(setting: dict[str, int]) -> Callable[[], object]:
    import itertools

    import torch
    from transformers import ViTConfig, ViTForImageClassification

    import richter
    s = {"blocks": 6, "width": 64, "outputs": 10, **setting}
    config = ViTConfig(image_size=32, patch_size=8, hidden_size=s["width"], num_hidden_layers=s["blocks"],
                       num_attention_heads=s["width"] // 32, intermediate_size=4 * s["width"], num_labels=s["outputs"])
    model = ViTForImageClassification(config).eval()
    probe = richter.Probe(torch.randn(32, 3, 32, 32), torch.arange(32) % s["outputs"], kernel_examples=16)
    watch, steps = richter.Observer(model, probe, when=1, budget=None), itertools.count()

    def work() -> None:
        watch(next(steps))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01 * p.std(correction=0) * torch.randn_like(p))
    return work


def point(what: str, setting: dict[str, int]) -> dict[str, float]:
    """Seconds (of kernels and observed snapshots, the fastest of the runs after the first; of a snapshot, with the survey) and
    peak bytes."""
    import torch
    from memory import peak
    torch.manual_seed(0)
    work = {"kernels": kernel, "snapshots": snapshot, "observed": observed}[what](setting)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    times = []
    for _ in range({"kernels": 3, "snapshots": 2, "observed": 3}[what]):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return {"seconds": min(times[1:]), "bytes": max(peak() - before, 2 ** 20)}


def exponent(x: list[int], y: list[float]) -> float:
    """The slope of log y over log x, on the upper half."""
    half = len(x) // 2
    u, v = [math.log(a) for a in x[half:]], [math.log(b) for b in y[half:]]
    mu, mv = sum(u) / len(u), sum(v) / len(v)
    return sum((a - mu) * (b - mv) for a, b in zip(u, v, strict=True)) / sum((a - mu) ** 2 for a in u)


def draw(sweeps: Sweeps, found: dict[str, dict[str, list[float]]], title: str, file: Path) -> None:
    """found: {name: {"seconds": [...], "bytes": [...]}} at the values of the sweeps."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter, NullLocator
    figure, panels = plt.subplots(2, len(sweeps), figsize=(3.3 * len(sweeps), 5.6), sharex="col", sharey="row")
    for column, (name, (_, values)) in enumerate(sweeps.items()):
        for row, (what, unit) in enumerate((("seconds", 1.0), ("bytes", 2.0 ** 20))):
            y = [v / unit for v in found[name][what]]
            panel = panels[row, column]
            panel.loglog(values, y, "o-", color=f"C{row}")
            panel.set_title(f"{name}: exponent {exponent(values, y):.2f}" if row == 0 else f"exponent {exponent(values, y):.2f}",
                            fontsize=10)
            panel.set_xticks(values, [str(v) for v in values])
            panel.xaxis.set_minor_locator(NullLocator())
            panel.yaxis.set_minor_formatter(NullFormatter())
            panel.grid(alpha=0.3)
        panels[1, column].set_xlabel(name)
    panels[0, 0].set_ylabel("seconds of the processor")
    panels[1, 0].set_ylabel("peak MiB")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(SWEEPS), nargs="?", default="kernels")
    parser.add_argument("--figure", type=Path, default=Path("growth.png"))
    parser.add_argument("--point", help="one setting, as JSON")
    asked = parser.parse_args()
    what = asked.what
    if asked.point:
        print(json.dumps(point(what, json.loads(asked.point))))
        return
    sweeps, found = SWEEPS[what], {}
    again = [sys.executable, __file__, what, "--point"]
    for name, (key, values) in sweeps.items():
        points = [json.loads(subprocess.run([*again, json.dumps({key: v})], check=True, capture_output=True,
                                            text=True).stdout.splitlines()[-1]) for v in values]
        found[name] = {kind: [p[kind] for p in points] for kind in ("seconds", "bytes")}
        for kind, y in found[name].items():
            shown = ", ".join(f"{v}: {t:.3g}" for v, t in zip(values, y, strict=True))
            print(f"{kind} over {name}: exponent {exponent(values, y):.2f}  ({shown})", flush=True)
    draw(sweeps, found, TITLES[what], asked.figure)


if __name__ == "__main__":
    main()
