"""Power cuts: of what was written after the last time the disk was asked to keep it, any part may be gone or torn. What ``sync``,
``close`` and ``finish`` have acknowledged is there, nothing else is wrong, and the run goes on."""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from runs_helpers import DATA, attempted, child, ended, runs


def write_and_sync(folder: str) -> None:
    """Rows, scalars, arrays and states of growing steps, in several sessions; what is durable is said in a file beside."""
    import os

    import numpy as np

    from richter import runs
    from richter.core import Row
    from richter.runs import format as provenance
    from richter.runs import sqlite, writer
    sqlite.RECENT, writer.SYNC, provenance.revision = 60, 1e9, lambda: None  # rows are moved often
    step, said = 0, os.open(os.path.join(os.path.dirname(folder), "said"), os.O_WRONLY | os.O_CREAT)

    def durable() -> None:
        os.write(said, b"%08d\n" % step)

    for session in range(3):
        run = runs.create(folder, {"lr": 0.1}, resume=True)
        run._database.connection.execute("PRAGMA wal_autocheckpoint=20")  # the log goes into the file often
        for _ in range(12):
            step += 1
            run.rows([Row(step, str(i), "m", step + i, 0.5, f"note {i}") for i in range(5)])
            run.scalars(step, loss=step / 2)
            noise = np.random.default_rng(step).normal(size=140_000 if step % 6 == 0 else 10)
            run.arrays({"a": np.full(5, step), "b": noise}, step=step)
            if step % 4 == 0:
                run.sync()
                durable()
        run.close("finished" if session == 2 else None)
        durable()


class Happened(NamedTuple):
    """One line: w(rite), t(runcate), s(ync of a file, with its content), d (sync of a folder), u(nlink), r(ename),
    l(ink)."""

    kind: str
    path: str
    offset: int
    data: bytes


def recorded(path: Path) -> Iterator[Happened]:
    data, place = path.read_bytes(), 0
    while place < len(data):
        kind, length, offset, n = struct.unpack_from("<cIqQ", data, place)
        name, content = data[place + 21:place + 21 + length], data[place + 21 + length:place + 21 + length + n]
        yield Happened(kind.decode(), name.decode(), offset, content)
        place += 21 + length + n


class Disk:
    """What is on it for certain, and what is on its way. Names (of new, renamed and deleted files) come to the disk in their
    order, and at the latest with the next sync of anything, as file systems with a journal see to."""

    def __init__(self) -> None:
        self.files: list[tuple[bytes, list[Happened]]] = []  # each file that there ever was: what is kept, what is on its way
        self.now: dict[str, int] = {}  # which file a name stands for
        self.names: dict[str, int] = {}  # the same on the disk
        self.named: list[tuple[str, int | None]] = []  # names that are given or (None) taken away, and not yet on the disk

    def hear(self, h: Happened) -> None:
        if h.kind in "wts" and h.path not in self.now:
            self.files.append((b"", []))
            self._give(h.path, len(self.files) - 1)
        if h.kind in "wt":
            self.files[self.now[h.path]][1].append(h)
        elif h.kind == "s":
            self.files[self.now[h.path]] = h.data, []
        elif h.kind in "rl":
            self._give(h.data.decode(), self.now[h.path])
        if h.kind in "ru":
            self.now.pop(h.path, None)
            self.named.append((h.path, None))
        if h.kind in "sd":
            self._arrive(len(self.named))

    def _give(self, name: str, file: int) -> None:
        self.now[name] = file
        self.named.append((name, file))

    def _arrive(self, count: int) -> None:
        for name, file in self.named[:count]:
            if file is None:
                self.names.pop(name, None)
            else:
                self.names[name] = file
        del self.named[:count]

    def left(self, draw: random.Random) -> dict[str, bytes]:
        """After the power is cut: of what is on its way nothing, all, or any part of it, by sectors of 512 bytes."""
        how = draw.choice(["nothing", "all", "some", "some", "some"])
        self._arrive({"nothing": 0, "all": len(self.named)}.get(how, draw.randint(0, len(self.named))))
        files = {}
        for path, file in self.names.items():
            kept, waiting = self.files[file]
            data = bytearray(kept)
            for h in waiting:
                if how == "nothing" or (how == "some" and draw.random() < 0.3):
                    continue
                if h.kind == "t":
                    data = data[:h.offset] + bytes(max(0, h.offset - len(data)))
                    continue
                data += bytes(max(0, h.offset + len(h.data) - len(data)))
                for start in range(0, len(h.data), 512):
                    if how == "all" or draw.random() < 0.8:
                        end = min(start + 512, len(h.data))
                        data[h.offset + start:h.offset + end] = h.data[start:end]
            files[path] = bytes(data)
        return files


def check(folder: Path, durable: int) -> None:
    """All up to the durable step, and of later ones whole writes, each right, with no gap."""
    import numpy as np
    run, sentence = attempted(lambda: runs.load(folder))
    if run is None:
        assert not durable, sentence
        assert "contains no run" in sentence or "was never begun" in sentence, sentence
        return
    frame = run.frame
    counts = frame.groupby("step").size()
    assert list(counts.index) == list(range(1, len(counts) + 1))
    assert len(counts) >= durable
    assert set(counts) <= {5}
    assert (frame.value == frame.step + frame.layer.astype(int)).all()
    assert (frame.note == [f"note {k}" for k in frame.layer]).all()
    if "loss" in run.scalar_names:
        assert run.scalars("loss").value.tolist() == [s / 2 for s in run.scalars("loss").step]
        assert len(run.scalars("loss").step) >= max(durable, len(counts) - 1)
    steps = {name: {s for _, n, s in run.arrays if n == name} for name in ("a", "b")}
    assert steps["a"] == steps["b"]
    assert set(range(1, max(durable, len(counts) - 1) + 1)) <= steps["a"]
    for step in steps["a"]:
        assert run.array("a", step=step).tolist() == [step] * 5
        noise = np.random.default_rng(step).normal(size=140_000 if step % 6 == 0 else 10)
        assert np.array_equal(run.array("b", step=step), noise)
    run.close()


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Happened]]:
    """Where the run was, and all that happened to the files there."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("there is no compiler to make a recorder with")
    place = tmp_path_factory.mktemp("power")
    (place / "disk").mkdir()
    library = place / "recorder.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, DATA / "recorder.c", "-ldl", "-lpthread"], check=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"LD_PRELOAD": library, "RECORD_BELOW": f"{place / 'disk'}/", "RECORD_TO": place / "record"}.items():
            patch.setenv(name, str(value))
        writing = child(write_and_sync, str(place / "disk" / "run"))
    ended(writing)
    return place / "disk", list(recorded(place / "record"))


def cut(record: tuple[Path, list[Happened]], place: Path, times: int, seed: int) -> None:
    before, happened = record
    assert sum(h.kind == "s" for h in happened) > 20
    draw, durable_seen = random.Random(seed), set()
    for k in range(times):
        disk, durable = Disk(), 0
        for h in happened[:draw.randrange(len(happened) + 1)]:
            if os.path.basename(h.path) == "said":
                durable = int(h.data)
            else:
                disk.hear(h)
        durable_seen.add(durable)
        folder = place / str(k)
        (folder / "run").mkdir(parents=True)
        for path, data in disk.left(draw).items():
            to = folder / Path(path).relative_to(before)
            to.parent.mkdir(exist_ok=True)
            to.write_bytes(data)
        check(folder / "run", durable)
        goes_on(folder / "run", durable)
        shutil.rmtree(folder)
    assert len(durable_seen) > min(times // 4, 8)


def goes_on(folder: Path, durable: int) -> None:
    with runs.create(folder, resume=True) as run:
        run.scalars(10 ** 6, loss=5e5)
    seen: Any = runs.load(folder)
    assert seen.scalars("loss").value.tolist()[-1] == 5e5
    assert seen.status == "finished"
    assert len(seen.frame) >= 5 * durable
    seen.close()


def test_a_power_cut_leaves_what_was_durable(record: tuple[Path, list[Happened]], tmp_path: Path) -> None:
    cut(record, tmp_path, 12, 0)


@pytest.mark.long
def test_many_power_cuts_leave_what_was_durable(record: tuple[Path, list[Happened]], tmp_path: Path) -> None:
    cut(record, tmp_path, 250, 1)
    print("250 power cuts")


def test_without_a_sync_the_last_writes_may_be_gone(record: tuple[Path, list[Happened]]) -> None:
    """So that the test above could fail: at most moments some of what was written to the log is not on the disk."""
    place, happened = record
    disk, log, moments = Disk(), str(place / "run" / "run.db-wal"), 0
    for h in happened:
        if os.path.basename(h.path) != "said":
            disk.hear(h)
            moments += log in disk.now and bool(disk.files[disk.now[log]][1])
        else:
            assert log not in disk.now or not disk.files[disk.now[log]][1]
    assert moments > len(happened) / 2
