"""Compare two runs, two steps of a run, or two checkpoints, layer by layer.

Runs: the settings that differ, the numbers of both, and, where they have kept features of the same examples
(Observer(keep_features=64)), CKA and overlap of leading features of every pair of layers. Checkpoints: files .safetensors or .pt,
which are read as numbers and never executed, with a function of yours that makes the model, and data; a run stands for the
weights it was begun with."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from richter.commands import options
from richter.commands.frame import Command, as_json
from richter.core.values import visible

if TYPE_CHECKING:
    from richter.report.comparison import Comparison


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("a", type=Path, help="a run, or a checkpoint")
    p.add_argument("b", type=Path, nargs="?", help="another; may be left out for two steps of one run")
    p.add_argument("--steps", type=int, nargs=2, metavar=("S", "T"), help="of the first and of the second (default: the last)")
    p.add_argument("--model", metavar="MODULE:FUNCTION", help="of checkpoints: a function of yours that makes the model")
    p.add_argument("--data", default="digits", help="of checkpoints: a data set, or a file .npy, .npz or .safetensors with x")
    p.add_argument("--examples", type=int, default=512, help="of checkpoints: how many of the data (default: 512)")
    p.add_argument("--layers", nargs="+", help="whose features are compared: names or patterns")
    p.add_argument("--measures", nargs="+", help="of runs: which numbers to show")
    p.add_argument("--features", type=int, default=10, help="leading features that are compared (default: 10)")
    p.add_argument("--debiased", action="store_true", help="CKA by the estimate without bias, which few examples need")
    p.add_argument("--figures", type=Path, help="also save the picture as SVG and PDF in this folder")
    options.machine(p)


def do(given: argparse.Namespace) -> int:
    record, text, seen = _checkpoints(given) if given.model else _runs(given)
    if seen is not None:
        record |= {"cka": seen.cka.tolist(), "overlap": seen.overlap.tolist(), "layers": seen.layers, "rows": seen.rows,
                   "debiased": seen.debiased}
        text.append(str(seen))
    print(as_json(record) if given.json else visible("\n\n".join(text)))
    if given.figures and seen is not None:
        from richter.report.figures import save
        save(seen.plot(), given.figures / "compare")
    return 0


def _checkpoints(given: argparse.Namespace) -> tuple[dict[str, Any], list[str], Comparison]:
    from richter.core import SelectionError
    from richter.workflows import compare
    from richter.workflows.checkpoints import built, examples, load
    if given.b is None or given.steps:
        raise SelectionError("of checkpoints two are compared, each a file: richter compare A B --model module:function.")
    model, names = built(given.model), (given.a.name, given.b.name)
    seen = compare((model, load(given.a)), (model, load(given.b)), examples(given.data, given.examples), given.layers,
                   features=given.features, debiased=given.debiased, names=names)
    return {"names": names}, [], seen


def _runs(given: argparse.Namespace) -> tuple[dict[str, Any], list[str], Comparison | None]:
    from richter.core import SelectionError, StoreError
    from richter.report import beside
    from richter.report.comparison import about, between, steps_of
    from richter.runs import Run
    from richter.runs.place import DATABASE
    for path in filter(None, (given.a, given.b)):
        if not (path / DATABASE).exists():
            raise StoreError(f"{path} is no run. Of checkpoints the model is needed too: richter compare A B --model "
                             f"module:function.")
    a, b = Run(given.a), Run(given.b or given.a)
    if given.b is None and not given.steps:
        raise SelectionError(f"compare {a.name} with what? Name another run, or two of its steps: --steps 0 1000.")
    steps = given.steps or (None, None)
    snaps = [beside.snapshot(run, step) for run, step in zip((a, b), steps, strict=True)]
    names = (f"{a.name}, step {snaps[0].step}", f"{b.name}, step {snaps[1].step}")
    pairs = beside.rows(snaps[0], snaps[1], given.measures)
    record = {"names": names, "rows_of_both": [p._asdict() for p in pairs], "settings": beside.settings(a, b)}
    text = [beside.told(names, pairs)]
    text = ([f"Settings that differ:\n{record['settings']}"] if record["settings"] else []) + text
    why = "a run keeps them if asked to, with Observer(..., keep_features=64)."
    if steps_of(a) and steps_of(b):
        if about(a).get("examples") == about(b).get("examples"):
            steps = snaps[0].step, snaps[1].step
            return record, text, between(a, b, steps, debiased=given.debiased, features=given.features, layers=given.layers)
        why = ("they are of different examples, so that they have no rows in common. Watch both runs with the same Probe and the "
               "same keep_features=.")
    return record, [*text, f"Features cannot be compared: {why}"], None


COMMAND = Command("compare", __doc__, do, arguments, group="look at runs", place=24, examples=(
    "richter compare runs/small runs/large", "richter compare runs/demo --steps 0 1000",
    "richter compare first.safetensors last.safetensors --model my_code:make_model --data mnist",
    "richter compare runs/demo last.pt --model my_code:make_model --debiased --figures pictures/"))
