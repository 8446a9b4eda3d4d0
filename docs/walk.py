"""Print the walk: the files that one ``watch(step)`` enters, and how many calls it makes between files.

    python docs/walk.py            # the second snapshot of an MLP 64-256-256-10 with a run
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import richter
from richter.models import mlp

ROOT = Path(richter.__file__).parent


def walk() -> tuple[list[str], Counter[tuple[str, str]], int]:
    """(files in the order in which they are entered, calls from one file to another, functions)."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(256, 64, generator=draw), torch.arange(256) % 10
    model = mlp((64, 256, 256, 10), seed=0)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    files: dict[str, None] = {}
    calls: Counter[tuple[str, str]] = Counter()
    functions: set[Any] = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(str(ROOT)):
            return
        files.setdefault(frame.f_code.co_filename)
        functions.add(frame.f_code)
        caller = frame.f_back
        if caller is not None and caller.f_code.co_filename.startswith(str(ROOT)):
            calls[caller.f_code.co_filename, frame.f_code.co_filename] += 1

    with (tempfile.TemporaryDirectory() as folder,
          richter.Observer(model, richter.Probe(x, y), run=Path(folder) / "run", when=1, budget=None) as watch):
        watch(0, loss=1.0)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
        sys.setprofile(look)
        try:
            watch(1, loss=0.5)
        finally:
            sys.setprofile(None)
    name = {path: str(Path(path).relative_to(ROOT)) for path in files}
    between = Counter({(name[a], name[b]): n for (a, b), n in calls.items() if a != b})
    return list(name.values()), between, len(functions)


def main() -> None:
    files, between, functions = walk()
    print(f"{len(files)} files, {functions} functions, {between.total()} calls between files\n")
    for path in files:
        entered = sum(n for (_, b), n in between.items() if b == path)
        print(f"{path:40} entered {entered:4} times")
    print("\nthe 25 most frequent edges")
    for (a, b), n in between.most_common(25):
        print(f"{n:4}  {a} -> {b}")


if __name__ == "__main__":
    main()
