"""Write every number of the instrument on every model of the zoo, to the last bit, so that two versions of the code are compared.

    PYTHONPATH=src:tests python tests/dump.py before.json            # all models in four settings
    PYTHONPATH=src:tests python tests/dump.py after.json -k gpt      # models whose name contains "gpt"
    python tests/dump.py before.json after.json --compare            # list rows that differ
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

N = 12  # examples


def settings(case: Any) -> dict[str, dict[str, Any]]:
    """Arguments of ``richter.measure`` (and ``probe``, those of ``Probe``) in four settings."""
    import richter
    import zoo
    every = list(richter.measures.catalogue())
    initial = zoo.initial(case)
    return {"default": {"initial": initial},
            "every measure": {"measures": every, "initial": initial, "probe": {"weight_decay": 0.07}},
            "chunks of three": {"initial": initial, "probe": {"chunk": 3, "kernel_examples": 7}},
            "sketched outputs": {"cotangents": richter.instrument.cotangents.random_outputs(2, seed=3), "memory": "64MiB"}}


def rows(case: Any, name: str) -> Iterator[str]:
    """One line per row: layer, measure, value and error as hexadecimal floats, mark, note."""
    import richter
    arguments = settings(case)[name]
    x, y = case.batch(N)
    probe = richter.Probe(x, y, **arguments.pop("probe", {}))
    try:
        snapshot = richter.measure(case.build(), probe, output=case.output, **arguments)
    except Exception as error:
        yield f"{type(error).__name__}: {error}"
        return
    for r in snapshot.rows:
        yield " | ".join([r.layer, r.measure, float(r.value).hex(), float(r.error).hex(), r.mark.name, r.note])
    yield from (f"note {k}: {v}" for k, v in snapshot.notes.items())


def dump(path: Path, pattern: str) -> None:
    import torch

    import zoo
    torch.set_num_threads(1)
    lines: dict[str, list[str]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, case in zoo.CASES.items():
            if pattern in name:
                lines |= {f"{name}, {s}": list(rows(case, s)) for s in settings(case)}
    path.write_text(json.dumps(lines, indent=0))
    print(f"{len(lines)} measurements, {sum(map(len, lines.values()))} rows in {path}")


def compare(before: Path, after: Path) -> int:
    """Print what differs; return how many rows do."""
    old, new = json.loads(before.read_text()), json.loads(after.read_text())
    different = 0
    for key in [k for k in old if k in new]:
        a, b = old[key], new[key]
        changed = [(x, y) for x, y in zip_longest(a, b, fillvalue="") if x != y]
        different += len(changed)
        for x, y in changed[:5]:
            print(f"{key}\n  - {x}\n  + {y}")
    print(f"{different} rows differ in {len([k for k in old if k in new])} measurements")
    return different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("-k", dest="pattern", default="")
    parser.add_argument("--compare", action="store_true")
    given = parser.parse_args()
    if given.compare:
        sys.exit(1 if compare(*given.paths) else 0)
    dump(given.paths[0], given.pattern)


if __name__ == "__main__":
    main()
