"""The key of an experiment: which modules its numbers come from, and which edits change it."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import tiny
from richter import experiments
from richter.core import SelectionError
from richter.experiments import keys, running

NAMES = experiments.names()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of Richter's source to edit."""
    copy = tmp_path_factory.mktemp("source") / "richter"
    shutil.copytree(keys.ROOT, copy, ignore=lambda folder, names: [
        name for name in names if Path(folder, name).is_file() and not name.endswith(".py")])
    return copy


def file_of(name: str, package: Path) -> Path:
    return package / "experiments" / f"{name.replace('_', '/', 1)}.py"


@cache
def keys_before(package: Path) -> dict[str, str]:
    """Of the copy without an edit."""
    return all_keys(package)


def all_keys(package: Path) -> dict[str, str]:
    return {name: keys.key(keys.modules([file_of(name, package)], package)) for name in NAMES}


def rest_of(file: Path, package: Path) -> str:
    """The digest of the rest of a package that has this file alone: that of all files takes seconds."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / file.relative_to(package)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
        return keys.rest(Path(folder))


def changed_by(package: Path, path: str, edit: Callable[[str], str]) -> tuple[set[str], bool]:
    """The experiments whose key changes when a file is edited, and whether that of the rest does."""
    file, before = package / path, keys_before(package)
    text, rest = file.read_text(), rest_of(file, package)
    try:
        file.write_text(edit(text))
        assert file.read_text() != text
        after = all_keys(package)
        return {name for name in NAMES if after[name] != before[name]}, rest_of(file, package) != rest
    finally:
        file.write_text(text)


def last_action(text: str) -> str:
    """A statement that runs when the file is read, so it is of everybody who uses anything of the file."""
    return f"{text}\nprint('read')\n"


def test_editing_what_another_figure_uses_changes_both_keys(package: Path) -> None:
    assert changed_by(package, "experiments/nfa/fig3.py", lambda text: text.replace("rate: float = 1e-7", "rate: float = 2e-7")
                      ) == ({"nfa_fig3", "nfa_fig7"}, False)


def reworded(text: str) -> str:
    """Other comments, docstrings and layout, the same code."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            node.body[0] = ast.Expr(ast.Constant("in other words"))
    return f"# a comment\n\n\n{ast.unparse(tree)}  # at the end"


@pytest.mark.parametrize("edit", [lambda text: f"{text}# a comment\n", reworded], ids=["comment", "reworded"])
@pytest.mark.parametrize("path", ["tasks/registry.py", "experiments/nfa/fig3.py", "experiments/frame.py", "learners/rfm.py",
                                  "instrument/observe.py", "models/mlp.py"])
def test_words_and_layout_change_no_key(package: Path, path: str, edit: Callable[[str], str]) -> None:
    assert changed_by(package, path, edit) == (set(), False)


def test_code_of_the_registry_changes_what_is_read_from_disk(package: Path) -> None:
    names, rest = changed_by(package, "tasks/registry.py", last_action)
    assert {"nfa_fig2", "nfa_slo", "rfm_tables", "signal_fig7"} <= names
    assert not {"nfa_fig1", "nfa_fig3", "nfa_fig7", "fact_parity"} & names
    assert not rest


@pytest.mark.parametrize(("path", "users"), [
    ("models/vgg.py", {"nfa_fig2c", "signal_fig6"}), ("models/gpt.py", {"nfa_fig2d", "doctor_basics", "layerwise_fig6_4"}),
    ("theory/early_time.py", {"nfa_fig7", "nfa_prop3"}),
    ("tasks/text.py", {"nfa_fig2d", "doctor_basics", "qwem_concepts", "qwem_scores", "qwem_training"}),
    ("controls/slo.py", {"nfa_fig4", "nfa_fig12", "nfa_fig17", "nfa_slo"}),
    ("learners/rfm.py", {"fact_modular", "fact_parity", "rfm_networks", "rfm_tables"})])
def test_a_package_is_not_used_whole_by_who_uses_a_part(package: Path, path: str, users: set[str]) -> None:
    assert changed_by(package, path, last_action) == (users, False)


@pytest.mark.parametrize(("path", "told"), [
    ("instrument/observe.py", True), ("kernels/infinite.py", True), ("runs/__init__.py", True), ("core/values.py", True),
    ("experiments/frame.py", True), ("report/__init__.py", False), ("commands/__init__.py", False),
    ("instrument/verdict.py", True), ("experiments/running.py", True), ("experiments/ledger.py", False),
    ("experiments/seeds.py", False), ("experiments/staleness.py", False)])
def test_the_rest_is_in_no_key(package: Path, path: str, told: bool) -> None:
    assert changed_by(package, path, last_action) == (set(), told)


def test_the_rest_is_of_all_files(package: Path) -> None:
    rest = keys.rest(package)
    assert rest == keys.rest(keys.ROOT)
    for path, told in (("instrument/observe.py", True), ("report/__init__.py", False)):
        text = (package / path).read_text()
        try:
            (package / path).write_text(last_action(text))
            assert (keys.rest(package) != rest) is told
        finally:
            (package / path).write_text(text)


@pytest.mark.parametrize("more", ["ANOTHER = 1", "def another() -> int:\n    return 1", "import math"])
@pytest.mark.parametrize("path", ["tasks/synthetic.py", "models/mlp.py", "theory/arrays.py", "experiments/rivals.py"])
def test_what_nobody_uses_changes_no_key(package: Path, path: str, more: str) -> None:
    assert changed_by(package, path, lambda text: f"{text}\n{more}\n") == (set(), False)


def test_a_changed_function_is_of_those_who_call_it(package: Path) -> None:
    names, _ = changed_by(package, "tasks/synthetic.py", lambda text: text.replace("def sparse_parity(", "def sparse_parity(_, "))
    assert names == {"fact_parity"}


TWO = """
from functools import cache
from math import {imported} as root
from richter.core.catalogue import listed
RATE = {rate}
KEPT = []
def used(x): return helper(x) * RATE
def helper(x): return root({helper})
def unused(x): return {unused}
@cache
def plain(x): return {plain}
@listed
def registered(x): return {registered}
{last}
"""
PLAIN = {"imported": "sqrt", "rate": "1", "helper": "x", "unused": "x", "plain": "x", "registered": "x", "last": ""}


@pytest.mark.parametrize(("changed", "noticed"), [
    ({"rate": "2"}, True), ({"helper": "2 * x"}, True), ({"imported": "cbrt"}, True), ({"unused": "2"}, False),
    ({"plain": "2"}, False), ({"registered": "2"}, True), ({"last": "KEPT.append(1)"}, True), ({"last": "KEPT[0] = 2"}, True),
    ({"last": "for k in range(2): RATE += k"}, True), ({"last": "OTHER, ANOTHER = 1, 2"}, False),
    ({"last": "def last(): return globals()['x']"}, True), ({"last": "def used(x): return 7"}, True)])
def test_what_counts_of_a_file(package: Path, changed: dict[str, str], noticed: bool) -> None:
    user, file = package / "experiments/nfa/mine.py", package / "tasks/two.py"
    user.write_text("from richter.tasks.two import used")
    try:
        digests = []
        for parts in (PLAIN, {**PLAIN, **changed}):
            file.write_text(TWO.format(**parts))
            digests.append(keys.modules([user], package)["tasks/two.py"])
    finally:
        user.unlink()
        file.unlink()
    assert (digests[0] != digests[1]) is noticed


READS_IMAGES = {"tasks/images.py", "tasks/store.py"}
IMPORTS: dict[str, tuple[str, set[str], set[str]]] = {  # code: what is used at least, and what is not
    "a name": ("from richter.tasks import mnist", READS_IMAGES, {"tasks/text.py"}),
    "a lazy package": ("from richter import tasks as data\ndata.mnist(10)", READS_IMAGES, {"tasks/text.py"}),
    "two names of it": ("from richter import tasks\ntasks.mnist, tasks.corpus", {*READS_IMAGES, "tasks/text.py"},
                        {"tasks/tabular.py"}),
    "by the whole path": ("import richter\nmake = richter.tasks.mnist", READS_IMAGES, {"tasks/text.py"}),
    "a module": ("from richter.tasks import images\ngetattr(images, 'mnist')", READS_IMAGES, {"tasks/text.py"}),
    "a module by its path": ("import richter.tasks.images", READS_IMAGES, {"tasks/text.py"}),
    "another name": ("import richter.tasks.images as pictures\npictures.mnist", READS_IMAGES, {"tasks/text.py"}),
    "within a function": ("def work():\n    from richter.tasks import mnist\n    return mnist", READS_IMAGES, {"tasks/text.py"}),
    "in a default": ("from richter import tasks\ndef work(make=tasks.mnist): ...", READS_IMAGES, {"tasks/text.py"}),
    "of what a call returns": ("from richter import tasks\nx = tasks.mnist(10).x.sum()", READS_IMAGES, {"tasks/text.py"}),
    "a neighbour": ("from . import fig3", {"experiments/nfa/fig3.py", "theory/freeprob.py"}, {"theory/early_time.py"}),
    "a neighbour's name": ("from .fig3 import early", {"experiments/nfa/fig3.py"}, set()),
    "one above": ("from ..training import scaled", {"experiments/training.py", "models/mlp.py"}, {"models/vgg.py"}),
    "by its name as text": ("from richter import tasks\ngetattr(tasks, 'mnist')", {*READS_IMAGES, "tasks/text.py"},
                            {"models/mlp.py"}),
    "everything": ("from richter.tasks import *", {*READS_IMAGES, "tasks/text.py"}, set()),
    "handed on": ("from richter import tasks", {*READS_IMAGES, "tasks/text.py"}, set()),
    "a name nobody defines": ("from richter.models import nothing", {"models/mlp.py", "models/vgg.py", "models/__init__.py"},
                              set()),
    "all of Richter": ("import richter\nvars(richter)", {*READS_IMAGES, "models/vgg.py", "theory/early_time.py"}, set()),
    "the instrument": ("import richter\nfrom richter.instrument.probe import Probe\nrichter.measure", set(), READS_IMAGES),
    "the frame": ("from richter.experiments import Claim\nfrom richter.experiments.frame import Experiment", set(), READS_IMAGES),
}


@pytest.mark.parametrize("kind", IMPORTS)
def test_every_way_to_import_is_followed(package: Path, kind: str) -> None:
    code, used, unused = IMPORTS[kind]
    path = package / "experiments/nfa/mine.py"
    try:
        path.write_text(code)
        followed = set(keys.modules([path], package)) - {"experiments/nfa/mine.py"}
    finally:
        path.unlink()
    assert used <= followed
    assert not unused & followed
    assert not followed & keys.FRAME
    assert all(name.startswith(keys.FOLLOWED) for name in followed)


def test_a_key_is_of_names_and_contents() -> None:
    others = ({"a.py": "1", "b.py": "2"}, {"a.py": "2", "b.py": "1"}, {"a.py": "1", "c.py": "2"}, {"a.py": "1"})
    assert len({keys.key(digests) for digests in others}) == 4


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_knows_its_modules(name: str) -> None:
    e = experiments.get(name)
    own = file_of(name, keys.ROOT)
    assert own.relative_to(keys.ROOT).as_posix() in e.modules
    assert e.modules.keys() == keys.modules([own]).keys()
    assert e.key == keys.key(e.modules)


def test_files_beside_the_papers_are_of_the_frame_or_of_an_experiment() -> None:
    beside = {f"experiments/{path.name}" for path in (keys.ROOT / "experiments").glob("*.py")}
    assert beside >= keys.FRAME
    assert beside - keys.FRAME <= {module for name in NAMES for module in experiments.get(name).modules}


def test_an_experiment_of_another_package() -> None:
    assert list(tiny.EXPERIMENT.modules) == ["tiny.py"]
    assert tiny.EXPERIMENT.key != experiments.get("nfa_fig1").key


def test_an_experiment_of_no_file_is_told_so() -> None:
    typed: dict[str, object] = {}
    exec("def work(settings, run): return {}", typed)
    e = dataclasses.replace(tiny.EXPERIMENT, work=typed["work"])  # type: ignore[arg-type]
    with pytest.raises(SelectionError, match=r"defined in '<string>', which is no file.* move it to a file"):
        _ = e.key


@pytest.mark.parametrize(("edit", "again"), [
    (('title="', 'title="More of '), False), (("low=1e-9", "low=2e-9"), False),
    (("def draw(results: Results)", "def draw(results: Results, size: int = 3)"), False),
    (("s = t.settings\n", "s = t.settings or None\n"), True),
    (("class NfaFig17Settings:\n", "class NfaFig17Settings:\n    more: int = 3\n"), True),
])
def test_a_task_is_known_by_its_work_alone(package: Path, edit: tuple[str, str], again: bool) -> None:
    """Words, bars and drawings are read anew from finished tasks; what a task does, or is, makes it another."""
    path = file_of("nfa_fig17", package)  # whose work has no variable of its own that is called draw

    def key() -> str:
        return keys.key(keys.modules([path], package, wanted="work"))

    before, text = key(), path.read_text()
    assert edit[0] in text
    try:
        path.write_text(text.replace(*edit))
        assert (key() != before) is again
    finally:
        path.write_text(text)


@pytest.mark.parametrize(("changed", "value"), [
    ("rest", lambda: "another"), ("modules", lambda files, **more: {"a.py": "another"})])
def test_other_code_is_another_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str,
                                      value: Callable[..., object]) -> None:
    monkeypatch.setenv("TINY_LOG", str(tmp_path / "log"))

    def worked() -> int:
        return len((tmp_path / "log").read_text().split())

    running.check(tiny.EXPERIMENT, "smoke", tmp_path)
    running.check(dataclasses.replace(tiny.EXPERIMENT), "smoke", tmp_path)
    assert worked() == 3
    other = dataclasses.replace(tiny.EXPERIMENT)
    monkeypatch.setattr(keys, changed, value)
    running.check(other, "smoke", tmp_path)
    assert worked() == 6
    running.start(other, tmp_path)
    running.start(other, tmp_path)  # whether it starts is seen each time
    assert worked() == 8


def test_what_has_moved_is_named_as_before() -> None:
    """Each new name leads to something, and a digest names its first place."""
    for now, before in keys.MOVED.items():
        module, _, name = now.rpartition(".")
        assert hasattr(importlib.import_module(module), name), now
        codes = [keys._read(f"from {path.rpartition('.')[0]} import {name}\nX = {name}()\n".encode()).statements[0].code
                 for path in (now, before)]
        assert codes[0] == codes[1]


def declaring(text: str, more: str = "") -> str:
    """Change a file so that claims and experiments declare what the ledger says of them."""
    tree = ast.parse(text)
    words = "own=True, reason='scale', says=f'{UNKNOWN}', direction=Interval(low=0), protocol='exact'"
    call = ast.parse(f"f({words}{more})").body[0].value
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Claim", "Experiment"):
            node.keywords += call.keywords
    return ast.unparse(tree)


def test_words_of_the_ledger_change_no_key(package: Path) -> None:
    """Declarations of a claim beside its number are in no digest, nor are the names that it reads there; its bar is."""
    assert changed_by(package, "experiments/nfa/prop2.py", declaring) == (set(), False)
    assert changed_by(package, "experiments/nfa/prop2.py", lambda text: declaring(text, ", by='mean'")) == ({"nfa_prop2"}, False)
