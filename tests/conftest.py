"""Shape annotations are checked while tests run; every test owns its randomness."""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jaxtyping
import pytest

HERE = Path(__file__).parent
FOLDERS = [str(HERE), *(str(folder) for folder in sorted(HERE.iterdir()) if any(folder.glob("test_*.py")))]
sys.path[:0] = FOLDERS
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), *FOLDERS)))  # of child processes
# some virtual machines announce AMX and then refuse it: half-precision products would kill the process
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

SOURCE = Path(find_spec("richter").origin).parent  # type: ignore[union-attr, arg-type]
SHAPED = [".".join(("richter", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
          for path in SOURCE.rglob("*.py") if "jaxtyping" in path.read_text()  # others would only be slower
          and path.parent.name != "tasks"]  # whose functions say themselves what is wrong with a shape

import checker  # noqa: E402

# shapes are checked in every second worker, which shares the tests with one that is quicker; with SHAPES=all in all of them
if os.environ.get("SHAPES") == "all" or int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 2 == 0:
    jaxtyping.install_import_hook(SHAPED, "checker.typechecked")  # of what is imported after this line
    jaxtyping.jaxtyped = checker.where_shaped  # which the hook calls

import torch  # noqa: E402

import richter  # noqa: E402
from richter.core import Row  # noqa: E402
from richter.instrument.evaluate import RichterWarning  # noqa: E402
from richter.instrument.observe import Measurement  # noqa: E402

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.cuda)] if torch.cuda.is_available() else [])]


def pytest_configure(config: pytest.Config) -> None:
    """Our own warnings are errors. In pyproject.toml this line would import the instrument before it can be checked."""
    config.addinivalue_line("filterwarnings", f"error::{RichterWarning.__module__}.{RichterWarning.__name__}")


@pytest.fixture(autouse=True)
def _drawn_alike() -> None:
    """What a test draws, and which examples an audit looks at, depends on no test before it (which ones ran in the same process
    depends on the load of the machine)."""
    torch.manual_seed(0)
    audit = sys.modules.get("richter.instrument.survey.audit")  # a test may have imported the library anew
    if audit is not None:
        audit._measurements = itertools.count()


@pytest.fixture(autouse=True, scope="session")
def _digested_once() -> Iterator[None]:
    """Every sweep asks for a digest of the library's code, which takes seconds and does not change while tests run."""
    from richter.experiments import keys
    rest = keys.rest
    own = functools.cache(lambda: rest(keys.ROOT))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "rest", lambda root=keys.ROOT: own() if root == keys.ROOT else rest(root))
        yield


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """The CPU, and a GPU where there is one: without one no test is collected for it."""
    return request.param


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of data sets, and a set named "toy" that can be fetched into it."""
    from richter.tasks import registry
    from samples import toy
    monkeypatch.setenv("RICHTER_DATA", str(tmp_path / "data"))
    monkeypatch.setitem(registry.SETS, "toy", toy())
    return tmp_path / "data"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An Observer's measuring is replaced by counting: the steps at which it would have measured."""
    steps: list[int] = []

    def take(self: Measurement, step: int, matrices: int, only: Any = None) -> richter.Snapshot:
        steps.append(step)
        return richter.Snapshot((Row(step, "*", "nfc", 0.5),), step, seconds=0.001)

    monkeypatch.setattr(Measurement, "take", take)
    return steps
