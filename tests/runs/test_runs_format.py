"""The format of runs: it is written as it was frozen, and any other is refused; SQL has a file of its own."""

from __future__ import annotations

import ast
import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runs_helpers import DATA, NAN, Mark, Row, Snapshot, StoreError, answer, runs, same, say, sqlite, writing

FROZEN = DATA / f"run_format_{sqlite.FORMAT}"
OLDER = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE rows (series INTEGER NOT NULL, step INTEGER NOT NULL, value REAL, error REAL, note INTEGER, mark TEXT, PRIMARY KEY (series, step)) WITHOUT ROWID;
"""  # noqa: E501  some of the tables of format 2; format 1 had no marks


def frozen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a run as tests/data/run_format_3 was written; a new format gets a new folder."""
    monkeypatch.setattr(writing, "provenance", dict)
    with runs.create(folder, {"lr": 0.1, "layers": [3, 4]}, seeds={"weights": 7}) as run:
        for step in range(0, 50, 10):
            run.rows([Row(step, "0", "nfc", step / 8, 0.5, *(("trivial", Mark.TRIVIAL) if step == 0 else ()))])
            run.scalars(step, loss=1 / (1 + step))
        with run._transaction("written"):
            run._database.settle()
        last = (Row(50, "0", "nfc", 6.25, 0.5), Row(50, "*", "cka", NAN, NAN, "no number", Mark.UNDEFINED))
        run.snapshot(Snapshot(last, 50, {"*": "a remark"}, 1.5, 12, 4.0, {("0", "agop"): np.ones((40, 40), dtype=np.float32)}))
        run.array("spectrum", np.arange(5.0), layer="0", step=50)
        run.array("zeros", np.zeros(500, dtype=np.int16))
        run.claim("grows", {"value": 1.5, "holds": True})
        run.figure("curve", "svg", b"<svg/>")
        run.describe(model="MLP")
    run.run.close()


def check_frozen(run: Any) -> None:
    assert run.settings == {"lr": 0.1, "layers": [3, 4]}
    assert run.seeds == {"weights": 7}
    assert (run.steps, run.last, run.layers, run.measures, run.scalar_names) == ([50], 50, ["0", "*"], ["nfc", "cka"], ["loss"])
    series = run.series("nfc", "0")
    assert series.step.tolist() == [0, 10, 20, 30, 40, 50]
    assert series.value.tolist() == [0.0, 1.25, 2.5, 3.75, 5.0, 6.25]
    assert series.error.tolist() == [0.5] * 6
    assert same(run.scalars("loss").value, [1 / (1 + s) for s in range(0, 50, 10)])
    snap = run.snapshots[-1]
    assert (snap.notes, snap.seconds, snap.examples, snap.passes) == ({"*": "a remark"}, 1.5, 12, 4.0)
    assert snap.note("cka") == "no number"
    assert run.snapshots[0].note("nfc", "0") == "trivial"
    assert run.table.mark.tolist() == ["trivial", *["exact"] * 5, "undefined", *["exact"] * 5]  # of nfc, cka, loss
    np.testing.assert_allclose(run.array("agop", "0"), np.ones((40, 40)), atol=1e-5)
    assert run.array("agop", "0").dtype == np.float32
    assert run.array("spectrum", "0").tolist() == [0, 1, 2, 3, 4]
    assert run.array("zeros").tobytes() == bytes(1000)
    assert run.claims == {"grows": {"value": 1.5, "holds": True}}
    assert run.figure("curve") == b"<svg/>"
    assert run.about == {"model": "MLP"}


def test_a_run_of_this_format_stays_readable(tmp_path: Path) -> None:
    assert [p.name for p in FROZEN.iterdir()] == ["run.db"]
    assert (FROZEN / "run.db").stat().st_size <= 16 * 4096
    folder = Path(shutil.copytree(FROZEN, tmp_path / "run"))
    before = (folder / "run.db").read_bytes()
    check_frozen(runs.load(folder))
    assert runs.load(folder).status == "finished"
    assert (folder / "run.db").read_bytes() == before
    with runs.create(folder, resume=True) as run:
        run.scalars(60, loss=0.0)
    assert runs.load(folder).last == 60


def test_a_run_is_written_as_its_format_was_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen(tmp_path / "run", monkeypatch)
    check_frozen(runs.load(tmp_path / "run"))
    for table in ("series", "notes", "chunks", "recent", "meta", "claims", "figures"):
        question = f"SELECT * FROM {table}"
        assert answer(tmp_path / "run" / "run.db", question) == answer(FROZEN / "run.db", question)


def test_the_format_is_written_down() -> None:
    """A change of the schema is a new format, with a number and a frozen run of its own."""
    assert (sqlite.FORMAT, hashlib.sha256(sqlite.SCHEMA.encode()).hexdigest()[:16]) == (3, "fe7286197958e5a1")


@pytest.mark.parametrize("form", [1, 2])
def test_older_formats_are_refused(tmp_path: Path, form: int) -> None:
    """By readers and writers, in a sentence that says what to do; nothing in the file is changed."""
    folder = Path(shutil.copytree(FROZEN, tmp_path / "run"))
    old = OLDER if form == 2 else OLDER.replace(", mark TEXT", "")
    (folder / "run.db").unlink()
    version = f"PRAGMA application_id={sqlite.APPLICATION}", f"PRAGMA user_version={form}"
    say(folder / "run.db", *old.strip().split("\n"), *version)
    before = (folder / "run.db").read_bytes()
    sentence = (f"the run .* has format {form}, which only unreleased versions wrote, without checksums. This version of Richter "
                "reads format 3 only: measure again, under another name.")
    for ask in (lambda: runs.load(folder), lambda: runs.create(folder), lambda: runs.create(folder, resume=True)):
        with pytest.raises(StoreError, match=sentence):
            ask()
    assert (folder / "run.db").read_bytes() == before
    assert not list(runs.find(tmp_path))


def test_all_sql_is_in_a_file_of_its_own() -> None:
    """Statements stand in no other file of the library, not even in pieces."""
    statement = re.compile(r"\b(SELECT|INSERT|UPDATE|DELETE FROM|CREATE|ALTER|DROP|BEGIN|COMMIT|ROLLBACK|WHERE|JOIN)\b")
    home = Path(sqlite.__file__)
    for path in home.parents[1].rglob("*.py"):
        texts = [node.value for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                 if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        assert any(map(statement.search, texts)) == (path == home), path
