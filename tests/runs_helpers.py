"""What the tests of runs share: a run with something of everything, all questions that can be asked of one, and children.

Like those of bad input, these tests use the library without the shape checker of the others: a wrong type must reach the
library's own checks. Functions that take their imports with them run in processes of their own, by `child`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings


def _unchecked(*names: str) -> list[ModuleType]:
    def ours() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] == "richter"]

    checked = {name: sys.modules.pop(name) for name in ours()}
    try:
        return [importlib.import_module(f"richter.{name}") for name in names]
    finally:
        for name in ours():
            del sys.modules[name]
        sys.modules.update(checked)


core, snapshot, runs, arrays, sqlite, lock, writing = _unchecked(
    "core", "instrument.snapshot", "runs", "runs.format", "runs.sqlite", "runs.place", "runs.writer")
Mark, Row, SelectionError, StoreError, Snapshot = core.Mark, core.Row, core.SelectionError, core.StoreError, snapshot.Snapshot
arrays.revision = lambda: None  # no look at git for each of a thousand runs
NAN = math.nan
DATA = Path(__file__).parent / "data"


def child(work: Callable[..., object], *values: Any, needs: tuple[Callable[..., object], ...] = ()) -> subprocess.Popen[bytes]:
    """A function of a test in a process of its own, together with those that it calls. What it writes is read as it comes. The
    process imports the library from where this one did, also from another work tree than the one that is installed."""
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    code = "\n".join(["from __future__ import annotations", *map(inspect.getsource, (*needs, work)),
                      f"{work.__name__}(*{values!r})"])
    return subprocess.Popen([sys.executable, "-c", code], bufsize=0, cwd="/", env={**os.environ, "PYTHONPATH": paths},
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ended(process: subprocess.Popen[bytes], seconds: float = 120) -> str:
    """What it said; that it ended well."""
    try:
        out, errors = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == 0, errors.decode()
    return out.decode()


def say(db: Path, *statements: str) -> None:
    """To a database, as anybody could."""
    with contextlib.closing(sqlite3.connect(db, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def sealed(db: Path) -> None:
    """Make all sums right again, as whoever makes a file to do harm would: what is refused then is not refused by them."""
    def plain(text: bytes) -> str:
        return text.decode("utf-8", "replace")

    with contextlib.closing(sqlite3.connect(db, isolation_level=None)) as connection:
        connection.text_factory = plain
        tallies = {}
        for table in ("chunks", *sqlite.TABLES):
            names = sqlite.CHUNK if table == "chunks" else sqlite.TABLES[table][0]
            if ", body" in names:
                blob = "data" if table == "chunks" else "bytes"
                for number, data in connection.execute(f"SELECT id, {blob} FROM {table}").fetchall():
                    body = sqlite.data_sum(data) if isinstance(data, bytes) else None if table == "arrays" else 0
                    connection.execute(f"UPDATE {table} SET body = ? WHERE id = ?", (body, number))
            rows = connection.execute(f"SELECT {names} FROM {table} ORDER BY id").fetchall()
            if table == "chunks":
                tips = {number: sum(sqlite.row_sum(table, *row) for row in rows if row[0] >> 32 == number)
                        for number in {row[0] >> 32 for row in rows}}
                for number, tip in tips.items():
                    signed = (tip + 2 ** 63) % 2 ** 64 - 2 ** 63
                    connection.execute("UPDATE series SET tip = ? WHERE id = ?", (signed, number))
                continue
            totals = [sqlite.row_sum(table, *row) for row in rows]
            for row, total in zip(rows, totals, strict=True):
                connection.execute(f"UPDATE {table} SET sum = ? WHERE id = ?", (total, row[0]))
            tallies[table] = len(rows), sum(totals) % 2 ** 64
        with contextlib.suppress(TypeError, ValueError, StoreError):
            bodies = [data for _, data in connection.execute("SELECT id, data FROM recent ORDER BY id").fetchall()][:-1]
            ((end,),) = connection.execute(f"SELECT data FROM recent WHERE id = {sqlite.TAIL}").fetchall()
            tail = sqlite.Tail.empty(sqlite.Tail.unpacked(end).base)
            for body in bodies:
                tail = tail.after(body)
            connection.execute(f"UPDATE recent SET data = ? WHERE id = {sqlite.TAIL}", (tail.packed(),))
        connection.execute("UPDATE ledger SET data = ?", (sqlite.Ledger(tallies, 0).packed(),))


def answer(db: Path, question: str) -> list[Any]:
    """What is in a database, however it is read by us."""
    with contextlib.closing(sqlite3.connect(f"file:{db}?mode=ro", uri=True)) as connection:
        return connection.execute(question).fetchall()


def known(step: int = 0) -> Any:
    rows = (Row(step, "0", "nfc", 0.5 + step, 0.25), Row(step, "2", "nfc", NAN, NAN, "trivial: a reason", Mark.TRIVIAL),
            Row(step, "*", "cka", 1.0))
    return Snapshot(rows, step, {"*": "a remark", "2": "another"}, 1.5, 12, 4.0, {("0", "agop"): spd(20, 2, seed=abs(step))})


def spd(d: int, rank: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    """Symmetric, positive semi-definite."""
    X = np.random.default_rng(seed).normal(size=(rank, d))
    return (X.T @ X).astype(dtype)


def small(folder: Path) -> Path:
    """A run with something of everything, a few rows of it not yet moved."""
    run = runs.create(folder, {"lr": 0.1, "betas": [0.9, 0.99]}, seeds={"data": 3})
    for step in (0, 10):
        run.snapshot(known(step))
        run.scalars(step, loss=2.0 - step, **{"läuft": NAN})
    run.array("spectrum", np.linspace(0, 1, 7), layer="0", step=10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "LARGE", 1000)
        run.array("noise", np.random.default_rng(0).normal(size=160))
    run.array("few", np.random.default_rng(0).normal(size=8))
    run.array("by pairs", spd(20, 2), eigen=0.9999)
    run.array("identity", np.eye(40), step=1)
    run.claim("grows", {"value": 1.5, "holds": True})
    run.figure("curve", "svg", b"<svg/>")
    run.describe(model="MLP")
    run.keep_state(lambda path: path.write_bytes(b"state"))
    run.close("finished")
    return folder


def everything(run: Any, export: bool = True) -> list[Callable[[], object]]:
    """All questions to a run, each as a call; the list grows while it is walked."""
    import tempfile
    from functools import partial
    from pathlib import Path

    kind, aside = type(run), Path(tempfile.gettempdir())
    questions = [partial(getattr, run, name) for name in dir(kind) if isinstance(getattr(kind, name), property)]
    questions += [partial(repr, run)]
    if export:
        questions += [run._repr_html_, partial(run.to_csv, aside / "richter-test.csv"),
                      partial(run.to_parquet, aside / "richter-test.parquet")]

    def each(names: str, ask: Any) -> None:
        for name in getattr(run, names):
            ask(name)

    def array(place: tuple[str, str, int]) -> None:
        layer, name, step = place
        for read in (run.array, run.eigenpairs, run.shape):
            questions.append(partial(read, name, layer, step))

    questions += [partial(each, "arrays", array), partial(each, "figures", lambda f: run.figure(*f)),
                  partial(each, "scalar_names", run.scalars), lambda: run.scalar_curves(run.scalar_names),
                  lambda: run.curves(run.measures, run.layers),
                  lambda: [run.series(m, k) for m in run.measures for k in run.layers if run.has(m, k)]]
    return questions


def attempted(work: Callable[[], Any]) -> tuple[Any, str]:
    """What it returns, or None and the sentence in which it was refused."""
    try:
        return work(), ""
    except StoreError as why:
        return None, str(why)


def survived(folder: Path, export: bool = True) -> set[str]:
    """Every question is answered, or refused in the library's own words, which are returned."""
    refusals = set()
    try:
        run = runs.load(folder)
    except StoreError as why:
        return {str(why)}
    with contextlib.closing(run):
        for ask in everything(run, export):
            try:
                ask()
            except (StoreError, SelectionError) as why:
                refusals.add(str(why))
    return refusals


def same(a: Any, b: Any) -> bool:
    """Equal, NaN to NaN."""
    return bool(np.array_equal(np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64), equal_nan=True))


EXAMPLES = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck),
                    phases=(Phase.explicit, Phase.reuse, Phase.generate))  # files are slow to shrink


@contextlib.contextmanager
def somewhere() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def check_table(table: list[Any], expected: dict[Any, Any]) -> None:
    """Of rows as they are shown, by step, layer and name: value, error, note, and the word of the mark ("exact" if left out)."""
    assert {row[:3] for row in table} == set(expected)
    assert len(table) == len(expected)
    for step, layer, name, value, error, note, mark in table:
        wanted = expected[step, layer, name]
        assert same([value, error], wanted[:2])
        assert [note, mark] == [*wanted[2:], "exact"][:2]


def leave_behind(folder: str, journal: str) -> None:
    """Be killed with a write-ahead log beside the file, or in the middle of a write with a journal."""
    import os
    import signal

    from richter import runs
    from richter.core import Row
    run = runs.create(folder)
    if journal == "journal":
        run.run.close()
        run._database.anchor.close()
        assert run._database.connection.execute("PRAGMA journal_mode=DELETE").fetchone() == ("delete",)
        run._database.place._files.popitem()  # there is no log now
    for step in range(3):
        run.rows([Row(step, str(i), "m", step) for i in range(50)])
    if journal == "journal":
        run._database.connection.execute("PRAGMA cache_size=5")
        run._database.connection.execute("BEGIN IMMEDIATE")
        run._database.connection.execute("UPDATE recent SET data = x'00'")
        run._database.connection.executemany("INSERT INTO notes (text, sum) VALUES (?, 0)", [(str(i) * 500,) for i in range(500)])
    os.kill(os.getpid(), signal.SIGKILL)
