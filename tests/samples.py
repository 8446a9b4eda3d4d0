"""Small files of every format, packed as the sources of data sets pack them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.server
import io
import struct
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.io import savemat

from richter.tasks import store
from richter.tasks.archive import Members
from richter.tasks.clients import Package
from richter.tasks.registry import DataSet, Source

FILES = {"a.txt": b"alpha\n", "b.txt": b"beta" * 1000}
PACKED = {f"package/data/{name}": data for name, data in FILES.items()} | {
    "package/setup.py": b"raise SystemExit", "package/x": b""}


def digest_of(contents: dict[str, bytes]) -> str:
    lines = [f"{hashlib.sha256(contents[name]).hexdigest()}  ./{name}\n" for name in sorted(contents)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def package(kind: Any = "npm", **changes: Any) -> Package:
    """A source of "toy": a package of a registry."""
    given = {"registry": kind, "package": "toy-data", "version": "1.0", "inside": Members("package/data", ("*.txt",)),
             "download": 10_000}
    return Package(**(given | changes))


def toy(*sources: Source) -> DataSet:
    """A set of two small files; one source, of npm, unless others are given."""
    return DataSet("toy", "1.0", digest_of(FILES), sum(map(len, FILES.values())), "none", "nobody", sources or (package(),))


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


def left(cache: Path) -> list[str]:
    """The files in a folder and below it."""
    return sorted(str(p.relative_to(cache)) for p in cache.rglob("*") if p.is_file())


def program(folder: Path, name: str, script: str) -> None:
    """A shell script that can be run by its name."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def idx_of(array: np.ndarray) -> bytes:
    code = {"uint8": 8, "int8": 9, "int16": 11, "int32": 12, "float32": 13, "float64": 14}[array.dtype.name]
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


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


def fake(name: str, contents: dict[str, bytes]) -> None:
    """Files in the folder of a set, as if they had been fetched."""
    for file, data in contents.items():
        path = store.where(name) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    store._seen[store.where(name)] = store._stamp(store.where(name))  # and checked


class Site(http.server.SimpleHTTPRequestHandler):
    """Serves a folder and remembers what it was sent; files named "cut" end early, "endless" never."""

    requests: list[str]

    def log_message(self, *given: Any) -> None:
        self.requests.append(f"{self.path} {self.headers.get('Authorization')}")

    def do_GET(self) -> None:
        if not self.path.endswith(("cut", "endless")):
            super().do_GET()
            return
        self.send_response(200)
        if self.path.endswith("cut"):
            self.send_header("Content-Length", "5000")
        self.end_headers()
        with contextlib.suppress(OSError):  # the client hangs up
            self.wfile.write(b"beta")
            while self.path.endswith("endless"):
                self.wfile.write(b"beta" * 10_000)


@contextlib.contextmanager
def site(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve a folder on this machine: its address, which ends in /, and the requests that have come."""
    requests: list[str] = []
    handler = functools.partial(type("Handler", (Site,), {"requests": requests}), directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{web.server_port}/", requests
        web.shutdown()
