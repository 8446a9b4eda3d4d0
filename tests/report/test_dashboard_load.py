"""A dashboard under load: connections without use, requests that never end, many runs, file systems that do not answer."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("uvicorn")

from test_dashboard import client, make, serving

from richter.core import StoreError
from richter.report import listing, shelf
from richter.runs import Run, create
from richter.runs import format as arrays

if TYPE_CHECKING:
    from browser import Browser

pytest_plugins = ["browser"]
FEW = "import richter.report.connections as c; c.MOST = 40"


def opened(address: str, number: int, sent: bytes) -> list[socket.socket]:
    host, port = address.removeprefix("http://").rstrip("/").split(":")
    sockets = []
    for _ in range(number):
        s = socket.create_connection((host, int(port)), timeout=20)
        with contextlib.suppress(OSError):  # closed already
            s.sendall(sent)
        sockets.append(s)
    return sockets


def asked(address: str) -> list[str]:
    with urllib.request.urlopen(f"{address}api/runs", timeout=20) as reply:
        return [run["name"] for run in json.load(reply)["runs"]]


def closed(s: socket.socket, within: float) -> bool:
    s.settimeout(within)
    try:
        return s.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def taken(s: socket.socket, most: int) -> int:
    """Bytes of an answer that is read now, until there are so many or its connection is closed."""
    s.settimeout(10)
    number = 0
    with contextlib.suppress(ConnectionError):
        while number < most and (part := s.recv(2 ** 20)):
            number += len(part)
    return number


@pytest.mark.parametrize("sent", [b"", b"GET /api/runs HTTP/1.1\r\nHost: localh",
                                  b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\n"])
def test_connections_that_ask_nothing_keep_nobody_out(tmp_path: Path, sent: bytes) -> None:
    make(tmp_path / "a")
    with serving(tmp_path, before=FEW) as address, contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(s) for s in opened(address, 120, sent)]
        assert asked(address) == ["a"]
        assert all(closed(s, 10.0) for s in sockets[:80])  # more than there may be: the oldest
        assert not any(closed(s, 0.01) for s in sockets[-38:])
        assert asked(address) == ["a"]


def test_a_connection_that_is_used_is_not_the_oldest(tmp_path: Path) -> None:
    make(tmp_path / "a")
    with serving(tmp_path, before=FEW) as address, contextlib.ExitStack() as stack:
        used = http.client.HTTPConnection(address.removeprefix("http://").rstrip("/"), timeout=20)
        for _ in range(8):
            used.request("GET", "/api/runs")
            used.auto_open = False  # a closed connection is an error from here on
            assert json.load(used.getresponse())["runs"][0]["name"] == "a"
            for s in opened(address, 20, b""):
                stack.enter_context(s)
        used.close()


@pytest.mark.parametrize("more", [pytest.param("", marks=pytest.mark.long), "Connection: close\r\n"])
def test_answers_that_nobody_takes_keep_nobody_out(tmp_path: Path, more: str) -> None:
    """Each has begun to be answered, and the rest waits: more of them than the process may have files."""
    make(tmp_path / "a")
    whole = f"GET /plotly.js HTTP/1.1\r\nHost: localhost\r\n{more}\r\n".encode()
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))"
    with serving(tmp_path, before=f"{limit}; {FEW}") as address, contextlib.ExitStack() as stack:
        size = len(urllib.request.urlopen(f"{address}plotly.js", timeout=20).read())
        sockets = []
        for _ in range(220):
            sockets += [stack.enter_context(s) for s in opened(address, 1, whole)]
            assert sockets[-1].recv(4) == b"HTTP"
        assert asked(address) == ["a"]
        assert taken(sockets[0], size) < size  # more than there may be: the oldest
        assert taken(sockets[-1], size) >= size  # who takes an answer gets all of it


@pytest.mark.long
def test_two_thousand_connections(tmp_path: Path) -> None:
    """As they come, with the limits as they are."""
    make(tmp_path / "a")
    with serving(tmp_path) as address, contextlib.ExitStack() as stack:
        for sent in (b"", b"GET /api/runs HTTP/1.1\r\nHost: localh"):
            for s in opened(address, 450, sent):
                stack.enter_context(s)
            assert asked(address) == ["a"]
        for _ in range(1100):  # and closed at once
            opened(address, 1, b"GET /")[0].close()
        assert asked(address) == ["a"]


# ---------------------------------------------------------------------------------------------------------------- many runs


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("many")
    first = make(store / "r0")
    for i in range(1, 300):
        shutil.copytree(first, store / f"r{i}")
    return store


def test_a_list_of_many_runs_is_there_before_they_are_read(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    real = listing.Listing._read

    def waiting(self: listing.Listing, name: str, path: Path) -> listing.RunSummary:
        go_on.wait(30)
        return real(self, name, path)

    monkeypatch.setattr(listing.Listing, "_read", waiting)
    monkeypatch.setattr(listing, "FIRST", 0.2)
    mine = shelf.Shelf(many)
    lines = mine.summaries()
    assert {line.name for line in lines} == {f"r{i}" for i in range(300)}
    assert {line.status for line in lines} == {listing.UNREAD}
    go_on.set()
    monkeypatch.setattr(listing, "FIRST", 60.0)
    ends = time.monotonic() + 60
    while listing.UNREAD in {line.status for line in mine.summaries()} and time.monotonic() < ends:
        time.sleep(0.05)
    assert {line.status for line in mine.summaries()} == {"finished"}
    mine.close()


def test_a_poll_reads_no_run_that_has_not_changed(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "SETTLED", 0.0)
    monkeypatch.setattr(listing, "FIRST", 60.0)
    monkeypatch.setattr(listing, "OFTEN", 0.0)
    mine, read = shelf.Shelf(many), list[str]()
    while any(line.verdict is None for line in mine.summaries()):
        time.sleep(0.05)
    monkeypatch.setattr(listing.Listing, "_read", lambda self, name, path: read.append(name))
    written = [mine.listing._written(line) for line in mine.summaries()]
    assert read == []
    assert all(mine.listing._written(line) is text for line, text in zip(mine.summaries(), written, strict=True))
    mine.close()


def test_runs_that_come_and_go_are_listed(tmp_path: Path) -> None:
    make(tmp_path / "a")
    c = client(tmp_path)

    def names() -> list[str]:
        return [run["name"] for run in c.get("/api/runs").json()["runs"]]

    assert names() == ["a"]
    make(tmp_path / "b")
    ends = time.monotonic() + 20
    while names() != ["a", "b"] and time.monotonic() < ends:
        time.sleep(0.05)
    shutil.rmtree(tmp_path / "a")
    while names() != ["b"] and time.monotonic() < ends:
        time.sleep(0.05)
    assert names() == ["b"]


# ----------------------------------------------------------------------------------------------- what does not answer


@contextlib.contextmanager
def stuck(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    """The file system of one run does not answer."""
    release, real = threading.Event(), Run.__init__

    def init(self: Run, path: Path) -> None:
        if Path(path).name == name:
            release.wait(60)
        real(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "__init__", init)
        patch.setattr(shelf, "PATIENCE", 0.3)
        try:
            yield
        finally:
            release.set()


def test_a_run_that_does_not_open_keeps_no_other_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "a")
    make(tmp_path / "b")
    mine = shelf.Shelf(tmp_path)
    with stuck(monkeypatch, "a"):
        begun, errors = threading.Event(), list[str]()

        def ask() -> None:
            begun.set()
            try:
                with mine.open("a"):
                    raise AssertionError
            except StoreError as why:
                errors.append(str(why))

        thread = threading.Thread(target=ask)
        thread.start()
        begun.wait(10)
        with mine.open("b") as run:
            assert run.last == 4
        thread.join(30)
        assert "has not answered" in errors[0]
        ends = time.monotonic() + 20
        while listing.UNREAD in {s.status for s in mine.summaries()} and time.monotonic() < ends:
            time.sleep(0.05)
        assert {s.name: s.status for s in mine.summaries()} == {"a": "unreadable", "b": "finished"}
    with mine.open("a") as run:
        assert run.last == 4
    mine.close()


def test_what_does_not_answer_keeps_one_thread_for_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "a")
    make(tmp_path / "b")
    mine = shelf.Shelf(tmp_path, most=1)

    def waiting() -> int:
        return sum(t.name == "richter look" for t in threading.enumerate())

    with stuck(monkeypatch, "a"):
        for _ in range(5):
            with pytest.raises(StoreError, match=r"'a' cannot be looked at: its file system has not answered"), mine.open("a"):
                pass
            with pytest.raises(StoreError, match="has not answered"):
                mine.mark("a")
            with mine.open("b") as run:
                assert run.last == 4
        assert waiting() == 1
    with mine.open("a") as run:
        assert run.last == 4
    assert waiting() == 0
    mine.close()


@pytest.mark.parametrize("harm", ["damaged", "linked", "piped"])
def test_an_unreadable_run_is_read_again_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str) -> None:
    monkeypatch.setattr(listing, "SETTLED", 0.0)
    monkeypatch.setattr(listing, "FIRST", 60.0)
    monkeypatch.setattr(listing, "OFTEN", 0.0)
    make(tmp_path / "a")
    database = tmp_path / "a" / "run.db"
    whole = database.read_bytes()
    if harm == "damaged":
        database.write_bytes(b"nothing of use" * 100)
    elif harm == "linked":
        (tmp_path / "a" / "run.db-wal").symlink_to(database)
    else:
        os.mkfifo(tmp_path / "a" / "run.db-journal")
    mine, opened, real = shelf.Shelf(tmp_path), list[str](), Run.__init__

    def init(self: Run, path: Path) -> None:
        opened.append(Path(path).name)
        real(self, path)

    monkeypatch.setattr(Run, "__init__", init)
    for _ in range(5):
        assert [line.status for line in mine.summaries()] == ["unreadable"]
    assert opened == ["a"]
    if harm == "damaged":
        database.write_bytes(whole)
    else:
        (tmp_path / "a" / ("run.db-wal" if harm == "linked" else "run.db-journal")).unlink()
    ends = time.monotonic() + 20
    while [line.status for line in mine.summaries()] != ["finished"] and time.monotonic() < ends:
        time.sleep(0.05)
    assert [line.status for line in mine.summaries()] == ["finished"]
    assert opened == ["a", "a"]
    mine.close()


def test_a_run_that_was_cut_is_no_longer_shown_as_it_was(tmp_path: Path) -> None:
    make(tmp_path / "a")
    c, ask = client(tmp_path), {"run": "a", "measure": "nfc", "layer": "0"}
    assert len(c.get("/api/curves", params=ask).json()["curves"][0]["step"]) == 5
    os.truncate(tmp_path / "a" / "run.db", 4096)
    reply = c.get("/api/curves", params=ask)
    assert reply.status_code == 404
    assert "could not be read" in reply.json()["error"]


def test_a_run_that_cannot_be_opened_is_opened_later(tmp_path: Path) -> None:
    make(tmp_path / "a")
    whole = (tmp_path / "a" / "run.db").read_bytes()
    (tmp_path / "a" / "run.db").write_bytes(b"nothing of use" * 100)
    mine = shelf.Shelf(tmp_path)
    for _ in range(2):
        with pytest.raises(StoreError), mine.open("a"):
            pass
    (tmp_path / "a" / "run.db").write_bytes(whole)
    with mine.open("a") as run:
        assert run.last == 4
    with create(tmp_path / "other"):
        pass
    mine.close()


def test_hundreds_of_curves_in_one_panel_are_few_traces(many: Path, browser: Browser) -> None:
    """Each keeps its points and its line in the tooltip; a change of the axis takes no time that one would notice."""
    from selenium.webdriver import ActionChains
    with serving(many) as address:
        browser.open(f"{address}#linx&" + "&".join(f"run=r{i}" for i in range(200)))
        plot = "document.querySelector('[data-panel=nfc] .plot')"
        browser.until(f"{plot}?.data?.length", 60)
        traces = browser.run(f"return {plot}.data.map(t => [t.x.length, t.x.filter(v => v === null).length])")
        assert 10 < len(traces) <= 30
        assert sum(gaps for _, gaps in traces) == 400  # of two layers
        assert sum(n - gaps for n, gaps in traces) == 2000  # of five steps
        middle = browser.until("document.querySelector('[data-panel=nfc] .nsewdrag')")
        ActionChains(browser.driver).move_to_element(middle).perform()
        browser.until("!document.getElementById('tip').hidden")
        assert re.search(r"step 2\s[\s\S]*r\d+ · [02]\s+0\.00", browser.run("return document.getElementById('tip').innerText"))
        range_of = f"{plot}.layout.xaxis.range.join()"
        browser.run(f"""window.asked = []; window.made = {plot}.data; window.before = {range_of};
            const real = window.fetch; window.fetch = (url, ...more) => {{ asked.push(String(url)); return real(url, ...more); }};
            document.querySelector('[data-panel=nfc]').dispatchEvent(new KeyboardEvent('keydown', {{ key: '+' }}));""")
        browser.until(f"{range_of} !== window.before")
        assert browser.run("return location.hash.includes('&x=')")
        asked = browser.run("return window.asked")
        assert not [url for url in asked if "api/runs" not in url], asked  # a poll may fall between
        assert browser.run(f"return {plot}.data === window.made")
        browser.open("about:blank")  # before the server ends


# ---------------------------------------------------------------------------------------------- a small file, much memory


def zeros(number: int) -> bytes:
    """Deflated."""
    stream = zlib.compressobj(1)
    parts = [2 ** 24] * (number // 2 ** 24) + [number % 2 ** 24]
    return b"".join([stream.compress(bytes(part)) for part in parts]) + stream.flush()


def test_a_small_run_that_unpacks_to_gigabytes_is_shown_without_them(tmp_path: Path) -> None:
    """In a process that may have two: matrices of zeros, a gigabyte each, in a file of some megabytes."""
    make(tmp_path / "store" / "large")
    large = arrays.Encoded("zlib", "<f4", (16_000, 16_000), zeros(4 * 16_000 ** 2))
    names = (("nfm", "0"), ("agop", "0"), ("ksm", "0"), ("feature_gram", "0"), ("features", "*"), ("inputs", "*"))
    wide = arrays.Encoded("zlib", "<f8", (3, 2 ** 24 // 3), zeros(24 * (2 ** 24 // 3)))  # each may be shown, and all are too many
    square = arrays.Encoded("zlib", "<f8", (1024, 1024), zeros(8 * 1024 ** 2))
    make(tmp_path / "store" / "many")
    for name, stored in (("large", [(layer, name, 9, large) for name, layer in names]),
                         ("many", [*(("*", "features", step, wide) for step in range(20)),
                                   *((str(i), "feature_gram", step, square) for i in range(33) for step in (0, 9))])):
        with create(tmp_path / "store" / name, resume=True) as writer, writer._transaction("written"):
            writer._put_arrays(stored)
    assert sum(f.stat().st_size for f in (tmp_path / "store").rglob("*") if f.is_file()) < 2 ** 26
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_AS, (2 ** 31, 2 ** 31))
from pathlib import Path
from starlette.testclient import TestClient
from richter.report.html import report
from richter.report.server import application
from richter.runs import Run
store = Path({str(tmp_path / 'store')!r})
c = TestClient(application(store), base_url="http://localhost")
for run, sentence in (("large", "arrays of up to 16,777,216 entries are shown"), ("many", "of up to 65,536 features")):
    text = report([Run(store / run)], store / "report.html").read_text()
    assert sentence in text, text[-3000:]
    for path in ("runs", "run", "verdict", "matrices", "curves", "features", "compare", "profiles", "settings"):
        assert c.get("/api/" + path, params=None if path == "runs" else {{"run": run}}).status_code < 500, path
assert "up to 33,554,432 are compared" in c.get("/api/compare", params={{"run": "many"}}).text
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
