"""Folders of runs that are moved, deleted or replaced while they are written, by two writers: each keeps what it acknowledged,
and neither touches a file of the other."""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runs_helpers import Row, StoreError, attempted, child, known, leave_behind, runs, sqlite

LIBRARY = str(Path(sqlite.__file__).parent)
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows keeps open files where they are")


def files_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """All files of a folder: which they are, and what the system says of their contents."""
    facts = {path.relative_to(folder).as_posix(): path.lstat() for path in folder.rglob("*")}
    return {name: (f.st_ino, f.st_size, f.st_mtime_ns) for name, f in facts.items()}


def as_killed(folder: Path, copy: Path) -> Any:
    """The run as a kill of its writer would leave it at this moment."""
    return runs.load(shutil.copytree(folder, copy))


def moved(folder: Path) -> None:
    folder.rename(folder.with_name("away"))


def deleted(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize("end", ["close", "finish", "exit", "failed exit"])
@pytest.mark.parametrize("take", [moved, deleted])
def test_a_writer_that_ends_touches_no_run_in_its_place(tmp_path: Path, take: Callable[[Path], None], end: str) -> None:
    folder = tmp_path / "run"
    first = runs.create(folder)
    for step in range(50):
        first.scalars(step, loss=float(step))
    take(folder)
    second = runs.create(folder)
    for step in range(50):
        second.scalars(step, loss=-float(step))
    before = files_of(folder)
    if end == "close":
        first.close()
    else:
        error = ValueError("of the loop") if end == "failed exit" else None
        with pytest.raises(StoreError, match="another run is in its place"):
            first.finish() if end == "finish" else first.__exit__(type(error) if error else None, error, None)
    assert files_of(folder) == before
    second.scalars(50, loss=-50.0)
    second.snapshot(known(51))
    assert as_killed(folder, tmp_path / "killed").scalars("loss").value.tolist() == [-float(step) for step in range(51)]
    second.finish()
    assert sorted(p.name for p in folder.iterdir()) == ["run.db", "writer.lock"]
    assert runs.load(folder).status == "finished"
    if take is moved:
        assert runs.load(tmp_path / "away").scalars("loss").value.tolist() == [float(step) for step in range(50)]
        assert runs.load(tmp_path / "away").status == "interrupted"


def at_event(event: int, work: Callable[[], object], happens: Callable[[], object]) -> bool:
    """Let something happen at the n-th call that the library makes, or at the end of that. Did it come so far?"""
    left = event

    def count(frame: Any, what: str, _: Any) -> None:
        nonlocal left
        left -= what != "return" and frame.f_code.co_filename.startswith(LIBRARY)
        if left <= 0:
            sys.setprofile(None)
            happens()

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return left <= 0


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("work", ["close", "large array", "state"])
def test_a_folder_that_is_replaced_at_any_call_of_a_writer(tmp_path: Path, work: str, stride: int) -> None:
    """Between two calls of a writer that closes, or keeps an object, another process may have begun a run in its folder."""
    data, event, came = bytes(2 ** 20 + 1), 1, True

    def works(run: Any) -> None:
        if work == "close":
            run.close()
        elif work == "large array":
            run.arrays({"a": memoryview(data)})
        else:
            run.keep_state(lambda path: path.write_bytes(b"state"), "previous")

    reached: list[bool] = []
    while came:
        folder, others = tmp_path / str(event) / "run", []
        first = runs.create(folder)
        first.scalars(0, loss=1.0)
        first.keep_state(lambda path: path.write_bytes(b"before"), "previous")

        def replace(folder: Path = folder, others: list[Any] = others) -> None:
            moved(folder)
            second = runs.create(folder)
            second.scalars(0, loss=2.0)
            second.keep_state(lambda path: path.write_bytes(b"before"), "previous")
            others.extend([second, files_of(folder)])

        _, refusal = attempted(lambda run=first, event=event, replace=replace: reached.append(
            at_event(event, lambda: works(run), replace)))
        came = bool(refusal) or reached[-1]
        assert not refusal or "deleted or moved" in refusal or "could not be" in refusal, event
        if others:
            second, before = others
            after = files_of(folder)
            for files in (before, after):
                files.pop("objects")  # when it was written to: a name that nobody knows may have come and gone
                files.pop("run.db-shm")  # every reader leaves marks there, one that still has the name of its run too
            assert after == before, event
            assert as_killed(folder, folder.with_name("killed")).scalars("loss").value.tolist() == [2.0], event
            second.close()
            assert runs.load(folder).state("previous").read_bytes() == b"before"
            folder = folder.with_name("away")
        first.close()
        assert runs.load(folder).scalars("loss").value.tolist() == [1.0], event
        event += stride
    assert event > 40


def write_on_request(_: str) -> None:
    """Begin a run in each folder that is read and write to it, then write once more for an empty line; each is acknowledged."""
    import sys

    from richter import runs
    from richter.runs import format as provenance

    provenance.revision = lambda: None
    for line in sys.stdin:
        if line.strip():
            run = runs.create(line.strip())
        for step in range(20):
            run.scalars(step if line.strip() else 20 + step, loss=float(step))
        print("written", flush=True)
        if not line.strip():
            run.finish()
            print("finished", flush=True)


@pytest.mark.parametrize("stride", [25, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("before", ["nothing", "finished", "killed"])
def test_a_folder_that_is_replaced_at_any_call_that_begins_a_run(tmp_path: Path, before: str, stride: int) -> None:
    """Another process has begun a run under the name in the meantime: it keeps its log and all its rows."""
    template, event, came, replaced = tmp_path / "template", 1, True, 0
    if before == "finished":
        with runs.create(template) as run:
            run.rows([Row(0, "0", "m", 1.0)])
    elif before == "killed":
        child(leave_behind, str(template), "log").wait()
    with child(write_on_request, "") as other:
        def asked(line: str) -> bytes:
            other.stdin.write(f"{line}\n".encode())
            return other.stdout.readline()

        while came:
            folder, begun, others = tmp_path / str(event) / "run", list[Any](), list[Any]()
            folder.parent.mkdir()
            if before != "nothing":
                shutil.copytree(template, folder)

            def replace(folder: Path = folder, others: list[Any] = others) -> None:
                if folder.exists():
                    moved(folder)
                assert asked(str(folder)) == b"written\n"
                others.append(files_of(folder))

            def create(folder: Path = folder, begun: list[Any] = begun) -> None:
                begun.append(runs.create(folder, resume=True))  # else it would take the next free name

            attempted(lambda event=event, create=create, replace=replace: at_event(event, create, replace))
            if came := bool(others):
                replaced += 1
                after = files_of(folder)
                for files in (others[0], after):
                    files.pop("run.db-shm")  # every reader leaves marks there
                assert after == others[0], event
                assert as_killed(folder, folder.with_name("killed")).scalars("loss").step.tolist() == list(range(20)), event
                for run in begun:
                    with pytest.raises(StoreError, match="Was it deleted or moved"):
                        run.scalars(0, loss=0.0)
                    run.close()
                assert asked("") == b"written\n"
                assert other.stdout.readline() == b"finished\n"
                assert runs.load(folder).scalars("loss").step.tolist() == list(range(40)), event
                if before != "nothing":
                    assert len(runs.load(folder.with_name("away")).table) == len(runs.load(template).table)
            for run in begun:
                run.close()
            shutil.rmtree(folder.parent)
            event += stride
        other.kill()
    assert replaced > 20


@pytest.mark.parametrize("name", ["known", "new"])
def test_a_log_that_is_deleted_is_noticed_and_nothing_is_lost(tmp_path: Path, name: str) -> None:
    """By the next call of any kind: what is in the log only goes into the file, so that a kill takes nothing with it."""
    run = runs.create(tmp_path / "run")
    for step in range(100):
        run.scalars(step, known=float(step))
    (tmp_path / "run" / "run.db-wal").unlink()
    with pytest.raises(StoreError, match="Was it deleted or moved"):
        run.scalars(100, {name: 100.0})
    assert as_killed(tmp_path / "run", tmp_path / "killed").scalars("known").value.tolist() == [float(s) for s in range(100)]
    run.close()


# ---------------------------------------------------------------------------------------------------------------- two processes


def write_where_there_is_room(folder: str, writer: int) -> None:
    """Begin a run wherever there is none, write until it is taken away, and begin the next; say what has returned."""
    import contextlib
    import itertools
    import os
    import random

    import numpy as np

    from richter import runs
    from richter.core import Row, StoreError
    from richter.runs import format as arrays
    from richter.runs import format as provenance

    def acknowledge(*what: object) -> None:
        os.write(1, (" ".join(map(str, what)) + "\n").encode())

    arrays.LARGE, provenance.revision, draw = 3000, lambda: None, random.Random(writer)
    acknowledge("ready", 0, 0)
    for number in itertools.count():
        while True:
            try:
                if not os.path.exists(folder):
                    run = runs.create(folder, {"run": [writer, number]}, resume=True)  # of this name or none
                    break
            except (StoreError, OSError):
                pass
        acknowledge("begun", number, 0)
        try:
            for step in itertools.count(1):
                run.scalars(step, loss=float(step))
                acknowledge("scalars", number, step)
                if step % 7 == 0:
                    run.rows([Row(step, str(i), "m", step) for i in range(20)])
                    run.array("noise", np.random.default_rng(step).normal(size=500), step=step)
                    acknowledge("array", number, step)
        except StoreError as why:
            if "deleted or moved" not in str(why) and "could not be" not in str(why):
                raise
        with contextlib.suppress(StoreError):
            run.finish() if draw.random() < 0.5 else run.close()
        acknowledge("ended", number, 0)


class Heard:
    """What two writers have acknowledged: by writer and number of its run, by kind, the steps."""

    def __init__(self, writers: list[subprocess.Popen[bytes]]) -> None:
        self.writers, self.runs = writers, dict[tuple[int, int], dict[str, set[int]]]()
        self._pieces = [b"" for _ in writers]

    def listen(self, seconds: float) -> bool:
        """Did any of them say something?"""
        pipes = [w.stdout.fileno() for w in self.writers]
        ready, _, _ = select.select(pipes, [], [], seconds)
        for k, pipe in enumerate(pipes):
            if pipe in ready:
                text = os.read(pipe, 2 ** 16)
                assert text, self.writers[k].stderr.read().decode()
                *lines, self._pieces[k] = (self._pieces[k] + text).split(b"\n")
                for line in lines:
                    what, number, step = line.decode().split()
                    self.runs.setdefault((k, int(number)), {}).setdefault(what, set()).add(int(step))
        return bool(ready)

    def count(self, what: str) -> int:
        return sum(what in run for run in self.runs.values())

    def stopped(self) -> Iterator[None]:
        """Both writers stand still, and all that they have said was heard."""
        for writer in self.writers:
            writer.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, writer.pid, os.WSTOPPED)
        while self.listen(0):
            pass
        yield
        for writer in self.writers:
            writer.send_signal(signal.SIGCONT)

    def check(self, folder: Path) -> tuple[int, int] | None:
        """All that was acknowledged of the run in a folder is there, and nothing of another."""
        run, sentence = attempted(lambda: runs.load(folder))
        if run is None:
            assert "never begun" in sentence or "contains no run" in sentence, sentence
            return None
        key = tuple(run.settings["run"])
        said = self.runs.get(key, {})
        assert len(run.sessions) == 1
        losses = run.scalars("loss") if "loss" in run.scalar_names else None
        steps = [] if losses is None else losses.step.tolist()
        assert steps == list(range(1, len(steps) + 1))
        assert said.get("scalars", set()) <= set(steps), key
        assert losses is None or losses.value.tolist() == [float(step) for step in steps]
        stored = {step for _, _, step in run.arrays}
        assert said.get("array", set()) <= stored, key
        for step in said.get("array", ()):
            assert run.array("noise", step=step).shape == (500,)
        run.close()
        return key


def replace_folders(place: Path, times: int, seed: int) -> Heard:
    """Take the folder from whoever writes it, at random moments. Before that: what a kill would leave."""
    draw, folder, checked = random.Random(seed), place / "run", set()
    with child(write_where_there_is_room, str(folder), 0) as one, child(write_where_there_is_room, str(folder), 1) as other:
        heard, taken = Heard([one, other]), list[Path]()
        try:
            for k in range(times):
                while heard.count("begun") == k:
                    assert heard.listen(60.0), "both writers wait"
                    assert heard.count("ended") <= k, "a run was refused that nobody had taken away"
                for _ in range(draw.randrange(12)):
                    assert heard.listen(60.0), "both writers wait"
                for _ in heard.stopped():
                    assert heard.count("ended") <= k, "a run was refused that nobody had taken away"
                    key = heard.check(shutil.copytree(folder, place / f"killed {k}", ignore=shutil.ignore_patterns(".*")))
                    checked |= {key}
                    shutil.rmtree(place / f"killed {k}")
                    if draw.random() < 0.3:
                        shutil.rmtree(folder)
                    else:
                        taken.append(folder.rename(place / f"away {k}"))
        finally:
            for writer in (one, other):
                writer.kill()
        keys = [heard.check(path) for path in taken]
        assert len(set(keys)) == len(keys)
        assert len(checked) == times  # none was checked twice, and each had been begun
        assert {key[0] for key in checked} == {0, 1}
    return heard


@pytest.mark.parametrize("times", [30, pytest.param(200, marks=pytest.mark.long)])
def test_folders_that_are_replaced_while_two_processes_write(tmp_path: Path, times: int) -> None:
    heard = replace_folders(tmp_path, times, times)
    assert sum(len(steps) for run in heard.runs.values() for steps in run.values()) > 10 * times
