"""Files at a public web address, downloaded by pooch and verified one by one."""

from __future__ import annotations

import contextlib
import logging
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from richter.core import DataError
from richter.core.values import progress
from richter.tasks import archive, convert
from richter.tasks.archive import Members

if TYPE_CHECKING:
    from richter.tasks.registry import DataSet

_BLOCK = 1 << 18  # bytes downloaded at a time
_TIMEOUT = (10, 60)  # seconds until connected, and between two blocks


@dataclass(frozen=True)
class Web:
    """Files below an address, their digests, and their conversion to the files of the data set."""

    address: str  # ends in /
    download: int  # bytes of all files
    files: Mapping[str, str] = field(default_factory=dict)  # {name: SHA-256}; empty: the files of the set's manifest
    inside: Members | None = None  # if the only file is an archive, the members to extract
    repack: Callable[[Path, Path, int, str], None] = convert.unchanged

    @property
    def origin(self) -> str:
        """Origin for messages: the address."""
        return self.address.rstrip("/")

    def gather(self, data: DataSet, work: Path) -> Path:
        """Download the files; return the folder of the set's files, inside the folder ``work``."""
        delivered, ready = work / "delivered", work / "ready"
        with metered(data.name, self.download) as meter:
            for name, sha256 in (self.files or manifest(data.name)).items():
                retrieve(self.address + urllib.parse.quote(name), delivered / name, sha256, meter)
        if self.inside is not None:
            (packed,) = delivered.iterdir()
            archive.unpack(packed, self.inside, work / "unpacked", data.size, self.origin)
            delivered = work / "unpacked"
        self.repack(delivered, ready, data.size, self.origin)
        return ready


def manifest(name: str) -> dict[str, str]:
    """Return {path: SHA-256} of the files of a set that is downloaded file by file, as printed by ``sha256sum``."""
    lines = resources.files("richter.tasks").joinpath("manifests", f"{name}.sha256").read_text("utf-8").splitlines()
    return {path.removeprefix("./"): sha256 for sha256, path in (line.split("  ", 1) for line in lines)}


def retrieve(address: str, target: Path, sha256: str, meter: Meter, **request: Any) -> None:
    """Download one file, complete and with this digest, or raise an error and leave no file. ``request``: for
    ``requests.get``."""
    import pooch
    from requests.exceptions import RequestException
    fetch = pooch.HTTPDownloader(progressbar=meter, chunk_size=_BLOCK, timeout=_TIMEOUT, **request)
    level = pooch.get_logger().level
    pooch.get_logger().setLevel(logging.WARNING)  # otherwise it reports each file
    try:
        pooch.retrieve(address, sha256, target.name, target.parent, downloader=fetch)
    except DataError:
        raise
    except RequestException as error:
        raise DataError(f"{meter.name}: {target.name} could not be downloaded from {address} ({_reason(error)}). Is this "
                        f"machine online?") from error
    except ValueError as error:  # its message contains both digests
        raise DataError(f"{meter.name}: {target.name} is not the published file, or is damaged; nothing was kept. {error}"
                        ) from error
    except OSError as error:
        raise DataError(f"{meter.name}: {target.name} cannot be written ({error}).") from error
    finally:
        pooch.get_logger().setLevel(level)


def _reason(error: Exception) -> str:
    """Return the message of the innermost error with a name, because the outer ones repeat the address."""
    inner = getattr(error.args[0] if error.args else None, "reason", None) or error
    return f"{type(inner).__name__}: {inner}"


@contextlib.contextmanager
def metered(name: str, most: int) -> Iterator[Meter]:
    """Yield a meter for the files of one set, with its progress bar."""
    with progress(title=f"fetching {name}", total=most, unit="B", unit_scale=True) as bar:
        yield Meter(name, most, bar)


class Meter:
    """The progress bar passed to pooch: it shows the bytes of all files, and stops a download that is larger than expected."""

    def __init__(self, name: str, most: int, bar: Any) -> None:
        self.name, self.most, self._bar = name, most, bar
        self._before = self._now = 0  # bytes of the files before this one, and including it
        self._total = 0

    @property
    def total(self) -> int:
        """Note the announced size, and check it."""
        return self._total

    @total.setter
    def total(self, announced: int) -> None:
        self._total = announced
        self._check(self._before + announced)

    def update(self, more: int) -> None:
        """Count received bytes. pooch counts whole blocks, but the last one is not full."""
        self._now += more
        self._check(self._now - _BLOCK)
        self._bar.update(max(0, min(self._now, self.most) - self._bar.n))

    def reset(self) -> None:
        """Mark the file as complete: pooch counts it again, exactly, if its size was announced."""
        self._now = self._before if self._total else self._now

    def close(self) -> None:
        """Count the next file from zero."""
        self._before = self._now

    def _check(self, size: int) -> None:
        """Raise an error if a download is larger than expected."""
        if size > self.most:
            raise DataError(f"{self.name}: the download is larger than the {self.most:,} bytes expected; nothing was kept.")
