"""Strangers' files are data: damaged or made to do harm, they are refused in a sentence, and nothing else happens."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import shutil
import signal
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from runs_helpers import (
    DATA,
    StoreError,
    answer,
    child,
    ended,
    everything,
    leave_behind,
    lock,
    runs,
    same,
    say,
    sealed,
    small,
    sqlite,
    survived,
)

FROZEN = DATA / f"run_format_{sqlite.FORMAT}"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small(tmp_path_factory.mktemp("stored") / "run")


@pytest.fixture
def copy(stored: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / "run"))


def test_a_whole_run_answers_everything(copy: Path) -> None:
    """So that what follows is due to what was harmed."""
    assert all("only a symmetric matrix has eigenpairs" in s for s in survived(copy))
    assert len(everything(runs.load(copy))) > 25
    forms = {form for (form,) in answer(copy / "run.db", "SELECT form FROM arrays")}
    assert forms == {"plain", "zlib", "eigen", "half", "half-zlib"}


FOREIGN = {
    "a trigger": ("CREATE TRIGGER t AFTER INSERT ON recent BEGIN DELETE FROM chunks; END",),
    "a view": ("CREATE VIEW v AS SELECT * FROM chunks",),
    "a view in place of a table": ("DROP TABLE claims", "CREATE VIEW claims AS SELECT 'a' AS name, random() AS record"),
    "another table": ("CREATE TABLE more (a)",),
    "a table too few": ("DROP TABLE figures",),
    "another column": ("ALTER TABLE chunks ADD COLUMN more TEXT",),
    "a computed column": ("DROP TABLE claims", "CREATE TABLE claims (name TEXT PRIMARY KEY, record TEXT AS (zeroblob(9)))"),
    "an index": ("CREATE INDEX i ON recent (abs(id))",),
    "a virtual table": ("DROP TABLE claims", "CREATE VIRTUAL TABLE claims USING fts5(name, record)"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_database_with_more_than_we_write_is_not_read(copy: Path, what: str) -> None:
    try:
        say(copy / "run.db", *FOREIGN[what])
    except sqlite3.OperationalError as why:
        pytest.skip(str(why))
    before = (copy / "run.db").read_bytes()
    for ask in (lambda: runs.load(copy), lambda: runs.create(copy, resume=True), lambda: runs.create(copy)):
        with pytest.raises(StoreError, match="tables, views or triggers that Richter does not write"):
            ask()
    assert (copy / "run.db").read_bytes() == before
    assert list(runs.find(copy.parent)) == []


@pytest.mark.parametrize(("pragma", "sentence"), [
    ("application_id=7", "is a database that Richter did not write. Nothing in it was read or changed"),
    ("user_version=4", "has format 4, and this version of Richter reads format 3. Update Richter"),
    ("user_version=2", "has format 2, which only unreleased versions wrote"),
    ("user_version=1", "has format 1, which only unreleased versions wrote"),
    ("user_version=0", "has format 0, which does not exist: it is damaged"),
    ("user_version=-2147483648", "which does not exist")])
def test_a_database_that_is_not_of_a_known_format(copy: Path, pragma: str, sentence: str) -> None:
    say(copy / "run.db", f"PRAGMA {pragma}")
    before = (copy / "run.db").read_bytes()
    for ask in (lambda: runs.load(copy), lambda: runs.create(copy, resume=True), lambda: runs.create(copy),
                lambda: sqlite.Appender(copy, lock.identity(copy.stat()))):
        with pytest.raises(StoreError, match=sentence):
            ask()
    assert (copy / "run.db").read_bytes() == before
    assert sorted(p.name for p in copy.iterdir()) == ["objects", "run.db", "writer.lock"]


@pytest.mark.parametrize("content", [b"", b"no database" * 99, b"SQLite format 3\0" + bytes(4080), bytes(8192)])
def test_a_file_that_is_no_database(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.db").write_bytes(content)
    with pytest.raises(StoreError, match=r"The file is not a database|was never begun|could not be read"):
        runs.load(tmp_path / "run")
    if content.strip(b"\0"):
        with pytest.raises(StoreError):
            runs.create(tmp_path / "run", resume=True)
        assert (tmp_path / "run" / "run.db").read_bytes() == content


def test_a_schema_that_is_no_text(copy: Path) -> None:
    """SQLite cites it in an error, which Python cannot read."""
    whole = (copy / "run.db").read_bytes()
    harmed = whole.replace(b"CREATE TABLE claims", b"CREATE T\x94BLE claims")
    assert harmed != whole
    (copy / "run.db").write_bytes(harmed)
    for ask in (lambda: runs.load(copy), lambda: runs.create(copy, resume=True)):
        with pytest.raises(StoreError, match="damaged"):
            ask()
    assert (copy / "run.db").read_bytes() == harmed


def columns() -> list[tuple[str, str]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.executescript(sqlite.SCHEMA)
        tables = [t for (t,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return [(t, c[1]) for t in tables for c in db.execute(f"PRAGMA table_info({t})") if c[1] != "id"]  # always a number


ODD = ["'no number'", "x'ff00'", "9e999", "-9223372036854775808", "NULL", "'[1, 2]'", f"'{'[' * 5000}'",
       "cast(x'fffe00' AS TEXT)"]


@pytest.mark.parametrize(("table", "column"), columns())
def test_columns_that_hold_what_they_should_not(copy: Path, table: str, column: str) -> None:
    """Text for numbers, bytes for text, broken and unexpected JSON, numbers that are no places, in every column."""
    whole, odd = (copy / "run.db").read_bytes(), 0
    for value, seal in [*((value, sealed) for value in ODD), (ODD[0], lambda _: None), (ODD[3], lambda _: None)]:
        (copy / "run.db").write_bytes(whole)
        with contextlib.suppress(sqlite3.IntegrityError):  # a number of SQLite's own is always a number
            say(copy / "run.db", f"UPDATE OR IGNORE {table} SET {column} = {value}")
        seal(copy / "run.db")
        changed = (copy / "run.db").read_bytes() != whole
        harm = {s for s in survived(copy, export=False) if "only a symmetric matrix" not in s}
        odd += bool(harm)
        assert harm or not changed or seal is sealed  # the sums tell that it is not what was written
    assert odd


@pytest.mark.parametrize(("harm", "sentence"), [
    ("UPDATE chunks SET data = x'00'", "a block of its rows is cut off"),
    ("UPDATE chunks SET data = x'0200000000'", "a block of its rows does not have the announced size"),
    ("UPDATE chunks SET data = x'02ffffffff' || zeroblob(16)", "damaged"),
    ("UPDATE chunks SET data = substr(data, 1, length(data) - 1)", "does not have the announced size"),
    ("UPDATE chunks SET first = first - 1", "is in the wrong place"),
    ("UPDATE chunks SET data = CAST(substr(data, 1, length(data) - 1) || x'63' AS BLOB)", "the mark 99, which does not exist"),
    ("DELETE FROM recent", "the end of its rows is not in its original state"),
    ("DELETE FROM ledger", "its ledger is missing"),
    ("UPDATE series SET chunks = 4000000000", "are missing"),
    ("UPDATE series SET name = x'ff' WHERE id = 1", "has a bytes where another type belongs"),
    ("UPDATE meta SET value = '[1'", "a record of this run is damaged"),
    ("UPDATE sessions SET provenance = '[1]'", "it is a list"),
    ("UPDATE snapshots SET notes = '\"a\"'", "it is a str"),
    ("UPDATE claims SET record = '7'", "it is a int"),
    ("UPDATE figures SET bytes = 99999999999", "has a int where another type belongs"),
    ("UPDATE arrays SET shape = '[1e999]'", "its shape is"),
    ("UPDATE arrays SET shape = '[-1, -7]'", "Richter writes no"),
    ("UPDATE arrays SET shape = '[9999999999999, 99999999999999999999]'", "Richter writes no"),
    ("UPDATE arrays SET shape = '[0, 9223372036854775807, 2]'", "Richter writes no"),
    ("UPDATE arrays SET shape = '[]'", "damaged"),
    ("UPDATE arrays SET shape = '[3000, 3000]' WHERE form = 'eigen'", "damaged"),
    ("UPDATE arrays SET dtype = '|O'", "Richter writes no"),
    ("UPDATE arrays SET dtype = '<f8,<f8'", "Richter writes no"),
    ("UPDATE arrays SET dtype = '|V8'", "Richter writes no"),
    ("UPDATE arrays SET dtype = '<f1'", "Richter writes no"),
    ("UPDATE arrays SET dtype = '<i4' WHERE form = 'eigen'", "Richter writes no"),
    ("UPDATE arrays SET dtype = '(2,'", "Richter writes no"),
    ("UPDATE arrays SET form = 'pickle'", "Richter writes no arrays of form 'pickle'"),
    ("UPDATE arrays SET form = 'eigen' WHERE form = 'plain'", "Richter writes no"),
    ("UPDATE arrays SET bytes = substr(bytes, 1, length(bytes) - 5)", "fewer or more bytes than its shape needs"),
    ("UPDATE arrays SET bytes = x'00'", "damaged"),
    ("UPDATE arrays SET bytes = NULL", "has no bytes"),
    ("UPDATE arrays SET object = '../../x'", "is not the name of a stored object"),
    ("UPDATE arrays SET object = '/etc/passwd'", "is not the name of a stored object"),
    (f"UPDATE arrays SET object = '{'0' * 64}'", "is missing from"),
    (f"UPDATE meta SET value = '\"{'../' * 20}{'a' * 64}\"' WHERE key = 'initial'", "is not the name of a stored object"),
])
def test_damage_is_named(copy: Path, harm: str, sentence: str) -> None:
    say(copy / "run.db", harm)
    assert any("damaged" in s or "is missing from" in s for s in survived(copy)), survived(copy)
    sealed(copy / "run.db")
    assert any(sentence in s for s in survived(copy)), survived(copy)


def test_arrays_that_say_they_are_larger_than_they_are(copy: Path) -> None:
    """A few bytes that become a gigabyte are read up to what was announced, and no gigabyte is announced by a few bytes."""
    import zlib
    bomb = zlib.compress(bytes(2 ** 26), 1)
    with contextlib.closing(sqlite3.connect(copy / "run.db", isolation_level=None)) as db:
        db.execute("UPDATE arrays SET form = 'zlib', shape = '[9]', dtype = '<f8', bytes = ?, object = NULL", (bomb,))
    sealed(copy / "run.db")
    run = runs.load(copy)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(StoreError, match="fewer or more bytes than its shape needs"):
        run.array("spectrum", "0")
    for form in ("eigen", "half", "zlib"):
        say(copy / "run.db", f"UPDATE arrays SET form = '{form}', shape = '[100000, 100000]'")
        sealed(copy / "run.db")
        with pytest.raises(StoreError, match="Richter writes no"):
            run.array("spectrum", "0")
    say(copy / "run.db", "UPDATE arrays SET form = 'half', shape = '[20000, 20000]', bytes = x'00'")
    sealed(copy / "run.db")
    with pytest.raises(StoreError, match="damaged: 1 bytes for shape"):
        run.array("spectrum", "0")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 ** 15  # KiB


def test_pages_that_lead_to_each_other_do_not_keep_a_reader_busy(tmp_path: Path) -> None:
    """A tree of four levels, each page of which has the same page below it many times: 10^9 rows in a small file."""
    db = Path(shutil.copytree(FROZEN, tmp_path / "run")) / "run.db"
    with contextlib.closing(sqlite3.connect(db)) as connection, connection:
        connection.executemany("INSERT INTO recent (data) VALUES (x'0102030405060708')", [() for _ in range(8_000)])
    repeated(db, "recent")
    start = time.process_time()
    for ask in (lambda: runs.load(tmp_path / "run").series("nfc", "0"), lambda: runs.load(tmp_path / "run").frame):
        with pytest.raises(StoreError, match="needs more work than a valid file of this size"):
            ask()
    assert time.process_time() - start < 20


def ask_with_little_memory(folder: str) -> None:
    import resource

    import pandas  # noqa: F401  # before there is little
    import pytest

    from richter import runs
    from richter.core import StoreError
    resource.setrlimit(resource.RLIMIT_AS, (2 ** 30, 2 ** 30))
    for ask in (lambda: runs.load(folder).series("nfc", "0"), lambda: runs.load(folder).frame):
        with pytest.raises(StoreError, match="more was read than the file can hold"):
            ask()


def test_rows_that_are_there_many_times_do_not_fill_the_memory(tmp_path: Path) -> None:
    """A tree whose pages lead to the same leaf again and again: gigabytes of rows in a file of a megabyte."""
    db = Path(shutil.copytree(FROZEN, tmp_path / "run")) / "run.db"
    with contextlib.closing(sqlite3.connect(db)) as connection, connection:
        connection.executemany("INSERT INTO recent (data) VALUES (zeroblob(800))", [() for _ in range(1200)])
    repeated(db, "recent")
    ended(child(ask_with_little_memory, str(tmp_path / "run")))


def repeated(db: Path, table: str) -> None:
    """Each of four levels of a tree has one page below it, many times."""
    with contextlib.closing(sqlite3.connect(db)) as connection:
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    data = bytearray(db.read_bytes())

    def below(number: int) -> tuple[bytearray, list[int], list[int]]:
        page = data[(number - 1) * size:number * size]
        assert page[0] == 5  # with pages below
        cells = [int.from_bytes(page[12 + 2 * i:14 + 2 * i], "big") for i in range(int.from_bytes(page[3:5], "big"))]
        return page, cells, [int.from_bytes(page[c:c + 4], "big") for c in cells]

    page, cells, pages = below(root)
    if len(pages) < 5:
        page, cells, pages = below(pages[0])
    for here, there in itertools.pairwise([root, *pages[:4]]):
        for place in (8, *cells):
            page[place:place + 4] = there.to_bytes(4, "big")
        data[(here - 1) * size:here * size] = page
    db.write_bytes(data)


def test_objects_stay_what_and_where_they_are(copy: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    run = runs.load(copy)
    noise = run.array("noise")
    ((name,),) = answer(copy / "run.db", "SELECT object FROM arrays WHERE name = 'noise'")
    kept = copy / "objects" / f"{name}.safetensors"
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-1] + b"\0")
    with pytest.raises(StoreError, match="does not have its original content"):
        run.array("noise")
    kept.write_bytes(b"not a tensor")
    say(copy / "run.db", f"UPDATE arrays SET object = '{digest(kept)}' WHERE name = 'noise'")
    sealed(copy / "run.db")
    kept = kept.rename(copy / "objects" / f"{digest(kept)}.safetensors")
    with pytest.raises(StoreError, match="cannot be read"):
        run.array("noise")
    say(copy / "run.db", f"UPDATE arrays SET object = '{name}' WHERE name = 'noise'")
    sealed(copy / "run.db")
    (outside / "x").write_bytes(whole)
    kept = copy / "objects" / f"{name}.safetensors"
    kept.symlink_to(outside / "x")
    with pytest.raises(StoreError, match="is missing from"):
        run.array("noise")
    kept.unlink()
    os.mkfifo(kept)
    with pytest.raises(StoreError, match="is missing from"):
        run.array("noise")
    kept.unlink()
    kept.write_bytes(whole)
    assert same(run.array("noise"), noise)
    (copy / "objects").rename(outside / "objects")
    (copy / "objects").symlink_to(outside / "objects")
    with pytest.raises(StoreError, match="is a link"):
        run.array("noise")
    before = sorted(outside.rglob("*"))
    with pytest.raises(StoreError, match="is a link"):
        runs.create(copy, resume=True)
    assert sorted(outside.rglob("*")) == before


def digest(path: Path) -> str:
    import hashlib
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", ["run.db", "run.db-wal", "run.db-journal", "writer.lock"])
def test_files_of_a_run_are_no_links(copy: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / "target"
    shutil.copyfile(copy / "run.db", target)
    (copy / name).unlink(missing_ok=True)
    (copy / name).symlink_to(target)
    before = target.read_bytes()
    if name != "writer.lock":
        with pytest.raises(StoreError, match="is a link"):
            runs.load(copy)
    with pytest.raises(StoreError):
        runs.create(copy, resume=True)
    assert target.read_bytes() == before


def test_a_journal_that_names_another_file_does_not_delete_it(tmp_path: Path) -> None:
    """As SQLite does when it undoes a half write to several databases: with the file that lists them."""
    with child(leave_behind, str(tmp_path / "run"), "journal") as process:
        assert process.wait() == -signal.SIGKILL
    victim, journal = tmp_path / "thesis.tex", tmp_path / "run" / "run.db-journal"
    victim.write_text("years of work")
    name, page = str(victim).encode(), 2 ** 30 // 4096 + 1
    with open(journal, "ab") as f:
        f.write(page.to_bytes(4, "big") + name + len(name).to_bytes(4, "big") + sum(name).to_bytes(4, "big"))
        f.write(bytes.fromhex("d9d505f920a163d7"))
    for ask in (lambda: runs.load(tmp_path / "run"), lambda: runs.create(tmp_path / "run", resume=True)):
        with pytest.raises(StoreError, match="names another file, which SQLite would delete"):
            ask()
    assert victim.exists()
    assert list(runs.find(tmp_path)) == []
    journal.write_bytes(journal.read_bytes()[:-1])
    assert len(runs.load(tmp_path / "run").frame) == 150
    assert victim.exists()


def test_a_named_pipe_as_lock_does_not_hang(copy: Path) -> None:
    (copy / "writer.lock").unlink()
    os.mkfifo(copy / "writer.lock")
    done = threading.Thread(target=lambda: runs.load(copy).status, daemon=True)
    done.start()
    done.join(10)
    assert not done.is_alive()


def fuzz(folder: str, times: int, seed: int) -> None:
    """Flip bytes at random places and cut at random lengths, and ask everything, with little memory."""
    import os
    import random
    import resource
    import shutil
    import sys
    import time
    from pathlib import Path

    from richter import runs
    from richter.core import SelectionError, StoreError
    draw, place = random.Random(seed), Path(folder)
    whole = {path: path.read_bytes() for path in (place / "run.db", *place.glob("run.db-wal"))}
    refused = 0
    for ask in everything(runs.load(place)):  # loads what is loaded once
        try:
            ask()
        except StoreError:
            continue
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as f:
        resource.setrlimit(resource.RLIMIT_AS, (int(f.read().split()[0]) * resource.getpagesize() + 2 ** 29, most))
    for k in range(times):
        for path in place.glob("run.db*"):
            path.unlink()
        for path, content in whole.items():
            data = bytearray(content)
            for _ in range(draw.choice([1, 1, 2, 8])):
                data[draw.randrange(100 if k % 4 == 0 else len(data))] = draw.randrange(256)
            path.write_bytes(data[:draw.randrange(len(data))] if k % 8 == 5 else data)
        start = time.process_time()
        try:
            run = runs.load(place)
        except StoreError:
            refused += 1
            continue
        for ask in everything(run, export=k % 5 == 0):
            try:
                ask()
            except (StoreError, SelectionError):
                refused += 1
            except BaseException as why:
                import traceback
                traceback.print_exc()
                raise AssertionError(f"{seed=} {k=} {ask}: {type(why).__name__}: {why}") from None
        run.close()
        assert time.process_time() - start < 20, (seed, k)
    shutil.rmtree(folder)
    assert "torch" not in sys.modules
    assert os.getpid()
    print(refused)


def test_flipped_bytes_give_no_other_error(copy: Path) -> None:
    assert int(ended(child(fuzz, str(copy), 200, 0, needs=(everything,)))) > 50


def test_flipped_bytes_of_a_log_give_no_other_error(tmp_path: Path) -> None:
    with child(leave_behind, str(tmp_path / "run"), "log") as process:
        assert process.wait() == -signal.SIGKILL
    ended(child(fuzz, str(tmp_path / "run"), 60, 0, needs=(everything,)))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_flipped_bytes_give_no_other_error(copy: Path, seed: int) -> None:
    ended(child(fuzz, str(copy), 1500, seed, needs=(everything,)), 600)
