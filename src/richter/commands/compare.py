"""Compare two runs, two steps of a run, or two checkpoints, layer by layer.

Runs: the settings that differ, the numbers of both, and, if they stored features of the same examples
(Observer(keep_features=64)), CKA and overlap of leading features for every pair of layers. Checkpoints: files .safetensors or
.pt, which are read as numbers and never executed, with data and a function of yours that builds the model. A run in place of a
checkpoint means its initial weights."""

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
    p.add_argument("b", type=Path, nargs="?", help="a second one; leave it out to compare two steps of one run")
    p.add_argument("--steps", type=int, nargs=2, metavar=("S", "T"), help="steps of the two runs (default: the last)")
    p.add_argument("--model", metavar="MODULE:FUNCTION", help="checkpoints only: a function of yours that builds the model")
    p.add_argument("--data", default="digits", help="checkpoints only: a data set, or a .npy, .npz or .safetensors file with x")
    p.add_argument("--examples", type=int, default=512, help="checkpoints only: number of examples (default: 512)")
    p.add_argument("--layers", nargs="+", help="layers to compare: names or patterns")
    p.add_argument("--measures", nargs="+", help="runs only: measures to show")
    p.add_argument("--features", type=int, default=10, help="number of leading features to compare (default: 10)")
    p.add_argument("--debiased", action="store_true", help="use the debiased estimate of CKA, for few examples")
    p.add_argument("--figures", type=Path, help="also save the figure as SVG and PDF in this folder")
    options.machine(p)


def do(args: argparse.Namespace) -> int:
    record, text, seen = _checkpoints(args) if args.model else _runs(args)
    if seen is not None:
        record |= {"cka": seen.cka.tolist(), "overlap": seen.overlap.tolist(), "layers": seen.layers, "rows": seen.rows,
                   "debiased": seen.debiased}
        text.append(str(seen))
    print(as_json(record) if args.json else visible("\n\n".join(text)))
    if args.figures and seen is not None:
        from richter.report.figures import save
        save(seen.plot(), args.figures / "compare")
    return 0


def _checkpoints(args: argparse.Namespace) -> tuple[dict[str, Any], list[str], Comparison]:
    """Compare two checkpoints of the user's model."""
    from richter.core import SelectionError
    from richter.workflows import compare
    from richter.workflows.checkpoints import built, examples, load
    if args.b is None or args.steps:
        raise SelectionError("two checkpoint files are needed: richter compare A B --model module:function.")
    model, names = built(args.model), (args.a.name, args.b.name)
    seen = compare((model, load(args.a)), (model, load(args.b)), examples(args.data, args.examples), args.layers,
                   features=args.features, debiased=args.debiased, names=names)
    return {"names": names}, [], seen


def _runs(args: argparse.Namespace) -> tuple[dict[str, Any], list[str], Comparison | None]:
    """Compare two runs, or two steps of one run."""
    from richter.core import SelectionError, StoreError
    from richter.report import beside
    from richter.report.comparison import about, between, steps_of
    from richter.runs import Run
    from richter.runs.place import DATABASE
    for path in filter(None, (args.a, args.b)):
        if not (path / DATABASE).exists():
            raise StoreError(f"{path} is not a run. To compare checkpoints, give the model too: richter compare A B --model "
                             f"module:function.")
    a, b = Run(args.a), Run(args.b or args.a)
    if args.b is None and not args.steps:
        raise SelectionError(f"only one run was given, {a.name}. Name another run, or two of its steps: --steps 0 1000.")
    steps = args.steps or (None, None)
    snaps = [beside.snapshot(run, step) for run, step in zip((a, b), steps, strict=True)]
    names = (f"{a.name}, step {snaps[0].step}", f"{b.name}, step {snaps[1].step}")
    pairs = beside.rows(snaps[0], snaps[1], args.measures)
    record = {"names": names, "rows_of_both": [p._asdict() for p in pairs], "settings": beside.settings(a, b)}
    text = [beside.told(names, pairs)]
    text = ([f"Settings that differ:\n{record['settings']}"] if record["settings"] else []) + text
    why = "a run stores them only with Observer(..., keep_features=64)."
    if steps_of(a) and steps_of(b):
        if about(a).get("examples") == about(b).get("examples"):
            steps = snaps[0].step, snaps[1].step
            return record, text, between(a, b, steps, debiased=args.debiased, features=args.features, layers=args.layers)
        why = ("they belong to different examples, so they have no rows in common. Watch both runs with the same Probe and the "
               "same keep_features=.")
    return record, [*text, f"Features cannot be compared: {why}"], None


COMMAND = Command("compare", __doc__, do, arguments, group="look at runs", place=24, examples=(
    "richter compare runs/small runs/large", "richter compare runs/demo/rich --steps 0 1000",
    "richter compare first.safetensors last.safetensors --model my_code:make_model --data mnist",
    "richter compare runs/demo/rich last.pt --model my_code:make_model --debiased --figures pictures/"))
