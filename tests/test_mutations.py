"""A broken line of capture, survey or streams is noticed by a test, or shown to be none."""

from __future__ import annotations

import ast

import pytest

from mutations import MUTATIONS, ROOT, TESTS, Mutation, mutation, run, targets


def test_every_mutation_still_applies() -> None:
    """Its text stands once in its function, the result is other Python code, and the tests that are named with it exist."""
    stale = []
    sources = {m.file: m.source.read_text() for m in MUTATIONS}
    trees = {file: ast.dump(ast.parse(source)) for file, source in sources.items()}
    for m in MUTATIONS:
        try:
            if ast.dump(ast.parse(m.applied(sources[m.file]))) == trees[m.file]:
                stale.append(f"{m.name}: nothing changes")
        except ValueError as why:
            stale.append(f"{m.name}: {why}")
    for target in {target for m in MUTATIONS for target in targets([*m.tests, *TESTS])}:
        file, _, name = target.partition("::")
        if name and f"def {name}(" not in (ROOT / file).read_text():
            stale.append(f"{target} is no test")
    assert not stale, "\n".join(stale)


FUNCTION = """
def other():
    return 1
"""
CLASS = """
class A:
    @property
    def f(self):
        return 1
"""
LIMIT = """
LIMIT = 1
"""
SOURCE = FUNCTION + CLASS + LIMIT


@pytest.mark.parametrize(("place", "part"), [("other", FUNCTION), ("A.f", CLASS), ("LIMIT", LIMIT)])
@pytest.mark.parametrize("source", [SOURCE, LIMIT + CLASS + FUNCTION])
def test_a_mutation_changes_its_function_alone_wherever_it_stands(place: str, part: str, source: str) -> None:
    assert mutation(f"file.py::{place}", "a number", "1", "7").applied(source) == source.replace(part, part.replace("1", "7"))


def test_a_mutation_that_no_longer_applies_says_where_its_text_is() -> None:
    with pytest.raises(ValueError, match=r"file.py has no g; its text stands in: A, A.f"):
        mutation("file.py::g", "a number", "        return 1", "").applied(SOURCE)
    with pytest.raises(ValueError, match=r"'2' stands 0 times in file.py::A.f"):
        mutation("file.py::A.f", "a number", "2", "7").applied(SOURCE)
    with pytest.raises(ValueError, match=r"'1' stands 3 times in file.py::"):
        mutation("file.py", "a number", "1", "7").applied(SOURCE)


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
