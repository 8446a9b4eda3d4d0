"""Formats of runs: every one there was is readable, and brought up to date when its run is resumed; SQL has files of its own."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import re
import shutil
import signal
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runs_helpers import DATA, NAN, Mark, Row, Snapshot, StoreError, answer, formats, runs, same, say, sql, writing

OLD = [1, 2]  # formats before today's
FROZEN = [*OLD, formats.FORMAT]


def frozen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How tests/data/run_format_3 was written (2 without sums, 1 without marks); for a new format, into a new folder."""
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
    assert (run.steps, run.last, run.layers, run.measures, run.names) == ([50], 50, ["0", "*"], ["nfc", "cka"], ["loss"])
    series = run.series("nfc", "0")
    assert series.step.tolist() == [0, 10, 20, 30, 40, 50]
    assert series.value.tolist() == [0.0, 1.25, 2.5, 3.75, 5.0, 6.25]
    assert series.error.tolist() == [0.5] * 6
    assert same(run.scalar("loss").value, [1 / (1 + s) for s in range(0, 50, 10)])
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


def thawed(form: int, folder: Path) -> Path:
    return Path(shutil.copytree(DATA / f"run_format_{form}", folder))


@pytest.mark.parametrize("form", FROZEN)
def test_every_format_stays_readable(tmp_path: Path, form: int) -> None:
    assert [p.name for p in (DATA / f"run_format_{form}").iterdir()] == ["run.db"]
    assert (DATA / f"run_format_{form}" / "run.db").stat().st_size <= 16 * 4096
    folder = thawed(form, tmp_path / "run")
    before = (folder / "run.db").read_bytes()
    check_frozen(runs.open(folder))
    assert runs.open(folder).status == "finished"
    assert (folder / "run.db").read_bytes() == before
    with runs.create(folder, resume=True) as run:
        run.scalars(60, loss=0.0)
    assert runs.open(folder).last == 60


def test_a_run_is_written_as_its_format_was_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen(tmp_path / "run", monkeypatch)
    check_frozen(runs.open(tmp_path / "run"))
    for table in ("series", "notes", "chunks", "recent", "meta", "claims", "figures"):
        question = f"SELECT * FROM {table}"
        assert answer(tmp_path / "run" / "run.db", question) == answer(DATA / f"run_format_{formats.FORMAT}" / "run.db", question)


def test_the_formats_are_written_down() -> None:
    """A change of the schema is a new format, with a migration and a frozen run of its own."""
    assert {form: hashlib.sha256(text.encode()).hexdigest()[:16] for form, text in formats.SCHEMAS.items()} == {
        1: "abe0512673daad89", 2: "182c745c22f0f507", 3: "fe7286197958e5a1"}
    assert max(formats.SCHEMAS) == formats.FORMAT
    assert list(formats.MIGRATIONS) == OLD


# ------------------------------------------------------------------------------------------------------ marks of old rows


OLD_ROWS = [
    (1.0, "trivial: the outputs read this layer directly, so its value is 1 by definition", "trivial"),
    (NAN, "trivial; 128 random outputs of 1000", "trivial"),
    (NAN, "", "undefined"),
    (NAN, "0/0: undefined here (a kernel, gradient or label of zeros)", "undefined"),
    (NAN, "needs labels; 128 random outputs of 1000", "undefined"),
    (0.5, "128 random outputs of 1000", "estimated"),
    (0.5, "not converged: |dL/dW + decay W| is 0.2 of |decay W|; 128 random outputs of 1000", "estimated"),
    (0.5, "16 outputs drawn of 20 that have labels", "estimated"),
    (0.5, "estimated by products with the kernel of 64 examples, which is not formed", "estimated"),
    (0.5, "a remark about random outputs of the network, nothing trivial", "exact"),
    (0.5, "", "exact"),
    (float("inf"), "", "exact"),
]


@pytest.mark.parametrize("table", ["rows", "recent"])
@pytest.mark.parametrize("resumed", [False, True])
def test_rows_of_format_1_get_their_marks(tmp_path: Path, table: str, resumed: bool) -> None:
    """By their notes and values; scalars have no mark, NaN or not."""
    folder = thawed(1, tmp_path / "run")
    with contextlib.closing(sqlite3.connect(folder / "run.db", isolation_level=None)) as db:
        db.execute("INSERT INTO series VALUES (100, 'row', 'x', 'old'), (101, 'scalar', '', 'diverged')")
        for step, (value, note, _) in enumerate(OLD_ROWS):
            db.execute("INSERT OR IGNORE INTO notes (text) SELECT ? WHERE ? <> ''", (note, note))
            db.execute(f"INSERT INTO {table} (series, step, value, note) "
                       f"VALUES (100, ?, ?, (SELECT id FROM notes WHERE text = ?))", (step, value, note))
        db.execute(f"INSERT INTO {table} (series, step, value) VALUES (101, 0, NULL)")
    if resumed:
        runs.create(folder, resume=True).close()
    run = runs.open(folder)
    wanted = [mark for *_, mark in OLD_ROWS]
    assert run.frame.query("layer == 'x'").mark.tolist() == wanted
    assert [s.row("old", "x").mark for s in run.snapshots if "old" in s.measures] == [Mark(word) for word in wanted]
    assert run.table.query("measure == 'diverged'").mark.tolist() == ["exact"]
    assert run.curves(["old"], ["x"])["old", "x"][1] == (Mark.EXACT, "")


def test_a_run_that_is_resumed_is_read_on_by_those_who_read_it_as_an_old_one(tmp_path: Path) -> None:
    folder = thawed(1, tmp_path / "run")
    reading = runs.open(folder)
    check_frozen(reading)
    with runs.create(folder, resume=True) as run:
        run.scalars(60, loss=0.0)
        assert reading.last == 60
        run.scalars(70, loss=0.0)
        assert reading.last == 70
    assert reading.status == "finished"


# ---------------------------------------------------------------------------------------------------------- migrations


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> int:
    """As if there were one more format, with one column more."""
    table = next(line for line in formats.SCHEMA.splitlines() if line.startswith("CREATE TABLE sessions"))
    form, schema = formats.FORMAT + 1, formats.SCHEMA.replace(table, table.replace(");", ", more TEXT DEFAULT 'old');"))
    monkeypatch.setattr(formats, "FORMAT", form)
    monkeypatch.setattr(formats, "SCHEMA", schema)
    monkeypatch.setattr(formats, "SCHEMAS", {**formats.SCHEMAS, form: schema})
    monkeypatch.setattr(formats, "MIGRATIONS", {**formats.MIGRATIONS, form - 1: lambda db: db.execute(
        "ALTER TABLE sessions ADD COLUMN more TEXT DEFAULT 'old'")})
    return form


def state(folder: Path, table: str, column: str) -> tuple[int, bool]:
    """The format, and whether a table has a column."""
    with contextlib.closing(sqlite3.connect(f"file:{folder / 'run.db'}?mode=ro", uri=True)) as db:
        known = {facts[1] for facts in db.execute(f"PRAGMA table_info({table})")}
        return db.execute("PRAGMA user_version").fetchone()[0], column in known


@pytest.mark.parametrize("form", FROZEN)
def test_an_old_format_is_read_as_it_is_and_migrated_when_resumed(tmp_path: Path, newer: int, form: int) -> None:
    folder = thawed(form, tmp_path / "run")
    before = (folder / "run.db").read_bytes()
    run = runs.open(folder)
    check_frozen(run)
    assert run._database._ask("SELECT more FROM sessions") == [("old",)]
    with pytest.raises(StoreError, match="there is already a run"):
        runs.create(folder)
    with pytest.raises(StoreError, match="other settings"):
        runs.create(folder, {"lr": 0.2}, resume=True)
    assert (folder / "run.db").read_bytes() == before
    with runs.create(folder, resume=True):
        pass
    assert state(folder, "sessions", "more") == (newer, True)
    check_frozen(runs.open(folder))
    runs.create(folder, resume=True).close()  # and again, as one of today's


@pytest.mark.parametrize("form", OLD)
def test_a_migration_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: int) -> None:
    folder, migrations = thawed(form, tmp_path / "run"), dict(formats.MIGRATIONS)
    migration, changed = migrations[form], ("rows", "mark") if form == 1 else ("meta", "sum")

    def in_file(db: sqlite3.Connection) -> bool:  # and not in the copy of a reader
        return bool(db.execute("PRAGMA database_list").fetchone()[2])

    def fails(db: sqlite3.Connection) -> None:
        migration(db)
        if in_file(db):
            raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(formats, "MIGRATIONS", {**migrations, form: fails})
    with pytest.raises(StoreError, match="The disk is full"):
        runs.create(folder, resume=True)
    assert state(folder, *changed) == (form, False)

    def dying(db: sqlite3.Connection) -> None:
        if in_file(db):
            db.set_trace_callback(lambda statement: moment in statement and os.kill(os.getpid(), signal.SIGKILL))
        migration(db)

    moments = ("ALTER", "UPDATE", "user_version=2", "COMMIT") if form == 1 else \
        ("CREATE", "REPLACE INTO ledger", "DELETE FROM recent", "INSERT INTO chunks", "DROP", "user_version=3", "COMMIT")
    for moment in moments:  # noqa: B007
        if not (pid := os.fork()):
            formats.MIGRATIONS[form] = dying
            runs.create(folder, resume=True)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        assert state(folder, *changed) == (form, False)
    monkeypatch.setattr(formats, "MIGRATIONS", migrations)
    runs.create(folder, resume=True).close()
    assert state(folder, "meta", "sum") == (formats.FORMAT, True)
    check_frozen(runs.open(folder))


def test_what_was_kept_without_sums_is_said_not_to_be_checked(tmp_path: Path) -> None:
    for form in OLD:
        folder = thawed(form, tmp_path / f"run {form}")
        assert not runs.open(folder).checked
        runs.create(folder, resume=True).close()
        assert not runs.open(folder).checked  # its sums are of what was read then
    assert runs.open(DATA / f"run_format_{formats.FORMAT}").checked


@pytest.mark.parametrize("harm", ["CREATE VIEW v AS SELECT * FROM rows", "CREATE TABLE more (a)", "DROP TABLE figures",
                                  "CREATE INDEX i ON recent (step)", "ALTER TABLE rows ADD COLUMN mark TEXT"])
def test_an_old_database_with_more_than_we_wrote_is_not_read(tmp_path: Path, harm: str) -> None:
    folder = thawed(1, tmp_path / "run")
    say(folder / "run.db", harm)
    before = (folder / "run.db").read_bytes()
    for ask in (lambda: runs.open(folder), lambda: runs.create(folder, resume=True)):
        with pytest.raises(StoreError, match="other tables, views or triggers than Richter writes"):
            ask()
    assert (folder / "run.db").read_bytes() == before


# --------------------------------------------------------------------------------------------------------------- files of its own


def test_all_sql_is_in_files_of_its_own() -> None:
    """So that another database is a few more files: statements stand in no other file of the library, not even in pieces."""
    statement = re.compile(r"\b(SELECT|INSERT|UPDATE|DELETE FROM|CREATE|ALTER|DROP|BEGIN|COMMIT|ROLLBACK|WHERE|JOIN)\b")
    home = Path(sql.__file__)
    for path in home.parents[1].rglob("*.py"):
        texts = [node.value for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                 if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        assert any(map(statement.search, texts)) == (path.parent == home.parent and path.name.startswith("sql")), path
