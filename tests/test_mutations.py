"""A broken line of capture, survey or streams is noticed by a test, or shown to be none."""

from __future__ import annotations

import ast

import pytest

from mutations import MUTATIONS, ROOT, TESTS, Mutation, run, targets


def test_every_mutation_still_changes_a_line() -> None:
    """Its text stands in the file once, what it becomes is Python, and the tests that are named with it exist."""
    stale = []
    for m in MUTATIONS:
        source = m.source.read_text()
        changed = source.replace(m.text, m.becomes)
        if source.count(m.text) != 1:
            stale.append(f"{m.name}: {m.text!r} stands {source.count(m.text)} times in the file")
        elif ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source)):
            stale.append(f"{m.name}: nothing changes")
    for target in {target for m in MUTATIONS for target in targets([*m.tests, *TESTS])}:
        file, _, name = target.partition("::")
        if name and f"def {name}(" not in (ROOT / file).read_text():
            stale.append(f"{target} is no test")
    assert not stale, "\n".join(stale)


def test_mutations_are_many_and_spread() -> None:
    files = [m.file for m in MUTATIONS]
    layers = {f"layers/{path.name}" for path in (ROOT / "src" / "richter" / "layers").glob("*.py")}
    assert len(files) == len({m.name for m in MUTATIONS}) >= 60
    assert layers <= set(files)
    assert min(files.count(file) for file in set(files) - layers) >= 3
    assert sum(bool(m.equivalent) for m in MUTATIONS) <= 0.05 * len(MUTATIONS)


@pytest.mark.long
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_every_mutation_is_caught(mutation: Mutation) -> None:
    outcome = run(mutation, first=bool(mutation.equivalent))
    assert bool(outcome.caught) != bool(mutation.equivalent), f"{mutation.text!r} -> {mutation.becomes!r}: {outcome.caught}"
