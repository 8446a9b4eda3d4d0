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
    "core": (), "cosine": (), "layers": ("layers",), "cotangents": ("core",), "capture": ("core", "layers"),
    "checks": ("core",), "layercapture": ("core", "layers", "capture"),
    "survey": ("core", "layers", "capture", "layercapture"),
    "arrays": ("core",), "kernels.spectra": ("core", "arrays"), "kernels.infinite": ("core", "arrays"),
    "kernels.contract": ("layercapture",), "kernels.planning": ("core", "capture", "layercapture", "kernels.contract"),
    "kernels.ntk": ("arrays", "core", "capture", "checks", "layercapture", "survey", "cotangents", "kernels"),
    "kernels": ("kernels",), "statistics": ("layercapture",),
    "measures": ("core", "cotangents", "statistics", "measures", "kernels.spectra"),
    "probe": ("core", "layercapture"), "snapshot": ("core",), "objective": ("core", "probe"),
    "subject": ("core", "capture", "cotangents", "layercapture", "survey", "kernels.planning", "objective", "statistics",
                "probe"),
    "moments": ("capture", "cotangents", "layercapture", "kernels.ntk", "statistics", "subject"),
    "tangents": ("core", "capture", "cotangents", "layercapture", "kernels", "measures", "moments", "subject"),
    "estimates": ("core", "capture", "cotangents", "layercapture", "kernels", "measures", "moments", "tangents"),
    "evaluate": ("core", "cotangents", "estimates", "measures", "moments", "statistics", "subject", "tangents"),
    "observe": ("core", "capture", "checks", "cotangents", "evaluate", "measures", "probe", "runs", "snapshot",
                "subject"),
    "runs": ("core", "runs", "snapshot"), "verdict": ("core", "snapshot"),
    "citations": ("core",),
    "report": ("core", "citations", "cosine", "report", "runs", "snapshot", "verdict"), "tasks": ("core", "tasks"),
    "models": ("core", "models"),
    "testing": ("core", "capture", "experiments", "layercapture", "survey", "layers", "kernels", "measures", "observe", "probe",
                "models"),
    "theory": ("arrays", "core", "theory"),
    "engine": ("core", "engine", "runs"),
    "experiments.frame": ("core", "experiments.running", "runs"),
    "experiments.ledger": ("citations", "core", "experiments.frame"),
    "experiments.running": ("core", "engine", "experiments.frame", "report.figures", "runs"),
    "experiments": ("citations", "controls", "core", "cosine", "experiments", "kernels", "learners", "models", "observe", "probe",
                    "report.figures", "runs", "snapshot", "tasks", "theory"),
    "controls": ("core", "controls"),
    "learners": ("arrays", "core", "kernels.infinite", "learners"),
    "workflows.richness": ("capture", "core", "cotangents", "evaluate", "layercapture", "measures", "moments", "observe", "probe",
                           "survey"),
    "workflows": ("core", "observe", "probe", "runs", "snapshot", "models", "tasks", "report", "verdict", "workflows"),
    "commands": ("core", "citations", "commands", "experiments", "measures", "report", "runs", "tasks", "verdict", "workflows"),
    "cli": ("__version__", "commands", "core"), "": ("core", "evaluate", "observe", "probe", "snapshot", "verdict"),
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
        if path.name != "capture.py":
            assert "register_forward" not in path.read_text(), path


def test_every_public_name_exists() -> None:
    for name in richter.__all__:
        assert getattr(richter, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = richter.nonsense
