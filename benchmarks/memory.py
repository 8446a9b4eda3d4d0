"""Is memory= kept? Peak resident size beyond the returned arrays, each job in a process of its own (Linux). The same job with a
half and a quarter of the memory must give the same numbers. ``--gpt2``: the default set of a GPT-2 (transformers, from config)
with its vocabulary; the peak is beyond the model and its initial weights."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

JOBS = {"MLP full, n=2000, 10 outputs": ("MLP", 2000, "full", "2GiB"),
        "CNN layerwise trace, n=1000": ("CNN", 1000, "trace", "1GiB"),
        "MLP full, n=300": ("MLP", 300, "full", "64MiB"), "CNN layerwise trace, n=100": ("CNN", 100, "trace", "128MiB")}
SMALL = ("MLP full, n=300", "CNN layerwise trace, n=100")


def peak() -> int:
    """The largest resident size since it was last reset, in bytes."""
    (line,) = (s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def work(kind: str, n: int, outputs: str, memory: int, out: str) -> None:
    """In a process of its own: the peak beyond the result, in bytes, on the standard output; the kernels in a file."""
    import torch

    import richter
    from kernels import MODELS  # of the speed benchmark
    torch.manual_seed(0)
    model, x = MODELS[kind](n)
    richter.kernels.ntk(model, x[:4], form=outputs, per_layer=outputs == "trace")  # libraries are loaded, threads started
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    K = richter.kernels.ntk(model, x, form=outputs, per_layer=outputs == "trace", memory=memory)
    layers = K if isinstance(K, dict) else {"*": K}
    held = sum(t.numel() * (t.element_size() if outputs == "full" else 8) for t in layers.values())  # traces add up in float64
    print(json.dumps({"peak": peak() - before - held, "result": held}))
    torch.save({k: t[::7].clone() for k, t in layers.items()}, out)


def language_model(layers: int, width: int, n: int, length: int, memory: str) -> None:
    """In a process of its own: peaks beyond the model and passes (in processor time) of its default set, in all and by what is
    done, on the standard output."""
    import ctypes
    import time

    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import richter
    from richter.instrument import evaluate
    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)
    model = GPT2LMHeadModel(config).eval()
    initial = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * torch.randn_like(p))
    ids = torch.randint(config.vocab_size, (n, length))
    for _ in range(2):  # first, libraries are loaded and threads started
        begun = time.process_time()
        model(ids, labels=ids).loss.backward()
        unit = time.process_time() - begun
        model.zero_grad()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before, parts, real = peak(), [], evaluate.Evaluation._stage

    def note(what: str) -> None:
        parts.append({"what": what, "peak": peak() - before, "passes": (time.process_time() - note.begun) / unit})
        print(f"{what}: {parts[-1]['peak'] / 2 ** 30:.2f} GiB, {parts[-1]['passes']:.1f} passes", file=sys.stderr, flush=True)
        Path("/proc/self/clear_refs").write_text("5")
        note.begun = time.process_time()

    def stage(self, stage, families):
        if not parts:
            note("a look at the model")
        rows = real(self, stage, families)
        note(", ".join(dict.fromkeys(p.measure.name for _, own in families for p in own)))
        return rows
    evaluate.Evaluation._stage = stage
    probe, options = richter.Probe(ids, ids), {"initial": initial, "memory": memory, "output": lambda out: out.logits}
    found: dict[str, object] = {"parameters": sum(p.numel() for p in model.parameters())}
    try:
        note.begun = time.process_time()
        snap = richter.measure(model, probe, **options)
        found |= {"peak": max(part["peak"] for part in parts), "passes": sum(part["passes"] for part in parts),
                  "numbers": sum(r.value == r.value for r in snap.rows), "parts": parts}
    except richter.core.MemoryBudgetError as why:
        found["refused"] = str(why)
    print(json.dumps(found))


def language_models(sizes: str, bounds: list[str]) -> None:
    from richter.core import parse_bytes, show_bytes
    for memory in bounds:
        done = subprocess.run([sys.executable, __file__, "--language-model", *sizes.split("x"), memory], check=True,
                              stdout=subprocess.PIPE, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        if "refused" in found:
            print(f"GPT-2 {sizes}, memory={memory}: {found['refused']}", flush=True)
            continue
        kept = "kept" if found["peak"] <= 1.1 * parse_bytes(memory) else "NOT KEPT"
        print(f"GPT-2 {sizes} ({found['parameters'] / 1e6:.0f} M), memory={memory}: peak {show_bytes(found['peak'])} beyond the "
              f"model: {kept}; {found['passes']:.0f} passes, {found['numbers']} numbers", flush=True)
        for part in found["parts"]:
            print(f"    {part['what']}: {show_bytes(part['peak'])}, {part['passes']:.1f} passes", flush=True)


def main() -> None:
    import torch

    from richter.core import parse_bytes, show_bytes
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="small jobs only")
    parser.add_argument("--gpt2", metavar="LAYERSxWIDTHxEXAMPLESxTOKENS", help="e.g. 12x768x16x64, with --bounds")
    parser.add_argument("--bounds", nargs="+", default=["1GiB", "2GiB", "4GiB", "8GiB", "16GiB"])
    parser.add_argument("--work", nargs=5)
    parser.add_argument("--language-model", nargs=5)
    asked = parser.parse_args()
    if asked.language_model:
        *sizes, memory = asked.language_model
        language_model(*map(int, sizes), memory)
        return
    if asked.gpt2:
        language_models(asked.gpt2, asked.bounds)
        return
    if asked.work:
        kind, n, outputs, memory, out = asked.work
        work(kind, int(n), outputs, int(memory), out)
        return
    for name, (kind, n, outputs, memory) in JOBS.items():
        if asked.small != (name in SMALL):
            continue
        first = None
        for share in (1, 2, 4):
            allowed = parse_bytes(memory) // share
            with tempfile.TemporaryDirectory() as folder:
                file = f"{folder}/kernels.pt"
                done = subprocess.run([sys.executable, __file__, "--work", kind, str(n), outputs, str(allowed), file], check=True,
                                      capture_output=True, text=True)
                found, K = json.loads(done.stdout.splitlines()[-1]), torch.load(file)
            first = first or K
            off = max(((K[k] - first[k]).norm() / first[k].norm()).item() for k in K)
            kept = "kept" if found["peak"] <= allowed else "NOT KEPT"
            print(f"{name}, memory={show_bytes(allowed)}: peak {show_bytes(max(found['peak'], 0))} beyond "
                  f"{show_bytes(found['result'])} of kernels: {kept}; differs from the first by {off:.0e}", flush=True)


if __name__ == "__main__":
    main()
