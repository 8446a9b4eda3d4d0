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
    "core": ("core",), "linalg": ("core",), "layers": ("core", "layers"),
    "instrument.snapshot": ("core",), "instrument.cotangents": ("core",),
    "instrument.capture": ("core", "layers", "instrument.capture"),
    "instrument.survey": ("core", "layers", "instrument.capture", "instrument.survey"),
    "instrument.stream": ("core", "layers", "instrument.capture", "instrument.survey"),
    "instrument.tokens": ("instrument.capture", "instrument.survey"),
    "instrument.probe": ("core", "instrument.capture", "instrument.stream", "instrument.survey"),
    "kernels.infinite": ("core",), "kernels.dynamics": ("core", "linalg"),
    "kernels": ("core", "kernels", "linalg", "instrument.capture", "instrument.cotangents", "instrument.stream",
                "instrument.survey"),
    "instrument.subject": ("core", "kernels.contract", "instrument.capture", "instrument.cotangents", "instrument.probe",
                           "instrument.stream", "instrument.survey", "instrument.tokens"),
    "instrument.statistics": ("core", "kernels", "linalg", "instrument.capture", "instrument.cotangents", "instrument.probe",
                              "instrument.statistics", "instrument.stream", "instrument.subject", "instrument.survey"),
    "measures.cards": ("core", "measures"), "measures.profile": ("core",),
    # an operator outlives the measurement it would be a statistic of, so it holds its subject; nothing below imports these
    **dict.fromkeys(("measures.hessian", "measures.curvature", "measures.feature_map"), (
        "core", "linalg", "measures", "instrument.capture", "instrument.probe", "instrument.statistics", "instrument.stream",
        "instrument.subject", "instrument.survey")),
    "measures": ("core", "linalg", "instrument.cotangents", "instrument.statistics", "measures", "kernels.dynamics"),
    "instrument.evaluate": ("core", "measures", "instrument.capture", "instrument.cotangents", "instrument.statistics",
                            "instrument.subject", "instrument.survey"),
    "instrument.training": ("core", "instrument.snapshot"),
    "instrument.verdict": ("core", "instrument.snapshot", "instrument.training", "measures.cards", "runs"),
    "instrument": ("core", "layers", "kernels", "measures", "runs", "instrument"),
    "runs": ("core", "runs", "instrument.snapshot"),
    "report": ("core", "report", "runs", "instrument.snapshot", "instrument.training", "instrument.verdict", "measures.cards",
               "measures.delay", "measures.profile", "measures.saddles", "measures.stages"),
    "tasks": ("core", "linalg", "tasks"),
    "models": ("core", "models"),
    "testing": ("core", "experiments", "instrument", "kernels", "layers", "learners", "measures", "models",
                "report.drawing", "theory"),
    "theory": ("core", "kernels.dynamics", "linalg", "theory"),
    "engine": ("core", "engine", "runs"),
    "experiments.keys": (), "experiments.seeds": ("core",), "experiments.outcomes": ("core", "experiments.seeds"),
    "experiments.frame": ("core", "experiments.keys", "experiments.outcomes", "experiments.running", "experiments.seeds", "runs"),
    "experiments.staleness": ("experiments.frame",),
    "experiments.ledger": ("core", "experiments.frame", "experiments.outcomes", "experiments.seeds", "experiments.staleness",
                           "report.claims", "runs"),
    "experiments.page": ("core", "experiments.frame", "experiments.ledger", "experiments.outcomes", "experiments.staleness"),
    "experiments.export": ("core", "experiments.frame", "experiments.ledger"),
    "experiments.html": ("core", "experiments.frame", "experiments.ledger", "experiments.outcomes", "experiments.page",
                         "report.markup", "report.svg", "runs"),
    "experiments.running": ("core", "engine", "experiments.frame", "experiments.seeds", "report.drawing", "report.figures",
                            "runs"),
    "experiments": ("controls", "core", "experiments", "instrument", "kernels", "learners", "linalg", "measures", "models",
                    "report.drawing", "report.figures", "runs", "tasks", "theory", "workflows"),
    "controls": ("core", "controls"),
    "learners": ("core", "kernels.infinite", "learners", "linalg"),
    "workflows": ("controls", "core", "instrument", "kernels", "learners", "linalg", "measures", "models", "report", "runs",
                  "tasks", "theory", "workflows"),
    "commands": ("__version__", "core", "commands", "experiments", "instrument.verdict", "learners", "measures", "report", "runs",
                 "tasks", "theory", "workflows"),
    "cli": ("commands", "core"), "__main__": ("cli",), "": ("core", "instrument"),
}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("richter"):
            below = node.module.removeprefix("richter").strip(".")
            found |= {below} if below else {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {a.name.removeprefix("richter.") for a in node.names if a.name.startswith("richter.")}
    return found


SOURCES = {path: path.read_text() for path in sorted(ROOT.rglob("*.py"))}
TREES = {path: ast.parse(text) for path, text in SOURCES.items()}


def test_imports_point_downwards() -> None:
    offenders = []
    for path in SOURCES:
        name = module_of(path)
        rule = next(ALLOWED[k] for k in (name, name.rpartition(".")[0], name.partition(".")[0]) if k in ALLOWED)
        offenders += [f"{name} must not import richter.{wanted}" for wanted in sorted(imports(path))
                      if not any(wanted == k or wanted.startswith(f"{k}.") for k in rule)]
    assert not offenders, "\n".join(offenders)


@pytest.mark.parametrize("code", ["import richter", "import richter.report.figures", "import richter.cli", "import richter.runs",
                                  "import richter.report.html", "import richter.report.server", "import richter.engine",
                                  "import richter.report.views; richter.report.views.tabs()", "import richter.measures.cards",
                                  "import richter.measures.profile",
                                  "from richter.cli import main\nmain(['data', 'list'])",
                                  "from richter.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass"])
def test_import_is_light(code: str) -> None:
    check = f"{code}\nimport sys\nassert not [m for m in ('torch', 'pandas', 'matplotlib', 'sklearn') if m in sys.modules]"
    subprocess.run([sys.executable, "-c", check], check=True, capture_output=True)


KINDS = {"Cotangents", "Derived", "Features", "Gathering", "Gradient", "Gram", "HeldOut", "Initial", "Measure", "Moment",
         "OfProbe", "OfWeight", "Operator", "Previous", "RandomOutputs", "Statistic"}


@pytest.mark.parametrize("name", ["evaluate", "observe"])
def test_statistics_cotangents_and_measures_are_asked_not_looked_at(name: str) -> None:
    """No isinstance of one, and no question whether it is this or that one: a new kind changes nothing there."""
    for node in ast.walk(ast.parse((ROOT / "instrument" / f"{name}.py").read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            assert not {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)} & KINDS, ast.unparse(node)
        if isinstance(node, ast.Compare) and any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            other = ast.unparse(node.comparators[0])
            assert other == "None" or other.startswith("Mark."), ast.unparse(node)


LINES, SCREEN = 800, 60  # a subject is not split to shorten a file


def test_a_file_has_one_subject_and_a_function_fits_a_screen() -> None:
    offenders = [f"{module_of(path)} has {lines} lines" for path, text in SOURCES.items()
                 if (lines := len(text.splitlines())) > LINES]
    for path, tree in TREES.items():
        functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        offenders += [f"{module_of(path)}.{f.name} has {lines} lines" for f in functions
                      if (lines := (f.end_lineno or 0) - f.lineno) >= SCREEN]
    assert not offenders, "\n".join(offenders)


def test_hooks_and_interception_live_in_one_folder() -> None:
    for path, text in SOURCES.items():
        if not path.is_relative_to(ROOT / "instrument" / "capture"):
            for word in ("register_forward", "TorchFunctionMode", "TorchDispatchMode", "saved_tensors_hooks"):
                assert word not in text, (path, word)


DANGLING = ("Of", "What", "That", "Those", "The same", "Where", "Which", "As")  # docstrings name a result


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    offenders = []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                first = (ast.get_docstring(node) or "").partition("\n")[0]
                if first.startswith(tuple(f"{word}{mark}" for word in DANGLING for mark in " ,:")):
                    offenders.append(f"{module_of(path)}.{getattr(node, 'name', '')}: {first}")
    assert not offenders, "\n".join(offenders)


def test_a_class_name_occurs_once() -> None:
    places: dict[str, list[str]] = {}
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module_of(path))
    twice = [f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1]
    assert not twice, "\n".join(twice)


def test_every_public_name_exists() -> None:
    for name in richter.__all__:
        assert getattr(richter, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = richter.nonsense
