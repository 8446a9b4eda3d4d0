"""Keys of experiments: digests of the code that an experiment's numbers come from.

There are two parts. The *modules* of an experiment are its own file and the code it uses, directly or through others, from the
packages that describe what is computed: experiments, tasks, models, theory, learners, controls. A record stores their digests as
its key. The *rest* is the instrument and everything else that serves all experiments alike. A change of the rest is noticed by
running an experiment again at smoke scale and comparing its numbers with the record (`richter.experiments.staleness`).

Only the used parts of a module count: the functions, classes and constants that are named, the names that these use in turn,
and statements without a name. A new function in a file of tasks therefore changes no key of experiments that do not call it.
Code is read from the syntax trees; nothing is imported. Comments, docstrings and layout are not part of a digest."""

from __future__ import annotations

import ast
import builtins
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FOLLOWED = ("experiments", "tasks", "models", "theory", "learners", "controls")
JUDGING = {f"experiments/{name}.py" for name in ("export", "html", "keys", "ledger", "outcomes", "page", "seeds", "staleness")}
FRAME = {f"experiments/{name}.py" for name in ("__init__", "frame", "kit", "running")} | JUDGING  # serve all experiments alike
SHOWING = {"report", "commands", "integrations", "cli.py", "testing.py", *JUDGING}  # no result is theirs
GUARDS = {"verified"}  # functions that return what they are called with first, or refuse it: no number is theirs
# what the ledger says of numbers: arguments of claims and experiments from which no number comes
DECLARED = {"says", "own", "protocol", "partial", "reason", "direction", "second", "rival"}
WHOLE = "*"  # in the place of a name: everything
# what has moved to another file since records were made: digests go on naming the first place
MOVED = {"richter.instrument.observe.Measurement": "richter.instrument.measurement.Measurement",
         "richter.core.values.progress": "richter.core.progress.progress",
         "richter.core.likeness.cosine": "richter.core.cosine.cosine",
         **{f"richter.core.modules.{name}": f"richter.core.chains.{name}" for name in ("chain", "evaluated")}}
BY_TEXT = {"globals", "vars", "locals", "eval", "exec", "__import__"}  # who calls these may use any name of the file


def modules(files: Iterable[Path], root: Path = ROOT, wanted: str = WHOLE) -> dict[str, str]:
    """Return the modules that an experiment defined in these files uses, with digests of the used parts:
    {"tasks/synthetic.py": "1f0c..."}. With ``wanted``, only the code behind this name of the files counts."""
    root = root.resolve()
    waiting, used = [(path.resolve(), wanted) for path in files], dict[str, set[int]]()  # numbers of statements
    sources = dict[str, SourceFile]()
    while waiting:
        path, name_in_it = waiting.pop()
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
        if name in FRAME:
            continue
        source = sources.setdefault(name, _read(path.read_bytes(), _package(path, root)))
        fresh = source.reached(name_in_it) - used.setdefault(name, set())
        used[name] |= fresh
        dotted = {other for k in fresh for other in source.statements[k].uses} | source.handed_on(name_in_it)
        waiting += [place for other in dotted for place in _places(other, root)]
    return {name: _digest("\n".join(sources[name].statements[k].code for k in sorted(used[name]))) for name in sorted(used)}


def key(digests: Mapping[str, str]) -> str:
    """Return one digest of all modules."""
    return _digest("\n".join(f"{name} {digest}" for name, digest in digests.items()))


def rest(root: Path = ROOT) -> str:
    """Return a digest of everything else in Richter that numbers may come from."""
    paths = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*.py"))}
    return key({name: _digest(_code(ast.parse(path.read_bytes()))) for name, path in paths.items()
                if (name in FRAME or name.partition("/")[0] not in FOLLOWED) and not {name, name.partition("/")[0]} & SHOWING})


class Statement(NamedTuple):
    """A top-level statement of a file: the names it defines, its code with the imports that it relies on, the names of its
    file that it reads, and the full names of Richter that it uses. ``always``: it runs when the file is imported."""

    defines: frozenset[str]
    code: str
    reads: frozenset[str]
    uses: frozenset[str]
    always: bool


class SourceFile(NamedTuple):
    """A file: its statements without imports, and the names of Richter that its imports bind."""

    statements: tuple[Statement, ...]
    bound: Mapping[str, frozenset[str]]

    def reached(self, wanted: str) -> set[int]:
        """Return the numbers of the statements behind a name: those that define it, those behind the names that these read,
        and those that always run. For an unknown name, and for WHOLE, return all."""
        every = range(len(self.statements))
        if wanted not in self.bound and not any(wanted in s.defines for s in self.statements):
            return set(every)
        numbers = {k for k in every if self.statements[k].always}
        waiting = [wanted, *(name for k in numbers for name in self.statements[k].reads)]
        while waiting:
            name = waiting.pop()
            fresh = {k for k in every if name in self.statements[k].defines} - numbers
            numbers |= fresh
            waiting += [other for k in fresh for other in self.statements[k].reads]
        return numbers

    def handed_on(self, wanted: str) -> set[str]:
        """Return the names that the file re-exports under the wanted name; for WHOLE, its unused imports."""
        if wanted != WHOLE:
            return {f"{dotted}.{WHOLE}" for dotted in self.bound.get(wanted, ())}
        read = {name for s in self.statements for name in s.reads}
        unused = self.bound.keys() - read - {"richter"}  # `import richter.tasks.images` alone binds richter too
        return {f"{dotted}.{WHOLE}" for name in unused for dotted in self.bound[name]}


class _OnlyNumbers(ast.NodeTransformer):
    """Transformer that replaces the call of a guard by its first argument, and leaves out what claims declare."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in ("Claim", "Experiment"):
            node.keywords = [k for k in node.keywords if k.arg not in DECLARED]
        return node.args[0] if name in GUARDS and node.args else node


@cache
def _read(text: bytes, package: str = "") -> SourceFile:
    """Read a file into its statements and the names that its imports bind."""
    tree = _OnlyNumbers().visit(ast.parse(text))
    bound: dict[str, set[str]] = defaultdict(set)  # a name in this file: what it stands for, of Richter or not
    for node in ast.walk(tree):
        for name, dotted in _imported(node, package):
            bound[name].add(dotted)
    ours = {name: frozenset(d for d in dotted if d.partition(".")[0] == "richter") for name, dotted in bound.items()}
    ours = {name: dotted for name, dotted in ours.items() if dotted}
    statements = [_statement(node, bound, ours) for node in tree.body if not _stands_alone(node) and not _only_imports(node)]
    if any(BY_TEXT & s.reads for s in statements):
        statements = [s._replace(always=True) for s in statements]
    return SourceFile(tuple(statements), ours)


def _statement(node: ast.stmt, bound: Mapping[str, set[str]], ours: Mapping[str, frozenset[str]]) -> Statement:
    """Read one statement.

    After ``from richter import tasks as data``, the expression ``data.mnist(100)`` uses richter.tasks.mnist. A package that
    is used in another way, as in ``getattr(data, name)``, is used whole: richter.tasks.*"""
    chains = {*_chains(node), *((WHOLE, ()) for _ in ours.get(WHOLE, ()))}  # `import *`: any name may come from there
    reads = frozenset(name for name, _ in chains)
    uses = frozenset(".".join((dotted, *attributes, WHOLE)) for name, attributes in chains for dotted in ours.get(name, ()))
    imports = sorted(f"{name}={MOVED.get(dotted, dotted)}" for name in reads for dotted in bound.get(name, ()))
    defines = _defines(node)
    return Statement(defines, "\n".join((_code(node), *imports)), reads, uses, not defines or _registers(node, bound))


def _defines(node: ast.stmt) -> frozenset[str]:
    """Return the function, class or constants that a statement defines; none if the statement also does something else."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return frozenset({node.name})
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        parts = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
        if all(isinstance(part, ast.Name) for part in parts):
            return frozenset(part.id for part in parts if isinstance(part, ast.Name))
    return frozenset()


def _registers(node: ast.stmt, bound: Mapping[str, set[str]]) -> bool:
    """Return whether a statement has a decorator of Richter, which may register it. Decorators of Python, of other libraries
    and of drawings do not."""
    decorators = getattr(node, "decorator_list", [])
    names = {name for decorator in decorators for name, _ in _chains(decorator) if name not in dir(builtins)}
    return any(name not in bound or any(dotted.split(".")[0] == "richter" and dotted.split(".")[1:2] != ["report"]
                                        for dotted in bound[name]) for name in names)


def _only_imports(node: ast.stmt) -> bool:
    """Return whether a statement only imports, also inside ``if TYPE_CHECKING:``."""
    inner = node.body if isinstance(node, ast.If) and not node.orelse else [node]
    return all(isinstance(part, (ast.Import, ast.ImportFrom)) for part in inner)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _code(node: object) -> str:
    """Return a syntax tree as text, without docstrings. Empty fields are left out, because versions of Python differ in which
    they have."""
    if isinstance(node, ast.AST):
        fields = [(name, value) for name, value in ast.iter_fields(node) if value is not None and value != []]
        return f"{type(node).__name__}({', '.join(f'{name}={_code(value)}' for name, value in fields)})"
    if isinstance(node, list):
        return f"[{', '.join(_code(item) for item in node if not _stands_alone(item))}]"
    return repr(node)


def _stands_alone(node: object) -> bool:
    """Return whether a node is a string that stands alone, such as a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _package(path: Path, root: Path) -> str:
    """Return the package that a dot stands for in an import of this file: ``from . import fig3`` in experiments/nfa/fig7.py."""
    return ".".join(("richter", *path.parent.relative_to(root).parts)) if path.is_relative_to(root) else ""


def _imported(node: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """Yield (name in this file, full name) for each name of an import statement."""
    if isinstance(node, ast.ImportFrom):
        above = package.split(".")[:package.count(".") + 2 - node.level] if node.level else []
        module = ".".join((*above, node.module) if node.module else above)
        yield from ((alias.asname or alias.name, f"{module}.{alias.name}") for alias in node.names)
    elif isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name, alias.name
            if not alias.asname:
                yield (alias.name.partition(".")[0],) * 2


def _chains(node: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the names that are read, each with the attributes taken of it: a.b.c is ("a", ("b", "c"))."""
    base, attributes = node, list[str]()
    while isinstance(base, ast.Attribute):
        attributes.append(base.attr)
        base = base.value
    if isinstance(base, ast.Name):
        yield base.id, tuple(reversed(attributes))
    else:
        for child in ast.iter_child_nodes(base):
            yield from _chains(child)


def _places(dotted: str, root: Path) -> list[tuple[Path, str]]:
    """Return the (file, name in it) pairs that a full name refers to. A name of a package refers to the files that define it,
    or to the whole package if no file does; a module by itself refers to all of it."""
    first, *parts = dotted.split(".")[1:]
    if first == WHOLE:
        return [(path, WHOLE) for package in FOLLOWED for path in (root / package).rglob("*.py")]
    folder = root / first
    for k, part in enumerate(parts if first in FOLLOWED else []):
        file = folder / f"{part}.py"
        if file.is_file():  # models.mlp is the function of the file models/mlp.py, models.mlp.other another one of that file
            return [(file, part if parts[k + 1] == WHOLE and part in _defined(file.read_bytes()) else parts[k + 1])]
        if not (folder / part).is_dir():
            files = [path for path in folder.glob("*.py") if part in _defined(path.read_bytes())]
            return [(path, part) for path in files] or [(path, WHOLE) for path in folder.rglob("*.py")]
        folder /= part
    return []


@cache
def _defined(text: bytes) -> frozenset[str]:
    """Return the functions, classes and constants that a file defines itself."""
    return frozenset(name for node in ast.parse(text).body for name in _defines(node))
