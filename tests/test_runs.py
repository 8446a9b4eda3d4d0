"""Runs on disk: what was written comes back, a kill at any moment loses nothing that returned, strangers' files are data.

Like those of bad input, these tests use the library without the shape checker of the others: a wrong type must reach the
library's own checks. Functions that take their imports with them run in processes of their own, by `child`.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import enum
import fcntl
import gc
import importlib
import inspect
import itertools
import math
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp


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


core, snapshot, runs, arrays, fmt, lock, reader, writing, proving = _unchecked(
    "core", "instrument.snapshot", "runs", "runs.arrays", "runs.format", "runs.lock", "runs.reader", "runs.writer", "runs.provenance")
Row, SelectionError, StoreError, Snapshot = core.Row, core.SelectionError, core.StoreError, snapshot.Snapshot
NAN, INF = math.nan, math.inf
DATA = Path(__file__).parent / "data"


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a look at git for each of a thousand runs."""
    monkeypatch.setattr(proving, "revision", lambda: None)


def child(work: Callable[..., object], *values: Any, needs: tuple[Callable[..., object], ...] = ()) -> subprocess.Popen[bytes]:
    """A function of this file in a process of its own, together with those that it calls."""
    code = "\n".join(["from __future__ import annotations", *map(inspect.getsource, (*needs, work)),
                      f"{work.__name__}(*{values!r})"])
    return subprocess.Popen([sys.executable, "-c", code], cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE)


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


def known(step: int = 0) -> Any:
    rows = (Row(step, "0", "nfc", 0.5 + step, 0.25), Row(step, "2", "nfc", NAN, NAN, "trivial: a reason"),
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
    """All that can be asked of a run, each as a call; the list grows while it is walked."""
    import tempfile
    from functools import partial
    from pathlib import Path

    kind, aside = type(run), Path(tempfile.gettempdir())
    asked = [partial(getattr, run, name) for name in dir(kind) if isinstance(getattr(kind, name), property)]
    asked += [partial(repr, run)]
    if export:
        asked += [run._repr_html_, partial(run.to_csv, aside / "richter-test.csv"),
                  partial(run.to_parquet, aside / "richter-test.parquet")]

    def each(names: str, ask: Any) -> None:
        for name in getattr(run, names):
            ask(name)

    def array(of: tuple[str, str, int]) -> None:
        layer, name, step = of
        for read in (run.array, run.eigenpairs, run.shape):
            asked.append(partial(read, name, layer, step))

    asked += [partial(each, "arrays", array), partial(each, "figures", lambda f: run.figure(*f)),
              partial(each, "names", run.scalar), lambda: run.scalar_curves(run.names),
              lambda: run.curves(run.measures, run.layers), lambda: [run.series(m, k) for m in run.measures for k in run.layers
                                                                     if run.has(m, k)]]
    return asked


def survived(folder: Path, export: bool = True) -> set[str]:
    """Every question is answered, or refused in the library's own words, which are returned."""
    said = set()
    try:
        run = runs.open(folder)
    except StoreError as why:
        return {str(why)}
    with contextlib.closing(run):
        for ask in everything(run, export):
            try:
                ask()
            except (StoreError, SelectionError) as why:
                said.add(str(why))
    return said


def same(a: Any, b: Any) -> bool:
    """Equal, NaN to NaN."""
    return bool(np.array_equal(np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64), equal_nan=True))


# ---------------------------------------------------------------------------------------------------------- round trips


NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
STEPS = st.integers(-3, 3) | st.integers(-2 ** 63, 2 ** 63 - 1)
NAMES = st.sampled_from(["", "0", "nfc", "step", "value", "a\0b", "ä\n\"'; DROP TABLE rows; --", "=1+1"]) | st.text(max_size=8)
ROWS = st.lists(st.builds(Row, STEPS, NAMES, NAMES, NUMBERS, NUMBERS, NAMES), max_size=30)
SCALARS = st.lists(st.tuples(STEPS, st.dictionaries(NAMES.filter(lambda name: name != "step"), NUMBERS, max_size=4)), max_size=8)
EXAMPLES = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck),
                    phases=(Phase.explicit, Phase.reuse, Phase.generate))  # files are slow to shrink


@contextlib.contextmanager
def somewhere() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@given(ROWS, SCALARS, st.sampled_from([1, 7, 30_000]))
@example([Row(3, "a", "m", 1.0), Row(1, "a", "m", 2.0), Row(3, "a", "m", NAN, 0.5, "again")], [(0, {"loss": NAN, "value": 1.0})],
         2)
@example([Row(3, "a", "m", 1.0), Row(3, "a", "m", 2.0)], [(0, {"loss": 1.0}), (0, {"loss": 2.0})], 30_000)
@example([Row(0, "\r", "\n", 1.0, note=",\r")], [], 1)
@EXAMPLES
def test_all_ways_to_read_agree_with_what_was_written(rows: list[Any], scalars: list[Any], recent: int) -> None:
    """Rows by series, curves, frame, snapshots, table, CSV and Parquet; moved after each write, sometimes, or at the end."""
    mine = {(r.step, r.layer, r.measure): (r.value, r.error, r.note) for r in rows}
    theirs = {(step, "", name): (v, NAN, "") for step, values in scalars for name, v in values.items()}
    with somewhere() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "RECENT", recent)
        with runs.create(folder / "run") as run:
            run.rows(rows[:len(rows) // 2])
            run.rows(iter(rows[len(rows) // 2:]))
            for step, values in scalars:
                run.scalars(step, values)
            check_reading(run.run, mine, theirs)
        check_reading(runs.open(folder / "run"), mine, theirs)
        (folder / "run" / "writer.lock").unlink()
        assert [p.name for p in (folder / "run").iterdir()] == ["run.db"]  # one file, with no log beside it


def check_reading(run: Any, mine: dict[Any, Any], theirs: dict[Any, Any]) -> None:
    frame = list(run.frame.itertuples(index=False, name=None))
    assert [f[0] for f in frame] == sorted(step for step, _, _ in mine)
    check_table(frame, mine)
    check_table([tuple(r) for s in run.snapshots for r in s.rows], mine)
    assert [s.step for s in run.snapshots] == sorted({step for step, _, _ in mine})
    table = list(run.table.itertuples(index=False, name=None))
    check_table(table[:len(frame)], mine)
    check_table(table[len(frame):], theirs)
    curves = run.curves(run.measures, run.layers)
    for layer, measure in {key[1:] for key in mine}:
        expected = sorted((step, *mine[step, k, m]) for step, k, m in mine if (k, m) == (layer, measure))
        series = run.series(measure, layer)
        assert series.step.tolist() == [e[0] for e in expected]
        assert same(series.value, [e[1] for e in expected])
        assert same(series.error, [e[2] for e in expected])
        assert all(same(a, b) for a, b in zip(curves.pop((measure, layer))[0], series, strict=True))
        later = run.series(measure, layer, after=expected[0][0])
        assert all(same(a[1:], b) for a, b in zip(series, later, strict=True))
    assert not curves
    assert set(run.names) == {name for _, _, name in theirs}
    wide = run.scalars
    assert wide["step"].tolist() == sorted({step for step, _, _ in theirs})
    for name in run.names:
        steps = sorted(step for step, _, other in theirs if other == name)
        assert run.scalar(name).step.tolist() == steps
        assert same(run.scalar(name).value, [theirs[s, "", name][0] for s in steps])
        assert same(wide.set_index("step")[name].loc[steps], run.scalar(name).value)
    assert run.last == max([step for step, _, _ in (*mine, *theirs)], default=None)
    with somewhere() as folder:
        run.to_csv(folder / "t.csv")
        with open(folder / "t.csv", newline="", encoding="utf-8") as f:
            head, *lines = csv.reader(f)
        assert head == ["step", "layer", "measure", "value", "error", "note"]
        read = [(int(s), k, m, float(v or "nan"), float(e or "nan"), note) for s, k, m, v, e, note in lines]
        check_table(read[:len(frame)], mine)
        check_table(read[len(frame):], theirs)
        run.to_parquet(folder / "t.parquet")
        pd.testing.assert_frame_equal(pd.read_parquet(folder / "t.parquet"), run.table)


def check_table(found: list[Any], expected: dict[Any, Any]) -> None:
    assert {f[:3] for f in found} == set(expected)
    assert len(found) == len(expected)
    for step, layer, name, value, error, note in found:
        wanted = expected[step, layer, name]
        assert same([value, error], wanted[:2])
        assert note == wanted[2]


DTYPES = [np.dtype(c) for c in "?bBhHiIlLqQefdgFDG"]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


@given(st.sampled_from(DTYPES).flatmap(lambda t: hnp.arrays(t, SHAPES)), st.booleans(), st.booleans())
@example(np.zeros((0, 3), dtype=np.float32), False, True)
@example(np.array(3.5), True, False)
@EXAMPLES
def test_arrays_come_back(a: np.ndarray, fortran: bool, swapped: bool) -> None:
    """Of every numeric dtype, shape and order of bytes and axes; small ones and those that do not shrink."""
    given = np.asfortranarray(a) if fortran and a.ndim else a
    given = given.astype(a.dtype.newbyteorder(">")) if swapped else given
    for e in (arrays.encode(given), arrays.Encoded("plain", *arrays.encode(given)[1:3], arrays._bytes(given))):
        back = arrays.decode(*e)
        assert (back.dtype, back.shape) == (a.dtype, a.shape)
        np.testing.assert_array_equal(back, a)
        assert back.flags.writeable


def test_arrays_of_a_run(tmp_path: Path) -> None:
    """By layer, name and step; the last step by default; a step that is written again replaces; large ones are files."""
    large = np.random.default_rng(0).normal(size=(400, 400))
    with runs.create(tmp_path / "run") as run:
        run.array("a", [1, 2, 3], layer="0", step=5)
        run.array("a", np.arange(4.0)[::2], layer="0", step=-5)
        run.array("a", [[7]], layer="0", step=5)
        run.arrays({"large": large, "zeros": np.zeros((1000, 1000))})
        assert run.run.arrays == [("0", "a", -5), ("*", "large", 0), ("*", "zeros", 0), ("0", "a", 5)]
    run = runs.open(tmp_path / "run")
    assert run.array("a", "0").tolist() == [[7]]
    assert run.array("a", "0", -5).tolist() == [0, 2]
    assert run.array("large").tobytes() == large.tobytes()
    assert not run.array("zeros").any()
    (kept,) = (tmp_path / "run" / "objects").iterdir()
    assert kept.stat().st_size > 2 ** 20
    with pytest.raises(SelectionError, match=r"no array 'a' of layer '1' at step 5. It has: a of 0 at step -5, large of \* at"):
        run.array("a", "1", 5)


@given(st.integers(1, 40), st.integers(0, 6), st.floats(0.01, 0.9999), st.sampled_from(["float32", "float64"]),
       st.integers(0, 99))
@EXAMPLES
def test_a_matrix_by_its_eigenpairs_has_its_share_of_the_trace(d: int, rank: int, share: float, dtype: str, seed: int) -> None:
    """|A - A_r|_* = tr A - tr A_r <= (1 - share) tr A, for positive semi-definite A, and no pair more than needed."""
    A = spd(d, min(rank, d), seed, dtype)
    e = arrays.encode(A, share)
    back = arrays.decode(*e)
    slack = 1e-4 if dtype == "float32" else 1e-9
    assert back.dtype == A.dtype
    lost = np.abs(np.linalg.eigvalsh(A.astype(float) - back)).sum()
    assert lost <= (1 - share + slack) * np.trace(A.astype(float))
    if e.form == "eigen":
        values, vectors = arrays.eigenpairs(*e[1:])
        assert vectors.shape == (d, len(values))
        assert len(values) <= min(rank, d)
        np.testing.assert_allclose((vectors * values) @ vectors.T, back, atol=1e-5 * (np.abs(A).max() + 1e-30))
        assert len(values) == 0 or values[:-1].sum() < (share + slack) * np.trace(A)  # one pair fewer is too few
    else:
        np.testing.assert_array_equal(back, A)


def test_eigenpairs_make_a_matrix_small(tmp_path: Path) -> None:
    A = spd(300, 3)
    with runs.create(tmp_path / "run") as run:
        run.array("by pairs", A, eigen=0.9999)
        run.array("whole", A)
    run = runs.open(tmp_path / "run")
    sizes = dict(run._ask("SELECT name, coalesce(length(bytes), 0) FROM arrays"))
    assert sizes["by pairs"] < 0.02 * A.nbytes < sizes["whole"]
    for name in ("by pairs", "whole"):
        values, vectors = run.eigenpairs(name)
        np.testing.assert_allclose((vectors * values) @ vectors.T, A, atol=1e-3)
        assert run.shape(name) == A.shape
    assert len(run.eigenpairs("by pairs")[0]) == 3


def test_snapshots_come_back(tmp_path: Path) -> None:
    """Rows, remarks, costs and matrices; one without rows too; a step that is measured again replaces."""
    with runs.create(tmp_path / "run") as run:
        run.snapshot(dataclasses.replace(known(7), seconds=99.0))
        for step in (0, 7, -1):
            run.snapshot(known(step))
        run.snapshot(Snapshot((), 8, {"*": "nothing to see"}, 0.5, 3, 1.0))
    run = runs.open(tmp_path / "run")
    assert run.steps == [-1, 0, 7, 8]
    assert [s.step for s in run.ends] == [-1, 7]  # of those that have rows
    assert run.last == 8
    written = [known(-1), known(0), known(7), Snapshot((), 8, {"*": "nothing to see"}, 0.5, 3, 1.0)]
    for found, wanted in zip(run.snapshots, written, strict=True):
        assert (found.step, found.notes, found.seconds, found.examples, found.passes) == (
            wanted.step, wanted.notes, wanted.seconds, wanted.examples, wanted.passes)
        assert str(found) == str(wanted)
        assert [(r.layer, r.measure, r.note) for r in found.rows] == [(r.layer, r.measure, r.note) for r in wanted.rows]
        assert same([(r.value, r.error) for r in found.rows], [(r.value, r.error) for r in wanted.rows])
        for (layer, name), A in wanted.arrays.items():
            np.testing.assert_allclose(run.array(name, layer, found.step), A, rtol=0, atol=1e-3 * np.trace(A))
    assert (run.measures, run.layers) == (["nfc", "cka"], ["0", "2", "*"])


@pytest.mark.parametrize(("matrix", "form"), [
    (spd(40, 40), "half"), (np.eye(40), "half-zlib"), (np.triu(np.ones((40, 40))), "zlib"), (np.eye(1), "plain"),
    (spd(40, 40, dtype="float64") + np.diag(np.full(39, 1e-12), 1), "plain"), (np.full((40, 40), 1j), "half-zlib")])
def test_of_a_symmetric_matrix_half_is_kept(matrix: np.ndarray, form: str) -> None:
    e = arrays.encode(matrix)
    assert e.form == form
    found = arrays.decode(*e)
    assert found.dtype == matrix.dtype
    np.testing.assert_array_equal(found, matrix)
    if form == "half":
        assert len(e.data) < 0.52 * matrix.nbytes


@pytest.mark.parametrize("matrix", [np.full((3, 3), NAN), np.diag([1.0, -1.0]), np.arange(6.0).reshape(2, 3),
                                    np.eye(3, dtype=int)], ids=["diverged", "indefinite", "not square", "of integers"])
def test_a_snapshot_keeps_matrices_that_have_no_eigenpairs(tmp_path: Path, matrix: np.ndarray) -> None:
    with runs.create(tmp_path / "run") as run:
        run.snapshot(dataclasses.replace(known(), arrays={("0", "agop"): matrix}))
    np.testing.assert_array_equal(runs.open(tmp_path / "run").array("agop", "0"), matrix)


HALF = np.float32(0.5)


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass(frozen=True)
class Inner:
    betas: tuple[float, ...] = (0.9, 0.99)
    where: Path = Path("a/b")


@dataclasses.dataclass(frozen=True)
class Settings:
    lr: float = 0.1
    inner: Inner = Inner()
    colour: Colour = Colour.RED
    names: frozenset[str] = frozenset({"b", "a", "c"})
    none: None = None
    nothing: float = NAN
    number: Any = HALF


def test_settings_are_kept_as_plain_data(tmp_path: Path) -> None:
    runs.create(tmp_path / "run", Settings(), seeds={"weights": np.int64(3)}).close()
    run = runs.open(tmp_path / "run")
    found = dict(run.settings)
    assert math.isnan(found.pop("nothing"))
    assert found == {"lr": 0.1, "inner": {"betas": [0.9, 0.99], "where": "a/b"}, "colour": "red", "names": ["a", "b", "c"],
                     "none": None, "number": 0.5}
    assert run.seeds == {"weights": 3}
    with runs.create(tmp_path / "run", Settings(), resume=True):  # the same, though NaN is not NaN and a set has no order
        pass
    assert len(run.sessions) == 2


def test_a_resumed_run_keeps_its_settings(tmp_path: Path) -> None:
    runs.create(tmp_path / "run", Settings(nothing=1.0)).finish()
    before = (tmp_path / "run" / "run.db").read_bytes()
    with pytest.raises(StoreError, match=r"begun with other settings: lr 0.1, not 0.2. A resumed run keeps its settings"):
        runs.create(tmp_path / "run", Settings(nothing=1.0, lr=0.2), resume=True)
    with pytest.raises(StoreError, match=r"there is already a run in .* Pass resume=True to continue it"):
        runs.create(tmp_path / "run", Settings(nothing=1.0))
    assert (tmp_path / "run" / "run.db").read_bytes() == before
    runs.create(tmp_path / "run", resume=True).close()  # without settings: those that it has


def test_claims_figures_state_and_facts(tmp_path: Path) -> None:
    run = runs.open(small(tmp_path / "run"))
    assert run.claims == {"grows": {"value": 1.5, "holds": True}}
    assert run.figures == [("curve", "svg")]
    assert run.figure("curve") == b"<svg/>"
    assert run.initial.read_bytes() == b"state"
    assert run.about == {"model": "MLP"}
    assert run.name == "run"
    with pytest.raises(SelectionError, match=r"no figure 'curve.png'. Close to it: 'curve.svg'"):
        run.figure("curve", "png")
    with pytest.raises(SelectionError, match=r"no measure 'nfs'. Close to it: 'nfc'"):
        run.series("nfs")
    with pytest.raises(SelectionError, match=r"no layer '\*' for 'nfc'. It has: '0', '2'"):
        run.series("nfc")
    with pytest.raises(SelectionError, match=r"no scalar 'lost'. Close to it: 'loss'"):
        run.scalar("lost")


def test_what_a_killed_writer_left_half_written_is_removed(tmp_path: Path) -> None:
    small(tmp_path / "run")
    kept = sorted((tmp_path / "run" / "objects").iterdir())
    for name in (".x.part", ".tmpX"):
        (tmp_path / "run" / "objects" / name).write_bytes(b"half")
    runs.open(tmp_path / "run").close()
    assert len(list((tmp_path / "run" / "objects").iterdir())) == len(kept) + 2  # not by readers
    runs.create(tmp_path / "run", resume=True).close()
    assert sorted((tmp_path / "run" / "objects").iterdir()) == kept


def test_cleared_runs_hold_nothing(tmp_path: Path) -> None:
    small(tmp_path / "run")
    with runs.create(tmp_path / "run", resume=True) as run:
        run.rows([Row(1, "new", "m", 1.0, note="said")])
        run.clear()
        assert (run.run.snapshots, run.run.arrays, run.run.names, run.run.last) == ([], [], [], None)
        run.rows([Row(2, "new", "m", 2.0, note="said")])
        check_table([tuple(r) for r in run.run.frame.itertuples(index=False)], {(2, "new", "m"): (2.0, NAN, "said")})
    assert runs.open(tmp_path / "run").settings == {"lr": 0.1, "betas": [0.9, 0.99]}


@pytest.mark.parametrize("recent", [1, 30_000])
def test_later_steps_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recent: int) -> None:
    """Moved or not, and what is written for them again is there."""
    monkeypatch.setattr(writing, "RECENT", recent)
    with runs.create(tmp_path / "run") as run:
        for step in (-2, 5, 6):
            run.snapshot(known(step))
            run.scalars(step, loss=step)
        run.forget(after=5)
        found = run.run
        assert (found.steps, found.last, found.scalar("loss").step.tolist()) == ([-2, 5], 5, [-2, 5])
        assert found.series("nfc", "0").step.tolist() == [-2, 5]
        assert {step for _, _, step in found.arrays} == {-2, 5}
        run.scalars(6, loss=1.0)
        assert found.scalar("loss").value.tolist() == [-2, 5, 1]


class Vector:
    """As a tensor of several numbers is: not to be turned into one."""

    def __float__(self) -> float:
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "no step": (lambda w: w.rows([Row(None, "0", "m", 1.0)]), "step=None: what is written to a run has a whole number"),
    "half a step": (lambda w: w.scalars(0.5, loss=1.0), "step=0.5: what is written to a run has a whole number"),
    "a huge step": (lambda w: w.rows([Row(0, "0", "m", 1.0), Row(2 ** 63, "0", "m", 1.0)]), "at most 64 bits"),
    "a huge step of an array": (lambda w: w.array("a", [1], step=-2 ** 63 - 1), "at most 64 bits"),
    "no number": (lambda w: w.rows([Row(0, "0", "m", "much")]), "'m' of layer '0' at step 0: 'much' with .* cannot be stored"),
    "None": (lambda w: w.rows([Row(0, "0", "m", None)]), "cannot be stored"),
    "an error that is none": (lambda w: w.rows([Row(0, "0", "m", 1.0, "much")]), "cannot be stored"),
    "a huge number": (lambda w: w.scalars(0, loss=10 ** 400), "cannot be stored"),
    "a vector": (lambda w: w.scalars(0, loss=Vector()), "cannot be converted to Scalar"),
    "a name of bytes": (lambda w: w.rows([Row(0, b"0", "m", 1.0)]), "b'0': names and notes of a run are text"),
    "half a character": (lambda w: w.rows([Row(0, "0", "\ud800", 1.0)]), "characters that UTF-8 has"),
    "a note of half a character": (lambda w: w.rows([Row(0, "0", "m", 1.0, note="\ud800")]), "characters that UTF-8 has"),
    "a scalar 'step'": (lambda w: w.scalars(0, {"step": 1.0}), "cannot be called 'step'"),
    "objects": (lambda w: w.array("a", [{}, None]), "arrays of numbers can be stored; this one has dtype object"),
    "text": (lambda w: w.array("a", ["b"]), "this one has dtype <U1"),
    "dates": (lambda w: w.array("a", np.array(["2020"], "M8[D]")), "arrays of numbers can be stored"),
    "ragged": (lambda w: w.array("a", [[1], [1, 2]]), "list that is no array of numbers"),
    "too large": (lambda w: w.array("a", np.broadcast_to(np.float32(0), (2 ** 16, 2 ** 16))), "too large for a run"),
    "large and then refused": (lambda w: w.arrays({"a": np.random.default_rng(0).normal(size=2 ** 18), "b": ["x"]}), "dtype <U1"),
    "a name of an array": (lambda w: w.array(3, [1]), "names and notes of a run are text"),
    "eigen of a vector": (lambda w: w.array("a", [1.0], eigen=0.9), "only a symmetric matrix has eigenpairs"),
    "eigen of any matrix": (lambda w: w.array("a", [[0.0, 1.0], [0.0, 0.0]], eigen=0.9), "is not symmetric"),
    "eigen of an indefinite one": (lambda w: w.array("a", [[1.0, 0.0], [0.0, -1.0]], eigen=0.9), "negative eigenvalues"),
    "eigen of NaN": (lambda w: w.array("a", [[NAN]], eigen=0.9), "without NaN"),
    "eigen of integers": (lambda w: w.array("a", np.eye(30, dtype=int), eigen=0.9), "real floating-point numbers"),
    "eigen of complex": (lambda w: w.array("a", np.eye(30) * 1j, eigen=0.9), "real floating-point numbers"),
    "eigen of a share of 2": (lambda w: w.array("a", np.eye(3), eigen=2.0), "above 0 and at most 1"),
    "a claim of an object": (lambda w: w.claim("a", {"b": object()}), r"record\['b'\] is a object"),
    "a note of an object": (lambda w: w.snapshot(dataclasses.replace(known(), notes={"*": object()})), "is a object"),
    "a snapshot without step": (lambda w: w.snapshot(dataclasses.replace(known(), step=None)), "step=None"),
    "a figure of a kind": (lambda w: w.figure("a", "exe", b""), "svg, pdf or png"),
    "a figure of text": (lambda w: w.figure("a", "svg", "<svg/>"), "kept as bytes"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path: Path, what: str) -> None:
    work, sentence = REFUSED[what]
    with runs.create(tmp_path / "run") as run:
        run.rows([Row(0, "0", "m", 0.5, note="kept")])
        before = list(run._database.iterdump())
        with pytest.raises(StoreError, match=sentence):
            work(run)
        assert list(run._database.iterdump()) == before
        assert not list((tmp_path / "run").glob("objects/*"))
        run.rows([Row(1, "0", "m", 1.5, note="kept")])
    check_table(list(runs.open(tmp_path / "run").frame.itertuples(index=False, name=None)),
                {(0, "0", "m"): (0.5, NAN, "kept"), (1, "0", "m"): (1.5, NAN, "kept")})


def test_names_of_a_refused_write_are_not_taken_for_known(tmp_path: Path) -> None:
    with runs.create(tmp_path / "run") as run:
        with pytest.raises(StoreError, match="cannot be stored"):
            run.rows([Row(0, "new", "m", 1.0, note="said"), Row(0, "new", "m", "much")])
        run.rows([Row(0, "other", "m", 3.0, note="else")])  # takes the numbers that were given back
        run.rows([Row(0, "new", "m", 2.0, note="said")])
        check_table(list(run.run.frame.itertuples(index=False, name=None)),
                    {(0, "other", "m"): (3.0, NAN, "else"), (0, "new", "m"): (2.0, NAN, "said")})


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    """SQLite would take a float32 for a piece of memory."""
    with runs.create(tmp_path / "run") as run:
        run.rows([Row(np.int32(3), "0", "m", np.float32(0.5), np.float16(0.25))])
        run.snapshot(dataclasses.replace(known(), seconds=np.float32(0.5), passes=np.float32(2), examples=np.int64(5)))
    run = runs.open(tmp_path / "run")
    assert [s.tolist() for s in run.series("m", "0")] == [[3], [0.5], [0.25]]
    assert (run.snapshots[0].seconds, run.snapshots[0].passes, run.snapshots[0].examples) == (0.5, 2.0, 5)


@pytest.mark.parametrize("given", [object(), {"a": [1, {"b": b"bytes"}]}, {"f": print}, {1: "a", "1": "b"}, np.zeros(3)],
                         ids=["object", "bytes", "function", "keys", "array"])
def test_settings_that_cannot_be_kept_leave_no_folder(tmp_path: Path, given: Any) -> None:
    with pytest.raises(StoreError, match="settings"):
        runs.create(tmp_path / "run", given)
    with pytest.raises(StoreError, match="seeds"):
        runs.create(tmp_path / "run", seeds={"a": given})
    assert not list(tmp_path.iterdir())


def test_a_run_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("")
    with pytest.raises(StoreError, match="is a file; a run is a folder"):
        runs.create(tmp_path / "file")
    with pytest.raises(StoreError, match="holds other files and no run"):
        runs.create(tmp_path / "taken")
    with pytest.raises(StoreError, match="could not be made"):
        runs.create(tmp_path / "file" / "below")
    with pytest.raises(StoreError):
        runs.create(tmp_path / "a\0b")
    with pytest.raises(StoreError, match=r"holds no run \(there is no run.db in it\)"):
        runs.open(tmp_path / "taken")
    with pytest.raises(StoreError, match="holds no run"):
        runs.open(tmp_path / "a\0b")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "taken"]


def test_what_no_run_can_hold_is_not_there(tmp_path: Path) -> None:
    run = runs.open(small(tmp_path / "run"))
    for ask in (lambda: run.series("\ud800", "0"), lambda: run.array("spectrum", "0", 2 ** 70),
                lambda: run.series("nfc", "0", after=2 ** 70)):
        with pytest.raises(SelectionError):
            ask()


# ------------------------------------------------------------------------------------------------------ status, sessions


def test_status_and_sessions(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = runs.create(folder)
    reading = runs.open(folder)
    assert (reading.status, run.run.status) == ("running", "running")
    run.close()
    assert reading.status == "interrupted"
    with runs.create(folder, resume=True) as run:
        assert reading.status == "running"
    assert reading.status == "finished"

    def fail(error: BaseException) -> None:
        with runs.create(folder, resume=True):
            raise error

    with pytest.raises(ZeroDivisionError):
        fail(ZeroDivisionError("by \ud800 zero"))
    assert reading.status == "failed: ZeroDivisionError: by ? zero"
    with pytest.raises(KeyboardInterrupt):
        fail(KeyboardInterrupt())
    assert reading.status == "interrupted"
    begun = [s.begun for s in reading.sessions]
    assert begun == sorted(begun)
    assert [s.how for s in reading.sessions] == [None, "finished", "failed: ZeroDivisionError: by ? zero", "interrupted"]
    assert [s.ended is None for s in reading.sessions] == [True, False, False, False]
    assert all(abs(s.begun - time.time()) < 60 for s in reading.sessions)
    said = reading.sessions[-1].provenance
    assert (said["pid"], said["versions"]["numpy"]) == (os.getpid(), np.__version__)
    assert repr(reading) == f"Run({str(folder)!r}: interrupted, 0 measurements of 0 layers)"
    runs.create(folder, resume=True).finish("failed: on purpose")
    assert reading.status == "failed: on purpose"


def test_a_closed_run_is_not_written(tmp_path: Path) -> None:
    run = runs.create(tmp_path / "run")
    run.finish()
    run.finish("failed")  # nothing happens
    with pytest.raises(StoreError, match=r"was closed; richter.runs.create\(..., resume=True\) opens it again"):
        run.scalars(0, loss=1.0)
    with pytest.raises(StoreError, match="was closed"):
        run.array("a", np.random.default_rng(0).normal(size=2 ** 18))
    assert not (tmp_path / "run" / "objects").exists()
    assert run.run.status == "finished"


def test_a_run_that_nobody_closes_is_ended_with_its_writer(tmp_path: Path) -> None:
    run = runs.create(tmp_path / "run")
    run.scalars(0, loss=1.0)
    del run
    gc.collect()
    assert runs.open(tmp_path / "run").status == "finished"
    runs.create(tmp_path / "run", resume=True).close()


def test_one_writer(tmp_path: Path) -> None:
    """In one process or two; the first goes on, and a reader that asks for the status does not stand in the way."""
    with runs.create(tmp_path / "run") as run:
        for resume in (True, False):
            with pytest.raises(StoreError, match=r"this process is already writing the run .* Close the earlier"):
                runs.create(tmp_path / "run", resume=resume)
        said = ended(child(second_writer, str(tmp_path / "run")))
        assert f"another process is writing the run {tmp_path / 'run'}. A run has one writer; choose another name" in said
        run.scalars(0, loss=1.0)
    handle = os.open(tmp_path / "run" / "writer.lock", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)  # as `held` does
    threading.Timer(0.03, os.close, [handle]).start()
    runs.create(tmp_path / "run", resume=True).close()
    assert not lock.held(tmp_path / "run" / "writer.lock")


def second_writer(folder: str) -> None:
    from richter import runs
    from richter.core import StoreError
    try:
        runs.create(folder, resume=True)
    except StoreError as why:
        print(why)


def test_a_failed_beginning_lets_the_lock_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "provenance", lambda: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            runs.create(tmp_path / "run")
    monkeypatch.undo()
    runs.create(tmp_path / "run").close()


def test_threads_write_one_run(tmp_path: Path) -> None:
    with runs.create(tmp_path / "run") as run:
        def work(k: int) -> None:
            for step in range(50):
                run.scalars(step, {f"loss {k}": step + k})

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    found = runs.open(tmp_path / "run").scalars
    assert all(same(found[f"loss {k}"], np.arange(50) + k) for k in range(4))


def forks(folder: str) -> None:
    """A child that was forked neither writes nor keeps the lock when its parent is killed."""
    import os
    import signal
    import time

    from richter import runs
    from richter.core import StoreError
    run = runs.create(folder)
    run.scalars(0, loss=1.0)
    if not os.fork():
        for wrong in (lambda: run.scalars(1, loss=2.0), lambda: run.array("a", [1])):
            try:
                wrong()
            except StoreError as why:
                os.write(1, f"{why}\n".encode())
        run.finish()
        os.write(1, b"ready\n")
        time.sleep(30)
        os._exit(0)
    time.sleep(60)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_forked_child_does_not_keep_a_run(tmp_path: Path) -> None:
    """As workers that load data do not."""
    with child(forks, str(tmp_path / "run")) as process:
        said = [process.stdout.readline().decode() for _ in range(3)]
        assert said[2] == "ready\n"
        assert all("not by one that was forked from it" in s for s in said[:2])
        assert runs.open(tmp_path / "run").status == "running"
        process.kill()
        process.wait()
        run = runs.open(tmp_path / "run")
        assert run.status == "interrupted"  # the child lives on
        assert run.scalar("loss").value.tolist() == [1.0]
        runs.create(tmp_path / "run", resume=True).close()


# ------------------------------------------------------------------------------------------------------------ torch-free


def light(folder: str) -> None:
    import sys

    from richter import runs
    from richter.core import Row
    with runs.create(folder) as run:
        run.rows([Row(0, "0", "m", 1.0)])
        run.array("a", [1.0])
        assert len(run.run.series("m", "0").step) == 1
    assert "pandas" not in sys.modules
    assert len(run.run.frame) == 1
    assert "torch" not in sys.modules


def test_runs_are_written_and_read_without_torch(tmp_path: Path) -> None:
    ended(child(light, str(tmp_path / "run")))


# --------------------------------------------------------------------------------------------------------------- crashes


def write_for_ever(folder: str, step: int) -> None:
    """Write rows, scalars, arrays and snapshots, finish and go on; say on the pipe what has returned."""
    import os

    import numpy as np

    from richter import runs
    from richter.core import Row
    from richter.instrument.snapshot import Snapshot
    from richter.runs import provenance, writer

    def said(what: str) -> None:
        os.write(1, f"{what} {step}\n".encode())

    writer.RECENT, provenance.revision = 40, lambda: None  # rows are moved often
    said("ready")
    while True:
        with runs.create(folder, resume=True) as run:
            said("begun")
            for _ in range(6):
                run.rows([Row(step, str(i), "m", step + i, 0.5, f"note {i % 3}") for i in range(7)])
                said("rows")
                run.scalars(step, loss=step / 2, other=-step)
                said("scalars")
                noise = np.random.default_rng(step).normal(size=150_000 if step % 5 == 0 else 10)
                run.arrays({"a": np.full(5, step), "b": noise}, step=step)
                said("arrays")
                run.snapshot(Snapshot((Row(step, "0", "n", step), Row(step, "1", "n", -step)), step, {"*": f"at {step}"},
                                      arrays={("0", "agop"): np.eye(9) * step}))
                said("snapshot")
                step += 1
        said("finished")


def check_crashed(folder: Path, said: dict[str, set[int]]) -> None:
    """All that was acknowledged is there and right, and of what was not, all of a call or nothing."""
    try:
        run = runs.open(folder)
    except StoreError as why:
        sentence = str(why)
    else:
        return check_written(run, said)
    assert not said.get("begun"), sentence
    assert "holds no run" in sentence or "was never begun" in sentence


def check_written(run: Any, said: dict[str, set[int]]) -> None:
    with contextlib.closing(run):
        frame = run.frame
        rows = frame[frame.measure == "m"]
        counts = rows.groupby("step").size()
        assert said.get("rows", set()) <= set(counts.index)
        assert set(counts) <= {7}
        assert (rows.value == rows.step + rows.layer.astype(int)).all()
        assert (rows.note == [f"note {int(k) % 3}" for k in rows.layer]).all()
        scalars = run.scalars
        assert said.get("scalars", set()) <= set(scalars.step)
        assert not len(scalars) or ((scalars.loss == scalars.step / 2) & (scalars.other == -scalars.step)).all()
        steps = {name: {s for _, n, s in run.arrays if n == name} for name in ("a", "b", "agop")}
        assert said.get("arrays", set()) <= steps["a"]
        assert steps["a"] == steps["b"]
        for step in steps["a"]:
            assert run.array("a", step=step).tolist() == [step] * 5
            assert same(run.array("b", step=step), np.random.default_rng(step).normal(size=150_000 if step % 5 == 0 else 10))
        measured = {s.step: s for s in run.snapshots if s.notes}
        assert said.get("snapshot", set()) <= set(measured)
        assert set(measured) == set(run.steps) == steps["agop"] == set(frame[frame.measure == "n"].step)
        for step, snap in measured.items():
            assert (snap.value("n", "0"), snap.value("n", "1"), snap.notes) == (step, -step, {"*": f"at {step}"})
            assert same(run.array("agop", "0", step), np.eye(9) * step)
        assert run.status in ("interrupted", "finished")


def kill_at_random(folder: Path, kills: int, seed: int) -> dict[str, set[int]]:
    """One run after the other, each killed several times; what has been acknowledged by any of its writers."""
    draw, told = random.Random(seed), {}
    said: dict[str, set[int]] = {}
    for k in range(kills):
        if k % 5 == 0:
            here, said = folder / str(k), {}
        first = max(max(steps, default=-1) for steps in [set(), *said.values()]) + 1
        with child(write_for_ever, str(here), first) as process:
            assert process.stdout.readline() == b"ready %d\n" % first
            time.sleep(draw.uniform(0, 0.02 if k % 5 == 0 else 0.3))  # some while the run is made
            process.send_signal(signal.SIGKILL)
            lines, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors.decode()
        for line in lines.decode().splitlines():
            what, step = line.split()
            said.setdefault(what, set()).add(int(step))
        check_crashed(here, said)
        for what, steps in said.items():
            told.setdefault(what, set()).update(steps)
        if k % 5 == 4:
            with runs.create(here, resume=True) as run:
                run.scalars(10 ** 6, loss=5e5, other=-1e6)
            check_crashed(here, {**said, "scalars": {*said.get("scalars", ()), 10 ** 6}})
            assert runs.open(here).status == "finished"
            assert not list(here.glob("objects/.*"))  # what was half written is gone
    return told


def test_a_kill_at_any_moment_loses_nothing_that_returned(tmp_path: Path) -> None:
    told = kill_at_random(tmp_path, 15, seed=0)
    assert {"begun", "rows", "scalars", "arrays", "snapshot", "finished"} <= set(told)  # it came as far as that


@pytest.mark.long
def test_many_kills_lose_nothing(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 200, seed=1)


def die_at_each_call(folder: str, begin: int, stride: int) -> None:
    """Fork a writer that kills itself at its n-th call of anything outside, for growing n until it comes to its end."""
    import os
    import shutil
    import signal
    import sys

    import numpy as np

    from richter import runs
    from richter.core import Row
    from richter.runs import provenance, writer

    writer.RECENT, provenance.revision = 20, lambda: None
    large = np.random.default_rng(0).normal(size=140_000)

    def work(pipe: int) -> None:
        with runs.create(folder, resume=True) as run:
            os.write(pipe, b"b")
            run.rows([Row(0, str(i), "m", i) for i in range(15)])
            os.write(pipe, b"r")
            run.array("a", large)
            os.write(pipe, b"a")
            run.rows([Row(1, str(i), "m", i) for i in range(15)])  # and all are moved
            os.write(pipe, b"m")
            run.rows([Row(2, str(i), "m", i) for i in range(15)])
            os.write(pipe, b"s")
        os.write(pipe, b"f")

    def dying(pipe: int, left: int) -> None:
        def count(frame, event: str, what) -> None:  # type: ignore[no-untyped-def]
            nonlocal left
            if event in ("c_call", "c_return") and f"{os.sep}runs{os.sep}" in frame.f_code.co_filename:
                left -= 1
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)
        work(pipe)
        os._exit(0)

    def check(said: bytes, n: int) -> None:
        if b"b" in said:
            run = runs.open(folder)
            found = run.frame
            counts = found.groupby("step").size().to_dict()
            assert set(counts.values()) <= {15}, (n, counts)
            assert all(step in counts for step, mark in enumerate(b"rms") if mark in said), (n, said, counts)
            assert len(found) == sum(counts.values()), n
            assert (found.value.astype(int).astype(str) == found.layer).all(), n
            assert b"a" not in said or (run.array("a") == large).all(), n
            assert run.status == ("finished" if b"f" in said else run.status), n
            run.close()
        with runs.create(folder, resume=True) as run:
            run.scalars(9, loss=1.0)
        assert run.run.status == "finished"
        assert run.run.scalar("loss").value.tolist() == [1.0]
        run.run.close()
        left = sorted(os.listdir(folder))
        assert left in (["objects", "run.db", "writer.lock"], ["run.db", "writer.lock"]), (n, left)

    n, status = begin, 1
    while status:
        read, write = os.pipe()
        if not (pid := os.fork()):
            dying(write, n)
        os.close(write)
        said = b""
        while more := os.read(read, 100):
            said += more
        os.close(read)
        status = os.waitpid(pid, 0)[1]
        assert status in (0, signal.SIGKILL), (n, status)
        check(said, n)
        shutil.rmtree(folder)
        n += stride
    assert "torch" not in sys.modules
    print(n)


def test_a_kill_at_every_thirtieth_call(tmp_path: Path) -> None:
    """While the run is made, written, moved, finished."""
    assert int(ended(child(die_at_each_call, str(tmp_path / "run"), 1, 30))) > 150


@pytest.mark.long
def test_a_kill_at_every_call(tmp_path: Path) -> None:
    ended(child(die_at_each_call, str(tmp_path / "run"), 1, 1), 600)


# ----------------------------------------------------------------------------------------------------------- concurrency


def write_many(folder: str, rows: int, own: int, pause: float) -> None:
    import time

    from richter import runs
    from richter.core import Row
    from richter.runs import writer
    writer.RECENT = 500
    with runs.create(folder) as run:
        for step in range(rows // 50):
            run.rows([Row(step, str(i), "m", own + step * 50 + i) for i in range(50)])
            run.scalars(step, loss=step)
            time.sleep(pause)


def write_together(store: Path, processes: int, rows: int, pause: float = 0.0) -> None:
    working = [child(write_many, str(store / f"run {k}"), rows, k * 10 ** 6, pause) for k in range(processes)]
    seen: dict[str, int] = {}
    between = 0
    try:
        while any(w.poll() is None for w in working):
            for run in runs.find(store):
                with contextlib.closing(run):
                    assert run.status in ("running", "finished", "interrupted")  # the last before its first session
                    frame = run.frame
                    counts = frame.groupby("step").size()
                    assert set(counts) <= {50}  # all of a call, or nothing
                    assert len(frame) >= seen.get(run.name, 0)
                    seen[run.name] = len(frame)
                    between += 0 < len(frame) < rows
                    for layer in run.layers[:3]:
                        series = run.series("m", layer)
                        assert series.step.tolist() == list(range(len(series.step)))
                    assert len(run.snapshots) >= len(counts)
                    assert len(run.scalars) <= len(run.scalar("loss").step) if run.names else True
    finally:
        for w in working:
            w.kill()
    for w in working:
        assert w.returncode == 0, w.stderr.read().decode()
        w.communicate()
    found = list(runs.find(store))
    assert [r.name for r in found] == [f"run {k}" for k in range(processes)]
    for k, run in enumerate(found):
        assert run.status == "finished"
        assert sorted(run.frame.value) == list(range(k * 10 ** 6, k * 10 ** 6 + rows))  # none lost, none doubled
        assert run.scalar("loss").value.tolist() == list(range(rows // 50))
    assert between > 3  # they were read while they were written


def test_processes_write_one_store_and_others_read(tmp_path: Path) -> None:
    write_together(tmp_path, 4, 2000, pause=0.01)


@pytest.mark.long
def test_many_processes_write_one_store_and_others_read(tmp_path: Path) -> None:
    write_together(tmp_path, 8, 50_000)


# -------------------------------------------------------------------------------------------------- full, and read-only


def run_full(folder: str) -> None:
    """Until files may not grow; then they may again."""
    import resource

    import numpy as np

    from richter import runs
    from richter.core import Row, StoreError

    def until_refused(work, what: str) -> int:  # type: ignore[no-untyped-def]
        for step in range(10_000):
            try:
                work(step)
            except StoreError as why:
                sentence = str(why)
                break
        for part in ("could not be written", what, "ritten before is intact"):
            assert part in sentence, sentence
        return step

    run = runs.create(folder)
    run.scalars(0, loss=1.0)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, most))
    written = until_refused(lambda step: run.rows([Row(step, str(i), "m", step + i) for i in range(200)]), "full")
    assert written > 5
    noise = np.random.default_rng(0).normal(size=200_000)
    assert until_refused(lambda step: run.array("large", noise, step=step), "full") == 0
    assert until_refused(lambda step: run.keep_state(lambda path: path.write_bytes(bytes(700_000))), "room") == 0
    assert len(run.run.frame) == 200 * written
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    for step in range(written, written + 5):
        run.rows([Row(step, str(i), "m", step + i) for i in range(200)])
    run.array("large", noise)
    run.finish()
    found = runs.open(folder)
    assert found.status == "finished"
    assert len(found.frame) == 200 * (written + 5)
    assert (found.frame.value == found.frame.step + found.frame.layer.astype(int)).all()
    assert found.arrays == [("*", "large", 0)]
    assert found.initial is None


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    ended(child(run_full, str(tmp_path / "run")))
    assert not list((tmp_path / "run" / "objects").glob(".*"))


def test_a_database_that_may_not_grow(tmp_path: Path) -> None:
    run = runs.create(tmp_path / "run")
    run.rows([Row(0, "0", "m", 1.0)])
    (pages,) = run._database.execute("PRAGMA page_count").fetchone()
    run._database.execute(f"PRAGMA max_page_count={pages + 3}")
    with pytest.raises(StoreError, match=r"could not be written: database or disk is full. The disk is full. Free some space and "
                                         r"continue with resume=True; what was written before is intact."):
        run.rows([Row(1, str(i), "m", i, note="x" * 99) for i in range(1000)])
    assert run.run.frame.value.tolist() == [1.0]
    run._database.execute("PRAGMA max_page_count=1000000")
    run.rows([Row(1, str(i), "m", i, note="later") for i in range(1000)])
    run.finish()
    assert len(runs.open(tmp_path / "run").frame) == 1001


def test_a_move_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "RECENT", 10)
    run = runs.create(tmp_path / "run")
    run.rows([Row(0, str(i), "m", i) for i in range(9)])
    with monkeypatch.context() as patch:
        patch.setattr(writing.Writer, "_put_arrays", lambda *_: 1 / 0)  # after the rows are moved
        with pytest.raises(ZeroDivisionError):
            run.snapshot(known(1))
    assert len(run.run.frame) == 9
    run.rows([Row(1, "0", "m", 1)])
    assert run.run._ask("SELECT count(*) FROM recent") == [(0,)]
    run.close()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes, where one may be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = shutil.which("mount") and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "richter", str(place)],
                                                       capture_output=True, check=False).returncode == 0
    if not mounted:
        pytest.skip("no file system may be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk(tiny_disk: Path) -> None:
    run, written = runs.create(tiny_disk / "run"), 0
    noise = np.random.default_rng(0).normal(size=200_000)
    (tiny_disk / "ballast").write_bytes(bytes(900_000))

    def fill() -> None:
        nonlocal written
        while written < 10_000:
            run.rows([Row(written, str(i), "m", written + i) for i in range(100)])
            written += 1

    with pytest.raises(StoreError, match="full"):
        fill()
    assert written > 5
    with pytest.raises(StoreError, match=r"could not be written: .*(full|No space)"):
        run.array("noise", noise)
    with pytest.raises(StoreError, match=r"could not be (made|written|opened for writing|begun): .*(full|No space)"):
        runs.create(tiny_disk / "other").array("noise", noise)
    assert len(run.run.frame) == 100 * written
    (tiny_disk / "ballast").unlink()
    run.rows([Row(written, str(i), "m", written + i) for i in range(100)])
    run.finish()
    found = runs.open(tiny_disk / "run")
    assert len(found.frame) == 100 * (written + 1)
    assert found.status == "finished"
    assert not list(tiny_disk.glob("run/objects/.*"))


def read_only(folder: str) -> None:
    """As a user to whom the folder does not belong."""
    import os

    import pandas  # noqa: F401  what is loaded later may lie where this user may not look

    from richter import runs
    from richter.core import StoreError
    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    for name in sorted(os.listdir(folder)):
        run = runs.open(os.path.join(folder, name))
        print(name, run.status, run.series("m", "0").value.tolist(), len(run.frame))
        run.close()
    print(len(list(runs.find(folder))))
    for wrong in (os.path.join(folder, name), os.path.join(folder, "new")):
        try:
            runs.create(wrong, resume=True)
        except StoreError as why:
            print(why)


def leave_behind(folder: str, journal: str) -> None:
    """Be killed with a write-ahead log beside the file, or in the middle of a write with a journal."""
    import os
    import signal

    from richter import runs
    from richter.core import Row
    run = runs.create(folder)
    if journal == "journal":
        run.run.close()
        assert run._database.execute("PRAGMA journal_mode=DELETE").fetchone() == ("delete",)
    for step in range(3):
        run.rows([Row(step, str(i), "m", step) for i in range(50)])
    if journal == "journal":
        run._database.execute("PRAGMA cache_size=5")
        run._database.execute("BEGIN IMMEDIATE")
        run._database.execute("UPDATE recent SET value = -1")
        run._database.executemany("INSERT INTO notes (text) VALUES (?)", [(str(i) * 500,) for i in range(500)])
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder that another user may enter."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    yield place
    for folder in place.glob("**"):
        folder.chmod(0o755)
    shutil.rmtree(place)


def test_a_folder_that_is_read_only(open_to_all: Path) -> None:
    """Reading works, with a log or the journal of a half write left behind too, with and without its index."""
    store = open_to_all / "store"
    for name in ("journal", "log", "log and index"):
        with child(leave_behind, str(store / name), name) as process:
            assert process.wait() == -signal.SIGKILL
    (store / "log" / "run.db-shm").unlink()
    assert (store / "journal" / "run.db-journal").stat().st_size > 1000
    assert (store / "log" / "run.db-wal").stat().st_size > 1000
    with runs.create(store / "whole") as run:
        run.rows([Row(0, str(i), "m", 0.0) for i in range(5)])
    for path in [*store.glob("*/*"), *store.glob("*"), store]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {p: p.read_bytes() for p in store.glob("*/*")}
    *said, refused, new = ended(child(read_only, str(store))).splitlines()
    assert said == ["journal interrupted [0.0, 1.0, 2.0] 150", "log interrupted [0.0, 1.0, 2.0] 150",
                    "log and index interrupted [0.0, 1.0, 2.0] 150", "whole finished [0.0] 5", "4"]
    assert {p: p.read_bytes() for p in store.glob("*/*")} == before
    for sentence in (refused, new):
        assert "could not be made: Permission denied. Choose a place with room that can be written" in sentence


def test_a_run_that_may_not_be_read_is_left_out(open_to_all: Path) -> None:
    store = open_to_all / "store"
    for name in ("a", "b", "c"):
        with runs.create(store / name / "run") as run:
            run.rows([Row(0, "0", "m", 0.0)])
    (store / "b" / "run").chmod(0o000)
    (store / "c" / "run" / "run.db").chmod(0o000)
    said = ended(child(find_as_nobody, str(store)))
    assert said == "['a']\nStoreError\nStoreError\n"


def find_as_nobody(store: str) -> None:
    import os

    from richter import runs
    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    print([r.path.parent.name for r in runs.find(store)])
    for name in ("b", "c"):
        try:
            runs.open(os.path.join(store, name, "run"))
        except Exception as why:
            print(type(why).__name__)


# ------------------------------------------------------------------------------------------------------ strangers' files


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small(tmp_path_factory.mktemp("stored") / "run")


@pytest.fixture
def copy(stored: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / "run"))


def test_a_whole_run_answers_everything(copy: Path) -> None:
    """So that what follows is due to what was harmed."""
    assert all("only a symmetric matrix has eigenpairs" in s for s in survived(copy))
    assert len(everything(runs.open(copy))) > 25
    forms = {form for (form,) in runs.open(copy)._ask("SELECT form FROM arrays")}
    assert forms == {"plain", "zlib", "eigen", "half", "half-zlib"}


FOREIGN = {
    "a trigger": ("CREATE TRIGGER t AFTER INSERT ON recent BEGIN DELETE FROM rows; END",),
    "a view": ("CREATE VIEW v AS SELECT * FROM rows",),
    "a view in place of a table": ("DROP TABLE claims", "CREATE VIEW claims AS SELECT 'a' AS name, random() AS record"),
    "another table": ("CREATE TABLE more (a)",),
    "a table too few": ("DROP TABLE figures",),
    "another column": ("ALTER TABLE rows ADD COLUMN more TEXT",),
    "a computed column": ("DROP TABLE claims", "CREATE TABLE claims (name TEXT PRIMARY KEY, record TEXT AS (zeroblob(9)))"),
    "an index": ("CREATE INDEX i ON recent (abs(step))",),
    "a virtual table": ("DROP TABLE claims", "CREATE VIRTUAL TABLE claims USING fts5(name, record)"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_database_with_more_than_we_write_is_not_read(copy: Path, what: str) -> None:
    try:
        say(copy / "run.db", *FOREIGN[what])
    except sqlite3.OperationalError as why:
        pytest.skip(str(why))
    before = (copy / "run.db").read_bytes()
    for ask in (lambda: runs.open(copy), lambda: runs.create(copy, resume=True), lambda: runs.create(copy)):
        with pytest.raises(StoreError, match="other tables, views or triggers than Richter writes"):
            ask()
    assert (copy / "run.db").read_bytes() == before
    assert list(runs.find(copy.parent)) == []


@pytest.mark.parametrize(("pragma", "sentence"), [
    ("application_id=7", "is a database, but not one of Richter's. Nothing in it was read or changed"),
    ("user_version=2", "has format 2, and this version of Richter knows formats up to 1. Update Richter"),
    ("user_version=0", "says it has format 0, which never existed: it is damaged"),
    ("user_version=-2147483648", "which never existed")])
def test_a_database_that_is_not_of_a_known_format(copy: Path, pragma: str, sentence: str) -> None:
    say(copy / "run.db", f"PRAGMA {pragma}")
    before = (copy / "run.db").read_bytes()
    for ask in (lambda: runs.open(copy), lambda: runs.create(copy, resume=True), lambda: runs.create(copy),
                lambda: fmt.writable(copy)):
        with pytest.raises(StoreError, match=sentence):
            ask()
    assert (copy / "run.db").read_bytes() == before
    assert sorted(p.name for p in copy.iterdir()) == ["objects", "run.db", "writer.lock"]


@pytest.mark.parametrize("content", [b"", b"no database" * 99, b"SQLite format 3\0" + bytes(4080), bytes(8192)])
def test_a_file_that_is_no_database(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.db").write_bytes(content)
    with pytest.raises(StoreError, match=r"The file is not a database|was never begun|could not be read"):
        runs.open(tmp_path / "run")
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
    for ask in (lambda: runs.open(copy), lambda: runs.create(copy, resume=True)):
        with pytest.raises(StoreError, match="damaged"):
            ask()
    assert (copy / "run.db").read_bytes() == harmed


def columns() -> list[tuple[str, str]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.executescript(fmt.SCHEMA)
        tables = [t for (t,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return [(t, c[1]) for t in tables for c in db.execute(f"PRAGMA table_info({t})") if c[1] != "id"]  # always a number


ODD = ["'no number'", "x'ff00'", "9e999", "-9223372036854775808", "NULL", "'[1, 2]'", f"'{'[' * 5000}'",
       "cast(x'fffe00' AS TEXT)"]


@pytest.mark.parametrize(("table", "column"), columns())
def test_columns_that_hold_what_they_should_not(copy: Path, table: str, column: str) -> None:
    """Text for numbers, bytes for text, broken and unexpected JSON, numbers that are no places, in every column."""
    say(copy / "run.db", "INSERT INTO recent VALUES (NULL, 1, 0, 0.5, 0.5, 1)")
    whole, odd = (copy / "run.db").read_bytes(), 0
    for value in ODD:
        (copy / "run.db").write_bytes(whole)
        with contextlib.suppress(sqlite3.IntegrityError):  # a number of SQLite's own is always a number
            say(copy / "run.db", f"UPDATE OR IGNORE {table} SET {column} = {value}")
        odd += bool({s for s in survived(copy, export=False) if "only a symmetric matrix" not in s})
    assert odd or column in ("note", "kind", "series", "key", "at") or (table, column) == ("snapshots", "step")


@pytest.mark.parametrize(("harm", "sentence"), [
    ("UPDATE rows SET value = 'much' WHERE series = 1", "damaged"),
    ("UPDATE series SET name = x'ff' WHERE id = 1", "holds bytes where something else belongs"),
    ("UPDATE meta SET value = '[1'", "a record of this run is damaged"),
    ("UPDATE sessions SET provenance = '[1]'", "it is a list"),
    ("UPDATE snapshots SET notes = '\"a\"'", "it is a str"),
    ("UPDATE claims SET record = '7'", "it is a int"),
    ("UPDATE figures SET bytes = 99999999999", "holds int where something else belongs"),
    ("UPDATE arrays SET shape = '[1e999]'", "its shape is"),
    ("UPDATE arrays SET shape = '[-1, -7]'", "nothing that Richter writes"),
    ("UPDATE arrays SET shape = '[9999999999999, 99999999999999999999]'", "nothing that Richter writes"),
    ("UPDATE arrays SET shape = '[0, 9223372036854775807, 2]'", "nothing that Richter writes"),
    ("UPDATE arrays SET shape = '[]'", "damaged"),
    ("UPDATE arrays SET shape = '[3000, 3000]' WHERE form = 'eigen'", "damaged"),
    ("UPDATE arrays SET dtype = '|O'", "nothing that Richter writes"),
    ("UPDATE arrays SET dtype = '<f8,<f8'", "nothing that Richter writes"),
    ("UPDATE arrays SET dtype = '|V8'", "nothing that Richter writes"),
    ("UPDATE arrays SET dtype = '<f1'", "nothing that Richter writes"),
    ("UPDATE arrays SET dtype = '<i4' WHERE form = 'eigen'", "nothing that Richter writes"),
    ("UPDATE arrays SET dtype = '(2,'", "nothing that Richter writes"),
    ("UPDATE arrays SET form = 'pickle'", "'pickle' is nothing that Richter writes"),
    ("UPDATE arrays SET form = 'eigen' WHERE form = 'plain'", "nothing that Richter writes"),
    ("UPDATE arrays SET bytes = substr(bytes, 1, length(bytes) - 5)", "end too early"),
    ("UPDATE arrays SET bytes = x'00'", "damaged"),
    ("UPDATE arrays SET bytes = NULL", "has no bytes"),
    ("UPDATE arrays SET object = '../../x'", "is not the name of a stored object"),
    ("UPDATE arrays SET object = '/etc/passwd'", "is not the name of a stored object"),
    (f"UPDATE arrays SET object = '{'0' * 64}'", "is missing from"),
    (f"UPDATE meta SET value = '\"{'../' * 20}{'a' * 64}\"' WHERE key = 'initial'", "is not the name of a stored object"),
])
def test_damage_is_named(copy: Path, harm: str, sentence: str) -> None:
    say(copy / "run.db", harm)
    assert any(sentence in s for s in survived(copy)), survived(copy)


def test_arrays_that_say_they_are_larger_than_they_are(copy: Path) -> None:
    """A few bytes that become a gigabyte are read up to what was announced, and no gigabyte is announced by a few bytes."""
    import zlib
    bomb = zlib.compress(bytes(2 ** 26), 1)
    with contextlib.closing(sqlite3.connect(copy / "run.db", isolation_level=None)) as db:
        db.execute("UPDATE arrays SET form = 'zlib', shape = '[9]', dtype = '<f8', bytes = ?, object = NULL", (bomb,))
    run = runs.open(copy)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(StoreError, match="more than its shape says"):
        run.array("spectrum", "0")
    for form in ("eigen", "half", "zlib"):
        say(copy / "run.db", f"UPDATE arrays SET form = '{form}', shape = '[100000, 100000]'")
        with pytest.raises(StoreError, match="nothing that Richter writes"):
            run.array("spectrum", "0")
    say(copy / "run.db", "UPDATE arrays SET form = 'half', shape = '[20000, 20000]', bytes = x'00'")
    with pytest.raises(StoreError, match="damaged: 1 bytes for shape"):
        run.array("spectrum", "0")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 ** 15  # KiB


def test_pages_that_lead_to_each_other_do_not_keep_a_reader_busy(tmp_path: Path) -> None:
    """A tree of four levels, each page of which has the same page below it many times: 10^9 rows in a small file."""
    with runs.create(tmp_path / "run") as run:
        run.rows([Row(step, "0", "m", 0.5) for step in range(8_000)])
        run.close()
    db = tmp_path / "run" / "run.db"
    with contextlib.closing(sqlite3.connect(db)) as connection:
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'recent'").fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    data = bytearray(db.read_bytes())
    page = data[(root - 1) * size:root * size]
    assert page[0] == 5  # with pages below
    cells = [int.from_bytes(page[12 + 2 * i:14 + 2 * i], "big") for i in range(int.from_bytes(page[3:5], "big"))]
    below = [int.from_bytes(page[c:c + 4], "big") for c in cells]
    chain = [root, *below[:3], below[3]]
    for here, there in itertools.pairwise(chain):
        for place in (8, *cells):
            page[place:place + 4] = there.to_bytes(4, "big")
        data[(here - 1) * size:here * size] = page
    db.write_bytes(data)
    start = time.monotonic()
    run = runs.open(tmp_path / "run")
    with pytest.raises(StoreError, match="asks for more work than a file of its size can"):
        run.series("m", "0")
    with pytest.raises(StoreError, match="more work"):
        run.frame  # noqa: B018
    assert time.monotonic() - start < 20


def test_objects_stay_what_and_where_they_are(copy: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    run = runs.open(copy)
    noise = run.array("noise")
    (name,) = run._ask("SELECT object FROM arrays WHERE name = 'noise'")[0]
    kept = copy / "objects" / f"{name}.safetensors"
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-1] + b"\0")
    with pytest.raises(StoreError, match="has other content than was written"):
        run.array("noise")
    kept.write_bytes(b"not a tensor")
    say(copy / "run.db", f"UPDATE arrays SET object = '{digest(kept)}' WHERE name = 'noise'")
    kept = kept.rename(copy / "objects" / f"{digest(kept)}.safetensors")
    with pytest.raises(StoreError, match="cannot be read"):
        run.array("noise")
    say(copy / "run.db", f"UPDATE arrays SET object = '{name}' WHERE name = 'noise'")
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
            runs.open(copy)
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
    for ask in (lambda: runs.open(tmp_path / "run"), lambda: runs.create(tmp_path / "run", resume=True)):
        with pytest.raises(StoreError, match="names another file, which SQLite would delete"):
            ask()
    assert victim.exists()
    assert list(runs.find(tmp_path)) == []
    journal.write_bytes(journal.read_bytes()[:-1])
    assert len(runs.open(tmp_path / "run").frame) == 150
    assert victim.exists()


def test_a_named_pipe_as_lock_does_not_hang(copy: Path) -> None:
    (copy / "writer.lock").unlink()
    os.mkfifo(copy / "writer.lock")
    done = threading.Thread(target=lambda: runs.open(copy).status, daemon=True)
    done.start()
    done.join(10)
    assert not done.is_alive()


def test_names_lead_nowhere_else(tmp_path: Path) -> None:
    store = tmp_path / "store"
    (store / "sweep" / "run").mkdir(parents=True)
    (tmp_path / "storeroom").mkdir()
    (store / "out").symlink_to(tmp_path / "storeroom")
    (store / "loop").symlink_to(store / "loop")
    (store / "in").symlink_to(store / "sweep")
    assert runs.inside(store, "sweep/run") == store / "sweep" / "run"
    assert runs.inside(store, "sweep/../sweep") == store / "sweep"
    assert runs.inside(store, "in/run") == store / "sweep" / "run"
    assert runs.inside(store, "not yet") == store / "not yet"
    assert runs.inside(store, "") == store
    assert runs.inside(store, str(store / "sweep")) == store / "sweep"
    for name in ("..", "../storeroom", "/etc/passwd", "sweep/../../x", "out", "out/x", "a\0b", "\ud800/../../.."):
        with pytest.raises(StoreError):
            runs.inside(store, name)
    for name in ("x" * 5000, "loop/a"):  # some systems say no at once, all before anything is read
        with pytest.raises(StoreError):
            runs.open(runs.inside(store, name))


def test_found_runs(tmp_path: Path) -> None:
    """By name, down to a depth, without links and without what cannot be read."""
    for name in ("b", "a", "sweep/1", "sweep/2", "x/y/z/deep"):
        runs.create(tmp_path / name).close()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.db").write_bytes(b"no")
    assert [r.name for r in runs.find(tmp_path)] == ["a", "b", "1", "2"]
    assert [r.name for r in runs.find(tmp_path, depth=1)] == ["a", "b"]
    assert [r.name for r in runs.find(tmp_path, depth=9)] == ["a", "b", "1", "2", "deep"]
    assert [r.name for r in runs.find(tmp_path / "a")] == ["a"]
    assert list(runs.find(tmp_path / "nothing")) == []


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
    for ask in everything(runs.open(place)):  # loads what is loaded once
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
        start = time.monotonic()
        try:
            run = runs.open(place)
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
        assert time.monotonic() - start < 20, (seed, k)
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


# ---------------------------------------------------------------------------------------------------------------- format


def frozen(folder: Path) -> None:
    """How tests/data/run_format_1 was written (without the provenance of its writer); for a new format, into a new folder."""
    with runs.create(folder, {"lr": 0.1, "layers": [3, 4]}, seeds={"weights": 7}) as run:
        for step in range(0, 50, 10):
            run.rows([Row(step, "0", "nfc", step / 8, 0.5, "trivial" if step == 0 else "")])
            run.scalars(step, loss=1 / (1 + step))
        run._settle(run._database)
        run.snapshot(Snapshot((Row(50, "0", "nfc", 6.25, 0.5), Row(50, "*", "cka", NAN, NAN, "no number")), 50, {"*": "a remark"},
                              1.5, 12, 4.0, {("0", "agop"): np.ones((40, 40), dtype=np.float32)}))
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
    np.testing.assert_allclose(run.array("agop", "0"), np.ones((40, 40)), atol=1e-5)
    assert run.array("agop", "0").dtype == np.float32
    assert run.array("spectrum", "0").tolist() == [0, 1, 2, 3, 4]
    assert run.array("zeros").tobytes() == bytes(1000)
    assert run.claims == {"grows": {"value": 1.5, "holds": True}}
    assert run.figure("curve") == b"<svg/>"
    assert run.about == {"model": "MLP"}


def test_format_1_stays_readable(tmp_path: Path) -> None:
    assert [p.name for p in (DATA / "run_format_1").iterdir()] == ["run.db"]
    assert (DATA / "run_format_1" / "run.db").stat().st_size <= 16 * 4096
    folder = Path(shutil.copytree(DATA / "run_format_1", tmp_path / "run"))
    check_frozen(runs.open(folder))
    assert runs.open(folder).status == "finished"
    with runs.create(folder, resume=True) as run:
        run.scalars(60, loss=0.0)
    assert runs.open(folder).last == 60


def test_the_format_is_written_down() -> None:
    """A change of the schema is a new format, with a migration and a frozen run of its own."""
    import hashlib
    assert fmt.FORMAT == 1
    assert hashlib.sha256(fmt.SCHEMA.encode()).hexdigest()[:16] == "abe0512673daad89"


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a format 2, with one column more."""
    table = next(line for line in fmt.SCHEMA.splitlines() if line.startswith("CREATE TABLE sessions"))
    monkeypatch.setattr(fmt, "FORMAT", 2)
    monkeypatch.setattr(fmt, "SCHEMA", fmt.SCHEMA.replace(table, table.replace(");", ", more TEXT DEFAULT 'old');")))
    monkeypatch.setattr(fmt, "MIGRATIONS", {1: lambda db: db.execute("ALTER TABLE sessions ADD COLUMN more TEXT DEFAULT 'old'")})


def versions(folder: Path) -> tuple[int, bool]:
    with contextlib.closing(sqlite3.connect(f"file:{folder / 'run.db'}?mode=ro", uri=True)) as db:
        known = {column[1] for column in db.execute("PRAGMA table_info(sessions)")}
        return db.execute("PRAGMA user_version").fetchone()[0], "more" in known


def test_an_old_format_is_read_as_it_is_and_migrated_when_resumed(tmp_path: Path, newer: None) -> None:
    folder = Path(shutil.copytree(DATA / "run_format_1", tmp_path / "run"))
    before = (folder / "run.db").read_bytes()
    run = runs.open(folder)
    check_frozen(run)
    assert run._ask("SELECT more FROM sessions") == [("old",)]
    with pytest.raises(StoreError, match="there is already a run"):
        runs.create(folder)
    with pytest.raises(StoreError, match="other settings"):
        runs.create(folder, {"lr": 0.2}, resume=True)
    assert (folder / "run.db").read_bytes() == before
    with runs.create(folder, resume=True):
        pass
    assert versions(folder) == (2, True)
    check_frozen(runs.open(folder))
    runs.create(folder, resume=True).close()  # and again, as one of today's


def test_a_migration_is_whole_or_not_at_all(tmp_path: Path, newer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(DATA / "run_format_1", tmp_path / "run"))
    migration = fmt.MIGRATIONS[1]

    def in_file(db: sqlite3.Connection) -> bool:  # and not in the copy of a reader
        return bool(db.execute("PRAGMA database_list").fetchone()[2])

    def fails(db: sqlite3.Connection) -> None:
        migration(db)
        if in_file(db):
            raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(fmt, "MIGRATIONS", {1: fails})
    with pytest.raises(StoreError, match="The disk is full"):
        runs.create(folder, resume=True)
    assert versions(folder) == (1, False)

    def dying(db: sqlite3.Connection) -> None:
        if in_file(db):
            db.set_trace_callback(lambda said: moment in said and os.kill(os.getpid(), signal.SIGKILL))
        migration(db)

    for moment in ("ALTER", "user_version=2", "COMMIT"):  # noqa: B007
        if not (pid := os.fork()):
            fmt.MIGRATIONS[1] = dying
            runs.create(folder, resume=True)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        assert versions(folder) == (1, False)
    monkeypatch.setattr(fmt, "MIGRATIONS", {1: migration})
    runs.create(folder, resume=True).close()
    assert versions(folder) == (2, True)
    check_frozen(runs.open(folder))
