"""Architectures of `transformers` and hand-made ones: correlations and kernels are those of brute force."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from assessing import Assessment, assess
from zoo_architectures import CASES, HAS_TRANSFORMERS

ROOT = Path(__file__).parents[2]
QUICK = ("gpt2", "mixtral", "albert", "segformer", "neural_ode", "routed_experts", "gru")
BY_NAME = {case.name: case for case in CASES}
EVERY = pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in BY_NAME])


@cache
def assessed(name: str) -> Assessment:
    """One architecture beside brute force."""
    if BY_NAME[name].origin == "transformers" and not HAS_TRANSFORMERS:
        pytest.skip("needs transformers")
    return assess(BY_NAME[name])


@cache
def generator() -> ModuleType:
    """docs/architectures.py."""
    spec = importlib.util.spec_from_file_location("architectures_page", ROOT / "docs" / "architectures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page() -> str:
    return (ROOT / "docs" / "architectures.md").read_text()


@EVERY
def test_every_number_is_that_of_brute_force(name: str) -> None:
    a = assessed(name)
    assert a.failure == ("refused" if BY_NAME[name].refused else ""), a.error
    assert not a.wrong
    assert not a.unchecked


@EVERY
def test_the_page_says_what_is_measured(name: str) -> None:
    assert generator().line(assessed(name)) in page().splitlines()


def test_the_page_has_a_line_for_every_architecture() -> None:
    table = re.findall(r"^\| (\w+) \| \w+ \| (\d+) of (\d+) \| (.*) \|$", page(), re.MULTILINE)
    assert [name for name, *_ in table] == list(BY_NAME)
    assert not re.findall("wrong|misplaced|unchecked|failed", "".join(cells for *_, cells in table))
    measured = [(int(covered), int(matrices)) for _, covered, matrices, cells in table if "refused" not in cells]
    covered, matrices = (sum(column) for column in zip(*measured, strict=True))
    assert f"**{covered:,} of {matrices:,} weight matrices ({covered / matrices:.1%})**" in page()
    assert matrices > 1000
    assert covered >= 0.97 * matrices
    assert sum(case.origin == "transformers" for case in CASES) >= 25


@pytest.mark.long
def test_the_page_is_what_its_script_writes() -> None:
    assert generator().page([assessed(name) for name in BY_NAME]) == page()


def test_no_architecture_is_refused_but_those_that_mix_examples() -> None:
    assert [case.name for case in CASES if case.refused] == ["clip_contrastive"]
