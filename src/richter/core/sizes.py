"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import math
import re

from richter.core.errors import SelectionError

_UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

SMALL = 2 ** 26  # bytes: smaller arrays are not what a bound of memory is about


def parse_bytes(size: str | float) -> int:
    """``"2GiB"`` -> 2147483648; numbers are bytes."""
    if isinstance(size, (int, float)) and not isinstance(size, bool):
        number, unit = float(size), "B"
    else:
        found = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(size))
        if found is None or found[2].upper() not in _UNITS or found[1].count(".") > 1 or found[1] == ".":
            raise SelectionError(f"memory={size!r} is not a size. Write a number of bytes, or e.g. '500MB' or '2GiB'.")
        number, unit = float(found[1]), found[2].upper()
    if not (math.isfinite(number) and number > 0):
        raise SelectionError(f"memory={size!r} must be positive and finite.")
    return int(number * _UNITS[unit])


def show_bytes(size: float) -> str:
    """A size a person reads, rounded up so that it can be given back as ``memory=``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{math.ceil(size / unit * 100) / 100:.2f}{name}"
    return f"{math.ceil(size)}B"
