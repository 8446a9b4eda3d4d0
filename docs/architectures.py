"""Which architectures are measured, and how well: every correlation and kernel of the default set beside brute force.

    python docs/architectures.py            # writes docs/architectures.md: a minute
    python docs/architectures.py bert kan   # prints the lines of these
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from assessing import ASSESSED, EXAMPLES, Assessment, assess  # noqa: E402
from zoo_architectures import CASES  # noqa: E402

PAGE = ROOT / "docs" / "architectures.md"
MEASURES = ASSESSED


def line(a: Assessment) -> str:
    """One architecture in the table: how many rows of each measure are exact, and how many are something else."""
    cells = [a.case.name, a.model, f"{a.covered} of {len(a.matrices)}"]
    for measure in MEASURES:
        kinds = a.rows.get(measure, Counter())
        shown = [str(kinds["exact"])] if kinds["exact"] else []
        shown += [f"{count} {kind}" for kind, count in sorted(kinds.items()) if kind != "exact"]
        cells.append(a.failure or ", ".join(shown) or "none")
    return f"| {' | '.join(cells)} |"


def summary(assessments: list[Assessment]) -> str:
    """How many architectures, rows and weight matrices, in two sentences."""
    kinds = sum((c for a in assessments for c in a.rows.values()), Counter[str]())
    origins, measured = Counter(a.case.origin for a in assessments), [a for a in assessments if a.failure != "refused"]
    refused = len(assessments) - len(measured)
    covered, matrices = sum(a.covered for a in measured), sum(len(a.matrices) for a in measured)
    rows = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
    return (f"**{len(assessments)} architectures**: {origins['transformers']} of `transformers`, {origins['hand-made']} made "
            f"by hand; refused: {refused}. Rows: {rows}.\n\n"
            f"**{covered:,} of {matrices:,} weight matrices ({covered / matrices:.1%})** of the architectures that are not "
            f"refused have feature correlations.")


def listed(head: str, lines: list[str]) -> str:
    """A table, or "None." """
    columns = head.count("|") - 1
    return "\n".join([head, f"|{'---|' * columns}", *lines]) if lines else "None."


def page(assessments: list[Assessment]) -> str:
    """The whole of docs/architectures.md."""
    missing = [f"| {a.case.name} | `{k}` | {plain(why)} |" for a in assessments if not a.error for k, why in a.missing.items()]
    remarks = [f"| {a.case.name} | {', '.join(f'`{m}`' for m in measures)} | {plain(why)} |" for a in assessments
               for why, measures in grouped(a.remarks).items()]
    refused = [f"| {a.case.name} | {plain(a.error)} |" for a in assessments if a.error]
    head = f"| architecture | model | weight matrices | {' | '.join(f'`{m}`' for m in MEASURES)} |"
    return f"""# Architectures

Written by `make zoo`; do not edit. Each model is small, has random weights and another random state as its initial one, and is
measured with the default set (but for the measures of movement, which tests/instrument/test_movement.py compares)
on {EXAMPLES} examples in float64. Every number is compared with brute force: the Jacobian of each
example alone, in every parameter and in what every product of a parameter writes (`tests/assessing.py`). The models are in
`tests/zoo_architectures.py`.

{summary(assessments)}

A cell says how many rows of a measure agree with brute force to 1e-8 (1e-5 where the model itself computes in float32), and how
many are *estimated* (a sketch, because there are more outputs than kernels take), *undefined* (0/0, or nothing that a sketch can
give) or *idle*. *Weight matrices* are trainable parameters with at least two axes longer than one, and how many of them have
feature correlations.

{listed(head, [line(a) for a in assessments])}

## Refused

{listed("| architecture | why |", refused)}

## Weight matrices without feature correlations

Their tangent kernels are exact: they are in the rows of their modules and of the whole model.

{listed("| architecture | parameter | why |", missing)}

## Rows without a number

{listed("| architecture | measures | why |", remarks)}
"""


def grouped(remarks: dict[str, str]) -> dict[str, list[str]]:
    """{why: measures}."""
    result: dict[str, list[str]] = {}
    for measure, why in remarks.items():
        result.setdefault(why, []).append(measure)
    return result


def plain(text: str) -> str:
    """Fit for a cell of a table."""
    return " ".join(text.replace("|", r"\|").replace("<", "&lt;").split())


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    if names:
        print("\n".join(line(assess(case)) for case in CASES if case.name in names))
        return
    assessments = [assess(case) for case in CASES]
    PAGE.write_text(page(assessments))
    print(summary(assessments))
    for a in assessments:
        for sentence in [*a.wrong, *(f"not seen by brute force: {k}" for k in a.unchecked)]:
            print(f"{a.case.name}: {sentence}")


if __name__ == "__main__":
    main(sys.argv[1:])
