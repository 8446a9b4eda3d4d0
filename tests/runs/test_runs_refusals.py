"""What a stranger, a careless program or the system may put in the way of a run: nothing hangs, nothing elsewhere is written,
names that steer a terminal are shown, and how a program ended is recorded as it was."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from richter import cli
from richter.core.values import visible
from richter.engine import sweep
from richter.runs import place as files
from runs_helpers import NAN, Row, StoreError, arrays, child, ended, runs, say, sealed, small


def in_time(work: Callable[[], object]) -> BaseException | None:
    """What it raises; that it ends."""
    raised: list[BaseException | None] = []

    def tried() -> None:
        try:
            work()
            raised.append(None)
        except BaseException as why:
            raised.append(why)

    thread = threading.Thread(target=tried, daemon=True)
    thread.start()
    thread.join(20)
    assert raised, "it hangs"
    return raised[0]


# ------------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["run.db", "run.db-journal", "run.db-wal", "run.db-shm", "writer.lock"])
def test_only_regular_files_are_opened(tmp_path: Path, name: str) -> None:
    folder = small(tmp_path / "run")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    sentences = {"run.db": "contains no run"}
    if name != "writer.lock":
        assert sentences.get(name, f"{name} is not a regular file") in str(in_time(lambda: runs.load(folder)))
        assert in_time(lambda: list(runs.find(tmp_path))) is None
    assert isinstance(in_time(lambda: runs.create(folder, resume=True)), StoreError)
    assert in_time(lambda: cli.main(["runs", str(tmp_path)])) is None
    assert in_time(lambda: cli.main(["doctor", str(folder)])) is None


def test_a_report_does_not_follow_a_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, thesis = small(tmp_path / "run"), tmp_path / "thesis.tex"
    thesis.write_text("years of work")
    (folder / "report.html").symlink_to(thesis)
    assert cli.main(["report", str(folder)]) == 0
    assert thesis.read_text() == "years of work"
    assert "<html" in (folder / "report.html").read_text()
    assert not (folder / "report.html").is_symlink()
    (folder / "report.html").unlink()
    os.mkfifo(folder / "report.html")
    assert in_time(lambda: cli.main(["report", str(folder)])) is None
    assert "is not a regular file, so nothing is written to it" in capsys.readouterr().err
    assert not list(folder.glob(".*.part"))


def test_a_saved_figure_does_not_follow_a_link(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    from richter.report.figures import save
    for kind in ("svg", "pdf"):
        (tmp_path / kind).write_text("years of work")
        (tmp_path / f"curves.{kind}").symlink_to(tmp_path / kind)
    save(Figure(), tmp_path / "curves")
    assert [(tmp_path / kind).read_text() for kind in ("svg", "pdf")] == ["years of work"] * 2
    assert (tmp_path / "curves.svg").read_text().startswith("<?xml")


def test_objects_that_are_no_folder_do_not_keep_a_writer_waiting(tmp_path: Path) -> None:
    folder = small(tmp_path / "run")
    (folder / "objects").rename(tmp_path / "objects")
    os.mkfifo(folder / "objects")
    assert "objects is not a folder" in str(in_time(lambda: runs.create(folder, resume=True).close()))


@pytest.mark.parametrize("name", ["run.db", "run.db-wal", "object"])
def test_a_file_that_is_nearly_nothing_but_holes_is_not_read(tmp_path: Path, name: str) -> None:
    """Some kilobytes on the disk: what a reader may hold, and how long it may take, goes by the size of a file."""
    with runs.create(tmp_path / "run") as run:
        run.array("noise", np.random.default_rng(0).normal(size=140_000))
    path = tmp_path / "run" / name if name != "object" else next((tmp_path / "run" / "objects").iterdir())
    with path.open("ab") as file:
        file.write(bytes(4096))
        file.truncate(2 ** 40)
    raised = in_time(lambda: runs.load(tmp_path / "run").array("noise"))
    assert re.search(r"has a size of 1,099,511,627,776 bytes, but only [\d,]+ are on the disk", str(raised)), raised


def test_a_run_inside_of_another_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("outer", "outer/inner", "other/a"):
        runs.create(tmp_path / name).close()
    assert [run.path.relative_to(tmp_path).as_posix() for run in runs.find(tmp_path)] == ["other/a", "outer", "outer/inner"]
    assert cli.main(["runs", str(tmp_path)]) == 0
    assert "outer/inner" in capsys.readouterr().out


def test_nothing_is_written_into_a_run_that_took_the_place_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, scalars, large arrays, states: refused from the next write on, and written again when the folder is back."""
    monkeypatch.setattr(arrays, "LARGE", 1000)
    run = runs.create(tmp_path / "run")
    run.scalars(0, loss=1.0)
    (tmp_path / "run").rename(tmp_path / "away")
    refused = [lambda: run.scalars(1, loss=1.0), lambda: run.rows([Row(1, "0", "m", 1.0)]), lambda: run.describe(a=1), run.sync,
               lambda: run.array("noise", np.random.default_rng(0).normal(size=999)),
               lambda: run.keep_state(lambda path: path.write_bytes(b"state"))]
    for sentence in ("No such file or directory", "another run is in its place"):
        for write in refused:
            with pytest.raises(StoreError, match=f"could not be written: {sentence}. Was it deleted or moved"):
                write()
        if not (tmp_path / "run").exists():
            runs.create(tmp_path / "run", {"another": "run"}).close("finished")
            before = sorted((p, p.stat().st_size) for p in (tmp_path / "run").rglob("*"))
    assert sorted((p, p.stat().st_size) for p in (tmp_path / "run").rglob("*")) == before
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "away").rename(tmp_path / "run")
    run.scalars(2, loss=2.0)
    run.finish()
    assert runs.load(tmp_path / "run").scalars("loss").value.tolist() == [1.0, 2.0]


def test_a_file_whose_blocks_are_counted_late_has_no_holes(tmp_path: Path) -> None:
    """As some file systems do for some seconds."""
    (tmp_path / "run.db").write_bytes(bytes(2 ** 20))
    late = SimpleNamespace(st_size=2 ** 27, st_blocks=1)
    assert not files._hollow(tmp_path / "run.db", late)
    (tmp_path / "run.db").write_bytes(bytes(2 ** 19))
    assert files._hollow(tmp_path / "run.db", late)


def test_nothing_is_written_to_a_log_that_was_deleted(tmp_path: Path) -> None:
    run = runs.create(tmp_path / "run")
    run.scalars(0, loss=1.0)
    (tmp_path / "run" / "run.db-wal").unlink()
    for write in (lambda: run.rows([Row(1, "0", "m", 1.0)]), lambda: run.scalars(1, other=1.0), lambda: run.describe(a=1)):
        with pytest.raises(StoreError, match="Was it deleted or moved"):
            write()
    run.close()
    assert runs.load(tmp_path / "run").scalars("loss").value.tolist() == [1.0]


def write_in_turns(folder: str, resume: bool) -> None:
    """A step of everything for each line that is read, acknowledged by another."""
    import sys

    import numpy as np

    from richter import runs
    from richter.core import Row
    from richter.runs import format as provenance
    from richter.runs import sqlite

    provenance.revision, sqlite.RECENT = lambda: None, 20
    name, run = f"resumed {resume}", runs.create(folder, resume=resume)
    print("begun", flush=True)
    for line in sys.stdin:
        step = int(line)
        run.scalars(step, {name: step})
        run.scalars(step, {name: float(step)})
        run.describe(same="always")
        run.scalars(step, {"both": float(step)})
        run.rows([Row(step, name, f"m {step}", step, note=f"{name} {step}")])
        run.array(name, np.full(3, step), step=step)
        print(step, flush=True)
    run.finish()


def test_two_writers_destroy_nothing(tmp_path: Path) -> None:
    """Somebody has deleted the lock of a run that is still written, and goes on with it."""
    folder = tmp_path / "run"
    with child(write_in_turns, str(folder), False) as one:
        assert one.stdout.readline() == b"begun\n"
        (folder / "writer.lock").unlink()
        with child(write_in_turns, str(folder), True) as other:
            assert other.stdout.readline() == b"begun\n"
            turns = np.random.default_rng(0).integers(2, size=40)
            for step, turn in enumerate(turns.tolist()):
                (one, other)[turn].stdin.write(b"%d\n" % step)
                assert (one, other)[turn].stdout.readline() == b"%d\n" % step, (one, other)[turn].communicate()
            assert ended(other) == ended(one) == ""
    run = runs.load(folder)
    assert run.scalars("both").value.tolist() == list(range(40))
    for turn, name in enumerate(("resumed False", "resumed True")):
        steps = np.flatnonzero(turns == turn).tolist()
        assert run.scalars(name).value.tolist() == steps
        rows = run.frame[run.frame.layer == name]
        assert [rows.step.tolist(), rows.value.tolist()] == [steps, steps]
        assert rows.note.tolist() == [f"{name} {step}" for step in steps]
        assert [run.array(name, step=step).tolist() for step in steps] == [[step] * 3 for step in steps]
    assert [session.how for session in run.sessions] == ["finished"] * 2


# ------------------------------------------------------------------------------------------------------------------- names


def nested(depth: int) -> Any:
    settings: Any = {"lr": 0.1}
    for _ in range(depth):
        settings = {"a": settings}
    return settings


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"name": "a\ud800b"}, r"settings\['name'\] is 'a\\ud800b', which contains characters that UTF-8 does not have"),
    ({"a\udcff": 1}, "a key of settings is"), ([Path("\udcff")], r"settings\[0\] is"),
    (nested(2000), "nested more than 100 levels deep, or contains itself"), (nested(150), "nested more than 100 levels deep")])
def test_settings_that_no_record_can_hold(tmp_path: Path, settings: Any, sentence: str) -> None:
    with pytest.raises(StoreError, match=sentence):
        runs.create(tmp_path / "run", settings)
    assert not (tmp_path / "run").exists()
    with runs.create(tmp_path / "deep", nested(90)) as run:
        assert run.run.settings == nested(90)


def test_half_characters_of_strangers_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = small(tmp_path / "run")
    say(folder / "run.db", """UPDATE meta SET value = '{"a\\ud800": "\\udfff", "\\ud83d\\ude00": 1}' WHERE key = 'settings'""")
    sealed(folder / "run.db")
    assert runs.load(folder).settings == {"a?": "?", "\U0001f600": 1}
    assert cli.main(["report", str(folder)]) == 0


@pytest.mark.parametrize("depth", [380, 600, 980, 100_000])
def test_deep_settings_of_strangers_are_shown_or_refused(tmp_path: Path, depth: int) -> None:
    from richter.report.plotdata import flat
    folder = small(tmp_path / "run")
    deep = "[" * depth + "]" * depth
    say(folder / "run.db", f"UPDATE meta SET value = '{deep}' WHERE key = 'settings'")
    sealed(folder / "run.db")
    if depth < 400:
        assert flat(runs.load(folder).settings) == {"settings": deep}
    else:
        with pytest.raises(StoreError, match="a record of this run is damaged"):
            flat(runs.load(folder).settings)


def test_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    """As on a disk of another time: it is refused for a new run, and listed and read if it is there."""
    name = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    with pytest.raises(StoreError, match="with valid UTF-8 characters"):
        runs.create(name)
    os.rename(small(tmp_path / "run"), name)
    done = subprocess.run([sys.executable, "-m", "richter.cli", "runs", tmp_path], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert rb"caf\udce9" in done.stdout
    for command in (["doctor", name], ["report", name], ["runs", name]):
        done = subprocess.run([sys.executable, "-m", "richter.cli", *command], capture_output=True, check=False)
        assert b"Traceback" not in done.stderr, done.stderr


def test_names_do_not_steer_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202eevil\r"
    with runs.create(tmp_path / f"run{hostile}") as run:
        run.rows([Row(step, f"layer{hostile}", "nfc", NAN, note=hostile) for step in range(2)])
        run.close(f"failed: {hostile}\nmore")
    folder = str(tmp_path / f"run{hostile}")
    for command in (["runs", str(tmp_path)], ["doctor", folder], ["doctor", f"{folder}x"], ["report", folder],
                    ["runs", f"{folder}x"], ["compare", folder, folder], ["doctor", folder, "--json"],
                    ["runs", str(tmp_path), "--json"]):
        cli.main(command)
        shown = "".join(capsys.readouterr())
        assert not set("\x1b\x07\x9b\u202e\r") & set(shown), (command, shown)
        assert "evil" in shown or command[0] == "doctor", command


def test_what_is_hidden_becomes_visible() -> None:
    assert visible("a\x1b[1m\n\tb\u202e\ud800\x85") == "a\\x1b[1m\n\tb\\u202e\\ud800\\x85"
    assert visible("a\n\tb", lines=False) == "a\\n\\tb"
    assert visible("größe 数 \U0001f600") == "größe 数 \U0001f600"


# -------------------------------------------------------------------------------------------------------------------- ends


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def end_by(folder: str, how: str) -> None:
    """A program that logs and ends itself in one way or another, without a word to its run."""
    import sys

    from richter import runs

    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    run = runs.create(folder)
    run.scalars(0, loss=1.0)
    if how == "caught":
        try:
            sys.exit("diverged")
        except SystemExit:
            run.scalars(1, loss=0.5)
    elif how == "unspeakable":
        raise Unspeakable
    elif how != "nothing":
        sys.exit({"diverged": "diverged", "zero": 0, "three": 3}.get(how))


@pytest.mark.parametrize(("how", "status"), [
    ("diverged", "failed: SystemExit: diverged"), ("three", "failed: SystemExit: 3"), ("zero", "finished"), ("none", "finished"),
    ("nothing", "finished"), ("caught", "finished"),
    ("unspeakable", "failed: Unspeakable: (its text could not be made: RuntimeError)")])
def test_how_a_program_ended_is_recorded(tmp_path: Path, how: str, status: str) -> None:
    with child(end_by, str(tmp_path / "run"), how) as process:
        process.communicate()
    assert runs.load(tmp_path / "run").status == status


@pytest.mark.parametrize(("error", "status"), [
    (SystemExit("diverged"), "failed: SystemExit: diverged"), (SystemExit(0), "finished"), (KeyboardInterrupt(), "interrupted"),
    (Unspeakable(), "failed: Unspeakable: (its text could not be made: RuntimeError)")])
def test_how_a_block_ended_is_recorded(tmp_path: Path, error: BaseException, status: str) -> None:
    with pytest.raises(type(error)), runs.create(tmp_path / "run"):
        raise error
    assert runs.load(tmp_path / "run").status == status


def exiting(settings: int, run: Any) -> None:
    if settings == 0:
        sys.exit("diverged")
    if settings == 1:
        raise Unspeakable


@pytest.mark.parametrize("workers", [1, 2])
def test_a_task_that_exits_ends_no_other(tmp_path: Path, workers: int) -> None:
    outcomes = sweep(exiting, [0, 1, 2], tmp_path, workers=workers)
    assert [outcome.error for outcome in outcomes] == [
        "SystemExit: diverged", "Unspeakable: (its text could not be made: RuntimeError)", None]
    assert outcomes[0].run.status == "failed: SystemExit: diverged"
    assert "SystemExit" in json.dumps(outcomes[0].run.about["traceback"])


def sync_late(folder: str) -> None:
    """Count how often the disk is asked, by a clock that is ours."""
    import time

    from richter import runs
    from richter.runs import writer
    seen, now = [], [100.0]
    writer.sync, time.monotonic = seen.append, lambda: now[0]  # type: ignore[assignment]
    run = runs.create(folder)
    for step in range(100):
        now[0] += 1.0
        run.scalars(step, loss=1.0)
    assert len(seen) == 3, len(seen)
    run.sync()
    assert len(seen) == 4
    run.close()
    assert len(seen) == 5


def test_the_disk_is_asked_every_thirty_seconds(tmp_path: Path) -> None:
    ended(child(sync_late, str(tmp_path / "run")))
