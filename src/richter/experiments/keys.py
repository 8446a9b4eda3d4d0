"""What code an experiment's numbers come from, as digests: the key of an experiment changes when that code does.

Two parts are told apart. The *modules* of an experiment are its own file and what it imports, directly or through others, from
the packages that describe what is computed: experiments, tasks, models, theory, learners, controls. They are the key that a
record keeps. The *rest* is the instrument and everything else that serves all experiments alike; a change there is noticed by
running an experiment again at smoke scale and comparing its numbers with the record (`richter.experiments.staleness`).

Imports are read from the syntax trees, nothing is imported. Comments, docstrings and layout are not part of a digest.
"""

from __future__ import annotations

import ast
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FOLLOWED = ("experiments", "tasks", "models", "theory", "learners", "controls")
JUDGING = {f"experiments/{name}.py" for name in ("html", "keys", "ledger", "page", "seeds", "staleness")}
FRAME = {"experiments/__init__.py", "experiments/frame.py", "experiments/running.py", *JUDGING}  # serve all experiments alike
SHOWING = {"report", "commands", "integrations", "cli.py", "testing.py", *JUDGING}  # no result is theirs


def modules(files: Iterable[Path], root: Path = ROOT) -> dict[str, str]:
    """The modules of an experiment that is defined in these files, with their digests: {"tasks/synthetic.py": "1f0c..."}."""
    root, waiting, digests = root.resolve(), [path.resolve() for path in files], dict[str, str]()
    while waiting:
        path = waiting.pop()
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
        if name in digests or name in FRAME:
            continue
        source = _read(path.read_bytes(), _package(path, root))
        digests[name] = source.digest
        for dotted in source.names:
            waiting += _files(dotted, root)
    return dict(sorted(digests.items()))


def key(digests: Mapping[str, str]) -> str:
    """One digest of all modules."""
    return _digest("\n".join(f"{name} {digest}" for name, digest in digests.items()))


def rest(root: Path = ROOT) -> str:
    """A digest of everything else in Richter that numbers may come from."""
    paths = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*.py"))}
    return key({name: _read(path.read_bytes()).digest for name, path in paths.items()
                if (name in FRAME or name.partition("/")[0] not in FOLLOWED) and not {name, name.partition("/")[0]} & SHOWING})


class Source(NamedTuple):
    """What matters here of a file: a digest of its code, and the names of Richter that it uses, e.g. richter.tasks.mnist."""

    digest: str
    names: frozenset[str]


@cache
def _read(text: bytes, package: str = "") -> Source:
    tree = ast.parse(text)
    return Source(_digest(_code(tree)), frozenset(_names(tree, package)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _code(node: object) -> str:
    """A syntax tree as text, without strings that stand alone (docstrings). What is empty is left out, because versions of
    Python differ in which empty fields they have."""
    if isinstance(node, ast.AST):
        fields = [(name, value) for name, value in ast.iter_fields(node) if value is not None and value != []]
        return f"{type(node).__name__}({', '.join(f'{name}={_code(value)}' for name, value in fields)})"
    if isinstance(node, list):
        return f"[{', '.join(_code(item) for item in node if not _stands_alone(item))}]"
    return repr(node)


def _stands_alone(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _package(path: Path, root: Path) -> str:
    """What a dot stands for in an import of this file: ``from . import fig3`` in experiments/nfa/fig7.py."""
    return ".".join(("richter", *path.parent.relative_to(root).parts)) if path.is_relative_to(root) else ""


def _names(tree: ast.Module, package: str) -> Iterator[str]:
    """Every name of Richter that a file imports, or reaches through what it imports, in full.

    After ``from richter import tasks as data``, the expression ``data.mnist(100)`` uses richter.tasks.mnist. A package that is
    used in another way, as in ``getattr(data, name)``, or only handed on, is used whole: richter.tasks.*
    """
    bound: dict[str, set[str]] = defaultdict(set)  # a name in this file: what it stands for
    for node in ast.walk(tree):
        for name, dotted in _imported(node, package):
            bound[name].add(dotted)
            yield dotted
    used = set()
    for name, attributes in _chains(tree):
        used.add(name)
        yield from (".".join((dotted, *attributes, "*")) for dotted in bound.get(name, ()))
    for name in bound.keys() - used - {"richter"}:  # `import richter.tasks.images` alone binds richter too
        yield from (f"{dotted}.*" for dotted in bound[name])


def _imported(node: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """(name in this file, what of Richter it stands for) of an import statement."""
    if isinstance(node, ast.ImportFrom):
        above = package.split(".")[:package.count(".") + 2 - node.level] if node.level else []
        module = ".".join((*above, node.module) if node.module else above)
        if module.partition(".")[0] == "richter":
            yield from ((alias.asname or alias.name, f"{module}.{alias.name}") for alias in node.names)
    elif isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.partition(".")[0] == "richter":
                yield alias.asname or alias.name, alias.name
                if not alias.asname:
                    yield "richter", "richter"


def _chains(node: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The names that are read, each with the attributes that are taken of it: a.b.c is ("a", ("b", "c"))."""
    base, attributes = node, list[str]()
    while isinstance(base, ast.Attribute):
        attributes.append(base.attr)
        base = base.value
    if isinstance(base, ast.Name):
        yield base.id, tuple(reversed(attributes))
    else:
        for child in ast.iter_child_nodes(base):
            yield from _chains(child)


def _files(dotted: str, root: Path) -> list[Path]:
    """The files of a name: of a module its own; of what a package offers the files that define it, or the whole package if no
    file says so; of a package by itself none, because what is used of it is named too."""
    first, *parts = dotted.split(".")[1:] or [""]
    if first == "*":
        return [path for package in FOLLOWED for path in (root / package).rglob("*.py")]
    if first not in FOLLOWED:
        return []
    folder = root / first
    for part in parts:
        if (folder / f"{part}.py").is_file():
            return [folder / f"{part}.py"]
        if not (folder / part).is_dir():
            return [path for path in folder.glob("*.py") if part in _defined(path.read_bytes())] or list(folder.rglob("*.py"))
        folder /= part
    return []


@cache
def _defined(text: bytes) -> frozenset[str]:
    """The functions, classes and constants of a file, not those that it imports."""
    names = set[str]()
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return frozenset(names)
