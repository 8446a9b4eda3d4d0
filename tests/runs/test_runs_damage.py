"""Damage: of a file in which bits have flipped, that was cut, or of which pages are torn or old, every answer is what was written
or an error, and never another number."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from runs_helpers import StoreError, attempted, child, ended, runs, small


def answers(run: Any) -> dict[str, str]:
    """All that a run answers, by question; "refused" in the place of what is refused as damaged."""
    from functools import partial

    import numpy as np

    def shown(value: Any) -> str:
        if hasattr(value, "to_csv"):
            return value.to_csv()
        if isinstance(value, np.ndarray):
            return f"{value.dtype} {value.shape} {value.tobytes().hex()}"
        if isinstance(value, dict):
            return repr({key: shown(v) for key, v in value.items()})
        return repr([shown(v) for v in value]) if type(value) in (list, tuple) or hasattr(value, "_fields") else repr(value)

    asked = {name: partial(getattr, run, name) for name in (
        "settings", "seeds", "about", "sessions", "failures", "measures", "layers", "scalar_names", "steps", "last", "frame",
        "scalar_frame", "table", "snapshots", "ends", "arrays", "claims", "figures")}
    asked["curves"] = lambda: run.curves(run.measures, run.layers)
    asked["each array"] = lambda: {(k, n, s): run.array(n, k, s) for k, n, s in run.arrays}
    asked["each shape"] = lambda: {(k, n, s): run.shape(n, k, s) for k, n, s in run.arrays}
    asked["the last arrays"] = lambda: {(k, n): run.array(n, k) for k, n, _ in run.arrays}
    asked["each figure"] = lambda: {f: run.figure(*f) for f in run.figures}
    asked["state"] = lambda: (run.state_name("initial"), run.state_name("previous"), run.state_name("never"))
    asked["each curve"] = lambda: {(k, m): run.series(m, k) for m in run.measures for k in run.layers if run.has(m, k)}
    asked["each scalar"] = lambda: {name: run.scalars(name) for name in run.scalar_names}
    result = {}
    for question, ask in asked.items():
        try:
            result[question] = shown(ask())
        except OSError as why:
            if type(why).__name__ != "StoreError":  # of this process's modules, or of the tests' own
                raise
            result[question] = "refused"
    return result


def write_much(folder: str, part: int) -> None:
    """Two parts of a run with many pages of everything; by the first part an older state of the same file."""
    import numpy as np

    from richter import runs
    from richter.core import Row
    from richter.instrument.snapshot import Snapshot
    from richter.runs import format as provenance
    from richter.runs import sqlite
    sqlite.RECENT, sqlite.FEW, provenance.revision = 50, 3, lambda: None
    with runs.create(folder, {"lr": 0.1, "text": "x" * 3000}, seeds={"data": 1}, resume=True) as run:
        for step in range(20 * part, 20 * part + 20):
            rows = [Row(step, f"layer {i}", f"measure {j}", step + i / 8 + j, 0.5 if j else float("nan"), f"note {step % 7}" * i)
                    for i in range(2) for j in range(3)]
            run.snapshot(Snapshot(tuple(rows), step, {"*": f"at {step}"}, arrays={("layer 0", "agop"): np.eye(12) * step}))
            run.scalars(step, loss=1 / (1 + step), accuracy=float(step))
        run.array("noise", np.random.default_rng(part).normal(size=3000), step=part)
        for k in range(part + 1):
            run.claim(f"claim {k}", {"value": k, "holds": True})
            run.figure(f"figure {k}", "svg", b"<svg/>" * 900)
        run.describe(model="MLP", part=part)


def damage(folder: str, older: str, times: int, seed: int) -> None:
    """Harm a copy of the file, ask everything, compare with what was answered before."""
    import random
    import sys
    from pathlib import Path

    from richter import runs
    from richter.core import StoreError
    draw, file = random.Random(seed), Path(folder) / "run.db"
    whole, old = file.read_bytes(), Path(older).read_bytes() if older else b""
    before = answers(runs.load(folder))
    assert "refused" not in before.values(), before
    counts = {"unchanged": 0, "refused": 0}
    kinds = ["flip", "flip", "flip", "flips", "cut", "zeros"] + ["torn", "torn", "lost"] * bool(older)
    for k in range(times):
        data, kind = bytearray(whole), kinds[k % len(kinds)]
        page = 4096 * draw.randrange(len(whole) // 4096)
        if kind in ("flip", "flips"):
            for _ in range(1 if kind == "flip" else 5):
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif kind == "cut":
            del data[draw.randrange(len(data)):]
        elif kind == "zeros":
            data[page:page + 4096] = bytes(4096)
        else:
            page %= len(old)
            for sector in range(page, page + 4096, 512):
                if kind == "lost" or draw.random() < 0.5:
                    data[sector:sector + 512] = old[sector:sector + 512]
        file.write_bytes(data)
        try:
            run = runs.load(folder)
        except StoreError:
            counts["refused"] += 1
            continue
        now = answers(run)
        run.close()
        for question, value in now.items():
            assert value in (before[question], "refused"), (seed, k, kind, question, before[question][:200], value[:200])
        counts["refused" if "refused" in now.values() else "unchanged"] += 1
    file.write_bytes(whole)
    assert answers(runs.load(folder)) == before
    assert "torch" not in sys.modules
    print(counts["refused"], counts["unchanged"])


@pytest.fixture(scope="module")
def much(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of many pages, and its file as it was halfway."""
    folder = tmp_path_factory.mktemp("much") / "run"
    older = folder.parent / "older.db"
    ended(child(write_much, str(folder), 0))
    shutil.copyfile(folder / "run.db", older)
    ended(child(write_much, str(folder), 1))
    assert (folder / "run.db").stat().st_size > 25 * 4096
    return folder, older


def damaged(folder: Path, older: Path | str, times: int, seed: int, seconds: float = 120) -> tuple[int, int]:
    refused, unchanged = ended(child(damage, str(folder), str(older), times, seed, needs=(answers,)), seconds).split()
    print(f"{times} damaged files: {refused} refused, {unchanged} read as they were")
    return int(refused), int(unchanged)


def test_damage_is_refused_or_changes_nothing(much: tuple[Path, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(much[0], tmp_path / "run"))
    refused, unchanged = damaged(folder, much[1], 27, 0)
    assert refused > 10
    assert unchanged > 0


def test_damage_of_a_small_run_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    assert damaged(small(tmp_path / "run"), "", 36, 0)[0] > 10


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 5))
def test_much_damage_is_refused_or_changes_nothing(much: tuple[Path, Path], tmp_path: Path, seed: int) -> None:
    damaged(Path(shutil.copytree(much[0], tmp_path / "run")), much[1], 250, seed, 900)
    damaged(small(tmp_path / "small"), "", 250, seed, 900)


def test_every_bit_of_the_last_rows_counts(tmp_path: Path) -> None:
    """Of a run that was killed before its rows were put to their curves: each bit of the page they are on."""
    with child(killed_after, str(tmp_path / "run"), 3, True) as process:
        assert process.wait() == -signal.SIGKILL
    refused, unchanged = damaged(tmp_path / "run", "", 30, 1)
    assert refused > 5, unchanged


# -------------------------------------------------------------------------------------------------------------------- logs


def killed_after(folder: str, writes: int, checkpointed: bool) -> None:
    """Be killed with a log beside the file; say after each write what a reader sees then."""
    import os
    import signal

    from richter import runs
    from richter.core import Row

    def say() -> None:
        if "answers" in globals():
            print(repr(answers(runs.load(folder))), flush=True)

    run = runs.create(folder, {"lr": 0.1})
    say()
    for step in range(writes):
        run.rows([Row(step, str(i), f"m {step // 4}", step + i) for i in range(20)])
        say()
        run.scalars(step, loss=float(step))
        say()
        if step % 3 == 0:
            run.array("a", [step] * 9, step=step)
            say()
    if checkpointed:
        run.run.close()
        run._database.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    os.kill(os.getpid(), signal.SIGKILL)


def harm_logs(folder: Path, times: int, seed: int) -> None:
    """A log that was cut, or in which a bit has flipped, ends there: what is read is a moment that there was, or refused.
    (Nothing in a log can tell that more had followed; a power cut leaves the same.)"""
    import ast
    import random

    (folder / "now").mkdir()
    with child(killed_after, str(folder / "run"), 8, False, needs=(answers,)) as process:
        lines = process.stdout.read().decode().splitlines()
        assert process.wait() == -signal.SIGKILL, process.stderr.read().decode()
    moments = [ast.literal_eval(line) for line in lines]
    assert len(moments) == 20
    files = {path.name: path.read_bytes() for path in (folder / "run").glob("run.db*") if not path.name.endswith("-shm")}
    assert set(files) == {"run.db", "run.db-wal"}
    draw, seen = random.Random(seed), []
    for k in range(times):
        shutil.rmtree(folder / "now")
        (folder / "now").mkdir()
        log = bytearray(files["run.db-wal"])
        if k % 2:
            del log[draw.randrange(len(log)):]
        else:
            log[draw.randrange(len(log))] ^= 1 << draw.randrange(8)
        (folder / "now" / "run.db").write_bytes(files["run.db"])
        (folder / "now" / "run.db-wal").write_bytes(log)
        try:
            run = runs.load(folder / "now")
        except StoreError:
            seen.append(-1)
            continue
        now = answers(run)
        run.close()
        if "refused" not in now.values() and run.sessions:
            assert now in moments, (seed, k)
            seen.append(moments.index(now))
    assert len(set(seen)) > 3


def test_a_harmed_log_shows_an_earlier_moment(tmp_path: Path) -> None:
    harm_logs(tmp_path, 12, 0)


@pytest.mark.long
def test_many_harmed_logs_show_an_earlier_moment(tmp_path: Path) -> None:
    harm_logs(tmp_path, 250, 1)


@pytest.mark.parametrize("harm", ["log cut", "log emptied", "log flipped", "log deleted", "file cut", "file flipped", "replaced"])
def test_what_is_done_to_a_file_that_is_open_is_seen(tmp_path: Path, harm: str) -> None:
    """Also by a reader who has read all of it before: what it shows is what a new one does."""
    now = tmp_path / "now"
    with child(killed_after, str(now), 8, False) as process:
        assert process.wait() == -signal.SIGKILL, process.stderr.read().decode()
    if not harm.startswith("log"):
        runs.create(now, resume=True).close()
    reader = runs.load(now)
    before = answers(reader)
    assert "refused" not in before.values()
    path = now / ("run.db-wal" if harm.startswith("log") else "run.db")
    if harm.endswith(("cut", "emptied")):
        os.truncate(path, 0 if harm.endswith("emptied") else path.stat().st_size // 2 if "log" in harm else 4096)
    elif harm.endswith("flipped"):
        with open(path, "r+b") as f:
            f.seek(path.stat().st_size // 2)
            f.write(bytes(4096))
    elif harm == "replaced":  # in its place, by another program
        path.write_bytes((small(tmp_path / "other") / "run.db").read_bytes())
    else:
        path.unlink()
    after = answers(reader)
    reader.close()
    fresh, _ = attempted(lambda: answers(runs.load(now)))
    assert after == (fresh or dict.fromkeys(before, "refused"))
    assert after != before


def test_a_log_that_is_cut_while_it_is_written_is_not_hidden_from_a_reader(tmp_path: Path) -> None:
    writer = runs.create(tmp_path / "run")
    for step in range(20):
        writer.scalars(step, loss=float(step))
    reader = runs.load(tmp_path / "run")
    before = answers(reader)
    log = tmp_path / "run" / "run.db-wal"
    whole = log.read_bytes()
    os.truncate(log, len(whole) // 2)
    after = answers(reader)
    assert "refused" in after.values()
    assert all(after[k] in ("refused", before[k]) for k in before)
    log.write_bytes(whole)
    assert answers(reader) == before
    writer.close()


def test_a_damaged_run_is_not_written_on(tmp_path: Path) -> None:
    """Each page in turn is made zeros; to go on with what is left is refused in a sentence, or all is as it was."""
    folder = small(tmp_path / "run")
    whole = (folder / "run.db").read_bytes()
    refused = 0
    for page in range(len(whole) // 4096):
        (folder / "run.db").write_bytes(whole[:4096 * page] + bytes(4096) + whole[4096 * (page + 1):])
        run, sentence = attempted(lambda: runs.create(folder, resume=True))
        if run is not None:
            run.close()
        else:
            refused += 1
            assert "damaged" in sentence or "not a database" in sentence or "never begun" in sentence, sentence
    assert refused > len(whole) // 4096 - 3
