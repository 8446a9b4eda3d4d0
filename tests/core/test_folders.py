"""A folder is its catalogue: what lies in it is found, what is read from its text is what an import gives, and what is added
from outside is known like the rest."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import richter
import tiny
from richter import cli, commands, experiments, measures, tasks, theory
from richter.commands.frame import Command
from richter.core import Card, Interval, Ref, RichterError, SelectionError
from richter.core.catalogue import Catalogue, modules, name_of, parts
from richter.theory import Theory

CATALOGUES = {p.CATALOGUE.kind: p.CATALOGUE for p in (commands, experiments, measures, tasks, theory)}
READ = {"experiment": ("ref", "title", "data", "more_data"), "theory": ("ref", "title"), "measure": ("card",),
        "command": (), "task": ()}  # what people are shown without an import


def entries(catalogue: Catalogue[Any]) -> dict[str, Any]:
    """By importing every file of the folder."""
    offered: dict[str, Any] = {}
    for module in modules(catalogue.package):
        value = getattr(importlib.import_module(module), catalogue.attribute, ())
        offered |= {name_of(e): e for e in (value if isinstance(value, tuple) else (value,))}
    return offered


@pytest.mark.parametrize("kind", CATALOGUES)
def test_what_is_read_is_what_is_imported(kind: str) -> None:
    catalogue = CATALOGUES[kind]
    imported, facts = entries(catalogue), catalogue.facts()
    assert imported
    assert catalogue.names() == list(facts) == list(imported)
    assert catalogue.all() == imported
    for name, entry in imported.items():
        assert catalogue.get(name) is entry
        assert name in catalogue
        for field, value in facts[name].items():
            assert (name_of(entry) if field == "name" else getattr(entry, field)) == value, (name, field)
        for field in READ[kind]:
            assert facts[name].get(field, ()) == getattr(entry, field), (name, field)


def test_files_are_named_by_what_they_offer() -> None:
    assert all(module.replace(".", "_") == name for name, module in experiments.CATALOGUE.files().items())
    assert all(module == name for name, module in commands.CATALOGUE.files().items())
    assert all(name.startswith(f"{module}.") for name, module in theory.CATALOGUE.files().items())


def test_every_file_of_layers_is_imported() -> None:
    files = {path.stem for path in (Path(richter.__file__).parent / "layers").glob("[a-z]*.py")}
    assert files == set(parts("richter.layers"))
    code = "import sys, richter.layers; print(*[m for m in sys.modules if m.startswith('richter.layers.')])"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert {m.rpartition(".")[2] for m in loaded} == files


@pytest.mark.parametrize("arguments", [["list"], ["list", "--json"], ["list", "theories"], ["--help"],
                                       ["cite", "nfc", "nfa_fig1", "freeprob.centred_nfc"]], ids=" ".join)
def test_nothing_heavy_is_imported_to_show_what_there_is(arguments: list[str]) -> None:
    code = (f"import sys\nfrom richter.cli import main\ntry: main({arguments})\nexcept SystemExit: pass\n"
            "heavy = {'torch', 'pandas', 'matplotlib', 'scipy', 'sklearn', 'numpy'} & set(sys.modules)\nassert not heavy, heavy")
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------------ any folder

HEAD = "from __future__ import annotations\nimport nowhere\n"  # an import would fail


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty package "shelf"."""
    (tmp_path / "shelf").mkdir()
    (tmp_path / "shelf/__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "shelf"
    for module in [m for m in sys.modules if m.partition(".")[0] == "shelf"]:
        del sys.modules[module]


def shelf() -> Catalogue[Any]:
    return Catalogue("shelf", "BOOKS", "book", until="pages")


def test_a_file_in_the_folder_is_enough(folder: Path) -> None:
    (folder / "one.py").write_text(HEAD + '''
LIMITS = Interval(0, 1)
PAPER = "nfa"
BOOK = Book("third", year=-3)


def helper(BOOKS=None): ...


BOOKS: tuple = (
    Book("first", text, ref=Ref(PAPER, place="Fig. 1"), bounds=LIMITS, card=Card("A title", rich="up"),
         tags=("a", PAPER), check=lambda b: b, maker=helper, more={"n": 1}),
# a comment at the left margin
    Book(name="second", title="two " "lines", pages=(Page(1),), never="read"),
    BOOK, helper,
)
# the end
OTHER = 3
''')
    (folder / "helpers.py").write_text(HEAD + "PAGES = 3\nif BOOKS == 2: pass\n")
    (folder / "below").mkdir()
    (folder / "below/__init__.py").touch()
    (folder / "below/two.py").write_text('BOOKS = Book("deep", 1, 2)')
    catalogue = Catalogue[Any]("shelf", "BOOKS", "book")
    facts = catalogue.facts()
    assert "shelf.one" not in sys.modules
    assert catalogue.files() == {"deep": "below.two", "first": "one", "second": "one", "third": "one", "helper": "one"}
    assert facts["first"] == {
        "name": "first", "ref": Ref("nfa", "Fig. 1"), "bounds": Interval(0, 1), "card": Card("A title", rich="up"),
        "tags": ("a", "nfa"), "more": {"n": 1}}
    assert facts["second"] == {"name": "second", "title": "two lines", "never": "read"}
    assert facts["third"] == {"name": "third", "year": -3}
    assert facts["helper"] == {"name": "helper"}
    with pytest.raises(RichterError, match=r"the book of shelf\.one cannot be loaded: .*No module named 'nowhere'"):
        catalogue.get("first")
    with pytest.raises(SelectionError, match=r"Richter has no book 'frist'\. Close to it: 'first'"):
        catalogue.get("frist")


def test_reading_stops_where_it_is_told(folder: Path) -> None:
    (folder / "one.py").write_text('BOOKS = Book(\n    "first", title="two",\n    pages=(Page("title="), ), never="read")\n')
    assert shelf().facts() == {"first": {"name": "first", "title": "two"}}


@pytest.mark.parametrize(("text", "sentence"), [
    ("BOOKS = (Book('a'),\nBook('b'))", "BOOKS cannot be read without importing the file"),
    ("BOOKS = (*others(),)", "neither a call nor a name"),
    ("BOOKS = Book(title='no name')", "no literal name"),
    ("BOOKS = Book(f'{1}')", "no literal name"),
    ("BOOKS = (Book('a'), Book('a'))", "both offer the book 'a'"),
])
def test_a_folder_that_cannot_be_read(folder: Path, text: str, sentence: str) -> None:
    (folder / "one.py").write_text(text)
    with pytest.raises(RichterError, match=sentence):
        shelf().names()


# ------------------------------------------------------------------------------------------------ from outside


STONE = Theory("stone", Ref("nfa", "nowhere"), "how long a stone falls", predict=lambda h, g=9.81: (2 * h / g) ** 0.5,
               simulate=lambda h: (2 * h / 9.81) ** 0.5, cases=lambda: [(1.0,)], tolerance=1e-3, perturb={"g": 9.9})


@pytest.fixture
def added() -> Iterator[None]:
    """Everything that a test adds is forgotten."""
    before = {kind: set(c.names()) for kind, c in CATALOGUES.items()}
    yield
    for kind, c in CATALOGUES.items():
        for name in set(c.names()) - before[kind]:
            c.remove(name)


@pytest.mark.usefixtures("added")
def test_a_theory_from_outside(capsys: pytest.CaptureFixture[str]) -> None:
    assert theory.add(STONE) is STONE
    assert theory.get("stone") is STONE
    assert cli.main(["list", "theories"]) == 0
    assert "stone" in capsys.readouterr().out.splitlines()[-1]
    assert cli.main(["cite", "stone"]) == 0
    assert capsys.readouterr().out.startswith("@")
    theory.add(replace(STONE, title="again"))  # a cell that is run twice
    assert theory.names().count("stone") == 1
    assert theory.CATALOGUE.facts()["stone"]["title"] == theory.CATALOGUE.all()["stone"].title == "again"
    with pytest.raises(SelectionError, match=r"'freeprob\.centred_nfc' is a built-in theory"):
        theory.add(replace(STONE, name="freeprob.centred_nfc"))
    theory.CATALOGUE.remove("stone")
    assert "stone" not in theory.names()
    with pytest.raises(SelectionError, match="has no theory 'stone'"):
        theory.CATALOGUE.remove("stone")


@pytest.mark.usefixtures("added")
def test_an_experiment_from_outside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiments.add(tiny.EXPERIMENT)
    assert cli.main(["list", "experiments"]) == 0
    assert "sums of whole numbers" in capsys.readouterr().out
    assert cli.main(["run", "nfa_tiny", "--store", str(tmp_path)]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines() if line.startswith(("distance", "growth"))] == [
        "holds"] * 2


@pytest.mark.usefixtures("added")
def test_a_measure_from_outside(capsys: pytest.CaptureFixture[str]) -> None:
    mine = replace(measures.get("weight_change"), name="mine", card=Card("My own", "What I look at."))
    measures.add(mine)
    assert measures.resolve("mine") == [mine]
    assert "mine" in measures.catalogue()
    assert cli.main(["list", "measures"]) == 0
    assert "What I look at." in capsys.readouterr().out


def test_what_people_read_about_measures() -> None:
    assert list(measures.facts()) == list(measures.catalogue())
    assert all(facts["ref"] == measures.get(name).card.ref for name, facts in measures.facts().items())


@pytest.mark.usefixtures("added")
def test_a_task_from_outside() -> None:
    @tasks.add
    def spirals(n: int) -> list[int]:
        return list(range(n))

    assert tasks.spirals(3) == [0, 1, 2]  # as experiments ask for data by its name
    assert tasks.get("spirals") is spirals
    with pytest.raises(AttributeError, match="no attribute 'circles'"):
        _ = tasks.circles
    with pytest.raises(SelectionError, match="has no name"):
        tasks.add(object())  # type: ignore[arg-type]


@pytest.mark.usefixtures("added")
def test_a_command_from_outside(capsys: pytest.CaptureFixture[str]) -> None:
    def arguments(p: argparse.ArgumentParser) -> None:
        p.add_argument("whom")

    def do(given: argparse.Namespace) -> int:
        print(f"hello {given.whom}")
        return 3

    commands.add(Command("greet", "Greet somebody.\n\nAnd nobody else.", do, arguments, group="mine",
                         examples=("richter greet you",)))
    assert cli.main(["greet", "world"]) == 3
    assert capsys.readouterr().out == "hello world\n"
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("mine")
    assert lines[at + 1] == "  greet       greet somebody"
    assert lines.index("data") < at < next(i for i, line in enumerate(lines) if line.startswith("  completion"))
    with pytest.raises(SystemExit):
        cli.main(["greet", "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith("usage: richter greet")
    assert "And nobody else." in shown
    assert "richter greet you" in shown
