"""Writing runs: what is kept and what is refused, how a run ends, and that it has one writer."""

from __future__ import annotations

import dataclasses
import enum
import fcntl
import gc
import math
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from richter.runs.format import revision
from runs_helpers import (
    NAN,
    Mark,
    Row,
    SelectionError,
    Snapshot,
    StoreError,
    check_table,
    child,
    core,
    ended,
    known,
    lock,
    runs,
    same,
    small,
    sqlite,
    writing,
)

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
    run = runs.load(tmp_path / "run")
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
    with pytest.warns(core.RichterWarning, match=r"there is already a run in .*: this one is written to .*run-2"):
        runs.create(tmp_path / "run", Settings(nothing=1.0)).finish()
    assert (tmp_path / "run" / "run.db").read_bytes() == before
    runs.create(tmp_path / "run", resume=True).close()  # without settings: those that it has


def test_claims_figures_state_and_facts(tmp_path: Path) -> None:
    run = runs.load(small(tmp_path / "run"))
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
        run.scalars("lost")


def test_cards_of_measures_come_back(tmp_path: Path) -> None:
    """Whole, of every measure, also when more is said about the run later."""
    cards = {"nfc": core.Card("Neural feature correlation", "How <close> W is to ...", "", "up", core.Interval(0.0, 1.0), "nfa"),
             "gap": core.Card("gap", rich="down", typical=core.Interval(low=0.5))}
    with runs.create(tmp_path / "run") as run:
        run.describe(model="MLP", cards={name: card.to_json() for name, card in cards.items()})
        run.describe(model="GPT")
    about = runs.load(tmp_path / "run").about
    assert about["model"] == "GPT"
    assert {name: core.Card.from_json(card) for name, card in about["cards"].items()} == cards


def test_of_what_snapshots_hand_on_the_last_is_kept(tmp_path: Path) -> None:
    """Objects are named by their content: what is handed on unchanged, or is the initial state too, is not dropped."""
    def hand_on(content: bytes, key: str = "previous") -> list[bytes]:
        run.keep_state(lambda path: path.write_bytes(content), key)
        return sorted(path.read_bytes() for path in (tmp_path / "run" / "objects").iterdir())

    with runs.create(tmp_path / "run") as run:
        assert hand_on(b"first", "initial") == [b"first"]
        assert hand_on(b"first") == [b"first"]
        assert hand_on(b"second") == [b"first", b"second"]
        assert hand_on(b"second") == [b"first", b"second"]
        assert hand_on(b"third") == [b"first", b"third"]
    finished = runs.load(tmp_path / "run")
    assert (finished.initial.read_bytes(), finished.state("previous").read_bytes()) == (b"first", b"third")


@pytest.mark.parametrize("mark", list(Mark))
def test_marks_come_back(tmp_path: Path, mark: Any) -> None:
    """By whatever way a row is written and read; the word is that of the enumeration."""
    row = Row(0, "0", "m", 1.0, 0.5, "because", mark)
    assert tuple(row) == (0, "0", "m", 1.0, 0.5, "because", mark.value)
    with runs.create(tmp_path / "run") as run:
        run.rows([dataclasses.replace(row, step=1, mark=mark.value)])
        run.snapshot(Snapshot((row,), 0))
        for settled in (False, True):
            if settled:
                with run._transaction("written"):
                    run._database.settle()
            assert run.run.frame.mark.tolist() == [mark.value] * 2
            assert [s.rows[0].mark for s in run.run.snapshots] == [mark] * 2
            assert run.run.curves(["m"], ["0"])["m", "0"][1] == (mark, "because")
        run.rows([Row(1, "0", "m", 2.0)])  # written again, without
    assert runs.load(tmp_path / "run").frame.mark.tolist() == [mark.value, "exact"]


def test_what_a_killed_writer_left_half_written_is_removed(tmp_path: Path) -> None:
    small(tmp_path / "run")
    kept = sorted((tmp_path / "run" / "objects").iterdir())
    for name in (".x.part", ".tmpX"):
        (tmp_path / "run" / "objects" / name).write_bytes(b"half")
    runs.load(tmp_path / "run").close()
    assert len(list((tmp_path / "run" / "objects").iterdir())) == len(kept) + 2  # not by readers
    runs.create(tmp_path / "run", resume=True).close()
    assert sorted((tmp_path / "run" / "objects").iterdir()) == kept


def test_cleared_runs_hold_nothing(tmp_path: Path) -> None:
    small(tmp_path / "run")
    with runs.create(tmp_path / "run", resume=True) as run:
        run.rows([Row(1, "new", "m", 1.0, note="said")])
        run.clear()
        assert (run.run.snapshots, run.run.arrays, run.run.scalar_names, run.run.last) == ([], [], [], None)
        run.rows([Row(2, "new", "m", 2.0, note="said")])
        check_table([tuple(r) for r in run.run.frame.itertuples(index=False)], {(2, "new", "m"): (2.0, NAN, "said")})
    assert runs.load(tmp_path / "run").settings == {"lr": 0.1, "betas": [0.9, 0.99]}


@pytest.mark.parametrize("recent", [1, 30_000])
def test_later_steps_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recent: int) -> None:
    """Moved or not, and what is written for them again is there."""
    monkeypatch.setattr(sqlite, "RECENT", recent)
    with runs.create(tmp_path / "run") as run:
        for step in (-2, 5, 6):
            run.snapshot(known(step))
            run.scalars(step, loss=step)
        run.forget(after=5)
        found = run.run
        assert (found.steps, found.last, found.scalars("loss").step.tolist()) == ([-2, 5], 5, [-2, 5])
        assert found.series("nfc", "0").step.tolist() == [-2, 5]
        assert {step for _, _, step in found.arrays} == {-2, 5}
        run.scalars(6, loss=1.0)
        assert found.scalars("loss").value.tolist() == [-2, 5, 1]


class Vector:
    """As a tensor of several numbers is: not to be turned into one."""

    def __float__(self) -> float:
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "no step": (lambda w: w.rows([Row(None, "0", "m", 1.0)]),
                "step=None: the step of everything written to a run must be a whole number"),
    "half a step": (lambda w: w.scalars(0.5, loss=1.0),
                    "step=0.5: the step of everything written to a run must be a whole number"),
    "a huge step": (lambda w: w.rows([Row(0, "0", "m", 1.0), Row(2 ** 63, "0", "m", 1.0)]), "at most 64 bits"),
    "a huge step of an array": (lambda w: w.array("a", [1], step=-2 ** 63 - 1), "at most 64 bits"),
    "no number": (lambda w: w.rows([Row(0, "0", "m", "much")]), "'m' of layer '0' at step 0: 'much' with .* cannot be stored"),
    "None": (lambda w: w.rows([Row(0, "0", "m", None)]), "cannot be stored"),
    "an error that is none": (lambda w: w.rows([Row(0, "0", "m", 1.0, "much")]), "cannot be stored"),
    "a huge number": (lambda w: w.scalars(0, loss=10 ** 400), "cannot be stored"),
    "a vector": (lambda w: w.scalars(0, loss=Vector()), "cannot be converted to Scalar"),
    "a name of bytes": (lambda w: w.rows([Row(0, b"0", "m", 1.0)]), "b'0': names and notes of a run must be text"),
    "half a character": (lambda w: w.rows([Row(0, "0", "\ud800", 1.0)]), "valid UTF-8 characters"),
    "a note of half a character": (lambda w: w.rows([Row(0, "0", "m", 1.0, note="\ud800")]), "valid UTF-8 characters"),
    "a mark that is none": (lambda w: w.rows([Row(0, "0", "m", 1.0, mark="sure")]), "'sure' is not a valid Mark"),
    "a scalar 'step'": (lambda w: w.scalars(0, {"step": 1.0}), "cannot be called 'step'"),
    "objects": (lambda w: w.array("a", [{}, None]), "arrays of numbers can be stored; this one has dtype object"),
    "text": (lambda w: w.array("a", ["b"]), "this one has dtype <U1"),
    "dates": (lambda w: w.array("a", np.array(["2020"], "M8[D]")), "arrays of numbers can be stored"),
    "ragged": (lambda w: w.array("a", [[1], [1, 2]]), "a list is not an array of numbers"),
    "too large": (lambda w: w.array("a", np.broadcast_to(np.float32(0), (2 ** 16, 2 ** 16))), "too large for a run"),
    "large and then refused": (lambda w: w.arrays({"a": np.random.default_rng(0).normal(size=2 ** 18), "b": ["x"]}), "dtype <U1"),
    "a name of an array": (lambda w: w.array(3, [1]), "names and notes of a run must be text"),
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
    "a figure of text": (lambda w: w.figure("a", "svg", "<svg/>"), "stored as bytes"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path: Path, what: str) -> None:
    work, sentence = REFUSED[what]
    with runs.create(tmp_path / "run") as run:
        run.rows([Row(0, "0", "m", 0.5, note="kept")])
        before = list(run._database.connection.iterdump())
        with pytest.raises(StoreError, match=sentence):
            work(run)
        assert list(run._database.connection.iterdump()) == before
        assert not list((tmp_path / "run").glob("objects/*"))
        run.rows([Row(1, "0", "m", 1.5, note="kept")])
    check_table(list(runs.load(tmp_path / "run").frame.itertuples(index=False, name=None)),
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
    run = runs.load(tmp_path / "run")
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
    with pytest.raises(StoreError, match="contains other files and no run"):
        runs.create(tmp_path / "taken")
    with pytest.raises(StoreError, match="could not be made"):
        runs.create(tmp_path / "file" / "below")
    with pytest.raises(StoreError):
        runs.create(tmp_path / "a\0b")
    with pytest.raises(StoreError, match=r"contains no run \(there is no run.db in it\)"):
        runs.load(tmp_path / "taken")
    with pytest.raises(StoreError, match="contains no run"):
        runs.load(tmp_path / "a\0b")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "taken"]


# -------------------------------------------------------------------------------------------------------------- status, sessions



def test_status_and_sessions(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = runs.create(folder)
    reading = runs.load(folder)
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
    assert runs.load(tmp_path / "run").status == "finished"
    runs.create(tmp_path / "run", resume=True).close()


def test_one_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process or two; the first goes on, and a reader that asks for the status does not stand in the way."""
    with runs.create(tmp_path / "run") as run:
        with pytest.raises(StoreError, match=r"this process is already writing the run .* Close the earlier"):
            runs.create(tmp_path / "run", resume=True)
        said = ended(child(second_writer, str(tmp_path / "run")))
        assert f"another process is writing the run {tmp_path / 'run'}. A run has one writer; choose another name" in said
        run.scalars(0, loss=1.0)
    monkeypatch.setattr(lock, "PATIENCE", 60.0)  # however slowly the reader lets go
    handle = os.open(tmp_path / "run" / "writer.lock", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)  # as `held` does
    threading.Timer(0.03, os.close, [handle]).start()
    runs.create(tmp_path / "run", resume=True).close()
    assert not lock.held(tmp_path / "run" / "writer.lock")


def test_readers_do_not_take_each_other_for_a_writer(tmp_path: Path) -> None:
    runs.create(tmp_path / "run").close()
    with open(tmp_path / "run" / "writer.lock", "rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH)  # as one that asks at the same moment
        assert runs.load(tmp_path / "run").status == "interrupted"


def test_a_run_that_one_thread_has_made_is_ended_by_another(tmp_path: Path) -> None:
    run = runs.create(tmp_path / "run")
    other = threading.Thread(target=run.finish)
    other.start()
    other.join()
    assert runs.load(tmp_path / "run").status == "finished"
    runs.create(tmp_path / "run", resume=True).close()


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
    found = runs.load(tmp_path / "run").scalar_frame
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
        assert all("not by a fork of it" in s for s in said[:2])
        assert runs.load(tmp_path / "run").status == "running"
        process.kill()
        process.wait()
        run = runs.load(tmp_path / "run")
        assert run.status == "interrupted"  # the child lives on
        assert run.scalars("loss").value.tolist() == [1.0]
        runs.create(tmp_path / "run", resume=True).close()


def test_the_revision_of_a_folder(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return subprocess.run(["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    assert revision(tmp_path) is None  # no repository
    git("init")
    assert revision(tmp_path) is None  # no commit
    for name in ("a", "b"):
        (tmp_path / name).write_text("1")
    git("add", "a", "b")
    git("commit", "-m", "first")
    head = git("rev-parse", "HEAD")
    (tmp_path / "c").write_text("not in the repository")
    assert revision(tmp_path) == head
    (tmp_path / "a").write_text("2")
    assert [revision(tmp_path, *only) for only in ((), ("a",), ("b",), (".", ":(exclude)a"))] == [
        f"{head}+", f"{head}+", head, head]
