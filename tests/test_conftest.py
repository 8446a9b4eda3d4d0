"""The tests' own settings: shapes are checked while they run, and a GPU has tests only where there is one."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import jaxtyping
import pytest
import torch
from jaxtyping import Float, TypeCheckError

import checker
from richter.instrument.evaluate import RichterWarning
from richter.linalg import centre

in_a_worker_that_checks = pytest.mark.skipif(
    jaxtyping.jaxtyped is not checker.where_shaped, reason="this worker checks no shapes; with SHAPES=all every one does")
Aliased = Float[torch.Tensor, "n n"]


@in_a_worker_that_checks
def test_a_wrong_shape_is_an_error() -> None:
    with pytest.raises(TypeCheckError):
        centre(torch.zeros(3))


@in_a_worker_that_checks
def test_shapes_are_checked_in_all_of_richter() -> None:
    """A setting of pytest, or a plugin, that imports a module before conftest.py does would leave it out. (Tasks say themselves
    what is wrong with a shape.)"""
    ours = [(name, module) for name, module in list(sys.modules.items()) if name.partition(".")[0] == "richter"]
    shaped = [name for name, module in ours if not name.startswith("richter.tasks") and any(
        getattr(value, "__module__", "") == "jaxtyping" for value in vars(module).values())]
    assert len(shaped) > 5
    assert [name for name in shaped if type(sys.modules[name].__loader__).__name__ != "_JaxtypingLoader"] == []


@in_a_worker_that_checks
def test_functions_without_a_shape_are_left_alone() -> None:
    def plain(x: int, y: dict[str, list[torch.Tensor]]) -> None: ...
    def shaped(x: int) -> list[Aliased]: ...
    def unknown(x: OnlyForTypeCheckers) -> None: ...  # noqa: F821
    assert jaxtyping.jaxtyped(typechecker=checker.typechecked)(plain) is plain
    for function in (shaped, unknown):
        assert jaxtyping.jaxtyped(typechecker=checker.typechecked)(function).__wrapped__ is function


def test_our_own_warnings_are_errors() -> None:
    with pytest.raises(RichterWarning):
        warnings.warn("a remark", RichterWarning, stacklevel=1)


@pytest.mark.parametrize("gpu", [True, pytest.param(False, marks=pytest.mark.long)])  # where there is none, every run shows it
def test_a_gpu_has_tests_only_where_there_is_one(gpu: bool) -> None:
    script = f"import sys, pytest, torch\ntorch.cuda.is_available = lambda: {gpu}\nsys.exit(pytest.main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", script, "--collect-only", "-m", "cuda", "-p", "no:cacheprovider",
                           str(Path(__file__).parent / "instrument" / "test_precision.py")],
                          capture_output=True, text=True, check=False)
    collected = [line for line in done.stdout.splitlines() if "::" in line]
    assert all("[cuda" in line for line in collected)
    assert (len(collected), done.returncode) == ((3, 0) if gpu else (0, pytest.ExitCode.NO_TESTS_COLLECTED)), done.stdout


def test_what_a_test_draws_depends_on_no_other_test() -> None:
    from richter.instrument.survey.audit import Audit
    assert torch.initial_seed() == 0
    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(0)))
    assert Audit().number == 0
