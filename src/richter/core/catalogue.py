"""Catalogues of a folder's entries: entries are found in its files, and their names, titles and cards are read without an import.

    CATALOGUE = Catalogue("richter.theory", "THEORIES", "theory")      # every file of the folder that assigns THEORIES = ...
    CATALOGUE.facts()["freeprob.centred_nfc"]["ref"]                   # read from the text of the file
    CATALOGUE.get("freeprob.centred_nfc")                              # imported now
    CATALOGUE.add(MINE)                                                # register an external entry

A file defines one entry (``EXPERIMENT = Experiment(name="nfa_fig1", ...)``) or a tuple of them (``MEASURES = (Measure("nfc",
...),
...)``). An entry is a call whose first argument, or ``name=``, is its name, or a function of the file (``TASKS = (mnist, ...)``).
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from richter.core.values import Card, Interval, Ref, RichterError, SelectionError, unknown

Entry = TypeVar("Entry")
Facts = dict[str, Any]  # the name of an entry and its literal keyword arguments

# calls that may be written inside an entry
VALUES: dict[str, Callable[..., Any]] = {"Card": Card, "Interval": Interval, "Ref": Ref}

ASSIGNS = re.compile(r"[^=\n(]*=[^=]")  # the rest of an assignment after the name, annotated or not
IMPORTS = re.compile(r"^from ([\w.]+) import ([^(\n]+|\([^)]*\))", re.MULTILINE)
NEXT = re.compile(r"^[^\s)\]}#]", re.MULTILINE)  # a line of code that starts at the left margin and closes no bracket


class Catalogue(Generic[Entry]):
    """The entries that the files of a package define under one attribute, and those that were added from outside.

    ``kind``: the word for an entry in messages. ``until``: the argument at which reading stops, if the following ones are long
    and not literal (the claims of an experiment)."""

    def __init__(self, package: str, attribute: str, kind: str, until: str = "") -> None:
        self.package, self.attribute, self.kind, self.until = package, attribute, kind, until
        self._added: dict[str, Entry] = {}

    def names(self) -> list[str]:
        """Return the names of all entries: those of the folder by file, then those that were added."""
        return [*self._entries, *self._added]

    def facts(self) -> dict[str, Facts]:
        """Return facts about every entry, read without importing it."""
        return {**{name: facts for name, (_, facts) in self._entries.items()},
                **{name: _facts_of(entry) for name, entry in self._added.items()}}

    def files(self) -> dict[str, str]:
        """Return the file that defines each entry, as a module below the package: {"nfa_fig1": "nfa.fig1"}."""
        return {name: module.removeprefix(f"{self.package}.") for name, (module, _) in self._entries.items()}

    def get(self, name: str) -> Entry:
        """Import the file of an entry, and return the entry."""
        if name in self._added:
            return self._added[name]
        if name not in self._entries:
            raise unknown("Richter", self.kind, name, self.names())
        return self._load(self._entries[name][0])[name]

    def all(self) -> dict[str, Entry]:
        """Import all files, and return every entry by its name."""
        return {**self._shipped, **self._added}

    def add(self, entry: Entry) -> Entry:
        """Register an external entry, and return it. An entry added earlier under the same name is replaced."""
        name = name_of(entry)
        if name in self._entries:
            raise SelectionError(f"{name!r} is a built-in {self.kind}, which other parts rely on. Choose another name.")
        self._added[name] = entry
        return entry

    def remove(self, name: str) -> None:
        """Remove an entry that was added."""
        if name not in self._added:
            raise unknown("what was added to Richter", self.kind, name, self._added)
        del self._added[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._added

    @cached_property
    def _entries(self) -> dict[str, tuple[str, Facts]]:
        """Read {name: (module, facts)} from the text of the files."""
        entries: dict[str, tuple[str, Facts]] = {}
        for module, path in modules(self.package).items():
            for facts in peek(path, self.attribute, self.until):
                name = facts["name"]
                if name in entries:
                    raise RichterError(f"{entries[name][0]} and {module} both offer the {self.kind} {name!r}. Rename one.")
                entries[name] = module, facts
        return entries

    @cached_property
    def _shipped(self) -> dict[str, Entry]:
        """Entries that the package contains, by name."""
        return {name: self._load(module)[name] for name, (module, _) in self._entries.items()}

    def _load(self, module: str) -> dict[str, Entry]:
        """Import a module, and return its entries by name."""
        try:
            offered = getattr(importlib.import_module(module), self.attribute)
        except (ImportError, AttributeError, SyntaxError) as why:
            raise RichterError(f"the {self.kind} of {module} cannot be loaded: {type(why).__name__}: {why}.") from why
        return {name_of(entry): entry for entry in (offered if isinstance(offered, tuple) else (offered,))}


def name_of(entry: Any) -> str:
    """Return the name of an entry: its attribute ``name``, or the name of a function."""
    name = getattr(entry, "name", None) or getattr(entry, "__name__", None)
    if not isinstance(name, str):
        raise SelectionError(f"{entry!r} has no name, so it cannot be found later: give it one, or define it as a function.")
    return name


def modules(package: str) -> dict[str, Path]:
    """Return every module in the folder of a package and below it, with its file; only the package itself is imported."""
    def walk(folder: Path, prefix: str) -> Iterator[tuple[str, Path]]:
        for path in sorted(folder.iterdir()):
            if path.suffix == ".py" and path.stem != "__init__":
                yield f"{prefix}.{path.stem}", path
            elif (path / "__init__.py").is_file():
                yield from walk(path, f"{prefix}.{path.name}")

    return {name: path for folder in importlib.import_module(package).__path__ for name, path in walk(Path(folder), package)}


def parts(package: str) -> list[str]:
    """Return the modules of a folder by name, for ``lazy_names``, without those in its subfolders."""
    below = (name.removeprefix(f"{package}.") for name in modules(package))
    return [name for name in below if "." not in name]


def peek(path: Path, attribute: str, until: str = "") -> list[Facts]:
    """Read the entries that a file defines under an attribute. Only this statement and the constants that it names are parsed."""
    text = f"\n{path.read_text(encoding='utf-8')}"  # so that every line follows a line break
    try:
        node = _assigned(text, attribute, until)
        if node is None:
            return []
        return [_facts(entry, text) for entry in (node.elts if isinstance(node, ast.Tuple) else [node])]
    except (SyntaxError, ValueError) as why:
        raise RichterError(f"{path}: {attribute} cannot be read without importing the file ({why}). Write it at the left margin, "
                           f"each entry as a call with its name, e.g. {attribute} = Entry('name', ...).") from why


def _assigned(text: str, name: str, until: str = "") -> ast.expr | None:
    """Parse the value that is assigned to a name at the left margin."""
    begin = max(text.find(f"\n{name}{after}") for after in " :") + 1
    if not begin or not ASSIGNS.match(text, begin + len(name)):
        return None
    end = NEXT.search(text, begin + 1)
    statement = text[begin:end.start() if end else None]
    if until and (cut := statement.find(f" {until}=")) >= 0:
        statement = f"{statement[:cut]})"
    tree = ast.parse(statement).body[0]
    return tree.value if isinstance(tree, (ast.Assign, ast.AnnAssign)) else None


def _facts(entry: ast.expr, text: str) -> Facts:
    """Read the fields of an entry from its syntax tree."""
    if isinstance(entry, ast.Name):
        assigned = _assigned(text, entry.id)
        return {"name": entry.id} if assigned is None else _facts(assigned, text)
    if not isinstance(entry, ast.Call):
        raise ValueError(f"line {entry.lineno} of the statement is neither a call nor a name")
    facts: Facts = {}
    for key, node in [*(("name", a) for a in entry.args[:1]), *((k.arg, k.value) for k in entry.keywords if k.arg)]:
        try:
            facts[key] = _value(node, text)
        except ValueError:
            continue  # a function, a lambda, settings: known after import
    if not isinstance(facts.get("name"), str):
        raise ValueError("an entry has no literal name")
    return facts


def _value(node: ast.expr, text: str, inside: bool = False) -> Any:
    """Evaluate a literal, a tuple of values, a constant of the same file, or a call of one of VALUES. ``inside`` such a call,
    imported constants are allowed too."""
    if isinstance(node, ast.Name):
        if (assigned := _assigned(text, node.id)) is not None:
            return _value(assigned, text, inside)
        for module, names in IMPORTS.findall(text) if inside else ():
            if node.id in re.findall(r"\w+", names) and (spec := importlib.util.find_spec(module)) and spec.origin:
                return _value(node, f"\n{Path(spec.origin).read_text(encoding='utf-8')}", inside)
        raise ValueError(node.id)
    if isinstance(node, ast.Tuple):
        return tuple(_value(part, text, inside) for part in node.elts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in VALUES:
        return VALUES[node.func.id](*(_value(a, text, True) for a in node.args),
                                    **{k.arg: _value(k.value, text, True) for k in node.keywords if k.arg})
    return ast.literal_eval(node)


def _facts_of(entry: Any) -> Facts:
    """Fields of an entry that is already made."""
    fields = {f.name: getattr(entry, f.name) for f in dataclasses.fields(entry)} if dataclasses.is_dataclass(entry) else {}
    return {**fields, "name": name_of(entry)}


def lazy_names(package: str, names: Mapping[str, str], parts: Iterable[str] = ()
               ) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make lazy module attributes: ``__getattr__, __dir__, __all__ = lazy_names(__name__, {"Probe": "instrument.probe"},
    ("kernels",))``. ``names`` maps names to the modules below the package that define them; ``parts`` are submodules. A function
    may be called like its module: ``package.compare`` is then the function, also after the module was imported."""
    parts = tuple(parts)
    everything = [*names, *parts]
    functions = {name for name, module in names.items() if module == name}

    class LazyPackage(ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            if name not in functions or not isinstance(value, ModuleType):  # an import of a module sets it in its package
                super().__setattr__(name, value)

    if functions:
        sys.modules[package].__class__ = LazyPackage

    def get(name: str) -> Any:
        if name in names:
            return getattr(importlib.import_module(f"{package}.{names[name]}"), name)
        if name in parts:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def listed() -> list[str]:
        return sorted({*vars(importlib.import_module(package)), *everything})

    return get, listed, everything
