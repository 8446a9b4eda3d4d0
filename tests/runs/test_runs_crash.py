"""Crashes: a kill or an interrupt at any moment, a full disk, or other processes lose nothing that returned."""

from __future__ import annotations

import contextlib
import inspect
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from richter.core import Failure
from richter.runs import format as provenance
from runs_helpers import Row, StoreError, answer, child, ended, known, runs, same, sqlite, writing


def write_for_ever(folder: str, step: int) -> None:
    """Write rows, scalars, arrays and snapshots, finish and go on; say on the pipe what has returned."""
    import os

    import numpy as np

    from richter import runs
    from richter.core import Row
    from richter.instrument.snapshot import Snapshot
    from richter.runs import format as provenance
    from richter.runs import sqlite

    def acknowledge(what: str) -> None:
        os.write(1, f"{what} {step}\n".encode())

    sqlite.RECENT, provenance.revision = 40, lambda: None  # rows are moved often
    acknowledge("ready")
    while True:
        with runs.create(folder, resume=True) as run:
            acknowledge("begun")
            for _ in range(6):
                run.rows([Row(step, str(i), "m", step + i, 0.5, f"note {i % 3}") for i in range(7)])
                acknowledge("rows")
                run.scalars(step, loss=step / 2, other=-step)
                acknowledge("scalars")
                noise = np.random.default_rng(step).normal(size=150_000 if step % 5 == 0 else 10)
                run.arrays({"a": np.full(5, step), "b": noise}, step=step)
                acknowledge("arrays")
                run.snapshot(Snapshot((Row(step, "0", "n", step), Row(step, "1", "n", -step)), step, {"*": f"at {step}"},
                                      arrays={("0", "agop"): np.eye(9) * step}))
                acknowledge("snapshot")
                step += 1
        acknowledge("finished")


def check_crashed(folder: Path, acknowledged: dict[str, set[int]]) -> None:
    """All that was acknowledged is there and right, and of what was not, all of a call or nothing."""
    try:
        run = runs.load(folder)
    except StoreError as why:
        sentence = str(why)
    else:
        return check_written(run, acknowledged)
    assert not acknowledged.get("begun"), sentence
    assert "contains no run" in sentence or "was never begun" in sentence


def check_written(run: Any, acknowledged: dict[str, set[int]]) -> None:
    with contextlib.closing(run):
        frame = run.frame
        rows = frame[frame.measure == "m"]
        counts = rows.groupby("step").size()
        assert acknowledged.get("rows", set()) <= set(counts.index)
        assert set(counts) <= {7}
        assert (rows.value == rows.step + rows.layer.astype(int)).all()
        assert (rows.note == [f"note {int(k) % 3}" for k in rows.layer]).all()
        scalars = run.scalar_frame
        assert acknowledged.get("scalars", set()) <= set(scalars.step)
        assert not len(scalars) or ((scalars.loss == scalars.step / 2) & (scalars.other == -scalars.step)).all()
        steps = {name: {s for _, n, s in run.arrays if n == name} for name in ("a", "b", "agop")}
        assert acknowledged.get("arrays", set()) <= steps["a"]
        assert steps["a"] == steps["b"]
        for step in steps["a"]:
            assert run.array("a", step=step).tolist() == [step] * 5
            assert same(run.array("b", step=step), np.random.default_rng(step).normal(size=150_000 if step % 5 == 0 else 10))
        measured = {s.step: s for s in run.snapshots if s.notes}
        assert acknowledged.get("snapshot", set()) <= set(measured)
        assert set(measured) == set(run.steps) == steps["agop"] == set(frame[frame.measure == "n"].step)
        for step, snap in measured.items():
            assert (snap.value("n", "0"), snap.value("n", "1"), snap.notes) == (step, -step, {"*": f"at {step}"})
            assert same(run.array("agop", "0", step), np.eye(9) * step)
        assert run.status in ("interrupted", "finished")


CYCLE = 26  # what is acknowledged from the beginning of a run to its end, and begun again


def kill_at_random(folder: Path, kills: int, seed: int) -> dict[str, set[int]]:
    """One run after the other, each killed several times, each time after so many calls have returned: never after so many
    seconds, which say little on a busy machine. Returns what has been acknowledged by any of the writers."""
    draw, everything = random.Random(seed), {}
    acknowledged: dict[str, set[int]] = {}
    for k in range(kills):
        if k % 5 == 0:
            here, acknowledged = folder / str(k), {}
        first = max(max(steps, default=-1) for steps in [set(), *acknowledged.values()]) + 1
        returned = 0 if k % 5 == 0 else CYCLE + 1 if k % 5 == 1 else draw.randrange(2 * CYCLE)  # the first while it is made
        with child(write_for_ever, str(here), first) as process:
            assert process.stdout.readline() == b"ready %d\n" % first
            lines = b"".join(process.stdout.readline() for _ in range(returned))
            time.sleep(draw.uniform(0, 0.02))  # somewhere in the next calls
            process.send_signal(signal.SIGKILL)
            rest, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors.decode()
        for line in (lines + rest).decode().splitlines():
            what, step = line.split()
            acknowledged.setdefault(what, set()).add(int(step))
        check_crashed(here, acknowledged)
        for what, steps in acknowledged.items():
            everything.setdefault(what, set()).update(steps)
        if k % 5 == 4:
            with runs.create(here, resume=True) as run:
                run.scalars(10 ** 6, loss=5e5, other=-1e6)
            check_crashed(here, {**acknowledged, "scalars": {*acknowledged.get("scalars", ()), 10 ** 6}})
            assert runs.load(here).status == "finished"
            assert not list(here.glob("objects/.*"))  # what was half written is gone
    return everything


def test_a_kill_at_any_moment_loses_nothing_that_returned(tmp_path: Path) -> None:
    acknowledged = kill_at_random(tmp_path, 15, seed=0)
    assert {"begun", "rows", "scalars", "arrays", "snapshot", "finished"} <= set(acknowledged)  # it came as far as that


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
    from richter.runs import format as provenance
    from richter.runs import sqlite

    sqlite.RECENT, provenance.revision = 20, lambda: None
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
            run = runs.load(folder)
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
        assert run.run.scalars("loss").value.tolist() == [1.0]
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
    ended(child(die_at_each_call, str(tmp_path / "run"), 1, 1), 3600)  # some 4,500 kills


# ------------------------------------------------------------------------------------------------------------- interrupts


class Interrupting:
    """A connection on which Ctrl-C is pressed during a statement (it is heard when the statement has returned), and once more,
    if one is named, just before another."""

    def __init__(self, connection: Any, during: str, before: str = "nothing") -> None:
        self._connection, self._during, self._before = connection, during, before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def execute(self, text: str, *values: Any) -> Any:
        if text.startswith(self._before):
            self._before = "nothing"
            raise KeyboardInterrupt
        cursor = self._connection.execute(text, *values)
        if text.startswith(self._during):
            self._during = "nothing"
            raise KeyboardInterrupt
        return cursor


@pytest.mark.parametrize("moments", [("BEGIN",), ("INSERT OR REPLACE INTO series",), ("INSERT OR REPLACE INTO recent",),
                                     ("INSERT OR REPLACE INTO ledger",), ("COMMIT",), ("BEGIN", "ROLLBACK"),
                                     ("INSERT OR REPLACE INTO recent", "ROLLBACK")], ids=" ".join)
@pytest.mark.parametrize("name", ["known", "new"])
def test_an_interrupt_leaves_no_transaction_open(tmp_path: Path, moments: tuple[str, ...], name: str) -> None:
    """What is written after it is kept, by names that have a number (in one statement) and by others (in a transaction)."""
    with runs.create(tmp_path / "run") as run:
        run.scalars(0, known=0.0)
        run._database.connection = Interrupting(run._database.connection, *moments)
        with pytest.raises(KeyboardInterrupt):
            run.rows([Row(0, "0", "m", 1.0)])
        for step in range(1, 1001):
            run.scalars(step, {name: float(step)})
        seen = runs.load(tmp_path / "run")  # by others, before the end puts all in order
        assert seen.scalars(name).value.tolist()[-1000:] == [float(step) for step in range(1, 1001)]
        assert len(seen.frame) == (moments == ("COMMIT",))
        run.rows([Row(1, "0", "m", 2.0)])
    assert runs.load(tmp_path / "run").frame.value.tolist() == ([1.0, 2.0] if moments == ("COMMIT",) else [2.0])


def interrupted_at(event: int, work: Callable[[], object]) -> bool:
    """Press Ctrl-C at the n-th place at which Python listens to it: where a function begins, or something outside has returned.
    (At other events an error would end a generator without its ``finally``, which no Ctrl-C does.) Did it come so far?"""
    left = event

    def count(frame: Any, what: str, _: Any) -> None:
        nonlocal left
        left -= what == "c_return" or (what == "call" and not frame.f_code.co_flags & inspect.CO_GENERATOR)
        if not left:
            raise KeyboardInterrupt

    sys.setprofile(count)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return left <= 0


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.long)])
def test_an_interrupt_at_any_call_leaves_the_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stride: int) -> None:
    """A cell of a notebook that is stopped and started again: what is written next is kept, by this thread and another."""
    monkeypatch.setattr(sqlite, "RECENT", 20)
    event, came, events = 1, True, []
    with runs.create(tmp_path / "run") as run:
        while came:
            events.append(event)
            rows = [Row(event, str(i), f"m {event}", i, note=f"note {event} {i}") for i in range(3)]
            came = interrupted_at(event, partial(run.rows, rows))
            interrupted_at(event, partial(run.scalars, event, {"loss": float(event)}))
            run.scalars(event, loss=-1.0, other=float(event))
            other = threading.Thread(target=run.rows, args=(rows,), daemon=True)
            other.start()
            other.join(60)
            assert not other.is_alive(), event  # nobody holds the guard
            seen = run.run.frame
            seen = seen[seen.step == event]
            assert seen.value.tolist() == [0, 1, 2], event
            assert (seen.note == [r.note for r in rows]).all(), event
            event += stride
    assert event > 50
    finished = runs.load(tmp_path / "run")
    assert finished.scalars("loss").value.tolist() == [-1.0] * len(events)
    assert finished.scalars("other").value.tolist() == [float(e) for e in events]
    assert len(finished.frame) == 3 * len(events)


def test_an_interrupt_of_a_reader_leaves_it_in_order(tmp_path: Path) -> None:
    """At any call: the next question is answered, and by what is there by then."""
    with runs.create(tmp_path / "run") as run:
        run.scalars(0, loss=0.0)
        reading, event, came = runs.load(tmp_path / "run"), 1, True
        while came:
            came = interrupted_at(event, lambda: reading.scalars("loss"))
            run.scalars(event, loss=float(event))
            assert reading.scalars("loss").value.tolist() == [float(k) for k in range(event + 1)], event
            event += 9
            for step in range(event - 8, event):
                run.scalars(step, loss=float(step))
    assert event > 60


class InterruptingAt:
    """A connection on which Ctrl-C is heard at the n-th statement, just before it or when it has taken effect."""

    def __init__(self, connection: Any, statement: int, after: bool) -> None:
        self._connection, self._left, self._after = connection, statement, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    @property
    def came(self) -> bool:
        return self._left <= 0

    def _interrupted(self, work: Callable[..., Any], *given: Any) -> Any:
        self._left -= 1
        if not self._left and not self._after:
            raise KeyboardInterrupt
        cursor = work(*given)
        if not self._left:
            raise KeyboardInterrupt
        return cursor

    def execute(self, *given: Any) -> Any:
        return self._interrupted(self._connection.execute, *given)

    def executemany(self, *given: Any) -> Any:
        return self._interrupted(self._connection.executemany, *given)


def known_matrices(step: int) -> Any:
    return replace(known(step), arrays={("0", "nfm"): np.eye(3, dtype=np.float32) * step})


WRITES: dict[str, Callable[[Any], object]] = {
    "rows": lambda run: run.rows([Row(7, "0", "m", 1.0), Row(7, "1", "n", 2.0, note="a note")]),
    "snapshot": lambda run: run.snapshot(known_matrices(7)),
    "new scalars": lambda run: run.scalars(7, new=1.0, newer=2.0),
    "known scalars": lambda run: run.scalars(7, known=1.0),
    "many scalars": lambda run: run.scalar_rows([Row(7, "", "known", 1.0), Row(7, "", "new", 2.0)]),
    "moved": lambda run: run.rows([Row(7, str(i), "m", i) for i in range(5)]),
    "state": lambda run: run.keep_state(lambda path: path.write_bytes(b"state")),
    "described": lambda run: run.describe(progress=0.5),
    "failures": lambda run: run.failures([Failure("why", 7, 7)]),
    "forgotten": lambda run: run.forget(6),
    "cleared": lambda run: run.clear(),
}


def all_of(run: Any) -> tuple[Any, ...]:
    """What a fresh reader sees of step 7 and of what is not of a step."""
    frame = run.table
    return (frame[frame.step == 7].to_csv(), [a for a in run.arrays if a[2] == 7], 7 in run.steps, run.about.get("progress"),
            run.failures, run.state_name("initial"), len(frame))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("what", WRITES)
def test_an_interrupt_at_any_statement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, after: bool) -> None:
    """The write is whole or absent, and all that is acknowledged later is kept."""
    monkeypatch.setattr(sqlite, "RECENT", 6)
    monkeypatch.setattr(provenance, "revision", lambda: None)
    seen: dict[str, tuple[Any, ...]] = {}

    def written(name: str, statement: int) -> bool:
        run = runs.create(tmp_path / name)
        run.scalars(6, known=0.5)
        run.rows([Row(6, "0", "m", 0.5)])
        plain = run._database.connection
        run._database.connection = at = InterruptingAt(plain, statement, after)  # type: ignore[attr-defined]
        with contextlib.suppress(KeyboardInterrupt):
            WRITES[what](run)
        run._database.connection = plain  # type: ignore[attr-defined]
        seen[name] = all_of(runs.load(tmp_path / name))
        for step in range(100, 120):
            run.scalars(step, known=float(step))
            run.scalars(step, {f"other {step % 3}": float(step)})
            run.rows([Row(step, "later", "m", float(step))])
        later = runs.load(tmp_path / name)  # by others, before the end puts all in order
        assert later.scalars("known").value.tolist()[-20:] == [float(step) for step in range(100, 120)]
        assert later.series("m", "later").value.tolist() == [float(step) for step in range(100, 120)]
        assert sorted(v for k in range(3) for v in later.scalars(f"other {k}").value) == [float(k) for k in range(100, 120)]
        table = later.table
        assert len(table[table.step >= 100]) == 60
        run.finish()
        return at.came

    assert not written("whole", 10 ** 6)
    first = runs.create(tmp_path / "absent")
    first.scalars(6, known=0.5)
    first.rows([Row(6, "0", "m", 0.5)])
    seen["absent"] = all_of(runs.load(tmp_path / "absent"))
    first.finish()
    statement = 1
    while written(f"at {statement}", statement):
        assert seen[f"at {statement}"] in (seen["whole"], seen["absent"]), statement
        statement += 1
    assert statement > (1 if what == "known scalars" else 3)


def test_a_transaction_that_was_given_up_does_not_end_a_later_one(tmp_path: Path) -> None:
    """An interrupt between the beginning of a transaction and its body: what it leaves is collected at any time later."""
    with runs.create(tmp_path / "run") as run:
        given_up = run._database.transaction("written")
        given_up.__enter__()
        with run._database.transaction("written"):
            run._database.rows("row", [Row(0, "0", "m", 1.0)])
            del given_up
            run._database.rows("row", [Row(1, "0", "m", 2.0)])
        assert runs.load(tmp_path / "run").series("m", "0").value.tolist() == [1.0, 2.0]


def interrupted_at_random(folder: str, interrupts: int, seed: int) -> None:
    """The main thread and two others write rows, scalars, arrays and snapshots; a fourth interrupts any of them at any moment.
    All go on, and in the end all that was acknowledged is there, and nothing else is wrong."""
    import contextlib
    import ctypes
    import os
    import random
    import signal
    import threading
    import time

    import numpy as np

    from richter import runs
    from richter.core import Row
    from richter.instrument.snapshot import Snapshot
    from richter.runs import format as provenance
    from richter.runs import sqlite
    sqlite.RECENT, provenance.revision = 60, lambda: None
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell has put in the background does not hear it
    draw, acknowledged, heard = random.Random(seed), {k: set() for k in range(3)}, [0, 0, 0]
    numbers: dict[int, int] = {0: threading.get_ident()}
    current, over, armed = runs.create(folder), threading.Event(), [False, False, False]

    def work(k: int) -> None:
        numbers[k] = threading.get_ident()
        step = 10 ** 6 * k
        while not over.is_set():
            try:
                while not over.is_set():
                    armed[k], step = True, step + 1
                    current.rows([Row(step, str(i), f"m {k}", step + i, 0.5, f"note {i % 3}") for i in range(4)])
                    acknowledged[k].add(("rows", step))
                    current.scalars(step, {f"loss {k}": step / 2})
                    acknowledged[k].add(("scalars", step))
                    current.arrays({f"a {k}": np.full(5, step), f"b {k}": np.full(3, -step)}, step=step)
                    acknowledged[k].add(("arrays", step))
                    current.snapshot(Snapshot((Row(step, "0", f"n {k}", step),), step, {"*": f"at {step}"}))
                    acknowledged[k].add(("snapshot", step))
                    if k == 0 and heard[0] >= interrupts // 3:
                        over.set()
            except KeyboardInterrupt:
                heard[k] += 1

    def disturb() -> None:
        sent = [0, 0, 0]
        while not over.is_set():
            k = draw.randrange(3)
            if armed[k] and sent[k] == heard[k]:  # it is at work, and the one before was heard
                sent[k], armed[k] = sent[k] + 1, False
                if k:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(numbers[k]), ctypes.py_object(KeyboardInterrupt))
                else:
                    os.kill(os.getpid(), signal.SIGINT)
            time.sleep(draw.uniform(0, 0.02))

    threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in (1, 2)]
    threads.append(threading.Thread(target=disturb, daemon=True))
    for thread in threads:
        thread.start()
    while not over.is_set():
        with contextlib.suppress(KeyboardInterrupt):
            work(0)
    while True:
        try:
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive(), "somebody waits for ever"
            break
        except KeyboardInterrupt:
            continue
    current.finish()
    run = runs.load(folder)
    frame, measured = run.frame, {s.step: s for s in run.snapshots if s.notes}
    for k in range(3):
        rows = frame[frame.measure == f"m {k}"]
        steps = {what: {s for w, s in acknowledged[k] if w == what} for what in ("rows", "scalars", "arrays", "snapshot")}
        assert steps["rows"] <= set(rows.step)
        assert set(rows.groupby("step").size()) <= {4}
        assert (rows.value == rows.step + rows.layer.astype(int)).all()
        assert (rows.note == [f"note {int(i) % 3}" for i in rows.layer]).all()
        if steps["scalars"]:
            curve = run.scalars(f"loss {k}")
            assert steps["scalars"] <= set(curve.step.tolist())
            assert (curve.value == curve.step / 2).all()
        places = {name: {s for _, n, s in run.arrays if n == f"{name} {k}"} for name in "ab"}
        assert steps["arrays"] <= places["a"] == places["b"]
        assert all(run.array(f"a {k}", step=s).tolist() == [s] * 5 and run.array(f"b {k}", step=s).tolist() == [-s] * 3
                   for s in places["a"])
        assert steps["snapshot"] <= set(measured)
        assert all(measured[s].value(f"n {k}", "0") == s for s in steps["snapshot"])
    assert run.status == "finished"
    print(sum(heard), sum(map(len, acknowledged.values())))


def test_interrupts_of_several_threads_lose_nothing(tmp_path: Path) -> None:
    heard, acknowledged = map(int, ended(child(interrupted_at_random, str(tmp_path / "run"), 15, 0)).split())
    assert heard >= 10
    assert acknowledged > 10


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_interrupts_of_several_threads_lose_nothing(tmp_path: Path, seed: int) -> None:
    print("interrupts, acknowledged:", ended(child(interrupted_at_random, str(tmp_path / "run"), 80, seed), 600))


class Announced:
    """A guard that says when a certain thread comes to it."""

    def __init__(self, guard: Any) -> None:
        self.guard, self.reached, self.thread = guard, threading.Event(), None

    def __enter__(self) -> None:
        if threading.current_thread() is self.thread:
            self.reached.set()
        self.guard.acquire()

    def __exit__(self, *_: object) -> None:
        self.guard.release()


@pytest.mark.parametrize("what", ["fails", "clears"])
def test_a_number_that_one_thread_gives_back_is_not_used_by_another(tmp_path: Path, what: str) -> None:
    """While a write that names "a" fails, or everything is cleared, another thread writes "a"; then "b" gets the number."""
    class Failing:
        def __float__(self) -> float:
            other.start()
            guard.reached.wait(60)
            raise ValueError("no number")

    with runs.create(tmp_path / "run") as run:
        run._guard = guard = Announced(run._guard)
        guard.thread = other = threading.Thread(target=run.scalars, args=(5, {"a": 7.0}))
        if what == "fails":
            with pytest.raises(StoreError, match="no number"):
                run.scalars(0, {"a": 1.0, "bad": Failing()})
        else:
            run.scalars(0, a=1.0)
            with guard:
                other.start()
                guard.reached.wait(60)
                run.clear()
                run.scalars(1, b=2.0)
        other.join(60)
        run.scalars(1, b=2.0)
    finished = runs.load(tmp_path / "run")
    assert (finished.scalars("a").step.tolist(), finished.scalars("a").value.tolist()) == ([5], [7.0])
    assert (finished.scalars("b").step.tolist(), finished.scalars("b").value.tolist()) == ([1], [2.0])


# ------------------------------------------------------------------------------------------------------------------- concurrency



def write_many(folder: str, rows: int, own: int) -> None:
    """Half of them, then wait for a word."""
    import sys

    from richter import runs
    from richter.core import Row
    from richter.runs import sqlite
    sqlite.RECENT = 500
    with runs.create(folder) as run:
        for step in range(rows // 50):
            if step == rows // 100:
                sys.stdin.readline()
            run.rows([Row(step, str(i), "m", own + step * 50 + i) for i in range(50)])
            run.scalars(step, loss=step)


def write_together(store: Path, processes: int, rows: int) -> None:
    working = [child(write_many, str(store / f"run {k}"), rows, k * 10 ** 6) for k in range(processes)]
    seen: dict[str, int] = {}
    waiting, between = True, 0
    try:
        while any(w.poll() is None for w in working):
            for run in runs.find(store):
                with contextlib.closing(run):
                    check_half_written(run, seen.get(run.name, 0))
                    seen[run.name] = len(run.frame)
                    between += 0 < seen[run.name] < rows
            if waiting and between > 3:  # they were read while they were written
                waiting = False
                for w in working:
                    w.stdin.write(b"go on\n")
    finally:
        for w in working:
            w.kill()
    for w in working:
        assert w.returncode == 0, w.stderr.read().decode()
        w.communicate()
    written = list(runs.find(store))
    assert [r.name for r in written] == [f"run {k}" for k in range(processes)]
    for k, run in enumerate(written):
        assert run.status == "finished"
        assert sorted(run.frame.value) == list(range(k * 10 ** 6, k * 10 ** 6 + rows))  # none lost, none doubled
        assert run.scalars("loss").value.tolist() == list(range(rows // 50))
    assert between > 3


def check_half_written(run: Any, before: int) -> None:
    assert run.status in ("running", "finished", "interrupted")  # the last before its first session
    frame = run.frame
    counts = frame.groupby("step").size()
    assert set(counts) <= {50}  # all of a call, or nothing
    assert len(frame) >= before
    for layer in run.layers[:3]:
        series = run.series("m", layer)
        assert series.step.tolist() == list(range(len(series.step)))
    assert len(run.snapshots) >= len(counts)
    assert len(run.scalar_frame) <= len(run.scalars("loss").step) if run.scalar_names else True


def test_processes_write_one_store_and_others_read(tmp_path: Path) -> None:
    write_together(tmp_path, 4, 2000)


@pytest.mark.long
def test_many_processes_write_one_store_and_others_read(tmp_path: Path) -> None:
    write_together(tmp_path, 8, 50_000)


# -------------------------------------------------------------------------------------------------------------------------- full



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
    assert until_refused(lambda step: run.keep_state(lambda path: path.write_bytes(bytes(700_000))), "free space") == 0
    assert len(run.run.frame) == 200 * written
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    for step in range(written, written + 5):
        run.rows([Row(step, str(i), "m", step + i) for i in range(200)])
    run.array("large", noise)
    run.finish()
    found = runs.load(folder)
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
    (pages,) = run._database.connection.execute("PRAGMA page_count").fetchone()
    run._database.connection.execute(f"PRAGMA max_page_count={pages + 3}")
    with pytest.raises(StoreError, match=r"could not be written: database or disk is full. The disk is full. Free some space and "
                                         r"continue with resume=True; what was written before is intact."):
        run.rows([Row(1, str(i), "m", i, note="x" * 99) for i in range(1000)])
    assert run.run.frame.value.tolist() == [1.0]
    run._database.connection.execute("PRAGMA max_page_count=1000000")
    run.rows([Row(1, str(i), "m", i, note="later") for i in range(1000)])
    run.finish()
    assert len(runs.load(tmp_path / "run").frame) == 1001


def test_a_move_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "RECENT", 10)
    run = runs.create(tmp_path / "run")
    run.rows([Row(0, str(i), "m", i) for i in range(9)])
    with monkeypatch.context() as patch:
        patch.setattr(writing.Writer, "_put_arrays", lambda *_: 1 / 0)  # after the rows are moved
        with pytest.raises(ZeroDivisionError):
            run.snapshot(known(1))
    assert len(run.run.frame) == 9
    run.rows([Row(1, "0", "m", 1)])
    assert answer(run.path / "run.db", "SELECT count(*) FROM recent") == [(1,)]  # where they end
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
    found = runs.load(tiny_disk / "run")
    assert len(found.frame) == 100 * (written + 1)
    assert found.status == "finished"
    assert not list(tiny_disk.glob("run/objects/.*"))


# ------------------------------------------------------------------------------------------------------------------ endings


def end_while_another_writes(folder: str) -> None:
    """A program that comes to its end while a thread that nobody waits for still writes."""
    import threading
    import time

    from richter import runs
    from richter.core import Row
    from richter.runs import sqlite
    sqlite.RECENT = 50
    run, step = runs.create(folder), [0]

    def work() -> None:
        while True:
            run.rows([Row(step[0], str(i), "m", step[0] + i) for i in range(20)])
            step[0] += 1

    threading.Thread(target=work, daemon=True).start()
    while step[0] < 20:
        time.sleep(0.01)


def test_the_end_of_a_program_does_not_disturb_a_thread_that_writes(tmp_path: Path) -> None:
    for k in range(4):
        with child(end_while_another_writes, str(tmp_path / str(k))) as process:
            process.communicate()
        run = runs.load(tmp_path / str(k))
        assert set(run.frame.groupby("step").size()) == {20}
        assert len(run.frame) >= 400
        assert run.status == "finished"
        runs.create(tmp_path / str(k), resume=True).close()
