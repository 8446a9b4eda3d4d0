"""Who may import whom, what an import costs, and what the command line says."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import richter

ROOT = Path(richter.__file__).parent

# module -> the parts of richter it may import (a prefix allows what is below it)
ALLOWED: dict[str, tuple[str, ...]] = {
    "core": ("core",), "layers": ("core", "layers"),
    "instrument.capture": ("core", "layers", "instrument.capture"),
    "instrument.captures": ("core", "layers", "instrument.capture"),
    "instrument.checks": ("core",), "instrument.cotangents": ("core",), "instrument.snapshot": ("core",),
    "instrument.survey": ("core", "layers", "instrument.capture", "instrument.captures", "instrument.survey"),
    "instrument.probe": ("core", "instrument.captures"), "instrument.objective": ("core", "instrument.probe"),
    "instrument.statistics": ("core", "instrument.captures"),
    "kernels.spectra": ("core",), "kernels.infinite": ("core",),
    "kernels.contract": ("instrument.captures",),
    "kernels.planning": ("core", "instrument.capture", "instrument.captures", "kernels.contract"),
    "kernels.ntk": ("core", "instrument.capture", "instrument.captures", "instrument.checks", "instrument.survey",
                    "instrument.cotangents", "kernels"),
    "kernels": ("kernels",),
    "measures": ("core", "instrument.cotangents", "instrument.statistics", "measures", "kernels.spectra"),
    "instrument.verdict": ("core", "instrument.snapshot"),
    "instrument": ("core", "layers", "kernels", "measures", "runs", "instrument"),
    "runs": ("core", "runs", "instrument.snapshot"),
    "report": ("core", "report", "runs", "instrument.snapshot", "instrument.verdict"), "tasks": ("core", "tasks"),
    "models": ("core", "models"),
    "testing": ("core", "experiments", "instrument", "kernels", "layers", "learners", "measures", "models"),
    "theory": ("core", "theory"),
    "engine": ("core", "engine", "runs"),
    "experiments.frame": ("core", "experiments.running", "runs"),
    "experiments.ledger": ("core", "experiments.frame"),
    "experiments.running": ("core", "engine", "experiments.frame", "report.figures", "runs"),
    "experiments": ("controls", "core", "experiments", "instrument", "kernels", "learners", "models", "report.figures", "runs",
                    "tasks", "theory"),
    "controls": ("core", "controls"),
    "learners": ("core", "kernels.infinite", "learners"),
    "workflows": ("core", "instrument", "measures", "models", "report", "runs", "tasks", "workflows"),
    "commands": ("core", "commands", "experiments", "instrument.verdict", "measures", "report", "runs", "tasks", "workflows"),
    "cli": ("__version__", "commands", "core"), "": ("core", "instrument"),
}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("richter"):
            below = node.module.removeprefix("richter").strip(".")
            found |= {below} if below else {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {a.name.removeprefix("richter.") for a in node.names if a.name.startswith("richter.")}
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: module_of(p) or "richter")
def test_imports_point_downwards(path: Path) -> None:
    name = module_of(path)
    rule = next(ALLOWED[k] for k in (name, name.rpartition(".")[0], name.partition(".")[0]) if k in ALLOWED)
    for wanted in imports(path):
        assert any(wanted == k or wanted.startswith(f"{k}.") for k in rule), f"{name} must not import richter.{wanted}"


@pytest.mark.parametrize("code", ["import richter", "import richter.report.figures", "import richter.cli", "import richter.runs",
                                  "import richter.report.html", "import richter.report.server", "import richter.engine",
                                  "from richter.cli import main\nmain(['data', 'list'])",
                                  "from richter.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass"])
def test_import_is_light(code: str) -> None:
    check = f"{code}\nimport sys\nassert not [m for m in ('torch', 'pandas', 'matplotlib', 'sklearn') if m in sys.modules]"
    subprocess.run([sys.executable, "-c", check], check=True, capture_output=True)


def test_hooks_live_in_one_file() -> None:
    for path in ROOT.rglob("*.py"):
        if not path.is_relative_to(ROOT / "instrument" / "capture") and path != ROOT / "instrument" / "capture.py":
            assert "register_forward" not in path.read_text(), path


def test_every_public_name_exists() -> None:
    for name in richter.__all__:
        assert getattr(richter, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = richter.nonsense
